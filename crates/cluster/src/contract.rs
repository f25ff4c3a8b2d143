//! The contract of [`Tracker`]: each implementation runs this suite in its own tests.
//!
//! [`check`] is for one replica alone, [`check_cluster`] for several replicas that inform each other,
//! [`check_store`] for replicas that share a store, which may be slow, disconnected or down.

use std::{
    collections::{BTreeMap, BTreeSet},
    future::Future,
    sync::Arc,
    time::Duration,
};

use async_trait::async_trait;
use ids::{AgentId, ConnectionId, ReplicaId};
use tokio::time::timeout;

use crate::{AgentMeta, Connection, Lease, Query, Tracker};

/// How long a change may take to become visible with the slowest store. A test waits for the event, not for
/// this time.
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

/// Waits until `locate` finds `found` replicas. It looks again only after a wake-up.
async fn located(tracker: &dyn Tracker, id: i64, found: usize) {
    located_within(tracker, id, found, VISIBLE).await;
}

async fn located_within(tracker: &dyn Tracker, id: i64, found: usize, within: Duration) {
    let mut changes = tracker.changes(agent(id));
    let wait = async {
        loop {
            changes.borrow_and_update();
            match tracker.locate(agent(id)).await {
                Ok(holders) if holders.len() == found => return,
                Ok(_) => changes.changed().await.expect("the tracker lives"),
                // The store did not answer for a moment. The contract promises no wake-up for that.
                Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
            }
        }
    };
    timeout(within, wait).await.unwrap_or_else(|_| panic!("agent {id} is not located on {found} replicas"));
}

/// Waits until `query` lists these connections and no answer is outstanding.
async fn listed(tracker: &dyn Tracker, query: Query, ids: &[i64]) {
    let mut changes = tracker.connection_changes();
    let wait = async {
        loop {
            changes.borrow_and_update();
            let connected = tracker.connected(query).await.expect("the store answers");
            let mut now: Vec<i64> = connected.connections.iter().map(|l| l.connection.id.get()).collect();
            now.sort_unstable();
            if now == ids && connected.unanswered.iter().all(|missing| missing.given_up) {
                return;
            }
            changes.changed().await.expect("the tracker lives");
        }
    };
    timeout(VISIBLE, wait).await.unwrap_or_else(|_| panic!("{query:?} does not list {ids:?}"));
}

/// Runs the suite for one replica. `make` returns a fresh, empty tracker each time, and what must be kept as
/// long as the tracker is used.
///
/// # Panics
/// If the tracker breaks the contract.
pub async fn check<F, M, G>(make: M)
where
    M: Fn() -> F,
    F: Future<Output = (Arc<dyn Tracker>, G)>,
{
    unknown_agents_are_not_located(&*make().await.0).await;
    leases_announce_and_withdraw(&*make().await.0).await;
    several_leases_are_one_entry(&*make().await.0).await;
    let (shared, _guard) = make().await;
    subscribers_miss_no_change(shared).await;
    agents_do_not_wake_each_other(&*make().await.0).await;
    connections_are_listed_by_agent_and_project(&*make().await.0).await;
    connections_keep_their_metadata(&*make().await.0).await;
    a_reconnect_never_hides_a_connection(&*make().await.0).await;
    let (alone, _guard) = make().await;
    the_last_change_wins(&*alone, &*alone).await;
    many_agents_are_distinguished(&*make().await.0, None).await;
}

async fn unknown_agents_are_not_located(tracker: &dyn Tracker) {
    located(tracker, 1, 0).await;
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
    // The entry is removed with the last lease.
    assert_eq!(tracker.locate(agent(1)).await.expect("the store answers").len(), 1);
    drop(second);
    located(tracker, 1, 0).await;
}

