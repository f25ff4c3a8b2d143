//! Applies the objects of a plan, kind by kind, and waits until they are current.

use std::{
    collections::{BTreeSet, HashMap},
    time::Duration,
};

use serde_json::Value;
use tokio::time::Instant;

use crate::{
    call::{Answer, Call, MANAGER},
    discovery::Lookup,
    each::each,
    engine::Scope,
    existing::{self, Existing},
    marks::OWNER_ANNOTATION,
    memory::{Live, Memory, Record, hash, uid},
    object::ObjectId,
    order::same_kind,
    plan::{Item, Plan},
    progress::{Action, Health, ObjectReport, Outcome, Phase},
    project::{DryRun, InventoryPolicy},
    run::Run,
    status::{is_unschedulable, status},
};

/// How long definitions may take until their kinds can be used.
const ESTABLISHED_WITHIN: Duration = Duration::from_secs(60);

/// Between two looks at a definition, which is usually established within 100 ms.
const ESTABLISHED_EVERY: Duration = Duration::from_millis(250);

/// Between two looks at what is not current, in the first minute and then.
const LOOK_EVERY: Duration = Duration::from_secs(2);
const LOOK_LATER_EVERY: Duration = Duration::from_secs(10);
const FIRST: Duration = Duration::from_secs(60);

/// How long a pod may have no node until that is a failure, as for cli-utils.
const UNSCHEDULABLE: Duration = Duration::from_secs(15);

/// What applying came to.
#[derive(Debug, Default)]
pub(crate) struct Applied {
    /// Objects that could not be applied.
    pub(crate) failed: usize,
    /// Objects that are not current.
    pub(crate) not_current: usize,
    /// Uids of what existed before, whether its apply failed or not.
    pub(crate) uids: Vec<u128>,
    /// Objects of which it could not be read what exists.
    pub(crate) unread: Vec<ObjectId>,
}

/// The target of an apply.
pub(crate) fn apply_target(item: &Item<'_>, dry_run: bool) -> String {
    let dry_run = if dry_run { "&dryRun=All" } else { "" };
    format!("{}?fieldManager={MANAGER}&force=true&fieldValidation=Warn{dry_run}", item.path.object)
}

/// Whether the policy allows to take over what exists. The error is for people.
pub(crate) fn allowed(policy: InventoryPolicy, id: &str, existing: &Existing) -> Result<(), String> {
    let object = match existing {
        Existing::Absent => return Ok(()),
        Existing::Unreadable(why) => return Err(why.clone()),
        Existing::Found(object) => object,
    };
    match (object["metadata"]["annotations"][OWNER_ANNOTATION].as_str(), policy) {
        (_, InventoryPolicy::AdoptAll) | (None, InventoryPolicy::AdoptIfNoInventory) => Ok(()),
        (Some(owner), _) if owner == id => Ok(()),
        (None, InventoryPolicy::MustMatch) => Err(format!(
            "exists and is not marked as an object of the inventory {id}; inventory_policy: adopt_if_no_inventory takes \
             it over"
        )),
        (Some(owner), _) => Err(format!(
            "belongs to the inventory {owner}, not to {id}; inventory_policy: adopt_all takes it over"
        )),
    }
}

/// Applies what the scope says.
pub(crate) async fn apply(
    run: &Run<'_>,
    plan: &Plan<'_>,
    scope: &Scope,
    memory: &mut Memory,
) -> Result<Applied, Outcome> {
    run.phase(Phase::Applying);
    let mut applied = Applied { failed: plan.failed.len(), ..Applied::default() };
    let in_scope = |item: &Item<'_>, memory: &Memory| match (scope, memory.objects.get(&item.id)) {
        (Scope::All, _) | (_, None) => true,
        (Scope::Only(ids), Some(record)) => {
            ids.contains(&item.id) || record.body != hash(&item.body(&run.wanted.id)[..])
        }
    };
    let items: Vec<&Item<'_>> = plan.items.iter().filter(|item| in_scope(item, memory)).collect();
    let known = items.iter().filter_map(|item| Some((item.id.clone(), item.readable()?.clone())));
    let mut existing = existing::read(&run.caller, run, known.collect()).await?;

    let mut pending: Vec<&Item<'_>> = Vec::new();
    let mut at = 0;
    while at < items.len() {
        let end = at + items[at..].iter().take_while(|item| same_kind(&item.id, &items[at].id)).count();
        let kind = &items[at..end];
        at = end;
        read_defined(run, kind, &mut existing).await?;
        let found = &existing;
        let results = each(kind.len(), |at| async move {
            // What was not read may belong to somebody else.
            let unread = Existing::Unreadable("what exists of it is not known".to_owned());
            apply_one(run, kind[at], found.get(&kind[at].id).unwrap_or(&unread)).await
        })
        .await?;
        for (item, record) in kind.iter().copied().zip(results) {
            match record {
                Some(record) => {
                    if record.health != Health::Current {
                        pending.push(item);
                    }
                    memory.objects.insert(item.id.clone(), record);
                }
                None => {
                    applied.failed += 1;
                    memory.objects.remove(&item.id);
                }
            }
        }
    }
    // Those that were not applied now, but were not current when they were.
    let now: BTreeSet<&str> = items.iter().map(|item| item.key.as_str()).collect();
    let others = plan.items.iter().filter(|item| {
        !now.contains(item.key.as_str())
            && memory.objects.get(&item.id).is_some_and(|record| record.health != Health::Current)
    });
    pending.extend(others);
    for item in items {
        match existing.get(&item.id) {
            Some(Existing::Found(object)) => {
                applied.uids.extend(object["metadata"]["uid"].as_str().map(uid));
            }
            Some(Existing::Absent) => {}
            Some(Existing::Unreadable(_)) | None => applied.unread.push(item.id.clone()),
        }
    }
    if run.project.dry_run == DryRun::None {
        applied.not_current = wait(run, pending, memory).await?;
    }
    Ok(applied)
}

