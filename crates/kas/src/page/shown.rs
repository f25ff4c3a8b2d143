//! The content of the events. `page.js` reads the field names; both are in one binary.

use std::{collections::BTreeMap, time::Duration};

use cluster::{Connected, Load, Located, PeerReport, ReplicaState, Replicas, Unanswered};
use ids::AgentId;
use kubernetes_api::LongRequests;
use proto::kas::api::v1::{AgentOnReplica, ExplainAgentResponse, GetSyncResponse, ProjectSync, ViewAgent};
use serde::Serialize;

use crate::views::Counts;

/// The longest text that an agent reports, in characters. A longer one is cut.
const LONGEST: usize = 200;
/// The most manifest projects of one agent in a list.
const PROJECTS: usize = 200;
/// The most connections of one agent in a list.
const PODS: usize = 200;

fn cut(text: &str) -> String {
    text.chars().take(LONGEST).collect()
}

fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// Event `overview`.
#[derive(Serialize)]
pub(super) struct Overview<'a> {
    /// Time of the event, in milliseconds since 1970.
    at: u64,
    draining: bool,
    /// This replica first.
    replicas: Vec<ReplicaShown<'a>>,
    alarms: &'a [String],
    /// The manifest projects that this replica plans for; `null`: none.
    manifests: Option<ManifestsShown>,
    /// Where the page with the trees of clusters is; `null`: there is no link.
    clusters: Option<&'a str>,
}

#[derive(Serialize)]
struct ManifestsShown {
    projects: usize,
    degraded: usize,
    failed: usize,
    /// Those with objects that wait to be pruned.
    to_prune: usize,
}

/// Event `fleet`: the agents, and how many objects their clusters have.
#[derive(Serialize)]
pub(super) struct Fleet<'a> {
    /// Why they are not known now.
    pub(super) why: Option<&'a str>,
    pub(super) agents: Vec<Cluster<'a>>,
}

/// An agent of the event `fleet`.
#[derive(Serialize)]
pub(super) struct Cluster<'a> {
    /// A text: it may be larger than a number of JavaScript.
    agent: String,
    name: &'a str,
    state: &'a str,
    reason: String,
    /// What is counted, and its number, which is `?` if it is not known.
    counts: Vec<(&'a str, &'a str)>,
}

impl<'a> Cluster<'a> {
    pub(super) fn new(agent: &'a ViewAgent, counts: Vec<(&'a str, &'a str)>) -> Self {
        let ViewAgent { id, name, state, reason, .. } = agent;
        Self { agent: id.to_string(), name, state, reason: cut(reason), counts }
    }
}

/// Event `cluster`: how many objects the cluster of the selected agent has, without the name of any.
#[derive(Serialize)]
pub(super) struct ClusterCounts<'a> {
    agent: String,
    state: &'a str,
    reason: String,
    namespaces: usize,
    resources: Vec<ResourceCounts<'a>>,
}

#[derive(Serialize)]
struct ResourceCounts<'a> {
    name: &'a str,
    /// The number of objects by how they are.
    states: &'a BTreeMap<String, usize>,
}

impl<'a> ClusterCounts<'a> {
    pub(super) fn new(agent: AgentId, counts: &'a Counts) -> Self {
        let resources = counts.resources.iter();
        Self {
            agent: agent.to_string(),
            state: counts.state.as_str(),
            reason: cut(&counts.reason),
            namespaces: counts.namespaces,
            resources: resources.map(|(name, states)| ResourceCounts { name, states }).collect(),
        }
    }
}

/// Event `events`: changes in the health of replicas, the oldest first.
#[derive(Serialize)]
pub(super) struct Events<'a>(Vec<EventShown<'a>>);

