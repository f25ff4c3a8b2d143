//! kas

pub mod agent_config;
pub mod config;
pub mod identity;
