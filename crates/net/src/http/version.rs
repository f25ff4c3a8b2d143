//! Detects the version of HTTP.

use std::io;

use bytes::Bytes;
use tokio::io::AsyncReadExt as _;
use websocket::authority::PREFACE;

use super::upgrade::rewind;
use crate::io::Stream;

/// How many bytes distinguish HTTP/2 from HTTP/1.1. No method of HTTP/1.1 begins like the preface of HTTP/2.
const DISTINCT: usize = 4;

/// The version of HTTP that a connection speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Version {
    /// HTTP/1.1 or HTTP/1.0.
    Http1,
    /// HTTP/2.
    Http2,
}

/// Detects the version by the first bytes of `stream`, and returns it with all its bytes. The caller bounds
/// the time.
///
/// # Errors
/// If the stream ends or fails before that.
pub(super) async fn sniff(mut stream: Stream) -> io::Result<(Version, Stream)> {
    let mut first = [0; PREFACE.len()];
    let mut len = 0;
    loop {
        let n = stream.read(&mut first[len..]).await?;
        if n == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        len += n;
        let same = len.min(DISTINCT);
        let is_http2 = first[..same] == PREFACE[..same];
        if is_http2 && len < DISTINCT {
            continue;
        }
        let version = if is_http2 { Version::Http2 } else { Version::Http1 };
        return Ok((version, rewind(stream, Bytes::copy_from_slice(&first[..len]))));
    }
}
