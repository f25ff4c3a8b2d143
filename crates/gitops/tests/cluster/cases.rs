//! The end-to-end cases of cli-utils, the engine of 14.1: each is a test with its outcome. Where the outcome
//! differs, the test says so. Those of `depends-on` and of mutations while applying are one test, as this
//! engine follows neither.

use std::{sync::Arc, time::Duration};

use anyhow::{Context as _, Result, ensure};
use gitops::{
    Action, Budget, DryRun, Engine, Health, InventoryPolicy, Memory, ObjectReport, Outcome, Project, Report,
    Scope, Set,
};
use http::Method;
use serde_json::{Value, json};
use testkit::kubernetes::{Exclusive, exclusive};
use tokio::{task::JoinHandle, time::sleep};

use crate::wire::{Fixed, Wire, decoded, project, set, sync};

/// How often the controllers look.
const LOOK: Duration = Duration::from_millis(50);

/// A namespace, and an agent of its own.
pub(crate) struct Case {
    _exclusive: Exclusive,
    pub(crate) wire: Arc<Wire>,
    pub(crate) namespace: &'static str,
    pub(crate) project: Project,
    controllers: JoinHandle<()>,
}

impl Drop for Case {
    fn drop(&mut self) {
        self.controllers.abort();
    }
}

impl Case {
    pub(crate) async fn new(agent: u64, namespace: &'static str) -> Result<Self> {
        let exclusive = exclusive().await?;
        let wire = Wire::connect(&exclusive.kubernetes, namespace).await?;
        wire.create_namespace(namespace).await?;
        let project = Project {
            reconcile_timeout: Duration::from_secs(30),
            prune_timeout: Duration::from_secs(30),
            ..project(agent, namespace)
        };
        let controllers = tokio::spawn(controllers(Arc::clone(&wire), namespace));
        Ok(Self { _exclusive: exclusive, wire, namespace, project, controllers })
    }

    /// Applies a set as the project says, by a planner that knows nothing.
    pub(crate) async fn apply_set(&self, project: &Project, set: &Set) -> Report {
        let engine = Engine::new(Arc::clone(&self.wire) as _, Budget::default());
        sync(&engine, project, set, Scope::All, &mut Memory::default()).await
    }

    pub(crate) async fn apply(&self, objects: &[&str]) -> Report {
        self.apply_set(&self.project, &set("c", &objects.join("\n---\n"))).await
    }

    /// The same, and everything is done.
    pub(crate) async fn applied(&self, objects: &[&str]) -> Result<Report> {
        let report = self.apply(objects).await;
        ensure!(report.outcome == Outcome::Synced, "{report:#?}");
        Ok(report)
    }

    async fn destroy(&self, project: &Project) -> Report {
        let engine = Engine::new(Arc::clone(&self.wire) as _, Budget::default());
        engine.destroy(project, None, &Fixed(None), &|_: gitops::Progress| {}).await
    }

    pub(crate) fn path(&self, plural: &str, name: &str) -> String {
        let root = match plural {
            "deployments" => "/apis/apps/v1",
            "events" => "/apis/events.k8s.io/v1",
            _ => "/api/v1",
        };
        format!("{root}/namespaces/{}/{plural}/{name}", self.namespace)
    }

    pub(crate) async fn object(&self, plural: &str, name: &str) -> Result<Option<Value>> {
        self.wire.get(&self.path(plural, name)).await
    }

    async fn is_there(&self, plural: &str, name: &str) -> Result<bool> {
        Ok(self.object(plural, name).await?.is_some())
    }

    /// The number of objects in the inventory; `None`: there is no inventory.
    pub(crate) async fn inventory(&self) -> Result<Option<usize>> {
        let id = self.project.default_inventory_id();
        Ok(self.wire.inventory(self.namespace, &id).await?.map(|keys| keys.len()))
    }

    /// The mark of an object.
    pub(crate) async fn owner(&self, plural: &str, name: &str) -> Result<Option<String>> {
        let object = self.object(plural, name).await?.with_context(|| format!("{name} is gone"))?;
        Ok(object["metadata"]["annotations"]["config.k8s.io/owning-inventory"].as_str().map(str::to_owned))
    }
}

