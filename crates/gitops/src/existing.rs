//! Reads what exists of some objects: the metadata of each, by lists where there are many.

use std::collections::{BTreeMap, HashMap};

use serde_json::Value;

use crate::{
    call::{Call, Caller, Gate, METADATA, METADATA_LIST},
    each::each,
    object::ObjectId,
    path::{Path, segment},
};

/// Up to this many objects of a kind and namespace are read one by one.
const FEW: usize = 20;

/// Objects of a page.
const PAGE: usize = 500;

/// What is known of an object.
#[derive(Debug, Clone)]
pub(crate) enum Existing {
    /// Its metadata.
    Found(Box<Value>),
    Absent,
    /// It could not be read; the text is for people.
    Unreadable(String),
}

/// Reads the metadata of some objects.
pub(crate) async fn read<G: Gate + ?Sized>(
    caller: &Caller,
    gate: &G,
    objects: Vec<(ObjectId, Path)>,
) -> Result<HashMap<ObjectId, Existing>, G::End> {
    let mut groups: BTreeMap<String, Vec<(ObjectId, Path)>> = BTreeMap::new();
    for (id, path) in objects {
        groups.entry(path.collection.clone()).or_default().push((id, path));
    }
    let groups: Vec<_> = groups.into_iter().collect();
    let groups = &groups;
    let read = each(groups.len(), |at| async move {
        let (collection, objects) = &groups[at];
        if objects.len() > FEW
            && let Some(listed) = list(caller, gate, collection, objects).await?
        {
            return Ok::<_, G::End>(listed);
        }
        let one_by_one = each(objects.len(), |at| async move {
            let (id, path) = &objects[at];
            Ok::<_, G::End>((id.clone(), one(caller, gate, id, path).await?))
        });
        one_by_one.await
    })
    .await?;
    Ok(read.into_iter().flatten().collect())
}

/// Reads the metadata of one object.
pub(crate) async fn one<G: Gate + ?Sized>(
    caller: &Caller,
    gate: &G,
    id: &ObjectId,
    path: &Path,
) -> Result<Existing, G::End> {
    let answer = caller.call(gate, &Call::get(path.object.clone(), Some(METADATA))).await?;
    if answer.status.as_u16() == 404 {
        // The kind may be gone, or the namespace: each time the object does not exist.
        return Ok(Existing::Absent);
    }
    if !answer.is_ok() {
        return Ok(Existing::Unreadable(format!("cannot be read: {}", answer.words_about(id))));
    }
    Ok(match answer.json() {
        Ok(object) if object["metadata"]["uid"].as_str().is_some_and(|uid| !uid.is_empty()) => {
            Existing::Found(Box::new(object))
        }
        Ok(_) => Existing::Unreadable("cannot be read: it has no uid".to_owned()),
        Err(why) => Existing::Unreadable(format!("cannot be read: {why}")),
    })
}

/// Reads them by a list; `None`: it cannot be had, and they are to be read one by one.
async fn list<G: Gate + ?Sized>(
    caller: &Caller,
    gate: &G,
    collection: &str,
    objects: &[(ObjectId, Path)],
) -> Result<Option<Vec<(ObjectId, Existing)>>, G::End> {
    let by_name: HashMap<&str, &ObjectId> = objects.iter().map(|(id, _)| (&*id.name, id)).collect();
    let mut found: HashMap<&str, Value> = HashMap::new();
    let mut more = String::new();
    loop {
        let mut target = format!("{collection}?limit={PAGE}");
        if !more.is_empty() {
            target.push_str("&continue=");
            target.push_str(&segment(&more));
        }
        let answer = caller.call(gate, &Call::get(target, Some(METADATA_LIST))).await?;
        let Some(list) = answer.is_ok().then(|| answer.json().ok()).flatten() else { return Ok(None) };
        let Some(items) = list["items"].as_array() else { return Ok(None) };
        for item in items {
            let name = item["metadata"]["name"].as_str().unwrap_or_default();
            if let Some((name, _)) = by_name.get_key_value(name) {
                found.insert(name, item.clone());
            }
        }
        match list["metadata"]["continue"].as_str() {
            // The list does not go on, and what is missing in it must not count as absent.
            Some(next) if !next.is_empty() && next == more => return Ok(None),
            Some(next) if !next.is_empty() => next.clone_into(&mut more),
            _ => break,
        }
    }
    let all = objects.iter().map(|(id, _)| {
        let existing = match found.remove(&*id.name) {
            Some(object) => Existing::Found(Box::new(object)),
            None => Existing::Absent,
        };
        (id.clone(), existing)
    });
    Ok(Some(all.collect()))
}
