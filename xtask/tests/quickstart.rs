//! The quickstart as a person runs it, with the programs that the tests were built with.

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

/// Returns the quickstart, which keeps its files in `temporary`.
fn quickstart(temporary: &Path, arguments: &[&str]) -> Result<Command> {
    for name in ["kas", "agentk", "kasctl"] {
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
fn the_demo_is_shown_in_plain_text_and_says_that_it_is_one() -> Result<()> {
    let temporary = tempfile::tempdir()?;
    let shown = stdout(&quickstart(temporary.path(), &["--once"])?.output()?)?;
    for expected in [
        "This is a demo, not a cluster",
        "1 (demo), project 1",
        "quickstart/agentk",
        "idle: streams that agentk opened",
        "kasctl pods 1",
        "NAMESPACE   NAME",
        "library     catalog-1",
    ] {
        assert!(shown.contains(expected), "{expected:?} is not in:\n{shown}");
    }
    assert!(!shown.contains(['\u{1b}', '\r']), "{shown}");
    assert!(is_empty(&temporary)?, "the folder is removed");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kubeconfig_shows_the_pods_of_a_real_api_server() -> Result<()> {
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
fn a_kubeconfig_that_is_not_there_is_told_before_anything_is_started() -> Result<()> {
    let temporary = tempfile::tempdir()?;
    let output = quickstart(temporary.path(), &["--kubeconfig", "nowhere"])?.output()?;
    assert_eq!(output.status.code(), Some(1));
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(error.contains("nowhere: there is no such file"), "{error}");
    assert!(error.contains("kubectl config view --minify"), "{error}");
    Ok(())
}

/// A quickstart that stays up.
struct Standing {
    child: Child,
    rest: Receiver<String>,
    exports: HashMap<String, String>,
    metrics: String,
    temporary: TempDir,
}

impl Standing {
    fn start() -> Result<Self> {
        let temporary = tempfile::tempdir()?;
        let mut child = quickstart(temporary.path(), &[])?.stdout(Stdio::piped()).spawn()?;
        let stdout = BufReader::new(child.stdout.take().context("no standard output")?);
        let (lines, rest) = channel();
        thread::spawn(move || stdout.lines().map_while(Result::ok).try_for_each(|line| lines.send(line)));
        let mut standing = Self { child, rest, exports: HashMap::new(), metrics: String::new(), temporary };
        // The last of what is printed.
        while !standing.next()?.contains("tail -f") {}
        Ok(standing)
    }

    fn next(&mut self) -> Result<String> {
        let line = self.rest.recv_timeout(3 * SOON).context("the quickstart says no more")?;
        if let Some((name, value)) = line.trim().strip_prefix("export ").and_then(|rest| rest.split_once('='))
        {
            self.exports.insert(name.to_owned(), value.to_owned());
        }
        if let Some(address) =
            line.trim().strip_prefix("metrics    http://").and_then(|url| url.split('/').next())
        {
            self.metrics = address.to_owned();
        }
        Ok(line)
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        let pid = Pid::from_raw(self.child.id().try_into()?).context("no id")?;
        Ok(kill_process(pid, signal)?)
    }

    fn wait_until_kas_is_gone(&self) -> Result<()> {
        let deadline = Instant::now() + SOON;
        while TcpStream::connect(&self.metrics).is_ok() {
            ensure!(Instant::now() < deadline, "kas still listens");
            thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }
}

#[test]
fn what_it_prints_to_try_next_works_until_it_is_interrupted() -> Result<()> {
    let mut standing = Standing::start()?;
    let kasctl = |arguments: &[&str]| -> Result<String> {
        let mut command = Command::new(program("kasctl")?);
        for name in ["KASCTL_ADDRESS", "KASCTL_SECRET_FILE"] {
            command.env(name, standing.exports.get(name).with_context(|| format!("no {name}"))?);
        }
        stdout(&command.args(arguments).output()?)
    };
    assert!(kasctl(&["agents"])?.contains("quickstart/agentk"));
    assert!(kasctl(&["pods", "1"])?.contains("catalog-1"));
    assert!(kasctl(&["request", "1", "GET", "/version"])?.contains("gitVersion"));

    standing.signal(Signal::INT)?;
    let status = standing.child.wait()?;
    assert!(status.success(), "{status}");
    let rest: Vec<String> = standing.rest.iter().collect();
    let at = |name: &str| rest.iter().position(|line| line.trim_start().starts_with(name));
    assert!(at("agentk ").is_some() && at("agentk ") < at("kas "), "{rest:?}");
    assert!(at("folder ").is_some(), "{rest:?}");
    assert!(is_empty(&standing.temporary)?, "the folder is removed");
    standing.wait_until_kas_is_gone()
}

#[cfg(target_os = "linux")]
#[test]
fn its_processes_do_not_outlive_it_when_it_is_killed() -> Result<()> {
    let mut standing = Standing::start()?;
    standing.signal(Signal::KILL)?;
    standing.child.wait()?;
    standing.wait_until_kas_is_gone()
}
