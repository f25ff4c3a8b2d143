//! chitchat's transport over sealed datagrams.
//!
//! chitchat 0.13 does not export the codec of its envelopes. So an envelope is encoded by sending it through
//! chitchat's own UDP socket on loopback ("inner") to a socket of ours ("relay"), which takes about 20 µs.
//!
//! ```text
//! chitchat -> inner ~loopback~> relay -> seal -> outer -> network
//! network -> outer -> open -> relay ~loopback~> inner -> chitchat
//! ```
//!
//! Only a process in the same network namespace (the same pod) can reach the inner socket. Its datagrams are
//! dropped by their source address, but only after chitchat has decoded them: such a process is inside the
//! trust boundary.

#[cfg(any(test, feature = "simulation"))]
mod simulated;

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use anyhow::Context as _;
use chitchat::{
    ChitchatEnvelope,
    transport::{RecvOutcome, SendOutcome, Socket, Transport, UdpTransport},
};
use parking_lot::{Mutex, MutexGuard};
use tokio::{
    net::UdpSocket,
    sync::mpsc,
    time::{Instant, timeout_at},
};

use crate::{
    counters::{Counters, Reason},
    reachability::Reachability,
    seal::{Accepted, Echo, KeyRing, MAX_DATAGRAM, Opener, Sealer},
};

/// How long a datagram may take over loopback. It has arrived when the send returns, so this only ends the
/// wait for a datagram that chitchat could not decode. With a longer time, a misbehaving member could slow
/// the others down.
const LOOPBACK: Duration = Duration::from_millis(50);
/// The window in which hellos are counted: one per process and window, so that a replayed recording of one
/// process cannot use up the hellos of the others.
const HELLO_WINDOW: Duration = Duration::from_millis(100);
/// Hellos per window. A mass restart of 100 processes takes two windows; a higher limit would only help
/// replayed recordings.
const HELLOS: usize = 64;

/// Carries sealed datagrams.
#[derive(Debug)]
pub(crate) enum Outer {
    Udp(UdpSocket),
    #[cfg(any(test, feature = "simulation"))]
    Simulated(crate::simulation::Network),
}

impl Outer {
    fn local_addr(&self) -> std::io::Result<SocketAddr> {
        match self {
            Self::Udp(socket) => socket.local_addr(),
            #[cfg(any(test, feature = "simulation"))]
            Self::Simulated(network) => Ok(network.datagrams.local_addr()),
        }
    }

    async fn send_to(&self, datagram: &[u8], to: SocketAddr) -> std::io::Result<usize> {
        match self {
            Self::Udp(socket) => socket.send_to(datagram, to).await,
            #[cfg(any(test, feature = "simulation"))]
            Self::Simulated(network) => {
                network.datagrams.send(to, datagram);
                Ok(datagram.len())
            }
        }
    }

    /// Returns the length of the datagram.
    async fn recv(&self, buffer: &mut [u8]) -> std::io::Result<usize> {
        match self {
            Self::Udp(socket) => socket.recv_from(buffer).await.map(|(len, _)| len),
            #[cfg(any(test, feature = "simulation"))]
            Self::Simulated(network) => {
                Ok(std::future::poll_fn(|cx| network.datagrams.poll_recv(cx, buffer)).await)
            }
        }
    }
}

/// The outer socket and its seals: one per process, kept when chitchat is restarted.
pub(crate) struct Link {
    outer: Outer,
    /// Whether IPv4 targets must be written as mapped IPv6.
    is_v6: bool,
    seals: Mutex<Seals>,
    counters: Arc<Counters>,
    /// Peers that sent a hello. They are gossiped with at once.
    hellos: mpsc::Sender<SocketAddr>,
    reachability: Arc<Reachability>,
    #[cfg(test)]
    pub(crate) fault: std::sync::atomic::AtomicU8,
}

pub(crate) struct Seals {
    pub(crate) sealer: Sealer,
    pub(crate) opener: Opener,
    /// The processes that were sent a hello in this window, by their echo.
    greeted: Vec<Echo>,
    /// When the window began.
    window: Instant,
}

impl Seals {
    /// Returns a hello for the process with this echo, unless it or too many others had one in this window.
    fn hello(&mut self, echo: Echo, now: Instant) -> Option<Vec<u8>> {
        if now.duration_since(self.window) >= HELLO_WINDOW {
            self.window = now;
            self.greeted.clear();
        }
        if self.greeted.len() >= HELLOS || self.greeted.contains(&echo) {
            return None;
        }
        self.greeted.push(echo);
        Some(self.sealer.hello(echo))
    }
}

