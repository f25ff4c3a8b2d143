//! How much a thousand hostile connections slow down valid requests: measured, not asserted.

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
    target::{HONEST, Kind, Listener, RequestTemplate, Target, Times, Took},
};

/// Hostile connections of each attack.
const CONNECTIONS: usize = 1_000;
/// How long valid requests are measured before each attack.
const QUIET: Duration = Duration::from_secs(5);
/// How long each attack lasts.
const ATTACKED: Duration = Duration::from_secs(7);
/// The variable that selects a single attack by name.
const ONLY: &str = "KAS_TEST_ONLY";

/// The source addresses of attackers. Before authentication, kas can only distinguish connections by address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// Another address than that of the callers, and a new one for each round.
    Elsewhere,
    /// A separate address for each connection.
    Everywhere,
    /// The address of the callers.
    Callers,
}

/// The attacked listener and the source addresses.
type Front = (Listener, Origin);

/// Prints a table row for each attack on each of `fronts`, and one for all of them.
pub(crate) async fn table(kind: Kind, fronts: &[Front]) -> Result<()> {
    println!(
        "| attack | listener, from | rounds | good requests | p99 without, ms | p99 with, ms | factor | new ones without | \
         with | longest | echo without, ms | with | not counted | failed | most MiB more | MiB more after | \
         descriptors at most | after |"
    );
    println!("|{}", " --- |".repeat(18));
    let target = Target::start_measured(kind).await?;
    let only = std::env::var(ONLY).unwrap_or_default();
    let mut failures = 0;
    // For each front, without and with attackers.
    let mut all = vec![[Took::default(), Took::default()]; fronts.len()];
    for (name, attack) in http2::measured().filter(|(name, _)| only.is_empty() || *name == only) {
        for (front, [all_without, all_with]) in fronts.iter().zip(&mut all) {
            let (listener, origin) = *front;
            if target.listener(listener).is_none() {
                continue;
            }
            target.times();
            // What is measured is what happens meanwhile.
            sleep(QUIET).await;
            let mut without = target.take_whole_times().await?;
            target.forget_peak();
            let begun = target.kas.process.usage()?;
            let mut most = begun.files;
            let attackers = attackers(&target, *front, name, attack).await?;
            let rounds = {
                let mut over = pin!(attackers.logged("how often they began", |line| line[ROUNDS].as_u64()));
                loop {
                    tokio::select! {
                        rounds = &mut over => break rounds?,
                        () = sleep(Duration::from_millis(200)) => most = most.max(target.kas.process.usage()?.files),
                    }
                }
            };
            let mut with = target.take_whole_times().await?;
            let (peak, _) = target.memory();
            let failed = target.take_failures();
            let stalls = [without.discard_stalled(), with.discard_stalled()];
            let settled = target.settled(name).await;
            let after = target.kas.process.usage()?;
            all_without.extend(&without);
            all_with.extend(&with);
            let echo = [&without, &with].map(|took| millis(Times::of(&took.aside).p99));
            let fresh = [&without, &with].map(|took| millis(Times::of(&took.fresh).p99));
            let longest =
                with.kept.iter().chain(&with.fresh).map(|(_, took)| *took).max().unwrap_or_default();
            let [without, with] = [without, with].map(|took| took.all());
            ensure!(
                without.requests > 0 && with.requests > 0,
                "{name} at {listener:?}: no good request was counted"
            );
            println!(
                "| {name} | {listener:?}, {origin:?} | {rounds} | {} | {:.1} | {:.1} | {:.2} | {:.1} | {:.1} | {:.0} | \
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
                println!("{name} at {listener:?}: {failure}");
                failures += 1;
            }
        }
    }
    println!(
        "| listener, from | which | good requests without | with | p50 without, ms | with | p99 without, ms | with | factor |"
    );
    println!("|{}", " --- |".repeat(9));
    for ((listener, origin), [without, with]) in fronts.iter().zip(all) {
        let fresh = [&without, &with].map(|took| Times::of(&took.fresh));
        let kept = [&without, &with].map(|took| Times::of(&took.kept));
        let together = [&without, &with].map(Took::all);
        for (which, [without, with]) in [("all", together), ("kept", kept), ("fresh", fresh)] {
            println!(
                "| {listener:?}, {origin:?} | {which} | {} | {} | {:.2} | {:.2} | {:.1} | {:.1} | {:.2} |",
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

/// Number of valid agents.
const AGENTS: usize = 1_000;
/// Number of rounds in which all of them connect at once.
const STORMS: usize = 5;

/// Prints how long it takes until a thousand agents that connect at once have a response.
pub(crate) async fn storms(kind: Kind, listener: Listener) -> Result<()> {
    println!(
        "| listener | all answered after, ms | half after, ms | good requests | p99 without, ms | p99 with, ms |"
    );
    println!("| --- | --- | --- | --- | --- | --- |");
    let target = Target::start(kind).await?;
    let (address, way) = target.listener(listener).context("the target has this listener")?;
    for _ in 0..STORMS {
        target.times();
        // What is measured is what happens meanwhile.
        sleep(QUIET).await;
        let without = target.times();
        let begun = Instant::now();
        let (mut peers, mut times) = (Vec::new(), Vec::new());
        let mut connected = stream::iter(HONEST.cycle().take(AGENTS))
            .map(|agent| connect(address, &way, agent))
            .buffer_unordered(AGENTS);
        while let Some(peer) = connected.try_next().await? {
            peers.push(peer);
            times.push(begun.elapsed());
        }
        let with = target.times();
        ensure!(times.len() == AGENTS, "{} of {AGENTS} agents are connected", times.len());
        println!(
            "| {listener:?} | {:.0} | {:.0} | {} | {:.1} | {:.1} |",
            times[AGENTS - 1].as_secs_f64() * 1e3,
            times[AGENTS / 2].as_secs_f64() * 1e3,
            with.requests,
            without.p99.as_secs_f64() * 1e3,
            with.p99.as_secs_f64() * 1e3,
        );
        drop(peers);
        target.settled("agents that connect").await?;
    }
    Ok(())
}

/// Connects as an agent, until the first response.
async fn connect(address: SocketAddr, way: &Way, agent: i64) -> Result<Peer> {
    let mut peer = Peer::connect(address, way).await?;
    let headers = RequestTemplate::of(GET_CONFIGURATION, &token(agent)).open(1);
    let message = frame(DATA, END_STREAM, 1, &[0; 5]);
    let begins = [PREFACE, &frame(SETTINGS, 0, 0, &[]), &headers, &message].concat();
    ensure!(peer.send(&begins, SOON).await, "kas did not take what agent {agent} says");
    let heard = peer.hears(SOON, |heard| heard.over || heard.answered.contains(&1)).await?;
    ensure!(!heard.over, "agent {agent} was not let in: {heard:?}");
    Ok(peer)
}

/// The environment variable with the parameters of an attack, for the process of the attackers.
const ATTACK: &str = "KAS_TEST_ATTACK";

/// Starts the attackers in a separate process and returns it. The process prints the number of rounds.
async fn attackers(
    target: &Target,
    (listener, origin): Front,
    name: &str,
    attack: &Attack,
) -> Result<Process> {
    let (address, _) = target.listener(listener).context("the target has this listener")?;
    let token = attack.inside.then(|| target.credential(listener));
    let told = json!({
        "address": address,
        "listener": format!("{listener:?}"),
        "origin": format!("{origin:?}"),
        "attack": name,
        "token": token,
        "ca": target.ca(),
    });
    let test = std::env::current_exe()?;
    let test = test.to_str().context("the path of the test is UTF-8")?;
    let [program, placed @ ..] = measured::AS_ATTACKERS;
    let runs = [test, "--ignored", "--nocapture", "--exact", "process_of_the_attackers"];
    let arguments = [&placed[..], &runs].concat();
    Process::start("attackers", Path::new(program), &arguments, &[(ATTACK, &told.to_string())]).await
}

/// Runs the attack that the environment describes and prints the number of rounds; without one, does nothing.
pub(crate) async fn attack() -> Result<()> {
    let Ok(told) = std::env::var(ATTACK) else { return Ok(()) };
    let told: Value = serde_json::from_str(&told)?;
    let said = |key: &str| told[key].as_str().with_context(|| format!("{ATTACK} says no {key}"));
    let listener = Listener::HTTP2
        .into_iter()
        .find(|listener| told["listener"] == format!("{listener:?}"))
        .context("no such listener")?;
    let way = match listener {
        Listener::AgentTls => {
            net::tls::install();
            Way::Tls(net::tls::client_of(Path::new(said("ca")?), None, None)?)
        }
        Listener::AgentWebSocket => Way::WebSocket,
        _ => Way::Plain,
    };
    let (_, attack) =
        http2::measured().find(|(name, _)| told["attack"] == *name).context("no such attack")?;
    let template = RequestTemplate::with(listener, told["token"].as_str().map(str::to_owned));
    let origin = said("origin")?.to_owned();
    let from = move |round: usize, connection: usize| match &*origin {
        "Elsewhere" => Some(Ipv4Addr::new(127, 0, 1, (round % 250) as u8 + 1)),
        "Everywhere" => {
            Some(Ipv4Addr::new(127, 1, (connection / 250 % 250) as u8, (connection % 250) as u8 + 1))
        }
        _ => None,
    };
    let address = said("address")?.parse()?;
    let (rounds, unmade) =
        http2::repeat_on_connections(address, from, &way, &template, attack, CONNECTIONS, ATTACKED).await;
    if let Some(error) = unmade {
        eprintln!("{}", json!({ "message": "a connection was not made", "error": error }));
    }
    eprintln!("{}", json!({ ROUNDS: rounds }));
    Ok(())
}

/// Parses the last output of the process of the attackers.
const ROUNDS: &str = "rounds";