/// Makes deployments and pods ready, unless the image of a pod does not exist.
async fn controllers(wire: Arc<Wire>, namespace: &'static str) {
    loop {
        // The namespace may be gone, or the test ends.
        let _ = control(&wire, namespace).await;
        sleep(LOOK).await;
    }
}

async fn control(wire: &Wire, namespace: &str) -> Result<()> {
    let ready = json!([{ "type": "Ready", "status": "True" }]);
    let pods = wire.get(&format!("/api/v1/namespaces/{namespace}/pods")).await?.unwrap_or_default();
    for pod in pods["items"].as_array().into_iter().flatten() {
        let image = pod["spec"]["containers"][0]["image"].as_str().unwrap_or_default();
        if pod["status"]["phase"] != "Running" && !image.contains("does-not-exist") {
            let name = pod["metadata"]["name"].as_str().unwrap_or_default();
            let target = format!("/api/v1/namespaces/{namespace}/pods/{name}/status");
            let status = json!({ "status": { "phase": "Running", "conditions": ready } });
            wire.send(Method::PATCH, &target, &status).await?;
        }
    }
    let all =
        wire.get(&format!("/apis/apps/v1/namespaces/{namespace}/deployments")).await?.unwrap_or_default();
    for deployment in all["items"].as_array().into_iter().flatten() {
        let (metadata, wanted) = (&deployment["metadata"], &deployment["spec"]["replicas"]);
        if deployment["status"]["observedGeneration"] == metadata["generation"] {
            continue;
        }
        let name = metadata["name"].as_str().unwrap_or_default();
        let target = format!("/apis/apps/v1/namespaces/{namespace}/deployments/{name}/status");
        let status = json!({ "status": {
            "observedGeneration": metadata["generation"],
            "replicas": wanted, "updatedReplicas": wanted, "availableReplicas": wanted, "readyReplicas": wanted,
            "conditions": [
                { "type": "Available", "status": "True" },
                { "type": "Progressing", "status": "True", "reason": "NewReplicaSetAvailable" },
            ],
        } });
        wire.send(Method::PATCH, &target, &status).await?;
    }
    Ok(())
}

/// What a report says about an object.
pub(crate) fn about<'r>(report: &'r Report, name: &str) -> &'r ObjectReport {
    let found: Vec<_> = report.objects.iter().filter(|object| &*object.id.name == name).collect();
    assert_eq!(found.len(), 1, "{name}: {report:#?}");
    found[0]
}

pub(crate) fn deployment(replicas: u32) -> String {
    format!(
        "
apiVersion: apps/v1
kind: Deployment
metadata: {{name: nginx-deployment}}
spec:
  replicas: {replicas}
  selector: {{matchLabels: {{app: nginx}}}}
  template:
    metadata: {{labels: {{app: nginx}}}}
    spec:
      containers: [{{name: nginx, image: 'nginx:1.19.6', ports: [{{containerPort: 80}}]}}]"
    )
}

fn pod_with(name: &str, metadata: &str, image: &str) -> String {
    format!(
        "
apiVersion: v1
kind: Pod
metadata: {{name: {name}{metadata}}}
spec:
  automountServiceAccountToken: false
  containers: [{{name: pause, image: '{image}'}}]"
    )
}

fn pod(name: &str) -> String {
    pod_with(name, "", "registry.k8s.io/pause:2.0")
}

fn annotated(name: &str, key: &str, value: &str) -> String {
    pod_with(name, &format!(", annotations: {{{key}: '{value}'}}"), "registry.k8s.io/pause:2.0")
}

#[tokio::test]
async fn apply_and_destroy() -> Result<()> {
    let it = Case::new(50, "apply-and-destroy").await?;
    let report = it.applied(&[&deployment(4)]).await?;
    let object = about(&report, "nginx-deployment");
    assert_eq!((object.action, it.inventory().await?), (Action::Created, Some(1)));
    let live = it.object("deployments", "nginx-deployment").await?.context("a deployment")?;
    assert_eq!(live["status"]["availableReplicas"], 4, "it was waited for");
    let report = it.destroy(&it.project).await;
    assert_eq!(report.outcome, Outcome::Synced, "{report:#?}");
    assert_eq!(about(&report, "nginx-deployment").action, Action::Pruned);
    assert!(!it.is_there("deployments", "nginx-deployment").await?);
    assert_eq!(it.inventory().await?, None);
    Ok(())
}

