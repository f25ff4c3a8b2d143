//! Balancers and proxies in front of kas: nginx, HAProxy and Envoy, as docs/proxies.md describes them.
//!
//! [`agents`] connects agents through them, with gRPC and WebSocket: the timers of proxies for silent
//! streams. [`endpoint`] puts them in front of the endpoint for kubectl.
//!
//! The normal tests use short timers. The ignored tests use the default timers, and take eleven minutes:
//! `cargo test -p tests --test proxies -- --ignored`.

#![allow(clippy::unwrap_used)] // a test may panic

mod agents;
mod direct;
mod endpoint;
mod exchange;

/// The timers of HAProxy in Debian's package.
const HAPROXY: &str = "  timeout connect 5000\n  timeout client 50000\n  timeout server 50000\n";
