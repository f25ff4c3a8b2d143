//! Replicas of several versions side by side, and changes of all replicas to another one, and back.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use anyhow::{Result, ensure};
use history::{Effect, Kind, Outcome};
use serde_json::Value;
use testkit::kas::{metric, within};
use tokio::time::{Instant, sleep};

use super::{process::RATE, restarts};
use crate::{
    measure::T_HEAL,
    run::{AGENT_HOSTS, Run},
    table::Tracker,
    written::Written,
};

/// The views of all replicas, and the builds in them, are true within this.
const SETTLES: Duration = Duration::from_secs(10);
/// Agents that have a connection to one replica only, for each of three replicas.
const EACH: i64 = 4;
pub(super) const ONE_REPLICA: i64 = 3 * EACH;
/// How often each replica of S36 changes its records in the full form.
const ROUNDS: u32 = 6;
/// What a replica logs only if it cannot read another one.
const UNREADABLE: [&str; 4] = [
    "a table stream has",
    "the table of another replica cannot be read",
    "another replica refuses to send its table",
    "gossip cannot carry this value",
];

/// Which records the replicas of a scenario write at first.
pub(crate) fn written(id: &str) -> Vec<Written> {
    match id {
        "S36" => vec![Written::Own, Written::Previous, Written::Next],
        "S37" => vec![Written::Previous; 3],
        _ => Vec::new(),
    }
}

/// S36: every mixture of versions, and then one that writes tables which the others cannot read.
pub(super) async fn side_by_side(run: &mut Run) -> Result<()> {
    told(run).await?;
    crossing(run).await?;
    if run.tracker == Tracker::Gossip {
        unread(run).await?;
    }
    run.load(RATE, 12, 6);
    sleep(Duration::from_secs(3)).await;
    let rounds = run.restarts.unwrap_or(if run.quick { 1 } else { ROUNDS });
    for _ in 0..rounds {
        for n in 0..run.setup.replicas {
            change(run, n, run.setup.written[n].after()).await?;
            told(run).await?;
        }
        crossing(run).await?;
    }
    restarts::ended(run).await;
    complaints(run, &(0..run.setup.replicas).collect::<Vec<_>>())?;
    // With Redis there are no tables to read.
    if run.tracker == Tracker::Gossip { too_late(run).await } else { Ok(()) }
}

/// S37: all replicas from the previous version to this one and to the next, and the whole way back.
pub(super) async fn through_versions(run: &mut Run) -> Result<()> {
    told(run).await?;
    run.load(RATE, 12, 6);
    sleep(Duration::from_secs(3)).await;
    for next in [Written::Own, Written::Next, Written::Own, Written::Previous] {
        for n in 0..run.setup.replicas {
            change(run, n, next).await?;
        }
        told(run).await?;
        crossing(run).await?;
    }
    run.notes.push("All replicas went from the previous version to the next one, and back.".to_owned());
    restarts::ended(run).await;
    complaints(run, &(0..run.setup.replicas).collect::<Vec<_>>())
}

/// Restarts a replica with other records.
async fn change(run: &mut Run, n: usize, written: Written) -> Result<()> {
    complaints(run, &[n])?;
    restarts::leave(run, n).await?;
    run.write(n, written);
    run.say(&format!("replica {n} writes records: {written:?}"));
    restarts::back(run, n).await
}

/// Waits until each list has the version of each replica.
async fn told(run: &Run) -> Result<()> {
    let expected: BTreeMap<String, Option<&str>> =
        run.setup.written.iter().enumerate().map(|(n, written)| (run.name(n), written.version())).collect();
    for n in run.mesh.running() {
        within(SETTLES, &format!("replica {n} lists the versions of all"), async || {
            let rows = run.mesh.list(n).await?.replicas;
            let others: BTreeSet<&str> = expected.values().copied().flatten().collect();
            let is_right = rows.len() == expected.len()
                && rows.iter().all(|row| match expected.get(&row.name) {
                    Some(Some(version)) => row.version == *version,
                    Some(None) => !others.contains(&*row.version),
                    None => false,
                });
            let told: Vec<_> = rows.into_iter().map(|row| (row.name, row.version)).collect();
            Ok(if is_right { Ok(()) } else { Err(told) })
        })
        .await?;
    }
    Ok(())
}

/// Connects agents to one replica each, and asks for each through each other replica.
async fn crossing(run: &mut Run) -> Result<()> {
    let first = run.setup.agents + 1;
    let replicas = run.setup.replicas;
    let mut swarms = Vec::new();
    for (n, agent) in (0..replicas).zip((first..).step_by(usize::try_from(EACH)?)) {
        swarms.push((agent, run.swarm((agent, EACH, 0, 1), Some(n), n % AGENT_HOSTS).await?));
    }
    for (_, swarm) in &swarms {
        run.connected(*swarm).await?;
    }
    let deadline = Duration::from_secs(10);
    for (owner, (agent, _)) in swarms.iter().enumerate() {
        for entry in (0..replicas).filter(|entry| *entry != owner) {
            for agent in *agent..agent + EACH {
                let request = run.client.send(run.ids.next(), agent, Kind::Unary, entry, deadline).await;
                let (outcome, attempts) = (request.outcome, request.attempts.len());
                let detail = request.detail.clone();
                run.history.lock().requests.push(request);
                ensure!(
                    outcome == Some(Outcome::Ok) && attempts == 1,
                    "a request through replica {entry} ({:?}) for agent {agent} of replica {owner} ({:?}): {outcome:?} \
                     after {attempts} attempts: {detail}",
                    run.setup.written[entry],
                    run.setup.written[owner]
                );
            }
        }
    }
    for (_, swarm) in swarms {
        run.end_swarm(swarm).await?;
    }
    Ok(())
}

