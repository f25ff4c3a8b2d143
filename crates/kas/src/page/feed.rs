//! The events of the page: [`Feed`] collects them once for all viewers, [`View`] is one viewer.
//!
//! Nothing is queued. A feed keeps the newest overview, list of agents and list of long requests, each
//! complete. A slow viewer gets the newest ones, and skips those between.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use cluster::{Connected, PeerReport, Query, Replicas, Tracker, TrackerError, Unanswered};
use futures_util::future::BoxFuture;
use ids::AgentId;
use kubernetes_api::KubernetesApi;
use process::lifecycle::Phase;
use proto::kas::api::v1::GetSyncRequest;
use serde::Serialize;
use tokio::{
    sync::watch,
    task::AbortHandle,
    time::{Instant, MissedTickBehavior},
};

use super::{
    clusters::Grid,
    shown::{Agents, Asked, ClusterCounts, ConnectionShown, Events, Long, Overview, Own, Why},
};
use crate::{
    connected::connected,
    listener::api::explain,
    sync::SyncService,
    views::{Counts, Hub, Tally},
};
use routing::{metrics::RequestMetrics, router::Router};

/// How often the numbers are sent.
const PERIOD: Duration = Duration::from_secs(1);
/// Changes within this time are sent together.
const SETTLE: Duration = Duration::from_millis(100);
/// The most agents in a list. If there are more, only their number is sent: a list is collected from every
/// replica, and read by people.
const LISTED: u64 = 2_000;
/// After a list there is a pause of this many times its duration.
const REST: u32 = 20;
/// The list is refreshed this often even without a change of connections, since tunnels may have changed.
const RELIST: Duration = Duration::from_secs(10);
/// The explanation of an agent is refreshed this often even without a change.
const EXPLAIN: Duration = Duration::from_secs(2);

/// The sources of the page.
pub struct Source {
    /// The replicas and their agents.
    pub tracker: Arc<dyn Tracker>,
    /// The tunnels of this replica.
    pub router: Arc<Router>,
    /// The requests of this replica.
    pub metrics: Arc<RequestMetrics>,
    /// Whether this replica is draining.
    pub phase: watch::Receiver<Phase>,
    /// The endpoint for kubectl of this replica; `None`: it is off.
    pub endpoint: Option<Arc<KubernetesApi>>,
    /// Whether viewers may see the names of its callers.
    pub callers: bool,
    /// Where the objects of clusters are counted; `None`: viewers do not see how many there are.
    pub views: Option<Arc<Hub>>,
    /// Where the page with the trees of clusters is, for a link.
    pub clusters_url: Option<String>,
    /// The manifest projects that this replica plans for.
    pub sync: Arc<SyncService>,
}

impl std::fmt::Debug for Source {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Source").finish_non_exhaustive()
    }
}

/// Encodes an event.
fn event(name: &str, data: &impl Serialize) -> Bytes {
    // Serialization of these types cannot fail. JSON escapes line breaks.
    let data = serde_json::to_string(data).unwrap_or_default();
    Bytes::from(format!("event: {name}\ndata: {data}\n\n"))
}

/// What is sent: the overview each time, the rest to viewers that do not have it.
#[derive(Clone, Default)]
struct Update {
    overview: Bytes,
    events: Part,
    agents: Part,
    long: Part,
    fleet: Part,
}

/// An event that changes rarely.
#[derive(Clone, Default)]
struct Part {
    event: Bytes,
    /// Increases with each change; 0: there is no event yet.
    version: u64,
}

impl Part {
    fn set(&mut self, event: Bytes) {
        if self.event != event {
            *self = Self { event, version: self.version + 1 };
        }
    }
}

/// The events for all viewers. Its task runs until it is dropped.
pub(super) struct Feed {
    source: Arc<Source>,
    updates: watch::Receiver<Update>,
    task: AbortHandle,
}

