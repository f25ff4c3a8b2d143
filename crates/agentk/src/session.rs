//! One transport connection to kas: a configuration stream and a pool of tunnels.

use std::{
    sync::{Arc, OnceLock},
    time::Duration,
};

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
    IMPERSONATES_HEADER, INSTANCE_HEADER, MAX_IDLE_HEADER, REUSE, SOCKET_HEADER, TUNNEL_HEADER,
    agent_end::{self, Handler},
};

use crate::{
    dial::{self, KasHeaders, Link},
    metrics::{ConnectionState, Metrics},
    pool::Pool,
    replica::{Answer, Replica},
    token::TokenFile,
};

pub(crate) const CONNECT: &str = "/gitlab.agent.reverse_tunnel.rpc.ReverseTunnel/Connect";
pub(crate) const GET_CONFIGURATION: &str =
    "/gitlab.agent.agent_configuration.rpc.AgentConfiguration/GetConfiguration";
/// The largest configuration that is accepted.
const MAX_CONFIGURATION: usize = 4 << 20;
/// A configuration stream that lasted less than this is opened again after about this time.
const BRIEF: Duration = Duration::from_secs(1);
/// After a drain notice the tunnels are half-closed at most this much later, replacement or not.
const REPLACE: Duration = Duration::from_secs(3);
/// Open requests of a session that ends go on for this long.
const LINGER: Duration = Duration::from_secs(24 * 3600);
/// After the last stream, time for its last frames to be written.
const FLUSH: Duration = Duration::from_millis(500);
/// How often the pool is looked at.
const TICK: Duration = Duration::from_secs(5);
/// First and longest pause before a tunnel is opened again that kas did not accept.
const TUNNEL_BACKOFF: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(10));
/// A kas of this project sends response headers at once; one that has sent none after this time is taken for one that
/// does not name itself. Shorter: one that is overloaded is given up; longer: another is looked for later.
pub const ANSWER: Duration = Duration::from_secs(5);

/// One of several addresses that has answered nothing at all within this time is left for the next. A kas of GitLab
/// answers the configuration stream once it has asked GitLab, which may take seconds.
const SILENT: Duration = Duration::from_secs(15);

/// What every session of the process has in common.
pub struct Shared {
    /// Serves requests.
    pub handler: Arc<dyn Handler>,
    /// What is served.
    pub descriptor: AgentDescriptor,
    /// The token.
    pub token: TokenFile,
    /// Random name of this process.
    pub instance: HeaderValue,
    /// What the agent says of itself.
    pub meta: AgentMeta,
    /// What is counted.
    pub metrics: Arc<Metrics>,
    /// The most tunnels of one session.
    pub max_tunnels: usize,
    /// The last configuration that was applied.
    pub applied: watch::Sender<String>,
    /// Applies a configuration.
    pub apply: Box<dyn Fn(&ConfigurationResponse) + Send + Sync>,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("meta", &self.meta).finish_non_exhaustive()
    }
}

/// How a session begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Begin {
    /// With its tunnels at once: a kas of GitLab sends no headers before its first message, and nobody else serves.
    Tunnels,
    /// With the configuration stream alone, which tells where it is, until it is [admitted](Orders::admit).
    Asking,
}

/// How far a session is: each stage leads to those below it.
#[derive(Debug, Clone, PartialEq)]
pub enum Stage {
    /// Learns which replica this is; it opens no tunnel until it is admitted.
    Asking,
    /// Connected, and no tunnel is there yet.
    Opening,
    /// Requests can come.
    Serving,
    /// kas wants the agent to go elsewhere: make another session now.
    Retiring,
    /// Nothing of it is left, or kas refused the agent.
    Over(Option<Status>),
}

impl Stage {
    fn state(&self) -> Option<ConnectionState> {
        match self {
            Self::Asking => Some(ConnectionState::Asking),
            Self::Opening => Some(ConnectionState::Opening),
            Self::Serving => Some(ConnectionState::Serving),
            Self::Retiring => Some(ConnectionState::Leaving),
            Self::Over(_) => None,
        }
    }
}

