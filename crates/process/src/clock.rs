//! The wall clock, for timestamps that leave the process. No protocol decision uses it.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Returns the time since 1970-01-01 00:00 UTC.
#[allow(clippy::disallowed_methods)] // the one place
pub fn wall() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}
