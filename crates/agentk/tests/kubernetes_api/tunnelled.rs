//! Through agentk's end of a tunnel, where the request stream is read alternately by the connection to the
//! API server and by the tunnel, on different threads.

use std::sync::Arc;

use bytes::{Buf as _, Bytes, BytesMut};
use grpc::Status;
use http_body_util::BodyExt as _;
use prost::Message as _;
use proto::gitlab::agent::{
    grpctool::{HttpRequest, HttpResponse, http_request, http_response},
    prototool,
    reverse_tunnel::rpc::{
        CloseSend, ConnectRequest, ConnectResponse, Message, RequestInfo, connect_request::Msg,
        connect_response,
    },
};
use tokio::{sync::mpsc, task::JoinHandle, time::timeout};
use tunnel::agent_end::{Control, Observer, Progress, open};

use crate::support::{Caller, METHOD, NEVER, Peer, at, get, listen, modules, request, stream, within};

struct Unobserved;

impl Observer for Unobserved {
    fn progress(&self, _: Progress) {}
}

/// kas' side of a tunnel.
struct Kas {
    to_agent: Caller,
    from_agent: mpsc::Receiver<Msg>,
    pull: JoinHandle<()>,
    _control: Control,
}

impl Kas {
    async fn accept(url: &str) -> Self {
        let modules = modules(&at(url)).await;
        let (mut body, control) = open(&modules.descriptor(), Arc::new(modules), Box::new(Unobserved));
        let (to_agent, responses) = stream();
        control.accepted(responses, true, false);
        let (sender, from_agent) = mpsc::channel(64);
        let pull = tokio::spawn(async move {
            let mut buffer = BytesMut::new();
            while let Some(Ok(frame)) = body.frame().await {
                buffer.extend_from_slice(&frame.into_data().expect("data"));
                while buffer.len() >= 5 {
                    let len = u32::from_be_bytes([buffer[1], buffer[2], buffer[3], buffer[4]]) as usize;
                    if buffer.len() < 5 + len {
                        break;
                    }
                    let message = buffer.split_to(5 + len).freeze().slice(5..);
                    let message = ConnectRequest::decode(message).expect("a message").msg.expect("a field");
                    if sender.send(message).await.is_err() {
                        return;
                    }
                }
            }
        });
        let mut kas = Self { to_agent, from_agent, pull, _control: control };
        assert!(matches!(kas.next().await, Msg::Descriptor(_)));
        kas
    }

    async fn next(&mut self) -> Msg {
        within(self.from_agent.recv()).await.expect("the tunnel is open")
    }

    async fn send(&self, message: connect_response::Msg) {
        assert!(self.to_agent.raw(grpc::encode(&ConnectResponse { msg: Some(message) })).await);
    }

    async fn begin(&self, request: prototool::HttpRequest) {
        let info = RequestInfo { method_name: METHOD.to_owned(), ..RequestInfo::default() };
        self.send(connect_response::Msg::RequestInfo(info)).await;
        let header = http_request::Header { request: Some(request), ..Default::default() };
        self.pass(http_request::Message::Header(header)).await;
    }

    async fn pass(&self, message: http_request::Message) {
        let data = HttpRequest { message: Some(message) }.encode_to_vec().into();
        self.send(connect_response::Msg::Message(Message { data })).await;
    }

    async fn data(&self, data: impl Into<Bytes>) {
        self.pass(http_request::Message::Data(http_request::Data { data: data.into() })).await;
    }

    async fn trailer(&self) {
        self.pass(http_request::Message::Trailer(http_request::Trailer {})).await;
    }

    async fn close(&self) {
        self.send(connect_response::Msg::CloseSend(CloseSend {})).await;
    }

    async fn answer(&mut self) -> http_response::Message {
        match self.next().await {
            Msg::Message(message) => {
                HttpResponse::decode(message.data).expect("a message").message.expect("a field")
            }
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tunnel_carries_uploads_and_responses_and_is_reused() {
    let (listener, url) = listen().await;
    let mut kas = Kas::accept(&url).await;
    let mut peer: Option<Peer> = None;
    for round in 0..50 {
        kas.begin(request("POST", "/", &[])).await;
        if peer.is_none() {
            peer = Some(Peer::accept(&listener).await);
        }
        let peer = peer.as_mut().expect("it is there");
        peer.head().await;
        for piece in ["one", "two", "three"] {
            kas.data(piece).await;
            peer.until(piece).await;
        }
        kas.trailer().await;
        peer.until("0\r\n\r\n").await;
        // kas may close before or after the response.
        if round % 2 == 0 {
            kas.close().await;
        }
        peer.write("HTTP/1.1 201 Created\r\ncontent-length: 4\r\n\r\ndone").await;
        assert!(matches!(kas.next().await, Msg::Header(_)));
        assert!(matches!(kas.answer().await, http_response::Message::Header(_)));
        let mut body = Vec::new();
        while let http_response::Message::Data(data) = kas.answer().await {
            body.extend_from_slice(data.data.chunk());
        }
        assert_eq!(body, b"done");
        assert!(matches!(kas.next().await, Msg::Trailer(_)));
        if round % 2 == 1 {
            kas.close().await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reset_tunnel_ends_the_request_in_every_phase() {
    for phase in ["before the body", "in the body", "after the trailer", "after close", "in the answer"] {
        let (listener, url) = listen().await;
        let mut kas = Kas::accept(&url).await;
        kas.begin(request("PUT", "/", &[])).await;
        let mut peer = Peer::accept(&listener).await;
        peer.head().await;
        if phase != "before the body" {
            kas.data("some").await;
            peer.until("some").await;
        }
        if !phase.ends_with("body") {
            kas.trailer().await;
            peer.until("0\r\n\r\n").await;
        }
        if phase == "after close" || phase == "in the answer" {
            kas.close().await;
        }
        if phase == "in the answer" {
            peer.write("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n").await;
            assert!(matches!(kas.next().await, Msg::Header(_)));
            assert!(matches!(kas.answer().await, http_response::Message::Header(_)));
        }
        kas.to_agent.reset().await;
        let rest = peer.end().await;
        assert!(!rest.contains("0\r\n\r\n"), "{phase}");
    }

    // The whole stream ends, as when the connection to kas is lost.
    let (listener, url) = listen().await;
    let kas = Kas::accept(&url).await;
    kas.begin(get("/")).await;
    kas.trailer().await;
    kas.close().await;
    let mut peer = Peer::accept(&listener).await;
    peer.head().await;
    kas.pull.abort();
    assert_eq!(peer.end().await, "");
}

#[tokio::test]
async fn a_refused_request_leaves_the_tunnel_usable() {
    let (listener, url) = listen().await;
    let mut kas = Kas::accept(&url).await;
    kas.begin(get("/../x")).await;
    let Msg::Error(error) = kas.next().await else { panic!("no error") };
    let status = Status::from_agent(error.status.expect("a status"));
    assert_eq!(status.code(), grpc::Code::InvalidArgument);
    assert!(matches!(kas.next().await, Msg::Trailer(_)));
    kas.trailer().await;
    kas.close().await;
    assert!(timeout(NEVER, listener.accept()).await.is_err(), "it was not sent");

    kas.begin(get("/x")).await;
    kas.trailer().await;
    kas.close().await;
    let mut peer = Peer::accept(&listener).await;
    peer.head().await;
    peer.write("HTTP/1.1 204 No Content\r\n\r\n").await;
    assert!(matches!(kas.next().await, Msg::Header(_)));
    assert!(matches!(kas.answer().await, http_response::Message::Header(_)));
}
