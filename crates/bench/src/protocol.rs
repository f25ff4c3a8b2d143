//! The protocol between a benchmark and the load client: one JSON value per line, commands on the standard
//! input of the client, events on its standard output.

use std::{io::Write as _, net::SocketAddr, path::PathBuf};

use serde::{Deserialize, Serialize};

/// A command to the client. It runs one at a time.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum ClientCommand {
    /// Make calls. Events: [`ClientEvent::Begin`], [`ClientEvent::End`], [`ClientEvent::Loaded`].
    Load(Load),
    /// Make HTTP requests. Events as of [`Load`](Self::Load).
    Http(HttpLoad),
    /// Exchange bytes over upgraded connections. Events as of [`Load`](Self::Load).
    Upgrades(UpgradeLoad),
    /// Make HTTP requests while a replica leaves. Events as of [`Load`](Self::Load).
    Leaving(LeavingLoad),
    /// Open watches or upgraded connections on which nothing happens, and keep them open. Event:
    /// [`ClientEvent::Connected`].
    Idle(Idle),
    /// Continue after [`ClientEvent::Begin`] of a [`Span::Count`].
    Go,
    /// Connect idle agents and keep them connected. Event: [`ClientEvent::Connected`].
    Agents(Agents),
    /// Make calls that wait for agents, then connect the agents. Event: [`ClientEvent::Woken`].
    Waiters(Waiters),
}

/// An event that the client reports.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum ClientEvent {
    /// The warm-up is over and the measurement begins.
    Begin,
    /// The measurement is over, and the connections are being closed.
    End,
    /// The result of a load.
    Loaded(Loaded),
    /// All agents are connected, or all requests are open.
    Connected,
    /// The result of [`ClientCommand::Waiters`].
    Woken(Woken),
    /// The command failed; the client accepts another one.
    Failed(String),
}

/// Calls to one server.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Load {
    /// The server.
    pub(super) target: Target,
    /// The method.
    pub(super) work: Work,
    /// Number of connections, over which the callers are distributed.
    pub(super) connections: usize,
    /// Number of callers. Each has one call open at a time.
    pub(super) callers: usize,
    /// The duration.
    pub(super) span: Span,
    /// Adds a caller on the first connection that reads only the first bytes of a download.
    pub(super) stalled: bool,
}

/// The server of a load.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Target {
    /// Its address.
    pub(super) address: SocketAddr,
    /// Metadata of the calls.
    pub(super) metadata: Option<Metadata>,
}

/// The metadata that kas needs.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Metadata {
    /// The agent that answers.
    pub(super) agent: i64,
    /// The file with the secret (base64) that tokens are signed with.
    pub(super) secret_file: PathBuf,
    /// The tokens of the calls.
    pub(super) tokens: Tokens,
}

/// The tokens of calls.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(super) enum Tokens {
    /// One token for all calls, replaced every second.
    EachSecond,
    /// A different token for every call. A token is used again only after kas has dropped it from its cache.
    EachCall,
}

/// The method, and the size of the payload of each message in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(super) enum Work {
    /// `Echo`, one call after another.
    Unary(u32),
    /// `Download` of an endless stream.
    Down(u32),
    /// `Upload` of an endless stream.
    Up(u32),
}

/// The duration of a load.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) enum Span {
    /// In milliseconds.
    Time {
        /// Before anything counts.
        warm: u64,
        /// What counts.
        run: u64,
    },
    /// In calls. Between the two parts the client waits for [`ClientCommand::Go`]. Only for calls that end.
    Count {
        /// Before anything counts.
        warm: i64,
        /// What counts.
        run: i64,
    },
}

/// HTTP requests to the static server, directly or through kas.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct HttpLoad {
    /// Where requests are sent to.
    pub(super) target: HttpTarget,
    /// The requests.
    pub(super) work: HttpWork,
    /// Number of HTTP/2 connections, over which the callers are distributed. Over HTTP/1.1, each caller has a
    /// connection of its own.
    pub(super) connections: usize,
    /// Number of callers. Each has one request open at a time.
    pub(super) callers: usize,
    /// The duration. Events need a [`Span::Time`].
    pub(super) span: Span,
}

/// Where HTTP requests are sent to.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum HttpTarget {
    /// The static server, or the endpoint for kubectl of kas in front of it.
    Http {
        /// The server.
        server: HttpServer,
        /// Use HTTP/2 instead of HTTP/1.1.
        http2: bool,
    },
    /// The API listener of kas: requests are calls of `KubernetesApi/MakeRequest`.
    Kas {
        /// Its address.
        address: SocketAddr,
        /// Metadata of the calls.
        metadata: Metadata,
    },
}

/// A server of HTTP.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct HttpServer {
    /// Its address.
    pub(super) address: SocketAddr,
    /// Use TLS, with this certificate authority.
    pub(super) ca_file: Option<PathBuf>,
    /// It is the endpoint for kubectl: the agent that answers, and the caller's token. `None`: it is the
    /// static server itself.
    pub(super) access: Option<Access>,
}

/// What requests to the endpoint for kubectl contain in addition.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Access {
    /// The agent that answers.
    pub(super) agent: i64,
    /// The token of a user of kas.
    pub(super) token: String,
}

impl Access {
    /// Returns what the path of a request begins with.
    pub(super) fn prefix(access: Option<&Self>) -> String {
        access.map_or_else(String::new, |access| format!("/agents/{}", access.agent))
    }

