//! The policy of the cluster's owner, with the real kubectl, kas, agentk and API server.

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    process::Stdio,
};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use testkit::{
    agentk::Agentk,
    certificates::Certificates,
    endpoint::{self, JANE},
    kas::{Kas, replace, token},
    kubernetes::{Access, Kubernetes},
    process::{SOON, program},
};
use tokio::{
    process::Command,
    time::{Instant, timeout},
};

use crate::setup::{AGENT, exclusive};

/// The token of the user `joe`, whose requests run as the user `kas:deployer`.
const JOE: &str = "kasu_joejoejoejoejoejoejoejoejoejoejoejoejoejoej";

const POLICY: &str = r#"
agent: [{verbs: [get, list, watch], resources: [pods], namespaces: [policy-a]}]
impersonated:
  users: ["kas:*"]
  groups: ["kas:ci"]
  rules: [{verbs: [get, create, patch], resources: [configmaps], namespaces: [policy-a]}]
"#;

/// Writes a kubeconfig for a user of kas.
fn kubeconfig(folder: &Path, name: &str, token: &str, address: SocketAddr, ca: &Path) -> Result<PathBuf> {
    let path = folder.join(name);
    let server = format!("https://{address}/agents/{AGENT}");
    endpoint::write_kubeconfig(&path, &server, ca, json!({ "token": token }), None)?;
    Ok(path)
}

async fn start_kas(folder: &Path) -> Result<(Kas, SocketAddr, PathBuf)> {
    let users = folder.join("users.yaml");
    endpoint::write_users(&users, &[("jane", JANE), ("joe", JOE)])?;
    // kubectl sends its token to a server with TLS only.
    let certificates = Certificates::new(folder, &["127.0.0.1"])?;
    let deployer = json!({ "impersonate": { "username": "kas:deployer", "groups": ["kas:ci"] } });
    let kas = Kas::start_with_config(json!({ "agent": { "kubernetes_api": {
        "listen": {
            "address": "127.0.0.1:0",
            "certificate_file": certificates.certificate,
            "key_file": certificates.key,
        },
        "users": { "file": users },
        "access": [
            { "agents": "all", "users": ["kas:jane"], "as": "agent" },
            { "agents": "all", "users": ["kas:joe"], "as": deployer },
        ],
    } } }))
    .await?;
    let address = endpoint::address(&kas).await?;
    Ok((kas, address, certificates.ca))
}

/// Runs kubectl, which must fail, and returns what it says.
async fn refused(kubernetes: &Kubernetes, kubeconfig: &Path, arguments: &[&str]) -> Result<String> {
    let outcome = kubernetes.kubectl_as(kubeconfig, arguments).await;
    let error = outcome.err().with_context(|| format!("{arguments:?} is allowed"))?;
    Ok(format!("{error:#}"))
}

