//! [`GossipBackend`]: replicas inform each other by gossip and table streams.
//!
//! `gossip` decides which replicas are alive, and `table` keeps a copy of the table of each replica; neither
//! knows kas. This module connects them to sockets and time. [`GossipBackend`] is the tracker, `drive` is its
//! only task, and each table stream has its own task. One lock guards table and owner together. It is never
//! held over an await.

mod feed;
#[cfg(test)]
mod golden;
mod lists;
mod members;
mod stream;
#[cfg(test)]
mod tests;
mod tracker;

use std::{
    collections::{HashMap, HashSet},
    net::SocketAddr,
    sync::{Arc, Weak},
    time::Duration,
};

use async_trait::async_trait;
use cluster::{
    ClusterView as _, Connections as _, Doors, History, InMemoryTracker, Replica, ReplicaHealth, ReplicaState,
};
use gossip::{Gossip, KeyRing, Timing};
use grpc::service::LocalService;
use ids::{AgentId, ReplicaId};
use parking_lot::{Mutex, MutexGuard};
use table::{Action, Epoch, Failure, Limits, Owner, StreamId, Table, Version};
use tokio::{
    sync::{Notify, watch},
    task::AbortHandle,
    time::{Instant, MissedTickBehavior},
};

use self::members::Members;
#[cfg(feature = "fuzzing")]
pub use self::stream::decode_all;
use super::{
    Backend,
    metrics::{PeerRecord, ReplicaMetrics},
};
use observe::refusals::Refusals;
use routing::{peer::Peers, rate_limit::RateLimit, registry::TunnelRegistry};

/// Subscriptions without a receiver are removed once there are this many entries.
const SWEEP: usize = 1024;
/// A replica that could not sync with all others is ready after this time nevertheless.
const FIRST_SYNC: Duration = Duration::from_secs(5);
/// How often the main runtime sends a heartbeat; see [`HUNG`].
const HEARTBEAT: Duration = Duration::from_millis(500);
/// Without a heartbeat for this long, gossip publishes that this replica hangs.
const HUNG: Duration = Duration::from_secs(3);
/// If no other replica was heard for this long, neither by gossip nor on a table stream, this one becomes
/// silent: the replicas that still hear it cannot reach it. It is longer than two heartbeats of a stream.
/// With a shorter time, one lost heartbeat would count as deafness if UDP is blocked, and nothing would be
/// gained before the streams have ended too.
const DEAF: Duration = Duration::from_secs(5);
/// This replica calls its own address this long after its start.
const CHECK_ADDRESS: Duration = Duration::from_secs(1);

/// Keys of gossip.
mod key {
    /// Address of the private API.
    pub(super) const API: &str = "api";
    /// State of the replica.
    pub(super) const STATE: &str = "st";
    /// `version commit`.
    pub(super) const BUILD: &str = "build";
    /// Summary of the table.
    pub(super) const TABLE: &str = "tbl";
    /// The last changes of the table.
    pub(super) const CHANGES: &str = "chg";
    /// Where callers reach the replica; absent: nowhere from other hosts.
    pub(super) const DOORS: &str = "door";
}

/// What gossip has published: the version of the table, and the state.
type Position = (Epoch, Version, ReplicaState);

/// Starts gossip on the UDP port `bound`.
///
/// # Errors
/// See [`gossip::StartError`].
pub(super) async fn start(
    config: &kas_config::Gossip,
    name: &str,
    bound: SocketAddr,
    advertise: SocketAddr,
    keys: watch::Receiver<Arc<KeyRing>>,
    seeds: watch::Receiver<HashSet<SocketAddr>>,
) -> Result<Gossip, gossip::StartError> {
    builder(config, name).listen(bound).advertise(advertise).keys(keys).seeds(seeds).start().await
}

/// Returns gossip for the replica `name`, without its port, keys and seeds.
pub fn builder(config: &kas_config::Gossip, name: &str) -> gossip::Builder {
    Gossip::builder(name)
        .cluster(config.cluster.clone())
        .timing(Timing {
            interval: config.interval,
            phi: config.phi,
            initial_interval: config.interval * 3 / 2,
            dead_grace: config.dead_grace,
        })
        .health_gate(key::STATE, ReplicaState::Hung.as_str(), HUNG)
        .silence_if_deaf(DEAF)
}

