//! The private listener: other replicas borrow tunnels here, copy the table, and ask who is connected.
//!
//! Nothing is routed on: what this replica does not hold it does not have. Replicas of GitLab's kas, 14.1,
//! ask in a form of their own, see `gateway`.

mod gateway;

use std::{
    io,
    net::SocketAddr,
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll, ready},
    time::Duration,
};

use arc_swap::ArcSwap;
use bytes::{Bytes, BytesMut};
use grpc::{BoxError, Code, Deadline, Outcome, Status};
use http::{HeaderMap, HeaderValue, Request, Response};
use http_body::{Body as _, Frame};
use hyper::body::Incoming;
use identity::jwt::JwtVerifier;
use ids::{AgentId, ConnectionId, ReplicaId};
use net::http2::{Answer, Body, Connection, GoAway, Refusal, Service, Standing, StreamSlot};
use prost::Message as _;
use proto::gitlab::agent::reverse_tunnel::rpc::{ConnectResponse, RequestInfo, connect_response};
use tokio::time::{Instant, Sleep};
use traces::{Kind, Span, Tracer};
use tunnel::{
    frame,
    kas_end::{AgentKind, Job, Lender, Splice, Tunnel},
    meta::{self, Binary},
    state::Mode,
};

use super::{Trust, count_refusal, failed, not_grpc, too_large, too_many_fields};
use crate::routing::{
    metadata,
    metrics::{AskAnswer, RequestMetrics, Side},
    peer,
    registry::{Acquired, Borrower, Gone, Grant, Refused, TunnelLease, TunnelRegistry},
};
use crate::{
    config::Attempts,
    refusals::{ListenerName, Reason, Refusals},
};
use grpc::service::LocalService;

/// A lent tunnel goes back when its request has not begun after this time.
const UNUSED: Duration = Duration::from_secs(2);
/// For how long one ask may have its tunnel for one request after the other: its credential is checked once,
/// and a link that has its age must come to an end.
const LONGEST_LOAN: Duration = Duration::from_secs(60);
/// Why a request was not started.
const ENDED: &str = "the lent tunnel has ended";
/// Failed handshakes are told of once in this time.
const TELL: Duration = Duration::from_secs(60);
/// How long an ask without a deadline waits.
const LONGEST_WAIT: Duration = Duration::from_secs(3600);

/// What the private listener needs.
pub struct PrivateListener {
    /// Exchanged when the secret files change.
    jwt: ArcSwap<JwtVerifier>,
    me: ReplicaId,
    registry: Arc<TunnelRegistry>,
    metrics: Arc<RequestMetrics>,
    refusals: Arc<Refusals>,
    services: Vec<(String, LocalService)>,
    /// When a failed handshake was last told of.
    told: Mutex<Option<Instant>>,
    tracer: Option<Tracer>,
    attempts: Attempts,
}

impl std::fmt::Debug for PrivateListener {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PrivateListener").field("me", &self.me).finish_non_exhaustive()
    }
}

impl PrivateListener {
    /// Makes the listener's service. `services` answer everything but `Borrow`; `tracer` makes spans of what
    /// is lent; `attempts` is what one connection may try.
    pub fn new(
        jwt: JwtVerifier,
        me: ReplicaId,
        registry: Arc<TunnelRegistry>,
        refusals: Arc<Refusals>,
        services: Vec<(String, LocalService)>,
        tracer: Option<Tracer>,
        attempts: Attempts,
    ) -> Arc<Self> {
        let (told, jwt) = (Mutex::default(), ArcSwap::from_pointee(jwt));
        let metrics = Arc::clone(registry.metrics());
        Arc::new(Self { jwt, me, registry, metrics, refusals, services, told, tracer, attempts })
    }

    /// Checks tokens against other secrets from now on.
    pub fn rotate(&self, jwt: JwtVerifier) {
        self.jwt.store(Arc::new(jwt));
    }
}

