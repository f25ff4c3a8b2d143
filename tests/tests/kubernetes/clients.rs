//! The kubectl of tests of its versions and protocols: which there are, as whom they call kas, and what kas
//! records about them. None of them is the kubectl of `PATH`.

use std::{
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::{Output, Stdio},
};

use anyhow::{Context as _, Result, anyhow, ensure};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use testkit::{
    certificates::Certificates,
    endpoint,
    kas::eventually,
    kubernetes::{Access, Kubernetes, Node, Tools},
    process::SOON,
};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines},
    process::{Child, ChildStdout, Command},
    time::timeout,
};

use crate::setup::AGENT;

/// The pod of a [`Workload`].
pub(crate) const POD: &str = "pod";

/// A user of kas or of GitLab, and its token.
#[derive(Clone, Copy, Debug)]
pub(crate) struct User {
    /// As the audit log names it.
    pub(crate) name: &'static str,
    pub(crate) token: &'static str,
    /// As whom its requests run.
    pub(crate) mode: &'static str,
}

/// May do all that agentk may.
pub(crate) const JANE: User = User { name: "kas:jane", token: endpoint::JANE, mode: "agent" };
/// Is impersonated, and may do everything in the cluster.
pub(crate) const MAY: User =
    User { name: "kas:may", token: "kasu_maymaymaymaymaymaymaymaymaymaymaymaymaymaym", mode: "user" };

/// A kubectl, and the protocol that it must use.
#[derive(Clone, Debug)]
pub(crate) struct Client {
    pub(crate) name: &'static str,
    program: PathBuf,
    env: &'static [(&'static str, &'static str)],
    /// As the audit log names the protocol.
    pub(crate) upgrade: &'static str,
    pub(crate) user: User,
}

impl Client {
    /// kubectl 1.29, which knows only SPDY.
    pub(crate) fn old(tools: &Tools) -> Self {
        let program = tools.kubectl_1_29.clone();
        Self { name: "1.29", program, env: &[], upgrade: "SPDY/3.1", user: JANE }
    }

    /// The kubectl of the API server's version.
    pub(crate) fn current(tools: &Tools) -> Self {
        let program = tools.kubectl.clone();
        Self { name: "current", program, env: &[], upgrade: "websocket", user: MAY }
    }

    /// The same kubectl, without WebSocket.
    pub(crate) fn without_websocket(tools: &Tools) -> Self {
        const SPDY: &[(&str, &str)] =
            &[("KUBECTL_REMOTE_COMMAND_WEBSOCKETS", "false"), ("KUBECTL_PORT_FORWARD_WEBSOCKETS", "false")];
        Self { name: "current-spdy", env: SPDY, upgrade: "SPDY/3.1", ..Self::current(tools) }
    }

    /// The same kubectl of another user.
    pub(crate) fn of(self, user: User) -> Self {
        Self { user, ..self }
    }
}

/// The part of a cluster that a test uses: a node with one pod, and an account of agentk that may do
/// everything.
pub(crate) struct Workload {
    pub(crate) node: Node,
    /// For agentk.
    pub(crate) kubeconfig: PathBuf,
}

impl Workload {
    /// Creates all of it. Each test has its own namespace.
    pub(crate) async fn start(kubernetes: &Kubernetes, tools: &Tools, namespace: &str) -> Result<Self> {
        let node = Node::start(kubernetes, &format!("{namespace}-node")).await?;
        node.run_pod(kubernetes, namespace, POD).await?;
        let bearer = kubernetes.service_account(namespace, "agentk", Access::Admin).await?;
        let kubeconfig = kubernetes.kubeconfig_with_token(namespace, &bearer)?;
        let bound = Command::new(&tools.kubectl)
            .arg("--kubeconfig")
            .arg(kubernetes.admin_kubeconfig())
            .args(["create", "clusterrolebinding", &format!("{namespace}-may")])
            .args(["--clusterrole=cluster-admin", "--user=kas:may"])
            .env("HOME", node.root())
            .output()
            .await?;
        ensure!(bound.status.success(), "{bound:?}");
        Ok(Self { node, kubeconfig })
    }
}

/// The files of kas' endpoint, and of its clients.
pub(crate) struct Files {
    dir: tempfile::TempDir,
    certificates: Certificates,
}

