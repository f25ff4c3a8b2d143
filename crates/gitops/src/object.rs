//! Objects of a cluster: how they are identified, and manifests of them.

use std::{fmt, sync::Arc};

use serde_json::Value;

/// The identity of an object: group, kind, namespace and name. It has no version, because the API server
/// serves the same object in several.
///
/// The order is by group, kind, namespace, name.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ObjectId {
    /// The API group; empty for `v1`.
    pub group: Arc<str>,
    /// The kind, such as `Deployment`.
    pub kind: Arc<str>,
    /// The namespace; empty for an object of the cluster, or if a manifest names none.
    pub namespace: Arc<str>,
    /// The name.
    pub name: Arc<str>,
}

impl ObjectId {
    /// Returns an identity. Nothing is checked.
    pub fn new(group: &str, kind: &str, namespace: &str, name: &str) -> Self {
        Self { group: group.into(), kind: kind.into(), namespace: namespace.into(), name: name.into() }
    }

    /// Whether this is an object of the given group and kind.
    pub fn is(&self, group: &str, kind: &str) -> bool {
        &*self.group == group && &*self.kind == kind
    }
}

/// `Deployment.apps shop/web`, `Namespace shop`.
impl fmt::Display for ObjectId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.kind)?;
        if !self.group.is_empty() {
            write!(f, ".{}", self.group)?;
        }
        f.write_str(" ")?;
        if !self.namespace.is_empty() {
            write!(f, "{}/", self.namespace)?;
        }
        f.write_str(&self.name)
    }
}

/// One object of a file.
#[derive(Clone, PartialEq)]
pub struct Manifest {
    /// Its identity as the file says it: the namespace is empty if the file names none.
    pub id: ObjectId,
    /// The `apiVersion`, such as `apps/v1`.
    pub api_version: Arc<str>,
    /// The whole object: a mapping with `apiVersion`, `kind` and `metadata.name`.
    pub body: Value,
    /// The path of its file in the repository.
    pub file: Arc<str>,
    /// The line at which it begins in the file, from 1.
    pub line: u32,
}

impl Manifest {
    /// Returns an annotation; `None` if there is none, or it is not a text.
    pub fn annotation(&self, name: &str) -> Option<&str> {
        self.body["metadata"]["annotations"][name].as_str()
    }

    /// Returns a label; `None` if there is none, or it is not a text.
    pub fn label(&self, name: &str) -> Option<&str> {
        self.body["metadata"]["labels"][name].as_str()
    }
}

/// Without the body, which may be a Secret.
impl fmt::Debug for Manifest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({}:{})", self.id, self.file, self.line)
    }
}

/// Every object of a commit: the files of a manifest project, all of them read and decoded.
///
/// Only [`decode`](crate::decode::decode) makes one, and only if there was no error. So what is missing in a
/// set is missing in the repository, and may be pruned.
#[derive(Debug, Clone)]
pub struct Set {
    pub(crate) commit: Arc<str>,
    pub(crate) objects: Vec<Manifest>,
    pub(crate) template: Option<Manifest>,
    pub(crate) weight: usize,
}

impl Set {
    /// The commit, as [`Head::resolve`](crate::Head::resolve) returns it.
    pub fn commit(&self) -> &str {
        &self.commit
    }

    /// The objects in the order of the files, without inventory templates.
    pub fn objects(&self) -> &[Manifest] {
        &self.objects
    }

    /// How much the set counts as work, in bytes: the size of its files, their aliases expanded, or that of
    /// usual files which take as much memory. Short values take much more memory than their bytes.
    pub fn weight(&self) -> usize {
        self.weight
    }

    /// The inventory template: the object with the label of an inventory.
    pub fn template(&self) -> Option<&Manifest> {
        self.template.as_ref()
    }

    /// The id of the inventory that the set has a template of; `None`: the default inventory is used.
    pub fn inventory_id(&self) -> Option<&str> {
        self.template.as_ref()?.label(crate::marks::ID_LABEL)
    }
}
