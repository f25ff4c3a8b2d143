//! What happens when calls fail, planners die, or there are two: the end is always the same, and the rule of
//! what may be deleted is never broken.

use std::collections::BTreeSet;

use http::Method;
use serde_json::{Value, json};

use super::{
    fake::{Fault, Wire},
    *,
};
use crate::OWNER_ANNOTATION;

/// What is in the cluster after `SECOND`.
fn expected() -> BTreeSet<String> {
    let world = World::new(SECOND);
    let mut paths = world.server.paths();
    paths.extend(
        [
            "/api/v1/namespaces/shop",
            "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/widgets.example.com",
            A,
            "/api/v1/namespaces/default/secrets/s",
            INVENTORY,
        ]
        .map(str::to_owned),
    );
    paths
}

/// A world in which `FIRST` is applied and `SECOND` is pushed.
async fn before_second() -> World {
    let mut world = World::new(FIRST);
    world.synced().await;
    world.repository.push("c2", SECOND);
    world
}

/// Syncs until it is done; a few tries are enough.
async fn until_synced(world: &mut World) {
    for _ in 0..5 {
        if world.sync().await.outcome == Outcome::Synced {
            return;
        }
        tokio::time::sleep(Duration::from_secs(30)).await;
    }
    panic!("never synced");
}

/// How many calls a whole sync of the second commit makes.
async fn calls_of_second() -> usize {
    let mut world = before_second().await;
    let wire = Arc::new(Wire::new(&world.server, "count"));
    world.replace(wire.clone());
    world.synced().await;
    wire.calls()
}

#[tokio::test(start_paused = true)]
async fn a_planner_that_dies_after_any_call_is_completed_by_the_next() {
    let calls = calls_of_second().await;
    assert!(calls > 20, "{calls}");
    for number in 0..calls {
        let mut world = before_second().await;
        let wire = Wire::new(&world.server, "dying").with_fault(number, Fault::Die);
        world.replace(wire.clone());
        let died = {
            let set = world.repository.set();
            let observer = |_: Progress| {};
            let sync = Sync {
                project: &world.project,
                set: &set,
                head: &*world.repository,
                scope: Scope::All,
                prune: PruneWhen::Current,
                observer: &observer,
            };
            tokio::select! {
                biased;
                () = wire.dead.notified() => true,
                _ = world.engine.sync(sync, &mut world.memory) => false,
            }
        };
        assert!(died, "call {number} was not made");
        world.check();
        world.replace(Arc::new(Wire::new(&world.server, "next")));
        until_synced(&mut world).await;
        assert_eq!(world.server.paths(), expected(), "after call {number}");
        assert_eq!(world.keys().len(), 4);
    }
}

#[tokio::test(start_paused = true)]
async fn a_planner_that_dies_before_a_revert_deletes_nothing_of_it() {
    // The next planner has another head than the one that died: the first commit again.
    for number in 0..calls_of_second().await {
        let mut world = before_second().await;
        let wire = Wire::new(&world.server, "dying").with_fault(number, Fault::Die);
        world.replace(wire.clone());
        {
            let set = world.repository.set();
            let observer = |_: Progress| {};
            let sync = Sync {
                project: &world.project,
                set: &set,
                head: &*world.repository,
                scope: Scope::All,
                prune: PruneWhen::Current,
                observer: &observer,
            };
            tokio::select! {
                biased;
                () = wire.dead.notified() => {}
                _ = world.engine.sync(sync, &mut world.memory) => panic!("call {number} was not made"),
            }
        }
        world.repository.push("c3", FIRST);
        world.replace(Arc::new(Wire::new(&world.server, "next")));
        until_synced(&mut world).await;
        assert_eq!(world.keys().len(), 6, "after call {number}");
        assert!(world.server.get("/api/v1/namespaces/default/secrets/s").is_none());
        assert!(world.server.get("/apis/example.com/v1/namespaces/shop/widgets/w").is_some());
    }
}

