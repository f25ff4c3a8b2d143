//! Kinds that are served in several versions or groups.

use serde_json::json;

use super::*;
use crate::{ChangeAction, DiffOptions, DryRun, InventoryPolicy, OWNER_ANNOTATION};

/// The definition of `Widget` with these versions.
fn definition(versions: &str) -> String {
    FIRST.split("---").nth(1).unwrap().replace("[{name: v1, served: true}]", versions)
}

fn widget(version: &str, name: &str) -> String {
    format!(
        "---\napiVersion: example.com/{version}\nkind: Widget\nmetadata: {{name: {name}}}\nspec: {{size: 1}}\n"
    )
}

const WIDGETS: &str = "/apis/example.com/v1/namespaces/default/widgets";
const BOTH: &str = "[{name: v1}, {name: v2}]";

/// A world in which `Widget b` belongs to another inventory, and the kinds that have v1 only are known.
async fn with_widget_of_another() -> World {
    let mut world = World::new(&definition("[{name: v1}]"));
    world.synced().await;
    let mark = json!({ OWNER_ANNOTATION: "8-8" });
    world.server.create(
        WIDGETS,
        json!({ "apiVersion": "example.com/v1", "kind": "Widget",
            "metadata": { "name": "b", "namespace": "default", "annotations": mark } }),
    );
    world
}

fn assert_not_taken_over(world: &World, report: &Report) {
    let expected = "belongs to the inventory 8-8, not to 7-9; inventory_policy: adopt_all takes it over";
    assert_eq!(done(report, "b"), (Action::Failed, expected.to_owned()));
    let patches = |name: &str| {
        let log = world.server.log();
        log.iter()
            .filter(|e| {
                e.method == "PATCH"
                    && e.target.contains(&format!("/widgets/{name}?"))
                    && !e.target.contains("dryRun")
            })
            .count()
    };
    assert_eq!((patches("a"), patches("b")), (1, 0));
}

#[tokio::test(start_paused = true)]
async fn the_policy_holds_for_a_version_that_is_newer_than_what_is_known() {
    let mut world = with_widget_of_another().await;
    world.repository.push("c2", &definition(BOTH));
    world.synced().await;
    world.repository.push("c3", &(definition(BOTH) + &widget("v1", "a") + &widget("v2", "b")));
    let report = world.sync().await;
    assert_not_taken_over(&world, &report);
}

#[tokio::test(start_paused = true)]
async fn the_policy_holds_for_a_version_that_comes_with_its_object() {
    let mut world = with_widget_of_another().await;
    let set = definition(BOTH) + &widget("v1", "a") + &widget("v2", "b");
    world.repository.push("c2", &set);
    let diff =
        world.engine.diff(&world.project, &world.repository.set(), &DiffOptions::default()).await.unwrap();
    let b = diff.changes.iter().find(|change| &*change.object.name == "b").unwrap();
    assert_eq!(b.action, ChangeAction::Error, "{diff:#?}");
    world.project.dry_run = DryRun::Client;
    let report = world.sync().await;
    assert_eq!(done(&report, "b").0, Action::Failed);
    world.project.dry_run = DryRun::None;
    let report = world.sync().await;
    assert_not_taken_over(&world, &report);
    // With another policy it is taken over, and a diff says that it is there.
    world.project.inventory_policy = InventoryPolicy::AdoptAll;
    let mut world = World { project: world.project.clone(), ..with_widget_of_another().await };
    world.repository.push("c2", &set);
    let diff =
        world.engine.diff(&world.project, &world.repository.set(), &DiffOptions::default()).await.unwrap();
    let b = diff.changes.iter().find(|change| &*change.object.name == "b").unwrap();
    assert_eq!(
        (b.action, &*b.error),
        (ChangeAction::Update, "example.com/v2 is not served yet, so its changes cannot be asked for")
    );
    let report = world.synced().await;
    assert_eq!(done(&report, "b").0, Action::Changed);
}