#[derive(Serialize)]
struct ReplicaShown<'a> {
    name: &'a str,
    address: &'a str,
    state: &'a str,
    standing: &'a str,
    agents: u64,
    /// `null` if it is not known, as in the fields below.
    tunnels: Option<u64>,
    ended: Option<u64>,
    /// When these were counted, in milliseconds since 1970.
    counted_at: u64,
    open: Option<u64>,
    waiting: Option<u64>,
    // Texts, since they may exceed the integers of JavaScript.
    table_epoch: String,
    table_version: String,
    synced: bool,
    heard_ms: Option<u64>,
    version: &'a str,
    /// Why there is no report of it.
    silent: Option<&'a str>,
}

#[derive(Serialize)]
struct EventShown<'a> {
    at: u64,
    replica: &'a str,
    standing: &'a str,
    state: &'a str,
}

/// The numbers of this replica.
pub(super) struct Own {
    pub(super) tunnels: u64,
    pub(super) load: Load,
    pub(super) draining: bool,
    /// Manifest projects that it plans for: all, degraded, failed, and those with objects that wait to be
    /// pruned.
    pub(super) projects: [usize; 4],
}

/// The reports of the other replicas.
#[derive(Default)]
pub(super) struct Asked {
    pub(super) reports: Vec<PeerReport>,
    pub(super) unanswered: Vec<Unanswered>,
    /// Time of the reports, since 1970-01-01 00:00 UTC.
    pub(super) at: Duration,
}

impl<'a> Overview<'a> {
    pub(super) fn new(
        at: Duration,
        known: &'a Replicas,
        own: &Own,
        asked: &'a Asked,
        clusters: Option<&'a str>,
    ) -> Self {
        let replica = |status: &'a cluster::ReplicaStatus| {
            let is_own = status.heard.is_none();
            // The report of a lost replica is outdated.
            let lost = status.is_lost();
            let mut reports = asked.reports.iter().filter(|_| !lost);
            let report = reports.find(|report| report.replica.id == status.replica.id);
            let silent = asked.unanswered.iter().find(|silent| silent.replica.id == status.replica.id);
            let (tunnels, load) = match (is_own, report) {
                (true, _) => (Some(own.tunnels), Some(own.load)),
                (false, report) => (report.map(|r| r.tunnels), report.and_then(|r| r.load)),
            };
            ReplicaShown {
                name: status.replica.id.as_str(),
                address: &status.replica.address,
                state: if is_own && own.draining { ReplicaState::Draining } else { status.state }.as_str(),
                standing: status.standing(),
                agents: status.agents,
                tunnels,
                ended: load.map(|load| load.ended),
                counted_at: milliseconds(if is_own { at } else { asked.at }),
                open: load.map(|load| load.open),
                waiting: load.map(|load| load.waiting),
                table_epoch: status.mark.epoch.to_string(),
                table_version: status.mark.version.to_string(),
                synced: status.synced,
                heard_ms: status.heard.map(milliseconds),
                version: if is_own && status.build.0.is_empty() {
                    process::version::VERSION
                } else {
                    &status.build.0
                },
                silent: silent.map(|silent| silent.reason.as_str()),
            }
        };
        Self {
            at: milliseconds(at),
            draining: own.draining,
            replicas: known.replicas.iter().map(replica).collect(),
            alarms: &known.alarms,
            manifests: {
                let [projects, degraded, failed, to_prune] = own.projects;
                (projects > 0).then_some(ManifestsShown { projects, degraded, failed, to_prune })
            },
            clusters,
        }
    }
}

impl<'a> Events<'a> {
    pub(super) fn new(known: &'a Replicas) -> Self {
        let event = |event: &'a cluster::ReplicaEvent| EventShown {
            at: milliseconds(event.at),
            replica: event.replica.as_str(),
            standing: event.standing(),
            state: event.state(),
        };
        Self(known.events.iter().map(event).collect())
    }
}

