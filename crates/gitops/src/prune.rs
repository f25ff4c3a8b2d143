//! Deletes what is in the inventory and no longer in the set.
//!
//! Each object is read before it is deleted, and the deletion names the uid and the `resourceVersion` that
//! were read. So an object that somebody marks as another one's, or applies again, between the two is not
//! deleted.

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    sync::Arc,
    time::Duration,
};

use serde_json::{Value, json};
use tokio::time::Instant;

use crate::{
    call::{Call, MANAGER, METADATA},
    discovery::{Api, Lookup},
    each::each,
    inventory::parse_key,
    marks::{ID_LABEL, OWNER_ANNOTATION},
    memory::uid,
    object::ObjectId,
    order::{rank, same_kind},
    path::Path,
    plan::{Plan, defines},
    progress::{Action, Outcome, Phase},
    run::{Fence, Run},
};

/// Before each so many deletions the head is resolved and the fence written again.
const CHUNK: usize = 100;

/// How often a deletion is tried while the object changes in between.
const TRIES: usize = 5;

/// Between two looks at what is being deleted.
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// Annotations by which an object says that it is to stay.
const KEEP: [(&str, &str); 2] =
    [("cli-utils.sigs.k8s.io/on-remove", "keep"), ("client.lifecycle.config.k8s.io/deletion", "detach")];

/// What is to be pruned.
pub(crate) struct Candidates {
    /// Key and object of each.
    pub(crate) objects: BTreeMap<ObjectId, String>,
}

/// What must not be deleted because of what is inside.
#[derive(Default)]
pub(crate) struct Protected {
    /// Namespaces with an object that stays.
    pub(crate) namespaces: BTreeSet<String>,
    /// Groups and kinds of objects that stay.
    pub(crate) kinds: BTreeSet<(String, String)>,
    /// Uids of objects of the set.
    pub(crate) uids: HashSet<u128>,
    /// Kind, namespace and name of objects of the set whose uid is not known.
    unread: HashSet<(Arc<str>, Arc<str>, Arc<str>)>,
}

impl Protected {
    /// What the objects of a plan protect, and the inventory in its namespace.
    pub(crate) fn by_plan(run: &Run<'_>, plan: &Plan<'_>) -> Self {
        let mut protected = Self::default();
        protected.namespaces.insert(run.wanted.namespace.clone());
        for item in &plan.items {
            protected.keep(&item.id);
        }
        for failed in &plan.failed {
            protected.keep(&failed.id);
            protected.keep_unread(&failed.id);
            if failed.id.namespace.is_empty() {
                // It may be an object of the cluster, or have the default namespace.
                let namespace = run.project.default_namespace.as_str();
                protected.namespaces.insert(namespace.to_owned());
                protected.keep_unread(&ObjectId { namespace: namespace.into(), ..failed.id.clone() });
            }
        }
        protected
    }

    /// An object of the set stays, of which the uid is not known: it may be served in another group, too.
    pub(crate) fn keep_unread(&mut self, id: &ObjectId) {
        self.unread.insert((id.kind.clone(), id.namespace.clone(), id.name.clone()));
    }

    /// An object stays.
    pub(crate) fn keep(&mut self, id: &ObjectId) {
        if !id.namespace.is_empty() {
            self.namespaces.insert(id.namespace.to_string());
        }
        self.kinds.insert((id.group.to_string(), id.kind.to_string()));
    }
}

/// What pruning came to.
#[derive(Debug, Default)]
pub(crate) struct Pruned {
    /// Keys that leave the inventory.
    pub(crate) removed: BTreeSet<String>,
    /// Objects that are still there although they were to be deleted: refused, or waiting for something.
    pub(crate) left: usize,
    /// Those of them that were refused.
    pub(crate) failed: usize,
}

/// What is to be done with a candidate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// It is deleted, if it still is this one.
    Delete { uid: String, resource_version: String, terminating: bool },
    /// Its mark is taken off, and it is forgotten.
    Unmark { uid: String, resource_version: String, why: String },
    /// It is left alone and forgotten. `exists`: it is there.
    Forget { why: String, exists: bool },
    /// It is left alone and stays in the inventory.
    Keep(String),
    /// It could not be judged, and stays in the inventory.
    Failed(String),
}