#[tokio::test]
async fn continue_on_error() -> Result<()> {
    let it = Case::new(51, "continue-on-error").await?;
    // A definition without versions.
    let invalid = "
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: invalidexamples.cli-utils.example.io}
spec:
  conversion: {strategy: None}
  group: cli-utils.example.io
  names: {kind: InvalidExample, listKind: InvalidExampleList, plural: invalidexamples, singular: invalidexample}
  scope: Cluster";
    let report = it.apply(&[invalid, &pod("pod1")]).await;
    assert_eq!(report.outcome, Outcome::Incomplete, "{report:#?}");
    let failed = about(&report, "invalidexamples.cli-utils.example.io");
    assert!(failed.action == Action::Failed && failed.message.contains("versions"), "{failed:?}");
    assert_eq!(about(&report, "pod1").action, Action::Created);
    assert!(it.is_there("pods", "pod1").await?);
    let definitions = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";
    assert_eq!(it.wire.get(&format!("{definitions}/invalidexamples.cli-utils.example.io")).await?, None);
    Ok(())
}

#[tokio::test]
async fn custom_resource() -> Result<()> {
    let it = Case::new(52, "custom-resource").await?;
    let definition = "
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: examples.cli-utils.example.io}
spec:
  conversion: {strategy: None}
  group: cli-utils.example.io
  names: {kind: Example, listKind: ExampleList, plural: examples, singular: example}
  scope: Cluster
  versions:
  - name: v1alpha1
    served: true
    storage: true
    schema: {openAPIV3Schema: {type: object, properties: {replicas: {type: integer, minimum: 1}}}}";
    let resource = "
apiVersion: cli-utils.example.io/v1alpha1
kind: Example
metadata: {name: example-cr}
replicas: 4";
    // In the order in which they cannot be applied.
    let report = it.applied(&[resource, definition]).await?;
    assert!(report.objects.iter().all(|object| object.action == Action::Created), "{report:#?}");
    let path = "/apis/cli-utils.example.io/v1alpha1/examples/example-cr";
    assert_eq!(it.wire.get(path).await?.context("the resource")?["replicas"], 4);
    let report = it.destroy(&it.project).await;
    assert_eq!(report.outcome, Outcome::Synced, "{report:#?}");
    let definitions = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";
    assert_eq!(it.wire.get(&format!("{definitions}/examples.cli-utils.example.io")).await?, None);
    assert_eq!(it.inventory().await?, None);
    Ok(())
}

#[tokio::test]
async fn an_object_that_moves_to_another_group_is_the_same_object() -> Result<()> {
    let it = Case::new(53, "current-uid").await?;
    let old = "
apiVersion: v1
kind: Event
metadata: {name: test, namespace: current-uid}
involvedObject: {apiVersion: v1, kind: Pod, name: pod, namespace: current-uid}
message: Back-off restarting failed container
reason: BackOff
type: Warning";
    let new = "
apiVersion: events.k8s.io/v1
kind: Event
metadata: {name: test, namespace: current-uid}
eventTime: null
note: Back-off restarting failed container
reason: BackOff
regarding: {apiVersion: v1, kind: Pod, name: pod, namespace: current-uid}
type: Warning";
    it.applied(&[old]).await?;
    let uid = it.object("events", "test").await?.context("the event")?["metadata"]["uid"].clone();
    assert_eq!(it.inventory().await?, Some(1));
    let report = it.applied(&[new]).await?;
    let forgotten = report.objects.iter().find(|object| object.file.is_none()).context("the old one")?;
    assert_eq!(forgotten.action, Action::Forgotten, "{report:#?}");
    assert_eq!(it.object("events", "test").await?.context("the event")?["metadata"]["uid"], uid);
    let keys = it.wire.inventory(it.namespace, "53-1").await?.context("an inventory")?;
    assert_eq!(Vec::from_iter(keys), ["current-uid_test_events.k8s.io_Event"]);
    Ok(())
}

