//! What the harness and the load client say to each other: one JSON value per line, orders on the client's standard
//! input, notes on its standard output.

use std::{net::SocketAddr, path::PathBuf};

use serde::{Deserialize, Serialize};

/// What the client is to do; one at a time.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Order {
    /// Make calls. Notes: [`Note::Begin`], [`Note::End`], [`Note::Loaded`].
    Load(Load),
    /// Go on after [`Note::Begin`] of a [`Span::Count`].
    Go,
    /// Connect idle agents and keep them. Note: [`Note::Connected`].
    Agents(Agents),
    /// Let calls wait for agents, then bring those. Note: [`Note::Woken`].
    Waiters(Waiters),
}

/// What the client reports.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Note {
    /// Warm; the measured part begins.
    Begin,
    /// The measured part is over; connections are being closed.
    End,
    /// What a load did.
    Loaded(Loaded),
    /// All agents are connected.
    Connected,
    /// What waiting took.
    Woken(Woken),
    /// The order failed; the client can take another one.
    Failed(String),
}

/// Calls to one server.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Load {
    /// Whom to call.
    pub(super) target: Target,
    /// What to call there.
    pub(super) work: Work,
    /// Connections, among which callers are dealt out.
    pub(super) connections: usize,
    /// Callers; each has one call open at a time.
    pub(super) callers: usize,
    /// How long.
    pub(super) span: Span,
    /// Beside the callers, on the first connection, one that stops reading a download after its first bytes.
    pub(super) stalled: bool,
}

/// Who is called.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Target {
    /// Where it listens.
    pub(super) address: SocketAddr,
    /// What calls say besides their message; `None`: nothing.
    pub(super) metadata: Option<Metadata>,
}

/// What kas wants to know.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Metadata {
    /// The agent that is to answer.
    pub(super) agent: i64,
    /// A file with the secret, base64, that tokens are signed with.
    pub(super) secret_file: PathBuf,
    /// Which tokens calls have.
    pub(super) tokens: Tokens,
}

/// Which tokens calls have.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(super) enum Tokens {
    /// One for all calls, another one every second.
    EachSecond,
    /// Another one for every call: none comes back before kas has forgotten it.
    EachCall,
}

/// The method, and the bytes of payload in each message.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(super) enum Work {
    /// `Echo`, one call after the other.
    Unary(u32),
    /// `Download` without end.
    Down(u32),
    /// `Upload` without end.
    Up(u32),
}

/// How long a load lasts.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) enum Span {
    /// Milliseconds.
    Time {
        /// Before anything counts.
        warm: u64,
        /// What counts.
        run: u64,
    },
    /// Calls; between the two parts the client waits for [`Order::Go`]. Unary only.
    Count {
        /// Before anything counts.
        warm: i64,
        /// What counts.
        run: i64,
    },
}

/// What a load did in its measured part.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Loaded {
    /// Answered calls, or messages of streams.
    pub(super) done: u64,
    /// Payload and framing in the direction of the stream, or there and back.
    pub(super) bytes: u64,
    /// Seconds.
    pub(super) seconds: f64,
    /// Median of the calls' times in microseconds; 0 for streams.
    pub(super) p50_us: f64,
    /// 99th percentile.
    pub(super) p99_us: f64,
    /// Calls that failed.
    pub(super) failed: u64,
    /// Why the first one did.
    pub(super) why: Option<String>,
}

/// Agents that do nothing: each has a connection of its own with a configuration stream and parked tunnels.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Agents {
    /// Where kas listens for agents.
    pub(super) address: SocketAddr,
    /// TLS, with this as the only authority.
    pub(super) ca_file: Option<PathBuf>,
    /// The first agent's number; its token is [`token`].
    pub(super) first: i64,
    /// How many.
    pub(super) count: i64,
    /// Tunnels of each.
    pub(super) tunnels: usize,
}

/// Calls that wait for agents.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Waiters {
    /// Where kas listens for agents, without TLS.
    pub(super) agents: SocketAddr,
    /// Where it listens for callers.
    pub(super) api: SocketAddr,
    /// See [`Metadata::secret_file`].
    pub(super) secret_file: PathBuf,
    /// The first agent's number.
    pub(super) first: i64,
    /// How many agents, each with one waiting call.
    pub(super) count: i64,
}

/// From the moment an agent opens its tunnel to the arrival of the waiting call, in milliseconds.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Woken {
    /// Median.
    pub(super) p50_ms: f64,
    /// 99th percentile.
    pub(super) p99_ms: f64,
    /// The worst.
    pub(super) max_ms: f64,
}

/// The token of an agent of the bench. No secret: it opens a kas on loopback that lives for minutes.
pub(super) fn token(agent: i64) -> String {
    format!("bench-token-{agent}")
}
