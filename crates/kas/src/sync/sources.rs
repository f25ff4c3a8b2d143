//! The repositories of manifest projects, as planners see them: those of GitLab, and those on this host.
//!
//! Heads come from [`Repositories`], which checks each revision once for all agents of this replica. What a
//! sync reads, and whether the head is still the same, is asked of the repository itself.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use git_sources::{
    Follower, Head, Opened, Repositories, RepositoryId,
    access::{Access, Grant, ReadProject, Refused},
};
use identity::gitlab::GitLabIdentity;
use ids::{Agent, AgentId, Match};
use parking_lot::Mutex;
use planner::{FollowedHead, Heads, Source, SourceError, Sources};
use repository::{
    Commit, Content, Depth, Error, Listing, ReadLimits, RepoPath, Repository, Revision, Versioning,
};
use secrecy::ExposeSecret as _;
use tokio::{
    sync::watch,
    time::{Instant, timeout},
};

/// How long a permission counts after it should have been checked, while GitLab cannot be asked.
const GRACE: Duration = Duration::from_secs(300);
/// The pause until GitLab is asked again, after it could not be asked, or its Gitaly refused the token.
const ASK_AGAIN: Duration = Duration::from_secs(10);

/// How long a check of a repository may take that somebody waits for.
const CHECK: Duration = Duration::from_secs(12);

/// Says which projects an agent may read.
#[async_trait]
pub(crate) trait Permissions: Send + Sync + 'static {
    /// Returns the id of the project with this path, if the agent may read its repository.
    async fn check(&self, agent: AgentId, path: &str) -> Result<Grant<i64>, Refused>;

    /// Forgets a permission, so that GitLab is asked by the next check.
    fn forget(&self, agent: AgentId, path: &str);
}

/// Asks GitLab with the token of the agent's newest stream.
pub(crate) struct AskGitLab {
    pub(crate) access: Arc<Access<ReadProject>>,
    pub(crate) identity: Arc<GitLabIdentity>,
}

#[async_trait]
impl Permissions for AskGitLab {
    async fn check(&self, agent: AgentId, path: &str) -> Result<Grant<i64>, Refused> {
        let Some(token) = self.identity.token(agent) else {
            return Err(Refused::Unavailable("no stream of the agent is open at this replica".to_owned()));
        };
        self.access.check(token.expose_secret(), path).await
    }

    fn forget(&self, agent: AgentId, path: &str) {
        if let Some(token) = self.identity.token(agent) {
            self.access.forget(token.expose_secret(), path);
        }
    }
}

/// The repositories of manifest projects.
pub(crate) struct GitSources {
    repositories: Arc<Repositories>,
    /// `None`: there is no GitLab.
    gitlab: Option<Arc<dyn Permissions>>,
    /// The time between two checks of a repository of GitLab.
    period: Duration,
}

impl GitSources {
    pub(crate) fn new(
        repositories: Arc<Repositories>,
        gitlab: Option<Arc<dyn Permissions>>,
        period: Duration,
    ) -> Self {
        Self { repositories, gitlab, period }
    }

    fn source(&self, id: RepositoryId, number: i64, permit: Option<Permit>) -> Result<Source, SourceError> {
        let number = u64::try_from(number).map_err(|error| SourceError::Denied(error.to_string()))?;
        let permitted = Permitted {
            repositories: Arc::clone(&self.repositories),
            id,
            period: self.period,
            permit,
            opened: Mutex::new(None),
            // Heads tell of changes.
            changes: watch::Sender::new(0),
        };
        let permitted = Arc::new(permitted);
        Ok(Source { id: number, repository: Arc::clone(&permitted) as _, heads: Arc::new(Shared(permitted)) })
    }
}

