//! What a lookup of an agent is: the question, its priority, and why it fails.

use std::net::IpAddr;

use async_trait::async_trait;
use ids::Agent;

use crate::Failure;

/// Who can be asked about a token.
#[async_trait]
pub trait AgentInfo: Send + Sync + 'static {
    /// Returns the agent that holds `token`.
    ///
    /// # Errors
    /// [`LookupError`].
    async fn agent_info(&self, token: &[u8], urgency: Urgency) -> Result<Agent, LookupError>;
}

/// Who waits for a lookup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Urgency {
    /// An agent that is to be let in.
    New {
        /// From which network, if that is told.
        from: Option<IpAddr>,
        /// What is known of it.
        standing: Standing,
    },
    /// One that is connected.
    Renewal,
}

impl Urgency {
    /// Of whom nothing is known.
    pub const SOMEBODY: Self = Self::New { from: None, standing: Standing::Stranger };
}

/// What is known of who is to be let in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Standing {
    /// This token was an agent's before.
    Returning,
    /// Others were let in from the same network.
    Befriended,
    /// Nothing.
    Stranger,
}

impl Standing {
    /// Each of them, in their order.
    pub const ALL: [Self; 3] = [Self::Returning, Self::Befriended, Self::Stranger];
}

/// Why a lookup found no agent.
#[derive(Debug, thiserror::Error)]
pub enum LookupError {
    /// No agent holds the token.
    #[error("GitLab knows no agent with this token")]
    Unknown,
    /// The agent may not connect.
    #[error("GitLab forbids this agent")]
    Forbidden,
    /// Nobody was asked, because too many wait.
    #[error("too many lookups wait for gitlab.api_rate_limit")]
    Busy,
    /// GitLab could not tell.
    #[error("GitLab could not tell")]
    Failed(#[from] Failure),
}
