//! A connection of HTTP/1.1 or HTTP/1.0, and what it may be upgraded to.

use std::{
    convert::Infallible,
    io,
    pin::Pin,
    sync::{Arc, atomic::Ordering},
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use futures_util::FutureExt as _;
use http::{Request, Response, StatusCode};
use http_body::{Frame, SizeHint};
use hyper::{
    body::Incoming,
    server::conn::http1::{self, UpgradeableConnection},
    service::Service,
    upgrade::OnUpgrade,
};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::Sleep,
};

use super::{
    connect::{Handler, Task},
    driver::Driver,
    observed::Observed,
    requests::{Answering, Requests},
    service::Body,
    settings::{HEADER_LIST_ROOM, Limits, Settings},
    slot::{OpenStream, StreamSlot},
    upgrade,
};
use crate::io::Stream;

/// The least that hyper accepts as a bound of its buffers, in bytes.
const SMALLEST_BUFFER: usize = 8 * 1024;

/// Returns a builder for connections on which the head of a request has at most `head` bytes. The caller
/// limits the time.
pub(super) fn builder(head: usize) -> http1::Builder {
    let mut builder = http1::Builder::new();
    // hyper's timer also runs between requests, where a connection may stay longer than in a head.
    builder.header_read_timeout(None).max_buf_size(head.max(SMALLEST_BUFFER));
    builder
}

/// An upgrade that an answer has agreed to.
type Agreed = Arc<Mutex<Option<(OnUpgrade, Handler)>>>;

/// A connection of HTTP/1.1, until the end of what it was upgraded to.
pub(super) struct Http1 {
    state: State,
    agreed: Agreed,
    slot: StreamSlot,
    /// For a request that is reset at a deadline.
    timer: Option<Pin<Box<Sleep>>>,
}

enum State {
    Http(Box<UpgradeableConnection<TokioIo<HeadWatch>, Exchanges>>),
    Upgraded { task: Task, _open: OpenStream },
}

impl Http1 {
    pub(super) fn new(stream: Stream, settings: &Settings, limits: &Limits, requests: Requests) -> Self {
        let (slot, agreed) = (requests.slot.clone(), Agreed::default());
        let stream = HeadWatch {
            stream,
            observed: Arc::clone(&requests.observed),
            slot: slot.clone(),
            most: limits.streams_before_authentication.into(),
            is_reset: false,
        };
        let head = settings.header_list.saturating_mul(HEADER_LIST_ROOM) as usize;
        let exchanges = Exchanges { requests, agreed: Arc::clone(&agreed) };
        let connection = builder(head).serve_connection(TokioIo::new(stream), exchanges).with_upgrades();
        Self { state: State::Http(Box::new(connection)), agreed, slot, timer: None }
    }

    /// Returns what comes after HTTP on this connection, which has ended.
    fn upgraded(&self) -> Option<Task> {
        let (on, handler) = self.agreed.lock().take()?;
        // HTTP hands the stream over as it ends, or never.
        let upgraded = on.now_or_never()?.ok()?;
        let (HeadWatch { stream, .. }, first) = upgrade::stream(upgraded).ok()?;
        Some(handler(upgrade::rewind(stream, first)))
    }
}

impl Driver for Http1 {
    const ENDS_WHEN_IDLE: bool = true;

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<hyper::Result<()>> {
        if let State::Http(connection) = &mut self.state
            && let Poll::Ready(ended) = Pin::new(connection).poll(cx)
        {
            let upgraded = self.upgraded();
            match upgraded {
                Some(task) if ended.is_ok() => {
                    self.state = State::Upgraded { task, _open: self.slot.enter() }
                }
                _ => return Poll::Ready(ended),
            }
        }
        if let State::Upgraded { task, .. } = &mut self.state
            && task.as_mut().poll(cx).is_ready()
        {
            return Poll::Ready(Ok(()));
        }
        // A peer that does not read would not get an answer, so the connection ends.
        self.slot.poll_armed(cx, &mut self.timer).map(Ok)
    }

    fn leave(&mut self) {
        if let State::Http(connection) = &mut self.state {
            Pin::new(&mut **connection).graceful_shutdown();
        }
    }
}

/// Serves requests one after the other.
struct Exchanges {
    requests: Requests,
    agreed: Agreed,
}

impl Service<Request<Incoming>> for Exchanges {
    type Response = Response<Counted>;
    type Error = Infallible;
    type Future = Exchange;

    fn call(&self, mut request: Request<Incoming>) -> Exchange {
        self.requests.observed.set_in_head(false);
        self.requests.slot.disarm();
        let open = self.requests.slot.enter();
        let on = hyper::upgrade::on(&mut request);
        let answering = self.requests.call(request);
        Exchange { answering, upgrade: Some((on, Arc::clone(&self.agreed))), open: Some(open) }
    }
}

/// A request until the head of its answer.
struct Exchange {
    answering: Answering,
    upgrade: Option<(OnUpgrade, Agreed)>,
    open: Option<OpenStream>,
}

impl Future for Exchange {
    type Output = Result<Response<Counted>, Infallible>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let Ok(mut answer) = ready!(Pin::new(&mut self.answering).poll(cx));
        if answer.status() == StatusCode::SWITCHING_PROTOCOLS
            && let Some(handler) = upgrade::handler(&mut answer)
            && let Some((on, agreed)) = self.upgrade.take()
        {
            *agreed.lock() = Some((on, handler));
        }
        let open = self.open.take();
        Poll::Ready(Ok(answer.map(|body| Counted { body, _open: open })))
    }
}

/// The body of an answer. Its request is open as long as it is.
struct Counted {
    body: Body,
    _open: Option<OpenStream>,
}

impl http_body::Body for Counted {
    type Data = Bytes;
    type Error = Box<dyn std::error::Error + Send + Sync>;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// A stream that notes when the head of a request begins, and that is not read beyond the requests that a
/// connection may send before it is admitted.
struct HeadWatch {
    stream: Stream,
    observed: Arc<Observed>,
    slot: StreamSlot,
    /// How many requests may be sent before the connection is admitted.
    most: u64,
    /// The socket was told to end with RST.
    is_reset: bool,
}

impl HeadWatch {
    /// Passes on that the connection is to end with RST. HTTP flushes before it polls the body of an answer
    /// again, so this precedes the failure of the body.
    fn prepare_end(&mut self) {
        if self.slot.resets_connection() && !self.is_reset {
            self.is_reset = true;
            if let Err(error) = self.stream.reset_on_close() {
                tracing::debug!(error = %error, "a connection cannot be made to end with a reset");
            }
        }
    }
}

impl AsyncRead for HeadWatch {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.slot.opened() > self.most && !self.observed.is_admitted() {
            // Admitting the connection wakes its task.
            return Poll::Pending;
        }
        self.prepare_end();
        let before = buf.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(cx, buf))?;
        if buf.filled().len() > before {
            self.observed.spoken.store(true, Ordering::Relaxed);
            if self.slot.is_idle() {
                self.observed.set_in_head(true);
            }
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for HeadWatch {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.prepare_end();
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.prepare_end();
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}