#[async_trait]
impl Sources for GitSources {
    async fn open(&self, agent: &Agent, name: &str) -> Result<Source, SourceError> {
        // Whether there is a repository of that name must not show to agents that may not read it.
        let denied = || {
            let see = if self.gitlab.is_some() { "GitLab, or " } else { "" };
            SourceError::Denied(format!(
                "agent {} may read no repository named {name:?}: see {see}the key repositories of kas",
                agent.id
            ))
        };
        if let Some(local) = self.repositories.local(name) {
            let selector = local.agents.as_ref().ok_or_else(denied)?;
            if selector.matches(agent.id, Some(agent.project_id), Some(&agent.name)) != Match::Yes {
                return Err(denied());
            }
            return self.source(RepositoryId::Local(local.id), local.id, None);
        }
        let gitlab = self.gitlab.as_ref().ok_or_else(denied)?;
        match gitlab.check(agent.id, name).await {
            Ok(grant) => {
                let permit = Permit::new(Arc::clone(gitlab), agent.id, name, &grant);
                self.source(RepositoryId::Project(grant.found), grant.found, Some(permit))
            }
            Err(Refused::Unauthenticated | Refused::Forbidden) => Err(denied()),
            Err(Refused::Unavailable(why)) => Err(SourceError::Unavailable(format!(
                "GitLab cannot be asked whether agent {} may read {name:?}: {why}",
                agent.id
            ))),
        }
    }
}

/// That an agent may read a project, for as long as GitLab says so.
struct Permit {
    gitlab: Arc<dyn Permissions>,
    agent: AgentId,
    path: String,
    project: i64,
    held: Mutex<Held>,
}

struct Held {
    /// How long the last answer counts.
    until: Instant,
    /// When GitLab is asked again.
    ask: Instant,
    /// Why the agent may not read it any more. That is final: the project is opened again.
    refused: Option<String>,
    /// Why GitLab could not be asked.
    unknown: Option<String>,
}

impl std::fmt::Debug for Permit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Permit").field("agent", &self.agent).field("path", &self.path).finish_non_exhaustive()
    }
}

impl Permit {
    fn new(gitlab: Arc<dyn Permissions>, agent: AgentId, path: &str, grant: &Grant<i64>) -> Self {
        let held = Held { until: grant.until, ask: grant.until, refused: None, unknown: None };
        Self { gitlab, agent, path: path.to_owned(), project: grant.found, held: Mutex::new(held) }
    }

    /// Asks GitLab if it is time. The error is [`Error::Denied`] if the agent may not read it, and another
    /// one if that has been unknown for too long.
    async fn check(&self) -> Result<(), Error> {
        let is_due = Instant::now() >= self.held.lock().ask;
        if is_due && self.held.lock().refused.is_none() {
            let answer = self.gitlab.check(self.agent, &self.path).await;
            let now = Instant::now();
            let held = &mut *self.held.lock();
            match answer {
                Ok(grant) if grant.found == self.project => {
                    (held.until, held.ask, held.unknown) = (grant.until, grant.until, None);
                }
                Ok(grant) => {
                    held.refused = Some(format!(
                        "{} is project {} now, and was project {}: what was applied stays",
                        self.path, grant.found, self.project
                    ));
                }
                Err(Refused::Unauthenticated | Refused::Forbidden) => {
                    held.refused = Some(format!(
                        "agent {} may not read {} any more, as GitLab says: what was applied stays",
                        self.agent, self.path
                    ));
                }
                Err(Refused::Unavailable(why)) => {
                    (held.ask, held.unknown) = (now + ASK_AGAIN, Some(why));
                }
            }
        }
        let held = self.held.lock();
        match (&held.refused, &held.unknown) {
            (Some(why), _) => Err(Error::Denied(why.clone())),
            (None, Some(why)) if Instant::now() >= held.until + GRACE => Err(Error::Backend {
                code: "UNAVAILABLE",
                message: format!("GitLab cannot be asked whether agent {} may read it: {why}", self.agent),
            }),
            _ => Ok(()),
        }
    }

    /// When [`check`](Self::check) may give another result.
    fn next(&self) -> Instant {
        self.held.lock().ask
    }

    /// The credentials that GitLab gave are not good any more: it is asked again, but not all the time.
    fn renew(&self) {
        self.gitlab.forget(self.agent, &self.path);
        let mut held = self.held.lock();
        held.ask = held.ask.min(Instant::now() + ASK_AGAIN);
    }
}

/// A repository that an agent may read.
#[derive(Debug)]
struct Permitted {
    repositories: Arc<Repositories>,
    id: RepositoryId,
    period: Duration,
    /// `None`: it is on this host, and the permission does not end.
    permit: Option<Permit>,
    opened: Mutex<Option<Opened>>,
    changes: watch::Sender<u64>,
}

impl Permitted {
    async fn check(&self) -> Result<(), Error> {
        match &self.permit {
            Some(permit) => permit.check().await,
            None => Ok(()),
        }
    }

