//! Several replicas: an accepted hook survives the crash of any one of them, and rolling restarts.

use std::{
    collections::BTreeSet,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use parking_lot::Mutex;
use testkit::process::SOON;
use tokio::time::sleep;

use crate::setup::{Setup, push};

#[tokio::test]
async fn a_hook_waits_for_its_agent_while_its_home_dies() -> Result<()> {
    let mut it = Setup::start(2).await?;
    let home = it.home(0).await?;
    let other = 1 - home;
    it.disconnect().await?;
    // At either replica.
    for (n, at) in [home, other].into_iter().enumerate() {
        let told = it.push(at, "push", &format!("d-{n}"), &format!("{n}")).await?;
        told.id()?;
        assert_eq!(told.copies(), Some("2"));
    }
    let list = it.until(other, "kept", |list| list.kept.len() == 2).await?;
    ensure!(list.kept.iter().all(|hook| hook.copies == 2 && hook.attempts == 0), "{list:?}");
    it.mesh.kill(home).await?;
    // The other one is alone for a while.
    let told = it.push(other, "push", "d-2", "2").await?;
    told.id()?;
    it.connect().await?;
    it.receiver.got(3).await?;
    it.until(other, "delivered", |list| list.kept.is_empty()).await?;
    it.mesh.restart(home).await?;
    it.mesh.ready(home).await?;
    // It has to learn the hooks of the agent.
    let list = it.until(home, "known again", |list| list.known).await?;
    ensure!(list.kept.is_empty(), "{list:?}");
    let again = it.push(home, "push", "d-2", "2").await?;
    assert_eq!(again.id()?, told.id()?, "it is remembered what was delivered");
    Ok(())
}

#[tokio::test]
async fn a_home_that_dies_while_it_delivers_is_replaced() -> Result<()> {
    let it = Setup::start(2).await?;
    let home = it.home(0).await?;
    it.receiver.answer(0);
    it.push(home, "push", "d", "d").await?.id()?;
    it.receiver.got(1).await?;
    it.mesh.kill(home).await?;
    it.receiver.answer(200);
    it.until(1 - home, "delivered", |list| list.kept.is_empty()).await?;
    ensure!(it.receiver.bodies()["d"] >= 2, "the second one cannot know that it arrived");
    Ok(())
}

#[tokio::test]
async fn nothing_that_was_accepted_is_lost_while_replicas_die_and_restart() -> Result<()> {
    let mut it = Setup::start(3).await?;
    let accepted = Arc::new(Mutex::new(BTreeSet::new()));
    let is_over = Arc::new(AtomicBool::new(false));
    // Senders at each replica, which is sometimes away.
    let senders: Vec<_> = (0..3)
        .map(|n| {
            let (address, accepted, is_over) = (it.listen(n), Arc::clone(&accepted), Arc::clone(&is_over));
            tokio::spawn(async move {
                let mut sent = 0;
                while !is_over.load(Ordering::Relaxed) {
                    sent += 1;
                    let name = format!("{n}-{sent}");
                    if let Ok(told) = push(address, "push", &name, &name).await
                        && told.status() == 202
                    {
                        accepted.lock().insert(name);
                    }
                    // The rate of a hook is limited.
                    sleep(Duration::from_millis(300)).await;
                }
            })
        })
        .collect();
    // One at a time is killed, at another moment each, then each restarts with grace.
    for n in 0..3 {
        sleep(Duration::from_millis(400)).await;
        it.mesh.kill(n).await?;
        sleep(Duration::from_millis(900)).await;
        it.mesh.restart(n).await?;
        it.mesh.ready(n).await?;
        settled(&it).await?;
    }
    it.disconnect().await?;
    for n in 0..3 {
        it.mesh.leave(n, SOON).await?;
        it.mesh.restart(n).await?;
        it.mesh.ready(n).await?;
        settled(&it).await?;
    }
    it.connect().await?;
    is_over.store(true, Ordering::Relaxed);
    for sender in senders {
        sender.await.context("a sender")?;
    }
    it.until(0, "all delivered", |list| list.kept.is_empty()).await?;
    let delivered: BTreeSet<String> = it.receiver.bodies().into_keys().collect();
    let accepted = accepted.lock().clone();
    let lost: Vec<_> = accepted.difference(&delivered).collect();
    ensure!(lost.is_empty(), "lost: {lost:?} of {}", accepted.len());
    ensure!(accepted.len() > 10, "only {} were accepted", accepted.len());
    Ok(())
}

/// Waits until everything that is kept is on two replicas.
async fn settled(it: &Setup) -> Result<()> {
    for n in 0..3 {
        it.until(n, "on two replicas", |list| list.known && list.kept.iter().all(|hook| hook.copies == 2))
            .await?;
    }
    Ok(())
}
