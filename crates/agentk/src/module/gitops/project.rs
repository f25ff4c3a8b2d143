//! One manifest project at the pod that applies: it follows the commits that kas tells, syncs, checks for
//! drift and repeats what failed.

use std::{pin::pin, sync::Arc, time::Duration};

use async_trait::async_trait;
use futures_util::{FutureExt as _, future::BoxFuture};
use gitops::{
    Claims, DryRun, Due, Events, Head, Memory, Options, Period, Progress, Project, PruneWhen, Report,
    Schedule, Scope, Set, Stop, Unresolved, cut,
    decode::{Limits, decode},
};
use parking_lot::Mutex;
use proto::gitlab::agent::agentcfg::{ManifestProjectCf, manifest_project_cf::PruneOneof};
use tokio::{
    sync::OwnedSemaphorePermit,
    time::{Instant, sleep, timeout},
};
use tokio_util::sync::CancellationToken;

use super::{
    feed::{Feed, FeedError, Sent},
    term::{Room, Shared, Term, backoff, until},
};

/// As kas does it where kas applies.
const PERIOD: Period = Period { check: Duration::from_secs(300), full: Duration::from_secs(6 * 3_600) };
/// How long kas may take to say what the head is.
const RESOLVE: Duration = Duration::from_secs(15);
/// A call that kas ends sooner is made again after this time.
const BRIEF: Duration = Duration::from_secs(1);

/// The task of a project.
pub(super) struct Task {
    pub(super) shared: Arc<Shared>,
    pub(super) term: Arc<Term>,
    pub(super) claims: Arc<Claims>,
    pub(super) agent: i64,
    pub(super) entry: ManifestProjectCf,
    /// Cancelled when the project is taken out or changed, and with the term.
    pub(super) over: CancellationToken,
}

/// What is known between two syncs.
struct Plan {
    memory: Memory,
    events: Events,
    schedule: Schedule,
    /// How it was applied last.
    project: Option<Project>,
    /// Whether the last commit cannot be decoded. Then nothing is done before the next one.
    is_flawed: bool,
}

/// A commit that kas has told, or why it tells none.
type Told = Result<Arc<str>, FeedError>;

/// Follows the head of a project.
struct Following<'f> {
    feed: &'f Feed,
    /// The last commit that kas has told; empty: none.
    known: Arc<str>,
    call: BoxFuture<'f, Told>,
    /// What was told during other work.
    told: Option<Told>,
    failures: usize,
    /// The last error: the same one is not logged again.
    said: Option<FeedError>,
}

/// A set, and its room.
struct Loaded {
    commit: Arc<str>,
    /// The number of the project.
    id: u64,
    set: Set,
    _room: OwnedSemaphorePermit,
}

/// Why there is no set.
enum LoadError {
    Feed(FeedError),
    /// Its files are wrong.
    Flawed(String),
    /// The project ends.
    Over,
}

/// The head as a sync sees it.
struct Sight<'a> {
    feed: &'a Feed,
    task: &'a Task,
    stop: Mutex<Option<Stop>>,
}

#[async_trait]
impl Head for Sight<'_> {
    async fn resolve(&self) -> Result<Option<Arc<str>>, Unresolved> {
        match timeout(RESOLVE, self.feed.head("")).await {
            Ok(Ok(Some(commit))) => Ok(Some(commit)),
            Ok(Ok(None)) => Err(Unresolved("kas does not say what the head is".to_owned())),
            Ok(Err(error)) => Err(Unresolved(error.to_string())),
            Err(_) => Err(Unresolved(format!("kas does not say within {RESOLVE:?} what the head is"))),
        }
    }

    fn stop(&self) -> Option<Stop> {
        let stop = self.task.term.stop().or(*self.stop.lock());
        stop.or_else(|| self.task.over.is_cancelled().then_some(Stop::Cancelled))
    }
}

