//! A fake replica: an address that serves the private API with a given number of agents, at a given speed.

use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use anyhow::Result;
use bytes::Bytes;
use h2::SendStream;
use ids::AgentId;
use parking_lot::{Mutex, MutexGuard};
use proto::kas::internal::v1::{WatchResponse, watch_response};
use table::{CHUNK_IDS, ChunkHeader, Epoch, Version, codec};
use tokio::{
    net::{TcpListener, TcpStream},
    task::{AbortHandle, JoinSet},
};

/// The table's epoch.
const EPOCH: u64 = 1_000_000;

/// How it sends its table.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    /// It holds agents `first..first + agents`.
    pub(crate) first: i64,
    /// Number of agents.
    pub(crate) agents: usize,
    /// Ids in each part of the snapshot.
    pub(crate) chunk: usize,
    /// Pause before each part.
    pub(crate) pause: Duration,
    /// In a format that only a later version reads.
    pub(crate) later: bool,
}

/// A fake replica that listens.
#[derive(Debug)]
pub(crate) struct FakeOwner {
    /// Its address, which is its name.
    pub(crate) address: SocketAddr,
    seen: Seen,
    task: AbortHandle,
}

/// What it has received and sent.
#[derive(Clone, Debug, Default)]
struct Seen {
    tokens: Arc<Mutex<Vec<String>>>,
    snapshots: Arc<Mutex<Vec<String>>>,
    beats: Arc<AtomicUsize>,
    lends: bool,
    loans: Arc<Mutex<Vec<Loan>>>,
}

/// What became of a tunnel that it lent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Loan {
    /// It was returned unused.
    Returned,
    /// A request began.
    Used,
}

fn lock(list: &Mutex<Vec<String>>) -> MutexGuard<'_, Vec<String>> {
    list.lock()
}

impl FakeOwner {
    /// Listens on a loopback address that no other test uses.
    pub(crate) async fn start(plan: Plan) -> Result<Self> {
        Self::start_as(plan, Seen::default()).await
    }

    /// Listens, and lends a tunnel to each replica that asks for one, whatever the request needs, as earlier
    /// versions do. It says nothing of what the agentk supports.
    pub(crate) async fn start_lending(plan: Plan) -> Result<Self> {
        Self::start_as(plan, Seen { lends: true, ..Seen::default() }).await
    }

    async fn start_as(plan: Plan, seen: Seen) -> Result<Self> {
        // Before those of replicas in the order of addresses, so that it is asked first.
        let ip = Ipv4Addr::new(127, 0, rand::random_range(1..=255), rand::random_range(1..=254));
        let listener = TcpListener::bind((ip, 8155)).await?;
        let address = listener.local_addr()?;
        let told = seen.clone();
        let task = tokio::spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                connections.spawn(serve(stream, address, plan, told.clone()));
            }
        });
        Ok(Self { address, seen, task: task.abort_handle() })
    }

    /// Returns the values of `authorization` that replicas sent.
    pub(crate) fn tokens(&self) -> Vec<String> {
        lock(&self.seen.tokens).clone()
    }

    /// Returns the replicas that requested snapshots, in order.
    pub(crate) fn snapshots(&self) -> Vec<String> {
        lock(&self.seen.snapshots).clone()
    }

    /// Returns what became of the tunnels that it lent, in the order in which that was known.
    pub(crate) fn loans(&self) -> Vec<Loan> {
        self.seen.loans.lock().clone()
    }

    /// Returns how many heartbeats were sent on all streams.
    pub(crate) fn beats(&self) -> usize {
        self.seen.beats.load(Ordering::Relaxed)
    }
}

