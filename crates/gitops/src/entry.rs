//! The entry points.

use std::{collections::BTreeSet, sync::Arc};

use crate::{
    diff::{self, Diff, DiffError, DiffOptions},
    drift::{self, Drift},
    engine::{Engine, Sync},
    inventory::Wanted,
    memory::Memory,
    object::Set,
    progress::{Head, Observer, Outcome, Progress, Report},
    project::Project,
    run::Run,
    sync,
};

impl Engine {
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
        let commit = sync.set.commit.clone();
        let wanted = match Wanted::new(sync.project, sync.set.template()) {
            Ok(wanted) => wanted,
            Err(why) => return refused(commit, why),
        };
        let run = Run::new(self, sync.project, wanted, Some(sync.head), sync.observer);
        let outcome = Box::pin(sync::sync(&run, &sync, memory)).await.unwrap_or_else(|end| end);
        run.finish(commit, outcome)
    }

    /// Compares what was applied with the cluster. It writes nothing. The result says which objects differ;
    /// if there are any, a sync with [`Scope::Only`](crate::Scope::Only) follows.
    ///
    /// # Errors
    /// A text for people: the cluster could not be read. `Err` means that nothing is known.
    pub async fn check(&self, project: &Project, memory: &mut Memory) -> Result<Drift, String> {
        let wanted = Wanted::new(project, None)?;
        let run = Run::new(self, project, wanted, None, &ignore);
        Box::pin(drift::check(&run, memory)).await.map_err(|end| end.to_string())
    }

    /// Returns the commit that the project's inventory names as completely applied; `None`: there is none.
    /// A new planner whose head it is may wait for up to 10 minutes before its first sync.
    ///
    /// # Errors
    /// A text for people: the inventory cannot be read.
    pub async fn applied_commit(&self, project: &Project, set: &Set) -> Result<Option<String>, String> {
        let wanted = Wanted::new(project, set.template())?;
        let run = Run::new(self, project, wanted, None, &ignore);
        let inventories = run.inventories().await.map_err(|end| end.to_string())?;
        // Several must be merged first.
        Ok(match &inventories[..] {
            [one] => one.commit.clone(),
            _ => None,
        })
    }

    /// Deletes every object of an inventory and then the inventory. `inventory_id` is that of a template;
    /// `None`: the default one. The rules of pruning hold: what is not marked stays.
    ///
    /// [`Head::resolve`] must return `None`, which means that no configuration names the project; the
    /// commit of a head ends it with [`Outcome::HeadMoved`].
    ///
    /// # Cancel safety
    /// As of [`sync`](Self::sync).
    pub async fn destroy(
        &self,
        project: &Project,
        inventory_id: Option<&str>,
        head: &dyn Head,
        observer: &dyn Observer,
    ) -> Report {
        let own = project.default_inventory_id();
        let wanted = Wanted::with_id(project, inventory_id.unwrap_or(&own));
        let run = Run::new(self, project, wanted, Some(head), observer);
        let outcome = Box::pin(sync::destroy(&run)).await.unwrap_or_else(|end| end);
        run.finish("".into(), outcome)
    }

    /// Returns the ids of the inventories of a project in its `default_namespace`: the default one, and those
    /// of templates, which no configuration names.
    ///
    /// # Errors
    /// A text for people: the inventories cannot be read.
    pub async fn inventory_ids(&self, project: &Project) -> Result<BTreeSet<String>, String> {
        let wanted = Wanted::with_id(project, &project.default_inventory_id());
        let run = Run::new(self, project, wanted, None, &ignore);
        run.inventory_ids().await.map_err(|end| end.to_string())
    }

    /// Returns what a sync of the set would change. Nothing is written.
    ///
    /// # Errors
    /// See [`DiffError`]. A failure that concerns one object is in its change.
    pub async fn diff(&self, project: &Project, set: &Set, options: &DiffOptions) -> Result<Diff, DiffError> {
        let wanted = Wanted::new(project, set.template()).map_err(DiffError::Refused)?;
        let run = Run::new(self, project, wanted, None, &ignore);
        Box::pin(diff::diff(&run, set, options)).await
    }
}

fn ignore(_: Progress) {}

fn refused(commit: Arc<str>, why: String) -> Report {
    Report {
        commit,
        outcome: Outcome::Refused(why),
        objects: Vec::new(),
        to_prune: 0,
        warnings: Vec::new(),
        inventory: None,
        took: std::time::Duration::ZERO,
    }
}
