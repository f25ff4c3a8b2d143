//! chitchat's socket over a simulated network.

use std::{future::poll_fn, net::SocketAddr, sync::Arc};

use chitchat::{
    ChitchatEnvelope,
    transport::{RecvOutcome, SendOutcome, Socket},
};

use super::{Arrival, Link};
use crate::simulation::Network;

/// chitchat's socket.
pub(super) struct SimulatedSocket {
    pub(super) link: Arc<Link>,
    pub(super) network: Network,
    pub(super) buffer: Vec<u8>,
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