impl Files {
    pub(crate) fn new() -> Result<Self> {
        let dir = tempfile::TempDir::with_prefix("kubectl-test-")?;
        let users = [JANE, MAY].map(|user| (user.name.trim_start_matches("kas:"), user.token));
        endpoint::write_users(&dir.path().join("users.yaml"), &users)?;
        // The other addresses are those of balancers.
        let addresses = ["127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.4"];
        let certificates = Certificates::new(dir.path(), &addresses)?;
        Ok(Self { dir, certificates })
    }

    pub(crate) fn path(&self) -> &Path {
        self.dir.path()
    }

    /// The authority of the endpoint's certificate.
    pub(crate) fn ca(&self) -> &Path {
        &self.certificates.ca
    }

    /// The certificate of the endpoint.
    pub(crate) fn certificates(&self) -> &Certificates {
        &self.certificates
    }

    /// The configuration of a kas with the endpoint. Replicas share the audit log.
    pub(crate) fn config(&self) -> Value {
        json!({
            "agent": { "kubernetes_api": {
                "listen": {
                    "address": "127.0.0.1:0",
                    // kubectl sends its token only to a server with TLS.
                    "certificate_file": self.certificates.certificate,
                    "key_file": self.certificates.key,
                },
                "users": { "file": self.path().join("users.yaml") },
                "access": [
                    { "agents": "all", "users": [JANE.name], "as": "agent" },
                    { "agents": "all", "users": [MAY.name], "as": "user" },
                ],
            } },
            "observability": { "audit": { "output": self.path().join("audit.log") } },
        })
    }

    /// Returns the audit log's lines about requests of a kind: those that have begun, or ended.
    pub(crate) fn audited(&self, event: &str, kind: &str) -> Result<Vec<Value>> {
        let text = fs::read_to_string(self.path().join("audit.log"))?;
        // A line that is being written has no end yet.
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        let lines = whole.lines().map(serde_json::from_str::<Value>).collect::<Result<Vec<_>, _>>()?;
        Ok(lines.into_iter().filter(|line| line["event"] == event && line["kind"] == kind).collect())
    }

    /// Waits until `count` such lines are there after the first `before`, and returns those.
    pub(crate) async fn audited_since(
        &self,
        event: &str,
        kind: &str,
        before: usize,
        count: usize,
    ) -> Result<Vec<Value>> {
        eventually(&format!("{count} {kind} with {event} in the audit log"), async || {
            let lines = self.audited(event, kind)?.split_off(before);
            Ok(if lines.len() >= count { Ok(lines) } else { Err(lines) })
        })
        .await
    }
}

/// The endpoint as clients see it.
pub(crate) struct Endpoint {
    pub(crate) files: Files,
    /// Of a kas, or of a balancer.
    pub(crate) address: SocketAddr,
    /// That of the clients' commands.
    pub(crate) namespace: &'static str,
}

impl Endpoint {
    /// Writes the kubeconfig of a client.
    pub(crate) fn kubeconfig(&self, client: &Client) -> Result<PathBuf> {
        let kubeconfig =
            self.files.path().join(format!("{}-{}", client.name, client.user.name.replace(':', "-")));
        let server = format!("https://{}/agents/{AGENT}", self.address);
        let user = json!({ "token": client.user.token });
        let ca = &self.files.certificates.ca;
        endpoint::write_kubeconfig(&kubeconfig, &server, ca, user, Some(self.namespace))?;
        Ok(kubeconfig)
    }

    /// Returns the kubeconfig that `kasctl kubeconfig` writes for a user.
    pub(crate) async fn kasctl_kubeconfig(&self, user: User) -> Result<PathBuf> {
        let (folder, ca) = (self.files.path(), &self.files.certificates.ca);
        let arguments = ["--use", "--agent", &AGENT.to_string()];
        endpoint::kasctl_kubeconfig(folder, self.address, ca, user.token, &arguments).await
    }

    /// Prepares a kubectl.
    pub(crate) fn command(&self, client: &Client, arguments: &[&str]) -> Result<Command> {
        let mut command = Command::new(&client.program);
        command
            .arg("--kubeconfig")
            .arg(self.kubeconfig(client)?)
            .args(arguments)
            .env("HOME", self.files.path())
            .env_remove("KUBECONFIG")
            .env_remove("KUBECACHEDIR")
            .env_remove("KUBECTL_REMOTE_COMMAND_WEBSOCKETS")
            .env_remove("KUBECTL_PORT_FORWARD_WEBSOCKETS")
            .envs(client.env.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true);
        Ok(command)
    }

    /// Starts kubectl.
    pub(crate) fn spawn(&self, client: &Client, arguments: &[&str]) -> Result<Child> {
        self.command(client, arguments)?.spawn().context("could not run kubectl")
    }

