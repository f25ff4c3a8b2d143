//! What a sync does and what it leaves alone.

use anyhow::{Result, ensure};
use proto::kas::api::v1::{
    control_sync_request::Action,
    diff_request::{File, Files, Of},
};
use serde_json::Value;
use testkit::kubernetes::deletions::Deletions;

use crate::setup::{Setup, config_map};

const NO_BOUNDS: &str = "gitops:\n  check: 1s\n";

#[tokio::test]
async fn a_commit_becomes_an_object_and_stays_what_it_says() -> Result<()> {
    let it = Setup::start(1, "    default_namespace: default\n", NO_BOUNDS).await?;

    // A commit.
    let first =
        it.repository.push(&[("a.json", config_map("a", "1")), ("b.json", config_map("b", "1"))]).await?;
    let synced = it.synced(0, &first).await?;
    ensure!(synced.objects == 2 && synced.current == 2, "{synced:?}");
    assert_eq!(it.value("a").await?.as_deref(), Some("1"));

    // An edit by hand is put back.
    it.kubernetes
        .kubectl(&[
            "patch",
            "configmap",
            "a",
            "--namespace",
            "default",
            "--type=merge",
            "-p",
            r#"{"data":{"v":"9"}}"#,
        ])
        .await?;
    it.until(0, "corrected", |it| it.drift > 0 && it.phase == "synced").await?;
    assert_eq!(it.value("a").await?.as_deref(), Some("1"));

    // A bad manifest changes nothing, although a file is gone, and says where it is wrong.
    let bad = [("a.json", config_map("a", "2")), ("bad.yaml", "kind: [x".to_owned())];
    let second = it.repository.push(&bad).await?;
    let failed = it.until(0, "failed", |it| it.phase == "failed" && it.wanted_commit == second).await?;
    ensure!(failed.message.contains("bad.yaml:1"), "{failed:?}");
    assert_eq!(it.value("a").await?.as_deref(), Some("1"));
    assert_eq!(it.value("b").await?.as_deref(), Some("1"));

    // What is removed is pruned, and nothing else.
    let third = it.repository.push(&[("a.json", config_map("a", "3"))]).await?;
    it.synced(0, &third).await?;
    assert_eq!((it.value("a").await?.as_deref(), it.value("b").await?), (Some("3"), None));

    // A folder without manifests prunes nothing.
    let fourth = it.repository.push(&[("README.md", "x".to_owned())]).await?;
    let empty = it.until(0, "refused", |it| it.phase == "failed" && it.wanted_commit == fourth).await?;
    ensure!(empty.message.contains("no objects found"), "{empty:?}");
    assert_eq!(it.value("a").await?.as_deref(), Some("3"));

    assert_eq!(it.deletions()?, Deletions { deleted: 1, violations: Vec::new() });

    // People see it in the cluster, too.
    let events = it.kubernetes.kubectl(&["get", "events", "--namespace", "default", "-o", "json"]).await?;
    let events: Value = serde_json::from_str(&events)?;
    let items = events["items"].as_array().map(Vec::as_slice).unwrap_or_default();
    let reasons: Vec<&str> = items.iter().filter_map(|event| event["reason"].as_str()).collect();
    ensure!(reasons.contains(&"Synced") && reasons.contains(&"Pruned"), "{reasons:?}");
    Ok(())
}

#[tokio::test]
async fn a_diff_shows_what_a_sync_would_change_and_writes_nothing() -> Result<()> {
    let it = Setup::start(1, "    default_namespace: default\n", NO_BOUNDS).await?;
    let first =
        it.repository.push(&[("a.json", config_map("a", "1")), ("b.json", config_map("b", "1"))]).await?;
    it.synced(0, &first).await?;
    let file = |path: &str, content: String| File { path: path.to_owned(), content: content.into() };
    let files = vec![file("a.json", config_map("a", "2")), file("c.json", config_map("c", "1"))];
    let diff = it.diff(0, Of::Files(Files { files })).await?;
    let mut actions: Vec<(&str, &str)> =
        diff.changes.iter().map(|change| (change.name.as_str(), change.action.as_str())).collect();
    actions.sort_unstable();
    assert_eq!(actions, [("a", "update"), ("b", "prune"), ("c", "create")]);
    let same = it.diff(0, Of::Ref("main".to_owned())).await?;
    ensure!(same.changes.is_empty() && same.unchanged == 2, "{same:?}");
    assert_eq!(it.value("a").await?.as_deref(), Some("1"));
    assert_eq!(it.value("c").await?, None);
    Ok(())
}

#[tokio::test]
async fn a_project_is_destroyed_only_when_no_configuration_names_it() -> Result<()> {
    let it = Setup::start(1, "    default_namespace: default\n", NO_BOUNDS).await?;
    let first = it.repository.push(&[("a.json", config_map("a", "1"))]).await?;
    it.synced(0, &first).await?;
    let refused = it.control(0, Action::Destroy).await;
    ensure!(refused.as_ref().is_err_and(|error| format!("{error:#}").contains("names")), "{refused:?}");
    it.repository.configure("")?;
    let deadline = tokio::time::Instant::now() + testkit::process::SOON;
    loop {
        match it.control(0, Action::Destroy).await {
            Ok(_) => break,
            Err(error) => ensure!(tokio::time::Instant::now() < deadline, "{error:#}"),
        }
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    assert_eq!(it.value("a").await?, None);
    let left = it.kubernetes.kubectl(&["get", "configmaps", "--namespace", "default", "-o", "name"]).await?;
    ensure!(!left.contains("inventory"), "{left}");
    Ok(())
}
