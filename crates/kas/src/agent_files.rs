//! What `kas.yaml` of agents says, also of those whose configuration streams are at other replicas.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    num::NonZeroUsize,
    sync::Arc,
    time::Duration,
};

use agent_config::{KasState, kas_yaml::Prometheus};
use async_trait::async_trait;
use cluster::Tracker;
use futures_util::{StreamExt as _, stream};
use grpc::service::{LocalService, local_service};
use ids::{AgentId, ReplicaId};
use lru::LruCache;
use parking_lot::Mutex;
use promql::Scope;
use proto::kas::internal::v1::{
    KasYamlOfAgent, KasYamlRequest, KasYamlResponse, PrometheusService,
    fleet_server::{Fleet, FleetServer},
};
use routing::peer::Peers;
use tokio::time::Instant;
use tonic::{Request, Response, Status};

use crate::sync::{HeldAgents, ask};

const KAS_YAML: &str = "/kas.internal.v1.Fleet/KasYaml";
/// How long an answer of another replica counts.
const KEPT: Duration = Duration::from_secs(60);
/// How long it counts that no replica knew a file.
const KEPT_UNKNOWN: Duration = Duration::from_secs(5);
/// Files that are kept.
const MOST: NonZeroUsize = NonZeroUsize::new(20_000).expect("it is not 0");
/// How long another replica may take.
const WITHIN: Duration = Duration::from_secs(3);
/// Replicas that are asked at once.
const AT_ONCE: usize = 16;

/// What `kas.yaml` of an agent says about the agent itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct AgentFile {
    /// Its labels.
    pub(crate) labels: BTreeMap<String, String>,
    /// Where its Prometheus is.
    pub(crate) prometheus: Option<Prometheus>,
    /// Why the current file is not good. What is above is then that of the last good one.
    pub(crate) flaw: Option<String>,
    /// Whether Helm's Secrets may be read for the list of applications.
    pub(crate) helm: bool,
    /// The only namespaces; empty: the whole cluster.
    pub(crate) namespaces: BTreeSet<String>,
}

/// Why a file is not known, for people.
pub(crate) type Unknown = Arc<str>;
type Known = Result<Arc<AgentFile>, Unknown>;

/// Reads `kas.yaml` of agents.
#[async_trait]
pub(crate) trait Files: Send + Sync {
    /// Returns the files of these agents, or why they are not known. Cancel safe.
    async fn of(&self, agents: &[AgentId]) -> HashMap<AgentId, Result<Arc<AgentFile>, Unknown>>;
}

#[async_trait]
impl Files for AgentFiles {
    async fn of(&self, agents: &[AgentId]) -> HashMap<AgentId, Result<Arc<AgentFile>, Unknown>> {
        Self::of(self, agents).await
    }
}

/// Finds the files of agents.
pub(crate) struct AgentFiles {
    held: Arc<HeldAgents>,
    tracker: Arc<dyn Tracker>,
    me: ReplicaId,
    /// `None`: there are no other replicas.
    peers: Option<Arc<Peers>>,
    kept: Mutex<LruCache<AgentId, (Instant, Known)>>,
    /// One question to the other replicas at a time: what waits for it is often answered by it.
    asking: tokio::sync::Mutex<()>,
}

impl AgentFiles {
    pub(crate) fn new(
        held: Arc<HeldAgents>,
        tracker: Arc<dyn Tracker>,
        me: ReplicaId,
        peers: Option<Arc<Peers>>,
    ) -> Arc<Self> {
        let (kept, asking) = (Mutex::new(LruCache::new(MOST)), tokio::sync::Mutex::default());
        Arc::new(Self { held, tracker, me, peers, kept, asking })
    }

    /// Returns the service for other replicas.
    pub(crate) fn for_replicas(self: &Arc<Self>) -> (String, LocalService) {
        local_service(FleetServer::new(Here(Arc::clone(self))))
    }

    /// Returns the files of agents, or why they are not known.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub(crate) async fn of(&self, agents: &[AgentId]) -> HashMap<AgentId, Known> {
        let mut found = HashMap::with_capacity(agents.len());
        if self.take_known(agents, &mut found).is_empty() {
            return found;
        }
        let _one = self.asking.lock().await;
        let missing = self.take_known(agents, &mut found);
        if missing.is_empty() {
            return found;
        }
        let (mut told, silent) = self.elsewhere(&missing).await;
        let now = Instant::now();
        for agent in missing {
            let known: Known = match told.remove(&agent) {
                Some(file) => Ok(Arc::new(file)),
                None => match self.held.read_file(agent).await {
                    Some(state) => Ok(Arc::new(of_state(&state))),
                    None => Err(match &silent {
                        Some(silent) => silent.clone(),
                        None => "its kas.yaml is not known: no replica has its configuration stream".into(),
                    }),
                },
            };
            self.kept.lock().put(agent, (now, known.clone()));
            found.insert(agent, known);
        }
        found
    }

    /// Adds what is known without asking. Returns the others.
    fn take_known(&self, agents: &[AgentId], found: &mut HashMap<AgentId, Known>) -> Vec<AgentId> {
        let mut missing = Vec::new();
        let mut kept = self.kept.lock();
        for &agent in agents {
            if let Some(state) = self.held.file(agent) {
                found.insert(agent, Ok(Arc::new(of_state(&state))));
                continue;
            }
            match kept.get(&agent) {
                Some((at, known)) if at.elapsed() < if known.is_ok() { KEPT } else { KEPT_UNKNOWN } => {
                    found.insert(agent, known.clone());
                }
                _ => missing.push(agent),
            }
        }
        missing
    }

    /// Asks the other replicas. Returns what they told, and why something may be missing.
    async fn elsewhere(&self, agents: &[AgentId]) -> (HashMap<AgentId, AgentFile>, Option<Unknown>) {
        let mut told = HashMap::new();
        let Some(peers) = &self.peers else { return (told, None) };
        let known = self.tracker.replicas().await;
        let others = known
            .replicas
            .into_iter()
            .filter(|status| status.health.is_some() && !status.is_lost() && status.replica.id != self.me);
        let request = KasYamlRequest { agent_ids: agents.iter().map(|agent| agent.get()).collect() };
        let message = grpc::encode(&request);
        let mut answers = stream::iter(others)
            .map(|status| {
                let message = message.clone();
                async move {
                    let asked = ask::<KasYamlResponse>(peers, &status.replica, KAS_YAML, message);
                    (status.replica.id.clone(), tokio::time::timeout(WITHIN, asked).await)
                }
            })
            .buffer_unordered(AT_ONCE);
        let mut silent = None;
        while let Some((replica, answer)) = answers.next().await {
            let reason = match answer {
                Ok(Ok(answer)) => {
                    for file in answer.files {
                        if let Ok(agent) = AgentId::new(file.agent_id) {
                            told.entry(agent).or_insert_with(|| from_wire(file));
                        }
                    }
                    continue;
                }
                Ok(Err(status)) => status.message().to_owned(),
                Err(_) => format!("no answer in {} s", WITHIN.as_secs()),
            };
            silent = Some(format!("its kas.yaml is not known: replica {replica}: {reason}").into());
        }
        (told, silent)
    }
}