    /// Runs kubectl to its end.
    pub(crate) async fn run(&self, client: &Client, arguments: &[&str], input: &[u8]) -> Result<Output> {
        let mut child = self.spawn(client, arguments)?;
        let mut stdin = child.stdin.take().context("standard input is a pipe")?;
        let write = async move {
            // A kubectl that does not read its input is judged by how it ends.
            let _ = stdin.write_all(input).await;
        };
        let both = async { tokio::join!(write, child.wait_with_output()).1 };
        let output = timeout(SOON, both).await.with_context(|| format!("no end of {arguments:?}"))?;
        Ok(output?)
    }

    /// Runs a kubectl that must succeed, and returns what it printed.
    pub(crate) async fn output(&self, client: &Client, arguments: &[&str], input: &[u8]) -> Result<Vec<u8>> {
        let output = self.run(client, arguments, input).await?;
        let stderr = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{arguments:?}: {}: {stderr}", output.status);
        Ok(output.stdout)
    }

    /// Waits until a user that is impersonated may do something: a rule takes effect after a moment.
    pub(crate) async fn is_allowed(&self, client: &Client) -> Result<()> {
        eventually("that the impersonated user may read pods", async || {
            let output = self.run(client, &["get", "pod", POD], b"").await?;
            Ok(if output.status.success() { Ok(()) } else { Err(output) })
        })
        .await
    }
}

/// A `kubectl exec -i` whose command says back what it is told.
pub(crate) struct Talk {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Talk {
    /// Starts one. The command notes its start in a file of the node.
    pub(crate) async fn start(endpoint: &Endpoint, client: &Client) -> Result<Self> {
        let script = "echo x >>started; echo ready; exec cat";
        let mut child = endpoint.spawn(client, &["exec", "-i", POD, "--", "sh", "-c", script])?;
        let mut lines = lines(&mut child)?;
        let first = line(&mut lines).await;
        ensure!(matches!(first.as_deref(), Ok("ready")), "{}: {first:?}", client.name);
        Ok(Self { child, lines })
    }

    /// Says something, and hears it.
    pub(crate) async fn says(&mut self, text: &str) -> Result<()> {
        let stdin = self.child.stdin.as_mut().context("standard input is a pipe")?;
        stdin.write_all(format!("{text}\n").as_bytes()).await?;
        let heard = line(&mut self.lines).await?;
        ensure!(heard == text, "{heard}");
        Ok(())
    }

    /// Ends the input, after which kubectl must succeed.
    pub(crate) async fn finish(mut self) -> Result<()> {
        drop(self.child.stdin.take());
        let output = self.end().await?;
        ensure!(output.status.success(), "{output:?}");
        Ok(())
    }

    /// Waits until kubectl has ended by itself.
    pub(crate) async fn end(self) -> Result<Output> {
        let Self { mut child, lines: _output } = self;
        // Its input stays open.
        let _input = child.stdin.take();
        Ok(timeout(SOON, child.wait_with_output()).await.context("no end of exec")??)
    }
}

/// Compares how many commands of [`Talk`] have been started in the pods of a node.
pub(crate) fn commands_have_started(node: &Node, count: usize) -> Result<()> {
    let started = fs::read_to_string(node.root().join("started"))?;
    ensure!(started.lines().count() == count, "{} commands were started", started.lines().count());
    Ok(())
}

/// Waits until so many commands have ended in the pods of a node.
pub(crate) async fn commands_have_ended(node: &Node, count: usize) -> Result<()> {
    let mut ended = 0;
    node.process
        .logged(&format!("the end of {count} commands"), |line| {
            ended += usize::from(line["message"] == "a command has ended");
            (ended == count).then_some(())
        })
        .await
}

/// Sends a signal to a kubectl.
pub(crate) fn signal(child: &Child, signal: Signal) -> Result<()> {
    let id = child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw);
    Ok(kill_process(id.context("kubectl has ended")?, signal)?)
}

pub(crate) fn lines(child: &mut Child) -> Result<Lines<BufReader<ChildStdout>>> {
    Ok(BufReader::new(child.stdout.take().context("standard output is a pipe")?).lines())
}

pub(crate) async fn line(lines: &mut Lines<BufReader<ChildStdout>>) -> Result<String> {
    let read = timeout(SOON, lines.next_line()).await.context("no line came")?;
    read?.ok_or_else(|| anyhow!("the output has ended"))
}
