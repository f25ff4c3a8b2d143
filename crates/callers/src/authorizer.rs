//! From a credential to what a request may do.

use std::{fmt, net::IpAddr, sync::Arc, time::Duration};

use gitlab::{JobAgents, ProxyUsers};
use identity::IfAbsent;
use ids::{AgentId, InvalidIdentity, check_identity_name};
use kas_config::KubernetesApi;
use net::proxy::Proxies;
use tokio::time::Instant;

use crate::{
    Access, Agents, AuthError, Caller, Callers, CertificateUsers, CertificateVerifier, Changes, CiJobs,
    Credential, Decision, FileUsers, GitLabUsers, Grant, KnownAgent, Mode, OidcUsers, OpenAuthoritiesError,
    OpenUsersError, Reach, RunAs, Source, Sources, UnknownAgent, finder::Finder,
};

/// How soon an open request is checked again whose source could not be asked.
const RETRY: Duration = Duration::from_secs(5);
/// How often an open request is checked again whose source reports every change.
const SELDOM: Duration = Duration::from_secs(3600);
/// How often an open request is checked again if its rule depends on the name or project of its agent, which
/// other replicas do not report.
const BY_NAME: Duration = Duration::from_secs(60);
/// The least time between two checks of an open request, whatever its source says.
const LEAST_WAIT: Duration = Duration::from_millis(100);

/// A request that may run.
#[derive(Debug, Clone)]
pub struct Authorized {
    /// Who sent it.
    pub caller: Caller,
    /// As whom it runs.
    pub run_as: RunAs,
    /// The index of the access rule that decided, from 0; `None`: the source has decided.
    pub rule: Option<usize>,
    /// The agent it is for.
    pub agent: AgentId,
}

/// Why a request may not run, or must end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// The source says so.
    #[error(transparent)]
    Auth(#[from] AuthError),
    /// No access rule matches: status 403.
    #[error("no access rule gives this agent to this caller")]
    NoRule,
    /// A rule for this caller selects agents by name or project, and no replica knows those of this agent:
    /// status 403, as for any agent that the caller may not use.
    #[error(transparent)]
    UnknownAgent(#[from] UnknownAgent),
    /// As [`Refused::UnknownAgent`], but not all replicas could be asked: status 503, the client should
    /// retry.
    #[error("the name and project of this agent, by which an access rule selects, cannot be asked for now")]
    Unasked,
    /// A name or value of the identity is not allowed: status 403.
    #[error(transparent)]
    Identity(#[from] InvalidIdentity),
    /// The request was open and would now run as another identity, so it must end.
    #[error("the identity of the caller has changed")]
    Changed,
}

impl Refused {
    /// Returns the status that a client gets: 401, 403 or 503.
    pub fn status(self) -> http::StatusCode {
        match self {
            Self::Auth(AuthError::Unknown) => http::StatusCode::UNAUTHORIZED,
            Self::Auth(AuthError::Token(token)) if !token.fault.is_forbidden() => {
                http::StatusCode::UNAUTHORIZED
            }
            Self::Auth(AuthError::Unavailable) | Self::Unasked => http::StatusCode::SERVICE_UNAVAILABLE,
            Self::Auth(AuthError::Forbidden | AuthError::Token(_))
            | Self::NoRule
            | Self::UnknownAgent(_)
            | Self::Identity(_)
            | Self::Changed => http::StatusCode::FORBIDDEN,
        }
    }
}

/// Why the sources of a configuration cannot be used at the start.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The users file cannot be used.
    #[error("agent.kubernetes_api.users.file cannot be used")]
    Users(#[source] OpenUsersError),
    /// The CA certificates of an issuer cannot be used.
    #[error("agent.kubernetes_api.oidc[{index}].ca_file cannot be used")]
    Authorities {
        /// The index of the issuer, from 0.
        index: usize,
        /// Why.
        source: OpenAuthoritiesError,
    },
}

/// A refusal, with what is known of the caller: for metrics and logs of the operator. A client gets only the
/// status, and the same text whatever the reason for a status 403 is.
#[derive(Debug, Clone)]
pub struct Refusal {
    /// Why.
    pub why: Refused,
    /// The caller, if it is known. Its source has accepted its credential.
    pub caller: Option<Box<Caller>>,
}

/// Decides which requests may run, and for how long.
pub struct Authorizer {
    callers: Arc<dyn Callers>,
    access: Access,
    agents: Arc<dyn Agents>,
    finder: Finder,
}

/// The agents that a caller reaches.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reached {
    /// The name of the caller, by which its requests are counted.
    pub caller: Arc<str>,
    /// The agents.
    pub agents: Vec<KnownAgent>,
}

/// Which request is judged.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Judged {
    /// One that has arrived.
    New,
    /// One that is open.
    Open,
}

