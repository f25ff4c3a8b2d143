//! Makes the [`Target`] of a sink from the configuration.

use std::sync::Arc;

use async_trait::async_trait;
use kas_config::{RedisPasswords, SinkTarget};
use sinks::Record;

use super::{
    redis::Redis,
    target::{Sent, Target, TargetError},
    webhook::Webhook,
};

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
