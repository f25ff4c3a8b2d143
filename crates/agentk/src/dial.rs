//! From an address of kas to an HTTP/2 connection, every limit set explicitly.

use std::{
    io,
    net::SocketAddr,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use http::{
    HeaderValue, Request, header,
    uri::{Authority, PathAndQuery, Scheme},
};
use http_body_util::Empty;
use hyper::{
    client::conn::{http1, http2},
    upgrade::Parts,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use runtime::http2::{FRAME, HEADER_LIST, STREAM_WINDOW, UNLIMITED_WINDOW};
use rustls::pki_types::ServerName;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
};
use tokio_rustls::client::TlsStream;
use tokio_util::sync::{CancellationToken, DropGuard};
use websocket::{
    ByteStream, Rewind, Role,
    upgrade::{self, NotUpgraded},
};

use crate::session::user_agent;

/// Connecting and the TLS handshake must be over within this time.
const CONNECT: Duration = Duration::from_secs(10);
/// An address that does not answer within this time is left for the next one, when the name has several: a replica
/// whose host is gone answers nothing at all. Shorter: a slow network looks like it; longer: its agents wait for it.
const CONNECT_ONE: Duration = Duration::from_secs(3);
/// A kas of GitLab answers pings that come faster than each 20 s with GOAWAY.
const KEEPALIVE: Duration = Duration::from_secs(25);
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(10);

/// Where kas is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KasAddress {
    authority: Authority,
    tls: bool,
    /// The request for an upgrade goes there; `None`: no WebSocket.
    websocket: Option<PathAndQuery>,
}

/// Why a text is not an address of kas.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    /// Another scheme; in the words of 14.1.
    #[error(
        "unsupported scheme in GitLab Kubernetes Agent Server address: {0:?}; use grpc://host:port, grpcs://host:port, \
         ws://host or wss://host"
    )]
    Scheme(String),
    /// No host, or no port.
    #[error("expected grpc://host:port, grpcs://host:port, ws://host or wss://host, got {0:?}")]
    Shape(String),
}

impl std::str::FromStr for KasAddress {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        let shape = || AddressError::Shape(text.to_owned());
        let (scheme, rest) = text.split_once("://").ok_or_else(shape)?;
        let (tls, websocket) = match scheme {
            "grpc" => (false, false),
            "grpcs" => (true, false),
            "ws" => (false, true),
            "wss" => (true, true),
            other => return Err(AddressError::Scheme(other.to_owned())),
        };
        let (authority, path) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
        let authority: Authority = authority.parse().map_err(|_| shape())?;
        let port = match (tls, websocket) {
            (true, _) => Some(443),
            (false, true) => Some(80),
            // No port is usual for it.
            (false, false) => None,
        };
        let authority = match (authority.port_u16(), port) {
            (Some(_), _) => authority,
            (None, Some(port)) => format!("{authority}:{port}").parse().map_err(|_| shape())?,
            (None, None) => return Err(shape()),
        };
        if authority.host().is_empty() || authority.as_str().contains('@') {
            return Err(shape());
        }
        // Only host and port of the others are used, as in 14.1.
        let websocket = websocket
            .then(|| {
                let slash = if path.starts_with('/') { "" } else { "/" };
                // Takes a fragment away, which is no part of a request.
                format!("{slash}{path}").parse().map_err(|_| shape())
            })
            .transpose()?;
        Ok(Self { authority, tls, websocket })
    }
}

impl std::fmt::Display for KasAddress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let scheme = match (&self.websocket, self.tls) {
            (None, false) => "grpc",
            (None, true) => "grpcs",
            (Some(_), false) => "ws",
            (Some(_), true) => "wss",
        };
        write!(f, "{scheme}://{}", self.authority)?;
        match &self.websocket {
            // Without a query: it may hold what logs must not.
            Some(path) if path.path() != "/" => f.write_str(path.path()),
            _ => Ok(()),
        }
    }
}

