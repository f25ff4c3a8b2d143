//! [`ClusterView`]: the other replicas and the state of the tracker, for people.

use std::time::Duration;

use async_trait::async_trait;
use ids::{AgentId, ReplicaId};
use tokio::sync::watch;

use crate::{Doors, Mark, Replica, ReplicaHealth, ReplicaState, Unanswered, Wire};

/// Status: how many replicas there are, how they are, and what each of them knows.
#[async_trait]
pub trait ClusterView: Send + Sync + 'static {
    /// Counts the live replicas, including this one. Changes wake the receiver.
    fn live(&self) -> watch::Receiver<usize>;

    /// Describes every known replica, this one first.
    ///
    /// # Cancel safety
    /// Cancel safe.
    async fn replicas(&self) -> Replicas;

    /// Returns where callers reach a replica that is live and ready. Empty: it is not, it does not tell, or
    /// it is of a version that cannot tell.
    fn doors(&self, _replica: &ReplicaId) -> Doors {
        Doors::default()
    }

    /// Describes the state of the tracker, for a person.
    fn status(&self) -> TrackerStatus;

    /// Returns what this replica knows of an agent on each other replica, and why, for a person.
    fn views(&self, agent: AgentId) -> Vec<AgentView>;

    /// Asks each other replica for a report on itself and, if one is given, on an agent.
    ///
    /// # Cancel safety
    /// Cancel safe.
    async fn peer_reports(&self, _agent: Option<AgentId>) -> (Vec<PeerReport>, Vec<Unanswered>) {
        (Vec::new(), Vec::new())
    }
}

/// What is known of a replica, for a person.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplicaStatus {
    /// Which replica.
    pub replica: Replica,
    /// Version and commit; empty if not known.
    pub build: (String, String),
    /// What it announces of itself.
    pub state: ReplicaState,
    /// How healthy it looks from here; `None` for this replica.
    pub health: Option<ReplicaHealth>,
    /// Generation of its gossip; 0 if it has none, or has not told of this process yet.
    pub generation: u64,
    /// The position of its announcements, as known here.
    pub mark: Mark,
    /// How many agents it announces.
    pub agents: u64,
    /// Whether what is known of its agents is complete.
    pub synced: bool,
    /// Time since its last sign of life; `None` for this replica.
    pub heard: Option<Duration>,
}

impl ReplicaStatus {
    /// Returns the value of the API's field `standing`: `self` for this replica, otherwise the health.
    pub fn standing(&self) -> &'static str {
        self.health.map_or("self", ReplicaHealth::as_str)
    }

    /// Whether it is another replica that does not take part any more.
    pub fn is_lost(&self) -> bool {
        self.health.is_some_and(|health| !health.is_asked())
    }
}

/// The state of a tracker.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TrackerStatus {
    /// `memory`, `gossip` or `redis`.
    pub backend: &'static str,
    /// How long the store took for its last answer; `None` if there is no store or it has never answered.
    pub latency: Option<Duration>,
    /// Agents that this replica announces.
    pub agents: u64,
    /// Entries that it keeps in the store for them.
    pub entries: u64,
    /// Changes that the store does not have yet.
    pub unwritten: u64,
    /// For how long there have been such changes; `None` if there are none.
    pub lag: Option<Duration>,
    /// Agents whose holders are cached.
    pub remembered: u64,
    /// What failed last and how long ago; it may be over.
    pub last_error: Option<(String, Duration)>,
}

/// Every known replica.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Replicas {
    /// This one first.
    pub replicas: Vec<ReplicaStatus>,
    /// Problems with how they find each other, for a person.
    pub alarms: Vec<String>,
    /// How their health changed, the oldest first; only the last few changes.
    pub events: Vec<ReplicaEvent>,
}

/// One change in the health or state of a replica, as seen from here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplicaEvent {
    /// When, since 1970-01-01 00:00 UTC.
    pub at: Duration,
    /// Which replica.
    pub replica: ReplicaId,
    /// What it became; `None` if it is not known any more.
    pub now: Option<(ReplicaHealth, ReplicaState)>,
}

impl ReplicaEvent {
    /// Returns the word of the health; empty if the replica is not known any more.
    pub fn standing(&self) -> &'static str {
        self.now.map_or("", |(health, _)| health.as_str())
    }

    /// Returns the word of the state; empty if the replica is not known any more.
    pub fn state(&self) -> &'static str {
        self.now.map_or("", |(_, state)| state.as_str())
    }
}

/// The load of a replica.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// Requests that have ended since it started.
    pub ended: u64,
    /// Open requests, including those that wait.
    pub open: u64,
    /// Requests that wait for a tunnel.
    pub waiting: u64,
}

/// Tunnels of an agent that are occupied by requests whose callers have left.
///
/// GitLab's agentk before 16 cannot cancel a request. It occupies its tunnel until the API server ends the
/// response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Abandoned {
    /// How many tunnels; at least one.
    pub tunnels: u32,
    /// How long ago the last of the callers left.
    pub since: Duration,
}

/// What a replica reports of itself and of an agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerReport {
    /// Which replica reports.
    pub replica: Replica,
    /// Tunnels that it holds.
    pub tunnels: u64,
    /// Its load; `None` if its version does not report it.
    pub load: Option<Load>,
    /// Tunnels of the agent that wait for a request there.
    pub idle: u32,
    /// Tunnels of the agent that carry a request.
    pub busy: u32,
    /// Those of the busy tunnels whose callers have left, if there are any.
    pub abandoned: Option<Abandoned>,
    /// Open transport connections of the agent, with or without tunnels; 0 if its version does not report it.
    pub transports: u32,
    /// Requests that wait there for the agent.
    pub waiting: u32,
    /// What it knows of the agent on the other replicas.
    pub views: Vec<AgentView>,
    /// The last requests to the agent that its Kubernetes API endpoint refused, the newest first.
    pub refused_callers: Vec<RefusedCaller>,
}

/// A request that the Kubernetes API endpoint of a replica refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RefusedCaller {
    /// The source that its credential belongs to.
    pub source: String,
    /// The name of the caller; empty: not known.
    pub caller: String,
    /// Which rule refused it.
    pub rule: String,
    /// Why, for a person.
    pub why: String,
    /// The id of the request.
    pub request: String,
    /// How long ago.
    pub age: Duration,
}

impl PeerReport {
    /// Returns the abandoned requests if they occupy all tunnels of the agent at the replica.
    pub fn all_abandoned(&self) -> Option<Abandoned> {
        self.abandoned.filter(|abandoned| self.idle == 0 && abandoned.tunnels >= self.busy)
    }
}

/// What one replica knows of an agent on another replica.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AgentView {
    /// The other replica.
    pub replica: Replica,
    /// Whether it holds the agent.
    pub holds: bool,
    /// Why, for a person.
    pub why: String,
    /// Which private API the other replica has. One of GitLab's kas cannot be asked for a report.
    pub wire: Wire,
}
