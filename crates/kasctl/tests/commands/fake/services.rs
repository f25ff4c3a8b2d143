//! The services of the fake kas.

use std::{
    collections::{BTreeMap, HashMap},
    convert::Infallible,
    pin::Pin,
    sync::Arc,
    time::Duration,
};

use futures_util::{Stream, StreamExt as _, stream};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use parking_lot::Mutex;
use prost::Message as _;
use proto::{
    gitlab::agent::{
        grpctool::{HttpRequest, HttpResponse, http_request, http_response},
        kubernetes_api::rpc::kubernetes_api_server::{KubernetesApi, KubernetesApiServer},
        prototool::{self, Values},
    },
    google::rpc,
    kas::api::v1::{
        AgentApplications, AgentComponents, AgentOnReplica, ConnectedAgentInfo, ConnectedAgentsByIdRequest,
        ConnectedAgentsByIdResponse, ConnectedAgentsForProjectRequest, ConnectedAgentsForProjectResponse,
        ControlSyncRequest, ControlSyncResponse, DiffRequest, DiffResponse, ExplainAgentRequest,
        ExplainAgentResponse, GetPodsRequest, GetPodsResponse, GetSyncRequest, GetSyncResponse,
        InstalledApplication, KasAddress, KasInstanceInfo, ListApplicationsRequest, ListApplicationsResponse,
        ListComponentsRequest, ListComponentsResponse, ListEnvironmentsRequest, ListEnvironmentsResponse,
        ListHooksRequest, ListHooksResponse, ListReplicasRequest, ListReplicasResponse, Pod,
        ReplayHooksRequest, ReplayHooksResponse, RunningComponent, TrackerStatusRequest,
        TrackerStatusResponse, UnansweredAgent, UnansweredReplica, WatchConnectedAgentsRequest,
        WatchConnectedAgentsResponse, WatchViewRequest, WatchViewResponse,
        agent_on_replica::Belief,
        kas_api_server::{KasApi, KasApiServer},
        watch_connected_agents_response::{Event, SnapshotComplete},
    },
};
use tokio::sync::{broadcast, mpsc, watch};
use tonic::{Code, Request, Response, Status, Streaming, body::Body, metadata::MetadataMap};
use tower_service::Service as _;

use super::{Other, gitops, verify};

/// The status of agentk for a request that was not sent.
const NO_API_SERVER: &str = "cannot reach the Kubernetes API server at 10.9.9.9:6443: tcp connect error: \
                             Connection refused (os error 111)";
type BoxStream<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

pub(super) struct State {
    pub(super) seen: Mutex<Seen>,
    pub(super) changes: broadcast::Sender<Event>,
    /// How many watches have sent their snapshot.
    pub(super) watches: watch::Sender<usize>,
    pub(super) cancelled: watch::Sender<bool>,
    pub(super) other: Mutex<Option<Other>>,
    pub(super) is_partial: Mutex<bool>,
    pub(super) killed: watch::Sender<bool>,
}

#[derive(Default)]
pub(super) struct Seen {
    pub(super) pods: Vec<GetPodsRequest>,
    pub(super) token_ids: Vec<String>,
    pub(super) metadata: MetadataMap,
}

impl State {
    pub(super) fn new() -> Self {
        Self {
            seen: Mutex::default(),
            changes: broadcast::Sender::new(16),
            watches: watch::Sender::new(0),
            cancelled: watch::Sender::new(false),
            other: Mutex::default(),
            is_partial: Mutex::default(),
            killed: watch::Sender::new(false),
        }
    }

    fn check(&self, metadata: &MetadataMap) -> Result<(), Status> {
        let token =
            metadata.get("authorization").and_then(|value| value.to_str().ok()?.strip_prefix("Bearer "));
        let claims = token.and_then(|token| verify(token).ok());
        let claims = claims.ok_or_else(|| Status::unauthenticated("JWT validation failed"))?;
        let mut seen = self.seen.lock();
        seen.token_ids.push(claims["jti"].as_str().unwrap().to_owned());
        seen.metadata = metadata.clone();
        Ok(())
    }
}

