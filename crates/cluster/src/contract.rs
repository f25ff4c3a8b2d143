//! The behaviour that every [`Tracker`] must show, run by each version's own tests.

use std::{future::Future, sync::Arc, time::Duration};

use ids::{AgentId, ConnectionId};
use tokio::time::timeout;

use crate::tracker::{AgentMeta, Connection, Query, Tracker};

/// How long a change may take to be visible in the slowest store. A test waits for the event, not
/// for this time.
const VISIBLE: Duration = Duration::from_secs(10);

fn agent(id: i64) -> AgentId {
    AgentId::new(id).expect("test ids are positive")
}

fn connection(agent_id: i64, project_id: i64, id: i64) -> Connection {
    Connection {
        agent: agent(agent_id),
        name: "contract".into(),
        project_id,
        id: ConnectionId::new(id).expect("test ids are positive"),
        meta: AgentMeta {
            version: "v1".into(),
            commit: "c0ffee".into(),
            pod_namespace: "ns".into(),
            pod_name: "pod".into(),
        },
        connected_at: Duration::from_secs(1_600_000_000),
    }
}

/// Waits until `locate` finds `found` replicas, by subscription alone.
async fn located(tracker: &dyn Tracker, id: i64, found: usize) {
    let mut changes = tracker.changes(agent(id));
    let wait = async {
        loop {
            changes.borrow_and_update();
            if tracker.locate(agent(id)).await.expect("the store answers").len() == found {
                return;
            }
            changes.changed().await.expect("the tracker lives");
        }
    };
    timeout(VISIBLE, wait).await.unwrap_or_else(|_| panic!("agent {id} is not located on {found} replicas"));
}

/// Waits until `query` lists these connections.
async fn listed(tracker: &dyn Tracker, query: Query, ids: &[i64]) {
    let mut changes = tracker.connection_changes();
    let wait = async {
        loop {
            changes.borrow_and_update();
            let connected = tracker.connected(query).await.expect("the store answers");
            let mut now: Vec<i64> = connected.connections.iter().map(|l| l.connection.id.get()).collect();
            now.sort_unstable();
            if now == ids && connected.unanswered.is_empty() {
                return;
            }
            changes.changed().await.expect("the tracker lives");
        }
    };
    timeout(VISIBLE, wait).await.unwrap_or_else(|_| panic!("{query:?} does not list {ids:?}"));
}

/// Runs the whole suite; `make` returns a fresh, empty tracker each time.
///
/// # Panics
/// When the tracker breaks the contract.
pub async fn check<F, M>(make: M)
where
    M: Fn() -> F,
    F: Future<Output = Arc<dyn Tracker>>,
{
    unknown_agents_are_nowhere(&*make().await).await;
    leases_announce_and_withdraw(&*make().await).await;
    several_leases_are_one_entry(&*make().await).await;
    subscribers_miss_nothing(make().await).await;
    agents_do_not_wake_each_other(&*make().await).await;
    connections_are_listed_by_agent_and_project(&*make().await).await;
    connections_keep_what_they_say(&*make().await).await;
    a_reconnect_never_hides_a_connection(&*make().await).await;
}

async fn unknown_agents_are_nowhere(tracker: &dyn Tracker) {
    assert!(tracker.locate(agent(1)).await.expect("the store answers").is_empty());
    assert!(tracker.connected(Query::All).await.expect("the store answers").connections.is_empty());
}

async fn leases_announce_and_withdraw(tracker: &dyn Tracker) {
    let lease = tracker.route(agent(1), Arc::from([]));
    located(tracker, 1, 1).await;
    located(tracker, 2, 0).await;
    drop(lease);
    located(tracker, 1, 0).await;
}

async fn several_leases_are_one_entry(tracker: &dyn Tracker) {
    let first = tracker.route(agent(1), Arc::from([]));
    let second = tracker.route(agent(1), Arc::from([]));
    located(tracker, 1, 1).await;
    drop(first);
    // Still there: the entry goes with the last lease.
    assert_eq!(tracker.locate(agent(1)).await.expect("the store answers").len(), 1);
    drop(second);
    located(tracker, 1, 0).await;
}

async fn subscribers_miss_nothing(tracker: Arc<dyn Tracker>) {
    // An agent that comes and goes while others look: each sees it when it stays.
    for round in 0..50 {
        let waiting: Vec<_> = (0..4)
            .map(|_| {
                let tracker = Arc::clone(&tracker);
                tokio::spawn(async move { located(&*tracker, 7, 1).await })
            })
            .collect();
        if round % 2 == 0 {
            tokio::task::yield_now().await;
        }
        drop(tracker.route(agent(7), Arc::from([])));
        let lease = tracker.route(agent(7), Arc::from([]));
        for task in waiting {
            task.await.expect("a subscriber saw the agent");
        }
        drop(lease);
        located(&*tracker, 7, 0).await;
    }
}

async fn agents_do_not_wake_each_other(tracker: &dyn Tracker) {
    let mut changes = tracker.changes(agent(1));
    changes.borrow_and_update();
    let lease = tracker.route(agent(2), Arc::from([]));
    located(tracker, 2, 1).await;
    assert!(!changes.has_changed().expect("the tracker lives"), "agent 2 woke a waiter of agent 1");
    drop(lease);
}

async fn connections_are_listed_by_agent_and_project(tracker: &dyn Tracker) {
    let leases = [
        tracker.connection(connection(1, 10, 100)),
        tracker.connection(connection(1, 10, 101)),
        tracker.connection(connection(2, 10, 102)),
        tracker.connection(connection(3, 11, 103)),
    ];
    listed(tracker, Query::All, &[100, 101, 102, 103]).await;
    listed(tracker, Query::Agent(agent(1)), &[100, 101]).await;
    listed(tracker, Query::Project(10), &[100, 101, 102]).await;
    listed(tracker, Query::Project(12), &[]).await;
    drop(leases);
    listed(tracker, Query::All, &[]).await;
}

async fn connections_keep_what_they_say(tracker: &dyn Tracker) {
    let said = connection(1, 10, 100);
    let _lease = tracker.connection(said.clone());
    listed(tracker, Query::Agent(agent(1)), &[100]).await;
    let connected = tracker.connected(Query::Agent(agent(1))).await.expect("the store answers");
    assert_eq!(*connected.connections[0].connection, said);
}

async fn a_reconnect_never_hides_a_connection(tracker: &dyn Tracker) {
    // agentk opens its next configuration stream before the old one has ended: same id twice.
    let old = tracker.connection(connection(1, 10, 100));
    let new = tracker.connection(connection(1, 10, 100));
    drop(old);
    listed(tracker, Query::Agent(agent(1)), &[100]).await;
    drop(new);
    listed(tracker, Query::Agent(agent(1)), &[]).await;
}
