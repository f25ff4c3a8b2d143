//! What differs in the cluster from what was applied.

use std::collections::BTreeSet;

use crate::{
    call::Call,
    discovery::Lookup,
    each::each,
    existing::{self, Existing},
    memory::{Live, Memory},
    object::ObjectId,
    path::Path,
    progress::{Health, Outcome},
    run::Run,
    status::status,
};

/// The result of a check.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Drift {
    /// The objects that differ or are gone: a sync must apply them again.
    pub differ: BTreeSet<ObjectId>,
    /// How many objects were compared.
    pub checked: usize,
    /// Objects that could not be compared, with the reason for people.
    pub unknown: Vec<(ObjectId, String)>,
    /// The applied objects that are not current now.
    pub degraded: usize,
}

/// Compares all objects of the memory, and looks again at those that were not current.
pub(crate) async fn check(run: &Run<'_>, memory: &mut Memory) -> Result<Drift, Outcome> {
    let api = run.api(false).await?;
    let mut drift = Drift { checked: memory.objects.len(), ..Drift::default() };
    let mut paths = Vec::new();
    for id in memory.objects.keys() {
        match api.lookup(&id.group, None, &id.kind) {
            Lookup::Found(resource) => {
                paths.push((id.clone(), Path::new(id, &resource.version, &resource.plural)))
            }
            Lookup::Unknown => {
                drift.unknown.push((id.clone(), format!("the API group {} cannot be read", id.group)));
            }
            // It cannot exist. To apply it again says why.
            Lookup::NoKind | Lookup::NoGroup => {
                drift.differ.insert(id.clone());
            }
        }
    }
    let mut look: Vec<(ObjectId, Path)> = Vec::new();
    let existing = existing::read(&run.caller, run, paths.clone()).await?;
    for (id, path) in paths {
        let Some(record) = memory.objects.get(&id) else { continue };
        match existing.get(&id) {
            Some(Existing::Found(object)) => match Live::read(object) {
                Some(now) if record.live.differs(&now) => {
                    drift.differ.insert(id);
                }
                Some(_) if record.health != Health::Current => look.push((id, path)),
                Some(_) => {}
                None => drift.unknown.push((id, "the answer is no object".to_owned())),
            },
            Some(Existing::Unreadable(why)) => drift.unknown.push((id, why.clone())),
            Some(Existing::Absent) | None => {
                drift.differ.insert(id);
            }
        }
    }
    let look = &look;
    let looks = each(look.len(), |at| run.call(Call::get(look[at].1.object.clone(), None))).await?;
    for ((id, _), answer) in look.iter().zip(looks) {
        if answer.is_ok()
            && let Ok(object) = answer.json()
            && let Some(record) = memory.objects.get_mut(id)
        {
            record.health = status(id, &object).0;
        }
    }
    drift.degraded = memory.objects.values().filter(|record| record.health != Health::Current).count();
    Ok(drift)
}
