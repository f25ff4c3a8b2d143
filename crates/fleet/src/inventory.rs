//! What is known of a cluster: its API groups, workloads and Services, as its tables print them.

use std::collections::BTreeMap;

use serde::Deserialize;

/// The most API groups of a cluster.
const MOST_GROUPS: usize = 2_000;
/// The longest name that is kept, in bytes. Kubernetes allows 253.
const LONGEST_NAME: usize = 253;
/// The most images of a workload.
const MOST_IMAGES: usize = 50;

/// The longest reason why an answer cannot be read, in characters.
const LONGEST_REASON: usize = 512;

/// Labels of an object.
pub type Labels = BTreeMap<String, String>;

/// What is known of a cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Inventory {
    /// The API groups, each with the version that the API server prefers.
    pub groups: BTreeMap<String, String>,
    /// Deployments, stateful sets and daemon sets.
    pub workloads: Vec<Workload>,
    /// Services.
    pub services: Vec<Service>,
}

/// A workload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Workload {
    /// Such as `deployments.apps`.
    pub resource: &'static str,
    /// The namespace.
    pub namespace: String,
    /// The name.
    pub name: String,
    /// Its labels: not those of its pods.
    pub labels: Labels,
    /// The images of its containers.
    pub images: Vec<Image>,
}

/// A Service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Service {
    /// The namespace.
    pub namespace: String,
    /// The name.
    pub name: String,
    /// Its labels.
    pub labels: Labels,
    /// It has no address of its own.
    pub is_headless: bool,
    /// Its ports of TCP.
    pub ports: Vec<u16>,
}

/// The name of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    /// Registry and repository, such as `quay.io/prometheus/prometheus`.
    pub repository: String,
    /// The tag; empty: there is none.
    pub tag: String,
}

impl Image {
    /// Reads a name such as `quay.io/prometheus/prometheus:v3.0.1@sha256:…`.
    pub fn parse(text: &str) -> Self {
        let name = text.split('@').next().unwrap_or_default();
        // A colon before the last slash is that of the registry's port.
        let (repository, tag) = match name.rsplit_once(':') {
            Some((repository, tag)) if !tag.contains('/') => (repository, tag),
            _ => (name, ""),
        };
        Self { repository: repository.to_owned(), tag: tag.to_owned() }
    }

    /// Whether the end of the repository is this. An end that begins with a slash matches only what has no
    /// folder, such as `traefik` in `docker.io/traefik`.
    pub fn is(&self, end: &str) -> bool {
        if let Some(name) = end.strip_prefix('/') {
            let registry = self.repository.strip_suffix(name);
            return registry.is_some_and(|registry| {
                registry.is_empty()
                    || registry.strip_suffix('/').is_some_and(|host| {
                        !host.contains('/') && (host.contains(['.', ':']) || host == "localhost")
                    })
            });
        }
        let before = self.repository.strip_suffix(end);
        before.is_some_and(|before| before.is_empty() || before.ends_with('/'))
    }
}

/// Reads the column `Images` of a table.
pub fn images(cell: &str) -> Vec<Image> {
    let names = cell.split(',').map(str::trim).filter(|name| !name.is_empty());
    names.take(MOST_IMAGES).map(Image::parse).collect()
}

/// Reads labels as `key=value` joined by commas.
pub fn labels(text: &str) -> Labels {
    let pairs = text.split(',').filter_map(|pair| pair.split_once('='));
    pairs.map(|(key, value)| (key.to_owned(), value.to_owned())).collect()
}

/// Reads the column `Port(s)` of a table: the ports of TCP of `80:31380/TCP,443/TCP,53/UDP`.
pub fn ports(cell: &str) -> Vec<u16> {
    let tcp = cell.split(',').filter_map(|port| port.trim().strip_suffix("/TCP"));
    tcp.filter_map(|port| port.split(':').next()?.parse().ok()).collect()
}

