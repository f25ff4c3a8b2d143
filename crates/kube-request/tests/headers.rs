//! Which headers pass, how they are written, and what an error looks like.

#![allow(clippy::unwrap_used)] // a test may panic

use std::time::Duration;

use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use kube_request::{
    Status, Upgrade,
    headers::{
        AnswerHeaders, ImpersonationInConnection, canonical, impersonate_extra, is_dropped, is_impersonation,
        is_never_forwarded, location, remove_dropped, remove_hop_by_hop, remove_hop_by_hop_of_answer,
    },
    reason,
};
use proptest::prelude::*;

fn headers(lines: &[(&str, &str)]) -> HeaderMap {
    lines
        .iter()
        .map(|(name, value)| {
            (
                HeaderName::from_bytes(name.as_bytes()).unwrap(),
                HeaderValue::from_bytes(value.as_bytes()).unwrap(),
            )
        })
        .collect()
}

fn names(headers: &HeaderMap) -> Vec<&str> {
    let mut names: Vec<&str> = headers.keys().map(HeaderName::as_str).collect();
    names.sort_unstable();
    names
}

#[test]
fn names_are_canonical_as_in_go() {
    for (name, expected) in [
        ("content-type", "Content-Type"),
        ("SEC-WEBSOCKET-KEY", "Sec-Websocket-Key"),
        ("x-my-HEADER", "X-My-Header"),
        ("etag", "Etag"),
        ("x--y", "X--Y"),
        ("x_y-z", "X_y-Z"),
        ("impersonate-extra-a%2fb", "Impersonate-Extra-A%2fb"),
        ("-a", "-A"),
        ("", ""),
        // Not tokens.
        ("a b-c", "a b-c"),
        ("ü-x", "ü-x"),
        ("a:b", "a:b"),
    ] {
        assert_eq!(canonical(name), expected);
    }
}

#[test]
fn hop_by_hop_headers_are_removed_with_those_that_connection_names() {
    let sent = [
        ("accept", "a"),
        ("connection", "close, X-Hop"),
        ("connection", " x-other ,, cookie"),
        ("cookie", "a=b"),
        ("impersonate-user", "jane"),
        ("keep-alive", "1"),
        ("proxy-anything", "1"),
        ("te", "trailers"),
        ("trailer", "x"),
        ("transfer-encoding", "chunked"),
        ("upgrade", "SPDY/3.1"),
        ("x-hop", "1"),
        ("x-hop", "2"),
        ("x-other", "1"),
        ("x-third", "1"),
    ];
    let mut map = headers(&sent);
    assert_eq!(remove_hop_by_hop(&mut map), Ok(()));
    assert_eq!(names(&map), ["accept", "impersonate-user", "x-third"]);
    let mut map = headers(&sent);
    remove_hop_by_hop_of_answer(&mut map);
    assert_eq!(names(&map), ["accept", "impersonate-user", "x-third"]);

    let mut map = headers(&[("connection", "close,\tImpersonate-Extra-X"), ("impersonate-user", "jane")]);
    let error = ImpersonationInConnection("impersonate-extra-x".to_owned());
    assert_eq!(error.to_string(), "Connection names impersonate-extra-x");
    assert_eq!(remove_hop_by_hop(&mut map), Err(error.clone()));
    let mut map = headers(&[("connection", "Impersonate-Extra-X")]);
    assert_eq!(remove_dropped(&mut map), Err(error));
}

#[test]
fn headers_for_kas_and_about_the_client_are_dropped() {
    let dropped = [
        "authorization",
        "connection",
        "cookie",
        "expect",
        "forwarded",
        "gitlab-agent-id",
        "gitlab-kas-api-request",
        "host",
        "job-token",
        "kas-agent-id",
        "keep-alive",
        "origin",
        "private-token",
        "proxy-authorization",
        "referer",
        "sec-fetch-site",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "via",
        "x-csrf-token",
        "x-forwarded-client-cert",
        "x-forwarded-for",
        "x-real-ip",
        "x-remote-group",
        "x-remote-user",
    ];
    let kept = [
        "accept",
        "accept-encoding",
        "content-length",
        "content-type",
        "impersonate-group",
        "impersonate-user",
        "sec-websocket-key",
        "sec-websocket-protocol",
        "user-agent",
        "x-anything",
        "x-stream-protocol-version",
    ];
    let mut map = HeaderMap::new();
    for name in dropped.iter().chain(&kept) {
        assert_eq!(is_dropped(name), dropped.contains(name), "{name}");
        map.append(HeaderName::from_static(name), HeaderValue::from_static("x"));
        map.append(HeaderName::from_static(name), HeaderValue::from_static("y"));
    }
    assert_eq!(remove_dropped(&mut map), Ok(()));
    assert_eq!(names(&map), kept);
    assert_eq!(map.len(), 2 * kept.len());
}

