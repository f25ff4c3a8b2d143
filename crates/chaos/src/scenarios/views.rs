//! Views of a real cluster, while replicas are killed and watches break: S49, S50.

use std::{collections::BTreeMap, net::SocketAddr, time::Duration};

use anyhow::{Result, ensure};
use history::{Effect, Micros};
use rand::RngExt as _;
use testkit::kas::within;
use tokio::time::{Instant, sleep};

use super::process::RATE;
use crate::{
    clock::{self, millis},
    faults::{cluster::Churn, wire::Toxics},
    measure::{T_LIVE, T_VIEW},
    run::Run,
    viewer::Viewer,
};

/// Everything that is waited for takes at most this long. Feeds that failed are read again after at most 30
/// s.
const LONG: Duration = Duration::from_secs(60);
/// The time between two looks.
const LOOK: Duration = Duration::from_millis(50);
/// Rows that cannot be fresh may be called live for so long.
const TOLD: Duration = Duration::from_secs(10);
/// Viewers of each view.
const EACH: usize = 3;
const VIEWS: [&str; 2] = ["pods", "workloads"];
const LIVE: &str = "live";

/// Connects the cluster, and opens viewers of each view that begin at this replica.
async fn begin(run: &mut Run, first: impl Fn(usize) -> usize) -> Result<Vec<Viewer>> {
    run.outside.cluster_mut()?.connect(&run.mesh).await?;
    let agent = run.outside.cluster()?.agent();
    let doors: Vec<SocketAddr> = (0..run.setup.replicas).map(|n| run.mesh.api(n)).collect();
    let viewer = |number: usize| {
        let view = VIEWS[number % VIEWS.len()];
        Viewer::start(number, view, agent, &run.client, doors.clone(), first(number))
    };
    let viewers: Vec<Viewer> = (0..VIEWS.len() * EACH).map(viewer).collect();
    equal(run, &viewers).await?;
    record(run, &viewers).await?;
    run.load(RATE / 4, 0, 0);
    Ok(viewers)
}

fn churn(run: &mut Run) -> Result<Churn> {
    let seed = run.rng.random();
    Ok(run.outside.cluster()?.churn(seed))
}

/// The rows of all views, as the API server prints them.
async fn truths(run: &Run) -> Result<BTreeMap<&'static str, BTreeMap<String, String>>> {
    let mut truths = BTreeMap::new();
    for view in VIEWS {
        truths.insert(view, run.outside.cluster()?.truth(view).await?);
    }
    Ok(truths)
}

/// Waits until every viewer has the rows of the API server, in which nothing changes meanwhile. Returns when
/// that was seen.
async fn equal(run: &Run, viewers: &[Viewer]) -> Result<Micros> {
    let truths = truths(run).await?;
    within(LONG, "all viewers have the rows of the API server", async || {
        let at = clock::now();
        let other = viewers.iter().map(|viewer| viewer.rows(truths.get(viewer.view).cloned()));
        let other = other.filter(|rows| rows.state != LIVE || Some(&rows.seen) != rows.truth.as_ref());
        let other: Vec<String> =
            other.map(|rows| format!("{}: {} rows, {}", rows.viewer, rows.seen.len(), rows.state)).collect();
        if !other.is_empty() {
            sleep(LOOK).await;
        }
        Ok(if other.is_empty() { Ok(at) } else { Err(other) })
    })
    .await
}

/// Records what every viewer has beside the rows of the API server, in which nothing changes.
async fn record(run: &Run, viewers: &[Viewer]) -> Result<()> {
    let truths = truths(run).await?;
    let rows = viewers.iter().map(|viewer| viewer.rows(truths.get(viewer.view).cloned()));
    run.history.lock().rows.extend(rows);
    Ok(())
}

/// Ends all changes, waits until all rows are right, and records them, right or not.
async fn compare(run: &mut Run, viewers: &[Viewer], churn: Churn) -> Result<()> {
    churn.stop().await?;
    let waited = equal(run, viewers).await;
    record(run, viewers).await?;
    waited?;
    run.say("all rows are those of the API server");
    Ok(())
}

/// S49: the replica through which all look is killed, again and again.
pub(super) async fn edge_killed(run: &mut Run) -> Result<()> {
    let viewers = begin(run, |_| 0).await?;
    for _ in 0..if run.quick { 3 } else { 15 } {
        let changing = churn(run)?;
        let pause = Duration::from_millis(run.rng.random_range(300..2_000));
        sleep(pause).await;
        let looks = |n: usize| viewers.iter().filter(|it| it.screen.lock().replica == Some(n)).count();
        let edge = run.mesh.running().into_iter().max_by_key(|n| looks(*n)).unwrap_or(0);
        ensure!(looks(edge) > 0, "nobody looks through any replica");
        let struck: Vec<&Viewer> =
            viewers.iter().filter(|viewer| viewer.screen.lock().replica == Some(edge)).collect();
        let at = run.kill(edge).await?;
        let times = within(LONG, "rows come through another replica", async || {
            let first = |viewer: &&Viewer| {
                let screen = viewer.screen.lock();
                screen.first_row.filter(|first| *first > at && screen.replica.is_some_and(|n| n != edge))
            };
            let times: Option<Vec<Micros>> = struck.iter().map(first).collect();
            if times.is_none() {
                sleep(LOOK / 10).await;
            }
            Ok(times.ok_or("not at all viewers"))
        })
        .await?;
        run.measure(&T_VIEW, times.into_iter().map(|first| millis(first - at)));
        compare(run, &viewers, changing).await?;
        run.restart(edge).await?;
        run.settled(LONG).await?;
    }
    told(run, &viewers)
}

