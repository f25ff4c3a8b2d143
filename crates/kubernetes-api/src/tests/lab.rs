//! An endpoint on a real socket, with the real router and real tunnels, whose agent is in this process.

use std::{
    collections::HashMap,
    net::{IpAddr, SocketAddr},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use async_trait::async_trait;
use bytes::Bytes;
use callers::{
    Access, Agents, AuthError, Authorizer, Caller, Callers, Credential, Grant, Hold, Impersonation,
    KnownAgent, Mode, Reach, RunAs, SourceKind,
};
use cluster::{InMemoryTracker, Replica};
use grpc::{BoxError, Code, Status};
use http::{HeaderMap, HeaderValue, Request, Response, header};
use http_body::{Body as HttpBody, Frame};
use http_body_util::BodyExt as _;
use http_tunnel::agent_end::{ResponseEncoder, UpgradedBody, Upstream, read_request};
use ids::{AgentId, ReplicaId, TokenHash};
use net::{
    http::{API, Limits, Protocols, Server},
    io::{Address, Listener},
};
use observe::{Observer, refusals::Refusals};
use parking_lot::Mutex;
use process::lifecycle::{Lifecycle, Phase};
use prometheus_client::registry::Registry;
use proto::gitlab::agent::{
    grpctool::http_request,
    reverse_tunnel::info::{AgentDescriptor, Method as InfoMethod, Service as InfoService},
};
use routing::{
    metrics::RequestMetrics,
    rate_limit::RateLimit,
    registry::{Limits as RegistryLimits, RegistryPool, TunnelRegistry},
    router::Router,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
    sync::{mpsc, watch},
    task::{AbortHandle, JoinHandle},
};
use tunnel::{
    agent_end::{self, Answer, Handler, Observer as TunnelObserver, Progress},
    features::Features,
    kas_end::{AgentKind, Descriptor, Info, Opening, Tunnel, TunnelPool},
};

use crate::{
    DiffQuestion, Diffs, Directory, Fleet, FleetAnswer, FleetBody, FleetQuestion, FleetRefusal, HeadLimits,
    KubernetesApi, ListedAgent, Metrics, OpenLimits, Origins, OwnPage, PageFile, Parts, Prefix, Settings,
};

/// The timeout for what should happen soon.
pub(super) const SOON: Duration = Duration::from_secs(10);
/// The agent that is connected.
pub(super) const AGENT: i64 = 7;
/// The token of a user who may use agent 7 as agentk.
pub(super) const TOKEN: &str = "kasu_0123456789012345678901234567890123456789012";
/// The token of a user who may use agent 7 as `kas:jane`.
pub(super) const JANE: &str = "kasu_janejanejanejanejanejanejanejanejanejanejan";
/// The token of a user who may use nothing.
pub(super) const NOBODY: &str = "kasu_nonononononononononononononononononononono";

/// The session cookie of a user of GitLab, who may use agent 7 as agentk.
pub(super) const COOKIE: &str = "session-cookie";
/// The CSRF token that belongs to it.
pub(super) const CSRF: &str = "csrf/token+1==";

/// A body that a test writes.
pub(super) type ApiBody = grpc::Body;
/// The API server: returns the answer to a request.
pub(super) type Api =
    Arc<dyn Fn(Request<grpc::Body>) -> Pin<Box<dyn Future<Output = Response<ApiBody>> + Send>> + Send + Sync>;

/// What the endpoint is started with.
pub(super) struct Setup {
    pub(super) features: Features,
    pub(super) kind: AgentKind,
    pub(super) tunnels: usize,
    pub(super) open: OpenLimits,
    pub(super) prefix: &'static str,
    /// How long upgraded connections may continue when the endpoint leaves.
    pub(super) upgrade_grace: Duration,
    /// Whether the store that knows where agents are is away.
    pub(super) is_tracker_away: bool,
    /// Whether there is a page of kas.
    pub(super) has_page: bool,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            features: Features::IMPERSONATION | Features::TARGET | Features::UPGRADE,
            kind: AgentKind::Ours,
            tunnels: 4,
            open: OpenLimits::default(),
            prefix: "/",
            upgrade_grace: Duration::from_millis(300),
            is_tracker_away: false,
            has_page: true,
        }
    }
}

