//! The wall clock of one replica is stepped.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use history::Effect;
use proto::kas::api::v1::{ListReplicasRequest, ListReplicasResponse};
use testkit::{
    caller::{Caller, now},
    kas::within,
    mesh::LIST_REPLICAS,
};
use tokio::time::{Instant, sleep};

use super::{failures::none_fails, process::RATE, time};
use crate::{
    clock,
    measure::{FALSE_DEATHS, T_HEAL},
    run::Run,
};

/// The replica whose clock is stepped.
pub(super) const STEPPED: usize = 1;
const HOUR: i64 = 3600;
/// How long replicas may take for each other's tables once the clock is right.
const RIGHT: Duration = Duration::from_secs(60);

/// How replicas take a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Taken {
    Accepted,
    Refused,
}

async fn taken(run: &Run, n: usize, token: String) -> Result<Taken> {
    let caller = Caller::connect(run.mesh.api(n), Some(token)).await?;
    let answer: Result<ListReplicasResponse> = caller.unary(LIST_REPLICAS, &ListReplicasRequest {}).await;
    match answer {
        Ok(_) => Ok(Taken::Accepted),
        Err(error) if format!("{error:#}").contains("JWT validation failed") => Ok(Taken::Refused),
        Err(error) => Err(error).context("neither accepted nor refused"),
    }
}

/// Shows that the program saw its clock: by tokens that are over in ten minutes, and that have been valid for
/// some seconds.
async fn sees(run: &Run, hours: i64) -> Result<()> {
    let expect = |n: usize| match (n == STEPPED, hours.signum()) {
        (true, 1) => [Taken::Refused, Taken::Accepted],
        (true, -1) => [Taken::Accepted, Taken::Refused],
        _ => [Taken::Accepted, Taken::Accepted],
    };
    for n in run.mesh.running() {
        within(Duration::from_secs(5), &format!("replica {n} sees its clock ({hours} h)"), async || {
            let over_soon = run.client.token_with(&[("nbf", now() - 2 * HOUR), ("exp", now() + 600)]);
            let new = run.client.token_with(&[("nbf", now() - 5), ("exp", now() + 3 * HOUR)]);
            let seen = [taken(run, n, over_soon).await?, taken(run, n, new).await?];
            Ok(if seen == expect(n) { Ok(()) } else { Err(seen) })
        })
        .await?;
    }
    Ok(())
}

fn step(run: &Run, seconds: i64) -> Result<()> {
    run.wall.as_ref().context("a replica has a clock of its own")?.set(seconds)
}

/// Waits until each other replica and the stepped one say that their clocks differ: they have refused each
/// other's tables. Then sets the clock right.
async fn right_again(run: &mut Run) -> Result<()> {
    let fault = run.fault(format!("replica {STEPPED} has begun with a wrong clock"), Effect::All);
    for n in run.mesh.running() {
        within(Duration::from_secs(20), &format!("replica {n} says that clocks differ"), async || {
            // Valid by every clock.
            let token = run.client.token_with(&[("nbf", now() - 2 * HOUR), ("exp", now() + 3 * HOUR)]);
            let caller = Caller::connect(run.mesh.api(n), Some(token)).await?;
            let list: ListReplicasResponse = caller.unary(LIST_REPLICAS, &ListReplicasRequest {}).await?;
            let told = list.alarms.iter().any(|alarm| alarm.contains("check the time of both hosts"));
            Ok(if told { Ok(()) } else { Err(list.alarms) })
        })
        .await?;
    }
    step(run, 0)?;
    sees(run, 0).await?;
    run.fault_ends(fault);
    // Tokens that were made before are used for up to 20 s.
    let took = run.settled(RIGHT).await?;
    run.notes.push(format!(
        "{:.1} s after the clock of a replica that had begun with a wrong one was right, all views were equal.",
        took.as_secs_f64()
    ));
    Ok(())
}

pub(super) async fn stepped(run: &mut Run) -> Result<()> {
    let all: Vec<usize> = (0..run.setup.replicas).collect();
    run.load(RATE / 2, 4, 2);
    sleep(Duration::from_secs(3)).await;
    sees(run, 0).await?;
    let from = clock::now();
    let mut phases = Vec::new();
    for hours in [1, -1] {
        let fault =
            run.fault(format!("the wall clock of replica {STEPPED} is {hours:+} h off"), Effect::None);
        step(run, hours * HOUR)?;
        sees(run, hours).await?;
        let begun = clock::now();
        // Credentials between replicas are renewed every 20 s.
        sleep(time(run, 30, 90)).await;
        sees(run, hours).await?;
        phases.push((format!("{hours:+} h"), (begun, clock::now())));
        run.fault_ends(fault);
    }
    let fault =
        run.fault(format!("the wall clock of replica {STEPPED} jumps by 2 h each 100 ms"), Effect::None);
    let (begun, end) = (clock::now(), Instant::now() + time(run, 5, 30));
    for number in 0_i64.. {
        if Instant::now() >= end {
            break;
        }
        step(run, if number % 2 == 0 { HOUR } else { -HOUR })?;
        sleep(Duration::from_millis(100)).await;
    }
    step(run, 0)?;
    sees(run, 0).await?;
    phases.push(("jumps".to_owned(), (begun, clock::now())));
    run.fault_ends(fault);
    let deaths = run.false_deaths(from, clock::now(), &all);
    run.measure(&FALSE_DEATHS, [f64::from(deaths)]);
    run.unload().await;
    for (what, span) in phases {
        none_fails(run, &what, span)?;
    }
    // The number of a process comes from the clock: one of the past follows one of the future.
    run.load(RATE / 4, 0, 0);
    for hours in [1, 0, -1, 0] {
        step(run, hours * HOUR)?;
        run.kill(STEPPED).await?;
        run.restart(STEPPED).await?;
        sees(run, hours).await?;
        if hours == 0 {
            run.heals(&T_HEAL).await?;
        } else {
            right_again(run).await?;
        }
    }
    ensure!(run.mesh.running().len() == all.len(), "a replica has ended");
    Ok(())
}
