//! [`Reachability`]: whether other processes reach this one.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

/// Evidence that other processes reach this one, by datagrams or by connections of the user, and whether this
/// process is silent for lack of it.
#[derive(Debug, Default)]
pub(crate) struct Reachability {
    /// Accepted datagrams, and calls of [`Gossip::reached`](crate::Gossip::reached).
    signs: AtomicU64,
    /// Open connections of the user on which a peer answers.
    holds: AtomicUsize,
    /// Whether the transport withholds what chitchat sends.
    silent: AtomicBool,
}

impl Reachability {
    /// Notes one sign. A silent process speaks again at once: what it heard may need an answer.
    pub(crate) fn sign(&self) {
        self.signs.fetch_add(1, Ordering::Relaxed);
        self.silent.store(false, Ordering::Relaxed);
    }

    pub(crate) fn hold(&self) {
        self.holds.fetch_add(1, Ordering::Relaxed);
        self.sign();
    }

    pub(crate) fn release(&self) {
        self.holds.fetch_sub(1, Ordering::Relaxed);
    }

    /// Returns how many signs there were.
    pub(crate) fn signs(&self) -> u64 {
        self.signs.load(Ordering::Relaxed)
    }

    /// Whether there is a connection on which a peer answers.
    pub(crate) fn is_held(&self) -> bool {
        self.holds.load(Ordering::Relaxed) > 0
    }

    /// Makes this process silent or not; returns whether it was silent before.
    pub(crate) fn set_silent(&self, silent: bool) -> bool {
        self.silent.swap(silent, Ordering::Relaxed)
    }

    pub(crate) fn is_silent(&self) -> bool {
        self.silent.load(Ordering::Relaxed)
    }
}
