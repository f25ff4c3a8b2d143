//! Requests that wait, and agents that come and go.

use std::{collections::BTreeSet, net::SocketAddr, sync::Arc, time::Duration};

use anyhow::{Context as _, Result, bail, ensure};
use history::{Kind, Outcome, Presence};
use rand::RngExt as _;
use testkit::{
    caller::Caller,
    kas::{token, within},
    raw_agent::{self, RawAgent},
};
use tokio::{
    task::JoinSet,
    time::{Instant, sleep, timeout},
};
use tokio_util::sync::CancellationToken;

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

/// How many requests wait in S25.
const WAITERS: usize = 1_000;
/// Requests of one client at the same time: a connection has 250 streams.
const ONE_CLIENT: usize = 200;

/// S25: one request for each agent and at each replica waits, then 1,000 of them.
pub(super) async fn block_then_connect(run: &mut Run) -> Result<()> {
    let one_each = run.setup.replicas * usize::try_from(run.setup.more_agents)?;
    let swarm = waiters(run, one_each).await?;
    run.end_swarm(swarm).await?;
    let first = first_absent(run);
    let agents: Vec<i64> = (first..first + run.setup.more_agents).collect();
    seen(run, &agents, false).await?;
    waiters(run, WAITERS).await.map(drop)
}

/// So many requests wait, evenly for each absent agent and at each replica, until all agents connect to
/// replica 0. Returns their swarm.
pub(super) async fn waiters(run: &mut Run, requests: usize) -> Result<usize> {
    let (first, count) = (first_absent(run), run.setup.more_agents);
    let pairs: Vec<(i64, usize)> = (first..first + count)
        .flat_map(|agent| (0..run.setup.replicas).map(move |replica| (agent, replica)))
        .collect();
    let mut waiting = JoinSet::new();
    let mut client = Arc::clone(&run.client);
    for (number, (agent, replica)) in pairs.iter().copied().cycle().take(requests).enumerate() {
        // The load has connections of its own.
        if number % ONE_CLIENT == 0 {
            client = run.client.again();
        }
        let (client, id) = (Arc::clone(&client), run.ids.next());
        waiting.spawn(async move {
            let mut request = client.send(id, agent, Kind::Unary, replica, Duration::from_secs(15)).await;
            // What it is, to the checker: it waited for an agent that was not there.
            request.kind = Kind::Waiter;
            request
        });
    }
    sleep(Duration::from_secs(3)).await;
    ensure!(waiting.try_join_next().is_none(), "a request for an absent agent did not wait");
    let mut waits = 0.0;
    for n in run.mesh.running() {
        waits += run.mesh.kas(n).metric("kas_requests_waiting").await?;
    }
    #[expect(clippy::cast_precision_loss, reason = "a thousand")]
    let all = requests as f64;
    ensure!(waits >= all, "{waits} requests wait at the replicas, of {requests}");
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
    run.notes.push(format!("{requests} requests waited for {count} agents, {failed} of them in vain."));
    run.measure(&TWICE, [f64::from(failed)]);
    Ok(swarm)
}

/// Agents that come to a replica and leave it as fast as that goes, until it is stopped: each connects, opens
/// a tunnel, and closes its connection when kas has accepted it. Without a tunnel alone it would stay in the
/// table for a moment, for its next one.
pub(super) struct Registering {
    stop: CancellationToken,
    tasks: JoinSet<Result<u64>>,
    begun: Instant,
}

impl Registering {
    /// Begins: replicas, each with the agent that comes and goes there.
    pub(super) fn start(run: &Run, which: &[(usize, i64)]) -> Self {
        let (stop, mut tasks) = (CancellationToken::new(), JoinSet::new());
        for (replica, agent) in which {
            tasks.spawn(register(run.mesh.agents(*replica), *agent, stop.clone()));
        }
        Self { stop, tasks, begun: Instant::now() }
    }

