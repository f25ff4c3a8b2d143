//! Where an agent is connected although it has no tunnel, for the status of a request that found none.

use std::{collections::HashMap, sync::Arc, time::Duration};

use cluster::{Replica, Tracker};
use ids::AgentId;
use parking_lot::Mutex;
use tokio::{sync::Semaphore, time::Instant};

/// Other replicas are asked again after this time.
const FRESH: Duration = Duration::from_secs(1);
/// How long they may take to answer. The caller already waits for its status.
const WITHIN: Duration = Duration::from_millis(500);
/// How many questions may be open. Without this, a flood of requests for absent agents would be one of
/// questions to all replicas.
const AT_ONCE: usize = 4;
/// The maximum number of agents whose answer is remembered.
const MOST: usize = 1_000;

/// An answer, and when it came.
type Known = (Instant, Arc<[Replica]>);

/// What other replicas have answered lately.
#[derive(Debug)]
pub(super) struct Whereabouts {
    known: Mutex<HashMap<AgentId, Known>>,
    asking: Semaphore,
}

impl Default for Whereabouts {
    fn default() -> Self {
        Self { known: Mutex::default(), asking: Semaphore::new(AT_ONCE) }
    }
}

impl Whereabouts {
    /// Returns the other replicas to which the agent is connected, and where it has no tunnel, idle or busy.
    /// Incomplete if a replica does not answer in time, or many agents are asked for at once.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub(super) async fn without_tunnel(&self, tracker: &dyn Tracker, agent: AgentId) -> Arc<[Replica]> {
        if let Some(known) = self.known(agent) {
            return known;
        }
        let Ok(_permit) = self.asking.try_acquire() else { return Arc::default() };
        let asked = tokio::time::timeout(WITHIN, tracker.peer_reports(Some(agent))).await;
        let reports = asked.map(|(reports, _)| reports).unwrap_or_default();
        let here =
            reports.into_iter().filter(|report| report.transports > 0 && report.idle + report.busy == 0);
        let replicas: Arc<[Replica]> = here.map(|report| report.replica).collect();
        let now = Instant::now();
        let mut known = self.known.lock();
        if known.len() >= MOST {
            known.retain(|_, (at, _)| now.duration_since(*at) < FRESH);
        }
        if known.len() < MOST {
            known.insert(agent, (now, Arc::clone(&replicas)));
        }
        replicas
    }

    fn known(&self, agent: AgentId) -> Option<Arc<[Replica]>> {
        let known = self.known.lock();
        known.get(&agent).filter(|(at, _)| at.elapsed() < FRESH).map(|(_, replicas)| Arc::clone(replicas))
    }
}
