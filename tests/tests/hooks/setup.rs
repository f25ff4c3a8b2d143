//! Replicas with a listener for hooks, an agentk, an API server, and a receiver behind a Service of it.

use std::{net::SocketAddr, time::Duration};

use anyhow::{Context as _, Result, ensure};
use aws_lc_rs::hmac;
use proto::kas::api::v1::{ListHooksRequest, ListHooksResponse, ReplayHooksRequest, ReplayHooksResponse};
use serde_json::json;
use tempfile::TempDir;
use testkit::{
    agentk::Agentk,
    http1::{self, Framing, Head},
    kas::{token, write_private},
    kubernetes::{Kubernetes, own_address},
    mesh::{Mesh, Options},
    process::SOON,
    receiver::Receiver,
};
use tokio::{
    io::{AsyncWriteExt as _, BufReader},
    net::{TcpSocket, TcpStream},
    time::{Instant, sleep},
};

pub(crate) const AGENT: i64 = 1;
const PORT: u16 = 8156;
/// The secret of the hook `push`.
const SECRET: &str = "It's a secret of the test";
/// The key of the hook `flux`.
pub(crate) const KEY: &str = "0123456789abcdef0123456789abcdef";
/// The time between two looks.
const LOOK: Duration = Duration::from_millis(20);

/// An answer to a hook.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Told {
    pub(crate) head: Head,
    pub(crate) body: String,
}

impl Told {
    pub(crate) fn status(&self) -> u16 {
        self.head.status().unwrap_or(0)
    }

    pub(crate) fn id(&self) -> Result<String> {
        ensure!(self.status() == 202, "not accepted: {self:?}");
        self.head.get("kas-hook-id").map(str::to_owned).context("no id")
    }

    pub(crate) fn copies(&self) -> Option<&str> {
        self.head.get("kas-mailbox-copies")
    }

    /// What it says, without the date.
    pub(crate) fn plain(&self) -> (String, Vec<(String, String)>, String) {
        let fields = self.head.fields.iter().filter(|(name, _)| name != "date").cloned();
        (self.head.line.clone(), fields.collect(), self.body.clone())
    }
}

/// Everything that a test needs.
pub(crate) struct Setup {
    pub(crate) mesh: Mesh,
    pub(crate) agentk: Option<Agentk>,
    pub(crate) kubernetes: Kubernetes,
    pub(crate) receiver: Receiver,
    dir: TempDir,
}

impl Setup {
    /// Starts replicas and an agentk that is connected to the first two of them.
    pub(crate) async fn start(replicas: usize) -> Result<Self> {
        let dir = TempDir::with_prefix("hooks-test-")?;
        let root = dir.path();
        std::fs::create_dir_all(root.join("config/agents/agent-1"))?;
        std::fs::write(root.join("config/agents/agent-1/config.yaml"), "")?;
        let hash = key_hash(KEY);
        let hooks = format!(
            "hooks:
- {{name: push, verify: {{github: push}}, deliver: {{service: 'default/receiver:80', path: /hook/4f2a}}}}
- {{name: flux, verify: {{target: '{hash}'}}, deliver: {{service: 'default/receiver:web'}}}}
- {{name: touch, verify: {{github: push}}, deliver: {{annotate: {{resource: v1/configmaps, namespace: default, name: app,
   annotation: example.com/requested}}}}}}
- {{name: unset, verify: {{gitlab: unset}}, deliver: {{service: 'default/receiver:80'}}}}
- {{name: nowhere, verify: {{github: push}}, deliver: {{service: 'default/nothing:80'}}}}
- {{name: fast, verify: {{github: push}}, deliver: {{service: 'default/receiver:80'}}}}
"
        );
        std::fs::write(root.join("config/agents/agent-1/kas.yaml"), hooks)?;
        std::fs::create_dir_all(root.join("secrets/1"))?;
        write_private(&root.join("secrets/1/push"), &format!("{SECRET}\n"))?;
        let config = json!({
            "agent": { "configuration": { "folder": root.join("config"), "poll_period": "1s" } },
            "hooks": { "secrets_dir": root.join("secrets") },
        });
        let options = Options { replicas, agents: 2, config, start: false, ..Options::default() };
        let mut mesh = Mesh::start_with(options).await?;
        for n in 0..replicas {
            let listen = SocketAddr::new(mesh.private(n).ip(), PORT);
            mesh.add_config_of(n, json!({ "hooks": { "listen": { "address": listen } } }));
        }
        let all: Vec<usize> = (0..replicas).collect();
        let (kubernetes, receiver, _) = tokio::try_join!(
            Kubernetes::start(),
            Receiver::start(own_address()?),
            mesh.start_replicas(&all)
        )?;
        let mut it = Self { mesh, agentk: None, kubernetes, receiver, dir };
        it.service().await?;
        it.connect().await?;
        it.known(0).await?;
        Ok(it)
    }