impl Service for PrivateListener {
    fn connected(self: Arc<Self>, peer: Option<SocketAddr>) -> Arc<dyn Connection> {
        Arc::new(Replica { trust: Trust::new(self.attempts), listener: self, peer })
    }

    fn refused(&self, why: Refusal) {
        count_refusal(&self.refusals, ListenerName::Private, why);
    }

    fn not_opened(&self, peer: Option<SocketAddr>, error: &io::Error) {
        let peer = peer.map(tracing::field::display);
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        // Between replicas a handshake fails because somebody has made a mistake, again and again.
        if told.is_none_or(|told| told.elapsed() >= TELL) {
            *told = Some(Instant::now());
            tracing::warn!(peer, error = %error, "a connection to the private API was refused in its handshake");
        } else {
            tracing::debug!(peer, error = %error, "a connection to the private API was refused in its handshake");
        }
    }
}

/// One connection of another replica.
struct Replica {
    listener: Arc<PrivateListener>,
    trust: Trust,
    /// Where it calls from.
    peer: Option<SocketAddr>,
}

impl Connection for Replica {
    fn call(self: Arc<Self>, request: Request<Incoming>, _slot: &StreamSlot) -> Answer {
        if let Some(response) = not_grpc(request.method(), request.headers()) {
            self.trust.failed();
            return Box::pin(std::future::ready(response));
        }
        let correlation = metadata::correlation(request.headers());
        let refuse =
            |status: &Status| -> Answer { Box::pin(std::future::ready(failed(status, &correlation))) };
        let attempts = self.listener.attempts;
        let unfit = too_many_fields(request.headers(), attempts).or_else(|| too_large(&request, attempts));
        if let Some(status) = unfit {
            self.trust.failed();
            self.listener.refusals.refused(ListenerName::Private, Reason::Headers);
            return refuse(&status);
        }
        if let Err(status) = self.listener.jwt.load().verify(request.headers()) {
            self.trust.failed();
            self.listener.refusals.refused(ListenerName::Private, Reason::Unauthenticated);
            return refuse(&status);
        }
        self.trust.passed();
        // Another cluster's replica may have had this address before, or another process this port.
        if let Some(to) = request.headers().get(peer::TO)
            && to.as_bytes() != self.listener.me.as_str().as_bytes()
        {
            let text = format!("this is replica {}, not the one that was meant", self.listener.me);
            return refuse(&Status::new(Code::Unavailable, text).with_outcome(Outcome::NotStarted));
        }
        let path = request.uri().path();
        if path == peer::BORROW {
            return Box::pin(lend(Arc::clone(&self.listener), request, correlation));
        }
        match self.listener.services.iter().find(|(prefix, _)| path.starts_with(prefix)) {
            Some((_, own)) => {
                let own = Arc::clone(own);
                Box::pin(async move { own(request.map(grpc::boxed)).await })
            }
            None if request.headers().contains_key(peer::gitlab::AGENT) => {
                // 14.1 does not say who it is.
                let address = self.peer.map_or_else(String::new, |peer| peer.ip().to_string());
                let from = ReplicaId::new(&format!("gitlab-kas at {address}"));
                Box::pin(gateway::serve(Arc::clone(&self.listener), request, correlation, from))
            }
            None => {
                refuse(&Status::new(Code::Unimplemented, "unknown method; this is the private API of kas"))
            }
        }
    }

    fn standing(&self) -> Standing {
        self.trust.standing()
    }

    fn going_away(&self, _reason: GoAway) {}
}

/// What an ask says.
#[derive(Debug)]
struct Ask {
    from: ReplicaId,
    agent: AgentId,
    connection: Option<ConnectionId>,
    method: Arc<str>,
    deadline: Deadline,
    /// It knows how to send several requests.
    again: bool,
}