    /// Returns the value of the header `Authorization`.
    pub(super) fn authorization(&self) -> String {
        format!("Bearer {}", self.token)
    }
}

/// Upgraded connections to the static server, directly or through kas. Each is one of HTTP/1.1.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct UpgradeLoad {
    /// Where they lead to.
    pub(super) server: HttpServer,
    /// Number of connections that send [`ECHO`] bytes and wait until they come back, again and again, as a
    /// terminal does. [`Loaded::done`] counts these round trips.
    pub(super) terminals: usize,
    /// Number of connections that read bytes as fast as possible, as `kubectl cp` does. [`Loaded::bytes`]
    /// counts them.
    pub(super) copies: usize,
    /// The duration, a [`Span::Time`].
    pub(super) span: Span,
}

/// Bytes that a terminal sends at a time.
pub(super) const ECHO: usize = 64;

/// Requests and watches of clients that go to another replica when the one that they use leaves. Each has a
/// connection of its own, of HTTP/2.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct LeavingLoad {
    /// The endpoints for kubectl of all replicas.
    pub(super) servers: Vec<SocketAddr>,
    /// See [`HttpServer::access`].
    pub(super) access: Access,
    /// Number of clients that make a request every few milliseconds. [`Loaded::done`] counts those.
    pub(super) requests: usize,
    /// Number of clients that watch.
    pub(super) watches: usize,
    /// The duration, a [`Span::Time`].
    pub(super) span: Span,
}

/// Requests that stay open and on which nothing happens.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Idle {
    /// Where they lead to.
    pub(super) server: HttpServer,
    /// What they are.
    pub(super) what: IdleWhat,
    /// Number of requests.
    pub(super) count: usize,
}

/// The kind of idle requests.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) enum IdleWhat {
    /// Watches over HTTP/2, this many on each connection.
    Watches(usize),
    /// Upgraded connections.
    Upgrades,
}

/// HTTP requests.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(super) enum HttpWork {
    /// GET of so many bytes, one request after another. [`Loaded::done`] counts requests.
    Get(u32),
    /// GET of a body of so many bytes, one request after another. [`Loaded::done`] counts [`UNIT`]s.
    Down(u64),
    /// PUT of a body of so many bytes, a multiple of [`UNIT`]. [`Loaded::done`] counts [`UNIT`]s.
    Up(u64),
    /// An endless response of events, as fast as possible. [`Loaded::done`] counts events.
    Events,
    /// An endless response of so many events a second. [`Loaded::done`] counts events.
    PacedEvents(u32),
    /// An endless response without events.
    NoEvents,
}

/// Bodies are counted in units of so many bytes.
pub(super) const UNIT: u64 = 64 * 1024;

/// Bytes of an event, about those of a small object in a watch of Kubernetes.
pub(super) const EVENT: usize = 2_000;

/// Bytes at the beginning of an event: when it was made, in nanoseconds since 1970, as decimal digits.
pub(super) const STAMP: usize = 20;

/// The result of a load, without its warm-up.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Loaded {
    /// Number of answered calls, or of messages of streams. For HTTP: see [`HttpWork`].
    pub(super) done: u64,
    /// Payload and framing: of a stream in its direction, of calls in both directions. For HTTP: payload
    /// only.
    pub(super) bytes: u64,
    /// Duration in seconds.
    pub(super) seconds: f64,
    /// Median latency of the calls in microseconds; 0 for streams. Of [`HttpWork::PacedEvents`]: median delay
    /// of the events.
    pub(super) p50_us: f64,
    /// 99th percentile.
    pub(super) p99_us: f64,
    /// Number of calls that failed.
    pub(super) failed: u64,
    /// The error of the first call that failed.
    pub(super) why: Option<String>,
}

/// Idle agents. Each has its own connection with a configuration stream and idle tunnels.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Agents {
    /// The agent listener of kas.
    pub(super) address: SocketAddr,
    /// Use TLS, with this certificate authority.
    pub(super) ca_file: Option<PathBuf>,
    /// The id of the first agent. Its token is [`token`].
    pub(super) first: i64,
    /// Number of agents.
    pub(super) count: i64,
    /// Number of tunnels of each agent.
    pub(super) tunnels: usize,
}

/// Calls that wait for agents.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Waiters {
    /// The agent listener of kas, without TLS.
    pub(super) agents: SocketAddr,
    /// The API listener of kas.
    pub(super) api: SocketAddr,
    /// See [`Metadata::secret_file`].
    pub(super) secret_file: PathBuf,
    /// The id of the first agent.
    pub(super) first: i64,
    /// Number of agents, each with one waiting call.
    pub(super) count: i64,
}

/// Time from the opening of a tunnel to the arrival of the waiting call, in milliseconds.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Woken {
    /// Median.
    pub(super) p50_ms: f64,
    /// 99th percentile.
    pub(super) p99_ms: f64,
    /// Maximum.
    pub(super) max_ms: f64,
}

/// Returns the token of an agent. It is not secret: the kas that accepts it runs for minutes, on loopback.
pub(super) fn token(agent: i64) -> String {
    format!("bench-token-{agent}")
}

/// Prints an event on standard output.
pub(super) fn emit(event: &ClientEvent) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    serde_json::to_writer(&mut out, event)?;
    out.write_all(b"\n")?;
    Ok(out.flush()?)
}
