//! A stream that first returns bytes that have already been read from it.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll},
};

use bytes::{Buf as _, Bytes};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Returns the bytes that were read already, then those of the stream.
#[derive(Debug)]
pub struct Rewind<S> {
    first: Bytes,
    stream: S,
}

impl<S> Rewind<S> {
    /// Puts `first` before the remaining bytes of `stream`.
    pub fn new(stream: S, first: Bytes) -> Self {
        Self { first, stream }
    }

    /// Returns the stream.
    pub fn get_ref(&self) -> &S {
        &self.stream
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Rewind<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.first.is_empty() {
            return Pin::new(&mut self.stream).poll_read(cx, buf);
        }
        let n = self.first.len().min(buf.remaining());
        buf.put_slice(&self.first[..n]);
        self.first.advance(n);
        if self.first.is_empty() {
            // Frees the memory, which may be part of a larger buffer.
            self.first = Bytes::new();
        }
        Poll::Ready(Ok(()))
    }
}

crate::write_through!([S: AsyncWrite + Unpin] Rewind<S>, stream in Self { stream, .. });
