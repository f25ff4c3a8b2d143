//! Connections: both ends, and listeners.

use std::{
    collections::{BTreeSet, VecDeque},
    fmt,
    future::poll_fn,
    io,
    net::{IpAddr, SocketAddr},
    pin::Pin,
    task::{Context, Poll, Waker},
};

use bytes::{Buf as _, Bytes};
use history::Micros;
use net::io::{Accept, Duplex};
use rand::RngExt as _;
use routing::peer::link::{self, Connecting};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::{Backlog, Content, Core, Network, Packet};

/// The bytes that one end may have sent and the other has not read.
const WINDOW: usize = 256 * 1024;
/// The largest piece that is sent at once.
const PIECE: usize = 16 * 1024;

/// One end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Client,
    Server,
}

impl Side {
    pub(super) fn other(self) -> Self {
        match self {
            Self::Client => Self::Server,
            Self::Server => Self::Client,
        }
    }
}

pub(super) struct Connection {
    addresses: [SocketAddr; 2],
    ends: [End; 2],
}

#[derive(Default)]
pub(super) struct End {
    connected: Option<Result<(), io::ErrorKind>>,
    inbox: VecDeque<Bytes>,
    /// Sent by this end, and not read by the other one.
    unread: usize,
    fin: bool,
    reset: bool,
    sent_fin: bool,
    /// See [`Stream::reset_on_drop`].
    resets: bool,
    /// Its process has closed it, or is dead.
    gone: bool,
    /// When the last packet to this end arrives.
    last: Micros,
    reader: Option<Waker>,
    writer: Option<Waker>,
}

impl End {
    pub(super) fn connected(&mut self, result: Result<(), io::ErrorKind>) {
        self.connected = Some(result);
    }

    pub(super) fn data(&mut self, bytes: Bytes) {
        self.inbox.push_back(bytes);
    }

    pub(super) fn fin(&mut self) {
        self.fin = true;
    }

    pub(super) fn reset(&mut self) {
        self.reset = true;
        self.inbox.clear();
    }

    fn wakers(&mut self) -> impl Iterator<Item = Waker> {
        [self.reader.take(), self.writer.take()].into_iter().flatten()
    }
}

impl Connection {
    fn end(&mut self, side: Side) -> &mut End {
        &mut self.ends[side as usize]
    }

    pub(super) fn server(&self) -> SocketAddr {
        self.addresses[Side::Server as usize]
    }

    fn host(&self, side: Side) -> IpAddr {
        self.addresses[side as usize].ip()
    }

    pub(super) fn hosts(&self) -> BTreeSet<IpAddr> {
        self.addresses.iter().map(SocketAddr::ip).collect()
    }

    pub(super) fn is_gone(&self, side: Side) -> bool {
        self.ends[side as usize].gone
    }

    /// Returns when a packet to this end arrives that would arrive at `at` if there were no others before it.
    pub(super) fn in_order(&mut self, side: Side, at: Micros) -> Micros {
        let end = self.end(side);
        end.last = end.last.max(at);
        end.last
    }
}

impl Core {
    /// Changes one end and wakes its tasks.
    pub(super) fn arrive_at(
        &mut self,
        id: u64,
        side: Side,
        wakers: &mut Vec<Waker>,
        change: impl FnOnce(&mut End),
    ) {
        if let Some(connection) = self.connections.get_mut(&id) {
            let end = connection.end(side);
            change(end);
            wakers.extend(end.wakers());
        }
    }

    /// Sends from one end to the other.
    fn transmit(&mut self, id: u64, from: Side, content: Content) {
        if let Some(connection) = self.connections.get(&id) {
            let (from, to) = (connection.host(from), connection.host(from.other()));
            self.send(Packet { from, to, content });
        }
    }

