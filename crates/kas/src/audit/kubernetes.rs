//! What a request means to a Kubernetes API server: verb and resource, read off the first message of
//! `KubernetesApi/MakeRequest` as the API server reads its own requests.

use aws_lc_rs::digest;
use bytes::{Bytes, BytesMut};
use prost::Message as _;
use proto::gitlab::agent::{
    grpctool::{self, http_request},
    kubernetes_api::rpc::HeaderExtra,
    prototool::{self, Values},
};

/// The method whose first message is read.
pub const METHOD: &str = "/gitlab.agent.kubernetes_api.rpc.KubernetesApi/MakeRequest";
/// The type of `HttpRequest.Header.extra`.
pub const HEADER_EXTRA: &str = "type.googleapis.com/gitlab.agent.kubernetes_api.rpc.HeaderExtra";
/// A first message beyond this is not read: it is the size of a control message in a tunnel.
const MAX_HEAD: usize = 64 * 1024;
/// Characters of a name that a caller chose; what is longer is cut.
const LONGEST: usize = 128;

/// What a request means.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Meant {
    /// `get`, `list`, `watch`, `create`, `update`, `patch`, `delete`, `deletecollection`; for what is no resource, the
    /// HTTP method.
    pub verb: String,
    /// `resource.group/subresource`, such as `pods`, `pods/exec` or `deployments.apps/scale`; `nonresource` for paths
    /// that name none.
    pub resource: String,
    /// SHA-256 of the path, without the query, in hexadecimal digits.
    pub path_hash: String,
    /// The user that the API server is asked to act as: by `HeaderExtra`, as GitLab has it, or by `Impersonate-User`. Of a
    /// request that says both none is run.
    pub on_behalf_of: Option<String>,
}

/// Collects the first message of a request.
#[derive(Debug, Default)]
pub struct First(BytesMut);

/// How far [`First`] is.
#[derive(Debug, PartialEq, Eq)]
pub enum Read {
    /// More is needed.
    More,
    /// This is what it means; `None`: it cannot be told.
    Done(Option<Meant>),
}

impl First {
    /// Takes the next bytes of the request's body; after [`Read::Done`] it wants no more.
    pub fn push(&mut self, data: &[u8]) -> Read {
        self.0.extend_from_slice(data);
        let Some((prefix, rest)) = self.0.split_at_checked(grpc::PREFIX_LEN) else { return Read::More };
        let len = u32::from_be_bytes([prefix[1], prefix[2], prefix[3], prefix[4]]) as usize;
        if prefix[0] != 0 || len > MAX_HEAD {
            return Read::Done(None);
        }
        match rest.get(..len) {
            None => Read::More,
            Some(message) => Read::Done(meant(message)),
        }
    }
}

fn meant(message: &[u8]) -> Option<Meant> {
    let message = grpctool::HttpRequest::decode(Bytes::copy_from_slice(message)).ok()?;
    let Some(http_request::Message::Header(header)) = message.message else { return None };
    let request = header.request?;
    let (verb, resource) = classify(&request);
    let by_header = || {
        let found = request.header.iter().find(|(name, _)| name.eq_ignore_ascii_case("impersonate-user"));
        found.and_then(|(_, values)| values.value.first()).map(|user| cut(user))
    };
    Some(Meant {
        verb,
        resource,
        path_hash: hex::encode(digest::digest(&digest::SHA256, request.url_path.as_bytes())),
        on_behalf_of: header.extra.as_ref().and_then(by_extra).or_else(by_header),
    })
}

/// Whose rights the request asks for in GitLab's own way. Of another type nothing is known; the listener refuses it.
fn by_extra(extra: &prost_types::Any) -> Option<String> {
    let is_known = extra.type_url == HEADER_EXTRA;
    let extra = is_known.then(|| HeaderExtra::decode(extra.value.as_ref()).ok())??;
    extra.imp_config.map(|config| cut(&config.username)).filter(|user| !user.is_empty())
}

fn cut(text: &str) -> String {
    text.chars().take(LONGEST).collect()
}

