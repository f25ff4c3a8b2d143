//! `KubernetesApi/MakeRequest`: one HTTP request to the API server, and its answer, as gRPC messages.
//!
//! The answer's body is pulled from the API server when kas pulls it here, and the request's body from kas when the
//! connection to the API server can take it: no task, no queue, nothing held beyond one piece. A request counts as
//! complete at its `trailer` only; one that ends before ends the connection, so that no half of it is acted upon.
//!
//! Not here: upgrades (exec, attach, port-forward), which this version of the protocol does not carry.

use std::{
    future::{Future, poll_fn},
    pin::{Pin, pin},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, Waker},
};

use bytes::{BufMut as _, Bytes, BytesMut};
use grpc::{BoxError, Code, Deadline, Status};
use http::{HeaderMap, HeaderValue, Method, Request, Response};
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use prost::Message as _;
use proto::gitlab::agent::grpctool::http_request::Header;
use tokio::time::{Sleep, sleep_until};
use traces::{Kind, Span, Tracer};
use tunnel::frame::{self, Decoder, Event};

use super::{Answer, Module};
use crate::cluster::{ApiServer, chain};

mod head;

/// The largest piece of a body in one message: what every version sends and expects.
const PIECE: usize = 32 * 1024;

/// Pieces up to this size are copied next to their heads, which saves a frame; larger ones are passed as they are.
const COPY: usize = 1024;

/// Field numbers of `grpctool.HttpRequest` and `grpctool.HttpResponse`.
const HEADER: u32 = 1;
const DATA: u32 = 2;
const TRAILER: u32 = 3;

/// Serves the API server to kas, with the rights of agentk's own credentials.
#[derive(Clone, Debug)]
pub struct KubernetesApi {
    api: ApiServer,
    /// How agentk names itself to the API server.
    user_agent: HeaderValue,
    /// Makes a span of each request to the API server, if there is one.
    tracer: Option<Tracer>,
}

impl KubernetesApi {
    /// Makes the module; version and commit are those of agentk.
    pub fn new(api: ApiServer, version: &str, commit: &str) -> Self {
        let user_agent = HeaderValue::try_from(format!("gitlab-agent/{version}/{commit}"));
        Self { api, user_agent: user_agent.unwrap_or(HeaderValue::from_static("gitlab-agent")), tracer: None }
    }

    /// Makes a span of each request to the API server from now on.
    pub fn traced(self, tracer: Option<Tracer>) -> Self {
        Self { tracer, ..self }
    }

    /// Begins the span of a request to the API server, below that of the caller's request, and tells the API server of
    /// it; without a tracer it is told of the caller's.
    fn begin_span(&self, caller: &HeaderMap, request: &mut Request<grpc::Body>) -> Option<Span> {
        let Some(tracer) = &self.tracer else {
            traces::pass_on(caller, request.headers_mut());
            return None;
        };
        let mut span = tracer.begin(request.method().as_str().to_owned(), Kind::Client, caller);
        if span.is_recording() {
            // Not the path: it has names that are nobody's business.
            span.set("http.request.method", request.method().as_str().to_owned());
            span.set("server.address", self.api.target().host().to_owned());
        }
        span.write_to(request.headers_mut());
        Some(span)
    }

