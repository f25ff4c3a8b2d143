//! agentk
