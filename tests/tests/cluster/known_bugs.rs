//! Public bugs of other systems about dead members: a dead member stays dead and costs nothing.

use std::{collections::HashSet, net::Ipv4Addr, sync::Arc, time::Duration};

use anyhow::{Context as _, Result, ensure};
use gossip::{Gossip, KeyRing, Timing};
use serde_json::json;
use testkit::{
    kas::within,
    mesh::{Mesh, Options},
    process::SOON,
    raw_agent::Kind,
};
use tokio::{
    sync::watch,
    task::JoinSet,
    time::{Instant, sleep, sleep_until},
};

use crate::{
    fake_owner::{FakeOwner, Plan},
    ledger::echo,
};

/// How long gossip remembers dead members in these tests.
const GRACE: Duration = Duration::from_secs(2);
/// Some gossip rounds, but less than the time after which a silent member is considered dead.
const SPREAD: Duration = Duration::from_millis(800);

async fn start(replicas: usize, which: &[usize]) -> Result<Mesh> {
    let config = json!({ "gossip": { "dead_grace": "2s" } });
    let options = Options { replicas, start: false, config, ..Options::default() };
    let mut mesh = Mesh::start_with(options).await?;
    mesh.start_replicas(which).await?;
    mesh.converged(&[]).await?;
    mesh.meshed().await?;
    Ok(mesh)
}

/// Returns the health of replica `n` as seen by replica `asked`; `None`: it does not know it.
async fn health(mesh: &Mesh, asked: usize, n: usize) -> Result<Option<String>> {
    Ok(mesh.row(asked, n).await?.map(|row| row.standing))
}

/// Waits until replica `n` remembers exactly this many other processes, including dead ones.
async fn remembers(mesh: &Mesh, n: usize, incarnations: usize) -> Result<()> {
    mesh.kas(n).metric_is("kas_gossip_incarnations", incarnations as f64).await
}

/// chitchat (issue 161) gossiped a dead incarnation forever: a node that had forgotten it learned of it again
/// from another one, and so did each new node.
///
/// Fails if dead members are remembered for ten minutes (another `dead_node_grace_period` in
/// `crates/gossip`'s `node`). `crates/gossip` has the same test, which also fails with a chitchat without its
/// guards.
#[tokio::test]
async fn dead_incarnation_not_regossiped() -> Result<()> {
    let mut mesh = start(4, &[0, 1, 2]).await?;
    mesh.kill(2).await?;
    mesh.converged(&[]).await?;
    // The new replica knows one address, which is not that of the dead one: it can only learn of that one by
    // gossip.
    mesh.set_discovery(json!({ "static": { "addresses": [mesh.private(0).to_string()] } }));
    mesh.start_replicas(&[3]).await?;
    let begun = Instant::now();
    let mut lives = 1;
    // As many restarts as fit into the time in which it may be known as dead; it is never live.
    loop {
        mesh.converged(&[]).await?;
        mesh.meshed().await?;
        let known = health(&mesh, 3, 2).await?;
        ensure!(known.as_deref() != Some("live"), "the dead one lives again: {known:?}");
        if begun.elapsed() > 2 * GRACE {
            break;
        }
        mesh.kill(3).await?;
        mesh.restart(3).await?;
        lives += 1;
    }
    // No replica remembers it or an earlier process of the new replica, and none brings them back.
    for n in [0, 1, 3] {
        remembers(&mesh, n, 2).await?;
    }
    println!("{lives} lives of the newcomer, and all is forgotten {:?} after it came", begun.elapsed());
    sleep_until(Instant::now() + GRACE).await;
    for n in [0, 1, 3] {
        assert_eq!(mesh.kas(n).metric("kas_gossip_incarnations").await?, 2.0, "replica {n}");
    }
    assert_eq!(mesh.list(3).await?.replicas.len(), 3);
    Ok(())
}

