//! Packets are late, twice, out of order, lost, cut into pieces, forged, or only slow.

use std::{
    net::{SocketAddr, UdpSocket},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use history::Effect;
use rand::{Rng as _, RngExt as _};
use testkit::network::{Cut, OUTSIDE, Traffic};
use tokio::time::{Instant, sleep};

use super::{failures::none_fails, network::everywhere, process::RATE, recovery, registry, time};
use crate::{
    clock,
    faults::packets::{Packets, Rules, Shape, Slow, enter, raw_socket, send_raw},
    measure::{FALSE_DEATHS, RESURRECTED, T_HEAL, T_KILL, T_PURGE},
    run::{Run, Way},
};

pub(super) async fn lossy(run: &mut Run) -> Result<()> {
    run.load(RATE, 0, 0);
    sleep(Duration::from_secs(2)).await;
    let all: Vec<usize> = (0..run.setup.replicas).collect();
    let shape = Shape {
        delay: Duration::from_millis(200),
        jitter: Duration::from_millis(100),
        loss: 30,
        duplicate: 20,
        ..Shape::default()
    };
    let from = clock::now();
    let what = "of UDP, 30 % is lost, 20 % comes twice, and all comes 200 ± 100 ms late, out of order";
    // Nothing of that excuses a wrong view.
    let fault = run.fault(what, Effect::None);
    let seed = run.rng.next_u64();
    let packets = Packets::start(run.mesh.network(), &all, shape, seed).await?;
    let lasting = time(run, 8, 60);
    sleep(lasting).await;
    registry::waiters(run).await?;
    sleep(lasting).await;
    let done = packets.stop()?;
    run.notes.push(format!("{done}."));
    run.fault_ends(fault);
    let deaths = run.false_deaths(from, clock::now(), &all);
    run.measure(&FALSE_DEATHS, [f64::from(deaths)]);
    run.heals(&T_HEAL).await
}

/// Sends datagrams of these sizes from a host to an address.
fn send_from(namespace: &std::path::Path, to: SocketAddr, sizes: &[usize]) -> Result<()> {
    std::thread::scope(|scope| {
        let sending = scope.spawn(|| {
            enter(namespace)?;
            let socket = UdpSocket::bind("0.0.0.0:0")?;
            for size in sizes {
                socket.send_to(&vec![0; *size], to)?;
            }
            anyhow::Ok(())
        });
        sending.join().map_err(|_| anyhow::anyhow!("a thread that sends panicked"))?
    })
}

pub(super) async fn fragments(run: &mut Run) -> Result<()> {
    run.load(RATE, 0, 0);
    sleep(Duration::from_secs(2)).await;
    let replicas = run.setup.replicas;
    let all: Vec<usize> = (0..replicas).collect();
    let mut cuts = everywhere(replicas, Traffic::UdpLarge);
    cuts.push(Cut { from: replicas, to: 0, what: Traffic::UdpLarge });
    let from = clock::now();
    let fault = run.fault("UDP packets above 1,400 bytes and fragments are dropped", Effect::None);
    run.mesh.network().cut(&cuts)?;
    sleep(time(run, 8, 30)).await;
    let deaths = run.false_deaths(from, clock::now(), &all);
    run.measure(&FALSE_DEATHS, [f64::from(deaths)]);
    // A newcomer has everything to learn.
    let n = run.rng.random_range(0..replicas);
    run.leave(n).await?;
    run.restart(n).await?;
    run.heals(&T_HEAL).await?;
    let dropped = run.mesh.network().dropped()?;
    ensure!(dropped == 0, "replicas sent {dropped} packets of UDP above 1,400 bytes, or fragments");
    // Two fragments of one, and one that is whole and large.
    send_from(run.mesh.network().host(replicas), run.mesh.private(0), &[2_500, 1_390, 100])?;
    let dropped = run.mesh.network().dropped()?;
    ensure!(dropped == 3, "of three large packets of the test itself, {dropped} were dropped");
    run.notes.push("No replica sent a UDP packet above 1,400 bytes.".to_owned());
    run.heal(fault).map(drop)
}

pub(super) async fn tcp(run: &mut Run) -> Result<()> {
    let replicas = run.setup.replicas;
    // And the host of the agents.
    let hosts: Vec<usize> = (0..=replicas).collect();
    let lasting = time(run, 8, 30);
    let mut calm = Vec::new();

    run.load(RATE / 4, 6, 3);
    sleep(Duration::from_secs(2)).await;
    let fault = run.fault("TCP between replicas and agents is 100 ± 20 ms late, out of order", Effect::None);
    let (delay, jitter) = (Duration::from_millis(100), Duration::from_millis(20));
    let shape = Shape { tcp: true, delay, jitter, ..Shape::default() };
    let seed = run.rng.next_u64();
    let packets = Packets::start(run.mesh.network(), &hosts, shape, seed).await?;
    let from = clock::now();
    sleep(lasting).await;
    calm.push(("TCP that is late", (from, clock::now())));
    run.unload().await;
    let done = packets.stop()?;
    run.notes.push(format!("TCP that is late: {done}."));
    run.fault_ends(fault);
    run.heals(&T_HEAL).await?;

    run.load(RATE / 10, 2, 1);
    let fault = run.fault("each host sends 1 Mbit/s at most", Effect::None);
    let slow = Slow::start(run.mesh.network(), &hosts, 1_000)?;
    let from = clock::now();
    sleep(lasting).await;
    calm.push(("1 Mbit/s", (from, clock::now())));
    run.unload().await;
    let done = slow.stop()?;
    run.notes.push(format!("1 Mbit/s: {done}."));
    run.fault_ends(fault);
    run.heals(&T_HEAL).await?;

    // New connections, whose segments have a few bytes, and which are reset at any of them.
    run.load(RATE / 4, 6, 3);
    let small = Rules::add(
        run.mesh.network(),
        &hosts,
        "mangle",
        "OUTPUT",
        &format!("-o eth0 ! -d {OUTSIDE} -p tcp --tcp-flags SYN,RST SYN -j TCPMSS --set-mss 60"),
    )?;
    let fault =
        run.fault("connections are reset at random, and new ones have segments of 60 bytes", Effect::All);
    let resets = Rules::add(
        run.mesh.network(),
        &hosts,
        "filter",
        "INPUT",
        &format!(
            "-i eth0 ! -s {OUTSIDE} -p tcp -m statistic --mode random --probability 0.002 \
             -j REJECT --reject-with tcp-reset"
        ),
    )?;
    sleep(lasting).await;
    let count = resets.remove()?;
    run.fault_ends(fault);
    run.notes.push(format!("{count} connections were reset."));
    run.heals(&T_HEAL).await?;
    let fault = run.fault("connections have segments of 60 bytes", Effect::None);
    let from = clock::now();
    sleep(lasting).await;
    calm.push(("small segments", (from, clock::now())));
    run.unload().await;
    let count = small.remove()?;
    run.notes.push(format!("{count} connections had small segments."));
    run.fault_ends(fault);
    for (what, span) in calm {
        none_fails(run, what, span)?;
    }
    Ok(())
}

pub(super) async fn slow_peer(run: &mut Run) -> Result<()> {
    let slow = run.setup.replicas - 1;
    let others: Vec<usize> = (0..slow).collect();
    run.load_through(slow, RATE / 2);
    sleep(Duration::from_secs(3)).await;
    let before = recovery::sizes(run).await?;
    let pairs = others.iter().map(|other| (run.name(*other), run.name(slow))).collect();
    let fault = run.fault(format!("replica {slow} hears 1 KB/s of TCP from the others"), Effect::Cut(pairs));
    let link = Slow::towards(run.mesh.network(), slow, &others, 8)?;
    let (from, end) = (clock::now(), Instant::now() + time(run, 15, 90));
    let (first, count) = (registry::first_absent(run), run.setup.more_agents);
    let mut rounds = 0;
    while Instant::now() < end {
        let swarm = run.swarm((first, count, 0, 1), Some(rounds % slow), 1).await?;
        run.connected(swarm).await?;
        run.end_swarm(swarm).await?;
        rounds += 1;
    }
    let to = clock::now();
    let held = link.stop()?;
    run.fault_ends(fault);
    run.notes.push(format!("{count} agents came and went {rounds} times meanwhile; {held}."));
    run.heals(&T_HEAL).await?;
    run.unload().await;
    none_fails(run, "beside a slow replica", (from, to))?;
    recovery::recovered(run, &before, &[]).await
}

pub(super) async fn one_way(run: &mut Run) -> Result<()> {
    let from = clock::now();
    let cuts: Vec<Cut> = [1, 2].map(|other| Cut { from: other, to: 0, what: Traffic::All }).into();
    let fault = run.cut("replica 0 hears nothing from the others, and they hear it", &cuts)?;
    sleep(time(run, 8, 30)).await;
    // The two others see each other. Replica 0 itself may be dropped by them: its connections are dead.
    let (one, two) = (run.name(1), run.name(2));
    let lost = {
        let history = run.history.lock();
        let of = |view: &&history::View| {
            view.agents.is_none() && view.until >= from && (view.observer == one || view.observer == two)
        };
        let missing = |view: &&history::View| !view.live.contains_key(&one) || !view.live.contains_key(&two);
        history.views.iter().filter(of).filter(missing).count()
    };
    run.measure(&FALSE_DEATHS, [f64::from(u32::try_from(lost)?)]);
    run.heal(fault)?;
    run.heals(&T_HEAL).await
}

/// Datagrams of each kind, for each replica and step.
const FORGED: usize = 10;

/// Sends forged and old datagrams to replicas until the end, and returns how many.
async fn poison(run: &mut Run, kept: &crate::faults::packets::Kept, lasting: Duration) -> Result<u64> {
    let socket = UdpSocket::bind("0.0.0.0:0")?;
    socket.set_nonblocking(true)?;
    let raw = raw_socket()?;
    let targets: Vec<SocketAddr> = (0..run.setup.replicas).map(|n| run.mesh.private(n)).collect();
    let end = Instant::now() + lasting;
    let mut sent = 0;
    while Instant::now() < end {
        for target in &targets {
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

pub(super) async fn poisoned(run: &mut Run) -> Result<()> {
    run.load(RATE / 4, 0, 0);
    let all: Vec<usize> = (0..run.setup.replicas).collect();
    let shape = Shape { keep: true, ..Shape::default() };
    let seed = run.rng.next_u64();
    let recording = Packets::start(run.mesh.network(), &all, shape, seed).await?;
    let kept = recording.kept();
    sleep(Duration::from_secs(4)).await;
    let before = recovery::sizes(run).await?;
    let had = dropped(run).await?;
    let from = clock::now();
    let fault = run.fault("forged, changed and old datagrams to every replica", Effect::None);
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
    run.notes.push(format!("{sent} datagrams were sent; replicas count {now} that they dropped."));
    run.unload().await;
    recovery::recovered(run, &before, &[n]).await.context("after the datagrams")
}
