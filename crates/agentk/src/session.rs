//! A session: one transport connection to kas, with a configuration stream and a pool of tunnels.

use std::{
    sync::{Arc, OnceLock},
    time::Duration,
};

use bytes::Bytes;
use grpc::{Code, MessageReader, Status};
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode, Uri, header};
use hyper::body::Incoming;
use prost::Message as _;
use proto::gitlab::agent::{
    agent_configuration::rpc::{ConfigurationRequest, ConfigurationResponse},
    modshared::AgentMeta,
    reverse_tunnel::info::AgentDescriptor,
};
use tokio::{
    sync::{Notify, watch},
    time::Instant,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tunnel::{
    IMPERSONATES_HEADER, INSTANCE_HEADER, MAX_IDLE_HEADER, REUSE, SOCKET_HEADER, TARGET_HEADER,
    TUNNEL_HEADER, UPGRADES_HEADER,
    agent_end::{self, Handler},
};

use crate::{
    calls::{Calls, Lent, Opener},
    dial::{self, KasHeaders, Link},
    metrics::{ConnectionState, Metrics},
    module::Pushed,
    pool::Pool,
    refusals::RefusalLog,
    replica::{Replica, ReplicaInfo},
    token::TokenFile,
};

pub(crate) const CONNECT: &str = "/gitlab.agent.reverse_tunnel.rpc.ReverseTunnel/Connect";
pub(crate) const GET_CONFIGURATION: &str =
    "/gitlab.agent.agent_configuration.rpc.AgentConfiguration/GetConfiguration";
/// The largest configuration that is accepted, in bytes.
const MAX_CONFIGURATION: usize = 4 << 20;
/// The largest message of an answer to a call of a module, in bytes. Manifests come in parts of 128 KiB.
const MAX_CALL_MESSAGE: usize = 1 << 20;
/// A configuration stream that lasted less than this is reopened after about this time.
const BRIEF: Duration = Duration::from_secs(1);
/// After a drain notice, the tunnels are half-closed at most this much later, even if no other session serves
/// yet.
const REPLACE: Duration = Duration::from_secs(3);
/// How long open requests of a session that ends may continue.
const DRAIN: Duration = Duration::from_secs(24 * 3600);
/// How long the last frames of the last stream may take to be written.
const FLUSH: Duration = Duration::from_millis(500);
/// The interval between two calls of [`Pool::tick`].
const TICK: Duration = Duration::from_secs(5);
/// The first and the longest pause before another tunnel is opened after kas did not accept one.
const TUNNEL_BACKOFF: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(10));
/// A kas of this project sends response headers immediately. One that has sent none within this time is
/// treated as one that does not name itself. If the time is too short, an overloaded kas is given up; if it
/// is too long, the search for another replica starts late.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// If there are several addresses, one that has not answered at all within this time is left for the next. A
/// kas of GitLab answers the configuration stream only after it has called GitLab, which may take seconds.
const SILENCE: Duration = Duration::from_secs(15);

/// What all sessions of the process share.
pub struct SessionContext {
    /// Serves the requests.
    pub handler: Arc<dyn Handler>,
    /// The services that are served.
    pub descriptor: AgentDescriptor,
    /// The agent token.
    pub token: TokenFile,
    /// A random name of this process.
    pub instance: HeaderValue,
    /// What the agent tells kas about itself.
    pub meta: AgentMeta,
    /// The metrics.
    pub metrics: Arc<Metrics>,
    /// The most tunnels of one session.
    pub max_tunnels: usize,
    /// The last configuration that kas pushed, for the modules.
    pub pushed: watch::Sender<Pushed>,
    /// Gets the connections on which modules may call kas.
    pub calls: Arc<Calls>,
}

impl std::fmt::Debug for SessionContext {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SessionContext").field("meta", &self.meta).finish_non_exhaustive()
    }
}

/// How a session starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Begin {
    /// It opens its tunnels immediately, because no other session serves. (A kas of GitLab sends no headers
    /// before its first message, so waiting for them would take long.)
    Tunnels,
    /// It opens only the configuration stream, which tells the replica it ends at, until it is
    /// [admitted](Commands::admit).
    Asking,
}

