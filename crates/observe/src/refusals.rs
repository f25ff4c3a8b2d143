//! Counts the connections and streams that listeners refuse or end early, by listener and reason.

use net::http::Refusal;
use prometheus_client::{
    encoding::{EncodeLabelSet, EncodeLabelValue},
    metrics::{counter::Counter, family::Family},
    registry::Registry,
};

use crate::refused_callers::RefusedCallers;

/// A listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
#[allow(missing_docs)]
pub enum ListenerName {
    Agent,
    Api,
    Private,
    /// The endpoint for kubectl.
    Kubernetes,
    /// The listener for webhooks.
    Hooks,
    /// The listener for proxies.
    Direct,
}

/// Why a connection or stream was refused or ended early.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
#[allow(missing_docs)]
pub enum Reason {
    Unauthenticated,
    /// The identity could not be verified.
    Unchecked,
    /// Too many connections were not authenticated, and this was the oldest.
    HalfOpen,
    Handshake,
    Accept,
    /// No frame came in time.
    Silent,
    /// Headers were not complete in time, too large, or too many.
    Headers,
    Pings,
    /// Frames that carry nothing.
    IdleFrames,
    Resets,
    /// The connection had too many open streams.
    Streams,
    /// A message was too large, also after decompression. Or the first message of an agent's stream was
    /// invalid or late.
    Message,
    /// There was no request for a long time.
    Idle,
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

/// Counters of refused connections and streams, and the last refused callers.
#[derive(Debug)]
pub struct Refusals {
    refusals: Family<RefusalLabels, Counter>,
    callers: RefusedCallers,
}

impl Refusals {
    /// Creates the families and registers them.
    pub fn new(registry: &mut Registry) -> Self {
        let registry = registry.sub_registry_with_prefix("kas");
        let metrics = Self { refusals: Family::default(), callers: RefusedCallers::default() };
        registry.register(
            "refusals",
            "Connections and streams that were refused or ended early",
            metrics.refusals.clone(),
        );
        metrics
    }

    /// Counts a connection that could not be served.
    pub fn connection(&self, listener: ListenerName, why: Refusal) {
        let reason = match why {
            Refusal::HalfOpen => Reason::HalfOpen,
            Refusal::Silent => Reason::Silent,
            Refusal::Headers => Reason::Headers,
            Refusal::Pings => Reason::Pings,
            Refusal::IdleFrames => Reason::IdleFrames,
            Refusal::Resets => Reason::Resets,
            Refusal::Streams => Reason::Streams,
            Refusal::Idle => Reason::Idle,
            Refusal::Handshake => Reason::Handshake,
            Refusal::Accept => Reason::Accept,
            Refusal::Unauthenticated => Reason::Unauthenticated,
        };
        self.refused(listener, reason);
    }

    /// Returns the last refused requests of the Kubernetes API endpoint.
    pub fn callers(&self) -> &RefusedCallers {
        &self.callers
    }

    /// Counts a refused connection or stream.
    pub fn refused(&self, listener: ListenerName, reason: Reason) {
        self.refusals.get_or_create(&RefusalLabels { listener, reason }).inc();
    }
}
