//! Finds the agents that only replicas of 14.1 hold: for lists of all agents, and for watched lists.
//!
//! 14.1 keeps no list of its configuration projects, so the keys of Redis are searched for their hashes. The
//! database may contain millions of other keys. A search is therefore made only for a list that needs it, its
//! result is used for many times as long as the search took, and no list waits long for it: a list without a
//! current result says that it is partial. 14.1 publishes no changes either, so watched lists are read again
//! from time to time.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use redis::{Value, cmd};
use tokio::time::{Instant, sleep, timeout};

use crate::{
    answer::take,
    cache::Freshness,
    connect::{Error, Link},
    tracker::RedisTracker,
};

/// Keys that Redis examines for one page, which takes it less than a millisecond.
const PAGE: usize = 1_000;
/// How long a list waits for a search.
const PATIENCE: Duration = Duration::from_secs(2);
/// A search pauses after each page for this many times as long as the page took, once no list waits for it.
const PAUSES: u32 = 4;
/// A result is used for this many times as long as its search took, and for twice this time while the next
/// search runs. The first number applies while entries of 14.1 are seen.
const REUSED: (u32, u32) = (20, 100);
/// A result is used for at least this long.
const MIN_REUSED: Duration = Duration::from_secs(1);
/// The largest number of configuration projects that are found.
const MAX_PROJECTS: usize = 100_000;
/// The mean delay after a failed search, if somebody watches a list.
const RETRY: Duration = Duration::from_secs(1);
/// Watched lists are read again after this long while entries of 14.1 are seen.
const REREAD: Duration = Duration::from_secs(10);
/// Otherwise, they are read again after this many times as long.
const UNMIXED: u32 = 6;

/// The configuration projects that have connections at replicas of either kind.
#[derive(Clone, Debug, Default)]
pub(crate) struct Projects {
    /// Those that the last complete search found, and during a search what it has found so far.
    ids: Arc<BTreeSet<i64>>,
    /// When the last complete search began, and how long it took.
    searched: Option<(Instant, Duration)>,
    /// Searches that have ended.
    attempts: u64,
    /// Why the last search was not completed.
    failure: Option<String>,
    /// There were more than [`MAX_PROJECTS`].
    is_truncated: bool,
}

impl Projects {
    fn freshness(&self, is_mixed: bool, now: Instant) -> Freshness {
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
    fn complete(&mut self, ids: BTreeSet<i64>, begun: Instant, took: Duration) -> bool {
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
}

impl RedisTracker {
    /// Returns the projects to list, and why some may be missing.
    pub(crate) async fn projects(&self) -> (Arc<BTreeSet<i64>>, Option<String>) {
        // 14.1 cannot use a Cluster.
        if self.dialer.is_cluster() {
            return (Arc::default(), None);
        }
        let is_mixed = self.inner().is_mixed(Instant::now());
        let mut projects = self.projects.subscribe();
        let (freshness, attempts) = {
            let known = projects.borrow();
            (known.freshness(is_mixed, Instant::now()), known.attempts)
        };
        if freshness != Freshness::Known {
            self.to_search.notify_one();
        }
        if freshness == Freshness::Unknown {
            // If it takes longer, the list has what was found so far.
            let _ = timeout(PATIENCE, projects.wait_for(|known| known.attempts != attempts)).await;
        }
        let known = projects.borrow().clone();
        // Without any sign of 14.1, an older result is good enough.
        let is_outdated = freshness == Freshness::Unknown && (is_mixed || known.searched.is_none());
        let why = match &known.failure {
            _ if known.is_truncated => {
                Some(format!("there are more than {MAX_PROJECTS} configuration projects in Redis"))
            }
            _ if !is_outdated => None,
            None if known.attempts != attempts => None,
            None => Some(format!(
                "Redis has so many keys that a search for agents of replicas of GitLab's kas takes longer than \
                 {PATIENCE:?}: list again later, or list one project or one agent"
            )),
            Some(failure) => Some(format!(
                "Redis could not be searched for agents of replicas of GitLab's kas ({failure}): list one project or \
                 one agent"
            )),
        };
        (known.ids, why)
    }

    /// Searches whenever a list needs it, and wakes watchers of lists from time to time.
    pub(crate) async fn search(&self) {
        if self.dialer.is_cluster() {
            return;
        }
        let Some(link) = self.links.last() else { return };
        tokio::join!(self.search_by(link), self.reread_lists());
    }

    async fn reread_lists(&self) {
        let mut waited = 0;
        loop {
            sleep(REREAD).await;
            waited += 1;
            if waited < UNMIXED && !self.inner().is_mixed(Instant::now()) {
                continue;
            }
            waited = 0;
            if self.connection_changes.receiver_count() > 0 {
                self.connection_changes.send_replace(());
            }
        }
    }

    async fn search_by(&self, link: &Link) {
        loop {
            self.to_search.notified().await;
            let is_mixed = self.inner().is_mixed(Instant::now());
            // Several lists may have requested the search that has just ended.
            if self.projects.borrow().freshness(is_mixed, Instant::now()) == Freshness::Known {
                continue;
            }
            let begun = Instant::now();
            match self.search_keys(link).await {
                Ok(ids) => {
                    let mut is_news = false;
                    self.projects
                        .send_modify(|projects| is_news = projects.complete(ids, begun, begun.elapsed()));
                    if is_news {
                        self.connection_changes.send_replace(());
                    }
                }
                Err(error) => {
                    self.failed("searching for agents of replicas of GitLab's kas", &error);
                    self.projects.send_modify(|projects| {
                        projects.failure = Some(error.to_string());
                        projects.attempts += 1;
                    });
                    sleep(RETRY.mul_f64(0.5 + rand::random::<f64>())).await;
                    if self.connection_changes.receiver_count() > 0 {
                        self.to_search.notify_one();
                    }
                }
            }
        }
    }

    /// Reads the names of all keys, and returns the projects that have a hash of connections.
    async fn search_keys(&self, link: &Link) -> Result<BTreeSet<i64>, Error> {
        let begun = Instant::now();
        let pattern = self.keys.project_pattern();
        let mut ids = BTreeSet::new();
        let mut cursor: u64 = 0;
        loop {
            let asked = Instant::now();
            let scan = cmd("SCAN").arg(cursor).arg("MATCH").arg(&pattern).arg("COUNT").arg(PAGE).take();
            let answer = link.each(&self.dialer, vec![scan]).await?.pop().unwrap_or(Value::Nil);
            let (next, keys): (u64, Vec<Vec<u8>>) = take(answer, "SCAN")?;
            let mut new: Vec<i64> = keys.iter().filter_map(|key| self.keys.project_id(key)).collect();
            new.retain(|id| ids.len() < MAX_PROJECTS && ids.insert(*id));
            if !new.is_empty() {
                self.projects.send_if_modified(|projects| {
                    // Nobody waits for this.
                    Arc::make_mut(&mut projects.ids).extend(new);
                    false
                });
            }
            if next == 0 || ids.len() >= MAX_PROJECTS {
                return Ok(ids);
            }
            cursor = next;
            if begun.elapsed() > PATIENCE {
                sleep(asked.elapsed() * PAUSES).await;
            }
        }
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