impl Link {
    pub(crate) fn new(
        outer: Outer,
        sealer: Sealer,
        opener: Opener,
        counters: Arc<Counters>,
        hellos: mpsc::Sender<SocketAddr>,
        reachability: Arc<Reachability>,
    ) -> std::io::Result<Self> {
        let is_v6 = outer.local_addr()?.is_ipv6();
        let seals = Mutex::new(Seals { sealer, opener, greeted: Vec::new(), window: Instant::now() });
        Ok(Self {
            outer,
            is_v6,
            seals,
            counters,
            hellos,
            reachability,
            #[cfg(test)]
            fault: std::sync::atomic::AtomicU8::new(0),
        })
    }

    /// Returns the seals. The guard must not be held over an await.
    pub(crate) fn seals(&self) -> MutexGuard<'_, Seals> {
        self.seals.lock()
    }

    /// Uses the keys of `ring` from the next datagram on.
    pub(crate) fn rekey(&self, ring: &KeyRing, cluster: &str) {
        let mut seals = self.seals();
        seals.sealer.rekey(ring, cluster);
        seals.opener.rekey(ring, cluster);
    }

    pub(crate) async fn send(&self, to: SocketAddr, message: &[u8]) {
        let frames = {
            let mut seals = self.seals();
            if self.reachability.is_silent() {
                // A probe. It is unproven, so its receiver only answers with a hello, even if it has
                // restarted meanwhile.
                self.counters.withheld.add(1);
                seals.sealer.seal(&[], Echo::default())
            } else {
                let echo = seals.opener.echo(to);
                seals.sealer.seal(message, echo)
            }
        };
        for frame in frames {
            match self.outer.send_to(&frame, self.target(to)).await {
                Ok(sent) => self.count_sent(sent),
                // The other parts of the message are useless without this one.
                Err(_) => return self.counters.send_failed.add(1),
            }
        }
    }

    fn target(&self, to: SocketAddr) -> SocketAddr {
        match to.ip() {
            IpAddr::V4(v4) if self.is_v6 => SocketAddr::new(v4.to_ipv6_mapped().into(), to.port()),
            _ => to,
        }
    }

    fn count_sent(&self, bytes: usize) {
        self.counters.sent.add(1);
        self.counters.sent_bytes.add(bytes as u64);
    }

    /// Opens one datagram; returns what to do with it, if anything.
    pub(crate) fn accept(&self, datagram: &mut [u8]) -> Option<Arrival> {
        self.counters.received.add(1);
        self.counters.received_bytes.add(datagram.len() as u64);
        let now = Instant::now();
        let mut seals = self.seals();
        let accepted = seals.opener.accept(datagram, now);
        if accepted.is_ok() {
            self.reachability.sign();
        }
        match accepted {
            Ok(Accepted::Message { from, bytes }) => Some(Arrival::Message { from, bytes }),
            Ok(Accepted::Part) => None,
            Ok(Accepted::Hello { from }) => {
                // If the queue is full, a gossip round reaches the peer later.
                let _ = self.hellos.try_send(from);
                None
            }
            Err(refused) => {
                self.counters.drop_for(refused.reason);
                let (to, echo) = refused.greet?;
                Some(Arrival::Unproven { to, hello: seals.hello(echo, now)? })
            }
        }
    }

    pub(crate) async fn greet(&self, to: SocketAddr, hello: &[u8]) {
        match self.outer.send_to(hello, self.target(to)).await {
            Ok(sent) => {
                self.count_sent(sent);
                self.counters.greeted.add(1);
            }
            Err(_) => self.counters.send_failed.add(1),
        }
    }

    /// Lets tests panic (1) or freeze (2) the gossip task, or block its whole thread (3), once.
    #[cfg(test)]
    async fn fail(&self) {
        match self.fault.swap(0, std::sync::atomic::Ordering::Relaxed) {
            1 => panic!("injected by a test"),
            2 => std::future::pending().await,
            3 => std::thread::sleep(std::time::Duration::from_secs(2)),
            _ => {}
        }
    }
}

/// What to do with a datagram.
pub(crate) enum Arrival {
    Message { from: SocketAddr, bytes: Vec<u8> },
    Unproven { to: SocketAddr, hello: Vec<u8> },
}

/// Opens one socket per incarnation, all over one link.
pub(crate) struct SealedTransport(pub(crate) Arc<Link>);

#[async_trait::async_trait]
impl Transport for SealedTransport {
    /// Opens the pair of loopback sockets. The outer socket is bound already, so the address is not used.
    async fn open(&self, _: SocketAddr) -> anyhow::Result<Box<dyn Socket>> {
        #[cfg(any(test, feature = "simulation"))]
        if let Outer::Simulated(network) = &self.0.outer {
            return Ok(Box::new(simulated::SimulatedSocket {
                link: Arc::clone(&self.0),
                network: network.clone(),
                buffer: vec![0; MAX_DATAGRAM + 1],
            }));
        }
        let v4 = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let inner = match UdpTransport.open(v4).await {
            Ok(inner) => inner,
            Err(_) => UdpTransport.open((Ipv6Addr::LOCALHOST, 0).into()).await?,
        };
        let inner_addr = inner.local_addr()?;
        let relay = Relay::bind(inner_addr.ip()).await?;
        let buffer = vec![0; crate::seal::MAX_MESSAGE + 1];
        Ok(Box::new(SealedSocket {
            link: Arc::clone(&self.0),
            inner,
            inner_addr,
            relay,
            pending: None,
            buffer,
        }))
    }
}

