//! Failures of replicas: killed, or unreachable because all packets are dropped.

use std::{collections::HashSet, time::Duration};

use anyhow::{Context as _, ensure};
use proto::kas::api::v1::{AgentOnReplica, KasAddress, ListReplicasResponse};
use tokio::{
    task::JoinHandle,
    time::{Instant, sleep, timeout},
};

use super::{
    api::Api,
    balancer::Balancer,
    deployment::{Deployment, Options},
};
use crate::{agents::Agent, child::Process, environment::Environment, times::Times};

/// agentk processes with one connection, and with two.
const ONE: std::ops::RangeInclusive<i64> = 11..=14;
const TWO: std::ops::RangeInclusive<i64> = 21..=28;
/// The first id of the agents that are connected to the killed replica only.
const HELD_FROM: i64 = 1_000;
/// Interval of queries.
const POLL: Duration = Duration::from_millis(5);
/// How long a new state must last to count.
const STAYS: Duration = Duration::from_millis(700);
const LONGEST: Duration = Duration::from_secs(40);
/// Time between kills. The backoff of agentk grows while its connections last for less than ten seconds, as
/// with a kas in a crash loop, which is not what is measured.
const STEADY: Duration = Duration::from_millis(10_500);
const STEP: Duration = Duration::from_secs(20);

/// The results of the kills.
#[derive(Default)]
pub(super) struct Kills {
    pub(super) kills: usize,
    /// From SIGKILL until no other replica routes requests to it.
    pub(super) unrouted: Times,
    /// Until requests are routed to it only if no other replica holds the agent.
    pub(super) suspected: Times,
    /// Until its agents are in no list, and lists lack the answer of no other replica. They mention the
    /// killed replica as long as it may come back.
    pub(super) purged: Times,
    /// Until the first successful request for an agent whose only connection was to it.
    pub(super) failover: Times,
    /// The same for an agent with a second connection to another replica.
    pub(super) failover_two: Times,
    /// Number of requests that failed before the first successful one.
    pub(super) failed: usize,
}

/// Returns the health of a replica in the view of another.
fn health(view: &ListReplicasResponse, name: &str) -> Option<String> {
    view.replicas.iter().find(|row| row.name == name).map(|row| row.standing.clone())
}

/// Returns whether requests may still be routed to a replica.
fn is_routed(health: Option<&str>) -> bool {
    matches!(health, Some("live" | "draining" | "suspect"))
}

/// Follows the view of one replica of another. Returns when requests were no longer routed to it normally,
/// and when none was routed to it any more. Each time is that of the first view that says so and lasts.
fn follow_view(api: Api, name: String, by_answer: bool) -> JoinHandle<anyhow::Result<(Instant, Instant)>> {
    tokio::spawn(async move {
        let until = Instant::now() + LONGEST;
        let (mut suspected, mut unrouted): (Option<Instant>, Option<Instant>) = (None, None);
        let mut asking = tokio::task::JoinSet::new();
        let mut ticks = tokio::time::interval(POLL);
        let mut latest = Instant::now();
        while unrouted.is_none_or(|at| at.elapsed() < STAYS) {
            ensure!(Instant::now() < until, "requests are still routed to a replica after {LONGEST:?}");
            tokio::select! {
                _ = ticks.tick(), if asking.len() < 800 => {
                    let (api, name, asked) = (api.clone(), name.clone(), Instant::now());
                    asking.spawn(async move { (asked, api.replicas().await.map(|view| health(&view, &name))) });
                }
                Some(done) = asking.join_next() => {
                    let (asked, view) = done?;
                    // A view is taken when its query arrives. The response may be delayed by replicas that do
                    // not answer.
                    if asked < latest {
                        continue;
                    }
                    latest = asked;
                    let at = if by_answer { Instant::now() } else { asked };
                    let view = view?;
                    let is_normal = matches!(view.as_deref(), Some("live" | "draining"));
                    suspected = if is_normal { None } else { suspected.or(Some(at)) };
                    unrouted = if is_routed(view.as_deref()) { None } else { unrouted.or(Some(at)) };
                }
            }
        }
        Ok((
            suspected.context("the replica never became suspect")?,
            unrouted.context("requests were always routed to the replica")?,
        ))
    })
}

