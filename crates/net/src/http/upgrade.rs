//! Connections of HTTP/1.1, and streams of HTTP/2, that become something else.

use std::{io, sync::Arc};

use http::Response;
use hyper::upgrade::{Parts, Upgraded};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite};
use websocket::Rewind;

use super::{connect::Handler, service::Body};
use crate::io::Stream;

/// In the extensions of an answer.
#[derive(Clone)]
struct Agreed(Arc<Mutex<Option<Handler>>>);

/// Lets an answer take over its connection of HTTP/1.1 (with status 101), or its stream of HTTP/2 (with
/// status 200): once it has been sent, `then` is called with the bytes that follow in both directions.
///
/// The server treats the upgraded stream as an open request of the connection. It polls the future in the
/// connection's own task, waits for its end when the process leaves, calls
/// [`Connection::going_away`](super::Connection::going_away), and drops the future at the end of the
/// connection's [`Age::grace`](super::Age::grace), when its [`StreamReset`](super::StreamReset) is used, and
/// half a second after [`Phase::Stopped`](process::lifecycle::Phase::Stopped). A stream of HTTP/2 whose
/// future is dropped is reset. If the future ends, the stream does as well, after what was written, or with a
/// reset if [`Stream::reset_on_close`] was called.
///
/// The request must be one of HTTP/1.1 that asked for an upgrade, or one of HTTP/2 by extended CONNECT: with
/// the method CONNECT and [`Protocol`](hyper::ext::Protocol) in its extensions. Any other connection of
/// HTTP/1.1 is closed, and `then` is not called. Answer extended CONNECT with a status of success only
/// together with this function: the stream is reset otherwise.
pub fn upgrade<F>(answer: &mut Response<Body>, then: impl FnOnce(Stream) -> F + Send + 'static)
where
    F: Future<Output = ()> + Send + 'static,
{
    let handler: Handler = Box::new(|stream| Box::pin(then(stream)));
    answer.extensions_mut().insert(Agreed(Arc::new(Mutex::new(Some(handler)))));
}

/// Takes what [`upgrade`] has put into an answer.
pub(super) fn handler(answer: &mut Response<Body>) -> Option<Handler> {
    answer.extensions_mut().remove::<Agreed>()?.0.lock().take()
}

/// Returns the stream of a connection that was served on an `S`, with what was read of it too early.
///
/// # Errors
/// When it was served on something else.
pub(super) fn stream<S>(upgraded: Upgraded) -> io::Result<(S, bytes::Bytes)>
where
    S: AsyncRead + AsyncWrite + Unpin + 'static,
{
    let Parts { io, read_buf, .. } = upgraded
        .downcast::<TokioIo<S>>()
        .map_err(|_| io::Error::other("the upgraded stream is of another kind"))?;
    Ok((io.into_inner(), read_buf))
}

/// Returns `stream` with `first` before what it still has.
pub(super) fn rewind(stream: Stream, first: bytes::Bytes) -> Stream {
    Stream::Rewound(Box::new(Rewind::new(stream, first)))
}
