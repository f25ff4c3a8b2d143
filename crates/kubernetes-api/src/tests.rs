//! The endpoint on real sockets, with real tunnels.

#[cfg(test)]
mod browser;
mod connect;
mod ends;
mod fleet;
mod lab;
mod tracker;
mod upgrades;

use std::time::Duration;

use bytes::Bytes;
use callers::AgentId;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Empty, Full};
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo};
use kube_request::Kind;
use process::lifecycle::Phase;
use serde_json::Value;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    sync::mpsc,
    time::timeout,
};
use tunnel::{features::Features, kas_end::AgentKind};

use self::lab::{AGENT, JANE, Lab, NOBODY, SOON, Setup, TOKEN, Writer, api, describing, status, streaming};
use crate::{OpenLimits, ended_by::EndedBy};

/// A connection of HTTP/1.1 whose bytes the test sees.
struct Raw {
    stream: TcpStream,
    read: Vec<u8>,
}

impl Raw {
    async fn connect(lab: &Lab) -> Self {
        Self { stream: TcpStream::connect(lab.address).await.unwrap(), read: Vec::new() }
    }

    async fn send(&mut self, text: &str) {
        self.stream.write_all(text.as_bytes()).await.unwrap();
    }

    /// Reads until this text has come. Returns everything before it and it.
    async fn until(&mut self, text: &str) -> String {
        let wait = async {
            loop {
                if let Some(at) = self.read.windows(text.len()).position(|window| window == text.as_bytes()) {
                    let rest = self.read.split_off(at + text.len());
                    return String::from_utf8(std::mem::replace(&mut self.read, rest)).unwrap();
                }
                let n = self.stream.read_buf(&mut self.read).await.unwrap();
                assert!(
                    n > 0,
                    "the connection ended before {text:?}: {:?}",
                    String::from_utf8_lossy(&self.read)
                );
            }
        };
        timeout(SOON, wait).await.expect(text)
    }

    /// Reads to the end of the connection. `Err`: it was reset.
    async fn rest(&mut self) -> Result<String, String> {
        let mut read = std::mem::take(&mut self.read);
        let ended =
            timeout(SOON, self.stream.read_to_end(&mut read)).await.expect("the end of the connection");
        let text = String::from_utf8_lossy(&read).into_owned();
        ended.map(|_| text.clone()).map_err(|_| text)
    }
}

fn get(path: &str, token: &str) -> Request<Full<Bytes>> {
    let request = Request::get(path).header("host", "kas").header("authorization", format!("Bearer {token}"));
    request.body(Full::default()).unwrap()
}

/// Sends a request on a connection of its own.
async fn send(lab: &Lab, request: Request<Full<Bytes>>) -> Response<Incoming> {
    let stream = TcpStream::connect(lab.address).await.unwrap();
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    timeout(SOON, sender.send_request(request)).await.expect("an answer").unwrap()
}

async fn text(response: Response<Incoming>) -> String {
    let body = timeout(SOON, response.into_body().collect()).await.expect("the end of the body").unwrap();
    String::from_utf8(body.to_bytes().to_vec()).unwrap()
}

async fn json(response: Response<Incoming>) -> Value {
    serde_json::from_str(&text(response).await).unwrap()
}

/// Checks that an answer is a `Status` of kas, and returns its message.
async fn failure(response: Response<Incoming>, code: u16, reason: &str, retry_after: Option<u64>) -> String {
    let headers = response.headers().clone();
    let id = headers["x-request-id"].to_str().unwrap().to_owned();
    assert_eq!(response.status(), code);
    let status = json(response).await;
    assert_eq!((&status["kind"], &status["apiVersion"]), (&"Status".into(), &"v1".into()));
    assert_eq!((&status["code"], &status["reason"]), (&code.into(), &reason.into()), "{status}");
    assert_eq!(headers.get("retry-after").map(|value| value.to_str().unwrap().parse().unwrap()), retry_after);
    assert_eq!(status["details"]["retryAfterSeconds"].as_u64(), retry_after);
    let message = status["message"].as_str().unwrap();
    assert!(message.starts_with("kas: ") && message.ends_with(&format!("(request {id})")), "{message}");
    message.to_owned()
}

async fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let wait = async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(SOON, wait).await.unwrap_or_else(|_| panic!("{what}"));
}

/// An API server whose streams the test writes.
fn streams(content_type: &'static str) -> (lab::Api, mpsc::Receiver<Writer>) {
    let (send, receive) = mpsc::channel(8);
    let api = api(move |_| {
        let (response, writer) = streaming(content_type);
        let send = send.clone();
        async move {
            send.send(writer).await.unwrap();
            response
        }
    });
    (api, receive)
}

async fn next(writers: &mut mpsc::Receiver<Writer>) -> Writer {
    timeout(SOON, writers.recv()).await.expect("a request").unwrap()
}

