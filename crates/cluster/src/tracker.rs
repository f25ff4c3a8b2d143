//! [`Tracker`]: which replicas hold which agents.

use std::{fmt, sync::Arc, time::Duration};

use async_trait::async_trait;
use ids::{AgentId, ConnectionId, ReplicaId};
use tokio::sync::watch;

/// Soft state: which replicas hold tunnels of which agents, and who is connected.
///
/// What it says may be stale. Routing uses it as a hint, asks the owner, and believes only the
/// owner.
#[async_trait]
pub trait Tracker: Send + Sync + 'static {
    /// Announces that this replica holds a present tunnel of `agent` that serves `methods`, until
    /// the lease drops. Several leases of one agent count as one entry.
    fn route(&self, agent: AgentId, methods: Arc<[Box<str>]>) -> Lease;

    /// Announces one open configuration stream: what the list APIs show.
    fn connection(&self, connection: Connection) -> Lease;

    /// Returns the replicas to ask for a tunnel, the best first; empty means unknown, never absent.
    /// This replica is among them when it announces the agent itself.
    ///
    /// # Errors
    /// [`TrackerError`] when the store cannot be asked.
    ///
    /// # Cancel safety
    /// Cancel safe.
    async fn locate(&self, agent: AgentId) -> Result<Vec<Candidate>, TrackerError>;

    /// Where this replica's own announcements stand now. An owner says it together with "not here".
    fn mark(&self) -> Mark {
        Mark::default()
    }

    /// `replica` said that `agent` was not there when its announcements stood at `mark`:
    /// [`locate`](Self::locate) leaves it out until something newer is known of it.
    fn not_here(&self, _replica: &ReplicaId, _agent: AgentId, _mark: Mark) {}

    /// How many replicas live, this one included. Changes wake the receiver.
    fn live(&self) -> watch::Receiver<usize>;

    /// Describes every replica that is known, this one first.
    ///
    /// # Cancel safety
    /// Cancel safe.
    async fn replicas(&self) -> Replicas;

    /// Tells how the table fares, for a person.
    fn status(&self) -> TrackerStatus;

    /// What is known here of an agent on each other replica, and why; for a person.
    fn beliefs(&self, agent: AgentId) -> Vec<Belief>;

    /// Asks each other replica about itself and, if one is given, about an agent.
    ///
    /// # Cancel safety
    /// Cancel safe.
    async fn accounts(&self, _agent: Option<AgentId>) -> (Vec<Account>, Vec<Unanswered>) {
        (Vec::new(), Vec::new())
    }

    /// Wakes when [`locate`](Self::locate) may answer differently. Subscribe first, then locate:
    /// nothing is missed. However many subscribe, an agent costs one entry.
    fn changes(&self, agent: AgentId) -> watch::Receiver<()>;

    /// Lists connections; names the replicas that did not answer rather than hiding them.
    ///
    /// # Errors
    /// [`TrackerError`] when nobody could be asked.
    ///
    /// # Cancel safety
    /// Cancel safe.
    async fn connected(&self, query: Query) -> Result<Connected, TrackerError>;

    /// Wakes when [`connected`](Self::connected) may answer differently for some query. Several
    /// changes may be one wake-up.
    fn connection_changes(&self) -> watch::Receiver<()>;
}

/// Withdraws an announcement when it drops.
#[must_use = "the announcement is withdrawn when the lease drops"]
pub struct Lease(Option<Box<dyn FnOnce() + Send + Sync>>);

impl Lease {
    /// Returns a lease that runs `withdraw` when it drops.
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

/// A replica of kas.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Replica {
    /// Its name.
    pub id: ReplicaId,
    /// `host:port` of its private API; of its API listener where there is one replica.
    pub address: Arc<str>,
}

/// A replica to ask.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Which.
    pub replica: Replica,
    /// How good it is.
    pub standing: Standing,
    /// How it is asked.
    pub wire: Wire,
}

/// Which private API a replica has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Wire {
    /// That of this project.
    #[default]
    Own,
    /// That of GitLab agent 14.1. The replica's name and address are the URL that it gives for it, such as
    /// `grpc://10.0.0.1:8155`; nothing else is known of it.
    Gitlab,
}

/// How far a replica is trusted to answer, the best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Standing {
    /// Nothing speaks against it.
    Live,
    /// It leaves soon: asked after the others.
    Draining,
    /// It may be gone: asked last, and not waited for.
    Suspect,
}

