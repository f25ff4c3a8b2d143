//! Replicas are restarted in order, as an orchestrator does: S09.

use std::time::Duration;

use anyhow::Result;
use history::{Effect, History, Kind, Micros, Outcome, SECOND};
use tokio::time::sleep;

use super::process::RATE;
use crate::{
    client::{CLOSE_1001, RESET},
    clock::{micros, millis},
    judge,
    measure::{
        DRAIN_BOUND, EARLY_EXECS, EXEC_LIVED, FAILED_STREAMS, RUDE_EXECS, SUCCESS_ALL, T_DRAIN,
        UNCLEAN_WATCHES,
    },
    run::{Drain, Run},
};

/// How often all replicas are restarted in the full form.
const ROUNDS: u32 = 20;
/// How long after the grace an upgraded connection may take to end: until a frame ends, its client is told,
/// and the client looks.
const ENDS: Duration = Duration::from_secs(4);
/// How much before the end of the grace an upgraded connection does not count as early: clocks of two
/// processes are started one after the other.
const EARLY: Micros = SECOND / 10;

/// S09, and S36 with two builds.
pub(super) async fn rolling(run: &mut Run) -> Result<()> {
    run.load(RATE, 12, 6);
    sleep(Duration::from_secs(3)).await;
    let rounds = run.restarts.unwrap_or(if run.quick { 1 } else { ROUNDS });
    for _ in 0..rounds {
        for n in 0..run.setup.replicas {
            restart(run, n).await?;
        }
    }
    run.notes.push(format!("All {} replicas were restarted {rounds} times.", run.setup.replicas));
    ended(run).await;
    Ok(())
}

/// S09G: one restart with the grace that kas has without configuration.
pub(super) async fn default_grace(run: &mut Run) -> Result<()> {
    run.load(RATE / 4, 6, 6);
    sleep(Duration::from_secs(3)).await;
    restart(run, 0).await?;
    ended(run).await;
    Ok(())
}

/// S58: the replica with the agents leaves under many upgraded connections.
pub(super) async fn owner_drains(run: &mut Run) -> Result<()> {
    run.load(RATE / 2, 6, 24);
    sleep(Duration::from_secs(5)).await;
    restart(run, 0).await?;
    ended(run).await;
    Ok(())
}

async fn restart(run: &mut Run, n: usize) -> Result<()> {
    leave(run, n).await?;
    back(run, n).await
}

/// Shuts a replica down, and measures how long that takes.
pub(super) async fn leave(run: &mut Run, n: usize) -> Result<()> {
    let drain = run.setup.drain;
    // Every load of these scenarios has upgraded connections through every replica.
    let bound = drain.delay + drain.timeout.max(drain.grace + ENDS);
    let took = run.leave_within(n, bound + Duration::from_secs(30)).await?;
    // What a long grace adds is what was asked for, and is held to its own bound below.
    let added = drain.grace.saturating_sub(drain.timeout);
    run.measure(&T_DRAIN, [took.saturating_sub(added).as_secs_f64() * 1000.0]);
    run.measure(&DRAIN_BOUND, [took.saturating_sub(bound).as_secs_f64() * 1000.0]);
    Ok(())
}

pub(super) async fn back(run: &mut Run, n: usize) -> Result<()> {
    run.restart(n).await?;
    // As an orchestrator: the next one only when all is well.
    run.settled(Duration::from_secs(40)).await.map(drop)
}

/// Ends the load, and counts what became of it.
pub(super) async fn ended(run: &mut Run) {
    run.unload().await;
    let drain = run.setup.drain;
    let (success, watches, streams, execs) = {
        let history = run.history.lock();
        let success = judge::Totals::of(&history).success();
        let streams = history.requests.iter().filter(|request| {
            request.kind == Kind::Stream
                && !matches!(request.outcome, Some(Outcome::Ok | Outcome::NotStarted))
        });
        let streams = u32::try_from(streams.count()).unwrap_or(u32::MAX);
        (success, judge::unclean_watches(&history), streams, Execs::of(&history, &drain))
    };
    run.measure(&SUCCESS_ALL, success);
    run.measure(&UNCLEAN_WATCHES, [f64::from(watches)]);
    run.measure(&FAILED_STREAMS, [f64::from(streams)]);
    run.measure(&EARLY_EXECS, [f64::from(execs.early)]);
    run.measure(&RUDE_EXECS, [f64::from(execs.rude)]);
    run.measure(&EXEC_LIVED, execs.lived.iter().copied());
    run.notes.push(format!(
        "{} upgraded connections ended because a replica left: {} by Close 1001, {} by a reset; {} of them through \
         a replica that stayed, with the tunnel of their agent.",
        execs.lived.len(),
        execs.closed,
        execs.reset,
        execs.borrowed
    ));
    run.notes.extend(execs.strange.into_iter().take(5));
}

