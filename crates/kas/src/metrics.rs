//! Every metric family of kas, registered once.
//!
//! Labels are enums; an agent's id is never one, since a replica may hold a hundred thousand.

use std::sync::atomic::AtomicU64;

use prometheus_client::{
    encoding::{EncodeLabelSet, EncodeLabelValue},
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::{Registry, Unit},
};

/// How a request for an agent ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
#[allow(missing_docs)]
pub enum Outcome {
    Answered,
    NotStarted,
    Unknown,
    Refused,
    Cancelled,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OutcomeLabel {
    outcome: Outcome,
}

/// Which listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
#[allow(missing_docs)]
pub enum ListenerName {
    Agent,
    Api,
}

/// Why something was refused or ended early.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
#[allow(missing_docs)]
pub enum Reason {
    Unauthenticated,
    TooManyHandshakes,
    Handshake,
    Accept,
    WaitersFull,
    TunnelsFull,
    RateLimit,
    Revoked,
    Violation,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RefusalLabels {
    listener: ListenerName,
    reason: Reason,
}

/// The families.
#[derive(Debug)]
pub struct Metrics {
    /// Requests for agents that are open now.
    pub requests_open: Gauge,
    requests: Family<OutcomeLabel, Counter>,
    // Resolved once: a family's map is behind a lock.
    answered: Counter,
    /// From the request's arrival until it has a tunnel, in seconds.
    pub find_seconds: Histogram,
    /// Requests that wait for a tunnel now.
    pub waiters: Gauge,
    /// Open tunnels, idle and busy.
    pub tunnels: Gauge,
    /// Open configuration streams.
    pub agent_connections: Gauge,
    /// Open transport connections of agents.
    pub agent_transports: Gauge,
    /// Tunnels whose agent did what the protocol does not allow.
    pub tunnel_violations: Counter,
    /// Values of agents' answers that were dropped as illegal.
    pub answer_values_dropped: Counter,
    refusals: Family<RefusalLabels, Counter>,
    /// Files this process may open.
    pub file_limit: Gauge<u64, AtomicU64>,
}

impl Metrics {
    /// Makes the families and registers them.
    pub fn new(registry: &mut Registry) -> Self {
        let registry = registry.sub_registry_with_prefix("kas");
        let requests = Family::<OutcomeLabel, Counter>::default();
        let answered = requests.get_or_create(&OutcomeLabel { outcome: Outcome::Answered }).clone();
        let metrics = Self {
            requests_open: Gauge::default(),
            requests,
            answered,
            find_seconds: Histogram::new([0.0001, 0.001, 0.005, 0.02, 0.1, 0.5, 1.0, 5.0, 20.0]),
            waiters: Gauge::default(),
            tunnels: Gauge::default(),
            agent_connections: Gauge::default(),
            agent_transports: Gauge::default(),
            tunnel_violations: Counter::default(),
            answer_values_dropped: Counter::default(),
            refusals: Family::default(),
            file_limit: Gauge::default(),
        };
        registry.register(
            "requests_open",
            "Requests for agents that are open",
            metrics.requests_open.clone(),
        );
        registry.register("requests", "Requests for agents by how they ended", metrics.requests.clone());
        registry.register_with_unit(
            "request_find",
            "Time until a request has a tunnel",
            Unit::Seconds,
            metrics.find_seconds.clone(),
        );
        registry.register("requests_waiting", "Requests that wait for a tunnel", metrics.waiters.clone());
        registry.register("tunnels_open", "Open tunnels, idle and busy", metrics.tunnels.clone());
        registry.register(
            "connected_agents",
            "Open configuration streams",
            metrics.agent_connections.clone(),
        );
        registry.register(
            "agent_transports",
            "Open transport connections of agents",
            metrics.agent_transports.clone(),
        );
        registry.register(
            "tunnel_violations",
            "Tunnels reset because their agent broke the protocol or vanished",
            metrics.tunnel_violations.clone(),
        );
        registry.register(
            "answer_values_dropped",
            "Metadata values in answers of agents that are illegal and were dropped",
            metrics.answer_values_dropped.clone(),
        );
        registry.register(
            "refusals",
            "Connections and streams that were refused or ended early",
            metrics.refusals.clone(),
        );
        registry.register("open_files_limit", "Files this process may open", metrics.file_limit.clone());
        metrics
    }

    /// Counts the end of a request.
    pub fn ended(&self, outcome: Outcome) {
        match outcome {
            Outcome::Answered => self.answered.inc(),
            outcome => self.requests.get_or_create(&OutcomeLabel { outcome }).inc(),
        };
    }

    /// Counts something refused.
    pub fn refused(&self, listener: ListenerName, reason: Reason) {
        self.refusals.get_or_create(&RefusalLabels { listener, reason }).inc();
    }
}
