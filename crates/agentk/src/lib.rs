//! agentk: runs in (or next to) a cluster, dials kas, and serves what it has through reverse
//! tunnels.
//!
//! [`supervisor`] keeps a [`session`] with each of two [`replica`]s of kas: a transport connection
//! ([`dial`], at the address that [`ladder`] says) with a configuration stream and a [`pool`] of tunnels. What comes out of a tunnel goes to a
//! [`module`]. Logic belongs into kas where it can; this stays small.

pub mod app;
pub mod cli;
pub mod cluster;
pub mod dial;
pub mod direct;
pub mod doctor;
pub mod ladder;
pub mod metrics;
pub mod module;
pub mod pool;
pub mod replica;
pub mod session;
pub mod supervisor;
pub mod token;
