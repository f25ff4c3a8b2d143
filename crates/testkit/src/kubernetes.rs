//! A real Kubernetes API for tests: kube-apiserver and etcd as child processes of the test.
//!
//! There is no controller manager, no scheduler and no kubelet, on purpose: pods stay Pending, a namespace
//! gets no ServiceAccount by itself, and a deleted namespace never finishes. What a test needs of that, the
//! methods here create by hand. `tests/kubernetes/go.mod` says which versions run.
//!
//! [`Node`] adds a node whose kubelet serves exec, attach, port-forward and logs, for tests of those.
//! [`tools`] returns the `kubectl` of the API server's version and an old one, for tests where the version
//! matters; the methods here run that of `PATH`.
//!
//! `pods/proxy` and `services/proxy` make the API server dial the pod's IP address: a test that sets one must
//! run in a network namespace without a route out.

mod build;
mod node;

use std::{
    env,
    ffi::OsString,
    fs::{self, OpenOptions},
    io,
    net::{Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::{
        Arc, LazyLock,
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use base64::{Engine as _, prelude::BASE64_STANDARD};
use bytes::Bytes;
use futures_util::future::try_join_all;
use http::{Method, Request, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair,
    KeyUsagePurpose, PKCS_ECDSA_P256_SHA256,
};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    sync::{Mutex, oneshot},
    time::{Instant, sleep, timeout},
};
use tokio_rustls::TlsConnector;

pub use self::{
    build::{Binaries, Tools, binaries, cache_folder, tools},
    node::Node,
};

/// How long a server may take to become ready. It takes about 3 s on two idle cores; the rest is for a
/// machine that compiles at the same time. Longer only delays the report of a server that hangs.
const READY_WITHIN: Duration = Duration::from_secs(120);

/// How long one request of this module, or one `kubectl`, may take.
const REQUEST_WITHIN: Duration = Duration::from_secs(60);

/// How long to wait between two looks at something that is not there yet.
const POLL: Duration = Duration::from_millis(50);

/// How many requests are open at once when many objects are created. The API server takes 100 streams per
/// connection, so more would only queue here. Measured with 64: 5,000 pods in 2 to 3 s on two cores.
const CONCURRENT: usize = 64;

/// How many free ports are tried. Another process can take a port between the moment it was found free and
/// the moment the server binds it; five such losses in a row mean that something else is wrong.
const PORT_ATTEMPTS: usize = 5;

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
    binaries: Binaries,
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
        let binaries = tokio::task::spawn_blocking(binaries).await.context("the build panicked")??;
        let dir =
            TempDir::with_prefix("kas-kubernetes-").context("could not create a folder for the servers")?;
        let keys = Keys::create(dir.path())?;

        let (etcd, etcd_port) =
            start_on_free_port("etcd", |port| start_etcd(&binaries, dir.path(), port)).await?;
        let (api_server, client) = start_on_free_port("kube-apiserver", |port| {
            let client = Client::new(port, &keys);
            let (binaries, dir) = (&binaries, dir.path());
            async move {
                let client = client?;
                let process = start_api_server(binaries, dir, port, etcd_port, &client).await?;
                Ok((process, client))
            }
        })
        .await?;

        let kubernetes = Self {
            api_server: Mutex::new(Some(api_server)),
            _etcd: etcd,
            etcd_port,
            port: client.address.port(),
            binaries,
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

    /// Runs the real `kubectl` as administrator and returns what it wrote to standard output.
    ///
    /// # Errors
    ///
    /// When it fails, with what it wrote to standard error; or when it takes longer than a minute.
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

    /// Creates the namespace, and the ServiceAccount `default` that its pods refer to, unless they exist.
    ///
    /// # Errors
    ///
    /// When the API server refuses one of them.
    pub async fn ensure_namespace(&self, namespace: &str) -> Result<()> {
        let connection = self.client.connect().await?;
        connection.ensure("/api/v1/namespaces", &json!({ "metadata": { "name": namespace } })).await?;
        let accounts = format!("/api/v1/namespaces/{namespace}/serviceaccounts");
        connection.ensure(&accounts, &json!({ "metadata": { "name": "default" } })).await
    }

    /// Creates a service account with the access named, and returns a token of it that is valid for a day.
    ///
    /// Returns only when the API server grants the access: its rules take effect after a moment.
    ///
    /// # Errors
    ///
    /// When the account exists already, or the API server refuses one of the objects.
    pub async fn service_account(&self, namespace: &str, name: &str, access: Access) -> Result<String> {
        self.ensure_namespace(namespace).await?;
        let connection = self.client.connect().await?;
        let accounts = format!("/api/v1/namespaces/{namespace}/serviceaccounts");
        connection.create(&accounts, &json!({ "metadata": { "name": name } })).await?;

        let rbac = "/apis/rbac.authorization.k8s.io/v1";
        let role =
            |kind, name| json!({ "apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": name });
        let subjects = json!([{ "kind": "ServiceAccount", "namespace": namespace, "name": name }]);
        match access {
            Access::Admin => {
                let binding = json!({
                    "metadata": { "name": format!("{namespace}-{name}") },
                    "roleRef": role("ClusterRole", "cluster-admin"),
                    "subjects": subjects,
                });
                connection.create(&format!("{rbac}/clusterrolebindings"), &binding).await?;
            }
            Access::PodsReadOnly => {
                let pods = json!({
                    "metadata": { "name": name },
                    "rules": [{
                        "apiGroups": [""],
                        "resources": ["pods", "pods/log"],
                        "verbs": ["get", "list", "watch"],
                    }],
                });
                let binding = json!({
                    "metadata": { "name": name },
                    "roleRef": role("Role", name),
                    "subjects": subjects,
                });
                connection.create(&format!("{rbac}/namespaces/{namespace}/roles"), &pods).await?;
                connection.create(&format!("{rbac}/namespaces/{namespace}/rolebindings"), &binding).await?;
            }
            Access::Nothing => {}
        }
        if access != Access::Nothing {
            connection.wait_until_may_list_pods(namespace, name).await?;
        }

        let request = json!({
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": { "expirationSeconds": 24 * 60 * 60 },
        });
        let answer = connection.create(&format!("{accounts}/{name}/token"), &request).await?;
        let token = answer["status"]["token"].as_str().context("the API server returned no token")?;
        Ok(token.to_owned())
    }

    /// Creates pods named `{prefix}-00000` and up, and the namespace when it does not exist. They stay
    /// Pending.
    ///
    /// # Errors
    ///
    /// When one of them exists or is refused; the others may have been created.
    pub async fn create_pods(&self, namespace: &str, prefix: &str, count: usize) -> Result<()> {
        self.ensure_namespace(namespace).await?;
        self.create_many(&format!("/api/v1/namespaces/{namespace}/pods"), count, |index| {
            json!({
                "metadata": { "name": format!("{prefix}-{index:05}"), "labels": { "app": prefix } },
                "spec": {
                    "automountServiceAccountToken": false,
                    "containers": [{ "name": "main", "image": "none.invalid/none" }],
                },
            })
        })
        .await
    }

    /// Creates ConfigMaps named `{prefix}-00000` and up with `bytes_each` bytes of data, at most 1 MiB, and
    /// the namespace when it does not exist. The data hardly compresses, so that a list of them is large on
    /// the wire.
    ///
    /// # Errors
    ///
    /// When one of them exists or is refused; the others may have been created.
    pub async fn create_config_maps(
        &self,
        namespace: &str,
        prefix: &str,
        count: usize,
        bytes_each: usize,
    ) -> Result<()> {
        self.ensure_namespace(namespace).await?;
        self.create_many(&format!("/api/v1/namespaces/{namespace}/configmaps"), count, |index| {
            json!({
                "metadata": { "name": format!("{prefix}-{index:05}"), "labels": { "app": prefix } },
                "data": { "text": noise(index, bytes_each) },
            })
        })
        .await
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
            match start_api_server(&self.binaries, self.dir.path(), self.port, self.etcd_port, &self.client)
                .await
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
        let mut command = tokio::process::Command::new("kubectl");
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
        let mut child = match command.spawn() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                bail!("these tests run the real kubectl: install it (1.27 or newer) and put it on PATH")
            }
            child => child.context("could not run kubectl")?,
        };
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

    async fn create_many(
        &self,
        path: &str,
        count: usize,
        object: impl Fn(usize) -> Value + Sync,
    ) -> Result<()> {
        let connection = self.client.connect().await?;
        // The first alone: making many large objects keeps this thread busy for seconds, and an API server
        // that has seen no frame of a new connection for two closes it.
        if count > 0 {
            connection.create(path, &object(0)).await?;
        }
        let next = AtomicUsize::new(1);
        // Workers rather than a stream adapter, whose future the compiler cannot prove to be `Send`.
        let workers = (0..CONCURRENT).map(|_| async {
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                if index >= count {
                    return anyhow::Ok(());
                }
                connection.create(path, &object(index)).await?;
            }
        });
        try_join_all(workers).await.map(drop)
    }
}

