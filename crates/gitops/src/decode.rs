//! From files to objects: YAML and JSON, lists flattened, with limits.

mod json;
mod scalar;
#[cfg(test)]
mod tests;
mod yaml;

use std::{
    collections::{HashMap, HashSet},
    fmt,
    sync::Arc,
};

use bytes::Bytes;
use serde_json::{Map, Value};

use self::yaml::Document;
use crate::{
    marks::ID_LABEL,
    object::{Manifest, ObjectId, Set},
};

/// The most memory that the values of all files may take, in bytes, as it is estimated by [`Room::take`]. The
/// usual manifests of 20 MiB take that much.
const MAX_MEMORY: usize = 240 << 20;

/// What manifests of the usual form take for each byte of their files.
const MEMORY_PER_BYTE: usize = 12;

/// What a value, or the key of one, takes besides its text: its place in the list or mapping that holds it,
/// with the room that these keep for more.
const VALUE: usize = 100;

/// What a list and a mapping take in addition: they have room for four values from the beginning.
const LIST: usize = 200;
const MAPPING: usize = 300;

/// Lists inside lists.
const MAX_LISTS: usize = 4;

/// A file of a repository.
#[derive(Debug, Clone)]
pub struct File {
    /// Its path in the repository.
    pub path: Arc<str>,
    /// Its whole content.
    pub content: Bytes,
}

/// How much the files of a project may contain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of a file, with every alias replaced by its content.
    pub file: usize,
    /// Bytes of all files, likewise.
    pub total: usize,
    /// Objects of all files.
    pub objects: usize,
    /// Mappings and lists inside each other.
    pub depth: usize,
}

impl Default for Limits {
    /// 5 MiB, 20 MiB, 10,000 objects, 64 levels.
    fn default() -> Self {
        Self { file: 5 << 20, total: 20 << 20, objects: 10_000, depth: 64 }
    }
}

impl Limits {
    /// The most that [`Set::weight`] returns for a set within these limits, in bytes.
    pub fn weight(&self) -> usize {
        self.total.max(MAX_MEMORY / MEMORY_PER_BYTE)
    }
}

/// What is wrong in a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Flaw {
    /// The file.
    pub path: Arc<str>,
    /// The line, from 1.
    pub line: u32,
    /// What is wrong, in at most 300 characters. It never quotes the content of the file except keys, kinds
    /// and names.
    pub reason: String,
}

/// `path:line: reason`.
impl fmt::Display for Flaw {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.path, self.line, self.reason)
    }
}

/// Files that are not a set: nothing of them is applied or pruned. There is at least one flaw, and at most
/// [`Flaws::MAX`]; the last one then says how many more there are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Flaws(pub Vec<Flaw>);

impl Flaws {
    /// The number of flaws that are kept.
    pub const MAX: usize = 100;
}

/// The longest reason of a flaw, in characters: a key may have any length.
const LONGEST_REASON: usize = 300;

/// One flaw a line.
impl fmt::Display for Flaws {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, flaw) in self.0.iter().enumerate() {
            if at > 0 {
                f.write_str("\n")?;
            }
            flaw.fmt(f)?;
        }
        Ok(())
    }
}

impl std::error::Error for Flaws {}

/// Decodes all files of a commit. It takes CPU time in proportion to their size: up to a second for 20 MiB,
/// so it belongs on a thread of its own.
///
/// # Errors
/// Every flaw of every file.
pub fn decode(commit: &str, files: &[File], limits: &Limits) -> Result<Set, Flaws> {
    let mut found = Found::default();
    let mut room = Room { limits: *limits, file: 0, total: 0, memory: 0 };
    for file in files {
        found.path = file.path.clone();
        found.read(&file.content, &mut room);
    }
    if found.flaws.is_empty() {
        let weight = room.total.max(room.memory / MEMORY_PER_BYTE);
        Ok(Set { commit: commit.into(), objects: found.objects, template: found.template, weight })
    } else {
        let more = found.count - found.flaws.len();
        if more > 0
            && let Some(last) = found.flaws.last_mut()
        {
            last.reason = format!("{} (and {more} more errors)", last.reason);
        }
        Err(Flaws(found.flaws))
    }
}

