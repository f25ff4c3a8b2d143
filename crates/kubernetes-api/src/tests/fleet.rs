//! Paths below `/fleet/`: who may ask for them.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use http::Request;
use http_body_util::{BodyExt as _, Full};

use super::{
    Raw, describing, eventually, failure, json,
    lab::{COOKIE, CSRF, JANE, LARGE, Lab, NOBODY, Setup, TOKEN},
    send,
};
use crate::{
    OpenLimits,
    serve::routes::{Auth, ROUTES, Route},
};

/// A request for a route, whose agent is 7.
fn request(route: &Route, method: &str, token: Option<&str>) -> Request<Full<Bytes>> {
    let path = route.pattern.replace("{id}", "7").replace("{selector}", "all");
    let path = path.replace("{view}", "pods").replace("{*}", "query");
    let query = if route.auth == Auth::AgentOfQuery { "?agent=7&project=a" } else { "" };
    let mut request = Request::builder().method(method).uri(format!("{path}{query}")).header("host", "kas");
    if let Some(token) = token {
        request = request.header("authorization", format!("Bearer {token}"));
    }
    request.body(Full::default()).unwrap()
}

#[tokio::test]
async fn every_route_has_its_class_of_callers() {
    let lab = Lab::start(Setup::default(), describing()).await;
    let unknown = "kasu_unknownunknownunknownunknownunknownunknownunk";
    for route in ROUTES {
        for method in route.methods {
            for token in [None, Some(unknown), Some("rubbish")] {
                let status = send(&lab, request(route, method, token)).await.status().as_u16();
                let expected: &[u16] = if route.auth == Auth::Everybody { &[200, 308, 404] } else { &[401] };
                assert!(expected.contains(&status), "{method} {} {token:?}: {status}", route.pattern);
            }
            // A new class needs its own line here.
            match route.auth {
                Auth::AgentOfQuery | Auth::AgentOfPath => {
                    let answer = send(&lab, request(route, method, Some(NOBODY))).await;
                    assert_eq!(answer.status(), 403, "{method} {}", route.pattern);
                }
                Auth::EachAgent if *method == "HEAD" => {}
                // Nobody is asked about anything: see the next test.
                Auth::Everybody => {}
                Auth::EachAgent => {
                    let seen = json(send(&lab, request(route, method, Some(NOBODY))).await).await;
                    assert_eq!(seen["users"], serde_json::json!({}), "{method} {}", route.pattern);
                }
            }
        }
        for method in ["PUT", "DELETE"] {
            let refused = send(&lab, request(route, method, Some(TOKEN))).await;
            assert_eq!(refused.status(), 405);
            assert_eq!(refused.headers()["allow"], &*route.allow());
        }
        if route.auth == Auth::Everybody {
            continue;
        }
        let mut impersonating = request(route, route.methods[0], Some(TOKEN));
        impersonating.headers_mut().insert("impersonate-user", "admin".parse().unwrap());
        failure(send(&lab, impersonating).await, 400, "BadRequest", None).await;
    }
    assert!(lab.received.lock().is_empty());
}

#[tokio::test]
async fn the_page_is_the_same_for_everybody_and_only_its_files_have_a_policy_of_their_own() {
    let lab = Lab::start(Setup::default(), describing()).await;
    let get = |path: &str, headers: &[(&str, &str)]| {
        let mut request = Request::get(path).header("host", "kas");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        request.body(Full::<Bytes>::default()).unwrap()
    };
    let cookie = format!("_gitlab_kas={COOKIE}");
    let visits: [&[(&str, &str)]; 3] = [
        &[],
        // By a link of another site, in a browser with a session.
        &[("cookie", &cookie), ("sec-fetch-site", "cross-site")],
        &[("authorization", "Bearer kasu_x"), ("origin", "https://evil.example")],
    ];
    for headers in visits {
        let page = send(&lab, get("/fleet/page/", headers)).await;
        assert_eq!(
            (page.status().as_u16(), &page.headers()["cache-control"]),
            (200, &"private, no-store".parse().unwrap())
        );
        assert_eq!(page.headers()["content-security-policy"], "script-src 'self'");
        assert!(page.headers().get("access-control-allow-origin").is_none());
        let script = send(&lab, get("/fleet/page/a.js", headers)).await;
        assert_eq!(script.headers()["content-type"], "text/javascript");
    }
    let moved = send(&lab, get("/fleet/page", &[])).await;
    assert_eq!((moved.status().as_u16(), &moved.headers()["location"]), (308, &"page/".parse().unwrap()));
    // What comes from a cluster, and every error, is no page.
    for (path, headers, status) in [
        ("/fleet/page/b.js", &[][..], 404),
        ("/fleet/page/../page/", &[], 404),
        ("/fleet/views/pods", &[], 401),
        ("/agents/7/api/v1/pods", &[("authorization", "Bearer kasu_x")], 401),
    ] {
        let answer = send(&lab, get(path, headers)).await;
        assert_eq!(answer.status().as_u16(), status, "{path}");
        assert_eq!(answer.headers()["content-security-policy"], "sandbox; default-src 'none'", "{path}");
    }
    assert!(lab.allowed.lock().is_empty() && lab.received.lock().is_empty());

    let without = Lab::start(Setup { has_page: false, ..Setup::default() }, describing()).await;
    for path in ["/fleet/page", "/fleet/page/", "/fleet/page/a.js"] {
        assert_eq!(send(&without, get(path, &[])).await.status(), 404, "{path}");
    }
}

