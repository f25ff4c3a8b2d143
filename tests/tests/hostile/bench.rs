//! What a thousand bad connections cost the good requests: measured, not asserted.

use std::time::Duration;

use anyhow::Result;
use tokio::time::sleep;

use crate::{
    http2,
    stage::{Door, Kind, Stage},
};

/// Bad connections of each attack.
const CONNECTIONS: usize = 1_000;
/// How long good requests are measured before each attack.
const QUIET: Duration = Duration::from_secs(2);
/// How long each attack lasts at most.
const ATTACKED: Duration = Duration::from_secs(8);

/// Prints a row of a table for each attack at each of `doors`.
pub(crate) async fn table(kind: Kind, doors: &[Door]) -> Result<()> {
    println!("| attack | door | took | good requests | p99 before, ms | p99 during, ms | ratio | MiB held |");
    println!("| --- | --- | --- | --- | --- | --- | --- | --- |");
    let stage = Stage::start(kind).await?;
    for (name, attack) in http2::measured() {
        for door in doors.iter().copied() {
            stage.times();
            // What is measured is what happens meanwhile.
            sleep(QUIET).await;
            let before = stage.times();
            let begun = tokio::time::Instant::now();
            http2::crowd(&stage, door, attack, CONNECTIONS, ATTACKED).await;
            let took = begun.elapsed();
            let during = stage.times();
            let memory = stage.kas.process.usage()?.resident_kib / 1024;
            let ratio = during.p99.as_secs_f64() / before.p99.as_secs_f64();
            println!(
                "| {name} | {door:?} | {:.1} s | {} | {:.1} | {:.1} | {ratio:.2} | {memory} |",
                took.as_secs_f64(),
                during.requests,
                before.p99.as_secs_f64() * 1e3,
                during.p99.as_secs_f64() * 1e3,
            );
            stage.settle(name).await?;
        }
    }
    Ok(())
}
