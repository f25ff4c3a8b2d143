//! Connects to an address of kas over HTTP/2. Every limit is set explicitly.
//!
//! [`Dialer::dial`] does what `agentk doctor` does step by step: it resolves the name, connects over TCP,
//! asks a proxy if there is one, and sets up TLS, WebSocket if the address says so, and HTTP/2.

mod address;
mod headers;
mod stream;

use std::{fmt, future::poll_fn, io, net::SocketAddr, pin::pin, sync::Arc, time::Duration};

use http::{
    HeaderValue, Request, StatusCode, header,
    uri::{Authority, PathAndQuery, Scheme},
};
use http_body_util::Empty;
use hyper::{
    client::conn::{http1, http2},
    upgrade::Parts,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use net::{
    batch::{BatchedWrites, Turns},
    http::{FRAME, HEADER_LIST, STREAM_WINDOW, UNLIMITED_WINDOW},
    proxy::{self, Proxies, Proxy},
};
use rustls::{AlertDescription, pki_types::ServerName};
use tokio::net::TcpStream;
use tokio_util::sync::{CancellationToken, DropGuard};
use websocket::{
    ByteStream, Rewind, Role,
    upgrade::{self, NotUpgraded},
};

pub use self::{
    address::{AddressError, KasAddress, KasAddresses},
    headers::{HeaderError, HeadersError, KasHeader, KasHeaders},
    stream::Stream,
};

/// Connecting, up to and including HTTP/2, must be done within this time.
pub(crate) const CONNECT: Duration = Duration::from_secs(10);
/// If the name has several addresses, one that does not answer within this time is left for the next: a host
/// that is gone does not answer at all. If the time is too short, a slow network looks the same; if it is too
/// long, agents wait.
const CONNECT_ONE: Duration = Duration::from_secs(3);
/// A kas of GitLab answers pings that are less than 20 s apart with GOAWAY.
const KEEPALIVE: Duration = Duration::from_secs(25);
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(10);

/// Why connecting failed.
#[derive(Debug, thiserror::Error)]
pub enum DialError {
    /// The name does not resolve, nothing listens there, or the network fails.
    #[error("cannot connect to {address}")]
    Connect {
        /// The address.
        address: KasAddress,
        /// The cause.
        source: io::Error,
    },
    /// The proxy settings in the environment are invalid.
    #[error("the proxy for {address} cannot be used")]
    Proxies {
        /// The address.
        address: KasAddress,
        /// The cause.
        source: proxy::Error,
    },
    /// The proxy from the environment cannot be reached.
    #[error("cannot connect to the proxy {proxy} that {variable} names for {address}")]
    ConnectProxy {
        /// The address.
        address: KasAddress,
        /// The proxy.
        proxy: String,
        /// The variable that names it.
        variable: &'static str,
        /// The cause.
        source: io::Error,
    },
    /// The proxy does not connect to kas.
    #[error("the proxy did not connect to {address}")]
    Refused {
        /// The address.
        address: KasAddress,
        /// The cause.
        source: proxy::Refused,
    },
    /// The host of the address cannot be the name of a certificate.
    #[error("{0} is not a name that TLS can verify")]
    Name(String),
    /// TLS failed: usually the certificate.
    #[error("TLS with {address} failed")]
    Tls {
        /// The address.
        address: KasAddress,
        /// The cause.
        source: io::Error,
    },
    /// The WebSocket handshake was not answered.
    #[error("{address} did not answer the WebSocket handshake")]
    Http1 {
        /// The address.
        address: KasAddress,
        /// The cause.
        source: hyper::Error,
    },
    /// The WebSocket handshake was rejected, by kas or by a proxy in between.
    #[error("no WebSocket connection to {address}")]
    Upgrade {
        /// The address.
        address: KasAddress,
        /// The server that answered, according to its headers.
        server: Option<String>,
        /// The cause.
        source: NotUpgraded,
    },
    /// The other side does not speak HTTP/2.
    #[error("{address} does not speak HTTP/2")]
    Http2 {
        /// The address.
        address: KasAddress,
        /// The cause.
        source: hyper::Error,
    },
    /// A step took too long.
    #[error("no connection to {address} within 10 s: {step}")]
    Timeout {
        /// The address.
        address: KasAddress,
        /// The step that was not completed.
        step: Step,
    },
}

impl DialError {
    /// Whether the failure may come from a proxy that does not support HTTP/2, or WebSocket, and that may
    /// pass the other one. Wrong credentials, names and certificates are not such failures.
    pub fn may_be_proxy(&self) -> bool {
        match self {
            Self::Http1 { .. } | Self::Http2 { .. } => true,
            Self::Upgrade { source: NotUpgraded::Status(status), .. } => !is_authentication(*status),
            Self::Upgrade { .. } => true,
            Self::Refused { source: proxy::Refused::Status { status, .. }, .. } => {
                !is_authentication(*status)
            }
            Self::Refused { source: proxy::Refused::Answer { .. }, .. } => true,
            Self::Refused { source: proxy::Refused::Credentials { .. }, .. } => false,
            Self::Tls { source, .. } => no_common_protocol(source),
            Self::Timeout { step, .. } => *step == Step::Upgrade,
            Self::Connect { .. } | Self::ConnectProxy { .. } | Self::Proxies { .. } | Self::Name(_) => false,
        }
    }
}

/// Whether an HTTP status says that credentials are missing or wrong, which would be so on every route.
pub(crate) fn is_authentication(status: StatusCode) -> bool {
    matches!(
        status,
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN | StatusCode::PROXY_AUTHENTICATION_REQUIRED
    )
}

/// Whether TLS failed because the server supports none of the offered protocols.
pub(crate) fn no_common_protocol(error: &io::Error) -> bool {
    let error = error.get_ref().and_then(|error| error.downcast_ref::<rustls::Error>());
    matches!(
        error,
        Some(
            rustls::Error::AlertReceived(AlertDescription::NoApplicationProtocol)
                | rustls::Error::NoApplicationProtocol
        )
    )
}

/// The steps of connecting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)] // the names say it
pub enum Step {
    Name,
    Tcp,
    Proxy,
    Tls,
    Upgrade,
    Http2,
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Name => "the name was not resolved",
            Self::Tcp => "no TCP connection was accepted",
            Self::Proxy => "the proxy did not answer CONNECT",
            Self::Tls => "the TLS handshake was not answered",
            Self::Upgrade => "the WebSocket handshake was not answered",
            Self::Http2 => "the HTTP/2 handshake was not answered",
        })
    }
}

