//! What the network does to replicas on hosts of their own.

use std::{collections::BTreeSet, time::Duration};

use anyhow::{Context as _, Result, ensure};
use grpc::{Code, Outcome};
use http::StatusCode;
use serde_json::json;
use testkit::{
    caller::{answer, frame},
    handler::path,
    kas::within,
    mesh::{Mesh, Options},
    network::{Cut, Traffic},
    process::SOON,
    raw_agent::Kind,
};
use tokio::time::{Instant, sleep};

use crate::ledger::{End, Ledger, echo};

/// Entries of a silent replica stay for three seconds, so that tests need not wait for ten.
const TTL: Duration = Duration::from_secs(3);

async fn on_hosts(replicas: usize) -> Result<Mesh> {
    let config = json!({ "table": { "ttl": "3s" } });
    Mesh::start_with(Options { replicas, hosts: true, config, ..Options::default() }).await
}

/// Looks again and again for `time`. A process that stands still for seconds looks like a cut: if all is seen
/// again afterwards, the whole time begins anew, twice at most.
async fn holds_for(time: Duration, mut look: impl AsyncFnMut() -> Result<()>) -> Result<()> {
    for left in [true, true, false] {
        let until = Instant::now() + time;
        let mut looks = 0;
        let failed = loop {
            if Instant::now() >= until {
                println!("looked {looks} times");
                return Ok(());
            }
            match look().await {
                Ok(()) => looks += 1,
                Err(error) => break error,
            }
            sleep(Duration::from_millis(50)).await;
        };
        ensure!(left, "{failed:#}");
        println!("begun anew, for {failed:#}");
        within(SOON, "all is seen again", async || Ok(look().await.map_err(|error| format!("{error:#}"))))
            .await?;
    }
    unreachable!("the last time ends in one way or the other")
}

async fn not_found(mesh: &Mesh, replica: usize, agent: i64) -> Result<()> {
    let ledger = Ledger::default();
    let end = ledger.echo(&mesh.caller(replica).await?, agent, Duration::from_secs(1)).await;
    ensure!(end == End::NotStarted, "{:?}", ledger.texts(end));
    Ok(())
}

#[tokio::test]
async fn both_sides_of_a_partition_serve_their_agents_and_converge_when_it_heals() -> Result<()> {
    let mesh = on_hosts(3).await?;
    let one = mesh.agent(0, 1, Kind::Ours, 2).await?;
    let two = mesh.agent(1, 2, Kind::Ours, 2).await?;
    let three = mesh.agent(2, 3, Kind::Ours, 2).await?;
    mesh.converged(&[(1, 0), (2, 1), (3, 2)]).await?;
    for round in 0..2 {
        let cut = Instant::now();
        mesh.partition(&[0], &[1, 2])?;
        mesh.converged_among(&[1, 2], &[(2, 1), (3, 2)]).await?;
        println!("round {round}: the many agree after {:?}", cut.elapsed());
        mesh.converged_among(&[0], &[(1, 0)]).await?;
        println!("round {round}: the one agrees after {:?}", cut.elapsed());
        echo(&mesh, 0, 1).await?;
        echo(&mesh, 1, 3).await?;
        not_found(&mesh, 0, 2).await?;
        not_found(&mesh, 2, 1).await?;
        // One waits across the cut, and an agent moves across it.
        let caller = mesh.caller(2).await?;
        let mut stream = caller.open(caller.to_agent(1, &path("Echo"))).await?;
        stream.send(frame(b"x")).await.ok().context("sent")?;
        stream.half_close().ok().context("sent")?;
        mesh.kas(2).metric_is("kas_requests_waiting", 1.0).await?;
        let moved = mesh.agent(0, 4, Kind::Ours, 2).await?;
        mesh.heal()?;
        let healed = Instant::now();
        let got = answer(&mut stream).await?;
        ensure!(got.status.code() == Code::Ok, "{}", got.status);
        println!("round {round}: the waiting request was answered {:?} after it healed", healed.elapsed());
        mesh.converged(&[(1, 0), (2, 1), (3, 2), (4, 0)]).await?;
        println!("round {round}: all agree {:?} after it healed", healed.elapsed());
        assert!(healed.elapsed() < Duration::from_secs(15), "{:?}", healed.elapsed());
        echo(&mesh, 1, 4).await?;
        drop(moved);
        mesh.converged(&[(1, 0), (2, 1), (3, 2)]).await?;
    }
    drop((one, two, three));
    Ok(())
}

