//! Which agent a token belongs to: the trait [`Identity`] and its implementations by a file and by GitLab.
//! Also verifies the JWTs of callers.

mod file;
pub mod gitlab;
pub mod jwt;

use std::{any::Any, fmt, net::IpAddr, sync::Arc};

use async_trait::async_trait;
pub use ids::Agent;
use ids::{AgentId, TokenHash};
use tokio::sync::watch;

pub use self::file::{FileIdentity, Identities, IfAbsent, OpenError, TokenHolders, others_may_write};

/// Determines which agent a token belongs to.
#[async_trait]
pub trait Identity: Send + Sync + 'static {
    /// Returns the agent that `token` belongs to; the token is compared without trimming. `from` is the
    /// source address, if known; it affects only the order of lookups.
    ///
    /// # Errors
    /// [`IdentityError`]; [`IdentityError::Unavailable`] if the token cannot be checked.
    async fn authenticate(&self, token: &[u8], from: Option<IpAddr>) -> Result<Authenticated, IdentityError>;

    /// Wakes when [`Identity::still_valid`] may answer differently. Subscribe first, then ask, so that no
    /// change is missed.
    fn changes(&self) -> watch::Receiver<u64>;

    /// Whether a stream that was authenticated with `authenticated` may continue: the token still belongs to
    /// the agent, and the agent has the same name and project.
    async fn still_valid(&self, authenticated: &Authenticated) -> bool;

    /// Returns an agent if it is known without a lookup: for the audit log, and for rules that name agents.
    fn agent(&self, agent: AgentId) -> Option<Arc<Agent>>;

    /// Returns every agent that is known without a lookup, in any order.
    fn agents(&self) -> Vec<Arc<Agent>>;
}

/// Why a token was not accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum IdentityError {
    /// The token belongs to no agent: `UNAUTHENTICATED`.
    #[error("no agent holds this token")]
    Unknown,
    /// The agent is known but may not connect: `PERMISSION_DENIED`.
    #[error("this agent may not connect")]
    Forbidden,
    /// The token could not be checked: `UNAVAILABLE`, the agent should retry.
    #[error("the identity of the agent cannot be checked at the moment")]
    Unavailable,
}

/// An agent, and the token that identified it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Authenticated {
    /// The agent.
    pub agent: Arc<Agent>,
    /// The hash of its token, to check later whether it is still valid.
    pub token: TokenHash,
    /// Must be kept as long as the stream that was authenticated.
    pub hold: Hold,
}

/// Keeps state of an [`Identity`] alive as long as streams of an agent are open. It says nothing about the
/// agent.
#[derive(Clone, Default)]
pub struct Hold(Option<Arc<dyn Any + Send + Sync>>);

impl PartialEq for Hold {
    fn eq(&self, _other: &Self) -> bool {
        true
    }
}

impl Eq for Hold {}

impl fmt::Debug for Hold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Hold")
    }
}
