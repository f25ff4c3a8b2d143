//! A simulated replica of GitLab's kas 14.1, as other replicas see it: its entries in Redis, its requests on
//! the private API, and its responses there.
//!
//! It follows the wire protocol of the release. The program itself is no test dependency, because its module
//! cannot be downloaded where tests run. Its agents are simulated, too: a tunnel is a number.

use std::{
    collections::HashMap,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use bytes::{Buf as _, Bytes, BytesMut};
use futures_util::future::{Either, select};
use grpc::{Code, Status};
use h2::{RecvStream, SendStream, server::SendResponse};
use http::{HeaderMap, Request, Response};
use jsonwebtoken::{Algorithm, DecodingKey, Validation};
use parking_lot::{Mutex, MutexGuard};
use prost::Message as _;
use prost_types::{Any, Timestamp};
use proto::gitlab::agent::{
    agent_tracker::ConnectedAgentInfo,
    kas::{GatewayKasResponse, StartStreaming, gateway_kas_response::Msg},
    modshared::AgentMeta,
    prototool::Values,
    redistool::ExpiringValue,
    reverse_tunnel::{
        rpc::{CloseSend, Message, RequestInfo, connect_request, connect_response},
        tracker::TunnelInfo,
    },
};
use rand::seq::SliceRandom as _;
use serde_json::json;
use testkit::{
    caller::Jwt,
    handler::{self, Requests, Wire, to_kas},
    link::{Link, Next, Stream},
    redis::Redis,
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpListener,
    sync::watch,
    task::{AbortHandle, JoinSet},
};
use tokio_rustls::{TlsAcceptor, rustls};

/// How long an entry is valid.
const TTL: Duration = Duration::from_secs(300);
/// How often a waiting request checks again.
const TICK: Duration = Duration::from_secs(3);
const TUNNEL: &str = "type.googleapis.com/gitlab.agent.reverse_tunnel.tracker.TunnelInfo";
const CONNECTED: &str = "type.googleapis.com/gitlab.agent.agent_tracker.ConnectedAgentInfo";

/// A running replica. Dropping it is a kill: its entries stay in Redis.
#[derive(Debug)]
pub(crate) struct Replica14 {
    /// Its URL in Redis.
    pub(crate) url: String,
    pub(crate) seen: Arc<Seen>,
    tracker: Arc<Tracker>,
    secret: Vec<u8>,
    task: AbortHandle,
}

/// What it received.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    /// Requests that its agents received.
    pub(crate) requests: Requests,
    /// Headers of all requests on its private API.
    headers: Mutex<Vec<HeaderMap>>,
    /// Requests without `StartStreaming`.
    pub(crate) given_up: AtomicUsize,
    /// Requests whose stream was reset after `StartStreaming`.
    pub(crate) cancelled: AtomicUsize,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock()
}

impl Seen {
    /// Returns the headers of each stream.
    pub(crate) fn headers(&self) -> Vec<HeaderMap> {
        lock(&self.headers).clone()
    }
}

/// Its idle tunnels and their entries in Redis.
#[derive(Debug)]
struct Tracker {
    redis: redis::Client,
    url: String,
    idle: Mutex<HashMap<i64, Vec<i64>>>,
    changed: watch::Sender<()>,
}

fn key(table: &str, id: i64) -> Vec<u8> {
    [b"gitlab-kas:", table.as_bytes(), b":", &id.to_le_bytes()].concat()
}

fn expiring(type_url: &str, value: Vec<u8>) -> Result<Vec<u8>> {
    let at = process::clock::wall() + TTL;
    let expires_at =
        Some(Timestamp { seconds: i64::try_from(at.as_secs())?, nanos: i32::try_from(at.subsec_nanos())? });
    let value = Some(Any { type_url: type_url.to_owned(), value });
    Ok(ExpiringValue { expires_at, value }.encode_to_vec())
}