/// What a [`GossipBackend`] is made of.
pub struct Parts {
    /// This replica.
    pub me: Replica,
    /// The name of its group of replicas. Replicas of other groups get no table.
    pub cluster: String,
    /// Where callers reach this replica.
    pub doors: Doors,
    /// The links to the others.
    pub peers: Arc<Peers>,
    /// What is measured.
    pub metrics: Arc<ReplicaMetrics>,
    /// Gossip of this replica, which has started. See [`builder`].
    pub gossip: Gossip,
    /// Where other replicas may be.
    pub seeds: watch::Receiver<HashSet<SocketAddr>>,
    /// How long a table counts after the last proof of life of its owner.
    pub ttl: Duration,
    /// The interval of gossip.
    pub interval: Duration,
}

impl std::fmt::Debug for Parts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Parts").field("me", &self.me).finish_non_exhaustive()
    }
}

/// The tracker of one of several replicas.
pub struct GossipBackend {
    /// For leases, which do not keep the tracker alive.
    this: Weak<Self>,
    me: Replica,
    cluster: String,
    doors: Doors,
    /// Gossip sends news at most this often.
    interval: Duration,
    peers: Arc<Peers>,
    metrics: Arc<ReplicaMetrics>,
    inner: Mutex<Inner>,
    /// The connections of this replica.
    own: InMemoryTracker,
    gossip: Gossip,
    seeds: watch::Receiver<HashSet<SocketAddr>>,
    /// Wakes the feeds when table or state of this replica change.
    news: watch::Sender<()>,
    /// Wakes when connections of this or another replica change.
    connection_changes: watch::Sender<()>,
    live: watch::Sender<usize>,
    /// False until the first sync.
    ready: watch::Sender<bool>,
    work: Notify,
}

struct Inner {
    table: Table,
    owner: Owner,
    state: ReplicaState,
    watches: HashMap<AgentId, watch::Sender<()>>,
    sweep_at: usize,
    streams: HashMap<StreamId, AbortHandle>,
    /// The build of each replica, from gossip.
    builds: HashMap<ReplicaId, String>,
    /// Where callers reach each replica, from gossip.
    doors: HashMap<ReplicaId, Doors>,
    /// Why there is no table from an address.
    refusals: HashMap<Arc<str>, String>,
    /// The advertised address of this replica belongs to another replica.
    address_alarm: Option<String>,
    /// How many replicas read the table of this one, and since when there are none.
    subscribers: usize,
    unread: Instant,
    /// The connection lists of other replicas may have changed.
    lists_changed: bool,
    /// How the health of the others changed.
    history: History,
}

impl std::fmt::Debug for GossipBackend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GossipBackend").field("me", &self.me).finish_non_exhaustive()
    }
}

impl Inner {
    /// Notes that a table stream of another replica has begun (1) or ended (-1).
    fn subscribed(&mut self, change: isize) {
        self.subscribers = self.subscribers.saturating_add_signed(change);
        if self.subscribers == 0 {
            self.unread = Instant::now();
        }
    }

    /// Records changes in the health of the others.
    fn record_health(&mut self, now: Instant) {
        let views = self.table.replicas(now).into_iter();
        let views = views.map(|view| (view.replica, view.health, view.state));
        self.history.record(process::clock::wall(), views);
    }

    fn wake(&mut self, agent: AgentId) {
        if let Some(watch) = self.watches.get(&agent) {
            watch.send_replace(());
            if watch.receiver_count() == 0 {
                self.watches.remove(&agent);
            }
        }
    }

    fn wake_all(&mut self) {
        self.watches.retain(|_, watch| {
            watch.send_replace(());
            watch.receiver_count() > 0
        });
    }
}

