//! What a sync would change, as a unified diff and as lines of JSON.

mod text;

use std::{collections::BTreeSet, fmt::Write as _, time::Duration};

use serde_json::{Value, json};
use tokio::time::{Instant, timeout_at};

use crate::{
    apply::{allowed, apply_target},
    call::Call,
    discovery::Api,
    each::each,
    existing::Existing,
    memory::uid,
    object::{ObjectId, Set},
    order::rank,
    plan::{Item, Plan},
    progress::Outcome,
    prune::{self, Candidates, Protected, Verdict},
    run::Run,
    sync::planned,
};

/// How a diff is made.
#[derive(Debug, Clone)]
pub struct DiffOptions {
    /// Whether objects that a sync would prune are compared too.
    pub prune: bool,
    /// The time for all of it; what is not asked by then is an error of its object.
    pub timeout: Duration,
}

impl Default for DiffOptions {
    fn default() -> Self {
        Self { prune: true, timeout: Duration::from_secs(120) }
    }
}

/// Why there is no diff.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DiffError {
    /// A sync of this set would be refused.
    #[error("{0}")]
    Refused(String),
    /// The cluster cannot be read.
    #[error("{0}")]
    Unreachable(String),
}

/// What a sync would do to an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChangeAction {
    /// Create it.
    Create,
    /// Change it.
    Update,
    /// Delete it.
    Prune,
    /// Leave it although it is no longer in the set. The error says why.
    Keep,
    /// It cannot be said, or the sync would fail. The error says why.
    Error,
}

impl ChangeAction {
    /// The word for people and programs.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Create => "create",
            Self::Update => "update",
            Self::Prune => "prune",
            Self::Keep => "keep",
            Self::Error => "error",
        }
    }
}

/// A change of an object. Objects that would not change have none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// What would be done.
    pub action: ChangeAction,
    /// To which object.
    pub object: ObjectId,
    /// Its file; `None` for what is no longer in the set.
    pub file: Option<String>,
    /// The unified diff; of a Secret only the names of the keys that change. It may be empty.
    pub diff: String,
    /// Why; empty if there is nothing to say.
    pub error: String,
}

/// A whole diff.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Diff {
    /// The changes in the order in which a sync would make them.
    pub changes: Vec<Change>,
    /// How many objects would not change.
    pub unchanged: usize,
    /// What a person should know.
    pub warnings: Vec<String>,
}

impl Diff {
    /// Returns the exit code of `kubectl diff`: 0 without changes, 1 with changes, 2 with an error.
    pub fn exit_code(&self) -> u8 {
        if self.changes.iter().any(|change| change.action == ChangeAction::Error) {
            2
        } else {
            u8::from(self.changes.iter().any(|change| change.action != ChangeAction::Keep))
        }
    }

    /// Returns one line of JSON for each change: `{action, object, file, diff, error}`.
    pub fn to_json_lines(&self) -> String {
        let mut text = String::new();
        for change in &self.changes {
            let line = json!({
                "action": change.action.as_str(),
                "object": {
                    "group": &*change.object.group,
                    "kind": &*change.object.kind,
                    "namespace": &*change.object.namespace,
                    "name": &*change.object.name,
                },
                "file": change.file,
                "diff": change.diff,
                "error": change.error,
            });
            let _ = writeln!(text, "{line}");
        }
        text
    }

    /// Returns the unified diff of all changes.
    pub fn to_text(&self) -> String {
        let mut text = String::new();
        for change in &self.changes {
            let _ = write!(text, "# {} {}", change.action.as_str(), change.object);
            if let Some(file) = &change.file {
                let _ = write!(text, " ({file})");
            }
            if !change.error.is_empty() {
                let _ = write!(text, ": {}", change.error);
            }
            text.push('\n');
            text.push_str(&change.diff);
        }
        text
    }
}

/// The result for one object; `None`: it would not change.
type Compared = Option<(ChangeAction, String, String)>;

