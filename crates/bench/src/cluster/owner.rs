//! A fake owner of a table. It serves `kas.internal.v1.TableSync` with any number of agents and counts the
//! traffic. Replicas find it as a seed and copy its table like that of any other replica. It has no gossip.

use std::{
    io,
    net::SocketAddr,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll},
};

use anyhow::Context as _;
use bytes::Bytes;
use http::{HeaderMap, Request, Response, header};
use http_body_util::BodyExt as _;
use hyper::{body::Incoming, server::conn::http2, service::service_fn};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use ids::AgentId;
use parking_lot::{Mutex, MutexGuard};
use prost::Message as _;
use proto::kas::internal::v1::{WatchRequest, WatchResponse, watch_response as wire};
use table::{Epoch, Feed, Message, Next, Owner, Version, codec};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
    sync::{mpsc, watch},
    task::{JoinHandle, JoinSet},
    time::Instant,
};

use crate::call::Outgoing;

const WATCH: &str = "/kas.internal.v1.TableSync/Watch";

/// Traffic of the connections, as payload of TCP.
#[derive(Debug, Default)]
pub(super) struct Counts {
    pub(super) sent: AtomicU64,
    pub(super) received: AtomicU64,
    /// Number of open table streams.
    pub(super) streams: AtomicU64,
}

struct State {
    owner: Mutex<Owner>,
    news: watch::Sender<()>,
    counts: Counts,
    address: SocketAddr,
}

impl State {
    fn owner(&self) -> MutexGuard<'_, Owner> {
        self.owner.lock()
    }
}

/// A running owner. Dropping it stops the owner.
pub(super) struct FakeOwner {
    state: Arc<State>,
    task: JoinHandle<()>,
}

impl Drop for FakeOwner {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn epoch() -> Epoch {
    Epoch(u64::try_from(process::clock::wall().as_micros()).unwrap_or(0))
}

impl FakeOwner {
    /// Starts an owner without agents on loopback.
    pub(super) async fn start() -> anyhow::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let state = Arc::new(State {
            owner: Mutex::new(Owner::new(epoch())),
            news: watch::Sender::new(()),
            counts: Counts::default(),
            address: listener.local_addr()?,
        });
        let serving = Arc::clone(&state);
        let task = tokio::spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                connections.spawn(serve(Arc::clone(&serving), stream));
                while connections.try_join_next().is_some() {}
            }
        });
        Ok(Self { state, task })
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.state.address
    }

    /// Replaces all agents, as after a restart: subscribers get a snapshot.
    pub(super) fn set(&self, agents: impl IntoIterator<Item = i64>) {
        let mut owner = Owner::new(epoch());
        for agent in agents {
            owner.insert(id(agent));
        }
        *self.state.owner() = owner;
        self.state.news.send_replace(());
    }

    /// Adds an agent, or removes it if it is present. Either is one change.
    pub(super) fn toggle(&self, agent: i64) {
        let mut owner = self.state.owner();
        let agent = id(agent);
        // Not decided by the result of `insert`, which counts a second reference to an agent and publishes
        // nothing.
        if owner.contains(agent) {
            owner.remove(agent);
        } else {
            owner.insert(agent);
        }
        drop(owner);
        self.state.news.send_replace(());
    }

    /// Returns the number of changes so far, including those of [`set`](Self::set).
    pub(super) fn changes(&self) -> u64 {
        self.state.owner().version().0
    }

    /// Returns the number of bytes sent and received so far.
    pub(super) fn bytes(&self) -> (u64, u64) {
        let counts = &self.state.counts;
        (counts.sent.load(Ordering::Relaxed), counts.received.load(Ordering::Relaxed))
    }

    pub(super) fn streams(&self) -> u64 {
        self.state.counts.streams.load(Ordering::Relaxed)
    }
}

fn id(agent: i64) -> AgentId {
    AgentId::new(agent).expect("ids of the benchmark are positive")
}

async fn serve(state: Arc<State>, stream: TcpStream) {
    let _ = stream.set_nodelay(true);
    let counted = Counted { stream, state: Arc::clone(&state) };
    let mut tasks = JoinSet::new();
    let (spawned, mut feeds) = mpsc::channel::<(Feed, mpsc::Sender<Bytes>)>(16);
    let service = service_fn(|request| answer(Arc::clone(&state), spawned.clone(), request));
    let connection = http2::Builder::new(TokioExecutor::new())
        .timer(TokioTimer::new())
        .initial_stream_window_size(net::http::STREAM_WINDOW)
        .initial_connection_window_size(net::http::UNLIMITED_WINDOW)
        .max_frame_size(net::http::FRAME)
        .serve_connection(TokioIo::new(counted), service);
    tokio::pin!(connection);
    loop {
        tokio::select! {
            _ = &mut connection => return,
            Some((feed, out)) = feeds.recv() => {
                tasks.spawn(publish(Arc::clone(&state), feed, out));
            }
        }
    }
}

async fn answer(
    state: Arc<State>,
    feeds: mpsc::Sender<(Feed, mpsc::Sender<Bytes>)>,
    request: Request<Incoming>,
) -> anyhow::Result<Response<Outgoing>> {
    let response = Response::builder().header(header::CONTENT_TYPE, grpc::CONTENT_TYPE);
    if request.uri().path() != WATCH {
        let mut status = HeaderMap::new();
        grpc::Status::new(grpc::Code::Unimplemented, "the benchmark serves only the table")
            .write_to(&mut status);
        let mut response = response.body(Outgoing::Once(None))?;
        response.headers_mut().extend(status);
        return Ok(response);
    }
    let message = request.into_body().collect().await?.to_bytes();
    let message = WatchRequest::decode(message.get(grpc::PREFIX_LEN..).context("no message")?)?;
    let resume = (message.epoch != 0).then_some((Epoch(message.epoch), Version(message.version)));
    let feed = state.owner().feed(resume);
    let (out, body) = mpsc::channel(4);
    feeds.send((feed, out)).await?;
    Ok(response.body(Outgoing::Channel(body))?)
}