/// The path of a candidate, or what is to be done with it without looking at it.
pub(crate) fn locate(run: &Run<'_>, api: &Api, id: &ObjectId) -> Result<Path, Verdict> {
    if let Some(allowed) = &run.project.namespaces
        && !allowed.contains(&*id.namespace)
    {
        return Err(Verdict::Keep("it is outside the agent's namespaces".to_owned()));
    }
    match api.lookup(&id.group, None, &id.kind) {
        Lookup::Unknown => Err(Verdict::Keep(format!("the API group {} cannot be read", id.group))),
        Lookup::NoGroup => Err(Verdict::Keep(format!("the cluster has no API group {}", id.group))),
        Lookup::NoKind => {
            let why = format!("the cluster no longer has the kind {}", id.kind);
            Err(Verdict::Forget { why, exists: false })
        }
        Lookup::Found(resource) if resource.namespaced == id.namespace.is_empty() => {
            let why = format!("the kind {} has changed between cluster and namespaces", id.kind);
            Err(Verdict::Keep(why))
        }
        Lookup::Found(resource) => Ok(Path::new(id, &resource.version, &resource.plural)),
    }
}

/// Judges a candidate by what was read of it.
pub(crate) fn judge(run: &Run<'_>, id: &ObjectId, object: &Value, protected: &Protected) -> Verdict {
    let metadata = &object["metadata"];
    let text = |field: &str| metadata[field].as_str().filter(|text| !text.is_empty());
    let (Some(object_uid), Some(version)) = (text("uid"), text("resourceVersion")) else {
        return Verdict::Failed("the answer is no object".to_owned());
    };
    // The API server answers with what was asked for; whatever else it may be must not be deleted.
    if text("name") != Some(&*id.name) || text("namespace").unwrap_or_default() != &*id.namespace {
        return Verdict::Failed("the answer is another object".to_owned());
    }
    match metadata["annotations"][OWNER_ANNOTATION].as_str() {
        Some(owner) if owner == run.wanted.id => {}
        Some(owner) => {
            let why = format!("it belongs to the inventory {owner}");
            return Verdict::Forget { why, exists: true };
        }
        None => {
            let why = format!("it does not have the mark {OWNER_ANNOTATION}");
            return Verdict::Forget { why, exists: true };
        }
    }
    if protected.uids.contains(&uid(object_uid)) {
        let why = "it is the same object as one that was applied in another group".to_owned();
        return Verdict::Forget { why, exists: true };
    }
    if protected.unread.contains(&(id.kind.clone(), id.namespace.clone(), id.name.clone())) {
        let why = "it may be the same object as one of the set in another group, which could not be read";
        return Verdict::Keep(why.to_owned());
    }
    let (object_uid, version) = (object_uid.to_owned(), version.to_owned());
    if let Some((name, value)) = KEEP.iter().find(|(name, value)| metadata["annotations"][*name] == *value) {
        let why = format!("it has the annotation {name}: {value}");
        return Verdict::Unmark { uid: object_uid, resource_version: version, why };
    }
    let owners = metadata["ownerReferences"].as_array().into_iter().flatten();
    if let Some(owner) = owners.into_iter().find(|owner| owner["controller"] == true) {
        let field = |name: &str| owner[name].as_str().unwrap_or("?").to_owned();
        return Verdict::Keep(format!("it is controlled by {} {}", field("kind"), field("name")));
    }
    if id.is("", "Namespace") && protected.namespaces.contains(&*id.name) {
        return Verdict::Keep("an object that stays is in the namespace".to_owned());
    }
    if id.is("apiextensions.k8s.io", "CustomResourceDefinition")
        && defines(object)
            .is_none_or(|(group, kind)| protected.kinds.contains(&(group.to_owned(), kind.to_owned())))
    {
        return Verdict::Keep("an object that stays is of the kind".to_owned());
    }
    if id.is("", "ConfigMap") && !metadata["labels"][ID_LABEL].is_null() {
        return Verdict::Keep("it is an inventory".to_owned());
    }
    let terminating = !metadata["deletionTimestamp"].is_null();
    Verdict::Delete { uid: object_uid, resource_version: version, terminating }
}