#[tokio::test]
async fn a_request_reaches_the_api_server_byte_for_byte_and_without_its_credential() {
    let lab = Lab::start(Setup::default(), describing()).await;
    let mut request = get("/agents/7/api/v1/pods%2Fx//y;z?b=%41&a=1&b=", TOKEN);
    let headers = request.headers_mut();
    for (name, value) in [
        ("cookie", "secret-cookie=1"),
        ("x-forwarded-for", "1.2.3.4"),
        ("x-remote-user", "admin"),
        ("connection", "x-hop"),
        ("x-hop", "1"),
        ("x-request-id", "mine"),
        ("audit-id", "mine"),
        ("user-agent", "kubectl/v1"),
        ("x-service", "passes"),
    ] {
        headers.insert(name, value.parse().unwrap());
    }
    let response = send(&lab, request).await;
    assert_eq!(response.status(), 200);
    let id = response.headers()["x-request-id"].to_str().unwrap().to_owned();
    assert!(response.headers().contains_key("content-length"));
    assert_eq!(response.headers()["server"], "gitlab-kas/v/c");
    assert_eq!(response.headers()["cache-control"], "private, no-store");
    let seen = json(response).await;
    assert_eq!(seen["target"], "/api/v1/pods%2Fx//y;z?b=%41&a=1&b=");
    let headers = seen["headers"].as_object().unwrap();
    assert_eq!(headers["audit-id"][0], format!("kas-{id}"));
    assert_eq!(headers["x-request-id"][0], id);
    assert_eq!(headers["user-agent"][0], "kubectl/v1 via agentk");
    assert_eq!(headers["x-service"][0], "passes");
    for name in ["authorization", "cookie", "x-forwarded-for", "x-remote-user", "x-hop", "connection", "host"]
    {
        assert!(!headers.contains_key(name), "{name}");
    }
    let bytes = lab.bytes.lock().clone();
    for secret in [TOKEN.as_bytes(), b"secret-cookie", b"1.2.3.4"] {
        assert!(!bytes.windows(secret.len()).any(|window| window == secret));
    }
    let received = lab.received.lock().clone();
    assert_eq!(received.len(), 1);
    assert_eq!(received[0].content_length, Some(0));
    assert!(received[0].extra.is_none());
}

#[tokio::test]
async fn path_host_and_prefix_select_the_agent() {
    let lab = Lab::start(Setup { prefix: "/k8s", ..Setup::default() }, describing()).await;
    let seen = json(send(&lab, get("/k8s/agents/7", TOKEN)).await).await;
    assert_eq!(seen["target"], "/");
    let mut by_host = get("/k8s/version?x", TOKEN);
    by_host.headers_mut().insert("host", "agent-7.k8s.example.com".parse().unwrap());
    let seen = json(send(&lab, by_host).await).await;
    assert_eq!(seen["target"], "/version?x");
    let mut both = get("/k8s/agents/8/version", TOKEN);
    both.headers_mut().insert("host", "agent-7.k8s.example.com".parse().unwrap());
    failure(send(&lab, both).await, 400, "BadRequest", None).await;
    for path in
        ["/version", "/k8s/version", "/k8s/agents/x/version", "/k8s/agents/7/a/%2e%2e/b", "/k8s/agents/7/%zz"]
    {
        failure(send(&lab, get(path, TOKEN)).await, 400, "BadRequest", None).await;
    }
    let absolute = get("http://agent-7.k8s.example.com/k8s/version", TOKEN);
    let seen = json(send(&lab, absolute).await).await;
    assert_eq!(seen["target"], "/version");
    assert_eq!(send(&lab, get("/fleet/x", TOKEN)).await.status(), 404);
}

#[tokio::test]
async fn a_diff_of_files_is_made_with_the_rights_of_the_caller() {
    let lab = Lab::start(Setup::default(), describing()).await;
    let post = |query: &str, token: &str, body: &str| {
        let request = Request::post(format!("/fleet/diff{query}"))
            .header("host", "kas")
            .header("authorization", format!("Bearer {token}"));
        request.body(Full::from(body.to_owned())).unwrap()
    };
    let body = r#"{"files": [{"path": "a.yaml", "content": "x: 1"}]}"#;
    let query = "?agent=7&project=group%2Fweb";
    let made = json(send(&lab, post(query, TOKEN, body)).await).await;
    let expected = |user: Option<&str>| serde_json::json!({ "agent": 7, "project": "group/web", "files": [["a.yaml", 4]], "user": user });
    assert_eq!(made, expected(None));
    let made = json(send(&lab, post(query, JANE, body)).await).await;
    assert_eq!(made, expected(Some("kas:jane")));
    // It is no request to the cluster, and is not counted as one.
    assert!(lab.received.lock().is_empty() && lab.allowed.lock().is_empty());

    failure(send(&lab, post(query, NOBODY, body)).await, 403, "Forbidden", None).await;
    assert_eq!(send(&lab, post(query, "kasu_unknown", body)).await.status(), 401);
    failure(send(&lab, post("?agent=7", TOKEN, body)).await, 400, "BadRequest", None).await;
    failure(send(&lab, post("?project=a", TOKEN, body)).await, 400, "BadRequest", None).await;
    failure(send(&lab, post(query, TOKEN, "{}")).await, 400, "BadRequest", None).await;
    assert_eq!(send(&lab, post("?agent=7&project=missing", TOKEN, body)).await.status(), 422);
    assert_eq!(send(&lab, get("/fleet/diff?agent=7&project=a", TOKEN)).await.status(), 405);
    let mut impersonating = post(query, TOKEN, body);
    impersonating.headers_mut().insert("impersonate-user", "admin".parse().unwrap());
    failure(send(&lab, impersonating).await, 400, "BadRequest", None).await;
}

