//! Deliveries: what is due, and what comes of it.

use std::time::Duration;

use ids::AgentId;

use crate::{Mailbox, Message, MessageId, State, Time};

/// A delivery to try now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Delivery {
    /// The message.
    pub message: Message,
    /// Which attempt this is, from 1.
    pub attempt: u32,
}

/// What came of a delivery.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome<'a> {
    /// It was taken.
    Done,
    /// It is tried again after a pause, because of this.
    Again(&'a str),
    /// It is a dead letter, because of this.
    Dead(&'a str),
    /// The agent is not connected: this was no attempt.
    Absent,
}

impl Mailbox {
    /// Returns the agents of which it must be known whether they are connected: something waits for them.
    pub fn absent(&self) -> impl Iterator<Item = AgentId> + '_ {
        self.absent.iter().copied()
    }

    /// Whether it must be known of an agent whether it is connected.
    pub fn is_awaited(&self, agent: AgentId) -> bool {
        self.absent.contains(&agent)
    }

    /// Notes whether an agent is connected. One that is gets everything that is overdue at once.
    pub fn set_present(&mut self, agent: AgentId, present: bool) {
        if let Some(lane) = self.lanes.get_mut(&agent) {
            lane.present = present;
            self.reindex(agent);
        }
    }

    /// Returns a delivery that is due. Report with [`delivered`](Self::delivered) what comes of it.
    pub fn next_delivery(&mut self, now: Time) -> Option<Delivery> {
        let (due, agent) = *self.ready.first()?;
        if due > now {
            return None;
        }
        let (_, id) = *self.lanes.get(&agent)?.due.first()?;
        self.change(id, |entry| entry.in_flight = true);
        let entry = self.entries.get(&id)?;
        Some(Delivery {
            message: entry.message(now, true),
            attempt: entry.message.attempts.saturating_add(1),
        })
    }

    /// Notes what came of a delivery. `jitter`, from 0 to 1, is the part of the pause that is waited.
    pub fn delivered(&mut self, id: MessageId, outcome: Outcome<'_>, jitter: f64, now: Time) {
        let limits = self.limits;
        self.change(id, |entry| entry.in_flight = false);
        let Some(entry) = self.entries.get(&id) else { return };
        let agent = entry.message.agent;
        if entry.message.state != State::Waiting {
            // Another replica was faster.
            return;
        }
        match outcome {
            Outcome::Done => self.move_to(id, State::Over, "", now),
            Outcome::Dead(reason) => self.move_to(id, State::Dead, reason, now),
            Outcome::Again(reason) => self.change(id, |entry| {
                let doublings = entry.message.attempts.min(20);
                entry.message.attempts = entry.message.attempts.saturating_add(1);
                entry.message.reason = reason.into();
                let longest = limits.first_pause.saturating_mul(1 << doublings).min(limits.longest_pause);
                entry.due = now.after(longest.mul_f64(jitter.clamp(0.0, 1.0)));
            }),
            Outcome::Absent => self.set_present(agent, false),
        }
        self.settle(id);
    }

    /// Lets a dead letter be delivered again. Returns whether there is such a one, and room for it.
    pub fn replay(&mut self, id: MessageId, now: Time) -> bool {
        let Some(entry) = self.entries.get(&id) else { return false };
        let (agent, size) = (entry.message.agent, entry.size());
        if entry.message.state != State::Dead || self.check_room(agent, size).is_err() {
            return false;
        }
        self.change(id, |entry| {
            entry.accepted = now;
            entry.due = now;
            entry.message.attempts = 0;
        });
        self.move_to(id, State::Waiting, "", now);
        true
    }

    /// Returns when there is something to do, as far as that is known; at the latest after `most`.
    pub fn next_wake(&self, now: Time, most: Duration) -> Time {
        let latest = now.after(most);
        let delivery = self.ready.first().map(|(due, _)| *due);
        let exchange = self.peers.values().filter_map(crate::peer::Peer::wake).min();
        [delivery, exchange].into_iter().flatten().fold(latest, Time::min)
    }
}
