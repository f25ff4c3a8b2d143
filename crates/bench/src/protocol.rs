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
    /// All agents are connected.
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
    /// The static server.
    Direct {
        /// Its address.
        address: SocketAddr,
        /// Use HTTP/2 instead of HTTP/1.1.
        http2: bool,
        /// Use TLS, with this certificate authority.
        ca_file: Option<PathBuf>,
    },
    /// The API listener of kas: requests are calls of `KubernetesApi/MakeRequest`.
    Kas {
        /// Its address.
        address: SocketAddr,
        /// Metadata of the calls.
        metadata: Metadata,
    },
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
