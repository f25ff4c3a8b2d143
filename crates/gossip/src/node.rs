//! The gossip thread: runs chitchat, watches over it, and turns its state into members.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    future::Future,
    net::SocketAddr,
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, UNIX_EPOCH},
};

use chitchat::{
    Chitchat, ChitchatConfig, ChitchatHandle, ChitchatId, FailureDetectorConfig, NodeState, ProtocolVersion,
    spawn_chitchat,
};
use rand::seq::IteratorRandom as _;
use tokio::{
    sync::{Notify, mpsc, oneshot, watch},
    time::{Instant, MissedTickBehavior, interval, sleep, sleep_until, timeout},
};

use crate::{
    Gate, Timing,
    counters::{Counters, Restart},
    members::{Heard, Member, Members, Status},
    publish::{MAX_KEYS, Values, is_fit},
    seal::KeyRing,
    transport::{Link, SealedTransport},
};

/// Generations may be this far ahead of our clock. More means a broken clock somewhere, or an attempt to
/// claim a node id for good.
const AHEAD: Duration = Duration::from_secs(24 * 60 * 60);
/// Members shown at most. chitchat's own limit is near: at some thousand ids its digest outgrows a datagram.
const MAX_MEMBERS: usize = 4_096;
/// Values that come within this time are shown together.
const SETTLE: Duration = Duration::from_millis(5);
/// How long the gossip task may make no round before it is restarted; at least 10 intervals.
const FREEZE: Duration = Duration::from_secs(3);
/// How long nobody is heard before the status says lonely; at least 10 intervals.
const PATIENCE: Duration = Duration::from_secs(5);
/// The delays between restarts. The first comes at once; those of two processes that share a node id would
/// otherwise chase each other, and every dead incarnation stays in everybody's digest for minutes.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(60));
/// The longest wait while there is no gossip at all: the list of members stands still meanwhile.
const MOST_BROKEN: Duration = Duration::from_secs(2);
/// After this long without a restart, the next one is at once again.
const CALM: Duration = Duration::from_secs(600);

/// Returns microseconds since 1970.
#[expect(
    clippy::disallowed_methods,
    reason = "a generation must grow over restarts of the process, and nothing else does without a disk"
)]
pub(crate) fn wall() -> u64 {
    let since = std::time::SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
}

/// What the handle and the gossip thread share.
#[derive(Default)]
pub(crate) struct Shared {
    published: Mutex<Published>,
    /// Wakes the gossip thread after a publish.
    pub(crate) news: Notify,
    pub(crate) beats: AtomicU64,
    pub(crate) generation: AtomicU64,
    pub(crate) company: Arc<Company>,
}

/// Whether anybody reaches this process, be it by datagrams or by what its user has besides.
#[derive(Debug, Default)]
pub(crate) struct Company {
    /// Signs that somebody does: datagrams accepted, and what the user saw.
    signs: AtomicU64,
    /// Connections of the user that stand for somebody as long as they are open.
    holds: AtomicUsize,
    /// Whether the transport withholds what chitchat sends.
    silent: AtomicBool,
}

impl Company {
    /// Notes a sign. A silent process speaks again at once: what it heard may want an answer.
    pub(crate) fn sign(&self) {
        self.signs.fetch_add(1, Ordering::Relaxed);
        self.silent.store(false, Ordering::Relaxed);
    }

    pub(crate) fn hold(&self) {
        self.holds.fetch_add(1, Ordering::Relaxed);
        self.sign();
    }

    pub(crate) fn release(&self) {
        self.holds.fetch_sub(1, Ordering::Relaxed);
    }

    pub(crate) fn is_silent(&self) -> bool {
        self.silent.load(Ordering::Relaxed)
    }
}

/// What this process says about itself.
#[derive(Default)]
pub(crate) struct Published {
    pub(crate) values: Values,
    pub(crate) revision: u64,
}

