//! What a request does to the API server, for the audit log.

use aws_lc_rs::digest;
use http_tunnel::kas_end::impersonated_user;
use kube_request::{Parameters, RequestInfo, Target};
use proto::gitlab::agent::grpctool::http_request::Header;

/// The most characters of a name from a caller. Longer names are truncated.
const LONGEST: usize = 128;

/// What a request does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KubernetesAction {
    /// `get`, `list`, `watch`, `create`, `update`, `patch`, `delete` or `deletecollection`; `proxy` for a
    /// deprecated form of path; for paths without a resource, the HTTP method.
    pub verb: String,
    /// `resource.group/subresource`, such as `pods`, `pods/exec` or `deployments.apps/scale`; `nonresource`
    /// for paths without a resource.
    pub resource: String,
    /// SHA-256 of the path, without the query, in hexadecimal digits.
    pub path_hash: String,
    /// The user that the request impersonates: by `HeaderExtra`, as GitLab does, or by the header
    /// `Impersonate-User`. A request with both is rejected.
    pub on_behalf_of: Option<String>,
}

impl KubernetesAction {
    /// Returns the action of a request; `None`: its header has no request, or an invalid target, which agentk
    /// rejects.
    pub fn of(header: &Header) -> Option<Self> {
        let request = header.request.as_ref()?;
        if !header.target.is_empty() {
            let target = Target::parse(header.target.clone()).ok()?;
            let info = RequestInfo::new(&request.method, &target);
            return Some(Self::of_info(&request.method, &info, &target, impersonated_user(header)));
        }
        let query = request.query.iter();
        let first = query.filter_map(|(key, values)| Some((key.as_str(), values.value.first()?.as_str())));
        let info = RequestInfo::decoded(&request.method, &request.url_path, &Parameters::from_pairs(first));
        let (verb, resource) = names(&request.method, &info);
        let path_hash = hash(request.url_path.as_bytes());
        Some(Self { verb, resource, path_hash, on_behalf_of: impersonated_user(header) })
    }

    /// Returns the action of a request that kas answers itself. `route`: its path, with names in place of
    /// what differs. That is the resource.
    pub fn of_route(method: &str, route: &str, path: &str) -> Self {
        Self {
            verb: truncated(&method.to_ascii_lowercase()),
            resource: truncated(route.trim_start_matches('/')),
            path_hash: hash(path.as_bytes()),
            on_behalf_of: None,
        }
    }

    /// Returns the action of a request that was parsed already.
    pub fn of_info(method: &str, info: &RequestInfo, target: &Target, on_behalf_of: Option<String>) -> Self {
        let (verb, resource) = names(method, info);
        let on_behalf_of = on_behalf_of.map(|user| truncated(&user));
        Self { verb, resource, path_hash: hash(target.path_bytes()), on_behalf_of }
    }
}

fn hash(path: &[u8]) -> String {
    hex::encode(digest::digest(&digest::SHA256, path))
}

/// Returns verb and resource as the API server has them.
fn names(method: &str, info: &RequestInfo) -> (String, String) {
    if !info.is_resource() || info.verb().is_empty() || info.parts().next().is_none() {
        return (truncated(&method.to_ascii_lowercase()), "nonresource".to_owned());
    }
    let mut resource = truncated(info.resource());
    for (separator, name) in [('.', info.api_group()), ('/', info.subresource())] {
        if !name.is_empty() {
            resource.push(separator);
            resource.push_str(&truncated(name));
        }
    }
    (info.verb().to_owned(), resource)
}

fn truncated(text: &str) -> String {
    text.chars().take(LONGEST).collect()
}

#[cfg(test)]
mod tests {
    use http_tunnel::HEADER_EXTRA;
    use proptest::prelude::*;
    use prost::Message as _;
    use proto::gitlab::agent::{
        kubernetes_api::rpc::HeaderExtra,
        prototool::{self, Values},
    };

    use super::*;

    fn classify(request: &prototool::HttpRequest) -> (String, String) {
        let header = Header { request: Some(request.clone()), ..Default::default() };
        let action = KubernetesAction::of(&header).expect("there is a request");
        (action.verb, action.resource)
    }

    #[test]
    fn a_verbatim_target_is_the_same_action_as_its_decoded_form() {
        let decoded =
            Header { request: Some(request("GET", "/api/v1/namespaces/a b/pods")), ..Default::default() };
        let verbatim = Header {
            request: Some(request("GET", "")),
            target: "/api/v1/namespaces/a%20b/pods?watch=0".into(),
            ..Default::default()
        };
        assert_eq!(KubernetesAction::of(&verbatim), KubernetesAction::of(&decoded));
        let watch = Header { target: "/api/v1/pods?watch=1".into(), ..verbatim.clone() };
        assert_eq!(KubernetesAction::of(&watch).map(|action| action.verb), Some("watch".to_owned()));
        let invalid = Header { target: "/a/../b".into(), ..verbatim };
        assert_eq!(KubernetesAction::of(&invalid), None);
    }

