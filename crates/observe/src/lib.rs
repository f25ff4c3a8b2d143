//! Records each request of the API listener and of the endpoint for kubectl: two lines of the audit log, and
//! a span.
//!
//! A [`RequestRecord`] accompanies a request. If the audit log and tracing are off, the record is empty, and
//! each of its methods costs one comparison.

pub mod audit;
pub mod refusals;
pub mod refused_callers;

use std::{
    net::SocketAddr,
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use grpc::{BoxError, Code, Status};
use http::{HeaderMap, HeaderValue, Response};
use http_body::{Frame, SizeHint};
use ids::{Actor, AgentId, ConnectionId};
use net::http::Body;
use proto::gitlab::agent::grpctool::http_request::Header;
use tokio::time::Instant;
use traces::{Kind, Span, Tracer};

use crate::audit::{
    AuditFields, Decision, End, EndStatus, EndpointFields, Record, Route, Rule, kubernetes::KubernetesAction,
};

/// The longest method that is recorded, in characters. A longer one is cut.
const LONGEST_METHOD: usize = 512;

/// Returns the project of an agent, if it is known.
pub type ProjectOf = Box<dyn Fn(AgentId) -> Option<i64> + Send + Sync>;

/// Where requests are recorded.
pub struct Observer {
    audit: Option<Arc<audit::Sink>>,
    tracer: Option<Tracer>,
    project_of: ProjectOf,
}

impl std::fmt::Debug for Observer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Observer")
            .field("audit", &self.audit.is_some())
            .field("tracer", &self.tracer.is_some())
            .finish_non_exhaustive()
    }
}

impl Observer {
    /// Requests are not recorded if both `audit` and `tracer` are `None`.
    pub fn new(audit: Option<Arc<audit::Sink>>, tracer: Option<Tracer>, project_of: ProjectOf) -> Arc<Self> {
        Arc::new(Self { audit, tracer, project_of })
    }

    /// Begins the record of a request that has arrived.
    pub fn arrived(
        self: &Arc<Self>,
        path: &str,
        peer: Option<SocketAddr>,
        correlation: &HeaderValue,
    ) -> RequestRecord {
        self.arrived_by(Rule::Jwt, path, peer, correlation)
    }

    /// As [`arrived`](Self::arrived), for a request that another rule than its token decides about.
    pub fn arrived_by(
        self: &Arc<Self>,
        rule: Rule,
        path: &str,
        peer: Option<SocketAddr>,
        correlation: &HeaderValue,
    ) -> RequestRecord {
        if self.audit.is_none() && self.tracer.is_none() {
            return RequestRecord::default();
        }
        let request_id = String::from_utf8_lossy(correlation.as_bytes()).into_owned();
        let method = path.chars().take(LONGEST_METHOD).collect();
        self.begin(request_id, method, peer, rule, None)
    }

    /// Begins the record of a request that has arrived at the endpoint for kubectl.
    pub fn arrived_at_endpoint(
        self: &Arc<Self>,
        peer: Option<SocketAddr>,
        request_id: &str,
        endpoint: EndpointFields,
    ) -> RequestRecord {
        if self.audit.is_none() && self.tracer.is_none() {
            return RequestRecord::default();
        }
        let method = http_tunnel::METHOD.to_owned();
        self.begin(request_id.to_owned(), method, peer, Rule::Form, Some(endpoint))
    }

    fn begin(
        self: &Arc<Self>,
        request_id: String,
        method: String,
        peer: Option<SocketAddr>,
        rule: Rule,
        endpoint: Option<EndpointFields>,
    ) -> RequestRecord {
        let fields = AuditFields {
            request_id,
            trace_id: None,
            peer,
            actor: None,
            agent: None,
            project: None,
            connection: None,
            method,
            kubernetes: None,
            decision: Decision::Deny,
            rule,
            endpoint,
        };
        RequestRecord(Some(Arc::new(Recorded {
            observer: Arc::clone(self),
            arrived: Instant::now(),
            bytes_in: AtomicU64::new(0),
            bytes_out: AtomicU64::new(0),
            state: Mutex::new(State {
                fields: Arc::new(fields),
                started: false,
                route: None,
                span: None,
                ended: false,
            }),
        })))
    }
}

