//! Requests that wait, and agents that come and go.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use anyhow::{Result, ensure};
use history::{Kind, Outcome};
use rand::RngExt as _;
use testkit::{caller::Caller, kas::within, raw_agent};
use tokio::{
    task::JoinSet,
    time::{Instant, sleep},
};

use super::{process::RATE, time};
use crate::{
    clock::{self, millis},
    measure::{T_HEAL, T_PROP, TWICE},
    observer::look,
    run::Run,
};

/// The first of the agents that are absent at first, in a scenario with waiters.
pub(crate) fn first_absent(run: &Run) -> i64 {
    run.setup.agents + 1
}

pub(super) async fn waiters(run: &mut Run) -> Result<()> {
    let (first, count) = (first_absent(run), run.setup.more_agents);
    let mut waiting = JoinSet::new();
    for agent in first..first + count {
        for replica in 0..run.setup.replicas {
            let (client, id) = (Arc::clone(&run.client), run.ids.next());
            waiting.spawn(async move {
                let deadline = Duration::from_secs(15);
                let mut request = client.send(id, agent, Kind::Unary, replica, deadline).await;
                // What it is, to the checker: it waited for an agent that was not there.
                request.kind = Kind::Waiter;
                request
            });
        }
    }
    sleep(Duration::from_secs(3)).await;
    ensure!(waiting.try_join_next().is_none(), "a request for an absent agent did not wait");
    // All at replica 0: the others are remote.
    let swarm = run.swarm((first, count, 0, 1), Some(0), 1).await?;
    run.connected(swarm).await?;
    let mut failed = 0;
    while let Some(request) = waiting.join_next().await {
        let request = request?;
        if request.outcome != Some(Outcome::Ok) {
            failed += 1;
        }
        run.history.lock().requests.push(request);
    }
    run.measure(&TWICE, [f64::from(failed)]);
    Ok(())
}

pub(super) async fn churn(run: &mut Run) -> Result<()> {
    run.load(RATE / 2, 0, 0);
    let (first, count) = (first_absent(run), run.setup.more_agents);
    let agents: Vec<i64> = (first..first + count).collect();
    let end = Instant::now() + time(run, 10, 60);
    let mut rounds = 0;
    while Instant::now() < end {
        let swarm = run.swarm((first, count, 0, 2), None, 1).await?;
        run.connected(swarm).await?;
        seen(run, &agents, true).await?;
        run.end_swarm(swarm).await?;
        seen(run, &agents, false).await?;
        rounds += 1;
    }
    run.notes.push(format!(
        "{count} agents connected and left {rounds} times; each replica saw all of them each time, and none after."
    ));
    Ok(())
}

/// How long a replica may take to see that agents have come or left.
const SEES: Duration = Duration::from_secs(5);

/// Waits until each replica sees all of these agents, or none of them.
async fn seen(run: &Run, agents: &[i64], present: bool) -> Result<()> {
    for n in run.mesh.running() {
        let asker = Caller::connect(run.mesh.api(n), Some(run.client.token())).await?;
        let what = format!("{} sees {} of the agents", run.name(n), if present { "all" } else { "none" });
        within(SEES, &what, async || {
            let (_, seen) = look(&asker, agents).await?;
            let wrong: Vec<i64> = agents
                .iter()
                .filter(|agent| seen.agents.get(agent).is_some_and(|holders| !holders.is_empty()) != present)
                .copied()
                .collect();
            Ok(if wrong.is_empty() { Ok(()) } else { Err(wrong) })
        })
        .await?;
    }
    Ok(())
}

/// How often an agent moves within a round, and how many rounds there are.
const MOVES: usize = 4;
const ROUNDS: usize = 40;

pub(super) async fn moves(run: &mut Run) -> Result<()> {
    run.load(RATE / 4, 0, 0);
    let agent = first_absent(run);
    let mut askers = Vec::new();
    for n in 0..run.setup.replicas {
        askers.push((run.name(n), Caller::connect(run.mesh.api(n), Some(run.client.token())).await?));
    }
    let mut at = 0;
    for _ in 0..if run.quick { ROUNDS / 4 } else { ROUNDS } {
        let mut there = run.mesh.agent(at, agent, raw_agent::Kind::Ours, 2).await?;
        for _ in 0..MOVES {
            let next = (at + run.rng.random_range(1..run.setup.replicas)) % run.setup.replicas;
            // Sometimes it is on both for a moment, sometimes on none.
            if run.rng.random_bool(0.5) {
                there.cut();
                there = run.mesh.agent(next, agent, raw_agent::Kind::Ours, 2).await?;
            } else {
                let new = run.mesh.agent(next, agent, raw_agent::Kind::Ours, 2).await?;
                std::mem::replace(&mut there, new).cut();
            }
            at = next;
        }
        let since = clock::now();
        let only = BTreeSet::from([run.name(at)]);
        for (name, asker) in &askers {
            let what = format!("{name} sees the agent on {only:?} only");
            let seen = within(Duration::from_secs(10), &what, async || {
                let asked = clock::now();
                let (_, seen) = look(asker, &[agent]).await?;
                let holders = &seen.agents[&agent];
                Ok(if *holders == only { Ok(asked) } else { Err(holders.clone()) })
            })
            .await?;
            run.measure(&T_PROP, [millis(seen.saturating_sub(since))]);
        }
        there.cut();
    }
    run.notes.push(format!("The agent moved {MOVES} times in each round."));
    run.heals(&T_HEAL).await
}
