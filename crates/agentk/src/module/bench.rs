//! The service that `cargo xtask bench` calls, directly and through kas. It does as little as a gRPC handler
//! can.
//!
//! The same handler serves both (the program `agentk-bench-direct` serves it without kas), so that the
//! difference between the two is kas and the tunnel. It forwards slices of gRPC frames and decodes only the
//! small requests. agentk serves it only when it is started for a benchmark.

use std::{
    collections::VecDeque,
    pin::Pin,
    task::{Context, Poll},
};

use bytes::Bytes;
use grpc::{BoxError, Code, MessageReader, ReadError, Status};
use http::{HeaderMap, Response};
use http_body::{Frame, SizeHint};
use http_body_util::BodyExt as _;
use proto::kas::bench::v1::{DownloadRequest, HoldRequest, Payload, UploadResponse};
use tunnel::frame::{Event, Splitter};

use super::{Answer, Module, Service};

/// The largest message of a download, in bytes. Each call allocates one buffer of this size.
const LARGEST: u32 = 16 << 20;
/// The largest request that is decoded, in bytes. Such requests have at most two numbers.
const SMALL: usize = 1024;

/// Serves `kas.bench.v1.Bench`.
#[derive(Clone, Copy, Debug, Default)]
pub struct Bench;

impl Module for Bench {
    fn services(&self) -> &'static [Service] {
        &[Service { name: "kas.bench.v1.Bench", methods: &["Echo", "Download", "Upload", "Hold"] }]
    }

    fn call(&self, request: http::Request<grpc::Body>) -> Answer {
        let method = request.uri().path().rsplit('/').next().and_then(|name| match name {
            "Echo" => Some(Method::Echo),
            "Download" => Some(Method::Download),
            "Upload" => Some(Method::Upload),
            "Hold" => Some(Method::Hold),
            _ => None,
        });
        let body = request.into_body();
        Box::pin(async move {
            let answer = match method {
                Some(Method::Echo) => echo(body).await,
                Some(Method::Download) => download(body).await,
                Some(Method::Upload) => upload(body).await,
                Some(Method::Hold) => hold(body).await,
                None => Err(Status::new(Code::Unimplemented, "no such method")),
            };
            answer.unwrap_or_else(|status| status.into_response())
        })
    }
}

#[derive(Clone, Copy)]
enum Method {
    Echo,
    Download,
    Upload,
    Hold,
}

/// Returns the frames of the request, after all of them have arrived.
async fn echo(mut body: grpc::Body) -> Result<Response<grpc::Body>, Status> {
    let mut frames = VecDeque::new();
    while let Some(data) = next(&mut body).await? {
        frames.push_back(data);
    }
    Ok(answer(Replay { frames, end: End::Ok }))
}

async fn download(body: grpc::Body) -> Result<Response<grpc::Body>, Status> {
    let request: DownloadRequest = single(body).await?;
    if request.size > LARGEST {
        return Err(Status::new(Code::InvalidArgument, format!("size must be at most {LARGEST}")));
    }
    let message = grpc::encode(&Payload { data: vec![b'x'; request.size as usize].into() });
    Ok(answer(Repeat { message, left: request.messages, ended: false }))
}

async fn upload(mut body: grpc::Body) -> Result<Response<grpc::Body>, Status> {
    let mut total = UploadResponse::default();
    let mut splitter = Splitter::default();
    while let Some(data) = next(&mut body).await? {
        splitter.push(data);
        while let Some(event) =
            splitter.next().map_err(|error| Status::new(Code::InvalidArgument, error.to_string()))?
        {
            if let Event::Message { len } = event {
                total.messages += 1;
                total.bytes += u64::from(len);
            }
        }
    }
    if !splitter.is_between() {
        return Err(Status::from(&ReadError::Truncated));
    }
    let frames = VecDeque::from([grpc::encode(&total)]);
    Ok(answer(Replay { frames, end: End::Ok }))
}

async fn hold(body: grpc::Body) -> Result<Response<grpc::Body>, Status> {
    let _: HoldRequest = single(body).await?;
    let frames = VecDeque::from([grpc::encode(&Payload::default())]);
    Ok(answer(Replay { frames, end: End::Never }))
}

/// Returns the next data of a request; `None` at its regular end.
async fn next(body: &mut grpc::Body) -> Result<Option<Bytes>, Status> {
    use http_body::Body as _;
    loop {
        match body.frame().await {
            Some(Ok(frame)) => match frame.into_data() {
                Ok(data) => return Ok(Some(data)),
                Err(_trailers) => {}
            },
            Some(Err(error)) => return Err(Status::from(&ReadError::Reset(Some(error)))),
            None if body.is_end_stream() => return Ok(None),
            None => return Err(Status::from(&ReadError::Reset(None))),
        }
    }
}

/// Reads a request with one small message.
async fn single<M: prost::Message + Default>(body: grpc::Body) -> Result<M, Status> {
    let mut reader = MessageReader::new(body, SMALL);
    let message = reader.next().await.map_err(|error| Status::from(&error))?;
    let message = message.ok_or_else(|| Status::new(Code::InvalidArgument, "the request has no message"))?;
    M::decode(message).map_err(|error| Status::new(Code::InvalidArgument, error.to_string()))
}