#[tokio::test]
async fn deletion_prevention() -> Result<()> {
    let it = Case::new(54, "deletion-prevention").await?;
    let kept = annotated("pod1", "cli-utils.sigs.k8s.io/on-remove", "keep");
    let detached = annotated("pod2", "client.lifecycle.config.k8s.io/deletion", "detach");
    it.applied(&[&deployment(1), &kept, &detached]).await?;
    assert_eq!(it.inventory().await?, Some(3));
    let own = Some("54-1".to_owned());

    // A dry run changes nothing.
    let dry = Project { dry_run: DryRun::Server, ..it.project.clone() };
    let report = it.apply_set(&dry, &set("c", &deployment(1))).await;
    assert_eq!(report.outcome, Outcome::Synced, "{report:#?}");
    assert_eq!(
        (it.owner("pods", "pod1").await?, it.owner("pods", "pod2").await?),
        (own.clone(), own.clone())
    );
    assert_eq!(it.inventory().await?, Some(3));

    let report = it.applied(&[&deployment(1)]).await?;
    for pod in ["pod1", "pod2"] {
        assert_eq!(about(&report, pod).action, Action::Forgotten);
        assert_eq!(it.owner("pods", pod).await?, None);
    }
    assert_eq!(it.owner("deployments", "nginx-deployment").await?, own);
    assert_eq!(it.inventory().await?, Some(1));
    Ok(())
}

#[tokio::test]
async fn destroy_reconciliation_failure() -> Result<()> {
    let it = Case::new(55, "destroy-failure").await?;
    let finalized = pod_with("pod2", ", finalizers: [cli-utils/e2e-test]", "registry.k8s.io/pause:2.0");
    it.applied(&[&pod("pod1"), &finalized]).await?;
    assert_eq!(it.inventory().await?, Some(2));
    let impatient = Project { prune_timeout: Duration::from_millis(200), ..it.project.clone() };
    for _ in 0..3 {
        let report = it.destroy(&impatient).await;
        assert_ne!(report.outcome, Outcome::Synced, "{report:#?}");
        let left = about(&report, "pod2");
        assert!(left.message.contains("cli-utils/e2e-test"), "{left:?}");
        assert!(!it.is_there("pods", "pod1").await?);
        let left = it.object("pods", "pod2").await?.context("it has a finalizer")?;
        assert!(!left["metadata"]["deletionTimestamp"].is_null());
        assert_eq!(it.inventory().await?, Some(1));
    }
    let without = json!({ "metadata": { "finalizers": null } });
    it.wire.send(Method::PATCH, &it.path("pods", "pod2"), &without).await?;
    let report = it.destroy(&it.project).await;
    assert_eq!(report.outcome, Outcome::Synced, "{report:#?}");
    assert_eq!((it.is_there("pods", "pod2").await?, it.inventory().await?), (false, None));
    Ok(())
}

/// A removal without a dry run: `kasctl gitops destroy` has none.
#[tokio::test]
async fn dry_run() -> Result<()> {
    let it = Case::new(56, "dry-run").await?;
    for dry_run in [DryRun::Client, DryRun::Server] {
        let dry = Project { dry_run, ..it.project.clone() };
        let report = it.apply_set(&dry, &set("c", &pod("pod1"))).await;
        assert_eq!(about(&report, "pod1").action, Action::Created, "{report:#?}");
        assert_eq!((it.is_there("pods", "pod1").await?, it.inventory().await?), (false, None));
    }
    it.applied(&[&pod("pod1")]).await?;
    assert_eq!((it.is_there("pods", "pod1").await?, it.inventory().await?), (true, Some(1)));
    let report = it.destroy(&it.project).await;
    assert_eq!(report.outcome, Outcome::Synced, "{report:#?}");
    assert_eq!((it.is_there("pods", "pod1").await?, it.inventory().await?), (false, None));
    Ok(())
}

