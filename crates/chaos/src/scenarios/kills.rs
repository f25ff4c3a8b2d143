//! Replicas are killed under load: S02, with the account of every request.

use std::{collections::BTreeSet, time::Duration};

use anyhow::Result;
use rand::RngExt as _;
use tokio::{
    task::JoinSet,
    time::{Instant, sleep},
};

use super::time;
use crate::{
    judge::Totals,
    load::Plan,
    measure::{
        NOT_UNKNOWN, SUCCESS, SUCCESS_2C, SUCCESS_IDEMPOTENT, T_FAILOVER, T_FAILOVER_2C, T_KILL,
        T_KILL_REDIS, T_PURGE,
    },
    run::{Run, Way},
};

/// Requests in a second to agents with one connection, and to those with two.
const RATES: (u32, u32) = (200, 40);

/// Waits for times that were measured beside the scenario.
///
/// # Errors
/// That of the first that failed: an agent that never answered has no time.
pub(super) async fn times(mut asking: JoinSet<Result<f64>>) -> Result<Vec<f64>> {
    let mut times = Vec::new();
    while let Some(time) = asking.join_next().await {
        times.push(time??);
    }
    Ok(times)
}

/// S02: one of three replicas is killed every 30 s. Half of the agents have one connection, which the loss is
/// for; the others have two.
pub(super) async fn killed_under_load(run: &mut Run) -> Result<()> {
    let single = run.setup.agents - run.setup.double;
    for (rate, agents) in [(RATES.0, (1, single + 1)), (RATES.1, (single + 1, run.setup.agents + 1))] {
        let (clusters, deadline) = (run.setup.clusters + 1, Duration::from_secs(10));
        run.load_with(Plan { rate, agents, clusters, watches: 0, execs: 0, streams: 1, deadline });
    }
    let (each, all) = (time(run, 10, 30), if run.quick { Duration::from_secs(20) } else { run.length });
    sleep(Duration::from_secs(2)).await;
    let end = Instant::now() + all;
    while Instant::now() < end {
        let next = Instant::now() + each;
        // Any of them with the same chance, as a machine that fails: one that came back may hold no agent
        // yet.
        let n = run.rng.random_range(0..run.setup.replicas);
        kill(run, n, single).await?;
        tokio::time::sleep_until(next).await;
    }
    run.unload().await;
    account(run, single);
    Ok(())
}

async fn kill(run: &mut Run, n: usize, single: i64) -> Result<()> {
    let (only, also) = run.held_by(n);
    // An agent with two connections may have had one here only, which is another case.
    let only: BTreeSet<i64> = only.into_iter().filter(|agent| *agent <= single).collect();
    let at = run.kill(n).await?;
    let (one, two) = (run.first_answers(&only, n, at), run.first_answers(&also, n, at));
    run.seen_by_others(run.learns(&T_KILL, &T_KILL_REDIS), n, at, Way::Listed, false).await?;
    run.seen_by_others(&T_PURGE, n, at, Way::Holding, false).await?;
    let (one, two) = (times(one).await?, times(two).await?);
    run.measure(&T_FAILOVER, one);
    run.measure(&T_FAILOVER_2C, two);
    run.restart(n).await
}

/// What became of the requests.
fn account(run: &mut Run, single: i64) {
    let (one, two) = {
        let history = run.history.lock();
        (Totals::among(&history, |agent| agent <= single), Totals::among(&history, |agent| agent > single))
    };
    // The share depends on how often a replica is killed: it is asserted for every 30 s.
    if !run.quick {
        run.measure(&SUCCESS, one.success());
        run.measure(&SUCCESS_2C, two.success());
    }
    run.measure(&NOT_UNKNOWN, [f64::from(one.not_started + one.other + two.not_started + two.other)]);
    run.measure(&SUCCESS_IDEMPOTENT, one.success_idempotent().into_iter().chain(two.success_idempotent()));
    for (whose, totals) in [("one connection", one), ("two connections", two)] {
        run.notes.push(format!(
            "Agents with {whose}: {} requests, {} with a response ({:.3} %), {} tried once more elsewhere, {} \
             unknown; with idempotent retry {} have a response.",
            totals.requests,
            totals.ok,
            totals.success().unwrap_or_default(),
            totals.retried,
            totals.unknown,
            totals.ok_idempotent
        ));
    }
}