pub(super) fn agent(id: i64, name: &str, project_id: i64, connection_id: i64) -> ConnectedAgentInfo {
    let since = process::clock::wall() - Duration::from_secs(7200);
    ConnectedAgentInfo {
        id,
        connection_id,
        version: "v14.1.0".to_owned(),
        commit: "abc".to_owned(),
        pod_namespace: "gitlab".to_owned(),
        pod_name: format!("agentk-{id}"),
        connected_at: Some(prost_types::Timestamp { seconds: since.as_secs().try_into().unwrap(), nanos: 0 }),
        kas_address: Some(KasAddress { ip: "10.0.0.1".to_owned(), port: 8155 }),
        project_id,
        name: name.to_owned(),
        unconfirmed: false,
    }
}

/// The same agent at a replica of GitLab's kas.
pub(super) fn unconfirmed(id: i64, name: &str, project_id: i64, connection_id: i64) -> ConnectedAgentInfo {
    ConnectedAgentInfo {
        kas_address: Some(KasAddress { ip: "gitlab-kas".to_owned(), port: 0 }),
        unconfirmed: true,
        ..agent(id, name, project_id, connection_id)
    }
}

pub(super) fn silent(ip: &str) -> UnansweredReplica {
    UnansweredReplica {
        address: Some(KasAddress { ip: ip.to_owned(), port: 8155 }),
        reason: "connection refused".to_owned(),
    }
}

/// The status of kas for an agent without a tunnel.
fn absent(agent: i64) -> Status {
    with_words(Code::Unavailable, "not_started", &format!("agent {agent} is not connected"))
}

/// kas adds the outcome of the request to its own failures.
fn with_outcome(code: Code, outcome: &str) -> Status {
    with_words(code, outcome, outcome)
}

fn with_words(code: Code, outcome: &str, words: &str) -> Status {
    let info = rpc::ErrorInfo {
        reason: "AGENT".to_owned(),
        domain: "kas".to_owned(),
        metadata: BTreeMap::from([("kas.outcome".to_owned(), outcome.to_owned())]),
    };
    let detail = prost_types::Any {
        type_url: "type.googleapis.com/google.rpc.ErrorInfo".to_owned(),
        value: info.encode_to_vec(),
    };
    let details = rpc::Status { code: code as i32, message: words.to_owned(), details: vec![detail] };
    Status::with_details(code, words, details.encode_to_vec().into())
}

#[derive(Clone)]
pub(super) struct Kas(pub(super) Arc<State>);

impl Kas {
    pub(super) async fn dispatch(
        self,
        request: http::Request<Incoming>,
    ) -> Result<http::Response<Body>, Infallible> {
        let other = *self.0.other.lock();
        let path = request.uri().path().to_owned();
        match other {
            Some(Other::AgentPort) => {
                return Ok(Status::unimplemented(format!("unknown method {path}")).into_http());
            }
            Some(Other::Web(status)) => {
                let answer = http::Response::builder().status(status).header("content-type", "text/html");
                return Ok(answer.body(Body::default()).unwrap());
            }
            None => {}
        }
        if path.starts_with("/kas.api.v1.KasApi/") {
            return KasApiServer::new(self).call(request).await;
        }
        let explain = request.headers().contains_key("kas-explain");
        let answer = KubernetesApiServer::new(self).call(request).await?;
        Ok(if explain { explained(answer) } else { answer })
    }
}

/// Sends the route in the headers, and again in the trailers with the outcome.
fn explained(mut answer: http::Response<Body>) -> http::Response<Body> {
    let arrived = http::HeaderValue::from_static("0 arrived at 10.0.0.1:8155");
    let lent = http::HeaderValue::from_static("12345 tunnel lent by 10.0.0.2:8155");
    answer.headers_mut().append("kas-explain", arrived.clone());
    answer.headers_mut().append("kas-explain", lent);
    answer.map(|body| {
        Body::new(body.map_frame(move |mut frame| {
            if let Some(trailers) = frame.trailers_mut() {
                trailers.append("kas-explain", arrived.clone());
                trailers.append("kas-explain", http::HeaderValue::from_static("20000 the answer ended"));
            }
            frame
        }))
    })
}

