//! The planner of a real cluster is killed, paused, and not alone: S52, S55, S56.
//!
//! What planners wrote is judged at the end of the run, by the API server's audit log and the repository
//! only.

use std::{collections::BTreeSet, time::Duration};

use anyhow::{Result, ensure};
use history::{Effect, Micros};
use proto::kas::api::v1::{GetSyncRequest, GetSyncResponse};
use rand::RngExt as _;
use testkit::{kas::within, network::Traffic};
use tokio::time::{sleep, timeout};

use super::process::RATE;
use crate::{
    clock::{self, millis},
    measure::{T_HEAL, T_STALE, T_SYNC},
    run::{Run, between},
};

const GET_SYNC: &str = "/kas.api.v1.KasApi/GetSync";
/// Everything that is waited for takes at most this long. A planner that lost its fence begins anew after
/// 30 s, with jitter.
const LONG: Duration = Duration::from_secs(60);
/// The time between two looks at the cluster.
const LOOK: Duration = Duration::from_millis(100);
/// A replica that says nothing for so long is not waited for.
const ANSWER: Duration = Duration::from_secs(2);
/// What was sent to the cluster before all else ended has arrived after this time.
const SETTLES: Duration = Duration::from_secs(2);

/// What a replica says about the projects of the agent.
async fn sync(run: &Run, n: usize) -> Result<GetSyncResponse> {
    let request = GetSyncRequest {
        agent_id: run.outside.manifests()?.agent(),
        project: String::new(),
        with_objects: false,
    };
    let ask = async { run.mesh.caller(n).await?.unary(GET_SYNC, &request).await };
    timeout(ANSWER, ask).await?
}

/// The replicas that plan for the agent, as each of these says of itself.
async fn homes(run: &Run, among: &[usize]) -> (BTreeSet<usize>, Vec<String>) {
    let (mut homes, mut said) = (BTreeSet::new(), Vec::new());
    for n in among {
        match sync(run, *n).await {
            Ok(answer) if answer.replica == run.name(*n) && !answer.projects.is_empty() => {
                homes.insert(*n);
            }
            Ok(answer) => said.push(format!("{n}: {answer:?}")),
            Err(error) => said.push(format!("{n}: {error:#}")),
        }
    }
    (homes, said)
}

/// Waits until exactly one replica plans for the agent.
async fn home(run: &Run) -> Result<usize> {
    within(LONG, "one replica plans for the agent", async || {
        let (homes, said) = homes(run, &run.mesh.running()).await;
        sleep(LOOK).await;
        Ok(match homes.first() {
            Some(home) if homes.len() == 1 => Ok(*home),
            _ => Err((homes, said)),
        })
    })
    .await
}

async fn commit(run: &mut Run) -> Result<usize> {
    let number = run.outside.manifests_mut()?.commit(&mut run.rng).await?;
    run.say(&format!("commit {number} is pushed"));
    Ok(number)
}

/// Waits until the cluster has exactly the objects of the last commit, and returns when a look began that
/// saw that.
async fn applied(run: &Run) -> Result<Micros> {
    let manifests = run.outside.manifests()?;
    let seen = within(LONG, "the cluster has the objects of the last commit", async || {
        let at = clock::now();
        let difference = manifests.difference().await?;
        if difference.is_some() {
            sleep(LOOK).await;
        }
        Ok(difference.map_or(Ok(at), Err))
    })
    .await?;
    run.say("the cluster has the objects of the last commit");
    Ok(seen)
}

/// Connects the agent to these replicas, applies a first commit, and begins the load.
async fn begin(run: &mut Run, replicas: &[usize]) -> Result<()> {
    run.outside.manifests_mut()?.connect(&run.mesh, replicas).await?;
    commit(run).await?;
    applied(run).await?;
    run.load(RATE / 4, 0, 0);
    Ok(())
}