/// Follows the list of connections of an agent in the view of one replica. Returns when the list became empty
/// and lacked no answer but that of `dead`.
fn follow_list(api: Api, agent: i64, dead: KasAddress) -> JoinHandle<anyhow::Result<Instant>> {
    tokio::spawn(async move {
        let until = Instant::now() + LONGEST;
        let mut purged: Option<Instant> = None;
        while purged.is_none_or(|at| at.elapsed() < STAYS) {
            ensure!(Instant::now() < until, "an agent of a killed replica is still listed after {LONGEST:?}");
            let answer = api.connections(agent).await?;
            let survivors_answered =
                answer.unanswered.iter().all(|silent| silent.address.as_ref() == Some(&dead));
            purged = if answer.agents.is_empty() && survivors_answered {
                purged.or_else(|| Some(Instant::now()))
            } else {
                None
            };
            sleep(2 * POLL).await;
        }
        purged.context("the agent was always listed")
    })
}

/// Calls an agent repeatedly until a call succeeds. Returns when it did, and how many calls failed before.
fn first_success(api: Api, agent: i64) -> JoinHandle<anyhow::Result<(Instant, usize)>> {
    tokio::spawn(async move {
        let until = Instant::now() + LONGEST;
        let mut failed = 0;
        loop {
            match api.echo(agent).await {
                Ok(()) => return Ok((Instant::now(), failed)),
                Err(error) if Instant::now() > until => return Err(error),
                Err(_) => failed += 1,
            }
            sleep(Duration::from_millis(2)).await;
        }
    })
}

/// Returns the names of the replicas that hold tunnels of an agent.
pub(super) async fn holders(api: &Api, agent: i64) -> anyhow::Result<HashSet<String>> {
    let holding = |row: &AgentOnReplica| row.idle_tunnels + row.busy_tunnels > 0;
    Ok(api.explain(agent).await?.replicas.into_iter().filter(holding).map(|row| row.name).collect())
}

/// Waits until an agent is connected to this many replicas.
pub(super) async fn held(api: &Api, agent: i64, replicas: usize) -> anyhow::Result<HashSet<String>> {
    let begin = Instant::now();
    loop {
        let holders = holders(api, agent).await?;
        if holders.len() >= replicas {
            return Ok(holders);
        }
        ensure!(
            begin.elapsed() < 2 * LONGEST,
            "agent {agent} is connected to {} of {replicas} replicas",
            holders.len()
        );
        sleep(Duration::from_millis(50)).await;
    }
}

/// Kills one replica after another, and restarts each.
pub(super) async fn kills(environment: &Environment, count: usize) -> anyhow::Result<Kills> {
    let mut deployment = Deployment::new(environment, "kills", 3, Options::default())?.start().await?;
    let balancer = Balancer::start(&deployment).await?;
    let mut agents: Vec<Process> = Vec::new();
    for number in ONE {
        agents.push(environment.agentk_at(balancer.address, number, 1)?);
    }
    for number in TWO {
        agents.push(environment.agentk_at(balancer.address, number, 2)?);
    }
    let mut kills = Kills::default();
    let mut steady = Instant::now() + STEADY;
    while kills.kills < count {
        tokio::time::sleep_until(steady).await;
        let asked = deployment.replicas[0].api.clone();
        let (mut one, mut two) = (Vec::new(), Vec::new());
        for number in ONE {
            one.push((number, held(&asked, number, 1).await?));
        }
        // Agents look for a second replica every 10 to 20 s. An agent without one now is not counted this
        // time.
        for number in TWO {
            two.push((number, holders(&asked, number).await?));
        }
        two.retain(|(_, holders)| holders.len() > 1);
        // The replica with the most agents that are connected to no other; in turn among equals.
        let of = |agents: &[(i64, HashSet<String>)], index: usize| {
            let name = deployment.replicas[index].name();
            agents.iter().filter(|(_, holders)| holders.contains(&name)).count()
        };
        let turn = kills.kills;
        let victims = (0..3).map(|step| (turn + step) % 3).filter(|index| of(&two, *index) > 0);
        let Some(victim) = victims.max_by_key(|index| of(&one, *index)) else {
            sleep(Duration::from_millis(200)).await;
            continue;
        };
        let name = deployment.replicas[victim].name();
        let survivors: Vec<Api> = deployment
            .others(victim)
            .into_iter()
            .map(|other| deployment.replicas[other].api.clone())
            .collect();
        let number = HELD_FROM + kills.kills as i64;
        let mut agent = Agent::for_calls(deployment.replicas[victim].at.agents, number).await?;
        timeout(STEP, agent.open()).await??;
        for api in &survivors {
            held(api, number, 1).await?;
        }
        // Until no effect of the previous steps is in progress.
        sleep(Duration::from_millis(300).mul_f64(1.0 + rand::random::<f64>())).await;
        let views: Vec<_> =
            survivors.iter().map(|api| follow_view(api.apart(), name.clone(), true)).collect();
        let view = survivors[0].replicas().await?;
        let dead = view.replicas.iter().find(|row| row.name == name).and_then(|row| row.address.clone());
        let dead = dead.context("the replica has no address")?;
        let lists: Vec<_> =
            survivors.iter().map(|api| follow_list(api.apart(), number, dead.clone())).collect();
        sleep(Duration::from_millis(50)).await;
        let begin = Instant::now();
        deployment.replicas[victim].kill()?;
        let call = |holders: &[(i64, HashSet<String>)]| -> Vec<_> {
            holders
                .iter()
                .filter(|(_, holders)| holders.contains(&name))
                .enumerate()
                .map(|(at, (number, _))| first_success(survivors[at % survivors.len()].apart(), *number))
                .collect()
        };
        let (ones, twos) = (call(&one), call(&two));
        let (mut suspected, mut unrouted, mut purged) = (begin, begin, begin);
        for view in views {
            let (first, second) = view.await??;
            suspected = suspected.max(first);
            unrouted = unrouted.max(second);
        }
        for list in lists {
            purged = purged.max(list.await??);
        }
        kills.suspected.push(suspected - begin);
        kills.unrouted.push(unrouted - begin);
        kills.purged.push(purged - begin);
        for (calls, times) in [(ones, &mut kills.failover), (twos, &mut kills.failover_two)] {
            for call in calls {
                let (at, failed) = call.await??;
                times.push(at - begin);
                kills.failed += failed;
            }
        }
        steady = Instant::now() + STEADY;
        kills.kills += 1;
        drop(agent);
        deployment.restart(victim).await?;
    }
    Ok(kills)
}

