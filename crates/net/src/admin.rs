//! The admin listener: metrics, liveness, readiness, and an optional [`Site`], over HTTP/1.1. It does not
//! authenticate: protect it by a network policy, or let it listen on loopback.

use std::{
    convert::Infallible,
    net::SocketAddr,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode, header};
use http_body::Frame;
use http_body_util::{BodyExt as _, Full, combinators::UnsyncBoxBody};
use hyper::body::Incoming;
use parking_lot::Mutex;
use process::{
    exposition,
    lifecycle::{Lifecycle, Phase},
};
use prometheus_client::registry::Registry;
use tokio::time::Instant;

use crate::{
    http::{self as server, AuthState, GoAway, Limits, Patience, Protocols, Server, Settings, StreamSlot},
    io::Listener,
};

/// The body of an answer. That of a [`Site`] may be a stream.
pub type Body = UnsyncBoxBody<Bytes, Infallible>;

/// Further paths that the listener serves.
pub trait Site: Send + Sync + 'static {
    /// Answers a GET or a HEAD; `None`: the path is not of this site.
    ///
    /// A connection ends 60 s after its peer took the last frame of a body, so a stream must send frames more
    /// often.
    fn answer(&self, request: &Request<()>) -> Option<Response<Body>>;

    /// Returns its first path, for the answer to unknown paths.
    fn path(&self) -> &str;
}

/// The service of the admin listener.
pub struct Admin {
    /// Path of the metrics.
    pub metrics_path: String,
    /// Path of the liveness probe.
    pub liveness_path: String,
    /// Path of the readiness probe.
    pub readiness_path: String,
    /// Every metric of the process.
    pub registry: Registry,
    /// Why the process is not ready; `None`: it is.
    pub unready: Box<dyn Fn() -> Option<String> + Send + Sync>,
    /// Called before metrics are written, to set gauges that are computed on demand.
    pub refresh: Box<dyn Fn() + Send + Sync>,
    /// Further paths.
    pub site: Option<Arc<dyn Site>>,
}

impl std::fmt::Debug for Admin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Admin").field("metrics_path", &self.metrics_path).finish_non_exhaustive()
    }
}

impl Admin {
    fn answer(&self, request: &Request<()>) -> Response<Body> {
        let text = |status, body: String| {
            let mut response = Response::new(Full::new(Bytes::from(body)).boxed_unsync());
            *response.status_mut() = status;
            response
                .headers_mut()
                .insert(header::CONTENT_TYPE, header::HeaderValue::from_static("text/plain; charset=utf-8"));
            response
        };
        if !matches!(*request.method(), Method::GET | Method::HEAD) {
            return text(StatusCode::METHOD_NOT_ALLOWED, "only GET\n".into());
        }
        let path = request.uri().path();
        if path == self.metrics_path {
            (self.refresh)();
            let mut out = String::new();
            // Writing to a String cannot fail.
            let _ = prometheus_client::encoding::text::encode(&mut out, &self.registry);
            let (out, content_type) = if exposition::wants_openmetrics(request.headers()) {
                (out, exposition::OPENMETRICS)
            } else {
                (exposition::prometheus(&out), exposition::PROMETHEUS)
            };
            let mut response = text(StatusCode::OK, out);
            let headers = response.headers_mut();
            headers.insert(header::CONTENT_TYPE, header::HeaderValue::from_static(content_type));
            headers.insert(header::VARY, header::HeaderValue::from_static("accept"));
            response
        } else if path == self.liveness_path {
            text(StatusCode::OK, "alive\n".into())
        } else if path == self.readiness_path {
            match (self.unready)() {
                None => text(StatusCode::OK, "ready\n".into()),
                Some(why) => text(StatusCode::SERVICE_UNAVAILABLE, format!("not ready: {why}\n")),
            }
        } else if let Some(response) = self.site.as_ref().and_then(|site| site.answer(request)) {
            response
        } else {
            let site = self.site.as_ref().map_or_else(String::new, |site| format!(", {}", site.path()));
            text(
                StatusCode::NOT_FOUND,
                format!(
                    "there are {}, {}{site} and {}\n",
                    self.metrics_path, self.liveness_path, self.readiness_path
                ),
            )
        }
    }
}

/// A body that notes when its peer took something of it.
struct Watched {
    body: Body,
    /// `None`: the body is not a stream.
    client: Option<Arc<Client>>,
}

