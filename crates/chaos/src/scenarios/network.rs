//! The network between replicas, or to agents, is cut in part.

use std::{sync::Arc, time::Duration};

use anyhow::{Context as _, Result, ensure};
use history::Outcome;
use http::StatusCode;
use proto::kas::api::v1::{ListReplicasRequest, ListReplicasResponse};
use testkit::{
    caller::Caller,
    mesh::LIST_REPLICAS,
    network::{Cut, Traffic},
};
use tokio::{
    task::JoinSet,
    time::{Instant, sleep},
};

use super::{process::RATE, time};
use crate::{
    clock::{self, millis},
    judge::sides::Sides,
    measure::{
        ACROSS_WRONG, FALSE_DEATHS, FLAPS, OWN_FAILED, T_BLACKHOLE, T_HALFOPEN, T_HEAL, T_REFUSE, WRONG_END,
    },
    run::{Run, Way, between},
};

/// How long replicas look for a tunnel in scenarios whose clients try every replica, for requests without a
/// deadline, and the deadline of each try: one at a replica that cannot reach the agent takes that long, and
/// all of them must fit into the 10 s of the whole request.
pub(super) const FIND: &str = "2s";
pub(super) const EACH: Duration = Duration::from_secs(2);

/// A stream that lasts longer than the scenario that cuts it: messages, and the time between them.
const LONG: (u64, Duration) = (900, Duration::from_millis(100));

/// Measures what clients got during a cut that has ended: from a replica that held the agent, everything;
/// with `across`, from one that could reach none of those that did, that the request was not started, in
/// time. The load must have ended.
pub(super) fn sides(run: &mut Run, cut: usize, across: bool) -> Result<()> {
    let Sides { own, own_failed, across: times, across_wrong, examples } =
        Sides::of(&run.history.lock(), cut);
    ensure!(own > 0, "no request came to a replica that held its agent while the network was cut");
    run.measure(&OWN_FAILED, [f64::from(own_failed)]);
    let mut words =
        format!("While the network was cut, {own} attempts came to a replica that held the agent");
    if across {
        ensure!(!times.is_empty(), "no request came to a replica that could not reach its agent");
        words += &format!(", and {} to one that could reach no replica that did", times.len());
        run.measure(&ACROSS_WRONG, [f64::from(across_wrong)]);
        run.measure(&T_REFUSE, times);
    }
    run.notes.push(format!("{words}."));
    let wrong = own_failed > 0 || across && across_wrong > 0;
    run.notes.extend(examples.into_iter().filter(|_| wrong).map(|example| format!("Wrong: {example}.")));
    Ok(())
}

/// Drops packets for a time, counts false deaths meanwhile if none is allowed, and heals. Returns the number
/// of the fault.
async fn cut(run: &mut Run, what: &str, cuts: &[Cut], deaths: bool, lasting: Duration) -> Result<usize> {
    run.load(RATE, 0, 0);
    sleep(Duration::from_secs(2)).await;
    let from = clock::now();
    let fault = run.cut(what, cuts)?;
    sleep(lasting).await;
    if deaths {
        let all: Vec<usize> = (0..run.setup.replicas).collect();
        let deaths = run.false_deaths(from, clock::now(), &all);
        run.measure(&FALSE_DEATHS, [f64::from(deaths)]);
    }
    run.heal(fault)?;
    run.heals(&T_HEAL).await?;
    Ok(fault)
}

pub(super) async fn pair(run: &mut Run) -> Result<()> {
    let lasting = time(run, 10, 30);
    let cuts = between(&[0], &[1], Traffic::All);
    let fault = cut(run, "replicas 0 and 1 are cut", &cuts, true, lasting).await?;
    run.unload().await;
    sides(run, fault, false)
}

pub(super) async fn isolated(run: &mut Run) -> Result<()> {
    run.client.try_all_for(EACH);
    run.load(RATE, 0, 0);
    sleep(Duration::from_secs(2)).await;
    let at = clock::now();
    let fault = run.cut("replica 2 is cut from 0 and 1", &between(&[2], &[0, 1], Traffic::All))?;
    run.seen_by_others(&T_BLACKHOLE, 2, at, Way::Trusted, false).await?;
    sleep(time(run, 8, 30)).await;
    run.heal(fault)?;
    run.heals(&T_HEAL).await?;
    run.unload().await;
    sides(run, fault, true)
}

