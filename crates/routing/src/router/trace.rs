//! The steps of a request on its way to the agent, for callers that ask for them.

use std::sync::Arc;

use http::{HeaderMap, HeaderName, HeaderValue};
use parking_lot::Mutex;
use tokio::time::Instant;

/// The response header of each step.
const EXPLAIN: HeaderName = HeaderName::from_static("kas-explain");
/// The maximum number of steps.
const STEPS: usize = 64;

/// The steps so far. The default records nothing, and formats no text.
#[derive(Clone, Debug, Default)]
pub struct RouteTrace(Option<Arc<Steps>>);

#[derive(Debug)]
struct Steps {
    begun: Instant,
    steps: Mutex<Vec<String>>,
}

impl RouteTrace {
    /// Starts a recording now.
    pub fn begin() -> Self {
        Self(Some(Arc::new(Steps { begun: Instant::now(), steps: Mutex::default() })))
    }

    /// Adds a step, unless there are too many.
    pub fn note(&self, step: impl FnOnce() -> String) {
        if let Some(trace) = &self.0 {
            let micros = trace.begun.elapsed().as_micros();
            let mut steps = trace.steps.lock();
            if steps.len() < STEPS {
                steps.push(format!("{micros} {}", step()));
            }
        }
    }

    /// Writes the steps, each as `<microseconds since the request arrived> <text>`.
    pub fn write_to(&self, headers: &mut HeaderMap) {
        if let Some(trace) = &self.0 {
            for step in &*trace.steps.lock() {
                // Names of replicas are ASCII. Other characters are omitted.
                let text: String = step.chars().filter(|c| c.is_ascii_graphic() || *c == ' ').collect();
                if let Ok(value) = HeaderValue::try_from(text) {
                    headers.append(EXPLAIN, value);
                }
            }
        }
    }
}
