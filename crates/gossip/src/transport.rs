//! chitchat's transport over sealed datagrams.
//!
//! chitchat 0.13 keeps the codec of its envelopes to itself, so an envelope becomes bytes by passing through
//! chitchat's own UDP socket on loopback ("inner"), opposite a socket of ours ("relay"): about 20 µs.
//!
//! ```text
//! chitchat -> inner ~loopback~> relay -> seal -> outer -> network
//! network -> outer -> open -> relay ~loopback~> inner -> chitchat
//! ```
//!
//! Only a process in the same network namespace (the same pod) can reach the inner socket. What it sends
//! there is dropped by its source address, but after chitchat decoded it: such a process is inside the trust
//! boundary.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use anyhow::Context as _;
use chitchat::{
    ChitchatEnvelope,
    transport::{RecvOutcome, SendOutcome, Socket, Transport, UdpTransport},
};
use tokio::{
    net::UdpSocket,
    sync::mpsc,
    time::{Instant, timeout_at},
};

use crate::{
    counters::{Counters, Reason},
    node::Company,
    seal::{Accepted, Echo, KeyRing, MAX_DATAGRAM, Opener, Sealer},
};

/// How long a datagram may take over loopback. It is there when the send returns, so this only ends the wait
/// for one that chitchat could not decode; longer would let a misbehaving member slow the others down.
const LOOPBACK: Duration = Duration::from_millis(50);
/// Hellos are counted in turns of this long: one per turn for a process, so that somebody who repeats the
/// recording of one cannot use up the hellos of the others.
const TURN: Duration = Duration::from_millis(100);
/// Hellos per turn. A mass restart of 100 processes takes two turns; more would serve recordings.
const HELLOS: usize = 64;

/// The outer socket and its seals: one per process, kept when chitchat is restarted.
pub(crate) struct Link {
    outer: UdpSocket,
    /// Whether IPv4 targets must be written as mapped IPv6.
    is_v6: bool,
    seals: Mutex<Seals>,
    counters: Arc<Counters>,
    /// Peers that said hello: worth a gossip at once.
    hellos: mpsc::Sender<SocketAddr>,
    company: Arc<Company>,
    #[cfg(test)]
    pub(crate) fault: std::sync::atomic::AtomicU8,
}

pub(crate) struct Seals {
    pub(crate) sealer: Sealer,
    pub(crate) opener: Opener,
    /// Who was sent a hello in this turn, by what they want echoed.
    greeted: Vec<Echo>,
    turn: Instant,
}

