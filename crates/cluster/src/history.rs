//! How replicas were judged, for people.

use std::{
    collections::{BTreeMap, VecDeque},
    time::Duration,
};

use ids::ReplicaId;

use crate::ReplicaEvent;

/// So many changes are remembered.
const EVENTS: usize = 64;

/// The last changes in how other replicas are judged, in bounded memory.
#[derive(Debug, Default)]
pub struct History {
    /// Standing and state of each when they were last looked at.
    judged: BTreeMap<ReplicaId, (String, String)>,
    events: VecDeque<ReplicaEvent>,
}

impl History {
    /// Compares each replica's standing and state with those of the last call; who is not named any more is forgotten.
    /// `at` is the time of day, since 1970-01-01 00:00 UTC.
    pub fn judge(
        &mut self,
        at: Duration,
        replicas: impl IntoIterator<Item = (ReplicaId, impl Into<String>, impl Into<String>)>,
    ) {
        let judged: BTreeMap<ReplicaId, (String, String)> = replicas
            .into_iter()
            .map(|(replica, standing, state)| (replica, (standing.into(), state.into())))
            .collect();
        let nothing = (String::new(), String::new());
        let changed = judged.iter().filter(|(replica, as_now)| self.judged.get(*replica) != Some(*as_now));
        let forgotten = self.judged.keys().filter(|replica| !judged.contains_key(*replica));
        for (replica, (standing, state)) in changed.chain(forgotten.map(|replica| (replica, &nothing))) {
            if self.events.len() >= EVENTS {
                self.events.pop_front();
            }
            self.events.push_back(ReplicaEvent {
                at,
                replica: replica.clone(),
                standing: standing.clone(),
                state: state.clone(),
            });
        }
        self.judged = judged;
    }

    /// The changes, the oldest first.
    #[must_use]
    pub fn events(&self) -> Vec<ReplicaEvent> {
        self.events.iter().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judged(history: &mut History, second: u64, replicas: &[(&str, &str, &str)]) {
        let replicas = replicas.iter().map(|&(id, standing, state)| (ReplicaId::new(id), standing, state));
        history.judge(Duration::from_secs(second), replicas);
    }

    fn told(history: &History) -> Vec<(u64, String)> {
        let line = |event: &ReplicaEvent| format!("{} {} {}", event.replica, event.standing, event.state);
        history.events().iter().map(|event| (event.at.as_secs(), line(event))).collect()
    }

    #[test]
    fn only_changes_are_remembered_and_the_forgotten_have_no_standing() {
        let mut history = History::default();
        judged(&mut history, 1, &[("a", "live", "ready")]);
        judged(&mut history, 2, &[("a", "live", "ready")]);
        judged(&mut history, 3, &[("a", "suspect", "ready"), ("b", "live", "ready")]);
        judged(&mut history, 4, &[("b", "live", "draining")]);
        let lines = [
            (1, "a live ready"),
            (3, "a suspect ready"),
            (3, "b live ready"),
            (4, "b live draining"),
            (4, "a  "),
        ];
        assert_eq!(told(&history), lines.map(|(at, line)| (at, line.to_owned())));
    }

    #[test]
    fn the_oldest_changes_make_room() {
        let mut history = History::default();
        for second in 0..200 {
            judged(&mut history, second, &[("a", if second % 2 == 0 { "live" } else { "suspect" }, "ready")]);
        }
        assert_eq!(history.events().len(), EVENTS);
        assert_eq!(told(&history).last(), Some(&(199, "a suspect ready".to_owned())));
    }
}
