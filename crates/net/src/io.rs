//! Sockets: TCP and Unix, with and without TLS or WebSocket, as one type.

use std::{
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

use socket2::SockRef;
use tokio::{
    io::{AsyncRead, AsyncWrite, Interest, ReadBuf},
    net::{TcpListener, TcpStream, UnixListener, UnixStream},
    time::Instant,
};
use tokio_rustls::server::TlsStream;
use websocket::{Authorities, ByteStream, Rewind};

/// A connection of any kind.
#[derive(Debug)]
pub enum Stream {
    /// Plain TCP.
    Tcp(TcpStream),
    /// A Unix socket.
    Unix(UnixStream),
    /// TLS over TCP, boxed: its state is large.
    Tls(Box<TlsStream<TcpStream>>),
    /// Any of them whose first bytes were looked at.
    Rewound(Box<Rewind<Stream>>),
    /// Any of them inside WebSocket.
    WebSocket(Box<Authorities<ByteStream<Rewind<Stream>>>>),
}

websocket::read_through!(
    [] Stream, stream in
    Self::Tcp(stream),
    Self::Unix(stream),
    Self::Tls(stream),
    Self::Rewound(stream),
    Self::WebSocket(stream),
);
websocket::write_through!(
    [] Stream, stream in
    Self::Tcp(stream),
    Self::Unix(stream),
    Self::Tls(stream),
    Self::Rewound(stream),
    Self::WebSocket(stream),
);

impl Stream {
    /// Waits until the peer has said something, or closed. At once where something of it was read before.
    ///
    /// # Errors
    /// Those of the socket.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub(crate) async fn speaks(&self) -> io::Result<()> {
        match self {
            // Looked at, since the runtime takes a socket that was just accepted for readable.
            Self::Tcp(stream) => stream.peek(&mut [0]).await.map(drop),
            Self::Unix(stream) => {
                let look = || SockRef::from(stream).peek(&mut [MaybeUninit::uninit()]).map(drop);
                stream.async_io(Interest::READABLE, look).await
            }
            Self::Tls(_) | Self::Rewound(_) | Self::WebSocket(_) => Ok(()),
        }
    }
}

/// What a connection that has shown who it is may read in one turn: some large frames.
pub(crate) const TURN: usize = 256 * 1024;
/// And any other one: a few requests, so that one with many bad ones is closed before most of them were
/// looked at, and what one turn of it costs is what a good request costs.
pub(crate) const FIRST_TURNS: usize = 1024;

/// What a connection may still read in its turn, in bytes: shared by who gives turns and the stream.
#[derive(Debug, Default)]
pub(crate) struct Allowance(AtomicUsize);

impl Allowance {
    /// Begins a turn.
    pub(crate) fn begin(&self, bytes: usize) {
        self.0.store(bytes, Ordering::Relaxed);
    }
}

/// A stream that lets others have their turn: what it has read of its allowance it does not give again before
/// the next turn has begun, however often it is asked.
///
/// HTTP/2 reads as long as there is something to read, and only then hands streams to who serves them; and
/// the server reads once more for each request that it has found. A peer that always has something more kept
/// a thread for 8 MiB at a time (which is where the runtime's own bound lies), in which all of it was held:
/// 250 MiB, if it came in frames of one byte.
pub(crate) struct Fair<S> {
    stream: S,
    allowance: Arc<Allowance>,
}

impl<S> Fair<S> {
    /// A stream and its allowance, of which there is nothing until a turn begins.
    pub(crate) fn new(stream: S) -> (Self, Arc<Allowance>) {
        let allowance = Arc::<Allowance>::default();
        (Self { stream, allowance: Arc::clone(&allowance) }, allowance)
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Fair<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        // One task reads and begins turns: nobody comes between.
        let left = self.allowance.0.load(Ordering::Relaxed);
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
        self.allowance.0.store(left.saturating_sub(read), Ordering::Relaxed);
        polled
    }
}

websocket::write_through!([S: AsyncWrite + Unpin] Fair<S>, stream in Self { stream, .. });

/// Where to listen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// `host:port`, resolved when bound; port 0 asks the system for one.
    Tcp(String),
    /// As [`Address::Tcp`], IPv4 only.
    Tcp4(String),
    /// As [`Address::Tcp`], IPv6 only.
    Tcp6(String),
    /// The path of a Unix socket. A stale socket file is replaced, and the own one removed when the listener
    /// drops.
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
}

/// The file of a Unix socket: removed when it drops, unless another one has taken its place.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    /// Device and inode; `None`: they could not be read, so nobody can tell whose file is there.
    identity: Option<(u64, u64)>,
}

