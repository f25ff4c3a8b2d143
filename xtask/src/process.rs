//! Child processes that log into a file, end in order, and do not outlive this process.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::{ExitStatus, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result, anyhow};
use rustix::process::{Pid, Signal, kill_process};
use tokio::{process::Command, time::timeout};

use crate::workspace::find_program;

/// How many lines of its log an error about a process repeats.
const LOG_LINES: usize = 15;

/// Returns a command that the kernel ends when this process is gone, however it went; only Linux has that.
///
/// The kernel watches the spawning *thread*: spawn from one that lasts, such as the main thread.
pub(crate) fn tied(program: &Path) -> Command {
    let mut command = match find_program("setpriv") {
        Some(setpriv) if cfg!(target_os = "linux") => {
            let mut command = Command::new(setpriv);
            command.args(["--pdeathsig", "KILL", "--"]).arg(program);
            command
        }
        _ => Command::new(program),
    };
    // What it logs is read in files and in errors: no colours there.
    command.env("NO_COLOR", "1");
    // A group of its own: Ctrl-C in a terminal reaches this process only, which then ends the others in order.
    command.process_group(0).stdin(Stdio::null()).kill_on_drop(true);
    command
}

/// A process that serves until it is told to end. Dropping it kills it.
#[derive(Debug)]
pub(crate) struct Service {
    name: &'static str,
    child: tokio::process::Child,
    /// Held until the process is gone: to wait for a process would otherwise end its standard input.
    _stdin: Option<tokio::process::ChildStdin>,
    log: PathBuf,
}

impl Service {
    /// Starts `command`, whose standard output and error go to `log`, which must not exist.
    pub(crate) fn start(name: &'static str, command: Command, log: PathBuf) -> Result<Self> {
        let file = File::create_new(&log).with_context(|| format!("cannot create {}", log.display()))?;
        let stdout = file.try_clone()?.into();
        Self::spawn(name, command, stdout, file, log)
    }

    /// Like [`Service::start`], and returns the process's standard output.
    pub(crate) fn start_with_output(
        name: &'static str,
        command: Command,
        log: PathBuf,
    ) -> Result<(Self, tokio::process::ChildStdout)> {
        let file = File::create_new(&log).with_context(|| format!("cannot create {}", log.display()))?;
        let mut service = Self::spawn(name, command, Stdio::piped(), file, log)?;
        let stdout = service.child.stdout.take().context("the process has no standard output")?;
        Ok((service, stdout))
    }

    fn spawn(
        name: &'static str,
        mut command: Command,
        stdout: Stdio,
        stderr: File,
        log: PathBuf,
    ) -> Result<Self> {
        let mut child =
            command.stdout(stdout).stderr(stderr).spawn().with_context(|| format!("cannot run {name}"))?;
        let stdin = child.stdin.take();
        Ok(Self { name, child, _stdin: stdin, log })
    }

    pub(crate) fn name(&self) -> &'static str {
        self.name
    }

    /// Returns the process's id while it runs.
    pub(crate) fn id(&self) -> Option<u32> {
        self.child.id()
    }

    /// Waits until the process ends by itself, which is always an error.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub(crate) async fn ended(&mut self) -> anyhow::Error {
        match self.child.wait().await {
            Ok(status) => self.explain(&format!("ended by itself ({})", how(status))),
            Err(error) => anyhow!(error).context(format!("cannot wait for {}", self.name)),
        }
    }

    /// Makes an error of what is wrong, with the end of the log.
    pub(crate) fn explain(&self, what: &str) -> anyhow::Error {
        let log = self.log();
        let lines: Vec<&str> = log.lines().collect();
        let last = &lines[lines.len().saturating_sub(LOG_LINES)..];
        if last.is_empty() {
            anyhow!("{} {what}, and its log is empty", self.name)
        } else {
            anyhow!("{} {what}; the end of its log:\n  {}", self.name, last.join("\n  "))
        }
    }

    /// Returns what the process logged so far.
    pub(crate) fn log(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.log).unwrap_or_default()).into_owned()
    }

    /// Asks the process to end, and kills it when it has not by `patience`. Returns what to tell about it.
    pub(crate) async fn stop(mut self, patience: Duration) -> Result<&'static str> {
        let Some(pid) = self.child.id().and_then(|id| Pid::from_raw(id.try_into().ok()?)) else {
            return Ok("was gone");
        };
        // Not waited for yet, so that the id is still its own, also when the process has ended.
        let _ = kill_process(pid, Signal::TERM);
        match timeout(patience, self.child.wait()).await {
            Ok(status) => {
                status.with_context(|| format!("cannot wait for {}", self.name))?;
                Ok("ended")
            }
            Err(_) => {
                self.child.kill().await.with_context(|| format!("cannot kill {}", self.name))?;
                Ok("killed: it did not end in time")
            }
        }
    }
}

fn how(status: ExitStatus) -> String {
    use std::os::unix::process::ExitStatusExt as _;
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => status.to_string(),
    }
}
