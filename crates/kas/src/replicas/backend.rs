//! [`Backend`]: how replicas learn of each other.

use std::sync::Arc;

use async_trait::async_trait;
use cluster::Tracker;
use grpc::service::LocalService;
use tokio::sync::watch;

use observe::refusals::Refusals;
use routing::{rate_limit::RateLimit, registry::TunnelRegistry};

/// How replicas learn of each other: by gossip, or through Redis.
#[async_trait]
pub trait Backend: Tracker {
    /// Returns whether this replica should get requests, and the reason that is reported if it should not.
    fn ready(&self) -> (watch::Receiver<bool>, &'static str);

    /// Announces that this replica leaves soon.
    fn drain(&self);

    /// Announces that this replica leaves now.
    async fn leave(&self);

    /// Returns the services of the private API by which other replicas read what this one knows; `registry`
    /// has its tunnels.
    fn services(
        self: Arc<Self>,
        registry: Arc<TunnelRegistry>,
        refusals: Arc<Refusals>,
    ) -> Vec<(String, LocalService)>;

    /// Makes a limit of this replica one that all replicas share. They know it by `name`.
    fn share_limit(&self, name: &'static str, limit: RateLimit) -> Arc<RateLimit>;

    /// Runs until dropped.
    async fn run(self: Arc<Self>);
}
