//! [`State`]: what the handle and the gossip thread share.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;

use crate::{publish::Values, reachability::Reachability};

/// What the handle and the gossip thread share.
#[derive(Default)]
pub(crate) struct State {
    published: Mutex<Published>,
    /// Wakes the gossip thread after a publish.
    pub(crate) news: Notify,
    heartbeats: AtomicU64,
    generation: AtomicU64,
    pub(crate) reachability: Arc<Reachability>,
}

/// The values that this process publishes.
#[derive(Default)]
pub(crate) struct Published {
    pub(crate) values: Values,
    /// Incremented with each change of `values`.
    pub(crate) revision: u64,
}

impl State {
    pub(crate) fn published(&self) -> MutexGuard<'_, Published> {
        self.published.lock()
    }

    /// Counts a heartbeat of the main runtime.
    pub(crate) fn beat(&self) {
        self.heartbeats.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn heartbeats(&self) -> u64 {
        self.heartbeats.load(Ordering::Relaxed)
    }

    pub(crate) fn set_generation(&self, generation: u64) {
        self.generation.store(generation, Ordering::Relaxed);
    }

    pub(crate) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Relaxed)
    }
}
