//! The lock that the two streams of a tunnel share.
//!
//! The tests of this crate take that of `museum`, which explores the order in which tasks run: see
//! `kas_end/schedules.rs`. Outside of such a test, it behaves as this one does.

#[cfg(test)]
pub(crate) use museum::sync::{Mutex, MutexGuard};
#[cfg(not(test))]
pub(crate) use parking_lot::{Mutex, MutexGuard};
