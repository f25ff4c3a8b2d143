//! HTTP/2 for tests: the test controls every frame, and can distinguish every kind of end.
//!
//! Built on h2 itself, because libraries above it hide what tests need: a reset and its reason, a half-close
//! alone, half a message.

use std::{
    io,
    net::{Ipv4Addr, SocketAddr},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use anyhow::{Context as _, Result};
use bytes::{Buf as _, Bytes, BytesMut};
use h2::{
    Reason, RecvStream, SendStream,
    client::{ResponseFuture, SendRequest},
};
use http::{HeaderMap, Request, StatusCode};
use parking_lot::{Mutex, MutexGuard};
use prost::Message;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpSocket, TcpStream},
    sync::watch,
};

use crate::process::soon;

/// Everything that one end has received: the bytes of its sockets, and the decoded texts (header blocks are
/// compressed on the wire).
#[derive(Clone, Debug, Default)]
pub struct Record(Arc<Mutex<Received>>);

#[derive(Debug, Default)]
struct Received {
    raw: Vec<u8>,
    decoded: Vec<u8>,
}

impl Record {
    fn received(&self) -> MutexGuard<'_, Received> {
        self.0.lock()
    }

    /// Adds bytes of a socket.
    pub fn push_raw(&self, bytes: &[u8]) {
        self.received().raw.extend_from_slice(bytes);
    }

    /// Adds a decoded part.
    pub fn push(&self, bytes: &[u8]) {
        let mut received = self.received();
        received.decoded.extend_from_slice(bytes);
        received.decoded.push(b'\n');
    }

    /// Adds the names and values of headers.
    pub fn push_headers(&self, headers: &HeaderMap) {
        for (name, value) in headers {
            self.push(&[name.as_str().as_bytes(), b": ", value.as_bytes()].concat());
        }
    }

    /// Whether `needle` was received, encoded or decoded.
    pub fn contains(&self, needle: &str) -> bool {
        let received = self.received();
        let found = |bytes: &[u8]| bytes.windows(needle.len()).any(|window| window == needle.as_bytes());
        found(&received.raw) || found(&received.decoded)
    }

    /// Returns the number of bytes from sockets.
    pub fn raw_len(&self) -> usize {
        self.received().raw.len()
    }
}

/// A socket whose received bytes are recorded.
#[derive(Debug)]
pub struct Recorded {
    stream: TcpStream,
    record: Record,
}

impl Recorded {
    /// Connects to `address`.
    ///
    /// # Errors
    /// Those of the system.
    pub async fn connect(address: SocketAddr, record: Record) -> io::Result<Self> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        Ok(Self { stream, record })
    }
}

impl AsyncRead for Recorded {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let polled = Pin::new(&mut self.stream).poll_read(cx, buf);
        if buf.filled().len() > before {
            self.record.push_raw(&buf.filled()[before..]);
        }
        polled
    }
}

impl AsyncWrite for Recorded {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// One HTTP/2 connection. Dropping it, and its streams, closes the socket.
#[derive(Clone, Debug)]
pub struct Link {
    sender: SendRequest<Bytes>,
    address: SocketAddr,
    local: SocketAddr,
    record: Record,
    driver: Arc<Driver>,
}

#[derive(Debug)]
struct Driver {
    task: tokio::task::AbortHandle,
    ended: watch::Receiver<bool>,
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Link {
    /// Connects, with the windows of agentk.
    ///
    /// # Errors
    /// If no HTTP/2 server listens there.
    pub async fn connect(address: SocketAddr) -> Result<Self> {
        Self::connect_with(address, 256 * 1024).await
    }

    /// Connects with this window for each stream.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    pub async fn connect_with(address: SocketAddr, window: u32) -> Result<Self> {
        let record = Record::default();
        let stream = Recorded::connect(address, record.clone())
            .await
            .with_context(|| format!("connecting {address}"))?;
        Self::over(stream, record, address, window).await
    }

    /// Connects from this local address.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    pub async fn connect_from(from: Ipv4Addr, address: SocketAddr) -> Result<Self> {
        let record = Record::default();
        let socket = TcpSocket::new_v4()?;
        socket.bind((from, 0).into())?;
        let stream = socket.connect(address).await.with_context(|| format!("connecting {address}"))?;
        stream.set_nodelay(true)?;
        Self::over(Recorded { stream, record: record.clone() }, record, address, 256 * 1024).await
    }