#[tokio::test]
async fn credentials_and_permissions_are_checked_before_anything_is_sent() {
    let lab = Lab::start(Setup::default(), describing()).await;
    let mut none = get("/agents/7/version", TOKEN);
    none.headers_mut().remove("authorization");
    let response = send(&lab, none).await;
    assert_eq!(response.headers()["www-authenticate"], "Bearer");
    assert_eq!(response.headers()["gitlab-unauthorized"], "true");
    failure(response, 401, "Unauthorized", None).await;
    let unknown = "kasu_unknownunknownunknownunknownunknownunknownunk";
    for (path, token, code, reason) in [
        ("/agents/7/version", unknown, 401, "Unauthorized"),
        ("/agents/7/version", "rubbish", 401, "Unauthorized"),
        ("/agents/7/version", NOBODY, 403, "Forbidden"),
        ("/agents/9/version", TOKEN, 403, "Forbidden"),
        ("/agents/7/version", "ci:8:x", 400, "BadRequest"),
    ] {
        failure(send(&lab, get(path, token)).await, code, reason, None).await;
    }
    let two = Request::get("/agents/7/version")
        .header("host", "kas")
        .header("authorization", format!("Bearer {TOKEN}"))
        .header("authorization", format!("Bearer {TOKEN}"));
    failure(send(&lab, two.body(Full::default()).unwrap()).await, 401, "Unauthorized", None).await;
    // Whether the agent exists is not told.
    let forbidden = failure(send(&lab, get("/agents/9/version", TOKEN)).await, 403, "Forbidden", None).await;
    let no_rule = failure(send(&lab, get("/agents/7/version", NOBODY)).await, 403, "Forbidden", None).await;
    let without_id = |message: &str| message.split(" (request").next().unwrap().to_owned();
    assert_eq!(without_id(&forbidden), without_id(&no_rule));
    assert!(lab.received.lock().is_empty(), "nothing was sent to the agent");
}

#[tokio::test]
async fn requests_run_as_the_identity_of_the_caller() {
    let lab = Lab::start(Setup::default(), describing()).await;
    let seen = json(send(&lab, get("/agents/7/version", JANE)).await).await;
    assert_eq!(seen["headers"]["impersonate-user"][0], "kas:jane");
    assert_eq!(seen["headers"]["impersonate-group"][0], "kas:dev");
    assert_eq!(seen["headers"]["impersonate-extra-agent.gitlab.com%2fid"][0], "7");
    for token in [JANE, TOKEN] {
        let mut request = get("/agents/7/version", token);
        request.headers_mut().insert("impersonate-user", "admin".parse().unwrap());
        failure(send(&lab, request).await, 400, "BadRequest", None).await;
        let mut hidden = get("/agents/7/version", token);
        hidden.headers_mut().insert("connection", "Impersonate-User".parse().unwrap());
        failure(send(&lab, hidden).await, 400, "BadRequest", None).await;
    }
    assert_eq!(lab.received.lock().len(), 1);
    let old = Setup { features: Features::TARGET, ..Setup::default() };
    let lab = Lab::start(old, describing()).await;
    let pods = get("/agents/7/api/v1/pods", JANE);
    let message = failure(send(&lab, pods).await, 501, "InternalError", None).await;
    assert!(message.contains("which cannot impersonate a user"), "{message}");
    // What kubectl reads first, and takes as it is.
    let raw = send(&lab, get("/agents/7/api?timeout=32s", JANE)).await;
    assert_eq!(
        (raw.status(), &raw.headers()["content-type"]),
        (501.try_into().unwrap(), &"text/plain; charset=utf-8".parse().unwrap())
    );
    let raw = text(raw).await;
    assert!(raw.starts_with("kas: ") && raw.contains("which cannot impersonate a user"), "{raw}");
    assert!(lab.received.lock().is_empty());
}

#[tokio::test]
async fn an_agentk_without_verbatim_targets_gets_decoded_fields_or_nothing() {
    let old = Setup { features: Features::NONE, kind: AgentKind::Recent, tunnels: 4, ..Setup::default() };
    let lab = Lab::start(old, describing()).await;
    let seen = json(send(&lab, get("/agents/7/a%20b?x=%31", TOKEN)).await).await;
    assert_eq!(seen["target"], "/a%20b?x=1");
    assert_eq!(seen["headers"]["accept-encoding"][0], "identity");
    assert_eq!(lab.received.lock()[0].target, Bytes::new());
    let message = failure(send(&lab, get("/agents/7/a%2Fb", TOKEN)).await, 501, "InternalError", None).await;
    assert!(message.contains("update it"), "{message}");
    assert_eq!(lab.received.lock().len(), 1);
}

