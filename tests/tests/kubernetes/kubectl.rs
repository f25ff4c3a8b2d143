//! The real kubectl through kas' endpoint, without GitLab: users and access rules of kas. It is the one that
//! the tests build, not that of `PATH`.

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use anyhow::{Context as _, Result, anyhow, ensure};
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
    io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader},
    net::TcpStream,
    process::Command,
    time::timeout,
};

use crate::setup::{AGENT, exclusive};

/// The token of the user `joe`, who may use no agent.
const JOE: &str = "kasu_joejoejoejoejoejoejoejoejoejoejoejoejoejoej";

/// A kas with the endpoint, and an agentk that is connected to it.
struct Endpoint {
    kas: Kas,
    address: SocketAddr,
    ca: PathBuf,
    _agentk: Agentk,
    files: tempfile::TempDir,
}

impl Endpoint {
    async fn start(kubernetes: &Kubernetes, namespace: &str) -> Result<Self> {
        let files = tempfile::TempDir::with_prefix("kubectl-test-")?;
        let users = files.path().join("users.yaml");
        endpoint::write_users(&users, &[("jane", JANE), ("joe", JOE)])?;
        // kubectl sends its token to a server with TLS only.
        let certificates = Certificates::new(files.path(), &["127.0.0.1"])?;
        let audit = files.path().join("audit.log");
        let kas = Kas::start_with_config(json!({
            "agent": { "kubernetes_api": {
                "listen": {
                    "address": "127.0.0.1:0",
                    "certificate_file": certificates.certificate,
                    "key_file": certificates.key,
                },
                "users": { "file": users },
                "access": [{ "agents": "all", "users": ["kas:jane"], "as": "agent" }],
            } },
            "observability": { "audit": { "output": audit } },
        }))
        .await?;
        let address = endpoint::address(&kas).await?;
        let bearer = kubernetes.service_account(namespace, "agentk", Access::Admin).await?;
        let kubeconfig = kubernetes.kubeconfig_with_token(namespace, &bearer)?;
        let agentk = Agentk::start_with_kubeconfig(kas.agent, &token(AGENT), &kubeconfig).await?;
        agentk.connected().await?;
        Ok(Self { kas, address, ca: certificates.ca, _agentk: agentk, files })
    }

    /// Writes a kubeconfig for a user of kas.
    fn kubeconfig(&self, name: &str, token: &str) -> Result<PathBuf> {
        let path = self.files.path().join(name);
        let server = format!("https://{}/agents/{AGENT}", self.address);
        endpoint::write_kubeconfig(&path, &server, &self.ca, json!({ "token": token }), None)?;
        Ok(path)
    }

    /// Runs `kasctl kubeconfig` for a token and returns the file, which is new or the one before.
    async fn kasctl_kubeconfig(&self, token: &str, arguments: &[&str]) -> Result<PathBuf> {
        endpoint::kasctl_kubeconfig(self.files.path(), self.address, &self.ca, token, arguments).await
    }

    /// Returns the lines of the audit log about requests of a kind that have ended.
    fn ended(&self, kind: &str) -> Result<Vec<Value>> {
        let text = std::fs::read_to_string(self.files.path().join("audit.log"))?;
        let lines = text.lines().map(serde_json::from_str::<Value>).collect::<Result<Vec<_>, _>>()?;
        Ok(lines.into_iter().filter(|line| line["event"] == "end" && line["kind"] == kind).collect())
    }
}

