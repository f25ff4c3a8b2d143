//! [`RedisTracker`]: what the router and the APIs see, over what `own`, `cache` and the replicas' liveness keys say.

use std::{
    collections::{HashMap, HashSet},
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::Duration,
};

use async_trait::async_trait;
use cluster::{
    Belief, Candidate, Connected, Connection, History, InMemoryTracker, Lease, Mark, Query, Replica,
    ReplicaStatus, Replicas, Standing, Tracker, TrackerError, TrackerStatus, Wire,
};
use ids::{AgentId, ReplicaId};
use redis::{Value, cmd};
use tokio::{
    sync::{Notify, watch},
    time::{Instant, sleep, timeout},
};

use crate::{
    cache::{Ages, Cache, Look},
    connect::{Connect, Dialer, Error, Link},
    keys::Keys,
    own::{Item, Own},
    value::Life,
    writer::take,
};

/// Who looks an agent up for the first time waits this long for Redis, and goes on with what is known here: whatever
/// is read later wakes who subscribed.
const PATIENCE: Duration = Duration::from_millis(100);
/// What was read of an agent is good for this long while news come in...
pub(crate) const AGES: Ages = Ages { again: Duration::from_secs(30), most: Duration::from_secs(60) };
/// ... and while they do not.
const AGES_DEAF: Ages = Ages { again: Duration::from_secs(1), most: Duration::from_secs(2) };
/// What an entry says may be this long over before it is not believed: clocks of 14.1 replicas differ.
pub(crate) const MARGIN: Duration = Duration::from_secs(5);
/// How often what Redis refuses is tried again, half of it and more.
const PROVE: Duration = Duration::from_secs(5);
/// In problems, and where a replica is to be named that did not answer.
pub(crate) const BACKEND: &str = "Redis";

/// How the tracker behaves.
#[derive(Clone, Debug)]
pub struct Options {
    /// How Redis is reached.
    pub connect: Connect,
    /// What every key begins with; 14.1's is `gitlab-kas`.
    pub key_prefix: String,
    /// How long a replica counts after its last sign of life; written three times in it. At least a second, at most 30 s.
    pub ttl: Duration,
    /// Life of an entry and of its hash; 14.1's is 300 s. Never shorter than what other replicas on the prefix use.
    pub entry_ttl: Duration,
    /// How often entries are written again; below `entry_ttl`. 14.1's is 240 s.
    pub entry_refresh: Duration,
    /// How often the hashes that this replica has entries in are cleared of others' garbage; 14.1's is 600 s.
    pub gc: Duration,
    /// `grpc://host:port` where a 14.1 replica may ask this one for tunnels; empty: nowhere, and it does not try.
    pub url: String,
    /// Version and commit of this build.
    pub build: (String, String),
    /// This process among those of the same replica: later ones have a higher number. Microseconds since 1970 serve.
    pub run: u64,
}

impl Options {
    /// Returns 14.1's prefix and times, and a life of 10 s.
    pub fn new(connect: Connect, run: u64) -> Self {
        Self {
            connect,
            key_prefix: "gitlab-kas".to_owned(),
            ttl: Duration::from_secs(10),
            entry_ttl: Duration::from_secs(300),
            entry_refresh: Duration::from_secs(240),
            gc: Duration::from_secs(600),
            url: String::new(),
            build: (String::new(), String::new()),
            run,
        }
    }
}

/// What a replica says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// It does not serve yet.
    Starting,
    /// It serves.
    Ready,
    /// It leaves soon.
    Draining,
    /// It is gone.
    Left,
}

impl State {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Ready => "ready",
            Self::Draining => "draining",
            Self::Left => "left",
        }
    }
}

/// How Redis fares, as seen here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Health {
    /// Whether the last sign of life could be written.
    pub reachable: bool,
    /// Whether others' news come in.
    pub listening: bool,
    /// How long writing the last sign of life took.
    pub latency: Option<Duration>,
    /// What was announced before Redis was last lost is there again.
    pub announced: bool,
    /// The last thing that failed, and when; it may be over.
    pub last_error: Option<(String, Instant)>,
}

