//! Processes are killed, paused, stopped and starved.

use std::{collections::BTreeSet, time::Duration};

use anyhow::{Context as _, Result};
use history::{Effect, SECOND};
use rand::RngExt as _;
use testkit::process::Process;
use tokio::time::{Instant, sleep};

use super::time;
use crate::{
    clock::{self, millis},
    judge,
    measure::{
        FALSE_DEATHS, T_DRAIN, T_FAILOVER, T_FAILOVER_2C, T_HEAL, T_KILL, T_KILL_REDIS, T_PURGE, T_RESUME,
        T_RESUME_REDIS,
    },
    run::{Run, Way},
};

/// Observers of scenarios with three replicas.
const ALL: [usize; 3] = [0, 1, 2];
/// Requests in a second of most scenarios.
pub(super) const RATE: u32 = 200;

/// Kills a replica and measures how the others and clients see it, then starts it again.
async fn kill_and_return(run: &mut Run, n: usize) -> Result<()> {
    let (only, also) = run.held_by(n);
    let at = run.kill(n).await?;
    run.seen_by_others(run.learns(&T_KILL, &T_KILL_REDIS), n, at, Way::Listed, false).await?;
    run.seen_by_others(&T_PURGE, n, at, Way::Holding, false).await?;
    sleep(Duration::from_secs(4)).await;
    let (row, agents) = if run.setup.connections == 1 { (&T_FAILOVER, only) } else { (&T_FAILOVER_2C, also) };
    let times = run.first_responses(&agents, at);
    run.measure(row, times);
    run.restart(n).await
}

pub(super) async fn killed_idle(run: &mut Run) -> Result<()> {
    for _ in 0..if run.quick { 1 } else { 5 } {
        let n = run.rng.random_range(0..run.setup.replicas);
        let at = run.kill(n).await?;
        run.seen_by_others(run.learns(&T_KILL, &T_KILL_REDIS), n, at, Way::Listed, false).await?;
        run.seen_by_others(&T_PURGE, n, at, Way::Holding, false).await?;
        run.restart(n).await?;
        run.heals(&T_HEAL).await?;
    }
    Ok(())
}

pub(super) async fn killed_under_load(run: &mut Run) -> Result<()> {
    run.load(RATE, 0, 0);
    let (each, all) = (time(run, 10, 30), if run.quick { Duration::from_secs(20) } else { run.length });
    let end = Instant::now() + all;
    while Instant::now() < end {
        let next = Instant::now() + each;
        // One that holds agents: one that came back may have none yet.
        let holding: Vec<usize> = (0..run.setup.replicas).filter(|n| !run.held_by(*n).0.is_empty()).collect();
        let n = match holding.len() {
            0 => run.rng.random_range(0..run.setup.replicas),
            many => holding[run.rng.random_range(0..many)],
        };
        kill_and_return(run, n).await?;
        tokio::time::sleep_until(next).await;
    }
    Ok(())
}

pub(super) async fn router_killed(run: &mut Run) -> Result<()> {
    run.load(RATE, 0, 0);
    sleep(Duration::from_secs(2)).await;
    for n in [1, 2] {
        kill_and_return(run, n).await?;
        sleep(Duration::from_secs(3)).await;
    }
    Ok(())
}

pub(super) async fn two_killed(run: &mut Run) -> Result<()> {
    run.load(RATE, 0, 0);
    sleep(Duration::from_secs(3)).await;
    let stays = run.rng.random_range(0..run.setup.replicas);
    let killed: Vec<usize> = (0..run.setup.replicas).filter(|n| *n != stays).collect();
    let mut only = BTreeSet::new();
    for n in &killed {
        only.extend(run.held_by(*n).0);
    }
    let at = clock::now();
    for n in &killed {
        run.kill(*n).await?;
    }
    sleep(Duration::from_secs(8)).await;
    let times = run.first_responses(&only, at);
    run.measure(&T_FAILOVER, times);
    for n in &killed {
        run.restart(*n).await?;
    }
    run.heals(&T_HEAL).await
}

pub(super) async fn all_killed(run: &mut Run) -> Result<()> {
    run.load(RATE / 4, 0, 0);
    sleep(Duration::from_secs(2)).await;
    for n in 0..run.setup.replicas {
        run.kill(n).await?;
    }
    for n in 0..run.setup.replicas {
        sleep(Duration::from_secs(2)).await;
        run.restart(n).await?;
    }
    // Agents back off while there is nobody.
    let took = run.settled(Duration::from_secs(60)).await?;
    run.notes
        .push(format!("All views were equal {:.1} s after the last replica was ready.", took.as_secs_f64()));
    Ok(())
}

