//! From an address of kas to an HTTP/2 connection, every limit set explicitly.

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use http::uri::{Authority, Scheme};
use hyper::client::conn::http2;
use hyper_util::rt::{TokioIo, TokioTimer};
use runtime::http2::{FRAME, HEADER_LIST, STREAM_WINDOW, UNLIMITED_WINDOW};
use rustls::pki_types::ServerName;
use tokio::net::TcpStream;
use tokio_util::sync::{CancellationToken, DropGuard};

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
}

/// Why a text is not an address of kas.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    /// Another scheme; in the words of 14.1.
    #[error(
        "unsupported scheme in GitLab Kubernetes Agent Server address: {0:?}; use grpc://host:port or grpcs://host:port"
    )]
    Scheme(String),
    /// No host, or no port.
    #[error("expected grpc://host:port or grpcs://host:port, got {0:?}")]
    Shape(String),
}

impl std::str::FromStr for KasAddress {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        let shape = || AddressError::Shape(text.to_owned());
        let (scheme, rest) = text.split_once("://").ok_or_else(shape)?;
        let tls = match scheme {
            "grpc" => false,
            "grpcs" => true,
            other => return Err(AddressError::Scheme(other.to_owned())),
        };
        // Only host and port of the URL are used, as in 14.1.
        let authority: Authority = rest.split('/').next().unwrap_or_default().parse().map_err(|_| shape())?;
        let authority = match (authority.port_u16(), tls) {
            (Some(_), _) => authority,
            (None, true) => format!("{authority}:443").parse().map_err(|_| shape())?,
            (None, false) => return Err(shape()),
        };
        if authority.host().is_empty() || authority.as_str().contains('@') {
            return Err(shape());
        }
        Ok(Self { authority, tls })
    }
}

impl std::fmt::Display for KasAddress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}://{}", if self.tls { "grpcs" } else { "grpc" }, self.authority)
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
    /// This end's own address.
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
    let mut builder = http2::Builder::new(tasks);
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
    let (sender, driver) = if address.tls {
        let host = address.authority.host().trim_start_matches('[').trim_end_matches(']').to_owned();
        let name = ServerName::try_from(host.clone()).map_err(|_| DialError::Name(host))?;
        let stream = tokio_rustls::TlsConnector::from(Arc::clone(tls))
            .connect(name, stream)
            .await
            .map_err(|source| DialError::Tls { address: address.clone(), source })?;
        let (sender, connection) = builder.handshake(TokioIo::new(stream)).await.map_err(http2)?;
        (sender, tokio::spawn(drive(connection)))
    } else {
        let (sender, connection) = builder.handshake(TokioIo::new(stream)).await.map_err(http2)?;
        (sender, tokio::spawn(drive(connection)))
    };
    let scheme = if address.tls { Scheme::HTTPS } else { Scheme::HTTP };
    Ok(Link { sender, local, peer, scheme, authority: address.authority.clone(), driver, guard })
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
        ] {
            assert_eq!(text.parse::<KasAddress>().unwrap().to_string(), shown);
        }
        for (text, part) in [
            ("http://kas", "unsupported scheme in GitLab Kubernetes Agent Server address: \"http\""),
            ("kas:8150", "expected grpc://host:port"),
            ("grpc://kas", "expected grpc://host:port"),
            ("grpc://", "expected grpc://host:port"),
            ("grpc://user@kas:1", "expected grpc://host:port"),
        ] {
            assert!(text.parse::<KasAddress>().unwrap_err().to_string().contains(part), "{text}");
        }
    }
}
