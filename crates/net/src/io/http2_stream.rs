//! A stream of HTTP/2 that was taken over by extended CONNECT (RFC 8441), as a connection of its own.
//!
//! What FIN and RST are to TCP, END_STREAM and RST_STREAM are to such a stream. hyper reads the end of the
//! stream for either of them, if the code of the reset is CANCEL, which is the usual one. Only its sending
//! direction tells them apart, and that is a future that the connection of HTTP/2 polls. So a reader that
//! comes to an end asks there whether it was a reset, see [`StreamEnd`].

use std::{
    fmt, io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Waker, ready},
};

use futures_util::task::AtomicWaker;
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// A stream of HTTP/2 as a connection. Reading from it fails once it was reset. If it is dropped, it ends
/// regularly, unless it was marked before.
pub struct Http2Stream {
    /// Never locked: the lock only makes this `Sync`, like the other kinds of connections.
    inner: Mutex<TokioIo<Upgraded>>,
    end: Arc<StreamEnd>,
    /// We send nothing more.
    is_shut_down: bool,
}

impl fmt::Debug for Http2Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Http2Stream").field("end", &self.end).finish_non_exhaustive()
    }
}

impl Http2Stream {
    /// Returns the stream, and what its sending direction has to tell about its end.
    pub(crate) fn new(upgraded: Upgraded) -> (Self, Arc<StreamEnd>) {
        let end = Arc::<StreamEnd>::default();
        (Self { inner: Mutex::new(TokioIo::new(upgraded)), end: Arc::clone(&end), is_shut_down: false }, end)
    }

    /// Whether nothing more can be sent, although we have not finished: the stream was reset, or its
    /// connection has ended.
    pub(crate) fn is_broken(&self) -> bool {
        self.end.state.lock().has_sending_ended && !self.is_shut_down
    }

    /// Makes the stream end with RST_STREAM when it is dropped.
    pub(crate) fn reset_on_close(&self) {
        self.end.state.lock().resets = true;
    }
}

impl AsyncRead for Http2Stream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        ready!(Pin::new(self.inner.get_mut()).poll_read(cx, buf))?;
        if buf.filled().len() > before || buf.remaining() == 0 || self.is_shut_down {
            return Poll::Ready(Ok(()));
        }
        self.end.poll_regular(cx)
    }
}

impl AsyncWrite for Http2Stream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(self.inner.get_mut()).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(self.inner.get_mut()).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.is_shut_down = true;
        Pin::new(self.inner.get_mut()).poll_shutdown(cx)
    }
}

/// How a stream ends, shared by the stream and the task that polls its sending direction.
#[derive(Debug, Default)]
pub(crate) struct StreamEnd {
    state: Mutex<State>,
    /// The task that polls the sending direction.
    task: AtomicWaker,
}

#[derive(Debug, Default)]
struct State {
    /// Nothing more can be sent.
    has_sending_ended: bool,
    /// Has read an end, and waits to hear whether that is a reset.
    reader: Option<Waker>,
    /// The end that was read is END_STREAM.
    is_regular: bool,
    /// The stream is to end with a reset.
    resets: bool,
}

impl StreamEnd {
    /// For the reader, which has read an end: whether it is a regular one.
    fn poll_regular(&self, cx: &Context<'_>) -> Poll<io::Result<()>> {
        let mut state = self.state.lock();
        if state.is_regular {
            return Poll::Ready(Ok(()));
        }
        if state.has_sending_ended {
            return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
        }
        state.reader = Some(cx.waker().clone());
        drop(state);
        self.task.wake();
        Poll::Pending
    }

    /// Polls the sending direction with `send`, and tells a reader that waits what that shows. The reader
    /// has read the end before, so a reset is seen now. Ready once nothing more can be sent.
    pub(crate) fn poll_sending(
        &self,
        cx: &mut Context<'_>,
        send: impl FnOnce(&mut Context<'_>) -> Poll<()>,
    ) -> Poll<()> {
        self.task.register(cx.waker());
        let reader = self.state.lock().reader.take();
        let sent = send(cx);
        if sent.is_ready() {
            self.sending_ended();
        } else if reader.is_some() {
            self.state.lock().is_regular = true;
        }
        if let Some(reader) = reader {
            reader.wake();
        }
        sent
    }

    /// Nothing more can be sent.
    pub(crate) fn sending_ended(&self) {
        let mut state = self.state.lock();
        state.has_sending_ended = true;
        let reader = state.reader.take();
        drop(state);
        if let Some(reader) = reader {
            reader.wake();
        }
    }

    /// Whether the stream is to end with a reset.
    pub(crate) fn resets(&self) -> bool {
        self.state.lock().resets
    }
}
