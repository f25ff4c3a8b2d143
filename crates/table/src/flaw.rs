//! Switches that break one rule each, to show that a test can fail: in the tests of this crate, and in the
//! build of kas with the feature `flaws`, which is for tests with real processes and never ships.
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
    /// A refused redial is no vote.
    RefusedIsNoVote,
    /// Every stream begins with a snapshot.
    NoResume,
    /// The death of a replica that drains is not noticed.
    DrainingNeverDies,
    /// One snapshot is transferred at a time.
    OneSnapshot,
}

/// Whether `flaw` is switched on. Always false outside tests and the build with the feature `flaws`.
#[cfg(not(any(test, feature = "flaws")))]
pub(crate) const fn flawed(_: Flaw) -> bool {
    false
}

#[cfg(any(test, feature = "flaws"))]
museum::switches!(Flaw);
