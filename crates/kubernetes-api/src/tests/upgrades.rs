//! Upgraded connections: each end of either side, and what is refused.

use super::{lab::upgrading, *};

const WEBSOCKET: &str = "websocket";
const SPDY: &str = "SPDY/3.1";

/// Returns the head of a request that asks for an upgrade.
fn ask(protocol: &str) -> String {
    format!(
        "GET /agents/7/api/v1/namespaces/a/pods/b/exec?command=x HTTP/1.1\r\nHost: kas\r\nAuthorization: Bearer \
         {TOKEN}\r\nConnection: keep-alive, Upgrade\r\nUpgrade: h2c, {protocol}\r\nSec-WebSocket-Key: \
         a2V5\r\nSec-WebSocket-Protocol: v5.channel.k8s.io\r\nContent-Length: 0\r\n\r\n"
    )
}

/// A connection through the endpoint, and the API server's end of it.
struct Upgraded {
    lab: Lab,
    client: Raw,
    api: TcpStream,
}

impl Upgraded {
    async fn start(protocol: &str) -> Self {
        Self::start_with(Setup::default(), protocol).await
    }

    async fn start_with(setup: Setup, protocol: &str) -> Self {
        let (api, mut connections) = upgrading(None);
        let lab = Lab::start(setup, api).await;
        let (client, api) = Self::connect(&lab, &mut connections, protocol).await;
        Self { lab, client, api }
    }

    async fn connect(
        lab: &Lab,
        connections: &mut mpsc::Receiver<TcpStream>,
        protocol: &str,
    ) -> (Raw, TcpStream) {
        let mut client = Raw::connect(lab).await;
        client.send(&ask(protocol)).await;
        let head = client.until("\r\n\r\n").await;
        assert!(head.starts_with("HTTP/1.1 101 Switching Protocols\r\n"), "{head}");
        (client, timeout(SOON, connections.recv()).await.expect("a connection").unwrap())
    }

    /// Waits until the request was counted as ended so.
    async fn ended(&self, by: EndedBy) {
        eventually("it was counted", || self.lab.metrics.ended_so(Kind::Upgrade, by) == 1).await;
        assert_eq!(self.lab.metrics.open_now(Kind::Upgrade), 0);
    }
}

/// Reads this text.
async fn reads(stream: &mut TcpStream, text: &str) {
    let mut got = vec![0; text.len()];
    timeout(SOON, stream.read_exact(&mut got)).await.expect(text).unwrap();
    assert_eq!(String::from_utf8_lossy(&got), text);
}

/// Reads to the end of a connection. `Err`: it was reset.
async fn end_of(stream: &mut TcpStream) -> Result<Vec<u8>, Vec<u8>> {
    let mut got = Vec::new();
    match timeout(SOON, stream.read_to_end(&mut got)).await.expect("an end") {
        Ok(_) => Ok(got),
        Err(_) => Err(got),
    }
}

/// Bytes that do not repeat soon.
fn bytes(count: usize, seed: u64) -> Vec<u8> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as u8
    };
    (0..count).map(|_| next()).collect()
}

