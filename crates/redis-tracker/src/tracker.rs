//! [`RedisTracker`]: implements the traits of `cluster` with `outbox`, `cache` and the liveness keys of the
//! replicas.

use std::{
    collections::{HashMap, HashSet},
    fmt,
    sync::{Arc, Weak},
    time::Duration,
};

use async_trait::async_trait;
use cluster::{
    AgentView, Candidate, ClusterView, Connected, Connection, Connections, Doors, History, InMemoryTracker,
    Lease, Locator, Mark, Query, Replica, ReplicaHealth, ReplicaState, ReplicaStatus, Replicas, TrackerError,
    TrackerStatus, Wire,
};
use ids::{AgentId, ReplicaId};
use parking_lot::{Mutex, MutexGuard};
use redis::{Value, cmd};
use tokio::{
    sync::{Notify, watch},
    time::{Instant, sleep, timeout},
};

use crate::{
    answer::take,
    cache::{Ages, Cache, Freshness},
    connect::{Connect, Dialer, Error, Link},
    keys::Keys,
    outbox::{Item, Outbox},
    projects::Projects,
    value::Liveness,
};

/// How long the first lookup of an agent waits for Redis. Then it continues with what is known here; a later
/// result wakes the subscribers.
const PATIENCE: Duration = Duration::from_millis(100);
/// How long a read result is valid while events arrive.
pub(crate) const AGES: Ages = Ages { again: Duration::from_secs(30), most: Duration::from_secs(60) };
/// How long a read result is valid without a subscription to events.
const AGES_UNSUBSCRIBED: Ages = Ages { again: Duration::from_secs(1), most: Duration::from_secs(2) };
/// How long an entry is still used after its expiry, because the clocks of 14.1 replicas differ.
pub(crate) const MARGIN: Duration = Duration::from_secs(5);
/// The mean delay after which refused settings are tried again.
const VERIFY: Duration = Duration::from_secs(5);
/// The name of the store in errors, and in place of a replica that did not answer.
pub(crate) const BACKEND: &str = "Redis";

/// The settings of a tracker.
#[derive(Clone, Debug)]
pub struct Options {
    /// How to connect to Redis.
    pub connect: Connect,
    /// The prefix of all keys; 14.1 uses `gitlab-kas`.
    pub key_prefix: String,
    /// How long a replica is live after its last heartbeat. It sends three heartbeats in this time. From 1 s
    /// to 30 s.
    pub ttl: Duration,
    /// Time to live of an entry and of its hash; 300 s in 14.1. Not shorter than that of other replicas with
    /// the same prefix.
    pub entry_ttl: Duration,
    /// How often entries are written again; below `entry_ttl`. 240 s in 14.1.
    pub entry_refresh: Duration,
    /// How often expired entries of other replicas are removed from the hashes in which this replica has
    /// entries; 600 s in 14.1.
    pub gc: Duration,
    /// `grpc://host:port` at which a 14.1 replica may ask this one for tunnels; empty if it must not.
    pub url: String,
    /// Where callers reach this replica.
    pub doors: Doors,
    /// Version and commit of this build.
    pub build: (String, String),
    /// Identifies this process among those of the same replica. A later process must have a higher number,
    /// such as microseconds since 1970.
    pub run: u64,
}

impl Options {
    /// Returns settings with the prefix and the times of 14.1, and a `ttl` of 10 s.
    pub fn new(connect: Connect, run: u64) -> Self {
        Self {
            connect,
            key_prefix: "gitlab-kas".to_owned(),
            ttl: Duration::from_secs(10),
            entry_ttl: Duration::from_secs(300),
            entry_refresh: Duration::from_secs(240),
            gc: Duration::from_secs(600),
            url: String::new(),
            doors: Doors::default(),
            build: (String::new(), String::new()),
            run,
        }
    }
}

/// The health of the connection to Redis.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Health {
    /// Whether the last heartbeat could be written.
    pub reachable: bool,
    /// Whether the subscription to the events of others works.
    pub listening: bool,
    /// How long the last heartbeat took.
    pub latency: Option<Duration>,
    /// Whether Redis has all announcements of this replica.
    pub announced: bool,
    /// The last failure and when it was; it may be over.
    pub last_error: Option<(String, Instant)>,
}

