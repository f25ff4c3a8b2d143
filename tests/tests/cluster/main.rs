//! Several replicas as real processes: their views of each other, and requests during failures.
//!
//! Tests of bugs in other systems name the public bug, and the change with which they were seen to fail.
//! Tests that need several hosts create network namespaces, as root; the others run on loopback.

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
mod needs;
mod replica14;
mod routing;
mod shared;
mod unresponsive;
