//! [`Presence`]: which agents came and left.

use std::{collections::HashMap, time::Duration};

use ids::AgentId;

/// An agent that is away for less than this has only reconnected.
const GRACE: Duration = Duration::from_secs(5);
/// A replica that becomes the home of an agent tells what it saw within this time: the home before may have
/// died before it did. See also [`Tellers`](crate::Tellers).
pub(crate) const RECENT: Duration = Duration::from_secs(60);

/// An agent that came or left.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change<T> {
    /// What is known of it.
    pub agent: T,
    /// Whether it came.
    pub is_connected: bool,
}

#[derive(Debug)]
struct State<T> {
    agent: T,
    is_connected: bool,
    /// Since when it is away, before that is believed.
    away: Option<Duration>,
    /// When it changed, if that was not told.
    untold: Option<Duration>,
    changed: Duration,
}

/// Which agents are connected, as a replica sees it. It also sees those of which other replicas tell. `T` is
/// what is known of an agent.
#[derive(Debug)]
pub struct Presence<T> {
    agents: HashMap<AgentId, State<T>>,
    /// Everything has been seen once. What was so from the beginning is no news.
    has_begun: bool,
}

impl<T> Default for Presence<T> {
    fn default() -> Self {
        Self { agents: HashMap::new(), has_begun: false }
    }
}

impl<T: Clone> Presence<T> {
    /// Notes the connected agents. `is_complete`: no other agent is. `tells`: whether this replica tells of
    /// an agent. Returns the news.
    pub fn observe(
        &mut self,
        connected: impl IntoIterator<Item = (AgentId, T)>,
        is_complete: bool,
        tells: impl Fn(AgentId) -> bool,
        now: Duration,
    ) -> Vec<Change<T>> {
        let connected: HashMap<AgentId, T> = connected.into_iter().collect();
        for (&id, agent) in &connected {
            let untold = self.has_begun.then_some(now);
            match self.agents.get_mut(&id) {
                None => {
                    let agent = agent.clone();
                    let state = State { agent, is_connected: true, away: None, untold, changed: now };
                    self.agents.insert(id, state);
                }
                Some(state) => {
                    state.away = None;
                    state.agent = agent.clone();
                    if !state.is_connected {
                        (state.is_connected, state.untold, state.changed) = (true, untold, now);
                    }
                }
            }
        }
        self.has_begun |= is_complete;
        let mut changes = Vec::new();
        self.agents.retain(|&id, state| {
            if is_complete && state.is_connected && !connected.contains_key(&id) {
                let since = *state.away.get_or_insert(now);
                if now.saturating_sub(since) >= GRACE {
                    (state.is_connected, state.away) = (false, None);
                    (state.untold, state.changed) = (Some(now), now);
                }
            }
            if let Some(since) = state.untold {
                if tells(id) {
                    state.untold = None;
                    changes
                        .push((id, Change { agent: state.agent.clone(), is_connected: state.is_connected }));
                } else if now.saturating_sub(since) > RECENT {
                    state.untold = None;
                }
            }
            state.is_connected || now.saturating_sub(state.changed) <= RECENT
        });
        changes.sort_by_key(|(id, _)| *id);
        changes.into_iter().map(|(_, change)| change).collect()
    }

    /// Whether an agent is away that is still believed to be connected: it should be looked at again soon.
    pub fn is_unsure(&self) -> bool {
        self.agents.values().any(|state| state.away.is_some())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn agent(id: i64) -> AgentId {
        AgentId::new(id).unwrap()
    }

    fn see(
        presence: &mut Presence<i64>,
        ids: &[i64],
        complete: bool,
        home: bool,
        second: u64,
    ) -> Vec<(i64, bool)> {
        let connected = ids.iter().map(|id| (agent(*id), *id));
        let changes = presence.observe(connected, complete, |_| home, Duration::from_secs(second));
        changes.into_iter().map(|change| (change.agent, change.is_connected)).collect()
    }

    #[test]
    fn who_comes_and_leaves_is_told_once() {
        let mut presence = Presence::default();
        assert_eq!(see(&mut presence, &[1], true, true, 0), [], "what was so from the beginning is no news");
        assert_eq!(see(&mut presence, &[1, 2], true, true, 1), [(2, true)]);
        assert_eq!(see(&mut presence, &[1, 2], true, true, 2), []);
        assert_eq!(see(&mut presence, &[1], true, true, 3), []);
        assert!(presence.is_unsure());
        assert_eq!(see(&mut presence, &[1, 2], true, true, 7), [], "it has only reconnected");
        assert!(!presence.is_unsure());
        assert_eq!(see(&mut presence, &[1], true, true, 10), []);
        assert_eq!(see(&mut presence, &[1], true, true, 15), [(2, false)]);
        assert_eq!(see(&mut presence, &[1], true, true, 16), []);
        assert_eq!(see(&mut presence, &[1, 2], true, true, 17), [(2, true)]);
        see(&mut presence, &[1], true, true, 20);
        see(&mut presence, &[1], true, true, 25);
        see(&mut presence, &[1], true, true, 90);
        assert_eq!(presence.agents.len(), 1, "an agent that is away is forgotten");
    }

    #[test]
    fn nobody_has_left_while_a_replica_is_silent() {
        let mut presence = Presence::default();
        assert_eq!(see(&mut presence, &[], false, true, 0), []);
        assert_eq!(see(&mut presence, &[1], true, true, 1), [], "the first complete list is the beginning");
        for second in 2..100 {
            assert_eq!(see(&mut presence, &[], false, true, second), []);
        }
        assert_eq!(see(&mut presence, &[], true, true, 100), []);
        assert_eq!(see(&mut presence, &[], true, true, 105), [(1, false)]);
    }

    #[test]
    fn a_new_home_tells_what_the_old_one_may_not_have_told() {
        let mut presence = Presence::default();
        see(&mut presence, &[1, 2], true, false, 0);
        see(&mut presence, &[2], true, false, 1);
        assert_eq!(see(&mut presence, &[2], true, false, 6), []);
        assert_eq!(see(&mut presence, &[2], true, true, 10), [(1, false)]);
        see(&mut presence, &[], true, false, 11);
        see(&mut presence, &[], true, false, 16);
        assert_eq!(see(&mut presence, &[], true, false, 77), []);
        assert_eq!(see(&mut presence, &[], true, true, 78), [], "the old one has told it long ago");
    }
}
