//! What the user sees: the live members, and whether any other process is heard.

use std::{
    collections::BTreeMap,
    fmt,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::time::Instant;

/// When a heartbeat last advanced. The gossip thread and every [`Member`] of the incarnation share it, so
/// that it advances without a new list.
pub(crate) struct Heard {
    origin: Instant,
    /// Microseconds after `origin`.
    micros: AtomicU64,
}

impl Heard {
    pub(crate) fn new(now: Instant) -> Arc<Self> {
        Arc::new(Self { origin: now, micros: AtomicU64::new(0) })
    }

    pub(crate) fn at(&self, now: Instant) {
        let micros = now.saturating_duration_since(self.origin).as_micros();
        self.micros.store(u64::try_from(micros).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    pub(crate) fn last(&self) -> Instant {
        self.origin + Duration::from_micros(self.micros.load(Ordering::Relaxed))
    }
}

/// Another live process of the mesh.
pub struct Member {
    pub(crate) node_id: Arc<str>,
    pub(crate) generation: u64,
    pub(crate) address: SocketAddr,
    pub(crate) values: BTreeMap<Arc<str>, Arc<str>>,
    pub(crate) heard: Arc<Heard>,
}

impl Member {
    /// Returns its node id.
    pub fn node_id(&self) -> &Arc<str> {
        &self.node_id
    }

    /// Returns when its incarnation began, in microseconds since 1970. It never decreases for a node id.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Returns the address of its gossip.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns its published values. They are empty for a moment after it was first heard.
    pub fn values(&self) -> &BTreeMap<Arc<str>, Arc<str>> {
        &self.values
    }

    /// Returns one published value.
    pub fn value(&self, key: &str) -> Option<&str> {
        self.values.get(key).map(AsRef::as_ref)
    }

    /// Returns when its heartbeat last advanced as seen from here, directly or through others. This proves
    /// that its gossip thread was alive then, with the precision of one interval. It advances in every clone
    /// of the list and wakes no watcher.
    pub fn heard(&self) -> Instant {
        self.heard.last()
    }
}

impl fmt::Debug for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}@{} {:?}", self.node_id, self.generation, self.address, self.values)
    }
}

/// The live members other than this process, by node id. Of each node id only the newest generation.
///
/// A process that exceeds phi counts as dead and is absent: there is no third state to handle.
#[derive(Debug, Clone, Default)]
pub struct Members(pub(crate) BTreeMap<Arc<str>, Arc<Member>>);

impl Members {
    /// Returns the member with this node id.
    pub fn member(&self, node_id: &str) -> Option<&Arc<Member>> {
        self.0.get(node_id)
    }

    /// Iterates in the order of node ids.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &Arc<Member>> {
        self.0.values()
    }

    /// Returns the number of members.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether no other process is live.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Whether any other process is heard.
///
/// A change of the seeds switches between `Alone` and `Seeking`. `Seeking` becomes `Lonely` after a while.
/// The first member changes each of them to `Meshed`; the loss of the last member changes `Meshed` to `Alone`
/// or `Seeking`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// There is no seed besides this process, and no member is heard.
    Alone,
    /// There are seeds, and no member was heard yet, or none for less than the longer of 5 s and 10
    /// intervals.
    Seeking,
    /// The same for longer: datagrams are blocked in one direction or both, or the keys or the cluster names
    /// differ.
    Lonely {
        /// When the last member was lost, or when the search began.
        since: Instant,
    },
    /// Others are live.
    Meshed {
        /// How many members; at least 1.
        peers: usize,
    },
}
