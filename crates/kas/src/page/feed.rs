//! What viewers of the page are told: [`Feed`] collects it once for all of them, [`View`] is one viewer.
//!
//! Nothing is queued. A feed keeps the newest overview and the newest list of agents, each whole; a viewer
//! that is slow finds the newest when it comes back, and what was between is never sent.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use cluster::{Connected, PeerReport, Query, Replicas, Tracker, TrackerError, Unanswered};
use futures_util::future::BoxFuture;
use ids::AgentId;
use process::lifecycle::Phase;
use serde::Serialize;
use tokio::{
    sync::watch,
    task::AbortHandle,
    time::{Instant, MissedTickBehavior},
};

use super::shown::{Agents, Asked, ConnectionShown, Events, Overview, Own, Why};
use crate::listener::api::{connected, explain};
use routing::{metrics::RequestMetrics, router::Router};

/// How often numbers are told.
const PERIOD: Duration = Duration::from_secs(1);
/// Changes that come within this time are told together.
const SETTLE: Duration = Duration::from_millis(100);
/// Agents that are listed; beyond it only their number is told: a list is asked of every replica, and read by
/// people.
const LISTED: u64 = 2_000;
/// Lists may take this share of the time: 1/20.
const REST: u32 = 20;
/// The list is made anew this often although nothing has changed, as an agent's tunnels may have.
const RELIST: Duration = Duration::from_secs(10);
/// An agent is explained this often although nothing has changed.
const EXPLAIN: Duration = Duration::from_secs(2);

/// Where the page has its facts from.
pub struct Source {
    /// Of the replicas and their agents.
    pub tracker: Arc<dyn Tracker>,
    /// Of this replica's tunnels.
    pub router: Arc<Router>,
    /// Of this replica's requests.
    pub metrics: Arc<RequestMetrics>,
    /// Whether it leaves.
    pub phase: watch::Receiver<Phase>,
}

impl std::fmt::Debug for Source {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Source").finish_non_exhaustive()
    }
}

/// Returns an event as it is sent.
fn event(name: &str, data: &impl Serialize) -> Bytes {
    // None of the types has a map or can fail; a line break within a text is escaped by JSON.
    let data = serde_json::to_string(data).unwrap_or_default();
    Bytes::from(format!("event: {name}\ndata: {data}\n\n"))
}

/// What is told now: the overview each time, and the rest to whom has not had it.
#[derive(Clone, Default)]
struct Told {
    overview: Bytes,
    events: Part,
    agents: Part,
}

/// What changes seldom.
#[derive(Clone, Default)]
struct Part {
    event: Bytes,
    /// Grows with each change; 0: there is nothing yet.
    version: u64,
}

impl Part {
    fn set(&mut self, event: Bytes) {
        if self.event != event {
            *self = Self { event, version: self.version + 1 };
        }
    }
}

/// What all viewers share. It works until it is dropped.
pub(super) struct Feed {
    source: Arc<Source>,
    told: watch::Receiver<Told>,
    task: AbortHandle,
}

