//! agentk's end of a tunnel: serves the requests that come out of it.
//!
//! [`AgentBody`] is the request body of the `Connect` call. Once kas has answered the call, the body reads
//! `request_info` from kas' direction, calls the [`Handler`], and writes the handler's answer in envelopes,
//! all in the task of its own HTTP/2 stream. If that stream is reset, the body is dropped, and with it the
//! handler's future. That cancels a request, even before the handler has sent its first byte.

use std::{
    fmt,
    future::Future,
    panic::AssertUnwindSafe,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Waker, ready},
    time::Duration,
};

use bytes::{BufMut as _, Bytes, BytesMut};
use futures_util::FutureExt as _;
use grpc::{BoxError, Code, Status};
use http::{HeaderMap, Request, Response};
use http_body::{Body, Frame};
use parking_lot::{Mutex, MutexGuard};
use prost::Message as _;
use proto::gitlab::agent::{reverse_tunnel::info::AgentDescriptor, reverse_tunnel::rpc};

use crate::{
    frame::{self, COPY, Decoder, Event, GATHER, Splitter, request, response},
    meta::{self, Binary, MapWriter},
    state::Mode,
};

/// How long kas may take to end its direction after a half-close. After that the stream is dropped.
const READ_TO_END: Duration = Duration::from_secs(10);

/// The future that a handler returns.
pub type Answer = Pin<Box<dyn Future<Output = Response<grpc::Body>> + Send>>;

/// An extension of each request that arrives in a reusable tunnel, so from a kas of this project.
#[derive(Clone, Copy, Debug)]
pub struct Reusable;

/// Serves requests. The path is the method, the headers are metadata, and both bodies have gRPC frames.
pub trait Handler: Send + Sync + 'static {
    /// Starts a request. Dropping the returned future or the answer cancels it.
    fn call(&self, request: Request<grpc::Body>) -> Answer;
}

/// The progress of a tunnel, for the pool of tunnels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// kas has accepted the stream, and the tunnel is idle.
    Parked,
    /// A request has started.
    Busy,
    /// kas asks the agent to leave: open a replacement, then close this tunnel.
    DrainNotice,
    /// The stream is over.
    Ended,
}

/// Observes the progress of tunnels. Called while a lock of the tunnel is held, so it must not call back.
pub trait Observer: Send + Sync + 'static {
    /// The tunnel has reached this point.
    fn progress(&self, progress: Progress);
    /// A handler panicked, and its request ended with INTERNAL.
    fn panicked(&self) {}
}

/// Controls a tunnel whose body has been given to HTTP/2.
#[derive(Clone)]
pub struct Control {
    shared: Arc<Shared>,
}

impl fmt::Debug for Control {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Control")
    }
}

impl Control {
    /// kas has answered the `Connect` call with this body. `reusable`: kas accepted reuse. `gzip`: kas
    /// announced that encoding.
    pub fn accepted(&self, body: grpc::Body, reusable: bool, gzip: bool) {
        let mut core = self.shared.core();
        core.mode = if reusable { Mode::Reusable } else { Mode::OneShot };
        core.stream = Some(KasStream { body, decoder: Decoder::of_kas(gzip), closed: false });
        core.wake();
    }

    /// kas has refused the call, or the call failed.
    pub fn failed(&self) {
        self.finish(Command::Abort);
    }

    /// Withdraws the tunnel once it is parked. kas ends it then.
    pub fn withdraw(&self) {
        self.finish(Command::Withdraw);
    }

    /// Half-closes the tunnel once it is parked.
    pub fn half_close(&self) {
        self.finish(Command::HalfClose);
    }

    fn finish(&self, command: Command) {
        let mut core = self.shared.core();
        core.command = Some(command);
        core.wake();
    }
}

/// What to do with the tunnel once it is parked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Command {
    Withdraw,
    HalfClose,
    Abort,
}

struct Shared {
    handler: Arc<dyn Handler>,
    observer: Box<dyn Observer>,
    core: Mutex<Core>,
}

impl Shared {
    fn core(&self) -> MutexGuard<'_, Core> {
        self.core.lock()
    }
}

struct Core {
    mode: Mode,
    stream: Option<KasStream>,
    /// The number of the current request, so that the body of an earlier one reads nothing more.
    request: u64,
    command: Option<Command>,
    waker: Option<Waker>,
}

impl Core {
    fn wake(&mut self) {
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }
}

/// kas' direction: the response body of the call, decoded.
struct KasStream {
    body: grpc::Body,
    decoder: Decoder,
    /// `close_send` of the current request has arrived.
    closed: bool,
}

