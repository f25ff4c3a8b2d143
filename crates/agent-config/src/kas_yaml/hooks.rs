//! The key `hooks` of `kas.yaml`: which webhooks an agent takes, and where they go.
//!
//! Replicas also send it to each other, as JSON, so it is parsed without the rest of the file too.

use std::sync::Arc;

use fleet::ServiceAddress;
use ids::TokenHash;
use serde_json::{Map, Value};

/// The most hooks of an agent.
const MOST: usize = 100;
/// The largest list of hooks as JSON, in bytes.
pub const MOST_BYTES: usize = 64 << 10;
/// The longest name of a hook or a secret.
const LONGEST_NAME: usize = 63;
/// The longest path of a receiver.
const LONGEST_PATH: usize = 1_024;
/// The longest name of an object or an annotation.
const LONGEST_OBJECT: usize = 253;

/// The hooks of an agent.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Hooks {
    list: Vec<Hook>,
    /// As JSON; empty: there are none.
    json: String,
}

/// A hook.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hook {
    /// Its name, the end of its URL.
    pub name: Arc<str>,
    /// How it is known that the sender may send it.
    pub verify: Verify,
    /// Where it goes.
    pub deliver: Deliver,
}

/// How it is known that a sender may send a hook. A text is the name of a secret of the agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verify {
    /// `X-Gitlab-Token` is the secret.
    Gitlab(String),
    /// `X-Hub-Signature-256` signs the body.
    Github(String),
    /// The headers of Standard Webhooks sign id, time and body.
    Standard(String),
    /// `Authorization: Bearer` has the secret.
    Bearer(String),
    /// The query has a key with this hash. The receiver checks the rest.
    Target(TokenHash),
}

/// Where a hook goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Deliver {
    /// As a request to a Service in the cluster.
    Service(Service),
    /// As an annotation of an object, whose value is the id of the hook.
    Annotate(Annotate),
}

/// A Service that receives hooks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Service {
    /// Where it is.
    pub address: ServiceAddress,
    /// The path of the request; it begins with `/`.
    pub path: String,
}

/// An annotation of an object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Annotate {
    /// The API group; empty: the core group.
    pub group: String,
    /// Its version.
    pub version: String,
    /// The plural of the resource.
    pub plural: String,
    /// The namespace; `None`: the resource has none.
    pub namespace: Option<String>,
    /// The name of the object.
    pub name: String,
    /// The annotation.
    pub annotation: String,
}

impl Verify {
    /// Returns the word in `kas.yaml`.
    pub fn word(&self) -> &'static str {
        match self {
            Self::Gitlab(_) => "gitlab",
            Self::Github(_) => "github",
            Self::Standard(_) => "standard",
            Self::Bearer(_) => "bearer",
            Self::Target(_) => "target",
        }
    }

    /// Returns the name of the secret; `None`: it needs none.
    pub fn secret(&self) -> Option<&str> {
        match self {
            Self::Gitlab(name) | Self::Github(name) | Self::Standard(name) | Self::Bearer(name) => Some(name),
            Self::Target(_) => None,
        }
    }
}

impl Deliver {
    /// Returns the namespace that it changes or calls; `None`: the object has none.
    pub fn namespace(&self) -> Option<&str> {
        match self {
            Self::Service(service) => Some(service.address.namespace()),
            Self::Annotate(annotate) => annotate.namespace.as_deref(),
        }
    }

    /// Describes it in a few words, for a person. The path is left out: it may be a secret.
    pub fn describe(&self) -> String {
        match self {
            Self::Service(Service { address, .. }) => format!("service {address}"),
            Self::Annotate(Annotate { plural, namespace, name, .. }) => match namespace {
                Some(namespace) => format!("{plural} {namespace}/{name}"),
                None => format!("{plural} {name}"),
            },
        }
    }
}

impl Hooks {
    /// Returns the hooks, in the order of the file.
    pub fn list(&self) -> &[Hook] {
        &self.list
    }

