//! [`InMemoryTracker`]: a tracker for one replica, in its own memory.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use async_trait::async_trait;
use ids::{AgentId, ConnectionId};
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::watch;

use crate::{
    AgentView, Candidate, ClusterView, Connected, Connection, Connections, Lease, Located, Locator, Query,
    Replica, ReplicaHealth, ReplicaState, ReplicaStatus, Replicas, TrackerError, TrackerStatus, Wire,
};

/// Subscriptions without a receiver are removed once there are this many entries.
const SWEEP: usize = 1024;

/// The tracker of a single replica.
#[derive(Clone)]
pub struct InMemoryTracker {
    replica: Replica,
    state: Arc<Mutex<State>>,
    connection_changes: watch::Sender<()>,
    /// Always 1.
    live: watch::Sender<usize>,
}

#[derive(Default)]
struct State {
    /// Number of leases of each agent.
    routes: HashMap<AgentId, usize>,
    watches: HashMap<AgentId, watch::Sender<()>>,
    /// `watches` is swept when it has this many entries.
    sweep_at: usize,
    /// The serial number distinguishes a connection from an older one with the same id.
    connections: BTreeMap<(AgentId, ConnectionId, u64), Arc<Connection>>,
    serial: u64,
}

impl std::fmt::Debug for InMemoryTracker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("InMemoryTracker").field("replica", &self.replica).finish_non_exhaustive()
    }
}

impl InMemoryTracker {
    /// Returns an empty tracker of `replica`, which is this replica.
    pub fn new(replica: Replica) -> Self {
        let state = State { sweep_at: SWEEP, ..State::default() };
        Self {
            replica,
            state: Arc::new(Mutex::new(state)),
            connection_changes: watch::Sender::new(()),
            live: watch::Sender::new(1),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Returns how many agents have a route.
    pub fn routed_agents(&self) -> usize {
        self.state().routes.len()
    }

    /// Returns how many configuration streams are open.
    pub fn connections(&self) -> usize {
        self.state().connections.len()
    }

    fn withdraw_route(&self, agent: AgentId) {
        let mut state = self.state();
        if let Some(leases) = state.routes.get_mut(&agent) {
            *leases -= 1;
            if *leases == 0 {
                state.routes.remove(&agent);
                state.wake(agent);
            }
        }
    }
}

impl State {
    /// Whether a connection with this id is listed.
    fn lists(&self, agent: AgentId, id: ConnectionId) -> bool {
        self.connections.range((agent, id, 0)..=(agent, id, u64::MAX)).next().is_some()
    }

    fn wake(&mut self, agent: AgentId) {
        if let Some(watch) = self.watches.get(&agent) {
            watch.send_replace(());
            if watch.receiver_count() == 0 {
                self.watches.remove(&agent);
            }
        }
    }
}

#[async_trait]
impl Locator for InMemoryTracker {
    fn route(&self, agent: AgentId, _methods: Arc<[Box<str>]>) -> Lease {
        let mut state = self.state();
        let leases = state.routes.entry(agent).or_default();
        *leases += 1;
        if *leases == 1 {
            // Write first, then wake: a subscriber that locates again must see the route.
            state.wake(agent);
        }
        drop(state);
        let tracker = self.clone();
        Lease::new(move || tracker.withdraw_route(agent))
    }

    async fn locate(&self, agent: AgentId) -> Result<Vec<Candidate>, TrackerError> {
        let known = self.state().routes.contains_key(&agent);
        let candidate =
            || Candidate { replica: self.replica.clone(), health: ReplicaHealth::Live, wire: Wire::Own };
        Ok(known.then(candidate).into_iter().collect())
    }

    fn changes(&self, agent: AgentId) -> watch::Receiver<()> {
        let mut state = self.state();
        if state.watches.len() >= state.sweep_at {
            state.watches.retain(|_, watch| watch.receiver_count() > 0);
            state.sweep_at = (2 * state.watches.len()).max(SWEEP);
        }
        state.watches.entry(agent).or_insert_with(|| watch::Sender::new(())).subscribe()
    }
}

#[async_trait]
impl Connections for InMemoryTracker {
    fn connection(&self, connection: Connection) -> Lease {
        let mut state = self.state();
        state.serial += 1;
        let key = (connection.agent, connection.id, state.serial);
        let known = state.lists(key.0, key.1);
        state.connections.insert(key, Arc::new(connection));
        drop(state);
        // A second stream of the same process changes no list.
        if !known {
            self.connection_changes.send_replace(());
        }
        let tracker = self.clone();
        Lease::new(move || {
            let mut state = tracker.state();
            state.connections.remove(&key);
            let still = state.lists(key.0, key.1);
            drop(state);
            if !still {
                tracker.connection_changes.send_replace(());
            }
        })
    }

    async fn connected(&self, query: Query) -> Result<Connected, TrackerError> {
        let state = self.state();
        let located = |connection: &Arc<Connection>| Located {
            connection: Arc::clone(connection),
            replica: self.replica.clone(),
            unconfirmed: false,
        };
        let mut connections: Vec<Located> = match query {
            Query::Agent(agent) => state
                .connections
                .range((agent, ConnectionId::MIN, 0)..=(agent, ConnectionId::MAX, u64::MAX))
                .map(|(_, connection)| located(connection))
                .collect(),
            _ => state.connections.values().filter(|c| query.matches(c)).map(located).collect(),
        };
        // During a reconnect, an agentk process has its old and its new stream: the newer one is listed.
        connections.dedup_by(|newer, older| {
            let same = newer.connection.agent == older.connection.agent
                && newer.connection.id == older.connection.id;
            if same {
                *older = newer.clone();
            }
            same
        });
        Ok(Connected { connections, unanswered: Vec::new() })
    }

    fn connection_changes(&self) -> watch::Receiver<()> {
        self.connection_changes.subscribe()
    }
}

#[async_trait]
impl ClusterView for InMemoryTracker {
    fn live(&self) -> watch::Receiver<usize> {
        self.live.subscribe()
    }

    async fn replicas(&self) -> Replicas {
        let status = ReplicaStatus {
            replica: self.replica.clone(),
            build: (String::new(), String::new()),
            state: ReplicaState::Ready,
            health: None,
            generation: 0,
            mark: self.mark(),
            agents: self.routed_agents() as u64,
            synced: true,
            heard: None,
        };
        Replicas { replicas: vec![status], alarms: Vec::new(), events: Vec::new() }
    }

    fn status(&self) -> TrackerStatus {
        TrackerStatus { backend: "memory", agents: self.routed_agents() as u64, ..TrackerStatus::default() }
    }

    fn views(&self, _agent: AgentId) -> Vec<AgentView> {
        Vec::new()
    }
}

#[cfg(test)]
mod tests {
    use ids::ReplicaId;

    use super::*;

    fn tracker() -> InMemoryTracker {
        InMemoryTracker::new(Replica { id: ReplicaId::new("self"), address: "127.0.0.1:8153".into() })
    }

    #[tokio::test]
    async fn keeps_the_contract() {
        crate::contract::check(|| async { (Arc::new(tracker()) as Arc<dyn crate::Tracker>, ()) }).await;
    }

    #[tokio::test]
    async fn subscriptions_to_absent_agents_do_not_pile_up() {
        let tracker = tracker();
        for id in 1..=10 * SWEEP as i64 {
            drop(tracker.changes(AgentId::new(id).unwrap()));
        }
        assert!(tracker.state().watches.len() <= SWEEP);
    }
}
