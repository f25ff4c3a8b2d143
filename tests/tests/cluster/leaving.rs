//! Clean shutdown of replicas: no request is lost, and a draining replica is asked last.

use std::{collections::BTreeSet, time::Duration};

use anyhow::Result;
use grpc::Code;
use serde_json::json;
use testkit::{
    agent14::{Agent14, Version},
    agentk::Agentk,
    bench::{self, payload},
    caller::Caller,
    handler::path,
    kas::{token, within},
    mesh::{Balancer, Mesh, Options},
    process::SOON,
    raw_agent::Kind,
};
use tokio::{task::JoinSet, time::Instant};

use crate::ledger::{End, Ledger};

/// Fails if a draining replica counts as live.
#[tokio::test]
async fn draining_replica_is_used_last() -> Result<()> {
    let config = json!({ "drain": { "delay": "8s" } });
    let mesh = Mesh::start_with(Options { config, ..Options::default() }).await?;
    let both = [mesh.agent(0, 1, Kind::Ours, 4).await?, mesh.agent(1, 1, Kind::Ours, 4).await?];
    let only = mesh.agent(0, 2, Kind::Ours, 2).await?;
    mesh.converged(&[(1, 0), (1, 1), (2, 0)]).await?;
    let caller = mesh.caller(2).await?;
    let call = async |agent: i64| {
        let got = caller.call(caller.to_agent(agent, &path("Echo")), &[b"x"]).await?;
        anyhow::ensure!(got.status.code() == Code::Ok, "{}", got.status);
        anyhow::Ok(())
    };
    // One tunnel carries some requests in sequence, and then another replica may be asked.
    for _ in 0..2_500 {
        call(1).await?;
    }
    assert!(both.iter().all(|agent| agent.ids().len() > 5), "both are used while both stay");
    let told = Instant::now();
    mesh.kas(0).process.terminate();
    within(SOON, "the others know that it leaves", async || {
        let row = mesh.row(2, 0).await?;
        let known = row.as_ref().is_some_and(|row| row.state == "draining" && row.standing == "draining");
        Ok(if known { Ok(()) } else { Err(row) })
    })
    .await?;
    println!("it was known to leave after {:?}", told.elapsed());
    let hedges = "kas_peer_hedges_total";
    let (before, hedged) = (both[0].ids().len(), mesh.kas(2).metric(hedges).await?);
    for _ in 0..40 {
        call(1).await?;
    }
    // It is also asked if the other one did not respond within milliseconds, as on a busy machine.
    let hedged = mesh.kas(2).metric(hedges).await? - hedged;
    let went = both[0].ids().len() - before;
    assert!(went as f64 <= hedged, "{went} went to the one that leaves, and {hedged} asks were hedged");
    // Agents that only it holds are still served.
    call(2).await?;
    assert!(told.elapsed() < Duration::from_secs(8), "it has left meanwhile: {:?}", told.elapsed());
    assert!(mesh.kas(0).process.exited(SOON).await?.success());
    within(SOON, "a replica that left is forgotten", async || {
        let view = mesh.view(2).await?;
        Ok(if view.holders == [(1, 1)].into() { Ok(()) } else { Err(view) })
    })
    .await?;
    call(1).await?;
    drop(only);
    Ok(())
}

#[tokio::test]
async fn requests_that_wait_at_a_draining_owner_move_to_another_replica() -> Result<()> {
    let mesh = Mesh::start(3).await?;
    let busy = mesh.agent(0, 1, Kind::Ours, 1).await?;
    mesh.converged(&[(1, 0)]).await?;
    let ledger = Ledger::default();
    let caller = mesh.caller(1).await?;
    // The only tunnel is busy, so these wait at its owner.
    let mut holding = caller.open(caller.to_agent(1, &path("Chat"))).await?;
    holding.send(testkit::caller::frame(b"x")).await.unwrap();
    holding.next().await;
    let mut waiting = JoinSet::new();
    for _ in 0..40 {
        let (ledger, caller) = (ledger.clone(), caller.clone());
        waiting.spawn(async move { ledger.echo(&caller, 1, Duration::from_secs(20)).await });
    }
    mesh.kas(1).metric_is("kas_requests_waiting", 40.0).await?;
    mesh.kas(0).process.terminate();
    let other = mesh.agent(2, 1, Kind::Ours, 4).await?;
    while let Some(end) = waiting.join_next().await {
        assert_eq!(end?, End::Answered, "{:?}", ledger.texts(End::NotStarted));
    }
    ledger.check(&[&busy, &other])?;
    // Started requests end there.
    holding.send(testkit::caller::frame(b"still")).await.unwrap();
    assert_eq!(holding.next().await, testkit::link::Next::Message("still".into()));
    holding.half_close().unwrap();
    assert_eq!(testkit::caller::answer(&mut holding).await?.status.code(), Code::Ok);
    assert!(mesh.kas(0).process.exited(SOON).await?.success());
    Ok(())
}

#[tokio::test]
async fn agentk_on_two_replicas_is_reached_at_once_when_one_is_killed() -> Result<()> {
    let mesh = Mesh::start(3).await?;
    mesh.converged(&[]).await?;
    let balancer = Balancer::start((0..2).map(|n| mesh.agents(n)).collect()).await?;
    let ours = Agentk::start_from(None, balancer.address, &token(1)).await?;
    mesh.converged(&[(1, 0), (1, 1)]).await?;
    let caller = mesh.caller(2).await?;
    let message = payload("x");
    let mut slowest = Duration::ZERO;
    for n in 0..400 {
        if n == 100 {
            mesh.kill(0).await?;
        }
        let begun = Instant::now();
        let got = caller.call(caller.to_agent(1, bench::ECHO), &[&message]).await?;
        assert_eq!(got.status.code(), Code::Ok, "request {n}: {}", got.status);
        slowest = slowest.max(begun.elapsed());
    }
    println!("the slowest of 400 requests, across a kill, took {slowest:?}");
    // Entries live for ten seconds.
    assert!(slowest < Duration::from_secs(9), "{slowest:?}");
    drop(ours);
    Ok(())
}

