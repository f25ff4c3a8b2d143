//! `KubernetesApi/MakeRequest`: an HTTP request to the API server and its response, as gRPC messages.
//!
//! The body of the response is read from the API server when kas reads it here, and the body of the request
//! is read from kas when the connection to the API server can take it. There is no task and no queue, and at
//! most one chunk is buffered. A request is complete only at its `trailer`. If its stream ends earlier, the
//! connection to the API server is closed, so that a partial request is not processed.
//!
//! Before a request is sent, the [`Guard`] decides whether it may be. A request that asks for an upgrade
//! (exec, attach, port-forward) has its own connection to the API server, see `upgrade`.
//!
//! When agentk shuts down, it ends watches itself, between two events, see `watch`. Everything else goes on.

mod guard;
mod timer;
mod upgrade;
mod watch;

use std::{
    future::{Future, poll_fn},
    pin::{Pin, pin},
    task::{Context, Poll},
};

use bytes::Bytes;
use grpc::{BoxError, Code, Deadline, Status};
use http::{HeaderMap, HeaderValue, Method, Request, Response, response};
use http_body::{Body, Frame};
use http_tunnel::{
    LARGE_CHUNK, MAX_CHUNK,
    agent_end::{RequestStream, ResponseEncoder, read_request},
};
use kube_request::Upgrade;
use process::error::chain;
use tokio_util::sync::CancellationToken;
use traces::{Kind, Span, Tracer};
use tunnel::agent_end::Reusable;

pub use self::{guard::Guard, upgrade::Upgrades};
use self::{
    timer::Timer,
    upgrade::{Records, Switched},
    watch::Watch,
};
use super::{Answer, Module, Service};
use crate::{
    audit::Entry,
    cluster::{ApiServer, ResponseBody, SendError, UpgradeAnswer},
};

/// Gives kas access to the API server, with the permissions of agentk's own credentials, as far as the guard
/// admits it.
#[derive(Clone, Debug)]
pub struct KubernetesApi {
    api: ApiServer,
    /// The user agent of requests to the API server.
    user_agent: HeaderValue,
    /// Makes a span of each request to the API server, if tracing is enabled.
    tracer: Option<Tracer>,
    /// The upgraded connections that are open.
    upgrades: Upgrades,
    guard: Guard,
    /// Cancelled when agentk begins to shut down.
    leave: CancellationToken,
}

impl KubernetesApi {
    /// Creates the module. Version and commit are those of agentk.
    pub fn new(api: ApiServer, version: &str, commit: &str) -> Self {
        let user_agent = HeaderValue::try_from(format!("gitlab-agent/{version}/{commit}"));
        let user_agent = user_agent.unwrap_or(HeaderValue::from_static("gitlab-agent"));
        Self {
            api,
            user_agent,
            tracer: None,
            upgrades: Upgrades::default(),
            guard: Guard::default(),
            leave: CancellationToken::new(),
        }
    }

    /// Ends watches when this is cancelled.
    pub fn leaving(self, leave: CancellationToken) -> Self {
        Self { leave, ..self }
    }

    /// Returns the upgraded connections that are open.
    pub fn upgrades(&self) -> Upgrades {
        self.upgrades.clone()
    }

    /// Asks this guard about each request from now on.
    pub fn guarded(self, guard: Guard) -> Self {
        Self { guard, ..self }
    }

    /// Makes a span of each request to the API server from now on.
    pub fn traced(self, tracer: Option<Tracer>) -> Self {
        Self { tracer, ..self }
    }

    /// Starts the span of a request to the API server, as a child of the caller's span, and passes its
    /// context on to the API server. Without a tracer, the caller's context is passed on.
    fn begin_span(&self, caller: &HeaderMap, request: &mut Request<grpc::Body>) -> Option<Span> {
        let Some(tracer) = &self.tracer else {
            traces::pass_on(caller, request.headers_mut());
            return None;
        };
        let mut span = tracer.begin(request.method().as_str().to_owned(), Kind::Client, caller);
        if span.is_recording() {
            // The path is omitted: its names may be confidential.
            span.set("http.request.method", request.method().as_str().to_owned());
            span.set("server.address", self.api.target().host().to_owned());
        }
        span.write_to(request.headers_mut());
        Some(span)
    }