impl Shared {
    pub(crate) fn published(&self) -> MutexGuard<'_, Published> {
        // Nothing in there can be left half-written.
        self.published.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Everything the thread owns.
pub(crate) struct Node {
    pub(crate) node_id: Arc<str>,
    pub(crate) cluster: String,
    pub(crate) advertise: SocketAddr,
    pub(crate) local: SocketAddr,
    pub(crate) timing: Timing,
    pub(crate) gate: Option<Gate>,
    pub(crate) hush: Option<Duration>,
    pub(crate) link: Arc<Link>,
    pub(crate) shared: Arc<Shared>,
    pub(crate) counters: Arc<Counters>,
    pub(crate) keys: watch::Receiver<Arc<KeyRing>>,
    pub(crate) seeds: watch::Receiver<HashSet<SocketAddr>>,
    pub(crate) hellos: mpsc::Receiver<SocketAddr>,
    pub(crate) stop: oneshot::Receiver<oneshot::Sender<()>>,
    pub(crate) members: watch::Sender<Arc<Members>>,
    pub(crate) status: watch::Sender<Status>,
}

/// Why an incarnation ended.
enum End {
    Restart(Restart),
    /// Somebody left, and waits for the sender; `None` when the handle was dropped.
    Stop(Option<oneshot::Sender<()>>),
}

/// What is known of another incarnation, chitchat's state aside.
struct Track {
    heartbeat: u64,
    heard: Arc<Heard>,
    /// Whether the heartbeat advanced since it was first seen: old state passed on by others does not.
    has_advanced: bool,
    /// The version of `member`.
    version: u64,
    member: Option<Arc<Member>>,
}

/// One look at chitchat's state.
struct Look {
    /// Our own heartbeat: it advances with every round.
    heartbeat: u64,
    /// The highest generation of our own id beyond ours.
    overtaken: Option<u64>,
    members: BTreeMap<Arc<str>, Arc<Member>>,
}

/// Who has not looked at its members for so many intervals takes nobody for dead for as many more.
const PAUSE: u32 = 5;

/// What lives as long as an incarnation.
struct Incarnation {
    id: ChitchatId,
    handle: ChitchatHandle,
    /// Somebody's values have come.
    fresh: Arc<Notify>,
    tracks: HashMap<ChitchatId, Track>,
    /// What was last written into chitchat.
    written: Option<(u64, bool)>,
    heartbeat: u64,
    /// Ticks since our own heartbeat advanced.
    still: u32,
    /// Members from before a restart or a pause, shown until they are heard again or `carry_until`.
    carry: Arc<Members>,
    carry_until: Instant,
    /// When members were last looked at.
    looked: Instant,
}

/// What outlives incarnations.
struct Memory {
    /// The last set of seeds that was not empty, without our own addresses.
    seeds: HashSet<SocketAddr>,
    /// Since when nobody is heard.
    quiet: Instant,
    beats: u64,
    /// Ticks since the last beat. Counted in ticks and not in time, so that a pause of the whole process
    /// does not look like a hang of its main runtime.
    stalled: u32,
    /// Signs of others at the last tick, and ticks since there was one: in ticks for the same reason.
    signs: u64,
    unreached: u32,
    /// The earliest next restart, and the delay after that.
    not_before: Instant,
    delay: Duration,
    generation: u64,
    /// Beyond ours, seen under our own id.
    overtaken: Option<u64>,
}

impl Node {
    /// Runs until stopped. `ready` learns whether the first incarnation started.
    pub(crate) async fn run(mut self, generation: u64, ready: oneshot::Sender<anyhow::Result<()>>) {
        let now = Instant::now();
        let mut memory = Memory {
            seeds: HashSet::new(),
            quiet: now,
            beats: 0,
            stalled: 0,
            signs: 0,
            unreached: 0,
            not_before: now,
            delay: Duration::ZERO,
            generation,
            overtaken: None,
        };
        self.take_seeds(&mut memory);
        let mut incarnation = match self.spawn(&memory).await {
            Ok(incarnation) => incarnation,
            Err(error) => return drop(ready.send(Err(error))),
        };
        self.set_status(&mut memory);
        if ready.send(Ok(())).is_err() {
            return incarnation.handle.abort();
        }
        loop {
            let end = self.drive(&mut incarnation, &mut memory).await;
            let cause = match end {
                End::Stop(done) => {
                    if let Some(done) = done {
                        self.say_goodbye(&mut incarnation).await;
                        incarnation.handle.abort();
                        // The receiver may have given up waiting.
                        let _ = done.send(());
                    }
                    return incarnation.handle.abort();
                }
                End::Restart(cause) => cause,
            };
            incarnation.handle.abort();
            self.counters.restart_for(cause);
            // Not after an earlier one, even when the clock was set back meanwhile.
            let above = memory.overtaken.take().unwrap_or(0).max(memory.generation);
            memory.generation = wall().max(above.saturating_add(1));
            tracing::error!(
                cause = cause.name(),
                node.id = %self.node_id,
                generation = memory.generation,
                "gossip restarts with a new generation"
            );
            incarnation = loop {
                let wait = sleep_until(memory.not_before.min(Instant::now() + MOST_BROKEN));
                tokio::select! {
                    done = &mut self.stop => {
                        if let Ok(done) = done {
                            let _ = done.send(());
                        }
                        return;
                    }
                    () = wait => {}
                }
                let now = Instant::now();
                // Calm is counted from the end of the last delay.
                let is_calm = now.duration_since(memory.not_before) > CALM;
                memory.delay = if is_calm || memory.delay.is_zero() { BACKOFF.0 } else { memory.delay * 2 };
                memory.delay = memory.delay.min(BACKOFF.1);
                memory.not_before = now + memory.delay;
                match self.spawn(&memory).await {
                    Ok(incarnation) => break incarnation,
                    Err(error) => tracing::error!(error = format!("{error:#}"), "gossip cannot restart"),
                }
            };
        }
    }

