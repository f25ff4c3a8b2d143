//! Which processes are alive: a small mesh of processes over sealed datagrams.
//!
//! Each process has a name, publishes a few short values, and sees the other live processes with their
//! values. There is no leader, no store and no quorum: [chitchat](https://docs.rs/chitchat) gossips
//! everything to everyone (up to some hundred processes). This crate seals its datagrams, runs it on a thread
//! of its own, and restarts it when it fails.
//!
//! ```no_run
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! use std::{collections::HashSet, sync::Arc};
//! let keys = gossip::KeyRing::derive(&["a secret of at least 32 bytes, please"])?;
//! let (_rotate, keys) = tokio::sync::watch::channel(Arc::new(keys));
//! let (_found, seeds) = tokio::sync::watch::channel(HashSet::from(["10.0.0.7:8155".parse()?]));
//! let gossip = gossip::Gossip::builder("pod-1")
//!     .cluster("production")
//!     .listen("10.0.0.8:8155".parse()?)
//!     .keys(keys)
//!     .seeds(seeds)
//!     .start()
//!     .await?;
//! gossip.publish("st", "ready")?;
//! let mut members = gossip.members();
//! while members.changed().await.is_ok() {
//!     println!("{:?}", members.borrow_and_update());
//! }
//! # Ok(()) }
//! ```
//!
//! # Guarantees
//!
//! With the default [`Timing`] and a network that carries datagrams in both directions:
//!
//! - A value reaches every live member within a few intervals. For each key, the last value wins.
//! - All members detect a crash in about 1 to 1.5 s. A busy process does not count as dead, because gossip
//!   has its own thread. Call [`Gossip::heartbeat`] from the main runtime, so that a hung main runtime is
//!   visible.
//! - After a local stall, membership is frozen for five intervals: a process that was paused itself declares
//!   no other process dead because of that.
//! - Only the newest incarnation of a node id is a member, and its generation never decreases.
//! - A process that is heard but hears no other process becomes silent, so that the others forget it, if
//!   [`Builder::silence_if_deaf`] is set.
//! - Without a key, no datagram is accepted and nothing is decoded. Invalid datagrams are counted by
//!   [`Reason`] and dropped.
//! - A gossip task that panics or freezes is replaced within seconds. The members do not change meanwhile.
//!
//! # Limits
//!
//! - There is no agreement. Two processes may see different members for a moment, or for as long as a
//!   partition lasts. Use [`Members`] as a hint and ask the member itself.
//! - A dead process looks the same as an unreachable one, and a planned stop the same as a crash. Publish the
//!   intent to stop first.
//! - Members are trusted: a process with the key may claim anything, and can cause a flood or a crash of
//!   chitchat (which is then restarted). See [`seal`] for what recorded datagrams can do.
//! - The clocks must not differ by more than a day: a generation from the future is refused, because it would
//!   occupy its node id for good. Nothing else uses the wall clock.
//! - It does not carry bulk data: at most [`MAX_KEYS`] keys of [`MAX_VALUE`] bytes. A key cannot be removed.

mod builder;
mod counters;
mod flaw;
mod handle;
mod members;
mod node;
mod publish;
mod reachability;
pub mod seal;
#[cfg(any(test, feature = "simulation"))]
pub mod simulation;
mod state;
#[cfg(test)]
mod tests;
mod timing;
mod transport;

pub use builder::{Builder, StartError};
pub use counters::{Counter, Counters, Reason, Restart};
pub use handle::{Gossip, Heartbeat, Hold};
pub use members::{Member, Members, Status};
pub use publish::{MAX_KEY, MAX_KEYS, MAX_VALUE, PublishError};
pub use seal::{KeyError, KeyRing};
pub use timing::Timing;
