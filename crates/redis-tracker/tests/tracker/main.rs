//! The tracker with a real Redis. Each test starts its own.

#![allow(clippy::unwrap_used)] // a test may panic

mod behaviour;
mod connections;
mod contract;
mod faults;
mod groups;
mod world;
