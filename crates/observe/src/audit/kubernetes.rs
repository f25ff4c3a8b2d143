//! What a request does to the API server, for the audit log.

use aws_lc_rs::digest;
use http_tunnel::kas_end::{classify, impersonated_user};
use proto::gitlab::agent::grpctool::http_request::Header;

/// What a request does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KubernetesAction {
    /// `get`, `list`, `watch`, `create`, `update`, `patch`, `delete` or `deletecollection`; for paths without
    /// a resource, the HTTP method.
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
    /// Returns the action of a request; `None`: its header has no request.
    pub fn of(header: &Header) -> Option<Self> {
        let request = header.request.as_ref()?;
        let (verb, resource) = classify(request);
        Some(Self {
            verb,
            resource,
            path_hash: hex::encode(digest::digest(&digest::SHA256, request.url_path.as_bytes())),
            on_behalf_of: impersonated_user(header),
        })
    }
}

#[cfg(test)]
mod tests {
    use http_tunnel::HEADER_EXTRA;
    use proto::gitlab::agent::{
        kubernetes_api::rpc::HeaderExtra,
        prototool::{self, Values},
    };

    use prost::Message as _;

    use super::*;

    fn request(method: &str, path: &str) -> prototool::HttpRequest {
        prototool::HttpRequest {
            method: method.into(),
            url_path: path.into(),
            ..prototool::HttpRequest::default()
        }
    }

    fn action(header: prototool::HttpRequest, extra: Option<prost_types::Any>) -> KubernetesAction {
        let header = Header { request: Some(header), extra, content_length: None };
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
