//! Metrics of the status page.

use prometheus_client::{
    metrics::{counter::Counter, gauge::Gauge},
    registry::Registry,
};

/// Metrics of the status page.
#[derive(Debug)]
pub struct PageMetrics {
    /// Open streams of the page.
    pub page_viewers: Gauge,
    /// Streams of the page that were refused because of `observability.page.viewers`.
    pub page_viewers_refused: Counter,
}

impl PageMetrics {
    /// Creates the families and registers them.
    pub fn new(registry: &mut Registry) -> Self {
        let registry = registry.sub_registry_with_prefix("kas");
        let metrics = Self { page_viewers: Gauge::default(), page_viewers_refused: Counter::default() };
        registry.register("page_viewers", "Streams of the page that are open", metrics.page_viewers.clone());
        registry.register(
            "page_viewers_refused",
            "Streams of the page beyond observability.page.viewers",
            metrics.page_viewers_refused.clone(),
        );
        metrics
    }
}