/// The stage of a session. Each stage leads to those below it.
#[derive(Debug, Clone, PartialEq)]
pub enum Stage {
    /// It waits to learn which replica this is. It opens no tunnel until it is admitted.
    Asking,
    /// It is connected and opens its first tunnels.
    Opening,
    /// Requests can arrive.
    Serving,
    /// kas wants the agent to connect to another replica: start another session now.
    Retiring,
    /// It has ended; with a status if kas rejected the agent.
    Ended(Option<Status>),
}

impl Stage {
    fn state(&self) -> Option<ConnectionState> {
        match self {
            Self::Asking => Some(ConnectionState::Asking),
            Self::Opening => Some(ConnectionState::Opening),
            Self::Serving => Some(ConnectionState::Serving),
            Self::Retiring => Some(ConnectionState::Leaving),
            Self::Ended(_) => None,
        }
    }
}

/// The status of a session.
#[derive(Debug, Clone, PartialEq)]
pub struct SessionStatus {
    /// Its stage.
    pub stage: Stage,
    /// What the headers of its last stream said about the replica. `None`: no headers have come yet.
    pub answer: Option<ReplicaInfo>,
    /// The replicas that its tunnels end at: one, unless a load balancer distributes the streams of a
    /// connection.
    pub replicas: Vec<Replica>,
    /// The replica that asked the agent to connect to another one.
    pub drained_by: Option<Replica>,
}

/// What the supervisor tells a session.
#[derive(Debug, Clone, Default)]
pub struct Commands {
    /// A session in [`Stage::Asking`] may open its tunnels.
    pub admit: CancellationToken,
    /// The session is not needed: it closes idle tunnels, and busy ones after their request.
    pub close: CancellationToken,
    /// Another session serves instead of this one, which is retiring: it need not wait any longer.
    pub replaced: CancellationToken,
    /// Open one more tunnel: its headers tell how many replicas there are now. The pool closes it again
    /// later.
    pub ask: Arc<Notify>,
}

/// A running session.
#[derive(Debug)]
pub struct Session {
    /// Its status.
    pub status: watch::Receiver<SessionStatus>,
    /// Its commands.
    pub commands: Commands,
    /// The address it is connected to.
    pub peer: Option<std::net::SocketAddr>,
    /// Whether kas answers there; empty until that is known.
    pub reachability: Arc<OnceLock<Reachability>>,
}

/// Whether kas can be reached over a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reachability {
    /// kas answered, possibly with an error status.
    Reachable,
    /// A proxy that does not pass gRPC may be in between; with the reason.
    Blocked(String),
}

/// Starts a session on a connection. `changed` is notified whenever its status changes. With `trial` there is
/// another address, and the session ends if something other than kas answers, or nothing does.
pub fn start(
    context: Arc<SessionContext>,
    link: Link,
    begin: Begin,
    trial: bool,
    changed: Arc<Notify>,
    leave: CancellationToken,
    tasks: &TaskTracker,
) -> Session {
    let stage = match begin {
        Begin::Tunnels => Stage::Opening,
        Begin::Asking => Stage::Asking,
    };
    context.metrics.connection(None, stage.state());
    let (sender, status) =
        watch::channel(SessionStatus { stage, answer: None, replicas: Vec::new(), drained_by: None });
    let commands = Commands::default();
    let reachability = Arc::<OnceLock<Reachability>>::default();
    let session = Session {
        status,
        commands: commands.clone(),
        peer: link.peer,
        reachability: Arc::clone(&reachability),
    };
    let report = Report {
        status: sender,
        changed,
        metrics: Arc::clone(&context.metrics),
        reachability,
        refusals: Arc::default(),
    };
    tasks.spawn(Run { context, link, report, commands, trial, streams: TaskTracker::new() }.run(leave));
    session
}

/// Reports the status of a session.
#[derive(Debug, Clone)]
struct Report {
    status: watch::Sender<SessionStatus>,
    changed: Arc<Notify>,
    metrics: Arc<Metrics>,
    reachability: Arc<OnceLock<Reachability>>,
    refusals: Arc<RefusalLog>,
}

impl Report {
    /// Records that kas refused a stream by a limit.
    fn limited(&self, status: &Status) {
        self.metrics.streams_refused.inc();
        if let Some(refused) = self.refusals.record() {
            tracing::warn!(
                error = %status,
                refused,
                "kas refuses streams of this agent by its limit: requests wait in kas or fail there; raise \
                 agent.listen.connections_per_token_per_minute of that kas (GitLab's counts each request), or replace it \
                 with a kas that accepts reusable tunnels"
            );
        }
    }

