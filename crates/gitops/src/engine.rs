//! The entry points.

use std::{collections::BTreeSet, sync::Arc};

use crate::{
    cluster::{Budget, ClusterApi},
    diff::{Diff, DiffError, DiffOptions},
    drift::Drift,
    memory::Memory,
    object::{ObjectId, Set},
    progress::{Head, Observer, Outcome, Report},
    project::Project,
};

/// Applies manifest projects to one cluster. Cheap to clone; clones share what is known of the API.
///
/// One engine serves all projects of an agent that use the same credentials. A cluster that is reached with
/// other credentials (`as`) needs another engine, with the same [`Budget`].
#[derive(Clone)]
pub struct Engine {
    pub(crate) api: Arc<dyn ClusterApi>,
    pub(crate) budget: Budget,
}

/// What is to be synced.
pub struct Sync<'a> {
    /// How.
    pub project: &'a Project,
    /// The wanted objects.
    pub set: &'a Set,
    /// The head of the repository.
    pub head: &'a dyn Head,
    /// Which objects are applied.
    pub scope: Scope,
    /// When objects are pruned.
    pub prune: PruneWhen,
    /// Receives progress.
    pub observer: &'a dyn Observer,
}

/// Which objects a sync applies. All other steps are done for all of them.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Scope {
    /// All of them.
    #[default]
    All,
    /// These, and those that the [`Memory`] does not know as applied: what differed in a drift check.
    Only(BTreeSet<ObjectId>),
}

/// When a sync prunes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PruneWhen {
    /// If the project says so, and everything is applied and current.
    #[default]
    Current,
    /// Now, although something failed or is not current, and whatever the project says: a person asked for
    /// it. A set without objects still prunes nothing.
    Now,
}

impl Engine {
    /// Returns an engine that knows nothing of the cluster yet.
    pub fn new(api: Arc<dyn ClusterApi>, budget: Budget) -> Self {
        Self { api, budget }
    }

    /// Makes the cluster what the set says: reads the inventory, resolves the head again, writes the
    /// inventory, applies, waits, prunes, writes the inventory. `memory` is that of the project; it is kept
    /// from one sync to the next.
    ///
    /// What is deleted is always marked as an object of this inventory, is in the inventory that was read,
    /// and is not in the set of a head that was resolved after that.
    ///
    /// # Cancel safety
    /// The future may be dropped at any time, as if the process had been killed. The next sync completes it.
    pub async fn sync(&self, sync: Sync<'_>, memory: &mut Memory) -> Report {
        let _ = memory;
        Report {
            commit: sync.set.commit.clone(),
            outcome: Outcome::Refused("the engine is not complete".to_owned()),
            objects: Vec::new(),
            to_prune: 0,
            warnings: Vec::new(),
            inventory: None,
            took: std::time::Duration::ZERO,
        }
    }

    /// Compares what was applied with the cluster. It writes nothing. The result says which objects differ;
    /// if there are any, a sync with [`Scope::Only`] follows.
    ///
    /// # Errors
    /// A text for people: the cluster could not be read. `Err` means that nothing is known.
    pub async fn check(&self, project: &Project, memory: &mut Memory) -> Result<Drift, String> {
        let _ = (project, memory);
        Err("the engine is not complete".to_owned())
    }

    /// Returns the commit that the project's inventory names as completely applied; `None`: there is none.
    /// A new planner whose head it is may wait for up to 10 minutes before its first sync.
    ///
    /// # Errors
    /// A text for people: the inventory cannot be read.
    pub async fn applied_commit(&self, project: &Project, set: &Set) -> Result<Option<String>, String> {
        let _ = (project, set);
        Err("the engine is not complete".to_owned())
    }

    /// Deletes every object of an inventory and then the inventory. `inventory_id` is that of a template;
    /// `None`: the default one. The rules of pruning hold: what is not marked stays.
    ///
    /// [`Head::resolve`] must return `None`, which means that no configuration names the project; the
    /// commit of a head ends it with [`Outcome::HeadMoved`].
    pub async fn destroy(
        &self,
        project: &Project,
        inventory_id: Option<&str>,
        head: &dyn Head,
        observer: &dyn Observer,
    ) -> Report {
        let _ = (project, inventory_id, head, observer);
        Report {
            commit: "".into(),
            outcome: Outcome::Refused("the engine is not complete".to_owned()),
            objects: Vec::new(),
            to_prune: 0,
            warnings: Vec::new(),
            inventory: None,
            took: std::time::Duration::ZERO,
        }
    }

    /// Returns what a sync of the set would change. Nothing is written.
    ///
    /// # Errors
    /// See [`DiffError`]. A failure that concerns one object is in its change.
    pub async fn diff(&self, project: &Project, set: &Set, options: &DiffOptions) -> Result<Diff, DiffError> {
        let _ = (project, set, options);
        Err(DiffError::Unreachable("the engine is not complete".to_owned()))
    }
}
