//! The head of an answer: which headers of the API server reach the client, and which kas adds.

use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use kube_request::{
    Kind, Upgrade,
    headers::{AnswerHeaders, location, remove_hop_by_hop_of_answer},
};
use tunnel::protobuf::{Entry, Fields, Malformed};

/// Headers that keep a browser from treating content of a cluster as a page of this site.
const SANDBOX: [(HeaderName, HeaderValue); 3] = [
    (header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
    (header::CONTENT_SECURITY_POLICY, HeaderValue::from_static("sandbox; default-src 'none'")),
    (HeaderName::from_static("cross-origin-resource-policy"), HeaderValue::from_static("same-origin")),
];
const PRIVATE: HeaderValue = HeaderValue::from_static("private, no-store");
/// Tells nginx to pass each part of an answer on at once.
const ACCEL_BUFFERING: HeaderName = HeaderName::from_static("x-accel-buffering");

/// The head of an API server's answer.
#[derive(Debug)]
pub(crate) struct AnswerHead {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    /// The announced length of the body; `None`: unknown.
    pub(crate) length: Option<u64>,
    pub(crate) is_encoded: bool,
    /// To which protocol the API server has switched.
    pub(crate) switched: Option<Upgrade>,
}

impl AnswerHead {
    /// Reads the head, an encoded `grpctool.HttpResponse.Header`. Values that HTTP does not allow are
    /// dropped.
    /// `upgrade`: the protocol that the request asked for, to which the API server may have switched.
    ///
    /// # Errors
    /// What is wrong with it, if no client could use the answer.
    pub(crate) fn read(message: &[u8], upgrade: Option<Upgrade>) -> Result<Self, &'static str> {
        let (code, mut headers) = fields(message).map_err(|_| "it cannot be read")?;
        let status = code
            .and_then(|code| u16::try_from(code).ok())
            .and_then(|code| StatusCode::from_u16(code).ok())
            .filter(|status| {
                !status.is_informational() || upgrade.is_some() && *status == StatusCode::SWITCHING_PROTOCOLS
            })
            .ok_or("it has no final status")?;
        let switched = match upgrade {
            Some(_) if status == StatusCode::SWITCHING_PROTOCOLS => {
                if Upgrade::requested(&headers) != upgrade {
                    return Err("it switches to another protocol than the one that was asked for");
                }
                upgrade
            }
            _ => None,
        };
        remove_hop_by_hop_of_answer(&mut headers);
        let length = length(&headers)?;
        let is_encoded = headers
            .get_all(header::CONTENT_ENCODING)
            .iter()
            .any(|value| !value.as_bytes().eq_ignore_ascii_case(b"identity"));
        Ok(Self { status, headers, length, is_encoded, switched })
    }

    /// Whether the answer has no body, whatever its length says.
    pub(crate) fn is_bodiless(&self, method: &Method) -> bool {
        method == Method::HEAD
            || self.status == StatusCode::NO_CONTENT
            || self.status == StatusCode::NOT_MODIFIED
            || self.length == Some(0)
    }

    /// Returns the headers for the client. `cut`: what was cut off the path of the request.
    pub(crate) fn for_client(&self, allowed: &AnswerHeaders, cut: &str, kind: Kind) -> HeaderMap {
        let mut headers = HeaderMap::with_capacity(self.headers.len() + 8);
        for (name, value) in &self.headers {
            if !allowed.forwards(name, self.switched.is_some()) {
                continue;
            }
            if *name == header::LOCATION {
                let moved = value.to_str().ok().and_then(|value| location(value, cut));
                if let Some(value) = moved.and_then(|value| HeaderValue::from_str(&value).ok()) {
                    headers.append(name, value);
                }
            } else {
                headers.append(name, value.clone());
            }
        }
        if self.status == StatusCode::NO_CONTENT {
            headers.remove(header::CONTENT_LENGTH);
        }
        if let Some(upgrade) = self.switched {
            headers.remove(header::CONTENT_LENGTH);
            headers.insert(header::CONNECTION, HeaderValue::from_static("Upgrade"));
            headers.insert(header::UPGRADE, HeaderValue::from_static(upgrade.token()));
        }
        if matches!(kind, Kind::Watch | Kind::Follow) {
            headers.insert(ACCEL_BUFFERING, HeaderValue::from_static("no"));
        }
        headers
    }
}

/// Forbids a browser to show an answer as a page of this host: it may come from a cluster.
pub(crate) fn sandbox(headers: &mut HeaderMap) {
    for (name, value) in SANDBOX {
        headers.insert(name, value);
    }
}

