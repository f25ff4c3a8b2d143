//! Paths of objects at the API server.

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};

use crate::object::ObjectId;

/// The path of an object and of those of its kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Path {
    /// `/apis/apps/v1/namespaces/shop/deployments`.
    pub(crate) collection: String,
    /// The same with `/web`.
    pub(crate) object: String,
}

/// Everything but what a path segment may contain.
const SEGMENT: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

/// Escapes a segment of a path, or a value of a query.
pub(crate) fn segment(text: &str) -> String {
    utf8_percent_encode(text, SEGMENT).to_string()
}

impl Path {
    pub(crate) fn new(id: &ObjectId, version: &str, plural: &str) -> Self {
        let mut collection = if id.group.is_empty() {
            format!("/api/{}", segment(version))
        } else {
            format!("/apis/{}/{}", segment(&id.group), segment(version))
        };
        if !id.namespace.is_empty() {
            collection.push_str("/namespaces/");
            collection.push_str(&segment(&id.namespace));
        }
        collection.push('/');
        collection.push_str(&segment(plural));
        let object = format!("{collection}/{}", segment(&id.name));
        Self { collection, object }
    }
}
