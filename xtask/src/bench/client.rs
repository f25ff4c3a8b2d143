//! The load client: a process of its own, so that its processor time is not a server's.
//!
//! It takes [`orders`](super::orders) until its standard input ends. Windows and frame size are the same whether it
//! calls directly or through kas.

use std::{
    io::{BufRead as _, Write as _},
    net::SocketAddr,
    path::Path,
    pin::Pin,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicI64, AtomicU8, AtomicU64, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use anyhow::{Context as _, bail, ensure};
use base64::Engine as _;
use bytes::Bytes;
use hdrhistogram::Histogram;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Uri, header};
use http_body::{Body as _, Frame};
use http_body_util::BodyExt as _;
use hyper::{body::Incoming, client::conn::http2};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use proto::kas::bench::v1::{DownloadRequest, Payload};
use serde::Serialize;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    sync::{mpsc, watch},
    task::JoinSet,
    time::{Instant, sleep, timeout},
};

use super::{
    agents,
    orders::{Load, Loaded, Note, Order, Span, Tokens, Work},
};

pub(super) const ECHO: &str = "/kas.bench.v1.Bench/Echo";
const DOWNLOAD: &str = "/kas.bench.v1.Bench/Download";
const UPLOAD: &str = "/kas.bench.v1.Bench/Upload";

/// A call that takes longer has failed.
const CALL: Duration = Duration::from_secs(30);
/// What callers get to finish after the measured part.
const FINISH: Duration = Duration::from_secs(10);
/// Time for a stalled reader's windows to fill up.
const STALL: Duration = Duration::from_millis(300);

/// Serves orders until standard input ends.
///
/// # Errors
/// When the runtime cannot start or standard output is gone.
pub(super) fn run() -> anyhow::Result<()> {
    runtime::tls::install();
    runtime::io::raise_file_limit();
    let (orders, received) = mpsc::channel(4);
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines() {
            let Ok(order) =
                line.map_err(anyhow::Error::from).and_then(|line| Ok(serde_json::from_str(&line)?))
            else {
                return;
            };
            if orders.blocking_send(order).is_err() {
                return;
            }
        }
    });
    tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(serve(received))
}

async fn serve(mut orders: mpsc::Receiver<Order>) -> anyhow::Result<()> {
    let mut connected = Vec::new();
    while let Some(order) = orders.recv().await {
        let answer = match order {
            Order::Load(load) => Box::pin(run_load(&load, &mut orders)).await.map(Note::Loaded),
            Order::Go => continue,
            Order::Agents(order) => agents::connect_all(&order).await.map(|agents| {
                connected.push(agents);
                Note::Connected
            }),
            Order::Waiters(order) => agents::wake(&order).await.map(Note::Woken),
        };
        note(&answer.unwrap_or_else(|error| Note::Failed(format!("{error:#}"))))?;
    }
    Ok(())
}

fn note(note: &Note) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    serde_json::to_writer(&mut out, note)?;
    out.write_all(b"\n")?;
    Ok(out.flush()?)
}

/// Calls on one connection.
pub(super) type Sender = http2::SendRequest<Outgoing>;

/// Dials, and speaks HTTP/2 with the windows that both ways are measured with.
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
        .initial_stream_window_size(runtime::http2::STREAM_WINDOW)
        .initial_connection_window_size(runtime::http2::UNLIMITED_WINDOW)
        .max_frame_size(runtime::http2::FRAME)
        .max_header_list_size(runtime::http2::HEADER_LIST)
        .max_concurrent_reset_streams(1_000)
        .handshake(TokioIo::new(stream))
        .await?;
    tokio::spawn(connection);
    Ok(sender)
}

/// The head of a gRPC call.
pub(super) fn head(address: SocketAddr, method: &str) -> anyhow::Result<http::request::Builder> {
    Ok(Request::builder()
        .method(Method::POST)
        .uri(Uri::try_from(format!("http://{address}{method}"))?)
        .header(header::CONTENT_TYPE, grpc::CONTENT_TYPE)
        .header(header::TE, "trailers"))
}

/// How many tokens there are when each call has its own: more than kas remembers, so that it checks every signature.
/// They are signed before anything is measured.
const POOL: u64 = 16 * 1024;

/// Signs tokens for kas' API listener.
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
            let now = runtime::clock::wall().as_secs();
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

/// What is sent with a call.
pub(super) enum Outgoing {
    /// These bytes, then the end.
    Once(Option<Bytes>),
    /// This message again and again, counted, until the load is over.
    Endless { message: Bytes, shared: Arc<Shared> },
    /// Whatever is put into the channel.
    Channel(mpsc::Receiver<Bytes>),
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
        };
        Poll::Ready(data.map(|data| Ok(Frame::data(data))))
    }

    fn is_end_stream(&self) -> bool {
        matches!(self, Self::Once(None))
    }
}

