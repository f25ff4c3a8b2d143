//! Requests from and to a replica of GitLab's kas.

use super::*;

/// A request at a replica of GitLab's kas, which is played by the script.
struct AtGateway {
    tunnel: Arc<Tunnel>,
    /// What that replica writes.
    lent: Pipe,
    /// What goes to it.
    out: TunnelBody,
    reset: Arc<AtomicBool>,
}

impl AtGateway {
    async fn ready() -> Self {
        let lent = Pipe::default();
        lent.write(gitlab::READY);
        let mut opening = Opening::new(lent.body(), false);
        assert!(matches!(gitlab::ready(&mut opening).await, Said::Ready));
        let reset = Arc::<AtomicBool>::default();
        let flag = Arc::clone(&reset);
        let cancel = Box::new(move || flag.store(true, Ordering::SeqCst));
        let (tunnel, out) = Tunnel::of_gitlab(info(AgentKind::Old), opening, Arc::<Log>::default(), cancel);
        Self { tunnel, lent, out, reset }
    }

    fn begin(&self, caller: &Pipe) -> Exchange {
        let job = Job::new(gitlab::START, caller.body());
        self.tunnel.begin(job, Deadline::NONE).expect("it is new")
    }

    /// Returns what was written since, and whether that was all.
    async fn wrote(&mut self) -> (Bytes, bool) {
        let mut out = BytesMut::new();
        loop {
            match std::future::poll_fn(|cx| Poll::Ready(Pin::new(&mut self.out).poll_frame(cx))).await {
                Poll::Ready(Some(frame)) => out.put_slice(&frame.unwrap().into_data().unwrap()),
                Poll::Ready(None) => return (out.freeze(), true),
                Poll::Pending => return (out.freeze(), false),
            }
        }
    }
}

fn of_gateway(message: Msg) -> Vec<u8> {
    grpc::encode(&GatewayKasResponse { msg: Some(message) }).to_vec()
}

#[tokio::test]
async fn a_gateway_of_gitlab_gets_messages_as_they_are_and_its_answer_passes() {
    assert_eq!(gitlab::START, grpc::encode(&StartStreaming {}));
    assert_eq!(gitlab::READY, of_gateway(Msg::TunnelReady(response_of_gateway::TunnelReady {})));
    assert_eq!(hex(&gitlab::READY[grpc::PREFIX_LEN..]), "0a00");
    let mut at = AtGateway::ready().await;
    assert_eq!(at.wrote().await, (Bytes::new(), false), "nothing is written before the request");
    let caller = Pipe::default();
    caller.write([message(b"ping"), message(b""), message(b"pong")].concat());
    let mut exchange = at.begin(&caller);
    let expected = [vec![0; 5], message(b"ping"), message(b""), message(b"pong")].concat();
    assert_eq!(at.wrote().await, (expected.into(), false));
    let header = response_of_gateway::Header { meta: [("k".to_owned(), values("v"))].into() };
    at.lent.write(of_gateway(Msg::Header(header)));
    let Head::Headers(headers) = exchange.head().await.unwrap() else { panic!("there are headers") };
    assert_eq!(headers["k"], "v");
    at.lent.write(of_gateway(Msg::Message(response_of_gateway::Message { data: "data".into() })));
    assert_eq!(answered(&mut exchange).await, (message(b"data").into(), None));
    caller.end();
    assert_eq!(at.wrote().await, (Bytes::new(), true), "the end of the stream is the request's");
    let status = Status::new(Code::NotFound, "no such thing").to_proto();
    at.lent.write(of_gateway(Msg::Trailer(response_of_gateway::Trailer::default())));
    at.lent.write(of_gateway(Msg::Error(response_of_gateway::Error { status: Some(status) })));
    at.lent.end();
    let ended = answered(&mut exchange).await.1.unwrap();
    assert_eq!((ended.code(), ended.message(), ended.outcome()), (Code::NotFound, "no such thing", None));
    drop(exchange);
    assert!(!at.reset.load(Ordering::SeqCst));
}

