//! Calls of the load client: connections, requests and tokens.

use std::{
    net::SocketAddr,
    path::Path,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicI64, AtomicU8, AtomicU64, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use anyhow::Context as _;
use base64::Engine as _;
use bytes::Bytes;
use http::{HeaderValue, Method, Request, Uri, header};
use http_body::Frame;
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use parking_lot::Mutex;
use serde::Serialize;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    sync::{mpsc, watch},
    time::sleep,
};

use super::protocol::Tokens;

pub(super) const ECHO: &str = "/kas.bench.v1.Bench/Echo";

/// An HTTP/2 connection.
pub(super) type Sender = http2::SendRequest<Outgoing>;

/// Connects, with the same HTTP/2 windows for direct calls and calls through kas.
pub(super) async fn dial(address: SocketAddr) -> anyhow::Result<Sender> {
    let stream = TcpStream::connect(address).await.with_context(|| format!("cannot connect to {address}"))?;
    stream.set_nodelay(true)?;
    handshake(stream).await
}

pub(super) async fn handshake(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
) -> anyhow::Result<Sender> {
    let (sender, connection) = http2::Builder::new(TokioExecutor::new())
        .timer(TokioTimer::new())
        .initial_stream_window_size(net::http::STREAM_WINDOW)
        .initial_connection_window_size(net::http::UNLIMITED_WINDOW)
        .max_frame_size(net::http::FRAME)
        .max_header_list_size(net::http::HEADER_LIST)
        .max_concurrent_reset_streams(1_000)
        .handshake(TokioIo::new(stream))
        .await?;
    tokio::spawn(connection);
    Ok(sender)
}

/// Returns the head of a gRPC request.
pub(super) fn head(address: SocketAddr, method: &str) -> anyhow::Result<http::request::Builder> {
    Ok(Request::builder()
        .method(Method::POST)
        .uri(Uri::try_from(format!("http://{address}{method}"))?)
        .header(header::CONTENT_TYPE, grpc::CONTENT_TYPE)
        .header(header::TE, "trailers"))
}

/// The number of tokens if each call has a different one: more than kas caches, so that it checks every
/// signature. They are signed before the measurement.
const POOL: u64 = 16 * 1024;

/// Signs tokens for the API listener of kas.
pub(super) struct Signer {
    token: watch::Receiver<HeaderValue>,
    task: tokio::task::JoinHandle<()>,
    pool: Vec<HeaderValue>,
    next: AtomicU64,
}

#[derive(Serialize)]
struct Claims {
    iss: &'static str,
    aud: &'static str,
    iat: u64,
    nbf: u64,
    exp: u64,
    jti: String,
}

impl Signer {
    pub(super) fn start(secret_file: &Path, tokens: Tokens) -> anyhow::Result<Self> {
        let secret = std::fs::read_to_string(secret_file).context("cannot read the API secret")?;
        let secret = base64::engine::general_purpose::STANDARD.decode(secret.trim())?;
        let key = jsonwebtoken::EncodingKey::from_secret(&secret);
        let sign = move |number: u64| -> anyhow::Result<HeaderValue> {
            let now = process::clock::wall().as_secs();
            let jti = format!("{number:032x}");
            let claims =
                Claims { iss: "gitlab", aud: "gitlab-kas", iat: now, nbf: now - 5, exp: now + 60, jti };
            let token = jsonwebtoken::encode(&jsonwebtoken::Header::default(), &claims, &key)?;
            Ok(HeaderValue::try_from(format!("Bearer {token}"))?)
        };
        let pool = match tokens {
            Tokens::EachSecond => Vec::new(),
            Tokens::EachCall => (0..POOL).map(&sign).collect::<Result<_, _>>()?,
        };
        let (sender, token) = watch::channel(sign(POOL)?);
        let task = tokio::spawn(async move {
            for number in POOL + 1.. {
                sleep(Duration::from_secs(1)).await;
                if let Ok(token) = sign(number)
                    && sender.send(token).is_err()
                {
                    return;
                }
            }
        });
        Ok(Self { token, task, pool, next: AtomicU64::new(0) })
    }