/// What is left of the limits.
#[derive(Debug)]
struct Room {
    limits: Limits,
    /// Bytes of the present file.
    file: usize,
    total: usize,
    /// The estimated memory of all values, in bytes.
    memory: usize,
}

impl Room {
    /// Counts bytes.
    fn grow(&mut self, bytes: usize) -> Result<(), String> {
        self.file = self.file.saturating_add(bytes);
        self.total = self.total.saturating_add(bytes);
        if self.file > self.limits.file {
            Err(format!("the file is larger than {} bytes, its aliases expanded", self.limits.file))
        } else if self.total > self.limits.total {
            Err(format!("all files together are larger than {} bytes", self.limits.total))
        } else {
            Ok(())
        }
    }

    /// Counts memory: [`VALUE`] and the length of the text of each value and key, and [`LIST`] or
    /// [`MAPPING`].
    fn take(&mut self, memory: usize) -> Result<(), String> {
        self.memory = self.memory.saturating_add(memory);
        if self.memory > MAX_MEMORY {
            let mib = MAX_MEMORY >> 20;
            Err(format!(
                "the values of all files together, aliases expanded, take more than {mib} MiB of memory"
            ))
        } else {
            Ok(())
        }
    }

    fn deep(&self, depth: usize) -> Result<(), String> {
        if depth > self.limits.depth {
            Err(format!("more than {} mappings and lists inside each other", self.limits.depth))
        } else {
            Ok(())
        }
    }
}

/// What was found in the files so far.
#[derive(Default)]
struct Found {
    path: Arc<str>,
    objects: Vec<Manifest>,
    template: Option<Manifest>,
    places: HashMap<ObjectId, usize>,
    flaws: Vec<Flaw>,
    /// The number of flaws, of which only the first are kept.
    count: usize,
    /// One text for each kind and `apiVersion`, of which there are few.
    texts: HashSet<Arc<str>>,
}

impl Found {
    fn flaw(&mut self, line: u32, reason: impl Into<String>) {
        self.count += 1;
        if self.flaws.len() < Flaws::MAX {
            let mut reason = reason.into();
            if let Some((end, _)) = reason.char_indices().nth(LONGEST_REASON) {
                reason.truncate(end);
            }
            self.flaws.push(Flaw { path: self.path.clone(), line, reason });
        }
    }

    fn text(&mut self, text: &str) -> Arc<str> {
        if let Some(known) = self.texts.get(text) {
            return known.clone();
        }
        let new: Arc<str> = text.into();
        self.texts.insert(new.clone());
        new
    }

    fn read(&mut self, content: &[u8], room: &mut Room) {
        room.file = 0;
        if let Err(reason) = room.grow(content.len()) {
            return self.flaw(1, reason);
        }
        if content.starts_with(b"version https://git-lfs.github.com/spec/") {
            return self.flaw(1, "a pointer of Git LFS, not the file itself");
        }
        let text = match std::str::from_utf8(content) {
            Ok(text) => text.strip_prefix('\u{feff}').unwrap_or(text),
            Err(error) => {
                let before = content[..error.valid_up_to()].iter().filter(|byte| **byte == b'\n').count();
                let line = u32::try_from(before + 1).unwrap_or(u32::MAX);
                return self.flaw(line, "bytes that are not UTF-8");
            }
        };
        let (documents, wrong) = if text.trim_start().starts_with('{') {
            let (documents, wrong) = json::parse(text, room);
            match wrong {
                // A mapping in YAML may be written in braces, too.
                Some(wrong) if wrong.reason.starts_with("not valid JSON") => match yaml::parse(text, room) {
                    (documents, None) => (documents, None),
                    (_, Some(_)) => (documents, Some(wrong)),
                },
                wrong => (documents, wrong),
            }
        } else {
            yaml::parse(text, room)
        };
        for Document { value, line, items } in documents {
            self.add(value, line, &items, 0, room);
        }
        if let Some(wrong) = wrong {
            self.flaw(wrong.line, wrong.reason);
        }
    }

