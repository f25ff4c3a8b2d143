//! kas: agents dial in, and requests for their clusters go out to them.
//!
//! [`app`] puts the parts together; everything below it can be used alone. The way of a request is
//! [`listener::api`] → [`routing::router`] → [`routing::registry`] → [`tunnel`] → agentk.

mod agent_files;
pub mod app;
pub mod certificates;
pub mod cli;
mod connected;
pub mod direct;
mod directory;
pub mod fleet;
pub mod hooks;
mod joined;
pub mod listener;
pub mod mailbox;
pub mod own_certificate;
pub mod page;
pub mod pods;
pub mod preflight;
pub mod pushes;
pub mod registrar;
pub mod replicas;
pub mod served;
pub mod sinks;
pub mod sync;
mod timestamp;
pub mod views;

#[cfg(feature = "fuzzing")]
pub use self::agent_files::fuzz as fuzz_agent_files;
