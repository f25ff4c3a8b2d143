//! [`View`]: which resources are shown together, and which of their columns.

use serde::Deserialize;
use serde_json::Value;

/// The most resources of a view.
const MOST_RESOURCES: usize = 8;
/// The most columns that a view can name.
const MOST_COLUMNS: usize = 64;
/// The most views of all files.
const MOST_VIEWS: usize = 256;
/// Names of rows that are no objects, and that no view can have.
const OTHERS: [&str; 2] = ["components", "applications"];
/// The longest name, selector or title in a view, in bytes.
const LONGEST: usize = 1024;

/// What an API server is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Form {
    /// Printed rows, as for `kubectl get`.
    Table,
    /// Only metadata, from an API server that prints nothing: rows have a name and an age.
    Metadata,
    /// Events, as objects.
    Events,
}

/// A resource of a view.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Resource {
    /// The API group; empty: the core group.
    pub group: String,
    /// The version; empty: the one that the API server prefers.
    pub version: String,
    /// The name of the resource, such as `deployments`.
    pub plural: String,
    /// Only objects with these labels; empty: all.
    pub labels: String,
    /// Only objects with these fields; empty: all.
    pub fields: String,
    /// What the API server is asked for.
    pub form: Form,
}

impl Resource {
    /// Returns how a resource is named, such as `deployments.apps`.
    pub fn name(&self) -> String {
        if self.group.is_empty() { self.plural.clone() } else { format!("{}.{}", self.plural, self.group) }
    }
}

/// Which resources are shown together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct View {
    /// The name by which it is asked for.
    pub name: String,
    /// The resources, 1 to 8; empty for [`View::SUMMARY`], which counts objects.
    pub resources: Vec<Resource>,
    /// The titles of the columns that are shown; empty: those that `kubectl get` shows.
    pub columns: Vec<String>,
    /// Further names of columns, for filters.
    pub aliases: Vec<(String, String)>,
}

