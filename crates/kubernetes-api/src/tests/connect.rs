//! Upgrades in HTTP/2, by extended CONNECT, with the client of the HTTP/2 library.

use h2::{
    Reason, RecvStream, SendStream,
    client::{ResponseFuture, SendRequest},
    ext::Protocol,
};
use http::{HeaderMap, Method, header};

use super::{lab::upgrading, *};
use crate::tests::lab::{COOKIE, CSRF};

const EXEC: &str = "/agents/7/api/v1/namespaces/a/pods/b/exec?command=x";

/// A connection of HTTP/2.
#[derive(Clone)]
struct Client(SendRequest<Bytes>);

impl Client {
    /// Connects, and waits until the server has announced extended CONNECT.
    async fn connect(lab: &Lab) -> Self {
        let mut builder = h2::client::Builder::new();
        builder.initial_window_size(WINDOW as u32).initial_connection_window_size(16 << 20);
        let stream = TcpStream::connect(lab.address).await.unwrap();
        let (send, connection) = builder.handshake(stream).await.unwrap();
        tokio::spawn(connection);
        let mut client = Self(send);
        assert_eq!(client.get("/-/ready").await.status(), 200);
        assert!(client.0.is_extended_connect_protocol_enabled());
        client
    }

    async fn get(&mut self, path: &str) -> Response<RecvStream> {
        let request = Request::get(format!("http://kas{path}")).body(()).unwrap();
        let (answer, _) = self.0.clone().ready().await.unwrap().send_request(request, true).unwrap();
        timeout(SOON, answer).await.expect("an answer").unwrap()
    }