#[async_trait::async_trait]
impl KasApi for Kas {
    async fn connected_agents_for_project(
        &self,
        _: Request<ConnectedAgentsForProjectRequest>,
    ) -> Result<Response<ConnectedAgentsForProjectResponse>, Status> {
        Err(Status::unimplemented("kasctl asks for a watch"))
    }

    async fn connected_agents_by_id(
        &self,
        _: Request<ConnectedAgentsByIdRequest>,
    ) -> Result<Response<ConnectedAgentsByIdResponse>, Status> {
        Err(Status::unimplemented("kasctl asks for a watch"))
    }

    /// Two replicas; the other one does not respond if one is lost.
    async fn list_replicas(
        &self,
        request: Request<ListReplicasRequest>,
    ) -> Result<Response<ListReplicasResponse>, Status> {
        self.0.check(request.metadata())?;
        let is_partial = *self.0.is_partial.lock();
        let address = |ip: &str| Some(KasAddress { ip: ip.to_owned(), port: 8155 });
        let asked = KasInstanceInfo {
            version: "v1.0.0".to_owned(),
            commit: "abc".to_owned(),
            address: address("10.0.0.1"),
            name: "kas-0".to_owned(),
            state: "ready".to_owned(),
            standing: "self".to_owned(),
            generation: u64::MAX,
            agents: 2,
            tunnels: 5,
            table_epoch: u64::MAX - 1,
            table_version: 12,
            table_synced: true,
            heard_ms: None,
        };
        let other = KasInstanceInfo {
            address: address("10.0.0.2"),
            name: "kas-1".to_owned(),
            standing: if is_partial { "suspect" } else { "live" }.to_owned(),
            generation: 7,
            tunnels: if is_partial { 0 } else { 3 },
            table_version: 9,
            table_synced: !is_partial,
            heard_ms: Some(if is_partial { 61_000 } else { 250 }),
            ..asked.clone()
        };
        let unanswered = if is_partial { vec![silent("10.0.0.2")] } else { Vec::new() };
        let alarms = if is_partial { vec!["kas-1 is suspect for 1 minute".to_owned()] } else { Vec::new() };
        Ok(Response::new(ListReplicasResponse { replicas: vec![asked, other], unanswered, alarms }))
    }

    /// Redis, which failed a minute ago.
    async fn tracker_status(
        &self,
        request: Request<TrackerStatusRequest>,
    ) -> Result<Response<TrackerStatusResponse>, Status> {
        self.0.check(request.metadata())?;
        let is_partial = *self.0.is_partial.lock();
        Ok(Response::new(TrackerStatusResponse {
            replica: "kas-0".to_owned(),
            backend: "redis".to_owned(),
            alarms: if is_partial { vec!["Redis cannot be asked".to_owned()] } else { Vec::new() },
            latency_micros: Some(800),
            agents: 2,
            entries: 5,
            unwritten: 1,
            remembered: 9,
            last_error: if is_partial { "no \x1b route".to_owned() } else { String::new() },
            last_error_age_ms: is_partial.then_some(61_000),
            lag_ms: Some(2_000),
        }))
    }

    /// Agent 3 is on the other replica; 4 is not connected, and a replica does not respond; 14 is on a
    /// replica of GitLab's kas.
    async fn explain_agent(
        &self,
        request: Request<ExplainAgentRequest>,
    ) -> Result<Response<ExplainAgentResponse>, Status> {
        self.0.check(request.metadata())?;
        let agent = request.into_inner().agent_id;
        let belief = |name: &str, holds, why: &str| Belief {
            name: name.to_owned(),
            holds,
            why: why.to_owned(),
            gitlab: false,
        };
        let replica = |name: &str, ip: &str, idle_tunnels, waiting, beliefs| AgentOnReplica {
            name: name.to_owned(),
            address: Some(KasAddress { ip: ip.to_owned(), port: 8155 }),
            idle_tunnels,
            busy_tunnels: 0,
            waiting,
            beliefs,
            ..AgentOnReplica::default()
        };
        let held = "kas-1 is live, has the agent at version 9: asked";
        let lag = "kas-0 is live, has the agent at version 11: asked";
        Ok(Response::new(match agent {
            3 => ExplainAgentResponse {
                replicas: vec![
                    replica("kas-0", "10.0.0.1", 0, 0, vec![belief("kas-1", true, held)]),
                    replica("kas-1", "10.0.0.2", 2, 0, vec![belief("kas-0", true, lag)]),
                ],
                route: vec!["no tunnel here".to_owned(), "borrow from kas-1 at 10.0.0.2:8155".to_owned()],
                unanswered: Vec::new(),
            },
            4 => ExplainAgentResponse {
                replicas: vec![replica("kas-0", "10.0.0.1", 0, 2, vec![belief("kas-1", false, "silent")])],
                route: vec!["wait for a tunnel".to_owned()],
                unanswered: vec![silent("10.0.0.2")],
            },
            14 => {
                let gitlab = Belief { gitlab: true, ..belief("grpc://10.0.0.9:8155", true, "in Redis") };
                ExplainAgentResponse {
                    replicas: vec![
                        replica("kas-0", "10.0.0.1", 0, 0, vec![gitlab]),
                        replica("kas-1", "10.0.0.2", 0, 0, Vec::new()),
                    ],
                    route: vec!["ask it".to_owned()],
                    unanswered: Vec::new(),
                }
            }
            _ => return Err(Status::invalid_argument("agent_id: no such agent is configured")),
        }))
    }

