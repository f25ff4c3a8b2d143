//! Parses `kas.yaml` of an agent, a file beside its `config.yaml` that GitLab does not read.

pub mod hooks;

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use fleet::{ServiceAddress, is_label_key, is_label_value};
use ids::{Impersonation, Pattern};
use promql::Scope;
use serde_json::Value;
use settings::walk::{self, Rule, Section, Unknown};

use self::hooks::Hooks;

/// The time between two checks for drift.
const CHECK: Duration = Duration::from_secs(300);
/// The shortest and the longest time between two checks.
const CHECKS: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(24 * 3_600));
/// The most namespaces, environments or projects.
const MOST: usize = 1_000;
/// The most labels.
const MOST_LABELS: usize = 64;
/// The longest prefix of the paths of Prometheus, in bytes.
const LONGEST_PREFIX: usize = 256;
/// The longest name of an environment, in bytes: that of GitLab.
const LONGEST_NAME: usize = 255;

/// A parsed file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KasYaml {
    /// The environments that the agent stands for, such as `production` or `review/*`.
    pub environments: Vec<Pattern>,
    /// The only namespaces that kas writes to; `None`: the whole cluster.
    pub namespaces: Option<BTreeSet<String>>,
    /// The time between two checks for drift.
    pub check: Duration,
    /// As whom manifest projects are applied, by their names: service accounts.
    pub identities: BTreeMap<String, Impersonation>,
    /// Labels by which selectors of agents find it.
    pub labels: BTreeMap<String, String>,
    /// Where Prometheus is in the cluster; `None`: nowhere.
    pub prometheus: Option<Prometheus>,
    /// Whether Helm's Secrets may be read for the list of applications.
    pub helm: bool,
    /// The webhooks that the agent takes.
    pub hooks: Hooks,
}

/// A Prometheus server in the cluster of an agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prometheus {
    /// The Service.
    pub service: ServiceAddress,
    /// What its paths begin with: empty, or a path without a slash at its end.
    pub prefix: String,
    /// What of its data may be asked for; `None`: everything.
    pub scope: Option<Scope>,
}

impl Default for KasYaml {
    fn default() -> Self {
        Self {
            environments: Vec::new(),
            namespaces: None,
            check: CHECK,
            identities: BTreeMap::new(),
            labels: BTreeMap::new(),
            prometheus: None,
            helm: false,
            hooks: Hooks::default(),
        }
    }
}

/// Parses a file; an empty one is valid.
///
/// # Errors
/// A text for the author: where something is wrong, and what would be right.
pub fn parse(file: &[u8]) -> Result<KasYaml, String> {
    let text = std::str::from_utf8(file).map_err(|_| "the file is not UTF-8".to_owned())?;
    let size = settings::yaml::Size::Small;
    let mut root = settings::yaml::parse(text, size).map_err(|problem| problem.to_string())?;
    // The names of projects and labels are keys, so they are read without the walk.
    let labels = root.as_object_mut().and_then(|root| root.remove("labels"));
    let projects = root.get_mut("gitops").and_then(Value::as_object_mut).and_then(|it| it.remove("projects"));
    let hooks = root.as_object_mut().and_then(|root| root.remove("hooks"));
    let (mut parsed, report) = walk::walk(&root, Unknown::Fails, read);
    if let Some(problem) = report.problems.first() {
        return Err(problem.to_string());
    }
    parsed.identities = identities(projects)?;
    parsed.labels = self::labels(labels)?;
    parsed.hooks = Hooks::parse(hooks)?;
    if let Some(namespaces) = &parsed.namespaces {
        for (at, hook) in parsed.hooks.list().iter().enumerate() {
            if hook.deliver.namespace().is_none_or(|namespace| !namespaces.contains(namespace)) {
                return Err(format!("hooks[{at}].deliver: expected a namespace of the list namespaces"));
            }
        }
    }
    for (key, count) in [
        ("environments", parsed.environments.len()),
        ("namespaces", parsed.namespaces.as_ref().map_or(0, BTreeSet::len)),
        ("gitops.projects", parsed.identities.len()),
    ] {
        if count > MOST {
            return Err(format!("{key} has {count} items; at most {MOST} are read"));
        }
    }
    Ok(parsed)
}