    /// Sets the reachability, if it is not known yet.
    fn reachability(&self, reachability: impl FnOnce() -> Reachability) {
        if self.reachability.get().is_none() && self.reachability.set(reachability()).is_ok() {
            self.changed.notify_one();
        }
    }

    fn is_blocked(&self) -> bool {
        matches!(self.reachability.get(), Some(Reachability::Blocked(_)))
    }

    fn modify(&self, change: impl FnOnce(&mut SessionStatus)) {
        let changed = self.status.send_if_modified(|status| {
            let before = status.clone();
            change(status);
            *status != before
        });
        if changed {
            self.changed.notify_one();
        }
    }

    fn stage(&self, stage: Stage) {
        self.metrics.connection(self.status.borrow().stage.state(), stage.state());
        self.modify(|status| status.stage = stage);
    }

    /// Whether no headers have come yet.
    fn is_silent(&self) -> bool {
        self.status.borrow().answer.is_none()
    }

    /// Whether kas has named itself.
    fn is_named(&self) -> bool {
        self.status.borrow().answer.as_ref().is_some_and(|answer| answer.replica.is_some())
    }

    fn is(&self, stage: &Stage) -> bool {
        self.status.borrow().stage == *stage
    }

    /// Records the information of response headers. Those of a rejected call without a name say nothing: kas
    /// names itself only when it accepts.
    fn record(&self, answer: ReplicaInfo, rejected: bool) {
        let told = answer.replica.is_some();
        self.modify(|status| {
            if told || (status.answer.is_none() && !rejected) {
                status.answer = Some(answer);
            }
        });
    }
}

struct Run {
    context: Arc<SessionContext>,
    link: Link,
    report: Report,
    commands: Commands,
    /// Whether there is another address.
    trial: bool,
    streams: TaskTracker,
}

/// How a configuration stream ended.
enum ConfigurationEnd {
    /// Open it again.
    Again,
    /// kas rejected it.
    Rejected(Status),
    /// The connection is broken.
    Broken,
}

impl Run {
    async fn run(mut self, leave: CancellationToken) {
        let pool = Pool::new(Arc::clone(&self.context.metrics), self.context.max_tunnels);
        let end = self.serve(&pool, &leave).await;
        // No request can have started if the address does not lead to kas.
        let blocked = matches!(end, End::Blocked);
        // Open requests continue as long as the connection does. No tunnel is opened any more.
        pool.close();
        let over = match end {
            End::Rejected(status) => Some(status),
            End::Blocked => {
                // The supervisor logs this, with the next address.
                self.context.metrics.connect_failures.inc();
                None
            }
            End::Unanswered if self.report.is(&Stage::Asking) => None,
            End::Unanswered => {
                self.context.metrics.connect_failures.inc();
                tracing::warn!(
                    kas = %self.link.authority,
                    "the connection was closed before kas answered: check that --kas-address is the address of its agent listener"
                );
                None
            }
            End::Retired => {
                self.report.stage(Stage::Retiring);
                let until = Instant::now() + REPLACE;
                loop {
                    // GOAWAY may arrive before the drain notice.
                    self.report.modify(|status| status.drained_by = pool.drained_by());
                    tokio::select! {
                        () = self.commands.replaced.cancelled() => break,
                        () = tokio::time::sleep_until(until) => break,
                        () = leave.cancelled() => break,
                        () = pool.changed() => {}
                    }
                }
                pool.half_close_all();
                None
            }
            End::Left | End::Closed => {
                self.report.stage(Stage::Retiring);
                pool.withdraw_all();
                None
            }
        };
        if over.is_none() && !blocked {
            let until = Instant::now() + DRAIN;
            while !pool.is_empty() && Instant::now() < until {
                tokio::select! {
                    () = pool.changed() => {}
                    () = tokio::time::sleep_until(until) => {}
                }
            }
            // The last frames of the last streams.
            tokio::time::sleep(FLUSH).await;
        }
        self.link.driver.abort();
        drop(self.link);
        self.streams.close();
        self.report.stage(Stage::Ended(over));
    }

