//! No leaks: ten thousand requests through real kas and real agentk, of which half are abandoned.
//!
//! `LEAKS_SEED` repeats a run: the requests and the moment at which each is abandoned, but not their
//! interleaving.

#![allow(clippy::unwrap_used)] // a test may panic

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use bytes::Bytes;
use grpc::Code;
use proto::kas::bench::v1::{DownloadRequest, HoldRequest, Payload, UploadResponse};
use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};
use serde_json::json;
use testkit::{
    agentk::Agentk,
    bench,
    caller::{Answer, Caller, Jwt, answer, now},
    kas::{Kas, eventually, token},
    link::{Next, Stream},
    process::{Process, Usage, soon},
};
use tokio::{
    task::JoinSet,
    time::{MissedTickBehavior, interval, sleep, timeout},
};

const REQUESTS: u64 = 10_000;
/// Enough for every buffer and queue to reach its largest size at this concurrency.
const WARM_UP: u64 = 2_000;
const CONNECTIONS: usize = 4;
/// Concurrent requests on each connection.
const CONCURRENCY: usize = 16;
/// Tolerated growth: allocators keep some freed memory.
const GROWTH_KIB: u64 = 20 * 1024;

/// One call of `kas.bench.v1.Bench`.
#[derive(Clone, Copy, Debug)]
enum Call {
    Echo { size: usize },
    Download { messages: u64, size: u32 },
    Upload { messages: u64, size: usize },
    Hold,
}

/// When a request is abandoned.
#[derive(Clone, Copy, Debug)]
enum Moment {
    /// After its headers.
    Opened,
    /// Inside its body.
    HalfSent,
    /// After all of it was sent.
    Sent,
    /// This time after the first message of the response.
    Answered(Duration),
    /// This time after its start, unless it is over.
    After(Duration),
}

#[derive(Debug, Default)]
struct Counts {
    completed: AtomicU64,
    given_up: AtomicU64,
    silent: AtomicU64,
}

impl Call {
    fn random(rng: &mut StdRng) -> Self {
        match rng.random_range(0..3) {
            0 => Self::Echo { size: rng.random_range(0..8_000) },
            1 => Self::Download { messages: rng.random_range(0..6), size: rng.random_range(0..3_000) },
            _ => Self::Upload { messages: rng.random_range(0..6), size: rng.random_range(0..3_000) },
        }
    }

    fn method(self) -> &'static str {
        match self {
            Self::Echo { .. } => bench::ECHO,
            Self::Download { .. } => "/kas.bench.v1.Bench/Download",
            Self::Upload { .. } => "/kas.bench.v1.Bench/Upload",
            Self::Hold => "/kas.bench.v1.Bench/Hold",
        }
    }

    /// Returns the request body, with all of its frames.
    fn body(self) -> Bytes {
        match self {
            Self::Echo { size } => payload(size),
            Self::Download { messages, size } => grpc::encode(&DownloadRequest { messages, size }),
            Self::Upload { messages, size } => payload(size).repeat(messages as usize).into(),
            Self::Hold => grpc::encode(&HoldRequest {}),
        }
    }

    /// Checks that this is the complete and correct response.
    fn check(self, got: &Answer) -> Result<()> {
        ensure!(got.status.code() == Code::Ok, "{self:?}: {}", got.status);
        let right = match self {
            Self::Echo { size } => got.messages == [payload(size).slice(grpc::PREFIX_LEN..)],
            Self::Download { messages, size } => {
                got.messages.len() as u64 == messages
                    && got.messages.iter().all(|got| *got == payload(size as usize)[grpc::PREFIX_LEN..])
            }
            Self::Upload { messages, size } => {
                let bytes = messages * (payload(size).len() - grpc::PREFIX_LEN) as u64;
                got.one::<UploadResponse>()? == UploadResponse { messages, bytes }
            }
            Self::Hold => false,
        };
        ensure!(right, "{self:?}: the answer is another's, or part of one: {} messages", got.messages.len());
        Ok(())
    }
}

