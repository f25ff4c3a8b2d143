//! Sources of identity, and the choice between them.

use std::{fmt, net::IpAddr, sync::Arc};

use async_trait::async_trait;
use ids::AgentId;
use tokio::sync::watch;

use crate::{AuthError, Caller, Callers, Credential, SourceKind};

/// Knows the callers of one kind. Implementations that ask another host cache its answers.
#[async_trait]
pub trait Source: Send + Sync + 'static {
    /// Returns the kind of its callers.
    fn kind(&self) -> SourceKind;

    /// Whether a credential belongs to this source, judged by its form only. No other source is asked about
    /// such a credential.
    fn accepts(&self, credential: &Credential) -> bool;

    /// Returns the caller that presents `credential`, which this source accepts. See
    /// [`Callers::authenticate`].
    ///
    /// # Errors
    /// See [`Callers::authenticate`].
    async fn authenticate(
        &self,
        credential: &Credential,
        agent: AgentId,
        from: Option<IpAddr>,
    ) -> Result<Caller, AuthError>;

    /// Returns a caller that this source has returned before, as it is now. See [`Callers::recheck`].
    ///
    /// # Errors
    /// See [`Callers::recheck`].
    async fn recheck(&self, caller: &Caller, agent: AgentId) -> Result<Caller, AuthError>;

    /// Returns which agents a credential reaches. See [`Callers::reach`].
    ///
    /// # Errors
    /// See [`Callers::authenticate`].
    async fn reach(&self, credential: &Credential, from: Option<IpAddr>) -> Result<Reach, AuthError>;
}

/// Which agents a credential reaches, for the list of agents.
#[derive(Debug, Clone)]
pub enum Reach {
    /// Those that the rules of `agent.kubernetes_api.access` give to this caller.
    Rules(Caller),
    /// These.
    Agents {
        /// The name of the caller, as in [`Caller::name`].
        name: Arc<str>,
        /// The agents.
        agents: Arc<[AgentId]>,
    },
    /// The source cannot list them: status 501.
    Unlisted,
}

/// Wakes subscribers when callers may have changed. All sources share one.
#[derive(Debug, Clone)]
pub struct Changes(watch::Sender<u64>);

impl Default for Changes {
    fn default() -> Self {
        Self(watch::Sender::new(0))
    }
}

impl Changes {
    /// Wakes all subscribers. Call it after the change is visible.
    pub fn notify(&self) {
        self.0.send_modify(|version| *version = version.wrapping_add(1));
    }

    pub(crate) fn sender(&self) -> watch::Sender<u64> {
        self.0.clone()
    }

    /// Returns a receiver that wakes at the next [`Changes::notify`].
    pub fn subscribe(&self) -> watch::Receiver<u64> {
        self.0.subscribe()
    }
}

/// All sources of a kas. Asks the first one that accepts a credential, and no other.
pub struct Sources {
    sources: Vec<Box<dyn Source>>,
    changes: Changes,
}

impl Sources {
    /// Returns the sources in the order in which they are tried for a credential. They report with `changes`.
    pub fn new(sources: Vec<Box<dyn Source>>, changes: Changes) -> Self {
        Self { sources, changes }
    }

    fn accepting(&self, credential: &Credential) -> Result<&dyn Source, AuthError> {
        let source = self.sources.iter().find(|source| source.accepts(credential));
        source.map(|source| &**source).ok_or(AuthError::Unknown)
    }
}

impl fmt::Debug for Sources {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.sources.iter().map(|source| source.kind())).finish()
    }
}

#[async_trait]
impl Callers for Sources {
    async fn authenticate(
        &self,
        credential: &Credential,
        agent: AgentId,
        from: Option<IpAddr>,
    ) -> Result<Caller, AuthError> {
        // Whatever a source does, a credential that names another agent is good for that agent only.
        if credential.agent().is_some_and(|named| named != agent) {
            return Err(AuthError::Forbidden);
        }
        self.accepting(credential)?.authenticate(credential, agent, from).await
    }

    async fn recheck(&self, caller: &Caller, agent: AgentId) -> Result<Caller, AuthError> {
        let source = self.sources.iter().find(|source| source.kind() == caller.source);
        source.ok_or(AuthError::Unknown)?.recheck(caller, agent).await
    }

    async fn reach(&self, credential: &Credential, from: Option<IpAddr>) -> Result<Reach, AuthError> {
        self.accepting(credential)?.reach(credential, from).await
    }

    fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }
}
