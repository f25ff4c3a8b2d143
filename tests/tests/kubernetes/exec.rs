//! `kubectl exec`, `attach`, `cp`, `port-forward` and `logs` through kas and agentk, to a real API server and
//! a kubelet: by SPDY and by WebSocket, which the audit log of kas tells. The kubectl of `PATH` is not used.

use std::{
    fs::{self, OpenOptions},
    io::Write as _,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::{Output, Stdio},
};

use anyhow::{Context as _, Result, anyhow, ensure};
use serde_json::{Value, json};
use testkit::{
    agentk::Agentk,
    certificates::Certificates,
    kas::{Kas, eventually, replace, token},
    kubernetes::{Access, Kubernetes, Node, Tools, tools},
    process::SOON,
};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader, Lines},
    net::{TcpListener, TcpStream},
    process::{Child, ChildStdout, Command},
    task::JoinSet,
    time::timeout,
};

use crate::setup::{AGENT, exclusive};

const NAMESPACE: &str = "exec";
const POD: &str = "pod";

/// A user of kas, and the token of it.
#[derive(Clone, Copy, Debug)]
struct User {
    name: &'static str,
    token: &'static str,
    /// As whom its requests run.
    mode: &'static str,
}

/// May do all that agentk may.
const JANE: User =
    User { name: "jane", token: "kasu_janejanejanejanejanejanejanejanejanejanejan", mode: "agent" };
/// Is impersonated, and may do everything in the cluster.
const MAY: User =
    User { name: "may", token: "kasu_maymaymaymaymaymaymaymaymaymaymaymaymaymaym", mode: "user" };

/// A kubectl, and the protocol that it must use.
#[derive(Clone, Debug)]
struct Client {
    name: &'static str,
    program: PathBuf,
    env: &'static [(&'static str, &'static str)],
    upgrade: &'static str,
    user: User,
}

impl Client {
    fn all(tools: &Tools) -> [Self; 3] {
        const SPDY: &[(&str, &str)] =
            &[("KUBECTL_REMOTE_COMMAND_WEBSOCKETS", "false"), ("KUBECTL_PORT_FORWARD_WEBSOCKETS", "false")];
        let current = || tools.kubectl.clone();
        let old = tools.kubectl_1_29.clone();
        [
            Self { name: "1.29", program: old, env: &[], upgrade: "SPDY/3.1", user: JANE },
            Self { name: "current", program: current(), env: &[], upgrade: "websocket", user: MAY },
            Self { name: "current-spdy", program: current(), env: SPDY, upgrade: "SPDY/3.1", user: MAY },
        ]
    }
}

/// A kas with the endpoint, an agentk that is connected to it, and a node with one pod.
struct Setup {
    kas: Kas,
    address: SocketAddr,
    ca: PathBuf,
    node: Node,
    _agentk: Agentk,
    files: tempfile::TempDir,
}

impl Setup {
    async fn start(kubernetes: &Kubernetes, tools: &Tools) -> Result<Self> {
        let files = tempfile::TempDir::with_prefix("exec-test-")?;
        let users: Vec<Value> = [JANE, MAY]
            .into_iter()
            .map(|user| {
                let hash = ids::TokenHash::of(user.token.as_bytes()).to_hex();
                json!({ "name": user.name, "tokens": [format!("sha256:{hash}")] })
            })
            .collect();
        let users_file = files.path().join("users.yaml");
        replace(&users_file, &serde_json::to_vec(&json!({ "users": users }))?)?;
        let certificates = Certificates::new(files.path(), &["127.0.0.1"])?;
        let kas = Kas::start_with_config(json!({
            "agent": { "kubernetes_api": {
                "listen": {
                    "address": "127.0.0.1:0",
                    "certificate_file": certificates.certificate,
                    "key_file": certificates.key,
                },
                "users": { "file": users_file },
                "access": [
                    { "agents": "all", "users": ["kas:jane"], "as": "agent" },
                    { "agents": "all", "users": ["kas:may"], "as": "user" },
                ],
            } },
            "observability": { "audit": { "output": files.path().join("audit.log") } },
        }))
        .await?;
        let address = kas
            .process
            .logged("where kubectl is served", |line| {
                (line["message"] == "kas is serving").then(|| line["kubernetes"].as_str()?.parse().ok())?
            })
            .await?;
        let node = Node::start(kubernetes, "exec-node").await?;
        node.run_pod(kubernetes, NAMESPACE, POD).await?;
        let bearer = kubernetes.service_account(NAMESPACE, "agentk", Access::Admin).await?;
        let kubeconfig = kubernetes.kubeconfig_with_token(NAMESPACE, &bearer)?;
        let agentk = Agentk::start_with_kubeconfig(kas.agent, &token(AGENT), &kubeconfig).await?;
        agentk.connected().await?;

        let bound = Command::new(&tools.kubectl)
            .arg("--kubeconfig")
            .arg(kubernetes.admin_kubeconfig())
            .args([
                "create",
                "clusterrolebinding",
                "exec-may",
                "--clusterrole=cluster-admin",
                "--user=kas:may",
            ])
            .env("HOME", files.path())
            .output()
            .await?;
        ensure!(bound.status.success(), "{bound:?}");
        let setup = Self { kas, address, ca: certificates.ca, node, _agentk: agentk, files };
        // A rule takes effect after a moment.
        let [_, current, _] = Client::all(tools);
        eventually("that the impersonated user may read pods", async || {
            let output = setup.run(&current, &["get", "pod", POD], b"").await?;
            Ok(if output.status.success() { Ok(()) } else { Err(output) })
        })
        .await?;
        Ok(setup)
    }

