//! The services that kas itself serves: connected agents, pods, health, reflection.

mod configuration_project;
mod current_gitlab;

use std::{
    collections::{BTreeMap, VecDeque},
    pin::Pin,
    sync::Arc,
    time::Duration,
};

use cluster::{Abandoned, Connected, Door, Located, Query, ReplicaState, Tracker, TrackerError, Wire};
use futures_util::stream::{self, Stream, StreamExt as _};
use grpc::Deadline;
use http::HeaderValue;
use ids::{Actor, AgentId, ConnectionId, ReplicaId};
use process::lifecycle::Phase;
use prost::Message as _;
use proto::{
    gitlab::agent::{
        agent_tracker::rpc::{
            GetConnectedAgentksByAgentIDsRequest, GetConnectedAgentksByAgentIDsResponse,
            GetConnectedAgentsByAgentIDsRequest, GetConnectedAgentsByAgentIDsResponse,
            GetConnectedAgentsRequest, GetConnectedAgentsResponse,
            agent_tracker_server::{AgentTracker, AgentTrackerServer},
            get_connected_agents_request,
        },
        configuration_project::rpc::configuration_project_server::ConfigurationProjectServer,
        notifications::rpc::notifications_server::NotificationsServer,
        server_info::rpc::server_info_server::ServerInfoServer,
    },
    kas::api::v1::{
        AgentOnReplica, ConnectedAgentInfo, ConnectedAgentsByIdRequest, ConnectedAgentsByIdResponse,
        ConnectedAgentsForProjectRequest, ConnectedAgentsForProjectResponse, ControlSyncRequest,
        ControlSyncResponse, DiffRequest, DiffResponse, ExplainAgentRequest, ExplainAgentResponse,
        GetPodsRequest, GetPodsResponse, GetSyncRequest, GetSyncResponse, KasAddress, KasInstanceInfo,
        ListApplicationsRequest, ListApplicationsResponse, ListComponentsRequest, ListComponentsResponse,
        ListEnvironmentsRequest, ListEnvironmentsResponse, ListHooksRequest, ListHooksResponse,
        ListReplicasRequest, ListReplicasResponse, ReplayHooksRequest, ReplayHooksResponse,
        TrackerStatusRequest, TrackerStatusResponse, UnansweredReplica, WatchConnectedAgentsRequest,
        WatchConnectedAgentsResponse, WatchViewRequest, WatchViewResponse, agent_on_replica,
        agent_on_replica::RefusedCaller,
        kas_api_server::{KasApi, KasApiServer},
        watch_connected_agents_response::{Disconnected, Event, SnapshotComplete},
    },
};
use tokio::sync::watch;
use tonic_health::ServingStatus;

use super::Correlation;
use crate::{
    connected::{address, connected, unanswered_replica},
    fleet::Catalog,
    hooks::HookQueries,
    pods::{self, Asked, PodQuery},
    pushes::Pushes,
    sync::{MAX_QUESTION, SyncService},
    timestamp::timestamp,
    views::Hub,
};
use grpc::service::{LocalService, local_service};
use observe::RequestRecord;
use routing::router::Router;

/// The prefix of the paths of health checks.
pub(super) const HEALTH: &str = "/grpc.health.v1.Health/";

/// The path of [`KasApi::diff`].
const DIFF: &str = "/kas.api.v1.KasApi/Diff";

/// Changes within this time are sent to a watcher together.
const SETTLE: Duration = Duration::from_millis(20);

/// kas' own services, by the prefix of their paths. The first match counts.
pub(super) struct Services(Vec<(String, LocalService)>);