/// It differs: cli-utils writes an inventory without objects, and prunes everything if there is one. Here
/// only a set with nothing but a template of the inventory does.
#[tokio::test]
async fn empty_set() -> Result<()> {
    let it = Case::new(57, "empty-set").await?;
    it.applied(&[""]).await?;
    assert_eq!(it.inventory().await?, None);
    it.applied(&[&pod("pod1")]).await?;
    let report = it.apply(&[""]).await;
    let Outcome::Refused(why) = &report.outcome else { panic!("{report:#?}") };
    assert!(why.starts_with("no objects found: 1 objects are kept"), "{why}");
    assert_eq!((it.is_there("pods", "pod1").await?, it.inventory().await?), (true, Some(1)));
    let template = "
apiVersion: v1
kind: ConfigMap
metadata: {name: inventory-57-1, labels: {cli-utils.sigs.k8s.io/inventory-id: 57-1}}";
    it.applied(&[template]).await?;
    assert_eq!((it.is_there("pods", "pod1").await?, it.inventory().await?), (false, Some(0)));
    let report = it.destroy(&it.project).await;
    assert_eq!((report.outcome, it.inventory().await?), (Outcome::Synced, None));
    Ok(())
}

/// `exit_early` and `skip_invalid`, which differs: one object without a name, and nothing of the set is
/// applied.
#[tokio::test]
async fn an_invalid_object_refuses_the_set() -> Result<()> {
    let nameless = "apiVersion: v1\nkind: Pod\nmetadata: {namespace: x}";
    let content = [&*pod("pod1"), &*deployment(1), nameless].join("\n---\n");
    let Err(flaws) = decoded("c", &content) else { panic!("it has a flaw") };
    assert!(flaws.starts_with("m.yaml:") && flaws.contains("metadata.name"), "{flaws}");
    assert_eq!(flaws.lines().count(), 1, "{flaws}");
    Ok(())
}

/// `name_inv_strategy`: another inventory has the name.
#[tokio::test]
async fn an_inventory_is_not_taken_for_one_with_another_id() -> Result<()> {
    let it = Case::new(58, "existing-inventory").await?;
    it.applied(&[&deployment(1)]).await?;
    let template = "
apiVersion: v1
kind: ConfigMap
metadata: {name: inventory-58-1, labels: {cli-utils.sigs.k8s.io/inventory-id: another}}";
    let report = it.apply(&[&deployment(1), template]).await;
    let Outcome::Refused(why) = &report.outcome else { panic!("{report:#?}") };
    assert!(why.contains("inventory-58-1") && why.contains("inventory-id: another"), "{why}");
    assert_eq!(it.inventory().await?, Some(1));
    Ok(())
}

/// `namespace_filter`: it is not pruned while an object that stays is in it.
#[tokio::test]
async fn a_namespace_with_an_object_of_the_set_stays() -> Result<()> {
    let it = Case::new(59, "namespace-filter").await?;
    let namespace = "apiVersion: v1\nkind: Namespace\nmetadata: {name: namespace-filter-1}";
    let inside = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: inside, namespace: namespace-filter-1}";
    it.applied(&[namespace, inside]).await?;
    let report = it.applied(&[inside]).await?;
    assert_eq!(about(&report, "namespace-filter-1").action, Action::Kept);
    let path = "/api/v1/namespaces/namespace-filter-1";
    assert!(it.wire.get(path).await?.context("the namespace")?["metadata"]["deletionTimestamp"].is_null());
    assert!(it.wire.get(&format!("{path}/configmaps/inside")).await?.is_some());
    assert_eq!(it.inventory().await?, Some(2), "it is pruned once it is empty");
    Ok(())
}

