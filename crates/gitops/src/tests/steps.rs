//! Each row of the rules of planning, applying, waiting and pruning.

use serde_json::json;

use super::*;
use crate::{
    ChangeAction, DiffError, DiffOptions, DryRun, Head, Health, InventoryPolicy, OWNER_ANNOTATION, ObjectId,
    Stop,
};

#[tokio::test(start_paused = true)]
async fn a_first_sync_creates_everything_and_a_second_changes_nothing() {
    let mut world = World::new(FIRST);
    let report = world.synced().await;
    assert_eq!(report.objects.len(), 6);
    assert!(report.objects.iter().all(|object| object.action == Action::Created));
    assert!(report.objects.iter().all(|object| object.health == Health::Current));
    assert_eq!(report.inventory.unwrap().name, "inventory-7-9");
    assert_eq!(
        world.keys(),
        [
            "_a__b_rbac.authorization.k8s.io_ClusterRole",
            "_shop__Namespace",
            "_widgets.example.com_apiextensions.k8s.io_CustomResourceDefinition",
            "default_a__ConfigMap",
            "shop_b__ConfigMap",
            "shop_w_example.com_Widget",
        ]
    );
    let a = world.server.get(A).unwrap();
    assert_eq!(a["metadata"]["annotations"][OWNER_ANNOTATION], "7-9");
    let inventory = world.server.get(INVENTORY).unwrap();
    assert_eq!(inventory["metadata"]["annotations"]["kas/commit"], "c1");
    let report = world.synced().await;
    assert!(report.objects.iter().all(|object| object.action == Action::Unchanged), "{report:#?}");
    let engine = world.engine.clone();
    assert_eq!(
        engine.applied_commit(&world.project, &world.repository.set()).await,
        Ok(Some("c1".to_owned()))
    );
}

#[tokio::test(start_paused = true)]
async fn what_leaves_the_set_is_pruned_in_reverse_order() {
    let mut world = World::new(FIRST);
    world.synced().await;
    world.repository.push("c2", SECOND);
    let report = world.synced().await;
    let of = |wanted: Action| -> Vec<String> {
        report
            .objects
            .iter()
            .filter(|object| object.action == wanted)
            .map(|object| object.id.to_string())
            .collect()
    };
    assert_eq!(
        of(Action::Pruned),
        ["Widget.example.com shop/w", "ConfigMap shop/b", "ClusterRole.rbac.authorization.k8s.io a:b",]
    );
    assert_eq!(
        (of(Action::Created), of(Action::Changed)),
        (vec!["Secret default/s".to_owned()], vec!["ConfigMap default/a".to_owned()])
    );
    assert_eq!(world.keys().len(), 4);
    // Everything goes, with a template that says so; the namespace goes last.
    world.repository.push("c3", &template("inventory-7-9", "7-9"));
    world.synced().await;
    assert_eq!(world.keys(), [""; 0]);
    let paths = world.server.paths();
    assert_eq!(paths.into_iter().collect::<Vec<_>>(), ["/api/v1/namespaces/default", INVENTORY]);
}

#[tokio::test(start_paused = true)]
async fn an_empty_set_prunes_nothing_and_writes_nothing() {
    let mut world = World::new(FIRST);
    world.synced().await;
    let writes = world.writes();
    world.repository.push("c2", "# nothing\n");
    let report = world.sync().await;
    let text = "no objects found: 6 objects are kept; leave only an inventory template to remove them";
    assert_eq!(report.outcome, Outcome::Refused(text.to_owned()));
    let report = world.sync_with(Scope::All, PruneWhen::Now).await;
    assert_eq!(report.outcome, Outcome::Refused(text.to_owned()));
    assert_eq!(world.writes(), writes);
    let mut world = World::new("");
    world.synced().await;
    assert_eq!(world.writes(), 0);
}

#[tokio::test(start_paused = true)]
async fn an_inventory_that_cannot_be_read_means_no_write() {
    for broken in [json!("text"), json!({ "a": "b" })] {
        let mut world = World::new(FIRST);
        world.synced().await;
        world.repository.push("c2", SECOND);
        let writes = world.writes();
        if broken.is_string() {
            world.server.edit(INVENTORY, |inventory| inventory["data"] = broken.clone());
        } else {
            world.server.edit(INVENTORY, |inventory| inventory["metadata"]["deletionTimestamp"] = json!("x"));
        }
        let report = world.sync().await;
        assert!(
            matches!(&report.outcome, Outcome::Refused(why) if why.starts_with("the inventory cannot be read: ")),
            "{report:#?}"
        );
        assert_eq!(world.writes(), writes);
    }
}