pub(super) async fn deaf(run: &mut Run) -> Result<()> {
    run.client.try_all_for(EACH);
    run.load(RATE, 0, 0);
    sleep(Duration::from_secs(2)).await;
    let from = clock::now();
    let cuts: Vec<Cut> = [1, 2].map(|other| Cut { from: other, to: 0, what: Traffic::Udp }).into();
    let fault = run.cut("replica 0 hears no UDP", &cuts)?;
    sleep(time(run, 8, 30)).await;
    let (status, _) = run.mesh.kas(0).get("/readiness").await?;
    ensure!(status == StatusCode::OK, "a replica that hears nobody is not ready: {status}");
    let caller = Caller::connect(run.mesh.api(0), Some(run.client.token())).await?;
    let list: ListReplicasResponse = caller.unary(LIST_REPLICAS, &ListReplicasRequest {}).await?;
    ensure!(!list.alarms.is_empty(), "a replica that hears nobody raises no alarm: {list:?}");
    run.notes.push(format!("Replica 0 says: {}", list.alarms.join("; ")));
    // What the deaf one takes for dead is its own affair.
    let deaths = run.false_deaths(from, clock::now(), &[1, 2]);
    run.measure(&FALSE_DEATHS, [f64::from(deaths)]);
    run.heal(fault)?;
    run.heals(&T_HEAL).await?;
    run.unload().await;
    // TCP passed, so that every replica reached every agent.
    sides(run, fault, false)
}

pub(super) async fn split(run: &mut Run) -> Result<()> {
    run.client.try_all_for(EACH);
    run.load(RATE, 0, 0);
    let (first, count) = (run.setup.agents + 1, run.setup.more_agents);
    let mut swarm = run.swarm((first, count, 0, 2), Some(0), 1).await?;
    run.connected(swarm).await?;
    let end = Instant::now() + time(run, 10, 60);
    let fault = run.cut("0, 1, 2 | 3, 4", &between(&[0, 1, 2], &[3, 4], Traffic::All))?;
    // From one side to the other and back: neither hears of it before the end.
    let mut moves = 0_usize;
    while Instant::now() < end || moves.is_multiple_of(2) {
        run.end_swarm(swarm).await?;
        let side = if moves.is_multiple_of(2) { 3 } else { 1 };
        swarm = run.swarm((first, count, 0, 2), Some(side), 1).await?;
        run.connected(swarm).await?;
        moves += 1;
        sleep(Duration::from_secs(2)).await;
    }
    run.notes.push(format!("{count} agents moved between the sides {moves} times."));
    run.heal(fault)?;
    run.heals(&T_HEAL).await?;
    run.unload().await;
    sides(run, fault, true)
}

pub(super) async fn flapping(run: &mut Run) -> Result<()> {
    run.load(RATE, 0, 0);
    sleep(Duration::from_secs(2)).await;
    let (from, end) = (clock::now(), Instant::now() + time(run, 10, 120));
    while Instant::now() < end {
        let fault = run.cut("the link of replicas 0 and 1 is down", &between(&[0], &[1], Traffic::All))?;
        sleep(Duration::from_secs(1)).await;
        run.heal(fault)?;
        sleep(Duration::from_secs(1)).await;
    }
    let (rate, most) = run.route_changes(from, clock::now()).context("no time has passed")?;
    run.measure(&FLAPS, [rate]);
    run.notes.push(format!("While the link was down and up, {most}."));
    run.heals(&T_HEAL).await
}

pub(super) async fn ring(run: &mut Run) -> Result<()> {
    let cuts = [between(&[0], &[2], Traffic::All), between(&[1], &[3], Traffic::All)].concat();
    let lasting = time(run, 10, 30);
    let fault = cut(run, "a ring of 0, 1, 2, 3", &cuts, true, lasting).await?;
    run.unload().await;
    sides(run, fault, false)
}