const WARM: u8 = 0;
const RUN: u8 = 1;
const STOP: u8 = 2;

/// What the callers of one load share.
pub(super) struct Shared {
    phase: AtomicU8,
    /// Calls that may still begin; only counted loads run out of them.
    budget: AtomicI64,
    /// Of streams, in any phase.
    bytes: AtomicU64,
    failed: AtomicU64,
    why: Mutex<Option<String>>,
}

impl Shared {
    fn phase(&self) -> u8 {
        self.phase.load(Ordering::Relaxed)
    }

    fn fail(&self, error: &anyhow::Error) {
        self.failed.fetch_add(1, Ordering::Relaxed);
        self.why.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_with(|| format!("{error:#}"));
    }
}

/// One of a load's callers.
struct Caller {
    uri: Uri,
    /// All but the token, made once.
    headers: HeaderMap,
    signer: Option<Arc<Signer>>,
    sender: Sender,
    shared: Arc<Shared>,
}

impl Caller {
    async fn call(&self, body: Outgoing) -> anyhow::Result<Incoming> {
        let mut request = Request::new(body);
        *request.method_mut() = Method::POST;
        *request.uri_mut() = self.uri.clone();
        *request.headers_mut() = self.headers.clone();
        if let Some(signer) = &self.signer {
            request.headers_mut().insert(header::AUTHORIZATION, signer.header());
        }
        let mut sender = self.sender.clone();
        sender.ready().await?;
        let response = sender.send_request(request).await?;
        if let Some(status) = grpc::Status::from_headers(response.headers()) {
            bail!("answered {status}");
        }
        ensure!(response.status() == http::StatusCode::OK, "answered {}", response.status());
        Ok(response.into_body())
    }

    async fn unary(&self, message: &Bytes) -> anyhow::Result<u64> {
        let body = Outgoing::Once(Some(message.clone()));
        let mut answer = self.call(body).await?;
        finish(&mut answer).await
    }

    /// Calls one after the other; returns the times of those that ended in the measured part.
    async fn unaries(self, message: Bytes) -> Histogram<u64> {
        let mut times = histogram();
        while self.shared.phase() != STOP && self.shared.budget.fetch_sub(1, Ordering::Relaxed) > 0 {
            let begin = Instant::now();
            let result = match timeout(CALL, self.unary(&message)).await {
                Ok(Ok(bytes)) if bytes == message.len() as u64 => Ok(()),
                Ok(Ok(bytes)) => Err(anyhow::anyhow!("an answer of {bytes} bytes to {}", message.len())),
                Ok(Err(error)) => Err(error),
                Err(_) => Err(anyhow::anyhow!("no answer within {CALL:?}")),
            };
            match result {
                Ok(()) if self.shared.phase() == RUN => {
                    times.saturating_record(u64::try_from(begin.elapsed().as_nanos()).unwrap_or(u64::MAX));
                }
                Ok(()) => {}
                Err(error) => {
                    self.shared.fail(&error);
                    sleep(Duration::from_millis(20)).await;
                }
            }
        }
        times
    }

    async fn stream(self, work: Work) -> Histogram<u64> {
        let result = match work {
            Work::Down(size) => self.download(size).await,
            Work::Up(size) => self.upload(size).await,
            Work::Unary(_) => Ok(()),
        };
        if let Err(error) = result {
            self.shared.fail(&error);
        }
        histogram()
    }

    async fn download(&self, size: u32) -> anyhow::Result<()> {
        let mut answer = self.begin_download(size).await?;
        // Dropping the body at the end cancels the call.
        while self.shared.phase() != STOP {
            let frame = timeout(CALL, answer.frame()).await?.context("a download ended")??;
            if let Some(data) = frame.data_ref() {
                self.shared.bytes.fetch_add(data.len() as u64, Ordering::Relaxed);
            }
        }
        Ok(())
    }

    async fn begin_download(&self, size: u32) -> anyhow::Result<Incoming> {
        let order = grpc::encode(&DownloadRequest { messages: u64::MAX, size });
        self.call(Outgoing::Once(Some(order))).await
    }

    async fn upload(&self, size: u32) -> anyhow::Result<()> {
        let body = Outgoing::Endless { message: encoded(size), shared: Arc::clone(&self.shared) };
        let mut answer = self.call(body).await?;
        finish(&mut answer).await.map(drop)
    }
}

/// Reads an answer to its end; returns the bytes of its messages.
async fn finish(answer: &mut Incoming) -> anyhow::Result<u64> {
    let mut bytes = 0;
    while let Some(frame) = answer.frame().await {
        match frame?.into_data() {
            Ok(data) => bytes += data.len() as u64,
            Err(frame) => {
                let status =
                    frame.trailers_ref().and_then(grpc::Status::from_headers).context("no status")?;
                ensure!(status.code() == grpc::Code::Ok, "answered {status}");
                return Ok(bytes);
            }
        }
    }
    bail!("the answer ended without trailers{}", if answer.is_end_stream() { "" } else { ": it was reset" })
}