#[tokio::test]
async fn every_byte_passes_in_both_directions_after_the_heads() {
    for (protocol, method) in [(WEBSOCKET, "GET"), (SPDY, "POST"), ("WebSocket", "GET"), ("spdy/3.1", "POST")]
    {
        let (api, mut connections) = upgrading(None);
        let lab = Lab::start(Setup::default(), api).await;
        let mut client = Raw::connect(&lab).await;
        // What is sent too early follows the request.
        client.send(&format!("{}early", ask(protocol).replacen("GET", method, 1))).await;
        let head = client.until("\r\n\r\n").await;
        let expected = if method == "GET" { "upgrade: websocket\r\n" } else { "upgrade: SPDY/3.1\r\n" };
        for header in [
            "HTTP/1.1 101 Switching Protocols\r\n",
            "connection: Upgrade\r\n",
            expected,
            // Of the key `a2V5`.
            "sec-websocket-accept: acoMowsaMs4gzl5sy2uaF1804GA=\r\n",
            "x-stream-protocol-version: v4.channel.k8s.io\r\n",
            "x-request-id: ",
        ] {
            assert!(head.contains(header), "{header:?} is missing in {head}");
        }
        assert!(!head.contains("set-cookie") && !head.contains("content-length"), "{head}");
        let mut api = timeout(SOON, connections.recv()).await.expect("a connection").unwrap();
        reads(&mut api, "early").await;

        let received = lab.received.lock()[0].clone();
        assert_eq!((received.content_length, received.extra), (Some(0), None));
        let request = received.request.unwrap();
        assert_eq!(request.method, method);
        let header = |name: &str| request.header.get(name).map(|values| values.value.clone());
        assert_eq!(header("Connection"), Some(vec!["upgrade".to_owned()]));
        assert_eq!(header("Upgrade"), Some(vec![expected["upgrade: ".len()..].trim_end().to_owned()]));
        assert_eq!(header("Sec-Websocket-Key"), Some(vec!["a2V5".to_owned()]));

        // The largest of them fill every buffer on the way.
        let mut passed = 5;
        for count in [1, 2, 32 * 1024, 32 * 1024 + 1, 8 << 20] {
            let (up, down) = (bytes(count, 1), bytes(count, 2));
            let (mut got_up, mut got_down) = (vec![0; count], vec![0; count]);
            let (mut from_client, mut to_client) = client.stream.split();
            let (mut from_api, mut to_api) = api.split();
            let all = async {
                tokio::try_join!(
                    to_client.write_all(&up),
                    to_api.write_all(&down),
                    from_api.read_exact(&mut got_up),
                    from_client.read_exact(&mut got_down),
                )
            };
            timeout(SOON, all).await.expect("all bytes").unwrap();
            assert!(got_up == up && got_down == down, "{count} bytes are equal");
            passed += count;
        }
        drop(api);
        assert_eq!(client.rest().await, Ok(String::new()));
        eventually("it was counted", || lab.metrics.ended_so(Kind::Upgrade, EndedBy::Upstream) == 1).await;
        use crate::metrics::Direction::{Down, Up};
        assert_eq!(lab.metrics.upgraded(Up).get(), passed as u64);
        assert_eq!(lab.metrics.upgraded(Down).get(), passed as u64 - 5);
    }
}

#[tokio::test]
async fn a_client_that_does_not_read_slows_the_api_server_and_can_still_write() {
    const MOST: usize = 64 << 20;
    let Upgraded { lab, mut client, api } = Upgraded::start(SPDY).await;
    let (mut from_api, mut to_api) = api.into_split();
    let written = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let count = std::sync::Arc::clone(&written);
    let writer = tokio::spawn(async move {
        let piece = bytes(64 * 1024, 3);
        for _ in 0..MOST / piece.len() {
            to_api.write_all(&piece).await.unwrap();
            count.fetch_add(piece.len(), std::sync::atomic::Ordering::Relaxed);
        }
    });
    // Until every buffer on the way is full.
    let mut before = usize::MAX;
    let full = async {
        loop {
            let now = written.load(std::sync::atomic::Ordering::Relaxed);
            if now > 0 && now == before {
                return;
            }
            before = now;
            tokio::time::sleep(Duration::from_millis(300)).await;
        }
    };
    timeout(SOON, full).await.expect("buffers are bounded");
    assert!(!writer.is_finished(), "{before} bytes are buffered");
    client.send("\x03").await;
    let mut got = [0];
    timeout(SOON, from_api.read_exact(&mut got)).await.expect("it passes meanwhile").unwrap();
    let piece = bytes(64 * 1024, 3);
    let mut got = vec![0; piece.len()];
    for _ in 0..MOST / piece.len() {
        timeout(SOON, client.stream.read_exact(&mut got)).await.expect("the rest").unwrap();
        assert!(got == piece);
    }
    writer.await.unwrap();
    drop(lab);
}

