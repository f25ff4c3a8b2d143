//! The caller's side of `MakeRequest`, and scripted API servers.

use std::{
    collections::BTreeMap,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use agentk::{
    cluster::ClusterAccess,
    module::{
        Modules,
        kubernetes_api::{Guard, KubernetesApi},
    },
};
use bytes::{Bytes, BytesMut};
use grpc::{BoxError, Status};
use http_body::Frame;
use http_body_util::BodyExt as _;
use prost::Message as _;
use proto::gitlab::agent::{
    grpctool::{HttpRequest, HttpResponse, http_request, http_response},
    prototool::{self, Values},
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    sync::mpsc,
    time::timeout,
};
use tokio_util::sync::CancellationToken;

pub(crate) const METHOD: &str = "/gitlab.agent.kubernetes_api.rpc.KubernetesApi/MakeRequest";

/// Timeout for expected events.
pub(crate) const SOON: Duration = Duration::from_secs(20);

/// How long a test waits to check that something does not happen.
pub(crate) const NEVER: Duration = Duration::from_millis(300);

pub(crate) async fn within<F: Future>(future: F) -> F::Output {
    timeout(SOON, future).await.expect("it happens soon")
}

pub(crate) async fn modules(access: &ClusterAccess) -> Modules {
    guarded(access, Guard::default()).await
}

/// As [`modules`], with a policy or an audit log.
pub(crate) async fn guarded(access: &ClusterAccess, guard: Guard) -> Modules {
    Modules::new(vec![Arc::new(module(access).await.guarded(guard))])
}

/// As [`modules`]. `leave` is cancelled when agentk begins to shut down.
pub(crate) async fn leaving(access: &ClusterAccess, leave: &CancellationToken) -> Modules {
    Modules::new(vec![Arc::new(module(access).await.leaving(leave.clone()))])
}

async fn module(access: &ClusterAccess) -> KubernetesApi {
    let api = access.connect().await.expect("the configuration is complete");
    KubernetesApi::new(api, "v1", "abc")
}

pub(crate) fn at(url: impl Into<String>) -> ClusterAccess {
    ClusterAccess { kube_server: Some(url.into()), ..ClusterAccess::default() }
}

/// What a caller does next.
enum Step {
    Bytes(Bytes),
    End,
    Reset,
}

/// The sending half of a call.
pub(crate) struct Caller(mpsc::Sender<Step>);

impl Caller {
    pub(crate) async fn raw(&self, bytes: Bytes) -> bool {
        self.0.send(Step::Bytes(bytes)).await.is_ok()
    }

    async fn message(&self, message: http_request::Message) -> bool {
        self.raw(grpc::encode(&HttpRequest { message: Some(message) })).await
    }

    pub(crate) async fn header(&self, request: prototool::HttpRequest) {
        self.header_with_length(request, None).await;
    }

    pub(crate) async fn header_with_length(
        &self,
        request: prototool::HttpRequest,
        content_length: Option<i64>,
    ) {
        let header = http_request::Header { request: Some(request), content_length, ..Default::default() };
        self.head(header).await;
    }

    /// Sends a header with every field.
    pub(crate) async fn head(&self, header: http_request::Header) {
        self.message(http_request::Message::Header(header)).await;
    }

    /// Whether the receiver still exists.
    pub(crate) async fn data(&self, data: impl Into<Bytes>) -> bool {
        self.message(http_request::Message::Data(http_request::Data { data: data.into() })).await
    }

    /// Sends bytes for the upgraded connection. Whether the receiver still exists.
    pub(crate) async fn upgrade_data(&self, data: impl Into<Bytes>) -> bool {
        let data = http_request::UpgradeData { data: data.into() };
        self.message(http_request::Message::UpgradeData(data)).await
    }

    pub(crate) async fn trailer(&self) {
        self.message(http_request::Message::Trailer(http_request::Trailer {})).await;
    }

    pub(crate) async fn end(&self) {
        let _ = self.0.send(Step::End).await;
    }

    pub(crate) async fn reset(&self) {
        let _ = self.0.send(Step::Reset).await;
    }

    pub(crate) async fn whole(&self, request: prototool::HttpRequest, body: &[u8]) {
        self.whole_of(http_request::Header { request: Some(request), ..Default::default() }, body).await;
    }

    /// As [`Self::whole`], with every field of the header.
    pub(crate) async fn whole_of(&self, header: http_request::Header, body: &[u8]) {
        self.head(header).await;
        for piece in body.chunks(32 * 1024) {
            self.data(piece.to_vec()).await;
        }
        self.trailer().await;
        self.end().await;
    }
}

struct Requests {
    steps: mpsc::Receiver<Step>,
    ended: bool,
}

impl http_body::Body for Requests {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        if self.ended {
            return Poll::Ready(None);
        }
        match ready!(self.steps.poll_recv(cx)) {
            Some(Step::Bytes(bytes)) => Poll::Ready(Some(Ok(Frame::data(bytes)))),
            Some(Step::End) => {
                self.ended = true;
                Poll::Ready(None)
            }
            // Like hyper: a reset looks like an end, except for `is_end_stream`.
            Some(Step::Reset) => Poll::Ready(None),
            // The test has dropped the caller without ending it: nothing more arrives.
            None => Poll::Pending,
        }
    }

    fn is_end_stream(&self) -> bool {
        self.ended
    }
}