/// In chitchat (PR 155) and quickwit (issue 5135), dead nodes came back because peers collect them at
/// different times: a peer that has not yet collected one tells the others.
///
/// The late replica is paused for longer than the others remember, and considers all of them alive when it
/// resumes. Fails with a chitchat that accepts members that it has collected (`last_heartbeat_if_deleted`
/// without memory).
#[tokio::test]
async fn no_resurrection_after_gc() -> Result<()> {
    let mesh = start(4, &[0, 1, 2, 3]).await?;
    let held = mesh.agent(3, 1, Kind::Ours, 2).await?;
    let stays = mesh.agent(2, 2, Kind::Ours, 2).await?;
    mesh.converged(&[(1, 3), (2, 2)]).await?;
    // Its last heartbeat reaches all replicas: one that alone knew of a later heartbeat would rightly bring
    // it back.
    mesh.kas(3).process.pause();
    sleep(SPREAD).await;
    mesh.kas(1).process.pause();
    let paused = Instant::now();
    mesh.kill(3).await?;
    mesh.converged_among(&[0, 2], &[(2, 2)]).await?;
    // The others have collected it, and the late one as well.
    for n in [0, 2] {
        remembers(&mesh, n, 1).await?;
    }
    sleep_until(paused + 3 * GRACE).await;
    mesh.kas(1).process.resume();
    let resumed = Instant::now();
    // While it catches up, no replica learns of dead members from it.
    within(SOON, "the late one knows as well", async || {
        for n in [0, 2] {
            let known = health(&mesh, n, 3).await?;
            ensure!(known.as_deref() != Some("live"), "replica {n} takes the dead one for live");
            ensure!(!mesh.view(n).await?.holders.contains(&(1, 3)), "its agents are back at replica {n}");
            let incarnations = mesh.kas(n).metric("kas_gossip_incarnations").await?;
            ensure!(incarnations <= 2.0, "replica {n} took the dead one back: {incarnations}");
        }
        let late = mesh.view(1).await?;
        Ok(if late.live == [0, 1, 2].into() && late.holders == [(2, 2)].into() { Ok(()) } else { Err(late) })
    })
    .await?;
    println!("the late one knew {:?} after it woke", resumed.elapsed());
    mesh.converged(&[(2, 2)]).await?;
    for n in 0..3 {
        mesh.kas(n).metric_is("kas_replicas_live", 3.0).await?;
        // The late one forgets it, too; until then it tells the others.
        remembers(&mesh, 1, 2).await?;
        remembers(&mesh, n, 2).await?;
    }
    drop((held, stays));
    Ok(())
}

/// Total number of incarnations.
const INCARNATIONS: usize = 1_000;
/// Processes that crash repeatedly, at the same time.
const CRASHING: usize = 20;

/// Crashes and restarts one process repeatedly, with the same name; it is heard each time.
async fn crash_loop(mesh_secret: Vec<u8>, seeds: HashSet<std::net::SocketAddr>, n: usize) -> Result<usize> {
    let ring = Arc::new(KeyRing::derive(&[mesh_secret])?);
    let ip = Ipv4Addr::new(127, 250, rand::random_range(0..=255), u8::try_from(n + 1)?);
    for _ in 0..INCARNATIONS / CRASHING {
        let gossip = Gossip::builder(format!("crashing-{n}"))
            .cluster("kas")
            // A new port each time, as a pod has a new address.
            .listen((ip, 0).into())
            .keys(watch::channel(Arc::clone(&ring)).1)
            .seeds(watch::channel(seeds.clone()).1)
            .timing(Timing { interval: Duration::from_millis(50), ..Timing::default() })
            .start()
            .await?;
        // It is a member before it crashes.
        let mut members = gossip.members();
        let heard = members.wait_for(|members| members.len() >= seeds.len());
        tokio::time::timeout(SOON, heard).await.context("it hears the replicas")??;
    }
    Ok(INCARNATIONS / CRASHING)
}