    /// Returns the hook of a name.
    pub fn find(&self, name: &str) -> Option<&Hook> {
        self.list.iter().find(|hook| &*hook.name == name)
    }

    /// Returns the list as JSON, for [`from_json`](Self::from_json); empty: there are none.
    pub fn json(&self) -> &str {
        &self.json
    }

    /// Parses what [`json`](Self::json) returned.
    ///
    /// # Errors
    /// As of [`parse`](Self::parse).
    pub fn from_json(json: &[u8]) -> Result<Self, String> {
        if json.is_empty() {
            return Ok(Self::default());
        }
        if json.len() > MOST_BYTES {
            return Err(format!("hooks have more than {MOST_BYTES} bytes"));
        }
        Self::parse(Some(serde_json::from_slice(json).map_err(|error| format!("hooks: {error}"))?))
    }

    /// Parses the value of the key.
    ///
    /// # Errors
    /// A text for the author: where something is wrong, and what would be right.
    pub fn parse(value: Option<Value>) -> Result<Self, String> {
        let items = match value {
            None | Some(Value::Null) => return Ok(Self::default()),
            Some(Value::Array(items)) => items,
            Some(_) => return Err("hooks: expected a list, such as [{name: push, …}]".to_owned()),
        };
        if items.len() > MOST {
            return Err(format!("hooks has {} items; at most {MOST} are read", items.len()));
        }
        if items.is_empty() {
            return Ok(Self::default());
        }
        let mut list: Vec<Hook> = Vec::with_capacity(items.len());
        for (at, item) in items.iter().enumerate() {
            let hook = hook(&Place(format!("hooks[{at}]")), item)?;
            if list.iter().any(|other| other.name == hook.name) {
                return Err(format!("hooks[{at}].name: {:?} is the name of another hook", hook.name));
            }
            list.push(hook);
        }
        let json = serde_json::to_string(&items).map_err(|error| format!("hooks: {error}"))?;
        if json.len() > MOST_BYTES {
            return Err(format!("hooks have {} bytes; at most {MOST_BYTES} are read", json.len()));
        }
        Ok(Self { list, json })
    }
}

/// Where something is in the file.
struct Place(String);

impl Place {
    fn of(&self, key: &str) -> Self {
        Self(format!("{}.{key}", self.0))
    }

    fn wrong(&self, expected: &str) -> String {
        format!("{}: expected {expected}", self.0)
    }

    /// Returns a mapping that has no other keys than these.
    fn mapping<'v>(&self, value: &'v Value, keys: &[&str]) -> Result<&'v Map<String, Value>, String> {
        let Value::Object(map) = value else {
            return Err(self.wrong(&format!("a mapping with the keys {}", keys.join(", "))));
        };
        match map.keys().find(|key| !keys.contains(&key.as_str())) {
            Some(unknown) => {
                Err(format!("{}: unknown key; expected {}", self.of(unknown).0, keys.join(", ")))
            }
            None => Ok(map),
        }
    }

    /// Returns a text of a mapping that passes a check.
    fn text(
        &self,
        map: &Map<String, Value>,
        key: &str,
        expected: &str,
        is_right: impl Fn(&str) -> bool,
    ) -> Result<String, String> {
        match map.get(key).and_then(Value::as_str).filter(|text| is_right(text)) {
            Some(text) => Ok(text.to_owned()),
            None => Err(self.of(key).wrong(expected)),
        }
    }
}

fn hook(place: &Place, value: &Value) -> Result<Hook, String> {
    let map = place.mapping(value, &["name", "verify", "deliver"])?;
    let name = place.text(
        map,
        "name",
        "lower-case letters, digits, `-`, `_` and `.`, at most 63, beginning with a letter or digit",
        is_file_name,
    )?;
    let none = Value::Null;
    let verify = verify(&place.of("verify"), map.get("verify").unwrap_or(&none))?;
    let deliver = deliver(&place.of("deliver"), map.get("deliver").unwrap_or(&none))?;
    Ok(Hook { name: name.into(), verify, deliver })
}

