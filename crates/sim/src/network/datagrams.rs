//! Datagrams of one process.

use std::{
    collections::VecDeque,
    net::SocketAddr,
    task::{Context, Poll, Waker},
};

use bytes::Bytes;

use super::{Content, Network, Packet};

/// The most datagrams that wait to be received; more are lost.
const MOST: usize = 1_000;

#[derive(Default)]
pub(super) struct Inbox {
    datagrams: VecDeque<Bytes>,
    waker: Option<Waker>,
}

impl Inbox {
    pub(super) fn arrive(&mut self, bytes: Bytes) -> Option<Waker> {
        if self.datagrams.len() < MOST {
            self.datagrams.push_back(bytes);
        }
        self.waker.take()
    }
}

/// A bound port.
pub(crate) struct Port {
    network: Network,
    address: SocketAddr,
}

impl Network {
    /// Binds a port for datagrams. An earlier one with this address receives nothing more.
    pub(crate) fn bind(&self, address: SocketAddr) -> Port {
        self.0.lock().inboxes.insert(address, Inbox::default());
        Port { network: self.clone(), address }
    }
}

impl gossip::simulation::Datagrams for Port {
    fn local_addr(&self) -> SocketAddr {
        self.address
    }

    fn send(&self, to: SocketAddr, datagram: &[u8]) {
        let content = Content::Datagram(to, Bytes::copy_from_slice(datagram));
        let packet = Packet { from: self.address.ip(), to: to.ip(), content };
        self.network.with(|core, _| core.send(packet));
    }

    fn poll_recv(&self, cx: &mut Context<'_>, buffer: &mut [u8]) -> Poll<usize> {
        // An earlier waker is dropped without the lock.
        let (polled, _earlier) = self.network.with(|core, _| {
            let Some(inbox) = core.inboxes.get_mut(&self.address) else { return (Poll::Pending, None) };
            match inbox.datagrams.pop_front() {
                Some(datagram) => {
                    let len = datagram.len().min(buffer.len());
                    buffer[..len].copy_from_slice(&datagram[..len]);
                    (Poll::Ready(len), None)
                }
                None => (Poll::Pending, inbox.waker.replace(cx.waker().clone())),
            }
        });
        polled
    }
}