/// Numbers for metrics and status.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Agents that this replica announces.
    pub agents: usize,
    /// Entries of this replica that are in Redis or are being written.
    pub entries: usize,
    /// Changes that are not written yet.
    pub unwritten: usize,
    /// Agents of other replicas in the cache.
    pub remembered: usize,
}

/// Counts that all replicas share.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counted {
    /// The number of the window, by the clock of Redis.
    pub window: u64,
    /// How long ago the window began.
    pub elapsed: Duration,
    /// The total of each requested name, in the same order.
    pub totals: Vec<u64>,
}

/// Another live replica.
#[derive(Clone, Debug)]
pub(crate) struct Peer {
    pub(crate) liveness: Liveness,
    pub(crate) replica: Replica,
    /// When its liveness key expires, unless it is written again.
    pub(crate) until: Instant,
}

impl Peer {
    fn health(&self, now: Instant) -> ReplicaHealth {
        if now > self.until {
            ReplicaHealth::Suspect
        } else if self.liveness.state() == ReplicaState::Draining {
            ReplicaHealth::Draining
        } else {
            ReplicaHealth::Live
        }
    }
}

/// A reading of the clock of Redis.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock {
    pub(crate) said: Duration,
    pub(crate) at: Instant,
}

impl Clock {
    pub(crate) fn now(&self, now: Instant) -> Duration {
        self.said + now.duration_since(self.at)
    }
}

pub(crate) struct Inner {
    pub(crate) outbox: Outbox,
    pub(crate) cache: Cache,
    pub(crate) peers: HashMap<ReplicaId, Peer>,
    /// Run and number of the last message of each replica.
    pub(crate) heard: HashMap<ReplicaId, (u64, u64)>,
    /// Runs for which the liveness key was looked up because they were mentioned, so that each is looked up
    /// once.
    pub(crate) searched: HashMap<ReplicaId, u64>,
    pub(crate) clock: Option<Clock>,
    pub(crate) state: ReplicaState,
    /// Another process uses the id of this replica.
    pub(crate) name_taken: Option<String>,
    /// Redis refuses the latest settings.
    pub(crate) refused: Option<String>,
    /// There may be garbage in the hashes: a replica has crashed, or there are entries of 14.1.
    pub(crate) garbage: bool,
    pub(crate) leaving: bool,
    /// How the health of the others changed.
    pub(crate) history: History,
}

impl Inner {
    /// Records changes in the health of the others, once the time of Redis is known.
    pub(crate) fn record_health(&mut self, now: Instant) {
        let Some(clock) = self.clock else { return };
        let peers = self.peers.iter();
        let peers = peers.map(|(id, peer)| (id.clone(), peer.health(now), peer.liveness.state()));
        self.history.record(clock.now(now), peers);
    }

    /// Whether this or another replica has recently seen replicas of 14.1.
    pub(crate) fn is_mixed(&self, now: Instant) -> bool {
        self.cache.has_seen_gitlab(now) || self.peers.values().any(|peer| peer.liveness.gitlab)
    }
}

/// The tracker of one of several replicas that share a Redis.
pub struct RedisTracker {
    /// For leases, which do not keep the tracker alive.
    this: Weak<Self>,
    pub(crate) me: Replica,
    pub(crate) options: Options,
    pub(crate) keys: Keys,
    pub(crate) dialer: Dialer,
    /// The first link is for the writer.
    pub(crate) links: Vec<Link>,
    inner: Mutex<Inner>,
    /// The connections of this replica.
    own: InMemoryTracker,
    pub(crate) connection_changes: watch::Sender<()>,
    pub(crate) live: watch::Sender<usize>,
    pub(crate) health: watch::Sender<Health>,
    /// Whether everything was announced and read for the first time.
    pub(crate) ready: watch::Sender<bool>,
    pub(crate) withdrawn: watch::Sender<bool>,
    pub(crate) to_write: Notify,
    pub(crate) to_heartbeat: Notify,
    pub(crate) to_read: Notify,
    pub(crate) to_search: Notify,
    /// For lists of all agents.
    pub(crate) projects: watch::Sender<Projects>,
}

impl fmt::Debug for RedisTracker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisTracker").field("me", &self.me).finish_non_exhaustive()
    }
}