    /// Generations beyond this are not believed.
    fn limit(&self) -> u64 {
        wall().saturating_add(u64::try_from(AHEAD.as_micros()).unwrap_or(u64::MAX))
    }

    async fn spawn(&self, memory: &Memory) -> anyhow::Result<Incarnation> {
        let generation = memory.generation;
        let id = ChitchatId::new(Arc::clone(&self.node_id), generation, self.advertise);
        self.shared.generation.store(generation, Ordering::Relaxed);
        {
            let mut seals = self.link.seals();
            seals.sealer.restart(generation);
            seals.opener.limit_generation(self.limit());
        }
        let config = ChitchatConfig {
            chitchat_id: id.clone(),
            cluster_id: self.cluster.clone(),
            gossip_interval: self.timing.interval,
            listen_addr: self.local,
            // Ours change at run time; see `seek`.
            seed_nodes: Vec::new(),
            failure_detector_config: FailureDetectorConfig {
                phi_threshold: self.timing.phi,
                sampling_window_size: 1_000,
                // Longer pauses are no sample: they would make the detector patient for minutes.
                max_interval: (self.timing.interval * 10).max(Duration::from_secs(2)),
                initial_interval: self.timing.initial_interval,
                dead_node_grace_period: self.timing.dead_grace,
            },
            // Nothing is ever deleted.
            marked_for_deletion_grace_period: Duration::from_secs(15 * 60),
            catchup_callback: None,
            extra_liveness_predicate: None,
            protocol_version: ProtocolVersion::V1,
        };
        let handle = spawn_chitchat(config, Vec::new(), &SealedTransport(Arc::clone(&self.link))).await?;
        let fresh = Arc::new(Notify::new());
        let signal = Arc::clone(&fresh);
        // Called under chitchat's lock: it only leaves a sign.
        handle.chitchat().lock().await.subscribe_event("", move |_| signal.notify_one()).forever();
        let mut incarnation = Incarnation {
            id,
            handle,
            fresh,
            tracks: HashMap::new(),
            written: None,
            heartbeat: 0,
            still: 0,
            carry: Arc::clone(&self.members.borrow()),
            carry_until: Instant::now() + self.at_least(Duration::from_secs(2)),
            looked: Instant::now(),
        };
        self.write(&mut incarnation, memory.stalled).await;
        for seed in &memory.seeds {
            let _ = incarnation.handle.gossip(*seed);
        }
        Ok(incarnation)
    }

