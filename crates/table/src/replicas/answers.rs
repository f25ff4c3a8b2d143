//! Queries: which replicas to ask for an agent, and what an operator sees of each replica.

use std::{fmt, sync::Arc, time::Duration};

use cluster::{ReplicaHealth, ReplicaState};
use ids::{AgentId, ReplicaId};
use tokio::time::Instant;

use super::{
    Table,
    link::{Link, LinkState, Seed},
    peer::{GossipVote, Peer, StreamVote},
};
use crate::{Epoch, IdSet, Version};

/// A replica to ask for an agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Candidate {
    /// Its name.
    pub replica: ReplicaId,
    /// The address of its private API.
    pub address: Arc<str>,
    /// How healthy it is; one that [is asked](ReplicaHealth::is_asked).
    pub health: ReplicaHealth,
}

/// What the copy of one replica says about an agent, and whether the replica is asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Explanation {
    /// The replica.
    pub replica: ReplicaId,
    /// Its epoch, if known.
    pub epoch: Option<Epoch>,
    /// The version of the copy; `None` before the first snapshot.
    pub version: Option<Version>,
    /// How healthy the replica is.
    pub health: ReplicaHealth,
    /// Whether the copy is complete and current, so that an agent that is not in it is absent there.
    pub synced: bool,
    /// Whether the copy has the agent.
    pub holds: bool,
    /// The owner answered "not here" at this version, and the copy is not newer.
    pub masked: Option<Version>,
    /// Whether the replica is asked for the agent: because its copy has the agent, or because it is not
    /// synced.
    pub asked: bool,
}

/// The text that `kasctl why` prints.
impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} is {}", self.replica, self.health)?;
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

/// Everything that is known of one replica, for `kasctl replicas`.
#[derive(Debug, Clone)]
pub struct ReplicaView {
    /// Its name.
    pub replica: ReplicaId,
    /// The address of its private API.
    pub address: Arc<str>,
    /// The highest epoch seen of it.
    pub epoch: Option<Epoch>,
    /// The generation of gossip that belongs to this epoch; `None` if gossip has not told of this process
    /// yet. After a quick restart, the stream of the new process may come before its gossip.
    pub generation: Option<u64>,
    /// What it last announced of itself.
    pub state: ReplicaState,
    /// How healthy it is.
    pub health: ReplicaHealth,
    /// Whether the copy is complete and current.
    pub synced: bool,
    /// The state of its stream.
    pub link: LinkState,
    /// The version of the copy.
    pub version: Option<Version>,
    /// The highest version that is known of it.
    pub known: Version,
    /// Agents in the copy.
    pub count: usize,
    /// Digest of the copy.
    pub digest: u64,
    /// Bytes of the copy on the heap.
    pub heap_bytes: usize,
    /// Agents that are masked by "not here" answers.
    pub masked: usize,
    /// Time since the last proof of life.
    pub proof_age: Duration,
    /// The vote of gossip.
    pub gossip: GossipVote,
    /// The vote of the stream.
    pub stream: StreamVote,
    /// Resyncs in a row.
    pub resyncs: u32,
    /// Failed dials in a row.
    pub failures: u32,
}

impl Table {
    /// Returns the replicas to ask for `agent`: live ones first, then draining, then suspect ones. An empty
    /// list means unknown; it means absent only if [`Table::unsynced`] is empty too.
    pub fn locate(&self, agent: AgentId, now: Instant) -> Vec<Candidate> {
        let holds = |peer: &Peer| peer.copy.ids.contains(agent) && peer.masked(agent).is_none();
        self.candidates(now, holds)
    }

    /// Returns the replicas whose copies are incomplete. They are asked directly for any agent.
    pub fn unsynced(&self, now: Instant) -> Vec<Candidate> {
        // After a pause of this process, a copy may have expired while its owner is alive.
        let mut found = self.candidates(now, |peer| !peer.synced());
        let expired = |peer: &Peer| {
            peer.dropped.is_none()
                && peer.state != ReplicaState::Left
                && peer.stream != StreamVote::Refused
                && peer.health(&self.limits, now) == ReplicaHealth::Gone
        };
        found.extend(self.peers.iter().filter(|(_, peer)| expired(peer)).map(|(replica, peer)| Candidate {
            replica: replica.clone(),
            address: peer.address.clone(),
            health: ReplicaHealth::Suspect,
        }));
        found
    }

    /// Whether `replica` answered "not here" for `agent`, and nothing newer is known.
    pub fn is_masked(&self, replica: &ReplicaId, agent: AgentId) -> bool {
        self.peers.get(replica).is_some_and(|peer| peer.masked(agent).is_some())
    }

    /// Whether all replicas that are known to be alive are synced and each seed was tried: this replica can
    /// be ready.
    pub fn is_settled(&self, now: Instant) -> bool {
        let tried = |(address, seed): (&Arc<str>, &Seed)| seed.failures > 0 || self.is_met(address, seed);
        self.unsynced(now).is_empty() && self.seeds.iter().all(tried)
    }

    /// Returns what each copy says about `agent`, and why it is or is not asked.
    pub fn explain(&self, agent: AgentId, now: Instant) -> Vec<Explanation> {
        let explain = |(replica, peer): (&ReplicaId, &Peer)| {
            let health = peer.health(&self.limits, now);
            let (holds, masked) = (peer.copy.ids.contains(agent), peer.masked(agent));
            let hinted = masked.is_none() && (holds || !peer.synced());
            Explanation {
                replica: replica.clone(),
                epoch: peer.epoch,
                version: peer.copy.version,
                health,
                synced: peer.synced(),
                holds,
                masked,
                asked: health.is_asked() && hinted,
            }
        };
        self.peers.iter().map(explain).collect()
    }

    /// Returns everything that is known of every replica, including dropped ones until they are forgotten.
    pub fn replicas(&self, now: Instant) -> Vec<ReplicaView> {
        let view = |(replica, peer): (&ReplicaId, &Peer)| ReplicaView {
            replica: replica.clone(),
            address: peer.address.clone(),
            epoch: peer.epoch,
            generation: peer.told,
            state: peer.state,
            health: peer.health(&self.limits, now),
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

    /// Returns how many other replicas are alive, as heard by gossip or by stream. The header `kas-replicas`
    /// is one more.
    ///
    /// A replica that gossip has lost while its stream is open is asked last but counts as alive. If UDP is
    /// blocked, this is true for all replicas.
    pub fn live(&self, now: Instant) -> usize {
        let lives = |peer: &&Peer| match peer.health(&self.limits, now) {
            ReplicaHealth::Live | ReplicaHealth::Draining => true,
            ReplicaHealth::Suspect => {
                peer.state != ReplicaState::Hung && matches!(peer.link, Link::Open { .. })
            }
            ReplicaHealth::Unreachable | ReplicaHealth::Gone => false,
        };
        self.peers.values().filter(lives).count()
    }

    /// Returns how many replicas and seeds were ever refused because of
    /// [`Limits::replicas`](super::Limits::replicas).
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
                health: peer.health(&self.limits, now),
            })
            .filter(|candidate| candidate.health.is_asked())
            .collect();
        found.sort_by_key(|candidate| candidate.health);
        found
    }
}