/// Why no connection was made.
#[derive(Debug, thiserror::Error)]
pub enum DialError {
    /// The name does not resolve, nothing listens, or the network says no.
    #[error("cannot connect to {address}")]
    Connect {
        /// Where.
        address: KasAddress,
        /// Why.
        source: io::Error,
    },
    /// The name in the address cannot be that of a certificate.
    #[error("{0} is not a name that TLS can verify")]
    Name(String),
    /// TLS failed: usually the certificate.
    #[error("TLS with {address} failed")]
    Tls {
        /// Where.
        address: KasAddress,
        /// Why.
        source: io::Error,
    },
    /// The request for WebSocket was not answered.
    #[error("{address} did not answer the request for WebSocket")]
    Http1 {
        /// Where.
        address: KasAddress,
        /// Why.
        source: hyper::Error,
    },
    /// The request for WebSocket was refused: the address, or a proxy in between.
    #[error("no WebSocket connection to {address}")]
    Upgrade {
        /// Where.
        address: KasAddress,
        /// Why.
        source: NotUpgraded,
    },
    /// The other side does not speak HTTP/2.
    #[error("{address} does not speak HTTP/2")]
    Http2 {
        /// Where.
        address: KasAddress,
        /// Why.
        source: hyper::Error,
    },
    /// No answer in time.
    #[error("no connection to {0} within 10 s")]
    Timeout(KasAddress),
}

/// An HTTP/2 connection to kas.
#[derive(Debug)]
pub struct Link {
    /// Opens streams.
    pub sender: http2::SendRequest<grpc::Body>,
    /// This end's own address; `None` inside WebSocket, where proxies in between do no harm: every byte counts
    /// for their idle timers, pings too.
    pub local: Option<SocketAddr>,
    /// The other end's address: of kas, or of a balancer.
    pub peer: Option<SocketAddr>,
    /// Base of request URIs.
    pub scheme: Scheme,
    /// Base of request URIs.
    pub authority: Authority,
    /// Ends when no stream can be opened any more: the connection broke, or kas sent GOAWAY. Open
    /// streams may go on.
    pub driver: tokio::task::JoinHandle<()>,
    /// Closes the connection and everything on it when it drops.
    pub guard: DropGuard,
}

/// Runs the connection's tasks until the link is dropped: HTTP/2 spawns the connection itself and
/// each request body apart from [`Link::driver`].
#[derive(Clone, Debug)]
struct LinkTasks(CancellationToken);

impl<F> hyper::rt::Executor<F> for LinkTasks
where
    F: Future + Send + 'static,
    F::Output: Send,
{
    fn execute(&self, future: F) {
        let closed = self.0.clone();
        tokio::spawn(async move {
            tokio::select! {
                _ = future => {}
                () = closed.cancelled() => {}
            }
        });
    }
}

/// Addresses that come last when a name has several.
#[derive(Debug, Clone, Default)]
pub struct Avoid {
    /// A connection to them is open: they come last of all.
    pub used: Vec<SocketAddr>,
    /// A connection to them was lost a moment ago.
    pub lost: Vec<SocketAddr>,
}

impl Avoid {
    /// Orders what a name resolved to: in random order, so that agents spread; what is avoided later; and the family
    /// that the system prefers first.
    fn order(&self, resolved: impl Iterator<Item = SocketAddr>) -> Vec<SocketAddr> {
        let mut addresses: Vec<SocketAddr> = resolved.collect();
        let preferred = addresses.first().map(SocketAddr::is_ipv4);
        addresses.sort_unstable();
        addresses.dedup();
        addresses.sort_by_cached_key(|address| {
            let avoided = (self.used.contains(address), self.lost.contains(address));
            (avoided, Some(address.is_ipv4()) != preferred, rand::random::<u32>())
        });
        addresses
    }
}

/// Connects, to an address that is not to be avoided if there is one.
///
/// # Errors
/// See [`DialError`].
///
/// # Cancel safety
/// Cancel safe: what was begun is closed.
pub async fn dial(
    address: &KasAddress,
    tls: &Arc<rustls::ClientConfig>,
    avoid: &Avoid,
) -> Result<Link, DialError> {
    tokio::time::timeout(CONNECT, connect(address, tls, avoid))
        .await
        .map_err(|_| DialError::Timeout(address.clone()))?
}

/// Connects to the first address that answers.
async fn connect_first(addresses: &[SocketAddr]) -> io::Result<TcpStream> {
    let mut result = Err(io::Error::new(io::ErrorKind::NotFound, "the name has no address"));
    for (n, address) in addresses.iter().enumerate() {
        let connect = TcpStream::connect(address);
        result = if n + 1 == addresses.len() {
            connect.await
        } else {
            tokio::time::timeout(CONNECT_ONE, connect)
                .await
                .unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
        };
        if result.is_ok() {
            break;
        }
    }
    result
}

