//! Which applications are installed in a cluster, by what tells of them: merged by namespace and instance.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::inventory::{Inventory, Labels, Unreadable};

/// The most applications of a cluster.
pub const MOST_APPLICATIONS: usize = 10_000;
/// The longest text that is kept, in bytes.
const LONGEST: usize = 253;
const INSTANCE: &str = "app.kubernetes.io/instance";
const NAME: &str = "app.kubernetes.io/name";
const VERSION: &str = "app.kubernetes.io/version";

/// What tells of an application. The first with a version wins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Teller {
    /// An `Application` of `app.k8s.io`.
    Application,
    /// A release of Helm.
    Helm,
    /// An object of Flux.
    Flux,
    /// An `Application` of Argo CD.
    Argo,
    /// The recommended labels of workloads.
    Labels,
}

impl Teller {
    /// Returns its name.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Application => "application",
            Self::Helm => "helm",
            Self::Flux => "flux",
            Self::Argo => "argo",
            Self::Labels => "labels",
        }
    }
}

/// What one object tells of an application.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Told {
    /// What kind of object it is.
    pub by: Teller,
    /// The namespace that the application is in.
    pub namespace: String,
    /// The name of this installation.
    pub instance: String,
    /// What is installed, such as the name of a chart; empty: not told.
    pub name: String,
    /// Its version; empty: not told.
    pub version: String,
    /// How it is, in the words of the teller; empty: not told.
    pub status: String,
}

/// An installed application.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Application {
    /// The namespace.
    pub namespace: String,
    /// The name of this installation.
    pub instance: String,
    /// What is installed; empty: nobody tells.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub name: String,
    /// Its version; empty: nobody tells.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub version: String,
    /// Who tells the version.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version_by: Option<Teller>,
    /// How it is, in the words of the first that tells.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub status: String,
    /// Who tells of it.
    pub by: BTreeSet<Teller>,
}

impl Told {
    /// Returns it with texts that can be shown; `None`: it has no name that could be one.
    fn plain(self) -> Option<Self> {
        let Self { by, namespace, instance, name, version, status } = self;
        let told = Self {
            by,
            namespace: kept(namespace),
            instance: kept(instance),
            name: kept(name),
            version: kept(version),
            status: kept(status),
        };
        (!told.instance.is_empty()).then_some(told)
    }
}

/// Merges what objects tell. Returns the applications by namespace and instance, and whether there were more
/// than [`MOST_APPLICATIONS`].
pub fn merge(mut told: Vec<Told>) -> (Vec<Application>, bool) {
    told.sort_by_key(|told| told.by);
    let mut found: BTreeMap<(String, String), Application> = BTreeMap::new();
    let mut is_cut = false;
    for Told { by, namespace, instance, name, version, status } in told {
        let count = found.len();
        let key = (namespace, instance);
        if count >= MOST_APPLICATIONS && !found.contains_key(&key) {
            is_cut = true;
            continue;
        }
        let application = found.entry(key).or_insert_with_key(|(namespace, instance)| Application {
            namespace: namespace.clone(),
            instance: instance.clone(),
            ..Application::default()
        });
        application.by.insert(by);
        let fill = |place: &mut String, text: String| {
            if place.is_empty() {
                *place = text;
            }
        };
        if application.version.is_empty() && !version.is_empty() {
            application.version_by = Some(by);
        }
        fill(&mut application.version, version);
        fill(&mut application.name, name);
        fill(&mut application.status, status);
    }
    (found.into_values().collect(), is_cut)
}

/// Returns what the recommended labels of workloads tell.
pub fn of_labels(inventory: &Inventory) -> Vec<Told> {
    let mut told = BTreeSet::new();
    for workload in &inventory.workloads {
        let label = |key: &str| workload.labels.get(key).cloned().unwrap_or_default();
        let instance = label(INSTANCE);
        if !instance.is_empty() {
            // One with a version goes before one without, then the one that has given the instance its name:
            // the chart cert-manager has a cainjector, too.
            let (version, name) = (label(VERSION), label(NAME));
            let key = (version.is_empty(), version, name != instance, name);
            told.insert((workload.namespace.clone(), instance, key));
        }
    }
    let one = |(namespace, instance, (_, version, _, name))| Told {
        by: Teller::Labels,
        namespace,
        instance,
        name,
        version,
        status: String::new(),
    };
    told.into_iter().map(one).filter_map(Told::plain).collect()
}

