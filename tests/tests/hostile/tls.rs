//! Data before or instead of a complete TLS handshake.

use std::{net::SocketAddr, time::Duration};

use anyhow::{Context as _, Result, ensure};
use futures_util::{StreamExt as _, future::try_join_all, stream};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpSocket, TcpStream},
};

use crate::{
    peer::{PREFACE, Peer, SETTINGS, frame},
    target::{Listener, Target},
};

/// A handshake may take 5 s.
const CUT: Duration = Duration::from_secs(20);
/// Concurrent stalled handshakes: below the 1,024 that kas allows in quiet times.
const HALF_OPEN: usize = 700;
/// Silent connections and stalled handshakes in total, and how many of them at once, which is more than that.
const FLOOD: usize = 10_000;
const AT_ONCE: usize = 2_000;
/// The time for a valid client between them, also on a busy machine.
const TURN: Duration = Duration::from_secs(20);

/// A record of TLS.
fn record(kind: u8, payload: &[u8]) -> Vec<u8> {
    let length = u16::try_from(payload.len()).unwrap().to_be_bytes();
    [&[kind, 3, 1], &length[..], payload].concat()
}

/// A ClientHello of TLS 1.2 without any usable cipher.
fn hello() -> Vec<u8> {
    let body = [&[3, 3][..], &[7; 32], &[0], &[0, 2, 0, 0x0a], &[1, 0]].concat();
    let length = u32::try_from(body.len()).unwrap().to_be_bytes();
    record(0x16, &[&[1][..], &length[1..], &body].concat())
}

fn rows() -> Vec<(&'static str, Vec<u8>)> {
    vec![
        ("nothing", Vec::new()),
        ("HTTP/2 without TLS", [PREFACE, &frame(SETTINGS, 0, 0, &[])].concat()),
        ("HTTP/1.1 without TLS", b"GET / HTTP/1.1\r\nHost: kas\r\n\r\n".to_vec()),
        ("garbage", vec![0xa5; 2_000]),
        ("zeros", vec![0; 2_000]),
        ("SSH", b"SSH-2.0-OpenSSH_9.9\r\n".to_vec()),
        ("half a record", record(0x16, &[1; 500])[..100].to_vec()),
        ("the head of a record alone", vec![0x16, 3, 1, 0x40, 0]),
        ("a record above the most", [&[0x16, 3, 1, 0xff, 0xff][..], &[1; 1_000]].concat()),
        ("a hello without ciphers", hello()),
        ("half a hello", hello()[..30].to_vec()),
        ("a hello that announces 16 MiB", record(0x16, &[1, 0xff, 0xff, 0xff, 3, 3])),
        (
            "a hello in a hundred records",
            hello()[5..].iter().flat_map(|byte| record(0x16, &[*byte])).collect(),
        ),
        ("data before the handshake", record(0x17, &[0; 1_000])),
        ("a change of ciphers first", record(0x14, &[1])),
        ("a thousand changes of ciphers", record(0x14, &[1]).repeat(1_000)),
        ("a thousand warnings", record(0x15, &[1, 0]).repeat(1_000)),
        ("empty records", record(0x16, &[]).repeat(1_000)),
        ("a heartbeat", record(0x18, &[1, 0xff, 0xff])),
    ]
}

async fn strike(address: SocketAddr, bytes: &[u8]) -> Result<()> {
    let mut stream = TcpStream::connect(address).await?;
    // kas may close the connection before all is sent.
    let _ = stream.write_all(bytes).await;
    let mut rest = Vec::new();
    let _ = tokio::time::timeout(CUT, stream.read_to_end(&mut rest)).await.context("it stays open")?;
    Ok(())
}

