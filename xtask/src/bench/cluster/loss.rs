//! What follows when a replica is killed, or vanishes behind packets that are dropped.

use std::{collections::HashSet, time::Duration};

use anyhow::{Context as _, ensure};
use proto::kas::api::v1::{AgentOnReplica, KasAddress, ListReplicasResponse};
use tokio::{
    task::JoinHandle,
    time::{Instant, sleep, timeout},
};

use super::{
    super::{
        agents::Agent,
        processes::{Ground, Process},
    },
    api::Api,
    stage::{Balancer, Options, Stage},
    times::Times,
};

/// agentk processes with one connection, and with two.
const ONE: std::ops::RangeInclusive<i64> = 11..=14;
const TWO: std::ops::RangeInclusive<i64> = 21..=28;
/// The agents that only the killed replica holds.
const HELD_FROM: i64 = 1_000;
/// How often views are asked for.
const POLL: Duration = Duration::from_millis(5);
/// How long a view must stay as it is to count.
const STAYS: Duration = Duration::from_millis(700);
const LONGEST: Duration = Duration::from_secs(40);
/// Between kills: agentk's pauses before it dials again grow while its connections live for less than ten seconds, as
/// they do at a kas in a crash loop, which is not what is measured.
const STEADY: Duration = Duration::from_millis(10_500);
const STEP: Duration = Duration::from_secs(20);

/// What the kills showed.
#[derive(Default)]
pub(super) struct Kills {
    pub(super) kills: usize,
    /// From SIGKILL until neither survivor routes to the replica.
    pub(super) unrouted: Times,
    /// Until it is only asked last.
    pub(super) suspected: Times,
    /// Until its agents are in no list, and lists miss nobody else's answer. That it cannot be asked is said for as long
    /// as it may come back.
    pub(super) purged: Times,
    /// First success for an agent that had one connection, to it.
    pub(super) failover: Times,
    /// The same for an agent that had a second one elsewhere.
    pub(super) failover_two: Times,
    /// Requests within the failovers that failed before that.
    pub(super) failed: usize,
}

/// How a replica judges another one.
fn standing(view: &ListReplicasResponse, name: &str) -> Option<String> {
    view.replicas.iter().find(|row| row.name == name).map(|row| row.standing.clone())
}

/// Whether requests may still go there.
fn routed(standing: Option<&str>) -> bool {
    matches!(standing, Some("live" | "draining" | "suspect"))
}

/// Follows one survivor's view of a replica; returns when it was last asked first, and last asked at all: each the time
/// of the first view that says otherwise and stays.
fn follow(api: Api, name: String, by_answer: bool) -> JoinHandle<anyhow::Result<(Instant, Instant)>> {
    tokio::spawn(async move {
        let until = Instant::now() + LONGEST;
        let (mut suspected, mut unrouted): (Option<Instant>, Option<Instant>) = (None, None);
        let mut asking = tokio::task::JoinSet::new();
        let mut ticks = tokio::time::interval(POLL);
        let mut latest = Instant::now();
        while unrouted.is_none_or(|at| at.elapsed() < STAYS) {
            ensure!(Instant::now() < until, "a replica is still routed to after {LONGEST:?}");
            tokio::select! {
                _ = ticks.tick(), if asking.len() < 800 => {
                    let (api, name, asked) = (api.clone(), name.clone(), Instant::now());
                    asking.spawn(async move { (asked, api.replicas().await.map(|view| standing(&view, &name))) });
                }
                Some(done) = asking.join_next() => {
                    let (asked, view) = done?;
                    // The view is taken when the question arrives; the answer waits for replicas that do not answer.
                    if asked < latest {
                        continue;
                    }
                    latest = asked;
                    let at = if by_answer { Instant::now() } else { asked };
                    let view = view?;
                    let is_first = matches!(view.as_deref(), Some("live" | "draining"));
                    suspected = if is_first { None } else { suspected.or(Some(at)) };
                    unrouted = if routed(view.as_deref()) { None } else { unrouted.or(Some(at)) };
                }
            }
        }
        Ok((suspected.context("never suspected")?, unrouted.context("always routed to")?))
    })
}

/// Follows one survivor's list of an agent's connections; returns when it became empty and missed no answer but that of
/// `dead`.
fn follow_list(api: Api, agent: i64, dead: KasAddress) -> JoinHandle<anyhow::Result<Instant>> {
    tokio::spawn(async move {
        let until = Instant::now() + LONGEST;
        let mut purged: Option<Instant> = None;
        while purged.is_none_or(|at| at.elapsed() < STAYS) {
            ensure!(Instant::now() < until, "an agent of a dead replica is still listed after {LONGEST:?}");
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
        purged.context("never purged")
    })
}

/// Calls an agent again and again until it answers.
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
            "agent {agent} stays at {} of {replicas} replicas",
            holders.len()
        );
        sleep(Duration::from_millis(50)).await;
    }
}

