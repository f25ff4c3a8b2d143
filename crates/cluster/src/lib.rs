//! Who holds which agent: the traits through which the router and the APIs see it, and versions
//! that are good enough for a single replica.

mod history;
pub mod memory;
pub mod tracker;

#[cfg(feature = "testing")]
pub mod contract;

pub use history::History;
pub use memory::InMemoryTracker;
pub use tracker::{
    Account, AgentMeta, Belief, Candidate, Connected, Connection, Lease, Load, Located, Mark, Query, Replica,
    ReplicaEvent, ReplicaStatus, Replicas, Standing, Tracker, TrackerError, TrackerStatus, Unanswered, Wire,
};
