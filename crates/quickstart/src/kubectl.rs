//! kubectl through the Kubernetes API endpoint of kas: a token, a kubeconfig, and the commands that are
//! shown.

use std::{
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use devkit::workspace::{Programs, find_program};
use serde_json::Value;
use tokio::{
    io::{AsyncBufReadExt as _, BufReader},
    net::TcpStream,
    process::Command,
    sync::watch,
    task::AbortHandle,
    time::{Instant, sleep, timeout},
};

use super::{
    ANSWER_WITHIN,
    kasctl::{Kasctl, output},
    service::child_command,
};

/// The name of the user of kas.
pub(super) const USER: &str = "demo";
/// The pause before a `kubectl get --watch` that has ended is run again.
const AGAIN: Duration = Duration::from_millis(100);

/// Writes the certificate that the replicas present to kubectl, which sends a token to a server with TLS
/// only.
pub(super) async fn make_certificates(programs: &Programs, dir: &Path) -> Result<()> {
    let mut command = child_command(programs.path("testkit")?);
    command.arg("certificates").arg(dir).stdout(Stdio::piped()).stderr(Stdio::piped());
    output(command).await.context("cannot make certificates")?;
    Ok(())
}

/// Creates the user, and the file that lists users for kas.
pub(super) async fn make_user(kasctl: &Kasctl, dir: &Path) -> Result<()> {
    let mut command = kasctl.bare();
    command
        .args(["token", "user", "--name", USER, "--users-file"])
        .arg(dir.join("users.yaml"))
        .arg("--token-file")
        .arg(token_file(dir));
    output(command).await.context("cannot create a token for kubectl")?;
    Ok(())
}

fn token_file(dir: &Path) -> PathBuf {
    dir.join("user.token")
}

/// kubectl, and the kubeconfig of the demonstration.
#[derive(Debug, Clone)]
pub(super) struct Kubectl {
    program: PathBuf,
    kubeconfig: PathBuf,
    /// Where kubectl keeps its caches.
    home: PathBuf,
}

/// Writes a kubeconfig with a context for each agent. `port` is that of kas for kubectl.
pub(super) async fn write_kubeconfig(kasctl: &Kasctl, dir: &Path, port: u16) -> Result<PathBuf> {
    let kubeconfig = dir.join("kubeconfig");
    let mut command = kasctl.bare();
    command
        .args(["kubeconfig", "--no-plugin", "--url", &format!("https://127.0.0.1:{port}/"), "--token-file"])
        .arg(token_file(dir))
        .arg("--ca-file")
        .arg(dir.join("ca.pem"))
        .arg("--kubeconfig")
        .arg(&kubeconfig);
    output(command).await.context("kasctl kubeconfig")?;
    Ok(kubeconfig)
}

impl Kubectl {
    /// Returns `None` if kubectl is not in `PATH`.
    pub(super) fn find(kubeconfig: &Path, dir: &Path) -> Option<Self> {
        let program = find_program("kubectl")?;
        Some(Self { program, kubeconfig: kubeconfig.to_owned(), home: dir.to_owned() })
    }

    /// Returns a command in the context of an agent.
    fn command(&self, context: &str, arguments: &[&str]) -> Command {
        let mut command = child_command(&self.program);
        command
            .arg("--kubeconfig")
            .arg(&self.kubeconfig)
            .args(["--context", context])
            .args(arguments)
            .env("HOME", &self.home)
            .env_remove("KUBECONFIG")
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    /// Runs a command to its end, and returns its standard output.
    ///
    /// # Errors
    /// If it fails: with what it said.
    pub(super) async fn run(&self, context: &str, arguments: &[&str]) -> Result<String> {
        let running = self.command(context, arguments).output();
        let what = arguments.first().copied().unwrap_or_default();
        let output = timeout(ANSWER_WITHIN, running)
            .await
            .with_context(|| format!("kubectl {what} did not end within {ANSWER_WITHIN:?}"))?
            .context("cannot run kubectl")?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "kubectl {what}: {}", said.trim());
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Returns a pod that runs, and its first TCP port if it declares one.
    pub(super) async fn running_pod(&self, context: &str) -> Result<Option<RunningPod>> {
        let arguments =
            ["get", "pods", "--all-namespaces", "--field-selector", "status.phase=Running", "-o", "json"];
        let list: Value = serde_json::from_str(&self.run(context, &arguments).await?)?;
        let pods = list["items"].as_array().map(Vec::as_slice).unwrap_or_default();
        let with_port = pods.iter().find(|pod| first_port(pod).is_some());
        Ok(with_port.or(pods.first()).and_then(|pod| {
            let text = |key: &str| Some(pod["metadata"][key].as_str()?.to_owned());
            Some(RunningPod { namespace: text("namespace")?, name: text("name")?, port: first_port(pod) })
        }))
    }

    /// Forwards a port of a pod, and connects to it once.
    pub(super) async fn forward(&self, context: &str, pod: &RunningPod, port: u16) -> Result<u16> {
        let arguments =
            ["port-forward", "-n", &pod.namespace, &format!("pod/{}", pod.name), &format!(":{port}")];
        let mut child = self.command(context, &arguments).spawn().context("cannot run kubectl")?;
        let stdout = child.stdout.take().context("kubectl has no standard output")?;
        let mut line = String::new();
        let read = timeout(ANSWER_WITHIN, BufReader::new(stdout).read_line(&mut line)).await;
        read.with_context(|| format!("kubectl port-forward said nothing for {ANSWER_WITHIN:?}"))??;
        let Some(local) = forwarded(&line) else {
            let output = child.wait_with_output().await.context("cannot wait for kubectl")?;
            bail!("kubectl port-forward: {}", String::from_utf8_lossy(&output.stderr).trim());
        };
        TcpStream::connect(("127.0.0.1", local)).await.context("the forwarded port does not answer")?;
        Ok(local)
    }

    /// Runs `kubectl get pods --watch`, and runs it again whenever it ends.
    pub(super) fn watch(&self, context: &str) -> Watching {
        let (sender, seen) = watch::channel(Seen::default());
        let (kubectl, context) = (self.clone(), context.to_owned());
        let task = tokio::spawn(async move {
            let arguments = ["get", "pods", "--all-namespaces", "--watch", "--no-headers"];
            loop {
                let end = watch_once(kubectl.command(&context, &arguments), &sender).await;
                let end = (Instant::now(), end.unwrap_or_else(|error| format!("{error:#}")));
                sender.send_modify(|seen| seen.ends.push(end));
                sleep(AGAIN).await;
            }
        });
        Watching { seen, task: task.abort_handle() }
    }
}

/// Runs a watch to its end. Returns how it ended.
async fn watch_once(mut command: Command, seen: &watch::Sender<Seen>) -> Result<String> {
    let mut child = command.stderr(Stdio::null()).spawn().context("cannot run kubectl")?;
    let stdout = child.stdout.take().context("kubectl has no standard output")?;
    let mut lines = BufReader::new(stdout).lines();
    while lines.next_line().await?.is_some() {
        let now = Instant::now();
        seen.send_modify(|seen| seen.newest = Some(now));
    }
    let status = child.wait().await.context("cannot wait for kubectl")?;
    Ok(match status.code() {
        Some(code) => format!("exit code {code}"),
        None => status.to_string(),
    })
}

/// A pod of the cluster.
#[derive(Debug)]
pub(super) struct RunningPod {
    pub(super) namespace: String,
    pub(super) name: String,
    pub(super) port: Option<u16>,
}

/// Returns the first TCP port that a pod declares.
fn first_port(pod: &Value) -> Option<u16> {
    let containers = pod["spec"]["containers"].as_array()?;
    let ports = containers.iter().filter_map(|container| container["ports"].as_array()).flatten();
    let mut tcp = ports.filter(|port| port["protocol"].as_str().is_none_or(|protocol| protocol == "TCP"));
    tcp.find_map(|port| u16::try_from(port["containerPort"].as_u64()?).ok())
}

/// Returns the local port that kubectl names: `Forwarding from 127.0.0.1:41085 -> 80`.
fn forwarded(line: &str) -> Option<u16> {
    let address = line.strip_prefix("Forwarding from ")?.split(' ').next()?;
    address.rsplit_once(':')?.1.parse().ok()
}

/// What a watch has shown.
#[derive(Debug, Clone, Default)]
struct Seen {
    /// When the newest line came.
    newest: Option<Instant>,
    /// When and how each run of kubectl has ended.
    ends: Vec<(Instant, String)>,
}

/// A watch that is run again whenever it ends, until this is dropped.
#[derive(Debug)]
pub(super) struct Watching {
    seen: watch::Receiver<Seen>,
    task: AbortHandle,
}

impl Drop for Watching {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Watching {
    /// Waits until it shows something that came after this instant. Returns when that was.
    pub(super) async fn shown_after(&self, instant: Instant) -> Result<Instant> {
        let mut seen = self.seen.clone();
        let is_later = |seen: &Seen| seen.newest.is_some_and(|newest| newest > instant);
        let seen = seen.wait_for(is_later).await.context("the watch is over")?;
        seen.newest.context("it was there")
    }

    /// Waits until a run of kubectl ends after this instant. Returns when and how.
    pub(super) async fn ended_after(&self, instant: Instant) -> Result<(Instant, String)> {
        let mut seen = self.seen.clone();
        let is_later = |(at, _): &&(Instant, String)| *at > instant;
        let seen = seen.wait_for(|seen| seen.ends.iter().any(|end| is_later(&end))).await;
        let seen = seen.context("the watch is over")?;
        seen.ends.iter().find(is_later).cloned().context("it was there")
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_first_tcp_port_of_a_pod_is_forwarded() {
        let pod = json!({ "spec": { "containers": [
            { "name": "a" },
            { "name": "b", "ports": [
                { "containerPort": 53, "protocol": "UDP" },
                { "containerPort": 8080, "protocol": "TCP" },
                { "containerPort": 9090 },
            ] },
        ] } });
        assert_eq!(first_port(&pod), Some(8080));
        assert_eq!(first_port(&json!({ "spec": { "containers": [] } })), None);
    }

    #[test]
    fn the_local_port_is_that_of_the_first_line() {
        assert_eq!(forwarded("Forwarding from 127.0.0.1:41085 -> 80\n"), Some(41085));
        assert_eq!(forwarded("error: no such pod"), None);
        assert_eq!(forwarded(""), None);
    }
}
