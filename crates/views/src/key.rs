//! [`Key`]: the name of a row.

use std::fmt;

use arcstr::ArcStr;

use crate::memory::allocated;

/// What a key takes beside its text: a count of its users, and its length.
const HEAD: usize = 2 * size_of::<usize>();

/// Names a row of a [`Store`](crate::Store): a namespace and a name. Clones share their memory. The order is
/// that in which an API server lists objects.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key(ArcStr);

impl Key {
    /// Makes a key. `namespace` is empty if the object has none, and has no slash:
    /// [`table`](crate::table) refuses others.
    pub fn new(namespace: &str, name: &str) -> Self {
        Self(arcstr::format!("{namespace}/{name}"))
    }

    /// Returns the namespace; empty: the object has none.
    pub fn namespace(&self) -> &str {
        self.parts().0
    }

    /// Returns the name of the object.
    pub fn name(&self) -> &str {
        self.parts().1
    }

    /// Returns the bytes that it takes, without those that point to it.
    pub(crate) fn bytes(&self) -> usize {
        allocated(HEAD + self.0.len())
    }

    fn parts(&self) -> (&str, &str) {
        self.0.split_once('/').unwrap_or_default()
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
