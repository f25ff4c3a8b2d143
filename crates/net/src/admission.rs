//! Admission of connections that are not authenticated yet.
//!
//! `half_open` bounds how many there are and how long each may stay, and `scheduler` how many of them are
//! served at a time. The scheduler is built on [`FairQueue`], which others may use too.

pub(crate) mod half_open;
mod queue;
pub(crate) mod scheduler;
#[cfg(test)]
mod schedules;

pub use self::queue::FairQueue;