pub(super) async fn crash_loop(run: &mut Run) -> Result<()> {
    run.load(RATE / 2, 0, 0);
    let end = Instant::now() + time(run, 10, 120);
    while Instant::now() < end {
        run.kill(0).await?;
        run.restart(0).await?;
        sleep(Duration::from_secs(2)).await;
    }
    run.heals(&T_HEAL).await
}

pub(super) async fn paused(run: &mut Run) -> Result<()> {
    run.load(RATE, 0, 0);
    sleep(Duration::from_secs(2)).await;
    let n = run.rng.random_range(0..run.setup.replicas);
    let at = clock::now();
    run.pause(n, Duration::from_millis(500)).await;
    sleep(Duration::from_secs(2)).await;
    let deaths = run.false_deaths(at, clock::now(), &ALL);
    run.measure(&FALSE_DEATHS, [f64::from(deaths)]);
    for seconds in if run.quick { &[5][..] } else { &[5, 60][..] } {
        let resumed = run.pause(n, Duration::from_secs(*seconds)).await;
        run.seen_by_others(run.learns(&T_RESUME, &T_RESUME_REDIS), n, resumed, Way::Trusted, true).await?;
        sleep(Duration::from_secs(2)).await;
    }
    run.heals(&T_HEAL).await
}

pub(super) async fn rolling(run: &mut Run) -> Result<()> {
    run.load(RATE, 12, 6);
    sleep(Duration::from_secs(3)).await;
    for _ in 0..if run.quick { 1 } else { 7 } {
        for n in 0..run.setup.replicas {
            let took = run.leave(n).await?;
            run.measure(&T_DRAIN, [took.as_secs_f64() * 1000.0]);
            run.restart(n).await?;
            // As an orchestrator: the next one only when all is well.
            run.settled(Duration::from_secs(40)).await?;
        }
    }
    Ok(())
}

pub(super) async fn one_by_one(run: &mut Run) -> Result<()> {
    run.load(RATE, 0, 0);
    sleep(Duration::from_secs(3)).await;
    for n in 0..run.setup.replicas - 1 {
        let (_, also) = run.held_by(n);
        let at = run.kill(n).await?;
        sleep(Duration::from_secs(5)).await;
        let times = run.first_responses(&also, at);
        run.measure(&T_FAILOVER_2C, times);
    }
    for n in 0..run.setup.replicas - 1 {
        run.restart(n).await?;
    }
    // Agents look for a third replica every 10 to 20 s.
    run.settled(Duration::from_secs(60)).await.map(drop)
}

/// One random change, after which all views become equal.
async fn change(run: &mut Run) -> Result<()> {
    let running = run.mesh.running();
    let down: Vec<usize> = (0..run.setup.replicas).filter(|n| !running.contains(n)).collect();
    let pick = run.rng.random_range(0..3);
    if let Some(n) = down.first().filter(|_| pick == 0 || running.len() <= 2) {
        run.restart(*n).await?;
    } else {
        let n = running[run.rng.random_range(0..running.len())];
        if pick == 1 {
            run.kill(n).await?;
        } else {
            run.leave(n).await?;
        }
    }
    let took = run.settled(Duration::from_secs(60)).await?;
    run.say(&format!("all views are equal after {:.1} s", took.as_secs_f64()));
    Ok(())
}

pub(super) async fn elastic(run: &mut Run) -> Result<()> {
    run.load(RATE / 2, 4, 2);
    let end = Instant::now() + run.length;
    while Instant::now() < end {
        let next = Instant::now() + Duration::from_secs(10);
        change(run).await?;
        tokio::time::sleep_until(next).await;
    }
    all_back(run).await
}

async fn all_back(run: &mut Run) -> Result<()> {
    for n in 0..run.setup.replicas {
        if !run.mesh.running().contains(&n) {
            run.restart(n).await?;
        }
    }
    run.settled(Duration::from_secs(60)).await.map(drop)
}

pub(super) async fn storm(run: &mut Run) -> Result<()> {
    run.load(RATE, 0, 0);
    sleep(Duration::from_secs(3)).await;
    let n = run.rng.random_range(0..run.setup.replicas);
    let at = run.kill(n).await?;
    sleep(Duration::from_secs(15)).await;
    // Every agent is asked every 1.5 s: the resolution of this.
    let all: BTreeSet<i64> = (1..=run.setup.agents).collect();
    let last = run.first_responses(&all, at).into_iter().fold(0.0, f64::max);
    run.notes.push(format!("Each of {} agents had a response within {last:.0} ms.", all.len()));
    run.restart(n).await
}