/// As whom a request runs, and why.
struct Decided {
    run_as: RunAs,
    rule: Option<usize>,
    /// The decision depends on the name or project of the agent.
    by_name: bool,
}

impl fmt::Debug for Authorizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Authorizer").field("access", &self.access).finish_non_exhaustive()
    }
}

impl Authorizer {
    /// Returns an authorizer with the sources of a configuration: its users file, its issuers, which are
    /// asked through `proxies`, the certificates of users, and the CI jobs and users of GitLab, if those are
    /// given.
    ///
    /// # Errors
    /// [`OpenError`] if a file cannot be used.
    pub async fn open<G: JobAgents + ProxyUsers>(
        config: &KubernetesApi,
        gitlab: Option<Arc<G>>,
        certificates: Option<Arc<dyn CertificateVerifier>>,
        proxies: &Proxies,
        agents: Arc<dyn Agents>,
    ) -> Result<Self, OpenError> {
        let changes = Changes::default();
        let mut sources: Vec<Box<dyn Source>> = Vec::new();
        if let Some(users) = &config.users {
            let if_absent = if users.is_default { IfAbsent::Make } else { IfAbsent::Refuse };
            let users = FileUsers::open(&users.file, if_absent, &changes).await;
            sources.push(Box::new(users.map_err(OpenError::Users)?));
        }
        if !config.oidc.is_empty() {
            let users = OidcUsers::open(&config.oidc, proxies, &changes).await;
            let error = |(index, source)| OpenError::Authorities { index, source };
            sources.push(Box::new(users.map_err(error)?));
        }
        if let Some(verifier) = certificates {
            sources.push(Box::new(CertificateUsers::new(verifier, &changes)));
        }
        if let Some(gitlab) = gitlab {
            let (ttl, refusal_ttl) = (config.allowed_agent_cache_ttl, config.allowed_agent_cache_error_ttl);
            sources.push(Box::new(CiJobs::new(Arc::clone(&gitlab) as _, ttl, refusal_ttl)));
            sources.push(Box::new(GitLabUsers::by_token(Arc::clone(&gitlab) as _, ttl, refusal_ttl)));
            sources.push(Box::new(GitLabUsers::by_session(gitlab, ttl, refusal_ttl)));
        }
        Ok(Self::new(Arc::new(Sources::new(sources, changes)), Access::new(&config.access), agents))
    }

    /// Returns an authorizer that asks `callers`, and then `access`, whose rules may name what only `agents`
    /// knows.
    pub fn new(callers: Arc<dyn Callers>, access: Access, agents: Arc<dyn Agents>) -> Self {
        let finder = Finder::new(Arc::clone(&agents));
        Self { callers, access, agents, finder }
    }

    /// Decides whether a request to `agent` may run. `from` is the network that it comes from, if known; it
    /// affects only the order of lookups. Cancel safe.
    ///
    /// # Errors
    /// [`Refusal`].
    pub async fn authorize(
        &self,
        credential: &Credential,
        agent: AgentId,
        from: Option<IpAddr>,
    ) -> Result<Authorized, Refusal> {
        let authenticated = self.callers.authenticate(credential, agent, from).await;
        let caller = authenticated.map_err(|error| Refusal { why: error.into(), caller: None })?;
        match self.decide(&caller, agent, Judged::New).await {
            Ok(Decided { run_as, rule, .. }) => Ok(Authorized { caller, run_as, rule, agent }),
            Err(why) => Err(Refusal { why, caller: Some(Box::new(caller)) }),
        }
    }

    /// Returns which of `agents` a credential reaches, for a request from the network `from`; `None` if its
    /// source cannot list them (status 501). Cancel safe.
    ///
    /// # Errors
    /// [`Refusal`].
    pub async fn reach(
        &self,
        credential: &Credential,
        from: Option<IpAddr>,
        agents: Vec<KnownAgent>,
    ) -> Result<Option<Reached>, Refusal> {
        let reach = self.callers.reach(credential, from).await;
        match reach.map_err(|error| Refusal { why: error.into(), caller: None })? {
            Reach::Rules(caller) => {
                let agents = agents.into_iter().filter(|agent| self.reaches(&caller, agent)).collect();
                Ok(Some(Reached { caller: caller.name, agents }))
            }
            Reach::Agents { name, agents: listed } => {
                let agents = agents.into_iter().filter(|agent| listed.contains(&agent.id)).collect();
                Ok(Some(Reached { caller: name, agents }))
            }
            Reach::Unlisted => Ok(None),
        }
    }

