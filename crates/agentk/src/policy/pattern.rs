//! What the entries of a rule match.

use kube_request::RequestInfo;

/// The beginning of names that Kubernetes reserves for itself.
const SYSTEM: &str = "system:";

/// A user or group, or the beginning of such names with a `*` at its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SubjectPattern {
    text: String,
    is_prefix: bool,
}

impl SubjectPattern {
    /// Reads an entry; `None`: it has a `*` that is not at its end, or nothing that a name can be.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let (text, is_prefix) = split(text);
        let is_name = (text.is_empty() && is_prefix) || ids::check_identity_value(text).is_ok();
        (is_name && !text.contains('*')).then(|| Self { text: text.to_owned(), is_prefix })
    }

    /// Whether a name matches. A name of Kubernetes itself (`system:…`) matches only if the entry begins
    /// with `system:` too: an entry such as `*` does not include `system:masters`.
    pub fn matches(&self, name: &str) -> bool {
        if name.starts_with(SYSTEM) && !self.text.starts_with(SYSTEM) {
            return false;
        }
        if self.is_prefix { name.starts_with(&self.text) } else { name == self.text }
    }
}

/// A path that is not that of a resource, or the beginning of such paths with a `*` at its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PathPattern {
    text: String,
    is_prefix: bool,
}

impl PathPattern {
    /// Reads an entry; `None`: it does not begin with a slash, or has a `*` that is not at its end.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let (text, is_prefix) = split(text);
        let is_path = text.starts_with('/') && !text.contains('*') && !text.chars().any(char::is_control);
        is_path.then(|| Self { text: text.to_owned(), is_prefix })
    }

    /// Whether a path, decoded once, matches.
    pub fn matches(&self, path: &str) -> bool {
        if self.is_prefix { path.starts_with(&self.text) } else { path == self.text }
    }
}

fn split(text: &str) -> (&str, bool) {
    text.strip_suffix('*').map_or((text, false), |text| (text, true))
}

/// A resource as rules name it: `name[.group][/subresource]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResourceName {
    name: String,
    /// `None`: any.
    group: Option<String>,
    /// Empty: none.
    subresource: String,
}

impl ResourceName {
    /// Reads an entry; `None`: it has not this form.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let (resource, subresource) = text.split_once('/').map_or((text, None), |(r, s)| (r, Some(s)));
        let (name, group) = resource.split_once('.').map_or((resource, None), |(n, g)| (n, Some(g)));
        let is_label = |text: &str| {
            !text.is_empty()
                && text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
        };
        let is_valid = is_label(name)
            && group.is_none_or(|group| group.split('.').all(is_label))
            && subresource.is_none_or(is_label);
        is_valid.then(|| Self {
            name: name.to_owned(),
            group: group.map(str::to_owned),
            subresource: subresource.unwrap_or_default().to_owned(),
        })
    }

    /// Whether a request is for this resource. `pods` is not `pods/log`.
    pub fn matches(&self, info: &RequestInfo) -> bool {
        self.name == info.resource()
            && self.subresource == info.subresource()
            && self.group.as_ref().is_none_or(|group| group == info.api_group())
    }
}
