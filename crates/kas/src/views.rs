//! The view hub: rows of objects of many clusters, kept fresh by one watch for each resource of each agent,
//! however many look.
//!
//! A `Feed` has the rows of one resource of one agent. A `reader` fills it from the first looker until
//! `views.linger` after the last one. A `Subscription` is one caller that looks: its `director` finds the
//! agents that it selects, asks what the caller may see, and attaches feeds. What has changed since the
//! caller last looked is found when it takes the next message, so a slow caller gets the newest state, and
//! nothing is queued for it.

mod buffers;
mod caller;
mod director;
mod feed;
mod http;
mod kind;
mod lines;
mod messages;
mod metrics;
mod question;
mod reader;
mod reviews;
mod rights;
mod service;
mod source;
mod subscription;
mod summary;
mod tally;
#[cfg(test)]
mod tests;
mod tries;
mod wake;

use std::{
    collections::{BTreeMap, HashMap},
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use cluster::{Query, Tracker};
use fleet::{Candidate, MOST_AGENTS, Selector};
use grpc::{Code, Status};
use identity::Identity;
use ids::{AgentId, ReplicaId};
use parking_lot::Mutex;
use process::lifecycle::Phase;
use proto::kas::api::v1::UnansweredReplica;
use tokio::{
    sync::{Semaphore, watch},
    task::AbortHandle,
    time::Instant,
};
use views::{Definitions, Versions};

pub use self::metrics::ViewMetrics;
#[cfg(test)]
pub(crate) use self::source::Answer;
pub(crate) use self::{
    buffers::Buffers,
    http::HttpViews,
    kind::{AgentKind, Permit},
    lines::Lines,
    question::Question,
    reader::{QUICK, Rest},
    rights::ApiCaller,
    source::{Source, Sources, Tunnel, Tunnels, Watched, refusal},
    subscription::Subscription,
    tally::{Counts, Tally},
};
use self::{
    feed::{Feed, FeedKey, Look, What},
    reader::Reader,
    reviews::Reviews,
    subscription::left,
    summary::Pace,
    wake::Wake,
};
use crate::{
    agent_files::{AgentFile, Files, Unknown},
    connected::{connected, unanswered_replica},
};

/// Lists of feeds without rows at once.
const COLD: usize = 64;
/// Feeds of one agent: as many watches are open at its API server.
const PER_AGENT: usize = 200;
/// Subscriptions of one caller.
const PER_CALLER: usize = 64;
/// The largest file with views, in bytes.
const LARGEST_FILE: usize = 1 << 20;
/// Requests for summaries per second.
const SUMMARIES: u32 = 100;

/// Parses `bytes` as answers of an API server. For a fuzz target.
#[cfg(feature = "fuzzing")]
pub fn fuzz(bytes: &[u8]) {
    reader::fuzz(bytes);
    for status in [200, 201, 401, 403, 500] {
        match caller::allowed(status, bytes) {
            Ok(_) => assert!(status < 300, "{status} allows nothing"),
            Err(refused) => assert!(refused.message().len() < 4_096, "{} bytes", refused.message().len()),
        }
    }
    assert!(question::Resume::read(bytes).is_none_or(|resume| resume.to_bytes() == bytes));
}

/// Reads the views of these files, beside those that are built in.
///
/// # Errors
/// The index of a file that cannot be used, and why.
pub(crate) fn definitions(files: &[PathBuf]) -> Result<Definitions, (usize, String)> {
    let mut definitions = Definitions::default();
    for (index, file) in files.iter().enumerate() {
        let read = std::fs::read(file).map_err(|error| error.to_string()).and_then(|bytes| {
            if bytes.len() > LARGEST_FILE {
                return Err(format!("it has {} bytes, and at most {LARGEST_FILE} are allowed", bytes.len()));
            }
            let text = String::from_utf8(bytes).map_err(|_| "it is not UTF-8".to_owned())?;
            let value = settings::yaml::parse(&text, settings::yaml::Size::Small);
            let value = value.map_err(|problem| problem.to_string())?;
            definitions.add(value).map_err(|error| error.to_string())
        });
        read.map_err(|why| (index, format!("{}: {why}", file.display())))?;
    }
    Ok(definitions)
}

/// The settings of the hub.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HubSettings {
    /// The memory of the rows of all views, in bytes.
    pub(crate) memory: usize,
    /// How long rows are kept fresh that nobody looks at.
    pub(crate) linger: Duration,
    /// How often it is asked again what a caller may see: at most a minute.
    pub(crate) rights: Duration,
}

