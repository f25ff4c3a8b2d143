//! The engine against a real kube-apiserver, with kubectl as the oracle of what an apply makes.

use anyhow::{Context as _, Result, ensure};
use gitops::{Action, Budget, ChangeAction, DiffOptions, Engine, Memory, Outcome, Report, Scope};
use serde_json::{Value, json};
use testkit::kubernetes::{Kubernetes, exclusive};

use crate::wire::{Wire, project, set, sync};

/// Whether everything was created; the namespace was before, for the inventory.
fn is_created(report: &Report) -> bool {
    report.objects.iter().all(|object| object.action == Action::Created || &*object.id.kind == "Namespace")
}

fn manifests(namespace: &str) -> String {
    format!(
        "
apiVersion: v1
kind: Namespace
metadata: {{name: {namespace}}}
---
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {{name: gadgets.{namespace}.example.com}}
spec:
  group: {namespace}.example.com
  scope: Namespaced
  names: {{kind: Gadget, plural: gadgets, singular: gadget, listKind: GadgetList}}
  versions:
  - name: v1
    served: true
    storage: true
    schema: {{openAPIV3Schema: {{type: object, x-kubernetes-preserve-unknown-fields: true}}}}
---
apiVersion: {namespace}.example.com/v1
kind: Gadget
metadata: {{name: g, namespace: {namespace}}}
spec: {{size: 3}}
---
apiVersion: v1
kind: ConfigMap
metadata: {{name: c, namespace: {namespace}, labels: {{a: b}}}}
data: {{x: '1', y: \"two\\nlines\\n\"}}
---
apiVersion: v1
kind: Secret
metadata: {{name: s, namespace: {namespace}}}
stringData: {{password: hunter2}}
---
apiVersion: v1
kind: Service
metadata: {{name: w, namespace: {namespace}}}
spec:
  selector: {{app: w}}
  ports: [{{port: 80, targetPort: 8080}}]
---
apiVersion: apps/v1
kind: Deployment
metadata: {{name: w, namespace: {namespace}}}
spec:
  replicas: 0
  selector: {{matchLabels: {{app: w}}}}
  template:
    metadata: {{labels: {{app: w}}}}
    spec:
      containers: [{{name: w, image: example.com/w:1, ports: [{{containerPort: 8080}}]}}]
      volumes: [{{name: v, configMap: {{name: c, defaultMode: 0644}}}}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {{name: 'a:b', namespace: {namespace}}}
rules: [{{apiGroups: [''], resources: [pods], verbs: [get]}}]
"
    )
}

/// An object without what differs between any two objects.
fn comparable(mut object: Value, namespace: &str) -> Value {
    let metadata = object["metadata"].as_object_mut().expect("an object has metadata");
    for field in ["uid", "resourceVersion", "creationTimestamp", "managedFields"] {
        metadata.shift_remove(field);
    }
    if let Some(annotations) = metadata.get_mut("annotations").and_then(Value::as_object_mut) {
        annotations.shift_remove("config.k8s.io/owning-inventory");
        if annotations.is_empty() {
            metadata.shift_remove("annotations");
        }
    }
    if let Some(spec) = object["spec"].as_object_mut() {
        spec.shift_remove("clusterIP");
        spec.shift_remove("clusterIPs");
    }
    serde_json::from_str(&object.to_string().replace(namespace, "NAMESPACE")).expect("still JSON")
}

async fn get(kubernetes: &Kubernetes, arguments: &[&str]) -> Result<Value> {
    let text = kubernetes.kubectl(&[&["get", "-o", "json"], arguments].concat()).await?;
    serde_json::from_str(&text).context("kubectl wrote no JSON")
}

#[tokio::test]
async fn an_apply_makes_what_kubectl_makes() -> Result<()> {
    let exclusive = exclusive().await?;
    let kubernetes = &exclusive.kubernetes;
    let engine = Engine::new(Wire::connect(kubernetes, "oracle").await?, Budget::default());
    let report = sync(
        &engine,
        &project(31, "ours"),
        &set("c", &manifests("ours")),
        Scope::All,
        &mut Memory::default(),
    )
    .await;
    assert!(is_created(&report) && report.objects.len() == 8, "{report:#?}");

    // The custom resource cannot be applied before its definition is established.
    let theirs = manifests("theirs");
    let (with, without): (Vec<&str>, Vec<&str>) =
        theirs.split("---\n").partition(|text| text.contains("kind: Gadget\n"));
    let apply = |text: String| async move {
        let file = std::env::temp_dir().join(format!("kas-gitops-{}-{}", std::process::id(), text.len()));
        std::fs::write(&file, text)?;
        let path = file.to_string_lossy().into_owned();
        let arguments =
            ["apply", "--server-side", "--force-conflicts", "--field-manager=agentk", "-f", path.as_str()];
        let result = kubernetes.kubectl(&arguments).await;
        std::fs::remove_file(&file)?;
        result
    };
    apply(without.join("---\n")).await?;
    let definition = "crd/gadgets.theirs.example.com";
    kubernetes.kubectl(&["wait", "--for=condition=Established", definition]).await?;
    apply(with.join("---\n")).await?;
    for object in ["configmap/c", "secret/s", "service/w", "deployment/w", "role/a:b"] {
        let ours = comparable(get(kubernetes, &["-n", "ours", object]).await?, "ours");
        let theirs = comparable(get(kubernetes, &["-n", "theirs", object]).await?, "theirs");
        assert_eq!(ours, theirs, "{object}");
    }
    let gadget = |namespace: &'static str| async move {
        let kind = format!("gadgets.{namespace}.example.com");
        anyhow::Ok(comparable(get(kubernetes, &["-n", namespace, &kind, "g"]).await?, namespace))
    };
    assert_eq!(gadget("ours").await?, gadget("theirs").await?);
    Ok(())
}

#[tokio::test]
async fn drift_is_put_back_and_what_leaves_is_pruned() -> Result<()> {
    let exclusive = exclusive().await?;
    let kubernetes = &exclusive.kubernetes;
    let engine = Engine::new(Wire::connect(kubernetes, "oracle").await?, Budget::default());
    let (project, first, mut memory) =
        (project(32, "drift"), set("c1", &manifests("drift")), Memory::default());
    let report = sync(&engine, &project, &first, Scope::All, &mut memory).await;
    ensure!(is_created(&report), "{report:#?}");
    let drift = engine.check(&project, &mut memory).await.map_err(anyhow::Error::msg)?;
    assert!(drift.unknown.is_empty(), "{drift:?}");

    kubernetes.kubectl(&["-n", "drift", "scale", "deployment/w", "--replicas=2"]).await?;
    kubernetes.kubectl(&["-n", "drift", "label", "configmap/c", "a=changed", "--overwrite"]).await?;
    kubernetes.kubectl(&["-n", "drift", "delete", "secret/s"]).await?;
    let drift = engine.check(&project, &mut memory).await.map_err(anyhow::Error::msg)?;
    let differ: Vec<String> = drift.differ.iter().map(ToString::to_string).collect();
    assert_eq!(differ, ["ConfigMap drift/c", "Secret drift/s", "Deployment.apps drift/w"]);
    sync(&engine, &project, &first, Scope::Only(drift.differ), &mut memory).await;
    let deployment = get(kubernetes, &["-n", "drift", "deployment/w"]).await?;
    assert_eq!(deployment["spec"]["replicas"], 0);
    assert_eq!(get(kubernetes, &["-n", "drift", "configmap/c"]).await?["metadata"]["labels"]["a"], "b");
    kubernetes.kubectl(&["-n", "drift", "get", "secret/s"]).await?;

    // Without a controller a deployment is never current, so it leaves the set first.
    let text = manifests("drift");
    let rest: Vec<&str> = text
        .split("---\n")
        .filter(|text| !text.contains("Deployment") && !text.contains("Gadget\n"))
        .collect();
    let second = set("c2", &rest.join("---\n"));
    let diff = engine.diff(&project, &second, &DiffOptions::default()).await?;
    let changes: Vec<(ChangeAction, String)> =
        diff.changes.iter().map(|change| (change.action, change.object.to_string())).collect();
    let gadget = "Gadget.drift.example.com drift/g".to_owned();
    assert_eq!(
        changes,
        [(ChangeAction::Prune, gadget), (ChangeAction::Prune, "Deployment.apps drift/w".to_owned())]
    );
    let report = sync(&engine, &project, &second, Scope::All, &mut memory).await;
    assert_eq!(report.outcome, Outcome::Synced, "{report:#?}");
    assert!(kubernetes.kubectl(&["-n", "drift", "get", "deployment/w"]).await.is_err());
    let inventory = get(kubernetes, &["-n", "drift", "configmap/inventory-32-1"]).await?;
    assert_eq!(inventory["metadata"]["annotations"]["kas/commit"], "c2");
    assert_eq!(inventory["data"].as_object().map(serde_json::Map::len), Some(6));
    Ok(())
}

#[tokio::test]
async fn an_inventory_of_14_1_is_taken_over() -> Result<()> {
    let exclusive = exclusive().await?;
    let kubernetes = &exclusive.kubernetes;
    let mark = json!({ "config.k8s.io/owning-inventory": "33-1" });
    let config_map = |name: &str, annotations: Value, labels: Value, data: Value| {
        let metadata =
            json!({ "name": name, "namespace": "default", "annotations": annotations, "labels": labels });
        json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data }).to_string()
    };
    let label = json!({ "cli-utils.sigs.k8s.io/inventory-id": "33-1" });
    let keys = json!({ "default_old__ConfigMap": "", "default_stays__ConfigMap": "" });
    kubernetes.apply(&config_map("inventory-33-1", json!({}), label, keys)).await?;
    kubernetes.apply(&config_map("old", mark.clone(), json!({}), json!({}))).await?;
    kubernetes.apply(&config_map("stays", mark, json!({}), json!({}))).await?;
    let before = get(kubernetes, &["configmap/stays"]).await?;
    let engine = Engine::new(Wire::connect(kubernetes, "oracle").await?, Budget::default());
    let set = set("c", "{apiVersion: v1, kind: ConfigMap, metadata: {name: stays}}");
    let report = sync(&engine, &project(33, "default"), &set, Scope::All, &mut Memory::default()).await;
    assert_eq!(report.outcome, Outcome::Synced, "{report:#?}");
    assert_eq!(get(kubernetes, &["configmap/stays"]).await?["metadata"]["uid"], before["metadata"]["uid"]);
    assert!(kubernetes.kubectl(&["get", "configmap/old"]).await.is_err());
    let inventory = get(kubernetes, &["configmap/inventory-33-1"]).await?;
    assert_eq!(inventory["data"], json!({ "default_stays__ConfigMap": "" }));
    Ok(())
}
