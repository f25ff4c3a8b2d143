//! The agents of this replica, and what their files say about manifests.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use agent_config::{
    AgentConfigs, ConfigStream,
    kas_yaml::{self, KasYaml},
};
use identity::Identity;
use ids::{Agent, AgentId};
use kas_config::{ConfigurationSource, Source};
use parking_lot::Mutex;
use planner::{Agents, Bounds, Configuration};
use repository::{Content, RepoPath, Repository, Revision, bare::Bare, folder::Folder};
use routing::registry::TunnelRegistry;

/// How often the files `kas.yaml` are looked at.
const LOOK: Duration = Duration::from_millis(500);

/// The agents of this replica.
pub(crate) struct HeldAgents {
    identity: Arc<dyn Identity>,
    registry: Arc<TunnelRegistry>,
    configs: Arc<AgentConfigs>,
    /// Where the files are; `None`: there are none, and every agent has the defaults.
    repository: Option<(Arc<dyn Repository>, &'static str)>,
    /// The largest file, in bytes.
    limit: u64,
    files: Mutex<HashMap<AgentId, Known>>,
    /// Streams that no agent reads. They keep the configurations of agents known whose own streams are all at
    /// other replicas, as GitLab's agents may have them.
    streams: Mutex<HashMap<AgentId, Arc<ConfigStream>>>,
}

/// The file of an agent.
#[derive(Debug, Default)]
struct Known {
    /// The last good one.
    good: Option<Arc<KasYaml>>,
    /// Why the current one is not good.
    flaw: Option<String>,
}

impl HeldAgents {
    pub(crate) fn new(
        identity: Arc<dyn Identity>,
        registry: Arc<TunnelRegistry>,
        configs: Arc<AgentConfigs>,
        config: &ConfigurationSource,
    ) -> Arc<Self> {
        let repository: Option<(Arc<dyn Repository>, _)> = match &config.source {
            Source::None => None,
            Source::Folder(path) => Some((Arc::new(Folder::new(path)), "agents")),
            Source::Git(path) => Some((Arc::new(Bare::new(path, None)), ".gitlab/agents")),
        };
        let limit = config.max_file_size.into();
        let (files, streams) = (Mutex::default(), Mutex::default());
        Arc::new(Self { identity, registry, configs, repository, limit, files, streams })
    }

    /// Lets the configurations of these agents be read here.
    fn keep_configurations(&self, held: &[Arc<Agent>]) {
        let mut streams = self.streams.lock();
        let ids: HashSet<AgentId> = held.iter().map(|agent| agent.id).collect();
        streams.retain(|known, _| ids.contains(known));
        for agent in held {
            if !streams.contains_key(&agent.id) && self.configs.latest(agent).is_none() {
                streams.insert(agent.id, self.configs.subscribe(agent, ""));
            }
        }
    }

    /// Reads what the planners need of agents until dropped.
    pub(crate) async fn follow(self: Arc<Self>) {
        loop {
            let held = self.held();
            self.keep_configurations(&held);
            let Some((repository, folder)) = &self.repository else {
                tokio::time::sleep(LOOK).await;
                continue;
            };
            let ids: HashSet<AgentId> = held.iter().map(|agent| agent.id).collect();
            self.files.lock().retain(|known, _| ids.contains(known));
            for agent in held {
                let latest = self.configs.latest(&agent);
                let has_projects = latest
                    .and_then(|latest| latest.gitops.clone())
                    .is_some_and(|gitops| !gitops.manifest_projects.is_empty());
                if has_projects {
                    self.read(&**repository, folder, &agent).await;
                }
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    async fn read(&self, repository: &dyn Repository, folder: &str, agent: &Agent) {
        let Ok(path) = RepoPath::new(format!("{folder}/{}/kas.yaml", agent.name)) else { return };
        let parsed = match repository.file(&Revision::Head, &path, self.limit).await {
            // What is known stays.
            Err(error) => {
                tracing::debug!(
                    agent.id = agent.id.get(),
                    error = error.to_string(),
                    "kas.yaml cannot be read"
                );
                return;
            }
            Ok(file) => match file.content {
                Content::Absent => Ok(KasYaml::default()),
                content => content
                    .into_data(&repository.shown(&path))
                    .map_err(|error| error.to_string())
                    .and_then(|data| kas_yaml::parse(&data)),
            },
        };
        let mut files = self.files.lock();
        let known = files.entry(agent.id).or_default();
        match parsed {
            Ok(parsed) => {
                if known.good.as_deref() != Some(&parsed) {
                    known.good = Some(Arc::new(parsed));
                }
                known.flaw = None;
            }
            Err(flaw) => {
                if known.flaw.as_ref() != Some(&flaw) {
                    let consequence = match known.good {
                        Some(_) => "the last good one stays",
                        None => "nothing is applied",
                    };
                    tracing::warn!(
                        agent.id = agent.id.get(),
                        path = repository.shown(&path),
                        error = flaw,
                        consequence,
                        "kas.yaml of an agent is invalid"
                    );
                }
                known.flaw = Some(flaw);
            }
        }
    }
}

impl Agents for HeldAgents {
    fn held(&self) -> Vec<Arc<Agent>> {
        let mut agents = self.identity.agents();
        agents.retain(|agent| self.registry.holds(agent.id));
        agents
    }

    fn configuration(&self, agent: &Agent) -> Option<Configuration> {
        let latest = self.configs.latest(agent)?;
        let file = match &self.repository {
            None => Arc::default(),
            Some(_) => self.files.lock().get(&agent.id)?.good.clone()?,
        };
        let projects = latest.gitops.iter().flat_map(|gitops| gitops.manifest_projects.iter().cloned());
        Some(Configuration {
            projects: projects.collect(),
            bounds: Bounds { namespaces: file.namespaces.clone(), check: Some(file.check) },
            identities: file.identities.clone(),
        })
    }
}