    async fn make_request(self, request: Request<grpc::Body>) -> Result<Response<grpc::Body>, Status> {
        let (parts, body) = request.into_parts();
        let deadline = Deadline::from_headers(&parts.headers)
            .map_err(|error| Status::new(Code::InvalidArgument, error.to_string()))?;
        let mut timer = Timer::new(deadline);
        let mut inbox = Inbox::new(body);

        let header = match timer.race(poll_fn(|cx| inbox.poll(cx))).await?? {
            Item::Header(header) => header,
            item => return Err(inbox.unexpected(&item)),
        };
        let header = Header::decode(header)
            .map_err(|error| Status::new(Code::InvalidArgument, format!("malformed header: {error}")))?;
        let (mut request, length) =
            head::request(header, &self.user_agent, self.api.target().impersonates())?;

        // A method that rarely has a body says nothing about its absence: what comes after the header does.
        let method = request.method();
        let may_wait = [Method::GET, Method::HEAD, Method::DELETE, Method::OPTIONS].contains(method);
        let (first, upload) = match length {
            head::Length::Known(0) => (None, false),
            head::Length::Known(_) | head::Length::Chunked => (None, true),
            head::Length::Unknown => {
                let first = if may_wait {
                    Some(timer.race(poll_fn(|cx| inbox.poll(cx))).await??)
                } else {
                    poll_fn(|cx| match inbox.poll(cx) {
                        Poll::Ready(item) => Poll::Ready(item.map(Some)),
                        Poll::Pending => Poll::Ready(Ok(None)),
                    })
                    .await?
                };
                match first {
                    Some(Item::Trailer) => (None, false),
                    Some(Item::Data(data)) => (Some(data), true),
                    None => (None, true),
                    Some(item) => return Err(inbox.unexpected(&item)),
                }
            }
        };
        inbox.uploading = upload;
        inbox.refuses_data = length == head::Length::Known(0);
        let inbox = Shared::new(inbox);
        if upload {
            let left = if let head::Length::Known(length) = length { Some(length) } else { None };
            if left.is_none() {
                // hyper would send no body with a GET unless this says so.
                let chunked = HeaderValue::from_static("chunked");
                request.headers_mut().insert(http::header::TRANSFER_ENCODING, chunked);
            }
            *request.body_mut() =
                grpc::boxed(Upload { inbox: inbox.clone(), first, left, owed: left, done: false });
        }

        let method = request.method().clone();
        let mut span = self.begin_span(&parts.headers, &mut request);
        let mut over = false;
        let mut sending = pin!(self.api.send(request));
        let answered = timer
            .race(poll_fn(|cx| match sending.as_mut().poll(cx) {
                Poll::Ready(Ok(answer)) => Poll::Ready(Ok(answer)),
                // What broke the upload is the reason, and not what hyper makes of it.
                Poll::Ready(Err(error)) => {
                    Poll::Ready(Err(inbox.lock().failed.clone().unwrap_or_else(|| {
                        let text = chain(&error);
                        tracing::warn!(error = text, "request to the Kubernetes API server failed");
                        Status::new(Code::Unavailable, text)
                    })))
                }
                Poll::Pending if over => Poll::Pending,
                Poll::Pending => match inbox.lock().poll_rest(cx) {
                    Poll::Ready(Err(status)) => Poll::Ready(Err(status)),
                    Poll::Ready(Ok(())) => {
                        over = true;
                        Poll::Pending
                    }
                    Poll::Pending => Poll::Pending,
                },
            }))
            .await;
        let answer = match answered {
            Ok(Ok(answer)) => answer,
            Ok(Err(status)) | Err(status) => {
                if let Some(span) = &mut span {
                    span.failed(status.code().name());
                }
                return Err(status);
            }
        };
        let (parts, upstream) = answer.into_parts();
        if let Some(span) = &mut span {
            span.set("http.response.status_code", i64::from(parts.status.as_u16()));
            if parts.status.is_client_error() || parts.status.is_server_error() {
                span.failed(parts.status.as_str().to_owned());
            }
        }
        tracing::debug!(http.method = %method, http.status = parts.status.as_u16(), "Kubernetes API server answered");

        let header = head::response(&parts).encode_to_vec();
        if header.len() > frame::MAX_CONTROL {
            let text = format!(
                "the answer's headers of {} bytes are larger than {}",
                header.len(),
                frame::MAX_CONTROL
            );
            return Err(Status::new(Code::ResourceExhausted, text));
        }
        let mut out = BytesMut::with_capacity(header.len() + COPY);
        frame::put_control(HEADER, &header, &mut out);
        let body = Download {
            api: self.api.clone(),
            upstream: Some(upstream),
            inbox: (!over).then_some(inbox),
            timer,
            out,
            piece: Bytes::new(),
            whole: None,
            end: None,
            span,
        };
        let mut response = Response::new(grpc::boxed(body));
        response.headers_mut().insert(http::header::CONTENT_TYPE, grpc::CONTENT_TYPE);
        Ok(response)
    }
}