    /// Agent 7 has five pods; 50 never responds; 51 reached its deadline; 52 to 55 are refused by the API
    /// server; 56 cannot reach it; 57 has an internal error; 70 fails at its second page; 71 repeats a page;
    /// every other agent is not connected.
    async fn get_pods(&self, request: Request<GetPodsRequest>) -> Result<Response<GetPodsResponse>, Status> {
        self.0.check(request.metadata())?;
        let asked = request.into_inner();
        self.0.seen.lock().pods.push(asked.clone());
        let pod = |i: usize| Pod { namespace: "ns".to_owned(), name: format!("pod-{i}") };
        let start: usize = asked.page_token.parse().unwrap_or(0);
        let one = |next: &str| GetPodsResponse { pods: vec![pod(start)], next_page_token: next.to_owned() };
        Ok(Response::new(match asked.agent_id {
            7 => {
                let end = 5.min(start + asked.page_size as usize);
                let next_page_token = if end < 5 { end.to_string() } else { String::new() };
                GetPodsResponse { pods: (start..end).map(pod).collect(), next_page_token }
            }
            50 => return Err(Status::deadline_exceeded("late")),
            51 => return Err(with_outcome(Code::DeadlineExceeded, "unknown")),
            52 => return Err(Status::permission_denied("pods is forbidden")),
            53 => return Err(Status::unknown("the API server answered 500: oops")),
            54 => return Err(Status::failed_precondition("it does not accept the agent's credentials")),
            55 => return Err(Status::invalid_argument("unable to parse requirement")),
            56 => return Err(Status::unavailable(NO_API_SERVER)),
            57 => return Err(Status::internal("the answer is not a complete HTTP response")),
            58 => return Err(Status::invalid_argument("namespace must be the name of a namespace")),
            70 if start == 0 => one("1"),
            70 => return Err(Status::unavailable("draining")),
            71 => one("same"),
            agent => return Err(absent(agent)),
        }))
    }

    type WatchSyncStream = BoxStream<GetSyncResponse>;

    async fn get_sync(&self, request: Request<GetSyncRequest>) -> Result<Response<GetSyncResponse>, Status> {
        self.0.check(request.metadata())?;
        gitops::sync(request.get_ref(), "degraded").map(Response::new)
    }

    /// Two states, and then the end.
    async fn watch_sync(
        &self,
        request: Request<GetSyncRequest>,
    ) -> Result<Response<Self::WatchSyncStream>, Status> {
        self.0.check(request.metadata())?;
        let states = ["applying", "degraded"].map(|phase| gitops::sync(request.get_ref(), phase));
        Ok(Response::new(stream::iter(states).boxed()))
    }

    async fn control_sync(
        &self,
        request: Request<ControlSyncRequest>,
    ) -> Result<Response<ControlSyncResponse>, Status> {
        self.0.check(request.metadata())?;
        gitops::control(request.get_ref()).map(Response::new)
    }

    async fn diff(&self, request: Request<DiffRequest>) -> Result<Response<DiffResponse>, Status> {
        self.0.check(request.metadata())?;
        gitops::diff(request.get_ref()).map(Response::new)
    }

