//! Listeners of each kind, on real sockets.

mod known_bugs;

use std::{
    convert::Infallible,
    io::ErrorKind,
    net::SocketAddr,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode, Version, header};
use http_body::Frame;
use http_body_util::{BodyExt as _, Empty, Full, StreamBody};
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo};
use parking_lot::Mutex;
use process::lifecycle::{Lifecycle, Phase};
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _},
    net::TcpStream,
    sync::watch,
    task::JoinHandle,
    time::{Instant, timeout},
};

mod connect;

use super::{server::TLS_HANDSHAKE, *};
use crate::{
    io::{Address, Listener, Stream},
    tls,
};

/// The timeout for what should happen soon.
const SOON: Duration = Duration::from_secs(10);

/// A service with a path for each test. A request with `authorization` authenticates its connection.
#[derive(Default)]
struct Paths {
    closed: AtomicUsize,
    refusals: Mutex<Vec<Refusal>>,
    resets: Mutex<Vec<Arc<StreamReset>>>,
    /// How streams ended that were taken over.
    ends: Mutex<Vec<Result<(), ErrorKind>>>,
    /// Bytes that were written to one that is not read.
    flooded: AtomicUsize,
}

/// A piece of a flood.
const PIECE: usize = 16 * 1024;

struct Client {
    of: Arc<Paths>,
    authenticated: OnceLock<()>,
    leaving: watch::Sender<bool>,
}

impl Service for Paths {
    fn connected(self: Arc<Self>, _: Option<SocketAddr>) -> Arc<dyn Connection> {
        Arc::new(Client { of: self, authenticated: OnceLock::new(), leaving: watch::Sender::new(false) })
    }

    fn refused(&self, why: Refusal) {
        self.refusals.lock().push(why);
    }
}

fn text(body: impl Into<Bytes>) -> Response<Body> {
    Response::new(Full::new(body.into()).map_err(|never: Infallible| match never {}).boxed_unsync())
}

/// Echoes lines in capitals until the connection should end, and then sends `bye` if requested.
async fn shout(stream: Stream, mut leaving: watch::Receiver<bool>, is_polite: bool) {
    let (mut read, mut write) = tokio::io::split(stream);
    let mut bytes = [0; 64];
    loop {
        tokio::select! {
            n = read.read(&mut bytes) => match n {
                Ok(n) if n > 0 => {
                    bytes[..n].make_ascii_uppercase();
                    write.write_all(&bytes[..n]).await.unwrap();
                }
                _ => return,
            },
            () = async { drop(leaving.wait_for(|leaving| *leaving).await) }, if is_polite => {
                let _ = write.write_all(b"bye").await;
                return;
            }
        }
    }
}

/// What a connection does that was taken over.
async fn taken(of: Arc<Paths>, mut stream: Stream, leaving: watch::Receiver<bool>, path: String) {
    match &*path {
        "/end" | "/end/elsewhere" => {
            let (mut read, mut write) = tokio::io::split(stream);
            let reading = async move {
                read.read_exact(&mut [0; 9]).await.unwrap();
                write.write_all(b"read").await.unwrap();
                write.flush().await.unwrap();
                let end = read.read_to_end(&mut Vec::new()).await.map(drop);
                of.ends.lock().push(end.map_err(|error| error.kind()));
                drop(write);
            };
            if path == "/end" { reading.await } else { tokio::spawn(reading).await.unwrap() }
        }
        "/held" | "/held/late" => {
            /// Tells that the future was dropped.
            struct Dropped(Arc<Paths>);
            impl Drop for Dropped {
                fn drop(&mut self) {
                    self.0.ends.lock().push(Err(ErrorKind::Interrupted));
                }
            }
            let dropped = Dropped(of);
            stream.write_all(b"held").await.unwrap();
            let end = stream.read_to_end(&mut Vec::new()).await.map(drop);
            dropped.0.ends.lock().push(end.map_err(|error| error.kind()));
            std::mem::forget(dropped);
        }
        "/flood" => loop {
            stream.write_all(&[7; PIECE]).await.unwrap();
            of.flooded.fetch_add(PIECE, Ordering::Relaxed);
        },
        "/reset" => {
            stream.read_u8().await.unwrap();
            stream.write_all(b"not the end").await.unwrap();
            stream.reset_on_close().unwrap();
        }
        "/panic" => {
            stream.read_u8().await.unwrap();
            panic!("expected by this test");
        }
        _ => shout(stream, leaving, path == "/shout").await,
    }
}

