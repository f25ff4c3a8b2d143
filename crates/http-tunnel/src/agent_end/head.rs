//! Converts heads of HTTP messages to and from the tunnel's messages: which headers are forwarded, and how a
//! URL is encoded.

use std::{collections::BTreeMap, fmt::Write as _};

use bytes::{BufMut as _, Bytes, BytesMut};
use grpc::{Code, Status};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, StatusCode, Uri, header, response};
use hyper::ext::ReasonPhrase;
use kube_request::{
    Target, Upgrade,
    headers::{canonical, impersonate_extra, is_impersonation, of_connection, remove_hop_by_hop},
};
use prost::Message as _;
use proto::gitlab::agent::kubernetes_api::rpc::{HeaderExtra, ImpersonationConfig};
use tunnel::protobuf::{Entry, Fields, Malformed, put_entry, put_field, put_tag, put_varint};

use crate::HEADER_EXTRA;

/// What the caller says about the length of the request's body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Length {
    Known(u64),
    /// There is a body of unknown length.
    Chunked,
    /// It says nothing.
    Unknown,
}

fn invalid(text: impl Into<String>) -> Status {
    Status::new(Code::InvalidArgument, text)
}

/// A `grpctool.HttpRequest.Header`.
#[derive(Default)]
struct Header<'a> {
    /// It has the field `request`, a `prototool.HttpRequest`, which has the next four.
    has_request: bool,
    method: &'a str,
    headers: Vec<Entry<'a>>,
    url_path: &'a str,
    query: BTreeMap<&'a str, Entry<'a>>,
    /// A `google.protobuf.Any`.
    extra: Option<&'a [u8]>,
    content_length: Option<i64>,
    target: &'a [u8],
}

impl<'a> Header<'a> {
    fn read(message: &'a [u8]) -> Result<Self, Malformed> {
        let mut header = Self::default();
        for field in Fields::of(message) {
            match field? {
                (1, request) => header.read_request(request.bytes()?)?,
                (2, extra) => header.extra = Some(extra.bytes()?),
                // Negative numbers are encoded as their two's complement.
                (3, length) => header.content_length = Some(length.number()?.cast_signed()),
                (1000, target) => header.target = target.bytes()?,
                _ => {}
            }
        }
        Ok(header)
    }

    fn read_request(&mut self, message: &'a [u8]) -> Result<(), Malformed> {
        self.has_request = true;
        for field in Fields::of(message) {
            match field? {
                (1, method) => self.method = method.text()?,
                (2, entry) => self.headers.push(Entry::read(entry)?),
                (3, path) => self.url_path = path.text()?,
                (4, entry) => {
                    let entry = Entry::read(entry)?;
                    self.query.insert(entry.key, entry);
                }
                _ => {}
            }
        }
        Ok(())
    }
}