    #[test]
    fn verbs_and_resources_are_those_of_the_api_server() {
        for (method, path, expected) in [
            ("GET", "/version", "get nonresource"),
            ("GET", "/api/v1", "get nonresource"),
            ("OPTIONS", "/api/v1/pods", "options nonresource"),
            ("GET", "/api/v1/watch", "get nonresource"),
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
            ("GET", "/api/v1/proxy/namespaces/a/pods/b", "proxy pods"),
        ] {
            let (verb, resource) = classify(&request(method, path));
            assert_eq!(format!("{verb} {resource}"), expected, "{method} {path}");
        }
        for (values, expected) in [
            (&["true"][..], "watch"),
            (&["1"], "watch"),
            (&["", "0"], "watch"),
            (&["yes"], "watch"),
            (&["False"], "list"),
            (&["0", "1"], "list"),
            (&[], "list"),
        ] {
            let mut request = request("GET", "/api/v1/namespaces/a/pods");
            let value = values.iter().map(|value| (*value).to_owned()).collect();
            request.query.insert("watch".to_owned(), Values { value });
            assert_eq!(classify(&request), (expected.to_owned(), "pods".to_owned()), "{values:?}");
        }
    }

    proptest! {
        #[test]
        fn any_path_has_a_bounded_class(method in ".{0,300}", path in ".{0,2000}", group in "[a-z./]{0,600}") {
            for path in [path.clone(), format!("/apis/{group}/{path}")] {
                let (verb, resource) = classify(&request(&method, &path));
                prop_assert!(verb.chars().count() <= LONGEST && resource.chars().count() <= 3 * LONGEST + 2);
            }
        }
    }

    fn request(method: &str, path: &str) -> prototool::HttpRequest {
        prototool::HttpRequest {
            method: method.into(),
            url_path: path.into(),
            ..prototool::HttpRequest::default()
        }
    }

    fn action(header: prototool::HttpRequest, extra: Option<prost_types::Any>) -> KubernetesAction {
        let header = Header { request: Some(header), extra, ..Default::default() };
        KubernetesAction::of(&header).expect("there is a request")
    }

    #[test]
    fn action_has_the_hash_of_the_path_instead_of_the_path() {
        let mut header = request("GET", "/api/v1/namespaces/secret-place/pods");
        header.header.insert("Impersonate-User".into(), Values { value: vec!["jane".into()] });
        let action = action(header, None);
        assert_eq!((action.verb.as_str(), action.resource.as_str()), ("list", "pods"));
        assert_eq!(action.on_behalf_of.as_deref(), Some("jane"));
        assert_eq!(action.path_hash.len(), 64);
        assert!(!format!("{action:?}").contains("secret-place"));
        assert_eq!(KubernetesAction::of(&Header::default()), None);
    }

    #[test]
    fn a_route_of_kas_is_told_without_what_stands_in_its_places() {
        let action = KubernetesAction::of_route("GET", "/fleet/views/{view}", "/fleet/views/secrets-of-jane");
        assert_eq!((&*action.verb, &*action.resource), ("get", "fleet/views/{view}"));
        assert_eq!(action.path_hash, hash(b"/fleet/views/secrets-of-jane"));
        assert!(!format!("{action:?}").contains("jane"));
    }

    #[test]
    fn impersonated_user_is_read_in_both_forms() {
        use proto::gitlab::agent::kubernetes_api::rpc::ImpersonationConfig;
        let extra = |username: &str, type_url: &str| {
            let config = ImpersonationConfig { username: username.to_owned(), ..Default::default() };
            let value = HeaderExtra { imp_config: Some(config) }.encode_to_vec();
            Some(prost_types::Any { type_url: type_url.to_owned(), value })
        };
        let plain = || request("GET", "/api/v1/pods");
        let named = |name: &str| {
            let mut named = plain();
            named.header.insert(name.to_owned(), Values { value: vec!["jane".into()] });
            named
        };
        let long = "x".repeat(256);
        for (header, extra, expected) in [
            (plain(), None, None),
            (named("impersonate-user"), None, Some("jane")),
            (plain(), extra("gitlab:ci_job:1", HEADER_EXTRA), Some("gitlab:ci_job:1")),
            (plain(), extra("", HEADER_EXTRA), None),
            (plain(), extra("somebody", "type.googleapis.com/other"), None),
            (plain(), extra(&long, HEADER_EXTRA), Some(&long[..128])),
        ] {
            assert_eq!(action(header, extra).on_behalf_of.as_deref(), expected);
        }
        let malformed = prost_types::Any { type_url: HEADER_EXTRA.to_owned(), value: vec![0xff] };
        assert_eq!(action(plain(), Some(malformed)).on_behalf_of, None);
    }
}