async fn subscribers_miss_no_change(tracker: Arc<dyn Tracker>) {
    // The agent connects and disconnects while others look for it. Each of them sees it once it stays.
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

async fn connections_keep_their_metadata(tracker: &dyn Tracker) {
    let announced = connection(1, 10, 100);
    let _lease = tracker.connection(announced.clone());
    listed(tracker, Query::Agent(agent(1)), &[100]).await;
    let connected = tracker.connected(Query::Agent(agent(1))).await.expect("the store answers");
    assert_eq!(*connected.connections[0].connection, announced);
}

async fn a_reconnect_never_hides_a_connection(tracker: &dyn Tracker) {
    // agentk opens its next configuration stream before the old one has ended: the same id is there twice.
    let old = tracker.connection(connection(1, 10, 100));
    let new = tracker.connection(connection(1, 10, 100));
    drop(old);
    listed(tracker, Query::Agent(agent(1)), &[100]).await;
    drop(new);
    listed(tracker, Query::Agent(agent(1)), &[]).await;
}

async fn the_last_change_wins(owner: &dyn Tracker, other: &dyn Tracker) {
    // Faster than a store can write.
    let mut kept = Vec::new();
    for round in 0..200 {
        for id in [1, 2] {
            drop(owner.route(agent(id), Arc::from([])));
        }
        if round % 20 == 0 {
            tokio::task::yield_now().await;
        }
        kept = vec![owner.route(agent(1), Arc::from([]))];
    }
    located(other, 1, 1).await;
    located(other, 2, 0).await;
    drop(kept);
    located(other, 1, 0).await;
}

/// The number of agents of a large installation.
const MANY: i64 = 100_000;

async fn many_agents_are_distinguished(owner: &dyn Tracker, other: Option<&dyn Tracker>) {
    let leases: Vec<Lease> = (1..=MANY).map(|id| owner.route(agent(id), Arc::from([]))).collect();
    let viewer = other.unwrap_or(owner);
    // Every hundredth agent, and the last one.
    for id in (1..=MANY).step_by(100).chain([MANY]) {
        located_within(viewer, id, 1, 6 * VISIBLE).await;
    }
    located(viewer, MANY + 1, 0).await;
    let mut leases = leases;
    drop(leases.split_off(usize::try_from(MANY / 2).unwrap_or(0)));
    located_within(viewer, MANY, 0, 6 * VISIBLE).await;
    located(viewer, 1, 1).await;
}

/// Several replicas that inform each other of what they announce.
#[async_trait]
pub trait Cluster: Send + Sync {
    /// Starts a replica. After a crash, the same name is another process of the same replica.
    async fn join(&self, name: &str) -> Box<dyn Member>;

    /// How long the others may still name a replica that has crashed.
    fn expiry(&self) -> Duration;
}

/// One of several replicas.
#[async_trait]
pub trait Member: Send + Sync {
    /// Returns its tracker.
    fn tracker(&self) -> Arc<dyn Tracker>;

    /// Ends it without notice to the others.
    async fn crash(self: Box<Self>);

    /// Shuts it down.
    async fn leave(self: Box<Self>);
}

/// Several replicas that share a store.
#[async_trait]
pub trait Store: Cluster {
    /// Stops the store. Its data is lost.
    async fn stop(&self);

    /// Starts the store again, empty.
    async fn start(&self);

    /// Deletes all data of the store. Connections stay open.
    async fn flush(&self);

    /// Delays each answer of the store by `delay`.
    async fn slow(&self, delay: Duration);

    /// Closes all connections to the store. Clients may reconnect at once.
    async fn cut(&self);
}

/// Returns the names of the replicas that `locate` returns for an agent.
async fn holders(tracker: &dyn Tracker, id: i64) -> BTreeSet<String> {
    let found = tracker.locate(agent(id)).await.unwrap_or_default();
    found.iter().map(|candidate| candidate.replica.id.to_string()).collect()
}

/// Waits until `locate` returns exactly these replicas for an agent. It looks again only after a wake-up.
async fn held_by(tracker: &dyn Tracker, id: i64, names: &[&str], within: Duration) {
    let names: BTreeSet<String> = names.iter().map(|&name| name.to_owned()).collect();
    let mut changes = tracker.changes(agent(id));
    let mut last = BTreeSet::new();
    let wait = async {
        loop {
            changes.borrow_and_update();
            last = holders(tracker, id).await;
            if last == names {
                return;
            }
            changes.changed().await.expect("the tracker lives");
        }
    };
    let seen = timeout(within, wait).await;
    let why = tracker.views(agent(id));
    assert!(seen.is_ok(), "agent {id} is located on {last:?} and not on {names:?}: {why:?}");
}

/// Runs the suite for several replicas; `make` returns a fresh cluster without replicas each time.
///
/// # Panics
/// If the tracker breaks the contract.
pub async fn check_cluster<F, M>(make: M)
where
    M: Fn() -> F,
    F: Future<Output = Arc<dyn Cluster>>,
{
    changes_are_seen_elsewhere(&*make().await).await;
    an_agent_may_be_on_many_replicas(&*make().await).await;
    lists_are_of_all_replicas(&*make().await).await;
    a_crashed_replica_is_forgotten(&*make().await).await;
    a_replica_that_leaves_is_forgotten_at_once(&*make().await).await;
    a_restarted_owner_announces_what_it_has_now(&*make().await).await;
    a_replica_that_said_not_here_is_left_out_until_the_agent_reconnects(&*make().await).await;
    many_agents_are_distinguished_elsewhere(&*make().await).await;
    for seed in seeds() {
        interleavings_end_in_the_true_state(&*make().await, seed).await;
    }
}

async fn changes_are_seen_elsewhere(cluster: &dyn Cluster) {
    let (a, b) = (cluster.join("a").await, cluster.join("b").await);
    let (here, there) = (a.tracker(), b.tracker());
    for _ in 0..20 {
        let lease = here.route(agent(7), Arc::from([]));
        held_by(&*there, 7, &["a"], VISIBLE).await;
        drop(lease);
        held_by(&*there, 7, &[], VISIBLE).await;
    }
    the_last_change_wins(&*here, &*there).await;
    let mut live = there.live();
    timeout(VISIBLE, live.wait_for(|live| *live == 2)).await.expect("both live").expect("the tracker lives");
}

async fn an_agent_may_be_on_many_replicas(cluster: &dyn Cluster) {
    let (a, b, c) = (cluster.join("a").await, cluster.join("b").await, cluster.join("c").await);
    let on_a = a.tracker().route(agent(1), Arc::from([]));
    let on_b = b.tracker().route(agent(1), Arc::from([]));
    let on_c = c.tracker().route(agent(1), Arc::from([]));
    for member in [&a, &b, &c] {
        held_by(&*member.tracker(), 1, &["a", "b", "c"], VISIBLE).await;
    }
    drop(on_b);
    held_by(&*c.tracker(), 1, &["a", "c"], VISIBLE).await;
    drop((on_a, on_c));
    held_by(&*b.tracker(), 1, &[], VISIBLE).await;
}

async fn lists_are_of_all_replicas(cluster: &dyn Cluster) {
    let (a, b) = (cluster.join("a").await, cluster.join("b").await);
    let (here, there) = (a.tracker(), b.tracker());
    // An agent with a configuration stream has tunnels: a tracker may ask only the holders of an agent about
    // it.
    let _routes = [
        here.route(agent(1), Arc::from([])),
        there.route(agent(1), Arc::from([])),
        here.route(agent(2), Arc::from([])),
    ];
    // agentk is connected to two replicas with one connection id.
    let twice = [here.connection(connection(1, 10, 100)), there.connection(connection(1, 10, 100))];
    let other = here.connection(connection(2, 11, 101));
    for tracker in [&here, &there] {
        listed(&**tracker, Query::All, &[100, 101]).await;
        listed(&**tracker, Query::Agent(agent(1)), &[100]).await;
        listed(&**tracker, Query::Project(11), &[101]).await;
    }
    let [first, second] = twice;
    drop(first);
    // One replica withdraws the connection, the other still has it.
    listed(&*there, Query::Agent(agent(1)), &[100]).await;
    listed(&*here, Query::Agent(agent(1)), &[100]).await;
    let connected = here.connected(Query::Agent(agent(1))).await.expect("the store answers");
    assert_eq!(*connected.connections[0].connection, connection(1, 10, 100));
    drop((second, other));
    listed(&*here, Query::All, &[]).await;
    listed(&*there, Query::All, &[]).await;
}

async fn a_crashed_replica_is_forgotten(cluster: &dyn Cluster) {
    let (a, b) = (cluster.join("a").await, cluster.join("b").await);
    let tracker = a.tracker();
    let leases: Vec<Lease> = (1..=50).map(|id| tracker.route(agent(id), Arc::from([]))).collect();
    let listed_lease = tracker.connection(connection(1, 10, 100));
    for id in 1..=50 {
        held_by(&*b.tracker(), id, &["a"], VISIBLE).await;
    }
    listed(&*b.tracker(), Query::All, &[100]).await;
    a.crash().await;
    let begun = tokio::time::Instant::now();
    // Leaves time for a machine that stalls, but less than the default time to live of replicas (10 s).
    let within = cluster.expiry() + VISIBLE / 2;
    for id in 1..=50 {
        held_by(&*b.tracker(), id, &[], within.saturating_sub(begun.elapsed())).await;
    }
    listed(&*b.tracker(), Query::All, &[]).await;
    drop((leases, listed_lease));
}

async fn a_replica_that_leaves_is_forgotten_at_once(cluster: &dyn Cluster) {
    let (a, b) = (cluster.join("a").await, cluster.join("b").await);
    let leases: Vec<Lease> = (1..=50).map(|id| a.tracker().route(agent(id), Arc::from([]))).collect();
    for id in 1..=50 {
        held_by(&*b.tracker(), id, &["a"], VISIBLE).await;
    }
    let tracker = b.tracker();
    let mut live = tracker.live();
    drop(leases);
    a.leave().await;
    for id in 1..=50 {
        held_by(&*tracker, id, &[], VISIBLE).await;
    }
    timeout(VISIBLE, live.wait_for(|live| *live == 1)).await.expect("one lives").expect("the tracker lives");
}

async fn a_restarted_owner_announces_what_it_has_now(cluster: &dyn Cluster) {
    let b = cluster.join("b").await;
    let a = cluster.join("a").await;
    let leases: Vec<Lease> = [1, 2].map(|id| a.tracker().route(agent(id), Arc::from([]))).into();
    held_by(&*b.tracker(), 1, &["a"], VISIBLE).await;
    held_by(&*b.tracker(), 2, &["a"], VISIBLE).await;
    a.crash().await;
    // Before anything can expire.
    let again = cluster.join("a").await;
    let lease = again.tracker().route(agent(2), Arc::from([]));
    held_by(&*b.tracker(), 1, &[], cluster.expiry() + VISIBLE).await;
    held_by(&*b.tracker(), 2, &["a"], VISIBLE).await;
    drop((leases, lease));
}

async fn a_replica_that_said_not_here_is_left_out_until_the_agent_reconnects(cluster: &dyn Cluster) {
    let (a, b) = (cluster.join("a").await, cluster.join("b").await);
    let (here, there) = (a.tracker(), b.tracker());
    let lease = here.route(agent(1), Arc::from([]));
    held_by(&*there, 1, &["a"], VISIBLE).await;
    there.not_here(&ReplicaId::new("a"), agent(1), here.mark());
    assert!(holders(&*there, 1).await.is_empty());
    let mut changes = there.changes(agent(1));
    changes.borrow_and_update();
    drop(lease);
    let _lease = here.route(agent(1), Arc::from([]));
    held_by(&*there, 1, &["a"], VISIBLE).await;
}

async fn many_agents_are_distinguished_elsewhere(cluster: &dyn Cluster) {
    let (a, b) = (cluster.join("a").await, cluster.join("b").await);
    many_agents_are_distinguished(&*a.tracker(), Some(&*b.tracker())).await;
}

/// Returns the seeds of random runs: those of `CONTRACT_SEED`, separated by commas, or the default four.
fn seeds() -> Vec<u64> {
    match std::env::var("CONTRACT_SEED") {
        Ok(text) => text.split(',').filter_map(|seed| seed.parse().ok()).collect(),
        Err(_) => (1..=4).collect(),
    }
}

/// SplitMix64: the seed determines the run.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % end
    }
}