/// A stream of bytes, as hyper delivers it.
pub(crate) fn stream() -> (Caller, grpc::Body) {
    let (sender, steps) = mpsc::channel(8);
    (Caller(sender), grpc::boxed(Requests { steps, ended: false }))
}

/// Starts a call; its future does nothing until it is polled.
pub(crate) fn call(modules: &Modules, metadata: &[(&'static str, &str)]) -> (Caller, agentk::module::Answer) {
    let (caller, body) = stream();
    let mut request = http::Request::post(METHOD);
    for (name, value) in metadata {
        request = request.header(*name, *value);
    }
    let request = request.body(body).expect("a request");
    (caller, modules.call(request))
}

pub(crate) fn get(path: &str) -> prototool::HttpRequest {
    request("GET", path, &[])
}

pub(crate) fn request(method: &str, path: &str, headers: &[(&str, &str)]) -> prototool::HttpRequest {
    let (path, query) = path.split_once('?').unwrap_or((path, ""));
    let mut map = BTreeMap::new();
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        map.entry(key.to_owned()).or_insert_with(Values::default).value.push(value.to_owned());
    }
    let header =
        headers.iter().map(|(name, value)| ((*name).to_owned(), Values { value: vec![(*value).to_owned()] }));
    prototool::HttpRequest {
        method: method.to_owned(),
        url_path: path.to_owned(),
        header: header.collect(),
        query: map,
    }
}

/// The receiving half of a call, once its head has arrived.
pub(crate) struct Reply {
    body: grpc::Body,
    buffer: BytesMut,
    pub(crate) status: Option<Status>,
}

impl Reply {
    pub(crate) fn new(response: http::Response<grpc::Body>) -> Self {
        let status = Status::from_headers(response.headers());
        Self { body: response.into_body(), buffer: BytesMut::new(), status }
    }

    /// Returns the next message; `None` once there is a status.
    pub(crate) async fn next(&mut self) -> Option<http_response::Message> {
        loop {
            if self.buffer.len() >= 5 {
                let len = u32::from_be_bytes([self.buffer[1], self.buffer[2], self.buffer[3], self.buffer[4]])
                    as usize;
                if self.buffer.len() >= 5 + len {
                    let message = self.buffer.split_to(5 + len).freeze().slice(5..);
                    return HttpResponse::decode(message).expect("a message").message;
                }
            }
            if self.status.is_some() {
                assert!(self.buffer.is_empty(), "a status within a message");
                return None;
            }
            match self.body.frame().await.expect("a status").expect("a body does not fail").into_data() {
                Ok(data) => self.buffer.extend_from_slice(&data),
                Err(frame) => {
                    let trailers = frame.into_trailers().expect("data or trailers");
                    self.status = Some(Status::from_headers(&trailers).expect("a status"));
                }
            }
        }
    }

    pub(crate) async fn header(&mut self) -> prototool::HttpResponse {
        match within(self.next()).await {
            Some(http_response::Message::Header(header)) => header.response.expect("a response"),
            other => panic!("{other:?} {:?}", self.status),
        }
    }

    pub(crate) async fn data(&mut self) -> Bytes {
        match within(self.next()).await {
            Some(http_response::Message::Data(data)) => data.data,
            other => panic!("{other:?} {:?}", self.status),
        }
    }

    /// Returns the next bytes of the upgraded connection.
    pub(crate) async fn upgrade_data(&mut self) -> Bytes {
        match within(self.next()).await {
            Some(http_response::Message::UpgradeData(data)) => data.data,
            other => panic!("{other:?} {:?}", self.status),
        }
    }

    /// Returns the status with which the request ends; nothing may precede it.
    pub(crate) async fn end(&mut self) -> Status {
        let next = within(self.next()).await;
        assert!(next.is_none(), "{next:?}");
        self.status.clone().expect("a status")
    }

    /// Returns the rest: every byte, whether there was a trailer, and the status.
    pub(crate) async fn rest(&mut self) -> (Vec<u8>, bool, Status) {
        let (mut bytes, mut trailer) = (Vec::new(), false);
        while let Some(message) = within(self.next()).await {
            assert!(!trailer, "nothing follows a trailer");
            match message {
                http_response::Message::Header(_) => panic!("a second header"),
                http_response::Message::Data(data) => {
                    assert!((1..=32 * 1024).contains(&data.data.len()));
                    bytes.extend_from_slice(&data.data);
                }
                http_response::Message::Trailer(_) => trailer = true,
                http_response::Message::UpgradeData(_) => panic!("nothing was upgraded"),
            }
        }
        (bytes, trailer, self.status.clone().expect("a status"))
    }
}

/// Sends a complete request and returns the complete response, or the status instead.
pub(crate) async fn fetch(
    modules: &Modules,
    request: prototool::HttpRequest,
    body: &[u8],
) -> Result<(prototool::HttpResponse, Vec<u8>), Status> {
    fetch_of(modules, http_request::Header { request: Some(request), ..Default::default() }, body).await
}

/// As [`fetch`], with every field of the header.
pub(crate) async fn fetch_of(
    modules: &Modules,
    header: http_request::Header,
    body: &[u8],
) -> Result<(prototool::HttpResponse, Vec<u8>), Status> {
    let (caller, answer) = call(modules, &[("x-gitlab-correlation-id", "0123abc")]);
    let answer = async {
        let mut reply = Reply::new(answer.await);
        if let Some(status) = reply.status.take() {
            return Err(status);
        }
        let header = reply.header().await;
        let (bytes, trailer, status) = reply.rest().await;
        if status.code() != grpc::Code::Ok {
            assert!(!trailer, "a trailer marks a complete body");
            return Err(status);
        }
        assert!(trailer, "OK without a trailer");
        Ok((header, bytes))
    };
    let (result, ()) = within(futures_util::future::join(answer, caller.whole_of(header, body))).await;
    result
}

/// One connection of a scripted API server.
pub(crate) struct Peer {
    pub(crate) stream: TcpStream,
    buffer: Vec<u8>,
}

impl Peer {
    pub(crate) async fn accept(listener: &TcpListener) -> Self {
        let (stream, _) = within(listener.accept()).await.expect("a connection");
        stream.set_nodelay(true).expect("a socket");
        Self { stream, buffer: Vec::new() }
    }

    /// Reads a request's head.
    pub(crate) async fn head(&mut self) -> String {
        within(async {
            loop {
                if let Some(end) = self.buffer.windows(4).position(|four| four == b"\r\n\r\n") {
                    let head: Vec<u8> = self.buffer.drain(..end + 4).collect();
                    return String::from_utf8(head).expect("text");
                }
                assert!(self.more().await > 0, "the connection ended in a head");
            }
        })
        .await
    }

    /// Reads some bytes after the head; nothing if the connection has ended.
    async fn more(&mut self) -> usize {
        self.stream.read_buf(&mut self.buffer).await.unwrap_or(0)
    }

    /// Reads until these bytes have arrived.
    pub(crate) async fn until(&mut self, text: &str) -> String {
        within(async {
            loop {
                if self.buffer.windows(text.len()).any(|part| part == text.as_bytes()) {
                    return String::from_utf8_lossy(&std::mem::take(&mut self.buffer)).into_owned();
                }
                assert!(self.more().await > 0, "the connection ended before {text:?}");
            }
        })
        .await
    }

    /// Reads to the connection's end.
    pub(crate) async fn end(&mut self) -> String {
        within(async {
            while self.more().await > 0 {}
            String::from_utf8_lossy(&std::mem::take(&mut self.buffer)).into_owned()
        })
        .await
    }

    pub(crate) async fn write(&mut self, text: &str) {
        self.stream.write_all(text.as_bytes()).await.expect("the connection is open");
    }
}

pub(crate) async fn listen() -> (TcpListener, String) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let url = format!("http://{}", listener.local_addr().expect("an address"));
    (listener, url)
}