    fn add(&mut self, value: Value, line: u32, items: &[u32], lists: usize, room: &Room) {
        let mut body = match value {
            Value::Null => return,
            Value::Object(body) => body,
            _ => return self.flaw(line, "expected an object: a mapping with apiVersion and kind"),
        };
        let kind = body.get("kind").and_then(Value::as_str).unwrap_or_default();
        let is_list = kind.ends_with("List")
            && body.get("items").is_some_and(|items| items.is_array() || (items.is_null() && kind == "List"));
        if is_list {
            if lists == MAX_LISTS {
                return self.flaw(line, format!("more than {MAX_LISTS} lists inside each other"));
            }
            // `ConfigMapList` may have items that do not say again what they are.
            let inherited = kind.strip_suffix("List").filter(|kind| !kind.is_empty()).map(str::to_owned);
            let version = body.get("apiVersion").cloned();
            let Some(Value::Array(list)) = body.remove("items") else { return };
            for (at, mut item) in list.into_iter().enumerate() {
                if let (Some(kind), Some(version), Value::Object(item)) = (&inherited, &version, &mut item)
                    && !item.contains_key("kind")
                    && !item.contains_key("apiVersion")
                {
                    item.insert("apiVersion".to_owned(), version.clone());
                    item.insert("kind".to_owned(), Value::String(kind.clone()));
                }
                self.add(item, items.get(at).copied().unwrap_or(line), &[], lists + 1, room);
            }
            return;
        }
        match self.manifest(body, line) {
            Err(reason) => self.flaw(line, reason),
            Ok(manifest) if manifest.label(ID_LABEL).is_some() => self.template(manifest),
            Ok(manifest) => self.object(manifest, room),
        }
    }

    fn template(&mut self, manifest: Manifest) {
        let id = manifest.label(ID_LABEL).unwrap_or_default();
        if !manifest.id.is("", "ConfigMap") {
            let reason = format!(
                "the label {ID_LABEL} makes it an inventory, which must be a ConfigMap, not a {}",
                manifest.id.kind
            );
            self.flaw(manifest.line, reason);
        } else if !is_label_value(id) {
            let reason = format!(
                "the label {ID_LABEL} is not the id of an inventory: 1 to 63 letters, digits, `-`, `_` and `.`, \
                 which begins and ends with a letter or digit"
            );
            self.flaw(manifest.line, reason);
        } else if let Some(first) = &self.template {
            let reason =
                format!("a second inventory template: the first is at {}:{}", first.file, first.line);
            self.flaw(manifest.line, reason);
        } else {
            self.template = Some(manifest);
        }
    }

    fn object(&mut self, manifest: Manifest, room: &Room) {
        if let Some(first) = self.places.get(&manifest.id).and_then(|at| self.objects.get(*at)) {
            let reason = format!("{} twice: it is also at {}:{}", manifest.id, first.file, first.line);
            return self.flaw(manifest.line, reason);
        }
        if self.objects.len() == room.limits.objects {
            return self.flaw(manifest.line, format!("more than {} objects", room.limits.objects));
        }
        self.places.insert(manifest.id.clone(), self.objects.len());
        self.objects.push(manifest);
    }

