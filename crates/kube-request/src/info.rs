//! What a request does.

use std::{borrow::Cow, ops::Range};

use crate::{Parameters, Target, Upgrade};

/// The verb of requests that open a connection into the cluster, in [`RequestInfo::access_verb`].
pub const CONNECT: &str = "connect";

/// What a request does, in the same terms as kube-apiserver's `RequestInfo`, by which it authorizes.
///
/// There is one difference: the API server does not read the name in a field selector if it cannot decode
/// another parameter, such as `limit`. It answers such a request with 400.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestInfo {
    path: String,
    verb: Cow<'static, str>,
    is_resource: bool,
    // Ranges of the path. Empty: there is no such part.
    api_prefix: Range<usize>,
    api_group: Range<usize>,
    api_version: Range<usize>,
    namespace: Range<usize>,
    resource: Range<usize>,
    subresource: Range<usize>,
    name: Range<usize>,
    parts: Range<usize>,
    /// The name in the field selector, for a list or watch.
    selected_name: Option<String>,
    follow: bool,
}

impl RequestInfo {
    /// Returns what a request does. The method is case-sensitive, as in HTTP.
    pub fn new(method: &str, target: &Target) -> Self {
        Self::decoded(method, target.path(), &target.parameters())
    }

    /// As [`Self::new`], for a path that is decoded already.
    pub fn decoded(method: &str, path: &str, parameters: &Parameters) -> Self {
        let mut info = Self {
            path: path.to_owned(),
            verb: lower_case(method),
            is_resource: false,
            api_prefix: 0..0,
            api_group: 0..0,
            api_version: 0..0,
            namespace: 0..0,
            resource: 0..0,
            subresource: 0..0,
            name: 0..0,
            parts: 0..0,
            selected_name: None,
            follow: parameters.follow,
        };
        info.read_path(method);
        if info.is_resource && info.name.is_empty() && !info.parts.is_empty() {
            match &*info.verb {
                "get" => {
                    info.verb = Cow::Borrowed(if parameters.watch { "watch" } else { "list" });
                    info.selected_name = parameters.name.clone();
                }
                "delete" => info.verb = Cow::Borrowed("deletecollection"),
                _ => {}
            }
        }
        info
    }

    /// Reads everything but the query.
    fn read_path(&mut self, method: &str) {
        let path = &*self.path;
        let end = path.trim_end_matches('/').len();
        let start = end - path[..end].trim_start_matches('/').len();
        // The longest form is /apis/GROUP/VERSION/watch/namespaces/NAMESPACE/RESOURCE/NAME/SUBRESOURCE.
        let segments: Vec<Range<usize>> = segments(path, start..end).take(9).collect();
        let text = |range: &Range<usize>| &path[range.clone()];

        let [prefix, rest @ ..] = &*segments else { return };
        if segments.len() < 3 || !matches!(text(prefix), "api" | "apis") {
            return;
        }
        self.api_prefix = prefix.clone();
        let (version, mut rest) = match rest {
            [version, rest @ ..] if text(prefix) == "api" => (version, rest),
            [group, version, rest @ ..] if !rest.is_empty() => {
                self.api_group = group.clone();
                (version, rest)
            }
            _ => return,
        };
        self.is_resource = true;
        self.api_version = version.clone();

        match rest {
            // Deprecated forms.
            [special, after @ ..] if matches!(text(special), "watch" | "proxy") => {
                if after.is_empty() {
                    // An API server answers with 500.
                    return;
                }
                self.verb = Cow::Borrowed(if text(special) == "watch" { "watch" } else { "proxy" });
                rest = after;
            }
            _ => {
                self.verb = Cow::Borrowed(match method {
                    "POST" => "create",
                    "GET" | "HEAD" => "get",
                    "PUT" => "update",
                    "PATCH" => "patch",
                    "DELETE" => "delete",
                    _ => "",
                });
            }
        }
        if let [namespaces, namespace, inner @ ..] = rest
            && text(namespaces) == "namespaces"
        {
            self.namespace = namespace.clone();
            // A namespace has two subresources. Anything else after its name is a resource in it.
            if inner.first().is_some_and(|inner| !matches!(text(inner), "status" | "finalize")) {
                rest = inner;
            }
        }
        let [resource, names @ ..] = rest else { return };
        self.parts = resource.start..end;
        self.resource = resource.clone();
        if let [name, below @ ..] = names {
            self.name = name.clone();
            if let [subresource, ..] = below
                && self.verb != "proxy"
            {
                self.subresource = subresource.clone();
            }
        }
    }