/// Builds the request to the API server, without its body, from a `grpctool.HttpRequest.Header`.
/// `impersonates`: agentk itself impersonates a user.
pub(super) fn request(
    header: &[u8],
    user_agent: &HeaderValue,
    impersonates: bool,
) -> Result<(Request<grpc::Body>, Length), Status> {
    let header = Header::read(header).map_err(|error| invalid(format!("malformed header: {error}")))?;
    if !header.has_request {
        return Err(invalid("invalid header: request is required"));
    }
    if header.method.is_empty() {
        return Err(invalid("invalid header: method must be at least 1 byte"));
    }
    let method = Method::from_bytes(header.method.as_bytes())
        .map_err(|_| invalid("invalid header: method has invalid characters"))?;
    if method == Method::CONNECT {
        return Err(invalid("invalid header: CONNECT is not a request to the Kubernetes API"));
    }
    // It is checked in the form in which it is sent, so that the API server acts on what was checked.
    let target = if header.target.is_empty() {
        let mut target = String::with_capacity(header.url_path.len() + 64);
        write_path(header.url_path, &mut target)?;
        write_query(&header.query, &mut target);
        Target::parse(target)
            .map_err(|error| invalid(format!("invalid header: url_path or query: {error}")))?
    } else {
        // Somebody has judged one of them, which need not be the one that would be used here.
        if !header.url_path.is_empty() || !header.query.is_empty() {
            return Err(invalid("invalid header: either target, or url_path and query, not both"));
        }
        Target::parse(Bytes::copy_from_slice(header.target))
            .map_err(|error| invalid(format!("invalid header: target: {error}")))?
    };

    let mut request = Request::new(grpc::full(Bytes::new()));
    *request.method_mut() = method;
    *request.uri_mut() = Uri::from(target.as_sent().clone());
    let headers = request.headers_mut();
    for entry in header.headers {
        let name = entry.key;
        // This makes names lowercase, so that the rules below apply to every spelling.
        let key = HeaderName::from_bytes(name.as_bytes())
            .map_err(|_| invalid(format!("invalid header: {name:?} is not a valid header name")))?;
        for value in entry.values() {
            let value = HeaderValue::from_bytes(value.as_bytes()).map_err(|_| {
                invalid(format!("invalid header: the value of {name} has illegal characters"))
            })?;
            headers.append(&key, value);
        }
    }

    let chunked = headers.contains_key(header::TRANSFER_ENCODING);
    let upgrade = Upgrade::requested(headers);
    remove_hop_by_hop(headers).map_err(|error| invalid(format!("invalid header: {error}")))?;
    let mut length = length(headers, header.content_length, chunked)?;
    if let Some(upgrade) = upgrade {
        // Chunks would be taken for data of the upgraded connection. GitLab's kas before 16.0 announces no
        // length.
        if !matches!(length, Length::Known(0) | Length::Unknown) {
            return Err(invalid("invalid header: a request that asks for an upgrade has no body"));
        }
        length = Length::Known(0);
        ask_for_upgrade(upgrade, headers);
    }
    headers.remove(header::CONTENT_LENGTH);
    headers.remove(header::HOST);
    headers.remove(header::AUTHORIZATION);
    // The body is sent without waiting for 100 Continue.
    headers.remove(header::EXPECT);
    let foreign: Vec<_> = headers.keys().filter(|name| is_foreign(name.as_str())).cloned().collect();
    for name in foreign {
        headers.remove(name);
    }
    let user = header.extra.map(extra).transpose()?.flatten();
    let by_headers = headers.keys().any(|name| is_impersonation(name.as_str()));
    if impersonates && (by_headers || user.is_some()) {
        return Err(invalid(
            "invalid header: this agent impersonates a user by its own configuration, so a request may not",
        ));
    }
    if let Some(user) = user {
        if by_headers {
            return Err(invalid(
                "invalid header: either extra.imp_config or Impersonate-* headers, not both",
            ));
        }
        impersonate(&user, headers)?;
    }
    let client = headers.get(header::USER_AGENT).map(HeaderValue::as_bytes);
    let via = client
        .and_then(|client| HeaderValue::from_bytes(&[client, b" via ", user_agent.as_bytes()].concat()).ok());
    headers.insert(header::USER_AGENT, via.unwrap_or_else(|| user_agent.clone()));
    Ok((request, length))
}

/// Adds the headers that ask for an upgrade, and no others that concern the connection.
fn ask_for_upgrade(upgrade: Upgrade, headers: &mut HeaderMap) {
    headers.insert(header::CONNECTION, HeaderValue::from_static("Upgrade"));
    headers.insert(header::UPGRADE, HeaderValue::from_static(upgrade.token()));
}

/// Whether a header, by its name in lower case, says something to a server between the caller and agentk: it
/// has a credential, or tells who the caller is as a proxy does. agentk is not such a proxy.
fn is_foreign(name: &str) -> bool {
    matches!(name, "cookie" | "forwarded")
        || name.starts_with("x-forwarded-")
        || name.starts_with("x-remote-")
}

/// Returns the user that kas wants to be impersonated; `None`: no one.
fn extra(extra: &[u8]) -> Result<Option<ImpersonationConfig>, Status> {
    let extra = prost_types::Any::decode(extra)
        .map_err(|error| invalid(format!("malformed header: extra: {error}")))?;
    if extra.type_url != HEADER_EXTRA {
        // It may mean that the request must not run with all permissions of agentk.
        return Err(invalid(format!("invalid header: extra of type {:?} is unknown", extra.type_url)));
    }
    let extra = HeaderExtra::decode(extra.value.as_ref())
        .map_err(|error| invalid(format!("invalid header: extra is malformed: {error}")))?;
    match extra.imp_config {
        Some(user) if user.username.is_empty() => {
            Err(invalid("invalid header: extra.imp_config has no username"))
        }
        user => Ok(user),
    }
}

