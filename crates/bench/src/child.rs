//! A process of a benchmark: its log, and the processor time and memory that it uses.

use std::{
    fs::File,
    net::{SocketAddr, TcpStream},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    time::Duration,
};

use anyhow::{Context as _, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use tokio::time::Instant;

/// Time limit for a process to become ready. Under valgrind everything takes fifty times as long.
pub(super) const READY: Duration = Duration::from_secs(60);
/// The unit of processor time in `/proc`: `USER_HZ`, which is 100 on all supported platforms.
const TICK: Duration = Duration::from_millis(10);
/// A process. Dropping it kills the process.
#[derive(Debug)]
pub(super) struct Process {
    name: String,
    child: Child,
    log: PathBuf,
}

impl Process {
    /// Starts `command`, with its output in a log file.
    pub(super) fn start(name: &str, command: &mut Command, folder: &Path) -> anyhow::Result<Self> {
        let log = folder.join(format!("{name}.log"));
        let file = File::create(&log)?;
        command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
        let child = command.spawn().with_context(|| format!("cannot start {name}"))?;
        Ok(Self { name: name.to_owned(), child, log })
    }

    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns the processor time that it has used, in user and kernel mode.
    pub(super) fn cpu(&self) -> anyhow::Result<Duration> {
        cpu(self.pid()).with_context(|| format!("{} has exited", self.name))
    }

    /// Returns its resident memory in KiB.
    pub(super) fn rss(&self) -> anyhow::Result<u64> {
        self.status("VmRSS:")
    }

    /// Returns its peak resident memory in KiB.
    pub(super) fn peak_rss(&self) -> anyhow::Result<u64> {
        self.status("VmHWM:")
    }

    fn status(&self, key: &str) -> anyhow::Result<u64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid()))?;
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix(key))
            .with_context(|| format!("no line {key} in /proc"))?;
        Ok(line.trim().trim_end_matches(" kB").parse()?)
    }

    /// Fails, with the end of its log, if it has exited.
    pub(super) fn check(&mut self) -> anyhow::Result<()> {
        if let Some(status) = self.child.try_wait()? {
            bail!("{} exited ({status}); the end of its log:\n{}", self.name, self.tail());
        }
        Ok(())
    }

    /// Sends SIGTERM.
    pub(super) fn terminate(&self) -> anyhow::Result<()> {
        // It is not reaped before `self` is dropped, so the id still belongs to it.
        let pid = i32::try_from(self.pid()).ok().and_then(Pid::from_raw).context("no process id")?;
        Ok(kill_process(pid, Signal::TERM)?)
    }

    /// Sends SIGKILL. Dropping it reaps the process.
    pub(super) fn kill(&mut self) -> anyhow::Result<()> {
        Ok(self.child.kill()?)
    }

    /// Returns its exit status, or `None` while it runs.
    pub(super) fn ended(&mut self) -> anyhow::Result<Option<ExitStatus>> {
        Ok(self.child.try_wait()?)
    }

    pub(super) fn tail(&self) -> String {
        let text = std::fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<_> = text.lines().collect();
        lines[lines.len().saturating_sub(15)..].join("\n")
    }

    /// Waits until `address` accepts connections.
    pub(super) fn listens(&mut self, address: SocketAddr) -> anyhow::Result<()> {
        let deadline = Instant::now() + READY;
        while TcpStream::connect(address).is_err() {
            self.check()?;
            ensure!(
                Instant::now() < deadline,
                "{} does not listen on {address}:\n{}",
                self.name,
                self.tail()
            );
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Errors are ignored: the process has exited already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub(super) fn cpu(pid: u32) -> anyhow::Result<Duration> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // The second field is the name in parentheses, which may contain anything. utime and stime are the fields
    // 14 and 15.
    let rest = stat.rsplit_once(')').context("unknown format of /proc/PID/stat")?.1;
    let fields: Vec<_> = rest.split_whitespace().collect();
    let ticks = |at: usize| -> anyhow::Result<u32> {
        Ok(fields.get(at).context("/proc/PID/stat has too few fields")?.parse()?)
    };
    Ok(TICK * (ticks(11)? + ticks(12)?))
}

/// Returns the processor time that the machine has used, and the time that was available, since it started.
pub(super) fn machine() -> anyhow::Result<(Duration, Duration)> {
    let stat = std::fs::read_to_string("/proc/stat")?;
    let line =
        stat.lines().next().and_then(|line| line.strip_prefix("cpu ")).context("no cpu in /proc/stat")?;
    // user, nice, system, idle, iowait, irq, softirq, steal; the fields after them are included in user and
    // nice.
    let ticks: Vec<u64> = line.split_whitespace().take(8).map(str::parse).collect::<Result<_, _>>()?;
    let all: u64 = ticks.iter().sum();
    let idle: u64 = ticks.iter().skip(3).take(2).sum();
    let time = |ticks: u64| Duration::from_millis(ticks * TICK.as_millis() as u64);
    Ok((time(all - idle), time(all)))
}
