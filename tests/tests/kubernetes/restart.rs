//! An API server that stops and restarts.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use grpc::Code;
use prost::Message as _;
use proto::kas::api::v1::GetPodsRequest;
use serde_json::Value;
use testkit::kubernetes::Access;
use tokio::time::{Instant, timeout};

use crate::{
    reads::GET_PODS,
    setup::{AGENT, Chain, NEVER, event, exclusive},
};

/// Returns the agent's only connection.
async fn connection(chain: &Chain) -> Result<Value> {
    let agents = chain.json(&["agents", "-o", "json"]).await?;
    let agents = agents["agents"].as_array().context("agents are a list")?;
    ensure!(agents.len() == 1, "one connection, not {agents:?}");
    Ok(agents[0].clone())
}

#[tokio::test]
async fn an_api_server_restart_is_survived() -> Result<()> {
    let exclusive = exclusive().await?;
    let kubernetes = &*exclusive.kubernetes;
    kubernetes.create_pods("restarted", "web", 2).await?;
    let chain = Chain::start(kubernetes, "restarted", Access::PodsReadOnly).await?;
    let before = connection(&chain).await?;
    let pods = ["pods", "1", "-n", "restarted"];
    let table = chain.output(&pods).await?;
    assert_eq!(table.lines().count(), 3);
    let watch = "/api/v1/namespaces/restarted/pods?watch=true";
    let mut open = chain.kasctl(&["request", "1", "GET", watch]).await?;
    let mut first = vec![0];
    tokio::io::AsyncReadExt::read_exact(&mut open.stdout, &mut first).await?;

    kubernetes.stop_api_server().await?;

    // Open requests end with an error, so a part is not mistaken for the whole.
    let cut = open.finish().await?;
    println!("an open watch: {}", cut.stderr.trim());
    assert_eq!(cut.code(), Some(7), "{cut:?}");
    assert!(cut.stderr.contains("UNAVAILABLE: "), "{cut:?}");

    // Requests while it is down fail at once, with the problem and its place.
    let host = kubernetes.server().trim_start_matches("https://").to_owned();
    let reason = format!("cannot reach the Kubernetes API server at {host}: ");
    for round in 0..3 {
        let begun = Instant::now();
        for arguments in [&["request", "1", "GET", "/version"][..], &pods] {
            let failed = chain.run(arguments).await?;
            if round == 0 {
                println!("{}: {:?}: {}", arguments[0], failed.code(), failed.stderr.trim());
            }
            assert_ne!(failed.code(), Some(0), "{failed:?}");
            assert_eq!(failed.stdout, "");
            assert!(
                failed.stderr.contains("UNAVAILABLE: ") && failed.stderr.contains(&reason),
                "{}",
                failed.stderr
            );
        }
        let caller = chain.kas.caller().await?;
        let request = GetPodsRequest { agent_id: AGENT, ..GetPodsRequest::default() }.encode_to_vec();
        let answer = caller.call(caller.request(GET_PODS), &[&request]).await?;
        assert_eq!(answer.status.code(), Code::Unavailable, "{}", answer.status);
        assert!(answer.status.message().starts_with(&reason), "{}", answer.status);
        assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
        // Only the API server is down.
        assert_eq!(connection(&chain).await?, before);
    }

    kubernetes.start_api_server().await?;

    // The first request succeeds: no old connection is used, and there is no backoff.
    let begun = Instant::now();
    assert_eq!(chain.output(&pods).await?, table);
    println!("the first list after the restart: {:?}", begun.elapsed());
    let (mut events, mut watching) = chain.kasctl(&["request", "1", "GET", watch]).await?.lines();
    for _ in 0..2 {
        assert_eq!(event(&mut events).await?["type"], "ADDED");
    }
    assert!(timeout(NEVER, events.next_line()).await.is_err(), "a silent watch stays open");
    kubernetes.create_pods("restarted", "late", 1).await?;
    assert_eq!(event(&mut events).await?["object"]["metadata"]["name"], "late-00000");
    watching.kill().await?;

    // The same process, on the same connection.
    assert!(chain.agentk.process.is_running());
    assert_eq!(connection(&chain).await?, before);
    let (_, metrics) = chain.agentk.get("/metrics").await?;
    for never in ["agentk_connect_failures_total 0", "agentk_handler_panics_total 0"] {
        assert!(metrics.lines().any(|line| line == never), "{metrics}");
    }
    Ok(())
}

/// kas works and says so; the unreachable server is behind the agent.
#[tokio::test]
async fn an_unreachable_api_server_is_not_reported_as_an_unreachable_kas() -> Result<()> {
    let exclusive = exclusive().await?;
    let kubernetes = &*exclusive.kubernetes;
    let chain = Chain::start(kubernetes, "absent", Access::PodsReadOnly).await?;
    kubernetes.stop_api_server().await?;
    let failed = chain.run(&["pods", "1"]).await?;
    assert!(failed.stderr.contains("cannot reach the Kubernetes API server"), "{}", failed.stderr);
    assert!(!failed.stderr.contains("starting or shutting down"), "{}", failed.stderr);
    assert_ne!(failed.code(), Some(3), "3 is: kas cannot be reached, or was lost");
    Ok(())
}
