//! Counters of the transport and the gossip thread. The caller exports them.

use std::sync::atomic::{AtomicU64, Ordering};

/// Why a received datagram was dropped. Each reason has a counter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reason {
    /// Too short for its frame, or a field has a value that no valid sender writes.
    Truncated,
    /// Longer than the longest frame.
    Oversize,
    /// An unknown frame version, or the tag of another cluster.
    Foreign,
    /// Our cluster, sealed with a key that is not in the ring: a key rotation has missed a process.
    UnknownKey,
    /// The seal is invalid: the datagram was altered, or its sender does not have the key.
    Forged,
    /// Seen before, or older than the replay window.
    Replayed,
    /// Validly sealed, but it does not prove that its sender has heard this process: the first datagram of a
    /// new peer, or a recording. The sender is sent a hello and tries again.
    Unproven,
    /// From an older incarnation than the one already heard under the same salt.
    Stale,
    /// From a generation more than a day ahead of our clock.
    Future,
    /// Our own datagram came back.
    FromSelf,
    /// Validly sealed, but chitchat cannot decode it: the peer has another version, or misbehaves.
    Undecodable,
}

impl Reason {
    /// Every reason, in the order of the checks.
    pub const ALL: [Self; 11] = [
        Self::Truncated,
        Self::Oversize,
        Self::Foreign,
        Self::UnknownKey,
        Self::FromSelf,
        Self::Future,
        Self::Stale,
        Self::Replayed,
        Self::Forged,
        Self::Unproven,
        Self::Undecodable,
    ];

    /// Returns the name for a metric label.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Truncated => "truncated",
            Self::Oversize => "oversize",
            Self::Foreign => "foreign",
            Self::UnknownKey => "unknown_key",
            Self::Forged => "forged",
            Self::Replayed => "replayed",
            Self::Unproven => "unproven",
            Self::Stale => "stale",
            Self::Future => "future",
            Self::FromSelf => "from_self",
            Self::Undecodable => "undecodable",
        }
    }
}

/// Why the gossip task was restarted, each time with a new generation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Restart {
    /// It panicked or returned.
    Ended,
    /// It made no round for several seconds.
    Frozen,
    /// Peers know this node id with a higher generation: the clock was set back, or two processes share the
    /// id.
    Overtaken,
}

impl Restart {
    /// Every cause.
    pub const ALL: [Self; 3] = [Self::Ended, Self::Frozen, Self::Overtaken];

    /// Returns the name for a metric label.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ended => "ended",
            Self::Frozen => "frozen",
            Self::Overtaken => "overtaken",
        }
    }
}

/// A counter that only grows.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Returns the count since the start.
    pub fn count(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    pub(crate) fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }
}

/// Counts since the start; restarts of the gossip task do not reset them.
#[derive(Debug, Default)]
pub struct Counters {
    /// Datagrams that were sent.
    pub sent: Counter,
    /// Bytes of those, without IP and UDP headers.
    pub sent_bytes: Counter,
    /// Datagrams that the network refused (unreachable, buffer full).
    pub send_failed: Counter,
    /// Datagrams that were received, valid or not.
    pub received: Counter,
    /// Bytes of those, without IP and UDP headers.
    pub received_bytes: Counter,
    /// Hellos that were sent in answer to unproven datagrams.
    pub greeted: Counter,
    /// Messages that were withheld while no other process reached this one; see
    /// [`crate::Builder::silence_if_deaf`].
    pub withheld: Counter,
    /// Members that were ignored because their generation is more than a day ahead of our clock.
    pub implausible: Counter,
    /// Values of members that were ignored because `publish` would have refused them.
    pub unfit: Counter,
    incarnations: AtomicU64,
    dropped: [Counter; Reason::ALL.len()],
    restarts: [Counter; Restart::ALL.len()],
}

impl Counters {
    /// Returns how many datagrams were dropped for `reason`.
    pub fn dropped(&self, reason: Reason) -> u64 {
        self.dropped[reason as usize].count()
    }

    /// Returns how often the gossip task was restarted because of `cause`.
    pub fn restarts(&self, cause: Restart) -> u64 {
        self.restarts[cause as usize].count()
    }

    /// Returns how many other incarnations are remembered now, including dead ones. Every digest names all of
    /// them; beyond some thousands it would outgrow a message. See [`crate::Timing::dead_grace`].
    pub fn incarnations(&self) -> u64 {
        self.incarnations.load(Ordering::Relaxed)
    }

    pub(crate) fn remember(&self, incarnations: usize) {
        self.incarnations.store(incarnations as u64, Ordering::Relaxed);
    }

    pub(crate) fn drop_for(&self, reason: Reason) {
        self.dropped[reason as usize].add(1);
    }

    pub(crate) fn restart_for(&self, cause: Restart) {
        self.restarts[cause as usize].add(1);
    }
}
