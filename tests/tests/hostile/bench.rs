//! What a thousand bad connections cost the good requests: measured, not asserted.

use std::{net::SocketAddr, time::Duration};

use anyhow::{Context as _, Result, ensure};
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use testkit::{kas::token, process::SOON, raw_agent::GET_CONFIGURATION};
use tokio::{
    sync::oneshot,
    time::{Instant, sleep},
};

use crate::{
    http2::{self, Attack},
    peer::{DATA, END_STREAM, PREFACE, Peer, SETTINGS, Way, frame},
    stage::{Door, HONEST, Kind, Knows, Stage},
};

/// Bad connections of each attack.
const CONNECTIONS: usize = 1_000;
/// How long good requests are measured before each attack.
const QUIET: Duration = Duration::from_secs(3);
/// How long each attack lasts.
const ATTACKED: Duration = Duration::from_secs(8);
/// What the attackers' thread is to everybody else: what they do themselves is not to be taken for what they do to kas,
/// which has the same processors here.
const NICE: i32 = 19;

/// Prints a row of a table for each attack at each of `doors`.
pub(crate) async fn table(kind: Kind, doors: &[Door]) -> Result<()> {
    println!(
        "| attack | door | rounds | good requests | p99 without, ms | p99 with, ms | factor | most MiB more | \
         MiB more after | descriptors at most | after |"
    );
    println!("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |");
    let stage = Stage::start(kind).await?;
    for (name, attack) in http2::measured() {
        for door in doors.iter().copied() {
            let Some((address, way)) = stage.door(door) else { continue };
            stage.times();
            // What is measured is what happens meanwhile.
            sleep(QUIET).await;
            let without = stage.times();
            stage.forget_peak();
            let begun = stage.kas.process.usage()?;
            let mut most = begun.files;
            let mut over = attackers(address, way, Knows::new(&stage, door, attack.inside), attack)?;
            let rounds = loop {
                tokio::select! {
                    rounds = &mut over => break rounds.context("the attackers have panicked")?,
                    () = sleep(Duration::from_millis(200)) => most = most.max(stage.kas.process.usage()?.files),
                }
            };
            let with = stage.times();
            let (peak, _) = stage.memory();
            let settled = stage.settled(name).await;
            let after = stage.kas.process.usage()?;
            let factor = with.p99.as_secs_f64() / without.p99.as_secs_f64();
            println!(
                "| {name} | {door:?} | {rounds} | {} | {:.1} | {:.1} | {factor:.2} | {} | {} | {most} | {} (before {}) |",
                with.requests,
                without.p99.as_secs_f64() * 1e3,
                with.p99.as_secs_f64() * 1e3,
                peak.saturating_sub(begun.resident_kib) / 1024,
                after.resident_kib.saturating_sub(begun.resident_kib) / 1024,
                after.files,
                begun.files,
            );
            if let Err(error) = settled {
                println!("{name} at {door:?}: {error:#}");
            }
        }
    }
    Ok(())
}

/// Agents that mean well.
const AGENTS: usize = 1_000;
/// How often they connect, all at once.
const STORMS: usize = 5;

/// Prints how long it takes until a thousand agents that connect at once have an answer.
pub(crate) async fn storms(kind: Kind, door: Door) -> Result<()> {
    println!(
        "| door | all answered after, ms | half after, ms | good requests | p99 without, ms | p99 with, ms |"
    );
    println!("| --- | --- | --- | --- | --- | --- |");
    let stage = Stage::start(kind).await?;
    let (address, way) = stage.door(door).context("the stage has this door")?;
    for _ in 0..STORMS {
        stage.times();
        // What is measured is what happens meanwhile.
        sleep(QUIET).await;
        let without = stage.times();
        let begun = Instant::now();
        let (mut peers, mut times) = (Vec::new(), Vec::new());
        let mut connected = stream::iter(HONEST.cycle().take(AGENTS))
            .map(|agent| connect(address, &way, agent))
            .buffer_unordered(AGENTS);
        while let Some(peer) = connected.try_next().await? {
            peers.push(peer);
            times.push(begun.elapsed());
        }
        let with = stage.times();
        ensure!(times.len() == AGENTS, "{} of {AGENTS} agents are connected", times.len());
        println!(
            "| {door:?} | {:.0} | {:.0} | {} | {:.1} | {:.1} |",
            times[AGENTS - 1].as_secs_f64() * 1e3,
            times[AGENTS / 2].as_secs_f64() * 1e3,
            with.requests,
            without.p99.as_secs_f64() * 1e3,
            with.p99.as_secs_f64() * 1e3,
        );
        drop(peers);
        stage.settled("agents that connect").await?;
    }
    Ok(())
}

/// Connects as an agent, up to the first answer.
async fn connect(address: SocketAddr, way: &Way, agent: i64) -> Result<Peer> {
    let mut peer = Peer::connect(address, way).await?;
    let headers = Knows::of(GET_CONFIGURATION, &token(agent)).open(1);
    let message = frame(DATA, END_STREAM, 1, &[0; 5]);
    let begins = [PREFACE, &frame(SETTINGS, 0, 0, &[]), &headers, &message].concat();
    ensure!(peer.send(&begins, SOON).await, "kas did not take what agent {agent} says");
    let heard = peer.hears(SOON, |heard| heard.over || heard.answered.contains(&1)).await?;
    ensure!(!heard.over, "agent {agent} was not let in: {heard:?}");
    Ok(peer)
}

/// Attacks from a thread of their own that yields to everybody, and then says how often all of them began.
fn attackers(
    address: SocketAddr,
    way: Way,
    knows: Knows,
    attack: &'static Attack,
) -> Result<oneshot::Receiver<usize>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let (tell, over) = oneshot::channel();
    std::thread::Builder::new().name("attackers".to_owned()).spawn(move || {
        // On Linux of the calling thread alone. It is always allowed to ask for less.
        rustix::process::nice(NICE).expect("a thread may be nicer");
        let rounds = runtime.block_on(http2::crowd(address, &way, &knows, attack, CONNECTIONS, ATTACKED));
        // Nobody waits any more: then the measurement has failed for another reason.
        let _ = tell.send(rounds);
    })?;
    Ok(over)
}
