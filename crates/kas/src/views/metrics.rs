//! Metrics of views.

use prometheus_client::{
    encoding::{EncodeLabelSet, EncodeLabelValue},
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::Registry,
};

/// What was said about what a caller may see.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
pub(super) enum ReviewAnswer {
    Yes,
    No,
    /// The API server could not be asked.
    Failed,
    /// It was not asked: somebody had asked the same just before.
    Kept,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReviewLabels {
    answer: ReviewAnswer,
}

/// Metrics of views.
#[derive(Debug)]
pub struct ViewMetrics {
    pub(super) feeds: Gauge,
    pub(super) watches: Gauge,
    pub(super) subscriptions: Gauge,
    pub(super) bytes: Gauge,
    pub(super) lists: Counter,
    pub(super) changes: Counter,
    pub(super) failures: Counter,
    pub(super) full: Counter,
    reviews: Family<ReviewLabels, Counter>,
}

/// Counts an open watch until dropped.
pub(super) struct OpenWatch(Gauge);

impl Drop for OpenWatch {
    fn drop(&mut self) {
        self.0.dec();
    }
}

impl ViewMetrics {
    /// Creates the families and registers them.
    pub fn new(registry: &mut Registry) -> Self {
        let registry = registry.sub_registry_with_prefix("kas");
        let metrics = Self {
            feeds: Gauge::default(),
            watches: Gauge::default(),
            subscriptions: Gauge::default(),
            bytes: Gauge::default(),
            lists: Counter::default(),
            changes: Counter::default(),
            failures: Counter::default(),
            full: Counter::default(),
            reviews: Family::default(),
        };
        registry.register(
            "view_feeds",
            "Resources of agents whose rows this replica has, also those that nobody looks at any more",
            metrics.feeds.clone(),
        );
        registry.register("view_watches", "Open watches of views", metrics.watches.clone());
        registry.register("view_subscriptions", "Callers that look at views", metrics.subscriptions.clone());
        registry.register("view_bytes", "Memory of the rows of views, in bytes", metrics.bytes.clone());
        registry.register("view_lists", "Lists that were read for views", metrics.lists.clone());
        registry.register("view_changes", "Changes of rows of views", metrics.changes.clone());
        registry.register(
            "view_failures",
            "Lists and watches of views that failed; they are tried again",
            metrics.failures.clone(),
        );
        registry.register(
            "view_full",
            "Views that were given up because their rows need more than views.memory",
            metrics.full.clone(),
        );
        registry.register(
            "view_reviews",
            "Questions to API servers about what callers of views may see, by their answers; Kept: not asked again",
            metrics.reviews.clone(),
        );
        // Writing an idle family makes its series exist.
        for answer in [ReviewAnswer::Yes, ReviewAnswer::No, ReviewAnswer::Failed, ReviewAnswer::Kept] {
            metrics.reviews.get_or_create(&ReviewLabels { answer }).inc_by(0);
        }
        metrics
    }

    /// Counts what was said about what a caller may see.
    pub(super) fn review(&self, answer: ReviewAnswer) {
        self.reviews.get_or_create(&ReviewLabels { answer }).inc();
    }

    /// Counts an open watch until the value is dropped.
    pub(super) fn watch(&self) -> OpenWatch {
        self.watches.inc();
        OpenWatch(self.watches.clone())
    }
}