    /// Returns `time`, or 10 intervals when they are longer.
    fn at_least(&self, time: Duration) -> Duration {
        time.max(self.timing.interval * 10)
    }

    /// Watches over one incarnation until it must end.
    async fn drive(&mut self, incarnation: &mut Incarnation, memory: &mut Memory) -> End {
        let mut ended: Pin<Box<dyn Future<Output = anyhow::Result<()>> + Send>> =
            Box::pin(incarnation.handle.termination_watcher());
        let mut tick = interval(self.timing.interval);
        // After a pause of the process, one tick and not a burst: they are counted below.
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let shared = Arc::clone(&self.shared);
        let fresh = Arc::clone(&incarnation.fresh);
        loop {
            tokio::select! {
                done = &mut self.stop => return End::Stop(done.ok()),
                result = &mut ended => {
                    if let Err(error) = result {
                        tracing::error!(error = format!("{error:#}"), "the gossip task ended");
                    }
                    return End::Restart(Restart::Ended);
                }
                _ = tick.tick() => {
                    if let Some(cause) = self.tick(incarnation, memory).await {
                        return End::Restart(cause);
                    }
                }
                () = shared.news.notified() => self.write(incarnation, memory.stalled).await,
                () = fresh.notified() => {
                    // What comes in one exchange is looked at once.
                    sleep(SETTLE).await;
                    self.peek(incarnation).await;
                }
                Some(peer) = self.hellos.recv() => drop(incarnation.handle.gossip(peer)),
                Ok(()) = self.keys.changed() => {
                    let ring = Arc::clone(&self.keys.borrow_and_update());
                    self.link.rekey(&ring, &self.cluster);
                }
                Ok(()) = self.seeds.changed() => {
                    for new in self.take_seeds(memory) {
                        let _ = incarnation.handle.gossip(new);
                    }
                }
            }
        }
    }

    /// Takes over a changed seed set unless it is empty; returns the new addresses.
    fn take_seeds(&mut self, memory: &mut Memory) -> Vec<SocketAddr> {
        let found = self.seeds.borrow_and_update().clone();
        if found.is_empty() {
            // A failed lookup: a partition without seeds would never heal.
            return Vec::new();
        }
        // As members' addresses are written, so that a mapped IPv4 address finds its member.
        let canonical = found.iter().map(|seed| SocketAddr::new(seed.ip().to_canonical(), seed.port()));
        let seeds: HashSet<_> =
            canonical.filter(|seed| *seed != self.advertise && *seed != self.local).collect();
        let new = seeds.difference(&memory.seeds).copied().collect();
        memory.seeds = seeds;
        new
    }