impl http_body::Body for Watched {
    type Data = Bytes;
    type Error = Box<dyn std::error::Error + Send + Sync>;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(cx));
        if let (Some(client), Some(_)) = (&self.client, &frame) {
            *client.taken.lock() = Instant::now();
        }
        Poll::Ready(frame.map(|frame| frame.map_err(|never| match never {})))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> http_body::SizeHint {
        self.body.size_hint()
    }
}

/// A connection ends this long after its start, or after its peer last took something of a stream. A peer
/// that stops reading must not keep a task forever.
const LONGEST: Duration = Duration::from_secs(60);
/// The head of a request must come within this time, and the next request.
const HEADERS: Duration = Duration::from_secs(10);
/// The most open connections. One more closes the oldest. If the newest was refused instead, silent
/// connections could block probes, and a healthy process would be restarted.
const MAX_CONNECTIONS: usize = 256;
/// Only the size of heads matters to HTTP/1.1.
const SETTINGS: Settings = Settings { header_list: 204 << 10, ..server::API };

fn limits() -> Limits {
    Limits {
        half_open: MAX_CONNECTIONS,
        half_open_most: MAX_CONNECTIONS,
        half_open_patience: Patience::same(Duration::ZERO),
        first_frame: HEADERS,
        headers: HEADERS,
        authentication: HEADERS,
        idle: HEADERS,
        ..Limits::default()
    }
}

impl server::Service for Admin {
    fn connected(self: Arc<Self>, _peer: Option<SocketAddr>) -> Arc<dyn server::Connection> {
        Arc::new(Client { admin: self, taken: Mutex::new(Instant::now()) })
    }
}

/// A connection of the admin listener.
struct Client {
    admin: Arc<Admin>,
    /// When it began, or when its peer last took something of a stream.
    taken: Mutex<Instant>,
}

impl server::Connection for Client {
    fn call(self: Arc<Self>, request: Request<Incoming>, _slot: &StreamSlot) -> server::Answer {
        let answer = self.admin.answer(&request.map(drop)).map(|body| {
            // Answers that are not streams do not extend the time of a connection.
            let lasts = http_body::Body::size_hint(&body).exact().is_none();
            Watched { body, client: lasts.then_some(self) }.boxed_unsync()
        });
        Box::pin(std::future::ready(answer))
    }

    fn auth_state(&self) -> AuthState {
        if self.taken.lock().elapsed() < LONGEST { AuthState::Anonymous } else { AuthState::Expelled }
    }

    fn going_away(&self, _reason: GoAway) {}
}

