//! The processes of agents of 16.5 and later. They register by `AgentRegistrar/Register` every 5 minutes,
//! instead of by their configuration stream.
//!
//! GitLab's kas keeps such an entry as long as kas itself runs, so it lists pods that are gone. Here an entry
//! ends if the agent does not repeat it, and it is hidden while no replica has a tunnel of the agent.
//!
//! After a restart of kas, agents would not be listed until they register again. Until then, the
//! configuration stream of such an agent is listed as a stand-in. Every replica derives its id from the name
//! of the pod, so lists can omit a stand-in if the entry is listed too.

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use cluster::{AgentMeta, Connection, Lease, Located, Tracker};
use ids::{AgentId, ConnectionId};
use tokio::time::Instant;

use identity::{Authenticated, Identity};
use routing::registry::TunnelRegistry;

/// An entry ends this long after the last registration. Agents register after 5 minutes, and after up to 5
/// more if that failed.
const LIFETIME: Duration = Duration::from_secs(630);
/// An agent without tunnels stays listed this long, since it may be changing connections.
const ABSENT: Duration = Duration::from_secs(30);
/// How often entries are checked.
const SWEEP: Duration = Duration::from_secs(5);
/// The most processes of one agent. One more replaces the one that registered longest ago.
const MAX_PROCESSES: usize = 256;

/// The entries of this replica.
pub struct Registrar {
    tracker: Arc<dyn Tracker>,
    registry: Arc<TunnelRegistry>,
    identity: Arc<dyn Identity>,
    entries: Mutex<HashMap<AgentId, Vec<Entry>>>,
}

struct Entry {
    connection: Connection,
    authenticated: Authenticated,
    registered: Instant,
    /// Since when no replica has a tunnel of the agent.
    absent: Option<Instant>,
    /// `None`: the entry is not listed.
    lease: Option<Lease>,
}

impl std::fmt::Debug for Registrar {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Registrar").finish_non_exhaustive()
    }
}

impl Registrar {
    /// Creates a registrar that lists its entries in `tracker`.
    pub fn new(
        tracker: Arc<dyn Tracker>,
        registry: Arc<TunnelRegistry>,
        identity: Arc<dyn Identity>,
    ) -> Arc<Self> {
        Arc::new(Self { tracker, registry, identity, entries: Mutex::default() })
    }

    fn entries(&self) -> MutexGuard<'_, HashMap<AgentId, Vec<Entry>>> {
        // Each change is one push or retain, so a panic cannot leave the entries inconsistent.
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers a process. Returns whether it is new.
    pub fn register(&self, authenticated: &Authenticated, process: ConnectionId, meta: AgentMeta) -> bool {
        let agent = &authenticated.agent;
        let mut entries = self.entries();
        let of_agent = entries.entry(agent.id).or_default();
        if let Some(known) = of_agent.iter_mut().find(|entry| entry.connection.id == process) {
            known.registered = Instant::now();
            known.authenticated = authenticated.clone();
            if known.connection.meta != meta {
                known.connection.meta = meta;
                if known.lease.take().is_some() {
                    known.lease = Some(self.tracker.connection(known.connection.clone()));
                }
            }
            return false;
        }
        if of_agent.len() >= MAX_PROCESSES
            && let Some(stalest) = (0..of_agent.len()).min_by_key(|at| of_agent[*at].registered)
        {
            of_agent.swap_remove(stalest);
        }
        let connection = Connection {
            agent: agent.id,
            name: Arc::clone(&agent.name),
            project_id: agent.project_id,
            id: process,
            meta,
            connected_at: process::clock::wall(),
        };
        let lease = Some(self.tracker.connection(connection.clone()));
        let registered = Instant::now();
        of_agent.push(Entry {
            connection,
            authenticated: authenticated.clone(),
            registered,
            absent: None,
            lease,
        });
        true
    }

