//! The agents of this replica, and what their files say about manifests.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use agent_config::{
    AgentConfigs, ConfigStream, Shown,
    kas_yaml::{self, KasYaml},
};
use git_sources::{Repositories, RepositoryId};
use identity::Identity;
use ids::{Agent, AgentId};
use kas_config::{ConfigurationSource, Source};
use parking_lot::Mutex;
use planner::{Agents, Bounds, Configuration};
use repository::{
    Commit, Content, Error, ReadLimits, RepoPath, Repository, Revision, Versioning, bare::Bare,
    folder::Folder,
};
use routing::registry::TunnelRegistry;
use tokio::time::Instant;

/// How often the files `kas.yaml` are looked at.
const LOOK: Duration = Duration::from_millis(300);
/// The pause after a file could not be read.
const BACKOFF: Duration = Duration::from_secs(2);
/// Where the file of an agent is in a repository.
const FOLDER: &str = ".gitlab/agents";
/// The same in a folder on this host.
const FOLDER_ON_HOST: &str = "agents";

/// The agents of this replica.
pub(crate) struct HeldAgents {
    identity: Arc<dyn Identity>,
    registry: Arc<TunnelRegistry>,
    configs: Arc<AgentConfigs>,
    files_at: FilesAt,
    /// The largest file, in bytes.
    limit: u64,
    files: Mutex<HashMap<AgentId, Known>>,
    /// Streams that no agent reads. They keep the configurations of agents known whose own streams are all at
    /// other replicas, as GitLab's agents may have them.
    streams: Mutex<HashMap<AgentId, Arc<ConfigStream>>>,
}

/// Where the files are.
enum FilesAt {
    /// Nowhere: every agent has the defaults.
    Nowhere,
    /// In a folder or a repository on this host.
    Host(Arc<dyn Repository>, &'static str),
    /// In the configuration projects of GitLab.
    Projects(Arc<Repositories>),
}

/// The file of an agent.
#[derive(Debug, Default)]
struct Known {
    /// The commit of the agent's configuration at which it was read; `None`: files of a folder have none.
    commit: Option<Arc<str>>,
    /// When it may be read again after a failure.
    not_before: Option<Instant>,
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
        repositories: &Arc<Repositories>,
    ) -> Arc<Self> {
        let files_at = match &config.source {
            Source::None if repositories.has_projects() => FilesAt::Projects(Arc::clone(repositories)),
            Source::None => FilesAt::Nowhere,
            Source::Folder(path) => FilesAt::Host(Arc::new(Folder::new(path)), FOLDER_ON_HOST),
            Source::Git(path) => FilesAt::Host(Arc::new(Bare::new(path, None)), FOLDER),
        };
        let limit = config.max_file_size.into();
        let (files, streams) = (Mutex::default(), Mutex::default());
        Arc::new(Self { identity, registry, configs, files_at, limit, files, streams })
    }

    /// Lets the configurations of these agents be read here.
    fn keep_configurations(&self, held: &[Arc<Agent>]) {
        let mut streams = self.streams.lock();
        let ids: HashSet<AgentId> = held.iter().map(|agent| agent.id).collect();
        streams.retain(|known, _| ids.contains(known));
        for agent in held {
            if !streams.contains_key(&agent.id) && self.configs.latest(agent).is_none() {
                streams.insert(agent.id, self.configs.subscribe(agent, "", Shown::All));
            }
        }
    }