/// The results of the black holes.
#[derive(Default)]
pub(super) struct Blackholes {
    pub(super) suspected: Times,
    pub(super) unrouted: Times,
    /// Latency of calls to an agent that another replica holds too, one every 20 ms after the packets were
    /// dropped.
    pub(super) calls: Times,
    pub(super) failed: usize,
    /// From the end of the black hole until all replicas know each other again.
    pub(super) healed: Times,
}

/// Drops all packets of one replica after another.
pub(super) async fn blackholes(environment: &Environment, count: usize) -> anyhow::Result<Blackholes> {
    const SHARED: i64 = 31;
    let deployment = Deployment::apart(environment, "blackholes", 3)?.start().await?;
    let mut results = Blackholes::default();
    for turn in 0..count {
        let victim = turn % 3;
        let name = deployment.replicas[victim].name();
        let others = deployment.others(victim);
        let survivors: Vec<Api> =
            others.iter().map(|other| deployment.replicas[*other].api.clone()).collect();
        // The agent is connected to the victim and to one other replica. The third replica receives the
        // calls.
        let lost = environment.agentk_at(deployment.replicas[victim].at.agents, SHARED, 1)?;
        let kept = environment.agentk_at(deployment.replicas[others[0]].at.agents, SHARED, 1)?;
        held(&survivors[1], SHARED, 2).await?;
        sleep(Duration::from_millis(500).mul_f64(1.0 + rand::random::<f64>())).await;
        let views: Vec<_> =
            survivors.iter().map(|api| follow_view(api.apart(), name.clone(), false)).collect();
        sleep(Duration::from_millis(100)).await;
        let begin = Instant::now();
        deployment.net()?.blackhole(victim)?;
        let api = survivors[1].apart();
        let calls = tokio::spawn(async move {
            let mut calls = tokio::task::JoinSet::new();
            let mut ticks = tokio::time::interval(Duration::from_millis(20));
            for _ in 0..200 {
                ticks.tick().await;
                let api = api.clone();
                calls.spawn(async move {
                    let begin = Instant::now();
                    api.echo(SHARED).await.map(|()| begin.elapsed())
                });
            }
            calls.join_all().await
        });
        let (mut suspected, mut unrouted) = (begin, begin);
        for view in views {
            let (first, second) = view.await??;
            suspected = suspected.max(first);
            unrouted = unrouted.max(second);
        }
        results.suspected.push(suspected - begin);
        results.unrouted.push(unrouted - begin);
        for call in calls.await? {
            match call {
                Ok(time) => results.calls.push(time),
                Err(_) => results.failed += 1,
            }
        }
        let begin = Instant::now();
        deployment.net()?.heal(victim)?;
        deployment.meshed().await?;
        results.healed.push(begin.elapsed());
        drop((lost, kept));
        sleep(Duration::from_secs(1)).await;
    }
    Ok(results)
}