fn page() -> OwnPage {
    OwnPage {
        files: &[
            PageFile { name: "", content_type: "text/html; charset=utf-8", content: "<!doctype html>" },
            PageFile { name: "a.js", content_type: "text/javascript", content: "1" },
        ],
        headers: vec![(header::CONTENT_SECURITY_POLICY, HeaderValue::from_static("script-src 'self'"))],
    }
}

/// A running endpoint.
pub(super) struct Lab {
    pub(super) address: SocketAddr,
    pub(super) lifecycle: Lifecycle,
    pub(super) metrics: Arc<Metrics>,
    pub(super) refusals: Arc<Refusals>,
    pub(super) registry: Arc<TunnelRegistry>,
    pub(super) users: Arc<Users>,
    /// The callers of the requests that were allowed.
    pub(super) allowed: Arc<Mutex<Vec<String>>>,
    /// The first messages of requests, as the agent received them.
    pub(super) received: Arc<Mutex<Vec<http_request::Header>>>,
    /// All bytes that the agent received.
    pub(super) bytes: Arc<Mutex<Vec<u8>>>,
    /// What resets each tunnel.
    tunnels: Mutex<Vec<Arc<Mutex<Vec<AbortHandle>>>>>,
    tasks: Vec<JoinHandle<()>>,
    /// As often as answers below `/fleet/` hold something, and twice more.
    pub(super) held: Arc<()>,
}

impl Drop for Lab {
    fn drop(&mut self) {
        self.lose_tunnels();
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

/// Answers with what it is asked. Project `missing` is not known.
struct FakeDiffs;

#[async_trait]
impl Diffs for FakeDiffs {
    async fn diff(&self, question: DiffQuestion) -> Result<Bytes, Status> {
        let DiffQuestion { agent, project, files, run_as } = question;
        if project == "missing" {
            return Err(Status::new(Code::FailedPrecondition, "no configuration names the project"));
        }
        let files: Vec<_> = files.iter().map(|(path, content)| (path, content.len())).collect();
        let user = run_as.map(|identity| identity.username);
        let json = serde_json::json!({
            "agent": agent.get(), "project": project, "files": files, "user": user,
        });
        Ok(json.to_string().into())
    }
}

/// Answers with what it is asked, and with the agents of 7, 8 and 9 that the caller may use.
struct FakeFleet {
    /// Is held by each answer that is `LARGE`.
    held: Arc<()>,
}

/// The size of an answer that no connection takes at once, in bytes.
pub(super) const LARGE: usize = 32 << 20;

#[async_trait]
impl Fleet for FakeFleet {
    async fn answer(&self, question: FleetQuestion) -> Result<FleetAnswer, FleetRefusal> {
        let FleetQuestion { route, places, target, headers, body, caller, .. } = question;
        if places.last().is_some_and(|rest| rest == "refuse") {
            let text = "not now".to_owned();
            let retry_after = Some(Duration::from_secs(3));
            return Err(FleetRefusal { status: http::StatusCode::TOO_MANY_REQUESTS, text, retry_after });
        }
        if places.last().is_some_and(|rest| rest == "large") {
            return Ok(FleetAnswer {
                status: http::StatusCode::OK,
                headers: HeaderMap::new(),
                body: FleetBody::Whole(vec![b' '; LARGE].into()),
                held: Some(Box::new(Arc::clone(&self.held))),
            });
        }
        let mut users = serde_json::Map::new();
        for agent in [AGENT, 8, 9] {
            if let Ok(authorized) = caller.authorize(AgentId::new(agent).unwrap()).await {
                let user = authorized.run_as.impersonation().map(|identity| identity.username.clone());
                users.insert(agent.to_string(), user.into());
            }
        }
        let reachable = caller.reachable().await.map(|reachable| {
            let ids: Vec<_> = reachable.agents.iter().map(|listed| listed.agent.id.get()).collect();
            serde_json::json!({ "ids": ids, "is_guess": reachable.is_guess })
        });
        let names: Vec<_> = headers.keys().map(http::HeaderName::as_str).collect();
        let json = serde_json::json!({
            "route": format!("{route:?}"),
            "places": places,
            "query": target.query(),
            "headers": names,
            "body": String::from_utf8_lossy(&body),
            "caller": &*caller.name(),
            "agent": caller.agent().map(|authorized| authorized.agent.get()),
            "users": users,
            "reachable": reachable.map_err(|error| error.to_string()).unwrap(),
        });
        let bytes = Bytes::from(json.to_string());
        let body = if places.last().is_some_and(|rest| rest == "stream") {
            FleetBody::Stream(grpc::full(bytes))
        } else {
            FleetBody::Whole(bytes)
        };
        Ok(FleetAnswer { status: http::StatusCode::OK, headers: HeaderMap::new(), body, held: None })
    }
}

/// The users of the lab.
pub(super) struct Users {
    grants: Mutex<HashMap<&'static str, (&'static str, RunAs)>>,
    changes: watch::Sender<u64>,
}

impl Users {
    /// Removes a user.
    pub(super) fn revoke(&self, token: &str) {
        self.grants.lock().remove(token);
        self.changes.send_modify(|version| *version += 1);
    }

