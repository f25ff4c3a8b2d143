//! What runs in the clusters of agents: components by rules, and applications by what tells of them.
//!
//! It is read when somebody asks, as whom asks, and kept for 10 min. Nobody asks all agents on a clock.

mod answer;
mod kept;
mod read;
mod service;
mod weigh;

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use ::fleet::{
    MOST_AGENTS, Selector, ServiceAddress, Unanswered,
    applications::{self, Application, Told},
    components::{Component, Rules, SHIPPED},
};
use cluster_call::{Budget, Cluster, ClusterSettings};
use ids::{Actor, AgentId, Impersonation};
use kubernetes_api::NotReached;
use observe::Observer;
use routing::router::Router;
use tokio::time::Instant;

pub(crate) use self::answer::AgentCatalog;
#[cfg(feature = "fuzzing")]
pub use self::read::fuzz;
use self::{
    kept::{Kept, Weigh},
    read::Reader,
};
use super::{
    callers::{Callers, Slot},
    fan_out::{Times, fan_out},
    metrics::{self, FleetMetrics},
    select::{self, SelectError, Want, Who},
};
use crate::{
    agent_files::{AgentFile, AgentFiles},
    directory::AgentDirectory,
    joined::{self, Joined},
};

/// How long one request may take.
const REQUEST: Duration = Duration::from_secs(10);
/// How long one agent may take, and all of a question.
const TIMES: Times = Times { each: Duration::from_secs(30), all: Duration::from_secs(90) };
/// How long a request may wait for a tunnel.
const FIND: Duration = Duration::from_secs(3);
/// The largest page, in bytes.
const MAX_PAGE: usize = 4 << 20;
/// What may be read of one agent, and at the same time of all, in bytes.
const MOST_OF_AGENT: usize = 64 << 20;
const MOST_AT_ONCE: usize = 256 << 20;
/// Requests to one agent at once.
const AT_ONCE: usize = 4;
/// Questions of one caller at once.
const PER_CALLER: usize = 4;
/// The most components or applications of one answer.
const MOST_ROWS: usize = 100_000;
/// What is kept of components and of applications, in bytes.
const MOST_KEPT: usize = 64 << 20;

/// What is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wanted {
    Components,
    Applications,
}

impl From<Wanted> for metrics::Asked {
    fn from(wanted: Wanted) -> Self {
        match wanted {
            Wanted::Components => Self::Components,
            Wanted::Applications => Self::Applications,
        }
    }
}

/// The agent that is read, and as whom.
#[derive(Clone)]
struct Asked {
    agent: AgentId,
    actor: Arc<Actor>,
    run_as: Option<Arc<Impersonation>>,
    /// Only these namespaces; empty: all.
    namespaces: Vec<String>,
    /// `kas.yaml` allows to read Helm's Secrets.
    helm: bool,
}

/// What was read of a cluster, and by whom.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Key {
    agent: AgentId,
    /// The user and the groups that have read it; `None`: agentk.
    reader: Option<String>,
    namespaces: Vec<String>,
    helm: bool,
}

impl Asked {
    fn key(&self) -> Key {
        Key {
            agent: self.agent,
            reader: self.run_as.as_ref().map(|user| format!("{user:?}")),
            namespaces: self.namespaces.clone(),
            helm: self.helm,
        }
    }
}

/// What is known of one cluster.
#[derive(Debug, Default)]
struct Known {
    components: Vec<Component>,
    /// What the labels of workloads tell of applications.
    labelled: Vec<Told>,
    groups: BTreeMap<String, String>,
    /// What could not be read, and why.
    missing: Vec<String>,
}

/// The applications of one cluster.
#[derive(Debug, Default)]
struct Installed {
    applications: Vec<Application>,
    missing: Vec<String>,
}

/// What [`Catalog`] is made of.
pub(crate) struct CatalogParts {
    pub(crate) router: Arc<Router>,
    pub(crate) observer: Arc<Observer>,
    pub(crate) directory: Arc<AgentDirectory>,
    pub(crate) files: Arc<AgentFiles>,
    pub(crate) rules: Rules,
    pub(crate) metrics: Arc<FleetMetrics>,
}