impl RedisTracker {
    /// Returns the tracker of `me`. It connects only in [`run`](Self::run).
    ///
    /// # Errors
    /// If the options are invalid regardless of Redis, such as a malformed certificate.
    pub fn new(me: Replica, options: Options) -> Result<Arc<Self>, Error> {
        let dialer = Dialer::new(options.connect.clone())?;
        let keys = Keys::new(&options.key_prefix);
        let links = (0..options.connect.pool_size.max(1)).map(|_| Link::new()).collect();
        let mut cache = Cache::new();
        cache.mixed(Instant::now());
        let inner = Inner {
            outbox: Outbox::new(me.id.clone(), options.run, options.url.clone(), options.entry_refresh),
            cache,
            peers: HashMap::new(),
            heard: HashMap::new(),
            searched: HashMap::new(),
            clock: None,
            state: ReplicaState::Starting,
            name_taken: None,
            refused: None,
            // Replicas may have crashed before this one started.
            garbage: true,
            leaving: false,
            history: History::default(),
        };
        let health =
            Health { reachable: false, listening: false, latency: None, announced: false, last_error: None };
        Ok(Arc::new_cyclic(|this| Self {
            this: this.clone(),
            own: InMemoryTracker::new(me.clone()),
            me,
            keys,
            dialer,
            links,
            inner: Mutex::new(inner),
            options,
            connection_changes: watch::Sender::new(()),
            live: watch::Sender::new(1),
            health: watch::Sender::new(health),
            ready: watch::Sender::new(false),
            withdrawn: watch::Sender::new(false),
            to_write: Notify::new(),
            to_heartbeat: Notify::new(),
            to_read: Notify::new(),
            to_search: Notify::new(),
            projects: watch::Sender::default(),
        }))
    }

