//! What all tasks of a replica share.

use std::{sync::Arc, time::Duration};

use gitops::ClusterApi;
use ids::{AgentId, Impersonation};

use crate::{
    manifests::Loader,
    metrics::PlannerMetrics,
    source::{ReadLimits, Sources},
};

/// Reaches the clusters of agents.
pub trait Clusters: Send + Sync + 'static {
    /// Returns the API of the cluster of an agent. `task` names the caller, for the audit log.
    fn open(&self, agent: AgentId, task: String, impersonation: Option<Impersonation>)
    -> Arc<dyn ClusterApi>;

    /// Returns how many calls may be open at once: half of the agent's tunnels at most. `is_elastic`: its
    /// agentk opens tunnels when they are needed.
    fn concurrent(&self, agent: AgentId, is_elastic: bool) -> usize;
}

/// How often planners do something unasked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// The time between two checks for drift, ± 10 %.
    pub check: Duration,
    /// After this time all of a project is applied again.
    pub full: Duration,
    /// A new planner applies within this time what an earlier one has applied.
    pub first: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        const MINUTE: Duration = Duration::from_secs(60);
        Self { check: 5 * MINUTE, full: 360 * MINUTE, first: 10 * MINUTE }
    }
}

/// What all tasks share.
pub(crate) struct Context {
    pub(crate) sources: Arc<dyn Sources>,
    pub(crate) clusters: Arc<dyn Clusters>,
    pub(crate) loader: Loader,
    pub(crate) metrics: Arc<PlannerMetrics>,
    /// The name of this replica.
    pub(crate) replica: String,
    pub(crate) limits: ReadLimits,
    pub(crate) timing: Timing,
}
