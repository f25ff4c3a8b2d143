//! The failures of Redis that docs/operations.md describes, for Sentinel and Cluster. `behaviour` has them
//! for one server.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use cluster::{
    ClusterView as _, Locator as _,
    contract::{self, Store as _},
};
use ids::AgentId;
use redis::cmd;
use redis_tracker::{Options, RedisTracker};
use testkit::process::soon;
use tokio::time::{Instant, timeout};

use crate::{
    groups::{Group, Nodes, Sentinels, Sharers},
    world::{LONG, TTL, calm},
};

/// How long a change may take while a group recovers: Sentinels and nodes have their own timers.
const BACK: Duration = Duration::from_secs(30);

fn agent(id: i64) -> AgentId {
    AgentId::new(id).unwrap()
}

/// Waits until an agent is located on this many replicas. It looks again only after a wake-up.
async fn located(tracker: &RedisTracker, id: i64, count: usize) {
    let mut changes = tracker.changes(agent(id));
    let wait = async {
        while tracker.locate(agent(id)).await.map_or(usize::MAX, |found| found.len()) != count {
            changes.changed().await.unwrap();
        }
    };
    let located = timeout(BACK, wait).await;
    let health = tracker.health().borrow().clone();
    assert!(located.is_ok(), "agent {id} is not on {count} replicas: {health:?}");
}

async fn written(tracker: &RedisTracker) {
    let mut health = tracker.health();
    let all = async {
        while tracker.counts().unwritten > 0 || !health.borrow_and_update().announced {
            let _ = timeout(Duration::from_millis(20), health.changed()).await;
        }
    };
    timeout(BACK, all).await.unwrap_or_else(|_| panic!("{:?}", tracker.health().borrow()));
}

/// The group is down, flushed, slow, and disconnected, as in the contract suite for one server.
async fn the_contract_is_kept(group: Arc<dyn Group>) {
    let made = AtomicU64::new(0);
    contract::check_store(|| async {
        let number = made.fetch_add(1, Ordering::Relaxed);
        Arc::new(Sharers::on(&group, &format!("store-{number}"))) as Arc<dyn contract::Store>
    })
    .await;
}

/// Each answer takes a second: lookups of cached and own agents do not wait, and nothing counts as lost.
async fn slow(group: &Arc<dyn Group>) {
    let sharers = Sharers::on(group, "slow");
    let options = || Options { ttl: Duration::from_secs(10), ..sharers.options() };
    let (a, b) = (sharers.start("a", options()).await, sharers.start("b", options()).await);
    let _old = a.tracker.route(agent(1), Arc::from([]));
    located(&b.tracker, 1, 1).await;
    sharers.slow(Duration::from_secs(1)).await;
    // The best of three, because the machine may stall.
    let (mut new, mut least) = (Vec::new(), Duration::MAX);
    for id in 2..5 {
        let begun = Instant::now();
        assert_eq!(b.tracker.locate(agent(1)).await.unwrap().len(), 1);
        new.push(a.tracker.route(agent(id), Arc::from([])));
        assert_eq!(a.tracker.locate(agent(id)).await.unwrap().len(), 1);
        least = least.min(begun.elapsed());
    }
    assert!(least < Duration::from_millis(900), "{least:?}");
    located(&b.tracker, 2, 1).await;
    for running in [&a, &b] {
        let mut health = running.tracker.health();
        let slow = health.wait_for(|health| health.latency.is_some_and(|latency| latency.as_secs() >= 1));
        timeout(BACK, slow).await.expect("the delay is reported").unwrap();
        // An answer in time has updated it, although the machine may have stalled since.
        let reachable = health.wait_for(|health| health.reachable);
        timeout(BACK, reachable).await.expect("nothing counts as lost").unwrap();
        assert_eq!(running.tracker.replicas().await.replicas.len(), 2);
    }
    sharers.slow(Duration::ZERO).await;
}

/// `OOM`: existing replicas stay live, and new agents are announced once there is memory.
async fn full(group: &Arc<dyn Group>) {
    let sharers = Sharers::on(group, "full");
    let options = || Options { ttl: LONG, ..sharers.options() };
    let (a, b) = (sharers.start("a", options()).await, sharers.start("b", options()).await);
    let _old = a.tracker.route(agent(1), Arc::from([]));
    located(&b.tracker, 1, 1).await;
    sharers.ask_each(cmd("CONFIG").arg("SET").arg("maxmemory").arg(1)).await;
    let _new = a.tracker.route(agent(2), Arc::from([]));
    let mut health = a.tracker.health();
    let full = health
        .wait_for(|h| !h.announced && h.last_error.as_ref().is_some_and(|(text, _)| text.contains("OOM")));
    soon("a full Redis is reported", full).await.unwrap();
    assert!(a.tracker.alarms()[0].contains("OOM"), "{:?}", a.tracker.alarms());
    // Longer than the ttl: extending the liveness key needs no memory.
    tokio::time::sleep(LONG + TTL).await;
    assert_eq!(b.tracker.locate(agent(1)).await.unwrap().len(), 1);
    sharers.ask_each(cmd("CONFIG").arg("SET").arg("maxmemory").arg(0)).await;
    located(&b.tracker, 2, 1).await;
    written(&a.tracker).await;
    calm(&a.tracker).await;
}

