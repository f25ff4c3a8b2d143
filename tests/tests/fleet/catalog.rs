//! Components and applications of a real API server, with the objects that charts render.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context as _, Result, ensure};
use proto::kas::api::v1::{
    ListApplicationsRequest, ListApplicationsResponse, ListComponentsRequest, ListComponentsResponse,
};
use serde_json::{Value, json};
use tempfile::TempDir;
use testkit::{
    agentk::Agentk,
    endpoint::{Endpoint, JANE, write_users},
    kas::{AgentEntry, eventually, token},
    kubernetes::{Kubernetes, own_address},
    prometheus::{Ask, Prometheus, Series, ask},
};

use crate::setup::{AT, SAMPLES};

/// The token of a user whom Kubernetes allows nothing.
const MARY: &str = "kasu_marymarymarymarymarymarymarymarymarymarymar";
/// Tells that an API group of Kubernetes itself may be defined.
const APPROVED: &str = "https://github.com/kubernetes/enhancements/pull/1111";

/// Rendered objects, and the components that they are.
struct Fixture {
    expect: Vec<Value>,
    groups: BTreeMap<String, String>,
    objects: Vec<Value>,
}

fn fixtures() -> Result<Vec<Fixture>> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../crates/fleet/fixtures");
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        let text = std::fs::read_to_string(&path)?;
        let value: Value = serde_saphyr::from_str(&text).with_context(|| path.display().to_string())?;
        let list = |key: &str| value[key].as_array().cloned().unwrap_or_default();
        let groups = value["groups"].as_object().into_iter().flatten();
        found.push(Fixture {
            expect: list("expect"),
            groups: groups
                .filter_map(|(group, version)| Some((group.clone(), version.as_str()?.to_owned())))
                .collect(),
            objects: list("objects"),
        });
    }
    Ok(found)
}

/// A kind that takes any object.
fn kind(group: &str, version: &str, plural: &str, kind: &str) -> Value {
    json!({
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {
            "name": format!("{plural}.{group}"),
            "annotations": { "api-approved.kubernetes.io": APPROVED },
        },
        "spec": {
            "group": group, "scope": "Namespaced",
            "names": { "plural": plural, "singular": kind.to_lowercase(), "kind": kind },
            "versions": [{
                "name": version, "served": true, "storage": true,
                "schema": { "openAPIV3Schema": {
                    "type": "object", "x-kubernetes-preserve-unknown-fields": true,
                } },
            }],
        },
    })
}

/// The kinds that tell of applications, with an object of each.
fn applications() -> [(Value, Value); 3] {
    let object = |api: &str, kind: &str, namespace: &str, name: &str, rest: Value| {
        let mut object = json!({
            "apiVersion": api, "kind": kind, "metadata": { "namespace": namespace, "name": name },
        });
        for part in ["spec", "status"] {
            if let Some(value) = rest.get(part) {
                object[part] = value.clone();
            }
        }
        object
    };
    let flux = json!({
        "spec": { "targetNamespace": "web", "chart": { "spec": { "chart": "podinfo", "version": "6.x" } },
                  "values": { "password": "is told nowhere" } },
        "status": { "history": [{ "chartName": "podinfo", "chartVersion": "6.7.1" }],
                    "conditions": [{ "type": "Ready", "status": "True" }] },
    });
    let argo = json!({
        "spec": { "destination": { "namespace": "shop" },
                  "source": { "repoURL": "https://git.example.com/shop.git", "targetRevision": "HEAD" } },
        "status": { "sync": { "status": "Synced", "revision": "0a1b2c" }, "health": { "status": "Healthy" } },
    });
    let sig = json!({ "spec": { "descriptor": { "type": "wordpress", "version": "4.9.4" } } });
    [
        (
            kind("helm.toolkit.fluxcd.io", "v2", "helmreleases", "HelmRelease"),
            object("helm.toolkit.fluxcd.io/v2", "HelmRelease", "flux-system", "podinfo", flux),
        ),
        (
            kind("argoproj.io", "v1alpha1", "applications", "Application"),
            object("argoproj.io/v1alpha1", "Application", "argocd", "shop", argo),
        ),
        (
            kind("app.k8s.io", "v1beta1", "applications", "Application"),
            object("app.k8s.io/v1beta1", "Application", "blog", "wordpress", sig),
        ),
    ]
}

/// A revision of a release, as Helm stores it.
fn release(revision: u32, status: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Secret", "type": "helm.sh/release.v1",
        "metadata": {
            "namespace": "db", "name": format!("sh.helm.release.v1.cache.v{revision}"),
            "labels": { "owner": "helm", "name": "cache", "status": status, "version": revision.to_string() },
        },
        "data": { "release": "aXMgdG9sZCBub3doZXJl" },
    })
}

async fn apply(kubernetes: &Kubernetes, objects: &[Value]) -> Result<()> {
    kubernetes.apply(&json!({ "apiVersion": "v1", "kind": "List", "items": objects }).to_string()).await?;
    Ok(())
}