/// Failures of requests to one agent.
#[derive(Debug, Default)]
struct Tally {
    answered: usize,
    failed: Vec<String>,
}

/// Sends requests to the replicas that accept them, one after the other, until stopped.
async fn ask(
    mut callers: tokio::sync::watch::Receiver<Vec<Caller>>,
    agent: i64,
    method: &str,
    mut stop: tokio::sync::watch::Receiver<bool>,
) -> Tally {
    let mut tally = Tally::default();
    let message = payload("x");
    let mut n = 0;
    while !*stop.borrow_and_update() {
        let caller = {
            let callers = callers.borrow_and_update();
            n += 1;
            callers[n % callers.len()].clone()
        };
        match caller.call(caller.to_agent(agent, method), &[&message]).await {
            Ok(got) if got.status.code() == Code::Ok => tally.answered += 1,
            Ok(got) => tally.failed.push(got.status.to_string()),
            Err(error) => tally.failed.push(format!("{error:#}")),
        }
    }
    tally
}

#[tokio::test]
async fn rolling_restart_of_all_replicas_fails_no_request_to_our_agents() -> Result<()> {
    let config = json!({ "drain": { "delay": "1s" } });
    let mut mesh = Mesh::start_with(Options { config, ..Options::default() }).await?;
    mesh.converged(&[]).await?;
    let balancer = Balancer::start((0..3).map(|n| mesh.agents(n)).collect()).await?;
    let ours = Agentk::start_from(None, balancer.address, &token(1)).await?;
    let old = start_old(&balancer).await?;
    // Its connections have one id, because they come from one process: the list shows one of them.
    let on_two = async |mesh: &Mesh, asked: usize| {
        within(2 * SOON, "our agentk is on two replicas", async || {
            let holders: BTreeSet<_> =
                mesh.view(asked).await?.holders.into_iter().filter(|(agent, _)| *agent == 1).collect();
            Ok(if holders.len() >= 2 { Ok(()) } else { Err(holders) })
        })
        .await
    };
    on_two(&mesh, 0).await?;
    let all = async |mesh: &Mesh, but: Option<usize>| {
        let mut callers = Vec::new();
        for n in (0..3).filter(|n| Some(*n) != but) {
            callers.push(mesh.caller(n).await?);
        }
        anyhow::Ok(callers)
    };
    let (callers, to) = tokio::sync::watch::channel(all(&mesh, None).await?);
    let (stop, stopped) = tokio::sync::watch::channel(false);
    let mut workers = JoinSet::new();
    for _ in 0..3 {
        let (to, stopped) = (to.clone(), stopped.clone());
        workers.spawn(async move { (1, ask(to, 1, bench::ECHO, stopped).await) });
    }
    let echo = path("Echo");
    {
        let (to, stopped) = (to.clone(), stopped.clone());
        workers.spawn(async move { (2, ask(to, 2, &echo, stopped).await) });
    }
    let begun = Instant::now();
    for n in 0..3 {
        // As a load balancer does: a replica that is not ready gets no new requests, and a new one gets them
        // a moment later.
        let others = all(&mesh, Some(n)).await?;
        mesh.kas(n).process.terminate();
        balancer.set_targets((0..3).filter(|other| *other != n).map(|n| mesh.agents(n)).collect());
        callers.send_replace(others);
        assert!(mesh.kas(n).process.exited(SOON).await?.success());
        mesh.restart(n).await?;
        balancer.set_targets((0..3).map(|n| mesh.agents(n)).collect());
        callers.send_replace(all(&mesh, None).await?);
        on_two(&mesh, n).await?;
        println!("replica {n} is back, and the agent on two, after {:?}", begun.elapsed());
    }
    stop.send_replace(true);
    let mut of_ours = Tally::default();
    while let Some(worker) = workers.join_next().await {
        let (agent, tally) = worker?;
        println!("agent {agent}: {} answered, failed: {:?}", tally.answered, tally.failed);
        if agent == 1 {
            of_ours.answered += tally.answered;
            of_ours.failed.extend(tally.failed);
        } else {
            // Its only connection moves; requests wait meanwhile. No started request is lost.
            assert!(tally.answered > 0);
        }
    }
    assert_eq!(of_ours.failed, [""; 0], "of {}", of_ours.answered);
    assert!(of_ours.answered > 500, "{}", of_ours.answered);
    drop((ours, old));
    Ok(())
}

/// An agent like GitLab's that reconnects when its connection ends.
async fn start_old(balancer: &Balancer) -> Result<JoinSet<()>> {
    let address = balancer.address;
    let first = Agent14::start(address, &token(2), Version::Old).await?;
    let mut keeper = JoinSet::new();
    keeper.spawn(async move {
        let mut agent = first;
        loop {
            // Its configuration stream ends when its replica leaves.
            while let Ok(Some(_)) = agent.next_configuration_unbounded().await {}
            loop {
                if let Ok(next) = Agent14::start(address, &token(2), Version::Old).await {
                    // The old connection stays for a moment, so that its requests can end.
                    let before = std::mem::replace(&mut agent, next);
                    tokio::spawn(async move {
                        tokio::time::sleep(Duration::from_secs(5)).await;
                        drop(before);
                    });
                    break;
                }
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    });
    Ok(keeper)
}
