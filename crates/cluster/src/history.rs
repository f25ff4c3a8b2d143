//! How the health of replicas changed, for people.

use std::{
    collections::{BTreeMap, VecDeque},
    time::Duration,
};

use ids::ReplicaId;

use crate::{ReplicaEvent, ReplicaHealth, ReplicaState};

/// How many changes are kept.
const EVENTS: usize = 64;

/// The last changes in the health and state of the other replicas, in bounded memory.
#[derive(Debug, Default)]
pub struct History {
    /// Health and state of each replica at the last call.
    last: BTreeMap<ReplicaId, (ReplicaHealth, ReplicaState)>,
    events: VecDeque<ReplicaEvent>,
}

impl History {
    /// Records how health and state of each replica differ from those of the last call. A replica that is not
    /// in `replicas` is forgotten. `at` is the time of day, since 1970-01-01 00:00 UTC.
    pub fn record(
        &mut self,
        at: Duration,
        replicas: impl IntoIterator<Item = (ReplicaId, ReplicaHealth, ReplicaState)>,
    ) {
        let current: BTreeMap<_, _> =
            replicas.into_iter().map(|(replica, health, state)| (replica, (health, state))).collect();
        let changed = current
            .iter()
            .filter(|(replica, now)| self.last.get(*replica) != Some(*now))
            .map(|(replica, now)| (replica, Some(*now)));
        let forgotten =
            self.last.keys().filter(|replica| !current.contains_key(*replica)).map(|replica| (replica, None));
        for (replica, now) in changed.chain(forgotten) {
            if self.events.len() >= EVENTS {
                self.events.pop_front();
            }
            self.events.push_back(ReplicaEvent { at, replica: replica.clone(), now });
        }
        self.last = current;
    }

    /// Returns the changes, the oldest first.
    #[must_use]
    pub fn events(&self) -> Vec<ReplicaEvent> {
        self.events.iter().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use ReplicaHealth::{Live, Suspect};
    use ReplicaState::{Draining, Ready};

    use super::*;

    fn record(history: &mut History, second: u64, replicas: &[(&str, ReplicaHealth, ReplicaState)]) {
        let replicas = replicas.iter().map(|&(id, health, state)| (ReplicaId::new(id), health, state));
        history.record(Duration::from_secs(second), replicas);
    }

    fn lines(history: &History) -> Vec<(u64, String)> {
        let line = |event: &ReplicaEvent| format!("{} {} {}", event.replica, event.standing(), event.state());
        history.events().iter().map(|event| (event.at.as_secs(), line(event))).collect()
    }

    #[test]
    fn only_changes_are_kept_and_forgotten_replicas_have_no_health() {
        let mut history = History::default();
        record(&mut history, 1, &[("a", Live, Ready)]);
        record(&mut history, 2, &[("a", Live, Ready)]);
        record(&mut history, 3, &[("a", Suspect, Ready), ("b", Live, Ready)]);
        record(&mut history, 4, &[("b", Live, Draining)]);
        let expected = [
            (1, "a live ready"),
            (3, "a suspect ready"),
            (3, "b live ready"),
            (4, "b live draining"),
            (4, "a  "),
        ];
        assert_eq!(lines(&history), expected.map(|(at, line)| (at, line.to_owned())));
    }

    #[test]
    fn the_oldest_changes_are_dropped_first() {
        let mut history = History::default();
        for second in 0..200 {
            record(&mut history, second, &[("a", if second % 2 == 0 { Live } else { Suspect }, Ready)]);
        }
        assert_eq!(history.events().len(), EVENTS);
        assert_eq!(lines(&history).last(), Some(&(199, "a suspect ready".to_owned())));
    }
}
