//! [`RedisTracker`]: who holds which agent, shared through Redis.
//!
//! The hashes are those of GitLab agent 14.1 (`keys`, `value`). Beside them each replica has one liveness key: its
//! entries count only while that key is there, so that one expiry drops them all. What a replica announces is
//! remembered here and written by one task (`own`, `writer`); what others announce is asked for once per agent, kept, and
//! mended by what they publish (`cache`, `reader`). No decision uses the clock of this machine: Redis' own says what has
//! expired.

mod cache;
pub mod connect;
mod keys;
mod own;
mod reader;
mod tracker;
mod value;
mod writer;

pub use connect::{Address, Connect, Error, Target, Tls};
pub use tracker::{Counted, Counts, Health, Options, RedisTracker, State};
pub use value::fuzz;