fn payload(size: usize) -> Bytes {
    grpc::encode(&Payload { data: vec![b'x'; size].into() })
}

async fn open(caller: &Caller, call: Call) -> Result<Stream> {
    caller.open(caller.to_agent(1, call.method())).await
}

/// Sends these parts of a request's body.
async fn send(stream: &mut Stream, body: Bytes, all: bool) -> Result<()> {
    stream.send(body).await.map_err(|reason| anyhow::anyhow!("reset while sending: {reason:?}"))?;
    if all {
        stream.half_close().map_err(|reason| anyhow::anyhow!("reset while sending: {reason:?}"))?;
    }
    Ok(())
}

/// Sends a request and checks the whole answer.
async fn complete(caller: &Caller, call: Call) -> Result<()> {
    let mut stream = open(caller, call).await?;
    send(&mut stream, call.body(), true).await?;
    call.check(&answer(&mut stream).await?)
}

/// Sends a request and abandons it. Returns whether its handler was silent by then. An end that the caller
/// did not cause is an error.
async fn give_up(caller: &Caller, call: Call, moment: Moment) -> Result<bool> {
    if let Moment::After(delay) = moment {
        // Dropped in whatever state it is.
        timeout(delay, complete(caller, call)).await.unwrap_or(Ok(()))?;
        return Ok(false);
    }
    let body = call.body();
    let mut stream = open(caller, call).await?;
    match moment {
        Moment::Opened | Moment::After(_) => Ok(false),
        Moment::HalfSent => {
            send(&mut stream, body.slice(..body.len() / 2), false).await?;
            Ok(false)
        }
        Moment::Sent => {
            send(&mut stream, body, true).await?;
            Ok(false)
        }
        Moment::Answered(delay) => {
            send(&mut stream, body, true).await?;
            let first = stream.next().await;
            ensure!(matches!(first, Next::Message(_) | Next::Trailers(_)), "{first:?}");
            sleep(delay).await;
            Ok(matches!(call, Call::Hold))
        }
    }
}

/// Sends one request: even ones are completed, odd ones are abandoned.
async fn request(caller: &Caller, seed: u64, number: u64, counts: &Counts) -> Result<()> {
    let mut rng = StdRng::seed_from_u64(seed.wrapping_add(number));
    if number.is_multiple_of(2) {
        let call = Call::random(&mut rng);
        complete(caller, call).await.with_context(|| format!("{call:?}"))?;
        counts.completed.fetch_add(1, Ordering::Relaxed);
        return Ok(());
    }
    let call = if rng.random_bool(0.4) { Call::Hold } else { Call::random(&mut rng) };
    let delay = Duration::from_micros(rng.random_range(0..8_000));
    let moment = match rng.random_range(0..6) {
        0 => Moment::Opened,
        1 => Moment::HalfSent,
        2 => Moment::Sent,
        3 | 4 => Moment::Answered(delay),
        _ => Moment::After(delay),
    };
    let silent = give_up(caller, call, moment).await.with_context(|| format!("{call:?}, {moment:?}"))?;
    counts.given_up.fetch_add(1, Ordering::Relaxed);
    counts.silent.fetch_add(silent.into(), Ordering::Relaxed);
    Ok(())
}

/// Sends this many requests over new connections, and closes them.
async fn load(kas: &Kas, seed: u64, requests: u64) -> Result<Arc<Counts>> {
    let counts = Arc::new(Counts::default());
    let next = Arc::new(AtomicU64::new(0));
    let mut workers = JoinSet::new();
    for _ in 0..CONNECTIONS {
        let caller = lasting_caller(kas).await?;
        for _ in 0..CONCURRENCY {
            let (caller, counts, next) = (caller.clone(), Arc::clone(&counts), Arc::clone(&next));
            workers.spawn(async move {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= requests {
                        return anyhow::Ok(());
                    }
                    request(&caller, seed, number, &counts)
                        .await
                        .with_context(|| format!("request {number}"))?;
                }
            });
        }
    }
    while let Some(worker) = workers.join_next().await {
        worker??;
    }
    Ok(counts)
}

