//! Behaviour that is specific to Redis: the layout that a 14.1 replica reads, expiry, and the reaction to
//! faults.

use std::{collections::HashMap, sync::Arc, time::Duration};

use crate::world::{Kind, LONG, Running, TTL, World, calm};
use cluster::{
    AgentMeta, ClusterView as _, Connected, Connection, Connections as _, Locator as _, Query, ReplicaState,
    Wire, contract::Member,
};
use ids::{AgentId, ConnectionId};
use prost::Message as _;
use prost_types::{Any, Timestamp};
use proto::gitlab::agent::{
    agent_tracker::ConnectedAgentInfo, redistool::ExpiringValue, reverse_tunnel::tracker::TunnelInfo,
};
use redis::cmd;
use redis_tracker::{Connect, Options, RedisTracker};
use testkit::process::soon;
use tokio::time::Instant;

const METHOD: &str = "/gitlab.agent.kubernetes_api.rpc.KubernetesApi/MakeRequest";

fn agent(id: i64) -> AgentId {
    AgentId::new(id).unwrap()
}

fn methods() -> Arc<[Box<str>]> {
    Arc::from([METHOD.into()])
}

fn connection(id: i64) -> Connection {
    Connection {
        agent: agent(1),
        name: "one".into(),
        project_id: 10,
        id: ConnectionId::new(id).unwrap(),
        meta: AgentMeta { version: "v14.1.0".into(), ..AgentMeta::default() },
        connected_at: Duration::from_secs(1_600_000_000),
    }
}

fn key(middle: &str, id: i64) -> Vec<u8> {
    [b"gitlab-kas:", middle.as_bytes(), &id.to_le_bytes()].concat()
}

fn tunnels(id: i64) -> Vec<u8> {
    key("tunnel_tracker:conn_by_agent_id:", id)
}

async fn hash(world: &World, key: &[u8]) -> HashMap<String, Vec<u8>> {
    world.ask(cmd("HGETALL").arg(key)).await
}