/// Why a view cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{at}: {why}")]
pub struct InvalidView {
    /// Where, such as `views[2].resources[0].group`.
    pub at: String,
    /// Why, and what would be right.
    pub why: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawFile {
    views: Vec<RawView>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawView {
    name: String,
    resources: Vec<RawResource>,
    #[serde(default)]
    columns: Vec<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawResource {
    #[serde(default)]
    group: String,
    #[serde(default)]
    version: String,
    resource: String,
    #[serde(default)]
    labels: String,
    #[serde(default)]
    fields: String,
}

fn is_name(name: &str) -> bool {
    let legal = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    (1..=63).contains(&name.len())
        && name.bytes().all(legal)
        && !name.starts_with('-')
        && !name.ends_with('-')
}

fn is_dns(name: &str) -> bool {
    name.len() <= 253 && name.split('.').all(is_name)
}

impl View {
    /// The name of the view that counts objects of each agent.
    pub const SUMMARY: &str = "summary";

    /// Whether it counts objects instead of showing them.
    pub fn is_summary(&self) -> bool {
        self.resources.is_empty()
    }

    /// Returns the resources that a summary counts, and the titles of the counts.
    pub fn counted() -> [(&'static str, Resource); 4] {
        [
            ("Nodes", resource("", "v1", "nodes", Form::Metadata)),
            ("Namespaces", resource("", "v1", "namespaces", Form::Metadata)),
            ("Pods", resource("", "v1", "pods", Form::Metadata)),
            ("Deployments", resource("apps", "v1", "deployments", Form::Metadata)),
        ]
    }
}

fn resource(group: &str, version: &str, plural: &str, form: Form) -> Resource {
    Resource {
        group: group.to_owned(),
        version: version.to_owned(),
        plural: plural.to_owned(),
        labels: String::new(),
        fields: String::new(),
        form,
    }
}

/// The views that there are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Definitions(Vec<View>);

impl Default for Definitions {
    /// Those that are built in.
    fn default() -> Self {
        let view = |name: &str, resources: Vec<Resource>| View {
            name: name.to_owned(),
            resources,
            columns: Vec::new(),
            aliases: Vec::new(),
        };
        let columns = ["Ready", "Up-to-date", "Available", "Desired", "Completions", "Age"];
        Self(vec![
            view("nodes", vec![resource("", "v1", "nodes", Form::Table)]),
            View {
                aliases: vec![("phase".to_owned(), "Status".to_owned())],
                ..view("pods", vec![resource("", "v1", "pods", Form::Table)])
            },
            View {
                columns: columns.map(str::to_owned).into(),
                ..view(
                    "workloads",
                    vec![
                        resource("apps", "v1", "deployments", Form::Table),
                        resource("apps", "v1", "statefulsets", Form::Table),
                        resource("apps", "v1", "daemonsets", Form::Table),
                        resource("batch", "v1", "jobs", Form::Table),
                    ],
                )
            },
            view("events", vec![resource("", "v1", "events", Form::Events)]),
            view(View::SUMMARY, Vec::new()),
        ])
    }
}

impl Definitions {
    /// Returns a view by its name.
    pub fn get(&self, name: &str) -> Option<&View> {
        self.0.iter().find(|view| view.name == name)
    }

    /// Returns the names of all views.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|view| &*view.name)
    }

    /// Adds the views of a file: `{views: [{name, resources: [{group, version, resource, labels, fields}],
    /// columns}]}`.
    ///
    /// # Errors
    /// The first thing that is wrong. Nothing was added then.
    pub fn add(&mut self, file: Value) -> Result<(), InvalidView> {
        let invalid = |at: &str, why: String| InvalidView { at: at.to_owned(), why };
        let expected =
            "expected views: [{name, resources: [{group, version, resource, labels, fields}], columns}]";
        let file: RawFile =
            serde_json::from_value(file).map_err(|error| invalid("views", format!("{error}; {expected}")))?;
        let mut all = self.0.clone();
        for (n, raw) in file.views.into_iter().enumerate() {
            let at = format!("views[{n}]");
            if all.len() >= MOST_VIEWS {
                return Err(invalid(&at, format!("there are more than {MOST_VIEWS} views")));
            }
            if !is_name(&raw.name) {
                let why = "expected 1 to 63 of a-z, 0-9 and inner `-`".to_owned();
                return Err(invalid(&format!("{at}.name"), why));
            }
            if OTHERS.contains(&&*raw.name) {
                let why = format!("{} are rows that kas makes by itself", raw.name);
                return Err(invalid(&format!("{at}.name"), why));
            }
            if all.iter().any(|view| view.name == raw.name) {
                return Err(invalid(&format!("{at}.name"), format!("there is a view {} already", raw.name)));
            }
            if !(1..=MOST_RESOURCES).contains(&raw.resources.len()) {
                let why = format!("expected 1 to {MOST_RESOURCES} resources, got {}", raw.resources.len());
                return Err(invalid(&format!("{at}.resources"), why));
            }
            if raw.columns.len() > MOST_COLUMNS
                || raw.columns.iter().any(|name| !(1..=LONGEST).contains(&name.len()))
            {
                let why = format!("expected at most {MOST_COLUMNS} titles of 1 to {LONGEST} bytes");
                return Err(invalid(&format!("{at}.columns"), why));
            }
            let mut resources = Vec::new();
            for (m, raw) in raw.resources.into_iter().enumerate() {
                resources.push(raw.checked(&format!("{at}.resources[{m}]"))?);
            }
            all.push(View { name: raw.name, resources, columns: raw.columns, aliases: Vec::new() });
        }
        self.0 = all;
        Ok(())
    }
}

impl RawResource {
    fn checked(self, at: &str) -> Result<Resource, InvalidView> {
        let invalid = |key: &str, why: &str| InvalidView { at: format!("{at}.{key}"), why: why.to_owned() };
        if !self.group.is_empty() && !is_dns(&self.group) {
            return Err(invalid(
                "group",
                "expected an API group such as apps, or nothing for the core group",
            ));
        }
        if !self.version.is_empty() && !is_name(&self.version) {
            return Err(invalid(
                "version",
                "expected a version such as v1, or nothing for the preferred one",
            ));
        }
        if !is_name(&self.resource) {
            return Err(invalid("resource", "expected the plural of a resource, such as deployments"));
        }
        if self.labels.parse::<crate::Labels>().is_err() {
            return Err(invalid("labels", "expected a label selector such as app=web,tier!=cache"));
        }
        if self.fields.len() > LONGEST {
            return Err(invalid("fields", "expected at most 1024 bytes"));
        }
        // The core group has one version.
        let version =
            if self.group.is_empty() && self.version.is_empty() { "v1".to_owned() } else { self.version };
        let is_event = self.resource == "events" && matches!(&*self.group, "" | "events.k8s.io");
        let form = if is_event && self.group.is_empty() { Form::Events } else { Form::Table };
        Ok(Resource {
            group: self.group,
            version,
            plural: self.resource,
            labels: self.labels,
            fields: self.fields,
            form,
        })
    }
}