    /// Removes a process.
    pub fn unregister(&self, agent: AgentId, process: ConnectionId) {
        let mut entries = self.entries();
        if let Some(of_agent) = entries.get_mut(&agent) {
            of_agent.retain(|entry| entry.connection.id != process);
            if of_agent.is_empty() {
                entries.remove(&agent);
            }
        }
    }

    /// Removes the processes of agents and tokens that are no longer valid.
    pub async fn recheck(&self) {
        let known: Vec<_> = self
            .entries()
            .values()
            .flatten()
            .map(|entry| (entry.connection.id, entry.authenticated.clone()))
            .collect();
        for (process, authenticated) in known {
            if !self.identity.still_valid(&authenticated).await {
                self.unregister(authenticated.agent.id, process);
            }
        }
    }

    /// Removes expired entries and hides agents without tunnels, until dropped.
    pub async fn run(self: Arc<Self>) {
        loop {
            tokio::time::sleep(SWEEP).await;
            self.sweep().await;
        }
    }

    async fn sweep(&self) {
        let agents: Vec<AgentId> = self.entries().keys().copied().collect();
        for agent in agents {
            // If the tracker fails, the agent counts as present.
            let present = self.registry.holds(agent)
                || self.tracker.locate(agent).await.map_or(true, |found| !found.is_empty());
            let now = Instant::now();
            let mut entries = self.entries();
            let Some(of_agent) = entries.get_mut(&agent) else { continue };
            of_agent.retain(|entry| now.duration_since(entry.registered) < LIFETIME);
            for entry in of_agent.iter_mut() {
                entry.absent = if present { None } else { Some(entry.absent.unwrap_or(now)) };
                let hidden = entry.absent.is_some_and(|since| now.duration_since(since) >= ABSENT);
                if hidden {
                    entry.lease = None;
                } else if entry.lease.is_none() {
                    entry.lease = Some(self.tracker.connection(entry.connection.clone()));
                }
            }
            if of_agent.is_empty() {
                entries.remove(&agent);
            }
        }
    }
}

/// Returns what an agent reports about its process. Each text is cut to 256 bytes, since it is kept in memory
/// and shown to people.
pub fn bounded(version: String, commit: String, pod_namespace: String, pod_name: String) -> AgentMeta {
    AgentMeta {
        version: cut(version),
        commit: cut(commit),
        pod_namespace: cut(pod_namespace),
        pod_name: cut(pod_name),
    }
}

fn cut(mut text: String) -> String {
    /// In bytes.
    const LONGEST: usize = 256;
    if text.len() > LONGEST {
        let end = (0..=LONGEST).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
        text.truncate(end);
    }
    text
}

/// Returns the connection id of a process that registers as `pod_id`.
pub fn process(agent: AgentId, pod_id: i64) -> ConnectionId {
    // Agents choose positive numbers. Another number identifies a process too, but is no valid connection id.
    ConnectionId::new(pod_id)
        .unwrap_or_else(|_| ConnectionId::of_instance(agent, format!("pod_id {pod_id}").as_bytes()))
}

/// Returns the id of the stand-in for a process. `None`: the agent does not send the name of its pod, so its
/// entry could not be matched.
pub fn stand_in(agent: AgentId, meta: &AgentMeta) -> Option<ConnectionId> {
    let AgentMeta { pod_namespace, pod_name, .. } = meta;
    (!pod_name.is_empty())
        .then(|| ConnectionId::of_instance(agent, format!("pod {pod_namespace}/{pod_name}").as_bytes()))
}

/// Removes each stand-in whose entry is listed too. `connections` are ordered by agent.
pub fn leave_out_stand_ins(connections: &mut Vec<Located>) {
    let mut doubles = HashSet::new();
    for of_agent in connections.chunk_by(|a, b| a.connection.agent == b.connection.agent) {
        if of_agent.len() < 2 {
            continue;
        }
        let listed: HashSet<ConnectionId> = of_agent.iter().map(|located| located.connection.id).collect();
        for Located { connection, .. } in of_agent {
            if let Some(stand_in) = stand_in(connection.agent, &connection.meta)
                && stand_in != connection.id
                && listed.contains(&stand_in)
            {
                doubles.insert((connection.agent, stand_in));
            }
        }
    }
    if !doubles.is_empty() {
        connections.retain(|located| !doubles.contains(&(located.connection.agent, located.connection.id)));
    }
}

