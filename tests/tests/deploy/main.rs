//! What `deploy/` holds, on the real things: Helm's engine, a real Kubernetes API server, Prometheus' own
//! tool, systemd's, and kas and agentk themselves.

mod charts;
mod images;
mod kustomize;
mod monitoring;
mod pods;
mod prometheus;
mod tools;
mod units;
