//! A real agentk process.

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};
use tempfile::TempDir;

use crate::{
    kas::{get, metric, metric_is, metric_is_at_least, replace},
    process::{Process, program},
};

/// A running agentk that serves the benchmark service and, if given, an API server.
#[derive(Debug)]
pub struct Agentk {
    /// The process.
    pub process: Process,
    /// Metrics and probes.
    pub observability: SocketAddr,
    token_file: PathBuf,
    _dir: TempDir,
}

impl Agentk {
    /// Starts one that dials `kas` and serves only the benchmark service.
    ///
    /// # Errors
    /// When it does not start.
    pub async fn start(kas: SocketAddr, token: &str) -> Result<Self> {
        // Nothing listens on port 1: tests with this agentk do not use the cluster.
        Self::start_with(kas, token, "http://127.0.0.1:1").await
    }

    /// Starts one that dials `kas` and serves the API server at `server`.
    ///
    /// # Errors
    /// When it does not start.
    pub async fn start_with(kas: SocketAddr, token: &str, server: &str) -> Result<Self> {
        Self::start_in(kas, token, &["--kube-server", server]).await
    }

    /// Starts one that dials `kas` and serves the cluster of a kubeconfig, with its credentials.
    ///
    /// # Errors
    /// When it does not start.
    pub async fn start_with_kubeconfig(kas: SocketAddr, token: &str, kubeconfig: &Path) -> Result<Self> {
        let kubeconfig = kubeconfig.to_str().context("the path of a kubeconfig is UTF-8")?;
        Self::start_in(kas, token, &["--kubeconfig", kubeconfig]).await
    }

    /// Starts one that dials `kas` with TLS and trusts the CA in `ca`.
    ///
    /// # Errors
    /// When it does not start.
    pub async fn start_tls(kas: SocketAddr, token: &str, ca: &Path) -> Result<Self> {
        let ca = ca.to_str().context("the path of a CA file is UTF-8")?;
        let arguments = ["--kube-server", "http://127.0.0.1:1", "--ca-cert-file", ca];
        Self::start_at(None, &format!("grpcs://{kas}"), token, &arguments).await
    }

    /// Starts one that dials this address of kas, trusts the CA in `ca` in addition to the system's, and
    /// serves only the benchmark service.
    ///
    /// # Errors
    /// When it does not start.
    pub async fn start_url(url: &str, token: &str, ca: Option<&Path>) -> Result<Self> {
        let mut arguments = vec!["--kube-server", "http://127.0.0.1:1"];
        if let Some(ca) = ca {
            arguments.extend(["--ca-cert-file", ca.to_str().context("the path of a CA file is UTF-8")?]);
        }
        Self::start_at(None, url, token, &arguments).await
    }

    /// Starts one in a network namespace that serves only the benchmark service.
    ///
    /// # Errors
    /// When it does not start.
    pub async fn start_from(namespace: Option<&Path>, kas: SocketAddr, token: &str) -> Result<Self> {
        let cluster = ["--kube-server", "http://127.0.0.1:1"];
        Self::start_at(namespace, &format!("grpc://{kas}"), token, &cluster).await
    }

    /// Starts one that dials `kas` and serves the API server at `server`, with further arguments.
    ///
    /// # Errors
    /// When it does not start.
    pub async fn start_with_arguments(
        kas: SocketAddr,
        token: &str,
        server: &str,
        arguments: &[&str],
    ) -> Result<Self> {
        Self::start_in(kas, token, &[&["--kube-server", server], arguments].concat()).await
    }

    async fn start_in(kas: SocketAddr, token: &str, cluster: &[&str]) -> Result<Self> {
        Self::start_at(None, &format!("grpc://{kas}"), token, cluster).await
    }

    /// Starts one that dials this address of kas, with additional arguments and variables, and serves only
    /// the benchmark service.
    ///
    /// # Errors
    /// When it does not start.
    pub async fn start_with_url(
        url: &str,
        token: &str,
        arguments: &[&str],
        env: &[(&str, &str)],
    ) -> Result<Self> {
        let arguments = [&["--kube-server", "http://127.0.0.1:1"], arguments].concat();
        Self::start_process(None, url, token, &arguments, env).await
    }

    /// Starts one that dials these addresses of kas, separated by commas, with further arguments that name
    /// its cluster.
    ///
    /// # Errors
    /// When it does not start.
    pub async fn start_at_urls(urls: &str, token: &str, cluster: &[&str]) -> Result<Self> {
        Self::start_at(None, urls, token, cluster).await
    }

    /// As [`start_at_urls`](Self::start_at_urls), in a network namespace.
    ///
    /// # Errors
    /// When it does not start.
    pub async fn start_at_urls_in(
        namespace: &Path,
        urls: &str,
        token: &str,
        cluster: &[&str],
    ) -> Result<Self> {
        Self::start_at(Some(namespace), urls, token, cluster).await
    }

    async fn start_at(namespace: Option<&Path>, kas: &str, token: &str, further: &[&str]) -> Result<Self> {
        Self::start_process(namespace, kas, token, further, &[]).await
    }

    async fn start_process(
        namespace: Option<&Path>,
        kas: &str,
        token: &str,
        further: &[&str],
        variables: &[(&str, &str)],
    ) -> Result<Self> {
        let dir = TempDir::with_prefix("agentk-test-").context("a folder for agentk")?;
        let token_file = dir.path().join("token");
        replace(&token_file, token.as_bytes())?;
        let agentk = tokio::task::spawn_blocking(|| program("agentk")).await??;
        let file = token_file.to_str().context("the folder's name is UTF-8")?;
        let arguments = [
            ["--kas-address", kas],
            ["--token-file", file],
            ["--observability-address", "127.0.0.1:0"],
            ["--log-format", "json"],
        ];
        let mut arguments: Vec<&str> = arguments.into_iter().flatten().collect();
        arguments.extend(further);
        arguments.push("--bench-module");
        let log = std::env::var("AGENTK_TEST_LOG").unwrap_or_default();
        let mut env = variables.to_vec();
        if !log.is_empty() {
            env.push(("RUST_LOG", &log));
        }
        let process = Process::start_in(namespace, "agentk", &agentk, &arguments, &env).await?;
        let observability = process
            .logged("where its metrics are", |line| {
                (line["message"] == "metrics and probes").then(|| line["address"].as_str()?.parse().ok())?
            })
            .await?;
        Ok(Self { process, observability, token_file, _dir: dir })
    }

    /// Replaces the token in its file.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn set_token(&self, token: &str) -> Result<()> {
        replace(&self.token_file, token.as_bytes())
    }

    /// Asks the observability listener, and returns status and body.
    ///
    /// # Errors
    /// When it does not answer.
    pub async fn get(&self, path: &str) -> Result<(http::StatusCode, String)> {
        get(self.observability, path).await
    }

    /// Returns the value of a metric; 0 when there is no such line.
    ///
    /// # Errors
    /// When the metrics cannot be had.
    pub async fn metric(&self, name: &str) -> Result<f64> {
        metric(self.observability, name).await
    }

    /// Waits until a metric has this value.
    ///
    /// # Errors
    /// When it does not soon.
    pub async fn metric_is(&self, name: &str, value: f64) -> Result<()> {
        metric_is(self.observability, name, value).await
    }

    /// Waits until at least two tunnels are idle: the pool has more after a request took one, and
    /// gives them up a minute later.
    ///
    /// # Errors
    /// When they are not soon.
    pub async fn connected(&self) -> Result<()> {
        metric_is_at_least(self.observability, "agentk_tunnels_idle", 2.0).await
    }
}