#[tokio::test]
async fn a_gateway_that_waits_for_the_requests_end_gets_it_once_the_trailer_is_there() {
    let mut at = AtGateway::ready().await;
    let caller = Pipe::default();
    // A message that has begun is finished first.
    caller.write(message(b"ping")[..7].to_vec());
    let mut exchange = at.begin(&caller);
    at.wrote().await;
    at.lent.write(of_gateway(Msg::Header(response_of_gateway::Header::default())));
    at.lent.write(of_gateway(Msg::Trailer(response_of_gateway::Trailer::default())));
    exchange.head().await.unwrap();
    assert_eq!(answered(&mut exchange).await.1, None, "an error may follow");
    assert_eq!(at.wrote().await, (Bytes::new(), false));
    caller.write([&message(b"ping")[7..], &message(b"more")].concat());
    assert_eq!(at.wrote().await, ("ng".into(), true));
    at.lent.end();
    assert_eq!(answered(&mut exchange).await.1.unwrap().code(), Code::Ok);
    assert!(!at.reset.load(Ordering::SeqCst));
}

#[tokio::test]
async fn what_a_gateway_ends_with_after_the_start_has_an_unknown_outcome() {
    type End = fn(&Pipe);
    let status = |code: Code| Status::new(code, "from 14.1");
    let cases: [(End, Code); 5] = [
        (|lent| lent.end(), Code::Unavailable),
        (|lent| lent.reset(), Code::Unavailable),
        (|lent| lent.fail("broken"), Code::Unavailable),
        (|lent| lent.write(control(request::TRAILER, b"")), Code::Unavailable),
        (
            |lent| {
                let status = Status::new(Code::ResourceExhausted, "from 14.1");
                lent.fail(status);
            },
            Code::ResourceExhausted,
        ),
    ];
    for (n, (end, code)) in cases.into_iter().enumerate() {
        let mut at = AtGateway::ready().await;
        let (caller, _) = complete_request(b"ping");
        let mut exchange = at.begin(&caller);
        assert!(at.wrote().await.1);
        end(&at.lent);
        let failure = exchange.head().await.unwrap_err();
        let got = exchange.late_status(&failure);
        assert_eq!((got.code(), got.outcome()), (code, Some(Outcome::Unknown)), "{n}");
    }
    // Before anything is written the request is as it was.
    let at = AtGateway::ready().await;
    let mut exchange = at.begin(&Pipe::default());
    at.lent.fail(status(Code::Unavailable));
    assert!(matches!(exchange.head().await, Err(Failure::NotStarted(_))));
}

#[tokio::test]
async fn what_a_gateway_says_first_is_told_apart() {
    type Write = fn(&Pipe);
    let cases: [(Write, &str); 5] = [
        (|lent| lent.end(), "None"),
        (|lent| lent.fail(Status::new(Code::Internal, "no")), "Refused"),
        (|lent| lent.write(control(request::HEADER, b"")), "Broken"),
        (|lent| lent.write(message(b"\xff")), "Broken"),
        (|lent| lent.reset(), "Broken"),
    ];
    for (write, expected) in cases {
        let lent = Pipe::default();
        write(&lent);
        let said = format!("{:?}", gitlab::ready(&mut Opening::new(lent.body(), false)).await);
        assert!(said.starts_with(expected), "{said}");
    }
}

/// Polls an answer for a replica of GitLab's once: its messages, and its status when it has ended.
async fn told_to_gitlab(answer: &mut gitlab::Answer) -> (Vec<Msg>, Option<Status>) {
    let (mut bytes, mut status) = (BytesMut::new(), None);
    let mut polled =
        async || std::future::poll_fn(|cx| Poll::Ready(Pin::new(&mut *answer).poll_frame(cx))).await;
    while let Poll::Ready(Some(frame)) = polled().await {
        match frame.unwrap().into_data() {
            Ok(data) => bytes.put_slice(&data),
            Err(frame) => status = Status::from_headers(&frame.into_trailers().unwrap()),
        }
    }
    let mut messages = Vec::new();
    while !bytes.is_empty() {
        let len = u32::from_be_bytes([bytes[1], bytes[2], bytes[3], bytes[4]]) as usize;
        let message = bytes.split_to(grpc::PREFIX_LEN + len).split_off(grpc::PREFIX_LEN);
        messages.push(GatewayKasResponse::decode(message).unwrap().msg.unwrap());
    }
    (messages, status)
}

