//! The API listener: serves kas' own services, and passes calls of all other methods to agents.

use std::{
    net::SocketAddr,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use arc_swap::ArcSwap;
use cluster::Tracker;
use grpc::{BoxError, Code, Deadline, InflateBody, Status};
use http::{HeaderMap, HeaderValue, Request, Response};
use http_body::Frame;
use http_body_util::BodyExt as _;
use http_tunnel::kas_end;
use hyper::body::Incoming;
use identity::jwt::JwtVerifier;
use ids::Actor;
use net::http::{Answer, AuthState, Body, Connection, GoAway, Refusal, Service, StreamSlot, Trust};
use tokio::time::Sleep;
use tunnel::{features::Features, kas_end::Head};

use grpc::service::LocalService;
use kas_config::Attempts;
use observe::audit::Rule;
use observe::refusals::{ListenerName, Reason, Refusals};
use observe::{Observer, RequestRecord};
use routing::{
    metadata::{self, Target},
    router::{AgentRequest, ChosenAgentk, RouteTrace, Router},
};

use super::{failed, not_grpc, too_large};
use crate::fleet::Catalog;
use crate::hooks::HookQueries;
use crate::pushes::Pushes;
use crate::sync::SyncService;
use crate::views::Hub;

mod services;

pub(crate) use services::explain;

/// The largest message of a caller that uses compression, in bytes. It is held in memory while decompressed.
const MAX_INFLATED: usize = 4 << 20;
/// The stream of a caller that does not read is reset this long after its deadline.
const DEADLINE_GRACE: std::time::Duration = std::time::Duration::from_secs(2);

/// The service of the API listener.
pub struct ApiListener {
    /// Replaced when the secret files change.
    jwt: ArcSwap<JwtVerifier>,
    router: Arc<Router>,
    refusals: Arc<Refusals>,
    services: services::Services,
    observer: Arc<Observer>,
    attempts: Attempts,
}

impl std::fmt::Debug for ApiListener {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ApiListener").finish_non_exhaustive()
    }
}

impl ApiListener {
    /// Creates the listener's service. Health checks report `SERVING` while `phase` is serving. `attempts`:
    /// the limits of one connection. `hooks`: `None`: this kas takes no webhooks.
    #[expect(clippy::too_many_arguments, reason = "each is made by another module")]
    pub fn new(
        jwt: JwtVerifier,
        router: Arc<Router>,
        tracker: Arc<dyn Tracker>,
        refusals: Arc<Refusals>,
        pushes: Arc<Pushes>,
        gitaly: Option<Arc<gitaly::Client>>,
        phase: tokio::sync::watch::Receiver<process::lifecycle::Phase>,
        observer: Arc<Observer>,
        attempts: Attempts,
        sync: Arc<SyncService>,
        hooks: Option<Arc<HookQueries>>,
        views: Arc<Hub>,
        catalog: Arc<Catalog>,
    ) -> Arc<Self> {
        let shared = Arc::clone(&router);
        let services =
            services::Services::new(shared, tracker, pushes, gitaly, phase, sync, hooks, views, catalog);
        Arc::new(Self { jwt: ArcSwap::from_pointee(jwt), router, refusals, services, observer, attempts })
    }

    /// Verifies tokens with other secrets from now on.
    pub fn rotate(&self, jwt: JwtVerifier) {
        self.jwt.store(Arc::new(jwt));
    }
}

impl Service for ApiListener {
    fn connected(self: Arc<Self>, peer: Option<SocketAddr>) -> Arc<dyn Connection> {
        Arc::new(Caller { trust: Trust::new(self.attempts.failures), listener: self, peer })
    }

    fn refused(&self, why: Refusal) {
        self.refusals.connection(ListenerName::Api, why);
    }
}

/// One connection of a caller.
struct Caller {
    listener: Arc<ApiListener>,
    peer: Option<SocketAddr>,
    trust: Trust,
}

impl Caller {
    fn verify(&self, headers: &HeaderMap) -> Result<Arc<Actor>, Status> {
        match self.listener.jwt.load().verify(headers) {
            Ok(actor) => {
                self.trust.passed();
                Ok(actor)
            }
            Err(status) => {
                self.trust.failed();
                self.listener.refusals.refused(ListenerName::Api, Reason::Unauthenticated);
                Err(status)
            }
        }
    }
}

