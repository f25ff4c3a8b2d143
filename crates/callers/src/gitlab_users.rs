//! Users of GitLab, by personal access tokens and by the sessions of their browsers.
//!
//! GitLab decides whether a user may use an agent, and as whom: it knows `user_access` of the agent's
//! configuration and the roles of the user.

use std::{fmt, net::IpAddr, sync::Arc, time::Duration};

use async_trait::async_trait;
use gitlab::{AccessKey, LookupError, ProxyUser, ProxyUsers, RolesIn, Urgency, UserAccess};
use ids::{AgentId, Impersonation};
use process::error::chain;
use tokio::time::Instant;

use crate::{
    AuthError, Caller, Credential, Form, Grant, Hold, Mode, Reach, RunAs, Source, SourceKind,
    cache::{Answer, Before, Cache, Key, Keys},
};

/// How often open requests are checked again if nothing is cached.
const RECHECK_WITHOUT_CACHE: Duration = Duration::from_secs(60);

/// The users of a GitLab, by one kind of credential.
pub struct GitLabUsers {
    kind: SourceKind,
    gitlab: Arc<dyn ProxyUsers>,
    keys: Keys,
    cache: Cache<Key, ProxyUser>,
    ttl: Duration,
}

impl fmt::Debug for GitLabUsers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GitLabUsers")
            .field("kind", &self.kind)
            .field("ttl", &self.ttl)
            .finish_non_exhaustive()
    }
}

/// A credential, and the network that it came from, if known.
#[derive(Clone)]
struct Presented {
    credential: Credential,
    from: Option<IpAddr>,
}

impl GitLabUsers {
    /// Returns the source of users by their personal access tokens, with an empty cache. Answers are used for
    /// `ttl`, and open requests are checked again that often; zero: GitLab is asked for each request.
    /// Refusals are used for `refusal_ttl`.
    pub fn by_token(gitlab: Arc<dyn ProxyUsers>, ttl: Duration, refusal_ttl: Duration) -> Self {
        Self { kind: SourceKind::Pat, gitlab, keys: Keys::random(), cache: Cache::new(ttl, refusal_ttl), ttl }
    }

    /// Returns the source of users by the sessions of their browsers. See [`GitLabUsers::by_token`].
    pub fn by_session(gitlab: Arc<dyn ProxyUsers>, ttl: Duration, refusal_ttl: Duration) -> Self {
        Self {
            kind: SourceKind::Cookie,
            gitlab,
            keys: Keys::random(),
            cache: Cache::new(ttl, refusal_ttl),
            ttl,
        }
    }

    async fn user(&self, presented: &Presented, agent: AgentId) -> Result<Answer<ProxyUser>, AuthError> {
        let Presented { credential, from } = presented;
        let key = match access_key(credential).ok_or(AuthError::Unknown)? {
            AccessKey::PersonalAccessToken(token) => {
                self.keys.key(self.kind, Some(agent), &[token.as_bytes()])
            }
            // An answer is for both: a page that knows only the cookie gets none.
            AccessKey::Session { cookie, csrf_token } => {
                self.keys.key(self.kind, Some(agent), &[cookie.as_bytes(), csrf_token.as_bytes()])
            }
        };
        let lookup = |before: Before| {
            let urgency = Urgency::New { from: *from, priority: before.priority() };
            let (gitlab, credential) = (Arc::clone(&self.gitlab), credential.clone());
            async move {
                let key = access_key(&credential).ok_or(AuthError::Unknown)?;
                let user = gitlab.authorize_proxy_user(agent, key, urgency).await;
                let user = user.map_err(|error| refusal(&error))?;
                if user.agent != agent {
                    tracing::warn!(
                        agent.id = agent.get(),
                        answered = user.agent.get(),
                        "GitLab answered about another agent than the one that a user asked for: refused"
                    );
                    return Err(AuthError::Forbidden);
                }
                if user.access == UserAccess::Unknown {
                    tracing::warn!(
                        agent.id = agent.get(),
                        "GitLab gives users access to an agent in a way that this version does not know: refused"
                    );
                }
                Ok(user)
            }
        };
        self.cache.get(key, *from, lookup).await
    }