/// Runs every row of this file.
pub(crate) async fn all(target: &Target) -> Result<usize> {
    let (address, way) = target.listener(Listener::AgentTls).context("the listener is there")?;
    let rows = rows();
    let struck = rows
        .iter()
        .map(async |(name, bytes)| strike(address, bytes).await.with_context(|| (*name).to_owned()));
    try_join_all(struck).await?;
    let times = target.settle("TLS that is none").await?;
    println!("TLS that is none: {} rows; {times}", rows.len());

    // Many stalled handshakes: valid clients can still connect.
    let mut silent = Vec::new();
    for n in 0..HALF_OPEN {
        let mut stream = TcpStream::connect(address).await?;
        if n % 2 == 0 {
            stream.write_all(&hello()[..30]).await?;
        }
        silent.push(stream);
    }
    for _ in 0..10 {
        let mut peer = Peer::connect(address, &way).await.context("between half-open handshakes")?;
        peer.send(&[PREFACE, &frame(SETTINGS, 0, 0, &[])].concat(), CUT).await;
        peer.answers_ping(CUT).await?;
    }
    target.requests_succeed(50).await?;
    let closed = silent.into_iter().map(async |mut stream| {
        let mut rest = Vec::new();
        tokio::time::timeout(CUT, stream.read_to_end(&mut rest)).await.context("it stays open")
    });
    for closed in try_join_all(closed).await? {
        ensure!(
            closed.is_err() || closed.is_ok_and(|said| said < 100),
            "kas sends too much to an unauthenticated client"
        );
    }
    let times = target.settle("half-open handshakes").await?;
    println!("half-open handshakes: {HALF_OPEN}; {times}");
    flood(target, address).await?;
    Ok(rows.len() + 2)
}

/// Many more than kas allows in quiet times: new connections replace silent ones, which come from an unknown
/// address, and handshakes keep their places until their time is over.
async fn flood(target: &Target, address: SocketAddr) -> Result<()> {
    let (_, way) = target.listener(Listener::AgentTls).context("the listener is there")?;
    let half = &hello()[..30];
    let strangers = stream::iter(0..FLOOD).for_each_concurrent(AT_ONCE, async |n| {
        let is_silent = n % 2 == 0;
        let Ok(mut stream) = connect(address, is_silent).await else { return };
        if !is_silent {
            let _ = stream.write_all(half).await;
        }
        // Until kas closes it, or its time is over.
        let _ = tokio::time::timeout(CUT, stream.read_to_end(&mut Vec::new())).await;
    });
    let honest = async {
        let mut slowest = Duration::ZERO;
        for n in 0..5 {
            let begun = tokio::time::Instant::now();
            let spoke = async {
                let mut peer = Peer::connect(address, &way).await?;
                peer.send(&[PREFACE, &frame(SETTINGS, 0, 0, &[])].concat(), CUT).await;
                peer.answers_ping(CUT).await
            };
            tokio::time::timeout(TURN, spoke)
                .await
                .ok()
                .context("it does not get its turn")
                .flatten()
                .with_context(|| format!("agent {n} among {AT_ONCE} half-open handshakes"))?;
            slowest = slowest.max(begun.elapsed());
        }
        anyhow::Ok(slowest)
    };
    let ((), slowest) = tokio::join!(strangers, honest);
    let slowest = slowest?;
    let refused = async |reason: &str| {
        target.kas.metric(&format!("kas_refusals_total{{listener=\"Agent\",reason=\"{reason}\"}}")).await
    };
    let (evicted, late) = (refused("HalfOpen").await?, refused("Handshake").await?);
    let least = (FLOOD / 4) as f64;
    ensure!(evicted >= least && late >= least, "{evicted} of {FLOOD} lost their places, {late} were late");
    let times = target.settle("a flood of half-open handshakes").await?;
    println!(
        "a flood of half-open handshakes: {FLOOD}, {evicted} evicted, {late} late, an agent within {slowest:?}; {times}"
    );
    Ok(())
}

/// Connects from the usual address of this host, or from another one.
async fn connect(address: SocketAddr, from_another: bool) -> std::io::Result<TcpStream> {
    let socket = TcpSocket::new_v4()?;
    if from_another {
        socket.bind(([127, 0, 0, 2], 0).into())?;
    }
    socket.connect(address).await
}
