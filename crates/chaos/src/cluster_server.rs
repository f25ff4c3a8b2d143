//! The Kubernetes API server of an agent of the swarm: it records each request, and knows three of them.
//!
//! `POST …/c-ID` returns what it was sent, a watch of the object `w-ID` gets a numbered event each 100 ms,
//! and an upgraded connection of the pod `x-ID` returns each byte. `POST …/e-ID`, `…/h-ID` and `…/t-ID` do
//! the same as the first, and pause for [`PAUSE`] before the head, in the middle of the body, and before its
//! end. The log of the pod `f-ID` has no end. A Service of it [receives webhooks](receiver),
//! and [the fleet](fleet) asks for pods and metrics.

mod fleet;
mod receiver;

use std::{convert::Infallible, time::Duration};

use anyhow::Result;
use bytes::Bytes;
use http::{Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt as _, Full, StreamBody, combinators::UnsyncBoxBody};
use hyper::{
    body::{Frame, Incoming},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::TokioIo;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpListener,
    sync::{mpsc, watch},
    task::JoinSet,
    time::sleep,
};

use self::receiver::Receiver;
pub(crate) use self::{
    fleet::{COUNT, Hang, Hangs, SERIES, follow},
    receiver::Letter,
};
use crate::{
    frames,
    hash::Counted,
    recorder::{Recorder, Running},
};

/// The time between events of a watch.
const EVENT: Duration = Duration::from_millis(100);

/// The time in which a request stays in one phase.
const PAUSE: Duration = Duration::from_secs(8);
/// A piece of the log without an end.
const PIECE: &[u8] = &[b'l'; 16 * 1024];

type Body = UnsyncBoxBody<Bytes, Infallible>;

pub(crate) async fn listen() -> Result<TcpListener> {
    Ok(TcpListener::bind("127.0.0.1:0").await?)
}

/// Serves until it is dropped.
pub(crate) async fn serve(
    listener: TcpListener,
    agent: i64,
    work: Duration,
    recorder: Recorder,
    hangs: watch::Receiver<Hangs>,
) {
    let mut connections = JoinSet::new();
    let receiver = Receiver::new(agent, recorder.clone());
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            // Out of descriptors: some will be free again.
            sleep(EVENT).await;
            continue;
        };
        let (recorder, receiver, hangs) = (recorder.clone(), receiver.clone(), hangs.clone());
        connections.spawn(async move {
            let service = service_fn(|request: Request<Incoming>| {
                let (recorder, receiver, mut hangs) = (recorder.clone(), receiver.clone(), hangs.clone());
                async move {
                    fleet::hung(&mut hangs, agent, request.uri()).await;
                    respond(request, agent, work, recorder, receiver).await
                }
            });
            let connection = http1::Builder::new().serve_connection(TokioIo::new(stream), service);
            // The client may cut it at any time.
            let _ = connection.with_upgrades().await;
        });
        while connections.try_join_next().is_some() {}
    }
}

/// Returns the id that follows `mark` in a path or query.
fn id(uri: &http::Uri, mark: &str) -> Option<u64> {
    let text = uri.path_and_query()?.as_str();
    let rest = &text[text.find(mark)? + mark.len()..];
    let digits = rest.find(|c: char| !c.is_ascii_digit()).map_or(rest, |end| &rest[..end]);
    digits.parse().ok()
}

