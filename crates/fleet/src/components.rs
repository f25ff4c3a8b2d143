//! Which known software runs in a cluster. The rules are data.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{
    ServiceAddress,
    inventory::{Inventory, Labels, Service, Workload},
};

/// The rules that kas has, as YAML.
pub const SHIPPED: &str = include_str!("components/rules.yaml");

/// The most rules.
const MOST_RULES: usize = 200;
/// The most components of a cluster.
const MOST_COMPONENTS: usize = 2_000;
/// The most workloads of a component that are named.
const MOST_NAMED: usize = 20;
/// The longest version, in bytes.
const LONGEST_VERSION: usize = 128;
/// The label of a version.
const VERSION: &str = "app.kubernetes.io/version";

/// Rules, in their order.
#[derive(Clone, Debug, Default)]
pub struct Rules(Vec<Rule>);

/// Why rules cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct InvalidRules(String);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    components: Vec<Rule>,
}

/// A rule.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Rule {
    name: String,
    #[serde(default)]
    several: bool,
    #[serde(default)]
    groups: Vec<String>,
    #[serde(default)]
    images: Vec<String>,
    #[serde(default)]
    labels: Vec<Labels>,
    #[serde(default)]
    version: Option<Vec<VersionFrom>>,
    #[serde(default)]
    service: Option<ServiceRule>,
    #[serde(default)]
    probe: Option<Probe>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ServiceRule {
    labels: Vec<Labels>,
    ports: Vec<u16>,
}

/// A question to the Service of a component, whose answer has the version.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Probe {
    /// The path.
    pub path: String,
    /// Where the version is in the answer: a JSON pointer.
    pub pointer: String,
}

impl Probe {
    /// Returns the version in an answer; `None`: there is none.
    pub fn version(&self, answer: &[u8]) -> Option<String> {
        let answer: Value = serde_json::from_slice(answer).ok()?;
        plain(answer.pointer(&self.pointer)?.as_str()?)
    }
}

/// Where a version comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum VersionFrom {
    /// The label `app.kubernetes.io/version`.
    Label,
    /// The tag of the image.
    Tag,
    /// What the component says itself.
    Probe,
}

impl VersionFrom {
    /// Returns its name.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Label => "label",
            Self::Tag => "tag",
            Self::Probe => "probe",
        }
    }
}

/// A component of a cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Component {
    /// The name of its rule.
    pub name: String,
    /// The namespace; empty: no workload of it may be seen.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub namespace: String,
    /// Its version; empty: not known.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub version: String,
    /// Where the version comes from.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version_from: Option<VersionFrom>,
    /// Its workloads, such as `deployments.apps/argocd-server`: at most 20.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub workloads: Vec<String>,
    /// Its API groups in this cluster, each with the preferred version, such as `argoproj.io/v1alpha1`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub apis: Vec<String>,
    /// Its Service, as `namespace/name:port`; empty: its rule has none, or there is none.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub service: String,
}

/// The components of a cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// The components, by name and namespace.
    pub components: Vec<Component>,
    /// Those whose version may be asked for: the index, and the question.
    pub probes: Vec<(usize, Probe)>,
    /// There were more.
    pub is_cut: bool,
}

impl Rules {
    /// Reads rules from a file.
    ///
    /// # Errors
    /// What is wrong, and where.
    pub fn read(file: Value) -> Result<Self, InvalidRules> {
        let File { components } =
            serde_json::from_value(file).map_err(|error| InvalidRules(error.to_string()))?;
        let mut names = BTreeSet::new();
        if components.len() > MOST_RULES {
            return Err(InvalidRules(format!("{} components; at most {MOST_RULES}", components.len())));
        }
        for rule in &components {
            let wrong = |why: &str| Err(InvalidRules(format!("components, {:?}: {why}", rule.name)));
            let is_name = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
            if rule.name.is_empty() || rule.name.len() > 63 || !rule.name.bytes().all(is_name) {
                return wrong("the name must be of lower-case letters, digits and -");
            }
            if !names.insert(rule.name.as_str()) {
                return wrong("there are two of this name");
            }
            if rule.groups.is_empty() && rule.images.is_empty() && rule.labels.is_empty() {
                return wrong("groups, images or labels must say how it is found");
            }
            if rule.images.iter().any(|image| image.trim_start_matches('/').is_empty()) {
                return wrong("an image is empty");
            }
            let services = rule.service.iter().flat_map(|service| &service.labels);
            if rule.labels.iter().chain(services).any(BTreeMap::is_empty) {
                return wrong("a mapping of labels is empty, so it would be that of everything");
            }
            if rule.service.as_ref().is_some_and(|it| it.labels.is_empty() || it.ports.is_empty()) {
                return wrong("service must have labels and ports");
            }
            if let Some(probe) = &rule.probe {
                if rule.service.is_none() {
                    return wrong("probe needs service");
                }
                if !probe.path.starts_with('/') || !probe.pointer.starts_with('/') {
                    return wrong("probe.path and probe.pointer must begin with a slash");
                }
            }
        }
        Ok(Self(components))
    }