/// Returns the valid entries of a hash, as 14.1 reads it.
fn unexpired(fields: Vec<(Vec<u8>, Vec<u8>)>, type_url: &str) -> Vec<Vec<u8>> {
    let now = i64::try_from(process::clock::wall().as_secs()).unwrap_or(i64::MAX);
    let read = |bytes: Vec<u8>| {
        let entry = ExpiringValue::decode(&*bytes).ok()?;
        let over = entry.expires_at.is_some_and(|at| at.seconds < now);
        entry.value.filter(|any| !over && any.type_url == type_url).map(|any| any.value)
    };
    fields.into_iter().filter_map(|(_, bytes)| read(bytes)).collect()
}

impl Tracker {
    async fn connection(&self) -> Result<redis::aio::MultiplexedConnection> {
        Ok(self.redis.get_multiplexed_async_connection().await?)
    }

    async fn set(&self, key: &[u8], field: i64, value: &[u8]) -> Result<()> {
        let mut connection = self.connection().await?;
        let ttl = i64::try_from(TTL.as_millis())?;
        redis::pipe()
            .atomic()
            .hset(key, field, value)
            .pexpire(key, ttl)
            .exec_async(&mut connection)
            .await
            .context("HSET")
    }

    async fn all(&self, key: &[u8]) -> Result<Vec<(Vec<u8>, Vec<u8>)>> {
        let mut connection = self.connection().await?;
        Ok(redis::cmd("HGETALL").arg(key).query_async(&mut connection).await?)
    }

    /// Adds an idle tunnel.
    async fn park(&self, agent: i64) -> Result<()> {
        let id = rand::random_range(0..=i64::MAX);
        let info = TunnelInfo {
            agent_descriptor: Some(handler::descriptor()),
            connection_id: id,
            agent_id: agent,
            kas_url: self.url.clone(),
        };
        let key = key("tunnel_tracker:conn_by_agent_id", agent);
        self.set(&key, id, &expiring(TUNNEL, info.encode_to_vec())?).await?;
        lock(&self.idle).entry(agent).or_default().push(id);
        self.changed.send_replace(());
        Ok(())
    }

    /// Takes an idle tunnel, and waits for one without a limit.
    async fn take(&self, agent: i64) -> Result<()> {
        let mut changed = self.changed.subscribe();
        loop {
            let id = lock(&self.idle).get_mut(&agent).and_then(Vec::pop);
            if let Some(id) = id {
                let mut connection = self.connection().await?;
                let key = key("tunnel_tracker:conn_by_agent_id", agent);
                redis::cmd("HDEL").arg(key).arg(id).exec_async(&mut connection).await?;
                return Ok(());
            }
            changed.changed().await?;
        }
    }
}

impl Replica14 {
    /// Starts one with the secret of the private API.
    pub(crate) async fn start(redis: &Redis, secret: &[u8]) -> Result<Self> {
        Self::start_with(redis, secret, None).await
    }