/// Reads `bytes` as a caller's messages, in pieces of `size` bytes, and makes a request of their header: for a fuzz
/// target.
///
/// # Panics
/// When a header reaches the API server that must not, or the order of messages is not kept.
pub fn fuzz(bytes: &[u8], size: usize) {
    let pieces: Vec<_> = bytes
        .chunks(size.max(1))
        .map(|piece| Ok::<_, std::convert::Infallible>(Frame::data(Bytes::copy_from_slice(piece))))
        .collect();
    let body = http_body_util::StreamBody::new(futures_util::stream::iter(pieces));
    let mut inbox = Inbox::new(grpc::boxed(body));
    let mut cx = Context::from_waker(Waker::noop());
    let mut headers = 0;
    while let Poll::Ready(Ok(item)) = inbox.poll(&mut cx) {
        match item {
            Item::Header(header) => {
                headers += 1;
                if let Ok(header) = Header::decode(header) {
                    fuzz_header(header);
                }
            }
            Item::End => break,
            Item::Data(_) | Item::Trailer => assert_eq!(headers, 1, "nothing comes before the header"),
        }
    }
    if let Ok(header) = Header::decode(bytes) {
        fuzz_header(header);
    }
}

fn fuzz_header(header: Header) {
    const HOPS: [&str; 10] = [
        "authorization",
        "connection",
        "content-length",
        "expect",
        "host",
        "keep-alive",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    ];
    let user_agent = HeaderValue::from_static("agentk");
    for impersonates in [false, true] {
        let Ok((request, _)) = head::request(header.clone(), &user_agent, impersonates) else { continue };
        let path = request.uri().path();
        assert!(
            path.starts_with('/') && !path.split('/').any(|segment| matches!(segment, "." | "..")),
            "{path}"
        );
        assert!(path.is_ascii() && !path.contains(['\\', '\r', '\n', ' ']), "{path}");
        for name in request.headers().keys().map(http::HeaderName::as_str) {
            assert!(
                !HOPS.contains(&name) && !name.starts_with("proxy-") && !name.starts_with("x-remote-"),
                "{name}"
            );
            assert!(!(impersonates && name.starts_with("impersonate-")), "{name}");
        }
    }
}

impl Module for KubernetesApi {
    fn service(&self) -> &'static str {
        "gitlab.agent.kubernetes_api.rpc.KubernetesApi"
    }

    fn methods(&self) -> &'static [&'static str] {
        &["MakeRequest"]
    }

    fn call(&self, request: Request<grpc::Body>) -> Answer {
        let answer = self.clone().make_request(request);
        Box::pin(async move { answer.await.unwrap_or_else(|status| status.into_response()) })
    }
}

/// The caller's deadline, if it has one.
struct Timer(Option<Pin<Box<Sleep>>>);

impl Timer {
    fn new(deadline: Deadline) -> Self {
        Self(deadline.instant().map(|at| Box::pin(sleep_until(at))))
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Status> {
        match &mut self.0 {
            None => Poll::Pending,
            Some(sleep) => sleep.as_mut().poll(cx).map(|()| {
                Status::new(
                    Code::DeadlineExceeded,
                    "the deadline passed before the Kubernetes API server's answer ended",
                )
            }),
        }
    }

    async fn race<F: Future>(&mut self, future: F) -> Result<F::Output, Status> {
        let mut future = pin!(future);
        poll_fn(|cx| match self.poll(cx) {
            Poll::Ready(status) => Poll::Ready(Err(status)),
            Poll::Pending => future.as_mut().poll(cx).map(Ok),
        })
        .await
    }
}

/// What the caller sent next.
enum Item {
    Header(Bytes),
    /// Not empty.
    Data(Bytes),
    Trailer,
    End,
}

impl Item {
    fn name(&self) -> &'static str {
        match self {
            Self::Header(_) => "header",
            Self::Data(_) => "data",
            Self::Trailer => "trailer",
            Self::End => "the end of the stream",
        }
    }
}

