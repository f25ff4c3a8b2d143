//! What `kas.yaml` of agents says, also of those whose configuration streams are at other replicas.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    num::NonZeroUsize,
    sync::Arc,
    time::Duration,
};

use agent_config::{
    KasState, NotKnown,
    kas_yaml::{Prometheus, is_prefix},
};
use async_trait::async_trait;
use cluster::Tracker;
use futures_util::{StreamExt as _, stream};
use grpc::service::{LocalService, local_service};
use ids::{AgentId, ReplicaId};
use lru::LruCache;
use parking_lot::Mutex;
use promql::Scope;
use proto::kas::internal::v1::{
    KasYamlOfAgent, KasYamlRequest, KasYamlResponse, PrometheusService, UnknownKasYaml,
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
/// How long a file is waited for that is about to be read for the first time. Less than [`WITHIN`].
const FIRST_READ: Duration = Duration::from_secs(1);
/// The longest reason of another replica that is passed on, in characters.
const LONGEST_REASON: usize = 500;
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

    /// Returns the files of agents, or why they are not known. One that was not read yet, or cannot be read,
    /// is not known: what it says may narrow what may be asked. One that does not exist says nothing.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub(crate) async fn of(&self, agents: &[AgentId]) -> HashMap<AgentId, Known> {
        let mut found = HashMap::with_capacity(agents.len());
        let missing = self.take_known(agents, &mut found);
        if missing.is_empty() {
            return found;
        }
        self.held.first_reads(&missing, FIRST_READ).await;
        let _one = self.asking.lock().await;
        let missing = self.take_known(&missing, &mut found);
        if missing.is_empty() {
            return found;
        }
        let Told { mut files, mut unknown, silent } = self.elsewhere(&missing).await;
        let now = Instant::now();
        for agent in missing {
            let known: Known = match files.remove(&agent) {
                Some(file) => Ok(Arc::new(file)),
                None => match self.held.read_file(agent).await {
                    Ok(state) => of_state(&state).map(Arc::new),
                    Err(NotKnown::NotHere) => Err(self.why(agent, unknown.remove(&agent), silent.as_ref())),
                    Err(why) => Err(not_known(&why)),
                },
            };
            self.kept.lock().put(agent, (now, known.clone()));
            found.insert(agent, known);
        }
        found
    }

    /// Returns why a file is not known that no replica and no source on this host tells.
    fn why(&self, agent: AgentId, unknown: Option<Unknown>, silent: Option<&Unknown>) -> Unknown {
        match (self.held.file(agent), unknown, silent) {
            (Err(why @ (NotKnown::NotYet | NotKnown::Unreadable(_))), ..) => not_known(&why),
            (_, Some(why), _) => why,
            (_, None, Some(silent)) => silent.clone(),
            (_, None, None) => not_known(&NotKnown::NotHere),
        }
    }

    /// Adds what is known without asking. Returns the others.
    fn take_known(&self, agents: &[AgentId], found: &mut HashMap<AgentId, Known>) -> Vec<AgentId> {
        let mut missing = Vec::new();
        let mut kept = self.kept.lock();
        for &agent in agents {
            if let Ok(state) = self.held.file(agent) {
                found.insert(agent, of_state(&state).map(Arc::new));
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

    /// Asks the other replicas.
    async fn elsewhere(&self, agents: &[AgentId]) -> Told {
        let mut told = Told::default();
        let Some(peers) = &self.peers else { return told };
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
        while let Some((replica, answer)) = answers.next().await {
            let reason = match answer {
                Ok(Ok(answer)) => {
                    told.add(&replica, answer);
                    continue;
                }
                Ok(Err(status)) => status.message().to_owned(),
                Err(_) => format!("no answer in {} s", WITHIN.as_secs()),
            };
            told.silent = Some(format!("its kas.yaml is not known: replica {replica}: {reason}").into());
        }
        told
    }
}

/// What the other replicas told.
#[derive(Default)]
struct Told {
    files: HashMap<AgentId, AgentFile>,
    /// Files that a replica should know, and does not, with the reason.
    unknown: HashMap<AgentId, Unknown>,
    /// Why something may be missing.
    silent: Option<Unknown>,
}

impl Told {
    fn add(&mut self, replica: &ReplicaId, answer: KasYamlResponse) {
        for file in answer.files {
            let Ok(agent) = AgentId::new(file.agent_id) else { continue };
            match from_wire(file, replica) {
                Ok(file) => {
                    self.files.entry(agent).or_insert(file);
                }
                Err(why) => {
                    self.unknown.insert(agent, why);
                }
            }
        }
        for UnknownKasYaml { agent_id, reason } in answer.unknown {
            if let Ok(agent) = AgentId::new(agent_id) {
                let reason: String = reason.chars().take(LONGEST_REASON).collect();
                self.unknown.insert(agent, reason.into());
            }
        }
    }
}

fn not_known(why: &NotKnown) -> Unknown {
    format!("its kas.yaml is not known: {why}").into()
}

/// There was only a wrong one.
fn is_wrong(flaw: &str) -> Unknown {
    format!("its kas.yaml is wrong: {flaw}").into()
}

/// Returns what a file says. Of one that was never good it is not known what it should say.
fn of_state(state: &KasState) -> Result<AgentFile, Unknown> {
    let flaw = state.flaw.clone();
    match (state.good.as_deref(), flaw) {
        (None, None) => Err(not_known(&NotKnown::NotYet)),
        (None, Some(flaw)) => Err(is_wrong(&flaw)),
        (Some(file), flaw) => Ok(AgentFile {
            labels: file.labels.clone(),
            prometheus: file.prometheus.clone(),
            helm: file.helm,
            namespaces: file.namespaces.clone().unwrap_or_default(),
            flaw,
        }),
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
        is_known: true,
    }
}

/// Reads what another replica told. A part that this one cannot read becomes a flaw, and is not in force: a
/// server without its scope would tell too much.
///
/// # Errors
/// A replica of before `is_known` has told nothing of the file: it may not have read it.
fn from_wire(told: KasYamlOfAgent, replica: &ReplicaId) -> Result<AgentFile, Unknown> {
    let mut flaw = Some(told.flaw).filter(|flaw| !flaw.is_empty());
    let says_nothing =
        told.labels.is_empty() && told.namespaces.is_empty() && told.prometheus.is_none() && !told.helm;
    if says_nothing && !told.is_known {
        return Err(match flaw {
            Some(flaw) => is_wrong(&flaw),
            None => format!(
                "its kas.yaml is not known: replica {replica} is older and does not say whether it has read it"
            )
            .into(),
        });
    }
    let prometheus = told.prometheus.map(|prometheus| {
        let PrometheusService { service, prefix, scope } = prometheus;
        let service = service.parse().map_err(|error| format!("prometheus.service: {error}"))?;
        if !is_prefix(&prefix) {
            return Err("prometheus.prefix: it is no path without a slash at its end".to_owned());
        }
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
    Ok(AgentFile {
        labels: told.labels.into_iter().collect(),
        prometheus,
        helm: told.helm,
        namespaces: told.namespaces.into_iter().collect(),
        flaw,
    })
}

/// For fuzzing: an answer of another replica. No panic; a server whose address, prefix or scope cannot be
/// read is not asked, and what is read is the same at the next replica.
#[cfg(feature = "fuzzing")]
pub fn fuzz(bytes: &[u8]) {
    use prost::Message as _;
    let Ok(answer) = KasYamlResponse::decode(bytes) else { return };
    let replica = ReplicaId::new("r1");
    for told in answer.files {
        let Ok(agent) = AgentId::new(told.agent_id) else { continue };
        let server = told.prometheus.clone();
        let Ok(file) = from_wire(told, &replica) else { continue };
        if let Some(server) = server {
            match &file.prometheus {
                Some(read) => {
                    assert_eq!(read.scope.is_some(), !server.scope.is_empty(), "a scope is in force");
                    assert!(
                        read.prefix.is_empty() || read.prefix.starts_with('/') && !read.prefix.ends_with('/')
                    );
                    assert!(
                        !read.prefix.split('/').any(|part| matches!(part, "." | "..")),
                        "{}",
                        read.prefix
                    );
                }
                None => assert!(file.flaw.is_some(), "it is told why there is no server"),
            }
        }
        assert_eq!(from_wire(to_wire(agent, file.clone()), &replica).as_ref(), Ok(&file));
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
        let agents = ids.into_iter().map(AgentId::new).collect::<Result<Vec<_>, _>>();
        let agents = agents.map_err(|error| Status::invalid_argument(error.to_string()))?;
        self.0.held.first_reads(&agents, FIRST_READ).await;
        let mut answer = KasYamlResponse::default();
        for agent in agents {
            let known = match self.0.held.file(agent) {
                Ok(state) => of_state(&state),
                Err(NotKnown::NotHere) => continue,
                Err(why) => Err(not_known(&why)),
            };
            match known {
                Ok(file) => answer.files.push(to_wire(agent, file)),
                Err(reason) => {
                    let reason = reason.chars().take(LONGEST_REASON).collect();
                    answer.unknown.push(UnknownKasYaml { agent_id: agent.get(), reason });
                }
            }
        }
        Ok(Response::new(answer))
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
        let file = of_state(&state).unwrap();
        assert_eq!(from_wire(to_wire(agent, file.clone()), &replica()).as_ref(), Ok(&file));
        // A file that is not there says nothing, and that is known.
        let none = of_state(&KasState { good: Some(Arc::default()), flaw: None, warning: None }).unwrap();
        assert_eq!(none, AgentFile::default());
        assert_eq!(from_wire(to_wire(agent, none.clone()), &replica()), Ok(none));
        // An older replica does not say that it has read a file; what it tells is known.
        let old = KasYamlOfAgent { is_known: false, ..to_wire(agent, file.clone()) };
        assert_eq!(from_wire(old, &replica()), Ok(file));
    }

    #[test]
    fn what_was_not_read_is_not_known() {
        let why = of_state(&KasState::default()).unwrap_err();
        assert!(why.contains("not read yet"), "{why}");
        let flaw = Some("labels: expected a map".to_owned());
        let why = of_state(&KasState { flaw, ..KasState::default() }).unwrap_err();
        assert_eq!(&*why, "its kas.yaml is wrong: labels: expected a map");
        // What replicas of before `is_known` tell in both cases.
        let why = from_wire(KasYamlOfAgent { agent_id: 7, ..Default::default() }, &replica()).unwrap_err();
        assert!(why.contains("replica r1 is older"), "{why}");
        let told = KasYamlOfAgent { agent_id: 7, flaw: "x".to_owned(), ..Default::default() };
        assert_eq!(&*from_wire(told, &replica()).unwrap_err(), "its kas.yaml is wrong: x");
        // A replica that has not read a file does not hide one that has.
        let agent = AgentId::new(7).unwrap();
        let mut told = Told::default();
        let unknown = vec![UnknownKasYaml { agent_id: 7, reason: "not yet".to_owned() }];
        told.add(&replica(), KasYamlResponse { files: Vec::new(), unknown });
        assert!(told.files.is_empty() && &*told.unknown[&agent] == "not yet");
        let files = vec![to_wire(agent, AgentFile { helm: true, ..AgentFile::default() })];
        told.add(&replica(), KasYamlResponse { files, unknown: Vec::new() });
        assert!(told.files[&agent].helm);
    }

    fn replica() -> ReplicaId {
        ReplicaId::new("r1")
    }

    #[test]
    fn a_server_whose_scope_cannot_be_read_is_not_asked() {
        let prometheus =
            PrometheusService { service: "a/b:1".to_owned(), scope: "?".to_owned(), ..Default::default() };
        let told = KasYamlOfAgent { agent_id: 7, prometheus: Some(prometheus), ..Default::default() };
        let read = from_wire(told, &replica()).unwrap();
        assert!(read.prometheus.is_none() && read.flaw.unwrap().contains("prometheus.match"));
        for prefix in ["p", "/p/", "/../x", "/a?b", "//"] {
            let prometheus = PrometheusService {
                service: "a/b:1".to_owned(),
                prefix: prefix.to_owned(),
                ..Default::default()
            };
            let told = KasYamlOfAgent { agent_id: 7, prometheus: Some(prometheus), ..Default::default() };
            let read = from_wire(told, &replica()).unwrap();
            assert!(
                read.prometheus.is_none() && read.flaw.unwrap().contains("prometheus.prefix"),
                "{prefix}"
            );
        }
    }
}
