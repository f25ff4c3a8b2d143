//! agentk, the agent: runs in or next to a Kubernetes cluster, connects to kas, and serves requests through
//! reverse tunnels.
//!
//! [`supervisor`] keeps a [`session`] with each of two [`replica`]s of kas. A session is one transport
//! connection with a configuration stream and a [`pool`] of tunnels. [`address_selector`] chooses the address
//! of the connection, and [`dial`] makes it. A request that arrives through a tunnel goes to a [`module`].
//! The [`policy`] of the cluster's owner limits what requests may do, and the [`audit`] log records them.
//!
//! agentk stays small: logic that can live in kas does.

pub mod address_selector;
pub mod app;
pub mod audit;
pub mod calls;
pub mod cli;
pub mod cluster;
pub mod dial;
pub mod doctor;
mod flaw;
pub mod metrics;
pub mod module;
pub mod observability;
pub mod policy;
pub mod pool;
mod refusals;
pub mod replica;
pub mod session;
pub mod supervisor;
pub mod token;