enum Got {
    Event(Event),
    /// kas ended the stream. The status is in its trailers.
    End,
}

impl KasStream {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Got, BoxError>> {
        loop {
            if let Some(event) = self.decoder.next()? {
                return Poll::Ready(Ok(Got::Event(event)));
            }
            match ready!(Pin::new(&mut self.body).poll_frame(cx)) {
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        self.decoder.push(data);
                    }
                }
                Some(Err(error)) => return Poll::Ready(Err(error)),
                None if self.body.is_end_stream() && self.decoder.is_between() => {
                    return Poll::Ready(Ok(Got::End));
                }
                None => return Poll::Ready(Err("the tunnel was reset".into())),
            }
        }
    }
}

/// The request body of a `Connect` call.
pub struct AgentBody {
    shared: Arc<Shared>,
    state: State,
    out: BytesMut,
    big: Option<Bytes>,
    ended: bool,
    /// The body ended by a half-close, not by an error.
    half_closed: bool,
}

enum State {
    /// Before and between requests.
    Parked {
        /// The observer has been notified.
        reported: bool,
    },
    /// The handler has not returned the head of its answer.
    Called(Answer),
    /// The body of the answer is being passed on.
    Answering {
        body: grpc::Body,
        splitter: Splitter,
    },
    /// The answer is complete, but kas has not closed the request's direction.
    Answered,
    Over,
}

impl fmt::Debug for AgentBody {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("AgentBody")
    }
}

/// Creates the request body of a `Connect` call, which begins with `descriptor`.
pub fn open(
    descriptor: &AgentDescriptor,
    handler: Arc<dyn Handler>,
    observer: Box<dyn Observer>,
) -> (AgentBody, Control) {
    let core = Core { mode: Mode::OneShot, stream: None, request: 0, command: None, waker: None };
    let shared = Arc::new(Shared { handler, observer, core: Mutex::new(core) });
    let mut out = BytesMut::new();
    let message = rpc::Descriptor { agent_descriptor: Some(descriptor.clone()) };
    frame::put_control(request::DESCRIPTOR, &message.encode_to_vec(), &mut out);
    let body = AgentBody {
        shared: Arc::clone(&shared),
        state: State::Parked { reported: false },
        out,
        big: None,
        ended: false,
        half_closed: false,
    };
    (body, Control { shared })
}

enum Action {
    Continue,
    Wait,
    Big(Bytes),
    HalfClose,
    Broken(BoxError),
}

impl AgentBody {
    fn advance(&mut self, cx: &mut Context<'_>) -> Action {
        match std::mem::replace(&mut self.state, State::Over) {
            State::Parked { reported } => self.advance_parked(reported, cx),
            State::Called(answer) => self.poll_handler(answer, cx),
            State::Answering { body, splitter } => self.pass_answer(body, splitter, cx),
            State::Answered => self.finish_request(cx),
            State::Over => Action::HalfClose,
        }
    }

    fn advance_parked(&mut self, mut reported: bool, cx: &mut Context<'_>) -> Action {
        let shared = Arc::clone(&self.shared);
        let mut core = shared.core();
        match core.command {
            Some(Command::Abort) => return Action::Broken("the call failed".into()),
            Some(Command::HalfClose) => return Action::HalfClose,
            Some(Command::Withdraw) if core.stream.is_some() => {
                core.command = None;
                if core.mode == Mode::OneShot {
                    return Action::HalfClose;
                }
                // Reads on, since a request may have crossed the withdrawal.
                frame::put_control(request::TRAILER, &[], &mut self.out);
            }
            // kas has not answered the call, so no request can be on its way.
            Some(Command::Withdraw) => return Action::Broken("withdrawn before kas accepted it".into()),
            None => {}
        }
        core.waker = Some(cx.waker().clone());
        let mode = core.mode;
        let Some(stream) = &mut core.stream else {
            self.state = State::Parked { reported };
            return Action::Wait;
        };
        if !reported {
            reported = true;
            shared.observer.progress(Progress::Parked);
        }
        let got = match stream.poll(cx) {
            Poll::Pending => {
                self.state = State::Parked { reported };
                return Action::Wait;
            }
            Poll::Ready(Ok(got)) => got,
            Poll::Ready(Err(error)) => return Action::Broken(error),
        };
        match got {
            Got::End => Action::HalfClose,
            Got::Event(Event::Control { field: response::REQUEST_INFO, body }) => {
                let binary = match mode {
                    Mode::Reusable => Binary::Base64,
                    Mode::OneShot => Binary::Raw,
                };
                let info = meta::read_request_info(&body, binary, meta::passes_to_handler);
                let Ok((method, headers)) = info else {
                    return Action::Broken("a malformed request_info".into());
                };
                stream.closed = false;
                core.request += 1;
                let serial = core.request;
                drop(core);
                shared.observer.progress(Progress::Busy);
                self.state = State::Called(self.call(method, headers, serial, mode));
                Action::Continue
            }
            Got::Event(Event::Control { field: response::CLOSE_SEND, .. }) if mode == Mode::Reusable => {
                shared.observer.progress(Progress::DrainNotice);
                self.state = State::Parked { reported };
                Action::Continue
            }
            Got::Event(_) => Action::Broken("kas wrote to a parked tunnel".into()),
        }
    }

