//! Bytes of an agent inside WebSocket: frames, then HTTP/2 with header blocks. No panic; what comes out does not
//! depend on how the bytes were cut; and little is held.
#![no_main]

use std::{
    io,
    pin::Pin,
    task::{Context, Poll, Waker},
};

use libfuzzer_sys::fuzz_target;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use websocket::{
    ByteStream, Role,
    authority::{Filter, MAX_HELD, PREFACE},
};

/// A socket that gives its bytes in pieces and takes everything.
struct Pieces<'a>(std::slice::Chunks<'a, u8>);

impl AsyncRead for Pieces<'_> {
    fn poll_read(mut self: Pin<&mut Self>, _: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        buf.put_slice(self.0.next().unwrap_or_default());
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Pieces<'_> {
    fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Poll::Ready(Ok(buf.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

/// Everything that is read, and whether it ended with an error.
fn unframed(bytes: &[u8], size: usize, role: Role) -> (Vec<u8>, bool) {
    let mut stream = ByteStream::new(Pieces(bytes.chunks(size)), role);
    let mut cx = Context::from_waker(Waker::noop());
    let (mut got, mut buf) = (Vec::new(), vec![0; bytes.len().max(1)]);
    loop {
        let mut buf = ReadBuf::new(&mut buf);
        match Pin::new(&mut stream).poll_read(&mut cx, &mut buf) {
            Poll::Ready(Ok(())) if buf.filled().is_empty() => return (got, false),
            Poll::Ready(Ok(())) => got.extend_from_slice(buf.filled()),
            Poll::Ready(Err(_)) => return (got, true),
            Poll::Pending => unreachable!("the socket is always ready"),
        }
    }
}

fn filtered(bytes: &[u8], size: usize) -> Vec<u8> {
    let (mut filter, mut got) = (Filter::default(), Vec::new());
    for piece in PREFACE.chunks(size).chain(bytes.chunks(size)) {
        let passed = filter.pass(piece);
        got.extend_from_slice(&piece[..passed]);
        got.extend_from_slice(&filter.out().split());
        assert!(filter.held() <= MAX_HELD + 9);
    }
    got
}

fuzz_target!(|input: (u8, Vec<u8>)| {
    let (size, bytes) = input;
    let size = usize::from(size).max(1);
    for role in [Role::Client, Role::Server] {
        let (whole, failed) = unframed(&bytes, bytes.len().max(1), role);
        let (pieces, failed_too) = unframed(&bytes, size, role);
        assert_eq!(failed, failed_too);
        // Payload before a violation may be read, or not, in the piece that has the violation.
        assert!(failed && pieces.starts_with(&whole) || pieces == whole);
    }
    let whole = filtered(&bytes, bytes.len() + PREFACE.len());
    assert_eq!(filtered(&bytes, size), whole);
    // Only a value that was in Huffman code becomes longer.
    assert!(whole.len() <= PREFACE.len() + 2 * bytes.len() + 64);
});
