//! Section `limits`.

use std::time::Duration;

use net::http;
use settings::walk::{Rule, Section};

use super::seconds;

/// Section `limits`.
#[derive(Debug, Clone, PartialEq)]
pub struct Limits {
    /// Requests that may wait for one agent.
    pub waiters_per_agent: u32,
    /// Requests that may wait in total.
    pub waiters: u32,
    /// How long a request without a deadline waits for its agent.
    pub find_timeout: Duration,
    /// Limits of connections that are unauthenticated, silent or idle.
    pub connections: http::Limits,
    /// Limits of a connection of agents.
    pub agents: Streams,
    /// Limits of a connection of callers.
    pub callers: Streams,
    /// Limits of unauthenticated attempts on a connection.
    pub attempts: Attempts,
    /// What one token may do at once before its rate limit applies.
    pub token_burst: u32,
}

/// Limits of one connection of a listener.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Streams {
    /// Requests that may be open at the same time.
    pub open: u32,
    /// Requests that kas may have to reset over the life of the connection.
    pub resets: u32,
    /// The size of a request's headers, in bytes.
    pub header_list: u32,
    /// kas sends a PING after this time without a frame.
    pub keepalive_interval: Duration,
    /// The connection is closed if the PING is not answered within this time.
    pub keepalive_timeout: Duration,
}

impl Streams {
    /// Returns `settings` with these limits.
    pub fn of(self, settings: http::Settings) -> http::Settings {
        http::Settings {
            header_list: self.header_list,
            keepalive_interval: self.keepalive_interval,
            keepalive_timeout: self.keepalive_timeout,
            ..settings.with_streams(self.open, self.resets)
        }
    }
}

/// Limits of unauthenticated attempts on one connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attempts {
    /// Requests that may fail to authenticate before the first one that succeeds.
    pub failures: u32,
    /// Header fields in a request of an agent or another replica. They send about a dozen, and proxies add a
    /// few.
    pub fields: u32,
    /// The size of a request's headers, in bytes as RFC 9113 counts them.
    pub header_list: u32,
}

impl Default for Attempts {
    fn default() -> Self {
        Self { failures: 20, fields: 64, header_list: http::HEADER_LIST }
    }
}

/// Streams of a connection of agents that are not tunnels, and tunnels that are opened before the ones that
/// they replace have ended.
const BESIDE_TUNNELS: u32 = 500;

/// Declares the section. `tunnels`: how many one agent may hold.
pub(super) fn read(root: &mut Section<'_, '_>, tunnels: u32) -> Limits {
    let doc =
        "Limits on the resources that others can use; docs/limits.md describes each of them and its metric.";
    root.section("limits", doc, |s| {
        let connections = connections(s);
        let (agents, callers) = streams(s, tunnels);
        Limits {
            waiters_per_agent: s.number("waiters_per_agent", 10_000, "Requests that may wait for one agent."),
            waiters: s.number("waiters", 20_000, "Requests that may wait in total; further ones are refused at once."),
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
                "How many connections, tunnels that end unused, and failed attempts one agent token may have at \
                 once. After that, agent.listen.connections_per_token_per_minute applies. The limit holds for all \
                 replicas together: with Redis they share their counts, with gossip each gets an equal share.",
            ),
        }
    })
}

