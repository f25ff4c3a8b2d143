//! CI jobs of GitLab, by their job tokens.
//!
//! GitLab knows which agents a job may use, and as whom. It has already judged `ci_access` and its
//! `environments` and `protected_branches_only` when it answers.

use std::{fmt, net::IpAddr, sync::Arc, time::Duration};

use async_trait::async_trait;
use gitlab::{AccessAs, AllowedAgent, Failure, Job, JobAgents, LookupError, Urgency};
use http::StatusCode;
use ids::{AgentId, Impersonation};
use process::error::chain;
use tokio::time::Instant;

use crate::{
    AuthError, Bearer, Caller, Credential, Form, Grant, Hold, Mode, Reach, RunAs, Source, SourceKind,
    cache::{Answer, Before, Cache, Key, Keys},
};

/// How often open requests are checked again if nothing is cached.
const RECHECK_WITHOUT_CACHE: Duration = Duration::from_secs(60);

/// The CI jobs of a GitLab.
pub struct CiJobs {
    gitlab: Arc<dyn JobAgents>,
    keys: Keys,
    cache: Cache<Key, Job>,
    ttl: Duration,
}

impl fmt::Debug for CiJobs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CiJobs").field("ttl", &self.ttl).finish_non_exhaustive()
    }
}

/// A job token, and the network that it came from, if known.
#[derive(Clone)]
struct Presented {
    token: Bearer,
    from: Option<IpAddr>,
}

impl Presented {
    fn new(credential: &Credential, from: Option<IpAddr>) -> Result<Self, AuthError> {
        Ok(Self { token: credential.bearer().ok_or(AuthError::Unknown)?.clone(), from })
    }
}

impl CiJobs {
    /// Returns the source with an empty cache. Answers are used for `ttl`, and open requests are checked
    /// again that often; zero: GitLab is asked for each request. Refusals are used for `refusal_ttl`.
    pub fn new(gitlab: Arc<dyn JobAgents>, ttl: Duration, refusal_ttl: Duration) -> Self {
        Self { gitlab, keys: Keys::random(), cache: Cache::new(ttl, refusal_ttl), ttl }
    }

    async fn job(&self, Presented { token, from }: &Presented) -> Result<Answer<Job>, AuthError> {
        // GitLab's answer has all agents of the job, so requests to any of them share it.
        let key = self.keys.key(SourceKind::Ci, None, &[token.secret().as_bytes()]);
        let lookup = |before: Before| {
            let (gitlab, token) = (Arc::clone(&self.gitlab), token.clone());
            let urgency = Urgency::New { from: *from, priority: before.priority() };
            async move {
                let job = gitlab.allowed_agents(token.secret().as_bytes(), urgency).await.map_err(refusal)?;
                let unknown = job.agents.iter().find(|agent| agent.access_as == AccessAs::Unknown);
                if let Some(agent) = unknown {
                    tracing::warn!(
                        agent.id = agent.id.get(),
                        "GitLab gives CI jobs access to an agent in a way that this version does not know: refused"
                    );
                }
                Ok(job)
            }
        };
        self.cache.get(key, *from, lookup).await
    }

    async fn caller(&self, presented: &Presented, agent: AgentId) -> Result<Caller, AuthError> {
        let job = self.job(presented).await?;
        let run_as = run_as(&job.value, agent).ok_or(AuthError::Forbidden)?;
        let recheck_at = if self.ttl.is_zero() { Instant::now() + RECHECK_WITHOUT_CACHE } else { job.until };
        Ok(Caller {
            source: SourceKind::Ci,
            name: name(&job.value),
            uid: None,
            groups: Arc::new([]),
            extra: Arc::new([]),
            gitlab_user: Some(job.value.user).filter(|id| *id > 0),
            grant: Grant::Decided(run_as),
            recheck_at: Some(recheck_at),
            // A lookup needs the token itself.
            hold: Hold::new(Arc::new(presented.clone())),
        })
    }
}