impl GossipBackend {
    /// Returns the tracker of a replica. It starts to work in [`Backend::run`].
    pub fn new(parts: Parts) -> Arc<Self> {
        let Parts { me, cluster, doors, peers, metrics, gossip, seeds, ttl, interval } = parts;
        let limits = Limits { ttl, ..Limits::default() };
        // One per process, above those of earlier processes of the same name, unless the clock was set back.
        // Then peers report the higher epoch.
        let epoch = u64::try_from(process::clock::wall().as_micros()).unwrap_or(u64::MAX - 1);
        let inner = Inner {
            table: Table::new(me.id.clone(), limits, Instant::now()),
            owner: Owner::new(Epoch(epoch)),
            state: ReplicaState::Starting,
            watches: HashMap::new(),
            sweep_at: SWEEP,
            streams: HashMap::new(),
            builds: HashMap::new(),
            doors: HashMap::new(),
            refusals: HashMap::new(),
            address_alarm: None,
            subscribers: 0,
            unread: Instant::now(),
            lists_changed: false,
            history: History::default(),
        };
        Arc::new_cyclic(|this| Self {
            this: this.clone(),
            interval,
            own: InMemoryTracker::new(me.clone()),
            me,
            cluster,
            doors,
            peers,
            metrics,
            inner: Mutex::new(inner),
            gossip,
            seeds,
            news: watch::Sender::new(()),
            connection_changes: watch::Sender::new(()),
            live: watch::Sender::new(1),
            ready: watch::Sender::new(false),
            work: Notify::new(),
        })
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock()
    }

    fn withdraw(&self, agent: AgentId) {
        let mut inner = self.inner();
        if inner.owner.remove(agent) {
            inner.wake(agent);
            drop(inner);
            self.news.send_replace(());
            self.work.notify_one();
        }
    }

    /// Announces the state of this replica to the others.
    fn announce(&self, state: ReplicaState) {
        self.inner().state = state;
        self.news.send_replace(());
        self.work.notify_one();
    }

    /// Applies gossip and seeds to the table, and does what the table asks for.
    async fn drive(self: &Arc<Self>) {
        let gossip = &self.gossip;
        let mut seeds = self.seeds.clone();
        let mut members = gossip.members();
        let mut status = gossip.status();
        let heartbeat = gossip.heartbeat();
        let counters = gossip.counters();
        let build = format!("{} {}", process::version::VERSION, process::version::COMMIT);
        self.publish(key::API, &self.me.address);
        self.publish(key::BUILD, &build);
        if !self.doors.is_empty() {
            self.publish(key::DOORS, &self.doors.to_string());
        }
        #[cfg(any(test, feature = "flaws"))]
        if let Some((key, value)) = crate::replicas::records::more_keys() {
            self.publish(key, value);
        }
        let mut incarnation = gossip.generation();
        let mut news = self.news.subscribe();
        let mut own = self.own.connection_changes();
        let mut ticks = tokio::time::interval(HEARTBEAT);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let begun = Instant::now();
        let mut known = Members::default();
        let mut published = None;
        let mut publish_at = begun;
        self.apply_seeds(&seeds.borrow_and_update());
        let mut seeds_live = true;
        let mut members_live = true;
        loop {
            let deadline = {
                let inner = self.inner();
                inner.table.deadline(Instant::now())
            };
            let outdated = published != Some(self.position());
            if outdated && Instant::now() >= publish_at {
                self.publish_position(&mut published);
                publish_at = Instant::now() + self.interval / 10;
            }
            tokio::select! {
                // Feeds send news themselves. Gossip sends them once per round.
                () = tokio::time::sleep_until(publish_at), if published != Some(self.position()) => {}
                changed = members.changed(), if members_live => match changed {
                    Ok(()) => self.apply_members(&mut known, &members),
                    Err(_) => {
                        members_live = false;
                        tracing::error!("gossip has stopped: replicas are found by discovery and over TCP only");
                    }
                },
                changed = seeds.changed(), if seeds_live => match changed {
                    Ok(()) => {
                        let found = seeds.borrow_and_update().clone();
                        self.apply_seeds(&found);
                    }
                    Err(_) => seeds_live = false,
                },
                changed = status.changed() => {
                    if changed.is_ok() {
                        self.report_status(*status.borrow_and_update());
                    } else {
                        // Gossip has stopped, as above. Do not spin.
                        tokio::time::sleep(HEARTBEAT).await;
                    }
                }
                _ = ticks.tick() => {
                    heartbeat.beat();
                    // Heartbeats of members advance without a wake-up.
                    self.apply_members(&mut known, &members);
                    let now = gossip.generation();
                    if now != incarnation {
                        incarnation = now;
                        self.inner().table.gossip_restarted(Instant::now());
                        self.metrics.gossip_restarts.inc();
                    }
                    self.measure(&counters);
                }
                _ = news.changed() => {}
                _ = own.changed() => {
                    self.connection_changes.send_replace(());
                }
                () = self.work.notified() => {}
                () = tokio::time::sleep_until(deadline) => self.inner().table.tick(Instant::now()),
            }
            self.act();
            if !*self.ready.borrow() {
                let settled = self.inner().table.is_settled(Instant::now());
                if settled || begun.elapsed() >= FIRST_SYNC {
                    self.ready.send_replace(true);
                    let mut inner = self.inner();
                    if inner.state == ReplicaState::Starting {
                        inner.state = ReplicaState::Ready;
                    }
                    drop(inner);
                    self.news.send_replace(());
                    tracing::info!(after = ?begun.elapsed(), synced = settled, "ready: the other replicas' tables are known");
                }
            }
        }
    }

