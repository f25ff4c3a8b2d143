//! What is told of each request of the API listener to those who look: lines of the audit log, and a span.
//!
//! A [`RequestRecord`] accompanies a request. When nobody looks it is empty, and each of its steps is one
//! comparison.

pub mod audit;
pub mod refusals;

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

use crate::audit::{Decision, End, Facts, Record, Route, Rule, kubernetes::KubernetesAction};

/// Methods are short; what is longer is refused, and cut here.
const LONGEST_METHOD: usize = 512;

/// Returns the project of an agent, where it is known.
pub type ProjectOf = Box<dyn Fn(AgentId) -> Option<i64> + Send + Sync>;

/// Who looks at requests.
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
    /// Nobody looks when `audit` and `tracer` are `None`.
    pub fn new(audit: Option<Arc<audit::Sink>>, tracer: Option<Tracer>, project_of: ProjectOf) -> Arc<Self> {
        Arc::new(Self { audit, tracer, project_of })
    }

    /// A request has arrived.
    pub fn arrived(
        self: &Arc<Self>,
        path: &str,
        peer: Option<SocketAddr>,
        correlation: &HeaderValue,
    ) -> RequestRecord {
        if self.audit.is_none() && self.tracer.is_none() {
            return RequestRecord::default();
        }
        let facts = Facts {
            request_id: String::from_utf8_lossy(correlation.as_bytes()).into_owned(),
            trace_id: None,
            peer,
            actor: None,
            agent: None,
            project: None,
            connection: None,
            method: path.chars().take(LONGEST_METHOD).collect(),
            kubernetes: None,
            decision: Decision::Deny,
            rule: Rule::Jwt,
        };
        RequestRecord(Some(Arc::new(Seen {
            observer: Arc::clone(self),
            arrived: Instant::now(),
            bytes_in: AtomicU64::new(0),
            bytes_out: AtomicU64::new(0),
            state: Mutex::new(State {
                facts: Arc::new(facts),
                started: false,
                route: None,
                span: None,
                ended: false,
            }),
        })))
    }
}