/// What the hub is made of.
pub(crate) struct HubParts {
    pub(crate) settings: HubSettings,
    pub(crate) definitions: Definitions,
    pub(crate) sources: Arc<dyn Sources>,
    pub(crate) buffers: Arc<Buffers>,
    pub(crate) tracker: Arc<dyn Tracker>,
    pub(crate) identity: Arc<dyn Identity>,
    /// Know the labels of agents, and the only namespaces that they may read.
    pub(crate) files: Arc<dyn Files>,
    /// This replica.
    pub(crate) me: ReplicaId,
    pub(crate) metrics: Arc<ViewMetrics>,
    pub(crate) phase: watch::Receiver<Phase>,
}

/// The views of this replica.
pub struct Hub {
    settings: HubSettings,
    definitions: Definitions,
    sources: Arc<dyn Sources>,
    /// What answers take until they are rows. It counts in the memory of views.
    buffers: Arc<Buffers>,
    tracker: Arc<dyn Tracker>,
    identity: Arc<dyn Identity>,
    files: Arc<dyn Files>,
    me: ReplicaId,
    /// Tells this process from others of the same name.
    epoch: u64,
    metrics: Arc<ViewMetrics>,
    phase: watch::Receiver<Phase>,
    feeds: Mutex<Feeds>,
    cold: Semaphore,
    versions: Versions,
    /// The versions at which changes began that have not been told yet, and how many did.
    begun: Mutex<BTreeMap<u64, usize>>,
    bytes: AtomicUsize,
    /// Of agents that have had a watch: as many as there are agents.
    kinds: Mutex<HashMap<AgentId, Arc<AgentKind>>>,
    lookers: AtomicU64,
    callers: Mutex<HashMap<Arc<str>, usize>>,
    reviews: Arc<Reviews>,
    summaries: Pace,
}

impl std::fmt::Debug for Hub {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Hub").field("settings", &self.settings).finish_non_exhaustive()
    }
}

/// The feeds of each agent that has some.
type Feeds = HashMap<AgentId, HashMap<FeedKey, Running>>;

/// Why a feed cannot be looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
enum NoFeed {
    #[error(
        "{PER_AGENT} resources and namespaces of this agent are read already, which is the most: ask for fewer namespaces"
    )]
    TooMany,
    #[error("the rows of all views need more than views.memory, {0} bytes")]
    Full(usize),
}

/// A feed, and the task that reads it.
struct Running {
    feed: Arc<Feed>,
    task: AbortHandle,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// An agent that a selector means.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Selected {
    pub(crate) id: AgentId,
    pub(crate) name: String,
    pub(crate) connected: bool,
    /// Why it is not known whether it is meant.
    pub(crate) gap: Option<Arc<str>>,
}

impl Hub {
    /// Nothing is read yet.
    pub(crate) fn new(parts: HubParts) -> Arc<Self> {
        let HubParts {
            settings,
            definitions,
            sources,
            buffers,
            tracker,
            identity,
            files,
            me,
            metrics,
            phase,
        } = parts;
        let reviews = Reviews::new(settings.rights, Arc::clone(&metrics));
        Arc::new(Self {
            settings,
            definitions,
            sources,
            buffers,
            tracker,
            identity,
            files,
            me,
            epoch: rand::random(),
            metrics,
            phase,
            feeds: Mutex::default(),
            cold: Semaphore::new(COLD),
            versions: Versions::default(),
            begun: Mutex::default(),
            bytes: AtomicUsize::new(0),
            kinds: Mutex::default(),
            lookers: AtomicU64::new(0),
            callers: Mutex::default(),
            reviews,
            summaries: Pace::new(SUMMARIES),
        })
    }

