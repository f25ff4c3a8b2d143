//! Questions to many clusters: real Prometheus servers behind a real API server, one for each agent, and one
//! that has all data.

#![allow(clippy::unwrap_used)] // a test may panic

mod catalog;
mod expressions;
mod grafana;
mod promql;
mod setup;
