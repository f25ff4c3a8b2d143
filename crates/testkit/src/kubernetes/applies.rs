//! Checks what planners have applied, by nothing but the audit log of the API server and the commits of the
//! repository:
//!
//! - What a planner applies is of a commit that was the head after the planner had read the inventory.
//! - It has written its fence into the inventory since, and that was not refused.
//! - While another planner has applied a newer commit, an older one is applied only by a planner that wrote
//!   its fence within the time after which it must write it again.
//!
//! Objects of the commits tell their commit by the annotation [`COMMIT`].

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::deletions::{Event, HeadSpan, INVENTORY, events};

/// The annotation of an object with the number of its commit, which is its place in the list of heads.
pub const COMMIT: &str = "test/commit";

/// How often a planner writes its fence again while it applies, in microseconds.
const FENCE: i128 = 10_000_000;
/// For how long after that, or after a refusal, what a planner has sent before may arrive.
const ON_ITS_WAY: i128 = 5_000_000;

/// What was applied, and what is wrong with that.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Applies {
    /// How many objects planners have applied.
    pub applied: usize,
    /// The commits that each planner has applied something of.
    pub by: BTreeMap<String, BTreeSet<usize>>,
    /// How often the API server refused a write of the inventory because another planner had written it.
    pub refused: usize,
    /// For each apply of an older commit that the fence allowed: how long after the first apply of a newer
    /// one by another planner it came, in microseconds.
    pub stale: Vec<i128>,
    /// What breaks the rules.
    pub violations: Vec<String>,
}

/// A planner.
#[derive(Debug, Default)]
struct Planner {
    /// When it last asked for the inventory.
    read: Option<i128>,
    /// When its fence was last written since then.
    wrote: Option<i128>,
    /// When a write was refused since then.
    refused: Option<i128>,
    /// The commits that it has applied something of, and when that was done first.
    commits: BTreeMap<usize, i128>,
}

/// Checks every server-side apply by a client whose `User-Agent` begins with `planner`, such as
/// `kas/gitops`. What follows, up to a space, tells planners apart. `log` has one event a line, as the API
/// server writes it; `id` is that of the inventory.
pub fn check(log: &str, planner: &str, id: &str, heads: &[HeadSpan]) -> Applies {
    let mut events = events(log);
    // A planner sends the next step when it has the answer to the one before.
    events.sort_by_key(|(received, ..)| *received);
    let mut planners: BTreeMap<String, Planner> = BTreeMap::new();
    let mut inventories: BTreeSet<String> = BTreeSet::new();
    let mut result = Applies::default();
    for (received, done, event) in &events {
        let Some(object) = &event.object_ref else { continue };
        let who = event.who();
        if !who.starts_with(planner) || event.is_dry() || !object.subresource.is_empty() {
            continue;
        }
        let is_done = (200..300).contains(&event.code());
        let metadata = &event.response_object["metadata"];
        let it = planners.entry(who.to_owned()).or_default();
        if object.resource == "configmaps" && metadata["labels"][INVENTORY] == id {
            inventories.insert(metadata["name"].as_str().unwrap_or_default().to_owned());
        }
        let is_inventory = object.resource == "configmaps" && inventories.contains(&object.name);
        match event.verb.as_str() {
            "list" if is_done && event.request_uri.contains(&format!("%3D{id}")) => {
                (it.read, it.wrote, it.refused) = (Some(*received), None, None);
            }
            "create" | "patch" | "update" if metadata["labels"][INVENTORY] == id && is_done => {
                it.wrote = Some(*done);
            }
            "patch" | "update" if is_inventory && matches!(event.code(), 404 | 409) => {
                result.refused += 1;
                it.refused = Some(*done);
            }
            "patch" if is_done => {
                let Some(commit) = commit(event) else { continue };
                result.applied += 1;
                let judged = judge(&planners, who, commit, heads, *received);
                match judged {
                    Ok(stale) => result.stale.extend(stale),
                    Err(why) => result.violations.push(format!(
                        "{} {}/{} of commit {commit} applied by {who}: {why}",
                        object.resource, object.namespace, object.name
                    )),
                }
                if let Some(it) = planners.get_mut(who) {
                    it.commits.entry(commit).or_insert(*done);
                }
            }
            _ => {}
        }
    }
    let by = planners.into_iter().filter(|(_, it)| !it.commits.is_empty());
    result.by = by.map(|(who, it)| (who, it.commits.into_keys().collect())).collect();
    result
}

/// Returns the number of the commit of an object that was applied; `None`: it tells none.
fn commit(event: &Event) -> Option<usize> {
    let value: &Value = &event.response_object["metadata"]["annotations"][COMMIT];
    value.as_str()?.parse().ok()
}

