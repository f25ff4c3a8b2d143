//! The task of one manifest project at the home of its agent: it follows the head, syncs, checks for drift
//! and repeats what failed.

use std::{sync::Arc, time::Duration};

use futures_util::FutureExt as _;
use gitops::{
    BACKOFF, Budget, Claims, ClusterApi, Due, Engine, Events, Memory, Outcome, Period, Phase, PruneWhen,
    Report, Schedule, Scope, Stop, cut, varied,
};
use ids::{Agent, Impersonation};
use parking_lot::Mutex;
use proto::gitlab::agent::agentcfg::ManifestProjectCf;
use repository::{Commit, Error};
use tokio::{
    sync::{mpsc, oneshot},
    time::{Instant, sleep_until},
};

use crate::{
    context::{Context, Timing},
    follow::ProjectHead,
    manifests::{LoadError, Queue, Share},
    source::{Bounds, Entry, FollowedHead, Source, SourceError},
    status::Status,
};

/// How often the status says again for how long a repository cannot be read.
const SAY: Duration = Duration::from_secs(10);

/// What a person asks of a task.
#[derive(Debug)]
pub(crate) enum Command {
    /// Sync now.
    Sync(Reply),
    /// Delete now what waits to be pruned.
    Prune(Reply),
}

/// Where the outcome goes, as a text for people.
pub(crate) type Reply = oneshot::Sender<Result<String, String>>;

/// What a task is made of. Another one makes another task.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Spec {
    pub(crate) agent: Arc<Agent>,
    pub(crate) entry: ManifestProjectCf,
    pub(crate) bounds: Bounds,
    pub(crate) impersonation: Option<Impersonation>,
}

impl Spec {
    /// Opens the repository and the cluster of the project.
    ///
    /// # Errors
    /// A text for people.
    pub(crate) async fn open(&self, context: &Context, budget: &Budget) -> Result<Opened, String> {
        let source =
            context.sources.open(&self.agent, &self.entry.id).await.map_err(|error| match error {
                SourceError::Denied(text) | SourceError::Unavailable(text) => text,
            })?;
        let replica = &context.replica;
        let entry = Entry::new(&self.agent, source.id, replica, &self.entry, &self.bounds, &context.limits)?;
        let task = format!("gitops:{}", self.entry.id);
        let api = context.clusters.open(self.agent.id, task, self.impersonation.clone());
        let engine = Engine::new(Arc::clone(&api), budget.clone());
        Ok(Opened { name: self.entry.id.as_str().into(), source, entry, api, engine })
    }
}

/// A project whose repository and cluster are known.
pub(crate) struct Opened {
    pub(crate) name: Arc<str>,
    pub(crate) source: Source,
    pub(crate) entry: Entry,
    pub(crate) api: Arc<dyn ClusterApi>,
    pub(crate) engine: Engine,
}

/// The task.
pub(crate) struct Task {
    pub(crate) context: Arc<Context>,
    pub(crate) spec: Spec,
    pub(crate) budget: Budget,
    /// The inventories of the agent's projects.
    pub(crate) claims: Arc<Claims>,
    /// The agent's part of the manifests that are in work.
    pub(crate) share: Share,
    /// Whether this replica has not planned for the project before. What its configuration says now may
    /// already be applied.
    pub(crate) is_new: bool,
    pub(crate) status: Arc<Status>,
    pub(crate) commands: mpsc::Receiver<Command>,
}

/// What the task knows between two syncs.
struct Plan {
    memory: Memory,
    events: Events,
    /// The commit that the revision names.
    head: Option<Commit>,
    /// A head that cannot be decoded.
    flawed: Option<Commit>,
    /// The last commit that was decoded and of which at least something was applied.
    good: Option<Commit>,
    /// Whether nothing was synced yet.
    is_first: bool,
    schedule: Schedule,
}

/// Why a project is not planned any more.
enum Ended {
    /// Nobody can send commands any more.
    Closed,
    /// The agent may not read the repository.
    Denied(String),
    /// The repository cannot be followed.
    Unavailable(String),
}

/// A repository that cannot be read.
struct Unreadable {
    code: String,
    since: Instant,
    /// When the status is told again for how long.
    say: Instant,
}

/// Why the task wakes.
enum Wake {
    Head(Result<Option<Commit>, Error>),
    Time,
    Unreadable,
    Command(Option<Command>),
}

impl Plan {
    fn new() -> Self {
        Self {
            memory: Memory::default(),
            events: Events::new("kas"),
            head: None,
            flawed: None,
            good: None,
            is_first: true,
            schedule: Schedule::default(),
        }
    }

    fn is_flawed(&self) -> bool {
        self.flawed.is_some() && self.flawed == self.head
    }
}

