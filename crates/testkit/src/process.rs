//! Child processes of a test: their log lines can be awaited, and they never outlive the test.
//!
//! [`program`] finds the workspace's own programs next to the test binary; [`Process`] runs them.

use std::{
    env,
    ffi::OsString,
    io::{self, BufRead as _, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::{Arc, LazyLock, mpsc},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use parking_lot::{Condvar, Mutex, MutexGuard};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};
use serde_json::Value;
use tokio::{sync::watch, time::timeout};

/// Timeout for anything that a test waits for: generous, because other tests run concurrently.
pub const SOON: Duration = Duration::from_secs(20);
/// How many log lines of a process an error contains.
const LOG_LINES: usize = 30;

/// Waits for `future` for at most [`SOON`].
///
/// # Panics
/// When that is over: `what` did not happen.
pub async fn soon<F: Future>(what: &str, future: F) -> F::Output {
    match timeout(SOON, future).await {
        Ok(output) => output,
        Err(_) => panic!("{what}: not within {SOON:?}"),
    }
}

/// Names a folder with programs of another build, to be tested or measured instead of those of the running
/// test. It may name several, separated like those of `PATH`: the replicas of a cluster take them in turns,
/// which tests replicas of different versions with each other.
const PROGRAMS: &str = "KAS_PROGRAMS";

/// Returns the path of a program of this workspace, in the profile of the running test, or in the folder that
/// the variable `KAS_PROGRAMS` names. Programs that are not there are built first; not in such a folder.
///
/// # Errors
/// When they cannot be built, or are not in the folder.
pub fn program(name: &str) -> Result<PathBuf> {
    program_of_replica(name, 0)
}

/// Returns the path of a program for replica `n` of a cluster: [`program`], but if `KAS_PROGRAMS` names
/// several folders, replica 0 takes the first of them, replica 1 the second, and so on, and then the first
/// again.
///
/// # Errors
/// As [`program`].
pub fn program_of_replica(name: &str, n: usize) -> Result<PathBuf> {
    if let Some(folders) = env::var_os(PROGRAMS) {
        let folders: Vec<PathBuf> = env::split_paths(&folders).collect();
        let folder = folders.get(n % folders.len().max(1)).with_context(|| format!("{PROGRAMS} is empty"))?;
        // A test runs in the folder of its crate, and cargo was called somewhere above it.
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(folder);
        let path = folder.join(name);
        ensure!(path.is_file(), "there is no {name} in {}, which {PROGRAMS} names", folder.display());
        return Ok(path);
    }
    // One test builds, the others of this process wait; cargo's own lock orders processes.
    static BUILD: Mutex<()> = Mutex::new(());
    let test = env::current_exe().context("the test has no path")?;
    // target/<profile>/deps/<test>, or target/<profile>/<benchmark>
    let folder = test.parent().context("the test is not in a target folder")?;
    let folder = match folder.file_name() {
        Some(name) if name == "deps" => folder.parent().context("the test is not in a target folder")?,
        _ => folder,
    };
    let path = folder.join(name);
    let _lock = BUILD.lock();
    if path.is_file() {
        return Ok(path);
    }
    let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.args(["build", "-p", "kas", "-p", "agentk", "-p", "kasctl", "--features", "agentk/bench"]);
    if folder.file_name().is_some_and(|profile| profile == "release") {
        command.arg("--release");
    }
    let output = command
        .current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("../.."))
        .stdin(Stdio::null())
        .output()
        .context("could not run cargo")?;
    ensure!(output.status.success(), "cargo build failed: {}", String::from_utf8_lossy(&output.stderr));
    ensure!(path.is_file(), "{} is not there after a build", path.display());
    Ok(path)
}

/// A running child process. Dropping it kills it.
#[derive(Debug)]
pub struct Process {
    name: String,
    shared: Arc<Shared>,
    lines: watch::Receiver<Vec<String>>,
    exit: watch::Receiver<Option<ExitStatus>>,
}

#[derive(Debug)]
struct Shared {
    pid: Pid,
    /// The status, from the moment the process has been reaped: its id may then be another's.
    reaped: Mutex<Option<ExitStatus>>,
    changed: Condvar,
}

impl Shared {
    fn reaped(&self) -> MutexGuard<'_, Option<ExitStatus>> {
        self.reaped.lock()
    }

    fn signal(&self, signal: Signal) {
        // Under the lock, so that the id is still the child's own.
        if self.reaped().is_none() {
            let _ = kill_process(self.pid, signal);
        }
    }
}

