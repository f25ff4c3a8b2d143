//! Both ends of a tunnel against scripts: every interleaving that the wire's rules name, decided by
//! the order of the script and not by time. Bodies are in-memory pipes: what HTTP/2 adds is tested
//! with real processes.

#![allow(clippy::unwrap_used)] // a test may panic

use std::{
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    task::Poll,
    time::Duration,
};

use bytes::{BufMut as _, Bytes, BytesMut};
use grpc::{BoxError, Code, Deadline, Outcome, Status, testing::Pipe};
use http::HeaderMap;
use http_body::{Body, Frame};
use http_body_util::BodyExt as _;
use ids::{AgentId, TokenHash};
use prost::Message as _;
use proto::gitlab::agent::{
    kas::{
        GatewayKasResponse, StartStreaming,
        gateway_kas_response::{self as response_of_gateway, Msg},
    },
    reverse_tunnel::{
        info::{AgentDescriptor, Method, Service},
        rpc,
    },
};
use tunnel::{
    agent_end::{self, Answer, Handler, Observer, Progress},
    frame::{self, request, response},
    kas_end::{
        AgentKind, Descriptor, Exchange, Failure, Head, Info, Job, Opening, Retire, Splice, Tunnel,
        TunnelBody, TunnelPool,
        gitlab::{self, Said},
    },
};

/// Keeps what the tunnel told its pool.
#[derive(Default)]
struct Log {
    parked: AtomicUsize,
    ended: AtomicUsize,
    abandoned: AtomicUsize,
    violations: Mutex<Vec<String>>,
}

impl TunnelPool for Log {
    fn parked(&self, _: &Arc<Tunnel>) {
        self.parked.fetch_add(1, Ordering::SeqCst);
    }
    fn ended(&self, _: &Arc<Tunnel>, _: bool) {
        self.ended.fetch_add(1, Ordering::SeqCst);
    }
    fn abandoned(&self, _: &Arc<Tunnel>) {
        self.abandoned.fetch_add(1, Ordering::SeqCst);
    }
    fn violated(&self, _: &Arc<Tunnel>, what: &str) {
        self.violations.lock().unwrap().push(what.to_owned());
    }
}

/// kas' end, with agentk played by the script.
struct Kas {
    tunnel: Arc<Tunnel>,
    /// What agentk writes.
    agent: Pipe,
    /// What kas writes, read by the script.
    out: TunnelBody,
    log: Arc<Log>,
    reset: Arc<AtomicBool>,
}

fn info(kind: AgentKind) -> Info {
    Info {
        agent: AgentId::new(3).unwrap(),
        instance: 1,
        token: TokenHash::of(b"token"),
        kind,
        features: tunnel::features::Features::NONE,
        version: None,
        descriptor: Arc::new(Descriptor::of(&["/s/M"])),
    }
}

fn kas(kind: AgentKind) -> Kas {
    let agent = Pipe::default();
    let log = Arc::<Log>::default();
    let reset = Arc::<AtomicBool>::default();
    let flag = Arc::clone(&reset);
    let (tunnel, out) = Tunnel::new(
        info(kind),
        Opening::new(agent.body(), false),
        Arc::clone(&log) as Arc<dyn TunnelPool>,
        Box::new(move || flag.store(true, Ordering::SeqCst)),
    );
    Kas { tunnel, agent, out, log, reset }
}

fn job(body: &Pipe) -> Job {
    let mut request_info = BytesMut::new();
    frame::put_control(response::REQUEST_INFO, b"", &mut request_info);
    Job::new(request_info.freeze(), body.body())
}

fn message(payload: &[u8]) -> Vec<u8> {
    let mut out = grpc::prefix(payload.len() as u32).to_vec();
    out.extend_from_slice(payload);
    out
}

fn control(field: u32, body: &[u8]) -> Bytes {
    let mut out = BytesMut::new();
    frame::put_control(field, body, &mut out);
    out.freeze()
}

fn payload(field: u32, data: &[u8]) -> Bytes {
    let mut out = BytesMut::new();
    frame::put_message_head(field, data.len() as u32, &mut out);
    out.put_slice(data);
    out.freeze()
}

fn error(code: Code, text: &str) -> Bytes {
    let status = Status::new(code, text).to_proto();
    control(request::ERROR, &rpc::Error { status: Some(status) }.encode_to_vec())
}

impl Kas {
    /// Polls kas' direction once and returns what it wrote; `Err`: the status it ended with.
    async fn wrote(&mut self) -> Result<Bytes, Status> {
        let mut out = BytesMut::new();
        loop {
            let polled = std::future::poll_fn(|cx| Poll::Ready(Pin::new(&mut self.out).poll_frame(cx))).await;
            match polled {
                Poll::Ready(Some(frame)) => match frame.unwrap().into_data() {
                    Ok(data) => out.put_slice(&data),
                    Err(frame) => {
                        assert!(out.is_empty(), "bytes before the end: {out:?}");
                        return Err(Status::from_headers(&frame.into_trailers().unwrap()).unwrap());
                    }
                },
                Poll::Ready(None) => panic!("polled after the end"),
                Poll::Pending => return Ok(out.freeze()),
            }
        }
    }

    fn begin(&self, caller: &Pipe) -> Exchange {
        self.tunnel.begin(job(caller), Deadline::NONE).expect("the tunnel is free")
    }

    fn was_reset(&self) -> bool {
        self.reset.load(Ordering::SeqCst)
    }

    fn parked(&self) -> usize {
        self.log.parked.load(Ordering::SeqCst)
    }
}

/// Polls an answer's body once: its bytes, and its status when it has ended.
async fn answered(exchange: &mut Exchange) -> (Bytes, Option<Status>) {
    let mut out = BytesMut::new();
    loop {
        match std::future::poll_fn(|cx| Poll::Ready(Pin::new(&mut *exchange).poll_frame(cx))).await {
            Poll::Ready(Some(frame)) => match frame.unwrap().into_data() {
                Ok(data) => out.put_slice(&data),
                Err(frame) => {
                    let status = Status::from_headers(&frame.into_trailers().unwrap()).unwrap();
                    return (out.freeze(), Some(status));
                }
            },
            Poll::Ready(None) => panic!("polled after the end"),
            Poll::Pending => return (out.freeze(), None),
        }
    }
}