impl Drop for FakeOwner {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn serve(stream: TcpStream, address: SocketAddr, plan: Plan, seen: Seen) -> Result<()> {
    let mut connection = h2::server::handshake(stream).await?;
    let mut streams = JoinSet::new();
    while let Some(request) = connection.accept().await {
        let (request, mut respond) = request?;
        if let Some(value) = request.headers().get("authorization").and_then(|value| value.to_str().ok()) {
            lock(&seen.tokens).push(value.to_owned());
        }
        let from = request.headers().get("kas-hop-from").and_then(|value| value.to_str().ok());
        let from = from.unwrap_or_default().to_owned();
        let response = http::Response::builder().header("content-type", "application/grpc");
        if request.uri().path() == "/kas.internal.v1.TableSync/Watch" {
            lock(&seen.snapshots).push(from);
            let send = respond.send_response(response.body(())?, false)?;
            let beats = Arc::clone(&seen.beats);
            streams.spawn(async move {
                // Until the replica shuts down.
                let _ = watch(send, address, plan, &beats).await;
            });
        } else if seen.lends && request.uri().path() == "/kas.internal.v1.Tunnels/Borrow" {
            let send = respond.send_response(response.header("kas-hop-agentk", "ours").body(())?, false)?;
            let loans = Arc::clone(&seen.loans);
            let mut requests = request.into_body();
            streams.spawn(async move {
                let loan = match requests.data().await {
                    Some(Ok(_)) => Loan::Used,
                    Some(Err(_)) | None => Loan::Returned,
                };
                loans.lock().push(loan);
                // Resets the stream.
                drop(send);
            });
        } else {
            let response = response.header("grpc-status", "12").header("grpc-message", "a fake");
            respond.send_response(response.body(())?, true)?;
        }
    }
    Ok(())
}

async fn watch(
    mut send: SendStream<Bytes>,
    address: SocketAddr,
    plan: Plan,
    beats: &AtomicUsize,
) -> Result<()> {
    let ids: Vec<AgentId> = (plan.first..).take(plan.agents).map(AgentId::new).collect::<Result<_, _>>()?;
    let version = ids.len() as u64;
    let hello = watch_response::Hello {
        replica: address.to_string(),
        epoch: EPOCH,
        state: "ready".to_owned(),
        address: address.to_string(),
        version,
        resumed: false,
    };
    write(&mut send, watch_response::Message::Hello(hello.clone())).await?;
    let parts: Vec<&[AgentId]> = ids.chunks(plan.chunk.min(CHUNK_IDS)).collect();
    for (n, part) in parts.iter().enumerate() {
        tokio::time::sleep(plan.pause).await;
        let header = ChunkHeader {
            epoch: Epoch(EPOCH),
            to: Version(version),
            chunk: u32::try_from(n)?,
            last: n + 1 == parts.len(),
            count: u32::try_from(part.len())?,
        };
        let mut bytes = Vec::new();
        codec::encode_ids(part, &mut bytes);
        let mut header = header.encode();
        if plan.later {
            header[0] += 1;
        }
        let snapshot = watch_response::Snapshot { header: header.into(), ids: bytes.into() };
        write(&mut send, watch_response::Message::Snapshot(snapshot)).await?;
    }
    let digest = codec::digest(ids.iter().copied());
    loop {
        let beat = watch_response::Beat { hello: Some(hello.clone()), count: version, digest };
        write(&mut send, watch_response::Message::Beat(beat)).await?;
        beats.fetch_add(1, Ordering::Relaxed);
        tokio::time::sleep(Duration::from_secs(2)).await;
    }
}

async fn write(send: &mut SendStream<Bytes>, message: watch_response::Message) -> Result<()> {
    let mut bytes = grpc::encode(&WatchResponse { message: Some(message) });
    while !bytes.is_empty() {
        send.reserve_capacity(bytes.len());
        let n = match std::future::poll_fn(|cx| send.poll_capacity(cx)).await {
            Some(n) => n?.min(bytes.len()),
            None => anyhow::bail!("the stream is over"),
        };
        send.send_data(bytes.split_to(n), false)?;
    }
    Ok(())
}