    /// One interval: write, look, seek, and judge. Returns why to restart, if at all.
    async fn tick(&mut self, incarnation: &mut Incarnation, memory: &mut Memory) -> Option<Restart> {
        self.link.seals().opener.limit_generation(self.limit());
        let beats = self.shared.beats.load(Ordering::Relaxed);
        memory.stalled = if beats == memory.beats { memory.stalled.saturating_add(1) } else { 0 };
        memory.beats = beats;
        self.judge_own_hearing(memory);
        self.write(incarnation, memory.stalled).await;

        let chitchat = incarnation.handle.chitchat();
        // A gossip task that is stuck may hold the lock.
        let look = match timeout(self.timing.interval, chitchat.lock()).await {
            Ok(chitchat) => Some(self.look(&chitchat, incarnation)),
            Err(_) => None,
        };
        let advanced = look.as_ref().is_some_and(|look| look.heartbeat > incarnation.heartbeat);
        incarnation.still = if advanced { 0 } else { incarnation.still + 1 };
        if let Some(look) = look {
            incarnation.heartbeat = look.heartbeat;
            memory.overtaken = look.overtaken.max(memory.overtaken);
            self.set_members(look.members, incarnation);
        }
        self.set_status(memory);
        self.seek(incarnation, memory);

        if self.timing.interval * incarnation.still >= self.at_least(FREEZE) {
            return Some(Restart::Frozen);
        }
        // Until the delay is over it goes on as it is: peers show the other incarnation meanwhile.
        (memory.overtaken.is_some() && Instant::now() >= memory.not_before).then_some(Restart::Overtaken)
    }

    /// Falls silent when nobody reaches this process any more. Those that still hear it would go on believing in
    /// it, and no word of its own could tell them: chitchat sends values only in answer to what it hears.
    fn judge_own_hearing(&self, memory: &mut Memory) {
        let Some(after) = self.hush else { return };
        let company = &self.shared.company;
        let signs = company.signs.load(Ordering::Relaxed);
        // Who never heard anybody is believed by nobody: its datagrams prove nothing.
        let reached = signs != memory.signs || signs == 0;
        memory.signs = signs;
        memory.unreached = if reached { 0 } else { memory.unreached.saturating_add(1) };
        let held = company.holds.load(Ordering::Relaxed) > 0;
        let deaf = !held && self.timing.interval * memory.unreached >= self.at_least(after);
        // A sign between the load and here costs one interval of silence.
        let was_silent = company.silent.swap(deaf, Ordering::Relaxed);
        if deaf && !was_silent {
            tracing::warn!(
                after = ?self.at_least(after),
                "nobody reaches this process: it falls silent until it hears somebody, so that others do not take it \
                 for reachable"
            );
        }
    }

    /// Looks without waiting for the next interval: somebody's values have come.
    async fn peek(&self, incarnation: &mut Incarnation) {
        let chitchat = incarnation.handle.chitchat();
        let look = match timeout(self.timing.interval, chitchat.lock()).await {
            Ok(chitchat) => self.look(&chitchat, incarnation),
            // The next tick judges.
            Err(_) => return,
        };
        self.set_members(look.members, incarnation);
    }

    /// Brings what was published into chitchat's state, with the gate's value while beats are missing.
    async fn write(&self, incarnation: &mut Incarnation, stalled: u32) {
        let is_hung = self.gate.as_ref().is_some_and(|g| self.timing.interval * stalled >= g.after);
        let (values, revision) = {
            let published = self.shared.published();
            if incarnation.written == Some((published.revision, is_hung)) {
                return;
            }
            (published.values.clone(), published.revision)
        };
        let chitchat = incarnation.handle.chitchat();
        let Ok(mut chitchat) = timeout(self.timing.interval, chitchat.lock()).await else {
            // The next tick tries again, or restarts the task.
            return;
        };
        let state = chitchat.self_node_state();
        for (key, value) in &values {
            let gate = self.gate.as_ref().filter(|gate| is_hung && *gate.key == **key);
            state.set(key, gate.map_or(&**value, |gate| &gate.value));
        }
        let was_hung = incarnation.written.replace((revision, is_hung)).is_some_and(|(_, hung)| hung);
        if is_hung != was_hung {
            tracing::warn!(hung = is_hung, "the main runtime's pulse changed");
        }
    }

