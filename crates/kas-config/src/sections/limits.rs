//! Section `limits`.

use std::time::Duration;

use net::http2;
use settings::walk::{Rule, Section};

use super::seconds;

/// Section `limits`.
#[derive(Debug, Clone, PartialEq)]
pub struct Limits {
    /// Requests that may wait for one agent.
    pub waiters_per_agent: u32,
    /// Requests that may wait in all.
    pub waiters: u32,
    /// How long a request without a deadline waits for its agent.
    pub find_timeout: Duration,
    /// What a connection that is unknown, silent or idle may take up.
    pub connections: http2::Limits,
    /// What a connection of agents may use.
    pub agents: Streams,
    /// What a connection of callers may use.
    pub callers: Streams,
    /// What a connection may try.
    pub attempts: Attempts,
    /// What one token may do at once before it is held to its rate.
    pub token_burst: u32,
}

/// What one connection of a listener may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Streams {
    /// Requests that may be open.
    pub open: u32,
    /// Requests that kas resets over the connection's life.
    pub resets: u32,
    /// The headers of a request, in bytes.
    pub header_list: u32,
    /// After this time without a frame kas pings…
    pub keepalive_interval: Duration,
    /// …and it waits so long for the answer.
    pub keepalive_timeout: Duration,
}

impl Streams {
    /// Returns a listener's settings with these in them.
    pub fn of(self, settings: http2::Settings) -> http2::Settings {
        http2::Settings {
            header_list: self.header_list,
            keepalive_interval: self.keepalive_interval,
            keepalive_timeout: self.keepalive_timeout,
            ..settings.with_streams(self.open, self.resets)
        }
    }
}

/// What one connection may try.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attempts {
    /// Requests that may fail to authenticate before the first that does not.
    pub failures: u32,
    /// Fields that the headers of an agent, or of another replica, may have. Theirs are a dozen, and proxies
    /// add a few.
    pub fields: u32,
    /// The headers of a request, in bytes as RFC 9113 counts them.
    pub header_list: u32,
}

impl Default for Attempts {
    fn default() -> Self {
        Self { failures: 20, fields: 64, header_list: http2::HEADER_LIST }
    }
}

/// Declares the section.
pub(super) fn read(root: &mut Section<'_, '_>) -> Limits {
    let doc = "What others may take up; docs/limits.md tells of each, and of its metric.";
    root.section("limits", doc, |s| {
        let connections = connections(s);
        let (agents, callers) = streams(s);
        Limits {
            waiters_per_agent: s.number("waiters_per_agent", 10_000, "Requests that may wait for one agent."),
            waiters: s.number("waiters", 20_000, "Requests that may wait in all; more are refused at once."),
            find_timeout: s.duration(
                "find_timeout",
                seconds(20),
                Rule::Positive,
                "How long a request without a deadline waits for its agent.",
            ),
            connections,
            agents,
            callers,
            attempts: attempts(s, callers.header_list),
            token_burst: s.number(
                "token_burst",
                1_000,
                "Connections, tunnels that end unused, and failed attempts of one agent token that may come at \
                 once; then as many a minute as agent.listen.connections_per_token_per_minute. At all replicas \
                 together: with Redis they tell each other what they count, with gossip each takes its part.",
            ),
        }
    })
}

/// Declares what holds for each connection, before and beside its requests.
fn connections(s: &mut Section<'_, '_>) -> http2::Limits {
    let defaults = http2::Limits::default();
    http2::Limits {
        half_open: s.number(
            "half_open_connections",
            1_024,
            "Connections of each listener that have not shown yet who they are. When there are so many, the next takes \
             the place of the oldest.",
        ) as usize,
        handshake: s.duration(
            "handshake_timeout",
            defaults.handshake,
            Rule::Positive,
            "How long the handshake of TLS, and then that of WebSocket, may take.",
        ),
        first_frame: s.duration(
            "first_frame_timeout",
            defaults.first_frame,
            Rule::Positive,
            "How long the first frame may take after that.",
        ),
        headers: s.duration(
            "header_timeout",
            defaults.headers,
            Rule::Positive,
            "How long the headers of a request may take, once they have begun.",
        ),
        authentication: s.duration(
            "authentication_timeout",
            defaults.authentication,
            Rule::Positive,
            "How long a connection may go without a request whose credential is right.",
        ),
        streams_before_authentication: s.number_within(
            "streams_before_authentication",
            defaults.streams_before_authentication,
            1..=10_000,
            "Requests that a connection may begin before one of them had a right credential; the next ones wait in its \
             socket. When as many were reset, it is closed.",
        ),
        idle: s.duration(
            "idle_connection_timeout",
            defaults.idle,
            Rule::Positive,
            "When a connection without an open request is asked to end.",
        ),
        pings: s.number(
            "pings",
            defaults.pings,
            "Pings of one connection that may come at once; what is sent to it makes them as many again.",
        ),
        ping_interval: s.duration(
            "ping_interval",
            defaults.ping_interval,
            Rule::Positive,
            "And one more after each of these.",
        ),
    }
}

/// Declares what a connection of agents, and one of callers, may use.
fn streams(s: &mut Section<'_, '_>) -> (Streams, Streams) {
    /// Of more the windows together would be larger than HTTP/2 allows.
    const MOST: u32 = http2::UNLIMITED_WINDOW / http2::STREAM_WINDOW;
    let header_list = s.number_within(
        "header_list_bytes",
        http2::HEADER_LIST,
        4 * 1024..=32 * 1024,
        "Headers of a request of agents and callers: names and values, and 32 bytes for each field. Larger ones are refused \
         with words, and by HTTP/2 itself from twice as much.",
    );
    let keepalive_interval = s.duration(
        "keepalive_interval",
        http2::AGENT.keepalive_interval,
        Rule::Positive,
        "After this time without a word from an agent or a caller kas pings it. Shorter than the idle timers of balancers \
         in between that count bytes.",
    );
    let keepalive_timeout = s.duration(
        "keepalive_timeout",
        http2::AGENT.keepalive_timeout,
        Rule::Positive,
        "And when the answer takes longer than this, the connection is lost: what is open on it ends.",
    );
    let agents = Streams {
        open: s.number_within(
            "streams_per_agent_connection",
            http2::AGENT.streams,
            1..=MOST,
            "Requests that may be open on one connection of agents: tunnels above all.",
        ),
        resets: s.number_within(
            "resets_per_agent_connection",
            100_000,
            1..=u32::MAX,
            "Requests of one connection of agents that kas may be made to reset.",
        ),
        header_list,
        keepalive_interval,
        keepalive_timeout,
    };
    let callers = Streams {
        open: s.number_within(
            "streams_per_caller_connection",
            http2::API.streams,
            1..=MOST,
            "Requests that may be open on one connection of callers.",
        ),
        resets: s.number_within(
            "resets_per_caller_connection",
            1_024,
            1..=u32::MAX,
            "Requests of one connection of callers that kas may be made to reset.",
        ),
        header_list,
        keepalive_interval,
        keepalive_timeout,
    };
    (agents, callers)
}

/// Declares what one connection may try.
fn attempts(s: &mut Section<'_, '_>, header_list: u32) -> Attempts {
    let defaults = Attempts::default();
    Attempts {
        failures: s.number_within(
            "failed_requests",
            defaults.failures,
            1..=10_000,
            "Requests without a right credential after which a connection that has shown none is closed.",
        ),
        fields: s.number_within(
            "header_fields",
            defaults.fields,
            16..=1_000,
            "Header fields of a request of an agent or a replica.",
        ),
        header_list,
    }
}
