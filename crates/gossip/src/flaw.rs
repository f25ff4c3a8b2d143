//! Switches that break one rule each, to show that a test can fail: in the tests of this crate, and in the
//! build of kas with the feature `flaws`, which is for tests with real processes and never ships.

/// A rule to break.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(not(test), allow(dead_code))]
pub(crate) enum Flaw {
    /// Of two incarnations of a process, the older one is the member.
    OldGenerationStays,
    /// Dead incarnations are remembered for ten minutes, whatever the settings say.
    DeadRememberedLong,
    /// What others pass on about a process is a sign of its life.
    HearsayIsLife,
    /// A process that nobody reaches goes on sending.
    NeverSilent,
    /// A message has at most eight datagrams.
    SmallMessages,
}

/// Whether `flaw` is switched on. Always false outside tests and the build with the feature `flaws`.
#[cfg(not(any(test, feature = "flaws")))]
pub(crate) const fn flawed(_: Flaw) -> bool {
    false
}

#[cfg(any(test, feature = "flaws"))]
museum::switches!(Flaw);
