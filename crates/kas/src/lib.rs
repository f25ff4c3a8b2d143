//! kas: agents dial in, and requests for their clusters go out to them.
//!
//! [`app`] puts the parts together; everything below it can be used alone. The way of a request is
//! [`listener::api`] → [`router`] → [`tunnel_registry`] → `tunnel` → agentk.

pub mod advertise;
pub mod agent_config;
pub mod app;
pub mod audit;
pub mod auth;
pub mod certificates;
pub mod cli;
pub mod config;
pub mod gitlab;
pub mod identity;
pub mod listener;
pub mod mesh;
pub mod metadata;
pub mod metrics;
pub mod observe;
pub mod page;
pub mod peer;
pub mod pods;
pub mod rate_limit;
pub mod registrar;
pub mod replication;
pub mod router;
pub mod shared;
pub mod tunnel_registry;