async fn connect(
    address: &KasAddress,
    tls: &Arc<rustls::ClientConfig>,
    avoid: &Avoid,
) -> Result<Link, DialError> {
    let connect = |source| DialError::Connect { address: address.clone(), source };
    let resolved = tokio::net::lookup_host(address.authority.as_str()).await.map_err(connect)?;
    let stream = connect_first(&avoid.order(resolved)).await.map_err(connect)?;
    stream.set_nodelay(true).map_err(connect)?;
    let (local, peer) = (stream.local_addr().ok(), stream.peer_addr().ok());
    let tasks = LinkTasks(CancellationToken::new());
    let guard = tasks.0.clone().drop_guard();
    let mut builder = http2::Builder::new(tasks.clone());
    builder
        .timer(TokioTimer::new())
        .adaptive_window(false)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(UNLIMITED_WINDOW)
        .max_frame_size(FRAME)
        .max_header_list_size(HEADER_LIST)
        .keep_alive_interval(KEEPALIVE)
        .keep_alive_timeout(KEEPALIVE_TIMEOUT)
        .keep_alive_while_idle(true)
        // Callers cancel at will: the library's defaults would end the connection after some
        // hundred of them.
        .max_concurrent_reset_streams(1_000)
        .max_pending_accept_reset_streams(1_000)
        .max_local_error_reset_streams(None);
    let http2 = |source| DialError::Http2 { address: address.clone(), source };
    let stream = if address.tls {
        let host = address.authority.host().trim_start_matches('[').trim_end_matches(']').to_owned();
        let name = ServerName::try_from(host.clone()).map_err(|_| DialError::Name(host))?;
        let tls = match &address.websocket {
            None => Arc::clone(tls),
            Some(_) => runtime::tls::http1_only(tls),
        };
        let connecting = tokio_rustls::TlsConnector::from(tls).connect(name, stream);
        let tls = |source| DialError::Tls { address: address.clone(), source };
        Stream::Tls(Box::new(connecting.await.map_err(tls)?))
    } else {
        Stream::Plain(stream)
    };
    let (sender, driver) = match &address.websocket {
        None => {
            let (sender, connection) = builder.handshake(TokioIo::new(stream)).await.map_err(http2)?;
            (sender, tokio::spawn(drive(connection)))
        }
        Some(path) => {
            let stream = Box::pin(upgrade(address, path, stream, &tasks)).await?;
            let (sender, connection) = builder.handshake(TokioIo::new(stream)).await.map_err(http2)?;
            (sender, tokio::spawn(drive(connection)))
        }
    };
    // Inside WebSocket HTTP/2 itself is plain, as 14.1 says.
    let is_https = address.tls && address.websocket.is_none();
    let scheme = if is_https { Scheme::HTTPS } else { Scheme::HTTP };
    let local = local.filter(|_| address.websocket.is_none());
    Ok(Link { sender, local, peer, scheme, authority: address.authority.clone(), driver, guard })
}

/// Asks for WebSocket, and returns the bytes inside.
async fn upgrade(
    address: &KasAddress,
    path: &PathAndQuery,
    stream: Stream,
    tasks: &LinkTasks,
) -> Result<ByteStream<Rewind<Stream>>, DialError> {
    use hyper::rt::Executor as _;
    let http1 = |source| DialError::Http1 { address: address.clone(), source };
    let refused = |source| DialError::Upgrade { address: address.clone(), source };
    let (mut sender, connection) = http1::Builder::new()
        .max_buf_size(HEADER_LIST as usize)
        .handshake(TokioIo::new(stream))
        .await
        .map_err(http1)?;
    // It ends with the upgrade, or because nobody has anything more to ask.
    tasks.execute(connection.with_upgrades());
    let mut request = Request::new(Empty::<bytes::Bytes>::new());
    *request.uri_mut() = path.clone().into();
    let headers = request.headers_mut();
    // A port that is the scheme's own is not said: proxies compare the text.
    let own = if address.tls { ":443" } else { ":80" };
    let host = address.authority.as_str();
    if let Ok(host) = HeaderValue::from_str(host.strip_suffix(own).unwrap_or(host)) {
        headers.insert(header::HOST, host);
    }
    headers.insert(header::USER_AGENT, HeaderValue::from_static(user_agent()));
    let asked = upgrade::ask(headers);
    let response = sender.send_request(request).await.map_err(http1)?;
    asked.check(&response).map_err(refused)?;
    let upgraded = hyper::upgrade::on(response).await.map_err(http1)?;
    let Parts { io, read_buf, .. } = upgraded
        .downcast::<TokioIo<Stream>>()
        .map_err(|_| refused(NotUpgraded::Answer("the connection is of another kind")))?;
    Ok(ByteStream::new(Rewind::new(io.into_inner(), read_buf), Role::Client))
}

