//! Tests of the binary `kasctl` with a fake kas in this process: what kasctl sends and prints, and its exit
//! codes.
//!
//! The crate `tests` has tests with a real kas and agents.

#![allow(clippy::unwrap_used, reason = "clippy spares test functions, not the helpers of a test target")]

mod agents;
mod catalog;
mod command_line;
mod connection;
mod explain;
mod failures;
mod fake;
mod gitops;
mod kubeconfig;
mod login;
mod pods;
mod probe;
mod replicas;
mod request;
mod token;

use fake::Run;
use serde_json::Value;

fn json_of(run: &Run) -> Value {
    serde_json::from_str(&run.stdout).unwrap_or_else(|e| panic!("{e}: {run:?}"))
}