/// Applies one object. Returns what is known of it; `None`: it failed.
async fn apply_one(run: &Run<'_>, item: &Item<'_>, existing: &Existing) -> Result<Option<Record>, Outcome> {
    let report = |action, health, message| {
        let file = Some(item.place());
        run.report(ObjectReport { id: item.id.clone(), action, health, message, file });
    };
    if let Err(why) = allowed(run.project.inventory_policy, &run.wanted.id, existing) {
        report(Action::Failed, Health::Unknown, why);
        return Ok(None);
    }
    let before = match existing {
        Existing::Found(object) => Live::read(object),
        _ => None,
    };
    let body = item.body(&run.wanted.id);
    let body_hash = hash(&body[..]);
    if run.project.dry_run == DryRun::Client {
        let (action, message) = match before {
            None => (Action::Created, String::new()),
            Some(_) => (Action::Unchanged, "not compared: a dry run of the client only reads".to_owned()),
        };
        report(action, Health::Unknown, message);
        return Ok(None);
    }
    let dry = run.project.dry_run == DryRun::Server;
    let answer = run.call(Call::apply(apply_target(item, dry), body)).await?;
    for warning in &answer.warnings {
        // A warning may quote a value.
        if !item.id.is("", "Secret") {
            run.warn(format!("{}:{}: {}: {warning}", item.manifest.file, item.manifest.line, item.id));
        }
    }
    match read_applied(&answer, item) {
        Err(why) => {
            report(Action::Failed, Health::Unknown, why);
            Ok(None)
        }
        Ok((object, live)) => {
            let (health, message) = status(&item.id, &object);
            let action = match &before {
                None => Action::Created,
                Some(before) if before.is_same_version(&live) && !dry => Action::Unchanged,
                Some(_) => Action::Changed,
            };
            report(action, health, message);
            Ok(Some(Record { body: body_hash, live, health }))
        }
    }
}

/// Reads the answer to an apply. The error is for people.
fn read_applied(answer: &Answer, item: &Item<'_>) -> Result<(Value, Live), String> {
    if !answer.is_ok() {
        return Err(answer.words_about(&item.id));
    }
    let object = answer.json()?;
    match Live::read(&object) {
        Some(live) => Ok((object, live)),
        // A dry run of a new object has no `resourceVersion`.
        None => match object["metadata"].as_object() {
            Some(_) => {
                let mut with = object.clone();
                for field in ["uid", "resourceVersion"] {
                    if with["metadata"][field].as_str().unwrap_or_default().is_empty() {
                        with["metadata"][field] = "none".into();
                    }
                }
                Live::read(&with)
                    .map(|live| (object, live))
                    .ok_or_else(|| "the answer is no object".to_owned())
            }
            None => Err("the answer is no object".to_owned()),
        },
    }
}

