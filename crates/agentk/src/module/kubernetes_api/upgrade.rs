//! Requests whose connection to the API server was upgraded: exec, attach, port-forward.

use std::{
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use grpc::{BoxError, Code, Status};
use http::response;
use http_body::{Body, Frame};
use http_tunnel::agent_end::{RequestStream, UpgradedBody, Upstream};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    sync::watch,
};
use traces::Span;

use super::timer::Timer;
use crate::{audit::Entry, cluster::UpgradedConnection};

/// Counts the upgraded connections that are open. Clones share the number.
#[derive(Clone, Debug, Default)]
pub struct Upgrades(watch::Sender<usize>);

impl Upgrades {
    /// Counts one more, until the guard is dropped.
    pub(super) fn enter(&self) -> OpenUpgrade {
        self.0.send_modify(|open| *open += 1);
        OpenUpgrade(self.clone())
    }

    /// Returns how many are open.
    pub fn open(&self) -> usize {
        *self.0.borrow()
    }

    /// Waits until none is open.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn none_open(&self) {
        // The sender lives as long as `self`.
        let _ = self.0.subscribe().wait_for(|open| *open == 0).await;
    }
}

/// An upgraded connection that is open.
#[derive(Debug)]
pub(super) struct OpenUpgrade(Upgrades);

impl Drop for OpenUpgrade {
    fn drop(&mut self) {
        self.0.0.send_modify(|open| *open -= 1);
    }
}

/// Where the end of a request is recorded.
pub(super) struct Records {
    /// The span of the request.
    pub(super) span: Option<Span>,
    /// Its line in the audit log.
    pub(super) entry: Option<Entry>,
}

/// A connection to the API server whose bytes are counted for the audit log.
struct Counted {
    connection: UpgradedConnection,
    read: Arc<AtomicU64>,
    /// `None`: there is no audit log.
    written: Option<Arc<AtomicU64>>,
}

impl AsyncRead for Counted {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let polled = Pin::new(&mut self.connection).poll_read(cx, buffer);
        self.read.fetch_add((buffer.filled().len() - before) as u64, Ordering::Relaxed);
        polled
    }
}

impl AsyncWrite for Counted {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let wrote = ready!(Pin::new(&mut self.connection).poll_write(cx, bytes))?;
        if let Some(written) = &self.written {
            written.fetch_add(wrote as u64, Ordering::Relaxed);
        }
        Poll::Ready(Ok(wrote))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.connection).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.connection).poll_shutdown(cx)
    }
}

impl Upstream for Counted {
    fn reset_on_close(&self) {
        self.connection.reset_on_close();
    }
}

/// The messages of an answer that has switched protocols.
pub(super) struct Switched {
    body: UpgradedBody<Counted>,
    timer: Timer,
    /// Until the connection ends.
    records: Records,
    /// Bytes that the API server has sent.
    read: Arc<AtomicU64>,
    _open: OpenUpgrade,
}

impl Switched {
    /// `parts`: the head of the answer. `max_chunk`: see [`UpgradedBody::new`]. `stream`: what the caller
    /// sends.
    pub(super) fn new(
        parts: &response::Parts,
        max_chunk: usize,
        stream: RequestStream,
        upstream: UpgradedConnection,
        timer: Timer,
        mut records: Records,
        open: OpenUpgrade,
    ) -> Result<Self, Status> {
        let read = Arc::<AtomicU64>::default();
        let written = records.entry.as_ref().map(Entry::received);
        let upstream = Counted { connection: upstream, read: Arc::clone(&read), written };
        let body = UpgradedBody::new(parts, max_chunk, stream, upstream).inspect_err(|status| {
            if let Some(entry) = &mut records.entry {
                entry.ended(Some(status.code().name()));
            }
        })?;
        Ok(Self { body, timer, records, read, _open: open })
    }

    /// Completes the records.
    fn ended(&mut self, status: &Status) {
        let failure = (status.code() != Code::Ok).then(|| status.code().name());
        if failure.is_some() {
            tracing::debug!(error = %status, "an upgraded connection to the Kubernetes API server has failed");
        }
        if let Some(mut span) = self.records.span.take()
            && let Some(failure) = failure
        {
            span.failed(failure);
        }
        if let Some(mut entry) = self.records.entry.take() {
            entry.sent(usize::try_from(self.read.load(Ordering::Relaxed)).unwrap_or(usize::MAX));
            entry.ended(failure);
        }
    }
}

impl Drop for Switched {
    fn drop(&mut self) {
        // The caller has left, unless the records are complete.
        if let Some(entry) = &mut self.records.entry {
            entry.sent(usize::try_from(self.read.load(Ordering::Relaxed)).unwrap_or(usize::MAX));
        }
    }
}

impl Body for Switched {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let this = self.get_mut();
        if let Poll::Ready(status) = this.timer.poll(cx) {
            this.timer = Timer::none();
            this.body.fail(status);
        }
        let frame = ready!(Pin::new(&mut this.body).poll_frame(cx));
        if let Some(Ok(frame)) = &frame
            && let Some(status) = frame.trailers_ref().and_then(Status::from_headers)
        {
            this.ended(&status);
        }
        Poll::Ready(frame)
    }
}
