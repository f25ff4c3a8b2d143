//! The upgrade to WebSocket, and its neighbour: HTTP/2 on the same port.

use std::{
    convert::Infallible,
    io,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use bytes::Bytes;
use http::Response;
use http_body_util::Full;
use hyper::{
    server::conn::http1,
    upgrade::{OnUpgrade, Parts},
};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::AsyncReadExt as _;
use websocket::{Authorities, ByteStream, Rewind, Role, authority::PREFACE, upgrade};

use crate::io::Stream;

/// Bytes that tell HTTP/2 from HTTP/1.1, whose methods do not begin like its preface.
const TOLD: usize = 4;
/// The most bytes of the request's head: that of an agent behind a few proxies has less than 2 KiB.
const HEADERS_SIZE: usize = 16 * 1024;
/// And the most headers.
const HEADERS_COUNT: usize = 64;

/// Returns a stream from which HTTP/2 can be read: `stream` itself if that is what comes, else what is
/// inside WebSocket. The headers of a request must be there `within` this time; the caller bounds the whole.
///
/// # Errors
/// When neither comes; the peer has been told.
pub(crate) async fn enter(mut stream: Stream, within: Duration) -> io::Result<Stream> {
    let mut first = [0; PREFACE.len()];
    let mut len = 0;
    loop {
        let n = stream.read(&mut first[len..]).await?;
        if n == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        len += n;
        let same = len.min(TOLD);
        let is_http2 = first[..same] == PREFACE[..same];
        if is_http2 && len < TOLD {
            continue;
        }
        let stream = Stream::Rewound(Box::new(Rewind::new(stream, Bytes::copy_from_slice(&first[..len]))));
        return if is_http2 { Ok(stream) } else { upgraded(stream, within).await };
    }
}

/// Whether the client offered the subprotocol, and the connection that will be.
type Upgrade = Mutex<Option<(bool, OnUpgrade)>>;

async fn upgraded(stream: Stream, within: Duration) -> io::Result<Stream> {
    let upgrade = Upgrade::default();
    let answer = hyper::service::service_fn(|request| {
        let response = match upgrade::answer(&request) {
            Ok(answer) => {
                let on = (answer.subprotocol, hyper::upgrade::on(request));
                *upgrade.lock().unwrap_or_else(PoisonError::into_inner) = Some(on);
                answer.response.map(|()| Full::default())
            }
            Err(refused) => refused.response().map(|()| Full::from(format!("{refused}\n"))),
        };
        std::future::ready(Ok::<Response<Full<Bytes>>, Infallible>(response))
    });
    http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(within)
        .max_buf_size(HEADERS_SIZE)
        .max_headers(HEADERS_COUNT)
        .serve_connection(TokioIo::new(stream), answer)
        .with_upgrades()
        .await
        .map_err(io::Error::other)?;
    let upgrade = upgrade.into_inner().unwrap_or_else(PoisonError::into_inner);
    let (subprotocol, on) = upgrade.ok_or_else(|| io::Error::other("no request for WebSocket came"))?;
    let Parts { io, read_buf, .. } = on
        .await
        .map_err(io::Error::other)?
        .downcast::<TokioIo<Stream>>()
        .map_err(|_| io::Error::other("the upgraded stream is of another kind"))?;
    let stream = ByteStream::new(Rewind::new(io.into_inner(), read_buf), Role::Server);
    if !subprotocol {
        stream.close(upgrade::PROTOCOL_ERROR, upgrade::NO_SUBPROTOCOL).await?;
        return Err(io::Error::other("the subprotocol of agents was not offered"));
    }
    Ok(Stream::WebSocket(Box::new(Authorities::new(stream))))
}
