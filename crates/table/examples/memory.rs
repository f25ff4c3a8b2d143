//! Measures the memory of a table: `cargo run --release -p table --example memory [agents per replica]
//! [replicas]`.
//!
//! It fills one owner and the copies of all others through feeds, as in a cluster, and prints the memory (of
//! the sets, and of the process as the kernel counts it) and the times.

use std::time::Duration;

use cluster::ReplicaState;
use ids::{AgentId, ReplicaId};
use table::{Action, Epoch, Identity, Limits, Member, Message, Next, Owner, Table};
use tokio::time::Instant;

fn resident() -> u64 {
    let pages = std::fs::read_to_string("/proc/self/statm").ok();
    let pages = pages.and_then(|text| text.split(' ').nth(1)?.parse::<u64>().ok());
    pages.unwrap_or(0) * 4096
}

fn owner(replica: u64, agents: u64) -> Owner {
    let mut owner = Owner::new(Epoch(1));
    for i in 0..agents {
        // Ids have gaps, as in a database that several clusters share.
        if let Ok(agent) = AgentId::new((i * 10 + replica) as i64 + 1) {
            owner.insert(agent);
        }
    }
    owner
}

fn main() {
    let mut arguments = std::env::args().skip(1).filter_map(|argument| argument.parse::<u64>().ok());
    let agents = arguments.next().unwrap_or(200_000);
    let replicas = arguments.next().unwrap_or(5);

    let empty = resident();
    let _own = owner(0, agents);
    let own = resident();

    let now = Instant::now();
    let mut table = Table::new(ReplicaId::new("r0"), Limits::default(), now);
    let (mut took, mut bytes, mut peak) = (Duration::ZERO, 0, 0);
    for replica in 1..replicas {
        let (name, address) = (ReplicaId::new(&format!("r{replica}")), format!("r{replica}:1").into());
        let mut owner = owner(replica, agents);
        let identity = Identity { replica: name, epoch: Epoch(1), state: ReplicaState::Ready, address };
        let member = Member {
            replica: identity.replica.clone(),
            generation: 1,
            address: identity.address.clone(),
            state: ReplicaState::Ready,
            summary: Some(owner.summary()),
            changes: None,
            heard: now,
        };
        table.gossip(&[member], now);
        let dial = table.actions().into_iter().find_map(|action| match action {
            Action::Dial { stream, resume, .. } => Some((stream, resume)),
            _ => None,
        });
        let Some((stream, resume)) = dial else { continue };
        let mut feed = owner.feed(resume);
        let start = Instant::now();
        while let Next::Message(message) = feed.next(&mut owner, now) {
            if let Message::Chunk { ids, .. } = &message {
                bytes += ids.len();
            }
            table.message(stream, Some(identity.clone()), message, now);
        }
        took += start.elapsed();
        peak = peak.max(resident());
    }
    let full = resident();

    let start = Instant::now();
    let probes = 100_000u64;
    let found: usize = (0..probes)
        .filter_map(|i| AgentId::new((i * 97 % (agents * 10)) as i64 + 1).ok())
        .map(|agent| table.locate(agent, now).len())
        .sum();
    let probe = start.elapsed() / probes as u32;

    let views = table.replicas(now);
    let (count, heap) =
        views.iter().fold((0, 0), |(count, heap), view| (count + view.count, heap + view.heap_bytes));
    let each = heap as f64 / count.max(1) as f64;
    println!("foreign entries {count} in {} copies: {heap} bytes, {each:.1} each", views.len());
    println!("on the wire {bytes} bytes; sent, read and swapped in {took:?}");
    println!("locate {probe:?} ({found} candidates in {probes})");
    println!(
        "resident: empty {empty}, with own set {own}, with all copies {full} (peak {peak}, with the owners)"
    );
}
