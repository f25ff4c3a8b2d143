//! Agents that connect and disconnect quickly, and thousands of waiting requests.

use std::{
    collections::BTreeSet,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use grpc::Code;
use serde_json::json;
use testkit::{
    caller::{Caller, answer, frame},
    handler::path,
    kas::{token, within},
    link::Stream,
    mesh::{Mesh, Options},
    process::soon,
    raw_agent::{Kind, RawAgent},
};
use tokio::{task::JoinSet, time::Instant};

use crate::ledger::{End, Load, echo};

/// Duration of the registrations and withdrawals of one agent.
const CHURN: Duration = Duration::from_secs(5);
/// Concurrent, on each of two replicas.
const CHURNERS: usize = 8;

/// In NATS (issue 8233), a subscription that was renewed while its end was in progress was lost: "no
/// responders" although there was one.
///
/// Fails if the end of one connection withdraws an agent that still has another one.
#[tokio::test]
async fn reregister_race_never_loses_live_agent() -> Result<()> {
    let config = json!({ "agent": { "listen": { "connections_per_token_per_minute": 1_000_000 } } });
    let mesh = Mesh::start_with(Options { config, ..Options::default() }).await?;
    // It never disconnects.
    let stays = mesh.agent(0, 1, Kind::Ours, 4).await?;
    mesh.converged(&[(1, 0)]).await?;
    let stop = Arc::new(AtomicBool::new(false));
    let registered = Arc::new(AtomicUsize::new(0));
    let mut churners = JoinSet::new();
    // Agent 1 at its replica and at another one, and agent 2, which keeps no connection, at both.
    for n in 0..2 * CHURNERS {
        let (address, agent) = (mesh.agents(n % 2), if n / 2 % 2 == 0 { 1 } else { 2 });
        let (stop, registered) = (Arc::clone(&stop), Arc::clone(&registered));
        churners.spawn(async move {
            while !stop.load(Ordering::Relaxed) {
                let raw = RawAgent::connect(address, &token(agent), Kind::Ours).await?;
                let tunnel = raw.tunnel().await?;
                registered.fetch_add(1, Ordering::Relaxed);
                raw.link().cut();
                drop(tunnel);
            }
            anyhow::Ok(())
        });
    }
    let load = Load::start(&mesh, &[1, 2], 1, 1).await?;
    let begun = Instant::now();
    while begun.elapsed() < CHURN {
        load.more(5).await?;
        for n in [1, 2] {
            let view = mesh.view(n).await?;
            ensure!(view.holders.contains(&(1, 0)), "replica {n} lost the agent that never went: {view:?}");
        }
    }
    stop.store(true, Ordering::Relaxed);
    while let Some(churner) = churners.join_next().await {
        churner??;
    }
    let registered = registered.load(Ordering::Relaxed);
    println!("{registered} registrations and as many ends in {:?}", begun.elapsed());
    let ledger = load.stop().await?;
    // A request may meet a tunnel that is just ending, but never "not connected".
    let mut not_started = ledger.texts(End::NotStarted);
    println!(
        "{} answered, {} unknown, {} not started",
        ledger.count(End::Answered),
        ledger.count(End::Unknown),
        not_started.len()
    );
    not_started.sort_unstable();
    not_started.dedup();
    println!("why: {not_started:?}");
    assert!(!not_started.iter().any(|text| text.contains("not connected")), "{not_started:?}");
    assert!(ledger.count(End::Answered) > 10);
    mesh.converged(&[(1, 0)]).await?;
    for n in 0..3 {
        echo(&mesh, n, 1).await?;
    }
    // The latest change counts, at whichever replica.
    let last = mesh.agent(1, 2, Kind::Ours, 1).await?;
    mesh.converged(&[(1, 0), (2, 1)]).await?;
    echo(&mesh, 2, 2).await?;
    drop((stays, last));
    mesh.converged(&[]).await?;
    Ok(())
}

/// The waves of the same issue: a hundred agents at a time move from one replica to the other, ten times.
#[tokio::test]
async fn waves_of_moving_agents_leave_exact_sets() -> Result<()> {
    let mesh = Mesh::start_with(Options { agents: 100, ..Options::default() }).await?;
    mesh.converged(&[]).await?;
    let mut held = Vec::new();
    for wave in 0..10 {
        let to = wave % 3;
        let mut coming = JoinSet::new();
        for agent in 1..=100 {
            let address = mesh.agents(to);
            coming.spawn(async move {
                let raw = RawAgent::connect(address, &token(agent), Kind::Ours).await?;
                let tunnel = raw.tunnel().await?;
                anyhow::Ok((raw, tunnel))
            });
        }
        // The old ones disconnect while the new ones connect.
        for (raw, _) in std::mem::take::<Vec<(RawAgent, _)>>(&mut held) {
            raw.link().cut();
        }
        while let Some(came) = coming.join_next().await {
            held.push(came??);
        }
    }
    let expected: Vec<(i64, usize)> = (1..=100).map(|agent| (agent, 0)).collect();
    println!("a thousand moves are settled after {:?}", mesh.converged(&expected).await?);
    Ok(())
}

const WAITING: usize = 10_000;

async fn open(caller: &Caller, n: usize) -> Result<Stream> {
    let request = caller.to_agent(1, &path("Echo")).header("grpc-timeout", "5M");
    let mut stream = caller.open(request).await?;
    stream.send(frame(n.to_string().as_bytes())).await.ok().context("sent")?;
    stream.half_close().ok().context("sent")?;
    Ok(stream)
}

/// Sends requests for an absent agent, cancels half, and connects the agent to another replica.
async fn storm(mesh: &Mesh, requests: usize) -> Result<()> {
    let kas = mesh.kas(0);
    let mut waiting = Vec::new();
    // A connection may have 200 streams.
    for first in (0..requests).step_by(200) {
        let caller = mesh.caller(0).await?;
        for n in first..(first + 200).min(requests) {
            waiting.push((n, open(&caller, n).await?));
        }
    }
    kas.metric_is("kas_requests_waiting", requests as f64).await?;
    let cancelled: Vec<_> = waiting.extract_if(.., |(n, _)| n.is_multiple_of(2)).collect();
    drop(cancelled);
    kas.metric_is("kas_requests_waiting", (requests / 2) as f64).await?;
    let begun = Instant::now();
    let agent = mesh.agent(1, 1, Kind::Ours, 20).await?;
    let mut answers = JoinSet::new();
    for (n, mut stream) in waiting {
        answers.spawn(async move {
            let got = answer(&mut stream).await?;
            ensure!(got.status.code() == Code::Ok, "{n}: {}", got.status);
            ensure!(got.messages == [n.to_string()], "{n} got another's answer");
            anyhow::Ok(())
        });
    }
    while let Some(answer) = soon("answers come", answers.join_next()).await {
        answer??;
    }
    println!("{} waiting requests were answered within {:?}", requests / 2, begun.elapsed());
    let got = agent.ids();
    assert_eq!(got.len(), requests / 2, "all that were not cancelled ran");
    assert_eq!(got.iter().collect::<BTreeSet<_>>().len(), got.len(), "each ran once");
    for metric in ["kas_requests_waiting", "kas_requests_open"] {
        for n in 0..3 {
            mesh.kas(n).metric_is(metric, 0.0).await?;
        }
    }
    agent.cut();
    mesh.converged(&[]).await?;
    Ok(())
}

#[tokio::test]
async fn ten_thousand_requests_wait_for_an_agent_that_connects_to_another_replica() -> Result<()> {
    let mesh = Mesh::start(3).await?;
    mesh.converged(&[]).await?;
    // Twice, because allocators keep freed memory.
    storm(&mesh, WAITING).await?;
    let warm = mesh.kas(0).process.usage()?;
    storm(&mesh, WAITING).await?;
    let now = within(Duration::from_secs(30), "memory and files are back", async || {
        let now = mesh.kas(0).process.usage()?;
        let back = now.resident_kib <= warm.resident_kib + warm.resident_kib / 10 + 10 * 1024
            && now.files <= warm.files + 5;
        Ok(if back { Ok(now) } else { Err(now) })
    })
    .await?;
    println!("after the first storm {warm:?}, after the second {now:?}");
    Ok(())
}
