//! The copies of everyone's sets: when an operation counts, when a copy is answered, when it dies.
//!
//! A [`Table`] has one copy per replica: that of the highest epoch seen of it. Operations come from
//! the replica's stream and from gossip's `chg`, by one code path: applied only one above the copy's
//! version; lower ones are skipped; a gap on a stream asks for a snapshot, a gap in gossip is only
//! remembered. A snapshot grows beside the copy and replaces it once it is as new.
//!
//! | seen | the copy is |
//! | --- | --- |
//! | stream ended, gossip says gone, hung, redial unanswered | suspect: tried last |
//! | redial refused, or another process answers there | not tried |
//! | gossip and stream both say gone; no proof of life for the ttl; `left`; newer epoch | dropped |
//!
//! Time comes only from the caller. Events may come in any order; an event of a stream that was
//! closed is ignored.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt, mem,
    sync::Arc,
    time::Duration,
};

use ids::{AgentId, ReplicaId};
use tokio::time::Instant;

use crate::{
    ChunkHeader, Epoch, IdSet, Identity, Message, Op, Record, State, Summary, Version, codec,
    flaw::{Flaw, flawed},
};

/// Bounds and times. The defaults are the design's; each says what gets worse either way.
#[derive(Debug, Clone)]
pub struct Limits {
    /// A copy is answered this long after its owner's last proof of life. Shorter: a pause of the
    /// owner costs a snapshot; longer: a vanished owner is asked in vain for longer.
    pub ttl: Duration,
    /// A dial without a hello for this long is the stream's vote that the owner is gone.
    pub answer: Duration,
    /// An open stream without a message for this long is cut: three beats.
    pub silence: Duration,
    /// A copy may be behind what is known for this long before it is synced anew.
    pub behind: Duration,
    /// A dropped replica is remembered this long, so that its old epochs stay ignored.
    pub forget: Duration,
    /// Replicas known at a time, dropped ones included; also seeds.
    pub replicas: usize,
    /// Ids in one copy; an owner with more stays unsynced and is asked directly.
    pub ids: usize,
    /// Operations kept while a snapshot arrives.
    pub kept: usize,
    /// Masks per replica; beyond, all are given up, which costs an ask each.
    pub masks: usize,
    /// Snapshots asked for at a time.
    pub snapshots: usize,
    /// Agents named in one wake; beyond, everyone is woken.
    pub woken: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            ttl: Duration::from_secs(10),
            answer: Duration::from_secs(2),
            silence: Duration::from_secs(6),
            behind: Duration::from_secs(3),
            forget: Duration::from_secs(600),
            replicas: 1024,
            ids: 5_000_000,
            kept: 64 * 1024,
            masks: 4096,
            snapshots: 8,
            woken: 1024,
        }
    }
}

/// Time between resyncs of one copy: doubled from the first to the second, reset once the copy
/// was good for as long as the second.
const RESYNC: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(30));
/// The same for dials of a known replica.
const REDIAL: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(1));
/// The same for seeds that name no known replica.
const RESEED: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(5));
/// A stream that was open this long is dialled again at once.
const STEADY: Duration = Duration::from_secs(1);

/// One dial and the stream that it became. Never used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StreamId(pub u64);

/// A live replica as gossip shows it.
#[derive(Debug, Clone)]
pub struct Member {
    /// Its name.
    pub replica: ReplicaId,
    /// Orders gossip's incarnations of the same name; of several, the highest counts.
    pub generation: u64,
    /// Where its private API listens.
    pub address: Arc<str>,
    /// Gossip's `st`.
    pub state: State,
    /// Gossip's `tbl`.
    pub summary: Option<Summary>,
    /// Gossip's `chg`.
    pub changes: Option<Record>,
    /// When its heartbeat last advanced here: the proof of life.
    pub heard: Instant,
}

/// How a stream ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Failure {
    /// Nobody listens there: the stream's vote that the owner is gone.
    Refused,
    /// No answer in time: the same vote. (Told by a transport that has a timeout of its own; the
    /// table counts [`Limits::answer`] itself.)
    Unanswered,
    /// End of stream, reset, an error status: the owner is suspect until a redial tells more.
    Ended,
}

/// What the user of a [`Table`] is to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Open a stream. Tell each message by [`Table::message`] and its end by [`Table::failed`].
    Dial {
        /// Its id in both.
        stream: StreamId,
        /// The replica, unless a seed is dialled.
        replica: Option<ReplicaId>,
        /// Where.
        address: Arc<str>,
        /// What to ask for: what the copy has; `None` asks for a snapshot.
        resume: Option<(Epoch, Version)>,
    },
    /// Close a stream, or stop dialling; nothing of it counts any more.
    Close {
        /// Which.
        stream: StreamId,
    },
    /// `locate` may answer differently for these agents.
    Wake(Vec<AgentId>),
    /// `locate` may answer differently for anyone.
    WakeAll,
    /// `replicas` or `unsynced` may answer differently: asks go out anew.
    ReplicasChanged,
}

/// How far a replica is trusted, in the order in which replicas are asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Standing {
    /// Nobody says otherwise.
    Live,
    /// It says that it will leave.
    Draining,
    /// Gossip or its stream says gone, or it hangs: asked last, with a short timeout.
    Suspect,
    /// Nobody listens at its address: not asked, but kept until gossip agrees or the ttl ends.
    Unreachable,
    /// No proof of life for the ttl, or left, or both votes: not asked, its copy is dropped.
    Gone,
}

impl fmt::Display for Standing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Live => "live",
            Self::Draining => "draining",
            Self::Suspect => "suspect",
            Self::Unreachable => "unreachable",
            Self::Gone => "gone",
        })
    }
}

/// What gossip says of a replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GossipVote {
    /// Never heard: no vote.
    Unheard,
    /// In the last view.
    Live,
    /// Heard before, not in the last view.
    Gone,
}

/// What the last dial of a replica says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StreamVote {
    /// It answered, or was not dialled yet.
    None,
    /// A stream ended, and the redial has not told yet. No vote, but suspect.
    Lost,
    /// The redial was not answered: gone.
    Unanswered,
    /// The redial was refused, or another process answered: gone.
    Refused,
}

/// What the table stream of a replica does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LinkState {
    /// Waits to be dialled.
    Idle,
    /// Dialled, no hello yet.
    Dialing,
    /// Open, and a snapshot is awaited.
    Syncing,
    /// Open.
    Open,
}

/// A replica to ask for an agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Candidate {
    /// Its name.
    pub replica: ReplicaId,
    /// Where its private API listens.
    pub address: Arc<str>,
    /// Live, draining or suspect.
    pub standing: Standing,
}

