//! The steps of a sync, and of the removal of a whole project.

use std::{collections::BTreeSet, sync::Arc};

use serde_json::{Map, Value};

use crate::{
    apply::{self, Applied},
    call::Call,
    discovery::Api,
    engine::{PruneWhen, Sync},
    existing::{self, Existing},
    inventory::{self, Inventory},
    memory::Memory,
    object::{ObjectId, Set},
    path::segment,
    plan::{Plan, plan},
    progress::{Action, Health, ObjectReport, Outcome, Phase},
    project::{DryRun, Project},
    prune::{self, Candidates, Protected, Verdict},
    run::{Fence, Run, delete_inventory},
};

/// Plans a set. If a kind is unknown, or not known to be served, the cluster is asked anew: what exists of a
/// kind can only be read if the kind is known.
pub(crate) async fn planned<'s>(
    run: &Run<'_>,
    project: &Project,
    set: &'s Set,
) -> Result<(Arc<Api>, Plan<'s>), Outcome> {
    let api = run.api(false).await?;
    let first = plan(project, set, &api, &run.wanted).map_err(Outcome::Refused)?;
    if first.failed.is_empty() && !first.items.iter().any(|item| item.defined_here) {
        return Ok((api, first));
    }
    let api = run.api(true).await?;
    let second = plan(project, set, &api, &run.wanted).map_err(Outcome::Refused)?;
    Ok((api, second))
}

/// The keys that an inventory holds, of all of them.
fn union<'k>(inventories: &[Inventory], new: impl Iterator<Item = &'k str>) -> BTreeSet<String> {
    let old = inventories.iter().flat_map(|inventory| inventory.keys.iter().cloned());
    old.chain(new.map(str::to_owned)).collect()
}

/// Does all of it. The error is an early end.
pub(crate) async fn sync(run: &Run<'_>, sync: &Sync<'_>, memory: &mut Memory) -> Result<Outcome, Outcome> {
    run.phase(Phase::Reading);
    let (project, set) = (sync.project, sync.set);
    let (api, plan) = planned(run, project, set).await?;
    for warning in &plan.warnings {
        run.warn(warning.clone());
    }
    for failed in &plan.failed {
        let file = Some((failed.manifest.file.clone(), failed.manifest.line));
        let (id, message) = (failed.id.clone(), failed.why.clone());
        run.report(ObjectReport { id, action: Action::Failed, health: Health::Unknown, message, file });
    }

    // The inventory is read before the head is resolved: a planner that reads a later inventory has at least
    // this head.
    let inventories = run.inventories().await?;
    run.confirm(Some(&set.commit)).await?;
    let old = union(&inventories, std::iter::empty());
    if set.objects().is_empty() && set.template().is_none() {
        if old.is_empty() {
            return Ok(Outcome::Synced);
        }
        run.set_to_prune(old.len());
        return Err(Outcome::Refused(format!(
            "no objects found: {} objects are kept; leave only an inventory template to remove them",
            old.len()
        )));
    }
    let all = union(&inventories, plan.items.iter().map(|item| item.key.as_str()));
    let size = inventory::size(&all);
    if size > inventory::MAX_BYTES {
        return Err(Outcome::Refused(format!("inventory would have {size} bytes: split the project")));
    }
    let names = plan.names();
    let mut protected = Protected::by_plan(run, &plan);
    let candidates = prune::candidates(&old, |id, key| names.contain(id, key), &mut protected);
    run.set_to_prune(candidates.objects.len());
    if project.dry_run != DryRun::None {
        return dry_run(run, &api, &plan, &candidates, protected, memory).await;
    }

    let fence = write_union(run, &plan, inventories, &all).await?;
    let work = async {
        let applied = apply::apply(run, &plan, &sync.scope, memory).await?;
        let ids: BTreeSet<&ObjectId> = plan.items.iter().map(|item| &item.id).collect();
        memory.objects.retain(|id, _| ids.contains(id));
        finish(run, sync, &plan, applied, memory, &candidates, protected, &all, &fence).await
    };
    run.fenced(&fence, work).await
}

