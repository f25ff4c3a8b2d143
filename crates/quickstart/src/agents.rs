//! The agents: their identities, processes and connections, and the API that they serve.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use tokio::{
    io::{AsyncBufReadExt as _, BufReader, Lines},
    process::{Child, ChildStdout, Command},
    time::{Instant, timeout, timeout_at},
};

use devkit::workspace::Programs;

use super::{
    READY_WITHIN,
    balancer::Balancer,
    kasctl::{Agent, Event, Kasctl, output},
    kubectl,
    replicas::{Replica, ReplicaSetup},
    service::{Service, child_command},
};

/// Id and name of each agent. All belong to one project.
pub(super) const AGENTS: [(&str, &str); 3] = [("1", "shop"), ("2", "garden"), ("3", "library")];
pub(super) const PROJECT: &str = "1";
/// The namespace that agentk reports. It runs outside of Kubernetes here.
pub(super) const NAMESPACE: &str = "quickstart";

/// A process of agentk.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pod {
    /// Its index in [`AGENTS`].
    agent: usize,
    /// The pod name that it reports.
    pub(super) name: &'static str,
    /// Its name in errors.
    service: &'static str,
    /// Its connections go to the first of these replicas that answers.
    replicas: [usize; 3],
}

/// Agent 1 is connected to two replicas, agent 3 only to the one that will be killed.
pub(super) const PODS: [Pod; 4] = [
    Pod { agent: 0, name: "pod-1a", service: "agentk of pod-1a", replicas: [0, 2, 1] },
    Pod { agent: 0, name: "pod-1b", service: "agentk of pod-1b", replicas: [2, 0, 1] },
    Pod { agent: 1, name: "pod-2", service: "agentk of pod-2", replicas: [2, 0, 1] },
    Pod { agent: 2, name: "pod-3", service: "agentk of pod-3", replicas: [1, 2, 0] },
];

/// The Kubernetes API that the agents serve.
#[derive(Debug)]
pub(super) enum Cluster {
    /// The simulated API at this URL.
    Demo(String),
    /// The cluster of a kubeconfig, and the context if one was given.
    Kubeconfig(PathBuf, Option<String>),
}

/// Starts the simulated API and returns its URL.
pub(super) async fn start_demo(
    programs: &Programs,
    dir: &Path,
    slot: &mut Option<Service>,
) -> Result<String> {
    let mut command = child_command(programs.path("testkit")?);
    command.arg("demo-api");
    let (url, _) =
        Service::start_ready("demo API", command, dir.join("demo-api.log"), READY_WITHIN, slot).await?;
    Ok(url)
}

fn token_file(dir: &Path, id: &str) -> PathBuf {
    dir.join(format!("agent-{id}.token"))
}

/// Creates a token for each agent, given by id and name, the file that lists the agents for kas, and a user
/// of its endpoint for kubectl, with its certificate. Returns how kasctl is called.
pub(super) async fn register<S: AsRef<str>>(
    programs: &Programs,
    setup: &ReplicaSetup,
    dir: &Path,
    agents: impl IntoIterator<Item = (S, S)>,
) -> Result<Kasctl> {
    let kasctl = Kasctl::new(programs.path("kasctl")?, &setup.api_secret(), 0);
    for (id, name) in agents {
        let (id, name) = (id.as_ref(), name.as_ref());
        let mut command = kasctl.bare();
        command
            .args(["token", "agent", "--id", id, "--name", name, "--project", PROJECT])
            .arg("--agents-file")
            .arg(dir.join("agents.yaml"))
            .arg("--token-file")
            .arg(token_file(dir, id));
        output(command).await.with_context(|| format!("cannot create a token for agent {id}"))?;
    }
    kubectl::make_certificates(programs, dir).await?;
    kubectl::make_user(&kasctl, dir).await?;
    Ok(kasctl)
}

/// Returns a command that runs agentk in a pod of this namespace and name, as it reports, with the token of
/// the agent `id`. It connects to `kas`, a list of addresses.
pub(super) fn agentk(program: &Path, kas: &str, dir: &Path, id: &str, pod: (&str, &str)) -> Command {
    let mut command = child_command(program);
    command
        .args(["--kas-address", kas])
        .arg("--token-file")
        .arg(token_file(dir, id))
        .args(["--observability-address", "127.0.0.1:0", "--log-format", "text"])
        .env("POD_NAMESPACE", pod.0)
        .env("POD_NAME", pod.1);
    command
}

/// Returns the addresses of these replicas, for an agentk that connects to two of them.
pub(super) fn addresses(replicas: &[Replica]) -> String {
    let all = replicas.iter().map(|replica| format!("grpc://127.0.0.1:{}", replica.ports.agent));
    all.collect::<Vec<_>>().join(",")
}

/// Starts all agentk processes.
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
        let (kas, id) = (format!("grpc://127.0.0.1:{port}"), AGENTS[pod.agent].0);
        let mut command = agentk(programs.path("agentk")?, &kas, dir, id, (NAMESPACE, pod.name));
        // One connection instead of two, so that the loss of a replica has a visible effect.
        command.args(["--replicas", "1"]);
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

/// `kasctl agents --watch`: connections and disconnections of agents, as one replica learns of them.
#[derive(Debug)]
pub(super) struct Watch {
    /// Killed when this is dropped.
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Watch {
    /// Starts the watch, and skips the agents that are connected already.
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
            .with_context(|| format!("kasctl agents --watch printed nothing for {READY_WITHIN:?}"))??;
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

/// Waits until every pod is connected, or for [`READY_WITHIN`]. Returns the agent of each connected pod, and
/// how long the connection took.
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