/// Returns verb and resource as kube-apiserver's `RequestInfo` has them.
fn classify(request: &prototool::HttpRequest) -> (String, String) {
    let method = request.method.to_ascii_uppercase();
    let plain = || (cut(&method.to_ascii_lowercase()), "nonresource".to_owned());
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
    // Before `watch` was a query there was a path.
    let old_watch = parts[0] == "watch" && parts.len() > 1;
    if old_watch {
        parts = &parts[1..];
    }
    // Of a namespace itself there are two subresources; what else follows its name is in it.
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
    let mut resource = cut(parts[0]);
    if !group.is_empty() {
        resource.push('.');
        resource.push_str(&cut(group));
    }
    if let Some(subresource) = parts.get(2) {
        resource.push('/');
        resource.push_str(&cut(subresource));
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

    fn encoded(header: prototool::HttpRequest) -> Bytes {
        with_extra(header, None)
    }

    fn with_extra(header: prototool::HttpRequest, extra: Option<prost_types::Any>) -> Bytes {
        let header = http_request::Header { request: Some(header), extra, content_length: None };
        grpc::encode(&grpctool::HttpRequest { message: Some(http_request::Message::Header(header)) })
    }

    #[test]
    fn the_first_message_is_read_at_every_split_and_the_path_is_not_kept() {
        let mut header = request("GET", "/api/v1/namespaces/secret-place/pods", false);
        header.header.insert("Impersonate-User".into(), Values { value: vec!["jane".into()] });
        let mut bytes = encoded(header).to_vec();
        let len = bytes.len();
        bytes.extend_from_slice(b"more");
        for end in 0..bytes.len() {
            let mut first = First::default();
            let read = first.push(&bytes[..end]);
            if end < len {
                assert_eq!(read, Read::More, "{end}");
                continue;
            }
            let Read::Done(Some(meant)) = read else { panic!("{end}: {read:?}") };
            assert_eq!((meant.verb.as_str(), meant.resource.as_str()), ("list", "pods"));
            assert_eq!(meant.on_behalf_of.as_deref(), Some("jane"));
            assert_eq!(meant.path_hash.len(), 64);
            assert!(!format!("{meant:?}").contains("secret-place"));
        }
        assert_eq!(First::default().push(&[0, 1, 0, 0, 0]), Read::Done(None), "too large");
        assert_eq!(First::default().push(&[1, 0, 0, 0, 0]), Read::Done(None), "compressed");
        assert_eq!(First::default().push(&[0, 0, 0, 0, 1, 0xff]), Read::Done(None), "no message");
    }

    #[test]
    fn whose_rights_are_asked_for_is_read_in_either_way() {
        use proto::gitlab::agent::kubernetes_api::rpc::ImpersonationConfig;
        let read = |header: prototool::HttpRequest, extra: Option<prost_types::Any>| {
            let Read::Done(Some(meant)) = First::default().push(&with_extra(header, extra)) else {
                panic!("it is whole")
            };
            meant.on_behalf_of
        };
        let extra = |username: &str, type_url: &str| {
            let config = ImpersonationConfig { username: username.to_owned(), ..Default::default() };
            let value = HeaderExtra { imp_config: Some(config) }.encode_to_vec();
            Some(prost_types::Any { type_url: type_url.to_owned(), value })
        };
        let plain = || request("GET", "/api/v1/pods", false);
        let named = |name: &str| {
            let mut named = plain();
            named.header.insert(name.to_owned(), Values { value: vec!["jane".into()] });
            named
        };
        let long = "x".repeat(2 * LONGEST);
        for (header, extra, expected) in [
            (plain(), None, None),
            (named("impersonate-user"), None, Some("jane")),
            (plain(), extra("gitlab:ci_job:1", HEADER_EXTRA), Some("gitlab:ci_job:1")),
            (plain(), extra("", HEADER_EXTRA), None),
            (plain(), extra("somebody", "type.googleapis.com/other"), None),
            (plain(), extra(&long, HEADER_EXTRA), Some(&long[..LONGEST])),
        ] {
            assert_eq!(read(header, extra).as_deref(), expected);
        }
        let malformed = prost_types::Any { type_url: HEADER_EXTRA.to_owned(), value: vec![0xff] };
        assert_eq!(read(plain(), Some(malformed)), None);
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
