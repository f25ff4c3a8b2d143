//! Logs: one line per event on standard error, in JSON unless it is a terminal.

use std::io::IsTerminal as _;

use tracing_subscriber::{
    EnvFilter, fmt::format::FmtSpan, layer::SubscriberExt as _, reload, util::SubscriberInitExt as _,
};

/// The log format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Format {
    /// JSON if standard error is not a terminal.
    #[default]
    Auto,
    /// One JSON object per line.
    Json,
    /// Text for people.
    Text,
}

/// Changes the log level of a running process.
pub struct Level(Box<dyn Fn(&str) -> bool + Send + Sync>);

impl std::fmt::Debug for Level {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Level")
    }
}

impl Level {
    /// Sets the level (`error`, `warn`, `info`, `debug`, `trace`, or a filter of targets). Returns whether it
    /// was valid.
    pub fn set(&self, level: &str) -> bool {
        (self.0)(level)
    }
}

/// Starts logging. The environment variable `RUST_LOG` takes precedence over `level`.
///
/// # Panics
/// If a logger is already set: call it once, first in `main`.
pub fn start(level: &str, format: Format) -> Level {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| filter(level));
    let (filter, handle) = reload::Layer::new(filter);
    let json = match format {
        Format::Json => true,
        Format::Text => false,
        Format::Auto => !std::io::stderr().is_terminal(),
    };
    let base = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_span_events(FmtSpan::NONE);
    let registry = tracing_subscriber::registry().with(filter);
    if json {
        registry.with(base.json().flatten_event(true)).init();
    } else {
        registry.with(base.with_target(false)).init();
    }
    Level(Box::new(move |level| EnvFilter::try_new(expand(level)).is_ok_and(|f| handle.reload(f).is_ok())))
}

fn filter(level: &str) -> EnvFilter {
    EnvFilter::try_new(expand(level)).unwrap_or_else(|_| EnvFilter::new(expand("info")))
}

/// Silences libraries. HTTP/2 libraries log each frame at debug, which hides our own messages. `redis` has
/// its colons because a filter applies to each target that begins with it, and `redis_tracker` is ours.
fn expand(level: &str) -> String {
    match level {
        "debug" | "trace" => format!(
            "{level},h2=info,hyper=info,hyper_util=info,tower=info,rustls=info,chitchat=info,hickory_resolver=info,\
             hickory_net=info,kube_runtime=error,kube_client=info,redis::=error"
        ),
        // They repeat at each attempt what discovery and the tracker log once.
        "info" | "warn" => format!("{level},kube_runtime=error,redis::=error"),
        other => other.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use tracing::Level;

    use super::*;

    #[test]
    fn log_filters_silence_libraries() {
        for level in ["debug", "info", "warn"] {
            let registry = tracing_subscriber::registry().with(filter(level));
            tracing::subscriber::with_default(registry, || {
                assert!(!tracing::enabled!(target: "redis::cluster_handling::async_connection", Level::WARN));
                assert!(tracing::enabled!(target: "redis::cluster_handling::async_connection", Level::ERROR));
                assert!(!tracing::enabled!(target: "kube_runtime::watcher", Level::WARN));
                // Targets that begin with the same letters are ours.
                assert!(tracing::enabled!(target: "redis_tracker::tracker", Level::WARN), "{level}");
                assert!(tracing::enabled!(target: "kas", Level::WARN), "{level}");
            });
        }
    }
}