#[tokio::test]
async fn kubectl_reads_applies_and_watches_through_kas_until_it_leaves() -> Result<()> {
    let exclusive = exclusive().await?;
    let kubernetes = &*exclusive.kubernetes;
    kubernetes.create_pods("kubectl", "web", 2).await?;
    let endpoint = Endpoint::start(kubernetes, "kubectl").await?;
    let jane = endpoint.kubeconfig("jane", JANE)?;

    let direct = kubernetes.kubectl(&["get", "pods", "-n", "kubectl", "-o", "json"]).await?;
    let through = kubernetes.kubectl_as(&jane, &["get", "pods", "-n", "kubectl", "-o", "json"]).await?;
    assert_eq!(through, direct);
    // With --raw, kubectl adds the path to that of the server. Some older ones replace it.
    let version = kubernetes.kubectl_as(&jane, &["get", "--raw", "/version?x=%2F"]).await?;
    assert!(version.contains("gitVersion"), "{version}");

    let manifest = endpoint.files.path().join("map.json");
    let map = |value: &str| {
        json!({
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": { "name": "applied", "namespace": "kubectl" },
            "data": { "key": value },
        })
    };
    let file = manifest.to_str().context("the path is UTF-8")?;
    for value in ["one", "two"] {
        replace(&manifest, &serde_json::to_vec(&map(value))?)?;
        kubernetes.kubectl_as(&jane, &["apply", "-f", file]).await?;
        let jsonpath = ["get", "configmap", "applied", "-n", "kubectl", "-o", "jsonpath={.data.key}"];
        assert_eq!(kubernetes.kubectl(&jsonpath).await?, value);
    }

    let joe = endpoint.kubeconfig("joe", JOE)?;
    let refused = kubernetes.kubectl_as(&joe, &["get", "pods", "-n", "kubectl"]).await;
    let reason = refused.err().context("joe may not")?.to_string();
    ensure!(reason.contains("kas: this credential gives no access to this agent"), "{reason}");

    // A watch goes on until kas leaves, and then ends regularly.
    let mut watch = Command::new(kubernetes.kubectl_program().await?)
        .args(["get", "pods", "-n", "kubectl", "-w", "--no-headers", "-o", "name", "--kubeconfig"])
        .arg(&jane)
        .env("HOME", endpoint.files.path())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .context("could not run kubectl")?;
    let mut lines = BufReader::new(watch.stdout.take().context("standard output is a pipe")?).lines();
    let mut line = async || -> Result<String> {
        let read = timeout(SOON, lines.next_line()).await.context("no line came")?;
        read?.ok_or_else(|| anyhow!("the watch has ended"))
    };
    for _ in 0..2 {
        ensure!(line().await?.starts_with("pod/web-"), "the pods that exist");
    }
    kubernetes.create_pods("kubectl", "later", 1).await?;
    ensure!(line().await?.starts_with("pod/later-"), "a pod that was created while the watch was open");

    let status = endpoint.kas.leave(Duration::from_secs(30)).await?;
    ensure!(status.success(), "{status}");
    let ended = timeout(SOON, watch.wait()).await.context("the watch has not ended")??;
    ensure!(ended.success(), "the watch ended regularly: {ended}");

    let watches = endpoint.ended("watch")?;
    ensure!(!watches.is_empty(), "the watch is in the audit log");
    for line in &watches {
        assert_eq!((&line["ended_by"], &line["http_status"]), (&"drain".into(), &200.into()), "{line}");
        assert_eq!(
            (&line["source"], &line["subject"], &line["mode"]),
            (&"file".into(), &"kas:jane".into(), &"agent".into())
        );
        assert_eq!((&line["verb"], &line["resource"]), (&"watch".into(), &"pods".into()));
    }
    let denied: Vec<_> =
        endpoint.ended("short")?.into_iter().filter(|line| line["decision"] == "deny").collect();
    ensure!(!denied.is_empty() && denied.iter().all(|line| line["http_status"] == 403), "{denied:?}");
    Ok(())
}

#[tokio::test]
async fn kubectl_uses_the_contexts_and_credentials_of_kasctl() -> Result<()> {
    let exclusive = exclusive().await?;
    let kubernetes = &*exclusive.kubernetes;
    kubernetes.create_pods("kubeconfig", "web", 2).await?;
    let endpoint = Endpoint::start(kubernetes, "kubeconfig").await?;
    let pods = ["get", "pods", "-n", "kubeconfig", "-o", "json"];
    let direct = kubernetes.kubectl(&pods).await?;

    // The agent is in the list of kas, and kubectl gets its token from the plugin.
    let selector = format!("id={AGENT}");
    let config = endpoint.kasctl_kubeconfig(JANE, &[&selector, "--use"]).await?;
    assert_eq!(kubernetes.kubectl_as(&config, &pods).await?, direct);
    let text = std::fs::read_to_string(&config)?;
    ensure!(text.contains("interactiveMode: Never") && !text.contains(JANE), "{text}");

    // kubectl rewrites the file in its own way, and kasctl finds its entries again.
    let context = kubernetes.kubectl_as(&config, &["config", "current-context"]).await?;
    let context = context.trim();
    let set = ["config", "set-context", context, "--namespace", "kubeconfig"];
    kubernetes.kubectl_as(&config, &set).await?;
    let own = ["config", "set-context", "own", "--cluster", "other", "--user", "me"];
    kubernetes.kubectl_as(&config, &own).await?;
    let rewritten = std::fs::read_to_string(&config)?;
    endpoint.kasctl_kubeconfig(JANE, &[&selector, "--use"]).await?;
    assert_eq!(std::fs::read_to_string(&config)?, rewritten, "nothing has changed");
    let without_namespace = kubernetes.kubectl_as(&config, &["get", "pods", "-o", "json"]).await?;
    assert_eq!(without_namespace, direct);

    // Without the plugin, kubectl reads the token file itself.
    endpoint.kasctl_kubeconfig(JANE, &[&selector, "--use", "--no-plugin"]).await?;
    let text = std::fs::read_to_string(&config)?;
    ensure!(text.contains("tokenFile: ") && !text.contains("exec:") && text.contains("name: own"), "{text}");
    assert_eq!(kubernetes.kubectl_as(&config, &pods).await?, direct);
    Ok(())
}

