//! Which agent a token belongs to: the trait [`Identity`], and its versions by a file and by GitLab; and the
//! JWTs of callers.

mod file;
pub mod gitlab;
pub mod jwt;

use std::{any::Any, fmt, net::IpAddr, sync::Arc};

use async_trait::async_trait;
pub use ids::Agent;
use ids::{AgentId, TokenHash};
use tokio::sync::watch;

pub use self::file::{FileIdentity, Identities, IfAbsent, OpenError, others_may_write};

/// Tells which agent a token belongs to.
#[async_trait]
pub trait Identity: Send + Sync + 'static {
    /// Returns the agent that holds `token`, which is compared as it is: no trimming. `from`: where it comes
    /// from, if that is told; it decides nothing but who is asked about first.
    ///
    /// # Errors
    /// [`IdentityError`]; a check that cannot be made is [`IdentityError::Unavailable`].
    async fn authenticate(&self, token: &[u8], from: Option<IpAddr>) -> Result<Authenticated, IdentityError>;

    /// Wakes when [`Identity::still_valid`] may answer differently. Subscribe first, then ask:
    /// nothing is missed.
    fn changes(&self) -> watch::Receiver<u64>;

    /// Whether a stream that began as `authenticated` may go on: the agent still holds the token,
    /// and still has the same name and project.
    async fn still_valid(&self, authenticated: &Authenticated) -> bool;

    /// Returns the configuration project of an agent, when it is known here without asking: for the audit
    /// log.
    fn project_of(&self, agent: AgentId) -> Option<i64>;
}

/// Why a token was not accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum IdentityError {
    /// No agent holds this token: `UNAUTHENTICATED`.
    #[error("no agent holds this token")]
    Unknown,
    /// The agent is known and may not be served: `PERMISSION_DENIED`.
    #[error("this agent may not connect")]
    Forbidden,
    /// The check could not be made: `UNAVAILABLE`, to be tried again.
    #[error("the identity of the agent cannot be checked at the moment")]
    Unavailable,
}

/// An agent, and the token by which it was recognised.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Authenticated {
    /// The agent.
    pub agent: Arc<Agent>,
    /// The hash of its token, to ask later whether it is still valid.
    pub token: TokenHash,
    /// To be kept as long as what was let in with it.
    pub hold: Hold,
}

/// What an [`Identity`] wants to have alive as long as streams of an agent are open; says nothing about the
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
