//! Runs a process of the mesh over a simulated network, on the runtime of its caller.
//!
//! Everything but the sockets is the same: the supervision of chitchat, the seals, the proofs of addresses.
//! Datagrams do not contain chitchat's envelopes, but a number of 8 bytes that names the envelope in
//! [`Envelopes`]: the codec of chitchat is reached only through sockets of the system, and these have a time
//! of their own. So the length of messages, and their division into parts, are not simulated.

use std::{
    collections::BTreeMap,
    future::poll_fn,
    net::SocketAddr,
    sync::Arc,
    task::{Context, Poll},
};

use chitchat::{
    ChitchatEnvelope,
    transport::{RecvOutcome, SendOutcome, Socket},
};
use parking_lot::Mutex;

use crate::transport::{Arrival, Link};

/// The most envelopes that are kept for datagrams in transit. Those of lost datagrams are never taken.
const IN_TRANSIT: usize = 10_000;

/// The datagrams of one process.
pub trait Datagrams: Send + Sync + 'static {
    /// Returns the address that the process is bound to.
    fn local_addr(&self) -> SocketAddr;

    /// Sends a datagram, which may be lost.
    fn send(&self, to: SocketAddr, datagram: &[u8]);

    /// Receives a datagram into `buffer`; returns its length. What does not fit is cut off.
    fn poll_recv(&self, cx: &mut Context<'_>, buffer: &mut [u8]) -> Poll<usize>;
}

/// The envelopes of the datagrams that are in transit. All processes of a simulation share them.
#[derive(Clone, Default)]
pub struct Envelopes(Arc<Mutex<Transit>>);

#[derive(Default)]
struct Transit {
    sent: u64,
    envelopes: BTreeMap<u64, ChitchatEnvelope>,
}

impl std::fmt::Debug for Envelopes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Envelopes")
    }
}

impl Envelopes {
    fn put(&self, envelope: ChitchatEnvelope) -> [u8; 8] {
        let mut transit = self.0.lock();
        transit.sent += 1;
        let number = transit.sent;
        transit.envelopes.insert(number, envelope);
        if transit.envelopes.len() > IN_TRANSIT {
            transit.envelopes.pop_first();
        }
        number.to_be_bytes()
    }

    fn take(&self, bytes: &[u8]) -> Option<ChitchatEnvelope> {
        let number = u64::from_be_bytes(bytes.try_into().ok()?);
        self.0.lock().envelopes.remove(&number)
    }
}

/// A simulated network, as one process sees it.
#[derive(Clone)]
pub(crate) struct Network {
    pub(crate) datagrams: Arc<dyn Datagrams>,
    pub(crate) envelopes: Envelopes,
}

impl std::fmt::Debug for Network {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Network")
    }
}

/// chitchat's socket.
pub(crate) struct SimulatedSocket {
    pub(crate) link: Arc<Link>,
    pub(crate) network: Network,
    pub(crate) buffer: Vec<u8>,
}

#[async_trait::async_trait]
impl Socket for SimulatedSocket {
    fn local_addr(&self) -> anyhow::Result<SocketAddr> {
        Ok(self.network.datagrams.local_addr())
    }

    async fn send(&mut self, to: SocketAddr, envelope: ChitchatEnvelope) -> anyhow::Result<SendOutcome> {
        let bytes = self.network.envelopes.put(envelope);
        self.link.send(to, &bytes).await;
        Ok(SendOutcome { num_bytes_sent: bytes.len() })
    }

    /// # Cancel safety
    /// Cancel safe, except that a hello can be lost; the peer asks again.
    async fn recv(&mut self) -> anyhow::Result<RecvOutcome> {
        loop {
            let Self { network, buffer, .. } = self;
            let len = poll_fn(|cx| network.datagrams.poll_recv(cx, buffer)).await;
            match self.link.accept(&mut self.buffer[..len]) {
                Some(Arrival::Message { from, bytes }) => {
                    if let Some(envelope) = self.network.envelopes.take(&bytes) {
                        return Ok(RecvOutcome { from_addr: from, envelope, num_bytes_received: len });
                    }
                }
                Some(Arrival::Unproven { to, hello }) => self.link.greet(to, &hello).await,
                None => {}
            }
        }
    }
}
