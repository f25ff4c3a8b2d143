//! From a set and the kinds of a cluster to what is applied where, and in which order.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use bytes::Bytes;
use serde_json::{Value, json};

use crate::{
    discovery::{Api, Lookup},
    inventory::{self, Wanted},
    marks::OWNER_ANNOTATION,
    object::{Manifest, ObjectId, Set},
    order,
    path::Path,
    project::Project,
};

/// Annotations of cli-utils that this engine does not follow.
const DEPENDS_ON: &str = "config.kubernetes.io/depends-on";
const MUTATION: &str = "config.kubernetes.io/apply-time-mutation";

/// What is done.
#[derive(Debug, Default)]
pub(crate) struct Plan<'a> {
    /// What is applied, in order.
    pub(crate) items: Vec<Item<'a>>,
    /// What cannot be applied, and why.
    pub(crate) failed: Vec<Unplanned<'a>>,
    pub(crate) warnings: Vec<String>,
}

/// An object that is applied.
#[derive(Debug, Clone)]
pub(crate) struct Item<'a> {
    /// Its identity with its real namespace.
    pub(crate) id: ObjectId,
    pub(crate) key: String,
    pub(crate) manifest: &'a Manifest,
    pub(crate) path: Path,
    /// Whether its kind, or its version of the kind, comes with a definition of this set.
    pub(crate) defined_here: bool,
    /// Where it can be read although its own version is not served yet: in another version.
    pub(crate) served: Option<Path>,
}

/// An object that cannot be applied.
#[derive(Debug, Clone)]
pub(crate) struct Unplanned<'a> {
    pub(crate) id: ObjectId,
    pub(crate) manifest: &'a Manifest,
    pub(crate) why: String,
}

/// A kind that a definition of the set makes.
struct Defined {
    plural: String,
    namespaced: bool,
    versions: BTreeSet<String>,
}

/// Plans a set.
///
/// # Errors
/// A text for people: nothing of it may be applied.
pub(crate) fn plan<'a>(
    project: &Project,
    set: &'a Set,
    api: &Api,
    wanted: &Wanted,
) -> Result<Plan<'a>, String> {
    let mut plan = Plan::default();
    let defined = definitions(set);
    let mut places: BTreeMap<ObjectId, &Manifest> = BTreeMap::new();
    for manifest in set.objects() {
        let version = manifest.api_version.rsplit('/').next().unwrap_or_default();
        let (group, kind) = (manifest.id.group.to_string(), manifest.id.kind.to_string());
        let definition = defined.get(&(group, kind)).filter(|defined| defined.versions.contains(version));
        let mut fail = |why: String| {
            plan.failed.push(Unplanned { id: manifest.id.clone(), manifest, why });
        };
        let (plural, namespaced, defined_here) =
            match (api.lookup(&manifest.id.group, Some(version), &manifest.id.kind), definition) {
                (Lookup::Found(resource), _) => (resource.plural.as_str(), resource.namespaced, false),
                (_, Some(defined)) => (defined.plural.as_str(), defined.namespaced, true),
                (Lookup::Unknown, None) => {
                    fail(format!("the API group {} cannot be read", manifest.id.group));
                    continue;
                }
                (Lookup::NoKind | Lookup::NoGroup, None) => {
                    fail(format!(
                        "no kind {} in {}; is its CustomResourceDefinition missing?",
                        manifest.id.kind, manifest.api_version
                    ));
                    continue;
                }
            };
        let mut id = manifest.id.clone();
        if !namespaced && !id.namespace.is_empty() {
            plan.warnings.push(format!(
                "{}:{}: {} is an object of the cluster: its namespace is ignored",
                manifest.file, manifest.line, manifest.id
            ));
            id.namespace = "".into();
        } else if namespaced && id.namespace.is_empty() {
            id.namespace = project.default_namespace.as_str().into();
        }
        if let Some(first) = places.insert(id.clone(), manifest) {
            return Err(format!(
                "{}:{}: {id} twice: it is also at {}:{}",
                manifest.file, manifest.line, first.file, first.line
            ));
        }
        let unplanned = |why: String| Unplanned { id: id.clone(), manifest, why };
        if let Some(allowed) = &project.namespaces
            && !allowed.contains(&*id.namespace)
        {
            plan.failed.push(unplanned(format!("{id} is outside the agent's namespaces")));
            continue;
        }
        if manifest.annotation(MUTATION).is_some() {
            let why = format!("the annotation {MUTATION} is not supported: its values would be missing");
            plan.failed.push(unplanned(why));
            continue;
        }
        if id.is("", "ConfigMap") && *id.namespace == *wanted.namespace && *id.name == *wanted.name {
            plan.failed.push(unplanned("its name is that of the inventory".to_owned()));
            continue;
        }
        let Some(key) = inventory::key(&id) else {
            plan.failed.push(unplanned("no key of an inventory can hold its name".to_owned()));
            continue;
        };
        if manifest.annotation(DEPENDS_ON).is_some() {
            plan.warnings.push(format!(
                "{}:{}: {id}: the annotation {DEPENDS_ON} is not followed",
                manifest.file, manifest.line
            ));
        }
        let path = Path::new(&id, version, plural);
        let served = match api.lookup(&id.group, None, &id.kind) {
            Lookup::Found(resource) if defined_here && resource.namespaced == namespaced => {
                Some(Path::new(&id, &resource.version, &resource.plural))
            }
            _ => None,
        };
        plan.items.push(Item { id, key, manifest, path, defined_here, served });
    }
    plan.items.sort_by_cached_key(|item| order::rank(&item.id));
    Ok(plan)
}

