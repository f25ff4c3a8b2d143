//! An agent that speaks the protocol of 14.1, and nothing of this project: every feature works with it, also
//! through a replica that it is not connected to.

use anyhow::{Context as _, Result, ensure};
use serde_json::json;
use testkit::{
    http_agent::{ApiServer, HttpAgent},
    kas::token,
    kubernetes::{Access, exclusive_audited},
    raw_agent::Kind,
};

use crate::{
    audited::{delivered, joined},
    setup::{AGENT, Setup, known},
};

#[tokio::test]
async fn an_agent_of_14_1_has_views_webhooks_components_and_prometheus() -> Result<()> {
    let exclusive = exclusive_audited().await?;
    let kubernetes = &*exclusive.kubernetes;
    let namespace = "together-wire";
    let it = Setup::start(kubernetes, namespace, None, json!({})).await?;
    let bearer = kubernetes.service_account(namespace, "agentk", Access::Admin).await?;
    let api_server = ApiServer::of(kubernetes, &bearer)?;
    let agent = HttpAgent::start(it.mesh.agents(0), &token(AGENT), Kind::Old, api_server).await?;
    // It counts as connected as long as it has this stream.
    let _configuration = agent.raw().configuration("").await?;
    it.mesh.converged(&[(AGENT, 0)]).await?;

    // At the replica that holds its tunnels, and at the other one, which borrows them.
    for n in [0, 1] {
        it.pods_are_followed(kubernetes, n).await?;
    }
    known(&it).await?;
    for n in [0, 1] {
        let (id, copies) = it.accepted(n, &format!("delivery-{n}")).await?;
        ensure!(copies == "2", "{copies} copies");
        it.receiver.got(n + 1).await?;
        let received = it.receiver.received().pop().context("it got something")?;
        ensure!(received.head.line == "POST /in HTTP/1.1", "{received:?}");
        ensure!(received.body == format!("delivery-{n}"), "{received:?}");
        ensure!(received.head.get("kas-hook-id") == Some(&*id), "{received:?}");
        delivered(&it, &id).await?;
        it.prometheus_answers(n).await?;
        it.components_are_found(n).await?;
    }
    // What ran by the old wire has an id that the API server has adopted.
    let proxied = joined(&it, kubernetes).await?;
    for source in ["views", "hooks", "fleet"] {
        ensure!(proxied.iter().any(|line| line["source"] == source), "nothing of {source} is joined");
    }
    for route in ["local", "peer"] {
        ensure!(proxied.iter().any(|line| line["route"] == route), "no request was {route}");
    }
    Ok(())
}
