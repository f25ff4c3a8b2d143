//! Requests whose connection to the API server was upgraded: exec, attach, port-forward.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use grpc::{BoxError, Code, Status};
use http::response;
use http_body::{Body, Frame};
use http_tunnel::agent_end::{RequestStream, UpgradedBody};
use tokio::sync::watch;
use traces::Span;

use super::timer::Timer;
use crate::cluster::UpgradedConnection;

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

/// The messages of an answer that has switched protocols.
pub(super) struct Switched {
    body: UpgradedBody<UpgradedConnection>,
    timer: Timer,
    /// Until the connection ends.
    span: Option<Span>,
    _open: OpenUpgrade,
}

impl Switched {
    /// `parts`: the head of the answer. `stream`: what the caller sends.
    pub(super) fn new(
        parts: &response::Parts,
        stream: RequestStream,
        upstream: UpgradedConnection,
        timer: Timer,
        span: Option<Span>,
        open: OpenUpgrade,
    ) -> Result<Self, Status> {
        Ok(Self { body: UpgradedBody::new(parts, stream, upstream)?, timer, span, _open: open })
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
            && let Some(trailers) = frame.trailers_ref()
            && let Some(mut span) = this.span.take()
            && let Some(status) = Status::from_headers(trailers)
            && status.code() != Code::Ok
        {
            tracing::debug!(error = %status, "an upgraded connection to the Kubernetes API server has failed");
            span.failed(status.code().name());
        }
        Poll::Ready(frame)
    }
}