/// Returns `bytes` letters and digits that depend only on `seed`.
fn noise(seed: usize, bytes: usize) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    // xorshift64: not random enough for secrets, quite enough to defeat gzip. It must not start at zero.
    let mut state = (seed as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..bytes)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            char::from(ALPHABET[(state >> 58) as usize])
        })
        .collect()
}

/// Every key, certificate and token, as files for the servers and in memory for the client.
struct Keys {
    ca_pem: String,
    ca: CertificateDer<'static>,
    admin_certificate: CertificateDer<'static>,
    admin_key: PrivateKeyDer<'static>,
    admin_certificate_pem: String,
    admin_key_pem: String,
    admin_token: String,
}

impl Keys {
    /// Writes `ca.crt`, `serving.{crt,key}`, `front-proxy-ca.crt`, `front-proxy-client.{crt,key}`,
    /// `kubelet-ca.crt`, `kubelet.{crt,key}`, `kubelet-client.{crt,key}`, `service-account.{key,pub}` and
    /// `tokens.csv`.
    fn create(dir: &Path) -> Result<Self> {
        let write = |name: &str, content: &str| {
            fs::write(dir.join(name), content).with_context(|| format!("could not write {name}"))
        };

        let ca = authority("kubernetes-ca")?;
        write("ca.crt", &ca.pem())?;
        // The last is its name for pods, as in every cluster.
        let names = ["127.0.0.1", "localhost", "kubernetes.default.svc"].map(str::to_owned);
        let mut serving = CertificateParams::new(names)?;
        serving.distinguished_name.push(DnType::CommonName, "kube-apiserver");
        serving.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let (certificate, key) = issue(serving, &ca)?;
        write("serving.crt", &certificate.pem())?;
        write("serving.key", &key.serialize_pem())?;

        // A separate CA: the API server trusts what a holder of its certificates says about the user.
        let front_proxy = authority("front-proxy-ca")?;
        write("front-proxy-ca.crt", &front_proxy.pem())?;
        let (certificate, key) = issue(client_certificate("front-proxy-client", None), &front_proxy)?;
        write("front-proxy-client.crt", &certificate.pem())?;
        write("front-proxy-client.key", &key.serialize_pem())?;

        // A separate CA again: a kubelet runs any command for a client with a certificate of it.
        let kubelets = authority("kubelet-ca")?;
        write("kubelet-ca.crt", &kubelets.pem())?;
        let mut serving = CertificateParams::new(["127.0.0.1".to_owned()])?;
        serving.distinguished_name.push(DnType::CommonName, "kubelet");
        serving.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let (certificate, key) = issue(serving, &kubelets)?;
        write("kubelet.crt", &certificate.pem())?;
        write("kubelet.key", &key.serialize_pem())?;
        let (certificate, key) = issue(client_certificate("kubelet-client", None), &kubelets)?;
        write("kubelet-client.crt", &certificate.pem())?;
        write("kubelet-client.key", &key.serialize_pem())?;

        let service_account = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?;
        write("service-account.key", &service_account.serialize_pem())?;
        // The API server takes the public half from a PKCS#8 private key only when that is an RSA key.
        write("service-account.pub", &service_account.public_key_pem())?;

        let admin_token = hex::encode(rand::random::<[u8; 16]>());
        write("tokens.csv", &format!("{admin_token},admin,admin,\"system:masters\"\n"))?;

        let (certificate, key) = issue(client_certificate("admin", Some("system:masters")), &ca)?;
        Ok(Self {
            ca_pem: ca.pem(),
            ca: ca.der().clone(),
            admin_certificate_pem: certificate.pem(),
            admin_certificate: certificate.into(),
            admin_key: PrivatePkcs8KeyDer::from(key.serialize_der()).into(),
            admin_key_pem: key.serialize_pem(),
            admin_token,
        })
    }
}

