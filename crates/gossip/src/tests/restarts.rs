//! Restarts of the process and of the gossip task, and dead incarnations.

use super::{simulated::Network, *};

/// chitchat issue 94: a restart with a new generation left both incarnations in the state.
#[test]
fn restart_replaces_incarnation() {
    exhibit(Flaw::OldGenerationStays, || boxed(restarted()));
}

async fn restarted() {
    // With this phi no process counts as dead before the deadline: only the newer generation can replace it.
    let patient = Timing { phi: 5_000.0, ..timing() };
    let a = builder("a").timing(patient).start().await.unwrap();
    let b = start("b", &[&a]).await;
    b.publish("run", "1").unwrap();
    sees(&a, "b", "run", "1").await;
    let recording = Recording::of(&a);
    let first = b.generation();
    drop(b);
    let b = start("b", &[&a]).await;
    b.publish("run", "2").unwrap();
    let members = sees(&a, "b", "run", "2").await;
    assert_eq!(members.len(), 1);
    let member = members.member("b").unwrap();
    assert!(member.generation() > first);
    assert_eq!(member.generation(), b.generation());
    assert_eq!(member.address(), b.local_addr());
    traffic(&a, 50).await;
    assert!(recording.generations("b").is_sorted(), "a generation went back");
    assert_eq!(b.counters().restarts(Restart::Overtaken), 0);
}

#[tokio::test]
async fn a_process_recovers_after_its_clock_was_set_back() {
    let a = start("a", &[]).await;
    let ahead = node::wall() + 3_600_000_000;
    let b = builder("b").generation(ahead).seeds(seeds(&[a.local_addr()])).start().await.unwrap();
    until(a.members(), "b ahead", |m| m.member("b").is_some_and(|b| b.generation() == ahead)).await;
    drop(b);
    let b = start("b", &[&a]).await;
    // It begins with an earlier generation, and may have heard of the later one already.
    until(a.members(), "b beyond", |m| m.member("b").is_some_and(|b| b.generation() == ahead + 1)).await;
    assert_eq!(b.generation(), ahead + 1);
    assert_eq!(b.counters().restarts(Restart::Overtaken), 1);
    until(b.members(), "b hears a", |m| m.len() == 1).await;
}

#[tokio::test]
async fn a_generation_far_in_the_future_is_refused() {
    let a = start("a", &[]).await;
    let ahead = node::wall() + 2 * 86_400_000_000;
    let b = builder("b").generation(ahead).seeds(seeds(&[a.local_addr()])).start().await.unwrap();
    eventually("refused", || a.counters().dropped(Reason::Future) >= 5).await;
    assert!(a.members().borrow().is_empty() && b.members().borrow().is_empty());
    // The id itself is still free.
    drop(b);
    let b = start("b", &[&a]).await;
    meshed(&[&a, &b]).await;
    assert_eq!(b.counters().restarts(Restart::Overtaken), 0);
}

#[tokio::test]
async fn two_processes_of_one_id_do_not_restart_without_end() {
    let a = start("a", &[]).await;
    let b = start("b", &[&a]).await;
    let twin = start("b", &[&a]).await;
    let restarts =
        |node: &Gossip| Restart::ALL.iter().map(|cause| node.counters().restarts(*cause)).sum::<u64>();
    eventually("they met", || restarts(&b) + restarts(&twin) >= 3).await;
    traffic(&a, 100).await;
    // The delays double for each process: 0, 250, 500, 1000 ms and so on.
    let most = restarts(&b) + restarts(&twin);
    assert!(most < 14, "{most} restarts");
}

#[tokio::test]
async fn a_panic_restarts_with_a_new_generation_and_members_stay() {
    boxed(restarts_after(1, Restart::Ended)).await;
}

#[tokio::test]
async fn a_freeze_restarts_with_a_new_generation_and_members_stay() {
    boxed(restarts_after(2, Restart::Frozen)).await;
}

async fn restarts_after(fault: u8, cause: Restart) {
    let a = start("a", &[]).await;
    let b = start("b", &[&a]).await;
    a.publish("st", "ready").unwrap();
    b.publish("st", "ready").unwrap();
    meshed(&[&a, &b]).await;
    let first = a.generation();
    let recording = Recording::of(&a);
    a.link.fault.store(fault, Ordering::Relaxed);
    until(b.members(), "a again", |m| m.member("a").is_some_and(|a| a.generation() > first)).await;
    sees(&b, "a", "st", "ready").await;
    assert!(a.generation() > first);
    assert_eq!(a.counters().restarts(cause), 1);
    // Values that are published later arrive too, in both directions.
    a.publish("st", "draining").unwrap();
    b.publish("st", "draining").unwrap();
    sees(&b, "a", "st", "draining").await;
    sees(&a, "b", "st", "draining").await;
    assert!(recording.all(|members| members.len() == 1), "members changed");
}