impl Connection for Client {
    fn call(self: Arc<Self>, request: Request<Incoming>, slot: &StreamSlot) -> Answer {
        let path = request.uri().path().to_owned();
        let is_late = path.ends_with("/late");
        if request.headers().contains_key(header::AUTHORIZATION) && !is_late {
            let _ = self.authenticated.set(());
        }
        let armed = match &*path {
            "/full" | "/shout/armed" => Some(slot.arm()),
            "/until" | "/quick" => {
                slot.arm_until(Instant::now() + Duration::from_millis(300));
                None
            }
            _ => None,
        };
        self.of.resets.lock().extend(armed);
        let is_connect = request.method() == Method::CONNECT;
        Box::pin(async move {
            if is_late {
                tokio::time::sleep(Duration::from_millis(100)).await;
                let _ = self.authenticated.set(());
            }
            match &*path {
                "/echo" => text(request.into_body().collect().await.unwrap().to_bytes()),
                "/slow" => {
                    tokio::time::sleep(Duration::from_millis(500)).await;
                    text("slow")
                }
                "/full" | "/until" => {
                    let frames = std::iter::repeat_with(|| Ok(Frame::data(Bytes::from(vec![7; 64 << 10]))));
                    Response::new(StreamBody::new(futures_util::stream::iter(frames)).boxed_unsync())
                }
                "/shout" | "/shout/on" | "/shout/armed" | "/end" | "/end/elsewhere" | "/flood" | "/reset"
                | "/panic" | "/held" | "/held/late" => {
                    let leaving = self.leaving.subscribe();
                    let mut answer = text("");
                    if !is_connect {
                        *answer.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
                        for (name, value) in [(header::CONNECTION, "upgrade"), (header::UPGRADE, "shout")] {
                            answer.headers_mut().insert(name, value.parse().unwrap());
                        }
                    }
                    let of = Arc::clone(&self.of);
                    upgrade(&mut answer, move |stream| taken(of, stream, leaving, path));
                    answer
                }
                _ => text(format!("{:?}", request.version())),
            }
        })
    }

    fn auth_state(&self) -> AuthState {
        if self.authenticated.get().is_some() { AuthState::Authenticated } else { AuthState::New }
    }

    fn going_away(&self, _: GoAway) {
        self.leaving.send_replace(true);
    }

    fn closed(&self) {
        self.of.closed.fetch_add(1, Ordering::Relaxed);
    }
}

/// A server that runs.
struct Running {
    address: SocketAddr,
    service: Arc<Paths>,
    lifecycle: Lifecycle,
    task: JoinHandle<()>,
}

impl Running {
    async fn start(protocols: Protocols, limits: Limits) -> Self {
        Self::start_with(protocols, limits, None).await
    }

    async fn start_with(
        protocols: Protocols,
        limits: Limits,
        tls: Option<tls::Live<rustls::ServerConfig>>,
    ) -> Self {
        Self::start_as(protocols, limits, tls, API, None).await
    }

    async fn start_as(
        protocols: Protocols,
        limits: Limits,
        tls: Option<tls::Live<rustls::ServerConfig>>,
        settings: Settings,
        age: Option<Age>,
    ) -> Self {
        let listener = Listener::bind(&Address::Tcp("127.0.0.1:0".into())).await.unwrap();
        let address = listener.local_addr().unwrap();
        let (service, lifecycle) = (Arc::<Paths>::default(), Lifecycle::default());
        let server =
            Server { listener, tls, protocols, settings, limits, age, service: Arc::clone(&service) as _ };
        let task = tokio::spawn(server.run(lifecycle.clone()));
        Self { address, service, lifecycle, task }
    }

    async fn socket(&self, bytes: &[u8]) -> TcpStream {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        stream.write_all(bytes).await.unwrap();
        stream
    }

