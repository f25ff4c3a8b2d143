//! Builds what reads repositories, and what applies them: the client of Gitaly, the repositories that agents
//! need, the service for their manifests, and the planners.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use agent_config::AgentConfigs;
use cluster::Tracker;
use git_sources::{
    AskAgain, GitLabProjects, Repositories,
    access::{Access, ReadProject, Times, VerifyProject},
};
use gitlab::usage::Usage;
use http::HeaderValue;
use identity::{Identity, gitlab::GitLabIdentity};
use ids::ReplicaId;
use net::tls::{self, Live};
use observe::Observer;
use planner::{PlannerMetrics, Planners};
use process::{files::Snapshot, lifecycle::Phase, version};
use prometheus_client::registry::Registry;
use routing::{peer::Peers, registry::TunnelRegistry, router::Router};
use tokio::sync::watch;

use super::{StartError, part::Part, reload::Reloader};
use crate::{
    listener::{flux::Flux, manifests::Manifests},
    pushes::Pushes,
    sync::{self, AskGitLab, GitSources, HeldAgents, SyncService, TunnelClusters},
};
use kas_config::Config;

/// Calls to one server that have not ended, at most.
const IN_FLIGHT: u32 = 16;

/// How long it is cached whether an agent may know of a project, for Flux.
const FLUX: Times = Times {
    ttl: Duration::from_secs(300),
    error_ttl: Duration::from_secs(60),
    without_cache: Duration::from_secs(300),
};

/// What reads repositories.
pub(super) struct Git {
    pub(super) repositories: Arc<Repositories>,
    /// `None`: agents are not known from GitLab.
    pub(super) gitaly: Option<Arc<gitaly::Client>>,
    access: Option<Arc<Access<ReadProject>>>,
    identity: Option<Arc<GitLabIdentity>>,
    known: Option<Arc<Access<VerifyProject>>>,
}

/// What planners use.
pub(super) struct PlannerUses {
    pub(super) me: ReplicaId,
    pub(super) identity: Arc<dyn Identity>,
    pub(super) tunnels: Arc<TunnelRegistry>,
    pub(super) configs: Arc<AgentConfigs>,
    pub(super) tracker: Arc<dyn Tracker>,
    pub(super) router: Arc<Router>,
    pub(super) observer: Arc<Observer>,
    pub(super) metrics: Arc<PlannerMetrics>,
    pub(super) peers: Option<Arc<Peers>>,
}

/// GitLab, and its agents.
pub(super) struct FromGitLab {
    pub(super) client: Arc<gitlab::Client>,
    pub(super) identity: Arc<GitLabIdentity>,
}

/// Renews a connected agent of a project.
struct Renew(Arc<GitLabIdentity>);

impl AskAgain for Renew {
    fn ask_again(&self, project: i64) {
        self.0.renew(project);
    }
}

impl Git {
    /// Nothing is called yet.
    pub(super) fn new(
        config: &Config,
        gitlab: Option<&FromGitLab>,
        registry: &mut Registry,
        reloader: &mut Reloader,
    ) -> Result<Self, StartError> {
        // Registered without GitLab too, so that the families always exist.
        let metrics = Arc::new(gitaly::GitalyMetrics::new(registry.sub_registry_with_prefix("kas")));
        let section = &config.gitaly;
        let calls_per_second = section.all.0;
        let Some(FromGitLab { client, identity }) = gitlab else {
            let repositories = Repositories::new(None, &config.repositories, calls_per_second);
            return Ok(Self { repositories, gitaly: None, access: None, identity: None, known: None });
        };
        let file = section.ca_certificate.as_deref();
        let before = Snapshot::reading(section.ca_certificate.iter().cloned().collect());
        let tls = Live::from(tls::client(file).map_err(StartError::Gitaly)?);
        reloader.gitaly(section, before, tls.clone());
        let user_agent = format!("gitlab-kas/{}/{}", version::VERSION, version::COMMIT);
        let rate = |(per_second, burst): (f64, u32)| gitaly::Rate { per_second, burst };
        let settings = gitaly::Settings {
            user_agent: user_agent.parse().unwrap_or(HeaderValue::from_static("gitlab-kas")),
            client_name: HeaderValue::from_static("gitlab-kas"),
            tls,
            limits: gitaly::Limits {
                all: rate(section.all),
                per_server: rate(section.per_server),
                in_flight_per_server: IN_FLIGHT,
            },
        };
        let gitaly = gitaly::Client::new(settings, metrics);
        let renew = Arc::new(Renew(Arc::clone(identity)));
        let projects = GitLabProjects::new(Arc::clone(&gitaly), client.locations(), renew);
        let gitops = &config.agent.gitops;
        let times = Times {
            ttl: gitops.project_info_cache_ttl,
            error_ttl: gitops.project_info_cache_error_ttl,
            without_cache: gitops.poll_period,
        };
        let access = Access::new(ReadProject(Arc::clone(client)), times);
        let known = Access::new(VerifyProject(Arc::clone(client)), FLUX);
        Ok(Self {
            repositories: Repositories::new(Some(Arc::new(projects)), &config.repositories, calls_per_second),
            gitaly: Some(gitaly),
            access: Some(Arc::new(access)),
            identity: Some(Arc::clone(identity)),
            known: Some(Arc::new(known)),
        })
    }

