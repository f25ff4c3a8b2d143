//! Checks what planners have deleted, by nothing but the audit log of the API server and the commits of the
//! repository:
//!
//! deleted ⊆ marked ∩ (inventory − the set of a head that was resolved after the inventory was read)

use std::collections::{BTreeMap, BTreeSet, HashMap};

use serde::Deserialize;
use serde_json::Value;

/// The annotation by which an object belongs to an inventory.
const OWNER: &str = "config.k8s.io/owning-inventory";
/// The label by which a ConfigMap is an inventory.
pub(super) const INVENTORY: &str = "cli-utils.sigs.k8s.io/inventory-id";

/// An object of a commit: kind, namespace and name.
pub type Wanted = (String, String, String);

/// A commit, and when it was the head of the repository.
#[derive(Clone, Debug)]
pub struct HeadSpan {
    /// The earliest moment at which it may have been the head, in microseconds since 1970.
    pub from: i128,
    /// The latest one.
    pub until: i128,
    /// The objects of its files.
    pub objects: BTreeSet<Wanted>,
}

/// What was deleted, and what is wrong with that.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Deletions {
    /// How many objects planners have deleted.
    pub deleted: usize,
    /// What breaks the rule.
    pub violations: Vec<String>,
}

/// An event of the audit log.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Event {
    stage: String,
    pub(super) verb: String,
    #[serde(default)]
    user_agent: String,
    #[serde(default)]
    pub(super) object_ref: Option<ObjectRef>,
    #[serde(default)]
    response_status: Option<ResponseStatus>,
    #[serde(default)]
    pub(super) response_object: Value,
    #[serde(default, rename = "requestURI")]
    pub(super) request_uri: String,
    request_received_timestamp: String,
    stage_timestamp: String,
}

#[derive(Deserialize, Clone, PartialEq, Eq, Hash, Debug, Default)]
#[serde(rename_all = "camelCase")]
pub(super) struct ObjectRef {
    #[serde(default)]
    api_group: String,
    pub(super) resource: String,
    #[serde(default)]
    pub(super) namespace: String,
    #[serde(default)]
    pub(super) name: String,
    #[serde(default)]
    pub(super) subresource: String,
}

#[derive(Deserialize)]
struct ResponseStatus {
    #[serde(default)]
    code: u16,
}

/// An object as a response last showed it.
#[derive(Clone, Debug)]
struct Seen {
    /// `None`: only its metadata was read, in which it is not.
    kind: Option<String>,
    owner: Option<String>,
}

/// An inventory as a planner read it last.
#[derive(Clone, Debug, Default)]
struct Read {
    at: i128,
    keys: BTreeSet<String>,
}

impl Event {
    /// The status of the response; 0: there is none.
    pub(super) fn code(&self) -> u16 {
        self.response_status.as_ref().map_or(0, |status| status.code)
    }

    /// Who it was: the `User-Agent` up to a space.
    pub(super) fn who(&self) -> &str {
        self.user_agent.split(' ').next().unwrap_or_default()
    }

    /// Whether nothing was written because of that.
    pub(super) fn is_dry(&self) -> bool {
        self.request_uri.contains("dryRun=")
    }
}

/// Returns the events of a log whose responses are complete, each with the moments of its request and of
/// its response, in microseconds since 1970.
pub(super) fn events(log: &str) -> Vec<(i128, i128, Event)> {
    log.lines()
        .filter_map(|line| serde_json::from_str::<Event>(line).ok())
        .filter(|event| event.stage == "ResponseComplete")
        .filter_map(|event| {
            Some((micros(&event.request_received_timestamp)?, micros(&event.stage_timestamp)?, event))
        })
        .collect()
}

/// Reads a time of the audit log, in microseconds since 1970. `None`: it is none.
fn micros(time: &str) -> Option<i128> {
    let time: prost_types::Timestamp = time.parse().ok()?;
    Some(i128::from(time.seconds) * 1_000_000 + i128::from(time.nanos) / 1_000)
}

