//! gRPC on plain `http` bodies: what kas and agentk need besides tonic.
//!
//! The data path moves bytes between HTTP/2 streams and decodes no message. This crate has what that needs:
//! [`Status`] and its form in trailers, [`Deadline`]s, reading and writing length-prefixed messages with a
//! size limit, and gzip. It opens no sockets and spawns no tasks.

use bytes::{BufMut, Bytes, BytesMut};
use prost::Message;

mod body;
mod deadline;
pub mod gzip;
pub mod service;
mod status;
#[cfg(feature = "testing")]
pub mod testing;

pub use body::{InflateBody, MessageReader, ReadError, boxed, full};
pub use deadline::{Deadline, InvalidTimeout, format_timeout, parse_timeout};
pub use status::{Code, KAS_DOMAIN, Outcome, Status};

/// Any error of a body.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// A body of gRPC frames, with its concrete type erased.
pub type Body = http_body_util::combinators::UnsyncBoxBody<Bytes, BoxError>;

/// Length of the prefix of each message: a flag and a 4-byte length.
pub const PREFIX_LEN: usize = 5;

/// The content type of every gRPC body that this project writes.
pub const CONTENT_TYPE: http::HeaderValue = http::HeaderValue::from_static("application/grpc");

/// The request id, passed from the caller to agentk and back.
pub const CORRELATION_ID: http::HeaderName = http::HeaderName::from_static("x-gitlab-correlation-id");

/// Returns the prefix of an uncompressed message of `len` bytes.
pub fn prefix(len: u32) -> [u8; PREFIX_LEN] {
    let l = len.to_be_bytes();
    [0, l[0], l[1], l[2], l[3]]
}

/// Appends `message` with its prefix.
pub fn encode_into(message: &impl Message, out: &mut BytesMut) {
    let len = message.encoded_len();
    out.reserve(PREFIX_LEN + len);
    // A message of 4 GiB cannot exist: prost refuses buffers above 2 GiB.
    out.put_slice(&prefix(u32::try_from(len).expect("a protobuf message is smaller than 2 GiB")));
    message.encode(out).expect("the buffer grows");
}

/// Returns `message` with its prefix.
pub fn encode(message: &impl Message) -> Bytes {
    let mut out = BytesMut::new();
    encode_into(message, &mut out);
    out.freeze()
}

/// Whether `content-type` is gRPC: `application/grpc`, with or without a suffix such as `+proto`.
pub fn is_grpc(headers: &http::HeaderMap) -> bool {
    headers
        .get(http::header::CONTENT_TYPE)
        .and_then(|v| v.as_bytes().strip_prefix(b"application/grpc"))
        .is_some_and(|rest| rest.is_empty() || rest[0] == b'+' || rest[0] == b';')
}
