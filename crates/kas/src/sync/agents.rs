//! The agents of this replica, and what their files say about manifests.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use agent_config::{AgentConfigs, ConfigStream, KasState, NotKnown, Shown};
use identity::Identity;
use ids::{Agent, AgentId};
use parking_lot::Mutex;
use planner::{Agents, Bounds, Configuration};
use routing::registry::TunnelRegistry;

/// How often the agents that need a stand-in are looked for.
const LOOK: Duration = Duration::from_millis(500);

/// The agents of this replica.
pub(crate) struct HeldAgents {
    identity: Arc<dyn Identity>,
    registry: Arc<TunnelRegistry>,
    configs: Arc<AgentConfigs>,
    /// Streams that no agent reads. They keep the configurations of agents known whose own streams are all at
    /// other replicas, as GitLab's agents may have them.
    streams: Mutex<HashMap<AgentId, Arc<ConfigStream>>>,
}

impl HeldAgents {
    pub(crate) fn new(
        identity: Arc<dyn Identity>,
        registry: Arc<TunnelRegistry>,
        configs: Arc<AgentConfigs>,
    ) -> Arc<Self> {
        Arc::new(Self { identity, registry, configs, streams: Mutex::default() })
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

    /// Returns the agents of this replica with what their `kas.yaml` says, or why that is not known.
    pub(crate) fn files(&self) -> Vec<(Arc<Agent>, Result<KasState, NotKnown>)> {
        let with_file = |agent: Arc<Agent>| {
            let state = self.configs.kas_yaml(&agent);
            (agent, state)
        };
        self.held().into_iter().map(with_file).collect()
    }

    /// Returns what `kas.yaml` of an agent says that has a configuration stream here.
    ///
    /// # Errors
    /// Why it is not known.
    pub(crate) fn file(&self, agent: AgentId) -> Result<KasState, NotKnown> {
        let agent = self.identity.agent(agent).ok_or(NotKnown::NotHere)?;
        self.configs.kas_yaml(&agent)
    }

    /// Waits until none of these agents has a file that was not read yet, for at most this long.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub(crate) async fn first_reads(&self, agents: &[AgentId], within: Duration) {
        let mut reads = self.configs.first_reads();
        let is_awaited = |agent: &AgentId| matches!(self.file(*agent), Err(NotKnown::NotYet));
        let reading = async {
            for agent in agents {
                while is_awaited(agent) {
                    // The sender lives as long as the configurations.
                    if reads.changed().await.is_err() {
                        return;
                    }
                }
            }
        };
        // What was not read in time is not known.
        let _ = tokio::time::timeout(within, reading).await;
    }

    /// Reads `kas.yaml` of an agent that has no configuration stream here.
    ///
    /// # Errors
    /// [`NotKnown::NotHere`] if it is not on this host, or the agent is not known.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub(crate) async fn read_file(&self, agent: AgentId) -> Result<KasState, NotKnown> {
        let agent = self.identity.agent(agent).ok_or(NotKnown::NotHere)?;
        self.configs.read_kas_yaml(&agent).await
    }

    /// Reads `kas.yaml` of agents that this replica does not hold, if the files are on this host.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub(super) async fn files_of_others(
        &self,
        is_wanted: impl Fn(&Agent) -> bool,
    ) -> Vec<(Arc<Agent>, Result<KasState, NotKnown>)> {
        let mut read = Vec::new();
        for agent in self.identity.agents() {
            if self.registry.holds(agent.id) || !is_wanted(&agent) {
                continue;
            }
            let state = self.configs.read_kas_yaml(&agent).await;
            read.push((agent, state));
        }
        read
    }

    /// Reads what the planners need of agents until dropped.
    pub(crate) async fn follow(self: Arc<Self>) {
        loop {
            self.keep_configurations(&self.held());
            tokio::time::sleep(LOOK).await;
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
        let (projects, file) = self.configs.manifests(agent)?;
        Some(Configuration {
            projects: projects.into(),
            bounds: Bounds { namespaces: file.namespaces.clone(), check: Some(file.check) },
            identities: file.identities.clone(),
        })
    }
}
