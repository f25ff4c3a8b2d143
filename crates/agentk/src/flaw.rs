//! Switches that break one rule each, in tests only, to show that a test can fail.

/// A rule to break.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(not(test), allow(dead_code))]
pub(crate) enum Flaw {
    /// Pauses between attempts grow without bound.
    EndlessBackoff,
}

/// Whether `flaw` is switched on. Always false outside tests.
#[cfg(not(test))]
pub(crate) const fn flawed(_: Flaw) -> bool {
    false
}

#[cfg(test)]
museum::switches!(Flaw);