fn read(root: &mut Section<'_, '_>) -> KasYaml {
    let environments = root.texts("environments", &[], "").into_iter().filter_map(|name| {
        let pattern = Some(&name).filter(|name| is_environment(name)).and_then(|name| name.parse().ok());
        if pattern.is_none() {
            let expected = "names of at most 255 bytes without control characters, with `*` only at the end";
            root.refuse_as("environments", format!("{name:?}"), expected);
        }
        pattern
    });
    let environments: Vec<Pattern> = environments.collect();
    let is_bound = root.has("namespaces");
    let namespaces: BTreeSet<String> = root.texts("namespaces", &[], "").into_iter().collect();
    if let Some(wrong) = namespaces.iter().find(|name| !is_name(name)) {
        root.refuse_as("namespaces", format!("{wrong:?}"), "names of namespaces");
    }
    if is_bound && namespaces.is_empty() && !root.is_refused("namespaces") {
        root.refuse("namespaces", "at least one namespace, or no such key for the whole cluster");
    }
    let check =
        root.section("gitops", "", |s| s.duration("check", CHECK, Rule::Within(CHECKS.0, CHECKS.1), ""));
    let prometheus = root.section("prometheus", "", prometheus);
    let helm = root.section("applications", "", |s| s.flag("helm", ""));
    KasYaml {
        environments,
        namespaces: is_bound.then_some(namespaces),
        check,
        prometheus,
        helm,
        ..KasYaml::default()
    }
}

fn prometheus(section: &mut Section<'_, '_>) -> Option<Prometheus> {
    let expected = "a Service as namespace/name:port, such as monitoring/prometheus:9090";
    let service = section.required("service", "monitoring/prometheus:9090", expected, "");
    let prefix = section.text("prefix", "", "");
    let scope = section.optional_text("match", r#"{namespace="shop"}"#, "");
    if !section.is_present() {
        return None;
    }
    let service: Option<ServiceAddress> = service.parse().ok();
    if service.is_none() && !section.is_refused("service") {
        section.refuse("service", expected);
    }
    let trimmed = prefix.trim_end_matches('/');
    if !is_prefix(trimmed) || prefix.ends_with("//") {
        section.refuse("prefix", "a path such as /prometheus, of letters, digits, -, _ and .");
    }
    let scope = match scope.as_deref().map(Scope::parse) {
        None => None,
        Some(Ok(scope)) => Some(scope),
        Some(Err(refused)) => {
            section.refuse("match", refused.to_string());
            None
        }
    };
    Some(Prometheus { service: service?, prefix: trimmed.to_owned(), scope })
}

/// Whether a text can be what the paths of a server begin with: [`Prometheus::prefix`].
pub fn is_prefix(text: &str) -> bool {
    let is_inner = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'/' | b'-' | b'_' | b'.');
    text.len() <= LONGEST_PREFIX
        && (text.is_empty() || text.starts_with('/') && !text.ends_with('/'))
        && text.bytes().all(is_inner)
        && !text.split('/').any(|part| matches!(part, "." | ".."))
        && !text.contains("//")
}

fn labels(labels: Option<Value>) -> Result<BTreeMap<String, String>, String> {
    const EXPECTED: &str = "expected a mapping such as {env: prod, region: eu-west}";
    let labels = match labels {
        None | Some(Value::Null) => return Ok(BTreeMap::new()),
        Some(Value::Object(labels)) => labels,
        Some(_) => return Err(format!("labels: {EXPECTED}")),
    };
    if labels.len() > MOST_LABELS {
        return Err(format!("labels has {} items; at most {MOST_LABELS} are read", labels.len()));
    }
    let mut read = BTreeMap::new();
    for (key, value) in labels {
        if !is_label_key(&key) {
            return Err(format!(
                "labels.{key}: expected a key of at most 63 letters, digits, -, _ and ., other than id, project, \
                 name and all"
            ));
        }
        let value = match value {
            Value::String(value) => value,
            Value::Number(number) => number.to_string(),
            Value::Bool(value) => value.to_string(),
            _ => return Err(format!("labels.{key}: expected a text")),
        };
        if !is_label_value(&value) {
            return Err(format!(
                "labels.{key}: expected at most 63 letters, digits, -, _ and ., with a letter or digit at both ends"
            ));
        }
        read.insert(key, value);
    }
    Ok(read)
}