#[tokio::test]
async fn the_end_of_the_client_s_bytes_reaches_the_api_server_which_may_still_write() {
    let mut upgraded = Upgraded::start(SPDY).await;
    upgraded.client.send("last").await;
    upgraded.client.stream.shutdown().await.unwrap();
    assert_eq!(end_of(&mut upgraded.api).await, Ok(b"last".to_vec()));
    upgraded.api.write_all(b"rest").await.unwrap();
    upgraded.api.shutdown().await.unwrap();
    assert_eq!(upgraded.client.rest().await, Ok("rest".to_owned()));
    upgraded.ended(EndedBy::Client).await;
}

#[tokio::test]
async fn a_reset_by_the_client_cancels_the_request() {
    for protocol in [WEBSOCKET, SPDY] {
        let upgraded = Upgraded::start(protocol).await;
        upgraded.client.stream.set_zero_linger().unwrap();
        let Upgraded { lab, client, mut api } = upgraded;
        drop(client);
        assert!(end_of(&mut api).await.is_err(), "the API server sees a reset");
        eventually("it was counted", || lab.metrics.ended_so(Kind::Upgrade, EndedBy::Client) == 1).await;
    }
}

#[tokio::test]
async fn the_client_gets_the_rest_when_the_api_server_closes() {
    let setup = Setup { tunnels: 1, ..Setup::default() };
    let (api, mut connections) = upgrading(None);
    let lab = Lab::start(setup, api).await;
    // The only tunnel serves one request after the other.
    for count in 1..=3 {
        let (mut client, mut api) = Upgraded::connect(&lab, &mut connections, WEBSOCKET).await;
        client.send("not read").await;
        reads(&mut api, "not read").await;
        api.write_all(b"last").await.unwrap();
        api.shutdown().await.unwrap();
        assert_eq!(client.rest().await, Ok("last".to_owned()));
        eventually("it was counted", || lab.metrics.ended_so(Kind::Upgrade, EndedBy::Upstream) == count)
            .await;
    }
}

#[tokio::test]
async fn a_reset_by_the_api_server_resets_the_client() {
    let mut upgraded = Upgraded::start(SPDY).await;
    upgraded.api.write_all(b"partial").await.unwrap();
    upgraded.client.until("partial").await;
    upgraded.api.set_zero_linger().unwrap();
    let Upgraded { lab, mut client, api } = upgraded;
    drop(api);
    assert!(client.rest().await.is_err(), "the client sees a reset");
    eventually("it was counted", || lab.metrics.ended_so(Kind::Upgrade, EndedBy::Upstream) == 1).await;
}

/// As when the replica that lends the tunnel shuts down.
#[tokio::test]
async fn a_lost_tunnel_is_told_by_1001_between_two_frames_and_else_by_a_reset() {
    let mut upgraded = Upgraded::start(WEBSOCKET).await;
    upgraded.api.write_all(b"\x82\x02ok").await.unwrap();
    let mut got = [0; 4];
    timeout(SOON, upgraded.client.stream.read_exact(&mut got)).await.unwrap().unwrap();
    upgraded.lab.lose_tunnels();
    let rest = end_of(&mut upgraded.client.stream).await.expect("a regular end");
    assert_eq!(rest, [0x88, 2, 3, 233]);
    upgraded.ended(EndedBy::Tunnel).await;
    // The rest of a frame cannot come, so that a Close frame would be taken for it.
    let mut upgraded = Upgraded::start(WEBSOCKET).await;
    upgraded.api.write_all(b"\x82\x05he").await.unwrap();
    timeout(SOON, upgraded.client.stream.read_exact(&mut got)).await.unwrap().unwrap();
    upgraded.lab.lose_tunnels();
    assert_eq!(upgraded.client.rest().await, Err(String::new()));
    upgraded.ended(EndedBy::Tunnel).await;
    let mut upgraded = Upgraded::start(SPDY).await;
    upgraded.lab.lose_tunnels();
    assert_eq!(upgraded.client.rest().await, Err(String::new()));
    upgraded.ended(EndedBy::Tunnel).await;
}