    /// One end is closed by its process.
    fn close(&mut self, id: u64, side: Side) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        let end = connection.end(side);
        if !end.gone {
            end.gone = true;
            let told = if !end.inbox.is_empty() || (end.resets && !end.sent_fin) {
                Some(Content::Reset(id, side.other()))
            } else if !end.sent_fin && !end.reset {
                Some(Content::Fin(id, side.other()))
            } else {
                None
            };
            if let Some(told) = told {
                self.transmit(id, side, told);
            }
        }
        self.forget(id);
    }

    /// Forgets a connection if both ends are gone.
    fn forget(&mut self, id: u64) {
        if self.connections.get(&id).is_some_and(|connection| connection.ends.iter().all(|end| end.gone)) {
            self.connections.remove(&id);
        }
    }

    /// If this end is on a host whose process is dead, the system closes it, if there is one.
    pub(super) fn abandon(&mut self, id: u64, side: Side, host: IpAddr, noticed: bool) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        if connection.host(side) != host || connection.end(side).gone {
            return;
        }
        connection.end(side).gone = true;
        if noticed {
            let told = match self.random.random_bool(0.5) {
                true => Content::Reset(id, side.other()),
                false => Content::Fin(id, side.other()),
            };
            self.transmit(id, side, told);
        }
        self.forget(id);
    }
}

/// One end of a connection. Dropping it closes the connection.
pub(crate) struct Stream {
    network: Network,
    id: u64,
    side: Side,
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Stream({}, {:?})", self.id, self.side)
    }
}

impl Network {
    /// Connects to `to`. There is no timeout.
    ///
    /// # Errors
    /// `ConnectionRefused` if nothing listens there.
    pub(crate) async fn connect(&self, from: IpAddr, to: SocketAddr) -> io::Result<Stream> {
        let id = self.with(|core, _| {
            core.connected += 1;
            core.sums.connections += 1;
            let id = core.connected;
            let port = 32_768 + u16::try_from(id % 28_000).unwrap_or_default();
            let addresses = [SocketAddr::new(from, port), to];
            core.connections.insert(id, Connection { addresses, ends: Default::default() });
            core.transmit(id, Side::Client, Content::Syn(id));
            id
        });
        let stream = Stream { network: self.clone(), id, side: Side::Client };
        poll_fn(|cx| {
            stream.poll(
                |end, _| match end.connected {
                    Some(Ok(())) => Poll::Ready(Ok(())),
                    Some(Err(kind)) => Poll::Ready(Err(kind.into())),
                    None if end.reset => Poll::Ready(Err(io::ErrorKind::ConnectionReset.into())),
                    None => Poll::Pending,
                },
                cx,
                |end| &mut end.reader,
            )
        })
        .await?;
        Ok(stream)
    }

    /// Listens at an address. An earlier listener there accepts nothing more.
    pub(crate) fn listen(&self, address: SocketAddr) -> Listener {
        self.0.lock().listeners.insert(address, Backlog::default());
        Listener { network: self.clone(), address }
    }
}

impl Stream {
    /// Resets the connection if this is dropped without a shutdown. Otherwise a task that is dropped closes
    /// it as if everything had been said.
    pub(crate) fn reset_on_drop(&self) {
        self.network.with(|core, _| {
            if let Some(connection) = core.connections.get_mut(&self.id) {
                connection.end(self.side).resets = true;
            }
        });
    }

    /// Looks at both ends, its own first. If that is pending, `slot` gets the waker.
    fn poll<T>(
        &self,
        look: impl FnOnce(&mut End, &mut Vec<Waker>) -> Poll<io::Result<T>>,
        cx: &Context<'_>,
        slot: impl FnOnce(&mut End) -> &mut Option<Waker>,
    ) -> Poll<io::Result<T>> {
        // An earlier waker is dropped without the lock.
        let (polled, _earlier) = self.network.with(|core, wakers| {
            let Some(connection) = core.connections.get_mut(&self.id) else {
                return (Poll::Ready(Err(io::ErrorKind::ConnectionReset.into())), None);
            };
            let end = connection.end(self.side);
            let polled = look(end, wakers);
            let earlier = if polled.is_pending() { slot(end).replace(cx.waker().clone()) } else { None };
            (polled, earlier)
        });
        polled
    }
}

