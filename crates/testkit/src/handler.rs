//! The service of test agents: `testkit.v1.Testkit`, with one method for each way in which a request can
//! proceed.
//!
//! | method | answer |
//! | --- | --- |
//! | `Echo` | the message, when all of the request has come; header and trailer say `echo: yes` |
//! | `Count` | as many messages as the request's digits say: their numbers |
//! | `Collect` | one message: all messages of the request, joined by commas |
//! | `Chat` | each message as soon as it comes |
//! | `FailFirst` | a status with details, before anything else |
//! | `FailLater` | two messages, then that status |
//! | `Hang` | nothing, ever |
//! | `HangLater` | one message, then nothing, ever |

use std::sync::Arc;

use bytes::Bytes;
use parking_lot::{Mutex, MutexGuard};
use prost::Message as _;
use proto::{
    gitlab::agent::{
        prototool::Values,
        reverse_tunnel::{
            info::{AgentDescriptor, Method, Service},
            rpc::{self, ConnectRequest, RequestInfo, connect_request, connect_response},
        },
    },
    google::rpc::{ErrorInfo, Status},
};

/// The service's name.
pub const SERVICE: &str = "testkit.v1.Testkit";
/// Its methods.
pub const METHODS: [&str; 8] =
    ["Echo", "Count", "Collect", "Chat", "FailFirst", "FailLater", "Hang", "HangLater"];

/// Returns the full path of a method.
pub fn path(method: &str) -> String {
    format!("/{SERVICE}/{method}")
}

/// Returns the descriptor of an agent that serves it.
pub fn descriptor() -> AgentDescriptor {
    let methods = METHODS.iter().map(|name| Method { name: (*name).to_owned() }).collect();
    AgentDescriptor { services: vec![Service { name: SERVICE.to_owned(), methods }] }
}

/// The status with which methods fail: NOT_FOUND with two details, one of which only kas may send.
pub fn failure() -> Status {
    let info = |domain: &str, value: &str| prost_types::Any {
        type_url: "type.googleapis.com/google.rpc.ErrorInfo".to_owned(),
        value: ErrorInfo {
            reason: "TEST".to_owned(),
            domain: domain.to_owned(),
            metadata: [("kas.outcome".to_owned(), value.to_owned())].into(),
        }
        .encode_to_vec(),
    };
    Status {
        code: 5,
        message: "nothing here: 100 % ünknown\n".to_owned(),
        details: vec![info("testkit", "mine"), info("kas", "not_started")],
    }
}

/// Returns a map of metadata; keys may repeat.
pub fn meta(pairs: &[(&str, &str)]) -> std::collections::BTreeMap<String, Values> {
    let mut map = std::collections::BTreeMap::<String, Values>::new();
    for (key, value) in pairs {
        map.entry((*key).to_owned()).or_default().value.push((*value).to_owned());
    }
    map
}

/// Returns a message of an agent.
pub fn to_kas(msg: connect_request::Msg) -> ConnectRequest {
    ConnectRequest { msg: Some(msg) }
}

/// A `header`.
pub fn header(pairs: &[(&str, &str)]) -> connect_request::Msg {
    connect_request::Msg::Header(rpc::Header { meta: meta(pairs) })
}

/// A `message`.
pub fn message(data: impl Into<Bytes>) -> connect_request::Msg {
    connect_request::Msg::Message(rpc::Message { data: data.into() })
}

/// A `trailer`.
pub fn trailer(pairs: &[(&str, &str)]) -> connect_request::Msg {
    connect_request::Msg::Trailer(rpc::Trailer { meta: meta(pairs) })
}

/// An `error`.
pub fn error(status: Status) -> connect_request::Msg {
    connect_request::Msg::Error(rpc::Error { status: Some(status) })
}

/// An `error` without details.
pub fn error_of(code: i32, message: &str) -> connect_request::Msg {
    error(Status { code, message: message.to_owned(), details: Vec::new() })
}

/// The requests that an agent received, in order.
#[derive(Clone, Debug, Default)]
pub struct Requests(Arc<Mutex<Vec<RequestInfo>>>);