    async fn list_environments(
        &self,
        request: Request<ListEnvironmentsRequest>,
    ) -> Result<Response<ListEnvironmentsResponse>, Status> {
        self.0.check(request.metadata())?;
        let is_partial = *self.0.is_partial.lock();
        gitops::environments(request.get_ref(), is_partial).map(Response::new)
    }

    async fn list_hooks(
        &self,
        request: Request<ListHooksRequest>,
    ) -> Result<Response<ListHooksResponse>, Status> {
        self.0.check(request.metadata())?;
        Err(Status::failed_precondition("this kas takes no webhooks"))
    }

    async fn replay_hooks(
        &self,
        request: Request<ReplayHooksRequest>,
    ) -> Result<Response<ReplayHooksResponse>, Status> {
        self.0.check(request.metadata())?;
        Err(Status::failed_precondition("this kas takes no webhooks"))
    }

    type WatchViewStream = BoxStream<WatchViewResponse>;

    async fn watch_view(
        &self,
        request: Request<WatchViewRequest>,
    ) -> Result<Response<Self::WatchViewStream>, Status> {
        self.0.check(request.metadata())?;
        Err(Status::unimplemented("this kas has no views"))
    }

    type QueryViewStream = BoxStream<WatchViewResponse>;

    async fn query_view(
        &self,
        request: Request<WatchViewRequest>,
    ) -> Result<Response<Self::QueryViewStream>, Status> {
        self.0.check(request.metadata())?;
        Err(Status::unimplemented("this kas has no views"))
    }

    /// Of `all`, one agent has a component, and another one does not answer.
    async fn list_components(
        &self,
        request: Request<ListComponentsRequest>,
    ) -> Result<Response<ListComponentsResponse>, Status> {
        self.0.check(request.metadata())?;
        if request.get_ref().agents != "all" {
            return Ok(Response::new(ListComponentsResponse::default()));
        }
        let component = RunningComponent {
            name: "prometheus".to_owned(),
            namespace: "monitoring".to_owned(),
            version: "v3.1.0".to_owned(),
            version_from: "tag".to_owned(),
            workloads: vec!["statefulsets.apps/p".to_owned()],
            service: "monitoring/p:9090".to_owned(),
            ..RunningComponent::default()
        };
        let agent = AgentComponents {
            agent_id: 7,
            agent_name: "berlin".to_owned(),
            components: vec![component],
            missing: vec!["services: the API server answered 403: no".to_owned()],
        };
        let missing =
            UnansweredAgent { id: 9, name: "rome\u{1b}".to_owned(), reason: "no answer in 30 s".to_owned() };
        Ok(Response::new(ListComponentsResponse { agents: vec![agent], unanswered: vec![missing] }))
    }

    async fn list_applications(
        &self,
        request: Request<ListApplicationsRequest>,
    ) -> Result<Response<ListApplicationsResponse>, Status> {
        self.0.check(request.metadata())?;
        let application = InstalledApplication {
            namespace: "db".to_owned(),
            instance: "cache".to_owned(),
            name: "redis".to_owned(),
            version: "20.6.1".to_owned(),
            version_by: "flux".to_owned(),
            by: vec!["helm".to_owned(), "flux".to_owned()],
            status: "deployed, revision 3".to_owned(),
        };
        let agent = AgentApplications {
            agent_id: 7,
            agent_name: "berlin".to_owned(),
            applications: vec![application],
            missing: Vec::new(),
        };
        Ok(Response::new(ListApplicationsResponse { agents: vec![agent], unanswered: Vec::new() }))
    }

    type WatchConnectedAgentsStream = BoxStream<WatchConnectedAgentsResponse>;

