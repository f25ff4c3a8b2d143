//! Asks the other replicas for the names and projects of agents, and bounds how often.
//!
//! Anybody with a valid credential can name any agent, and each question may go to every replica. So an
//! answer is shared and kept for a short time, also that there is no such agent; few questions run at the
//! same time; and each caller may begin only some of them.

use std::{collections::HashMap, sync::Arc, time::Duration};

use ids::AgentId;
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::{
    Agents, AuthError, KnownAgent,
    cache::{Before, Cache},
};

/// How long an answer is used, also that no replica knows the agent. An agent that connects is found after
/// this time at the latest.
const KEPT: Duration = Duration::from_secs(2);
/// Questions that may run at the same time.
const MOST_RUNNING: usize = 64;
/// Those of one caller.
const MOST_OF_CALLER: usize = 16;
/// Questions that a caller may begin within [`WINDOW`].
const MOST_IN_WINDOW: u32 = 200;
/// See [`MOST_IN_WINDOW`].
const WINDOW: Duration = Duration::from_secs(10);
/// The callers whose questions are counted. Further ones get no answer until some have asked nothing for
/// [`WINDOW`].
const MOST_CALLERS: usize = 10_000;

/// Finds agents that this replica does not know.
pub(crate) struct Finder {
    agents: Arc<dyn Agents>,
    cache: Cache<AgentId, KnownAgent>,
    shares: Arc<Mutex<Shares>>,
}

impl Finder {
    pub(crate) fn new(agents: Arc<dyn Agents>) -> Self {
        Self { agents, cache: Cache::new(KEPT, KEPT), shares: Arc::default() }
    }

    /// Returns an agent as another replica knows it, for the caller with this name. Cancel safe.
    ///
    /// # Errors
    /// [`AuthError::Unknown`] if no replica knows it; [`AuthError::Unavailable`] if that cannot be said now,
    /// or if too many questions run.
    pub(crate) async fn find(&self, caller: &Arc<str>, agent: AgentId) -> Result<Arc<KnownAgent>, AuthError> {
        let begin = |_: Before| {
            // The share is that of the caller that begins the question. It runs on if that caller leaves.
            let Some(place) = Shares::take(&self.shares, caller) else {
                tracing::debug!(agent.id = agent.get(), "too many unknown agents are asked for");
                return None;
            };
            let agents = Arc::clone(&self.agents);
            Some(async move {
                let _place = place;
                match agents.find(agent).await {
                    Ok(found) => found.map(|found| (found, Duration::MAX)).ok_or(AuthError::Unknown),
                    Err(error) => {
                        tracing::debug!(agent.id = agent.get(), error, "an agent cannot be looked up");
                        Err(AuthError::Unavailable)
                    }
                }
            })
        };
        self.cache.get_or_begin(agent, None, begin).await.map(|answer| answer.value)
    }
}

/// The callers that ask, and how often.
#[derive(Default)]
struct Shares {
    running: usize,
    callers: HashMap<Arc<str>, Share>,
}

/// The questions of one caller.
struct Share {
    running: usize,
    /// Begun since `since`.
    begun: u32,
    since: Instant,
}

impl Share {
    fn is_over(&self, now: Instant) -> bool {
        now.duration_since(self.since) >= WINDOW
    }
}

/// A question that runs.
struct Place {
    shares: Arc<Mutex<Shares>>,
    caller: Arc<str>,
}

