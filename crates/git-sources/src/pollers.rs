//! [`Repositories`]: checks each (repository, revision) that somebody follows, once for all of them.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
    time::Duration,
};

use kas_config::LocalRepository;
use parking_lot::Mutex;
use repository::{Commit, Error, Repository, Revision};
use tokio::{
    sync::{Notify, Semaphore, watch},
    task::JoinSet,
    time::Instant,
};

use crate::{
    Local, RepositoryId,
    blobs::Blobs,
    code, local,
    projects::{Opened, Projects},
    schedule::{Outcome, SHORTEST, Schedule},
};

/// The most revisions that are followed at once. Agents can name any number of them.
const MOST: usize = 100_000;
/// The most checks at once. The client of Gitaly has limits of its own for each server.
const MOST_CHECKS: usize = 64;
/// Calls that read files at the same time.
const MOST_READING: usize = 16;
/// How long a revision that nobody follows is remembered, so that an agent that calls again finds it.
const LINGER: Duration = Duration::from_secs(60);

/// Too many revisions are followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("this replica follows {MOST} revisions of repositories and takes no more")]
pub struct TooMany;

/// What is known of a revision.
#[derive(Clone, Debug, Default)]
pub struct Head {
    /// The commit, as the last successful check found it; the inner `None`: there is none. `None`: it has not
    /// been checked yet.
    pub commit: Option<Option<Commit>>,
    /// Why the last check failed; `None`: it did not.
    pub failure: Option<Failure>,
}

/// Why a repository cannot be read at the moment.
#[derive(Clone, Debug)]
pub struct Failure {
    /// The error of the last check.
    pub error: Error,
    /// When the first of the failed checks ended.
    pub since: Instant,
}

/// The repositories that agents need.
#[derive(Debug)]
pub struct Repositories {
    projects: Option<Arc<dyn Projects>>,
    local: HashMap<String, Local>,
    /// Checks of projects per second.
    rate: f64,
    state: Mutex<State>,
    woken: Notify,
    pub(crate) blobs: Blobs,
    /// Limits calls that read files at the same time.
    pub(crate) reading: Semaphore,
}

#[derive(Debug, Default)]
struct State {
    pollers: HashMap<u64, Poller>,
    by_revision: HashMap<(RepositoryId, Revision), u64>,
    by_repository: HashMap<RepositoryId, Vec<u64>>,
    /// Every poller without a running check, by when it is due.
    due: BTreeSet<(Instant, u64)>,
    next: u64,
    /// Pollers of projects.
    projects: usize,
}

#[derive(Debug)]
struct Poller {
    id: RepositoryId,
    revision: Revision,
    followers: usize,
    /// When the last follower left.
    unused: Instant,
    period: Duration,
    schedule: Schedule,
    head: watch::Sender<Head>,
    /// Counts checks that have ended.
    ended: watch::Sender<u64>,
    due: Instant,
    begun: Option<Instant>,
    /// When the last check that has ended began.
    checked: Option<Instant>,
    is_running: bool,
    /// Somebody has asked for a check since the running one began.
    again: bool,
    /// A push was reported since the last check began.
    told: bool,
    /// Somebody waits for the check.
    urgent: bool,
    opened: Option<Opened>,
}

impl State {
    fn schedule(&mut self, key: u64, due: Instant) {
        let Some(poller) = self.pollers.get_mut(&key) else { return };
        self.due.remove(&(poller.due, key));
        poller.due = due;
        if !poller.is_running {
            self.due.insert((due, key));
        }
    }

    /// Makes a poller due as soon as its shortest period permits.
    fn hurry(&mut self, key: u64, now: Instant) {
        let Some(poller) = self.pollers.get_mut(&key) else { return };
        poller.urgent = true;
        if poller.is_running {
            poller.again = true;
            return;
        }
        let due = poller.soonest(now).min(poller.due);
        self.schedule(key, due);
    }

    fn remove(&mut self, key: u64) {
        let Some(poller) = self.pollers.remove(&key) else { return };
        self.due.remove(&(poller.due, key));
        if matches!(poller.id, RepositoryId::Project(_)) {
            self.projects -= 1;
        }
        if let Some(keys) = self.by_repository.get_mut(&poller.id) {
            keys.retain(|other| *other != key);
            if keys.is_empty() {
                self.by_repository.remove(&poller.id);
            }
        }
        self.by_revision.remove(&(poller.id, poller.revision));
    }
}

impl Poller {
    /// Returns when it may be checked next.
    fn soonest(&self, now: Instant) -> Instant {
        let shortest = if matches!(self.id, RepositoryId::Local(_)) { Duration::ZERO } else { SHORTEST };
        self.begun.map_or(now, |begun| (begun + shortest).max(now))
    }
}

