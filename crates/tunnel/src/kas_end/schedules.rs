//! A request in a tunnel, in every order in which the tasks of both streams and the agent run.
//!
//! In konnectivity two tasks wrote to one response at a time. Here both streams share the tunnel, and what
//! they share is behind its lock.

use std::{
    future::poll_fn,
    pin::Pin,
    sync::atomic::{AtomicBool, Ordering},
};

use bytes::{BufMut as _, BytesMut};
use grpc::{Code, testing::Pipe};
use http_body::Body as _;
use ids::{AgentId, TokenHash};
use museum::{
    schedule::{block_on, explore, give_way, point, spawn},
    sync::{AtomicUsize, Notify},
};

use super::*;
use crate::{
    features::Features,
    flaw::{Flaw, must_fail_with},
    frame::{self, Decoder, response},
};

/// Notes what becomes of the tunnel.
#[derive(Default)]
struct Pool {
    parked: Notify,
    ends: AtomicUsize,
}

impl TunnelPool for Pool {
    fn parked(&self, _: &Arc<Tunnel>) {
        self.parked.notify_one();
    }

    fn ended(&self, _: &Arc<Tunnel>, _: bool) {
        self.ends.fetch_add(1, Ordering::Relaxed);
        self.parked.notify_one();
    }
}

/// A tunnel, and the agent at its other end.
struct Room {
    tunnel: Arc<Tunnel>,
    pool: Arc<Pool>,
    agent: Pipe,
    body: TunnelBody,
}

impl Room {
    fn new() -> Self {
        let info = Info {
            agent: AgentId::new(3).unwrap(),
            instance: 1,
            token: TokenHash::of(b"t"),
            kind: AgentKind::Ours,
            features: Features::NONE,
            version: None,
            descriptor: Arc::default(),
        };
        let (agent, pool) = (Pipe::default(), Arc::<Pool>::default());
        let reset = {
            let agent = agent.clone();
            // HTTP/2 resets both directions.
            Box::new(move || agent.reset())
        };
        let opening = Opening::new(agent.body(), false);
        let (tunnel, body) = Tunnel::new(info, opening, Arc::clone(&pool) as Arc<dyn TunnelPool>, reset);
        Self { tunnel, pool, agent, body }
    }
}

/// The agent: answers each request with its number, one frame at a time, until its stream ends.
///
/// Returns how many requests it has answered. `cut`: HTTP/2 drops the stream when that is set, whatever the
/// tunnel does.
async fn agent(mut body: TunnelBody, agent: Pipe, cut: Arc<Cut>) -> u32 {
    let (mut decoder, mut answered) = (Decoder::of_kas(false), 0);
    while let Some(Some(Ok(frame))) = cut.race(poll_fn(|cx| Pin::new(&mut body).poll_frame(cx))).await {
        let Ok(data) = frame.into_data() else { return answered };
        decoder.push(data);
        while let Some(event) = decoder.next().unwrap() {
            if matches!(event, Event::Control { field: response::CLOSE_SEND, .. }) {
                answered += 1;
                for part in answer(answered) {
                    point();
                    agent.write(part);
                }
            }
        }
    }
    drop(body);
    answered
}

/// Ends a stream at any time.
#[derive(Default)]
struct Cut {
    is_cut: AtomicBool,
    waker: futures_util::task::AtomicWaker,
}

impl Cut {
    fn cut(&self) {
        self.is_cut.store(true, Ordering::Relaxed);
        self.waker.wake();
    }

    /// Returns `None` if the stream is cut first.
    async fn race<T>(&self, future: impl Future<Output = T>) -> Option<T> {
        let mut future = std::pin::pin!(future);
        poll_fn(|cx| {
            self.waker.register(cx.waker());
            if self.is_cut.load(Ordering::Relaxed) {
                return Poll::Ready(None);
            }
            future.as_mut().poll(cx).map(Some)
        })
        .await
    }
}

/// The answer to the request with this number.
fn answer(number: u32) -> Vec<Bytes> {
    let (mut header, mut message, mut trailer) = (BytesMut::new(), BytesMut::new(), BytesMut::new());
    frame::put_control(request::HEADER, &[], &mut header);
    let text = number.to_string();
    frame::put_message_head(request::MESSAGE, u32::try_from(text.len()).unwrap(), &mut message);
    message.put_slice(text.as_bytes());
    frame::put_control(request::TRAILER, &[], &mut trailer);
    // The payload in a frame of its own.
    let payload = message.split_off(message.len() - text.len());
    [header, message, payload, trailer].map(BytesMut::freeze).into()
}