    fn caller(&self, token: &str) -> Result<Caller, AuthError> {
        let (name, run_as) = self.grants.lock().get(token).cloned().ok_or(AuthError::Unknown)?;
        Ok(Caller {
            source: if token == COOKIE { SourceKind::Cookie } else { SourceKind::File },
            name: name.into(),
            uid: None,
            groups: Arc::from([]),
            extra: Arc::from([]),
            gitlab_user: None,
            grant: if name == "kas:nobody" { Grant::Rules } else { Grant::Decided(run_as) },
            recheck_at: None,
            hold: Hold::new(Arc::new(token.to_owned())),
        })
    }
}

#[async_trait]
impl Callers for Users {
    async fn authenticate(
        &self,
        credential: &Credential,
        agent: AgentId,
        _from: Option<IpAddr>,
    ) -> Result<Caller, AuthError> {
        let caller = self.caller(secret(credential))?;
        if agent.get() == AGENT || agent.get() == 8 { Ok(caller) } else { Err(AuthError::Forbidden) }
    }

    async fn recheck(&self, caller: &Caller, _agent: AgentId) -> Result<Caller, AuthError> {
        self.caller(caller.hold.state::<String>().map_or("", String::as_str))
    }

    async fn reach(&self, credential: &Credential, _from: Option<IpAddr>) -> Result<Reach, AuthError> {
        let caller = self.caller(secret(credential))?;
        if caller.source == SourceKind::Cookie {
            return Ok(Reach::Unlisted);
        }
        Ok(Reach::Agents { name: caller.name, agents: Arc::from([AgentId::new(AGENT).unwrap()]) })
    }

    fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }
}

/// Returns what [`Users`] knows a credential by.
fn secret(credential: &Credential) -> &str {
    match credential {
        Credential::Bearer(bearer) => bearer.secret(),
        Credential::Session(session) if session.csrf_token() == CSRF => session.cookie(),
        Credential::Session(_) | Credential::Certificate(_) => "",
    }
}

struct AllAgents;

#[async_trait]
impl Agents for AllAgents {
    fn known(&self, agent: AgentId) -> KnownAgent {
        KnownAgent { id: agent, name: Some(format!("agent-{agent}").into()), project_id: Some(1) }
    }

    async fn find(&self, _agent: AgentId) -> Result<Option<KnownAgent>, String> {
        Ok(None)
    }

    fn changes(&self) -> watch::Receiver<u64> {
        // Never wakes: its sender is gone.
        watch::channel(0).1
    }
}

#[async_trait]
impl Directory for AllAgents {
    async fn list(&self) -> Result<Vec<ListedAgent>, String> {
        Ok([AGENT, 8]
            .into_iter()
            .map(|id| ListedAgent { agent: self.known(AgentId::new(id).unwrap()), connected: id == AGENT })
            .collect())
    }
}