/// Prunes if that is allowed now, and writes the inventory.
#[allow(clippy::too_many_arguments, reason = "what the steps before have found, used once")]
async fn finish(
    run: &Run<'_>,
    sync: &Sync<'_>,
    plan: &Plan<'_>,
    applied: Applied,
    memory: &Memory,
    candidates: &Candidates,
    mut protected: Protected,
    all: &BTreeSet<String>,
    fence: &Fence,
) -> Result<Outcome, Outcome> {
    let complete = applied.failed == 0 && applied.not_current == 0;
    let waiting = candidates.objects.len();
    let mut removed = BTreeSet::new();
    let mut pruned_well = true;
    let (mut left, mut refused) = (0, 0);
    let may_prune = match sync.prune {
        PruneWhen::Current => sync.project.prune && complete,
        PruneWhen::Now => true,
    };
    if waiting > 0 && may_prune {
        protected.uids = memory.objects.values().map(|record| record.live.uid).chain(applied.uids).collect();
        for id in &applied.unread {
            protected.keep_unread(id);
        }
        // Definitions may have come or gone since the plan was made.
        let api = run.api(true).await?;
        let pruned = prune::prune(run, &api, candidates, protected, fence, Some(&sync.set.commit)).await?;
        run.set_to_prune(pruned.left);
        (left, refused) = (pruned.left, pruned.failed);
        pruned_well = left == 0;
        removed = pruned.removed;
    } else if waiting > 0 {
        run.warn(format!("{waiting} objects wait to be pruned"));
    }
    let everything_applied = applied.failed == 0 && applied.not_current == 0;
    if everything_applied || !removed.is_empty() {
        let in_set: BTreeSet<&str> = plan.items.iter().map(|item| item.key.as_str()).collect();
        let data: Map<String, Value> = removed
            .iter()
            .filter(|key| all.contains(*key) && !in_set.contains(key.as_str()))
            .map(|key| (key.clone(), Value::Null))
            .collect();
        let commit = everything_applied.then_some(Some(sync.set.commit()));
        fence.write(run, commit, data).await?;
    }
    Ok(if applied.failed > 0 || refused > 0 {
        Outcome::Incomplete
    } else if applied.not_current > 0 || left > 0 || !pruned_well {
        Outcome::Degraded
    } else {
        Outcome::Synced
    })
}

/// Writes what the inventory held and what it is to hold, and makes one of several inventories.
async fn write_union(
    run: &Run<'_>,
    plan: &Plan<'_>,
    inventories: Vec<Inventory>,
    all: &BTreeSet<String>,
) -> Result<Fence, Outcome> {
    let mut inventories = inventories.into_iter();
    let Some(first) = inventories.next() else {
        create_namespace(run, plan).await?;
        return run.create_inventory(all).await;
    };
    let fence = run.fence(&first);
    let new = all.difference(&first.keys).map(|key| (key.clone(), Value::String(String::new()))).collect();
    fence.write(run, Some(None), new).await?;
    for other in inventories {
        run.warn(format!("the inventory {} was merged into {} and deleted", other.name, fence.name));
        let target = format!("{}/{}", run.wanted.collection(), segment(&other.name));
        delete_inventory(run, &target, &other.uid, &other.resource_version).await?;
    }
    Ok(fence)
}

/// Applies the namespace of the inventory, if it is in the set and does not exist.
async fn create_namespace(run: &Run<'_>, plan: &Plan<'_>) -> Result<(), Outcome> {
    let is_it = |id: &ObjectId| id.is("", "Namespace") && *id.name == *run.wanted.namespace;
    let Some(item) = plan.items.iter().find(|item| is_it(&item.id)) else { return Ok(()) };
    match existing::one(&run.caller, run, &item.id, &item.path).await? {
        Existing::Found(_) => return Ok(()),
        Existing::Unreadable(why) => {
            return Err(Outcome::Refused(format!("the namespace of the inventory {why}")));
        }
        Existing::Absent => {}
    }
    let call = Call::apply(apply::apply_target(item, false), item.body(&run.wanted.id));
    let answer = run.call(call).await?;
    if answer.is_ok() {
        Ok(())
    } else {
        let words = answer.words();
        Err(Outcome::Refused(format!("the namespace of the inventory cannot be created: {words}")))
    }
}

