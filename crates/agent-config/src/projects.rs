//! Configurations in the configuration projects of GitLab: one task for each project that has an agent with
//! an open stream here.

use std::{
    collections::{BTreeSet, HashMap},
    sync::{Arc, Weak},
    time::Duration,
};

use git_sources::{Follower, Repositories, RepositoryId, code};
use ids::AgentId;
use parking_lot::Mutex;
use repository::{Commit, Content, Error, Fingerprint, ReadLimits, Revision};
use tokio::{
    sync::Notify,
    task::{Id, JoinSet},
    time::Instant,
};

use crate::{
    AgentConfigs, ConfigStream, PREFIX, Source, kas_file::KasRead, kas_path_of, parsed_kas_yaml, path_of,
    version,
};

/// The wait after the first failure to read files. It doubles with each further one.
const BACKOFF: Duration = Duration::from_secs(1);
/// The longest wait after a failure.
const LONGEST_BACKOFF: Duration = Duration::from_secs(60);
/// Agents whose files are read by one call, two for each.
const AGENTS: usize = 100;
/// How long a check may take that was asked for by an agent with a commit that is unknown here.
const CHECK: Duration = Duration::from_secs(12);

/// The configuration projects of agents with an open stream.
#[derive(Debug)]
pub(super) struct Projects {
    repositories: Arc<Repositories>,
    period: Duration,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    projects: HashMap<i64, Project>,
    /// Projects whose task has to be started.
    idle: Vec<i64>,
}

#[derive(Debug, Default)]
struct Project {
    /// Whether its task runs, or is about to be started.
    is_running: bool,
    /// Notified when streams of its agents begin or end.
    changed: Arc<Notify>,
    agents: BTreeSet<AgentId>,
}

/// What the task of a project has to do.
#[derive(Debug, Default)]
struct Work {
    /// Whether an agent has a stream open.
    is_open: bool,
    /// Agents whose files have not been read at the commit, and their names.
    stale: Vec<(AgentId, Arc<str>)>,
    /// Streams of agents with another commit.
    unconfirmed: Vec<(AgentId, Weak<ConfigStream>)>,
    /// When the newest of them was opened.
    newest: Option<Instant>,
}

impl Projects {
    pub(super) fn new(repositories: Arc<Repositories>, period: Duration) -> Self {
        Self { repositories, period, state: Mutex::default() }
    }

    /// An agent of a project opens a stream. Returns what to notify when that begins and ends.
    ///
    /// The caller holds the lock of the watched agents, in which it records the stream.
    pub(super) fn add(&self, project: i64, agent: AgentId) -> Arc<Notify> {
        let mut state = self.state.lock();
        let entry = state.projects.entry(project).or_default();
        entry.agents.insert(agent);
        let changed = Arc::clone(&entry.changed);
        if !std::mem::replace(&mut entry.is_running, true) {
            state.idle.push(project);
        }
        changed
    }

    fn changed(&self, project: i64) -> Arc<Notify> {
        Arc::clone(&self.state.lock().projects.entry(project).or_default().changed)
    }

    fn agents(&self, project: i64) -> BTreeSet<AgentId> {
        self.state.lock().projects.get(&project).map(|known| known.agents.clone()).unwrap_or_default()
    }

    /// The task of a project has ended. It is started again if the project still has agents.
    fn ended(&self, project: i64) {
        let mut state = self.state.lock();
        if state.projects.contains_key(&project) {
            state.idle.push(project);
        }
    }
}

impl AgentConfigs {
    /// Runs a task for each project until dropped.
    pub(super) async fn follow_projects(self: &Arc<Self>, projects: &Projects) {
        let mut running = HashMap::new();
        let mut tasks = JoinSet::new();
        loop {
            let idle = std::mem::take(&mut projects.state.lock().idle);
            for project in idle {
                let task = tasks.spawn(Arc::clone(self).follow_project(project));
                running.insert(task.id(), project);
            }
            tokio::select! {
                () = self.look.notified() => {}
                Some(ended) = tasks.join_next_with_id(), if !tasks.is_empty() => {
                    let id: Id = match ended {
                        Ok((id, ())) => id,
                        Err(error) => {
                            tracing::error!(%error, "reading agent configurations panicked");
                            error.id()
                        }
                    };
                    if let Some(project) = running.remove(&id) {
                        projects.ended(project);
                    }
                }
            }
        }
    }

