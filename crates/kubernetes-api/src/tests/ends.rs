//! Ends that the endpoint decides, against clients and agents that do not cooperate.

use super::*;

/// More than a client takes without reading.
fn piece() -> &'static str {
    "x".repeat(16 * 1024).leak()
}

/// Writes until nothing more is taken.
async fn fill(writer: &Writer) {
    let piece = piece();
    while timeout(Duration::from_millis(300), writer.write(piece)).await.is_ok() {}
}

/// A connection of HTTP/2 whose streams have this window.
async fn http2(lab: &Lab, window: u32) -> hyper::client::conn::http2::SendRequest<Full<Bytes>> {
    let stream = TcpStream::connect(lab.address).await.unwrap();
    let (sender, connection) = hyper::client::conn::http2::Builder::new(TokioExecutor::new())
        .initial_stream_window_size(window)
        .handshake(TokioIo::new(stream))
        .await
        .unwrap();
    tokio::spawn(connection);
    sender
}

fn head(target: &str) -> String {
    format!("GET /agents/7{target} HTTP/1.1\r\nHost: kas\r\nAuthorization: Bearer {TOKEN}\r\n\r\n")
}

const LOG: &str = "/api/v1/namespaces/a/pods/b/log?follow=1";
const WATCH: &str = "/api/v1/pods?watch=1";

/// An API server that never answers, but to `GET /version`.
fn silent() -> lab::Api {
    api(|request| async move {
        if request.uri().path() != "/version" {
            std::future::pending::<()>().await;
        }
        status(200, "{}")
    })
}

#[tokio::test]
async fn what_a_client_does_not_read_ends_when_its_user_is_removed() {
    let (api, mut writers) = streams("text/plain");
    let lab = Lab::start(Setup::default(), api).await;
    let mut h2 = http2(&lab, 1000).await;
    let request =
        Request::get(format!("http://kas/agents/7{LOG}")).header("authorization", format!("Bearer {TOKEN}"));
    let _unread =
        timeout(SOON, h2.send_request(request.body(Full::default()).unwrap())).await.unwrap().unwrap();
    let first = next(&mut writers).await;
    let mut h1 = Raw::connect(&lab).await;
    h1.send(&head(LOG)).await;
    let second = next(&mut writers).await;
    fill(&first).await;
    fill(&second).await;
    assert_eq!(lab.metrics.open_now(Kind::Follow), 2);
    lab.users.revoke(TOKEN);
    eventually("nothing stays open", || lab.metrics.open_now(Kind::Follow) == 0).await;
    for writer in [first, second] {
        timeout(SOON, writer.left()).await.expect("the API server is told");
    }
    assert_eq!(lab.metrics.ended_so(Kind::Follow, EndedBy::Revoked), 2);
}

#[tokio::test]
async fn a_watch_whose_event_never_ends_is_cut_when_its_user_is_removed() {
    let (api, mut writers) = streams("application/json");
    let lab = Lab::start(Setup::default(), api).await;
    let watch = send(&lab, get(&format!("/agents/7{WATCH}"), TOKEN)).await;
    let writer = next(&mut writers).await;
    writer.write("{\"type\":").await;
    let mut body = watch.into_body();
    let begun = timeout(SOON, body.frame()).await.unwrap().unwrap().unwrap().into_data().unwrap();
    assert_eq!(begun, "{\"type\":");
    lab.users.revoke(TOKEN);
    let rest = timeout(SOON, body.collect()).await.expect("the end of the watch");
    assert!(rest.is_err(), "a part of an event is no clean end");
    timeout(SOON, writer.left()).await.expect("the API server is told");
    eventually("it was counted", || lab.metrics.ended_so(Kind::Watch, EndedBy::Revoked) == 1).await;
}

#[tokio::test]
async fn requests_without_an_answer_end_when_their_user_is_removed() {
    let lab = Lab::start(Setup::default(), silent()).await;
    let proxy = "/api/v1/namespaces/a/services/b/proxy/x";
    let send_to = |target: &str| send(&lab, get(&format!("/agents/7{target}"), TOKEN));
    let (log, watch, proxy, ()) = tokio::join!(send_to(LOG), send_to(WATCH), send_to(proxy), async {
        eventually("they have begun", || lab.received.lock().len() == 3).await;
        lab.users.revoke(TOKEN);
    });
    for (response, kind) in [(log, Kind::Follow), (watch, Kind::Watch), (proxy, Kind::Proxy)] {
        let message = failure(response, 403, "Forbidden", None).await;
        assert!(message.contains("no longer gives access"), "{message}");
        assert_eq!(lab.metrics.ended_so(kind, EndedBy::Revoked), 1);
    }
}

#[tokio::test]
async fn a_session_that_ends_before_an_answer_is_named() {
    let open = OpenLimits { session: Duration::from_millis(100), ..OpenLimits::default() };
    let lab = Lab::start(Setup { open, ..Setup::default() }, silent()).await;
    let response = send(&lab, get(&format!("/agents/7{LOG}"), TOKEN)).await;
    let message = failure(response, 503, "ServiceUnavailable", None).await;
    assert!(message.contains("the longest time that is allowed"), "{message}");
    assert_eq!(lab.metrics.ended_so(Kind::Follow, EndedBy::Limit), 1);
}