    /// Returns the service for Flux; `None`: there is no GitLab that reports pushes.
    pub(super) fn flux(
        &self,
        pushes: &Arc<Pushes>,
        phase: watch::Receiver<Phase>,
        usage: Option<Arc<Usage>>,
    ) -> Option<Arc<Flux>> {
        Some(Arc::new(Flux::new(Arc::clone(pushes), Arc::clone(self.known.as_ref()?), phase, usage)))
    }

    /// Returns the part that plans for agents, and the service that answers questions about it.
    pub(super) fn planners(&self, config: &Config, uses: PlannerUses) -> (Part, Arc<SyncService>) {
        let PlannerUses { me, identity, tunnels, configs, tracker, router, observer, metrics, peers } = uses;
        let held = HeldAgents::new(identity, tunnels, configs);
        let gitops = &config.agent.gitops;
        let gitlab = self.access.as_ref().zip(self.identity.as_ref()).map(|(access, identity)| {
            let (access, identity) = (Arc::clone(access), Arc::clone(identity));
            Arc::new(AskGitLab { access, identity }) as Arc<dyn sync::Permissions>
        });
        let planners = Planners::new(planner::Parts {
            me: me.clone(),
            tracker: Arc::clone(&tracker),
            agents: Arc::clone(&held) as _,
            sources: Arc::new(GitSources::new(Arc::clone(&self.repositories), gitlab, gitops.poll_period)),
            clusters: Arc::new(TunnelClusters {
                router,
                observer,
                tunnels: config.agent.listen.max_tunnels_per_agent as usize,
                me: me.clone(),
            }),
            metrics,
            applier: sync::applier(gitops),
            limits: sync::limits(gitops),
            timing: planner::Timing::default(),
        });
        let service = SyncService::new(Arc::clone(&planners), tracker, me, peers, Arc::clone(&held));
        let part = Part::default()
            .task(held.follow())
            .task(Arc::clone(&planners).run())
            .drain(move || planners.drain());
        (part, service)
    }

    /// Returns the service for the manifests of agents.
    pub(super) fn manifests(
        &self,
        config: &Config,
        phase: watch::Receiver<Phase>,
        usage: Option<Arc<Usage>>,
    ) -> Arc<Manifests> {
        let repositories = Arc::clone(&self.repositories);
        let gitops = config.agent.gitops.clone();
        let applier = sync::applier(&gitops);
        let access = self.access.clone();
        Arc::new(Manifests::new(repositories, access, gitops, applier, phase, usage))
    }
}

/// Returns what counts usage for GitLab, and the task that reports it. `None`: it is not reported.
pub(super) fn usage(
    config: &Config,
    gitlab: Option<&Arc<gitlab::Client>>,
    planner: Arc<PlannerMetrics>,
) -> Option<(Arc<Usage>, impl Future<Output = ()> + use<>)> {
    let period = config.observability.usage_reporting_period;
    let client = Arc::clone(gitlab.filter(|_| !period.is_zero())?);
    let usage = Arc::new(Usage::default());
    let counted = AtomicU64::new(0);
    let report = Arc::clone(&usage).report(client, period, move |usage| {
        let now = planner.completed();
        usage.count_syncs(now.saturating_sub(counted.swap(now, Ordering::Relaxed)));
    });
    Some((usage, report))
}
