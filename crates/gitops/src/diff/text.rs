//! The text of a difference: YAML with sorted keys, as a unified diff. Of a Secret only the names of keys.

use std::{borrow::Cow, collections::BTreeMap, fmt::Write as _};

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

/// The longest YAML of an object that is compared, in bytes. What is deep inside has far more bytes of YAML
/// than of JSON.
const MAX_YAML: usize = 2 << 20;

/// What a diff ends with that was cut.
const LEFT_OUT: &str = "(the rest of the diff is left out)\n";

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
    let ((before, before_is_cut), (after, after_is_cut)) = (yaml(before), yaml(after));
    // A diff of two large objects that have nothing in common takes long; the result is then coarser.
    let diff =
        TextDiff::configure().timeout(std::time::Duration::from_millis(500)).diff_lines(&before, &after);
    let name = id.to_string().replace(' ', "/");
    let text = diff
        .unified_diff()
        .context_radius(CONTEXT)
        .header(&format!("a/{name}"), &format!("b/{name}"))
        .to_string();
    cut(text, before_is_cut || after_is_cut)
}

/// Cuts a diff that is too long, and says so. `is_cut`: something is missing already.
fn cut(mut text: String, is_cut: bool) -> String {
    if text.len() > MAX_BYTES {
        let end = (0..=MAX_BYTES).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
        text.truncate(end);
    } else if !is_cut {
        return text;
    }
    if !text.is_empty() && !text.ends_with('\n') {
        text.push('\n');
    }
    text.push_str(LEFT_OUT);
    text
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
    cut(text, false)
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

/// YAML with sorted keys, and whether it was cut at [`MAX_YAML`]. A text of several lines is a block, so that
/// its lines are compared.
fn yaml(value: &Value) -> (String, bool) {
    let mut out = Yaml::default();
    out.value(value, 0, false);
    (out.text, out.is_full)
}

/// Lines of YAML that end at [`MAX_YAML`].
#[derive(Default)]
struct Yaml {
    text: String,
    is_full: bool,
}

impl Yaml {
    /// Writes a line, or what is missing of one that was begun: `begin` spaces, its parts and, if it is
    /// complete, the end of the line.
    fn put(&mut self, begin: usize, parts: &[&str], is_complete: bool) {
        let new = parts.iter().fold(begin + 1, |sum, part| sum + part.len());
        self.is_full |= self.text.len() + new > MAX_YAML;
        if self.is_full {
            return;
        }
        let _ = write!(self.text, "{:begin$}", "");
        for part in parts {
            self.text.push_str(part);
        }
        if is_complete {
            self.text.push('\n');
        }
    }

    /// Writes a value that begins on a line of its own, indented by `indent` spaces. `begun`: its first line
    /// is begun already.
    fn value(&mut self, value: &Value, indent: usize, begun: bool) {
        let mut begin = if begun { 0 } else { indent };
        match value {
            Value::Object(map) if !map.is_empty() => {
                let mut entries: Vec<_> = map.iter().collect();
                entries.sort_unstable_by_key(|(key, _)| *key);
                for (key, value) in entries {
                    if self.is_full {
                        return;
                    }
                    self.put(begin, &[&scalar(key), ":"], false);
                    self.after(value, indent, false);
                    begin = indent;
                }
            }
            Value::Array(list) if !list.is_empty() => {
                for value in list {
                    if self.is_full {
                        return;
                    }
                    self.put(begin, &["-"], false);
                    self.after(value, indent, true);
                    begin = indent;
                }
            }
            value => self.put(begin, &[&inline(value)], true),
        }
    }

    /// Writes a value after its key or dash.
    fn after(&mut self, value: &Value, indent: usize, in_list: bool) {
        match value {
            Value::Object(map) if !map.is_empty() && in_list => {
                // The first key is on the line of the dash.
                self.put(1, &[], false);
                self.value(value, indent + 2, true);
            }
            Value::Object(map) if !map.is_empty() => {
                self.put(0, &[], true);
                self.value(value, indent + 2, false);
            }
            Value::Array(list) if !list.is_empty() => {
                self.put(0, &[], true);
                self.value(value, if in_list { indent + 2 } else { indent }, false);
            }
            Value::String(string) if is_block(string) => {
                self.put(1, &[if string.ends_with('\n') { "|" } else { "|-" }], true);
                for line in string.strip_suffix('\n').unwrap_or(string).split('\n') {
                    self.put(if line.is_empty() { 0 } else { indent + 2 }, &[line], true);
                }
            }
            value => self.put(1, &[&inline(value)], true),
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

fn inline(value: &Value) -> Cow<'_, str> {
    match value {
        Value::String(text) => scalar(text),
        value => value.to_string().into(),
    }
}

/// A text, in quotes unless it surely is read as itself.
fn scalar(text: &str) -> Cow<'_, str> {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | '/');
    let begins = text.starts_with(|c: char| c.is_ascii_alphabetic() || c == '/');
    let is_word = matches!(
        text.to_ascii_lowercase().as_str(),
        "y" | "n" | "yes" | "no" | "on" | "off" | "true" | "false" | "null"
    );
    if begins && !is_word && text.chars().all(plain) {
        text.into()
    } else {
        Value::from(text).to_string().into()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn yaml_has_sorted_keys_and_blocks() {
        let value = json!({
            "b": { "x": "yes", "z": "0644", "e": {}, "l": [] },
            "a": [{ "o": 1, "m": true }, "text", [1, 2], null],
            "c": "one\ntwo\n\nthree\n",
            "d": "one\ntwo",
            "e": "a: b",
        });
        assert_eq!(
            yaml(&value).0,
            "a:\n- m: true\n  o: 1\n- text\n-\n  - 1\n  - 2\n- null\nb:\n  e: {}\n  l: []\n  x: \"yes\"\n  z: \"0644\"\n\
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

    #[test]
    fn the_yaml_of_a_deep_object_ends() {
        // As JSON it has half a megabyte, and each of its lines would begin with 120 spaces.
        let mut deep = Value::from(vec![0; 250_000]);
        for _ in 0..60 {
            deep = Value::from(vec![deep]);
        }
        let object = json!({ "data": deep });
        let (text, is_cut) = yaml(&object);
        assert!(is_cut && text.len() <= MAX_YAML, "{}", text.len());
        let long = json!({ "data": "x".repeat(MAX_YAML) });
        assert_eq!(yaml(&long), ("data:".to_owned(), true));
        let id = ObjectId::new("", "A", "", "b");
        assert!(diff(&id, None, Some(&object)).len() < MAX_BYTES + 100);
        // A difference that is not compared is not said to be none.
        assert_eq!(diff(&id, Some(&long), Some(&long)), LEFT_OUT);
        let secret = json!({ "data": (0..40_000).map(|at| (format!("key{at}"), json!(""))).collect::<serde_json::Map<_, _>>() });
        let text = diff(&ObjectId::new("", "Secret", "a", "b"), None, Some(&secret));
        assert!(text.len() < MAX_BYTES + 100 && text.ends_with(LEFT_OUT));
    }
}
