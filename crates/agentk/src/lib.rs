//! agentk

pub mod cluster;
pub mod module;
