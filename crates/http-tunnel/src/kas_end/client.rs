//! Sends requests of kas itself, and reads their responses.

use bytes::{Bytes, BytesMut};
use grpc::{Code, MessageReader, Status};
use ids::Impersonation;
use prost::Message as _;
use proto::gitlab::agent::{
    grpctool::{HttpRequest, HttpResponse, http_request, http_response},
    kubernetes_api::rpc::{ExtraKeyVal, HeaderExtra, ImpersonationConfig},
    prototool,
};

use crate::{HEADER_EXTRA, MAX_CHUNK};

/// The largest gRPC message of a response, in bytes. Agents send at most 32 KiB of a body in one message.
const MAX_MESSAGE: usize = 4 << 20;

/// Returns the messages of a request with this body, which may be empty. It runs as `impersonation`, or with
/// the agent's own rights.
pub fn request_messages(
    request: prototool::HttpRequest,
    impersonation: Option<&Impersonation>,
    content: &Bytes,
) -> Bytes {
    use http_request::Message;
    let mut body = BytesMut::with_capacity(content.len() + 1024);
    let mut put = |message| grpc::encode_into(&HttpRequest { message: Some(message) }, &mut body);
    put(Message::Header(http_request::Header {
        request: Some(request),
        extra: impersonation.map(impersonation_extra),
        // No body can be that long.
        content_length: Some(i64::try_from(content.len()).unwrap_or(i64::MAX)),
        ..Default::default()
    }));
    let mut rest = content.clone();
    while !rest.is_empty() {
        let data = rest.split_to(rest.len().min(MAX_CHUNK));
        put(Message::Data(http_request::Data { data }));
    }
    put(Message::Trailer(http_request::Trailer {}));
    body.freeze()
}

/// Returns the field `extra` by which an agent impersonates.
pub fn impersonation_extra(impersonation: &Impersonation) -> prost_types::Any {
    let Impersonation { username, groups, uid, extra } = impersonation;
    let config = ImpersonationConfig {
        username: username.clone(),
        groups: groups.clone(),
        uid: uid.clone().unwrap_or_default(),
        extra: extra.iter().map(|(key, val)| ExtraKeyVal { key: key.clone(), val: val.clone() }).collect(),
    };
    prost_types::Any {
        type_url: HEADER_EXTRA.to_owned(),
        value: HeaderExtra { imp_config: Some(config) }.encode_to_vec(),
    }
}

/// A complete HTTP response.
#[derive(Clone, Debug, PartialEq)]
pub struct Response {
    /// The status code.
    pub status: i32,
    /// The head, with the headers by their canonical names.
    pub head: prototool::HttpResponse,
    /// The body.
    pub body: Bytes,
}

impl Response {
    /// Returns the first value of a header. `name` is its canonical name, such as `Retry-After`.
    pub fn header(&self, name: &str) -> Option<&str> {
        // Agents in Go send canonical names, and others are compared as HTTP does.
        let mut all = self.head.header.iter().filter(|(key, _)| key.eq_ignore_ascii_case(name));
        all.find_map(|(_, values)| values.value.first()).map(String::as_str)
    }
}

/// Reads a complete HTTP response from an agent's messages. Its body has at most `max` bytes.
///
/// # Errors
/// `RESOURCE_EXHAUSTED` if the body is larger, `INTERNAL` if the messages are not a response, and errors of
/// the agent.
pub async fn read_response<B>(body: B, max: usize) -> Result<Response, Status>
where
    B: http_body::Body<Data = Bytes> + Unpin,
    B::Error: Into<grpc::BoxError>,
{
    read_response_within(body, max, |_| Ok(())).await
}

/// As [`read_response`]. `admit` is asked before each part of the body is kept, with its length in bytes.
///
/// # Errors
/// As of [`read_response`], and what `admit` returns.
pub async fn read_response_within<B>(
    body: B,
    max: usize,
    mut admit: impl FnMut(usize) -> Result<(), Status>,
) -> Result<Response, Status>
where
    B: http_body::Body<Data = Bytes> + Unpin,
    B::Error: Into<grpc::BoxError>,
{
    let mut reading = ResponseReader::new(body);
    let head = reading.head().await?;
    let mut content = BytesMut::new();
    while let Some(data) = reading.data().await? {
        if content.len() + data.len() > max {
            return Err(Status::new(
                Code::ResourceExhausted,
                format!("the API server's response is larger than {max} bytes"),
            ));
        }
        admit(data.len())?;
        content.extend_from_slice(&data);
    }
    Ok(Response { status: head.status_code, head, body: content.freeze() })
}

