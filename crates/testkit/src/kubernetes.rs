//! A real Kubernetes API for tests: kube-apiserver and etcd as child processes of the test.
//!
//! There is no controller manager, no scheduler and no kubelet, on purpose: pods stay Pending, a namespace
//! gets no ServiceAccount by itself, and a deleted namespace never finishes. What a test needs of that, the
//! methods here create by hand. `tests/kubernetes/go.mod` says which versions run.
//!
//! [`Node`] adds a node whose kubelet serves exec, attach, port-forward and logs, for tests of those.
//! The methods here run the `kubectl` of the API server's version, which is built like the servers, and never
//! that of `PATH`. [`tools`] returns it and an old one, for tests where the version matters.
//!
//! `pods/proxy` and `services/proxy` make the API server dial the pod's IP address: a test that sets one must
//! run in a network namespace without a route out.

pub mod applies;
mod build;
mod client;
pub mod deletions;
mod exclusive;
mod keys;
mod node;
mod objects;
mod servers;

use std::{
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use base64::{Engine as _, prelude::BASE64_STANDARD};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::{
    io::AsyncWriteExt as _,
    sync::{Mutex, OnceCell},
    time::{Instant, sleep, timeout},
};

pub use self::{
    build::{Binaries, Tools, binaries, cache_folder, grafana, helm, tools},
    client::{Reader, Writer},
    exclusive::{Exclusive, exclusive, exclusive_audited},
    node::Node,
    objects::own_address,
};
use self::{
    client::Client,
    keys::Keys,
    servers::{
        Host, NotStarted, Process, compact, log_file, start_api_server, start_etcd, start_on_free_port,
    },
};

/// How long a server may take to become ready. It takes about 3 s on two idle cores; the rest is for a
/// machine that compiles at the same time. Longer only delays the report of a server that hangs.
const READY_WITHIN: Duration = Duration::from_secs(120);

/// How long one request of this module, or one `kubectl`, may take.
const REQUEST_WITHIN: Duration = Duration::from_secs(60);

/// How long to wait between two looks at something that is not there yet.
const POLL: Duration = Duration::from_millis(50);

/// The rules of the audit log, and the log, in the folder of the servers. Without rules there is no log.
const AUDIT_POLICY: &str = "audit-policy.yaml";
const AUDIT_LOG: &str = "audit.log";
/// Everything, once it is complete.
const AUDIT_RULES: &str = "apiVersion: audit.k8s.io/v1\nkind: Policy\nomitStages: [RequestReceived]\nrules:\n\
                           - level: RequestResponse\n  omitManagedFields: true\n";

/// How many lines of a server's output an error repeats.
const OUTPUT_LINES: usize = 25;

/// What a service account may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Everything, in every namespace: `cluster-admin`.
    Admin,
    /// Get, list and watch the pods of its own namespace, and read their logs.
    PodsReadOnly,
    /// Only what every authenticated user may do, such as reading `/version`.
    Nothing,
}

/// A running Kubernetes API. Dropping it kills both servers and removes everything they wrote.
pub struct Kubernetes {
    // The order of the fields is the order in which they are dropped: the API server before its store.
    api_server: Mutex<Option<Process>>,
    _etcd: Process,
    etcd_port: u16,
    port: u16,
    host: Host,
    kubectl: OnceCell<PathBuf>,
    client: Client,
    ca_pem: String,
    admin_token: String,
    dir: TempDir,
}

impl Kubernetes {
    /// Starts etcd and the API server on free loopback ports and waits until the API server is ready.
    ///
    /// # Errors
    ///
    /// When a server ends or does not become ready in time: with the last lines of its output.
    pub async fn start() -> Result<Self> {
        Self::start_with(false, None).await
    }

    /// Like [`start`](Self::start), and the API server writes every request and response to its
    /// [audit log](Self::audit_log).
    ///
    /// # Errors
    ///
    /// As of [`start`](Self::start).
    pub async fn start_audited() -> Result<Self> {
        Self::start_with(true, None).await
    }

    /// Like [`start_audited`](Self::start_audited), with both servers on loopback of a network namespace.
    /// The calling thread must be in it, too: that of a [`Network`](crate::network::Network) is on its
    /// bridge.
    ///
    /// # Errors
    ///
    /// As of [`start`](Self::start).
    pub async fn start_audited_in(namespace: &Path) -> Result<Self> {
        Self::start_with(true, Some(namespace.to_owned())).await
    }