/// Writes a frame of WebSocket in two parts, and ends the connection in between.
async fn ends_after_a_frame(upgraded: &mut Upgraded, end: impl FnOnce(&Lab), code: [u8; 2]) {
    upgraded.api.write_all(b"\x82\x05he").await.unwrap();
    let mut got = [0; 4];
    timeout(SOON, upgraded.client.stream.read_exact(&mut got)).await.unwrap().unwrap();
    assert_eq!(&got, b"\x82\x05he");
    end(&upgraded.lab);
    upgraded.api.write_all(b"llo").await.unwrap();
    let rest = end_of(&mut upgraded.client.stream).await.expect("a regular end");
    assert_eq!(rest, [b"llo\x88\x02".as_slice(), &code].concat());
    assert!(end_of(&mut upgraded.api).await.is_err(), "the API server sees a reset");
}

#[tokio::test]
async fn a_revoked_permission_ends_a_websocket_after_a_frame_with_1008() {
    let mut upgraded = Upgraded::start(WEBSOCKET).await;
    ends_after_a_frame(&mut upgraded, |lab| lab.users.revoke(TOKEN), 1008_u16.to_be_bytes()).await;
    upgraded.ended(EndedBy::Revoked).await;
    // A frame whose rest does not come.
    let mut upgraded = Upgraded::start(WEBSOCKET).await;
    upgraded.api.write_all(b"\x82\x05he").await.unwrap();
    let mut got = [0; 4];
    timeout(SOON, upgraded.client.stream.read_exact(&mut got)).await.unwrap().unwrap();
    upgraded.lab.users.revoke(TOKEN);
    assert_eq!(upgraded.client.rest().await, Err(String::new()));
    upgraded.ended(EndedBy::Revoked).await;
    // There are no frames to look at.
    let mut upgraded = Upgraded::start(SPDY).await;
    upgraded.lab.users.revoke(TOKEN);
    assert_eq!(upgraded.client.rest().await, Err(String::new()));
    assert!(end_of(&mut upgraded.api).await.is_err(), "the API server sees a reset");
    upgraded.ended(EndedBy::Revoked).await;
}

#[tokio::test]
async fn a_session_that_is_too_long_ends_as_if_revoked() {
    let open = OpenLimits { session: Duration::from_millis(100), ..OpenLimits::default() };
    let mut upgraded = Upgraded::start_with(Setup { open, ..Setup::default() }, WEBSOCKET).await;
    let rest = end_of(&mut upgraded.client.stream).await.expect("a regular end");
    assert_eq!(rest, [0x88, 2, 3, 240]);
    upgraded.ended(EndedBy::Limit).await;
}

#[tokio::test]
async fn upgrades_continue_when_kas_leaves_and_end_after_their_grace_with_1001() {
    let setup = || Setup { upgrade_grace: Duration::from_secs(1), ..Setup::default() };
    let mut upgraded = Upgraded::start_with(setup(), WEBSOCKET).await;
    upgraded.lab.lifecycle.advance(Phase::Leaving);
    // They are not among what ends at once.
    upgraded.client.send("still").await;
    reads(&mut upgraded.api, "still").await;
    ends_after_a_frame(&mut upgraded, |_| (), 1001_u16.to_be_bytes()).await;
    upgraded.ended(EndedBy::Drain).await;

    let mut upgraded = Upgraded::start_with(setup(), SPDY).await;
    upgraded.lab.lifecycle.advance(Phase::Leaving);
    assert_eq!(upgraded.client.rest().await, Err(String::new()));
    upgraded.ended(EndedBy::Drain).await;
    // What is left in the end is reset.
    let setup = Setup { upgrade_grace: Duration::from_secs(600), ..Setup::default() };
    let mut upgraded = Upgraded::start_with(setup, WEBSOCKET).await;
    upgraded.lab.lifecycle.advance(Phase::Stopped);
    assert_eq!(upgraded.client.rest().await, Err(String::new()));
    upgraded.ended(EndedBy::Drain).await;
}