/// Connects with a token that is valid for longer than this test.
async fn lasting_caller(kas: &Kas) -> Result<Caller> {
    let jwt = Jwt::new(&kas.secrets[0]).claim("exp", json!(now() + 3600)).encode();
    Caller::connect(kas.api, Some(jwt)).await
}

/// Calls the agent repeatedly until stopped; returns how often.
async fn observe(caller: Caller, stop: Arc<AtomicBool>) -> Result<u64> {
    let mut ticks = interval(Duration::from_millis(50));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
    let mut times = 0;
    while !stop.load(Ordering::Relaxed) {
        ticks.tick().await;
        complete(&caller, Call::Echo { size: 100 })
            .await
            .with_context(|| format!("observation {times} failed"))?;
        times += 1;
    }
    Ok(times)
}

async fn idle(kas: &Kas, agentk: &Agentk) -> Result<()> {
    kas.metric_is("kas_requests_open", 0.0).await?;
    kas.metric_is("kas_requests_waiting", 0.0).await?;
    agentk.metric_is("agentk_tunnels_busy", 0.0).await
}

/// Waits until a process holds no more than this.
async fn shrinks_to(what: &str, process: &Process, most: Usage) -> Result<Usage> {
    eventually(&format!("{what} holds at most {most:?}"), async || {
        let usage = process.usage()?;
        let fits = usage.files <= most.files && usage.resident_kib <= most.resident_kib;
        Ok(if fits { Ok(usage) } else { Err(usage) })
    })
    .await
}

/// konnectivity leaked goroutines, sockets and memory on abandoned dials (issue 255, and several since).
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cancelled_requests_leak_nothing() -> Result<()> {
    let seed: u64 = match std::env::var("LEAKS_SEED") {
        Ok(seed) => seed.parse()?,
        Err(_) => rand::random(),
    };
    println!("LEAKS_SEED={seed}");
    let kas = Kas::start().await?;
    let agentk = Agentk::start(kas.agent, &token(1)).await?;
    agentk.connected().await?;
    // The connections of earlier metrics requests are closed.
    sleep(Duration::from_millis(200)).await;
    let files = [kas.process.usage()?.files, agentk.process.usage()?.files];

    let stop = Arc::new(AtomicBool::new(false));
    let observer = tokio::spawn(observe(lasting_caller(&kas).await?, Arc::clone(&stop)));
    load(&kas, !seed, WARM_UP).await?;
    idle(&kas, &agentk).await?;
    let warm = [kas.process.usage()?, agentk.process.usage()?];

    let begun = tokio::time::Instant::now();
    let counts = load(&kas, seed, REQUESTS).await?;
    let took = begun.elapsed();
    stop.store(true, Ordering::Relaxed);
    let observations = soon("the observer ends", observer).await??;
    println!("{counts:?} in {took:?}, {observations} observations");
    assert_eq!(counts.completed.load(Ordering::Relaxed), REQUESTS / 2);
    assert_eq!(counts.given_up.load(Ordering::Relaxed), REQUESTS / 2);
    assert!(
        counts.silent.load(Ordering::Relaxed) > REQUESTS / 20,
        "many are abandoned while the handler is silent"
    );

    idle(&kas, &agentk).await?;
    for (n, (what, process)) in [("kas", &kas.process), ("agentk", &agentk.process)].into_iter().enumerate() {
        let most = Usage { files: files[n], resident_kib: warm[n].resident_kib + GROWTH_KIB };
        let now = shrinks_to(what, process, most).await?;
        println!("{what}: {} files before; {:?} when warm, {now:?} now", files[n], warm[n]);
    }
    assert_eq!(kas.metric("kas_tunnel_violations_total").await?, 0.0);
    Ok(())
}