fn begin_span(tracer: &Tracer, facts: &Facts, headers: &HeaderMap) -> Span {
    let name = facts.method.trim_start_matches('/');
    let (service, method) = name.split_once('/').unwrap_or((name, ""));
    let mut span = tracer.begin(name.to_owned(), Kind::Server, headers);
    if span.is_recording() {
        span.set("rpc.system", "grpc");
        span.set("rpc.service", service.to_owned());
        span.set("rpc.method", method.to_owned());
        span.set("gitlab.correlation_id", facts.request_id.clone());
        if let Some(agent) = facts.agent {
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
    match route {
        None => {}
        Some(Route::Local) => span.set("kas.route", "local"),
        Some(Route::Peer(replica)) => {
            span.set("kas.route", "peer");
            span.set("kas.route.replica", replica.as_str().to_owned());
        }
    }
    // What a server answers for: the codes that OpenTelemetry's conventions name.
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

/// What accompanies a request.
#[derive(Clone, Debug, Default)]
pub struct RequestRecord(Option<Arc<Seen>>);

#[derive(Debug)]
struct Seen {
    observer: Arc<Observer>,
    arrived: Instant,
    bytes_in: AtomicU64,
    bytes_out: AtomicU64,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    facts: Arc<Facts>,
    /// The first line has been written.
    started: bool,
    route: Option<Route>,
    /// From when it was allowed until it is over.
    span: Option<Span>,
    /// The last one too.
    ended: bool,
}

impl Seen {
    fn state(&self) -> MutexGuard<'_, State> {
        // Each change is one assignment: a panic leaves nothing torn.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn learn(&self, change: impl FnOnce(&mut Facts)) {
        change(Arc::make_mut(&mut self.state().facts));
    }

    fn write(&self, facts: &Arc<Facts>, end: Option<End>) {
        if let Some(audit) = &self.observer.audit {
            audit.write(Record { at: process::clock::wall(), facts: Arc::clone(facts), end });
        }
    }

    /// Writes the first line.
    fn start(&self, state: &mut State) {
        if !std::mem::replace(&mut state.started, true) {
            self.write(&state.facts, None);
        }
    }

    /// Writes the last line, and before it the first one if that has not been.
    fn end(&self, code: Code, outcome: Option<&'static str>) {
        let mut state = self.state();
        if std::mem::replace(&mut state.ended, true) {
            return;
        }
        self.start(&mut state);
        if let Some(mut span) = state.span.take() {
            end_span(&mut span, code, outcome, state.route.as_ref());
        }
        let end = End {
            route: state.route.take(),
            bytes_in: self.bytes_in.load(Ordering::Relaxed),
            bytes_out: self.bytes_out.load(Ordering::Relaxed),
            status: code.name(),
            outcome,
            duration: self.arrived.elapsed(),
        };
        self.write(&state.facts, Some(end));
    }

    fn end_as(&self, status: &Status) {
        self.end(status.code(), status.outcome().map(grpc::Outcome::as_str));
    }
}

impl RequestRecord {
    /// Who asks is known.
    pub fn actor(&self, actor: &Arc<Actor>) {
        if let Some(seen) = &self.0 {
            seen.learn(|facts| facts.actor = Some(Arc::clone(actor)));
        }
    }

    /// For whom the request is, is known.
    pub fn target(&self, agent: AgentId, connection: Option<ConnectionId>) {
        if let Some(seen) = &self.0 {
            let audit = seen.observer.audit.as_ref();
            let project = audit.and_then(|_| (seen.observer.project_of)(agent));
            seen.learn(|facts| {
                (facts.agent, facts.project, facts.connection) = (Some(agent), project, connection);
            });
            // Of kas' own methods the message says it, which comes later.
            if let Some(span) = &mut seen.state().span {
                span.set("kas.agent.id", agent.get());
            }
        }
    }

    /// The request goes on. Its first line is written now or, when its first message says what it means, with
    /// that; and its span begins, below the one that its headers name.
    pub fn allowed(&self, headers: &HeaderMap) {
        if let Some(seen) = &self.0 {
            let span =
                seen.observer.tracer.as_ref().map(|tracer| begin_span(tracer, &seen.state().facts, headers));
            seen.learn(|facts| {
                facts.decision = Decision::Allow;
                facts.trace_id = span.as_ref().map(Span::trace_id);
            });
            let mut state = seen.state();
            state.span = span;
            if seen.observer.audit.is_none() || state.facts.method != http_tunnel::METHOD {
                seen.start(&mut state);
            }
        }
    }

    /// Puts the context of the request's span into the headers that go on.
    pub fn outgoing(&self, headers: &mut HeaderMap) {
        if let Some(seen) = &self.0
            && let Some(span) = &seen.state().span
        {
            span.write_to(headers);
        }
    }

    /// The request is refused: both lines are written.
    pub fn denied(&self, rule: Rule, code: Code) {
        if let Some(seen) = &self.0 {
            seen.learn(|facts| {
                (facts.decision, facts.rule) = (Decision::Deny, rule);
                // The path of some HTTP request, and no name of a method.
                if rule == Rule::NotGrpc {
                    facts.method.clear();
                }
            });
            seen.end(code, Some("refused"));
        }
    }

    /// The request has a tunnel.
    pub fn routed(&self, route: impl FnOnce() -> Route) {
        if let Some(seen) = &self.0 {
            seen.state().route = Some(route());
        }
    }

    /// The first message of a request to an API server has come; `None`: its header cannot be decoded. The
    /// first line is written before the message is passed on: nothing is done that was not said to begin.
    pub fn first_message(&self, header: Option<&Header>) {
        if let Some(seen) = &self.0
            && seen.observer.audit.is_some()
        {
            let action = header.and_then(KubernetesAction::of);
            seen.learn(|facts| facts.kubernetes = action);
            let mut state = seen.state();
            seen.start(&mut state);
        }
    }

    /// Returns the request's body, whose bytes are counted while it passes.
    pub fn request_body(&self, body: grpc::Body) -> grpc::Body {
        match &self.0 {
            None => body,
            Some(seen) => grpc::boxed(RequestBody { inner: body, seen: Arc::clone(seen) }),
        }
    }

    /// Watches over the time until there is an answer: a request that is dropped before was cancelled.
    pub fn answering(&self) -> Answering {
        Answering(self.0.clone())
    }
}

/// A request that has no answer yet.
#[derive(Debug)]
pub struct Answering(Option<Arc<Seen>>);

impl Answering {
    /// Returns the answer, which is looked at while it passes.
    pub fn answered(mut self, response: Response<Body>) -> Response<Body> {
        let Some(seen) = self.0.take() else { return response };
        if let Some(status) = Status::from_headers(response.headers()) {
            seen.end_as(&status);
            return response;
        }
        response.map(|inner| grpc::boxed(ResponseBody { inner, ending: Self(Some(seen)) }))
    }
}

impl Drop for Answering {
    fn drop(&mut self) {
        if let Some(seen) = &self.0 {
            seen.end(Code::Cancelled, Some("cancelled"));
        }
    }
}

/// What comes from the caller.
struct RequestBody {
    inner: grpc::Body,
    seen: Arc<Seen>,
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
            self.seen.bytes_in.fetch_add(data.len() as u64, Ordering::Relaxed);
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

/// What goes to the caller.
struct ResponseBody {
    inner: Body,
    ending: Answering,
}

impl ResponseBody {
    fn end(&mut self, trailers: Option<&HeaderMap>) {
        let Some(seen) = self.ending.0.take() else { return };
        match trailers.and_then(Status::from_headers) {
            Some(status) => seen.end_as(&status),
            // The stream is reset: the caller sees no status.
            None => seen.end(Code::Unknown, Some("unknown")),
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
                    if let Some(seen) = &self.ending.0 {
                        seen.bytes_out.fetch_add(data.len() as u64, Ordering::Relaxed);
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
