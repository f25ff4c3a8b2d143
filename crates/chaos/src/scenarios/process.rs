//! Processes are killed, paused and stopped.

use std::{collections::BTreeSet, time::Duration};

use anyhow::Result;
use history::{Micros, SECOND};
use rand::RngExt as _;
use tokio::time::{Instant, sleep};

use super::{failures::none_fails, kills, recovery, time};
use crate::{
    clock,
    measure::{
        FALSE_DEATHS, T_FAILOVER, T_FAILOVER_2C, T_HEAL, T_KILL, T_KILL_REDIS, T_PURGE, T_RESUME,
        T_RESUME_REDIS,
    },
    run::{Run, Way},
};

/// Observers of scenarios with three replicas.
const ALL: [usize; 3] = [0, 1, 2];
/// From this long after a pause, nothing that a replica knew before it may be used.
const FRESH: Micros = SECOND;
/// Requests in a second of most scenarios.
pub(super) const RATE: u32 = 200;

/// Kills a replica and measures how the others and clients see it, then starts it again.
async fn kill_and_return(run: &mut Run, n: usize) -> Result<()> {
    let (only, also) = run.held_by(n);
    let at = run.kill(n).await?;
    let (row, agents) = if run.setup.connections == 1 { (&T_FAILOVER, only) } else { (&T_FAILOVER_2C, also) };
    let asking = run.first_answers(&agents, n, at);
    run.seen_by_others(run.learns(&T_KILL, &T_KILL_REDIS), n, at, Way::Listed, false).await?;
    run.seen_by_others(&T_PURGE, n, at, Way::Holding, false).await?;
    // One that holds none, as the replicas of S03 do, says nothing about this.
    if !agents.is_empty() {
        run.measure(row, kills::times(asking).await?);
    }
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
    run.client.try_all();
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
    // What piles up in a pause has been needed once before sizes are compared.
    let mut before = None;
    let mut calm = Vec::new();
    for seconds in if run.quick { &[5][..] } else { &[5, 5, 60][..] } {
        let resumed = run.pause(n, Duration::from_secs(*seconds)).await;
        run.seen_by_others(run.learns(&T_RESUME, &T_RESUME_REDIS), n, resumed, Way::Trusted, true).await?;
        sleep(time(run, 4, 10)).await;
        calm.push((*seconds, (resumed + FRESH, clock::now())));
        if !run.quick && before.is_none() {
            before = Some(recovery::sizes(run).await?);
        }
    }
    run.heals(&T_HEAL).await?;
    if let Some(before) = before {
        recovery::recovered(run, &before, &[]).await?;
    }
    run.unload().await;
    // A route that had become stale meanwhile would fail requests.
    for (seconds, span) in calm {
        none_fails(run, &format!("from 1 s after a pause of {seconds} s"), span)?;
    }
    Ok(())
}

pub(super) async fn one_by_one(run: &mut Run) -> Result<()> {
    // With two of three gone, the second choice of a client may be gone, too.
    run.client.try_all();
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

pub(super) async fn edge_killed(run: &mut Run) -> Result<()> {
    let (watches, execs) = if run.quick { (60, 12) } else { (1_000, 50) };
    run.load(RATE / 2, watches, execs);
    sleep(Duration::from_secs(5)).await;
    for n in 0..if run.quick { 1 } else { run.setup.replicas } {
        kill_and_return(run, n).await?;
        run.settled(Duration::from_secs(40)).await?;
    }
    Ok(())
}