    /// Like [`start`](Self::start); with `tls`, its private API has a certificate, and its URL says so.
    pub(crate) async fn start_with(
        redis: &Redis,
        secret: &[u8],
        tls: Option<Arc<rustls::ServerConfig>>,
    ) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let scheme = if tls.is_some() { "grpcs" } else { "grpc" };
        let url = format!("{scheme}://{}", listener.local_addr()?);
        let tracker = Arc::new(Tracker {
            redis: redis::Client::open(format!("redis://{}", redis.address()))?,
            url: url.clone(),
            idle: Mutex::default(),
            changed: watch::Sender::new(()),
        });
        let seen = Arc::<Seen>::default();
        let gateway =
            Gateway { tracker: Arc::clone(&tracker), seen: Arc::clone(&seen), secret: secret.into() };
        let task = tokio::spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                let (gateway, tls) = (gateway.clone(), tls.clone());
                connections.spawn(async move {
                    match tls {
                        None => gateway.serve(stream).await,
                        Some(config) => gateway.serve(TlsAcceptor::from(config).accept(stream).await?).await,
                    }
                });
            }
        });
        Ok(Self { url, seen, tracker, secret: secret.to_vec(), task: task.abort_handle() })
    }

    /// Connects an agent with this many tunnels.
    pub(crate) async fn agent(&self, agent: i64, tunnels: usize) -> Result<()> {
        for _ in 0..tunnels {
            self.tracker.park(agent).await?;
        }
        let id = rand::random_range(0..=i64::MAX);
        let info = ConnectedAgentInfo {
            agent_meta: Some(AgentMeta {
                version: "v14.1.1".to_owned(),
                commit_id: "abc".to_owned(),
                pod_namespace: "gitlab-agent".to_owned(),
                pod_name: "agentk-14".to_owned(),
            }),
            connected_at: Some(Timestamp { seconds: 1_600_000_000, nanos: 0 }),
            connection_id: id,
            agent_id: agent,
            project_id: 10,
        };
        let value = expiring(CONNECTED, info.encode_to_vec())?;
        self.tracker.set(&key("agent_tracker:conn_by_agent_id", agent), id, &value).await?;
        self.tracker.set(&key("agent_tracker:conn_by_project_id", 10), id, &value).await
    }

    /// Lists the connections of an agent, as `GetConnectedAgents` does.
    pub(crate) async fn connected(&self, agent: i64) -> Result<Vec<ConnectedAgentInfo>> {
        let fields = self.tracker.all(&key("agent_tracker:conn_by_agent_id", agent)).await?;
        unexpired(fields, CONNECTED).iter().map(|bytes| Ok(ConnectedAgentInfo::decode(&**bytes)?)).collect()
    }

    /// Returns the URLs of an agent's entries, in random order.
    pub(crate) async fn urls(&self, agent: i64) -> Result<Vec<String>> {
        let fields = self.tracker.all(&key("tunnel_tracker:conn_by_agent_id", agent)).await?;
        let mut urls = Vec::new();
        for bytes in unexpired(fields, TUNNEL) {
            urls.push(TunnelInfo::decode(&*bytes)?.kas_url);
        }
        urls.retain(|url| !url.is_empty());
        urls.shuffle(&mut rand::rng());
        Ok(urls)
    }

    /// Routes a request: asks the replicas of its entries one after the other, and all again every 3 s.
    pub(crate) async fn route(&self, agent: i64, method: &str, headers: &[(&str, &str)]) -> Result<Routed> {
        loop {
            for url in self.urls(agent).await? {
                if let Ok(Some(routed)) = self.ask(&url, agent, method, headers).await {
                    return Ok(routed);
                }
            }
            tokio::time::sleep(TICK).await;
        }
    }

    /// Asks one replica; `None`: the stream ended with OK, and another one is to be asked.
    pub(crate) async fn ask(
        &self,
        url: &str,
        agent: i64,
        method: &str,
        headers: &[(&str, &str)],
    ) -> Result<Option<Routed>> {
        let now = process::clock::wall().as_secs_f64();
        let jwt = Jwt::new(&self.secret)
            .claim("iss", json!("gitlab-kas"))
            .claim("aud", json!(["gitlab-kas"]))
            .claim("iat", json!(now))
            .claim("nbf", json!(now - 5.0))
            .claim("exp", json!(now + 5.0))
            .claim("jti", serde_json::Value::Null)
            .encode();
        let address: SocketAddr = url.strip_prefix("grpc://").context("a scheme that 14.1 dials")?.parse()?;
        let link = Link::connect(address).await?;
        let mut request = Request::post(format!("http://{address}{method}"))
            .header("content-type", "application/grpc+proto")
            .header("user-agent", "grpc-go/1.39.0")
            .header("te", "trailers")
            .header("authorization", format!("Bearer {jwt}"))
            .header("kas-hop-routing-agent-id", agent);
        for (key, value) in headers {
            request = request.header(*key, *value);
        }
        let mut stream = link.open(request.body(())?).await?;
        let (_, head) = stream.head().await.map_err(|reason| anyhow::anyhow!("{reason:?}"))?.clone();
        if let Some(status) = Status::from_headers(&head) {
            ensure!(status.code() == Code::Ok, "{status}");
            return Ok(None);
        }
        match stream.next_unbounded().await {
            Next::Message(message) => {
                let message = GatewayKasResponse::decode(message)?.msg;
                ensure!(matches!(message, Some(Msg::TunnelReady(_))), "{message:?}");
            }
            Next::Trailers(trailers) => {
                let status = Status::from_headers(&trailers).context("a status")?;
                ensure!(status.code() == Code::Ok, "{status}");
                return Ok(None);
            }
            other => bail!("{other:?}"),
        }
        Ok(Some(Routed { stream, last: 1 }))
    }

    /// Routes a request and returns the response.
    pub(crate) async fn call(
        &self,
        agent: i64,
        method: &str,
        headers: &[(&str, &str)],
        messages: &[&[u8]],
    ) -> Result<Answer14> {
        let mut routed = self.route(agent, method, headers).await?;
        routed.start().await?;
        for message in messages {
            routed.send(message).await?;
        }
        routed.half_close();
        routed.answer().await
    }
}