/// Adds what every answer of the endpoint has.
pub(crate) fn complete(headers: &mut HeaderMap, id: HeaderValue, server: &HeaderValue) {
    headers.insert(HeaderName::from_static("x-request-id"), id);
    headers.insert(header::SERVER, server.clone());
    let is_private = headers.get_all(header::CACHE_CONTROL).iter().any(|value| {
        value.as_bytes().split(|byte| *byte == b',').map(<[u8]>::trim_ascii).any(|directive| {
            [&b"private"[..], b"no-store"].iter().any(|name| directive.eq_ignore_ascii_case(name))
        })
    });
    if !is_private {
        headers.append(header::CACHE_CONTROL, PRIVATE);
    }
}

/// Returns the status code and the headers of an encoded `grpctool.HttpResponse.Header`.
fn fields(message: &[u8]) -> Result<(Option<u64>, HeaderMap), Malformed> {
    let mut code = None;
    let mut headers = HeaderMap::new();
    for field in Fields::of(message) {
        let (1, response) = field? else { continue };
        // A `prototool.HttpResponse`.
        for field in Fields::of(response.bytes()?) {
            match field? {
                (1, value) => code = Some(value.number()?),
                (3, entry) => append(Entry::read(entry)?, &mut headers),
                _ => {}
            }
        }
    }
    Ok((code, headers))
}

/// Adds the values of a header that HTTP allows.
fn append(entry: Entry<'_>, headers: &mut HeaderMap) {
    let Ok(name) = HeaderName::from_bytes(entry.key.as_bytes()) else { return };
    for value in entry.values() {
        if let Ok(value) = HeaderValue::from_bytes(value.as_bytes()) {
            headers.append(&name, value);
        }
    }
}

/// Returns the announced length. All values must be the same number.
fn length(headers: &HeaderMap) -> Result<Option<u64>, &'static str> {
    const WRONG: &str = "its Content-Length is not a number";
    let mut length = None;
    for value in headers.get_all(header::CONTENT_LENGTH) {
        let text = value.to_str().map_err(|_| WRONG)?;
        if text.is_empty() || !text.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(WRONG);
        }
        let number = text.parse().map_err(|_| WRONG)?;
        if length.replace(number).is_some_and(|other: u64| other != number) {
            return Err(WRONG);
        }
    }
    Ok(length)
}

#[cfg(test)]
mod tests {
    use prost::Message as _;
    use proto::gitlab::agent::{
        grpctool::http_response,
        prototool::{HttpResponse, Values},
    };

    use super::*;

    fn message(code: i32, headers: &[(&str, &[&str])]) -> Vec<u8> {
        let header = headers
            .iter()
            .map(|(name, values)| {
                let value = values.iter().map(|value| (*value).to_owned()).collect();
                ((*name).to_owned(), Values { value })
            })
            .collect();
        http_response::Header {
            response: Some(HttpResponse { status_code: code, status: String::new(), header }),
        }
        .encode_to_vec()
    }

