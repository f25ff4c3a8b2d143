//! A server that plays kas, and a way to run kasctl against it.
//!
//! What it answers depends on the agent's id or the project's, so that one server serves every test:
//! see `get_pods`, `make_request` and `watch_connected_agents`.

use std::{
    collections::{BTreeMap, HashMap},
    convert::Infallible,
    io,
    path::PathBuf,
    pin::{Pin, pin},
    process::Stdio,
    sync::{Arc, Mutex},
    time::Duration,
};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use futures_util::{Stream, StreamExt as _, stream};
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use prost::Message as _;
use proto::{
    gitlab::agent::{
        grpctool::{HttpRequest, HttpResponse, http_request, http_response},
        kubernetes_api::rpc::kubernetes_api_server::{KubernetesApi, KubernetesApiServer},
        prototool::{self, Values},
    },
    google::rpc,
    kas::api::v1::{
        ConnectedAgentInfo, ConnectedAgentsByIdRequest, ConnectedAgentsByIdResponse,
        ConnectedAgentsForProjectRequest, ConnectedAgentsForProjectResponse, GetPodsRequest, GetPodsResponse,
        KasAddress, Pod, UnansweredReplica, WatchConnectedAgentsRequest, WatchConnectedAgentsResponse,
        kas_api_server::{KasApi, KasApiServer},
        watch_connected_agents_response::{Disconnected, Event, SnapshotComplete},
    },
};
use rustls_pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use serde_json::Value;
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _},
    net::{TcpListener, UnixListener},
    process::{Child, Command},
    sync::{broadcast, mpsc, watch},
};
use tonic::{Code, Request, Response, Status, Streaming, body::Body, metadata::MetadataMap};
use tower_service::Service as _;

const SECRET: &[u8] = b"the secret of the API listener..";
/// Longer than anything here takes, shorter than a person waits.
const LIMIT: Duration = Duration::from_secs(30);

type BoxStream<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// Waits, but not for ever.
pub(crate) async fn soon<T>(work: impl Future<Output = T>) -> T {
    tokio::time::timeout(LIMIT, work).await.expect("in time")
}

/// Does what Ctrl-C does.
pub(crate) fn interrupt(child: &Child) {
    let pid = rustix::process::Pid::from_raw(child.id().unwrap().try_into().unwrap()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
}

/// Listens, and answers every connection with these bytes; then closes it, or keeps silent.
pub(crate) async fn answering(answer: &'static [u8], stay: bool) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        let mut open = Vec::new();
        while let Ok((mut io, _)) = listener.accept().await {
            // Closing with bytes unread would reset the connection, and what was written could be lost.
            let mut preface = [0; 24];
            let _ = io.read_exact(&mut preface).await;
            let _ = io.write_all(answer).await;
            if stay {
                open.push(io);
            } else {
                let _ = io.shutdown().await;
                let _ = io.read_to_end(&mut Vec::new()).await;
            }
        }
    });
    format!("grpc://{address}")
}

/// How a run of kasctl ended.
#[derive(Debug)]
pub(crate) struct Run {
    code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Run {
    #[track_caller]
    pub(crate) fn expect_exit(self, code: i32) -> Self {
        assert_eq!(self.code, Some(code), "{self:?}");
        self
    }
}

/// A running server and a directory with its secret.
pub(crate) struct Server {
    pub(crate) address: String,
    pub(crate) dir: tempfile::TempDir,
    state: Arc<State>,
}

impl Server {
    pub(crate) async fn start() -> Self {
        Self::start_with_pings(Duration::from_secs(15)).await
    }

    /// Closes a connection that does not answer a ping within `interval`.
    pub(crate) async fn start_with_pings(interval: Duration) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = format!("grpc://{}", listener.local_addr().unwrap());
        let incoming = stream::unfold(listener, |listener| async {
            let io = listener.accept().await.map(|(io, _)| io);
            Some((io, listener))
        });
        Self::serve(address, tempfile::tempdir().unwrap(), incoming, interval)
    }

