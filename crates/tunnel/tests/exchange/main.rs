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

mod both_ends;
mod gitlab_replica;
mod kas_end;
mod replicas;

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