    /// Returns the folder of the configuration of the agent.
    pub(crate) fn folder(&self) -> std::path::PathBuf {
        self.dir.path().join("config/agents/agent-1")
    }

    /// Creates the Service and its address, and an object to annotate.
    async fn service(&self) -> Result<()> {
        self.kubernetes.service_to("default", "receiver", 80, self.receiver.address).await?;
        let app = json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "app", "namespace": "default" } });
        self.kubernetes.apply(&app.to_string()).await?;
        Ok(())
    }

    /// Starts the agentk.
    pub(crate) async fn connect(&mut self) -> Result<()> {
        let running = self.mesh.running();
        let urls: Vec<String> =
            running.iter().take(2).map(|n| format!("grpc://{}", self.mesh.agents(*n))).collect();
        let kubeconfig = self.kubernetes.admin_kubeconfig();
        let kubeconfig = kubeconfig.to_str().context("a path in UTF-8")?;
        let agentk =
            Agentk::start_at_urls(&urls.join(","), &token(AGENT), &["--kubeconfig", kubeconfig]).await?;
        agentk.connected().await?;
        self.agentk = Some(agentk);
        Ok(())
    }

    /// Ends the agentk, and waits until nothing of it is left.
    pub(crate) async fn disconnect(&mut self) -> Result<()> {
        self.agentk = None;
        let deadline = Instant::now() + SOON;
        loop {
            let mut connections = 0;
            for n in self.mesh.running() {
                connections += self.mesh.connections(n, AGENT).await?.agents.len();
                connections += self.mesh.view(n).await?.holders.len();
            }
            if connections == 0 {
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "the agent is still connected");
            sleep(LOOK).await;
        }
    }

    /// Returns the address of the listener for hooks of a replica.
    pub(crate) fn listen(&self, n: usize) -> SocketAddr {
        SocketAddr::new(self.mesh.private(n).ip(), PORT)
    }

    /// Waits until the hooks are known where they are asked for.
    pub(crate) async fn known(&self, n: usize) -> Result<ListHooksResponse> {
        self.until(n, "known", |list| list.known).await
    }

    /// Waits until a replica says something about the hooks.
    pub(crate) async fn until(
        &self,
        n: usize,
        what: &str,
        is_right: impl Fn(&ListHooksResponse) -> bool,
    ) -> Result<ListHooksResponse> {
        let deadline = Instant::now() + SOON;
        loop {
            let last = match self.hooks(n).await {
                Ok(list) if is_right(&list) => return Ok(list),
                Ok(list) => format!("{list:?}"),
                Err(error) => format!("{error:#}"),
            };
            ensure!(Instant::now() < deadline, "not {what}: {last}");
            sleep(LOOK).await;
        }
    }

    pub(crate) async fn hooks(&self, n: usize) -> Result<ListHooksResponse> {
        let request = ListHooksRequest { agent_id: AGENT };
        self.mesh.caller(n).await?.unary("/kas.api.v1.KasApi/ListHooks", &request).await
    }

    pub(crate) async fn replay(&self, n: usize, id: &str) -> Result<ReplayHooksResponse> {
        let request = ReplayHooksRequest { agent_id: AGENT, id: id.to_owned() };
        self.mesh.caller(n).await?.unary("/kas.api.v1.KasApi/ReplayHooks", &request).await
    }

    /// Returns the home of the agent's hooks.
    pub(crate) async fn home(&self, asked: usize) -> Result<usize> {
        let name = self.known(asked).await?.replica;
        let home = self.mesh.running().into_iter().find(|n| self.mesh.private(*n).to_string() == name);
        home.with_context(|| format!("{name:?} is no replica"))
    }

    /// Sends a request to the listener of a replica.
    pub(crate) async fn send(
        &self,
        n: usize,
        path: &str,
        headers: &[(&str, &str)],
        body: &str,
    ) -> Result<Told> {
        send(self.open(n).await?, path, headers, body).await
    }

    /// Sends a hook as GitHub does.
    pub(crate) async fn push(&self, n: usize, hook: &str, delivery: &str, body: &str) -> Result<Told> {
        push(self.listen(n), hook, delivery, body).await
    }

    /// Opens a connection to the listener of a replica.
    pub(crate) async fn open(&self, n: usize) -> Result<TcpStream> {
        Ok(TcpStream::connect(self.listen(n)).await?)
    }

    /// Opens a connection to the listener of a replica from another address than the others have.
    pub(crate) async fn open_from_elsewhere(&self, n: usize) -> Result<TcpStream> {
        let socket = TcpSocket::new_v4()?;
        socket.bind(SocketAddr::from(([127, 0, 0, 66], 0)))?;
        Ok(socket.connect(self.listen(n)).await?)
    }
}