#[tokio::test]
async fn an_agent_that_is_away_is_told_without_a_retry() {
    let lab = Lab::start(Setup { tunnels: 0, ..Setup::default() }, describing()).await;
    let message =
        failure(send(&lab, get("/agents/7/version", TOKEN)).await, 503, "ServiceUnavailable", None).await;
    assert!(message.starts_with("kas: agent 7 is not connected (request"), "{message}");
    let watch = send(&lab, get("/agents/7/api/v1/pods?watch=1", TOKEN)).await;
    failure(watch, 429, "TooManyRequests", None).await;
}

#[tokio::test]
async fn busy_tunnels_are_told_from_an_absent_agent() {
    let (api, mut writers) = streams("application/json");
    let lab = Lab::start(Setup { tunnels: 1, ..Setup::default() }, api).await;
    let watch = send(&lab, get("/agents/7/api/v1/pods?watch=1", TOKEN)).await;
    let _writer = next(&mut writers).await;
    let short = send(&lab, get("/agents/7/version", TOKEN)).await;
    failure(short, 503, "ServiceUnavailable", Some(1)).await;
    drop(watch);
}

#[tokio::test]
async fn every_part_of_an_answer_is_passed_on_as_it_comes() {
    let (api, mut writers) = streams("text/plain");
    let lab = Lab::start(Setup::default(), api).await;
    let mut client = Raw::connect(&lab).await;
    client
        .send(&format!(
            "GET /agents/7/api/v1/namespaces/a/pods/b/log?follow=true HTTP/1.1\r\nHost: kas\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
        ))
        .await;
    let writer = next(&mut writers).await;
    let head = client.until("\r\n\r\n").await;
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
    assert!(head.contains("transfer-encoding: chunked\r\n"), "{head}");
    assert!(head.contains("x-accel-buffering: no\r\n"), "{head}");
    for part in ["one\n", "two\n"] {
        writer.write(part).await;
        assert_eq!(client.until(part).await, format!("4\r\n{part}"));
        client.until("\r\n").await;
    }
    drop(writer);
    assert_eq!(client.until("0\r\n\r\n").await, "0\r\n\r\n");
    eventually("the request has ended", || lab.metrics.ended_so(Kind::Follow, EndedBy::Upstream) == 1).await;
    // The connection serves the next request.
    client.send(&format!("GET /agents/7/version HTTP/1.0\r\nAuthorization: Bearer {TOKEN}\r\n\r\n")).await;
    let writer = next(&mut writers).await;
    writer.write("old").await;
    let head = client.until("\r\n\r\n").await;
    assert!(!head.contains("transfer-encoding"), "{head}");
    drop(writer);
    assert_eq!(client.rest().await, Ok("old".to_owned()), "HTTP/1.0 ends with the connection");
}

#[tokio::test]
async fn tunnels_serve_further_requests() {
    let lab = Lab::start(Setup { tunnels: 1, ..Setup::default() }, describing()).await;
    for path in ["/agents/7/a", "/agents/7/b"] {
        for method in ["GET", "HEAD", "DELETE"] {
            let mut request = get(path, TOKEN);
            *request.method_mut() = method.parse().unwrap();
            let response = send(&lab, request).await;
            assert_eq!(response.status(), 200, "{method}");
            let length = response.headers()["content-length"].clone();
            assert_ne!(length, "0");
            assert_eq!(text(response).await.is_empty(), method == "HEAD");
        }
    }
    let (idle, busy, waiting) = lab.registry.counts(AgentId::new(AGENT).unwrap());
    assert_eq!((idle, busy, waiting), (1, 0, 0));
    let state = lab.bytes.lock().clone();
    assert!(!state.is_empty());
}

#[tokio::test]
async fn an_answer_that_is_not_complete_never_looks_complete() {
    let (api, mut writers) = streams("application/json");
    let lab = Lab::start(Setup::default(), api).await;
    for (version, kind) in
        [("1.1", "version"), ("1.1", "api/v1/namespaces/a/pods/b/log?follow=1"), ("1.0", "version")]
    {
        let mut client = Raw::connect(&lab).await;
        client
            .send(&format!(
                "GET /agents/7/{kind} HTTP/{version}\r\nHost: kas\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
            ))
            .await;
        let writer = next(&mut writers).await;
        writer.write("{\"a\":1}\n").await;
        client.until("{\"a\":1}\n").await;
        writer.fail().await;
        match client.rest().await {
            // In HTTP/1.1 the last chunk is missing.
            Ok(rest) => assert!(version == "1.1" && !rest.contains("0\r\n\r\n"), "{version} {rest:?}"),
            Err(_) => assert_eq!(version, "1.0", "the connection was reset"),
        }
    }
    eventually("the ends were counted", || {
        lab.metrics.ended_so(Kind::Short, EndedBy::Upstream) == 2
            && lab.metrics.ended_so(Kind::Follow, EndedBy::Upstream) == 1
    })
    .await;
}

