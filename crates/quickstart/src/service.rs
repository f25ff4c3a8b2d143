//! Child processes that log to a file, are stopped in order, and do not outlive this process.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::{ExitStatus, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result, anyhow};
use rustix::process::{Pid, Signal, kill_process};
use tokio::{
    io::{AsyncBufReadExt as _, BufReader, Lines},
    process::{ChildStdout, Command},
    time::timeout,
};

use devkit::workspace::find_program;

/// How many lines of the log an error quotes.
const LOG_LINES: usize = 15;

/// Returns a command whose process the kernel kills when this one ends, for any reason. Linux only.
///
/// The kernel watches the spawning *thread*: spawn from a thread that lives as long as the process.
pub(super) fn child_command(program: &Path) -> Command {
    let mut command = match find_program("setpriv") {
        Some(setpriv) if cfg!(target_os = "linux") => {
            let mut command = Command::new(setpriv);
            command.args(["--pdeathsig", "KILL", "--"]).arg(program);
            command
        }
        _ => Command::new(program),
    };
    // The log is read from a file and quoted in errors, so without colours.
    command.env("NO_COLOR", "1");
    // In a process group of its own: Ctrl-C in a terminal reaches this process only, which then stops the
    // others in order.
    command.process_group(0).stdin(Stdio::null()).kill_on_drop(true);
    command
}

/// A server process. Dropping it kills the process.
#[derive(Debug)]
pub(super) struct Service {
    name: &'static str,
    child: tokio::process::Child,
    /// That of a server of the demonstration, which ends when it is closed. Kept open until then: waiting for
    /// a child would close it.
    stdin: Option<tokio::process::ChildStdin>,
    log: PathBuf,
}

impl Service {
    /// Starts `command`, whose standard output and error go to `log`, which must not exist.
    pub(super) fn start(name: &'static str, command: Command, log: PathBuf) -> Result<Self> {
        let file = File::create_new(&log).with_context(|| format!("cannot create {}", log.display()))?;
        let stdout = file.try_clone()?.into();
        Self::spawn(name, command, stdout, file, log)
    }

    /// Starts one of the servers of the demonstration: it prints a line when it is ready, and exits when its
    /// standard input is closed, which is when this process exits. Returns that line, and what it prints
    /// after it. Standard error goes to `log`.
    pub(super) async fn start_ready(
        name: &'static str,
        mut command: Command,
        log: PathBuf,
        within: Duration,
        slot: &mut Option<Self>,
    ) -> Result<(String, Lines<BufReader<ChildStdout>>)> {
        let file = File::create_new(&log).with_context(|| format!("cannot create {}", log.display()))?;
        command.stdin(Stdio::piped());
        let service = slot.insert(Self::spawn(name, command, Stdio::piped(), file, log)?);
        let stdout = service.child.stdout.take().context("the process has no standard output")?;
        let mut lines = BufReader::new(stdout).lines();
        match timeout(within, lines.next_line()).await {
            Err(_) => Err(service.explain(&format!("is not ready after {within:?}"))),
            Ok(Ok(Some(line))) => Ok((line.trim().to_owned(), lines)),
            Ok(_) => Err(service.ended().await),
        }
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
        Ok(Self { name, child, stdin, log })
    }

    pub(super) fn name(&self) -> &'static str {
        self.name
    }

    /// Returns the process's id while it runs.
    pub(super) fn id(&self) -> Option<u32> {
        self.child.id()
    }

    fn pid(&self) -> Option<Pid> {
        Pid::from_raw(self.id()?.try_into().ok()?)
    }

    /// Kills the process, and does not wait until it has ended. Returns its id.
    pub(super) fn kill(&self) -> Result<Pid> {
        let pid = self.pid().with_context(|| format!("{} does not run", self.name))?;
        kill_process(pid, Signal::KILL).with_context(|| format!("cannot kill {}", self.name))?;
        Ok(pid)
    }

    /// Waits until the process exits unexpectedly, which is always an error.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub(super) async fn ended(&mut self) -> anyhow::Error {
        match self.child.wait().await {
            Ok(status) => self.explain(&format!("exited unexpectedly ({})", exit_reason(status))),
            Err(error) => anyhow!(error).context(format!("cannot wait for {}", self.name)),
        }
    }

    /// Returns an error that says what is wrong and quotes the end of the log.
    pub(super) fn explain(&self, what: &str) -> anyhow::Error {
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
    pub(super) fn log(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.log).unwrap_or_default()).into_owned()
    }

    /// Asks the process to exit, and kills it if it has not done so within `patience`. Returns what was
    /// wrong, if anything.
    pub(super) async fn stop(mut self, patience: Duration) -> Result<Option<&'static str>> {
        let Some(pid) = self.pid() else {
            return Ok(Some("was not running"));
        };
        // A server of the demonstration removes its own files when its standard input is closed.
        if self.stdin.take().is_none() {
            // Not waited for yet, so the id still belongs to this process, even if it has exited.
            let _ = kill_process(pid, Signal::TERM);
        }
        match timeout(patience, self.child.wait()).await {
            Ok(status) => {
                status.with_context(|| format!("cannot wait for {}", self.name))?;
                Ok(None)
            }
            Err(_) => {
                self.child.kill().await.with_context(|| format!("cannot kill {}", self.name))?;
                Ok(Some("killed: it did not exit in time"))
            }
        }
    }
}

fn exit_reason(status: ExitStatus) -> String {
    use std::os::unix::process::ExitStatusExt as _;
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => status.to_string(),
    }
}
