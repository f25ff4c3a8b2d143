//! From files of a repository to objects in a cluster.
//!
//! * [`decode`] makes a [`Set`] of files: YAML and JSON, limits, every error with its place.
//! * [`glob`] says which files belong to a manifest project.
//! * [`Engine::sync`] makes a cluster what a set says: inventory, apply, wait, prune.
//! * [`Engine::check`] says what differs from what was applied, [`Engine::diff`] what a sync would change.
//! * [`Schedule`] says when that is done, [`Claims`] whose inventory is whose, [`Events`] tells people.
//!
//! The crate knows neither tunnels nor Git nor a client library: a cluster is a [`ClusterApi`], a repository
//! is a [`Head`] that can be resolved again. Nothing here reads a clock of the wall, and nothing runs when no
//! future of the crate is polled.
//!
//! # What is never deleted
//! deleted ⊆ marked ∩ (inventory − the set of a head that was resolved after the inventory was read). An
//! object is marked by the annotation [`OWNER_ANNOTATION`]. Nothing is deleted after a failed decode (there
//! is no [`Set`] then), an inventory that cannot be read, of an API group that cannot be read, or for a set
//! without objects.

mod apply;
mod call;
mod claims;
mod cluster;
pub mod decode;
mod diff;
mod discovery;
mod drift;
mod each;
mod engine;
mod entry;
mod events;
mod existing;
pub mod glob;
pub mod inventory;
mod marks;
mod memory;
mod object;
mod options;
mod order;
mod pace;
mod path;
mod plan;
mod progress;
mod project;
mod prune;
mod report;
mod run;
mod schedule;
mod status;
mod sync;
#[cfg(test)]
mod tests;

pub use self::{
    claims::Claims,
    cluster::{Budget, CallError, ClusterApi, MAX_RESPONSE},
    diff::{Change, ChangeAction, Diff, DiffError, DiffOptions},
    drift::Drift,
    engine::{Engine, PruneWhen, Scope, Sync},
    events::{Event, Events},
    marks::{ID_LABEL, OWNER_ANNOTATION},
    memory::Memory,
    object::{Manifest, ObjectId, Set},
    options::Options,
    progress::{
        Action, Head, Health, InventoryRef, ObjectReport, Observer, Outcome, Phase, Progress, Report, Stop,
        Unresolved,
    },
    project::{DryRun, InvalidOption, InventoryPolicy, Project, Propagation},
    report::cut,
    schedule::{BACKOFF, Due, Period, Schedule, varied},
};
