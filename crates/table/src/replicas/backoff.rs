//! Delays that grow with each failure.

use std::time::Duration;

use super::StreamId;
use crate::codec;

/// Returns `first << (times − 1)`, at most `most`.
pub(super) fn backoff((first, most): (Duration, Duration), times: u32) -> Duration {
    first.saturating_mul(1 << times.saturating_sub(1).min(16)).min(most)
}

/// Shortens a delay by up to a quarter, so that replicas do not act at the same time.
pub(super) fn spread(wait: Duration, stream: StreamId) -> Duration {
    wait - wait / 4 * (codec::mix(stream.0) % 256) as u32 / 256
}
