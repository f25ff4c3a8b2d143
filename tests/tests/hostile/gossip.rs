//! Datagrams from a sender without a key.

use std::net::UdpSocket;

use anyhow::{Context as _, Result, ensure};
use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};

use crate::target::{Listener, Target};

/// Datagrams of each kind.
const DATAGRAMS: usize = 3_000;

/// A kind of datagrams: its name, and what makes one.
type DatagramKind = (&'static str, fn(&mut StdRng) -> Vec<u8>);

/// Returns the datagrams; the seed makes them the same each time.
fn kinds() -> Vec<DatagramKind> {
    fn noise(rng: &mut StdRng, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        rng.fill(&mut bytes[..]);
        bytes
    }
    vec![
        ("nothing", |_| Vec::new()),
        ("one byte", |rng| noise(rng, 1)),
        ("noise", |rng| noise(rng, 1_000)),
        ("noise of the largest size", |rng| noise(rng, 60_000)),
        ("zeros", |_| vec![0; 1_200]),
        ("a beginning that looks right", |rng| [&[1, 0, 0, 0][..], &noise(rng, 1_200)].concat()),
        ("zstd that is a bomb", |rng| [&[0x28, 0xb5, 0x2f, 0xfd][..], &noise(rng, 500)].concat()),
    ]
}

/// Sends every kind.
pub(crate) async fn all(target: &Target) -> Result<usize> {
    let (address, _) = target.listener(Listener::Private).context("the listener is there")?;
    let kinds = kinds();
    let count = kinds.len();
    tokio::task::spawn_blocking(move || {
        let socket = UdpSocket::bind("127.0.0.1:0")?;
        let mut rng = StdRng::seed_from_u64(44);
        for (_, kind) in kinds {
            for _ in 0..DATAGRAMS {
                // kas does not see datagrams that the system drops.
                let _ = socket.send_to(&kind(&mut rng), address);
            }
        }
        anyhow::Ok(())
    })
    .await??;
    let dropped = testkit::kas::eventually("datagrams are counted as dropped", async || {
        let (_, metrics) = target.kas.get("/metrics").await?;
        let dropped: f64 = metrics
            .lines()
            .filter(|line| line.starts_with("kas_gossip_datagrams_dropped{"))
            .filter_map(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok())
            .sum();
        Ok(if dropped >= 100.0 { Ok(dropped) } else { Err(dropped) })
    })
    .await?;
    let times = target.settle("datagrams").await?;
    println!("datagrams: {count} kinds, {dropped} dropped at the last look; {times}");
    ensure!(target.kas.metric("kas_replicas_live").await? == 1.0, "a datagram made a replica");
    Ok(count)
}
