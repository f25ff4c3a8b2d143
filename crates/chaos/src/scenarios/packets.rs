//! Packets are late, twice, out of order, lost, cut into pieces, forged, or only slow.

use std::{
    collections::BTreeMap,
    net::{SocketAddr, UdpSocket},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use history::{Effect, Gauge, History, Micros};
use http::StatusCode;
use rand::{Rng as _, RngExt as _};
use testkit::network::{Cut, OUTSIDE, Traffic};
use tokio::time::{Instant, sleep, sleep_until};

use super::{
    failures::none_fails,
    network::{everywhere, sides},
    process::RATE,
    recovery,
    registry::{self, Registering},
    time,
};
use crate::{
    clock,
    faults::{
        packets::{Packets, Rules, Shape, Slow, enter},
        resources::unsent,
    },
    measure::{FALSE_DEATHS, FP_LOSS, RESYNCED, T_HEAL},
    run::Run,
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
    let end = Instant::now() + time(run, 60, 600);
    sleep(time(run, 20, 60)).await;
    // Each waits once at each replica.
    registry::waiters(run, run.setup.replicas * usize::try_from(run.setup.more_agents)?).await?;
    sleep_until(end).await;
    let done = packets.stop()?;
    run.notes.push(format!("{done}."));
    run.fault_ends(fault);
    let deaths = run.false_deaths(from, clock::now(), &all);
    run.measure(&FP_LOSS, [f64::from(deaths)]);
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

/// What the link to the slow replica carries in a second, in kbit.
const SLOW: u32 = 8;
/// Changes that a table gets while the replica hears nothing.
const CHANGES: u64 = 8_000;
/// The most changes that a stream which begins again makes up for, for a small table. For more, it begins
/// with a snapshot.
const RESUMED: u64 = 4_096 + 100;
/// Agents that make them.
const CHANGING: i64 = 16;
/// How long they may take, and how long the replica may need to know the result.
const CHANGED: Duration = Duration::from_secs(60);
/// How long the replica hears nothing, at least: a stream of a table ends after 6 s of silence.
const DEAF: Duration = Duration::from_secs(12);
/// What replicas may take more for a slow one, in KiB, and what may be on its way to it, in bytes.
const HELD: f64 = 16.0 * 1024.0;
const UNSENT: f64 = 256.0 * 1024.0;

/// Counts how often the copy of an owner's table made a leap between two looks that is longer than what a
/// stream makes up for: then it was replaced as a whole.
fn snapshots(history: &History, observer: &str, owner: &str, (from, to): (Micros, Micros)) -> u32 {
    let mut looks: Vec<_> = history
        .views
        .iter()
        // A view that does not change is one record, which may have begun before.
        .filter(|view| view.observer == observer && view.agents.is_none())
        .filter(|view| view.until >= from && view.at <= to)
        .filter_map(|view| {
            let version = view.live.get(owner)?;
            Some((view.at, version.epoch?, version.version?))
        })
        .collect();
    looks.sort_unstable();
    let leaps = looks.windows(2).filter(|pair| {
        let [(_, epoch, before), (_, later, after)] = pair else { return false };
        epoch == later && after.saturating_sub(*before) > RESUMED
    });
    u32::try_from(leaps.count()).unwrap_or(u32::MAX)
}

/// The most that the others held for a slow replica.
#[derive(Debug, Default)]
struct Held {
    /// By replica, in KiB.
    memory: BTreeMap<usize, f64>,
    /// By replica, in bytes.
    unsent: BTreeMap<usize, f64>,
}

impl Held {
    fn look(&mut self, run: &Run, others: &[usize], slow: usize) -> Result<()> {
        for n in others {
            let process = &run.mesh.kas(*n).process;
            #[expect(clippy::cast_precision_loss, reason = "sizes of a process")]
            let memory = process.usage()?.resident_kib as f64;
            let unsent = unsent(process, run.mesh.private(slow).ip())?;
            for (most, now) in [(&mut self.memory, memory), (&mut self.unsent, unsent)] {
                let most = most.entry(*n).or_default();
                *most = most.max(now);
            }
        }
        Ok(())
    }

    /// Records it beside what there was before.
    fn record(&self, run: &mut Run, before: &recovery::Sizes) {
        let at = clock::now();
        for (n, value) in &self.memory {
            let was = before.get(n).map_or(0.0, |size| size.memory);
            let unsent = self.unsent.get(n).copied().unwrap_or_default();
            let words = format!("Replica {n} had {was:.0} KiB before and at most {value:.0} KiB meanwhile");
            run.notes.push(format!("{words}; at most {unsent:.0} bytes were on their way to the slow one."));
            let gauge = |name: &str, value, cap| {
                let (process, name) = (run.name(*n), name.to_owned());
                Gauge { at, process, name, value, cap }
            };
            let memory = gauge("memory (KiB) beside a slow replica", *value, was + HELD);
            let unsent = gauge("bytes on their way to a slow replica", unsent, UNSENT);
            run.history.lock().gauges.extend([memory, unsent]);
        }
    }
}

/// S33: one replica hears nothing of the others while a table changes a lot, and gets a snapshot
/// instead of the changes. Then it hears 1 KB/s while agents come and go.
pub(super) async fn slow_peer(run: &mut Run) -> Result<()> {
    let slow = run.setup.replicas - 1;
    let others: Vec<usize> = (0..slow).collect();
    run.load_through(slow, RATE / 2);
    sleep(Duration::from_secs(3)).await;
    let before = recovery::sizes(run).await?;
    let from = clock::now();
    let mut held = Held::default();
    outrun(run, slow, &mut held).await?;

    let pairs = others.iter().map(|other| (run.name(*other), run.name(slow))).collect();
    let fault = run.fault(format!("replica {slow} hears 1 KB/s of TCP from the others"), Effect::Cut(pairs));
    let link = Slow::towards(run.mesh.network(), slow, &others, SLOW)?;
    let end = Instant::now() + time(run, 15, 90);
    let (first, count) = (registry::first_absent(run), run.setup.more_agents);
    let mut rounds = 0;
    while Instant::now() < end {
        let swarm = run.swarm((first, count, 0, 1), Some(rounds % slow), 1).await?;
        run.connected(swarm).await?;
        run.end_swarm(swarm).await?;
        held.look(run, &others, slow)?;
        rounds += 1;
    }
    let to = clock::now();
    let waited = link.stop()?;
    run.fault_ends(fault);
    run.notes.push(format!("{count} agents came and went {rounds} times meanwhile; {waited}."));
    held.record(run, &before);
    run.heals(&T_HEAL).await?;
    run.unload().await;
    none_fails(run, "beside a slow replica", (from, to))?;
    recovery::recovered(run, &before, &[]).await
}

/// Changes the table of replica 0 more often than a stream makes up for while a replica hears nothing of it,
/// and waits until that one knows the result.
async fn outrun(run: &mut Run, slow: usize, held: &mut Held) -> Result<()> {
    let others: Vec<usize> = (0..slow).collect();
    let version = async |run: &Run, asked: usize| {
        let row = run.mesh.row(asked, 0).await?;
        let row = row.with_context(|| format!("replica {asked} does not know replica 0"))?;
        anyhow::Ok((row.table_version, row.table_synced))
    };
    // Without UDP too: gossip repeats the last changes, and may suffice.
    let deaf: Vec<Cut> =
        others.iter().map(|other| Cut { from: *other, to: slow, what: Traffic::All }).collect();
    let (from, begun) = (clock::now(), Instant::now());
    let fault = run.cut(&format!("replica {slow} hears nothing from the others"), &deaf)?;
    let (had, _) = version(run, 0).await?;
    let first = registry::first_absent(run);
    let changing: Vec<(usize, i64)> = (first..first + CHANGING).map(|agent| (0, agent)).collect();
    let mut changes = Registering::start(run, &changing);
    while version(run, 0).await?.0 < had + CHANGES {
        changes.go_on()?;
        held.look(run, &others, slow)?;
        ensure!(begun.elapsed() < CHANGED, "replica 0 did not have {CHANGES} changes within {CHANGED:?}");
        sleep(Duration::from_millis(100)).await;
    }
    let (registered, took) = changes.stop().await?;
    sleep_until(begun + DEAF).await;
    held.look(run, &others, slow)?;
    let (has, _) = version(run, 0).await?;
    run.heal(fault)?;
    let healed = Instant::now();
    loop {
        let (knows, synced) = version(run, slow).await?;
        if synced && knows >= has {
            break;
        }
        ensure!(healed.elapsed() < CHANGED, "replica {slow} knows version {knows} of {has} only");
        held.look(run, &others, slow)?;
        sleep(Duration::from_millis(100)).await;
    }
    run.notes.push(format!(
        "While replica {slow} heard nothing, agents came to replica 0 and left it {registered} times within {:.1} \
         s; it knew the result {:.1} s after it heard again.",
        took.as_secs_f64(),
        healed.elapsed().as_secs_f64()
    ));
    // The observer asks every 50 ms.
    sleep(Duration::from_millis(500)).await;
    let span = (from, clock::now());
    let snapshots = snapshots(&run.history.lock(), &run.name(slow), &run.name(0), span);
    run.measure(&RESYNCED, [f64::from(snapshots)]);
    Ok(())
}

pub(super) async fn one_way(run: &mut Run) -> Result<()> {
    run.load(RATE, 0, 0);
    sleep(Duration::from_secs(2)).await;
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
    let status = run.mesh.kas(0).get("/readiness").await?.0;
    ensure!(status == StatusCode::OK, "a replica that hears nothing is not ready: {status}");
    run.heal(fault)?;
    run.heals(&T_HEAL).await?;
    run.unload().await;
    sides(run, fault, true)
}

#[cfg(test)]
mod tests {
    use history::{SECOND, Version, View};

    use super::*;

    #[test]
    fn a_leap_that_no_stream_makes_up_for_is_a_snapshot() {
        let look = |at: Micros, epoch: u64, version: u64| View {
            observer: "c".to_owned(),
            at: at * SECOND,
            until: at * SECOND,
            live: [("a".to_owned(), Version { epoch: Some(epoch), version: Some(version) })].into(),
            ..View::default()
        };
        let views = vec![look(1, 1, 10), look(2, 1, 10 + RESUMED)];
        let mut history = History { views, ..History::default() };
        let count = |history: &History| snapshots(history, "c", "a", (0, 100 * SECOND));
        assert_eq!(count(&history), 0);
        history.views.push(look(12, 1, 11 + 2 * RESUMED));
        assert_eq!(count(&history), 1);
        history.views.push(look(13, 2, 90_000));
        assert_eq!(count(&history), 1, "another process");
        assert_eq!(snapshots(&history, "c", "a", (0, 11 * SECOND)), 0, "later");
        assert_eq!(snapshots(&history, "b", "a", (0, 100 * SECOND)), 0, "another one");
    }
}