impl Ask {
    fn read(headers: &HeaderMap) -> Result<Self, Status> {
        let invalid = |text: String| Status::new(Code::InvalidArgument, text);
        let text = |key: &http::HeaderName| {
            headers
                .get(key)
                .and_then(|value| value.to_str().ok())
                .ok_or_else(|| invalid(format!("{key} is missing")))
        };
        if text(&peer::FORWARDED)? != "1" {
            return Err(invalid(format!("{}: a request passes at most two replicas", peer::FORWARDED)));
        }
        let connection = match headers.get(peer::CONNECTION) {
            None => None,
            Some(_) => Some(
                text(&peer::CONNECTION)?
                    .parse()
                    .map_err(|error| invalid(format!("{}: {error}", peer::CONNECTION)))?,
            ),
        };
        Ok(Self {
            from: ReplicaId::new(text(&peer::FROM)?),
            agent: text(&peer::AGENT)?
                .parse()
                .map_err(|error| invalid(format!("{}: {error}", peer::AGENT)))?,
            connection,
            method: text(&peer::METHOD)?.into(),
            deadline: Deadline::from_headers(headers).map_err(|error| invalid(error.to_string()))?,
            again: headers.get(peer::REUSE).is_some_and(|value| *value == peer::AGAIN),
        })
    }
}

async fn lend(
    listener: Arc<PrivateListener>,
    request: Request<Incoming>,
    correlation: HeaderValue,
) -> Response<Body> {
    let ask = match Ask::read(request.headers()) {
        Ok(ask) => ask,
        Err(status) => return failed(&status, &correlation),
    };
    let count = |answer| listener.metrics.asked(Side::Answered, answer);
    let acquired = listener.registry.acquire_for(&ask.from, ask.agent, &ask.method, ask.connection);
    let granted = match acquired {
        Ok(Acquired::Now(grant)) => Ok(grant),
        Ok(Acquired::Wait(mut waiting)) => {
            let until = ask.deadline.instant().unwrap_or_else(|| Instant::now() + LONGEST_WAIT);
            match tokio::time::timeout_at(until, waiting.granted()).await {
                Ok(Ok(grant)) => Ok(grant),
                Ok(Err(Gone::Leaving)) => Err(Refused::Draining),
                Ok(Err(Gone::NotHere(mark))) => Err(Refused::NotHere(mark)),
                Ok(Err(Gone::Refused(refused))) => Err(refused),
                Err(_) => {
                    let status = Status::new(Code::DeadlineExceeded, "no tunnel was idle until the deadline")
                        .with_outcome(Outcome::NotStarted);
                    return failed(&status, &correlation);
                }
            }
        }
        Err(refused) => Err(refused),
    };
    let grant = match granted {
        Ok(grant) => grant,
        Err(refused) => {
            count(match refused {
                Refused::NotHere(_) => AskAnswer::NotHere,
                Refused::Draining => AskAnswer::Unavailable,
                Refused::Unimplemented | Refused::OtherConnection | Refused::Unbound | Refused::Full => {
                    AskAnswer::Refused
                }
            });
            let status = crate::routing::router::refusal(refused, ask.agent, ask.connection, &ask.method);
            let mut response = failed(&status, &correlation);
            if let Refused::NotHere(mark) = refused {
                response.headers_mut().insert(peer::EPOCH, mark.epoch.into());
                response.headers_mut().insert(peer::VERSION, mark.version.into());
            }
            return response;
        }
    };
    count(AskAnswer::Ready);
    let lent = grant.tunnel().info().kind;
    let impersonates = grant.tunnel().info().impersonates;
    let kind = peer::kind(lent);
    let again = ask.again && ask.connection.is_none() && lent.mode() == Mode::Reusable;
    let traced = listener.tracer.clone().map(|tracer| Traced { tracer, from: ask.from.clone() });
    let borrower = Borrower { replica: ask.from, method: ask.method };
    let lending = again.then(|| Lending::new(Arc::clone(&listener.registry), borrower.clone()));
    let wish = Wish {
        registry: Arc::clone(&listener.registry),
        agent: ask.agent,
        connection: ask.connection,
        borrower,
        kind: lent,
        impersonates,
    };
    let request = grpc::boxed(request.into_body());
    let mut body = LendBody::new(wish, grant, request, lending, Arc::clone(&listener.metrics));
    body.traced = traced;
    let mut response = Response::new(grpc::boxed(body));
    let headers = response.headers_mut();
    headers.insert(http::header::CONTENT_TYPE, grpc::CONTENT_TYPE);
    headers.insert(peer::KIND, kind);
    if impersonates {
        headers.insert(peer::IMPERSONATES, HeaderValue::from_static("1"));
    }
    if again {
        headers.insert(peer::REUSE, peer::AGAIN);
    }
    response
}