/// Returns a time as people write it, such as `3m`.
fn shown(time: Duration) -> String {
    match time.as_secs() {
        seconds @ ..60 => format!("{seconds}s"),
        seconds @ ..3_600 => format!("{}m", seconds / 60),
        seconds => format!("{}h", seconds / 3_600),
    }
}

/// Waits until a time; for ever without one.
async fn until(at: Option<Instant>) {
    match at {
        Some(at) => sleep_until(at).await,
        None => std::future::pending().await,
    }
}

impl Task {
    /// Runs until it is dropped, or nobody can send commands any more.
    ///
    /// # Cancel safety
    /// It may be dropped at any time. What it began is completed by the next task.
    pub(crate) async fn run(mut self) {
        let mut failures = 0;
        loop {
            let text = match self.spec.open(&self.context, &self.budget).await {
                Ok(opened) => {
                    self.status.update(|state| state.id = opened.source.id);
                    match self.plan(&opened).await {
                        Ended::Closed => return,
                        Ended::Denied(text) => {
                            failures = 0;
                            tracing::info!(
                                agent.id = self.spec.agent.id.get(),
                                project = &*opened.name,
                                why = text,
                                "the manifest project is not planned any more: its objects and its inventory stay"
                            );
                            text
                        }
                        Ended::Unavailable(text) => text,
                    }
                }
                Err(text) => text,
            };
            self.status.phase("failed", text);
            let pause = Instant::now() + varied(BACKOFF[failures.min(BACKOFF.len() - 1)]);
            failures += 1;
            self.status.update(|state| state.next = Some(pause));
            loop {
                tokio::select! {
                    () = sleep_until(pause) => break,
                    command = self.commands.recv() => match command {
                        None => return,
                        Some(Command::Sync(reply)) => {
                            let _ = reply.send(Ok("the repository is opened again".to_owned()));
                            break;
                        }
                        Some(Command::Prune(reply)) => {
                            let _ = reply.send(Err(self.status.get(false).message));
                        }
                    },
                }
            }
        }
    }

    async fn plan(&mut self, opened: &Opened) -> Ended {
        let mut follow = match opened.source.heads.follow(&opened.entry.revision) {
            Ok(follow) => follow,
            Err(SourceError::Denied(text)) => return Ended::Denied(text),
            Err(SourceError::Unavailable(text)) => return Ended::Unavailable(text),
        };
        let follow = &mut *follow;
        let mut plan = Plan::new();
        let mut unreadable: Option<Unreadable> = None;
        loop {
            let next = plan.schedule.next();
            self.status.update(|state| state.next = next);
            let wake = tokio::select! {
                head = follow.changed() => Wake::Head(head),
                () = until(next) => Wake::Time,
                () = until(unreadable.as_ref().map(|it| it.say)) => Wake::Unreadable,
                command = self.commands.recv() => Wake::Command(command),
            };
            match wake {
                Wake::Command(None) => return Ended::Closed,
                Wake::Command(Some(Command::Sync(reply))) => {
                    let text = self.sync(opened, &mut plan, follow, Scope::All, PruneWhen::Current).await;
                    let _ = reply.send(text);
                }
                Wake::Command(Some(Command::Prune(reply))) => {
                    let text = if plan.is_flawed() {
                        Err("the files of the head cannot be decoded, so nothing is deleted".to_owned())
                    } else {
                        self.sync(opened, &mut plan, follow, Scope::All, PruneWhen::Now).await
                    };
                    let _ = reply.send(text);
                }
                Wake::Head(Ok(Some(commit))) => {
                    unreadable = None;
                    self.status.update(|state| state.wanted = Some(commit.to_string()));
                    let is_new = plan.head.replace(commit) != Some(commit);
                    if is_new {
                        plan.schedule.begin_anew();
                    }
                    if plan.is_flawed() && !is_new {
                        continue;
                    }
                    // The result is in the status.
                    let _ = self.sync(opened, &mut plan, follow, Scope::All, PruneWhen::Current).await;
                }
                Wake::Head(Ok(None)) => {
                    unreadable = None;
                    plan.head = None;
                    plan.schedule.give_up();
                    self.status.update(|state| state.wanted = None);
                    let text = "the repository has no commit that the revision names: nothing is changed";
                    self.status.phase("failed", text);
                }
                Wake::Head(Err(Error::Denied(text))) => return Ended::Denied(text),
                Wake::Head(Err(error)) => {
                    let code = match &error {
                        Error::Backend { code, .. } => (*code).to_owned(),
                        other => other.to_string(),
                    };
                    tracing::info!(
                        agent.id = self.spec.agent.id.get(),
                        project = &*opened.name,
                        error = error.to_string(),
                        "repository cannot be read"
                    );
                    let now = Instant::now();
                    let since = unreadable.as_ref().map_or(now, |before| before.since);
                    self.unreadable(unreadable.insert(Unreadable { code, since, say: now }));
                }
                Wake::Unreadable => {
                    if let Some(unreadable) = &mut unreadable {
                        self.unreadable(unreadable);
                    }
                }
                Wake::Time => self.due(opened, &mut plan, follow).await,
            }
        }
    }