    /// Opens the repository where it is now.
    async fn open(&self) -> Result<Arc<dyn Repository>, Error> {
        self.check().await?;
        let mut opened = self.opened.lock();
        let now = self.repositories.open(self.id, opened.as_ref()).map_err(|error| self.refused(error))?;
        Ok(Arc::clone(opened.insert(now).repository()))
    }

    /// Only GitLab denies for good. A server that refuses its token may take the next one.
    fn refused(&self, error: Error) -> Error {
        let Error::Denied(message) = error else { return error };
        if let Some(permit) = &self.permit {
            permit.renew();
        }
        self.repositories.ask_again(self.id);
        Error::Backend { code: "UNAUTHENTICATED", message }
    }
}

#[async_trait]
impl Repository for Permitted {
    async fn resolve(&self, revision: &Revision) -> Result<Option<Commit>, Error> {
        let result = self.open().await?.resolve(revision).await;
        result.map_err(|error| self.refused(error))
    }

    async fn list(
        &self,
        commit: &Commit,
        under: Option<&RepoPath>,
        depth: Depth,
        most: usize,
    ) -> Result<Listing, Error> {
        let result = self.open().await?.list(commit, under, depth, most).await;
        result.map_err(|error| self.refused(error))
    }

    async fn read(
        &self,
        commit: &Commit,
        paths: &[RepoPath],
        limits: ReadLimits,
    ) -> Result<Vec<Content>, Error> {
        let result = self.open().await?.read(commit, paths, limits).await;
        result.map_err(|error| self.refused(error))
    }

    fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    fn tell_changed(&self) {
        self.changes.send_modify(|count| *count = count.wrapping_add(1));
    }

    fn versioning(&self) -> Versioning {
        Versioning::Commit
    }

    fn place(&self, revision: &Revision, path: &RepoPath) -> String {
        match &self.permit {
            Some(permit) => format!("{path} at {revision} of {}", permit.path),
            None => format!("{path} at {revision}"),
        }
    }
}

/// The heads of a repository, checked once for all who follow them.
#[derive(Debug)]
struct Shared(Arc<Permitted>);

impl Heads for Shared {
    fn follow(&self, revision: &Revision) -> Result<Box<dyn FollowedHead>, SourceError> {
        let Permitted { repositories, id, period, .. } = &*self.0;
        let follower = repositories
            .follow(*id, revision, *period)
            .map_err(|error| SourceError::Unavailable(error.to_string()))?;
        Ok(Box::new(Followed { source: Arc::clone(&self.0), follower, last: None, outdated: None }))
    }
}

struct Followed {
    source: Arc<Permitted>,
    follower: Follower,
    /// What was returned last.
    last: Option<Result<Option<Commit>, Error>>,
    /// Since when the poller is known not to have the newest head.
    outdated: Option<Instant>,
}

impl Followed {
    /// What is known of the revision; `None`: nothing yet.
    async fn now(&mut self) -> Option<Result<Option<Commit>, Error>> {
        if let Err(error) = self.source.check().await {
            return Some(Err(error));
        }
        if let Some(since) = self.outdated {
            // If it takes longer, what is known is better than nothing.
            let _ = timeout(CHECK, self.follower.refresh(since)).await;
            self.outdated = None;
        }
        let Head { commit, failure } = self.follower.head();
        match failure {
            Some(failure) => Some(Err(self.source.refused(failure.error))),
            None => commit.map(Ok),
        }
    }
}

#[async_trait]
impl FollowedHead for Followed {
    async fn changed(&mut self) -> Result<Option<Commit>, Error> {
        loop {
            if let Some(now) = self.now().await {
                let is_same = match (&self.last, &now) {
                    (_, Err(Error::Denied(_))) => false,
                    (Some(Ok(last)), Ok(now)) => last == now,
                    (Some(Err(_)), Err(_)) => true,
                    _ => false,
                };
                if !is_same {
                    self.last = Some(now.clone());
                    return now;
                }
            }
            let ask = self.source.permit.as_ref().map(Permit::next);
            let ask = async {
                match ask {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = self.follower.changed() => {}
                () = ask => {}
            }
        }
    }

    fn forget(&mut self) {
        self.last = None;
    }

    fn outdated(&mut self) {
        self.last = None;
        self.outdated = Some(Instant::now());
    }
}

#[cfg(test)]
mod tests;