/// What may come next: each only leads to those below it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    Header,
    Body,
    AfterTrailer,
    Ended,
}

impl Stage {
    fn expects(self) -> &'static str {
        match self {
            Self::Header => "header",
            Self::Body => "data or trailer",
            Self::AfterTrailer | Self::Ended => "the end of the stream",
        }
    }
}

/// The request's messages, read by one side at a time: while `uploading` by the [`Upload`], which the connection to
/// the API server polls; before and after by the answer's side, which so learns that the caller has gone.
struct Inbox {
    body: grpc::Body,
    decoder: Decoder,
    stage: Stage,
    uploading: bool,
    /// The header has said that there is no body.
    refuses_data: bool,
    failed: Option<Status>,
    /// The answer's side, which waits for the upload's end.
    waker: Option<Waker>,
}

impl Inbox {
    fn new(body: grpc::Body) -> Self {
        Self {
            body,
            decoder: Decoder::new(DATA, TRAILER, false),
            stage: Stage::Header,
            uploading: false,
            refuses_data: false,
            failed: None,
            waker: None,
        }
    }

    /// Returns the next message, in order; a failure is also kept in `failed`.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Item, Status>> {
        if let Some(status) = &self.failed {
            return Poll::Ready(Err(status.clone()));
        }
        let item = match self.poll_any(cx) {
            Poll::Pending => return Poll::Pending,
            Poll::Ready(Ok(item)) => item,
            Poll::Ready(Err(status)) => return Poll::Ready(Err(self.fail(status))),
        };
        self.stage = match (self.stage, &item) {
            (Stage::Header, Item::Header(_)) => Stage::Body,
            (Stage::Body, Item::Data(_)) if !self.refuses_data => Stage::Body,
            (Stage::Body, Item::Trailer) => Stage::AfterTrailer,
            (Stage::AfterTrailer | Stage::Ended, Item::End) => Stage::Ended,
            _ => return Poll::Ready(Err(self.unexpected(&item))),
        };
        Poll::Ready(Ok(item))
    }

    fn unexpected(&mut self, item: &Item) -> Status {
        let expected = if self.refuses_data { "trailer" } else { self.stage.expects() };
        let text = format!("invalid order of messages: expected {expected}, got {}", item.name());
        self.fail(Status::new(Code::InvalidArgument, text))
    }

    fn fail(&mut self, status: Status) -> Status {
        self.failed = Some(status.clone());
        self.wake();
        status
    }

    fn wake(&mut self) {
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }

    fn poll_any(&mut self, cx: &mut Context<'_>) -> Poll<Result<Item, Status>> {
        loop {
            match self.decoder.next() {
                Ok(Some(Event::Control { field: HEADER, body })) => {
                    return Poll::Ready(Ok(Item::Header(body)));
                }
                Ok(Some(Event::Control { .. })) => return Poll::Ready(Ok(Item::Trailer)),
                Ok(Some(Event::Data(data))) => return Poll::Ready(Ok(Item::Data(data))),
                Ok(Some(Event::Message { .. })) if self.stage == Stage::Body && !self.refuses_data => {
                    continue;
                }
                Ok(Some(Event::Message { .. })) => return Poll::Ready(Ok(Item::Data(Bytes::new()))),
                Ok(None) => {}
                Err(error) => {
                    let text = format!("malformed request: {}", chain(&error));
                    return Poll::Ready(Err(Status::new(Code::InvalidArgument, text)));
                }
            }
            match Pin::new(&mut self.body).poll_frame(cx) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Some(Ok(frame))) => {
                    if let Ok(data) = frame.into_data() {
                        self.decoder.push(data);
                    }
                }
                Poll::Ready(Some(Err(error))) => {
                    let text = format!("the request was cancelled: {error}");
                    return Poll::Ready(Err(Status::new(Code::Cancelled, text)));
                }
                Poll::Ready(None) if !self.body.is_end_stream() => {
                    return Poll::Ready(Err(Status::new(Code::Cancelled, "the request was cancelled")));
                }
                Poll::Ready(None) if !self.decoder.is_between() => {
                    let text = "malformed request: the stream ended inside a message";
                    return Poll::Ready(Err(Status::new(Code::InvalidArgument, text)));
                }
                Poll::Ready(None) => return Poll::Ready(Ok(Item::End)),
            }
        }
    }

    /// For the answer's side: resolves when the request's stream has ended, reading it unless an upload does.
    fn poll_rest(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Status>> {
        loop {
            if let Some(status) = &self.failed {
                return Poll::Ready(Err(status.clone()));
            }
            if self.stage == Stage::Ended {
                return Poll::Ready(Ok(()));
            }
            if self.uploading {
                if !self.waker.as_ref().is_some_and(|waker| waker.will_wake(cx.waker())) {
                    self.waker = Some(cx.waker().clone());
                }
                return Poll::Pending;
            }
            match self.poll(cx) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Err(status)) => return Poll::Ready(Err(status)),
                // Data that the API server answered without reading.
                Poll::Ready(Ok(_)) => {}
            }
        }
    }
}