/// How upgraded connections ended.
#[derive(Debug, Default, PartialEq)]
struct Execs {
    /// How long each lived beyond the grace, in milliseconds.
    lived: Vec<f64>,
    /// Those that ended before, or while no replica left.
    early: u32,
    /// Those with neither Close 1001 nor a reset.
    rude: u32,
    closed: u32,
    reset: u32,
    /// Those through a replica that stayed, whose agent was on the one that left.
    borrowed: u32,
    /// The first strange ones, in words.
    strange: Vec<String>,
}

impl Execs {
    fn of(history: &History, drain: &Drain) -> Self {
        let mut execs = Self::default();
        let leaves: Vec<(Micros, Micros, &Effect)> = history
            .faults
            .iter()
            .filter(|fault| fault.what.starts_with("SIGTERM"))
            .map(|fault| {
                (fault.from, fault.to.unwrap_or(Micros::MAX).saturating_add(2 * SECOND), &fault.effect)
            })
            .collect();
        let ended = history.requests.iter().filter(|request| {
            request.kind == Kind::Upgrade
                && !request.phases.is_empty()
                && request.outcome != Some(Outcome::Cancelled)
        });
        let grace = micros(drain.delay + drain.grace);
        for request in ended {
            let Some(at) = request.ended else { continue };
            let left = leaves.iter().find(|(from, to, _)| (*from..=*to).contains(&at));
            let entry = request.attempts.last().map(|attempt| &attempt.replica);
            let stayed = left.zip(entry).is_some_and(|((.., effect), entry)| match effect {
                Effect::Disabled(who) => !who.contains(entry),
                _ => false,
            });
            // Negative: it ended before.
            let lived = left.map(|(from, ..)| millis(at.saturating_sub(*from)) - millis(grace));
            let early = lived.is_none_or(|lived| lived < -millis(EARLY));
            let (closed, reset) = (request.detail == CLOSE_1001, request.detail == RESET);
            execs.lived.extend(lived);
            execs.early += u32::from(early);
            execs.rude += u32::from(!closed && !reset);
            execs.borrowed += u32::from(stayed);
            execs.closed += u32::from(closed);
            execs.reset += u32::from(reset);
            if early || !closed && !reset {
                execs.strange.push(format!(
                    "The upgraded connection {} for agent {} ended by {:?}, {}.",
                    request.id,
                    request.agent,
                    request.detail,
                    lived.map_or_else(
                        || "and no replica left".to_owned(),
                        |lived| format!("{lived:+.0} ms from the end of the grace")
                    )
                ));
            }
        }
        execs
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use history::{Attempt, Fault, Request};

    use super::*;

    #[test]
    fn connections_that_end_early_or_otherwise_are_counted() {
        let drain = Drain {
            delay: Duration::from_secs(1),
            timeout: Duration::from_secs(10),
            grace: Duration::from_secs(10),
        };
        let mut history = History::default();
        let (from, to) = (100 * SECOND, Some(112 * SECOND));
        let what = "SIGTERM replica 1".to_owned();
        history.faults =
            vec![Fault { from, to, what, effect: Effect::Disabled(BTreeSet::from(["a".to_owned()])) }];
        let exec = |id, ended: Micros, detail: &str, outcome| {
            let mut request = Request::new(id, 1, Kind::Upgrade, 0).ended(ended, outcome);
            request.phases.push(("upgraded".to_owned(), 1));
            request.detail = detail.to_owned();
            request
        };
        history.requests = vec![
            exec(1, 111 * SECOND + 50_000, CLOSE_1001, Outcome::Unknown),
            exec(2, 112 * SECOND, RESET, Outcome::Unknown),
            exec(3, 130 * SECOND, "", Outcome::Cancelled),
        ];
        let good = Execs::of(&history, &drain);
        assert_eq!((good.early, good.rude, good.closed, good.reset), (0, 0, 1, 1));
        assert_eq!(good.lived, [50.0, 1000.0]);
        history.requests.push(exec(4, 105 * SECOND, CLOSE_1001, Outcome::Unknown));
        history.requests.push(exec(5, 50 * SECOND, RESET, Outcome::Unknown));
        history.requests.push(exec(6, 112 * SECOND, "the end", Outcome::Unknown));
        let bad = Execs::of(&history, &drain);
        assert_eq!((bad.early, bad.rude, bad.strange.len()), (2, 1, 3), "{bad:?}");
        // The replica that it went through stayed, and lost the tunnel.
        history.requests.truncate(3);
        history.requests.push(exec(7, 112 * SECOND, "the end", Outcome::Unknown));
        for (replica, borrowed) in [("b", 1), ("a", 0)] {
            let (begun, ended, outcome) = (0, 112 * SECOND, Outcome::Unknown);
            let replica = replica.to_owned();
            history.requests[3].attempts = vec![Attempt { replica, begun, ended, outcome }];
            let execs = Execs::of(&history, &drain);
            assert_eq!((execs.borrowed, execs.rude), (borrowed, 1), "{execs:?}");
        }
    }
}
