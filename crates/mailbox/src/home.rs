//! Members, and which of them hold the messages of an agent.

use std::{collections::VecDeque, time::Duration};

use ids::{AgentId, ReplicaId, home_rank};

use crate::Time;

/// Changes of the members that are remembered.
const MOST_CHANGES: usize = 64;

/// A replica that is ready.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Member {
    /// Which replica.
    pub id: ReplicaId,
    /// Drawn once per process: another process of the same name has nothing of what the first one had.
    pub epoch: u64,
}

/// The ready replicas as this one sees them.
#[derive(Debug)]
pub(crate) struct View {
    members: Vec<Member>,
    /// The members before, the latest last, and since when they were the members.
    earlier: VecDeque<(Time, Vec<Member>)>,
    since: Time,
}

impl View {
    pub(crate) fn new(now: Time) -> Self {
        Self { members: Vec::new(), earlier: VecDeque::new(), since: now }
    }

    /// Replaces the members. Returns whether that is a change.
    pub(crate) fn set(&mut self, mut members: Vec<Member>, now: Time) -> bool {
        members.sort();
        members.dedup();
        if members == self.members {
            return false;
        }
        let before = std::mem::replace(&mut self.members, members);
        if self.earlier.len() == MOST_CHANGES {
            self.earlier.pop_front();
        }
        self.earlier.push_back((self.since, before));
        self.since = now;
        true
    }

    pub(crate) fn members(&self) -> &[Member] {
        &self.members
    }

    /// Returns the members by their rank for an agent, the home first.
    pub(crate) fn order(&self, agent: AgentId) -> Vec<&ReplicaId> {
        let mut ranked: Vec<_> =
            self.members.iter().map(|member| (home_rank(agent, &member.id), &member.id)).collect();
        ranked.sort_by_key(|ranked| std::cmp::Reverse(ranked.0));
        ranked.into_iter().map(|(_, id)| id).collect()
    }

    /// Returns the holders of an agent's messages: the first two of its order.
    pub(crate) fn holders(&self, agent: AgentId) -> (Option<&ReplicaId>, Option<&ReplicaId>) {
        let (mut first, mut second) = (None, None);
        for member in &self.members {
            let ranked = (home_rank(agent, &member.id), &member.id);
            if first.as_ref().is_none_or(|first| ranked > *first) {
                second = first.replace(ranked);
            } else if second.as_ref().is_none_or(|second| ranked > *second) {
                second = Some(ranked);
            }
        }
        (first.map(|it| it.1), second.map(|it| it.1))
    }

    /// Whether a replica has been the home of an agent for this long.
    pub(crate) fn was_home_for(&self, me: &ReplicaId, agent: AgentId, long: Duration, now: Time) -> bool {
        let is_home = |members: &[Member]| {
            let best = members.iter().max_by_key(|member| home_rank(agent, &member.id));
            best.is_some_and(|best| best.id == *me)
        };
        if !is_home(&self.members) {
            return false;
        }
        let mut since = self.since;
        for (begun, members) in self.earlier.iter().rev() {
            if now.since(since) >= long {
                return true;
            }
            if !is_home(members) {
                return false;
            }
            since = *begun;
        }
        // Before the first members it was no home; if older changes are forgotten, it has been one since.
        now.since(since) >= long
    }
}