/// How a session stands.
#[derive(Debug, Clone, PartialEq)]
pub struct Standing {
    /// How far it is.
    pub stage: Stage,
    /// What the headers of its last stream said. `None`: none have come yet.
    pub answer: Option<Answer>,
    /// The replicas that its tunnels are at: one, unless a balancer spreads the streams of a connection.
    pub replicas: Vec<Replica>,
    /// The replica that asked the agent to go elsewhere.
    pub drained_by: Option<Replica>,
}

/// What a session is told.
#[derive(Debug, Clone, Default)]
pub struct Orders {
    /// One that asks may open its tunnels.
    pub admit: CancellationToken,
    /// It is not needed: it lets go of what is idle, and finishes what is busy.
    pub close: CancellationToken,
    /// Another serves in place of this one, which retires: it need not wait any longer.
    pub replaced: CancellationToken,
    /// It opens one more tunnel, whose headers tell how many replicas there are now. The pool shrinks again by itself.
    pub ask: Arc<Notify>,
}

/// A session that runs by itself.
#[derive(Debug)]
pub struct Session {
    /// How it stands.
    pub standing: watch::Receiver<Standing>,
    /// What it is told.
    pub orders: Orders,
    /// Where it is connected to.
    pub peer: Option<std::net::SocketAddr>,
    /// Whether kas is what answers there; empty while nothing tells.
    pub passage: Arc<OnceLock<Passage>>,
}

/// What the answers on a connection tell of the way to kas.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Passage {
    /// gRPC was answered, be it with a refusal.
    Passes,
    /// Something came, or failed to come, as behind a proxy that passes no gRPC: what it was.
    Blocked(String),
}

/// Starts a session on a connection. `changed` is notified whenever its standing changes. On `trial` it ends when
/// something else than kas answers, or nothing does: there is another address.
pub fn start(
    shared: Arc<Shared>,
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
    shared.metrics.connection(None, stage.state());
    let (sender, standing) =
        watch::channel(Standing { stage, answer: None, replicas: Vec::new(), drained_by: None });
    let orders = Orders::default();
    let passage = Arc::<OnceLock<Passage>>::default();
    let session =
        Session { standing, orders: orders.clone(), peer: link.peer, passage: Arc::clone(&passage) };
    let report = Report { standing: sender, changed, metrics: Arc::clone(&shared.metrics), passage };
    tasks.spawn(Run { shared, link, report, orders, trial, streams: TaskTracker::new() }.run(leave));
    session
}

/// Tells how a session stands.
#[derive(Debug, Clone)]
struct Report {
    standing: watch::Sender<Standing>,
    changed: Arc<Notify>,
    metrics: Arc<Metrics>,
    passage: Arc<OnceLock<Passage>>,
}

impl Report {
    /// What came first counts.
    fn passage(&self, passage: impl FnOnce() -> Passage) {
        if self.passage.get().is_none() && self.passage.set(passage()).is_ok() {
            self.changed.notify_one();
        }
    }

    fn is_blocked(&self) -> bool {
        matches!(self.passage.get(), Some(Passage::Blocked(_)))
    }

    fn modify(&self, change: impl FnOnce(&mut Standing)) {
        let changed = self.standing.send_if_modified(|standing| {
            let before = standing.clone();
            change(standing);
            *standing != before
        });
        if changed {
            self.changed.notify_one();
        }
    }

    fn stage(&self, stage: Stage) {
        self.metrics.connection(self.standing.borrow().stage.state(), stage.state());
        self.modify(|standing| standing.stage = stage);
    }

    /// Whether nothing has been answered.
    fn is_silent(&self) -> bool {
        self.standing.borrow().answer.is_none()
    }

    fn is(&self, stage: &Stage) -> bool {
        self.standing.borrow().stage == *stage
    }

    /// Response headers have come. A refusal without a name tells nothing: kas names itself only in answers.
    fn heard(&self, answer: Answer, refused: bool) {
        let told = answer.replica.is_some();
        self.modify(|standing| {
            if told || (standing.answer.is_none() && !refused) {
                standing.answer = Some(answer);
            }
        });
    }
}