#[test]
fn only_listed_headers_of_an_answer_are_forwarded() {
    let name = |name: &'static str| HeaderName::from_static(name);
    let list = AnswerHeaders::new([name("x-extra")]).unwrap();
    for forwarded in
        ["content-type", "etag", "audit-id", "x-kubernetes-pf-flowschema-uid", "x-extra", "location"]
    {
        assert!(
            list.forwards(&name(forwarded), false) && list.forwards(&name(forwarded), true),
            "{forwarded}"
        );
    }
    for of_upgrade in ["sec-websocket-accept", "sec-websocket-protocol", "x-stream-protocol-version"] {
        assert!(!list.forwards(&name(of_upgrade), false) && list.forwards(&name(of_upgrade), true));
    }
    for never in [
        "access-control-allow-origin",
        "alt-svc",
        "clear-site-data",
        "connection",
        "content-security-policy",
        "cross-origin-resource-policy",
        "link",
        "nel",
        "proxy-authenticate",
        "refresh",
        "report-to",
        "reporting-endpoints",
        "service-worker-allowed",
        "set-cookie",
        "strict-transport-security",
        "x-content-type-options",
    ] {
        assert!(is_never_forwarded(never), "{never}");
        assert!(!list.forwards(&name(never), true), "{never}");
        assert_eq!(AnswerHeaders::new([name("x-a"), name(never)]).unwrap_err().0, name(never));
    }
    for other in ["server", "www-authenticate", "x-request-id", "x-other"] {
        assert!(!list.forwards(&name(other), true) && !is_never_forwarded(other), "{other}");
    }
}

#[test]
fn location_stays_on_this_site() {
    for (value, expected) in [
        ("/login?x#y", Some("/k8s/agents/7/login?x#y")),
        ("/", Some("/k8s/agents/7/")),
        ("//evil/x", None),
        ("/\\evil", None),
        ("\\\\evil", None),
        ("https://evil/", None),
        ("login", None),
        ("", None),
        ("/\t/evil.example/", None),
        ("/\t\\evil.example/", None),
        ("/a\tb", None),
        ("/a b", None),
        ("/\r\n/evil", None),
        ("/ä", None),
        ("/\u{7f}", None),
    ] {
        // The prefix may be empty, as it is if the name of the host names the agent.
        assert_eq!(location(value, "").is_some(), expected.is_some(), "{value:?}");
        assert_eq!(location(value, "/k8s/agents/7").as_deref(), expected, "{value}");
    }
    assert_eq!(location("/x", "").as_deref(), Some("/x"));
}

#[test]
fn impersonation_is_known_in_every_spelling() {
    for name in ["Impersonate-User", "impersonate-GROUP", "IMPERSONATE-EXTRA-x", "impersonate-"] {
        assert!(is_impersonation(name), "{name}");
    }
    for name in ["impersonate", "x-impersonate-user", "", "impersonaté-", "impersonateé"] {
        assert!(!is_impersonation(name), "{name}");
    }
    assert_eq!(impersonate_extra("agent.gitlab.com/Id%"), "impersonate-extra-agent.gitlab.com%2Fid%25");
    assert_eq!(impersonate_extra("ü"), "impersonate-extra-%C3%BC");
}