/// The objects of a plan, to look up what of an inventory is among them.
#[derive(Debug, Default)]
pub(crate) struct Names<'p> {
    /// Keys of what is applied.
    keys: BTreeSet<&'p str>,
    /// The namespaces of what cannot be applied, by group, kind and name.
    failed: HashMap<(&'p str, &'p str, &'p str), BTreeSet<&'p str>>,
}

impl Plan<'_> {
    /// Returns the objects of the plan.
    pub(crate) fn names(&self) -> Names<'_> {
        let keys = self.items.iter().map(|item| item.key.as_str()).collect();
        let mut names = Names { keys, ..Names::default() };
        for Unplanned { id, .. } in &self.failed {
            names.failed.entry((&id.group, &id.kind, &id.name)).or_default().insert(&id.namespace);
        }
        names
    }
}

impl Names<'_> {
    /// Whether an object is in the set, or may be: one that could not be planned may lack its namespace.
    pub(crate) fn contain(&self, id: &ObjectId, key: &str) -> bool {
        self.keys.contains(key)
            || self
                .failed
                .get(&(&*id.group, &*id.kind, &*id.name))
                .is_some_and(|namespaces| namespaces.contains("") || namespaces.contains(&*id.namespace))
    }
}

/// Returns the kinds that the set's own definitions make.
fn definitions(set: &Set) -> BTreeMap<(String, String), Defined> {
    let mut defined = BTreeMap::new();
    for manifest in set.objects() {
        if !manifest.id.is("apiextensions.k8s.io", "CustomResourceDefinition") {
            continue;
        }
        let spec = &manifest.body["spec"];
        let text = |value: &Value| value.as_str().filter(|text| !text.is_empty()).map(str::to_owned);
        let (Some(group), Some(kind), Some(plural)) =
            (text(&spec["group"]), text(&spec["names"]["kind"]), text(&spec["names"]["plural"]))
        else {
            continue;
        };
        let mut versions: BTreeSet<String> = spec["versions"]
            .as_array()
            .into_iter()
            .flatten()
            .filter(|version| version["served"].as_bool() != Some(false))
            .filter_map(|version| text(&version["name"]))
            .collect();
        versions.extend(text(&spec["version"]));
        let namespaced = spec["scope"].as_str() == Some("Namespaced");
        defined.insert((group, kind), Defined { plural, namespaced, versions });
    }
    defined
}

/// Returns the group and kind that a definition makes, of its manifest or of the object in the cluster.
pub(crate) fn defines(definition: &Value) -> Option<(&str, &str)> {
    Some((definition["spec"]["group"].as_str()?, definition["spec"]["names"]["kind"].as_str()?))
}

impl Item<'_> {
    /// The body of its apply: the manifest with its namespace and the mark, without what server-side apply
    /// refuses.
    pub(crate) fn body(&self, inventory_id: &str) -> Bytes {
        let mut body = self.manifest.body.clone();
        let metadata = &mut body["metadata"];
        if let Some(metadata) = metadata.as_object_mut() {
            metadata.shift_remove("managedFields");
            metadata.shift_remove("creationTimestamp");
            if self.id.namespace.is_empty() {
                metadata.shift_remove("namespace");
            } else {
                metadata.insert("namespace".to_owned(), json!(&*self.id.namespace));
            }
            let annotations = metadata.entry("annotations").or_insert(Value::Null);
            if !annotations.is_object() {
                *annotations = json!({});
            }
            annotations[OWNER_ANNOTATION] = json!(inventory_id);
        }
        body.to_string().into()
    }

    /// The version in its manifest.
    pub(crate) fn version(&self) -> &str {
        self.manifest.api_version.rsplit('/').next().unwrap_or_default()
    }

    /// Where it can be read now; `None`: its kind is not served, so it is not there.
    pub(crate) fn readable(&self) -> Option<&Path> {
        if self.defined_here { self.served.as_ref() } else { Some(&self.path) }
    }

    /// Its file and line.
    pub(crate) fn place(&self) -> (std::sync::Arc<str>, u32) {
        (self.manifest.file.clone(), self.manifest.line)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn names_hold_what_could_not_be_planned_with_and_without_its_namespace() {
        let manifest = |id: &ObjectId| Manifest {
            id: id.clone(),
            api_version: "v1".into(),
            body: Value::Null,
            file: "a".into(),
            line: 1,
        };
        // Enough that a look at each for each would take minutes.
        let ids: Vec<ObjectId> = (0..100_000)
            .map(|at| ObjectId::new("g", "K", if at % 2 == 0 { "" } else { "n" }, &format!("o{at}")))
            .collect();
        let manifests: Vec<Manifest> = ids.iter().map(manifest).collect();
        let failed = ids.iter().zip(&manifests);
        let failed = failed.map(|(id, manifest)| Unplanned { id: id.clone(), manifest, why: String::new() });
        let plan = Plan { failed: failed.collect(), ..Plan::default() };
        let names = plan.names();
        let mut found = [0, 0, 0];
        for id in &ids {
            for (at, namespace) in ["", "n", "m"].into_iter().enumerate() {
                let id = ObjectId { namespace: Arc::from(namespace), ..id.clone() };
                found[at] += usize::from(names.contain(&id, "no key"));
            }
            let other = ObjectId { kind: "L".into(), ..id.clone() };
            assert!(!names.contain(&other, "no key"));
        }
        assert_eq!(found, [50_000, 100_000, 50_000]);
    }
}
