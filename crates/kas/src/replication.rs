//! Several replicas: the tracker that they tell each other.
//!
//! `gossip` says who lives, `table` decides what its copy of each replica's table is worth, both without knowing
//! kas. Here they meet sockets and time: [`Replication`] is the [`Tracker`], [`Replication::run`] its one task, and each
//! table stream has a task of its own. The lock guards table and owner together; nothing waits while it is held.

pub(crate) mod feed;
#[cfg(test)]
mod golden;
pub(crate) mod lists;
mod members;
mod stream;

use std::{
    collections::{HashMap, HashSet},
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak},
    time::Duration,
};

use async_trait::async_trait;
use cluster::{
    Account, Belief, Candidate, Connected, Connection, History, InMemoryTracker, Lease, Mark, Query, Replica,
    ReplicaStatus, Replicas, Standing, Tracker, TrackerError, TrackerStatus, Unanswered, Wire,
};
use gossip::Gossip;
use ids::{AgentId, ReplicaId};
use table::{Action, Epoch, Failure, Limits, Owner, State, StreamId, Table, Version};
use tokio::{
    sync::{Notify, watch},
    task::AbortHandle,
    time::{Instant, MissedTickBehavior},
};

use self::members::Members;
pub use self::{feed::services, stream::fuzz};
use crate::{
    metrics::{Metrics, PeerRecord},
    peer::Peers,
    tunnel_registry::TunnelRegistry,
};

/// Subscriptions to agents that nobody waits for any more are swept when this many have come.
const SWEEP: usize = 1024;
/// A replica that could not sync with everybody is ready after this time all the same.
const FIRST_SYNC: Duration = Duration::from_secs(5);
/// The main runtime shows that it turns this often; see [`HUNG`].
const PULSE: Duration = Duration::from_millis(500);
/// Without a pulse for this long, gossip says that this replica hangs.
pub const HUNG: Duration = Duration::from_secs(3);
/// Without a word of another replica for this long, by gossip or on a table stream, this one stops saying that it
/// lives: those that still hear it cannot reach it. Longer than two beats of a stream; a shorter one would count
/// a lost beat as deafness where UDP is blocked, and gain nothing before the streams have ended as well.
pub const DEAF: Duration = Duration::from_secs(5);

/// Others that answer, and have read no table of this one for this long, cannot reach it: longer than a start and a few
/// dials that nobody answers.
const UNREAD: Duration = Duration::from_secs(10);
/// The same of another replica, in dials that failed one after the other: a process that has crashed is given up by gossip
/// before.
const DIALS: u32 = 6;

/// This replica calls itself this long after its start.
const OWN_ADDRESS: Duration = Duration::from_secs(1);

/// Keys of gossip.
mod key {
    /// Address of the private API.
    pub(super) const API: &str = "api";
    /// What the replica says of itself.
    pub(super) const STATE: &str = "st";
    /// `version commit`.
    pub(super) const BUILD: &str = "build";
    /// Summary of its table.
    pub(super) const TABLE: &str = "tbl";
    /// The last changes of its table.
    pub(super) const CHANGES: &str = "chg";
}

/// What gossip is told about: where the table stands, and the state.
type Position = (Epoch, Version, State);

/// The tracker of one of several replicas.
pub struct Replication {
    /// For leases, which outlive nothing.
    this: Weak<Self>,
    me: Replica,
    /// Gossip takes news at most this often.
    interval: Duration,
    peers: Arc<Peers>,
    metrics: Arc<Metrics>,
    inner: Mutex<Inner>,
    /// The connections of this replica.
    own: InMemoryTracker,
    gossip: OnceLock<Gossip>,
    /// What of this replica others should know: feeds wait for it.
    news: watch::Sender<()>,
    /// Connections of this or another replica came or went.
    connection_changes: watch::Sender<()>,
    live: watch::Sender<usize>,
    /// False until the first sync.
    ready: watch::Sender<bool>,
    work: Notify,
    registry: OnceLock<Arc<TunnelRegistry>>,
}

struct Inner {
    table: Table,
    owner: Owner,
    state: State,
    watches: HashMap<AgentId, watch::Sender<()>>,
    sweep_at: usize,
    streams: HashMap<StreamId, AbortHandle>,
    /// Build of each replica, as gossip tells it.
    builds: HashMap<ReplicaId, (u64, String)>,
    /// Why an address does not show its table, as it says.
    refusals: HashMap<Arc<str>, String>,
    /// This replica tells others an address that is not its own.
    misplaced: Option<String>,
    /// Table streams of others, and since when there are none.
    subscribers: usize,
    unread: Instant,
    /// The connection lists of other replicas may be different.
    lists_changed: bool,
    /// How the others were judged.
    history: History,
}

