//! From a credential to what a request may do.

use std::{fmt, sync::Arc, time::Duration};

use gitlab::{JobAgents, ProxyUsers};
use identity::IfAbsent;
use ids::{InvalidIdentity, check_identity_name};
use kas_config::KubernetesApi;
use tokio::time::Instant;

use crate::{
    Access, AuthError, Caller, Callers, Changes, CiJobs, Credential, FileUsers, GitLabUsers, Grant,
    KnownAgent, Mode, OpenUsersError, Reach, RunAs, Source, Sources,
};

/// How soon an open request is checked again whose source could not be asked.
const RETRY: Duration = Duration::from_secs(5);
/// How often an open request is checked again whose source reports every change.
const SELDOM: Duration = Duration::from_secs(3600);
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
    pub agent: KnownAgent,
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
            Self::Auth(AuthError::Unavailable) => http::StatusCode::SERVICE_UNAVAILABLE,
            Self::Auth(AuthError::Forbidden) | Self::NoRule | Self::Identity(_) | Self::Changed => {
                http::StatusCode::FORBIDDEN
            }
        }
    }
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
}

impl fmt::Debug for Authorizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Authorizer").field("access", &self.access).finish_non_exhaustive()
    }
}

impl Authorizer {
    /// Returns an authorizer with the sources of a configuration: its users file, and the CI jobs and users
    /// of GitLab if that is given.
    ///
    /// # Errors
    /// [`OpenUsersError`] if the users file cannot be used.
    pub async fn open<G: JobAgents + ProxyUsers>(
        config: &KubernetesApi,
        gitlab: Option<Arc<G>>,
    ) -> Result<Self, OpenUsersError> {
        let changes = Changes::default();
        let mut sources: Vec<Box<dyn Source>> = Vec::new();
        if let Some(users) = &config.users {
            let if_absent = if users.is_default { IfAbsent::Make } else { IfAbsent::Refuse };
            sources.push(Box::new(FileUsers::open(&users.file, if_absent, &changes).await?));
        }
        if let Some(gitlab) = gitlab {
            let (ttl, refusal_ttl) = (config.allowed_agent_cache_ttl, config.allowed_agent_cache_error_ttl);
            sources.push(Box::new(CiJobs::new(Arc::clone(&gitlab) as _, ttl, refusal_ttl)));
            sources.push(Box::new(GitLabUsers::by_token(Arc::clone(&gitlab) as _, ttl, refusal_ttl)));
            sources.push(Box::new(GitLabUsers::by_session(gitlab, ttl, refusal_ttl)));
        }
        Ok(Self::new(Arc::new(Sources::new(sources, changes)), Access::new(&config.access)))
    }

    /// Returns an authorizer that asks `callers`, and then `access`.
    pub fn new(callers: Arc<dyn Callers>, access: Access) -> Self {
        Self { callers, access }
    }

    /// Decides whether a request to `agent` may run. Cancel safe.
    ///
    /// # Errors
    /// [`Refusal`].
    pub async fn authorize(&self, credential: &Credential, agent: KnownAgent) -> Result<Authorized, Refusal> {
        match self.callers.authenticate(credential, agent.id).await {
            Ok(caller) => self.judge(caller, agent),
            Err(error) => Err(Refusal { why: error.into(), caller: None }),
        }
    }

    /// Returns which of `agents` a credential reaches; `None` if its source cannot list them (status 501).
    /// Cancel safe.
    ///
    /// # Errors
    /// [`Refusal`].
    pub async fn reach(
        &self,
        credential: &Credential,
        agents: Vec<KnownAgent>,
    ) -> Result<Option<Vec<KnownAgent>>, Refusal> {
        let reach = self.callers.reach(credential).await;
        match reach.map_err(|error| Refusal { why: error.into(), caller: None })? {
            Reach::Rules(caller) => {
                let may = |agent: &KnownAgent| self.judge(caller.clone(), agent.clone()).is_ok();
                Ok(Some(agents.into_iter().filter(may).collect()))
            }
            Reach::Agents(listed) => {
                Ok(Some(agents.into_iter().filter(|agent| listed.contains(&agent.id)).collect()))
            }
            Reach::Unlisted => Ok(None),
        }
    }

    /// Waits until a request that is open must end, and returns why. Cancel safe.
    ///
    /// Only a definite answer ends a request: while its source cannot be asked, it goes on. A credential that
    /// expires does not end a request that it has begun.
    pub async fn revoked(&self, authorized: &Authorized) -> Refused {
        let mut changes = self.callers.changes();
        loop {
            changes.mark_unchanged();
            let next = match self.recheck(authorized).await {
                Ok(caller) => caller.recheck_at,
                Err(Refused::Auth(AuthError::Unavailable)) => Some(Instant::now() + RETRY),
                Err(why) => return why,
            };
            // A source that reports no more changes, because kas ends, is asked by the clock alone.
            let at = next.unwrap_or_else(|| Instant::now() + SELDOM).max(Instant::now() + LEAST_WAIT);
            let due = tokio::time::sleep_until(at);
            tokio::select! {
                () = due => {}
                Ok(()) = changes.changed() => {}
            }
        }
    }

    /// Judges an open request again: returns its caller as it is now, or why the request must end.
    async fn recheck(&self, authorized: &Authorized) -> Result<Caller, Refused> {
        let Authorized { caller, agent, run_as, .. } = authorized;
        let caller = self.callers.recheck(caller, agent.id).await?;
        let (now, _) = self.decide(&caller, agent)?;
        if now == *run_as { Ok(caller) } else { Err(Refused::Changed) }
    }

    fn judge(&self, caller: Caller, agent: KnownAgent) -> Result<Authorized, Refusal> {
        match self.decide(&caller, &agent) {
            Ok((run_as, rule)) => Ok(Authorized { caller, run_as, rule, agent }),
            Err(why) => Err(Refusal { why, caller: Some(Box::new(caller)) }),
        }
    }

    fn decide(&self, caller: &Caller, agent: &KnownAgent) -> Result<(RunAs, Option<usize>), Refused> {
        check_identity_name(&caller.name)?;
        caller.groups.iter().try_for_each(|group| check_identity_name(group))?;
        let (run_as, rule) = match &caller.grant {
            Grant::Decided(run_as) => (run_as.clone(), None),
            Grant::Rules => {
                let decision = self.access.decide(caller, agent).ok_or(Refused::NoRule)?;
                (decision.run_as, Some(decision.rule))
            }
        };
        if let RunAs::Identity { mode, identity } = &run_as {
            identity.check(*mode == Mode::Impersonate)?;
        }
        Ok((run_as, rule))
    }
}

#[cfg(test)]
mod tests;
