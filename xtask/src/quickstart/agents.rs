//! The agents: their identities, what they serve, their processes, and where they are connected.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use tokio::{
    io::{AsyncBufReadExt as _, BufReader, Lines},
    process::{Child, ChildStdout},
    time::{Instant, timeout, timeout_at},
};

use super::{
    READY_WITHIN,
    balancer::Balancer,
    kasctl::{Agent, Event, Kasctl, output},
    replicas::Replica,
};
use crate::{
    process::{Service, tied},
    workspace::Programs,
};

/// Id and name of the agents. All are of one project.
pub(super) const AGENTS: [(&str, &str); 3] = [("1", "shop"), ("2", "garden"), ("3", "library")];
pub(super) const PROJECT: &str = "1";
/// What agentk says about its namespace, since it runs in none.
const NAMESPACE: &str = "quickstart";

/// A process of an agent.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pod {
    /// Its place in [`AGENTS`].
    agent: usize,
    /// What it says about its pod.
    pub(super) name: &'static str,
    /// How it is called in errors.
    service: &'static str,
    /// Where its connections go: the first of these replicas that answers.
    replicas: [usize; 3],
}

/// Agent 1 is on two replicas, agent 3 only on the one that is going to be killed.
pub(super) const PODS: [Pod; 4] = [
    Pod { agent: 0, name: "pod-1a", service: "agentk of pod-1a", replicas: [0, 2, 1] },
    Pod { agent: 0, name: "pod-1b", service: "agentk of pod-1b", replicas: [2, 0, 1] },
    Pod { agent: 1, name: "pod-2", service: "agentk of pod-2", replicas: [2, 0, 1] },
    Pod { agent: 2, name: "pod-3", service: "agentk of pod-3", replicas: [1, 2, 0] },
];

/// What the agents serve.
#[derive(Debug)]
pub(super) enum Cluster {
    /// The demo, by its URL.
    Demo(String),
    /// A real one: the file and perhaps a context.
    Kubeconfig(PathBuf, Option<String>),
}

/// Starts the made-up API and returns its URL.
pub(super) async fn start_demo(
    programs: &Programs,
    dir: &Path,
    slot: &mut Option<Service>,
) -> Result<String> {
    let mut command = tied(programs.path("xtask")?);
    // The pipe stays open as long as this process lives: see `demo_api`.
    command.arg("demo-api").stdin(Stdio::piped());
    let (service, stdout) = Service::start_with_output("demo API", command, dir.join("demo-api.log"))?;
    let service = slot.insert(service);
    let mut url = String::new();
    let mut stdout = BufReader::new(stdout);
    match timeout(READY_WITHIN, stdout.read_line(&mut url)).await {
        Err(_) => Err(service.explain(&format!("is not ready after {READY_WITHIN:?}"))),
        Ok(Ok(length)) if length > 0 => Ok(url.trim().to_owned()),
        Ok(_) => Err(service.ended().await),
    }
}

fn token_file(dir: &Path, id: &str) -> PathBuf {
    dir.join(format!("agent-{id}.token"))
}

/// Makes a token for each agent, and the file that makes them known to kas.
pub(super) async fn make_identities(kasctl: &Kasctl, dir: &Path) -> Result<()> {
    for (id, name) in AGENTS {
        let mut command = kasctl.bare();
        command
            .args(["token", "agent", "--id", id, "--name", name, "--project", PROJECT])
            .arg("--agents-file")
            .arg(dir.join("agents.yaml"))
            .arg("--token-file")
            .arg(token_file(dir, id));
        output(command).await.with_context(|| format!("cannot make a token for agent {id}"))?;
    }
    Ok(())
}

/// Starts every agentk.
pub(super) async fn start(
    programs: &Programs,
    dir: &Path,
    cluster: &Cluster,
    replicas: &[Replica],
    balancer: &mut Balancer,
    agents: &mut Vec<Service>,
) -> Result<()> {
    for pod in PODS {
        let order = pod.replicas.iter().map(|index| replicas[*index].ports.agent).collect();
        let port = balancer.open(order).await?;
        let mut command = tied(programs.path("agentk")?);
        command
            .arg("--kas-address")
            .arg(format!("grpc://127.0.0.1:{port}"))
            .arg("--token-file")
            .arg(token_file(dir, AGENTS[pod.agent].0))
            // One connection, not two: what is lost is to be seen.
            .args(["--replicas", "1"])
            .args(["--observability-address", "127.0.0.1:0", "--log-format", "text"])
            .env("POD_NAMESPACE", NAMESPACE)
            .env("POD_NAME", pod.name);
        match cluster {
            Cluster::Demo(url) => {
                command.arg("--kube-server").arg(url).env_remove("KUBECONFIG");
            }
            Cluster::Kubeconfig(file, context) => {
                command.arg("--kubeconfig").arg(file);
                command.args(context.iter().flat_map(|name| ["--context", name]));
            }
        }
        let log = dir.join(format!("agentk-{}.log", pod.name));
        agents.push(Service::start(pod.service, command, log)?);
    }
    Ok(())
}

/// `kasctl agents --watch`: every change of who is connected, as one replica learns of it.
#[derive(Debug)]
pub(super) struct Watch {
    /// Ends when this is dropped.
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Watch {
    /// Begins behind what is connected already.
    pub(super) async fn begin(kasctl: &Kasctl) -> Result<Self> {
        let mut child =
            kasctl.call(&["agents", "--watch", "-o", "json"]).spawn().context("cannot run kasctl")?;
        let lines = BufReader::new(child.stdout.take().context("kasctl has no standard output")?).lines();
        let mut watch = Self { child, lines };
        let complete = async {
            while !matches!(watch.next().await?, Event::SnapshotComplete {}) {}
            anyhow::Ok(())
        };
        timeout(READY_WITHIN, complete)
            .await
            .with_context(|| format!("kasctl agents --watch said nothing for {READY_WITHIN:?}"))??;
        Ok(watch)
    }

    async fn next(&mut self) -> Result<Event> {
        match self.lines.next_line().await? {
            Some(line) => serde_json::from_str(&line).context("kasctl printed no event"),
            None => {
                let mut said = String::new();
                if let Some(stderr) = self.child.stderr.take() {
                    said = BufReader::new(stderr).lines().next_line().await?.unwrap_or_default();
                }
                bail!("kasctl agents --watch ended: {said}")
            }
        }
    }

    /// Waits for the next connection.
    pub(super) async fn connected(&mut self) -> Result<Agent> {
        loop {
            if let Event::Connected { agent } = self.next().await? {
                return Ok(agent);
            }
        }
    }
}

/// Waits until every pod is connected; returns to which replica, and how long that took. Those that are not within
/// [`READY_WITHIN`] are missing.
pub(super) async fn connected(
    watch: &mut Watch,
    began: Instant,
) -> Result<HashMap<String, (Agent, Duration)>> {
    let mut seen = HashMap::new();
    while seen.len() < PODS.len() {
        let Ok(agent) = timeout_at(began + READY_WITHIN, watch.connected()).await else { break };
        let agent = agent?;
        seen.entry(agent.pod_name.clone()).or_insert((agent, began.elapsed()));
    }
    Ok(seen)
}