async fn respond(
    mut request: Request<Incoming>,
    agent: i64,
    work: Duration,
    recorder: Recorder,
    receiver: Receiver,
) -> Result<Response<Body>, Infallible> {
    recorder.search_headers(request.headers());
    recorder.search(request.uri().to_string().as_bytes());
    if let Some(id) = id(request.uri(), "/pods/x-") {
        recorder.named(id, request.headers());
        let running = recorder.begin(id, agent);
        let key = request.headers().get(header::SEC_WEBSOCKET_KEY).cloned();
        let upgraded = hyper::upgrade::on(&mut request);
        let mut response = Response::new(empty());
        *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
        let headers = response.headers_mut();
        headers.insert(header::CONNECTION, http::HeaderValue::from_static("Upgrade"));
        if let Some(key) = key {
            tokio::spawn(websocket_echo(upgraded, running));
            headers.insert(header::UPGRADE, http::HeaderValue::from_static("websocket"));
            headers.insert(header::SEC_WEBSOCKET_ACCEPT, websocket::upgrade::accept_of(&key));
            let protocol = http::HeaderValue::from_static("v5.channel.k8s.io");
            headers.insert(header::SEC_WEBSOCKET_PROTOCOL, protocol);
        } else {
            tokio::spawn(echo(upgraded, running));
            headers.insert(header::UPGRADE, http::HeaderValue::from_static("SPDY/3.1"));
        }
        return Ok(response);
    }
    if let Some(id) = id(request.uri(), "metadata.name%3Dw-") {
        recorder.named(id, request.headers());
        return Ok(numbered(recorder.begin(id, agent)));
    }
    if let (&Method::POST, Some(id)) = (request.method(), id(request.uri(), "/c-")) {
        recorder.named(id, request.headers());
        return Ok(create(request, work, &recorder, recorder.begin(id, agent)).await);
    }
    for mark in ["/e-", "/h-", "/t-"] {
        if let (&Method::POST, Some(id)) = (request.method(), id(request.uri(), mark)) {
            return Ok(paused(request, mark, recorder.begin(id, agent)).await);
        }
    }
    if request.uri().path() == receiver::PATH {
        return Ok(receiver.receive(request).await);
    }
    if let (&Method::GET, Some(response)) = (request.method(), fleet::answer(request.uri())) {
        return Ok(response);
    }
    if id(request.uri(), "/pods/f-").is_some() {
        let pieces = futures_util::stream::repeat_with(|| Ok(Frame::data(Bytes::from_static(PIECE))));
        return Ok(Response::new(StreamBody::new(pieces).boxed_unsync()));
    }
    let mut response = Response::new(empty());
    *response.status_mut() = StatusCode::NOT_FOUND;
    Ok(response)
}

/// Returns what was sent, and pauses in one phase.
async fn paused(request: Request<Incoming>, mark: &str, mut running: Running) -> Response<Body> {
    let body = request.into_body().collect().await.map(http_body_util::Collected::to_bytes);
    let Ok(body) = body else {
        running.run.received = Some(Counted::default().bytes(false));
        let mut response = Response::new(empty());
        *response.status_mut() = StatusCode::BAD_REQUEST;
        return response;
    };
    running.run.received = Some(Counted::whole(&body));
    running.run.sent = Some(Counted::whole(&body));
    let half = body.len() / 2;
    let pieces = match mark {
        "/e-" => {
            sleep(PAUSE).await;
            vec![body]
        }
        "/h-" => vec![body.slice(..half), body.slice(half..)],
        _ => vec![body, Bytes::new()],
    };
    let stream = futures_util::stream::unfold((pieces.into_iter(), false, running), |state| async move {
        let (mut pieces, later, running) = state;
        let piece = pieces.next()?;
        if later {
            sleep(PAUSE).await;
        }
        Some((Ok(Frame::data(piece)), (pieces, true, running)))
    });
    let mut response = Response::new(StreamBody::new(stream).boxed_unsync());
    *response.status_mut() = StatusCode::CREATED;
    response.headers_mut().insert(header::CONTENT_TYPE, http::HeaderValue::from_static("application/json"));
    response
}

fn empty() -> Body {
    Full::new(Bytes::new()).boxed_unsync()
}

async fn create(
    request: Request<Incoming>,
    work: Duration,
    recorder: &Recorder,
    mut running: Running,
) -> Response<Body> {
    let body = request.into_body().collect().await.map(http_body_util::Collected::to_bytes);
    let Ok(body) = body else {
        running.run.received = Some(Counted::default().bytes(false));
        let mut response = Response::new(empty());
        *response.status_mut() = StatusCode::BAD_REQUEST;
        return response;
    };
    recorder.search(&body);
    running.run.received = Some(Counted::whole(&body));
    sleep(work).await;
    running.run.sent = Some(Counted::whole(&body));
    let mut response = Response::new(Full::new(body).boxed_unsync());
    *response.status_mut() = StatusCode::CREATED;
    response.headers_mut().insert(header::CONTENT_TYPE, http::HeaderValue::from_static("application/json"));
    response
}