/// Pushes a last commit, and waits until the cluster has it and keeps it.
async fn end(run: &mut Run) -> Result<()> {
    commit(run).await?;
    applied(run).await?;
    sleep(SETTLES).await;
    // A planner that was replaced may have put an object back: it is put right again.
    applied(run).await?;
    let judged = run.outside.manifests()?.judged()?;
    let applies = &judged.applies;
    ensure!(judged.deleted > 0 && applies.applied > 0, "planners have deleted or applied nothing");
    let planners = applies.by.iter().map(|(who, commits)| format!("{who} of {} commits", commits.len()));
    let planners: Vec<String> = planners.collect();
    run.notes.push(format!(
        "{} objects were applied and {} deleted; by {}. {} writes of the inventory were refused.",
        applies.applied,
        judged.deleted,
        planners.join(", "),
        applies.refused
    ));
    run.notes.push(format!(
        "{} applies of an older commit came after another planner had applied a newer one, while their fence held.",
        applies.stale.len()
    ));
    Ok(())
}

/// Measures how long replaced planners went on.
fn stale(run: &mut Run) -> Result<()> {
    let stale = run.outside.manifests()?.judged()?.applies.stale;
    let mut times: Vec<f64> =
        stale.iter().map(|late| millis(u64::try_from(*late).unwrap_or(u64::MAX))).collect();
    if times.is_empty() {
        times.push(0.0);
    }
    run.measure(&T_STALE, times);
    Ok(())
}

/// S55: the home is killed again and again, at any point of a sync.
pub(super) async fn home_killed(run: &mut Run) -> Result<()> {
    begin(run, &[0, 1, 2]).await?;
    for _ in 0..if run.quick { 3 } else { 12 } {
        let n = home(run).await?;
        commit(run).await?;
        let pause = Duration::from_millis(run.rng.random_range(0..1_500));
        sleep(pause).await;
        let at = run.kill(n).await?;
        commit(run).await?;
        let seen = applied(run).await?;
        run.measure(&T_SYNC, [millis(seen.saturating_sub(at))]);
        run.restart(n).await?;
        run.settled(LONG).await?;
    }
    end(run).await
}

/// S52: the home is paused in the middle of a sync, for shorter and for longer than a fence holds. When it
/// goes on, another replica may have applied a newer commit.
pub(super) async fn home_paused(run: &mut Run) -> Result<()> {
    begin(run, &[0, 1, 2]).await?;
    for seconds in if run.quick { &[1, 18][..] } else { &[1, 5, 18, 30, 18, 18][..] } {
        let n = home(run).await?;
        commit(run).await?;
        // It reads, applies or prunes.
        let begins = Duration::from_millis(run.rng.random_range(100..1_000));
        sleep(begins).await;
        let effect = Effect::Disabled(BTreeSet::from([run.name(n)]));
        let fault = run.fault(format!("SIGSTOP replica {n} for {seconds} s"), effect);
        run.mesh.kas(n).process.pause();
        commit(run).await?;
        sleep(Duration::from_secs(*seconds)).await;
        run.mesh.kas(n).process.resume();
        run.fault_ends(fault);
        run.say(&format!("SIGCONT replica {n}"));
        applied(run).await?;
        run.settled(LONG).await?;
    }
    end(run).await?;
    stale(run)
}

/// S56: the replicas that hold the agent do not see each other.
pub(super) async fn two_homes(run: &mut Run) -> Result<()> {
    let both = [0, 1];
    begin(run, &both).await?;
    let fault = run.cut("replica 0 is cut from 1 and 2", &between(&[0], &[1, 2], Traffic::All))?;
    within(LONG, "both replicas plan for the agent", async || {
        let (homes, said) = homes(run, &both).await;
        sleep(LOOK).await;
        Ok(if homes.len() == both.len() { Ok(()) } else { Err((homes, said)) })
    })
    .await?;
    run.say("both replicas plan for the agent");
    let mut first = None;
    for _ in 0..if run.quick { 6 } else { 40 } {
        let number = commit(run).await?;
        first.get_or_insert(number);
        let pause = Duration::from_millis(run.rng.random_range(200..1_500));
        sleep(pause).await;
    }
    applied(run).await?;
    run.heal(fault)?;
    run.heals(&T_HEAL).await?;
    end(run).await?;
    let by = run.outside.manifests()?.judged()?.applies.by;
    let wrote = by.values().filter(|commits| commits.iter().next_back() >= first.as_ref());
    ensure!(wrote.count() == both.len(), "not both planners applied a commit: {by:?}");
    stale(run)
}
