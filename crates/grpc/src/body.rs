//! Reads length-prefixed messages one by one, with a size limit.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::{Buf, BufMut as _, Bytes, BytesMut};
use http_body::Frame;
use http_body_util::BodyExt;

use crate::{BoxError, Code, PREFIX_LEN, Status};

/// Erases the type of a body.
pub fn boxed<B>(body: B) -> crate::Body
where
    B: http_body::Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    body.map_err(Into::into).boxed_unsync()
}

/// Returns a body of these bytes.
pub fn full(bytes: Bytes) -> crate::Body {
    http_body_util::Full::new(bytes).map_err(|never| match never {}).boxed_unsync()
}

/// Why the next message could not be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The peer reset the stream, or the connection broke: the body is incomplete.
    #[error("the stream was reset")]
    Reset(#[source] Option<BoxError>),
    /// The body ended inside a message.
    #[error("the stream ended inside a message")]
    Truncated,
    /// A message is larger than the reader's limit.
    #[error("a message of {len} bytes is larger than the limit of {limit}")]
    TooLarge {
        /// The length in the prefix.
        len: usize,
        /// The reader's limit.
        limit: usize,
    },
    /// The message has the compressed flag, but the stream announced no encoding.
    #[error("a message is compressed and no grpc-encoding was announced")]
    Compressed,
    /// A compressed message is corrupt, or inflates to more than the reader's limit.
    #[error("compressed message")]
    Gzip(#[from] crate::gzip::Error),
}

impl From<&ReadError> for Status {
    fn from(error: &ReadError) -> Self {
        let code = match error {
            ReadError::Reset(_) => Code::Unavailable,
            ReadError::Truncated | ReadError::Compressed => Code::Internal,
            ReadError::Gzip(crate::gzip::Error::Corrupt(_) | crate::gzip::Error::Truncated) => Code::Internal,
            ReadError::TooLarge { .. } | ReadError::Gzip(_) => Code::ResourceExhausted,
        };
        Self::new(code, error.to_string())
    }
}

/// Reads messages from a body of gRPC frames.
#[derive(Debug)]
pub struct MessageReader<B> {
    body: B,
    buffer: BytesMut,
    limit: usize,
    gzip: bool,
    trailers: Option<http::HeaderMap>,
    ended: bool,
}

impl<B> MessageReader<B>
where
    B: http_body::Body<Data = Bytes> + Unpin,
    B::Error: Into<BoxError>,
{
    /// Reads from `body`. A message larger than `limit` bytes is an error.
    pub fn new(body: B, limit: usize) -> Self {
        Self { body, buffer: BytesMut::new(), limit, gzip: false, trailers: None, ended: false }
    }

    /// Accepts compressed messages if `gzip`: the stream announced that encoding.
    pub fn with_gzip(mut self, gzip: bool) -> Self {
        self.gzip = gzip;
        self
    }

    /// Returns the next message without its prefix; `None` at a clean end.
    ///
    /// # Errors
    /// See [`ReadError`]. Do not read on after an error.
    ///
    /// # Cancel safety
    /// Cancel safe: bytes that were read stay in the buffer.
    pub async fn next(&mut self) -> Result<Option<Bytes>, ReadError> {
        std::future::poll_fn(|cx| self.poll_next(cx)).await
    }

    /// See [`next`](Self::next).
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Result<Option<Bytes>, ReadError>> {
        loop {
            if let Some(message) = self.take()? {
                return Poll::Ready(Ok(Some(message)));
            }
            if self.ended {
                let clean = self.buffer.is_empty();
                return Poll::Ready(if clean { Ok(None) } else { Err(ReadError::Truncated) });
            }
            match ready!(Pin::new(&mut self.body).poll_frame(cx)) {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => self.buffer.extend_from_slice(&data),
                    Err(frame) => {
                        self.trailers = frame.into_trailers().ok();
                        self.ended = true;
                    }
                },
                Some(Err(error)) => return Poll::Ready(Err(ReadError::Reset(Some(error.into())))),
                // hyper reports some resets as an end of the body: only `is_end_stream` tells them apart.
                None if self.body.is_end_stream() => self.ended = true,
                None => return Poll::Ready(Err(ReadError::Reset(None))),
            }
        }
    }

    /// Takes a complete message out of the buffer.
    fn take(&mut self) -> Result<Option<Bytes>, ReadError> {
        let [flag, a, b, c, d, ..] = *self.buffer else { return Ok(None) };
        let len = u32::from_be_bytes([a, b, c, d]) as usize;
        let packed = flag == 1 && self.gzip;
        if flag != 0 && !packed {
            return Err(ReadError::Compressed);
        }
        if len > self.limit {
            return Err(ReadError::TooLarge { len, limit: self.limit });
        }
        if self.buffer.len() < PREFIX_LEN + len {
            return Ok(None);
        }
        self.buffer.advance(PREFIX_LEN);
        let message = self.buffer.split_to(len).freeze();
        Ok(Some(if packed { crate::gzip::inflate(message, self.limit)? } else { message }))
    }

    /// Returns the trailers, once [`next`](Self::next) has returned `None`.
    pub fn trailers(&self) -> Option<&http::HeaderMap> {
        self.trailers.as_ref()
    }
}

/// A compressed body as an uncompressed one.
///
/// The length of an inflated message precedes it, so each message is buffered whole. The reader's limit
/// bounds that buffer.
#[derive(Debug)]
pub struct InflateBody<B>(MessageReader<B>);

impl<B> InflateBody<B>
where
    B: http_body::Body<Data = Bytes> + Unpin,
    B::Error: Into<BoxError>,
{
    /// Inflates the messages of `body`, each to at most `limit` bytes.
    pub fn new(body: B, limit: usize) -> Self {
        Self(MessageReader::new(body, limit).with_gzip(true))
    }
}

impl<B> http_body::Body for InflateBody<B>
where
    B: http_body::Body<Data = Bytes> + Unpin,
    B::Error: Into<BoxError>,
{
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        Poll::Ready(match ready!(self.0.poll_next(cx)) {
            Ok(None) => None,
            Ok(Some(message)) => {
                let mut out = BytesMut::with_capacity(PREFIX_LEN + message.len());
                // The limit is far below 4 GiB.
                out.put_slice(&crate::prefix(u32::try_from(message.len()).unwrap_or(u32::MAX)));
                out.put_slice(&message);
                Some(Ok(Frame::data(out.freeze())))
            }
            Err(error @ ReadError::Reset(_)) => Some(Err(error.into())),
            Err(error) => Some(Err(Box::new(Status::from(&error)))),
        })
    }

    fn is_end_stream(&self) -> bool {
        self.0.ended && self.0.buffer.is_empty()
    }
}
