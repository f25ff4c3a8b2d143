//! What a planner keeps of a project between two syncs: some bytes per object, no contents.

use std::collections::BTreeMap;

use crate::{object::ObjectId, progress::Health};

/// What is known of the applied objects of a project. A new planner begins with an empty one.
#[derive(Debug, Clone, Default)]
pub struct Memory {
    pub(crate) objects: BTreeMap<ObjectId, Record>,
}

/// What is known of an object since it was applied.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) health: Health,
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