impl Process {
    /// Starts `program`; its standard error is its log. Both the kernel and dropping this end it.
    ///
    /// # Errors
    /// When it cannot be started.
    pub async fn start(name: &str, program: &Path, arguments: &[&str], env: &[(&str, &str)]) -> Result<Self> {
        Self::start_in(None, name, program, arguments, env).await
    }

    /// Starts `program` in a network namespace, which is that of the tests when there is none.
    ///
    /// # Errors
    /// When it cannot be started.
    pub async fn start_in(
        namespace: Option<&Path>,
        name: &str,
        program: &Path,
        arguments: &[&str],
        env: &[(&str, &str)],
    ) -> Result<Self> {
        // A killed test runs no destructors: the kernel then kills what it started. Neither program forks, so
        // that the process is still this one's child.
        let mut words: Vec<OsString> = Vec::new();
        if let Some(setpriv) = find("setpriv") {
            words.extend([setpriv.into(), "--pdeathsig".into(), "KILL".into(), "--".into()]);
        }
        if let Some(namespace) = namespace {
            let mut option = OsString::from("--net=");
            option.push(namespace);
            words.extend(["nsenter".into(), option, "--".into()]);
        }
        words.push(program.into());
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]);
        command.args(arguments).env_remove("RUST_LOG").env_remove("KUBECONFIG").envs(env.iter().copied());
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child =
            spawn_from_lasting_thread(command).await.with_context(|| format!("could not run {name}"))?;
        let pid =
            i32::try_from(child.id()).ok().and_then(Pid::from_raw).context("a process id is positive")?;
        let stderr = child.stderr.take().context("standard error is a pipe")?;
        let shared = Arc::new(Shared { pid, reaped: Mutex::default(), changed: Condvar::new() });
        let (log, lines) = watch::channel(Vec::new());
        thread::Builder::new().name(format!("{name}-log")).spawn(move || {
            for line in BufReader::new(stderr).split(b'\n') {
                let Ok(line) = line else { break };
                log.send_modify(|lines: &mut Vec<String>| {
                    lines.push(String::from_utf8_lossy(&line).into_owned())
                });
            }
        })?;
        let (ended, exit) = watch::channel(None);
        let waiter = Arc::clone(&shared);
        thread::Builder::new().name(format!("{name}-exit")).spawn(move || {
            // Detected first and reaped under the lock, so that no signal is sent to an id that is no longer
            // ours.
            while let Err(rustix::io::Errno::INTR) =
                waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT)
            {}
            let mut reaped = waiter.reaped();
            *reaped = Some(child.wait().unwrap_or_default());
            ended.send_replace(*reaped);
            waiter.changed.notify_all();
        })?;
        Ok(Self { name: name.to_owned(), shared, lines, exit })
    }

    /// Returns the process's id.
    pub fn id(&self) -> i32 {
        self.shared.pid.as_raw_nonzero().get()
    }

    /// Asks the process to end: SIGTERM.
    pub fn terminate(&self) {
        self.shared.signal(Signal::TERM);
    }

    /// Ends the process without asking: SIGKILL.
    pub fn kill(&self) {
        self.shared.signal(Signal::KILL);
    }

    /// Pauses it with SIGSTOP. Returns when no thread of it runs any more.
    pub fn pause(&self) {
        self.shared.signal(Signal::STOP);
        // The kernel stops thread by thread, and a busy one may still answer meanwhile.
        while self.is_running() && self.runs() {
            std::thread::yield_now();
        }
    }

    /// Whether one of its threads is neither stopped nor gone.
    fn runs(&self) -> bool {
        let Ok(tasks) = std::fs::read_dir(format!("/proc/{}/task", self.shared.pid.as_raw_pid())) else {
            return false;
        };
        tasks.flatten().any(|task| {
            let stat = std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
            // The name before the state is in parentheses, and may hold any.
            let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
            state.is_some_and(|state| !"TtZX".contains(state))
        })
    }

    /// Resumes it after [`pause`](Self::pause).
    pub fn resume(&self) {
        self.shared.signal(Signal::CONT);
    }

    /// Whether the process has not ended.
    pub fn is_running(&self) -> bool {
        self.exit.borrow().is_none()
    }

    /// Waits until the process has ended by itself, or by a signal sent before.
    ///
    /// # Errors
    /// When it has not after `within`.
    pub async fn exited(&self, within: Duration) -> Result<ExitStatus> {
        let mut exit = self.exit.clone();
        match timeout(within, exit.wait_for(Option::is_some)).await {
            Ok(Ok(status)) => (*status).context("the status is there"),
            _ => bail!("{} has not ended after {within:?}:{}", self.name, self.last_lines()),
        }
    }

    /// Waits for a line of the log that `pick` accepts, from the start of the process.
    ///
    /// # Errors
    /// When the process ends before, or no such line comes within [`SOON`].
    pub async fn logged<T>(&self, what: &str, pick: impl FnMut(&Value) -> Option<T>) -> Result<T> {
        self.logged_since(0, what, pick).await
    }

    /// As [`logged`](Self::logged), from line `since` on: see [`log_len`](Self::log_len).
    ///
    /// # Errors
    /// As [`logged`](Self::logged).
    pub async fn logged_since<T>(
        &self,
        since: usize,
        what: &str,
        mut pick: impl FnMut(&Value) -> Option<T>,
    ) -> Result<T> {
        let mut lines = self.lines.clone();
        let mut seen = since;
        let search = async {
            loop {
                {
                    let lines = lines.borrow_and_update();
                    for line in lines.get(seen..).unwrap_or_default() {
                        seen += 1;
                        if let Some(found) = serde_json::from_str(line).ok().as_ref().and_then(&mut pick) {
                            return Ok(found);
                        }
                    }
                }
                if lines.changed().await.is_err() {
                    bail!("{} ended without {what}:{}", self.name, self.last_lines());
                }
            }
        };
        match timeout(SOON, search).await {
            Ok(found) => found,
            Err(_) => bail!("{} did not log {what} within {SOON:?}:{}", self.name, self.last_lines()),
        }
    }

    /// Returns how many lines have been logged.
    pub fn log_len(&self) -> usize {
        self.lines.borrow().len()
    }

    /// Returns the log.
    pub fn log(&self) -> String {
        self.lines.borrow().join("\n")
    }

    fn last_lines(&self) -> String {
        let lines = self.lines.borrow();
        format!("\n{}", lines[lines.len().saturating_sub(LOG_LINES)..].join("\n"))
    }

    /// Returns how many files the process has open, and its resident memory in KiB.
    ///
    /// # Errors
    /// When the process has ended, or there is no `/proc`.
    pub fn usage(&self) -> Result<Usage> {
        let proc = PathBuf::from(format!("/proc/{}", self.id()));
        let files = std::fs::read_dir(proc.join("fd"))?.count();
        let status = std::fs::read_to_string(proc.join("status"))?;
        let resident = status
            .lines()
            .find_map(|line| line.strip_prefix("VmRSS:")?.trim().strip_suffix("kB")?.trim().parse().ok())
            .context("a process has a resident size")?;
        Ok(Usage { files, resident_kib: resident })
    }
}