    async fn over(stream: Recorded, record: Record, address: SocketAddr, window: u32) -> Result<Self> {
        let local = stream.stream.local_addr()?;
        let (sender, connection) = h2::client::Builder::new()
            .initial_window_size(window)
            .initial_connection_window_size((1 << 31) - 1)
            .max_frame_size(64 * 1024)
            .max_header_list_size(64 * 1024)
            .max_concurrent_reset_streams(10_000)
            .handshake(stream)
            .await
            .context("the HTTP/2 handshake")?;
        let (sender_ended, ended) = watch::channel(false);
        let task = tokio::spawn(async move {
            let _ = connection.await;
            sender_ended.send_replace(true);
        });
        Ok(Self {
            sender,
            address,
            local,
            record,
            driver: Arc::new(Driver { task: task.abort_handle(), ended }),
        })
    }

    /// Returns the address of the other end.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns this end's address.
    pub fn local(&self) -> SocketAddr {
        self.local
    }

    /// Returns what has been received.
    pub fn record(&self) -> &Record {
        &self.record
    }

    /// Waits until the connection has ended.
    ///
    /// # Panics
    /// If it does not end soon.
    pub async fn closed(&self) {
        let mut ended = self.driver.ended.clone();
        let _ = soon("the connection ends", ended.wait_for(|ended| *ended)).await;
    }

    /// Closes the socket abruptly.
    pub fn cut(&self) {
        self.driver.task.abort();
    }

    /// Opens a stream.
    ///
    /// # Errors
    /// If the connection has ended, or accepts no new streams.
    pub async fn open(&self, request: Request<()>) -> Result<Stream> {
        let mut sender = soon("a stream may be opened", self.sender.clone().ready()).await?;
        let (answer, send) = sender.send_request(request, false)?;
        Ok(Stream {
            answer: Some(answer),
            send,
            recv: None,
            head: None,
            buffer: BytesMut::new(),
            record: self.record.clone(),
            _link: self.clone(),
        })
    }
}

/// The next event of a stream.
#[derive(Clone, Debug, PartialEq)]
pub enum Next {
    /// One gRPC message, without its prefix.
    Message(Bytes),
    /// Trailers: the end.
    Trailers(HeaderMap),
    /// The end, without trailers.
    End,
    /// It was reset.
    Reset(Reason),
}

/// One HTTP/2 stream, opened here. Dropping it resets it with CANCEL unless it has ended.
#[derive(Debug)]
pub struct Stream {
    answer: Option<ResponseFuture>,
    send: SendStream<Bytes>,
    recv: Option<RecvStream>,
    head: Option<(StatusCode, HeaderMap)>,
    buffer: BytesMut,
    record: Record,
    _link: Link,
}

impl Stream {
    /// Sends bytes, and waits for flow-control window if needed.
    ///
    /// # Errors
    /// The reason when the stream was reset.
    ///
    /// # Panics
    /// If there is no window for a long time.
    pub async fn send(&mut self, bytes: impl Into<Bytes>) -> Result<(), Reason> {
        let mut bytes = bytes.into();
        while !bytes.is_empty() {
            let n = soon("there is window to send", self.capacity(bytes.len())).await?;
            let piece = bytes.split_to(n.min(bytes.len()));
            self.send.send_data(piece, false).map_err(reason)?;
        }
        Ok(())
    }

    /// Waits until some of `wanted` bytes may be sent; returns how many.
    ///
    /// # Errors
    /// The reason when the stream was reset.
    pub async fn capacity(&mut self, wanted: usize) -> Result<usize, Reason> {
        self.send.reserve_capacity(wanted);
        loop {
            if self.send.capacity() > 0 {
                return Ok(self.send.capacity());
            }
            match std::future::poll_fn(|cx| self.send.poll_capacity(cx)).await {
                Some(Ok(_)) => {}
                Some(Err(error)) => return Err(reason(error)),
                None => {
                    return Err(std::future::poll_fn(|cx| self.send.poll_reset(cx)).await.map_err(reason)?);
                }
            }
        }
    }

    /// Sends a message as one gRPC frame.
    ///
    /// # Errors
    /// The reason when the stream was reset.
    pub async fn send_message(&mut self, message: &impl Message) -> Result<(), Reason> {
        self.send(grpc::encode(message)).await
    }

