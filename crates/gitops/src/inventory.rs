//! The inventory: a ConfigMap in the cluster that lists the objects that were applied, in the form of
//! cli-utils. Each object is a key; values are empty.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

use crate::{
    marks::ID_LABEL,
    object::{Manifest, ObjectId},
    path::segment,
    progress::InventoryRef,
    project::Project,
};

/// The annotation of an inventory with the commit that is completely applied.
pub(crate) const COMMIT: &str = "kas/commit";

/// The annotation of an inventory that every write changes: it makes the `resourceVersion` move, so that a
/// second planner's next write fails.
pub(crate) const FENCE: &str = "kas/fence";

/// The annotation of an inventory that says which project writes it, as `<agent>-<project>`. Two projects
/// whose templates have the same id would delete each other's objects.
pub(crate) const PROJECT: &str = "kas/project";

/// The longest inventory, in bytes. An object of etcd has at most 1.5 MiB, and a ConfigMap 1 MiB of data.
pub(crate) const MAX_BYTES: usize = 900 << 10;

/// The longest key of a ConfigMap.
const MAX_KEY: usize = 253;

/// Stands for `:`, which no key may contain, in names of these kinds.
const COLON: &str = "__";

const RBAC: &str = "rbac.authorization.k8s.io";

fn is_rbac(id: &ObjectId) -> bool {
    *id.group == *RBAC && matches!(&*id.kind, "Role" | "RoleBinding" | "ClusterRole" | "ClusterRoleBinding")
}

/// Returns the key of an object; `None` if no key can hold its name.
pub fn key(id: &ObjectId) -> Option<String> {
    let name = if is_rbac(id) { id.name.replace(':', COLON) } else { id.name.as_ref().to_owned() };
    let key = format!("{}_{name}_{}_{}", id.namespace, id.group, id.kind);
    let is_key = key.len() <= MAX_KEY
        && key.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.'));
    (is_key && parse_key(&key).as_ref() == Some(id)).then_some(key)
}

/// Returns the object of a key; `None` if it is none of ours.
pub fn parse_key(key: &str) -> Option<ObjectId> {
    let (namespace, rest) = key.split_once('_')?;
    let (rest, kind) = rest.rsplit_once('_')?;
    let (name, group) = rest.rsplit_once('_')?;
    let word = |text: &str| text.bytes().all(|byte| byte.is_ascii_alphanumeric());
    let part =
        |text: &str| text.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.'));
    let fits = !name.is_empty()
        && !matches!(name, "." | "..")
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.'))
        && !kind.is_empty()
        && word(kind)
        && part(namespace)
        && part(group);
    if !fits {
        return None;
    }
    let id = ObjectId::new(group, kind, namespace, name);
    if !name.contains(COLON) {
        Some(id)
    } else if is_rbac(&id) {
        Some(ObjectId { name: name.replace(COLON, ":").into(), ..id })
    } else {
        None
    }
}

/// Where the inventory of a project is, and its id.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Wanted {
    pub(crate) id: String,
    pub(crate) namespace: String,
    /// The name of a new one. One that exists is found by its label.
    pub(crate) name: String,
    /// What [`PROJECT`] says.
    pub(crate) project: String,
    /// The metadata of a new one.
    metadata: Map<String, Value>,
}