/// After any interleaving of announcements, withdrawals and crashes on three replicas, each tracker ends up
/// with exactly what the live replicas hold.
async fn interleavings_end_in_the_true_state(cluster: &dyn Cluster, seed: u64) {
    const NAMES: [&str; 3] = ["a", "b", "c"];
    const AGENTS: u64 = 6;
    struct Live {
        member: Box<dyn Member>,
        leases: BTreeMap<i64, (Lease, Lease)>,
    }
    let mut random = Random(seed);
    let mut members: BTreeMap<&str, Live> = BTreeMap::new();
    // Leases of crashed processes. They are dropped when the process can no longer write.
    let mut dead = Vec::new();
    let mut steps = Vec::new();
    for _ in 0..60 {
        let name = NAMES[usize::try_from(random.below(3)).unwrap_or(0)];
        let Some(live) = members.get_mut(name) else {
            steps.push(format!("{name} starts"));
            members.insert(name, Live { member: cluster.join(name).await, leases: BTreeMap::new() });
            continue;
        };
        let id = 1 + i64::try_from(random.below(AGENTS)).unwrap_or(0);
        match random.below(12) {
            0 => {
                steps.push(format!("{name} crashes"));
                if let Some(live) = members.remove(name) {
                    live.member.crash().await;
                    dead.push(live.leases);
                }
            }
            1 => {
                // The lookup fills a cache that may be out of date afterwards.
                steps.push(format!("{name} looks for {id}"));
                holders(&*live.member.tracker(), id).await;
            }
            _ => match live.leases.remove(&id) {
                Some(leases) => {
                    steps.push(format!("{name} loses {id}"));
                    drop(leases);
                }
                None => {
                    steps.push(format!("{name} has {id}"));
                    let tracker = live.member.tracker();
                    let leases = (
                        tracker.route(agent(id), Arc::from([])),
                        tracker.connection(connection(id, 10 + id % 2, 100 + id)),
                    );
                    live.leases.insert(id, leases);
                }
            },
        }
        if random.below(4) == 0 {
            tokio::time::sleep(Duration::from_millis(random.below(30))).await;
        }
    }
    // Shown if the test fails.
    eprintln!("seed {seed}: {}", steps.join(", "));
    let mut on: BTreeMap<i64, Vec<&str>> = BTreeMap::new();
    for (name, live) in &members {
        for id in live.leases.keys() {
            on.entry(*id).or_default().push(name);
        }
    }
    let within = cluster.expiry() + VISIBLE;
    for live in members.values() {
        let tracker = live.member.tracker();
        for id in 1..=i64::try_from(AGENTS).unwrap_or(0) {
            held_by(&*tracker, id, on.get(&id).map_or(&[], Vec::as_slice), within).await;
        }
        let ids: Vec<i64> = on.keys().map(|id| 100 + id).collect();
        listed(&*tracker, Query::All, &ids).await;
    }
}

