//! Museum numbers that are about the dead: who is gone stays gone, and what is dead costs nothing.
//!
//! Each stands for a public bug of another system; see the list in the project's notes on chaos (`chaos.md`,
//! B.3).

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

/// How long gossip remembers the dead in these tests.
const GRACE: Duration = Duration::from_secs(2);
/// Some rounds of gossip, and less than it takes until somebody silent is taken for dead.
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

/// Returns how replica `asked` judges replica `n`; `None`: it does not know it.
async fn standing(mesh: &Mesh, asked: usize, n: usize) -> Result<Option<String>> {
    Ok(mesh.row(asked, n).await?.map(|row| row.standing))
}

/// Waits until replica `n` remembers exactly this many processes of others, dead ones among them.
async fn remembers(mesh: &Mesh, n: usize, incarnations: usize) -> Result<()> {
    mesh.kas(n).metric_is("kas_gossip_incarnations", incarnations as f64).await
}

/// Museum 4: chitchat (issue 161) gossiped a dead incarnation for ever: who had forgotten it was told again
/// by who had not, and each newcomer learned of it, and told it on.
///
/// Seen to fail when the dead are remembered for ten minutes (another `dead_node_grace_period` in
/// `crates/gossip`'s `node`). `crates/gossip` has the same claim as a test that also fails with a chitchat
/// without its guards.
#[tokio::test]
async fn dead_incarnation_not_regossiped() -> Result<()> {
    let mut mesh = start(4, &[0, 1, 2]).await?;
    mesh.kill(2).await?;
    mesh.converged(&[]).await?;
    // The newcomer knows one address, which is not that of the dead: what it knows of it comes by gossip
    // alone.
    mesh.set_discovery(json!({ "static": { "addresses": [mesh.private(0).to_string()] } }));
    mesh.start_replicas(&[3]).await?;
    let begun = Instant::now();
    let mut lives = 1;
    // As many lives as fit into the time in which it may be heard of as one that is dead; it is never live.
    loop {
        mesh.converged(&[]).await?;
        mesh.meshed().await?;
        let known = standing(&mesh, 3, 2).await?;
        ensure!(known.as_deref() != Some("live"), "the dead one lives again: {known:?}");
        if begun.elapsed() > 2 * GRACE {
            break;
        }
        mesh.kill(3).await?;
        mesh.restart(3).await?;
        lives += 1;
    }
    // Neither it nor an earlier life of the newcomer is remembered by anybody, and nobody brings them back.
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

/// Museum 5: in chitchat (PR 155) and quickwit (issue 5135) dead nodes came back, because peers collect them
/// at different times: who has not yet collected tells those who have.
///
/// The late one is stopped for longer than the others remember, and believes when it wakes that everybody
/// lives. Seen to fail with a chitchat that takes back what it has collected (`last_heartbeat_if_deleted`
/// without memory).
#[tokio::test]
async fn no_resurrection_after_gc() -> Result<()> {
    let mesh = start(4, &[0, 1, 2, 3]).await?;
    let held = mesh.agent(3, 1, Kind::Ours, 2).await?;
    let stays = mesh.agent(2, 2, Kind::Ours, 2).await?;
    mesh.converged(&[(1, 3), (2, 2)]).await?;
    // The last that it said reaches everybody: who alone knew of a later heartbeat would bring it back, and
    // rightly.
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
    // While it learns what has happened, nobody learns from it.
    within(SOON, "the late one knows as well", async || {
        for n in [0, 2] {
            let known = standing(&mesh, n, 3).await?;
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
        // The late one forgets it too; until then it tells the others.
        remembers(&mesh, 1, 2).await?;
        remembers(&mesh, n, 2).await?;
    }
    drop((held, stays));
    Ok(())
}

/// Incarnations in all.
const INCARNATIONS: usize = 1_000;
/// Processes that crash again and again, at once.
const CRASHING: usize = 20;

/// One process crashes and comes back, again and again, with the same name, and is heard each time.
async fn crash_loop(mesh_secret: Vec<u8>, seeds: HashSet<std::net::SocketAddr>, n: usize) -> Result<usize> {
    let ring = Arc::new(KeyRing::derive(&[mesh_secret])?);
    let ip = Ipv4Addr::new(127, 250, rand::random_range(0..=255), u8::try_from(n + 1)?);
    for _ in 0..INCARNATIONS / CRASHING {
        let gossip = Gossip::builder(format!("crashing-{n}"))
            .cluster("kas")
            // Another port each time, as a pod has another address.
            .listen((ip, 0).into())
            .keys(watch::channel(Arc::clone(&ring)).1)
            .seeds(watch::channel(seeds.clone()).1)
            .timing(Timing { interval: Duration::from_millis(50), ..Timing::default() })
            .start()
            .await?;
        // It is one of them before it is gone.
        let mut members = gossip.members();
        let heard = members.wait_for(|members| members.len() >= seeds.len());
        tokio::time::timeout(SOON, heard).await.context("it hears the replicas")??;
    }
    Ok(INCARNATIONS / CRASHING)
}

/// Museum 8: quickwit (PR 6653) could not send its digest any more once it knew 500 nodes, most of them dead.
///
/// The processes that crash are gossip alone, with the replicas' secret; those that stand it are replicas.
/// Seen to fail when a message of gossip may have no more than 8 datagrams, about 9 KB (`count` in `seal` of
/// `crates/gossip`): the newcomer is known over TCP alone then. With 1, no more than a dozen ever hear each
/// other.
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
        // Meanwhile everything goes on.
        echo(&mesh, incarnations % 3, 1).await?;
    }
    println!("{incarnations} incarnations in {:?}", begun.elapsed());
    assert_eq!(incarnations, INCARNATIONS);
    // Every digest names all of them from now on, and this process of each other replica.
    for n in 0..3 {
        remembers(&mesh, n, INCARNATIONS + 2).await?;
    }
    // Someone who comes now learns of the live ones in time, whatever else there is to tell.
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
    // Not over TCP alone: digests of that size pass.
    mesh.meshed().await?;
    remembers(&mesh, 3, INCARNATIONS + 3).await?;
    println!("it has heard of all the dead after {:?}", begun.elapsed());
    // The dead are not counted among the live.
    for n in 0..4 {
        within(2 * SOON, "four are live", async || {
            let live = mesh.kas(n).metric("kas_replicas_live").await?;
            Ok(if live == 4.0 { Ok(()) } else { Err(live) })
        })
        .await?;
        // What chitchat does not take within its time counts as undecodable, which a busy machine may show
        // now and then.
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

/// Museum 9: quickwit (issue 4845, PR 6082) asked everybody for everything each minute, since something never
/// became equal.
///
/// Seen to fail when the owner's beats carry a digest that is not that of its table.
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
    // A beat tells each whether it has everything.
    beats(6).await?;
    let asked = |n: usize| {
        let me = mesh.private(n).to_string();
        owner.snapshots().iter().filter(|from| **from == me).count()
    };
    let first: Vec<usize> = (0..3).map(asked).collect();
    // One of a stream that knew only the address, one of the stream that stays.
    assert!(first.iter().all(|times| (1..=2).contains(times)), "{first:?}");
    // Agents come and go, and one replica starts anew: nobody else has a reason to ask.
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
