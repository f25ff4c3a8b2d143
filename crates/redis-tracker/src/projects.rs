//! What a search for the agents of replicas of 14.1 has found, and for how long it is used. No I/O.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use tokio::time::Instant;

use crate::{cache::Freshness, connect::Error};

/// How long a list waits for a search.
pub(crate) const PATIENCE: Duration = Duration::from_secs(2);
/// A result is used for this many times as long as its search took, and for twice this time while the next
/// search runs. The first number applies while entries of 14.1 are seen.
const REUSED: (u32, u32) = (20, 100);
/// A result is used for at least this long.
const MIN_REUSED: Duration = Duration::from_secs(1);
/// The largest number of configuration projects that are found.
pub(crate) const MAX_PROJECTS: usize = 100_000;

/// The configuration projects that have connections at replicas of either kind.
#[derive(Clone, Debug, Default)]
pub(crate) struct Projects {
    /// Those that the last complete search found, and during a search what it has found so far.
    pub(crate) ids: Arc<BTreeSet<i64>>,
    /// When the last complete search began, and how long it took.
    pub(crate) searched: Option<(Instant, Duration)>,
    /// Searches that have ended.
    pub(crate) attempts: u64,
    /// Why the last search was not completed.
    pub(crate) failure: Option<String>,
    /// There were more than [`MAX_PROJECTS`].
    pub(crate) is_truncated: bool,
}

impl Projects {
    pub(crate) fn freshness(&self, is_mixed: bool, now: Instant) -> Freshness {
        let Some((begun, took)) = self.searched else { return Freshness::Unknown };
        let times = if is_mixed { REUSED.0 } else { REUSED.1 };
        let reused = (took * times).max(MIN_REUSED);
        match now.saturating_duration_since(begun) {
            age if age < reused => Freshness::Known,
            age if age < 2 * reused => Freshness::Aging,
            _ => Freshness::Unknown,
        }
    }

    /// Stores the result of a search. Returns whether a list may differ because of it.
    pub(crate) fn complete(&mut self, ids: BTreeSet<i64>, begun: Instant, took: Duration) -> bool {
        // A list that waited for longer was partial.
        let was_partial = self.searched.is_none() || self.failure.is_some() || took > PATIENCE;
        let is_news = was_partial || *self.ids != ids;
        self.is_truncated = ids.len() >= MAX_PROJECTS;
        self.ids = Arc::new(ids);
        self.searched = Some((begun, took));
        self.failure = None;
        self.attempts += 1;
        is_news
    }

    /// Stores why a search was not completed.
    pub(crate) fn fail(&mut self, error: &Error) {
        self.failure = Some(error.to_string());
        self.attempts += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_is_used_for_many_times_as_long_as_its_search_took() {
        let begun = Instant::now();
        let mut projects = Projects::default();
        assert_eq!(projects.freshness(true, begun), Freshness::Unknown);
        assert!(projects.complete(BTreeSet::new(), begun, Duration::from_millis(500)));
        let at = |seconds| begun + Duration::from_secs(seconds);
        for (is_mixed, known, aging, unknown) in [(true, 9, 19, 20), (false, 49, 99, 100)] {
            assert_eq!(projects.freshness(is_mixed, at(known)), Freshness::Known);
            assert_eq!(projects.freshness(is_mixed, at(aging)), Freshness::Aging);
            assert_eq!(projects.freshness(is_mixed, at(unknown)), Freshness::Unknown);
        }
        // A small database is not searched without end either.
        projects.complete(BTreeSet::new(), begun, Duration::ZERO);
        assert_eq!(projects.freshness(true, begun + MIN_REUSED / 2), Freshness::Known);
    }

    #[test]
    fn only_a_result_that_changes_a_list_is_news() {
        let now = Instant::now();
        let mut projects = Projects::default();
        assert!(projects.complete(BTreeSet::from([1]), now, Duration::ZERO), "the lists before were partial");
        assert!(!projects.complete(BTreeSet::from([1]), now, Duration::ZERO));
        assert!(projects.complete(BTreeSet::from([1, 2]), now, Duration::ZERO));
        assert!(projects.complete(BTreeSet::from([1, 2]), now, PATIENCE * 2), "lists did not wait for it");
        projects.failure = Some("refused".to_owned());
        assert!(projects.complete(BTreeSet::from([1, 2]), now, Duration::ZERO));
        assert_eq!(projects.failure, None);
    }
}
