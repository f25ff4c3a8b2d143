//! What is known of one replica, and how healthy that makes it.

use std::sync::Arc;

use cluster::{ReplicaHealth, ReplicaState};
use ids::AgentId;
use tokio::time::Instant;

use super::{
    Limits,
    link::{Link, LinkState},
    mirror::Mirror,
};
use crate::{
    Epoch, Version,
    flaw::{Flaw, flawed},
};

/// What gossip reports of a replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GossipVote {
    /// It was never heard: no vote.
    Unheard,
    /// It is in the last list of members.
    Live,
    /// It was heard before and is not in the last list of members.
    Gone,
}

/// The result of the last dial of a replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StreamVote {
    /// It answered, or was not dialled yet.
    None,
    /// A stream has ended, and the redial has no result yet. This is no vote, but the replica is suspect.
    Lost,
    /// The redial was not answered: a vote for gone.
    Unanswered,
    /// The redial was refused, or another process answered: a vote for gone.
    Refused,
}

#[derive(Debug, Clone)]
pub(super) struct Peer {
    pub(super) address: Arc<str>,
    pub(super) state: ReplicaState,
    /// The last state that gossip reported, so that a repeated old state does not replace a newer one from
    /// the stream.
    pub(super) gossip_state: Option<ReplicaState>,
    pub(super) epoch: Option<Epoch>,
    pub(super) proof: Instant,
    pub(super) dropped: Option<Instant>,
    pub(super) gossip: GossipVote,
    /// The highest one, below which reports are ignored.
    pub(super) generation: u64,
    /// That of the process whose epoch this is; `None` until gossip has named it together with the epoch.
    pub(super) told: Option<u64>,
    pub(super) gossip_heard: Option<Instant>,
    pub(super) stream: StreamVote,
    pub(super) link: Link,
    pub(super) failures: u32,
    pub(super) copy: Mirror,
    /// Health and steadiness at the last [`super::Action::ReplicasChanged`].
    pub(super) reported: (ReplicaHealth, bool),
}

impl Peer {
    pub(super) fn new(address: Arc<str>, state: ReplicaState, now: Instant) -> Self {
        Self {
            address,
            state,
            gossip_state: None,
            epoch: None,
            proof: now,
            dropped: None,
            gossip: GossipVote::Unheard,
            generation: 0,
            told: None,
            gossip_heard: None,
            stream: StreamVote::None,
            link: Link::Idle { retry: now },
            failures: 0,
            copy: Mirror::default(),
            reported: (ReplicaHealth::Gone, false),
        }
    }

    pub(super) fn health(&self, limits: &Limits, now: Instant) -> ReplicaHealth {
        let expired = now >= self.proof + limits.ttl && !flawed(Flaw::NoExpiry);
        if self.dropped.is_some() || self.state == ReplicaState::Left || expired {
            ReplicaHealth::Gone
        } else if self.stream == StreamVote::Refused {
            ReplicaHealth::Unreachable
        } else if self.gossip == GossipVote::Gone
            || self.stream != StreamVote::None
            || self.state == ReplicaState::Hung
        {
            ReplicaHealth::Suspect
        } else if self.state == ReplicaState::Draining {
            ReplicaHealth::Draining
        } else {
            ReplicaHealth::Live
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

    /// Whether a snapshot was requested or is being received.
    pub(super) const fn takes_snapshot(&self) -> bool {
        self.link.asks_snapshot() || matches!(self.link_state(), LinkState::Syncing)
    }

    /// Whether the copy has a set and no resync is due. The copy may still be behind.
    pub(super) fn steady(&self) -> bool {
        self.link_state() == LinkState::Open && self.copy.version.is_some() && self.copy.want.is_none()
    }

    /// Whether an agent that is not in the copy is surely absent there.
    pub(super) fn synced(&self) -> bool {
        self.steady() && self.copy.version.is_some_and(|version| version >= self.copy.known)
    }

    /// Whether gossip and stream both vote for gone.
    pub(super) fn outvoted(&self) -> bool {
        let stream = matches!(self.stream, StreamVote::Refused | StreamVote::Unanswered)
            && !flawed(Flaw::RefusedIsNoVote);
        let gossip = self.gossip == GossipVote::Gone;
        if flawed(Flaw::DrainingNeverDies) && self.state == ReplicaState::Draining {
            return false;
        }
        if flawed(Flaw::OneVoteKills) { stream || gossip } else { stream && gossip }
    }

    pub(super) fn masked(&self, agent: AgentId) -> Option<Version> {
        let masked = *self.copy.masks.get(&agent)?;
        let void = self.copy.version.is_some_and(|version| version > masked) && !flawed(Flaw::StickyMask);
        (!void).then_some(masked)
    }

    /// Sets the state. Within an epoch, a replica never returns from draining or left.
    pub(super) fn set_state(&mut self, state: ReplicaState) {
        if self.state < ReplicaState::Draining || state > self.state {
            self.state = state;
        }
    }
}