/// Runs the suite for replicas that share a store; `make` returns a fresh store each time.
///
/// # Panics
/// If the tracker breaks the contract.
pub async fn check_store<F, M>(make: M)
where
    M: Fn() -> F,
    F: Future<Output = Arc<dyn Store>>,
{
    everything_is_announced_again_after_an_outage(&*make().await).await;
    lost_data_of_the_store_is_announced_again(&*make().await).await;
    a_slow_store_delays_changes_and_loses_none(&*make().await).await;
    lost_connections_lose_no_change(&*make().await).await;
}

async fn everything_is_announced_again_after_an_outage(store: &dyn Store) {
    let (a, b) = (store.join("a").await, store.join("b").await);
    let (here, there) = (a.tracker(), b.tracker());
    let mut leases: BTreeMap<i64, Lease> =
        (1..=100).map(|id| (id, here.route(agent(id), Arc::from([])))).collect();
    for id in 1..=100 {
        held_by(&*there, id, &["a"], VISIBLE).await;
    }
    store.stop().await;
    // Local agents and cached routes stay available.
    assert_eq!(here.locate(agent(1)).await.expect("it is here").len(), 1);
    assert_eq!(there.locate(agent(1)).await.expect("it was known").len(), 1);
    // Other agents are unknown: the tracker returns an error and not "absent".
    let until = tokio::time::Instant::now() + VISIBLE;
    while there.locate(agent(1_000)).await.is_ok() {
        assert!(
            tokio::time::Instant::now() < until,
            "an agent is reported absent although the store is down"
        );
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    // Agents connect and disconnect meanwhile.
    drop((leases.remove(&1), leases.remove(&2)));
    leases.insert(101, here.route(agent(101), Arc::from([])));
    store.start().await;
    for id in [101, 3, 50, 100] {
        held_by(&*there, id, &["a"], VISIBLE).await;
    }
    held_by(&*there, 1, &[], VISIBLE).await;
    held_by(&*there, 2, &[], VISIBLE).await;
    // A replica that starts now finds all of them.
    let c = store.join("c").await;
    for id in 3..=101 {
        held_by(&*c.tracker(), id, &["a"], VISIBLE).await;
    }
    held_by(&*c.tracker(), 1, &[], VISIBLE).await;
}

async fn lost_data_of_the_store_is_announced_again(store: &dyn Store) {
    let (a, b) = (store.join("a").await, store.join("b").await);
    let lease = a.tracker().route(agent(1), Arc::from([]));
    let shown = a.tracker().connection(connection(1, 10, 100));
    held_by(&*b.tracker(), 1, &["a"], VISIBLE).await;
    store.flush().await;
    // After one heartbeat of the owner.
    let c = store.join("c").await;
    held_by(&*c.tracker(), 1, &["a"], store.expiry() + VISIBLE).await;
    listed(&*c.tracker(), Query::All, &[100]).await;
    drop((lease, shown));
    held_by(&*c.tracker(), 1, &[], VISIBLE).await;
}

async fn a_slow_store_delays_changes_and_loses_none(store: &dyn Store) {
    let (a, b) = (store.join("a").await, store.join("b").await);
    let (here, there) = (a.tracker(), b.tracker());
    store.slow(Duration::from_millis(200)).await;
    let begun = tokio::time::Instant::now();
    let lease = here.route(agent(1), Arc::from([]));
    // A lookup of an own agent does not wait long for the store.
    assert_eq!(here.locate(agent(1)).await.expect("it is here").len(), 1);
    assert!(begun.elapsed() < VISIBLE / 2, "{:?}", begun.elapsed());
    held_by(&*there, 1, &["a"], VISIBLE).await;
    drop(lease);
    held_by(&*there, 1, &[], VISIBLE).await;
    store.slow(Duration::ZERO).await;
}

async fn lost_connections_lose_no_change(store: &dyn Store) {
    let (a, b) = (store.join("a").await, store.join("b").await);
    let (here, there) = (a.tracker(), b.tracker());
    let mut lease = None;
    for round in 0..10 {
        let watcher = Arc::clone(&there);
        let held = round % 2 == 0;
        let waiting = tokio::spawn(async move {
            held_by(&*watcher, 1, if held { &["a"] } else { &[] }, 3 * VISIBLE).await;
        });
        if round % 3 == 0 {
            tokio::task::yield_now().await;
        }
        store.cut().await;
        lease = held.then(|| here.route(agent(1), Arc::from([])));
        if round % 3 == 1 {
            store.cut().await;
        }
        waiting.await.expect("the change was seen");
    }
    drop(lease);
}