    /// Project 600 misses a replica; 601 ends in the middle; an agent of 602 has a second connection at a
    /// replica of GitLab's kas; other projects and agents are filters.
    async fn watch_connected_agents(
        &self,
        request: Request<WatchConnectedAgentsRequest>,
    ) -> Result<Response<Self::WatchConnectedAgentsStream>, Status> {
        self.0.check(request.metadata())?;
        let asked = request.into_inner();
        let mut changes = self.0.changes.subscribe();
        let mut events: Vec<Event> = match asked.project_id {
            600 => vec![agent(6, "partial-agent", 600, 66)],
            601 => vec![agent(6, "lost", 601, 66)],
            602 => vec![unconfirmed(6, "", 602, 65), agent(6, "moved", 602, 66)],
            _ => vec![agent(2, "stage", 4, 22), agent(1, "prod", 3, i64::MAX)],
        }
        .into_iter()
        .filter(|agent| asked.project_id == 0 || agent.project_id == asked.project_id)
        .filter(|agent| asked.agent_id == 0 || agent.id == asked.agent_id)
        .map(Event::Connected)
        .collect();
        let unanswered = (asked.project_id == 600).then(|| silent("10.0.0.9"));
        let complete =
            Event::SnapshotComplete(SnapshotComplete { unanswered: unanswered.into_iter().collect() });
        if asked.project_id != 601 {
            events.push(complete);
        }
        let (send, receive) = mpsc::channel(16);
        let state = Arc::clone(&self.0);
        tokio::spawn(async move {
            let message = |event| Ok(WatchConnectedAgentsResponse { event: Some(event) });
            for event in events {
                let _ = send.send(message(event)).await;
            }
            if asked.project_id == 601 {
                return;
            }
            state.watches.send_modify(|open| *open += 1);
            while let Ok(event) = changes.recv().await {
                if send.send(message(event)).await.is_err() {
                    break;
                }
            }
        });
        Ok(Response::new(stream_of(receive)))
    }
}

fn stream_of<T: Send + 'static>(receive: mpsc::Receiver<Result<T, Status>>) -> BoxStream<T> {
    stream::unfold(receive, |mut receive| async { Some((receive.recv().await?, receive)) }).boxed()
}

fn header(code: i32, status: &str, content_type: &str) -> HttpResponse {
    let values = Values { value: vec![content_type.to_owned()] };
    let response = prototool::HttpResponse {
        status_code: code,
        status: status.to_owned(),
        header: BTreeMap::from([("Content-Type".to_owned(), values)]),
    };
    let header = http_response::Header { response: Some(response) };
    HttpResponse { message: Some(http_response::Message::Header(header)) }
}

fn data(bytes: impl Into<bytes::Bytes>) -> HttpResponse {
    HttpResponse { message: Some(http_response::Message::Data(http_response::Data { data: bytes.into() })) }
}

fn trailer() -> HttpResponse {
    HttpResponse { message: Some(http_response::Message::Trailer(http_response::Trailer {})) }
}

/// Reports that a hanging request was dropped.
struct OnDrop(Arc<State>);

impl Drop for OnDrop {
    fn drop(&mut self) {
        self.0.cancelled.send_replace(true);
    }
}

#[async_trait::async_trait]
impl KubernetesApi for Kas {
    type MakeRequestStream = BoxStream<HttpResponse>;

    /// Agent 7 responds by path; 8 breaks in the middle; 9 omits the end; 10 is busy; 11 violates the
    /// protocol; 12 refuses; 13 cannot reach its API server; 14 loses it; 15 lacks the module; 16 refuses
    /// late.
    async fn make_request(
        &self,
        request: Request<Streaming<HttpRequest>>,
    ) -> Result<Response<Self::MakeRequestStream>, Status> {
        self.0.check(request.metadata())?;
        let id: i64 = request.metadata().get("kas-agent-id").unwrap().to_str().unwrap().parse().unwrap();
        let all =
            |messages: Vec<Result<HttpResponse, Status>>| Ok(Response::new(stream::iter(messages).boxed()));
        match id {
            7 => {}
            8 => {
                let broken = with_outcome(Code::Unavailable, "unknown");
                return all(vec![Ok(header(200, "200 OK", "text/plain")), Ok(data("half")), Err(broken)]);
            }
            9 => return all(vec![Ok(header(200, "200 OK", "text/plain"))]),
            10 => return Err(with_outcome(Code::Unavailable, "not_started")),
            11 => return all(vec![Ok(data("early"))]),
            12 => return Err(Status::invalid_argument("malformed header")),
            13 => return Err(Status::unavailable(NO_API_SERVER)),
            14 => {
                return Err(Status::unavailable("the connection to the API server broke before its answer"));
            }
            15 => {
                let unimplemented = "agent 15 does not serve /gitlab.agent.kubernetes_api.rpc.KubernetesApi";
                return Err(Status::unimplemented(unimplemented));
            }
            16 => {
                let refusal = Status::unauthenticated("the API server wants a certificate");
                return all(vec![Ok(header(200, "200 OK", "text/plain")), Err(refusal)]);
            }
            _ => return Err(absent(id)),
        }
        let mut body = request.into_inner();
        let Some(HttpRequest { message: Some(http_request::Message::Header(head)) }) = body.message().await?
        else {
            return Err(Status::invalid_argument("no header"));
        };
        let head = head.request.unwrap();
        let state = Arc::clone(&self.0);
        let (send, receive) = mpsc::channel(4);
        let path = head.url_path.clone();
        tokio::spawn(async move {
            let done = match path.as_str() {
                "/status/404" => refuse(&send).await,
                "/echo" => echo(&send, body).await,
                "/endless" => endless(&send).await,
                "/hang" => hang(&send, OnDrop(state)).await,
                _ => describe(&send, head, body).await,
            };
            if let Some(Err(status)) = done {
                let _ = send.send(Err(status)).await;
            }
        });
        Ok(Response::new(stream_of(receive)))
    }
}

