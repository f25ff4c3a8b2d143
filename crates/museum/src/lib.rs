//! Known bugs on purpose, for tests only: no program that ships depends on this crate.
//!
//! A test that has never failed proves little. Each test of the bug museum therefore runs twice: with the
//! build as it is, in which it must pass, and with a *flaw*, in which it must fail. A flaw is a switch that
//! breaks one rule in a crate; [`exhibit`] runs both directions, and `cargo xtask museum` prints them.
//!
//! `sync` and `schedule` explore the order in which tasks run. They need the feature `schedules`.
//!
//! [`records`] has what replicas of other versions write.

pub mod exhibit;
pub mod records;
#[cfg(feature = "schedules")]
pub mod schedule;
#[cfg(feature = "schedules")]
pub mod sync;