fn job() -> Job {
    let mut request_info = BytesMut::new();
    frame::put_control(response::REQUEST_INFO, &[], &mut request_info);
    Job::new(request_info.freeze(), grpc::full(Bytes::new()))
}

/// What a caller got: the messages' bytes, and the code at the end. `None`: it failed before the headers.
async fn call(mut exchange: Exchange) -> Option<(Vec<u8>, Code)> {
    match exchange.head().await {
        Ok(Head::Headers(_)) => {}
        Ok(Head::Only(_, status)) => return Some((Vec::new(), status.code())),
        Err(_) => return None,
    }
    let mut got = Vec::new();
    loop {
        let frame = poll_fn(|cx| Pin::new(&mut exchange).poll_frame(cx)).await;
        let frame = frame.expect("trailers come first").expect("no error");
        match frame.into_data() {
            Ok(data) => got.extend_from_slice(&data),
            Err(frame) => {
                let trailers = frame.into_trailers().expect("data or trailers");
                return Some((got, Status::from_headers(&trailers).expect("a status").code()));
            }
        }
    }
}

/// A complete answer.
fn complete(number: u32) -> (Vec<u8>, Code) {
    let text = number.to_string();
    let mut bytes = grpc::prefix(u32::try_from(text.len()).unwrap()).to_vec();
    bytes.extend_from_slice(text.as_bytes());
    (bytes, Code::Ok)
}

/// Two requests, one after the other: each gets its own answer, whole and in order.
#[test]
fn schedules_of_two_requests_in_one_tunnel() {
    fn run() {
        explore(|| {
            let Room { tunnel, pool, agent: pipe, body } = Room::new();
            let cut = Arc::<Cut>::default();
            let agent = spawn(agent(body, pipe, Arc::clone(&cut)));
            for number in 1..=2 {
                let exchange = tunnel.begin(job(), Deadline::NONE).expect("the tunnel is free");
                assert_eq!(block_on(call(exchange)), Some(complete(number)));
                block_on(pool.parked.notified());
            }
            cut.cut();
            assert_eq!(block_on(agent).unwrap(), 2);
            assert_eq!(pool.ends.load(Ordering::Relaxed), 1);
        });
    }
    run();
    must_fail_with(Flaw::WakeBeforeWrite, run);
}

/// HTTP/2 drops the agent's stream at any time: the caller gets the whole answer or is told otherwise, and is
/// never left waiting.
#[test]
fn schedules_of_a_response_and_a_lost_agent() {
    fn run() {
        explore(|| {
            let Room { tunnel, pool, agent: pipe, body } = Room::new();
            let cut = Arc::<Cut>::default();
            let agent = spawn(agent(body, pipe, Arc::clone(&cut)));
            let exchange = tunnel.begin(job(), Deadline::NONE).expect("the tunnel is free");
            let caller = spawn(call(exchange));
            point();
            cut.cut();
            let got = block_on(caller).unwrap();
            let whole = got.as_ref() == Some(&complete(1));
            assert!(whole || got.is_none_or(|(_, code)| code == Code::Unavailable), "part of an answer");
            block_on(agent).unwrap();
            assert_eq!(pool.ends.load(Ordering::Relaxed), 1);
        });
    }
    run();
    must_fail_with(Flaw::WakerAfterUnlock, run);
}

/// The caller leaves at any time: the tunnel is free again, or over.
#[test]
fn schedules_of_a_caller_that_leaves() {
    fn run() {
        explore(|| {
            let Room { tunnel, pool, agent: pipe, body } = Room::new();
            let (cut, left) = (Arc::<Cut>::default(), Arc::<Cut>::default());
            let agent = spawn(agent(body, pipe.clone(), Arc::clone(&cut)));
            let exchange = tunnel.begin(job(), Deadline::NONE).expect("the tunnel is free");
            let caller = {
                let left = Arc::clone(&left);
                spawn(async move { left.race(call(exchange)).await })
            };
            point();
            left.cut();
            block_on(caller).unwrap();
            while tunnel.idle_since().is_none() && !pipe.is_dropped() {
                give_way();
            }
            if tunnel.idle_since().is_some() {
                block_on(pool.parked.notified());
                let next = tunnel.begin(job(), Deadline::NONE).expect("the tunnel is free");
                let (text, code) = block_on(call(next)).expect("an answer");
                assert!(code == Code::Ok && text.len() == 6, "{text:?}");
            }
            // If the tunnel was reset, HTTP/2 drops the stream.
            cut.cut();
            block_on(agent).unwrap();
            assert_eq!(pool.ends.load(Ordering::Relaxed), 1);
        });
    }
    run();
    must_fail_with(Flaw::LeaverKeepsTunnel, run);
}