/// Kills one replica after the other, and starts each again.
pub(super) async fn kills(ground: &Ground, count: usize) -> anyhow::Result<Kills> {
    let mut stage = Stage::new(ground, "kills", 3, Options::default())?.start().await?;
    let balancer = Balancer::start(&stage).await?;
    let mut agents: Vec<Process> = Vec::new();
    for number in ONE {
        agents.push(ground.agentk_at(balancer.address, number, 1)?);
    }
    for number in TWO {
        agents.push(ground.agentk_at(balancer.address, number, 2)?);
    }
    let mut kills = Kills::default();
    let mut steady = Instant::now() + STEADY;
    while kills.kills < count {
        tokio::time::sleep_until(steady).await;
        let asked = stage.replicas[0].api.clone();
        let (mut one, mut two) = (Vec::new(), Vec::new());
        for number in ONE {
            one.push((number, held(&asked, number, 1).await?));
        }
        // Agents look for a second replica every 10 to 20 s: who has none now is not counted this time.
        for number in TWO {
            two.push((number, holders(&asked, number).await?));
        }
        two.retain(|(_, holders)| holders.len() > 1);
        // The one with the most agents that have nobody else; in turn among equals.
        let of = |agents: &[(i64, HashSet<String>)], index: usize| {
            let name = stage.replicas[index].name();
            agents.iter().filter(|(_, holders)| holders.contains(&name)).count()
        };
        let turn = kills.kills;
        let victims = (0..3).map(|step| (turn + step) % 3).filter(|index| of(&two, *index) > 0);
        let Some(victim) = victims.max_by_key(|index| of(&one, *index)) else {
            sleep(Duration::from_millis(200)).await;
            continue;
        };
        let name = stage.replicas[victim].name();
        let survivors: Vec<Api> =
            stage.others(victim).into_iter().map(|other| stage.replicas[other].api.clone()).collect();
        let number = HELD_FROM + kills.kills as i64;
        let mut agent = Agent::for_calls(stage.replicas[victim].at.agents, number).await?;
        timeout(STEP, agent.open()).await??;
        for api in &survivors {
            held(api, number, 1).await?;
        }
        // Nothing of the steps before is under way.
        sleep(Duration::from_millis(300).mul_f64(1.0 + rand::random::<f64>())).await;
        let views: Vec<_> = survivors.iter().map(|api| follow(api.apart(), name.clone(), true)).collect();
        let view = survivors[0].replicas().await?;
        let dead = view.replicas.iter().find(|row| row.name == name).and_then(|row| row.address.clone());
        let dead = dead.context("a replica without an address")?;
        let lists: Vec<_> =
            survivors.iter().map(|api| follow_list(api.apart(), number, dead.clone())).collect();
        sleep(Duration::from_millis(50)).await;
        let begin = Instant::now();
        stage.replicas[victim].kill()?;
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
        stage.again(victim).await?;
    }
    Ok(kills)
}

/// What the black holes showed.
#[derive(Default)]
pub(super) struct Holes {
    pub(super) suspected: Times,
    pub(super) unrouted: Times,
    /// A call for an agent that another replica holds too, begun every 20 ms while the one vanished.
    pub(super) calls: Times,
    pub(super) failed: usize,
    /// From the end of the black hole until all know each other again.
    pub(super) healed: Times,
}

/// Drops all packets of one replica after the other.
pub(super) async fn blackholes(ground: &Ground, count: usize) -> anyhow::Result<Holes> {
    const SHARED: i64 = 31;
    let stage = Stage::apart(ground, "holes", 3)?.start().await?;
    let mut holes = Holes::default();
    for turn in 0..count {
        let victim = turn % 3;
        let name = stage.replicas[victim].name();
        let others = stage.others(victim);
        let survivors: Vec<Api> = others.iter().map(|other| stage.replicas[*other].api.clone()).collect();
        // One process at the replica that vanishes, one at a survivor; the other survivor is asked.
        let lost = ground.agentk_at(stage.replicas[victim].at.agents, SHARED, 1)?;
        let kept = ground.agentk_at(stage.replicas[others[0]].at.agents, SHARED, 1)?;
        held(&survivors[1], SHARED, 2).await?;
        sleep(Duration::from_millis(500).mul_f64(1.0 + rand::random::<f64>())).await;
        let views: Vec<_> = survivors.iter().map(|api| follow(api.apart(), name.clone(), false)).collect();
        sleep(Duration::from_millis(100)).await;
        let begin = Instant::now();
        stage.net()?.blackhole(victim)?;
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
        holes.suspected.push(suspected - begin);
        holes.unrouted.push(unrouted - begin);
        for call in calls.await? {
            match call {
                Ok(time) => holes.calls.push(time),
                Err(_) => holes.failed += 1,
            }
        }
        let begin = Instant::now();
        stage.net()?.heal(victim)?;
        stage.meshed().await?;
        holes.healed.push(begin.elapsed());
        drop((lost, kept));
        sleep(Duration::from_secs(1)).await;
    }
    Ok(holes)
}
