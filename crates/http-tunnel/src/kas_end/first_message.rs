//! Reads the first message of a request, which says whose permissions the request runs with, before the
//! request is sent anywhere.
//!
//! An agentk that does not know `HeaderExtra` runs a request with its own permissions, which are more than
//! the caller asked for. So the router must know about impersonation before it chooses a tunnel. It forwards
//! all other messages without reading them.

use std::{
    collections::VecDeque,
    pin::Pin,
    task::{Context, Poll},
};

use bytes::{Bytes, BytesMut};
use grpc::{BoxError, Code, Deadline, Outcome, Status};
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt as _;
use kube_request::headers::is_impersonation;
use prost::Message as _;
use proto::gitlab::agent::{
    grpctool::{
        HttpRequest,
        http_request::{self, Header},
    },
    kubernetes_api::rpc::HeaderExtra,
};

use tunnel::features::Features;

use crate::HEADER_EXTRA;

/// The largest first message, in bytes: four times what agentk accepts. kas buffers the message until it is
/// complete.
const MAX_FIRST: usize = 256 * 1024;

/// The first message of a request.
#[derive(Clone, Debug, Default)]
pub struct FirstMessage(Option<Bytes>);

impl FirstMessage {
    /// Decodes the header; `None` if that fails. The agent rejects such a request.
    pub fn header(&self) -> Option<Header> {
        match HttpRequest::decode(self.0.clone()?) {
            Ok(HttpRequest { message: Some(http_request::Message::Header(header)) }) => Some(header),
            _ => None,
        }
    }

    /// Returns what agentk must support, so that it runs the request as the caller means it. Headers are
    /// decoded only if that depends on them.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` if the header is ambiguous, or says something unknown. Nothing was sent to an
    /// agent.
    pub fn needs(&self) -> Result<Features, Status> {
        let outline = self.0.clone().map(Outline::decode);
        match outline {
            Some(Ok(Outline { header: Some(header) }))
                if header.extra.is_some() || !header.target.is_empty() =>
            {
                self.header().as_ref().map_or(Ok(Features::NONE), needs)
            }
            _ => Ok(Features::NONE),
        }
    }
}

/// [`HttpRequest`] with the only fields that decide whether the rest has to be decoded.
#[derive(Clone, PartialEq, prost::Message)]
struct Outline {
    #[prost(message, optional, tag = "1")]
    header: Option<HeaderOutline>,
}

/// [`Header`], see [`Outline`].
#[derive(Clone, PartialEq, prost::Message)]
struct HeaderOutline {
    /// A `google.protobuf.Any`.
    #[prost(bytes = "bytes", optional, tag = "2")]
    extra: Option<Bytes>,
    #[prost(bytes = "bytes", tag = "1000")]
    target: Bytes,
}

/// Waits for the first message of a request. Returns it, and a body that still has everything that was read.
///
/// # Errors
/// `RESOURCE_EXHAUSTED` if the message is too large, `DEADLINE_EXCEEDED`. Nothing was sent to an agent.
pub async fn read_first_message(
    body: grpc::Body,
    deadline: Deadline,
) -> Result<(FirstMessage, grpc::Body), Status> {
    let first = first_message(body);
    let (message, body) = match deadline.instant() {
        Some(at) => tokio::time::timeout_at(at, first).await.map_err(|_| {
            let text = "the deadline expired before the first message of the request arrived";
            not_started(Status::new(Code::DeadlineExceeded, text))
        })?,
        None => first.await,
    }
    .map_err(not_started)?;
    Ok((FirstMessage(message), body))
}

/// See [`FirstMessage::needs`].
fn needs(header: &Header) -> Result<Features, Status> {
    // The audit log reads one of them, and an agent could act on the other one.
    let is_twice = header
        .request
        .as_ref()
        .is_some_and(|request| !request.url_path.is_empty() || !request.query.is_empty());
    if !header.target.is_empty() && is_twice {
        return Err(invalid("either target, or url_path and query, not both"));
    }
    let target = Features::TARGET.when(!header.target.is_empty());
    Ok(Features::IMPERSONATION.when(impersonates(header)?) | target)
}

/// Whether a request must run with the permissions of another user than the agent's own.
fn impersonates(header: &Header) -> Result<bool, Status> {
    let Some(extra) = &header.extra else { return Ok(false) };
    if extra.type_url != HEADER_EXTRA {
        return Err(invalid(
            "extra is of a type that this kas does not know: an agent might ignore what it asks for",
        ));
    }
    let Ok(extra) = HeaderExtra::decode(extra.value.as_ref()) else {
        return Err(invalid("extra is malformed"));
    };
    let Some(config) = extra.imp_config else { return Ok(false) };
    if config.username.is_empty() {
        return Err(invalid("extra.imp_config has no username"));
    }
    // In any spelling: GitLab's agents look for one spelling only, but the API server accepts all.
    let names = header.request.iter().flat_map(|request| request.header.keys());
    if names.into_iter().any(|name| is_impersonation(name)) {
        return Err(invalid("either extra.imp_config or Impersonate-* headers, not both"));
    }
    Ok(true)
}