impl Lab {
    /// Starts an endpoint with an agent whose API server is `api`.
    pub(super) async fn start(setup: Setup, api: Api) -> Self {
        let mut registry = Registry::default();
        let requests = Arc::new(RequestMetrics::new(&mut registry));
        let metrics = Arc::new(Metrics::new(&mut registry));
        let refusals = Arc::new(Refusals::new(&mut registry));
        let me = Replica { id: ReplicaId::new("me"), address: "me".into() };
        let tracker = Arc::new(InMemoryTracker::new(me.clone()));
        let limits = RegistryLimits {
            waiters_per_agent: 100,
            waiters: 100,
            tunnels_per_agent: 500,
            endless_per_old_agent: 8,
        };
        let tunnels = TunnelRegistry::new(Arc::clone(&tracker) as _, requests, limits);
        let router = Arc::new(Router::new(
            Arc::clone(&tunnels),
            if setup.is_tracker_away { Arc::new(super::tracker::Away(tracker)) } else { tracker },
            Arc::clone(&refusals),
            Duration::from_millis(300),
            me.id,
            None,
        ));
        let users = Arc::new(Users {
            grants: Mutex::new(
                [
                    (TOKEN, ("kas:ops", RunAs::Agent { allows_impersonate_headers: false })),
                    (
                        JANE,
                        (
                            "kas:jane",
                            RunAs::Identity {
                                mode: Mode::User,
                                identity: Arc::new(Impersonation {
                                    username: "kas:jane".into(),
                                    groups: vec!["kas:dev".into()],
                                    uid: None,
                                    extra: vec![("agent.gitlab.com/id".into(), vec!["7".into()])],
                                }),
                            },
                        ),
                    ),
                    (COOKIE, ("gitlab:user:jane", RunAs::Agent { allows_impersonate_headers: true })),
                    (NOBODY, ("kas:nobody", RunAs::Agent { allows_impersonate_headers: false })),
                ]
                .into(),
            ),
            changes: watch::Sender::new(0),
        });
        let (allowed, held): (Arc<Mutex<Vec<String>>>, Arc<()>) = Default::default();
        let lifecycle = Lifecycle::default();
        let phase = lifecycle.watch();
        let endpoint = KubernetesApi::new(Parts {
            settings: Settings {
                prefix: Prefix::new(setup.prefix),
                host_suffix: Some("k8s.example.com".into()),
                origins: Origins::new(vec!["https://gitlab.example.com".into()]),
                answer_headers: Default::default(),
                head: HeadLimits::default(),
                open: setup.open,
                failures: 20,
                find_timeout: Duration::from_millis(300),
                page: setup.has_page.then(page),
                server: HeaderValue::from_static("gitlab-kas/v/c"),
            },
            authorizer: Authorizer::new(Arc::clone(&users) as _, Access::default(), Arc::new(AllAgents)),
            router,
            directory: Arc::new(AllAgents),
            observer: Observer::new(None, None, Box::new(|_| None)),
            metrics: Arc::clone(&metrics),
            refusals: Arc::clone(&refusals),
            is_ready: Box::new(move || *phase.borrow() == Phase::Serving),
            diffs: Arc::new(FakeDiffs),
            fleet: Arc::new(FakeFleet { held: Arc::clone(&held) }),
            owners: None,
            rate: None,
            allowed: Box::new({
                let allowed = Arc::clone(&allowed);
                move |authorized| allowed.lock().push(authorized.caller.name.to_string())
            }),
        });
        let listener = Listener::bind(&Address::Tcp("127.0.0.1:0".into())).await.unwrap();
        let address = listener.local_addr().unwrap();
        let server = Server {
            listener,
            tls: None,
            protocols: Protocols::Http1And2,
            settings: net::http::Settings { header_list: 64 * 1024, extended_connect: true, ..API },
            limits: Limits::default(),
            age: None,
            service: Arc::clone(&endpoint) as _,
        };
        let tasks = vec![
            tokio::spawn(server.run(lifecycle.clone())),
            tokio::spawn(endpoint.run(lifecycle.clone(), Duration::from_millis(200), setup.upgrade_grace)),
        ];
        let lab = Self {
            address,
            lifecycle,
            metrics,
            refusals,
            registry: tunnels,
            users,
            allowed,
            received: Arc::default(),
            bytes: Arc::default(),
            tunnels: Mutex::default(),
            tasks,
            held,
        };
        for _ in 0..setup.tunnels {
            lab.connect(&setup, Arc::clone(&api));
        }
        lab
    }