#[tokio::test]
async fn kubectl_uses_a_certificate_that_kas_has_made_on_loopback() -> Result<()> {
    let exclusive = exclusive().await?;
    let kubernetes = &*exclusive.kubernetes;
    kubernetes.create_pods("loopback", "web", 1).await?;
    let files = tempfile::TempDir::with_prefix("kubectl-test-")?;
    let at = |name: &str| files.path().join(name).into_os_string().into_string();
    let path = |name: &str| at(name).map_err(|_| anyhow!("the path is UTF-8"));
    let (users, jane, config) = (path("users.yaml")?, path("jane.token")?, path("config")?);
    let ca = path("kubernetes-ca.pem")?;
    let kasctl = tokio::task::spawn_blocking(|| program("kasctl")).await??;
    let run = async |arguments: &[&str]| -> Result<()> {
        let output = Command::new(&kasctl).args(arguments).kill_on_drop(true).output();
        let output = timeout(SOON, output).await.context("kasctl did not end")??;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Ok(())
    };
    run(&["token", "user", "--name", "jane", "--users-file", &users, "--token-file", &jane]).await?;

    // As without a configuration file, but on another port.
    let kas = Kas::start_with_config(json!({
        "state_dir": files.path(),
        "agent": { "kubernetes_api": {
            "listen": { "address": "127.0.0.1:0" },
            "users": { "file": users },
            "access": [{ "agents": "all", "users": ["kas:*"], "as": "agent" }],
        } },
    }))
    .await?;
    let named = kas.process.logged("the files for kubectl", |line| {
        let are_named = line["ca_file"] == ca.as_str() && line["users_file"] == users.as_str();
        line["url"].as_str().filter(|_| are_named).map(str::to_owned)
    });
    let url = named.await?;
    let bearer = kubernetes.service_account("loopback", "agentk", Access::Admin).await?;
    let kubeconfig = kubernetes.kubeconfig_with_token("loopback", &bearer)?;
    let agentk = Agentk::start_with_kubeconfig(kas.agent, &token(AGENT), &kubeconfig).await?;
    agentk.connected().await?;

    let agent = AGENT.to_string();
    let write = ["kubeconfig", "--url", &url, "--use", "--agent", &agent, "--certificate-authority", &ca];
    run(&[&write[..], &["--token-file", &jane, "--kubeconfig", &config]].concat()).await?;
    let pods = ["get", "pods", "-n", "loopback", "-o", "json"];
    let through = kubernetes.kubectl_as(Path::new(&config), &pods).await?;
    assert_eq!(through, kubernetes.kubectl(&pods).await?);

    // The same port without TLS.
    let plain = url.trim_start_matches("https://").trim_end_matches('/');
    let mut stream = TcpStream::connect(plain).await?;
    let bearer = std::fs::read_to_string(&jane)?;
    let head = format!("GET /agents HTTP/1.0\r\nHost: kas\r\nAuthorization: Bearer {bearer}\r\n\r\n");
    stream.write_all(head.as_bytes()).await?;
    let mut answer = String::new();
    timeout(SOON, stream.read_to_string(&mut answer)).await.context("the answer does not end")??;
    ensure!(answer.starts_with("HTTP/1.0 200 "), "{answer}");
    Ok(())
}