/// Numbers for metrics and people.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Agents that this replica announces.
    pub agents: usize,
    /// Entries of this replica in Redis, or on their way.
    pub entries: usize,
    /// Changes that are not written yet.
    pub unwritten: usize,
    /// Agents that are remembered of others.
    pub remembered: usize,
}

/// What all replicas have counted together.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counted {
    /// Which window it is, by Redis' clock.
    pub window: u64,
    /// Of each thing that was asked for, in that order.
    pub totals: Vec<u64>,
}

/// Another replica that lives.
#[derive(Clone, Debug)]
pub(crate) struct Peer {
    pub(crate) life: Life,
    pub(crate) replica: Replica,
    /// Its key expires then unless it writes it again.
    pub(crate) until: Instant,
}

/// What Redis' clock said, and when.
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
    pub(crate) own: Own,
    pub(crate) cache: Cache,
    pub(crate) peers: HashMap<ReplicaId, Peer>,
    /// The number of the last message of each, by process.
    pub(crate) heard: HashMap<ReplicaId, (u64, u64)>,
    /// Processes whose key was looked for because they were named, so that each is looked for once.
    pub(crate) looked_for: HashMap<ReplicaId, u64>,
    pub(crate) clock: Option<Clock>,
    pub(crate) state: State,
    /// Another process lives under this name.
    pub(crate) usurped: Option<String>,
    /// Redis does not take what was exchanged.
    pub(crate) refused: Option<String>,
    /// Somebody died without a word, or wrote in 14.1's way: there may be garbage.
    pub(crate) garbage: bool,
    pub(crate) leaving: bool,
    /// How the others were judged.
    pub(crate) history: History,
}

impl Inner {
    /// Remembers what has changed in how the others are judged; not before Redis has said what time it is.
    pub(crate) fn judge(&mut self, now: Instant) {
        let Some(clock) = self.clock else { return };
        let peers = self.peers.iter();
        let peers =
            peers.map(|(id, peer)| (id.clone(), standing(peer, now).as_str(), peer.life.state.as_str()));
        self.history.judge(clock.now(now), peers);
    }

    /// Whether replicas of 14.1 have lately been seen here or by another replica.
    pub(crate) fn is_mixed(&self, now: Instant) -> bool {
        self.cache.has_seen_gitlab(now) || self.peers.values().any(|peer| peer.life.gitlab)
    }
}

/// The tracker of one of several replicas that share a Redis.
pub struct RedisTracker {
    /// For leases, which outlive nothing.
    this: Weak<Self>,
    pub(crate) me: Replica,
    pub(crate) options: Options,
    pub(crate) keys: Keys,
    pub(crate) dialer: Dialer,
    /// The first is the writer's.
    pub(crate) links: Vec<Link>,
    inner: Mutex<Inner>,
    /// The connections of this replica.
    own: InMemoryTracker,
    pub(crate) connection_changes: watch::Sender<()>,
    pub(crate) live: watch::Sender<usize>,
    pub(crate) health: watch::Sender<Health>,
    /// True once everything was announced and read for the first time.
    pub(crate) ready: watch::Sender<bool>,
    pub(crate) gone: watch::Sender<bool>,
    pub(crate) to_write: Notify,
    pub(crate) to_beat: Notify,
    pub(crate) to_read: Notify,
}

impl fmt::Debug for RedisTracker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisTracker").field("me", &self.me).finish_non_exhaustive()
    }
}