impl Repositories {
    /// Returns the repositories of GitLab's `projects`, if there is a GitLab, and those on this host.
    /// `calls_per_second`: what all calls of Gitaly may use, of which checks use half.
    pub fn new(
        projects: Option<Arc<dyn Projects>>,
        configured: &[LocalRepository],
        calls_per_second: f64,
    ) -> Arc<Self> {
        Arc::new(Self {
            projects,
            local: local(configured),
            rate: (calls_per_second / 2.0).max(f64::MIN_POSITIVE),
            state: Mutex::default(),
            woken: Notify::new(),
            blobs: Blobs::default(),
            reading: Semaphore::new(MOST_READING),
        })
    }

    /// Returns the repository on this host with this name.
    pub fn local(&self, name: &str) -> Option<&Local> {
        self.local.get(name)
    }

    fn local_by_id(&self, id: RepositoryId) -> Option<&Local> {
        self.local.values().find(|local| RepositoryId::Local(local.id) == id)
    }

    /// Whether there are the repositories of GitLab's projects.
    pub fn has_projects(&self) -> bool {
        self.projects.is_some()
    }

    /// Asks GitLab again where a repository is, because its Gitaly refuses the token.
    pub fn ask_again(&self, id: RepositoryId) {
        if let (RepositoryId::Project(project), Some(projects)) = (id, &self.projects) {
            projects.ask_again(project);
        }
    }

    /// Follows a revision: it is checked every `period`, and up to half longer, or more often if somebody
    /// else follows it with a shorter period.
    ///
    /// # Errors
    /// [`TooMany`].
    pub fn follow(
        self: &Arc<Self>,
        id: RepositoryId,
        revision: &Revision,
        period: Duration,
    ) -> Result<Follower, TooMany> {
        let period = self.local_by_id(id).map_or(period, |local| local.period);
        let now = Instant::now();
        let mut state = self.state.lock();
        let known = state.by_revision.get(&(id, revision.clone())).copied();
        let key = match known {
            Some(key) => key,
            None => {
                if state.pollers.len() >= MOST {
                    return Err(TooMany);
                }
                let key = state.next;
                state.next += 1;
                state.by_revision.insert((id, revision.clone()), key);
                state.by_repository.entry(id).or_default().push(key);
                state.projects += usize::from(matches!(id, RepositoryId::Project(_)));
                let poller = Poller {
                    id,
                    revision: revision.clone(),
                    followers: 0,
                    unused: now,
                    period,
                    schedule: Schedule::default(),
                    head: watch::Sender::default(),
                    ended: watch::Sender::default(),
                    due: now,
                    begun: None,
                    checked: None,
                    is_running: false,
                    again: false,
                    told: false,
                    urgent: true,
                    opened: None,
                };
                state.pollers.insert(key, poller);
                state.due.insert((now, key));
                key
            }
        };
        let Some(poller) = state.pollers.get_mut(&key) else { return Err(TooMany) };
        poller.followers += 1;
        poller.period = poller.period.min(period);
        let (head, ended) = (poller.head.subscribe(), poller.ended.subscribe());
        // It was not checked while nobody followed it.
        let is_stale = poller.followers == 1 && known.is_some();
        if is_stale {
            state.hurry(key, now);
        }
        drop(state);
        self.woken.notify_one();
        Ok(Follower { repositories: Arc::clone(self), key, id, head, ended })
    }

    /// GitLab reports a push to a project: its repository is checked now.
    pub fn pushed(&self, project: i64, full_path: &str) {
        let now = Instant::now();
        let local = self.local.get(full_path).map(|local| RepositoryId::Local(local.id));
        let mut state = self.state.lock();
        let keys: Vec<u64> = std::iter::once(RepositoryId::Project(project))
            .chain(local)
            .filter_map(|id| state.by_repository.get(&id))
            .flatten()
            .copied()
            .collect();
        for key in keys {
            if let Some(poller) = state.pollers.get_mut(&key) {
                poller.schedule.pushed(now);
                poller.told = true;
            }
            state.hurry(key, now);
        }
        drop(state);
        self.woken.notify_one();
    }

    /// Checks all repositories on this host now, because a notice says that one may have changed.
    pub fn look_now(&self) {
        let now = Instant::now();
        let mut state = self.state.lock();
        let is_local = |poller: &Poller| matches!(poller.id, RepositoryId::Local(_));
        let keys: Vec<u64> =
            state.pollers.iter().filter(|(_, poller)| is_local(poller)).map(|(key, _)| *key).collect();
        keys.into_iter().for_each(|key| state.hurry(key, now));
        drop(state);
        self.woken.notify_one();
    }

