//! [`Homes`]: tells of the agents whose home is this replica: the one with the highest [`home_rank`] among
//! those that are ready, as for hooks. Two homes tell twice, and none for a moment tells later.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use cluster::{Connected, Query, ReplicaHealth, ReplicaState, Tracker};
use ids::{AgentId, ReplicaId, home_rank};
use serde_json::json;
use sinks::{About, Kind, News, Presence};
use tokio::{
    sync::Semaphore,
    task::{AbortHandle, JoinHandle},
    time::Instant,
};

use super::{
    board::{Known, Sinks, new_id, now},
    events::{AgentEvents, Shared},
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
    draining: AtomicBool,
}

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
        let shared = Arc::new(Shared { sinks, files, lists: Semaphore::new(LISTS) });
        Arc::new(Self { parts, shared, draining: AtomicBool::new(false) })
    }

    /// This replica leaves: it is no home any more.
    pub(crate) fn drain(&self) {
        self.draining.store(true, Ordering::Relaxed);
    }

    /// Returns the replicas among which homes are chosen.
    async fn members(&self) -> Vec<ReplicaId> {
        let draining = self.draining.load(Ordering::Relaxed);
        let known = self.parts.tracker.replicas().await.replicas;
        let ready = known.into_iter().filter(|status| {
            let is_live = status.health.map_or(!draining, |health| health == ReplicaHealth::Live);
            is_live && status.state == ReplicaState::Ready
        });
        let mut members: Vec<ReplicaId> = ready.map(|status| status.replica.id).collect();
        members.sort_unstable();
        members
    }

    fn is_home(&self, members: &[ReplicaId], agent: AgentId) -> bool {
        members.iter().max_by_key(|id| home_rank(agent, id)) == Some(&self.parts.me)
    }

    /// Looks and tells until dropped.
    pub(crate) async fn run(self: Arc<Self>) {
        let Self { parts, .. } = &*self;
        let HomesParts { sinks, tracker, .. } = parts;
        if !sinks.want(Kind::Agents) && !sinks.want(Kind::Events) {
            return;
        }
        let mut changes = tracker.connection_changes();
        let mut presence = Presence::<Known>::default();
        let mut reading: HashMap<AgentId, Reading> = HashMap::new();
        let mut members = Vec::new();
        let mut list = Connected::default();
        let (mut listed, mut rest) = (None::<Instant>, LIST);
        loop {
            let now_members = self.members().await;
            let mut is_new = now_members != members;
            members = now_members;
            let has_changed = changes.has_changed().unwrap_or(false) || presence.is_unsure();
            let is_due = listed
                .is_none_or(|at| at.elapsed() >= if has_changed || is_new { rest } else { LIST_LATEST });
            if is_due {
                changes.mark_unchanged();
                let from = Instant::now();
                // If the tracker fails, the agents are what they were.
                if let Ok(answer) = connected(&**tracker, Query::All).await {
                    list = answer;
                    is_new = true;
                }
                listed = Some(from);
                rest = (from.elapsed() * LIST_SHARE).clamp(LIST, LIST_LATEST);
            }
            if is_new {
                self.agents(&mut presence, &list, &members);
                self.events(&mut reading, &list, &members);
            }
            reading.retain(|_, reading| !reading.task.is_finished());
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Tells which agents came and left.
    fn agents(&self, presence: &mut Presence<Known>, list: &Connected, members: &[ReplicaId]) {
        let sinks = &self.parts.sinks;
        let mut known: HashMap<AgentId, Known> = HashMap::new();
        for located in &list.connections {
            known.entry(located.connection.agent).or_insert_with(|| (&*located.connection).into());
        }
        let is_complete = list.unanswered.iter().all(|missing| missing.given_up);
        let changes = presence.observe(known, is_complete, |agent| self.is_home(members, agent), sinks.now());
        for change in changes {
            let about = if change.is_connected { About::AgentConnected } else { About::AgentDisconnected };
            let news = News {
                id: new_id(),
                about,
                agent: change.agent.id,
                agent_name: Arc::clone(&change.agent.name),
                subject: String::new(),
                time: now(),
                data: json!({ "connected": change.is_connected, "project": change.agent.project }),
            };
            sinks.tell(&change.agent, news);
        }
    }

    /// Reads the events of the agents that sinks select and whose home is this replica.
    fn events(&self, reading: &mut HashMap<AgentId, Reading>, list: &Connected, members: &[ReplicaId]) {
        let HomesParts { sinks, sources, hub, tracker, .. } = &self.parts;
        let mut wanted: HashMap<AgentId, Known> = HashMap::new();
        if sinks.want(Kind::Events) {
            for located in &list.connections {
                let agent = Known::from(&*located.connection);
                if !wanted.contains_key(&agent.id)
                    && sinks.want_of(Kind::Events, &agent)
                    && self.is_home(members, agent.id)
                {
                    wanted.insert(agent.id, agent);
                }
            }
        }
        let is_complete = list.unanswered.iter().all(|missing| missing.given_up);
        reading.retain(|id, reading| match wanted.get(id) {
            Some(agent) => {
                reading.away = None;
                *agent == reading.agent
            }
            None => {
                let away = *reading.away.get_or_insert_with(Instant::now);
                // It may be connected to a replica that did not answer.
                self.is_home(members, *id) && (!is_complete || away.elapsed() < AWAY)
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
