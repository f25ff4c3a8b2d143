//! Membership: replicas find each other, detect each other's failure and return, and agree on exact sets.

use std::time::Duration;

use anyhow::{Context as _, Result};
use serde_json::json;
use testkit::{
    agent16::Agent16,
    kas::{token, within},
    mesh::{Mesh, Options},
    names::NameServer,
    process::SOON,
    raw_agent::Kind,
};
use tokio::time::Instant;

use crate::ledger::echo;

async fn agree(replicas: usize) -> Result<()> {
    // No replica listens yet when the first one starts discovery.
    let mesh = Mesh::start(replicas).await?;
    println!("{replicas} replicas know each other after {:?}", mesh.converged(&[]).await?);
    let last = replicas - 1;
    let mut agents = vec![
        mesh.agent(0, 1, Kind::Ours, 2).await?,
        mesh.agent(1, 2, Kind::Old, 2).await?,
        mesh.agent(1, 3, Kind::Recent, 2).await?,
        mesh.agent(last, 3, Kind::Ours, 2).await?,
    ];
    let took = mesh.converged(&[(1, 0), (2, 1), (3, 1), (3, last)]).await?;
    println!("agents are known everywhere after {took:?}");
    agents.remove(3).cut();
    agents.remove(0).cut();
    mesh.converged(&[(2, 1), (3, 1)]).await?;
    let moved = mesh.agent(last, 1, Kind::Ours, 2).await?;
    mesh.converged(&[(1, last), (2, 1), (3, 1)]).await?;
    drop((agents, moved));
    mesh.converged(&[]).await?;
    Ok(())
}

#[tokio::test]
async fn three_replicas_that_start_at_once_agree_on_exact_sets() -> Result<()> {
    agree(3).await
}

#[tokio::test]
async fn five_replicas_that_start_at_once_agree_on_exact_sets() -> Result<()> {
    agree(5).await
}

#[tokio::test]
async fn replicas_with_one_seed_find_each_other() -> Result<()> {
    let mut mesh = Mesh::start_with(Options { start: false, replicas: 4, ..Options::default() }).await?;
    let first = mesh.private(0).to_string();
    mesh.set_discovery(json!({ "static": { "addresses": [first] } }));
    // The one that all know starts last.
    mesh.start_replicas(&[1, 2, 3]).await?;
    for lonely in 1..4 {
        mesh.converged_among(&[lonely], &[]).await?;
    }
    let agent = mesh.agent(3, 1, Kind::Ours, 2).await?;
    mesh.start_replicas(&[0]).await?;
    mesh.converged(&[(1, 3)]).await?;
    echo(&mesh, 1, 1).await?;
    drop(agent);
    Ok(())
}

#[tokio::test]
async fn replicas_find_each_other_after_dns_records_appear() -> Result<()> {
    let mut mesh = Mesh::start_with(Options { start: false, ..Options::default() }).await?;
    let names = NameServer::start().await?;
    mesh.set_discovery(json!({
        "dns": { "name": "kas.test", "nameserver": names.address, "refresh": "1s" },
    }));
    mesh.start_replicas(&[0, 1, 2]).await?;
    let held = mesh.agent(0, 1, Kind::Ours, 2).await?;
    mesh.converged_among(&[0], &[(1, 0)]).await?;
    for n in [1, 2] {
        mesh.converged_among(&[n], &[]).await?;
    }
    // Two of them, without the third; then the third as well.
    names.set(vec![mesh.private(0).ip(), mesh.private(1).ip()]);
    mesh.converged(&[(1, 0)]).await?;
    names.set((0..3).map(|n| mesh.private(n).ip()).collect());
    echo(&mesh, 2, 1).await?;
    // An empty answer changes nothing for replicas that know each other.
    mesh.converged(&[(1, 0)]).await?;
    names.set(Vec::new());
    let other = mesh.agent(2, 2, Kind::Ours, 2).await?;
    mesh.converged(&[(1, 0), (2, 2)]).await?;
    drop((held, other));
    Ok(())
}