impl Seals {
    /// Returns a hello for the process with this echo, unless it or too many others had one in this turn.
    fn hello(&mut self, echo: Echo, now: Instant) -> Option<Vec<u8>> {
        if now.duration_since(self.turn) >= TURN {
            self.turn = now;
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
        outer: UdpSocket,
        sealer: Sealer,
        opener: Opener,
        counters: Arc<Counters>,
        hellos: mpsc::Sender<SocketAddr>,
        company: Arc<Company>,
    ) -> std::io::Result<Self> {
        let is_v6 = outer.local_addr()?.is_ipv6();
        let seals = Mutex::new(Seals { sealer, opener, greeted: Vec::new(), turn: Instant::now() });
        Ok(Self {
            outer,
            is_v6,
            seals,
            counters,
            hellos,
            company,
            #[cfg(test)]
            fault: std::sync::atomic::AtomicU8::new(0),
        })
    }

    /// Returns the seals. Never held over an await.
    pub(crate) fn seals(&self) -> MutexGuard<'_, Seals> {
        // A panic while they were held leaves at worst a counter that was used up.
        self.seals.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Uses the keys of `ring` from the next datagram on.
    pub(crate) fn rekey(&self, ring: &KeyRing, cluster: &str) {
        let mut seals = self.seals();
        seals.sealer.rekey(ring, cluster);
        seals.opener.rekey(ring, cluster);
    }

    async fn send(&self, to: SocketAddr, message: &[u8]) {
        let frames = {
            let mut seals = self.seals();
            if self.company.is_silent() {
                // A knock: it proves nothing, so nothing in it counts, and whoever gets it answers with a hello,
                // also when it has restarted meanwhile.
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
                // The rest of the message is useless without this part.
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

    /// Opens one datagram and says what is to be done with it, if anything.
    fn accept(&self, datagram: &mut [u8]) -> Option<Arrival> {
        self.counters.received.add(1);
        self.counters.received_bytes.add(datagram.len() as u64);
        let now = Instant::now();
        let mut seals = self.seals();
        let accepted = seals.opener.accept(datagram, now);
        if accepted.is_ok() {
            self.company.sign();
        }
        match accepted {
            Ok(Accepted::Message { from, bytes }) => Some(Arrival::Message { from, bytes }),
            Ok(Accepted::Part) => None,
            Ok(Accepted::Hello { from }) => {
                // When the queue is full, the gossip rounds reach the peer as well.
                let _ = self.hellos.try_send(from);
                None
            }
            Err(refused) => {
                self.counters.drop_for(refused.reason);
                let (to, echo) = refused.greet?;
                Some(Arrival::Stranger { to, hello: seals.hello(echo, now)? })
            }
        }
    }

    async fn greet(&self, to: SocketAddr, hello: &[u8]) {
        match self.outer.send_to(hello, self.target(to)).await {
            Ok(sent) => {
                self.count_sent(sent);
                self.counters.greeted.add(1);
            }
            Err(_) => self.counters.send_failed.add(1),
        }
    }

    /// Lets tests panic (1) or freeze (2) the gossip task, or hold up its whole thread (3), once.
    #[cfg(test)]
    async fn fail(&self) {
        match self.fault.swap(0, std::sync::atomic::Ordering::Relaxed) {
            1 => panic!("a test asked for it"),
            2 => std::future::pending().await,
            3 => std::thread::sleep(std::time::Duration::from_secs(2)),
            _ => {}
        }
    }
}

/// What an accepted datagram asks for.
enum Arrival {
    Message { from: SocketAddr, bytes: Vec<u8> },
    Stranger { to: SocketAddr, hello: Vec<u8> },
}

/// Opens a socket per incarnation, all over one link.
pub(crate) struct SealedTransport(pub(crate) Arc<Link>);

#[async_trait::async_trait]
impl Transport for SealedTransport {
    /// Opens the loopback pair. The outer socket is bound already, so the address is not used.
    async fn open(&self, _: SocketAddr) -> anyhow::Result<Box<dyn Socket>> {
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

/// A message that was given to the inner socket and did not come out yet.
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
    /// For datagrams of either side. One byte longer than the longest, so that a longer one is seen.
    buffer: Vec<u8>,
}

#[async_trait::async_trait]
impl Socket for SealedSocket {
    fn local_addr(&self) -> anyhow::Result<SocketAddr> {
        Ok(self.link.outer.local_addr()?)
    }

    /// Sends one envelope. A message that the network refuses is counted and not an error: chitchat takes an
    /// error for a broken transport.
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
                    // Under a new address, what may still come out late is not taken for the next envelope.
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
    /// What is under way stays in `pending` and in the inner socket. A hello can be lost; the peer asks again.
    async fn recv(&mut self) -> anyhow::Result<RecvOutcome> {
        loop {
            let Some(pending) = &self.pending else {
                // One more than allowed, so that a longer datagram is seen as such.
                let room = &mut self.buffer[..=MAX_DATAGRAM];
                let len = match self.link.outer.recv_from(room).await {
                    Ok((len, _)) => len,
                    Err(error) => {
                        tracing::debug!(%error, "cannot receive gossip");
                        // Errors of earlier sends surface here; one that stays must not spin.
                        tokio::time::sleep(Duration::from_millis(10)).await;
                        continue;
                    }
                };
                match self.link.accept(&mut self.buffer[..len]) {
                    Some(Arrival::Message { from, bytes }) => {
                        // Before the await: a message in the inner socket without its sender here would
                        // shift all that follow.
                        self.pending = Some(Pending { from, deadline: Instant::now() + LOOPBACK });
                        self.relay
                            .socket
                            .send_to(&bytes, self.inner_addr)
                            .await
                            .context("the loopback socket failed")?;
                    }
                    Some(Arrival::Stranger { to, hello }) => self.link.greet(to, &hello).await,
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
                // Somebody else on this host.
                Ok(Ok(_)) => {}
                Ok(Err(error)) => return Err(error),
                Err(_) => {
                    self.link.counters.drop_for(Reason::Undecodable);
                    // Under a new address, what may still come out late is not taken for the next message.
                    self.relay = Relay::bind(self.inner_addr.ip()).await?;
                    self.pending = None;
                }
            }
        }
    }
}