    /// Says for how long the repository has not been readable.
    fn unreadable(&self, unreadable: &mut Unreadable) {
        unreadable.say = Instant::now() + SAY;
        let Unreadable { code, since, .. } = &*unreadable;
        let passed = shown(since.elapsed());
        self.status.update(|state| state.message = format!("repository cannot be read: {code} for {passed}"));
    }

    /// Returns how often something is done unasked.
    fn period(&self) -> Period {
        let Timing { check, full, .. } = self.context.timing;
        Period { check: self.spec.bounds.check.unwrap_or(check), full }
    }

    /// Does what is due.
    async fn due(&mut self, opened: &Opened, plan: &mut Plan, follow: &mut dyn FollowedHead) {
        if plan.schedule.due(&self.period()) == Due::Sync {
            // The result is in the status.
            let _ = self.sync(opened, plan, follow, Scope::All, PruneWhen::Current).await;
            return;
        }
        if plan.memory.is_empty() {
            return;
        }
        match opened.engine.check(&opened.entry.project, &mut plan.memory).await {
            Err(text) => self.status.update(|state| state.message = format!("cannot be checked: {text}")),
            Ok(drift) => {
                if drift.differ.is_empty() {
                    return;
                }
                self.context.metrics.drifted(drift.differ.len());
                self.status.update(|state| state.drift += drift.differ.len() as u64);
                tracing::info!(
                    agent.id = self.spec.agent.id.get(),
                    project = &*opened.name,
                    objects = drift.differ.len(),
                    first = drift.differ.iter().next().map(ToString::to_string),
                    "objects differ from what was applied"
                );
                // The result is in the status.
                let _ = self.sync(opened, plan, follow, Scope::Only(drift.differ), PruneWhen::Current).await;
            }
        }
    }

    /// Syncs once. Returns a text for people.
    async fn sync(
        &mut self,
        opened: &Opened,
        plan: &mut Plan,
        follow: &mut dyn FollowedHead,
        scope: Scope,
        prune: PruneWhen,
    ) -> Result<String, String> {
        let Some(head) = plan.head else { return Err(self.status.get(false).message) };
        // Instead of a head that cannot be decoded, the last good commit is applied, and nothing is pruned.
        let instead = if plan.is_flawed() { plan.good.map(|good| (head, good)) } else { None };
        let commit = instead.map_or(head, |(_, good)| good);
        if instead.is_none() {
            self.status.phase("reading", "");
        }
        let Opened { name, source, entry, api, engine } = opened;
        let loader = &self.context.loader;
        let waits = |why: &str| {
            if instead.is_none() {
                self.status.phase("reading", why);
            }
        };
        let queue = Queue { share: &self.share, waits: &waits };
        let loaded =
            loader.load(name, &*source.repository, &commit, &entry.globs, &self.context.limits, &queue).await;
        let loaded = match loaded {
            Ok(loaded) => loaded,
            Err(LoadError::Flawed(text)) => {
                plan.flawed = Some(head);
                plan.schedule.give_up();
                let text = cut(text);
                self.status.phase("failed", text.clone());
                tracing::info!(
                    agent.id = self.spec.agent.id.get(),
                    project = &**name,
                    commit = commit.to_string(),
                    error = text,
                    "manifests cannot be applied: nothing was changed"
                );
                return Err(text);
            }
            Err(LoadError::Gone) if plan.schedule.moved() => {
                follow.outdated();
                return Err(format!("commit {commit} is gone: the head is asked for again"));
            }
            Err(LoadError::Gone) => {
                let text = format!("commit {commit} does not exist any more");
                self.status.phase("failed", text.clone());
                return Err(text);
            }
            Err(LoadError::Unavailable(text)) => {
                plan.schedule.failed();
                let text = format!("repository cannot be read: {text}");
                self.status.phase("failed", text.clone());
                return Err(text);
            }
        };
        if instead.is_none() {
            plan.flawed = None;
        }
        let own = entry.project.default_inventory_id();
        let inventory = loaded.set.inventory_id().unwrap_or(&own);
        if let Err(other) = self.claims.claim(name, inventory) {
            plan.schedule.failed();
            let text = format!(
                "the inventory {inventory} is that of the manifest project {other}, too, and the two would delete \
                 each other's objects: choose another id in the inventory template, or name the project once"
            );
            self.status.phase("failed", text.clone());
            return Err(text);
        }
        if std::mem::take(&mut plan.is_first)
            && self.is_new
            && prune == PruneWhen::Current
            && let Ok(Some(applied)) = engine.applied_commit(&entry.project, &loaded.set).await
            && applied == commit.to_string()
        {
            // All of it was applied before. After a restart of kas, not all projects begin at once.
            plan.schedule.sync_after(self.context.timing.first.mul_f64(rand::random()));
            plan.good = Some(commit);
            self.status.update(|state| state.applied = Some(applied));
            self.status
                .phase("synced", "applied before this replica began to plan: it is applied again soon");
            return Ok("applied before".to_owned());
        }
        let project = match instead {
            None => entry.project.clone(),
            Some(_) => gitops::Project { prune: false, ..entry.project.clone() },
        };
        let sight = ProjectHead::new(Arc::clone(&source.repository), entry.revision.clone(), instead);
        let is_all = scope == Scope::All;
        let status = Arc::clone(&self.status);
        // A sync may wait for an hour. Meanwhile others have manifests to load.
        let (context, share) = (Arc::clone(&self.context), self.share.clone());
        let room = Mutex::new(loaded.room);
        let observer = move |progress: gitops::Progress| {
            if let gitops::Progress::Phase(Phase::Waiting) = progress
                && let Some(room) = &mut *room.lock()
            {
                context.loader.park(room, &share);
            }
            status.progress(progress);
        };
        let report = {
            let sync = gitops::Sync {
                project: &project,
                set: &loaded.set,
                head: &sight,
                scope,
                prune,
                observer: &observer,
            };
            let mut running = engine.sync(sync, &mut plan.memory).boxed();
            let (mut is_new, mut is_other) = (false, false);
            let report = loop {
                tokio::select! {
                    report = &mut running => break report,
                    changed = follow.changed(), if !is_new => {
                        match changed {
                            Ok(now) if now != Some(head) => {
                                is_new = true;
                                sight.end(Stop::NewCommit);
                            }
                            // The next answer says it again, and the project ends.
                            Err(Error::Denied(_)) => {
                                is_new = true;
                                sight.end(Stop::Cancelled);
                            }
                            _ => is_other = true,
                        }
                    }
                }
            };
            if is_new || is_other {
                // It is told again after the sync.
                follow.forget();
            }
            report
        };
        drop((loaded.set, observer));
        let text = self.ended(opened, plan, follow, &report, commit, is_all);
        if let Some(inventory) = &report.inventory
            && project.dry_run == gitops::DryRun::None
        {
            for event in report.events(&commit.to_string(), &text) {
                let time = timestamp(process::clock::wall());
                if let Err(error) = plan.events.write(&**api, inventory, &event, &time).await {
                    tracing::info!(
                        namespace = inventory.namespace,
                        inventory = inventory.name,
                        error,
                        "an Event about the inventory cannot be written"
                    );
                }
            }
        }
        match report.outcome {
            Outcome::Synced | Outcome::Degraded => Ok(text),
            _ => Err(text),
        }
    }