/// Adds the headers that impersonate a user.
fn impersonate(user: &ImpersonationConfig, headers: &mut HeaderMap) -> Result<(), Status> {
    let mut add = |name: &str, value: &str| -> Result<(), Status> {
        let key = HeaderName::from_bytes(name.as_bytes()).map_err(|_| {
            invalid(format!("invalid header: extra.imp_config: {name:?} is not a valid header name"))
        })?;
        let value = HeaderValue::from_bytes(value.as_bytes()).map_err(|_| {
            invalid(format!("invalid header: extra.imp_config: the value of {name} has illegal characters"))
        })?;
        headers.append(key, value);
        Ok(())
    };
    add("impersonate-user", &user.username)?;
    for group in &user.groups {
        add("impersonate-group", group)?;
    }
    if !user.uid.is_empty() {
        add("impersonate-uid", &user.uid)?;
    }
    for extra in &user.extra {
        let name = impersonate_extra(&extra.key);
        for value in &extra.val {
            add(&name, value)?;
        }
    }
    Ok(())
}

fn length(headers: &HeaderMap, announced: Option<i64>, chunked: bool) -> Result<Length, Status> {
    let mut known: Option<u64> = None;
    let mut add = |length: u64| match known.replace(length) {
        Some(other) if other != length => {
            Err(invalid(format!("invalid header: the length of the body is both {other} and {length}")))
        }
        _ => Ok(()),
    };
    for value in headers.get_all(header::CONTENT_LENGTH) {
        // RFC 9110, 8.6: a list with one repeated number means that number.
        for part in value.as_bytes().split(|byte| *byte == b',') {
            let part = part.trim_ascii();
            let number =
                std::str::from_utf8(part).ok().filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()));
            match number.and_then(|text| text.parse().ok()) {
                Some(number) => add(number)?,
                None => return Err(invalid("invalid header: Content-Length is not a number")),
            }
        }
    }
    match announced {
        None | Some(-1) => {}
        Some(length) => match u64::try_from(length) {
            Ok(length) => add(length)?,
            Err(_) => return Err(invalid("invalid header: content_length must be at least -1")),
        },
    }
    Ok(match known {
        // RFC 9112, 6.3: Transfer-Encoding overrides the length.
        _ if chunked => Length::Chunked,
        Some(length) => Length::Known(length),
        None => Length::Unknown,
    })
}

/// Writes a decoded path, and percent-encodes the characters that are not allowed in one.
fn write_path(path: &str, out: &mut String) -> Result<(), Status> {
    if path.is_empty() {
        return Err(invalid("invalid header: url_path must be at least 1 byte"));
    }
    if !path.starts_with('/') {
        out.push('/');
    }
    for byte in path.bytes() {
        if byte.is_ascii_alphanumeric() || b"-_.~$&+,/:;=@".contains(&byte) {
            out.push(char::from(byte));
        } else {
            let _ = write!(out, "%{byte:02X}");
        }
    }
    Ok(())
}

/// Writes a decoded query in form encoding, like Go's `url.Values.Encode`. The keys are sorted already.
fn write_query(query: &BTreeMap<&str, Entry<'_>>, out: &mut String) {
    let mut separator = '?';
    for (key, entry) in query {
        for value in entry.values() {
            out.push(separator);
            separator = '&';
            write_query_part(key, out);
            out.push('=');
            write_query_part(value, out);
        }
    }
}

fn write_query_part(text: &str, out: &mut String) {
    for byte in text.bytes() {
        match byte {
            b' ' => out.push('+'),
            b'-' | b'_' | b'.' | b'~' => out.push(char::from(byte)),
            _ if byte.is_ascii_alphanumeric() => out.push(char::from(byte)),
            _ => {
                let _ = write!(out, "%{byte:02X}");
            }
        }
    }
}

/// Encodes the message for the head of a response, a `grpctool.HttpResponse.Header`.
///
pub(super) fn response(parts: &response::Parts) -> BytesMut {
    let upgrade = if parts.status == StatusCode::SWITCHING_PROTOCOLS {
        Upgrade::requested(&parts.headers)
    } else {
        None
    };
    let mut message = BytesMut::with_capacity(1024);
    put_status(parts, &mut message);
    let is_of_connection = of_connection(&parts.headers);
    for name in parts.headers.keys().filter(|name| !is_of_connection(name.as_str())) {
        put_header(name, &parts.headers, &mut message);
    }
    if let Some(upgrade) = upgrade {
        let mut headers = HeaderMap::new();
        ask_for_upgrade(upgrade, &mut headers);
        for name in headers.keys() {
            put_header(name, &headers, &mut message);
        }
    }
    let mut head = BytesMut::with_capacity(message.len() + 4);
    put_field(1, &message, &mut head);
    head
}

