//! Requests of pages in browsers, with the session cookie of GitLab.

use super::*;
use crate::tests::lab::{COOKIE, CSRF};

const PAGE: (&str, &str) = ("origin", "https://gitlab.example.com");
const EVIL: (&str, &str) = ("origin", "https://evil.example.org");

/// Returns a request of a browser that has a session.
fn visit(method: &str, path: &str, headers: &[(&'static str, &str)]) -> Request<Full<Bytes>> {
    let mut request = Request::builder().method(method).uri(path).header("host", "kas");
    request = request.header("cookie", format!("theme=dark; _gitlab_kas={COOKIE}"));
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    request.body(Full::default()).unwrap()
}

/// Returns the headers that a page of GitLab adds, and `more`.
fn own<'a>(more: &[(&'static str, &'a str)]) -> Vec<(&'static str, &'a str)> {
    [&[("gitlab-agent-id", "7"), ("x-csrf-token", CSRF)][..], more].concat()
}

/// The headers of a WebSocket handshake, which no page can choose but its subprotocols.
const HANDSHAKE: [(&str, &str); 5] = [
    ("connection", "Upgrade"),
    ("upgrade", "websocket"),
    ("sec-websocket-version", "13"),
    ("sec-websocket-key", "AQIDBAUGBwgJCgsMDQ4PEA=="),
    ("sec-websocket-protocol", "v5.channel.k8s.io"),
];

async fn code(lab: &Lab, request: Request<Full<Bytes>>) -> u16 {
    send(lab, request).await.status().as_u16()
}

#[tokio::test]
async fn a_page_of_gitlab_reads_and_writes_with_the_session_of_its_user() {
    let lab = Lab::start(Setup::default(), describing()).await;
    for method in ["GET", "DELETE"] {
        let response = send(&lab, visit(method, "/api/v1/pods", &own(&[PAGE]))).await;
        assert_eq!(response.status(), 200);
        let headers = response.headers();
        assert_eq!(headers["access-control-allow-origin"], PAGE.1);
        assert_eq!(headers["access-control-allow-credentials"], "true");
        assert!(headers.get_all("vary").iter().any(|value| value == "Origin"));
        assert_eq!(json(response).await["target"], "/api/v1/pods");
    }
    // Without Origin, only what changes nothing.
    assert_eq!(code(&lab, visit("GET", "/api/v1/pods", &own(&[]))).await, 200);
    assert_eq!(*lab.allowed.lock(), ["gitlab:user:jane"; 3]);
    // An error can be read by the page too.
    let wrong = visit("GET", "/api/v1/pods", &[("gitlab-agent-id", "7"), ("x-csrf-token", "x"), PAGE]);
    let response = send(&lab, wrong).await;
    assert_eq!(response.headers()["access-control-allow-origin"], PAGE.1);
    assert_eq!(response.headers()["gitlab-unauthorized"], "true");
    failure(response, 401, "Unauthorized", None).await;
}

#[tokio::test]
async fn no_credential_of_a_session_reaches_the_agent() {
    let lab = Lab::start(Setup::default(), describing()).await;
    let csrf = "csrf%2Ftoken%2B1==";
    let path = format!("/api/v1/pods?limit=5&%67itlab-csrf-token={csrf}&gitlab%2Dagent-id=7&b=%41");
    let seen = json(send(&lab, visit("GET", &path, &[])).await).await;
    assert_eq!(seen["target"], "/api/v1/pods?limit=5&b=%41");
    let seen = json(send(&lab, visit("GET", "/api/v1/pods", &own(&[PAGE]))).await).await;
    let headers = seen["headers"].as_object().unwrap();
    for name in ["cookie", "x-csrf-token", "gitlab-agent-id", "origin"] {
        assert!(!headers.contains_key(name), "{name}");
    }
    // Whatever the credential is: here a token.
    let mut by_token =
        get(&format!("/agents/7/api/v1/pods?gitlab-csrf-token={csrf}&gitlab-agent-id=8"), TOKEN);
    by_token.headers_mut().insert("cookie", format!("_gitlab_kas={COOKIE}").parse().unwrap());
    by_token.headers_mut().insert("x-csrf-token", CSRF.parse().unwrap());
    let seen = json(send(&lab, by_token).await).await;
    assert_eq!(seen["target"], "/api/v1/pods");
    let bytes = lab.bytes.lock().clone();
    for secret in [COOKIE, CSRF, csrf, "theme=dark", TOKEN] {
        assert!(!bytes.windows(secret.len()).any(|window| window == secret.as_bytes()), "{secret}");
    }
}

#[tokio::test]
async fn a_forged_request_of_another_site_is_refused() {
    let lab = Lab::start(Setup::default(), describing()).await;
    let csrf = [("x-csrf-token", CSRF)];
    let (same, cross) = (("sec-fetch-site", "same-origin"), ("sec-fetch-site", "cross-site"));
    for (method, headers, expected) in [
        // Another site does not know the token.
        ("GET", vec![], 401),
        ("GET", vec![cross], 403),
        ("POST", vec![EVIL], 403),
        ("POST", vec![], 403),
        // Even if it knows it.
        ("GET", own(&[EVIL]), 403),
        ("GET", own(&[cross]), 403),
        ("POST", own(&[]), 403),
        ("POST", own(&[same]), 403),
        ("POST", own(&[("origin", "null")]), 403),
        // Its name resolves to kas: the host is then the attacker's.
        ("GET", own(&[("origin", "http://kas")]), 403),
        ("GET", csrf.to_vec(), 200),
    ] {
        assert_eq!(
            code(&lab, visit(method, "/agents/7/api", &headers)).await,
            expected,
            "{method} {headers:?}"
        );
    }
    assert_eq!(lab.received.lock().len(), 1);
}

#[tokio::test]
async fn a_web_socket_of_another_site_is_refused() {
    let lab = Lab::start(Setup::default(), describing()).await;
    let with_token = "/api/v1/namespaces/a/pods/b/exec?command=sh&gitlab-agent-id=7&gitlab-csrf-token=csrf%2Ftoken%2B1%3D%3D";
    let without = "/agents/7/api/v1/namespaces/a/pods/b/exec?command=sh";
    for (path, origin, expected) in [
        (with_token, Some(EVIL), 403),
        (with_token, None, 403),
        (without, Some(EVIL), 403),
        (without, Some(PAGE), 401),
    ] {
        let headers: Vec<_> = HANDSHAKE.into_iter().chain(origin).collect();
        assert_eq!(code(&lab, visit("GET", path, &headers)).await, expected, "{path} {origin:?}");
    }
    assert!(lab.received.lock().is_empty() && lab.allowed.lock().is_empty());
}

#[tokio::test]
async fn a_session_is_for_the_agent_that_the_page_names() {
    let lab = Lab::start(Setup::default(), describing()).await;
    let contradiction = visit("GET", "/agents/8/api", &own(&[PAGE]));
    failure(send(&lab, contradiction).await, 400, "BadRequest", None).await;
    let csrf_only = [("x-csrf-token", CSRF), PAGE];
    assert_eq!(code(&lab, visit("GET", "/agents/7/api", &csrf_only)).await, 200);
    // The user may not use agent 9, and kas does not say whether it exists.
    failure(send(&lab, visit("GET", "/agents/9/api", &csrf_only)).await, 403, "Forbidden", None).await;
    failure(send(&lab, visit("GET", "/api", &csrf_only)).await, 400, "BadRequest", None).await;
    let list = send(&lab, visit("GET", "/agents", &own(&[PAGE]))).await;
    failure(list, 501, "InternalError", None).await;
}

#[tokio::test]
async fn an_operator_sees_which_rule_refused_a_caller() {
    let lab = Lab::start(Setup::default(), describing()).await;
    let mut ids = Vec::new();
    for request in [
        visit("GET", "/agents/7/api", &own(&[EVIL])),
        visit("GET", "/agents/7/api", &[]),
        visit("GET", "/agents/7/api", &own(&[PAGE, ("x-unused", "1")])),
        get("/agents/7/api", "pat:7:hunter2"),
        get("/agents/7/api", NOBODY),
        get("/agents/9/api", TOKEN),
    ] {
        let response = send(&lab, request).await;
        ids.push(response.headers()["x-request-id"].to_str().unwrap().to_owned());
    }
    let of = |agent| lab.refusals.callers().of(AgentId::new(agent).unwrap());
    let refused = of(7);
    let seen: Vec<_> = refused
        .iter()
        .map(|refused| (refused.rule, refused.source, refused.caller.as_deref(), &*refused.request))
        .collect();
    assert_eq!(
        seen,
        [
            ("access", "file", Some("kas:nobody"), &*ids[4]),
            ("credential", "pat", None, &ids[3]),
            ("credential", "cookie", None, &ids[1]),
            ("origin", "cookie", None, &ids[0]),
        ]
    );
    assert_eq!(refused[0].why, "no access rule gives this agent to this caller");
    assert!(!format!("{refused:?}").contains("hunter2"));
    assert_eq!(of(9).len(), 1);
}

#[tokio::test]
async fn a_preflight_request_needs_an_allowed_page_and_neither_an_agent_nor_a_credential() {
    let lab = Lab::start(Setup::default(), describing()).await;
    let preflight = |origin: (&'static str, &'static str)| {
        let request = Request::options("/api/v1/pods").header("host", "kas").header(origin.0, origin.1);
        request
            .header("access-control-request-method", "PATCH")
            .header("access-control-request-headers", "gitlab-agent-id,x-csrf-token")
            .body(Full::default())
            .unwrap()
    };
    let response = send(&lab, preflight(PAGE)).await;
    assert_eq!(response.status(), 204);
    for (name, value) in [
        ("access-control-allow-origin", PAGE.1),
        ("access-control-allow-credentials", "true"),
        ("access-control-allow-methods", "GET, HEAD, POST, PUT, PATCH, DELETE"),
        ("access-control-allow-headers", "gitlab-agent-id,x-csrf-token"),
        ("access-control-max-age", "600"),
        ("vary", "Origin"),
    ] {
        assert_eq!(response.headers()[name], value);
    }
    let response = send(&lab, preflight(EVIL)).await;
    assert!(!response.headers().contains_key("access-control-allow-origin"));
    failure(response, 403, "Forbidden", None).await;
    assert!(lab.received.lock().is_empty());
}