struct Run {
    shared: Arc<Shared>,
    link: Link,
    report: Report,
    orders: Orders,
    /// There is another address.
    trial: bool,
    streams: TaskTracker,
}

/// How a configuration stream ended.
enum ConfigurationEnd {
    /// Call again.
    Again,
    /// kas refused it.
    Refused(Status),
    /// The connection is of no more use.
    Broken,
}

impl Run {
    async fn run(mut self, leave: CancellationToken) {
        let pool = Pool::new(Arc::clone(&self.shared.metrics), self.shared.max_tunnels);
        let end = self.serve(&pool, &leave).await;
        // Nothing can have begun on a way that leads elsewhere.
        let blocked = matches!(end, End::Blocked);
        // What is open goes on while the connection lives; nothing new is opened.
        pool.close();
        let over = match end {
            End::Refused(status) => Some(status),
            End::Blocked => {
                // The supervisor tells of it, and where it goes on.
                self.shared.metrics.connect_failures.inc();
                None
            }
            End::Unanswered if self.report.is(&Stage::Asking) => None,
            End::Unanswered => {
                self.shared.metrics.connect_failures.inc();
                tracing::warn!(
                    kas = %self.link.authority,
                    "the connection was closed before kas answered: is this the address of its agent listener?"
                );
                None
            }
            End::Retired => {
                self.report.stage(Stage::Retiring);
                let until = Instant::now() + REPLACE;
                loop {
                    // GOAWAY may be noticed before the drain notice behind it.
                    self.report.modify(|standing| standing.drained_by = pool.drained_by());
                    tokio::select! {
                        () = self.orders.replaced.cancelled() => break,
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
            let until = Instant::now() + LINGER;
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
        self.report.stage(Stage::Over(over));
    }

    /// Keeps the configuration stream and the pool until the session has to end.
    async fn serve(&mut self, pool: &Arc<Pool>, leave: &CancellationToken) -> End {
        let mut configuration = Box::pin(self.configuration());
        let mut asking = self.report.is(&Stage::Asking);
        let answer_by = Instant::now() + ANSWER;
        let silent_by = Instant::now() + SILENT;
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
            self.report.modify(|standing| standing.replicas = pool.replicas());
            if pool.is_serving() {
                backoff = TUNNEL_BACKOFF.0;
                if self.report.is(&Stage::Opening) {
                    self.report.stage(Stage::Serving);
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
                _ = ticks.tick() => pool.tick(),
                () = leave.cancelled() => return End::Left,
                () = self.orders.close.cancelled() => return End::Closed,
                () = self.orders.admit.cancelled(), if asking => {
                    asking = false;
                    self.report.stage(Stage::Opening);
                }
                () = tokio::time::sleep_until(silent_by), if self.trial && self.report.passage.get().is_none() => {
                    self.report.passage(|| Passage::Blocked(format!("nothing was answered within {SILENT:?}")));
                    return End::Blocked;
                }
                () = tokio::time::sleep_until(answer_by), if asking && self.report.is_silent() => {
                    self.report.heard(Answer::unnamed(), false);
                }
                () = self.orders.ask.notified(), if !asking => {
                    if pool.has_room() && let Err(end) = self.open(pool) {
                        return end;
                    }
                }
                // The connection broke, or takes no new streams: another one is needed either way.
                _ = &mut self.link.driver => {
                    let begins = asking || self.report.is(&Stage::Opening);
                    self.report.passage(|| {
                        Passage::Blocked("the connection was closed before anything was answered".to_owned())
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
                        // After GOAWAY no stream opens here any more: the next one is elsewhere.
                        if self.link.sender.ready().await.is_err() {
                            return End::Retired;
                        }
                        // One that ends as soon as it has begun is not asked for again in the same breath.
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
                    ConfigurationEnd::Refused(status) if is_refusal(&status) => return End::Refused(status),
                    ConfigurationEnd::Refused(status) => {
                        tracing::warn!(error = %status, "kas gave no configuration; tunnels go on");
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
        configuration(Arc::clone(&self.shared), self.request_parts(), self.report.clone(), sender)
    }

    fn request_parts(&self) -> RequestParts {
        RequestParts::of(&self.link)
    }

    /// Opens one tunnel.
    fn open(&mut self, pool: &Arc<Pool>) -> Result<(), End> {
        let mut request =
            match self.request_parts().request(&self.shared.token, &self.shared.instance, CONNECT) {
                Ok(request) => request,
                Err(error) => {
                    return Err(End::Refused(Status::new(Code::Unauthenticated, format!("{error:#}"))));
                }
            };
        request.headers_mut().insert(TUNNEL_HEADER, REUSE);
        request.headers_mut().insert(IMPERSONATES_HEADER, HeaderValue::from_static("1"));
        let (observer, serial) = pool.begin();
        let (body, control) =
            agent_end::open(&self.shared.descriptor, Arc::clone(&self.shared.handler), observer);
        pool.control(serial, control.clone());
        let pool = Arc::clone(pool);
        let report = self.report.clone();
        let answer = self.link.sender.send_request(request.map(|()| grpc::boxed(body)));
        self.streams.spawn(async move {
            match answer.await {
                Ok(response) => match refusal(&response, &report) {
                    None => {
                        let reusable = response.headers().get(TUNNEL_HEADER) == Some(&REUSE);
                        let said = Answer::of(response.headers());
                        pool.answered(serial, said.replica.clone(), max_idle(&response));
                        report.heard(said, false);
                        let gzip =
                            response.headers().get("grpc-encoding").is_some_and(|value| value == "gzip");
                        control.accepted(grpc::boxed(response.into_body()), reusable, gzip);
                    }
                    Some(status) => {
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

enum End {
    /// kas refused the agent.
    Refused(Status),
    /// kas wants the agent to go elsewhere, or the connection takes no new streams.
    Retired,
    /// The connection ended before anything was answered.
    Unanswered,
    /// Something else than kas answers, and there is another address.
    Blocked,
    /// This process leaves.
    Left,
    /// The session is not needed.
    Closed,
}

async fn at(instant: Option<Instant>) {
    if let Some(instant) = instant {
        tokio::time::sleep_until(instant).await;
    }
}

/// Whether kas says that it will not serve this agent, rather than that something went wrong.
fn is_refusal(status: &Status) -> bool {
    matches!(status.code(), Code::Unauthenticated | Code::PermissionDenied)
}

/// What is the same in each call on a connection.
pub(crate) struct RequestParts {
    scheme: http::uri::Scheme,
    authority: http::uri::Authority,
    headers: KasHeaders,
    local: Option<std::net::SocketAddr>,
}

impl RequestParts {
    /// Takes it from a connection.
    pub(crate) fn of(link: &Link) -> Self {
        Self {
            scheme: link.scheme.clone(),
            authority: link.authority.clone(),
            headers: link.headers.clone(),
            local: link.local,
        }
    }

    /// Begins a call.
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
        headers.insert(header::USER_AGENT, HeaderValue::from_static(user_agent()));
        headers.insert(INSTANCE_HEADER, instance.clone());
        if let Some(local) = self.local.and_then(|local| HeaderValue::try_from(local.to_string()).ok()) {
            headers.insert(SOCKET_HEADER, local);
        }
        Ok(request)
    }
}

/// How agentk names itself to kas.
pub(crate) fn user_agent() -> &'static str {
    static AGENT: std::sync::OnceLock<String> = std::sync::OnceLock::new();
    AGENT.get_or_init(|| format!("agentk/{}/{}", runtime::version::VERSION, runtime::version::COMMIT))
}

/// The status of an answer that is only a status, or not gRPC at all. Tells what the answer means for the way.
fn refusal(response: &Response<Incoming>, report: &Report) -> Option<Status> {
    let Some(text) = foreign(response) else {
        let status = Status::from_headers(response.headers());
        let vague = status.as_ref().filter(|status| is_vague(status, response.headers()));
        report.passage(|| vague.map_or(Passage::Passes, |status| Passage::Blocked(status.to_string())));
        return status;
    };
    // Missing credentials are missing on every way.
    if !dial::is_authentication(response.status()) && response.status() != StatusCode::TOO_MANY_REQUESTS {
        report.passage(|| Passage::Blocked(text.clone()));
    }
    Some(Status::new(Code::Unavailable, format!("{text}: is this the address of kas?")))
}

/// Whether a status may come from a proxy that speaks gRPC, about what is behind it. kas gives every answer an id.
pub(crate) fn is_vague(status: &Status, headers: &HeaderMap) -> bool {
    let of_proxies = matches!(
        status.code(),
        Code::Cancelled
            | Code::Unknown
            | Code::DeadlineExceeded
            | Code::Unimplemented
            | Code::Internal
            | Code::Unavailable
    );
    of_proxies && !headers.contains_key(grpc::CORRELATION_ID)
}

/// Whether a status comes from a port of kas that is not for agents: callers and replicas show a JWT there, which the token
/// of an agent is not. kas of GitLab says the same.
pub(crate) fn is_wrong_port(status: &Status) -> bool {
    status.code() == Code::Unauthenticated && status.message() == "JWT validation failed"
}

/// Says what an answer is that is not gRPC.
pub(crate) fn foreign<B>(response: &Response<B>) -> Option<String> {
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
    (!is_grpc).then(|| format!("an answer that is not gRPC (content-type: {kind:.80})"))
}

fn max_idle(response: &Response<Incoming>) -> Option<Duration> {
    let seconds = response.headers().get(MAX_IDLE_HEADER)?.to_str().ok()?.parse().ok()?;
    Some(Duration::from_secs(seconds))
}

/// Opens the configuration stream and applies what comes, until it ends.
async fn configuration(
    shared: Arc<Shared>,
    parts: RequestParts,
    report: Report,
    mut sender: hyper::client::conn::http2::SendRequest<grpc::Body>,
) -> ConfigurationEnd {
    let message = ConfigurationRequest {
        commit_id: shared.applied.borrow().clone(),
        agent_meta: Some(shared.meta.clone()),
        skip_register: false,
    };
    let request = match parts.request(&shared.token, &shared.instance, GET_CONFIGURATION) {
        Ok(request) => request.map(|()| grpc::full(grpc::encode(&message))),
        Err(error) => {
            return ConfigurationEnd::Refused(Status::new(Code::Unauthenticated, format!("{error:#}")));
        }
    };
    let response = match sender.send_request(request).await {
        Ok(response) => response,
        Err(error) => {
            tracing::debug!(error = %error, "the configuration stream could not be opened");
            report.passage(|| Passage::Blocked(format!("the first stream was reset: {error}")));
            return ConfigurationEnd::Broken;
        }
    };
    let refused = refusal(&response, &report);
    report.heard(Answer::of(response.headers()), refused.is_some());
    if let Some(status) = refused {
        return if status.code() == Code::Ok {
            ConfigurationEnd::Again
        } else {
            ConfigurationEnd::Refused(status)
        };
    }
    let gzip = response.headers().get("grpc-encoding").is_some_and(|value| value == "gzip");
    let mut reader = MessageReader::new(response.into_body(), MAX_CONFIGURATION).with_gzip(gzip);
    loop {
        match reader.next().await {
            Ok(Some(message)) => match ConfigurationResponse::decode(message) {
                Ok(configuration) => {
                    tracing::info!(commit_id = configuration.commit_id, "configuration received");
                    (shared.apply)(&configuration);
                    shared.applied.send_replace(configuration.commit_id);
                }
                Err(error) => {
                    tracing::warn!(error = %error, "a configuration cannot be read; the last one stays")
                }
            },
            Ok(None) => {
                return match reader.trailers().and_then(Status::from_headers) {
                    // The token that this stream was opened with counts no more; whether the one
                    // in the file does is for the next call to find out.
                    Some(status) if status.code() != Code::Ok && !is_refusal(&status) => {
                        ConfigurationEnd::Refused(status)
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
    fn ports_for_callers_and_replicas_are_told_from_a_refused_token() {
        assert!(is_wrong_port(&Status::new(Code::Unauthenticated, "JWT validation failed")));
        assert!(!is_wrong_port(&Status::new(Code::Unauthenticated, "unauthenticated")));
        assert!(!is_wrong_port(&Status::new(Code::PermissionDenied, "JWT validation failed")));
    }
}
