//! Switches that break one rule each, to show that the checks find it.

use std::sync::Arc;

use async_trait::async_trait;
use clap::ValueEnum;
use cluster::{
    AgentView, Candidate, ClusterView, Connected, Connection, Connections, Doors, Lease, Locator, Mark,
    PeerReport, Query, Replicas, Tracker, TrackerError, TrackerStatus, Unanswered,
};
use ids::{AgentId, ReplicaId};
use kas::replicas::gossip_backend::GossipBackend;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

/// A rule to break.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
pub(crate) enum Flaw {
    /// An agent ends its tunnels cleanly when it leaves, also in the middle of a request
    CleanEnd,
    /// A replica goes on announcing agents that have left
    KeptAgents,
    /// Requests that wait are not woken when an agent comes to another replica
    LostWakeUps,
    /// A client repeats requests although they may have run
    Repeat,
}

/// The tracker of a replica, with a flaw.
struct Flawed {
    tracker: Arc<GossipBackend>,
    flaw: Flaw,
    /// For receivers that never wake.
    asleep: watch::Sender<()>,
}

/// Returns the tracker as the router and the registry see it.
pub(crate) fn tracker(tracker: Arc<GossipBackend>, flaw: Option<Flaw>) -> Arc<dyn Tracker> {
    match flaw {
        Some(flaw @ (Flaw::KeptAgents | Flaw::LostWakeUps)) => {
            Arc::new(Flawed { tracker, flaw, asleep: watch::Sender::new(()) })
        }
        None | Some(Flaw::CleanEnd | Flaw::Repeat) => tracker,
    }
}

#[async_trait]
impl Locator for Flawed {
    fn route(&self, agent: AgentId, methods: Arc<[Box<str>]>) -> Lease {
        let lease = self.tracker.route(agent, methods);
        if self.flaw == Flaw::KeptAgents {
            std::mem::forget(lease);
            return Lease::new(|| {});
        }
        lease
    }

    async fn locate(&self, agent: AgentId) -> Result<Vec<Candidate>, TrackerError> {
        self.tracker.locate(agent).await
    }

    fn changes(&self, agent: AgentId) -> watch::Receiver<()> {
        if self.flaw == Flaw::LostWakeUps { self.asleep.subscribe() } else { self.tracker.changes(agent) }
    }

    fn mark(&self) -> Mark {
        self.tracker.mark()
    }

    fn not_here(&self, replica: &ReplicaId, agent: AgentId, mark: Mark) {
        self.tracker.not_here(replica, agent, mark);
    }
}

#[async_trait]
impl Connections for Flawed {
    fn connection(&self, connection: Connection) -> Lease {
        self.tracker.connection(connection)
    }

    async fn connected(&self, query: Query) -> Result<Connected, TrackerError> {
        self.tracker.connected(query).await
    }

    fn connection_changes(&self) -> watch::Receiver<()> {
        self.tracker.connection_changes()
    }
}

#[async_trait]
impl ClusterView for Flawed {
    fn live(&self) -> watch::Receiver<usize> {
        self.tracker.live()
    }

    async fn replicas(&self) -> Replicas {
        self.tracker.replicas().await
    }

    fn doors(&self, replica: &ReplicaId) -> Doors {
        self.tracker.doors(replica)
    }

    fn status(&self) -> TrackerStatus {
        self.tracker.status()
    }

    fn views(&self, agent: AgentId) -> Vec<AgentView> {
        self.tracker.views(agent)
    }

    async fn peer_reports(&self, agent: Option<AgentId>) -> (Vec<PeerReport>, Vec<Unanswered>) {
        self.tracker.peer_reports(agent).await
    }
}