/// What is read at the moment, for all who ask for it.
type Reading<V> = Joined<Key, Result<Arc<V>, String>>;

/// Reads what runs in clusters.
pub struct Catalog {
    parts: CatalogParts,
    components: Kept<Key, Known>,
    applications: Kept<Key, Installed>,
    reading_components: Reading<Known>,
    reading_applications: Reading<Installed>,
    memory: Arc<Budget>,
    callers: Arc<Callers>,
}

impl std::fmt::Debug for Catalog {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Catalog").finish_non_exhaustive()
    }
}

/// A question to many agents.
pub(crate) struct CatalogQuestion {
    pub(crate) wanted: Wanted,
    pub(crate) selector: Selector,
    /// Only these namespaces; empty: all.
    pub(crate) namespaces: Vec<String>,
    pub(crate) who: Who,
    /// By which questions at once are counted.
    pub(crate) caller: Arc<str>,
    pub(crate) actor: Arc<Actor>,
}

/// Why a question has no answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CatalogError {
    #[error(transparent)]
    Select(#[from] SelectError),
    #[error("{PER_CALLER} questions of this caller are open")]
    TooManyOpen,
}

/// An answer: an entry for each agent that was read, and why others were not.
#[derive(Debug, Default)]
pub(crate) struct CatalogAnswer {
    pub(crate) agents: Vec<AgentCatalog>,
    pub(crate) unanswered: Vec<Unanswered>,
    /// The question is open until the client has the answer.
    open: Option<Slot>,
}

/// Where the Prometheus of a cluster is, by its components.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum PrometheusFound {
    One(ServiceAddress),
    /// There is none that can be asked. What could not be read.
    None(Vec<String>),
    Several(Vec<String>),
}

/// Reads the rules of the configuration.
///
/// # Errors
/// The index of the file, and what is wrong.
pub(crate) fn rules(files: &[std::path::PathBuf]) -> Result<Rules, (usize, String)> {
    let parse = |text: &str| {
        let file =
            settings::yaml::parse(text, settings::yaml::Size::Small).map_err(|error| error.to_string())?;
        Rules::read(file).map_err(|error| error.to_string())
    };
    if files.is_empty() {
        return parse(SHIPPED).map_err(|why| (0, why));
    }
    let mut all = Rules::default();
    for (index, path) in files.iter().enumerate() {
        let text = std::fs::read_to_string(path).map_err(|error| error.to_string());
        let more = text
            .and_then(|text| parse(&text))
            .and_then(|rules| all.add(rules).map_err(|error| error.to_string()));
        more.map_err(|why| (index, format!("{}: {why}", path.display())))?;
    }
    Ok(all)
}

impl Catalog {
    pub(crate) fn new(parts: CatalogParts) -> Arc<Self> {
        let memory = Budget::new("what is read of clusters", MOST_AT_ONCE, None);
        Arc::new(Self {
            parts,
            components: Kept::new(MOST_KEPT),
            applications: Kept::new(MOST_KEPT),
            reading_components: Joined::new(),
            reading_applications: Joined::new(),
            memory,
            callers: Callers::new(PER_CALLER),
        })
    }

    /// Answers a question.
    ///
    /// # Errors
    /// [`CatalogError`].
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub(crate) async fn ask(
        self: &Arc<Self>,
        question: CatalogQuestion,
    ) -> Result<CatalogAnswer, CatalogError> {
        let (begun, asked) = (Instant::now(), question.wanted.into());
        let answer = self.answer_of(question).await;
        let outcome = match &answer {
            Ok(answer) if answer.unanswered.is_empty() => metrics::Outcome::Answered,
            Ok(answer) if answer.agents.is_empty() => metrics::Outcome::Failed,
            Ok(_) => metrics::Outcome::Partial,
            Err(CatalogError::Select(SelectError::NotReached(NotReached::Unavailable(_)))) => {
                metrics::Outcome::Failed
            }
            Err(_) => metrics::Outcome::Refused,
        };
        let metrics = &self.parts.metrics;
        metrics.question(asked, outcome, begun.elapsed().as_secs_f64());
        if let Ok(answer) = &answer {
            metrics.agents(answer.agents.len(), answer.unanswered.len());
        }
        answer
    }

