//! testkit

pub mod kubernetes;
