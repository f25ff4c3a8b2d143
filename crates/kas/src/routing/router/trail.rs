//! What a caller who asks for it is told of a request's way.

use std::sync::{Arc, Mutex, PoisonError};

use http::{HeaderMap, HeaderName, HeaderValue};
use tokio::time::Instant;

/// The key of each step, in response headers.
const EXPLAIN: HeaderName = HeaderName::from_static("kas-explain");
/// Steps that are kept.
const STEPS: usize = 64;

/// The steps so far; nothing is kept, or even made, for those who did not ask.
#[derive(Clone, Debug, Default)]
pub struct Trail(Option<Arc<Steps>>);

#[derive(Debug)]
struct Steps {
    begun: Instant,
    steps: Mutex<Vec<String>>,
}

impl Trail {
    /// Begins now.
    pub fn begin() -> Self {
        Self(Some(Arc::new(Steps { begun: Instant::now(), steps: Mutex::default() })))
    }

    /// Adds a step.
    pub fn note(&self, step: impl FnOnce() -> String) {
        if let Some(trail) = &self.0 {
            let micros = trail.begun.elapsed().as_micros();
            let mut steps = trail.steps.lock().unwrap_or_else(PoisonError::into_inner);
            if steps.len() < STEPS {
                steps.push(format!("{micros} {}", step()));
            }
        }
    }

    /// Writes the steps, `<microseconds since the request arrived> <text>` each.
    pub fn write_to(&self, headers: &mut HeaderMap) {
        if let Some(trail) = &self.0 {
            for step in &*trail.steps.lock().unwrap_or_else(PoisonError::into_inner) {
                // Names of replicas are ASCII; what is not is left out.
                let text: String = step.chars().filter(|c| c.is_ascii_graphic() || *c == ' ').collect();
                if let Ok(value) = HeaderValue::try_from(text) {
                    headers.append(EXPLAIN, value);
                }
            }
        }
    }
}