    async fn start_with(is_audited: bool, namespace: Option<PathBuf>) -> Result<Self> {
        let binaries = tokio::task::spawn_blocking(binaries).await.context("the build panicked")??;
        let dir =
            TempDir::with_prefix("kas-kubernetes-").context("could not create a folder for the servers")?;
        let keys = Keys::create(dir.path())?;
        if is_audited {
            fs::write(dir.path().join(AUDIT_POLICY), AUDIT_RULES).context("could not write a policy")?;
        }

        let host = Host { binaries, namespace };
        let (etcd, etcd_port) =
            start_on_free_port("etcd", |port| start_etcd(&host, dir.path(), port)).await?;
        let (api_server, client) = start_on_free_port("kube-apiserver", |port| {
            let client = Client::new(port, &keys);
            let (host, dir) = (&host, dir.path());
            async move {
                let client = client?;
                let process = start_api_server(host, dir, port, etcd_port, &client).await?;
                Ok((process, client))
            }
        })
        .await?;

        let kubernetes = Self {
            api_server: Mutex::new(Some(api_server)),
            _etcd: etcd,
            etcd_port,
            port: client.address.port(),
            host,
            kubectl: OnceCell::new(),
            client,
            ca_pem: keys.ca_pem,
            admin_token: keys.admin_token,
            dir,
        };
        let user = json!({
            "client-certificate-data": BASE64_STANDARD.encode(&keys.admin_certificate_pem),
            "client-key-data": BASE64_STANDARD.encode(&keys.admin_key_pem),
        });
        kubernetes.write_kubeconfig("admin", &user)?;
        // The API server makes this namespace too, but a moment after it has said that it is ready.
        kubernetes.ensure_namespace("default").await?;
        Ok(kubernetes)
    }

    /// Returns the URL of the API server; it stays the same when the API server is restarted.
    pub fn server(&self) -> String {
        format!("https://127.0.0.1:{}", self.port)
    }

    /// Returns the certificate, in PEM, of the authority that signed the API server's certificate.
    pub fn ca_pem(&self) -> &str {
        &self.ca_pem
    }

    /// Returns the file that holds [`ca_pem`](Self::ca_pem).
    pub fn ca_file(&self) -> PathBuf {
        self.dir.path().join("ca.crt")
    }

    /// Returns a kubeconfig whose client certificate is of the group `system:masters`: no rule is ever
    /// checked.
    pub fn admin_kubeconfig(&self) -> PathBuf {
        self.kubeconfig("admin")
    }

    /// Returns a static bearer token of the user `admin` in the group `system:masters`.
    pub fn admin_token(&self) -> &str {
        &self.admin_token
    }

    /// Writes a kubeconfig for a bearer token. `name` becomes part of the file's name.
    ///
    /// # Errors
    ///
    /// When the file cannot be written.
    pub fn kubeconfig_with_token(&self, name: &str, token: &str) -> Result<PathBuf> {
        self.write_kubeconfig(&format!("token-{name}"), &json!({ "token": token }))
    }

    /// Returns the file that gets the API server's output, across restarts.
    pub fn api_server_log(&self) -> PathBuf {
        log_file(self.dir.path(), "kube-apiserver")
    }

    /// Returns the file that gets the audit log, one event a line, across restarts.
    pub fn audit_log(&self) -> PathBuf {
        self.dir.path().join(AUDIT_LOG)
    }

    /// Returns the `kubectl` of the API server's version, which is built first when this machine has none
    /// yet.
    ///
    /// # Errors
    ///
    /// As of [`tools`].
    pub async fn kubectl_program(&self) -> Result<&Path> {
        let find =
            async || tokio::task::spawn_blocking(build::kubectl).await.context("the build panicked")?;
        Ok(self.kubectl.get_or_try_init(find).await?)
    }

    /// Runs the real `kubectl` as administrator and returns what it wrote to standard output.
    ///
    /// # Errors
    ///
    /// When it fails, with what it wrote to standard error; or when it takes longer than a minute. Also as of
    /// [`kubectl_program`](Self::kubectl_program).
    pub async fn kubectl(&self, arguments: &[&str]) -> Result<String> {
        self.run_kubectl(&self.admin_kubeconfig(), arguments, "").await
    }

    /// Runs `kubectl` as the user of another kubeconfig, otherwise like [`kubectl`](Self::kubectl).
    ///
    /// # Errors
    ///
    /// As of [`kubectl`](Self::kubectl).
    pub async fn kubectl_as(&self, kubeconfig: &Path, arguments: &[&str]) -> Result<String> {
        self.run_kubectl(kubeconfig, arguments, "").await
    }

    /// Applies a manifest, in YAML or JSON, as administrator.
    ///
    /// # Errors
    ///
    /// As of [`kubectl`](Self::kubectl).
    pub async fn apply(&self, manifest: &str) -> Result<String> {
        self.run_kubectl(&self.admin_kubeconfig(), &["apply", "--server-side", "-f", "-"], manifest).await
    }

