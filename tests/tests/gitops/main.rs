//! From Git to the cluster: real replicas of kas, a real agentk and a real Kubernetes API server, whose audit
//! log is the only witness of what was deleted.

mod by_itself;
mod gitlab;
mod seen;
mod setup;
mod syncs;
mod takeover;