fn authority(name: &str) -> Result<CertifiedIssuer<'static, KeyPair>> {
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, name);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
    Ok(CertifiedIssuer::self_signed(params, KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?)?)
}

/// Describes a client certificate: to Kubernetes the common name is the user and the organization is a group.
fn client_certificate(user: &str, group: Option<&str>) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, user);
    if let Some(group) = group {
        params.distinguished_name.push(DnType::OrganizationName, group);
    }
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    params
}

fn issue(
    mut params: CertificateParams,
    issuer: &CertifiedIssuer<'_, KeyPair>,
) -> Result<(rcgen::Certificate, KeyPair)> {
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?;
    Ok((params.signed_by(&key, issuer)?, key))
}

/// Why a server did not start, with the last lines of its output.
#[derive(Debug)]
enum NotStarted {
    /// Another process holds the port; another port, or a later moment, may do.
    AddressInUse(String),
    /// Anything else: trying again would fail again.
    Other(anyhow::Error),
}

impl From<anyhow::Error> for NotStarted {
    fn from(error: anyhow::Error) -> Self {
        Self::Other(error)
    }
}

impl From<NotStarted> for anyhow::Error {
    fn from(error: NotStarted) -> Self {
        match error {
            NotStarted::AddressInUse(output) => anyhow!("another process holds the server's port: {output}"),
            NotStarted::Other(error) => error,
        }
    }
}