#[tokio::test]
async fn five_replicas_split_three_and_two_and_converge_again() -> Result<()> {
    let mesh = on_hosts(5).await?;
    let mut agents = vec![mesh.agent(0, 1, Kind::Ours, 2).await?, mesh.agent(4, 2, Kind::Ours, 2).await?];
    mesh.converged(&[(1, 0), (2, 4)]).await?;
    mesh.partition(&[0, 1, 2], &[3, 4])?;
    mesh.converged_among(&[0, 1, 2], &[(1, 0)]).await?;
    mesh.converged_among(&[3, 4], &[(2, 4)]).await?;
    // Agents move from side to side meanwhile.
    agents.remove(0).cut();
    agents.push(mesh.agent(3, 1, Kind::Ours, 2).await?);
    agents.push(mesh.agent(1, 3, Kind::Ours, 2).await?);
    mesh.converged_among(&[0, 1, 2], &[(3, 1)]).await?;
    mesh.converged_among(&[3, 4], &[(1, 3), (2, 4)]).await?;
    mesh.heal()?;
    println!("five agree {:?} after it healed", mesh.converged(&[(1, 3), (2, 4), (3, 1)]).await?);
    for agent in 1..4 {
        echo(&mesh, 0, agent).await?;
        echo(&mesh, 4, agent).await?;
    }
    Ok(())
}

#[tokio::test]
async fn a_short_network_outage_loses_nothing() -> Result<()> {
    let mesh = on_hosts(3).await?;
    let agents = [mesh.agent(1, 1, Kind::Ours, 2).await?, mesh.agent(2, 2, Kind::Ours, 2).await?];
    mesh.converged(&[(1, 1), (2, 2)]).await?;
    for _ in 0..3 {
        mesh.network().cable(0, false)?;
        sleep(Duration::from_secs(1)).await;
        mesh.network().cable(0, true)?;
        // TCP waits with what it could not send.
        echo(&mesh, 0, 1).await?;
    }
    mesh.network().cable(0, false)?;
    mesh.converged_among(&[1, 2], &[(1, 1), (2, 2)]).await?;
    echo(&mesh, 1, 2).await?;
    mesh.network().cable(0, true)?;
    mesh.converged(&[(1, 1), (2, 2)]).await?;
    echo(&mesh, 0, 2).await?;
    drop(agents);
    Ok(())
}

