//! The static HTTP server that `bench http` calls, directly and through kas. It is a process with one thread.
//!
//! It is not nginx, because one server should serve every row: nginx stores an upload in memory or in a file
//! before it answers, and can neither send events nor upgrade a connection. It uses hyper without this
//! project's crate `net`, so that a change of `net` does not change what it is compared with.

use std::{
    convert::Infallible,
    io::Write as _,
    net::SocketAddr,
    path::PathBuf,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use anyhow::Context as _;
use bytes::Bytes;
use http::{HeaderValue, Method, Request, Response, StatusCode, header};
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt as _;
use hyper::{
    body::Incoming,
    server::conn::{http1, http2},
    service::service_fn,
    upgrade::OnUpgrade,
};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use rustls_pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _};
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    time::{Interval, MissedTickBehavior, interval},
};
use tokio_rustls::TlsAcceptor;

use super::protocol::{EVENT, HttpWork, STAMP};

#[derive(Debug, clap::Args)]
pub(crate) struct ServerArgs {
    /// Serve HTTP/1.1 at this address
    #[arg(long)]
    http1: SocketAddr,
    /// Serve HTTP/2 at this address
    #[arg(long)]
    http2: SocketAddr,
    /// Serve both at this address, with TLS
    #[arg(long)]
    tls: SocketAddr,
    #[arg(long)]
    certificate_file: PathBuf,
    #[arg(long)]
    key_file: PathBuf,
}

/// The largest piece of a body.
const PIECE: usize = 64 * 1024;

const FILES: &str = "/files/";
const UPLOADS: &str = "/uploads";
/// The path of a watch, in the older form without a query. It ends with the number of events a second: 0 for
/// as fast as possible, `none` for none at all, `one` for a single one.
const EVENTS: &str = "/api/v1/watch/events/";
/// A watch with one event, which is silent from then on.
pub(super) const WATCH: &str = "/api/v1/watch/events/one";
/// The path of upgraded connections. The query says what they do.
const EXEC: &str = "/api/v1/namespaces/bench/pods/bench/exec";
/// The query of an upgraded connection that returns what it is sent.
pub(super) const TERMINAL: &str = "command=sh";
/// The query of an upgraded connection that sends bytes as fast as possible.
pub(super) const COPY: &str = "command=tar";

/// Returns the path and the query of an upgraded connection.
pub(super) fn exec(query: &str) -> String {
    format!("{EXEC}?{query}")
}

/// Returns the method and the path of a request.
pub(super) fn request(work: HttpWork) -> (Method, String) {
    match work {
        HttpWork::Get(size) => (Method::GET, format!("{FILES}{size}")),
        HttpWork::Down(size) => (Method::GET, format!("{FILES}{size}")),
        HttpWork::Up(_) => (Method::PUT, UPLOADS.to_owned()),
        HttpWork::Events => (Method::GET, format!("{EVENTS}0")),
        HttpWork::PacedEvents(rate) => (Method::GET, format!("{EVENTS}{rate}")),
        HttpWork::NoEvents => (Method::GET, format!("{EVENTS}none")),
    }
}

/// Serves until it is killed.
pub(super) fn run(args: &ServerArgs) -> anyhow::Result<()> {
    net::tls::install();
    process::open_files::raise_limit();
    let certificate = CertificateDer::from_pem_file(&args.certificate_file)?;
    let key = PrivateKeyDer::from_pem_file(&args.key_file)?;
    let mut tls =
        rustls::ServerConfig::builder().with_no_client_auth().with_single_cert(vec![certificate], key)?;
    tls.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    let tls = TlsAcceptor::from(Arc::new(tls));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let [http1, http2, secure] = [args.http1, args.http2, args.tls].map(listen);
        tokio::try_join!(
            accept(http1.await?, Accept::Http1),
            accept(http2.await?, Accept::Http2),
            accept(secure.await?, Accept::Tls(tls)),
        )?;
        Ok(())
    })
}

async fn listen(address: SocketAddr) -> anyhow::Result<TcpListener> {
    TcpListener::bind(address).await.with_context(|| format!("cannot listen on {address}"))
}