impl Task {
    /// Runs until the project or the term is over. The text: kas does not let agentk apply.
    ///
    /// # Cancel safety
    /// It may be dropped at any time. What it began is completed by the next task.
    pub(super) async fn run(self) -> Option<String> {
        let feed = Feed::new(Arc::clone(&self.shared.calls), &self.entry);
        let mut plan = Plan {
            memory: Memory::default(),
            events: Events::new("agentk"),
            schedule: Schedule::default(),
            project: None,
            is_flawed: false,
        };
        let mut following = Following::new(&feed);
        loop {
            let due = plan.schedule.next().filter(|_| !plan.is_flawed);
            let told = tokio::select! {
                () = self.over.cancelled() => return None,
                told = following.next() => Some(told),
                () = until(due) => None,
            };
            let scope = match told {
                Some(Err(FeedError::NotServed(text))) => return Some(text),
                Some(Err(error)) => {
                    if let FeedError::Denied(_) = error {
                        // Not even what was applied is checked any more. Nothing is deleted.
                        plan.memory = Memory::default();
                        plan.schedule = Schedule::default();
                    }
                    following.failed(error, &self.entry.id);
                    continue;
                }
                Some(Ok(commit)) => {
                    plan.schedule.begin_anew();
                    following.follow(commit, Duration::ZERO);
                    Scope::All
                }
                None => match following.during(&self.entry.id, self.due(&mut plan), |_| {}).await {
                    Some(scope) => scope,
                    None => continue,
                },
            };
            self.sync(&mut plan, &mut following, scope).await;
        }
    }

    /// Does what is due. Returns what has to be synced; `None`: nothing.
    async fn due(&self, plan: &mut Plan) -> Option<Scope> {
        if plan.schedule.due(&PERIOD) == Due::Sync {
            return Some(Scope::All);
        }
        let project = plan.project.as_ref().filter(|_| !plan.memory.is_empty())?;
        match self.shared.engine.check(project, &mut plan.memory).await {
            Err(error) => {
                tracing::info!(project = self.entry.id, error, "manifests cannot be checked");
                None
            }
            Ok(drift) if drift.differ.is_empty() => None,
            Ok(drift) => {
                self.shared.metrics.drift.inc_by(drift.differ.len() as u64);
                tracing::info!(
                    project = self.entry.id,
                    objects = drift.differ.len(),
                    first = drift.differ.iter().next().map(ToString::to_string),
                    "objects differ from what was applied"
                );
                Some(Scope::Only(drift.differ))
            }
        }
    }

    /// Syncs once.
    async fn sync(&self, plan: &mut Plan, following: &mut Following<'_>, mut scope: Scope) {
        let feed = following.feed;
        let loaded = match following.during(&self.entry.id, self.load(feed), |_| {}).await {
            Ok(loaded) => loaded,
            Err(LoadError::Over) => return,
            Err(LoadError::Flawed(error)) => return self.flawed(plan, &following.known, error),
            Err(LoadError::Feed(error)) => {
                tracing::info!(project = self.entry.id, error = %error, "manifests cannot be read");
                plan.schedule.failed();
                return;
            }
        };
        let Loaded { commit, id, .. } = &loaded;
        if following.known != *commit {
            // There was another one meanwhile.
            following.follow(Arc::clone(commit), Duration::ZERO);
            scope = Scope::All;
        }
        let project = match options(&self.entry).project(self.agent, *id, &self.shared.identity) {
            Ok(project) => project,
            Err(error) => return self.flawed(plan, commit, error),
        };
        plan.is_flawed = false;
        if plan.project.as_ref().is_some_and(|before| before.id != *id) {
            // The path belongs to another project now.
            plan.memory = Memory::default();
        }
        let name: Arc<str> = self.entry.id.as_str().into();
        let own = project.default_inventory_id();
        let inventory = loaded.set.inventory_id().unwrap_or(&own);
        if let Err(other) = self.claims.claim(&name, inventory) {
            tracing::warn!(
                project = self.entry.id,
                inventory,
                other = &*other,
                "two manifest projects have the same inventory, and would delete each other's objects: choose another \
                 id in the inventory template, or name the project once"
            );
            plan.schedule.failed();
            return;
        }
        let project =
            plan.project.insert(Project { other_inventories: self.claims.others(&self.entry.id), ..project });
        let sight = Sight { feed, task: self, stop: Mutex::default() };
        let is_all = scope == Scope::All;
        let observer = |progress: Progress| {
            if let Progress::Warning(warning) = progress {
                tracing::info!(project = self.entry.id, warning, "sync of manifests");
            }
        };
        let sync = gitops::Sync {
            project,
            set: &loaded.set,
            head: &sight,
            scope,
            prune: PruneWhen::Current,
            observer: &observer,
        };
        let running = self.shared.engine.sync(sync, &mut plan.memory).boxed();
        let noticed = |told: &Told| {
            let stop = if told.is_ok() { Stop::NewCommit } else { Stop::Cancelled };
            *sight.stop.lock() = Some(stop);
        };
        let report = following.during(&self.entry.id, running, noticed).await;
        let commit = Arc::clone(commit);
        drop(loaded);
        self.ended(plan, &report, &commit, is_all).await;
    }

