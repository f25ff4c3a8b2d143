//! Sends news to Redis.

use std::sync::Arc;

use async_trait::async_trait;
use kas_config::{RedisForm, RedisPasswords};
use process::error::chain;
use redis_tracker::Publisher;
use sinks::Record;

use super::target::{Sent, Target, TargetError};
use crate::replicas::redis_backend;

/// Items that are sent at once.
const AT_ONCE: usize = 100;

/// Redis.
pub(super) struct Redis {
    publisher: Publisher,
    config: kas_config::Redis,
    form: RedisForm,
    /// The stream of this sink.
    stream: String,
    /// The channel of the sink itself, for what is about no agent.
    channel: String,
}

impl Redis {
    pub(super) fn new(
        sink: &str,
        form: RedisForm,
        config: &kas_config::Redis,
        passwords: RedisPasswords,
    ) -> Result<Self, TargetError> {
        let connect = redis_backend::connect(config, passwords);
        let connect = connect.map_err(|error| TargetError::Redis(chain(&error)))?;
        let publisher = Publisher::new(connect).map_err(|error| TargetError::Redis(chain(&error)))?;
        let stream = format!("{}:kas:sink:{sink}", config.key_prefix);
        Ok(Self { publisher, config: config.clone(), form, channel: stream.clone(), stream })
    }

    fn channel(&self, record: &Record) -> String {
        match record.agent {
            Some(agent) => format!("{}:kas:agent:{agent}", self.config.key_prefix),
            None => self.channel.clone(),
        }
    }

    /// Passwords and certificates may have been replaced.
    async fn read_again(&self) {
        let config = self.config.clone();
        let reading = tokio::task::spawn_blocking(move || {
            let passwords = config.read_passwords().map_err(|problems| problems.to_string())?;
            redis_backend::connect(&config, passwords).map_err(|error| chain(&error))
        });
        let read = match reading.await {
            Ok(Ok(connect)) => self.publisher.reconfigure(connect).map_err(|error| chain(&error)),
            Ok(Err(why)) => Err(why),
            Err(error) => Err(error.to_string()),
        };
        if let Err(why) = read {
            tracing::debug!(why, "the files of the section redis cannot be used: the settings before stay");
        }
    }
}

#[async_trait]
impl Target for Redis {
    fn at_once(&self) -> usize {
        AT_ONCE
    }

    async fn send(&self, records: &[Arc<Record>]) -> Vec<Sent> {
        let sent = match self.form {
            RedisForm::Publish => {
                let messages = records.iter().map(|record| (self.channel(record), &*record.json));
                self.publisher.publish(messages.collect::<Vec<_>>()).await
            }
            RedisForm::Stream(most) => {
                let agents: Vec<String> = records
                    .iter()
                    .map(|record| record.agent.map_or_else(String::new, |agent| agent.to_string()))
                    .collect();
                let entries = records.iter().zip(&agents).map(|(record, agent)| {
                    vec![
                        ("id", record.id.as_bytes()),
                        ("type", record.about.as_str().as_bytes()),
                        ("agent", agent.as_bytes()),
                        ("event", &*record.json),
                    ]
                });
                self.publisher.add(&self.stream, most, entries.collect::<Vec<_>>()).await
            }
        };
        match sent {
            Ok(sent) => sent
                .into_iter()
                .map(|sent| match sent {
                    Ok(()) => Sent::Done,
                    Err(why) => Sent::Again { why, is_reached: true },
                })
                .collect(),
            Err(error) => {
                self.read_again().await;
                vec![Sent::Again { why: chain(&error), is_reached: false }; records.len()]
            }
        }
    }
}
