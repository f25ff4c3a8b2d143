//! What a thousand bad connections cost the good requests: measured, not asserted.

use std::{
    net::{Ipv4Addr, SocketAddr},
    path::Path,
    pin::pin,
    time::Duration,
};

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
    measured,
    peer::{DATA, END_STREAM, PREFACE, Peer, SETTINGS, Way, frame},
    stage::{Door, HONEST, Kind, Knows, Stage, Times, Took},
};

/// Bad connections of each attack.
const CONNECTIONS: usize = 1_000;
/// How long good requests are measured before each attack.
const QUIET: Duration = Duration::from_secs(5);
/// How long each attack lasts.
const ATTACKED: Duration = Duration::from_secs(7);
/// The variable with the name of the only attack that is to be measured.
const ONLY: &str = "KAS_TEST_ONLY";

/// Where attackers come from. kas tells them from others by their address, as long as it knows nothing else
/// of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// Another address than the callers have, and another one each time.
    Elsewhere,
    /// Each connection from an address of its own.
    Everywhere,
    /// That of the callers.
    Callers,
}

/// Who is attacked from where.
type Front = (Door, Origin);

/// Prints a row of a table for each attack on each of `fronts`, and one for all of them.
pub(crate) async fn table(kind: Kind, fronts: &[Front]) -> Result<()> {
    println!(
        "| attack | door, from | rounds | good requests | p99 without, ms | p99 with, ms | factor | new ones without | \
         with | longest | echo without, ms | with | not counted | failed | most MiB more | MiB more after | \
         descriptors at most | after |"
    );
    println!("|{}", " --- |".repeat(18));
    let stage = Stage::start_measured(kind).await?;
    let only = std::env::var(ONLY).unwrap_or_default();
    let mut failures = 0;
    // Of each front, without and with.
    let mut all = vec![[Took::default(), Took::default()]; fronts.len()];
    for (name, attack) in http2::measured().filter(|(name, _)| only.is_empty() || *name == only) {
        for (front, [all_without, all_with]) in fronts.iter().zip(&mut all) {
            let (door, origin) = *front;
            if stage.door(door).is_none() {
                continue;
            }
            stage.times();
            // What is measured is what happens meanwhile.
            sleep(QUIET).await;
            let mut without = stage.take_whole_times().await?;
            stage.forget_peak();
            let begun = stage.kas.process.usage()?;
            let mut most = begun.files;
            let attackers = attackers(&stage, *front, name, attack).await?;
            let rounds = {
                let mut over = pin!(attackers.logged("how often they began", |line| line[ROUNDS].as_u64()));
                loop {
                    tokio::select! {
                        rounds = &mut over => break rounds?,
                        () = sleep(Duration::from_millis(200)) => most = most.max(stage.kas.process.usage()?.files),
                    }
                }
            };
            let mut with = stage.take_whole_times().await?;
            let (peak, _) = stage.memory();
            let failed = stage.take_failures();
            let stalls = [without.forget_stalls(), with.forget_stalls()];
            let settled = stage.settled(name).await;
            let after = stage.kas.process.usage()?;
            all_without.extend(&without);
            all_with.extend(&with);
            let echo = [&without, &with].map(|took| millis(Times::of(&took.aside).p99));
            let fresh = [&without, &with].map(|took| millis(Times::of(&took.fresh).p99));
            let longest =
                with.kept.iter().chain(&with.fresh).map(|(_, took)| *took).max().unwrap_or_default();
            let [without, with] = [without, with].map(|took| took.all());
            ensure!(
                without.requests > 0 && with.requests > 0,
                "{name} at {door:?}: no good request was counted"
            );
            println!(
                "| {name} | {door:?}, {origin:?} | {rounds} | {} | {:.1} | {:.1} | {:.2} | {:.1} | {:.1} | {:.0} | \
                 {:.2} | {:.2} | {}, {} | {} | {} | {} | {most} | {} (before {}) |",
                with.requests,
                millis(without.p99),
                millis(with.p99),
                factor(without.p99, with.p99),
                fresh[0],
                fresh[1],
                millis(longest),
                echo[0],
                echo[1],
                stalls[0],
                stalls[1],
                failed.len(),
                peak.saturating_sub(begun.resident_kib) / 1024,
                after.resident_kib.saturating_sub(begun.resident_kib) / 1024,
                after.files,
                begun.files,
            );
            for failure in failed.into_iter().chain(settled.err().map(|error| format!("{error:#}"))) {
                println!("{name} at {door:?}: {failure}");
                failures += 1;
            }
        }
    }
    println!(
        "| door, from | which | good requests without | with | p50 without, ms | with | p99 without, ms | with | factor |"
    );
    println!("|{}", " --- |".repeat(9));
    for ((door, origin), [without, with]) in fronts.iter().zip(all) {
        let fresh = [&without, &with].map(|took| Times::of(&took.fresh));
        let kept = [&without, &with].map(|took| Times::of(&took.kept));
        let together = [&without, &with].map(Took::all);
        for (which, [without, with]) in [("all", together), ("kept", kept), ("fresh", fresh)] {
            println!(
                "| {door:?}, {origin:?} | {which} | {} | {} | {:.2} | {:.2} | {:.1} | {:.1} | {:.2} |",
                without.requests,
                with.requests,
                millis(without.p50),
                millis(with.p50),
                millis(without.p99),
                millis(with.p99),
                factor(without.p99, with.p99),
            );
        }
    }
    ensure!(failures == 0, "{failures} failures, see above");
    Ok(())
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

fn factor(without: Duration, with: Duration) -> f64 {
    with.as_secs_f64() / without.as_secs_f64()
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

/// Attacks from a process of their own; returns it. It says how often all of them began.
async fn attackers(stage: &Stage, (door, origin): Front, name: &str, attack: &Attack) -> Result<Process> {
    let (address, _) = stage.door(door).context("the stage has this door")?;
    let token = attack.inside.then(|| stage.credential(door));
    let told = json!({
        "address": address,
        "door": format!("{door:?}"),
        "origin": format!("{origin:?}"),
        "attack": name,
        "token": token,
        "ca": stage.ca(),
    });
    let test = std::env::current_exe()?;
    let test = test.to_str().context("the path of the test is UTF-8")?;
    let [program, placed @ ..] = measured::AS_ATTACKERS;
    let runs = [test, "--ignored", "--nocapture", "--exact", "process_of_the_attackers"];
    let arguments = [&placed[..], &runs].concat();
    Process::start("attackers", Path::new(program), &arguments, &[(ATTACK, &told.to_string())]).await
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
            net::tls::install();
            Way::Tls(net::tls::client_of(Path::new(said("ca")?), None, None)?)
        }
        Door::AgentWebSocket => Way::WebSocket,
        _ => Way::Plain,
    };
    let (_, attack) =
        http2::measured().find(|(name, _)| told["attack"] == *name).context("no such attack")?;
    let knows = Knows::with(door, told["token"].as_str().map(str::to_owned));
    let origin = said("origin")?.to_owned();
    let from = move |round: usize, connection: usize| match &*origin {
        "Elsewhere" => Some(Ipv4Addr::new(127, 0, 1, (round % 250) as u8 + 1)),
        "Everywhere" => {
            Some(Ipv4Addr::new(127, 1, (connection / 250 % 250) as u8, (connection % 250) as u8 + 1))
        }
        _ => None,
    };
    let address = said("address")?.parse()?;
    let (rounds, unmade) = http2::crowd(address, from, &way, &knows, attack, CONNECTIONS, ATTACKED).await;
    if let Some(error) = unmade {
        eprintln!("{}", json!({ "message": "a connection was not made", "error": error }));
    }
    eprintln!("{}", json!({ ROUNDS: rounds }));
    Ok(())
}

/// What the process of the attackers says at its end.
const ROUNDS: &str = "rounds";
