//! The monotonic clock of the machine, which all processes of a run share.

use history::Micros;

/// Returns the time since the machine was started.
pub(crate) fn now() -> Micros {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    // The clock of the system begins at 0.
    let (seconds, nanos) = (u64::try_from(now.tv_sec).unwrap_or(0), u64::try_from(now.tv_nsec).unwrap_or(0));
    seconds * history::SECOND + nanos / 1000
}

/// Returns a duration in microseconds.
pub(crate) fn micros(duration: std::time::Duration) -> Micros {
    u64::try_from(duration.as_micros()).unwrap_or(Micros::MAX)
}

/// Returns a time in milliseconds.
#[expect(clippy::cast_precision_loss, reason = "times of a run are far below 2^52 microseconds")]
pub(crate) fn millis(time: Micros) -> f64 {
    time as f64 / 1000.0
}
