//! A client that knows all replicas. It sends a request once more, to another replica, only if the first one
//! certainly did not run it.

use std::{
    convert::Infallible,
    error::Error as _,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use grpc::{Code, Status};
use history::{Attempt, Kind, Micros, Outcome, Request};
use http::{HeaderMap, Method, StatusCode, header};
use http_body_util::{BodyExt as _, Full, StreamBody, combinators::UnsyncBoxBody};
use hyper::{body::Frame, client::conn::http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use parking_lot::Mutex;
use serde_json::json;
use testkit::caller::{Jwt, frame, now};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::{Instant, timeout, timeout_at},
};

use crate::{
    clock::{self, micros},
    cluster_server, frames,
    hash::Counted,
};

/// A TCP connection to a replica is made within this, or the replica counts as not there.
const DIAL: Duration = Duration::from_secs(1);
/// How much longer than the deadline a client waits for the response that says so.
const AFTER: Duration = Duration::from_millis(800);
/// A token of a caller is used for this long. It is valid for longer.
const TOKEN: Duration = Duration::from_secs(300);
/// How long a token is valid, in seconds from now.
const VALID: i64 = 3 * 3600;
/// How far tokens begin before now, and how long ago those of outsiders ended, in seconds. Clocks of replicas
/// are off by less: S35 steps one by an hour.
const SKEW: i64 = 2 * 3600;
/// A second attempt is made only if this much of the deadline is left.
const LEFT: Duration = Duration::from_millis(50);
/// A request that certainly was not run is tried once more.
const TRIES: usize = 2;
/// The longest head of the response to an upgrade.
const MAX_HEAD: usize = 16 * 1024;

/// Where a replica serves clients.
#[derive(Clone, Debug)]
pub(crate) struct Door {
    /// Its name.
    pub(crate) name: String,
    /// The API of GitLab.
    pub(crate) api: SocketAddr,
    /// The Kubernetes endpoint.
    pub(crate) kubernetes: SocketAddr,
}

type Body = UnsyncBoxBody<Bytes, Infallible>;
type Sender = http2::SendRequest<Body>;

/// The message of a stream with this number.
fn piece(id: u64, number: u64) -> Bytes {
    frame(format!("{id}/{number}").as_bytes())
}

/// How an upgraded connection is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Upgrade {
    Spdy,
    WebSocket,
}

/// Clients of all replicas, with one connection to each listener.
#[derive(Debug)]
pub(crate) struct Client {
    doors: Vec<Door>,
    secret: Mutex<Vec<u8>>,
    user: String,
    /// How long tokens are valid, in seconds; negative: they are not.
    valid: i64,
    token: Mutex<Option<(Instant, String)>>,
    /// How many replicas are tried at most, while none of them has run the request.
    tries: AtomicUsize,
    /// The deadline of one attempt; `None`: what is left of that of the request.
    patience: Mutex<Option<Duration>>,
    links: Vec<[tokio::sync::Mutex<Option<Sender>>; 2]>,
}

/// How an attempt ended.
#[derive(Debug)]
struct Ended {
    outcome: Outcome,
    detail: String,
    received: Option<history::Bytes>,
}

impl Ended {
    fn new(outcome: Outcome, detail: impl Into<String>) -> Self {
        Self { outcome, detail: detail.into(), received: None }
    }
}

impl Client {
    pub(crate) fn new(doors: Vec<Door>, secret: Vec<u8>, user: String) -> Arc<Self> {
        Self::with_tokens(doors, secret, user, VALID)
    }

    /// As [`new`](Self::new), with tokens that are valid for this many seconds from now.
    fn with_tokens(doors: Vec<Door>, secret: Vec<u8>, user: String, valid: i64) -> Arc<Self> {
        let links = doors.iter().map(|_| Default::default()).collect();
        let (secret, tries) = (Mutex::new(secret), AtomicUsize::new(TRIES));
        let (token, patience) = (Mutex::default(), Mutex::default());
        Arc::new(Self { doors, secret, user, valid, token, tries, patience, links })
    }

