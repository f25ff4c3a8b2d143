//! How soon the others know of an agent, and what a second replica on the way costs.

use std::time::Duration;

use anyhow::{Context as _, ensure};
use tokio::time::{Instant, sleep, timeout};

use super::{
    super::{
        agents::Agent,
        orders::{Load, Loaded, Metadata, Span, Target, Tokens, Work},
        processes::Ground,
    },
    api::first,
    stage::{Options, Stage},
    times::Times,
};

/// Agents of the identity file, by what they are for.
pub(super) const PROP_FROM: i64 = 200;
pub(super) const UNBLOCK_FROM: i64 = 500;
pub(super) const GOSSIP_FROM: i64 = 800;
/// Calls that wait at once on one connection: fewer than a listener allows.
const AT_ONCE: usize = 50;
/// Time for calls to arrive and wait.
const SETTLE: Duration = Duration::from_millis(200);
const STEP: Duration = Duration::from_secs(20);

/// A pause that is no multiple of anything.
async fn jitter(up_to: Duration) {
    sleep(up_to.mul_f64(rand::random::<f64>())).await;
}

/// For each agent: calls wait on two replicas, the agent connects to the third.
///
/// Returns the time from its first tunnel's acceptance until both calls have arrived at it.
pub(super) async fn propagation(stage: &Stage<'_>, count: i64) -> anyhow::Result<Times> {
    let mut times = Times::default();
    let agents: Vec<i64> = (PROP_FROM..PROP_FROM + count).collect();
    for (turn, batch) in agents.chunks(AT_ONCE).enumerate() {
        let holder = turn % stage.replicas.len();
        let mut waiting = Vec::new();
        let others: Vec<_> =
            stage.others(holder).into_iter().map(|other| stage.replicas[other].api.apart()).collect();
        for number in batch {
            waiting.push(others.iter().map(|api| api.waiting(*number)).collect::<Vec<_>>());
        }
        sleep(SETTLE).await;
        let mut connected = Vec::new();
        for (number, calls) in batch.iter().zip(waiting) {
            ensure!(calls.iter().all(|call| !call.is_finished()), "a call did not wait for its agent");
            let mut agent = Agent::for_calls(stage.replicas[holder].at.agents, *number).await?;
            jitter(Duration::from_millis(40)).await;
            timeout(STEP, agent.open()).await??;
            let registered = Instant::now();
            for _ in 1..calls.len() {
                timeout(STEP, agent.open()).await??;
            }
            times.push(agent.serve_one_each().await? - registered);
            for call in calls {
                call.await??;
            }
            connected.push(agent);
        }
    }
    Ok(times)
}

/// For each agent: a call waits on one replica, the agent connects to another.
///
/// Returns the time from the begin of the agent's dial until the call has arrived at it.
pub(super) async fn unblocking(stage: &Stage<'_>, count: i64) -> anyhow::Result<Times> {
    let mut times = Times::default();
    let agents: Vec<i64> = (UNBLOCK_FROM..UNBLOCK_FROM + count).collect();
    for (turn, batch) in agents.chunks(AT_ONCE).enumerate() {
        let holder = turn % stage.replicas.len();
        let asked = (holder + 1) % stage.replicas.len();
        let api = stage.replicas[asked].api.apart();
        let waiting: Vec<_> = batch.iter().map(|number| api.waiting(*number)).collect();
        sleep(SETTLE).await;
        let mut connected = Vec::new();
        for (number, call) in batch.iter().zip(waiting) {
            ensure!(!call.is_finished(), "a call did not wait for its agent");
            jitter(Duration::from_millis(40)).await;
            let begin = Instant::now();
            let mut agent = Agent::for_calls(stage.replicas[holder].at.agents, *number).await?;
            timeout(STEP, agent.open()).await??;
            times.push(agent.serve_one_each().await? - begin);
            call.await??;
            connected.push(agent);
        }
    }
    Ok(times)
}

/// As [`propagation`], with every table stream cut: until the view of both others names the agent.
pub(super) async fn gossip_only(stage: &Stage<'_>, count: i64) -> anyhow::Result<Times> {
    const POLL: Duration = Duration::from_millis(10);
    for index in 0..stage.replicas.len() {
        stage.net()?.cut_streams(index)?;
    }
    // Until the last stream is given up: an agent that connects before could still travel by it.
    sleep(Duration::from_secs(9)).await;
    let mut times = Times::default();
    let mut connected = Vec::new();
    for number in GOSSIP_FROM..GOSSIP_FROM + count {
        let holder = 0;
        // An answer waits half a second for the replicas that cannot be asked, and tells of the moment when it
        // comes: so the first question is asked long before.
        let views: Vec<_> = stage
            .others(holder)
            .into_iter()
            .map(|other| {
                let api = stage.replicas[other].api.clone();
                let ask = move || {
                    let api = api.clone();
                    async move { api.believes(number).await }
                };
                tokio::spawn(async move { first(POLL, STEP, ask, |held| *held).await })
            })
            .collect();
        sleep(Duration::from_millis(700)).await;
        jitter(Duration::from_millis(200)).await;
        let mut agent = Agent::for_calls(stage.replicas[holder].at.agents, number).await?;
        timeout(STEP, agent.open()).await??;
        let registered = Instant::now();
        let mut known = registered;
        for view in views {
            known = known.max(view.await?.context("the view of another replica")?.1);
        }
        times.push(known - registered);
        connected.push(agent);
    }
    for index in 0..stage.replicas.len() {
        stage.net()?.heal(index)?;
    }
    Ok(times)
}

/// One round of calls: direct, through the replica that holds the agent, and through another one.
#[derive(Debug)]
pub(super) struct Hops {
    pub(super) direct: Loaded,
    pub(super) one: Loaded,
    pub(super) two: Loaded,
}

pub(super) fn per_second(loaded: &Loaded) -> f64 {
    loaded.done as f64 / loaded.seconds
}

/// Alternates the three ways within each round, each round beginning with another one.
pub(super) async fn hops(ground: &Ground, rounds: u32) -> anyhow::Result<Vec<Hops>> {
    const AGENT: i64 = 1;
    let stage = Stage::new(ground, "hops", 3, Options::default())?.start().await?;
    let (direct, address) = ground.direct()?;
    let agent = ground.agentk_at(stage.replicas[1].at.agents, AGENT, 1)?;
    // The first call waits until the agent is there.
    stage.replicas[0].api.echo(AGENT).await.with_context(|| agent.tail())?;
    stage.replicas[1].api.echo(AGENT).await?;
    let mut client = ground.client()?;
    let targets = [address, stage.replicas[1].at.api, stage.replicas[0].at.api];
    let mut all = Vec::new();
    for round in 0..rounds {
        let mut loaded = [const { None }; 3];
        for step in 0..3 {
            let way = (round as usize + step) % 3;
            let load = Load {
                target: Target {
                    address: targets[way],
                    metadata: Some(Metadata {
                        agent: AGENT,
                        secret_file: ground.secret_file(),
                        tokens: Tokens::EachSecond,
                    }),
                },
                work: Work::Unary(100),
                connections: 4,
                callers: 64,
                span: Span::Time { warm: 500, run: 1_500 },
                stalled: false,
            };
            let done = client.load(&load, |_, _| Ok(()))?;
            ensure!(done.failed == 0, "{} calls failed: {}", done.failed, done.why.unwrap_or_default());
            loaded[way] = Some(done);
        }
        if let [Some(direct), Some(one), Some(two)] = loaded {
            all.push(Hops { direct, one, two });
        }
    }
    drop(direct);
    Ok(all)
}
