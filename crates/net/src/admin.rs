//! The admin listener: metrics, liveness, readiness, and a [`Site`] besides. HTTP/1.1, no authentication: a
//! network policy or loopback guards it.

use std::{
    collections::VecDeque,
    convert::Infallible,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode, header};
use http_body::Frame;
use http_body_util::{BodyExt as _, Full, combinators::UnsyncBoxBody};
use hyper::{body::Incoming, server::conn::http1};
use hyper_util::rt::{TokioIo, TokioTimer};
use process::{
    exposition,
    lifecycle::{Lifecycle, Phase},
};
use prometheus_client::registry::Registry;
use tokio::{sync::watch, task::AbortHandle, time::Instant};

use crate::io::{AcceptFailures, Listener};

/// A body of an answer; one of a [`Site`] may last.
pub type Body = UnsyncBoxBody<Bytes, Infallible>;

/// What the listener serves besides, on paths of its own.
pub trait Site: Send + Sync + 'static {
    /// Answers a GET or a HEAD; `None`: the path is not of this site.
    ///
    /// A connection ends 60 s after the last frame of a body that its peer took, so a body that lasts has one
    /// more often.
    fn answer(&self, request: &Request<()>) -> Option<Response<Body>>;

    /// Names its first path for those who asked for another one.
    fn path(&self) -> &str;
}

/// What the admin listener answers with.
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
    /// Called before metrics are written, to set gauges that are read rather than kept.
    pub refresh: Box<dyn Fn() + Send + Sync>,
    /// What is served besides.
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

/// A body that says when its peer took something of it.
struct Watched {
    body: Body,
    taken: watch::Sender<Instant>,
}

impl http_body::Body for Watched {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(cx));
        if frame.is_some() {
            self.taken.send_replace(Instant::now());
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> http_body::SizeHint {
        self.body.size_hint()
    }
}

/// Waits until nothing was taken for [`LONGEST`].
async fn forsaken(taken: watch::Receiver<Instant>) {
    loop {
        let until = *taken.borrow() + LONGEST;
        if until <= Instant::now() {
            return;
        }
        tokio::time::sleep_until(until).await;
    }
}

/// Connections that are open at once.
const MAX_CONNECTIONS: usize = 256;
/// A connection ends this long after its start, or after its peer took something of a body that lasts: one
/// that stops reading must not keep a task for ever.
const LONGEST: Duration = Duration::from_secs(60);

/// Serves until the lifecycle is [`Phase::Stopped`]: probes must be answered to the end.
///
/// Beyond 256 connections the oldest one is closed for the newest: were the newest refused, silent
/// connections could keep probes out, and whoever probes would restart a process that is well.
pub async fn run(listener: Listener, admin: Admin, lifecycle: Lifecycle) {
    let admin = Arc::new(admin);
    let mut connections = VecDeque::<AbortHandle>::new();
    let mut failures = AcceptFailures::default();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = lifecycle.reached(Phase::Stopped) => return,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                failures.take(&listener, &error).await;
                continue;
            }
        };
        connections.retain(|connection| !connection.is_finished());
        if connections.len() >= MAX_CONNECTIONS
            && let Some(oldest) = connections.pop_front()
        {
            oldest.abort();
        }
        let admin = Arc::clone(&admin);
        let connection = tokio::spawn(async move {
            let (taken, takes) = watch::channel(Instant::now());
            let service = hyper::service::service_fn(move |request: Request<Incoming>| {
                let response = admin.answer(&request.map(drop));
                // Answers of one piece get no more time, however many there are.
                let lasts = http_body::Body::size_hint(response.body()).exact().is_none();
                let response = response.map(|body| match lasts {
                    true => Watched { body, taken: taken.clone() }.boxed_unsync(),
                    false => body,
                });
                async move { Ok::<_, Infallible>(response) }
            });
            let serve = http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(Duration::from_secs(10))
                .serve_connection(TokioIo::new(stream), service);
            tokio::select! {
                _ = serve => {}
                () = forsaken(takes) => {}
            }
        });
        connections.push_back(connection.abort_handle());
    }
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
        tokio::spawn(run(listener, admin, Lifecycle::default()));
        address
    }

    async fn ask(address: SocketAddr, path: &str) -> TcpStream {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(format!("GET {path} HTTP/1.1\r\nHost: kas\r\n\r\n").as_bytes()).await.unwrap();
        stream
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
    async fn who_reads_nothing_of_a_stream_is_cut() {
        let address = serve().await;
        let mut stream = ask(address, "/endless").await;
        // Its socket takes some megabytes, a frame a second; then nothing goes on, and a minute later it is
        // over.
        tokio::time::sleep(Duration::from_secs(3600)).await;
        let mut rest = Vec::new();
        let read = tokio::time::timeout(LONGEST, stream.read_to_end(&mut rest)).await;
        assert!(read.is_ok(), "it is still open after {} bytes", rest.len());
        assert!(rest.len() < 64 << 20, "{} bytes were sent to nobody", rest.len());
    }

    #[tokio::test(start_paused = true)]
    async fn answers_of_one_piece_give_a_connection_no_more_time() {
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
