//! Tells GitLab how agents are configured, so that it knows who may use them.

use async_trait::async_trait;
use ids::AgentId;

use crate::{Client, LookupError};

/// The path of every version that stores configurations.
const AGENT_CONFIGURATION: &str = "/api/v4/internal/kubernetes/agent_configuration";

/// Stores the configurations of agents.
#[async_trait]
pub trait AgentConfigurations: Send + Sync + 'static {
    /// Replaces the configuration of an agent. `configuration`: the keys of its file, as a JSON object.
    ///
    /// # Errors
    /// [`LookupError`]. Status 404: GitLab knows no such agent, or is too old.
    async fn configure_agent(&self, agent: AgentId, configuration: &str) -> Result<(), LookupError>;
}

#[async_trait]
impl AgentConfigurations for Client {
    async fn configure_agent(&self, agent: AgentId, configuration: &str) -> Result<(), LookupError> {
        let json = format!("{{\"agent_id\":{agent},\"agent_config\":{configuration}}}");
        self.report(AGENT_CONFIGURATION, json).await
    }
}
