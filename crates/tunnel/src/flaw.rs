//! Switches that break one rule each, in tests only, to show that a test can fail.

/// A rule to break.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(not(test), allow(dead_code))]
pub(crate) enum Flaw {
    /// The caller's stream looks whether the tunnel is over, and registers its waker in another critical
    /// section.
    WakerAfterUnlock,
    /// A request wakes the tunnel's task, and is given to the tunnel in another critical section.
    WakeBeforeWrite,
    /// A caller that leaves before its request was written does not free the tunnel.
    LeaverKeepsTunnel,
}

/// Whether `flaw` is switched on. Always false outside tests.
#[cfg(not(test))]
pub(crate) const fn flawed(_: Flaw) -> bool {
    false
}

#[cfg(test)]
museum::switches!(Flaw);
