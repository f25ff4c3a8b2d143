//! What a thousand bad connections cost the good requests: measured, not asserted.

use std::{net::SocketAddr, path::Path, pin::pin, time::Duration};

use anyhow::{Context as _, Result, ensure};
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use serde_json::{Value, json};
use testkit::{
    kas::token,
    process::{Process, SOON},
    raw_agent::GET_CONFIGURATION,
};
use tokio::time::{Instant, sleep};

use crate::{
    http2::{self, Attack},
    peer::{DATA, END_STREAM, PREFACE, Peer, SETTINGS, Way, frame},
    stage::{Door, HONEST, Kind, Knows, Stage, Times},
};

/// Bad connections of each attack.
const CONNECTIONS: usize = 1_000;
/// How long good requests are measured before each attack.
const QUIET: Duration = Duration::from_secs(8);
/// How long each attack lasts.
const ATTACKED: Duration = Duration::from_secs(10);
/// The variable with the name of the only attack that is to be measured.
const ONLY: &str = "KAS_TEST_ONLY";

/// Prints a row of a table for each attack at each of `doors`, and one for all of them: one percent of a row is a handful
/// of requests.
pub(crate) async fn table(kind: Kind, doors: &[Door]) -> Result<()> {
    println!(
        "| attack | door | rounds | good requests | p99 without, ms | p99 with, ms | factor | most MiB more | \
         MiB more after | descriptors at most | after |"
    );
    println!("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |");
    let stage = Stage::start_apart(kind).await?;
    let only = std::env::var(ONLY).unwrap_or_default();
    // Of each door, without and with.
    let mut all = vec![[Vec::new(), Vec::new()]; doors.len()];
    for (name, attack) in http2::measured().filter(|(name, _)| only.is_empty() || *name == only) {
        for (door, [all_without, all_with]) in doors.iter().copied().zip(&mut all) {
            if stage.door(door).is_none() {
                continue;
            }
            stage.times();
            // What is measured is what happens meanwhile.
            sleep(QUIET).await;
            let without = stage.take_times();
            stage.forget_peak();
            let begun = stage.kas.process.usage()?;
            let mut most = begun.files;
            let attackers = attackers(&stage, door, name, attack).await?;
            let rounds = {
                let mut over = pin!(attackers.logged("how often they began", |line| line[ROUNDS].as_u64()));
                loop {
                    tokio::select! {
                        rounds = &mut over => break rounds?,
                        () = sleep(Duration::from_millis(200)) => most = most.max(stage.kas.process.usage()?.files),
                    }
                }
            };
            let with = stage.take_times();
            let (peak, _) = stage.memory();
            let settled = stage.settled(name).await;
            let after = stage.kas.process.usage()?;
            all_without.extend(&without);
            all_with.extend(&with);
            let [without, with] = [without, with].map(Times::of);
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
    println!(
        "| door | good requests without | with | p50 without, ms | with | p99 without, ms | with | factor |"
    );
    println!("| --- | --- | --- | --- | --- | --- | --- | --- |");
    for (door, times) in doors.iter().zip(all) {
        let [without, with] = times.map(Times::of);
        let millis = |time: Duration| time.as_secs_f64() * 1e3;
        println!(
            "| {door:?} | {} | {} | {:.2} | {:.2} | {:.1} | {:.1} | {:.2} |",
            without.requests,
            with.requests,
            millis(without.p50),
            millis(with.p50),
            millis(without.p99),
            millis(with.p99),
            with.p99.as_secs_f64() / without.p99.as_secs_f64(),
        );
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

/// The method and the token of an attack, for the process of the attackers.
const ATTACK: &str = "KAS_TEST_ATTACK";

/// Attacks from a process of their own that runs only when nobody else wants its processor; returns how often all of them
/// began. What attackers do themselves is not to be taken for what they do to kas, on a machine that has everybody: one
/// that is merely nice keeps a processor for milliseconds from who wakes up meanwhile, and a thread of this process would
/// hold locks that the good callers want.
async fn attackers(stage: &Stage, door: Door, name: &str, attack: &Attack) -> Result<Process> {
    let (address, _) = stage.door(door).context("the stage has this door")?;
    let token = attack.inside.then(|| stage.credential(door));
    let ca = stage.ca();
    let told =
        json!({ "address": address, "door": format!("{door:?}"), "attack": name, "token": token, "ca": ca });
    let test = std::env::current_exe()?;
    let test = test.to_str().context("the path of the test is UTF-8")?;
    let idle =
        ["--idle", "0", test, "--ignored", "--nocapture", "--exact", "attackers_in_a_process_of_their_own"];
    Process::start("attackers", Path::new("chrt"), &idle, &[(ATTACK, &told.to_string())]).await
}

/// Attacks as the environment says, and then says how often; without a word there, does nothing.
pub(crate) async fn attack() -> Result<()> {
    let Ok(told) = std::env::var(ATTACK) else { return Ok(()) };
    let told: Value = serde_json::from_str(&told)?;
    let said = |key: &str| told[key].as_str().with_context(|| format!("{ATTACK} says no {key}"));
    let door =
        Door::HTTP2.into_iter().find(|door| told["door"] == format!("{door:?}")).context("no such door")?;
    let way = match door {
        Door::AgentTls => {
            runtime::tls::install();
            Way::Tls(runtime::tls::client_of(Path::new(said("ca")?), None, None)?)
        }
        Door::AgentWebSocket => Way::WebSocket,
        _ => Way::Plain,
    };
    let (_, attack) =
        http2::measured().find(|(name, _)| told["attack"] == *name).context("no such attack")?;
    let knows = Knows::with(door, told["token"].as_str().map(str::to_owned));
    let rounds = http2::crowd(said("address")?.parse()?, &way, &knows, attack, CONNECTIONS, ATTACKED).await;
    eprintln!("{}", json!({ ROUNDS: rounds }));
    Ok(())
}

/// What the process of the attackers says at its end.
const ROUNDS: &str = "rounds";
