//! What a sync would change, as a unified diff and as lines of JSON.

mod text;

use std::{
    collections::BTreeSet,
    fmt::Write as _,
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use serde_json::{Value, json};
use tokio::{
    sync::Semaphore,
    task::spawn_blocking,
    time::{Instant, timeout_at},
};

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

/// How many texts of all diffs are made at once. Each takes up to half a second of CPU time, and some 50 MiB.
static TEXTS: Semaphore = Semaphore::const_new(2);

/// The longest text of all changes of a diff, in bytes. What does not fit is left out, and that is said.
const MAX_TEXT: usize = 16 << 20;

/// The warnings that are kept.
const MAX_WARNINGS: usize = 1_000;

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

/// Makes the texts of a diff, on threads for such work.
struct Texts {
    /// How many bytes they may have.
    left: AtomicUsize,
}

impl Texts {
    /// Compares two versions of an object. `None`: they are the same.
    async fn diff(&self, id: &ObjectId, before: Option<Value>, after: Option<Value>) -> Option<String> {
        // The semaphore is never closed. The thread has the permit, because it goes on if nobody waits for
        // it.
        let permit = TEXTS.acquire().await.ok();
        let of = id.clone();
        let text = spawn_blocking(move || {
            let _permit = permit;
            let is_same =
                matches!((&before, &after), (Some(before), Some(after)) if text::is_same(before, after));
            (!is_same).then(|| text::diff(&of, before.as_ref(), after.as_ref()))
        });
        let Ok(text) = text.await else { return Some("(the diff could not be made)\n".to_owned()) };
        let text = text?;
        let fits =
            self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(text.len()));
        Some(match fits {
            Ok(_) => text,
            Err(_) => format!("(the diff is left out: all of them have more than {} MiB)\n", MAX_TEXT >> 20),
        })
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
    let mut warnings: Vec<String> = plan.warnings.iter().take(MAX_WARNINGS).cloned().collect();
    if plan.warnings.len() > MAX_WARNINGS {
        warnings.push(format!("and {} more warnings", plan.warnings.len() - MAX_WARNINGS));
    }
    let mut diff = Diff { warnings, ..Diff::default() };
    let texts = &Texts { left: AtomicUsize::new(MAX_TEXT) };
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
                return Ok((Some(created(run, item, texts).await), None));
            }
            if item.defined_here {
                compare_unserved(run, item, texts).await
            } else {
                compare(run, item, texts).await
            }
        };
        timeout_at(deadline, compared).await.unwrap_or_else(|_| Ok((Some(not_asked()), None)))
    })
    .await
    .map_err(end)?;
    let mut protected = Protected::by_plan(run, &plan);
    for (item, (compared, uid)) in items.iter().zip(compared) {
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
        let names = plan.names();
        let candidates = prune::candidates(&keys, |id, key| names.contain(id, key), &mut protected);
        let mut pruned = pruned(run, &api, &candidates, protected, texts, deadline).await.map_err(end)?;
        diff.changes.append(&mut pruned);
    }
    Ok(diff)
}

fn not_asked() -> (ChangeAction, String, String) {
    (ChangeAction::Error, String::new(), "not asked: the time for the diff is over".to_owned())
}

/// The change of an object that does not exist.
async fn created(run: &Run<'_>, item: &Item<'_>, texts: &Texts) -> (ChangeAction, String, String) {
    let diff = texts.diff(&item.id, None, Some(wanted_object(run, item))).await;
    (ChangeAction::Create, diff.unwrap_or_default(), String::new())
}

/// Compares an object whose version comes with a definition of the set: the API server could only refuse it.
/// Also returns its uid, if it exists in another version.
async fn compare_unserved(
    run: &Run<'_>,
    item: &Item<'_>,
    texts: &Texts,
) -> Result<(Compared, Option<u128>), Outcome> {
    let existing = match &item.served {
        Some(path) => crate::existing::one(&run.caller, run, &item.id, path).await?,
        None => Existing::Absent,
    };
    let object_uid = match &existing {
        Existing::Found(object) => object["metadata"]["uid"].as_str().map(uid),
        _ => None,
    };
    if let Err(why) = allowed(run.project.inventory_policy, &run.wanted.id, &existing) {
        return Ok((Some((ChangeAction::Error, String::new(), why)), object_uid));
    }
    if object_uid.is_none() {
        return Ok((Some(created(run, item, texts).await), None));
    }
    let why = format!("{} is not served yet, so its changes cannot be asked for", item.manifest.api_version);
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
async fn compare(run: &Run<'_>, item: &Item<'_>, texts: &Texts) -> Result<(Compared, Option<u128>), Outcome> {
    let mut object_uid = None;
    let error = |why: String, uid| (Some((ChangeAction::Error, String::new(), why)), uid);
    let answer = run.call(Call::get(item.path.object.clone(), None)).await?;
    let before = match answer.status.as_u16() {
        404 => None,
        _ if !answer.is_ok() => {
            return Ok(error(format!("cannot be read: {}", answer.words_about(&item.id)), None));
        }
        _ => match answer.json() {
            Ok(object) => Some(object),
            Err(why) => return Ok(error(format!("cannot be read: {why}"), None)),
        },
    };
    let existing = match &before {
        None => Existing::Absent,
        Some(object) => {
            object_uid = object["metadata"]["uid"].as_str().map(uid);
            Existing::Found(Box::new(object.clone()))
        }
    };
    if let Err(why) = allowed(run.project.inventory_policy, &run.wanted.id, &existing) {
        return Ok(error(why, object_uid));
    }
    let apply = Call::apply(apply_target(item, true), item.body(&run.wanted.id));
    let answer = run.call(apply).await?;
    if !answer.is_ok() {
        return Ok(error(answer.words_about(&item.id), object_uid));
    }
    let after = match answer.json() {
        Ok(after) => after,
        Err(why) => return Ok(error(why, object_uid)),
    };
    let action = if before.is_some() { ChangeAction::Update } else { ChangeAction::Create };
    let text = texts.diff(&item.id, before, Some(after)).await;
    Ok((text.map(|text| (action, text, String::new())), object_uid))
}

/// Says what would be pruned.
async fn pruned(
    run: &Run<'_>,
    api: &Api,
    candidates: &Candidates,
    mut protected: Protected,
    texts: &Texts,
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
                let text = texts.diff(id, object, None).await.unwrap_or_default();
                change(ChangeAction::Prune, text, String::new())
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
