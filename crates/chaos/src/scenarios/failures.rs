//! Requests that were begun in a part of a run.

use anyhow::{Result, ensure};
use history::{Kind, Micros, Outcome};

use crate::{measure::FAILED, run::Run};

/// How requests that were begun in a time ended: how many succeeded, and how many did not.
fn ended(run: &Run, from: Micros, to: Micros) -> (u32, u32) {
    let history = run.history.lock();
    let mut counts = (0, 0);
    for request in &history.requests {
        let short = matches!(request.kind, Kind::Unary | Kind::Http) && request.retry_of.is_none();
        // Outsiders must fail.
        if short && request.invalid_since.is_none() && (from..=to).contains(&request.begun) {
            match request.outcome {
                Some(Outcome::Ok) => counts.0 += 1,
                _ => counts.1 += 1,
            }
        }
    }
    counts
}

/// Measures failures of the load in a time in which there may be none. The load must have ended.
pub(super) fn none_fails(run: &mut Run, what: &str, (from, to): (Micros, Micros)) -> Result<()> {
    let (ok, failed) = ended(run, from, to);
    ensure!(ok > 0, "{what}: no request succeeded, and {failed} failed");
    run.notes.push(format!("{what}: {ok} requests succeeded, {failed} failed."));
    run.measure(&FAILED, [f64::from(failed)]);
    Ok(())
}
