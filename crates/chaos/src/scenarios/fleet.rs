//! A part of the fleet hangs: S53.

use std::{collections::BTreeSet, net::SocketAddr, sync::Arc, time::Duration};

use anyhow::{Context as _, Result, ensure};
use history::Effect;
use parking_lot::Mutex;
use testkit::kas::within;
use tokio::{
    task::JoinSet,
    time::{Instant, sleep},
};

use super::{process::RATE, time};
use crate::{
    cluster_server::{COUNT, Hang, Hangs, SERIES},
    fleet::{self, Answered},
    load::Plan,
    measure::{ASKED_WRONG, T_ASK, T_ASK_VIEW},
    run::{KUBERNETES, Run},
};

/// The agents, and how many of them, the last ones, hang: of some only the Prometheus.
pub(super) const AGENTS: i64 = 25;
const HANG: i64 = 5;
const ONLY_PROMETHEUS: i64 = 2;
/// How long one agent may take for an answer, in the quick form and in the full one.
pub(super) const PATIENCE: [u64; 2] = [3, 10];
/// Sizes are back within this. A watch that hangs is given up when nobody looks any more.
const RECOVERS: Duration = Duration::from_secs(60);
/// The pause between two questions.
const PAUSE: Duration = Duration::from_millis(200);

/// What an answer is to be if these agents do not answer, for each of whom so much is missing.
fn expected(missing: impl IntoIterator<Item = i64>, each: usize) -> (f64, BTreeSet<i64>) {
    let missing: BTreeSet<i64> = missing.into_iter().collect();
    let answering = usize::try_from(AGENTS).unwrap_or(0) - missing.len();
    #[expect(clippy::cast_precision_loss, reason = "a few hundred")]
    let sum = (answering * each) as f64;
    (sum, missing)
}

fn wrong(what: &str, told: &Answered, (sum, missing): &(f64, BTreeSet<i64>)) -> Option<String> {
    let is_right = (told.sum - sum).abs() < f64::EPSILON && told.missing == *missing;
    (!is_right).then(|| format!("{what}: {told:?} instead of {sum} without {missing:?}"))
}

/// What was asked until now.
#[derive(Clone, Default)]
struct Questions {
    times: Arc<Mutex<Vec<f64>>>,
    wrong: Arc<Mutex<Vec<String>>>,
}

/// Asks each replica again and again, until it is dropped.
fn asking(run: &Run, questions: &Questions, expected: &(f64, BTreeSet<i64>)) -> JoinSet<()> {
    let mut tasks = JoinSet::new();
    for n in 0..run.setup.replicas {
        let door = SocketAddr::new(run.mesh.api(n).ip(), KUBERNETES);
        let (user, questions, expected) = (run.user.clone(), questions.clone(), expected.clone());
        let expression = if n == 0 { "up" } else { "sum(up)" };
        tasks.spawn(async move {
            loop {
                let begun = Instant::now();
                let told = fleet::ask(door, &user, expression).await;
                questions.times.lock().push(begun.elapsed().as_secs_f64() * 1000.0);
                let what = format!("{expression} through {door}");
                let wrong = match told {
                    Ok(told) => wrong(&what, &told, &expected),
                    Err(error) => Some(format!("{what}: {error:#}")),
                };
                questions.wrong.lock().extend(wrong);
                sleep(PAUSE).await;
            }
        });
    }
    tasks
}

/// Waits until each replica knows the Prometheus of every agent.
async fn known(run: &Run, all: &(f64, BTreeSet<i64>)) -> Result<()> {
    for n in 0..run.setup.replicas {
        let door = SocketAddr::new(run.mesh.api(n).ip(), KUBERNETES);
        within(RECOVERS, "all agents answer", async || {
            let told = match fleet::ask(door, &run.user, "up").await {
                Ok(told) => wrong("up", &told, all),
                Err(error) => Some(format!("{error:#}")),
            };
            sleep(PAUSE).await;
            Ok(told.map_or(Ok(()), Err))
        })
        .await?;
    }
    Ok(())
}

