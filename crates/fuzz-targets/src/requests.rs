//! Requests through the tunnel.

use std::convert::Infallible;

use bytes::{Bytes, BytesMut};
use futures_util::{FutureExt as _, stream};
use grpc::Deadline;
use http::{HeaderName, HeaderValue};
use http_body::{Body as _, Frame};
use http_body_util::{BodyExt as _, Full, StreamBody};
use http_tunnel::{
    agent_end::read_request,
    kas_end::{impersonated_user, read_first_message, read_response},
};
use kube_request::Upgrade;
use tunnel::{
    features::Features,
    frame::{self, Decoder, Event},
};

/// Headers that must not reach the API server.
const FORBIDDEN: [&str; 10] = [
    "authorization",
    "connection",
    "content-length",
    "cookie",
    "expect",
    "host",
    "keep-alive",
    "te",
    "trailer",
    "upgrade",
];

/// Reads `bytes` as the messages of a request, in chunks of `size` bytes, and as the header of one.
pub(crate) fn request(bytes: &[u8], size: usize) {
    read(bytes, size);
    let mut messages = BytesMut::new();
    frame::put_control(1, bytes, &mut messages);
    frame::put_control(3, &[], &mut messages);
    read(&messages, size);
}

fn read(bytes: &[u8], size: usize) {
    let user_agent = HeaderValue::from_static("agentk");
    for impersonates in [false, true] {
        let body = in_chunks(bytes, size.max(1));
        let read = read_request(body, &user_agent, impersonates).now_or_never();
        let Ok((request, _)) = read.expect("all messages are there") else { continue };
        let mut decoder = Decoder::new(2, 3, false);
        decoder.push(Bytes::copy_from_slice(bytes));
        let first = decoder.next();
        assert!(
            matches!(first, Ok(Some(Event::Control { field: 1, .. }))),
            "the header comes first: {first:?}"
        );

        let path = request.uri().path();
        assert!(
            path.starts_with('/') && !path.split('/').any(|segment| matches!(segment, "." | "..")),
            "{path}"
        );
        assert!(!path.contains(['\r', '\n', ' ']), "{path}");
        let is_upgrade = Upgrade::requested(request.headers()).is_some();
        if is_upgrade {
            assert_eq!(request.headers()["connection"], "Upgrade");
            assert_eq!(request.headers().get_all("upgrade").iter().count(), 1);
            assert!(request.body().is_end_stream() && !request.headers().contains_key("transfer-encoding"));
        }
        for (name, value) in request.headers() {
            let (name, is_ours) = (HeaderName::as_str(name), value == "chunked");
            // Only of these values, for an upgrade, which has no body.
            let asks = is_upgrade && matches!(name, "connection" | "upgrade");
            assert!(asks || !FORBIDDEN.contains(&name), "{name}");
            let begins = ["proxy-", "x-forwarded-", "x-remote-"];
            assert!(!begins.iter().any(|begin| name.starts_with(begin)), "{name}");
            assert!(name != "transfer-encoding" || is_ours, "{name}: {value:?}");
            assert!(!(impersonates && name.starts_with("impersonate-")), "{name}");
        }
        let body = request.into_body().collect().now_or_never();
        drop(body.expect("all of the body is there"));
    }
}

/// Reads `bytes` as an agent's response, and its body as the list of pods.
pub(crate) fn response(bytes: &[u8]) {
    let body = Full::new(Bytes::copy_from_slice(bytes));
    let read = read_response(body, 32 << 20).now_or_never().expect("all of the response is there");
    if let Ok(response) = read {
        kas::pods::fuzz(&response.body);
    }
    kas::pods::fuzz(bytes);
}

/// Reads `bytes` as the body of a caller's request, in chunks of `size` bytes. No byte is lost, and the audit
/// log names the same user that the router takes into account.
pub(crate) fn first_message(bytes: &[u8], size: usize) {
    let read = read_first_message(in_chunks(bytes, size), Deadline::NONE).now_or_never();
    let Ok((message, body)) = read.expect("all of it is there") else { return };
    let passed = body.collect().now_or_never().expect("all of it is there").expect("it ends in order");
    assert_eq!(passed.to_bytes(), bytes, "every byte goes on");
    if message.needs().is_ok_and(|needs| needs.contains(Features::IMPERSONATION)) {
        let header = message.header().expect("it was decoded to find the user");
        assert!(impersonated_user(&header).is_some(), "the audit log names no user: {header:?}");
    }
}

fn in_chunks(bytes: &[u8], size: usize) -> grpc::Body {
    let chunks: Vec<_> = bytes
        .chunks(size)
        .map(|chunk| Ok::<_, Infallible>(Frame::data(Bytes::copy_from_slice(chunk))))
        .collect();
    grpc::boxed(StreamBody::new(stream::iter(chunks)))
}