fn begin_span(tracer: &Tracer, fields: &AuditFields, headers: &HeaderMap) -> Span {
    let name = fields.method.trim_start_matches('/');
    let (service, method) = name.split_once('/').unwrap_or((name, ""));
    let mut span = tracer.begin(name.to_owned(), Kind::Server, headers);
    if span.is_recording() {
        span.set("rpc.system", "grpc");
        span.set("rpc.service", service.to_owned());
        span.set("rpc.method", method.to_owned());
        span.set("gitlab.correlation_id", fields.request_id.clone());
        if let Some(agent) = fields.agent {
            span.set("kas.agent.id", agent.get());
        }
    }
    span
}

fn begin_http_span(tracer: &Tracer, fields: &AuditFields, method: &str, headers: &HeaderMap) -> Span {
    let mut span = tracer.begin(method.to_owned(), Kind::Server, headers);
    if span.is_recording() {
        // The path is omitted: its names may be confidential.
        span.set("http.request.method", method.to_owned());
        span.set("gitlab.correlation_id", fields.request_id.clone());
        if let Some(agent) = fields.agent {
            span.set("kas.agent.id", agent.get());
        }
    }
    span
}

fn end_span(span: &mut Span, code: Code, outcome: Option<&'static str>, route: Option<&Route>) {
    span.set("rpc.grpc.status_code", i64::from(code.number()));
    if let Some(outcome) = outcome {
        span.set("kas.outcome", outcome);
    }
    set_route(span, route);
    // The codes that OpenTelemetry's conventions count as errors of a server.
    if let Code::Unknown
    | Code::DeadlineExceeded
    | Code::Unimplemented
    | Code::Internal
    | Code::Unavailable
    | Code::DataLoss = code
    {
        span.failed(code.name());
    }
}

fn set_route(span: &mut Span, route: Option<&Route>) {
    match route {
        None => {}
        Some(Route::Local) => span.set("kas.route", "local"),
        Some(Route::Peer(replica)) => {
            span.set("kas.route", "peer");
            span.set("kas.route.replica", replica.as_str().to_owned());
        }
    }
}

/// The record of one request; empty if requests are not recorded.
#[derive(Clone, Debug, Default)]
pub struct RequestRecord(Option<Arc<Recorded>>);

#[derive(Debug)]
struct Recorded {
    observer: Arc<Observer>,
    arrived: Instant,
    bytes_in: AtomicU64,
    bytes_out: AtomicU64,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    fields: Arc<AuditFields>,
    /// The line `start` has been written.
    started: bool,
    route: Option<Route>,
    /// The span, which begins when the request is allowed.
    span: Option<Span>,
    /// The line `end` has been written.
    ended: bool,
}

impl Recorded {
    fn state(&self) -> MutexGuard<'_, State> {
        // Each change is one assignment, so a panic cannot leave the state inconsistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn update(&self, change: impl FnOnce(&mut AuditFields)) {
        change(Arc::make_mut(&mut self.state().fields));
    }

    fn write(&self, fields: &Arc<AuditFields>, end: Option<End>) {
        if let Some(audit) = &self.observer.audit {
            audit.write(Record { at: process::clock::wall(), fields: Arc::clone(fields), end });
        }
    }

    /// Writes the line `start`, unless it has been written.
    fn start(&self, state: &mut State) {
        if !std::mem::replace(&mut state.started, true) {
            self.write(&state.fields, None);
        }
    }

    /// Writes the line `end`, and before it the line `start` if that has not been written.
    fn end(&self, code: Code, outcome: Option<&'static str>) {
        self.end_with(EndStatus::Grpc(code.name()), outcome, |span, route| {
            end_span(span, code, outcome, route);
        });
    }

    /// As [`end`](Self::end), for the endpoint for kubectl.
    fn end_http(&self, code: Option<u16>, ended_by: &'static str, outcome: Option<&'static str>) {
        self.end_with(EndStatus::Http { code, ended_by }, outcome, |span, route| {
            if let Some(code) = code {
                span.set("http.response.status_code", i64::from(code));
            }
            set_route(span, route);
            // As OpenTelemetry's conventions say for servers.
            if let Some(code @ 500..) = code {
                span.failed(code.to_string());
            }
        });
    }

    fn end_with(
        &self,
        status: EndStatus,
        outcome: Option<&'static str>,
        end_span: impl FnOnce(&mut Span, Option<&Route>),
    ) {
        let mut state = self.state();
        if std::mem::replace(&mut state.ended, true) {
            return;
        }
        self.start(&mut state);
        if let Some(mut span) = state.span.take() {
            end_span(&mut span, state.route.as_ref());
        }
        let end = End {
            route: state.route.take(),
            bytes_in: self.bytes_in.load(Ordering::Relaxed),
            bytes_out: self.bytes_out.load(Ordering::Relaxed),
            status,
            outcome,
            duration: self.arrived.elapsed(),
        };
        self.write(&state.fields, Some(end));
    }

    fn end_as(&self, status: &Status) {
        self.end(status.code(), status.outcome().map(grpc::Outcome::as_str));
    }
}

