//! Sinks: news of agents for other programs.
//!
//! `Sinks` takes news and keeps it for each sink that wants it, and a `Sender` for each sends it. News
//! comes from `homes` (agents that come and go, and Kubernetes events of those whose home is this replica)
//! and from `syncs` (the planners of this replica).

mod board;
mod events;
mod homes;
mod labels;
mod metrics;
mod redis;
mod sender;
mod syncs;
mod target;
mod targets;
mod webhook;

pub(crate) use self::{
    board::Sinks,
    homes::{Homes, HomesParts},
    sender::{Sender, flush},
    syncs::Syncs,
};
pub use self::{metrics::SinkMetrics, target::TargetError};