impl Drop for Replica14 {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// A request that has a tunnel at another replica.
pub(crate) struct Routed {
    stream: Stream,
    /// The latest field.
    last: u32,
}

/// The response to a request.
#[derive(Debug, Default)]
pub(crate) struct Answer14 {
    pub(crate) header: HashMap<String, Values>,
    pub(crate) messages: Vec<Bytes>,
    pub(crate) trailer: HashMap<String, Values>,
    /// The error of the agent.
    pub(crate) error: Option<proto::google::rpc::Status>,
    /// How the stream itself ended.
    pub(crate) status: Option<Status>,
}

impl Routed {
    /// Returns the stream.
    pub(crate) fn stream(&mut self) -> &mut Stream {
        &mut self.stream
    }

    /// Sends `StartStreaming`.
    pub(crate) async fn start(&mut self) -> Result<()> {
        let sent = self.stream.send_message(&StartStreaming {}).await;
        sent.map_err(|reason| anyhow::anyhow!("{reason:?}"))
    }

    pub(crate) async fn send(&mut self, message: &[u8]) -> Result<()> {
        let sent = self.stream.send(testkit::caller::frame(message)).await;
        sent.map_err(|reason| anyhow::anyhow!("{reason:?}"))
    }

    pub(crate) fn half_close(&mut self) {
        // The stream may have ended; then its status is more useful.
        let _ = self.stream.half_close();
    }

    /// Waits for the next message; `Err`: how the stream ended. Checks the order that 14.1 demands.
    pub(crate) async fn next(&mut self) -> Result<std::result::Result<Msg, Status>> {
        match self.stream.next_unbounded().await {
            Next::Message(message) => {
                let message = GatewayKasResponse::decode(message)?.msg.context("a field")?;
                let (field, after): (u32, &[u32]) = match &message {
                    Msg::TunnelReady(_) => (1, &[]),
                    Msg::Header(_) => (2, &[1]),
                    Msg::Message(_) => (3, &[2, 3]),
                    Msg::Trailer(_) => (4, &[2, 3]),
                    Msg::Error(_) => (5, &[4]),
                    Msg::NoTunnel(_) => bail!("a field that 14.1 does not know"),
                };
                ensure!(after.contains(&self.last), "field {field} after {}", self.last);
                self.last = field;
                Ok(Ok(message))
            }
            Next::Trailers(trailers) => {
                let status = Status::from_headers(&trailers).context("a status")?;
                let may_end = status.code() != Code::Ok || self.last >= 4;
                ensure!(may_end, "it ends with OK after {}", self.last);
                Ok(Err(status))
            }
            Next::End => bail!("an end without a status"),
            Next::Reset(reason) => Ok(Err(Status::new(Code::Unavailable, format!("reset: {reason:?}")))),
        }
    }

