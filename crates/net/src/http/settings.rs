//! The protocols of a listener, and the limits of its connections.

use std::time::Duration;

use crate::admission::half_open::Patience;

/// Largest frame of HTTP/2: 64 KiB needs a quarter of the writes that the default of 16 KiB does, and
/// larger ones let one stream hold up the others.
pub const FRAME: u32 = 64 * 1024;
/// The default limit of the header list of a request or answer.
pub const HEADER_LIST: u32 = 16 * 1024;
/// HTTP itself accepts header lists of this many times the limit.
pub const HEADER_LIST_ROOM: u32 = 2;
/// What a peer may send on one stream before we read it.
pub const STREAM_WINDOW: u32 = 256 * 1024;
/// The largest window of HTTP/2, for no limit.
pub const UNLIMITED_WINDOW: u32 = (1 << 31) - 1;

/// While connections come quickly, a listener holds this many times the usual number of unauthenticated ones.
pub const HALF_OPEN_GROWTH: usize = 8;
/// No listener holds more of them beyond the usual number than this part of the files that the process may
/// open. There are three listeners, and most files are for authenticated connections.
const HALF_OPEN_FILES: u64 = 8;

/// The protocols that a listener speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocols {
    /// HTTP/2 alone. Without TLS, clients must know that.
    Http2,
    /// HTTP/1.1 and HTTP/1.0.
    Http1,
    /// Both: as ALPN chooses with TLS ([`tls::or_http1`](crate::tls::or_http1)), else by the first bytes.
    Http1And2,
    /// [`Protocols::Http1And2`], with TLS or without: the first byte of a connection decides. A listener
    /// without a configuration of TLS does not offer it. Only for loopback, where nobody can read along and
    /// nobody can remove the TLS of a client.
    Http1And2MaybeTls,
    /// HTTP/2, directly or inside WebSocket. HTTP/1.1 is spoken for the upgrade to WebSocket alone.
    WebSocket,
}

/// The limits of one listener.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Open streams of one connection of HTTP/2.
    pub streams: u32,
    /// Header list of a request, in bytes as RFC 9113 counts them. The service refuses larger ones, with an
    /// explanation. From [`HEADER_LIST_ROOM`] times as much HTTP itself refuses them, with 431 and nothing
    /// else. HTTP/1.1 then closes the connection, also for more than 100 fields.
    pub header_list: u32,
    /// What a peer may send on one connection of HTTP/2 before we read it, in bytes.
    pub connection_window: u32,
    /// Streams that a peer opened and reset before we saw them.
    pub pending_accept_resets: usize,
    /// Streams that we reset, or whose frames came after our reset, over the connection's life.
    pub local_error_resets: usize,
    /// HTTP/2 sends a PING after this time without a frame…
    pub keepalive_interval: Duration,
    /// …and the connection ends when it is not answered within this one.
    pub keepalive_timeout: Duration,
    /// HTTP/2 announces extended CONNECT (RFC 8441), by which a request takes its stream over, see
    /// [`upgrade`](super::upgrade()). Without, a request by it is a malformed one.
    pub extended_connect: bool,
}

/// Agents: many long streams, cancelled at will by callers that the agent does not know.
///
/// The window is that of all streams together, and no larger: half of it is also what HTTP/2 lets a peer
/// spend on unread DATA frames of a few bytes, each of which holds half a kilobyte. With the
/// largest window of all that were 2 GiB for one connection.
pub const AGENT: Settings = Settings {
    streams: 1_000,
    header_list: HEADER_LIST,
    connection_window: 1_000 * STREAM_WINDOW,
    pending_accept_resets: 1_000,
    local_error_resets: 100_000,
    keepalive_interval: Duration::from_secs(15),
    keepalive_timeout: Duration::from_secs(10),
    extended_connect: false,
};

/// GitLab and operators.
pub const API: Settings = Settings {
    streams: 200,
    header_list: HEADER_LIST,
    connection_window: 64 << 20,
    pending_accept_resets: 200,
    local_error_resets: 1_024,
    keepalive_interval: Duration::from_secs(15),
    keepalive_timeout: Duration::from_secs(10),
    extended_connect: false,
};

/// Other replicas, both ends. Resets are not limited: a replica cancels as often as its callers do.
pub const PEER: Settings = Settings {
    streams: 8_000,
    header_list: HEADER_LIST,
    connection_window: UNLIMITED_WINDOW,
    pending_accept_resets: 1 << 20,
    local_error_resets: usize::MAX,
    keepalive_interval: Duration::from_secs(3),
    keepalive_timeout: Duration::from_secs(2),
    extended_connect: false,
};

impl Settings {
    /// Returns these with other numbers of streams, and of resets by us. The window still holds all streams:
    /// `streams` may be at most 8,191, of which it is the largest.
    #[must_use]
    pub fn with_streams(self, streams: u32, resets: u32) -> Self {
        Self {
            streams,
            connection_window: self
                .connection_window
                .max(streams.saturating_mul(STREAM_WINDOW))
                .min(UNLIMITED_WINDOW),
            pending_accept_resets: streams as usize,
            local_error_resets: resets as usize,
            ..self
        }
    }
}

/// The limits of unauthenticated, silent and idle connections.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    /// Connections of the listener without an authenticated request, handshakes included, in quiet times.
    /// When there are so many, the next takes the place of one that has had it for long enough.
    pub half_open: usize,
    /// If none has, there may be as many as this. When there are, the next waits.
    pub half_open_most: usize,
    /// How long a connection has its place before another one may take it.
    pub half_open_patience: Patience,
    /// A TLS handshake must be over within this time, and so must what may follow it: the first bytes that
    /// show the protocol, or an upgrade to WebSocket.
    pub handshake: Duration,
    /// The first frame of HTTP/2, or byte of HTTP/1.1, must come within this time after that.
    pub first_frame: Duration,
    /// The head of a request that has begun must be complete within about this time.
    pub headers: Duration,
    /// Without one authenticated request a connection is closed after this time.
    pub authentication: Duration,
    /// Until then no more than this many of its requests are read, and HTTP/2 is closed after as many resets
    /// of either side; above zero. What a proxy combines waits until the first of it is authenticated.
    pub streams_before_authentication: u32,
    /// A connection without an open request is asked to end after about this time.
    pub idle: Duration,
    /// Pings of HTTP/2 that may come at once; data or headers that are sent to the peer make them as many
    /// again…
    pub pings: u32,
    /// …and one more after each of these; above zero.
    pub ping_interval: Duration,
}

impl Limits {
    /// Returns these for a process that may open this number of files.
    #[must_use]
    pub fn with_files(self, files: u64) -> Self {
        let share = usize::try_from(files / HALF_OPEN_FILES).unwrap_or(usize::MAX);
        Self { half_open_most: self.half_open_most.min(share).max(self.half_open), ..self }
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            half_open: 1_024,
            half_open_most: 1_024 * HALF_OPEN_GROWTH,
            half_open_patience: Patience::USUAL,
            handshake: Duration::from_secs(5),
            first_frame: Duration::from_secs(5),
            headers: Duration::from_secs(10),
            authentication: Duration::from_secs(10),
            streams_before_authentication: 100,
            idle: Duration::from_secs(300),
            pings: 5,
            ping_interval: Duration::from_secs(10),
        }
    }
}

/// When connections are asked to end because of their age.
#[derive(Clone, Copy, Debug)]
pub struct Age {
    /// Mean age; each connection's own is up to a tenth off, so that they do not move together.
    pub age: Duration,
    /// Requests and upgrades that are still open this long after that are cut; `None`: never.
    pub grace: Option<Duration>,
}
