//! Runs a process of the mesh over a simulated network, on the runtime of its caller.
//!
//! Everything but the sockets is the same: the supervision of chitchat, the seals, the proofs of addresses.
//! Datagrams do not contain chitchat's envelopes, but a number of 8 bytes that names the envelope in
//! [`Envelopes`]: the codec of chitchat is reached only through sockets of the system, and these have a time
//! of their own. So the length of messages, and their division into parts, are not simulated.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::Arc,
    task::{Context, Poll},
};

use chitchat::ChitchatEnvelope;
use parking_lot::Mutex;

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
    pub(crate) fn put(&self, envelope: ChitchatEnvelope) -> [u8; 8] {
        let mut transit = self.0.lock();
        transit.sent += 1;
        let number = transit.sent;
        transit.envelopes.insert(number, envelope);
        if transit.envelopes.len() > IN_TRANSIT {
            transit.envelopes.pop_first();
        }
        number.to_be_bytes()
    }

    pub(crate) fn take(&self, bytes: &[u8]) -> Option<ChitchatEnvelope> {
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
