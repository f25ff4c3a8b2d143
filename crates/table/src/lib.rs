//! Which replica holds which agents: the protocol without I/O.
//!
//! The table says where to ask; the owner tells the truth. Every replica is the [`Owner`] of the set
//! of agents that it holds, publishes it through one [`Feed`] per subscriber and through two gossip
//! values, and keeps a copy of everyone else's set in a [`Table`].
//!
//! Nothing here reads a clock, opens a socket, spawns a task or takes a lock: events and instants
//! go in, [`Action`]s come out. So the same code runs in kas, in a seeded simulation and in an
//! exhaustive exploration of a small model (`src/tests`).
//!
//! What always holds (numbers of `chaos.md`):
//! - a copy changes only by operations of its own epoch, each exactly one above its version, or by
//!   a whole snapshot that is not older than it (I5, I15);
//! - an older epoch of a replica is never taken again once a newer one was seen (I5);
//! - a copy is answered only until its owner's last proof of life + ttl (I8);
//! - "no such agent" may be concluded only if [`Table::unsynced`] is empty (I9);
//! - everything that a peer can make grow has a bound in [`Limits`] (I10).

pub mod codec;
mod flaw;
pub mod owner;
pub mod record;
pub mod replicas;
pub mod set;
#[cfg(test)]
mod tests;

use std::{fmt, str::FromStr, sync::Arc};

use ids::{AgentId, ReplicaId};

pub use codec::CHUNK_IDS;
pub use owner::{Feed, Next, Owner};
pub use record::{ChunkHeader, Record, Summary};
pub use replicas::{
    Action, Belief, Candidate, Failure, GossipVote, Limits, LinkState, Member, ReplicaView, Standing,
    StreamId, StreamVote, Table,
};
pub use set::IdSet;

/// One life of a replica's table, drawn once per process; a later life has a higher one.
///
/// Gossip's generation is another number: a restarted gossip task keeps the epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Epoch(pub u64);

/// How many operations an owner has published in its epoch: 0 is the empty set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Version(pub u64);

impl Version {
    /// Returns the version of the next operation; `None` behind the largest, which only a peer that
    /// lies can claim.
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

/// One change of an owner's set; each has a version of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Op {
    /// The owner now holds this agent.
    Add(AgentId),
    /// The owner no longer holds this agent.
    Remove(AgentId),
}

impl Op {
    /// Returns the agent that came or went.
    pub const fn agent(self) -> AgentId {
        match self {
            Self::Add(agent) | Self::Remove(agent) => agent,
        }
    }

    /// Whether the agent came.
    pub const fn is_add(self) -> bool {
        matches!(self, Self::Add(_))
    }
}

/// What a replica says of itself: gossip's `st`, and the same word on its table stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum State {
    /// Before its first sync. → Ready, Draining
    Starting,
    /// Serving. → Hung, Draining
    Ready,
    /// Alive by gossip, but its main runtime does not move: asked last. → Ready, Draining
    Hung,
    /// Still serving, about to leave: asked last. → Left
    Draining,
    /// Gone for good: its copy is dropped.
    Left,
}

impl State {
    /// Returns the word on the wire.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Ready => "ready",
            Self::Hung => "hung",
            Self::Draining => "draining",
            Self::Left => "left",
        }
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A word that is no [`State`]: a later version's. Whoever reads it keeps what it knew.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("expected starting, ready, hung, draining or left")]
pub struct UnknownState;

impl FromStr for State {
    type Err = UnknownState;

    fn from_str(s: &str) -> Result<Self, UnknownState> {
        [Self::Starting, Self::Ready, Self::Hung, Self::Draining, Self::Left]
            .into_iter()
            .find(|state| state.as_str() == s)
            .ok_or(UnknownState)
    }
}

/// Who speaks on a stream: carried by [`Message::Hello`] and [`Message::Beat`], so that with UDP
/// blocked the state of a replica still travels. The owner's glue adds it, the feed does not know.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// The replica's name.
    pub replica: ReplicaId,
    /// The epoch of its table.
    pub epoch: Epoch,
    /// What it says of itself.
    pub state: State,
    /// Where its private API listens.
    pub address: Arc<str>,
}

/// One message of a table stream, owner to subscriber.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Message {
    /// The first one, and again if the owner had to raise its epoch.
    Hello {
        /// The owner's epoch.
        epoch: Epoch,
        /// The owner's version.
        version: Version,
        /// Whether deltas follow from where the subscriber asked; else a snapshot follows.
        resumed: bool,
    },
    /// A part of a snapshot.
    Chunk {
        /// Which part of which snapshot.
        header: ChunkHeader,
        /// [`codec::encode_ids`].
        ids: Vec<u8>,
    },
    /// Operations `from + 1 ..= to`, in order.
    Delta {
        /// The version before the first operation.
        from: Version,
        /// The version of the last operation.
        to: Version,
        /// At least one.
        ops: Vec<Op>,
    },
    /// What the owner has, as far as this stream has told; proves that owner and stream live.
    Beat(Summary),
}

/// What bounds everything that a peer can make grow, and the times of the protocol.
pub mod limits {
    use std::time::Duration;

    /// Operations that an owner keeps for subscribers that come back: a megabyte.
    pub const RING_OPS: usize = 64 * 1024;
    /// Operations in one delta: at most 40 KB.
    pub const DELTA_OPS: usize = 4096;
    /// Operations in a gossip record.
    pub const RECORD_OPS: usize = 256;
    /// Bytes of a gossip record as text: it shares a datagram with others.
    pub const RECORD_BYTES: usize = 2048;
    /// A feed sends at once after this idle time, and this often under load.
    pub const FLUSH: Duration = Duration::from_millis(20);
    /// Time between two beats of a feed.
    pub const BEAT: Duration = Duration::from_secs(2);
}
