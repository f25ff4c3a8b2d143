//! What this replica knows of agents: by the identity file or GitLab, and by their connections to any
//! replica.

use std::{collections::BTreeMap, sync::Arc};

use async_trait::async_trait;
use callers::KnownAgent;
use cluster::{Connection, Query, Tracker};
use identity::{Agent, Identity};
use ids::AgentId;
use kubernetes_api::{Directory, ListedAgent};
use process::error::chain;

use crate::listener::api::connected;

/// The agents of the cluster, for the endpoint for kubectl.
pub(crate) struct AgentDirectory {
    identity: Arc<dyn Identity>,
    tracker: Arc<dyn Tracker>,
}

impl AgentDirectory {
    /// Asks `identity` for names and projects, and `tracker` for connections.
    pub(crate) fn new(identity: Arc<dyn Identity>, tracker: Arc<dyn Tracker>) -> Arc<Self> {
        Arc::new(Self { identity, tracker })
    }
}

#[async_trait]
impl Directory for AgentDirectory {
    fn known(&self, agent: AgentId) -> KnownAgent {
        match self.identity.agent(agent) {
            Some(agent) => of_identity(&agent),
            None => KnownAgent { id: agent, name: None, project_id: None },
        }
    }

    async fn find(&self, agent: AgentId) -> Option<KnownAgent> {
        let connected = match connected(&*self.tracker, Query::Agent(agent)).await {
            Ok(connected) => connected,
            Err(error) => {
                tracing::debug!(
                    agent.id = agent.get(),
                    error = chain(&error),
                    "an agent cannot be looked up"
                );
                return None;
            }
        };
        connected.connections.first().map(|located| of_connection(&located.connection))
    }

    async fn list(&self) -> Result<Vec<ListedAgent>, String> {
        let connected = connected(&*self.tracker, Query::All).await.map_err(|error| chain(&error))?;
        let known = self.identity.agents();
        let mut agents: BTreeMap<AgentId, ListedAgent> = known
            .iter()
            .map(|agent| (agent.id, ListedAgent { agent: of_identity(agent), connected: false }))
            .collect();
        for located in &connected.connections {
            let connection = &located.connection;
            agents
                .entry(connection.agent)
                .or_insert_with(|| ListedAgent { agent: of_connection(connection), connected: true })
                .connected = true;
        }
        Ok(agents.into_values().collect())
    }
}

fn of_identity(agent: &Agent) -> KnownAgent {
    KnownAgent { id: agent.id, name: Some((*agent.name).into()), project_id: Some(agent.project_id) }
}

fn of_connection(connection: &Connection) -> KnownAgent {
    KnownAgent {
        id: connection.agent,
        name: Some(Arc::clone(&connection.name)),
        project_id: Some(connection.project_id),
    }
}
