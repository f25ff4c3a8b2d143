//! The gossip thread: runs chitchat, supervises it, and turns its state into members.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    future::Future,
    net::SocketAddr,
    pin::Pin,
    sync::Arc,
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
    counters::{Counters, Restart},
    flaw::{Flaw, flawed},
    members::{Heard, Member, Members, Status},
    publish::{MAX_KEYS, Values, is_fit},
    seal::KeyRing,
    state::State,
    timing::{HealthGate, Timing},
    transport::{Link, SealedTransport},
};

/// How far a generation may be ahead of our clock. A later one means a wrong clock somewhere, or an attempt
/// to occupy a node id for good.
const AHEAD: Duration = Duration::from_secs(24 * 60 * 60);
/// The largest number of members. chitchat's own limit is near: at some thousand ids its digest outgrows a
/// message.
const MAX_MEMBERS: usize = 4_096;
/// Values that arrive within this time are shown together.
const SETTLE: Duration = Duration::from_millis(5);
/// The gossip task is restarted after this long without a round; at least 10 intervals.
const FREEZE: Duration = Duration::from_secs(3);
/// The status becomes lonely after this long without hearing a member; at least 10 intervals.
const PATIENCE: Duration = Duration::from_secs(5);
/// The delays between restarts. The first restart has no delay. Without the delays, two processes that share
/// a node id would restart in turns without end, and every dead incarnation stays in all digests for minutes.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(60));
/// The longest delay while there is no gossip at all: the list of members does not change meanwhile.
const MOST_BROKEN: Duration = Duration::from_secs(2);
/// After this long without a restart, the next one has no delay again.
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

/// Everything that the thread owns.
pub(crate) struct Node {
    pub(crate) node_id: Arc<str>,
    pub(crate) cluster: String,
    pub(crate) advertise: SocketAddr,
    pub(crate) local: SocketAddr,
    pub(crate) timing: Timing,
    pub(crate) health_gate: Option<HealthGate>,
    pub(crate) deaf_after: Option<Duration>,
    pub(crate) link: Arc<Link>,
    pub(crate) state: Arc<State>,
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
    /// The user called `leave` and waits for the sender; `None` if the handle was dropped.
    Stop(Option<oneshot::Sender<()>>),
}

/// What is known of another incarnation, besides chitchat's state.
struct Track {
    heartbeat: u64,
    heard: Arc<Heard>,
    /// Whether the heartbeat has advanced since it was first seen. In old state that others pass on it does
    /// not advance.
    has_advanced: bool,
    /// The version of `member`.
    version: u64,
    member: Option<Arc<Member>>,
}

/// One look at chitchat's state.
struct Look {
    /// Our own heartbeat, which advances with every round.
    heartbeat: u64,
    /// The highest generation of our own id that is above ours.
    overtaken: Option<u64>,
    members: BTreeMap<Arc<str>, Arc<Member>>,
}

/// After a local stall of this many intervals, membership is frozen for as many intervals.
const PAUSE: u32 = 5;

/// The state of one incarnation.
struct Incarnation {
    id: ChitchatId,
    handle: ChitchatHandle,
    /// Values of other members have arrived.
    fresh: Arc<Notify>,
    tracks: HashMap<ChitchatId, Track>,
    /// Revision of the values that were last written into chitchat, and whether the main runtime hung then.
    written: Option<(u64, bool)>,
    heartbeat: u64,
    /// Ticks since our own heartbeat advanced.
    still: u32,
    /// Members from before a restart or a stall. They are shown until they are heard again or until
    /// `carry_until`.
    carry: Arc<Members>,
    carry_until: Instant,
    /// When members were last looked at.
    looked: Instant,
}

/// The state that outlives incarnations.
struct Memory {
    /// The last non-empty set of seeds, without our own addresses.
    seeds: HashSet<SocketAddr>,
    /// Since when no member is heard.
    quiet: Instant,
    heartbeats: u64,
    /// Ticks since the last heartbeat of the main runtime. Counted in ticks and not in time, so that a pause
    /// of the whole process does not look like a hang of its main runtime.
    stalled: u32,
    /// Signs of other processes at the last tick, and ticks since there was one; in ticks for the same
    /// reason.
    signs: u64,
    unreached: u32,
    /// The earliest next restart, and the delay after that.
    not_before: Instant,
    delay: Duration,
    generation: u64,
    /// A generation above ours that was seen under our own id.
    overtaken: Option<u64>,
}