#[tokio::test]
async fn answers_of_every_agentk_reach_a_replica_of_gitlab_in_its_order() {
    use response_of_gateway::{Header, Message, Trailer};
    for kind in [AgentKind::Ours, AgentKind::Old, AgentKind::Recent] {
        let mut kas = kas(kind);
        let (caller, _) = complete_request(b"ping");
        let mut exchange = kas.begin(&caller);
        kas.wrote().await.unwrap();
        let meta = rpc::Header { meta: [("k".to_owned(), values("v"))].into() };
        kas.agent.write(control(request::HEADER, &meta.encode_to_vec()));
        let head = exchange.head().await.unwrap();
        let mut answer = gitlab::Answer::new(exchange, head);
        let large = vec![7; 100_000];
        kas.agent.write([payload(request::MESSAGE, b"pong"), payload(request::MESSAGE, &large)].concat());
        let expected = [
            Msg::Header(Header { meta: [("k".to_owned(), values("v"))].into() }),
            Msg::Message(Message { data: "pong".into() }),
            Msg::Message(Message { data: large.into() }),
        ];
        assert_eq!(told_to_gitlab(&mut answer).await, (expected.into(), None), "{kind:?}");
        let (first, second) = match kind {
            AgentKind::Ours => (error(Code::NotFound, "no such thing"), control(request::TRAILER, b"")),
            AgentKind::Old | AgentKind::Recent => {
                (control(request::TRAILER, b""), error(Code::NotFound, "no such thing"))
            }
        };
        kas.agent.write([first, second].concat());
        let (messages, status) = told_to_gitlab(&mut answer).await;
        assert_eq!(status.unwrap().code(), Code::Ok, "the error travels in the stream");
        assert_eq!(messages[0], Msg::Trailer(Trailer::default()));
        let Msg::Error(error) = &messages[1] else { panic!("{messages:?}") };
        let error = error.status.as_ref().unwrap();
        assert_eq!((error.code, error.message.as_str(), messages.len()), (5, "no such thing", 2));
    }
}

#[tokio::test]
async fn an_error_alone_and_a_lost_tunnel_reach_a_replica_of_gitlab() {
    let mut kas = kas(AgentKind::Old);
    let (caller, _) = complete_request(b"");
    let mut exchange = kas.begin(&caller);
    kas.wrote().await.unwrap();
    kas.agent.write(error(Code::Unimplemented, "unknown method"));
    let head = exchange.head().await.unwrap();
    let (messages, status) = told_to_gitlab(&mut gitlab::Answer::new(exchange, head)).await;
    // Its automaton has no way from tunnel_ready to an error.
    assert!(matches!(messages[..], [Msg::Header(_), Msg::Trailer(_), Msg::Error(_)]), "{messages:?}");
    assert_eq!(status.unwrap().code(), Code::Ok);

    let mut kas = crate::kas(AgentKind::Ours);
    let (caller, _) = complete_request(b"");
    let mut exchange = kas.begin(&caller);
    kas.wrote().await.unwrap();
    kas.agent.write([control(request::HEADER, b""), payload(request::MESSAGE, b"x")].concat());
    kas.agent.reset();
    let head = exchange.head().await.unwrap();
    let (messages, status) = told_to_gitlab(&mut gitlab::Answer::new(exchange, head)).await;
    assert_eq!(messages.len(), 2);
    assert_eq!(status.unwrap().code(), Code::Unavailable);
}

fn values(value: &str) -> proto::gitlab::agent::prototool::Values {
    proto::gitlab::agent::prototool::Values { value: vec![value.to_owned()] }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}
