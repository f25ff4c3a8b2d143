//! Streams that kas refuses by a limit.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// At most one line is logged in this time.
const WARN_INTERVAL: Duration = Duration::from_secs(60);

/// Decides when refusals are logged: a kas of GitLab that has reached its limit refuses every stream until
/// the next minute.
#[derive(Debug, Default)]
pub(crate) struct RefusalLog(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    logged: Option<Instant>,
    /// Refusals since then.
    refused: u64,
}

impl RefusalLog {
    /// Records a refusal. If a line should be logged now, returns how many streams were refused since the
    /// last one.
    pub(crate) fn record(&self) -> Option<u64> {
        let mut state = self.0.lock();
        state.refused += 1;
        if state.logged.is_some_and(|logged| logged.elapsed() < WARN_INTERVAL) {
            return None;
        }
        state.logged = Some(Instant::now());
        Some(std::mem::take(&mut state.refused))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn refusals_are_logged_once_a_minute_with_their_number() {
        let log = RefusalLog::default();
        assert_eq!(log.record(), Some(1), "the first one is logged at once");
        for _ in 0..348 {
            assert_eq!(log.record(), None);
        }
        tokio::time::advance(WARN_INTERVAL).await;
        assert_eq!(log.record(), Some(349));
        assert_eq!(log.record(), None);
    }
}