/// What the copy of one replica says about an agent, and how far that counts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Belief {
    /// The replica.
    pub replica: ReplicaId,
    /// Its epoch, once known.
    pub epoch: Option<Epoch>,
    /// The version of the copy; `None` before the first snapshot.
    pub version: Option<Version>,
    /// How far the replica is trusted.
    pub standing: Standing,
    /// Whether the copy is complete and current, so that an absent agent means something.
    pub synced: bool,
    /// Whether the copy has the agent.
    pub holds: bool,
    /// The owner said `not here` at this version, and the copy is not newer.
    pub masked: Option<Version>,
    /// Whether a request for the agent goes there: as a candidate, or because it is not synced.
    pub asked: bool,
}

/// As `kasctl why` prints it.
impl fmt::Display for Belief {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} is {}", self.replica, self.standing)?;
        match self.version {
            Some(version) if self.holds => write!(f, ", has the agent at version {version}")?,
            Some(version) => write!(f, ", does not have the agent at version {version}")?,
            None => f.write_str(", its table has not arrived")?,
        }
        if let Some(masked) = self.masked {
            write!(f, ", but said not here at version {masked}")?;
        }
        if !self.synced {
            f.write_str(", not synced")?;
        }
        f.write_str(if self.asked { ": asked" } else { ": not asked" })
    }
}

/// Everything known of one replica, as `kasctl replicas` shows it.
#[derive(Debug, Clone)]
pub struct ReplicaView {
    /// Its name.
    pub replica: ReplicaId,
    /// Where its private API listens.
    pub address: Arc<str>,
    /// The highest epoch seen of it.
    pub epoch: Option<Epoch>,
    /// What it last said of itself.
    pub state: State,
    /// How far it is trusted.
    pub standing: Standing,
    /// Whether the copy is complete and current.
    pub synced: bool,
    /// What its stream does.
    pub link: LinkState,
    /// The version of the copy.
    pub version: Option<Version>,
    /// The highest version that anything told.
    pub known: Version,
    /// Agents in the copy.
    pub count: usize,
    /// Digest of the copy.
    pub digest: u64,
    /// Bytes of the copy on the heap.
    pub heap_bytes: usize,
    /// Agents masked by `not here`.
    pub masked: usize,
    /// Since the last proof of life.
    pub proof_age: Duration,
    /// Gossip's vote.
    pub gossip: GossipVote,
    /// The stream's vote.
    pub stream: StreamVote,
    /// Resyncs in a row.
    pub resyncs: u32,
    /// Dials in a row that failed.
    pub failures: u32,
}

/// The copies of all other replicas' sets.
#[derive(Debug, Clone)]
pub struct Table {
    me: ReplicaId,
    limits: Limits,
    peers: BTreeMap<ReplicaId, Peer>,
    seeds: BTreeMap<Arc<str>, Seed>,
    streams: BTreeMap<StreamId, Target>,
    next_stream: u64,
    /// The last instant that was told: a jump means that this process was paused.
    seen: Instant,
    /// After a pause nothing is dropped before this: its owners could not be heard.
    spare_until: Instant,
    /// A snapshot ended, so another replica may ask for its own.
    freed: bool,
    /// Replicas and seeds that found no room.
    refused: u64,
    out: Out,
}

#[derive(Debug, Clone)]
enum Target {
    Peer(ReplicaId),
    Seed(Arc<str>),
}

#[derive(Debug, Clone)]
struct Seed {
    link: Link,
    failures: u32,
    /// Who answered there last.
    replica: Option<ReplicaId>,
}

#[derive(Debug, Clone, Copy)]
enum Link {
    Idle { retry: Instant },
    Dialing { stream: StreamId, since: Instant, snapshot: bool },
    Open { stream: StreamId, since: Instant, heard: Instant },
}

impl Link {
    const fn stream(self) -> Option<StreamId> {
        match self {
            Self::Idle { .. } => None,
            Self::Dialing { stream, .. } | Self::Open { stream, .. } => Some(stream),
        }
    }

