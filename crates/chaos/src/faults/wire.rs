//! A TCP proxy whose connections can be slow, narrow, sliced, cut and reset: what balancers and bad networks
//! do to connections.
//!
//! It stands on the bridge of a run, from where every host is reachable and which every host reaches.

use std::{
    io,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use anyhow::Result;
use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{
        TcpListener, TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::{mpsc, watch},
    task::JoinSet,
    time::{Instant, sleep, sleep_until, timeout},
};

/// The address of the bridge.
pub(crate) const BRIDGE: [u8; 4] = [10, 77, 0, 254];
/// Bytes that are read at once.
const CHUNK: usize = 16 * 1024;
/// Chunks that may be on their way in one direction: a bound of what latency holds.
const CHUNKS: usize = 256;
/// A server that cannot be reached within this is not there.
const DIAL: Duration = Duration::from_secs(2);

/// What a wire does to its connections, those that are open and new ones.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Toxics {
    /// How much later bytes arrive, in each direction.
    pub(crate) latency: Duration,
    /// Bytes in a second, in each direction; `None`: any number.
    pub(crate) rate: Option<u32>,
    /// The largest number of bytes that are written at once; `None`: all.
    pub(crate) slice: Option<u32>,
    /// How much later the end of one direction is passed on.
    pub(crate) slow_close: Duration,
    /// How often one of 1,000 chunks is followed by a reset of its connection.
    pub(crate) resets: u32,
    /// A direction is closed, in order, after this many bytes; `None`: never. Counted per connection.
    pub(crate) limit: Option<u64>,
    /// A connection on which nothing is sent for this long is closed; `None`: never.
    pub(crate) idle: Option<Duration>,
    /// New connections are refused, and open ones are closed.
    pub(crate) cut: bool,
}

/// How often a wire did what.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) accepted: AtomicU64,
    pub(crate) reset: AtomicU64,
    pub(crate) limited: AtomicU64,
    pub(crate) idled: AtomicU64,
    pub(crate) bytes: AtomicU64,
}

/// A proxy to one server. Dropping it closes its connections.
#[derive(Debug)]
pub(crate) struct Wire {
    address: SocketAddr,
    toxics: Arc<watch::Sender<Toxics>>,
    counts: Arc<Counts>,
    _task: JoinSet<()>,
}

impl Wire {
    /// Makes one to `server`. `seed`: chooses sizes of slices, and what is reset.
    pub(crate) async fn to(server: SocketAddr, seed: u64) -> Result<Self> {
        Self::at((BRIDGE, 0).into(), server, seed).await
    }

    /// As [`to`](Self::to), at this address.
    pub(crate) async fn at(address: SocketAddr, server: SocketAddr, seed: u64) -> Result<Self> {
        let listener = TcpListener::bind(address).await?;
        let address = listener.local_addr()?;
        let toxics = Arc::new(watch::Sender::new(Toxics::default()));
        let counts = Arc::new(Counts::default());
        let (of, counted) = (Arc::clone(&toxics), Arc::clone(&counts));
        let mut task = JoinSet::new();
        task.spawn(async move {
            let mut connections = JoinSet::new();
            for number in 0.. {
                let Ok((client, _)) = listener.accept().await else {
                    sleep(Duration::from_millis(100)).await;
                    continue;
                };
                while connections.try_join_next().is_some() {}
                if of.borrow().cut {
                    continue;
                }
                counted.accepted.fetch_add(1, Ordering::Relaxed);
                let random = StdRng::seed_from_u64(seed.wrapping_add(number));
                connections.spawn(connection(client, server, of.subscribe(), Arc::clone(&counted), random));
            }
        });
        Ok(Self { address, toxics, counts, _task: task })
    }

    /// Where to dial.
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// From now on, this is done to all connections.
    pub(crate) fn set(&self, toxics: Toxics) {
        self.toxics.send_replace(toxics);
    }

    pub(crate) fn counts(&self) -> &Counts {
        &self.counts
    }
}

/// Why a connection ends.
enum End {
    /// Both directions ended, or one side is gone.
    Sides,
    Reset,
    Idle,
    Cut,
}

