//! [`Connections`]: which agents are connected.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use ids::{AgentId, ConnectionId};
use tokio::sync::watch;

use crate::{Lease, Replica, TrackerError};

/// Lists: the open configuration streams of all replicas.
#[async_trait]
pub trait Connections: Send + Sync + 'static {
    /// Announces one open configuration stream until the lease is dropped.
    fn connection(&self, connection: Connection) -> Lease;

    /// Lists connections. Replicas that did not answer are named, so that a partial list is visible as one.
    ///
    /// # Errors
    /// [`TrackerError`] if no replica could be asked.
    ///
    /// # Cancel safety
    /// Cancel safe.
    async fn connected(&self, query: Query) -> Result<Connected, TrackerError>;

    /// Wakes when [`connected`](Self::connected) may answer differently for some query. Several changes may
    /// cause one wake-up.
    fn connection_changes(&self) -> watch::Receiver<()>;
}

/// What agentk reports of itself. It is shown and never trusted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AgentMeta {
    /// Version of agentk.
    pub version: String,
    /// Commit of agentk.
    pub commit: String,
    /// Namespace of its pod.
    pub pod_namespace: String,
    /// Name of its pod.
    pub pod_name: String,
}

/// An open configuration stream: one agentk process on one replica.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Connection {
    /// The authenticated agent.
    pub agent: AgentId,
    /// Its name in the configuration project.
    pub name: Arc<str>,
    /// Its configuration project.
    pub project_id: i64,
    /// This connection.
    pub id: ConnectionId,
    /// What agentk reports of itself.
    pub meta: AgentMeta,
    /// When the stream began, since 1970-01-01 00:00 UTC.
    pub connected_at: Duration,
}

/// Which connections to list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Query {
    /// Every connection.
    All,
    /// Those of one agent.
    Agent(AgentId),
    /// Those of the agents of one configuration project.
    Project(i64),
}

impl Query {
    /// Whether the query includes `connection`.
    pub fn matches(&self, connection: &Connection) -> bool {
        match *self {
            Self::All => true,
            Self::Agent(agent) => connection.agent == agent,
            Self::Project(project) => connection.project_id == project,
        }
    }
}

/// A connection and the replica that holds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Located {
    /// The connection.
    pub connection: Arc<Connection>,
    /// The replica that holds it.
    pub replica: Replica,
    /// Nothing shows that the replica is alive. Replicas of GitLab's kas give no sign of life, so the
    /// connections of one that was killed are listed until its entries expire.
    pub unconfirmed: bool,
}

/// A replica that should have answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unanswered {
    /// Which replica.
    pub replica: Replica,
    /// Why not, for a person.
    pub reason: String,
    /// It was not asked, because no answer is expected: the agents that it held do not count as connected any
    /// more.
    pub given_up: bool,
}

/// An answer to a [`Query`], ordered by agent and connection.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Connected {
    /// The known connections.
    pub connections: Vec<Located>,
    /// The replicas that did not answer. If there are any, the list is partial.
    pub unanswered: Vec<Unanswered>,
}

impl Connected {
    /// Sorts the connections and lists each of them once: an agentk with streams to two replicas has one
    /// connection id, and the older stream is listed.
    pub fn merge(&mut self) {
        let key = |located: &Located| (located.connection.agent, located.connection.id);
        self.connections.sort_by(|a, b| key(a).cmp(&key(b)).then_with(|| a.replica.id.cmp(&b.replica.id)));
        self.connections.dedup_by(|later, first| {
            if key(later) != key(first) {
                return false;
            }
            if later.connection.connected_at < first.connection.connected_at {
                std::mem::swap(later, first);
            }
            true
        });
        self.unanswered.sort_by(|a, b| a.replica.id.cmp(&b.replica.id));
    }
}
