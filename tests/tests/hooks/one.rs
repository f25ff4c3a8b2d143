//! One replica: a hook arrives, once, and what cannot be delivered is a dead letter.

use anyhow::{Context as _, Result, ensure};

use testkit::receiver::TALKATIVE;

use crate::setup::{AGENT, KEY, Setup};

#[tokio::test]
async fn a_hook_reaches_a_service_or_an_object() -> Result<()> {
    let it = Setup::start(1).await?;
    let told = it.push(0, "push", "d-1", "{\"ref\":1}").await?;
    let id = told.id()?;
    assert_eq!(told.copies(), Some("1"), "there is one replica");
    it.receiver.got(1).await?;
    let received = it.receiver.received().remove(0);
    ensure!(received.head.line.starts_with("POST /hook/4f2a"), "{received:?}");
    assert_eq!(received.body, "{\"ref\":1}");
    for (name, value) in [
        ("content-type", "application/json"),
        ("x-github-event", "push"),
        ("x-github-delivery", "d-1"),
        ("kas-hook-id", &*id),
        ("kas-hook-attempt", "1"),
    ] {
        assert_eq!(received.head.get(name), Some(value), "{name}");
    }
    let user_agent = received.head.get("user-agent").unwrap_or_default();
    ensure!(user_agent.starts_with("GitHub-Hookshot/test via "), "agentk adds itself: {user_agent}");
    ensure!(received.head.get("x-hub-signature-256").is_some(), "the receiver may check it again");
    ensure!(received.head.get("authorization").is_none(), "{received:?}");

    // The same delivery again is the same hook.
    let again = it.push(0, "push", "d-1", "{\"ref\":1}").await?;
    assert_eq!(again.id()?, id);
    // A key in the query: the receiver checks the rest, GitLab's token included.
    let path = format!("/hooks/v1/{AGENT}/flux?key={KEY}");
    it.send(0, &path, &[("x-gitlab-token", "t"), ("x-gitlab-event", "Push Hook")], "flux").await?.id()?;
    it.receiver.got(2).await?;
    let flux = it.receiver.received().into_iter().find(|it| it.body == "flux").context("no hook")?;
    assert_eq!(flux.head.get("x-gitlab-token"), Some("t"));
    ensure!(flux.head.line.starts_with("POST / "), "the key goes nowhere: {}", flux.head.line);

    let touched = it.push(0, "touch", "d-2", "{\"secret\":1}").await?.id()?;
    it.until(0, "annotated", |list| list.kept.is_empty()).await?;
    let annotations = it.kubernetes.kubectl(&["get", "configmap", "app", "-o", "json"]).await?;
    ensure!(annotations.contains(&touched) && !annotations.contains("secret"), "{annotations}");
    assert_eq!(it.receiver.bodies().values().sum::<usize>(), 2, "each arrived once");

    // No such Service: the API server says so, and it may come.
    it.push(0, "nowhere", "d-3", "x").await?.id()?;
    let list = it.until(0, "tried", |list| list.kept.iter().any(|hook| !hook.reason.is_empty())).await?;
    let flaw = &list.flaw;
    ensure!(flaw.contains("hook unset") && flaw.contains("secrets/1/unset"), "{flaw}");
    ensure!(list.hooks.len() == 6 && list.hooks[0].deliver == "service default/receiver:80", "{list:?}");
    Ok(())
}

#[tokio::test]
async fn what_a_receiver_refuses_is_a_dead_letter_until_it_is_replayed() -> Result<()> {
    let it = Setup::start(1).await?;
    it.receiver.answer(503);
    it.push(0, "push", "a", "a").await?;
    it.receiver.got(1).await?;
    let list = it.until(0, "tried", |list| list.kept.iter().any(|hook| hook.attempts > 0)).await?;
    ensure!(!list.kept[0].dead && list.kept[0].reason.starts_with("503"), "{list:?}");
    it.receiver.answer(404);
    let dead = it.until(0, "dead", |list| list.kept.iter().all(|hook| hook.dead)).await?;
    assert_eq!(dead.kept[0].reason, "404 of the receiver");
    it.receiver.answer(200);
    assert_eq!(it.replay(0, &dead.kept[0].id).await?.replayed, 1);
    it.until(0, "delivered", |list| list.kept.is_empty()).await?;
    let missing = it.replay(0, &dead.kept[0].id).await.unwrap_err();
    ensure!(format!("{missing:#}").contains("no dead letter"), "{missing:#}");
    assert_eq!(it.replay(0, "").await?.replayed, 0);
    it.mesh.kas(0).metric_is("kas_mailbox_died_total", 1.0).await?;
    // The sender repeats a dead letter: it is the same hook, which is delivered however much is answered.
    it.receiver.answer(404);
    let first = it.push(0, "push", "again", "again").await?.id()?;
    it.until(0, "dead", |list| list.kept.len() == 1 && list.kept[0].dead).await?;
    it.receiver.answer(TALKATIVE);
    assert_eq!(it.push(0, "push", "again", "again").await?.id()?, first);
    it.until(0, "delivered", |list| list.kept.is_empty()).await?;
    assert_eq!(it.receiver.bodies()["again"], 2);
    // A hook that the file does not have any more.
    std::fs::write(it.folder().join("kas.yaml"), "hooks: []\n")?;
    it.until(0, "without hooks", |list| list.known && list.hooks.is_empty()).await?;
    assert_eq!(it.push(0, "push", "b", "b").await?.status(), 401);
    Ok(())
}