#[cfg(test)]
mod tests {
    use cluster::{Connections as _, InMemoryTracker, Locator as _, Query, Replica};
    use ids::{ReplicaId, TokenHash};
    use prometheus_client::registry::Registry;

    use super::*;
    use identity::{Agent, Hold, IdentityError};
    use routing::{metrics::RequestMetrics, registry::Limits};

    /// Every token is valid until it is revoked.
    struct AnyToken(tokio::sync::watch::Sender<u64>, std::sync::atomic::AtomicBool);

    #[async_trait::async_trait]
    impl Identity for AnyToken {
        async fn authenticate(
            &self,
            _token: &[u8],
            _from: Option<std::net::IpAddr>,
        ) -> Result<Authenticated, IdentityError> {
            Err(IdentityError::Unknown)
        }

        fn changes(&self) -> tokio::sync::watch::Receiver<u64> {
            self.0.subscribe()
        }

        fn agents(&self) -> Vec<Arc<Agent>> {
            Vec::new()
        }

        fn agent(&self, _agent: AgentId) -> Option<Arc<Agent>> {
            None
        }

        async fn still_valid(&self, _authenticated: &Authenticated) -> bool {
            !self.1.load(std::sync::atomic::Ordering::Relaxed)
        }
    }

    struct Lab {
        tracker: Arc<InMemoryTracker>,
        identity: Arc<AnyToken>,
        registrar: Arc<Registrar>,
    }

    fn lab() -> Lab {
        let me = Replica { id: ReplicaId::new("me"), address: "127.0.0.1:1".into() };
        let tracker = Arc::new(InMemoryTracker::new(me));
        let metrics = Arc::new(RequestMetrics::new(&mut Registry::default()));
        let limits =
            Limits { waiters_per_agent: 100, waiters: 100, tunnels_per_agent: 100, endless_per_old_agent: 2 };
        let registry = TunnelRegistry::new(Arc::clone(&tracker) as _, metrics, limits);
        let identity = Arc::new(AnyToken(tokio::sync::watch::channel(0).0, false.into()));
        let registrar = Registrar::new(Arc::clone(&tracker) as _, registry, Arc::clone(&identity) as _);
        Lab { tracker, identity, registrar }
    }

    fn agent() -> Authenticated {
        let id = AgentId::new(3).unwrap();
        let agent = Arc::new(Agent { id, name: "a".into(), project_id: 1 });
        Authenticated { agent, token: TokenHash::of(b"t"), hold: Hold::default() }
    }

    fn meta(pod_name: &str) -> AgentMeta {
        AgentMeta { version: "v16.5.0".into(), pod_name: pod_name.into(), ..AgentMeta::default() }
    }

    fn id(id: i64) -> ConnectionId {
        ConnectionId::new(id).unwrap()
    }

    impl Lab {
        async fn listed(&self) -> Vec<i64> {
            let connected = self.tracker.connected(Query::All).await.unwrap();
            connected.connections.iter().map(|located| located.connection.id.get()).collect()
        }