    /// Checks repositories until it is dropped.
    pub async fn run(self: Arc<Self>) {
        let mut checks = JoinSet::new();
        let mut moved = self.projects.as_ref().map(|projects| projects.moved());
        loop {
            let now = Instant::now();
            while checks.len() < MOST_CHECKS
                && let Some(check) = self.begin(now)
            {
                checks.spawn(Arc::clone(&self).check(check));
            }
            let next = self.state.lock().due.first().map(|(at, _)| *at);
            let next_due = async {
                match next {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            let moved = async {
                // The sender lives as long as the projects.
                if let Some(moved) = &mut moved
                    && moved.changed().await.is_ok()
                {
                    return;
                }
                std::future::pending().await
            };
            tokio::select! {
                () = next_due, if checks.len() < MOST_CHECKS => {}
                () = self.woken.notified() => {}
                () = moved => self.retry_failed(),
                ended = checks.join_next(), if !checks.is_empty() => {
                    if let Some(Err(error)) = ended {
                        tracing::error!(error = %error, "a check of a repository panicked");
                    }
                }
            }
        }
    }

    /// Something has changed in where repositories are: those that could not be read are checked now.
    fn retry_failed(&self) {
        let now = Instant::now();
        let mut state = self.state.lock();
        let has_failed = |poller: &Poller| poller.head.borrow().failure.is_some();
        let keys: Vec<u64> =
            state.pollers.iter().filter(|(_, poller)| has_failed(poller)).map(|(key, _)| *key).collect();
        keys.into_iter().for_each(|key| state.hurry(key, now));
    }

    /// Takes the first poller that is due and begins its check. Forgets those that nobody follows.
    fn begin(&self, now: Instant) -> Option<Check> {
        let mut state = self.state.lock();
        loop {
            let key = state.due.first().filter(|(at, _)| *at <= now)?.1;
            let Some(poller) = state.pollers.get_mut(&key) else {
                state.due.pop_first();
                continue;
            };
            if poller.followers == 0 {
                let until = poller.unused + LINGER;
                if until <= now {
                    state.remove(key);
                } else {
                    state.schedule(key, until);
                }
                continue;
            }
            let due = poller.due;
            poller.is_running = true;
            poller.begun = Some(now);
            let check = Check {
                key,
                id: poller.id,
                revision: poller.revision.clone(),
                told: std::mem::take(&mut poller.told),
                urgent: std::mem::take(&mut poller.urgent),
                before: poller.opened.clone(),
            };
            state.due.remove(&(due, key));
            return Some(check);
        }
    }

    async fn check(self: Arc<Self>, check: Check) {
        // Its key must not stay in the running state, even after a panic.
        let mut ending = Ending { repositories: &self, check: &check, result: None };
        let result = match self.open(check.id, check.before.as_ref()) {
            Ok(opened) => {
                let repository = if check.urgent { &opened.repository } else { &opened.polled };
                let found = repository.resolve(&check.revision).await;
                found.map(|commit| (opened.clone(), commit))
            }
            Err(error) => Err(error),
        };
        if matches!(result, Err(Error::Denied(_))) {
            self.ask_again(check.id);
        }
        ending.result = Some(result);
    }

    /// Opens a repository where it is now. `before`: as it was opened before.
    ///
    /// # Errors
    /// [`Error::Denied`]: it is not known where it is, and [`ask_again`](Self::ask_again) may help.
    /// [`Error::Backend`].
    pub fn open(&self, id: RepositoryId, before: Option<&Opened>) -> Result<Opened, Error> {
        match (id, &self.projects) {
            (RepositoryId::Project(project), Some(projects)) => projects.open(project, before),
            (RepositoryId::Project(_), None) => Err(unknown("there is no GitLab")),
            (RepositoryId::Local(_), _) => self
                .local_by_id(id)
                .map(|local| Opened::from(Arc::clone(&local.repository)))
                .ok_or_else(|| unknown("it is not configured")),
        }
    }

    /// Records the result of a check.
    fn ended(&self, check: &Check, result: Result<(Opened, Option<Commit>), Error>) {
        let now = Instant::now();
        let mut state = self.state.lock();
        let least = Duration::try_from_secs_f64(state.projects as f64 / self.rate).unwrap_or(Duration::MAX);
        let Some(poller) = state.pollers.get_mut(&check.key) else { return };
        poller.is_running = false;
        poller.checked = poller.begun;
        let before = poller.head.borrow().clone();
        let told = check.told || poller.told;
        let outcome = match result {
            Ok((opened, commit)) => {
                poller.opened = Some(opened);
                let is_same = before.commit == Some(commit);
                if !is_same || before.failure.is_some() {
                    poller.head.send_replace(Head { commit: Some(commit), failure: None });
                }
                if let Some(failure) = &before.failure {
                    tracing::info!(
                        repository = ?poller.id,
                        after = ?now.saturating_duration_since(failure.since),
                        "a repository can be read again"
                    );
                }
                if is_same || before.commit.is_none() { Outcome::Same } else { Outcome::Changed }
            }
            Err(error) => {
                if before.failure.is_none() {
                    tracing::warn!(
                        repository = ?poller.id,
                        code = code(&error),
                        %error,
                        "a repository cannot be read: the last commit stays in use"
                    );
                }
                if before.failure.as_ref().map(|failure| &failure.error) != Some(&error) {
                    let since = before.failure.map_or(now, |failure| failure.since);
                    poller.head.send_replace(Head {
                        commit: before.commit,
                        failure: Some(Failure { error, since }),
                    });
                }
                Outcome::Failed
            }
        };
        poller.schedule.checked(now, outcome, told);
        poller.ended.send_modify(|ended| *ended += 1);
        let due = if std::mem::take(&mut poller.again) {
            poller.soonest(now)
        } else if matches!(poller.id, RepositoryId::Local(_)) && outcome != Outcome::Failed {
            now + poller.period
        } else {
            let wait = poller.schedule.wait(now, poller.period, least, rand::random());
            now + wait
        };
        state.schedule(check.key, due);
        drop(state);
        self.woken.notify_one();
    }

    fn left(&self, key: u64) {
        let mut state = self.state.lock();
        let now = Instant::now();
        if let Some(poller) = state.pollers.get_mut(&key) {
            poller.followers -= 1;
            poller.unused = now;
        }
    }

    /// Returns how many revisions are known.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.state.lock().pollers.len()
    }
}

fn unknown(message: &str) -> Error {
    Error::Backend { code: "UNKNOWN", message: message.to_owned() }
}

/// A check that has begun.
struct Check {
    key: u64,
    id: RepositoryId,
    revision: Revision,
    told: bool,
    urgent: bool,
    before: Option<Opened>,
}

/// Records the end of a check when it is dropped.
struct Ending<'a> {
    repositories: &'a Repositories,
    check: &'a Check,
    result: Option<Result<(Opened, Option<Commit>), Error>>,
}

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        let result = self.result.take().unwrap_or_else(|| Err(unknown("the check did not end")));
        self.repositories.ended(self.check, result);
    }
}