pub(super) async fn starved(run: &mut Run) -> Result<()> {
    run.load(RATE / 4, 0, 0);
    sleep(Duration::from_secs(2)).await;
    let from = clock::now();
    let fault = run.fault("eight busy processes", Effect::None);
    let mut busy = Vec::new();
    let shell = std::path::Path::new("/bin/sh");
    for _ in 0..8 {
        busy.push(Process::start("busy", shell, &["-c", "while :; do :; done"], &[]).await?);
    }
    sleep(time(run, 15, 60)).await;
    drop(busy);
    run.fault_ends(fault);
    let deaths = run.false_deaths(from, clock::now(), &ALL);
    run.measure(&FALSE_DEATHS, [f64::from(deaths)]);
    Ok(())
}

pub(super) async fn edge_killed(run: &mut Run) -> Result<()> {
    run.load(RATE / 2, 60, 12);
    sleep(Duration::from_secs(5)).await;
    for n in 0..if run.quick { 1 } else { run.setup.replicas } {
        kill_and_return(run, n).await?;
        run.settled(Duration::from_secs(40)).await?;
    }
    Ok(())
}

pub(super) async fn owner_drains(run: &mut Run) -> Result<()> {
    run.load(RATE / 2, 6, 24);
    sleep(Duration::from_secs(5)).await;
    let n = run.rng.random_range(0..run.setup.replicas);
    let took = run.leave(n).await?;
    run.measure(&T_DRAIN, [took.as_secs_f64() * 1000.0]);
    run.restart(n).await?;
    run.settled(Duration::from_secs(40)).await.map(drop)
}

/// Memory and descriptors of a process at a moment, in seconds since the start.
type Sample = (f64, f64, f64);

pub(super) async fn soak(run: &mut Run) -> Result<()> {
    run.load(RATE / 2, 6, 3);
    let begun = clock::now();
    let end = Instant::now() + run.length;
    // Replica 0 is never struck itself, so that its sizes can be fitted.
    let mut samples: Vec<Sample> = Vec::new();
    while Instant::now() < end {
        let usage = run.mesh.kas(0).process.usage()?;
        #[expect(clippy::cast_precision_loss, reason = "sizes of a process")]
        let (memory, files) = (usage.resident_kib as f64, usage.files as f64);
        samples.push((millis(clock::now() - begun) / 1000.0, memory, files));
        match run.rng.random_range(0..4) {
            0 => {
                let n = run.rng.random_range(1..run.setup.replicas);
                run.kill(n).await?;
                run.restart(n).await?;
            }
            1 => {
                let n = run.rng.random_range(1..run.setup.replicas);
                run.leave(n).await?;
                run.restart(n).await?;
            }
            2 => {
                let n = run.rng.random_range(1..run.setup.replicas);
                let time = Duration::from_millis(run.rng.random_range(200..4_000));
                run.pause(n, time).await;
            }
            _ => {
                let others: Vec<usize> = (2..run.setup.replicas).collect();
                let cuts = crate::run::between(&[1], &others, testkit::network::Traffic::All);
                let fault = run.cut("replica 1 is cut from those above", &cuts)?;
                sleep(Duration::from_secs(6)).await;
                run.heal(fault)?;
            }
        }
        run.settled(Duration::from_secs(60)).await?;
        sleep(Duration::from_secs(5)).await;
    }
    // What is warm-up is left out: the first quarter.
    let from = millis(clock::now() - begun) / 4_000.0;
    for (name, pick) in [("memory", 1), ("descriptors", 2)] {
        let of = |sample: &Sample| if pick == 1 { sample.1 } else { sample.2 };
        let points: Vec<_> =
            samples.iter().filter(|sample| sample.0 >= from).map(|sample| (sample.0, of(sample))).collect();
        let first = points.first().context("the soak was too short")?.1;
        let verdict = match judge::slope(&points) {
            None => "undecided: too few points".to_owned(),
            Some((slope, error)) => {
                let (share, error) = (slope * 360_000.0 / first, error * 360_000.0 / first);
                let words = if share + 2.0 * error <= 1.0 {
                    "no slope above 1 % an hour"
                } else if share - 2.0 * error > 1.0 {
                    "GROWS by more than 1 % an hour"
                } else {
                    "undecided"
                };
                format!("{share:+.2} % an hour, standard error {error:.2} %: {words}")
            }
        };
        run.notes.push(format!("{name} of replica 0, {} points: {verdict}.", points.len()));
    }
    let lasted = (clock::now() - begun) / SECOND;
    run.notes.push(format!("The faults lasted {lasted} s."));
    Ok(())
}