/// Signs a body as GitHub does.
pub(crate) fn signature(body: &str) -> String {
    let key = hmac::Key::new(hmac::HMAC_SHA256, SECRET.as_bytes());
    format!("sha256={}", hex::encode(hmac::sign(&key, body.as_bytes())))
}

fn key_hash(text: &str) -> String {
    let digest = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, text.as_bytes());
    format!("sha256:{}", hex::encode(digest))
}

/// Sends a hook as GitHub does.
pub(crate) async fn push(address: SocketAddr, hook: &str, delivery: &str, body: &str) -> Result<Told> {
    push_over(TcpStream::connect(address).await?, hook, delivery, body).await
}

/// Sends a hook as GitHub does, over a connection.
pub(crate) async fn push_over(stream: TcpStream, hook: &str, delivery: &str, body: &str) -> Result<Told> {
    let signature = signature(body);
    let headers = [
        ("content-type", "application/json"),
        ("user-agent", "GitHub-Hookshot/test"),
        ("x-github-event", "push"),
        ("x-github-delivery", delivery),
        ("x-hub-signature-256", &signature),
    ];
    send(stream, &format!("/hooks/v1/{AGENT}/{hook}"), &headers, body).await
}

async fn send(stream: TcpStream, path: &str, headers: &[(&str, &str)], body: &str) -> Result<Told> {
    let mut stream = BufReader::new(stream);
    let mut request = format!("POST {path} HTTP/1.1\r\nHost: kas\r\nContent-Length: {}\r\n", body.len());
    for (name, value) in headers {
        request.push_str(&format!("{name}: {value}\r\n"));
    }
    request.push_str("Connection: close\r\n\r\n");
    stream.get_mut().write_all(request.as_bytes()).await?;
    // Whoever refuses it early may have closed.
    let _ = stream.get_mut().write_all(body.as_bytes()).await;
    answer(&mut stream).await
}

/// Reads an answer.
pub(crate) async fn answer(stream: &mut BufReader<TcpStream>) -> Result<Told> {
    let head = http1::read_head(stream).await?.context("no answer")?;
    let framing = head.framing_of_response("POST")?;
    let body = match framing {
        Framing::Length(0) => http1::Body::default(),
        framing => http1::read_body(stream, framing).await,
    };
    Ok(Told { head, body: String::from_utf8_lossy(&body.bytes).into_owned() })
}
