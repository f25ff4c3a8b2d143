//! A replica that joins a cluster with a large table.

use std::time::Duration;

use anyhow::{Context as _, Result};
use grpc::Code;
use http::StatusCode;
use proto::kas::api::v1::{ExplainAgentRequest, ExplainAgentResponse};
use testkit::{
    handler::path,
    kas::within,
    mesh::{EXPLAIN_AGENT, Mesh, Options},
    process::SOON,
    raw_agent::Kind,
};
use tokio::time::Instant;

use crate::{
    fake_owner::{FakeOwner, Plan},
    ledger::echo,
};

const ENTRIES: usize = 100_000;

/// Waits until a replica has this many entries of the fake owner, and its copy is complete.
async fn has_all(mesh: &Mesh, asked: usize, owner: &FakeOwner, entries: usize) -> Result<()> {
    let name = owner.address.to_string();
    within(SOON, "the table of the large replica is complete", async || {
        let row = mesh.list(asked).await?.replicas.into_iter().find(|row| row.name == name);
        let whole = row.as_ref().is_some_and(|row| row.table_synced && row.agents == entries as u64);
        Ok(if whole { Ok(()) } else { Err(row) })
    })
    .await
}

async fn believes(mesh: &Mesh, asked: usize, agent: i64) -> Result<bool> {
    let request = ExplainAgentRequest { agent_id: agent };
    let answer: ExplainAgentResponse = mesh.caller(asked).await?.unary(EXPLAIN_AGENT, &request).await?;
    Ok(answer.replicas[0].beliefs.iter().any(|belief| belief.holds))
}

/// quickwit (issue 4561) took more than ten seconds to start with ten megabytes of cluster state.
///
/// A hundred thousand agents would need as many connections, too many for two cores and 20,000 files. A fake
/// owner holds them, found by discovery like a replica without gossip.
///
/// Fails if copies are limited to 50,000 entries.
#[tokio::test]
async fn cold_join_100k_entries() -> Result<()> {
    let plan =
        Plan { first: 1_000_000, agents: ENTRIES, chunk: usize::MAX, pause: Duration::ZERO, later: false };
    let owner = FakeOwner::start(plan).await?;
    let options = Options { seeds: vec![owner.address], start: false, ..Options::default() };
    let mut mesh = Mesh::start_with(options).await?;
    mesh.start_replicas(&[0]).await?;
    has_all(&mesh, 0, &owner, ENTRIES).await?;
    let held = mesh.agent(0, 1, Kind::Ours, 2).await?;
    for n in [1, 2] {
        let begun = Instant::now();
        mesh.start_replicas(&[n]).await?;
        println!("replica {n} started, and was ready, in {:?}", begun.elapsed());
        // Readiness implies a complete table, so this does not poll. After five seconds it is ready in any
        // case.
        let in_time = begun.elapsed() < Duration::from_secs(5);
        let rows = mesh.list(n).await?.replicas;
        let row = rows.iter().find(|row| row.name == owner.address.to_string());
        let knows = row.is_some_and(|row| row.table_synced && row.agents == ENTRIES as u64);
        assert!(knows || !in_time, "{rows:?}");
        has_all(&mesh, n, &owner, ENTRIES).await?;
        assert!(begun.elapsed() < Duration::from_secs(25), "{:?}", begun.elapsed());
        echo(&mesh, n, 1).await?;
        for agent in [1_000_000, 1_050_000, 1_099_999] {
            assert!(believes(&mesh, n, agent).await?, "{agent}");
        }
        for agent in [999_999, 1_100_000] {
            assert!(!believes(&mesh, n, agent).await?, "{agent}");
        }
        let usage = mesh.kas(n).process.usage()?;
        println!("and holds {usage:?}");
    }
    drop(held);
    Ok(())
}