/// Puts everything into the cluster.
async fn fill(kubernetes: &Kubernetes, fixtures: &[Fixture]) -> Result<()> {
    let applications = applications();
    let mut kinds: Vec<Value> = applications.iter().map(|(kind, _)| kind.clone()).collect();
    let defined: BTreeSet<String> =
        kinds.iter().filter_map(|kind| Some(kind["spec"]["group"].as_str()?.to_owned())).collect();
    for (group, version) in fixtures.iter().flat_map(|fixture| &fixture.groups) {
        if !defined.contains(group) && group != "networking.k8s.io" {
            kinds.push(kind(group, version, "things", "Thing"));
        }
    }
    apply(kubernetes, &kinds).await?;
    let mut objects: Vec<Value> = fixtures.iter().flat_map(|fixture| fixture.objects.clone()).collect();
    objects.extend([release(1, "superseded"), release(2, "deployed")]);
    let told: Vec<Value> = applications.iter().map(|(_, object)| object.clone()).collect();
    let namespaces: BTreeSet<&str> =
        objects.iter().chain(&told).filter_map(|object| object["metadata"]["namespace"].as_str()).collect();
    for namespace in namespaces {
        kubernetes.ensure_namespace(namespace).await?;
    }
    apply(kubernetes, &objects).await?;
    // The kinds are served after a moment.
    eventually("the objects of new kinds are there", async || Ok(apply(kubernetes, &told).await)).await
}

/// Asks for one agent.
async fn get(endpoint: &Endpoint, what: &str, token: &str, namespaces: &[(&str, &str)]) -> Result<Value> {
    let path = format!("/fleet/{what}");
    let question = Ask { path: &path, form: namespaces, token: Some(token), is_get: true, ..Ask::default() };
    let (status, answer) = ask(endpoint.address, &question).await?;
    ensure!(status == 200, "{status}: {answer}");
    ensure!(answer["unanswered"] == json!([]), "{answer}");
    Ok(answer["agents"][0].clone())
}

/// Returns an object as a text that does not depend on the order of its keys.
fn canonical(object: &Value) -> String {
    let keys: BTreeMap<&String, &Value> = object.as_object().into_iter().flatten().collect();
    format!("{keys:?}")
}

/// Returns the components of all fixtures.
fn expected(fixtures: &[Fixture]) -> BTreeSet<String> {
    let components = fixtures.iter().flat_map(|fixture| &fixture.expect).cloned();
    let shown = components.map(|mut component| {
        component.as_object_mut().unwrap().remove("probed");
        // The kind of its releases is there, too.
        if component["name"] == "flux" {
            component["apis"].as_array_mut().unwrap().push(json!("helm.toolkit.fluxcd.io/v2"));
        }
        canonical(&component)
    });
    shown.collect()
}

fn shown(applications: &Value) -> Vec<String> {
    let text = |it: &Value, key: &str| it[key].as_str().unwrap_or_default().to_owned();
    let one = |it: &Value| {
        let [namespace, instance, name, version, by] =
            ["namespace", "instance", "name", "version", "version_by"].map(|key| text(it, key));
        format!("{namespace}/{instance} {name}@{version} {by}")
    };
    applications.as_array().into_iter().flatten().map(one).collect()
}

