//! `GitlabAccess/MakeRequest`: HTTP requests of agents' modules to GitLab, in the name of the agent.

use std::{
    collections::HashMap,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use gitlab::ModuleError;
use grpc::{BoxError, Code, MessageReader, Status};
use http::{HeaderMap, HeaderValue};
use http_body::{Body, Frame};
use http_tunnel::{
    MAX_CHUNK,
    agent_end::{RequestStream, ResponseEncoder, read_request},
};
use hyper::body::Incoming;
use identity::jwt;
use ids::AgentId;
use parking_lot::Mutex;
use process::{error::chain, version};
use prost::Message as _;
use proto::gitlab::agent::{
    gitlab_access::rpc::HeaderExtra,
    grpctool::{HttpRequest, http_request},
};
use tokio::time::{Instant, Sleep};

use super::agent::{AgentCall, AgentService, Answered, ServiceAnswer};

const MAKE_REQUEST: &str = "/gitlab.agent.gitlab_access.rpc.GitlabAccess/MakeRequest";
const HEADER_EXTRA: &str = "type.googleapis.com/gitlab.agent.gitlab_access.rpc.HeaderExtra";
/// The largest message, in bytes: a chunk has 32 KiB, and headers are larger at times.
const MAX_MESSAGE: usize = 256 * 1024;
/// The largest body of a request, in bytes.
const MAX_BODY: u64 = 64 << 20;
/// Requests of one agent at the same time.
const MOST: usize = 10;
/// How long a request may take without a byte in either direction.
const IDLE: Duration = Duration::from_secs(60);
/// The longest name of a module, in characters. GitLab knows a few fixed ones.
const LONGEST_NAME: usize = 64;

/// Passes requests of modules on to GitLab.
#[derive(Debug)]
pub struct GitlabAccess {
    gitlab: Arc<gitlab::Client>,
    open: Mutex<HashMap<AgentId, usize>>,
}

impl GitlabAccess {
    /// Returns a service that calls `gitlab`.
    pub fn new(gitlab: Arc<gitlab::Client>) -> Self {
        Self { gitlab, open: Mutex::default() }
    }

    /// Counts an open request of an agent.
    fn enter(self: &Arc<Self>, agent: AgentId) -> Result<Open, Status> {
        let mut open = self.open.lock();
        let count = open.entry(agent).or_default();
        if *count >= MOST {
            let text = format!("an agent may have {MOST} requests to GitLab open at the same time");
            return Err(Status::new(Code::ResourceExhausted, text));
        }
        *count += 1;
        Ok(Open { service: Arc::clone(self), agent })
    }

    async fn begin(self: Arc<Self>, call: AgentCall) -> Result<Answered, Status> {
        let token = jwt::bearer(&call.headers)?.to_vec();
        let agent = call.authenticated.agent.id;
        let open = self.enter(agent)?;
        let (_context, mut messages) = call.messages(MAX_MESSAGE)?;
        let first = tokio::time::timeout(IDLE, messages.next()).await;
        let Ok(Ok(Some(first))) = first else {
            return Err(unavailable(agent, "the first message is missing"));
        };
        let (module, first) = module(agent, first)?;
        let progress = Progress::default();
        let body = Upload {
            first: Some(frame(&first)),
            messages,
            left: MAX_BODY,
            progress: progress.clone(),
            has_ended: false,
        };
        let user_agent = format!("gitlab-kas/{}/{}", version::VERSION, version::COMMIT);
        let user_agent = HeaderValue::from_str(&user_agent).unwrap_or(HeaderValue::from_static("gitlab-kas"));
        let (request, stream) = read_request(grpc::boxed(body), &user_agent, false).await?;
        check_path(request.uri().path())?;
        let answer = tokio::select! {
            answer = self.gitlab.call_module(&token, &module, request) => answer,
            () = progress.stalled() => return Err(unavailable(agent, "nothing was sent for a minute")),
        };
        let (parts, body) = match answer {
            Ok(answer) => answer.into_parts(),
            Err(_) if progress.0.lock().is_too_large => {
                let text = format!("a request of a module to GitLab has at most {MAX_BODY} bytes");
                return Err(Status::new(Code::ResourceExhausted, text));
            }
            // In 14.1, a wrong order of messages has the same status.
            Err(error) => match stream.failure() {
                Some(failure) => return Err(unavailable(agent, failure.message())),
                None => return Err(failed(agent, &error)),
            },
        };
        let encoder = ResponseEncoder::new(&parts, MAX_CHUNK)?;
        let idle = Box::pin(tokio::time::sleep(IDLE));
        let answer = Download { agent, encoder, body, stream, idle, state: State::Body, _open: open };
        Ok(grpc::boxed(answer).into())
    }
}

impl AgentService for GitlabAccess {
    fn paths(&self) -> &'static [&'static str] {
        &[MAKE_REQUEST]
    }

    fn call(self: Arc<Self>, _path: &str, call: AgentCall) -> ServiceAnswer {
        Box::pin(self.begin(call))
    }
}