    /// Adds rules behind these.
    ///
    /// # Errors
    /// If two have the same name, or there are too many.
    pub fn add(&mut self, more: Self) -> Result<(), InvalidRules> {
        for rule in &more.0 {
            if self.0.iter().any(|other| other.name == rule.name) {
                return Err(InvalidRules(format!("components, {:?}: another file has this name", rule.name)));
            }
        }
        if self.0.len() + more.0.len() > MOST_RULES {
            return Err(InvalidRules(format!("all files together have more than {MOST_RULES} components")));
        }
        self.0.extend(more.0);
        Ok(())
    }

    /// Returns what is in a cluster.
    pub fn find(&self, inventory: &Inventory) -> Found {
        let mut found = Found::default();
        for rule in &self.0 {
            let apis = rule.groups.iter().filter_map(|group| {
                let version = inventory.groups.get(group)?;
                Some(format!("{group}/{version}"))
            });
            let apis: Vec<String> = apis.collect();
            let mut places: BTreeMap<(&str, &str), Vec<&Workload>> = BTreeMap::new();
            for workload in inventory.workloads.iter().filter(|workload| rule.is(workload)) {
                let name = if rule.several { workload.name.as_str() } else { "" };
                places.entry((&workload.namespace, name)).or_default().push(workload);
            }
            if places.is_empty() && !apis.is_empty() {
                found.push(Component { name: rule.name.clone(), apis: apis.clone(), ..Component::default() });
            }
            for ((namespace, _), workloads) in places {
                let (version, from) = rule.version(&workloads).unzip();
                let service = rule.service(namespace, &inventory.services);
                let is_probed =
                    version.is_none() && service.is_some() && rule.tries().contains(&VersionFrom::Probe);
                let component = Component {
                    name: rule.name.clone(),
                    namespace: namespace.to_owned(),
                    version: version.unwrap_or_default(),
                    version_from: from,
                    workloads: workloads
                        .iter()
                        .take(MOST_NAMED)
                        .map(|workload| format!("{}/{}", workload.resource, workload.name))
                        .collect(),
                    apis: apis.clone(),
                    service: service.map_or_else(String::new, |service| service.to_string()),
                };
                if let Some(probe) = rule.probe.as_ref().filter(|_| is_probed) {
                    found.probes.push((found.components.len(), probe.clone()));
                }
                found.push(component);
            }
        }
        found.probes.retain(|(index, _)| *index < found.components.len());
        found
    }
}

impl Found {
    fn push(&mut self, component: Component) {
        if self.components.len() < MOST_COMPONENTS {
            self.components.push(component);
        } else {
            self.is_cut = true;
        }
    }
}

impl Rule {
    fn tries(&self) -> &[VersionFrom] {
        const ALL: &[VersionFrom] = &[VersionFrom::Label, VersionFrom::Tag, VersionFrom::Probe];
        self.version.as_deref().unwrap_or(ALL)
    }

    fn is(&self, workload: &Workload) -> bool {
        workload.images.iter().any(|image| self.images.iter().any(|end| image.is(end)))
            || self.labels.iter().any(|wanted| has(&workload.labels, wanted))
    }

    fn version(&self, workloads: &[&Workload]) -> Option<(String, VersionFrom)> {
        self.tries().iter().find_map(|from| {
            let version = match from {
                VersionFrom::Label => {
                    workloads.iter().find_map(|workload| plain(workload.labels.get(VERSION)?))
                }
                VersionFrom::Tag => {
                    let images = workloads.iter().flat_map(|workload| &workload.images);
                    let mut own = images.filter(|image| self.images.iter().any(|end| image.is(end)));
                    own.find_map(|image| plain(&image.tag).filter(|tag| tag != "latest"))
                }
                VersionFrom::Probe => None,
            };
            Some((version?, *from))
        })
    }

    /// Returns its Service in a namespace: one with an address of its own counts most, then the order of the
    /// ports.
    fn service(&self, namespace: &str, services: &[Service]) -> Option<ServiceAddress> {
        let rule = self.service.as_ref()?;
        let fit = services.iter().filter(|service| {
            service.namespace == namespace && rule.labels.iter().any(|wanted| has(&service.labels, wanted))
        });
        let ranked = fit.filter_map(|service| {
            let (rank, port) =
                rule.ports.iter().enumerate().find(|(_, port)| service.ports.contains(port))?;
            Some(((service.is_headless, rank, service.name.as_str()), port))
        });
        let ((_, _, name), port) = ranked.min()?;
        format!("{namespace}/{name}:{port}").parse().ok()
    }
}

fn has(labels: &Labels, wanted: &Labels) -> bool {
    wanted.iter().all(|(key, value)| labels.get(key) == Some(value))
}

/// Returns a version as it can be shown; `None`: it is none.
fn plain(text: &str) -> Option<String> {
    let is_plain =
        !text.is_empty() && text.len() <= LONGEST_VERSION && text.bytes().all(|b| b.is_ascii_graphic());
    is_plain.then(|| text.to_owned())
}

#[cfg(test)]
mod tests;