#[tokio::test]
async fn a_question_tells_who_asks_and_which_agents_may_be_used() {
    let lab = Lab::start(Setup::default(), describing()).await;
    let post = |path: &str, token: &str, body: &str| {
        let request = Request::post(path)
            .header("host", "kas")
            .header("authorization", format!("Bearer {token}"))
            .header("content-type", "application/x-www-form-urlencoded")
            .header("kas-fleet-require", "all")
            .header("x-other", "1");
        request.body(Full::from(body.to_owned())).unwrap()
    };
    let path = "/fleet/prometheus/agent/7/api/v1/label/a%2Fb/values?x=%2B";
    let seen = json(send(&lab, post(path, JANE, "query=up")).await).await;
    assert_eq!(seen["places"], serde_json::json!(["7", "label/a%2Fb/values"]));
    assert_eq!((&seen["query"], &seen["body"]), (&"x=%2B".into(), &"query=up".into()));
    assert_eq!((&seen["agent"], &seen["caller"]), (&7.into(), &"kas:jane".into()));
    assert_eq!(seen["headers"], serde_json::json!(["content-type", "kas-fleet-require"]));

    let path = "/fleet/prometheus/select/all/api/v1/query";
    let seen = json(send(&lab, post(path, JANE, "")).await).await;
    assert_eq!(seen["agent"], serde_json::Value::Null);
    assert_eq!(seen["users"], serde_json::json!({ "7": "kas:jane", "8": "kas:jane" }));
    assert_eq!(seen["reachable"], serde_json::json!({ "ids": [7], "is_guess": false }));
    // What was used for an agent is counted for it.
    assert!(lab.allowed.lock().iter().all(|name| name == "kas:jane"));

    let stream = json(send(&lab, post("/fleet/prometheus/select/all/api/v1/stream", TOKEN, "")).await).await;
    assert_eq!(stream["users"], serde_json::json!({ "7": null, "8": null }));
    let refused = send(&lab, post("/fleet/prometheus/select/all/api/v1/refuse", TOKEN, "")).await;
    assert_eq!(refused.headers()["retry-after"], "3");
    failure(refused, 429, "TooManyRequests", Some(3)).await;
    let large = "x".repeat(100_000);
    assert_eq!(send(&lab, post(path, TOKEN, &large)).await.status(), 413);
    for wrong in ["/fleet/prometheus/agent/x/api/v1/query", "/fleet/prometheus/agent/07/api/v1/query"] {
        failure(send(&lab, post(wrong, TOKEN, "")).await, 400, "BadRequest", None).await;
    }

    // A session knows its user only together with an agent, so each agent has to be asked for.
    let session = Request::get(path)
        .header("host", "kas")
        .header("cookie", format!("_gitlab_kas={COOKIE}"))
        .header("x-csrf-token", CSRF)
        .header("origin", "https://gitlab.example.com")
        .header("sec-fetch-site", "same-site");
    let seen = json(send(&lab, session.body(Full::default()).unwrap()).await).await;
    assert_eq!(seen["reachable"]["is_guess"], true);
}

#[tokio::test]
async fn an_answer_is_open_and_holds_its_memory_until_the_client_has_it() {
    let open = OpenLimits { per_caller: 1, unread_answer: Duration::from_secs(1), ..OpenLimits::default() };
    let lab = Lab::start(Setup { open, ..Setup::default() }, describing()).await;
    let path = "/fleet/prometheus/select/all/api/v1/large";
    let get = |path: &str| {
        let request = Request::get(path).header("host", "kas");
        let request = request.header("authorization", format!("Bearer {TOKEN}"));
        request.body(Full::<Bytes>::default()).unwrap()
    };
    let mut client = Raw::connect(&lab).await;
    let plain = format!("GET {path} HTTP/1.1\r\nHost: kas\r\nAuthorization: Bearer {TOKEN}\r\n\r\n");
    client.send(&plain).await;
    let head = client.until("\r\n\r\n").await;
    assert!(head.contains(&format!("content-length: {LARGE}")), "{head}");
    let held = || Arc::strong_count(&lab.held);
    assert_eq!(held(), 3, "nothing was read");
    let refused = send(&lab, get("/fleet/views/pods")).await;
    assert_eq!(refused.status(), 429, "it is open");
    eventually("a client that reads nothing is cut", || held() == 2).await;

    let mut reads = send(&lab, get(path)).await;
    assert_eq!(reads.body_mut().collect().await.unwrap().to_bytes().len(), LARGE);
    eventually("the client has all of it", || held() == 2).await;
}