    async fn answer_of(self: &Arc<Self>, question: CatalogQuestion) -> Result<CatalogAnswer, CatalogError> {
        let CatalogQuestion { wanted, selector, namespaces, who, caller, actor } = question;
        let open = self.callers.open(&caller).ok_or(CatalogError::TooManyOpen)?;
        // Without its file, it is not known which namespaces of an agent may be read.
        let want = Want { files: true, most: MOST_AGENTS };
        let selected =
            select::select(&*self.parts.directory, &*self.parts.files, &who, &selector, want).await?;
        let (namespaces, actor) = (&namespaces, &actor);
        // Counted before they are copied, so that the rest of a large fleet takes no memory.
        let rows = &AtomicUsize::new(0);
        let count = |more: usize| {
            let counted = |sum: usize| sum.checked_add(more).filter(|sum| *sum <= MOST_ROWS);
            let found = rows.fetch_update(Ordering::Relaxed, Ordering::Relaxed, counted);
            let text = || format!("the answer would have more than {MOST_ROWS} rows: select fewer agents");
            found.map(drop).map_err(|_| text())
        };
        let (found, unanswered) = fan_out(selected.members, TIMES, |member| async move {
            let file = member.file.as_deref().ok_or("its kas.yaml is not known")?;
            let asked = Asked {
                agent: member.id,
                actor: Arc::clone(actor),
                run_as: member.run_as.clone(),
                namespaces: scope(file, namespaces)?,
                helm: wanted == Wanted::Applications && file.helm,
            };
            match wanted {
                Wanted::Components => {
                    let known = self.components(&asked).await?;
                    count(known.components.len())?;
                    Ok(AgentCatalog::of_components(&member, known.components.clone(), known.missing.clone()))
                }
                Wanted::Applications => {
                    let installed = self.applications(&asked).await?;
                    count(installed.applications.len())?;
                    let Installed { applications, missing } = &*installed;
                    Ok(AgentCatalog::of_applications(&member, applications.clone(), missing.clone()))
                }
            }
        })
        .await;
        let agents = found.into_iter().map(|(_, agent)| agent).collect();
        let mut answer = CatalogAnswer { agents, unanswered: selected.unanswered, open: Some(open) };
        answer.unanswered.extend(unanswered);
        answer.unanswered.sort_by_key(|missing| missing.agent);
        Ok(answer)
    }