    /// Reads the files of the agents of a project until none of them has a stream.
    async fn follow_project(self: Arc<Self>, project: i64) {
        let Source::Projects(projects) = &self.source else { return };
        let changed = projects.changed(project);
        let id = RepositoryId::Project(project);
        let mut follower = match projects.repositories.follow(id, &Revision::Head, projects.period) {
            Ok(follower) => follower,
            Err(error) => {
                tracing::error!(project, %error, "agent configurations are not read");
                self.cannot_read(projects.agents(project), &Error::io(error.to_string()));
                return tokio::time::sleep(LONGEST_BACKOFF).await;
            }
        };
        let mut failures = 0_u32;
        let mut retry = None;
        loop {
            let mut head = follower.head();
            let mut work = self.work(projects, project, head.commit);
            if !work.is_open {
                return;
            }
            if let (None, Some(failure)) = (head.commit, &head.failure) {
                self.cannot_read(projects.agents(project), &failure.error);
            }
            let is_due = retry.is_none_or(|at| at <= Instant::now());
            if let Some(known) = head.commit
                && is_due
            {
                retry = None;
                if let Some(since) = work.newest {
                    let checked = tokio::time::timeout(CHECK, follower.refresh(since)).await;
                    head = follower.head();
                    if checked.is_err() || head.failure.is_some() {
                        // They get nothing before it is known that it is no older commit.
                        work.unconfirmed.clear();
                        retry = Some(Instant::now() + BACKOFF);
                    }
                }
                let commit = head.commit.unwrap_or(known);
                if commit != known {
                    work.stale = self.work(projects, project, Some(commit)).stale;
                }
                match self.read_files(&follower, commit, work.stale).await {
                    Ok(()) => {
                        failures = 0;
                        self.confirm(work.unconfirmed);
                    }
                    Err(error) => {
                        self.cannot_read(projects.agents(project), &error);
                        if failures == 0 {
                            let code = code(&error);
                            tracing::warn!(project, code, %error, "agent configurations cannot be read");
                        }
                        if matches!(error, Error::Denied(_)) {
                            projects.repositories.ask_again(id);
                        }
                        let wait = BACKOFF.saturating_mul(1 << failures.min(10)).min(LONGEST_BACKOFF);
                        failures = failures.saturating_add(1);
                        retry = Some(Instant::now() + wait.mul_f64(0.5 + rand::random::<f64>() / 2.0));
                        if matches!(error, Error::Gone(_)) {
                            // Replaced by a force-push since it was found. If the check fails, this waits.
                            let _ = tokio::time::timeout(CHECK, follower.refresh(Instant::now())).await;
                        }
                    }
                }
            }
            let due = async {
                match retry {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = follower.changed() => {}
                () = changed.notified() => {}
                () = due => {}
            }
        }
    }

    /// Returns what there is to do at a commit, and forgets agents without a stream.
    fn work(&self, projects: &Projects, project: i64, commit: Option<Option<Commit>>) -> Work {
        let wanted = commit.map(fingerprint);
        let mut work = Work::default();
        let mut watched = self.watched();
        let mut state = projects.state.lock();
        let Some(known) = state.projects.get_mut(&project) else { return work };
        known.agents.retain(|agent| {
            let Some(entry) = watched.get_mut(agent).filter(|entry| entry.project == project) else {
                return false;
            };
            if !entry.is_open() {
                watched.remove(agent);
                return false;
            }
            if entry.fingerprint != wanted {
                work.stale.push((*agent, Arc::clone(&entry.name)));
            }
            for stream in &entry.unconfirmed {
                let since = stream.upgrade().map(|stream| stream.since);
                work.newest = work.newest.max(since);
                work.unconfirmed.push((*agent, Weak::clone(stream)));
            }
            true
        });
        work.is_open = !known.agents.is_empty();
        if !work.is_open {
            state.projects.remove(&project);
        }
        work
    }

    /// Reads and publishes files at a commit.
    async fn read_files(
        self: &Arc<Self>,
        follower: &Follower,
        commit: Option<Commit>,
        agents: Vec<(AgentId, Arc<str>)>,
    ) -> Result<(), Error> {
        if agents.is_empty() {
            return Ok(());
        }
        let repository = follower.repository()?;
        for agents in agents.chunks(AGENTS) {
            let mut paths = Vec::with_capacity(2 * agents.len());
            for (_, name) in agents {
                paths.extend([kas_path_of(PREFIX, name)?, path_of(PREFIX, name)?]);
            }
            let contents = match &commit {
                None => vec![Content::Absent; paths.len()],
                Some(commit) => {
                    let limits = ReadLimits { file: self.limit, total: self.limit * paths.len() as u64 };
                    repository.read(commit, &paths, limits).await?
                }
            };
            let mut contents = paths.iter().zip(contents);
            let mut read = Vec::with_capacity(agents.len());
            for (agent, name) in agents {
                let (Some((kas_path, kas)), Some((path, content))) = (contents.next(), contents.next())
                else {
                    return Err(Error::io("fewer files were read than were asked for".to_owned()));
                };
                let kas = (kas, repository.shown(kas_path));
                let place = repository.place(&Revision::Head, path);
                read.push((*agent, Arc::clone(name), kas, content, repository.shown(path), place));
            }
            let this = Arc::clone(self);
            // Parsing takes milliseconds for a large file.
            let parsed = tokio::task::spawn_blocking(move || {
                for (agent, name, (kas, kas_shown), content, shown, place) in read {
                    let current = this.parsed(&name, version(commit), content, &shown, || place);
                    let parsed = Ok(parsed_kas_yaml(kas, &kas_shown));
                    let kas = KasRead { fingerprint: fingerprint(commit), parsed, shown: kas_shown };
                    this.publish_both(agent, kas, fingerprint(commit), Ok(current));
                }
            });
            if let Err(error) = parsed.await {
                return Err(Error::io(format!("parsing agent configurations panicked: {error}")));
            }
        }
        Ok(())
    }

    /// Shows to agents what was read: no newer commit is known that they could have had.
    fn confirm(&self, streams: Vec<(AgentId, Weak<ConfigStream>)>) {
        if streams.is_empty() {
            return;
        }
        let mut watched = self.watched();
        for (agent, stream) in streams {
            let Some(entry) = watched.get_mut(&agent) else { continue };
            entry.unconfirmed.retain(|other| !Weak::ptr_eq(other, &stream));
            if let (Some(current), Some(stream)) = (&entry.current, stream.upgrade()) {
                stream.show(current);
                if let Some(reports) = self.reports.as_ref().filter(|_| current.commit().is_some()) {
                    reports.known(agent);
                }
            }
            entry.streams.push(stream);
        }
    }
}

fn fingerprint(commit: Option<Commit>) -> Fingerprint {
    commit.map_or(Fingerprint::Absent, Fingerprint::Commit)
}

#[cfg(test)]
mod tests;
