//! [`Peer`]: what this replica has to tell another one.

use std::collections::BTreeSet;

use ids::AgentId;

use crate::{MessageId, State, Time};

/// Something that is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Key {
    Definition(AgentId),
    Message(MessageId),
}

/// How urgent it is to tell something, the most urgent first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Urgency {
    Copy,
    Ask,
}

/// Another replica.
#[derive(Debug, Default)]
pub(crate) struct Peer {
    pub(crate) queue: BTreeSet<(Urgency, Key)>,
    /// To be queued again at the time beside it.
    pub(crate) later: BTreeSet<Key>,
    pub(crate) later_at: Option<Time>,
    /// What was asked, and has no answer yet.
    pub(crate) asked: Option<Asked>,
    /// The process that answered last.
    pub(crate) run: Option<u64>,
    pub(crate) failures: u32,
    pub(crate) retry_at: Option<Time>,
}

#[derive(Debug)]
pub(crate) struct Asked {
    pub(crate) generation: u64,
    pub(crate) offers: Vec<(MessageId, (u32, State))>,
    pub(crate) messages: Vec<(MessageId, (u32, State))>,
    pub(crate) definitions: Vec<(AgentId, [u8; 32])>,
}

impl Peer {
    /// Returns when something is to be said; `None`: nothing is, or an answer is awaited.
    pub(crate) fn wake(&self) -> Option<Time> {
        if self.asked.is_some() {
            return None;
        }
        let now = (!self.queue.is_empty()).then_some(Time(i64::MIN));
        let soonest = now.into_iter().chain(self.later_at).min()?;
        Some(self.retry_at.map_or(soonest, |retry| retry.max(soonest)))
    }
}
