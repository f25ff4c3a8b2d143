//! Checks the rule of what may be deleted. It reads the log of the API server and the heads of the
//! repository, and nothing of a planner:
//!
//! deleted ⊆ marked ∩ (inventory − the set of a head that was resolved after the inventory was read)

use std::collections::{BTreeMap, BTreeSet};

use super::fake::Entry;
use crate::{OWNER_ANNOTATION, inventory, marks};

/// Returns every deletion that breaks the rule, with what is wrong.
pub(super) fn violations(log: &[Entry], heads: &[(u64, BTreeSet<String>)], id: &str) -> Vec<String> {
    let mut found = Vec::new();
    // What each actor has read as the inventory, and when it began to read it.
    let mut read: BTreeMap<&str, (u64, BTreeSet<String>)> = BTreeMap::new();
    for entry in log {
        let lists = entry.target.contains("/configmaps?labelSelector=");
        if entry.method == "GET" && lists && entry.status == 200 {
            let items = entry.response["items"].as_array().into_iter().flatten();
            let keys = items.flat_map(|item| item["data"].as_object().into_iter().flatten());
            read.insert(&entry.actor, (entry.at, keys.map(|(key, _)| key.clone()).collect()));
        }
        let Some(object) = &entry.deleted else { continue };
        if object["metadata"]["labels"][marks::ID_LABEL] == id {
            // An inventory that is merged into another one.
            continue;
        }
        let text = |field: &str| object["metadata"][field].as_str().unwrap_or_default();
        let group = match object["apiVersion"].as_str().unwrap_or("v1").split_once('/') {
            Some((group, _)) => group,
            None => "",
        };
        let kind = object["kind"].as_str().unwrap_or_default();
        let object_id = crate::ObjectId::new(group, kind, text("namespace"), text("name"));
        let key = inventory::key(&object_id).unwrap_or_default();
        if object["metadata"]["annotations"][OWNER_ANNOTATION] != id {
            found.push(format!("{key} was deleted without the mark"));
        }
        match read.get(entry.actor.as_str()) {
            None => found.push(format!("{key} was deleted before an inventory was read")),
            Some((at, keys)) => {
                if !keys.contains(&key) {
                    found.push(format!("{key} was deleted although the inventory did not have it"));
                }
                // Heads of the time between the read and the deletion.
                let lacks = heads.iter().enumerate().any(|(number, (since, set))| {
                    let ended = heads.get(number + 1).map_or(u64::MAX, |(next, _)| *next);
                    *since < entry.at && ended > *at && !set.contains(&key)
                });
                if !lacks {
                    found.push(format!(
                        "{key} was deleted although every head since the inventory was read has it"
                    ));
                }
            }
        }
    }
    found
}