/// Reads what exists of those objects of a kind whose version comes with a definition of this set. It waits
/// until the versions are served. Some of the objects may have been there before, in another version.
async fn read_defined(
    run: &Run<'_>,
    kind: &[&Item<'_>],
    existing: &mut HashMap<ObjectId, Existing>,
) -> Result<(), Outcome> {
    let defined: Vec<&Item<'_>> = kind.iter().copied().filter(|item| item.defined_here).collect();
    if defined.is_empty() {
        return Ok(());
    }
    if run.project.dry_run != DryRun::None {
        // The definition is not applied, so what is not served is not there.
        for item in defined {
            existing.entry(item.id.clone()).or_insert(Existing::Absent);
        }
        return Ok(());
    }
    let unserved = wait_for_versions(run, &defined).await?;
    let served = defined.iter().filter(|item| !unserved.contains(item.version()));
    let served = served.map(|item| (item.id.clone(), item.path.clone())).collect();
    for (id, now) in existing::read(&run.caller, run, served).await? {
        match (existing.get(&id), &now) {
            // A server that does not know the new version yet also answers that there is no such object.
            (Some(Existing::Found(_)), Existing::Absent) => {}
            _ => {
                existing.insert(id, now);
            }
        }
    }
    for item in defined.iter().filter(|item| unserved.contains(item.version())) {
        let why = format!(
            "{} is not served {} s after the definition of the kind was applied",
            item.manifest.api_version,
            ESTABLISHED_WITHIN.as_secs()
        );
        existing.insert(item.id.clone(), Existing::Unreadable(why));
    }
    Ok(())
}

/// Waits until the versions of a kind whose definition was just applied can be used. Returns those that are
/// not served when the time is over.
async fn wait_for_versions<'i>(run: &Run<'_>, items: &[&'i Item<'_>]) -> Result<BTreeSet<&'i str>, Outcome> {
    let mut unserved: BTreeSet<&str> = items.iter().map(|item| item.version()).collect();
    let Some(first) = items.first() else { return Ok(unserved) };
    let until = Instant::now() + ESTABLISHED_WITHIN;
    loop {
        // A kind is in discovery only once its definition is established.
        let api = run.api(true).await?;
        unserved.retain(|version| {
            !matches!(api.lookup(&first.id.group, Some(version), &first.id.kind), Lookup::Found(_))
        });
        if unserved.is_empty() || Instant::now() >= until {
            return Ok(unserved);
        }
        run.sleep(ESTABLISHED_EVERY).await?;
    }
}

/// Waits until all are current, for as long as the project says. Returns how many are not.
async fn wait(run: &Run<'_>, mut pending: Vec<&Item<'_>>, memory: &mut Memory) -> Result<usize, Outcome> {
    if pending.is_empty() {
        return Ok(0);
    }
    run.phase(Phase::Waiting);
    let begin = Instant::now();
    let mut reported: HashMap<&ObjectId, (Health, String)> = HashMap::new();
    loop {
        // What has failed may recover, but is not waited for.
        let in_progress = |item: &&Item<'_>| {
            memory.objects.get(&item.id).is_some_and(|record| record.health != Health::Failed)
        };
        let waited = begin.elapsed();
        if pending.is_empty() || waited >= run.project.reconcile_timeout || !pending.iter().any(in_progress) {
            break;
        }
        let pause = if waited < FIRST { LOOK_EVERY } else { LOOK_LATER_EVERY };
        run.sleep(pause.min(run.project.reconcile_timeout - waited)).await?;
        let looked_at = &pending;
        let waited = begin.elapsed();
        let looks = each(looked_at.len(), |at| look(run, looked_at[at], waited)).await?;
        let mut left: BTreeSet<ObjectId> = BTreeSet::new();
        for (item, (health, message)) in pending.iter().copied().zip(looks) {
            match memory.objects.get_mut(&item.id) {
                // It was deleted: the next sync applies it.
                _ if health == Health::Unknown => {
                    memory.objects.remove(&item.id);
                }
                Some(record) => record.health = health,
                None => {}
            }
            if health != Health::Current {
                left.insert(item.id.clone());
            }
            let new = (health, message);
            if reported.get(&item.id) != Some(&new) {
                let action = run.action(&item.id).unwrap_or(Action::Unchanged);
                let (id, file) = (item.id.clone(), Some(item.place()));
                run.report(ObjectReport { id, action, health, message: new.1.clone(), file });
                reported.insert(&item.id, new);
            }
        }
        pending.retain(|item| left.contains(&item.id));
    }
    Ok(pending.len())
}

/// Reads an object and its health; `Unknown`: it is gone. `waited`: for how long it was waited for.
async fn look(run: &Run<'_>, item: &Item<'_>, waited: Duration) -> Result<(Health, String), Outcome> {
    let answer = run.call(Call::get(item.path.object.clone(), None)).await?;
    if answer.status.as_u16() == 404 {
        return Ok((Health::Unknown, "it was deleted after it was applied".to_owned()));
    }
    if !answer.is_ok() {
        return Ok((Health::InProgress, format!("cannot be read: {}", answer.words_about(&item.id))));
    }
    match answer.json() {
        Ok(object) => {
            let (health, message) = status(&item.id, &object);
            let is_stuck = waited >= UNSCHEDULABLE && is_unschedulable(&item.id, &object);
            Ok((if is_stuck { Health::Failed } else { health }, message))
        }
        Err(why) => Ok((Health::InProgress, format!("cannot be read: {why}"))),
    }
}