/// Presences of a crashed Phoenix node stay for 30 seconds; GitLab's kas keeps them for five minutes.
///
/// Fails if a refused redial is no vote and entries never expire.
#[tokio::test]
async fn sigkill_purges_fast() -> Result<()> {
    let mesh = Mesh::start(3).await?;
    let mut held = Vec::new();
    for replica in [0, 1] {
        let agent = mesh.agent(replica, 1, Kind::Ours, 2).await?;
        let configuration = agent.raw.configuration("").await?;
        held.push((agent, configuration));
    }
    let other = mesh.agent(0, 2, Kind::Ours, 2).await?;
    mesh.converged(&[(1, 0), (1, 1), (2, 0)]).await?;
    within(SOON, "both connections are listed", async || {
        let listed = mesh.connections(2, 1).await?.agents.len();
        Ok(if listed == 2 { Ok(()) } else { Err(listed) })
    })
    .await?;
    // Streams are faster than gossip, which has no vote on a replica that it never heard.
    for n in [1, 2] {
        within(SOON, "gossip has heard of all", async || {
            let rows = mesh.list(n).await?.replicas;
            Ok(if rows.iter().all(|row| row.generation > 0) { Ok(()) } else { Err(rows) })
        })
        .await?;
    }
    let killed = Instant::now();
    mesh.kill(0).await?;
    // It is no longer used: a request finds the other owner at once.
    echo(&mesh, 2, 1).await?;
    println!("an agent with two connections was reached {:?} after the kill", killed.elapsed());
    assert!(killed.elapsed() < Duration::from_secs(10), "{:?}", killed.elapsed());
    within(SOON, "the list has one connection, and only the killed one is missing", async || {
        let listed = mesh.connections(2, 1).await?;
        let missing: Vec<_> =
            listed.unanswered.iter().filter_map(|silent| Some(silent.address.as_ref()?.port)).collect();
        let killed = u32::from(mesh.private(0).port());
        Ok(if listed.agents.len() == 1 && missing == [killed] { Ok(()) } else { Err(listed) })
    })
    .await?;
    println!("its connections were purged after {:?}", killed.elapsed());
    mesh.converged(&[(1, 1)]).await?;
    let purged = killed.elapsed();
    println!("all of it was purged after {purged:?}");
    // Ten seconds is the TTL of entries, which applies if gossip's vote is late on a busy machine.
    assert!(purged < Duration::from_secs(20), "{purged:?}");
    drop(other);
    Ok(())
}

/// Agents of GitLab behind a load balancer that distributes single calls. The owner of the tunnels, the
/// replica with the registration and a third one return the same list, and name a replica that does not
/// respond.
#[tokio::test]
async fn registration_without_a_local_tunnel_is_listed_by_every_replica() -> Result<()> {
    let mesh = Mesh::start(3).await?;
    let to = [mesh.agents(0), mesh.agents(1)];
    let nameless = Agent16::start_behind(to, &token(1), "", 77).await?;
    let named = Agent16::start_behind(to, &token(1), "pod", 78).await?;
    for agent in [&nameless, &named] {
        agent.registered().clone()?;
    }
    mesh.converged(&[(1, 0)]).await?;
    mesh.meshed().await?;
    for asked in 0..3 {
        let listed = mesh.connections(asked, 1).await?;
        let ids: Vec<i64> = listed.agents.iter().map(|agent| agent.connection_id).collect();
        assert_eq!((ids, listed.unanswered), (vec![77, 78], vec![]), "replica {asked}");
    }
    mesh.kas(1).process.pause();
    let listed = mesh.connections(2, 1).await?;
    let silent: Vec<_> = listed.unanswered.iter().filter_map(|silent| silent.address.clone()).collect();
    let other = mesh.private(1);
    assert!(
        matches!(&silent[..], [silent] if (&*silent.ip, silent.port) == (&*other.ip().to_string(), u32::from(other.port()))),
        "{listed:?}"
    );
    mesh.kas(1).process.resume();
    Ok(())
}

/// A restarted chitchat node (issue 94) left both incarnations in the state.
///
/// Fails if a new epoch keeps the entries of the older one.
#[tokio::test]
async fn restart_replaces_incarnation() -> Result<()> {
    let mut mesh = Mesh::start(3).await?;
    let old = mesh.agent(0, 1, Kind::Ours, 2).await?;
    let stays = mesh.agent(1, 2, Kind::Ours, 2).await?;
    mesh.converged(&[(1, 0), (2, 1)]).await?;
    mesh.meshed().await?;
    let before = mesh.row(2, 0).await?.context("it is known")?;
    for _ in 0..3 {
        mesh.kill(0).await?;
        mesh.restart(0).await?;
        // The entries of the old process are gone, and the replica is listed once.
        mesh.converged(&[(2, 1)]).await?;
    }
    mesh.meshed().await?;
    for asked in [1, 2] {
        let after = mesh.row(asked, 0).await?.context("it is known")?;
        assert!(after.generation > before.generation, "{after:?}");
        assert!(after.table_epoch > before.table_epoch, "{after:?}");
        assert_eq!(mesh.list(asked).await?.replicas.len(), 3);
    }
    let new = mesh.agent(0, 3, Kind::Ours, 2).await?;
    mesh.converged(&[(2, 1), (3, 0)]).await?;
    echo(&mesh, 2, 3).await?;
    drop((old, stays, new));
    Ok(())
}