/// An event of a watch.
pub(crate) fn event(number: u64) -> String {
    format!("{{\"type\":\"BOOKMARK\",\"object\":{{\"kind\":\"ConfigMap\",\"number\":{number}}}}}\n")
}

fn numbered(running: Running) -> Response<Body> {
    let (events, receiver) = mpsc::channel::<Bytes>(4);
    tokio::spawn(async move {
        // Held until the client is gone.
        let _running = running;
        for number in 0.. {
            if events.send(event(number).into()).await.is_err() {
                break;
            }
            tokio::select! {
                () = sleep(EVENT) => {}
                () = events.closed() => break,
            }
        }
    });
    let stream = futures(receiver);
    let mut response = Response::new(StreamBody::new(stream).boxed_unsync());
    response.headers_mut().insert(header::CONTENT_TYPE, http::HeaderValue::from_static("application/json"));
    response
}

fn futures(
    receiver: mpsc::Receiver<Bytes>,
) -> impl futures_util::Stream<Item = Result<Frame<Bytes>, Infallible>> + Send {
    futures_util::stream::unfold(receiver, |mut receiver| async move {
        let bytes = receiver.recv().await?;
        Some((Ok(Frame::data(bytes)), receiver))
    })
}

async fn echo(upgraded: hyper::upgrade::OnUpgrade, mut running: Running) {
    let Ok(upgraded) = upgraded.await else { return };
    let mut stream = TokioIo::new(upgraded);
    let (mut received, mut sent) = (Counted::default(), Counted::default());
    let mut buffer = vec![0; 16 * 1024];
    let clean = loop {
        match stream.read(&mut buffer).await {
            Ok(0) => break true,
            Ok(read) => {
                received.push(&buffer[..read]);
                if stream.write_all(&buffer[..read]).await.is_err() || stream.flush().await.is_err() {
                    break false;
                }
                sent.push(&buffer[..read]);
            }
            Err(_) => break false,
        }
    };
    // Whether the end of an upgraded connection is in order is not told by every way in between.
    let _ = clean;
    running.run.received = Some(received.bytes(false));
    running.run.sent = Some(sent.bytes(false));
}

/// Returns what is in each frame. What a client and this count is without the channel and the frames.
async fn websocket_echo(upgraded: hyper::upgrade::OnUpgrade, mut running: Running) {
    let Ok(upgraded) = upgraded.await else { return };
    let mut stream = TokioIo::new(upgraded);
    let (mut received, mut sent) = (Counted::default(), Counted::default());
    while let Ok(Some((kind, payload))) = frames::read(&mut stream).await {
        if kind == frames::BINARY {
            received.push(payload.get(1..).unwrap_or_default());
        }
        let back = frames::frame(kind, &payload, None);
        if stream.write_all(&back).await.is_err() || stream.flush().await.is_err() {
            break;
        }
        match kind {
            frames::BINARY => sent.push(payload.get(1..).unwrap_or_default()),
            frames::CLOSE => break,
            _ => {}
        }
    }
    running.run.received = Some(received.bytes(false));
    running.run.sent = Some(sent.bytes(false));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_found_in_paths_and_queries() {
        let uri = http::Uri::from_static("/api/v1/namespaces/a/configmaps/c-17?x=1");
        assert_eq!(id(&uri, "/c-"), Some(17));
        let uri = http::Uri::from_static("/api/v1/configmaps?fieldSelector=metadata.name%3Dw-5&watch=true");
        assert_eq!(id(&uri, "metadata.name%3Dw-"), Some(5));
        assert_eq!(id(&uri, "/c-"), None);
    }
}
