//! One HTTP/2 connection to another replica.
//!
//! Uses h2 and not hyper, for two reasons that hyper's client hides: a borrowed tunnel must be reset whatever
//! it waits for, and a stream that was refused before it was processed differs from one that was reset.

use std::{
    future::poll_fn,
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use grpc::{BoxError, Status};
use h2::{Reason, RecvStream, SendStream, client};
use http::{HeaderMap, HeaderValue, Request, Response, Uri, header};
use http_body::{Body, Frame};
use net::{
    batch::BatchedWrites,
    http::{FRAME, HEADER_LIST, PEER, STREAM_WINDOW, StreamReset, UNLIMITED_WINDOW},
    io::Stream,
};
use rustls_pki_types::ServerName;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    sync::watch,
    time::Instant,
};

/// The future of a [`Connector`].
pub type Connecting<'a> = Pin<Box<dyn Future<Output = io::Result<Stream>> + Send + 'a>>;

/// Opens connections to other replicas.
pub trait Connector: Send + Sync + 'static {
    /// Connects to `address` (`host:port`). The error has kind `ConnectionRefused` if nothing listens there.
    ///
    /// # Cancel safety
    /// Dropping the future gives the connection up.
    fn connect<'a>(&'a self, address: &'a str) -> Connecting<'a>;
}

/// Opens connections of TCP.
#[derive(Clone, Copy, Debug)]
pub struct Tcp;

impl Connector for Tcp {
    fn connect<'a>(&'a self, address: &'a str) -> Connecting<'a> {
        Box::pin(async move {
            let stream = TcpStream::connect(address).await?;
            net::io::share_fairly(&stream)?;
            Ok(Stream::Tcp(stream))
        })
    }
}

/// Why a link could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum DialError {
    /// No process listens at the address.
    #[error("nothing listens at {0}")]
    Refused(Arc<str>),
    /// The address cannot be reached, or its name cannot be resolved.
    #[error("cannot connect to {address}")]
    Connect {
        /// Where.
        address: Arc<str>,
        /// Why.
        source: io::Error,
    },
    /// TLS failed, usually because of a certificate.
    #[error("TLS with {address} failed")]
    Tls {
        /// Where.
        address: Arc<str>,
        /// Why.
        source: io::Error,
    },
    /// The other side does not speak HTTP/2.
    #[error("{address} does not speak HTTP/2")]
    Http2 {
        /// Where.
        address: Arc<str>,
        /// Why.
        source: h2::Error,
    },
    /// There was no connection in time.
    #[error("no connection to {address} within {within:?}")]
    Timeout {
        /// Where.
        address: Arc<str>,
        /// The time.
        within: Duration,
    },
}

/// Why a stream failed.
#[derive(Debug, thiserror::Error)]
pub enum CallError {
    /// The peer certainly did not process it.
    #[error("the stream was refused")]
    Refused(#[source] h2::Error),
    /// The link broke, or the stream was reset.
    #[error("the stream broke")]
    Broken(#[source] h2::Error),
}

impl CallError {
    fn of(error: h2::Error) -> Self {
        if error.reason() == Some(Reason::REFUSED_STREAM) && error.is_remote() {
            Self::Refused(error)
        } else {
            Self::Broken(error)
        }
    }
}

/// How a link detects that its other end is gone.
#[derive(Clone, Copy, Debug)]
pub struct Keepalive {
    /// The time between two pings.
    pub interval: Duration,
    /// How long a ping may stay unanswered.
    pub timeout: Duration,
}

/// Between replicas of this project.
const OURS: Keepalive = Keepalive { interval: PEER.keepalive_interval, timeout: PEER.keepalive_timeout };

/// A connection that opens streams. Clones share it. It closes after the last one is dropped and all streams
/// have ended.
#[derive(Clone)]
pub struct Link {
    sender: client::SendRequest<Bytes>,
    authority: http::uri::Authority,
    secure: bool,
    /// False after the connection has ended.
    open: watch::Receiver<bool>,
    /// The peer accepts no new streams: GOAWAY was received.
    closing: Arc<AtomicBool>,
}

impl std::fmt::Debug for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Link").field("authority", &self.authority).finish_non_exhaustive()
    }
}