    pub(crate) async fn start_unix() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("api.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let incoming = stream::unfold(listener, |listener| async {
            let io = listener.accept().await.map(|(io, _)| io);
            Some((io, listener))
        });
        Self::serve(format!("unix://{}", path.display()), dir, incoming, Duration::from_secs(15))
    }

    /// Has a certificate for `kas.test` only, signed by itself.
    pub(crate) async fn start_tls() -> Self {
        let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
        let dir = tempfile::tempdir().unwrap();
        let own = rcgen::generate_simple_self_signed(["kas.test".to_owned()]).unwrap();
        std::fs::write(dir.path().join("ca.pem"), own.cert.pem()).unwrap();
        let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(own.signing_key.serialize_der()));
        let mut config = rustls::ServerConfig::builder()
            .with_no_client_auth()
            .with_single_cert(vec![own.cert.der().clone()], key)
            .unwrap();
        config.alpn_protocols = vec![b"h2".to_vec()];
        let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(config));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = format!("grpcs://{}", listener.local_addr().unwrap());
        let incoming = stream::unfold((listener, acceptor), |(listener, acceptor)| async {
            loop {
                let (io, _) = listener.accept().await.unwrap();
                // A client that does not trust us is no reason to stop.
                if let Ok(io) = acceptor.accept(io).await {
                    return Some((Ok::<_, io::Error>(io), (listener, acceptor)));
                }
            }
        });
        Self::serve(address, dir, incoming, Duration::from_secs(15))
    }

    fn serve<I>(
        address: String,
        dir: tempfile::TempDir,
        incoming: impl Stream<Item = io::Result<I>> + Send + 'static,
        pings: Duration,
    ) -> Self
    where
        I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        std::fs::write(dir.path().join("secret"), STANDARD.encode(SECRET) + "\n").unwrap();
        let state = Arc::new(State::new());
        let kas = Kas(Arc::clone(&state));
        tokio::spawn(async move {
            let mut incoming = pin!(incoming);
            while let Some(Ok(io)) = incoming.next().await {
                let kas = kas.clone();
                let service = hyper::service::service_fn(move |request| kas.clone().dispatch(request));
                let connection = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
                    .timer(TokioTimer::new())
                    .keep_alive_interval(pings)
                    .keep_alive_timeout(pings)
                    .serve_connection(TokioIo::new(io), service);
                tokio::spawn(connection);
            }
        });
        Self { address, dir, state }
    }

    /// kasctl with this server's address and secret, and an environment that is otherwise empty.
    pub(crate) fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kasctl"));
        command
            .args(args)
            .env_clear()
            .env("KASCTL_ADDRESS", &self.address)
            .env("KASCTL_SECRET_FILE", self.secret_file())
            .stdin(Stdio::null())
            .kill_on_drop(true);
        command
    }

    pub(crate) async fn run(&self, args: &[&str]) -> Run {
        self.run_with(args, |_| {}).await
    }

    pub(crate) async fn run_with(&self, args: &[&str], change: impl FnOnce(&mut Command)) -> Run {
        let mut command = self.command(args);
        change(&mut command);
        let output = soon(command.output()).await.unwrap();
        Run {
            code: output.status.code(),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
        }
    }

    fn secret_file(&self) -> PathBuf {
        self.dir.path().join("secret")
    }

    /// Tells every watch about a new connection, once there is one to tell.
    pub(crate) async fn connect(&self, id: i64, name: &str) {
        self.change(Event::Connected(agent(id, name, 3, 55))).await;
    }

    /// Tells every watch about a connection that ended.
    pub(crate) async fn disconnect(&self, id: i64, connection_id: i64) {
        self.change(Event::Disconnected(Disconnected { id, connection_id })).await;
    }

    async fn change(&self, event: Event) {
        let mut watches = self.state.watches.subscribe();
        soon(watches.wait_for(|open| *open > 0)).await.unwrap();
        self.state.changes.send(event).unwrap();
    }

    /// Waits until the caller of a hanging request has left.
    pub(crate) async fn cancelled(&self) {
        self.state.cancelled.subscribe().wait_for(|cancelled| *cancelled).await.unwrap();
    }

    pub(crate) fn pod_questions(&self) -> Vec<GetPodsRequest> {
        self.state.seen.lock().unwrap().pods.clone()
    }

    /// The `jti` of each token that was accepted.
    pub(crate) fn token_ids(&self) -> Vec<String> {
        self.state.seen.lock().unwrap().token_ids.clone()
    }

    /// The values of this key in the last call.
    pub(crate) fn metadata(&self, key: &str) -> Vec<String> {
        let seen = self.state.seen.lock().unwrap();
        seen.metadata.get_all(key).iter().map(|value| value.to_str().unwrap().to_owned()).collect()
    }

    pub(crate) fn verify(&self, token: &str) -> Result<Value, jsonwebtoken::errors::Error> {
        verify(token)
    }
}

fn verify(token: &str) -> Result<Value, jsonwebtoken::errors::Error> {
    let mut rules = jsonwebtoken::Validation::new(jsonwebtoken::Algorithm::HS256);
    rules.set_audience(&["gitlab-kas"]);
    rules.set_required_spec_claims(&["exp", "nbf", "aud", "iss"]);
    rules.validate_nbf = true;
    rules.leeway = 0;
    let key = jsonwebtoken::DecodingKey::from_secret(SECRET);
    Ok(jsonwebtoken::decode::<Value>(token, &key, &rules)?.claims)
}

