//! The text of a difference: YAML with sorted keys, as a unified diff. Of a Secret only the names of keys.

use std::{collections::BTreeMap, fmt::Write as _};

use serde_json::Value;
use similar::TextDiff;

use crate::object::ObjectId;

/// What the API server sets, and what says nothing about a change.
const IGNORED: [&str; 6] =
    ["managedFields", "resourceVersion", "generation", "uid", "creationTimestamp", "selfLink"];

/// kubectl's copy of the whole object.
const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";

/// Lines around a change.
const CONTEXT: usize = 3;

/// The longest diff of an object, in bytes: CRDs have a megabyte. The rest is left out, and that is said.
const MAX_BYTES: usize = 256 << 10;

fn cleaned(object: &Value) -> Value {
    let mut object = object.clone();
    if let Some(object) = object.as_object_mut() {
        object.shift_remove("status");
    }
    if let Some(metadata) = object.get_mut("metadata").and_then(Value::as_object_mut) {
        for field in IGNORED {
            metadata.shift_remove(field);
        }
    }
    object
}

/// Whether two versions of an object are the same but for what the API server sets.
pub(super) fn is_same(before: &Value, after: &Value) -> bool {
    cleaned(before) == cleaned(after)
}

/// Returns the difference of two versions of an object.
pub(super) fn diff(id: &ObjectId, before: Option<&Value>, after: Option<&Value>) -> String {
    if id.is("", "Secret") {
        return keys_diff(before, after);
    }
    let yaml = |object: Option<&Value>| object.map(|object| yaml(&cleaned(object))).unwrap_or_default();
    let (before, after) = (yaml(before), yaml(after));
    // A diff of two large objects that have nothing in common takes long; the result is then coarser.
    let diff =
        TextDiff::configure().timeout(std::time::Duration::from_millis(500)).diff_lines(&before, &after);
    let name = id.to_string().replace(' ', "/");
    let text = diff
        .unified_diff()
        .context_radius(CONTEXT)
        .header(&format!("a/{name}"), &format!("b/{name}"))
        .to_string();
    match text.char_indices().find(|(at, _)| *at >= MAX_BYTES) {
        Some((at, _)) => format!("{}\n(the rest of the diff is left out)\n", &text[..at]),
        None => text,
    }
}

/// The names of keys that change: `+ data.token`, `- data.old`, `~ metadata.labels.app`.
fn keys_diff(before: Option<&Value>, after: Option<&Value>) -> String {
    let (before, after) = (keys(before), keys(after));
    let mut text = String::new();
    for (key, value) in &before {
        match after.get(key) {
            None => {
                let _ = writeln!(text, "- {key}");
            }
            Some(new) if new != value => {
                let _ = writeln!(text, "~ {key}");
            }
            Some(_) => {}
        }
    }
    for key in after.keys().filter(|key| !before.contains_key(*key)) {
        let _ = writeln!(text, "+ {key}");
    }
    text
}

fn keys(object: Option<&Value>) -> BTreeMap<String, Value> {
    let mut keys = BTreeMap::new();
    let Some(Value::Object(object)) = object.map(cleaned) else { return keys };
    for (field, value) in object {
        match (field.as_str(), value) {
            ("metadata", Value::Object(metadata)) => {
                for (name, value) in metadata {
                    match value {
                        Value::Object(entries) => {
                            for (key, value) in entries {
                                if key != LAST_APPLIED {
                                    keys.insert(format!("metadata.{name}.{key}"), value);
                                }
                            }
                        }
                        value => {
                            keys.insert(format!("metadata.{name}"), value);
                        }
                    }
                }
            }
            (_, Value::Object(entries)) => {
                for (key, value) in entries {
                    keys.insert(format!("{field}.{key}"), value);
                }
            }
            (_, value) => {
                keys.insert(field, value);
            }
        }
    }
    keys
}

/// YAML with sorted keys. A text of several lines is a block, so that its lines are compared.
fn yaml(value: &Value) -> String {
    let mut text = String::new();
    write_value(&mut text, value, 0);
    text
}

/// Writes a value that begins on a line of its own, indented by `indent` spaces.
fn write_value(text: &mut String, value: &Value, indent: usize) {
    match value {
        Value::Object(map) if !map.is_empty() => {
            let mut entries: Vec<_> = map.iter().collect();
            entries.sort_unstable_by_key(|(key, _)| *key);
            for (key, value) in entries {
                let _ = write!(text, "{:indent$}{}:", "", scalar(key));
                write_after(text, value, indent, false);
            }
        }
        Value::Array(list) if !list.is_empty() => {
            for value in list {
                let _ = write!(text, "{:indent$}-", "");
                write_after(text, value, indent, true);
            }
        }
        value => {
            let _ = writeln!(text, "{:indent$}{}", "", inline(value));
        }
    }
}

