//! How many revisions are followed for one agent. Each is remembered for a while after its last call, so an
//! agent that names other ones all the time would leave no room for others.

use std::{
    collections::{HashMap, hash_map::Entry},
    sync::Arc,
    time::Duration,
};

use git_sources::RepositoryId;
use ids::AgentId;
use parking_lot::Mutex;
use repository::Revision;
use tokio::time::Instant;

/// The most revisions of an agent. It has at most 100 manifest projects, and each may just have changed its
/// revision.
const MOST: usize = 300;
/// How long a revision counts after the last call for it has ended: as long as it is remembered.
const LINGER: Duration = Duration::from_secs(60);

/// Too many revisions of an agent are followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the agent has named {MOST} revisions of repositories within a minute, and more are not followed for it"
)]
pub(super) struct TooMany;

/// A revision of a repository.
type Key = (RepositoryId, Revision);

/// The revisions of all agents that call.
#[derive(Debug, Default)]
pub(super) struct Revisions(Mutex<HashMap<AgentId, HashMap<Key, Use>>>);

/// How a revision is used.
#[derive(Clone, Copy, Debug)]
struct Use {
    calls: usize,
    /// When the last call ended.
    ended: Instant,
}

/// A call for a revision.
#[derive(Debug)]
pub(super) struct Used {
    revisions: Arc<Revisions>,
    agent: AgentId,
    key: Key,
}

impl Used {
    /// Whether it is this repository.
    pub(super) fn is(&self, id: RepositoryId) -> bool {
        self.key.0 == id
    }
}

impl Revisions {
    /// Counts a call of an agent for a revision, until the result is dropped.
    ///
    /// # Errors
    /// [`TooMany`].
    pub(super) fn enter(
        self: &Arc<Self>,
        agent: AgentId,
        id: RepositoryId,
        revision: &Revision,
    ) -> Result<Used, TooMany> {
        let now = Instant::now();
        let key = (id, revision.clone());
        let mut agents = self.0.lock();
        let known = agents.entry(agent).or_default();
        if known.len() >= MOST && !known.contains_key(&key) {
            known.retain(|_, used| used.counts(now));
            if known.len() >= MOST {
                return Err(TooMany);
            }
        }
        known.entry(key.clone()).or_insert(Use { calls: 0, ended: now }).calls += 1;
        Ok(Used { revisions: Arc::clone(self), agent, key })
    }
}

impl Use {
    fn counts(&self, now: Instant) -> bool {
        self.calls > 0 || now.saturating_duration_since(self.ended) < LINGER
    }
}

impl Drop for Used {
    fn drop(&mut self) {
        let now = Instant::now();
        let mut agents = self.revisions.0.lock();
        let Entry::Occupied(mut agent) = agents.entry(self.agent) else { return };
        if let Some(used) = agent.get_mut().get_mut(&self.key) {
            *used = Use { calls: used.calls.saturating_sub(1), ended: now };
        }
        // An agent that calls no more is forgotten here or with the next call of another one.
        if !agent.get().values().any(|used| used.calls > 0) {
            agents.retain(|_, known| known.values().any(|used| used.counts(now)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn an_agent_has_a_bound_of_its_own_and_old_revisions_do_not_count() {
        let revisions = Arc::new(Revisions::default());
        let agent = |id| AgentId::new(id).unwrap();
        let enter = |id, name: usize| {
            let revision = Revision::branch(&format!("b{name}")).unwrap();
            revisions.enter(agent(id), RepositoryId::Project(7), &revision)
        };
        let open: Vec<Used> = (0..10).map(|name| enter(1, name).unwrap()).collect();
        for name in 10..MOST {
            drop(enter(1, name).unwrap());
        }
        assert_eq!(enter(1, MOST).unwrap_err(), TooMany);
        assert!(enter(1, 3).is_ok() && enter(1, 200).is_ok(), "those that are known");
        assert!(enter(2, MOST).is_ok(), "another agent");
        tokio::time::advance(LINGER).await;
        assert!(enter(1, MOST).is_ok());
        assert_eq!(revisions.0.lock()[&agent(1)].len(), 11, "those that are open, and the new one");
        drop(open);
        tokio::time::advance(LINGER).await;
        drop(enter(3, 0).unwrap());
        assert_eq!(revisions.0.lock().len(), 1);
    }
}
