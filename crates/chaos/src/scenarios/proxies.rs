//! Proxies that ask which replica holds an agent are told wrong owners: S54.

use std::time::Duration;

use anyhow::{Result, ensure};
use history::Effect;
use tokio::time::sleep;

use super::{process::RATE, time};
use crate::{faults::teller::Tells, measure::T_HEAL, run::Run};

/// The replica that is named although it does not hold the agents, and then although it does not run.
const NAMED: usize = 1;

/// Lets proxies be told this for a time.
async fn told(run: &mut Run, tells: Tells, what: &str, lasting: Duration) -> Result<()> {
    let fault = run.fault(what, Effect::None);
    let before = run.outside.told()?.answers();
    run.outside.told()?.tells(tells);
    sleep(lasting).await;
    let after = run.outside.told()?.answers();
    run.fault_ends(fault);
    let [answers, wrong] = [0, 1].map(|n| after[n] - before[n]);
    run.notes.push(format!("{what}: {answers} answers, {wrong} of them wrong."));
    // The first ones may still be those of before.
    ensure!(tells == Tells::Silence || answers > 0, "{what}: no proxy has asked");
    let may_be_right = matches!(tells, Tells::Truth | Tells::Silence | Tells::Stale | Tells::Always(_));
    ensure!(may_be_right || wrong > 0, "{what}: nothing wrong was told");
    Ok(())
}

/// S54: whatever proxies are told, no request fails, also while replicas leave and come back.
pub(super) async fn wrong_owner(run: &mut Run) -> Result<()> {
    let lasting = time(run, 2, 15);
    run.load(RATE / 4, 4, 0);
    told(run, Tells::Truth, "the owner", lasting).await?;
    told(run, Tells::Another, "another replica than the owner", lasting).await?;
    told(run, Tells::Always(NAMED), "always the same replica", lasting).await?;
    told(run, Tells::Nobody, "an address where nobody is", lasting).await?;
    told(run, Tells::Nonsense, "no address", lasting).await?;
    told(run, Tells::Error, "an error", lasting).await?;
    // The owners of now, from now on: agents move.
    run.outside.told()?.tells(Tells::Stale);
    for n in 0..run.setup.replicas {
        run.leave(n).await?;
        // Agents are elsewhere, and what is told is what was true before.
        let tells = if n == NAMED { Tells::Always(NAMED) } else { Tells::Stale };
        told(run, tells, &format!("who held an agent before replica {n} left"), lasting).await?;
        run.restart(n).await?;
        run.heals(&T_HEAL).await?;
    }
    // The last one: nginx does not ask again for a while what did not answer.
    told(run, Tells::Silence, "nothing", lasting).await?;
    let [answers, wrong] = run.outside.told()?.answers();
    ensure!(wrong * 4 > answers, "only {wrong} of {answers} answers were wrong");
    Ok(())
}
