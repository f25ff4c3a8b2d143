//! Metrics of the process.

use std::sync::atomic::AtomicU64;

use prometheus_client::{metrics::gauge::Gauge, registry::Registry};

/// Metrics of the process.
#[derive(Debug)]
pub(super) struct ProcessMetrics {
    /// Tasks of the runtime; set when metrics are scraped.
    pub(super) tasks: Gauge,
    /// Files this process may open.
    pub(super) file_limit: Gauge<u64, AtomicU64>,
}

impl ProcessMetrics {
    /// Creates the families and registers them.
    pub(super) fn new(registry: &mut Registry) -> Self {
        let registry = registry.sub_registry_with_prefix("kas");
        let metrics = Self { tasks: Gauge::default(), file_limit: Gauge::default() };
        registry.register(
            "tasks",
            "Tasks of this process: connections, streams and background tasks",
            metrics.tasks.clone(),
        );
        registry.register("open_files_limit", "Files this process may open", metrics.file_limit.clone());
        metrics
    }
}