    async fn make_request(self, request: Request<grpc::Body>) -> Result<Response<grpc::Body>, Status> {
        let (parts, body) = request.into_parts();
        // Only kas of this project makes tunnels reusable.
        let max_chunk = if parts.extensions.get::<Reusable>().is_some() { LARGE_CHUNK } else { MAX_CHUNK };
        let deadline = Deadline::from_headers(&parts.headers)
            .map_err(|error| Status::new(Code::InvalidArgument, error.to_string()))?;
        let mut timer = Timer::new(deadline);
        let reading = read_request(body, &self.user_agent, self.api.target().impersonates());
        let (mut request, stream) = timer.race(reading).await??;
        let upgrade = Upgrade::requested(request.headers());
        let mut entry = match self.guard.admit(&parts.headers, &request, upgrade) {
            Ok(entry) => entry,
            Err(refused) => return refused.into_response(max_chunk),
        };
        if let Some(entry) = &entry {
            request = request.map(|body| entry.counting(body));
        }

        let method = request.method().clone();
        let is_watch = upgrade.is_none() && watch::is_watch(&request);
        let mut span = self.begin_span(&parts.headers, &mut request);
        let mut request_ended = false;
        let answered = match upgrade {
            None => {
                let sending = self.api.send(request);
                let answered = answered(sending, &mut timer, &stream, &mut request_ended).await;
                answered.map(UpgradeAnswer::Refused)
            }
            Some(protocol) => {
                // Rare, and large.
                let sending = Box::pin(self.api.upgrade(request, protocol));
                answered(sending, &mut timer, &stream, &mut request_ended).await
            }
        };
        let answer = match answered {
            Ok(answer) => answer,
            Err(status) => {
                if let Some(span) = &mut span {
                    span.failed(status.code().name());
                }
                if let Some(entry) = &mut entry {
                    entry.ended(Some(status.code().name()));
                }
                return Err(status);
            }
        };
        let body = match answer {
            UpgradeAnswer::Switched(response, upstream) => {
                let (parts, ()) = response.into_parts();
                note_answer(&method, &parts, span.as_mut(), entry.as_mut());
                let open = self.upgrades.enter();
                grpc::boxed(Switched::new(
                    &parts,
                    max_chunk,
                    stream,
                    upstream,
                    timer,
                    Records { span, entry },
                    open,
                )?)
            }
            UpgradeAnswer::Refused(response) => {
                let (parts, upstream) = response.into_parts();
                note_answer(&method, &parts, span.as_mut(), entry.as_mut());
                let encoder = ResponseEncoder::new(&parts, max_chunk).inspect_err(|status| {
                    if let Some(entry) = &mut entry {
                        entry.ended(Some(status.code().name()));
                    }
                })?;
                let watch = is_watch.then(|| Watch::begin(&parts, &self.leave)).flatten();
                grpc::boxed(Download {
                    api: self.api.clone(),
                    upstream: Some(upstream),
                    watch,
                    stream: (!request_ended).then_some(stream),
                    timer,
                    encoder,
                    end: None,
                    span,
                    entry,
                })
            }
        };
        let mut response = Response::new(body);
        response.headers_mut().insert(http::header::CONTENT_TYPE, grpc::CONTENT_TYPE);
        Ok(response)
    }
}

/// Waits for the answer of the API server, and reads the caller's stream meanwhile. `request_ended`: that
/// stream has ended regularly.
async fn answered<T>(
    sending: impl Future<Output = Result<T, SendError>>,
    timer: &mut Timer,
    stream: &RequestStream,
    request_ended: &mut bool,
) -> Result<T, Status> {
    let mut sending = pin!(sending);
    let waiting = poll_fn(|cx| match sending.as_mut().poll(cx) {
        Poll::Ready(Ok(answer)) => Poll::Ready(Ok(answer)),
        // If the upload failed, its error is the cause, and not hyper's.
        Poll::Ready(Err(error)) => Poll::Ready(Err(stream.failure().unwrap_or_else(|| {
            let text = chain(&error);
            tracing::warn!(error = text, "request to the Kubernetes API server failed");
            Status::new(Code::Unavailable, text)
        }))),
        Poll::Pending if *request_ended => Poll::Pending,
        Poll::Pending => match stream.poll_end(cx) {
            Poll::Ready(Err(status)) => Poll::Ready(Err(status)),
            Poll::Ready(Ok(())) => {
                *request_ended = true;
                Poll::Pending
            }
            Poll::Pending => Poll::Pending,
        },
    });
    timer.race(waiting).await?
}

