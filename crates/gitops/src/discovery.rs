//! Which kinds the API server has: aggregated discovery, or that of each group.

use std::collections::{HashMap, HashSet};

use serde_json::Value;

use crate::{
    call::{Call, Caller, Gate},
    each::each,
};

/// Aggregated discovery, then what older API servers have.
const AGGREGATED: &str = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList,\
                          application/json;g=apidiscovery.k8s.io;v=v2beta1;as=APIGroupDiscoveryList,\
                          application/json";

/// A kind in a version of its group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Resource {
    pub(crate) version: String,
    /// The name in paths, such as `deployments`.
    pub(crate) plural: String,
    pub(crate) namespaced: bool,
}

/// What an API server has.
#[derive(Debug, Default)]
pub(crate) struct Api {
    /// By group and kind; the preferred version first.
    kinds: HashMap<(String, String), Vec<Resource>>,
    groups: HashSet<String>,
    /// Groups of which not everything could be read: what is not known of them may still exist.
    unknown: HashSet<String>,
}

/// The result of a look for a kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lookup<'a> {
    Found(&'a Resource),
    /// The group was read and has no such kind, or not in that version.
    NoKind,
    /// There is no such group.
    NoGroup,
    /// The group, or a part of it, could not be read.
    Unknown,
}

impl Api {
    /// Looks for a kind. Without a version: in the preferred one.
    pub(crate) fn lookup(&self, group: &str, version: Option<&str>, kind: &str) -> Lookup<'_> {
        let resources = self.kinds.get(&(group.to_owned(), kind.to_owned()));
        let found = resources.and_then(|resources| match version {
            None => resources.first(),
            Some(version) => resources.iter().find(|resource| resource.version == version),
        });
        match found {
            Some(resource) => Lookup::Found(resource),
            None if self.unknown.contains(group) => Lookup::Unknown,
            None if self.groups.contains(group) => Lookup::NoKind,
            None => Lookup::NoGroup,
        }
    }

    fn add(&mut self, group: &str, kind: &str, resource: Resource) {
        let resources = self.kinds.entry((group.to_owned(), kind.to_owned())).or_default();
        // A kind may have several resources in a version; the first one is that of its objects.
        if resources.iter().all(|known| known.version != resource.version) {
            resources.push(resource);
        }
    }

    fn read_aggregated(&mut self, list: &Value) {
        for group in list["items"].as_array().into_iter().flatten() {
            let name = group["metadata"]["name"].as_str().unwrap_or_default();
            self.groups.insert(name.to_owned());
            for version in group["versions"].as_array().into_iter().flatten() {
                let text = version["version"].as_str().unwrap_or_default();
                if version["freshness"].as_str() == Some("Stale") {
                    self.unknown.insert(name.to_owned());
                }
                for resource in version["resources"].as_array().into_iter().flatten() {
                    let kind = resource["responseKind"]["kind"].as_str().unwrap_or_default();
                    let plural = resource["resource"].as_str().unwrap_or_default();
                    if kind.is_empty() || plural.is_empty() {
                        continue;
                    }
                    let namespaced = resource["scope"].as_str() == Some("Namespaced");
                    let (version, plural) = (text.to_owned(), plural.to_owned());
                    self.add(name, kind, Resource { version, plural, namespaced });
                }
            }
        }
    }

    fn read_version(&mut self, group: &str, version: &str, list: &Value) {
        for resource in list["resources"].as_array().into_iter().flatten() {
            let kind = resource["kind"].as_str().unwrap_or_default();
            let plural = resource["name"].as_str().unwrap_or_default();
            // `deployments/scale` is a subresource, and some have the kind of another group.
            let other = resource["group"].as_str().is_some_and(|other| !other.is_empty() && other != group);
            if kind.is_empty() || plural.is_empty() || plural.contains('/') || other {
                continue;
            }
            let namespaced = resource["namespaced"].as_bool() == Some(true);
            let (version, plural) = (version.to_owned(), plural.to_owned());
            self.add(group, kind, Resource { version, plural, namespaced });
        }
    }
}

/// Asks an API server. The inner error is for people: it does not say what it has.
pub(crate) async fn discover<G: Gate + ?Sized>(
    caller: &Caller,
    gate: &G,
) -> Result<Result<Api, String>, G::End> {
    let mut api = Api::default();
    // (group, version), in order of preference.
    let mut open: Vec<(String, String)> = Vec::new();
    for root in ["/api", "/apis"] {
        let answer = caller.call(gate, &Call::get(root.to_owned(), Some(AGGREGATED))).await?;
        if !answer.is_ok() {
            return Ok(Err(format!("the kinds of the cluster cannot be read: {}", answer.words())));
        }
        let list = match answer.json() {
            Ok(list) => list,
            Err(why) => return Ok(Err(format!("the kinds of the cluster cannot be read: {why}"))),
        };
        match list["kind"].as_str() {
            Some("APIGroupDiscoveryList") => api.read_aggregated(&list),
            Some("APIVersions") => {
                api.groups.insert(String::new());
                let versions = list["versions"].as_array().into_iter().flatten().filter_map(Value::as_str);
                open.extend(versions.map(|version| (String::new(), version.to_owned())));
            }
            Some("APIGroupList") => {
                for group in list["groups"].as_array().into_iter().flatten() {
                    let name = group["name"].as_str().unwrap_or_default();
                    api.groups.insert(name.to_owned());
                    let preferred = group["preferredVersion"]["version"].as_str().unwrap_or_default();
                    let mut versions: Vec<&str> = group["versions"]
                        .as_array()
                        .into_iter()
                        .flatten()
                        .filter_map(|version| version["version"].as_str())
                        .collect();
                    versions.sort_by_key(|version| *version != preferred);
                    open.extend(versions.into_iter().map(|version| (name.to_owned(), version.to_owned())));
                }
            }
            _ => {
                return Ok(Err(format!(
                    "the kinds of the cluster cannot be read: {root} is no list of them"
                )));
            }
        }
    }
    let open = &open;
    let lists = each(open.len(), |at| async move {
        let (group, version) = &open[at];
        let target =
            if group.is_empty() { format!("/api/{version}") } else { format!("/apis/{group}/{version}") };
        let answer = caller.call(gate, &Call::get(target, None)).await?;
        let list = answer.is_ok().then(|| answer.json().ok()).flatten();
        Ok::<_, G::End>(list.filter(|list| list["kind"].as_str() == Some("APIResourceList")))
    })
    .await?;
    for ((group, version), list) in open.iter().zip(lists) {
        match list {
            Some(list) => api.read_version(group, version, &list),
            None => {
                api.unknown.insert(group.clone());
            }
        }
    }
    Ok(Ok(api))
}
