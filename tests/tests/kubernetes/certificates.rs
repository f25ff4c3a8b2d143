//! kubectl with a client certificate, which kas verifies.

use std::{
    path::{Path, PathBuf},
    process::Stdio,
};

use anyhow::{Context as _, Result, anyhow, ensure};
use serde_json::json;
use testkit::{
    agentk::Agentk,
    certificates::{Certificates, UserAuthority},
    endpoint,
    kas::{Kas, token},
    kubernetes::Access,
    process::SOON,
};
use tokio::{
    io::{AsyncBufReadExt as _, BufReader},
    process::Command,
    time::timeout,
};

use crate::setup::{AGENT, exclusive};

/// Writes the certificate of a user, and a kubeconfig that uses it. Returns that.
fn kubeconfig(
    authority: &UserAuthority,
    (name, serial): (&str, u64),
    server: &str,
    ca: &Path,
) -> Result<PathBuf> {
    let (certificate, key) = authority.user(name, None, serial)?;
    let file = certificate.with_extension("config");
    let user = json!({ "client-certificate": certificate, "client-key": key });
    endpoint::write_kubeconfig(&file, server, ca, user, None)?;
    Ok(file)
}

#[tokio::test]
async fn kubectl_uses_a_client_certificate_until_it_is_revoked() -> Result<()> {
    let exclusive = exclusive().await?;
    let kubernetes = &*exclusive.kubernetes;
    kubernetes.create_pods("certificates", "web", 1).await?;
    let files = tempfile::TempDir::with_prefix("certificates-test-")?;
    let server = Certificates::new(files.path(), &["127.0.0.1"])?;
    let authority = UserAuthority::new(files.path())?;
    let kas = Kas::start_with_config(json!({
        "agent": { "kubernetes_api": {
            "listen": {
                "address": "127.0.0.1:0",
                "certificate_file": server.certificate,
                "key_file": server.key,
                "client_ca_file": files.path().join("users-ca.pem"),
                "crl_file": files.path().join("users-crl.pem"),
            },
            "access": [{ "agents": "all", "users": ["kas:jane"], "as": "agent" }],
        } },
    }))
    .await?;
    let url = format!("https://{}/agents/{AGENT}", endpoint::address(&kas).await?);
    let bearer = kubernetes.service_account("certificates", "agentk", Access::Admin).await?;
    let of_agentk = kubernetes.kubeconfig_with_token("certificates", &bearer)?;
    let agentk = Agentk::start_with_kubeconfig(kas.agent, &token(AGENT), &of_agentk).await?;
    agentk.connected().await?;

    let jane = kubeconfig(&authority, ("jane", 7), &url, &server.ca)?;
    let joe = kubeconfig(&authority, ("joe", 8), &url, &server.ca)?;
    let pods = ["get", "pods", "-n", "certificates", "-o", "json"];
    assert_eq!(kubernetes.kubectl_as(&jane, &pods).await?, kubernetes.kubectl(&pods).await?);
    let refused = kubernetes.kubectl_as(&joe, &pods).await.err().context("joe may not")?.to_string();
    ensure!(refused.contains("gives no access to this agent"), "{refused}");

    let mut watch = Command::new(kubernetes.kubectl_program().await?)
        .args(["get", "pods", "-n", "certificates", "-w", "--no-headers", "-o", "name", "--kubeconfig"])
        .arg(&jane)
        .env("HOME", files.path())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .context("could not run kubectl")?;
    let mut lines = BufReader::new(watch.stdout.take().context("standard output is a pipe")?).lines();
    let line = timeout(SOON, lines.next_line()).await.context("no line came")??;
    ensure!(
        line.ok_or_else(|| anyhow!("the watch has ended"))?.starts_with("pod/web-"),
        "the pod that exists"
    );
    authority.revoke(&[7])?;
    timeout(SOON, watch.wait()).await.context("the watch has not ended")??;
    ensure!(kubernetes.kubectl_as(&jane, &pods).await.is_err(), "and there is no new one");
    Ok(())
}