/// Writes a value after its key or dash.
fn write_after(text: &mut String, value: &Value, indent: usize, in_list: bool) {
    match value {
        Value::Object(map) if !map.is_empty() && in_list => {
            // The first key is on the line of the dash.
            let mut inner = String::new();
            write_value(&mut inner, value, indent + 2);
            let _ = write!(text, " {}", inner.trim_start_matches(' '));
        }
        Value::Object(map) if !map.is_empty() => {
            text.push('\n');
            write_value(text, value, indent + 2);
        }
        Value::Array(list) if !list.is_empty() => {
            text.push('\n');
            write_value(text, value, if in_list { indent + 2 } else { indent });
        }
        Value::String(string) if is_block(string) => {
            text.push_str(if string.ends_with('\n') { " |\n" } else { " |-\n" });
            let indent = indent + 2;
            for line in string.strip_suffix('\n').unwrap_or(string).split('\n') {
                if line.is_empty() {
                    text.push('\n');
                } else {
                    let _ = writeln!(text, "{:indent$}{line}", "");
                }
            }
        }
        value => {
            let _ = writeln!(text, " {}", inline(value));
        }
    }
}

/// Whether a text is written as a block.
fn is_block(text: &str) -> bool {
    text.trim_end_matches('\n').contains('\n')
        && !text.ends_with("\n\n")
        && !text.starts_with([' ', '\n', '\t'])
        && !text.chars().any(|c| c.is_control() && c != '\n' && c != '\t')
}

fn inline(value: &Value) -> String {
    match value {
        Value::String(text) => scalar(text),
        value => value.to_string(),
    }
}

/// A text, in quotes unless it surely is read as itself.
fn scalar(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | '/');
    let begins = text.starts_with(|c: char| c.is_ascii_alphabetic() || c == '/');
    let is_word = matches!(
        text.to_ascii_lowercase().as_str(),
        "y" | "n" | "yes" | "no" | "on" | "off" | "true" | "false" | "null"
    );
    if begins && !is_word && text.chars().all(plain) {
        text.to_owned()
    } else {
        Value::from(text).to_string()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn yaml_has_sorted_keys_and_blocks() {
        let value = json!({
            "b": { "x": "yes", "y": "0644", "e": {}, "l": [] },
            "a": [{ "n": 1, "m": true }, "text", [1, 2], null],
            "c": "one\ntwo\n\nthree\n",
            "d": "one\ntwo",
            "e": "a: b",
        });
        assert_eq!(
            yaml(&value),
            "a:\n- m: true\n  n: 1\n- text\n-\n  - 1\n  - 2\n- null\nb:\n  e: {}\n  l: []\n  x: \"yes\"\n  y: \"0644\"\n\
             c: |\n  one\n  two\n\n  three\nd: |-\n  one\n  two\ne: \"a: b\"\n"
        );
    }

    #[test]
    fn a_secret_shows_only_the_names_of_keys() {
        let secret = |data: Value| {
            json!({ "kind": "Secret", "metadata": {
                "annotations": { LAST_APPLIED: "hunter2", "x": "hunter2" }, "resourceVersion": "1",
            }, "data": data })
        };
        let id = ObjectId::new("", "Secret", "a", "b");
        let (before, after) = (
            secret(json!({ "a": "hunter2", "b": "hunter2", "c": "hunter2" })),
            secret(json!({ "b": "hunter3", "c": "hunter2", "d": "hunter2" })),
        );
        assert_eq!(diff(&id, Some(&before), Some(&after)), "- data.a\n~ data.b\n+ data.d\n");
        let all = diff(&id, None, Some(&after));
        assert_eq!(all, "+ data.b\n+ data.c\n+ data.d\n+ kind\n+ metadata.annotations.x\n");
        assert!(!diff(&id, Some(&before), None).contains("hunter"));
    }

    #[test]
    fn what_the_server_sets_is_no_difference() {
        let before = json!({ "metadata": { "name": "a", "resourceVersion": "1", "generation": 1, "uid": "u" }, "status": 1 });
        let mut after = json!({ "metadata": { "name": "a", "resourceVersion": "2", "managedFields": [] } });
        assert!(is_same(&before, &after));
        after["metadata"]["name"] = json!("b");
        let id = ObjectId::new("apps", "Deployment", "n", "a");
        assert_eq!(
            diff(&id, Some(&before), Some(&after)),
            "--- a/Deployment.apps/n/a\n+++ b/Deployment.apps/n/a\n@@ -1,2 +1,2 @@\n metadata:\n-  name: a\n+  name: b\n"
        );
    }

    #[test]
    fn a_long_diff_is_cut() {
        let long = json!({ "data": (0..40_000).map(|at| format!("line {at}")).collect::<Vec<_>>() });
        let text = diff(&ObjectId::new("", "A", "", "b"), None, Some(&long));
        assert!(text.len() < MAX_BYTES + 100 && text.ends_with("(the rest of the diff is left out)\n"));
    }
}