impl Connection for Caller {
    fn call(self: Arc<Self>, request: Request<Incoming>, slot: &StreamSlot) -> Answer {
        let correlation = metadata::correlation(request.headers());
        // Health checks need no token and are not recorded.
        let health = request.uri().path().starts_with(services::HEALTH);
        let record = if health {
            RequestRecord::default()
        } else {
            self.listener.observer.arrived(request.uri().path(), self.peer, &correlation)
        };
        if let Some(response) = not_grpc(request.method(), request.headers()) {
            self.trust.failed();
            record.denied(Rule::NotGrpc, Code::Unimplemented);
            return Box::pin(std::future::ready(response));
        }
        let refuse = |status: &Status, rule| -> Answer {
            record.denied(rule, status.code());
            Box::pin(std::future::ready(failed(status, &correlation)))
        };
        let wrong_keys = |status: &Status| {
            if metadata::has_too_many(request.headers()) {
                self.listener.refusals.refused(ListenerName::Api, Reason::Headers);
            }
            refuse(status, Rule::Metadata)
        };
        let mut caller = None;
        if !health {
            match self.verify(request.headers()) {
                Ok(actor) => {
                    record.actor(&actor);
                    caller = Some(actor);
                }
                Err(status) => return refuse(&status, Rule::Jwt),
            }
        }
        if let Some(status) = too_large(&request, self.listener.attempts) {
            self.listener.refusals.refused(ListenerName::Api, Reason::Headers);
            return refuse(&status, Rule::Metadata);
        }
        let deadline = match Deadline::from_headers(request.headers()) {
            Ok(deadline) => deadline,
            Err(error) => {
                return refuse(&Status::new(Code::InvalidArgument, error.to_string()), Rule::GrpcTimeout);
            }
        };
        if let Some(at) = deadline.instant() {
            slot.arm_until(at + DEADLINE_GRACE);
        }
        if let Some(service) = self.listener.services.of(request.uri().path()) {
            if let Err(status) = metadata::check_keys(request.headers()) {
                return wrong_keys(&status);
            }
            record.allowed(request.headers());
            return Box::pin(own(service, request, correlation, deadline, record, caller));
        }
        let target = match Target::read(request.headers()) {
            Ok(Some(target)) => target,
            Ok(None) => return refuse(&unknown_method(request.uri().path()), Rule::Method),
            Err(status) => return wrong_keys(&status),
        };
        record.target(target.agent, target.connection);
        if !metadata::is_method(request.uri()) {
            let status = Status::new(Code::Unimplemented, "a method is /package.Service/Method");
            return refuse(&status, Rule::Method);
        }
        Box::pin(pass_through(self, request, target, correlation, deadline, record))
    }

    fn auth_state(&self) -> AuthState {
        self.trust.auth_state()
    }

    fn going_away(&self, _reason: GoAway) {
        // GOAWAY is enough: callers open new connections, and open requests continue.
    }
}

/// The answer to a call that names no agent, if the method is not one of kas.
fn unknown_method(path: &str) -> Status {
    // All other services in these packages belong to an API of kas: naming an agent would not help.
    let is_of_kas = (path.starts_with("/gitlab.") && !path.starts_with("/gitlab.agent.kubernetes_api."))
        || path.starts_with("/kas.api.");
    let text = if is_of_kas {
        format!("unknown method {path}: this version of kas does not serve it")
    } else {
        format!("unknown method {path}; to reach an agent's method name the agent in metadata kas-agent-id")
    };
    Status::new(Code::Unimplemented, text)
}

