//! The span of a request from a tunnel, from its arrival until the end of its response.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use grpc::{BoxError, Code, Status};
use http::{HeaderMap, Request, Response};
use http_body::{Frame, SizeHint};
use traces::{Kind, Span, Tracer};

use super::Answer;

/// Starts a span as a child of the one in the request's metadata, and replaces that context with its own.
pub(super) fn begin(tracer: &Tracer, request: &mut Request<grpc::Body>) -> Span {
    let path = request.uri().path().trim_start_matches('/').to_owned();
    let (service, method) = path.split_once('/').unwrap_or((&path, ""));
    let mut span = tracer.begin(path.clone(), Kind::Server, request.headers());
    if span.is_recording() {
        span.set("rpc.system", "grpc");
        span.set("rpc.service", service.to_owned());
        span.set("rpc.method", method.to_owned());
        let id = request.headers().get(grpc::CORRELATION_ID).and_then(|id| id.to_str().ok());
        if let Some(id) = id {
            span.set("gitlab.correlation_id", id.to_owned());
        }
    }
    span.write_to(request.headers_mut());
    span
}

/// Ends the span with the response. If the response is dropped earlier, the request was cancelled.
pub(super) fn follow(span: Span, answer: Answer) -> Answer {
    let ending = Ending(Some(span));
    Box::pin(async move {
        let mut ending = ending;
        let response: Response<grpc::Body> = answer.await;
        if let Some(status) = Status::from_headers(response.headers()) {
            ending.end(status.code());
            return response;
        }
        response.map(|inner| grpc::boxed(Followed { inner, ending }))
    })
}

struct Ending(Option<Span>);

impl Ending {
    fn end(&mut self, code: Code) {
        if let Some(mut span) = self.0.take() {
            span.set("rpc.grpc.status_code", i64::from(code.number()));
            if code != Code::Ok {
                span.failed(code.name());
            }
        }
    }

    fn look(&mut self, trailers: Option<&HeaderMap>) {
        let status = trailers.and_then(Status::from_headers);
        self.end(status.map_or(Code::Unknown, |status| status.code()));
    }
}

impl Drop for Ending {
    fn drop(&mut self) {
        self.end(Code::Cancelled);
    }
}

struct Followed {
    inner: grpc::Body,
    ending: Ending,
}

impl http_body::Body for Followed {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let frame = ready!(Pin::new(&mut self.inner).poll_frame(cx));
        match &frame {
            Some(Ok(frame)) if frame.is_data() => {}
            Some(Ok(frame)) => self.ending.look(frame.trailers_ref()),
            Some(Err(_)) | None => self.ending.look(None),
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}
