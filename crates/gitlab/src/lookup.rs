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

/// What a lookup is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Urgency {
    /// An agent that is not connected yet.
    New {
        /// The network it comes from, if its peer has an address.
        from: Option<IpAddr>,
        /// What is known of it.
        priority: LookupPriority,
    },
    /// An agent that is connected.
    Renewal,
}

impl Urgency {
    /// An agent of which nothing is known.
    pub const UNKNOWN_SOURCE: Self = Self::New { from: None, priority: LookupPriority::UnknownSource };
}

/// Which of the lookups that wait are preferred, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum LookupPriority {
    /// The token belonged to an agent before.
    KnownToken,
    /// Other agents from the same network were authenticated before.
    KnownSource,
    /// Any other.
    UnknownSource,
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