fn invalid(text: &str) -> Status {
    not_started(Status::new(Code::InvalidArgument, format!("invalid HttpRequest.Header: {text}")))
}

fn not_started(status: Status) -> Status {
    status.with_outcome(Outcome::NotStarted)
}

/// Returns the first message, unless it is compressed or the body ends before the message does.
async fn first_message(mut body: grpc::Body) -> Result<(Option<Bytes>, grpc::Body), Status> {
    let mut read = VecDeque::new();
    let mut end = None;
    // The pieces so far, joined. One piece is not copied.
    let mut head = Bytes::new();
    let message = loop {
        if let [flag, a, b, c, d, ..] = *head {
            let len = u32::from_be_bytes([a, b, c, d]) as usize;
            if flag != 0 {
                break None;
            }
            if len > MAX_FIRST {
                let text = format!("a first message of {len} bytes is larger than the limit of {MAX_FIRST}");
                return Err(Status::new(Code::ResourceExhausted, text));
            }
            if head.len() >= grpc::PREFIX_LEN + len {
                break Some(head.slice(grpc::PREFIX_LEN..grpc::PREFIX_LEN + len));
            }
        }
        match body.frame().await {
            Some(Ok(frame)) => {
                match frame.data_ref() {
                    Some(data) if head.is_empty() => head = data.clone(),
                    Some(data) => {
                        // Reuses the memory once it is a copy of its own.
                        let mut joined = BytesMut::from(head);
                        joined.extend_from_slice(data);
                        head = joined.freeze();
                    }
                    None => {}
                }
                read.push_back(frame);
            }
            // The error is returned again when the body is read, where it gets its status.
            Some(Err(error)) => {
                end = Some(End::Failed(error));
                break None;
            }
            None => {
                end = Some(End::Over);
                break None;
            }
        }
    };
    Ok((message, grpc::boxed(Replay { read, end, body })))
}

/// A body that returns what was already read, and then the rest.
struct Replay {
    read: VecDeque<Frame<Bytes>>,
    /// What follows, if that is known already.
    end: Option<End>,
    body: grpc::Body,
}

enum End {
    Failed(BoxError),
    /// The body has ended, regularly or not: the body itself says which.
    Over,
}

impl Body for Replay {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        if let Some(frame) = self.read.pop_front() {
            return Poll::Ready(Some(Ok(frame)));
        }
        match self.end.replace(End::Over) {
            Some(End::Failed(error)) => Poll::Ready(Some(Err(error))),
            Some(End::Over) => Poll::Ready(None),
            None => {
                self.end = None;
                Pin::new(&mut self.body).poll_frame(cx)
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.read.is_empty() && !matches!(self.end, Some(End::Failed(_))) && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let mut hint = self.body.size_hint();
        let read: u64 = self.read.iter().filter_map(Frame::data_ref).map(|data| data.len() as u64).sum();
        let upper = hint.upper();
        hint.set_lower(hint.lower() + read);
        if let Some(upper) = upper {
            hint.set_upper(upper + read);
        }
        hint
    }
}

#[cfg(test)]
mod tests {
    use futures_util::stream;
    use http_body_util::StreamBody;
    use proto::gitlab::agent::{
        kubernetes_api::rpc::ImpersonationConfig,
        prototool::{self, Values},
    };

    use super::*;

    fn request(extra: Option<HeaderExtra>, header: &str) -> HttpRequest {
        let any = |extra: HeaderExtra| prost_types::Any {
            type_url: HEADER_EXTRA.to_owned(),
            value: extra.encode_to_vec(),
        };
        let request = prototool::HttpRequest {
            method: "GET".to_owned(),
            url_path: "/version".to_owned(),
            header: [(header.to_owned(), Values { value: vec!["x".to_owned()] })].into(),
            ..Default::default()
        };
        let header = http_request::Header {
            request: Some(request),
            extra: extra.map(any),
            content_length: Some(0),
            ..Default::default()
        };
        HttpRequest { message: Some(http_request::Message::Header(header)) }
    }

    fn user(name: &str) -> Option<HeaderExtra> {
        let config = ImpersonationConfig { username: name.to_owned(), ..Default::default() };
        Some(HeaderExtra { imp_config: Some(config) })
    }

    async fn look(body: grpc::Body, deadline: Deadline) -> Result<(bool, grpc::Body), Status> {
        let (message, body) = read_first_message(body, deadline).await?;
        Ok((message.needs()?.contains(Features::IMPERSONATION), body))
    }

    /// A body in chunks of this many bytes, which ends regularly.
    fn in_chunks(bytes: &[u8], size: usize) -> grpc::Body {
        let pieces: Vec<_> = bytes
            .chunks(size)
            .map(|piece| Ok::<_, BoxError>(Frame::data(Bytes::copy_from_slice(piece))))
            .collect();
        grpc::boxed(StreamBody::new(stream::iter(pieces)))
    }