/// An open request of an agent.
struct Open {
    service: Arc<GitlabAccess>,
    agent: AgentId,
}

impl Drop for Open {
    fn drop(&mut self) {
        let mut open = self.service.open.lock();
        if let Some(count) = open.get_mut(&self.agent) {
            *count -= 1;
            if *count == 0 {
                open.remove(&self.agent);
            }
        }
    }
}

/// The status of 14.1 for everything that is not the agent's fault, and for a wrong order of messages.
fn unavailable(agent: AgentId, error: &str) -> Status {
    tracing::info!(agent.id = agent.get(), error, "a request of a module to GitLab failed");
    Status::new(Code::Unavailable, "unavailable")
}

fn failed(agent: AgentId, error: &ModuleError) -> Status {
    match error {
        ModuleError::NotSent(gitlab::LookupError::Busy) => {
            Status::new(Code::ResourceExhausted, "too many requests of modules to GitLab")
        }
        error => unavailable(agent, &chain(error)),
    }
}

/// Returns the module of a request, and its first message without it.
fn module(agent: AgentId, first: Bytes) -> Result<(String, HttpRequest), Status> {
    let Ok(HttpRequest { message: Some(http_request::Message::Header(mut header)) }) =
        HttpRequest::decode(first)
    else {
        return Err(unavailable(agent, "the first message is not a header"));
    };
    let Some(extra) = header.extra.take().filter(|extra| extra.type_url == HEADER_EXTRA) else {
        return Err(unavailable(agent, "the header does not name a module"));
    };
    let invalid = |text: String| Status::new(Code::InvalidArgument, text);
    let extra = HeaderExtra::decode(extra.value.as_ref())
        .map_err(|error| invalid(format!("invalid header: extra is malformed: {error}")))?;
    let name = extra.module_name;
    let is_usual = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    if name.is_empty() || name.len() > LONGEST_NAME || !name.chars().all(is_usual) {
        return Err(invalid(format!(
            "invalid header: module_name: expected 1 to {LONGEST_NAME} lowercase letters, digits or underscores"
        )));
    }
    // 14.1's default.
    if let Some(request) = header.request.as_mut().filter(|request| request.method.is_empty()) {
        request.method = "GET".to_owned();
    }
    Ok((name, HttpRequest { message: Some(http_request::Message::Header(header)) }))
}

/// Refuses a path that GitLab or a proxy before it might read as another one.
fn check_path(path: &str) -> Result<(), Status> {
    let lower = path.to_ascii_lowercase();
    let is_ambiguous = ["%2f", "%5c", "%00", "%25", "\\", "//", ";"].iter().any(|part| lower.contains(part))
        || path.split('/').any(|name| name == "." || name == "..");
    if is_ambiguous {
        return Err(Status::new(
            Code::InvalidArgument,
            "invalid header: url_path: expected a path without encoded slashes or percent signs, backslashes, \
             semicolons, empty names, . or ..",
        ));
    }
    Ok(())
}

fn frame(message: &HttpRequest) -> Bytes {
    grpc::encode(message)
}

/// How far the upload is.
#[derive(Clone, Debug)]
struct Progress(Arc<Mutex<Uploaded>>);

#[derive(Debug)]
struct Uploaded {
    /// When the last message came.
    at: Instant,
    /// There were more bytes than are accepted.
    is_too_large: bool,
}

impl Default for Progress {
    fn default() -> Self {
        Self(Arc::new(Mutex::new(Uploaded { at: Instant::now(), is_too_large: false })))
    }
}

impl Progress {
    fn made(&self) {
        self.0.lock().at = Instant::now();
    }

    /// Waits until there was no progress for [`IDLE`].
    async fn stalled(&self) {
        loop {
            let until = self.0.lock().at + IDLE;
            if until <= Instant::now() {
                return;
            }
            tokio::time::sleep_until(until).await;
        }
    }
}

/// The messages of a request, as gRPC frames that are not compressed.
struct Upload {
    first: Option<Bytes>,
    messages: MessageReader<Incoming>,
    /// What may still come, in bytes.
    left: u64,
    progress: Progress,
    has_ended: bool,
}

impl Body for Upload {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        if let Some(first) = self.first.take() {
            return Poll::Ready(Some(Ok(Frame::data(first))));
        }
        if self.has_ended {
            return Poll::Ready(None);
        }
        match ready!(self.messages.poll_next(cx)) {
            Ok(Some(message)) => {
                self.progress.made();
                let Some(left) = self.left.checked_sub(message.len() as u64) else {
                    self.progress.0.lock().is_too_large = true;
                    return Poll::Ready(Some(Err("the request is too large".into())));
                };
                self.left = left;
                // A message has at most `MAX_MESSAGE` bytes.
                let prefix = grpc::prefix(message.len() as u32);
                Poll::Ready(Some(Ok(Frame::data([&prefix[..], &message[..]].concat().into()))))
            }
            Ok(None) => {
                self.has_ended = true;
                Poll::Ready(None)
            }
            Err(error) => Poll::Ready(Some(Err(error.into()))),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.has_ended
    }
}