    /// Returns a client of the same replicas whose tokens ended hours ago, and whose user nobody knows.
    pub(crate) fn expired(&self, user: String) -> Arc<Self> {
        Self::with_tokens(self.doors.clone(), self.secret.lock().clone(), user, -SKEW)
    }

    /// Returns a client of the same replicas with another secret and user.
    pub(crate) fn other(&self, secret: Vec<u8>, user: String) -> Arc<Self> {
        Self::new(self.doors.clone(), secret, user)
    }

    /// Returns the same client with connections of its own.
    pub(crate) fn again(&self) -> Arc<Self> {
        self.other(self.secret.lock().clone(), self.user.clone())
    }

    /// Returns how many replicas it knows.
    pub(crate) fn replicas(&self) -> usize {
        self.doors.len()
    }

    /// Returns a client with connections of its own, of one replica only.
    pub(crate) fn alone(&self, replica: usize) -> Arc<Self> {
        Self::new(vec![self.doors[replica].clone()], self.secret.lock().clone(), self.user.clone())
    }

    /// Returns where a replica serves clients.
    pub(crate) fn door(&self, replica: usize) -> &Door {
        &self.doors[replica]
    }

    /// Returns the token of a user of the Kubernetes endpoint.
    pub(crate) fn user(&self) -> &str {
        &self.user
    }

    /// Returns a token that GitLab would have signed, with these claims over the usual ones.
    pub(crate) fn token_with(&self, claims: &[(&str, i64)]) -> String {
        let token = Jwt::new(&self.secret.lock());
        claims.iter().fold(token, |token, (name, value)| token.claim(name, json!(value))).encode()
    }

    /// Returns a token of GitLab for a call of the API.
    pub(crate) fn token(&self) -> String {
        let mut kept = self.token.lock();
        match &*kept {
            Some((since, token)) if since.elapsed() < TOKEN => token.clone(),
            _ => {
                let from = now() + self.valid.min(0) - SKEW;
                let token = Jwt::new(&self.secret.lock())
                    .claim("nbf", json!(from))
                    .claim("exp", json!(now() + self.valid))
                    .encode();
                *kept = Some((Instant::now(), token.clone()));
                token
            }
        }
    }

    /// From now on, tries every replica with a request until one may have run it.
    pub(crate) fn try_all(&self) {
        self.tries.store(usize::MAX, Ordering::Relaxed);
    }

    /// As [`try_all`](Self::try_all), and waits for each of them this long at most.
    pub(crate) fn try_all_for(&self, each: Duration) {
        self.try_all();
        *self.patience.lock() = Some(each);
    }

    /// Signs with this secret from now on.
    pub(crate) fn set_secret(&self, secret: &[u8]) {
        let mut kept = self.token.lock();
        secret.clone_into(&mut self.secret.lock());
        *kept = None;
    }

    async fn link(&self, replica: usize, kubernetes: bool) -> Result<Sender, String> {
        let mut link = self.links[replica][usize::from(kubernetes)].lock().await;
        if let Some(sender) = link.as_ref().filter(|sender| !sender.is_closed()) {
            return Ok(sender.clone());
        }
        let door = &self.doors[replica];
        let address = if kubernetes { door.kubernetes } else { door.api };
        let dialled = timeout(DIAL, async {
            let stream = TcpStream::connect(address).await.map_err(|error| error.to_string())?;
            stream.set_nodelay(true).map_err(|error| error.to_string())?;
            http2::Builder::new(TokioExecutor::new())
                .max_concurrent_reset_streams(10_000)
                .handshake(TokioIo::new(stream))
                .await
                .map_err(|error| error.to_string())
        });
        let (sender, connection) = dialled.await.map_err(|_| "no connection in time".to_owned())??;
        tokio::spawn(connection);
        *link = Some(sender.clone());
        Ok(sender)
    }