impl Drop for Feed {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Feed {
    pub(super) fn start(source: Arc<Source>) -> Arc<Self> {
        let (sender, updates) = watch::channel(Update::default());
        let task = tokio::spawn(collect(Arc::clone(&source), sender)).abort_handle();
        Arc::new(Self { source, updates, task })
    }
}

/// Waits for the future and removes it; pending if there is none.
async fn done<T>(asking: &mut Option<BoxFuture<'_, T>>) -> T {
    let answer = match asking {
        Some(asking) => asking.await,
        None => std::future::pending().await,
    };
    *asking = None;
    answer
}

/// The most entries of the list of callers.
const CALLERS: usize = 200;

/// Returns the event with the long requests of the endpoint; its data is `null` if the endpoint is off.
fn long(source: &Source) -> Bytes {
    let callers = source.callers.then_some(CALLERS);
    let requests = source.endpoint.as_ref().map(|endpoint| endpoint.long_requests(callers));
    event("long", &requests.as_ref().map(|requests| Long::new(requests, source.callers)))
}

type List = (Bytes, Duration);

/// Lists the agents, unless there are too many.
async fn list(source: &Source) -> Result<List, TrackerError> {
    let begun = Instant::now();
    let known = source.tracker.replicas().await;
    let agents = known.replicas.iter().map(|status| status.agents).fold(0, u64::saturating_add);
    let bytes = if agents > LISTED {
        event("agents", &Agents { connections: None, omitted: 0, unanswered: Vec::new() })
    } else {
        let connected = connected(&*source.tracker, Query::All).await?;
        let most = usize::try_from(LISTED).unwrap_or(usize::MAX);
        let shown = connected.connections.iter().take(most);
        let shown: Vec<_> = shown
            .map(|located| ConnectionShown::new(located, holders(source, &known, located.connection.agent)))
            .collect();
        let agents = Agents {
            omitted: connected.connections.len() - shown.len(),
            connections: Some(shown),
            unanswered: connected.unanswered.iter().map(|silent| silent.replica.id.as_str()).collect(),
        };
        event("agents", &agents)
    };
    Ok((bytes, begun.elapsed()))
}

/// Returns the replicas that have tunnels of an agent, as far as this replica knows.
fn holders(source: &Source, known: &Replicas, agent: AgentId) -> Vec<String> {
    let own = source.router.registry().holds(agent).then(|| known.replicas.first()).flatten();
    let others = source.tracker.views(agent).into_iter().filter(|view| view.holds);
    own.map(|status| status.replica.id.as_str().to_owned())
        .into_iter()
        .chain(others.map(|view| view.replica.id.as_str().to_owned()))
        .collect()
}

/// Sends an update at each change, and at least every [`PERIOD`].
async fn collect(source: Arc<Source>, updates: watch::Sender<Update>) {
    let tracker = &source.tracker;
    let mut live = tracker.live();
    let mut connections = tracker.connection_changes();
    let mut ticks = tokio::time::interval(PERIOD);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut asked = Asked::default();
    let mut asking: Option<BoxFuture<'_, (Vec<PeerReport>, Vec<Unanswered>)>> = None;
    let mut listing: Option<BoxFuture<'_, Result<List, TrackerError>>> = None;
    let (mut events, mut agents, mut of_endpoint) = (Part::default(), Part::default(), Part::default());
    let (mut grid, mut fleet) =
        (source.views.as_ref().map(|hub| Grid::new(Arc::clone(hub))), Part::default());
    // When the next list is due, and the earliest time for it.
    let (mut wanted, mut allowed) = (Instant::now(), Instant::now());
    loop {
        if listing.is_none() && wanted.max(allowed) <= Instant::now() {
            listing = Some(Box::pin(list(&source)));
            wanted = Instant::now() + RELIST;
        }
        tokio::select! {
            _ = ticks.tick() => {
                if asking.is_none() {
                    asking = Some(tracker.peer_reports(None));
                }
            }
            Ok(()) = live.changed() => {}
            Ok(()) = connections.changed() => wanted = Instant::now(),
            (reports, unanswered) = done(&mut asking) => {
                asked = Asked { reports, unanswered, at: process::clock::wall() };
            }
            listed = done(&mut listing) => match listed {
                Ok((bytes, took)) => {
                    agents.set(bytes);
                    allowed = Instant::now() + took * REST;
                }
                // The previous list stays. A caller that lists agents gets the error.
                Err(error) => {
                    tracing::debug!(error = %error, "the agents cannot be listed for the page");
                    allowed = Instant::now() + RELIST;
                }
            },
            () = grid_changed(grid.as_mut()) => {}
            () = tokio::time::sleep_until(wanted.max(allowed)), if listing.is_none() => continue,
        }
        tokio::time::sleep(SETTLE).await;
        let known = tracker.replicas().await;
        let own = Own {
            tunnels: source.router.tunnels(),
            load: source.metrics.load(),
            draining: *source.phase.borrow() != Phase::Serving,
            projects: source.sync.totals(),
        };
        let clusters = source.clusters_url.as_deref();
        let overview = Overview::new(process::clock::wall(), &known, &own, &asked, clusters);
        let overview = event("overview", &overview);
        events.set(event("events", &Events::new(&known)));
        of_endpoint.set(long(&source));
        if let Some(grid) = &grid {
            fleet.set(event("fleet", &grid.shown()));
        }
        updates.send_replace(Update {
            overview,
            events: events.clone(),
            agents: agents.clone(),
            long: of_endpoint.clone(),
            fleet: fleet.clone(),
        });
    }
}

/// Waits for a change of the numbers of objects, forever if they are not shown. Cancel safe.
async fn grid_changed(grid: Option<&mut Grid>) {
    match grid {
        Some(grid) => grid.changed().await,
        None => std::future::pending().await,
    }
}

/// The agent that a viewer has selected.
struct Explained {
    agent: AgentId,
    changes: watch::Receiver<()>,
    next: Instant,
    /// Counts the objects of its cluster; `None`: that is not shown, or it was not connected yet.
    tally: Option<Tally>,
    /// What was sent last.
    counts: Option<Counts>,
}

impl Explained {
    /// Waits until the objects of the cluster should be counted again. Cancel safe.
    async fn counted(tally: Option<&mut Tally>) {
        match tally {
            Some(tally) => tally.changed().await,
            None => std::future::pending().await,
        }
    }