/// Returns the beginning of the key of an object in an inventory, which its kind follows.
fn prefix(object: &ObjectRef) -> String {
    let name = if object.api_group == "rbac.authorization.k8s.io" {
        object.name.replace(':', "__")
    } else {
        object.name.clone()
    };
    format!("{}_{name}_{}_", object.namespace, object.api_group)
}

/// Checks every deletion by a client whose `User-Agent` begins with `planner`, such as `kas/gitops`. What
/// follows, up to a space, tells planners apart. `log` has one event a line, as the API server writes it;
/// `id` is that of the inventory.
pub fn check(log: &str, planner: &str, id: &str, heads: &[HeadSpan]) -> Deletions {
    let mut events = events(log);
    events.sort_by_key(|(_, done, _)| *done);
    let mut seen: HashMap<ObjectRef, Seen> = HashMap::new();
    let mut reads: BTreeMap<String, Read> = BTreeMap::new();
    let mut result = Deletions::default();
    for (received, done, event) in &events {
        let Some(object) = &event.object_ref else { continue };
        if !(200..300).contains(&event.code()) || !object.subresource.is_empty() {
            continue;
        }
        let who = event.who();
        let is_dry = event.is_dry();
        match event.verb.as_str() {
            "delete" if who.starts_with(planner) && !is_dry => {
                result.deleted += 1;
                let violation = judge(object, seen.get(object), reads.get(who), id, heads, *received).err();
                result.violations.extend(violation.map(|why| {
                    format!(
                        "{} {}/{} deleted by {who}: {why}",
                        object.resource, object.namespace, object.name
                    )
                }));
            }
            "deletecollection" if who.starts_with(planner) && !is_dry => {
                result.violations.push(format!("{who} deleted a collection of {}", object.resource));
            }
            "get" | "create" | "update" | "patch" if !is_dry => {
                note(&mut seen, object, &event.response_object);
            }
            "list" => {
                for item in event.response_object["items"].as_array().into_iter().flatten() {
                    let text = |key: &str| item["metadata"][key].as_str().unwrap_or_default().to_owned();
                    let object =
                        ObjectRef { namespace: text("namespace"), name: text("name"), ..object.clone() };
                    // Items of a list have no kind of their own.
                    let kind = event.response_object["kind"].as_str().unwrap_or_default();
                    let kind = kind.strip_suffix("List").unwrap_or(kind);
                    saw(&mut seen, object, kind, &item["metadata"]);
                }
            }
            _ => {}
        }
        let is_read = matches!(event.verb.as_str(), "get" | "list");
        if is_read && object.resource == "configmaps" && who.starts_with(planner) {
            let found = inventories(&event.response_object, id);
            if let Some(keys) = found {
                reads.insert(who.to_owned(), Read { at: *done, keys });
            }
        }
    }
    result
}

fn note(seen: &mut HashMap<ObjectRef, Seen>, object: &ObjectRef, response: &Value) {
    let metadata = &response["metadata"];
    let name = metadata["name"].as_str().unwrap_or_default();
    let kind = response["kind"].as_str().unwrap_or_default();
    if !name.is_empty() && !matches!(kind, "" | "Status") {
        saw(seen, ObjectRef { name: name.to_owned(), ..object.clone() }, kind, metadata);
    }
}

/// Notes the mark of an object. Its kind is not in a response with only metadata.
fn saw(seen: &mut HashMap<ObjectRef, Seen>, object: ObjectRef, kind: &str, metadata: &Value) {
    let owner = metadata["annotations"][OWNER].as_str().map(str::to_owned);
    if kind != "PartialObjectMetadata" {
        seen.insert(object, Seen { kind: Some(kind.to_owned()), owner });
    } else {
        seen.entry(object).or_insert(Seen { kind: None, owner: None }).owner = owner;
    }
}