    /// Maintains the configuration stream and the pool until the session has to end.
    async fn serve(&mut self, pool: &Arc<Pool>, leave: &CancellationToken) -> End {
        let mut configuration = Box::pin(self.configuration());
        let mut asking = self.report.is(&Stage::Asking);
        let mut lent = (!asking).then(|| self.lend());
        // kas is taken for one that does not name itself, although it has not answered.
        let mut given_up = false;
        let answer_by = Instant::now() + ANSWER_TIMEOUT;
        let silent_by = Instant::now() + SILENCE;
        let mut ticks = tokio::time::interval(TICK);
        let mut backoff = TUNNEL_BACKOFF.0;
        let mut not_before = Instant::now();
        let mut configuration_after = None;
        let mut configuration_since = Instant::now();
        loop {
            let wants = pool.wants();
            if wants.drained {
                return End::Retired;
            }
            if wants.failed > 0 {
                not_before = Instant::now() + backoff.mul_f64(rand::random());
                backoff = (backoff * 2).min(TUNNEL_BACKOFF.1);
            }
            self.report.modify(|status| status.replicas = pool.replicas());
            if pool.is_serving() {
                backoff = TUNNEL_BACKOFF.0;
                if self.report.is(&Stage::Opening) {
                    self.report.stage(Stage::Serving);
                    if let Some(lent) = &lent {
                        lent.serves();
                    }
                }
            }
            let open = if asking { 0 } else { wants.open };
            let wait = open > 0 && Instant::now() < not_before;
            if open > 0 && !wait {
                for _ in 0..open {
                    if let Err(end) = self.open(pool) {
                        return end;
                    }
                }
                continue;
            }
            tokio::select! {
                () = pool.changed() => {}
                () = tokio::time::sleep_until(not_before), if wait => {}
                _ = ticks.tick() => {
                    if !self.report.is_named() {
                        pool.unnamed(!given_up && !self.report.is_silent());
                    }
                    pool.tick();
                }
                () = leave.cancelled() => return End::Left,
                () = self.commands.close.cancelled() => return End::Closed,
                () = self.commands.admit.cancelled(), if asking => {
                    asking = false;
                    lent = Some(self.lend());
                    self.report.stage(Stage::Opening);
                }
                () = tokio::time::sleep_until(silent_by), if self.trial && self.report.reachability.get().is_none() => {
                    self.report.reachability(|| Reachability::Blocked(format!("no answer within {SILENCE:?}")));
                    return End::Blocked;
                }
                () = tokio::time::sleep_until(answer_by), if asking && self.report.is_silent() => {
                    given_up = true;
                    self.report.record(ReplicaInfo::unnamed(), false);
                }
                () = self.commands.ask.notified(), if !asking => {
                    if pool.has_room() && let Err(end) = self.open(pool) {
                        return end;
                    }
                }
                // The connection broke, or takes no new streams. In both cases another one is needed.
                _ = &mut self.link.driver => {
                    let begins = asking || self.report.is(&Stage::Opening);
                    self.report.reachability(|| {
                        Reachability::Blocked("the connection was closed before any answer".to_owned())
                    });
                    return match begins {
                        true if self.trial && self.report.is_blocked() => End::Blocked,
                        true => End::Unanswered,
                        false => End::Retired,
                    };
                }
                end = &mut configuration, if configuration_after.is_none() => match end {
                    _ if self.trial && self.report.is_blocked() => return End::Blocked,
                    ConfigurationEnd::Again => {
                        // After GOAWAY this connection takes no more streams.
                        if self.link.sender.ready().await.is_err() {
                            return End::Retired;
                        }
                        // A stream that ended immediately is not reopened immediately.
                        let pause = if configuration_since.elapsed() < BRIEF {
                            BRIEF.mul_f64(0.5 + rand::random::<f64>())
                        } else {
                            Duration::ZERO
                        };
                        configuration_after = Some(Instant::now() + pause);
                    }
                    ConfigurationEnd::Broken => {
                        if self.link.sender.ready().await.is_err() {
                            return End::Retired;
                        }
                        configuration_after = Some(Instant::now() + Duration::from_secs(1));
                    }
                    ConfigurationEnd::Rejected(status) if is_rejection(&status) => return End::Rejected(status),
                    ConfigurationEnd::Rejected(status) => {
                        if status.code() == Code::ResourceExhausted {
                            self.report.limited(&status);
                        } else {
                            tracing::warn!(error = %status, "kas sent no configuration; tunnels are not affected");
                        }
                        configuration_after = Some(Instant::now() + Duration::from_secs(10));
                    }
                },
                () = at(configuration_after), if configuration_after.is_some() => {
                    configuration_after = None;
                    configuration_since = Instant::now();
                    configuration = Box::pin(self.configuration());
                }
            }
        }
    }