/// Was seen to fail: replicas that gossip had lost did not count as live while their streams went on.
#[tokio::test]
async fn without_udp_requests_are_served_and_an_alarm_is_raised() -> Result<()> {
    let mesh = on_hosts(3).await?;
    let first = mesh.agent(0, 1, Kind::Ours, 2).await?;
    mesh.converged(&[(1, 0)]).await?;
    // Streams are faster than gossip: what it never heard of it cannot lose.
    for n in 0..3 {
        within(SOON, "gossip has heard of all", async || {
            let rows = mesh.list(n).await?.replicas;
            Ok(if rows.iter().all(|row| row.generation > 0) { Ok(()) } else { Err(rows) })
        })
        .await?;
    }
    within(SOON, "no alarm", async || {
        let alarms = mesh.list(1).await?.alarms;
        Ok(if alarms.is_empty() { Ok(()) } else { Err(alarms) })
    })
    .await?;
    mesh.block_udp()?;
    for n in 0..3 {
        let alarm = within(SOON, "an alarm is raised", async || {
            let alarms = mesh.list(n).await?.alarms;
            Ok(if alarms.is_empty() { Err(()) } else { Ok(alarms.concat()) })
        })
        .await?;
        assert!(alarm.contains("UDP"), "{alarm}");
        mesh.kas(n).metric_is("kas_gossip_lonely", 1.0).await?;
        assert_eq!(
            mesh.kas(n).get("/readiness").await?.0,
            StatusCode::OK,
            "being lonely is no reason to leave"
        );
    }
    // Longer than the ttl: streams prove life too.
    sleep(TTL + Duration::from_secs(1)).await;
    let second = mesh.agent(1, 2, Kind::Ours, 2).await?;
    for (asked, agent) in [(1, 1), (2, 1), (0, 2), (2, 2)] {
        let begun = Instant::now();
        echo(&mesh, asked, agent).await?;
        println!("agent {agent} by replica {asked} over TCP: {:?}", begun.elapsed());
    }
    for n in 0..3 {
        within(SOON, "everybody's agents are known", async || {
            let view = mesh.view(n).await?;
            Ok(if view.holders == [(1, 0), (2, 1)].into() { Ok(()) } else { Err(view) })
        })
        .await?;
        // Agents learn how many replicas there are, with or without gossip.
        mesh.kas(n).metric_is("kas_replicas_live", 3.0).await?;
    }
    mesh.heal()?;
    println!("all agree {:?} after UDP passes", mesh.converged(&[(1, 0), (2, 1)]).await?);
    within(SOON, "the alarm is over", async || {
        let alarms = mesh.list(0).await?.alarms;
        Ok(if alarms.is_empty() { Ok(()) } else { Err(alarms) })
    })
    .await?;
    mesh.kas(0).metric_is("kas_gossip_lonely", 0.0).await?;
    drop((first, second));
    Ok(())
}

#[tokio::test]
async fn replicas_that_start_without_udp_find_each_other_over_tcp() -> Result<()> {
    let mut mesh = Mesh::start_with(Options { hosts: true, start: false, ..Options::default() }).await?;
    mesh.block_udp()?;
    mesh.start_replicas(&[0, 1, 2]).await?;
    let held = mesh.agent(2, 1, Kind::Ours, 2).await?;
    echo(&mesh, 0, 1).await?;
    mesh.converged(&[(1, 2)]).await?;
    mesh.kill(1).await?;
    mesh.converged(&[(1, 2)]).await?;
    drop(held);
    Ok(())
}

/// Museum 20: an asymmetric partition can make Akka's cluster down everybody.
///
/// Seen to fail when one vote is enough to drop a replica.
#[tokio::test]
async fn asymmetric_partition_no_mass_removal() -> Result<()> {
    let mesh = on_hosts(3).await?;
    let one = mesh.agent(0, 1, Kind::Ours, 2).await?;
    let two = mesh.agent(1, 2, Kind::Ours, 2).await?;
    mesh.converged(&[(1, 0), (2, 1)]).await?;
    mesh.meshed().await?;
    // What 0 sends never reaches 1; both are heard by 2.
    mesh.network().cut(&[Cut { from: 0, to: 1, what: Traffic::All }])?;
    holds_for(3 * TTL, async || {
        let view = mesh.view(2).await?;
        ensure!(view.live == [0, 1, 2].into(), "replica 2 hears everybody: {view:?}");
        ensure!(view.holders == [(1, 0), (2, 1)].into(), "replica 2: {view:?}");
        echo(&mesh, 2, 1).await?;
        echo(&mesh, 2, 2).await?;
        // Nobody is forgotten by those who cannot talk to each other: the third relays what they say.
        for n in [0, 1] {
            let view = mesh.view(n).await?;
            ensure!(view.holders == [(1, 0), (2, 1)].into(), "replica {n}: {view:?}");
            ensure!(mesh.kas(n).get("/readiness").await?.0 == StatusCode::OK, "replica {n} is not ready");
        }
        Ok(())
    })
    .await?;
    // Own agents are served on both sides; across the cut nothing is started.
    echo(&mesh, 0, 1).await?;
    echo(&mesh, 1, 2).await?;
    not_found(&mesh, 1, 1).await?;
    not_found(&mesh, 0, 2).await?;
    mesh.heal()?;
    println!("all agree {:?} after it healed", mesh.converged(&[(1, 0), (2, 1)]).await?);
    echo(&mesh, 1, 1).await?;
    drop((one, two));
    Ok(())
}

