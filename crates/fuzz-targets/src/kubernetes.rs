//! Heads of requests to an API server.

use std::{borrow::Cow, str};

use bytes::{Bytes, BytesMut};
use futures_util::FutureExt as _;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use http_tunnel::agent_end::read_request;
use kube_request::{Kind, RequestInfo, Status, Target, Upgrade, headers};
use prost::Message as _;
use proto::gitlab::agent::{
    grpctool::http_request::Header,
    prototool::{HttpRequest, Values},
};
use tunnel::frame;

const METHODS: [&str; 8] = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "get"];

/// Reads a request: a byte for the method, the target until a line's end, then headers.
pub(crate) fn request(method: u8, bytes: &[u8]) {
    let method = METHODS[usize::from(method) % METHODS.len()];
    let mut lines = bytes.split(|byte| *byte == b'\n');
    let sent = lines.next().unwrap_or_default();
    let upgrade = header(lines);
    if let Ok(target) = Target::parse(Bytes::copy_from_slice(sent)) {
        assert_eq!(target.as_sent().as_str().as_bytes(), sent, "the target is sent as it came");
        let path = target.path_bytes();
        assert!(path.starts_with(b"/") && !path.iter().any(u8::is_ascii_control), "{target:?}");
        assert!(
            !path.split(|byte| *byte == b'/').any(|segment| matches!(segment, b"." | b"..")),
            "{target:?}"
        );
        let info = RequestInfo::new(method, &target);
        is_consistent(&info, upgrade);
        if target.fits_url_path(info.is_proxy()) {
            through_url_path(method, &target, &info);
        }
    }
    let text = String::from_utf8_lossy(bytes);
    let json = Status::new(StatusCode::BAD_REQUEST, &*text).to_json(&text);
    let (end, line) = json.split_last().expect("there is JSON");
    assert!(*end == b'\n' && !line.contains(&b'\n'), "the status is one line");
    let status: serde_json::Value = serde_json::from_slice(&json).expect("the status is JSON");
    assert!(status["message"].as_str().is_some_and(|message| message.contains(&*text)));
}

fn is_consistent(info: &RequestInfo, upgrade: Option<Upgrade>) {
    let parts: Vec<&str> = info.parts().collect();
    if let [resource, ..] = *parts {
        assert!(info.is_resource() && resource == info.resource(), "{info:?}");
    }
    let kind = Kind::of(info, upgrade);
    assert_eq!(kind == Kind::Upgrade, upgrade.is_some(), "{info:?}");
    if kind == Kind::Proxy {
        assert_eq!(info.access_verb(None), "connect", "{info:?}");
    }
}

/// An agentk that knows only `url_path` and `query` requests the same.
fn through_url_path(method: &str, target: &Target, info: &RequestInfo) {
    let query = target.query_values().into_iter().map(|(key, value)| (key, Values { value })).collect();
    let request = HttpRequest {
        method: method.to_owned(),
        url_path: target.path().to_owned(),
        query,
        ..HttpRequest::default()
    };
    let header = Header { request: Some(request), content_length: Some(0), ..Default::default() };
    let mut messages = BytesMut::new();
    frame::put_control(1, &header.encode_to_vec(), &mut messages);
    frame::put_control(3, &[], &mut messages);
    let user_agent = HeaderValue::from_static("agentk");
    let body = grpc::full(messages.freeze());
    let read = read_request(body, &user_agent, false).now_or_never().expect("all messages are there");
    // Encoded anew, it may be too long.
    let Ok((request, _)) = read else { return };
    let path = request.uri().path_and_query().expect("a request has a path");
    let again = Target::try_from(path).expect("agentk sends only valid targets");
    assert_eq!(again.path_bytes(), target.path_bytes());
    assert_eq!(RequestInfo::new(method, &again), *info);
}

/// Reads headers, one in each line. No dropped header is left, and none that is never forwarded is forwarded.
fn header<'a>(lines: impl Iterator<Item = &'a [u8]>) -> Option<Upgrade> {
    let mut map = HeaderMap::new();
    for line in lines.take(100) {
        let (name, value) = line.split_at(line.iter().position(|byte| *byte == b':').unwrap_or(line.len()));
        let (Ok(name), Ok(value)) =
            (HeaderName::from_bytes(name), HeaderValue::from_bytes(value.trim_ascii_start()))
        else {
            continue;
        };
        let canonical = headers::canonical(name.as_str());
        assert_eq!(HeaderName::from_bytes(canonical.as_bytes()).ok().as_ref(), Some(&name));
        assert_eq!(headers::canonical(&canonical), canonical);
        if let Ok(extra) = headers::AnswerHeaders::new([name.clone()]) {
            assert!(!headers::is_never_forwarded(name.as_str()) && extra.forwards(&name, false));
        }
        let forwards = headers::AnswerHeaders::default().forwards(&name, true);
        assert!(!(forwards && headers::is_never_forwarded(name.as_str())), "{name}");
        if let Some(location) = str::from_utf8(value.as_bytes())
            .ok()
            .and_then(|value| headers::location(value, "/agents/7").map(Cow::into_owned))
        {
            assert!(location.starts_with("/agents/7/") && !location.starts_with("/agents/7//"), "{location}");
        }
        map.append(name, value);
    }
    let upgrade = Upgrade::requested(&map);
    let impersonates = map.keys().filter(|name| headers::is_impersonation(name.as_str())).count();
    if headers::remove_dropped(&mut map).is_ok() {
        assert!(!map.keys().any(|name| headers::is_dropped(name.as_str())), "{map:?}");
        let left = map.keys().filter(|name| headers::is_impersonation(name.as_str())).count();
        assert_eq!(left, impersonates, "no header for impersonation is lost");
    }
    upgrade
}
