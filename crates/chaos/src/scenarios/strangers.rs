//! A replica that does not know the secret, and an agent whose token nobody knows.

use std::{net::SocketAddr, time::Duration};

use anyhow::{Context as _, Result, ensure};
use base64::{Engine as _, prelude::BASE64_STANDARD};
use history::Effect;
use serde_json::json;
use testkit::{
    caller::{Caller, Jwt, now},
    kas::{self, AgentEntry, Kas, write_private},
    mesh::LIST_REPLICAS,
    network::Network,
    raw_agent::{Kind, ServingAgent},
};
use tokio::time::sleep;

use super::{process::RATE, time};
use crate::{
    clock,
    measure::{FALSE_DEATHS, STRANGERS, T_HEAL},
    observer::look,
    run::Run,
};

/// Starts a replica with another secret on this host, which names all others as its seeds.
async fn stranger(run: &Run, host: usize, secret: &[u8], folder: &std::path::Path) -> Result<Kas> {
    let at = |port: u16| SocketAddr::new(Network::address(host), port);
    let file = folder.join("private");
    write_private(&file, &BASE64_STANDARD.encode(secret))?;
    let seeds: Vec<String> = (0..run.setup.replicas)
        .map(|n| run.mesh.private(n))
        .chain([at(8155)])
        .map(|seed| seed.to_string())
        .collect();
    let config = json!({
        "agent": { "listen": { "address": at(8150) } },
        "api": { "listen": { "address": at(8153) } },
        "observability": { "listen": { "address": at(8151) } },
        "private_api": { "listen": { "address": at(8155), "authentication_secret_file": file } },
        "discovery": { "static": { "addresses": seeds } },
    });
    Kas::start_with(kas::Options {
        agents: (1..=run.setup.agents + 1).map(AgentEntry::new).collect(),
        config,
        namespace: Some(run.mesh.network().host(host).to_owned()),
        ..kas::Options::default()
    })
    .await
}

/// How many datagrams a replica has dropped because their sender does not know the key.
async fn unknown(run: &Run, n: usize) -> Result<f64> {
    let (_, text) = run.mesh.kas(n).get("/metrics").await?;
    let of = |line: &&str| {
        line.starts_with("kas_gossip_datagrams_dropped{")
            && (line.contains("unknown_key") || line.contains("forged"))
    };
    Ok(text.lines().filter(of).filter_map(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok()).sum())
}

pub(super) async fn without_secret(run: &mut Run) -> Result<()> {
    run.load(RATE / 2, 0, 0);
    sleep(Duration::from_secs(2)).await;
    let (host, agent) = (run.setup.replicas + 1, super::registry::first_absent(run));
    let name = SocketAddr::new(Network::address(host), 8155).to_string();
    let folder = tempfile::TempDir::with_prefix("chaos-stranger-")?;
    let from = clock::now();
    let mut had = Vec::new();
    for n in run.mesh.running() {
        had.push((n, unknown(run, n).await?));
    }
    let fault = run.fault("a replica with another secret joins, and an agent connects to it", Effect::None);
    let secret = rand::random::<[u8; 32]>();
    let other = stranger(run, host, &secret, folder.path()).await?;
    let there = ServingAgent::connect(other.agent, &kas::token(agent), Kind::Ours, 2).await?;
    // And one that no replica knows the token of.
    let refusals = "kas_refusals_total{listener=\"Agent\",reason=\"Unauthenticated\"}";
    let refused = run.mesh.kas(0).metric(refusals).await?;
    let unknown_agent =
        ServingAgent::connect(run.mesh.agents(0), "a-token-that-nobody-knows-at-all", Kind::Ours, 1).await;
    sleep(time(run, 8, 30)).await;
    let mut strangers = 0;
    for n in run.mesh.running() {
        let list = run.mesh.list(n).await?;
        strangers += list.replicas.iter().filter(|row| row.name == name).count();
        let asker = Caller::connect(run.mesh.api(n), Some(run.client.token())).await?;
        let (_, seen) = look(&asker, &[agent]).await?;
        strangers += seen.agents.values().filter(|holders| !holders.is_empty()).count();
    }
    strangers += {
        let history = run.history.lock();
        history.views.iter().filter(|view| view.until >= from && view.live.contains_key(&name)).count()
    };
    run.measure(&STRANGERS, [f64::from(u32::try_from(strangers)?)]);
    let token = Jwt::new(&other.secrets[0]).claim("exp", json!(now() + 600)).encode();
    let asker = Caller::connect(other.api, Some(token)).await?;
    let list: proto::kas::api::v1::ListReplicasResponse =
        asker.unary(LIST_REPLICAS, &proto::kas::api::v1::ListReplicasRequest {}).await?;
    let believed: Vec<_> = list.replicas.iter().filter(|row| row.standing == "live").collect();
    ensure!(believed.is_empty(), "the stranger takes others for live: {believed:?}");
    for (n, had) in had {
        let has = unknown(run, n).await?;
        ensure!(has > had, "replica {n} dropped no datagram of a stranger: the fault did not happen");
    }
    let has = run.mesh.kas(0).metric(refusals).await?;
    ensure!(has > refused, "an agent with an unknown token was not refused: {refusals} is {has}");
    drop(unknown_agent);
    there.cut();
    let status = other.leave(Duration::from_secs(30)).await.context("the stranger leaves")?;
    ensure!(status.success(), "the stranger ended with {status}");
    run.fault_ends(fault);
    let all: Vec<usize> = (0..run.setup.replicas).collect();
    let deaths = run.false_deaths(from, clock::now(), &all);
    run.measure(&FALSE_DEATHS, [f64::from(deaths)]);
    run.heals(&T_HEAL).await
}
