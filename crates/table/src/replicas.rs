//! The copies of the sets of all other replicas: when an operation is applied, when a copy is used for
//! answers, and when it is dropped.
//!
//! A [`Table`] has one copy per replica, of the highest epoch seen of it. Operations come from the replica's
//! stream and from the gossip value `chg`, and take the same code path. An operation is applied only if it is
//! one above the copy's version; lower ones are skipped. A gap on a stream requests a snapshot, a gap in
//! gossip is only noted. A snapshot is received beside the copy and replaces it once it is as new.
//!
//! | event | the copy is |
//! | --- | --- |
//! | stream ended, gossip says gone, hung, redial unanswered | suspect: asked last |
//! | redial refused, or another process answers there | not asked |
//! | gossip and stream both say gone; no proof of life for the ttl; `left`; newer epoch | dropped |
//!
//! This file has the events and actions of a table. `mirror` is the copy itself, `peer` is everything that is
//! known of one replica, `streams` dials and reads, `expiry` applies gossip and epochs, `answers` has the
//! queries.
//!
//! Time comes only from the caller. Events may come in any order. Events of a closed stream are ignored.

mod answers;
mod backoff;
mod expiry;
mod link;
mod mirror;
mod peer;
mod streams;

use std::{
    collections::{BTreeMap, BTreeSet},
    mem,
    sync::Arc,
    time::Duration,
};

use cluster::ReplicaState;
use ids::{AgentId, ReplicaId};
use tokio::time::Instant;

pub use self::{
    answers::{Candidate, Explanation, ReplicaView},
    link::LinkState,
    peer::{GossipVote, StreamVote},
};
use self::{
    link::{Link, Seed, Target},
    mirror::Want,
    peer::Peer,
};
use crate::{
    Epoch, IdSet, Identity, Message, Record, Summary, Version,
    flaw::{Flaw, flawed},
};

/// Bounds and times.
#[derive(Debug, Clone)]
pub struct Limits {
    /// How long a copy is used for answers after its owner's last proof of life. With a shorter time, a pause
    /// of the owner costs a snapshot; with a longer one, a vanished owner is asked in vain for longer.
    pub ttl: Duration,
    /// A dial without a hello for this long is a vote of the stream that the owner is gone.
    pub answer: Duration,
    /// An open stream without a message for this long is closed: three heartbeats.
    pub silence: Duration,
    /// How long a copy may be behind the known version before it is synced again.
    pub behind: Duration,
    /// How long a dropped replica is remembered, so that its old epochs stay ignored.
    pub forget: Duration,
    /// Replicas known at a time, including dropped ones; also the limit for seeds.
    pub replicas: usize,
    /// Ids in one copy. An owner with more ids stays unsynced and is asked directly.
    pub ids: usize,
    /// Operations that are kept while a snapshot is received.
    pub kept: usize,
    /// Masks per replica. With more, all masks are dropped, which costs one request each.
    pub masks: usize,
    /// Snapshots that are requested at a time.
    pub snapshots: usize,
    /// Agents in one wake-up. With more, all waiters are woken.
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

/// Identifies one dial and the resulting stream. Never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StreamId(pub u64);

/// A live replica as reported by gossip.
#[derive(Debug, Clone)]
pub struct Member {
    /// Its name.
    pub replica: ReplicaId,
    /// Orders the incarnations of the same name. The highest one counts.
    pub generation: u64,
    /// The address of its private API.
    pub address: Arc<str>,
    /// The gossip value `st`.
    pub state: ReplicaState,
    /// The gossip value `tbl`.
    pub summary: Option<Summary>,
    /// The gossip value `chg`.
    pub changes: Option<Record>,
    /// When its heartbeat last advanced here, which is the proof of life.
    pub heard: Instant,
}

/// How a stream ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Failure {
    /// Nothing listens there: a vote of the stream that the owner is gone.
    Refused,
    /// No answer in time: the same vote. A transport with its own timeout reports this; the table also
    /// applies [`Limits::answer`] itself.
    Unanswered,
    /// End of stream, reset, or an error status: the owner is suspect until it is dialled again.
    Ended,
}

/// What the user of a [`Table`] must do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Open a stream. Report each message by [`Table::message`] and the end by [`Table::failed`].
    Dial {
        /// The id of the stream in both.
        stream: StreamId,
        /// The replica; `None` if a seed is dialled.
        replica: Option<ReplicaId>,
        /// The address to dial.
        address: Arc<str>,
        /// The position to resume from, which is that of the copy. [`Version::NONE`] requests a snapshot, and
        /// tells the replica which epoch is known of it; `None` requests one, and no epoch is known.
        resume: Option<(Epoch, Version)>,
    },
    /// Close a stream, or stop dialling. Later events of it are ignored.
    Close {
        /// Which.
        stream: StreamId,
    },
    /// `locate` may answer differently for these agents.
    Wake(Vec<AgentId>),
    /// `locate` may answer differently for any agent.
    WakeAll,
    /// `replicas` or `unsynced` may answer differently.
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
    /// The last instant that an event had. A jump means that this process was paused.
    seen: Instant,
    /// After a pause, nothing is dropped before this instant, because the owners could not be heard.
    spare_until: Instant,
    /// A snapshot has ended, so the next one can be requested.
    freed: bool,
    /// Replicas and seeds that were refused because of [`Limits::replicas`].
    refused: u64,
    out: Out,
}