async fn connection(
    client: TcpStream,
    server: SocketAddr,
    toxics: watch::Receiver<Toxics>,
    counts: Arc<Counts>,
    mut random: StdRng,
) {
    let Ok(Ok(server)) = timeout(DIAL, TcpStream::connect(server)).await else { return };
    // A proxy that gathers small pieces would measure itself.
    let _ = (client.set_nodelay(true), server.set_nodelay(true));
    let passed = Passed { last: AtomicU64::new(0), begun: Instant::now(), counts: Arc::clone(&counts) };
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_server, mut to_server) = server.into_split();
    let [one, other] = [random.random(), random.random()].map(StdRng::seed_from_u64);
    let (mut up, mut down) = (
        Direction { toxics: toxics.clone(), passed: &passed, random: one },
        Direction { toxics: toxics.clone(), passed: &passed, random: other },
    );
    let mut cutting = toxics.clone();
    let end = {
        let sides = async {
            let both = tokio::try_join!(
                up.carry(&mut from_client, &mut to_server),
                down.carry(&mut from_server, &mut to_client)
            );
            both.map_or_else(|end| end, |_| End::Sides)
        };
        tokio::select! {
            end = Box::pin(sides) => end,
            () = passed.idle(toxics) => End::Idle,
            _ = cutting.wait_for(|toxics| toxics.cut) => End::Cut,
        }
    };
    match end {
        End::Sides | End::Cut => {}
        End::Idle => {
            counts.idled.fetch_add(1, Ordering::Relaxed);
        }
        End::Reset => {
            counts.reset.fetch_add(1, Ordering::Relaxed);
            // Without FIN: closing then sends RST.
            for half in [to_client, to_server] {
                let _ = AsRef::<TcpStream>::as_ref(&half).set_zero_linger();
                half.forget();
            }
        }
    }
}

/// What has passed a connection.
struct Passed {
    /// When the last byte did, in microseconds since `begun`.
    last: AtomicU64,
    begun: Instant,
    counts: Arc<Counts>,
}

impl Passed {
    fn count(&self, bytes: usize) {
        let since = u64::try_from(self.begun.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.last.store(since, Ordering::Relaxed);
        self.counts.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Waits until nothing has passed for as long as the toxics say.
    async fn idle(&self, mut toxics: watch::Receiver<Toxics>) {
        loop {
            let allowed = toxics.borrow_and_update().idle;
            let last = self.begun + Duration::from_micros(self.last.load(Ordering::Relaxed));
            let Some(allowed) = allowed else {
                if toxics.changed().await.is_err() {
                    return std::future::pending().await;
                }
                continue;
            };
            if last.elapsed() >= allowed {
                return;
            }
            tokio::select! {
                () = sleep_until(last + allowed) => {}
                _ = toxics.changed() => {}
            }
        }
    }
}

/// One direction of a connection.
struct Direction<'a> {
    toxics: watch::Receiver<Toxics>,
    passed: &'a Passed,
    random: StdRng,
}

impl Direction<'_> {
    /// Passes bytes on until the sender ends, then its end.
    async fn carry(&mut self, from: &mut OwnedReadHalf, to: &mut OwnedWriteHalf) -> Result<(), End> {
        // What is under way: each chunk with the time of its arrival.
        let (sender, mut receiver) = mpsc::channel::<(Instant, Vec<u8>)>(CHUNKS);
        let (toxics, passed) = (self.toxics.clone(), self.passed);
        let reading = async move {
            loop {
                let mut chunk = vec![0; CHUNK];
                let read = from.read(&mut chunk).await.map_err(|_| End::Sides)?;
                if read == 0 {
                    return Ok::<(), End>(());
                }
                passed.count(read);
                chunk.truncate(read);
                let due = Instant::now() + toxics.borrow().latency;
                sender.send((due, chunk)).await.map_err(|_| End::Sides)?;
            }
        };
        let writing = async {
            let mut written = 0;
            while let Some((due, chunk)) = receiver.recv().await {
                sleep_until(due).await;
                if self.write(to, &chunk, &mut written).await? {
                    self.passed.counts.limited.fetch_add(1, Ordering::Relaxed);
                    let _ = to.shutdown().await;
                    // Reading ends with the receiver.
                    return Err(End::Sides);
                }
            }
            let late = self.toxics.borrow().slow_close;
            sleep(late).await;
            to.shutdown().await.map_err(|_| End::Sides)
        };
        tokio::try_join!(reading, writing).map(|((), ())| ())
    }

