//! How fast the mesh gossips, and when a process counts as dead or hung.

use std::time::Duration;

/// How fast the mesh gossips, and how soon a silent member counts as dead.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Timing {
    /// Time between gossip rounds. Each round sends to at most five others. A shorter interval detects deaths
    /// sooner and costs more datagrams: 200 ms was measured at 11 KB/s with 30 processes.
    pub interval: Duration,
    /// A member is dead after this many of its mean heartbeat intervals. 8 had no false deaths with 30 % of
    /// the datagrams lost.
    pub phi: f64,
    /// The mean interval that is assumed for a new member. With more than twice `interval`, the mesh is slow
    /// to detect a second death of the same process.
    pub initial_interval: Duration,
    /// How long a dead incarnation is remembered, so that no other process brings it back. It is gossiped for
    /// half of that time: 24 h and rolling restarts of 100 processes overflow chitchat's digest. A process
    /// that hears of it in that time remembers it for a grace period of its own. If new processes start more
    /// often than every half grace period and live longer than that, they keep passing it on.
    /// [`Counters::incarnations`](crate::Counters::incarnations) shows how many are remembered.
    pub dead_grace: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            interval: Duration::from_millis(200),
            phi: 8.0,
            initial_interval: Duration::from_millis(300),
            dead_grace: Duration::from_secs(600),
        }
    }
}

impl Timing {
    /// Whether a mesh can work with these times.
    pub(crate) fn is_valid(&self) -> bool {
        let fits = |time: Duration, most: u64| !time.is_zero() && time <= Duration::from_secs(most);
        fits(self.interval, 60)
            && fits(self.initial_interval, 600)
            && fits(self.dead_grace, 30 * 86_400)
            && self.phi.is_finite()
            && self.phi > 1.0
    }
}

/// What is published while the main runtime hangs.
#[derive(Debug, Clone)]
pub(crate) struct HealthGate {
    pub(crate) key: String,
    pub(crate) value: String,
    pub(crate) after: Duration,
}
