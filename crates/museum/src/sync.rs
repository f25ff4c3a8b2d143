//! Locks, flags and wake-ups that let another task go on before each operation, if the test runs under
//! [`explore`](crate::schedule::explore). Otherwise they are those of the products, so that all other tests
//! of a crate can use the same build.
//!
//! A crate whose concurrency is explored has a module `sync` that takes these types in its own tests, and in
//! all other builds those that are wrapped here.

use std::{
    fmt,
    ops::{Deref, DerefMut},
    task::Waker,
};

pub use std::sync::atomic::Ordering;

use crate::schedule::{is_explored, point};

/// A lock, as that of `parking_lot`.
#[derive(Default)]
pub struct Mutex<T> {
    /// Whose turn it is, among the tasks of an explored test.
    turn: shuttle::sync::Mutex<()>,
    value: parking_lot::Mutex<T>,
}

/// The guard of a [`Mutex`].
pub struct MutexGuard<'a, T> {
    // Dropped first.
    value: parking_lot::MutexGuard<'a, T>,
    _turn: Option<shuttle::sync::MutexGuard<'a, ()>>,
}

impl<T> Mutex<T> {
    /// Creates an unlocked one.
    pub fn new(value: T) -> Self {
        Self { turn: shuttle::sync::Mutex::new(()), value: parking_lot::Mutex::new(value) }
    }

    /// Locks it.
    ///
    /// # Panics
    /// In an explored test, if a task that has failed holds the lock.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        if !is_explored() {
            return MutexGuard { value: self.value.lock(), _turn: None };
        }
        let turn = match self.turn.lock() {
            Ok(turn) => turn,
            Err(poisoned) => poisoned.into_inner(),
        };
        let value = self.value.try_lock().expect("no other task has the lock");
        MutexGuard { value, _turn: Some(turn) }
    }
}

impl<T: fmt::Debug> fmt::Debug for Mutex<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.value.fmt(f)
    }
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}

macro_rules! atomic {
    ($name:ident, $value:ty, $what:literal) => {
        #[doc = $what]
        #[derive(Debug, Default)]
        pub struct $name(std::sync::atomic::$name);

        impl $name {
            /// Creates one with this value.
            pub const fn new(value: $value) -> Self {
                Self(std::sync::atomic::$name::new(value))
            }

            /// Returns the value.
            pub fn load(&self, order: Ordering) -> $value {
                point();
                self.0.load(order)
            }

            /// Replaces the value.
            pub fn store(&self, value: $value, order: Ordering) {
                point();
                self.0.store(value, order);
            }

            /// Replaces the value, and returns the one before.
            pub fn swap(&self, value: $value, order: Ordering) -> $value {
                point();
                self.0.swap(value, order)
            }
        }
    };
}

atomic!(AtomicBool, bool, "A flag.");
atomic!(AtomicUsize, usize, "A count.");

impl AtomicUsize {
    /// Adds to the value, and returns the one before.
    pub fn fetch_add(&self, value: usize, order: Ordering) -> usize {
        point();
        self.0.fetch_add(value, order)
    }

    /// Subtracts from the value, and returns the one before.
    pub fn fetch_sub(&self, value: usize, order: Ordering) -> usize {
        point();
        self.0.fetch_sub(value, order)
    }
}

/// The waker of one task, as that of `futures_util`.
#[derive(Debug, Default)]
pub struct AtomicWaker(futures_util::task::AtomicWaker);

impl AtomicWaker {
    /// Creates an empty one.
    pub const fn new() -> Self {
        Self(futures_util::task::AtomicWaker::new())
    }

    /// The next [`wake`](Self::wake) wakes this one.
    pub fn register(&self, waker: &Waker) {
        point();
        self.0.register(waker);
        point();
    }

    /// Wakes the registered waker.
    pub fn wake(&self) {
        point();
        self.0.wake();
    }
}

/// Notifies tasks, as that of `tokio`.
#[derive(Debug, Default)]
pub struct Notify(tokio::sync::Notify);

impl Notify {
    /// Creates one without a permit.
    pub fn new() -> Self {
        Self::default()
    }

    /// Wakes a task that waits, or the next one that will.
    pub fn notify_one(&self) {
        point();
        self.0.notify_one();
    }

    /// Wakes the tasks that wait now.
    pub fn notify_waiters(&self) {
        point();
        self.0.notify_waiters();
    }

    /// Waits.
    ///
    /// # Cancel safety
    /// As that of `tokio`.
    pub async fn notified(&self) {
        point();
        self.0.notified().await;
    }
}

/// A channel for one value, as that of `tokio`.
pub mod oneshot {
    use std::{
        pin::Pin,
        task::{Context, Poll},
    };

    pub use tokio::sync::oneshot::error::RecvError;

    use crate::schedule::point;

    /// Where the value is sent.
    #[derive(Debug)]
    pub struct Sender<T>(tokio::sync::oneshot::Sender<T>);

    /// Where the value arrives.
    #[derive(Debug)]
    pub struct Receiver<T>(tokio::sync::oneshot::Receiver<T>);

    /// Creates a channel.
    pub fn channel<T>() -> (Sender<T>, Receiver<T>) {
        let (sender, receiver) = tokio::sync::oneshot::channel();
        (Sender(sender), Receiver(receiver))
    }

    impl<T> Sender<T> {
        /// Sends the value.
        ///
        /// # Errors
        /// The value, if the receiver is dropped.
        pub fn send(self, value: T) -> Result<(), T> {
            point();
            self.0.send(value)
        }
    }

    impl<T> Future for Receiver<T> {
        type Output = Result<T, RecvError>;

        fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
            point();
            Pin::new(&mut self.0).poll(cx)
        }
    }
}
