//! A client that knows all replicas. It sends a request once more, to another replica, only if the first one
//! certainly did not run it.

use std::{error::Error as _, net::SocketAddr, sync::Arc, time::Duration};

use bytes::Bytes;
use grpc::{Code, Status};
use history::{Attempt, Kind, Micros, Outcome, Request};
use http::{HeaderMap, Method, StatusCode, header};
use http_body_util::{BodyExt as _, Full};
use hyper::client::conn::http2;
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
    cluster_server,
    hash::Counted,
};

/// A TCP connection to a replica is made within this, or the replica counts as not there.
const DIAL: Duration = Duration::from_secs(1);
/// How much longer than the deadline a client waits for the response that says so.
const AFTER: Duration = Duration::from_millis(800);
/// A token of a caller is used for this long. It is valid for longer.
const TOKEN: Duration = Duration::from_secs(300);
/// A second attempt is made only if this much of the deadline is left.
const LEFT: Duration = Duration::from_millis(50);
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

type Sender = http2::SendRequest<Full<Bytes>>;

/// Clients of all replicas, with one connection to each listener.
#[derive(Debug)]
pub(crate) struct Client {
    doors: Vec<Door>,
    secret: Mutex<Vec<u8>>,
    user: String,
    token: Mutex<Option<(Instant, String)>>,
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
        let links = doors.iter().map(|_| Default::default()).collect();
        Arc::new(Self { doors, secret: Mutex::new(secret), user, token: Mutex::default(), links })
    }

    /// Returns a token of GitLab for a call of the API.
    pub(crate) fn token(&self) -> String {
        let mut kept = self.token.lock();
        match &*kept {
            Some((since, token)) if since.elapsed() < TOKEN => token.clone(),
            _ => {
                let token = Jwt::new(&self.secret.lock()).claim("exp", json!(now() + 3600)).encode();
                *kept = Some((Instant::now(), token.clone()));
                token
            }
        }
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
        request: http::Request<Full<Bytes>>,
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
                && record.attempts.len() < 2
                && self.doors.len() > 1
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
        let request =
            http::Request::post(format!("http://{}/kas.bench.v1.Bench/Echo", self.doors[replica].api))
                .header("content-type", "application/grpc")
                .header("te", "trailers")
                .header("authorization", format!("Bearer {}", self.token()))
                .header("kas-agent-id", agent)
                .header("x-gitlab-correlation-id", format!("{id:032x}"))
                .header("grpc-timeout", format!("{}m", left.as_millis().max(1)))
                .body(Full::new(sent));
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
            .body(Full::new(sent));
        let request = match request {
            Ok(request) => request,
            Err(error) => return Ended::new(Outcome::Refused, error.to_string()),
        };
        match self.exchange(replica, true, request, until).await {
            Err(ended) => ended,
            Ok((status, headers, body, _)) => {
                // A POST that was not started is to be repeated; one that may have run is not.
                let repeat = headers.contains_key(header::RETRY_AFTER);
                let outcome = match status {
                    StatusCode::CREATED => Outcome::Ok,
                    StatusCode::SERVICE_UNAVAILABLE | StatusCode::TOO_MANY_REQUESTS if repeat => {
                        Outcome::NotStarted
                    }
                    StatusCode::BAD_GATEWAY | StatusCode::GATEWAY_TIMEOUT => Outcome::Unknown,
                    status if status.is_client_error() => Outcome::Refused,
                    _ => Outcome::Unknown,
                };
                Ended {
                    outcome,
                    detail: format!("{status}: {}", String::from_utf8_lossy(&body)),
                    received: (outcome == Outcome::Ok).then(|| Counted::whole(&body)),
                }
            }
        }
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
            .body(Full::new(Bytes::new()));
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

    /// Opens an upgraded connection, sends a byte now and then, and checks that it comes back. Returns its
    /// record when it ends, or `stop` is cancelled.
    pub(crate) async fn exec(
        &self,
        id: u64,
        agent: i64,
        replica: usize,
        stop: tokio_util::sync::CancellationToken,
    ) -> Request {
        let mut record = Request::new(id, agent, Kind::Upgrade, clock::now());
        let mut sent = Counted::default();
        let ended = tokio::select! {
            ended = self.terminal(id, agent, replica, &mut record.phases, &mut sent) => ended,
            () = stop.cancelled() => Ended::new(Outcome::Cancelled, ""),
        };
        record.sent = Some(sent.bytes(false));
        record.received = ended.received;
        record.detail = ended.detail;
        record.ended(clock::now(), ended.outcome)
    }

    async fn terminal(
        &self,
        id: u64,
        agent: i64,
        replica: usize,
        phases: &mut Vec<(String, Micros)>,
        sent: &mut Counted,
    ) -> Ended {
        let address = self.doors[replica].kubernetes;
        let opened = timeout(DIAL * 10, async {
            let mut stream = TcpStream::connect(address).await?;
            stream.set_nodelay(true)?;
            let request = format!(
                "POST /agents/{agent}/api/v1/namespaces/chaos/pods/x-{id}/exec?command=cat&stdin=true HTTP/1.1\r\n\
                 Host: {address}\r\nAuthorization: Bearer {}\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n\
                 X-Stream-Protocol-Version: v4.channel.k8s.io\r\nContent-Length: 0\r\n\r\n",
                self.user
            );
            stream.write_all(request.as_bytes()).await?;
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") && head.len() < MAX_HEAD {
                head.push(stream.read_u8().await?);
            }
            std::io::Result::Ok((stream, head))
        });
        let (mut stream, head) = match opened.await {
            Ok(Ok(opened)) => opened,
            Ok(Err(error)) if error.kind() == std::io::ErrorKind::ConnectionRefused => {
                return Ended::new(Outcome::NotStarted, error.to_string());
            }
            Ok(Err(error)) => return Ended::new(Outcome::Unknown, error.to_string()),
            Err(_) => return Ended::new(Outcome::Unknown, "no answer in time"),
        };
        if !head.starts_with(b"HTTP/1.1 101 ") {
            let line = String::from_utf8_lossy(&head).lines().next().unwrap_or_default().to_owned();
            return Ended::new(Outcome::Unknown, line);
        }
        phases.push(("upgraded".to_owned(), clock::now()));
        let mut back = [0; 8];
        for number in 0_u64.. {
            let ping = number.to_be_bytes();
            sent.push(&ping);
            let echoed = timeout(DIAL * 10, async {
                stream.write_all(&ping).await?;
                stream.read_exact(&mut back).await
            });
            match echoed.await {
                Ok(Ok(_)) if back == ping => {}
                Ok(Ok(_)) => {
                    let count = (number + 1) * 8;
                    let wrong_at = Some(number * 8);
                    let received = Some(history::Bytes { count, hash: 0, clean: false, wrong_at });
                    return Ended { received, ..Ended::new(Outcome::Error, "other bytes came back") };
                }
                Ok(Err(error)) => return Ended::new(Outcome::Unknown, error.to_string()),
                Err(_) => return Ended::new(Outcome::Unknown, "nothing came back in time"),
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        Ended::new(Outcome::Ok, "")
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
    fn payloads_differ_and_are_bounded() {
        assert_ne!(body_of(1), body_of(2));
        assert!((0..10_000).all(|id| body_of(id).len() < 4200));
    }
}
