//! The task of one manifest project at the home of its agent: it follows the head, syncs, checks for drift
//! and repeats what failed.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use futures_util::FutureExt as _;
use gitops::{
    Action, Budget, ClusterApi, Engine, Health, Memory, ObjectId, Outcome, Phase, PruneWhen, Report, Scope,
    Stop,
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
    claims::Claims,
    context::Context,
    events::{Event, Events},
    follow::{ProjectHead, jittered},
    manifests::{LoadError, Queue, Share},
    source::{Bounds, Entry, FollowedHead, Source, SourceError},
    status::Status,
};

/// The pauses after failures, one after the other; the last one is repeated.
pub(crate) const BACKOFF: [Duration; 5] = [
    Duration::from_secs(10),
    Duration::from_secs(20),
    Duration::from_secs(40),
    Duration::from_secs(60),
    Duration::from_secs(300),
];
/// The pauses after another writer of the inventory was noticed, one after the other; the last one is
/// repeated. It is usually a replica that has just stopped, or somebody's edit, and is noticed once. Two
/// planners that go on get far enough apart for one of them to complete its sync.
const FENCED: [Duration; 6] = [
    Duration::from_secs(1),
    Duration::from_secs(2),
    Duration::from_secs(4),
    Duration::from_secs(8),
    Duration::from_secs(16),
    Duration::from_secs(30),
];
/// How often in a row a sync begins anew at once because the head has moved or a commit is gone.
const MOVES: u32 = 3;
/// How often the status says again for how long a repository cannot be read.
const SAY: Duration = Duration::from_secs(10);
/// How many objects a message names.
const NAMED: usize = 3;
/// The longest message, in bytes.
const LONGEST: usize = 4_000;

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
    failures: usize,
    /// How often in a row another planner was noticed.
    fenced: usize,
    moves: u32,
    retry: Option<Instant>,
    check: Option<Instant>,
    full: Option<Instant>,
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
            events: Events::default(),
            head: None,
            flawed: None,
            good: None,
            is_first: true,
            failures: 0,
            fenced: 0,
            moves: 0,
            retry: None,
            check: None,
            full: None,
        }
    }

    /// When something is due.
    fn next(&self) -> Option<Instant> {
        [self.retry, self.check, self.full].into_iter().flatten().min()
    }

    /// Notes a failure, and when to try again.
    fn failed(&mut self) {
        let pause = BACKOFF[self.failures.min(BACKOFF.len() - 1)];
        self.failures += 1;
        self.retry = Some(Instant::now() + varied(pause));
    }

    /// Notes that another planner has written the inventory, and when to begin anew.
    fn fenced(&mut self) {
        let pause = FENCED[self.fenced.min(FENCED.len() - 1)];
        self.fenced += 1;
        self.retry = Some(Instant::now() + jittered(pause));
    }

    fn is_flawed(&self) -> bool {
        self.flawed.is_some() && self.flawed == self.head
    }
}