    /// Half-closes the stream.
    ///
    /// # Errors
    /// The reason when the stream was reset.
    pub fn half_close(&mut self) -> Result<(), Reason> {
        self.send.send_data(Bytes::new(), true).map_err(reason)
    }

    /// Resets the stream.
    pub fn reset(&mut self, reason: Reason) {
        self.send.send_reset(reason);
    }

    /// Waits until the other end resets the stream.
    ///
    /// # Panics
    /// When it does not.
    pub async fn was_reset(&mut self) -> Reason {
        match soon("the stream is reset", std::future::poll_fn(|cx| self.send.poll_reset(cx))).await {
            Ok(reason) => reason,
            Err(error) => reason(error),
        }
    }

    /// Waits for the response's headers.
    ///
    /// # Errors
    /// The reason when the stream was reset.
    ///
    /// # Panics
    /// If they do not arrive.
    pub async fn head(&mut self) -> Result<&(StatusCode, HeaderMap), Reason> {
        if let Some(answer) = self.answer.take() {
            let response = soon("response headers come", answer).await.map_err(reason)?;
            let (head, body) = response.into_parts();
            self.record.push_headers(&head.headers);
            self.head = Some((head.status, head.headers));
            self.recv = Some(body);
        }
        self.head.as_ref().ok_or(Reason::INTERNAL_ERROR)
    }

    /// Waits for the next chunk of the body.
    ///
    /// # Panics
    /// When nothing comes.
    pub async fn data(&mut self) -> Option<Result<Bytes, Reason>> {
        soon("the stream continues", self.data_unbounded()).await
    }

    /// Waits for the trailers, after all data.
    ///
    /// # Panics
    /// If they do not arrive, or the stream is reset.
    pub async fn trailers(&mut self) -> Option<HeaderMap> {
        let recv = self.recv.as_mut()?;
        let trailers = soon("trailers come", recv.trailers()).await.expect("the stream ends in order");
        if let Some(trailers) = &trailers {
            self.record.push_headers(trailers);
        }
        trailers
    }

    async fn data_unbounded(&mut self) -> Option<Result<Bytes, Reason>> {
        if let Err(reason) = self.head().await {
            return Some(Err(reason));
        }
        let recv = self.recv.as_mut()?;
        let data = recv.data().await?;
        Some(data.map_err(reason).inspect(|data| {
            let _ = recv.flow_control().release_capacity(data.len());
        }))
    }

    /// Returns what has been received of the next message by [`next`](Self::next).
    pub fn buffered(&self) -> &[u8] {
        &self.buffer
    }

    /// Waits for the next message, or the end.
    ///
    /// # Panics
    /// If nothing arrives, or half a message at the end.
    pub async fn next(&mut self) -> Next {
        soon("the stream continues", self.next_unbounded()).await
    }

    /// Waits for the next message, or the end, however long that takes.
    ///
    /// # Panics
    /// If the stream ends within a message.
    pub async fn next_unbounded(&mut self) -> Next {
        loop {
            if self.buffer.len() >= grpc::PREFIX_LEN {
                let len = u32::from_be_bytes([self.buffer[1], self.buffer[2], self.buffer[3], self.buffer[4]])
                    as usize;
                if self.buffer.len() >= grpc::PREFIX_LEN + len {
                    assert_eq!(self.buffer[0], 0, "kas sends identity only");
                    self.buffer.advance(grpc::PREFIX_LEN);
                    let message = self.buffer.split_to(len).freeze();
                    self.record.push(&message);
                    return Next::Message(message);
                }
            }
            match self.data_unbounded().await {
                Some(Ok(data)) => self.buffer.extend_from_slice(&data),
                Some(Err(reason)) => return Next::Reset(reason),
                None => break,
            }
        }
        assert!(self.buffer.is_empty(), "the stream ended inside a message: {:?}", self.buffer);
        let Some(recv) = &mut self.recv else { return Next::End };
        match recv.trailers().await {
            Ok(Some(trailers)) => {
                self.record.push_headers(&trailers);
                Next::Trailers(trailers)
            }
            Ok(None) => Next::End,
            Err(error) => Next::Reset(reason(error)),
        }
    }
}

/// Returns why a stream ended; a connection that is gone counts as INTERNAL_ERROR.
fn reason(error: h2::Error) -> Reason {
    error.reason().unwrap_or(Reason::INTERNAL_ERROR)
}
