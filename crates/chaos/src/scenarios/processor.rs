//! No fault at all, and replicas that get too little of the processor: false deaths of each.

use std::{path::Path, time::Duration};

use anyhow::{Result, ensure};
use history::Effect;
use rand::RngExt as _;
use testkit::process::Process;
use tokio::time::sleep;

use super::{failures::none_fails, process::RATE, time};
use crate::{
    clock,
    faults::resources::{Frozen, Group},
    measure::{FP_CPU, FP_IDLE, T_HEAL},
    run::Run,
};

/// Busy processes for each core: as many again as share it in the worst case that is promised.
const PER_CORE: usize = 4;
/// Shares of a processor, in percent: the first that a replica uses up is kept.
const SHARES: [u64; 4] = [20, 10, 5, 2];
/// How long a worker thread stands still.
const STILL: Duration = Duration::from_secs(2);

/// S00: nothing happens.
pub(super) async fn idle(run: &mut Run) -> Result<()> {
    let from = clock::now();
    sleep(time(run, 60, 600)).await;
    let all: Vec<usize> = (0..run.setup.replicas).collect();
    let deaths = run.false_deaths(from, clock::now(), &all);
    run.measure(&FP_IDLE, [f64::from(deaths)]);
    run.heals(&T_HEAL).await
}

/// S39: processes that use up all cores, a replica with a part of one, and one whose worker stands still.
pub(super) async fn starved(run: &mut Run) -> Result<()> {
    crowded(run).await?;
    throttled(run).await?;
    stuck(run).await
}

/// Busy processes beside the replicas.
async fn crowded(run: &mut Run) -> Result<()> {
    run.load(RATE / 4, 0, 0);
    sleep(Duration::from_secs(2)).await;
    let from = clock::now();
    let cores = std::thread::available_parallelism()?.get();
    let fault = run.fault(format!("{} busy processes on {cores} cores", PER_CORE * cores), Effect::None);
    let mut busy = Vec::new();
    for _ in 0..PER_CORE * cores {
        let script = ["-c", "while :; do :; done"];
        busy.push(Process::start("busy", Path::new("/bin/sh"), &script, &[]).await?);
    }
    sleep(time(run, 60, 600)).await;
    drop(busy);
    run.fault_ends(fault);
    let all: Vec<usize> = (0..run.setup.replicas).collect();
    let deaths = run.false_deaths(from, clock::now(), &all);
    run.measure(&FP_CPU, [f64::from(deaths)]);
    Ok(())
}

/// Gives a replica a part of a processor that does not suffice, while requests go on.
async fn throttled(run: &mut Run) -> Result<()> {
    let all: Vec<usize> = (0..run.setup.replicas).collect();
    let n = run.rng.random_range(0..run.setup.replicas);
    let from = clock::now();
    let fault = run.fault(format!("replica {n} has a part of a processor"), Effect::None);
    let group = Group::processor(&run.mesh.kas(n).process, SHARES[0])?;
    let mut share = SHARES[0];
    for next in &SHARES[1..] {
        sleep(Duration::from_secs(2)).await;
        if group.struck()? > 0 {
            break;
        }
        share = *next;
        group.share(share)?;
    }
    sleep(time(run, 10, 60)).await;
    let times = group.struck()?;
    group.end().await?;
    let to = clock::now();
    run.fault_ends(fault);
    ensure!(times > 0, "the quota was never used up: the fault did not happen");
    run.notes.push(format!("{share} % of a processor were used up {times} times by replica {n}."));
    let deaths = run.false_deaths(from, to, &all);
    run.measure(&FP_CPU, [f64::from(deaths)]);
    run.heals(&T_HEAL).await?;
    run.unload().await;
    none_fails(run, "with a part of a processor", (from, to))
}

/// One worker thread of each replica in turn stands still, while requests go on. If it was the one that waits
/// for sockets, nothing but gossip, which has a thread of its own, goes on there.
async fn stuck(run: &mut Run) -> Result<()> {
    run.load(RATE / 4, 0, 0);
    sleep(Duration::from_secs(2)).await;
    let all: Vec<usize> = (0..run.setup.replicas).collect();
    let from = clock::now();
    for _ in 0..if run.quick { 1 } else { 5 } {
        for n in &all {
            let what = format!("a worker thread of replica {n} stands still for {STILL:?}");
            let fault = run.fault(what, Effect::None);
            let frozen = Frozen::worker(&run.mesh.kas(*n).process).await?;
            sleep(STILL).await;
            frozen.thaw()?;
            run.fault_ends(fault);
            sleep(STILL).await;
        }
    }
    let to = clock::now();
    let deaths = run.false_deaths(from, to, &all);
    run.measure(&FP_CPU, [f64::from(deaths)]);
    run.heals(&T_HEAL).await?;
    run.unload().await;
    none_fails(run, "while a worker thread of a replica stands still", (from, to))
}