/// Museum 21: Restate found that a node which can only send looks alive for ever unless it declares itself
/// dead. Here it falls silent once no stream and no datagram reaches it; then gossip says gone as well as the
/// streams, and its entries are dropped.
///
/// Seen to fail when it goes on gossiping (without `silence_if_deaf` in `mesh`): its entries then lived for
/// 40 seconds.
#[tokio::test]
async fn an_unreachable_replica_is_lonely_and_its_entries_expire_elsewhere() -> Result<()> {
    let mesh = on_hosts(3).await?;
    let deaf = mesh.agent(0, 1, Kind::Ours, 2).await?;
    let both = [mesh.agent(0, 2, Kind::Ours, 2).await?, mesh.agent(1, 2, Kind::Ours, 2).await?];
    mesh.converged(&[(1, 0), (2, 0), (2, 1)]).await?;
    // Who was never heard by gossip is not believed by what it says.
    mesh.meshed().await?;
    // It hears nobody; the others hear what it says, which over TCP is nothing.
    let cuts = [1, 2].map(|from| Cut { from, to: 0, what: Traffic::All });
    mesh.network().cut(&cuts)?;
    let cut = Instant::now();
    mesh.kas(0).metric_is("kas_gossip_lonely", 1.0).await?;
    let alarms = mesh.list(0).await?.alarms;
    assert_eq!(alarms.len(), 1, "{alarms:?}");
    println!("lonely after {:?}: {alarms:?}", cut.elapsed());
    // It stays ready, and serves its own.
    assert_eq!(mesh.kas(0).get("/readiness").await?.0, StatusCode::OK);
    echo(&mesh, 0, 1).await?;
    // The others reach what they can reach, at once.
    let begun = Instant::now();
    for asked in [1, 2] {
        echo(&mesh, asked, 2).await?;
    }
    println!("the others reached the agent in {:?}", begun.elapsed());
    // It is silent after 5 s, gossip has lost it 1.5 s later, and the redials are unanswered by then.
    mesh.converged_among(&[1, 2], &[(2, 1)]).await?;
    println!("its slots expired elsewhere after {:?}", cut.elapsed());
    assert!(cut.elapsed() < Duration::from_secs(15), "{:?}", cut.elapsed());
    not_found(&mesh, 2, 1).await?;
    mesh.heal()?;
    println!("all agree {:?} after it healed", mesh.converged(&[(1, 0), (2, 0), (2, 1)]).await?);
    mesh.kas(0).metric_is("kas_gossip_lonely", 0.0).await?;
    echo(&mesh, 2, 1).await?;
    drop((deaf, both));
    Ok(())
}

