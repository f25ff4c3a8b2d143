//! [`Wake`]: tells a subscription what has changed.

use std::collections::BTreeSet;

use parking_lot::Mutex;
use tokio::sync::Notify;

/// Wakes a subscription, and says which of its feeds have changed.
#[derive(Debug, Default)]
pub(crate) struct Wake {
    changed: Mutex<BTreeSet<usize>>,
    pub(super) notify: Notify,
}

impl Wake {
    /// The feed with this number has changed.
    pub(crate) fn changed(&self, number: usize) {
        self.changed.lock().insert(number);
        self.notify.notify_one();
    }

    pub(super) fn take(&self) -> BTreeSet<usize> {
        std::mem::take(&mut self.changed.lock())
    }
}