    /// Writes a chunk as the toxics say. Returns whether that was the last one that may pass.
    async fn write(
        &mut self,
        to: &mut OwnedWriteHalf,
        mut chunk: &[u8],
        written: &mut u64,
    ) -> Result<bool, End> {
        let Toxics { rate, slice, resets, limit, .. } = *self.toxics.borrow();
        if resets > 0 && self.random.random_range(0..1_000) < resets {
            return Err(End::Reset);
        }
        if let Some(limit) = limit {
            let left = usize::try_from(limit.saturating_sub(*written)).unwrap_or(usize::MAX);
            if left < chunk.len() {
                to.write_all(&chunk[..left]).await.map_err(|_| End::Sides)?;
                return Ok(true);
            }
        }
        *written += chunk.len() as u64;
        while !chunk.is_empty() {
            let size = slice.map_or(chunk.len(), |most| self.random.random_range(1..=most.max(1)) as usize);
            // A narrow connection passes little at once, so that its rate is even.
            let size = rate.map_or(size, |rate| size.min((rate as usize / 10).max(1)));
            let (piece, rest) = chunk.split_at(size.min(chunk.len()));
            to.write_all(piece).await.map_err(|_: io::Error| End::Sides)?;
            if let Some(rate) = rate {
                sleep(Duration::from_secs(1) * u32::try_from(piece.len()).unwrap_or(u32::MAX) / rate.max(1))
                    .await;
            }
            chunk = rest;
        }
        Ok(false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a wire to a server that returns every byte.
    async fn echoing(toxics: Toxics) -> Result<Wire> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let server = listener.local_addr()?;
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(async move {
                    let (mut from, mut to) = stream.into_split();
                    let _ = tokio::io::copy(&mut from, &mut to).await;
                });
            }
        });
        let wire = Wire::at("127.0.0.1:0".parse()?, server, 1).await?;
        wire.set(toxics);
        Ok(wire)
    }

    /// Sends these bytes and the end, and returns what comes back.
    async fn exchange(wire: &Wire, sent: &[u8]) -> io::Result<Vec<u8>> {
        let mut stream = TcpStream::connect(wire.address()).await?;
        let mut received = Vec::new();
        stream.write_all(sent).await?;
        stream.shutdown().await?;
        stream.read_to_end(&mut received).await?;
        Ok(received)
    }

    #[tokio::test]
    async fn bytes_pass_a_slow_narrow_and_sliced_wire_unchanged() -> Result<()> {
        let latency = Duration::from_millis(100);
        let sent: Vec<u8> = (0..2_000_u32).map(|n| u8::try_from(n % 251).unwrap_or(0)).collect();
        let toxics =
            Toxics { latency, rate: Some(40_000), slice: Some(10), slow_close: latency, ..Toxics::default() };
        let wire = echoing(toxics).await?;
        let begun = Instant::now();
        assert_eq!(exchange(&wire, &sent).await?, sent);
        // Twice the latency, and twice the late end. There is no upper bound on a busy machine.
        assert!(begun.elapsed() >= latency * 4, "{:?}", begun.elapsed());
        assert_eq!(wire.counts().bytes.load(Ordering::Relaxed), 4_000);
        Ok(())
    }

    #[tokio::test]
    async fn a_limit_ends_in_order_and_a_reset_does_not() -> Result<()> {
        let sent = vec![7; 10_000];
        let wire = echoing(Toxics { limit: Some(3_000), ..Toxics::default() }).await?;
        assert!(exchange(&wire, &sent).await.map_or(0, |back| back.len()) <= 3_000);
        assert_eq!(wire.counts().limited.load(Ordering::Relaxed), 1);
        let wire = echoing(Toxics { resets: 1_000, ..Toxics::default() }).await?;
        let mut stream = TcpStream::connect(wire.address()).await?;
        stream.write_all(&sent).await?;
        let error = stream.read_to_end(&mut Vec::new()).await.expect_err("it is reset");
        assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
        Ok(())
    }

    #[tokio::test]
    async fn silent_and_cut_connections_end() -> Result<()> {
        let wire = echoing(Toxics { idle: Some(Duration::from_millis(50)), ..Toxics::default() }).await?;
        let mut stream = TcpStream::connect(wire.address()).await?;
        assert_eq!(stream.read(&mut [0]).await?, 0);
        assert_eq!(wire.counts().idled.load(Ordering::Relaxed), 1);
        let wire = echoing(Toxics::default()).await?;
        let mut stream = TcpStream::connect(wire.address()).await?;
        stream.write_all(b"x").await?;
        assert_eq!(stream.read(&mut [0]).await?, 1);
        wire.set(Toxics { cut: true, ..Toxics::default() });
        assert_eq!(stream.read(&mut [0]).await?, 0);
        assert!(!exchange(&wire, b"x").await.is_ok_and(|back| !back.is_empty()));
        Ok(())
    }
}
