//! Who calls the Kubernetes API endpoint, and with which rights a request runs. Contains no HTTP server.
//!
//! 1. [`take_query_parameters`] and [`take_credential`] take the credential of a request out of its query and
//!    its headers.
//! 2. [`Callers::authenticate`] finds out who presents it. [`Sources`] asks the one [`Source`] that the form
//!    of the credential belongs to; a second one is never tried.
//! 3. [`Authorizer::authorize`] does 2 and then decides as whom the request runs: by the rules of
//!    `agent.kubernetes_api.access`, or as the source has decided.
//! 4. [`Authorizer::revoked`] returns when a request that is still open must end.

mod access;
mod agent;
mod authorizer;
mod cache;
mod certificates;
mod ci;
mod client_certificate;
mod credential;
mod credential_error;
mod finder;
mod gitlab_users;
mod oidc;
mod run_as;
mod session;
mod source;
mod token_fault;
mod users;

use std::{any::Any, fmt, net::IpAddr, sync::Arc};

use async_trait::async_trait;
pub use ids::{AgentId, Impersonation};
use tokio::{sync::watch, time::Instant};

pub use self::{
    access::{Access, Decision, UnknownAgent},
    agent::{Agents, KnownAgent},
    authorizer::{Authorized, Authorizer, OpenError, Reached, Refusal, Refused},
    certificates::{CertificateSubject, CertificateUsers, CertificateVerifier},
    ci::CiJobs,
    client_certificate::ClientCertificate,
    credential::{Bearer, Credential, Form, take_credential},
    credential_error::CredentialError,
    gitlab_users::GitLabUsers,
    oidc::{OidcUsers, OpenAuthoritiesError},
    run_as::{Mode, RunAs},
    session::{QueryParameters, Session, take_query_parameters},
    source::{Changes, Reach, Source, Sources},
    token_fault::{Fault, TokenFault},
    users::{FileUsers, OpenUsersError, UserList},
};

#[cfg(feature = "fuzzing")]
pub use self::oidc::fuzz as fuzz_token;

/// Determines who presents a credential.
#[async_trait]
pub trait Callers: Send + Sync + 'static {
    /// Returns the caller that presents `credential` for a request to `agent`, from the network `from` if
    /// that is known. The network affects only the order of lookups.
    ///
    /// Cancel safe: a lookup that was begun continues, and its answer is cached.
    ///
    /// # Errors
    /// [`AuthError`]; [`AuthError::Unavailable`] if the credential cannot be checked now.
    async fn authenticate(
        &self,
        credential: &Credential,
        agent: AgentId,
        from: Option<IpAddr>,
    ) -> Result<Caller, AuthError>;

    /// Returns the caller as its source knows it now, for a request that is still open.
    ///
    /// # Errors
    /// [`AuthError::Unavailable`] if that cannot be checked now, which ends no request; any other one if the
    /// request must end.
    async fn recheck(&self, caller: &Caller, agent: AgentId) -> Result<Caller, AuthError>;

    /// Returns which agents a credential reaches. For `from`, see [`Callers::authenticate`].
    ///
    /// # Errors
    /// See [`Callers::authenticate`].
    async fn reach(&self, credential: &Credential, from: Option<IpAddr>) -> Result<Reach, AuthError>;

    /// Wakes when [`Callers::recheck`] may answer differently. Subscribe first, then ask, so that no change
    /// is missed.
    fn changes(&self) -> watch::Receiver<u64>;
}

/// Why a credential was not accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AuthError {
    /// Nobody has this credential, or it has expired: status 401.
    #[error("the credential is not valid")]
    Unknown,
    /// The caller is known and may not use this agent: status 403.
    #[error("this caller may not use this agent")]
    Forbidden,
    /// The token of an issuer is refused: status 401, or 403 if the issuer vouches for it. Only operators
    /// learn why.
    #[error(transparent)]
    Token(TokenFault),
    /// The credential could not be checked: status 503, the client should retry.
    #[error("the credential cannot be checked at the moment")]
    Unavailable,
}

/// A client that presented a valid credential.
#[derive(Debug, Clone)]
pub struct Caller {
    /// Where it is known.
    pub source: SourceKind,
    /// Its name with the prefix of its source, such as `kas:jane`. It is unique, so limits count by it.
    pub name: Arc<str>,
    /// Its uid, if the source has one.
    pub uid: Option<Arc<str>>,
    /// Its groups with the prefix of the source.
    pub groups: Arc<[String]>,
    /// What impersonation tells the API server in addition, except the agent.
    pub extra: Arc<[(String, Vec<String>)]>,
    /// The id of the user of GitLab that it is, or that started the CI job; `None`: it is none of GitLab, or
    /// not known.
    pub gitlab_user: Option<i64>,
    /// Who decides what it may do.
    pub grant: Grant,
    /// When an open request has to be checked again although [`Callers::changes`] did not wake; `None`:
    /// never, because the source reports every change.
    pub recheck_at: Option<Instant>,
    /// Must be kept as long as the request.
    pub hold: Hold,
}

/// Who decides what a caller may do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Grant {
    /// The rules of `agent.kubernetes_api.access`.
    Rules,
    /// The source has decided, as GitLab does.
    Decided(RunAs),
}

/// Where a caller is known; the label `source` of metrics and the audit log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SourceKind {
    /// A CI job token of GitLab.
    Ci,
    /// A personal access token of GitLab.
    Pat,
    /// A session cookie of GitLab.
    Cookie,
    /// A token of an OpenID Connect issuer.
    Oidc,
    /// A token of `users.file`.
    File,
    /// A client certificate.
    Certificate,
}

impl SourceKind {
    /// Returns the name in metrics, logs and errors.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ci => "ci",
            Self::Pat => "pat",
            Self::Cookie => "cookie",
            Self::Oidc => "oidc",
            Self::File => "file",
            Self::Certificate => "certificate",
        }
    }

    /// Returns the value of `agent.gitlab.com/access_type`.
    pub fn access_type(self) -> &'static str {
        match self {
            Self::Ci => "ci_job",
            Self::Pat => "personal_access_token",
            Self::Cookie => "session_cookie",
            Self::Oidc => "oidc",
            Self::File => "token",
            Self::Certificate => "certificate",
        }
    }
}

/// Keeps state of a [`Source`] alive as long as a request of a caller is open. It says nothing about the
/// caller.
#[derive(Clone, Default)]
pub struct Hold(Option<Arc<dyn Any + Send + Sync>>);

impl Hold {
    /// Holds `state`.
    pub fn new(state: Arc<dyn Any + Send + Sync>) -> Self {
        Self(Some(state))
    }

    /// Returns the state if it is a `T`.
    pub fn state<T: Any + Send + Sync>(&self) -> Option<&T> {
        self.0.as_deref().and_then(|state| state.downcast_ref())
    }
}

impl fmt::Debug for Hold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Hold")
    }
}