/// Writes status code and status of a `prototool.HttpResponse`.
fn put_status(parts: &response::Parts, out: &mut BytesMut) {
    // The field is a number, so its tag is the field's number times eight.
    out.put_u8(1 << 3);
    put_varint(parts.status.as_u16().into(), out);
    let reason = match parts.extensions.get::<ReasonPhrase>() {
        Some(reason) => String::from_utf8_lossy(reason.as_bytes()),
        None => parts.status.canonical_reason().unwrap_or_default().into(),
    };
    let code = parts.status.as_str();
    let separator = if reason.is_empty() { "" } else { " " };
    put_tag(2, out);
    put_varint((code.len() + separator.len() + reason.len()) as u64, out);
    for part in [code, separator, &*reason] {
        out.put_slice(part.as_bytes());
    }
}

/// Writes a header into the map of a `prototool.HttpResponse`.
fn put_header(name: &HeaderName, headers: &HeaderMap, out: &mut BytesMut) {
    const FIELD: u32 = 3;
    let values = headers.get_all(name);
    let key = canonical(name.as_str());
    if values.iter().all(|value| std::str::from_utf8(value.as_bytes()).is_ok()) {
        put_entry(FIELD, &key, || values.iter().map(HeaderValue::as_bytes), out);
    } else {
        // The map holds only text. Bytes that are not UTF-8 are replaced, so that the header is not lost.
        let texts: Vec<_> =
            values.iter().map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned()).collect();
        put_entry(FIELD, &key, || texts.iter().map(String::as_bytes), out);
    }
}

#[cfg(test)]
mod tests {
    use proto::gitlab::agent::{
        grpctool::{http_request::Header, http_response},
        kubernetes_api::rpc::ExtraKeyVal,
        prototool::{HttpRequest, HttpResponse, Values},
    };

    use super::*;

    const AGENT: HeaderValue = HeaderValue::from_static("gitlab-agent/v1/c");

    fn map(entries: &[(&str, &[&str])]) -> BTreeMap<String, Values> {
        entries
            .iter()
            .map(|(key, values)| {
                (
                    (*key).to_owned(),
                    Values { value: values.iter().map(|value| (*value).to_owned()).collect() },
                )
            })
            .collect()
    }

    fn message(method: &str, path: &str, headers: &[(&str, &[&str])]) -> Header {
        Header {
            request: Some(HttpRequest {
                method: method.to_owned(),
                url_path: path.to_owned(),
                header: map(headers),
                query: BTreeMap::new(),
            }),
            ..Default::default()
        }
    }

    fn with_user(mut header: Header, user: Option<ImpersonationConfig>) -> Header {
        header.extra = Some(prost_types::Any {
            type_url: HEADER_EXTRA.to_owned(),
            value: HeaderExtra { imp_config: user }.encode_to_vec(),
        });
        header
    }

    fn user(name: &str) -> ImpersonationConfig {
        ImpersonationConfig { username: name.to_owned(), ..Default::default() }
    }

    #[test]
    fn kas_says_which_user_is_impersonated() {
        let full = ImpersonationConfig {
            username: "gitlab:ci_job:1".to_owned(),
            groups: vec!["gitlab:ci_job".to_owned(), "gitlab:project:2".to_owned()],
            uid: "3".to_owned(),
            extra: vec![ExtraKeyVal {
                key: "agent.gitlab.com/Id%".to_owned(),
                val: vec!["4".to_owned(), "ü".to_owned()],
            }],
        };
        let (request, _) = made(with_user(message("GET", "/", &[]), Some(full)));
        let mut got: Vec<_> = request
            .headers()
            .iter()
            .filter(|(name, _)| *name != "user-agent")
            .map(|(name, value)| format!("{name}: {}", String::from_utf8_lossy(value.as_bytes())))
            .collect();
        got.sort();
        assert_eq!(
            got,
            [
                "impersonate-extra-agent.gitlab.com%2fid%25: 4",
                "impersonate-extra-agent.gitlab.com%2fid%25: ü",
                "impersonate-group: gitlab:ci_job",
                "impersonate-group: gitlab:project:2",
                "impersonate-uid: 3",
                "impersonate-user: gitlab:ci_job:1",
            ]
        );
        let (request, _) = made(with_user(message("GET", "/", &[]), None));
        assert!(!request.headers().keys().any(|name| is_impersonation(name.as_str())));
    }