    pub(super) fn header(&self) -> HeaderValue {
        let next = || self.next.fetch_add(1, Ordering::Relaxed) % POOL;
        match self.pool.get(if self.pool.is_empty() { 0 } else { next() as usize }) {
            Some(token) => token.clone(),
            None => self.token.borrow().clone(),
        }
    }
}

impl Drop for Signer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// The body of a request.
pub(super) enum Outgoing {
    /// One message.
    Once(Option<Bytes>),
    /// The same message repeatedly until the end of the load. Its bytes are counted.
    Endless { message: Bytes, shared: Arc<LoadState> },
    /// The messages of a channel.
    Channel(mpsc::Receiver<Bytes>),
    /// A body of a known length.
    Upload(Upload),
}

/// The same piece a number of times, and what surrounds the pieces.
#[derive(Clone)]
pub(super) struct Upload {
    /// Sent before the pieces.
    pub(super) first: Option<Bytes>,
    pub(super) piece: Bytes,
    /// Number of pieces that are left.
    pub(super) pieces: u64,
    /// Bytes of a piece that are counted.
    pub(super) payload: u64,
    /// Sent after the pieces.
    pub(super) last: Option<Bytes>,
    pub(super) shared: Arc<LoadState>,
}

impl Upload {
    fn next(&mut self) -> Option<Bytes> {
        if let Some(first) = self.first.take() {
            return Some(first);
        }
        if self.pieces == 0 {
            return self.last.take();
        }
        self.pieces -= 1;
        self.shared.bytes.fetch_add(self.payload, Ordering::Relaxed);
        Some(self.piece.clone())
    }

    fn is_over(&self) -> bool {
        self.first.is_none() && self.pieces == 0 && self.last.is_none()
    }
}

impl http_body::Body for Outgoing {
    type Data = Bytes;
    type Error = grpc::BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, grpc::BoxError>>> {
        let data = match self.get_mut() {
            Self::Once(bytes) => bytes.take(),
            Self::Endless { shared, .. } if shared.phase() == STOP => None,
            Self::Endless { message, shared } => {
                shared.bytes.fetch_add(message.len() as u64, Ordering::Relaxed);
                Some(message.clone())
            }
            Self::Channel(messages) => match messages.poll_recv(cx) {
                Poll::Ready(message) => message,
                Poll::Pending => return Poll::Pending,
            },
            Self::Upload(upload) => upload.next(),
        };
        Poll::Ready(data.map(|data| Ok(Frame::data(data))))
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Once(data) => data.is_none(),
            Self::Upload(upload) => upload.is_over(),
            Self::Endless { .. } | Self::Channel(_) => false,
        }
    }
}

const WARM: u8 = 0;
pub(super) const RUN: u8 = 1;
pub(super) const STOP: u8 = 2;

/// State that the callers of one load share.
pub(super) struct LoadState {
    pub(super) phase: AtomicU8,
    /// How many more calls may start. Limited only for a [`Span::Count`](super::protocol::Span::Count).
    pub(super) budget: AtomicI64,
    /// Bytes of streams, in any phase.
    pub(super) bytes: AtomicU64,
    pub(super) failed: AtomicU64,
    pub(super) why: Mutex<Option<String>>,
}

impl Default for LoadState {
    fn default() -> Self {
        Self {
            phase: AtomicU8::new(WARM),
            budget: AtomicI64::new(i64::MAX),
            bytes: AtomicU64::new(0),
            failed: AtomicU64::new(0),
            why: Mutex::new(None),
        }
    }
}

impl LoadState {
    pub(super) fn phase(&self) -> u8 {
        self.phase.load(Ordering::Relaxed)
    }

    pub(super) fn fail(&self, error: &anyhow::Error) {
        self.failed.fetch_add(1, Ordering::Relaxed);
        self.why.lock().get_or_insert_with(|| format!("{error:#}"));
    }
}
