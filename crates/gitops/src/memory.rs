//! What a planner keeps of a project between two syncs: some bytes per object, no contents.

use std::{
    collections::BTreeMap,
    hash::{DefaultHasher, Hash as _, Hasher as _},
};

use serde_json::Value;

use crate::{object::ObjectId, progress::Health};

/// What is known of the applied objects of a project. A new planner begins with an empty one.
#[derive(Debug, Clone, Default)]
pub struct Memory {
    pub(crate) objects: BTreeMap<ObjectId, Record>,
}

/// What is known of an object since it was applied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Record {
    /// What was applied: a hash of the body.
    pub(crate) body: u64,
    pub(crate) live: Live,
    pub(crate) health: Health,
}

/// What of an object in the cluster tells whether it was changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Live {
    pub(crate) uid: u128,
    /// A hash of labels and annotations.
    labels: u64,
    /// The generation; `None`: the kind has none.
    generation: Option<i64>,
    resource_version: u64,
}

impl Live {
    /// Reads the metadata of an object; `None` if it has no uid or no `resourceVersion`.
    pub(crate) fn read(object: &Value) -> Option<Self> {
        let metadata = &object["metadata"];
        let uid = uid(metadata["uid"].as_str().filter(|uid| !uid.is_empty())?);
        let resource_version = hash(metadata["resourceVersion"].as_str().filter(|text| !text.is_empty())?);
        let mut labels = DefaultHasher::new();
        for field in ["labels", "annotations"] {
            let mut entries: Vec<(&str, &str)> = metadata[field]
                .as_object()
                .into_iter()
                .flatten()
                .map(|(key, value)| (key.as_str(), value.as_str().unwrap_or_default()))
                .collect();
            entries.sort_unstable();
            entries.hash(&mut labels);
        }
        let generation = metadata["generation"].as_i64().filter(|generation| *generation > 0);
        Some(Self { uid, labels: labels.finish(), generation, resource_version })
    }

    /// Whether it is the same version of the same object.
    pub(crate) fn is_same_version(&self, other: &Self) -> bool {
        self.uid == other.uid && self.resource_version == other.resource_version
    }

    /// Whether somebody has changed it: another object, other labels, annotations, or another generation.
    /// A kind without generations is compared by its version, which its status changes too.
    pub(crate) fn differs(&self, now: &Self) -> bool {
        self.uid != now.uid
            || self.labels != now.labels
            || self.generation != now.generation
            || (self.generation.is_none() && self.resource_version != now.resource_version)
    }
}

/// The bits of a uid; a hash, if it is not one of the usual form.
pub(crate) fn uid(text: &str) -> u128 {
    let digits: String = text.chars().filter(|c| *c != '-').collect();
    match u128::from_str_radix(&digits, 16) {
        Ok(bits) if digits.len() == 32 => bits,
        _ => u128::from(hash(text)),
    }
}

/// A hash within this process; it is never kept elsewhere.
pub(crate) fn hash<T: std::hash::Hash + ?Sized>(value: &T) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

impl Memory {
    /// The number of objects.
    pub fn len(&self) -> usize {
        self.objects.len()
    }

    /// Whether nothing was applied yet.
    pub fn is_empty(&self) -> bool {
        self.objects.is_empty()
    }

    /// The objects and whether they are current, in the order of their identities.
    pub fn objects(&self) -> impl Iterator<Item = (&ObjectId, Health)> {
        self.objects.iter().map(|(id, record)| (id, record.health))
    }
}
