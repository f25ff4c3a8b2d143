//! What is kept, for people and for metrics.

use ids::AgentId;

use crate::{Mailbox, Message, State, Time, entry::There};

/// A message that waits or is a dead letter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// The message.
    pub message: Message,
    /// Replicas that have it, this one included.
    pub copies: usize,
}

/// What a replica keeps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Messages that wait, copies for other homes included.
    pub waiting: usize,
    /// Their bytes.
    pub bytes: usize,
    /// Dead letters.
    pub dead: usize,
    /// Seconds since the oldest message that waits was accepted.
    pub oldest: u64,
    /// Messages of which this replica is no holder, and which are not handed over yet.
    pub foreign: usize,
}

impl Mailbox {
    /// Lists the messages of an agent that are not over, the oldest first.
    pub fn list(&self, agent: AgentId, most: usize, now: Time) -> Vec<Listed> {
        let Some(lane) = self.lanes.get(&agent) else { return Vec::new() };
        let entries = lane.ids.iter().filter_map(|id| self.entries.get(id));
        let mut entries: Vec<_> = entries.filter(|entry| entry.message.state != crate::State::Over).collect();
        entries.sort_by_key(|entry| (entry.accepted, entry.message.id));
        let listed = entries.into_iter().take(most).map(|entry| Listed {
            copies: self.copies(entry.message.id).held,
            message: entry.message(now, self.is_holder(agent)),
        });
        listed.collect()
    }

    /// Counts what this replica keeps.
    pub fn totals(&self, now: Time) -> Totals {
        Totals {
            waiting: self.waiting.len(),
            bytes: self.waiting_bytes,
            dead: self.dead.len(),
            oldest: self.waiting.first().map_or(0, |(accepted, _)| now.since(*accepted).as_secs()),
            foreign: self.foreign(),
        }
    }

    /// Counts what waits or is dead, and is at no other replica, as far as this one knows. A message that
    /// another holder has is not lost if this replica stops, even while it is being delivered here.
    pub fn only_here(&self) -> usize {
        let kept = self.entries.values().filter(|entry| entry.message.state != State::Over);
        kept.filter(|entry| entry.targets.iter().all(|target| target.there != There::Held)).count()
    }

    /// Counts what waits or is dead, and is not handed over yet.
    fn foreign(&self) -> usize {
        self.lanes.iter().filter(|(agent, _)| !self.is_holder(**agent)).map(|(_, lane)| lane.ids.len()).sum()
    }
}