    #[test]
    fn impersonation_is_rejected_if_it_is_ambiguous_or_unknown() {
        let headers: &[(&str, &[&str])] = &[("impersonate-USER", &["x"])];
        let both = with_user(message("GET", "/", headers), Some(user("u")));
        assert!(rejected(both).contains("not both"));
        assert!(rejected(with_user(message("GET", "/", &[]), Some(user("")))).contains("no username"));
        assert!(
            rejected(with_user(message("GET", "/", &[]), Some(user("a\nb")))).contains("illegal characters")
        );
        let mut unknown = with_user(message("GET", "/", &[]), Some(user("u")));
        unknown.extra.as_mut().unwrap().type_url = "type.googleapis.com/x.Y".to_owned();
        assert!(rejected(unknown).contains("\"type.googleapis.com/x.Y\" is unknown"));
        let mut malformed = with_user(message("GET", "/", &[]), None);
        malformed.extra.as_mut().unwrap().value = vec![0xff];
        assert!(rejected(malformed).contains("malformed"));
        let own = with_user(message("GET", "/", &[]), Some(user("u")));
        let status = request(&own.encode_to_vec(), &AGENT, true).map(|_| ()).unwrap_err();
        assert!(status.message().contains("impersonates"), "{status}");
    }

    fn made(header: Header) -> (Request<grpc::Body>, Length) {
        request(&header.encode_to_vec(), &AGENT, false).unwrap()
    }

    /// What generated code reads.
    fn written(parts: &response::Parts) -> HttpResponse {
        http_response::Header::decode(response(parts)).unwrap().response.unwrap()
    }