/// Reads an HTTP response part by part, for one without an end.
#[derive(Debug)]
pub struct ResponseReader<B> {
    reader: MessageReader<B>,
    complete: bool,
}

impl<B> ResponseReader<B>
where
    B: http_body::Body<Data = Bytes> + Unpin,
    B::Error: Into<grpc::BoxError>,
{
    /// Reads from an agent's messages.
    pub fn new(body: B) -> Self {
        Self { reader: MessageReader::new(body, MAX_MESSAGE), complete: false }
    }

    /// Reads the head. It must be called once, before [`data`](Self::data).
    ///
    /// # Errors
    /// `INTERNAL` if the messages are not a response, and errors of the agent.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn head(&mut self) -> Result<prototool::HttpResponse, Status> {
        loop {
            match self.message().await? {
                Some(http_response::Message::Header(header)) => {
                    return header.response.ok_or_else(incomplete);
                }
                Some(http_response::Message::UpgradeData(_)) => {}
                Some(_) | None => return Err(incomplete()),
            }
        }
    }

    /// Reads the next part of the body; `None`: the response is complete.
    ///
    /// # Errors
    /// As of [`head`](Self::head); the response is incomplete then.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn data(&mut self) -> Result<Option<Bytes>, Status> {
        loop {
            match self.message().await? {
                Some(http_response::Message::Data(data)) => return Ok(Some(data.data)),
                Some(http_response::Message::Trailer(_)) => self.complete = true,
                // The request did not ask for an upgrade.
                Some(http_response::Message::UpgradeData(_) | http_response::Message::Header(_)) => {}
                None if self.complete => return Ok(None),
                None => return Err(incomplete()),
            }
        }
    }

    /// Reads a message; `None`: there are no more, and the agent reports no error.
    async fn message(&mut self) -> Result<Option<http_response::Message>, Status> {
        while let Some(message) = self.reader.next().await.map_err(|error| Status::from(&error))? {
            let message = HttpResponse::decode(message).map_err(|error| {
                Status::new(Code::Internal, format!("the agent's answer cannot be read: {error}"))
            })?;
            if message.message.is_some() {
                return Ok(message.message);
            }
        }
        match self.reader.trailers().and_then(Status::from_headers) {
            Some(status) if status.code() != Code::Ok => Err(status),
            _ => Ok(None),
        }
    }
}

/// Returns the status for messages that end before the response is complete.
pub fn incomplete() -> Status {
    Status::new(Code::Internal, "the agent's answer is not a complete HTTP response")
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn decoded(bytes: Bytes) -> Vec<http_request::Message> {
        let mut reader = MessageReader::new(http_body_util::Full::new(bytes), MAX_MESSAGE);
        let mut messages = Vec::new();
        while let Some(message) = reader.next().await.unwrap() {
            messages.extend(HttpRequest::decode(message).unwrap().message);
        }
        messages
    }

    #[tokio::test]
    async fn a_large_body_is_cut_into_chunks_that_every_agent_accepts() {
        let content = Bytes::from(vec![7; 2 * MAX_CHUNK + 1]);
        let user = Impersonation { username: "u".to_owned(), ..Impersonation::default() };
        let sent = request_messages(prototool::HttpRequest::default(), Some(&user), &content);
        let messages = decoded(sent).await;
        let [http_request::Message::Header(header), data @ .., http_request::Message::Trailer(_)] =
            messages.as_slice()
        else {
            panic!("{messages:?}");
        };
        assert_eq!(header.content_length, Some(content.len() as i64));
        assert_eq!(header.extra.as_ref().map(|extra| &*extra.type_url), Some(HEADER_EXTRA));
        let sizes: Vec<usize> = data
            .iter()
            .map(|message| match message {
                http_request::Message::Data(data) => data.data.len(),
                other => panic!("{other:?}"),
            })
            .collect();
        assert_eq!(sizes, [MAX_CHUNK, MAX_CHUNK, 1]);
    }

    #[tokio::test]
    async fn a_request_without_body_has_a_header_and_a_trailer() {
        let messages =
            decoded(request_messages(prototool::HttpRequest::default(), None, &Bytes::new())).await;
        let [http_request::Message::Header(header), http_request::Message::Trailer(_)] = messages.as_slice()
        else {
            panic!("{messages:?}");
        };
        assert_eq!((header.content_length, &header.extra), (Some(0), &None));
    }
}