    fn call(&self, method: &str, mut headers: HeaderMap, serial: u64, mode: Mode) -> Answer {
        let body = RequestBody {
            shared: Arc::clone(&self.shared),
            serial,
            out: BytesMut::new(),
            big: None,
            ended: false,
        };
        let mut request = Request::new(grpc::boxed(body));
        let Ok(uri) = http::Uri::try_from(method) else {
            let status = Status::new(Code::Unimplemented, format!("unknown method {method}"));
            return Box::pin(std::future::ready(status.into_response()));
        };
        *request.method_mut() = http::Method::POST;
        *request.uri_mut() = uri;
        *request.version_mut() = http::Version::HTTP_2;
        headers.insert(http::header::CONTENT_TYPE, grpc::CONTENT_TYPE);
        *request.headers_mut() = headers;
        if mode == Mode::Reusable {
            request.extensions_mut().insert(Reusable);
        }
        match std::panic::catch_unwind(AssertUnwindSafe(|| self.shared.handler.call(request))) {
            Ok(answer) => answer,
            Err(_) => Box::pin(std::future::ready(self.panicked().into_response())),
        }
    }

    fn panicked(&self) -> Status {
        self.shared.observer.panicked();
        Status::new(Code::Internal, "the agent's handler panicked; its log says where")
    }

    fn poll_handler(&mut self, mut answer: Answer, cx: &mut Context<'_>) -> Action {
        let response = match AssertUnwindSafe(&mut answer).catch_unwind().poll_unpin(cx) {
            Poll::Pending => {
                self.state = State::Called(answer);
                return self.watch(cx);
            }
            Poll::Ready(Ok(response)) => response,
            Poll::Ready(Err(_)) => self.panicked().into_response(),
        };
        let (head, body) = response.into_parts();
        let mode = self.shared.core().mode;
        if let Some(status) = Status::from_headers(&head.headers) {
            // Trailers only: there is no body.
            if mode == Mode::OneShot || status.code() == Code::Ok {
                frame::put_control(request::HEADER, &[], &mut self.out);
            }
            self.finish(&head.headers, &status, mode);
            return Action::Continue;
        }
        self.put_meta(request::HEADER, &head.headers, mode);
        self.state = State::Answering { body, splitter: Splitter::default() };
        Action::Continue
    }

    fn pass_answer(&mut self, mut body: grpc::Body, mut splitter: Splitter, cx: &mut Context<'_>) -> Action {
        let event = loop {
            match splitter.next() {
                Ok(Some(event)) => break Ok(Ok(event)),
                Ok(None) => {}
                Err(error) => {
                    break Ok(Err(Status::new(Code::Internal, format!("the agent's answer: {error}"))));
                }
            }
            let polled = match AssertUnwindSafe(|| Pin::new(&mut body).poll_frame(cx)).into_catch() {
                Ok(polled) => polled,
                Err(()) => break Ok(Err(self.panicked())),
            };
            match polled {
                Poll::Pending => {
                    self.state = State::Answering { body, splitter };
                    return self.watch(cx);
                }
                Poll::Ready(Some(Ok(frame))) => match frame.into_data() {
                    Ok(data) => splitter.push(data),
                    Err(frame) => break Err(frame.into_trailers().unwrap_or_default()),
                },
                Poll::Ready(Some(Err(error))) => {
                    break Ok(Err(Status::new(
                        Code::Unavailable,
                        format!("the agent's answer broke: {error}"),
                    )));
                }
                Poll::Ready(None) => {
                    break Ok(Err(Status::new(Code::Unknown, "the agent's answer ended without a status")));
                }
            }
        };
        let mode = self.shared.core().mode;
        let (trailers, status) = match event {
            Ok(Ok(Event::Message { len })) => {
                frame::put_message_head(request::MESSAGE, len, &mut self.out);
                self.state = State::Answering { body, splitter };
                return Action::Continue;
            }
            Ok(Ok(Event::Data(data))) => {
                self.state = State::Answering { body, splitter };
                if data.len() <= COPY {
                    self.out.put_slice(&data);
                    return Action::Continue;
                }
                return Action::Big(data);
            }
            // A splitter returns no control fields.
            Ok(Ok(Event::Control { .. })) => return Action::Broken("a control field in an answer".into()),
            Ok(Err(status)) => (HeaderMap::new(), status),
            Err(trailers) => {
                let status = Status::from_headers(&trailers).unwrap_or_else(|| {
                    Status::new(Code::Unknown, "the agent's answer ended without a status")
                });
                (trailers, status)
            }
        };
        if splitter.left() > 0 {
            // An envelope is partly written, so no status can follow on this stream.
            return Action::Broken("the answer ended inside a message".into());
        }
        self.finish(&trailers, &status, mode);
        Action::Continue
    }