    /// Sends one HTTP/2 request and reads the whole response.
    async fn exchange(
        &self,
        replica: usize,
        kubernetes: bool,
        request: http::Request<Body>,
        until: Instant,
    ) -> Result<(StatusCode, HeaderMap, Bytes, Option<HeaderMap>), Ended> {
        let mut sender = self
            .link(replica, kubernetes)
            .await
            .map_err(|error| Ended::new(Outcome::NotStarted, format!("cannot connect: {error}")))?;
        let exchange = async {
            sender.ready().await.map_err(|error| failed(&error))?;
            let response = sender.send_request(request).await.map_err(|error| failed(&error))?;
            let (head, body) = response.into_parts();
            let body =
                body.collect().await.map_err(|error| Ended::new(Outcome::Unknown, error.to_string()))?;
            let trailers = body.trailers().cloned();
            Ok((head.status, head.headers, body.to_bytes(), trailers))
        };
        timeout_at(until, exchange).await.map_err(|_| Ended::new(Outcome::Unknown, "no response in time"))?
    }

    /// Sends a request of a kind that has one response, and returns its record.
    pub(crate) async fn send(
        &self,
        id: u64,
        agent: i64,
        kind: Kind,
        first: usize,
        deadline: Duration,
    ) -> Request {
        let begun = clock::now();
        let end = Instant::now() + deadline;
        let payload = Bytes::from(body_of(id));
        let mut record = Request::new(id, agent, kind, begun);
        record.deadline = Some(begun + micros(deadline));
        let sent = if kind == Kind::Http { payload.clone() } else { frame(&payload) };
        record.sent = Some(Counted::whole(&sent));
        let ended = loop {
            let replica = (first + record.attempts.len()) % self.doors.len();
            let at = clock::now();
            let left = end.saturating_duration_since(Instant::now());
            let left = self.patience.lock().map_or(left, |each| left.min(each));
            let ended = match kind {
                Kind::Http => self.create(replica, id, agent, sent.clone(), end + AFTER).await,
                _ => self.call(replica, id, agent, sent.clone(), left, end + AFTER).await,
            };
            record.attempts.push(Attempt {
                replica: self.doors[replica].name.clone(),
                begun: at,
                ended: clock::now(),
                outcome: ended.outcome,
            });
            let again = ended.outcome == Outcome::NotStarted
                && record.attempts.len() < self.tries.load(Ordering::Relaxed).min(self.doors.len())
                && end.saturating_duration_since(Instant::now()) > LEFT;
            if !again {
                break ended;
            }
        };
        record.received = ended.received;
        if ended.outcome != Outcome::Ok {
            record.detail = ended.detail;
        }
        record.ended(clock::now(), ended.outcome)
    }

    async fn call(
        &self,
        replica: usize,
        id: u64,
        agent: i64,
        sent: Bytes,
        left: Duration,
        until: Instant,
    ) -> Ended {
        let request = self
            .grpc(replica, "Echo", id, agent)
            .header("grpc-timeout", format!("{}m", left.as_millis().max(1)))
            .body(Full::new(sent).boxed_unsync());
        let request = match request {
            Ok(request) => request,
            Err(error) => return Ended::new(Outcome::Refused, error.to_string()),
        };
        match self.exchange(replica, false, request, until).await {
            Err(ended) => ended,
            Ok((_, headers, body, trailers)) => {
                let status = trailers
                    .as_ref()
                    .and_then(Status::from_headers)
                    .or_else(|| Status::from_headers(&headers));
                let Some(status) = status else {
                    return Ended::new(Outcome::Unknown, "the response has no status");
                };
                Ended {
                    outcome: outcome(&status),
                    detail: status.to_string(),
                    received: (status.code() == Code::Ok).then(|| Counted::whole(&body)),
                }
            }
        }
    }

    async fn create(&self, replica: usize, id: u64, agent: i64, sent: Bytes, until: Instant) -> Ended {
        let uri = format!(
            "http://{}/agents/{agent}/api/v1/namespaces/chaos/configmaps/c-{id}",
            self.doors[replica].kubernetes
        );
        let request = http::Request::builder()
            .method(Method::POST)
            .uri(uri)
            .header("authorization", format!("Bearer {}", self.user))
            .header("content-type", "application/json")
            .body(Full::new(sent).boxed_unsync());
        let request = match request {
            Ok(request) => request,
            Err(error) => return Ended::new(Outcome::Refused, error.to_string()),
        };
        match self.exchange(replica, true, request, until).await {
            Err(ended) => ended,
            Ok((status, headers, body, _)) => {
                let outcome = created(status, &headers, &body);
                Ended {
                    outcome,
                    detail: format!("{status}: {}", String::from_utf8_lossy(&body)),
                    received: (outcome == Outcome::Ok).then(|| Counted::whole(&body)),
                }
            }
        }
    }