impl Services {
    #[expect(clippy::too_many_arguments, reason = "each is made by another module")]
    pub(super) fn new(
        router: Arc<Router>,
        tracker: Arc<dyn Tracker>,
        pushes: Arc<Pushes>,
        gitaly: Option<Arc<gitaly::Client>>,
        phase: watch::Receiver<Phase>,
        sync: Arc<SyncService>,
        hooks: Option<Arc<HookQueries>>,
        views: Arc<Hub>,
        catalog: Arc<Catalog>,
    ) -> Self {
        let api = Api { router, tracker, pushes, gitaly, phase: phase.clone(), sync, hooks, views, catalog };
        let (reporter, health) = tonic_health::server::health_reporter();
        tokio::spawn(report_health(reporter, phase));
        let reflection = || {
            tonic_reflection::server::Builder::configure()
                .register_encoded_file_descriptor_set(proto::FILE_DESCRIPTOR_SET)
                .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
                .with_service_name("kas.api.v1.KasApi")
                .with_service_name("gitlab.agent.agent_tracker.rpc.AgentTracker")
                .with_service_name("gitlab.agent.configuration_project.rpc.ConfigurationProject")
                .with_service_name("gitlab.agent.kubernetes_api.rpc.KubernetesApi")
                .with_service_name("gitlab.agent.notifications.rpc.Notifications")
                .with_service_name("gitlab.agent.server_info.rpc.ServerInfo")
                .with_service_name("grpc.health.v1.Health")
        };
        // The files of a diff have more bytes than other requests may have.
        let (_, with_files) =
            local_service(KasApiServer::new(api.clone()).max_decoding_message_size(MAX_QUESTION));
        let mut services = vec![
            (DIFF.to_owned(), with_files),
            local_service(KasApiServer::new(api.clone())),
            local_service(AgentTrackerServer::new(api.clone())),
            local_service(ServerInfoServer::new(api.clone())),
            local_service(NotificationsServer::new(api.clone())),
            local_service(ConfigurationProjectServer::new(api)),
            local_service(health),
        ];
        // The descriptors are compiled in. A test checks that they are readable.
        if let (Ok(v1), Ok(alpha)) = (reflection().build_v1(), reflection().build_v1alpha()) {
            services.push(local_service(v1));
            services.push(local_service(alpha));
        }
        Self(services)
    }

    /// Returns the service for `path`; `None`: it is not a method of kas.
    pub(super) fn of(&self, path: &str) -> Option<LocalService> {
        self.0.iter().find(|(prefix, _)| path.starts_with(prefix)).map(|(_, own)| Arc::clone(own))
    }
}

async fn report_health(reporter: tonic_health::server::HealthReporter, mut phase: watch::Receiver<Phase>) {
    while phase.changed().await.is_ok() {
        if *phase.borrow_and_update() != Phase::Serving {
            reporter.set_service_status("", ServingStatus::NotServing).await;
        }
    }
}

/// [`KasApi`], and the services that GitLab calls.
#[derive(Clone)]
pub(super) struct Api {
    router: Arc<Router>,
    pub(super) tracker: Arc<dyn Tracker>,
    pub(super) pushes: Arc<Pushes>,
    /// `None`: agents are not known from GitLab.
    pub(super) gitaly: Option<Arc<gitaly::Client>>,
    phase: watch::Receiver<Phase>,
    sync: Arc<SyncService>,
    /// `None`: this kas takes no webhooks.
    hooks: Option<Arc<HookQueries>>,
    views: Arc<Hub>,
    catalog: Arc<Catalog>,
}

pub(super) fn invalid(message: impl Into<String>) -> tonic::Status {
    tonic::Status::invalid_argument(message)
}

fn unavailable(error: &TrackerError) -> tonic::Status {
    tracing::warn!(error = %error, "the tracker cannot be asked");
    tonic::Status::unavailable(error.to_string())
}

fn to_tonic(status: &grpc::Status) -> tonic::Status {
    let details = status.to_proto();
    let bytes = if details.details.is_empty() { Vec::new() } else { details.encode_to_vec() };
    tonic::Status::with_details(
        tonic::Code::from_i32(status.code().number().into()),
        status.message(),
        bytes.into(),
    )
}

fn positive(id: i64, field: &str) -> Result<i64, tonic::Status> {
    if id > 0 { Ok(id) } else { Err(invalid(format!("{field} must be positive, got {id}"))) }
}

fn agent_id(id: i64, field: &str) -> Result<AgentId, tonic::Status> {
    AgentId::new(id).map_err(|error| invalid(format!("{field}: {error}, got {id}")))
}

fn info(located: &Located) -> ConnectedAgentInfo {
    let connection = &located.connection;
    ConnectedAgentInfo {
        id: connection.agent.get(),
        connection_id: connection.id.get(),
        version: connection.meta.version.clone(),
        commit: connection.meta.commit.clone(),
        pod_namespace: connection.meta.pod_namespace.clone(),
        pod_name: connection.meta.pod_name.clone(),
        connected_at: Some(timestamp(connection.connected_at)),
        kas_address: Some(address(&located.replica.address)),
        project_id: connection.project_id,
        name: connection.name.to_string(),
        unconfirmed: located.unconfirmed,
    }
}

