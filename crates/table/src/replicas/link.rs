//! The state of a table stream that this replica dials.

use std::sync::Arc;

use ids::ReplicaId;
use tokio::time::Instant;

use super::StreamId;

/// The state of the table stream of a replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LinkState {
    /// Not open.
    Idle,
    /// Dialled, without a hello yet.
    Dialing,
    /// Open, with a snapshot to be received.
    Syncing,
    /// Open.
    Open,
}

#[derive(Debug, Clone)]
pub(super) enum Target {
    Peer(ReplicaId),
    Seed(Arc<str>),
}

#[derive(Debug, Clone)]
pub(super) struct Seed {
    pub(super) link: Link,
    pub(super) failures: u32,
    /// The replica that answered there last.
    pub(super) replica: Option<ReplicaId>,
}

#[derive(Debug, Clone, Copy)]
pub(super) enum Link {
    Idle { retry: Instant },
    Dialing { stream: StreamId, since: Instant, snapshot: bool },
    Open { stream: StreamId, since: Instant, heard: Instant },
}

impl Link {
    pub(super) const fn stream(self) -> Option<StreamId> {
        match self {
            Self::Idle { .. } => None,
            Self::Dialing { stream, .. } | Self::Open { stream, .. } => Some(stream),
        }
    }

    /// Whether a snapshot was requested and there is no answer yet.
    pub(super) const fn asks_snapshot(self) -> bool {
        matches!(self, Self::Dialing { snapshot: true, .. })
    }
}
