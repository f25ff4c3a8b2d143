//! Sockets: TCP and Unix, with and without TLS or WebSocket, and streams of HTTP/2, as one type.

use std::{
    future::poll_fn,
    io,
    mem::MaybeUninit,
    net::SocketAddr,
    path::{Path, PathBuf},
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use rustls_pki_types::CertificateDer;
use socket2::{SockRef, TcpKeepalive};
use tokio::{
    io::{AsyncRead, AsyncWrite, Interest, ReadBuf},
    net::{TcpListener, TcpStream, UnixListener, UnixStream},
    time::Instant,
};
use tokio_rustls::server::TlsStream;
use websocket::{Authorities, ByteStream, Rewind};

mod http2_stream;

pub use http2_stream::Http2Stream;
pub(crate) use http2_stream::StreamEnd;

/// A connection of any kind.
#[derive(Debug)]
pub enum Stream {
    /// Plain TCP.
    Tcp(TcpStream),
    /// A Unix socket.
    Unix(UnixStream),
    /// TLS over TCP; boxed, since its state is large.
    Tls(Box<TlsStream<TcpStream>>),
    /// Any of them, after its first bytes were peeked at.
    Rewound(Box<Rewind<Stream>>),
    /// Any of them inside WebSocket.
    WebSocket(Box<Authorities<ByteStream<Rewind<Stream>>>>),
    /// A stream of HTTP/2.
    Http2(Box<Http2Stream>),
    /// One that the system does not know.
    Other(Box<dyn Duplex>),
}

/// A connection that the system does not know, such as one of a simulated network.
pub trait Duplex: AsyncRead + AsyncWrite + std::fmt::Debug + Send + Sync + Unpin + 'static {}

impl<T: AsyncRead + AsyncWrite + std::fmt::Debug + Send + Sync + Unpin + 'static> Duplex for T {}

websocket::read_through!(
    [] Stream, stream in
    Self::Tcp(stream),
    Self::Unix(stream),
    Self::Tls(stream),
    Self::Rewound(stream),
    Self::WebSocket(stream),
    Self::Http2(stream),
    Self::Other(stream),
);
websocket::write_through!(
    [] Stream, stream in
    Self::Tcp(stream),
    Self::Unix(stream),
    Self::Tls(stream),
    Self::Rewound(stream),
    Self::WebSocket(stream),
    Self::Http2(stream),
    Self::Other(stream),
);

impl Stream {
    /// Waits until the peer has sent something or closed. Returns at once if some of it was read before.
    ///
    /// # Errors
    /// Those of the socket.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub(crate) async fn speaks(&self) -> io::Result<()> {
        match self {
            // Peeked at, since the runtime considers a socket that was just accepted as readable.
            Self::Tcp(stream) => stream.peek(&mut [0]).await.map(drop),
            Self::Unix(stream) => {
                let peek = || SockRef::from(stream).peek(&mut [MaybeUninit::uninit()]).map(drop);
                stream.async_io(Interest::READABLE, peek).await
            }
            Self::Tls(_) | Self::Rewound(_) | Self::WebSocket(_) | Self::Http2(_) | Self::Other(_) => Ok(()),
        }
    }
}

impl Stream {
    /// Returns the certificates that the client has presented, its own first. TLS has verified them.
    pub(crate) fn peer_certificates(&self) -> Option<Arc<[CertificateDer<'static>]>> {
        match self {
            Self::Tls(stream) => stream.get_ref().1.peer_certificates().map(Into::into),
            Self::Rewound(stream) => stream.get_ref().peer_certificates(),
            Self::Tcp(_) | Self::Unix(_) | Self::WebSocket(_) | Self::Http2(_) | Self::Other(_) => None,
        }
    }