    /// Returns the views that there are.
    pub(crate) fn definitions(&self) -> &Definitions {
        &self.definitions
    }

    /// Looks at feeds of one agent, each known by its number. They are read from now on.
    ///
    /// # Errors
    /// If one of them cannot be read. Then none is looked at.
    fn look(
        self: &Arc<Self>,
        agent: AgentId,
        keys: Vec<(usize, FeedKey)>,
        looker: u64,
        wake: &Arc<Wake>,
    ) -> Result<Vec<(usize, Look)>, NoFeed> {
        let mut feeds = self.feeds.lock();
        let (mut looks, mut new) = (Vec::with_capacity(keys.len()), Vec::new());
        for (number, key) in keys {
            let known = feeds.get(&agent).and_then(|feeds| feeds.get(&key));
            match known.filter(|running| !running.feed.is_closed()) {
                Some(known) => {
                    looks.push((number, Look::new(Arc::clone(&known.feed), looker, number, wake)));
                }
                None => new.push((number, key)),
            }
        }
        let count = feeds.get(&agent).map_or(0, HashMap::len) + new.len();
        let mut surplus = count.saturating_sub(PER_AGENT);
        for key in idle(feeds.get(&agent).into_iter(), None) {
            if surplus == 0 {
                break;
            }
            surplus -= 1;
            self.remove(&mut feeds, &key);
        }
        if surplus > 0 {
            return Err(NoFeed::TooMany);
        }
        if !self.make_room(&mut feeds, None, new.len() * feed::COST) {
            return Err(NoFeed::Full(self.settings.memory));
        }
        for (number, key) in new {
            let feed = Feed::new(key.clone(), self);
            looks.push((number, Look::new(Arc::clone(&feed), looker, number, wake)));
            let task = tokio::spawn(Arc::clone(self).keep(Arc::clone(&feed))).abort_handle();
            feeds.entry(agent).or_default().insert(key, Running { feed, task });
        }
        Ok(looks)
    }

    /// Removes a feed.
    fn remove(&self, feeds: &mut Feeds, key: &FeedKey) {
        let Some(of_agent) = feeds.get_mut(&key.agent) else { return };
        if let Some(running) = of_agent.remove(key) {
            running.feed.close(self);
        }
        if of_agent.is_empty() {
            feeds.remove(&key.agent);
        }
    }

    /// Reads a feed until nobody has looked for a while.
    async fn keep(self: Arc<Self>, feed: Arc<Feed>) {
        let source = self.sources.open(feed.key.agent, None);
        let (hub, of) = (Arc::clone(&self), Arc::clone(&feed));
        let reading = async move {
            match of.key.what.clone() {
                What::Objects(resource) => Box::pin(Reader::new(hub, of, source, resource).run()).await,
                What::Summary => summary::run(hub, of, source).await,
            }
        };
        let mut linger = self.settings.linger;
        tokio::select! {
            // Its rows need too much memory. Who looks is told.
            () = reading => linger = Duration::ZERO,
            () = self.unused(&feed, linger) => return,
        }
        self.unused(&feed, linger).await;
    }

    /// Waits until nobody has looked at a feed for this long, and removes it. While this replica leaves, it
    /// goes at once: its watch would hold the shutdown up.
    async fn unused(&self, feed: &Arc<Feed>, linger: Duration) {
        let mut phase = self.phase.clone();
        loop {
            tokio::select! {
                () = feed.idle(linger) => {}
                () = async {
                    left(&mut phase).await;
                    feed.idle(Duration::ZERO).await;
                } => {}
            }
            let mut feeds = self.feeds.lock();
            // Somebody may look again.
            if feed.idle_since().is_none() {
                continue;
            }
            feed.close(self);
            let known = feeds.get(&feed.key.agent).and_then(|feeds| feeds.get(&feed.key));
            if known.is_some_and(|running| Arc::ptr_eq(&running.feed, feed)) {
                // It ends this task, at its next await: that is the last one.
                self.remove(&mut feeds, &feed.key);
            }
            return;
        }
    }

