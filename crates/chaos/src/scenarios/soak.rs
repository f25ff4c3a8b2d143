//! Long runs, and what they leave behind: S30, S31, S48.

use std::{collections::BTreeSet, time::Duration};

use anyhow::{Result, ensure};
use history::{Micros, SECOND};
use rand::RngExt as _;
use testkit::network::Traffic;
use tokio::time::{Instant, sleep};

use super::{kills, process::RATE, time};
use crate::{
    clock::{self, millis},
    measure::T_STORM,
    run::{Run, between},
    sizes::Size,
    slope::{Slope, Tells},
};

/// What is left out of the fit: the first part of the run, while pools and caches fill.
const WARM: f64 = 0.25;
/// The views of all replicas must be equal within this after a fault.
const SETTLES: Duration = Duration::from_secs(60);
/// The time between a replica's rest and its sizes.
const RESTS: Duration = Duration::from_secs(4);

/// S48: random faults of all replicas but the first, whose sizes are fitted: a process that is killed has no
/// slope. It holds the same agents all the time, gets the same load, and is cut off from others.
pub(super) async fn soak(run: &mut Run) -> Result<()> {
    run.load(RATE / 2, 6, 3);
    let begun = clock::now();
    let end = Instant::now() + run.length;
    let mut samples: Vec<(f64, Size)> = Vec::new();
    // What was measured until a step fails is not lost with it.
    let mut ended = Ok(());
    while ended.is_ok() && Instant::now() < end {
        ended = step(run, begun, &mut samples).await;
    }
    let from = millis(clock::now() - begun) / 1000.0 * WARM;
    samples.retain(|(at, _)| *at >= from);
    for part in 0..3 {
        let Some((name, _)) = samples.first().map(|(_, size)| size.parts()[part]) else { continue };
        let points: Vec<(f64, f64)> = samples.iter().map(|(at, size)| (*at, size.parts()[part].1)).collect();
        run.slopes.push(Slope::of(&run.name(0), name, &points));
    }
    ensure!(!samples.is_empty() || ended.is_err(), "no size was read after the first quarter of the time");
    let undecided = run.slopes.iter().filter(|slope| slope.tells() == Tells::Undecided).count();
    if undecided > 0 {
        run.notes.push(format!("{undecided} slopes are undecided, which is not the same as none."));
    }
    run.notes.push(format!("The faults lasted {} s.", (clock::now() - begun) / SECOND));
    ended?;
    all_back(run).await
}

/// A fault, equal views after it, and the sizes of replica 0 at rest.
async fn step(run: &mut Run, begun: Micros, samples: &mut Vec<(f64, Size)>) -> Result<()> {
    strike(run).await?;
    run.settled(SETTLES).await?;
    sleep(RESTS).await;
    samples.push((millis(clock::now() - begun) / 1000.0, run.size(0).await?));
    Ok(())
}

/// One random fault, and its end. Replica 0 is neither killed nor paused.
async fn strike(run: &mut Run) -> Result<()> {
    let n = run.rng.random_range(1..run.setup.replicas);
    match run.rng.random_range(0..5) {
        0 => {
            run.kill(n).await?;
            run.restart(n).await?;
        }
        1 => {
            run.leave(n).await?;
            run.restart(n).await?;
        }
        2 => {
            let time = Duration::from_millis(run.rng.random_range(200..4_000));
            run.pause(n, time).await;
        }
        3 => {
            let fault =
                run.cut(&format!("replica {n} is cut from replica 0"), &between(&[0], &[n], Traffic::All))?;
            sleep(Duration::from_secs(6)).await;
            run.heal(fault)?;
        }
        _ => {
            let all: Vec<usize> = (0..run.setup.replicas).collect();
            let fault =
                run.cut("20 % of UDP packets are lost", &between(&[n], &all, Traffic::UdpLoss(20)))?;
            sleep(Duration::from_secs(6)).await;
            run.heal(fault)?;
        }
    }
    Ok(())
}

