//! [`Target`]: where a sink sends.

use std::sync::Arc;

use async_trait::async_trait;
use sinks::Record;

/// What came of an item.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Sent {
    /// It was taken.
    Done,
    /// It was not.
    Again {
        /// Why.
        why: String,
        /// Something answered, which refuses this item only. Others may pass.
        is_reached: bool,
    },
}

/// Where a sink sends.
#[async_trait]
pub(super) trait Target: Send + Sync {
    /// Returns how many items are sent at once.
    fn at_once(&self) -> usize;

    /// Sends items. Returns for each what came of it.
    async fn send(&self, records: &[Arc<Record>]) -> Vec<Sent>;
}

/// Why a sink cannot be sent to at all.
#[derive(Debug, thiserror::Error)]
pub enum TargetError {
    /// The certificates for a webhook cannot be used.
    #[error("webhook.ca_certificate_file cannot be used")]
    Tls(#[from] net::tls::Error),
    /// The section `redis` cannot be used.
    #[error("{0}")]
    Redis(String),
}