    /// Returns an event with the numbers of objects, if they are others than before.
    fn cluster(&mut self) -> Option<Bytes> {
        let counts = self.tally.as_ref()?.counts();
        if self.counts.as_ref() == Some(&counts) {
            return None;
        }
        let event = event("cluster", &ClusterCounts::new(self.agent, &counts));
        self.counts = Some(counts);
        Some(event)
    }
}

/// Why a viewer wakes.
enum Woken {
    /// The agent should be explained again.
    Explain,
    /// The objects of its cluster should be counted again.
    Count,
}

/// One viewer.
pub(super) struct View {
    feed: Arc<Feed>,
    updates: watch::Receiver<Update>,
    /// The versions of events, agents, long requests and clusters that were sent.
    has: [u64; 4],
    /// Events of the last update that are still to be sent: at most these four.
    rest: Vec<Bytes>,
    agent: Option<Explained>,
}

impl View {
    pub(super) fn new(feed: Arc<Feed>, agent: Option<AgentId>) -> Self {
        let mut updates = feed.updates.clone();
        updates.mark_changed();
        let agent = agent.map(|agent| Explained {
            agent,
            // Subscribed before the first lookup, so that no change is missed.
            changes: feed.source.tracker.changes(agent),
            next: Instant::now(),
            tally: None,
            counts: None,
        });
        Self { feed, updates, has: [0; 4], rest: Vec::new(), agent }
    }

    /// Returns the next event; `None`: kas is ending.
    pub(super) async fn next(&mut self) -> Option<Bytes> {
        loop {
            if let Some(rest) = self.rest.pop() {
                return Some(rest);
            }
            let explain = async {
                match &mut self.agent {
                    Some(explained) => {
                        tokio::select! {
                            () = tokio::time::sleep_until(explained.next) => Woken::Explain,
                            Ok(()) = explained.changes.changed() => {
                                tokio::time::sleep(SETTLE).await;
                                Woken::Explain
                            }
                            () = Explained::counted(explained.tally.as_mut()) => Woken::Count,
                        }
                    }
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                changed = self.updates.changed() => {
                    changed.ok()?;
                    let update = self.updates.borrow_and_update().clone();
                    let parts = [update.events, update.agents, update.long, update.fleet];
                    for (has, part) in self.has.iter_mut().zip(parts) {
                        if *has != part.version {
                            *has = part.version;
                            self.rest.push(part.event);
                        }
                    }
                    // It is empty until the first update.
                    if !update.overview.is_empty() {
                        return Some(update.overview);
                    }
                }
                woken = explain => {
                    let event = match woken {
                        Woken::Explain => self.explained().await,
                        Woken::Count => self.agent.as_mut().and_then(Explained::cluster),
                    };
                    if let Some(event) = event {
                        return Some(event);
                    }
                }
            }
        }
    }

    async fn explained(&mut self) -> Option<Bytes> {
        let explained = self.agent.as_mut()?;
        explained.changes.borrow_and_update();
        let (source, agent) = (&self.feed.source, explained.agent);
        let answer = explain(&source.router, &*source.tracker, agent).await;
        let listed: Result<Connected, _> = connected(&*source.tracker, Query::Agent(agent)).await;
        let question = GetSyncRequest { agent_id: agent.get(), ..GetSyncRequest::default() };
        let sync = source.sync.get(&question).await;
        explained.next = Instant::now() + EXPLAIN;
        match listed {
            Ok(connected) => {
                // Only of an agent that there is: a page can be opened for any number.
                if let Some(hub) = &source.views
                    && explained.tally.is_none()
                    && !connected.connections.is_empty()
                {
                    explained.tally = Some(Tally::new(hub, agent).await);
                }
                // Without an answer of its home, nothing is said of its manifests.
                Some(event("why", &Why::new(agent, &answer, &connected, sync.as_ref().ok())))
            }
            Err(error) => {
                tracing::debug!(error = %error, "an agent cannot be explained for the page");
                None
            }
        }
    }
}