/// A caller that has sent everything: its whole request as kas writes it to agentk.
fn complete_request(data: &[u8]) -> (Pipe, Bytes) {
    let caller = Pipe::default();
    caller.write(message(data));
    caller.end();
    let expected = [
        control(response::REQUEST_INFO, b""),
        payload(response::MESSAGE, data),
        control(response::CLOSE_SEND, b""),
    ];
    (caller, expected.concat().into())
}

#[tokio::test]
async fn reusable_tunnel_carries_requests_one_after_the_other() {
    let mut kas = kas(AgentKind::Ours);
    for round in 1..=3 {
        let (caller, expected) = complete_request(b"ping");
        let mut exchange = kas.begin(&caller);
        assert_eq!(kas.wrote().await.unwrap(), expected);
        kas.agent.write(control(request::HEADER, b""));
        assert!(matches!(exchange.head().await.unwrap(), Head::Headers(_)));
        kas.agent.write([payload(request::MESSAGE, b"pong"), control(request::TRAILER, b"")].concat());
        let (bytes, status) = answered(&mut exchange).await;
        assert_eq!(bytes, message(b"pong"));
        assert_eq!(status.unwrap().code(), Code::Ok);
        drop(exchange);
        assert_eq!(kas.wrote().await.unwrap(), "");
        assert_eq!(kas.parked(), round);
    }
    assert!(!kas.was_reset());
}

#[tokio::test]
async fn one_shot_tunnel_ends_with_ok_after_its_request() {
    for kind in [AgentKind::Old, AgentKind::Recent] {
        let mut kas = kas(kind);
        let (caller, _) = complete_request(b"ping");
        let mut exchange = kas.begin(&caller);
        kas.wrote().await.unwrap();
        kas.agent.write([control(request::HEADER, b""), payload(request::MESSAGE, b"pong")].concat());
        kas.agent.write(control(request::TRAILER, b""));
        assert!(matches!(exchange.head().await.unwrap(), Head::Headers(_)));
        assert_eq!(answered(&mut exchange).await, (message(b"pong").into(), None), "OK is not sure yet");
        kas.agent.end();
        assert_eq!(answered(&mut exchange).await.1.unwrap().code(), Code::Ok);
        assert_eq!(kas.wrote().await.unwrap_err().code(), Code::Ok);
        assert_eq!(kas.parked(), 0);
    }
}

#[tokio::test]
async fn one_shot_trailer_then_reset_has_an_unknown_outcome() {
    let mut kas = kas(AgentKind::Old);
    let (caller, _) = complete_request(b"ping");
    let mut exchange = kas.begin(&caller);
    kas.wrote().await.unwrap();
    kas.agent.write([control(request::HEADER, b""), control(request::TRAILER, b"")].concat());
    kas.agent.reset();
    exchange.head().await.unwrap();
    let status = answered(&mut exchange).await.1.unwrap();
    assert_eq!((status.code(), status.outcome()), (Code::Unavailable, Some(Outcome::Unknown)));
}

#[tokio::test]
async fn error_is_final_at_once_on_one_shot_and_waits_for_the_trailer_on_reusable() {
    let mut old = kas(AgentKind::Old);
    let (caller, _) = complete_request(b"");
    let mut exchange = old.begin(&caller);
    old.wrote().await.unwrap();
    old.agent.write(error(Code::NotFound, "no such thing"));
    let Head::Only(_, status) = exchange.head().await.unwrap() else { panic!("headers before an error") };
    assert_eq!((status.code(), status.message()), (Code::NotFound, "no such thing"));

    let mut ours = kas(AgentKind::Ours);
    let (caller, _) = complete_request(b"");
    let mut exchange = ours.begin(&caller);
    ours.wrote().await.unwrap();
    ours.agent.write(error(Code::NotFound, "no such thing"));
    let waiting = tokio::time::timeout(Duration::from_millis(1), exchange.head()).await;
    assert!(waiting.is_err(), "the trailer has not come");
    ours.agent.write(control(request::TRAILER, b""));
    assert!(matches!(exchange.head().await.unwrap(), Head::Only(_, s) if s.code() == Code::NotFound));
    assert_eq!(ours.parked(), 1, "an application's error parks the tunnel");
}

#[tokio::test]
async fn half_close_before_any_answer_is_not_started() {
    for kind in [AgentKind::Ours, AgentKind::Old] {
        let mut kas = kas(kind);
        let (caller, _) = complete_request(b"ping");
        let mut exchange = kas.begin(&caller);
        kas.wrote().await.unwrap();
        kas.agent.end();
        assert!(matches!(exchange.head().await, Err(Failure::Refused)));
        assert!(kas.was_reset());
    }
}

#[tokio::test]
async fn a_tunnel_that_dies_before_anything_was_written_gives_the_request_back() {
    let kas = kas(AgentKind::Ours);
    let (caller, _) = complete_request(b"ping");
    let mut exchange = kas.begin(&caller);
    // HTTP/2 drops the stream before its task wrote anything.
    let Kas { out, agent, .. } = kas;
    agent.reset();
    drop(out);
    let Err(Failure::NotStarted(job)) = exchange.head().await else { panic!("the request is lost") };
    assert_eq!(job.into_body().collect().await.unwrap().to_bytes(), message(b"ping"));
}

#[tokio::test]
async fn a_caller_that_leaves_before_anything_was_written_gives_the_tunnel_back() {
    let mut kas = kas(AgentKind::Old);
    let (caller, _) = complete_request(b"ping");
    drop(kas.begin(&caller));
    assert_eq!(kas.parked(), 1);
    assert!(caller.is_dropped() && !kas.was_reset());
    let (caller, expected) = complete_request(b"next");
    let _exchange = kas.begin(&caller);
    assert_eq!(kas.wrote().await.unwrap(), expected);
}

