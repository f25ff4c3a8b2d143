//! Connects the planners to this replica: its agents, its tunnels, the repositories, and the other replicas.

mod agents;
mod convert;
mod diffs;
mod environments;
mod service;
mod sources;

use std::{sync::Arc, time::Duration};

use cluster_call::{Cluster, ClusterSettings};
use gitops::ClusterApi;
use ids::{AgentId, Impersonation, ReplicaId};
use observe::Observer;
use planner::{Applier, Clusters, ReadLimits};
use routing::router::Router;

pub use self::service::SyncService;
pub(crate) use self::service::{MAX_QUESTION, ask};
pub(crate) use self::{
    agents::HeldAgents,
    sources::{AskGitLab, GitSources, Permissions},
};

/// How long one request to an API server may take.
const TIMEOUT: Duration = Duration::from_secs(60);
/// How long a request may wait for a tunnel.
const FIND: Duration = Duration::from_secs(10);

/// The clusters of agents, through their tunnels.
pub(crate) struct TunnelClusters {
    pub(crate) router: Arc<Router>,
    pub(crate) observer: Arc<Observer>,
    /// The most tunnels of an agent.
    pub(crate) tunnels: usize,
    /// This replica.
    pub(crate) me: ReplicaId,
}

impl Clusters for TunnelClusters {
    fn open(
        &self,
        agent: AgentId,
        task: String,
        impersonation: Option<Impersonation>,
    ) -> Arc<dyn ClusterApi> {
        let settings = ClusterSettings {
            agent,
            task,
            source: "gitops",
            // The replica is named, so that the API server's audit log tells planners apart.
            user_agent: format!("kas/gitops:{}", self.me),
            impersonation,
            timeout: TIMEOUT,
            find: FIND,
            at_once: gitops::Budget::CONCURRENT,
            max_body: gitops::MAX_RESPONSE,
        };
        Arc::new(Cluster::new(Arc::clone(&self.router), Arc::clone(&self.observer), settings))
    }

    fn concurrent(&self, agent: AgentId, is_elastic: bool) -> usize {
        if is_elastic {
            return self.tunnels / 2;
        }
        let here = self.router.registry().occupancy(agent);
        (here.idle + here.busy) / 2
    }
}

/// Returns who applies.
pub(crate) fn applier(config: &kas_config::Gitops) -> Applier {
    match config.applier {
        kas_config::Applier::Auto => Applier::Auto,
        kas_config::Applier::Kas => Applier::Kas,
        kas_config::Applier::Agent => Applier::Agent,
        kas_config::Applier::None => Applier::None,
    }
}

/// Returns the limits of what is read of repositories.
pub(crate) fn limits(config: &kas_config::Gitops) -> ReadLimits {
    ReadLimits {
        file: config.max_manifest_file_size.into(),
        total: config.max_total_manifest_file_size.into(),
        paths: config.max_number_of_paths as usize,
        files: config.max_number_of_files as usize,
    }
}