impl Link {
    /// Connects to `address` (`host:port`), within `within`.
    ///
    /// # Errors
    /// See [`DialError`].
    ///
    /// # Cancel safety
    /// Cancel safe: what was begun is closed.
    pub async fn dial(
        connector: &dyn Connector,
        address: &Arc<str>,
        tls: Option<Arc<rustls::ClientConfig>>,
        within: Duration,
    ) -> Result<Self, DialError> {
        Self::dial_with(connector, address, tls, within, OURS).await
    }

    /// As [`dial`](Self::dial), for a server that allows fewer pings than replicas of this project.
    ///
    /// # Errors
    /// See [`DialError`].
    ///
    /// # Cancel safety
    /// Cancel safe: what was begun is closed.
    pub async fn dial_with(
        connector: &dyn Connector,
        address: &Arc<str>,
        tls: Option<Arc<rustls::ClientConfig>>,
        within: Duration,
        keepalive: Keepalive,
    ) -> Result<Self, DialError> {
        tokio::time::timeout(within, Self::connect(connector, address, tls, keepalive))
            .await
            .unwrap_or_else(|_| Err(DialError::Timeout { address: Arc::clone(address), within }))
    }

    async fn connect(
        connector: &dyn Connector,
        address: &Arc<str>,
        tls: Option<Arc<rustls::ClientConfig>>,
        keepalive: Keepalive,
    ) -> Result<Self, DialError> {
        let connect = |source: io::Error| match source.kind() {
            io::ErrorKind::ConnectionRefused => DialError::Refused(Arc::clone(address)),
            _ => DialError::Connect { address: Arc::clone(address), source },
        };
        let invalid = |why: &'static str| connect(io::Error::new(io::ErrorKind::InvalidInput, why));
        let authority: http::uri::Authority =
            address.parse().map_err(|_| invalid("the address is not host:port"))?;
        let stream = connector.connect(address).await.map_err(connect)?;
        match tls {
            None => Self::handshake(stream, address, authority, false, keepalive).await,
            Some(tls) => {
                let host = authority.host().trim_start_matches('[').trim_end_matches(']').to_owned();
                let name = ServerName::try_from(host)
                    .map_err(|_| invalid("the host is not a name that TLS can verify"))?;
                let stream = tokio_rustls::TlsConnector::from(tls)
                    .connect(name, stream)
                    .await
                    .map_err(|source| DialError::Tls { address: Arc::clone(address), source })?;
                Self::handshake(stream, address, authority, true, keepalive).await
            }
        }
    }