/// Decides after each request whether the asker keeps the tunnel.
struct Lending {
    registry: Arc<TunnelRegistry>,
    borrower: Borrower,
    since: Instant,
    /// What it keeps, until its stream takes it.
    loan: Mutex<Option<TunnelLease>>,
}

impl Lending {
    fn new(registry: Arc<TunnelRegistry>, borrower: Borrower) -> Arc<Self> {
        Arc::new(Self { registry, borrower, since: Instant::now(), loan: Mutex::default() })
    }

    fn loan(&self) -> Option<TunnelLease> {
        self.loan.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl Lender for Lending {
    fn renews(&self, tunnel: &Arc<Tunnel>) -> bool {
        if self.since.elapsed() >= LONGEST_LOAN {
            return false;
        }
        let loan = self.registry.lease(tunnel, &self.borrower);
        let stays = loan.is_some();
        *self.loan.lock().unwrap_or_else(PoisonError::into_inner) = loan;
        stays
    }
}

/// What was asked for: whatever tunnel was lent for it first, another of the same kind will do as long as
/// nothing of the request was written.
struct Wish {
    registry: Arc<TunnelRegistry>,
    agent: AgentId,
    connection: Option<ConnectionId>,
    borrower: Borrower,
    /// The asker writes its envelopes for this agentk.
    kind: AgentKind,
    /// The asker was told that this agentk heeds a wish for other rights.
    impersonates: bool,
}

impl Wish {
    /// Takes another idle tunnel, or a place in the queue.
    fn acquire(&self) -> Option<Acquired> {
        let Borrower { replica, method } = &self.borrower;
        self.registry.acquire_for(replica, self.agent, method, self.connection).ok().filter(|acquired| {
            match acquired {
                Acquired::Now(grant) => self.fits(grant),
                Acquired::Wait(_) => true,
            }
        })
    }

    /// Takes another tunnel if one is idle.
    fn idle(&self) -> Option<Grant> {
        let grant = self.registry.take(self.agent, &self.borrower.method, self.connection)?;
        self.fits(&grant).then_some(grant)
    }

    fn fits(&self, grant: &Grant) -> bool {
        let info = grant.tunnel().info();
        info.kind == self.kind && (info.impersonates || !self.impersonates)
    }
}

/// The answer to an ask: first a tunnel that is lent, then what the agent answers through it; and, where the
/// asker knows how, that as often as the asker has a request and nobody else waits.
struct LendBody {
    wish: Wish,
    state: State,
    /// Until when the lent tunnel's request must have begun, or have another tunnel.
    until: Pin<Box<Sleep>>,
    /// `None`: the tunnel is lent for one request.
    lending: Option<Arc<Lending>>,
    metrics: Arc<RequestMetrics>,
    /// Who makes spans, if anybody does.
    traced: Option<Traced>,
}

#[expect(clippy::large_enum_variant, reason = "one per stream, and its body is boxed as a whole")]
enum State {
    Unused(Unused),
    Open(Open),
    Stranded(Stranded),
    Over,
}

/// A request whose tunnel ended before anything of it was written to the agent.
struct Stranded {
    job: Job,
    /// Another tunnel, when one is free.
    granted: Pin<Box<dyn Future<Output = Result<Grant, Gone>> + Send>>,
}

/// A tunnel that is lent and carries no request.
struct Unused {
    tunnel: Lent,
    request: Body,
    first: BytesMut,
    /// The asker has been asked to give it back.
    told: bool,
}

enum Lent {
    /// For the first request.
    Grant(Held),
    /// For another one.
    Loan(TunnelLease),
}

/// A tunnel that stays as it is until the asker has begun its request or has given the ask back: a drain
/// notice in between would end what the asker has already sent.
struct Held {
    tunnel: Arc<Tunnel>,
    grant: Option<Grant>,
}

impl Held {
    fn new(grant: Grant) -> Self {
        let tunnel = Arc::clone(grant.tunnel());
        tunnel.reserve();
        Self { tunnel, grant: Some(grant) }
    }

    fn take(mut self) -> Arc<Tunnel> {
        // What is begun is counted by the registry from now on.
        drop(self.grant.take().map(Grant::take));
        Arc::clone(&self.tunnel)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if self.grant.is_some() {
            self.tunnel.cancel_reservation();
            // And the grant frees it.
        }
    }
}

impl Lent {
    fn tunnel(&self) -> &Arc<Tunnel> {
        match self {
            Self::Grant(held) => &held.tunnel,
            Self::Loan(loan) => loan.tunnel(),
        }
    }

    fn take(self) -> Arc<Tunnel> {
        match self {
            Self::Grant(held) => held.take(),
            Self::Loan(loan) => loan.take(),
        }
    }

    fn poll_recalled(&self, cx: &Context<'_>) -> Poll<()> {
        match self {
            Self::Grant(_) => Poll::Pending,
            Self::Loan(loan) => loan.poll_revoked(cx),
        }
    }
}

/// A request that runs through a tunnel of this replica for another one.
struct Open {
    splice: Splice,
    metrics: Arc<RequestMetrics>,
    /// Until its end is known.
    span: Option<Span>,
}

impl Open {
    /// Notes what the stream says next.
    fn look(&mut self, said: &Result<Frame<Bytes>, BoxError>) {
        let code = match said {
            Err(_) => Code::Unknown,
            Ok(frame) => match frame.trailers_ref().and_then(Status::from_headers) {
                Some(status) => status.code(),
                None => return,
            },
        };
        self.end(code);
    }

    fn end(&mut self, code: Code) {
        if let Some(mut span) = self.span.take() {
            span.set("rpc.grpc.status_code", i64::from(code.number()));
            if code != Code::Ok {
                span.failed(code.name());
            }
        }
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.end(Code::Cancelled);
        self.metrics.requests_open.dec();
    }
}

/// Makes the span of a request that runs through a tunnel of this replica for another one.
struct Traced {
    tracer: Tracer,
    from: ReplicaId,
}

impl Traced {
    /// Begins it below the span that the request's own metadata names: an ask may carry several requests. The
    /// agent is told of that span and not of this one, since what the other replica wrote passes as it is.
    fn begin(&self, agent: AgentId, request_info: &Bytes) -> Span {
        let message = request_info.slice(request_info.len().min(grpc::PREFIX_LEN)..);
        let info = match ConnectResponse::decode(message).map(|message| message.msg) {
            Ok(Some(connect_response::Msg::RequestInfo(info))) => info,
            // The agent's end says what is wrong with it.
            _ => RequestInfo::default(),
        };
        let mut headers = HeaderMap::new();
        let keep = |key: &str| {
            [&traces::TRACEPARENT, &traces::TRACESTATE, &grpc::CORRELATION_ID].iter().any(|k| *k == key)
        };
        meta::read_map(&info.meta, Binary::Base64, keep, &mut headers);
        let mut span = self.tracer.begin(peer::BORROW.trim_start_matches('/'), Kind::Server, &headers);
        if span.is_recording() {
            span.set("rpc.system", "grpc");
            span.set("kas.agent.id", agent.get());
            span.set("kas.agent.method", info.method_name);
            span.set("kas.from.replica", self.from.as_str().to_owned());
            if let Some(id) = headers.get(grpc::CORRELATION_ID).and_then(|id| id.to_str().ok()) {
                span.set("gitlab.correlation_id", id.to_owned());
            }
        }
        span
    }
}

impl LendBody {
    fn new(
        wish: Wish,
        grant: Grant,
        request: Body,
        lending: Option<Arc<Lending>>,
        metrics: Arc<RequestMetrics>,
    ) -> Self {
        let (tunnel, first) = (Lent::Grant(Held::new(grant)), BytesMut::new());
        Self {
            wish,
            state: State::Unused(Unused { tunnel, request, first, told: false }),
            until: Box::pin(tokio::time::sleep(UNUSED)),
            lending,
            metrics,
            traced: None,
        }
    }

    fn not_started(&mut self, code: Code, why: &str) -> Frame<Bytes> {
        self.state = State::Over;
        let mut trailers = HeaderMap::with_capacity(3);
        Status::new(code, format!("{why}: no request of agent {} was started", self.wish.agent))
            .with_outcome(Outcome::NotStarted)
            .write_to(&mut trailers);
        Frame::trailers(trailers)
    }

    /// Reads until the first envelope is complete, then begins the request.
    fn poll_unused(&mut self, cx: &mut Context<'_>) -> Poll<Option<Frame<Bytes>>> {
        let State::Unused(unused) = &mut self.state else { return Poll::Ready(None) };
        loop {
            match first_envelope(&unused.first) {
                Ok(Some(len)) => return Poll::Ready(self.begin(len)),
                Ok(None) => {}
                Err(why) => return Poll::Ready(Some(self.not_started(Code::Internal, why))),
            }
            match Pin::new(&mut unused.request).poll_frame(cx) {
                Poll::Ready(Some(Ok(frame))) => {
                    if let Ok(data) = frame.into_data() {
                        unused.first.extend_from_slice(&data);
                    }
                }
                Poll::Ready(_) => {
                    let given_back = matches!(unused.tunnel, Lent::Loan(_))
                        && unused.first.is_empty()
                        && unused.request.is_end_stream();
                    if !given_back {
                        let why = "the ask was taken back";
                        return Poll::Ready(Some(self.not_started(Code::Unavailable, why)));
                    }
                    self.state = State::Over;
                    let mut trailers = HeaderMap::with_capacity(1);
                    Status::write_ok(&mut trailers);
                    return Poll::Ready(Some(Frame::trailers(trailers)));
                }
                Poll::Pending => break,
            }
        }
        let mut recalled = false;
        if unused.tunnel.tunnel().poll_over(cx).is_ready() {
            match &unused.tunnel {
                // The request is on its way: any other tunnel will do. With none, the asker goes elsewhere if
                // it has not begun either.
                Lent::Grant(_) => match self.wish.idle() {
                    Some(grant) => {
                        unused.tunnel = Lent::Grant(Held::new(grant));
                        self.metrics.borrows_moved.inc();
                        return self.poll_unused(cx);
                    }
                    None => return Poll::Ready(Some(self.not_started(Code::Unavailable, ENDED))),
                },
                // Asked for as any other loan: a request that crosses that goes to another tunnel.
                Lent::Loan(_) if self.wish.registry.may_serve(self.wish.agent) => recalled = true,
                Lent::Loan(_) => return Poll::Ready(Some(self.not_started(Code::Unavailable, ENDED))),
            }
        }
        if !unused.told && (recalled || unused.tunnel.poll_recalled(cx).is_ready()) {
            unused.told = true;
            // It may cross a request, which is then served.
            let mut recall = BytesMut::new();
            frame::put_control(frame::request::TRAILER, &[], &mut recall);
            return Poll::Ready(Some(Frame::data(recall.freeze())));
        }
        ready!(self.until.as_mut().poll(cx));
        let why = "the lent tunnel was not used for 2 s";
        Poll::Ready(Some(self.not_started(Code::Unavailable, why)))
    }

    fn begin(&mut self, len: usize) -> Option<Frame<Bytes>> {
        let State::Unused(unused) = std::mem::replace(&mut self.state, State::Over) else { return None };
        let Unused { tunnel, request, mut first, .. } = unused;
        let request_info = first.split_to(len).freeze();
        let job = Job::spliced(request_info, first.freeze(), request);
        match self.start(&tunnel.take(), job) {
            Ok(()) => None,
            Err(job) => self.strand(job),
        }
    }

    /// Gives a tunnel the request; `Err`: it takes none any more.
    fn start(&mut self, tunnel: &Arc<Tunnel>, job: Job) -> Result<(), Job> {
        let lender = self.lending.clone().map(|lending| lending as Arc<dyn Lender>);
        // A request that finds its tunnel ended has a span for each tunnel.
        let span = self.traced.as_ref().map(|traced| traced.begin(self.wish.agent, job.request_info()));
        let splice = tunnel.begin_spliced(job, lender)?;
        self.metrics.requests_open.inc();
        self.state = State::Open(Open { splice, metrics: Arc::clone(&self.metrics), span });
        Ok(())
    }

    /// The tunnel has ended before anything of the request was written: another one of this replica may serve
    /// it. The asker cannot send it elsewhere: what it has written it does not keep.
    fn strand(&mut self, mut job: Job) -> Option<Frame<Bytes>> {
        loop {
            match self.wish.acquire() {
                Some(Acquired::Now(grant)) => match self.start(&grant.take(), job) {
                    Ok(()) => {
                        self.metrics.borrows_moved.inc();
                        return None;
                    }
                    // That one had ended as well, and is idle no more.
                    Err(back) => job = back,
                },
                Some(Acquired::Wait(mut waiting)) => {
                    self.until.as_mut().reset(Instant::now() + UNUSED);
                    let granted = Box::pin(async move { waiting.granted().await });
                    self.state = State::Stranded(Stranded { job, granted });
                    return None;
                }
                None => return Some(self.not_started(Code::Unavailable, ENDED)),
            }
        }
    }

    /// Waits until another tunnel is free for the request.
    fn poll_stranded(&mut self, cx: &mut Context<'_>) -> Poll<Option<Frame<Bytes>>> {
        let State::Stranded(stranded) = &mut self.state else { return Poll::Ready(None) };
        let Poll::Ready(granted) = stranded.granted.as_mut().poll(cx) else {
            ready!(self.until.as_mut().poll(cx));
            let why = "the lent tunnel has ended, and no other was idle for 2 s";
            return Poll::Ready(Some(self.not_started(Code::Unavailable, why)));
        };
        let State::Stranded(Stranded { job, .. }) = std::mem::replace(&mut self.state, State::Over) else {
            return Poll::Ready(None);
        };
        Poll::Ready(match granted.ok().filter(|grant| self.wish.fits(grant)) {
            Some(grant) => match self.start(&grant.take(), job) {
                Ok(()) => {
                    self.metrics.borrows_moved.inc();
                    None
                }
                Err(job) => self.strand(job),
            },
            None => Some(self.not_started(Code::Unavailable, ENDED)),
        })
    }

    /// The splice had no last word: its request was not started, or is over and the asker keeps the tunnel
    /// for the next.
    fn go_on(&mut self) -> Option<Frame<Bytes>> {
        let State::Open(open) = &mut self.state else { return None };
        if let Some(job) = open.splice.unstarted() {
            open.end(Code::Unavailable);
            self.state = State::Over;
            return self.strand(job);
        }
        self.lend_again();
        None
    }

    /// The request is over and had no last word: the asker keeps the tunnel for the next one.
    fn lend_again(&mut self) {
        let State::Open(mut open) = std::mem::replace(&mut self.state, State::Over) else { return };
        open.end(Code::Ok);
        let loan = self.lending.as_ref().and_then(|lending| lending.loan());
        if let (Some(loan), Some(request)) = (loan, open.splice.next_request()) {
            self.until.as_mut().reset(Instant::now() + UNUSED);
            let first = BytesMut::new();
            self.state = State::Unused(Unused { tunnel: Lent::Loan(loan), request, first, told: false });
        }
    }
}

/// Returns the length of the first envelope once it is complete.
fn first_envelope(bytes: &[u8]) -> Result<Option<usize>, &'static str> {
    let Some((prefix, rest)) = bytes.split_at_checked(grpc::PREFIX_LEN) else { return Ok(None) };
    let len = u32::from_be_bytes([prefix[1], prefix[2], prefix[3], prefix[4]]) as usize;
    if prefix[0] != 0 || len > frame::MAX_CONTROL + 16 {
        return Err("the first envelope is compressed or too large");
    }
    if rest.first().is_some_and(|tag| *tag != (frame::response::REQUEST_INFO as u8) << 3 | 2) {
        return Err("the first envelope is no request_info");
    }
    Ok((rest.len() >= len).then_some(grpc::PREFIX_LEN + len))
}

impl http_body::Body for LendBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        loop {
            match &mut self.state {
                State::Unused(_) => {
                    if let Some(frame) = ready!(self.poll_unused(cx)) {
                        return Poll::Ready(Some(Ok(frame)));
                    }
                }
                State::Open(open) => {
                    let frame = ready!(Pin::new(&mut open.splice).poll_frame(cx));
                    match frame {
                        Some(frame) => {
                            open.look(&frame);
                            return Poll::Ready(Some(frame));
                        }
                        None => {
                            if let Some(frame) = self.go_on() {
                                return Poll::Ready(Some(Ok(frame)));
                            }
                        }
                    }
                }
                State::Stranded(_) => {
                    if let Some(frame) = ready!(self.poll_stranded(cx)) {
                        return Poll::Ready(Some(Ok(frame)));
                    }
                }
                State::Over => return Poll::Ready(None),
            }
        }
    }
}