#[tokio::test]
async fn components_and_applications_of_a_cluster() -> Result<()> {
    let folder = TempDir::with_prefix("catalog-test-")?;
    let files = [(1, json!({ "applications": { "helm": true } })), (2, json!({ "namespaces": ["solo"] }))];
    for (agent, kas_yaml) in &files {
        let files = folder.path().join(format!("agents/agent-{agent}"));
        std::fs::create_dir_all(&files)?;
        std::fs::write(files.join("config.yaml"), "")?;
        std::fs::write(files.join("kas.yaml"), kas_yaml.to_string())?;
    }
    let users = folder.path().join("users.yaml");
    write_users(&users, &[("jane", JANE), ("mary", MARY)])?;
    let config = json!({ "agent": {
        "configuration": { "folder": folder.path() },
        "kubernetes_api": {
            "users": { "file": users },
            "access": [
                { "agents": "all", "users": ["kas:jane"], "as": "agent" },
                { "agents": "all", "users": ["kas:mary"], "as": "user" },
            ],
        },
    } });
    let up = Series { name: "up", labels: vec![], values: vec![1.0; usize::try_from(SAMPLES)?] };
    let prometheus = Prometheus::start("prom-solo", own_address()?, std::slice::from_ref(&up));
    let (kubernetes, endpoint, prometheus) =
        tokio::try_join!(Kubernetes::start(), Endpoint::start_audited(config), prometheus)?;
    endpoint.kas.set_agents(&[1, 2].map(AgentEntry::new))?;
    let fixtures = fixtures()?;
    fill(&kubernetes, &fixtures).await?;
    kubernetes.service_to("solo", "prometheus-server", 80, prometheus.address).await?;
    let label = "app.kubernetes.io/name=prometheus";
    kubernetes.kubectl(&["label", "service", "prometheus-server", "-n", "solo", label]).await?;
    // Its image has no tag, so it is asked for its version.
    let image = "--image=quay.io/prometheus/prometheus@sha256:0123456789012345678901234567890123456789012345678901234567890123";
    kubernetes.kubectl(&["create", "deployment", "prometheus-server", "-n", "solo", image]).await?;
    let mut agentks = Vec::new();
    for agent in [1, 2] {
        let kubeconfig = kubernetes.admin_kubeconfig();
        let agentk = Agentk::start_with_kubeconfig(endpoint.kas.agent, &token(agent), &kubeconfig).await?;
        agentk.connected().await?;
        agentks.push(agentk);
    }

    // Of the second agent only one namespace counts, as soon as its file is known.
    let found = eventually("the file of the agent is known", async || {
        let found = get(&endpoint, "components/id=2", JANE, &[("namespaces", "solo,db")]).await?;
        Ok(if found["missing"].is_null() { Ok(found) } else { Err(found) })
    })
    .await?;
    let solo = found["components"].as_array().context("components")?;
    let solo = solo.iter().find(|it| it["name"] == "prometheus").context("it is found")?;
    ensure!(solo["service"] == "solo/prometheus-server:80" && solo["version_from"] == "probe", "{solo}");
    ensure!(solo["version"].as_str().is_some_and(|version| version.contains('.')), "{solo}");
    // Nobody names this Prometheus.
    let path = "/fleet/prometheus/agent/2/api/v1/query";
    let form = [("query", "up"), AT];
    let question = Ask { path, form: &form, token: Some(JANE), ..Ask::default() };
    let (status, answer) = ask(endpoint.address, &question).await?;
    ensure!(status == 200 && answer["data"]["result"][0]["value"][1] == "1", "{status}: {answer}");

    let found = get(&endpoint, "components/id=1", JANE, &[]).await?;
    let components = found["components"].as_array().context("components")?;
    let seen: BTreeSet<String> =
        components.iter().filter(|it| it["namespace"] != "solo").map(canonical).collect();
    assert_eq!(seen, expected(&fixtures));
    assert!(found["missing"].is_null(), "{found}");
    // There are several of Prometheus, so somebody must choose.
    for path in ["/fleet/prometheus/agent/1/api/v1/query", "/fleet/prometheus/select/id=1/api/v1/query"] {
        let (status, answer) = ask(endpoint.address, &Ask { path, ..question }).await?;
        let text = answer.to_string();
        ensure!(text.contains("monitoring/stack-prometheus:9090"), "{status}: {text}");
        ensure!(text.contains("metrics/prometheus-server:80"), "{status}: {text}");
        assert_eq!(status, if path.contains("/agent/") { 409 } else { 503 });
    }

    let found = get(&endpoint, "applications/id=1", JANE, &[]).await?;
    let all = shown(&found["applications"]);
    for application in [
        "blog/wordpress wordpress@4.9.4 application",
        "web/web-podinfo podinfo@6.7.1 flux",
        "shop/shop shop@0a1b2c argo",
        "db/cache @ ",
        "cert-manager/cert-manager cert-manager@v1.21.2 labels",
    ] {
        ensure!(all.iter().any(|it| it == application), "{application} of {all:#?}");
    }
    assert!(!found.to_string().contains("told nowhere"));
    // Without `applications` in its file, nobody reads Secrets.
    let found = get(&endpoint, "applications/id=2", JANE, &[]).await?;
    assert!(!found.to_string().contains("cache"), "{found}");

    // Who may list nothing sees only what the API server tells everybody.
    let found = get(&endpoint, "components/id=1", MARY, &[]).await?;
    let components = found["components"].as_array().context("components")?;
    ensure!(components.iter().all(|it| it["namespace"].is_null()), "{found}");
    ensure!(found["missing"].as_array().map_or(0, Vec::len) == 4, "{found}");
    let found = get(&endpoint, "applications/id=1", MARY, &[]).await?;
    assert!(
        found["applications"] == json!([]) && found["missing"].to_string().contains("secrets"),
        "{found}"
    );

    // What was read is kept.
    kubernetes.kubectl(&["delete", "deployment", "istiod", "-n", "istio-system"]).await?;
    let caller = endpoint.kas.caller().await?;
    let request = ListComponentsRequest { agents: "all".to_owned(), namespaces: Vec::new() };
    let answer: ListComponentsResponse = caller.unary("/kas.api.v1.KasApi/ListComponents", &request).await?;
    let istio = answer.agents[0].components.iter().find(|it| it.name == "istio").context("it is kept")?;
    assert_eq!((&*istio.version, &*istio.namespace), ("1.29.0", "istio-system"));
    assert_eq!((answer.agents.len(), answer.unanswered.len()), (2, 0));
    let request = ListApplicationsRequest { agents: "id=1".to_owned(), namespaces: vec!["db".to_owned()] };
    let answer: ListApplicationsResponse =
        caller.unary("/kas.api.v1.KasApi/ListApplications", &request).await?;
    let names: Vec<&str> = answer.agents[0].applications.iter().map(|it| &*it.instance).collect();
    assert_eq!(names, ["cache"]);
    Ok(())
}