fn unanswered(connected: &Connected) -> Vec<UnansweredReplica> {
    connected.unanswered.iter().map(unanswered_replica).collect()
}

fn belief(view: &cluster::AgentView) -> agent_on_replica::Belief {
    agent_on_replica::Belief {
        name: view.replica.id.as_str().to_owned(),
        holds: view.holds,
        why: view.why.clone(),
        gitlab: view.wire == Wire::Gitlab,
    }
}

fn non_empty(text: String, other: &str) -> String {
    if text.is_empty() { other.to_owned() } else { text }
}

fn refused_here(refused: observe::refused_callers::RefusedCaller) -> RefusedCaller {
    RefusedCaller {
        age_ms: milliseconds(refused.at.elapsed()),
        source: refused.source.to_owned(),
        caller: refused.caller.map(Into::into).unwrap_or_default(),
        rule: refused.rule.to_owned(),
        why: refused.why,
        request_id: refused.request,
    }
}

fn refused_there(refused: &cluster::RefusedCaller) -> RefusedCaller {
    let cluster::RefusedCaller { source, caller, rule, why, request, age } = refused.clone();
    RefusedCaller { source, caller, rule, why, request_id: request, age_ms: milliseconds(age) }
}

fn milliseconds(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// Describes tunnels that are all occupied by abandoned requests.
fn occupied(place: &str, abandoned: Abandoned) -> String {
    format!(
        "all tunnels {place} ({}) have been occupied by abandoned requests for {:.1} s",
        abandoned.tunnels,
        abandoned.since.as_secs_f64()
    )
}

/// Returns what each replica knows of an agent, and how a request for it would be routed.
///
/// # Cancel safety
/// Cancel safe.
pub(crate) async fn explain(router: &Router, tracker: &dyn Tracker, agent: AgentId) -> ExplainAgentResponse {
    let known = tracker.replicas().await;
    // If the lookup fails, the answer has the reason, and still the tunnels and the reports of the others.
    let (candidates, unknown) = match tracker.locate(agent).await {
        Ok(candidates) => (candidates, None),
        Err(error) => (Vec::new(), Some(process::error::chain(&error))),
    };
    let (reports, missing) = tracker.peer_reports(Some(agent)).await;
    let here = router.registry().occupancy(agent);
    let number = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    let tunnels = |abandoned: Option<Abandoned>| abandoned.map_or(0, |abandoned| abandoned.tunnels);
    let since = |abandoned: Option<Abandoned>| abandoned.map_or(0, |abandoned| milliseconds(abandoned.since));
    let me = known.replicas.first().map(|status| status.replica.clone());
    let door = |replica: Option<&ReplicaId>, door| {
        let doors = replica.map(|replica| tracker.doors(replica)).unwrap_or_default();
        doors.get(door).map_or_else(String::new, |address| address.to_string())
    };
    let own = AgentOnReplica {
        api_door: door(me.as_ref().map(|me| &me.id), Door::Api),
        http_door: door(me.as_ref().map(|me| &me.id), Door::Http),
        name: me.as_ref().map_or_else(String::new, |me| me.id.as_str().to_owned()),
        address: me.as_ref().map(|me| address(&me.address)),
        idle_tunnels: number(here.idle),
        busy_tunnels: number(here.busy),
        waiting: number(here.waiting),
        beliefs: tracker.views(agent).iter().map(belief).collect(),
        abandoned_tunnels: tunnels(here.abandoned),
        abandoned_for_ms: since(here.abandoned),
        transports: number(here.transports),
        refused_callers: router.refusals().callers().of(agent).into_iter().map(refused_here).collect(),
    };
    let others = reports.iter().map(|report| AgentOnReplica {
        api_door: door(Some(&report.replica.id), Door::Api),
        http_door: door(Some(&report.replica.id), Door::Http),
        name: report.replica.id.as_str().to_owned(),
        address: Some(address(&report.replica.address)),
        idle_tunnels: report.idle,
        busy_tunnels: report.busy,
        waiting: report.waiting,
        beliefs: report.views.iter().map(belief).collect(),
        abandoned_tunnels: tunnels(report.abandoned),
        abandoned_for_ms: since(report.abandoned),
        transports: report.transports,
        refused_callers: report.refused_callers.iter().map(refused_there).collect(),
    });
    let elsewhere: Vec<String> = candidates
        .iter()
        .filter(|candidate| me.as_ref().is_none_or(|me| me.id != candidate.replica.id))
        .map(|candidate| match candidate.wire {
            Wire::Own => format!("{} ({})", candidate.replica.id, candidate.health),
            // Nothing is known of its health.
            Wire::Gitlab => format!("{} (of GitLab's kas)", candidate.replica.id),
        })
        .collect();
    let mut route = Vec::new();
    route.push(match (here.idle, here.busy, here.all_abandoned()) {
        (0, 0, _) if here.transports > 0 => {
            format!("agent {agent} is connected here, but has no tunnel: a request waits for one")
        }
        (0, 0, _) => format!("no tunnel of agent {agent} is here"),
        (0, _, Some(abandoned)) => format!("{}: a request waits for one", occupied("here", abandoned)),
        (0, busy, None) => format!("all {busy} tunnels here are busy: a request waits for one"),
        (idle, ..) => format!("one of {idle} idle tunnels here carries the request"),
    });
    if let Some(why) = unknown {
        route.push(format!("the other replicas that hold the agent could not be looked up: {why}"));
    } else if here.idle == 0 {
        route.push(match elsewhere.as_slice() {
            [] if here.busy > 0 || here.transports > 0 => {
                "no other replica is known to hold the agent".to_owned()
            }
            [] => {
                "no other replica is known to hold the agent: the request waits until it connects".to_owned()
            }
            [first] => format!("and replica {first} is asked"),
            [first, rest @ ..] => format!("and replica {first} is asked, then {}", rest.join(", ")),
        });
    }
    // Nothing borrows there, and the tracker does not name them.
    let tunnelless = reports.iter().filter(|report| report.transports > 0 && report.idle + report.busy == 0);
    route.extend(tunnelless.map(|report| {
        format!("agent {agent} is connected to replica {}, but has no tunnel there", report.replica.id)
    }));
    let blocked = reports.iter().filter_map(|report| Some((&report.replica.id, report.all_abandoned()?)));
    let blocked: Vec<String> =
        blocked.map(|(replica, abandoned)| occupied(&format!("at {replica}"), abandoned)).collect();
    let is_blocked = !blocked.is_empty() || here.all_abandoned().is_some();
    route.extend(blocked);
    if is_blocked {
        route.push(
            "agentk cannot cancel abandoned requests, and its API server has not ended them: restart agentk, or update it \
             (GitLab's to 16 or later)"
                .to_owned(),
        );
    }
    // Whether these hold the agent is unknown.
    let mute: Vec<String> = known
        .replicas
        .iter()
        .filter(|status| status.is_lost() && status.state != ReplicaState::Left)
        .map(|status| format!("{} ({})", status.replica.id, status.standing()))
        .collect();
    if !mute.is_empty() {
        route.push(format!("{} cannot be asked", mute.join(", ")));
    }
    ExplainAgentResponse {
        replicas: std::iter::once(own).chain(others).collect(),
        route,
        unanswered: missing.iter().map(unanswered_replica).collect(),
    }
}

impl Api {
    /// Returns the number of tunnels of this replica.
    fn tunnels(&self) -> u64 {
        self.router.tunnels()
    }

    async fn connected(
        &self,
        query: Query,
    ) -> Result<(Vec<ConnectedAgentInfo>, Vec<UnansweredReplica>), tonic::Status> {
        let connected = connected(&*self.tracker, query).await.map_err(|error| unavailable(&error))?;
        Ok((connected.connections.iter().map(info).collect(), unanswered(&connected)))
    }
}

#[tonic::async_trait]
impl KasApi for Api {
    async fn connected_agents_for_project(
        &self,
        request: tonic::Request<ConnectedAgentsForProjectRequest>,
    ) -> Result<tonic::Response<ConnectedAgentsForProjectResponse>, tonic::Status> {
        let project = positive(request.into_inner().project_id, "project_id")?;
        let (agents, unanswered) = self.connected(Query::Project(project)).await?;
        Ok(tonic::Response::new(ConnectedAgentsForProjectResponse { agents, unanswered }))
    }

    async fn connected_agents_by_id(
        &self,
        request: tonic::Request<ConnectedAgentsByIdRequest>,
    ) -> Result<tonic::Response<ConnectedAgentsByIdResponse>, tonic::Status> {
        let agent = agent_id(request.into_inner().agent_id, "agent_id")?;
        let (agents, unanswered) = self.connected(Query::Agent(agent)).await?;
        Ok(tonic::Response::new(ConnectedAgentsByIdResponse { agents, unanswered }))
    }

    async fn get_pods(
        &self,
        request: tonic::Request<GetPodsRequest>,
    ) -> Result<tonic::Response<GetPodsResponse>, tonic::Status> {
        let deadline = request.extensions().get::<Deadline>().copied().unwrap_or(Deadline::NONE);
        let correlation = request
            .extensions()
            .get::<Correlation>()
            .map_or_else(|| HeaderValue::from_static(""), |correlation| correlation.0.clone());
        let record = request.extensions().get::<RequestRecord>().cloned().unwrap_or_default();
        let request = request.into_inner();
        let namespace_is_name = request.namespace.len() <= 63
            && request.namespace.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-');
        if !namespace_is_name {
            return Err(invalid("namespace must be the name of a Kubernetes namespace, or empty for all"));
        }
        let page_size = match usize::try_from(request.page_size) {
            Ok(0) => pods::MAX_PAGE,
            Ok(size) if size <= pods::MAX_PAGE => size,
            _ => return Err(invalid(format!("page_size must be at most {}", pods::MAX_PAGE))),
        };
        let connection = match request.connection_id {
            0 => None,
            id => Some(
                ConnectionId::new(id)
                    .map_err(|error| invalid(format!("connection_id: {error}, or 0 for any")))?,
            ),
        };
        let query = PodQuery {
            agent: agent_id(request.agent_id, "agent_id")?,
            connection,
            namespace: request.namespace,
            label_selector: request.label_selector,
            page_size,
            page_token: request.page_token,
        };
        record.target(query.agent, query.connection);
        let asked = Asked { correlation: &correlation, deadline, record: &record };
        let answer = pods::list(&self.router, query, asked).await.map_err(|status| to_tonic(&status))?;
        Ok(tonic::Response::new(answer))
    }

    async fn list_replicas(
        &self,
        _request: tonic::Request<ListReplicasRequest>,
    ) -> Result<tonic::Response<ListReplicasResponse>, tonic::Status> {
        let known = self.tracker.replicas().await;
        let (reports, missing) = self.tracker.peer_reports(None).await;
        let replicas = known
            .replicas
            .into_iter()
            .map(|status| {
                let own = status.heard.is_none();
                let standing = status.standing().to_owned();
                let report = reports.iter().find(|report| report.replica.id == status.replica.id);
                let leaves = own && *self.phase.borrow() != Phase::Serving;
                let tunnels = if own { self.tunnels() } else { report.map_or(0, |report| report.tunnels) };
                let (version, commit) = match status.build {
                    (version, commit) if version.is_empty() && own => {
                        (process::version::VERSION.to_owned(), non_empty(commit, process::version::COMMIT))
                    }
                    build => build,
                };
                KasInstanceInfo {
                    version,
                    commit,
                    address: Some(address(&status.replica.address)),
                    name: status.replica.id.as_str().to_owned(),
                    state: if leaves { ReplicaState::Draining } else { status.state }.to_string(),
                    standing,
                    generation: status.generation,
                    agents: status.agents,
                    tunnels,
                    table_epoch: status.mark.epoch,
                    table_version: status.mark.version,
                    table_synced: status.synced,
                    heard_ms: status.heard.map(|age| u64::try_from(age.as_millis()).unwrap_or(u64::MAX)),
                }
            })
            .collect();
        Ok(tonic::Response::new(ListReplicasResponse {
            replicas,
            unanswered: missing.iter().map(unanswered_replica).collect(),
            alarms: known.alarms,
        }))
    }

    async fn tracker_status(
        &self,
        _request: tonic::Request<TrackerStatusRequest>,
    ) -> Result<tonic::Response<TrackerStatusResponse>, tonic::Status> {
        let known = self.tracker.replicas().await;
        let status = self.tracker.status();
        let micros = |time: std::time::Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        let (last_error, age) = status.last_error.unzip();
        Ok(tonic::Response::new(TrackerStatusResponse {
            replica: known.replicas.first().map_or_else(String::new, |me| me.replica.id.to_string()),
            backend: status.backend.to_owned(),
            alarms: known.alarms,
            latency_micros: status.latency.map(micros),
            agents: status.agents,
            entries: status.entries,
            unwritten: status.unwritten,
            remembered: status.remembered,
            last_error: last_error.unwrap_or_default(),
            last_error_age_ms: age.map(|age| micros(age) / 1_000),
            lag_ms: status.lag.map(|lag| micros(lag) / 1_000),
        }))
    }

    async fn explain_agent(
        &self,
        request: tonic::Request<ExplainAgentRequest>,
    ) -> Result<tonic::Response<ExplainAgentResponse>, tonic::Status> {
        let agent = agent_id(request.into_inner().agent_id, "agent_id")?;
        Ok(tonic::Response::new(explain(&self.router, &*self.tracker, agent).await))
    }

    type WatchConnectedAgentsStream =
        Pin<Box<dyn Stream<Item = Result<WatchConnectedAgentsResponse, tonic::Status>> + Send>>;

    async fn watch_connected_agents(
        &self,
        request: tonic::Request<WatchConnectedAgentsRequest>,
    ) -> Result<tonic::Response<Self::WatchConnectedAgentsStream>, tonic::Status> {
        let request = request.into_inner();
        let query = match (request.agent_id, request.project_id) {
            (0, 0) => Query::All,
            (0, project) => Query::Project(positive(project, "project_id")?),
            (agent, 0) => Query::Agent(agent_id(agent, "agent_id")?),
            _ => return Err(invalid("give project_id or agent_id, not both")),
        };
        // Subscribed before the first lookup, so that no change is missed.
        let changes = self.tracker.connection_changes();
        let watch = Watch {
            tracker: Arc::clone(&self.tracker),
            query,
            changes,
            known: BTreeMap::new(),
            silent: Vec::new(),
            events: VecDeque::new(),
            begun: false,
            phase: self.phase.clone(),
            over: false,
        };
        Ok(tonic::Response::new(Box::pin(stream::unfold(watch, |mut watch| async move {
            let event = watch.next().await?;
            Some((event, watch))
        }))))
    }

    async fn get_sync(
        &self,
        request: tonic::Request<GetSyncRequest>,
    ) -> Result<tonic::Response<GetSyncResponse>, tonic::Status> {
        record_agent(&request, request.get_ref().agent_id);
        self.sync.get(request.get_ref()).await.map(tonic::Response::new)
    }

    type WatchSyncStream = Pin<Box<dyn Stream<Item = Result<GetSyncResponse, tonic::Status>> + Send>>;

    async fn watch_sync(
        &self,
        request: tonic::Request<GetSyncRequest>,
    ) -> Result<tonic::Response<Self::WatchSyncStream>, tonic::Status> {
        record_agent(&request, request.get_ref().agent_id);
        let watched = self.sync.watch(request.into_inner(), self.phase.clone())?;
        Ok(tonic::Response::new(watched))
    }

    async fn control_sync(
        &self,
        request: tonic::Request<ControlSyncRequest>,
    ) -> Result<tonic::Response<ControlSyncResponse>, tonic::Status> {
        record_agent(&request, request.get_ref().agent_id);
        self.sync.control(request.into_inner()).await.map(tonic::Response::new)
    }

    async fn diff(
        &self,
        request: tonic::Request<DiffRequest>,
    ) -> Result<tonic::Response<DiffResponse>, tonic::Status> {
        record_agent(&request, request.get_ref().agent_id);
        self.sync.diff(request.into_inner()).await.map(tonic::Response::new)
    }

    async fn list_environments(
        &self,
        request: tonic::Request<ListEnvironmentsRequest>,
    ) -> Result<tonic::Response<ListEnvironmentsResponse>, tonic::Status> {
        self.sync.environments(request.get_ref()).await.map(tonic::Response::new)
    }

    async fn list_hooks(
        &self,
        request: tonic::Request<ListHooksRequest>,
    ) -> Result<tonic::Response<ListHooksResponse>, tonic::Status> {
        record_agent(&request, request.get_ref().agent_id);
        self.hooks()?.list(request.get_ref()).await.map(tonic::Response::new)
    }

    async fn replay_hooks(
        &self,
        request: tonic::Request<ReplayHooksRequest>,
    ) -> Result<tonic::Response<ReplayHooksResponse>, tonic::Status> {
        record_agent(&request, request.get_ref().agent_id);
        self.hooks()?.replay(request.get_ref()).await.map(tonic::Response::new)
    }

    type WatchViewStream = ViewStream;

    async fn watch_view(
        &self,
        request: tonic::Request<WatchViewRequest>,
    ) -> Result<tonic::Response<ViewStream>, tonic::Status> {
        self.view(request, false)
    }

    type QueryViewStream = ViewStream;

    async fn query_view(
        &self,
        request: tonic::Request<WatchViewRequest>,
    ) -> Result<tonic::Response<ViewStream>, tonic::Status> {
        self.view(request, true)
    }

    async fn list_components(
        &self,
        request: tonic::Request<ListComponentsRequest>,
    ) -> Result<tonic::Response<ListComponentsResponse>, tonic::Status> {
        let (caller, actor) = (caller_of(&request), actor_of(&request));
        let answer = self.catalog.list_components(request.into_inner(), &caller, actor).await;
        answer.map(tonic::Response::new).map_err(|status| to_tonic(&status))
    }

    async fn list_applications(
        &self,
        request: tonic::Request<ListApplicationsRequest>,
    ) -> Result<tonic::Response<ListApplicationsResponse>, tonic::Status> {
        let (caller, actor) = (caller_of(&request), actor_of(&request));
        let answer = self.catalog.list_applications(request.into_inner(), &caller, actor).await;
        answer.map(tonic::Response::new).map_err(|status| to_tonic(&status))
    }
}

/// The answer to a question about a view.
type ViewStream = Pin<Box<dyn Stream<Item = Result<WatchViewResponse, tonic::Status>> + Send>>;

impl Api {
    fn hooks(&self) -> Result<&HookQueries, tonic::Status> {
        let text = "this kas takes no webhooks: its configuration has no section hooks";
        self.hooks.as_deref().ok_or_else(|| tonic::Status::failed_precondition(text))
    }

    fn view(
        &self,
        request: tonic::Request<WatchViewRequest>,
        is_query: bool,
    ) -> Result<tonic::Response<ViewStream>, tonic::Status> {
        let caller = caller_of(&request);
        let answers = self.views.answer(request.into_inner(), &caller, is_query);
        let answers = answers.map_err(|status| to_tonic(&status))?;
        Ok(tonic::Response::new(Box::pin(answers.map(|answer| answer.map_err(|status| to_tonic(&status))))))
    }
}

/// Returns the name of a caller, by which its questions are counted.
fn caller_of<T>(request: &tonic::Request<T>) -> String {
    request.extensions().get::<Arc<Actor>>().map_or_else(String::new, |actor| {
        format!("{}/{}", actor.issuer, actor.subject.as_deref().unwrap_or_default())
    })
}

/// Returns a caller for the audit log.
fn actor_of<T>(request: &tonic::Request<T>) -> Arc<Actor> {
    let unknown = || Arc::new(Actor { issuer: String::new(), subject: None });
    request.extensions().get::<Arc<Actor>>().cloned().unwrap_or_else(unknown)
}

/// Records the agent that a request is about.
fn record_agent<T>(request: &tonic::Request<T>, agent: i64) {
    if let (Some(record), Ok(agent)) = (request.extensions().get::<RequestRecord>(), AgentId::new(agent)) {
        record.target(agent, None);
    }
}

/// A watcher: the state that it knows, and the events that are still to be sent.
struct Watch {
    tracker: Arc<dyn Tracker>,
    query: Query,
    changes: watch::Receiver<()>,
    known: BTreeMap<(i64, i64), ConnectedAgentInfo>,
    /// The replicas that did not answer the last lookup.
    silent: Vec<UnansweredReplica>,
    events: VecDeque<Event>,
    begun: bool,
    phase: watch::Receiver<Phase>,
    over: bool,
}

impl Watch {
    /// Returns the next event; `None`: the tracker was dropped.
    async fn next(&mut self) -> Option<Result<WatchConnectedAgentsResponse, tonic::Status>> {
        loop {
            if let Some(event) = self.events.pop_front() {
                return Some(Ok(WatchConnectedAgentsResponse { event: Some(event) }));
            }
            if self.over {
                return None;
            }
            if self.begun {
                let leaving = tokio::select! {
                    changed = self.changes.changed() => { changed.ok()?; false }
                    _ = self.phase.wait_for(|phase| *phase >= Phase::Leaving) => true,
                };
                if leaving {
                    self.over = true;
                    return Some(Err(tonic::Status::unavailable("this kas is shutting down: watch again")));
                }
                // Many changes at once cause few lookups.
                tokio::time::sleep(SETTLE).await;
            }
            self.changes.borrow_and_update();
            let connected = match connected(&*self.tracker, self.query).await {
                Ok(connected) => connected,
                Err(error) => return Some(Err(unavailable(&error))),
            };
            let now: BTreeMap<(i64, i64), ConnectedAgentInfo> = connected
                .connections
                .iter()
                .map(|located| {
                    let info = info(located);
                    ((info.id, info.connection_id), info)
                })
                .collect();
            let silent = unanswered(&connected);
            // Only the addresses are compared, since a reason may count seconds.
            let names = |silent: &[UnansweredReplica]| -> Vec<Option<KasAddress>> {
                silent.iter().map(|replica| replica.address.clone()).collect()
            };
            let asked: Vec<KasAddress> = connected
                .unanswered
                .iter()
                .filter(|missing| !missing.given_up)
                .map(|missing| address(&missing.replica.address))
                .collect();
            let events = &mut self.events;
            self.known.retain(|key, info| {
                // The connections of a replica that does not answer are kept until it is given up.
                let unknown = info.kas_address.as_ref().is_some_and(|address| asked.contains(address));
                let stays = now.contains_key(key) || unknown;
                if !stays {
                    let (id, connection_id) = *key;
                    events.push_back(Event::Disconnected(Disconnected { id, connection_id }));
                }
                stays
            });
            for (key, info) in now {
                if self.known.get(&key) != Some(&info) {
                    events.push_back(Event::Connected(info.clone()));
                    self.known.insert(key, info);
                }
            }
            // Sent again when a replica stops answering, or answers again.
            if !std::mem::replace(&mut self.begun, true) || names(&silent) != names(&self.silent) {
                events.push_back(Event::SnapshotComplete(SnapshotComplete { unanswered: silent.clone() }));
            }
            self.silent = silent;
        }
    }
}

#[tonic::async_trait]
impl AgentTracker for Api {
    async fn get_connected_agents(
        &self,
        request: tonic::Request<GetConnectedAgentsRequest>,
    ) -> Result<tonic::Response<GetConnectedAgentsResponse>, tonic::Status> {
        use get_connected_agents_request::Request as By;
        let (query, failed) = match request.into_inner().request {
            Some(By::ProjectId(project)) => (Query::Project(project), "GetConnectionsByProjectId() failed"),
            Some(By::AgentId(agent)) => match AgentId::new(agent) {
                Ok(agent) => (Query::Agent(agent), "GetConnectionsByAgentId() failed"),
                // 14.1 looks any number up and finds nothing.
                Err(_) => return Ok(tonic::Response::new(GetConnectedAgentsResponse::default())),
            },
            None => return Err(invalid("invalid GetConnectedAgentsRequest.Request: value is required")),
        };
        let connected = connected(&*self.tracker, query).await.map_err(|error| {
            tracing::warn!(error = %error, "the tracker cannot be asked");
            tonic::Status::unavailable(failed)
        })?;
        let agents = connected.connections.iter().map(current_gitlab::info).collect();
        Ok(tonic::Response::new(GetConnectedAgentsResponse { agents }))
    }

    async fn get_connected_agents_by_agent_i_ds(
        &self,
        request: tonic::Request<GetConnectedAgentsByAgentIDsRequest>,
    ) -> Result<tonic::Response<GetConnectedAgentsByAgentIDsResponse>, tonic::Status> {
        self.agents_by_ids(&request.into_inner().agent_ids).await
    }

    async fn get_connected_agentks_by_agent_i_ds(
        &self,
        request: tonic::Request<GetConnectedAgentksByAgentIDsRequest>,
    ) -> Result<tonic::Response<GetConnectedAgentksByAgentIDsResponse>, tonic::Status> {
        self.agentks_by_ids(&request.into_inner().agent_ids).await
    }
}

#[cfg(test)]
mod tests {
    use grpc::Code;

    use super::*;

    #[test]
    fn codes_agree_with_tonics() {
        for number in 0..=16 {
            let status = grpc::Status::new(Code::from_number(number), "m");
            assert_eq!(to_tonic(&status).code() as i64, number);
        }
    }

    #[test]
    fn compiled_in_descriptors_are_readable() {
        assert!(
            tonic_reflection::server::Builder::configure()
                .register_encoded_file_descriptor_set(proto::FILE_DESCRIPTOR_SET)
                .build_v1()
                .is_ok()
        );
    }
}