    async fn handshake<T>(
        stream: T,
        address: &Arc<str>,
        authority: http::uri::Authority,
        secure: bool,
        keepalive: Keepalive,
    ) -> Result<Self, DialError>
    where
        T: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let http2 = |source| DialError::Http2 { address: Arc::clone(address), source };
        let (stream, turns) = BatchedWrites::new(stream);
        let (sender, mut connection) = client::Builder::new()
            .initial_window_size(STREAM_WINDOW)
            .initial_connection_window_size(UNLIMITED_WINDOW)
            .max_frame_size(FRAME)
            .max_header_list_size(HEADER_LIST)
            .max_concurrent_reset_streams(1_000)
            .max_local_error_reset_streams(None)
            .enable_push(false)
            .handshake::<_, Bytes>(stream)
            .await
            .map_err(http2)?;
        let ping = connection.ping_pong();
        let (alive, open) = watch::channel(true);
        let peer = Arc::clone(address);
        tokio::spawn(async move {
            let silent = async {
                match ping {
                    Some(ping) => keep_alive(ping, keepalive).await,
                    None => std::future::pending().await,
                }
            };
            let driven = poll_fn(|cx| {
                let polled = Pin::new(&mut connection).poll(cx);
                turns.end();
                polled
            });
            tokio::select! {
                ended = driven => match ended {
                    Ok(()) => {}
                    Err(error) => tracing::debug!(peer = &*peer, error = %error, "the link to a replica ended"),
                },
                () = silent => tracing::info!(peer = &*peer, "a replica does not answer: its link is given up"),
            }
            alive.send_replace(false);
        });
        Ok(Self { sender, authority, secure, open, closing: Arc::default() })
    }

    /// Whether streams can still be opened, as far as is known.
    pub fn is_open(&self) -> bool {
        *self.open.borrow() && !self.closing.load(Ordering::Relaxed)
    }

    async fn sender(&self) -> Result<client::SendRequest<Bytes>, CallError> {
        // Not ready: the connection has ended or accepts no new streams, so nothing was sent.
        self.sender.clone().ready().await.map_err(|error| {
            self.closing.store(true, Ordering::Relaxed);
            CallError::Refused(error)
        })
    }

    /// Returns headers for a call of `path`.
    pub fn request(&self, path: &str, credential: HeaderValue) -> Request<()> {
        let uri = Uri::builder()
            .scheme(if self.secure { "https" } else { "http" })
            .authority(self.authority.clone())
            .path_and_query(path)
            .build()
            .expect("a link's authority and our own paths are legal");
        let mut request = Request::new(());
        *request.method_mut() = http::Method::POST;
        *request.uri_mut() = uri;
        *request.version_mut() = http::Version::HTTP_2;
        let headers = request.headers_mut();
        headers.insert(header::AUTHORIZATION, credential);
        headers.insert(header::CONTENT_TYPE, grpc::CONTENT_TYPE);
        headers.insert(header::TE, HeaderValue::from_static("trailers"));
        #[cfg(any(test, feature = "flaws"))]
        super::records::metadata(headers);
        request
    }

    /// Opens a stream and waits for its response headers, without writing a body.
    ///
    /// # Errors
    /// See [`CallError`].
    ///
    /// # Cancel safety
    /// Dropping the future resets the stream with CANCEL.
    pub async fn open(
        &self,
        request: Request<()>,
    ) -> Result<(Response<RecvStream>, SendStream<Bytes>), CallError> {
        let mut sender = self.sender().await?;
        let (response, send) = sender.send_request(request, false).map_err(CallError::Refused)?;
        let response = response.await.map_err(CallError::of)?;
        Ok((response, send))
    }

    /// Sends one message and returns the response as a body of gRPC frames.
    ///
    /// # Errors
    /// See [`CallError`].
    ///
    /// # Cancel safety
    /// Dropping the future, or the body, resets the stream with CANCEL.
    pub async fn call(&self, request: Request<()>, message: Bytes) -> Result<Response<RecvBody>, CallError> {
        #[cfg(any(test, feature = "flaws"))]
        let message = super::records::message(request.uri().path(), message);
        let mut sender = self.sender().await?;
        let (response, mut send) = sender.send_request(request, false).map_err(CallError::Refused)?;
        // It is smaller than any window, and h2 buffers it until there is window.
        send.send_data(message, true).map_err(CallError::of)?;
        Ok(response.await.map_err(CallError::of)?.map(RecvBody::new))
    }
}

async fn keep_alive(mut ping: h2::PingPong, keepalive: Keepalive) {
    loop {
        tokio::time::sleep(keepalive.interval).await;
        let sent = Instant::now();
        match tokio::time::timeout(keepalive.timeout, ping.ping(h2::Ping::opaque())).await {
            Ok(Ok(_)) => tracing::trace!(rtt = ?sent.elapsed(), "a replica answered"),
            // The task of the connection reports the error.
            Ok(Err(_)) => std::future::pending().await,
            Err(_) => return,
        }
    }
}

/// The body of a response.
#[derive(Debug)]
pub struct RecvBody {
    stream: RecvStream,
    trailers: bool,
}

impl RecvBody {
    /// Wraps a stream.
    pub fn new(stream: RecvStream) -> Self {
        Self { stream, trailers: false }
    }
}

impl Body for RecvBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let this = self.get_mut();
        if this.trailers {
            return Poll::Ready(None);
        }
        if let Some(data) = ready!(this.stream.poll_data(cx)) {
            let data = data?;
            let _ = this.stream.flow_control().release_capacity(data.len());
            return Poll::Ready(Some(Ok(Frame::data(data))));
        }
        let trailers = ready!(this.stream.poll_trailers(cx))?;
        this.trailers = true;
        Poll::Ready(trailers.map(|trailers| Ok(Frame::trailers(trailers))))
    }

    fn is_end_stream(&self) -> bool {
        self.trailers || self.stream.is_end_stream()
    }
}

/// What a borrowed tunnel returns. It ends cleanly only if the owner ends the stream with OK, and fails with
/// every other status of the owner.
#[derive(Debug)]
pub struct LentBody {
    body: RecvBody,
    clean: bool,
    over: bool,
}

