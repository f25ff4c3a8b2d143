//! What a request does to a Kubernetes API server: verb and resource, derived in the same way as by the API
//! server.

use prost::Message as _;
use proto::gitlab::agent::{
    grpctool::http_request,
    kubernetes_api::rpc::HeaderExtra,
    prototool::{self, Values},
};

use crate::HEADER_EXTRA;

/// The most characters of a name from a caller. Longer names are truncated.
const LONGEST: usize = 128;

/// Returns the user that a request impersonates: by `HeaderExtra`, as GitLab does, or by the header
/// `Impersonate-User`. A request with both is rejected.
pub fn impersonated_user(header: &http_request::Header) -> Option<String> {
    let by_header = || {
        let headers = header.request.iter().flat_map(|request| &request.header);
        let found = headers.into_iter().find(|(name, _)| name.eq_ignore_ascii_case("impersonate-user"));
        found.and_then(|(_, values)| values.value.first()).map(|user| truncated(user))
    };
    header.extra.as_ref().and_then(by_extra).or_else(by_header)
}

/// Returns the user in `HeaderExtra`. An `extra` of another type is rejected elsewhere.
fn by_extra(extra: &prost_types::Any) -> Option<String> {
    let is_known = extra.type_url == HEADER_EXTRA;
    let extra = is_known.then(|| HeaderExtra::decode(extra.value.as_ref()).ok())??;
    extra.imp_config.map(|config| truncated(&config.username)).filter(|user| !user.is_empty())
}

fn truncated(text: &str) -> String {
    text.chars().take(LONGEST).collect()
}

/// Returns verb and resource as kube-apiserver's `RequestInfo` has them.
pub fn classify(request: &prototool::HttpRequest) -> (String, String) {
    let method = request.method.to_ascii_uppercase();
    let plain = || (truncated(&method.to_ascii_lowercase()), "nonresource".to_owned());
    let parts: Vec<&str> = request.url_path.trim_matches('/').split('/').collect();
    let (group, mut parts) = match *parts.as_slice() {
        ["api", _version, ref rest @ ..] if !rest.is_empty() => ("", rest),
        ["apis", group, _version, ref rest @ ..] if !rest.is_empty() => (group, rest),
        _ => return plain(),
    };
    let mut verb = match method.as_str() {
        "POST" => "create",
        "GET" | "HEAD" => "get",
        "PUT" => "update",
        "PATCH" => "patch",
        "DELETE" => "delete",
        _ => return plain(),
    };
    // The old form of a watch, before the query parameter `watch`.
    let old_watch = parts[0] == "watch" && parts.len() > 1;
    if old_watch {
        parts = &parts[1..];
    }
    // A namespace has two subresources. Anything else after its name is a resource in it.
    if let ["namespaces", _name, inner, ..] = *parts
        && !["status", "finalize"].contains(&inner)
    {
        parts = &parts[2..];
    }
    let is_named = parts.len() > 1;
    let watches = |values: &Values| values.value.first().is_some_and(|value| value == "true" || value == "1");
    if old_watch || !is_named && verb == "get" && request.query.get("watch").is_some_and(watches) {
        verb = "watch";
    } else if !is_named {
        verb = match verb {
            "get" => "list",
            "delete" => "deletecollection",
            verb => verb,
        };
    }
    let mut resource = truncated(parts[0]);
    if !group.is_empty() {
        resource.push('.');
        resource.push_str(&truncated(group));
    }
    if let Some(subresource) = parts.get(2) {
        resource.push('/');
        resource.push_str(&truncated(subresource));
    }
    (verb.to_owned(), resource)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn request(method: &str, path: &str, watch: bool) -> prototool::HttpRequest {
        let mut request = prototool::HttpRequest {
            method: method.into(),
            url_path: path.into(),
            ..prototool::HttpRequest::default()
        };
        if watch {
            request.query.insert("watch".into(), Values { value: vec!["true".into()] });
        }
        request
    }

    #[test]
    fn verbs_and_resources_are_those_of_the_api_server() {
        for (method, path, expected) in [
            ("GET", "/version", "get nonresource"),
            ("GET", "/api/v1", "get nonresource"),
            ("OPTIONS", "/api/v1/pods", "options nonresource"),
            ("GET", "/api/v1/pods", "list pods"),
            ("GET", "/api/v1/namespaces", "list namespaces"),
            ("GET", "/api/v1/namespaces/a", "get namespaces"),
            ("PUT", "/api/v1/namespaces/a/status", "update namespaces/status"),
            ("GET", "/api/v1/namespaces/a/pods", "list pods"),
            ("GET", "/api/v1/namespaces/a/pods/b/log", "get pods/log"),
            ("POST", "/api/v1/namespaces/a/pods/b/exec", "create pods/exec"),
            ("GET", "/api/v1/namespaces/a/services/b/proxy/etc/passwd", "get services/proxy"),
            ("DELETE", "/apis/apps/v1/namespaces/a/deployments", "deletecollection deployments.apps"),
            ("PATCH", "/apis/apps/v1/namespaces/a/deployments/b/scale", "patch deployments.apps/scale"),
            ("GET", "/api/v1/watch/pods", "watch pods"),
        ] {
            let (verb, resource) = classify(&request(method, path, false));
            assert_eq!(format!("{verb} {resource}"), expected, "{method} {path}");
        }
        let (verb, resource) = classify(&request("GET", "/api/v1/namespaces/a/pods", true));
        assert_eq!((verb.as_str(), resource.as_str()), ("watch", "pods"));
    }

    proptest! {
        #[test]
        fn any_path_has_a_bounded_class(method in ".{0,300}", path in ".{0,2000}", group in "[a-z./]{0,600}") {
            for path in [path.clone(), format!("/apis/{group}/{path}")] {
                let (verb, resource) = classify(&request(&method, &path, false));
                prop_assert!(verb.chars().count() <= LONGEST && resource.chars().count() <= 3 * LONGEST + 2);
            }
        }
    }
}