    /// Counts the bytes of a feed anew. Returns whether all of them fit.
    fn count(&self, counted: &mut usize, bytes: usize) -> bool {
        let before = std::mem::replace(counted, bytes);
        self.bytes.fetch_add(bytes, Ordering::SeqCst);
        let all = self.bytes.fetch_sub(before, Ordering::SeqCst).saturating_sub(before);
        let signed = |bytes: usize| i64::try_from(bytes).unwrap_or(i64::MAX);
        self.metrics.bytes.inc_by(signed(bytes) - signed(before));
        self.fits(all)
    }

    /// Whether so many bytes fit, beside what answers take. However much that is, rows have most of the
    /// memory.
    fn fits(&self, bytes: usize) -> bool {
        let memory = self.settings.memory;
        bytes.saturating_add(self.buffers.used().min(memory / buffers::PART)) <= memory
    }

    /// Whether so many bytes more fit, if feeds are removed that nobody looks at, the oldest first.
    fn has_room(&self, keep: Option<&Feed>, more: usize) -> bool {
        self.make_room(&mut self.feeds.lock(), keep, more)
    }

    /// As [`has_room`](Self::has_room).
    fn make_room(&self, feeds: &mut Feeds, keep: Option<&Feed>, more: usize) -> bool {
        let fits = || self.fits(self.bytes.load(Ordering::SeqCst).saturating_add(more));
        if fits() {
            return true;
        }
        for key in idle(feeds.values(), keep) {
            self.remove(feeds, &key);
            if fits() {
                return true;
            }
        }
        false
    }

