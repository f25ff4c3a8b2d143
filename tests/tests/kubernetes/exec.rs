//! `kubectl exec`, `attach`, `cp`, `port-forward`, `logs`, `get -w` and `--as` through kas and agentk, to a
//! real API server and a kubelet: by SPDY and by WebSocket, which the audit log of kas tells.

use std::{
    fs::{self, OpenOptions},
    io::Write as _,
    net::SocketAddr,
    path::Path,
    sync::Arc,
};

use anyhow::{Context as _, Result, ensure};
use rustix::process::Signal;
use serde_json::{Value, json};
use testkit::{
    agentk::Agentk,
    endpoint,
    gitlab::GitLab,
    kas::{Kas, eventually, merge, token},
    kubernetes::{Kubernetes, Tools, tools},
    process::SOON,
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    task::JoinSet,
    time::timeout,
};

use crate::{
    clients::{Client, Endpoint, Files, MAY, POD, User, Workload, line, lines, signal},
    setup::{AGENT, Exclusive, exclusive},
    terminal::Terminal,
};

/// A user of GitLab, who may do all that agentk may, and act as others.
pub(crate) const JOHN: User =
    User { name: "gitlab:user:john", token: "pat:1:glpat-johnjohnjohnjohnjohn", mode: "agent" };

/// A kas with the endpoint, an agentk that is connected to it, and a node with one pod.
pub(crate) struct Setup {
    pub(crate) kas: Kas,
    pub(crate) endpoint: Endpoint,
    pub(crate) workload: Workload,
    _agentk: Agentk,
    pub(crate) kubernetes: Arc<Kubernetes>,
    _exclusive: Exclusive,
}

impl Setup {
    pub(crate) async fn start(tools: &Tools, namespace: &'static str) -> Result<Self> {
        Self::start_with(tools, namespace, json!({})).await
    }

    async fn start_with(tools: &Tools, namespace: &'static str, over: Value) -> Result<Self> {
        let exclusive = exclusive().await?;
        let kubernetes = Arc::clone(&exclusive.kubernetes);
        let files = Files::new()?;
        let mut config = files.config();
        merge(&mut config, over);
        let kas = Kas::start_with_config(config).await?;
        let address = endpoint::address(&kas).await?;
        let workload = Workload::start(&kubernetes, tools, namespace).await?;
        let agentk = Agentk::start_with_kubeconfig(kas.agent, &token(AGENT), &workload.kubeconfig).await?;
        agentk.connected().await?;
        let endpoint = Endpoint { files, address, namespace };
        Ok(Self { kas, endpoint, workload, _agentk: agentk, kubernetes, _exclusive: exclusive })
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
        let files = &self.endpoint.files;
        let before = files.audited("end", "upgrade")?.len();
        part().await?;
        let lines = files.audited_since("end", "upgrade", before, count).await?;
        ensure!(lines.len() == count, "{count} upgrades: {lines:?}");
        for line in lines {
            ensure!(
                line["upgrade"] == client.upgrade
                    && line["http_status"] == 101
                    && line["resource"] == resource
                    && line["subject"] == client.user.name
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
                let output =
                    self.endpoint.run(client, &["exec", POD, "--", "sh", "-c", &script], b"").await?;
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
                let output = self.endpoint.output(client, &command, input.as_bytes()).await?;
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
            let output = self.endpoint.output(client, &["exec", "-i", POD, "--", "cat"], &large).await?;
            ensure!(output == large, "{} bytes came back, or others", output.len());
            Ok(())
        })
        .await
    }

    async fn copies(&self, client: &Client) -> Result<()> {
        let local = self.endpoint.files.path().join(format!("cp-{}", client.name));
        fs::create_dir_all(local.join("tree/sub"))?;
        fs::write(local.join("tree/large"), noise(3 << 20))?;
        fs::write(local.join("tree/sub/small"), "small")?;
        let remote = self.workload.node.root().join(client.name);
        fs::create_dir(&remote)?;
        let tree = text(&local.join("tree"))?.to_owned();
        let in_pod = format!("{POD}:{}/tree", client.name);
        // The first looks whether the destination is a folder.
        self.audited(client, "pods/exec", 2, async || {
            self.endpoint.output(client, &["cp", &tree, &in_pod], b"").await?;
            same_tree(&local.join("tree"), &remote.join("tree"))
        })
        .await?;
        self.audited(client, "pods/exec", 1, async || {
            self.endpoint.output(client, &["cp", &in_pod, text(&local.join("back"))?], b"").await?;
            same_tree(&local.join("tree"), &local.join("back"))
        })
        .await
    }