    /// Reads chitchat's state: who is live, and what they published.
    fn look(&self, chitchat: &Chitchat, incarnation: &mut Incarnation) -> Look {
        let now = Instant::now();
        let limit = self.limit();
        let live: HashSet<&ChitchatId> = chitchat.live_nodes().collect();
        let states = chitchat.node_states();
        // All but our own.
        self.counters.remember(states.len().saturating_sub(1));
        let tracks = &mut incarnation.tracks;
        tracks.retain(|id, _| states.contains_key(id));
        let mut heartbeat = 0;
        let mut overtaken = None;
        // Of each node id the newest generation that may be shown, and whether any generation is live.
        let mut newest: BTreeMap<Arc<str>, (&ChitchatId, bool)> = BTreeMap::new();
        for (id, state) in states {
            if *id == incarnation.id {
                heartbeat = u64::from(state.heartbeat());
                continue;
            }
            let track = match tracks.get_mut(id) {
                Some(track) => track,
                None => {
                    if id.generation_id > limit {
                        self.counters.implausible.add(1);
                    }
                    tracks.entry(id.clone()).or_insert_with(|| Track {
                        heartbeat: u64::from(state.heartbeat()),
                        heard: Heard::new(now),
                        has_advanced: false,
                        version: 0,
                        member: None,
                    })
                }
            };
            let beat = u64::from(state.heartbeat());
            if beat > track.heartbeat {
                // The first value may be old state that others passed on.
                track.has_advanced |= track.heartbeat > 0;
                track.heartbeat = beat;
                track.heard.at(now);
            }
            if id.generation_id > limit {
                continue;
            }
            if *id.node_id == *self.node_id {
                if id.generation_id > incarnation.id.generation_id {
                    overtaken = overtaken.max(Some(id.generation_id));
                }
                continue;
            }
            let is_live = live.contains(id);
            // chitchat calls a newcomer live after its second heartbeat and the incarnation before it live
            // until phi says otherwise. The newcomer takes its place with the first one.
            let is_fresh = track.has_advanced
                && state.max_version() > 0
                && now.duration_since(track.heard.last()) < self.timing.interval * 5;
            if !is_live && !is_fresh {
                continue;
            }
            let entry = newest.entry(Arc::clone(&id.node_id)).or_insert((id, false));
            entry.1 |= is_live;
            if id.generation_id >= entry.0.generation_id {
                entry.0 = id;
            }
        }
        let mut members = BTreeMap::new();
        for (node_id, (id, is_live)) in newest {
            if !is_live || members.len() >= MAX_MEMBERS {
                continue;
            }
            let (Some(track), Some(state)) = (tracks.get_mut(id), states.get(id)) else { continue };
            members.insert(node_id, self.member(id, state, track));
        }
        Look { heartbeat, overtaken, members }
    }

    /// Returns the member, the same one as before unless its values changed.
    fn member(&self, id: &ChitchatId, state: &NodeState, track: &mut Track) -> Arc<Member> {
        if let Some(member) = track.member.as_ref().filter(|_| track.version == state.max_version()) {
            return Arc::clone(member);
        }
        let before = track.member.as_ref().map(|member| &member.values);
        let mut values = Values::new();
        for (key, value) in state.key_values() {
            // A member may send anything; what `publish` would not take is not shown.
            if values.len() >= MAX_KEYS || is_fit(key, value).is_err() {
                self.counters.unfit.add(1);
                continue;
            }
            match before.and_then(|values| values.get_key_value(key)) {
                Some((key, same)) if **same == *value => values.insert(Arc::clone(key), Arc::clone(same)),
                Some((key, _)) => values.insert(Arc::clone(key), value.into()),
                None => values.insert(key.into(), value.into()),
            };
        }
        let member = Arc::new(Member {
            node_id: Arc::clone(&id.node_id),
            generation: id.generation_id,
            address: id.gossip_advertise_addr,
            values,
            heard: Arc::clone(&track.heard),
        });
        track.version = state.max_version();
        track.member = Some(Arc::clone(&member));
        member
    }

