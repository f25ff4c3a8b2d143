//! What a repository holds, and keys of inventories.

use bytes::Bytes;
use gitops::{
    ObjectId,
    decode::{File, Flaws, Limits, decode},
    glob::Glob,
    inventory::{key, parse_key},
};

/// Manifests: `bytes` is a file. What is decoded is within the limits and has an identity; an error has a
/// place in the file. Objects written as JSON are decoded to the same objects.
pub fn manifests(bytes: &[u8]) {
    let limits = Limits { file: 1 << 16, total: 1 << 17, objects: 100, depth: 16 };
    let file = |content: &[u8]| File { path: "m.yaml".into(), content: Bytes::copy_from_slice(content) };
    match decode("commit", &[file(bytes)], &limits) {
        Ok(set) => {
            assert!(set.objects().len() <= limits.objects);
            let mut json = Vec::new();
            for object in set.objects().iter().chain(set.template()) {
                assert!(!object.id.kind.is_empty() && !object.id.name.is_empty());
                assert!(depth(&object.body) <= limits.depth);
                assert_eq!(object.body["metadata"]["name"].as_str(), Some(&*object.id.name));
                json.extend(object.body.to_string().into_bytes());
                json.push(b'\n');
            }
            // Escapes make the text longer than the file was.
            let limits = Limits { file: 1 << 24, total: 1 << 24, ..limits };
            let again = decode("commit", &[file(&json)], &limits).unwrap_or_else(|flaws| panic!("{flaws}"));
            let bodies = |set: &gitops::Set| -> Vec<_> {
                set.objects().iter().chain(set.template()).map(|object| object.body.clone()).collect()
            };
            assert_eq!(bodies(&set), bodies(&again));
        }
        Err(Flaws(flaws)) => {
            assert!(!flaws.is_empty() && flaws.len() <= Flaws::MAX);
            assert!(flaws.iter().all(|flaw| flaw.line > 0 && !flaw.reason.is_empty()));
        }
    }
}

fn depth(value: &serde_json::Value) -> usize {
    match value {
        serde_json::Value::Array(list) => 1 + list.iter().map(depth).max().unwrap_or(0),
        serde_json::Value::Object(map) => 1 + map.values().map(depth).max().unwrap_or(0),
        _ => 0,
    }
}

/// A glob, and after the first line break a path. A glob without special characters matches itself.
pub fn globs(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    let (glob, path) = text.split_once('\n').unwrap_or((&text, "a/b.yaml"));
    let Ok(parsed) = Glob::parse(glob) else { return };
    let matched = parsed.matches(path);
    assert!(parsed.root() == "." || parsed.as_str().starts_with(parsed.root()));
    if matched == Ok(true) && parsed.root() != "." {
        assert!(path.starts_with(parsed.root()), "a match outside of its root");
    }
    if !parsed.as_str().contains(['\\', '*', '?', '[', '{']) && parsed.as_str().len() < 200 {
        assert_eq!(parsed.matches(parsed.as_str()), Ok(true));
    }
}

/// Keys of an inventory: what is read is written as the same key, and any object that has a key is read back
/// from it.
pub fn inventory_keys(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    if let Some(id) = parse_key(&text)
        && let Some(again) = key(&id)
    {
        assert_eq!(again, text);
    }
    let parts: Vec<&str> = text.split('|').collect();
    if let [group, kind, namespace, name] = parts[..] {
        let id = ObjectId::new(group, kind, namespace, name);
        if let Some(key) = key(&id) {
            assert!(key.len() <= 253);
            assert_eq!(parse_key(&key), Some(id));
        }
    }
}