    async fn caller(&self, presented: &Presented, agent: AgentId) -> Result<Caller, AuthError> {
        let Answer { value: user, until } = self.user(presented, agent).await?;
        let run_as = run_as(&user, self.kind).ok_or(AuthError::Forbidden)?;
        let recheck_at = if self.ttl.is_zero() { Instant::now() + RECHECK_WITHOUT_CACHE } else { until };
        Ok(Caller {
            source: self.kind,
            name: format!("gitlab:user:{}", user.username).into(),
            uid: None,
            groups: Arc::new([]),
            extra: Arc::new([]),
            gitlab_user: Some(user.user),
            grant: Grant::Decided(run_as),
            recheck_at: Some(recheck_at),
            // A lookup needs the credential itself.
            hold: Hold::new(Arc::new(presented.clone())),
        })
    }
}

/// Returns the credential in GitLab's form; `None`: it is not one of a user of GitLab.
fn access_key(credential: &Credential) -> Option<AccessKey<'_>> {
    match credential {
        Credential::Bearer(bearer) if matches!(bearer.form(), Form::Pat(_)) => {
            Some(AccessKey::PersonalAccessToken(bearer.secret()))
        }
        Credential::Bearer(_) | Credential::Certificate(_) => None,
        Credential::Session(session) => {
            Some(AccessKey::Session { cookie: session.cookie(), csrf_token: session.csrf_token() })
        }
    }
}

/// Logs why GitLab gave no answer, and returns what that means for the caller.
fn refusal(error: &LookupError) -> AuthError {
    match error {
        LookupError::Unknown => AuthError::Unknown,
        LookupError::Forbidden => AuthError::Forbidden,
        LookupError::Busy => AuthError::Unavailable,
        LookupError::Failed(failure) => {
            tracing::warn!(error = chain(failure), "GitLab could not tell whether a user may use an agent");
            AuthError::Unavailable
        }
    }
}

#[async_trait]
impl Source for GitLabUsers {
    fn kind(&self) -> SourceKind {
        self.kind
    }

    fn accepts(&self, credential: &Credential) -> bool {
        credential.source() == Some(self.kind)
    }

    async fn authenticate(
        &self,
        credential: &Credential,
        agent: AgentId,
        from: Option<IpAddr>,
    ) -> Result<Caller, AuthError> {
        self.caller(&Presented { credential: credential.clone(), from }, agent).await
    }

    async fn recheck(&self, caller: &Caller, agent: AgentId) -> Result<Caller, AuthError> {
        self.caller(caller.hold.state::<Presented>().ok_or(AuthError::Unknown)?, agent).await
    }

    async fn reach(&self, _credential: &Credential, _from: Option<IpAddr>) -> Result<Reach, AuthError> {
        // GitLab answers only for one agent.
        Ok(Reach::Unlisted)
    }
}

/// Returns as whom the requests of a user run; `None`: it may not use the agent.
fn run_as(user: &ProxyUser, source: SourceKind) -> Option<RunAs> {
    match &user.access {
        UserAccess::Agent => Some(RunAs::Agent { allows_impersonate_headers: true }),
        UserAccess::User { projects, groups } => {
            let identity = Arc::new(identity(user, projects, groups, source));
            Some(RunAs::Identity { mode: Mode::User, identity })
        }
        UserAccess::Unknown => None,
    }
}

/// Returns the identity of a user, as GitLab documents it.
fn identity(user: &ProxyUser, projects: &[RolesIn], groups: &[RolesIn], source: SourceKind) -> Impersonation {
    let roles = |kind: &'static str, list: &[RolesIn]| -> Vec<String> {
        let of = |RolesIn { id, roles }: &RolesIn| {
            roles.iter().map(|role| format!("gitlab:{kind}_role:{id}:{role}")).collect::<Vec<_>>()
        };
        list.iter().flat_map(of).collect()
    };
    let mut all = vec!["gitlab:user".to_owned()];
    all.extend(roles("project", projects));
    all.extend(roles("group", groups));
    let extra = [
        ("id", user.agent.to_string()),
        ("username", user.username.clone()),
        ("access_type", source.access_type().to_owned()),
        ("config_project_id", user.config_project.to_string()),
    ];
    Impersonation {
        username: format!("gitlab:user:{}", user.username),
        groups: all,
        uid: None,
        extra: extra
            .into_iter()
            .map(|(key, value)| (format!("agent.gitlab.com/{key}"), vec![value]))
            .collect(),
    }
}

#[cfg(test)]
mod tests;