    fn rejected(header: Header) -> String {
        let status = request(&header.encode_to_vec(), &AGENT, false).map(|_| ()).unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument);
        status.message().to_owned()
    }

    #[test]
    fn paths_and_queries_are_encoded_as_go_does() {
        for (path, encoded) in [
            ("/api/v1/pods", "/api/v1/pods"),
            ("version", "/version"),
            ("//x//", "//x//"),
            ("/a b%2f?#\"<>[]", "/a%20b%252f%3F%23%22%3C%3E%5B%5D"),
            ("/ü/-_.~$&+,:;=@!'()*", "/%C3%BC/-_.~$&+,:;=@%21%27%28%29%2A"),
            ("/apis/...", "/apis/..."),
            ("/a\\..\\b", "/a%5C..%5Cb"),
        ] {
            let (request, _) = made(message("GET", path, &[]));
            assert_eq!(request.uri().path(), encoded);
        }
        let mut header = message("GET", "/p", &[]);
        header.request.as_mut().unwrap().query = map(&[
            ("labelSelector", &["app in (a, b)", "x=y"]),
            ("watch", &[""]),
            ("none", &[]),
            ("a&b", &["ü+%"]),
        ]);
        let (request, _) = made(header);
        assert_eq!(
            request.uri().query(),
            Some("a%26b=%C3%BC%2B%25&labelSelector=app+in+%28a%2C+b%29&labelSelector=x%3Dy&watch=")
        );
    }

    #[test]
    fn target_is_sent_byte_for_byte() {
        let with = |target: &'static str| {
            let mut header = message("GET", "", &[]);
            header.target = target.into();
            header
        };
        for target in ["/a%2Fb?c", "/a%20b//c;d?b=2&a=%41&a=1&&x", "/%c3%bc?%zz", "/"] {
            let (request, _) = made(with(target));
            assert_eq!(request.uri(), target);
        }
        for (target, text) in [
            ("a", "does not start with a slash"),
            ("/a/%2e%2E/b", "segment that is . or .."),
            ("/a%0d%0a", "control character"),
            ("/a%2", "percent sign"),
            ("/a#b", "fragment"),
            ("http://evil/", "does not start with a slash"),
            ("/a b", "percent-encoded"),
        ] {
            let got = rejected(with(target));
            assert!(got.starts_with("invalid header: target: ") && got.contains(text), "{got}");
        }
        let mut both = with("/a");
        both.request.as_mut().unwrap().query = map(&[("b", &["1"])]);
        assert!(rejected(both).contains("not both"));
        let mut both = message("GET", "/b", &[]);
        both.target = "/a".into();
        assert!(rejected(both).contains("not both"));
    }

    #[test]
    fn values_of_headers_are_utf_8() {
        let (request, _) = made(message("GET", "/", &[("X-Name", &["ü"])]));
        assert_eq!(request.headers()["x-name"].as_bytes(), "ü".as_bytes());
    }

    #[test]
    fn invalid_requests_are_rejected_with_the_reason() {
        let none = Header::default();
        assert_eq!(rejected(none), "invalid header: request is required");
        for (method, path, text) in [
            ("", "/", "method must be at least 1 byte"),
            ("GET", "", "url_path must be at least 1 byte"),
            ("G T", "/", "method has invalid characters"),
            ("CONNECT", "/", "CONNECT"),
            ("GET", "/a/../b", "segment that is . or .."),
            ("GET", "..", "segment that is . or .."),
            ("GET", "/a/./b", "segment that is . or .."),
            ("GET", "/a\0", "control character (0x00)"),
            ("GET", "/a\r\nb", "control character (0x0d)"),
        ] {
            let got = rejected(message(method, path, &[]));
            assert!(got.contains(text), "{got}");
        }
        for (name, value, text) in [
            ("a b", "x", "\"a b\" is not a valid"),
            (":path", "/x", "is not a valid"),
            ("A", "x\r\nB: y", "the value of A has illegal"),
            ("Content-Length", "1, 2", "both 1 and 2"),
            ("Content-Length", "+1", "not a number"),
            ("Content-Length", "", "not a number"),
            ("Connection", "close, impersonate-User", "Connection names impersonate-user"),
        ] {
            let got = rejected(message("POST", "/", &[(name, &[value])]));
            assert!(got.contains(text), "{got}");
        }
    }

    #[test]
    fn only_end_to_end_headers_are_forwarded() {
        let (request, _) = made(message(
            "GET",
            "/",
            &[
                ("Accept", &["application/json", "text/plain"]),
                ("AUTHORIZATION", &["Bearer caller"]),
                ("Connection", &["close, X-Hop", "x-other"]),
                ("Cookie", &["a=b"]),
                ("Expect", &["100-continue"]),
                ("Forwarded", &["for=10.0.0.1"]),
                ("Host", &["evil"]),
                ("Impersonate-Group", &["a", "b"]),
                ("Keep-Alive", &["1"]),
                ("Proxy-Anything", &["1"]),
                ("Te", &["trailers"]),
                ("Trailer", &["X"]),
                ("Transfer-Encoding", &["chunked"]),
                ("Upgrade", &["SPDY/3.1"]),
                ("User-Agent", &["kubectl/v1"]),
                ("X-Forwarded-For", &["10.0.0.1"]),
                ("X-Hop", &["1"]),
                ("x-OTHER", &["1"]),
                ("X-Remote-User", &["admin"]),
            ],
        ));
        let mut got: Vec<_> = request
            .headers()
            .iter()
            .map(|(name, value)| format!("{name}: {}", value.to_str().unwrap()))
            .collect();
        got.sort();
        assert_eq!(
            got,
            [
                "accept: application/json",
                "accept: text/plain",
                "impersonate-group: a",
                "impersonate-group: b",
                "user-agent: kubectl/v1 via gitlab-agent/v1/c",
            ]
        );
        let (request, _) = made(message("GET", "/", &[]));
        assert_eq!(request.headers()["user-agent"], "gitlab-agent/v1/c");
    }

    #[test]
    fn an_upgrade_is_asked_for_once_and_has_no_body() {
        let asks = |protocol: &str, connection: &str, length| {
            let headers: &[(&str, &[&str])] =
                &[("Upgrade", &["h2c", protocol]), ("connection", &[connection, "X-Hop"]), ("X-Hop", &["1"])];
            let mut header = message("POST", "/", headers);
            header.content_length = length;
            header
        };
        for (protocol, sent) in
            [("websocket", "websocket"), ("WebSocket", "websocket"), ("spdy/3.1", "SPDY/3.1")]
        {
            for length in [Some(0), None, Some(-1)] {
                let (request, length) = made(asks(protocol, "keep-alive, Upgrade", length));
                let values = |name: &str| -> Vec<_> {
                    request.headers().get_all(name).iter().map(|value| value.to_str().unwrap()).collect()
                };
                assert_eq!((values("connection"), values("upgrade")), (vec!["Upgrade"], vec![sent]));
                assert_eq!((values("x-hop").len(), length), (0, Length::Known(0)));
            }
        }
        for (protocol, connection) in [("websocket", "keep-alive"), ("TLS/1.0", "upgrade")] {
            let (request, _) = made(asks(protocol, connection, Some(0)));
            assert!(
                !request.headers().contains_key("upgrade") && !request.headers().contains_key("connection")
            );
        }
        assert!(rejected(asks("websocket", "upgrade", Some(1))).contains("has no body"));
        let mut chunked = asks("websocket", "upgrade", Some(0));
        let headers = &mut chunked.request.as_mut().unwrap().header;
        headers.insert("Transfer-Encoding".to_owned(), Values { value: vec!["chunked".to_owned()] });
        assert!(rejected(chunked).contains("has no body"));
    }

    #[test]
    fn a_switch_is_reported_with_its_protocol() {
        let head = |status: u16| {
            let (parts, ()) = http::Response::builder()
                .status(status)
                .header("connection", "Upgrade")
                .header("upgrade", "spdy/3.1")
                .header("x-stream-protocol-version", "v4.channel.k8s.io")
                .body(())
                .unwrap()
                .into_parts();
            written(&parts).header
        };
        let expected = map(&[
            ("Connection", &["Upgrade"]),
            ("Upgrade", &["SPDY/3.1"]),
            ("X-Stream-Protocol-Version", &["v4.channel.k8s.io"]),
        ]);
        assert_eq!(head(101), expected);
        assert_eq!(head(426), map(&[("X-Stream-Protocol-Version", &["v4.channel.k8s.io"])]));
    }

    #[test]
    fn callers_may_impersonate_only_if_agentk_does_not() {
        let header = message("GET", "/", &[("iMPERSONATE-uid", &["1"])]);
        assert!(request(&header.encode_to_vec(), &AGENT, false).is_ok());
        let status = request(&header.encode_to_vec(), &AGENT, true).map(|_| ()).unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument);
        assert!(status.message().contains("impersonates"), "{status}");
    }

    #[test]
    fn length_of_the_body_is_that_of_all_its_sources() {
        let with = |values: &[&str], announced| {
            let mut header = message("POST", "/", &[("Content-Length", values)]);
            header.content_length = announced;
            header
        };
        for (values, announced, length) in [
            (&[][..], None, Length::Unknown),
            (&[], Some(-1), Length::Unknown),
            (&[], Some(0), Length::Known(0)),
            (&["5"], None, Length::Known(5)),
            (&["5, 5", "5"], Some(5), Length::Known(5)),
        ] {
            let (request, got) = made(with(values, announced));
            assert_eq!(got, length);
            // hyper sets it, from the body.
            assert!(!request.headers().contains_key("content-length"));
        }
        assert!(rejected(with(&["5"], Some(6))).contains("both 5 and 6"));
        assert!(rejected(with(&[], Some(-2))).contains("at least -1"));
        let (_, length) = made(message("GET", "/", &[("Transfer-Encoding", &["chunked"])]));
        assert_eq!(length, Length::Chunked);
    }

    #[test]
    fn responses_have_canonical_names_and_the_status_text_of_go() {
        let (mut parts, ()) = http::Response::builder()
            .status(200)
            .header("content-type", "a")
            .header("www-authenticate", "b")
            .header("etag", "\"1\"")
            .header("warning", "299 - \"x\"")
            .header("warning", "299 - \"y\"")
            .header("connection", "close, x-hop")
            .header("x-hop", "1")
            .header("transfer-encoding", "chunked")
            .header("latin", HeaderValue::from_bytes(b"\xfc").unwrap())
            .body(())
            .unwrap()
            .into_parts();
        let got = written(&parts);
        assert_eq!((got.status_code, got.status.as_str()), (200, "200 OK"));
        assert_eq!(
            got.header,
            map(&[
                ("Content-Type", &["a"]),
                ("Etag", &["\"1\""]),
                ("Latin", &["\u{fffd}"]),
                ("Warning", &["299 - \"x\"", "299 - \"y\""]),
                ("Www-Authenticate", &["b"]),
            ])
        );
        parts.extensions.insert(ReasonPhrase::from_static(b"Odd"));
        assert_eq!(written(&parts).status, "200 Odd");
        parts.status = http::StatusCode::from_u16(599).unwrap();
        parts.extensions.clear();
        assert_eq!(written(&parts).status, "599");
    }
}