#[tokio::test(start_paused = true)]
async fn an_unmarked_object_is_never_deleted_under_any_policy() {
    for policy in [InventoryPolicy::MustMatch, InventoryPolicy::AdoptIfNoInventory, InventoryPolicy::AdoptAll]
    {
        let mut world = World::new(&(config_map("a") + &config_map("b") + &config_map("c")));
        world.project.inventory_policy = policy;
        world.synced().await;
        world.server.edit(A, |object| object["metadata"]["annotations"] = json!({}));
        world.server.edit(B, |object| object["metadata"]["annotations"][OWNER_ANNOTATION] = json!("8-8"));
        world.repository.push("c2", &config_map("c"));
        let report = world.synced().await;
        assert_eq!(
            done(&report, "a"),
            (Action::Forgotten, format!("it does not have the mark {OWNER_ANNOTATION}"))
        );
        assert_eq!(done(&report, "b"), (Action::Forgotten, "it belongs to the inventory 8-8".to_owned()));
        assert!(world.server.get(A).is_some() && world.server.get(B).is_some());
        assert_eq!(world.keys(), ["default_c__ConfigMap"]);
    }
}

#[tokio::test(start_paused = true)]
async fn what_is_missing_in_a_list_without_end_does_not_count_as_absent() {
    let all: String = (0..30).map(|n| config_map(&format!("c{n}"))).collect();
    let mut world = World::new(&(config_map("a") + &all));
    world.project.inventory_policy = InventoryPolicy::MustMatch;
    let of_others = json!({ "metadata": { "name": "a", "namespace": "default" } });
    world.server.create("/api/v1/namespaces/default/configmaps", of_others.clone());
    let before = world.server.get(A).unwrap();
    world.server.lists_without_end();
    let report = world.sync().await;
    assert_eq!(done(&report, "a").0, Action::Failed);
    assert_eq!(world.server.get(A).unwrap(), before);
    assert_eq!(report.objects.len(), 31);
}