/// Says what would be done.
async fn dry_run(
    run: &Run<'_>,
    api: &Api,
    plan: &Plan<'_>,
    candidates: &Candidates,
    mut protected: Protected,
    memory: &Memory,
) -> Result<Outcome, Outcome> {
    // What is learned in a dry run is not what is in the cluster.
    let mut scratch = memory.clone();
    let applied = apply::apply(run, plan, &crate::engine::Scope::All, &mut scratch).await?;
    protected.uids.extend(applied.uids);
    for id in &applied.unread {
        protected.keep_unread(id);
    }
    say_what_would_be_pruned(run, api, candidates, &protected, run.project.prune).await?;
    Ok(if run.has_failed() { Outcome::Incomplete } else { Outcome::Synced })
}

/// Reports what would be done with objects that are no longer wanted. `is_on`: whether any are deleted.
async fn say_what_would_be_pruned(
    run: &Run<'_>,
    api: &Api,
    candidates: &Candidates,
    protected: &Protected,
    is_on: bool,
) -> Result<(), Outcome> {
    run.phase(Phase::Pruning);
    for id in candidates.objects.keys() {
        let (verdict, _) = prune::examine(run, api, id, protected).await?;
        let (action, message) = match verdict {
            Verdict::Delete { .. } if is_on => (Action::Pruned, String::new()),
            Verdict::Delete { .. } => (Action::Kept, "prune is off".to_owned()),
            Verdict::Unmark { why, .. } | Verdict::Forget { why, .. } => (Action::Forgotten, why),
            Verdict::Keep(why) => (Action::Kept, why),
            Verdict::Failed(why) => (Action::Failed, why),
        };
        run.report_left(id, action, message);
    }
    Ok(())
}

/// Deletes everything that an inventory holds, then the inventory. In a dry run it only says so.
pub(crate) async fn destroy(run: &Run<'_>) -> Result<Outcome, Outcome> {
    run.phase(Phase::Reading);
    let api = run.api(true).await?;
    let inventories = run.inventories().await?;
    run.confirm(None).await?;
    let Some(first) = inventories.first() else { return Ok(Outcome::Synced) };
    let all = union(&inventories, std::iter::empty());
    if inventories.len() > 1 {
        let why =
            format!("{} inventories have the id {}: sync the project once", inventories.len(), run.wanted.id);
        return Err(Outcome::Refused(why));
    }
    let fence = run.fence(first);
    let mut protected = Protected::default();
    // The inventory must be there until the last object is gone.
    protected.namespaces.insert(run.wanted.namespace.clone());
    let candidates = prune::candidates(&all, |_, _| false, &mut protected);
    if run.project.dry_run != DryRun::None {
        say_what_would_be_pruned(run, &api, &candidates, &protected, true).await?;
        return Ok(if run.has_failed() { Outcome::Incomplete } else { Outcome::Synced });
    }
    fence.write(run, Some(None), Map::new()).await?;
    let work = async {
        let pruned = prune::prune(run, &api, &candidates, protected, &fence, None).await?;
        run.set_to_prune(pruned.left);
        let data: Map<String, Value> = pruned.removed.iter().map(|key| (key.clone(), Value::Null)).collect();
        fence.write(run, None, data).await?;
        Ok(pruned)
    };
    let pruned = run.fenced(&fence, work).await?;
    if all.len() == pruned.removed.len() {
        fence.delete(run).await?;
        Ok(Outcome::Synced)
    } else if pruned.failed > 0 {
        Ok(Outcome::Incomplete)
    } else {
        let rest = all.len() - pruned.removed.len();
        run.warn(format!("the inventory {} stays: it holds {rest} objects that were kept", fence.name));
        Ok(Outcome::Degraded)
    }
}