impl std::fmt::Debug for Replication {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Replication").field("me", &self.me).finish_non_exhaustive()
    }
}

impl Inner {
    /// A table stream of another replica has begun (1) or ended (-1).
    fn subscribed(&mut self, change: isize) {
        self.subscribers = self.subscribers.saturating_add_signed(change);
        if self.subscribers == 0 {
            self.unread = Instant::now();
        }
    }

    /// Remembers what has changed in how the others are judged.
    fn judge(&mut self, now: Instant) {
        let views = self.table.replicas(now).into_iter();
        let views = views.map(|view| (view.replica, view.standing.to_string(), view.state.to_string()));
        self.history.judge(runtime::clock::wall(), views);
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

impl Replication {
    /// Makes the tracker of `me`. Nothing runs yet.
    pub fn new(
        me: Replica,
        peers: Arc<Peers>,
        metrics: Arc<Metrics>,
        ttl: Duration,
        interval: Duration,
    ) -> Arc<Self> {
        let limits = Limits { ttl, ..Limits::default() };
        // One per process, above those of earlier processes of the same name unless the clock was set back, which the
        // others tell.
        let epoch = u64::try_from(runtime::clock::wall().as_micros()).unwrap_or(u64::MAX - 1);
        let inner = Inner {
            table: Table::new(me.id.clone(), limits, Instant::now()),
            owner: Owner::new(Epoch(epoch)),
            state: State::Starting,
            watches: HashMap::new(),
            sweep_at: SWEEP,
            streams: HashMap::new(),
            builds: HashMap::new(),
            refusals: HashMap::new(),
            misplaced: None,
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
            peers,
            metrics,
            inner: Mutex::new(inner),
            gossip: OnceLock::new(),
            news: watch::Sender::new(()),
            connection_changes: watch::Sender::new(()),
            live: watch::Sender::new(1),
            ready: watch::Sender::new(false),
            work: Notify::new(),
            registry: OnceLock::new(),
        })
    }

    /// Tells the tracker where this replica's tunnels are, for what it tells others of them.
    pub fn serve(&self, registry: Arc<TunnelRegistry>) {
        let _ = self.registry.set(registry);
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        // A panic under the lock would be a bug; what is there is still a table that mends itself.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether the first sync is over: the replica is ready from then on.
    pub fn ready(&self) -> watch::Receiver<bool> {
        self.ready.subscribe()
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

    /// Tells the others that this replica is about to leave, or has left.
    pub fn announce(&self, state: State) {
        self.inner().state = state;
        self.news.send_replace(());
        self.work.notify_one();
    }

    /// Runs until dropped: listens to `gossip` and `seeds`, and keeps the table streams.
    pub async fn run(self: Arc<Self>, gossip: Gossip, mut seeds: watch::Receiver<HashSet<SocketAddr>>) {
        let mut members = gossip.members();
        let mut status = gossip.status();
        let pulse = gossip.pulse();
        let counters = gossip.counters();
        let build = format!("{} {}", runtime::version::VERSION, runtime::version::COMMIT);
        self.publish(&gossip, key::API, &self.me.address);
        self.publish(&gossip, key::BUILD, &build);
        let mut incarnation = gossip.generation();
        let gossip = match self.gossip.set(gossip) {
            Ok(()) => self.gossip.get().expect("it has just been set"),
            Err(_) => return,
        };
        let mut news = self.news.subscribe();
        let mut own = self.own.connection_changes();
        let mut ticks = tokio::time::interval(PULSE);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let begun = Instant::now();
        let mut known = Members::default();
        let mut published = None;
        let mut tell_at = begun;
        self.see_seeds(&seeds.borrow_and_update());
        let mut seeds_live = true;
        let mut members_live = true;
        loop {
            let deadline = {
                let inner = self.inner();
                inner.table.deadline(Instant::now())
            };
            let untold = published != Some(self.position());
            if untold && Instant::now() >= tell_at {
                self.tell(gossip, &mut published);
                tell_at = Instant::now() + self.interval / 10;
            }
            tokio::select! {
                // Feeds send news themselves; gossip takes them once per round.
                () = tokio::time::sleep_until(tell_at), if published != Some(self.position()) => {}
                changed = members.changed(), if members_live => match changed {
                    Ok(()) => self.see_members(&mut known, &members),
                    Err(_) => {
                        members_live = false;
                        tracing::error!("gossip has stopped: replicas are found by discovery and over TCP only");
                    }
                },
                changed = seeds.changed(), if seeds_live => match changed {
                    Ok(()) => {
                        let found = seeds.borrow_and_update().clone();
                        self.see_seeds(&found);
                    }
                    Err(_) => seeds_live = false,
                },
                changed = status.changed() => {
                    if changed.is_ok() {
                        self.see_status(*status.borrow_and_update());
                    } else {
                        // As for members.
                        tokio::time::sleep(PULSE).await;
                    }
                }
                _ = ticks.tick() => {
                    pulse.beat();
                    // Heartbeats advance without a word.
                    self.see_members(&mut known, &members);
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
                    if inner.state == State::Starting {
                        inner.state = State::Ready;
                    }
                    drop(inner);
                    self.news.send_replace(());
                    tracing::info!(after = ?begun.elapsed(), synced = settled, "ready: the other replicas' tables are known");
                }
            }
        }
    }

    /// Calls this replica at the address that it tells the others: somebody else may live there.
    pub async fn check_own_address(self: Arc<Self>) {
        tokio::time::sleep(OWN_ADDRESS).await;
        let told = tokio::time::timeout(OWN_ADDRESS * 2, stream::identify(&self, &self.me.address)).await;
        let epoch = self.inner().owner.epoch();
        let alarm = match told.unwrap_or_else(|_| Err("no answer".to_owned())) {
            Ok(identity) if identity.replica == self.me.id && identity.epoch == epoch => return,
            Ok(_) => format!(
                "another replica lives at {}, which this one tells the others as its own address: set private_api.advertise, \
                 OWN_PRIVATE_API_URL or POD_IP",
                self.me.address
            ),
            Err(why) => {
                // Not every network lets a host call itself by its outer address.
                tracing::warn!(
                    address = &*self.me.address,
                    why,
                    "this replica cannot call itself where others should"
                );
                return;
            }
        };
        tracing::error!("{alarm}");
        self.inner().misplaced = Some(alarm);
    }

    /// Says the last word to the others and stops gossip.
    pub async fn leave(&self) {
        self.announce(State::Left);
        if let Some(gossip) = self.gossip.get() {
            let mut published = None;
            self.tell(gossip, &mut published);
            // Two rounds: the word must reach somebody.
            tokio::time::sleep(2 * self.interval).await;
        }
    }

    fn publish(&self, gossip: &Gossip, key: &str, value: &str) {
        if let Err(error) = gossip.publish(key, value) {
            tracing::error!(key, error = %error, "gossip cannot carry this value");
        }
    }

    fn position(&self) -> Position {
        let inner = self.inner();
        (inner.owner.epoch(), inner.owner.version(), inner.state)
    }

    /// Publishes what has changed of this replica.
    fn tell(&self, gossip: &Gossip, published: &mut Option<Position>) {
        let (summary, recent, state) = {
            let inner = self.inner();
            *published = Some((inner.owner.epoch(), inner.owner.version(), inner.state));
            (inner.owner.summary(), inner.owner.recent(), inner.state)
        };
        self.publish(gossip, key::STATE, state.as_str());
        self.publish(gossip, key::TABLE, &summary.to_string());
        self.publish(gossip, key::CHANGES, &recent.to_text());
    }

    fn see_members(&self, known: &mut Members, members: &watch::Receiver<Arc<gossip::Members>>) {
        let members = Arc::clone(&members.borrow());
        let view = known.view(&members);
        let unread = known.unread();
        self.metrics.unread(PeerRecord::Summary, unread.summaries);
        self.metrics.unread(PeerRecord::Changes, unread.changes);
        let mut inner = self.inner();
        inner.builds = known.builds();
        inner.table.gossip(&view, Instant::now());
    }

    fn see_seeds(&self, seeds: &HashSet<SocketAddr>) {
        let others = seeds.iter().map(SocketAddr::to_string).filter(|seed| **seed != *self.me.address);
        let addresses: Vec<Arc<str>> = others.map(Into::into).collect();
        self.inner().refusals.retain(|address, _| addresses.contains(address));
        self.inner().table.seeds(addresses, Instant::now());
    }

    fn see_status(&self, status: gossip::Status) {
        let lonely = matches!(status, gossip::Status::Lonely { .. });
        self.metrics.gossip_lonely.set(lonely.into());
        let over_tcp = *self.live.borrow() - 1;
        match status {
            gossip::Status::Lonely { .. } if over_tcp > 0 => tracing::warn!(
                over_tcp,
                "gossip hears nobody although other replicas answer over TCP, where requests go on: check that UDP passes \
                 between them on the port of the private API, and that gossip.cluster is the same"
            ),
            gossip::Status::Lonely { .. } => tracing::warn!(
                "nobody is heard although discovery names other replicas: check that they run, that TCP and UDP pass \
                 between them on the port of the private API, and that they share its secret and gossip.cluster"
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

    /// Another replica has said something on a table stream.
    fn reached(&self) {
        if let Some(gossip) = self.gossip.get() {
            gossip.reached();
        }
    }

    /// Does what the table wants.
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
                        inner.judge(now);
                        let live = inner.table.live(now) + 1;
                        let known: HashSet<Replica> = inner
                            .table
                            .replicas(now)
                            .into_iter()
                            .filter(|view| view.standing < table::Standing::Gone)
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

    /// A table stream ended.
    fn ended(self: &Arc<Self>, stream: StreamId, failure: Failure) {
        let mut inner = self.inner();
        inner.streams.remove(&stream);
        inner.table.failed(stream, failure, Instant::now());
        drop(inner);
        self.act();
        self.work.notify_one();
    }
}

fn standing(standing: table::Standing) -> Option<Standing> {
    match standing {
        table::Standing::Live => Some(Standing::Live),
        table::Standing::Draining => Some(Standing::Draining),
        table::Standing::Suspect => Some(Standing::Suspect),
        table::Standing::Unreachable | table::Standing::Gone => None,
    }
}

#[async_trait]
impl Tracker for Replication {
    fn route(&self, agent: AgentId, _methods: Arc<[Box<str>]>) -> Lease {
        let mut inner = self.inner();
        if inner.owner.insert(agent) {
            // Written, now wake: who subscribed before it locates again.
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

    fn connection(&self, connection: Connection) -> Lease {
        self.own.connection(connection)
    }

    async fn locate(&self, agent: AgentId) -> Result<Vec<Candidate>, TrackerError> {
        let now = Instant::now();
        let inner = self.inner();
        let mut found = Vec::new();
        if inner.owner.contains(agent) {
            found.push(Candidate { replica: self.me.clone(), standing: Standing::Live, wire: Wire::Own });
        }
        let located = inner.table.locate(agent, now);
        // Whose table is not known may hold it too.
        let unsynced = inner
            .table
            .unsynced(now)
            .into_iter()
            .filter(|candidate| !inner.table.is_masked(&candidate.replica, agent))
            .filter(|candidate| !located.iter().any(|known| known.replica == candidate.replica));
        let candidates: Vec<_> = located.iter().cloned().chain(unsynced).collect();
        drop(inner);
        found.extend(candidates.into_iter().filter_map(|candidate| {
            let replica = Replica { id: candidate.replica, address: candidate.address };
            Some(Candidate { replica, standing: standing(candidate.standing)?, wire: Wire::Own })
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

    async fn connected(&self, query: Query) -> Result<Connected, TrackerError> {
        let own = self.own.connected(query).await?;
        Ok(self.gather(query, own).await)
    }

    fn connection_changes(&self) -> watch::Receiver<()> {
        self.connection_changes.subscribe()
    }

    fn live(&self) -> watch::Receiver<usize> {
        self.live.subscribe()
    }

    async fn replicas(&self) -> Replicas {
        let now = Instant::now();
        let inner = self.inner();
        let (version, commit) = (runtime::version::VERSION.to_owned(), runtime::version::COMMIT.to_owned());
        let mut replicas = vec![ReplicaStatus {
            replica: self.me.clone(),
            build: (version, commit),
            state: inner.state.to_string(),
            standing: "self".to_owned(),
            generation: self.gossip.get().map_or(0, Gossip::generation),
            mark: Mark { epoch: inner.owner.epoch().0, version: inner.owner.version().0 },
            agents: inner.owner.len() as u64,
            synced: true,
            heard: None,
        }];
        for view in inner.table.replicas(now) {
            let (generation, build) = inner.builds.get(&view.replica).cloned().unwrap_or_default();
            let (version, commit) = build.split_once(' ').unwrap_or((&build, ""));
            replicas.push(ReplicaStatus {
                build: (version.to_owned(), commit.to_owned()),
                state: view.state.to_string(),
                standing: view.standing.to_string(),
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

    async fn accounts(&self, agent: Option<AgentId>) -> (Vec<Account>, Vec<Unanswered>) {
        self.ask_about(agent).await
    }

    fn status(&self) -> TrackerStatus {
        let inner = self.inner();
        let agents = inner.owner.len() as u64;
        let known: usize = inner.table.replicas(Instant::now()).iter().map(|view| view.count).sum();
        TrackerStatus { backend: "gossip", agents, remembered: known as u64, ..TrackerStatus::default() }
    }

    fn beliefs(&self, agent: AgentId) -> Vec<Belief> {
        let now = Instant::now();
        let inner = self.inner();
        let addresses: HashMap<ReplicaId, Arc<str>> =
            inner.table.replicas(now).into_iter().map(|view| (view.replica, view.address)).collect();
        let beliefs = inner.table.explain(agent, now);
        drop(inner);
        beliefs
            .into_iter()
            .map(|belief| Belief {
                why: belief.to_string(),
                holds: belief.holds && belief.masked.is_none(),
                replica: Replica {
                    address: addresses.get(&belief.replica).cloned().unwrap_or_default(),
                    id: belief.replica,
                },
            })
            .collect()
    }
}

#[cfg(test)]
mod tests;