    /// Makes the connection end with RST when it is closed, so that the peer cannot take that for a regular
    /// end. What was written and has not been sent yet is discarded. A Unix socket has no such end. A stream
    /// of HTTP/2 ends with RST_STREAM.
    pub fn reset_on_close(&self) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => stream.set_zero_linger(),
            Self::Tls(stream) => stream.get_ref().0.set_zero_linger(),
            Self::Rewound(stream) => stream.get_ref().reset_on_close(),
            Self::Http2(stream) => {
                stream.reset_on_close();
                Ok(())
            }
            Self::Unix(_) | Self::WebSocket(_) | Self::Other(_) => Ok(()),
        }
    }

    /// Whether it is known, without reading or writing, that the peer is gone. Only a stream of HTTP/2 can
    /// know that.
    pub fn is_broken(&self) -> bool {
        match self {
            Self::Http2(stream) => stream.is_broken(),
            Self::Tcp(_)
            | Self::Unix(_)
            | Self::Tls(_)
            | Self::Rewound(_)
            | Self::WebSocket(_)
            | Self::Other(_) => false,
        }
    }

    /// Makes the system probe an idle connection, so that reading from it fails within about a minute after
    /// its peer is gone.
    ///
    /// There is no limit on how long written bytes may stay unacknowledged: it would also end a connection
    /// whose peer does not read for a while. A stream of HTTP/2 needs no probes, since its connection has its
    /// own.
    pub fn probe_peer(&self) -> io::Result<()> {
        let socket = match self {
            Self::Tcp(stream) => SockRef::from(stream),
            Self::Tls(stream) => SockRef::from(stream.get_ref().0),
            Self::Rewound(stream) => return stream.get_ref().probe_peer(),
            Self::Unix(_) | Self::WebSocket(_) | Self::Http2(_) | Self::Other(_) => return Ok(()),
        };
        let (time, interval, retries) = PROBES;
        let probes = TcpKeepalive::new().with_time(time).with_interval(interval).with_retries(retries);
        socket.set_tcp_keepalive(&probes)
    }
}

/// The idle time before the first probe of a peer, the interval of the probes, and their number.
const PROBES: (Duration, Duration, u32) = (Duration::from_secs(15), Duration::from_secs(15), 3);

/// How many bytes of a connection the system holds before it sends them. What is written later, such as a
/// keystroke for `kubectl exec`, waits behind them, also behind those of a file that another stream copies.
/// With fewer, a fast connection waits for the process. With more, the keystroke waits longer: 8 KiB take
/// 6.5 ms at 10 Mbit/s.
const UNSENT: u32 = 8 * 1024;

/// Sets up a connection that carries many streams, small ones beside large ones: small writes are sent at
/// once, and little waits in the system, where HTTP/2 can put nothing before it.
///
/// # Errors
/// If small writes cannot be sent at once. That the system has no limit for unsent bytes is no error: it
/// costs only time.
pub fn share_fairly(stream: &TcpStream) -> io::Result<()> {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    if let Err(error) = SockRef::from(stream).set_tcp_notsent_lowat(UNSENT) {
        tracing::debug!(error = %error, "the system does not limit the unsent bytes of a connection");
    }
    stream.set_nodelay(true)
}

/// Bytes that an admitted connection may read in one step: some large frames.
pub(crate) const ADMITTED_QUOTA: usize = 256 * 1024;
/// Bytes that any other connection may read in one step: a few requests. So a connection with many invalid
/// requests is closed before most are read, and one step costs as much as a valid request.
pub(crate) const UNADMITTED_QUOTA: usize = 1024;

/// The bytes that a connection may still read in its step; shared by the stream and its scheduler.
#[derive(Debug, Default)]
pub(crate) struct ReadQuota(AtomicUsize);

impl ReadQuota {
    /// Begins a step.
    pub(crate) fn begin(&self, bytes: usize) {
        self.0.store(bytes, Ordering::Relaxed);
    }
}

/// A stream that yields to other tasks: once its quota is used up, it is pending until the next step.
///
/// HTTP/2 reads as long as there is data before it hands streams to the service, and the server reads once
/// more for each request. Without a quota, a peer that sends without a pause occupied a thread for 8 MiB at a
/// time, which is the bound of the runtime. In frames of one byte, these took 250 MiB of memory.
pub(crate) struct QuotaStream<S> {
    stream: S,
    quota: Arc<ReadQuota>,
}