/// Waits until each replica has met messages of the next version and passed over them. Nothing else that
/// replicas sent may be unread but changes, which streams deliver.
async fn unread(run: &mut Run) -> Result<()> {
    for n in run.mesh.running() {
        // The next version does not send itself anything.
        if run.setup.written[n] == Written::Next {
            continue;
        }
        let name = |record: &str| format!("kas_peer_records_unread_total{{record=\"{record}\"}}");
        let metrics = run.mesh.observability(n);
        let messages = within(SETTLES, &format!("replica {n} meets unknown messages"), async || {
            let count = metric(metrics, &name("Message")).await?;
            Ok(if count > 0.0 { Ok(count) } else { Err(count) })
        })
        .await?;
        let changes = metric(metrics, &name("Changes")).await?;
        for record in ["Summary", "Snapshot"] {
            let count = metric(metrics, &name(record)).await?;
            ensure!(count == 0.0, "replica {n} could not read {count} records {record:?}");
        }
        run.notes.push(format!(
            "Replica {n} passed over {messages} unknown messages of table streams, and {changes} changes in a later \
             format."
        ));
    }
    Ok(())
}

/// Fails if a replica has logged that it cannot read another one, or an error.
fn complaints(run: &Run, replicas: &[usize]) -> Result<()> {
    for n in replicas {
        let log = run.mesh.kas(*n).process.log();
        let complaint = log.lines().find(|line| is_complaint(line));
        ensure!(complaint.is_none(), "replica {n} logged: {}", complaint.unwrap_or_default());
    }
    Ok(())
}

fn is_complaint(line: &str) -> bool {
    let Ok(line) = serde_json::from_str::<Value>(line) else { return false };
    let message = line["message"].as_str().unwrap_or_default();
    line["level"] == "ERROR" || UNREADABLE.iter().any(|text| message.contains(text))
}

/// A replica whose tables the others cannot read is asked for each request.
async fn too_late(run: &mut Run) -> Result<()> {
    let n = 2;
    let (before, others) = (run.setup.written[n], [0, 1]);
    run.leave(n).await?;
    run.write(n, Written::Later);
    // The others do not know its agents, and say so.
    let effect = Effect::Disabled(BTreeSet::from([run.name(n)]));
    let fault = run.fault(format!("replica {n} writes tables in a later format"), effect);
    run.restart(n).await?;
    for other in others {
        let cannot = |line: &Value| {
            (line["message"] == "the table of another replica cannot be read" && line["level"] == "WARN")
                .then_some(())
        };
        run.mesh.kas(other).process.logged("that it cannot read a table", cannot).await?;
    }
    crossing(run).await?;
    told(run).await?;
    run.leave(n).await?;
    run.write(n, before);
    run.restart(n).await?;
    run.fault_ends(fault);
    run.heals(&T_HEAL).await?;
    run.notes.push(format!(
        "Replica {n} wrote tables in a later format: the others asked it for each request, and said so once."
    ));
    Ok(())
}

/// The version and commit that replica 0 has in its own list.
async fn builds(run: &Run) -> Result<BTreeSet<String>> {
    let list = run.mesh.list(0).await?;
    Ok(list.replicas.into_iter().map(|row| format!("{} {}", row.version, row.commit)).collect())
}

/// S37 with `--other-programs`.
pub(super) async fn and_back(run: &mut Run) -> Result<()> {
    run.load(RATE, 12, 6);
    sleep(Duration::from_secs(3)).await;
    let before = builds(run).await?;
    ensure!(before.len() == 1, "the replicas do not begin with one build: {before:?}");
    for build in [1, 0] {
        for n in 0..run.setup.replicas {
            restarts::leave(run, n).await?;
            run.mesh.set_build(n, build);
            restarts::back(run, n).await?;
        }
        // Replica 0 may still list the process that the last one was before.
        run.settled(SETTLES).await?;
        let end = Instant::now() + SETTLES;
        let mut now = builds(run).await?;
        while now.len() > 1 && Instant::now() < end {
            sleep(Duration::from_millis(100)).await;
            now = builds(run).await?;
        }
        run.notes.push(format!("All replicas run {now:?}."));
        ensure!(now.len() == 1, "all replicas were restarted, and run several builds: {now:?}");
        ensure!((build == 0) == (now == before), "the other programs are the same build: {now:?}");
    }
    restarts::ended(run).await;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_a_replica_cannot_read_is_a_complaint() {
        let malformed = r#"{"level":"WARN","message":"a table stream has a malformed message"}"#;
        assert!(is_complaint(malformed));
        assert!(is_complaint(r#"{"level":"ERROR","message":"gossip has stopped"}"#));
        for fine in [r#"{"level":"WARN","message":"lonely"}"#, r#"{"level":"INFO"}"#, "panicked"] {
            assert!(!is_complaint(fine), "{fine}");
        }
    }

    #[test]
    fn each_version_is_beside_each_other_one() {
        let mut now = written("S36");
        let mut pairs = BTreeSet::new();
        for n in (0..3).cycle().take(9) {
            for (one, other) in [(0, 1), (0, 2), (1, 2)] {
                pairs.insert((format!("{:?}", now[one]), format!("{:?}", now[other])));
            }
            now[n] = now[n].after();
        }
        assert_eq!(now, written("S36"));
        assert!(["Previous", "Own", "Next"].iter().all(|one| {
            ["Previous", "Own", "Next"].iter().all(|other| pairs.contains(&((*one).into(), (*other).into())))
        }));
    }
}