impl Wanted {
    /// Returns that of the template, or the default one.
    ///
    /// # Errors
    /// A text for people: the template is one of another project, or the inventory would be outside of the
    /// agent's namespaces.
    pub(crate) fn new(project: &Project, template: Option<&Manifest>) -> Result<Self, String> {
        let own = project.default_inventory_id();
        let is_outside =
            |namespace: &str| project.namespaces.as_ref().is_some_and(|all| !all.contains(namespace));
        let Some(template) = template else {
            if is_outside(&project.default_namespace) {
                return Err(format!(
                    "the inventory would be in the namespace {}, which is outside the agent's namespaces",
                    project.default_namespace
                ));
            }
            let mut metadata = Map::new();
            metadata.insert("labels".to_owned(), json!({ ID_LABEL: own }));
            let (namespace, name) = (project.default_namespace.clone(), project.default_inventory_name());
            return Ok(Self { id: own.clone(), namespace, name, project: own, metadata });
        };
        let id = template.label(ID_LABEL).unwrap_or_default().to_owned();
        let of_project = id.split_once('-').is_some_and(|(agent, project)| {
            let number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
            number(agent) && number(project)
        });
        if id != own && (of_project || project.other_inventories.contains(&id)) {
            return Err(format!(
                "{}:{}: the inventory template has the id {id}, which is that of another project: this one would \
                 delete its objects; remove the template, or choose an id of its own",
                template.file, template.line
            ));
        }
        let mut metadata = Map::new();
        for field in ["labels", "annotations"] {
            if let Some(entries @ Value::Object(_)) = template.body["metadata"].get(field) {
                metadata.insert(field.to_owned(), entries.clone());
            }
        }
        let namespace = match &*template.id.namespace {
            "" => project.default_namespace.clone(),
            namespace => namespace.to_owned(),
        };
        if is_outside(&namespace) {
            return Err(format!(
                "{}:{}: the inventory template is in the namespace {namespace}, which is outside the agent's namespaces",
                template.file, template.line
            ));
        }
        Ok(Self { id, namespace, name: template.id.name.as_ref().to_owned(), project: own, metadata })
    }

    /// The same with another id, for an inventory whose template is no longer known.
    pub(crate) fn with_id(project: &Project, id: &str) -> Self {
        let mut metadata = Map::new();
        metadata.insert("labels".to_owned(), json!({ ID_LABEL: id }));
        let (namespace, name) = (project.default_namespace.clone(), project.default_inventory_name());
        Self { id: id.to_owned(), namespace, name, project: project.default_inventory_id(), metadata }
    }

    /// The path of the ConfigMaps.
    pub(crate) fn collection(&self) -> String {
        format!("/api/v1/namespaces/{}/configmaps", segment(&self.namespace))
    }

    /// The target of the list of inventories.
    pub(crate) fn list(&self) -> String {
        format!("{}?labelSelector={}%3D{}", self.collection(), segment(ID_LABEL), segment(&self.id))
    }

    /// The target of the list of the inventories of all projects.
    pub(crate) fn list_all(&self) -> String {
        format!("{}?labelSelector={}", self.collection(), segment(ID_LABEL))
    }

    /// The body of a new one with these keys.
    pub(crate) fn body(&self, keys: &BTreeSet<String>, fence: &str) -> Value {
        let mut metadata = self.metadata.clone();
        metadata.insert("name".to_owned(), json!(self.name));
        metadata.insert("namespace".to_owned(), json!(self.namespace));
        let annotations = metadata.entry("annotations").or_insert_with(|| json!({}));
        annotations[FENCE] = json!(fence);
        annotations[PROJECT] = json!(self.project);
        if let Some(annotations) = annotations.as_object_mut() {
            annotations.shift_remove(COMMIT);
        }
        let data: Map<String, Value> = keys.iter().map(|key| (key.clone(), json!(""))).collect();
        json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data })
    }
}

/// An inventory as it was read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Inventory {
    pub(crate) name: String,
    pub(crate) uid: String,
    pub(crate) resource_version: String,
    pub(crate) commit: Option<String>,
    /// The project that writes it, if that is known.
    pub(crate) project: Option<String>,
    /// All keys.
    pub(crate) keys: BTreeSet<String>,
}

impl Inventory {
    /// Reads the answer to [`Wanted::list`].
    ///
    /// # Errors
    /// A text for people: it is not a list of inventories.
    pub(crate) fn read_list(list: &Value, wanted: &Wanted) -> Result<Vec<Self>, String> {
        let Some(items) = list["items"].as_array().filter(|_| list["kind"] == "ConfigMapList") else {
            return Err("the answer is not a list of ConfigMaps".to_owned());
        };
        if list["metadata"]["continue"].as_str().is_some_and(|more| !more.is_empty()) {
            return Err("the list of inventories is not complete".to_owned());
        }
        let mut all = items.iter().map(|item| Self::read(item, wanted)).collect::<Result<Vec<_>, _>>()?;
        all.sort_by(|a, b| (a.name != wanted.name, &a.name).cmp(&(b.name != wanted.name, &b.name)));
        Ok(all)
    }

