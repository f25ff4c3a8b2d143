//! [`Target`]: where a sink sends.

use std::sync::Arc;

use async_trait::async_trait;
use kas_config::{RedisPasswords, SinkTarget};
use sinks::Record;

use super::{redis::Redis, webhook::Webhook};

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

/// Returns the target of a sink.
///
/// # Errors
/// See [`TargetError`].
pub(super) fn target(
    sink: &kas_config::Sink,
    sinks: &kas_config::Sinks,
    passwords: &RedisPasswords,
) -> Result<Arc<dyn Target>, TargetError> {
    Ok(match &sink.target {
        SinkTarget::Webhook(webhook) => Arc::new(Webhook::new(webhook, sinks.allowed.clone())?),
        SinkTarget::Redis(form) => {
            let missing = || TargetError::Redis("there is no section redis".to_owned());
            let redis = sinks.redis.as_deref().ok_or_else(missing)?;
            Arc::new(Redis::new(&sink.name, *form, redis, passwords.clone())?)
        }
        SinkTarget::Log => Arc::new(Log(sink.name.clone())),
    })
}

/// The log of kas.
struct Log(String);

#[async_trait]
impl Target for Log {
    fn at_once(&self) -> usize {
        100
    }

    async fn send(&self, records: &[Arc<Record>]) -> Vec<Sent> {
        for record in records {
            let event = std::str::from_utf8(&record.json).unwrap_or_default();
            tracing::info!(sink = self.0, kind = record.about.as_str(), event, "news");
        }
        vec![Sent::Done; records.len()]
    }
}
