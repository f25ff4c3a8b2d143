//! What hooks an agent has: kept like messages, because nobody can read an agent's repository while the agent
//! is away.

use std::{collections::BTreeMap, time::Duration};

use bytes::Bytes;
use ids::AgentId;

use crate::{Limits, Time, entry::Target};

/// The hooks of an agent as its reader wrote them. The mailbox does not look into them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Definition {
    /// The agent.
    pub agent: AgentId,
    /// A hash of `hooks`.
    pub hash: [u8; 32],
    /// The hooks; empty: the agent has none any more.
    pub hooks: Bytes,
    /// Time since a reader of the agent's configuration confirmed them.
    pub age: Duration,
}

/// What a confirmation leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Confirmed {
    /// They are kept.
    Kept,
    /// They are not known here: send them.
    Wanted,
    /// There is no room for them.
    Full,
}

/// Kept definitions of an agent.
#[derive(Clone, Debug)]
pub(crate) struct Kept {
    pub(crate) hash: [u8; 32],
    pub(crate) hooks: Bytes,
    pub(crate) confirmed: Time,
    /// The other holders.
    pub(crate) targets: Vec<Target>,
}

/// The definitions of all agents.
#[derive(Debug, Default)]
pub(crate) struct Definitions {
    kept: BTreeMap<AgentId, Kept>,
    bytes: usize,
}

impl Definitions {
    pub(crate) fn get(&self, agent: AgentId) -> Option<&Kept> {
        self.kept.get(&agent)
    }

    pub(crate) fn get_mut(&mut self, agent: AgentId) -> Option<&mut Kept> {
        self.kept.get_mut(&agent)
    }

    pub(crate) fn agents(&self) -> Vec<AgentId> {
        self.kept.keys().copied().collect()
    }

    /// Keeps definitions unless there is no room. Returns whether they are kept.
    pub(crate) fn put(&mut self, agent: AgentId, kept: Kept, limits: &Limits) -> bool {
        let before = self.kept.get(&agent).map(|kept| kept.hooks.len());
        let bytes = self.bytes - before.unwrap_or(0) + kept.hooks.len();
        if before.is_none() && self.kept.len() >= limits.definition_agents || bytes > limits.definition_bytes
        {
            return false;
        }
        self.bytes = bytes;
        self.kept.insert(agent, kept);
        true
    }

    pub(crate) fn remove(&mut self, agent: AgentId) {
        if let Some(kept) = self.kept.remove(&agent) {
            self.bytes -= kept.hooks.len();
        }
    }

    /// Forgets those that nobody has confirmed since `oldest`.
    pub(crate) fn forget_before(&mut self, oldest: Time) {
        let old: Vec<AgentId> =
            self.kept.iter().filter(|(_, kept)| kept.confirmed < oldest).map(|(agent, _)| *agent).collect();
        old.into_iter().for_each(|agent| self.remove(agent));
    }
}