/// A revision that somebody follows. Dropping it ends that.
#[derive(Debug)]
pub struct Follower {
    repositories: Arc<Repositories>,
    key: u64,
    id: RepositoryId,
    head: watch::Receiver<Head>,
    ended: watch::Receiver<u64>,
}

impl Follower {
    /// Returns what is known of the revision, and marks it as seen.
    pub fn head(&mut self) -> Head {
        self.head.borrow_and_update().clone()
    }

    /// Waits until something else is known than what was seen.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn changed(&mut self) {
        if self.head.changed().await.is_err() {
            // The poller of a follower is never removed.
            std::future::pending::<()>().await;
        }
    }

    /// Waits until a check has ended that began at `since` or later, and asks for one unless there was one.
    /// Checks are at least a second apart.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn refresh(&mut self, since: Instant) {
        loop {
            {
                let mut state = self.repositories.state.lock();
                let Some(poller) = state.pollers.get(&self.key) else { return };
                if poller.checked.is_some_and(|checked| checked >= since) {
                    return;
                }
                let is_coming = poller.is_running && poller.begun.is_some_and(|begun| begun >= since);
                if !is_coming {
                    state.hurry(self.key, Instant::now());
                }
                self.ended.borrow_and_update();
            }
            self.repositories.woken.notify_one();
            if self.ended.changed().await.is_err() {
                // The poller of a follower is never removed.
                std::future::pending::<()>().await;
            }
        }
    }

    /// Returns which repository it is.
    pub fn id(&self) -> RepositoryId {
        self.id
    }

    /// Opens the repository, for reading.
    ///
    /// # Errors
    /// If it is not known where it is.
    pub fn repository(&self) -> Result<Arc<dyn Repository>, Error> {
        let before = {
            let state = self.repositories.state.lock();
            state.pollers.get(&self.key).and_then(|poller| poller.opened.clone())
        };
        Ok(self.repositories.open(self.id, before.as_ref())?.repository)
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        self.repositories.left(self.key);
    }
}