    fn read(code: i32, headers: &[(&str, &[&str])]) -> Result<AnswerHead, &'static str> {
        AnswerHead::read(&message(code, headers), None)
    }

    #[test]
    fn only_listed_headers_reach_the_client() {
        let head = read(
            201,
            &[
                ("Content-Type", &["application/json"]),
                ("Audit-Id", &["kas-1"]),
                ("Warning", &["299 - \"a\"", "299 - \"b\""]),
                ("X-Kubernetes-Pf-Flowschema-Uid", &["u"]),
                ("Location", &["/api/v1/x"]),
                ("Set-Cookie", &["a=b"]),
                ("Server", &["evil"]),
                ("Nel", &["{}"]),
                ("Access-Control-Allow-Origin", &["*"]),
                ("Connection", &["close, Etag"]),
                ("Etag", &["\"1\""]),
                ("Transfer-Encoding", &["chunked"]),
                ("X-Custom", &["1"]),
                ("B ad", &["1"]),
                ("Age", &["1\r\nSet-Cookie: x"]),
            ],
        )
        .unwrap();
        let allowed = AnswerHeaders::new([HeaderName::from_static("x-custom")]).unwrap();
        let headers = head.for_client(&allowed, "/agents/7", Kind::Short);
        let mut seen: Vec<_> =
            headers.iter().map(|(name, value)| format!("{name}: {}", value.to_str().unwrap())).collect();
        seen.sort();
        assert_eq!(
            seen,
            [
                "audit-id: kas-1",
                "content-type: application/json",
                "location: /agents/7/api/v1/x",
                "warning: 299 - \"a\"",
                "warning: 299 - \"b\"",
                "x-custom: 1",
                "x-kubernetes-pf-flowschema-uid: u",
            ]
        );
        let none = head.for_client(&AnswerHeaders::default(), "", Kind::Watch);
        assert!(!none.contains_key("x-custom"));
        assert_eq!(none["x-accel-buffering"], "no");
        assert_eq!(none["location"], "/api/v1/x");
    }

    #[test]
    fn locations_outside_are_dropped() {
        for value in ["//evil.org/x", "https://evil.org/", "x", ""] {
            let head = read(302, &[("Location", &[value])]).unwrap();
            assert!(
                !head.for_client(&AnswerHeaders::default(), "", Kind::Short).contains_key("location"),
                "{value}"
            );
        }
    }

    #[test]
    fn lengths_must_be_one_number() {
        let length = |values: &[&str]| read(200, &[("Content-Length", values)]).map(|head| head.length);
        assert_eq!(length(&["12"]), Ok(Some(12)));
        assert_eq!(length(&["12", "12"]), Ok(Some(12)));
        for wrong in [&["12", "13"][..], &["-1"], &["+1"], &[""], &["1, 1"], &["99999999999999999999"]] {
            assert!(length(wrong).is_err(), "{wrong:?}");
        }
        assert_eq!(read(200, &[]).unwrap().length, None);
    }

    #[test]
    fn only_final_statuses_are_answers() {
        for code in [0, -1, 99, 100, 101, 1000, i32::MAX] {
            assert!(read(code, &[]).is_err(), "{code}");
        }
        assert!(AnswerHead::read(&[], None).is_err() && AnswerHead::read(&[0x0a, 9], None).is_err());
        let bodiless = |code, method: &Method| read(code, &[]).unwrap().is_bodiless(method);
        assert!(
            bodiless(204, &Method::DELETE) && bodiless(304, &Method::GET) && bodiless(200, &Method::HEAD)
        );
        assert!(!bodiless(200, &Method::GET));
        assert!(read(200, &[("Content-Length", &["0"])]).unwrap().is_bodiless(&Method::GET));
    }

    #[test]
    fn a_switch_counts_only_with_the_protocol_that_was_asked_for() {
        let websocket = [
            ("Connection", &["upgrade"][..]),
            ("Upgrade", &["WebSocket"]),
            ("Sec-Websocket-Accept", &["x"]),
            ("Sec-Websocket-Protocol", &["v5.channel.k8s.io"]),
            ("X-Stream-Protocol-Version", &["v4"]),
            ("Content-Length", &["0"]),
            ("Set-Cookie", &["a=b"]),
        ];
        let read = |headers: &[_], upgrade| AnswerHead::read(&message(101, headers), upgrade);
        let head = read(&websocket, Some(Upgrade::WebSocket)).unwrap();
        let headers = head.for_client(&AnswerHeaders::default(), "", Kind::Upgrade);
        let mut seen: Vec<_> =
            headers.iter().map(|(name, value)| format!("{name}: {}", value.to_str().unwrap())).collect();
        seen.sort();
        assert_eq!(
            seen,
            [
                "connection: Upgrade",
                "sec-websocket-accept: x",
                "sec-websocket-protocol: v5.channel.k8s.io",
                "upgrade: websocket",
                "x-stream-protocol-version: v4",
            ]
        );
        assert!(read(&websocket, Some(Upgrade::Spdy31)).is_err());
        assert!(read(&websocket, None).is_err());
        assert!(read(&[], Some(Upgrade::WebSocket)).is_err());
        assert!(read(&[("Upgrade", &["websocket"])], Some(Upgrade::WebSocket)).is_err(), "not by Connection");
        // Headers of a switch are not passed on with another status.
        let refused = AnswerHead::read(&message(403, &websocket), Some(Upgrade::WebSocket)).unwrap();
        assert!(refused.switched.is_none());
        let headers = refused.for_client(&AnswerHeaders::default(), "", Kind::Upgrade);
        assert!(!headers.contains_key("sec-websocket-accept") && !headers.contains_key("upgrade"));
    }

    #[test]
    fn every_answer_is_private_and_sandboxed() {
        let completed = |cache: Option<&'static str>| {
            let mut headers = HeaderMap::new();
            if let Some(cache) = cache {
                headers.insert(header::CACHE_CONTROL, HeaderValue::from_static(cache));
            }
            complete(
                &mut headers,
                HeaderValue::from_static("id"),
                &HeaderValue::from_static("gitlab-kas/v/c"),
            );
            sandbox(&mut headers);
            headers
        };
        let headers = completed(None);
        assert_eq!(headers["cache-control"], "private, no-store");
        assert_eq!(headers["x-request-id"], "id");
        assert_eq!(headers["server"], "gitlab-kas/v/c");
        assert_eq!(headers["x-content-type-options"], "nosniff");
        assert_eq!(headers["content-security-policy"], "sandbox; default-src 'none'");
        assert_eq!(headers["cross-origin-resource-policy"], "same-origin");
        let all = |headers: &HeaderMap| headers.get_all("cache-control").iter().count();
        assert_eq!(all(&completed(Some("no-cache, Private"))), 1);
        assert_eq!(all(&completed(Some("no-store"))), 1);
        assert_eq!(all(&completed(Some("public, max-age=60"))), 2);
    }
}