/// GitLab's agents do not tell that the API server has closed, and wait for the end of the request.
#[tokio::test]
async fn the_request_ends_some_time_after_a_close_frame() {
    let mut upgraded = Upgraded::start(WEBSOCKET).await;
    upgraded.api.write_all(b"\x88\x02\x03\xe8").await.unwrap();
    let mut got = [0; 4];
    timeout(SOON, upgraded.client.stream.read_exact(&mut got)).await.unwrap().unwrap();
    assert_eq!(end_of(&mut upgraded.api).await, Ok(Vec::new()));
    // The answer of the API server is complete with its own end.
    upgraded.api.shutdown().await.unwrap();
    assert_eq!(upgraded.client.rest().await, Ok(String::new()));
    upgraded.ended(EndedBy::Upstream).await;
}

#[tokio::test]
async fn a_refused_upgrade_is_an_answer_like_any_other_and_passes_nothing_on() {
    let (api, mut writers) = streams("application/json");
    let refusing: lab::Api = std::sync::Arc::new(move |request| {
        let answer = api(request);
        Box::pin(async move {
            let mut response = answer.await;
            *response.status_mut() = StatusCode::FORBIDDEN;
            response
        })
    });
    let lab = Lab::start(Setup { tunnels: 1, ..Setup::default() }, refusing).await;
    let mut client = Raw::connect(&lab).await;
    // CVE-2018-1002105: what follows the request must not reach the API server with the rights of agentk.
    client.send(&format!("{}GET /agents/7/smuggled HTTP/1.1\r\nHost: kas\r\n\r\n", ask(WEBSOCKET))).await;
    let writer = next(&mut writers).await;
    let head = client.until("\r\n\r\n").await;
    assert!(head.starts_with("HTTP/1.1 403 Forbidden\r\n"), "{head}");
    assert!(!head.contains("upgrade"), "{head}");
    // The request ends although the answer does not.
    let close_send = [0, 0, 0, 0, 2, 0x1a, 0];
    eventually("the request has ended", || lab.bytes.lock().ends_with(&close_send)).await;
    writer.write("refused").await;
    drop(writer);
    client.until("7\r\nrefused\r\n0\r\n\r\n").await;
    // What followed is a request of its own, which has no credential.
    let second = client.until("\r\n\r\n").await;
    assert!(second.starts_with("HTTP/1.1 401 "), "{second}");
    assert_eq!(lab.received.lock().len(), 1);
    let sent = lab.bytes.lock().clone();
    assert!(!sent.windows(8).any(|window| window == b"smuggled"));
    eventually("it was counted", || lab.metrics.ended_so(Kind::Upgrade, EndedBy::Upstream) == 1).await;
}

#[tokio::test]
async fn nothing_of_the_client_is_read_before_the_answer() {
    let (go, wait) = tokio::sync::watch::channel(false);
    let (switching, mut connections) = upgrading(None);
    let late: lab::Api = std::sync::Arc::new(move |request| {
        let (answer, mut wait) = (switching(request), wait.clone());
        Box::pin(async move {
            wait.wait_for(|go| *go).await.unwrap();
            answer.await
        })
    });
    let lab = Lab::start(Setup::default(), late).await;
    let mut client = Raw::connect(&lab).await;
    client.send(&format!("{}too early", ask(SPDY))).await;
    eventually("the request has begun", || lab.received.lock().len() == 1).await;
    let sent = lab.bytes.lock().clone();
    assert!(!sent.windows(9).any(|window| window == b"too early"));
    go.send_replace(true);
    client.until("\r\n\r\n").await;
    let mut api = timeout(SOON, connections.recv()).await.expect("a connection").unwrap();
    reads(&mut api, "too early").await;
}

