//! Metrics of manifests that agentk applies by itself.

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::Registry,
};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OutcomeLabel {
    outcome: &'static str,
}

/// The metric families.
#[derive(Debug)]
pub(super) struct GitopsMetrics {
    syncs: Family<OutcomeLabel, Counter>,
    pub(super) drift: Counter,
    pub(super) pruned: Counter,
    pub(super) leads: Gauge,
}

impl GitopsMetrics {
    pub(super) fn new(registry: &mut Registry) -> Self {
        let registry = registry.sub_registry_with_prefix("agentk");
        let metrics = Self {
            syncs: Family::default(),
            drift: Counter::default(),
            pruned: Counter::default(),
            leads: Gauge::default(),
        };
        registry.register(
            "gitops_syncs",
            "Syncs of manifest projects that agentk applies by itself, by their outcome",
            metrics.syncs.clone(),
        );
        registry.register(
            "gitops_drift",
            "Objects that differed from what was applied",
            metrics.drift.clone(),
        );
        registry.register("gitops_pruned", "Objects that were deleted", metrics.pruned.clone());
        registry.register(
            "gitops_leads",
            "1 if this pod is the one that applies manifests by itself",
            metrics.leads.clone(),
        );
        // They exist from the start, so that the first failure is an increase.
        for outcome in ["synced", "degraded", "failed"] {
            metrics.syncs.get_or_create(&OutcomeLabel { outcome }).inc_by(0);
        }
        metrics
    }

    pub(super) fn synced(&self, outcome: &'static str, pruned: usize) {
        self.syncs.get_or_create(&OutcomeLabel { outcome }).inc();
        self.pruned.inc_by(pruned as u64);
    }
}