/// Notes the head of an answer in the span and the logs.
fn note_answer(method: &Method, parts: &response::Parts, span: Option<&mut Span>, entry: Option<&mut Entry>) {
    if let Some(entry) = entry {
        entry.responded(parts.status);
    }
    if let Some(span) = span {
        span.set("http.response.status_code", i64::from(parts.status.as_u16()));
        if parts.status.is_client_error() || parts.status.is_server_error() {
            span.failed(parts.status.as_str().to_owned());
        }
    }
    tracing::debug!(http.method = %method, http.status = parts.status.as_u16(), "response of the Kubernetes API server");
}

impl Module for KubernetesApi {
    fn services(&self) -> &'static [Service] {
        &[Service { name: http_tunnel::SERVICE, methods: &["MakeRequest"] }]
    }

    fn call(&self, request: Request<grpc::Body>) -> Answer {
        let module = self.clone();
        // The future is large, so it is made where it stays: moving it costs more than most of what it does.
        Box::pin(
            async move { module.make_request(request).await.unwrap_or_else(|status| status.into_response()) },
        )
    }
}

/// The messages of the response.
struct Download {
    api: ApiServer,
    /// Dropped as soon as the response ends in any way, which closes the connection unless its response was
    /// complete.
    upstream: Option<ResponseBody>,
    /// It is a watch, which may end before the API server ends it.
    watch: Option<Watch>,
    /// `None`: the stream of the request has ended regularly.
    stream: Option<RequestStream>,
    timer: Timer,
    encoder: ResponseEncoder,
    end: Option<Status>,
    /// The span of the request to the API server, until its response ends.
    span: Option<Span>,
    /// The line of the audit log, until the response ends.
    entry: Option<Entry>,
}

impl Download {
    fn finish(&mut self, status: Status) {
        if let Some(mut entry) = self.entry.take() {
            entry.ended((status.code() != Code::Ok).then(|| status.code().name()));
        }
        if let Some(mut span) = self.span.take()
            && status.code() != Code::Ok
        {
            span.failed(status.code().name());
        }
        self.upstream = None;
        self.watch = None;
        self.stream = None;
        self.timer = Timer::none();
        self.encoder.discard();
        self.end = Some(status);
    }

    /// Makes one step. `Pending`: there is nothing to do but wait.
    fn step(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if let Poll::Ready(status) = self.timer.poll(cx) {
            self.finish(status);
            return Poll::Ready(());
        }
        if self.watch.as_mut().is_some_and(|watch| watch.poll_end(cx).is_ready()) {
            self.encoder.end();
            self.finish(Status::new(Code::Ok, ""));
            return Poll::Ready(());
        }
        let Some(upstream) = &mut self.upstream else { return Poll::Pending };
        match Pin::new(upstream).poll_frame(cx) {
            Poll::Ready(Some(Ok(frame))) => {
                // HTTP trailers are not forwarded.
                let data = frame.into_data().unwrap_or_default();
                if let Some(entry) = &mut self.entry {
                    entry.sent(data.len());
                }
                if let Some(watch) = &mut self.watch {
                    watch.follow(&data);
                }
                self.encoder.push(data);
                Poll::Ready(())
            }
            Poll::Ready(Some(Err(error))) => {
                let failed = self.stream.as_ref().and_then(RequestStream::failure);
                let status = failed.unwrap_or_else(|| {
                    let host = self.api.target();
                    let text = format!(
                        "the response of the Kubernetes API server at {host} was aborted: {}",
                        chain(&error)
                    );
                    tracing::warn!(error = text, "the response of the Kubernetes API server was aborted");
                    Status::new(Code::Unavailable, text)
                });
                self.finish(status);
                Poll::Ready(())
            }
            Poll::Ready(None) => {
                self.encoder.end();
                self.finish(Status::new(Code::Ok, ""));
                Poll::Ready(())
            }
            Poll::Pending => {
                let Some(stream) = &self.stream else { return Poll::Pending };
                match stream.poll_end(cx) {
                    Poll::Pending => Poll::Pending,
                    Poll::Ready(Ok(())) => {
                        self.stream = None;
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
        loop {
            if let Some(data) = this.encoder.next_chunk() {
                return Poll::Ready(Some(Ok(Frame::data(data))));
            }
            if this.end.is_none() && this.step(cx).is_ready() {
                continue;
            }
            if let Some(data) = this.encoder.flush() {
                return Poll::Ready(Some(Ok(Frame::data(data))));
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