    async fn attaches(&self, client: &Client) -> Result<()> {
        self.audited(client, "pods/attach", 1, async || {
            let mut child = self.endpoint.spawn(client, &["attach", "-i", POD])?;
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
            let mut child = self.endpoint.spawn(client, &["port-forward", POD, &format!(":{port}")])?;
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
        let files = &self.endpoint.files;
        let path = self.workload.node.log_file(self.endpoint.namespace, POD);
        fs::write(&path, "first\n")?;
        let before = files.audited("end", "follow")?.len();
        let kubelet = self.workload.node.process.log_len();
        ensure!(self.endpoint.output(client, &["logs", POD], b"").await? == b"first\n");
        let mut child = self.endpoint.spawn(client, &["logs", "-f", POD])?;
        let mut lines = lines(&mut child)?;
        ensure!(line(&mut lines).await? == "first");
        let mut log = OpenOptions::new().append(true).open(&path)?;
        for word in ["second", "third"] {
            log.write_all(format!("{word}\n").as_bytes())?;
            ensure!(line(&mut lines).await? == word);
        }
        child.kill().await?;
        let left = |line: &Value| (line["message"] == "the client stopped following a log").then_some(());
        self.workload.node.process.logged_since(kubelet, "that the client has left", left).await?;
        let followed = files.audited_since("end", "follow", before, 1).await?;
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

    /// The command has a terminal, which follows the size of that of kubectl.
    async fn terminal(&self, client: &Client) -> Result<()> {
        self.audited(client, "pods/exec", 1, async || {
            let (mut terminal, program) = Terminal::open(33, 101)?;
            let script =
                "test -t 0 && test -t 1 && echo it has one; while read key; do stty size; done; exit 5";
            let mut command =
                self.endpoint.command(client, &["exec", "-it", POD, "--", "sh", "-c", script])?;
            command.stdin(program.try_clone()?).stdout(program);
            let mut child = command.spawn()?;
            // It holds the other end too.
            drop(command);
            terminal.shows("it has one\r\n").await?;
            for (rows, columns) in [(33, 101), (40, 120)] {
                terminal.resize(rows, columns)?;
                eventually("the size of the terminal", async || {
                    // kubectl forgets a size that changes while it sends another.
                    signal(&child, Signal::WINCH)?;
                    terminal.press(b"\r")?;
                    let screen = terminal.screen();
                    let is_shown = screen.contains(&format!("{rows} {columns}\r\n"));
                    Ok(if is_shown { Ok(()) } else { Err(screen) })
                })
                .await?;
            }
            // Ctrl-D.
            terminal.press(&[4])?;
            let ended = timeout(SOON, child.wait()).await.context("no end of exec")??;
            ensure!(ended.code() == Some(5), "{ended}: {:?}", terminal.screen());
            Ok(())
        })
        .await
    }

    async fn watches(&self, client: &Client) -> Result<()> {
        let Self { endpoint, workload, kubernetes, .. } = self;
        let before = endpoint.files.audited("end", "watch")?.len();
        let mut child = endpoint.spawn(client, &["get", "pods", "-w", "-o", "name"])?;
        let mut lines = lines(&mut child)?;
        ensure!(line(&mut lines).await? == format!("pod/{POD}"));
        let late = format!("late-{}", client.name.replace('.', "-"));
        workload.node.run_pod(kubernetes, endpoint.namespace, &late).await?;
        ensure!(line(&mut lines).await? == format!("pod/{late}"));
        child.kill().await?;
        for line in endpoint.files.audited_since("end", "watch", before, 1).await? {
            ensure!(
                line["http_status"] == 200 && line["verb"] == "watch" && line["ended_by"] == "client",
                "{line}"
            );
        }
        Ok(())
    }

    /// Users of kas act as nobody else.
    async fn acts_as_nobody_else(&self, client: &Client) -> Result<()> {
        let output = self.endpoint.run(client, &["get", "pod", POD, "--as=kas:may"], b"").await?;
        let stderr = String::from_utf8_lossy(&output.stderr);
        let is_told = stderr.contains("this credential allows no Impersonate-* headers");
        ensure!(!output.status.success() && is_told, "{output:?}");
        Ok(())
    }

    /// Everything that kubectl does through the endpoint, with one client.
    async fn everything(&self, client: &Client) -> Result<()> {
        self.endpoint.is_allowed(client).await?;
        let mut failures = Vec::new();
        // One failure hides no other.
        for (part, result) in [
            ("exit codes", self.exit_codes_and_both_outputs(client).await),
            ("end of input", self.end_of_input(client).await),
            ("8 MiB", self.eight_mebibytes_both_ways(client).await),
            ("terminal", self.terminal(client).await),
            ("cp", self.copies(client).await),
            ("attach", self.attaches(client).await),
            ("port-forward", self.forwards_ports(client).await),
            ("logs", self.follows_logs(client).await),
            ("get -w", self.watches(client).await),
            ("--as", self.acts_as_nobody_else(client).await),
        ] {
            if let Err(error) = result {
                failures.push(format!("{part}: {error:#}"));
            }
        }
        ensure!(failures.is_empty(), "{}", failures.join("\n"));
        self.kas.metric_is("kas_kubernetes_open{kind=\"upgrade\"}", 0.0).await
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

pub(crate) async fn found_tools() -> Result<Tools> {
    tokio::task::spawn_blocking(tools).await?
}

#[tokio::test]
async fn kubectl_1_29_does_everything_by_spdy() -> Result<()> {
    let tools = found_tools().await?;
    let setup = Setup::start(&tools, "exec-old").await?;
    setup.everything(&Client::old(&tools)).await
}

#[tokio::test]
async fn kubectl_does_everything_by_websocket() -> Result<()> {
    let tools = found_tools().await?;
    let setup = Setup::start(&tools, "exec").await?;
    setup.everything(&Client::current(&tools)).await
}

#[tokio::test]
async fn kubectl_without_websocket_does_everything_by_spdy() -> Result<()> {
    let tools = found_tools().await?;
    let setup = Setup::start(&tools, "exec-spdy").await?;
    setup.everything(&Client::without_websocket(&tools)).await
}

/// `--as` is for users of GitLab who have the rights of agentk.
#[tokio::test]
async fn kubectl_acts_as_others_by_both_protocols() -> Result<()> {
    let tools = found_tools().await?;
    let gitlab = GitLab::start().await?;
    gitlab.know(&token(AGENT), AGENT, "agent-1", 7);
    gitlab.have_user("glpat-johnjohnjohnjohnjohn", john());
    let setup = Setup::start_with(&tools, "exec-as", gitlab.config()).await?;
    for client in [Client::old(&tools), Client::current(&tools)] {
        let client = client.of(JOHN);
        let may = async || setup.endpoint.run(&client, &["get", "pod", POD, "--as=kas:may"], b"").await;
        eventually("that a rule takes effect", async || {
            let output = may().await?;
            Ok(if output.status.success() { Ok(()) } else { Err(output) })
        })
        .await?;
        let exec = |user: &'static str| ["exec", user, POD, "--", "echo", "acted"];
        setup
            .audited(&client, "pods/exec", 1, async || {
                let output = setup.endpoint.output(&client, &exec("--as=kas:may"), b"").await?;
                ensure!(output == b"acted\n", "{output:?}");
                Ok(())
            })
            .await?;
        let upgraded = setup.endpoint.files.audited("end", "upgrade")?;
        let last = upgraded.last().context("it is in the audit log")?;
        ensure!(last["on_behalf_of"] == MAY.name, "{last}");
        // Somebody without any right.
        let output = setup.endpoint.run(&client, &exec("--as=kas:nobody"), b"").await?;
        let stderr = String::from_utf8_lossy(&output.stderr);
        ensure!(
            !output.status.success() && output.stdout.is_empty() && stderr.contains("kas:nobody"),
            "{output:?}"
        );
    }
    Ok(())
}

/// What GitLab says about [`JOHN`].
pub(crate) fn john() -> Value {
    json!({
        "agent": { "id": AGENT, "config_project": { "id": 7 } },
        "user": { "id": 5, "username": "john" },
        "access_as": { "agent": {} },
    })
}