/// Reads a candidate and judges it.
pub(crate) async fn examine(
    run: &Run<'_>,
    api: &Api,
    id: &ObjectId,
    protected: &Protected,
) -> Result<(Verdict, Option<Path>), Outcome> {
    let path = match locate(run, api, id) {
        Ok(path) => path,
        Err(verdict) => return Ok((verdict, None)),
    };
    // Of a definition the kind is needed, which is not in its metadata.
    let accept = (!id.is("apiextensions.k8s.io", "CustomResourceDefinition")).then_some(METADATA);
    let answer = run.call(Call::get(path.object.clone(), accept)).await?;
    let verdict = match answer.status.as_u16() {
        404 => Verdict::Forget { why: "it is gone already".to_owned(), exists: false },
        _ if !answer.is_ok() => Verdict::Failed(format!("cannot be read: {}", answer.words_about(id))),
        _ => match answer.json() {
            Ok(object) => judge(run, id, &object, protected),
            Err(why) => Verdict::Failed(format!("cannot be read: {why}")),
        },
    };
    Ok((verdict, Some(path)))
}

/// Deletes the candidates, in the reverse order of kinds. `commit`: what the head must still be.
pub(crate) async fn prune(
    run: &Run<'_>,
    api: &Api,
    candidates: &Candidates,
    mut protected: Protected,
    fence: &Fence,
    commit: Option<&Arc<str>>,
) -> Result<Pruned, Outcome> {
    run.phase(Phase::Pruning);
    let mut pruned = Pruned::default();
    let mut deleted: Vec<(&ObjectId, Path, String)> = Vec::new();
    let mut order: Vec<&ObjectId> = candidates.objects.keys().collect();
    order.sort_by_cached_key(|id| rank(id));
    order.reverse();
    let mut since_confirmed = CHUNK;
    let mut at = 0;
    while at < order.len() {
        let kind = order[at..].iter().take_while(|id| same_kind(id, order[at])).count();
        if since_confirmed + kind.min(CHUNK) > CHUNK {
            run.confirm(commit).await?;
            fence.renew(run).await?;
            since_confirmed = 0;
        }
        let chunk = &order[at..at + kind.min(CHUNK)];
        at += chunk.len();
        since_confirmed += chunk.len();
        let inside = &protected;
        let results = each(chunk.len(), |at| prune_one(run, api, chunk[at], inside)).await?;
        for (id, result) in chunk.iter().copied().zip(results) {
            let key = &candidates.objects[id];
            match result {
                Done::Deleting { path, uid } => deleted.push((id, path, uid)),
                Done::Forgotten { why, exists } => {
                    if exists {
                        protected.keep(id);
                    }
                    pruned.removed.insert(key.clone());
                    run.report_left(id, Action::Forgotten, why);
                }
                Done::Kept(why) => {
                    protected.keep(id);
                    run.report_left(id, Action::Kept, why);
                }
                Done::Failed(why) => {
                    protected.keep(id);
                    pruned.failed += 1;
                    pruned.left += 1;
                    run.report_left(id, Action::Failed, why);
                }
            }
        }
    }
    wait(run, candidates, deleted, &mut pruned).await?;
    Ok(pruned)
}

/// What became of a candidate.
enum Done {
    Deleting { path: Path, uid: String },
    Forgotten { why: String, exists: bool },
    Kept(String),
    Failed(String),
}