/// A firewall lets out what a replica dials, and nothing in: it follows the others, and they hear its gossip,
/// but none of them reaches it. One vote drops nobody, so it stays suspect and its entries stay: asked last,
/// named to whoever waits, and back at once when the firewall lets it. Both sides say what is wrong.
///
/// Seen to fail without the alarms: nothing told it apart from one that is suspect for a moment.
#[tokio::test]
async fn replica_that_cannot_be_dialled_stays_suspect_and_both_sides_report_it() -> Result<()> {
    let mesh = on_hosts(3).await?;
    let walled = mesh.agent(0, 1, Kind::Ours, 2).await?;
    let both = [mesh.agent(0, 2, Kind::Ours, 2).await?, mesh.agent(1, 2, Kind::Ours, 2).await?];
    mesh.converged(&[(1, 0), (2, 0), (2, 1)]).await?;
    // What it says by gossip is believed by those who know it.
    mesh.meshed().await?;
    let cuts = [1, 2].map(|from| [Traffic::Udp, Traffic::Dialled].map(|what| Cut { from, to: 0, what }));
    mesh.network().cut(&cuts.concat())?;
    let cut = Instant::now();
    let name = mesh.private(0).to_string();
    for n in [1, 2] {
        let alarm = within(2 * SOON, "an alarm names it", async || {
            let alarms = mesh.list(n).await?.alarms;
            Ok(alarms.iter().find(|alarm| alarm.contains("does not answer at")).cloned().ok_or(alarms))
        })
        .await?;
        assert!(alarm.contains(&name), "{alarm}");
        println!("replica {n} says after {:?}: {alarm}", cut.elapsed());
    }
    let own = within(2 * SOON, "it says so itself", async || {
        let alarms = mesh.list(0).await?.alarms;
        Ok(alarms
            .iter()
            .find(|alarm| alarm.contains("no other replica has reached this one"))
            .cloned()
            .ok_or(alarms))
    })
    .await?;
    assert!(own.contains(&name), "{own}");
    println!("it says after {:?}: {own}", cut.elapsed());
    // Longer than entries live, and than a deaf one speaks: nobody forgets it, and it follows the others.
    holds_for(3 * TTL, async || {
        for n in [1, 2] {
            let row = mesh.row(n, 0).await?.context("it is known")?;
            ensure!((row.standing.as_str(), row.agents) == ("suspect", 2), "replica {n}: {row:?}");
        }
        for n in 0..3 {
            let view = mesh.view(n).await?;
            ensure!(view.holders == [(1, 0), (2, 0), (2, 1)].into(), "replica {n}: {view:?}");
        }
        ensure!(mesh.kas(0).get("/readiness").await?.0 == StatusCode::OK, "it is not ready");
        Ok(())
    })
    .await?;
    // Its own callers reach everybody; others reach its agents where they are besides.
    for agent in [1, 2] {
        echo(&mesh, 0, agent).await?;
    }
    for n in [1, 2] {
        let begun = Instant::now();
        echo(&mesh, n, 2).await?;
        println!("replica {n} reached the agent of both in {:?}", begun.elapsed());
        not_found(&mesh, n, 1).await?;
        // Agents are not told to look for it.
        mesh.kas(n).metric_is("kas_replicas_live", 2.0).await?;
    }
    mesh.heal()?;
    println!("all agree {:?} after it healed", mesh.converged(&[(1, 0), (2, 0), (2, 1)]).await?);
    within(SOON, "the alarms are over", async || {
        let alarms = [mesh.list(0).await?.alarms, mesh.list(1).await?.alarms].concat();
        Ok(if alarms.is_empty() { Ok(()) } else { Err(alarms) })
    })
    .await?;
    echo(&mesh, 2, 1).await?;
    drop((walled, both));
    Ok(())
}

/// Looks at all replicas for `time`: each has everything in its view and is ready, however it hears of the
/// others.
async fn keep_seeing(mesh: &Mesh, holders: &[(i64, usize)], time: Duration) -> Result<()> {
    let expected: BTreeSet<_> = holders.iter().copied().collect();
    holds_for(time, async || {
        for n in mesh.running() {
            let view = mesh.view(n).await?;
            ensure!(view.holders == expected, "replica {n}: {view:?}");
            ensure!(mesh.kas(n).get("/readiness").await?.0 == StatusCode::OK, "replica {n} is not ready");
        }
        Ok(())
    })
    .await
}

