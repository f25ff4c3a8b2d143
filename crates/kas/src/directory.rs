//! What this replica knows of agents: by the identity file or GitLab, and by their connections to any
//! replica.

use std::{collections::BTreeMap, sync::Arc};

use async_trait::async_trait;
use callers::{Agents, KnownAgent};
use cluster::{Connected, Connection, Query, Tracker};
use identity::{Agent, Identity};
use ids::AgentId;
use kubernetes_api::{Directory, ListedAgent};
use process::error::chain;
use tokio::sync::watch;

use crate::connected::connected;

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
impl Agents for AgentDirectory {
    fn known(&self, agent: AgentId) -> KnownAgent {
        match self.identity.agent(agent) {
            Some(agent) => of_identity(&agent),
            None => KnownAgent::unknown(agent),
        }
    }

    async fn find(&self, agent: AgentId) -> Result<Option<KnownAgent>, String> {
        let found = connected(&*self.tracker, Query::Agent(agent)).await.map_err(|error| chain(&error))?;
        first(&found)
    }

    fn changes(&self) -> watch::Receiver<u64> {
        self.identity.changes()
    }
}

#[async_trait]
impl Directory for AgentDirectory {
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

/// Returns the agent that was asked for; `None`: it is not connected.
///
/// # Errors
/// If that is not certain, because a replica did not answer.
fn first(found: &Connected) -> Result<Option<KnownAgent>, String> {
    let missing = found.unanswered.iter().find(|missing| !missing.given_up);
    match (found.connections.first(), missing) {
        (Some(located), _) => Ok(Some(of_connection(&located.connection))),
        // The agent may be connected to that one.
        (None, Some(missing)) => {
            Err(format!("the replica {} did not answer: {}", missing.replica.id, missing.reason))
        }
        (None, None) => Ok(None),
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

#[cfg(test)]
mod tests {
    use cluster::{Replica, Unanswered};
    use ids::ReplicaId;

    use super::*;

    #[test]
    fn an_agent_is_only_absent_if_all_replicas_have_answered() {
        let silent = |given_up| {
            let replica = Replica { id: ReplicaId::new("b"), address: "b".into() };
            let unanswered = vec![Unanswered { replica, reason: "away".to_owned(), given_up }];
            first(&Connected { connections: Vec::new(), unanswered })
        };
        assert_eq!(first(&Connected::default()), Ok(None));
        assert_eq!(silent(true), Ok(None));
        assert!(silent(false).unwrap_err().contains("away"));
    }
}