#[tokio::test]
async fn a_wrong_length_breaks_the_answer_before_its_last_byte() {
    let lab = Lab::start(
        Setup::default(),
        api(|request| async move {
            let mut response = status(200, "12345");
            let length = if request.uri().path() == "/short" { "6" } else { "4" };
            response.headers_mut().insert("content-length", length.parse().unwrap());
            response
        }),
    )
    .await;
    for path in ["short", "long"] {
        let response = send(&lab, get(&format!("/agents/7/{path}"), TOKEN)).await;
        assert_eq!(response.status(), 200);
        let body = timeout(SOON, response.into_body().collect()).await.expect("the end of the body");
        assert!(body.is_err(), "{path}");
    }
}

#[tokio::test]
async fn a_watch_whose_tunnel_is_lost_ends_after_an_event() {
    let (api, mut writers) = streams("application/json");
    let lab = Lab::start(Setup::default(), api).await;
    let watch = format!(
        "GET /agents/7/api/v1/pods?watch=1 HTTP/1.1\r\nHost: kas\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
    );
    let (mut whole, mut partial) = (Raw::connect(&lab).await, Raw::connect(&lab).await);
    whole.send(&watch).await;
    let first = next(&mut writers).await;
    partial.send(&watch).await;
    let second = next(&mut writers).await;
    first.write("{\"type\":\"ADDED\"}\n").await;
    whole.until("}\n\r\n").await;
    second.write("{\"type\":\"ADDED\"}\n{\"ty").await;
    partial.until("{\"ty\r\n").await;
    lab.lose_tunnels();
    assert_eq!(whole.until("0\r\n\r\n").await, "0\r\n\r\n");
    let rest = partial.rest().await.unwrap_or_default();
    assert!(!rest.contains("0\r\n\r\n"), "{rest}");
    eventually("both were counted", || lab.metrics.ended_so(Kind::Watch, EndedBy::Tunnel) == 2).await;
}

#[tokio::test]
async fn a_watch_without_an_event_does_not_end_within_a_second() {
    let (api, mut writers) = streams("application/json");
    let lab = Lab::start(Setup::default(), api).await;
    let mut client = Raw::connect(&lab).await;
    client
        .send(&format!(
            "GET /agents/7/api/v1/pods?watch=1 HTTP/1.1\r\nHost: kas\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
        ))
        .await;
    let _writer = next(&mut writers).await;
    client.until("\r\n\r\n").await;
    let begun = tokio::time::Instant::now();
    lab.lose_tunnels();
    client.until("0\r\n\r\n").await;
    // client-go measures from when it has the head.
    assert!(begun.elapsed() >= Duration::from_secs(1), "{:?}", begun.elapsed());
}

#[tokio::test]
async fn watches_end_after_an_event_when_kas_leaves_and_others_go_on() {
    let (api, mut writers) = streams("application/json");
    let lab = Lab::start(Setup::default(), api).await;
    let mut client = Raw::connect(&lab).await;
    client
        .send(&format!(
            "GET /agents/7/api/v1/pods?watch=1 HTTP/1.1\r\nHost: kas\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
        ))
        .await;
    let watch = next(&mut writers).await;
    watch.write("{\"type\":").await;
    client.until("{\"type\":\r\n").await;
    let short = send(&lab, get("/agents/7/version", TOKEN)).await;
    let writer = next(&mut writers).await;
    assert_eq!(send(&lab, get("/-/ready", TOKEN)).await.status(), 200);
    lab.lifecycle.advance(Phase::Leaving);
    failure(send(&lab, get("/-/ready", TOKEN)).await, 503, "ServiceUnavailable", None).await;
    eventually("the watch is to end", || lab.metrics.open_now(Kind::Watch) == 1).await;
    watch.write("\"ADDED\"}\n").await;
    client.until("\"ADDED\"}\n\r\n0\r\n\r\n").await;
    timeout(SOON, watch.left()).await.expect("the API server is told");
    eventually("it was counted", || lab.metrics.ended_so(Kind::Watch, EndedBy::Drain) == 1).await;
    writer.write("{}").await;
    drop(writer);
    assert_eq!(text(short).await, "{}");
}

