//! A client of Gitaly, GitLab's server of Git repositories. It reads and never writes.
//!
//! [`Client`] holds what all calls share: connections, rates, numbers of calls in flight, pauses after
//! failures. [`GitalyRepository`] is one repository as a [`repository::Repository`].
//!
//! Three calls are used: `CommitService/FindCommit`, `CommitService/GetTreeEntries` and
//! `BlobService/GetBlobs`. Their numbers are the same from GitLab 14.10 on. The few fields that are used are
//! declared here, and nothing is generated.

mod address;
mod answers;
mod client;
mod connection;
mod features;
mod limits;
mod messages;
mod metrics;
mod pool;
mod repo;
mod server;

#[cfg(feature = "fuzzing")]
pub use self::answers::fuzz;
pub use self::{
    address::{Address, InvalidAddress},
    client::{Client, Settings},
    features::Features,
    limits::{Limits, Priority, Rate},
    metrics::GitalyMetrics,
    repo::GitalyRepository,
    server::{Location, Server},
};
