//! What is known of tokens from earlier lookups in GitLab.

use prometheus_client::{
    encoding::{EncodeLabelSet, EncodeLabelValue},
    metrics::{counter::Counter, family::Family},
    registry::Registry,
};

/// What was known of a token when an agent showed it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
#[allow(missing_docs)]
pub enum CacheAnswer {
    Agent,
    Error,
    /// A lookup was under way already.
    Joined,
    Nothing,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CacheLabel {
    answer: CacheAnswer,
}

/// The cache of what GitLab said about tokens.
#[derive(Debug)]
pub struct CacheMetrics {
    /// Connected agents that were asked for after their time was over.
    pub late_renewals: Counter,
    cache: Family<CacheLabel, Counter>,
}

impl CacheMetrics {
    /// Creates the families and registers them.
    pub fn new(registry: &mut Registry) -> Self {
        let registry = registry.sub_registry_with_prefix("kas");
        let metrics = Self { late_renewals: Counter::default(), cache: Family::default() };
        registry.register(
            "identity_late_renewals",
            "Checks of connected agents in GitLab that began after agent.info_cache_ttl was over",
            metrics.late_renewals.clone(),
        );
        registry.register(
            "identity_cache",
            "Tokens shown by agents, by what was known of them from earlier lookups in GitLab",
            metrics.cache.clone(),
        );
        metrics
    }

    /// Counts what was known of a token.
    pub fn cached(&self, answer: CacheAnswer) {
        self.cache.get_or_create(&CacheLabel { answer }).inc();
    }
}