impl<S> QuotaStream<S> {
    /// Returns the stream and its quota, which is 0 until the first step begins.
    pub(crate) fn new(stream: S) -> (Self, Arc<ReadQuota>) {
        let quota = Arc::<ReadQuota>::default();
        (Self { stream, quota: Arc::clone(&quota) }, quota)
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for QuotaStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        // One task reads and begins steps, so there is no race.
        let left = self.quota.0.load(Ordering::Relaxed);
        if left == 0 {
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        let (polled, read) = if buf.remaining() <= left {
            let before = buf.filled().len();
            let polled = Pin::new(&mut self.stream).poll_read(cx, buf);
            (polled, buf.filled().len() - before)
        } else {
            let mut rest = ReadBuf::new(buf.initialize_unfilled_to(left));
            let polled = Pin::new(&mut self.stream).poll_read(cx, &mut rest);
            let read = rest.filled().len();
            buf.advance(read);
            (polled, read)
        };
        self.quota.0.store(left.saturating_sub(read), Ordering::Relaxed);
        polled
    }
}

websocket::write_through!([S: AsyncWrite + Unpin] QuotaStream<S>, stream in Self { stream, .. });

/// Where to listen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// `host:port`, resolved when bound; port 0 asks the system for one.
    Tcp(String),
    /// As [`Address::Tcp`], IPv4 only.
    Tcp4(String),
    /// As [`Address::Tcp`], IPv6 only.
    Tcp6(String),
    /// The path of a Unix socket. A stale socket file is replaced, and the own one is removed when the
    /// listener is dropped.
    Unix(PathBuf),
}

impl std::fmt::Display for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Tcp(a) | Self::Tcp4(a) | Self::Tcp6(a) => f.write_str(a),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// A bound listener.
#[derive(Debug)]
pub enum Listener {
    /// TCP.
    Tcp(TcpListener),
    /// A Unix socket, and its file.
    Unix(UnixListener, SocketFile),
    /// One that the system does not know.
    Other(Box<dyn Accept>),
}

/// A listener that the system does not know, such as one of a simulated network.
pub trait Accept: std::fmt::Debug + Send + Sync + 'static {
    /// Returns its address.
    fn local_addr(&self) -> SocketAddr;

    /// Accepts the next connection. Returns it with the address of its other end.
    fn poll_accept(&self, cx: &mut Context<'_>) -> Poll<io::Result<(Box<dyn Duplex>, SocketAddr)>>;
}

/// The file of a Unix socket. Removed on drop, unless another file has replaced it.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    /// Device and inode; `None`: they could not be read, so the file is not removed.
    identity: Option<(u64, u64)>,
}

impl SocketFile {
    /// Remembers the file at `path`.
    fn at(path: &Path) -> Self {
        Self { path: path.to_owned(), identity: Self::identity(path) }
    }

    fn identity(path: &Path) -> Option<(u64, u64)> {
        use std::os::unix::fs::MetadataExt as _;
        std::fs::symlink_metadata(path).ok().map(|file| (file.dev(), file.ino()))
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if self.identity.is_some()
            && Self::identity(&self.path) == self.identity
            && let Err(error) = std::fs::remove_file(&self.path)
        {
            // Harmless: the next process replaces it.
            tracing::debug!(path = %self.path.display(), error = %error, "cannot remove the socket file");
        }
    }
}

/// Connections that may wait to be accepted. Ten thousand agents that reconnect at once must not get resets.
const BACKLOG: i32 = 16 * 1024;

impl Listener {
    /// Binds the port; nothing is accepted yet.
    ///
    /// # Errors
    /// If the name does not resolve, or the port is in use.
    pub async fn bind(address: &Address) -> io::Result<Self> {
        let (text, family) = match address {
            Address::Unix(path) => {
                use std::os::unix::fs::FileTypeExt as _;
                if std::fs::metadata(path).is_ok_and(|m| m.file_type().is_socket())
                    && std::os::unix::net::UnixStream::connect(path).is_err()
                {
                    std::fs::remove_file(path)?;
                }
                return UnixListener::bind(path).map(|listener| Self::Unix(listener, SocketFile::at(path)));
            }
            Address::Tcp(text) => (text, None),
            Address::Tcp4(text) => (text, Some(true)),
            Address::Tcp6(text) => (text, Some(false)),
        };
        let socket = first(text, family, |addr| {
            let socket = bound(addr)?;
            socket.listen(BACKLOG)?;
            Ok(socket)
        });
        TcpListener::from_std(socket.await?.into()).map(Self::Tcp)
    }

