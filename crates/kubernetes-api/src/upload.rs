//! The request of a client as messages for the agent.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::{BufMut as _, Bytes, BytesMut};
use grpc::BoxError;
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt as _;
use http_tunnel::{MAX_CHUNK, field};
use routing::router::ChosenAgentk;
use tunnel::frame;

use crate::{
    message::RequestHead,
    open::{Shared, Verdict},
};

/// Parts up to this size are copied behind the head of their message, which saves a frame.
const MAX_COPIED: usize = 1024;
/// How much of a body is read away after an answer that did not need it…
const READ_AWAY: usize = 256 * 1024;
/// …and for how long.
const READ_AWAY_TIME: Duration = Duration::from_secs(2);

/// Whether the end of a body can be told from a reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ends {
    /// HTTP/2: a body that was reset has no end of the stream.
    Marked,
    /// HTTP/1.1: an incomplete body fails.
    Failing {
        /// The client waits for `100 Continue` before it sends the body. It is sent when the body is first
        /// read.
        expects: bool,
    },
}

/// A client's body that is read away when it is dropped before its end.
///
/// With HTTP/1.1 a client may write its whole body before it reads the answer. If kas closed the connection
/// then, the rest of the body would make the system discard the answer.
pub(crate) struct ClientBody<B>
where
    B: Body<Data = Bytes> + Send + Unpin + 'static,
{
    body: Option<B>,
    ends: Ends,
    is_over: bool,
}

impl<B> ClientBody<B>
where
    B: Body<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Send,
{
    pub(crate) fn new(body: B, ends: Ends) -> Self {
        let is_over = body.is_end_stream();
        Self { body: Some(body), ends, is_over }
    }

    /// Whether there is nothing to read.
    pub(crate) fn is_empty(&self) -> bool {
        self.is_over
    }

    /// Returns its length in bytes; `None`: unknown.
    pub(crate) fn length(&self) -> Option<u64> {
        if self.is_over { Some(0) } else { self.body.as_ref()?.size_hint().exact() }
    }

    /// Returns the next part; `None` at the end.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub(crate) async fn data(&mut self) -> Result<Option<Bytes>, BrokenUpload> {
        std::future::poll_fn(|cx| self.poll_data(cx)).await
    }

    /// Returns the next part; `None` at the end.
    fn poll_data(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Bytes>, BrokenUpload>> {
        let Some(body) = self.body.as_mut().filter(|_| !self.is_over) else { return Poll::Ready(Ok(None)) };
        if let Ends::Failing { expects } = &mut self.ends {
            *expects = false;
        }
        loop {
            match ready!(Pin::new(&mut *body).poll_frame(cx)) {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) if data.is_empty() => {}
                    Ok(data) => return Poll::Ready(Ok(Some(data))),
                    // Trailers, which the tunnel does not carry.
                    Err(_) => {}
                },
                Some(Err(_)) => {
                    self.is_over = true;
                    return Poll::Ready(Err(BrokenUpload));
                }
                None => {
                    self.is_over = true;
                    let is_reset = self.ends == Ends::Marked && !body.is_end_stream();
                    return Poll::Ready(if is_reset { Err(BrokenUpload) } else { Ok(None) });
                }
            }
        }
    }
}

impl<B> Drop for ClientBody<B>
where
    B: Body<Data = Bytes> + Send + Unpin + 'static,
{
    fn drop(&mut self) {
        // HTTP/2 tells the client to stop. A client that waits for `100 Continue` sends nothing.
        if self.is_over || self.ends != (Ends::Failing { expects: false }) {
            return;
        }
        if let Some(body) = self.body.take()
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            runtime.spawn(async move {
                let _ = tokio::time::timeout(READ_AWAY_TIME, read_away(body)).await;
            });
        }
    }
}