/// Passes a request to its agent.
async fn pass_through(
    caller: Arc<Caller>,
    request: Request<Incoming>,
    target: Target,
    correlation: HeaderValue,
    deadline: Deadline,
    record: RequestRecord,
) -> Response<Body> {
    let (mut head, body) = request.into_parts();
    let body = match head.headers.get("grpc-encoding").map(HeaderValue::as_bytes) {
        None | Some(b"identity") => grpc::boxed(body),
        Some(b"gzip") => {
            let refusals = Arc::clone(&caller.listener.refusals);
            grpc::boxed(InflateBody::new(body, MAX_INFLATED).map_err(move |error| {
                let code = error.downcast_ref::<Status>().map(Status::code);
                if code == Some(Code::ResourceExhausted) {
                    refusals.refused(ListenerName::Api, Reason::Message);
                }
                error
            }))
        }
        Some(other) => {
            let text =
                format!("grpc-encoding {} is not supported: use gzip or identity", other.escape_ascii());
            record.denied(Rule::GrpcEncoding, Code::Unimplemented);
            let mut response = failed(&Status::new(Code::Unimplemented, text), &correlation);
            response.headers_mut().insert("grpc-accept-encoding", HeaderValue::from_static("identity,gzip"));
            return response;
        }
    };
    record.allowed(&head.headers);
    record.outgoing(&mut head.headers);
    let answering = record.answering();
    let body = record.request_body(body);
    let trace = if target.explain { RouteTrace::begin() } else { RouteTrace::default() };
    trace.note(|| format!("arrived for agent {}", target.agent));
    let finish = |mut response: Response<Body>| {
        trace.write_to(response.headers_mut());
        answering.answered(response)
    };
    let (needs, body) = if head.uri.path() == http_tunnel::METHOD {
        match kas_end::read_first_message(body, deadline).await {
            Ok((message, body)) => {
                record.first_message(|| message.header());
                match message.needs() {
                    Ok(needs) => (needs, body),
                    Err(status) => return finish(failed(&status, &correlation)),
                }
            }
            Err(status) => {
                if status.code() == Code::ResourceExhausted {
                    caller.listener.refusals.refused(ListenerName::Api, Reason::Message);
                }
                return finish(failed(&status, &correlation));
            }
        }
    } else {
        (Features::NONE, body)
    };
    let answer = caller
        .listener
        .router
        .route(AgentRequest {
            agent: target.agent,
            connection: target.connection,
            method: Arc::from(head.uri.path()),
            headers: head.headers,
            correlation: correlation.clone(),
            deadline,
            wait_until: None,
            body,
            needs,
            is_long: false,
            is_endless: false,
            chosen: ChosenAgentk::default(),
            trace: trace.clone(),
            record,
        })
        .await;
    let answer = match answer {
        Ok(answer) => answer,
        Err(status) => return finish(failed(&status, &correlation)),
    };
    let (mut headers, body) = match answer.head {
        Head::Headers(headers) => (headers, grpc::boxed(answer.body)),
        Head::Only(mut headers, status) => {
            status.write_to(&mut headers);
            (headers, grpc::full(bytes::Bytes::new()))
        }
    };
    headers.insert(http::header::CONTENT_TYPE, grpc::CONTENT_TYPE);
    headers.insert(grpc::CORRELATION_ID, correlation);
    let mut response = Response::new(body);
    *response.headers_mut() = headers;
    finish(response)
}

/// Serves a method of kas itself, within its deadline.
async fn own(
    service: LocalService,
    request: Request<Incoming>,
    correlation: HeaderValue,
    deadline: Deadline,
    record: RequestRecord,
    caller: Option<Arc<Actor>>,
) -> Response<Body> {
    let answering = record.answering();
    let mut request = request.map(|body| record.request_body(grpc::boxed(body)));
    request.extensions_mut().insert(record);
    request.extensions_mut().insert(deadline);
    request.extensions_mut().insert(Correlation(correlation.clone()));
    if let Some(caller) = caller {
        request.extensions_mut().insert(caller);
    }
    let late = || Status::new(Code::DeadlineExceeded, "the deadline passed before kas had the answer");
    let mut response = match deadline.instant() {
        Some(at) => match tokio::time::timeout_at(at, service(request)).await {
            Ok(answered) => answered,
            Err(_) => return answering.answered(failed(&late(), &correlation)),
        },
        None => service(request).await,
    };
    response.headers_mut().insert(grpc::CORRELATION_ID, correlation);
    answering.answered(match deadline.instant() {
        None => response,
        Some(at) => response.map(|inner| {
            grpc::boxed(DeadlineBody { inner, sleep: Box::pin(tokio::time::sleep_until(at)), done: false })
        }),
    })
}

/// The request id, for kas' own services.
#[derive(Clone, Debug)]
struct Correlation(HeaderValue);

/// A body that ends with `DEADLINE_EXCEEDED` at its deadline.
struct DeadlineBody {
    inner: Body,
    sleep: Pin<Box<Sleep>>,
    done: bool,
}

impl http_body::Body for DeadlineBody {
    type Data = bytes::Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<bytes::Bytes>, BoxError>>> {
        if self.done {
            return Poll::Ready(None);
        }
        if let Poll::Ready(frame) = Pin::new(&mut self.inner).poll_frame(cx) {
            return Poll::Ready(frame);
        }
        if self.sleep.as_mut().poll(cx).is_pending() {
            return Poll::Pending;
        }
        self.done = true;
        let mut trailers = HeaderMap::with_capacity(2);
        Status::new(Code::DeadlineExceeded, "the deadline passed").write_to(&mut trailers);
        Poll::Ready(Some(Ok(Frame::trailers(trailers))))
    }

    fn is_end_stream(&self) -> bool {
        self.done || self.inner.is_end_stream()
    }
}