fn of_state(state: &KasState) -> AgentFile {
    let flaw = state.flaw.clone();
    match state.good.as_deref() {
        None => AgentFile { flaw, ..AgentFile::default() },
        Some(file) => AgentFile {
            labels: file.labels.clone(),
            prometheus: file.prometheus.clone(),
            helm: file.helm,
            namespaces: file.namespaces.clone().unwrap_or_default(),
            flaw,
        },
    }
}

fn to_wire(agent: AgentId, file: AgentFile) -> KasYamlOfAgent {
    KasYamlOfAgent {
        agent_id: agent.get(),
        labels: file.labels.into_iter().collect(),
        prometheus: file.prometheus.map(|prometheus| PrometheusService {
            service: prometheus.service.to_string(),
            prefix: prometheus.prefix,
            scope: prometheus.scope.map_or_else(String::new, |scope| scope.to_string()),
        }),
        namespaces: file.namespaces.into_iter().collect(),
        helm: file.helm,
        flaw: file.flaw.unwrap_or_default(),
    }
}

/// Reads what another replica told. A part that this one cannot read becomes a flaw, and is not in force: a
/// server without its scope would tell too much.
fn from_wire(told: KasYamlOfAgent) -> AgentFile {
    let mut flaw = Some(told.flaw).filter(|flaw| !flaw.is_empty());
    let prometheus = told.prometheus.map(|prometheus| {
        let PrometheusService { service, prefix, scope } = prometheus;
        let service = service.parse().map_err(|error| format!("prometheus.service: {error}"))?;
        let scope = match scope.as_str() {
            "" => None,
            scope => Some(Scope::parse(scope).map_err(|error| format!("prometheus.match: {error}"))?),
        };
        Ok::<_, String>(Prometheus { service, prefix, scope })
    });
    let prometheus = match prometheus {
        Some(Err(error)) => {
            flaw = Some(error);
            None
        }
        other => other.and_then(Result::ok),
    };
    AgentFile {
        labels: told.labels.into_iter().collect(),
        prometheus,
        helm: told.helm,
        namespaces: told.namespaces.into_iter().collect(),
        flaw,
    }
}

/// Answers other replicas: only what this one knows.
struct Here(Arc<AgentFiles>);

#[tonic::async_trait]
impl Fleet for Here {
    async fn kas_yaml(&self, request: Request<KasYamlRequest>) -> Result<Response<KasYamlResponse>, Status> {
        let ids = request.into_inner().agent_ids;
        if ids.len() > ::fleet::MOST_AGENTS {
            let text = format!("{} agents; at most {}", ids.len(), ::fleet::MOST_AGENTS);
            return Err(Status::invalid_argument(text));
        }
        let mut files = Vec::new();
        for id in ids {
            let agent = AgentId::new(id).map_err(|error| Status::invalid_argument(error.to_string()))?;
            if let Some(state) = self.0.held.file(agent) {
                files.push(to_wire(agent, of_state(&state)));
            }
        }
        Ok(Response::new(KasYamlResponse { files }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_the_same_at_another_replica() {
        let file = r#"
labels: {env: prod}
namespaces: [a, b]
applications: {helm: true}
prometheus: {service: m/https:prom:9090, prefix: /p, match: '{ns="shop"}'}
"#;
        let good = agent_config::kas_yaml::parse(file.as_bytes()).unwrap();
        let state = KasState { good: Some(Arc::new(good)), flaw: Some("later".to_owned()), warning: None };
        let agent = AgentId::new(7).unwrap();
        let file = of_state(&state);
        assert_eq!(from_wire(to_wire(agent, file.clone())), file);
        assert_eq!(from_wire(to_wire(agent, AgentFile::default())), AgentFile::default());
    }

    #[test]
    fn a_server_whose_scope_cannot_be_read_is_not_asked() {
        let prometheus =
            PrometheusService { service: "a/b:1".to_owned(), scope: "?".to_owned(), ..Default::default() };
        let told = KasYamlOfAgent { agent_id: 7, prometheus: Some(prometheus), ..Default::default() };
        let read = from_wire(told);
        assert!(read.prometheus.is_none() && read.flaw.unwrap().contains("prometheus.match"));
    }
}