    pub(crate) fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock()
    }

    /// Runs until dropped: writes, reads and listens.
    pub async fn run(self: Arc<Self>) {
        let mut own = self.own.connection_changes();
        let lists = async {
            // The sender lives as long as the tracker.
            while own.changed().await.is_ok() {
                self.connection_changes.send_replace(());
            }
        };
        tokio::join!(lists, self.write(), self.read(), self.listen(), self.search(), self.verify());
    }

    /// Makes new connections by `connect` from now on, which must differ from the current settings only in
    /// credentials and trusted certificates. Open connections stay. As long as Redis refuses the new
    /// settings, the previous ones are tried too.
    ///
    /// # Errors
    /// If the settings are invalid regardless of Redis. Then nothing changes.
    pub fn reconfigure(&self, connect: Connect) -> Result<(), Error> {
        self.dialer.reconfigure(connect)
    }

    /// Tries new settings at once, so that a refusal by Redis is reported now, and not when the last
    /// connection breaks.
    async fn verify(&self) {
        let mut reconfigured = self.dialer.reconfigured();
        // This side of the channel lives as long as the tracker.
        while reconfigured.changed().await.is_ok() {
            while let Err(error) = self.dialer.verify().await {
                self.refused(&error);
                tokio::select! {
                    () = sleep(VERIFY.mul_f64(0.5 + rand::random::<f64>())) => {}
                    _ = reconfigured.changed() => {}
                }
            }
            if self.inner().refused.take().is_some() {
                tracing::info!("Redis accepts the current password and certificates");
            }
            if self.dialer.is_cluster() {
                for link in &self.links {
                    link.renew().await;
                }
            }
        }
    }

    fn refused(&self, error: &Error) {
        // Redis is down, which is reported elsewhere.
        if !self.health.borrow().reachable {
            return;
        }
        let why = format!(
            "Redis refuses the current password or certificates ({error}): open connections stay, and new ones are tried \
             with the previous files; correct the files, or configure Redis to accept them"
        );
        if self.inner().refused.replace(why).is_none() {
            tracing::warn!(
                error = %error,
                "Redis refuses the current password or certificates: the previous ones are tried too"
            );
        }
    }

    /// Returns the health of the connection to Redis.
    pub fn health(&self) -> watch::Receiver<Health> {
        self.health.subscribe()
    }

    /// Returns whether everything was announced and the names of the others were read once.
    pub fn ready(&self) -> watch::Receiver<bool> {
        self.ready.subscribe()
    }

    /// Returns numbers for metrics and status.
    pub fn counts(&self) -> Counts {
        let inner = self.inner();
        Counts {
            agents: inner.outbox.routes(),
            entries: inner.outbox.len(),
            unwritten: inner.outbox.unwritten(),
            remembered: inner.cache.len(),
        }
    }

    /// Returns the connections of this replica only.
    pub fn own(&self) -> &InMemoryTracker {
        &self.own
    }

    /// Returns the other live replicas, according to their liveness keys.
    pub fn others(&self) -> HashSet<Replica> {
        self.inner().peers.values().map(|peer| peer.replica.clone()).collect()
    }

    /// Announces the state of this replica to the others.
    pub fn announce(&self, state: ReplicaState) {
        self.inner().state = state;
        self.to_heartbeat.notify_one();
    }

    /// Withdraws everything; [`run`](Self::run) must be running. Gives up after `patience`; then the
    /// remaining entries expire.
    pub async fn leave(&self, patience: Duration) {
        {
            let mut inner = self.inner();
            inner.leaving = true;
            inner.state = ReplicaState::Left;
        }
        self.to_heartbeat.notify_one();
        let mut gone = self.withdrawn.subscribe();
        if timeout(patience, gone.wait_for(|gone| *gone)).await.is_err() {
            tracing::warn!(within = ?patience, "the entries of this replica could not be removed from Redis: they will expire");
        }
    }

    /// Adds to counts that all replicas share under a name, in windows of this length. Returns the new
    /// totals.
    ///
    /// # Errors
    /// If Redis cannot be reached or refuses. The counts may have been added nevertheless.
    ///
    /// # Cancel safety
    /// As after an error.
    pub async fn count(
        &self,
        name: &str,
        charges: &[(String, u32)],
        window: Duration,
    ) -> Result<Counted, Error> {
        let clock = self.inner().clock;
        let Some(clock) = clock else { return Err(Error::Paused("it was not reached yet".to_owned())) };
        let (now, window) = (clock.now(Instant::now()), window.as_secs().max(1));
        let number = now.as_secs() / window;
        let groups = charges
            .iter()
            .map(|(what, times)| {
                let key = self.keys.count(name, what, number);
                // It stays during the next window, because the clocks of replicas differ.
                let expire = cmd("PEXPIRE").arg(&key).arg(2_000 * window).take();
                vec![cmd("INCRBY").arg(&key).arg(*times).take(), expire]
            })
            .collect();
        let link = &self.links[self.links.len() - 1];
        let answers = link.atomically(&self.dialer, groups).await?;
        let totals = answers
            .into_iter()
            .map(|answers| take(answers.into_iter().next().unwrap_or(Value::Nil), "INCRBY"))
            .collect::<Result<_, _>>()?;
        let elapsed = now.saturating_sub(Duration::from_secs(number * window));
        Ok(Counted { window: number, elapsed, totals })
    }

    pub(crate) fn ages(&self) -> Ages {
        if self.health.borrow().listening { AGES } else { AGES_UNSUBSCRIBED }
    }

    /// Notes a failure.
    pub(crate) fn failed(&self, what: &'static str, error: &Error) {
        tracing::debug!(error = %error, what, "Redis failed");
        // This error only repeats the last one.
        if matches!(error, Error::Paused(_)) && self.health.borrow().last_error.is_some() {
            return;
        }
        let text = format!("{what}: {error}");
        self.health.send_if_modified(|health| {
            let known = health.last_error.as_ref().is_some_and(|(last, _)| *last == text);
            health.last_error = Some((text, Instant::now()));
            !known
        });
    }

    fn withdraw(&self, agent: AgentId) {
        let mut inner = self.inner();
        if inner.outbox.remove_route(agent) {
            inner.cache.wake(agent);
            drop(inner);
            self.to_write.notify_one();
        }
    }

    fn candidates(&self, inner: &Inner, agent: AgentId, now: Instant) -> Vec<Candidate> {
        let mut found = Vec::new();
        if inner.outbox.holds(agent) {
            found.push(Candidate { replica: self.me.clone(), health: ReplicaHealth::Live, wire: Wire::Own });
        }
        found.extend(inner.cache.holders(agent).filter_map(|holder| {
            let peer = inner.peers.get(&holder.replica).filter(|peer| peer.liveness.run == holder.run)?;
            let replica = peer.replica.clone();
            Some(Candidate { replica, health: peer.health(now), wire: Wire::Own })
        }));
        found.extend(inner.cache.gitlab(agent).map(|replica| Candidate {
            replica: replica.clone(),
            health: ReplicaHealth::Live,
            wire: Wire::Gitlab,
        }));
        // Mostly there is one.
        found.sort_by_key(|candidate| candidate.health);
        found
    }

    fn unavailable(&self) -> TrackerError {
        let why = self.health.borrow().last_error.as_ref().map(|(text, _)| text.clone());
        let why = why.unwrap_or_else(|| format!("no answer within {PATIENCE:?}"));
        TrackerError::Unavailable { backend: BACKEND, source: why.into() }
    }

    /// Returns the current problems, for a person.
    pub fn alarms(&self) -> Vec<String> {
        let health = self.health.borrow().clone();
        let mut alarms: Vec<String> = {
            let inner = self.inner();
            inner.name_taken.clone().into_iter().chain(inner.refused.clone()).collect()
        };
        let last = health.last_error.map_or_else(|| "it was not reached yet".to_owned(), |(text, _)| text);
        if !health.reachable {
            alarms.push(format!(
                "Redis cannot be reached ({last}): only agents of this replica and agents with cached routes are found"
            ));
        } else if !health.announced {
            alarms.push(format!("Redis does not have all agents of this replica yet ({last})"));
        } else if !health.listening {
            alarms.push(format!(
                "the Redis subscription is down ({last}): changes by other replicas are seen late"
            ));
        }
        alarms
    }
}