struct Relay {
    socket: UdpSocket,
    addr: SocketAddr,
}

impl Relay {
    async fn bind(ip: IpAddr) -> anyhow::Result<Self> {
        let socket = UdpSocket::bind((ip, 0)).await.context("failed to bind a loopback socket")?;
        let addr = socket.local_addr()?;
        Ok(Self { socket, addr })
    }
}

/// A message that was sent to the inner socket and was not received from it yet.
struct Pending {
    from: SocketAddr,
    deadline: Instant,
}

struct SealedSocket {
    link: Arc<Link>,
    inner: Box<dyn Socket>,
    inner_addr: SocketAddr,
    relay: Relay,
    pending: Option<Pending>,
    /// For datagrams in both directions. One byte longer than the longest valid datagram, to detect longer
    /// ones.
    buffer: Vec<u8>,
}

#[async_trait::async_trait]
impl Socket for SealedSocket {
    fn local_addr(&self) -> anyhow::Result<SocketAddr> {
        Ok(self.link.outer.local_addr()?)
    }

    /// Sends one envelope. A message that the network refuses is counted and is not an error, because
    /// chitchat treats an error as a broken transport.
    async fn send(&mut self, to: SocketAddr, envelope: ChitchatEnvelope) -> anyhow::Result<SendOutcome> {
        #[cfg(test)]
        self.link.fail().await;
        let num_bytes_sent = self.inner.send(self.relay.addr, envelope).await?.num_bytes_sent;
        let deadline = Instant::now() + LOOPBACK;
        loop {
            match timeout_at(deadline, self.relay.socket.recv_from(&mut self.buffer)).await {
                Ok(Ok((len, from))) if from == self.inner_addr => {
                    self.link.send(to, &self.buffer[..len]).await;
                    break;
                }
                Ok(Ok(_)) => {}
                Ok(Err(error)) => return Err(error).context("the loopback socket failed"),
                Err(_) => {
                    self.link.counters.send_failed.add(1);
                    // The relay gets a new address, so that a late datagram is not mistaken for the next
                    // envelope.
                    self.relay = Relay::bind(self.inner_addr.ip()).await?;
                    break;
                }
            }
        }
        Ok(SendOutcome { num_bytes_sent })
    }

    /// Returns the next envelope of an authenticated peer.
    ///
    /// # Cancel safety
    /// A message in transit stays in `pending` and in the inner socket. A hello can be lost; the peer asks
    /// again.
    async fn recv(&mut self) -> anyhow::Result<RecvOutcome> {
        loop {
            let Some(pending) = &self.pending else {
                // One byte more than allowed, to detect a longer datagram.
                let room = &mut self.buffer[..=MAX_DATAGRAM];
                let len = match self.link.outer.recv(room).await {
                    Ok(len) => len,
                    Err(error) => {
                        tracing::debug!(%error, "cannot receive gossip");
                        // Errors of earlier sends are returned here. The delay keeps a permanent error from
                        // spinning.
                        tokio::time::sleep(Duration::from_millis(10)).await;
                        continue;
                    }
                };
                match self.link.accept(&mut self.buffer[..len]) {
                    Some(Arrival::Message { from, bytes }) => {
                        // Set before the await: a message in the inner socket without its sender here would
                        // assign wrong senders to all that follow.
                        self.pending = Some(Pending { from, deadline: Instant::now() + LOOPBACK });
                        self.relay
                            .socket
                            .send_to(&bytes, self.inner_addr)
                            .await
                            .context("the loopback socket failed")?;
                    }
                    Some(Arrival::Unproven { to, hello }) => self.link.greet(to, &hello).await,
                    None => {}
                }
                continue;
            };
            let from = pending.from;
            match timeout_at(pending.deadline, self.inner.recv()).await {
                Ok(Ok(outcome)) if outcome.from_addr == self.relay.addr => {
                    self.pending = None;
                    return Ok(RecvOutcome { from_addr: from, ..outcome });
                }
                // Another process on this host.
                Ok(Ok(_)) => {}
                Ok(Err(error)) => return Err(error),
                Err(_) => {
                    self.link.counters.drop_for(Reason::Undecodable);
                    // The relay gets a new address, so that a late datagram is not mistaken for the next
                    // message.
                    self.relay = Relay::bind(self.inner_addr.ip()).await?;
                    self.pending = None;
                }
            }
        }
    }
}
