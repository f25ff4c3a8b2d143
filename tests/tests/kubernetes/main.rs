//! Real processes against a real Kubernetes API server: kube-apiserver and etcd, kas, agentk with a service
//! account's token, kasctl.
//!
//! One test runs at a time, so that what it measures is its own, and the API server is shared: see [`setup`].

mod balancers;
mod certificates;
mod clients;
mod conformance;
mod connect;
mod deploy;
mod exec;
mod failures;
mod kubectl;
mod libraries;
mod memory;
mod policy;
mod reads;
mod replicas;
mod restart;
mod setup;
mod terminal;
mod upgrades;
mod views;
mod views_http;
mod writes;