    /// Sends messages in a stream, each when the one before has come back, and returns its record.
    pub(crate) async fn stream(
        &self,
        id: u64,
        agent: i64,
        replica: usize,
        (messages, pause): (u64, Duration),
        deadline: Duration,
    ) -> Request {
        let mut record = Request::new(id, agent, Kind::Stream, clock::now());
        record.deadline = Some(record.begun + micros(deadline));
        let (mut sent, mut received, mut is_whole) = (Counted::default(), Counted::default(), false);
        let bytes = (&mut sent, &mut received, &mut is_whole);
        let talk = self.talk(id, agent, replica, (messages, pause, deadline), bytes);
        let ended = match timeout(deadline + AFTER, talk).await {
            Ok(ended) => ended,
            Err(_) => Ended::new(Outcome::Unknown, "the stream did not end in time"),
        };
        let clean = ended.outcome == Outcome::Ok;
        // Half-closed only after the last message. The agent may see that end although the answer is lost.
        record.sent = Some(sent.bytes(is_whole));
        record.received = Some(received.bytes(clean));
        record.detail = ended.detail;
        record.ended(clock::now(), ended.outcome)
    }

    async fn talk(
        &self,
        id: u64,
        agent: i64,
        replica: usize,
        (messages, pause, deadline): (u64, Duration, Duration),
        (sent, received, is_whole): (&mut Counted, &mut Counted, &mut bool),
    ) -> Ended {
        let (sender, receiver) = tokio::sync::mpsc::channel::<Bytes>(1);
        let body = futures_util::stream::unfold(receiver, |mut receiver| async move {
            let bytes = receiver.recv().await?;
            Some((Ok::<_, Infallible>(Frame::data(bytes)), receiver))
        });
        let request = self
            .grpc(replica, "Stream", id, agent)
            .header("grpc-timeout", format!("{}m", deadline.as_millis()))
            .body(StreamBody::new(body).boxed_unsync());
        let mut link = match self.link(replica, false).await {
            Ok(link) => link,
            Err(error) => return Ended::new(Outcome::NotStarted, format!("cannot connect: {error}")),
        };
        let request = match request {
            Ok(request) => request,
            Err(error) => return Ended::new(Outcome::Refused, error.to_string()),
        };
        if let Err(error) = link.ready().await {
            return failed(&error);
        }
        let opened = link.send_request(request);
        // The first message goes with the headers: the agent answers nothing before it.
        let first = piece(id, 0);
        sent.push(&first);
        if sender.send(first.clone()).await.is_err() {
            return Ended::new(Outcome::Unknown, "the stream ended at once");
        }
        let response = match opened.await {
            Ok(response) => response,
            Err(error) => return failed(&error),
        };
        let (head, mut body) = response.into_parts();
        if let Some(status) = Status::from_headers(&head.headers) {
            return Ended::new(outcome(&status), status.to_string());
        }
        let mut sender = Some(sender);
        let (mut number, mut expected) = (0, first.len() as u64);
        let mut back = 0_u64;
        loop {
            match body.frame().await {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => {
                        received.push(&data);
                        back += data.len() as u64;
                    }
                    Err(frame) => {
                        let status = frame.trailers_ref().and_then(Status::from_headers);
                        let Some(status) = status else {
                            return Ended::new(Outcome::Unknown, "the trailers have no status");
                        };
                        let ended = Ended::new(outcome(&status), status.to_string());
                        let early = ended.outcome == Outcome::Ok && number < messages;
                        return if early {
                            Ended::new(Outcome::Unknown, "the stream ended cleanly before its last message")
                        } else {
                            ended
                        };
                    }
                },
                Some(Err(error)) => return failed_stream(&error),
                None => return Ended::new(Outcome::Unknown, "the stream ended without trailers"),
            }
            if back < expected {
                continue;
            }
            number += 1;
            if number == messages {
                // Half-close: the agent answers it with trailers.
                sender = None;
                *is_whole = true;
            } else if let Some(sender) = &sender {
                tokio::time::sleep(pause).await;
                let next = piece(id, number);
                sent.push(&next);
                expected += next.len() as u64;
                if sender.send(next).await.is_err() {
                    // What ended it is read next.
                    continue;
                }
            }
        }
    }

    /// The headers of a gRPC request for an agent.
    fn grpc(&self, replica: usize, method: &str, id: u64, agent: i64) -> http::request::Builder {
        http::Request::post(format!("http://{}/kas.bench.v1.Bench/{method}", self.doors[replica].api))
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .header("authorization", format!("Bearer {}", self.token()))
            .header("kas-agent-id", agent)
            .header("x-gitlab-correlation-id", format!("{id:032x}"))
    }

    /// Watches until the watch ends or `until` is cancelled, and returns its record.
    pub(crate) async fn watch(
        &self,
        id: u64,
        agent: i64,
        replica: usize,
        stop: tokio_util::sync::CancellationToken,
    ) -> Request {
        let mut record = Request::new(id, agent, Kind::Watch, clock::now());
        let uri = format!(
            "http://{}/agents/{agent}/api/v1/namespaces/chaos/configmaps?fieldSelector=metadata.name%3Dw-{id}&watch=true",
            self.doors[replica].kubernetes
        );
        let request = http::Request::get(uri)
            .header("authorization", format!("Bearer {}", self.user))
            .body(Full::new(Bytes::new()).boxed_unsync());
        let end = |record: Request, ended: Ended| {
            let mut record = record.ended(clock::now(), ended.outcome);
            record.detail = ended.detail;
            record
        };
        let (request, mut sender) = match (request, self.link(replica, true).await) {
            (Ok(request), Ok(sender)) => (request, sender),
            (_, Err(error)) => return end(record, Ended::new(Outcome::NotStarted, error)),
            (Err(error), _) => return end(record, Ended::new(Outcome::Refused, error.to_string())),
        };
        let opened = tokio::select! {
            opened = sender.send_request(request) => opened,
            () = stop.cancelled() => return end(record, Ended::new(Outcome::Cancelled, "")),
        };
        let mut body = match opened {
            Ok(response) if response.status() == StatusCode::OK => response.into_body(),
            Ok(response) => {
                let detail = format!("status {}", response.status());
                let refused = response.headers().contains_key(header::RETRY_AFTER);
                // A watch only reads, so the status does not tell whether it was started.
                let outcome = if refused { Outcome::Unknown } else { Outcome::Refused };
                return end(record, Ended::new(outcome, detail));
            }
            Err(error) => return end(record, failed(&error)),
        };
        record.phases.push(("headers".to_owned(), clock::now()));
        let mut expected = Vec::new();
        let mut number = 0;
        let mut position = 0_u64;
        let mut wrong_at = None;
        let ended = loop {
            let frame = tokio::select! {
                frame = body.frame() => frame,
                () = stop.cancelled() => break Ended::new(Outcome::Cancelled, ""),
            };
            match frame {
                Some(Ok(frame)) => {
                    let Ok(data) = frame.into_data() else { continue };
                    for byte in data {
                        if expected.is_empty() {
                            expected = cluster_server::event(number).into_bytes();
                            expected.reverse();
                            number += 1;
                        }
                        if expected.pop() != Some(byte) && wrong_at.is_none() {
                            wrong_at = Some(position);
                        }
                        position += 1;
                    }
                }
                Some(Err(error)) => {
                    break Ended::new(Outcome::Unknown, format!("the watch was reset: {error}"));
                }
                None if !expected.is_empty() => {
                    break Ended::new(Outcome::Unknown, "the watch ended inside an event");
                }
                None => break Ended::new(Outcome::Ok, ""),
            }
        };
        record.received =
            wrong_at.map(|at| history::Bytes { count: position, hash: 0, clean: false, wrong_at: Some(at) });
        end(record, ended)
    }

    /// Opens an upgraded connection, sends a few bytes now and then, and checks that they come back. Returns
    /// its record when it ends, or `stop` is cancelled. Its detail says how it ended.
    pub(crate) async fn exec(
        &self,
        id: u64,
        agent: i64,
        replica: usize,
        upgrade: Upgrade,
        stop: tokio_util::sync::CancellationToken,
    ) -> Request {
        let mut record = Request::new(id, agent, Kind::Upgrade, clock::now());
        let begun = clock::now();
        let mut sent = Counted::default();
        let ended = tokio::select! {
            ended = self.terminal(id, agent, replica, upgrade, &mut record.phases, &mut sent) => ended,
            () = stop.cancelled() => Ended::new(Outcome::Cancelled, ""),
        };
        record.sent = Some(sent.bytes(false));
        record.received = ended.received;
        record.detail = ended.detail;
        record.attempts.push(Attempt {
            replica: self.doors[replica].name.clone(),
            begun,
            ended: clock::now(),
            outcome: ended.outcome,
        });
        record.ended(clock::now(), ended.outcome)
    }

    async fn upgraded(
        &self,
        id: u64,
        agent: i64,
        replica: usize,
        upgrade: Upgrade,
    ) -> Result<TcpStream, Ended> {
        let address = self.doors[replica].kubernetes;
        let protocol = match upgrade {
            Upgrade::Spdy => "Upgrade: SPDY/3.1\r\nX-Stream-Protocol-Version: v4.channel.k8s.io\r\n",
            Upgrade::WebSocket => {
                "Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: \
                 Y2hhb3MgcmVxdWVzdHMgIQ==\r\nSec-WebSocket-Protocol: v5.channel.k8s.io\r\n"
            }
        };
        let method = if upgrade == Upgrade::Spdy { "POST" } else { "GET" };
        let opened = timeout(DIAL * 10, async {
            let mut stream = TcpStream::connect(address).await?;
            stream.set_nodelay(true)?;
            let request = format!(
                "{method} /agents/{agent}/api/v1/namespaces/chaos/pods/x-{id}/exec?command=cat&stdin=true HTTP/1.1\r\n\
                 Host: {address}\r\nAuthorization: Bearer {}\r\nConnection: Upgrade\r\n{protocol}\
                 Content-Length: 0\r\n\r\n",
                self.user
            );
            stream.write_all(request.as_bytes()).await?;
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") && head.len() < MAX_HEAD {
                head.push(stream.read_u8().await?);
            }
            std::io::Result::Ok((stream, head))
        });
        match opened.await {
            Ok(Ok((stream, head))) if head.starts_with(b"HTTP/1.1 101 ") => Ok(stream),
            Ok(Ok((_, head))) => {
                let line = String::from_utf8_lossy(&head).lines().next().unwrap_or_default().to_owned();
                Err(Ended::new(Outcome::Unknown, line))
            }
            Ok(Err(error)) if error.kind() == std::io::ErrorKind::ConnectionRefused => {
                Err(Ended::new(Outcome::NotStarted, error.to_string()))
            }
            Ok(Err(error)) => Err(Ended::new(Outcome::Unknown, error.to_string())),
            Err(_) => Err(Ended::new(Outcome::Unknown, "no answer in time")),
        }
    }

    async fn terminal(
        &self,
        id: u64,
        agent: i64,
        replica: usize,
        upgrade: Upgrade,
        phases: &mut Vec<(String, Micros)>,
        sent: &mut Counted,
    ) -> Ended {
        let mut stream = match self.upgraded(id, agent, replica, upgrade).await {
            Ok(stream) => stream,
            Err(ended) => return ended,
        };
        phases.push(("upgraded".to_owned(), clock::now()));
        for number in 0_u64.. {
            let ping = number.to_be_bytes();
            sent.push(&ping);
            let echoed = timeout(DIAL * 10, async {
                match upgrade {
                    Upgrade::Spdy => spdy_echo(&mut stream, &ping).await,
                    Upgrade::WebSocket => websocket_echo(&mut stream, &ping).await,
                }
            });
            match echoed.await {
                Ok(Ok(back)) if back == ping => {}
                Ok(Ok(_)) => {
                    let count = (number + 1) * 8;
                    let wrong_at = Some(number * 8);
                    let received = Some(history::Bytes { count, hash: 0, clean: false, wrong_at });
                    return Ended { received, ..Ended::new(Outcome::Error, "other bytes came back") };
                }
                Ok(Err(ended)) => return Ended::new(Outcome::Unknown, ended),
                Err(_) => return Ended::new(Outcome::Unknown, "nothing came back in time"),
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        Ended::new(Outcome::Ok, "")
    }
}

/// The details of an upgraded connection that kas ended: by a Close frame that says why, or by a reset.
pub(crate) const CLOSE_1001: &str = "Close 1001";
pub(crate) const RESET: &str = "reset";

async fn spdy_echo(stream: &mut TcpStream, ping: &[u8; 8]) -> Result<[u8; 8], String> {
    let mut back = [0; 8];
    stream.write_all(ping).await.map_err(|error| gone(&error))?;
    stream.read_exact(&mut back).await.map_err(|error| gone(&error))?;
    Ok(back)
}

async fn websocket_echo(stream: &mut TcpStream, ping: &[u8; 8]) -> Result<[u8; 8], String> {
    // The first byte is the channel: standard input, and standard output.
    let payload: Vec<u8> = std::iter::once(0).chain(*ping).collect();
    let frame = frames::frame(frames::BINARY, &payload, Some(rand::random()));
    let written = stream.write_all(&frame).await;
    // A Close frame may have come before the connection was reset.
    match frames::read(stream).await {
        Ok(Some((frames::BINARY, payload))) => {
            payload.get(1..).and_then(|back| back.try_into().ok()).ok_or_else(|| "another frame".to_owned())
        }
        Ok(Some((frames::CLOSE, payload))) => Err(format!("Close {}", frames::close_code(&payload))),
        Ok(Some((kind, _))) => Err(format!("a frame of kind {kind}")),
        // A reset is told once: if writing was told, reading finds the end.
        Ok(None) => match written {
            Err(error) => Err(gone(&error)),
            Ok(()) => Err("the end without a Close frame".to_owned()),
        },
        Err(error) => match (error.downcast_ref::<std::io::Error>(), written) {
            (Some(error), _) => Err(gone(error)),
            (None, Err(error)) => Err(gone(&error)),
            (None, Ok(())) => Err(error.to_string()),
        },
    }
}

/// How a connection ended, in words that are compared.
fn gone(error: &std::io::Error) -> String {
    match error.kind() {
        std::io::ErrorKind::ConnectionReset | std::io::ErrorKind::BrokenPipe => RESET.to_owned(),
        std::io::ErrorKind::UnexpectedEof => "the end".to_owned(),
        _ => error.to_string(),
    }
}

/// Returns the payload of a request: different for each, and of different sizes up to 4 KiB.
fn body_of(id: u64) -> Vec<u8> {
    let size = usize::try_from(id.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 52).unwrap_or(0);
    let mut body = format!("{{\"id\":{id},\"filler\":\"").into_bytes();
    body.resize(body.len() + size, b'x');
    body.extend_from_slice(b"\"}");
    body
}

/// What the answer to a POST tells. kas answers 503 to one that was not started: with `Retry-After` if the
/// reason passes soon, and without it if the agent is away. To one that may have run, it answers 502 or 504.
fn created(status: StatusCode, headers: &HeaderMap, body: &[u8]) -> Outcome {
    let repeat = headers.contains_key(header::RETRY_AFTER);
    let of_kas = || {
        let told: Option<serde_json::Value> = serde_json::from_slice(body).ok();
        told.and_then(|told| Some(told["message"].as_str()?.starts_with("kas: "))).unwrap_or_default()
    };
    match status {
        StatusCode::CREATED => Outcome::Ok,
        StatusCode::TOO_MANY_REQUESTS if repeat => Outcome::NotStarted,
        StatusCode::SERVICE_UNAVAILABLE if repeat || of_kas() => Outcome::NotStarted,
        StatusCode::BAD_GATEWAY | StatusCode::GATEWAY_TIMEOUT => Outcome::Unknown,
        status if status.is_client_error() => Outcome::Refused,
        _ => Outcome::Unknown,
    }
}

fn outcome(status: &Status) -> Outcome {
    match (status.code(), status.outcome()) {
        (Code::Ok, _) => Outcome::Ok,
        (_, Some(grpc::Outcome::NotStarted)) => Outcome::NotStarted,
        (_, Some(grpc::Outcome::Unknown)) => Outcome::Unknown,
        (
            Code::Unauthenticated
            | Code::PermissionDenied
            | Code::ResourceExhausted
            | Code::InvalidArgument
            | Code::FailedPrecondition
            | Code::Unimplemented
            | Code::NotFound,
            None,
        ) => Outcome::Refused,
        _ => Outcome::Unknown,
    }
}

/// What an error within a stream tells: that it was started is known.
fn failed_stream(error: &hyper::Error) -> Ended {
    Ended::new(Outcome::Unknown, failed(error).detail)
}

/// What an error of hyper tells about the request.
fn failed(error: &hyper::Error) -> Ended {
    let mut source = error.source();
    while let Some(cause) = source {
        if let Some(h2) = cause.downcast_ref::<h2::Error>() {
            let refused = h2.reason() == Some(h2::Reason::REFUSED_STREAM);
            // A stream above the last one that the GOAWAY names; others go on.
            let above = h2.is_go_away() && h2.is_remote() && h2.reason() == Some(h2::Reason::NO_ERROR);
            let outcome = if refused || above { Outcome::NotStarted } else { Outcome::Unknown };
            return Ended::new(outcome, h2.to_string());
        }
        source = cause.source();
    }
    // The connection ended before the request was given to it.
    let outcome = if error.is_canceled() { Outcome::NotStarted } else { Outcome::Unknown };
    Ended::new(outcome, error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statuses_are_told_apart() {
        let status = |code| Status::new(code, "x");
        assert_eq!(outcome(&status(Code::Ok)), Outcome::Ok);
        assert_eq!(outcome(&status(Code::Unavailable)), Outcome::Unknown, "nothing is said");
        assert_eq!(outcome(&status(Code::Unauthenticated)), Outcome::Refused);
        let not_started = status(Code::DeadlineExceeded).with_outcome(grpc::Outcome::NotStarted);
        assert_eq!(outcome(&not_started), Outcome::NotStarted);
        let unknown = status(Code::Unavailable).with_outcome(grpc::Outcome::Unknown);
        assert_eq!(outcome(&unknown), Outcome::Unknown);
    }

    #[test]
    fn answers_to_posts_are_told_apart() {
        let mut headers = HeaderMap::new();
        let away = br#"{"kind":"Status","message":"kas: agent 7 is not connected (request 1)"}"#;
        let of = |status, headers: &HeaderMap, body: &[u8]| created(status, headers, body);
        assert_eq!(of(StatusCode::SERVICE_UNAVAILABLE, &headers, away), Outcome::NotStarted);
        assert_eq!(of(StatusCode::BAD_GATEWAY, &headers, away), Outcome::Unknown);
        let other = br#"{"kind":"Status","message":"etcd is down"}"#;
        assert_eq!(
            of(StatusCode::SERVICE_UNAVAILABLE, &headers, other),
            Outcome::Unknown,
            "the API server's"
        );
        assert_eq!(of(StatusCode::SERVICE_UNAVAILABLE, &headers, b"no JSON"), Outcome::Unknown);
        headers.insert(header::RETRY_AFTER, 1.into());
        assert_eq!(of(StatusCode::TOO_MANY_REQUESTS, &headers, b""), Outcome::NotStarted);
        assert_eq!(of(StatusCode::FORBIDDEN, &headers, b""), Outcome::Refused);
    }

    #[test]
    fn payloads_differ_and_are_bounded() {
        assert_ne!(body_of(1), body_of(2));
        assert!((0..10_000).all(|id| body_of(id).len() < 4200));
    }
}