    fn configuration(&self) -> impl Future<Output = ConfigurationEnd> + use<> {
        let sender = self.link.sender.clone();
        configuration(Arc::clone(&self.context), self.request_parts(), self.report.clone(), sender)
    }

    fn request_parts(&self) -> RequestParts {
        RequestParts::of(&self.link)
    }

    /// Lets modules call kas on the connection until the result is dropped.
    fn lend(&self) -> Lent {
        let (context, parts) = (Arc::clone(&self.context), Arc::new(self.request_parts()));
        let sender = self.link.sender.clone();
        let opener: Opener = Arc::new(move |method, message| {
            Box::pin(call(Arc::clone(&context), Arc::clone(&parts), sender.clone(), method, message))
        });
        self.context.calls.lend(opener)
    }

    /// Opens one tunnel.
    fn open(&mut self, pool: &Arc<Pool>) -> Result<(), End> {
        let mut request =
            match self.request_parts().request(&self.context.token, &self.context.instance, CONNECT) {
                Ok(request) => request,
                Err(error) => {
                    return Err(End::Rejected(Status::new(Code::Unauthenticated, format!("{error:#}"))));
                }
            };
        request.headers_mut().insert(TUNNEL_HEADER, REUSE);
        for feature in [IMPERSONATES_HEADER, TARGET_HEADER, UPGRADES_HEADER] {
            request.headers_mut().insert(feature, HeaderValue::from_static("1"));
        }
        let (observer, serial) = pool.begin();
        let (body, control) =
            agent_end::open(&self.context.descriptor, Arc::clone(&self.context.handler), observer);
        pool.control(serial, control.clone());
        let pool = Arc::clone(pool);
        let report = self.report.clone();
        let answer = self.link.sender.send_request(request.map(|()| grpc::boxed(body)));
        self.streams.spawn(async move {
            match answer.await {
                Ok(response) => match rejection(&response, &report) {
                    None => {
                        let reusable = response.headers().get(TUNNEL_HEADER) == Some(&REUSE);
                        let said = ReplicaInfo::from_headers(response.headers());
                        pool.answered(serial, said.replica.clone(), max_idle(&response), reusable);
                        report.record(said, false);
                        let gzip =
                            response.headers().get("grpc-encoding").is_some_and(|value| value == "gzip");
                        control.accepted(grpc::boxed(response.into_body()), reusable, gzip);
                    }
                    Some(status) => {
                        match status.code() {
                            Code::Ok => pool.ended_unused(serial),
                            Code::ResourceExhausted => report.limited(&status),
                            _ => {}
                        }
                        tracing::debug!(error = %status, "kas did not accept a tunnel");
                        control.failed();
                    }
                },
                Err(error) => {
                    tracing::debug!(error = %error, "a tunnel could not be opened");
                    control.failed();
                }
            }
        });
        Ok(())
    }
}

/// Opens a call of a module.
async fn call(
    context: Arc<SessionContext>,
    parts: Arc<RequestParts>,
    mut sender: hyper::client::conn::http2::SendRequest<grpc::Body>,
    method: &'static str,
    message: Bytes,
) -> Result<MessageReader<grpc::Body>, Status> {
    let request = parts.request(&context.token, &context.instance, method);
    let mut request = request.map_err(|error| Status::new(Code::Unauthenticated, format!("{error:#}")))?;
    request.headers_mut().insert("grpc-accept-encoding", HeaderValue::from_static("gzip"));
    let response = sender.send_request(request.map(|()| grpc::full(message))).await;
    let response = response.map_err(|error| {
        Status::new(
            Code::Unavailable,
            format!("the connection to kas broke: {}", process::error::chain(&error)),
        )
    })?;
    if let Some(text) = describe_non_grpc(&response) {
        return Err(Status::new(Code::Unavailable, text));
    }
    if let Some(status) = Status::from_headers(response.headers()) {
        return Err(status);
    }
    let gzip = response.headers().get("grpc-encoding").is_some_and(|value| value == "gzip");
    Ok(MessageReader::new(grpc::boxed(response.into_body()), MAX_CALL_MESSAGE).with_gzip(gzip))
}