/// What a listener expects of its connections.
#[derive(Clone)]
enum Accept {
    Http1,
    Http2,
    Tls(TlsAcceptor),
}

async fn accept(listener: TcpListener, how: Accept) -> anyhow::Result<()> {
    let piece = Bytes::from(vec![b'x'; PIECE]);
    loop {
        let (stream, _) = listener.accept().await?;
        stream.set_nodelay(true)?;
        let (how, piece) = (how.clone(), piece.clone());
        tokio::spawn(async move {
            if let Err(error) = connection(stream, how, piece).await {
                // The log of the benchmark. A connection also ends with an error when the client closes it
                // within a response.
                eprintln!("a connection ended: {error:#}");
            }
        });
    }
}

async fn connection(stream: TcpStream, how: Accept, piece: Bytes) -> anyhow::Result<()> {
    match how {
        Accept::Http1 => serve(stream, false, piece).await,
        Accept::Http2 => serve(stream, true, piece).await,
        Accept::Tls(tls) => {
            let stream = tls.accept(stream).await?;
            let http2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
            serve(stream, http2, piece).await
        }
    }
}

async fn serve(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    http2: bool,
    piece: Bytes,
) -> anyhow::Result<()> {
    let stream = TokioIo::new(stream);
    let service = service_fn(move |request| answer(request, piece.clone()));
    if http2 {
        http2::Builder::new(TokioExecutor::new())
            .timer(TokioTimer::new())
            .initial_stream_window_size(net::http::STREAM_WINDOW)
            .initial_connection_window_size(net::http::UNLIMITED_WINDOW)
            .max_frame_size(net::http::FRAME)
            .serve_connection(stream, service)
            .await?;
    } else {
        http1::Builder::new().serve_connection(stream, service).with_upgrades().await?;
    }
    Ok(())
}