    /// Calls this replica at its advertised address, to check that the address is not that of another
    /// replica.
    async fn check_own_address(&self) {
        tokio::time::sleep(CHECK_ADDRESS).await;
        let identity = stream::identify(self, &self.me.address);
        let identity = tokio::time::timeout(CHECK_ADDRESS * 2, identity).await;
        let epoch = self.inner().owner.epoch();
        let alarm = match identity.unwrap_or_else(|_| Err("no answer".to_owned())) {
            Ok(identity) if identity.replica == self.me.id && identity.epoch == epoch => return,
            Ok(_) => format!(
                "the advertised address of this replica, {}, belongs to another replica: set private_api.advertise, \
                 OWN_PRIVATE_API_URL or POD_IP",
                self.me.address
            ),
            Err(why) => {
                // Not every network lets a host reach itself by its external address.
                tracing::warn!(address = &*self.me.address, why, "cannot reach own advertised address");
                return;
            }
        };
        tracing::error!("{alarm}");
        self.inner().address_alarm = Some(alarm);
    }

    fn publish(&self, key: &str, value: &str) {
        #[cfg(any(test, feature = "flaws"))]
        let Some(value) = crate::replicas::records::value(key, value) else { return };
        #[cfg(any(test, feature = "flaws"))]
        let value = &*value;
        if let Err(error) = self.gossip.publish(key, value) {
            tracing::error!(key, error = %error, "gossip cannot carry this value");
        }
    }

    fn position(&self) -> Position {
        let inner = self.inner();
        (inner.owner.epoch(), inner.owner.version(), inner.state)
    }

    /// Publishes table and state of this replica by gossip.
    fn publish_position(&self, published: &mut Option<Position>) {
        let (summary, recent, state) = {
            let inner = self.inner();
            *published = Some((inner.owner.epoch(), inner.owner.version(), inner.state));
            (inner.owner.summary(), inner.owner.recent(), inner.state)
        };
        self.publish(key::STATE, state.as_str());
        self.publish(key::TABLE, &summary.to_string());
        self.publish(key::CHANGES, &recent.to_text());
    }

    fn apply_members(&self, known: &mut Members, members: &watch::Receiver<Arc<gossip::Members>>) {
        let members = Arc::clone(&members.borrow());
        let view = known.view(&members);
        let unread = known.unread();
        self.metrics.unread(PeerRecord::Summary, unread.summaries);
        self.metrics.unread(PeerRecord::Changes, unread.changes);
        let mut inner = self.inner();
        inner.builds = known.builds();
        inner.doors = known.doors();
        inner.table.gossip(&view, Instant::now());
    }

    fn apply_seeds(&self, seeds: &HashSet<SocketAddr>) {
        let others = seeds.iter().map(SocketAddr::to_string).filter(|seed| **seed != *self.me.address);
        let addresses: Vec<Arc<str>> = others.map(Into::into).collect();
        self.inner().refusals.retain(|address, _| addresses.contains(address));
        self.inner().table.seeds(addresses, Instant::now());
    }