/// A connection to kas, or to a proxy before it.
enum Stream {
    Plain(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

macro_rules! each {
    ($self:expr, $stream:ident => $body:expr) => {
        match $self.get_mut() {
            Stream::Plain($stream) => $body,
            Stream::Tls($stream) => $body,
        }
    };
}

impl AsyncRead for Stream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        each!(self, stream => Pin::new(stream).poll_read(cx, buf))
    }
}

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        each!(self, stream => Pin::new(stream).poll_write(cx, buf))
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        each!(self, stream => Pin::new(stream).poll_flush(cx))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        each!(self, stream => Pin::new(stream).poll_shutdown(cx))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        each!(self, stream => Pin::new(stream).poll_write_vectored(cx, bufs))
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Self::Plain(stream) => stream.is_write_vectored(),
            Self::Tls(stream) => stream.is_write_vectored(),
        }
    }
}

async fn drive(connection: impl Future<Output = hyper::Result<()>>) {
    if let Err(error) = connection.await {
        tracing::debug!(error = %error, "connection to kas ended");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unused_addresses_come_first_and_in_every_order() {
        let address = |n: u8| SocketAddr::from(([10, 0, 0, n], 8150));
        let six = SocketAddr::from(([0, 0, 0, 0, 0, 0, 0, 1], 8150));
        let avoid = Avoid { used: vec![address(1)], lost: vec![address(2), address(1)] };
        let mut firsts = std::collections::BTreeSet::new();
        for _ in 0..100 {
            let order = avoid.order([1, 2, 3, 4, 3].map(address).into_iter().chain([six]));
            firsts.insert(order[0]);
            assert_eq!(order[2..], [six, address(2), address(1)]);
        }
        assert_eq!(firsts.into_iter().collect::<Vec<_>>(), [address(3), address(4)]);
    }

    #[tokio::test]
    async fn address_that_refuses_is_left_for_the_next() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let open = listener.local_addr().unwrap();
        // A port that was just free, and is ours to leave closed.
        let closed = tokio::net::TcpListener::bind("127.0.0.2:0").await.unwrap().local_addr().unwrap();
        let stream = connect_first(&[closed, open]).await.unwrap();
        assert_eq!(stream.peer_addr().unwrap(), open);
        assert!(connect_first(&[closed]).await.is_err());
        assert_eq!(connect_first(&[]).await.unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn addresses_of_14_1_are_read() {
        for (text, shown) in [
            ("grpc://127.0.0.1:8150", "grpc://127.0.0.1:8150"),
            ("grpcs://kas.example.com", "grpcs://kas.example.com:443"),
            ("grpcs://kas.example.com:8150/ignored", "grpcs://kas.example.com:8150"),
            ("grpc://[::1]:8150", "grpc://[::1]:8150"),
            ("ws://127.0.0.1:8150", "ws://127.0.0.1:8150"),
            ("ws://kas", "ws://kas:80"),
            ("wss://kas.example.com", "wss://kas.example.com:443"),
            ("wss://gitlab:444/-/kubernetes-agent/#x", "wss://gitlab:444/-/kubernetes-agent/"),
            ("wss://kas?token=secret", "wss://kas:443"),
        ] {
            assert_eq!(text.parse::<KasAddress>().unwrap().to_string(), shown);
        }
        for (text, part) in [
            ("http://kas", "unsupported scheme in GitLab Kubernetes Agent Server address: \"http\""),
            ("kas:8150", "expected grpc://host:port"),
            ("grpc://kas", "expected grpc://host:port"),
            ("grpc://", "expected grpc://host:port"),
            ("grpc://user@kas:1", "expected grpc://host:port"),
            ("wss://user@kas", "expected grpc://host:port"),
            ("wss:///path", "expected grpc://host:port"),
            ("https://kas", "ws://host or wss://host"),
        ] {
            assert!(text.parse::<KasAddress>().unwrap_err().to_string().contains(part), "{text}");
        }
    }
}