/// An HTTP/2 connection to kas.
#[derive(Debug)]
pub struct Link {
    /// Opens streams.
    pub sender: http2::SendRequest<grpc::Body>,
    /// The local address. `None` inside WebSocket: there, pings count for the idle timers of proxies, so kas
    /// need not know whether there is a proxy.
    pub local: Option<SocketAddr>,
    /// The remote address: of kas or of a load balancer.
    pub peer: Option<SocketAddr>,
    /// For request URIs.
    pub scheme: Scheme,
    /// For request URIs.
    pub authority: Authority,
    /// Headers of every call, for proxies in between.
    pub headers: KasHeaders,
    /// Ends when no more streams can be opened: the connection broke, or kas sent GOAWAY. Open streams may
    /// continue.
    pub driver: tokio::task::JoinHandle<()>,
    /// Closes the connection and all its streams on drop.
    pub guard: DropGuard,
}

/// Runs the tasks of the connection until the link is dropped. hyper spawns tasks for the connection and for
/// each request body, besides [`Link::driver`].
#[derive(Clone, Debug)]
struct LinkTasks {
    closed: CancellationToken,
    turns: Turns<Stream>,
}

impl<F> hyper::rt::Executor<F> for LinkTasks
where
    F: Future + Send + 'static,
    F::Output: Send,
{
    fn execute(&self, future: F) {
        let Self { closed, turns } = self.clone();
        tokio::spawn(async move {
            let mut future = pin!(future);
            // Most of the tasks write nothing, and the one that drives the connection is not known here.
            let future = poll_fn(|cx| {
                let polled = future.as_mut().poll(cx);
                turns.end();
                polled
            });
            tokio::select! {
                _ = future => {}
                () = closed.cancelled() => {}
            }
        });
    }
}