    fn report_status(&self, status: gossip::Status) {
        let lonely = matches!(status, gossip::Status::Lonely { .. });
        self.metrics.gossip_lonely.set(lonely.into());
        let over_tcp = *self.live.borrow() - 1;
        match status {
            gossip::Status::Lonely { .. } if over_tcp > 0 => tracing::warn!(
                over_tcp,
                "gossip hears no other replica although some answer over TCP, by which requests still reach them: check \
                 that UDP is allowed between replicas on the port of the private API, and that gossip.cluster is the same"
            ),
            gossip::Status::Lonely { .. } => tracing::warn!(
                "no other replica is heard although discovery names some: check that they run, that TCP and UDP are allowed \
                 between replicas on the port of the private API, and that they have the same secret and gossip.cluster"
            ),
            gossip::Status::Meshed { peers } => tracing::info!(peers, "gossip hears other replicas"),
            gossip::Status::Alone | gossip::Status::Seeking => {}
        }
    }

    fn measure(&self, counters: &gossip::Counters) {
        let now = Instant::now();
        let inner = self.inner();
        self.metrics.replicas_live.set(i64::try_from(inner.table.live(now) + 1).unwrap_or(i64::MAX));
        self.metrics.table_agents.set(i64::try_from(inner.owner.len()).unwrap_or(i64::MAX));
        self.metrics
            .replicas_unsynced
            .set(i64::try_from(inner.table.unsynced(now).len()).unwrap_or(i64::MAX));
        drop(inner);
        self.metrics.gossip(counters);
    }

    /// Does what the table asks for.
    fn act(self: &Arc<Self>) {
        loop {
            let mut inner = self.inner();
            let actions = inner.table.actions();
            if actions.is_empty() {
                break;
            }
            for action in actions {
                match action {
                    Action::Dial { stream, replica, address, resume } => {
                        let task = stream::follow(Arc::clone(self), stream, replica, address, resume);
                        let handle = tokio::spawn(task).abort_handle();
                        inner.streams.insert(stream, handle);
                    }
                    Action::Close { stream } => {
                        if let Some(task) = inner.streams.remove(&stream) {
                            task.abort();
                        }
                    }
                    Action::Wake(agents) => {
                        for agent in agents {
                            inner.wake(agent);
                        }
                        inner.lists_changed = true;
                    }
                    Action::WakeAll => {
                        inner.wake_all();
                        inner.lists_changed = true;
                    }
                    Action::ReplicasChanged => {
                        inner.wake_all();
                        inner.lists_changed = true;
                        let now = Instant::now();
                        inner.record_health(now);
                        let live = inner.table.live(now) + 1;
                        let known: HashSet<Replica> = inner
                            .table
                            .replicas(now)
                            .into_iter()
                            .filter(|view| view.health < ReplicaHealth::Gone)
                            .map(|view| Replica { id: view.replica, address: view.address })
                            .collect();
                        self.peers.retain(|replica| known.contains(replica));
                        self.live.send_if_modified(|now| std::mem::replace(now, live) != live);
                    }
                }
            }
        }
        if std::mem::take(&mut self.inner().lists_changed) {
            self.connection_changes.send_replace(());
        }
    }

    /// Notes the end of a table stream.
    fn ended(self: &Arc<Self>, stream: StreamId, failure: Failure) {
        let mut inner = self.inner();
        inner.streams.remove(&stream);
        inner.table.failed(stream, failure, Instant::now());
        drop(inner);
        self.act();
        self.work.notify_one();
    }
}

#[async_trait]
impl Backend for GossipBackend {
    /// It is ready after the first sync.
    fn ready(&self) -> (watch::Receiver<bool>, &'static str) {
        (self.ready.subscribe(), "the tables of the other replicas are not known yet")
    }

    fn drain(&self) {
        self.announce(ReplicaState::Draining);
    }

    async fn leave(&self) {
        self.announce(ReplicaState::Left);
        self.publish_position(&mut None);
        // Two rounds, so that at least one other replica hears it.
        tokio::time::sleep(2 * self.interval).await;
    }

    fn services(
        self: Arc<Self>,
        registry: Arc<TunnelRegistry>,
        refusals: Arc<Refusals>,
    ) -> Vec<(String, LocalService)> {
        feed::services(self, registry, refusals)
    }

    /// Each replica gets its part of the limit.
    fn share_limit(&self, _name: &'static str, limit: RateLimit) -> Arc<RateLimit> {
        Arc::new(limit.parted(self.live()))
    }

    async fn run(self: Arc<Self>) {
        tokio::join!(self.check_own_address(), self.drive());
    }
}
