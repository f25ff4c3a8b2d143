//! Bugs of other projects. Each test must also fail with the corresponding flaw.

use super::*;
use crate::{
    flaw::{Flaw, active, must_fail_with},
    io::accept_errors,
};

/// Runs a test without and with a flaw, with which it must fail.
fn exhibit<F: Future<Output = ()>>(flaw: Flaw, test: impl Fn() -> F) {
    let run = || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(test());
    };
    run();
    must_fail_with(flaw, run);
}

/// Waits for what should happen soon. With a flaw it never does.
async fn soon<T>(what: &str, future: impl Future<Output = T>) -> T {
    let most = if active().is_some() { Duration::from_secs(2) } else { SOON };
    timeout(most, future).await.unwrap_or_else(|_| panic!("{what}: not within {most:?}"))
}

/// A time after which the server acts.
const SHORT: Duration = Duration::from_millis(100);

/// The client's half of a connection of HTTP/2 that has had one request.
type Half = hyper::client::conn::http2::Connection<TokioIo<TcpStream>, Empty<Bytes>, TokioExecutor>;
type Sender = hyper::client::conn::http2::SendRequest<Empty<Bytes>>;

fn request() -> Request<Empty<Bytes>> {
    Request::get("http://kas/").header(header::AUTHORIZATION, "x").body(Empty::new()).unwrap()
}

/// Connects, and sends one request.
async fn connect(server: &Running) -> (Half, Sender) {
    let stream = TokioIo::new(server.socket(b"").await);
    let (mut sender, mut half) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), stream).await.unwrap();
    let answer = async { sender.send_request(request()).await.unwrap().collect().await.unwrap() };
    tokio::select! {
        _ = answer => {}
        ended = &mut half => panic!("{ended:?}"),
    }
    (half, sender)
}

/// konnectivity 152: requests were routed to agents that were disconnected without a sign.
#[test]
fn half_open_agent_evicted() {
    async fn run() {
        let settings = Settings { keepalive_interval: SHORT, keepalive_timeout: SHORT, ..AGENT };
        let server = Running::start_as(Protocols::Http2, Limits::default(), None, settings, None).await;
        // The client's half runs only where it is polled here, unlike that of hyper.
        let (mut sender, mut half) = h2::client::handshake(server.socket(b"").await).await.unwrap();
        let (answer, _) = sender.send_request(request().map(|_| ()), true).unwrap();
        tokio::select! {
            answer = answer => assert_eq!(answer.unwrap().status(), StatusCode::OK),
            ended = &mut half => panic!("{ended:?}"),
        }
        // Its socket stays open, and nothing reads it any more: no PING is answered.
        let held = (sender, half);
        let evicted = async {
            while server.service.closed.load(Ordering::Relaxed) == 0 {
                tokio::time::sleep(SHORT / 10).await;
            }
        };
        soon("the connection is closed", evicted).await;
        drop(held);
    }
    exhibit(Flaw::NoKeepalive, run);
}

/// pingora 563: idle connections of HTTP/2 were never closed, until 32 GB were in use.
#[test]
fn idle_connections_reaped() {
    async fn run() {
        let limits = Limits { idle: SHORT, ..Limits::default() };
        let server = Running::start(Protocols::Http2, limits).await;
        let mut idle = Vec::new();
        for _ in 0..10 {
            idle.push(connect(&server).await);
        }
        for (half, sender) in idle {
            soon("it is asked to end, and ends", half).await.unwrap();
            drop(sender);
        }
        assert_eq!(server.service.refusals.lock().iter().filter(|why| **why == Refusal::Idle).count(), 10);
    }
    exhibit(Flaw::IdleStays, run);
}

/// tonic, CVE-2024-47609: an error of one connection ended the accept loop.
#[test]
fn accept_loop_survives_garbage_and_emfile() {
    const EMFILE: i32 = 24;
    const ENFILE: i32 = 23;
    const ECONNABORTED: i32 = 103;
    async fn run() {
        let server = Running::start(Protocols::Http1And2, Limits::default()).await;
        accept_errors::put(&[EMFILE, ENFILE, ECONNABORTED, EMFILE]);
        for garbage in [&b"\x16\x03\x01\xff\xff"[..], b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\ngarbage", b"\0", b""]
        {
            drop(server.socket(garbage).await);
        }
        let mut stream = server.socket(&get("/")).await;
        soon("it is served", until(&mut stream, "HTTP/1.1")).await;
        assert_eq!(accept_errors::left(), 0, "the listener has met all errors");
    }
    exhibit(Flaw::AcceptErrorEnds, run);
}

/// kas 138: a load balancer cut streams before kas had asked to end the connection.
///
/// The same with HAProxy is a test of `tests`, with this name.
#[test]
fn max_age_goaway_before_lb_cut() {
    async fn run() {
        let age = Some(Age { age: SHORT, grace: None });
        let server = Running::start_as(Protocols::Http2, Limits::default(), None, AGENT, age).await;
        let (half, sender) = connect(&server).await;
        soon("it is asked to end at its age, and ends", half).await.unwrap();
        drop(sender);
    }
    exhibit(Flaw::NeverOld, run);
}