    /// Whether a snapshot was asked for and nothing came yet.
    const fn asks_snapshot(self) -> bool {
        matches!(self, Self::Dialing { snapshot: true, .. })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Want {
    Resume,
    Snapshot,
}

#[derive(Debug, Clone)]
struct Peer {
    address: Arc<str>,
    state: State,
    /// What gossip said last, so that an old word repeated does not overrule a newer one.
    gossip_state: Option<State>,
    epoch: Option<Epoch>,
    proof: Instant,
    dropped: Option<Instant>,
    gossip: GossipVote,
    generation: u64,
    gossip_heard: Option<Instant>,
    stream: StreamVote,
    link: Link,
    failures: u32,
    copy: Mirror,
    /// What [`Action::ReplicasChanged`] last told.
    face: (Standing, bool),
}

#[derive(Debug, Clone, Default)]
struct Mirror {
    ids: IdSet,
    /// `None` before the first snapshot.
    version: Option<Version>,
    /// The highest version that was ever shown in this epoch; outlives a drop of the set, so that
    /// what comes back is never older than what was answered before.
    shown: Version,
    /// The highest version that anything told.
    known: Version,
    /// Since when the copy is not what is known, or a snapshot does not move on.
    behind: Option<Instant>,
    /// The stream announced a snapshot that is not swapped in yet.
    awaiting: bool,
    shadow: Option<Shadow>,
    want: Option<(Instant, Want)>,
    resyncs: u32,
    resynced: Option<Instant>,
    masks: BTreeMap<AgentId, Version>,
}

/// A snapshot that arrives beside the copy.
#[derive(Debug, Clone)]
struct Shadow {
    version: Version,
    next: u32,
    complete: bool,
    last: Option<AgentId>,
    ids: IdSet,
    /// Operations above the snapshot's version, by version.
    kept: BTreeMap<Version, Op>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Source {
    Stream,
    Gossip,
}

/// What events left to do.
#[derive(Debug, Clone, Default)]
struct Out {
    actions: Vec<Action>,
    woken: BTreeSet<AgentId>,
    all: bool,
    changed: bool,
}

impl Out {
    fn wake(&mut self, agent: AgentId, bound: usize) {
        if !self.all {
            self.woken.insert(agent);
            if self.woken.len() > bound {
                self.wake_all();
            }
        }
    }

    fn wake_all(&mut self) {
        self.all = true;
        self.woken.clear();
    }

    fn wake_set(&mut self, ids: &IdSet, bound: usize) {
        if ids.len() > bound {
            self.wake_all();
        } else {
            for id in ids.iter() {
                self.wake(id, bound);
            }
        }
    }
}

/// `first << (times − 1)`, at most `most`.
fn backoff((first, most): (Duration, Duration), times: u32) -> Duration {
    first.saturating_mul(1 << times.saturating_sub(1).min(16)).min(most)
}

impl Mirror {
    /// Asks for a resync, at once if the last one is long ago. The first of several asks sets the
    /// time; a snapshot wins over a resume.
    fn resync(&mut self, want: Want, now: Instant) {
        if let Some((_, old)) = &mut self.want {
            if want == Want::Snapshot {
                *old = want;
            }
            return;
        }
        if self.resynced.is_some_and(|at| now.saturating_duration_since(at) > RESYNC.1 * 2) {
            self.resyncs = 0;
        }
        let wait = if self.resyncs == 0 || flawed(Flaw::NoBackoff) {
            Duration::ZERO
        } else {
            backoff(RESYNC, self.resyncs)
        };
        self.resyncs = self.resyncs.saturating_add(1);
        self.resynced = Some(now);
        self.want = Some((now + wait, want));
    }

    /// Offers operations `from + 1 ..` to the copy and to a snapshot that is on its way.
    fn offer(
        &mut self,
        from: Version,
        ops: &[Op],
        source: Source,
        limits: &Limits,
        out: &mut Out,
        now: Instant,
    ) {
        let (mut gap, mut wrong, mut version) = (false, false, from);
        let end = from.0.saturating_add(ops.len() as u64);
        // Most of what gossip repeats is known: five times a second from everyone.
        let old = self.shadow.is_none() && self.version.is_some_and(|version| version.0 >= end);
        if old && !flawed(Flaw::AnyVersion) {
            return;
        }
        for op in ops {
            let Some(next) = version.next() else { return };
            version = next;
            self.known = self.known.max(version);
            if let Some(shadow) = &mut self.shadow
                && !flawed(Flaw::OpsLostBySwap)
            {
                match shadow.offer(version, *op, limits) {
                    Ok(()) => {}
                    Err(Offer::Gap) => gap = true,
                    Err(Offer::Wrong) => wrong = true,
                }
            }
            let at = match self.version {
                Some(at) => at,
                // Version 0 of an epoch is the empty set: no snapshot is needed to begin there.
                None if version == Version(1) && end >= self.shown.0 => Version(0),
                None => {
                    gap |= self.shadow.is_none();
                    continue;
                }
            };
            if at.next() == Some(version) || flawed(Flaw::AnyVersion) {
                let full = self.ids.len() >= limits.ids;
                wrong |= match *op {
                    Op::Add(agent) => full || !self.ids.insert(agent),
                    Op::Remove(agent) => !self.ids.remove(agent),
                };
                self.version = Some(version);
                self.shown = self.shown.max(version);
                out.wake(op.agent(), limits.woken);
            } else if version > at {
                gap |= self.shadow.is_none();
            }
        }
        self.swap(limits, out);
        self.unmask(limits, out);
        // An operation without effect means that the sets differ: no need to wait for a digest.
        if wrong || (gap && source == Source::Stream) {
            self.resync(Want::Snapshot, now);
        }
    }

    /// Replaces the copy by a complete snapshot, unless that is older: then the stream brings it up.
    fn swap(&mut self, limits: &Limits, out: &mut Out) {
        let ready = self.shadow.as_ref().is_some_and(|shadow| {
            shadow.complete && (shadow.version >= self.shown || flawed(Flaw::OldSnapshotWins))
        });
        let Some(shadow) = self.shadow.take_if(|_| ready) else { return };
        let old = mem::replace(&mut self.ids, shadow.ids);
        self.version = Some(shadow.version);
        self.shown = self.shown.max(shadow.version);
        self.awaiting = false;
        self.known = self.known.max(shadow.version);
        if old.len().abs_diff(self.ids.len()) > limits.woken {
            out.wake_all();
            return;
        }
        for id in self.ids.iter().filter(|id| !old.contains(*id)) {
            out.wake(id, limits.woken);
        }
        for id in old.iter().filter(|id| !self.ids.contains(*id)) {
            out.wake(id, limits.woken);
        }
    }

    /// Drops the masks that a higher version voids.
    fn unmask(&mut self, limits: &Limits, out: &mut Out) {
        if let Some(version) = self.version
            && !self.masks.is_empty()
            && !flawed(Flaw::StickyMask)
        {
            self.masks.retain(|&agent, masked| {
                let keep = *masked >= version;
                if !keep {
                    out.wake(agent, limits.woken);
                }
                keep
            });
        }
    }

    /// Compares at an equal version, and remembers a higher one.
    fn compare(&mut self, summary: &Summary, now: Instant) {
        self.known = self.known.max(summary.version);
        if self.version != Some(summary.version) || self.shadow.is_some() || flawed(Flaw::NoDigest) {
            return;
        }
        if self.ids.digest() != summary.digest || self.ids.len() as u64 != summary.count {
            self.resync(Want::Snapshot, now);
        }
    }

    /// Forgets the set, not what is known of the epoch.
    fn clear(&mut self, limits: &Limits, out: &mut Out) {
        out.wake_set(&self.ids, limits.woken);
        self.ids = IdSet::default();
        self.version = None;
        self.behind = None;
        self.awaiting = false;
        self.shadow = None;
        self.want = None;
        self.masks.clear();
    }
}

enum Offer {
    Gap,
    Wrong,
}

impl Shadow {
    fn offer(&mut self, version: Version, op: Op, limits: &Limits) -> Result<(), Offer> {
        if version <= self.version {
            return Ok(());
        }
        if self.kept.len() >= limits.kept && !self.kept.contains_key(&version) {
            return Err(Offer::Wrong);
        }
        self.kept.insert(version, op);
        if self.complete { self.catch_up(limits) } else { Ok(()) }
    }

    fn catch_up(&mut self, limits: &Limits) -> Result<(), Offer> {
        while let Some(next) = self.version.next()
            && let Some(op) = self.kept.remove(&next)
        {
            self.version = next;
            let good = match op {
                Op::Add(agent) => self.ids.len() < limits.ids && self.ids.insert(agent),
                Op::Remove(agent) => self.ids.remove(agent),
            };
            if !good {
                return Err(Offer::Wrong);
            }
        }
        if self.kept.is_empty() { Ok(()) } else { Err(Offer::Gap) }
    }
}

impl Peer {
    fn new(address: Arc<str>, state: State, now: Instant) -> Self {
        Self {
            address,
            state,
            gossip_state: None,
            epoch: None,
            proof: now,
            dropped: None,
            gossip: GossipVote::Unheard,
            generation: 0,
            gossip_heard: None,
            stream: StreamVote::None,
            link: Link::Idle { retry: now },
            failures: 0,
            copy: Mirror::default(),
            face: (Standing::Gone, false),
        }
    }

    fn standing(&self, limits: &Limits, now: Instant) -> Standing {
        let expired = now >= self.proof + limits.ttl && !flawed(Flaw::NoExpiry);
        if self.dropped.is_some() || self.state == State::Left || expired {
            Standing::Gone
        } else if self.stream == StreamVote::Refused {
            Standing::Unreachable
        } else if self.gossip == GossipVote::Gone
            || self.stream != StreamVote::None
            || self.state == State::Hung
        {
            Standing::Suspect
        } else if self.state == State::Draining {
            Standing::Draining
        } else {
            Standing::Live
        }
    }

    const fn link_state(&self) -> LinkState {
        match self.link {
            Link::Idle { .. } => LinkState::Idle,
            Link::Dialing { .. } => LinkState::Dialing,
            Link::Open { .. } if self.copy.awaiting => LinkState::Syncing,
            Link::Open { .. } => LinkState::Open,
        }
    }

    /// Whether a snapshot was asked for, or arrives.
    const fn takes_snapshot(&self) -> bool {
        self.link.asks_snapshot() || matches!(self.link_state(), LinkState::Syncing)
    }

    /// Whether the set is there and no repair is under way; it may still be behind.
    fn steady(&self) -> bool {
        self.link_state() == LinkState::Open && self.copy.version.is_some() && self.copy.want.is_none()
    }

    /// Whether an agent that the copy does not have is surely absent there.
    fn synced(&self) -> bool {
        self.steady() && self.copy.version.is_some_and(|version| version >= self.copy.known)
    }

    /// Whether both votes say gone.
    fn outvoted(&self) -> bool {
        let stream = matches!(self.stream, StreamVote::Refused | StreamVote::Unanswered);
        let gossip = self.gossip == GossipVote::Gone;
        if flawed(Flaw::OneVoteKills) { stream || gossip } else { stream && gossip }
    }

    fn masked(&self, agent: AgentId) -> Option<Version> {
        let masked = *self.copy.masks.get(&agent)?;
        let void = self.copy.version.is_some_and(|version| version > masked) && !flawed(Flaw::StickyMask);
        (!void).then_some(masked)
    }

    /// Within an epoch a replica never comes back from draining or left.
    fn set_state(&mut self, state: State) {
        if self.state < State::Draining || state > self.state {
            self.state = state;
        }
    }
}

impl Table {
    /// Returns an empty table for the replica `me`, whose own streams and gossip it ignores.
    pub fn new(me: ReplicaId, limits: Limits, now: Instant) -> Self {
        Self {
            me,
            limits,
            peers: BTreeMap::new(),
            seeds: BTreeMap::new(),
            streams: BTreeMap::new(),
            next_stream: 1,
            seen: now,
            spare_until: now,
            freed: false,
            refused: 0,
            out: Out::default(),
        }
    }

    // Events.

    /// Takes gossip's whole view: who is live. A replica heard before and absent now is voted gone.
    pub fn gossip(&mut self, members: &[Member], now: Instant) {
        self.observe(now);
        let mut latest: BTreeMap<&ReplicaId, &Member> = BTreeMap::new();
        for member in members.iter().filter(|member| member.replica != self.me) {
            let best = latest.entry(&member.replica).or_insert(member);
            if member.generation > best.generation {
                *best = member;
            }
        }
        for (replica, member) in &latest {
            self.member(replica, member, now);
        }
        let absent: Vec<_> =
            self.peers.keys().filter(|replica| !latest.contains_key(replica)).cloned().collect();
        for replica in absent {
            self.gossip_gone(&replica, now);
        }
        self.flush(now);
    }

    /// Takes gossip's vote that one replica is gone. It counts only if gossip has heard it.
    pub fn gossip_gone(&mut self, replica: &ReplicaId, now: Instant) {
        self.observe(now);
        if let Some(peer) = self.peers.get_mut(replica)
            && peer.gossip == GossipVote::Live
        {
            peer.gossip = GossipVote::Gone;
            self.settle(replica, now);
        }
        self.flush(now);
    }

    /// Our own gossip task starts anew: it has heard nobody, so it votes about nobody.
    pub fn gossip_restarted(&mut self, now: Instant) {
        self.observe(now);
        for peer in self.peers.values_mut() {
            peer.gossip = GossipVote::Unheard;
        }
        self.settle_all(now);
        self.flush(now);
    }

    /// Takes discovery's whole set of addresses. Those that no known replica has are dialled too, so
    /// that everything works while UDP is blocked.
    pub fn seeds(&mut self, addresses: impl IntoIterator<Item = Arc<str>>, now: Instant) {
        self.observe(now);
        let addresses: BTreeSet<_> = addresses.into_iter().collect();
        let gone: Vec<_> = self.seeds.keys().filter(|seed| !addresses.contains(*seed)).cloned().collect();
        for address in gone {
            if let Some(seed) = self.seeds.remove(&address) {
                self.close(seed.link);
            }
        }
        for address in addresses {
            if self.seeds.len() >= self.limits.replicas && !self.seeds.contains_key(&address) {
                self.refused += 1;
                continue;
            }
            let seed = Seed { link: Link::Idle { retry: now }, failures: 0, replica: None };
            self.seeds.entry(address).or_insert(seed);
        }
        self.settle_all(now);
        self.flush(now);
    }

    /// Takes one message of a stream; `from` comes with hello and beat.
    ///
    /// The first message must be a hello. A peer that breaks the protocol loses its stream.
    pub fn message(&mut self, stream: StreamId, from: Option<Identity>, message: Message, now: Instant) {
        self.observe(now);
        match (self.streams.get(&stream).cloned(), message) {
            (None, _) => {}
            (Some(target), Message::Hello { epoch, version, resumed }) => match from {
                Some(from) if from.epoch == epoch => self.hello(stream, target, &from, version, resumed, now),
                _ => self.break_off(stream, now),
            },
            (Some(Target::Peer(replica)), message) => self.content(&replica, stream, from, message, now),
            (Some(Target::Seed(_)), _) => self.break_off(stream, now),
        }
        self.flush(now);
    }

    /// Takes the end of a stream, or of an attempt to open it.
    pub fn failed(&mut self, stream: StreamId, failure: Failure, now: Instant) {
        self.observe(now);
        self.fail(stream, failure, now);
        self.flush(now);
    }

    /// Takes an owner's answer that it has no tunnel of `agent` at a version of its table.
    pub fn not_here(
        &mut self,
        replica: &ReplicaId,
        epoch: Epoch,
        version: Version,
        agent: AgentId,
        now: Instant,
    ) {
        self.observe(now);
        if self.peers.contains_key(replica) && self.epoch(replica, epoch, now) {
            let Self { peers, limits, out, .. } = self;
            if let Some(Peer { copy, .. }) = peers.get_mut(replica) {
                copy.known = copy.known.max(version);
                // An answer older than the copy says nothing about it.
                if copy.version.is_none_or(|at| at <= version) {
                    if copy.masks.len() >= limits.masks {
                        for agent in mem::take(&mut copy.masks).into_keys() {
                            out.wake(agent, limits.woken);
                        }
                    }
                    let masked = copy.masks.entry(agent).or_insert(version);
                    *masked = version.max(*masked);
                }
            }
            self.settle(replica, now);
        }
        self.flush(now);
    }

    /// Does what is due by now. To be called at [`Table::deadline`], or every 50 ms or so.
    pub fn tick(&mut self, now: Instant) {
        self.observe(now);
        self.settle_all(now);
        self.flush(now);
    }

    /// Returns when [`Table::tick`] has something to do, if no event comes before.
    pub fn deadline(&self, now: Instant) -> Instant {
        let limits = &self.limits;
        let link = |link: &Link, dialable: bool| match *link {
            Link::Idle { retry } => dialable.then_some(retry),
            Link::Dialing { since, .. } => Some(since + limits.answer),
            Link::Open { heard, .. } => Some(heard + limits.silence),
        };
        let peers = self.peers.values().flat_map(|peer| {
            let alive = peer.dropped.is_none() && peer.state != State::Left;
            let timers = [
                link(&peer.link, alive),
                alive.then_some((peer.proof + limits.ttl).max(self.spare_until)),
                peer.copy.want.map(|(at, _)| at),
                peer.copy.behind.map(|since| since + limits.behind),
                peer.dropped.map(|at| at + limits.forget),
            ];
            timers.into_iter().flatten()
        });
        let seeds = self.seeds.iter().filter_map(|(at, seed)| link(&seed.link, !self.is_met(at, seed)));
        // A link that waits for a permit is late already: the floor keeps that from spinning.
        let (floor, ceiling) = (now + Duration::from_millis(20), now + Duration::from_secs(1));
        peers.chain(seeds).min().unwrap_or(ceiling).clamp(floor, ceiling)
    }

    /// Returns what is to do since the last call, in order. To be called after every event.
    pub fn actions(&mut self) -> Vec<Action> {
        let mut actions = mem::take(&mut self.out.actions);
        if mem::take(&mut self.out.all) {
            actions.push(Action::WakeAll);
        } else if !self.out.woken.is_empty() {
            actions.push(Action::Wake(mem::take(&mut self.out.woken).into_iter().collect()));
        }
        if mem::take(&mut self.out.changed) {
            actions.push(Action::ReplicasChanged);
        }
        actions
    }

    // Queries.

    /// Returns the replicas to ask for `agent`: live ones first, then draining, then suspect.
    /// Empty means unknown, and absent only if [`Table::unsynced`] is empty too.
    pub fn locate(&self, agent: AgentId, now: Instant) -> Vec<Candidate> {
        let holds = |peer: &Peer| peer.copy.ids.contains(agent) && peer.masked(agent).is_none();
        self.candidates(now, holds)
    }

    /// Returns the replicas whose copies prove nothing by absence: asked directly for any agent.
    pub fn unsynced(&self, now: Instant) -> Vec<Candidate> {
        // After a pause of ours a copy may be expired and its owner live.
        let mut found = self.candidates(now, |peer| !peer.synced());
        let expired = |peer: &Peer| {
            peer.dropped.is_none()
                && peer.state != State::Left
                && peer.stream != StreamVote::Refused
                && peer.standing(&self.limits, now) == Standing::Gone
        };
        found.extend(self.peers.iter().filter(|(_, peer)| expired(peer)).map(|(replica, peer)| Candidate {
            replica: replica.clone(),
            address: peer.address.clone(),
            standing: Standing::Suspect,
        }));
        found
    }

    /// Whether `agent` was said to be `not here` by `replica`, and nothing newer is known.
    pub fn is_masked(&self, replica: &ReplicaId, agent: AgentId) -> bool {
        self.peers.get(replica).is_some_and(|peer| peer.masked(agent).is_some())
    }

    /// Whether everyone who is known to live is synced and each seed was tried: time to be ready.
    pub fn is_settled(&self, now: Instant) -> bool {
        let tried = |(address, seed): (&Arc<str>, &Seed)| seed.failures > 0 || self.is_met(address, seed);
        self.unsynced(now).is_empty() && self.seeds.iter().all(tried)
    }

    /// Returns what each copy says about `agent`, and why it is or is not asked.
    pub fn explain(&self, agent: AgentId, now: Instant) -> Vec<Belief> {
        let belief = |(replica, peer): (&ReplicaId, &Peer)| {
            let standing = peer.standing(&self.limits, now);
            let (holds, masked) = (peer.copy.ids.contains(agent), peer.masked(agent));
            let hinted = masked.is_none() && (holds || !peer.synced());
            Belief {
                replica: replica.clone(),
                epoch: peer.epoch,
                version: peer.copy.version,
                standing,
                synced: peer.synced(),
                holds,
                masked,
                asked: standing <= Standing::Suspect && hinted,
            }
        };
        self.peers.iter().map(belief).collect()
    }

    /// Returns everything known of every replica, dropped ones included until they are forgotten.
    pub fn replicas(&self, now: Instant) -> Vec<ReplicaView> {
        let view = |(replica, peer): (&ReplicaId, &Peer)| ReplicaView {
            replica: replica.clone(),
            address: peer.address.clone(),
            epoch: peer.epoch,
            state: peer.state,
            standing: peer.standing(&self.limits, now),
            synced: peer.synced(),
            link: peer.link_state(),
            version: peer.copy.version,
            known: peer.copy.known,
            count: peer.copy.ids.len(),
            digest: peer.copy.ids.digest(),
            heap_bytes: peer.copy.ids.heap_bytes(),
            masked: peer.copy.masks.len(),
            proof_age: now.saturating_duration_since(peer.proof),
            gossip: peer.gossip,
            stream: peer.stream,
            resyncs: peer.copy.resyncs,
            failures: peer.failures,
        };
        self.peers.iter().map(view).collect()
    }

    /// Returns the copy of one replica's set.
    pub fn agents(&self, replica: &ReplicaId) -> Option<&IdSet> {
        self.peers.get(replica).map(|peer| &peer.copy.ids)
    }

    /// Returns how many other replicas live, heard by gossip or by stream: `kas-replicas` is one more.
    ///
    /// One that gossip has lost while its stream is open is asked last and counts all the same: so it is with all of
    /// them when UDP is blocked.
    pub fn live(&self, now: Instant) -> usize {
        let lives = |peer: &&Peer| match peer.standing(&self.limits, now) {
            Standing::Live | Standing::Draining => true,
            Standing::Suspect => peer.state != State::Hung && matches!(peer.link, Link::Open { .. }),
            Standing::Unreachable | Standing::Gone => false,
        };
        self.peers.values().filter(lives).count()
    }

    /// Returns how many replicas and seeds were turned away for want of room, ever.
    pub const fn refused(&self) -> u64 {
        self.refused
    }

    fn candidates(&self, now: Instant, choose: impl Fn(&Peer) -> bool) -> Vec<Candidate> {
        let mut found: Vec<_> = self
            .peers
            .iter()
            .filter(|(_, peer)| choose(peer))
            .map(|(replica, peer)| Candidate {
                replica: replica.clone(),
                address: peer.address.clone(),
                standing: peer.standing(&self.limits, now),
            })
            .filter(|candidate| candidate.standing <= Standing::Suspect)
            .collect();
        found.sort_by_key(|candidate| candidate.standing);
        found
    }

    // What events do.

    /// Notices that this process was paused: what the streams have buffered proves nothing, so they
    /// are opened anew, and nobody is dropped for a silence that was ours.
    fn observe(&mut self, now: Instant) {
        let pause = now.saturating_duration_since(self.seen);
        self.seen = self.seen.max(now);
        if pause < self.limits.ttl / 2 {
            return;
        }
        self.spare_until = now + self.limits.answer;
        // Nor is a dial unanswered whose answer we could not read.
        let links = self.peers.values_mut().map(|peer| &mut peer.link);
        for link in links.chain(self.seeds.values_mut().map(|seed| &mut seed.link)) {
            if let Link::Dialing { since, .. } = link {
                *since = now;
            }
        }
        let open: Vec<_> = self
            .peers
            .values_mut()
            .filter(|peer| matches!(peer.link, Link::Open { .. }))
            .map(|peer| {
                peer.copy.shadow = None;
                mem::replace(&mut peer.link, Link::Idle { retry: now })
            })
            .collect();
        for link in open {
            self.close(link);
        }
    }

    fn member(&mut self, replica: &ReplicaId, member: &Member, now: Instant) {
        if !self.admit(replica, &member.address, member.state, now) {
            return;
        }
        let Some(peer) = self.peers.get_mut(replica) else { return };
        if member.generation < peer.generation {
            return;
        }
        peer.generation = member.generation;
        // Gossip's word counts for the epoch that it names; without one only before any is known.
        let current = match member.summary {
            Some(summary) => self.epoch(replica, summary.epoch, now),
            None => peer.epoch.is_none(),
        };
        let Self { peers, limits, out, .. } = self;
        let Some(peer) = peers.get_mut(replica) else { return };
        let advanced = peer.gossip_heard.is_none_or(|heard| member.heard > heard);
        if advanced {
            peer.gossip_heard = Some(member.heard);
        }
        if current {
            if advanced || peer.gossip == GossipVote::Unheard {
                peer.gossip = GossipVote::Live;
            }
            if advanced {
                peer.proof = peer.proof.max(member.heard);
            }
            peer.address = member.address.clone();
            if peer.gossip_state != Some(member.state) {
                peer.gossip_state = Some(member.state);
                peer.set_state(member.state);
            }
            if peer.dropped.is_some() && advanced && peer.state != State::Left {
                peer.dropped = None;
                peer.link = Link::Idle { retry: now };
            }
            if peer.dropped.is_none() && peer.state != State::Left {
                if let Some(record) = &member.changes
                    && Some(record.epoch) == peer.epoch
                {
                    let from = Version(record.first.0.saturating_sub(1));
                    peer.copy.offer(from, &record.ops, Source::Gossip, limits, out, now);
                }
                if let Some(summary) = &member.summary {
                    peer.copy.compare(summary, now);
                }
            }
        }
        self.settle(replica, now);
    }

    /// Makes room for a replica; false if there is none.
    fn admit(&mut self, replica: &ReplicaId, address: &Arc<str>, state: State, now: Instant) -> bool {
        if self.peers.contains_key(replica) {
            return true;
        }
        if self.peers.len() >= self.limits.replicas {
            let dropped = |(replica, peer): (&ReplicaId, &Peer)| Some((peer.dropped?, replica.clone()));
            let Some((_, oldest)) = self.peers.iter().filter_map(dropped).min() else {
                self.refused += 1;
                return false;
            };
            self.peers.remove(&oldest);
        }
        self.peers.insert(replica.clone(), Peer::new(address.clone(), state, now));
        true
    }

    /// Moves to a newer epoch, which drops what an older one left. False if `epoch` is the older.
    fn epoch(&mut self, replica: &ReplicaId, epoch: Epoch, now: Instant) -> bool {
        let Self { peers, limits, out, .. } = self;
        let Some(peer) = peers.get_mut(replica) else { return false };
        if peer.epoch == Some(epoch) {
            return true;
        }
        if peer.epoch.is_some_and(|known| known > epoch) && !flawed(Flaw::AnyEpoch) {
            return false;
        }
        peer.copy.clear(limits, out);
        peer.copy = Mirror::default();
        peer.epoch = Some(epoch);
        peer.proof = peer.proof.max(now);
        peer.dropped = None;
        // Another life: draining and left were the older one's.
        peer.state = State::Starting;
        peer.gossip_state = None;
        // Gossip has not heard this life: what it says of the older one is no vote.
        peer.gossip = GossipVote::Unheard;
        peer.stream = StreamVote::None;
        peer.failures = 0;
        let link = mem::replace(&mut peer.link, Link::Idle { retry: now });
        self.close(link);
        true
    }

    fn hello(
        &mut self,
        stream: StreamId,
        target: Target,
        from: &Identity,
        version: Version,
        resumed: bool,
        now: Instant,
    ) {
        let (link, asked) = match &target {
            Target::Peer(replica) => {
                let Some(peer) = self.peers.get_mut(replica) else { return };
                (mem::replace(&mut peer.link, Link::Idle { retry: now }), Some(replica.clone()))
            }
            Target::Seed(address) => {
                let Some(seed) = self.seeds.get_mut(address) else { return };
                // It rests while the replica that answered is dialled by its name; the wait is for one
                // that is not taken.
                seed.replica = Some(from.replica.clone());
                seed.failures = seed.failures.saturating_add(1);
                let retry = now + spread(backoff(RESEED, seed.failures), stream);
                (mem::replace(&mut seed.link, Link::Idle { retry }), None)
            }
        };
        if let Some(asked) = &asked
            && *asked != from.replica
            && let Some(peer) = self.peers.get_mut(asked)
        {
            // Somebody else has the address: the one we asked for does not listen there.
            peer.stream = StreamVote::Refused;
            peer.failures = peer.failures.saturating_add(1);
            peer.link = Link::Idle { retry: now + backoff(REDIAL, peer.failures) };
            self.settle(asked, now);
        }
        let taken = from.replica != self.me
            && self.admit(&from.replica, &from.address, from.state, now)
            && self.epoch(&from.replica, from.epoch, now)
            && self.peers.get(&from.replica).is_some_and(|peer| peer.state != State::Left);
        if !taken {
            self.close(link);
            if let Some(peer) = self.peers.get_mut(&from.replica) {
                peer.failures = peer.failures.saturating_add(1);
                if let Link::Idle { retry } = &mut peer.link {
                    *retry = now + backoff(REDIAL, peer.failures);
                }
            }
            return;
        }
        let running = self.running_snapshots();
        let Some(peer) = self.peers.get_mut(&from.replica) else { return };
        peer.dropped = None;
        peer.proof = peer.proof.max(now);
        peer.stream = StreamVote::None;
        peer.address = from.address.clone();
        peer.set_state(from.state);
        if let Link::Open { .. } = peer.link {
            // Dialled twice, by its name and as a seed: the first one stays.
            self.close(link);
            self.settle(&from.replica, now);
            return;
        }
        let dialling = mem::replace(&mut peer.link, Link::Open { stream, since: now, heard: now });
        let copy = &mut peer.copy;
        // The owner's own word heals a version that somebody made up.
        copy.known = version.max(copy.shown);
        copy.behind = None;
        copy.shadow = None;
        copy.awaiting = !resumed;
        let doubted = copy.want.is_some_and(|(at, want)| at <= now && want == Want::Snapshot);
        let queue = !resumed && !link.asks_snapshot() && running >= self.limits.snapshots;
        if queue || (resumed && (copy.version.is_none() || doubted)) {
            // A resume that became a snapshot has to queue with the others; a resume of what is no
            // longer trusted, or no longer there, is of no use.
            copy.want = Some((now, Want::Snapshot));
            copy.awaiting = false;
            peer.link = Link::Idle { retry: now };
            self.close(link);
        } else {
            // A snapshot settles every doubt, a resume only that of being behind.
            copy.want = copy.want.filter(|(_, want)| resumed && *want == Want::Snapshot);
            self.streams.insert(stream, Target::Peer(from.replica.clone()));
        }
        self.close(dialling);
        self.settle(&from.replica, now);
    }

    fn content(
        &mut self,
        replica: &ReplicaId,
        stream: StreamId,
        from: Option<Identity>,
        message: Message,
        now: Instant,
    ) {
        let Self { peers, limits, out, .. } = self;
        let Some(peer) = peers.get_mut(replica) else { return };
        let Link::Open { heard, .. } = &mut peer.link else {
            self.break_off(stream, now);
            return;
        };
        *heard = now;
        let awaited = peer.copy.awaiting;
        peer.proof = peer.proof.max(now);
        let good = match message {
            Message::Hello { .. } => true,
            Message::Chunk { header, ids } => {
                match (Some(header.epoch) == peer.epoch).then(|| peer.copy.chunk(&header, &ids, limits)) {
                    Some(Ok(())) => {
                        peer.copy.behind = None;
                        peer.copy.swap(limits, out);
                        peer.copy.unmask(limits, out);
                        true
                    }
                    _ => false,
                }
            }
            Message::Delta { from, to, ops } => {
                let good = from.0.checked_add(ops.len() as u64) == Some(to.0);
                if good {
                    peer.copy.offer(from, &ops, Source::Stream, limits, out, now);
                }
                good
            }
            Message::Beat(summary) => {
                let same = Some(summary.epoch) == peer.epoch;
                if let Some(from) = from
                    && same
                    && from.epoch == summary.epoch
                    && from.replica == *replica
                {
                    peer.address = from.address;
                    peer.set_state(from.state);
                }
                if same {
                    peer.copy.compare(&summary, now);
                }
                same
            }
        };
        self.freed |= awaited && !peer.copy.awaiting;
        if !good {
            // The stream is of no use; the owner lives. Whether and when it is asked again for a
            // snapshot, the back-off says.
            peer.copy.resync(Want::Snapshot, now);
            peer.copy.shadow = None;
            let retry = peer.copy.want.map_or(now, |(at, _)| at);
            let link = mem::replace(&mut peer.link, Link::Idle { retry });
            self.close(link);
        }
        self.settle(replica, now);
    }

    fn fail(&mut self, stream: StreamId, failure: Failure, now: Instant) {
        match self.streams.remove(&stream) {
            None => {}
            Some(Target::Seed(address)) => {
                if let Some(seed) = self.seeds.get_mut(&address) {
                    seed.failures = seed.failures.saturating_add(1);
                    let wait = spread(backoff(RESEED, seed.failures), stream);
                    seed.link = Link::Idle { retry: now + wait };
                }
                self.freed = true;
            }
            Some(Target::Peer(replica)) => {
                if let Some(peer) = self.peers.get_mut(&replica) {
                    peer.stream = match (peer.link, failure) {
                        (Link::Dialing { .. }, Failure::Refused) => StreamVote::Refused,
                        (Link::Dialing { .. }, Failure::Unanswered) => StreamVote::Unanswered,
                        _ => StreamVote::Lost,
                    };
                    let steady = matches!(peer.link, Link::Open { since, .. } if now >= since + STEADY);
                    peer.failures = if steady { 0 } else { peer.failures.saturating_add(1) };
                    let wait =
                        if steady { Duration::ZERO } else { spread(backoff(REDIAL, peer.failures), stream) };
                    peer.link = Link::Idle { retry: now + wait };
                    // What arrived of a snapshot is of no use to the next stream.
                    peer.copy.shadow = None;
                    self.freed = true;
                    self.settle(&replica, now);
                }
            }
        }
    }

    /// Closes the stream of a peer that broke the protocol.
    fn break_off(&mut self, stream: StreamId, now: Instant) {
        self.out.actions.push(Action::Close { stream });
        self.fail(stream, Failure::Ended, now);
    }

    fn close(&mut self, link: Link) {
        if let Some(stream) = link.stream() {
            self.streams.remove(&stream);
            self.out.actions.push(Action::Close { stream });
            self.freed = true;
        }
    }

    /// Does for one replica what is due: votes, expiry, dials, resyncs.
    fn settle(&mut self, replica: &ReplicaId, now: Instant) {
        let (ttl, answer, silence) = (self.limits.ttl, self.limits.answer, self.limits.silence);
        let Some(peer) = self.peers.get_mut(replica) else { return };
        match peer.link {
            Link::Dialing { stream, since, .. } if now >= since + answer => {
                self.out.actions.push(Action::Close { stream });
                return self.fail(stream, Failure::Unanswered, now);
            }
            Link::Open { stream, heard, .. } if now >= heard + silence => {
                return self.break_off(stream, now);
            }
            _ => {}
        }
        let expired = now >= peer.proof + ttl && now >= self.spare_until && !flawed(Flaw::NoExpiry);
        if peer.dropped.is_none() && (expired || peer.outvoted() || peer.state == State::Left) {
            peer.dropped = Some(now);
            peer.copy.clear(&self.limits, &mut self.out);
        }
        if peer.dropped.is_some() || peer.state == State::Left {
            let link = mem::replace(&mut peer.link, Link::Idle { retry: now });
            self.close(link);
            return self.publish(replica, now);
        }

        let copy = &mut peer.copy;
        if let Link::Open { .. } = peer.link {
            let late = copy.version.is_none_or(|version| version < copy.known) || copy.shadow.is_some();
            match copy.behind {
                Some(since) if late && now >= since + self.limits.behind => {
                    // A resume first: it is cheap, and mends a stream that is open at one end only.
                    let want = if copy.resyncs == 0 && copy.version.is_some() && copy.shadow.is_none() {
                        Want::Resume
                    } else {
                        Want::Snapshot
                    };
                    copy.behind = None;
                    copy.resync(want, now);
                }
                Some(_) if late => {}
                _ => copy.behind = late.then_some(now),
            }
            if copy.want.is_some_and(|(at, _)| at <= now) {
                copy.shadow = None;
                let link = mem::replace(&mut peer.link, Link::Idle { retry: now });
                self.close(link);
            }
        }
        self.dial(replica, now);
        self.publish(replica, now);
    }

    fn dial(&mut self, replica: &ReplicaId, now: Instant) {
        let Some(peer) = self.peers.get(replica) else { return };
        let due = matches!(peer.link, Link::Idle { retry } if retry <= now);
        // A seed on its way to the same address will do.
        let seeded =
            self.seeds.get(&peer.address).is_some_and(|seed| matches!(seed.link, Link::Dialing { .. }));
        if !due || seeded {
            return;
        }
        let (whole, wait) = match peer.copy.want {
            Some((at, Want::Snapshot)) => (at <= now, at > now),
            _ => (false, false),
        };
        let resume = peer.epoch.zip(peer.copy.version).filter(|_| !whole);
        if resume.is_none() && (wait || self.running_snapshots() >= self.limits.snapshots) {
            return;
        }
        let (address, stream) = (peer.address.clone(), StreamId(self.next_stream));
        self.next_stream += 1;
        if let Some(peer) = self.peers.get_mut(replica) {
            peer.link = Link::Dialing { stream, since: now, snapshot: resume.is_none() };
        }
        self.streams.insert(stream, Target::Peer(replica.clone()));
        self.out.actions.push(Action::Dial { stream, replica: Some(replica.clone()), address, resume });
    }

    /// Tells a change of standing, and wakes whoever waits for an agent of that copy.
    fn publish(&mut self, replica: &ReplicaId, now: Instant) {
        let Some(peer) = self.peers.get_mut(replica) else { return };
        let face = (peer.standing(&self.limits, now), peer.steady());
        let old = mem::replace(&mut peer.face, face);
        if old != face {
            self.out.changed = true;
        }
        if old.0 != face.0 {
            self.out.wake_set(&peer.copy.ids, self.limits.woken);
        }
    }

    fn settle_all(&mut self, now: Instant) {
        self.freed = false;
        let mut replicas: Vec<_> =
            self.peers.iter().map(|(replica, peer)| (peer.failures, replica.clone())).collect();
        // Those that failed wait behind the others for a snapshot.
        replicas.sort_by_key(|(failures, _)| *failures);
        for (_, replica) in replicas {
            self.settle(&replica, now);
        }
        let forget = self.limits.forget;
        self.peers.retain(|_, peer| peer.dropped.is_none_or(|at| now < at + forget));
        self.settle_seeds(now);
    }

    fn settle_seeds(&mut self, now: Instant) {
        let addresses: Vec<_> = self.seeds.keys().cloned().collect();
        for address in addresses {
            let Some(seed) = self.seeds.get(&address) else { continue };
            match seed.link {
                Link::Dialing { stream, since, .. } if now >= since + self.limits.answer => {
                    self.out.actions.push(Action::Close { stream });
                    self.fail(stream, Failure::Unanswered, now);
                }
                Link::Idle { retry } if retry <= now && !self.is_met(&address, seed) => {
                    if self.running_snapshots() >= self.limits.snapshots {
                        continue;
                    }
                    let stream = StreamId(self.next_stream);
                    self.next_stream += 1;
                    if let Some(seed) = self.seeds.get_mut(&address) {
                        seed.link = Link::Dialing { stream, since: now, snapshot: true };
                    }
                    self.streams.insert(stream, Target::Seed(address.clone()));
                    self.out.actions.push(Action::Dial { stream, replica: None, address, resume: None });
                }
                _ => {}
            }
        }
    }

    /// Whether the replica behind a seed is known and dialled by its name.
    fn is_met(&self, address: &Arc<str>, seed: &Seed) -> bool {
        let lives = |peer: &Peer| peer.dropped.is_none() && peer.state != State::Left;
        match &seed.replica {
            Some(replica) if *replica == self.me => return true,
            Some(replica) if self.peers.get(replica).is_some_and(lives) => return true,
            _ => {}
        }
        self.peers.values().any(|peer| lives(peer) && peer.address == *address)
    }

    /// Snapshots asked for or arriving.
    fn running_snapshots(&self) -> usize {
        self.peers.values().filter(|peer| peer.takes_snapshot()).count()
            + self.seeds.values().filter(|seed| seed.link.asks_snapshot()).count()
    }

    fn flush(&mut self, now: Instant) {
        // Once: what that frees is seen by the next tick.
        if self.freed {
            self.settle_all(now);
        }
    }
}

impl Mirror {
    /// Takes a part of a snapshot; any error makes the whole of it void.
    fn chunk(&mut self, header: &ChunkHeader, bytes: &[u8], limits: &Limits) -> Result<(), Malformed> {
        if header.chunk == 0 {
            self.awaiting = true;
            self.shadow = Some(Shadow {
                version: header.to,
                next: 0,
                complete: false,
                last: None,
                ids: IdSet::default(),
                kept: BTreeMap::new(),
            });
        }
        let good = match &mut self.shadow {
            Some(shadow) => shadow.chunk(header, bytes, limits),
            None => Err(Malformed),
        };
        if good.is_err() {
            self.shadow = None;
        }
        good
    }
}

struct Malformed;

impl Shadow {
    fn chunk(&mut self, header: &ChunkHeader, bytes: &[u8], limits: &Limits) -> Result<(), Malformed> {
        let ids = codec::decode_ids(bytes, header.count as usize).map_err(|_| Malformed)?;
        // Only the last part may be less than full by much; an empty one would never end.
        let follows = !self.complete && header.chunk == self.next && header.to == self.version;
        let rises = ids.first().is_none_or(|first| self.last.is_none_or(|last| last < *first));
        let fits = self.ids.len() + ids.len() <= limits.ids && (header.last || !ids.is_empty());
        if !follows || !rises || !fits {
            return Err(Malformed);
        }
        self.last = ids.last().copied().or(self.last);
        for id in ids {
            self.ids.insert(id);
        }
        self.next += 1;
        self.complete = header.last;
        // A gap among what gossip brought is no harm: the stream brings it again.
        match if self.complete { self.catch_up(limits) } else { Ok(()) } {
            Ok(()) | Err(Offer::Gap) => Ok(()),
            Err(Offer::Wrong) => Err(Malformed),
        }
    }
}

/// Takes up to a quarter off a wait, so that replicas do not act in step.
fn spread(wait: Duration, stream: StreamId) -> Duration {
    wait - wait / 4 * (codec::mix(stream.0) % 256) as u32 / 256
}