#[tokio::test]
async fn an_agent_of_14_1_has_tunnels_for_short_requests_whatever_clients_do() {
    let old = Setup { features: Features::NONE, kind: AgentKind::Old, tunnels: 11, ..Setup::default() };
    let lab = Lab::start(old, silent()).await;
    let agent = AgentId::new(AGENT).unwrap();
    eventually("it is connected", || lab.registry.occupancy(agent).idle == 11).await;
    let mut clients = Vec::new();
    for begun in 1..=8 {
        let mut client = Raw::connect(&lab).await;
        client.send(&head(WATCH)).await;
        clients.push(client);
        eventually("the watch has begun", || lab.received.lock().len() == begun).await;
    }
    let watch = || send(&lab, get(&format!("/agents/7{WATCH}"), TOKEN));
    // No answer has come yet.
    let message = failure(watch().await, 429, "TooManyRequests", Some(1)).await;
    assert!(message.contains("8 watches and logs of agent 7 are open"), "{message}");
    assert_eq!(send(&lab, get("/agents/7/version", TOKEN)).await.status(), 200);
    clients.clear();
    eventually("the clients have left", || lab.metrics.open_now(Kind::Watch) == 0).await;
    let message = failure(watch().await, 429, "TooManyRequests", Some(1)).await;
    assert!(message.contains("8 requests whose clients have left"), "{message}");
    assert_eq!(send(&lab, get("/agents/7/version", TOKEN)).await.status(), 200);
}

#[tokio::test]
async fn an_agent_that_is_connected_without_a_tunnel_is_not_called_away() {
    let lab = Lab::start(Setup { tunnels: 0, ..Setup::default() }, describing()).await;
    lab.registry.transport_opened(AgentId::new(AGENT).unwrap());
    let response = send(&lab, get("/agents/7/version", TOKEN)).await;
    let message = failure(response, 503, "ServiceUnavailable", None).await;
    assert!(message.contains("is connected to this replica, but has no tunnel"), "{message}");
}

#[tokio::test]
async fn an_agent_is_not_called_away_while_nobody_can_say_where_it_is() {
    let setup = Setup { tunnels: 0, is_tracker_away: true, ..Setup::default() };
    let lab = Lab::start(setup, describing()).await;
    for target in ["/version", WATCH] {
        let response = send(&lab, get(&format!("/agents/7{target}"), TOKEN)).await;
        let message = failure(response, 503, "ServiceUnavailable", Some(1)).await;
        assert!(message.contains("could not look up"), "{message}");
        assert!(!message.contains("is not connected"), "{message}");
    }
}

#[tokio::test]
async fn an_upload_that_the_api_server_does_not_read_ends() {
    let open = OpenLimits { silent_upload: Duration::from_secs(2), ..OpenLimits::default() };
    let lab = Lab::start(Setup { open, ..Setup::default() }, silent()).await;
    let mut h2 = http2(&lab, 65_535).await;
    let request = Request::post("http://kas/agents/7/api/v1/namespaces")
        .header("authorization", format!("Bearer {TOKEN}"))
        .body(Full::from(vec![0; 16 * 1024 * 1024]))
        .unwrap();
    let response = timeout(SOON, h2.send_request(request)).await.expect("an answer").unwrap();
    let message = failure(response, 504, "Timeout", None).await;
    assert!(message.contains("agent 7 took nothing of the request for 2 s"), "{message}");
    eventually("it was counted", || lab.metrics.ended_so(Kind::Short, EndedBy::Limit) == 1).await;
}

#[tokio::test]
async fn an_early_answer_reaches_a_client_that_was_told_to_continue() {
    for expectation in ["100-continue", "100-Continue", "something-else"] {
        let (begin, begins) = mpsc::channel::<()>(1);
        let parts = parking_lot::Mutex::new(Some((begins, status(413, "{\"code\":413}\n"))));
        let api = api(move |request| {
            let parts = parts.lock().take();
            async move {
                let (mut begins, answer) = parts.unwrap();
                begins.recv().await;
                drop(request);
                answer
            }
        });
        let lab = Lab::start(Setup::default(), api).await;
        let mut client = Raw::connect(&lab).await;
        client
            .send(&format!(
                "PUT /agents/7/a HTTP/1.1\r\nHost: kas\r\nAuthorization: Bearer {TOKEN}\r\nExpect: {expectation}\r\n\
                 Content-Length: 200000\r\n\r\n"
            ))
            .await;
        if expectation != "something-else" {
            client.until("HTTP/1.1 100 Continue\r\n\r\n").await;
        }
        eventually("the request has begun", || lab.received.lock().len() == 1).await;
        begin.send(()).await.unwrap();
        for _ in 0..20 {
            client.send(&"x".repeat(10_000)).await;
            tokio::task::yield_now().await;
        }
        let answer = client.until("{\"code\":413}\n").await;
        assert!(answer.starts_with("HTTP/1.1 413 "), "{expectation}: {answer}");
    }
}