/// A firewall that lets one direction of gossip pass: 1 never hears 0, and 0 hears 1. Longer than it takes to
/// call a replica deaf and than entries live, with a third replica that relays and without.
#[tokio::test]
async fn datagrams_lost_in_one_direction_drop_no_replica() -> Result<()> {
    for replicas in [2, 3] {
        let mesh = on_hosts(replicas).await?;
        let one = mesh.agent(0, 1, Kind::Ours, 2).await?;
        let two = mesh.agent(1, 2, Kind::Ours, 2).await?;
        mesh.converged(&[(1, 0), (2, 1)]).await?;
        mesh.meshed().await?;
        mesh.network().cut(&[Cut { from: 0, to: 1, what: Traffic::Udp }])?;
        keep_seeing(&mesh, &[(1, 0), (2, 1)], 4 * TTL).await?;
        // Changes travel, and requests, both ways.
        let three = mesh.agent(0, 3, Kind::Ours, 2).await?;
        let four = mesh.agent(1, 4, Kind::Ours, 2).await?;
        keep_told(&mesh, &[(1, 0), (2, 1), (3, 0), (4, 1)]).await?;
        for (asked, agent) in [(1, 1), (0, 2), (1, 3), (0, 4)] {
            echo(&mesh, asked, agent).await?;
        }
        mesh.heal()?;
        mesh.converged(&[(1, 0), (2, 1), (3, 0), (4, 1)]).await?;
        drop((one, two, three, four));
    }
    Ok(())
}

/// Waits until each replica believes this of agents, whether or not it trusts the others' life fully.
async fn keep_told(mesh: &Mesh, holders: &[(i64, usize)]) -> Result<()> {
    let expected: BTreeSet<_> = holders.iter().copied().collect();
    let begun = Instant::now();
    within(SOON, "all are told", async || {
        for n in mesh.running() {
            let view = mesh.view(n).await?.holders;
            if view != expected {
                return Ok(Err((n, view)));
            }
        }
        Ok(Ok(()))
    })
    .await?;
    println!("all were told after {:?}", begun.elapsed());
    Ok(())
}

/// Gossip alone keeps entries and carries changes: no table stream passes, nobody falls silent.
#[tokio::test]
async fn without_tcp_between_replicas_gossip_keeps_views_exact() -> Result<()> {
    let mesh = on_hosts(3).await?;
    let one = mesh.agent(0, 1, Kind::Ours, 2).await?;
    mesh.converged(&[(1, 0)]).await?;
    mesh.meshed().await?;
    let pairs = (0..3).flat_map(|from| (0..3).map(move |to| (from, to))).filter(|(from, to)| from != to);
    let cuts: Vec<_> = pairs.map(|(from, to)| Cut { from, to, what: Traffic::Tcp }).collect();
    mesh.network().cut(&cuts)?;
    keep_seeing(&mesh, &[(1, 0)], 4 * TTL).await?;
    let two = mesh.agent(1, 2, Kind::Ours, 2).await?;
    keep_told(&mesh, &[(1, 0), (2, 1)]).await?;
    mesh.heal()?;
    mesh.converged(&[(1, 0), (2, 1)]).await?;
    echo(&mesh, 2, 1).await?;
    drop((one, two));
    Ok(())
}

#[tokio::test]
async fn a_started_request_across_a_black_hole_ends_with_an_unknown_outcome() -> Result<()> {
    let mesh = on_hosts(3).await?;
    let agent = mesh.agent(0, 1, Kind::Ours, 2).await?;
    mesh.converged(&[(1, 0)]).await?;
    let caller = mesh.caller(1).await?;
    let mut stream = caller.open(caller.to_agent(1, &path("Chat"))).await?;
    stream.send(frame(b"x")).await.ok().context("sent")?;
    stream.next().await;
    mesh.partition(&[0], &[1, 2])?;
    let cut = Instant::now();
    let got = answer(&mut stream).await?;
    println!("it ended {:?} after the cut: {}", cut.elapsed(), got.status);
    assert_eq!((got.status.code(), got.status.outcome()), (Code::Unavailable, Some(Outcome::Unknown)));
    // The gateway lets its tunnel go too.
    mesh.kas(0).metric_is("kas_requests_open", 0.0).await?;
    echo(&mesh, 0, 1).await?;
    mesh.heal()?;
    echo(&mesh, 1, 1).await?;
    drop(agent);
    Ok(())
}