async fn read_away<B: Body<Data = Bytes> + Unpin>(mut body: B) {
    let mut read = 0;
    while read < READ_AWAY
        && let Some(Ok(frame)) = body.frame().await
    {
        read += frame.data_ref().map_or(0, Bytes::len);
    }
}

/// The client has left, or its body is not what it announced.
#[derive(Debug, thiserror::Error)]
#[error("the request's body was not complete")]
pub(crate) struct BrokenUpload;

/// The messages of a request, as a body of gRPC frames. It is read once a tunnel is there, so the body of a
/// request that finds none is not requested from the client.
pub(crate) struct Upload<B>
where
    B: Body<Data = Bytes> + Send + Unpin + 'static,
{
    /// Until it is written.
    head: Option<(RequestHead, ChosenAgentk)>,
    body: ClientBody<B>,
    shared: Arc<Shared>,
    /// Data whose message has begun.
    data: Bytes,
    /// A part of `data` that follows the head of its message.
    part: Option<Bytes>,
    /// The last message was written.
    is_complete: bool,
}

impl<B> Upload<B>
where
    B: Body<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Send,
{
    pub(crate) fn new(
        head: RequestHead,
        chosen: ChosenAgentk,
        body: ClientBody<B>,
        shared: Arc<Shared>,
    ) -> Self {
        Self { head: Some((head, chosen)), body, shared, data: Bytes::new(), part: None, is_complete: false }
    }

    /// Takes the next part of the data that was read.
    fn next_part(&mut self) -> Option<Bytes> {
        if let Some(part) = self.part.take() {
            return Some(part);
        }
        if self.data.is_empty() {
            return None;
        }
        let part = self.data.split_to(self.data.len().min(MAX_CHUNK));
        let mut out = BytesMut::with_capacity(32 + part.len().min(MAX_COPIED));
        // At most 32 KiB.
        frame::put_message_head(field::DATA, part.len() as u32, &mut out);
        if part.len() <= MAX_COPIED {
            out.put_slice(&part);
        } else {
            self.part = Some(part);
        }
        Some(out.freeze())
    }

    fn poll_part(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        if let Some((head, chosen)) = self.head.take() {
            let mut out = BytesMut::new();
            frame::put_control(field::HEADER, &head.encode(chosen.features()), &mut out);
            if self.body.is_empty() {
                self.complete(&mut out);
            }
            return Poll::Ready(Some(Ok(Frame::data(out.freeze()))));
        }
        if self.is_complete {
            return Poll::Ready(None);
        }
        if let Some(part) = self.next_part() {
            return Poll::Ready(Some(Ok(Frame::data(part))));
        }
        match self.body.poll_data(cx) {
            Poll::Pending => {
                self.shared.upload_waits();
                Poll::Pending
            }
            Poll::Ready(Ok(Some(data))) => {
                self.shared.upload_progresses();
                self.data = data;
                Poll::Ready(self.next_part().map(|part| Ok(Frame::data(part))))
            }
            Poll::Ready(Ok(None)) => {
                let mut out = BytesMut::new();
                self.complete(&mut out);
                Poll::Ready(Some(Ok(Frame::data(out.freeze()))))
            }
            Poll::Ready(Err(broken)) => {
                // An incomplete request must not be carried out: its tunnel is reset.
                self.shared.end(Verdict::BrokenUpload);
                Poll::Ready(Some(Err(broken.into())))
            }
        }
    }

    /// Writes the message that ends the request.
    fn complete(&mut self, out: &mut BytesMut) {
        frame::put_control(field::TRAILER, &[], out);
        self.is_complete = true;
        self.shared.upload_ends();
    }
}

impl<B> Body for Upload<B>
where
    B: Body<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Send,
{
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let this = self.get_mut();
        this.shared.upload_taken();
        let polled = this.poll_part(cx);
        if matches!(polled, Poll::Ready(Some(Ok(_)))) && !this.is_complete {
            this.shared.upload_given();
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.is_complete
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::default()
    }
}