/// Compares a set with the cluster.
pub(crate) async fn diff(run: &Run<'_>, set: &Set, options: &DiffOptions) -> Result<Diff, DiffError> {
    let deadline = Instant::now() + options.timeout;
    let end = |end: Outcome| match end {
        Outcome::Refused(why) => DiffError::Refused(why),
        end => DiffError::Unreachable(end.to_string()),
    };
    let late = || {
        DiffError::Unreachable(format!("the cluster did not answer within {} s", options.timeout.as_secs()))
    };
    let planned = timeout_at(deadline, planned(run, run.project, set)).await;
    let (api, plan) = planned.map_err(|_| late())?.map_err(end)?;
    let mut diff = Diff { warnings: plan.warnings.clone(), ..Diff::default() };
    for failed in &plan.failed {
        diff.changes.push(Change {
            action: ChangeAction::Error,
            object: failed.id.clone(),
            file: Some(failed.manifest.file.as_ref().to_owned()),
            diff: String::new(),
            error: failed.why.clone(),
        });
    }
    let inventories = timeout_at(deadline, run.inventories()).await.map_err(|_| late())?.map_err(end)?;
    let keys: BTreeSet<String> =
        inventories.iter().flat_map(|inventory| inventory.keys.iter().cloned()).collect();

    let new_namespaces = new_namespaces(run, &plan, deadline).await.map_err(end)?;
    let (items, new_namespaces) = (&plan.items, &new_namespaces);
    let compared = each(items.len(), |at| async move {
        let item = &items[at];
        let compared = async {
            if new_namespaces.contains(&*item.id.namespace) {
                // Its namespace does not exist, so the API server could only refuse it.
                return Ok((Some(created(run, item)), None));
            }
            if item.defined_here { compare_unserved(run, item).await } else { compare(run, item).await }
        };
        timeout_at(deadline, compared).await.unwrap_or_else(|_| Ok((Some(not_asked()), None)))
    })
    .await
    .map_err(end)?;
    let mut protected = Protected::default();
    protected.namespaces.insert(run.wanted.namespace.clone());
    for failed in &plan.failed {
        protected.keep(&failed.id);
    }
    for (item, (compared, uid)) in items.iter().zip(compared) {
        protected.keep(&item.id);
        protected.uids.extend(uid);
        match compared {
            None => diff.unchanged += 1,
            Some((action, text, error)) => diff.changes.push(Change {
                action,
                object: item.id.clone(),
                file: Some(item.manifest.file.as_ref().to_owned()),
                diff: text,
                error,
            }),
        }
    }
    let is_empty = set.objects().is_empty() && set.template().is_none();
    if is_empty && !keys.is_empty() {
        let count = keys.len();
        diff.warnings.push(format!(
            "no objects found: {count} objects are kept; leave only an inventory template to remove them"
        ));
    } else if options.prune && run.project.prune {
        let in_set: BTreeSet<&str> = plan.items.iter().map(|item| item.key.as_str()).collect();
        let candidates = prune::candidates(&keys, |id, key| plan.names(id, &in_set, key), &mut protected);
        let mut pruned = pruned(run, &api, &candidates, protected, deadline).await.map_err(end)?;
        diff.changes.append(&mut pruned);
    }
    Ok(diff)
}

fn not_asked() -> (ChangeAction, String, String) {
    (ChangeAction::Error, String::new(), "not asked: the time for the diff is over".to_owned())
}

/// The change of an object that does not exist.
fn created(run: &Run<'_>, item: &Item<'_>) -> (ChangeAction, String, String) {
    let diff = text::diff(&item.id, None, Some(&wanted_object(run, item)));
    (ChangeAction::Create, diff, String::new())
}

/// Compares an object whose version comes with a definition of the set: the API server could only refuse it.
/// Also returns its uid, if it exists in another version.
async fn compare_unserved(run: &Run<'_>, item: &Item<'_>) -> Result<(Compared, Option<u128>), Outcome> {
    let Some(path) = &item.served else { return Ok((Some(created(run, item)), None)) };
    let existing = crate::existing::one(&run.caller, run, &item.id, path).await?;
    if let Err(why) = allowed(run.project.inventory_policy, &run.wanted.id, &existing) {
        return Ok((Some((ChangeAction::Error, String::new(), why)), None));
    }
    let Existing::Found(object) = existing else { return Ok((Some(created(run, item)), None)) };
    let why = format!("{} is not served yet, so its changes cannot be asked for", item.manifest.api_version);
    let object_uid = object["metadata"]["uid"].as_str().map(uid);
    Ok((Some((ChangeAction::Update, String::new(), why)), object_uid))
}

