//! Which replica holds which agent: the traits that the router and the APIs use, and an in-memory
//! implementation that is enough for a single replica.

mod connections;
mod doors;
mod error;
mod history;
mod locator;
pub mod memory;
mod replica;
mod tracker;
mod view;

#[cfg(feature = "testing")]
pub mod contract;

pub use connections::{AgentMeta, Connected, Connection, Connections, Located, Query, Unanswered};
pub use doors::{Door, Doors, UnknownDoor};
pub use error::TrackerError;
pub use history::History;
pub use locator::{Candidate, Lease, Locator, Mark, Wire};
pub use memory::InMemoryTracker;
pub use replica::{Replica, ReplicaHealth, ReplicaState, UnknownState};
pub use tracker::Tracker;
pub use view::{
    Abandoned, AgentView, ClusterView, Load, PeerReport, RefusedCaller, ReplicaEvent, ReplicaStatus,
    Replicas, TrackerStatus,
};