#[tokio::test]
async fn withdrawal_ends_a_parked_tunnel_with_ok() {
    let mut kas = kas(AgentKind::Ours);
    kas.agent.write(control(request::TRAILER, b""));
    assert_eq!(kas.wrote().await.unwrap_err().code(), Code::Ok);
    let (caller, _) = complete_request(b"");
    assert!(kas.tunnel.begin(job(&caller), Deadline::NONE).is_err());
}

#[tokio::test]
async fn withdrawal_that_comes_before_a_request_was_written_gives_the_request_back() {
    let mut kas = kas(AgentKind::Ours);
    let (caller, _) = complete_request(b"ping");
    let mut exchange = kas.begin(&caller);
    kas.agent.write(control(request::TRAILER, b""));
    let Err(Failure::NotStarted(job)) = exchange.head().await else { panic!("the request is lost") };
    assert_eq!(job.into_body().collect().await.unwrap().to_bytes(), message(b"ping"));
    assert_eq!(kas.wrote().await.unwrap_err().code(), Code::Ok);
    assert!(!kas.was_reset());
}

#[tokio::test]
async fn withdrawal_that_crosses_a_request_is_ignored_and_the_tunnel_ends_after_it() {
    let mut kas = kas(AgentKind::Ours);
    let (caller, expected) = complete_request(b"ping");
    let mut exchange = kas.begin(&caller);
    assert_eq!(kas.wrote().await.unwrap(), expected);
    kas.agent.write([control(request::TRAILER, b""), control(request::HEADER, b"")].concat());
    exchange.head().await.unwrap();
    kas.agent.write([payload(request::MESSAGE, b"pong"), control(request::TRAILER, b"")].concat());
    let (bytes, status) = answered(&mut exchange).await;
    assert_eq!((bytes, status.unwrap().code()), (message(b"pong").into(), Code::Ok));
    assert_eq!(kas.wrote().await.unwrap_err().code(), Code::Ok);
    assert_eq!(kas.parked(), 0);
}

#[tokio::test]
async fn drain_notice_goes_to_parked_reusable_tunnels_and_ok_to_one_shot_ones() {
    let mut ours = kas(AgentKind::Ours);
    ours.tunnel.retire(Retire::Notice);
    assert_eq!(ours.wrote().await.unwrap(), control(response::CLOSE_SEND, b""));
    let (caller, _) = complete_request(b"");
    assert!(ours.tunnel.begin(job(&caller), Deadline::NONE).is_err(), "no request after the notice");
    ours.agent.end();
    assert_eq!(ours.wrote().await.unwrap_err().code(), Code::Ok);

    let mut old = kas(AgentKind::Old);
    old.tunnel.retire(Retire::Notice);
    assert_eq!(old.wrote().await.unwrap_err().code(), Code::Ok);
}

#[tokio::test]
async fn a_busy_tunnel_gets_its_notice_when_it_finishes() {
    let mut kas = kas(AgentKind::Ours);
    let (caller, _) = complete_request(b"ping");
    let mut exchange = kas.begin(&caller);
    kas.wrote().await.unwrap();
    kas.tunnel.retire(Retire::Notice);
    assert_eq!(kas.wrote().await.unwrap(), "");
    kas.agent.write([control(request::HEADER, b""), control(request::TRAILER, b"")].concat());
    exchange.head().await.unwrap();
    assert_eq!(answered(&mut exchange).await.1.unwrap().code(), Code::Ok);
    assert_eq!(kas.wrote().await.unwrap(), control(response::CLOSE_SEND, b""));
    assert_eq!(kas.parked(), 0, "a retired tunnel is not offered again");
}

#[tokio::test]
async fn stray_bytes_on_a_parked_tunnel_reset_it() {
    for stray in
        [payload(request::MESSAGE, b"x"), control(request::HEADER, b""), Bytes::from_static(b"\x07\0\0\0\0")]
    {
        let mut kas = kas(AgentKind::Ours);
        assert_eq!(kas.wrote().await.unwrap(), "");
        kas.agent.write(stray);
        assert_eq!(kas.wrote().await.unwrap(), "");
        assert!(kas.was_reset());
        assert_eq!(kas.log.violations.lock().unwrap().len(), 1);
    }
}

#[tokio::test]
async fn an_answer_before_close_send_closes_between_messages_and_parks() {
    let mut kas = kas(AgentKind::Ours);
    let caller = Pipe::default();
    caller.write(message(b"one"));
    let mut exchange = kas.begin(&caller);
    let expected = [control(response::REQUEST_INFO, b""), payload(response::MESSAGE, b"one")].concat();
    assert_eq!(kas.wrote().await.unwrap(), expected);
    kas.agent.write([control(request::HEADER, b""), control(request::TRAILER, b"")].concat());
    exchange.head().await.unwrap();
    assert_eq!(answered(&mut exchange).await.1.unwrap().code(), Code::Ok);
    assert_eq!(kas.wrote().await.unwrap(), control(response::CLOSE_SEND, b""));
    assert_eq!(kas.parked(), 1);
    assert!(caller.is_dropped(), "what the caller still sends is not read");
}

#[tokio::test]
async fn an_answer_inside_a_message_resets_unless_the_rest_is_already_here() {
    for (rest, reset) in [(&b""[..], true), (b"cdef", false)] {
        let mut kas = kas(AgentKind::Ours);
        let caller = Pipe::default();
        let mut first = grpc::prefix(6).to_vec();
        first.extend_from_slice(b"ab");
        caller.write(first);
        let mut exchange = kas.begin(&caller);
        let mut expected = BytesMut::new();
        expected.put_slice(&control(response::REQUEST_INFO, b""));
        frame::put_message_head(response::MESSAGE, 6, &mut expected);
        expected.put_slice(b"ab");
        assert_eq!(kas.wrote().await.unwrap(), expected);
        if !rest.is_empty() {
            caller.write(rest);
            assert_eq!(kas.wrote().await.unwrap(), rest);
        }
        kas.agent.write([control(request::HEADER, b""), control(request::TRAILER, b"")].concat());
        exchange.head().await.unwrap();
        assert_eq!(answered(&mut exchange).await.1.unwrap().code(), Code::Ok);
        let wrote = kas.wrote().await.unwrap();
        assert_eq!(kas.was_reset(), reset);
        assert_eq!(wrote, if reset { Bytes::new() } else { control(response::CLOSE_SEND, b"") });
        assert_eq!(kas.parked(), usize::from(!reset));
    }
}