/// Which addresses of a name are tried last.
#[derive(Debug, Clone, Default)]
pub struct Avoid {
    /// Addresses with an open connection: they are tried last.
    pub used: Vec<SocketAddr>,
    /// Addresses whose connection was just lost.
    pub lost: Vec<SocketAddr>,
    /// Whether there is another endpoint to dial. If so, the last address too has only 3 s to accept the
    /// connection.
    pub has_other_endpoints: bool,
}

impl Avoid {
    /// Sorts the addresses of a name: avoided ones last, then the address family that the system prefers
    /// first, then in random order, so that agents are distributed.
    pub(crate) fn order(&self, resolved: impl Iterator<Item = SocketAddr>) -> Vec<SocketAddr> {
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

/// Connects to kas.
#[derive(Debug)]
pub struct Dialer {
    tls: net::tls::Live<rustls::ClientConfig>,
    /// Used instead of the host of the address.
    server_name: Option<Authority>,
    headers: KasHeaders,
    proxies: Proxies,
}

impl Dialer {
    /// Creates a dialer that uses this TLS configuration and these proxies, and adds these headers.
    ///
    /// `server_name` replaces the host of an address in the check of certificates and in requests.
    ///
    /// # Errors
    /// When `server_name` cannot be the name of a certificate.
    pub fn new(
        tls: Arc<rustls::ClientConfig>,
        server_name: Option<&str>,
        headers: KasHeaders,
        proxies: Proxies,
    ) -> Result<Self, DialError> {
        let server_name = server_name
            .map(|name| {
                let wrong = || DialError::Name(name.to_owned());
                let authority: Authority = name.parse().map_err(|_| wrong())?;
                // It has neither a port nor a user.
                ServerName::try_from(strip_brackets(name))
                    .ok()
                    .filter(|_| authority.host() == name)
                    .ok_or_else(wrong)?;
                Ok(authority)
            })
            .transpose()?;
        Ok(Self { tls: tls.into(), server_name, headers, proxies })
    }

    /// Uses another TLS configuration for new connections.
    pub fn trust(&self, tls: Arc<rustls::ClientConfig>) {
        self.tls.replace(tls);
    }

    /// Returns the proxy for an address, from the environment.
    ///
    /// # Errors
    /// When the proxy cannot be used.
    pub fn proxy(&self, address: &KasAddress) -> Result<Option<&Proxy>, DialError> {
        self.proxies
            .of(address.is_secure_for_proxies(), address.host(), address.port())
            .map_err(|source| DialError::Proxies { address: address.clone(), source })
    }

    /// Returns the name that the certificate of an address must have.
    ///
    /// # Errors
    /// When it cannot be the name of a certificate.
    pub fn server_name(&self, address: &KasAddress) -> Result<ServerName<'static>, DialError> {
        let host =
            self.server_name.as_ref().map_or(address.host(), |name| strip_brackets(name.host())).to_owned();
        ServerName::try_from(host.clone()).map_err(|_| DialError::Name(host))
    }

    /// Returns the authority of requests to an address.
    fn authority(&self, address: &KasAddress) -> Authority {
        self.server_name.as_ref().filter(|_| address.tls).unwrap_or(&address.authority).clone()
    }

    /// Returns the TLS configuration for an address.
    fn tls(&self, address: &KasAddress) -> Arc<rustls::ClientConfig> {
        let tls = self.tls.current();
        if address.is_websocket() { net::tls::http1_only(&tls) } else { tls }
    }

    /// Connects to kas. If its name has several addresses, those in `avoid` are tried last.
    ///
    /// # Errors
    /// See [`DialError`].
    ///
    /// # Cancel safety
    /// Cancel safe: the attempt is aborted.
    pub async fn dial(&self, address: &KasAddress, avoid: &Avoid) -> Result<Link, DialError> {
        let mut step = Step::Name;
        tokio::time::timeout(CONNECT, self.connect(address, avoid, &mut step))
            .await
            .map_err(|_| DialError::Timeout { address: address.clone(), step })?
    }

    async fn connect(&self, address: &KasAddress, avoid: &Avoid, step: &mut Step) -> Result<Link, DialError> {
        let proxy = self.proxy(address)?;
        let connect = |source| match proxy {
            None => DialError::Connect { address: address.clone(), source },
            Some(proxy) => DialError::ConnectProxy {
                address: address.clone(),
                proxy: proxy.to_string(),
                variable: proxy.variable(),
                source,
            },
        };
        let (host, port) =
            proxy.map_or((address.host(), address.port()), |proxy| (proxy.host(), proxy.port()));
        let resolved = tokio::net::lookup_host((host, port)).await.map_err(connect)?;
        *step = Step::Tcp;
        let order = avoid.order(resolved);
        let within = if avoid.has_other_endpoints {
            CONNECT_ONE.saturating_mul(u32::try_from(order.len()).unwrap_or(u32::MAX))
        } else {
            CONNECT
        };
        let stream = tokio::time::timeout(within, connect_first(&order))
            .await
            .unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
            .map_err(connect)?;
        net::io::share_fairly(&stream).map_err(connect)?;
        let (local, peer) = (stream.local_addr().ok(), stream.peer_addr().ok());
        let mut stream = Stream::Plain(stream);
        if let Some(proxy) = proxy {
            *step = Step::Proxy;
            stream = self.through(proxy, address, stream).await?;
        }
        if address.tls {
            *step = Step::Tls;
            stream = self.secure(address, stream, self.tls(address)).await?;
        }
        if address.is_websocket() {
            *step = Step::Upgrade;
            let stream = Box::pin(self.upgrade(address, stream)).await?;
            *step = Step::Http2;
            self.link(address, stream, None, peer).await
        } else {
            *step = Step::Http2;
            self.link(address, stream, local, peer).await
        }
    }

    /// Asks the proxy at the other end of `stream` to connect to `address`.
    pub(crate) async fn through(
        &self,
        proxy: &Proxy,
        address: &KasAddress,
        stream: Stream,
    ) -> Result<Stream, DialError> {
        let stream = if proxy.is_tls() {
            let failed = |source| DialError::ConnectProxy {
                address: address.clone(),
                proxy: proxy.to_string(),
                variable: proxy.variable(),
                source,
            };
            let name = ServerName::try_from(proxy.host().to_owned())
                .map_err(|_| DialError::Name(proxy.host().to_owned()))?;
            let tls = tokio_rustls::TlsConnector::from(net::tls::http1_only(&self.tls.current()));
            Stream::Tls(Box::new(tls.connect(name, stream).await.map_err(failed)?))
        } else {
            stream
        };
        let agent = HeaderValue::from_static(user_agent());
        let stream = proxy
            .connect(stream, address.authority.as_str(), agent)
            .await
            .map_err(|source| DialError::Refused { address: address.clone(), source })?;
        Ok(Stream::Proxied(Box::new(stream)))
    }

    /// Sets up TLS on `stream`.
    pub(crate) async fn secure(
        &self,
        address: &KasAddress,
        stream: Stream,
        tls: Arc<rustls::ClientConfig>,
    ) -> Result<Stream, DialError> {
        let connecting = tokio_rustls::TlsConnector::from(tls).connect(self.server_name(address)?, stream);
        let failed = |source| DialError::Tls { address: address.clone(), source };
        Ok(Stream::Tls(Box::new(connecting.await.map_err(failed)?)))
    }

    /// Sets up HTTP/2 on `stream`, which is connected to `address`.
    pub(crate) async fn link(
        &self,
        address: &KasAddress,
        stream: Stream,
        local: Option<SocketAddr>,
        peer: Option<SocketAddr>,
    ) -> Result<Link, DialError> {
        let (stream, turns) = BatchedWrites::new(stream);
        let tasks = LinkTasks { closed: CancellationToken::new(), turns };
        let guard = tasks.closed.clone().drop_guard();
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
            // Callers may cancel any number of requests. With the library's defaults, some hundred cancelled
            // requests would end the connection.
            .max_concurrent_reset_streams(1_000)
            .max_pending_accept_reset_streams(1_000)
            .max_local_error_reset_streams(None);
        let http2 = |source| DialError::Http2 { address: address.clone(), source };
        let (sender, connection) = builder.handshake(TokioIo::new(stream)).await.map_err(http2)?;
        let driver = tokio::spawn(drive(connection));
        // Inside WebSocket, HTTP/2 itself is without TLS, as in 14.1, and proxies read only the handshake's
        // headers.
        let (scheme, headers) = match address.is_websocket() {
            true => (Scheme::HTTP, KasHeaders::default()),
            false if address.tls => (Scheme::HTTPS, self.headers.clone()),
            false => (Scheme::HTTP, self.headers.clone()),
        };
        Ok(Link { sender, local, peer, scheme, authority: self.authority(address), headers, driver, guard })
    }

    /// Performs the WebSocket handshake, and returns the byte stream inside.
    pub(crate) async fn upgrade(&self, address: &KasAddress, stream: Stream) -> Result<Stream, DialError> {
        let http1 = |source| DialError::Http1 { address: address.clone(), source };
        let refused = |source, server| DialError::Upgrade { address: address.clone(), server, source };
        let (mut sender, connection) = http1::Builder::new()
            .max_buf_size(HEADER_LIST as usize)
            .handshake(TokioIo::new(stream))
            .await
            .map_err(http1)?;
        // The task ends with the upgrade, or with this function.
        let mut tasks = tokio::task::JoinSet::new();
        tasks.spawn(connection.with_upgrades());
        let mut request = Request::new(Empty::<bytes::Bytes>::new());
        *request.uri_mut() =
            address.websocket.as_deref().cloned().unwrap_or_else(|| PathAndQuery::from_static("/")).into();
        let headers = request.headers_mut();
        self.headers.add_to(headers);
        // The default port of the scheme is omitted, because some proxies compare the text.
        let own = if address.tls { ":443" } else { ":80" };
        let authority = self.authority(address);
        let host = authority.as_str();
        if let Ok(host) = HeaderValue::from_str(host.strip_suffix(own).unwrap_or(host)) {
            headers.insert(header::HOST, host);
        }
        headers.insert(header::USER_AGENT, HeaderValue::from_static(user_agent()));
        let asked = upgrade::ask(headers);
        let response = sender.send_request(request).await.map_err(http1)?;
        asked.check(&response).map_err(|error| refused(error, server_of(response.headers())))?;
        let upgraded = hyper::upgrade::on(response).await.map_err(http1)?;
        let Parts { io, read_buf, .. } = upgraded
            .downcast::<TokioIo<Stream>>()
            .map_err(|_| refused(NotUpgraded::Answer("unexpected connection type"), None))?;
        let stream = ByteStream::new(Rewind::new(io.into_inner(), read_buf), Role::Client);
        Ok(Stream::WebSocket(Box::new(stream)))
    }
}

/// The user agent of requests to kas.
pub(crate) fn user_agent() -> &'static str {
    static AGENT: std::sync::OnceLock<String> = std::sync::OnceLock::new();
    AGENT.get_or_init(|| format!("agentk/{}/{}", process::version::VERSION, process::version::COMMIT))
}