    /// Reads a ConfigMap.
    ///
    /// # Errors
    /// A text for people: it is not this inventory.
    pub(crate) fn read(item: &Value, wanted: &Wanted) -> Result<Self, String> {
        let metadata = &item["metadata"];
        let text = |field: &str| metadata[field].as_str().filter(|text| !text.is_empty()).map(str::to_owned);
        let (Some(name), Some(uid), Some(resource_version)) =
            (text("name"), text("uid"), text("resourceVersion"))
        else {
            return Err("an inventory without name, uid or resourceVersion".to_owned());
        };
        if metadata["labels"][ID_LABEL] != wanted.id.as_str() {
            return Err(format!("the ConfigMap {name} does not have the label {ID_LABEL}: {}", wanted.id));
        }
        if !metadata["deletionTimestamp"].is_null() {
            return Err(format!("the inventory {name} is being deleted"));
        }
        let keys = match &item["data"] {
            Value::Null => BTreeSet::new(),
            Value::Object(data) => data.keys().cloned().collect(),
            _ => return Err(format!("the data of the inventory {name} is not a mapping")),
        };
        let commit = metadata["annotations"][COMMIT].as_str().map(str::to_owned);
        let project = metadata["annotations"][PROJECT].as_str().map(str::to_owned);
        Ok(Self { name, uid, resource_version, commit, project, keys })
    }

    pub(crate) fn reference(&self, namespace: &str) -> InventoryRef {
        InventoryRef { namespace: namespace.to_owned(), name: self.name.clone(), uid: self.uid.clone() }
    }
}

/// The size of an inventory with these keys, as the API server counts it: `"key":"",` for each.
pub(crate) fn size(keys: &BTreeSet<String>) -> usize {
    keys.iter().map(|key| key.len() + 6).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_those_of_cli_utils() {
        for (group, kind, namespace, name, expected) in [
            ("apps", "Deployment", "shop", "web", "shop_web_apps_Deployment"),
            ("", "ConfigMap", "shop", "c", "shop_c__ConfigMap"),
            ("", "Namespace", "", "shop", "_shop__Namespace"),
            (RBAC, "ClusterRole", "", "system:a:b", "_system__a__b_rbac.authorization.k8s.io_ClusterRole"),
            (RBAC, "Role", "n", "a_b", "n_a_b_rbac.authorization.k8s.io_Role"),
        ] {
            let id = ObjectId::new(group, kind, namespace, name);
            assert_eq!(key(&id).as_deref(), Some(expected));
            assert_eq!(parse_key(expected), Some(id));
        }
    }

    #[test]
    fn a_name_that_no_key_holds_has_none() {
        for (group, kind, name) in [
            ("", "ConfigMap", "a:b".to_owned()),
            ("", "ConfigMap", "a__b".to_owned()),
            (RBAC, "Role", "a__b".to_owned()),
            (RBAC, "Role", "a b".to_owned()),
            (RBAC, "Role", "\u{e4}".to_owned()),
            (RBAC, "Role", "a_:b".to_owned()),
            ("", "ConfigMap", "a".repeat(250)),
        ] {
            let id = ObjectId::new(group, kind, "n", &name);
            assert_eq!(key(&id), None, "{name}");
        }
    }

    #[test]
    fn a_key_of_something_else_is_not_understood() {
        for text in
            ["", "a", "a_b", "a_b_c", "a__b_C", "n_a__b__ConfigMap", "n_a_g_K/x", "n_a_g_", "n a_b_c_D"]
        {
            assert_eq!(parse_key(text), None, "{text}");
        }
    }
}
