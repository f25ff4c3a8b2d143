//! [`RedisTracker`]: which replica holds which agent, shared through Redis.
//!
//! The hashes are those of GitLab agent 14.1 (`keys`, `value`). In addition, each replica has a liveness key:
//! its entries count only while that key exists, so that one expiry drops them all. What this replica
//! announces is kept in memory and written by one task (`outbox`, `writer`). What others announce is read
//! once per agent, cached, and updated by the events that they publish (`cache`, `reader`). Agents that only
//! replicas of 14.1 hold are searched for when a list needs them (`search`). No decision uses the clock of
//! this machine: the clock of Redis decides what has expired.

mod answer;
mod cache;
pub mod connect;
mod keys;
mod outbox;
mod projects;
mod publisher;
mod reader;
#[cfg(any(test, feature = "flaws"))]
mod records;
mod search;
mod tracker;
mod value;
mod writer;

pub use connect::{Address, Connect, Error, Target, Tls};
pub use publisher::Publisher;
pub use tracker::{Counted, Counts, Health, Options, RedisTracker};
#[cfg(feature = "fuzzing")]
pub use value::decode_all;
