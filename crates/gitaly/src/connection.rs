//! One HTTP/2 connection to a Gitaly.

use std::{io, sync::Arc, time::Duration};

use bytes::Bytes;
use http::{Request, Response, uri::Authority};
use http_body_util::Full;
use hyper::{body::Incoming, client::conn::http2};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use parking_lot::Mutex;
use process::error::chain;
use rand::seq::SliceRandom as _;
use rustls_pki_types::ServerName;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpStream, UnixStream},
    time::Instant,
};
use tokio_rustls::TlsConnector;

use crate::{Address, address::Target};

/// The time for resolving a name, TCP and TLS together.
const CONNECT: Duration = Duration::from_secs(10);
/// A connection without a call is closed after this time. Calls that come more often keep it.
const IDLE: Duration = Duration::from_secs(300);
/// Pings show that the other end is gone. Gitaly closes connections that ping more often than every 10 s.
const PING_INTERVAL: Duration = Duration::from_secs(20);
/// How long a ping may stay unanswered.
const PING_TIMEOUT: Duration = Duration::from_secs(10);
/// What a server may send on one call before we read it, in bytes: more than a message of Gitaly's usual
/// 128 KiB, so that it can write the next one meanwhile.
const STREAM_WINDOW: u32 = 512 * 1024;
/// The same for the whole connection.
const CONNECTION_WINDOW: u32 = 8 << 20;
/// The largest headers or trailers of an answer, in bytes.
const HEADER_LIST: u32 = 64 * 1024;

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DialError {
    /// The name has no address.
    #[error("cannot resolve {0}")]
    Resolve(Box<str>, #[source] io::Error),
    /// Nothing listens there, or the network does not permit it.
    #[error("cannot connect to {0}")]
    Connect(Address, #[source] io::Error),
    /// The host cannot be verified by TLS.
    #[error("{0} is not a name that TLS can verify")]
    Name(Box<str>),
    /// Usually the certificate.
    #[error("TLS with {0} failed")]
    Tls(Address, #[source] io::Error),
    /// It does not speak HTTP/2.
    #[error("{0} does not speak HTTP/2")]
    Http2(Address, #[source] hyper::Error),
    /// It accepts connections and closes them.
    #[error("{0} closes connections at once")]
    Closed(Address),
    /// There was no connection in time.
    #[error("no connection to {0} within {CONNECT:?}")]
    Timeout(Address),
}

trait Duplex: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> Duplex for S {}

/// The calls of a connection.
#[derive(Debug)]
struct Usage {
    open: usize,
    /// When the last one ended.
    last: Instant,
    /// It takes no further calls.
    closed: bool,
}

/// A call that keeps its connection open.
#[derive(Debug)]
pub(crate) struct Using(Arc<Mutex<Usage>>);

impl Drop for Using {
    fn drop(&mut self) {
        let mut usage = self.0.lock();
        usage.open -= 1;
        usage.last = Instant::now();
    }
}

/// A connection. Clones share it. It closes after the last one was dropped and all calls have ended, or when
/// it was not used for [`IDLE`].
#[derive(Clone, Debug)]
pub(crate) struct Connection {
    sender: http2::SendRequest<Full<Bytes>>,
    usage: Arc<Mutex<Usage>>,
    authority: Authority,
    is_tls: bool,
}

impl Connection {
    /// Connects.
    ///
    /// # Cancel safety
    /// Cancel safe: what was begun is closed.
    pub(crate) async fn dial(address: &Address, tls: Arc<rustls::ClientConfig>) -> Result<Self, DialError> {
        tokio::time::timeout(CONNECT, Self::connect(address, tls))
            .await
            .unwrap_or_else(|_| Err(DialError::Timeout(address.clone())))
    }

    async fn connect(address: &Address, tls: Arc<rustls::ClientConfig>) -> Result<Self, DialError> {
        let failed = |error| DialError::Connect(address.clone(), error);
        let localhost = Authority::from_static("localhost");
        match &address.target {
            Target::Unix(path) => {
                let stream = UnixStream::connect(path).await.map_err(failed)?;
                Self::handshake(Box::new(stream), address, localhost, false).await
            }
            Target::Tcp { host, port, tls: is_tls, spread } => {
                let shown =
                    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") };
                let authority = Authority::try_from(shown).unwrap_or(localhost);
                let stream = tcp(host, *port, *spread, address).await?;
                stream.set_nodelay(true).map_err(failed)?;
                if !is_tls {
                    return Self::handshake(Box::new(stream), address, authority, false).await;
                }
                let name =
                    ServerName::try_from(host.to_string()).map_err(|_| DialError::Name(host.clone()))?;
                let stream = TlsConnector::from(tls)
                    .connect(name, stream)
                    .await
                    .map_err(|error| DialError::Tls(address.clone(), error))?;
                Self::handshake(Box::new(stream), address, authority, true).await
            }
        }
    }

    async fn handshake(
        stream: Box<dyn Duplex>,
        address: &Address,
        authority: Authority,
        is_tls: bool,
    ) -> Result<Self, DialError> {
        let (sender, connection) = http2::Builder::new(TokioExecutor::new())
            .timer(TokioTimer::new())
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .max_header_list_size(HEADER_LIST)
            .keep_alive_interval(PING_INTERVAL)
            .keep_alive_timeout(PING_TIMEOUT)
            .keep_alive_while_idle(true)
            .handshake(TokioIo::new(stream))
            .await
            .map_err(|error| DialError::Http2(address.clone(), error))?;
        let usage = Arc::new(Mutex::new(Usage { open: 0, last: Instant::now(), closed: false }));
        let (shared, address) = (Arc::clone(&usage), address.clone());
        tokio::spawn(async move {
            tokio::select! {
                ended = connection => {
                    shared.lock().closed = true;
                    if let Err(error) = ended {
                        tracing::debug!(gitaly = %address, error = chain(&error), "the connection ended");
                    }
                }
                () = unused(&shared) => {}
            }
        });
        Ok(Self { sender, usage, authority, is_tls })
    }

    /// Begins a call. `None`: the connection takes no further ones.
    pub(crate) fn begin(&self) -> Option<Using> {
        let mut usage = self.usage.lock();
        if usage.closed || self.sender.is_closed() {
            return None;
        }
        usage.open += 1;
        Some(Using(Arc::clone(&self.usage)))
    }

    /// Whether no call is open. A closed one has none.
    pub(crate) fn is_unused(&self) -> bool {
        let usage = self.usage.lock();
        usage.closed || usage.open == 0 || self.sender.is_closed()
    }

    /// Returns the authority of requests, and whether TLS is used.
    pub(crate) fn target(&self) -> (&Authority, bool) {
        (&self.authority, self.is_tls)
    }

    /// Waits until the server accepts a call.
    ///
    /// # Errors
    /// The connection has ended, or accepts no new calls: nothing was sent.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub(crate) async fn ready(&mut self) -> hyper::Result<()> {
        self.sender.ready().await
    }

    /// Sends a request and waits for the headers of its response.
    ///
    /// # Cancel safety
    /// Dropping the future resets the stream.
    pub(crate) async fn send(&mut self, request: Request<Full<Bytes>>) -> hyper::Result<Response<Incoming>> {
        self.sender.send_request(request).await
    }
}

/// Returns when the connection was not used for [`IDLE`], and marks it as closed.
async fn unused(usage: &Mutex<Usage>) {
    loop {
        let until = {
            let mut usage = usage.lock();
            let until = if usage.open == 0 { usage.last + IDLE } else { Instant::now() + IDLE };
            if until <= Instant::now() {
                usage.closed = true;
                return;
            }
            until
        };
        tokio::time::sleep_until(until).await;
    }
}

async fn tcp(host: &str, port: u16, spread: bool, address: &Address) -> Result<TcpStream, DialError> {
    let resolve = |error| DialError::Resolve(host.into(), error);
    let mut addresses: Vec<_> = tokio::net::lookup_host((host, port)).await.map_err(resolve)?.collect();
    if spread {
        addresses.shuffle(&mut rand::rng());
    }
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    for target in addresses {
        match TcpStream::connect(target).await {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(DialError::Connect(address.clone(), last))
}
