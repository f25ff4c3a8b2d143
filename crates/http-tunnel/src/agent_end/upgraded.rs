//! The bytes of a connection to the API server that was upgraded, as messages.
//!
//! The two directions are independent, so that a peer that does not read can still write. One task writes
//! what kas sends; what the API server sends is read when kas reads it here. At most one chunk is buffered in
//! each direction.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use grpc::{BoxError, Code, Status};
use http::{HeaderMap, response};
use http_body::{Body, Frame};
use tokio::{
    io::{AsyncRead, AsyncWrite, AsyncWriteExt as _},
    task::JoinHandle,
    time::Sleep,
};

use super::{request::RequestStream, response::ResponseEncoder};
use crate::halves::{Half, Read, halves, poll_chunk};

/// How long the API server may go on writing after the caller has finished. A longer time keeps programs of
/// clients that have left; a shorter one cuts output that is still on its way.
const REST: Duration = Duration::from_secs(10);

/// A connection to the API server that was upgraded.
pub trait Upstream: AsyncRead + AsyncWrite + Send + Unpin + 'static {
    /// Makes the connection end with a reset when it is dropped, so that its end does not look regular.
    fn reset_on_close(&self);
}

/// The messages of an answer with status 101: its head, and then what the API server writes to the upgraded
/// connection. It ends with trailers that have the status of the request.
///
/// What the caller sends is written to the connection. Dropping the body before its end resets the
/// connection.
pub struct UpgradedBody<S: Upstream> {
    encoder: ResponseEncoder,
    max_chunk: usize,
    /// `None`: the answer has ended.
    upstream: Option<Half<S>>,
    request: RequestStream,
    /// Writes what the caller sends.
    writer: JoinHandle<()>,
    /// Runs once the caller has finished.
    rest: Option<Pin<Box<Sleep>>>,
    end: Option<Status>,
}

impl<S: Upstream> UpgradedBody<S> {
    /// Starts with the head of the API server's answer, whose status is 101, on the connection `upstream`.
    /// `max_chunk` is that of a [`ResponseEncoder`]. Must be called within a runtime: it spawns a task.
    ///
    /// # Errors
    /// `RESOURCE_EXHAUSTED` when the headers of the answer are too large.
    pub fn new(
        parts: &response::Parts,
        max_chunk: usize,
        request: RequestStream,
        upstream: S,
    ) -> Result<Self, Status> {
        let mut encoder = ResponseEncoder::new(parts, max_chunk)?;
        encoder.upgrade();
        request.upgrade();
        let (reader, writer) = halves(upstream);
        let writer = tokio::spawn(write(request.clone(), writer));
        Ok(Self { encoder, max_chunk, upstream: Some(reader), request, writer, rest: None, end: None })
    }

    /// Ends the answer with a status that is not OK, such as that of an expired deadline. No effect after its
    /// end.
    pub fn fail(&mut self, status: Status) {
        if self.upstream.is_some() {
            self.finish(status);
        }
    }

    fn finish(&mut self, status: Status) {
        if let Some(upstream) = self.upstream.take()
            && status.code() != Code::Ok
        {
            upstream.with(Upstream::reset_on_close);
        }
        self.writer.abort();
        if status.code() != Code::Ok {
            self.encoder.discard();
        }
        self.end = Some(status);
    }

    /// Makes one step. `Pending`: there is nothing to do but wait.
    fn step(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Some(upstream) = &mut self.upstream else { return Poll::Pending };
        match poll_chunk(upstream, cx, self.max_chunk, Bytes::copy_from_slice) {
            Poll::Ready(Ok(Read::Bytes(data))) => {
                self.encoder.push(data);
                return Poll::Ready(());
            }
            Poll::Ready(Ok(Read::End)) => {
                self.finish(Status::new(Code::Ok, ""));
                return Poll::Ready(());
            }
            Poll::Ready(Err(error)) => {
                let text = format!("the upgraded connection to the Kubernetes API server broke: {error}");
                let failed = self.request.failure();
                self.finish(failed.unwrap_or_else(|| Status::new(Code::Unavailable, text)));
                return Poll::Ready(());
            }
            Poll::Pending => {}
        }
        let status = match self.request.poll_end(cx) {
            Poll::Pending => return Poll::Pending,
            Poll::Ready(Err(status)) => status,
            Poll::Ready(Ok(())) => {
                let rest = self.rest.get_or_insert_with(|| Box::pin(tokio::time::sleep(REST)));
                std::task::ready!(rest.as_mut().poll(cx));
                Status::new(Code::Ok, "")
            }
        };
        self.finish(status);
        Poll::Ready(())
    }
}

/// Writes what the caller sends to the API server, each part at once.
async fn write<S: Upstream>(request: RequestStream, mut upstream: Half<S>) {
    let written = async {
        // After an error, the side that reads from the API server resets the connection.
        while let Ok(data) = std::future::poll_fn(|cx| request.poll_upgraded(cx)).await {
            match data {
                Some(data) => {
                    upstream.write_all(&data).await?;
                    upstream.flush().await?;
                }
                None => return upstream.shutdown().await,
            }
        }
        io::Result::Ok(())
    };
    // After an error, the other side reads what the API server has sent before, and then gets the same error.
    let _ = written.await;
    request.release();
}

impl<S: Upstream> Body for UpgradedBody<S> {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let this = self.get_mut();
        loop {
            if let Some(data) = this.encoder.next_chunk() {
                return Poll::Ready(Some(Ok(Frame::data(data))));
            }
            if this.end.is_none() && this.step(cx).is_ready() {
                continue;
            }
            if let Some(data) = this.encoder.flush() {
                return Poll::Ready(Some(Ok(Frame::data(data))));
            }
            if this.upstream.is_some() {
                return Poll::Pending;
            }
            return Poll::Ready(this.end.take().map(|status| {
                let mut trailers = HeaderMap::new();
                status.write_to(&mut trailers);
                Ok(Frame::trailers(trailers))
            }));
        }
    }
}

impl<S: Upstream> Drop for UpgradedBody<S> {
    fn drop(&mut self) {
        if let Some(upstream) = self.upstream.take() {
            upstream.with(Upstream::reset_on_close);
        }
        self.writer.abort();
    }
}

impl<S: Upstream> std::fmt::Debug for UpgradedBody<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("UpgradedBody")
    }
}