async fn all_back(run: &mut Run) -> Result<()> {
    for n in 0..run.setup.replicas {
        if !run.mesh.running().contains(&n) {
            run.restart(n).await?;
        }
    }
    run.settled(SETTLES).await.map(drop)
}

/// S30: replicas are added, stopped and killed all the time. Replica 0 stays, and must not grow.
pub(super) async fn elastic(run: &mut Run) -> Result<()> {
    // Several may be down at once.
    run.client.try_all();
    run.load(RATE / 2, 4, 2);
    // Connections to all others have been made, lost and made again once before it is measured.
    for n in 1..run.setup.replicas {
        run.kill(n).await?;
        run.restart(n).await?;
    }
    run.settled(SETTLES).await?;
    sleep(time(run, 10, 30)).await;
    let before = run.size(0).await?;
    let length = if run.quick { Duration::from_secs(40) } else { run.length };
    let end = Instant::now() + length;
    let (mut steps, mut fewest, mut most) = (0, run.setup.replicas, 0);
    while Instant::now() < end {
        let next = Instant::now() + Duration::from_secs(10);
        let running = change(run).await?;
        (steps, fewest, most) = (steps + 1, fewest.min(running), most.max(running));
        tokio::time::sleep_until(next).await;
    }
    run.notes.push(format!("{steps} changes; {fewest} to {most} replicas ran."));
    all_back(run).await?;
    run.recovers(0, &before, Duration::from_secs(60)).await
}

/// One random change, after which all views become equal. Returns how many replicas run then.
async fn change(run: &mut Run) -> Result<usize> {
    let running = run.mesh.running();
    let down: Vec<usize> = (0..run.setup.replicas).filter(|n| !running.contains(n)).collect();
    let pick = run.rng.random_range(0..3);
    // Replica 0 stays. Alone, it has the agents that know no other one.
    if let Some(n) = down.first().filter(|_| pick == 0 || running.len() == 1) {
        run.restart(*n).await?;
    } else {
        let n = running[run.rng.random_range(1..running.len())];
        if pick == 1 {
            run.kill(n).await?;
        } else {
            run.leave(n).await?;
        }
    }
    let took = run.settled(SETTLES).await?;
    let running = run.mesh.running().len();
    run.say(&format!("{running} replicas run; all views are equal after {:.1} s", took.as_secs_f64()));
    Ok(running)
}

/// S31: all agents of a killed replica connect to the others at once.
pub(super) async fn storm(run: &mut Run) -> Result<()> {
    run.load(RATE, 0, 0);
    sleep(Duration::from_secs(3)).await;
    let survivor = 0;
    let before = run.size(survivor).await?;
    let n = run.rng.random_range(1..run.setup.replicas);
    // Each agent has one connection.
    let only = run.holds(n).await?;
    let all: BTreeSet<i64> = (1..=run.setup.agents).collect();
    let at = run.kill(n).await?;
    let asking = run.first_answers(&only, n, at);
    let times = kills::times(asking).await?;
    let last = times.iter().copied().fold(0.0, f64::max);
    run.measure(&T_STORM, times);
    // The others were not disturbed either.
    let everyone = run.first_answers(&all, n, clock::now());
    let slowest = kills::times(everyone).await?.into_iter().fold(0.0, f64::max);
    run.notes.push(format!(
        "{} agents had their only connection on the killed replica; the last one answered after {last:.0} ms. Then \
         all {} agents were asked at once, and the slowest answered within {slowest:.0} ms.",
        only.len(),
        all.len()
    ));
    run.restart(n).await?;
    run.settled(SETTLES).await?;
    let after = run.size(survivor).await?;
    let [memory, files, tasks] = [0, 1, 2].map(|part| (before.parts()[part], after.parts()[part].1));
    for ((name, before), after) in [memory, files, tasks] {
        // It has more agents than before, so this is told and not judged.
        run.notes.push(format!("{name} of replica {survivor}: {before:.0} before, {after:.0} after."));
    }
    Ok(())
}