impl SocketFile {
    /// Takes the file at `path` for its own.
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
            // No harm: the next process replaces it.
            tracing::debug!(path = %self.path.display(), error = %error, "the socket's file stays behind");
        }
    }
}

/// Connections that may wait to be accepted: a reconnect storm of ten thousand agents must not be
/// answered with resets.
const BACKLOG: i32 = 16 * 1024;

impl Listener {
    /// Takes the port; nothing is accepted yet.
    ///
    /// # Errors
    /// When the name does not resolve or the port is taken.
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
        // `:8150` means every interface, as in Go.
        let text = if text.starts_with(':') { format!("[::]{text}") } else { text.clone() };
        let mut last =
            io::Error::new(io::ErrorKind::AddrNotAvailable, "the name has no address of this family");
        for addr in tokio::net::lookup_host(text).await? {
            if family.is_some_and(|v4| v4 != addr.is_ipv4()) {
                continue;
            }
            match bind_tcp(addr) {
                Ok(listener) => return Ok(Self::Tcp(listener)),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    /// Returns the address taken; `None` for a Unix socket.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        match self {
            Self::Tcp(listener) => listener.local_addr().ok(),
            Self::Unix(..) => None,
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
        match self {
            Self::Tcp(listener) => {
                let (stream, peer) = listener.accept().await?;
                // Small frames must not wait for the peer's acknowledgement. A socket that is already reset
                // may refuse it; whoever reads it finds that out.
                let _ = stream.set_nodelay(true);
                Ok((Stream::Tcp(stream), Some(peer)))
            }
            Self::Unix(listener, _) => Ok((Stream::Unix(listener.accept().await?.0), None)),
        }
    }
}

/// How long nothing is accepted after accepting failed: short, because whoever waits for a descriptor knocks
/// meanwhile; long enough to cost next to nothing.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// A lasting failure to accept is told this often.
const ACCEPT_TOLD: Duration = Duration::from_secs(10);

/// What a loop that accepts does about failures: it must neither end, nor spin, nor fill the log.
#[derive(Debug, Default)]
pub(crate) struct AcceptFailures {
    told: Option<Instant>,
    untold: u64,
}

impl AcceptFailures {
    /// Tells of a failure now and then, and waits before the next attempt. Returns whether the process is to
    /// blame and not a peer that left before it was accepted.
    pub(crate) async fn take(&mut self, listener: &Listener, error: &io::Error) -> bool {
        use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset, Interrupted};
        if matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset | Interrupted) {
            return false;
        }
        self.untold += 1;
        if self.told.is_none_or(|told| told.elapsed() >= ACCEPT_TOLD) {
            let address = listener.local_addr().map(|address| address.to_string());
            tracing::warn!(
                error = %error,
                address,
                failures = self.untold,
                "cannot accept connections"
            );
            self.told = Some(Instant::now());
            self.untold = 0;
        }
        tokio::time::sleep(ACCEPT_PAUSE).await;
        true
    }
}

fn bind_tcp(addr: SocketAddr) -> io::Result<TcpListener> {
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
    socket.listen(BACKLOG)?;
    TcpListener::from_std(socket.into())
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncReadExt as _;

    use super::*;

    #[tokio::test]
    async fn file_of_a_unix_socket_goes_with_its_listener_and_that_of_another_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let address = Address::Unix(path.clone());
        let first = Listener::bind(&address).await.unwrap();
        assert!(path.exists());
        drop(first);
        assert!(!path.exists());
        let second = Listener::bind(&address).await.unwrap();
        // Made beside it, so that no inode comes back.
        let other = dir.path().join("other");
        let _third = std::os::unix::net::UnixListener::bind(&other).unwrap();
        std::fs::rename(&other, &path).unwrap();
        drop(second);
        assert!(path.exists());
    }

    #[tokio::test]
    async fn a_stream_that_always_has_more_gives_others_their_turn() {
        let (mut stream, allowance) = Fair::new(tokio::io::repeat(7));
        let mut piece = vec![0; 100 * 1024];
        for _ in 0..2 {
            allowance.begin(TURN);
            let mut read = 0;
            // Asked again and again, as the server does for each request that it has found.
            for _ in 0..10 {
                tokio::select! {
                    biased;
                    n = stream.read(&mut piece) => read += n.unwrap(),
                    // Looked at only where the stream has nothing for now.
                    () = std::future::ready(()) => {}
                }
            }
            assert_eq!(read, TURN);
        }
    }
}
