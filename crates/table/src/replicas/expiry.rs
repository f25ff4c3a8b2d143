//! Whom to believe: what gossip and streams say of a replica's life, and when its copy no longer counts.

use std::{fmt, mem, sync::Arc};

use ids::{AgentId, ReplicaId};
use tokio::time::Instant;

use super::{
    Limits, Member, Table,
    mirror::{Mirror, Source},
    streams::{Link, LinkState},
};
use crate::{
    Epoch, State, Version,
    flaw::{Flaw, flawed},
};

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

#[derive(Debug, Clone)]
pub(super) struct Peer {
    pub(super) address: Arc<str>,
    pub(super) state: State,
    /// What gossip said last, so that an old word repeated does not overrule a newer one.
    pub(super) gossip_state: Option<State>,
    pub(super) epoch: Option<Epoch>,
    pub(super) proof: Instant,
    pub(super) dropped: Option<Instant>,
    pub(super) gossip: GossipVote,
    pub(super) generation: u64,
    pub(super) gossip_heard: Option<Instant>,
    pub(super) stream: StreamVote,
    pub(super) link: Link,
    pub(super) failures: u32,
    pub(super) copy: Mirror,
    /// What [`super::Action::ReplicasChanged`] last told.
    pub(super) face: (Standing, bool),
}

impl Peer {
    pub(super) fn new(address: Arc<str>, state: State, now: Instant) -> Self {
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

    pub(super) fn standing(&self, limits: &Limits, now: Instant) -> Standing {
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

    pub(super) const fn link_state(&self) -> LinkState {
        match self.link {
            Link::Idle { .. } => LinkState::Idle,
            Link::Dialing { .. } => LinkState::Dialing,
            Link::Open { .. } if self.copy.awaiting => LinkState::Syncing,
            Link::Open { .. } => LinkState::Open,
        }
    }

    /// Whether a snapshot was asked for, or arrives.
    pub(super) const fn takes_snapshot(&self) -> bool {
        self.link.asks_snapshot() || matches!(self.link_state(), LinkState::Syncing)
    }

    /// Whether the set is there and no repair is under way; it may still be behind.
    pub(super) fn steady(&self) -> bool {
        self.link_state() == LinkState::Open && self.copy.version.is_some() && self.copy.want.is_none()
    }

    /// Whether an agent that the copy does not have is surely absent there.
    pub(super) fn synced(&self) -> bool {
        self.steady() && self.copy.version.is_some_and(|version| version >= self.copy.known)
    }

    /// Whether both votes say gone.
    pub(super) fn outvoted(&self) -> bool {
        let stream = matches!(self.stream, StreamVote::Refused | StreamVote::Unanswered);
        let gossip = self.gossip == GossipVote::Gone;
        if flawed(Flaw::OneVoteKills) { stream || gossip } else { stream && gossip }
    }

    pub(super) fn masked(&self, agent: AgentId) -> Option<Version> {
        let masked = *self.copy.masks.get(&agent)?;
        let void = self.copy.version.is_some_and(|version| version > masked) && !flawed(Flaw::StickyMask);
        (!void).then_some(masked)
    }

    /// Within an epoch a replica never comes back from draining or left.
    pub(super) fn set_state(&mut self, state: State) {
        if self.state < State::Draining || state > self.state {
            self.state = state;
        }
    }
}

impl Table {
    /// Notices that this process was paused: what the streams have buffered proves nothing, so they
    /// are opened anew, and nobody is dropped for a silence that was ours.
    pub(super) fn observe(&mut self, now: Instant) {
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

    pub(super) fn member(&mut self, replica: &ReplicaId, member: &Member, now: Instant) {
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
    pub(super) fn admit(
        &mut self,
        replica: &ReplicaId,
        address: &Arc<str>,
        state: State,
        now: Instant,
    ) -> bool {
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
    pub(super) fn epoch(&mut self, replica: &ReplicaId, epoch: Epoch, now: Instant) -> bool {
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

    /// Tells a change of standing, and wakes whoever waits for an agent of that copy.
    pub(super) fn publish(&mut self, replica: &ReplicaId, now: Instant) {
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
}