/// Declares the limits of each connection, independent of its requests.
fn connections(s: &mut Section<'_, '_>) -> http::Limits {
    let defaults = http::Limits::default();
    let half_open = s.number(
        "half_open_connections",
        1_024,
        "Connections of each listener that have not authenticated yet. When there are this many, a new one replaces the \
         oldest that has sent nothing for 1 s. While they arrive quickly, there are up to eight times as many, but no more \
         than an eighth of the files that kas may open; docs/limits.md says for how long each.",
    ) as usize;
    http::Limits {
        half_open,
        half_open_most: half_open.saturating_mul(http::HALF_OPEN_GROWTH),
        half_open_patience: defaults.half_open_patience,
        handshake: s.duration(
            "handshake_timeout",
            defaults.handshake,
            Rule::Positive,
            "How long the TLS handshake, and then the WebSocket handshake, may take.",
        ),
        first_frame: s.duration(
            "first_frame_timeout",
            defaults.first_frame,
            Rule::Positive,
            "How long the first frame may take after the handshakes.",
        ),
        headers: s.duration(
            "header_timeout",
            defaults.headers,
            Rule::Positive,
            "How long the headers of a request may take once they have begun.",
        ),
        authentication: s.duration(
            "authentication_timeout",
            defaults.authentication,
            Rule::Positive,
            "How long a connection may stay open without a request with a valid credential.",
        ),
        streams_before_authentication: s.number_within(
            "streams_before_authentication",
            defaults.streams_before_authentication,
            1..=10_000,
            "Requests that a connection may begin before one of them had a valid credential; further ones wait in its \
             socket. When this many were reset, the connection is closed.",
        ),
        idle: s.duration(
            "idle_connection_timeout",
            defaults.idle,
            Rule::Positive,
            "Idle time without an open request after which a connection is asked to end.",
        ),
        pings: s.number(
            "pings",
            defaults.pings,
            "PINGs that one connection may send at once. Data or headers from kas allow as many again.",
        ),
        ping_interval: s.duration(
            "ping_interval",
            defaults.ping_interval,
            Rule::Positive,
            "One more PING is allowed after each such interval.",
        ),
    }
}

/// Declares the limits of a connection of agents, each of which may hold `tunnels`, and of one of callers.
fn streams(s: &mut Section<'_, '_>, tunnels: u32) -> (Streams, Streams) {
    const OF_AGENTS: &str = "streams_per_agent_connection";
    /// With more requests, the sum of their windows would exceed the maximum of HTTP/2.
    const MOST: u32 = http::UNLIMITED_WINDOW / http::STREAM_WINDOW;
    let header_list = s.number_within(
        "header_list_bytes",
        http::HEADER_LIST,
        4 * 1024..=32 * 1024,
        "Headers of a request of agents and callers: names and values, and 32 bytes for each field. Larger ones are \
         refused with an error message, and from twice the size by HTTP/2 itself.",
    );
    let keepalive_interval = s.duration(
        "keepalive_interval",
        http::AGENT.keepalive_interval,
        Rule::Positive,
        "kas sends a PING after this time without a frame from an agent or a caller. Must be shorter than the idle \
         timeouts of load balancers in between.",
    );
    let keepalive_timeout = s.duration(
        "keepalive_timeout",
        http::AGENT.keepalive_timeout,
        Rule::Positive,
        "A connection that does not answer a PING within this time is closed, which ends all its requests.",
    );
    let open = s.number_within(
        OF_AGENTS,
        tunnels + BESIDE_TUNNELS,
        1..=MOST,
        "Requests that may be open on one connection of agents; most of them are tunnels. Default: \
         agent.listen.max_tunnels_per_agent, and 500 more.",
    );
    if open <= tunnels {
        s.warn(
            OF_AGENTS,
            format!(
                "is {open}, so an agentk cannot hold the {tunnels} tunnels of agent.listen.max_tunnels_per_agent: leave \
                 the key out, or set at least {}",
                tunnels + 1
            ),
        );
    }
    let agents = Streams {
        open,
        resets: s.number_within(
            "resets_per_agent_connection",
            100_000,
            1..=u32::MAX,
            "Requests of one connection of agents that kas may have to reset.",
        ),
        header_list,
        keepalive_interval,
        keepalive_timeout,
    };
    let callers = Streams {
        open: s.number_within(
            "streams_per_caller_connection",
            http::API.streams,
            1..=MOST,
            "Requests that may be open on one connection of callers.",
        ),
        resets: s.number_within(
            "resets_per_caller_connection",
            1_024,
            1..=u32::MAX,
            "Requests of one connection of callers that kas may have to reset.",
        ),
        header_list,
        keepalive_interval,
        keepalive_timeout,
    };
    (agents, callers)
}

/// Declares the limits of unauthenticated attempts on one connection.
fn attempts(s: &mut Section<'_, '_>, header_list: u32) -> Attempts {
    let defaults = Attempts::default();
    Attempts {
        failures: s.number_within(
            "failed_requests",
            defaults.failures,
            1..=10_000,
            "Requests without a valid credential after which a connection that has never had one is closed.",
        ),
        fields: s.number_within(
            "header_fields",
            defaults.fields,
            16..=1_000,
            "Header fields in a request of an agent or a replica.",
        ),
        header_list,
    }
}
