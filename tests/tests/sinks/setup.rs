//! Replicas with sinks, an agentk, an API server, a Redis, and a receiver of webhooks.

use std::{
    collections::BTreeSet,
    net::SocketAddr,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU16, Ordering},
    },
};

use anyhow::{Context as _, Result};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tempfile::TempDir;
use testkit::{
    agentk::Agentk,
    http1::{self, Head},
    kas::{eventually, token},
    kubernetes::Kubernetes,
    mesh::{Mesh, Options},
};
use tokio::{
    io::{AsyncWriteExt as _, BufReader},
    net::{TcpListener, TcpStream},
    task::AbortHandle,
};

pub(crate) const AGENT: i64 = 1;
/// The manifest project of the agent.
pub(crate) const PROJECT: &str = "group/manifests";

/// A server that webhooks are sent to.
pub(crate) struct Receiver {
    pub(crate) address: SocketAddr,
    received: Arc<Mutex<Vec<(Head, Value)>>>,
    status: Arc<AtomicU16>,
    task: AbortHandle,
}

impl Drop for Receiver {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Receiver {
    pub(crate) async fn start() -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let (received, status) = (Arc::new(Mutex::default()), Arc::new(AtomicU16::new(204)));
        let (all, answer) = (Arc::clone(&received), Arc::clone(&status));
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serve(stream, Arc::clone(&all), Arc::clone(&answer)));
            }
        });
        Ok(Self { address, received, status, task: task.abort_handle() })
    }

    /// Sets the status that it answers.
    pub(crate) fn answer(&self, status: u16) {
        self.status.store(status, Ordering::Relaxed);
    }

    /// Returns what it has taken.
    pub(crate) fn taken(&self) -> Vec<(Head, Value)> {
        self.received.lock().clone()
    }

    /// Returns the types of what it has taken at a path.
    pub(crate) fn types_at(&self, path: &str) -> BTreeSet<String> {
        let taken = self.received.lock();
        let here = taken.iter().filter(|(head, _)| head.line == format!("POST {path} HTTP/1.1"));
        here.filter_map(|(_, event)| event["type"].as_str().map(str::to_owned)).collect()
    }

    /// Returns the data of what it has taken of a type.
    pub(crate) fn of(&self, kind: &str) -> Vec<Value> {
        let taken = self.received.lock();
        taken.iter().filter(|(_, event)| event["type"] == kind).map(|(_, event)| event.clone()).collect()
    }

    /// Waits until it has taken something that is right, and returns that.
    pub(crate) async fn got(&self, what: &str, is_right: impl Fn(&Value) -> bool) -> Result<Value> {
        eventually(what, async || {
            let taken = self.taken();
            let found = taken.iter().map(|(_, event)| event).find(|event| is_right(event)).cloned();
            Ok(found.ok_or_else(|| taken.iter().map(|(_, event)| event["type"].clone()).collect::<Vec<_>>()))
        })
        .await
    }
}

async fn serve(
    stream: TcpStream,
    received: Arc<Mutex<Vec<(Head, Value)>>>,
    status: Arc<AtomicU16>,
) -> Result<()> {
    let mut stream = BufReader::new(stream);
    while let Some(head) = http1::read_head(&mut stream).await? {
        let body = http1::read_body(&mut stream, head.framing_of_request()?).await;
        let status = status.load(Ordering::Relaxed);
        if status / 100 == 2 {
            received.lock().push((head, serde_json::from_slice(&body.bytes)?));
        }
        let answer = format!("HTTP/1.1 {status} X\r\nContent-Length: 0\r\n\r\n");
        stream.get_mut().write_all(answer.as_bytes()).await?;
    }
    Ok(())
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
    /// Starts replicas with the sinks that `targets` returns for the address of the receiver, and an agentk
    /// that is connected to the first two of them.
    pub(crate) async fn start(
        replicas: usize,
        more: Value,
        targets: impl Fn(SocketAddr) -> Value,
    ) -> Result<Self> {
        let dir = TempDir::with_prefix("sinks-test-")?;
        let root = dir.path();
        std::fs::create_dir_all(root.join("config/agents/agent-1"))?;
        let config =
            format!("gitops:\n  manifest_projects:\n  - id: {PROJECT}\n    default_namespace: default\n");
        std::fs::write(root.join("config/agents/agent-1/config.yaml"), config)?;
        std::fs::write(root.join("config/agents/agent-1/kas.yaml"), "labels: {env: test}\n")?;
        std::fs::create_dir_all(root.join("manifests"))?;
        let receiver = Receiver::start().await?;
        let mut config = json!({
            "tracker": "gossip",
            "agent": {
                "configuration": { "folder": root.join("config"), "poll_period": "1s" },
                "gitops": { "poll_period": "1s" },
            },
            "repositories": [{ "name": PROJECT, "id": 42, "folder": root.join("manifests"), "agents": "all" }],
            "sinks": { "allow": ["127.0.0.1"], "targets": targets(receiver.address) },
        });
        testkit::kas::merge(&mut config, more);
        let options = Options { replicas, agents: 2, config, ..Options::default() };
        let (kubernetes, mesh) = tokio::try_join!(Kubernetes::start(), Mesh::start_with(options))?;
        let mut it = Self { mesh, agentk: None, kubernetes, receiver, dir };
        it.connect().await?;
        Ok(it)
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

    /// Returns a file of the manifest project.
    pub(crate) fn manifest(&self, name: &str) -> PathBuf {
        self.dir.path().join("manifests").join(name)
    }

    /// Creates events in the cluster, with these numbers.
    pub(crate) async fn happen(&self, numbers: impl IntoIterator<Item = usize>) -> Result<()> {
        let events: Vec<Value> = numbers.into_iter().map(event).collect();
        let list = json!({ "apiVersion": "v1", "kind": "List", "items": events });
        self.kubernetes.apply(&list.to_string()).await?;
        Ok(())
    }

    /// Returns a metric of a replica.
    pub(crate) async fn metric(&self, n: usize, name: &str) -> Result<f64> {
        testkit::kas::metric(self.mesh.observability(n), name).await
    }

    /// Waits until a metric of a replica is at least this.
    pub(crate) async fn metric_is_at_least(&self, n: usize, name: &str, value: f64) -> Result<()> {
        testkit::kas::metric_is_at_least(self.mesh.observability(n), name, value).await
    }
}

fn event(number: usize) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": { "namespace": "default", "name": format!("e-{number}") },
        "involvedObject": { "kind": "Pod", "namespace": "default", "name": "web-1" },
        "reason": "Tested",
        "message": format!("number {number}"),
        "type": "Normal",
    })
}

/// Returns the name of the event that an item is about.
pub(crate) fn name(item: &Value) -> String {
    item["data"]["metadata"]["name"].as_str().unwrap_or_default().to_owned()
}