fn identities(projects: Option<Value>) -> Result<BTreeMap<String, Impersonation>, String> {
    const EXPECTED: &str = "expected a mapping such as {group/project: {as: system:serviceaccount:ns:name}}";
    let projects = match projects {
        None | Some(Value::Null) => return Ok(BTreeMap::new()),
        Some(Value::Object(projects)) => projects,
        Some(_) => return Err(format!("gitops.projects: {EXPECTED}")),
    };
    let mut identities = BTreeMap::new();
    for (name, value) in projects {
        let place = format!("gitops.projects.{name}");
        let Value::Object(keys) = value else { return Err(format!("{place}: {EXPECTED}")) };
        for (key, value) in keys {
            if key != "as" {
                return Err(format!("{place}.{key}: unknown key; {EXPECTED}"));
            }
            let wrong = || format!("{place}.as: expected a service account, system:serviceaccount:ns:name");
            let user = value.as_str().ok_or_else(wrong)?;
            let identity = Impersonation { username: user.to_owned(), ..Impersonation::default() };
            if !user.starts_with("system:serviceaccount:") || identity.check(true).is_err() {
                return Err(wrong());
            }
            identities.insert(name.clone(), identity);
        }
    }
    Ok(identities)
}

/// Whether a text can be the name of an environment.
fn is_environment(name: &str) -> bool {
    name.len() <= LONGEST_NAME && !name.chars().any(char::is_control)
}

/// Whether a text can be the name of a namespace.
fn is_name(text: &str) -> bool {
    let bytes = text.as_bytes();
    let is_inner = |byte: &u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || *byte == b'-';
    (1..=63).contains(&bytes.len())
        && bytes.iter().all(is_inner)
        && bytes.first() != Some(&b'-')
        && bytes.last() != Some(&b'-')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_file_has_the_defaults() {
        assert_eq!(parse(b""), Ok(KasYaml::default()));
        assert_eq!(parse(b"# nothing\n"), Ok(KasYaml::default()));
    }

    #[test]
    fn every_key_is_read() {
        let file = "
environments: [production, review/*]
namespaces: [a, b]
gitops:
  check: 1m
  projects:
    group/x.y: {as: system:serviceaccount:ns:deployer}
labels: {env: prod, tier: 1}
applications: {helm: true}
prometheus: {service: monitoring/prometheus:9090, prefix: /prom/, match: '{namespace=\"shop\"}'}
";
        let parsed = parse(file.as_bytes()).unwrap();
        let environments: Vec<String> = parsed.environments.iter().map(ToString::to_string).collect();
        assert_eq!(environments, ["production", "review/*"]);
        assert_eq!(parsed.namespaces, Some(["a", "b"].map(str::to_owned).into()));
        assert_eq!(parsed.check, Duration::from_secs(60));
        assert_eq!(parsed.identities["group/x.y"].username, "system:serviceaccount:ns:deployer");
        let labels: Vec<_> = parsed.labels.iter().map(|(key, value)| format!("{key}={value}")).collect();
        assert_eq!(labels, ["env=prod", "tier=1"]);
        assert!(parsed.helm);
        let prometheus = parsed.prometheus.unwrap();
        assert_eq!(prometheus.service.to_string(), "monitoring/prometheus:9090");
        assert_eq!(prometheus.prefix, "/prom");
        assert_eq!(prometheus.scope.unwrap().to_string(), r#"{namespace="shop"}"#);
    }

    #[test]
    fn a_wrong_file_is_refused_with_its_place() {
        for (file, place) in [
            ("environment: [a]", "environment"),
            ("environments: ['']", "environments"),
            ("environments: ['*/review']", "environments"),
            ("environments: [\"a\\tb\"]", "environments"),
            ("namespaces: []", "namespaces"),
            ("namespaces: [A]", "namespaces"),
            ("gitops: {check: 1ms}", "gitops.check"),
            ("gitops: {chek: 1m}", "gitops.chek"),
            ("gitops: {projects: [a]}", "gitops.projects"),
            ("gitops: {projects: {a: {as: jane}}}", "gitops.projects.a.as"),
            ("gitops: {projects: {a: {as: 'system:serviceaccount:ns'}}}", "gitops.projects.a.as"),
            ("gitops: {projects: {a: {like: b}}}", "gitops.projects.a.like"),
            ("labels: [a]", "labels"),
            ("labels: {name: a}", "labels.name"),
            ("labels: {env: 'a b'}", "labels.env"),
            ("labels: {env: [a]}", "labels.env"),
            ("applications: {helm: maybe}", "applications.helm"),
            ("prometheus: {}", "prometheus.service"),
            ("prometheus: {service: a}", "prometheus.service"),
            ("prometheus: {service: 'a/b:1', prefix: ../x}", "prometheus.prefix"),
            ("prometheus: {service: 'a/b:1', match: up}", "prometheus.match"),
            ("prometheus: {service: 'a/b:1', scope: up}", "prometheus.scope"),
            ("[1]", ""),
            ("a: [", ""),
        ] {
            let error = parse(file.as_bytes()).unwrap_err();
            assert!(error.contains(place), "{file}: {error}");
        }
        assert!(parse(b"\xff").is_err());
    }
}
