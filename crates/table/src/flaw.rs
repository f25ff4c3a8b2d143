//! Switches that break one rule each, in tests only, to show that a test can fail.
//!
//! Each test of a known bug runs twice: without a flaw, and with its flaw, with which it must fail.

/// A rule to break.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(not(test), allow(dead_code))]
pub(crate) enum Flaw {
    /// Operations are applied whatever their version is.
    AnyVersion,
    /// Operations during a snapshot change only the old set, and are lost when the snapshot replaces it.
    OpsLostBySwap,
    /// A complete snapshot replaces a copy that is newer than it.
    OldSnapshotWins,
    /// An owner publishes every insert and remove, without counting.
    NoCount,
    /// Each difference requests a snapshot at once.
    NoBackoff,
    /// An older epoch replaces a newer one.
    AnyEpoch,
    /// One vote is enough to drop a copy.
    OneVoteKills,
    /// A copy is used for answers until a tick drops it.
    NoExpiry,
    /// Masks stay when a newer version makes them void.
    StickyMask,
    /// Digests are not compared.
    NoDigest,
}

#[cfg(test)]
thread_local! {
    static ACTIVE: std::cell::Cell<Option<Flaw>> = const { std::cell::Cell::new(None) };
}

/// Whether `flaw` is switched on. Always false outside tests.
#[cfg(not(test))]
pub(crate) const fn flawed(_: Flaw) -> bool {
    false
}

/// Whether `flaw` is switched on in this thread.
#[cfg(test)]
pub(crate) fn flawed(flaw: Flaw) -> bool {
    ACTIVE.get() == Some(flaw)
}

/// Runs `test` with a flaw, and fails unless `test` fails.
#[cfg(test)]
pub(crate) fn must_fail_with(flaw: Flaw, test: impl FnOnce() + std::panic::UnwindSafe) {
    ACTIVE.set(Some(flaw));
    let outcome = std::panic::catch_unwind(test);
    ACTIVE.set(None);
    assert!(outcome.is_err(), "the test passes with {flaw:?}, so it cannot detect it");
}