/// Event `agents`.
#[derive(Serialize)]
pub(super) struct Agents<'a> {
    /// `null`: there are too many for a list.
    pub(super) connections: Option<Vec<ConnectionShown<'a>>>,
    /// Connections that are not listed.
    pub(super) omitted: usize,
    /// Replicas that did not report their agents.
    pub(super) unanswered: Vec<&'a str>,
}

#[derive(Serialize)]
pub(super) struct ConnectionShown<'a> {
    // Numbers as texts, since they may exceed the integers of JavaScript.
    agent: String,
    name: String,
    project: String,
    pod: String,
    version: String,
    since: u64,
    replica: &'a str,
    /// Nothing shows that the replica is alive.
    unconfirmed: bool,
    /// The replicas that have tunnels of the agent.
    holders: Vec<String>,
}

impl<'a> ConnectionShown<'a> {
    pub(super) fn new(located: &'a Located, holders: Vec<String>) -> Self {
        let connection = &located.connection;
        let meta = &connection.meta;
        Self {
            agent: connection.agent.to_string(),
            name: cut(&connection.name),
            project: connection.project_id.to_string(),
            pod: match (meta.pod_namespace.as_str(), meta.pod_name.as_str()) {
                ("", name) => cut(name),
                (namespace, name) => cut(&format!("{namespace}/{name}")),
            },
            version: cut(&meta.version),
            since: milliseconds(connection.connected_at),
            replica: located.replica.id.as_str(),
            unconfirmed: located.unconfirmed,
            holders,
        }
    }
}

/// Event `long`: the open requests of the endpoint for kubectl that have no end of their own.
#[derive(Serialize)]
pub(super) struct Long<'a> {
    counts: Vec<CountShown>,
    /// `null`: names are not shown.
    callers: Option<Vec<CallerShown<'a>>>,
    /// Entries of `callers` that are not listed.
    omitted: usize,
}

#[derive(Serialize)]
struct CountShown {
    kind: &'static str,
    source: &'static str,
    open: u64,
}

#[derive(Serialize)]
struct CallerShown<'a> {
    name: &'a str,
    source: &'static str,
    kind: &'static str,
    // A text, since it may exceed the integers of JavaScript.
    agent: String,
    open: u64,
}

impl<'a> Long<'a> {
    /// `callers`: show their names.
    pub(super) fn new(requests: &'a LongRequests, callers: bool) -> Self {
        let counts = requests.counts.iter();
        let named = requests.callers.iter().map(|caller| CallerShown {
            name: &caller.name,
            source: caller.source,
            kind: caller.kind,
            agent: caller.agent.to_string(),
            open: caller.open,
        });
        Self {
            counts: counts
                .map(|count| CountShown { kind: count.kind, source: count.source, open: count.open })
                .collect(),
            callers: callers.then(|| named.collect()),
            omitted: requests.omitted,
        }
    }
}

/// Event `why`.
#[derive(Serialize)]
pub(super) struct Why<'a> {
    agent: String,
    connections: Vec<ConnectionShown<'a>>,
    /// Connections that are not listed.
    omitted: usize,
    route: &'a [String],
    replicas: Vec<OnReplica<'a>>,
    silent: Vec<Silent<'a>>,
    /// Its manifest projects; `null`: it has none.
    manifests: Option<SyncShown<'a>>,
}

#[derive(Serialize)]
struct SyncShown<'a> {
    /// The replica that plans.
    replica: &'a str,
    /// Why kas applies nothing; empty: it does.
    waits: &'a str,
    projects: Vec<ProjectShown>,
    /// Projects that are not listed.
    omitted: usize,
}

#[derive(Serialize)]
struct ProjectShown {
    name: String,
    phase: String,
    message: String,
    /// Since when, in milliseconds since 1970.
    since: u64,
    /// The first digits of the commits; empty: none.
    applied: String,
    wanted: String,
    current: u64,
    objects: u64,
    to_prune: u64,
}