    /// Waits until a request that is open must end, and returns why. Cancel safe.
    ///
    /// The name and project of the agent count as they are now. Only a definite answer ends a request: while
    /// its source or the agent's name cannot be asked for, it goes on. A credential that expires does not end
    /// a request that it has begun.
    pub async fn revoked(&self, authorized: &Authorized) -> Refused {
        let mut changes = self.callers.changes();
        let mut agents = self.agents.changes();
        let mut by_name = false;
        loop {
            changes.mark_unchanged();
            agents.mark_unchanged();
            let next = match self.recheck(authorized).await {
                Ok((caller, is_by_name)) => {
                    by_name = is_by_name;
                    let by_name = by_name.then(|| Instant::now() + BY_NAME);
                    caller.recheck_at.into_iter().chain(by_name).min()
                }
                Err(Refused::Auth(AuthError::Unavailable) | Refused::Unasked | Refused::UnknownAgent(_)) => {
                    Some(Instant::now() + RETRY)
                }
                Err(why) => return why,
            };
            // A source that reports no more changes, because kas ends, is asked by the clock alone.
            let at = next.unwrap_or_else(|| Instant::now() + SELDOM).max(Instant::now() + LEAST_WAIT);
            let due = tokio::time::sleep_until(at);
            tokio::select! {
                () = due => {}
                Ok(()) = changes.changed() => {}
                Ok(()) = agents.changed(), if by_name => {}
            }
        }
    }

    /// Judges an open request again: returns its caller as it is now and whether the name or project of the
    /// agent matters, or why the request must end.
    async fn recheck(&self, authorized: &Authorized) -> Result<(Caller, bool), Refused> {
        let Authorized { caller, agent, run_as, .. } = authorized;
        let caller = self.callers.recheck(caller, *agent).await?;
        let now = self.decide(&caller, *agent, Judged::Open).await?;
        if now.run_as == *run_as { Ok((caller, now.by_name)) } else { Err(Refused::Changed) }
    }

    async fn decide(&self, caller: &Caller, agent: AgentId, judged: Judged) -> Result<Decided, Refused> {
        check_names(caller)?;
        let (run_as, rule, by_name) = match &caller.grant {
            Grant::Decided(run_as) => (run_as.clone(), None, false),
            Grant::Rules => {
                let by_id = self.access.decide(caller, &KnownAgent::unknown(agent));
                let by_name = by_id == Err(UnknownAgent);
                let decided = if by_name { self.by_name(caller, agent, judged).await? } else { by_id? };
                let Decision { rule, run_as } = decided.ok_or(Refused::NoRule)?;
                (run_as, Some(rule), by_name)
            }
        };
        check_identity(&run_as)?;
        Ok(Decided { run_as, rule, by_name })
    }

    /// Decides by the name and project of the agent. If they are not known here, other replicas are asked.
    async fn by_name(
        &self,
        caller: &Caller,
        agent: AgentId,
        judged: Judged,
    ) -> Result<Option<Decision>, Refused> {
        let here = self.access.decide(caller, &self.agents.known(agent));
        match here {
            Ok(Some(allowed)) => return Ok(Some(allowed)),
            Ok(None) if judged == Judged::Open => return Ok(None),
            Ok(None) | Err(UnknownAgent) => {}
        }
        // Others are asked about a refused agent too, although it is known here: otherwise the time that a
        // refusal takes, or an error, would tell which agents there are.
        match (self.finder.find(&caller.name, agent).await, here) {
            (Err(AuthError::Unavailable), _) => Err(Refused::Unasked),
            (_, Ok(_)) => Ok(None),
            (Ok(found), Err(UnknownAgent)) => Ok(self.access.decide(caller, &found)?),
            (Err(_), Err(unknown)) => Err(unknown.into()),
        }
    }

    /// Whether a caller may use an agent, by what is known of it.
    fn reaches(&self, caller: &Caller, agent: &KnownAgent) -> bool {
        let decided = check_names(caller).map(|()| self.access.decide(caller, agent));
        matches!(decided, Ok(Ok(Some(decision))) if check_identity(&decision.run_as).is_ok())
    }
}

fn check_names(caller: &Caller) -> Result<(), InvalidIdentity> {
    check_identity_name(&caller.name)?;
    caller.groups.iter().try_for_each(|group| check_identity_name(group))
}

fn check_identity(run_as: &RunAs) -> Result<(), InvalidIdentity> {
    match run_as {
        RunAs::Identity { mode, identity } => identity.check(*mode == Mode::Impersonate),
        RunAs::Agent { .. } => Ok(()),
    }
}

#[cfg(test)]
mod tests;
