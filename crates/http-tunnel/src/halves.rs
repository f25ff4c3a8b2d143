//! Two handles of one stream, for tasks that read and write it independently.

use std::{
    fmt, io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::LARGE_CHUNK;

/// One of the two handles of a stream. The stream is closed when both are dropped.
///
/// Unlike [`tokio::io::split`], a handle gives access to the stream itself. At most one task may read at a
/// time, and one may write.
pub struct Half<S>(Arc<Mutex<S>>);

/// Returns two handles of `stream`.
pub fn halves<S>(stream: S) -> (Half<S>, Half<S>) {
    let shared = Arc::new(Mutex::new(stream));
    (Half(Arc::clone(&shared)), Half(shared))
}

impl<S> Half<S> {
    /// Calls `f` with the stream, which must not block.
    pub fn with<R>(&self, f: impl FnOnce(&S) -> R) -> R {
        f(&self.0.lock())
    }
}

impl<S> fmt::Debug for Half<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Half")
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Half<S> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.0.lock()).poll_read(cx, buf)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Half<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut *self.0.lock()).poll_write(cx, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.0.lock()).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.0.lock()).poll_shutdown(cx)
    }
}

/// What a read has returned, see [`poll_chunk`].
#[derive(Debug)]
pub enum Read<T> {
    /// Bytes, as `take` has returned them.
    Bytes(T),
    /// The peer writes nothing more.
    End,
}

/// Reads at most `max` bytes, and at most [`LARGE_CHUNK`], and returns what `take` makes of them. There is no
/// buffer while nothing is there to read, so an idle stream needs no memory for one.
///
/// A connection with TLS that ends without `close_notify` counts as ended, as without TLS: the protocols
/// inside have ends of their own.
///
/// # Errors
/// Those of the stream, such as a reset.
pub fn poll_chunk<S: AsyncRead + Unpin, T>(
    stream: &mut S,
    cx: &mut Context<'_>,
    max: usize,
    take: impl FnOnce(&[u8]) -> T,
) -> Poll<io::Result<Read<T>>> {
    let mut space = [const { std::mem::MaybeUninit::uninit() }; LARGE_CHUNK];
    let mut buf = ReadBuf::uninit(&mut space[..max.min(LARGE_CHUNK)]);
    Poll::Ready(match std::task::ready!(Pin::new(stream).poll_read(cx, &mut buf)) {
        Ok(()) if buf.filled().is_empty() => Ok(Read::End),
        Ok(()) => Ok(Read::Bytes(take(buf.filled()))),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(Read::End),
        Err(error) => Err(error),
    })
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    #[tokio::test]
    async fn one_half_reads_while_the_other_writes() {
        let (stream, mut peer) = tokio::io::duplex(8);
        let (mut reader, mut writer) = halves(stream);
        let reading = tokio::spawn(async move {
            let mut chunks = Vec::new();
            loop {
                let chunk = std::future::poll_fn(|cx| poll_chunk(&mut reader, cx, 16, <[u8]>::to_vec)).await;
                match chunk.unwrap() {
                    Read::Bytes(bytes) => chunks.extend(bytes),
                    Read::End => return chunks,
                }
            }
        });
        // More than the stream holds, so the writer waits while the reader waits.
        let (written, ()) = tokio::join!(writer.write_all(b"to the peer"), async {
            let mut got = [0; 11];
            peer.read_exact(&mut got).await.unwrap();
            assert_eq!(&got, b"to the peer");
        });
        written.unwrap();
        peer.write_all(b"from the peer").await.unwrap();
        drop(peer);
        assert_eq!(reading.await.unwrap(), b"from the peer");
    }
}