#[tokio::test(start_paused = true)]
async fn a_version_that_is_never_served_fails_its_objects_alone() {
    let refused = definition(BOTH)
        .replace("name: widgets.example.com", "name: widgets.example.com, annotations: {refuse: 'true'}");
    let mut world = with_widget_of_another().await;
    world.repository.push("c2", &(refused + &widget("v1", "a") + &widget("v2", "c")));
    let report = world.sync().await;
    let expected = "example.com/v2 is not served 60 s after the definition of the kind was applied";
    assert_eq!(done(&report, "c"), (Action::Failed, expected.to_owned()));
    assert_eq!(done(&report, "a").0, Action::Created);
}

const INGRESS: &str = "/apis/networking.k8s.io/v1/namespaces/default/ingresses/i";

/// A world whose inventory has `Ingress i` of the group `extensions`.
async fn with_ingress_of_extensions() -> World {
    let old = "---\napiVersion: extensions/v1beta1\nkind: Ingress\nmetadata: {name: i}\n";
    let mut world = World::new(&(config_map("a") + old));
    world.synced().await;
    assert!(world.keys().contains(&"default_i_extensions_Ingress".to_owned()));
    world
}

fn ingress(annotations: &str) -> String {
    format!(
        "---\napiVersion: networking.k8s.io/v1\nkind: Ingress\nmetadata: {{name: i, annotations: {annotations}}}\n"
    )
}

/// What was done with `Ingress i` of `extensions`.
fn of_extensions(report: &Report) -> (Action, &str) {
    let found = report.objects.iter().find(|object| object.id.is("extensions", "Ingress")).unwrap();
    (found.action, &found.message)
}

#[tokio::test(start_paused = true)]
async fn an_object_that_failed_in_a_new_group_is_not_deleted_in_the_old_one() {
    let mut world = with_ingress_of_extensions().await;
    world.repository.push("c2", &(config_map("a") + &ingress("{refuse: 'true'}")));
    let report = world.sync_with(Scope::All, PruneWhen::Now).await;
    assert_eq!(report.outcome, Outcome::Incomplete);
    let expected = "it is the same object as one that was applied in another group";
    assert_eq!(of_extensions(&report), (Action::Forgotten, expected));
    assert!(world.server.get(INGRESS).is_some());
    // Applied, it is the same one, too.
    world.repository.push("c3", &(config_map("a") + &ingress("{}")));
    world.synced().await;
    assert!(world.server.get(INGRESS).is_some());
}

#[tokio::test(start_paused = true)]
async fn an_object_that_cannot_be_read_in_a_new_group_is_not_deleted_in_the_old_one() {
    let expected = "it may be the same object as one of the set in another group, which could not be read";
    // The group does not answer; or it has not that version.
    for unplanned in [false, true] {
        let mut world = with_ingress_of_extensions().await;
        let new = if unplanned { ingress("{}").replace("/v1", "/v9") } else { ingress("{}") };
        world.repository.push("c2", &(config_map("a") + &new));
        if !unplanned {
            world.server.set_stale("networking.k8s.io", true);
        }
        let report = world.sync_with(Scope::All, PruneWhen::Now).await;
        assert_eq!(report.outcome, Outcome::Incomplete, "{report:#?}");
        assert_eq!(of_extensions(&report), (Action::Kept, expected), "{unplanned}");
        assert!(world.server.get(INGRESS).is_some());
        assert!(world.keys().contains(&"default_i_extensions_Ingress".to_owned()));
    }
}

#[tokio::test(start_paused = true)]
async fn the_default_namespace_stays_under_an_object_that_cannot_be_planned() {
    let shop = "---\napiVersion: v1\nkind: Namespace\nmetadata: {name: shop}\n";
    let template = template("t", "mine").replace("name: t,", "name: t, namespace: default,");
    let mut world = World::new(&(template.clone() + shop));
    world.project.default_namespace = "shop".to_owned();
    world.synced().await;
    // The kind is not known, so its namespace is not, either.
    let thing = "---\napiVersion: none.io/v1\nkind: Thing\nmetadata: {name: t}\n";
    world.repository.push("c2", &(template + thing));
    let report = world.sync_with(Scope::All, PruneWhen::Now).await;
    assert_eq!(done(&report, "shop"), (Action::Kept, "an object that stays is in the namespace".to_owned()));
    assert!(world.server.get("/api/v1/namespaces/shop").is_some());
}
