//! The servers: how they are started, and when they are ready.

use std::{
    ffi::OsString,
    fs::{self, OpenOptions},
    io,
    net::Ipv4Addr,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result, anyhow};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::{Instant, sleep, timeout},
};

use super::{AUDIT_LOG, AUDIT_POLICY, POLL, READY_WITHIN, build::Binaries, client::Client, last_lines};
use crate::process::{find, spawn_from_lasting_thread};

/// How many free ports are tried. Another process can take a port between the moment it was found free and
/// the moment the server binds it; five such losses in a row mean that something else is wrong.
const PORT_ATTEMPTS: usize = 5;

/// What runs, and where.
pub(super) struct Host {
    pub(super) binaries: Binaries,
    /// The network namespace; `None`: that of the tests.
    pub(super) namespace: Option<PathBuf>,
}

/// Why a server did not start, with the last lines of its output.
#[derive(Debug)]
pub(super) enum NotStarted {
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
pub(super) async fn start_on_free_port<T, F>(name: &str, start: impl Fn(u16) -> F) -> Result<T>
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

pub(super) async fn start_etcd(host: &Host, dir: &Path, port: u16) -> Result<(Process, u16), NotStarted> {
    let client_url = format!("http://127.0.0.1:{port}");
    let data = dir.join(format!("etcd-{port}"));
    let mut process = Process::spawn(
        "etcd",
        dir,
        (host.binaries.etcd.as_path(), host.namespace.as_deref()),
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

/// Makes etcd forget every change up to now.
pub(super) async fn compact(port: u16) -> Result<()> {
    let told = ask_etcd(port, "/v3/maintenance/status", &json!({})).await?;
    let revision = told["header"]["revision"].as_str().context("etcd tells its revision")?.to_owned();
    ask_etcd(port, "/v3/kv/compaction", &json!({ "revision": revision, "physical": true })).await?;
    Ok(())
}

async fn ask_etcd(port: u16, path: &str, question: &Value) -> Result<Value> {
    let body = question.to_string();
    let ask = async {
        let mut connection = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await?;
        let head = format!("POST {path} HTTP/1.0\r\nContent-Length: {}\r\n\r\n", body.len());
        connection.write_all(format!("{head}{body}").as_bytes()).await?;
        let mut answer = String::new();
        connection.read_to_string(&mut answer).await?;
        io::Result::Ok(answer)
    };
    let answer = timeout(Duration::from_secs(10), ask).await.context("etcd did not answer")??;
    let (head, body) = answer.split_once("\r\n\r\n").context("etcd answers with a head and a body")?;
    let is_ok = head.lines().next().is_some_and(|line| line.contains(" 200 "));
    anyhow::ensure!(is_ok, "etcd refuses {path}: {answer}");
    Ok(serde_json::from_str(body)?)
}

pub(super) async fn start_api_server(
    host: &Host,
    dir: &Path,
    port: u16,
    etcd_port: u16,
    client: &Client,
) -> Result<Process, NotStarted> {
    let mut arguments: Vec<OsString> = [
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

    let policy = dir.join(AUDIT_POLICY);
    if policy.exists() {
        for (name, value) in
            [("audit-policy-file", policy.into_os_string()), ("audit-log-path", dir.join(AUDIT_LOG).into())]
        {
            let mut argument = OsString::from(format!("--{name}="));
            argument.push(value);
            arguments.push(argument);
        }
        arguments.push("--audit-log-mode=blocking".into());
    }

    let program = (host.binaries.kube_apiserver.as_path(), host.namespace.as_deref());
    let mut process = Process::spawn("kube-apiserver", dir, program, &arguments).await?;
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
pub(super) struct Process {
    name: &'static str,
    child: Child,
    log: PathBuf,
    /// How long the log was when this process started: what is before was written by an earlier one.
    log_start: usize,
}

impl Process {
    /// Starts a program in a network namespace, if there is one.
    async fn spawn(
        name: &'static str,
        dir: &Path,
        (program, namespace): (&Path, Option<&Path>),
        arguments: &[OsString],
    ) -> Result<Self> {
        let log = log_file(dir, name);
        let output =
            OpenOptions::new().create(true).append(true).open(&log).context("could not create a log")?;
        let log_start = fs::read(&log).context("could not read a log")?.len();

        // A killed test runs no destructors: the kernel then kills what it started.
        let mut words: Vec<OsString> = Vec::new();
        if let Some(setpriv) = find("setpriv") {
            words.extend([setpriv.into(), "--pdeathsig".into(), "KILL".into(), "--".into()]);
        }
        if let Some(namespace) = namespace {
            let mut option = OsString::from("--net=");
            option.push(namespace);
            words.extend(["nsenter".into(), option, "--".into()]);
        }
        words.push(program.into());
        let mut command = Command::new(&words[0]);
        command
            .args(&words[1..])
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

pub(super) fn log_file(dir: &Path, name: &str) -> PathBuf {
    dir.join(format!("{name}.log"))
}