#[tokio::test(start_paused = true)]
async fn a_call_that_fails_in_any_way_is_made_good() {
    let faults = [
        Fault::Reset,
        Fault::NotSent,
        Fault::Status(500),
        Fault::Status(409),
        Fault::Status(429),
        Fault::Status(403),
    ];
    for fault in faults {
        for number in 0..calls_of_second().await {
            let mut world = before_second().await;
            world.replace(Wire::new(&world.server, "faulty").with_fault(number, fault));
            until_synced(&mut world).await;
            assert_eq!(world.server.paths(), expected(), "{fault:?} at call {number}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn two_planners_at_once_end_as_one() {
    for round in 0..60 {
        let mut world = before_second().await;
        let second = {
            let wire = Wire::new(&world.server, "two").with_jitter();
            World::engine(wire)
        };
        world.replace(Wire::new(&world.server, "one").with_jitter());
        let project = Project { replica: "replica-2".to_owned(), ..world.project.clone() };
        let repository = world.repository.clone();
        let one = async {
            for _ in 0..4 {
                world.sync().await;
                tokio::time::sleep(Duration::from_millis(rand::random_range(0..40_000))).await;
            }
        };
        let two = async {
            let mut memory = Memory::default();
            let observer = |_: Progress| {};
            for step in 0..4 {
                let set = repository.set();
                let sync = Sync {
                    project: &project,
                    set: &set,
                    head: &*repository,
                    scope: Scope::All,
                    prune: PruneWhen::Current,
                    observer: &observer,
                };
                second.sync(sync, &mut memory).await;
                // The head moves while both are at work.
                if step == 0 {
                    repository.push("c3", FIRST);
                    repository.push("c4", SECOND);
                }
                tokio::time::sleep(Duration::from_millis(rand::random_range(0..40_000))).await;
            }
        };
        tokio::join!(one, two);
        until_synced(&mut world).await;
        assert_eq!(world.server.paths(), expected(), "round {round}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_planner_that_was_replaced_notices_within_the_time_of_the_fence() {
    // A deployment that never becomes current keeps the first planner waiting.
    let deployment = "---\napiVersion: apps/v1\nkind: Deployment\nmetadata: {name: d}\nspec: {replicas: 1}\n";
    let mut world = World::new(&(config_map("a") + deployment));
    world.project.reconcile_timeout = Duration::from_secs(3_600);
    let begin = tokio::time::Instant::now();
    let server = world.server.clone();
    let other = async {
        tokio::time::sleep(Duration::from_secs(60)).await;
        server.edit(INVENTORY, |inventory| {
            inventory["metadata"]["annotations"]["kas/fence"] = json!("other:1")
        });
    };
    let (report, ()) = tokio::join!(world.sync(), other);
    assert_eq!(report.outcome, Outcome::Fenced);
    assert!(begin.elapsed() < Duration::from_secs(75), "{:?}", begin.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_planner_that_was_paused_writes_nothing_before_its_fence() {
    let objects: String = (0..120).map(|n| config_map(&format!("m{n}"))).collect();
    let mut world = World::new(&objects);
    let budget = Budget::default();
    world.engine = Engine::new(Arc::new(Wire::new(&world.server, "one")), budget.clone());
    let server = world.server.clone();
    let replaced = async {
        // In the middle of the applies nothing is sent any more, as if the process were stopped.
        tokio::time::sleep(Duration::from_millis(300)).await;
        budget.pace.pause(Duration::from_secs(40));
        tokio::time::sleep(Duration::from_secs(20)).await;
        server.edit(INVENTORY, |inventory| {
            inventory["metadata"]["annotations"]["kas/fence"] = json!("other:1")
        });
        server.log().len()
    };
    let (report, before) = tokio::join!(world.sync(), replaced);
    assert_eq!(report.outcome, Outcome::Fenced);
    let log = world.server.log();
    let writes =
        log.iter().skip(before).filter(|entry| entry.method != "GET" && !entry.target.contains("inventory"));
    let writes: Vec<&str> = writes.map(|entry| entry.target.as_str()).collect();
    assert!(writes.is_empty(), "{} writes: {writes:?}", writes.len());
    let applied = log.iter().take(before).filter(|entry| entry.target.contains("/configmaps/m")).count();
    assert!((1..120).contains(&applied), "{applied} were applied before");
}

#[tokio::test(start_paused = true)]
async fn a_planner_that_was_paused_alone_goes_on() {
    let objects: String = (0..120).map(|n| config_map(&format!("m{n}"))).collect();
    let mut world = World::new(&objects);
    let budget = Budget::default();
    world.engine = Engine::new(Arc::new(Wire::new(&world.server, "one")), budget.clone());
    let paused = async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        budget.pace.pause(Duration::from_secs(40));
    };
    let (report, ()) = tokio::join!(world.sync(), paused);
    assert_eq!(report.outcome, Outcome::Synced, "{report:?}");
    assert_eq!(world.keys().len(), 120);
}

/// A wrong planner: it deletes what its inventory has and its set has not. `looks_at_mark`, `head_first`:
/// what it does right, and wrong.
fn wrong_planner(world: &World, head_first: bool, between: impl FnOnce(), looks_at_mark: bool) {
    let wire = Wire::new(&world.server, "wrong");
    let list =
        format!("/api/v1/namespaces/default/configmaps?labelSelector={}%3D7-9", ID_LABEL.replace('/', "%2F"));
    let read = || -> BTreeSet<String> {
        let (_, list) = wire.by_hand(Method::GET, &list, Value::Null);
        list["items"][0]["data"].as_object().unwrap().keys().cloned().collect()
    };
    let (inventory, set) = if head_first {
        let set = world.repository.heads().pop().unwrap().1;
        between();
        (read(), set)
    } else {
        let inventory = read();
        between();
        (inventory, world.repository.heads().pop().unwrap().1)
    };
    for key in inventory.difference(&set) {
        let id = crate::inventory::parse_key(key).unwrap();
        assert_eq!(&*id.kind, "ConfigMap", "the wrong planner knows no other kind");
        let path = format!("/api/v1/namespaces/{}/configmaps/{}", id.namespace, id.name);
        let (_, object) = wire.by_hand(Method::GET, &path, Value::Null);
        if !looks_at_mark || object["metadata"]["annotations"][OWNER_ANNOTATION] == "7-9" {
            wire.by_hand(Method::DELETE, &path, json!({}));
        }
    }
}

fn violations(world: &World) -> Vec<String> {
    checker::violations(&world.server.log(), &world.repository.heads(), "7-9")
}

#[tokio::test(start_paused = true)]
async fn the_checker_finds_a_planner_that_skips_the_mark() {
    for looks_at_mark in [true, false] {
        let mut world = World::new(&(config_map("a") + &config_map("b")));
        world.synced().await;
        world.server.edit(A, |object| object["metadata"]["annotations"] = json!({}));
        world.repository.push("c2", &config_map("b"));
        wrong_planner(&world, false, || {}, looks_at_mark);
        let expected =
            if looks_at_mark { vec![] } else { vec!["default_a__ConfigMap was deleted without the mark"] };
        assert_eq!(violations(&world), expected);
    }
}

#[tokio::test(start_paused = true)]
async fn the_checker_finds_a_planner_that_reads_the_head_first() {
    for head_first in [false, true] {
        let mut world = World::new(&config_map("b"));
        world.synced().await;
        // Between its two reads another planner applies a newer head, which has one more object.
        let (server, repository) = (world.server.clone(), world.repository.clone());
        let between = || {
            let mark = json!({ OWNER_ANNOTATION: "7-9" });
            repository.push("c2", &(config_map("a") + &config_map("b")));
            server.create(
                "/api/v1/namespaces/default/configmaps",
                json!({ "apiVersion": "v1", "kind": "ConfigMap",
                    "metadata": { "name": "a", "namespace": "default", "annotations": mark } }),
            );
            server.edit(INVENTORY, |inventory| inventory["data"]["default_a__ConfigMap"] = json!(""));
        };
        wrong_planner(&world, head_first, between, true);
        let text = "default_a__ConfigMap was deleted although every head since the inventory was read has it";
        assert_eq!(violations(&world), if head_first { vec![text] } else { vec![] });
    }
}
