use serde_json::json;

use super::*;
use crate::inventory::Workload;

fn read(kind: Kind, items: serde_json::Value) -> Vec<String> {
    let list = json!({"kind": "List", "metadata": {"continue": "n"}, "items": items});
    let page = page(kind, list.to_string().as_bytes()).unwrap();
    assert_eq!(page.next, "n");
    page.told.iter().map(shown).collect()
}

fn shown(told: &Told) -> String {
    let Told { by, namespace, instance, name, version, status } = told;
    format!("{} {namespace}/{instance} {name}@{version} ({status})", by.as_str())
}

#[test]
fn applications_of_sig_apps() {
    let wordpress = json!({
        "apiVersion": "app.k8s.io/v1beta1", "kind": "Application",
        "metadata": {"name": "wordpress-01", "namespace": "blog", "labels": {"app.kubernetes.io/name": "wordpress-01"}},
        "spec": {
            "selector": {"matchLabels": {"app.kubernetes.io/name": "wordpress-01"}},
            "componentKinds": [{"group": "core", "kind": "Service"}],
            "descriptor": {"type": "wordpress", "version": "4.9.4", "description": "a blog"}
        },
        "status": {"conditions": [{"type": "Ready", "status": "True", "reason": "ComponentsReady"}]}
    });
    assert_eq!(
        read(Kind::Application, json!([wordpress, {"metadata": {"name": "", "namespace": "a"}}, {}])),
        ["application blog/wordpress-01 wordpress@4.9.4 (ready)"]
    );
}

#[test]
fn helm_releases_of_flux() {
    let podinfo = json!({
        "apiVersion": "helm.toolkit.fluxcd.io/v2", "kind": "HelmRelease",
        "metadata": {"name": "podinfo", "namespace": "flux-system"},
        "spec": {
            "interval": "10m", "targetNamespace": "web",
            "chart": {"spec": {"chart": "podinfo", "version": ">=6.5.0", "sourceRef": {"kind": "HelmRepository", "name": "podinfo"}}},
            "values": {"password": "is not read"}
        },
        "status": {
            "conditions": [{"type": "Ready", "status": "True", "reason": "UpgradeSucceeded"}],
            "history": [{"chartName": "podinfo", "chartVersion": "6.7.1", "name": "web-podinfo", "namespace": "web", "version": 3}],
            "lastAttemptedRevision": "6.7.1"
        }
    });
    let fresh = json!({
        "metadata": {"name": "redis", "namespace": "db"},
        "spec": {"releaseName": "cache", "chart": {"spec": {"chart": "redis", "version": "20.6.1"}}},
        "status": {"conditions": [{"type": "Ready", "status": "False", "reason": "InstallFailed"}]}
    });
    let by_reference = json!({
        "metadata": {"name": "app", "namespace": "db"},
        "spec": {"chartRef": {"kind": "OCIRepository", "name": "app-chart"}}
    });
    assert_eq!(
        read(Kind::HelmRelease, json!([podinfo, fresh, by_reference])),
        [
            "flux web/web-podinfo podinfo@6.7.1 (ready)",
            "flux db/cache redis@20.6.1 (not ready: InstallFailed)",
            "flux db/app app-chart@ ()",
        ]
    );
}

#[test]
fn kustomizations_of_flux() {
    let apps = json!({
        "metadata": {"name": "apps", "namespace": "flux-system"},
        "spec": {"path": "./apps", "targetNamespace": "prod", "sourceRef": {"kind": "GitRepository", "name": "fleet"}},
        "status": {"lastAppliedRevision": "main@sha1:0a1b2c", "conditions": [{"type": "Ready", "status": "Unknown"}]}
    });
    assert_eq!(
        read(Kind::Kustomization, json!([apps])),
        ["flux prod/apps fleet@main@sha1:0a1b2c (not ready)"]
    );
}

#[test]
fn applications_of_argo_cd() {
    let guestbook = json!({
        "metadata": {"name": "guestbook", "namespace": "argocd"},
        "spec": {
            "destination": {"server": "https://kubernetes.default.svc", "namespace": "guestbook"},
            "source": {"repoURL": "https://git.example.com/apps/guestbook.git", "path": "k", "targetRevision": "HEAD"}
        },
        "status": {"sync": {"status": "Synced", "revision": "0a1b2c"}, "health": {"status": "Healthy"}}
    });
    let chart = json!({
        "metadata": {"name": "redis", "namespace": "argocd"},
        "spec": {
            "destination": {"namespace": "db"},
            "sources": [{"repoURL": "https://charts.example.com", "chart": "redis", "targetRevision": "20.6.1"}]
        },
        "status": {"sync": {"status": "OutOfSync", "revisions": []}}
    });
    assert_eq!(
        read(Kind::ArgoApplication, json!([guestbook, chart])),
        [
            "argo guestbook/guestbook guestbook@0a1b2c (Synced, Healthy)",
            "argo db/redis redis@20.6.1 (OutOfSync)",
        ]
    );
}

