//! Times in messages.

use std::time::Duration;

use prost_types::Timestamp;

/// Returns the time so long after the epoch of Unix.
pub(crate) fn timestamp(since_epoch: Duration) -> Timestamp {
    Timestamp {
        seconds: i64::try_from(since_epoch.as_secs()).unwrap_or(i64::MAX),
        nanos: i32::try_from(since_epoch.subsec_nanos()).unwrap_or(0),
    }
}