#[cfg(test)]
mod loans;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn asks_are_read_and_those_that_went_too_far_are_refused() {
        let ask = |pairs: &[(&http::HeaderName, &'static str)]| {
            let mut headers = HeaderMap::new();
            for (key, value) in pairs {
                headers.insert((*key).clone(), HeaderValue::from_static(value));
            }
            Ask::read(&headers).map_err(|status| status.message().to_owned())
        };
        let good = [
            (&peer::FORWARDED, "1"),
            (&peer::FROM, "10.0.0.1:8155"),
            (&peer::AGENT, "3"),
            (&peer::METHOD, "/s/M"),
        ];
        let read = ask(&good).unwrap();
        assert_eq!((read.agent.get(), read.connection, &*read.method), (3, None, "/s/M"));
        for n in 0..good.len() {
            let mut missing = good.to_vec();
            missing.remove(n);
            assert!(ask(&missing).is_err_and(|text| text.contains("is missing")), "{n}");
        }
        let mut twice = good;
        twice[0].1 = "2";
        assert!(ask(&twice).is_err_and(|text| text.contains("at most two replicas")));
        let mut wrong = good.to_vec();
        let connection = peer::CONNECTION;
        wrong.push((&connection, "0"));
        assert!(ask(&wrong).is_err_and(|text| text.starts_with("kas-hop-connection:")));
    }

    #[test]
    fn the_first_envelope_is_found_at_every_split() {
        let mut bytes = BytesMut::new();
        frame::put_control(frame::response::REQUEST_INFO, b"info", &mut bytes);
        let len = bytes.len();
        frame::put_message_head(frame::response::MESSAGE, 3, &mut bytes);
        for end in 0..bytes.len() {
            let expected = (end >= len).then_some(len);
            assert_eq!(first_envelope(&bytes[..end]), Ok(expected), "{end}");
        }
        assert!(first_envelope(&bytes[len..]).is_err(), "a message cannot come first");
        assert!(first_envelope(&[1, 0, 0, 0, 1]).is_err() && first_envelope(&[0, 0xff, 0, 0, 0]).is_err());
    }
}