fn encoded(size: u32) -> Bytes {
    grpc::encode(&Payload { data: vec![b'x'; size as usize].into() })
}

/// Nanoseconds up to a minute, to three digits.
fn histogram() -> Histogram<u64> {
    Histogram::new_with_bounds(1, 60_000_000_000, 3).expect("the bounds are constants, and right")
}

async fn run_load(load: &Load, orders: &mut mpsc::Receiver<Order>) -> anyhow::Result<Loaded> {
    let metadata = load.target.metadata.as_ref();
    let signer = metadata
        .map(|metadata| Signer::start(&metadata.secret_file, metadata.tokens))
        .transpose()?
        .map(Arc::new);
    let mut senders = Vec::new();
    for _ in 0..load.connections {
        senders.push(dial(load.target.address).await?);
    }
    let shared = Arc::new(Shared {
        phase: AtomicU8::new(WARM),
        budget: AtomicI64::new(i64::MAX),
        bytes: AtomicU64::new(0),
        failed: AtomicU64::new(0),
        why: Mutex::new(None),
    });
    let caller = |index: usize, method: &str| -> anyhow::Result<Caller> {
        let (head, ()) = head(load.target.address, method)?.body(())?.into_parts();
        let mut headers = head.headers;
        headers.extend(metadata.map(|m| (HeaderName::from_static("kas-agent-id"), m.agent.into())));
        Ok(Caller {
            uri: head.uri,
            headers,
            signer: signer.clone(),
            sender: senders[index % senders.len()].clone(),
            shared: Arc::clone(&shared),
        })
    };
    let work = load.work;
    let callers = || -> anyhow::Result<JoinSet<Histogram<u64>>> {
        let mut tasks = JoinSet::new();
        for index in 0..load.callers {
            match work {
                Work::Unary(size) => tasks.spawn(caller(index, ECHO)?.unaries(encoded(size))),
                Work::Down(_) => tasks.spawn(caller(index, DOWNLOAD)?.stream(work)),
                Work::Up(_) => tasks.spawn(caller(index, UPLOAD)?.stream(work)),
            };
        }
        Ok(tasks)
    };
    let mut stalled = None;
    if load.stalled {
        let mut answer = caller(0, DOWNLOAD)?.begin_download(64 * 1024).await?;
        timeout(CALL, answer.frame()).await?.context("the stalled download ended")??;
        stalled = Some(answer);
        sleep(STALL).await;
    }
    let (begin, running) = match load.span {
        Span::Time { warm, run } => {
            let running = callers()?;
            sleep(Duration::from_millis(warm)).await;
            note(&Note::Begin)?;
            let begin = (Instant::now(), shared.bytes.load(Ordering::Relaxed));
            shared.phase.store(RUN, Ordering::Relaxed);
            sleep(Duration::from_millis(run)).await;
            (begin, running)
        }
        Span::Count { warm, run } => {
            shared.budget.store(warm, Ordering::Relaxed);
            callers()?.join_all().await;
            note(&Note::Begin)?;
            ensure!(matches!(orders.recv().await, Some(Order::Go)), "expected Go");
            shared.budget.store(run, Ordering::Relaxed);
            shared.phase.store(RUN, Ordering::Relaxed);
            let begin = (Instant::now(), 0);
            let results = callers()?.join_all().await;
            // What has been joined goes on as tasks that are over.
            (begin, results.into_iter().map(std::future::ready).collect())
        }
    };
    shared.phase.store(STOP, Ordering::Relaxed);
    let seconds = begin.0.elapsed().as_secs_f64();
    let streamed = shared.bytes.load(Ordering::Relaxed) - begin.1;
    note(&Note::End)?;
    drop(stalled);
    let mut running: JoinSet<Histogram<u64>> = running;
    let mut times = histogram();
    let finish = Instant::now() + FINISH;
    while let Ok(Some(result)) = tokio::time::timeout_at(finish, running.join_next()).await {
        times.add(result.context("a caller panicked")?)?;
    }
    let mut loaded = Loaded {
        seconds,
        failed: shared.failed.load(Ordering::Relaxed),
        why: shared.why.lock().unwrap_or_else(PoisonError::into_inner).take(),
        ..Loaded::default()
    };
    match work {
        Work::Unary(size) => {
            loaded.done = times.len();
            loaded.bytes = 2 * times.len() * encoded(size).len() as u64;
            loaded.p50_us = times.value_at_quantile(0.5) as f64 / 1e3;
            loaded.p99_us = times.value_at_quantile(0.99) as f64 / 1e3;
        }
        Work::Down(size) | Work::Up(size) => {
            loaded.bytes = streamed;
            loaded.done = streamed / encoded(size).len() as u64;
        }
    }
    Ok(loaded)
}
