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
//! Here are the events that a table takes and what they leave to do; `mirror` is the copy itself, `streams`
//! dials and reads, `expiry` says whom to believe, `beliefs` answers.
//!
//! Time comes only from the caller. Events may come in any order; an event of a stream that was
//! closed is ignored.

mod beliefs;
mod expiry;
mod mirror;
mod streams;

use std::{
    collections::{BTreeMap, BTreeSet},
    mem,
    sync::Arc,
    time::Duration,
};

use ids::{AgentId, ReplicaId};
use tokio::time::Instant;

pub use self::{
    beliefs::{Belief, Candidate, ReplicaView},
    expiry::{GossipVote, Standing, StreamVote},
    streams::LinkState,
};
use self::{
    expiry::Peer,
    mirror::Want,
    streams::{Link, Seed, Target},
};
use crate::{
    Epoch, IdSet, Identity, Message, Record, State, Summary, Version,
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

    /// Takes a message that this version cannot read, as one of a later version may be: its owner lives, and its copy is
    /// doubted. It is asked for a snapshot again after a while, less and less often, and is not taken for synced until one
    /// has come.
    pub fn unreadable(&mut self, stream: StreamId, now: Instant) {
        self.observe(now);
        match self.streams.get(&stream).cloned() {
            None => {}
            Some(Target::Peer(replica)) => self.doubt(&replica, now),
            Some(Target::Seed(_)) => self.break_off(stream, now),
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

    // What events do.

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
        let known = self.peers.len();
        self.peers.retain(|_, peer| peer.dropped.is_none_or(|at| now < at + forget));
        // Lists name who is gone until then.
        self.out.changed |= self.peers.len() != known;
        self.settle_seeds(now);
    }

    fn flush(&mut self, now: Instant) {
        // Once: what that frees is seen by the next tick.
        if self.freed {
            self.settle_all(now);
        }
    }
}