/// The object that would be applied, of which the API server has no defaults yet.
fn wanted_object(run: &Run<'_>, item: &Item<'_>) -> Value {
    serde_json::from_slice(&item.body(&run.wanted.id)).unwrap_or_default()
}

/// Returns the namespaces that the set makes and that do not exist.
async fn new_namespaces(
    run: &Run<'_>,
    plan: &Plan<'_>,
    deadline: Instant,
) -> Result<BTreeSet<String>, Outcome> {
    let namespaces = plan.items.iter().filter(|item| item.id.is("", "Namespace"));
    let read = namespaces.map(|item| (item.id.clone(), item.path.clone())).collect();
    let Ok(read) = timeout_at(deadline, crate::existing::read(&run.caller, run, read)).await else {
        return Ok(BTreeSet::new());
    };
    let absent = read?.into_iter().filter(|(_, existing)| matches!(existing, Existing::Absent));
    Ok(absent.map(|(id, _)| id.name.as_ref().to_owned()).collect())
}

/// Compares an object with what an apply would make of it. Also returns its uid.
async fn compare(run: &Run<'_>, item: &Item<'_>) -> Result<(Compared, Option<u128>), Outcome> {
    let error = |why: String| (Some((ChangeAction::Error, String::new(), why)), None);
    let answer = run.call(Call::get(item.path.object.clone(), None)).await?;
    let before = match answer.status.as_u16() {
        404 => None,
        _ if !answer.is_ok() => {
            return Ok(error(format!("cannot be read: {}", answer.words_about(&item.id))));
        }
        _ => match answer.json() {
            Ok(object) => Some(object),
            Err(why) => return Ok(error(format!("cannot be read: {why}"))),
        },
    };
    let existing = match &before {
        None => Existing::Absent,
        Some(object) => Existing::Found(Box::new(object.clone())),
    };
    if let Err(why) = allowed(run.project.inventory_policy, &run.wanted.id, &existing) {
        return Ok(error(why));
    }
    let apply = Call::apply(apply_target(item, true), item.body(&run.wanted.id));
    let answer = run.call(apply).await?;
    if !answer.is_ok() {
        return Ok(error(answer.words_about(&item.id)));
    }
    let after = match answer.json() {
        Ok(after) => after,
        Err(why) => return Ok(error(why)),
    };
    let object_uid = before.as_ref().and_then(|object| object["metadata"]["uid"].as_str()).map(uid);
    let action = if before.is_some() { ChangeAction::Update } else { ChangeAction::Create };
    if before.as_ref().is_some_and(|before| text::is_same(before, &after)) {
        return Ok((None, object_uid));
    }
    let text = text::diff(&item.id, before.as_ref(), Some(&after));
    Ok((Some((action, text, String::new())), object_uid))
}

/// Says what would be pruned.
async fn pruned(
    run: &Run<'_>,
    api: &Api,
    candidates: &Candidates,
    mut protected: Protected,
    deadline: Instant,
) -> Result<Vec<Change>, Outcome> {
    let mut order: Vec<&ObjectId> = candidates.objects.keys().collect();
    order.sort_by_cached_key(|id| rank(id));
    order.reverse();
    let mut changes = Vec::new();
    for id in order {
        let change = |action, diff, error| Change { action, object: id.clone(), file: None, diff, error };
        let judged = timeout_at(deadline, prune::examine(run, api, id, &protected)).await;
        let Ok(judged) = judged else {
            let (action, diff, error) = not_asked();
            changes.push(change(action, diff, error));
            continue;
        };
        let (verdict, path) = judged?;
        changes.push(match verdict {
            Verdict::Delete { .. } => {
                let object = match path {
                    Some(path) => run.call(Call::get(path.object, None)).await?.json().ok(),
                    None => None,
                };
                change(ChangeAction::Prune, text::diff(id, object.as_ref(), None), String::new())
            }
            // Objects that are gone are no change.
            Verdict::Forget { exists: false, .. } => continue,
            Verdict::Unmark { why, .. } | Verdict::Forget { why, .. } | Verdict::Keep(why) => {
                protected.keep(id);
                change(ChangeAction::Keep, String::new(), why)
            }
            Verdict::Failed(why) => {
                protected.keep(id);
                change(ChangeAction::Error, String::new(), why)
            }
        });
    }
    Ok(changes)
}
