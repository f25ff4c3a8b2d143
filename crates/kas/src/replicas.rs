//! The other replicas of the cluster.
//!
//! * [`Mesh`]: finds them and calls them, as the configuration says.
//! * [`Backend`]: how replicas learn of each other. [`gossip_backend`]: by gossip and table streams;
//!   [`redis_backend`]: through Redis.
//! * [`advertise`]: the address at which they reach this replica.
//! * `ask`, `answer`: lists and reports over all replicas.

pub mod advertise;
mod answer;
mod ask;
mod backend;
pub mod gossip_backend;
mod mesh;
pub mod metrics;
#[cfg(any(test, feature = "flaws"))]
pub(crate) mod records;
pub mod redis_backend;

pub use self::{
    backend::Backend,
    mesh::{Mesh, MeshError, Rotation},
};
