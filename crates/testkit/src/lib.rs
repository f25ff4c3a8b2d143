//! testkit

pub mod demo_api;
pub mod kubernetes;