/// Serves until the lifecycle is [`Phase::Stopped`]: probes are answered to the end, on connections that stay
/// open until then.
pub async fn run(listener: Listener, admin: Admin, lifecycle: Lifecycle) {
    let server = Server {
        listener,
        tls: None,
        protocols: Protocols::Http1,
        settings: SETTINGS,
        limits: limits(),
        age: None,
        service: Arc::new(admin),
    };
    // This listener stops last, so it sees no earlier phase.
    let own = Lifecycle::default();
    tokio::join!(server.run(own.clone()), async {
        lifecycle.reached(Phase::Stopped).await;
        own.advance(Phase::Stopped);
    });
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use http_body_util::StreamBody;
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::TcpStream,
    };

    use super::*;
    use crate::io::Address;

    /// A frame of 64 KiB each second, without end.
    struct Endless;

    impl Site for Endless {
        fn answer(&self, request: &Request<()>) -> Option<Response<Body>> {
            (request.uri().path() == "/endless").then(|| {
                let frames = futures_util::stream::unfold((), |()| async {
                    tokio::time::sleep(Duration::from_secs(1)).await;
                    Some((Ok(Frame::data(Bytes::from(vec![b'x'; 64 << 10]))), ()))
                });
                Response::new(StreamBody::new(Box::pin(frames)).boxed_unsync())
            })
        }

        fn path(&self) -> &str {
            "/endless"
        }
    }

    async fn serve() -> SocketAddr {
        serve_until(Lifecycle::default()).await
    }

    async fn serve_until(lifecycle: Lifecycle) -> SocketAddr {
        let listener = Listener::bind(&Address::Tcp("127.0.0.1:0".into())).await.unwrap();
        let address = listener.local_addr().unwrap();
        let admin = Admin {
            metrics_path: "/metrics".into(),
            liveness_path: "/liveness".into(),
            readiness_path: "/readiness".into(),
            registry: Registry::default(),
            unready: Box::new(|| None),
            refresh: Box::new(|| {}),
            site: Some(Arc::new(Endless)),
        };
        tokio::spawn(run(listener, admin, lifecycle));
        address
    }

    async fn ask(address: SocketAddr, path: &str) -> TcpStream {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(format!("GET {path} HTTP/1.1\r\nHost: kas\r\n\r\n").as_bytes()).await.unwrap();
        stream
    }

    /// Reads the answer of the liveness probe.
    async fn alive(stream: &mut TcpStream) {
        let mut got = Vec::new();
        while !got.ends_with(b"\r\n\r\nalive\n") {
            got.push(stream.read_u8().await.unwrap());
        }
        assert!(got.starts_with(b"HTTP/1.1 200 "));
    }

    #[tokio::test]
    async fn oldest_connection_is_closed_for_the_newest_at_once() {
        let address = serve().await;
        let mut oldest = ask(address, "/liveness").await;
        alive(&mut oldest).await;
        let mut others = Vec::new();
        for _ in 0..MAX_CONNECTIONS {
            others.push(TcpStream::connect(address).await.unwrap());
        }
        let begun = Instant::now();
        alive(&mut ask(address, "/liveness").await).await;
        assert!(begun.elapsed() < Duration::from_secs(5));
        // Without an answer, since the client has sent no request.
        assert_eq!(oldest.read(&mut [0]).await.unwrap_or(0), 0);
    }

    #[tokio::test]
    async fn connections_stay_until_the_end() {
        let lifecycle = Lifecycle::default();
        let address = serve_until(lifecycle.clone()).await;
        let mut stream = ask(address, "/liveness").await;
        alive(&mut stream).await;
        for phase in [Phase::Draining, Phase::Leaving] {
            lifecycle.advance(phase);
            tokio::time::sleep(Duration::from_millis(50)).await;
            stream.write_all(b"GET /liveness HTTP/1.1\r\nHost: kas\r\n\r\n").await.unwrap();
            alive(&mut stream).await;
        }
        lifecycle.advance(Phase::Stopped);
        assert_eq!(stream.read(&mut [0]).await.unwrap_or(0), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn connection_without_a_request_is_closed() {
        let address = serve().await;
        let begun = Instant::now();
        for first in ["", "GET / HTTP/1.1\r\nHost: kas\r\n\r\n", "GET / HTT"] {
            let mut stream = TcpStream::connect(address).await.unwrap();
            stream.write_all(first.as_bytes()).await.unwrap();
            let mut got = Vec::new();
            let _ = tokio::time::timeout(2 * HEADERS, stream.read_to_end(&mut got)).await.unwrap();
            assert_eq!(got.starts_with(b"HTTP/1.1 404 "), first.ends_with("\r\n\r\n"));
        }
        assert!(begun.elapsed() >= 3 * HEADERS);
    }

    #[tokio::test(start_paused = true)]
    async fn stream_lasts_as_long_as_it_is_read() {
        let mut stream = ask(serve().await, "/endless").await;
        let begun = Instant::now();
        let mut bytes = vec![0; 256 << 10];
        while begun.elapsed() < 5 * LONGEST {
            assert!(stream.read(&mut bytes).await.unwrap() > 0, "ended after {:?}", begun.elapsed());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn connection_that_does_not_read_a_stream_is_closed() {
        let address = serve().await;
        let mut stream = ask(address, "/endless").await;
        // Its socket takes some megabytes, one frame per second. Then it stalls, and is closed a minute
        // later.
        tokio::time::sleep(Duration::from_secs(3600)).await;
        let mut rest = Vec::new();
        let read = tokio::time::timeout(LONGEST, stream.read_to_end(&mut rest)).await;
        assert!(read.is_ok(), "it is still open after {} bytes", rest.len());
        assert!(rest.len() < 64 << 20, "{} bytes were sent to nobody", rest.len());
    }

    #[tokio::test(start_paused = true)]
    async fn answers_that_are_not_streams_do_not_extend_a_connection() {
        let mut stream = ask(serve().await, "/liveness").await;
        let begun = Instant::now();
        let mut bytes = vec![0; 64 << 10];
        while stream.read(&mut bytes).await.is_ok_and(|n| n > 0) {
            tokio::time::sleep(Duration::from_secs(1)).await;
            let _ = stream.write_all(b"GET /liveness HTTP/1.1\r\nHost: kas\r\n\r\n").await;
            assert!(begun.elapsed() < 2 * LONGEST, "it is still open");
        }
        assert!(begun.elapsed() >= LONGEST, "ended after {:?}", begun.elapsed());
    }
}