#[async_trait]
impl Locator for RedisTracker {
    fn route(&self, agent: AgentId, methods: Arc<[Box<str>]>) -> Lease {
        let mut inner = self.inner();
        if inner.outbox.add_route(agent, methods) {
            // Write first, then wake: a subscriber that locates again must see the route.
            inner.cache.wake(agent);
            drop(inner);
            self.to_write.notify_one();
        }
        let this = self.this.clone();
        Lease::new(move || {
            if let Some(this) = this.upgrade() {
                this.withdraw(agent);
            }
        })
    }

    async fn locate(&self, agent: AgentId) -> Result<Vec<Candidate>, TrackerError> {
        let ages = self.ages();
        let reachable = self.health.borrow().reachable;
        let mut done = {
            let mut inner = self.inner();
            let now = Instant::now();
            let look = inner.cache.freshness(agent, ages, now);
            let found = self.candidates(&inner, agent, now);
            // If Redis is down, a cached result without holders proves nothing.
            let counts = if reachable { look != Freshness::Unknown } else { !found.is_empty() };
            if look == Freshness::Known && counts {
                return Ok(found);
            }
            let done = inner.cache.want(agent, now);
            self.to_read.notify_one();
            if counts {
                return Ok(found);
            }
            done
        };
        // Do not wait for a Redis that is down. A slow Redis is no error: its answer wakes the subscribers.
        let failed = !reachable || matches!(timeout(PATIENCE, done.wait_for(|done| *done)).await, Ok(Err(_)));
        let inner = self.inner();
        let found = self.candidates(&inner, agent, Instant::now());
        if failed && found.is_empty() {
            drop(inner);
            return Err(self.unavailable());
        }
        Ok(found)
    }

    fn mark(&self) -> Mark {
        let inner = self.inner();
        Mark { epoch: inner.outbox.run(), version: inner.outbox.version() }
    }

    fn not_here(&self, replica: &ReplicaId, agent: AgentId, mark: Mark) {
        self.inner().cache.mask(agent, replica, mark);
    }

    fn changes(&self, agent: AgentId) -> watch::Receiver<()> {
        self.inner().cache.subscribe(agent, Instant::now())
    }
}