#[test]
fn upgrade_needs_both_headers_and_a_known_protocol() {
    for (lines, expected) in [
        (&[("connection", "Upgrade"), ("upgrade", "websocket")][..], Some(Upgrade::WebSocket)),
        (&[("connection", "keep-alive, upgrade"), ("upgrade", "WebSocket")], Some(Upgrade::WebSocket)),
        (
            &[("connection", "close"), ("connection", "UPGRADE"), ("upgrade", "spdy/3.1")],
            Some(Upgrade::Spdy31),
        ),
        (&[("connection", "upgrade"), ("upgrade", "h2c, SPDY/3.1, websocket")], Some(Upgrade::Spdy31)),
        (
            &[("connection", "upgrade"), ("upgrade", "h2c"), ("upgrade", "websocket")],
            Some(Upgrade::WebSocket),
        ),
        (&[("connection", "upgrade, http2-settings"), ("upgrade", "h2c")], None),
        (&[("connection", "upgrade"), ("upgrade", "SPDY/3")], None),
        (&[("upgrade", "websocket")], None),
        (&[("connection", "upgraded"), ("upgrade", "websocket")], None),
        (&[("connection", "upgrade")], None),
        (&[], None),
    ] {
        assert_eq!(Upgrade::requested(&headers(lines)), expected, "{lines:?}");
    }
    assert_eq!((Upgrade::WebSocket.token(), Upgrade::Spdy31.token()), ("websocket", "SPDY/3.1"));
}

#[test]
fn status_is_one_line_with_its_keys_in_order() {
    let text = |status: &Status| String::from_utf8(status.to_json("ab12")).unwrap();
    let status = Status::new(StatusCode::SERVICE_UNAVAILABLE, "the queue of agent 7 is \"full\"\n");
    assert_eq!(
        text(&status),
        "{\"kind\":\"Status\",\"apiVersion\":\"v1\",\"metadata\":{},\"status\":\"Failure\",\"message\":\"kas: \
         the queue of agent 7 is \\\"full\\\"\\n (request ab12)\",\"reason\":\"ServiceUnavailable\",\"code\":503}\n"
    );
    let status = status.with_retry_after(Duration::from_secs(1));
    assert!(
        text(&status).ends_with(
            "(request ab12)\",\"reason\":\"ServiceUnavailable\",\"details\":{\"retryAfterSeconds\":1},\"code\":503}\n"
        ),
        "{}",
        text(&status)
    );
    for (wait, seconds) in [
        (Duration::ZERO, 1),
        (Duration::from_millis(1), 1),
        (Duration::from_millis(2_001), 3),
        (Duration::from_secs(2), 2),
        (Duration::MAX, u64::MAX),
    ] {
        assert_eq!(status.clone().with_retry_after(wait).retry_after(), Some(seconds));
    }
}

#[test]
fn every_code_has_a_reason_that_clients_know() {
    for (code, expected) in [
        (400, "BadRequest"),
        (401, "Unauthorized"),
        (403, "Forbidden"),
        (404, "BadRequest"),
        (405, "MethodNotAllowed"),
        (408, "Timeout"),
        (413, "BadRequest"),
        (414, "BadRequest"),
        (429, "TooManyRequests"),
        (431, "BadRequest"),
        (500, "InternalError"),
        (501, "InternalError"),
        (502, "InternalError"),
        (503, "ServiceUnavailable"),
        (504, "Timeout"),
    ] {
        assert_eq!(reason(StatusCode::from_u16(code).unwrap()), expected, "{code}");
    }
}

proptest! {
    #[test]
    fn any_text_is_a_valid_status(text in any::<String>(), id in any::<String>()) {
        let json = Status::new(StatusCode::BAD_REQUEST, text.clone()).to_json(&id);
        prop_assert_eq!(json.iter().filter(|byte| **byte == b'\n').count(), 1);
        let read: serde_json::Value = serde_json::from_slice(&json).unwrap();
        prop_assert_eq!(read["message"].as_str(), Some(&*format!("kas: {text} (request {id})")));
    }

    #[test]
    fn any_name_is_judged(name in any::<String>(), value in any::<String>()) {
        let written = canonical(&name);
        prop_assert_eq!(canonical(&written), &*written);
        prop_assert!(written.eq_ignore_ascii_case(&name));
        is_impersonation(&name);
        prop_assert!(HeaderName::from_bytes(impersonate_extra(&name).as_bytes()).is_ok());
        if let Some(location) = location(&value, "/p") {
            prop_assert!(location.starts_with("/p/") && !location.starts_with("/p//"));
        }
    }
}