#[derive(Clone)]
struct Shared(Arc<Mutex<Inbox>>);

impl Shared {
    fn new(inbox: Inbox) -> Self {
        Self(Arc::new(Mutex::new(inbox)))
    }

    fn lock(&self) -> MutexGuard<'_, Inbox> {
        // Each change is one assignment: a panic leaves nothing torn.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The body of the request to the API server.
struct Upload {
    inbox: Shared,
    /// What was read to see whether there is a body.
    first: Option<Bytes>,
    /// Bytes that the caller still owes of those it announced.
    left: Option<u64>,
    /// Bytes that are still to be handed out.
    owed: Option<u64>,
    done: bool,
}

impl Upload {
    fn over(&mut self) {
        self.done = true;
        let mut inbox = self.inbox.lock();
        inbox.uploading = false;
        inbox.wake();
    }

    fn give(&mut self, data: Bytes) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        if let Some(owed) = &mut self.owed {
            *owed = owed.saturating_sub(data.len() as u64);
        }
        Poll::Ready(Some(Ok(Frame::data(data))))
    }
}

impl Body for Upload {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let this = self.get_mut();
        if this.done {
            return Poll::Ready(None);
        }
        loop {
            // The last of the announced bytes waits for the trailer: with it the API server would act.
            if this.left != Some(0)
                && let Some(data) = this.first.take()
            {
                return this.give(data);
            }
            let mut inbox = this.inbox.lock();
            let result = match inbox.poll(cx) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(result) => result,
            };
            let result = match (result, &mut this.left) {
                (Ok(Item::Data(data)), None) => Ok(Some(data)),
                (Ok(Item::Data(data)), Some(left)) if data.len() as u64 <= *left => {
                    *left -= data.len() as u64;
                    Ok(Some(data))
                }
                (Ok(Item::Data(_)), Some(_)) => Err("the body is longer than its announced length"),
                (Ok(Item::Trailer), Some(1..)) => Err("the body is shorter than its announced length"),
                (Ok(Item::Trailer), _) => Ok(None),
                (Ok(item), _) => {
                    let status = inbox.unexpected(&item);
                    return Poll::Ready(Some(Err(status.into())));
                }
                (Err(status), _) => return Poll::Ready(Some(Err(status.into()))),
            };
            match result {
                Ok(Some(data)) => {
                    drop(inbox);
                    this.first = Some(data);
                }
                Ok(None) => {
                    drop(inbox);
                    this.over();
                    return match this.first.take() {
                        Some(data) => this.give(data),
                        None => Poll::Ready(None),
                    };
                }
                Err(text) => {
                    let status = inbox.fail(Status::new(Code::InvalidArgument, text));
                    return Poll::Ready(Some(Err(status.into())));
                }
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.done && self.first.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        self.owed.map_or_else(SizeHint::default, SizeHint::with_exact)
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        if !self.done {
            // The API server wants no more of it, or is gone: the answer's side reads on.
            self.over();
        }
    }
}