#[async_trait]
impl Connections for RedisTracker {
    fn connection(&self, connection: Connection) -> Lease {
        // It is listed here at once, and by the others when it is written.
        let shown = self.own.connection(connection.clone());
        let (item, serial): (Item, u64) = self.inner().outbox.add_connection(Arc::new(connection));
        self.to_write.notify_one();
        let this = self.this.clone();
        Lease::new(move || {
            drop(shown);
            if let Some(this) = this.upgrade() {
                this.inner().outbox.remove_connection(item, serial);
                this.to_write.notify_one();
            }
        })
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
impl ClusterView for RedisTracker {
    fn live(&self) -> watch::Receiver<usize> {
        self.live.subscribe()
    }

    fn doors(&self, replica: &ReplicaId) -> Doors {
        let now = Instant::now();
        let inner = self.inner();
        if *replica == self.me.id {
            return if inner.state == ReplicaState::Ready { self.options.doors } else { Doors::default() };
        }
        let ready = inner.peers.get(replica).filter(|peer| {
            peer.liveness.state() == ReplicaState::Ready && peer.health(now) == ReplicaHealth::Live
        });
        ready.map_or(Doors::default(), |peer| {
            let Ok(doors) = peer.liveness.doors.parse();
            doors
        })
    }

    async fn replicas(&self) -> Replicas {
        let alarms = self.alarms();
        let now = Instant::now();
        let inner = self.inner();
        let mut replicas = vec![ReplicaStatus {
            replica: self.me.clone(),
            build: self.options.build.clone(),
            state: inner.state,
            health: None,
            generation: 0,
            mark: Mark { epoch: inner.outbox.run(), version: inner.outbox.version() },
            agents: inner.outbox.routes() as u64,
            synced: true,
            heard: None,
        }];
        let mut others: Vec<&Peer> = inner.peers.values().collect();
        others.sort_by(|a, b| a.replica.id.cmp(&b.replica.id));
        replicas.extend(others.into_iter().map(|peer| ReplicaStatus {
            replica: peer.replica.clone(),
            build: (peer.liveness.version.clone(), peer.liveness.commit.clone()),
            state: peer.liveness.state(),
            health: Some(peer.health(now)),
            generation: 0,
            mark: Mark { epoch: peer.liveness.run, version: 0 },
            agents: peer.liveness.agents,
            synced: now <= peer.until,
            heard: Some(self.options.ttl.saturating_sub(peer.until.saturating_duration_since(now))),
        }));
        Replicas { replicas, alarms, events: inner.history.events() }
    }

    fn status(&self) -> TrackerStatus {
        let counts = self.counts();
        let health = self.health.borrow().clone();
        TrackerStatus {
            backend: "redis",
            latency: health.latency,
            agents: counts.agents as u64,
            entries: counts.entries as u64,
            unwritten: counts.unwritten as u64,
            lag: self.inner().outbox.lag(Instant::now()),
            remembered: counts.remembered as u64,
            last_error: health.last_error.map(|(text, at)| (text, at.elapsed())),
        }
    }

    fn views(&self, agent: AgentId) -> Vec<AgentView> {
        let inner = self.inner();
        let claims = inner.cache.claims(agent);
        let mut views: Vec<AgentView> = inner
            .peers
            .values()
            .map(|peer| {
                let claim = claims.iter().find(|(owner, _)| owner.replica == peer.replica.id);
                let (holds, why) = match claim {
                    Some((owner, _)) if owner.run != peer.liveness.run => {
                        (false, "its entry in Redis is of an earlier process".to_owned())
                    }
                    Some((_, true)) => (
                        false,
                        "it has an entry in Redis, but answered that the agent is not there".to_owned(),
                    ),
                    Some((_, false)) => (true, "it has an entry in Redis".to_owned()),
                    None if inner.cache.was_read(agent) => (false, "it has no entry in Redis".to_owned()),
                    None => (false, "this replica has not looked up the agent".to_owned()),
                };
                AgentView { replica: peer.replica.clone(), holds, why, wire: Wire::Own }
            })
            .collect();
        views.extend(inner.cache.gitlab(agent).map(|replica| {
            AgentView {
                replica: replica.clone(),
                holds: true,
                why: "it is a replica of GitLab's kas with an entry in Redis; it is asked, and cannot report"
                    .to_owned(),
                wire: Wire::Gitlab,
            }
        }));
        views.sort_by(|a, b| a.replica.id.cmp(&b.replica.id));
        views
    }
}
