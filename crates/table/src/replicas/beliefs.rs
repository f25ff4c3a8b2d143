//! What the copies answer: whom to ask for an agent, and what an operator sees of each replica.

use std::{fmt, sync::Arc, time::Duration};

use ids::{AgentId, ReplicaId};
use tokio::time::Instant;

use super::{
    Table,
    expiry::{GossipVote, Peer, Standing, StreamVote},
    streams::{Link, LinkState, Seed},
};
use crate::{Epoch, IdSet, State, Version};

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

impl Table {
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
}