    /// A change begins. Until the value is dropped, [`told`](Self::told) is not above it.
    fn begin_change(&self) -> Change<'_> {
        let mut begun = self.begun.lock();
        let version = self.versions.last();
        *begun.entry(version).or_default() += 1;
        Change { hub: self, version }
    }

    /// Returns a version: all changes up to it have been told to those that look.
    fn told(&self) -> u64 {
        let begun = self.begun.lock();
        begun.keys().next().copied().unwrap_or_else(|| self.versions.last())
    }

    /// Wakes when an agent comes or goes.
    fn changes_of(&self, agent: AgentId) -> watch::Receiver<()> {
        self.tracker.changes(agent)
    }

    /// Returns what is known of the agentk of an agent.
    pub(crate) fn kind_of(&self, agent: AgentId) -> Arc<AgentKind> {
        let new = || Arc::new(AgentKind::new(self.buffers.of(agent)));
        Arc::clone(self.kinds.lock().entry(agent).or_insert_with(new))
    }

    /// Begins a subscription of a caller.
    ///
    /// # Errors
    /// `RESOURCE_EXHAUSTED` if it has too many.
    fn admit(self: &Arc<Self>, caller: &str) -> Result<Admitted, Status> {
        let mut callers = self.callers.lock();
        let caller: Arc<str> = caller.into();
        let open = callers.entry(Arc::clone(&caller)).or_default();
        if *open >= PER_CALLER {
            let text = format!("this caller looks at {PER_CALLER} views of this kas, which is the most");
            return Err(Status::new(Code::ResourceExhausted, text));
        }
        *open += 1;
        self.metrics.subscriptions.inc();
        Ok(Admitted { hub: Arc::clone(self), caller })
    }

    /// Returns the agents that a selector means but for their labels, and the replicas that did not tell
    /// which ones they hold.
    ///
    /// # Errors
    /// `UNAVAILABLE` if no replica could be asked.
    async fn selected(&self, selector: &Selector) -> Result<(Vec<Selected>, Vec<UnansweredReplica>), Status> {
        let all = connected(&*self.tracker, Query::All).await;
        let all = all.map_err(|error| Status::new(Code::Unavailable, error.to_string()))?;
        let mut agents: BTreeMap<AgentId, Selected> = BTreeMap::new();
        let mut add = |id: AgentId, name: &str, project: i64, connected: bool| {
            if selector.matches(Candidate { id, name: Some(name), project: Some(project) }) {
                agents.insert(id, Selected { id, name: name.to_owned(), connected, gap: None });
            }
        };
        for agent in self.identity.agents() {
            add(agent.id, &agent.name, agent.project_id, false);
        }
        for located in &all.connections {
            let connection = &located.connection;
            add(connection.agent, &connection.name, connection.project_id, true);
        }
        Ok((agents.into_values().collect(), all.unanswered.iter().map(unanswered_replica).collect()))
    }

    /// Returns what `kas.yaml` of agents says, also of those whose configuration another replica reads.
    async fn files_of(&self, agents: &[AgentId]) -> HashMap<AgentId, Result<Arc<AgentFile>, Unknown>> {
        let mut files = HashMap::new();
        for part in agents.chunks(MOST_AGENTS) {
            files.extend(self.files.of(part).await);
        }
        files
    }

    /// Returns the only namespaces of an agent, as its `kas.yaml` says. Empty: the whole cluster.
    ///
    /// # Errors
    /// `UNAVAILABLE` if they are not known.
    async fn namespaces_of(&self, agent: AgentId) -> Result<Vec<Arc<str>>, Status> {
        let known = self.files_of(&[agent]).await.remove(&agent);
        let file = known.unwrap_or_else(|| Err("its kas.yaml is not known".into()));
        let file = file.map_err(|why| Status::new(Code::Unavailable, why.to_string()))?;
        Ok(file.namespaces.iter().map(|name| name.as_str().into()).collect())
    }

    /// Leaves out agents whose labels are others than those of a selector. One that is connected and whose
    /// labels are not known has a gap.
    async fn labelled(&self, selector: &Selector, agents: Vec<Selected>) -> Vec<Selected> {
        if !selector.needs_labels() {
            return agents;
        }
        let ids: Vec<AgentId> = agents.iter().map(|agent| agent.id).collect();
        let files = self.files_of(&ids).await;
        let means = |agent: Selected| match files.get(&agent.id) {
            Some(Ok(file)) => selector.matches_labels(&file.labels).then_some(agent),
            Some(Err(why)) if agent.connected => Some(Selected { gap: Some(Arc::clone(why)), ..agent }),
            Some(Err(_)) | None => None,
        };
        agents.into_iter().filter_map(means).collect()
    }
}

/// Returns the feeds that nobody looks at, but for one, the oldest first.
fn idle<'a>(feeds: impl Iterator<Item = &'a HashMap<FeedKey, Running>>, keep: Option<&Feed>) -> Vec<FeedKey> {
    let all = feeds.flat_map(HashMap::values).map(|running| &*running.feed);
    let others = all.filter(|feed| keep.is_none_or(|keep| !std::ptr::eq(*feed, keep)));
    let mut idle: Vec<(Instant, FeedKey)> =
        others.filter_map(|feed| Some((feed.idle_since()?, feed.key.clone()))).collect();
    idle.sort_by_key(|(since, _)| *since);
    idle.into_iter().map(|(_, key)| key).collect()
}

/// A change that has not been told yet, see [`Hub::begin_change`].
struct Change<'a> {
    hub: &'a Hub,
    version: u64,
}

impl Drop for Change<'_> {
    fn drop(&mut self) {
        let mut begun = self.hub.begun.lock();
        if let Some(count) = begun.get_mut(&self.version) {
            *count -= 1;
            if *count == 0 {
                begun.remove(&self.version);
            }
        }
    }
}

/// A caller's subscription counts until this is dropped.
struct Admitted {
    hub: Arc<Hub>,
    caller: Arc<str>,
}

impl Drop for Admitted {
    fn drop(&mut self) {
        let mut callers = self.hub.callers.lock();
        if let Some(open) = callers.get_mut(&self.caller) {
            *open -= 1;
            if *open == 0 {
                callers.remove(&self.caller);
            }
        }
        self.hub.metrics.subscriptions.dec();
    }
}