/// Returns the keys of the inventories with this id in a response; `None`: there is none, or only its
/// metadata, of which a planner that lists the ConfigMaps of a namespace learns no keys.
fn inventories(response: &Value, id: &str) -> Option<BTreeSet<String>> {
    if !matches!(response["kind"].as_str(), Some("ConfigMap" | "ConfigMapList")) {
        return None;
    }
    let single = std::slice::from_ref(response);
    let all = response["items"].as_array().map_or(single, Vec::as_slice);
    let matching = all.iter().filter(|it| it["metadata"]["labels"][INVENTORY] == id);
    let mut keys = None;
    for inventory in matching {
        let data = inventory["data"].as_object();
        keys.get_or_insert_with(BTreeSet::new).extend(data.into_iter().flatten().map(|(key, _)| key.clone()));
    }
    keys
}

fn judge(
    object: &ObjectRef,
    seen: Option<&Seen>,
    read: Option<&Read>,
    id: &str,
    heads: &[HeadSpan],
    at: i128,
) -> Result<(), String> {
    let seen = seen.ok_or("it was never read or written before")?;
    if seen.owner.as_deref() != Some(id) {
        return Err(format!("it is not marked as {id}, but as {:?}", seen.owner));
    }
    let read = read.ok_or("the inventory was not read before")?;
    let prefix = prefix(object);
    let found = read.keys.iter().filter_map(|key| key.strip_prefix(&prefix)).find(|found| match &seen.kind {
        Some(kind) => found == kind,
        // One whose whole body nobody has read: its writer has died meanwhile.
        None => !found.contains('_'),
    });
    let Some(kind) = found else {
        let kind = seen.kind.as_deref().unwrap_or_default();
        return Err(format!("{prefix}{kind} is not in the inventory that was read"));
    };
    let wanted = (kind.to_owned(), object.namespace.clone(), object.name.clone());
    let mut between = heads.iter().filter(|head| head.from <= at && head.until >= read.at).peekable();
    if between.peek().is_none() {
        return Err("no head is known between the read of the inventory and the deletion".to_owned());
    }
    if between.all(|head| head.objects.contains(&wanted)) {
        return Err("every head since the inventory was read has it".to_owned());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn event(second: u32, verb: &str, name: &str, response: &Value) -> String {
        let time = format!("2026-01-01T00:00:{second:02}.000000Z");
        json!({
            "stage": "ResponseComplete",
            "verb": verb,
            "userAgent": "kas/gitops:a via agentk/v1",
            "requestURI": "/x",
            "objectRef": { "resource": "configmaps", "namespace": "shop", "name": name, "apiVersion": "v1" },
            "responseStatus": { "code": 200 },
            "responseObject": response,
            "requestReceivedTimestamp": time,
            "stageTimestamp": time,
        })
        .to_string()
    }

    fn inventory(keys: &[&str]) -> Value {
        let data: serde_json::Map<String, Value> =
            keys.iter().map(|key| ((*key).to_owned(), json!(""))).collect();
        let labels = json!({ INVENTORY: "1-2" });
        json!({ "kind": "ConfigMapList", "items": [{ "metadata": { "name": "inventory-1-2", "labels": labels }, "data": data }] })
    }

    fn object(mark: Option<&str>) -> Value {
        json!({ "kind": "ConfigMap", "metadata": { "name": "old", "annotations": { OWNER: mark } } })
    }

    fn at(second: u32) -> i128 {
        micros(&format!("2026-01-01T00:00:{second:02}Z")).unwrap()
    }

    fn head(from: u32, until: u32, names: &[&str]) -> HeadSpan {
        let objects = names.iter().map(|name| ("ConfigMap".into(), "shop".into(), (*name).to_owned()));
        HeadSpan { from: at(from), until: at(until), objects: objects.collect() }
    }

    /// A planner that reads the inventory at 10 s and deletes `old` at 20 s.
    fn log(keys: &[&str], mark: Option<&str>) -> String {
        [
            event(10, "list", "", &inventory(keys)),
            event(15, "get", "old", &object(mark)),
            event(20, "delete", "old", &json!({ "kind": "Status" })),
        ]
        .join("\n")
    }

    const KEY: &str = "shop_old__ConfigMap";

    fn violations(log: &str, heads: &[HeadSpan]) -> Vec<String> {
        let found = check(log, "kas/gitops", "1-2", heads);
        assert_eq!(found.deleted, 1);
        found.violations
    }

    #[test]
    fn a_lawful_deletion_is_none_to_complain_about() {
        let heads = [head(0, 12, &["old", "new"]), head(12, 60, &["new"])];
        assert_eq!(violations(&log(&[KEY], Some("1-2")), &heads), Vec::<String>::new());
    }

    #[test]
    fn a_planner_that_skips_the_mark_is_found() {
        let heads = [head(0, 60, &["new"])];
        for mark in [None, Some("9-9")] {
            let found = violations(&log(&[KEY], mark), &heads);
            assert!(found[0].contains("not marked"), "{found:?}");
        }
    }

    #[test]
    fn a_planner_that_reads_the_head_before_the_inventory_is_found() {
        // It resolved a head without `old` at 5 s; since 8 s the head has it again.
        let heads = [head(0, 8, &["new"]), head(8, 60, &["old", "new"])];
        let found = violations(&log(&[KEY], Some("1-2")), &heads);
        assert!(found[0].contains("every head"), "{found:?}");
    }

    #[test]
    fn what_is_not_in_the_inventory_must_stay() {
        let heads = [head(0, 60, &["new"])];
        let found = violations(&log(&[], Some("1-2")), &heads);
        assert!(found[0].contains("not in the inventory"), "{found:?}");
    }

    /// Metadata of ConfigMaps, the inventory among them, as a planner reads them where there are many.
    fn metadata(owner: Option<&str>) -> Value {
        let labels = json!({ INVENTORY: "1-2" });
        json!({ "kind": "PartialObjectMetadataList", "items": [
            { "kind": "PartialObjectMetadata", "metadata": { "name": "inventory-1-2", "namespace": "shop", "labels": labels } },
            { "kind": "PartialObjectMetadata", "metadata": {
                "name": "old", "namespace": "shop", "annotations": { OWNER: owner },
            } },
        ] })
    }

    #[test]
    fn metadata_of_an_inventory_has_no_keys() {
        let heads = [head(0, 12, &["old", "new"]), head(12, 60, &["new"])];
        let listed = event(16, "list", "", &metadata(Some("1-2")));
        let whole = [log(&[KEY], Some("1-2")), listed.clone()].join("\n");
        assert_eq!(violations(&whole, &heads), Vec::<String>::new());
        let without = [log(&[], Some("1-2")), listed].join("\n");
        assert!(violations(&without, &heads)[0].contains("not in the inventory"));
    }

    #[test]
    fn a_mark_that_only_metadata_shows_counts() {
        let heads = [head(0, 60, &["new"])];
        let listed = event(16, "list", "", &metadata(Some("9-9")));
        let found = violations(&[log(&[KEY], Some("1-2")), listed].join("\n"), &heads);
        assert!(found[0].contains("not marked"), "{found:?}");
    }

    #[test]
    fn an_object_of_which_only_metadata_was_read_is_judged_too() {
        let metadata = json!({ "kind": "PartialObjectMetadata", "metadata": {
            "name": "old", "annotations": { OWNER: "1-2" },
        } });
        let log = |keys: &[&str]| {
            let events = [
                event(10, "list", "", &inventory(keys)),
                event(15, "get", "old", &metadata),
                event(20, "delete", "old", &json!({ "kind": "Status" })),
            ];
            events.join("\n")
        };
        let heads = [head(0, 12, &["old", "new"]), head(12, 60, &["new"])];
        assert_eq!(violations(&log(&[KEY]), &heads), Vec::<String>::new());
        assert!(violations(&log(&["shop_older__ConfigMap"]), &heads)[0].contains("not in the inventory"));
        let heads = [head(0, 60, &["old"])];
        assert!(violations(&log(&[KEY]), &heads)[0].contains("every head"));
    }

    #[test]
    fn deletions_of_others_do_not_count() {
        let other = log(&[], None).replace("kas/gitops:a", "kubectl");
        assert_eq!(check(&other, "kas/gitops", "1-2", &[]), Deletions::default());
    }
}
