//! Every metric family of agentk, registered once.

use prometheus_client::{
    metrics::{counter::Counter, gauge::Gauge},
    registry::Registry,
};

/// The families.
#[derive(Debug, Default)]
pub struct Metrics {
    /// Transport connections to kas.
    pub connections: Gauge,
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
}