    /// Opens a tunnel of the agent.
    fn connect(&self, setup: &Setup, api: Api) {
        let descriptor = AgentDescriptor {
            services: vec![InfoService {
                name: http_tunnel::SERVICE.into(),
                methods: vec![InfoMethod { name: "MakeRequest".into() }],
            }],
        };
        let handler = Arc::new(Agentk { api, received: Arc::clone(&self.received) });
        let (body, control) = agent_end::open(&descriptor, handler, Box::new(Unobserved));
        let pool: Arc<dyn TunnelPool> = Arc::new(RegistryPool {
            registry: Arc::clone(&self.registry),
            rate_limit: Arc::new(RateLimit::new(1000, 1000)),
        });
        let info = Info {
            agent: AgentId::new(AGENT).unwrap(),
            instance: 1,
            token: TokenHash::of(b"t"),
            kind: setup.kind,
            features: setup.features,
            version: None,
            descriptor: Arc::new(Descriptor::of(&[http_tunnel::METHOD])),
        };
        let (mut from_agent, first) = link(body, None);
        let aborts: Arc<Mutex<Vec<AbortHandle>>> = Arc::default();
        let reset = {
            let aborts = Arc::clone(&aborts);
            Box::new(move || aborts.lock().iter().for_each(AbortHandle::abort))
        };
        let reusable = setup.kind == AgentKind::Ours;
        let registry = Arc::clone(&self.registry);
        let bytes = Arc::clone(&self.bytes);
        let all = Arc::clone(&aborts);
        let setup_task = tokio::spawn(async move {
            // The first message is the descriptor, which the listener reads.
            let _ = from_agent.frame().await;
            let (tunnel, tunnel_body) =
                Tunnel::new(info, Opening::new(grpc::boxed(from_agent), false), pool, reset);
            let (from_kas, second) = link(tunnel_body, Some(bytes));
            all.lock().push(second);
            control.accepted(grpc::boxed(from_kas), reusable, false);
            registry.insert(&tunnel, None);
        });
        aborts.lock().extend([first, setup_task.abort_handle()]);
        self.tunnels.lock().push(aborts);
    }

    /// Ends all tunnels, as when the agent's host is gone.
    pub(super) fn lose_tunnels(&self) {
        for aborts in self.tunnels.lock().drain(..) {
            aborts.lock().iter().for_each(AbortHandle::abort);
        }
    }
}

/// Passes a body through a task, as a connection does. Returns the other end, and what resets it.
fn link<B>(body: B, bytes: Option<Arc<Mutex<Vec<u8>>>>) -> (Wire, AbortHandle)
where
    B: HttpBody<Data = Bytes, Error = BoxError> + Send + Unpin + 'static,
{
    let (send, frames) = mpsc::channel(4);
    let mut body = body;
    let task = tokio::spawn(async move {
        loop {
            let frame = tokio::select! {
                frame = body.frame() => frame,
                () = send.closed() => return,
            };
            let is_last = frame.is_none();
            if let (Some(bytes), Some(Ok(frame))) = (&bytes, &frame)
                && let Some(data) = frame.data_ref()
            {
                bytes.lock().extend_from_slice(data);
            }
            let sent = match frame {
                Some(Ok(frame)) => Some(frame),
                Some(Err(_)) => return,
                None => None,
            };
            if send.send(sent).await.is_err() || is_last {
                return;
            }
        }
    });
    (Wire { frames, is_over: false }, task.abort_handle())
}

/// One direction of a stream. If its task is aborted, it is reset.
struct Wire {
    frames: mpsc::Receiver<Option<Frame<Bytes>>>,
    is_over: bool,
}

impl HttpBody for Wire {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        if self.is_over {
            return Poll::Ready(None);
        }
        match self.frames.poll_recv(cx) {
            Poll::Pending => Poll::Pending,
            Poll::Ready(Some(Some(frame))) => {
                self.is_over = frame.is_trailers();
                Poll::Ready(Some(Ok(frame)))
            }
            Poll::Ready(Some(None)) => {
                self.is_over = true;
                Poll::Ready(None)
            }
            Poll::Ready(None) => Poll::Ready(None),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.is_over
    }
}

