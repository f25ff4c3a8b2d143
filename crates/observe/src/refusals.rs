//! What the listeners refuse or end early, counted by listener and reason.

use prometheus_client::{
    encoding::{EncodeLabelSet, EncodeLabelValue},
    metrics::{counter::Counter, family::Family},
    registry::Registry,
};

/// Which listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
#[allow(missing_docs)]
pub enum ListenerName {
    Agent,
    Api,
    Private,
}

/// Why something was refused or ended early.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
#[allow(missing_docs)]
pub enum Reason {
    Unauthenticated,
    /// Whether it may come in could not be checked.
    Unchecked,
    /// It was the oldest of too many connections that had shown nothing yet.
    HalfOpen,
    Handshake,
    Accept,
    /// No frame came in time.
    Silent,
    /// Headers were not complete in time, or there were too many.
    Headers,
    Pings,
    /// Frames that carry nothing.
    IdleFrames,
    Resets,
    /// A stream more than one connection may have open.
    Streams,
    /// A message was too large, compressed beyond measure, or, of an agent that begins a stream, wrong or
    /// late.
    Message,
    /// No request for a long time.
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

/// Connections and streams that were refused or ended early.
#[derive(Debug)]
pub struct Refusals {
    refusals: Family<RefusalLabels, Counter>,
}

impl Refusals {
    /// Creates the families and registers them.
    pub fn new(registry: &mut Registry) -> Self {
        let registry = registry.sub_registry_with_prefix("kas");
        let metrics = Self { refusals: Family::default() };
        registry.register(
            "refusals",
            "Connections and streams that were refused or ended early",
            metrics.refusals.clone(),
        );
        metrics
    }

    /// Counts something refused.
    pub fn refused(&self, listener: ListenerName, reason: Reason) {
        self.refusals.get_or_create(&RefusalLabels { listener, reason }).inc();
    }
}