impl AsyncRead for Stream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let mut read = 0;
        let polled = self.poll(
            |end, _| {
                if end.reset {
                    return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
                }
                while buf.remaining() > 0
                    && let Some(front) = end.inbox.front_mut()
                {
                    let len = front.len().min(buf.remaining());
                    buf.put_slice(&front[..len]);
                    front.advance(len);
                    read += len;
                    if front.is_empty() {
                        end.inbox.pop_front();
                    }
                }
                if read > 0 || end.fin { Poll::Ready(Ok(())) } else { Poll::Pending }
            },
            cx,
            |end| &mut end.reader,
        );
        if read > 0 {
            self.network.with(|core, wakers| {
                if let Some(connection) = core.connections.get_mut(&self.id) {
                    let host = connection.host(self.side.other());
                    let end = connection.end(self.side.other());
                    end.unread = end.unread.saturating_sub(read);
                    if let Some(writer) = end.writer.take() {
                        wakers.push(writer);
                        core.woken.insert(host);
                    }
                }
            });
        }
        polled
    }
}

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let mut piece = Bytes::new();
        let polled = self.poll(
            |end, _| {
                if end.reset || end.sent_fin || end.gone {
                    return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
                }
                let len = buf.len().min(WINDOW.saturating_sub(end.unread)).min(PIECE);
                if len == 0 && !buf.is_empty() {
                    return Poll::Pending;
                }
                end.unread += len;
                piece = Bytes::copy_from_slice(&buf[..len]);
                Poll::Ready(Ok(len))
            },
            cx,
            |end| &mut end.writer,
        );
        if !piece.is_empty() {
            let content = Content::Data(self.id, self.side.other(), piece);
            self.network.with(|core, _| core.transmit(self.id, self.side, content));
        }
        polled
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut ends = false;
        let polled = self.poll(
            |end, _| {
                ends = !std::mem::replace(&mut end.sent_fin, true) && !end.gone && !end.reset;
                Poll::Ready(Ok(()))
            },
            cx,
            |end| &mut end.writer,
        );
        if ends {
            let content = Content::Fin(self.id, self.side.other());
            self.network.with(|core, _| core.transmit(self.id, self.side, content));
        }
        polled
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.network.with(|core, _| core.close(self.id, self.side));
    }
}

/// Accepts connections.
#[derive(Debug)]
pub(crate) struct Listener {
    network: Network,
    address: SocketAddr,
}

impl Listener {
    fn poll_stream(&self, cx: &Context<'_>) -> Poll<(Stream, SocketAddr)> {
        let (polled, _earlier) = self.network.with(|core, _| {
            let Some(backlog) = core.listeners.get_mut(&self.address) else { return (Poll::Pending, None) };
            while let Some(id) = backlog.waiting.pop_front() {
                if let Some(connection) = core.connections.get(&id) {
                    let peer = connection.addresses[Side::Client as usize];
                    return (Poll::Ready((id, peer)), None);
                }
            }
            (Poll::Pending, backlog.waker.replace(cx.waker().clone()))
        });
        polled.map(|(id, peer)| (Stream { network: self.network.clone(), id, side: Side::Server }, peer))
    }

    /// Accepts the next connection.
    pub(crate) async fn accept(&self) -> (Stream, SocketAddr) {
        poll_fn(|cx| self.poll_stream(cx)).await
    }
}

impl Accept for Listener {
    fn local_addr(&self) -> SocketAddr {
        self.address
    }

    fn poll_accept(&self, cx: &mut Context<'_>) -> Poll<io::Result<(Box<dyn Duplex>, SocketAddr)>> {
        self.poll_stream(cx).map(|(stream, peer)| Ok((Box::new(stream) as Box<dyn Duplex>, peer)))
    }
}

/// Connects one replica to others.
#[derive(Clone, Debug)]
pub(crate) struct Connector {
    pub(crate) network: Network,
    /// The host of the replica.
    pub(crate) host: IpAddr,
}

impl link::Connector for Connector {
    fn connect<'a>(&'a self, address: &'a str) -> Connecting<'a> {
        Box::pin(async move {
            let to = address
                .parse()
                .map_err(|_| io::Error::new(io::ErrorKind::InvalidInput, "the network has no names"))?;
            Ok(net::io::Stream::Other(Box::new(self.network.connect(self.host, to).await?)))
        })
    }
}