    /// Notes how a sync ended, and when the next one is due.
    fn ended(
        &mut self,
        opened: &Opened,
        plan: &mut Plan,
        follow: &mut dyn FollowedHead,
        report: &Report,
        commit: Commit,
        is_all: bool,
    ) -> String {
        let text = report.message();
        let pruned = report.pruned();
        self.context.metrics.synced(report.outcome.as_str(), report.took.as_secs_f64(), pruned);
        // What was said about a flawed head stays.
        let shown = if plan.is_flawed() { self.status.get(false).message } else { text.clone() };
        self.status.ended(report, shown);
        if plan.is_flawed() {
            self.status.update(|state| state.phase = "failed");
        }
        if plan.schedule.ended(&report.outcome, is_all, &self.period()) {
            follow.outdated();
        }
        match &report.outcome {
            Outcome::Synced => {
                plan.good = Some(commit);
                // A dry run has applied nothing.
                if opened.entry.project.dry_run == gitops::DryRun::None {
                    self.status.update(|state| {
                        state.applied = Some(commit.to_string());
                        state.synced_at = Some(process::clock::wall());
                    });
                }
            }
            Outcome::Degraded | Outcome::Incomplete => plan.good = Some(commit),
            Outcome::Stopped(Stop::NewCommit) => follow.forget(),
            _ => {}
        }
        tracing::info!(
            agent.id = self.spec.agent.id.get(),
            project = &*opened.name,
            commit = commit.to_string(),
            outcome = report.outcome.as_str(),
            objects = report.objects.len(),
            pruned,
            took_ms = u64::try_from(report.took.as_millis()).unwrap_or(u64::MAX),
            why = text,
            "sync of manifests ended"
        );
        text
    }
}

/// Returns a time as in RFC 3339, in seconds.
fn timestamp(since_epoch: Duration) -> String {
    let seconds = i64::try_from(since_epoch.as_secs()).unwrap_or(i64::MAX);
    prost_types::Timestamp { seconds, nanos: 0 }.to_string()
}
