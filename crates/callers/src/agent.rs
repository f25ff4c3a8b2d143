//! The agent that a request is for, and where its name and project are known.

use std::sync::Arc;

use async_trait::async_trait;
use ids::AgentId;
use tokio::sync::watch;

/// What kas knows of an agent. An agent that this replica has not seen may have no name and no project here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KnownAgent {
    /// Its id.
    pub id: AgentId,
    /// Its name, if known.
    pub name: Option<Arc<str>>,
    /// Its configuration project, if known.
    pub project_id: Option<i64>,
}

impl KnownAgent {
    /// Returns an agent of which nothing but the id is known.
    pub fn unknown(id: AgentId) -> Self {
        Self { id, name: None, project_id: None }
    }
}

/// Knows the agents.
#[async_trait]
pub trait Agents: Send + Sync + 'static {
    /// Returns what is known of an agent without asking anybody. Its name and project may be missing.
    fn known(&self, agent: AgentId) -> KnownAgent;

    /// Asks the other replicas for an agent; `None`: all have answered, and it is connected to none of them.
    ///
    /// # Errors
    /// If that cannot be said now, with the reason.
    ///
    /// # Cancel safety
    /// Cancel safe.
    async fn find(&self, agent: AgentId) -> Result<Option<KnownAgent>, String>;

    /// Wakes when [`Agents::known`] may answer differently. Subscribe first, then ask, so that no change is
    /// missed.
    fn changes(&self) -> watch::Receiver<u64>;
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Knows no agent.
    pub(crate) struct NoAgents;

    #[async_trait]
    impl Agents for NoAgents {
        fn known(&self, agent: AgentId) -> KnownAgent {
            KnownAgent::unknown(agent)
        }

        async fn find(&self, _agent: AgentId) -> Result<Option<KnownAgent>, String> {
            Ok(None)
        }

        fn changes(&self) -> watch::Receiver<u64> {
            // Never wakes: its sender is gone.
            watch::channel(0).1
        }
    }
}
