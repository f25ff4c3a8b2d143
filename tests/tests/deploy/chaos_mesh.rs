//! The manifests for Chaos Mesh: an API server with its definitions accepts them, and they select the pods of
//! the charts. Chaos Mesh itself does not run here.

use std::{collections::BTreeSet, fs, path::PathBuf};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use testkit::kubernetes::Kubernetes;

use crate::tools::{established, go_module, helm_one, here, render, text, yaml};

/// Every manifest.
const FILES: [&str; 7] = [
    "s01-kill-one.yaml",
    "s02-kill-one-repeatedly.yaml",
    "s09-shut-down-one-by-one.yaml",
    "s09-terminate-then-kill.yaml",
    "s10-cut-one-pair.yaml",
    "s18-bad-network-between-replicas.yaml",
    "s22-half-open-agent.yaml",
];

/// Returns the manifests, each with its text.
fn manifests() -> Result<Vec<(PathBuf, String)>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(here("deploy/chaos-mesh"))? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "yaml") {
            found.push((path.clone(), fs::read_to_string(path)?));
        }
    }
    found.sort();
    let names: Vec<&str> =
        found.iter().filter_map(|(path, _)| path.file_name().and_then(|name| name.to_str())).collect();
    ensure!(names == FILES, "{names:?}");
    Ok(found)
}

/// Returns every object below a key of this name.
fn below<'a>(value: &'a Value, key: &str, found: &mut Vec<&'a Value>) {
    match value {
        Value::Object(fields) => {
            for (name, field) in fields {
                if name == key {
                    found.push(field);
                }
                below(field, key, found);
            }
        }
        Value::Array(items) => items.iter().for_each(|item| below(item, key, found)),
        _ => {}
    }
}

#[tokio::test]
async fn a_real_api_server_accepts_the_manifests_of_chaos_mesh() -> Result<()> {
    let kubernetes = Kubernetes::start().await?;
    let definitions = go_module("github.com/chaos-mesh/chaos-mesh").await?.join("config/crd/bases");
    for kind in ["podchaos", "networkchaos", "schedules"] {
        let file = definitions.join(format!("chaos-mesh.org_{kind}.yaml"));
        kubernetes.kubectl(&["apply", "--server-side", "-f", text(&file)?]).await?;
    }
    established(&kubernetes).await?;
    for namespace in ["kas", "agentk"] {
        kubernetes.ensure_namespace(namespace).await?;
    }
    let accepts = async |file: &str| {
        let dry = ["apply", "--dry-run=server", "--validate=strict", "--warnings-as-errors", "-f", file];
        kubernetes.kubectl(&dry).await
    };
    let dir = tempfile::tempdir()?;
    for (path, content) in manifests()? {
        let said = accepts(text(&path)?).await.with_context(|| path.display().to_string())?;
        let objects = yaml(&content).await?;
        // 'kubectl apply' begins all objects of a file at once.
        assert_eq!(objects.len(), 1, "{}", path.display());
        assert_eq!(said.lines().count(), objects.len(), "{said}");
        assert!(said.lines().all(|line| line.contains("(server dry run)")), "{said}");
        assert!(content.contains("# Not tried on a real Chaos Mesh"), "{}", path.display());

        // Validates the check: a wrong value and an unknown field are refused.
        let file = dir.path().join("wrong.yaml");
        for (right, wrong, says) in
            [("mode: ", "mode: x", "Unsupported value"), ("  mode: ", "  modes: ", "unknown field")]
        {
            fs::write(&file, content.replacen(right, wrong, 1))?;
            let refused = accepts(text(&file)?).await.expect_err("a wrong manifest is refused").to_string();
            assert!(refused.contains(says), "{}: {refused}", path.display());
        }
    }
    Ok(())
}

/// Returns the template of the pods of a chart with its defaults.
async fn pods(chart: &str, values: &Value) -> Result<Value> {
    let rendered = helm_one(render(chart, values, chart, chart)).await?;
    let objects = rendered["objects"].as_array().context("objects")?;
    let deployment = objects.iter().find(|object| object["kind"] == "Deployment").context("a Deployment")?;
    Ok(deployment["spec"]["template"].clone())
}

#[tokio::test]
async fn the_manifests_of_chaos_mesh_select_the_pods_of_the_charts() -> Result<()> {
    let agentk = json!({ "kasAddress": "grpcs://kas.example.com", "token": { "existingSecret": "token" } });
    let (kas, agentk) = (pods("kas", &json!({})).await?, pods("agentk", &agentk).await?);
    let container = json!([kas["spec"]["containers"][0]["name"]]);
    let (mut checked, mut graces, mut killed) = (0, BTreeSet::new(), 0);
    for (path, content) in manifests()? {
        for object in yaml(&content).await? {
            let (mut selectors, mut periods, mut containers) = (Vec::new(), Vec::new(), Vec::new());
            below(&object, "selector", &mut selectors);
            below(&object, "gracePeriod", &mut periods);
            below(&object, "containerNames", &mut containers);
            let kills = content.contains("action: container-kill");
            assert_eq!(containers.len(), usize::from(kills), "{}", path.display());
            assert!(containers.iter().all(|names| **names == container), "{}", path.display());
            killed += containers.len();
            assert!(!selectors.is_empty(), "{}", path.display());
            for selector in selectors.iter().filter(|selector| selector["pods"].is_null()) {
                let namespaces = selector["namespaces"].as_array().context("namespaces")?;
                assert_eq!(namespaces.len(), 1, "{}", path.display());
                let template = if namespaces[0] == "kas" { &kas } else { &agentk };
                let labels = &template["metadata"]["labels"];
                for (name, value) in selector["labelSelectors"].as_object().context("labels")? {
                    assert_eq!(&labels[name], value, "{}: {name}", path.display());
                    checked += 1;
                }
            }
            graces.extend(periods.iter().filter_map(|period| period.as_u64()));
        }
    }
    assert!(checked >= 10, "only {checked} labels were found");
    assert_eq!(killed, 2, "S01 and S02 send SIGKILL");
    // The shortest, and that of the chart. With 0, the kubelet takes that of the pod.
    let grace = kas["spec"]["terminationGracePeriodSeconds"].as_u64().context("a number")?;
    assert_eq!(graces, BTreeSet::from([1, grace]));
    Ok(())
}
