//! The kustomize bases and overlays render the same objects as the charts with the same choices.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use crate::tools::{helm_one, here, output, render, text, yaml};

/// Returns folders, each with the equivalent chart and values.
fn pairs() -> [(&'static str, &'static str, Value); 11] {
    let secrets = json!({
        "secrets": { "api": { "existingSecret": "kas-api" }, "privateApi": { "existingSecret": "kas-private-api" } },
        "agents": { "existingSecret": "kas-agents" },
    });
    let mut ingress = secrets.clone();
    ingress["ingress"] = json!({
        "enabled": true,
        "className": "nginx",
        "host": "kas.example.com",
        "tlsSecret": "kas-tls",
    });
    let mut redis = secrets.clone();
    redis["tracker"] = "redis".into();
    redis["redis"] = json!({ "address": "redis.example.com:6379", "existingSecret": "kas-redis" });
    let mut hooks = secrets.clone();
    hooks["hooks"] =
        json!({ "enabled": true, "secrets": [{ "agent": 7, "existingSecret": "kas-hooks-of-7" }] });
    hooks["tls"] = json!({ "hooks": { "existingSecret": "kas-hooks-tls" } });
    let mut direct = secrets.clone();
    direct["direct"] = json!({ "enabled": true, "existingSecret": "kas-direct" });
    let mut sinks = secrets.clone();
    sinks["sinks"] = json!({ "deny": ["10.0.0.0/8"], "targets": [
        {
            "name": "archive",
            "agents": "all",
            "news": ["agents", "syncs"],
            "webhook": { "url": "https://news.example.com/kas", "existingSecret": "kas-news" },
        },
        { "name": "log", "agents": "env=prod", "news": ["events"], "log": true },
    ] });
    let mut files = secrets.clone();
    files["agents"]["configurations"] =
        json!({ "demo": { "observability": { "logging": { "level": "info" } } } });
    files["agents"]["kasFiles"] = json!({ "demo": { "labels": { "env": "prod" } } });
    let gitlab = json!({
        "secrets": { "privateApi": { "existingSecret": "kas-private-api" } },
        "gitlab": { "address": "https://gitlab.example.com", "existingSecret": "gitlab-kas-secret" },
    });
    let agentk = |access: &str| {
        json!({
            "kasAddress": "grpcs://kas.example.com",
            "token": { "existingSecret": "agentk-token" },
            "rbac": { "access": access },
        })
    };
    [
        ("kas/base", "kas", secrets),
        ("kas/overlays/agent-files", "kas", files),
        ("kas/overlays/direct", "kas", direct),
        ("kas/overlays/gitlab", "kas", gitlab),
        ("kas/overlays/hooks", "kas", hooks),
        ("kas/overlays/ingress", "kas", ingress),
        ("kas/overlays/redis", "kas", redis),
        ("kas/overlays/sinks", "kas", sinks),
        ("agentk/base", "agentk", agentk("read-pods")),
        ("agentk/overlays/read-only", "agentk", agentk("read-only")),
        ("agentk/overlays/no-rights", "agentk", agentk("none")),
    ]
}

/// Removes differences of the tools: labels for the manager of an object, and hashes of configurations.
/// Returns the objects by kind and name.
async fn comparable(objects: &[Value]) -> Result<BTreeMap<String, Value>> {
    let mut found = BTreeMap::new();
    for object in objects {
        let mut object = object.clone();
        if let Some(labels) = object["metadata"]["labels"].as_object_mut() {
            labels.retain(|key, _| key != "helm.sh/chart" && key != "app.kubernetes.io/managed-by");
        }
        if let Some(template) = object.pointer_mut("/spec/template") {
            if let Some(annotations) = template["metadata"]["annotations"].as_object_mut() {
                annotations.remove("checksum/config");
            }
            let volumes = template["spec"]["volumes"].as_array_mut().context("volumes")?;
            for volume in volumes.iter_mut() {
                if let Some(name) = volume.pointer_mut("/configMap/name") {
                    *name = without_hash(name.as_str().context("a name")?).into();
                }
            }
            // Their order has no meaning.
            volumes.sort_by_key(|volume| volume["name"].to_string());
            let mounts =
                template["spec"]["containers"][0]["volumeMounts"].as_array_mut().context("mounts")?;
            mounts.sort_by_key(|mount| mount["name"].to_string());
        }
        if object["kind"] == "ConfigMap" {
            object["metadata"]["name"] =
                without_hash(object["metadata"]["name"].as_str().context("a name")?).into();
            for file in object["data"].as_object_mut().context("data")?.values_mut() {
                *file = yaml(file.as_str().context("a text")?).await?.into();
            }
        }
        let key = format!("{} {}", object["kind"], object["metadata"]["name"]);
        assert!(found.insert(key.clone(), object).is_none(), "{key} twice");
    }
    Ok(found)
}

/// Removes the hash that kustomize appends to generated names.
fn without_hash(name: &str) -> String {
    match name.rsplit_once('-') {
        Some((name, hash)) if name == "kas-config" && hash.len() == 10 => name.to_owned(),
        _ => name.to_owned(),
    }
}

#[tokio::test]
async fn kustomize_renders_the_same_objects_as_the_charts() -> Result<()> {
    for (folder, chart, values) in pairs() {
        let path = here(&format!("deploy/kustomize/{folder}"));
        let hint = "the tests need kubectl (Debian: kubernetes-client)";
        let made = output("kubectl".as_ref(), &["kustomize", text(&path)?], "", hint).await?;
        let made = comparable(&yaml(&made).await?).await?;
        let rendered = helm_one(render(chart, &values, chart, chart)).await?;
        let rendered = comparable(rendered["objects"].as_array().context("objects")?).await?;
        let names = |objects: &BTreeMap<String, Value>| objects.keys().cloned().collect::<Vec<_>>();
        assert_eq!(names(&made), names(&rendered), "{folder}");
        for (name, object) in &rendered {
            assert_eq!(
                &made[name], object,
                "{folder}: {name}: kustomize on the left, the chart on the right"
            );
        }
    }
    Ok(())
}
