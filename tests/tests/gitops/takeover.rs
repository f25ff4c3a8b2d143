//! Planners that die, and planners that do not know of each other.

use anyhow::{Result, ensure};
use testkit::{
    agentk::Agentk,
    mesh::{Mesh, Options},
};
use tokio::time::{Duration, sleep};

use crate::setup::{Setup, config_map, until};

const ENTRY: &str = "    default_namespace: default\n";
/// Objects of a commit that takes seconds to apply.
const MANY: usize = 250;

fn many(value: &str, count: usize) -> String {
    let all: Vec<String> = (0..count).map(|n| config_map(&format!("many-{n:03}"), value)).collect();
    all.join("\n---\n")
}

#[tokio::test]
async fn a_replica_that_is_killed_in_the_middle_of_a_sync_is_replaced() -> Result<()> {
    let it = Setup::start(2, ENTRY, "").await?;
    let first = it.repository.push(&[("old.json", config_map("old", "1"))]).await?;
    it.synced(0, &first).await?;
    let home = it.home(0).await?;
    let other = 1 - home;
    let seen = it.sync(other).await?;
    ensure!(!seen.projects.is_empty(), "the other replica asks the home: {seen:?}");

    // Each value of the objects is applied by another planner, killed at another point.
    let second = it.repository.push(&[("many.yaml", many("2", MANY))]).await?;
    it.until(home, "applying", |it| it.wanted_commit == second && it.synced_objects.len() > 20).await?;
    it.mesh.kill(home).await?;
    let synced = it.synced(other, &second).await?;
    ensure!(synced.objects == MANY as u64 && synced.current == MANY as u64, "{} objects", synced.objects);
    assert_eq!(it.value("many-249").await?.as_deref(), Some("2"));
    assert_eq!(it.value("old").await?, None, "the new planner prunes what the old one had not");
    let deletions = it.deletions()?;
    ensure!(deletions.violations.is_empty() && deletions.deleted >= 1, "{deletions:?}");
    Ok(())
}

#[tokio::test]
async fn two_planners_at_once_delete_nothing_that_is_wanted() -> Result<()> {
    let it = Setup::start(1, ENTRY, "").await?;
    // Another kas, which knows nothing of the first one, with the same agent, repository and cluster.
    let config = it.repository.kas_config();
    let stranger = Mesh::start_with(Options { replicas: 1, agents: 1, config, ..Options::default() }).await?;
    let _agentk: Agentk = Setup::agentk(&stranger, &it.kubernetes, 1).await?;

    let mut last = String::new();
    for round in 0..6 {
        // Half of the objects come and go with each commit.
        let count = if round % 2 == 0 { 60 } else { 30 };
        last = it.repository.push(&[("many.yaml", many(&round.to_string(), count))]).await?;
        sleep(Duration::from_millis(700)).await;
    }
    let done = |project: &proto::kas::api::v1::ProjectSync| {
        project.wanted_commit == last && project.phase == "synced"
    };
    it.until(0, "synced by one", done).await?;
    until(&stranger, 0, "synced by the other", done).await?;
    let deletions = it.deletions()?;
    ensure!(deletions.violations.is_empty(), "{deletions:#?}");
    for n in 0..30 {
        assert_eq!(it.value(&format!("many-{n:03}")).await?.as_deref(), Some("5"), "{n}");
    }
    assert_eq!(it.value("many-045").await?, None);
    Ok(())
}