/// Calls `start` with one free port after another, until one was still free when the server bound it.
///
/// `start` is no `AsyncFn`: the compiler could not prove that the future is `Send`.
async fn start_on_free_port<T, F>(name: &str, start: impl Fn(u16) -> F) -> Result<T>
where
    F: Future<Output = Result<T, NotStarted>>,
{
    let mut last = None;
    for _ in 0..PORT_ATTEMPTS {
        let [port] = ports::free().context("could not find a free port")?;
        match start(port).await {
            Err(error @ NotStarted::AddressInUse(_)) => last = Some(error),
            result => return Ok(result?),
        }
    }
    let last = last.expect("the loop ends only after a port was taken");
    Err(anyhow::Error::from(last))
        .with_context(|| format!("could not start {name} on any of {PORT_ATTEMPTS} ports"))
}

async fn start_etcd(binaries: &Binaries, dir: &Path, port: u16) -> Result<(Process, u16), NotStarted> {
    let client_url = format!("http://127.0.0.1:{port}");
    let data = dir.join(format!("etcd-{port}"));
    let mut process = Process::spawn(
        "etcd",
        dir,
        &binaries.etcd,
        &[
            "--data-dir".into(),
            data.into(),
            "--listen-client-urls".into(),
            client_url.clone().into(),
            "--advertise-client-urls".into(),
            client_url.into(),
            // No peers: any free port.
            "--listen-peer-urls".into(),
            "http://127.0.0.1:0".into(),
            // Nothing needs to survive a crash of the machine.
            "--unsafe-no-fsync".into(),
        ],
    )
    .await?;
    process.wait_until(Ready::Etcd(port)).await?;
    Ok((process, port))
}

