//! `deploy/agentk.yaml` with a real API server.

use std::path::Path;

use anyhow::{Context as _, Result};
use serde_json::{Value, json};
use testkit::kubernetes::Kubernetes;

use crate::setup::{Chain, exclusive};

/// Returns the manifest's path.
fn manifest() -> Result<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/agentk.yaml");
    Ok(path.to_str().context("the checkout's path is UTF-8")?.to_owned())
}

/// Creates the manifest's namespace, where pods must be restricted and violations also cause warnings.
async fn restricted(kubernetes: &Kubernetes) -> Result<()> {
    kubernetes.ensure_namespace("agentk").await?;
    let labels = ["enforce", "warn"].map(|mode| format!("pod-security.kubernetes.io/{mode}=restricted"));
    kubernetes.kubectl(&["label", "--overwrite", "namespace", "agentk", &labels[0], &labels[1]]).await?;
    Ok(())
}

/// Asks the API server whether it would create this; every warning is an error.
async fn accepts(kubernetes: &Kubernetes, file: &str) -> Result<String> {
    kubernetes.kubectl(&["apply", "--dry-run=server", "--warnings-as-errors", "-f", file]).await
}

#[tokio::test]
async fn the_manifest_is_accepted_under_restricted_pod_security() -> Result<()> {
    let exclusive = exclusive().await?;
    let kubernetes = &*exclusive.kubernetes;
    restricted(kubernetes).await?;
    let manifest = manifest()?;
    let accepted = accepts(kubernetes, &manifest).await?;
    println!("{accepted}");
    assert_eq!(accepted.lines().count(), 4, "{accepted}");
    assert!(accepted.lines().all(|line| line.contains("(server dry run)")), "{accepted}");

    // For a Deployment there is only a warning, but its pod would be refused, so the pod is checked, too.
    kubernetes.kubectl(&["apply", "-f", &manifest]).await?;
    let deployment: Value = serde_json::from_str(
        &kubernetes.kubectl(&["get", "deployment", "agentk", "-n", "agentk", "-o", "json"]).await?,
    )?;
    let template = &deployment["spec"]["template"];
    let pod = |spec: &Value| {
        json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": { "name": "agentk", "namespace": "agentk", "labels": template["metadata"]["labels"] },
            "spec": spec,
        })
    };
    let dir = tempfile::tempdir()?;
    let file = dir.path().join("pod.json");
    let file_name = file.to_str().context("the folder's name is UTF-8")?;
    std::fs::write(&file, pod(&template["spec"]).to_string())?;
    accepts(kubernetes, file_name).await?;

    // Validates the check: with one word changed, both are refused.
    let mut loose = template["spec"].clone();
    loose["containers"][0]["securityContext"]["allowPrivilegeEscalation"] = true.into();
    std::fs::write(&file, pod(&loose).to_string())?;
    let refused = accepts(kubernetes, file_name).await.expect_err("a loose pod is refused").to_string();
    assert!(refused.contains("violates PodSecurity"), "{refused}");
    let text = std::fs::read_to_string(&manifest)?;
    let loose = text.replace("allowPrivilegeEscalation: false", "allowPrivilegeEscalation: true");
    assert_ne!(loose, text);
    std::fs::write(&file, loose)?;
    let refused =
        accepts(kubernetes, file_name).await.expect_err("a loose Deployment is warned of").to_string();
    assert!(refused.contains("1 warning received"), "{refused}");
    Ok(())
}

#[tokio::test]
async fn the_manifests_service_account_may_read_pods_and_nothing_else() -> Result<()> {
    let exclusive = exclusive().await?;
    let kubernetes = &*exclusive.kubernetes;
    restricted(kubernetes).await?;
    kubernetes.kubectl(&["apply", "-f", &manifest()?]).await?;
    kubernetes.create_pods("manifest", "web", 2).await?;
    let token = kubernetes.kubectl(&["create", "token", "agentk", "-n", "agentk", "--duration=24h"]).await?;
    let chain = Chain::start_with_token(kubernetes, "manifest", token.trim()).await?;

    // The rules take effect after a moment.
    let pods = testkit::kas::eventually("the rules count", async || {
        let pods = chain.run(&["pods", "1", "-n", "manifest"]).await?;
        Ok(if pods.code() == Some(0) { Ok(pods.stdout) } else { Err(pods) })
    })
    .await?;
    assert_eq!(pods.lines().count(), 3, "{pods}");
    for (method, path) in [
        ("GET", "/api/v1/secrets"),
        ("GET", "/api/v1/namespaces/manifest/configmaps"),
        ("GET", "/api/v1/namespaces/manifest/pods/web-00000/log"),
        ("DELETE", "/api/v1/namespaces/manifest/pods/web-00000"),
    ] {
        let answer = chain.run(&["request", "1", method, path, "-i"]).await?;
        assert!(answer.stdout.starts_with("HTTP 403 Forbidden\n"), "{method} {path}: {answer:?}");
    }
    Ok(())
}