/// Returns a time within a tenth of this one.
fn varied(time: Duration) -> Duration {
    time.mul_f64(0.9 + rand::random::<f64>() / 5.0)
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
            let next = plan.next();
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
                        (plan.failures, plan.retry) = (0, None);
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
                    plan.retry = None;
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

    /// Returns the time between two checks for drift.
    fn check(&self) -> Duration {
        self.spec.bounds.check.unwrap_or(self.context.timing.check)
    }

    /// Does what is due.
    async fn due(&mut self, opened: &Opened, plan: &mut Plan, follow: &mut dyn FollowedHead) {
        let now = Instant::now();
        let is_due = |at: Option<Instant>| at.is_some_and(|at| at <= now);
        if is_due(plan.retry) || is_due(plan.full) {
            if is_due(plan.full) {
                plan.full = Some(now + varied(self.context.timing.full));
            }
            plan.retry = None;
            // The result is in the status.
            let _ = self.sync(opened, plan, follow, Scope::All, PruneWhen::Current).await;
            return;
        }
        plan.check = Some(now + varied(self.check()));
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
                plan.retry = None;
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
            Err(LoadError::Gone) if plan.moves < MOVES => {
                plan.moves += 1;
                follow.outdated();
                return Err(format!("commit {commit} is gone: the head is asked for again"));
            }
            Err(LoadError::Gone) => {
                plan.failed();
                let text = format!("commit {commit} does not exist any more");
                self.status.phase("failed", text.clone());
                return Err(text);
            }
            Err(LoadError::Unavailable(text)) => {
                plan.failed();
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
            plan.failed();
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
            let pause = self.context.timing.first.mul_f64(rand::random());
            plan.retry = Some(Instant::now() + pause);
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
            for event in events_of(&report, &commit, &text) {
                plan.events.write(&**api, inventory, &event).await;
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
        let now = Instant::now();
        let timing = &self.context.timing;
        let text = message(report);
        let pruned = report.objects.iter().filter(|object| object.action == Action::Pruned).count();
        self.context.metrics.synced(report.outcome.as_str(), report.took.as_secs_f64(), pruned);
        // What was said about a flawed head stays.
        let shown = if plan.is_flawed() { self.status.get(false).message } else { text.clone() };
        self.status.ended(report, shown);
        if plan.is_flawed() {
            self.status.update(|state| state.phase = "failed");
        }
        plan.check = Some(now + varied(self.check()));
        if report.outcome != Outcome::Fenced {
            plan.fenced = 0;
        }
        match &report.outcome {
            Outcome::Synced => {
                (plan.failures, plan.moves, plan.retry) = (0, 0, None);
                plan.good = Some(commit);
                if is_all {
                    plan.full = Some(now + varied(timing.full));
                }
                // A dry run has applied nothing.
                if opened.entry.project.dry_run == gitops::DryRun::None {
                    self.status.update(|state| {
                        state.applied = Some(commit.to_string());
                        state.synced_at = Some(process::clock::wall());
                    });
                }
            }
            Outcome::Degraded | Outcome::Incomplete => {
                plan.good = Some(commit);
                plan.moves = 0;
                plan.failed();
            }
            Outcome::Refused(_) | Outcome::Interrupted(_) => plan.failed(),
            Outcome::Fenced => plan.fenced(),
            Outcome::HeadMoved(_) if plan.moves < MOVES => {
                plan.moves += 1;
                follow.outdated();
            }
            Outcome::HeadMoved(_) => {
                plan.moves = 0;
                plan.failed();
            }
            Outcome::Stopped(Stop::NewCommit) => follow.forget(),
            Outcome::Stopped(Stop::NotHome | Stop::Cancelled) => plan.failed(),
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

/// Returns what a report says, for people.
pub(crate) fn message(report: &Report) -> String {
    let mut parts = Vec::new();
    match &report.outcome {
        Outcome::Synced => {}
        Outcome::Degraded | Outcome::Incomplete => {
            let wrong: Vec<&gitops::ObjectReport> =
                report.objects.iter().filter(|object| is_wrong(object)).collect();
            for object in wrong.iter().take(NAMED) {
                let why = if object.message.is_empty() { object.health.as_str() } else { &object.message };
                parts.push(format!("{}: {why}", object.id));
            }
            if wrong.len() > NAMED {
                parts.push(format!("and {} more", wrong.len() - NAMED));
            }
            if wrong.is_empty() {
                parts.push(report.outcome.to_string());
            }
        }
        other => parts.push(other.to_string()),
    }
    if report.to_prune > 0 {
        parts.push(format!("{} objects wait to be pruned", report.to_prune));
    }
    cut(parts.join("; "))
}

fn is_wrong(object: &gitops::ObjectReport) -> bool {
    object.action == Action::Failed
        || object.file.is_some() && !matches!(object.health, Health::Current | Health::Unknown)
}

/// Cuts a text for people.
pub(crate) fn cut(mut text: String) -> String {
    if text.len() > LONGEST {
        let end = (0..=LONGEST).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
        text.truncate(end);
    }
    text
}

/// Returns the Events of a report.
fn events_of(report: &Report, commit: &Commit, text: &str) -> Vec<Event> {
    let digits = commit.to_string();
    let short = digits.get(..8).unwrap_or(&digits);
    let mut events = Vec::new();
    let pruned: BTreeSet<&ObjectId> = report
        .objects
        .iter()
        .filter(|object| object.action == Action::Pruned)
        .map(|object| &object.id)
        .collect();
    if !pruned.is_empty() {
        let named: Vec<String> = pruned.iter().take(NAMED).map(ToString::to_string).collect();
        let more = pruned.len().saturating_sub(NAMED);
        let rest = if more == 0 { String::new() } else { format!(" and {more} more") };
        let message = format!("commit {short}: deleted {}{rest}", named.join(", "));
        events.push(Event { reason: "Pruned", message, warning: false });
    }
    let (reason, warning) = match report.outcome {
        Outcome::Synced => ("Synced", false),
        Outcome::Degraded => ("Degraded", true),
        Outcome::Incomplete | Outcome::Refused(_) | Outcome::Interrupted(_) => ("Failed", true),
        Outcome::Fenced | Outcome::HeadMoved(_) | Outcome::Stopped(_) => return events,
    };
    let message = match text {
        "" => format!("commit {short}: {} objects", report.objects.len()),
        text => format!("commit {short}: {text}"),
    };
    events.push(Event { reason, message, warning });
    events
}

#[cfg(test)]
mod tests {
    use gitops::ObjectReport;

    use super::*;

    fn report(outcome: Outcome, objects: &[(&str, Action, Health, &str)], to_prune: usize) -> Report {
        let objects = objects
            .iter()
            .map(|(name, action, health, message)| ObjectReport {
                id: ObjectId::new("", "ConfigMap", "shop", name),
                action: *action,
                health: *health,
                message: (*message).to_owned(),
                file: Some(("a.yaml".into(), 1)),
            })
            .collect();
        Report {
            commit: "c".into(),
            outcome,
            objects,
            to_prune,
            warnings: Vec::new(),
            inventory: None,
            took: Duration::ZERO,
        }
    }

    #[test]
    fn messages_name_what_is_wrong() {
        let wrong = ("a", Action::Failed, Health::Unknown, "no");
        let good = ("b", Action::Unchanged, Health::Current, "");
        let slow = ("c", Action::Changed, Health::InProgress, "");
        assert_eq!(message(&report(Outcome::Synced, &[good], 0)), "");
        assert_eq!(message(&report(Outcome::Synced, &[good], 2)), "2 objects wait to be pruned");
        assert_eq!(
            message(&report(Outcome::Incomplete, &[wrong, good, slow], 1)),
            "ConfigMap shop/a: no; ConfigMap shop/c: in progress; 1 objects wait to be pruned"
        );
        let many = message(&report(Outcome::Incomplete, &[wrong; 9], 0));
        assert!(many.ends_with("; and 6 more"), "{many}");
        assert_eq!(message(&report(Outcome::Refused("no set".into()), &[], 0)), "no set");
    }

    #[tokio::test(start_paused = true)]
    async fn another_planner_is_given_more_time_each_time_it_is_noticed() {
        let mut plan = Plan::new();
        let begun = Instant::now();
        for expected in [1, 2, 4, 8, 16, 30, 30] {
            plan.fenced();
            let pause = plan.retry.unwrap().duration_since(begun).as_secs_f64();
            assert!((expected as f64..=1.5 * expected as f64).contains(&pause), "{pause} for {expected}");
        }
    }

    #[test]
    fn pauses_grow_to_five_minutes() {
        let mut plan = Plan::new();
        let begun = Instant::now();
        let pauses: Vec<u64> = (0..7)
            .map(|_| {
                plan.failed();
                plan.retry.unwrap().duration_since(begun).as_secs()
            })
            .collect();
        for (pause, expected) in pauses.iter().zip([10, 20, 40, 60, 300, 300, 300]) {
            assert!((expected * 8 / 10..=expected * 12 / 10).contains(pause), "{pauses:?}");
        }
    }
}
