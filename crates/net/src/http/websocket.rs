//! HTTP/2 inside WebSocket: the upgrade by HTTP/1.1, and HTTP/2 itself on the same port.

use std::{convert::Infallible, io};

use ::websocket::{Authorities, ByteStream, Rewind, Role, upgrade as handshake};
use http::Response;
use http_body_util::Full;
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;

use super::{
    http1,
    upgrade::stream as stream_of,
    version::{Version, sniff},
};
use crate::io::Stream;

/// The most bytes of the request's head: that of an agent behind a few proxies has less than 2 KiB.
const HEADERS_SIZE: usize = 16 * 1024;
/// And the most headers.
const HEADERS_COUNT: usize = 64;

/// Returns a stream from which HTTP/2 can be read: `stream` itself if that is what comes, else what is
/// inside WebSocket. The caller bounds the time.
///
/// # Errors
/// If neither comes. The peer has got an answer.
pub(super) async fn enter(stream: Stream) -> io::Result<Stream> {
    match sniff(stream).await? {
        (Version::Http2, stream) => Ok(stream),
        (Version::Http1, stream) => upgraded(stream).await,
    }
}

/// Whether the client offered the subprotocol, and the future connection.
type Upgrade = Mutex<Option<(bool, OnUpgrade)>>;

async fn upgraded(stream: Stream) -> io::Result<Stream> {
    let upgrade = Upgrade::default();
    let answer = hyper::service::service_fn(|request| {
        let response = match handshake::answer(&request) {
            Ok(answer) => {
                *upgrade.lock() = Some((answer.subprotocol, hyper::upgrade::on(request)));
                answer.response.map(|()| Full::default())
            }
            Err(refused) => refused.response().map(|()| Full::from(format!("{refused}\n"))),
        };
        std::future::ready(Ok::<Response<Full<bytes::Bytes>>, Infallible>(response))
    });
    http1::builder(HEADERS_SIZE)
        .max_headers(HEADERS_COUNT)
        .serve_connection(TokioIo::new(stream), answer)
        .with_upgrades()
        .await
        .map_err(io::Error::other)?;
    let (subprotocol, on) =
        upgrade.into_inner().ok_or_else(|| io::Error::other("no request for WebSocket came"))?;
    let (stream, first) = stream_of::<Stream>(on.await.map_err(io::Error::other)?)?;
    let stream = ByteStream::new(Rewind::new(stream, first), Role::Server);
    if !subprotocol {
        stream.close(handshake::PROTOCOL_ERROR, handshake::NO_SUBPROTOCOL).await?;
        return Err(io::Error::other("the subprotocol of agents was not offered"));
    }
    Ok(Stream::WebSocket(Box::new(Authorities::new(stream))))
}