/// Returns what the metadata of Helm's Secrets tells: each is a revision of a release, and only the last of
/// them counts. `secrets`: the namespace and the labels of each. Helm tells neither chart nor version there.
pub fn of_helm<'a>(secrets: impl IntoIterator<Item = (&'a str, Labels)>) -> Vec<Told> {
    let mut last: BTreeMap<(String, String), (u64, String)> = BTreeMap::new();
    for (namespace, mut labels) in secrets {
        let (Some(name), Some(status)) = (labels.remove("name"), labels.remove("status")) else { continue };
        let revision = labels.get("version").and_then(|version| version.parse().ok()).unwrap_or(0);
        let known = last.entry((namespace.to_owned(), name)).or_default();
        if revision >= known.0 {
            *known = (revision, status);
        }
    }
    let one = |((namespace, instance), (revision, status))| Told {
        by: Teller::Helm,
        namespace,
        instance,
        name: String::new(),
        version: String::new(),
        status: format!("{status}, revision {revision}"),
    };
    // Helm keeps what was uninstalled, if it is told to.
    last.into_iter()
        .filter(|(_, (_, status))| status != "uninstalled")
        .map(one)
        .filter_map(Told::plain)
        .collect()
}

/// The kinds of objects that are read for applications.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `applications.app.k8s.io`.
    Application,
    /// `helmreleases.helm.toolkit.fluxcd.io`.
    HelmRelease,
    /// `kustomizations.kustomize.toolkit.fluxcd.io`.
    Kustomization,
    /// `applications.argoproj.io`.
    ArgoApplication,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 4] =
        [Self::Application, Self::HelmRelease, Self::Kustomization, Self::ArgoApplication];

    /// Returns the API group.
    pub fn group(self) -> &'static str {
        match self {
            Self::Application => "app.k8s.io",
            Self::HelmRelease => "helm.toolkit.fluxcd.io",
            Self::Kustomization => "kustomize.toolkit.fluxcd.io",
            Self::ArgoApplication => "argoproj.io",
        }
    }

    /// Returns the name in paths.
    pub fn plural(self) -> &'static str {
        match self {
            Self::Application | Self::ArgoApplication => "applications",
            Self::HelmRelease => "helmreleases",
            Self::Kustomization => "kustomizations",
        }
    }
}

/// A page of objects.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Page {
    /// What they tell.
    pub told: Vec<Told>,
    /// Names the next page; empty: there is none.
    pub next: String,
}

#[derive(Deserialize)]
struct RawList {
    #[serde(default)]
    metadata: RawListMeta,
    #[serde(default)]
    items: Vec<RawItem>,
}

#[derive(Deserialize, Default)]
struct RawListMeta {
    #[serde(default, rename = "continue")]
    next: String,
}