    /// Writes the end of an answer. `trailer` comes last on a reusable tunnel, else before `error`.
    fn finish(&mut self, trailers: &HeaderMap, status: &Status, mode: Mode) {
        let error = (status.code() != Code::Ok)
            .then(|| rpc::Error { status: Some(status.to_proto()) }.encode_to_vec())
            .map(|error| if error.len() > frame::MAX_CONTROL { oversized(status) } else { error });
        if mode == Mode::Reusable
            && let Some(error) = &error
        {
            frame::put_control(request::ERROR, error, &mut self.out);
        }
        self.put_meta(request::TRAILER, trailers, mode);
        match (mode, error) {
            (Mode::OneShot, error) => {
                if let Some(error) = error {
                    frame::put_control(request::ERROR, &error, &mut self.out);
                }
                self.state = State::Over;
            }
            (Mode::Reusable, _) => self.state = State::Answered,
        }
    }

    fn put_meta(&mut self, field: u32, headers: &HeaderMap, mode: Mode) {
        let mut writer = MapWriter::meta(if mode == Mode::Reusable { Binary::Base64 } else { Binary::Raw });
        for key in headers.keys().filter(|key| meta::passes_to_tunnel(key.as_str())) {
            // What does not fit or is not text is left out: an answer does not fail because of its metadata.
            let _ = writer.add_all(key, headers);
        }
        writer.put_control(field, &mut self.out);
    }

    /// Once the handler has read its whole request, watches kas' direction for its end.
    fn watch(&mut self, cx: &mut Context<'_>) -> Action {
        let mut core = self.shared.core();
        if core.command == Some(Command::Abort) {
            return Action::Broken("the call failed".into());
        }
        let Some(stream) = core.stream.as_mut().filter(|stream| stream.closed) else { return Action::Wait };
        match stream.poll(cx) {
            Poll::Pending => Action::Wait,
            Poll::Ready(Ok(Got::End)) => Action::HalfClose,
            Poll::Ready(Ok(Got::Event(_))) => Action::Broken("kas wrote after close_send".into()),
            Poll::Ready(Err(error)) => Action::Broken(error),
        }
    }

    /// Reads and discards the rest of the request, up to `close_send`.
    fn finish_request(&mut self, cx: &mut Context<'_>) -> Action {
        let shared = Arc::clone(&self.shared);
        let mut core = shared.core();
        // A request body that the handler has kept must not read the next request.
        core.request += 1;
        let Some(stream) = &mut core.stream else { return Action::HalfClose };
        while !stream.closed {
            match stream.poll(cx) {
                Poll::Pending => {
                    self.state = State::Answered;
                    return Action::Wait;
                }
                Poll::Ready(Ok(Got::Event(Event::Message { .. } | Event::Data(_)))) => {}
                Poll::Ready(Ok(Got::Event(Event::Control { field: response::CLOSE_SEND, .. }))) => {
                    stream.closed = true
                }
                Poll::Ready(Ok(Got::Event(_))) => return Action::Broken("a request inside a request".into()),
                Poll::Ready(Ok(Got::End)) => return Action::HalfClose,
                Poll::Ready(Err(error)) => return Action::Broken(error),
            }
        }
        self.state = State::Parked { reported: false };
        Action::Continue
    }
}

/// Encodes a status that is too large for the tunnel: its code, and the beginning of its message.
fn oversized(status: &Status) -> Vec<u8> {
    let message: String = status.message().chars().take(1024).collect();
    rpc::Error { status: Some(Status::new(status.code(), message).to_proto()) }.encode_to_vec()
}

/// Catches the panic of a closure.
trait IntoCatch<T> {
    fn into_catch(self) -> Result<T, ()>;
}

impl<T, F: FnOnce() -> T> IntoCatch<T> for AssertUnwindSafe<F> {
    fn into_catch(self) -> Result<T, ()> {
        std::panic::catch_unwind(self).map_err(|_| ())
    }
}

