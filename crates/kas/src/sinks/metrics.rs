//! Metrics of sinks.

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::Registry,
};
use sinks::Pushed;

/// The name of a sink in the configuration.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct SinkLabel {
    sink: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct DroppedLabel {
    sink: String,
    reason: &'static str,
}

/// Metrics of sinks. None has a label for the agent.
#[derive(Debug)]
pub struct SinkMetrics {
    sent: Family<SinkLabel, Counter>,
    failures: Family<SinkLabel, Counter>,
    dropped: Family<DroppedLabel, Counter>,
    waiting: Family<SinkLabel, Gauge>,
    bytes: Family<SinkLabel, Gauge>,
    pub(super) watches: Gauge,
}

impl SinkMetrics {
    /// Creates the families and registers them.
    pub fn new(registry: &mut Registry) -> Self {
        let registry = registry.sub_registry_with_prefix("kas");
        let metrics = Self {
            sent: Family::default(),
            failures: Family::default(),
            dropped: Family::default(),
            waiting: Family::default(),
            bytes: Family::default(),
            watches: Gauge::default(),
        };
        registry.register("sink_sent", "Items that a sink has taken", metrics.sent.clone());
        registry.register(
            "sink_failures",
            "Items that a sink has not taken; they are tried again",
            metrics.failures.clone(),
        );
        registry.register(
            "sink_dropped",
            "Items that a sink will never get, by reason: full (no room), expired (tried for an hour)",
            metrics.dropped.clone(),
        );
        registry.register("sink_waiting", "Items that wait for a sink", metrics.waiting.clone());
        registry.register("sink_bytes", "Bytes of these items", metrics.bytes.clone());
        registry.register(
            "sink_watches",
            "Open watches of Kubernetes events for sinks",
            metrics.watches.clone(),
        );
        metrics
    }

    /// Lets the counters of a sink exist from the start.
    pub(super) fn declare(&self, sink: &str) {
        let label = SinkLabel { sink: sink.to_owned() };
        drop(self.sent.get_or_create(&label));
        drop(self.failures.get_or_create(&label));
        drop(self.waiting.get_or_create(&label));
        drop(self.bytes.get_or_create(&label));
        for reason in ["full", "expired"] {
            drop(self.dropped.get_or_create(&DroppedLabel { sink: sink.to_owned(), reason }));
        }
    }

    pub(super) fn sent(&self, sink: &str, items: u64, failures: u64) {
        let label = SinkLabel { sink: sink.to_owned() };
        self.sent.get_or_create(&label).inc_by(items);
        self.failures.get_or_create(&label).inc_by(failures);
    }

    pub(super) fn dropped(&self, sink: &str, pushed: Pushed) {
        for (reason, items) in [("full", pushed.full), ("expired", pushed.expired)] {
            if items > 0 {
                let label = DroppedLabel { sink: sink.to_owned(), reason };
                self.dropped.get_or_create(&label).inc_by(items);
            }
        }
    }

    pub(super) fn waiting(&self, sink: &str, items: usize, bytes: usize) {
        let label = SinkLabel { sink: sink.to_owned() };
        self.waiting.get_or_create(&label).set(i64::try_from(items).unwrap_or(i64::MAX));
        self.bytes.get_or_create(&label).set(i64::try_from(bytes).unwrap_or(i64::MAX));
    }
}