    /// Whether [`Listener::bind`] would bind a port of TCP now. The port is not taken for it: another process
    /// that binds it meanwhile can.
    ///
    /// # Errors
    /// Those of [`Listener::bind`].
    pub async fn can_bind(address: &str) -> io::Result<()> {
        // A socket that does not listen keeps nobody from listening, thanks to SO_REUSEADDR.
        first(address, None, bound).await.map(drop)
    }

    /// Returns the bound address; `None` for a Unix socket.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        match self {
            Self::Tcp(listener) => listener.local_addr().ok(),
            Self::Unix(..) => None,
            Self::Other(listener) => Some(listener.local_addr()),
        }
    }

    /// Accepts the next connection.
    ///
    /// # Errors
    /// Those of the system; the listener stays usable.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn accept(&self) -> io::Result<(Stream, Option<SocketAddr>)> {
        #[cfg(test)]
        if let Some(error) = accept_errors::next() {
            return Err(error);
        }
        match self {
            Self::Tcp(listener) => {
                let (stream, peer) = listener.accept().await?;
                // A socket that is already reset may refuse it; then reading fails.
                let _ = share_fairly(&stream);
                Ok((Stream::Tcp(stream), Some(peer)))
            }
            Self::Unix(listener, _) => Ok((Stream::Unix(listener.accept().await?.0), None)),
            Self::Other(listener) => {
                let (stream, peer) = poll_fn(|cx| listener.poll_accept(cx)).await?;
                Ok((Stream::Other(stream), Some(peer)))
            }
        }
    }
}

/// The pause after accepting failed: short, since peers wait meanwhile, but long enough to cost little CPU.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// How often a lasting failure to accept is logged.
const ACCEPT_WARN_INTERVAL: Duration = Duration::from_secs(10);

/// Handles failures to accept, so that an accept loop neither ends, nor spins, nor fills the log.
#[derive(Debug, Default)]
pub(crate) struct AcceptFailures {
    warned: Option<Instant>,
    unreported: u64,
}

impl AcceptFailures {
    /// Logs the failure, with a rate limit, and waits before the next attempt. Returns false if the cause is
    /// a peer that closed before it was accepted.
    pub(crate) async fn take(&mut self, listener: &Listener, error: &io::Error) -> bool {
        use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset, Interrupted};
        if matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset | Interrupted) {
            return false;
        }
        self.unreported += 1;
        if self.warned.is_none_or(|warned| warned.elapsed() >= ACCEPT_WARN_INTERVAL) {
            let address = listener.local_addr().map(|address| address.to_string());
            tracing::warn!(
                error = %error,
                address,
                failures = self.unreported,
                "cannot accept connections"
            );
            self.warned = Some(Instant::now());
            self.unreported = 0;
        }
        tokio::time::sleep(ACCEPT_PAUSE).await;
        true
    }
}