/// The answer of GitLab as messages.
struct Download {
    agent: AgentId,
    encoder: ResponseEncoder,
    body: Incoming,
    /// What the agent still sends is read and dropped: an early answer is no error.
    stream: RequestStream,
    idle: Pin<Box<Sleep>>,
    state: State,
    _open: Open,
}

enum State {
    Body,
    /// Everything was encoded.
    Ended,
    /// Trailers with this status are next.
    Failed(Status),
    Done,
}

impl Body for Download {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let this = &mut *self;
        // The answer stands, whatever the agent sends after it.
        let _ = this.stream.poll_end(cx);
        loop {
            match &mut this.state {
                State::Done => return Poll::Ready(None),
                State::Failed(status) => {
                    let mut trailers = HeaderMap::with_capacity(2);
                    status.write_to(&mut trailers);
                    this.state = State::Done;
                    return Poll::Ready(Some(Ok(Frame::trailers(trailers))));
                }
                State::Ended => {
                    if let Some(last) = this.encoder.flush() {
                        return Poll::Ready(Some(Ok(Frame::data(last))));
                    }
                    let mut trailers = HeaderMap::with_capacity(1);
                    Status::write_ok(&mut trailers);
                    this.state = State::Done;
                    return Poll::Ready(Some(Ok(Frame::trailers(trailers))));
                }
                State::Body => {}
            }
            if let Some(chunk) = this.encoder.next_chunk() {
                return Poll::Ready(Some(Ok(Frame::data(chunk))));
            }
            match Pin::new(&mut this.body).poll_frame(cx) {
                Poll::Ready(Some(Ok(frame))) => {
                    this.idle.as_mut().reset(Instant::now() + IDLE);
                    if let Ok(data) = frame.into_data() {
                        this.encoder.push(data);
                    }
                }
                Poll::Ready(Some(Err(error))) => {
                    this.encoder.discard();
                    this.state = State::Failed(unavailable(this.agent, &chain(&error)));
                }
                Poll::Ready(None) => {
                    this.encoder.end();
                    this.state = State::Ended;
                }
                Poll::Pending => {
                    // The head is sent without waiting for the body.
                    if let Some(head) = this.encoder.flush() {
                        return Poll::Ready(Some(Ok(Frame::data(head))));
                    }
                    ready!(this.idle.as_mut().poll(cx));
                    this.state = State::Failed(unavailable(this.agent, "GitLab sent nothing for a minute"));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proto::gitlab::agent::prototool;

    use super::*;

    fn header(type_url: &str, module_name: &str) -> Bytes {
        let extra = HeaderExtra { module_name: module_name.to_owned() };
        let header = http_request::Header {
            request: Some(prototool::HttpRequest::default()),
            extra: Some(prost_types::Any { type_url: type_url.to_owned(), value: extra.encode_to_vec() }),
            ..http_request::Header::default()
        };
        HttpRequest { message: Some(http_request::Message::Header(header)) }.encode_to_vec().into()
    }

    #[test]
    fn the_module_is_taken_from_the_first_message() {
        let agent = AgentId::new(1).unwrap();
        let (name, first) = module(agent, header(HEADER_EXTRA, "cilium_alert")).unwrap();
        assert_eq!(name, "cilium_alert");
        let Some(http_request::Message::Header(header_left)) = first.message else { panic!("a header") };
        assert_eq!((header_left.extra, &*header_left.request.unwrap().method), (None, "GET"));
        for name in ["", "A", "a/b", "..", "a-b", &"a".repeat(65)] {
            let status = module(agent, header(HEADER_EXTRA, name)).unwrap_err();
            assert_eq!(status.code(), Code::InvalidArgument, "{name}");
        }
        let status = module(agent, header("type.googleapis.com/other", "a")).unwrap_err();
        assert_eq!((status.code(), status.message()), (Code::Unavailable, "unavailable"));
        assert_eq!(module(agent, Bytes::new()).unwrap_err().code(), Code::Unavailable);
    }

    #[test]
    fn ambiguous_paths_are_refused() {
        for good in ["/", "/a/b.c", "/a%20b"] {
            assert!(check_path(good).is_ok(), "{good}");
        }
        for wrong in ["/a/../b", "/.", "/a//b", "/a%2Fb", "/a%5cb", "/a%00", "/a%252e", "/a;b", "/a\\b"] {
            assert_eq!(check_path(wrong).unwrap_err().code(), Code::InvalidArgument, "{wrong}");
        }
    }
}
