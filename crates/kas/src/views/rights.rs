//! What a caller may see of an agent: [`Rights`].

use async_trait::async_trait;
use grpc::Status;
use ids::AgentId;
use views::Resource;

use super::Selected;

/// What a caller may see.
#[async_trait]
pub(crate) trait Rights: Send + Sync {
    /// Returns which of these agents the caller reaches.
    ///
    /// # Errors
    /// If that cannot be asked, or the caller reaches none whatever it selects.
    ///
    /// # Cancel safety
    /// Cancel safe.
    async fn reach(&self, agents: Vec<Selected>) -> Result<Vec<Selected>, Status>;

    /// Whether the caller may list and watch a resource of an agent. `None`: in all namespaces.
    ///
    /// # Errors
    /// If that cannot be asked.
    ///
    /// # Cancel safety
    /// Cancel safe.
    async fn may(&self, agent: AgentId, resource: &Resource, namespace: Option<&str>)
    -> Result<bool, Status>;

    /// Whether they can change: they are asked for again from time to time then.
    fn can_change(&self) -> bool;
}

/// A caller of the API listener, who sees everything.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ApiCaller;

#[async_trait]
impl Rights for ApiCaller {
    async fn reach(&self, agents: Vec<Selected>) -> Result<Vec<Selected>, Status> {
        Ok(agents)
    }

    async fn may(&self, _: AgentId, _: &Resource, _: Option<&str>) -> Result<bool, Status> {
        Ok(true)
    }

    fn can_change(&self) -> bool {
        false
    }
}