/// Returns a socket for the first address of a name for which `make` succeeds, of one family if that is
/// given.
async fn first(
    text: &str,
    is_v4: Option<bool>,
    make: impl Fn(SocketAddr) -> io::Result<socket2::Socket>,
) -> io::Result<socket2::Socket> {
    // `:8150` means every interface, as in Go.
    let text = if text.starts_with(':') { format!("[::]{text}") } else { text.to_owned() };
    let mut last = io::Error::new(io::ErrorKind::AddrNotAvailable, "the name has no address of this family");
    for addr in tokio::net::lookup_host(text).await? {
        if is_v4.is_some_and(|v4| v4 != addr.is_ipv4()) {
            continue;
        }
        match make(addr) {
            Ok(socket) => return Ok(socket),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Returns a socket of TCP with this address, which does not listen yet.
fn bound(addr: SocketAddr) -> io::Result<socket2::Socket> {
    let socket = socket2::Socket::new(
        socket2::Domain::for_address(addr),
        socket2::Type::STREAM.nonblocking(),
        Some(socket2::Protocol::TCP),
    )?;
    socket.set_reuse_address(true)?;
    if addr.is_ipv6() {
        socket.set_only_v6(false)?;
    }
    socket.bind(&addr.into())?;
    Ok(socket)
}

/// Errors that tests put before the next connections of this thread.
#[cfg(test)]
pub(crate) mod accept_errors {
    use std::{cell::RefCell, collections::VecDeque, io};

    thread_local! {
        static NEXT: RefCell<VecDeque<i32>> = const { RefCell::new(VecDeque::new()) };
    }

    /// The next calls of `accept` fail with these errors of the system.
    pub(crate) fn put(errors: &[i32]) {
        NEXT.with_borrow_mut(|next| next.extend(errors));
    }

    /// How many are left.
    pub(crate) fn left() -> usize {
        NEXT.with_borrow(VecDeque::len)
    }

    pub(super) fn next() -> Option<io::Error> {
        NEXT.with_borrow_mut(VecDeque::pop_front).map(io::Error::from_raw_os_error)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncReadExt as _;

    use super::*;

    #[tokio::test]
    async fn a_port_is_tried_without_being_taken() {
        let free = Listener::bind(&Address::Tcp("127.0.0.1:0".into())).await.unwrap();
        let address = free.local_addr().unwrap();
        let error = Listener::can_bind(&address.to_string()).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        drop(free);
        // While the port is being tried, another process can bind it and listen.
        let tried = bound(address).unwrap();
        let listener = Listener::bind(&Address::Tcp(address.to_string())).await.unwrap();
        assert_eq!(listener.local_addr(), Some(address));
        drop((tried, listener));
        Listener::can_bind(&address.to_string()).await.unwrap();
        // An address of no machine.
        let error = Listener::can_bind("192.0.2.1:0").await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AddrNotAvailable);
    }

    #[tokio::test]
    async fn both_ends_of_a_connection_limit_what_the_system_holds_unsent() {
        let listener = Listener::bind(&Address::Tcp("127.0.0.1:0".into())).await.unwrap();
        let dialled = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        assert_ne!(SockRef::from(&dialled).tcp_notsent_lowat().unwrap(), UNSENT);
        share_fairly(&dialled).unwrap();
        let (Stream::Tcp(accepted), _) = listener.accept().await.unwrap() else { panic!("it is TCP") };
        for end in [&dialled, &accepted] {
            assert_eq!(SockRef::from(end).tcp_notsent_lowat().unwrap(), UNSENT);
            assert!(end.nodelay().unwrap());
        }
    }

    #[tokio::test]
    async fn only_the_own_file_of_a_unix_socket_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let address = Address::Unix(path.clone());
        let first = Listener::bind(&address).await.unwrap();
        assert!(path.exists());
        drop(first);
        assert!(!path.exists());
        let second = Listener::bind(&address).await.unwrap();
        // Created while the first exists, so that the inode differs.
        let other = dir.path().join("other");
        let _third = std::os::unix::net::UnixListener::bind(&other).unwrap();
        std::fs::rename(&other, &path).unwrap();
        drop(second);
        assert!(path.exists());
    }

    #[tokio::test]
    async fn a_stream_that_always_has_more_yields_to_other_tasks() {
        let (mut stream, quota) = QuotaStream::new(tokio::io::repeat(7));
        let mut piece = vec![0; 100 * 1024];
        for _ in 0..2 {
            quota.begin(ADMITTED_QUOTA);
            let mut read = 0;
            // Read again and again, as the server does for each request.
            for _ in 0..10 {
                tokio::select! {
                    biased;
                    n = stream.read(&mut piece) => read += n.unwrap(),
                    // Polled only if the stream is pending.
                    () = std::future::ready(()) => {}
                }
            }
            assert_eq!(read, ADMITTED_QUOTA);
        }
    }
}