/// Returns the server that sent or forwarded a response, according to its headers.
pub(crate) fn server_of(headers: &http::HeaderMap) -> Option<String> {
    let said = |name| headers.get(name).and_then(|value| value.to_str().ok()).filter(|said| !said.is_empty());
    said(header::SERVER).or_else(|| said(header::VIA)).map(|said| said.chars().take(80).collect())
}

fn strip_brackets(host: &str) -> &str {
    host.trim_start_matches('[').trim_end_matches(']')
}

/// Connects to the first address that answers.
pub(crate) async fn connect_first(addresses: &[SocketAddr]) -> io::Result<TcpStream> {
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
        let avoid =
            Avoid { used: vec![address(1)], lost: vec![address(2), address(1)], has_other_endpoints: false };
        let mut firsts = std::collections::BTreeSet::new();
        for _ in 0..100 {
            let order = avoid.order([1, 2, 3, 4, 3].map(address).into_iter().chain([six]));
            firsts.insert(order[0]);
            assert_eq!(order[2..], [six, address(2), address(1)]);
        }
        assert_eq!(firsts.into_iter().collect::<Vec<_>>(), [address(3), address(4)]);
    }

    #[tokio::test]
    async fn next_address_is_tried_when_one_refuses_the_connection() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let open = listener.local_addr().unwrap();
        // A port that was just free, so nothing listens there.
        let closed = tokio::net::TcpListener::bind("127.0.0.2:0").await.unwrap().local_addr().unwrap();
        let stream = connect_first(&[closed, open]).await.unwrap();
        assert_eq!(stream.peer_addr().unwrap(), open);
        assert!(connect_first(&[closed]).await.is_err());
        assert_eq!(connect_first(&[]).await.unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