#[tokio::test]
async fn a_callers_reset_is_never_passed_on_as_close_send() {
    for kind in [AgentKind::Ours, AgentKind::Old, AgentKind::Recent] {
        let mut kas = kas(kind);
        let caller = Pipe::default();
        caller.write(message(b"one"));
        let exchange = kas.begin(&caller);
        kas.wrote().await.unwrap();
        caller.reset();
        assert_eq!(kas.wrote().await.unwrap(), "", "{kind:?}");
        drop(exchange);
        match kind {
            AgentKind::Recent => assert_eq!(kas.wrote().await.unwrap_err().code(), Code::Cancelled),
            _ => assert!(kas.was_reset(), "{kind:?}"),
        }
    }
}

#[tokio::test]
async fn a_caller_that_leaves_cancels_at_once_or_lets_an_old_agent_finish() {
    // Reusable: reset, also after close_send and before any answer.
    let mut ours = kas(AgentKind::Ours);
    let (caller, _) = complete_request(b"ping");
    let exchange = ours.begin(&caller);
    ours.wrote().await.unwrap();
    drop(exchange);
    assert!(ours.was_reset());

    // 14.1 after close_send: its answer is read and dropped, and the tunnel ends with OK.
    let mut old = kas(AgentKind::Old);
    let (caller, _) = complete_request(b"ping");
    let exchange = old.begin(&caller);
    old.wrote().await.unwrap();
    drop(exchange);
    assert_eq!(old.wrote().await.unwrap(), "");
    old.agent.write([control(request::HEADER, b""), payload(request::MESSAGE, b"late")].concat());
    old.agent.write(control(request::TRAILER, b""));
    old.agent.end();
    assert_eq!(old.wrote().await.unwrap_err().code(), Code::Ok);
    assert!(!old.was_reset());

    // 14.1 before close_send: an early one would commit a truncated upload.
    let mut old = kas(AgentKind::Old);
    let caller = Pipe::default();
    caller.write(message(b"part"));
    let exchange = old.begin(&caller);
    old.wrote().await.unwrap();
    drop(exchange);
    assert!(old.was_reset());
}

/// A 14.1 agent whose caller has left after the whole request was written.
async fn abandoned() -> Kas {
    let mut old = kas(AgentKind::Old);
    let (caller, _) = complete_request(b"ping");
    let exchange = old.begin(&caller);
    old.wrote().await.unwrap();
    drop(exchange);
    assert_eq!(old.wrote().await.unwrap(), "");
    old
}

#[tokio::test(start_paused = true)]
async fn an_old_agents_abandoned_answer_is_read_up_to_a_mebibyte() {
    let mut old = abandoned().await;
    old.agent.write(control(request::HEADER, b""));
    old.agent.write(payload(request::MESSAGE, &vec![0; 1 << 20]));
    old.wrote().await.unwrap();
    assert!(!old.was_reset());
    old.agent.write(payload(request::MESSAGE, b"x"));
    old.wrote().await.unwrap();
    assert!(old.was_reset());
}

/// The reset would free nothing: the agent's handler goes on until it sends something, and only then begins
/// the agent's back-off. This failed when the tunnel was reset ten seconds after the caller had left.
#[tokio::test(start_paused = true)]
async fn a_silent_old_agent_is_not_reset_and_its_late_answer_ends_the_tunnel_with_ok() {
    for headed in [false, true] {
        let mut old = abandoned().await;
        if headed {
            old.agent.write(control(request::HEADER, b""));
            old.wrote().await.unwrap();
        }
        let since = old.tunnel.abandoned_since().expect("it is occupied");
        for _ in 0..60 {
            tokio::time::advance(Duration::from_secs(60)).await;
            assert_eq!(old.wrote().await.unwrap(), "");
            assert!(!old.was_reset());
        }
        assert_eq!(old.tunnel.abandoned_since(), Some(since));
        // The pieces of an answer do not arrive in the same moment.
        if !headed {
            old.agent.write(control(request::HEADER, b""));
            old.wrote().await.unwrap();
        }
        tokio::time::advance(Duration::from_millis(500)).await;
        old.agent.write(payload(request::MESSAGE, b"late"));
        old.wrote().await.unwrap();
        old.agent.write(control(request::TRAILER, b""));
        old.agent.end();
        assert_eq!(old.wrote().await.unwrap_err().code(), Code::Ok);
        assert!(!old.was_reset());
        assert_eq!(old.tunnel.abandoned_since(), None);
    }
}

#[tokio::test(start_paused = true)]
async fn an_old_agents_abandoned_answer_that_goes_on_after_ten_seconds_resets_the_tunnel() {
    for early in [false, true] {
        let mut old = abandoned().await;
        if early {
            old.agent.write(control(request::HEADER, b""));
            old.wrote().await.unwrap();
        }
        tokio::time::advance(Duration::from_secs(9)).await;
        old.wrote().await.unwrap();
        tokio::time::advance(Duration::from_secs(2)).await;
        if early {
            old.agent.write(payload(request::MESSAGE, b"event"));
        } else {
            old.agent.write(control(request::HEADER, b""));
        }
        old.wrote().await.unwrap();
        assert!(!old.was_reset(), "the answer may be complete in a moment");
        tokio::time::advance(Duration::from_millis(1001)).await;
        old.wrote().await.unwrap();
        assert!(old.was_reset());
    }
}