/// The answer's messages.
struct Download {
    api: ApiServer,
    /// Dropped as soon as the answer is over in any way, which closes a connection that is not at its end.
    upstream: Option<Incoming>,
    /// `None`: the request's stream has ended in order.
    inbox: Option<Shared>,
    timer: Timer,
    out: BytesMut,
    /// What the API server sent last, without what was passed on.
    piece: Bytes,
    /// A piece whose head has gone out.
    whole: Option<Bytes>,
    end: Option<Status>,
    /// Of the request to the API server, until its answer is over.
    span: Option<Span>,
}

impl Download {
    fn finish(&mut self, status: Status) {
        if let Some(mut span) = self.span.take()
            && status.code() != Code::Ok
        {
            span.failed(status.code().name());
        }
        self.upstream = None;
        self.inbox = None;
        self.timer = Timer(None);
        self.piece = Bytes::new();
        self.end = Some(status);
    }

    /// Moves on by one step; `Pending` when there is nothing to do but to wait.
    fn step(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if let Poll::Ready(status) = self.timer.poll(cx) {
            self.finish(status);
            return Poll::Ready(());
        }
        let Some(upstream) = &mut self.upstream else { return Poll::Pending };
        match Pin::new(upstream).poll_frame(cx) {
            Poll::Ready(Some(Ok(frame))) => {
                // HTTP trailers are not carried.
                self.piece = frame.into_data().unwrap_or_default();
                Poll::Ready(())
            }
            Poll::Ready(Some(Err(error))) => {
                let failed = self.inbox.as_ref().and_then(|inbox| inbox.lock().failed.clone());
                let status = failed.unwrap_or_else(|| {
                    let host = self.api.target();
                    let text = format!(
                        "the Kubernetes API server at {host} broke off its answer: {}",
                        chain(&error)
                    );
                    tracing::warn!(error = text, "answer of the Kubernetes API server broke off");
                    Status::new(Code::Unavailable, text)
                });
                self.finish(status);
                Poll::Ready(())
            }
            Poll::Ready(None) => {
                frame::put_control(TRAILER, &[], &mut self.out);
                self.finish(Status::new(Code::Ok, ""));
                Poll::Ready(())
            }
            Poll::Pending => {
                let Some(inbox) = &self.inbox else { return Poll::Pending };
                let rest = inbox.lock().poll_rest(cx);
                match rest {
                    Poll::Pending => Poll::Pending,
                    Poll::Ready(Ok(())) => {
                        self.inbox = None;
                        Poll::Pending
                    }
                    Poll::Ready(Err(status)) => {
                        self.finish(status);
                        Poll::Ready(())
                    }
                }
            }
        }
    }
}

impl Body for Download {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let this = self.get_mut();
        if let Some(whole) = this.whole.take() {
            return Poll::Ready(Some(Ok(Frame::data(whole))));
        }
        loop {
            if !this.piece.is_empty() {
                let data = this.piece.split_to(this.piece.len().min(PIECE));
                // A piece is at most 32 KiB.
                frame::put_message_head(DATA, data.len() as u32, &mut this.out);
                if data.len() <= COPY {
                    this.out.put_slice(&data);
                } else {
                    this.whole = Some(data);
                }
                return Poll::Ready(Some(Ok(Frame::data(this.out.split().freeze()))));
            }
            if this.end.is_none() && this.step(cx).is_ready() {
                continue;
            }
            if !this.out.is_empty() {
                return Poll::Ready(Some(Ok(Frame::data(this.out.split().freeze()))));
            }
            if this.upstream.is_some() {
                return Poll::Pending;
            }
            return Poll::Ready(this.end.take().map(|status| {
                let mut trailers = HeaderMap::new();
                status.write_to(&mut trailers);
                Ok(Frame::trailers(trailers))
            }));
        }
    }
}