struct Unobserved;

impl TunnelObserver for Unobserved {
    fn progress(&self, _: Progress) {}
}

/// agentk's end of the protocol.
struct Agentk {
    api: Api,
    received: Arc<Mutex<Vec<http_request::Header>>>,
}

impl Handler for Agentk {
    fn call(&self, request: Request<grpc::Body>) -> Answer {
        let (api, received) = (Arc::clone(&self.api), Arc::clone(&self.received));
        Box::pin(async move {
            match make_request(api, received, request.into_body()).await {
                Ok(response) => response,
                Err(status) => status.into_response(),
            }
        })
    }
}

async fn make_request(
    api: Api,
    received: Arc<Mutex<Vec<http_request::Header>>>,
    body: grpc::Body,
) -> Result<Response<grpc::Body>, Status> {
    let (message, body) = http_tunnel::kas_end::read_first_message(body, grpc::Deadline::NONE).await?;
    received.lock().extend(message.header());
    let (request, stream) = read_request(body, &HeaderValue::from_static("agentk"), false).await?;
    let (mut parts, upstream) = api(request).await.into_parts();
    if let Some(connection) = parts.extensions.remove::<Handed>().and_then(|handed| handed.0.lock().take()) {
        let frames = UpgradedBody::new(&parts, http_tunnel::MAX_CHUNK, stream, connection)?;
        let mut response = Response::new(grpc::boxed(frames));
        response.headers_mut().insert(header::CONTENT_TYPE, grpc::CONTENT_TYPE);
        return Ok(response);
    }
    let encoder = ResponseEncoder::new(&parts, http_tunnel::MAX_CHUNK)?;
    let frames = Download { encoder, upstream: Some(upstream), end: None, _stream: stream };
    let mut response = Response::new(grpc::boxed(frames));
    response.headers_mut().insert(http::header::CONTENT_TYPE, grpc::CONTENT_TYPE);
    Ok(response)
}

struct Download {
    encoder: ResponseEncoder,
    upstream: Option<ApiBody>,
    end: Option<Status>,
    _stream: http_tunnel::agent_end::RequestStream,
}

impl HttpBody for Download {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        loop {
            if let Some(data) = self.encoder.next_chunk() {
                return Poll::Ready(Some(Ok(Frame::data(data))));
            }
            if let Some(upstream) = &mut self.upstream {
                match Pin::new(upstream).poll_frame(cx) {
                    Poll::Ready(Some(Ok(frame))) => {
                        self.encoder.push(frame.into_data().unwrap_or_default());
                        continue;
                    }
                    Poll::Ready(Some(Err(_))) => {
                        self.upstream = None;
                        self.end = Some(Status::new(Code::Unavailable, "the API server has gone"));
                    }
                    Poll::Ready(None) => {
                        self.upstream = None;
                        self.encoder.end();
                        self.end = Some(Status::new(Code::Ok, ""));
                    }
                    Poll::Pending => {}
                }
            }
            if let Some(data) = self.encoder.flush() {
                return Poll::Ready(Some(Ok(Frame::data(data))));
            }
            if self.upstream.is_some() {
                return Poll::Pending;
            }
            return Poll::Ready(self.end.take().map(|status| {
                let mut trailers = HeaderMap::new();
                status.write_to(&mut trailers);
                Ok(Frame::trailers(trailers))
            }));
        }
    }
}