    /// Prepares a kubectl that sends its requests to kas.
    fn command(&self, client: &Client, arguments: &[&str]) -> Result<Command> {
        let kubeconfig = self.files.path().join(client.user.name);
        let cluster = json!({
            "server": format!("https://{}/agents/{AGENT}", self.address),
            "certificate-authority": self.ca,
        });
        let config = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{ "name": "c", "cluster": cluster }],
            "users": [{ "name": "u", "user": { "token": client.user.token } }],
            "contexts": [{ "name": "x", "context": { "cluster": "c", "user": "u", "namespace": NAMESPACE } }],
            "current-context": "x",
        });
        replace(&kubeconfig, &serde_json::to_vec(&config)?)?;
        let mut command = Command::new(&client.program);
        command
            .arg("--kubeconfig")
            .arg(kubeconfig)
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

    /// Runs kubectl to its end.
    async fn run(&self, client: &Client, arguments: &[&str], input: &[u8]) -> Result<Output> {
        let mut child = self.command(client, arguments)?.spawn().context("could not run kubectl")?;
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
    async fn output(&self, client: &Client, arguments: &[&str], input: &[u8]) -> Result<Vec<u8>> {
        let output = self.run(client, arguments, input).await?;
        let stderr = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{arguments:?}: {}: {stderr}", output.status);
        Ok(output.stdout)
    }

    /// Returns the audit log's lines about requests of a kind that have ended.
    fn ended(&self, kind: &str) -> Result<Vec<Value>> {
        let text = fs::read_to_string(self.files.path().join("audit.log"))?;
        // A line that is being written has no end yet.
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        let lines = whole.lines().map(serde_json::from_str::<Value>).collect::<Result<Vec<_>, _>>()?;
        Ok(lines.into_iter().filter(|line| line["event"] == "end" && line["kind"] == kind).collect())
    }

    /// Waits until `count` requests of a kind have ended after the first `before`, and returns those.
    async fn ended_since(&self, kind: &str, before: usize, count: usize) -> Result<Vec<Value>> {
        eventually("the ends of requests in the audit log", async || {
            let lines = self.ended(kind)?.split_off(before);
            Ok(if lines.len() >= count { Ok(lines) } else { Err(lines) })
        })
        .await
    }

    /// Runs one part of the test, in which `count` connections are upgraded, and compares the audit log: each
    /// was upgraded to the client's protocol, and none was refused before.
    async fn audited(
        &self,
        client: &Client,
        resource: &str,
        count: usize,
        part: impl AsyncFnOnce() -> Result<()>,
    ) -> Result<()> {
        let before = self.ended("upgrade")?.len();
        part().await?;
        let lines = self.ended_since("upgrade", before, count).await?;
        ensure!(lines.len() == count, "{count} upgrades: {lines:?}");
        let subject = format!("kas:{}", client.user.name);
        for line in lines {
            ensure!(
                line["upgrade"] == client.upgrade
                    && line["http_status"] == 101
                    && line["resource"] == resource
                    && line["subject"] == *subject
                    && line["mode"] == client.user.mode,
                "{resource} by {}: {line}",
                client.upgrade
            );
        }
        Ok(())
    }

    async fn exit_codes_and_both_outputs(&self, client: &Client) -> Result<()> {
        for code in [0, 7] {
            self.audited(client, "pods/exec", 1, async || {
                let script = format!("echo out; echo err >&2; exit {code}");
                let output = self.run(client, &["exec", POD, "--", "sh", "-c", &script], b"").await?;
                let stderr = String::from_utf8_lossy(&output.stderr);
                ensure!(
                    output.status.code() == Some(code)
                        && output.stdout == b"out\n"
                        && stderr.starts_with("err\n")
                        && (code == 0 || stderr.contains("exit code 7")),
                    "{output:?}"
                );
                Ok(())
            })
            .await?;
        }
        Ok(())
    }

    async fn end_of_input(&self, client: &Client) -> Result<()> {
        for input in ["", "a\nb"] {
            self.audited(client, "pods/exec", 1, async || {
                let command = ["exec", "-i", POD, "--", "sh", "-c", "cat; echo end"];
                let output = self.output(client, &command, input.as_bytes()).await?;
                ensure!(output == format!("{input}end\n").as_bytes(), "{output:?}");
                Ok(())
            })
            .await?;
        }
        Ok(())
    }

    async fn eight_mebibytes_both_ways(&self, client: &Client) -> Result<()> {
        self.audited(client, "pods/exec", 1, async || {
            let large = noise(8 << 20);
            let output = self.output(client, &["exec", "-i", POD, "--", "cat"], &large).await?;
            ensure!(output == large, "{} bytes came back, or others", output.len());
            Ok(())
        })
        .await
    }

    async fn copies(&self, client: &Client) -> Result<()> {
        let local = self.files.path().join(format!("cp-{}", client.name));
        fs::create_dir_all(local.join("tree/sub"))?;
        fs::write(local.join("tree/large"), noise(3 << 20))?;
        fs::write(local.join("tree/sub/small"), "small")?;
        let remote = self.node.root().join(client.name);
        fs::create_dir(&remote)?;
        let tree = text(&local.join("tree"))?.to_owned();
        let in_pod = format!("{POD}:{}/tree", client.name);
        // The first looks whether the destination is a folder.
        self.audited(client, "pods/exec", 2, async || {
            self.output(client, &["cp", &tree, &in_pod], b"").await?;
            same_tree(&local.join("tree"), &remote.join("tree"))
        })
        .await?;
        self.audited(client, "pods/exec", 1, async || {
            self.output(client, &["cp", &in_pod, text(&local.join("back"))?], b"").await?;
            same_tree(&local.join("tree"), &local.join("back"))
        })
        .await
    }

    async fn attaches(&self, client: &Client) -> Result<()> {
        self.audited(client, "pods/attach", 1, async || {
            let mut child = self.command(client, &["attach", "-i", POD])?.spawn()?;
            let mut stdin = child.stdin.take().context("standard input is a pipe")?;
            let mut lines = lines(&mut child)?;
            ensure!(line(&mut lines).await? == "attached");
            for word in ["one", "two"] {
                stdin.write_all(format!("{word}\n").as_bytes()).await?;
                ensure!(line(&mut lines).await? == word);
            }
            drop(stdin);
            let output = timeout(SOON, child.wait_with_output()).await.context("no end of attach")??;
            ensure!(output.status.success(), "{output:?}");
            Ok(())
        })
        .await
    }

    /// Several connections at once share one upgrade.
    async fn forwards_ports(&self, client: &Client) -> Result<()> {
        let server = TcpListener::bind("127.0.0.1:0").await?;
        let port = server.local_addr()?.port();
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            // All four are open before any of them gets an answer.
            let mut open = Vec::new();
            for _ in 0..4 {
                open.push(server.accept().await?.0);
            }
            let mut echoes = JoinSet::new();
            for stream in open {
                echoes.spawn(async move {
                    let (mut from, mut to) = stream.into_split();
                    tokio::io::copy(&mut from, &mut to).await
                });
            }
            while let Some(echo) = echoes.join_next().await {
                echo??;
            }
            anyhow::Ok(())
        });
        self.audited(client, "pods/portforward", 1, async || {
            let mut child = self.command(client, &["port-forward", POD, &format!(":{port}")])?.spawn()?;
            let mut lines = lines(&mut child)?;
            // Forwarding from 127.0.0.1:40001 -> 40000
            let said = line(&mut lines).await?;
            let local = said.split_whitespace().nth(2).with_context(|| said.clone())?;
            let local: SocketAddr = local.parse().with_context(|| said.clone())?;
            for n in 0..4 {
                tasks.spawn(async move {
                    let sent = noise((256 << 10) + n);
                    let (mut from, mut to) = TcpStream::connect(local).await?.into_split();
                    let write = async {
                        to.write_all(&sent).await?;
                        to.shutdown().await
                    };
                    let mut got = Vec::new();
                    tokio::try_join!(write, from.read_to_end(&mut got))?;
                    ensure!(got == sent, "connection {n}: {} bytes came back, or others", got.len());
                    anyhow::Ok(())
                });
            }
            let all = async {
                while let Some(task) = tasks.join_next().await {
                    task??;
                }
                anyhow::Ok(())
            };
            timeout(SOON, all).await.context("the connections have not ended")??;
            child.kill().await?;
            Ok(())
        })
        .await
    }

    async fn follows_logs(&self, client: &Client) -> Result<()> {
        let path = self.node.log_file(NAMESPACE, POD);
        fs::write(&path, "first\n")?;
        let before = self.ended("follow")?.len();
        let kubelet = self.node.process.log_len();
        ensure!(self.output(client, &["logs", POD], b"").await? == b"first\n");
        let mut child = self.command(client, &["logs", "-f", POD])?.spawn()?;
        let mut lines = lines(&mut child)?;
        ensure!(line(&mut lines).await? == "first");
        let mut log = OpenOptions::new().append(true).open(&path)?;
        for word in ["second", "third"] {
            log.write_all(format!("{word}\n").as_bytes())?;
            ensure!(line(&mut lines).await? == word);
        }
        child.kill().await?;
        let left = |line: &Value| (line["message"] == "the client stopped following a log").then_some(());
        self.node.process.logged_since(kubelet, "that the client has left", left).await?;
        let followed = self.ended_since("follow", before, 1).await?;
        ensure!(followed.len() == 1, "{followed:?}");
        for line in followed {
            ensure!(
                line["upgrade"].is_null()
                    && line["http_status"] == 200
                    && line["resource"] == "pods/log"
                    && line["ended_by"] == "client",
                "{line}"
            );
        }
        Ok(())
    }
}