#[tokio::test]
async fn a_watch_ends_when_its_user_is_removed() {
    let (api, mut writers) = streams("application/json");
    let lab = Lab::start(Setup::default(), api).await;
    let watch = send(&lab, get("/agents/7/api/v1/pods?watch=1", TOKEN)).await;
    let log = send(&lab, get("/agents/7/api/v1/namespaces/a/pods/b/log?follow=1", TOKEN)).await;
    let first = next(&mut writers).await;
    let second = next(&mut writers).await;
    first.write("{}\n").await;
    second.write("{}\n").await;
    let (mut watch, mut log) = (watch.into_body(), log.into_body());
    for body in [&mut watch, &mut log] {
        assert_eq!(timeout(SOON, body.frame()).await.unwrap().unwrap().unwrap().into_data().unwrap(), "{}\n");
    }
    lab.users.revoke(TOKEN);
    let rest = timeout(SOON, watch.collect()).await.expect("the end of the watch").unwrap();
    assert_eq!(rest.to_bytes(), "");
    assert!(
        timeout(SOON, log.collect()).await.expect("the end of the log").is_err(),
        "a log has no clean end"
    );
    failure(send(&lab, get("/agents/7/version", TOKEN)).await, 401, "Unauthorized", None).await;
    eventually("both were counted", || {
        lab.metrics.ended_so(Kind::Watch, EndedBy::Revoked) == 1
            && lab.metrics.ended_so(Kind::Follow, EndedBy::Revoked) == 1
    })
    .await;
}

#[tokio::test]
async fn a_client_that_leaves_cancels_its_request() {
    let (api, mut writers) = streams("application/json");
    let lab = Lab::start(Setup::default(), api).await;
    let response = send(&lab, get("/agents/7/api/v1/pods?watch=1", TOKEN)).await;
    let writer = next(&mut writers).await;
    drop(response);
    timeout(SOON, writer.left()).await.expect("the API server is told");
    eventually("it was counted", || lab.metrics.ended_so(Kind::Watch, EndedBy::Client) == 1).await;
    // Also before there is an answer.
    let (started, mut requests) = mpsc::channel::<mpsc::Sender<()>>(1);
    let lab = Lab::start(
        Setup::default(),
        lab::api(move |_| {
            let started = started.clone();
            async move {
                let (alive, mut dropped) = mpsc::channel(1);
                started.send(alive).await.unwrap();
                dropped.recv().await;
                status(200, "")
            }
        }),
    )
    .await;
    let mut client = Raw::connect(&lab).await;
    client
        .send(&format!(
            "GET /agents/7/version HTTP/1.1\r\nHost: kas\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
        ))
        .await;
    let request = timeout(SOON, requests.recv()).await.expect("a request").unwrap();
    drop(client);
    timeout(SOON, request.closed()).await.expect("the API server is told");
}

#[tokio::test]
async fn uploads_are_passed_on_with_their_length() {
    let lab = Lab::start(Setup::default(), describing()).await;
    let body = "x".repeat(100_000);
    let request = Request::post("/agents/7/api/v1/namespaces")
        .header("host", "kas")
        .header("authorization", format!("Bearer {TOKEN}"));
    let seen = json(send(&lab, request.body(Full::from(body.clone())).unwrap()).await).await;
    assert_eq!(seen["body"].as_str(), Some(&*body));
    assert_eq!(lab.received.lock()[0].content_length, Some(100_000));
    let mut client = Raw::connect(&lab).await;
    client
        .send(&format!(
            "POST /agents/7/a HTTP/1.1\r\nHost: kas\r\nAuthorization: Bearer {TOKEN}\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n"
        ))
        .await;
    eventually("the request has begun", || lab.received.lock().len() == 2).await;
    client.send("2\r\nde\r\n0\r\n\r\n").await;
    client.until("\"body\":\"abcde\"").await;
    assert_eq!(lab.received.lock()[1].content_length, Some(-1));
}

#[tokio::test]
async fn an_upload_that_ends_early_is_not_carried_out() {
    let (seen, mut bodies) = mpsc::channel(4);
    let lab = Lab::start(
        Setup::default(),
        api(move |request| {
            let seen = seen.clone();
            async move {
                let read = request.into_body().collect().await;
                seen.send(read.is_ok()).await.unwrap();
                status(200, "")
            }
        }),
    )
    .await;
    for length in ["Content-Length: 10\r\n\r\nabc", "Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n"] {
        let mut client = Raw::connect(&lab).await;
        client
            .send(&format!(
                "POST /agents/7/a HTTP/1.1\r\nHost: kas\r\nAuthorization: Bearer {TOKEN}\r\n{length}"
            ))
            .await;
        let before = lab.received.lock().len();
        eventually("the request has begun", || lab.received.lock().len() > before || before > 0).await;
        drop(client);
        // The request is either cancelled or fails.
        let outcome = timeout(Duration::from_millis(300), bodies.recv()).await;
        assert_ne!(outcome, Ok(Some(true)));
    }
}

