//! Sends requests of kas itself, and reads their responses.

use bytes::{Bytes, BytesMut};
use grpc::{Code, MessageReader, Status};
use prost::Message as _;
use proto::gitlab::agent::{
    grpctool::{HttpRequest, HttpResponse, http_request, http_response},
    prototool,
};

/// The largest gRPC message of a response, in bytes. Agents send at most 32 KiB of a body in one message.
const MAX_MESSAGE: usize = 4 << 20;

/// Returns the messages of a request that has no body.
pub fn request_without_body(request: prototool::HttpRequest) -> Bytes {
    use http_request::Message;
    let mut body = BytesMut::new();
    let header =
        http_request::Header { request: Some(request), content_length: Some(0), ..Default::default() };
    grpc::encode_into(&HttpRequest { message: Some(Message::Header(header)) }, &mut body);
    grpc::encode_into(&HttpRequest { message: Some(Message::Trailer(http_request::Trailer {})) }, &mut body);
    body.freeze()
}

/// Reads a complete HTTP response from an agent's messages: its status, and its body of at most `max` bytes.
///
/// # Errors
/// `RESOURCE_EXHAUSTED` if the body is larger, `INTERNAL` if the messages are not a response, and errors of
/// the agent.
pub async fn read_response<B>(body: B, max: usize) -> Result<(i32, Bytes), Status>
where
    B: http_body::Body<Data = Bytes> + Unpin,
    B::Error: Into<grpc::BoxError>,
{
    let mut reader = MessageReader::new(body, MAX_MESSAGE);
    let mut code = None;
    let mut complete = false;
    let mut content = BytesMut::new();
    while let Some(message) = reader.next().await.map_err(|error| Status::from(&error))? {
        let message = HttpResponse::decode(message).map_err(|error| {
            Status::new(Code::Internal, format!("the agent's answer cannot be read: {error}"))
        })?;
        match message.message {
            Some(http_response::Message::Header(header)) => {
                code = header.response.map(|response| response.status_code);
            }
            Some(http_response::Message::Data(data)) => {
                if content.len() + data.data.len() > max {
                    return Err(Status::new(
                        Code::ResourceExhausted,
                        format!("the API server's response is larger than {max} bytes"),
                    ));
                }
                content.extend_from_slice(&data.data);
            }
            Some(http_response::Message::Trailer(_)) => complete = true,
            // The request did not ask for an upgrade.
            Some(http_response::Message::UpgradeData(_)) | None => {}
        }
    }
    match reader.trailers().and_then(Status::from_headers) {
        Some(status) if status.code() != Code::Ok => Err(status),
        _ => match code.filter(|_| complete) {
            Some(code) => Ok((code, content.freeze())),
            None => Err(incomplete()),
        },
    }
}

/// Returns the status for messages that end before the response is complete.
pub fn incomplete() -> Status {
    Status::new(Code::Internal, "the agent's answer is not a complete HTTP response")
}