async fn etcd_is_healthy(port: u16) -> bool {
    let ask = async {
        let mut connection = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await?;
        connection.write_all(b"GET /health HTTP/1.0\r\n\r\n").await?;
        let mut answer = String::new();
        connection.read_to_string(&mut answer).await?;
        io::Result::Ok(answer.contains(r#""health":"true""#))
    };
    matches!(timeout(Duration::from_secs(5), ask).await, Ok(Ok(true)))
}

async fn start_api_server(
    binaries: &Binaries,
    dir: &Path,
    port: u16,
    etcd_port: u16,
    client: &Client,
) -> Result<Process, NotStarted> {
    let arguments: Vec<OsString> = [
        ("etcd-servers", format!("http://127.0.0.1:{etcd_port}").into()),
        ("bind-address", "127.0.0.1".into()),
        ("secure-port", port.to_string().into()),
        ("advertise-address", "127.0.0.1".into()),
        // The Service `kubernetes` must not point at a loopback address, and nothing here uses it.
        ("endpoint-reconciler-type", "none".into()),
        ("cert-dir", dir.join("unused").into()),
        ("tls-cert-file", dir.join("serving.crt").into()),
        ("tls-private-key-file", dir.join("serving.key").into()),
        ("client-ca-file", dir.join("ca.crt").into()),
        ("token-auth-file", dir.join("tokens.csv").into()),
        ("authorization-mode", "Node,RBAC".into()),
        ("allow-privileged", "true".into()),
        ("service-cluster-ip-range", "10.0.0.0/24".into()),
        ("kubelet-client-certificate", dir.join("kubelet-client.crt").into()),
        ("kubelet-client-key", dir.join("kubelet-client.key").into()),
        ("kubelet-certificate-authority", dir.join("kubelet-ca.crt").into()),
        ("kubelet-preferred-address-types", "InternalIP".into()),
        ("service-account-issuer", "https://kubernetes.default.svc".into()),
        ("service-account-signing-key-file", dir.join("service-account.key").into()),
        ("service-account-key-file", dir.join("service-account.pub").into()),
        ("requestheader-client-ca-file", dir.join("front-proxy-ca.crt").into()),
        ("requestheader-allowed-names", "front-proxy-client".into()),
        ("requestheader-username-headers", "X-Remote-User".into()),
        ("requestheader-group-headers", "X-Remote-Group".into()),
        ("requestheader-extra-headers-prefix", "X-Remote-Extra-".into()),
        ("proxy-client-cert-file", dir.join("front-proxy-client.crt").into()),
        ("proxy-client-key-file", dir.join("front-proxy-client.key").into()),
    ]
    .into_iter()
    .map(|(name, value): (&str, OsString)| {
        let mut argument = OsString::from(format!("--{name}="));
        argument.push(value);
        argument
    })
    .collect();

    let mut process = Process::spawn("kube-apiserver", dir, &binaries.kube_apiserver, &arguments).await?;
    process.wait_until(Ready::ApiServer(client)).await?;
    Ok(process)
}

/// How the readiness of a server is checked.
enum Ready<'a> {
    Etcd(u16),
    ApiServer(&'a Client),
}

impl Ready<'_> {
    async fn is_true(&self) -> bool {
        match self {
            Self::Etcd(port) => etcd_is_healthy(*port).await,
            Self::ApiServer(client) => client.is_ready().await,
        }
    }
}

/// A server process. Dropping it kills the process and waits until it is gone.
struct Process {
    name: &'static str,
    child: Child,
    log: PathBuf,
    /// How long the log was when this process started: what is before was written by an earlier one.
    log_start: usize,
}

impl Process {
    async fn spawn(name: &'static str, dir: &Path, program: &Path, arguments: &[OsString]) -> Result<Self> {
        let log = log_file(dir, name);
        let output =
            OpenOptions::new().create(true).append(true).open(&log).context("could not create a log")?;
        let log_start = fs::read(&log).context("could not read a log")?.len();

        // A killed test runs no destructors: the kernel then kills what it started.
        let mut command = match setpriv() {
            Some(setpriv) => {
                let mut command = Command::new(setpriv);
                command.args(["--pdeathsig", "KILL", "--"]).arg(program);
                command
            }
            None => Command::new(program),
        };
        command
            .args(arguments)
            .current_dir(dir)
            .stdin(Stdio::null())
            .stdout(output.try_clone().context("could not share a log")?)
            .stderr(output);
        let child =
            spawn_from_lasting_thread(command).await.with_context(|| format!("could not run {name}"))?;
        Ok(Self { name, child, log, log_start })
    }

    /// Waits until the server is ready.
    async fn wait_until(&mut self, ready: Ready<'_>) -> Result<(), NotStarted> {
        let deadline = Instant::now() + READY_WITHIN;
        loop {
            if let Some(status) = self.ended()? {
                let output = self.output();
                let last = last_lines(&output);
                if output.contains("address already in use") {
                    return Err(NotStarted::AddressInUse(last));
                }
                return Err(anyhow!("{} ended ({status}): {last}", self.name).into());
            }
            // The second check: the response may be from another process, which took the port.
            if ready.is_true().await && self.ended()?.is_none() {
                return Ok(());
            }
            if Instant::now() >= deadline {
                let last = last_lines(&self.output());
                return Err(anyhow!("{} was not ready after {READY_WITHIN:?}: {last}", self.name).into());
            }
            sleep(POLL).await;
        }
    }

    fn ended(&mut self) -> Result<Option<ExitStatus>> {
        self.child.try_wait().with_context(|| format!("could not look after {}", self.name))
    }

    fn output(&self) -> String {
        let log = fs::read(&self.log).unwrap_or_default();
        String::from_utf8_lossy(log.get(self.log_start..).unwrap_or_default()).into_owned()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Both fail only when the process is gone already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn log_file(dir: &Path, name: &str) -> PathBuf {
    dir.join(format!("{name}.log"))
}

/// Returns the end of a server's output, each line on its own.
fn last_lines(output: &str) -> String {
    let lines: Vec<&str> = output.lines().collect();
    let from = lines.len().saturating_sub(OUTPUT_LINES);
    format!("\n{}", lines[from..].join("\n"))
}

/// Finds the tool that ties a process to its parent's life; only Linux has it.
fn setpriv() -> Option<PathBuf> {
    let path = env::var_os("PATH")?;
    env::split_paths(&path).map(|folder| folder.join("setpriv")).find(|candidate| candidate.is_file())
}

/// Spawns a process from a thread that lives as long as this process.
///
/// The kernel sends the parent-death signal when the spawning *thread* ends, and a runtime's threads end with
/// the test that created it. This single thread is never joined: it ends with the process.
async fn spawn_from_lasting_thread(command: Command) -> Result<Child> {
    type Order = (Command, oneshot::Sender<io::Result<Child>>);
    static ORDERS: LazyLock<mpsc::SyncSender<Order>> = LazyLock::new(|| {
        let (sender, orders) = mpsc::sync_channel::<Order>(16);
        thread::Builder::new()
            .name("test-processes".to_owned())
            .spawn(move || {
                for (mut command, reply) in orders {
                    // A caller that was cancelled drops its end; the process would then never be stopped.
                    if let Err(Ok(mut unwanted)) = reply.send(command.spawn()) {
                        let _ = unwanted.kill();
                        let _ = unwanted.wait();
                    }
                }
            })
            .expect("a thread can be started");
        sender
    });

    let (reply, child) = oneshot::channel();
    ORDERS.send((command, reply)).map_err(|_| anyhow!("the spawning thread is gone"))?;
    Ok(child.await.context("the spawning thread is gone")??)
}

/// Talks to the API server as administrator.
struct Client {
    address: SocketAddr,
    tls: TlsConnector,
}

impl Client {
    fn new(port: u16, keys: &Keys) -> Result<Self> {
        let mut roots = rustls::RootCertStore::empty();
        roots.add(keys.ca.clone())?;
        // Named rather than taken from the process's default, which belongs to the test.
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let mut tls = rustls::ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_root_certificates(roots)
            .with_client_auth_cert(vec![keys.admin_certificate.clone()], keys.admin_key.clone_key())?;
        tls.alpn_protocols = vec![b"h2".to_vec()];
        Ok(Self { address: (Ipv4Addr::LOCALHOST, port).into(), tls: TlsConnector::from(Arc::new(tls)) })
    }

    async fn connect(&self) -> Result<Connection> {
        let connect = async {
            let tcp = TcpStream::connect(self.address).await?;
            tcp.set_nodelay(true)?;
            let tls = self.tls.connect(ServerName::IpAddress(self.address.ip().into()), tcp).await?;
            let (sender, connection) = http2::handshake(TokioExecutor::new(), TokioIo::new(tls)).await?;
            // What ends the connection also fails the requests on it, which report it.
            let driver = tokio::spawn(async move {
                let _ = connection.await;
            });
            anyhow::Ok(Connection { sender, driver, server: format!("https://{}", self.address) })
        };
        timeout(REQUEST_WITHIN, connect)
            .await
            .context("connecting to the API server took too long")?
            .context("could not connect to the API server")
    }

    async fn is_ready(&self) -> bool {
        let ask = async {
            let connection = self.connect().await?;
            connection.send(Method::GET, "/readyz", Bytes::new()).await
        };
        matches!(ask.await, Ok((StatusCode::OK, _)))
    }
}

/// One HTTP/2 connection, for any number of requests at once.
struct Connection {
    sender: http2::SendRequest<Full<Bytes>>,
    driver: tokio::task::JoinHandle<()>,
    server: String,
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

impl Connection {
    async fn send(&self, method: Method, path: &str, body: Bytes) -> Result<(StatusCode, Bytes)> {
        let request = Request::builder()
            .method(method)
            .uri(format!("{}{path}", self.server))
            .header(http::header::CONTENT_TYPE, "application/json")
            .header(http::header::ACCEPT, "application/json")
            .body(Full::new(body))?;
        let mut sender = self.sender.clone();
        let exchange = async {
            sender.ready().await?;
            let response = sender.send_request(request).await?;
            let status = response.status();
            anyhow::Ok((status, response.into_body().collect().await?.to_bytes()))
        };
        timeout(REQUEST_WITHIN, exchange)
            .await
            .with_context(|| format!("a request to {path} took longer than {REQUEST_WITHIN:?}"))?
            .with_context(|| format!("a request to {path} failed"))
    }

    async fn post(&self, path: &str, object: &Value) -> Result<(StatusCode, Value)> {
        let (status, body) = self.send(Method::POST, path, object.to_string().into()).await?;
        let body = serde_json::from_slice(&body).unwrap_or_else(|_| String::from_utf8_lossy(&body).into());
        Ok((status, body))
    }

    /// Creates an object that must not exist yet, and returns it as the API server has stored it.
    async fn create(&self, path: &str, object: &Value) -> Result<Value> {
        let (status, answer) = self.post(path, object).await?;
        ensure!(status.is_success(), "the API server refused POST {path} ({status}): {}", reason(&answer));
        Ok(answer)
    }

    /// Creates an object with a status, which the API server ignores in the first of the two requests.
    async fn create_with_status(&self, path: &str, object: &Value, status: Value) -> Result<()> {
        let mut object = self.create(path, object).await?;
        let name = object["metadata"]["name"].as_str().context("a created object has a name")?;
        let path = format!("{path}/{name}/status");
        object["status"] = status;
        let (status, body) = self.send(Method::PUT, &path, object.to_string().into()).await?;
        ensure!(
            status.is_success(),
            "the API server refused PUT {path} ({status}): {}",
            String::from_utf8_lossy(&body)
        );
        Ok(())
    }

    /// Creates an object unless it exists.
    async fn ensure(&self, path: &str, object: &Value) -> Result<()> {
        let (status, answer) = self.post(path, object).await?;
        ensure!(
            status.is_success() || status == StatusCode::CONFLICT,
            "the API server refused POST {path} ({status}): {}",
            reason(&answer)
        );
        Ok(())
    }

    async fn wait_until_may_list_pods(&self, namespace: &str, name: &str) -> Result<()> {
        let review = json!({
            "spec": {
                "user": format!("system:serviceaccount:{namespace}:{name}"),
                "groups": ["system:serviceaccounts", format!("system:serviceaccounts:{namespace}")],
                "resourceAttributes": { "namespace": namespace, "resource": "pods", "verb": "list" },
            },
        });
        let deadline = Instant::now() + REQUEST_WITHIN;
        loop {
            let (status, answer) =
                self.post("/apis/authorization.k8s.io/v1/subjectaccessreviews", &review).await?;
            ensure!(
                status.is_success(),
                "the API server refused an access review ({status}): {}",
                reason(&answer)
            );
            if answer["status"]["allowed"] == true {
                return Ok(());
            }
            ensure!(
                Instant::now() < deadline,
                "{namespace}/{name} may not list pods after {REQUEST_WITHIN:?}"
            );
            sleep(POLL).await;
        }
    }
}

/// Returns the sentence in the API server's Status object, or the whole answer when it is something else.
fn reason(answer: &Value) -> String {
    answer["message"].as_str().map_or_else(|| answer.to_string(), str::to_owned)
}
