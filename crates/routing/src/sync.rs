//! Locks, flags and wake-ups of tunnels and of the requests that wait for them.
//!
//! The tests of this crate take those of `museum`, which explores the order in which tasks run: see
//! `registry/schedules.rs`. Outside of such a test, those behave as these do.

#[cfg(not(test))]
pub(crate) use std::sync::atomic::{AtomicBool, AtomicUsize};

#[cfg(not(test))]
pub(crate) use futures_util::task::AtomicWaker;
#[cfg(test)]
pub(crate) use museum::sync::{AtomicBool, AtomicUsize, AtomicWaker, Mutex, MutexGuard, oneshot};
#[cfg(not(test))]
pub(crate) use parking_lot::{Mutex, MutexGuard};
#[cfg(not(test))]
pub(crate) use tokio::sync::oneshot;