/// `prune_retrieve_error`: somebody else has deleted it.
#[tokio::test]
async fn what_is_gone_leaves_the_inventory() -> Result<()> {
    let it = Case::new(60, "prune-gone").await?;
    it.applied(&[&pod("pod1")]).await?;
    let now = json!({ "gracePeriodSeconds": 0 });
    it.wire.send(Method::DELETE, &it.path("pods", "pod1"), &now).await?;
    assert_eq!(it.inventory().await?, Some(1));
    let report = it.applied(&[&pod("pod2")]).await?;
    assert_eq!(about(&report, "pod1").action, Action::Forgotten);
    assert!(it.is_there("pods", "pod2").await? && !it.is_there("pods", "pod1").await?);
    assert_eq!(it.inventory().await?, Some(1));
    let report = it.destroy(&it.project).await;
    assert_eq!(report.outcome, Outcome::Synced, "{report:#?}");
    assert!(!it.is_there("pods", "pod2").await?);
    Ok(())
}

/// `reconcile_failed_timeout`: it does not become current, so nothing is pruned. That a pod which no node
/// takes fails before the timeout is a test of the engine, for it takes 15 s.
#[tokio::test]
async fn reconcile_timeout() -> Result<()> {
    let it = Case::new(61, "reconcile-timeout").await?;
    it.applied(&[&pod("old")]).await?;
    let project = Project { reconcile_timeout: Duration::from_millis(300), ..it.project.clone() };
    let broken = pod_with("pod1", "", "does-not-exist");
    let report = it.apply_set(&project, &set("c", &broken)).await;
    assert_eq!(report.outcome, Outcome::Degraded, "{report:#?}");
    assert_eq!((about(&report, "pod1").health, report.to_prune), (Health::InProgress, 1));
    assert!(it.is_there("pods", "old").await?);
    Ok(())
}

#[tokio::test]
async fn server_side_apply() -> Result<()> {
    let it = Case::new(62, "server-side").await?;
    let service = "
apiVersion: apiregistration.k8s.io/v1
kind: APIService
metadata: {name: v1beta1.custom.metrics.k8s.io}
spec:
  insecureSkipTLSVerify: true
  group: custom.metrics.k8s.io
  groupPriorityMinimum: 100
  versionPriority: 100
  service: {name: custom-metrics-stackdriver-adapter, namespace: custom-metrics}
  version: v1beta1";
    it.applied(&[&deployment(4), service]).await?;
    let deployment = it.object("deployments", "nginx-deployment").await?.context("a deployment")?;
    let path = "/apis/apiregistration.k8s.io/v1/apiservices/v1beta1.custom.metrics.k8s.io";
    let service = it.wire.get(path).await?.context("an APIService")?;
    for object in [deployment, service] {
        let metadata = &object["metadata"];
        assert!(metadata["annotations"]["kubectl.kubernetes.io/last-applied-configuration"].is_null());
        assert_eq!(metadata["managedFields"][0]["manager"], "agentk");
        assert_eq!(metadata["managedFields"][0]["operation"], "Apply");
    }
    // A group that does not answer would be unknown to the other tests.
    let report = it.destroy(&it.project).await;
    ensure!(it.wire.get(path).await?.is_none(), "{report:#?}");
    Ok(())
}

/// `depends_on`, `dependency_filter` and `mutation` are not followed: an order is only warned of, and an
/// object that would be changed while it is applied fails.
#[tokio::test]
async fn orders_are_warned_of_and_mutations_fail() -> Result<()> {
    let it = Case::new(63, "not-followed").await?;
    let ordered = annotated("pod1", "config.kubernetes.io/depends-on", "/namespaces/not-followed/Pod/pod2");
    let mutated = annotated("pod3", "config.kubernetes.io/apply-time-mutation", "[]");
    let report = it.apply(&[&ordered, &pod("pod2"), &mutated]).await;
    assert_eq!(report.outcome, Outcome::Incomplete, "{report:#?}");
    assert!(report.warnings.iter().any(|warning| warning.contains("depends-on")), "{report:#?}");
    assert_eq!([about(&report, "pod1").action, about(&report, "pod2").action], [Action::Created; 2]);
    let failed = about(&report, "pod3");
    assert!(failed.action == Action::Failed && failed.message.contains("apply-time-mutation"), "{failed:?}");
    assert!(!it.is_there("pods", "pod3").await?);
    Ok(())
}

/// Which policy a project has.
pub(crate) fn with_policy(project: &Project, agent: u64, policy: InventoryPolicy) -> Project {
    Project { agent, inventory_policy: policy, ..project.clone() }
}
