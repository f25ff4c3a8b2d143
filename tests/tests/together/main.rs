//! The features of the fleet, one after another at the same replicas, with a real API server, a Service of it
//! that takes webhooks, and a real Prometheus: by the wire of GitLab's agent 14.1, and with Redis as tracker.
//! What the audit log says of each of them.

mod audited;
mod old_agent;
mod setup;
mod with_redis;