    /// Waits until a connection was refused for `why`.
    async fn refused(&self, why: Refusal) {
        let begun = Instant::now();
        while !self.service.refusals.lock().contains(&why) {
            assert!(begun.elapsed() < SOON, "{:?}", self.service.refusals.lock());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

impl Running {
    /// Waits until the end of a stream was read that was taken over, and returns it.
    async fn end_was_read(&self) -> Result<(), ErrorKind> {
        let begun = Instant::now();
        loop {
            if let Some(end) = self.service.ends.lock().pop() {
                return end;
            }
            assert!(begun.elapsed() < SOON, "no end was read");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

fn get(path: &str) -> Vec<u8> {
    format!("GET {path} HTTP/1.1\r\nHost: kas\r\nAuthorization: x\r\n\r\n").into_bytes()
}

/// Reads to the end or to a reset.
async fn rest(stream: &mut TcpStream) -> String {
    let mut got = Vec::new();
    let _ = timeout(SOON, stream.read_to_end(&mut got)).await.expect("it stays open");
    String::from_utf8_lossy(&got).into_owned()
}

/// Reads until `end` has come.
async fn until(stream: &mut TcpStream, end: &str) -> String {
    let mut got = String::new();
    while !got.ends_with(end) {
        let byte = timeout(SOON, stream.read_u8()).await.unwrap_or_else(|_| panic!("only {got}"));
        got.push(byte.unwrap_or_else(|error| panic!("{error} after {got}")).into());
    }
    got
}

/// Returns the server's answer to a request of each version.
async fn versions(
    http1: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    http2: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
) -> [Bytes; 2] {
    let request = || {
        Request::get("http://kas/")
            .header(header::HOST, "kas")
            .header(header::AUTHORIZATION, "x")
            .body(Empty::<Bytes>::new())
            .unwrap()
    };
    let (mut old, connection) = hyper::client::conn::http1::handshake(TokioIo::new(http1)).await.unwrap();
    tokio::spawn(connection);
    let (mut new, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(http2)).await.unwrap();
    tokio::spawn(connection);
    let (old, new) = (old.send_request(request()).await.unwrap(), new.send_request(request()).await.unwrap());
    assert_eq!((old.version(), new.version()), (Version::HTTP_11, Version::HTTP_2));
    [old.collect().await.unwrap().to_bytes(), new.collect().await.unwrap().to_bytes()]
}

#[tokio::test]
async fn both_versions_are_served_on_one_plain_port() {
    let server = Running::start(Protocols::Http1And2, Limits::default()).await;
    let said = versions(server.socket(b"").await, server.socket(b"").await).await;
    assert_eq!(said, ["HTTP/1.1", "HTTP/2.0"]);
    // The first bytes may come one by one, also if both versions begin with them.
    let mut stream = server.socket(b"").await;
    for byte in b"PUT /echo HTTP/1.1\r\nHost: kas\r\nContent-Length: 3\r\nConnection: close\r\n\r\none" {
        stream.write_all(&[*byte]).await.unwrap();
        tokio::task::yield_now().await;
    }
    let got = rest(&mut stream).await;
    assert!(got.starts_with("HTTP/1.1 200 ") && got.ends_with("\r\n\r\none"), "{got}");
}

/// Starts a server of both versions with TLS. Returns it with the configurations of clients that trust it, of
/// each version.
async fn start_tls(protocols: Protocols, limits: Limits) -> (Running, [Arc<rustls::ClientConfig>; 2]) {
    tls::install();
    let key = rcgen::KeyPair::generate().unwrap();
    let certificate =
        rcgen::CertificateParams::new(vec!["localhost".to_owned()]).unwrap().self_signed(&key).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let (certificate_file, key_file) = (dir.path().join("cert"), dir.path().join("key"));
    std::fs::write(&certificate_file, certificate.pem()).unwrap();
    std::fs::write(&key_file, key.serialize_pem()).unwrap();
    let config = tls::or_http1(&tls::server(&certificate_file, &key_file).unwrap());
    let server = Running::start_with(protocols, limits, Some(tls::Live::from(config))).await;
    let http2 = tls::client(Some(&certificate_file)).unwrap();
    (server, [tls::http1_only(&http2), http2])
}

/// Does the handshake of a client.
async fn connect_tls<S: AsyncRead + AsyncWrite + Unpin>(
    config: Arc<rustls::ClientConfig>,
    stream: S,
) -> tokio_rustls::client::TlsStream<S> {
    let name = rustls_pki_types::ServerName::try_from("localhost").unwrap();
    tokio_rustls::TlsConnector::from(config).connect(name, stream).await.unwrap()
}

#[tokio::test]
async fn both_versions_are_served_on_one_port_with_tls() {
    let (server, [http1, http2]) = start_tls(Protocols::Http1And2, Limits::default()).await;
    let connect = async |config| connect_tls(config, server.socket(b"").await).await;
    let said = versions(connect(http1).await, connect(http2).await).await;
    assert_eq!(said, ["HTTP/1.1", "HTTP/2.0"]);
}

#[tokio::test]
async fn the_first_byte_decides_whether_a_connection_uses_tls() {
    let (server, [http1, http2]) = start_tls(Protocols::Http1And2MaybeTls, Limits::default()).await;
    let connect = async |config| connect_tls(config, server.socket(b"").await).await;
    assert_eq!(versions(connect(http1).await, connect(http2).await).await, ["HTTP/1.1", "HTTP/2.0"]);
    let said = versions(server.socket(b"").await, server.socket(b"").await).await;
    assert_eq!(said, ["HTTP/1.1", "HTTP/2.0"]);
    // Bytes behind such a byte that are not TLS are refused.
    let mut stream = server.socket(&[&[TLS_HANDSHAKE][..], &get("/")].concat()).await;
    assert!(!rest(&mut stream).await.contains("HTTP"), "they are not read as HTTP");
    server.refused(Refusal::Handshake).await;
    // A handshake that does not go on has the same time as elsewhere, and so has a silent client.
    let limits = Limits { handshake: Duration::from_millis(300), ..Limits::default() };
    for begun in [&[TLS_HANDSHAKE][..], &[]] {
        let (server, _) = start_tls(Protocols::Http1And2MaybeTls, limits).await;
        assert_eq!(rest(&mut server.socket(begun).await).await, "");
        server.refused(Refusal::Handshake).await;
    }
    // Elsewhere, TLS is required.
    let (server, _) = start_tls(Protocols::Http1And2, Limits::default()).await;
    assert!(!rest(&mut server.socket(&get("/")).await).await.contains("HTTP"));
    server.refused(Refusal::Handshake).await;
}

#[tokio::test]
async fn http_1_0_is_answered_and_closed() {
    let server = Running::start(Protocols::Http1, Limits::default()).await;
    let got = rest(&mut server.socket(b"GET / HTTP/1.0\r\n\r\n").await).await;
    assert!(got.starts_with("HTTP/1.0 200 ") && got.ends_with("HTTP/1.0"), "{got}");
    assert!(!got.contains("transfer-encoding"), "{got}");
}

#[tokio::test]
async fn idle_connection_outlasts_the_time_for_a_head_and_no_more_than_its_own() {
    let limits =
        Limits { headers: Duration::from_millis(400), idle: Duration::from_secs(2), ..Limits::default() };
    let server = Running::start(Protocols::Http1And2, limits).await;
    let mut stream = server.socket(&get("/")).await;
    until(&mut stream, "HTTP/1.1").await;
    until(&mut stream, "HTTP/1.1").await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    let begun = Instant::now();
    stream.write_all(&get("/")).await.unwrap();
    until(&mut stream, "\r\n\r\nHTTP/1.1").await;
    assert_eq!(rest(&mut stream).await, "");
    assert!(begun.elapsed() >= limits.idle, "{:?}", begun.elapsed());
    server.refused(Refusal::Idle).await;
}

#[tokio::test]
async fn head_that_trickles_in_is_cut() {
    let limits = Limits { headers: Duration::from_millis(500), ..Limits::default() };
    let server = Running::start(Protocols::Http1, limits).await;
    // The first one of its connection, and a later one.
    for first in ["", "/"] {
        let mut stream = server.socket(b"").await;
        if !first.is_empty() {
            stream.write_all(&get(first)).await.unwrap();
            until(&mut stream, "\r\n\r\nHTTP/1.1").await;
        }
        let begun = Instant::now();
        let head = b"GET / HTTP/1.1\r\nHost: ";
        let trickle = async {
            for byte in head.iter().chain(std::iter::repeat(&b'a')) {
                if stream.write_all(&[*byte]).await.is_err() {
                    break;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        timeout(SOON, trickle).await.expect("it is still read");
        assert!(begun.elapsed() >= limits.headers, "{first}: {:?}", begun.elapsed());
        server.refused(Refusal::Headers).await;
        server.service.refusals.lock().clear();
    }
}

#[tokio::test]
async fn head_that_is_too_large_is_refused() {
    let server = Running::start(Protocols::Http1And2, Limits::default()).await;
    let large = |size| format!("GET / HTTP/1.1\r\nHost: kas\r\nA: {}\r\n\r\n", "a".repeat(size)).into_bytes();
    let most = (HEADER_LIST * HEADER_LIST_ROOM) as usize;
    let mut stream = server.socket(&large(most - 200)).await;
    until(&mut stream, "\r\n\r\nHTTP/1.1").await;
    let got = rest(&mut server.socket(&large(most + 1)).await).await;
    assert!(got.starts_with("HTTP/1.1 431 "), "{got}");
    server.refused(Refusal::Headers).await;
    let fields = format!("GET / HTTP/1.1\r\nHost: kas\r\n{}\r\n", "A: b\r\n".repeat(100));
    let got = rest(&mut server.socket(fields.as_bytes()).await).await;
    assert!(got.starts_with("HTTP/1.1 431 "), "{got}");
}

#[tokio::test]
async fn unauthenticated_connections_of_http1_are_few_and_short() {
    let limits = Limits {
        half_open: 2,
        half_open_most: 2,
        half_open_patience: Patience::same(Duration::from_millis(300)),
        authentication: Duration::from_secs(2),
        ..Limits::default()
    };
    let server = Running::start(Protocols::Http1And2, limits).await;
    let anonymous = b"GET / HTTP/1.1\r\nHost: kas\r\n\r\n";
    let begun = Instant::now();
    let mut known = server.socket(&get("/")).await;
    until(&mut known, "\r\n\r\nHTTP/1.1").await;
    let mut first = server.socket(anonymous).await;
    until(&mut first, "\r\n\r\nHTTP/1.1").await;
    let mut second = server.socket(anonymous).await;
    until(&mut second, "\r\n\r\nHTTP/1.1").await;
    assert_eq!(server.service.refusals.lock().len(), 0);
    let mut third = server.socket(anonymous).await;
    until(&mut third, "\r\n\r\nHTTP/1.1").await;
    assert_eq!(rest(&mut first).await, "");
    assert_eq!(*server.service.refusals.lock(), [Refusal::HalfOpen]);
    // The others have their deadline, and the authenticated one stays longer.
    assert_eq!(rest(&mut second).await, "");
    assert_eq!(rest(&mut third).await, "");
    assert!(begun.elapsed() >= limits.authentication);
    server.refused(Refusal::Unauthenticated).await;
    known.write_all(&get("/")).await.unwrap();
    until(&mut known, "\r\n\r\nHTTP/1.1").await;
}

/// Connects to `to` from another address of this host.
async fn connect_from(from: [u8; 4], to: SocketAddr) -> std::io::Result<TcpStream> {
    let socket = tokio::net::TcpSocket::new_v4()?;
    socket.bind((from, 0).into())?;
    socket.connect(to).await
}

/// Returns the client's end of a link on which each byte takes this time, in both directions.
fn slow_link(stream: TcpStream, delay: Duration) -> tokio::io::DuplexStream {
    async fn pass(mut from: impl AsyncRead + Unpin, mut to: impl AsyncWrite + Unpin, delay: Duration) {
        let (sender, mut receiver) = tokio::sync::mpsc::channel::<(Instant, Vec<u8>)>(64);
        let read = async move {
            let mut bytes = vec![0; 64 << 10];
            while let Ok(read @ 1..) = from.read(&mut bytes).await {
                if sender.send((Instant::now() + delay, bytes[..read].to_vec())).await.is_err() {
                    break;
                }
            }
            drop(sender);
        };
        let write = async move {
            while let Some((at, bytes)) = receiver.recv().await {
                tokio::time::sleep_until(at).await;
                if to.write_all(&bytes).await.is_err() {
                    break;
                }
            }
            let _ = to.shutdown().await;
        };
        tokio::join!(read, write);
    }
    let (here, there) = tokio::io::duplex(64 << 10);
    let ((near_read, near_write), (far_read, far_write)) = (tokio::io::split(there), stream.into_split());
    tokio::spawn(pass(near_read, far_write, delay));
    tokio::spawn(pass(far_read, near_write, delay));
    here
}

/// A flood of silent connections, more than there are places for at one second each, and clients with 500 ms
/// for a round trip. The time is that of the test, so the machine's speed makes no difference.
#[tokio::test(start_paused = true)]
async fn client_over_a_slow_link_is_served_at_once_among_silent_connections() {
    const ROUND_TRIP: Duration = Duration::from_millis(500);
    process::open_files::raise_limit();
    let (server, [http1, _]) = start_tls(Protocols::Http1And2, Limits::default()).await;
    let to = server.address;
    let flood = tokio::spawn(async move {
        let mut ticks = tokio::time::interval(Duration::from_millis(2));
        loop {
            ticks.tick().await;
            // 1,500 in a second.
            for _ in 0..3 {
                let mut stream = connect_from([127, 0, 0, 2], to).await.unwrap();
                tokio::spawn(async move { stream.read(&mut [0]).await });
            }
        }
    });
    tokio::time::sleep(Duration::from_secs(3)).await;
    for n in 0..3 {
        // From an address that the server does not know.
        let stream = connect_from([127, 0, 1, n], to).await.unwrap();
        let begun = Instant::now();
        let mut stream = connect_tls(Arc::clone(&http1), slow_link(stream, ROUND_TRIP / 2)).await;
        stream.write_all(&get("/")).await.unwrap();
        let mut got = Vec::new();
        while !got.ends_with(b"\r\n\r\nHTTP/1.1") {
            got.push(stream.read_u8().await.unwrap());
        }
        // One round trip for TLS and one for the request; half a one for what the machine adds.
        assert!(begun.elapsed() < ROUND_TRIP * 5 / 2, "{n}: {:?}", begun.elapsed());
    }
    flood.abort();
    let refusals = server.service.refusals.lock();
    assert!(refusals.len() > 3_000 && refusals.iter().all(|why| *why == Refusal::HalfOpen));
}

#[test]
fn unauthenticated_connections_leave_most_files_to_others() {
    let most = |files| Limits::default().with_files(files).half_open_most;
    assert_eq!([0, 4_096, 20_000, 65_536, u64::MAX].map(most), [1_024, 1_024, 2_500, 8_192, 8_192]);
}

#[tokio::test]
async fn unauthenticated_connection_of_http1_is_read_as_far_as_its_requests() {
    let limits = Limits {
        streams_before_authentication: 3,
        authentication: Duration::from_millis(700),
        ..Limits::default()
    };
    let server = Running::start(Protocols::Http1, limits).await;
    let mut stream = server.socket(b"").await;
    for _ in 0..4 {
        stream.write_all(b"GET / HTTP/1.1\r\nHost: kas\r\n\r\n").await.unwrap();
        until(&mut stream, "\r\n\r\nHTTP/1.1").await;
    }
    // Even if it sends a valid token now.
    stream.write_all(&get("/")).await.unwrap();
    assert_eq!(rest(&mut stream).await, "");
    server.refused(Refusal::Unauthenticated).await;
}

#[tokio::test]
async fn last_answer_of_a_drained_connection_has_connection_close() {
    let server = Running::start(Protocols::Http1And2, Limits::default()).await;
    let mut idle = server.socket(&get("/")).await;
    let head = until(&mut idle, "\r\n\r\nHTTP/1.1").await;
    assert!(!head.contains("connection: close"), "{head}");
    let mut busy = server.socket(&get("/slow")).await;
    tokio::time::sleep(Duration::from_millis(200)).await;
    server.lifecycle.advance(Phase::Leaving);
    assert_eq!(rest(&mut idle).await, "");
    let got = rest(&mut busy).await;
    assert!(got.contains("connection: close\r\n") && got.ends_with("slow"), "{got}");
    // What comes now is still served.
    let mut late = server.socket(&get("/")).await;
    until(&mut late, "\r\n\r\nHTTP/1.1").await;
    let mut slow = server.socket(&get("/")).await;
    until(&mut slow, "\r\n\r\nHTTP/1.1").await;
    slow.write_all(&get("/slow")).await.unwrap();
    tokio::time::sleep(Duration::from_millis(200)).await;
    // From now on nothing else is, so that nothing has begun when the end comes.
    server.lifecycle.advance(Phase::Closing);
    assert_eq!(rest(&mut late).await, "");
    let got = rest(&mut slow).await;
    assert!(got.contains("connection: close\r\n") && got.ends_with("slow"), "{got}");
    let address = server.address;
    let refused = async || TcpStream::connect(address).await.is_err();
    timeout(SOON, async { while !refused().await {} }).await.expect("the listener closes");
    server.lifecycle.advance(Phase::Stopped);
    timeout(SOON, server.task).await.unwrap().unwrap();
}

fn ask_for_upgrade(path: &str) -> Vec<u8> {
    format!(
        "GET {path} HTTP/1.1\r\nHost: kas\r\nAuthorization: x\r\nConnection: upgrade\r\nUpgrade: shout\r\n\r\nearly "
    )
    .into_bytes()
}

#[tokio::test]
async fn upgraded_connection_is_asked_to_end_and_waited_for() {
    let limits =
        Limits { headers: Duration::from_millis(400), idle: Duration::from_millis(400), ..Limits::default() };
    let server = Running::start(Protocols::Http1And2, limits).await;
    let mut polite = server.socket(&ask_for_upgrade("/shout")).await;
    let mut deaf = server.socket(&ask_for_upgrade("/shout/on")).await;
    for stream in [&mut polite, &mut deaf] {
        let head = until(stream, "\r\n\r\nEARLY ").await;
        assert!(head.starts_with("HTTP/1.1 101 "), "{head}");
    }
    // It is not idle, and no head comes any more.
    for _ in 0..20 {
        polite.write_all(b"x").await.unwrap();
        until(&mut polite, "X").await;
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    tokio::time::sleep(Duration::from_millis(600)).await;
    polite.write_all(b"late").await.unwrap();
    until(&mut polite, "LATE").await;
    server.lifecycle.advance(Phase::Leaving);
    assert_eq!(rest(&mut polite).await, "bye");
    // The other one continues until the end, and does not delay it further.
    deaf.write_all(b"still").await.unwrap();
    until(&mut deaf, "STILL").await;
    assert!(!server.task.is_finished());
    server.lifecycle.advance(Phase::Stopped);
    assert_eq!(rest(&mut deaf).await, "");
    timeout(SOON, server.task).await.unwrap().unwrap();
}

#[tokio::test]
async fn upgrade_without_a_request_for_it_is_not_made() {
    let server = Running::start(Protocols::Http1, Limits::default()).await;
    let got = rest(&mut server.socket(&[get("/shout"), b"early".to_vec()].concat()).await).await;
    assert!(!got.contains("EARLY"), "{got}");
}

#[tokio::test]
async fn request_of_http1_is_reset_although_its_answer_is_not_read() {
    let server = Running::start(Protocols::Http1, Limits::default()).await;
    let mut until_deadline = server.socket(&get("/until")).await;
    let mut full = server.socket(&get("/full")).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    server.service.resets.lock().drain(..).for_each(|reset| reset.reset());
    for stream in [&mut until_deadline, &mut full] {
        rest(stream).await;
    }
    // Arming one request does not affect the next.
    let mut stream = server.socket(&get("/quick")).await;
    until(&mut stream, "\r\n\r\nHTTP/1.1").await;
    stream.write_all(&get("/slow")).await.unwrap();
    until(&mut stream, "\r\n\r\nslow").await;
}
