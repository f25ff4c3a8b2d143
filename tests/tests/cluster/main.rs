//! Several replicas as real processes: what they believe of each other, and what becomes of requests
//! meanwhile.
//!
//! Each museum test (`chaos.md`, B.3) says which public bug it stands for, and on which broken build it was
//! seen to fail. What needs hosts of their own makes network namespaces, as root; the rest runs on loopback.

#![allow(clippy::unwrap_used)] // a test may panic

mod churn;
mod crashes;
mod credentials;
mod fake_owner;
mod faults;
mod join;
mod known_bugs;
mod leases;
mod leaving;
mod ledger;
mod membership;
mod mixed;
mod mtls;
mod replica14;
mod routing;
mod shared;
mod unresponsive;