fn verify(place: &Place, value: &Value) -> Result<Verify, String> {
    const KEYS: [&str; 5] = ["gitlab", "github", "standard", "bearer", "target"];
    let map = place.mapping(value, &KEYS)?;
    let (Some((key, _)), 1) = (map.iter().next(), map.len()) else {
        return Err(place.wrong(&format!("exactly one of {}", KEYS.join(", "))));
    };
    let secret = || {
        let expected = "the name of a secret: lower-case letters, digits, `-`, `_` and `.`";
        place.text(map, key, expected, is_file_name)
    };
    Ok(match key.as_str() {
        "gitlab" => Verify::Gitlab(secret()?),
        "github" => Verify::Github(secret()?),
        "standard" => Verify::Standard(secret()?),
        "bearer" => Verify::Bearer(secret()?),
        _ => {
            let hash = map.get(key).and_then(Value::as_str).filter(|text| text.starts_with("sha256:"));
            let hash = hash.and_then(|text| text.parse().ok());
            Verify::Target(hash.ok_or_else(|| {
                place.of(key).wrong("sha256: and the 64 hexadecimal digits of the key's SHA-256")
            })?)
        }
    })
}

fn deliver(place: &Place, value: &Value) -> Result<Deliver, String> {
    let map = place.mapping(value, &["service", "scheme", "path", "annotate"])?;
    match (map.get("service"), map.get("annotate")) {
        (Some(_), None) => service(place, map).map(Deliver::Service),
        (None, Some(annotated)) if map.len() == 1 => {
            annotate(&place.of("annotate"), annotated).map(Deliver::Annotate)
        }
        _ => Err(place.wrong("either service, with path and scheme, or annotate")),
    }
}

fn service(place: &Place, map: &Map<String, Value>) -> Result<Service, String> {
    let expected = "a Service as namespace/name:port, such as flux-system/webhook-receiver:80, or \
                    web/https:app:443 for one that speaks TLS";
    let is_right = |text: &str| text.parse::<ServiceAddress>().is_ok();
    let mut text = place.text(map, "service", expected, is_right)?;
    match map.get("scheme") {
        None => {}
        Some(Value::String(scheme)) if scheme == "http" || scheme == "https" => {
            let scheme = format!("/{scheme}:");
            if text.matches(':').count() > 1 {
                let other = "http or https once: service has a scheme, too";
                return Err(place.of("scheme").wrong(other));
            }
            text = text.replacen('/', &scheme, 1);
        }
        Some(_) => return Err(place.of("scheme").wrong("http or https")),
    }
    let address = text.parse().map_err(|_| place.of("service").wrong(expected))?;
    let path = match map.get("path") {
        None => "/".to_owned(),
        Some(_) => place.text(
            map,
            "path",
            "a path that begins with `/`, without query, `%`, `//` and `..`, at most 1024 characters",
            is_path,
        )?,
    };
    Ok(Service { address, path })
}

fn annotate(place: &Place, value: &Value) -> Result<Annotate, String> {
    let map = place.mapping(value, &["resource", "namespace", "name", "annotation"])?;
    let expected =
        "group, version and plural, such as source.toolkit.fluxcd.io/v1/gitrepositories, or v1/configmaps";
    let resource = place.text(map, "resource", expected, |_| true)?;
    let parts: Vec<&str> = resource.split('/').collect();
    let (group, version, plural) = match parts.as_slice() {
        [version, plural] => ("", *version, *plural),
        [group, version, plural] if is_subdomain(group) => (*group, *version, *plural),
        _ => return Err(place.of("resource").wrong(expected)),
    };
    if !is_label(version) || !is_label(plural) {
        return Err(place.of("resource").wrong(expected));
    }
    let namespace = match map.get("namespace") {
        None | Some(Value::Null) => None,
        Some(_) => Some(place.text(map, "namespace", "the name of a namespace", is_label)?),
    };
    Ok(Annotate {
        group: group.to_owned(),
        version: version.to_owned(),
        plural: plural.to_owned(),
        namespace,
        name: place.text(map, "name", "the name of an object", is_subdomain)?,
        annotation: place.text(
            map,
            "annotation",
            "the name of an annotation, such as reconcile.fluxcd.io/requestedAt",
            is_annotation,
        )?,
    })
}