    fn flawed(&self, plan: &mut Plan, commit: &str, error: String) {
        plan.is_flawed = true;
        plan.schedule.give_up();
        tracing::warn!(
            project = self.entry.id,
            commit,
            error = cut(error),
            "manifests cannot be applied: nothing was changed"
        );
    }

    /// Notes how a sync ended, and when the next one is due.
    async fn ended(&self, plan: &mut Plan, report: &Report, commit: &str, is_all: bool) {
        let (text, pruned) = (report.message(), report.pruned());
        self.shared.metrics.synced(report.outcome.as_str(), pruned);
        // If the head has moved, kas tells the new one.
        let _ = plan.schedule.ended(&report.outcome, is_all, &PERIOD);
        tracing::info!(
            project = self.entry.id,
            commit,
            outcome = report.outcome.as_str(),
            objects = report.objects.len(),
            pruned,
            took_ms = u64::try_from(report.took.as_millis()).unwrap_or(u64::MAX),
            why = text,
            "sync of manifests ended"
        );
        let is_dry = plan.project.as_ref().is_some_and(|project| project.dry_run != DryRun::None);
        let Some(inventory) = report.inventory.as_ref().filter(|_| !is_dry) else { return };
        for event in report.events(commit, &text) {
            if self.term.stop().is_some() {
                return;
            }
            let seconds = i64::try_from(process::clock::wall().as_secs()).unwrap_or(i64::MAX);
            let time = prost_types::Timestamp { seconds, nanos: 0 }.to_string();
            if let Err(error) = plan.events.write(&*self.shared.api, inventory, &event, &time).await {
                tracing::info!(
                    namespace = inventory.namespace,
                    inventory = inventory.name,
                    error,
                    "an Event about the inventory cannot be written"
                );
            }
        }
    }

    /// Reads and decodes the set of the head. One set is read at a time, and waits until there is room for
    /// it.
    async fn load(&self, feed: &Feed) -> Result<Loaded, LoadError> {
        let limits = Limits::default();
        let loading = async {
            let turn = Arc::clone(&self.shared.room.loading).acquire_owned().await;
            let turn = turn.map_err(|_| LoadError::Over)?;
            let sent = feed.set(&limits).await.map_err(|error| match error {
                FeedError::Wrong(text) => LoadError::Flawed(text),
                error => LoadError::Feed(error),
            })?;
            let Sent { commit, project: id, files } = sent;
            // The turn ends with the thread, also if nobody waits for it any more.
            let name = Arc::clone(&commit);
            let decoding = move || (decode(&name, &files, &limits), turn);
            let (decoded, turn) = tokio::task::spawn_blocking(decoding)
                .await
                .map_err(|error| LoadError::Flawed(format!("decoding the manifests failed: {error}")))?;
            let set = decoded.map_err(|flaws| LoadError::Flawed(flaws.to_string()))?;
            let held = Arc::clone(&self.shared.room.held);
            let room = held.acquire_many_owned(Room::permits(set.weight())).await;
            drop(turn);
            Ok(Loaded { commit, id, set, _room: room.map_err(|_| LoadError::Over)? })
        };
        tokio::select! {
            () = self.over.cancelled() => Err(LoadError::Over),
            loaded = loading => loaded,
        }
    }
}