pub(super) async fn bridge(run: &mut Run) -> Result<()> {
    let lasting = time(run, 10, 30);
    run.client.try_all_for(EACH);
    let cuts = between(&[0, 1], &[3], Traffic::All);
    let fault = cut(run, "0, 1 | 3, and 2 sees both", &cuts, true, lasting).await?;
    run.unload().await;
    sides(run, fault, true)
}

pub(super) async fn join(run: &mut Run) -> Result<()> {
    run.client.try_all_for(EACH);
    run.load(RATE, 0, 0);
    let fault = run.cut("0 | 1, 2", &between(&[0], &[1, 2], Traffic::All))?;
    sleep(Duration::from_secs(5)).await;
    run.join(3).await?;
    sleep(Duration::from_secs(5)).await;
    run.heal(fault)?;
    run.heals(&T_HEAL).await?;
    run.unload().await;
    sides(run, fault, true)
}

pub(super) fn everywhere(replicas: usize, what: Traffic) -> Vec<Cut> {
    let all: Vec<usize> = (0..replicas).collect();
    let mut cuts = between(&all, &all, what);
    cuts.sort_by_key(|cut| (cut.from, cut.to));
    cuts.dedup();
    cuts
}

pub(super) async fn without_udp(run: &mut Run) -> Result<()> {
    let cuts = everywhere(run.setup.replicas, Traffic::Udp);
    let lasting = time(run, 12, 60);
    cut(run, "all UDP packets are dropped", &cuts, true, lasting).await.map(drop)
}

pub(super) async fn half_open(run: &mut Run) -> Result<()> {
    run.load(RATE, 0, 0);
    // Agents without load, on a host of their own. They are not watched by the observer, so their replicas
    // are asked here.
    let (first, count) = (run.setup.agents + 1, run.setup.more_agents);
    let swarm = run.swarm((first, count, 0, 2), None, 1).await?;
    run.connected(swarm).await?;
    let agents: Vec<i64> = (first..first + count).collect();
    let host = run.setup.replicas + 1;
    let replicas: Vec<usize> = (0..run.setup.replicas).collect();
    let mut streams = JoinSet::new();
    for (agent, entry) in agents.iter().copied().zip(replicas.iter().copied().cycle()) {
        let (client, id) = (Arc::clone(&run.client), run.ids.next());
        streams.spawn(async move { client.stream(id, agent, entry, LONG, Duration::from_secs(90)).await });
    }
    sleep(Duration::from_secs(2)).await;
    let at = clock::now();
    let fault = run.cut(
        "all packets of the host of eight agents are dropped",
        &between(&[host], &replicas, Traffic::All),
    )?;
    let mut left: Vec<(usize, Caller)> = Vec::new();
    for n in replicas {
        left.push((n, Caller::connect(run.mesh.api(n), Some(run.client.token())).await?));
    }
    let end = Instant::now() + Duration::from_secs(60);
    while !left.is_empty() && Instant::now() < end {
        let mut still = Vec::new();
        for (n, caller) in left {
            let (_, seen) = crate::observer::look(&caller, &agents).await?;
            if seen.own.is_empty() {
                run.measure(&T_HALFOPEN, [millis(clock::now() - at)]);
            } else {
                still.push((n, caller));
            }
        }
        left = still;
        sleep(Duration::from_millis(500)).await;
    }
    ensure!(left.is_empty(), "a replica holds agents that vanished a minute ago");
    // What had been started on them ends, and as what it is.
    let mut wrong = 0_u32;
    while let Some(stream) = streams.join_next().await {
        let stream = stream?;
        let lasted = millis(stream.ended.unwrap_or_default().saturating_sub(at));
        let is_right = stream.outcome == Some(Outcome::Unknown) && lasted < T_HALFOPEN.gate;
        if !is_right {
            wrong += 1;
            run.notes.push(format!(
                "A stream ended as {:?} after {lasted:.0} ms: {}",
                stream.outcome, stream.detail
            ));
        }
        run.history.lock().requests.push(stream);
    }
    run.measure(&WRONG_END, [f64::from(wrong)]);
    run.heal(fault).map(drop)
}