enum End {
    /// kas rejected the agent.
    Rejected(Status),
    /// kas wants the agent to connect to another replica, or the connection takes no new streams.
    Retired,
    /// The connection ended before anything was answered.
    Unanswered,
    /// Something other than kas answers, and there is another address.
    Blocked,
    /// This process is shutting down.
    Left,
    /// The session is not needed.
    Closed,
}

async fn at(instant: Option<Instant>) {
    if let Some(instant) = instant {
        tokio::time::sleep_until(instant).await;
    }
}

/// Whether a status says that kas rejects this agent, and not that something went wrong.
fn is_rejection(status: &Status) -> bool {
    matches!(status.code(), Code::Unauthenticated | Code::PermissionDenied)
}

/// What all calls on a connection have in common.
pub(crate) struct RequestParts {
    scheme: http::uri::Scheme,
    authority: http::uri::Authority,
    headers: KasHeaders,
    local: Option<std::net::SocketAddr>,
}

impl RequestParts {
    /// Copies it from a connection.
    pub(crate) fn of(link: &Link) -> Self {
        Self {
            scheme: link.scheme.clone(),
            authority: link.authority.clone(),
            headers: link.headers.clone(),
            local: link.local,
        }
    }

    /// Creates the request of a call, without its body.
    pub(crate) fn request(
        &self,
        token: &TokenFile,
        instance: &HeaderValue,
        path: &'static str,
    ) -> anyhow::Result<Request<()>> {
        let mut uri = http::uri::Parts::default();
        uri.scheme = Some(self.scheme.clone());
        uri.authority = Some(self.authority.clone());
        uri.path_and_query = Some(http::uri::PathAndQuery::from_static(path));
        let mut request = Request::new(());
        *request.method_mut() = http::Method::POST;
        *request.uri_mut() = Uri::from_parts(uri)?;
        *request.version_mut() = http::Version::HTTP_2;
        let headers = request.headers_mut();
        self.headers.add_to(headers);
        headers.insert(header::AUTHORIZATION, token.authorization()?);
        headers.insert(header::CONTENT_TYPE, grpc::CONTENT_TYPE);
        headers.insert(header::TE, HeaderValue::from_static("trailers"));
        headers.insert(header::USER_AGENT, HeaderValue::from_static(dial::user_agent()));
        headers.insert(INSTANCE_HEADER, instance.clone());
        if let Some(local) = self.local.and_then(|local| HeaderValue::try_from(local.to_string()).ok()) {
            headers.insert(SOCKET_HEADER, local);
        }
        Ok(request)
    }
}

/// Returns the status of a response that has only a status, or that is not gRPC. Also records what the
/// response says about reachability.
fn rejection(response: &Response<Incoming>, report: &Report) -> Option<Status> {
    let Some(text) = describe_non_grpc(response) else {
        let status = Status::from_headers(response.headers());
        let blocked = status.as_ref().filter(|status| may_be_from_proxy(status, response.headers()));
        report.reachability(|| {
            blocked.map_or(Reachability::Reachable, |status| Reachability::Blocked(status.to_string()))
        });
        return status;
    };
    // Missing credentials would be missing on every route.
    if !dial::is_authentication(response.status()) && response.status() != StatusCode::TOO_MANY_REQUESTS {
        report.reachability(|| Reachability::Blocked(text.clone()));
    }
    Some(Status::new(Code::Unavailable, format!("{text}: check that this is the address of kas")))
}

/// Whether a status may come from a gRPC proxy that cannot reach kas. Every response of kas has a correlation
/// id.
pub(crate) fn may_be_from_proxy(status: &Status, headers: &HeaderMap) -> bool {
    let is_generic = matches!(
        status.code(),
        Code::Cancelled
            | Code::Unknown
            | Code::DeadlineExceeded
            | Code::Unimplemented
            | Code::Internal
            | Code::Unavailable
    );
    is_generic && !headers.contains_key(grpc::CORRELATION_ID)
}

/// Whether a status comes from a port of kas that is not for agents. Callers and replicas authenticate there
/// with a JWT, and an agent token is not one. A kas of GitLab returns the same status.
pub(crate) fn is_wrong_port(status: &Status) -> bool {
    status.code() == Code::Unauthenticated && status.message() == "JWT validation failed"
}

