//! [`Messages`]: the messages of a subscription, which ends if its caller does not take them.

use std::sync::{Arc, Weak};

use grpc::{Code, Status};
use parking_lot::Mutex;
use proto::kas::api::v1::WatchViewResponse;
use tokio::{task::AbortHandle, time::Instant};

use super::{Subscription, director::STALE};

/// The messages of a subscription. Each is made when the one before was taken.
pub(crate) struct Messages {
    shared: Arc<Shared>,
    /// Ends the subscription of a caller that takes nothing.
    watchdog: AbortHandle,
    over: bool,
}

struct Shared {
    /// `None`: nobody has taken its messages. The lock is held while one is awaited.
    subscription: tokio::sync::Mutex<Option<Subscription>>,
    /// When the last message was taken.
    taken: Mutex<Instant>,
}

impl Drop for Messages {
    fn drop(&mut self) {
        self.watchdog.abort();
    }
}

impl Messages {
    pub(crate) fn of(subscription: Subscription) -> Self {
        let shared = Arc::new(Shared {
            subscription: tokio::sync::Mutex::new(Some(subscription)),
            taken: Mutex::new(Instant::now()),
        });
        let watchdog = tokio::spawn(end_stalled(Arc::downgrade(&shared))).abort_handle();
        Self { shared, watchdog, over: false }
    }

    /// Returns the next message; `None`: there is none any more.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub(crate) async fn next(&mut self) -> Option<Result<WatchViewResponse, Status>> {
        if self.over {
            return None;
        }
        let mut subscription = self.shared.subscription.lock().await;
        let Some(subscription) = subscription.as_mut() else {
            self.over = true;
            let text = format!("nothing of the answer was read for {STALE:?}: ask again, with resume");
            return Some(Err(Status::new(Code::Unavailable, text)));
        };
        let next = subscription.next().await;
        *self.shared.taken.lock() = Instant::now();
        next
    }
}

/// Drops the subscription when no message was taken for long. A client that waits for one is not late.
async fn end_stalled(of: Weak<Shared>) {
    while let Some(taken) = of.upgrade().map(|shared| *shared.taken.lock()) {
        tokio::time::sleep_until(taken + STALE).await;
        let Some(shared) = of.upgrade() else { return };
        let is_awaited = match shared.subscription.try_lock() {
            Ok(mut subscription) if shared.taken.lock().elapsed() >= STALE => {
                *subscription = None;
                return;
            }
            Ok(_) => false,
            Err(_) => true,
        };
        drop(shared);
        if is_awaited {
            tokio::time::sleep(STALE).await;
        }
    }
}
