//! Input from callers and agents that is parsed first: metadata, bodies, WebSocket.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll, Waker},
};

use bytes::{Bytes, BytesMut};
use futures_util::FutureExt as _;
use grpc::{Deadline, InflateBody, MessageReader};
use http::{HeaderMap, HeaderName, HeaderValue, Request};
use http_body::{Body, Frame};
use http_body_util::BodyExt as _;
use prost::Message as _;
use proto::gitlab::agent::reverse_tunnel::rpc::RequestInfo;
use routing::metadata::{self, Target};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tunnel::meta::Binary;
use websocket::{
    ByteStream, Role,
    authority::{Filter, MAX_HELD, PREFACE},
};

use crate::first;

/// The size limit of messages in these targets.
const LIMIT: usize = 64 * 1024;

/// Parses lines of `name: value` and omits invalid ones.
fn headers(bytes: &[u8]) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for line in bytes.split(|byte| *byte == b'\n') {
        let Some(colon) = line.iter().skip(1).position(|byte| *byte == b':').map(|at| at + 1) else {
            continue;
        };
        let (Ok(name), Ok(value)) =
            (HeaderName::from_bytes(&line[..colon]), HeaderValue::from_bytes(line[colon + 1..].trim_ascii()))
        else {
            continue;
        };
        // The limit of HTTP/2.
        if headers.try_append(name, value).is_err() {
            break;
        }
    }
    headers
}

/// Metadata of callers, as lines. No panic, and neither credentials nor keys of kas reach an agent.
pub fn caller_metadata(bytes: &[u8]) {
    let headers = headers(bytes);
    let _ = Target::read(&headers);
    let _ = identity::jwt::bearer(&headers);
    let deadline = Deadline::from_headers(&headers).unwrap_or(Deadline::NONE);
    let correlation = metadata::correlation(&headers);
    for binary in [Binary::Base64, Binary::Raw] {
        let Ok(writer) = metadata::request_info("/a.B/C", &headers, deadline, &correlation, binary) else {
            continue;
        };
        let info = RequestInfo::decode(writer.into_body()).expect("what is written can be read");
        assert_eq!(info.method_name, "/a.B/C");
        for key in info.meta.keys() {
            assert!(!key.starts_with("kas-") && !key.starts_with(':'), "{key}");
            assert!(!key.starts_with("grpc-") || key == "grpc-timeout", "{key}");
            assert!(
                !matches!(key.as_str(), "authorization" | "cookie" | "proxy-authorization" | "te"),
                "{key}"
            );
        }
    }
    if let Ok(text) = std::str::from_utf8(bytes)
        && let Ok(uri) = text.parse()
    {
        metadata::is_method(&uri);
    }
}

/// A body in chunks of a fixed size.
struct Pieces<'a>(std::slice::Chunks<'a, u8>);

impl Body for Pieces<'_> {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        Poll::Ready(self.0.next().map(|piece| Ok(Frame::data(Bytes::copy_from_slice(piece)))))
    }

    fn is_end_stream(&self) -> bool {
        self.0.len() == 0
    }
}

/// Returns the messages of a body, and the error at their end.
fn messages(bytes: &[u8], size: usize, gzip: bool) -> (Vec<Bytes>, Option<String>) {
    let mut reader = MessageReader::new(Pieces(bytes.chunks(size)), LIMIT).with_gzip(gzip);
    let mut messages = Vec::new();
    loop {
        match reader.next().now_or_never().expect("the body is always ready") {
            Ok(Some(message)) => {
                assert!(message.len() <= LIMIT);
                messages.push(message);
            }
            Ok(None) => return (messages, None),
            Err(error) => return (messages, Some(error.to_string())),
        }
    }
}

/// gRPC bodies; the first byte is the size of chunks. No panic, no message above the limit, and the same
/// messages for any chunks, plain or compressed.
pub fn request_bodies(bytes: &[u8]) {
    let (size, bytes) = first(bytes);
    let size = usize::from(size).max(1);
    for gzip in [false, true] {
        let whole = messages(bytes, bytes.len().max(1), gzip);
        assert_eq!(messages(bytes, size, gzip), whole);
        if gzip {
            let body = InflateBody::new(Pieces(bytes.chunks(size)), LIMIT);
            let plain = body.collect().now_or_never().expect("the body is always ready");
            assert_eq!(plain.is_ok(), whole.1.is_none());
            if let Ok(plain) = plain {
                let mut expected = BytesMut::new();
                for message in &whole.0 {
                    expected.extend_from_slice(&grpc::prefix(message.len() as u32));
                    expected.extend_from_slice(message);
                }
                assert_eq!(plain.to_bytes(), expected);
            }
        }
    }
}

/// Requests for an upgrade to WebSocket, as lines. No panic, and no page of another host is accepted.
pub fn upgrade(bytes: &[u8]) {
    let headers = headers(bytes);
    let origin = headers.get(http::header::ORIGIN).cloned();
    let host = headers.get(http::header::HOST).cloned();
    let mut request = Request::new(());
    *request.headers_mut() = headers;
    match websocket::upgrade::answer(&request) {
        Ok(answer) => {
            assert_eq!(answer.response.status(), 101);
            if let Some(origin) = origin {
                let host = host.expect("an origin is compared with a host");
                assert!(
                    origin.as_bytes().to_ascii_lowercase().ends_with(&host.as_bytes().to_ascii_lowercase())
                );
            }
        }
        Err(refused) => assert!(refused.response().status().is_client_error()),
    }
}

/// A socket that returns its bytes in chunks and accepts all writes.
struct Socket<'a>(std::slice::Chunks<'a, u8>);

impl AsyncRead for Socket<'_> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        buf.put_slice(self.0.next().unwrap_or_default());
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Socket<'_> {
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

/// Returns everything that was read, and whether it ended with an error.
fn unframed(bytes: &[u8], size: usize, role: Role) -> (Vec<u8>, bool) {
    let mut stream = ByteStream::new(Socket(bytes.chunks(size)), role);
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

/// Bytes of an agent inside WebSocket: frames, then HTTP/2 with header blocks. The first byte is the size of
/// chunks. No panic, the output does not depend on the chunks, and few bytes are buffered.
pub fn websocket(bytes: &[u8]) {
    let (size, bytes) = first(bytes);
    let size = usize::from(size).max(1);
    for role in [Role::Client, Role::Server] {
        let (whole, failed) = unframed(bytes, bytes.len().max(1), role);
        let (pieces, failed_too) = unframed(bytes, size, role);
        assert_eq!(failed, failed_too);
        // Payload before a violation may or may not be read if both are in the same chunk.
        assert!(failed && pieces.starts_with(&whole) || pieces == whole);
    }
    let whole = filtered(bytes, bytes.len() + PREFACE.len());
    assert_eq!(filtered(bytes, size), whole);
    // Only a value in Huffman code becomes longer.
    assert!(whole.len() <= PREFACE.len() + 2 * bytes.len() + 64);
}
