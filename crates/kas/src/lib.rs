//! kas: agents dial in, and requests for their clusters go out to them.
//!
//! [`app`] puts the parts together; everything below it can be used alone. The way of a request is
//! [`listener::api`] → [`routing::router`] → [`routing::registry`] → `tunnel` → agentk.

pub mod app;
pub mod audit;
pub mod certificates;
pub mod cli;
pub use kas_config as config;
pub mod listener;
pub mod observe;
pub mod page;
pub mod pods;
pub mod preflight;
pub mod refusals;
pub mod registrar;
pub mod replicas;
pub mod routing;
