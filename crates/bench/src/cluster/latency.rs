//! How soon other replicas know of an agent, and the cost of a second replica in the path of a call.

use std::time::Duration;

use anyhow::{Context as _, ensure};
use tokio::time::{Instant, sleep, timeout};

use super::{
    api::first,
    deployment::{Deployment, Options},
};
use crate::{
    agents::Agent,
    environment::Environment,
    protocol::{Load, Loaded, Metadata, Span, Target, Tokens, Work},
    times::Times,
};

/// The first ids of the agents of each measurement.
pub(super) const PROP_FROM: i64 = 200;
pub(super) const UNBLOCK_FROM: i64 = 500;
pub(super) const GOSSIP_FROM: i64 = 800;
/// Waiting calls per connection: fewer than the listener allows.
const AT_ONCE: usize = 50;
/// Time until calls have arrived and wait.
const SETTLE: Duration = Duration::from_millis(200);
const STEP: Duration = Duration::from_secs(20);

/// Sleeps for a random time, so that nothing is measured at the same phase of a period.
async fn jitter(up_to: Duration) {
    sleep(up_to.mul_f64(rand::random::<f64>())).await;
}

/// For each agent, calls wait on two replicas, and the agent connects to the third.
///
/// Returns the time from the acceptance of its first tunnel until both calls have arrived.
pub(super) async fn propagation(deployment: &Deployment<'_>, count: i64) -> anyhow::Result<Times> {
    let mut times = Times::default();
    let agents: Vec<i64> = (PROP_FROM..PROP_FROM + count).collect();
    for (turn, batch) in agents.chunks(AT_ONCE).enumerate() {
        let holder = turn % deployment.replicas.len();
        let mut waiting = Vec::new();
        let others: Vec<_> = deployment
            .others(holder)
            .into_iter()
            .map(|other| deployment.replicas[other].api.apart())
            .collect();
        for number in batch {
            waiting.push(others.iter().map(|api| api.waiting(*number)).collect::<Vec<_>>());
        }
        sleep(SETTLE).await;
        let mut connected = Vec::new();
        for (number, calls) in batch.iter().zip(waiting) {
            ensure!(calls.iter().all(|call| !call.is_finished()), "a call did not wait for its agent");
            let mut agent = Agent::for_calls(deployment.replicas[holder].at.agents, *number).await?;
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

/// For each agent, a call waits on one replica, and the agent connects to another.
///
/// Returns the time from the start of the connection until the call has arrived.
pub(super) async fn unblocking(deployment: &Deployment<'_>, count: i64) -> anyhow::Result<Times> {
    let mut times = Times::default();
    let agents: Vec<i64> = (UNBLOCK_FROM..UNBLOCK_FROM + count).collect();
    for (turn, batch) in agents.chunks(AT_ONCE).enumerate() {
        let holder = turn % deployment.replicas.len();
        let asked = (holder + 1) % deployment.replicas.len();
        let api = deployment.replicas[asked].api.apart();
        let waiting: Vec<_> = batch.iter().map(|number| api.waiting(*number)).collect();
        sleep(SETTLE).await;
        let mut connected = Vec::new();
        for (number, call) in batch.iter().zip(waiting) {
            ensure!(!call.is_finished(), "a call did not wait for its agent");
            jitter(Duration::from_millis(40)).await;
            let begin = Instant::now();
            let mut agent = Agent::for_calls(deployment.replicas[holder].at.agents, *number).await?;
            timeout(STEP, agent.open()).await??;
            times.push(agent.serve_one_each().await? - begin);
            call.await??;
            connected.push(agent);
        }
    }
    Ok(times)
}

/// Like [`propagation`], without table streams. Returns the time until the views of both other replicas
/// contain the agent.
pub(super) async fn gossip_only(deployment: &Deployment<'_>, count: i64) -> anyhow::Result<Times> {
    const POLL: Duration = Duration::from_millis(10);
    for index in 0..deployment.replicas.len() {
        deployment.net()?.cut_streams(index)?;
    }
    // Until the last stream is closed: it could still carry an agent that connects before.
    sleep(Duration::from_secs(9)).await;
    let mut times = Times::default();
    let mut connected = Vec::new();
    for number in GOSSIP_FROM..GOSSIP_FROM + count {
        let holder = 0;
        // A response takes half a second, because replicas cannot be asked, and has the state at its end. So
        // the first query is sent long before.
        let views: Vec<_> = deployment
            .others(holder)
            .into_iter()
            .map(|other| {
                let api = deployment.replicas[other].api.clone();
                let ask = move || {
                    let api = api.clone();
                    async move { api.believes(number).await }
                };
                tokio::spawn(async move { first(POLL, STEP, ask, |held| *held).await })
            })
            .collect();
        sleep(Duration::from_millis(700)).await;
        jitter(Duration::from_millis(200)).await;
        let mut agent = Agent::for_calls(deployment.replicas[holder].at.agents, number).await?;
        timeout(STEP, agent.open()).await??;
        let registered = Instant::now();
        let mut known = registered;
        for view in views {
            known = known.max(view.await?.context("the view of another replica")?.1);
        }
        times.push(known - registered);
        connected.push(agent);
    }
    for index in 0..deployment.replicas.len() {
        deployment.net()?.heal(index)?;
    }
    Ok(times)
}

/// One round of calls: direct, through the replica that holds the agent, and through another.
#[derive(Debug)]
pub(super) struct Hops {
    pub(super) direct: Loaded,
    pub(super) one: Loaded,
    pub(super) two: Loaded,
}

pub(super) fn per_second(loaded: &Loaded) -> f64 {
    loaded.done as f64 / loaded.seconds
}

/// Measures the three in turn in each round, beginning with another one each time.
pub(super) async fn hops(environment: &Environment, rounds: u32) -> anyhow::Result<Vec<Hops>> {
    const AGENT: i64 = 1;
    let deployment = Deployment::new(environment, "hops", 3, Options::default())?.start().await?;
    let (direct, address) = environment.direct()?;
    let agent = environment.agentk_at(deployment.replicas[1].at.agents, AGENT, 1)?;
    // The first call waits until the agent is connected.
    deployment.replicas[0].api.echo(AGENT).await.with_context(|| agent.tail())?;
    deployment.replicas[1].api.echo(AGENT).await?;
    let mut client = environment.client()?;
    let targets = [address, deployment.replicas[1].at.api, deployment.replicas[0].at.api];
    let mut all = Vec::new();
    for round in 0..rounds {
        let mut loaded = [const { None }; 3];
        for step in 0..3 {
            let path = (round as usize + step) % 3;
            let load = Load {
                target: Target {
                    address: targets[path],
                    metadata: Some(Metadata {
                        agent: AGENT,
                        secret_file: environment.secret_file(),
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
            loaded[path] = Some(done);
        }
        if let [Some(direct), Some(one), Some(two)] = loaded {
            all.push(Hops { direct, one, two });
        }
    }
    drop(direct);
    Ok(all)
}
