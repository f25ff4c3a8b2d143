//! Metrics of planners.

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::Registry,
};

/// How a sync ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct OutcomeLabel {
    /// `synced`, `degraded`, `failed`, or `reading` if it is begun anew.
    pub outcome: &'static str,
}

/// The state of objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct StateLabel {
    /// Of objects: `current`, `failed`, `other` or `to_prune`. Of projects: `synced`, `degraded`, `failed` or
    /// `busy`.
    pub state: &'static str,
}

/// Metrics of planners.
#[derive(Debug)]
pub struct PlannerMetrics {
    syncs: Family<OutcomeLabel, Counter>,
    sync_seconds: Histogram,
    /// Objects of the projects that this replica plans for.
    objects: Family<StateLabel, Gauge>,
    /// Projects that this replica plans for, by phase.
    projects: Family<StateLabel, Gauge>,
    drift: Counter,
    pruned: Counter,
}

impl PlannerMetrics {
    /// Creates the families and registers them.
    pub fn new(registry: &mut Registry) -> Self {
        let registry = registry.sub_registry_with_prefix("kas");
        let metrics = Self {
            syncs: Family::default(),
            sync_seconds: Histogram::new([0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0, 60.0, 300.0, 3_600.0]),
            objects: Family::default(),
            projects: Family::default(),
            drift: Counter::default(),
            pruned: Counter::default(),
        };
        registry.register(
            "gitops_syncs",
            "Syncs of manifest projects, by their outcome",
            metrics.syncs.clone(),
        );
        registry.register(
            "gitops_sync_seconds",
            "Duration of syncs, including the wait until objects are current",
            metrics.sync_seconds.clone(),
        );
        registry.register(
            "gitops_objects",
            "Objects of the manifest projects that this replica plans for",
            metrics.objects.clone(),
        );
        registry.register(
            "gitops_projects",
            "Manifest projects that this replica plans for, by the phase of their last sync",
            metrics.projects.clone(),
        );
        registry.register(
            "gitops_drift",
            "Objects that differed from what was applied",
            metrics.drift.clone(),
        );
        registry.register("gitops_pruned", "Objects that were deleted", metrics.pruned.clone());
        // They exist from the start, so that the first failure is an increase.
        for outcome in ["synced", "degraded", "failed"] {
            metrics.syncs.get_or_create(&OutcomeLabel { outcome }).inc_by(0);
        }
        metrics.count(
            ["current", "failed", "other", "to_prune"].map(|state| (state, 0)),
            ["synced", "degraded", "failed", "busy"].map(|state| (state, 0)),
        );
        metrics
    }

    /// Returns how many syncs applied a whole set, since the process began.
    pub fn completed(&self) -> u64 {
        let of = |outcome| self.syncs.get_or_create(&OutcomeLabel { outcome }).get();
        of("synced") + of("degraded")
    }

    pub(crate) fn synced(&self, outcome: &'static str, seconds: f64, pruned: usize) {
        self.syncs.get_or_create(&OutcomeLabel { outcome }).inc();
        self.sync_seconds.observe(seconds);
        self.pruned.inc_by(pruned as u64);
    }

    pub(crate) fn drifted(&self, objects: usize) {
        self.drift.inc_by(objects as u64);
    }

    pub(crate) fn count(&self, objects: [(&'static str, usize); 4], projects: [(&'static str, usize); 4]) {
        for (state, count) in objects {
            self.objects.get_or_create(&StateLabel { state }).set(i64::try_from(count).unwrap_or(i64::MAX));
        }
        for (state, count) in projects {
            self.projects.get_or_create(&StateLabel { state }).set(i64::try_from(count).unwrap_or(i64::MAX));
        }
    }
}
