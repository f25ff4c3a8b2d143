//! From an address of kas to an HTTP/2 connection, every limit set explicitly.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use http::uri::{Authority, Scheme};
use hyper::client::conn::http2;
use hyper_util::rt::{TokioIo, TokioTimer};
use runtime::http2::{FRAME, HEADER_LIST, STREAM_WINDOW, UNLIMITED_WINDOW};
use rustls::pki_types::ServerName;
use tokio::net::TcpStream;
use tokio_util::sync::{CancellationToken, DropGuard};

/// Connecting and the TLS handshake must be over within this time.
const CONNECT: Duration = Duration::from_secs(10);
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
        source: std::io::Error,
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
        source: std::io::Error,
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

/// Connects.
///
/// # Errors
/// See [`DialError`].
///
/// # Cancel safety
/// Cancel safe: what was begun is closed.
pub async fn dial(address: &KasAddress, tls: &Arc<rustls::ClientConfig>) -> Result<Link, DialError> {
    tokio::time::timeout(CONNECT, connect(address, tls))
        .await
        .map_err(|_| DialError::Timeout(address.clone()))?
}

async fn connect(address: &KasAddress, tls: &Arc<rustls::ClientConfig>) -> Result<Link, DialError> {
    let connect = |source| DialError::Connect { address: address.clone(), source };
    let stream = TcpStream::connect(address.authority.as_str()).await.map_err(connect)?;
    stream.set_nodelay(true).map_err(connect)?;
    let local = stream.local_addr().ok();
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
    Ok(Link { sender, local, scheme, authority: address.authority.clone(), driver, guard })
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
