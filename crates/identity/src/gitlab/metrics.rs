//! Metrics of the cache of GitLab's answers.

use prometheus_client::{
    encoding::{EncodeLabelSet, EncodeLabelValue},
    metrics::{counter::Counter, family::Family},
    registry::Registry,
};

/// The result of looking up a token in the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
#[allow(missing_docs)]
pub enum CacheAnswer {
    Agent,
    Error,
    /// A lookup of the token was already running.
    Joined,
    Nothing,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CacheLabel {
    answer: CacheAnswer,
}

/// Metrics of the cache of GitLab's answers about tokens.
#[derive(Debug)]
pub struct CacheMetrics {
    /// Renewals of connected agents that began after the answer had expired.
    pub late_renewals: Counter,
    cache: Family<CacheLabel, Counter>,
}

impl CacheMetrics {
    /// Creates and registers the metric families.
    pub fn new(registry: &mut Registry) -> Self {
        let registry = registry.sub_registry_with_prefix("kas");
        let metrics = Self { late_renewals: Counter::default(), cache: Family::default() };
        registry.register(
            "identity_late_renewals",
            "Renewals of connected agents that began after their answer from GitLab had expired (agent.info_cache_ttl)",
            metrics.late_renewals.clone(),
        );
        registry.register(
            "identity_cache",
            "Tokens presented by agents, by what the cache of GitLab's answers contained",
            metrics.cache.clone(),
        );
        metrics
    }

    /// Counts the result of looking up a token in the cache.
    pub fn cached(&self, answer: CacheAnswer) {
        self.cache.get_or_create(&CacheLabel { answer }).inc();
    }
}