#[tokio::test]
async fn a_client_that_expects_100_continue_sends_its_body_only_to_an_agent() {
    let lab = Lab::start(Setup::default(), describing()).await;
    let post = |path: &str, token: &str| {
        format!(
            "POST {path} HTTP/1.1\r\nHost: kas\r\nAuthorization: Bearer {token}\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\n"
        )
    };
    let mut client = Raw::connect(&lab).await;
    client.send(&post("/agents/7/a", TOKEN)).await;
    assert_eq!(client.until("\r\n\r\n").await, "HTTP/1.1 100 Continue\r\n\r\n");
    client.send("abc").await;
    let answer = client.until("\"body\":\"abc\"").await;
    assert!(!answer.contains("\"expect\""), "{answer}");
    for (path, token, code) in [("/agents/7/a", NOBODY, "403"), ("/agents/8/a", TOKEN, "503")] {
        let mut client = Raw::connect(&lab).await;
        client.send(&post(path, token)).await;
        let answer = client.until("\r\n\r\n").await;
        assert!(answer.starts_with(&format!("HTTP/1.1 {code} ")), "{answer}");
    }
}

#[tokio::test]
async fn a_refusal_reaches_a_client_that_is_still_writing() {
    let lab = Lab::start(Setup::default(), describing()).await;
    let mut client = Raw::connect(&lab).await;
    client
        .send(&format!(
            "POST /agents/7/a HTTP/1.1\r\nHost: kas\r\nAuthorization: Bearer {NOBODY}\r\nContent-Length: 200000\r\n\r\n"
        ))
        .await;
    for _ in 0..20 {
        client.send(&"x".repeat(10_000)).await;
        tokio::task::yield_now().await;
    }
    let answer = client.until("\"code\":403}\n").await;
    assert!(answer.starts_with("HTTP/1.1 403 "), "{answer}");
}

#[tokio::test]
async fn errors_of_the_api_server_pass_but_not_those_of_agentks_credentials() {
    let lab = Lab::start(
        Setup::default(),
        api(|request| async move {
            let code = request.uri().path().rsplit('/').next().unwrap().parse().unwrap();
            let mut response = status(code, "{\"kind\":\"Status\"}");
            response.headers_mut().insert("www-authenticate", "Basic".parse().unwrap());
            response.headers_mut().insert("retry-after", "7".parse().unwrap());
            response
        }),
    )
    .await;
    for code in [404, 403, 409, 429, 500, 503] {
        let response = send(&lab, get(&format!("/agents/7/{code}"), TOKEN)).await;
        assert_eq!(response.status(), code);
        assert_eq!(response.headers()["retry-after"], "7");
        assert_eq!(text(response).await, "{\"kind\":\"Status\"}");
    }
    let response = send(&lab, get("/agents/7/401", TOKEN)).await;
    assert!(!response.headers().contains_key("www-authenticate"));
    failure(response, 502, "InternalError", None).await;
    let proxied = send(&lab, get("/agents/7/api/v1/namespaces/a/services/b/proxy/401", TOKEN)).await;
    assert_eq!(proxied.status(), 401, "the answer of the service behind the proxy");
    // Also if the request asks for an upgrade.
    for (path, expected) in
        [("/api/v1/namespaces/a/services/b/proxy/401", 401), ("/api/v1/namespaces/a/pods/b/exec/401", 502)]
    {
        let mut client = Raw::connect(&lab).await;
        client
            .send(&format!(
                "GET /agents/7{path} HTTP/1.1\r\nHost: kas\r\nAuthorization: Bearer {TOKEN}\r\n\
                 Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
            ))
            .await;
        let head = client.until("\r\n\r\n").await;
        assert!(head.starts_with(&format!("HTTP/1.1 {expected} ")), "{path}: {head}");
    }
}

/// What follows `#` is never sent to a server. HTTP drops it, so that it changes neither what is decided nor
/// what is sent.
#[tokio::test]
async fn a_fragment_is_dropped_before_anything_is_decided() {
    let lab = Lab::start(Setup::default(), describing()).await;
    for (target, sent) in [
        ("/agents/7/version#/../../x", "/version"),
        ("/agents/7/api/v1/pods?limit=1#&watch=1", "/api/v1/pods?limit=1"),
    ] {
        let mut client = Raw::connect(&lab).await;
        client
            .send(&format!("GET {target} HTTP/1.1\r\nHost: kas\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"))
            .await;
        let answer = client.until("\"}").await;
        assert!(answer.contains(&format!("\"target\":\"{sent}\"")), "{answer}");
    }
    // Nothing but a fragment is a path.
    let mut client = Raw::connect(&lab).await;
    client.send("GET #/agents/7/version HTTP/1.1\r\nHost: kas\r\n\r\n").await;
    let head = client.until("\r\n\r\n").await;
    assert!(head.starts_with("HTTP/1.1 400 "), "{head}");
}