impl RedisTracker {
    /// Makes the tracker of `me`. Nothing is dialled yet: see [`run`](Self::run).
    ///
    /// # Errors
    /// When the options cannot be used whatever Redis says, such as a broken certificate.
    pub fn new(me: Replica, options: Options) -> Result<Arc<Self>, Error> {
        let dialer = Dialer::new(options.connect.clone())?;
        let keys = Keys::new(&options.key_prefix);
        let links = (0..options.connect.pool_size.max(1)).map(|_| Link::new()).collect();
        let mut cache = Cache::new();
        cache.mixed(Instant::now());
        let inner = Inner {
            own: Own::new(me.id.clone(), options.run, options.url.clone(), options.entry_refresh),
            cache,
            peers: HashMap::new(),
            heard: HashMap::new(),
            looked_for: HashMap::new(),
            clock: None,
            state: State::Starting,
            usurped: None,
            refused: None,
            // Of those who died before this one began.
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
            gone: watch::Sender::new(false),
            to_write: Notify::new(),
            to_beat: Notify::new(),
            to_read: Notify::new(),
        }))
    }

    pub(crate) fn inner(&self) -> MutexGuard<'_, Inner> {
        // A panic under the lock would be a bug; what is there is still a table that mends itself.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs until dropped: writes, reads and listens.
    pub async fn run(self: Arc<Self>) {
        let mut own = self.own.connection_changes();
        let lists = async {
            // This side of the channel lives as long as the tracker.
            while own.changed().await.is_ok() {
                self.connection_changes.send_replace(());
            }
        };
        tokio::join!(lists, self.write(), self.read(), self.listen(), self.prove());
    }

    /// Makes connections by `connect` from now on, which differs in what is shown and who is trusted alone. Those that are
    /// open stay. As long as Redis refuses it, what was good before is tried too.
    ///
    /// # Errors
    /// When it cannot be used whatever Redis says; then everything stays as it was.
    pub fn exchange(&self, connect: Connect) -> Result<(), Error> {
        self.dialer.exchange(connect)
    }

    /// Tries what was exchanged at once: that Redis refuses it is said now, and not when the last connection breaks.
    async fn prove(&self) {
        let mut exchanged = self.dialer.exchanged();
        // This side of the channel lives as long as the tracker.
        while exchanged.changed().await.is_ok() {
            while let Err(error) = self.dialer.prove().await {
                self.refused(&error);
                tokio::select! {
                    () = sleep(PROVE.mul_f64(0.5 + rand::random::<f64>())) => {}
                    _ = exchanged.changed() => {}
                }
            }
            if self.inner().refused.take().is_some() {
                tracing::info!("Redis takes the password and the certificates that are in their files");
            }
            if self.dialer.is_cluster() {
                for link in &self.links {
                    link.renew().await;
                }
            }
        }
    }

    fn refused(&self, error: &Error) {
        // It is away altogether, and that is said elsewhere.
        if !self.health.borrow().reachable {
            return;
        }
        let why = format!(
            "Redis does not take the password or the certificates that are in their files now ({error}): open connections \
             stay, and others are tried with what was there before; put the right ones there, or let Redis know them"
        );
        if self.inner().refused.replace(why).is_none() {
            tracing::warn!(
                error = %error,
                "Redis does not take the password or the certificates that are in their files now: what was there before is \
                 tried too"
            );
        }
    }

    /// Returns how Redis fares.
    pub fn health(&self) -> watch::Receiver<Health> {
        self.health.subscribe()
    }

    /// Returns whether everything was announced and the others' names were read once.
    pub fn ready(&self) -> watch::Receiver<bool> {
        self.ready.subscribe()
    }

    /// Returns numbers for metrics and people.
    pub fn counts(&self) -> Counts {
        let inner = self.inner();
        Counts {
            agents: inner.own.routes(),
            entries: inner.own.len(),
            unwritten: inner.own.unwritten(),
            remembered: inner.cache.len(),
        }
    }

    /// Returns the connections of this replica alone.
    pub fn own(&self) -> &InMemoryTracker {
        &self.own
    }

    /// Returns the other replicas that live, as their keys say.
    pub fn others(&self) -> HashSet<Replica> {
        self.inner().peers.values().map(|peer| peer.replica.clone()).collect()
    }

    /// Tells the others how this replica is.
    pub fn announce(&self, state: State) {
        self.inner().state = state;
        self.to_beat.notify_one();
    }

    /// Takes everything back, which needs [`run`](Self::run), and gives up after `patience`: then what is left expires.
    pub async fn leave(&self, patience: Duration) {
        {
            let mut inner = self.inner();
            inner.leaving = true;
            inner.state = State::Left;
        }
        self.to_beat.notify_one();
        let mut gone = self.gone.subscribe();
        if timeout(patience, gone.wait_for(|gone| *gone)).await.is_err() {
            tracing::warn!(within = ?patience, "Redis did not take this replica's entries back: they expire");
        }
    }

    /// Adds to what replicas count together under a name, in windows of this length; returns what all of them have now.
    ///
    /// # Errors
    /// When Redis cannot be asked, or refuses. It may have been added all the same.
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
                // Of the next window, too: replicas do not agree on a second.
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
        Ok(Counted { window: number, totals })
    }

    pub(crate) fn ages(&self) -> Ages {
        if self.health.borrow().listening { AGES } else { AGES_DEAF }
    }

    /// Notes what failed.
    pub(crate) fn failed(&self, what: &'static str, error: &Error) {
        tracing::debug!(error = %error, what, "Redis failed");
        // It says what has been said already.
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
        if inner.own.remove_route(agent) {
            inner.cache.wake(agent);
            drop(inner);
            self.to_write.notify_one();
        }
    }

    fn candidates(&self, inner: &Inner, agent: AgentId, now: Instant) -> Vec<Candidate> {
        let mut found = Vec::new();
        if inner.own.holds(agent) {
            found.push(Candidate { replica: self.me.clone(), standing: Standing::Live, wire: Wire::Own });
        }
        found.extend(inner.cache.holders(agent).filter_map(|holder| {
            let peer = inner.peers.get(&holder.replica).filter(|peer| peer.life.run == holder.run)?;
            let standing = standing(peer, now);
            Some(Candidate { replica: peer.replica.clone(), standing, wire: Wire::Own })
        }));
        found.extend(inner.cache.gitlab(agent).map(|replica| Candidate {
            replica: replica.clone(),
            standing: Standing::Live,
            wire: Wire::Gitlab,
        }));
        // One, mostly.
        found.sort_by_key(|candidate| candidate.standing);
        found
    }

    fn unavailable(&self) -> TrackerError {
        let why = self.health.borrow().last_error.as_ref().map(|(text, _)| text.clone());
        let why = why.unwrap_or_else(|| format!("no answer within {PATIENCE:?}"));
        TrackerError::Unavailable { backend: BACKEND, source: why.into() }
    }

    /// What is wrong, for a person.
    pub fn alarms(&self) -> Vec<String> {
        let health = self.health.borrow().clone();
        let mut alarms: Vec<String> = {
            let inner = self.inner();
            inner.usurped.clone().into_iter().chain(inner.refused.clone()).collect()
        };
        let last = health.last_error.map_or_else(|| "it was not reached yet".to_owned(), |(text, _)| text);
        if !health.reachable {
            alarms.push(format!(
                "Redis cannot be asked ({last}): agents of this replica and agents that were asked for before are served, \
                 others are not found"
            ));
        } else if !health.announced {
            alarms.push(format!("Redis does not have all of this replica's agents yet ({last})"));
        } else if !health.listening {
            alarms.push(format!(
                "what other replicas publish in Redis does not come in ({last}): changes are seen late"
            ));
        }
        alarms
    }
}