impl<'f> Following<'f> {
    /// Waits for the first commit.
    fn new(feed: &'f Feed) -> Self {
        let known = Arc::default();
        let call = wait(feed, Arc::clone(&known), Duration::ZERO);
        Self { feed, known, call, told: None, failures: 0, said: None }
    }

    /// Waits for another commit than this one.
    fn follow(&mut self, known: Arc<str>, pause: Duration) {
        self.known = Arc::clone(&known);
        self.call = wait(self.feed, known, pause);
        self.told = None;
    }

    /// Returns what kas tells next. Then [`follow`](Self::follow) or [`failed`](Self::failed) is called.
    ///
    /// # Cancel safety
    /// Cancel safe.
    async fn next(&mut self) -> Told {
        let told = match self.told.take() {
            Some(told) => told,
            None => (&mut self.call).await,
        };
        if told.is_ok() {
            (self.failures, self.said) = (0, None);
        }
        told
    }

    /// Logs that kas tells nothing, unless that was logged, and asks again after a pause.
    fn failed(&mut self, error: FeedError, project: &str) {
        let pause = backoff(self.failures);
        self.failures += 1;
        if self.said.as_ref() != Some(&error) {
            tracing::warn!(
                project,
                error = %error,
                retry_in = ?pause,
                "no manifests come from kas: nothing is changed"
            );
            self.said = Some(error);
        }
        self.follow(Arc::clone(&self.known), pause);
    }

    /// Does some work. What kas tells meanwhile is noticed, and returned by [`next`](Self::next).
    async fn during<T>(
        &mut self,
        project: &str,
        work: impl Future<Output = T>,
        noticed: impl Fn(&Told),
    ) -> T {
        let mut work = pin!(work);
        loop {
            tokio::select! {
                done = &mut work => return done,
                told = &mut self.call, if self.told.is_none() => match told {
                    // It may be better soon, and there may be a commit then.
                    Err(error @ (FeedError::Wrong(_) | FeedError::Unavailable(_))) => {
                        self.failed(error, project);
                    }
                    told => {
                        noticed(&told);
                        self.told = Some(told);
                    }
                },
            }
        }
    }
}

/// Waits until kas has another commit than this one.
fn wait(feed: &Feed, known: Arc<str>, pause: Duration) -> BoxFuture<'_, Told> {
    async move {
        sleep(pause).await;
        loop {
            let begun = Instant::now();
            if let Some(commit) = feed.head(&known).await? {
                return Ok(commit);
            }
            // kas ends a call in which nothing has changed after some minutes.
            if begun.elapsed() < BRIEF {
                sleep(BRIEF).await;
            }
        }
    }
    .boxed()
}

/// Returns what an entry says about how it is applied.
fn options(entry: &ManifestProjectCf) -> Options<'_> {
    let duration = |given: &prost_types::Duration| (given.seconds, given.nanos);
    Options {
        default_namespace: &entry.default_namespace,
        reconcile_timeout: entry.reconcile_timeout.as_ref().map(duration),
        dry_run_strategy: &entry.dry_run_strategy,
        prune: entry.prune_oneof.as_ref().map(|PruneOneof::Prune(prune)| *prune),
        prune_timeout: entry.prune_timeout.as_ref().map(duration),
        prune_propagation_policy: &entry.prune_propagation_policy,
        inventory_policy: &entry.inventory_policy,
    }
}