impl RequestRecord {
    /// Records the caller.
    pub fn actor(&self, actor: &Arc<Actor>) {
        if let Some(recorded) = &self.0 {
            recorded.update(|fields| fields.actor = Some(Arc::clone(actor)));
        }
    }

    /// Records the agent that the request is for.
    pub fn target(&self, agent: AgentId, connection: Option<ConnectionId>) {
        if let Some(recorded) = &self.0 {
            let audit = recorded.observer.audit.as_ref();
            let project = audit.and_then(|_| (recorded.observer.project_of)(agent));
            recorded.update(|fields| {
                (fields.agent, fields.project, fields.connection) = (Some(agent), project, connection);
            });
            // In kas' own methods the message names the agent, so the span has begun before.
            if let Some(span) = &mut recorded.state().span {
                span.set("kas.agent.id", agent.get());
            }
        }
    }

    /// Records that the request is allowed, and begins its span as a child of the one in its headers. The
    /// line `start` is written now, or with the first message of a request to an API server.
    pub fn allowed(&self, headers: &HeaderMap) {
        if let Some(recorded) = &self.0 {
            let span = recorded
                .observer
                .tracer
                .as_ref()
                .map(|tracer| begin_span(tracer, &recorded.state().fields, headers));
            recorded.update(|fields| {
                fields.decision = Decision::Allow;
                fields.trace_id = span.as_ref().map(Span::trace_id);
            });
            let mut state = recorded.state();
            state.span = span;
            if recorded.observer.audit.is_none() || state.fields.method != http_tunnel::METHOD {
                recorded.start(&mut state);
            }
        }
    }

    /// Adds the context of the request's span to the headers that are sent on.
    pub fn outgoing(&self, headers: &mut HeaderMap) {
        if let Some(recorded) = &self.0
            && let Some(span) = &recorded.state().span
        {
            span.write_to(headers);
        }
    }

    /// Records that the request is refused, and writes both lines.
    pub fn denied(&self, rule: Rule, code: Code) {
        if let Some(recorded) = &self.0 {
            recorded.update(|fields| {
                (fields.decision, fields.rule) = (Decision::Deny, rule);
                // This is the path of an HTTP request, not the name of a method.
                if rule == Rule::NotGrpc {
                    fields.method.clear();
                }
            });
            recorded.end(code, Some("refused"));
        }
    }

    /// Records something that has happened without a caller, and writes both lines.
    pub fn happened(&self, code: Code, outcome: &'static str) {
        if let Some(recorded) = &self.0 {
            recorded.update(|fields| fields.decision = Decision::Allow);
            recorded.end(code, Some(outcome));
        }
    }

    /// Changes what is recorded of a request of the endpoint for kubectl.
    pub fn endpoint(&self, change: impl FnOnce(&mut EndpointFields)) {
        if let Some(recorded) = &self.0 {
            recorded.update(|fields| fields.endpoint.as_mut().map_or((), change));
        }
    }

    /// Records what a request of the endpoint for kubectl does. `action` is called if that is recorded.
    pub fn action(&self, action: impl FnOnce() -> KubernetesAction) {
        if let Some(recorded) = &self.0
            && recorded.observer.audit.is_some()
        {
            let action = action();
            recorded.update(|fields| fields.kubernetes = Some(action));
        }
    }

    /// Records that a request of the endpoint for kubectl is allowed, begins its span as a child of the one
    /// in its headers, and writes the line `start`: no request reaches a cluster before it is in the log.
    pub fn allowed_at_endpoint(&self, method: &str, headers: &HeaderMap) {
        if let Some(recorded) = &self.0 {
            let tracer = recorded.observer.tracer.as_ref();
            let span =
                tracer.map(|tracer| begin_http_span(tracer, &recorded.state().fields, method, headers));
            recorded.update(|fields| {
                (fields.decision, fields.rule) = (Decision::Allow, Rule::Access);
                fields.trace_id = span.as_ref().map(Span::trace_id);
            });
            let mut state = recorded.state();
            state.span = span;
            recorded.start(&mut state);
        }
    }