        /// Advances the time, and then sweeps.
        async fn pass(&self, time: Duration) {
            tokio::time::advance(time).await;
            self.registrar.sweep().await;
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_entry_ends_when_it_is_not_repeated() {
        let lab = lab();
        let _route = lab.tracker.route(agent().agent.id, Arc::from([]));
        assert!(lab.registrar.register(&agent(), id(7), meta("p")));
        assert!(lab.registrar.register(&agent(), id(8), meta("q")));
        // Twice the interval: a failed registration may be repeated this late.
        for _ in 0..3 {
            lab.pass(Duration::from_secs(600)).await;
            assert_eq!(lab.listed().await, [7, 8]);
            assert!(!lab.registrar.register(&agent(), id(7), meta("p")));
            lab.registrar.register(&agent(), id(8), meta("q"));
        }
        lab.pass(Duration::from_secs(600)).await;
        lab.registrar.register(&agent(), id(7), meta("p"));
        lab.pass(Duration::from_secs(31)).await;
        assert_eq!(lab.listed().await, [7]);
        lab.registrar.unregister(agent().agent.id, id(7));
        assert!(lab.listed().await.is_empty() && lab.registrar.entries().is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn an_agent_without_tunnels_is_hidden_until_it_has_one() {
        let lab = lab();
        lab.registrar.register(&agent(), id(7), meta("p"));
        lab.pass(Duration::ZERO).await;
        lab.pass(ABSENT - Duration::from_secs(1)).await;
        assert_eq!(lab.listed().await, [7], "it may be changing connections");
        lab.pass(Duration::from_secs(1)).await;
        assert!(lab.listed().await.is_empty());
        // The entry was kept: the agent does not register again just because it reconnects.
        let route = lab.tracker.route(agent().agent.id, Arc::from([]));
        lab.pass(Duration::ZERO).await;
        assert_eq!(lab.listed().await, [7]);
        drop(route);
    }

    #[tokio::test(start_paused = true)]
    async fn revoked_agents_and_the_oldest_of_too_many_are_removed() {
        let lab = lab();
        for n in 1..=MAX_PROCESSES as i64 {
            lab.registrar.register(&agent(), id(n), meta(""));
            tokio::time::advance(Duration::from_millis(1)).await;
        }
        lab.registrar.register(&agent(), id(1), meta(""));
        tokio::time::advance(Duration::from_millis(1)).await;
        lab.registrar.register(&agent(), id(1_000), meta(""));
        let listed = lab.listed().await;
        assert_eq!((listed.len(), listed[0], listed[1]), (MAX_PROCESSES, 1, 3));
        lab.registrar.recheck().await;
        assert_eq!(lab.listed().await.len(), MAX_PROCESSES);
        lab.identity.1.store(true, std::sync::atomic::Ordering::Relaxed);
        lab.registrar.recheck().await;
        assert!(lab.listed().await.is_empty());
    }

    #[tokio::test]
    async fn metadata_of_a_process_may_change() {
        let lab = lab();
        lab.registrar.register(&agent(), id(7), meta("p"));
        lab.registrar.register(&agent(), id(7), meta("q"));
        let connected = lab.tracker.connected(Query::All).await.unwrap();
        assert_eq!(connected.connections.len(), 1);
        assert_eq!(connected.connections[0].connection.meta.pod_name, "q");
    }

    #[tokio::test]
    async fn a_stand_in_is_listed_only_without_its_entry() {
        let lab = lab();
        let agent_id = agent().agent.id;
        let stand_in = stand_in(agent_id, &meta("p")).unwrap();
        assert_eq!(super::stand_in(agent_id, &meta("")), None);
        let stream = Connection {
            agent: agent_id,
            name: "a".into(),
            project_id: 1,
            id: stand_in,
            meta: meta("p"),
            connected_at: Duration::ZERO,
        };
        let _stream = lab.tracker.connection(stream.clone());
        let other = AgentId::new(4).unwrap();
        let _other = lab.tracker.connection(Connection { agent: other, ..stream });
        let listed = async || {
            let mut connections = lab.tracker.connected(Query::All).await.unwrap().connections;
            leave_out_stand_ins(&mut connections);
            connections.iter().map(|l| (l.connection.agent.get(), l.connection.id.get())).collect::<Vec<_>>()
        };
        assert_eq!(listed().await, [(3, stand_in.get()), (4, stand_in.get())]);
        lab.registrar.register(&agent(), id(8), meta("another"));
        assert_eq!(listed().await.len(), 3);
        lab.registrar.register(&agent(), id(7), meta("p"));
        assert_eq!(listed().await, [(3, 7), (3, 8), (4, stand_in.get())]);
    }
}