impl Shares {
    /// Counts one more question; `None`: there must not be one more now.
    fn take(shares: &Arc<Mutex<Self>>, caller: &Arc<str>) -> Option<Place> {
        let now = Instant::now();
        let mut state = shares.lock();
        if state.running >= MOST_RUNNING {
            return None;
        }
        if state.callers.len() >= MOST_CALLERS && !state.callers.contains_key(caller) {
            state.callers.retain(|_, share| share.running > 0 || !share.is_over(now));
            if state.callers.len() >= MOST_CALLERS {
                return None;
            }
        }
        let new = Share { running: 0, begun: 0, since: now };
        let share = state.callers.entry(Arc::clone(caller)).or_insert(new);
        if share.is_over(now) {
            (share.begun, share.since) = (0, now);
        }
        if share.running >= MOST_OF_CALLER || share.begun >= MOST_IN_WINDOW {
            return None;
        }
        share.running += 1;
        share.begun += 1;
        state.running += 1;
        Some(Place { shares: Arc::clone(shares), caller: Arc::clone(caller) })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut state = self.shares.lock();
        state.running -= 1;
        if let Some(share) = state.callers.get_mut(&self.caller) {
            share.running -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use async_trait::async_trait;
    use futures_util::future::join_all;
    use tokio::sync::{Semaphore, watch};

    use super::*;

    /// Other replicas, which know agent 1 only. They answer as far as there are permits.
    struct Replicas {
        asked: AtomicUsize,
        answers: Semaphore,
    }

    #[async_trait]
    impl Agents for Replicas {
        fn known(&self, agent: AgentId) -> KnownAgent {
            KnownAgent::unknown(agent)
        }

        async fn find(&self, agent: AgentId) -> Result<Option<KnownAgent>, String> {
            self.asked.fetch_add(1, Ordering::Relaxed);
            self.answers.acquire().await.unwrap().forget();
            Ok((agent.get() == 1)
                .then(|| KnownAgent { name: Some("a".into()), ..KnownAgent::unknown(agent) }))
        }

        fn changes(&self) -> watch::Receiver<u64> {
            watch::channel(0).1
        }
    }

    fn finder(answers: usize) -> (Arc<Replicas>, Finder) {
        let replicas = Arc::new(Replicas { asked: AtomicUsize::new(0), answers: Semaphore::new(answers) });
        (Arc::clone(&replicas), Finder::new(replicas))
    }

    fn id(number: usize) -> AgentId {
        AgentId::new(number as i64).unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn answers_are_shared_and_kept_also_that_nobody_knows_the_agent() {
        let (replicas, finder) = finder(1000);
        let jane = "kas:jane".into();
        for (agent, found) in [(1, true), (2, false)] {
            let asked = join_all((0..50).map(|_| finder.find(&jane, id(agent)))).await;
            assert!(asked.iter().all(|answer| answer.is_ok() == found));
            assert_eq!(replicas.asked.swap(0, Ordering::Relaxed), 1);
            tokio::time::advance(KEPT).await;
            assert_eq!(finder.find(&jane, id(agent)).await.is_ok(), found);
            assert_eq!(replicas.asked.swap(0, Ordering::Relaxed), 1);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_caller_who_asks_for_many_agents_delays_nobody_else() {
        let (replicas, finder) = finder(0);
        let (jane, joe) = ("kas:jane".into(), "kas:joe".into());
        let many = (2..102).map(|agent| finder.find(&jane, id(agent)));
        let mut many = std::pin::pin!(join_all(many));
        assert!(futures_util::poll!(many.as_mut()).is_pending());
        let mut other = std::pin::pin!(finder.find(&joe, id(1)));
        assert!(futures_util::poll!(other.as_mut()).is_pending());
        // More tasks than run between two turns of this one.
        for _ in 0..10 {
            tokio::task::yield_now().await;
        }
        assert_eq!(replicas.asked.load(Ordering::Relaxed), MOST_OF_CALLER + 1);
        replicas.answers.add_permits(1000);
        assert!(other.await.is_ok());
        let refused = many.await.into_iter().filter(|answer| *answer == Err(AuthError::Unavailable)).count();
        assert_eq!(refused, 100 - MOST_OF_CALLER);
    }

    #[tokio::test(start_paused = true)]
    async fn a_caller_begins_only_so_many_questions_in_some_time() {
        let (replicas, finder) = finder(10_000);
        let jane: Arc<str> = "kas:jane".into();
        let most = MOST_IN_WINDOW as usize;
        for _ in 0..2 {
            for agent in 2..2 * most {
                let _ = finder.find(&jane, id(agent)).await;
            }
            assert_eq!(replicas.asked.swap(0, Ordering::Relaxed), most);
            assert_eq!(finder.find(&jane, id(1)).await, Err(AuthError::Unavailable));
            tokio::time::advance(WINDOW).await;
        }
        assert!(finder.find(&jane, id(1)).await.is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn a_caller_without_a_share_fails_no_question_of_another() {
        let (_, finder) = finder(10_000);
        let (jane, joe): (Arc<str>, Arc<str>) = ("kas:jane".into(), "kas:joe".into());
        for agent in 2..2 + MOST_IN_WINDOW as usize {
            let _ = finder.find(&joe, id(agent)).await;
        }
        let mut refused = std::pin::pin!(finder.find(&joe, id(1)));
        let refused = futures_util::poll!(refused.as_mut());
        assert!(finder.find(&jane, id(1)).await.is_ok());
        assert_eq!(refused, std::task::Poll::Ready(Err(AuthError::Unavailable)));
    }

    #[test]
    fn counted_callers_and_running_questions_are_bounded() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let _guard = runtime.enter();
        let shares = Arc::default();
        let caller = |n: usize| Arc::from(format!("kas:{n}"));
        let mut running: Vec<_> =
            (0..MOST_RUNNING).map(|n| Shares::take(&shares, &caller(n)).unwrap()).collect();
        assert!(Shares::take(&shares, &caller(MOST_RUNNING)).is_none());
        running.clear();
        for n in MOST_RUNNING..MOST_CALLERS {
            drop(Shares::take(&shares, &caller(n)).unwrap());
        }
        assert!(Shares::take(&shares, &caller(MOST_CALLERS)).is_none());
        assert!(Shares::take(&shares, &caller(0)).is_some());
        assert_eq!(shares.lock().running, 0);
    }
}