    /// Waits for the rest of the response.
    pub(crate) async fn answer(&mut self) -> Result<Answer14> {
        let mut answer = Answer14::default();
        loop {
            match self.next().await? {
                Ok(Msg::Header(header)) => answer.header = header.meta.into_iter().collect(),
                Ok(Msg::Message(message)) => answer.messages.push(message.data),
                Ok(Msg::Trailer(trailer)) => answer.trailer = trailer.meta.into_iter().collect(),
                Ok(Msg::Error(error)) => answer.error = error.status,
                Ok(other) => bail!("{other:?}"),
                Err(status) => {
                    answer.status = Some(status);
                    return Ok(answer);
                }
            }
        }
    }
}

/// Its private API.
#[derive(Clone)]
struct Gateway {
    tracker: Arc<Tracker>,
    seen: Arc<Seen>,
    secret: Arc<[u8]>,
}

impl Gateway {
    async fn serve(self, stream: impl AsyncRead + AsyncWrite + Unpin) -> Result<()> {
        let mut connection = h2::server::handshake(stream).await?;
        let mut streams = JoinSet::new();
        while let Some(request) = connection.accept().await {
            let (request, respond) = request?;
            lock(&self.seen.headers).push(request.headers().clone());
            let gateway = self.clone();
            streams.spawn(async move {
                // A broken stream is recorded elsewhere.
                let _ = gateway.answer(request, respond).await;
            });
        }
        Ok(())
    }

    /// Checks a token like 14.1: without leeway.
    fn is_authentic(&self, headers: &HeaderMap) -> bool {
        let mut validation = Validation::new(Algorithm::HS256);
        validation.set_audience(&["gitlab-kas"]);
        validation.set_issuer(&["gitlab-kas"]);
        validation.set_required_spec_claims(&["iss"]);
        validation.validate_nbf = true;
        validation.leeway = 0;
        let token =
            headers.get("authorization").and_then(|value| value.to_str().ok()?.strip_prefix("Bearer "));
        let key = DecodingKey::from_secret(&self.secret);
        token.is_some_and(|t| jsonwebtoken::decode::<serde_json::Value>(t, &key, &validation).is_ok())
    }

    async fn answer(self, request: Request<RecvStream>, mut respond: SendResponse<Bytes>) -> Result<()> {
        let headers = request.headers().clone();
        let only = |code: u8, message: &'static str| {
            let response = Response::builder().header("content-type", "application/grpc");
            response.header("grpc-status", code.to_string()).header("grpc-message", message).body(())
        };
        if !self.is_authentic(&headers) {
            respond.send_response(only(16, "JWT validation failed")?, true)?;
            return Ok(());
        }
        let agent =
            headers.get("kas-hop-routing-agent-id").and_then(|value| value.to_str().ok()?.parse().ok());
        let Some(agent) = agent else {
            respond.send_response(only(3, "Invalid kas-hop-routing-agent-id")?, true)?;
            return Ok(());
        };
        let method = request.uri().path().to_owned();
        let body = request.into_body();
        {
            let take = std::pin::pin!(self.tracker.take(agent));
            let gone = std::pin::pin!(std::future::poll_fn(|cx| respond.poll_reset(cx)));
            match select(take, gone).await {
                Either::Left((taken, _)) => taken?,
                Either::Right(_) => return Ok(()),
            }
        }
        let response = Response::builder().header("content-type", "application/grpc").body(())?;
        let mut send = respond.send_response(response, false)?;
        let ready = GatewayKasResponse { msg: Some(Msg::TunnelReady(Default::default())) };
        write(&mut send, grpc::encode(&ready)).await?;
        let mut wire = GatewayWire { send, body, read: BytesMut::new(), closed: false, cancelled: false };
        let started = wire.message().await;
        if started.is_none() {
            self.seen.given_up.fetch_add(1, Ordering::SeqCst);
            if wire.closed {
                end(&mut wire.send)?;
            }
            return self.tracker.park(agent).await;
        }
        let info = RequestInfo { method_name: method, meta: meta_of(&headers) };
        self.seen.requests.push(info.clone());
        handler::serve(&mut wire, &info, false).await;
        // Both directions must have ended.
        while !wire.closed && wire.message().await.is_some() {}
        if wire.cancelled {
            self.seen.cancelled.fetch_add(1, Ordering::SeqCst);
        } else {
            end(&mut wire.send)?;
        }
        // The agent opens the next tunnel at once.
        self.tracker.park(agent).await
    }
}