impl Node {
    /// Runs until stopped. Tells `ready` whether the first incarnation started.
    pub(crate) async fn run(mut self, generation: u64, ready: oneshot::Sender<anyhow::Result<()>>) {
        let now = Instant::now();
        let mut memory = Memory {
            seeds: HashSet::new(),
            quiet: now,
            heartbeats: 0,
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
                        self.send_last_values(&mut incarnation).await;
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
            // Above all earlier ones, even if the clock was set back meanwhile.
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
                // The calm time counts from the end of the last delay.
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

    /// Returns the highest generation that is accepted.
    fn limit(&self) -> u64 {
        wall().saturating_add(u64::try_from(AHEAD.as_micros()).unwrap_or(u64::MAX))
    }

    async fn spawn(&self, memory: &Memory) -> anyhow::Result<Incarnation> {
        let generation = memory.generation;
        let id = ChitchatId::new(Arc::clone(&self.node_id), generation, self.advertise);
        self.state.set_generation(generation);
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
            // Our seeds change at run time; see `seek`.
            seed_nodes: Vec::new(),
            failure_detector_config: FailureDetectorConfig {
                phi_threshold: self.timing.phi,
                sampling_window_size: 1_000,
                // Longer pauses are not sampled: they would raise the detector's threshold for minutes.
                max_interval: (self.timing.interval * 10).max(Duration::from_secs(2)),
                initial_interval: self.timing.initial_interval,
                dead_node_grace_period: if flawed(Flaw::DeadRememberedLong) {
                    Duration::from_secs(600)
                } else {
                    self.timing.dead_grace
                },
            },
            // No key is ever deleted.
            marked_for_deletion_grace_period: Duration::from_secs(15 * 60),
            catchup_callback: None,
            extra_liveness_predicate: None,
            protocol_version: ProtocolVersion::V1,
        };
        let handle = spawn_chitchat(config, Vec::new(), &SealedTransport(Arc::clone(&self.link))).await?;
        let fresh = Arc::new(Notify::new());
        let signal = Arc::clone(&fresh);
        // It is called under chitchat's lock, so it only sends a signal.
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

    /// Returns the longer of `time` and 10 intervals.
    fn at_least(&self, time: Duration) -> Duration {
        time.max(self.timing.interval * 10)
    }

    /// Supervises one incarnation until it must end.
    async fn drive(&mut self, incarnation: &mut Incarnation, memory: &mut Memory) -> End {
        let mut ended: Pin<Box<dyn Future<Output = anyhow::Result<()>> + Send>> =
            Box::pin(incarnation.handle.termination_watcher());
        let mut tick = interval(self.timing.interval);
        // After a pause of the process there is one tick and not a burst, because ticks are counted below.
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let state = Arc::clone(&self.state);
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
                () = state.news.notified() => self.write(incarnation, memory.stalled).await,
                () = fresh.notified() => {
                    // The values of one exchange are processed together.
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

    /// Stores a changed seed set unless it is empty. Returns the new addresses.
    fn take_seeds(&mut self, memory: &mut Memory) -> Vec<SocketAddr> {
        let found = self.seeds.borrow_and_update().clone();
        if found.is_empty() {
            // The lookup failed. Without seeds, a partition would never heal.
            return Vec::new();
        }
        // In the form of the members' addresses, so that a mapped IPv4 address matches its member.
        let canonical = found.iter().map(|seed| SocketAddr::new(seed.ip().to_canonical(), seed.port()));
        let seeds: HashSet<_> =
            canonical.filter(|seed| *seed != self.advertise && *seed != self.local).collect();
        let new = seeds.difference(&memory.seeds).copied().collect();
        memory.seeds = seeds;
        new
    }

    /// Runs once per interval: writes, looks at the members, contacts a seed. Returns why to restart, if at
    /// all.
    async fn tick(&mut self, incarnation: &mut Incarnation, memory: &mut Memory) -> Option<Restart> {
        self.link.seals().opener.limit_generation(self.limit());
        let heartbeats = self.state.heartbeats();
        memory.stalled = if heartbeats == memory.heartbeats { memory.stalled.saturating_add(1) } else { 0 };
        memory.heartbeats = heartbeats;
        self.silence_if_deaf(memory);
        self.write(incarnation, memory.stalled).await;

        let chitchat = incarnation.handle.chitchat();
        // A stuck gossip task may hold the lock.
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
        // Until the delay is over this incarnation continues. Peers show the other incarnation meanwhile.
        (memory.overtaken.is_some() && Instant::now() >= memory.not_before).then_some(Restart::Overtaken)
    }

    /// Makes this process silent when no other process reaches it any more. Processes that still hear it
    /// would keep it as a member, and it cannot tell them: chitchat sends values only in answer to what it
    /// hears.
    fn silence_if_deaf(&self, memory: &mut Memory) {
        let Some(after) = self.deaf_after.filter(|_| !flawed(Flaw::NeverSilent)) else { return };
        let reachability = &self.state.reachability;
        let signs = reachability.signs();
        // A process that has never heard another one is no member anywhere: its datagrams are unproven.
        let reached = signs != memory.signs || signs == 0;
        memory.signs = signs;
        memory.unreached = if reached { 0 } else { memory.unreached.saturating_add(1) };
        let deaf = !reachability.is_held() && self.timing.interval * memory.unreached >= self.at_least(after);
        // A sign since the comparison above causes one interval of silence.
        let was_silent = reachability.set_silent(deaf);
        if deaf && !was_silent {
            tracing::warn!(
                after = ?self.at_least(after),
                "no other process reaches this one: gossip is silent until it hears one, so that the others stop \
                 sending requests here"
            );
        }
    }

    /// Looks at the members without waiting for the next interval, because values have arrived.
    async fn peek(&self, incarnation: &mut Incarnation) {
        let chitchat = incarnation.handle.chitchat();
        let look = match timeout(self.timing.interval, chitchat.lock()).await {
            Ok(chitchat) => self.look(&chitchat, incarnation),
            // The next tick decides whether the task is stuck.
            Err(_) => return,
        };
        self.set_members(look.members, incarnation);
    }

    /// Writes the published values into chitchat's state, with the value of the health gate while heartbeats
    /// are missing.
    async fn write(&self, incarnation: &mut Incarnation, stalled: u32) {
        let is_hung =
            self.health_gate.as_ref().is_some_and(|gate| self.timing.interval * stalled >= gate.after);
        let (values, revision) = {
            let published = self.state.published();
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
            let gate = self.health_gate.as_ref().filter(|gate| is_hung && *gate.key == **key);
            state.set(key, gate.map_or(&**value, |gate| &gate.value));
        }
        let was_hung = incarnation.written.replace((revision, is_hung)).is_some_and(|(_, hung)| hung);
        if is_hung != was_hung {
            tracing::warn!(hung = is_hung, "the heartbeat of the main runtime stopped or returned");
        }
    }

    /// Reads from chitchat's state which members are live and what they published.
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
        // For each node id, the newest generation that may be shown, and whether any generation is live.
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
                // The first value may come from old state that others passed on.
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
            // For chitchat, a new incarnation is live after its second heartbeat, and the one before it is
            // live until phi is exceeded. Here, the new incarnation replaces the old one with its first
            // heartbeat.
            let is_fresh = (track.has_advanced || flawed(Flaw::HearsayIsLife))
                && state.max_version() > 0
                && now.duration_since(track.heard.last()) < self.timing.interval * 5;
            if !is_live && !is_fresh {
                continue;
            }
            let entry = newest.entry(Arc::clone(&id.node_id)).or_insert((id, false));
            entry.1 |= is_live || flawed(Flaw::HearsayIsLife);
            let (this, other) = (id.generation_id, entry.0.generation_id);
            let replaces = if flawed(Flaw::OldGenerationStays) { this <= other } else { this >= other };
            if replaces {
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

    /// Returns the member: the same `Arc` as before unless its values changed.
    fn member(&self, id: &ChitchatId, state: &NodeState, track: &mut Track) -> Arc<Member> {
        if let Some(member) = track.member.as_ref().filter(|_| track.version == state.max_version()) {
            return Arc::clone(member);
        }
        let before = track.member.as_ref().map(|member| &member.values);
        let mut values = Values::new();
        for (key, value) in state.key_values() {
            // A member may send anything. Values that `publish` would refuse are not shown.
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

    /// Publishes the list of members if anything but `heard` has changed.
    fn set_members(&self, mut members: BTreeMap<Arc<str>, Arc<Member>>, incarnation: &mut Incarnation) {
        let now = Instant::now();
        let pause = now.duration_since(std::mem::replace(&mut incarnation.looked, now));
        if pause > self.timing.interval * PAUSE && incarnation.carry.is_empty() {
            // This process was stalled. It has not read yet what the others sent meanwhile, so their silence
            // proves nothing. Not twice in a row: a process that is always late would never drop dead
            // members.
            incarnation.carry = Arc::clone(&self.members.borrow());
            incarnation.carry_until = now + self.timing.interval * PAUSE;
        }
        if now < incarnation.carry_until {
            // A restart of our own task must not look like the death of all others either.
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
                tracing::warn!(
                    seeds = memory.seeds.len(),
                    "lonely: seeds name other processes but none is heard"
                );
            }
            (Status::Lonely { .. }, _) => tracing::info!("no longer lonely"),
            _ => {}
        }
        self.status.send_replace(status);
    }

    /// Gossips with a seed that is not a live member. This is how a mesh forms and how partitions heal. Done
    /// in each interval while no member is heard, otherwise in every second interval on average.
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

    /// Sends the last values to some members, because chitchat has no leave message.
    async fn send_last_values(&self, incarnation: &mut Incarnation) {
        // Enough that the others receive them in one more round even if some datagrams are lost.
        const RECEIVERS: usize = 16;
        self.write(incarnation, 0).await;
        let members = Arc::clone(&self.members.borrow());
        for member in members.iter().sample(&mut rand::rng(), RECEIVERS) {
            let _ = incarnation.handle.gossip(member.address);
        }
        if !members.is_empty() {
            // A handshake takes three datagrams. The answers are sent within one interval.
            tokio::time::sleep(self.timing.interval).await;
        }
    }
}
