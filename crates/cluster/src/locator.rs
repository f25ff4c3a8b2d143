//! [`Locator`]: which replicas to ask for an agent.

use std::{fmt, sync::Arc};

use async_trait::async_trait;
use ids::{AgentId, ReplicaId};
use tokio::sync::watch;

use crate::{Replica, ReplicaHealth, TrackerError};

/// Routing: which replicas hold tunnels of which agents.
#[async_trait]
pub trait Locator: Send + Sync + 'static {
    /// Announces that this replica holds a tunnel of `agent` that serves `methods`, until the lease is
    /// dropped. Several leases of one agent count as one entry.
    fn route(&self, agent: AgentId, methods: Arc<[Box<str>]>) -> Lease;

    /// Returns the replicas to ask for a tunnel, the best first. An empty list means unknown, never absent.
    /// This replica is in the list if it announces the agent itself.
    ///
    /// # Errors
    /// [`TrackerError`] if the store cannot be asked.
    ///
    /// # Cancel safety
    /// Cancel safe.
    async fn locate(&self, agent: AgentId) -> Result<Vec<Candidate>, TrackerError>;

    /// Wakes when [`locate`](Self::locate) may answer differently. Subscribe first, then locate, so that no
    /// change is missed. All subscribers of an agent share one entry.
    fn changes(&self, agent: AgentId) -> watch::Receiver<()>;

    /// Returns the position of this replica's own announcements. An owner sends it together with "not here".
    fn mark(&self) -> Mark {
        Mark::default()
    }

    /// Notes that `replica` answered that `agent` was not there when its announcements were at `mark`.
    /// [`locate`](Self::locate) leaves the replica out until something newer is known.
    fn not_here(&self, _replica: &ReplicaId, _agent: AgentId, _mark: Mark) {}
}

/// A replica to ask.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Which replica.
    pub replica: Replica,
    /// How healthy it is; one that [is asked](ReplicaHealth::is_asked).
    pub health: ReplicaHealth,
    /// Which private API it has.
    pub wire: Wire,
}

/// Which private API a replica has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Wire {
    /// That of this project.
    #[default]
    Own,
    /// That of GitLab agent 14.1. The replica's name and address are its URL, such as `grpc://10.0.0.1:8155`.
    /// Nothing else is known of it.
    Gitlab,
}

/// The position of a replica's announcements: later announcements have a higher version, another process of
/// the same name has another epoch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Mark {
    /// Drawn once per process.
    pub epoch: u64,
    /// Incremented with each change.
    pub version: u64,
}

/// Withdraws an announcement when it is dropped.
#[must_use = "the announcement is withdrawn when the lease is dropped"]
pub struct Lease(Option<Box<dyn FnOnce() + Send + Sync>>);

impl Lease {
    /// Returns a lease that runs `withdraw` when it is dropped.
    pub fn new(withdraw: impl FnOnce() + Send + Sync + 'static) -> Self {
        Self(Some(Box::new(withdraw)))
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Lease")
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if let Some(withdraw) = self.0.take() {
            withdraw();
        }
    }
}