/// Judges an apply. If it is lawful although another planner has applied a newer commit, returns how long ago
/// that was.
fn judge(
    planners: &BTreeMap<String, Planner>,
    who: &str,
    commit: usize,
    heads: &[HeadSpan],
    at: i128,
) -> Result<Option<i128>, String> {
    let it = planners.get(who).ok_or("it has done nothing before")?;
    let head = heads.get(commit).ok_or("there is no such commit")?;
    let read = it.read.ok_or("it has not read the inventory before")?;
    if head.until < read {
        let late = (read - head.until) / 1_000;
        return Err(format!("it was the head until {late} ms before the inventory was read"));
    }
    let wrote = it.wrote.ok_or("it has not written its fence since it read the inventory")?;
    if let Some(refused) = it.refused.filter(|refused| at > refused + ON_ITS_WAY) {
        let late = (at - refused) / 1_000;
        return Err(format!("a write of the inventory was refused {late} ms before"));
    }
    let others = planners.iter().filter(|(other, _)| other.as_str() != who);
    let newer = others.flat_map(|(_, other)| other.commits.range(commit + 1..).map(|(_, done)| *done));
    let Some(newer) = newer.filter(|done| *done < at).min() else { return Ok(None) };
    if at > wrote + FENCE + ON_ITS_WAY {
        let late = (at - wrote) / 1_000;
        return Err(format!("another planner has applied a newer one, and its fence is {late} ms old"));
    }
    Ok(Some(at - newer))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn event(who: &str, ms: u32, verb: &str, name: &str, code: u16, response: &Value) -> String {
        let time = format!("2026-01-01T00:00:{:02}.{:03}000Z", ms / 1_000, ms % 1_000);
        let uri = if verb == "list" { "/x?labelSelector=id%3D1-2" } else { "/x" };
        json!({
            "stage": "ResponseComplete",
            "verb": verb,
            "userAgent": format!("kas/gitops:{who} via agentk/v1"),
            "requestURI": uri,
            "objectRef": { "resource": "configmaps", "namespace": "shop", "name": name, "apiVersion": "v1" },
            "responseStatus": { "code": code },
            "responseObject": response,
            "requestReceivedTimestamp": time,
            "stageTimestamp": time,
        })
        .to_string()
    }

    fn read(who: &str, ms: u32) -> String {
        event(who, ms, "list", "", 200, &json!({ "kind": "ConfigMapList", "items": [] }))
    }

    fn fence(who: &str, ms: u32, code: u16) -> String {
        let labels = json!({ INVENTORY: "1-2" });
        let response = match code {
            200 => json!({ "kind": "ConfigMap", "metadata": { "name": "inv", "labels": labels } }),
            _ => json!({ "kind": "Status" }),
        };
        event(who, ms, "patch", "inv", code, &response)
    }

    fn apply(who: &str, ms: u32, commit: &str) -> String {
        let object = json!({ "kind": "ConfigMap", "metadata": { "annotations": { COMMIT: commit } } });
        event(who, ms, "patch", "x", 200, &object)
    }

    /// Commit 0 is the head until 10 s, commit 1 after that.
    fn checked(log: &[String]) -> Applies {
        let start = 1_767_225_600_000_000;
        let head = |from: i128, until: i128| HeadSpan {
            from: start + from * 1_000_000,
            until: start + until * 1_000_000,
            objects: BTreeSet::new(),
        };
        check(&log.join("\n"), "kas/gitops", "1-2", &[head(0, 10), head(10, 3_600)])
    }

    fn broken(log: &[String], why: &str) {
        let found = checked(log);
        assert_eq!(found.violations.len(), 1, "{found:?}");
        assert!(found.violations[0].contains(why), "{found:?}");
    }

    #[test]
    fn a_planner_that_reads_writes_its_fence_and_applies_is_lawful() {
        let log = [read("a", 1_000), fence("a", 1_100, 200), apply("a", 1_200, "0")];
        let found = checked(&log);
        assert_eq!((found.applied, found.violations.len(), found.stale.len()), (1, 0, 0), "{found:?}");
        assert_eq!(found.by, BTreeMap::from([("kas/gitops:a".to_owned(), BTreeSet::from([0]))]));
    }

    #[test]
    fn an_old_commit_is_applied_only_within_the_time_of_the_fence() {
        let log = |late: u32| {
            [
                read("a", 9_000),
                fence("a", 9_100, 200),
                apply("a", 9_200, "0"),
                read("b", 11_000),
                fence("b", 11_100, 200),
                apply("b", 11_200, "1"),
                apply("a", late, "0"),
            ]
        };
        let found = checked(&log(12_200));
        assert_eq!((found.violations.len(), found.stale), (0, vec![1_000_000]));
        broken(&log(25_000), "its fence is 15900 ms old");
    }

    #[test]
    fn a_planner_whose_fence_was_refused_is_found() {
        let log = |late: u32| {
            [
                read("a", 9_000),
                fence("a", 9_100, 200),
                read("b", 9_200),
                fence("b", 9_300, 200),
                fence("a", 9_400, 409),
                apply("a", late, "0"),
            ]
        };
        assert_eq!(checked(&log(9_500)).violations, Vec::<String>::new());
        broken(&log(14_500), "was refused 5100 ms before");
        assert_eq!(checked(&log(9_500)).refused, 1);
    }

    #[test]
    fn a_planner_without_a_fence_or_with_an_earlier_head_is_found() {
        broken(&[apply("a", 1_000, "0")], "not read the inventory");
        broken(&[read("a", 1_000), apply("a", 1_100, "0")], "not written its fence");
        broken(&[read("a", 10_500), fence("a", 10_600, 200), apply("a", 10_700, "0")], "until 500 ms before");
        broken(&[read("a", 1_000), fence("a", 1_100, 200), apply("a", 1_200, "7")], "no such commit");
    }

    #[test]
    fn others_do_not_count() {
        let log = [apply("a", 1_000, "0").replace("kas/gitops:a", "kubectl")];
        assert_eq!(checked(&log), Applies::default());
    }
}
