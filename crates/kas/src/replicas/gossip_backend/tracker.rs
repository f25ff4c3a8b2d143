//! The traits of the tracker.

use std::{collections::HashMap, sync::Arc};

use async_trait::async_trait;
use cluster::{
    AgentView, Candidate, ClusterView, Connected, Connection, Connections, Doors, Lease, Locator, Mark,
    PeerReport, Query, Replica, ReplicaHealth, ReplicaState, ReplicaStatus, Replicas, TrackerError,
    TrackerStatus, Unanswered, Wire,
};
use ids::{AgentId, ReplicaId};
use table::{Epoch, Version};
use tokio::{sync::watch, time::Instant};

use super::{GossipBackend, SWEEP};

#[async_trait]
impl Locator for GossipBackend {
    fn route(&self, agent: AgentId, _methods: Arc<[Box<str>]>) -> Lease {
        let mut inner = self.inner();
        if inner.owner.insert(agent) {
            // Write first, then wake: a subscriber that locates again must see the route.
            inner.wake(agent);
            drop(inner);
            self.news.send_replace(());
            self.work.notify_one();
        }
        let this = self.this.clone();
        Lease::new(move || {
            if let Some(this) = this.upgrade() {
                this.withdraw(agent);
            }
        })
    }

    async fn locate(&self, agent: AgentId) -> Result<Vec<Candidate>, TrackerError> {
        let now = Instant::now();
        let inner = self.inner();
        let mut found = Vec::new();
        if inner.owner.contains(agent) {
            found.push(Candidate { replica: self.me.clone(), health: ReplicaHealth::Live, wire: Wire::Own });
        }
        let located = inner.table.locate(agent, now);
        // Replicas whose table is not known may hold the agent too.
        let unsynced = inner
            .table
            .unsynced(now)
            .into_iter()
            .filter(|candidate| !inner.table.is_masked(&candidate.replica, agent))
            .filter(|candidate| !located.iter().any(|known| known.replica == candidate.replica));
        let candidates: Vec<_> = located.iter().cloned().chain(unsynced).collect();
        drop(inner);
        found.extend(candidates.into_iter().map(|candidate| {
            let replica = Replica { id: candidate.replica, address: candidate.address };
            Candidate { replica, health: candidate.health, wire: Wire::Own }
        }));
        Ok(found)
    }

    fn mark(&self) -> Mark {
        let inner = self.inner();
        Mark { epoch: inner.owner.epoch().0, version: inner.owner.version().0 }
    }

    fn not_here(&self, replica: &ReplicaId, agent: AgentId, mark: Mark) {
        let (epoch, version) = (Epoch(mark.epoch), Version(mark.version));
        self.inner().table.not_here(replica, epoch, version, agent, Instant::now());
        self.work.notify_one();
    }

    fn changes(&self, agent: AgentId) -> watch::Receiver<()> {
        let mut inner = self.inner();
        if inner.watches.len() >= inner.sweep_at {
            inner.watches.retain(|_, watch| watch.receiver_count() > 0);
            inner.sweep_at = (2 * inner.watches.len()).max(SWEEP);
        }
        inner.watches.entry(agent).or_insert_with(|| watch::Sender::new(())).subscribe()
    }
}

#[async_trait]
impl Connections for GossipBackend {
    fn connection(&self, connection: Connection) -> Lease {
        self.own.connection(connection)
    }

    async fn connected(&self, query: Query) -> Result<Connected, TrackerError> {
        let own = self.own.connected(query).await?;
        Ok(self.gather(query, own).await)
    }

    fn connection_changes(&self) -> watch::Receiver<()> {
        self.connection_changes.subscribe()
    }
}

#[async_trait]
impl ClusterView for GossipBackend {
    fn live(&self) -> watch::Receiver<usize> {
        self.live.subscribe()
    }

    async fn replicas(&self) -> Replicas {
        let now = Instant::now();
        let inner = self.inner();
        #[cfg(not(any(test, feature = "flaws")))]
        let version = process::version::VERSION;
        #[cfg(any(test, feature = "flaws"))]
        let version = crate::replicas::records::version();
        let (version, commit) = (version.to_owned(), process::version::COMMIT.to_owned());
        let mut replicas = vec![ReplicaStatus {
            replica: self.me.clone(),
            build: (version, commit),
            state: inner.state,
            health: None,
            generation: self.gossip.generation(),
            mark: Mark { epoch: inner.owner.epoch().0, version: inner.owner.version().0 },
            agents: inner.owner.len() as u64,
            synced: true,
            heard: None,
        }];
        for view in inner.table.replicas(now) {
            // Gossip may still tell of the process before, or of a table in a later format: the generation is
            // listed only with the table of the same process.
            let generation = view.generation.unwrap_or_default();
            let build = inner.builds.get(&view.replica).cloned().unwrap_or_default();
            let (version, commit) = build.split_once(' ').unwrap_or((&build, ""));
            replicas.push(ReplicaStatus {
                build: (version.to_owned(), commit.to_owned()),
                state: view.state,
                health: Some(view.health),
                generation,
                mark: Mark {
                    epoch: view.epoch.map_or(0, |epoch| epoch.0),
                    version: view.version.map_or(0, |version| version.0),
                },
                agents: view.count as u64,
                synced: view.synced,
                heard: Some(view.proof_age),
                replica: Replica { id: view.replica, address: view.address },
            });
        }
        let events = inner.history.events();
        drop(inner);
        Replicas { replicas, alarms: self.alarms(), events }
    }

    fn doors(&self, replica: &ReplicaId) -> Doors {
        let inner = self.inner();
        if *replica == self.me.id {
            return if inner.state == ReplicaState::Ready { self.doors } else { Doors::default() };
        }
        let Some(doors) = inner.doors.get(replica) else { return Doors::default() };
        let views = inner.table.replicas(Instant::now());
        let is_ready = views.iter().any(|view| {
            view.replica == *replica
                && view.state == ReplicaState::Ready
                && view.health == ReplicaHealth::Live
        });
        if is_ready { *doors } else { Doors::default() }
    }

    fn status(&self) -> TrackerStatus {
        let inner = self.inner();
        let agents = inner.owner.len() as u64;
        let known: usize = inner.table.replicas(Instant::now()).iter().map(|view| view.count).sum();
        TrackerStatus { backend: "gossip", agents, remembered: known as u64, ..TrackerStatus::default() }
    }

    fn views(&self, agent: AgentId) -> Vec<AgentView> {
        let now = Instant::now();
        let inner = self.inner();
        let addresses: HashMap<ReplicaId, Arc<str>> =
            inner.table.replicas(now).into_iter().map(|view| (view.replica, view.address)).collect();
        let explanations = inner.table.explain(agent, now);
        drop(inner);
        explanations
            .into_iter()
            .map(|known| AgentView {
                why: known.to_string(),
                holds: known.holds && known.masked.is_none(),
                replica: Replica {
                    address: addresses.get(&known.replica).cloned().unwrap_or_default(),
                    id: known.replica,
                },
                wire: Wire::Own,
            })
            .collect()
    }

    async fn peer_reports(&self, agent: Option<AgentId>) -> (Vec<PeerReport>, Vec<Unanswered>) {
        self.gather_reports(agent).await
    }
}