#[tokio::test]
async fn kubectl_may_do_what_the_policy_allows_and_a_wrong_policy_changes_nothing() -> Result<()> {
    let exclusive = exclusive().await?;
    let kubernetes = &*exclusive.kubernetes;
    for namespace in ["policy-a", "policy-b"] {
        kubernetes.create_pods(namespace, "web", 1).await?;
    }
    let role = ["create", "clusterrole", "policy-ci", "--verb=*", "--resource=configmaps"];
    kubernetes.kubectl(&role).await?;
    let binding = ["create", "clusterrolebinding", "policy-ci", "--clusterrole=policy-ci", "--group=kas:ci"];
    kubernetes.kubectl(&binding).await?;
    let files = tempfile::TempDir::with_prefix("policy-test-")?;
    let (kas, address, ca) = start_kas(files.path()).await?;
    let jane = kubeconfig(files.path(), "jane", JANE, address, &ca)?;
    let joe = kubeconfig(files.path(), "joe", JOE, address, &ca)?;

    let (bearer, policy, audit) =
        (files.path().join("bearer"), files.path().join("policy.yaml"), files.path().join("audit.log"));
    let account = kubernetes.service_account("policy-a", "agentk", Access::Admin).await?;
    replace(&bearer, account.as_bytes())?;
    replace(&policy, POLICY.as_bytes())?;
    let api_ca = kubernetes.ca_file();
    let arguments: Vec<&str> = [
        ("--kube-token-file", &bearer),
        ("--kube-ca-file", &api_ca),
        ("--policy-file", &policy),
        ("--audit-log", &audit),
    ]
    .into_iter()
    .map(|(flag, path)| anyhow::Ok([flag, path.to_str().context("the path is UTF-8")?]))
    .collect::<Result<Vec<_>>>()?
    .concat();
    let agentk =
        Agentk::start_with_arguments(kas.agent, &token(AGENT), &kubernetes.server(), &arguments).await?;
    agentk.connected().await?;
    agentk.metric_is("agentk_policy_current", 1.0).await?;

    // With agentk's own account.
    let pods = kubernetes.kubectl_as(&jane, &["get", "pods", "-n", "policy-a", "-o", "name"]).await?;
    assert_eq!(pods.trim(), "pod/web-00000");
    let list_b = ["get", "pods", "-n", "policy-b", "-o", "name"];
    let said = refused(kubernetes, &jane, &list_b).await?;
    let reason = r#"agentk: the policy of this agent does not allow its own account to list pods in namespace "policy-b""#;
    ensure!(said.contains("Error from server (Forbidden)") && said.contains(reason), "{said}");
    for arguments in [
        &["get", "pods", "-A"][..],
        &["get", "secrets", "-n", "policy-a"],
        &["delete", "pod", "web-00000", "-n", "policy-a"],
        &["get", "--raw", "/metrics"],
    ] {
        let mut arguments = arguments.to_vec();
        let raw = format!("/agents/{AGENT}/metrics");
        if arguments.contains(&"--raw") {
            arguments[2] = &raw;
        }
        let said = refused(kubernetes, &jane, &arguments).await?;
        ensure!(said.contains("the policy of this agent does not allow"), "{arguments:?}: {said}");
    }
    // As another user: the policy allows what RBAC may allow.
    let create = ["create", "configmap", "made", "-n", "policy-a", "--from-literal=a=b"];
    kubernetes.kubectl_as(&joe, &create).await?;
    for arguments in [
        &["get", "pods", "-n", "policy-a"][..],
        &["delete", "configmap", "made", "-n", "policy-a"],
        &["create", "configmap", "made", "-n", "policy-b"],
    ] {
        let said = refused(kubernetes, &joe, arguments).await?;
        ensure!(
            said.contains(r#"agentk: the policy of this agent does not allow user "kas:deployer" to "#),
            "{arguments:?}: {said}"
        );
    }

    // A wrong policy is reported, and the last valid one stays in use.
    replace(&policy, b"agent: [{verbs: [list], resources: [pods], namespace: [policy-b]}]")?;
    agentk.metric_is("agentk_policy_current", 0.0).await?;
    refused(kubernetes, &jane, &list_b).await?;
    kubernetes.kubectl_as(&jane, &["get", "pods", "-n", "policy-a", "-o", "name"]).await?;
    let log = agentk.process.log();
    ensure!(log.contains("agent[0].namespace: found an unknown key"), "{log}");
    let doctor = doctor(&kas, files.path(), &policy).await?;
    ensure!(doctor.0 == Some(1), "{doctor:?}");
    ensure!(doctor.1.contains("FAIL  policy") && doctor.1.contains("agent[0].namespace"), "{doctor:?}");

    replace(&policy, b"agent: [{verbs: [list], resources: [pods], namespaces: [policy-b]}]")?;
    agentk.metric_is("agentk_policy_current", 1.0).await?;
    kubernetes.kubectl_as(&jane, &list_b).await?;
    refused(kubernetes, &jane, &["get", "pods", "-n", "policy-a"]).await?;
    refused(kubernetes, &joe, &["get", "configmap", "made", "-n", "policy-a"]).await?;

    // The audit log of the cluster's owner has each of them, with the id that kas' log has.
    let until = Instant::now() + SOON;
    let lines: Vec<Value> = loop {
        let text = std::fs::read_to_string(&audit)?;
        let lines = text.lines().map(serde_json::from_str).collect::<Result<Vec<Value>, _>>()?;
        let is_there = |line: &Value| line["rule"] == "impersonated.users" && line["user"] == "kas:deployer";
        if lines.iter().any(is_there) {
            break lines;
        }
        ensure!(Instant::now() < until, "{text}");
        tokio::task::yield_now().await;
    };
    let made = lines.iter().find(|line| line["verb"] == "create" && line["decision"] == "allow");
    let made = made.context("the config map")?;
    assert_eq!((&made["user"], &made["resource"]), (&"kas:deployer".into(), &"configmaps".into()));
    assert_eq!((&made["rule"], &made["status"]), (&"impersonated.rules[0]".into(), &201.into()));
    ensure!(lines.iter().all(|line| line["request_id"].is_string()), "{lines:?}");
    let text = std::fs::read_to_string(&audit)?;
    ensure!(!text.contains(&account) && !text.contains(JANE), "a credential is in the audit log");
    Ok(())
}

/// Runs `agentk doctor`, and returns its exit code and its output.
async fn doctor(kas: &Kas, folder: &Path, policy: &Path) -> Result<(Option<i32>, String)> {
    let agentk = tokio::task::spawn_blocking(|| program("agentk")).await??;
    let file = folder.join("agent-token");
    replace(&file, token(AGENT).as_bytes())?;
    // Nothing of this check needs the cluster, but the API server must be there for the exit code.
    let server = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let url = format!("http://{}", server.local_addr()?);
    let answering = tokio::spawn(async move {
        while let Ok((mut stream, _)) = server.accept().await {
            let _ = tokio::io::AsyncReadExt::read(&mut stream, &mut [0; 4096]).await;
            let answer = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 24\r\n\r\n{\"gitVersion\":\"v1.36.3\"}";
            let _ = tokio::io::AsyncWriteExt::write_all(&mut stream, answer).await;
        }
    });
    let child = Command::new(agentk)
        .args(["doctor", "--silence", "0s", "--observability-address", "127.0.0.1:0", "--kube-server", &url])
        .args(["--kas-address", &format!("grpc://{}", kas.agent), "--token-file"])
        .arg(&file)
        .arg("--policy-file")
        .arg(policy)
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output();
    let output = timeout(SOON, child).await.context("agentk doctor did not end")??;
    answering.abort();
    Ok((output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned()))
}