/// Waits until the replica has written all its announcements.
async fn written(tracker: &RedisTracker) {
    soon("everything is written", async {
        while tracker.counts().unwritten > 0 || !tracker.health().borrow().announced {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    })
    .await;
}

/// Waits until an agent is located on this many replicas. It looks again only after a wake-up.
async fn located(tracker: &RedisTracker, id: i64, count: usize) {
    let mut changes = tracker.changes(agent(id));
    soon("the agent is located", async {
        while tracker.locate(agent(id)).await.map_or(0, |found| found.len()) != count {
            changes.changed().await.unwrap();
        }
    })
    .await;
}

/// Returns a value as a kas 14.1 writes it.
fn of_14_1(type_url: &str, value: Vec<u8>, expires_at: i64) -> Vec<u8> {
    let value = Some(Any { type_url: format!("type.googleapis.com/gitlab.agent.{type_url}"), value });
    ExpiringValue { expires_at: Some(Timestamp { seconds: expires_at, nanos: 0 }), value }.encode_to_vec()
}

fn connected_of_14_1(id: i64, expires_at: i64) -> Vec<u8> {
    connected_of_14_1_in(10, id, expires_at)
}

fn connected_of_14_1_in(project: i64, id: i64, expires_at: i64) -> Vec<u8> {
    let info = ConnectedAgentInfo {
        connection_id: id,
        agent_id: 1,
        project_id: project,
        ..ConnectedAgentInfo::default()
    };
    of_14_1("agent_tracker.ConnectedAgentInfo", info.encode_to_vec(), expires_at)
}

/// Writes a connection as a kas 14.1 does, for the list of its project only.
async fn connect_to_14_1(world: &World, project: i64, id: i64) {
    let value = connected_of_14_1_in(project, id, redis_time(world).await + 300);
    let key = key("agent_tracker:conn_by_project_id:", project);
    let _: i64 = world.ask(cmd("HSET").arg(key).arg(id).arg(value)).await;
}

/// Returns the ids of listed connections, and whether each is unconfirmed.
fn listed(connected: &Connected) -> Vec<(i64, bool)> {
    connected.connections.iter().map(|located| (located.connection.id.get(), located.unconfirmed)).collect()
}

/// Returns how many commands Redis has run.
async fn commands(world: &World) -> u64 {
    let info: String = world.ask(cmd("INFO").arg("stats")).await;
    let line = info.lines().find_map(|line| line.strip_prefix("total_commands_processed:")).unwrap();
    line.trim().parse().unwrap()
}

async fn redis_time(world: &World) -> i64 {
    let (seconds, _): (i64, i64) = world.ask(&cmd("TIME")).await;
    seconds
}

#[tokio::test]
async fn a_14_1_replica_finds_our_entries() {
    let world = World::new(Kind::Server).await;
    let options = Options { url: "grpc://10.0.0.1:8155".to_owned(), ..world.options() };
    let a = world.start("a", options).await;
    let leases = (a.tracker.route(agent(123), methods()), a.tracker.connection(connection(7)));
    written(&a.tracker).await;
    let now = redis_time(&world).await;
    let found = hash(&world, &tunnels(123)).await;
    assert_eq!(found.len(), 1, "one entry per agent and replica, not per tunnel");
    let (field, value) = found.iter().next().unwrap();
    let value = ExpiringValue::decode(&**value).unwrap();
    let left = value.expires_at.unwrap().seconds - now;
    assert!((290..=300).contains(&left), "{left}");
    let info = TunnelInfo::decode(&*value.value.unwrap().value).unwrap();
    assert_eq!((info.agent_id, info.connection_id.to_string()), (123, field.clone()));
    assert_eq!(info.kas_url, "grpc://10.0.0.1:8155");
    let service = &info.agent_descriptor.unwrap().services[0];
    assert_eq!(format!("/{}/{}", service.name, service.methods[0].name), METHOD);
    for key in [key("agent_tracker:conn_by_agent_id:", 1), key("agent_tracker:conn_by_project_id:", 10)] {
        let found = hash(&world, &key).await;
        let value = ExpiringValue::decode(&**found.values().next().unwrap()).unwrap();
        let info = ConnectedAgentInfo::decode(&*value.value.unwrap().value).unwrap();
        assert_eq!((info.connection_id, info.agent_id, info.project_id), (7, 1, 10));
        assert_eq!(info.agent_meta.unwrap().version, "v14.1.0");
        // Not shorter than that of 14.1, and longer if no replica of 14.1 would lower it.
        let left: i64 = world.ask(cmd("PTTL").arg(&key)).await;
        assert!((290_000..=1_200_000).contains(&left), "{left}");
    }
    drop(leases);
    a.tracker.leave(TTL * 10).await;
    let left: i64 = world.ask(&cmd("DBSIZE")).await;
    assert_eq!(left, 0, "a replica that leaves removes all its keys");
}

#[tokio::test]
async fn agents_of_a_14_1_replica_are_listed_until_they_expire_by_the_clock_of_redis() {
    let world = World::new(Kind::Server).await;
    // The clock of the 14.1 replica is an hour behind.
    let run = u64::try_from(redis_time(&world).await - 3_600).unwrap() * 1_000_000;
    let a = world.start("a", Options { run, ..world.options() }).await;
    let now = redis_time(&world).await;
    let by_agent = key("agent_tracker:conn_by_agent_id:", 1);
    for (field, expires_at) in [(7, now + 60), (8, now - 60), (9, now - 1)] {
        let value = connected_of_14_1(field, expires_at);
        let _: i64 = world.ask(cmd("HSET").arg(&by_agent).arg(field).arg(value)).await;
    }
    let _: i64 = world.ask(cmd("HSET").arg(&by_agent).arg("10").arg("no value of anybody")).await;
    let listed = a.tracker.connected(Query::Agent(agent(1))).await.unwrap();
    let ids: Vec<i64> = listed.connections.iter().map(|located| located.connection.id.get()).collect();
    // An entry that has expired within the margin may be from a replica whose clock differs.
    assert_eq!((ids, listed.unanswered.len()), (vec![7, 9], 0));
    assert_eq!(listed.connections[0].replica.id.as_str(), "gitlab-kas");
    let mut left: Vec<String> = hash(&world, &by_agent).await.into_keys().collect();
    left.sort();
    assert_eq!(left, ["10", "7", "9"], "readers remove only expired entries");
}

#[tokio::test]
async fn a_list_of_all_agents_has_those_of_14_1_replicas_as_unconfirmed() {
    let world = World::new(Kind::Server).await;
    // The last one is a project whose id looks like a pattern.
    let projects = [20, 30, i64::from_le_bytes(*b"*[?\\]\n\0\0")];
    for (id, project) in (2..).zip(projects) {
        connect_to_14_1(&world, project, id).await;
    }
    let other: &[u8] = b"other:agent_tracker:conn_by_project_id:\x01\0\0\0\0\0\0\0";
    let value = connected_of_14_1(9, redis_time(&world).await + 300);
    let _: i64 = world.ask(cmd("HSET").arg(other).arg("9").arg(value)).await;
    // More keys than one page of a search.
    let many: Vec<String> =
        (0..5_000).flat_map(|number| [format!("of-gitlab:{number}"), String::new()]).collect();
    let _: () = world.ask(cmd("MSET").arg(many)).await;
    let (a, b) = (world.start("a", world.options()).await, world.start("b", world.options()).await);
    let _leases = (a.tracker.connection(connection(7)), b.tracker.connection(connection(1)));
    written(&a.tracker).await;
    written(&b.tracker).await;
    let mut changes = a.tracker.connection_changes();
    soon("all are listed", async {
        loop {
            let all = a.tracker.connected(Query::All).await.unwrap();
            // This replica may learn later that the other one is alive.
            if all.connections.len() == 5 {
                assert_eq!(all.unanswered, []);
                assert_eq!(listed(&all), [(1, false), (2, true), (3, true), (4, true), (7, false)]);
                assert_eq!(&*all.connections[1].replica.address, "gitlab-kas");
                return;
            }
            changes.changed().await.unwrap();
        }
    })
    .await;
    world.redis.stop().await;
    let all = a.tracker.connected(Query::All).await.unwrap();
    let missing: Vec<&str> = all.unanswered.iter().map(|missing| missing.replica.id.as_str()).collect();
    assert_eq!((listed(&all), missing), (vec![(7, false)], vec!["b", "gitlab-kas"]));
}

#[tokio::test]
async fn watched_lists_show_changes_at_14_1_replicas() {
    let world = World::new(Kind::Server).await;
    let a = world.start("a", world.options()).await;
    connect_to_14_1(&world, 20, 2).await;
    let mut changes = a.tracker.connection_changes();
    let mut list = async |expected: &[(i64, bool)]| {
        soon("the list changes", async {
            loop {
                changes.borrow_and_update();
                let all = a.tracker.connected(Query::All).await.unwrap();
                if listed(&all) == expected && all.unanswered.is_empty() {
                    return;
                }
                changes.changed().await.unwrap();
            }
        })
        .await;
    };
    list(&[(2, true)]).await;
    // In a project that no other agent has. 14.1 publishes nothing.
    connect_to_14_1(&world, 30, 3).await;
    list(&[(2, true), (3, true)]).await;
    let _: i64 = world.ask(cmd("DEL").arg(key("agent_tracker:conn_by_project_id:", 20))).await;
    list(&[(3, true)]).await;
}

#[tokio::test]
async fn a_list_that_cannot_wait_for_the_search_says_that_it_is_partial() {
    let world = World::new(Kind::Server).await;
    // The connection is made before it becomes slow.
    let one = world.patient();
    let one = Options { connect: Connect { pool_size: 1, ..one.connect.clone() }, ..one };
    let a = world.start("a", one).await;
    connect_to_14_1(&world, 20, 2).await;
    let mut changes = a.tracker.connection_changes();
    // In each direction.
    world.wire.slow(Duration::from_millis(1_500));
    let all = a.tracker.connected(Query::All).await.unwrap();
    assert_eq!(all.connections, []);
    assert_eq!(all.unanswered.len(), 1, "{all:?}");
    assert_eq!(all.unanswered[0].replica.id.as_str(), "gitlab-kas");
    assert!(all.unanswered[0].reason.contains("takes longer than 2s"), "{all:?}");
    assert!(!all.unanswered[0].given_up);
    world.wire.slow(Duration::ZERO);
    soon("the rest is listed after a wake-up", async {
        loop {
            changes.changed().await.unwrap();
            let all = a.tracker.connected(Query::All).await.unwrap();
            if all.unanswered.is_empty() && listed(&all) == [(2, true)] {
                return;
            }
        }
    })
    .await;
}

#[tokio::test]
async fn a_longer_expiry_set_by_another_client_stays() {
    let world = World::new(Kind::Server).await;
    let value = of_14_1("reverse_tunnel.tracker.TunnelInfo", Vec::new(), redis_time(&world).await + 7_200);
    let _: i64 = world.ask(cmd("HSET").arg(tunnels(1)).arg("5").arg(value)).await;
    let _: i64 = world.ask(cmd("PEXPIRE").arg(tunnels(1)).arg(7_200_000)).await;
    let options = Options {
        entry_ttl: Duration::from_secs(3),
        entry_refresh: Duration::from_millis(200),
        ..world.options()
    };
    let a = world.start("a", options).await;
    let lease = (a.tracker.route(agent(1), methods()), a.tracker.route(agent(2), methods()));
    written(&a.tracker).await;
    let before = hash(&world, &tunnels(1)).await;
    // After it was written again.
    soon("a refresh", async {
        while hash(&world, &tunnels(1)).await == before {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
    let left: i64 = world.ask(cmd("PTTL").arg(tunnels(1))).await;
    assert!(left > 7_100_000, "{left}");
    let left: i64 = world.ask(cmd("PTTL").arg(tunnels(2))).await;
    assert!((1..=12_000).contains(&left), "{left}");
    drop(lease);
    written(&a.tracker).await;
    assert_eq!(hash(&world, &tunnels(1)).await.into_keys().collect::<Vec<_>>(), ["5"]);
}

#[tokio::test]
async fn entries_are_refreshed_while_their_replica_is_live() {
    let world = World::new(Kind::Server).await;
    let options = || Options {
        entry_ttl: Duration::from_secs(2),
        entry_refresh: Duration::from_secs(1),
        ..world.options()
    };
    let (a, b) = (world.start("a", options()).await, world.start("b", options()).await);
    let _leases = (a.tracker.route(agent(1), methods()), a.tracker.connection(connection(7)));
    located(&b.tracker, 1, 1).await;
    let key = tunnels(1);
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(4) {
        let left: i64 = world.ask(cmd("PTTL").arg(&key)).await;
        assert!(left > 0, "the hash has expired or has no expiry: {left}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let c = world.start("c", options()).await;
    located(&c.tracker, 1, 1).await;
    assert_eq!(c.tracker.connected(Query::All).await.unwrap().connections.len(), 1);
}

/// Returns how often Redis has run a command.
async fn calls(world: &World, command: &str) -> u64 {
    let info: String = world.ask(cmd("INFO").arg("commandstats")).await;
    let line = info.lines().find_map(|line| line.strip_prefix(&format!("cmdstat_{command}:calls=")));
    line.map_or(0, |line| line.split(',').next().unwrap().parse().unwrap())
}

#[tokio::test]
async fn refreshes_set_no_expiry_until_a_14_1_replica_is_seen_and_then_each_time() {
    const ENTRY_TTL: Duration = Duration::from_secs(12);
    let world = World::new(Kind::Server).await;
    let refreshing =
        Options { entry_ttl: ENTRY_TTL, entry_refresh: Duration::from_secs(1), ..world.patient() };
    let a = world.start("a", refreshing).await;
    let b = world.start("b", world.patient()).await;
    let _leases: Vec<_> = (1..=100).map(|id| a.tracker.route(agent(id), methods())).collect();
    written(&a.tracker).await;
    let refreshed = async |from: u64, times: u64| {
        soon("refreshes", async {
            while calls(&world, "hset").await < from + times {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        })
        .await;
    };
    let (sets, expiries) = (calls(&world, "hset").await, calls(&world, "pexpire").await);
    refreshed(sets, 200).await;
    let pure = calls(&world, "pexpire").await - expiries;
    // These are from heartbeats, and from the few hashes whose expiry is due.
    assert!(pure < 60, "{pure} expiries for 200 refreshes");
    // Another replica sees it when it looks the agent up.
    let value = of_14_1("reverse_tunnel.tracker.TunnelInfo", Vec::new(), redis_time(&world).await + 300);
    let _: i64 = world.ask(cmd("HSET").arg(tunnels(50)).arg("5").arg(value)).await;
    let _: i64 = world.ask(cmd("PEXPIRE").arg(tunnels(50)).arg(ENTRY_TTL.as_millis() as u64)).await;
    let lowered = Instant::now();
    located(&b.tracker, 50, 1).await;
    // Its next heartbeat announces it, and the next heartbeat of the other reads it.
    soon("both know it", async {
        loop {
            b.tracker.announce(ReplicaState::Ready);
            a.tracker.announce(ReplicaState::Ready);
            let expiries = calls(&world, "pexpire").await;
            let sets = calls(&world, "hset").await;
            refreshed(sets, 50).await;
            if calls(&world, "pexpire").await >= expiries + 50 {
                return;
            }
        }
    })
    .await;
    // In this order, so that refreshes between the two answers count only for the expiries.
    let expiries = calls(&world, "pexpire").await;
    let sets = calls(&world, "hset").await;
    refreshed(sets, 200).await;
    let mixed = calls(&world, "pexpire").await - expiries;
    assert!(mixed >= 200, "{mixed} expiries for 200 refreshes");
    assert_eq!(hash(&world, &tunnels(50)).await.len(), 2);
    let left: u64 = world.ask(cmd("PTTL").arg(tunnels(50))).await;
    assert!(
        lowered.elapsed() + Duration::from_millis(left) > ENTRY_TTL,
        "an expiry that 14.1 has lowered is raised again"
    );
}

#[tokio::test]
async fn a_14_1_replica_that_holds_an_agent_is_located_by_its_url() {
    let world = World::new(Kind::Server).await;
    let b = world.start("b", world.options()).await;
    let tunnel = |url: &str| TunnelInfo { agent_id: 1, kas_url: url.to_owned(), ..TunnelInfo::default() };
    let until = redis_time(&world).await + 300;
    for (field, url) in [(1, "grpc://10.0.0.9:8155"), (2, "grpc://10.0.0.9:8155"), (3, "")] {
        let value = of_14_1("reverse_tunnel.tracker.TunnelInfo", tunnel(url).encode_to_vec(), until);
        let _: i64 = world.ask(cmd("HSET").arg(tunnels(1)).arg(field).arg(value)).await;
    }
    located(&b.tracker, 1, 1).await;
    let found = b.tracker.locate(agent(1)).await.unwrap();
    assert_eq!(found[0].wire, Wire::Gitlab);
    assert_eq!(found[0].replica.id.as_str(), "grpc://10.0.0.9:8155");
    assert_eq!(&*found[0].replica.address, "grpc://10.0.0.9:8155");
    let views = b.tracker.views(agent(1));
    assert_eq!(views.len(), 1);
    assert_eq!((views[0].replica.id.as_str(), views[0].holds), ("grpc://10.0.0.9:8155", true));
    assert_eq!(views[0].wire, Wire::Gitlab, "it cannot be asked for a report");
    b.tracker.not_here(&found[0].replica.id, agent(1), b.tracker.mark());
    assert_eq!(b.tracker.locate(agent(1)).await.unwrap(), []);
    // 14.1 publishes nothing, so the agent is read again.
    located(&b.tracker, 1, 1).await;
    let _: i64 = world.ask(cmd("DEL").arg(tunnels(1))).await;
    located(&b.tracker, 1, 0).await;
}

#[tokio::test]
async fn shared_counts_are_sums_and_expire() {
    let world = World::new(Kind::Server).await;
    let (a, b) = (world.start("a", world.options()).await, world.start("b", world.options()).await);
    // Mostly long enough that no window ends within the test. If one does, the test starts again.
    let window = Duration::from_secs(1_000_000_000);
    let charge = |what: &str, times| (what.to_owned(), times);
    let first = a.tracker.count("x", &[charge("one", 3), charge("two", 1)], window).await.unwrap();
    assert_eq!(first.totals, [3, 1]);
    let second = b.tracker.count("x", &[charge("two", 5), charge("one", 2)], window).await.unwrap();
    assert_eq!((second.totals, second.window), (vec![6, 5], first.window));
    assert_eq!(b.tracker.count("y", &[charge("one", 1)], window).await.unwrap().totals, [1]);
    let keys: Vec<Vec<u8>> = world.ask(cmd("KEYS").arg("gitlab-kas:kas:count:*")).await;
    assert_eq!(keys.len(), 3);
    for key in keys {
        let left: i64 = world.ask(cmd("PTTL").arg(key)).await;
        assert!(left > 0, "{left}");
    }
    world.redis.stop().await;
    assert!(a.tracker.count("x", &[charge("one", 1)], window).await.is_err());
}

#[tokio::test]
async fn ten_thousand_waiters_for_an_agent_cost_one_subscription_and_no_commands() {
    let world = World::new(Kind::Server).await;
    let (a, b) = (world.start("a", world.options()).await, world.start("b", world.options()).await);
    let waiting: Vec<_> = (0..10_000)
        .map(|_| {
            let tracker = Arc::clone(&b.tracker);
            tokio::spawn(async move { located(&tracker, 1, 1).await })
        })
        .collect();
    // Each of them has looked up the agent once.
    located(&b.tracker, 1, 0).await;
    tokio::task::yield_now().await;
    let before = commands(&world).await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    let during = commands(&world).await - before;
    // The heartbeats of two replicas with a ttl of a second, and the commands of this test.
    assert!(during < 200, "{during} commands in two seconds");
    soon("one subscription for each replica", async {
        loop {
            let subscribed: Vec<(String, u64)> =
                world.ask(cmd("PUBSUB").arg("NUMSUB").arg("gitlab-kas:kas:events")).await;
            if subscribed[0].1 == 2 {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
    let begun = Instant::now();
    let _lease = a.tracker.route(agent(1), methods());
    for task in waiting {
        task.await.unwrap();
    }
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
}

#[tokio::test]
async fn cached_agents_are_located_without_redis() {
    let world = World::new(Kind::Server).await;
    let (a, b) = (world.start("a", world.options()).await, world.start("b", world.options()).await);
    let _lease = a.tracker.route(agent(1), methods());
    located(&b.tracker, 1, 1).await;
    located(&b.tracker, 2, 0).await;
    world.redis.pause().await;
    let begun = Instant::now();
    for _ in 0..1_000 {
        assert_eq!(b.tracker.locate(agent(1)).await.unwrap().len(), 1);
        assert_eq!(b.tracker.locate(agent(2)).await.unwrap().len(), 0);
    }
    // Each lookup that waits for Redis waits for a tenth of a second.
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?} for 2,000", begun.elapsed());
    // A lookup of an unknown agent waits for a short time. Own agents are found even then.
    let own = b.tracker.route(agent(3), methods());
    assert_eq!(b.tracker.locate(agent(3)).await.unwrap().len(), 1);
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    world.redis.resume().await;
    located(&a.tracker, 3, 1).await;
    drop(own);
}

#[tokio::test]
async fn a_lost_subscription_is_made_again_and_loses_no_change() {
    let world = World::new(Kind::Server).await;
    let (a, b) = (world.start("a", world.options()).await, world.start("b", world.options()).await);
    located(&b.tracker, 1, 0).await;
    for _ in 0..5 {
        let killed: u64 = world.ask(cmd("CLIENT").arg("KILL").arg("TYPE").arg("pubsub")).await;
        assert!(killed > 0);
        let lease = a.tracker.route(agent(1), methods());
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
async fn a_slow_redis_delays_only_new_agents() {
    let world = World::new(Kind::Server).await;
    let options = || Options { ttl: Duration::from_secs(10), ..world.options() };
    let (a, b) = (world.start("a", options()).await, world.start("b", options()).await);
    let _old = a.tracker.route(agent(1), methods());
    located(&b.tracker, 1, 1).await;
    // In each direction.
    world.wire.slow(Duration::from_millis(500));
    // The best of three, because the machine may stall.
    let (mut new, mut least) = (Vec::new(), Duration::MAX);
    for id in 2..5 {
        let begun = Instant::now();
        assert_eq!(b.tracker.locate(agent(1)).await.unwrap().len(), 1);
        new.push(a.tracker.route(agent(id), methods()));
        assert_eq!(a.tracker.locate(agent(id)).await.unwrap().len(), 1);
        least = least.min(begun.elapsed());
    }
    assert!(least < Duration::from_millis(900), "{least:?}");
    located(&b.tracker, 2, 1).await;
    for running in [&a, &b] {
        let mut health = running.tracker.health();
        let slow = health.wait_for(|health| health.latency.is_some_and(|latency| latency.as_secs() >= 1));
        soon("the delay is reported", slow).await.unwrap();
        calm(&running.tracker).await;
        assert_eq!(running.tracker.replicas().await.replicas.len(), 2);
    }
}

#[tokio::test]
async fn replicas_stay_live_in_a_full_redis_with_an_alarm() {
    let world = World::new(Kind::Server).await;
    let (a, b) = (world.start("a", world.patient()).await, world.start("b", world.patient()).await);
    let _old = a.tracker.route(agent(1), methods());
    located(&b.tracker, 1, 1).await;
    let _: () = world.ask(cmd("CONFIG").arg("SET").arg("maxmemory").arg(1)).await;
    let new = a.tracker.route(agent(2), methods());
    let mut health = a.tracker.health();
    let full = health
        .wait_for(|h| !h.announced && h.last_error.as_ref().is_some_and(|(text, _)| text.contains("OOM")));
    soon("a full Redis is reported", full).await.unwrap();
    assert!(a.tracker.alarms()[0].contains("OOM"), "{:?}", a.tracker.alarms());
    // Longer than the ttl: extending the liveness key needs no memory.
    tokio::time::sleep(LONG + TTL).await;
    let lag = a.tracker.status().lag.expect("something is not written");
    assert!(lag >= LONG, "{lag:?}");
    assert_eq!(b.tracker.locate(agent(1)).await.unwrap().len(), 1);
    let _: () = world.ask(cmd("CONFIG").arg("SET").arg("maxmemory").arg(0)).await;
    located(&b.tracker, 2, 1).await;
    written(&a.tracker).await;
    calm(&a.tracker).await;
    drop(new);
}

#[tokio::test]
async fn a_primary_that_became_read_only_is_abandoned() {
    let world = World::new(Kind::Server).await;
    let a = world.start("a", world.options()).await;
    let _lease = a.tracker.route(agent(1), methods());
    written(&a.tracker).await;
    let nobody = testkit::redis::free_port().await.unwrap().to_string();
    let _: () = world.ask(cmd("REPLICAOF").arg("127.0.0.1").arg(&nobody)).await;
    let _new = a.tracker.route(agent(2), methods());
    let mut health = a.tracker.health();
    let refused = health.wait_for(|health| {
        health.last_error.as_ref().is_some_and(|(text, _)| text.to_lowercase().contains("readonly"))
    });
    soon("the refusal is reported", refused).await.unwrap();
    let _: () = world.ask(cmd("REPLICAOF").arg("NO").arg("ONE")).await;
    written(&a.tracker).await;
    assert_eq!(hash(&world, &tunnels(2)).await.len(), 1);
}

#[tokio::test]
async fn two_processes_of_one_id_raise_an_alarm_and_the_later_one_counts() {
    let world = World::new(Kind::Server).await;
    let b = world.start("b", world.options()).await;
    let old = world.start("a", world.options()).await;
    let _old = old.tracker.route(agent(1), methods());
    located(&b.tracker, 1, 1).await;
    let new = world.start("a", world.options()).await;
    let _new = new.tracker.route(agent(2), methods());
    located(&b.tracker, 2, 1).await;
    located(&b.tracker, 1, 0).await;
    soon("the earlier process says it", async {
        while !old
            .tracker
            .alarms()
            .iter()
            .any(|alarm| alarm.contains("replica id a is in use by another process"))
        {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
    calm(&new.tracker).await;
    // It leaves without removing keys of the other process.
    old.tracker.leave(TTL * 10).await;
    drop(old);
    tokio::time::sleep(TTL).await;
    located(&b.tracker, 2, 1).await;
}

/// Clocks of replicas are an hour apart, and one is set back while its replica is down. Clocks only decide
/// which of two processes of a replica is the later one.
#[tokio::test]
async fn wrong_clocks_are_harmless_and_one_that_is_set_back_costs_one_ttl() {
    const HOUR: i64 = 3_600;
    let world = World::new(Kind::Server).await;
    let now = redis_time(&world).await;
    let at = |seconds: i64| Options { run: u64::try_from(seconds).unwrap() * 1_000_000, ..world.options() };
    let (early, late) = (world.start("a", at(now - HOUR)).await, world.start("b", at(now + HOUR)).await);
    let _early = early.tracker.route(agent(1), methods());
    let lease = late.tracker.route(agent(2), methods());
    located(&late.tracker, 1, 1).await;
    located(&early.tracker, 2, 1).await;
    for id in [1, 2] {
        let found = hash(&world, &tunnels(id)).await;
        let value = ExpiringValue::decode(&**found.values().next().unwrap()).unwrap();
        let left = value.expires_at.unwrap().seconds - redis_time(&world).await;
        assert!((280..=300).contains(&left), "{left}");
    }
    // It crashes, and returns with a correct clock.
    let killed = Instant::now();
    Box::new(late).crash().await;
    drop(lease);
    let back = Running::start("b", at(now));
    let _back = back.tracker.route(agent(2), methods());
    let _other = back.tracker.route(agent(3), methods());
    for id in [2, 3] {
        located(&early.tracker, id, 1).await;
        let found = early.tracker.locate(agent(id)).await.unwrap();
        assert_eq!(found[0].replica.id.as_str(), "b");
    }
    // The key of the earlier process was extended once before it was read, and the heartbeats after that are
    // rare.
    assert!(killed.elapsed() < TTL * 12, "{:?}", killed.elapsed());
    // No replica reports that its id is in use.
    calm(&back.tracker).await;
}

#[tokio::test]
async fn garbage_of_crashed_replicas_is_removed_from_shared_hashes() {
    let world = World::new(Kind::Server).await;
    let options = Options { gc: Duration::from_secs(1), ..world.options() };
    let a = world.start("a", options).await;
    let _lease = a.tracker.route(agent(1), methods());
    written(&a.tracker).await;
    let over = redis_time(&world).await - 60;
    for field in 0..2_000 {
        let value = of_14_1("reverse_tunnel.tracker.TunnelInfo", Vec::new(), over);
        let _: i64 = world.ask(cmd("HSET").arg(tunnels(1)).arg(field).arg(value)).await;
    }
    soon("only what lives is left", async {
        while hash(&world, &tunnels(1)).await.len() > 1 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
}

#[tokio::test]
async fn ten_thousand_agents_are_announced_again_when_redis_is_back() {
    let world = World::new(Kind::Server).await;
    let (a, b) = (world.start("a", world.options()).await, world.start("b", world.options()).await);
    let _leases: Vec<_> = (1..=10_000).map(|id| a.tracker.route(agent(id), methods())).collect();
    written(&a.tracker).await;
    located(&b.tracker, 10_000, 1).await;
    world.redis.stop().await;
    let mut health = a.tracker.health();
    soon("the loss is noticed", health.wait_for(|health| !health.reachable)).await.unwrap();
    world.redis.start().await.unwrap();
    soon("Redis is back", health.wait_for(|health| health.reachable)).await.unwrap();
    let begun = Instant::now();
    written(&a.tracker).await;
    // Without optimization, and in parallel with other tests.
    assert!(begun.elapsed() < Duration::from_secs(15), "{:?}", begun.elapsed());
    eprintln!("10,000 agents were announced again in {:?}", begun.elapsed());
    assert_eq!(hash(&world, &tunnels(10_000)).await.len(), 1);
}

#[tokio::test]
async fn states_of_replicas_are_seen_at_once() {
    let world = World::new(Kind::Server).await;
    let (a, b) = (world.start("a", world.options()).await, world.start("b", world.options()).await);
    let _lease = a.tracker.route(agent(1), methods());
    located(&b.tracker, 1, 1).await;
    let mut changes = b.tracker.changes(agent(1));
    a.tracker.announce(ReplicaState::Draining);
    soon("a draining replica is asked last", async {
        loop {
            let found = b.tracker.locate(agent(1)).await.unwrap_or_default();
            if found.first().is_some_and(|first| first.health == cluster::ReplicaHealth::Draining) {
                return;
            }
            changes.changed().await.unwrap();
        }
    })
    .await;
    let replicas = b.tracker.replicas().await.replicas;
    assert_eq!(replicas.len(), 2);
    assert_eq!((replicas[1].state.as_str(), replicas[1].agents), ("draining", 1));
    assert_eq!(&*replicas[1].replica.address, "a:8155");
}

#[tokio::test]
async fn an_unreachable_redis_is_reported() {
    let world = World::new(Kind::Server).await;
    world.redis.stop().await;
    let a = Running::start("a", world.options());
    let mut health = a.tracker.health();
    soon("that is noticed", health.wait_for(|health| health.last_error.is_some())).await.unwrap();
    let error = a.tracker.locate(agent(1)).await.unwrap_err();
    assert_eq!(error.to_string(), "Redis cannot be reached");
    let own = a.tracker.route(agent(1), methods());
    assert_eq!(a.tracker.locate(agent(1)).await.unwrap().len(), 1);
    let listed = a.tracker.connected(Query::All).await.unwrap();
    assert!(listed.unanswered[0].reason.starts_with("Redis cannot be reached"), "{listed:?}");
    assert!(!*a.tracker.ready().borrow());
    world.redis.start().await.unwrap();
    let mut ready = a.tracker.ready();
    soon("it is ready once Redis is", ready.wait_for(|ready| *ready)).await.unwrap();
    located(&a.tracker, 2, 0).await;
    world.redis.stop().await;
    soon("the loss is noticed", health.wait_for(|health| !health.reachable)).await.unwrap();
    // It had no owner a moment ago, and may have one now.
    assert!(a.tracker.locate(agent(2)).await.is_err());
    assert_eq!(a.tracker.locate(agent(1)).await.unwrap().len(), 1);
    drop(own);
    world.redis.start().await.unwrap();
    Box::new(a).leave().await;
}

#[tokio::test]
async fn foreign_values_under_the_prefix_are_harmless() {
    let world = World::new(Kind::Server).await;
    let (a, b) = (world.start("a", world.options()).await, world.start("b", world.options()).await);
    let garbage: &[u8] = &[0xff, 0xfe, 0x00];
    let _: i64 = world.ask(cmd("HSET").arg("gitlab-kas:kas:replicas").arg(garbage).arg(garbage)).await;
    let _: i64 = world.ask(cmd("HSET").arg("gitlab-kas:kas:replicas").arg("c").arg("1")).await;
    let _: () = world.ask(cmd("SET").arg("gitlab-kas:kas:replica:c").arg(garbage)).await;
    let _: i64 = world.ask(cmd("SADD").arg("gitlab-kas:kas:projects:a").arg(garbage)).await;
    let _: i64 = world.ask(cmd("HSET").arg(tunnels(1)).arg("1").arg(garbage)).await;
    let _: () = world.ask(cmd("SET").arg(tunnels(2)).arg("of another type")).await;
    let _: i64 = world.ask(cmd("PUBLISH").arg("gitlab-kas:kas:events").arg(garbage)).await;
    let _leases = (a.tracker.route(agent(1), methods()), a.tracker.connection(connection(7)));
    located(&b.tracker, 1, 1).await;
    located(&b.tracker, 2, 0).await;
    // Heartbeats continue.
    tokio::time::sleep(TTL * 2).await;
    soon("all is as it was", async {
        loop {
            let health = b.tracker.health().borrow().clone();
            let listed = b.tracker.connected(Query::All).await.unwrap();
            let replicas = b.tracker.replicas().await.replicas.len();
            let counts = (listed.connections.len(), listed.unanswered.len(), replicas);
            if health.reachable && health.listening && counts == (1, 0, 2) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
}

#[tokio::test]
async fn an_idle_agent_costs_little_more_than_one_command_per_refresh() {
    const AGENTS: u64 = 1_000;
    let world = World::new(Kind::Server).await;
    let refresh = Duration::from_secs(1);
    let options = Options { entry_ttl: refresh * 2, entry_refresh: refresh, ..world.patient() };
    let a = world.start("a", options).await;
    let _leases: Vec<_> =
        (1..=AGENTS).map(|id| a.tracker.route(agent(i64::try_from(id).unwrap()), methods())).collect();
    written(&a.tracker).await;
    // From here on, each agent is refreshed once in this time.
    tokio::time::sleep(refresh).await;
    let (refreshed, begun) = (calls(&world, "hset").await, Instant::now());
    let before = commands(&world).await;
    tokio::time::sleep(refresh * 3).await;
    let during = commands(&world).await - before;
    let refreshes = begun.elapsed().as_secs_f64() / refresh.as_secs_f64() * AGENTS as f64;
    let each = during as f64 / refreshes;
    eprintln!("{each:.2} commands for each refresh");
    // HSET, and sometimes PEXPIRE. Transactions, heartbeats and the commands of this test are shared by many
    // agents.
    assert!(each < 1.6, "{each:.2}");
    soon("each is refreshed three times", async {
        while calls(&world, "hset").await < refreshed + 3 * AGENTS {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    })
    .await;
}
