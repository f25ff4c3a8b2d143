//! A message, as it travels and as it is kept.

use std::{fmt, str::FromStr, sync::Arc, time::Duration};

use bytes::Bytes;
use ids::{AgentId, ReplicaId};

use crate::Time;

/// What a message costs beside its bytes: the entry, its places in the indexes.
const OVERHEAD: usize = 512;

/// The id of a message, drawn at random by the replica to which its sender came.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MessageId(pub u128);

impl fmt::Display for MessageId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Debug for MessageId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A text that is not the id of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected 32 hexadecimal digits")]
pub struct InvalidMessageId;

impl FromStr for MessageId {
    type Err = InvalidMessageId;

    fn from_str(text: &str) -> Result<Self, InvalidMessageId> {
        if text.len() != 32 || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(InvalidMessageId);
        }
        u128::from_str_radix(text, 16).map(Self).map_err(|_| InvalidMessageId)
    }
}

/// How far a message is. With equal versions, the later one of these wins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum State {
    /// To be delivered.
    Waiting,
    /// Given up, and kept for a person.
    Dead,
    /// Delivered, or dropped as a dead letter: without a body.
    Over,
}

/// A header that is passed on: a name in lower case, and its value.
pub type Header = (Box<str>, Bytes);

/// A message as replicas send it to each other.
#[derive(Clone, PartialEq, Eq)]
pub struct Message {
    /// Its id.
    pub id: MessageId,
    /// For which agent it is.
    pub agent: AgentId,
    /// The name of the hook.
    pub hook: Arc<str>,
    /// A hash by which a repetition by the sender is recognized.
    pub dedup: Option<[u8; 32]>,
    /// Headers to pass on.
    pub headers: Arc<[Header]>,
    /// The body.
    pub body: Bytes,
    /// Raised by each change.
    pub version: u32,
    /// How far it is.
    pub state: State,
    /// Deliveries that were tried.
    pub attempts: u32,
    /// Time since it was accepted.
    pub age: Duration,
    /// Time since its state changed.
    pub state_age: Duration,
    /// Why the last delivery failed; empty: none did.
    pub reason: Arc<str>,
    /// Whether the sender holds it, and does not only hand it over.
    pub steady: bool,
}

/// Says nothing of the content.
impl fmt::Debug for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Message")
            .field("id", &self.id)
            .field("agent", &self.agent)
            .field("hook", &self.hook)
            .field("version", &self.version)
            .field("state", &self.state)
            .field("bytes", &self.body.len())
            .finish_non_exhaustive()
    }
}

/// What is known of a message at another holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum There {
    /// It does not have it, or an older version.
    Copy,
    /// It had it, when it was last known.
    Ask,
    /// It has it.
    Held,
}

/// Another holder of a message.
#[derive(Clone, Debug)]
pub(crate) struct Target {
    pub(crate) replica: ReplicaId,
    pub(crate) there: There,
}

/// A message as it is kept.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) message: Message,
    pub(crate) accepted: Time,
    pub(crate) changed: Time,
    /// When delivery is tried next.
    pub(crate) due: Time,
    pub(crate) in_flight: bool,
    /// The other holders.
    pub(crate) targets: Vec<Target>,
}

impl Entry {
    /// Returns the bytes that it counts for.
    pub(crate) fn size(&self) -> usize {
        size(&self.message.headers, &self.message.body)
    }

    /// Returns the message with its ages of now.
    pub(crate) fn message(&self, now: Time, steady: bool) -> Message {
        Message {
            age: now.since(self.accepted),
            state_age: now.since(self.changed),
            steady,
            ..self.message.clone()
        }
    }

    /// Which of two versions is later.
    pub(crate) fn rank(&self) -> (u32, State) {
        (self.message.version, self.message.state)
    }
}

/// Returns the bytes that a message counts for.
pub(crate) fn size(headers: &[Header], body: &Bytes) -> usize {
    let headers: usize = headers.iter().map(|(name, value)| name.len() + value.len()).sum();
    OVERHEAD + headers + body.len()
}