fn told(run: &mut Run, viewers: &[Viewer]) -> Result<()> {
    let changes = run.outside.cluster()?.changes();
    let sum = |of: fn(&crate::viewer::Screen) -> u64| -> u64 {
        viewers.iter().map(|viewer| of(&viewer.screen.lock())).sum()
    };
    let (received, resets) = (sum(|screen| screen.received), sum(|screen| screen.resets));
    ensure!(changes > 0 && received > 0, "nothing has changed: {changes} changes, {received} rows");
    run.notes.push(format!(
        "{changes} objects were created, changed or deleted; {} viewers got {received} rows and {resets} resets.",
        viewers.len()
    ));
    Ok(())
}

/// Begins a fault in which no row can be fresh, and waits until no viewer is told that rows are live.
/// Records that, or that some still are.
async fn not_live(run: &Run, viewers: &[Viewer]) -> Result<()> {
    let until = Instant::now() + TOLD;
    while Instant::now() < until && viewers.iter().any(|viewer| viewer.screen.lock().state == LIVE) {
        sleep(LOOK).await;
    }
    let rows: Vec<_> = viewers.iter().map(|viewer| viewer.rows(None)).collect();
    // Those of before are still shown.
    ensure!(rows.iter().all(|rows| !rows.seen.is_empty()), "rows are gone");
    run.say(&format!("rows are called {}", rows.first().map_or("", |rows| &rows.state)));
    run.history.lock().rows.extend(rows);
    Ok(())
}

/// How often resources were listed, by all replicas.
async fn lists(run: &Run) -> Result<f64> {
    let mut lists = 0.0;
    for n in run.mesh.running() {
        lists += run.mesh.kas(n).metric("kas_view_lists_total").await?;
    }
    Ok(lists)
}

/// What ends watches.
#[derive(Clone, Copy, Debug)]
enum Break {
    /// The API server is restarted.
    Restart,
    /// agentk is cut off from it, while objects change and the history of these changes is forgotten.
    Forgotten,
    /// agentk is cut off from it, while objects change.
    Cut,
    /// agentk is cut off from all replicas, while objects change.
    Away,
    /// Everything between agentk and the API server is slow, and in pieces.
    Slow,
    /// Connections between agentk and the API server are reset.
    Resets,
}

/// S50: watches end, are slow, and are cut.
pub(super) async fn watch_broken(run: &mut Run) -> Result<()> {
    let viewers = begin(run, |number| number % 3).await?;
    let quick = [Break::Forgotten, Break::Slow, Break::Restart, Break::Cut];
    let full = [&quick[..], &[Break::Away, Break::Resets]].concat();
    for _ in 0..if run.quick { 1 } else { 4 } {
        for what in if run.quick { &quick[..] } else { &full } {
            broken(run, &viewers, *what).await?;
        }
    }
    told(run, &viewers)
}

async fn broken(run: &mut Run, viewers: &[Viewer], what: Break) -> Result<()> {
    let fault = run.fault(format!("{what:?}"), Effect::None);
    let before = lists(run).await?;
    let cut = Toxics { cut: true, ..Toxics::default() };
    let changing = churn(run)?;
    match what {
        Break::Restart => {
            run.outside.cluster()?.stop_api_server().await?;
            not_live(run, viewers).await?;
            run.outside.cluster()?.start_api_server().await?;
        }
        Break::Forgotten | Break::Cut | Break::Away => {
            let cluster = run.outside.cluster()?;
            if matches!(what, Break::Away) {
                cluster.set_doors(cut);
            } else {
                cluster.set_wire(cut);
            }
            not_live(run, viewers).await?;
            sleep(super::time(run, 1, 3)).await;
            let cluster = run.outside.cluster()?;
            if matches!(what, Break::Forgotten) {
                cluster.stop_api_server().await?;
                cluster.forget_history().await?;
                cluster.start_api_server().await?;
            }
            cluster.set_doors(Toxics::default());
            cluster.set_wire(Toxics::default());
        }
        Break::Slow => {
            run.outside.cluster()?.set_wire(Toxics {
                latency: Duration::from_millis(300),
                rate: Some(64 * 1024),
                slice: Some(200),
                ..Toxics::default()
            });
            sleep(super::time(run, 3, 10)).await;
        }
        Break::Resets => {
            run.outside.cluster()?.set_wire(Toxics { resets: 50, ..Toxics::default() });
            sleep(super::time(run, 3, 10)).await;
            run.outside.cluster()?.set_wire(Toxics::default());
        }
    }
    let healed = clock::now();
    let live = within(LONG, "all rows are live again", async || {
        let states: Vec<String> = viewers.iter().map(|it| it.screen.lock().state.clone()).collect();
        let at = clock::now();
        let is_live = states.iter().all(|state| state == LIVE);
        if !is_live {
            sleep(LOOK).await;
        }
        Ok(if is_live { Ok(at) } else { Err(states) })
    })
    .await?;
    if !matches!(what, Break::Slow | Break::Resets) {
        run.measure(&T_LIVE, [millis(live.saturating_sub(healed))]);
    }
    compare(run, viewers, changing).await?;
    run.outside.cluster()?.set_wire(Toxics::default());
    run.fault_ends(fault);
    if matches!(what, Break::Forgotten) {
        let listed = lists(run).await? - before;
        ensure!(listed > 0.0, "nothing was listed again, so no watch has ended with 410");
    }
    Ok(())
}
