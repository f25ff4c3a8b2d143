//! What a caller may see of an agent: [`Rights`].

use async_trait::async_trait;
use grpc::Status;
use ids::AgentId;
use tokio::time::Instant;
use views::Resource;

use super::Selected;

/// Whether a caller may list and watch something.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum May {
    Yes,
    /// What is missing, such as `list pods in namespace shop`.
    No(String),
}

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

    /// Whether the caller may list and watch a resource of an agent, and since when that is known. `None`: in
    /// all namespaces.
    ///
    /// # Errors
    /// `PERMISSION_DENIED` and `UNAUTHENTICATED` are a no to everything; `FAILED_PRECONDITION`: the agentk
    /// cannot answer. Others: that cannot be asked now.
    ///
    /// # Cancel safety
    /// Cancel safe.
    async fn may(
        &self,
        agent: AgentId,
        resource: &Resource,
        namespace: Option<&str>,
    ) -> Result<(May, Instant), Status>;

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

    async fn may(&self, _: AgentId, _: &Resource, _: Option<&str>) -> Result<(May, Instant), Status> {
        Ok((May::Yes, Instant::now()))
    }

    fn can_change(&self) -> bool {
        false
    }
}
