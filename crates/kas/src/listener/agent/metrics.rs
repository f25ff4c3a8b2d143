//! Connections and streams of agents.

use prometheus_client::{metrics::gauge::Gauge, registry::Registry};

/// Connections and streams of agents.
#[derive(Debug)]
pub struct AgentMetrics {
    /// Open configuration streams.
    pub agent_connections: Gauge,
    /// Open transport connections of agents.
    pub agent_transports: Gauge,
}

impl AgentMetrics {
    /// Creates the families and registers them.
    pub fn new(registry: &mut Registry) -> Self {
        let registry = registry.sub_registry_with_prefix("kas");
        let metrics = Self { agent_connections: Gauge::default(), agent_transports: Gauge::default() };
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
        metrics
    }
}