    /// Sends a request by extended CONNECT.
    async fn ask(
        &mut self,
        protocol: &'static str,
        path: &str,
        headers: &[(&'static str, &str)],
    ) -> (ResponseFuture, SendStream<Bytes>) {
        let mut request = Request::builder().method(Method::CONNECT).uri(format!("http://kas{path}"));
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let mut request = request.body(()).unwrap();
        request.extensions_mut().insert(Protocol::from_static(protocol));
        self.0.clone().ready().await.unwrap().send_request(request, false).unwrap()
    }

    /// Sends a request that is refused. Returns the status, and the body with the head before it.
    async fn refused(
        &mut self,
        protocol: &'static str,
        path: &str,
        headers: &[(&'static str, &str)],
    ) -> (u16, String) {
        let (answer, _send) = self.ask(protocol, path, headers).await;
        let answer = timeout(SOON, answer).await.expect("an answer").unwrap();
        let (parts, mut body) = answer.into_parts();
        let mut text = Vec::new();
        while let Some(data) = timeout(SOON, body.data()).await.expect("the rest") {
            text.extend_from_slice(&data.unwrap());
        }
        let text = String::from_utf8(text).unwrap();
        let status: Value = serde_json::from_str(&text).unwrap();
        assert_eq!((&status["kind"], &status["code"]), (&"Status".into(), &parts.status.as_u16().into()));
        (parts.status.as_u16(), status["message"].as_str().unwrap().to_owned())
    }
}

/// The window of each stream.
const WINDOW: usize = 64 * 1024 - 1;

fn bearer() -> String {
    format!("Bearer {TOKEN}")
}

/// A stream through the endpoint, and the API server's end of it.
struct Upgraded {
    lab: Lab,
    client: Client,
    stream: Stream,
    api: TcpStream,
}

/// A stream that was taken over, from the client's side.
struct Stream {
    head: HeaderMap,
    send: SendStream<Bytes>,
    receive: RecvStream,
    /// What has come and was not read yet.
    read: Vec<u8>,
}

impl Stream {
    async fn open(client: &mut Client, protocol: &'static str, headers: &[(&'static str, &str)]) -> Self {
        let authorization = bearer();
        let mut all = vec![("authorization", &*authorization)];
        all.extend_from_slice(headers);
        let (answer, send) = client.ask(protocol, EXEC, &all).await;
        let answer = timeout(SOON, answer).await.expect("an answer").unwrap();
        assert_eq!(answer.status(), 200);
        let (parts, receive) = answer.into_parts();
        Self { head: parts.headers, send, receive, read: Vec::new() }
    }

    /// Sends these bytes as the window allows.
    async fn write(&mut self, mut bytes: Bytes) {
        while !bytes.is_empty() {
            self.send.reserve_capacity(bytes.len());
            let capacity = std::future::poll_fn(|cx| self.send.poll_capacity(cx));
            let capacity = timeout(SOON, capacity).await.expect("a window").unwrap().unwrap();
            self.send.send_data(bytes.split_to(capacity.min(bytes.len())), false).unwrap();
        }
    }

    fn finish(&mut self) {
        self.send.send_data(Bytes::new(), true).unwrap();
    }

    /// Reads exactly this.
    async fn reads(&mut self, expected: &[u8]) {
        while self.read.len() < expected.len() {
            let data = timeout(SOON, self.receive.data()).await.expect("bytes").expect("more").unwrap();
            self.receive.flow_control().release_capacity(data.len()).unwrap();
            self.read.extend_from_slice(&data);
        }
        let rest = self.read.split_off(expected.len());
        let got = std::mem::replace(&mut self.read, rest);
        assert!(got == expected, "{:?}", String::from_utf8_lossy(&got[..got.len().min(100)]));
    }

    /// Reads to the end of the stream. `Err`: it was reset.
    async fn rest(&mut self) -> Result<Vec<u8>, Option<Reason>> {
        let mut got = std::mem::take(&mut self.read);
        loop {
            match timeout(SOON, self.receive.data()).await.expect("an end") {
                Some(Ok(data)) => {
                    self.receive.flow_control().release_capacity(data.len()).unwrap();
                    got.extend_from_slice(&data);
                }
                Some(Err(error)) => return Err(error.reason()),
                None => return Ok(got),
            }
        }
    }
}

impl Upgraded {
    async fn start(protocol: &'static str) -> Self {
        Self::start_with(Setup::default(), protocol).await
    }

    async fn start_with(setup: Setup, protocol: &'static str) -> Self {
        let (api, mut connections) = upgrading(None);
        let lab = Lab::start(setup, api).await;
        let mut client = Client::connect(&lab).await;
        let stream = Stream::open(&mut client, protocol, &[]).await;
        let api = timeout(SOON, connections.recv()).await.expect("a connection").unwrap();
        Self { lab, client, stream, api }
    }

    /// Waits until the request was counted as ended so.
    async fn ended(&self, by: EndedBy) {
        eventually("it was counted", || self.lab.metrics.ended_so(Kind::Upgrade, by) == 1).await;
        assert_eq!(self.lab.metrics.open_now(Kind::Upgrade), 0);
    }
}

/// Reads this.
async fn reads(stream: &mut TcpStream, expected: &[u8]) {
    let mut got = vec![0; expected.len()];
    timeout(SOON, stream.read_exact(&mut got)).await.expect("bytes").unwrap();
    assert!(got == expected, "{:?}", String::from_utf8_lossy(&got[..got.len().min(100)]));
}

/// Reads to the end of a connection. `Err`: it was reset.
async fn end_of(stream: &mut TcpStream) -> Result<Vec<u8>, ()> {
    let mut got = Vec::new();
    timeout(SOON, stream.read_to_end(&mut got)).await.expect("an end").map_err(drop)?;
    Ok(got)
}

/// Bytes that do not repeat soon.
fn bytes(count: usize, seed: u32) -> Bytes {
    (0..count as u32)
        .map(|at| ((at ^ seed).wrapping_mul(2_654_435_761) >> 24) as u8)
        .collect::<Vec<_>>()
        .into()
}

#[tokio::test]
async fn every_byte_passes_in_both_directions_after_the_heads() {
    for (protocol, method, upgrade) in [
        ("websocket", "GET", "websocket"),
        ("WebSocket", "GET", "websocket"),
        ("spdy/3.1", "POST", "SPDY/3.1"),
    ] {
        let (api, mut connections) = upgrading(None);
        let lab = Lab::start(Setup::default(), api).await;
        let mut client = Client::connect(&lab).await;
        let subprotocol = [("sec-websocket-protocol", "v5.channel.k8s.io"), ("sec-websocket-version", "13")];
        let mut stream = Stream::open(&mut client, protocol, &subprotocol).await;
        let head = &stream.head;
        assert_eq!(head["x-stream-protocol-version"], "v4.channel.k8s.io");
        assert!(head.contains_key("x-request-id"), "{head:?}");
        for name in ["connection", "upgrade", "sec-websocket-accept", "content-length", "set-cookie"] {
            assert!(!head.contains_key(name), "{head:?}");
        }
        let mut api = timeout(SOON, connections.recv()).await.expect("a connection").unwrap();

        let received = lab.received.lock()[0].clone();
        assert_eq!((received.content_length, received.extra), (Some(0), None));
        let request = received.request.unwrap();
        assert_eq!(request.method, method);
        let header = |name: &str| request.header.get(name).map(|values| values.value.clone());
        assert_eq!(header("Connection"), Some(vec!["upgrade".to_owned()]));
        assert_eq!(header("Upgrade"), Some(vec![upgrade.to_owned()]));
        assert_eq!(header("Sec-Websocket-Protocol"), Some(vec!["v5.channel.k8s.io".to_owned()]));
        assert_eq!(header("Sec-Websocket-Version"), Some(vec!["13".to_owned()]));
        assert_eq!(header("Sec-Websocket-Key").is_some(), method == "GET");
        assert_eq!((header(":protocol"), header("Authorization")), (None, None));

        // The largest of them fill every buffer on the way.
        for count in [1, 2, 32 * 1024, 32 * 1024 + 1, 8 << 20] {
            let (up, down) = (bytes(count, 1), bytes(count, 2));
            let mut got = vec![0; count];
            let (mut from_client, mut to_client) = api.split();
            let Stream { send, receive, .. } = &mut stream;
            let (mut rest, mut received) = (up.clone(), Vec::new());
            let writing = async {
                while !rest.is_empty() {
                    send.reserve_capacity(rest.len());
                    let capacity = std::future::poll_fn(|cx| send.poll_capacity(cx)).await.unwrap().unwrap();
                    send.send_data(rest.split_to(capacity.min(rest.len())), false).unwrap();
                }
            };
            let reading = async {
                while received.len() < count {
                    let data = receive.data().await.unwrap().unwrap();
                    receive.flow_control().release_capacity(data.len()).unwrap();
                    received.extend_from_slice(&data);
                }
            };
            let all = async {
                let answering = async { to_client.write_all(&down).await.unwrap() };
                tokio::join!(writing, reading, answering, from_client.read_exact(&mut got)).3.unwrap();
            };
            timeout(SOON, all).await.expect("all bytes");
            assert!(got == up && received == down, "{protocol} {count}");
        }
        stream.finish();
        assert_eq!(end_of(&mut api).await, Ok(Vec::new()));
        api.write_all(b"rest").await.unwrap();
        api.shutdown().await.unwrap();
        assert_eq!(stream.rest().await, Ok(b"rest".to_vec()));
        eventually("it was counted", || lab.metrics.ended_so(Kind::Upgrade, EndedBy::Client) == 1).await;
    }
}

/// Envoy's client of HTTP/1.1 has made a key, and waits for what belongs to it.
#[tokio::test]
async fn the_key_of_a_client_is_passed_on_and_so_is_its_answer() {
    let (api, mut connections) = upgrading(None);
    let lab = Lab::start(Setup::default(), api).await;
    let mut client = Client::connect(&lab).await;
    let stream = Stream::open(&mut client, "websocket", &[("sec-websocket-key", "a2V5")]).await;
    assert_eq!(stream.head["sec-websocket-accept"], "acoMowsaMs4gzl5sy2uaF1804GA=");
    let _api = timeout(SOON, connections.recv()).await.expect("a connection").unwrap();
    let received = lab.received.lock()[0].clone().request.unwrap();
    assert_eq!(received.header["Sec-Websocket-Key"].value, ["a2V5"]);
}

#[tokio::test]
async fn a_reset_by_the_client_cancels_the_request_and_an_end_does_not() {
    for protocol in ["websocket", "spdy/3.1"] {
        for reason in [Reason::CANCEL, Reason::NO_ERROR, Reason::INTERNAL_ERROR] {
            let mut upgraded = Upgraded::start(protocol).await;
            upgraded.stream.write(Bytes::from_static(b"some")).await;
            reads(&mut upgraded.api, b"some").await;
            upgraded.stream.send.send_reset(reason);
            assert_eq!(end_of(&mut upgraded.api).await, Err(()), "the API server sees a reset: {reason:?}");
            upgraded.ended(EndedBy::Client).await;
        }
    }
    // The connection is gone with all its streams.
    let Upgraded { lab, client, stream, mut api } = Upgraded::start("websocket").await;
    drop((client, stream));
    assert_eq!(end_of(&mut api).await, Err(()), "the API server sees a reset");
    eventually("it was counted", || lab.metrics.ended_so(Kind::Upgrade, EndedBy::Client) == 1).await;
}

#[tokio::test]
async fn the_client_gets_the_rest_when_the_api_server_closes() {
    let (api, mut connections) = upgrading(None);
    let lab = Lab::start(Setup { tunnels: 1, ..Setup::default() }, api).await;
    let mut client = Client::connect(&lab).await;
    // The only tunnel, and the connection, serve one request after the other.
    for count in 1..=3 {
        let mut stream = Stream::open(&mut client, "websocket", &[]).await;
        let mut api = timeout(SOON, connections.recv()).await.expect("a connection").unwrap();
        stream.write(Bytes::from_static(b"not read")).await;
        reads(&mut api, b"not read").await;
        api.write_all(b"last").await.unwrap();
        api.shutdown().await.unwrap();
        assert_eq!(stream.rest().await, Ok(b"last".to_vec()));
        eventually("it was counted", || lab.metrics.ended_so(Kind::Upgrade, EndedBy::Upstream) == count)
            .await;
    }
}

#[tokio::test]
async fn a_reset_by_the_api_server_and_a_lost_tunnel_end_the_stream_alone() {
    let mut upgraded = Upgraded::start("spdy/3.1").await;
    upgraded.api.write_all(b"partial").await.unwrap();
    upgraded.stream.reads(b"partial").await;
    upgraded.api.set_zero_linger().unwrap();
    let Upgraded { lab, mut client, mut stream, api } = upgraded;
    drop(api);
    assert_eq!(stream.rest().await, Err(Some(Reason::CANCEL)));
    eventually("it was counted", || lab.metrics.ended_so(Kind::Upgrade, EndedBy::Upstream) == 1).await;
    assert_eq!(client.get("/-/ready").await.status(), 200);

    let mut upgraded = Upgraded::start("websocket").await;
    upgraded.lab.lose_tunnels();
    // Close 1001. SPDY has no such frame.
    assert_eq!(upgraded.stream.rest().await, Ok(vec![0x88, 2, 0x03, 0xe9]));
    upgraded.ended(EndedBy::Tunnel).await;
    assert_eq!(upgraded.client.get("/-/ready").await.status(), 200);

    let mut upgraded = Upgraded::start("spdy/3.1").await;
    upgraded.lab.lose_tunnels();
    assert_eq!(upgraded.stream.rest().await, Err(Some(Reason::CANCEL)));
    upgraded.ended(EndedBy::Tunnel).await;
}

/// Writes a frame of WebSocket in two parts, and ends the connection in between.
async fn ends_after_a_frame(upgraded: &mut Upgraded, end: impl FnOnce(&Lab), code: [u8; 2]) {
    upgraded.api.write_all(b"\x82\x05he").await.unwrap();
    upgraded.stream.reads(b"\x82\x05he").await;
    end(&upgraded.lab);
    upgraded.api.write_all(b"llo").await.unwrap();
    let rest = upgraded.stream.rest().await.expect("a regular end");
    assert_eq!(rest, [b"llo\x88\x02".as_slice(), &code].concat());
    assert_eq!(end_of(&mut upgraded.api).await, Err(()), "the API server sees a reset");
}

#[tokio::test]
async fn a_revoked_permission_ends_a_websocket_after_a_frame_with_1008() {
    let mut upgraded = Upgraded::start("websocket").await;
    ends_after_a_frame(&mut upgraded, |lab| lab.users.revoke(TOKEN), 1008_u16.to_be_bytes()).await;
    upgraded.ended(EndedBy::Revoked).await;
    // There are no frames to look at.
    let mut upgraded = Upgraded::start("spdy/3.1").await;
    upgraded.lab.users.revoke(TOKEN);
    assert_eq!(upgraded.stream.rest().await, Err(Some(Reason::CANCEL)));
    upgraded.ended(EndedBy::Revoked).await;
}

#[tokio::test]
async fn upgrades_continue_when_kas_leaves_and_end_after_their_grace_with_1001() {
    let setup = || Setup { upgrade_grace: Duration::from_secs(1), ..Setup::default() };
    let mut upgraded = Upgraded::start_with(setup(), "websocket").await;
    upgraded.lab.lifecycle.advance(Phase::Leaving);
    upgraded.stream.write(Bytes::from_static(b"still")).await;
    reads(&mut upgraded.api, b"still").await;
    ends_after_a_frame(&mut upgraded, |_| (), 1001_u16.to_be_bytes()).await;
    upgraded.ended(EndedBy::Drain).await;

    let mut upgraded = Upgraded::start_with(setup(), "spdy/3.1").await;
    upgraded.lab.lifecycle.advance(Phase::Leaving);
    assert_eq!(upgraded.stream.rest().await, Err(Some(Reason::CANCEL)));
    upgraded.ended(EndedBy::Drain).await;
    // What is left in the end is cut.
    let setup = Setup { upgrade_grace: Duration::from_secs(600), ..Setup::default() };
    let mut upgraded = Upgraded::start_with(setup, "websocket").await;
    upgraded.lab.lifecycle.advance(Phase::Stopped);
    assert!(upgraded.stream.rest().await.is_err());
    upgraded.ended(EndedBy::Drain).await;
}

#[tokio::test]
async fn a_session_that_is_too_long_ends_as_if_revoked() {
    let open = OpenLimits { session: Duration::from_millis(100), ..OpenLimits::default() };
    let mut upgraded = Upgraded::start_with(Setup { open, ..Setup::default() }, "websocket").await;
    assert_eq!(upgraded.stream.rest().await, Ok(vec![0x88, 2, 3, 240]));
    upgraded.ended(EndedBy::Limit).await;
}

#[tokio::test]
async fn a_client_that_does_not_read_stops_its_own_stream_only() {
    /// More than all buffers on the way.
    const MOST: usize = 64 << 20;
    let (api, mut connections) = upgrading(None);
    let lab = Lab::start(Setup::default(), api).await;
    let mut client = Client::connect(&lab).await;
    let mut stalled = Stream::open(&mut client, "websocket", &[]).await;
    let mut flooding = timeout(SOON, connections.recv()).await.expect("a connection").unwrap();
    let mut other = Stream::open(&mut client, "websocket", &[]).await;
    let mut api = timeout(SOON, connections.recv()).await.expect("a connection").unwrap();
    let (written, piece) = (std::sync::Arc::<std::sync::atomic::AtomicUsize>::default(), bytes(64 * 1024, 3));
    let (count, pieces) = (std::sync::Arc::clone(&written), piece.clone());
    let writer = tokio::spawn(async move {
        for _ in 0..MOST / pieces.len() {
            flooding.write_all(&pieces).await.unwrap();
            count.fetch_add(pieces.len(), std::sync::atomic::Ordering::Relaxed);
        }
        flooding
    });
    // While it writes, and when every buffer on the way is full.
    let mut before = usize::MAX;
    loop {
        other.write(Bytes::from_static(b"ping")).await;
        reads(&mut api, b"ping").await;
        api.write_all(b"pong").await.unwrap();
        other.reads(b"pong").await;
        let now = written.load(std::sync::atomic::Ordering::Relaxed);
        if now > 0 && now == before {
            break;
        }
        before = now;
        tokio::time::sleep(Duration::from_millis(300)).await;
    }
    assert!(!writer.is_finished(), "{before} bytes are buffered");
    for _ in 0..MOST / piece.len() {
        stalled.reads(&piece).await;
    }
    writer.await.unwrap();
}

#[tokio::test]
async fn what_cannot_be_upgraded_is_refused_with_a_status() {
    let authorization = bearer();
    let allowed = [("authorization", &*authorization)];
    let (api, _connections) = upgrading(None);
    let lab = Lab::start(Setup::default(), api).await;
    let mut client = Client::connect(&lab).await;
    let (code, message) = client.refused("connect-udp", EXEC, &allowed).await;
    assert!(code == 501 && message.contains("\"connect-udp\" is not supported"), "{code} {message}");
    // The same rules hold as for any request.
    let (code, message) = client.refused("websocket", EXEC, &[]).await;
    assert!(code == 401 && message.contains("no credential"), "{code} {message}");
    let (code, _) =
        client.refused("websocket", EXEC, &[("authorization", &format!("Bearer {NOBODY}"))]).await;
    assert_eq!(code, 403);
    let cookie = format!("_gitlab_kas={COOKIE}");
    let browser = [("cookie", &*cookie), ("gitlab-agent-id", "7"), ("x-csrf-token", CSRF)];
    let path = "/api/v1/namespaces/a/pods/b/exec?command=x";
    let (code, message) = client.refused("websocket", path, &browser).await;
    assert!(code == 403 && message.contains("Origin"), "{code} {message}");
    let evil = [&browser[..], &[("origin", "https://evil.example.com")]].concat();
    assert_eq!(client.refused("websocket", path, &evil).await.0, 403);
    // Where kas answers itself, a status of success would look like another protocol.
    for (path, headers) in [("/-/ready", &[][..]), ("/agents", &allowed)] {
        let (code, message) = client.refused("websocket", path, headers).await;
        assert!(code == 400 && message.contains("nothing to upgrade to"), "{path}: {code} {message}");
    }
    assert!(lab.received.lock().is_empty());
    let good = [&browser[..], &[("origin", "https://gitlab.example.com")]].concat();
    let (answer, _send) = client.ask("websocket", path, &good).await;
    let answer = timeout(SOON, answer).await.expect("an answer").unwrap();
    assert_eq!(answer.status(), 200);
    assert_eq!(answer.headers()[header::ACCESS_CONTROL_ALLOW_ORIGIN], "https://gitlab.example.com");

    let old = Setup { features: Features::TARGET, ..Setup::default() };
    let lab = Lab::start(old, upgrading(None).0).await;
    let (code, message) = Client::connect(&lab).await.refused("websocket", EXEC, &allowed).await;
    assert!(code == 501 && message.contains("update it"), "{code} {message}");

    let open = OpenLimits { upgrades_per_caller: 1, ..OpenLimits::default() };
    let mut upgraded = Upgraded::start_with(Setup { open, ..Setup::default() }, "websocket").await;
    let (code, message) = upgraded.client.refused("websocket", EXEC, &allowed).await;
    assert!(code == 429 && message.contains("1 upgraded connections"), "{code} {message}");
}

/// With a status of success, the client would take what follows for the protocol that it has asked for.
#[tokio::test]
async fn an_answer_that_does_not_switch_is_no_success() {
    let authorization = bearer();
    let allowed = [("authorization", &*authorization)];
    for (code, expected) in [(200, 502), (204, 502), (403, 403), (400, 400)] {
        let answering = api(move |_| async move { status(code, "{\"kind\":\"Status\",\"message\":\"\"}") });
        let lab = Lab::start(Setup::default(), answering).await;
        let mut client = Client::connect(&lab).await;
        let (answer, _send) = client.ask("websocket", EXEC, &allowed).await;
        let answer = timeout(SOON, answer).await.expect("an answer").unwrap();
        assert_eq!(answer.status(), expected, "{code}");
        let mut body = answer.into_body();
        let mut text = Vec::new();
        while let Some(data) = timeout(SOON, body.data()).await.expect("the rest") {
            text.extend_from_slice(&data.unwrap());
        }
        let text = String::from_utf8(text).unwrap();
        assert_eq!(text.contains("does not switch the protocol"), expected == 502, "{text}");
        assert_eq!(client.get("/-/ready").await.status(), 200);
    }
    // A server that does not know the key has not understood the request.
    let (switching, _connections) = upgrading(None);
    let wrong: lab::Api = std::sync::Arc::new(move |request| {
        let answer = switching(request);
        Box::pin(async move {
            let mut answer = answer.await;
            answer.headers_mut().insert(header::SEC_WEBSOCKET_ACCEPT, "wrong".parse().unwrap());
            answer
        })
    });
    let lab = Lab::start(Setup::default(), wrong).await;
    let mut client = Client::connect(&lab).await;
    let (code, message) = client.refused("websocket", EXEC, &allowed).await;
    assert!(code == 502 && message.contains("does not belong to the key"), "{code} {message}");
    // A client that has made the key itself checks that.
    let stream = Stream::open(&mut client, "websocket", &[("sec-websocket-key", "a2V5")]).await;
    assert_eq!(stream.head["sec-websocket-accept"], "wrong");
}

#[tokio::test]
async fn an_answer_of_kas_to_head_has_no_body() {
    let lab = Lab::start(Setup::default(), describing()).await;
    let client = Client::connect(&lab).await;
    for (path, code) in [("/-/ready", 200), ("/agents", 200), ("/agents/9/version", 403)] {
        let request = Request::head(format!("http://kas{path}")).header("authorization", bearer());
        let request = request.body(()).unwrap();
        let (answer, _) = client.0.clone().ready().await.unwrap().send_request(request, true).unwrap();
        let answer = timeout(SOON, answer).await.expect("an answer").unwrap();
        assert_eq!(answer.status(), code, "{path}");
        assert_ne!(answer.headers()["content-length"], "0", "{path}");
        let mut body = answer.into_body();
        while let Some(data) = timeout(SOON, body.data()).await.expect("the rest") {
            assert!(data.unwrap().is_empty(), "{path}");
        }
    }
}

#[tokio::test]
async fn a_plain_connect_is_refused() {
    let lab = Lab::start(Setup::default(), describing()).await;
    let mut client = Client::connect(&lab).await;
    let request = Request::builder().method(Method::CONNECT).uri("kas:443").body(()).unwrap();
    let (answer, _send) = client.0.clone().ready().await.unwrap().send_request(request, false).unwrap();
    assert_eq!(timeout(SOON, answer).await.expect("an answer").unwrap().status(), 405);
    // The connection goes on.
    assert_eq!(client.get("/-/ready").await.status(), 200);
}
