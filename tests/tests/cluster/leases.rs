//! Tunnels that stay leased to another replica between requests.

use std::time::Duration;

use anyhow::{Result, ensure};
use grpc::Code;
use proto::kas::api::v1::{ExplainAgentRequest, ExplainAgentResponse};
use testkit::{
    handler::path,
    kas::within,
    mesh::{EXPLAIN_AGENT, Mesh, Options},
    process::SOON,
    raw_agent::Kind,
};
use tokio::time::Instant;

use crate::ledger::{End, Ledger, Load, echo};

const LENT: &str = "kas_peer_asks_total{side=\"Answered\",answer=\"Ready\"}";
const REUSED: &str = "kas_borrows_reused_total";

async fn two() -> Result<Mesh> {
    Mesh::start_with(Options { replicas: 2, ..Options::default() }).await
}

/// Waits until every tunnel of the agent is idle at its owner.
async fn all_back(mesh: &Mesh, owner: usize, agent: i64, tunnels: u32) -> Result<()> {
    let caller = mesh.caller(owner).await?;
    within(SOON, "the tunnels are back", async || {
        let told: ExplainAgentResponse =
            caller.unary(EXPLAIN_AGENT, &ExplainAgentRequest { agent_id: agent }).await?;
        let counts: Vec<_> =
            told.replicas.iter().map(|told| (told.idle_tunnels, told.busy_tunnels)).collect();
        Ok(if counts.contains(&(tunnels, 0)) { Ok(()) } else { Err(counts) })
    })
    .await
}

/// Fails if the borrower does not offer to send more than one request.
#[tokio::test]
async fn requests_that_follow_closely_share_a_leased_stream() -> Result<()> {
    const REQUESTS: u32 = 200;
    let mesh = two().await?;
    for (agent, kind) in [(1, Kind::Ours), (2, Kind::Old)] {
        let held = mesh.agent(0, agent, kind, 4).await?;
        let before = (mesh.kas(0).metric(LENT).await?, mesh.kas(1).metric(REUSED).await?);
        let caller = mesh.caller(1).await?;
        for n in 0..REQUESTS {
            let text = n.to_string();
            let got = caller.call(caller.to_agent(agent, &path("Echo")), &[text.as_bytes()]).await?;
            assert_eq!((got.status.code(), &got.messages[..]), (Code::Ok, &[text.into()][..]));
        }
        assert_eq!(held.raw.requests().list().len(), REQUESTS as usize);
        let lent = mesh.kas(0).metric(LENT).await? - before.0;
        let reused = mesh.kas(1).metric(REUSED).await? - before.1;
        // A request may have two borrow requests.
        assert!(lent + reused >= f64::from(REQUESTS), "{kind:?}: {lent} streams, {reused} again");
        match kind {
            // Fewer only if this machine stalled for a tenth of a second.
            Kind::Ours => assert!(reused >= 150.0, "{lent} streams, {reused} again"),
            _ => assert_eq!(reused, 0.0, "a tunnel of GitLab's agents carries one request"),
        }
        if kind == Kind::Ours {
            all_back(&mesh, 0, agent, 4).await?;
        }
    }
    Ok(())
}

#[tokio::test]
async fn every_kind_of_request_works_on_a_leased_tunnel() -> Result<()> {
    let mesh = two().await?;
    let held = mesh.agent(0, 1, Kind::Ours, 4).await?;
    let caller = mesh.caller(1).await?;
    let large = vec![b'x'; 300_000];
    let begun = Instant::now();
    let mut rounds = 0;
    // On a busy machine, requests may be too far apart for a while.
    while rounds < 10 || mesh.kas(1).metric(REUSED).await? == 0.0 && begun.elapsed() < 2 * SOON {
        rounds += 1;
        let got = caller.call(caller.to_agent(1, &path("Echo")), &[&large]).await?;
        assert_eq!((got.status.code(), got.messages[0].len()), (Code::Ok, large.len()));
        let got = caller.call(caller.to_agent(1, &path("Count")), &[b"500"]).await?;
        assert_eq!((got.status.code(), got.messages.len()), (Code::Ok, 500), "{}", got.status);
        let got = caller.call(caller.to_agent(1, &path("FailLater")), &[b""]).await?;
        assert_eq!((got.status.code(), got.messages.len()), (Code::NotFound, 2));
        // The caller cancels: the stream and the tunnel end, and the next request uses others.
        let stream = caller.open(caller.to_agent(1, &path("Chat"))).await?;
        drop(stream);
        let got = caller.call(caller.to_agent(1, &path("Collect")), &[b"a", b"b"]).await?;
        assert_eq!(got.messages, ["a,b"]);
    }
    assert!(mesh.kas(1).metric(REUSED).await? > 0.0);
    for replica in 0..2 {
        mesh.kas(replica).metric_is("kas_requests_open", 0.0).await?;
    }
    drop(held);
    Ok(())
}

/// Fails if the owner grants a lease although its own requests wait.
#[tokio::test]
async fn requests_at_the_owner_are_not_starved_by_leases() -> Result<()> {
    let mesh = two().await?;
    let held = mesh.agent(0, 1, Kind::Ours, 1).await?;
    echo(&mesh, 1, 1).await?;
    let load = Load::start(&mesh, &[1], 1, 4).await?;
    load.more(100).await?;
    let own = Ledger::default();
    let caller = mesh.caller(0).await?;
    let mut longest = Duration::ZERO;
    for _ in 0..50 {
        let begun = Instant::now();
        let end = own.echo(&caller, 1, Duration::from_secs(15)).await;
        ensure!(end == End::Answered, "{:?}", own.texts(end));
        longest = longest.max(begun.elapsed());
    }
    println!("longest wait of 50: {longest:?}");
    load.more(100).await?;
    let others = load.stop().await?;
    assert_eq!(others.count(End::Answered), others.len());
    own.check(&[&held])?;
    others.check(&[&held])?;
    Ok(())
}

#[tokio::test]
async fn the_trace_of_a_request_shows_that_its_tunnel_was_leased() -> Result<()> {
    let mesh = two().await?;
    let _held = mesh.agent(0, 1, Kind::Ours, 2).await?;
    let caller = mesh.caller(1).await?;
    within(SOON, "a request that reuses a tunnel", async || {
        let request = caller.to_agent(1, &path("Echo")).header("kas-explain", "1");
        let got = caller.call(request, &[b"x"]).await?;
        let steps: Vec<String> = got
            .headers
            .get_all("kas-explain")
            .iter()
            .map(|step| String::from_utf8_lossy(step.as_bytes()).into_owned())
            .collect();
        let reused = steps.iter().any(|step| step.contains("that was leased to this one"));
        Ok(if reused { Ok(()) } else { Err(steps) })
    })
    .await
}

#[tokio::test]
async fn replicas_with_mutual_leases_drain_without_a_lost_request() -> Result<()> {
    for leaving in [0, 1] {
        let mesh = Mesh::start(3).await?;
        let agents = [mesh.agent(0, 1, Kind::Ours, 4).await?, mesh.agent(2, 1, Kind::Ours, 4).await?];
        mesh.converged(&[(1, 0), (1, 2)]).await?;
        let load = Load::start(&mesh, &[if leaving == 0 { 1 } else { 2 }], 1, 4).await?;
        load.more(200).await?;
        mesh.leave(leaving, Duration::from_secs(20)).await?;
        load.more(100).await?;
        let ledger = load.stop().await?;
        ledger.check(&[&agents[0], &agents[1]])?;
        assert_eq!(ledger.count(End::Answered), ledger.len(), "{:?}", ledger.texts(End::Unknown));
    }
    Ok(())
}
