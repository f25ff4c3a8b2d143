//! The lookup of an agent: its trait, priority and errors.

use std::net::IpAddr;

use async_trait::async_trait;
use ids::Agent;

use crate::Failure;

/// Looks up agents by their token.
#[async_trait]
pub trait AgentInfo: Send + Sync + 'static {
    /// Returns the agent that holds `token`.
    ///
    /// # Errors
    /// [`LookupError`].
    async fn agent_info(&self, token: &[u8], urgency: Urgency) -> Result<Agent, LookupError>;
}

/// The urgency of a lookup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Urgency {
    /// The agent is not connected yet.
    New {
        /// Its source network, if its peer has an address.
        from: Option<IpAddr>,
        /// Its priority.
        priority: LookupPriority,
    },
    /// The agent is connected.
    Renewal,
}

impl Urgency {
    /// An agent from an unknown network.
    pub const UNKNOWN_SOURCE: Self = Self::New { from: None, priority: LookupPriority::UnknownSource };
}

/// The priority of a waiting lookup, highest first.
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
    /// GitLab was not asked, because too many lookups wait.
    #[error("too many lookups wait for gitlab.api_rate_limit")]
    Busy,
    /// GitLab gave no valid answer.
    #[error("GitLab gave no valid answer")]
    Failed(#[from] Failure),
}