/// Whether a text can be the name of a hook or of a secret: of a file, too.
pub fn is_file_name(text: &str) -> bool {
    let is_inner =
        |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || matches!(byte, b'-' | b'_' | b'.');
    (1..=LONGEST_NAME).contains(&text.len())
        && text.bytes().all(is_inner)
        && text.bytes().next().is_some_and(|byte| byte.is_ascii_alphanumeric())
}

/// Whether a text is a label as in names of Kubernetes.
fn is_label(text: &str) -> bool {
    super::is_name(text)
}

fn is_subdomain(text: &str) -> bool {
    (1..=LONGEST_OBJECT).contains(&text.len()) && text.split('.').all(is_label)
}

fn is_path(text: &str) -> bool {
    let is_right = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~!$&'()*+,;=:@/".contains(&byte);
    text.len() <= LONGEST_PATH
        && text.starts_with('/')
        && text.bytes().all(is_right)
        && !text.contains("//")
        && !text.split('/').any(|segment| segment == "." || segment == "..")
}

fn is_annotation(text: &str) -> bool {
    let (prefix, name) = text.split_once('/').map_or((None, text), |(prefix, name)| (Some(prefix), name));
    let is_inner = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    let is_end = |byte: Option<u8>| byte.is_some_and(|byte| byte.is_ascii_alphanumeric());
    prefix.is_none_or(is_subdomain)
        && (1..=LONGEST_NAME).contains(&name.len())
        && name.bytes().all(is_inner)
        && is_end(name.bytes().next())
        && is_end(name.bytes().last())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(yaml: &str) -> Result<Hooks, String> {
        super::super::parse(format!("hooks:\n- {yaml}\n").as_bytes()).map(|parsed| parsed.hooks)
    }

    const TARGET: &str = "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08";

    #[test]
    fn hooks_are_read_and_read_again_from_json() {
        let hooks = parsed(&format!(
            "{{name: flux, verify: {{target: '{TARGET}'}}, deliver: {{service: 'flux-system/webhook-receiver:80', path: /hook/4f2a}}}}
- {{name: push, verify: {{github: push}}, deliver: {{annotate: {{resource: source.toolkit.fluxcd.io/v1/gitrepositories,
   namespace: flux-system, name: app, annotation: reconcile.fluxcd.io/requestedAt}}}}}}
- {{name: gl.2, verify: {{gitlab: a}}, deliver: {{service: 'a/b:web', scheme: https}}}}
- {{name: node, verify: {{standard: s_1}}, deliver: {{annotate: {{resource: v1/nodes, name: n1, annotation: touched}}}}}}"
        ))
        .unwrap();
        let words: Vec<_> = hooks.list().iter().map(|hook| hook.verify.word()).collect();
        assert_eq!(words, ["target", "github", "gitlab", "standard"]);
        let described: Vec<_> = hooks.list().iter().map(|hook| hook.deliver.describe()).collect();
        assert_eq!(
            described,
            [
                "service flux-system/webhook-receiver:80",
                "gitrepositories flux-system/app",
                "service a/https:b:web",
                "nodes n1"
            ]
        );
        let Deliver::Service(service) = &hooks.find("flux").unwrap().deliver else { panic!() };
        assert_eq!((service.address.is_https(), &*service.path), (false, "/hook/4f2a"));
        let other = parsed(&format!(
            "{{name: a, verify: {{target: '{TARGET}'}}, deliver: {{service: 'a/https:b:1'}}}}"
        ))
        .unwrap();
        let Deliver::Service(service) = &other.list()[0].deliver else { panic!() };
        assert_eq!(service.address.proxied(), "https:b:1");
        assert_eq!(Hooks::from_json(hooks.json().as_bytes()), Ok(hooks.clone()));
        assert_eq!(Hooks::from_json(b""), Ok(Hooks::default()));
        assert!(Hooks::from_json(b"{").is_err());
        assert!(hooks.find("other").is_none());
    }

    #[test]
    fn a_wrong_hook_is_refused_with_its_place() {
        let deliver = "deliver: {service: 'a/b:80'}";
        let verify = "verify: {github: a}";
        for (hook, place) in [
            ("[]".to_owned(), "hooks[0]: expected a mapping"),
            (format!("{{name: A, {verify}, {deliver}}}"), "hooks[0].name"),
            (format!("{{name: ../x, {verify}, {deliver}}}"), "hooks[0].name"),
            (format!("{{name: a, {deliver}}}"), "hooks[0].verify"),
            (format!("{{name: a, {verify}}}"), "hooks[0].deliver"),
            (format!("{{name: a, verify: {{}}, {deliver}}}"), "exactly one of gitlab"),
            (format!("{{name: a, verify: {{github: a, gitlab: b}}, {deliver}}}"), "exactly one"),
            (format!("{{name: a, verify: {{github: ../../etc}}, {deliver}}}"), "verify.github"),
            (format!("{{name: a, verify: {{target: abc}}, {deliver}}}"), "verify.target"),
            (format!("{{name: a, verify: {{none: a}}, {deliver}}}"), "verify.none: unknown key"),
            (format!("{{name: a, {verify}, deliver: {{service: 'a/b'}}}}"), "deliver.service"),
            (format!("{{name: a, {verify}, deliver: {{service: 'a/b:0'}}}}"), "deliver.service"),
            (format!("{{name: a, {verify}, deliver: {{service: 'a/b:99999'}}}}"), "deliver.service"),
            (format!("{{name: a, {verify}, deliver: {{service: 'a/b/c:80'}}}}"), "deliver.service"),
            (format!("{{name: a, {verify}, deliver: {{service: '10.0.0.1:80'}}}}"), "deliver.service"),
            (format!("{{name: a, {verify}, deliver: {{service: 'a/b:80', path: x}}}}"), "deliver.path"),
            (format!("{{name: a, {verify}, deliver: {{service: 'a/b:80', path: /../x}}}}"), "deliver.path"),
            (format!("{{name: a, {verify}, deliver: {{service: 'a/b:80', path: '/?a=b'}}}}"), "deliver.path"),
            (format!("{{name: a, {verify}, deliver: {{service: 'a/b:80', path: '/%2e'}}}}"), "deliver.path"),
            (format!("{{name: a, {verify}, deliver: {{service: 'a/b:80', scheme: ftp}}}}"), "deliver.scheme"),
            (
                format!("{{name: a, {verify}, deliver: {{service: 'a/https:b:80', scheme: http}}}}"),
                "deliver.scheme",
            ),
            (
                format!(
                    "{{name: a, {verify}, deliver: {{annotate: {{resource: x, name: y, annotation: z}}}}}}"
                ),
                "annotate.resource",
            ),
            (
                format!("{{name: a, {verify}, deliver: {{annotate: {{resource: v1/pods, annotation: z}}}}}}"),
                "annotate.name",
            ),
            (
                format!("{{name: a, {verify}, deliver: {{annotate: {{resource: v1/pods, name: app}}}}}}"),
                "annotate.annotation",
            ),
            (
                format!("{{name: a, {verify}, {deliver}}}\n- {{name: a, {verify}, {deliver}}}"),
                "hooks[1].name",
            ),
        ] {
            let error = parsed(&hook).unwrap_err();
            assert!(error.contains(place), "{hook}: {error}");
        }
    }

    #[test]
    fn a_target_outside_the_namespaces_is_refused() {
        let file = "namespaces: [a]\nhooks: [{name: x, verify: {github: a}, deliver: {service: 'b/c:80'}}]";
        let error = super::super::parse(file.as_bytes()).unwrap_err();
        assert!(error.contains("hooks[0].deliver") && error.contains("namespaces"), "{error}");
        let inside = file.replace("b/c", "a/c");
        assert_eq!(super::super::parse(inside.as_bytes()).unwrap().hooks.list().len(), 1);
    }
}