impl LentBody {
    /// Wraps the response to a borrow request.
    pub fn new(stream: RecvStream) -> Self {
        Self { body: RecvBody::new(stream), clean: false, over: false }
    }
}

impl Body for LentBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let this = self.get_mut();
        if this.over {
            return Poll::Ready(None);
        }
        let frame = ready!(Pin::new(&mut this.body).poll_frame(cx));
        let trailers: HeaderMap = match frame {
            Some(Ok(frame)) => match frame.into_trailers() {
                Ok(trailers) => trailers,
                Err(data) => return Poll::Ready(Some(Ok(data))),
            },
            Some(Err(error)) => {
                this.over = true;
                return Poll::Ready(Some(Err(error)));
            }
            None => {
                this.over = true;
                return Poll::Ready(None);
            }
        };
        this.over = true;
        match Status::from_headers(&trailers) {
            Some(status) if status.code() == grpc::Code::Ok => {
                this.clean = true;
                Poll::Ready(None)
            }
            Some(status) => Poll::Ready(Some(Err(Box::new(status)))),
            None => Poll::Ready(None),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.clean
    }
}

/// Writes a body into a stream until one of them ends, or until the stream is reset from outside.
///
/// It is first polled by the task of the request. That is enough for a small request, which needs no other
/// task.
pub struct Pump<B> {
    body: B,
    send: SendStream<Bytes>,
    reset: Arc<StreamReset>,
    /// Read, but not written yet.
    data: Option<Bytes>,
    ended: bool,
}

impl<B> std::fmt::Debug for Pump<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pump").field("ended", &self.ended).finish_non_exhaustive()
    }
}

impl<B: Body<Data = Bytes> + Unpin> Pump<B> {
    /// Writes `body` into `send`.
    pub fn new(body: B, send: SendStream<Bytes>, reset: Arc<StreamReset>) -> Self {
        Self { body, send, reset, data: None, ended: false }
    }

    /// Returns the body.
    pub fn body_mut(&mut self) -> &mut B {
        &mut self.body
    }

    /// Reads the next piece. `Err`: the body failed.
    fn poll_body(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Bytes>, ()>> {
        loop {
            match ready!(Pin::new(&mut self.body).poll_frame(cx)) {
                None => return Poll::Ready(Ok(None)),
                Some(Err(_)) => return Poll::Ready(Err(())),
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) if !data.is_empty() => return Poll::Ready(Ok(Some(data))),
                    _ => {}
                },
            }
        }
    }
}

impl<B: Body<Data = Bytes> + Unpin> Future for Pump<B> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let this = self.get_mut();
        if this.reset.poll_reset(cx).is_ready() {
            this.send.send_reset(Reason::CANCEL);
            return Poll::Ready(());
        }
        loop {
            if this.data.is_none() {
                match ready!(this.poll_body(cx)) {
                    Ok(Some(data)) => this.data = Some(data),
                    Ok(None) => {
                        // Fails if the stream has ended already.
                        let _ = this.send.send_data(Bytes::new(), true);
                        return Poll::Ready(());
                    }
                    Err(()) => {
                        this.send.send_reset(Reason::CANCEL);
                        return Poll::Ready(());
                    }
                }
            }
            let Some(mut data) = this.data.take() else { continue };
            this.send.reserve_capacity(data.len());
            let mut room = this.send.capacity();
            if room == 0 {
                room = match this.send.poll_capacity(cx) {
                    Poll::Ready(Some(Ok(room))) => room,
                    Poll::Ready(_) => return Poll::Ready(()),
                    Poll::Pending => {
                        this.data = Some(data);
                        return Poll::Pending;
                    }
                };
            }
            let piece = data.split_to(room.min(data.len()));
            // The next piece is read first, so that the last one ends the stream.
            if data.is_empty() {
                match this.poll_body(cx) {
                    Poll::Ready(Ok(Some(next))) => this.data = Some(next),
                    Poll::Ready(Ok(None)) => this.ended = true,
                    Poll::Ready(Err(())) => {
                        this.send.send_reset(Reason::CANCEL);
                        return Poll::Ready(());
                    }
                    Poll::Pending => {}
                }
            } else {
                this.data = Some(data);
            }
            if this.send.send_data(piece, this.ended).is_err() || this.ended {
                return Poll::Ready(());
            }
        }
    }
}