/// Actions that are not returned yet.
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

    /// Applies gossip's list of live members. For a replica that was heard before and is absent now, gossip
    /// votes "gone".
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

    /// Applies gossip's vote that one replica is gone. It counts only if gossip has heard the replica.
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

    /// Notes that the own gossip task was restarted: it has heard no replica, so it has no votes.
    pub fn gossip_restarted(&mut self, now: Instant) {
        self.observe(now);
        for peer in self.peers.values_mut() {
            peer.gossip = GossipVote::Unheard;
        }
        self.settle_all(now);
        self.flush(now);
    }

    /// Applies the set of addresses from discovery. Addresses that no known replica has are dialled too, so
    /// that everything works if UDP is blocked.
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

    /// Applies one message of a stream. `from` comes with hello and heartbeat messages.
    ///
    /// The first message must be a hello. The stream of a peer that violates the protocol is closed.
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

    /// Notes a message that this version cannot read because a later version has sent it. The owner is alive,
    /// but its copy is not reliable. A snapshot is requested again with growing delays, and the copy counts
    /// as unsynced until one has arrived.
    pub fn unreadable(&mut self, stream: StreamId, now: Instant) {
        self.observe(now);
        match self.streams.get(&stream).cloned() {
            None => {}
            Some(Target::Peer(replica)) => self.doubt(&replica, now),
            Some(Target::Seed(_)) => self.break_off(stream, now),
        }
        self.flush(now);
    }

    /// Notes the end of a stream, or of an attempt to open it.
    pub fn failed(&mut self, stream: StreamId, failure: Failure, now: Instant) {
        self.observe(now);
        self.fail(stream, failure, now);
        self.flush(now);
    }

    /// Notes the answer of an owner that it has no tunnel of `agent` at a version of its table.
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
                // An answer that is older than the copy is ignored.
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

    /// Does what is due by now. Call it at [`Table::deadline`], or about every 50 ms.
    pub fn tick(&mut self, now: Instant) {
        self.observe(now);
        self.settle_all(now);
        self.flush(now);
    }

    /// Returns when [`Table::tick`] has something to do, if no event comes first.
    pub fn deadline(&self, now: Instant) -> Instant {
        let limits = &self.limits;
        let link = |link: &Link, dialable: bool| match *link {
            Link::Idle { retry } => dialable.then_some(retry),
            Link::Dialing { since, .. } => Some(since + limits.answer),
            Link::Open { heard, .. } => Some(heard + limits.silence),
        };
        let peers = self.peers.values().flat_map(|peer| {
            let alive = peer.dropped.is_none() && peer.state != ReplicaState::Left;
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
        // A link that waits for a free snapshot slot is overdue. The floor prevents a busy loop.
        let (floor, ceiling) = (now + Duration::from_millis(20), now + Duration::from_secs(1));
        peers.chain(seeds).min().unwrap_or(ceiling).clamp(floor, ceiling)
    }

    /// Returns the actions since the last call, in order. Call it after every event.
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

    /// Does what is due for one replica: votes, expiry, dials, resyncs.
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
        if peer.dropped.is_none() && (expired || peer.outvoted() || peer.state == ReplicaState::Left) {
            peer.dropped = Some(now);
            peer.copy.clear(&self.limits, &mut self.out);
        }
        if peer.dropped.is_some() || peer.state == ReplicaState::Left {
            let link = mem::replace(&mut peer.link, Link::Idle { retry: now });
            self.close(link);
            return self.publish(replica, now);
        }

        let copy = &mut peer.copy;
        if let Link::Open { .. } = peer.link {
            let late = copy.version.is_none_or(|version| version < copy.known) || copy.shadow.is_some();
            match copy.behind {
                Some(since) if late && now >= since + self.limits.behind => {
                    // Try a resume first: it is cheap, and repairs a stream that is open at one end only.
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
        // Replicas with failures wait after the others for a snapshot.
        replicas.sort_by_key(|(failures, _)| *failures);
        for (_, replica) in replicas {
            self.settle(&replica, now);
        }
        let forget = self.limits.forget;
        let known = self.peers.len();
        self.peers.retain(|_, peer| peer.dropped.is_none_or(|at| now < at + forget));
        // Until then, lists name the dropped replica.
        self.out.changed |= self.peers.len() != known;
        self.settle_seeds(now);
    }

    fn flush(&mut self, now: Instant) {
        // Only once: the next tick handles what this frees.
        if self.freed {
            self.settle_all(now);
        }
    }
}