#[tokio::test]
async fn limits_count_open_requests_only() {
    let (api, mut writers) = streams("application/json");
    let open = OpenLimits { per_caller: 2, ..OpenLimits::default() };
    let lab = Lab::start(Setup { open, ..Setup::default() }, api).await;
    let watch = || send(&lab, get("/agents/7/api/v1/pods?watch=1", TOKEN));
    let first = watch().await;
    let _second = watch().await;
    let writer = next(&mut writers).await;
    let _other = next(&mut writers).await;
    failure(watch().await, 429, "TooManyRequests", Some(1)).await;
    let list = || send(&lab, get("/agents", TOKEN));
    failure(list().await, 429, "TooManyRequests", Some(1)).await;
    let other = send(&lab, get("/agents/7/api/v1/pods?watch=1", JANE)).await;
    assert_eq!(other.status(), 200, "another caller");
    drop(first);
    timeout(SOON, writer.left()).await.expect("the API server is told");
    eventually("the request has ended", || lab.metrics.open_now(Kind::Watch) == 2).await;
    assert_eq!(list().await.status(), 200, "it is over with its answer");
    assert_eq!(watch().await.status(), 200);
}

#[tokio::test]
async fn http2_is_served_too() {
    let (api, mut writers) = streams("application/json");
    let lab = Lab::start(Setup::default(), api).await;
    let stream = TcpStream::connect(lab.address).await.unwrap();
    let (mut sender, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    let request = |path: &str| {
        Request::get(format!("http://kas{path}"))
            .header("authorization", format!("Bearer {TOKEN}"))
            .body(Empty::<Bytes>::new())
            .unwrap()
    };
    let watch = sender.send_request(request("/agents/7/api/v1/pods?watch=1")).await.unwrap();
    let short = sender.send_request(request("/agents/7/version")).await.unwrap();
    assert_eq!((watch.status(), short.status()), (StatusCode::OK, StatusCode::OK));
    let (first, second) = (next(&mut writers).await, next(&mut writers).await);
    first.write("{}\n").await;
    second.write("{").await;
    let mut body = watch.into_body();
    assert_eq!(timeout(SOON, body.frame()).await.unwrap().unwrap().unwrap().into_data().unwrap(), "{}\n");
    lab.lose_tunnels();
    // A clean end of the watch, and a reset of the other stream.
    assert_eq!(timeout(SOON, body.collect()).await.unwrap().unwrap().to_bytes(), "");
    assert!(timeout(SOON, short.into_body().collect()).await.unwrap().is_err());
    let wrong = Request::get("http://kas/agents/7/version")
        .header("host", "other")
        .header("authorization", format!("Bearer {TOKEN}"));
    let response = sender.send_request(wrong.body(Empty::new()).unwrap()).await.unwrap();
    assert_eq!(response.status(), 400, ":authority and Host differ");
}

#[tokio::test]
async fn agents_in_reach_are_listed() {
    let lab = Lab::start(Setup::default(), describing()).await;
    let list = json(send(&lab, get("/agents", TOKEN)).await).await;
    let agents = list["agents"].as_array().unwrap();
    assert_eq!(agents.len(), 1);
    assert_eq!((&agents[0]["id"], &agents[0]["connected"]), (&AGENT.into(), &true.into()));
    failure(send(&lab, get("/agents", "rubbish")).await, 401, "Unauthorized", None).await;
    let mut post = get("/agents", TOKEN);
    *post.method_mut() = http::Method::POST;
    failure(send(&lab, post).await, 405, "MethodNotAllowed", None).await;
}

#[tokio::test]
async fn only_configured_pages_may_make_requests() {
    let lab = Lab::start(Setup::default(), describing()).await;
    let from = |origin: &str| {
        let mut request = get("/agents/7/version", TOKEN);
        request.headers_mut().insert("origin", origin.parse().unwrap());
        request
    };
    let response = send(&lab, from("https://gitlab.example.com")).await;
    assert_eq!(response.headers()["access-control-allow-origin"], "https://gitlab.example.com");
    assert_eq!(response.status(), 200);
    failure(send(&lab, from("https://evil.example")).await, 403, "Forbidden", None).await;
    let mut preflight = from("https://gitlab.example.com");
    *preflight.method_mut() = http::Method::OPTIONS;
    preflight.headers_mut().remove("authorization");
    preflight.headers_mut().insert("access-control-request-method", "GET".parse().unwrap());
    let response = send(&lab, preflight).await;
    assert_eq!(response.status(), 204);
    assert_eq!(response.headers()["access-control-allow-origin"], "https://gitlab.example.com");
    assert_eq!(lab.received.lock().len(), 1);
}

#[tokio::test]
async fn heads_that_are_too_large_are_refused_with_a_status() {
    let lab = Lab::start(Setup::default(), describing()).await;
    let long = format!("/agents/7/{}", "a".repeat(33 * 1024));
    failure(send(&lab, get(&long, TOKEN)).await, 414, "BadRequest", None).await;
    let mut large = get("/agents/7/version", TOKEN);
    large.headers_mut().insert("x", "y".repeat(65 * 1024).parse().unwrap());
    failure(send(&lab, large).await, 431, "BadRequest", None).await;
    let mut trace = get("/agents/7/version", TOKEN);
    *trace.method_mut() = http::Method::TRACE;
    let response = send(&lab, trace).await;
    assert!(response.headers().contains_key("allow"));
    failure(response, 405, "MethodNotAllowed", None).await;
}