fn answer<B>(body: B) -> Response<grpc::Body>
where
    B: http_body::Body<Data = Bytes, Error = BoxError> + Send + 'static,
{
    let mut response = Response::new(body.boxed_unsync());
    response.headers_mut().insert(http::header::CONTENT_TYPE, grpc::CONTENT_TYPE);
    response
}

fn ok() -> Frame<Bytes> {
    let mut trailers = HeaderMap::with_capacity(1);
    Status::write_ok(&mut trailers);
    Frame::trailers(trailers)
}

/// A body of given frames, and then its end.
struct Replay {
    frames: VecDeque<Bytes>,
    end: End,
}

#[derive(Clone, Copy, PartialEq)]
enum End {
    /// The status OK is sent next.
    Ok,
    /// The status has been sent.
    Sent,
    /// There is no end: the call lasts until the caller cancels it.
    Never,
}

impl http_body::Body for Replay {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        if let Some(data) = self.frames.pop_front() {
            return Poll::Ready(Some(Ok(Frame::data(data))));
        }
        match self.end {
            End::Ok => {
                self.end = End::Sent;
                Poll::Ready(Some(Ok(ok())))
            }
            End::Sent => Poll::Ready(None),
            // No wakeup is needed: a body is dropped when its stream ends.
            End::Never => Poll::Pending,
        }
    }

    fn is_end_stream(&self) -> bool {
        self.frames.is_empty() && self.end == End::Sent
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::default()
    }
}

/// Sends one message a number of times, then OK. All copies share the same memory.
struct Repeat {
    message: Bytes,
    left: u64,
    ended: bool,
}

impl http_body::Body for Repeat {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        if self.left > 0 {
            self.left -= 1;
            return Poll::Ready(Some(Ok(Frame::data(self.message.clone()))));
        }
        if self.ended {
            return Poll::Ready(None);
        }
        self.ended = true;
        Poll::Ready(Some(Ok(ok())))
    }

    fn is_end_stream(&self) -> bool {
        self.ended
    }
}

#[cfg(test)]
mod tests {
    use bytes::{BufMut as _, BytesMut};
    use http_body::Body as _;
    use prost::Message as _;

    use super::*;

    async fn call(method: &str, body: Bytes) -> (Vec<u8>, Status) {
        let request = http::Request::builder()
            .uri(format!("/kas.bench.v1.Bench/{method}"))
            .body(grpc::full(body))
            .unwrap();
        let response = Bench.call(request).await;
        if let Some(status) = Status::from_headers(response.headers()) {
            return (Vec::new(), status);
        }
        let collected = response.into_body().collect().await.unwrap();
        let status = Status::from_headers(collected.trailers().unwrap()).unwrap();
        (collected.to_bytes().into(), status)
    }

    #[tokio::test]
    async fn echo_answers_with_the_bytes_it_got() {
        let message = grpc::encode(&Payload { data: Bytes::from_static(b"hello") });
        let (bytes, status) = call("Echo", message.clone()).await;
        assert_eq!((&bytes[..], status.code()), (&message[..], Code::Ok));
    }

    #[tokio::test]
    async fn download_sends_as_many_messages_as_asked_for() {
        let (bytes, status) = call("Download", grpc::encode(&DownloadRequest { messages: 3, size: 7 })).await;
        let one = grpc::encode(&Payload { data: Bytes::from_static(b"xxxxxxx") });
        assert_eq!((bytes, status.code()), (one.repeat(3), Code::Ok));
        let (_, status) =
            call("Download", grpc::encode(&DownloadRequest { messages: 1, size: u32::MAX })).await;
        assert_eq!(status.code(), Code::InvalidArgument);
    }

    #[tokio::test]
    async fn upload_counts_messages_and_bytes_and_refuses_half_a_message() {
        let mut body = BytesMut::new();
        for size in [0, 10, 70_000] {
            grpc::encode_into(&Payload { data: vec![1; size].into() }, &mut body);
        }
        let expected = body.len() as u64 - 3 * 5;
        let (bytes, status) = call("Upload", body.clone().freeze()).await;
        assert_eq!(status.code(), Code::Ok);
        let total = UploadResponse::decode(&bytes[5..]).unwrap();
        assert_eq!(total, UploadResponse { messages: 3, bytes: expected });
        body.put_u8(0);
        assert_eq!(call("Upload", body.freeze()).await.1.code(), Code::Internal);
    }

    #[tokio::test]
    async fn hold_sends_one_message_and_never_ends() {
        let request = http::Request::builder()
            .uri("/kas.bench.v1.Bench/Hold")
            .body(grpc::full(grpc::encode(&HoldRequest {})));
        let mut body = Bench.call(request.unwrap()).await.into_body();
        assert_eq!(
            body.frame().await.unwrap().unwrap().into_data().unwrap(),
            grpc::encode(&Payload::default())
        );
        let mut next = Box::pin(body.frame());
        std::future::poll_fn(|cx| {
            assert!(Future::poll(next.as_mut(), cx).is_pending());
            Poll::Ready(())
        })
        .await;
        drop(next);
        assert!(!body.is_end_stream());
    }
}