/// Describes a response that is not gRPC.
pub(crate) fn describe_non_grpc<B>(response: &Response<B>) -> Option<String> {
    if Status::from_headers(response.headers()).is_some() {
        return None;
    }
    let status = response.status();
    if !status.is_success() {
        return Some(format!("HTTP status {status}"));
    }
    let kind = response.headers().get(header::CONTENT_TYPE);
    let is_grpc = kind.is_some_and(|kind| kind.as_bytes().starts_with(grpc::CONTENT_TYPE.as_bytes()));
    let kind = kind.map_or("none".to_owned(), |kind| String::from_utf8_lossy(kind.as_bytes()).into_owned());
    (!is_grpc).then(|| format!("a response that is not gRPC (content-type: {kind:.80})"))
}

fn max_idle(response: &Response<Incoming>) -> Option<Duration> {
    let seconds = response.headers().get(MAX_IDLE_HEADER)?.to_str().ok()?.parse().ok()?;
    Some(Duration::from_secs(seconds))
}

/// Opens the configuration stream and publishes the configurations that arrive, until it ends.
async fn configuration(
    context: Arc<SessionContext>,
    parts: RequestParts,
    report: Report,
    mut sender: hyper::client::conn::http2::SendRequest<grpc::Body>,
) -> ConfigurationEnd {
    let message = ConfigurationRequest {
        commit_id: context.pushed.borrow().commit_id.clone(),
        agent_meta: Some(context.meta.clone()),
        skip_register: false,
    };
    let request = match parts.request(&context.token, &context.instance, GET_CONFIGURATION) {
        Ok(request) => request.map(|()| grpc::full(grpc::encode(&message))),
        Err(error) => {
            return ConfigurationEnd::Rejected(Status::new(Code::Unauthenticated, format!("{error:#}")));
        }
    };
    let response = match sender.send_request(request).await {
        Ok(response) => response,
        Err(error) => {
            tracing::debug!(error = %error, "the configuration stream could not be opened");
            report.reachability(|| Reachability::Blocked(format!("the first stream was reset: {error}")));
            return ConfigurationEnd::Broken;
        }
    };
    let rejected = rejection(&response, &report);
    report.record(ReplicaInfo::from_headers(response.headers()), rejected.is_some());
    if let Some(status) = rejected {
        return if status.code() == Code::Ok {
            ConfigurationEnd::Again
        } else {
            ConfigurationEnd::Rejected(status)
        };
    }
    let gzip = response.headers().get("grpc-encoding").is_some_and(|value| value == "gzip");
    let mut reader = MessageReader::new(response.into_body(), MAX_CONFIGURATION).with_gzip(gzip);
    loop {
        match reader.next().await {
            Ok(Some(message)) => match ConfigurationResponse::decode(message) {
                Ok(response) => {
                    tracing::info!(commit_id = response.commit_id, "configuration received");
                    context.pushed.send_modify(|pushed| {
                        pushed.commit_id = response.commit_id;
                        // A response without a configuration changes only the commit.
                        if let Some(configuration) = response.configuration {
                            pushed.configuration = Some(Arc::new(configuration));
                        }
                    });
                }
                Err(error) => {
                    tracing::warn!(error = %error, "the configuration cannot be decoded; the previous one stays in use")
                }
            },
            Ok(None) => {
                return match reader.trailers().and_then(Status::from_headers) {
                    // The token of this stream is no longer valid. The next call shows whether the one in the
                    // file is.
                    Some(status) if status.code() != Code::Ok && !is_rejection(&status) => {
                        ConfigurationEnd::Rejected(status)
                    }
                    _ => ConfigurationEnd::Again,
                };
            }
            Err(error) => {
                tracing::debug!(error = %error, "the configuration stream broke");
                return ConfigurationEnd::Broken;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_of_a_wrong_port_differs_from_that_of_a_rejected_token() {
        assert!(is_wrong_port(&Status::new(Code::Unauthenticated, "JWT validation failed")));
        assert!(!is_wrong_port(&Status::new(Code::Unauthenticated, "unauthenticated")));
        assert!(!is_wrong_port(&Status::new(Code::PermissionDenied, "JWT validation failed")));
    }
}