/// Logs why GitLab gave no answer, and returns what that means for the caller.
fn refusal(error: LookupError) -> AuthError {
    match error {
        LookupError::Unknown => AuthError::Unknown,
        LookupError::Forbidden => AuthError::Forbidden,
        // GitLab says so if the job is not visible.
        LookupError::Failed(Failure::Status(StatusCode::NOT_FOUND)) => AuthError::Unknown,
        LookupError::Busy => AuthError::Unavailable,
        LookupError::Failed(failure) => {
            tracing::warn!(error = chain(&failure), "GitLab could not tell which agents a CI job may use");
            AuthError::Unavailable
        }
    }
}

#[async_trait]
impl Source for CiJobs {
    fn kind(&self) -> SourceKind {
        SourceKind::Ci
    }

    fn accepts(&self, credential: &Credential) -> bool {
        credential.bearer().is_some_and(|bearer| matches!(bearer.form(), Form::Ci(_)))
    }

    async fn authenticate(
        &self,
        credential: &Credential,
        agent: AgentId,
        from: Option<IpAddr>,
    ) -> Result<Caller, AuthError> {
        self.caller(&Presented::new(credential, from)?, agent).await
    }

    async fn recheck(&self, caller: &Caller, agent: AgentId) -> Result<Caller, AuthError> {
        self.caller(caller.hold.state::<Presented>().ok_or(AuthError::Unknown)?, agent).await
    }

    async fn reach(&self, credential: &Credential, from: Option<IpAddr>) -> Result<Reach, AuthError> {
        let job = self.job(&Presented::new(credential, from)?).await?;
        let agents = job.value.agents.iter().map(|agent| agent.id).collect();
        Ok(Reach::Agents { name: name(&job.value), agents })
    }
}

/// Returns the name of a job as a caller.
fn name(job: &Job) -> Arc<str> {
    format!("gitlab:ci_job:{}", job.id).into()
}

/// Returns as whom the requests of a job run in the cluster of `agent`; `None`: the job may not use it.
fn run_as(job: &Job, agent: AgentId) -> Option<RunAs> {
    let allowed = job.agents.iter().find(|allowed| allowed.id == agent)?;
    let identity = |mode, identity| Some(RunAs::Identity { mode, identity: Arc::new(identity) });
    match &allowed.access_as {
        AccessAs::Agent => Some(RunAs::Agent { allows_impersonate_headers: true }),
        AccessAs::CiJob => identity(Mode::CiJob, ci_job(job, allowed)),
        AccessAs::Impersonate(configured) => identity(Mode::Impersonate, configured.clone()),
        AccessAs::Unknown => None,
    }
}

/// Returns the identity of a CI job, as GitLab documents it.
fn ci_job(job: &Job, agent: &AllowedAgent) -> Impersonation {
    let Job { id, pipeline, project, .. } = job;
    let environment = job.environment.as_ref();
    // Empty: GitLab did not report it.
    let slug = environment.map(|environment| &environment.slug).filter(|slug| !slug.is_empty());
    let tier = environment.map(|environment| &environment.tier).filter(|tier| !tier.is_empty());
    let mut groups = vec!["gitlab:ci_job".to_owned()];
    for group in &job.groups {
        groups.push(format!("gitlab:group:{group}"));
        groups.extend(tier.map(|tier| format!("gitlab:group_env_tier:{group}:{tier}")));
    }
    groups.push(format!("gitlab:project:{project}"));
    let mut extra = vec![
        ("id", agent.id.to_string()),
        ("config_project_id", agent.config_project.to_string()),
        ("project_id", project.to_string()),
        ("ci_pipeline_id", pipeline.to_string()),
        ("ci_job_id", id.to_string()),
        ("username", job.username.clone()),
    ];
    groups.extend(slug.map(|slug| format!("gitlab:project_env:{project}:{slug}")));
    groups.extend(tier.map(|tier| format!("gitlab:project_env_tier:{project}:{tier}")));
    extra.extend(slug.map(|slug| ("environment_slug", slug.clone())));
    extra.extend(tier.map(|tier| ("environment_tier", tier.clone())));
    Impersonation {
        username: format!("gitlab:ci_job:{id}"),
        groups,
        uid: None,
        extra: extra
            .into_iter()
            .map(|(key, value)| (format!("agent.gitlab.com/{key}"), vec![value]))
            .collect(),
    }
}

#[cfg(test)]
mod tests;