impl<'a> SyncShown<'a> {
    /// `None`: no replica plans for the agent.
    fn new(sync: &'a GetSyncResponse) -> Option<Self> {
        if sync.replica.is_empty() {
            return None;
        }
        let digits = |commit: &str| commit.chars().take(12).collect();
        let project = |project: &ProjectSync| ProjectShown {
            name: cut(&project.project),
            phase: cut(&project.phase),
            message: cut(&project.message),
            since: project.since.map_or(0, |at| u64::try_from(at.seconds).unwrap_or(0).saturating_mul(1_000)),
            applied: digits(&project.applied_commit),
            wanted: digits(&project.wanted_commit),
            current: project.current,
            objects: project.objects,
            to_prune: project.to_prune,
        };
        Some(Self {
            replica: &sync.replica,
            waits: &sync.waits,
            omitted: sync.projects.len().saturating_sub(PROJECTS),
            projects: sync.projects.iter().take(PROJECTS).map(project).collect(),
        })
    }
}

#[derive(Serialize)]
struct OnReplica<'a> {
    name: &'a str,
    idle: u32,
    busy: u32,
    waiting: u32,
    #[serde(rename = "beliefs")]
    views: Vec<ViewShown<'a>>,
}

#[derive(Serialize)]
struct ViewShown<'a> {
    name: &'a str,
    holds: bool,
    why: &'a str,
    /// It is a replica of GitLab's kas, which cannot report.
    gitlab: bool,
}

#[derive(Serialize)]
struct Silent<'a> {
    address: String,
    reason: &'a str,
}

impl<'a> Why<'a> {
    pub(super) fn new(
        agent: ids::AgentId,
        answer: &'a ExplainAgentResponse,
        connected: &'a Connected,
        sync: Option<&'a GetSyncResponse>,
    ) -> Self {
        let replica = |replica: &'a AgentOnReplica| OnReplica {
            name: &replica.name,
            idle: replica.idle_tunnels,
            busy: replica.busy_tunnels,
            waiting: replica.waiting,
            views: replica
                .beliefs
                .iter()
                .map(|view| ViewShown {
                    name: &view.name,
                    holds: view.holds,
                    why: &view.why,
                    gitlab: view.gitlab,
                })
                .collect(),
        };
        let silent = |replica: &'a proto::kas::api::v1::UnansweredReplica| Silent {
            address: match &replica.address {
                Some(address) if address.ip.contains(':') => format!("[{}]:{}", address.ip, address.port),
                Some(address) => format!("{}:{}", address.ip, address.port),
                None => String::new(),
            },
            reason: &replica.reason,
        };
        Self {
            agent: agent.to_string(),
            omitted: connected.connections.len().saturating_sub(PODS),
            connections: connected
                .connections
                .iter()
                .take(PODS)
                .map(|located| ConnectionShown::new(located, Vec::new()))
                .collect(),
            route: &answer.route,
            replicas: answer.replicas.iter().map(replica).collect(),
            silent: answer.unanswered.iter().map(silent).collect(),
            manifests: sync.and_then(SyncShown::new),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn projects_are_shown_without_what_is_too_long_or_too_much() {
        let project = ProjectSync {
            project: "group/web".to_owned(),
            phase: "degraded".to_owned(),
            message: "x".repeat(1_000),
            applied_commit: "0123456789abcdef".to_owned(),
            to_prune: 2,
            ..ProjectSync::default()
        };
        let sync = GetSyncResponse {
            replica: "kas-0".to_owned(),
            waits: String::new(),
            projects: vec![project; PROJECTS + 3],
        };
        let shown = SyncShown::new(&sync).unwrap();
        assert_eq!((shown.projects.len(), shown.omitted), (PROJECTS, 3));
        assert_eq!(shown.projects[0].applied, "0123456789ab");
        assert_eq!(shown.projects[0].message.len(), LONGEST);
        assert!(SyncShown::new(&GetSyncResponse::default()).is_none());
    }
}