/// S53: a fifth of the clusters answers nothing.
pub(super) async fn fifth_hangs(run: &mut Run) -> Result<()> {
    let healthy = AGENTS - HANG;
    let plan = Plan {
        rate: RATE / 4,
        agents: (1, healthy + 1),
        clusters: healthy + 1,
        watches: 3,
        execs: 0,
        streams: 3,
        deadline: Duration::from_secs(10),
    };
    run.load_with(plan);
    // Requests that need no cluster reach the others, too.
    run.load_with(Plan {
        rate: RATE / 20,
        agents: (healthy + 1, AGENTS + 1),
        clusters: 0,
        watches: 0,
        ..plan
    });
    let patience = Duration::from_secs(PATIENCE[usize::from(!run.quick)]);
    let all = expected([], SERIES);
    known(run, &all).await?;
    let everything = Questions::default();
    let asked = asking(run, &everything, &all);
    // Before the fault: whoever asks has asked, so that what is kept of it is there.
    sleep(time(run, 3, 10)).await;
    view_of_all(run, [], Duration::from_secs(20)).await?;
    drop(asked);
    let times = everything.times.lock().clone();
    run.notes.push(format!(
        "Without a fault, {} questions were asked, the slowest took {:.0} ms.",
        times.len(),
        times.iter().copied().fold(0.0, f64::max)
    ));
    let mistakes = everything.wrong.lock().clone();
    ensure!(mistakes.is_empty(), "before the fault: {}", mistakes.join("; "));
    sleep(Duration::from_secs(4)).await;
    let mut before = Vec::new();
    for n in 0..run.setup.replicas {
        before.push(run.size(n).await?);
    }

    let of = |agent: i64| if agent > AGENTS - ONLY_PROMETHEUS { Hang::Prometheus } else { Hang::ApiServer };
    let hangs: Hangs = (healthy + 1..=AGENTS).map(|agent| (agent, of(agent))).collect();
    let fault = run.fault("a fifth of the clusters hangs", Effect::None);
    let fleet = run.outside.fleet.as_ref().context("the run has a fleet")?;
    fleet.hang(&hangs)?;
    // Until the swarm has seen it.
    sleep(Duration::from_millis(300)).await;
    let questions = Questions::default();
    let asked = asking(run, &questions, &expected(hangs.keys().copied(), SERIES));
    let without_server: Vec<i64> =
        hangs.iter().filter(|(_, hang)| **hang == Hang::ApiServer).map(|(agent, _)| *agent).collect();
    for _ in 0..if run.quick { 1 } else { 3 } {
        // Nobody has looked for longer than rows are kept, so that they are read while the clusters hang.
        view_of_all(run, without_server.iter().copied(), Duration::from_secs(35)).await?;
    }
    drop(asked);
    let fleet = run.outside.fleet.as_ref().context("the run has a fleet")?;
    fleet.hang(&Hangs::new())?;
    run.fault_ends(fault);
    let times = questions.times.lock().clone();
    ensure!(!times.is_empty(), "no question was answered");
    run.notes.push(format!("{} questions were asked while clusters hung.", times.len()));
    run.measure(&T_ASK, times.into_iter().map(|time| time - patience.as_secs_f64() * 1000.0));
    let mistakes = questions.wrong.lock().clone();
    #[expect(clippy::cast_precision_loss, reason = "a few")]
    run.measure(&ASKED_WRONG, [mistakes.len() as f64]);
    run.notes.extend(mistakes.into_iter().take(5));
    // Everybody answers again.
    view_of_all(run, [], RECOVERS).await?;
    for (n, before) in before.iter().enumerate() {
        run.recovers(n, before, RECOVERS).await?;
    }
    Ok(())
}

/// Asks every replica for the pods of all agents, of which these do not answer.
async fn view_of_all(run: &mut Run, missing: impl IntoIterator<Item = i64>, most: Duration) -> Result<()> {
    let expected = expected(missing, COUNT);
    let begun = Instant::now();
    let mut asked = JoinSet::new();
    for n in 0..run.setup.replicas {
        let caller = run.mesh.caller(n).await?;
        asked.spawn(async move {
            let told = fleet::view(&caller, "pods").await;
            (n, told, begun.elapsed())
        });
    }
    while let Some(told) = asked.join_next().await {
        let (n, told, took) = told?;
        let told = told.with_context(|| format!("the view of replica {n}"))?;
        if let Some(wrong) = wrong(&format!("the view of replica {n}"), &told, &expected) {
            anyhow::bail!(wrong);
        }
        ensure!(took < most, "the view of replica {n} took {took:?}");
        if !expected.1.is_empty() {
            run.measure(&T_ASK_VIEW, [took.as_secs_f64() * 1000.0]);
        }
    }
    Ok(())
}