#[tokio::test]
async fn the_pool_is_told_of_a_request_that_occupies_a_tunnel_without_its_caller() {
    let mut old = abandoned().await;
    assert_eq!(old.log.abandoned.load(Ordering::SeqCst), 1);
    old.agent.write([control(request::HEADER, b""), control(request::TRAILER, b"")].concat());
    old.agent.end();
    assert_eq!(old.wrote().await.unwrap_err().code(), Code::Ok);

    // A reset frees the tunnel of an agent that can cancel, and that of a request that is not complete.
    for kind in [AgentKind::Ours, AgentKind::Recent, AgentKind::Old] {
        let mut kas = kas(kind);
        let caller = Pipe::default();
        caller.write(message(b"part"));
        let exchange = kas.begin(&caller);
        kas.wrote().await.unwrap();
        drop(exchange);
        assert_eq!(kas.log.abandoned.load(Ordering::SeqCst), 0, "{kind:?}");
        assert_eq!(kas.tunnel.abandoned_since(), None, "{kind:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn the_deadline_counts_over_the_whole_answer() {
    let mut kas = kas(AgentKind::Ours);
    let (caller, _) = complete_request(b"ping");
    let mut exchange = kas.tunnel.begin(job(&caller), Deadline::after(Duration::from_millis(300))).unwrap();
    kas.wrote().await.unwrap();
    kas.agent.write([control(request::HEADER, b""), payload(request::MESSAGE, b"one")].concat());
    exchange.head().await.unwrap();
    assert_eq!(answered(&mut exchange).await, (message(b"one").into(), None));
    tokio::time::advance(Duration::from_millis(301)).await;
    let status = answered(&mut exchange).await.1.unwrap();
    assert_eq!((status.code(), status.outcome()), (Code::DeadlineExceeded, Some(Outcome::Unknown)));
    assert!(kas.was_reset());
}

#[tokio::test]
async fn wrong_bytes_of_a_caller_are_the_callers_fault() {
    let mut kas = kas(AgentKind::Ours);
    let caller = Pipe::default();
    caller.write(&b"\x01\0\0\0\x01x"[..]);
    let mut exchange = kas.begin(&caller);
    kas.wrote().await.unwrap();
    let Err(Failure::Caller(status)) = exchange.head().await else { panic!("not the caller's fault") };
    assert_eq!(status.code(), Code::Internal);
    assert!(kas.was_reset(), "the agent must not take what came for a whole request");
}

#[tokio::test]
async fn ending_a_tunnel_ends_its_request_with_an_unknown_outcome() {
    let mut kas = kas(AgentKind::Ours);
    let (caller, _) = complete_request(b"ping");
    let mut exchange = kas.begin(&caller);
    kas.wrote().await.unwrap();
    let failed = tokio::spawn(async move { exchange.head().await.map(drop) });
    tokio::task::yield_now().await;
    kas.tunnel.end(Status::new(Code::Unauthenticated, "revoked"));
    assert_eq!(kas.wrote().await.unwrap_err().code(), Code::Unauthenticated);
    assert!(matches!(failed.await.unwrap(), Err(Failure::Unknown)));
}

// Both ends together.

struct Told(Arc<Mutex<Vec<Progress>>>);

impl Observer for Told {
    fn progress(&self, progress: Progress) {
        self.0.lock().unwrap().push(progress);
    }
}

type Serve = Box<dyn Fn(http::Request<grpc::Body>) -> Answer + Send + Sync>;

struct Fixed(Serve);

impl Handler for Fixed {
    fn call(&self, request: http::Request<grpc::Body>) -> Answer {
        (self.0)(request)
    }
}

/// A `Connect` call between the two ends, pumped by two tasks as HTTP/2 would.
struct Linked {
    tunnel: Arc<Tunnel>,
    control: agent_end::Control,
    told: Arc<Mutex<Vec<Progress>>>,
    log: Arc<Log>,
}

fn pump<B>(mut from: B, to: Pipe, abort: Arc<AtomicBool>)
where
    B: Body<Data = Bytes, Error = BoxError> + Send + Unpin + 'static,
{
    tokio::spawn(async move {
        loop {
            match from.frame().await {
                Some(Ok(frame)) => {
                    let is_last = frame.is_trailers();
                    to.push(frame);
                    if is_last {
                        to.end();
                    }
                }
                None => {
                    to.end();
                    return;
                }
                Some(Err(_)) => {
                    to.reset();
                    return;
                }
            }
            if abort.load(Ordering::SeqCst) {
                to.reset();
                return;
            }
        }
    });
}

async fn linked(reusable: bool, serve: Serve) -> Linked {
    let descriptor = AgentDescriptor {
        services: vec![Service { name: "s".into(), methods: vec![Method { name: "M".into() }] }],
    };
    let told = Arc::<Mutex<Vec<Progress>>>::default();
    let (body, control) =
        agent_end::open(&descriptor, Arc::new(Fixed(serve)), Box::new(Told(Arc::clone(&told))));
    let (up, down) = (Pipe::default(), Pipe::default());
    pump(body, up.clone(), Arc::default());
    let mut opening = Opening::new(up.body(), false);
    let descriptor = tunnel::kas_end::read_descriptor(&mut opening).await.unwrap();
    assert!(descriptor.serves("/s/M"));
    let log = Arc::<Log>::default();
    let reset = Arc::<AtomicBool>::default();
    let (flag, pipe) = (Arc::clone(&reset), down.clone());
    let (tunnel, out) = Tunnel::new(
        info(if reusable { AgentKind::Ours } else { AgentKind::Old }),
        opening,
        Arc::clone(&log) as Arc<dyn TunnelPool>,
        Box::new(move || {
            flag.store(true, Ordering::SeqCst);
            pipe.reset();
        }),
    );
    pump(out, down.clone(), reset);
    control.accepted(down.body(), reusable, false);
    Linked { tunnel, control, told, log }
}

fn echo() -> Serve {
    Box::new(|request| {
        Box::pin(async move {
            assert_eq!(request.uri().path(), "/s/M");
            let body = request.into_body().collect().await.unwrap().to_bytes();
            let mut trailers = HeaderMap::new();
            trailers.insert("app", "trailer".parse().unwrap());
            Status::write_ok(&mut trailers);
            let frames = [Ok::<_, BoxError>(Frame::data(body)), Ok(Frame::trailers(trailers))];
            let mut response = http::Response::new(grpc::boxed(http_body_util::StreamBody::new(
                futures_util::stream::iter(frames),
            )));
            response.headers_mut().insert("app", "header".parse().unwrap());
            response
        })
    })
}

async fn call(linked: &Linked, data: &[u8]) -> (HeaderMap, Bytes, HeaderMap) {
    let caller = Pipe::default();
    caller.write(message(data));
    caller.end();
    let mut writer = tunnel::meta::MapWriter::request_info("/s/M", linked.tunnel.info().kind.binary());
    writer.add_text("k", "v").unwrap();
    let mut request_info = BytesMut::new();
    writer.put_control(response::REQUEST_INFO, &mut request_info);
    let job = Job::new(request_info.freeze(), caller.body());
    let mut exchange = linked.tunnel.begin(job, Deadline::NONE).expect("the tunnel is free");
    let Head::Headers(headers) = exchange.head().await.unwrap() else { panic!("no headers") };
    let answer = exchange.collect().await.unwrap();
    let trailers = answer.trailers().cloned().unwrap();
    (headers, answer.to_bytes(), trailers)
}

#[tokio::test]
async fn both_ends_carry_requests_of_every_size_on_one_reusable_stream() {
    let linked = linked(true, echo()).await;
    for size in [0, 1, 1023, 1024, 1025, 100_000, 3_000_000] {
        let data = vec![7; size];
        let (headers, bytes, trailers) = call(&linked, &data).await;
        assert_eq!(bytes, message(&data), "{size}");
        assert_eq!(
            (&headers["app"], &trailers["app"]),
            (&"header".parse().unwrap(), &"trailer".parse().unwrap())
        );
        assert_eq!(trailers["grpc-status"], "0");
    }
    let busy = linked.told.lock().unwrap().iter().filter(|p| **p == Progress::Busy).count();
    assert_eq!(busy, 7);
}

#[tokio::test]
async fn both_ends_carry_one_request_on_a_one_shot_stream() {
    let linked = linked(false, echo()).await;
    let (_, bytes, trailers) = call(&linked, b"ping").await;
    assert_eq!((bytes, &trailers["grpc-status"]), (message(b"ping").into(), &"0".parse().unwrap()));
    let (caller, _) = complete_request(b"");
    assert!(linked.tunnel.begin(job(&caller), Deadline::NONE).is_err());
}

/// Waits until agentk's end was told something.
async fn told(linked: &Linked, progress: Progress) {
    let wait = async {
        while !linked.told.lock().unwrap().contains(&progress) {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(5), wait).await.unwrap_or_else(|_| panic!("never {progress:?}"));
}

#[tokio::test]
async fn withdrawn_and_drained_tunnels_end_on_both_sides() {
    let first = linked(true, echo()).await;
    told(&first, Progress::Parked).await;
    first.control.withdraw();
    told(&first, Progress::Ended).await;
    assert_eq!(first.log.violations.lock().unwrap().len(), 0);

    let second = linked(true, echo()).await;
    told(&second, Progress::Parked).await;
    second.tunnel.retire(Retire::Notice);
    told(&second, Progress::DrainNotice).await;
    second.control.half_close();
    told(&second, Progress::Ended).await;
    assert_eq!(second.log.violations.lock().unwrap().len(), 0);
}

#[tokio::test]
async fn a_panicking_handler_ends_its_request_and_not_the_tunnel() {
    let linked = linked(true, Box::new(|_| Box::pin(async { panic!("on purpose") }))).await;
    for _ in 0..2 {
        let (caller, _) = complete_request(b"ping");
        let mut exchange =
            linked.tunnel.begin(with_method(&caller), Deadline::NONE).expect("the tunnel is free");
        let Head::Only(_, status) = exchange.head().await.unwrap() else { panic!("headers") };
        assert_eq!(status.code(), Code::Internal);
        drop(exchange);
        let parked = async {
            while linked.tunnel.idle_since().is_none() {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(Duration::from_secs(5), parked).await.expect("the tunnel parks again");
    }
}

fn with_method(caller: &Pipe) -> Job {
    let writer = tunnel::meta::MapWriter::request_info("/s/M", tunnel::meta::Binary::Base64);
    let mut request_info = BytesMut::new();
    writer.put_control(response::REQUEST_INFO, &mut request_info);
    Job::new(request_info.freeze(), caller.body())
}

#[tokio::test]
async fn a_handler_is_dropped_when_its_caller_leaves_also_before_its_first_byte() {
    struct Flag(Arc<AtomicBool>);
    impl Drop for Flag {
        fn drop(&mut self) {
            self.0.store(true, Ordering::SeqCst);
        }
    }
    let dropped = Arc::<AtomicBool>::default();
    let flag = Arc::clone(&dropped);
    let serve: Serve = Box::new(move |request| {
        let flag = Flag(Arc::clone(&flag));
        Box::pin(async move {
            let _flag = flag;
            // Without reading the request only HTTP/2 itself can tell of the reset.
            request.into_body().collect().await.unwrap();
            std::future::pending().await
        })
    });
    let linked = linked(true, serve).await;
    let (caller, _) = complete_request(b"ping");
    let exchange = linked.tunnel.begin(with_method(&caller), Deadline::NONE).expect("the tunnel is free");
    told(&linked, Progress::Busy).await;
    assert!(!dropped.load(Ordering::SeqCst));
    drop(exchange);
    told(&linked, Progress::Ended).await;
    assert!(dropped.load(Ordering::SeqCst));
}

#[tokio::test]
async fn a_request_whose_tunnel_is_lost_has_no_end_for_who_reads_it_later() {
    let kept = Arc::<Mutex<Option<grpc::Body>>>::default();
    let keep = Arc::clone(&kept);
    // The answer goes on beside the request, and does not end.
    let serve: Serve = Box::new(move |request| {
        *keep.lock().unwrap() = Some(request.into_body());
        let endless = futures_util::stream::pending::<Result<Frame<Bytes>, BoxError>>();
        Box::pin(std::future::ready(http::Response::new(grpc::boxed(http_body_util::StreamBody::new(
            endless,
        )))))
    });
    let linked = linked(true, serve).await;
    let caller = Pipe::default();
    caller.write(message(b"the first of several"));
    let exchange = linked.tunnel.begin(with_method(&caller), Deadline::NONE).expect("the tunnel is free");
    told(&linked, Progress::Busy).await;
    drop(exchange);
    // The connection is lost, and the call on it fails.
    linked.control.failed();
    told(&linked, Progress::Ended).await;
    let body = kept.lock().unwrap().take().expect("the handler was called");
    assert!(!body.is_end_stream());
    let read = body.collect().await;
    assert!(read.is_err(), "a part of the request was taken for all of it");
}

/// Two replicas: the one that the caller asked, and the one that holds the tunnel, with the stream between
/// them played by two pipes.
struct Hop {
    gateway: Kas,
    splice: Option<Splice>,
    /// The asking replica's direction of the stream, and the other one.
    asked: Pipe,
    lent: Pipe,
    out: Option<TunnelBody>,
    reset: Arc<AtomicBool>,
    /// The status with which the stream ended.
    ended: Option<Status>,
}

impl Hop {
    fn new(kind: AgentKind, caller: &Pipe) -> (Self, Exchange) {
        let gateway = kas(kind);
        let (asked, lent) = (Pipe::default(), Pipe::default());
        let reset = Arc::<AtomicBool>::default();
        let flag = Arc::clone(&reset);
        let (tunnel, out) = Tunnel::borrowed(
            info(kind),
            lent.body(),
            Arc::<Log>::default(),
            Box::new(move || flag.store(true, Ordering::SeqCst)),
            false,
        );
        let exchange = tunnel.begin(job(caller), Deadline::NONE).expect("it is new");
        (Self { gateway, splice: None, asked, lent, out: Some(out), reset, ended: None }, exchange)
    }

    /// Carries what there is in both directions, once.
    async fn carry(&mut self) {
        while let Some(out) = &mut self.out {
            match std::future::poll_fn(|cx| Poll::Ready(Pin::new(&mut *out).poll_frame(cx))).await {
                Poll::Ready(Some(frame)) => {
                    let mut data = frame.unwrap().into_data().unwrap();
                    if self.splice.is_none() {
                        // The first envelope starts the request.
                        let first = data.split_to(control(response::REQUEST_INFO, b"").len());
                        let job = Job::spliced(first, Bytes::new(), self.asked.body());
                        self.splice =
                            Some(self.gateway.tunnel.begin_spliced(job, None).expect("the tunnel is free"));
                    }
                    if !data.is_empty() {
                        self.asked.write(data);
                    }
                }
                Poll::Ready(None) => {
                    self.asked.end();
                    self.out = None;
                }
                Poll::Pending => break,
            }
        }
        while let Some(splice) = &mut self.splice {
            match std::future::poll_fn(|cx| Poll::Ready(Pin::new(&mut *splice).poll_frame(cx))).await {
                Poll::Ready(Some(frame)) => match frame.unwrap().into_data() {
                    Ok(data) => self.lent.write(data),
                    Err(frame) => {
                        let status = Status::from_headers(&frame.into_trailers().unwrap()).unwrap();
                        if status.code() == Code::Ok {
                            self.lent.end();
                        } else {
                            self.lent.fail(status.clone());
                        }
                        self.ended = Some(status);
                        self.splice = None;
                    }
                },
                Poll::Ready(None) => panic!("polled after the end"),
                Poll::Pending => break,
            }
        }
    }
}

#[tokio::test]
async fn across_replicas_the_agent_reads_the_same_bytes_and_the_caller_the_same_answer() {
    let (caller, expected) = complete_request(b"ping");
    let (mut hop, mut exchange) = Hop::new(AgentKind::Ours, &caller);
    hop.carry().await;
    assert_eq!(hop.gateway.wrote().await.unwrap(), expected);
    hop.gateway.agent.write([control(request::HEADER, b""), payload(request::MESSAGE, b"pong")].concat());
    hop.carry().await;
    assert!(matches!(exchange.head().await.unwrap(), Head::Headers(_)));
    assert_eq!(answered(&mut exchange).await, (message(b"pong").into(), None));
    hop.gateway.agent.write(control(request::TRAILER, b""));
    hop.carry().await;
    assert_eq!(answered(&mut exchange).await.1.unwrap().code(), Code::Ok);
    assert_eq!(hop.ended.as_ref().unwrap().code(), Code::Ok);
    assert_eq!(hop.gateway.parked(), 1, "the tunnel is free for the next request");
    drop(exchange);
    assert!(!hop.gateway.was_reset() && !hop.reset.load(Ordering::SeqCst));
}

#[tokio::test]
async fn across_replicas_a_large_message_and_an_error_pass() {
    let caller = Pipe::default();
    let large = vec![7; 200_000];
    caller.write(message(&large));
    caller.end();
    let (mut hop, mut exchange) = Hop::new(AgentKind::Old, &caller);
    hop.carry().await;
    let wrote = hop.gateway.wrote().await.unwrap();
    assert!(wrote.ends_with(&control(response::CLOSE_SEND, b"")) && wrote.len() > large.len());
    hop.gateway.agent.write(error(Code::NotFound, "no such thing"));
    hop.carry().await;
    let Head::Only(_, status) = exchange.head().await.unwrap() else { panic!("headers before an error") };
    assert_eq!((status.code(), status.message()), (Code::NotFound, "no such thing"));
    assert_eq!(hop.gateway.wrote().await.unwrap_err().code(), Code::Ok, "a one-shot tunnel ends with OK");
}

#[tokio::test]
async fn across_replicas_an_early_answer_closes_between_messages_and_frees_the_tunnel() {
    let caller = Pipe::default();
    caller.write(message(b"first"));
    let (mut hop, mut exchange) = Hop::new(AgentKind::Ours, &caller);
    hop.carry().await;
    hop.gateway.wrote().await.unwrap();
    hop.gateway.agent.write([control(request::HEADER, b""), control(request::TRAILER, b"")].concat());
    hop.carry().await;
    exchange.head().await.unwrap();
    assert_eq!(answered(&mut exchange).await.1.unwrap().code(), Code::Ok);
    assert!(hop.ended.is_none(), "the tunnel is not free before close_send");
    drop(exchange);
    hop.carry().await;
    assert_eq!(hop.gateway.wrote().await.unwrap(), control(response::CLOSE_SEND, b""));
    hop.carry().await;
    assert_eq!(hop.ended.as_ref().unwrap().code(), Code::Ok);
    assert_eq!(hop.gateway.parked(), 1);
    assert!(!hop.gateway.was_reset());
}

#[tokio::test(start_paused = true)]
async fn across_replicas_a_tunnel_whose_request_stays_open_after_the_answer_is_reset_after_a_second() {
    let caller = Pipe::default();
    let (mut hop, exchange) = Hop::new(AgentKind::Ours, &caller);
    hop.carry().await;
    hop.gateway.wrote().await.unwrap();
    hop.gateway.agent.write([control(request::HEADER, b""), control(request::TRAILER, b"")].concat());
    // The asking replica hangs: it neither reads the answer nor closes.
    let splice = hop.splice.as_mut().unwrap();
    for _ in 0..3 {
        let _ = std::future::poll_fn(|cx| Poll::Ready(Pin::new(&mut *splice).poll_frame(cx))).await;
        hop.gateway.wrote().await.unwrap();
    }
    assert!(!hop.gateway.was_reset());
    tokio::time::advance(Duration::from_millis(1001)).await;
    hop.gateway.wrote().await.unwrap();
    assert!(hop.gateway.was_reset());
    drop(exchange);
}

#[tokio::test]
async fn across_replicas_a_caller_that_leaves_resets_both_hops() {
    let (caller, _) = complete_request(b"ping");
    let (mut hop, exchange) = Hop::new(AgentKind::Ours, &caller);
    hop.carry().await;
    hop.gateway.wrote().await.unwrap();
    drop(exchange);
    assert!(hop.reset.load(Ordering::SeqCst), "the stream between the replicas is reset");
    // Which drops what the gateway holds of it.
    hop.asked.reset();
    hop.splice = None;
    assert!(hop.gateway.was_reset());
}

#[tokio::test]
async fn across_replicas_what_the_lender_says_reaches_the_caller() {
    let (caller, _) = complete_request(b"ping");
    let (mut hop, mut exchange) = Hop::new(AgentKind::Ours, &caller);
    hop.carry().await;
    hop.gateway.wrote().await.unwrap();
    // agentk refuses after `request_info` was written.
    hop.gateway.agent.end();
    hop.carry().await;
    let Err(failure @ Failure::Lender(_)) = exchange.head().await else { panic!("an answer") };
    let status = exchange.late_status(&failure);
    assert_eq!((status.code(), status.outcome()), (Code::Unavailable, Some(Outcome::NotStarted)));
}

#[tokio::test]
async fn across_replicas_a_lost_link_has_an_unknown_outcome() {
    let (caller, _) = complete_request(b"ping");
    let (mut hop, mut exchange) = Hop::new(AgentKind::Ours, &caller);
    hop.carry().await;
    hop.gateway.wrote().await.unwrap();
    hop.lent.reset();
    let Err(failure) = exchange.head().await else { panic!("an answer") };
    assert_eq!(exchange.late_status(&failure).outcome(), Some(Outcome::Unknown));
    // A clean end without a complete answer is no better.
    let (caller, _) = complete_request(b"ping");
    let (mut hop, mut exchange) = Hop::new(AgentKind::Old, &caller);
    hop.carry().await;
    hop.lent.write([control(request::HEADER, b""), payload(request::MESSAGE, b"pong")].concat());
    hop.lent.end();
    exchange.head().await.unwrap();
    let status = answered(&mut exchange).await.1.unwrap();
    assert_eq!((status.code(), status.outcome()), (Code::Unavailable, Some(Outcome::Unknown)));
}

#[tokio::test]
async fn across_replicas_an_end_without_close_send_is_not_taken_for_the_end_of_the_request() {
    let mut gateway = kas(AgentKind::Ours);
    let asked = Pipe::default();
    asked.write(payload(response::MESSAGE, b"half of an upload"));
    asked.end();
    let mut splice = gateway
        .tunnel
        .begin_spliced(Job::spliced(control(response::REQUEST_INFO, b""), Bytes::new(), asked.body()), None)
        .unwrap();
    let wrote = gateway.wrote().await.unwrap();
    assert!(!wrote.ends_with(&control(response::CLOSE_SEND, b"")), "a truncated upload would be committed");
    let frame = std::future::poll_fn(|cx| Pin::new(&mut splice).poll_frame(cx)).await.unwrap().unwrap();
    let status = Status::from_headers(frame.trailers_ref().unwrap()).unwrap();
    assert_ne!(status.code(), Code::Ok);
    assert!(gateway.was_reset());
}

#[tokio::test]
async fn across_replicas_an_answer_is_complete_although_the_lender_stops_reading_the_request() {
    let caller = Pipe::default();
    caller.write(message(b"first"));
    let (mut hop, mut exchange) = Hop::new(AgentKind::Old, &caller);
    hop.carry().await;
    hop.gateway.wrote().await.unwrap();
    let answer =
        [control(request::HEADER, b""), payload(request::MESSAGE, b"early"), control(request::TRAILER, b"")];
    hop.gateway.agent.write(answer.concat());
    hop.gateway.agent.end();
    // The agent's answer is under way when HTTP/2 tells the asker that nobody reads what it still has to
    // write.
    let splice = hop.splice.as_mut().unwrap();
    let frame = std::future::poll_fn(|cx| Pin::new(&mut *splice).poll_frame(cx)).await.unwrap().unwrap();
    hop.lent.write(frame.into_data().unwrap());
    assert_eq!(hop.gateway.wrote().await.unwrap_err().code(), Code::Ok, "a one-shot tunnel ends");
    let frame = std::future::poll_fn(|cx| Pin::new(&mut *splice).poll_frame(cx)).await.unwrap().unwrap();
    assert_eq!(Status::from_headers(&frame.into_trailers().unwrap()).unwrap().code(), Code::Ok);
    hop.lent.end();
    hop.out = None;
    assert!(matches!(exchange.head().await.unwrap(), Head::Headers(_)));
    let (bytes, status) = answered(&mut exchange).await;
    assert_eq!((bytes, status.unwrap().code()), (message(b"early").into(), Code::Ok));
}

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