/// The parts of all kinds that are read. Objects that were written by other versions may lack any of them.
#[derive(Deserialize, Default)]
#[serde(default)]
struct RawItem {
    metadata: Meta,
    spec: Spec,
    status: Status,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Meta {
    name: String,
    namespace: String,
}

#[derive(Deserialize, Default)]
#[serde(default, rename_all = "camelCase")]
struct Spec {
    descriptor: Descriptor,
    release_name: String,
    target_namespace: String,
    chart: Option<Chart>,
    chart_ref: Option<Named>,
    source_ref: Option<Named>,
    destination: Named,
    source: Option<Source>,
    sources: Vec<Source>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Descriptor {
    #[serde(rename = "type")]
    kind: String,
    version: String,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Chart {
    spec: ChartSpec,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct ChartSpec {
    chart: String,
    version: String,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Named {
    name: String,
    namespace: String,
}

#[derive(Deserialize, Default)]
#[serde(default, rename_all = "camelCase")]
struct Source {
    chart: String,
    target_revision: String,
    #[serde(rename = "repoURL")]
    repository: String,
}

#[derive(Deserialize, Default)]
#[serde(default, rename_all = "camelCase")]
struct Status {
    history: Vec<Release>,
    last_applied_revision: String,
    last_attempted_revision: String,
    conditions: Vec<Condition>,
    sync: Sync,
    health: Health,
}

#[derive(Deserialize, Default)]
#[serde(default, rename_all = "camelCase")]
struct Release {
    chart_name: String,
    chart_version: String,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Condition {
    #[serde(rename = "type")]
    kind: String,
    status: String,
    reason: String,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Sync {
    status: String,
    revision: String,
    revisions: Vec<String>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Health {
    status: String,
}

/// Reads a list of objects.
///
/// # Errors
/// If it is none.
pub fn page(kind: Kind, bytes: &[u8]) -> Result<Page, Unreadable> {
    // An array would pass as a list without fields.
    if bytes.trim_ascii_start().first() != Some(&b'{') {
        return Err(Unreadable::new("it is not a JSON object"));
    }
    let list: RawList = serde_json::from_slice(bytes).map_err(|error| Unreadable::new(&error.to_string()))?;
    let told = list.items.into_iter().filter_map(|item| told(kind, item));
    Ok(Page { told: told.collect(), next: list.metadata.next })
}

/// Returns what an object tells; `None`: it has no name that could be one.
fn told(kind: Kind, item: RawItem) -> Option<Told> {
    let RawItem { metadata: Meta { name, namespace }, spec, status } = item;
    let ready = || {
        let ready = status.conditions.iter().find(|condition| condition.kind == "Ready");
        ready.map_or_else(String::new, |ready| match (ready.status.as_str(), ready.reason.as_str()) {
            ("True", _) => "ready".to_owned(),
            (_, "") => "not ready".to_owned(),
            (_, reason) => format!("not ready: {reason}"),
        })
    };
    let told = match kind {
        Kind::Application => Told {
            by: Teller::Application,
            namespace,
            instance: name,
            name: spec.descriptor.kind,
            version: spec.descriptor.version,
            status: ready(),
        },
        Kind::HelmRelease => {
            let chart = spec.chart.map(|chart| chart.spec).unwrap_or_default();
            let last = status.history.first();
            let asked = if is_exact(&chart.version) { chart.version } else { String::new() };
            Told {
                by: Teller::Flux,
                status: ready(),
                // By default, Flux joins them.
                instance: match (spec.release_name, spec.target_namespace.as_str()) {
                    (release, _) if !release.is_empty() => release,
                    (_, "") => name,
                    (_, target) => format!("{target}-{name}"),
                },
                namespace: first([spec.target_namespace, namespace]),
                name: first([
                    last.map(|last| last.chart_name.clone()).unwrap_or_default(),
                    chart.chart,
                    spec.chart_ref.map(|it| it.name).unwrap_or_default(),
                ]),
                version: first([
                    last.map(|last| last.chart_version.clone()).unwrap_or_default(),
                    status.last_attempted_revision.clone(),
                    asked,
                ]),
            }
        }
        Kind::Kustomization => Told {
            by: Teller::Flux,
            status: ready(),
            instance: name,
            namespace: first([spec.target_namespace, namespace]),
            name: spec.source_ref.map(|it| it.name).unwrap_or_default(),
            version: status.last_applied_revision.clone(),
        },
        Kind::ArgoApplication => {
            let source = spec.source.or_else(|| spec.sources.into_iter().next()).unwrap_or_default();
            let Sync { status: sync, revision, revisions } = status.sync;
            let joined = [sync, status.health.status];
            let words: Vec<&str> =
                joined.iter().map(String::as_str).filter(|word| !word.is_empty()).collect();
            Told {
                by: Teller::Argo,
                status: words.join(", "),
                instance: name,
                namespace: first([spec.destination.namespace, namespace]),
                version: first([revision, revisions.into_iter().next().unwrap_or_default(), {
                    if is_exact(&source.target_revision) { source.target_revision } else { String::new() }
                }]),
                name: first([source.chart, repository(&source.repository)]),
            }
        }
    };
    told.plain()
}

/// Returns the first text that is not empty.
fn first<const N: usize>(texts: [String; N]) -> String {
    texts.into_iter().find(|text| !text.is_empty()).unwrap_or_default()
}

/// Whether a version is one, and no range, branch or pattern.
fn is_exact(version: &str) -> bool {
    let number = version.strip_prefix('v').unwrap_or(version);
    number.split('.').count() >= 3
        && number.starts_with(|first: char| first.is_ascii_digit())
        && number.bytes().all(|byte| byte.is_ascii_alphanumeric() || b".+-".contains(&byte))
        && !number.split('.').any(|part| part == "x")
}

/// Returns the last part of the URL of a repository.
fn repository(url: &str) -> String {
    let name = url.trim_end_matches('/').rsplit('/').next().unwrap_or_default();
    name.trim_end_matches(".git").to_owned()
}

/// Returns a text without control characters, which is cut if it is long.
fn kept(text: String) -> String {
    if text.len() <= LONGEST && !text.contains(char::is_control) {
        return text;
    }
    let mut kept = String::new();
    for c in text.chars().filter(|c| !c.is_control()) {
        if kept.len() + c.len_utf8() > LONGEST {
            break;
        }
        kept.push(c);
    }
    kept
}

/// For fuzzing: a list of any kind. No panic, and what is kept is short.
#[cfg(feature = "fuzzing")]
pub fn fuzz(bytes: &[u8]) {
    let is_short = |error: &Unreadable| error.to_string().len() < 4 * 1_024;
    if let Err(error) = crate::inventory::groups(bytes) {
        assert!(is_short(&error), "{error}");
    }
    for kind in Kind::ALL {
        let page = match page(kind, bytes) {
            Ok(page) => page,
            Err(error) => {
                assert!(is_short(&error), "{error}");
                continue;
            }
        };
        let count = page.told.len();
        for told in &page.told {
            assert!(told.instance.len() <= LONGEST && !told.instance.is_empty());
            assert!(told.version.len() <= LONGEST && !told.version.contains(char::is_control));
        }
        assert!(merge(page.told).0.len() <= count);
    }
    if let Ok(text) = std::str::from_utf8(bytes) {
        let images = crate::inventory::images(text);
        assert!(images.len() <= 50);
        let _ = (crate::inventory::labels(text), crate::inventory::ports(text));
    }
}

#[cfg(test)]
mod tests;