impl Body for AgentBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let this = self.get_mut();
        if let Some(big) = this.big.take() {
            return Poll::Ready(Some(Ok(Frame::data(big))));
        }
        loop {
            if this.ended {
                return if this.out.is_empty() {
                    Poll::Ready(None)
                } else {
                    Poll::Ready(Some(Ok(Frame::data(this.out.split().freeze()))))
                };
            }
            let action = if this.out.len() >= GATHER { Action::Wait } else { this.advance(cx) };
            match action {
                Action::Continue => continue,
                Action::Big(big) if this.out.is_empty() => return Poll::Ready(Some(Ok(Frame::data(big)))),
                Action::Big(big) => this.big = Some(big),
                Action::HalfClose => {
                    this.ended = true;
                    this.half_closed = true;
                    continue;
                }
                // With an error of its own type HTTP/2 resets the stream with CANCEL, not with
                // INTERNAL_ERROR.
                Action::Broken(error) => {
                    this.ended = true;
                    tracing::debug!(error = %error, "tunnel broke");
                    return Poll::Ready(Some(Err(Box::new(h2::Error::from(h2::Reason::CANCEL)))));
                }
                Action::Wait if this.out.is_empty() => return Poll::Pending,
                Action::Wait => {}
            }
            return Poll::Ready(Some(Ok(Frame::data(this.out.split().freeze()))));
        }
    }
}

impl Drop for AgentBody {
    fn drop(&mut self) {
        let mut core = self.shared.core();
        core.request += 1;
        let stream = core.stream.take();
        drop(core);
        // HTTP/2 drops this body when it has taken the last frame, not when that is written. If the other
        // direction were dropped too, the stream would be reset and the frame lost.
        match (stream, tokio::runtime::Handle::try_current()) {
            (Some(stream), Ok(runtime)) if self.half_closed => drop(runtime.spawn(read_to_end(stream))),
            (stream, _) => drop(stream),
        }
        self.shared.observer.progress(Progress::Ended);
    }
}

/// Reads kas' direction to its end, for a bounded time.
async fn read_to_end(mut stream: KasStream) {
    let end = async { while let Ok(Got::Event(_)) = std::future::poll_fn(|cx| stream.poll(cx)).await {} };
    let _ = tokio::time::timeout(READ_TO_END, end).await;
}

/// The body of a request, for the handler.
struct RequestBody {
    shared: Arc<Shared>,
    serial: u64,
    out: BytesMut,
    big: Option<Bytes>,
    ended: bool,
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let this = self.get_mut();
        if let Some(big) = this.big.take() {
            return Poll::Ready(Some(Ok(Frame::data(big))));
        }
        let mut core = this.shared.core();
        // The tunnel broke, or the answer is complete. What has not been read of the request is missing: that
        // is not its end.
        if core.request != this.serial && !this.ended {
            return Poll::Ready(Some(Err("the request is over".into())));
        }
        while !this.ended && this.out.len() < GATHER {
            let Some(stream) = &mut core.stream else {
                return Poll::Ready(Some(Err("the tunnel is over".into())));
            };
            match stream.poll(cx) {
                Poll::Pending if this.out.is_empty() => return Poll::Pending,
                Poll::Pending => break,
                Poll::Ready(Ok(Got::Event(Event::Message { len }))) => this.out.put_slice(&grpc::prefix(len)),
                Poll::Ready(Ok(Got::Event(Event::Data(data)))) if data.len() <= COPY => {
                    this.out.put_slice(&data)
                }
                Poll::Ready(Ok(Got::Event(Event::Data(data)))) => {
                    if this.out.is_empty() {
                        return Poll::Ready(Some(Ok(Frame::data(data))));
                    }
                    this.big = Some(data);
                    break;
                }
                Poll::Ready(Ok(Got::Event(Event::Control { field: response::CLOSE_SEND, .. }))) => {
                    stream.closed = true;
                    this.ended = true;
                }
                // The caller or the connection is gone. That is not the end of the request's body.
                Poll::Ready(Ok(Got::Event(_) | Got::End)) => {
                    return Poll::Ready(Some(Err("the request was cancelled".into())));
                }
                Poll::Ready(Err(error)) => return Poll::Ready(Some(Err(error))),
            }
        }
        if this.out.is_empty() {
            return Poll::Ready(None);
        }
        Poll::Ready(Some(Ok(Frame::data(this.out.split().freeze()))))
    }

    fn is_end_stream(&self) -> bool {
        self.ended && self.out.is_empty() && self.big.is_none()
    }
}
