//! [`Tries`]: the tries to read a feed, and the pauses after those that fail.

use std::{sync::Arc, time::Duration};

use tokio::{
    sync::watch,
    time::{Instant, sleep, sleep_until},
};
use views::AgentState;

use super::feed::Feed;

/// The shortest pause after a failure, for those who begin to look. Clients that ask again and again cause no
/// more tries than this allows.
pub(super) const SOON: Duration = Duration::from_secs(1);

/// The tries to read a feed. What a caller is told is never a failure of before it began to look.
pub(super) struct Tries {
    feed: Arc<Feed>,
    begun: watch::Receiver<u64>,
    /// How many had begun to look when the current try began.
    counts_for: u64,
}

impl Tries {
    pub(super) fn new(feed: &Arc<Feed>) -> Self {
        Self { feed: Arc::clone(feed), begun: feed.begun(), counts_for: 0 }
    }

    /// A try begins. It counts for all who look now.
    pub(super) fn begin(&mut self) {
        self.counts_for = *self.begun.borrow_and_update();
    }

    /// The try has failed.
    pub(super) fn failed(&mut self, reason: String) {
        // Callers that began to look before the failure were told that the rows were fresh.
        if self.feed.with(|inner| inner.condition.state == AgentState::Live) {
            self.begin();
        }
        self.feed.failed(reason, self.counts_for);
    }

    /// Waits for this long after a failed try, or for at most [`SOON`] if somebody begins to look, or has
    /// done so since the try began.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub(super) async fn pause(&mut self, wait: Duration) {
        let soon = Instant::now() + wait.min(SOON);
        tokio::select! {
            () = sleep(wait) => {}
            // The sender lives as long as the feed.
            Ok(()) = self.begun.changed() => sleep_until(soon).await,
        }
    }
}
