//! Metrics of direct routes.

use prometheus_client::{
    encoding::{EncodeLabelSet, EncodeLabelValue},
    metrics::{counter::Counter, family::Family},
    registry::Registry,
};

/// How a proxy asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
pub(super) enum By {
    /// It asked the listener for proxies.
    Lookup,
    /// It sent a request to the Kubernetes API endpoint.
    Accel,
}

/// Which replica holds the agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
pub(super) enum Owner {
    Here,
    Other,
    /// No agent was named, no ready replica holds it, or its address is not known.
    Unknown,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Labels {
    by: By,
    owner: Owner,
}

/// The metrics of direct routes.
#[derive(Debug)]
pub struct DirectMetrics {
    told: Family<Labels, Counter>,
}

impl DirectMetrics {
    /// Creates the families and registers them.
    pub fn new(registry: &mut Registry) -> Self {
        let told = Family::default();
        let registry = registry.sub_registry_with_prefix("kas");
        registry.register(
            "direct_told",
            "Answers to proxies that ask which replica holds an agent",
            told.clone(),
        );
        let metrics = Self { told };
        for by in [By::Lookup, By::Accel] {
            for owner in [Owner::Here, Owner::Other, Owner::Unknown] {
                metrics.told.get_or_create(&Labels { by, owner }).inc_by(0);
            }
        }
        metrics
    }

    pub(super) fn told(&self, by: By, owner: Owner) {
        self.told.get_or_create(&Labels { by, owner }).inc();
    }
}
