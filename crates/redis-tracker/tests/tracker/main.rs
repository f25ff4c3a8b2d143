//! The tracker on a real Redis, which each test starts for itself.

#![allow(clippy::unwrap_used)] // a test may panic

mod behaviour;
mod connections;
mod faults;
mod groups;
mod kept;
mod world;
