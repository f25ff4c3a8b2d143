//! The wall clock, in one place: for stamps in tokens and for ages in tables.

use std::time::{Duration, SystemTime};

/// Returns the time since 1970, or zero on a machine whose clock is before that.
#[expect(
    clippy::disallowed_methods,
    reason = "tokens and tables show wall time; nothing here decides about a protocol"
)]
pub(crate) fn since_epoch() -> Duration {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()
}