/// quickwit (PR 6653) could no longer send its digest once it knew 500 nodes, most of them dead.
///
/// The crashing processes only run gossip, with the replicas' secret; the others are real replicas. Fails if
/// a gossip message may have at most 8 datagrams, about 9 KB (`count` in `seal` of `crates/gossip`): the new
/// replica is then known over TCP only. With 1, only a dozen hear each other.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn crashloop_1000_incarnations() -> Result<()> {
    let options = Options { replicas: 4, start: false, ..Options::default() };
    let mut mesh = Mesh::start_with(options).await?;
    mesh.start_replicas(&[0, 1, 2]).await?;
    mesh.converged(&[]).await?;
    mesh.meshed().await?;
    let held = mesh.agent(0, 1, Kind::Ours, 2).await?;
    let before = mesh.kas(0).process.usage()?;
    let seeds: HashSet<_> = (0..3).map(|n| mesh.private(n)).collect();
    let mut crashing = JoinSet::new();
    for n in 0..CRASHING {
        crashing.spawn(crash_loop(mesh.private_secret().to_vec(), seeds.clone(), n));
    }
    let begun = Instant::now();
    let mut incarnations = 0;
    while let Some(ended) = crashing.join_next().await {
        incarnations += ended??;
        // Requests continue meanwhile.
        echo(&mesh, incarnations % 3, 1).await?;
    }
    println!("{incarnations} incarnations in {:?}", begun.elapsed());
    assert_eq!(incarnations, INCARNATIONS);
    // From now on, every digest names all of them, and this process of each other replica.
    for n in 0..3 {
        remembers(&mesh, n, INCARNATIONS + 2).await?;
    }
    // A new replica learns of the live ones in time, despite all the dead ones.
    let begun = Instant::now();
    mesh.start_replicas(&[3]).await?;
    within(2 * SOON, "the newcomer is one of four", async || {
        let mut views = Vec::new();
        for n in 0..4 {
            let view = mesh.view(n).await?;
            views.push((view.live, view.holders));
        }
        let good =
            views.iter().all(|(live, holders)| *live == [0, 1, 2, 3].into() && *holders == [(1, 0)].into());
        Ok(if good { Ok(()) } else { Err(views) })
    })
    .await?;
    println!("a newcomer is one of four after {:?}", begun.elapsed());
    // Not over TCP alone: digests of this size pass.
    mesh.meshed().await?;
    remembers(&mesh, 3, INCARNATIONS + 3).await?;
    println!("it has heard of all the dead after {:?}", begun.elapsed());
    // Dead members are not counted as live.
    for n in 0..4 {
        within(2 * SOON, "four are live", async || {
            let live = mesh.kas(n).metric("kas_replicas_live").await?;
            Ok(if live == 4.0 { Ok(()) } else { Err(live) })
        })
        .await?;
        // Messages that chitchat does not process in time count as undecodable, which may happen now and then
        // on a busy machine.
        let received = mesh.kas(n).metric("kas_gossip_traffic{what=\"datagrams_received\"}").await?;
        for reason in ["undecodable", "oversize"] {
            let name = format!("kas_gossip_datagrams_dropped{{reason=\"{reason}\"}}");
            let dropped = mesh.kas(n).metric(&name).await?;
            assert!(dropped <= received / 100.0, "replica {n}: {dropped} of {received} are {reason}");
        }
    }
    let after = mesh.kas(0).process.usage()?;
    println!("before {before:?}, after {after:?}");
    assert!(after.files <= before.files + 40, "{after:?}");
    assert!(after.resident_kib <= before.resident_kib + 64 * 1024, "{after:?}");
    echo(&mesh, 3, 1).await?;
    drop(held);
    Ok(())
}

/// quickwit (issue 4845, PR 6082) requested everything from every node each minute, because a comparison
/// never became equal.
///
/// Fails if the heartbeats of the owner carry a wrong digest of its table.
#[tokio::test]
async fn no_snapshot_storm() -> Result<()> {
    let plan = Plan { first: 1_000_000, agents: 5_000, chunk: 1_000, pause: Duration::ZERO, later: false };
    let owner = FakeOwner::start(plan).await?;
    let mut mesh = Mesh::start_with(Options { seeds: vec![owner.address], ..Options::default() }).await?;
    mesh.converged(&[]).await?;
    let name = owner.address.to_string();
    let synced = async |mesh: &Mesh, n: usize| {
        within(SOON, "its table is known", async || {
            let row = mesh.list(n).await?.replicas.into_iter().find(|row| row.name == name);
            let whole = row.as_ref().is_some_and(|row| row.table_synced && row.agents == 5_000);
            Ok(if whole { Ok(()) } else { Err(row) })
        })
        .await
    };
    let beats = async |more: usize| {
        let goal = owner.beats() + more;
        within(2 * SOON, "the owner's beats are heard", async || {
            let now = owner.beats();
            Ok(if now >= goal { Ok(()) } else { Err(now) })
        })
        .await
    };
    for n in 0..3 {
        synced(&mesh, n).await?;
    }
    // A heartbeat tells each replica whether its copy is complete.
    beats(6).await?;
    let asked = |n: usize| {
        let me = mesh.private(n).to_string();
        owner.snapshots().iter().filter(|from| **from == me).count()
    };
    let first: Vec<usize> = (0..3).map(asked).collect();
    // One of a stream that only knew the address, one of the stream that stays.
    assert!(first.iter().all(|times| (1..=2).contains(times)), "{first:?}");
    // Agents connect and disconnect, and one replica restarts: no other replica has a reason to request a
    // snapshot.
    for _ in 0..3 {
        let held = mesh.agent(1, 1, Kind::Ours, 2).await?;
        mesh.converged(&[(1, 1)]).await?;
        drop(held);
        mesh.converged(&[]).await?;
    }
    mesh.kill(0).await?;
    mesh.restart(0).await?;
    synced(&mesh, 0).await?;
    mesh.converged(&[]).await?;
    beats(9).await?;
    let asked = |n: usize| {
        let me = mesh.private(n).to_string();
        owner.snapshots().iter().filter(|from| **from == me).count()
    };
    let then: Vec<usize> = (0..3).map(asked).collect();
    println!("snapshots that were asked for, by replica: {first:?}, and in the end {then:?}");
    assert_eq!(then[1..], first[1..]);
    assert!((first[0] + 1..=first[0] + 2).contains(&then[0]), "{first:?} {then:?}");
    Ok(())
}
