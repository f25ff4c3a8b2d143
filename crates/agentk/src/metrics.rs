//! The metric families of agentk.

use prometheus_client::{
    encoding::{EncodeLabelSet, EncodeLabelValue},
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::Registry,
};

/// The state of a connection to kas.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
pub enum ConnectionState {
    /// The agent waits to learn which replica this is.
    Asking,
    /// kas has not accepted a tunnel yet.
    Opening,
    /// Requests can arrive.
    Serving,
    /// It takes no new requests.
    Leaving,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StateLabel {
    state: ConnectionState,
}

/// The metric families.
#[derive(Debug, Default)]
pub struct Metrics {
    connections: Family<StateLabel, Gauge>,
    /// kas replicas that can send requests.
    pub replicas_served: Gauge,
    /// kas replicas to be connected to: the configured number, or the number that is running if that is
    /// lower.
    pub replicas_wanted: Gauge,
    /// Tunnels that wait for a request.
    pub tunnels_idle: Gauge,
    /// Tunnels that carry a request.
    pub tunnels_busy: Gauge,
    /// Requests that have started.
    pub requests: Counter,
    /// Streams that kas refused by a limit.
    pub streams_refused: Counter,
    /// Handlers that panicked.
    pub panics: Counter,
    /// Failed connection attempts.
    pub connect_failures: Counter,
}

impl Metrics {
    /// Creates the families and registers them.
    pub fn new(registry: &mut Registry) -> Self {
        let registry = registry.sub_registry_with_prefix("agentk");
        let metrics = Self::default();
        registry.register("connections", "Transport connections to kas", metrics.connections.clone());
        registry.register(
            "replicas_served",
            "kas replicas that can send requests to this agent",
            metrics.replicas_served.clone(),
        );
        registry.register(
            "replicas_wanted",
            "kas replicas to be connected to: --replicas, or the number that is running if that is lower",
            metrics.replicas_wanted.clone(),
        );
        registry.register("tunnels_idle", "Tunnels that wait for a request", metrics.tunnels_idle.clone());
        registry.register("tunnels_busy", "Tunnels that carry a request", metrics.tunnels_busy.clone());
        registry.register("requests", "Requests that have started", metrics.requests.clone());
        registry.register(
            "streams_refused",
            "Streams that kas refused by a limit",
            metrics.streams_refused.clone(),
        );
        registry.register("handler_panics", "Requests whose handler panicked", metrics.panics.clone());
        registry.register(
            "connect_failures",
            "Failed connection attempts to kas",
            metrics.connect_failures.clone(),
        );
        metrics
    }

    /// Records that a connection changes its state. `None`: it does not exist yet, or no longer.
    pub fn connection(&self, from: Option<ConnectionState>, to: Option<ConnectionState>) {
        if let Some(state) = from {
            self.connections.get_or_create(&StateLabel { state }).dec();
        }
        if let Some(state) = to {
            self.connections.get_or_create(&StateLabel { state }).inc();
        }
    }
}