/// Sends a subscriber what it does not have yet.
async fn publish(state: Arc<State>, mut feed: Feed, out: mpsc::Sender<Bytes>) {
    state.counts.streams.fetch_add(1, Ordering::Relaxed);
    let mut news = state.news.subscribe();
    loop {
        news.borrow_and_update();
        let (next, epoch) = {
            let mut owner = state.owner();
            (feed.next(&mut owner, Instant::now()), owner.epoch())
        };
        match next {
            Next::Message(message) => {
                let message = WatchResponse { message: Some(to_proto(message, &state, epoch)) };
                if out.send(grpc::encode(&message)).await.is_err() {
                    break;
                }
            }
            Next::WaitUntil(at) => tokio::select! {
                _ = news.changed() => {}
                () = tokio::time::sleep_until(at) => {}
                () = out.closed() => break,
            },
        }
    }
    state.counts.streams.fetch_sub(1, Ordering::Relaxed);
}

fn to_proto(message: Message, state: &State, epoch: Epoch) -> wire::Message {
    let hello = wire::Hello {
        replica: state.address.to_string(),
        epoch: epoch.0,
        state: cluster::ReplicaState::Ready.as_str().to_owned(),
        address: state.address.to_string(),
        version: 0,
        resumed: false,
    };
    match message {
        Message::Hello { epoch, version, resumed } => {
            wire::Message::Hello(wire::Hello { epoch: epoch.0, version: version.0, resumed, ..hello })
        }
        Message::Chunk { header, ids } => {
            wire::Message::Snapshot(wire::Snapshot { header: header.encode().into(), ids: ids.into() })
        }
        Message::Delta { from, to, ops } => {
            let mut bytes = Vec::new();
            codec::encode_ops(&ops, &mut bytes);
            wire::Message::Delta(wire::Delta { from: from.0, to: to.0, ops: bytes.into() })
        }
        Message::Beat(summary) => wire::Message::Beat(wire::Beat {
            hello: Some(wire::Hello { epoch: summary.epoch.0, version: summary.version.0, ..hello }),
            count: summary.count,
            digest: summary.digest,
        }),
    }
}

/// A connection whose bytes are counted.
struct Counted {
    stream: TcpStream,
    state: Arc<State>,
}

impl AsyncRead for Counted {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let polled = Pin::new(&mut self.stream).poll_read(cx, buf);
        let read = buf.filled().len() - before;
        self.state.counts.received.fetch_add(read as u64, Ordering::Relaxed);
        polled
    }
}

impl AsyncWrite for Counted {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write(cx, bytes);
        if let Poll::Ready(Ok(written)) = polled {
            self.state.counts.sent.fetch_add(written as u64, Ordering::Relaxed);
        }
        polled
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{super::large_tables::random_agents, *};

    /// Subscribes like a replica, reads without end, and counts the received operations.
    async fn subscribe(address: SocketAddr, operations: Arc<AtomicU64>) -> anyhow::Result<()> {
        let stream = TokioIo::new(TcpStream::connect(address).await?);
        let (mut send, connection) =
            hyper::client::conn::http2::handshake(TokioExecutor::new(), stream).await?;
        let _driver = tokio::spawn(connection);
        let body = http_body_util::Full::new(grpc::encode(&WatchRequest::default()));
        let answer = send.send_request(Request::post(format!("http://{address}{WATCH}")).body(body)?).await?;
        let mut reader = grpc::MessageReader::new(answer.into_body(), 1 << 20);
        while let Some(message) = reader.next().await? {
            if let Some(wire::Message::Delta(delta)) = WatchResponse::decode(message)?.message {
                operations.fetch_add(delta.to - delta.from, Ordering::Relaxed);
            }
        }
        Ok(())
    }

    /// Without removals, five of six changes would be none, and a change would seem to take 0.66 bytes.
    #[tokio::test]
    async fn each_of_ten_thousand_changes_per_second_is_sent() {
        const CHANGES: u64 = 20_000;
        let owner = FakeOwner::start().await.unwrap();
        owner.set(random_agents(1_000));
        let operations = Arc::new(AtomicU64::new(0));
        let reading = tokio::spawn(subscribe(owner.address(), Arc::clone(&operations)));
        while owner.streams() == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        // The hello and the snapshot.
        while owner.bytes().0 < 1_000 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        // Each is added and removed several times.
        let numbers = random_agents(4_000);
        let (before, sent) = (owner.changes(), owner.bytes().0);
        for turn in 0..CHANGES as usize {
            owner.toggle(numbers[turn % numbers.len()]);
            if turn % 100 == 99 {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        }
        assert_eq!(owner.changes() - before, CHANGES);
        let deadline = Instant::now() + Duration::from_secs(20);
        while operations.load(Ordering::Relaxed) < CHANGES {
            assert!(Instant::now() < deadline, "{operations:?} of {CHANGES} arrived");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        assert_eq!(operations.load(Ordering::Relaxed), CHANGES, "each once");
        let bytes = (owner.bytes().0 - sent) as f64 / CHANGES as f64;
        println!("{bytes:.2} bytes per change");
        assert!((3.5..8.0).contains(&bytes), "{bytes} bytes per change");
        reading.abort();
    }
}
