//! Tests of `deploy/` with real programs: Helm's engine, a Kubernetes API server, Prometheus' tool, systemd's
//! tool, kas and agentk.

mod chaos_mesh;
mod charts;
mod confined;
mod endpoint;
mod images;
mod kustomize;
mod monitoring;
mod pods;
mod prometheus;
mod tools;
mod units;
