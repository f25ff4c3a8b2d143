//! Network failures between replicas on separate hosts.

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

/// Checks a condition repeatedly for `time`. A process that stalls for seconds looks like a network failure:
/// if the condition holds again afterwards, the time starts over, at most twice.
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
        // A request waits across the partition, and an agent moves across it.
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
        // TCP keeps the data that it could not send.
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

/// Failed when replicas that gossip had lost did not count as live although their streams continued.
#[tokio::test]
async fn without_udp_requests_are_served_and_an_alarm_is_raised() -> Result<()> {
    let mesh = on_hosts(3).await?;
    let first = mesh.agent(0, 1, Kind::Ours, 2).await?;
    mesh.converged(&[(1, 0)]).await?;
    // Streams are faster than gossip: gossip cannot lose a replica that it never heard.
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
    // Longer than the TTL: streams prove life, too.
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

/// An asymmetric partition can make Akka's cluster down every member.
///
/// Fails if one vote is enough to drop a replica.
#[tokio::test]
async fn asymmetric_partition_no_mass_removal() -> Result<()> {
    let mesh = on_hosts(3).await?;
    let one = mesh.agent(0, 1, Kind::Ours, 2).await?;
    let two = mesh.agent(1, 2, Kind::Ours, 2).await?;
    mesh.converged(&[(1, 0), (2, 1)]).await?;
    mesh.meshed().await?;
    // Data of 0 never reaches 1; 2 hears both.
    mesh.network().cut(&[Cut { from: 0, to: 1, what: Traffic::All }])?;
    holds_for(3 * TTL, async || {
        let view = mesh.view(2).await?;
        ensure!(view.live == [0, 1, 2].into(), "replica 2 hears everybody: {view:?}");
        ensure!(view.holders == [(1, 0), (2, 1)].into(), "replica 2: {view:?}");
        echo(&mesh, 2, 1).await?;
        echo(&mesh, 2, 2).await?;
        // The two that cannot communicate do not drop each other, because the third one relays.
        for n in [0, 1] {
            let view = mesh.view(n).await?;
            ensure!(view.holders == [(1, 0), (2, 1)].into(), "replica {n}: {view:?}");
            ensure!(mesh.kas(n).get("/readiness").await?.0 == StatusCode::OK, "replica {n} is not ready");
        }
        Ok(())
    })
    .await?;
    // Both sides serve their own agents; no request is started across the partition.
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

/// In Restate, a node that can only send looks alive forever unless it declares itself dead. Here it falls
/// silent once no stream and no datagram reaches it. Then gossip and the streams both report it as gone, and
/// its entries are dropped.
///
/// Fails if it continues to gossip (without `silence_if_deaf` in `mesh`): its entries then lived for 40
/// seconds.
#[tokio::test]
async fn an_unreachable_replica_is_lonely_and_its_entries_expire_elsewhere() -> Result<()> {
    let mesh = on_hosts(3).await?;
    let deaf = mesh.agent(0, 1, Kind::Ours, 2).await?;
    let both = [mesh.agent(0, 2, Kind::Ours, 2).await?, mesh.agent(1, 2, Kind::Ours, 2).await?];
    mesh.converged(&[(1, 0), (2, 0), (2, 1)]).await?;
    // A replica that gossip never heard is not trusted for what gossip says about it.
    mesh.meshed().await?;
    // It hears no other replica; the others hear its gossip, and nothing over TCP.
    let cuts = [1, 2].map(|from| Cut { from, to: 0, what: Traffic::All });
    mesh.network().cut(&cuts)?;
    let cut = Instant::now();
    mesh.kas(0).metric_is("kas_gossip_lonely", 1.0).await?;
    let alarms = mesh.list(0).await?.alarms;
    assert_eq!(alarms.len(), 1, "{alarms:?}");
    println!("lonely after {:?}: {alarms:?}", cut.elapsed());
    // It stays ready and serves its own agents.
    assert_eq!(mesh.kas(0).get("/readiness").await?.0, StatusCode::OK);
    echo(&mesh, 0, 1).await?;
    // The others reach the remaining agents at once.
    let begun = Instant::now();
    for asked in [1, 2] {
        echo(&mesh, asked, 2).await?;
    }
    println!("the others reached the agent in {:?}", begun.elapsed());
    // It is silent after 5 s, and gossip loses it 1.5 s later; redials have failed by then.
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

/// A firewall allows only outgoing connections of a replica: it follows the others, and they hear its gossip,
/// but cannot dial it. One vote does not drop it, so it stays suspect and keeps its entries: it is asked
/// last, named to waiting callers, and live again as soon as the firewall allows it. Both sides report the
/// problem.
///
/// Fails without the alarms: it would look like a replica that is suspect for a moment.
#[tokio::test]
async fn replica_that_cannot_be_dialled_stays_suspect_and_both_sides_report_it() -> Result<()> {
    let mesh = on_hosts(3).await?;
    let walled = mesh.agent(0, 1, Kind::Ours, 2).await?;
    let both = [mesh.agent(0, 2, Kind::Ours, 2).await?, mesh.agent(1, 2, Kind::Ours, 2).await?];
    mesh.converged(&[(1, 0), (2, 0), (2, 1)]).await?;
    // Replicas that know it trust its gossip.
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
    // Longer than the TTL of entries, and than an unreachable replica keeps sending: it is not dropped, and
    // follows the others.
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
    // Its own callers reach all agents. Others reach its agents only at further replicas.
    for agent in [1, 2] {
        echo(&mesh, 0, agent).await?;
    }
    for n in [1, 2] {
        let begun = Instant::now();
        echo(&mesh, n, 2).await?;
        println!("replica {n} reached the agent of both in {:?}", begun.elapsed());
        not_found(&mesh, n, 1).await?;
        // Agents get no advice to connect to it.
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

/// Checks all replicas for `time`: each one has the others in its view and is ready, however it hears them.
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

/// A firewall that allows gossip in one direction: 1 never hears 0, and 0 hears 1. It lasts longer than the
/// detection of unreachable replicas and the TTL of entries, with and without a third replica that relays.
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
        // Changes and requests pass in both directions.
        let three = mesh.agent(0, 3, Kind::Ours, 2).await?;
        let four = mesh.agent(1, 4, Kind::Ours, 2).await?;
        keep_view(&mesh, &[(1, 0), (2, 1), (3, 0), (4, 1)]).await?;
        for (asked, agent) in [(1, 1), (0, 2), (1, 3), (0, 4)] {
            echo(&mesh, asked, agent).await?;
        }
        mesh.heal()?;
        mesh.converged(&[(1, 0), (2, 1), (3, 0), (4, 1)]).await?;
        drop((one, two, three, four));
    }
    Ok(())
}

/// Waits until each replica has these agents in its view, whether or not it considers their owners live.
async fn keep_view(mesh: &Mesh, holders: &[(i64, usize)]) -> Result<()> {
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

/// Gossip alone keeps entries and carries changes: no table stream passes, and no replica falls silent.
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
    keep_view(&mesh, &[(1, 0), (2, 1)]).await?;
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
    // The owner releases its tunnel, too.
    mesh.kas(0).metric_is("kas_requests_open", 0.0).await?;
    echo(&mesh, 0, 1).await?;
    mesh.heal()?;
    echo(&mesh, 1, 1).await?;
    drop(agent);
    Ok(())
}