/// Returns an API server that answers each request with `answer`.
pub(super) fn api<F>(answer: impl Fn(Request<grpc::Body>) -> F + Send + Sync + 'static) -> Api
where
    F: Future<Output = Response<ApiBody>> + Send + 'static,
{
    Arc::new(move |request| Box::pin(answer(request)))
}

/// Returns an API server that describes each request in JSON: method, target, headers, body.
pub(super) fn describing() -> Api {
    api(|request| async move {
        let (parts, body) = request.into_parts();
        let body = match body.collect().await {
            Ok(body) => String::from_utf8_lossy(&body.to_bytes()).into_owned(),
            Err(_) => return status(599, "broken"),
        };
        let headers: HashMap<&str, Vec<&str>> = parts
            .headers
            .keys()
            .map(|name| {
                let values = parts.headers.get_all(name).iter().map(|value| value.to_str().unwrap());
                (name.as_str(), values.collect())
            })
            .collect();
        let json = serde_json::json!({
            "method": parts.method.as_str(),
            "target": parts.uri.to_string(),
            "headers": headers,
            "body": body,
        });
        let mut response = status(200, json.to_string());
        response.headers_mut().insert("content-type", HeaderValue::from_static("application/json"));
        response
    })
}

/// Returns an answer with an announced length.
pub(super) fn status(code: u16, body: impl Into<Bytes>) -> Response<ApiBody> {
    let body = body.into();
    let mut response = Response::new(grpc::full(body.clone()));
    *response.status_mut() = http::StatusCode::from_u16(code).unwrap();
    response.headers_mut().insert("content-length", body.len().into());
    response
}

/// Returns an answer of unknown length, and what writes it. The answer ends when the writer is dropped, and
/// fails with [`Writer::fail`].
pub(super) fn streaming(content_type: &'static str) -> (Response<ApiBody>, Writer) {
    let (send, frames) = mpsc::channel(1);
    let body = ApiStream(frames);
    let mut response = Response::new(grpc::boxed(body));
    response.headers_mut().insert("content-type", HeaderValue::from_static(content_type));
    (response, Writer(send))
}

pub(super) struct Writer(mpsc::Sender<Result<Bytes, BoxError>>);

impl Writer {
    pub(super) async fn write(&self, bytes: &'static str) {
        self.0.send(Ok(Bytes::from_static(bytes.as_bytes()))).await.unwrap();
    }

    pub(super) async fn fail(self) {
        self.0.send(Err("gone".into())).await.unwrap();
    }

    /// Waits until the reader is dropped.
    pub(super) async fn left(&self) {
        self.0.closed().await;
    }
}

struct ApiStream(mpsc::Receiver<Result<Bytes, BoxError>>);

impl HttpBody for ApiStream {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        self.0.poll_recv(cx).map(|received| received.map(|bytes| bytes.map(Frame::data)))
    }
}

/// The agent's end of an upgraded connection, in the extensions of an answer.
#[derive(Clone)]
struct Handed(Arc<Mutex<Option<Connection>>>);

/// A connection to the API server.
struct Connection(TcpStream);

impl Upstream for Connection {
    fn reset_on_close(&self) {
        self.0.set_zero_linger().unwrap();
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, buf)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
}

/// Returns an API server that switches to the protocol that a request asks for, or to `other`, and its ends
/// of the upgraded connections.
pub(super) fn upgrading(other: Option<&'static str>) -> (Api, mpsc::Receiver<TcpStream>) {
    let (send, connections) = mpsc::channel(8);
    let api = api(move |request| {
        let send = send.clone();
        async move {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let ours = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
            let (theirs, _) = listener.accept().await.unwrap();
            send.send(theirs).await.unwrap();
            let mut response = Response::new(grpc::full(Bytes::new()));
            *response.status_mut() = http::StatusCode::SWITCHING_PROTOCOLS;
            let headers = response.headers_mut();
            let asked = request.headers()[header::UPGRADE].clone();
            headers.insert(header::UPGRADE, other.map_or(asked, HeaderValue::from_static));
            headers.insert(header::CONNECTION, HeaderValue::from_static("Upgrade"));
            if let Some(key) = request.headers().get(header::SEC_WEBSOCKET_KEY) {
                headers.insert(header::SEC_WEBSOCKET_ACCEPT, websocket::upgrade::accept_of(key));
            }
            headers.insert("x-stream-protocol-version", HeaderValue::from_static("v4.channel.k8s.io"));
            headers.insert("set-cookie", HeaderValue::from_static("a=b"));
            response.extensions_mut().insert(Handed(Arc::new(Mutex::new(Some(Connection(ours))))));
            response
        }
    });
    (api, connections)
}
