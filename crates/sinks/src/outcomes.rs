//! [`Outcomes`]: which syncs fail and recover.

use std::{collections::HashMap, hash::Hash};

use crate::About;

/// How a sync ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Everything was applied.
    Good,
    /// Something was not.
    Failed,
}

/// How the last syncs of projects ended.
#[derive(Debug)]
pub struct Outcomes<K>(HashMap<K, Outcome>);

impl<K> Default for Outcomes<K> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

impl<K: Hash + Eq + Clone> Outcomes<K> {
    /// Notes how the projects are that this replica plans for; `None`: a sync runs, or there was none yet.
    /// Returns what is to be told. Projects that are not among them are forgotten.
    pub fn observe(&mut self, projects: impl IntoIterator<Item = (K, Option<Outcome>)>) -> Vec<(K, About)> {
        let mut now = HashMap::new();
        let mut told = Vec::new();
        for (project, outcome) in projects {
            let before = self.0.get(&project).copied();
            let about = match (before, outcome) {
                (Some(Outcome::Good) | None, Some(Outcome::Failed)) => Some(About::SyncFailed),
                (Some(Outcome::Failed), Some(Outcome::Good)) => Some(About::SyncRecovered),
                // What an earlier home told may have been a failure.
                (None, Some(Outcome::Good)) => Some(About::SyncSucceeded),
                _ => None,
            };
            if let Some(about) = about {
                told.push((project.clone(), about));
            }
            if let Some(outcome) = outcome.or(before) {
                now.insert(project, outcome);
            }
        }
        self.0 = now;
        told
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_and_recoveries_are_told_once() {
        let mut outcomes = Outcomes::default();
        let mut see = |a: Option<Outcome>| {
            let told = outcomes.observe([("a", a), ("b", None)]);
            told.into_iter().map(|(_, about)| about).collect::<Vec<_>>()
        };
        let (good, failed) = (Some(Outcome::Good), Some(Outcome::Failed));
        assert_eq!(see(None), []);
        assert_eq!(see(good), [About::SyncSucceeded]);
        assert_eq!(see(good), []);
        assert_eq!(see(failed), [About::SyncFailed]);
        assert_eq!(see(None), [], "a sync runs");
        assert_eq!(see(failed), []);
        assert_eq!(see(good), [About::SyncRecovered]);
        assert_eq!(outcomes.observe([("b", failed)]), [("b", About::SyncFailed)]);
        assert_eq!(outcomes.observe([("a", good)]), [("a", About::SyncSucceeded)], "it was forgotten");
    }
}