async fn prune_one(run: &Run<'_>, api: &Api, id: &ObjectId, protected: &Protected) -> Result<Done, Outcome> {
    for _ in 0..TRIES {
        let (verdict, path) = examine(run, api, id, protected).await?;
        let (call, ends) = match (verdict, path) {
            (Verdict::Keep(why), _) => return Ok(Done::Kept(why)),
            (Verdict::Failed(why), _) => return Ok(Done::Failed(why)),
            (Verdict::Forget { why, exists }, _) => return Ok(Done::Forgotten { why, exists }),
            (_, None) => return Ok(Done::Failed("it has no path".to_owned())),
            (Verdict::Delete { uid, terminating: true, .. }, Some(path)) => {
                return Ok(Done::Deleting { path, uid });
            }
            (Verdict::Delete { uid, resource_version, .. }, Some(path)) => {
                let options = json!({
                    "apiVersion": "v1", "kind": "DeleteOptions",
                    "preconditions": { "uid": uid, "resourceVersion": resource_version },
                    "propagationPolicy": run.project.propagation.as_str(),
                });
                (Call::delete(path.object.clone(), &options), Done::Deleting { path, uid })
            }
            (Verdict::Unmark { uid, resource_version, why }, Some(path)) => {
                let body = json!({ "metadata": {
                    "uid": uid, "resourceVersion": resource_version, "annotations": { OWNER_ANNOTATION: null },
                } });
                let target = format!("{}?fieldManager={}", path.object, MANAGER);
                (Call::merge(target, &body).fenced(), Done::Forgotten { why, exists: true })
            }
        };
        let answer = run.call(call).await?;
        match answer.status.as_u16() {
            // Changed or gone since it was read. Or nobody knows whether it was done: it is read again.
            404 | 409 | 429 | 500.. => {}
            _ if answer.is_ok() => return Ok(ends),
            _ => return Ok(Done::Failed(answer.words_about(id))),
        }
        if answer.status.as_u16() >= 429 {
            run.sleep(Duration::from_secs(1)).await?;
        }
    }
    Ok(Done::Failed(format!(
        "could not be deleted in {TRIES} tries: it changes all the time, or the API server fails"
    )))
}

/// Waits until what was deleted is gone, for as long as the project says.
async fn wait(
    run: &Run<'_>,
    candidates: &Candidates,
    mut deleted: Vec<(&ObjectId, Path, String)>,
    pruned: &mut Pruned,
) -> Result<(), Outcome> {
    let begin = Instant::now();
    loop {
        let looked_at = &deleted;
        let looks = each(looked_at.len(), |at| async move {
            let (id, path, uid) = &looked_at[at];
            waits_for(run, path, id, uid).await
        })
        .await?;
        let waited = begin.elapsed();
        let is_over = waited >= run.project.prune_timeout;
        let mut left = Vec::new();
        for ((id, path, uid), why) in deleted.into_iter().zip(looks) {
            match why {
                None => {
                    pruned.removed.insert(candidates.objects[id].clone());
                    run.report_left(id, Action::Pruned, String::new());
                }
                Some(why) => {
                    if is_over {
                        pruned.left += 1;
                        run.report_left(id, Action::Kept, why);
                    }
                    left.push((id, path, uid));
                }
            }
        }
        deleted = left;
        if deleted.is_empty() || is_over {
            return Ok(());
        }
        run.sleep(LOOK_EVERY.min(run.project.prune_timeout - waited)).await?;
    }
}

/// Why an object that was deleted is still there; `None`: it is gone.
async fn waits_for(run: &Run<'_>, path: &Path, id: &ObjectId, uid: &str) -> Result<Option<String>, Outcome> {
    let answer = run.call(Call::get(path.object.clone(), Some(METADATA))).await?;
    if answer.status.as_u16() == 404 {
        return Ok(None);
    }
    if !answer.is_ok() {
        return Ok(Some(format!("cannot be read: {}", answer.words_about(id))));
    }
    let object = answer.json().unwrap_or_default();
    if object["metadata"]["uid"].as_str().is_some_and(|now| now != uid) {
        // Somebody else has made another one.
        return Ok(None);
    }
    let finalizers = object["metadata"]["finalizers"].as_array();
    let finalizers: Vec<&str> = finalizers.into_iter().flatten().filter_map(Value::as_str).collect();
    Ok(Some(if finalizers.is_empty() {
        "waits to be gone".to_owned()
    } else {
        format!("waits for finalizer {}", finalizers.join(", "))
    }))
}

/// Returns what of the keys is a candidate, and protects the namespaces of keys that are not understood.
pub(crate) fn candidates(
    keys: &BTreeSet<String>,
    in_set: impl Fn(&ObjectId, &str) -> bool,
    protected: &mut Protected,
) -> Candidates {
    let mut objects = BTreeMap::new();
    for key in keys {
        match parse_key(key) {
            Some(id) if in_set(&id, key) => {}
            Some(id) => {
                objects.insert(id, key.clone());
            }
            None => {
                let namespace = key.split('_').next().unwrap_or_default();
                protected.namespaces.insert(namespace.to_owned());
            }
        }
    }
    Candidates { objects }
}