    /// Fails if one of them could not go on.
    pub(super) fn go_on(&mut self) -> Result<()> {
        match self.tasks.try_join_next() {
            None => Ok(()),
            Some(ended) => ended?.and_then(|times| bail!("an agent stopped after {times} times")),
        }
    }

    /// Stops, and returns how often agents came and left, and how long it lasted.
    ///
    /// # Errors
    /// If one of them could not go on.
    pub(super) async fn stop(mut self) -> Result<(u64, Duration)> {
        self.stop.cancel();
        let lasted = self.begun.elapsed();
        let mut sum = 0;
        while let Some(times) = self.tasks.join_next().await {
            sum += times??;
        }
        Ok((sum, lasted))
    }
}

async fn register(replica: SocketAddr, agent: i64, stop: CancellationToken) -> Result<u64> {
    let (token, mut times) = (token(agent), 0);
    while !stop.is_cancelled() {
        let came = async {
            let raw = RawAgent::connect(replica, &token, raw_agent::Kind::Ours).await?;
            raw.tunnel().await?;
            raw.link().cut();
            anyhow::Ok(())
        };
        let came = timeout(SEES, came).await.context("kas did not answer in time").flatten();
        came.with_context(|| format!("agent {agent}, which had come {times} times"))?;
        times += 1;
    }
    Ok(times)
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
    for _ in 0..if run.quick { 1 } else { 8 } {
        hammered(run, first).await?;
    }
    Ok(())
}

/// How long an agent comes and goes: longer than it may be missing in a view (I9), and shorter than a view
/// may have it after it has left (I8).
const HAMMERED: Duration = Duration::from_secs(7);

/// One agent has a tunnel at the last replica all the time, and comes to the two others and leaves them as
/// fast as that goes. Every view must have it at the last one, then and after, and at the others not after.
async fn hammered(run: &mut Run, agent: i64) -> Result<()> {
    let stays = run.setup.replicas - 1;
    let there = run.mesh.agent(stays, agent, raw_agent::Kind::Ours, 1).await?;
    let presence = |replica: &str, to| Presence {
        agent,
        replica: replica.to_owned(),
        connection: None,
        from: clock::now(),
        to,
        invalid_since: None,
    };
    let steady = {
        let mut history = run.history.lock();
        // At the others, it is for moments only.
        for n in 0..stays {
            history.presences.push(presence(&run.name(n), Some(clock::now())));
        }
        history.presences.push(presence(&run.name(stays), None));
        history.presences.len() - 1
    };
    let which: Vec<(usize, i64)> = (0..stays).map(|replica| (replica, agent)).collect();
    let mut coming = Registering::start(run, &which);
    sleep(HAMMERED).await;
    coming.go_on()?;
    run.viewed(agent).await?;
    let (times, lasted) = coming.stop().await?;
    let rate = times as f64 / lasted.as_secs_f64();
    run.notes.push(format!(
        "One agent came to {stays} replicas and left them {times} times within {:.1} s, {rate:.0} times a second, \
         while it had a tunnel at another one.",
        lasted.as_secs_f64()
    ));
    only_at(run, agent, &BTreeSet::from([run.name(stays)])).await?;
    run.viewed(agent).await?;
    there.cut();
    only_at(run, agent, &BTreeSet::new()).await?;
    if let Some(presence) = run.history.lock().presences.get_mut(steady) {
        presence.to = Some(clock::now());
    }
    Ok(())
}

/// Waits until each replica sees an agent at exactly these.
async fn only_at(run: &Run, agent: i64, at: &BTreeSet<String>) -> Result<()> {
    for n in run.mesh.running() {
        let asker = Caller::connect(run.mesh.api(n), Some(run.client.token())).await?;
        within(SEES, &format!("{} sees the agent at {at:?} only", run.name(n)), async || {
            let (_, seen) = look(&asker, &[agent]).await?;
            let holders = seen.agents.get(&agent).cloned().unwrap_or_default();
            Ok(if holders == *at { Ok(()) } else { Err(holders) })
        })
        .await?;
    }
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