type Answer = mpsc::Sender<Result<HttpResponse, Status>>;
/// `None`: the caller cancelled.
type Done = Option<Result<(), Status>>;

async fn refuse(send: &Answer) -> Done {
    send.send(Ok(header(404, "404 Not Found", "text/plain"))).await.ok()?;
    send.send(Ok(data("missing"))).await.ok()?;
    send.send(Ok(trailer())).await.ok().map(Ok)
}

/// Returns each chunk as it arrives.
async fn echo(send: &Answer, mut body: Streaming<HttpRequest>) -> Done {
    send.send(Ok(header(200, "200 OK", "text/plain"))).await.ok()?;
    loop {
        match body.message().await {
            Ok(Some(HttpRequest { message: Some(http_request::Message::Data(piece)) })) => {
                send.send(Ok(data(piece.data))).await.ok()?;
            }
            Ok(Some(HttpRequest { message: Some(http_request::Message::Trailer(_)) })) => {
                return send.send(Ok(trailer())).await.ok().map(Ok);
            }
            _ => return Some(Err(Status::invalid_argument("no trailer"))),
        }
    }
}

async fn endless(send: &Answer) -> Done {
    send.send(Ok(header(200, "200 OK", "text/plain"))).await.ok()?;
    loop {
        send.send(Ok(data(vec![b'x'; 32 * 1024]))).await.ok()?;
    }
}

async fn hang(send: &Answer, _on_drop: OnDrop) -> Done {
    send.send(Ok(header(200, "200 OK", "text/plain"))).await.ok()?;
    send.send(Ok(data("begun"))).await.ok()?;
    send.closed().await;
    None
}

/// Returns the request.
async fn describe(send: &Answer, head: prototool::HttpRequest, mut body: Streaming<HttpRequest>) -> Done {
    let mut chunks = Vec::new();
    let mut text = Vec::new();
    loop {
        match body.message().await {
            Ok(Some(HttpRequest { message: Some(http_request::Message::Data(piece)) })) => {
                chunks.push(piece.data.len());
                text.extend_from_slice(&piece.data);
            }
            Ok(Some(HttpRequest { message: Some(http_request::Message::Trailer(_)) })) => break,
            _ => return Some(Err(Status::invalid_argument("no trailer"))),
        }
    }
    let flat = |values: BTreeMap<String, Values>| -> HashMap<String, Vec<String>> {
        values.into_iter().map(|(key, values)| (key, values.value)).collect()
    };
    let answer = serde_json::json!({
        "method": head.method,
        "path": head.url_path,
        "query": flat(head.query),
        "header": flat(head.header),
        "chunks": chunks,
        "body": String::from_utf8(text).unwrap(),
    });
    send.send(Ok(header(200, "200 OK", "application/json"))).await.ok()?;
    send.send(Ok(data(answer.to_string()))).await.ok()?;
    send.send(Ok(trailer())).await.ok().map(Ok)
}
