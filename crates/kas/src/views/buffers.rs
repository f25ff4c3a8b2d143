//! [`Buffers`]: what answers of API servers take until they are rows or news.
//!
//! An API server may send what it likes: long pages, lines of watches that never end, JSON whose tree is far
//! larger than its text. The first two are counted, for each agent and for all. Trees exist only for moments,
//! so others wait until there is room for one more.

use std::{collections::HashMap, sync::Arc};

use cluster_call::Budget;
use ids::AgentId;
use parking_lot::Mutex;
use tokio::sync::{Semaphore, SemaphorePermit};

use super::metrics::ViewMetrics;

/// What the answers of one agent may take, in bytes: four pages of the largest size.
const OF_AGENT: usize = 16 << 20;
/// What all may take: this part of the memory of views, but at least as much as one agent.
pub(super) const PART: usize = 4;
/// Text that is parsed at once, in KiB. Its tree may take up to 40 times as much.
const PARSED: usize = 4 << 10;
/// A text up to this size is parsed without a wait, in bytes.
const SMALL: usize = 128 << 10;

/// What answers of API servers take.
#[derive(Debug)]
pub(crate) struct Buffers {
    all: Arc<Budget>,
    /// Of agents that were asked something: as many as there are agents.
    agents: Mutex<HashMap<AgentId, AgentBuffers>>,
    parsing: Arc<Semaphore>,
}

/// What answers of one agent take.
#[derive(Debug, Clone)]
pub(crate) struct AgentBuffers {
    budget: Arc<Budget>,
    parsing: Arc<Semaphore>,
}

impl Buffers {
    /// `memory`: that of views, in bytes.
    pub(crate) fn new(memory: usize, metrics: &ViewMetrics) -> Arc<Self> {
        let bytes = metrics.bytes.clone();
        let told = move |by| {
            bytes.inc_by(by);
        };
        Arc::new(Self {
            all: Budget::told(
                "the answers of all agents that are being read",
                (memory / PART).max(OF_AGENT),
                told,
            ),
            agents: Mutex::default(),
            parsing: Arc::new(Semaphore::new(PARSED)),
        })
    }

    /// Returns what counts the answers of an agent.
    pub(crate) fn of(&self, agent: AgentId) -> AgentBuffers {
        let new = || AgentBuffers {
            budget: Budget::new(
                "the answers of this agent that are being read",
                OF_AGENT,
                Some(Arc::clone(&self.all)),
            ),
            parsing: Arc::clone(&self.parsing),
        };
        self.agents.lock().entry(agent).or_insert_with(new).clone()
    }

    /// Returns how many bytes are counted.
    pub(super) fn used(&self) -> usize {
        self.all.used()
    }

    /// Takes all the room for trees.
    #[cfg(test)]
    pub(super) async fn parse_nothing_else(&self) -> SemaphorePermit<'_> {
        self.parsing.acquire_many(u32::try_from(PARSED).unwrap()).await.unwrap()
    }
}

/// Those of an agent alone.
#[cfg(test)]
impl Default for AgentBuffers {
    fn default() -> Self {
        let budget = Budget::new("the answers of this agent that are being read", OF_AGENT, None);
        Self { budget, parsing: Arc::new(Semaphore::new(PARSED)) }
    }
}

impl AgentBuffers {
    /// Returns what counts them.
    pub(crate) fn budget(&self) -> &Arc<Budget> {
        &self.budget
    }

    /// Returns what counts one answer until it is dropped.
    pub(super) fn budget_of_answer(&self) -> Arc<Budget> {
        Budget::new("the answer", OF_AGENT, Some(Arc::clone(&self.budget)))
    }

    /// Waits for room for the tree of a text of so many bytes, which is there until the value is dropped;
    /// `None`: it needs none.
    ///
    /// # Cancel safety
    /// Cancel safe. It loses its place then.
    pub(crate) async fn parsing(&self, bytes: usize) -> Option<SemaphorePermit<'_>> {
        if bytes <= SMALL {
            return None;
        }
        let kib = u32::try_from(bytes.div_ceil(1 << 10).min(PARSED)).unwrap_or(u32::MAX);
        // The semaphore is never closed.
        self.parsing.acquire_many(kib).await.ok()
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::registry::Registry;

    use super::*;

    #[test]
    fn one_agent_does_not_use_up_what_all_have() {
        let metrics = ViewMetrics::new(&mut Registry::default());
        let buffers = Buffers::new(256 << 20, &metrics);
        let of = |agent| buffers.of(AgentId::new(agent).unwrap());
        let held: Vec<_> = (0..4).map(|_| of(1).budget().hold(4 << 20).unwrap()).collect();
        let refused = of(1).budget().hold(1).unwrap_err();
        assert_eq!(
            refused.message(),
            "the answers of this agent that are being read have more than 16777216 bytes"
        );
        let others: Vec<_> = (2..5).map(|agent| of(agent).budget().hold(16 << 20).unwrap()).collect();
        let refused = of(5).budget().hold(1).unwrap_err();
        assert_eq!(
            refused.message(),
            "the answers of all agents that are being read have more than 67108864 bytes"
        );
        assert_eq!((buffers.used(), metrics.bytes.get()), (64 << 20, 64 << 20));
        drop((held, others));
        assert_eq!((buffers.used(), metrics.bytes.get()), (0, 0));
        let answer = of(1).budget_of_answer();
        answer.take(5).unwrap();
        assert_eq!((of(1).budget().used(), buffers.used()), (5, 5));
        drop(answer);
        assert_eq!((of(1).budget().used(), buffers.used(), metrics.bytes.get()), (0, 0, 0));
    }

    #[tokio::test]
    async fn a_large_text_waits_until_another_one_is_read_and_a_small_one_does_not() {
        let of = AgentBuffers::default();
        let first = of.parsing(64 << 20).await;
        assert!(first.is_some() && of.parsing(SMALL).await.is_none());
        let mut second = Box::pin(of.parsing(1 << 20));
        assert!(futures_util::poll!(&mut second).is_pending());
        drop(first);
        assert!(second.await.is_some());
    }
}