async fn answer(request: Request<Incoming>, piece: Bytes) -> Result<Response<Content>, Infallible> {
    let path = request.uri().path();
    if path == EXEC
        && let Some(protocol) = request.headers().get(header::UPGRADE).cloned()
    {
        let is_copy = request.uri().query() == Some(COPY);
        let connection = hyper::upgrade::on(request);
        tokio::spawn(async move {
            if let Err(error) = upgraded(connection, is_copy.then_some(piece)).await {
                // As in `accept`.
                eprintln!("an upgraded connection ended: {error:#}");
            }
        });
        let mut response = Response::new(Content::Text(None));
        *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("Upgrade"));
        response.headers_mut().insert(header::UPGRADE, protocol);
        return Ok(response);
    }
    let content = if let Some(size) = path.strip_prefix(FILES) {
        size.parse().ok().map(|left| Content::File { left, piece })
    } else if path.strip_prefix(EVENTS) == Some("none") {
        Some(Content::Silent(None))
    } else if path == WATCH {
        event(&piece).ok().map(|event| Content::Silent(Some(event)))
    } else if let Some(rate) = path.strip_prefix(EVENTS) {
        rate.parse().ok().map(|rate| Content::events(rate, piece))
    } else if path == UPLOADS {
        // The size shows the caller that the whole body has arrived. Nothing that was not read is counted.
        read(request.into_body()).await.map(|size| Content::Text(Some(size.to_string().into())))
    } else {
        None
    };
    let mut response = Response::new(content.unwrap_or(Content::Text(None)));
    if matches!(response.body(), Content::Text(None)) {
        *response.status_mut() = StatusCode::BAD_REQUEST;
    }
    // Those of a file in nginx. hyper adds the date and the length.
    let headers = response.headers_mut();
    for (name, value) in [
        (header::SERVER, "bench"),
        (header::CONTENT_TYPE, "application/json"),
        (header::LAST_MODIFIED, "Thu, 01 Jan 2026 00:00:00 GMT"),
        (header::ETAG, "\"6955b900-400\""),
        (header::ACCEPT_RANGES, "bytes"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    Ok(response)
}

/// Sends the piece again and again, or returns what the client sends if there is none. Ends when the client
/// leaves.
async fn upgraded(connection: OnUpgrade, piece: Option<Bytes>) -> anyhow::Result<()> {
    let mut stream = TokioIo::new(connection.await?);
    if let Some(piece) = piece {
        loop {
            stream.write_all(&piece).await?;
            stream.flush().await?;
        }
    }
    let mut buffer = vec![0; 4 * 1024];
    loop {
        let read = stream.read(&mut buffer).await?;
        if read == 0 {
            return Ok(stream.shutdown().await?);
        }
        stream.write_all(&buffer[..read]).await?;
        stream.flush().await?;
    }
}

/// Reads a body. Returns its size, or `None` if it is not complete.
async fn read(mut body: Incoming) -> Option<u64> {
    let mut size = 0;
    while let Some(frame) = body.frame().await {
        size += frame.ok()?.data_ref().map_or(0, |data| data.len() as u64);
    }
    body.is_end_stream().then_some(size)
}

/// The body of a response.
enum Content {
    Text(Option<Bytes>),
    /// So many bytes more.
    File {
        left: u64,
        piece: Bytes,
    },
    /// Events without end.
    Events {
        /// Between two events; `None`: as fast as possible.
        pace: Option<Interval>,
        piece: Bytes,
    },
    /// One event, if there is one, and then nothing until the connection ends.
    Silent(Option<Bytes>),
}

impl Content {
    fn events(rate: u32, piece: Bytes) -> Self {
        let pace = (rate > 0).then(|| {
            let mut pace = interval(Duration::from_secs(1) / rate);
            pace.set_missed_tick_behavior(MissedTickBehavior::Delay);
            pace
        });
        Self::Events { pace, piece }
    }
}

/// Returns an event that is made now.
fn event(filler: &[u8]) -> std::io::Result<Bytes> {
    let mut event = Vec::with_capacity(EVENT);
    write!(event, "{:0STAMP$}", process::clock::wall().as_nanos())?;
    event.extend_from_slice(filler.get(..EVENT - STAMP - 1).unwrap_or(filler));
    event.push(b'\n');
    Ok(event.into())
}

impl Body for Content {
    type Data = Bytes;
    type Error = std::io::Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<std::io::Result<Frame<Bytes>>>> {
        let data = match self.get_mut() {
            Self::Text(text) => text.take().map(Ok),
            Self::File { left: 0, .. } => None,
            Self::File { left, piece } => {
                let data = piece.slice(..piece.len().min(usize::try_from(*left).unwrap_or(usize::MAX)));
                *left -= data.len() as u64;
                Some(Ok(data))
            }
            // No task is woken: nothing follows.
            Self::Silent(event) => match event.take() {
                Some(event) => Some(Ok(event)),
                None => return Poll::Pending,
            },
            Self::Events { pace, piece } => {
                if let Some(pace) = pace {
                    ready!(pace.poll_tick(cx));
                }
                Some(event(piece))
            }
        };
        Poll::Ready(data.map(|data| data.map(Frame::data)))
    }

    fn is_end_stream(&self) -> bool {
        matches!(self, Self::Text(None) | Self::File { left: 0, .. })
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Text(text) => SizeHint::with_exact(text.as_ref().map_or(0, |text| text.len() as u64)),
            Self::File { left, .. } => SizeHint::with_exact(*left),
            Self::Events { .. } | Self::Silent(_) => SizeHint::default(),
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::environment::free_addresses;

    /// Starts a server for HTTP/1.1 and one for HTTP/2. They run as long as the runtime.
    pub(crate) async fn start() -> [SocketAddr; 2] {
        let addresses = free_addresses().unwrap();
        for (address, how) in addresses.into_iter().zip([Accept::Http1, Accept::Http2]) {
            let listener = listen(address).await.unwrap();
            tokio::spawn(accept(listener, how));
        }
        addresses
    }

    #[test]
    fn an_event_has_its_size_and_begins_with_its_time() {
        let before = process::clock::wall();
        let event = event(&[b'x'; PIECE]).unwrap();
        assert_eq!((event.len(), event.last()), (EVENT, Some(&b'\n')));
        let stamp: u64 = std::str::from_utf8(&event[..STAMP]).unwrap().parse().unwrap();
        assert!(Duration::from_nanos(stamp) >= before);
    }
}
