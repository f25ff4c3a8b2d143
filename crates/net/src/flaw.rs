//! Switches that break one rule each, to show that a test can fail: in the tests of this crate, and in the
//! build of kas with the feature `flaws`, which is for tests with real processes and never ships.

/// A rule to break.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(not(test), allow(dead_code))]
pub(crate) enum Flaw {
    /// Between the look for a free slot and the place in the queue, the lock is released.
    QueueAfterUnlock,
    /// A connection that ends after a slot was granted to it keeps the slot.
    LeaverKeepsSlot,
    /// A slot that is passed on is free as well.
    SlotTwice,
    /// The end of a connection wakes the listener only if it waits already.
    NotifyOnlyWaiting,
    /// An error of accepting ends the listener.
    AcceptErrorEnds,
    /// A peer that answers no ping stays connected.
    NoKeepalive,
    /// An idle connection is not asked to end.
    IdleStays,
    /// A connection is not asked to end because of its age.
    NeverOld,
}

/// Whether `flaw` is switched on. Always false outside tests and the build with the feature `flaws`.
#[cfg(not(any(test, feature = "flaws")))]
pub(crate) const fn flawed(_: Flaw) -> bool {
    false
}

#[cfg(any(test, feature = "flaws"))]
museum::switches!(Flaw);
