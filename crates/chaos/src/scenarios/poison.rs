//! S44: datagrams of a sender without the key of gossip.

use std::{
    net::{SocketAddr, UdpSocket},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use history::{Effect, Gauge};
use rand::{Rng as _, RngExt as _, SeedableRng as _, rngs::StdRng};
use tokio::time::{Instant, sleep};

use super::{process::RATE, recovery, time};
use crate::{
    clock,
    faults::{
        forged::{Template, bomb},
        packets::{Kept, Packets, Shape, raw_socket, send_raw},
        resources::processor_time,
    },
    measure::{FALSE_DEATHS, FORGED_COST, RESURRECTED, T_HEAL, T_KILL, T_PURGE},
    run::{Run, Way},
};

/// Nodes that do not exist, of which each replica is told.
const FAKES: usize = 10_000;
/// Datagrams to each replica at once, and how long after them the next ones follow: what its kernel holds for
/// it must suffice.
const AT_ONCE: usize = 50;
const PAUSE: Duration = Duration::from_millis(5);
/// How long the use at rest is measured.
const REST: Duration = Duration::from_secs(4);
/// What a replica may have more after the fakes, in KiB. If it kept one for each, it would need three times
/// as much.
const GROWS: f64 = 4.0 * 1024.0;

/// Datagrams of each kind, for each replica and step.
const FORGED: usize = 10;

/// Sends forged and old datagrams to replicas until the end, and returns how many.
async fn poison(run: &mut Run, kept: &Kept, lasting: Duration) -> Result<u64> {
    let socket = UdpSocket::bind("0.0.0.0:0")?;
    socket.set_nonblocking(true)?;
    let raw = raw_socket()?;
    let targets: Vec<SocketAddr> = (0..run.setup.replicas).map(|n| run.mesh.private(n)).collect();
    let end = Instant::now() + lasting;
    let (template, bomb) = (template(kept)?, bomb());
    let mut forger = StdRng::seed_from_u64(run.rng.next_u64());
    let mut sent = 0;
    for number in (0..).take_while(|_| Instant::now() < end) {
        for target in &targets {
            for forged in [
                &template.fake_node(number, &mut forger),
                &template.last_generation(number, &mut forger),
                &template.other_cluster(number, &mut forger),
                &template.sealed_bomb(number, &mut forger),
                &bomb,
            ] {
                let _ = socket.send_to(forged, target);
                sent += 1;
            }
            for _ in 0..FORGED {
                let old: Option<Vec<u8>> = {
                    let kept = kept.lock();
                    let pick = (!kept.is_empty()).then(|| run.rng.random_range(0..kept.len()));
                    pick.map(|pick| kept[pick].clone())
                };
                // Noise of any size; what a replica sent, cut short or changed, from a wrong sender.
                let mut noise = vec![0; run.rng.random_range(0..60_000_usize) >> run.rng.random_range(0..12)];
                run.rng.fill_bytes(&mut noise);
                let _ = socket.send_to(&noise, target);
                sent += 1;
                let Some(old) = old else { continue };
                let mut payload = old.get(28..).unwrap_or_default().to_vec();
                if run.rng.random_bool(0.5) {
                    payload.truncate(run.rng.random_range(0..=payload.len()));
                } else if let Some(byte) = {
                    let at = run.rng.random_range(0..payload.len().max(1));
                    payload.get_mut(at)
                } {
                    *byte ^= 1 << run.rng.random_range(0..8);
                }
                let _ = socket.send_to(&payload, target);
                // Whole, from whom it was, to whom it was.
                send_raw(&raw, &old)?;
                sent += 2;
            }
        }
        sleep(Duration::from_millis(20)).await;
    }
    Ok(sent)
}

/// How many datagrams the running replicas have dropped.
async fn dropped(run: &Run) -> Result<f64> {
    let mut sum = 0.0;
    for n in run.mesh.running() {
        let (_, text) = run.mesh.kas(n).get("/metrics").await?;
        let lines = text.lines().filter(|line| line.starts_with("kas_gossip_datagrams_dropped{"));
        sum += lines.filter_map(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok()).sum::<f64>();
    }
    Ok(sum)
}

/// Returns a frame that a replica sent.
fn template(kept: &Kept) -> Result<Template> {
    let newest = kept.lock().back().cloned();
    Template::of(&newest.context("no replica has sent a datagram")?)
}

/// The time of processors that all replicas have used, in microseconds.
#[expect(clippy::cast_precision_loss, reason = "minutes at most")]
fn used(run: &Run) -> Result<f64> {
    let mut sum = Duration::ZERO;
    for n in run.mesh.running() {
        sum += processor_time(&run.mesh.kas(n).process)?;
    }
    Ok(sum.as_micros() as f64)
}

/// Tells every replica of nodes that do not exist, and sends bombs, while nothing else happens. Measures what
/// a datagram that is dropped costs, and that nothing of it stays. Returns how many were sent.
async fn fakes(run: &mut Run, kept: &Kept) -> Result<usize> {
    const INCARNATIONS: &str = "kas_gossip_incarnations";
    let socket = UdpSocket::bind("0.0.0.0:0")?;
    socket.set_nonblocking(true)?;
    let all = run.mesh.running();
    let targets: Vec<SocketAddr> = all.iter().map(|n| run.mesh.private(*n)).collect();
    let (template, bomb) = (template(kept)?, bomb());
    let mut forger = StdRng::seed_from_u64(run.rng.next_u64());
    let before = recovery::sizes(run).await?;
    let mut known = Vec::new();
    for n in &all {
        known.push(run.mesh.kas(*n).metric(INCARNATIONS).await?);
    }
    let (idle, at) = (used(run)?, Instant::now());
    sleep(REST).await;
    let rest = (used(run)? - idle) / at.elapsed().as_secs_f64();
    let had = dropped(run).await?;
    let (busy, at) = (used(run)?, Instant::now());
    let mut sent = 0;
    for number in 0..FAKES {
        let fake = template.fake_node(number, &mut forger);
        let sealed = template.sealed_bomb(number, &mut forger);
        for target in &targets {
            let large = number.is_multiple_of(100).then_some(&bomb);
            for datagram in [&fake, &sealed].into_iter().chain(large) {
                sent += usize::from(socket.send_to(datagram, target).is_ok());
            }
        }
        if number % AT_ONCE == AT_ONCE - 1 {
            sleep(PAUSE).await;
        }
    }
    sleep(Duration::from_millis(500)).await;
    let (spent, lasted) = (used(run)? - busy, at.elapsed().as_secs_f64());
    let dropped = dropped(run).await? - had;
    ensure!(dropped > FAKES as f64, "of {sent} forged datagrams, {dropped} were counted as dropped");
    run.measure(&FORGED_COST, [rest.mul_add(-lasted, spent).max(0.0) / dropped]);
    run.notes.push(format!(
        "Of {sent} datagrams of {FAKES} nodes that do not exist, with bombs among them, {dropped} were counted \
         within {lasted:.1} s; the replicas used {:.0} ms, and {:.0} ms in a second at rest.",
        spent / 1_000.0,
        rest / 1_000.0
    ));
    for (n, known) in all.into_iter().zip(known) {
        let now = run.mesh.kas(n).metric(INCARNATIONS).await?;
        let memory = run.size(n).await?.memory;
        let was = before.get(&n).context("its size was read")?.memory;
        let gauge = |name: &str, value, cap| {
            let (process, name) = (run.name(n), name.to_owned());
            Gauge { at: clock::now(), process, name, value, cap }
        };
        let known = gauge("processes that gossip remembers after nodes that do not exist", now, known);
        let memory = gauge("memory (KiB) after nodes that do not exist", memory, was + GROWS);
        run.history.lock().gauges.extend([known, memory]);
    }
    Ok(sent)
}

pub(super) async fn poisoned(run: &mut Run) -> Result<()> {
    let all: Vec<usize> = (0..run.setup.replicas).collect();
    let shape = Shape { keep: true, ..Shape::default() };
    let seed = run.rng.next_u64();
    let recording = Packets::start(run.mesh.network(), &all, shape, seed).await?;
    let kept = recording.kept();
    sleep(Duration::from_secs(4)).await;
    let from = clock::now();
    let fault = run.fault("forged, changed and old datagrams to every replica", Effect::None);
    let fakes = fakes(run, &kept).await?;
    run.load(RATE / 4, 0, 0);
    sleep(Duration::from_secs(4)).await;
    let before = recovery::sizes(run).await?;
    let had = dropped(run).await?;
    let lasting = time(run, 5, 30);
    let mut sent = poison(run, &kept, lasting).await?;
    let deaths = run.false_deaths(from, clock::now(), &all);
    run.measure(&FALSE_DEATHS, [f64::from(deaths)]);
    let now = dropped(run).await?;
    ensure!(now > had, "{sent} datagrams were sent, and none was dropped: the fault did not happen");
    // What a process said must not bring it back after its end, nor count for the next one.
    let n = run.rng.random_range(0..run.setup.replicas);
    let name = run.name(n);
    // Only what this one said, so that none of it is lost among others.
    recording.stop()?;
    let own: std::net::IpAddr = run.mesh.private(n).ip();
    kept.lock().retain(|packet| matches!((own, packet.get(12..16)), (std::net::IpAddr::V4(own), Some(from)) if own.octets() == *from));
    ensure!(!kept.lock().is_empty(), "replica {n} said nothing");
    let at = run.kill(n).await?;
    run.seen_by_others(&T_KILL, n, at, Way::Listed, false).await?;
    run.seen_by_others(&T_PURGE, n, at, Way::Holding, false).await?;
    let gone = clock::now();
    sent += poison(run, &kept, time(run, 6, 20)).await?;
    let again = {
        let history = run.history.lock();
        let back = |view: &&history::View| {
            view.agents.is_none() && view.observer != name && view.at > gone && view.live.contains_key(&name)
        };
        history.views.iter().filter(back).count()
    };
    run.measure(&RESURRECTED, [f64::from(u32::try_from(again)?)]);
    run.restart(n).await?;
    sent += poison(run, &kept, time(run, 4, 20)).await?;
    run.fault_ends(fault);
    run.heals(&T_HEAL).await?;
    let now = dropped(run).await?;
    sent += u64::try_from(fakes)?;
    run.notes.push(format!("{sent} datagrams were sent; replicas count {now} that they dropped."));
    run.unload().await;
    recovery::recovered(run, &before, &[n]).await.context("after the datagrams")
}
