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
    projects::{MAX_PROJECTS, PATIENCE},
    tracker::RedisTracker,
};

/// Keys that Redis examines for one page, which takes it less than a millisecond.
const PAGE: usize = 1_000;
/// A search pauses after each page for this many times as long as the page took, once no list waits for it.
const PAUSES: u32 = 4;
/// The mean delay after a failed search, if somebody watches a list.
const RETRY: Duration = Duration::from_secs(1);
/// Watched lists are read again after this long while entries of 14.1 are seen.
const REREAD: Duration = Duration::from_secs(10);
/// Otherwise, they are read again after this many times as long.
const UNMIXED: u32 = 6;

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
                    self.projects.send_modify(|projects| projects.fail(&error));
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