/// chitchat PR 155, quickwit issue 5135: dead nodes came back because peers collect them at different times.
#[test]
fn no_resurrection_after_gc() {
    exhibit_paused(Flaw::HearsayIsLife, || boxed(collected()));
}

async fn collected() {
    let network = Network::new();
    // All forget the dead member after a second. A new member could hear of it from the last one that
    // forgets.
    let quick = Timing { dead_grace: Duration::from_secs(1), ..timing() };
    let a = network.builder("a").timing(quick).start().await.unwrap();
    let known = [a.local_addr()];
    let b = network.builder("b").timing(quick).seeds(seeds(&known)).start().await.unwrap();
    let c = network.builder("c").timing(quick).seeds(seeds(&known)).start().await.unwrap();
    b.publish("st", "ready").unwrap();
    meshed(&[&a, &b, &c]).await;
    drop(b);
    until(a.members(), "b is gone", |m| m.len() == 1).await;
    until(c.members(), "b is gone", |m| m.len() == 1).await;
    let recordings = [Recording::of(&a), Recording::of(&c)];
    let d = network.builder("d").timing(quick).seeds(seeds(&known)).start().await.unwrap();
    let recording = Recording::of(&d);
    meshed(&[&a, &c, &d]).await;
    traffic(&d, 150).await;
    assert!(recording.all(|members| members.member("b").is_none()));
    assert!(recordings.iter().all(|recording| recording.all(|members| members.member("b").is_none())));
}

/// Waits until each node remembers exactly this many others, live or dead.
async fn remember(nodes: &[&Gossip], incarnations: u64) {
    for node in nodes {
        let what = format!("{} remembers {incarnations} incarnations", node.local_addr());
        eventually(&what, || node.counters().incarnations() == incarnations).await;
    }
}

/// chitchat issue 161: a dead incarnation was gossiped without end. A process that had forgotten it heard of
/// it again from one that had not, and so did each new process.
///
/// This test also failed with a chitchat without its two guards: with an empty
/// `scheduled_for_deletion_nodes`, dead incarnations are gossiped until they are collected; without the
/// memory of `last_heartbeat_if_deleted`, a collected incarnation is accepted again.
#[test]
fn dead_incarnation_not_regossiped() {
    exhibit_paused(Flaw::DeadRememberedLong, || boxed(forgotten()));
}

async fn forgotten() {
    let network = Network::new();
    let quick = Timing { dead_grace: Duration::from_secs(1), ..timing() };
    // This process forgets later than the others, so it could bring the dead one back.
    let slow = Timing { dead_grace: Duration::from_secs(3), ..timing() };
    let a = network.builder("a").timing(quick).start().await.unwrap();
    let known = [a.local_addr()];
    let b = network.builder("b").timing(quick).seeds(seeds(&known)).start().await.unwrap();
    let c = network.builder("c").timing(slow).seeds(seeds(&known)).start().await.unwrap();
    b.publish("st", "ready").unwrap();
    meshed(&[&a, &b, &c]).await;
    remember(&[&a, &b, &c], 2).await;
    drop(b);
    until(a.members(), "b is gone", |m| m.len() == 1).await;
    remember(&[&a], 1).await;
    // c still gossips it, or has stopped to. No process may accept it again.
    let most = Arc::new(AtomicU32::new(0));
    let watched = {
        let (most, counters) = (Arc::clone(&most), a.counters());
        tokio::spawn(async move {
            loop {
                most.fetch_max(counters.incarnations() as u32, Ordering::Relaxed);
                sleep(Duration::from_millis(5)).await;
            }
        })
    };
    remember(&[&c], 1).await;
    traffic(&c, 40).await;
    watched.abort();
    assert_eq!(most.load(Ordering::Relaxed), 1, "a forgotten incarnation came back");
    // A new process never hears of it.
    let d = network.builder("d").timing(quick).seeds(seeds(&known)).start().await.unwrap();
    meshed(&[&a, &c, &d]).await;
    traffic(&d, 60).await;
    remember(&[&a, &c, &d], 2).await;
}
