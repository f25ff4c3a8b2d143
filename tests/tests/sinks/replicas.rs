//! Two replicas: what the home of an agent has not told when it dies, the next one tells.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result, ensure};
use serde_json::json;
use testkit::kas::eventually;

use crate::setup::{Setup, name};

const EVENTS: usize = 25;

#[tokio::test]
async fn events_that_a_killed_home_had_not_told_are_told_by_the_next_one() -> Result<()> {
    let it = Setup::start(2, json!({}), |receiver| {
        json!([{ "name": "hook", "agents": "all", "news": ["events"],
                 "webhook": { "url": format!("http://{receiver}") } }])
    })
    .await?;
    let watches = "kas_sink_watches";
    let home = eventually("one replica watches", async || {
        let (first, second) = (it.metric(0, watches).await?, it.metric(1, watches).await?);
        Ok(match (first, second) {
            (1.0, 0.0) => Ok(0),
            (0.0, 1.0) => Ok(1),
            other => Err(other),
        })
    })
    .await?;
    it.happen([0]).await?;
    let first = it.receiver.got("an event", |event| name(event) == "e-0").await?;
    // The home knows these, and nobody else.
    it.receiver.answer(503);
    it.happen(1..EVENTS).await?;
    it.metric_is_at_least(home, "kas_sink_waiting{sink=\"hook\"}", 15.0).await?;
    let told = it.receiver.of("kas.kubernetes.event").iter().map(name).collect::<BTreeSet<_>>();
    ensure!(!told.contains("e-1"), "{told:?}");
    it.mesh.kill(home).await?;
    it.receiver.answer(204);
    // Also while nobody is its home.
    it.happen([EVENTS]).await?;
    let all: BTreeSet<String> = (0..=EVENTS).map(|n| format!("e-{n}")).collect();
    eventually("all are told", async || {
        let told: BTreeSet<String> = it.receiver.of("kas.kubernetes.event").iter().map(name).collect();
        let missing: Vec<_> = all.difference(&told).cloned().collect();
        Ok(if missing.is_empty() { Ok(()) } else { Err(missing) })
    })
    .await?;
    // What was told before comes again, with the same id.
    let again = eventually("the first one comes again", async || {
        let found: Vec<_> =
            it.receiver.of("kas.kubernetes.event").into_iter().filter(|event| name(event) == "e-0").collect();
        Ok(if found.len() >= 2 { Ok(found) } else { Err(found.len()) })
    })
    .await?;
    ensure!(again.iter().all(|event| event["id"] == first["id"]), "{again:?}");
    let id = first["id"].as_str().context("an id")?;
    ensure!(id.len() == 32, "{id}");
    Ok(())
}