    /// The path, decoded once.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Whether the request is for a resource of the API, and not for another path such as `/version`.
    pub fn is_resource(&self) -> bool {
        self.is_resource
    }

    /// The verb of the API server. For a resource: `get`, `list`, `watch`, `create`, `update`, `patch`,
    /// `delete`, `deletecollection`; `proxy` for a deprecated form of path; empty for other methods. For
    /// other paths: the method in lower case.
    pub fn verb(&self) -> &str {
        &self.verb
    }

    /// The verb for rules about who may do what: [`CONNECT`] for a request that opens a connection into the
    /// cluster, whatever its method; otherwise the verb of the API server.
    ///
    /// These are requests for the subresources `exec`, `attach`, `portforward` and `proxy`, and every
    /// upgrade, except that of a watch or of a pod's log. The verb of the API server does not tell: `exec` by
    /// WebSocket is a `get`. A rule for all verbs (`*`) must not contain it.
    pub fn access_verb(&self, upgrade: Option<Upgrade>) -> &str {
        let connects = matches!(self.subresource(), "exec" | "attach" | "portforward") || self.is_proxy();
        if connects || (upgrade.is_some() && self.verb != "watch" && !self.is_log()) {
            CONNECT
        } else {
            &self.verb
        }
    }

    /// `api` or `apis`; empty for other paths.
    pub fn api_prefix(&self) -> &str {
        &self.path[self.api_prefix.clone()]
    }

    /// The API group, such as `apps`; empty for the core group.
    pub fn api_group(&self) -> &str {
        &self.path[self.api_group.clone()]
    }

    /// The version of the API, such as `v1`.
    pub fn api_version(&self) -> &str {
        &self.path[self.api_version.clone()]
    }

    /// The namespace; empty: none, or all. A namespace itself is in the namespace of its name.
    pub fn namespace(&self) -> &str {
        &self.path[self.namespace.clone()]
    }

    /// The resource, such as `pods`.
    pub fn resource(&self) -> &str {
        &self.path[self.resource.clone()]
    }

    /// The subresource, such as `log`; empty: none.
    pub fn subresource(&self) -> &str {
        &self.path[self.subresource.clone()]
    }

    /// The name of the object; empty: none. A list or watch has the name that its field selector requires.
    pub fn name(&self) -> &str {
        self.selected_name.as_deref().unwrap_or(&self.path[self.name.clone()])
    }

    /// The segments of the path from the resource on: resource, name, subresource, and what follows.
    pub fn parts(&self) -> impl Iterator<Item = &str> {
        let parts = &self.path[self.parts.clone()];
        parts.split('/').filter(move |_| !self.parts.is_empty())
    }

    /// Whether there is an empty segment where the subresource belongs, as in `pods/web//exec`.
    ///
    /// The API server sees a request for the object itself, which it then does not find. A proxy before it
    /// that merges slashes makes it a request for the subresource, so nothing may be allowed by what it seems
    /// to be.
    pub fn is_subresource_skipped(&self) -> bool {
        self.subresource.is_empty() && self.verb != "proxy" && self.parts().nth(2).is_some()
    }

    /// Whether the API server forwards the request to a pod, a service or a node.
    pub fn is_proxy(&self) -> bool {
        self.subresource() == "proxy" || self.is_resource && self.verb == "proxy"
    }

    /// Whether the request is for the log of a pod.
    pub fn is_log(&self) -> bool {
        self.api_group.is_empty() && self.resource() == "pods" && self.subresource() == "log"
    }

    /// Whether the request is for the log of a pod and wants to wait for more of it.
    pub fn follows_log(&self) -> bool {
        self.is_log() && self.follow && self.verb == "get"
    }
}

/// The segments of a range of a path.
fn segments(path: &str, range: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let is_empty = range.is_empty();
    let mut start = range.start;
    path[range].split('/').filter(move |_| !is_empty).map(move |segment| {
        let found = start..start + segment.len();
        start = found.end + 1;
        found
    })
}

fn lower_case(method: &str) -> Cow<'static, str> {
    match method {
        "GET" => Cow::Borrowed("get"),
        "POST" => Cow::Borrowed("post"),
        other => Cow::Owned(other.to_ascii_lowercase()),
    }
}