    /// Reads what the planners need of agents until dropped.
    pub(crate) async fn follow(self: Arc<Self>) {
        loop {
            let held = self.held();
            self.keep_configurations(&held);
            if matches!(self.files_at, FilesAt::Nowhere) {
                tokio::time::sleep(LOOK).await;
                continue;
            }
            let ids: HashSet<AgentId> = held.iter().map(|agent| agent.id).collect();
            self.files.lock().retain(|known, _| ids.contains(known));
            for agent in held {
                let Some(latest) = self.configs.latest(&agent) else { continue };
                let gitops = latest.configuration.gitops.as_ref();
                if gitops.is_some_and(|gitops| !gitops.manifest_projects.is_empty()) {
                    self.look(&agent, latest.commit).await;
                }
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Reads the file of an agent if it may have changed: at the commit of its configuration, so that a project
    /// is never applied without the bounds that were committed with it.
    async fn look(&self, agent: &Agent, commit: Arc<str>) {
        let is_versioned = match &self.files_at {
            FilesAt::Nowhere => return,
            FilesAt::Host(repository, _) => repository.versioning() == Versioning::Commit,
            FilesAt::Projects(_) => true,
        };
        let commit = is_versioned.then_some(commit);
        {
            let files = self.files.lock();
            let known = files.get(&agent.id);
            let is_known = known.is_some_and(|known| commit.is_some() && known.commit == commit);
            if is_known || known.and_then(|known| known.not_before).is_some_and(|at| Instant::now() < at) {
                return;
            }
        }
        let opened = match &self.files_at {
            FilesAt::Nowhere => return,
            FilesAt::Host(repository, folder) => Ok((Arc::clone(repository), *folder)),
            FilesAt::Projects(repositories) => repositories
                .open(RepositoryId::Project(agent.project_id), None)
                .map(|opened| (Arc::clone(opened.repository()), FOLDER)),
        };
        let read = match opened {
            Ok((repository, folder)) => self.read(&*repository, folder, agent, commit.as_deref()).await,
            Err(error) => Err(error),
        };
        match read {
            Ok((parsed, shown)) => self.note(agent, commit, parsed, &shown),
            // What is known stays.
            Err(error) => {
                tracing::debug!(
                    agent.id = agent.id.get(),
                    error = error.to_string(),
                    "kas.yaml cannot be read"
                );
                let mut files = self.files.lock();
                files.entry(agent.id).or_default().not_before = Some(Instant::now() + BACKOFF);
            }
        }
    }

    /// Reads the file of an agent. Also returns its path, for people.
    async fn read(
        &self,
        repository: &dyn Repository,
        folder: &str,
        agent: &Agent,
        commit: Option<&str>,
    ) -> Result<(Result<KasYaml, String>, String), Error> {
        let path = RepoPath::new(format!("{folder}/{}/kas.yaml", agent.name));
        let path = path.map_err(|error| Error::User(error.to_string()))?;
        let content = match commit {
            None => repository.file(&Revision::Head, &path, self.limit).await?.content,
            Some(commit) => {
                let commit: Commit =
                    commit.parse().map_err(|error: repository::InvalidId| Error::User(error.to_string()))?;
                let limits = ReadLimits { file: self.limit, total: self.limit };
                let read = repository.read(&commit, std::slice::from_ref(&path), limits).await?;
                read.into_iter().next().unwrap_or(Content::Absent)
            }
        };
        let parsed = match content {
            Content::Absent => Ok(KasYaml::default()),
            content => content
                .into_data(&repository.shown(&path))
                .map_err(|error| error.to_string())
                .and_then(|data| kas_yaml::parse(&data)),
        };
        Ok((parsed, repository.shown(&path)))
    }

    fn note(&self, agent: &Agent, commit: Option<Arc<str>>, parsed: Result<KasYaml, String>, path: &str) {
        let mut files = self.files.lock();
        let known = files.entry(agent.id).or_default();
        (known.commit, known.not_before) = (commit, None);
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
                        path,
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
        let file = match &self.files_at {
            FilesAt::Nowhere => Arc::default(),
            FilesAt::Host(..) | FilesAt::Projects(_) => {
                let files = self.files.lock();
                let known = files.get(&agent.id)?;
                // What was committed together becomes effective together.
                if known.commit.as_ref().is_some_and(|commit| *commit != latest.commit) {
                    return None;
                }
                known.good.clone()?
            }
        };
        let gitops = latest.configuration.gitops.iter();
        let projects = gitops.flat_map(|gitops| gitops.manifest_projects.iter().cloned());
        Some(Configuration {
            projects: projects.collect(),
            bounds: Bounds { namespaces: file.namespaces.clone(), check: Some(file.check) },
            identities: file.identities.clone(),
        })
    }
}
