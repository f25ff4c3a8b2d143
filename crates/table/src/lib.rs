//! Which replica holds which agents: the protocol without I/O.
//!
//! The table is a hint that tells which replicas to ask; only the answer of the owner is authoritative. Each
//! replica is the [`Owner`] of the set of agents that it holds, publishes it through one [`Feed`] per
//! subscriber and through two gossip values, and keeps a copy of the set of each other replica in a
//! [`Table`].
//!
//! Nothing here reads a clock, opens a socket, spawns a task or takes a lock: events and instants go in,
//! [`Action`]s come out. So the same code runs in kas, in a seeded simulation and in an exhaustive
//! exploration of a small model (`src/tests`).
//!
//! # Invariants
//!
//! The tests refer to these by name:
//!
//! - *Single writer*: a copy changes only by operations of its own epoch, each exactly one version above the
//!   copy, or by a whole snapshot that is not older than the copy. Once a newer epoch of a replica was seen,
//!   an older one is never accepted again.
//! - *Order*: the version of a copy never decreases within an epoch.
//! - *No zombies*: a copy is used for answers only until the owner's last proof of life plus
//!   [`ttl`](Limits::ttl).
//! - *No lost registration*: the caller may conclude "no such agent" only if [`Table::unsynced`] is empty.
//! - *Bounded*: everything that a peer can make grow has a bound in [`Limits`].
//! - *Convergence*: when nothing changes any more, each copy becomes equal to the set of its owner.

pub mod codec;
mod flaw;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod owner;
pub mod record;
pub mod replicas;
pub mod set;
#[cfg(test)]
mod tests;

use std::{fmt, sync::Arc};

use cluster::ReplicaState;
use ids::{AgentId, ReplicaId};

pub use codec::CHUNK_IDS;
pub use owner::{Feed, Next, Owner};
pub use record::{ChunkHeader, Record, Summary};
pub use replicas::{
    Action, Candidate, Explanation, Failure, GossipVote, Limits, LinkState, Member, ReplicaView, StreamId,
    StreamVote, Table,
};
pub use set::IdSet;

/// The epoch of a replica's table. It is drawn once per process; a later process has a higher one.
///
/// The generation of gossip is a different number: a restarted gossip task keeps the epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Epoch(pub u64);

/// How many operations an owner has published in its epoch. Version 0 is the empty set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Version(pub u64);

impl Version {
    /// Above all versions: of a set that is not there, so that nothing follows from it.
    pub const NONE: Self = Self(u64::MAX);

    /// Returns the version of the next operation; `None` after the largest version, which only a misbehaving
    /// peer can claim.
    pub(crate) fn next(self) -> Option<Self> {
        self.0.checked_add(1).map(Self)
    }
}

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// One change of an owner's set. Each change has its own version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Op {
    /// The owner now holds this agent.
    Add(AgentId),
    /// The owner no longer holds this agent.
    Remove(AgentId),
}

impl Op {
    /// Returns the agent that was added or removed.
    pub const fn agent(self) -> AgentId {
        match self {
            Self::Add(agent) | Self::Remove(agent) => agent,
        }
    }

    /// Whether the agent was added.
    pub const fn is_add(self) -> bool {
        matches!(self, Self::Add(_))
    }
}

/// The sender of a stream. It comes with [`Message::Hello`] and [`Message::Beat`], so that the state of a
/// replica is known even if UDP is blocked. The caller adds it to the messages of the [`Feed`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// The replica's name.
    pub replica: ReplicaId,
    /// The epoch of its table.
    pub epoch: Epoch,
    /// What it announces of itself.
    pub state: ReplicaState,
    /// Where its private API listens.
    pub address: Arc<str>,
}

/// One message of a table stream, from the owner to the subscriber.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Message {
    /// The first message; sent again if the owner had to raise its epoch.
    Hello {
        /// The owner's epoch.
        epoch: Epoch,
        /// The owner's version.
        version: Version,
        /// Whether deltas follow from the version that the subscriber asked for; otherwise a snapshot
        /// follows.
        resumed: bool,
    },
    /// A part of a snapshot.
    Chunk {
        /// Identifies the snapshot and the part.
        header: ChunkHeader,
        /// Ids as written by [`codec::encode_ids`].
        ids: Vec<u8>,
    },
    /// Operations `from + 1 ..= to`, in order.
    Delta {
        /// The version before the first operation.
        from: Version,
        /// The version of the last operation.
        to: Version,
        /// At least one operation.
        ops: Vec<Op>,
    },
    /// A heartbeat with the summary of the owner's set, as far as this stream has sent it. It proves that
    /// owner and stream are alive.
    Beat(Summary),
}

/// Bounds and times of the protocol.
pub mod limits {
    use std::time::Duration;

    /// Operations that an owner keeps for subscribers that reconnect: one megabyte.
    pub const RING_OPS: usize = 64 * 1024;
    /// Operations in one delta: at most 40 KB.
    pub const DELTA_OPS: usize = 4096;
    /// Operations in a gossip record.
    pub const RECORD_OPS: usize = 256;
    /// Bytes of a gossip record as text. It shares a datagram with other values.
    pub const RECORD_BYTES: usize = 2048;
    /// A feed that was idle for this time sends at once. Under load it sends at this interval.
    pub const FLUSH: Duration = Duration::from_millis(20);
    /// Time between two heartbeats of a feed.
    pub const BEAT: Duration = Duration::from_secs(2);
}
