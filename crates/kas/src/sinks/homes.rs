//! [`Homes`]: tells of the agents whose home is this replica: the one with the highest
//! [`home_rank`](ids::home_rank) among those that are ready, as for hooks. Two homes tell twice, and none
//! for a moment tells later. See [`Tellers`] for replicas that have just come.

use std::{
    collections::{HashMap, HashSet},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use cluster::{Connected, Query, ReplicaHealth, ReplicaState, Tracker};
use ids::{AgentId, ReplicaId};
use serde_json::json;
use sinks::{About, Kind, News, Presence, Tellers};
use tokio::{
    sync::Semaphore,
    task::{AbortHandle, JoinHandle},
    time::Instant,
};

use super::{
    board::{Known, Sinks, To, new_id, now},
    events::{AgentEvents, Shared},
    labels::Labels,
};
use crate::{
    agent_files::AgentFiles,
    connected::connected,
    views::{Hub, Sources},
};

/// How often the members are looked at.
const LOOK: Duration = Duration::from_millis(250);
/// The least time between two lists of all agents…
const LIST: Duration = Duration::from_secs(1);
/// …and the most: changes wake, except that of an answer that was not complete.
const LIST_LATEST: Duration = Duration::from_secs(30);
/// A list takes at most this part of the time.
const LIST_SHARE: u32 = 20;
/// For how long the reader of an agent that is away waits for it: it knows which events it has told.
const AWAY: Duration = Duration::from_secs(600);
/// For how long a sink that selects by labels gets to know that an agent came whose labels are not known yet.
const UNLABELLED: Duration = Duration::from_secs(60);
/// Lists of events at once.
const LISTS: usize = 16;

/// What [`Homes`] is made of.
pub(crate) struct HomesParts {
    pub(crate) sinks: Arc<Sinks>,
    /// This replica.
    pub(crate) me: ReplicaId,
    pub(crate) tracker: Arc<dyn Tracker>,
    /// The clusters.
    pub(crate) sources: Arc<dyn Sources>,
    /// Knows which agentk can cancel watches.
    pub(crate) hub: Arc<Hub>,
    pub(crate) files: Arc<AgentFiles>,
}

/// Tells of the agents whose home is this replica.
pub(crate) struct Homes {
    parts: HomesParts,
    shared: Arc<Shared>,
    labels: Labels,
    draining: AtomicBool,
}

/// Agents that came, and which sinks that select by labels do not know of yet.
#[derive(Default)]
struct Arrived(HashMap<AgentId, (Instant, Known, News)>);

/// The reader of an agent's events. Dropping it ends it.
struct Reading {
    agent: Known,
    task: AbortHandle,
    /// Since when the agent is away.
    away: Option<Instant>,
}

impl Drop for Reading {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Homes {
    pub(crate) fn new(parts: HomesParts) -> Arc<Self> {
        let (sinks, files) = (Arc::clone(&parts.sinks), Arc::clone(&parts.files));
        let need_labels = sinks.need_labels(Kind::Agents) || sinks.need_labels(Kind::Events);
        let labels = Labels::new(need_labels.then(|| Arc::clone(&files) as _));
        let shared = Arc::new(Shared { sinks, files, lists: Semaphore::new(LISTS) });
        Arc::new(Self { parts, shared, labels, draining: AtomicBool::new(false) })
    }

    /// This replica leaves: it is no home any more.
    pub(crate) fn drain(&self) {
        self.draining.store(true, Ordering::Relaxed);
    }

    /// Returns the replicas that are ready.
    async fn members(&self) -> Vec<ReplicaId> {
        let draining = self.draining.load(Ordering::Relaxed);
        let known = self.parts.tracker.replicas().await.replicas;
        let ready = known.into_iter().filter(|status| {
            let is_live = status.health.map_or(!draining, |health| health == ReplicaHealth::Live);
            is_live && status.state == ReplicaState::Ready
        });
        ready.map(|status| status.replica.id).collect()
    }

    /// Looks and tells until dropped.
    pub(crate) async fn run(self: Arc<Self>) {
        let sinks = &self.parts.sinks;
        if sinks.want(Kind::Agents) || sinks.want(Kind::Events) {
            tokio::join!(self.look(), self.labels.keep());
        }
    }

    async fn look(&self) {
        let Self { parts, labels, .. } = self;
        let tracker = &parts.tracker;
        let mut changes = tracker.connection_changes();
        let mut presence = Presence::<Known>::default();
        let mut reading: HashMap<AgentId, Reading> = HashMap::new();
        let mut tellers = Tellers::new(parts.me.clone());
        let mut list = Connected::default();
        let (mut listed, mut rest) = (None::<Instant>, LIST);
        let (mut labelled, mut arrived) = (labels.version(), Arrived::default());
        loop {
            let mut is_new = tellers.set(self.members().await, parts.sinks.now());
            let version = labels.version();
            is_new |= version != labelled;
            labelled = version;
            let has_changed = changes.has_changed().unwrap_or(false) || presence.is_unsure();
            let is_due = listed
                .is_none_or(|at| at.elapsed() >= if has_changed || is_new { rest } else { LIST_LATEST });
            if is_due {
                changes.mark_unchanged();
                let from = Instant::now();
                // If the tracker fails, the agents are what they were.
                if let Ok(answer) = connected(&**tracker, Query::All).await {
                    list = answer;
                    labels.want(list.connections.iter().map(|located| located.connection.agent));
                    is_new = true;
                }
                listed = Some(from);
                rest = (from.elapsed() * LIST_SHARE).clamp(LIST, LIST_LATEST);
            }
            if is_new {
                self.agents(&mut presence, &mut arrived, &list, &tellers);
                self.events(&mut reading, &list, &tellers);
            }
            reading.retain(|_, reading| !reading.task.is_finished());
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Tells which agents came and left.
    fn agents(
        &self,
        presence: &mut Presence<Known>,
        arrived: &mut Arrived,
        list: &Connected,
        tellers: &Tellers,
    ) {
        let sinks = &self.parts.sinks;
        self.labelled(arrived);
        let mut known: HashMap<AgentId, Known> = HashMap::new();
        for located in &list.connections {
            known.entry(located.connection.agent).or_insert_with(|| (&*located.connection).into());
        }
        let is_complete = list.unanswered.iter().all(|missing| missing.given_up);
        let at = sinks.now();
        let changes = presence.observe(known, is_complete, |agent| tellers.tells(agent, at), at);
        for change in changes {
            let agent = self.labels.add(change.agent);
            let about = if change.is_connected { About::AgentConnected } else { About::AgentDisconnected };
            let news = News {
                id: new_id(),
                about,
                agent: agent.id,
                agent_name: Arc::clone(&agent.name),
                subject: String::new(),
                time: now(),
                data: json!({ "connected": change.is_connected, "project": agent.project }),
            };
            let untold = arrived.0.remove(&agent.id);
            if agent.labels.is_some() || !sinks.need_labels(Kind::Agents) {
                sinks.tell(&agent, news);
                continue;
            }
            // Its configuration stream begins after its tunnels, so its labels may not be known yet. Who was
            // not told that it came is not told that it left.
            sinks.tell_to(To::Unlabelled, &agent, news.clone());
            if change.is_connected && untold.is_none() {
                arrived.0.insert(agent.id, (Instant::now(), agent, news));
            }
        }
    }

    /// Tells of agents that came, and whose labels have become known.
    fn labelled(&self, arrived: &mut Arrived) {
        arrived.0.retain(|_, (since, agent, news)| {
            let agent = self.labels.add(agent.clone());
            if agent.labels.is_some() {
                self.parts.sinks.tell_to(To::Labelled, &agent, news.clone());
                return false;
            }
            let is_late = since.elapsed() >= UNLABELLED;
            if is_late {
                no_labels(agent.id, "its kas.yaml was not known in time");
            }
            !is_late
        });
    }

    /// Reads the events of the agents that sinks select and whose home is this replica.
    fn events(&self, reading: &mut HashMap<AgentId, Reading>, list: &Connected, tellers: &Tellers) {
        let HomesParts { sinks, sources, hub, tracker, .. } = &self.parts;
        let mut wanted: HashMap<AgentId, Known> = HashMap::new();
        let mut connected = HashSet::new();
        if sinks.want(Kind::Events) {
            for located in &list.connections {
                connected.insert(located.connection.agent);
                let agent = self.labels.add(Known::from(&*located.connection));
                // Without its labels, its events would have to be read again for the sinks that select by
                // them.
                if !wanted.contains_key(&agent.id)
                    && !self.labels.are_awaited(agent.id)
                    && sinks.want_of(Kind::Events, &agent)
                    && tellers.is_home(agent.id)
                {
                    wanted.insert(agent.id, agent);
                }
            }
        }
        let is_complete = list.unanswered.iter().all(|missing| missing.given_up);
        reading.retain(|id, reading| match wanted.get(id) {
            Some(agent) => {
                reading.away = None;
                // What other sinks want now is told from the beginning.
                agent.is_named_as(&reading.agent)
                    && sinks.wanting(Kind::Events, agent) == sinks.wanting(Kind::Events, &reading.agent)
            }
            // Its labels are others now, or its home.
            None if connected.contains(id) => false,
            None => {
                let away = *reading.away.get_or_insert_with(Instant::now);
                // It may be connected to a replica that did not answer.
                tellers.is_home(*id) && (!is_complete || away.elapsed() < AWAY)
            }
        });
        for (id, agent) in wanted {
            reading.entry(id).or_insert_with(|| {
                let events = AgentEvents {
                    shared: Arc::clone(&self.shared),
                    agent: agent.clone(),
                    source: sources.open(id, None),
                    kind: hub.kind_of(id),
                    changes: tracker.changes(id),
                };
                let task: JoinHandle<()> = tokio::spawn(events.run());
                Reading { agent, task: task.abort_handle(), away: None }
            });
        }
    }
}

/// Says why sinks that select agents by their labels do not get an item.
pub(super) fn no_labels(agent: AgentId, why: &str) {
    let agent = agent.get();
    tracing::info!(
        agent.id = agent,
        why,
        "sinks that select agents by labels do not get an item of this agent"
    );
}