/// Sends a request that asks for an upgrade, with more headers and a body.
async fn refused(lab: &Lab, more: &str, body: &str) -> String {
    let mut client = Raw::connect(lab).await;
    let head = ask(WEBSOCKET).replace("Content-Length: 0\r\n", more);
    client.send(&format!("{head}{body}")).await;
    let head = client.until("\r\n\r\n").await;
    format!("{head}{}", client.until("}\n").await)
}

#[tokio::test]
async fn upgrades_that_cannot_be_are_refused_with_a_status() {
    let (api, _connections) = upgrading(Some("h2c"));
    let lab = Lab::start(Setup::default(), api).await;
    for (more, body) in
        [("Content-Length: 1\r\n", "x"), ("Transfer-Encoding: chunked\r\n", "1\r\nx\r\n0\r\n\r\n")]
    {
        let answer = refused(&lab, more, body).await;
        assert!(answer.starts_with("HTTP/1.1 400 "), "{answer}");
        assert!(answer.contains("must not have a body"), "{answer}");
    }
    assert!(lab.received.lock().is_empty());
    let answer = refused(&lab, "", "").await;
    assert!(answer.starts_with("HTTP/1.1 502 "), "{answer}");
    assert!(answer.contains("another protocol") && answer.contains("may have been carried out"), "{answer}");

    let old = Setup { features: Features::TARGET, ..Setup::default() };
    let lab = Lab::start(old, upgrading(None).0).await;
    let answer = refused(&lab, "", "").await;
    assert!(answer.starts_with("HTTP/1.1 501 ") && answer.contains("upgraded connections"), "{answer}");
    assert!(answer.contains("update it") && lab.received.lock().is_empty(), "{answer}");

    let open = OpenLimits { upgrades_per_caller: 1, ..OpenLimits::default() };
    let upgraded = Upgraded::start_with(Setup { open, ..Setup::default() }, WEBSOCKET).await;
    let answer = refused(&upgraded.lab, "", "").await;
    assert!(answer.starts_with("HTTP/1.1 429 ") && answer.contains("1 upgraded connections"), "{answer}");

    let silent = lab::api(|_| std::future::pending());
    let open = OpenLimits { answer_head: Duration::from_millis(100), ..OpenLimits::default() };
    let lab = Lab::start(Setup { open, ..Setup::default() }, silent).await;
    let answer = refused(&lab, "", "").await;
    assert!(answer.starts_with("HTTP/1.1 504 "), "{answer}");
}

#[tokio::test]
async fn other_protocols_and_versions_are_no_upgrades() {
    let lab = Lab::start(Setup::default(), describing()).await;
    let mut other = get("/agents/7/version", TOKEN);
    other.headers_mut().insert("connection", "Upgrade".parse().unwrap());
    other.headers_mut().insert("upgrade", "h2c".parse().unwrap());
    let seen = json(send(&lab, other).await).await;
    assert!(seen["headers"].get("upgrade").is_none(), "{seen}");
    // Without Connection, the header means nothing; and HTTP/1.0 has no upgrades.
    let mut unnamed = get("/agents/7/version", TOKEN);
    unnamed.headers_mut().insert("upgrade", WEBSOCKET.parse().unwrap());
    assert_eq!(send(&lab, unnamed).await.status(), 200);
    let mut client = Raw::connect(&lab).await;
    let old = ask(WEBSOCKET).replace("HTTP/1.1", "HTTP/1.0").replace("keep-alive, ", "");
    client.send(&old).await;
    let answer = client.rest().await.unwrap();
    assert!(answer.starts_with("HTTP/1.0 200 ") || answer.starts_with("HTTP/1.1 200 "), "{answer}");
}
