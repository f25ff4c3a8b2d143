//! Metrics of lookups in GitLab.

use prometheus_client::{
    encoding::{EncodeLabelSet, EncodeLabelValue},
    metrics::{counter::Counter, family::Family, histogram::Histogram},
    registry::{Registry, Unit},
};

/// How a lookup in GitLab ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
#[allow(missing_docs)]
pub enum LookupOutcome {
    Found,
    Unauthenticated,
    Forbidden,
    Unavailable,
    /// The rate limit, or the bound on lookups, refused it.
    Limited,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct LookupLabel {
    outcome: LookupOutcome,
}

/// Lookups of agents in GitLab.
#[derive(Debug)]
pub struct LookupMetrics {
    lookups: Family<LookupLabel, Counter>,
    /// Time until GitLab answered a lookup, in seconds.
    pub gitlab_seconds: Histogram,
}

impl LookupMetrics {
    /// Creates the families and registers them.
    pub fn new(registry: &mut Registry) -> Self {
        let registry = registry.sub_registry_with_prefix("kas");
        let metrics = Self {
            lookups: Family::default(),
            gitlab_seconds: Histogram::new([0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0]),
        };
        registry.register(
            "gitlab_lookups",
            "Lookups of agents in GitLab by how they ended",
            metrics.lookups.clone(),
        );
        registry.register_with_unit(
            "gitlab_lookup",
            "Time until GitLab answered a lookup",
            Unit::Seconds,
            metrics.gitlab_seconds.clone(),
        );
        metrics
    }

    /// Counts a lookup in GitLab.
    pub fn looked_up(&self, outcome: LookupOutcome) {
        self.lookups.get_or_create(&LookupLabel { outcome }).inc();
    }
}
