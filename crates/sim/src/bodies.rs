//! Bodies of requests and tunnels over the simulated network.
//!
//! The bodies of the product read streams of HTTP/2, which is not simulated: a tunnel is a connection of its
//! own here, and its clean end must be told apart from a reset, which `is_end_stream` does. So `StreamBody`
//! of http-body-util, which never says so, would not do either.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::{BufMut as _, Bytes, BytesMut};
use grpc::{BoxError, Status};
use http::HeaderMap;
use http_body::{Body, Frame};
use parking_lot::Mutex;
use tokio::{
    io::{AsyncRead, ReadBuf, ReadHalf},
    time::{Instant, Sleep},
};

use crate::{network::Stream, record::Counted};

/// What a connection delivers, as a body. Its clean end is the end of the body.
pub(crate) struct ReadBody {
    half: ReadHalf<Stream>,
    buffer: Box<[u8]>,
    ended: bool,
}

impl ReadBody {
    pub(crate) fn new(half: ReadHalf<Stream>) -> Self {
        Self { half, buffer: vec![0; 16 * 1024].into(), ended: false }
    }
}

impl Body for ReadBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let this = self.get_mut();
        if this.ended {
            return Poll::Ready(None);
        }
        let mut buffer = ReadBuf::new(&mut this.buffer);
        let read = ready!(Pin::new(&mut this.half).poll_read(cx, &mut buffer));
        Poll::Ready(match read {
            Ok(()) if buffer.filled().is_empty() => {
                this.ended = true;
                None
            }
            Ok(()) => Some(Ok(Frame::data(Bytes::copy_from_slice(buffer.filled())))),
            Err(error) => Some(Err(error.into())),
        })
    }

    fn is_end_stream(&self) -> bool {
        self.ended
    }
}

/// What a side has sent; shared with its body.
pub(crate) type Sent = Arc<Mutex<Counted>>;

/// Messages of given lengths, some time apart, with contents that depend on a number.
pub(crate) struct Messages {
    number: u64,
    left: std::vec::IntoIter<usize>,
    gap: Duration,
    wait: Option<Pin<Box<Sleep>>>,
    trailers: Option<HeaderMap>,
    ended: bool,
    sent: Sent,
}

impl Messages {
    pub(crate) fn new(number: u64, lengths: Vec<usize>, gap: Duration, sent: Sent) -> Self {
        Self { number, left: lengths.into_iter(), gap, wait: None, trailers: None, ended: false, sent }
    }

    /// Ends with the status OK.
    pub(crate) fn with_status(mut self) -> Self {
        let mut trailers = HeaderMap::new();
        Status::write_ok(&mut trailers);
        self.trailers = Some(trailers);
        self
    }
}

/// Returns a message of this length, with its prefix.
fn message(number: u64, len: usize) -> Bytes {
    let mut out = BytesMut::with_capacity(grpc::PREFIX_LEN + len + 4);
    out.put_slice(&grpc::prefix(u32::try_from(len).unwrap_or_default()));
    let mut word = number;
    while out.len() < grpc::PREFIX_LEN + len {
        // The upper half changes well from word to word, the lower bits do not.
        word = word.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let [a, b, c, d, ..] = word.to_be_bytes();
        out.put_slice(&[a, b, c, d]);
    }
    out.truncate(grpc::PREFIX_LEN + len);
    out.freeze()
}

impl Body for Messages {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let this = self.get_mut();
        if let Some(wait) = &mut this.wait {
            ready!(wait.as_mut().poll(cx));
            this.wait = None;
        }
        let Some(len) = this.left.next() else {
            this.sent.lock().end();
            this.ended = true;
            return Poll::Ready(this.trailers.take().map(|trailers| Ok(Frame::trailers(trailers))));
        };
        let message = message(this.number, len);
        this.number = this.number.wrapping_add(0x9e37_79b9);
        this.sent.lock().add(&message);
        if !this.gap.is_zero() && this.left.len() > 0 {
            this.wait = Some(Box::pin(tokio::time::sleep_until(Instant::now() + this.gap)));
        }
        Poll::Ready(Some(Ok(Frame::data(message))))
    }

    fn is_end_stream(&self) -> bool {
        self.ended && self.trailers.is_none()
    }
}
