//! Every metric family of agentk, registered once.

use prometheus_client::{
    encoding::{EncodeLabelSet, EncodeLabelValue},
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::Registry,
};

/// How far a connection to kas is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
pub enum ConnectionState {
    /// It learns which replica this is.
    Asking,
    /// No tunnel has been answered.
    Opening,
    /// Requests can come.
    Serving,
    /// It takes no new requests.
    Leaving,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StateLabel {
    state: ConnectionState,
}

/// The families.
#[derive(Debug, Default)]
pub struct Metrics {
    connections: Family<StateLabel, Gauge>,
    /// Replicas of kas that requests can come from.
    pub replicas_served: Gauge,
    /// Replicas of kas that should be served: as many as wanted, or as there are.
    pub replicas_wanted: Gauge,
    /// Tunnels that wait for a request.
    pub tunnels_idle: Gauge,
    /// Tunnels that carry a request.
    pub tunnels_busy: Gauge,
    /// Requests begun.
    pub requests: Counter,
    /// Handlers that panicked.
    pub panics: Counter,
    /// Failed attempts to connect.
    pub connect_failures: Counter,
}

impl Metrics {
    /// Makes the families and registers them.
    pub fn new(registry: &mut Registry) -> Self {
        let registry = registry.sub_registry_with_prefix("agentk");
        let metrics = Self::default();
        registry.register("connections", "Transport connections to kas", metrics.connections.clone());
        registry.register(
            "replicas_served",
            "Replicas of kas that requests can come from",
            metrics.replicas_served.clone(),
        );
        registry.register(
            "replicas_wanted",
            "Replicas of kas that should be served: --replicas, or as many as there are",
            metrics.replicas_wanted.clone(),
        );
        registry.register("tunnels_idle", "Tunnels that wait for a request", metrics.tunnels_idle.clone());
        registry.register("tunnels_busy", "Tunnels that carry a request", metrics.tunnels_busy.clone());
        registry.register("requests", "Requests begun", metrics.requests.clone());
        registry.register("handler_panics", "Requests whose handler panicked", metrics.panics.clone());
        registry.register(
            "connect_failures",
            "Failed attempts to connect to kas",
            metrics.connect_failures.clone(),
        );
        metrics
    }

    /// Counts a connection that goes from one state to another; `None` is before and after its life.
    pub fn connection(&self, from: Option<ConnectionState>, to: Option<ConnectionState>) {
        if let Some(state) = from {
            self.connections.get_or_create(&StateLabel { state }).dec();
        }
        if let Some(state) = to {
            self.connections.get_or_create(&StateLabel { state }).inc();
        }
    }
}