    /// Publishes the list when anything but `heard` changed.
    fn set_members(&self, mut members: BTreeMap<Arc<str>, Arc<Member>>, incarnation: &mut Incarnation) {
        let now = Instant::now();
        let pause = now.duration_since(std::mem::replace(&mut incarnation.looked, now));
        if pause > self.timing.interval * PAUSE && incarnation.carry.is_empty() {
            // This process stood still. What the others said meanwhile is not read yet: that nothing was heard of them
            // says nothing about them. Not twice in a row: one that is always late would never drop the dead.
            incarnation.carry = Arc::clone(&self.members.borrow());
            incarnation.carry_until = now + self.timing.interval * PAUSE;
        }
        if now < incarnation.carry_until {
            // A restart of our own task must not look like the death of everybody else, either.
            for (node_id, member) in &incarnation.carry.0 {
                members.entry(Arc::clone(node_id)).or_insert_with(|| Arc::clone(member));
            }
        } else if !incarnation.carry.is_empty() {
            incarnation.carry = Arc::default();
        }
        let before = Arc::clone(&self.members.borrow());
        let is_same = before.0.len() == members.len()
            && before.0.values().zip(members.values()).all(|(a, b)| Arc::ptr_eq(a, b));
        if is_same {
            return;
        }
        for member in members.values() {
            let known = before.0.get(&member.node_id);
            if known.is_none_or(|known| known.generation != member.generation) {
                tracing::info!(peer.id = %member.node_id, peer.generation = member.generation,
                    peer.address = %member.address, "member joined");
            }
        }
        for gone in before.0.values().filter(|gone| !members.contains_key(&gone.node_id)) {
            tracing::info!(peer.id = %gone.node_id, peer.generation = gone.generation, "member lost");
        }
        self.members.send_replace(Arc::new(Members(members)));
    }

    fn set_status(&self, memory: &mut Memory) {
        let now = Instant::now();
        let peers = self.members.borrow().len();
        if peers > 0 || memory.seeds.is_empty() {
            memory.quiet = now;
        }
        let status = if peers > 0 {
            Status::Meshed { peers }
        } else if memory.seeds.is_empty() {
            Status::Alone
        } else if now.duration_since(memory.quiet) < self.at_least(PATIENCE) {
            Status::Seeking
        } else {
            Status::Lonely { since: memory.quiet }
        };
        let before = *self.status.borrow();
        if status == before {
            return;
        }
        match (before, status) {
            (_, Status::Lonely { .. }) => {
                tracing::warn!(seeds = memory.seeds.len(), "lonely: seeds name others but nobody is heard");
            }
            (Status::Lonely { .. }, _) => tracing::info!("no longer lonely"),
            _ => {}
        }
        self.status.send_replace(status);
    }

    /// Gossips with a seed that is no live member: that is how a mesh forms and how partitions heal. Each
    /// interval while nobody is heard, else in one interval of two.
    fn seek(&self, incarnation: &Incarnation, memory: &Memory) {
        let members = Arc::clone(&self.members.borrow());
        if !members.is_empty() && rand::random::<bool>() {
            return;
        }
        let met: HashSet<SocketAddr> = members.iter().map(|member| member.address).collect();
        if let Some(seed) = memory.seeds.difference(&met).choose(&mut rand::rng()) {
            let _ = incarnation.handle.gossip(*seed);
        }
    }

    /// Tells some members the last values: chitchat has no leave message.
    async fn say_goodbye(&self, incarnation: &mut Incarnation) {
        // Enough that the rest hears it in one more round even if some datagrams are lost.
        const TOLD: usize = 16;
        self.write(incarnation, 0).await;
        let members = Arc::clone(&self.members.borrow());
        for member in members.iter().sample(&mut rand::rng(), TOLD) {
            let _ = incarnation.handle.gossip(member.address);
        }
        if !members.is_empty() {
            // A handshake is three datagrams; the answers are on their way within one interval.
            tokio::time::sleep(self.timing.interval).await;
        }
    }
}