impl Drop for Feed {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Feed {
    pub(super) fn start(source: Arc<Source>) -> Arc<Self> {
        let (tell, told) = watch::channel(Told::default());
        let task = tokio::spawn(collect(Arc::clone(&source), tell)).abort_handle();
        Arc::new(Self { source, told, task })
    }
}

/// The answer of a future if there is one, else never.
async fn done<T>(asking: &mut Option<BoxFuture<'_, T>>) -> T {
    let answer = match asking {
        Some(asking) => asking.await,
        None => std::future::pending().await,
    };
    *asking = None;
    answer
}

type List = (Bytes, Duration);

/// Asks for the agents, unless there are too many.
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

/// Returns who has tunnels of an agent, by what is known here.
fn holders(source: &Source, known: &Replicas, agent: AgentId) -> Vec<String> {
    let own = source.router.registry().holds(agent).then(|| known.replicas.first()).flatten();
    let others = source.tracker.views(agent).into_iter().filter(|view| view.holds);
    own.map(|status| status.replica.id.as_str().to_owned())
        .into_iter()
        .chain(others.map(|belief| belief.replica.id.as_str().to_owned()))
        .collect()
}

/// Tells what changes, when it does; and the numbers in any case.
async fn collect(source: Arc<Source>, tell: watch::Sender<Told>) {
    let tracker = &source.tracker;
    let mut live = tracker.live();
    let mut connections = tracker.connection_changes();
    let mut ticks = tokio::time::interval(PERIOD);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut asked = Asked::default();
    let mut asking: Option<BoxFuture<'_, (Vec<PeerReport>, Vec<Unanswered>)>> = None;
    let mut listing: Option<BoxFuture<'_, Result<List, TrackerError>>> = None;
    let (mut events, mut agents) = (Part::default(), Part::default());
    // When the next list is wanted, and when it may be.
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
                // Who asks for the list itself is told why; here the old one stays.
                Err(error) => {
                    tracing::debug!(error = %error, "the agents cannot be listed for the page");
                    allowed = Instant::now() + RELIST;
                }
            },
            () = tokio::time::sleep_until(wanted.max(allowed)), if listing.is_none() => continue,
        }
        tokio::time::sleep(SETTLE).await;
        let known = tracker.replicas().await;
        let own = Own {
            tunnels: source.router.tunnels(),
            load: source.metrics.load(),
            draining: *source.phase.borrow() != Phase::Serving,
        };
        let overview = Overview::new(process::clock::wall(), &known, &own, &asked);
        let overview = event("overview", &overview);
        events.set(event("events", &Events::new(&known)));
        tell.send_replace(Told { overview, events: events.clone(), agents: agents.clone() });
    }
}

/// The agent whose page is looked at.
struct Explained {
    agent: AgentId,
    changes: watch::Receiver<()>,
    next: Instant,
}

/// One viewer.
pub(super) struct View {
    feed: Arc<Feed>,
    told: watch::Receiver<Told>,
    /// The versions of events and agents that it has.
    has: [u64; 2],
    /// What it has not had yet of what was told last: at most those two.
    rest: Vec<Bytes>,
    agent: Option<Explained>,
}

impl View {
    pub(super) fn new(feed: Arc<Feed>, agent: Option<AgentId>) -> Self {
        let mut told = feed.told.clone();
        told.mark_changed();
        let agent = agent.map(|agent| Explained {
            agent,
            // Subscribed before the first look: nothing is missed.
            changes: feed.source.tracker.changes(agent),
            next: Instant::now(),
        });
        Self { feed, told, has: [0; 2], rest: Vec::new(), agent }
    }

    /// Returns the next event; `None`: kas ends.
    pub(super) async fn next(&mut self) -> Option<Bytes> {
        loop {
            if let Some(rest) = self.rest.pop() {
                return Some(rest);
            }
            let explain = async {
                match &mut self.agent {
                    Some(explained) => {
                        tokio::select! {
                            () = tokio::time::sleep_until(explained.next) => {}
                            Ok(()) = explained.changes.changed() => tokio::time::sleep(SETTLE).await,
                        }
                    }
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                changed = self.told.changed() => {
                    changed.ok()?;
                    let told = self.told.borrow_and_update().clone();
                    for (has, part) in self.has.iter_mut().zip([told.events, told.agents]) {
                        if *has != part.version {
                            *has = part.version;
                            self.rest.push(part.event);
                        }
                    }
                    // Before the first look there is nothing.
                    if !told.overview.is_empty() {
                        return Some(told.overview);
                    }
                }
                () = explain => {
                    if let Some(event) = self.explained().await {
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
        explained.next = Instant::now() + EXPLAIN;
        match listed {
            Ok(connected) => Some(event("why", &Why::new(agent, &answer, &connected))),
            Err(error) => {
                tracing::debug!(error = %error, "an agent cannot be explained for the page");
                None
            }
        }
    }
}
