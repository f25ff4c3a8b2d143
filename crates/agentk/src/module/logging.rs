//! Applies the log level of the configuration that kas pushes.

use std::sync::Arc;

use process::telemetry::Level;
use proto::gitlab::agent::agentcfg::{AgentConfiguration, LoggingLevelEnum};

use super::{Context, Module, Task};

/// Applies `observability.logging.level`. It serves no requests.
#[derive(Debug)]
pub struct Logging(Level);

impl Logging {
    /// Creates the module, which changes this level.
    pub fn new(level: Level) -> Self {
        Self(level)
    }
}

impl Module for Logging {
    fn run(self: Arc<Self>, mut context: Context) -> Task {
        Box::pin(async move {
            while let Some(configuration) = context.next_configuration().await {
                self.0.set(level(&configuration));
            }
        })
    }
}

/// Returns the configured level; `info` when there is none.
fn level(configuration: &AgentConfiguration) -> &'static str {
    let logging =
        configuration.observability.as_ref().and_then(|observability| observability.logging.as_ref());
    match logging.map_or(LoggingLevelEnum::Info, |logging| logging.level()) {
        LoggingLevelEnum::Info => "info",
        LoggingLevelEnum::Debug => "debug",
        LoggingLevelEnum::Warn => "warn",
        LoggingLevelEnum::Error => "error",
    }
}

#[cfg(test)]
mod tests {
    use proto::gitlab::agent::agentcfg::{LoggingCf, ObservabilityCf};

    use super::*;

    #[test]
    fn level_is_that_of_the_configuration_or_info() {
        assert_eq!(level(&AgentConfiguration::default()), "info");
        let logging = LoggingCf { level: LoggingLevelEnum::Debug.into(), ..LoggingCf::default() };
        let observability = ObservabilityCf { logging: Some(logging), ..ObservabilityCf::default() };
        let configuration =
            AgentConfiguration { observability: Some(observability), ..AgentConfiguration::default() };
        assert_eq!(level(&configuration), "debug");
    }
}