/// Returns bytes that do not repeat soon.
fn noise(len: usize) -> Vec<u8> {
    let len = u32::try_from(len).expect("a test sends less than 4 GiB");
    (0..len).map(|at| (at.wrapping_mul(2_654_435_761).rotate_left(at % 31) >> 24) as u8).collect()
}

fn text(path: &Path) -> Result<&str> {
    path.to_str().context("the path is UTF-8")
}

fn same_tree(one: &Path, other: &Path) -> Result<()> {
    for name in ["large", "sub/small"] {
        let (one, other) = (fs::read(one.join(name))?, fs::read(other.join(name)).context(name)?);
        ensure!(one == other, "{name}: {} bytes became {}, or others", one.len(), other.len());
    }
    Ok(())
}

fn lines(child: &mut Child) -> Result<Lines<BufReader<ChildStdout>>> {
    Ok(BufReader::new(child.stdout.take().context("standard output is a pipe")?).lines())
}

async fn line(lines: &mut Lines<BufReader<ChildStdout>>) -> Result<String> {
    let read = timeout(SOON, lines.next_line()).await.context("no line came")?;
    read?.ok_or_else(|| anyhow!("the output has ended"))
}

#[tokio::test]
async fn kubectl_runs_attaches_copies_and_forwards_by_both_protocols() -> Result<()> {
    let tools = tokio::task::spawn_blocking(tools).await??;
    let exclusive = exclusive().await?;
    let setup = Setup::start(&exclusive.kubernetes, &tools).await?;
    let mut failures = Vec::new();
    for client in Client::all(&tools) {
        // One failure hides no other, and each names its client.
        for (part, result) in [
            ("exit codes", setup.exit_codes_and_both_outputs(&client).await),
            ("end of input", setup.end_of_input(&client).await),
            ("8 MiB", setup.eight_mebibytes_both_ways(&client).await),
            ("cp", setup.copies(&client).await),
            ("attach", setup.attaches(&client).await),
            ("port-forward", setup.forwards_ports(&client).await),
            ("logs", setup.follows_logs(&client).await),
        ] {
            if let Err(error) = result {
                failures.push(format!("{}, {part}: {error:#}", client.name));
            }
        }
    }
    ensure!(failures.is_empty(), "{}", failures.join("\n"));
    setup.kas.metric_is("kas_kubernetes_open{kind=\"upgrade\"}", 0.0).await?;
    Ok(())
}
