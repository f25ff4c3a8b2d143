//! A kas that serves the Kubernetes API of its agents to users of a file.

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::{process::Command, time::timeout};

use crate::{
    kas::{Kas, merge, replace},
    process::{SOON, program},
};

/// The token of the user `jane`, in the endpoint of [`Endpoint`].
pub const JANE: &str = "kasu_janejanejanejanejanejanejanejanejanejanejan";

/// A running kas, on plain HTTP, with the user `jane`: she may use every agent with the rights of agentk.
#[derive(Debug)]
pub struct Endpoint {
    /// The kas.
    pub kas: Kas,
    /// Where it serves kubectl.
    pub address: SocketAddr,
    files: TempDir,
}

impl Endpoint {
    /// Starts one; `over` is merged into its configuration.
    ///
    /// # Errors
    /// When it does not start.
    pub async fn start(over: Value) -> Result<Self> {
        let files = TempDir::with_prefix("endpoint-test-").context("a folder for the users of kas")?;
        Self::start_in(files, over).await
    }

    /// As [`start`](Self::start), with an audit log.
    ///
    /// # Errors
    /// As of [`start`](Self::start).
    pub async fn start_audited(over: Value) -> Result<Self> {
        let files = TempDir::with_prefix("endpoint-test-").context("a folder for the users of kas")?;
        let mut config = json!({ "observability": { "audit": { "output": audit_log(files.path()) } } });
        merge(&mut config, over);
        Self::start_in(files, config).await
    }

    async fn start_in(files: TempDir, over: Value) -> Result<Self> {
        let users = files.path().join("users.yaml");
        write_users(&users, &[("jane", JANE)])?;
        let mut config = json!({ "agent": { "kubernetes_api": {
            "listen": { "address": "127.0.0.1:0" },
            "users": { "file": users },
            "access": [{ "agents": "all", "users": ["kas:jane"], "as": "agent" }],
        } } });
        merge(&mut config, over);
        let kas = Kas::start_with_config(config).await?;
        let address = address(&kas).await?;
        Ok(Self { kas, address, files })
    }

    /// Returns the lines of its audit log.
    ///
    /// # Errors
    /// When it has none.
    pub fn audited(&self) -> Result<Vec<Value>> {
        let text = std::fs::read_to_string(audit_log(self.files.path()))?;
        // The last one may be incomplete.
        let lines = text.split_inclusive('\n').filter(|line| line.ends_with('\n'));
        Ok(lines.map(serde_json::from_str).collect::<Result<_, _>>()?)
    }
}

fn audit_log(files: &Path) -> PathBuf {
    files.join("audit.log")
}

/// Writes a file of users, each with one token.
///
/// # Errors
/// When it cannot be written.
pub fn write_users(file: &Path, users: &[(&str, &str)]) -> Result<()> {
    let user = |(name, token): &(&str, &str)| {
        let hash = ids::TokenHash::of(token.as_bytes()).to_hex();
        json!({ "name": name, "tokens": [format!("sha256:{hash}")] })
    };
    let users: Vec<Value> = users.iter().map(user).collect();
    replace(file, &serde_json::to_vec(&json!({ "users": users }))?)
}

/// Returns where a kas serves kubectl.
///
/// # Errors
/// When it does not.
pub async fn address(kas: &Kas) -> Result<SocketAddr> {
    kas.process
        .logged("where kubectl is served", |line| {
            (line["message"] == "kas is serving").then(|| line["kubernetes"].as_str()?.parse().ok())?
        })
        .await
}

/// Writes a kubeconfig with one context, for a server with TLS. `user` has the keys of the user, such as
/// `token`.
///
/// # Errors
/// When it cannot be written.
pub fn write_kubeconfig(
    file: &Path,
    server: &str,
    ca: &Path,
    user: Value,
    namespace: Option<&str>,
) -> Result<()> {
    let config = json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{ "name": "c", "cluster": { "server": server, "certificate-authority": ca } }],
        "users": [{ "name": "u", "user": user }],
        "contexts": [{ "name": "x", "context": { "cluster": "c", "user": "u", "namespace": namespace } }],
        "current-context": "x",
    });
    replace(file, &serde_json::to_vec(&config)?)
}

/// Runs `kasctl kubeconfig` for the token of a user and an endpoint with TLS, with further arguments. Returns
/// the file, which is new in the folder or the one before.
///
/// # Errors
/// When kasctl fails.
pub async fn kasctl_kubeconfig(
    folder: &Path,
    address: SocketAddr,
    ca: &Path,
    token: &str,
    arguments: &[&str],
) -> Result<PathBuf> {
    let (kubeconfig, file) = (folder.join("kasctl-config"), folder.join("token"));
    replace(&file, token.as_bytes())?;
    let kasctl = tokio::task::spawn_blocking(|| program("kasctl")).await??;
    let output = Command::new(kasctl)
        .args(["kubeconfig", "--url", &format!("https://{address}/")])
        .args(arguments)
        .arg("--ca-file")
        .arg(ca)
        .arg("--kubeconfig")
        .arg(&kubeconfig)
        .arg("--token-file")
        .arg(file)
        .kill_on_drop(true)
        .output();
    let output = timeout(SOON, output).await.context("kasctl did not end")??;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(kubeconfig)
}
