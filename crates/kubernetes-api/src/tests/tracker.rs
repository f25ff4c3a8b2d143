//! A tracker whose store is away.

use std::sync::Arc;

use async_trait::async_trait;
use callers::AgentId;
use cluster::{
    AgentView, Candidate, ClusterView, Connected, Connection, Connections, InMemoryTracker, Lease, Locator,
    Query, Replicas, TrackerError, TrackerStatus,
};
use tokio::sync::watch;

/// Cannot tell where agents are.
pub(super) struct Away(pub(super) Arc<InMemoryTracker>);

fn away() -> TrackerError {
    TrackerError::Unavailable { backend: "the store", source: "it is away".into() }
}

#[async_trait]
impl Locator for Away {
    fn route(&self, agent: AgentId, methods: Arc<[Box<str>]>) -> Lease {
        self.0.route(agent, methods)
    }

    async fn locate(&self, _agent: AgentId) -> Result<Vec<Candidate>, TrackerError> {
        Err(away())
    }

    fn changes(&self, agent: AgentId) -> watch::Receiver<()> {
        self.0.changes(agent)
    }
}

#[async_trait]
impl Connections for Away {
    fn connection(&self, connection: Connection) -> Lease {
        self.0.connection(connection)
    }

    async fn connected(&self, _query: Query) -> Result<Connected, TrackerError> {
        Err(away())
    }

    fn connection_changes(&self) -> watch::Receiver<()> {
        self.0.connection_changes()
    }
}

#[async_trait]
impl ClusterView for Away {
    fn live(&self) -> watch::Receiver<usize> {
        self.0.live()
    }

    async fn replicas(&self) -> Replicas {
        self.0.replicas().await
    }

    fn status(&self) -> TrackerStatus {
        self.0.status()
    }

    fn views(&self, agent: AgentId) -> Vec<AgentView> {
        self.0.views(agent)
    }
}