#[test]
fn the_last_revision_of_a_release_counts() {
    let labels = |name: &str, status: &str, version: &str| -> Labels {
        [("owner", "helm"), ("name", name), ("status", status), ("version", version)]
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .into()
    };
    let secrets = [
        ("db", labels("cache", "superseded", "9")),
        ("db", labels("cache", "deployed", "10")),
        ("db", labels("cache", "failed", "x")),
        ("db", labels("old", "uninstalled", "2")),
        ("web", Labels::default()),
    ];
    let told: Vec<_> = of_helm(secrets).iter().map(shown).collect();
    assert_eq!(told, ["helm db/cache @ (deployed, revision 10)"]);
}

#[test]
fn the_first_with_a_version_wins() {
    let told = |by, name: &str, version: &str, status: &str| Told {
        by,
        namespace: "db".to_owned(),
        instance: "cache".to_owned(),
        name: name.to_owned(),
        version: version.to_owned(),
        status: status.to_owned(),
    };
    let all = vec![
        told(Teller::Labels, "redis", "7.4.1", ""),
        told(Teller::Flux, "redis-chart", "20.6.1", "ready"),
        told(Teller::Helm, "", "", "deployed, revision 3"),
    ];
    let (found, is_cut) = merge(all);
    assert!(!is_cut);
    let shown = serde_json::to_value(&found).unwrap();
    assert_eq!(
        shown,
        json!([{
            "namespace": "db", "instance": "cache", "name": "redis-chart", "version": "20.6.1", "version_by": "flux",
            "status": "deployed, revision 3", "by": ["helm", "flux", "labels"]
        }])
    );
}

#[test]
fn labels_of_workloads_name_applications() {
    let workload = |namespace: &str, labels: &str| Workload {
        resource: "deployments.apps",
        namespace: namespace.to_owned(),
        name: "x".to_owned(),
        labels: crate::inventory::labels(labels),
        images: Vec::new(),
    };
    let inventory = Inventory {
        workloads: vec![
            workload("a", "app.kubernetes.io/instance=shop"),
            workload(
                "a",
                "app.kubernetes.io/instance=shop,app.kubernetes.io/name=web,app.kubernetes.io/version=2",
            ),
            workload("b", "app.kubernetes.io/instance=shop,app.kubernetes.io/name=web"),
            workload("b", "app=other"),
            workload(
                "c",
                "app.kubernetes.io/instance=tls,app.kubernetes.io/name=injector,app.kubernetes.io/version=1",
            ),
            workload(
                "c",
                "app.kubernetes.io/instance=tls,app.kubernetes.io/name=tls,app.kubernetes.io/version=1",
            ),
            workload("c", "app.kubernetes.io/instance=,app.kubernetes.io/name=nothing"),
            workload("c", "app.kubernetes.io/instance=\u{7}"),
        ],
        ..Inventory::default()
    };
    let (found, _) = merge(of_labels(&inventory));
    let found: Vec<_> = found
        .iter()
        .map(|it| format!("{}/{} {} {}", it.namespace, it.instance, it.name, it.version))
        .collect();
    assert_eq!(found, ["a/shop web 2", "b/shop web ", "c/tls tls 1"]);
}

#[test]
fn texts_of_clusters_are_bounded_and_plain() {
    assert_eq!(kept("a\nb\u{1b}c".to_owned()), "abc");
    assert_eq!(kept("é".repeat(200)).len(), 252);
    assert!(!is_exact("^1.2.3") && !is_exact("1.2.x") && !is_exact("main") && !is_exact("1.2"));
    assert!(is_exact("v1.2.3-rc.1+b"));
    assert!(page(Kind::Application, b"[]").is_err() && page(Kind::Application, b"").is_err());
}

#[test]
fn there_is_a_bound() {
    let told = |n: usize| Told {
        by: Teller::Labels,
        namespace: "a".to_owned(),
        instance: n.to_string(),
        name: String::new(),
        version: String::new(),
        status: String::new(),
    };
    let (found, is_cut) = merge((0..=MOST_APPLICATIONS).map(told).collect());
    assert_eq!((found.len(), is_cut), (MOST_APPLICATIONS, true));
}
