//! Locks and notifications of the admission of connections.
//!
//! The tests of this crate take those of `museum`, which explores the order in which tasks run: see
//! `admission/schedules.rs`. Outside of such a test, those behave as these do.

use std::{
    future::Future as _,
    pin::pin,
    task::{Context, Waker},
};

#[cfg(test)]
pub(crate) use museum::sync::{Mutex, Notify};
#[cfg(not(test))]
pub(crate) use parking_lot::Mutex;
#[cfg(not(test))]
pub(crate) use tokio::sync::Notify;

/// Wakes `waker` once this thread has run its other ready tasks, and at once outside of a runtime.
pub(crate) fn wake_after_others(waker: Waker) {
    #[cfg(test)]
    if museum::schedule::is_explored() {
        return museum::schedule::wake_later(waker);
    }
    // The first poll hands the waker to the runtime; the rest of the future is not needed.
    let _ = pin!(tokio::task::yield_now()).poll(&mut Context::from_waker(&waker));
}
