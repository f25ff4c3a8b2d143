//! Keeps the clusters of agents as their repositories say.
//!
//! * [`Planners`] runs a task for each manifest project of each agent whose [`home`] is this replica. The
//!   task follows the head of its repository, syncs by the engine of the crate `gitops`, checks for drift,
//!   and repeats what failed.
//! * [`applier`] decides whether kas applies for an agent at all.
//! * [`Planners::get`] is what people see, [`Planners::diff`] what a sync would change.
//!
//! A repository is a [`Sources`], a cluster a [`Clusters`]: the crate knows neither GitLab nor tunnels. No
//! replica is elected. Two that plan at once for a moment are told apart by the fence in the inventory.

pub mod applier;
mod asked;
mod context;
mod diff;
mod follow;
pub mod home;
mod manifests;
mod metrics;
mod planners;
mod source;
mod status;
mod task;
#[cfg(test)]
mod tests;

pub use self::{
    applier::Applier,
    context::{Clusters, Timing},
    diff::{Destroyed, DiffOf},
    metrics::{OutcomeLabel, PlannerMetrics, StateLabel},
    planners::{AgentSync, Agents, Configuration, Control, ControlError, Parts, Planners},
    source::{Bounds, FollowedHead, Heads, ReadLimits, Source, SourceError, Sources},
    status::{Counts, ObjectState, ProjectStatus},
};