impl Requests {
    fn all(&self) -> MutexGuard<'_, Vec<RequestInfo>> {
        self.0.lock()
    }

    /// Adds one.
    pub fn push(&self, info: RequestInfo) {
        self.all().push(info);
    }

    /// Returns them.
    pub fn list(&self) -> Vec<RequestInfo> {
        self.all().clone()
    }
}

/// A tunnel as a handler uses it.
pub trait Wire: Send {
    /// Waits for the next message of kas; `None`: the stream has ended.
    fn recv(&mut self) -> impl Future<Output = Option<connect_response::Msg>> + Send;
    /// Sends one; returns whether that was possible.
    fn send(&mut self, msg: connect_request::Msg) -> impl Future<Output = bool> + Send;
}

/// The messages of the request, until `close_send`.
struct Request<'a, W> {
    wire: &'a mut W,
    closed: bool,
}

impl<W: Wire> Request<'_, W> {
    /// Waits for the next message; `None`: `close_send`, or the stream has ended.
    async fn next(&mut self) -> Option<Bytes> {
        if self.closed {
            return None;
        }
        match self.wire.recv().await {
            Some(connect_response::Msg::Message(message)) => Some(message.data),
            Some(connect_response::Msg::CloseSend(_)) => {
                self.closed = true;
                None
            }
            _ => None,
        }
    }
}

/// Serves one request like agentk. Returns whether the tunnel may be reused.
pub async fn serve(wire: &mut impl Wire, info: &RequestInfo, reusable: bool) -> bool {
    let method = info.method_name.rsplit('/').next().unwrap_or_default().to_owned();
    let mut request = Request { wire, closed: false };
    let mut status = None;
    let mut headed = true;
    match method.as_str() {
        "Echo" => {
            let mut all = Vec::new();
            while let Some(message) = request.next().await {
                all.push(message);
            }
            request.wire.send(header(&[("echo", "yes")])).await;
            for data in all {
                request.wire.send(message(data)).await;
            }
        }
        "Count" => {
            let first = request.next().await.unwrap_or_default();
            let count: u64 = std::str::from_utf8(&first).ok().and_then(|text| text.parse().ok()).unwrap_or(0);
            request.wire.send(header(&[])).await;
            for n in 0..count {
                if !request.wire.send(message(n.to_string())).await {
                    return false;
                }
            }
        }
        "Collect" => {
            let mut all = Vec::new();
            while let Some(message) = request.next().await {
                all.push(message.to_vec());
            }
            request.wire.send(header(&[])).await;
            request.wire.send(message(all.join(&b","[..]))).await;
        }
        "Chat" => {
            request.wire.send(header(&[])).await;
            while let Some(data) = request.next().await {
                request.wire.send(message(data)).await;
            }
        }
        "FailFirst" => {
            headed = false;
            status = Some(failure());
        }
        "FailLater" => {
            request.wire.send(header(&[])).await;
            request.wire.send(message("one")).await;
            request.wire.send(message("two")).await;
            status = Some(failure());
        }
        "Hang" | "HangLater" => {
            if method == "HangLater" {
                request.wire.send(header(&[])).await;
                request.wire.send(message("first")).await;
            }
            while request.next().await.is_some() {}
            if request.closed {
                // Only the end of the stream can follow.
                while request.wire.recv().await.is_some() {}
            }
            return false;
        }
        _ => {
            headed = false;
            let message = format!("unknown method {method}");
            status = Some(Status { code: 12, message, details: Vec::new() });
        }
    }
    let trailers: &[(&str, &str)] = if method == "Echo" { &[("echo", "yes")] } else { &[] };
    if reusable {
        if let Some(status) = status {
            request.wire.send(error(status)).await;
        }
        request.wire.send(trailer(trailers)).await;
        // The rest of the request is not needed.
        while !request.closed && request.next().await.is_some() {}
        return request.closed;
    }
    if !headed {
        request.wire.send(header(&[])).await;
    }
    request.wire.send(trailer(trailers)).await;
    if let Some(status) = status {
        request.wire.send(error(status)).await;
    }
    false
}
