//! Reading framed messages one by one, with a bound.

use bytes::{Buf, Bytes, BytesMut};
use http_body_util::BodyExt;

use crate::{BoxError, Code, PREFIX_LEN, Status};

/// Hides the type of a body.
pub fn boxed<B>(body: B) -> crate::Body
where
    B: http_body::Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    body.map_err(Into::into).boxed_unsync()
}

/// Returns a body that is these bytes, then the end.
pub fn full(bytes: Bytes) -> crate::Body {
    http_body_util::Full::new(bytes).map_err(|never| match never {}).boxed_unsync()
}

/// Why the next message could not be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The peer reset the stream or its connection broke: what came so far is not all there was.
    #[error("the stream was reset")]
    Reset(#[source] Option<BoxError>),
    /// The body ended inside a message.
    #[error("the stream ended inside a message")]
    Truncated,
    /// A message is larger than the reader accepts.
    #[error("a message of {len} bytes is larger than the limit of {limit}")]
    TooLarge {
        /// What the prefix announced.
        len: usize,
        /// What the reader accepts.
        limit: usize,
    },
    /// The message has the compressed flag, and this stream has no encoding.
    #[error("a message is compressed and no grpc-encoding was announced")]
    Compressed,
}

impl From<&ReadError> for Status {
    fn from(error: &ReadError) -> Self {
        let code = match error {
            ReadError::Reset(_) => Code::Unavailable,
            ReadError::Truncated | ReadError::Compressed => Code::Internal,
            ReadError::TooLarge { .. } => Code::ResourceExhausted,
        };
        Self::new(code, error.to_string())
    }
}

/// Reads messages off a body of gRPC frames.
#[derive(Debug)]
pub struct MessageReader<B> {
    body: B,
    buffer: BytesMut,
    limit: usize,
    trailers: Option<http::HeaderMap>,
    ended: bool,
}

impl<B> MessageReader<B>
where
    B: http_body::Body<Data = Bytes> + Unpin,
    B::Error: Into<BoxError>,
{
    /// Reads from `body`; a message above `limit` bytes is an error.
    pub fn new(body: B, limit: usize) -> Self {
        Self { body, buffer: BytesMut::new(), limit, trailers: None, ended: false }
    }

    /// Returns the next message without its prefix; `None` at a clean end.
    ///
    /// # Errors
    /// See [`ReadError`]; after an error the stream is of no more use.
    ///
    /// # Cancel safety
    /// Cancel safe: what was read stays in the buffer.
    pub async fn next(&mut self) -> Result<Option<Bytes>, ReadError> {
        loop {
            if self.buffer.len() >= PREFIX_LEN {
                let len = u32::from_be_bytes([self.buffer[1], self.buffer[2], self.buffer[3], self.buffer[4]]) as usize;
                if self.buffer[0] != 0 {
                    return Err(ReadError::Compressed);
                }
                if len > self.limit {
                    return Err(ReadError::TooLarge { len, limit: self.limit });
                }
                if self.buffer.len() >= PREFIX_LEN + len {
                    self.buffer.advance(PREFIX_LEN);
                    return Ok(Some(self.buffer.split_to(len).freeze()));
                }
            }
            if self.ended {
                return if self.buffer.is_empty() { Ok(None) } else { Err(ReadError::Truncated) };
            }
            match self.body.frame().await {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => self.buffer.extend_from_slice(&data),
                    Err(frame) => {
                        self.trailers = frame.into_trailers().ok();
                        self.ended = true;
                    }
                },
                Some(Err(error)) => return Err(ReadError::Reset(Some(error.into()))),
                // hyper reports some resets as an end: only the stream's state tells them apart.
                None if self.body.is_end_stream() => self.ended = true,
                None => return Err(ReadError::Reset(None)),
            }
        }
    }

    /// Returns the trailers, once [`next`](Self::next) has returned `None`.
    pub fn trailers(&self) -> Option<&http::HeaderMap> {
        self.trailers.as_ref()
    }
}