    #[tokio::test]
    async fn every_byte_is_forwarded_however_the_body_was_split() {
        let mut bytes = grpc::encode(&request(user("u"), "Accept")).to_vec();
        bytes.extend_from_slice(&[0, 0, 0, 0, 2, 0x1a, 0]);
        for size in 1..=bytes.len() {
            let (impersonates, body) = look(in_chunks(&bytes, size), Deadline::NONE).await.unwrap();
            assert!(impersonates);
            assert_eq!(body.collect().await.unwrap().to_bytes(), bytes);
        }
    }

    #[tokio::test]
    async fn impersonation_is_recognised_and_ambiguous_ones_are_rejected() {
        for (message, expected) in [
            (request(None, "Impersonate-User"), Ok(false)),
            (request(Some(HeaderExtra { imp_config: None }), "Accept"), Ok(false)),
            (request(user("u"), "Accept"), Ok(true)),
            (request(user(""), "Accept"), Err("no username")),
            (request(user("u"), "Impersonate-Group"), Err("not both")),
            (request(user("u"), "iMPERSONATE-uid"), Err("not both")),
        ] {
            let got = look(grpc::full(grpc::encode(&message)), Deadline::NONE).await;
            match (got, expected) {
                (Ok((got, _)), Ok(expected)) => assert_eq!(got, expected, "{message:?}"),
                (Err(status), Err(text)) => {
                    assert_eq!(status.code(), Code::InvalidArgument);
                    assert_eq!(status.outcome(), Some(Outcome::NotStarted));
                    assert!(status.message().contains(text), "{status}");
                }
                (got, _) => panic!("{message:?}: {:?}", got.map(|(impersonates, _)| impersonates)),
            }
        }
        let mut unknown = request(user("u"), "Accept");
        if let Some(http_request::Message::Header(header)) = &mut unknown.message
            && let Some(extra) = &mut header.extra
        {
            extra.type_url = "type.googleapis.com/other".to_owned();
        }
        let status = look(grpc::full(grpc::encode(&unknown)), Deadline::NONE).await.map(|_| ()).unwrap_err();
        assert!(status.message().contains("does not know"), "{status}");
    }

    #[tokio::test]
    async fn target_is_a_need_and_excludes_the_decoded_fields() {
        let needs_of = async |url_path: &str, query: &[&str], target: &'static str| {
            let request = prototool::HttpRequest {
                method: "GET".to_owned(),
                url_path: url_path.to_owned(),
                query: query.iter().map(|key| ((*key).to_owned(), Values::default())).collect(),
                ..Default::default()
            };
            let header = Header { request: Some(request), target: target.into(), ..Default::default() };
            let message = HttpRequest { message: Some(http_request::Message::Header(header)) };
            let body = grpc::full(grpc::encode(&message));
            read_first_message(body, Deadline::NONE).await.unwrap().0.needs()
        };
        assert_eq!(needs_of("", &[], "/a%2Fb?c").await.unwrap(), Features::TARGET);
        assert_eq!(needs_of("/a/b", &["c"], "").await.unwrap(), Features::NONE);
        for (url_path, query) in [("/a/b", &[][..]), ("", &["c"])] {
            let status = needs_of(url_path, query, "/a").await.unwrap_err();
            assert_eq!((status.code(), status.outcome()), (Code::InvalidArgument, Some(Outcome::NotStarted)));
            assert!(status.message().contains("not both"), "{status}");
        }
    }

    #[tokio::test]
    async fn invalid_request_is_left_to_the_agent_and_a_huge_one_is_rejected() {
        for bytes in
            [&b""[..], b"\0\0\0", b"\0\0\0\0\x09\x01\x02", b"\x01\0\0\0\x01\0", b"\0\0\0\0\x03\xff\xff\xff"]
        {
            let (impersonates, body) = look(in_chunks(bytes, 2), Deadline::NONE).await.unwrap();
            assert!(!impersonates);
            assert_eq!(body.collect().await.unwrap().to_bytes(), bytes);
        }
        let status = look(in_chunks(&[0, 0, 4, 0, 1, 0], 6), Deadline::NONE).await.map(|_| ()).unwrap_err();
        assert_eq!(status.code(), Code::ResourceExhausted);
    }

    #[tokio::test]
    async fn error_of_the_body_is_returned_again_at_the_same_place() {
        let frames: Vec<Result<_, BoxError>> =
            vec![Ok(Frame::data(Bytes::from_static(b"\0\0"))), Err("broken".into())];
        let (impersonates, mut body) =
            look(grpc::boxed(StreamBody::new(stream::iter(frames))), Deadline::NONE).await.unwrap();
        assert!(!impersonates && !body.is_end_stream());
        assert_eq!(body.frame().await.unwrap().unwrap().into_data().unwrap(), b"\0\0"[..]);
        assert_eq!(body.frame().await.unwrap().unwrap_err().to_string(), "broken");
        assert!(body.frame().await.is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn request_without_messages_ends_with_its_deadline() {
        let silent = StreamBody::new(stream::pending::<Result<Frame<Bytes>, BoxError>>());
        let deadline = Deadline::after(std::time::Duration::from_secs(5));
        let status = look(grpc::boxed(silent), deadline).await.map(|_| ()).unwrap_err();
        assert_eq!((status.code(), status.outcome()), (Code::DeadlineExceeded, Some(Outcome::NotStarted)));
    }
}