impl Standing {
    /// Returns the word for people and programs.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Live => "live",
            Self::Draining => "draining",
            Self::Suspect => "suspect",
        }
    }
}

/// Where the announcements of a replica stand: later ones have a higher version, another process of
/// the same name another epoch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Mark {
    /// Drawn once per process.
    pub epoch: u64,
    /// Counted with each change.
    pub version: u64,
}

/// What is known of a replica, for a person.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplicaStatus {
    /// Which.
    pub replica: Replica,
    /// Version and commit; empty when not known.
    pub build: (String, String),
    /// What it says of itself: `starting`, `ready`, `draining`, `left`, `hung`.
    pub state: String,
    /// How it is judged here: `self`, `live`, `draining`, `suspect`, `unreachable`, `gone`.
    pub standing: String,
    /// Of its gossip; 0: none.
    pub generation: u64,
    /// Where its announcements stand, as known here.
    pub mark: Mark,
    /// Agents that it announces.
    pub agents: u64,
    /// Whether what is known of its agents is complete.
    pub synced: bool,
    /// Since its last sign of life; `None`: this replica.
    pub heard: Option<Duration>,
}

/// How a table fares.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TrackerStatus {
    /// `memory`, `gossip` or `redis`.
    pub backend: &'static str,
    /// How long the store took to answer last; `None`: there is none, or it never did.
    pub latency: Option<Duration>,
    /// Agents that this replica announces.
    pub agents: u64,
    /// What it keeps in the store for that.
    pub entries: u64,
    /// Changes that the store does not have yet.
    pub unwritten: u64,
    /// For how long there have been such changes; `None`: there are none.
    pub lag: Option<Duration>,
    /// Agents of which it is remembered who holds them.
    pub remembered: u64,
    /// What failed last, even if it is over, and how long ago that was.
    pub last_error: Option<(String, Duration)>,
}

/// Every replica that is known.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Replicas {
    /// This one first.
    pub replicas: Vec<ReplicaStatus>,
    /// What is wrong with how they find each other, for a person.
    pub alarms: Vec<String>,
    /// How their standing changed, the oldest first; only the last few.
    pub events: Vec<ReplicaEvent>,
}

/// One change in how a replica is judged here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplicaEvent {
    /// When, since 1970-01-01 00:00 UTC.
    pub at: Duration,
    /// Which replica.
    pub replica: ReplicaId,
    /// As in [`ReplicaStatus`]; empty: it is not known any more.
    pub standing: String,
    /// As in [`ReplicaStatus`].
    pub state: String,
}

/// What a replica has to do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// Requests that have ended since it started.
    pub ended: u64,
    /// Requests that are open, those that wait among them.
    pub open: u64,
    /// Requests that wait for a tunnel.
    pub waiting: u64,
}

/// What a replica tells of itself and of an agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Account {
    /// Who tells.
    pub replica: Replica,
    /// Tunnels that it holds.
    pub tunnels: u64,
    /// What it has to do; `None`: its version does not tell.
    pub load: Option<Load>,
    /// Tunnels of the agent that wait for a request there.
    pub idle: u32,
    /// Tunnels of the agent that carry one.
    pub busy: u32,
    /// Requests that wait there for the agent.
    pub waiting: u32,
    /// What it believes of the others.
    pub beliefs: Vec<Belief>,
}

/// What is believed of an agent on another replica.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Belief {
    /// The other replica.
    pub replica: Replica,
    /// Whether it holds the agent.
    pub holds: bool,
    /// Why, for a person.
    pub why: String,
}

/// What agentk says of itself. Shown, never trusted.
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
    /// What agentk says of itself.
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
    /// Whether `connection` is asked for.
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
    /// Who holds it.
    pub replica: Replica,
}

/// A replica that should have answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unanswered {
    /// Which.
    pub replica: Replica,
    /// Why not, for a person.
    pub reason: String,
    /// It was not asked, since nobody expects an answer: what it held is no longer taken for connected.
    pub given_up: bool,
}

/// An answer to a [`Query`], ordered by agent and connection.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Connected {
    /// What is known.
    pub connections: Vec<Located>,
    /// Who did not answer: when not empty, the list is partial.
    pub unanswered: Vec<Unanswered>,
}

/// Why a tracker could not answer. The request goes on with what this replica knows itself.
#[derive(Debug, thiserror::Error)]
pub enum TrackerError {
    /// The store cannot be reached; names it for the operator.
    #[error("{backend} cannot be asked")]
    Unavailable {
        /// Which store.
        backend: &'static str,
        /// Why.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}
