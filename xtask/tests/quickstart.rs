//! Runs `xtask quickstart` with the programs that were built for the tests.

use std::{
    collections::HashMap,
    fs,
    io::{BufRead as _, BufReader},
    net::TcpStream,
    path::Path,
    process::{Child, Command, Output, Stdio},
    sync::mpsc::{Receiver, channel},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use testkit::{
    kubernetes::{Access, Kubernetes},
    process::{SOON, program},
};
use tokio::time::Instant;

/// Returns the command, with `temporary` as its folder for temporary files.
fn quickstart(temporary: &Path, arguments: &[&str]) -> Result<Command> {
    for name in ["kas", "agentk", "kasctl", "testkit"] {
        program(name)?;
    }
    let mut command = Command::new(env!("CARGO_BIN_EXE_xtask"));
    command.args(["quickstart", "--no-build"]).args(arguments).env("TMPDIR", temporary).stdin(Stdio::null());
    Ok(command)
}

fn stdout(output: &Output) -> Result<String> {
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(output.status.success(), "{stdout}\n{}", String::from_utf8_lossy(&output.stderr));
    Ok(stdout)
}

fn is_empty(folder: &TempDir) -> Result<bool> {
    Ok(fs::read_dir(folder.path())?.next().is_none())
}

#[test]
fn the_demo_is_plain_text_and_says_that_it_is_no_cluster() -> Result<()> {
    let temporary = tempfile::tempdir()?;
    let shown = stdout(&quickstart(temporary.path(), &["--once"])?.output()?)?;
    for expected in [
        "This is a demo, not a cluster",
        "1 (shop), 2 (garden), 3 (library), of project 1",
        "quickstart/pod-1b    3",
        "quickstart/pod-3     2",
        "kasctl pods 3",
        "NAMESPACE   NAME",
        "library     catalog-1",
        "started through a tunnel of replica 2",
        "SIGKILL sent to replica 2",
        "replica 1 no longer routes requests to it",
        "replica 3 no longer routes requests to it",
        "the open watch failed",
        "replica 1 lists agent 3 again, at replica 3",
        "agent 3 answered a request",
        "the other replicas agree by gossip: replica 2 is gone",
        "no gap     for agents 1 and 2: every request was answered",
        "knows all  replica 1 after",
    ] {
        assert!(shown.contains(expected), "{expected:?} is not in:\n{shown}");
    }
    assert!(!shown.contains("problem"), "{shown}");
    assert!(!shown.contains(['\u{1b}', '\r']), "{shown}");
    // Only lines with a path may be longer.
    for line in shown.lines().filter(|line| !line.contains(" /")) {
        assert!(line.chars().count() <= 80, "{line:?} is too wide");
    }
    assert!(is_empty(&temporary)?, "the folder is removed");
    Ok(())
}

#[test]
fn with_redis_the_output_is_the_same_and_redis_is_stopped() -> Result<()> {
    let temporary = tempfile::tempdir()?;
    let shown = stdout(&quickstart(temporary.path(), &["--once", "--tracker", "redis"])?.output()?)?;
    for expected in [
        "Start a Redis for the replicas",
        "redis.sock",
        "each is configured with the same Redis, and finds the others there",
        "SIGKILL sent to replica 2",
        "replica 1 no longer routes requests to it",
        "agent 3 answered a request",
        "its key in Redis has expired: replica 2 is gone",
        "no gap     for agents 1 and 2: every request was answered",
        "knows all  replica 1 after",
        "Redis      stopped",
    ] {
        assert!(shown.contains(expected), "{expected:?} is not in:\n{shown}");
    }
    assert!(!shown.contains("problem") && !shown.contains("gossip"), "{shown}");
    assert!(is_empty(&temporary)?, "the folder is removed");
    Ok(())
}

#[test]
fn a_missing_redis_server_is_reported_in_one_line() -> Result<()> {
    let temporary = tempfile::tempdir()?;
    let output = quickstart(temporary.path(), &["--once", "--tracker", "redis"])?
        .env("PATH", temporary.path())
        .output()?;
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    assert!(error.contains("--tracker redis needs redis-server or valkey-server"), "{error}");
    assert!(error.contains("apt-get install redis-server") && error.trim().lines().count() == 1, "{error}");
    assert!(is_empty(&temporary)?);
    Ok(())
}

#[test]
fn a_missing_api_server_is_reported_in_one_line() -> Result<()> {
    for show in ["--fleet", "--gitops"] {
        let temporary = tempfile::tempdir()?;
        let output = quickstart(temporary.path(), &[show, "--once"])?
            .env("PATH", temporary.path())
            .env_remove("KUBEBUILDER_ASSETS")
            .output()?;
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{error}");
        assert!(error.contains("there is no kube-apiserver: install Go"), "{show}: {error}");
        assert_eq!(error.trim().lines().count(), 1, "{show}: {error}");
        assert!(is_empty(&temporary)?);
    }
    Ok(())
}

#[test]
fn a_fleet_has_a_live_view_answers_to_promql_and_gets_its_webhooks() -> Result<()> {
    let temporary = tempfile::tempdir()?;
    let shown = stdout(&quickstart(temporary.path(), &["--fleet", "--once"])?.output()?)?;
    for expected in [
        "team-01 to team-20, ids 1 to 20",
        "20 rows of 20 agents",
        "403: agent 7 may not see the namespace of agent 8",
        "team-03   visitor-a",
        "team-18   visitor-c",
        "kasctl promql all 'sum(rate(kas_kubernetes_requests_total[5m]))'",
        "the first is the sum of the twenty values",
        "kas-mailbox-copies: 2",
        "to the Service team-07/receiver, attempt 1",
        "the ConfigMap team-07/app, example.com/webhook",
        "nothing waits, and there is no dead letter",
        "20 stopped",
    ] {
        assert!(shown.contains(expected), "{expected:?} is not in:\n{shown}");
    }
    assert!(!shown.contains("problem"), "{shown}");
    assert!(!shown.contains("killed: it did not exit in time"), "{shown}");
    assert!(!shown.contains(['\u{1b}', '\r']), "{shown}");
    assert!(is_empty(&temporary)?, "the folder is removed");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn with_a_kubeconfig_the_pods_of_a_real_api_server_are_listed() -> Result<()> {
    let kubernetes = Kubernetes::start().await?;
    kubernetes.create_pods("shop", "till", 3).await?;
    let token = kubernetes.service_account("shop", "agentk", Access::Admin).await?;
    let kubeconfig = kubernetes.kubeconfig_with_token("agentk", &token)?;
    let kubeconfig = kubeconfig.to_str().context("not UTF-8")?.to_owned();
    let temporary = tempfile::tempdir()?;
    let mut command = quickstart(temporary.path(), &["--once", "--kubeconfig", &kubeconfig])?;
    let shown = stdout(&tokio::task::spawn_blocking(move || command.output()).await??)?;
    for n in 0..3 {
        assert!(shown.contains(&format!("shop        till-{n:05}\n")), "{shown}");
    }
    assert!(!shown.contains("demo, not a cluster"), "{shown}");
    Ok(())
}

#[test]
fn a_missing_kubeconfig_is_reported_before_anything_is_started() -> Result<()> {
    let temporary = tempfile::tempdir()?;
    let output = quickstart(temporary.path(), &["--kubeconfig", "nowhere"])?.output()?;
    assert_eq!(output.status.code(), Some(1));
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(error.contains("nowhere: there is no such file"), "{error}");
    assert!(error.contains("kubectl config view --minify"), "{error}");
    Ok(())
}

/// A quickstart that keeps running.
struct Running {
    child: Child,
    rest: Receiver<String>,
    exports: HashMap<String, String>,
    /// The address of each replica's metrics.
    metrics: Vec<String>,
    /// The process ids in the suggested kill commands.
    pids: Vec<i32>,
    temporary: TempDir,
}

impl Running {
    fn start() -> Result<Self> {
        let temporary = tempfile::tempdir()?;
        let mut child = quickstart(temporary.path(), &[])?.stdout(Stdio::piped()).spawn()?;
        let stdout = BufReader::new(child.stdout.take().context("no standard output")?);
        let (lines, rest) = channel();
        thread::spawn(move || stdout.lines().map_while(Result::ok).try_for_each(|line| lines.send(line)));
        let mut running =
            Self { child, rest, exports: HashMap::new(), metrics: Vec::new(), pids: Vec::new(), temporary };
        // The last of the suggested commands.
        running.wait_for("tail -f")?;
        assert_eq!(running.metrics.len(), 3);
        Ok(running)
    }

    fn wait_for(&mut self, text: &str) -> Result<()> {
        while !self.next()?.contains(text) {}
        Ok(())
    }

    fn next(&mut self) -> Result<String> {
        let line = self.rest.recv_timeout(3 * SOON).context("the quickstart prints nothing more")?;
        if let Some((name, value)) = line.trim().strip_prefix("export ").and_then(|rest| rest.split_once('='))
        {
            self.exports.insert(name.to_owned(), value.to_owned());
        }
        if line.contains(" grpc://") {
            let metrics = line.split_whitespace().find_map(|word| word.strip_prefix("http://"));
            self.metrics.extend(metrics.map(str::to_owned));
        }
        if let Some(command) = line.trim().strip_prefix("kill -9 ") {
            self.pids.push(command.split(' ').next().context("no process")?.parse()?);
        }
        Ok(line)
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        let pid = Pid::from_raw(self.child.id().try_into()?).context("no id")?;
        Ok(kill_process(pid, signal)?)
    }

    fn wait_until_kas_is_gone(&self) -> Result<()> {
        let deadline = Instant::now() + SOON;
        while self.metrics.iter().any(|address| TcpStream::connect(address).is_ok()) {
            ensure!(Instant::now() < deadline, "kas still listens");
            thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }
}

#[test]
fn the_suggested_commands_work_until_it_is_interrupted() -> Result<()> {
    let mut running = Running::start()?;
    let exports = running.exports.clone();
    let kasctl = |arguments: &[&str]| -> Result<String> {
        let mut command = Command::new(program("kasctl")?);
        for name in ["KASCTL_ADDRESS", "KASCTL_SECRET_FILE"] {
            command.env(name, exports.get(name).with_context(|| format!("no {name}"))?);
        }
        stdout(&command.args(arguments).output()?)
    };
    assert!(kasctl(&["agents"])?.contains("quickstart/pod-1a"));
    assert!(kasctl(&["why", "3"])?.contains("agent 3 is held by"));
    // A replica that was slow for a moment may be listed as suspect briefly.
    let deadline = Instant::now() + SOON;
    loop {
        let replicas = kasctl(&["replicas"])?;
        if replicas.lines().filter(|line| line.contains(" ready ")).count() == 3 {
            break;
        }
        ensure!(Instant::now() < deadline, "not all are ready:\n{replicas}");
        thread::sleep(Duration::from_millis(100));
    }
    assert!(kasctl(&["request", "--explain", "3", "GET", "/version"])?.contains("gitVersion"));

    let holder = running.pids.first().context("nothing to kill")?;
    kill_process(Pid::from_raw(*holder).context("no process")?, Signal::KILL)?;
    running.wait_for("kas 3 exited unexpectedly (signal 9)")?;
    running.wait_for("agent 3 answers through replica 1")?;
    running.wait_for("kas 3 is ready again")?;
    assert!(kasctl(&["request", "2", "GET", "/version"])?.contains("gitVersion"));

    running.signal(Signal::INT)?;
    let status = running.child.wait()?;
    assert!(status.success(), "{status}");
    let rest: Vec<String> = running.rest.iter().collect();
    let at = |name: &str| rest.iter().position(|line| line.trim_start().starts_with(name));
    assert!(at("kas ").is_some() && at("kas ") < at("agentk "), "{rest:?}");
    assert!(at("folder ").is_some(), "{rest:?}");
    assert!(is_empty(&running.temporary)?, "the folder is removed");
    running.wait_until_kas_is_gone()
}

#[cfg(target_os = "linux")]
#[test]
fn its_processes_are_killed_with_it() -> Result<()> {
    let mut running = Running::start()?;
    running.signal(Signal::KILL)?;
    running.child.wait()?;
    running.wait_until_kas_is_gone()
}