    /// Kills the API server and waits until its process is gone. Does nothing when it is stopped already.
    ///
    /// # Errors
    ///
    /// When the process cannot be killed.
    pub async fn stop_api_server(&self) -> Result<()> {
        let stopped = self.api_server.lock().await.take();
        // Killing waits for the process, which takes milliseconds but blocks.
        tokio::task::spawn_blocking(move || drop(stopped)).await.context("could not stop the API server")
    }

    /// Starts the API server again, on the same port and with the same objects, and waits until it is ready.
    /// Does nothing when it is running already.
    ///
    /// # Errors
    ///
    /// As of [`start`](Self::start); also when another process took the port and keeps it.
    pub async fn start_api_server(&self) -> Result<()> {
        let mut running = self.api_server.lock().await;
        if running.is_some() {
            return Ok(());
        }
        let deadline = Instant::now() + READY_WITHIN;
        loop {
            match start_api_server(&self.host, self.dir.path(), self.port, self.etcd_port, &self.client).await
            {
                Ok(process) => {
                    *running = Some(process);
                    return Ok(());
                }
                // A connection of another process may use the port as its own end for a moment.
                Err(NotStarted::AddressInUse(_)) if Instant::now() < deadline => sleep(POLL).await,
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Makes the store forget every change up to now. The API server remembers the last ones itself, until it
    /// is restarted: a watch that goes on from before gets 410 then.
    ///
    /// # Errors
    ///
    /// When etcd does not answer, or refuses.
    pub async fn forget_history(&self) -> Result<()> {
        compact(self.etcd_port).await
    }

    /// Writes a kubeconfig of the [administrator](Self::admin_kubeconfig) for clients that reach the API
    /// server at another address of loopback.
    ///
    /// # Errors
    ///
    /// When the file cannot be written.
    pub fn kubeconfig_at(&self, address: SocketAddr) -> Result<PathBuf> {
        let path = self.admin_kubeconfig();
        let config = fs::read_to_string(&path)?.replace(&self.server(), &format!("https://{address}"));
        let path = path.with_extension(address.port().to_string());
        fs::write(&path, config).with_context(|| format!("could not write {}", path.display()))?;
        Ok(path)
    }

    fn kubeconfig(&self, name: &str) -> PathBuf {
        self.dir.path().join(format!("{name}.kubeconfig"))
    }

    fn write_kubeconfig(&self, name: &str, user: &Value) -> Result<PathBuf> {
        // JSON is YAML, and needs no thought about quotes.
        let config = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{
                "name": "test",
                "cluster": {
                    "server": self.server(),
                    "certificate-authority-data": BASE64_STANDARD.encode(&self.ca_pem),
                },
            }],
            "users": [{ "name": name, "user": user }],
            "contexts": [{ "name": "test", "context": { "cluster": "test", "user": name } }],
            "current-context": "test",
        });
        let path = self.kubeconfig(name);
        fs::write(&path, format!("{config:#}\n"))
            .with_context(|| format!("could not write {}", path.display()))?;
        Ok(path)
    }

    async fn run_kubectl(&self, kubeconfig: &Path, arguments: &[&str], input: &str) -> Result<String> {
        let mut command = tokio::process::Command::new(self.kubectl_program().await?);
        command
            .arg("--kubeconfig")
            .arg(kubeconfig)
            .args(arguments)
            // Neither the person's own clusters nor their cache of what an API server offers.
            .env("HOME", self.dir.path())
            .env_remove("KUBECACHEDIR")
            .env_remove("KUBECONFIG")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        let mut child = command.spawn().context("could not run kubectl")?;
        let mut stdin = child.stdin.take().expect("stdin is piped");
        let write = async move {
            // A kubectl that fails early closes its input; its own message gives the reason.
            let _ = stdin.write_all(input.as_bytes()).await;
            drop(stdin);
        };
        let (_, output) = timeout(REQUEST_WITHIN, async { tokio::join!(write, child.wait_with_output()) })
            .await
            .with_context(|| {
                format!("kubectl {} took longer than {REQUEST_WITHIN:?}", arguments.join(" "))
            })?;
        let output = output.context("could not run kubectl")?;
        ensure!(
            output.status.success(),
            "kubectl {} failed ({}): {}",
            arguments.join(" "),
            output.status,
            String::from_utf8_lossy(&output.stderr).trim()
        );
        String::from_utf8(output.stdout).context("kubectl wrote something other than UTF-8")
    }
}

/// Returns the end of a server's output, each line on its own.
fn last_lines(output: &str) -> String {
    let lines: Vec<&str> = output.lines().collect();
    let from = lines.len().saturating_sub(OUTPUT_LINES);
    format!("\n{}", lines[from..].join("\n"))
}