    /// Returns where the Prometheus of an agent is, by its components.
    ///
    /// # Errors
    /// Why that cannot be said.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub(super) async fn prometheus(
        self: &Arc<Self>,
        agent: AgentId,
        actor: Arc<Actor>,
        run_as: Option<Arc<Impersonation>>,
        file: &AgentFile,
    ) -> Result<PrometheusFound, String> {
        let namespaces = scope(file, &[])?;
        let asked = Asked { agent, actor, run_as, namespaces, helm: false };
        let known = tokio::time::timeout(TIMES.each, self.components(&asked)).await;
        let known = known
            .map_err(|_| format!("its components are not known: no answer in {} s", TIMES.each.as_secs()))?;
        let known = known.map_err(|why| format!("its components are not known: {why}"))?;
        let servers = known.components.iter().filter(|component| component.name == "prometheus");
        let servers: Vec<&Component> = servers.filter(|component| !component.service.is_empty()).collect();
        Ok(match servers.as_slice() {
            [] => PrometheusFound::None(known.missing.clone()),
            [one] => match one.service.parse() {
                Ok(service) => PrometheusFound::One(service),
                Err(_) => PrometheusFound::None(known.missing.clone()),
            },
            several => PrometheusFound::Several(several.iter().map(|it| describe(it)).collect()),
        })
    }

    /// Returns what is kept of a cluster, or what others are reading, or reads it.
    async fn components(self: &Arc<Self>, asked: &Asked) -> Result<Arc<Known>, String> {
        let key = Key { helm: false, ..asked.key() };
        let (catalog, asked, of) = (Arc::clone(self), asked.clone(), key.clone());
        let read = async move {
            let known = Arc::new(catalog.reader(&asked).known(&catalog.parts.rules).await?);
            catalog.components.put(of, Arc::clone(&known));
            Ok(known)
        };
        self.known(Wanted::Components, &self.components, &self.reading_components, key, read).await
    }

    /// As [`components`](Self::components).
    async fn applications(self: &Arc<Self>, asked: &Asked) -> Result<Arc<Installed>, String> {
        let key = asked.key();
        let (catalog, asked, of) = (Arc::clone(self), asked.clone(), key.clone());
        let read = async move {
            let known = catalog.components(&asked).await?;
            let (mut told, mut missing) = catalog.reader(&asked).told(&known.groups, asked.helm).await?;
            told.extend(known.labelled.iter().cloned());
            missing.extend(known.missing.iter().cloned());
            let (applications, is_cut) = applications::merge(told);
            if is_cut {
                missing.push(format!("there are more than {} applications", applications::MOST_APPLICATIONS));
            }
            let installed = Arc::new(Installed { applications, missing });
            catalog.applications.put(of, Arc::clone(&installed));
            Ok(installed)
        };
        self.known(Wanted::Applications, &self.applications, &self.reading_applications, key, read).await
    }

    async fn known<V: Weigh + Send + Sync + 'static>(
        &self,
        wanted: Wanted,
        kept: &Kept<Key, V>,
        reading: &Reading<V>,
        key: Key,
        read: impl Future<Output = Result<Arc<V>, String>> + Send + 'static,
    ) -> Result<Arc<V>, String> {
        let metrics = &self.parts.metrics;
        if let Some(known) = kept.get(&key) {
            metrics.read(wanted.into(), metrics::Found::Kept);
            return Ok(known);
        }
        let joined::Outcome { value, is_joined } = reading.get(key, read).await;
        let outcome = match &value {
            _ if is_joined => metrics::Found::Joined,
            Ok(_) => metrics::Found::Read,
            Err(_) => metrics::Found::Failed,
        };
        metrics.read(wanted.into(), outcome);
        metrics.kept(self.components.bytes() + self.applications.bytes());
        value
    }

    fn reader<'a>(&self, asked: &'a Asked) -> Reader<'a> {
        let settings = ClusterSettings {
            agent: asked.agent,
            task: "fleet/catalog".to_owned(),
            source: "fleet",
            user_agent: "kas/fleet/catalog".to_owned(),
            impersonation: asked.run_as.as_ref().map(|user| (**user).clone()),
            timeout: REQUEST,
            find: FIND,
            at_once: AT_ONCE,
            max_body: MAX_PAGE,
        };
        let (router, observer) = (Arc::clone(&self.parts.router), Arc::clone(&self.parts.observer));
        let budget =
            Budget::new("what is read of this cluster", MOST_OF_AGENT, Some(Arc::clone(&self.memory)));
        let cluster = Cluster::new(router, observer, settings);
        Reader::new(cluster.with_actor(Arc::clone(&asked.actor)).with_budget(budget), &asked.namespaces)
    }
}

/// Returns the namespaces to read: those that are asked for, of those that the file allows.
fn scope(file: &AgentFile, asked: &[String]) -> Result<Vec<String>, String> {
    if file.namespaces.is_empty() {
        return Ok(asked.to_vec());
    }
    if asked.is_empty() {
        return Ok(file.namespaces.iter().cloned().collect());
    }
    let both: Vec<String> = asked.iter().filter(|it| file.namespaces.contains(*it)).cloned().collect();
    if both.is_empty() { Err("its kas.yaml has none of these namespaces".to_owned()) } else { Ok(both) }
}

/// Names a server for people.
fn describe(component: &Component) -> String {
    let workload = component.workloads.first().map_or("", String::as_str);
    format!("{} ({workload})", component.service)
}