/// chitchat (issue 119) sent the nodes with the most stale values first, so that small ones starved.
///
/// Fails if one snapshot is transferred at a time: the small table then waits for the large one.
#[tokio::test]
async fn small_replica_visible_while_big_one_syncs() -> Result<()> {
    // More than the changes in gossip, so that the small table also needs a snapshot.
    const AGENTS: i64 = table::limits::RECORD_OPS as i64 + 1;
    // Ten seconds for a table that does not finish sooner.
    let pause = Duration::from_millis(500);
    let plan = Plan { first: 1_000_000, agents: ENTRIES, chunk: ENTRIES / 20, pause, later: false };
    let owner = FakeOwner::start(plan).await?;
    let options = Options { seeds: vec![owner.address], agents: AGENTS, start: false, ..Options::default() };
    let mut mesh = Mesh::start_with(options).await?;
    let begun = Instant::now();
    mesh.start_replicas(&[0]).await?;
    // Not before the first sync, but after five seconds in any case.
    println!("ready after {:?}", begun.elapsed());
    assert!(begun.elapsed() > Duration::from_secs(4), "{:?}", begun.elapsed());
    let small = mesh.agent(0, 1, Kind::Ours, 2).await?;
    let mut others = Vec::new();
    for agent in 2..=AGENTS {
        others.push(mesh.agent(0, agent, Kind::Ours, 1).await?);
    }
    let joined = Instant::now();
    mesh.start_unready(1).await?;
    within(SOON, "the new one knows the small one's agent", async || {
        Ok(if believes(&mesh, 1, 1).await? { Ok(()) } else { Err(()) })
    })
    .await?;
    println!("the small table was there {:?} after the start", joined.elapsed());
    let readiness = mesh.kas(1).get("/readiness").await?.0;
    // After five seconds it is ready in any case.
    if joined.elapsed() < Duration::from_secs(5) {
        assert_eq!(readiness, StatusCode::SERVICE_UNAVAILABLE, "the large one is not");
    }
    echo(&mesh, 1, 1).await?;
    mesh.ready(1).await?;
    has_all(&mesh, 1, &owner, ENTRIES).await?;
    drop((small, others));
    Ok(())
}

/// An upgrade in which the later version sends its table in another format: it is live, it is asked directly
/// for every agent that it may hold, and its table is requested less and less often.
///
/// Fails if such a format ends the stream like a malformed one: then it is suspect and redialled every
/// second.
#[tokio::test]
async fn replica_of_a_later_version_whose_table_cannot_be_read_is_asked_directly() -> Result<()> {
    let plan = Plan { first: 1, agents: 3, chunk: 3, pause: Duration::ZERO, later: true };
    let owner = FakeOwner::start(plan).await?;
    let mesh =
        Mesh::start_with(Options { replicas: 2, seeds: vec![owner.address], ..Options::default() }).await?;
    let unread = "kas_peer_records_unread_total{record=\"Snapshot\"}";
    for n in 0..2 {
        within(SOON, "its table was shown", async || {
            let times = mesh.kas(n).metric(unread).await.unwrap_or(0.0);
            Ok(if times >= 3.0 { Ok(()) } else { Err(times) })
        })
        .await?;
        let name = owner.address.to_string();
        let row = mesh.list(n).await?.replicas.into_iter().find(|row| row.name == name);
        let row = row.context("it is known")?;
        assert_eq!((row.standing.as_str(), row.table_synced), ("live", false), "{row:?}");
        let alarms = mesh.list(n).await?.alarms;
        let told = alarms.iter().any(|alarm| alarm.contains(&name) && alarm.contains("a later version"));
        assert!(told, "{alarms:?}");
        let log = mesh.kas(n).process.log();
        assert_eq!(log.matches("the table of another replica cannot be read").count(), 1, "{log}");
        // The caller gets its response: it was asked although no replica knows what it holds.
        let caller = mesh.caller(n).await?;
        let got = caller.call(caller.to_agent(2, &path("Echo")), &[b"x"]).await?;
        assert_eq!((got.status.code(), got.status.message()), (Code::Unimplemented, "a fake"));
    }
    // Requests for other agents are not delayed.
    let held = mesh.agent(0, 4, Kind::Ours, 2).await?;
    echo(&mesh, 1, 4).await?;
    let asked = owner.snapshots().len();
    println!("asked for its table {asked} times");
    assert!(asked <= 24, "{asked} times by two replicas");
    drop(held);
    Ok(())
}