    fn manifest(&mut self, body: Map<String, Value>, line: u32) -> Result<Manifest, String> {
        let api_version = text_of(&body, "apiVersion")?;
        let kind = text_of(&body, "kind")?;
        let group = match api_version.split_once('/') {
            None => "",
            Some((group, version)) if !group.is_empty() && is_word(version) => group,
            Some(_) => return Err(format!("apiVersion {api_version:?} is not `version` or `group/version`")),
        };
        if !is_word(api_version.rsplit('/').next().unwrap_or_default()) || !is_group(group) {
            return Err(format!("apiVersion {api_version:?} is not `version` or `group/version`"));
        }
        if !is_word(kind) {
            return Err(format!("kind {kind:?} is not a word of letters and digits"));
        }
        let metadata = match body.get("metadata") {
            Some(Value::Object(metadata)) => metadata,
            Some(_) => return Err("metadata must be a mapping".to_owned()),
            None => return Err(format!("{kind} without metadata")),
        };
        let name = match metadata.get("name") {
            Some(Value::String(name)) if !name.is_empty() => name.as_str(),
            None | Some(Value::Null | Value::String(_)) if metadata.contains_key("generateName") => {
                return Err("generateName would make a new object at each sync: give it a name".to_owned());
            }
            None | Some(Value::Null | Value::String(_)) => {
                return Err(format!("{kind} without metadata.name"));
            }
            Some(_) => return Err("metadata.name must be a text: quote it".to_owned()),
        };
        if !is_path_segment(name) {
            return Err(format!("metadata.name {name:?} is not a name"));
        }
        let namespace = match metadata.get("namespace") {
            None | Some(Value::Null) => "",
            Some(Value::String(namespace)) => namespace.as_str(),
            Some(_) => return Err("metadata.namespace must be a text: quote it".to_owned()),
        };
        if !namespace.is_empty() && !is_dns_label(namespace) {
            return Err(format!("metadata.namespace {namespace:?} is not the name of a namespace"));
        }
        for field in ["labels", "annotations"] {
            match metadata.get(field) {
                None | Some(Value::Null) => {}
                Some(Value::Object(entries)) => {
                    if let Some((key, _)) = entries.iter().find(|(_, value)| !value.is_string()) {
                        return Err(format!("metadata.{field}: {key} must be a text: quote it"));
                    }
                }
                Some(_) => return Err(format!("metadata.{field} must be a mapping")),
            }
        }
        let id = ObjectId {
            group: self.text(group),
            kind: self.text(kind),
            namespace: self.text(namespace),
            name: name.into(),
        };
        let api_version = self.text(api_version);
        let file = self.path.clone();
        Ok(Manifest { id, api_version, body: Value::Object(body), file, line })
    }
}

fn text_of<'a>(body: &'a Map<String, Value>, field: &str) -> Result<&'a str, String> {
    match body.get(field) {
        Some(Value::String(text)) if !text.is_empty() => Ok(text),
        None | Some(Value::Null | Value::String(_)) => {
            Err(format!("not a Kubernetes object: {field} is missing"))
        }
        Some(_) => Err(format!("{field} must be a text")),
    }
}

/// A version or a kind.
fn is_word(text: &str) -> bool {
    !text.is_empty() && text.len() <= 63 && text.bytes().all(|byte| byte.is_ascii_alphanumeric())
}

fn is_group(text: &str) -> bool {
    text.len() <= 253
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-'))
        && !text.split('.').any(|part| part.is_empty() && !text.is_empty())
}

/// As the API server's check of names of any kind.
fn is_path_segment(name: &str) -> bool {
    name.len() <= 253
        && !matches!(name, "." | "..")
        && !name.contains(['/', '%'])
        && !name.contains(char::is_control)
}

fn is_dns_label(text: &str) -> bool {
    let edge = |byte: Option<&u8>| byte.is_some_and(u8::is_ascii_alphanumeric);
    let bytes = text.as_bytes();
    text.len() <= 63
        && edge(bytes.first())
        && edge(bytes.last())
        && bytes.iter().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || *byte == b'-')
}

fn is_label_value(text: &str) -> bool {
    let edge = |byte: Option<&u8>| byte.is_some_and(u8::is_ascii_alphanumeric);
    let bytes = text.as_bytes();
    text.len() <= 63
        && edge(bytes.first())
        && edge(bytes.last())
        && bytes.iter().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.'))
}