/// Only the subscription is disconnected, repeatedly.
async fn unsubscribed(group: &Arc<dyn Group>) {
    let sharers = Sharers::on(group, "deaf");
    let (a, b) = (sharers.start("a", sharers.options()).await, sharers.start("b", sharers.options()).await);
    located(&b.tracker, 1, 0).await;
    for _ in 0..5 {
        sharers.ask_each(cmd("CLIENT").arg("KILL").arg("TYPE").arg("pubsub")).await;
        let lease = a.tracker.route(agent(1), Arc::from([]));
        located(&b.tracker, 1, 1).await;
        drop(lease);
        located(&b.tracker, 1, 0).await;
        for running in [&a, &b] {
            let mut health = running.tracker.health();
            soon("news come in again", health.wait_for(|health| health.listening)).await.unwrap();
        }
    }
}

#[tokio::test]
async fn the_contract_is_kept_while_servers_behind_sentinel_fail() {
    the_contract_is_kept(Arc::new(Sentinels::start().await)).await;
}

#[tokio::test]
async fn the_contract_is_kept_while_a_cluster_fails() {
    the_contract_is_kept(Arc::new(Nodes::start().await)).await;
}

#[tokio::test]
async fn slow_full_and_unsubscribed_behave_the_same_behind_sentinel() {
    let group: Arc<dyn Group> = Arc::new(Sentinels::start().await);
    unsubscribed(&group).await;
    full(&group).await;
    slow(&group).await;
}

#[tokio::test]
async fn slow_full_and_unsubscribed_behave_the_same_on_a_cluster() {
    let group: Arc<dyn Group> = Arc::new(Nodes::start().await);
    unsubscribed(&group).await;
    full(&group).await;
    slow(&group).await;
}

/// Both servers keep running, and the old primary answers `READONLY` to clients that stay connected to it.
#[tokio::test]
async fn a_primary_that_became_a_replica_is_replaced_by_the_new_one() {
    let sentinels = Arc::new(Sentinels::start().await);
    let sharers = Sharers::on(&(Arc::clone(&sentinels) as _), "read-only");
    let (a, b) = (sharers.start("a", sharers.options()).await, sharers.start("b", sharers.options()).await);
    let _old = a.tracker.route(agent(1), Arc::from([]));
    located(&b.tracker, 1, 1).await;
    sentinels.fail_over().await;
    let replication = cmd("INFO").arg("replication").take();
    sentinels.servers[1].answers(&replication, |text| text.contains("role:master")).await;
    sentinels.servers[0].answers(&replication, |text| text.contains("role:slave")).await;
    let _new = a.tracker.route(agent(2), Arc::from([]));
    located(&b.tracker, 2, 1).await;
    located(&b.tracker, 1, 1).await;
    written(&a.tracker).await;
    // It was written to the new primary, not only replicated from the old one.
    let keys: Vec<Vec<u8>> = sentinels.servers[1].ask(cmd("KEYS").arg("read-only:tunnel_tracker:*")).await;
    assert_eq!(keys.len(), 2);
    calm(&a.tracker).await;
}

/// The same in a Cluster: the old primary redirects clients to the new one.
#[tokio::test]
async fn a_node_that_became_a_replica_is_replaced_by_the_new_one() {
    let nodes = Arc::new(Nodes::start().await);
    let sharers = Sharers::on(&(Arc::clone(&nodes) as _), "moved");
    let (a, b) = (sharers.start("a", sharers.options()).await, sharers.start("b", sharers.options()).await);
    let _old: Vec<_> = (1..=50).map(|id| a.tracker.route(agent(id), Arc::from([]))).collect();
    for id in 1..=50 {
        located(&b.tracker, id, 1).await;
    }
    nodes.fail_over().await;
    let _new: Vec<_> = (51..=100).map(|id| a.tracker.route(agent(id), Arc::from([]))).collect();
    for id in 1..=100 {
        located(&b.tracker, id, 1).await;
    }
    written(&a.tracker).await;
    calm(&a.tracker).await;
}
