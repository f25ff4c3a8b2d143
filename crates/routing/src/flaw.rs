//! Switches that break one rule each, in tests only, to show that a test can fail.

/// A rule to break.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(not(test), allow(dead_code))]
pub(crate) enum Flaw {
    /// Between the look for an idle tunnel and the place in the queue, the lock is released.
    QueueAfterUnlock,
    /// A grant that nobody takes keeps its tunnel.
    GrantKeepsTunnel,
    /// A free tunnel is idle before it is offered to the requests that wait.
    IdleBeforeOffer,
    /// A request whose waiter has left keeps its place in the queue's count.
    WaiterNeverLeaves,
    /// Whether a lease is revoked is examined before the waker is registered.
    RevokedBeforeRegister,
    /// Between the look for waiting requests and the lease, the lock is released.
    LeaseAfterUnlock,
    /// Requests for a leased tunnel look for one, and wait in another critical section.
    PoolWaitAfterUnlock,
    /// The busy tunnels of a process do not count: one process of an agent gets all requests.
    OneProcess,
}

/// Whether `flaw` is switched on. Always false outside tests.
#[cfg(not(test))]
pub(crate) const fn flawed(_: Flaw) -> bool {
    false
}

#[cfg(test)]
museum::switches!(Flaw);
