//! Runs a load: a number of callers that send one call after another.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use anyhow::{Context as _, bail, ensure};
use bytes::Bytes;
use http::{HeaderMap, HeaderName, Method, Request, Uri, header};
use http_body::Body as _;
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use proto::kas::bench::v1::{DownloadRequest, Payload};
use tokio::{
    sync::mpsc,
    task::JoinSet,
    time::{Instant, sleep, timeout},
};

use super::{
    call::{ECHO, LoadState, Outgoing, RUN, STOP, Sender, Signer, dial, head},
    protocol::{self, ClientCommand, ClientEvent, Load, Loaded, Span, Work},
    times::Times,
};

const DOWNLOAD: &str = "/kas.bench.v1.Bench/Download";
const UPLOAD: &str = "/kas.bench.v1.Bench/Upload";

/// Time limit of a call.
pub(super) const CALL: Duration = Duration::from_secs(30);
/// Time limit for the callers to finish after the measurement.
const FINISH: Duration = Duration::from_secs(10);
/// Time until the windows of a stalled reader are full.
const STALL: Duration = Duration::from_millis(300);

/// A caller of a load.
struct Caller {
    uri: Uri,
    /// All headers except for the token.
    headers: HeaderMap,
    signer: Option<Arc<Signer>>,
    sender: Sender,
    shared: Arc<LoadState>,
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

    /// Sends one call after another. Returns the latencies of those that ended during the measurement.
    async fn unaries(self, message: Bytes) -> Vec<Duration> {
        let mut times = Vec::new();
        while self.shared.phase() != STOP && self.shared.budget.fetch_sub(1, Ordering::Relaxed) > 0 {
            let begin = Instant::now();
            let result = match timeout(CALL, self.unary(&message)).await {
                Ok(Ok(bytes)) if bytes == message.len() as u64 => Ok(()),
                Ok(Ok(bytes)) => {
                    Err(anyhow::anyhow!("a response of {bytes} bytes to a request of {}", message.len()))
                }
                Ok(Err(error)) => Err(error),
                Err(_) => Err(anyhow::anyhow!("no response within {CALL:?}")),
            };
            match result {
                Ok(()) if self.shared.phase() == RUN => {
                    times.push(begin.elapsed());
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

    async fn stream(self, work: Work) -> Vec<Duration> {
        let result = match work {
            Work::Down(size) => self.download(size).await,
            Work::Up(size) => self.upload(size).await,
            Work::Unary(_) => Ok(()),
        };
        if let Err(error) = result {
            self.shared.fail(&error);
        }
        Vec::new()
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
        let request = grpc::encode(&DownloadRequest { messages: u64::MAX, size });
        self.call(Outgoing::Once(Some(request))).await
    }

    async fn upload(&self, size: u32) -> anyhow::Result<()> {
        let body = Outgoing::Endless { message: encoded(size), shared: Arc::clone(&self.shared) };
        let mut answer = self.call(body).await?;
        finish(&mut answer).await.map(drop)
    }
}

/// Reads a response to its end. Returns the size of its messages.
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
    bail!("the response ended without trailers{}", if answer.is_end_stream() { "" } else { ": it was reset" })
}

fn encoded(size: u32) -> Bytes {
    grpc::encode(&Payload { data: vec![b'x'; size as usize].into() })
}

/// Runs a load. Prints [`ClientEvent::Begin`] and [`ClientEvent::End`] around its measured part.
pub(super) async fn run(load: &Load, commands: &mut mpsc::Receiver<ClientCommand>) -> anyhow::Result<Loaded> {
    let metadata = load.target.metadata.as_ref();
    let signer = metadata
        .map(|metadata| Signer::start(&metadata.secret_file, metadata.tokens))
        .transpose()?
        .map(Arc::new);
    let mut senders = Vec::new();
    for _ in 0..load.connections {
        senders.push(dial(load.target.address).await?);
    }
    let shared = Arc::new(LoadState::default());
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
    let callers = || -> anyhow::Result<JoinSet<Vec<Duration>>> {
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
    let (mut loaded, times) = measure(load.span, &shared, commands, callers, stalled).await?;
    match work {
        Work::Unary(size) => {
            loaded.done = times.len() as u64;
            loaded.bytes = 2 * loaded.done * encoded(size).len() as u64;
        }
        Work::Down(size) | Work::Up(size) => loaded.done = loaded.bytes / encoded(size).len() as u64,
    }
    Ok(loaded)
}

/// Runs callers for the duration of a load. Prints [`ClientEvent::Begin`] and [`ClientEvent::End`] around the
/// measured part.
///
/// `callers` starts tasks that return the latencies of what ended during the measurement. `held` is dropped
/// at the end of the measurement. Returns the result, with the bytes of streams, and all latencies.
pub(super) async fn measure<T>(
    span: Span,
    shared: &LoadState,
    commands: &mut mpsc::Receiver<ClientCommand>,
    callers: impl Fn() -> anyhow::Result<JoinSet<Vec<Duration>>>,
    held: T,
) -> anyhow::Result<(Loaded, Times)> {
    let (begin, running) = match span {
        Span::Time { warm, run } => {
            let running = callers()?;
            sleep(Duration::from_millis(warm)).await;
            protocol::emit(&ClientEvent::Begin)?;
            let begin = (Instant::now(), shared.bytes.load(Ordering::Relaxed));
            shared.phase.store(RUN, Ordering::Relaxed);
            sleep(Duration::from_millis(run)).await;
            (begin, running)
        }
        Span::Count { warm, run } => {
            shared.budget.store(warm, Ordering::Relaxed);
            callers()?.join_all().await;
            protocol::emit(&ClientEvent::Begin)?;
            ensure!(matches!(commands.recv().await, Some(ClientCommand::Go)), "expected Go");
            shared.budget.store(run, Ordering::Relaxed);
            shared.phase.store(RUN, Ordering::Relaxed);
            let begin = (Instant::now(), shared.bytes.load(Ordering::Relaxed));
            let results = callers()?.join_all().await;
            // The callers have finished; their results are passed on as tasks that are ready.
            (begin, results.into_iter().map(std::future::ready).collect())
        }
    };
    shared.phase.store(STOP, Ordering::Relaxed);
    let seconds = begin.0.elapsed().as_secs_f64();
    let bytes = shared.bytes.load(Ordering::Relaxed) - begin.1;
    protocol::emit(&ClientEvent::End)?;
    drop(held);
    let mut running: JoinSet<Vec<Duration>> = running;
    let mut times = Times::default();
    let finish = Instant::now() + FINISH;
    while let Ok(Some(result)) = tokio::time::timeout_at(finish, running.join_next()).await {
        times.extend(result.context("a caller task panicked")?);
    }
    let micros = |quantile| times.at(quantile).unwrap_or_default() * 1e3;
    let loaded = Loaded {
        seconds,
        bytes,
        p50_us: micros(0.5),
        p99_us: micros(0.99),
        failed: shared.failed.load(Ordering::Relaxed),
        why: shared.why.lock().take(),
        ..Loaded::default()
    };
    Ok((loaded, times))
}