/// Returns what grpc-go presents as metadata, without hop-by-hop headers; the credential is included.
fn meta_of(headers: &HeaderMap) -> std::collections::BTreeMap<String, Values> {
    let consumed = ["te", "grpc-timeout", "grpc-encoding", "grpc-accept-encoding"];
    let mut meta = std::collections::BTreeMap::<String, Values>::new();
    for (key, value) in headers {
        if !key.as_str().starts_with("kas-hop-") && !consumed.contains(&key.as_str()) {
            let value = String::from_utf8_lossy(value.as_bytes()).into_owned();
            meta.entry(key.to_string()).or_default().value.push(value);
        }
    }
    meta
}

fn end(send: &mut SendStream<Bytes>) -> Result<()> {
    let mut trailers = HeaderMap::new();
    Status::write_ok(&mut trailers);
    Ok(send.send_trailers(trailers)?)
}

async fn write(send: &mut SendStream<Bytes>, mut bytes: Bytes) -> Result<()> {
    while !bytes.is_empty() {
        send.reserve_capacity(bytes.len());
        let n = match std::future::poll_fn(|cx| send.poll_capacity(cx)).await {
            Some(n) => n?.min(bytes.len()),
            None => bail!("the stream is over"),
        };
        send.send_data(bytes.split_to(n), false)?;
    }
    Ok(())
}

/// A request as its agent sees it.
struct GatewayWire {
    send: SendStream<Bytes>,
    body: RecvStream,
    read: BytesMut,
    closed: bool,
    cancelled: bool,
}

impl GatewayWire {
    /// Waits for a message; `None`: the stream is half-closed, or was reset.
    async fn message(&mut self) -> Option<Bytes> {
        loop {
            if let [_, a, b, c, d, ..] = *self.read {
                let len = u32::from_be_bytes([a, b, c, d]) as usize;
                if self.read.len() >= grpc::PREFIX_LEN + len {
                    self.read.advance(grpc::PREFIX_LEN);
                    return Some(self.read.split_to(len).freeze());
                }
            }
            match self.body.data().await {
                Some(Ok(data)) => {
                    let _ = self.body.flow_control().release_capacity(data.len());
                    self.read.extend_from_slice(&data);
                }
                Some(Err(_)) => {
                    (self.closed, self.cancelled) = (true, true);
                    return None;
                }
                None => {
                    // h2 shows a reset with CANCEL as an end.
                    self.cancelled = !self.body.is_end_stream();
                    self.closed = true;
                    return None;
                }
            }
        }
    }
}

impl Wire for GatewayWire {
    async fn recv(&mut self) -> Option<connect_response::Msg> {
        if self.closed {
            // Only a reset can follow.
            let reset = std::future::poll_fn(|cx| self.send.poll_reset(cx)).await;
            self.cancelled = reset.is_ok();
            return None;
        }
        match self.message().await {
            Some(data) => Some(connect_response::Msg::Message(Message { data })),
            None if self.cancelled => None,
            None => Some(connect_response::Msg::CloseSend(CloseSend {})),
        }
    }

    async fn send(&mut self, msg: connect_request::Msg) -> bool {
        // Fields 2 to 5 are identical.
        write(&mut self.send, grpc::encode(&to_kas(msg))).await.is_ok()
    }
}
