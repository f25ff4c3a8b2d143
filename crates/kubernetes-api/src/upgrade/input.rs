//! What a client sends on an upgraded connection, as messages for the agent.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use bytes::{BufMut as _, Bytes, BytesMut};
use grpc::BoxError;
use http_body::{Body, Frame, SizeHint};
use http_tunnel::{
    MAX_CHUNK, field,
    halves::{Read, poll_chunk},
};
use prometheus_client::metrics::counter::Counter;
use routing::router::ChosenAgentk;
use tunnel::frame;

use super::link::{Link, Phase};
use crate::{
    message::RequestHead,
    open::{Shared, Verdict},
};

/// Room for the head of a message.
const HEAD: usize = 24;

/// The client's connection was reset.
#[derive(Debug, thiserror::Error)]
#[error("the client's connection was reset")]
struct Reset;

/// The messages of a request that asks for an upgrade, as a body of gRPC frames: its head, and after the
/// answer what the [`Link`] says.
pub(crate) struct Input {
    /// Until it is written.
    head: Option<(RequestHead, ChosenAgentk)>,
    link: Link,
    shared: Arc<Shared>,
    passed: Counter,
    has_ended: bool,
}

/// What the client has sent.
enum Got {
    Message(Bytes),
    End,
    Reset,
}

impl Input {
    /// `passed` counts the bytes of the client.
    pub(crate) fn new(
        head: RequestHead,
        chosen: ChosenAgentk,
        link: Link,
        shared: Arc<Shared>,
        passed: Counter,
    ) -> Self {
        Self { head: Some((head, chosen)), link, shared, passed, has_ended: false }
    }

    fn poll_client(&mut self, cx: &mut Context<'_>) -> Poll<Got> {
        let passed = &self.passed;
        self.link.read(cx, |phase, cx| {
            let client = match phase {
                Phase::Held => return (Poll::Pending, false),
                Phase::Ended => return (Poll::Ready(Got::End), false),
                Phase::Open(client) => client,
            };
            let polled = poll_chunk(client, cx, MAX_CHUNK, |bytes| {
                passed.inc_by(bytes.len() as u64);
                message(bytes)
            });
            match polled {
                Poll::Pending => (Poll::Pending, false),
                Poll::Ready(Ok(Read::Bytes(message))) => (Poll::Ready(Got::Message(message)), false),
                Poll::Ready(Ok(Read::End)) => {
                    *phase = Phase::Ended;
                    (Poll::Ready(Got::End), true)
                }
                Poll::Ready(Err(_)) => {
                    *phase = Phase::Held;
                    (Poll::Ready(Got::Reset), false)
                }
            }
        })
    }
}

/// Returns a message with these bytes of the upgraded connection, at most 32 KiB.
fn message(bytes: &[u8]) -> Bytes {
    let mut out = BytesMut::with_capacity(HEAD + bytes.len());
    frame::put_message_head(field::UPGRADE_DATA, bytes.len() as u32, &mut out);
    out.put_slice(bytes);
    out.freeze()
}

impl Body for Input {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let this = self.get_mut();
        if let Some((head, chosen)) = this.head.take() {
            let mut out = BytesMut::new();
            frame::put_control(field::HEADER, &head.encode(chosen.features()), &mut out);
            frame::put_control(field::TRAILER, &[], &mut out);
            this.shared.upload_ends();
            return Poll::Ready(Some(Ok(Frame::data(out.freeze()))));
        }
        if this.has_ended {
            return Poll::Ready(None);
        }
        match std::task::ready!(this.poll_client(cx)) {
            Got::Message(message) => Poll::Ready(Some(Ok(Frame::data(message)))),
            Got::End => {
                this.has_ended = true;
                Poll::Ready(None)
            }
            Got::Reset => {
                this.shared.end(Verdict::BrokenUpload);
                Poll::Ready(Some(Err(Reset.into())))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.has_ended
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::default()
    }
}