/// Reads an `APIGroupList`: the groups, each with the version that the API server prefers.
///
/// # Errors
/// If it is none, or has too many groups.
pub fn groups(bytes: &[u8]) -> Result<BTreeMap<String, String>, Unreadable> {
    #[derive(Deserialize)]
    struct List {
        kind: String,
        groups: Vec<Group>,
    }
    #[derive(Deserialize)]
    struct Group {
        name: String,
        #[serde(rename = "preferredVersion", default)]
        preferred: Version,
    }
    #[derive(Deserialize, Default)]
    struct Version {
        #[serde(default)]
        version: String,
    }
    let list: List = serde_json::from_slice(bytes).map_err(|error| Unreadable::new(&error.to_string()))?;
    if list.kind != "APIGroupList" {
        return Err(Unreadable::new("it is no APIGroupList"));
    }
    if list.groups.len() > MOST_GROUPS {
        return Err(Unreadable::new(&format!("{} API groups; at most {MOST_GROUPS}", list.groups.len())));
    }
    let fits = |text: &str| text.len() <= LONGEST_NAME;
    let groups = list.groups.into_iter().filter(|group| fits(&group.name) && fits(&group.preferred.version));
    Ok(groups.map(|group| (group.name, group.preferred.version)).collect())
}

/// Why an answer of an API server cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the API server's answer cannot be read: {0}")]
pub struct Unreadable(String);

impl Unreadable {
    pub(crate) fn new(why: &str) -> Self {
        // What is wrong may be in it, and that may be long.
        Self(why.chars().take(LONGEST_REASON).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_has_a_repository_and_a_tag() {
        let read = |text: &str| {
            let Image { repository, tag } = Image::parse(text);
            format!("{repository} {tag}")
        };
        assert_eq!(read("quay.io/prometheus/prometheus:v3.0.1"), "quay.io/prometheus/prometheus v3.0.1");
        assert_eq!(read("localhost:5000/a/b"), "localhost:5000/a/b ");
        assert_eq!(read("a:5000/b:1@sha256:0123"), "a:5000/b 1");
        assert_eq!(read("a@sha256:0123"), "a ");
        assert_eq!(read(""), " ");
    }

    #[test]
    fn the_end_of_a_repository_names_an_image() {
        let is = |image: &str, end: &str| Image::parse(image).is(end);
        assert!(is("prometheus/prometheus:v1", "prometheus/prometheus"));
        assert!(is("mirror.local:5000/quay/prometheus/prometheus", "prometheus/prometheus"));
        assert!(!is("quay.io/notprometheus/prometheus", "prometheus/prometheus"));
        assert!(!is("quay.io/prometheus/prometheus-operator", "prometheus/prometheus"));
        assert!(is("traefik:v3", "/traefik") && is("docker.io/traefik:v3", "/traefik"));
        assert!(!is("evil/traefik", "/traefik") && !is("docker.io/evil/traefik", "/traefik"));
        assert!(!is("nottraefik", "/traefik"));
    }

    #[test]
    fn cells_and_labels_are_lists() {
        assert_eq!(images("a:1, b/c:2,").len(), 2);
        assert_eq!(labels("a=b,c=,d=e=f").into_values().collect::<Vec<_>>(), ["b", "", "e=f"]);
        assert_eq!(ports("80:31380/TCP,443/TCP,53/UDP,99999/TCP,x/TCP"), [80, 443]);
        assert!(ports("<none>").is_empty());
    }

    #[test]
    fn groups_have_a_preferred_version() {
        let list = r#"{"kind":"APIGroupList","groups":[{"name":"apps","versions":[{"groupVersion":"apps/v1","version":"v1"}],"preferredVersion":{"groupVersion":"apps/v1","version":"v1"}},{"name":"x"}]}"#;
        let found = groups(list.as_bytes()).unwrap();
        assert_eq!(
            found.into_iter().collect::<Vec<_>>(),
            [("apps", "v1"), ("x", "")].map(|(a, b)| (a.into(), b.into()))
        );
        for wrong in ["", "{}", r#"{"kind":"Status","groups":[]}"#, r#"{"kind":"APIGroupList"}"#] {
            assert!(groups(wrong.as_bytes()).is_err(), "{wrong}");
        }
    }
}