#[tokio::test(start_paused = true)]
async fn an_object_that_says_so_loses_its_mark_and_stays() {
    for (annotation, value) in
        [("cli-utils.sigs.k8s.io/on-remove", "keep"), ("client.lifecycle.config.k8s.io/deletion", "detach")]
    {
        let mut world = World::new(&(config_map("a") + &config_map("c")));
        world.synced().await;
        world.server.edit(A, |object| object["metadata"]["annotations"][annotation] = json!(value));
        world.repository.push("c2", &config_map("c"));
        let report = world.synced().await;
        assert_eq!(
            done(&report, "a"),
            (Action::Forgotten, format!("it has the annotation {annotation}: {value}"))
        );
        let a = world.server.get(A).unwrap();
        assert!(a["metadata"]["annotations"][OWNER_ANNOTATION].is_null());
        assert_eq!(world.keys(), ["default_c__ConfigMap"]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_controlled_object_is_kept_and_stays_in_the_inventory() {
    let mut world = World::new(&(config_map("a") + &config_map("c")));
    world.synced().await;
    let owner = json!([{ "kind": "Deployment", "name": "d", "controller": true }]);
    world.server.edit(A, |object| object["metadata"]["ownerReferences"] = owner);
    world.repository.push("c2", &config_map("c"));
    let report = world.synced().await;
    assert_eq!(done(&report, "a"), (Action::Kept, "it is controlled by Deployment d".to_owned()));
    assert_eq!(world.keys(), ["default_a__ConfigMap", "default_c__ConfigMap"]);
}

#[tokio::test(start_paused = true)]
async fn a_namespace_or_kind_stays_while_something_in_it_does() {
    let mut world = World::new(FIRST);
    world.synced().await;
    // The widget is not marked any more; so neither its namespace nor its kind may take it along.
    world.server.edit("/apis/example.com/v1/namespaces/shop/widgets/w", |object| {
        object["metadata"]["annotations"] = json!({});
    });
    world.repository.push("c2", &config_map("a"));
    let report = world.synced().await;
    assert_eq!(done(&report, "shop"), (Action::Kept, "an object that stays is in the namespace".to_owned()));
    assert_eq!(
        done(&report, "widgets.example.com"),
        (Action::Kept, "an object that stays is of the kind".to_owned())
    );
    assert!(world.server.get("/apis/example.com/v1/namespaces/shop/widgets/w").is_some());
    assert_eq!(done(&report, "b").0, Action::Pruned);
}

#[tokio::test(start_paused = true)]
async fn the_namespace_of_the_inventory_and_of_unknown_keys_stays() {
    let mut world = World::new(&(FIRST.to_owned() + &config_map("c")));
    world.project.default_namespace = "shop".to_owned();
    world.synced().await;
    world.repository.push("c2", &config_map("c"));
    let report = world.synced().await;
    assert_eq!(done(&report, "shop").0, Action::Kept);

    let mut world = World::new(FIRST);
    world.synced().await;
    world.server.edit(INVENTORY, |inventory| inventory["data"]["shop_x"] = json!(""));
    world.repository.push("c2", &config_map("a"));
    let report = world.synced().await;
    assert_eq!(done(&report, "shop").0, Action::Kept);
    assert!(world.keys().contains(&"shop_x".to_owned()));
}

#[tokio::test(start_paused = true)]
async fn what_is_gone_is_forgotten_and_an_unknown_group_is_kept() {
    let metrics = "---\napiVersion: metrics.k8s.io/v1\nkind: PodMetrics\nmetadata: {name: m}\n";
    let mut world = World::new(&(config_map("a") + &config_map("c") + metrics));
    world.synced().await;
    world.server.remove(A);
    world.server.edit(INVENTORY, |inventory| {
        inventory["data"]["default_x_apps_Gone"] = json!("");
        inventory["data"]["default_x_none.io_Gone"] = json!("");
    });
    world.server.set_stale("metrics.k8s.io", true);
    world.repository.push("c2", &config_map("c"));
    world.replace(Arc::new(Wire::new(&world.server, "two")));
    let report = world.synced().await;
    assert_eq!(done(&report, "a"), (Action::Forgotten, "it is gone already".to_owned()));
    assert_eq!(done(&report, "m"), (Action::Kept, "the API group metrics.k8s.io cannot be read".to_owned()));
    let gone: Vec<_> = report
        .objects
        .iter()
        .filter(|object| &*object.id.name == "x")
        .map(|object| (object.action, object.message.as_str()))
        .collect();
    assert_eq!(
        gone,
        [
            (Action::Kept, "the cluster has no API group none.io"),
            (Action::Forgotten, "the cluster no longer has the kind Gone"),
        ]
    );
    assert_eq!(
        world.keys(),
        ["default_c__ConfigMap", "default_m_metrics.k8s.io_PodMetrics", "default_x_none.io_Gone"]
    );
    // It is read again, and pruned.
    world.server.set_stale("metrics.k8s.io", false);
    let report = world.synced().await;
    assert_eq!(done(&report, "m").0, Action::Pruned);
}

#[tokio::test(start_paused = true)]
async fn a_finalizer_is_waited_for_and_named() {
    let mut world = World::new(&(config_map("a") + &config_map("c")));
    world.synced().await;
    world.server.edit(A, |object| object["metadata"]["finalizers"] = json!(["example.com/x"]));
    world.repository.push("c2", &config_map("c"));
    let report = world.sync().await;
    assert_eq!((report.outcome, report.to_prune), (Outcome::Degraded, 1));
    let report = world.sync().await;
    assert_eq!(done(&report, "a"), (Action::Kept, "waits for finalizer example.com/x".to_owned()));
    assert_eq!(world.keys().len(), 2);
    world.server.remove(A);
    world.synced().await;
    assert_eq!(world.keys(), ["default_c__ConfigMap"]);
}

#[tokio::test(start_paused = true)]
async fn nothing_is_pruned_while_something_fails_or_is_not_current() {
    let refused =
        "---\napiVersion: v1\nkind: ConfigMap\nmetadata: {name: r, annotations: {refuse: 'true'}}\n";
    let mut world = World::new(&(config_map("a") + &config_map("c")));
    world.synced().await;
    world.repository.push("c2", &(config_map("c") + refused));
    let report = world.sync().await;
    assert_eq!((&report.outcome, report.to_prune), (&Outcome::Incomplete, 1));
    assert_eq!(done(&report, "r"), (Action::Failed, "words of the server: Invalid".to_owned()));
    assert_eq!(report.warnings, ["1 objects wait to be pruned"]);
    assert!(world.server.get(A).is_some());
    // A person may ask for it.
    let report = world.sync_with(Scope::All, PruneWhen::Now).await;
    assert_eq!((&report.outcome, done(&report, "a").0), (&Outcome::Incomplete, Action::Pruned));
    assert_eq!(world.keys(), ["default_c__ConfigMap", "default_r__ConfigMap"]);

    let deployment = "---\napiVersion: apps/v1\nkind: Deployment\nmetadata: {name: d}\nspec: {replicas: 1}\n";
    let mut world = World::new(&(config_map("a") + deployment));
    let report = world.sync().await;
    assert_eq!(
        (report.outcome.clone(), done(&report, "d").1),
        (Outcome::Degraded, "replicas: 0 of 1".to_owned())
    );
    world.repository.push("c2", deployment);
    let report = world.sync().await;
    assert_eq!((report.outcome, report.to_prune), (Outcome::Degraded, 1));
    world.server.edit("/apis/apps/v1/namespaces/default/deployments/d", |object| {
        object["status"] = json!({ "replicas": 1, "updatedReplicas": 1, "availableReplicas": 1, "readyReplicas": 1,
            "conditions": [{ "type": "Available", "status": "True" }] });
    });
    let report = world.synced().await;
    assert_eq!(done(&report, "a").0, Action::Pruned);
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_no_node_takes_fails_after_15_seconds() {
    let pod = "---\napiVersion: v1\nkind: Pod\nmetadata: {name: p}\nspec: {}\n";
    let mut world = World::new(pod);
    world.project.reconcile_timeout = Duration::from_secs(3_600);
    let server = world.server.clone();
    let scheduler = async {
        tokio::time::sleep(Duration::from_secs(1)).await;
        server.edit("/api/v1/namespaces/default/pods/p", |pod| {
            pod["status"] = json!({ "phase": "Pending", "conditions": [
                { "type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no node" },
            ] });
        });
    };
    let begun = tokio::time::Instant::now();
    let (report, ()) = tokio::join!(world.sync(), scheduler);
    assert_eq!((report.outcome.clone(), done(&report, "p").1), (Outcome::Degraded, "no node".to_owned()));
    assert_eq!(report.objects[0].health, Health::Failed);
    let passed = begun.elapsed();
    assert!((15..20).contains(&passed.as_secs()), "{passed:?}");
}

#[tokio::test(start_paused = true)]
async fn prune_off_keeps_and_says_so() {
    let mut world = World::new(&(config_map("a") + &config_map("c")));
    world.project.prune = false;
    world.synced().await;
    world.repository.push("c2", &config_map("c"));
    let report = world.synced().await;
    assert_eq!((report.to_prune, report.warnings), (1, vec!["1 objects wait to be pruned".to_owned()]));
    assert_eq!(world.keys().len(), 2);
}

#[tokio::test(start_paused = true)]
async fn policies_say_what_may_be_taken_over() {
    use InventoryPolicy::{AdoptAll, AdoptIfNoInventory, MustMatch};
    for (owner, policy, applied) in [
        (None, MustMatch, false),
        (None, AdoptIfNoInventory, true),
        (None, AdoptAll, true),
        (Some("8-8"), MustMatch, false),
        (Some("8-8"), AdoptIfNoInventory, false),
        (Some("8-8"), AdoptAll, true),
        (Some("7-9"), MustMatch, true),
    ] {
        let mut world = World::new(&config_map("a"));
        world.project.inventory_policy = policy;
        let annotations = owner.map_or(json!({}), |owner| json!({ OWNER_ANNOTATION: owner }));
        world.server.create(
            "/api/v1/namespaces/default/configmaps",
            json!({ "kind": "ConfigMap", "metadata": { "name": "a", "annotations": annotations } }),
        );
        let report = world.sync().await;
        assert_eq!(report.outcome == Outcome::Synced, applied, "{owner:?} {policy:?} {report:#?}");
        let mark = world.server.get(A).unwrap()["metadata"]["annotations"][OWNER_ANNOTATION].clone();
        assert_eq!(mark == "7-9", applied);
    }
}

#[tokio::test(start_paused = true)]
async fn many_objects_are_read_by_pages_and_applied() {
    let content: String = (0..1_100).map(|at| config_map(&format!("m{at}"))).collect();
    let mut world = World::new(&content);
    world.synced().await;
    let log = world.server.log();
    let lists = log.iter().filter(|entry| entry.target.contains("configmaps?limit=500")).count();
    assert_eq!(lists, 1, "nothing exists, so one page");
    world.synced().await;
    let log = world.server.log();
    assert_eq!(log.iter().filter(|entry| entry.target.contains("configmaps?limit=500")).count(), 4);
    // More than a hundred deletions: the head is resolved and the fence written before each hundred.
    world.repository.push("c2", &config_map("m0"));
    let before = world.server.log().len();
    let report = world.synced().await;
    assert_eq!(report.objects.iter().filter(|object| object.action == Action::Pruned).count(), 1_099);
    let log = &world.server.log()[before..];
    let mut deletions = 0;
    let mut longest = 0;
    for entry in log {
        if entry.method == "DELETE" {
            deletions += 1;
        } else if entry.target.starts_with(INVENTORY) {
            deletions = 0;
        }
        longest = longest.max(deletions);
    }
    assert_eq!(longest, 100);
}

#[tokio::test(start_paused = true)]
async fn an_inventory_that_would_be_too_large_is_refused() {
    let name = "n".repeat(200);
    let content: String = (0..4_500).map(|at| config_map(&format!("{name}{at}"))).collect();
    let mut world = World::new(&content);
    let report = world.sync().await;
    let Outcome::Refused(why) = report.outcome else { panic!("{:?}", report.outcome) };
    assert!(why.starts_with("inventory would have ") && why.ends_with(" bytes: split the project"), "{why}");
    assert_eq!(world.writes(), 0);
}

#[tokio::test(start_paused = true)]
async fn several_inventories_become_one() {
    let mut world = World::new(&(config_map("a") + &config_map("b")));
    world.synced().await;
    world.server.create(
        "/api/v1/namespaces/default/configmaps",
        json!({ "kind": "ConfigMap", "metadata": { "name": "another", "labels": { ID_LABEL: "7-9" } },
            "data": { "default_old__ConfigMap": "" } }),
    );
    world.server.create(
        "/api/v1/namespaces/default/configmaps",
        json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "old", "namespace": "default",
            "annotations": { OWNER_ANNOTATION: "7-9" } } }),
    );
    let report = world.synced().await;
    assert_eq!(done(&report, "old").0, Action::Pruned);
    assert_eq!(report.warnings, ["the inventory another was merged into inventory-7-9 and deleted"]);
    assert!(world.server.get("/api/v1/namespaces/default/configmaps/another").is_none());
    assert_eq!(world.keys().len(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_config_map_without_the_label_is_not_taken_as_the_inventory() {
    let mut world = World::new(&config_map("a"));
    world.server.create(
        "/api/v1/namespaces/default/configmaps",
        json!({ "kind": "ConfigMap", "metadata": { "name": "inventory-7-9" }, "data": { "default_x__ConfigMap": "" } }),
    );
    let report = world.sync().await;
    let Outcome::Refused(why) = report.outcome else { panic!("{:?}", report.outcome) };
    assert!(why.starts_with("the ConfigMap default/inventory-7-9 exists and is not the inventory"), "{why}");
    assert!(world.server.get(A).is_none());
}

#[tokio::test(start_paused = true)]
async fn a_template_must_not_name_another_project() {
    for (id, is_fine) in [("7-9", true), ("mine", true), ("7-8", false), ("1-1", false), ("theirs", false)] {
        let mut world = World::new(&(template("t", id) + &config_map("a")));
        world.project.other_inventories.insert("theirs".to_owned());
        let report = world.sync().await;
        assert_eq!(report.outcome == Outcome::Synced, is_fine, "{id} {report:#?}");
        assert_eq!(world.writes() > 0, is_fine);
    }
}

#[tokio::test(start_paused = true)]
async fn an_inventory_outside_the_agents_namespaces_is_refused() {
    let in_shop = template("t", "mine").replace("name: t,", "name: t, namespace: shop,");
    let mut world = World::new(&(in_shop + &config_map("a")));
    world.server.create("/api/v1/namespaces", json!({ "kind": "Namespace", "metadata": { "name": "shop" } }));
    world.project.namespaces = Some(["default".to_owned()].into());
    let report = world.sync().await;
    let text =
        "m.yaml:2: the inventory template is in the namespace shop, which is outside the agent's namespaces";
    assert_eq!(report.outcome, Outcome::Refused(text.to_owned()));
    let diff = world.engine.diff(&world.project, &world.repository.set(), &DiffOptions::default()).await;
    assert_eq!(diff, Err(DiffError::Refused(text.to_owned())));
    assert_eq!(world.server.log().len(), 0);
    world.project.namespaces = Some(["shop".to_owned()].into());
    world.repository.push("c2", &config_map("a"));
    let report = world.sync().await;
    let text = "the inventory would be in the namespace default, which is outside the agent's namespaces";
    assert_eq!(report.outcome, Outcome::Refused(text.to_owned()));
    assert_eq!(world.server.log().len(), 0);
}

#[tokio::test(start_paused = true)]
async fn the_inventory_of_a_template_stays_that_of_the_project_that_wrote_it() {
    let mut world = World::new(&(template("t", "shop") + &config_map("a")));
    world.synced().await;
    let path = "/api/v1/namespaces/default/configmaps/t";
    let inventory = world.server.get(path).unwrap();
    assert_eq!(inventory["metadata"]["annotations"]["kas/project"], "7-9");

    // Another project, which knows nothing of the first one: kas was started again.
    let memory = std::mem::take(&mut world.memory);
    world.project.id = 10;
    world.repository.push("c2", &(template("t", "shop") + &config_map("a") + &config_map("b")));
    let writes = world.writes();
    let report = world.sync().await;
    let Outcome::Refused(why) = report.outcome else { panic!("{:?}", report.outcome) };
    assert!(why.contains("default/t with the id shop is that of project 7-9"), "{why}");
    assert_eq!(world.writes(), writes);
    assert!(world.server.get(A).is_some());

    // The first one goes on, and one of which nothing is known is taken over.
    (world.project.id, world.memory) = (9, memory);
    world.synced().await;
    world.server.edit(path, |object| {
        object["metadata"]["annotations"].as_object_mut().unwrap().shift_remove("kas/project");
    });
    (world.project.id, world.memory) = (10, Memory::default());
    world.synced().await;
    assert_eq!(world.server.get(path).unwrap()["metadata"]["annotations"]["kas/project"], "7-10");
}

#[tokio::test(start_paused = true)]
async fn objects_outside_the_agents_namespaces_fail_and_are_not_pruned() {
    let mut world = World::new(FIRST);
    world.synced().await;
    world.project.namespaces = Some(["default".to_owned()].into());
    world
        .repository
        .push("c2", &(config_map("a") + "---\napiVersion: v1\nkind: Namespace\nmetadata: {name: other}\n"));
    let report = world.sync().await;
    assert_eq!(report.outcome, Outcome::Incomplete);
    assert_eq!(done(&report, "other").1, "Namespace other is outside the agent's namespaces");
    world.repository.push("c3", &config_map("a"));
    let report = world.synced().await;
    assert_eq!(done(&report, "b"), (Action::Kept, "it is outside the agent's namespaces".to_owned()));
    assert_eq!(world.keys().len(), 6);
}

#[tokio::test(start_paused = true)]
async fn what_cannot_be_planned_fails_alone() {
    let content = "
apiVersion: none.io/v1
kind: Thing
metadata: {name: t}
---
apiVersion: v1
kind: ConfigMap
metadata: {name: m, annotations: {config.kubernetes.io/apply-time-mutation: x}}
---
apiVersion: v1
kind: ConfigMap
metadata: {name: d, annotations: {config.kubernetes.io/depends-on: x}}
---
apiVersion: v1
kind: Namespace
metadata: {name: other, namespace: default}
---
apiVersion: v1
kind: Secret
metadata: {name: 'a:b'}
";
    let mut world = World::new(content);
    let report = world.sync().await;
    assert_eq!(report.outcome, Outcome::Incomplete);
    assert_eq!(done(&report, "t").1, "no kind Thing in none.io/v1; is its CustomResourceDefinition missing?");
    assert!(done(&report, "m").1.contains("is not supported"));
    assert_eq!(done(&report, "a:b").1, "no key of an inventory can hold its name");
    assert_eq!((done(&report, "d").0, done(&report, "other").0), (Action::Created, Action::Created));
    assert_eq!(report.warnings.len(), 2);
    // What has no namespace yet is protected: it may be any of that name.
    world.server.edit(INVENTORY, |inventory| inventory["data"]["default_t_none.io_Thing"] = json!(""));
    let report = world.sync_with(Scope::All, PruneWhen::Now).await;
    assert_eq!(report.to_prune, 0);
}

#[tokio::test(start_paused = true)]
async fn an_object_twice_after_the_namespace_is_known_refuses_the_set() {
    let mut world = World::new(
        &(config_map("a")
            + "---\napiVersion: v1\nkind: ConfigMap\nmetadata: {name: a, namespace: default}\n"),
    );
    let report = world.sync().await;
    let text = "m.yaml:6: ConfigMap default/a twice: it is also at m.yaml:2";
    assert_eq!(report.outcome, Outcome::Refused(text.to_owned()));
    assert_eq!(world.writes(), 0);
}

#[tokio::test(start_paused = true)]
async fn the_namespace_of_the_inventory_is_created_first() {
    let mut world = World::new(&(FIRST.to_owned() + &config_map("c")));
    world.project.default_namespace = "shop".to_owned();
    world.synced().await;
    let mut world = World::new(&config_map("c"));
    world.project.default_namespace = "missing".to_owned();
    let report = world.sync().await;
    let Outcome::Refused(why) = report.outcome else { panic!("{:?}", report.outcome) };
    assert!(why.contains("the namespace missing must exist or be in the manifests"), "{why}");
}

#[tokio::test(start_paused = true)]
async fn the_head_is_resolved_again_and_a_stop_is_obeyed() {
    let mut world = World::new(FIRST);
    let set = world.repository.set();
    world.repository.push("c2", SECOND);
    let observer = |_: Progress| {};
    let sync = Sync {
        project: &world.project,
        set: &set,
        head: &*world.repository,
        scope: Scope::All,
        prune: PruneWhen::Current,
        observer: &observer,
    };
    let report = world.engine.sync(sync, &mut world.memory).await;
    assert_eq!(report.outcome, Outcome::HeadMoved(Some("c2".into())));
    assert_eq!(world.writes(), 0);
    *world.repository.broken.lock() = true;
    let report = world.sync().await;
    assert_eq!(report.outcome, Outcome::Interrupted("repository cannot be read: broken".to_owned()));
    assert_eq!(world.writes(), 0);
    *world.repository.stop.lock() = Some(Stop::NotHome);
    assert_eq!(world.repository.stop(), Some(Stop::NotHome));
    let calls = world.server.log().len();
    let report = world.sync().await;
    assert_eq!((report.outcome, world.server.log().len()), (Outcome::Stopped(Stop::NotHome), calls));
}

#[tokio::test(start_paused = true)]
async fn dry_runs_write_nothing() {
    for dry_run in [DryRun::Client, DryRun::Server] {
        let mut world = World::new(&(config_map("a") + &config_map("b")));
        world.synced().await;
        let before = world.server.paths();
        let versions = |world: &World| world.server.get(INVENTORY);
        let inventory = versions(&world);
        world.repository.push("c2", &(config_map("b") + &config_map("c")));
        world.project.dry_run = dry_run;
        let report = world.sync().await;
        assert_eq!(
            (done(&report, "a").0, done(&report, "c").0),
            (Action::Pruned, Action::Created),
            "{report:#?}"
        );
        assert_eq!((world.server.paths(), versions(&world)), (before, inventory));
        let log = world.server.log();
        assert!(log.iter().all(|entry| entry.method != "DELETE"));
    }
}

#[tokio::test(start_paused = true)]
async fn drift_is_found_and_only_that_is_applied_again() {
    let mut world = World::new(&(FIRST.to_owned() + &config_map("c") + &config_map("d")));
    world.synced().await;
    let engine = world.engine.clone();
    let drift = engine.check(&world.project, &mut world.memory).await.unwrap();
    assert_eq!((drift.checked, drift.differ.len(), drift.unknown.len()), (8, 0, 0), "{drift:?}");
    world.server.edit(A, |object| object["data"] = json!({ "x": "by hand" }));
    world
        .server
        .edit("/apis/example.com/v1/namespaces/shop/widgets/w", |object| object["spec"]["size"] = json!(2));
    world.server.edit("/api/v1/namespaces/default/configmaps/c", |object| {
        object["metadata"]["labels"] = json!({ "l": "x" })
    });
    world.server.remove("/api/v1/namespaces/default/configmaps/d");
    let drift = engine.check(&world.project, &mut world.memory).await.unwrap();
    let names: Vec<&str> = drift.differ.iter().map(|id| &*id.name).collect();
    assert_eq!(names, ["a", "c", "d", "w"]);
    let before = world.server.log().len();
    let report = world.sync_with(Scope::Only(drift.differ), PruneWhen::Current).await;
    assert_eq!(report.outcome, Outcome::Synced);
    let applied =
        world.server.log()[before..].iter().filter(|entry| entry.target.contains("force=true")).count();
    assert_eq!(applied, 4);
    assert_eq!(world.server.get(A).unwrap()["data"], json!({ "x": "1" }));
    assert!(engine.check(&world.project, &mut world.memory).await.unwrap().differ.is_empty());
    // A status that changes is no drift for long: applying it again moves nothing.
    world.server.edit(A, |object| object["status"] = json!({ "a": 1 }));
    let drift = engine.check(&world.project, &mut world.memory).await.unwrap();
    assert_eq!(drift.differ.len(), 1);
    let report = world.sync_with(Scope::Only(drift.differ), PruneWhen::Current).await;
    assert_eq!(done(&report, "a").0, Action::Unchanged);
    assert!(engine.check(&world.project, &mut world.memory).await.unwrap().differ.is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_diff_says_what_a_sync_would_do() {
    let mut world = World::new(FIRST);
    world.synced().await;
    let writes = world.writes();
    world.repository.push("c2", SECOND);
    let diff =
        world.engine.diff(&world.project, &world.repository.set(), &DiffOptions::default()).await.unwrap();
    let actions: Vec<(ChangeAction, String)> =
        diff.changes.iter().map(|change| (change.action, change.object.to_string())).collect();
    assert_eq!(
        actions,
        [
            (ChangeAction::Update, "ConfigMap default/a".to_owned()),
            (ChangeAction::Create, "Secret default/s".to_owned()),
            (ChangeAction::Prune, "Widget.example.com shop/w".to_owned()),
            (ChangeAction::Prune, "ConfigMap shop/b".to_owned()),
            (ChangeAction::Prune, "ClusterRole.rbac.authorization.k8s.io a:b".to_owned()),
        ]
    );
    assert!(diff.changes[0].diff.contains("-  x: \"1\"\n+  x: \"2\"\n"), "{}", diff.changes[0].diff);
    assert!(diff.changes[1].diff.contains("+ stringData.password\n"), "{}", diff.changes[1].diff);
    assert!(!diff.to_text().contains("hunter2") && !diff.to_json_lines().contains("hunter2"));
    assert_eq!((diff.exit_code(), diff.unchanged), (1, 2));
    assert_eq!(diff.to_json_lines().lines().count(), 5);
    let changed = world.server.log()[..]
        .iter()
        .filter(|entry| entry.method != "GET" && !entry.target.contains("dryRun=All"))
        .count();
    assert_eq!(changed, writes);
    // After the sync nothing differs.
    world.synced().await;
    let diff =
        world.engine.diff(&world.project, &world.repository.set(), &DiffOptions::default()).await.unwrap();
    assert_eq!((diff.changes.len(), diff.exit_code()), (0, 0), "{diff:#?}");
    // A first diff: the namespace and the kind do not exist, so what is in them is not asked for.
    let world = World::new(FIRST);
    let diff =
        world.engine.diff(&world.project, &world.repository.set(), &DiffOptions::default()).await.unwrap();
    assert!(diff.changes.iter().all(|change| change.action == ChangeAction::Create), "{diff:#?}");
    assert_eq!(diff.changes.len(), 6);
    let world = World::new(&template("t", "1-2"));
    let refused = world.engine.diff(&world.project, &world.repository.set(), &DiffOptions::default()).await;
    assert!(matches!(refused, Err(DiffError::Refused(_))));
}

#[tokio::test(start_paused = true)]
async fn the_texts_of_a_diff_are_bounded_together() {
    let long: String = (0..300).map(|at| format!("{at}{}, ", "x".repeat(1_000))).collect();
    let content: String =
        (0..80).map(|at| config_map(&format!("m{at}")) + &format!("data: [{long}]\n")).collect();
    let world = World::new(&content);
    let limits =
        crate::decode::Limits { file: 32 << 20, total: 32 << 20, ..crate::decode::Limits::default() };
    let file = crate::decode::File { path: "m.yaml".into(), content: content.into() };
    let set = crate::decode::decode("c1", &[file], &limits).unwrap();
    let diff = world.engine.diff(&world.project, &set, &DiffOptions::default()).await.unwrap();
    assert_eq!(diff.changes.len(), 80);
    let left_out = "(the diff is left out: all of them have more than 16 MiB)\n";
    assert!(diff.changes.iter().any(|change| change.diff == left_out));
    let bytes: usize = diff.changes.iter().map(|change| change.diff.len()).sum();
    assert!((15 << 20..17 << 20).contains(&bytes), "{bytes}");
}

#[tokio::test(start_paused = true)]
async fn destroy_deletes_what_is_marked_and_then_the_inventory() {
    let mut world = World::new(FIRST);
    world.synced().await;
    let gone = Repository::new(world.server.clock.clone());
    let observer = |_: Progress| {};
    // A head that exists ends it.
    let report = world.engine.destroy(&world.project, None, &*world.repository, &observer).await;
    assert_eq!(report.outcome, Outcome::HeadMoved(Some("c1".into())));
    assert_eq!(world.keys().len(), 6);
    world.server.edit(A, |object| object["metadata"]["annotations"] = json!({}));
    let report = world.engine.destroy(&world.project, None, &gone, &observer).await;
    assert_eq!(report.outcome, Outcome::Synced, "{report:#?}");
    assert_eq!(world.server.paths().into_iter().collect::<Vec<_>>(), ["/api/v1/namespaces/default", A]);
    let id = ObjectId::new("", "ConfigMap", "default", "a");
    assert!(report.objects.iter().any(|object| object.id == id && object.action == Action::Forgotten));
}