    /// Records that a request of the endpoint for kubectl is refused, and writes both lines.
    pub fn denied_at_endpoint(&self, rule: Rule, code: u16, ended_by: &'static str) {
        if let Some(recorded) = &self.0 {
            recorded.update(|fields| (fields.decision, fields.rule) = (Decision::Deny, rule));
            recorded.end_http(Some(code), ended_by, Some("refused"));
        }
    }

    /// Records the end of a request of the endpoint for kubectl, whose answer had `bytes_out` bytes. `code`
    /// is the status of the answer; `None`: the client left before it.
    pub fn ended_at_endpoint(&self, code: Option<u16>, ended_by: &'static str, bytes_out: u64) {
        if let Some(recorded) = &self.0 {
            recorded.bytes_out.store(bytes_out, Ordering::Relaxed);
            let outcome = match (code, ended_by) {
                (None, _) | (_, "client") => Some("cancelled"),
                _ => None,
            };
            recorded.end_http(code, ended_by, outcome);
        }
    }

    /// Records whose tunnel the request takes.
    pub fn routed(&self, route: impl FnOnce() -> Route) {
        if let Some(recorded) = &self.0 {
            recorded.state().route = Some(route());
        }
    }

    /// Records the first message of a request to an API server. `header` decodes its header, and returns
    /// `None` if that fails; it is called only if there is an audit log. Writes the line `start`, so that no
    /// request reaches a cluster before it is in the log.
    pub fn first_message(&self, header: impl FnOnce() -> Option<Header>) {
        if let Some(recorded) = &self.0
            && recorded.observer.audit.is_some()
        {
            let action = header().as_ref().and_then(KubernetesAction::of);
            recorded.update(|fields| fields.kubernetes = action);
            let mut state = recorded.state();
            recorded.start(&mut state);
        }
    }

    /// Wraps the request's body to count its bytes.
    pub fn request_body(&self, body: grpc::Body) -> grpc::Body {
        match &self.0 {
            None => body,
            Some(recorded) => grpc::boxed(RequestBody { inner: body, recorded: Arc::clone(recorded) }),
        }
    }

    /// Returns a guard that records the request as cancelled if it is dropped before there is an answer.
    pub fn answering(&self) -> Answering {
        Answering(self.0.clone())
    }
}

/// A request that has no answer yet.
#[derive(Debug)]
pub struct Answering(Option<Arc<Recorded>>);

impl Answering {
    /// Wraps the answer to count its bytes and to record its status.
    pub fn answered(mut self, response: Response<Body>) -> Response<Body> {
        let Some(recorded) = self.0.take() else { return response };
        if let Some(status) = Status::from_headers(response.headers()) {
            recorded.end_as(&status);
            return response;
        }
        response.map(|inner| grpc::boxed(ResponseBody { inner, ending: Self(Some(recorded)) }))
    }
}

impl Drop for Answering {
    fn drop(&mut self) {
        if let Some(recorded) = &self.0 {
            recorded.end(Code::Cancelled, Some("cancelled"));
        }
    }
}

/// The body of a request.
struct RequestBody {
    inner: grpc::Body,
    recorded: Arc<Recorded>,
}

impl http_body::Body for RequestBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let frame = ready!(Pin::new(&mut self.inner).poll_frame(cx));
        if let Some(Ok(frame)) = &frame
            && let Some(data) = frame.data_ref()
        {
            self.recorded.bytes_in.fetch_add(data.len() as u64, Ordering::Relaxed);
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

/// The body of an answer.
struct ResponseBody {
    inner: Body,
    ending: Answering,
}

impl ResponseBody {
    fn end(&mut self, trailers: Option<&HeaderMap>) {
        let Some(recorded) = self.ending.0.take() else { return };
        match trailers.and_then(Status::from_headers) {
            Some(status) => recorded.end_as(&status),
            // The stream is reset, so the caller gets no status.
            None => recorded.end(Code::Unknown, Some("unknown")),
        }
    }
}

impl http_body::Body for ResponseBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let frame = ready!(Pin::new(&mut self.inner).poll_frame(cx));
        match &frame {
            Some(Ok(frame)) => match (frame.data_ref(), frame.trailers_ref()) {
                (Some(data), _) => {
                    if let Some(recorded) = &self.ending.0 {
                        recorded.bytes_out.fetch_add(data.len() as u64, Ordering::Relaxed);
                    }
                }
                (None, trailers) => self.end(trailers),
            },
            Some(Err(_)) | None => self.end(None),
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}