struct State {
    seen: Mutex<Seen>,
    changes: broadcast::Sender<Event>,
    /// How many watches have sent their snapshot.
    watches: watch::Sender<usize>,
    cancelled: watch::Sender<bool>,
}

#[derive(Default)]
struct Seen {
    pods: Vec<GetPodsRequest>,
    token_ids: Vec<String>,
    metadata: MetadataMap,
}

impl State {
    fn new() -> Self {
        Self {
            seen: Mutex::default(),
            changes: broadcast::Sender::new(16),
            watches: watch::Sender::new(0),
            cancelled: watch::Sender::new(false),
        }
    }

    fn check(&self, metadata: &MetadataMap) -> Result<(), Status> {
        let token =
            metadata.get("authorization").and_then(|value| value.to_str().ok()?.strip_prefix("Bearer "));
        let claims = token.and_then(|token| verify(token).ok());
        let claims = claims.ok_or_else(|| Status::unauthenticated("JWT validation failed"))?;
        let mut seen = self.seen.lock().unwrap();
        seen.token_ids.push(claims["jti"].as_str().unwrap().to_owned());
        seen.metadata = metadata.clone();
        Ok(())
    }
}

fn agent(id: i64, name: &str, project_id: i64, connection_id: i64) -> ConnectedAgentInfo {
    let since = runtime::clock::wall() - Duration::from_secs(7200);
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
    }
}

fn with_outcome(code: Code, outcome: &str) -> Status {
    let info = rpc::ErrorInfo {
        reason: "AGENT".to_owned(),
        domain: "kas".to_owned(),
        metadata: BTreeMap::from([("kas.outcome".to_owned(), outcome.to_owned())]),
    };
    let detail = prost_types::Any {
        type_url: "type.googleapis.com/google.rpc.ErrorInfo".to_owned(),
        value: info.encode_to_vec(),
    };
    let details = rpc::Status { code: code as i32, message: outcome.to_owned(), details: vec![detail] };
    Status::with_details(code, outcome, details.encode_to_vec().into())
}

#[derive(Clone)]
struct Kas(Arc<State>);

impl Kas {
    async fn dispatch(self, request: http::Request<Incoming>) -> Result<http::Response<Body>, Infallible> {
        if request.uri().path().starts_with("/kas.api.v1.KasApi/") {
            KasApiServer::new(self).call(request).await
        } else {
            KubernetesApiServer::new(self).call(request).await
        }
    }
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

    /// Agent 7 has five pods; 50 never answers; 51 ran out of time; 70 fails at its second page; 71 repeats a
    /// page; every other agent is not connected.
    async fn get_pods(&self, request: Request<GetPodsRequest>) -> Result<Response<GetPodsResponse>, Status> {
        self.0.check(request.metadata())?;
        let asked = request.into_inner();
        self.0.seen.lock().unwrap().pods.push(asked.clone());
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
            70 if start == 0 => one("1"),
            70 => return Err(Status::unavailable("draining")),
            71 => one("same"),
            _ => return Err(Status::not_found("no tunnel")),
        }))
    }

    type WatchConnectedAgentsStream = BoxStream<WatchConnectedAgentsResponse>;

    /// Project 600 misses a replica; 601 ends in the middle; other projects and agents are filters.
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
            _ => vec![agent(2, "stage", 4, 22), agent(1, "prod", 3, i64::MAX)],
        }
        .into_iter()
        .filter(|agent| asked.project_id == 0 || agent.project_id == asked.project_id)
        .filter(|agent| asked.agent_id == 0 || agent.id == asked.agent_id)
        .map(Event::Connected)
        .collect();
        let unanswered = (asked.project_id == 600).then(|| UnansweredReplica {
            address: Some(KasAddress { ip: "10.0.0.9".to_owned(), port: 8155 }),
            reason: "connection refused".to_owned(),
        });
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

/// Tells that a hanging request was dropped.
struct OnDrop(Arc<State>);

impl Drop for OnDrop {
    fn drop(&mut self) {
        self.0.cancelled.send_replace(true);
    }
}

#[async_trait::async_trait]
impl KubernetesApi for Kas {
    type MakeRequestStream = BoxStream<HttpResponse>;

    /// Agent 7 answers by path; 8 breaks in the middle; 9 leaves the end out; 10 is busy; 11 has no manners.
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
            _ => return Err(Status::not_found("no tunnel")),
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
/// `None`: the caller left.
type Done = Option<Result<(), Status>>;

async fn refuse(send: &Answer) -> Done {
    send.send(Ok(header(404, "404 Not Found", "text/plain"))).await.ok()?;
    send.send(Ok(data("missing"))).await.ok()?;
    send.send(Ok(trailer())).await.ok().map(Ok)
}

/// Sends each piece back as it comes.
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

/// Answers with what was asked.
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