pub(crate) fn standing(peer: &Peer, now: Instant) -> Standing {
    if now > peer.until {
        Standing::Suspect
    } else if peer.life.state == State::Draining.as_str() {
        Standing::Draining
    } else {
        Standing::Live
    }
}

#[async_trait]
impl Tracker for RedisTracker {
    fn route(&self, agent: AgentId, methods: Arc<[Box<str>]>) -> Lease {
        let mut inner = self.inner();
        if inner.own.add_route(agent, methods) {
            // Written, now wake: who subscribed before it locates again.
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

    fn connection(&self, connection: Connection) -> Lease {
        // Shown at once here, and by the others when it is written.
        let shown = self.own.connection(connection.clone());
        let (item, serial): (Item, u64) = self.inner().own.add_connection(Arc::new(connection));
        self.to_write.notify_one();
        let this = self.this.clone();
        Lease::new(move || {
            drop(shown);
            if let Some(this) = this.upgrade() {
                this.inner().own.remove_connection(item, serial);
                this.to_write.notify_one();
            }
        })
    }

    async fn locate(&self, agent: AgentId) -> Result<Vec<Candidate>, TrackerError> {
        let ages = self.ages();
        let reachable = self.health.borrow().reachable;
        let mut done = {
            let mut inner = self.inner();
            let now = Instant::now();
            let look = inner.cache.look(agent, ages, now);
            let found = self.candidates(&inner, agent, now);
            // That nobody held it a moment ago says nothing while nobody can say that they do.
            let counts = if reachable { look != Look::Unknown } else { !found.is_empty() };
            if look == Look::Known && counts {
                return Ok(found);
            }
            let done = inner.cache.want(agent, now);
            self.to_read.notify_one();
            if counts {
                return Ok(found);
            }
            done
        };
        // Nobody waits for a Redis that does not answer anyway. One that is only slow is no error: the answer wakes who
        // has subscribed.
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
        Mark { epoch: inner.own.run(), version: inner.own.version() }
    }

    fn not_here(&self, replica: &ReplicaId, agent: AgentId, mark: Mark) {
        self.inner().cache.mask(agent, replica, mark);
    }

    fn live(&self) -> watch::Receiver<usize> {
        self.live.subscribe()
    }

    async fn replicas(&self) -> Replicas {
        let alarms = self.alarms();
        let now = Instant::now();
        let inner = self.inner();
        let mut replicas = vec![ReplicaStatus {
            replica: self.me.clone(),
            build: self.options.build.clone(),
            state: inner.state.as_str().to_owned(),
            standing: "self".to_owned(),
            generation: 0,
            mark: Mark { epoch: inner.own.run(), version: inner.own.version() },
            agents: inner.own.routes() as u64,
            synced: true,
            heard: None,
        }];
        let mut others: Vec<&Peer> = inner.peers.values().collect();
        others.sort_by(|a, b| a.replica.id.cmp(&b.replica.id));
        replicas.extend(others.into_iter().map(|peer| ReplicaStatus {
            replica: peer.replica.clone(),
            build: (peer.life.version.clone(), peer.life.commit.clone()),
            state: peer.life.state.clone(),
            standing: standing(peer, now).as_str().to_owned(),
            generation: 0,
            mark: Mark { epoch: peer.life.run, version: 0 },
            agents: peer.life.agents,
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
            lag: self.inner().own.lag(Instant::now()),
            remembered: counts.remembered as u64,
            last_error: health.last_error.map(|(text, at)| (text, at.elapsed())),
        }
    }

    fn beliefs(&self, agent: AgentId) -> Vec<Belief> {
        let inner = self.inner();
        let claims = inner.cache.claims(agent);
        let mut beliefs: Vec<Belief> = inner
            .peers
            .values()
            .map(|peer| {
                let claim = claims.iter().find(|(owner, _)| owner.replica == peer.replica.id);
                let (holds, why) = match claim {
                    Some((owner, _)) if owner.run != peer.life.run => {
                        (false, "its entry in Redis is of an earlier process".to_owned())
                    }
                    Some((_, true)) => {
                        (false, "it has an entry in Redis, but said that the agent is not there".to_owned())
                    }
                    Some((_, false)) => (true, "it has an entry in Redis".to_owned()),
                    None if inner.cache.was_read(agent) => (false, "it has no entry in Redis".to_owned()),
                    None => (false, "nobody has asked for this agent here".to_owned()),
                };
                Belief { replica: peer.replica.clone(), holds, why }
            })
            .collect();
        beliefs.extend(inner.cache.gitlab(agent).map(|replica| Belief {
            replica: replica.clone(),
            holds: true,
            why: "a replica of GitLab's has tunnels of it in Redis".to_owned(),
        }));
        beliefs.sort_by(|a, b| a.replica.id.cmp(&b.replica.id));
        beliefs
    }

    fn changes(&self, agent: AgentId) -> watch::Receiver<()> {
        self.inner().cache.subscribe(agent, Instant::now())
    }

    async fn connected(&self, query: Query) -> Result<Connected, TrackerError> {
        let own = self.own.connected(query).await?;
        Ok(self.gather(query, own).await)
    }

    fn connection_changes(&self) -> watch::Receiver<()> {
        self.connection_changes.subscribe()
    }
}