/// The resources of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// Open file descriptors.
    pub files: usize,
    /// Resident memory, in KiB.
    pub resident_kib: u64,
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
        let mut reaped = self.shared.reaped();
        while reaped.is_none() {
            self.shared.changed.wait(&mut reaped);
        }
        // Held back by the test harness, and shown when the test has failed.
        eprintln!("--- the end of the log of {}:{}", self.name, self.last_lines());
    }
}

/// Finds a program in `PATH`.
pub fn find(program: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH")?;
    env::split_paths(&path).map(|folder| folder.join(program)).find(|candidate| candidate.is_file())
}

/// Spawns a process from a thread that lasts as long as this process.
///
/// The kernel sends the parent-death signal when the spawning *thread* ends, and a runtime's threads end with
/// the test that created it. This single thread is never joined: it ends with the process.
pub(crate) async fn spawn_from_lasting_thread(command: Command) -> Result<Child> {
    type Order = (Command, tokio::sync::oneshot::Sender<io::Result<Child>>);
    static ORDERS: LazyLock<mpsc::SyncSender<Order>> = LazyLock::new(|| {
        let (sender, orders) = mpsc::sync_channel::<Order>(16);
        thread::Builder::new()
            .name("test-processes".to_owned())
            .spawn(move || {
                for (mut command, reply) in orders {
                    // A caller that was cancelled drops its end; the process would then never be stopped.
                    if let Err(Ok(mut unwanted)) = reply.send(command.spawn()) {
                        let _ = unwanted.kill();
                        let _ = unwanted.wait();
                    }
                }
            })
            .expect("a test may start a thread");
        sender
    });
    let (reply, child) = tokio::sync::oneshot::channel();
    // The queue is as long as there are tests at once; it is emptied within milliseconds.
    ORDERS.send((command, reply)).context("the thread that starts processes has ended")?;
    Ok(child.await.context("the thread that starts processes has ended")??)
}
