//! What differs in the cluster from what was applied.

use std::collections::BTreeSet;

use crate::object::ObjectId;

/// The result of a check.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Drift {
    /// The objects that differ or are gone: a sync must apply them again.
    pub differ: BTreeSet<ObjectId>,
    /// How many objects were compared.
    pub checked: usize,
    /// Objects that could not be compared, with the reason for people.
    pub unknown: Vec<(ObjectId, String)>,
    /// The applied objects that are not current now.
    pub degraded: usize,
}
