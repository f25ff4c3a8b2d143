//! Descriptors, processor and memory of one running process.
//!
//! Control groups of version 1, of which a group without processes can be removed at once.

use std::{
    net::{IpAddr, Ipv4Addr},
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use rustix::process::{Pid, Resource, Rlimit, prlimit};
use testkit::{kas::within, process::Process};

use crate::table::GROUPS;

/// The time within which a quota of processor time is used up and given again, in microseconds.
const PERIOD: u64 = 100_000;

fn pid(process: &Process) -> Result<Pid> {
    Pid::from_raw(process.id()).context("a process has an id")
}

/// The unit of times in `/proc`: 10 ms on each system that kas runs on.
const TICK: Duration = Duration::from_millis(10);

/// Returns the time of processors that a process has used, with that of threads that have ended.
pub(crate) fn processor_time(process: &Process) -> Result<Duration> {
    let path = format!("/proc/{}/stat", process.id());
    let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
    used(&text).with_context(|| format!("{path} does not tell times"))
}

/// Reads the times of `/proc/<pid>/stat`: in the process itself, and in the kernel for it.
fn used(stat: &str) -> Option<Duration> {
    // The name of the program is in parentheses, and may have spaces.
    let mut words = stat.rsplit_once(')')?.1.split_whitespace().skip(11);
    let mut ticks = || words.next()?.parse::<u32>().ok();
    Some(TICK * (ticks()?.checked_add(ticks()?)?))
}

/// Returns how many bytes a process has sent to a host that its kernel still has, over all connections.
pub(crate) fn unsent(process: &Process, to: IpAddr) -> Result<f64> {
    let path = format!("/proc/{}/net/tcp", process.id());
    let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
    let IpAddr::V4(to) = to else { bail!("{to} is no address of a host in a run") };
    Ok(queued(&text, to))
}

/// Adds up the queues of `/proc/net/tcp` towards an address.
fn queued(table: &str, to: Ipv4Addr) -> f64 {
    // Each byte as the machine has it: the first one last.
    let to = format!("{:08X}", u32::from_le_bytes(to.octets()));
    let of = |line: &str| {
        let mut words = line.split_whitespace();
        let (remote, _) = words.nth(2)?.split_once(':')?;
        let (sending, _) = words.nth(1)?.split_once(':')?;
        (remote == to).then(|| u32::from_str_radix(sending, 16).ok())?
    };
    table.lines().filter_map(of).map(f64::from).sum()
}

/// A thread of a process that stands still until it is freed, or this is dropped.
///
/// Groups of version 1 freeze single threads; groups of version 2 and signals stop whole processes only.
#[derive(Debug)]
pub(crate) struct Frozen {
    path: PathBuf,
    thread: i32,
    /// The group that the thread was in.
    home: PathBuf,
}

/// The name that the runtime gives to its threads, as far as the kernel keeps it.
const WORKER: &str = "tokio-rt-worker";

impl Frozen {
    /// Stops the worker of a process that has used most time: the others of this name may be threads for what
    /// blocks.
    pub(crate) async fn worker(process: &Process) -> Result<Self> {
        let mut busiest: Option<(Duration, i32)> = None;
        for entry in std::fs::read_dir(format!("/proc/{}/task", process.id()))? {
            let path = entry?.path();
            // A thread may have ended meanwhile.
            let Ok(name) = std::fs::read_to_string(path.join("comm")) else { continue };
            let Ok(stat) = std::fs::read_to_string(path.join("stat")) else { continue };
            let thread = path.file_name().and_then(|name| name.to_str()?.parse().ok());
            if let (WORKER, Some(used), Some(thread)) = (name.trim(), used(&stat), thread) {
                busiest = busiest.max(Some((used, thread)));
            }
        }
        let (_, thread) = busiest.with_context(|| format!("kas has no thread {WORKER}"))?;
        let home = Path::new(GROUPS).join("freezer");
        let path = home.join(format!("chaos-{}-{thread}", std::process::id()));
        std::fs::create_dir(&path).with_context(|| format!("cannot make the group {}", path.display()))?;
        let frozen = Self { path, thread, home };
        frozen.write("tasks", &thread.to_string())?;
        frozen.write("freezer.state", "FROZEN")?;
        within(Duration::from_secs(5), "the thread stands still", async || {
            let state = std::fs::read_to_string(frozen.path.join("freezer.state"))?;
            Ok(if state.trim() == "FROZEN" { Ok(()) } else { Err(state) })
        })
        .await?;
        Ok(frozen)
    }

    fn write(&self, file: &str, value: &str) -> Result<()> {
        let path = self.path.join(file);
        std::fs::write(&path, value).with_context(|| format!("cannot write {}", path.display()))
    }

    /// Lets the thread go on.
    pub(crate) fn thaw(self) -> Result<()> {
        self.write("freezer.state", "THAWED")
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        // A thread that has ended has left already.
        let _ = self.write("freezer.state", "THAWED");
        let _ = std::fs::write(self.home.join("tasks"), self.thread.to_string());
        if std::fs::remove_dir(&self.path).is_err() {
            eprintln!("the control group {} is left", self.path.display());
        }
    }
}

/// Sets how many files a running process may open, and returns the limit before.
pub(crate) fn limit_files(process: &Process, files: u64) -> Result<u64> {
    let pid = pid(process)?;
    let old = rustix::process::getrlimit(Resource::Nofile);
    let maximum = old.maximum;
    let before = prlimit(Some(pid), Resource::Nofile, Rlimit { current: Some(files), maximum })
        .context("cannot limit the files of a process")?;
    before.current.context("the number of files was not limited")
}

/// A group with one process. Dropping it moves the process back and removes the group.
#[derive(Debug)]
pub(crate) struct Group {
    kind: &'static str,
    path: PathBuf,
    process: i32,
    /// The group that the process was in.
    home: PathBuf,
}

impl Group {
    fn new(kind: &'static str, process: &Process) -> Result<Self> {
        let own = std::fs::read_to_string(format!("/proc/{}/cgroup", process.id()))?;
        let line = |line: &str| {
            let mut parts = line.splitn(3, ':').skip(1);
            (parts.next()?.split(',').any(|name| name == kind)).then(|| parts.next())?.map(str::to_owned)
        };
        let home = own.lines().find_map(line).with_context(|| format!("a process has a group for {kind}"))?;
        let root = Path::new(GROUPS).join(kind);
        let home = root.join(home.trim_start_matches('/'));
        // A container sees its own group as the root, and its name in /proc may be another one.
        let home = if home.join("cgroup.procs").is_file() { home } else { root.clone() };
        let path = home.join(format!("chaos-{}-{}", std::process::id(), process.id()));
        std::fs::create_dir(&path).with_context(|| format!("cannot make the group {}", path.display()))?;
        Ok(Self { kind, path, process: process.id(), home })
    }

    fn write(&self, file: &str, value: impl ToString) -> Result<()> {
        let path = self.path.join(file);
        std::fs::write(&path, value.to_string()).with_context(|| format!("cannot write {}", path.display()))
    }

    fn enter(&self) -> Result<()> {
        self.write("cgroup.procs", self.process)
    }

    /// Gives a process only this share of one processor, in percent.
    pub(crate) fn processor(process: &Process, percent: u64) -> Result<Self> {
        let group = Self::new("cpu", process)?;
        group.write("cpu.cfs_period_us", PERIOD)?;
        group.share(percent)?;
        group.enter()?;
        Ok(group)
    }

    /// Changes the share of one processor, in percent.
    pub(crate) fn share(&self, percent: u64) -> Result<()> {
        self.write("cpu.cfs_quota_us", PERIOD * percent / 100)
    }

    /// Lets a process have only this much memory from now on, beyond what it has, in bytes.
    pub(crate) fn memory(process: &Process, bytes: u64) -> Result<Self> {
        let group = Self::new("memory", process)?;
        // What it has already is counted in its own group, and stays there.
        group.write("memory.limit_in_bytes", bytes)?;
        group.enter()?;
        Ok(group)
    }

    /// How often the quota was used up, or the limit of memory was met.
    pub(crate) fn struck(&self) -> Result<u64> {
        let read = |file: &str| std::fs::read_to_string(self.path.join(file));
        if self.kind == "memory" {
            return Ok(read("memory.failcnt")?.trim().parse()?);
        }
        let text = read("cpu.stat")?;
        let value = text.lines().find_map(|line| line.strip_prefix("nr_throttled "));
        Ok(value.context("cpu.stat tells how often a group was throttled")?.parse()?)
    }

    /// The most memory that was used in it, in bytes.
    pub(crate) fn most(&self) -> Result<u64> {
        let path = self.path.join("memory.max_usage_in_bytes");
        Ok(std::fs::read_to_string(path)?.trim().parse()?)
    }

    /// Ends the limit: moves the process back and removes the group.
    pub(crate) async fn end(self) -> Result<()> {
        within(Duration::from_secs(10), "the group is removed", async || {
            Ok(if self.free() { Ok(()) } else { Err(self.path.display().to_string()) })
        })
        .await
    }

    /// Whether it is gone.
    fn free(&self) -> bool {
        // A process that has ended has left already.
        let _ = std::fs::write(self.home.join("cgroup.procs"), self.process.to_string());
        !self.path.exists() || std::fs::remove_dir(&self.path).is_ok()
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if !self.free() {
            eprintln!("the control group {} is left", self.path.display());
        }
    }
}

/// A small file system in memory, for a log that fills its disk.
#[derive(Debug)]
pub(crate) struct SmallDisk {
    path: PathBuf,
}

impl SmallDisk {
    /// Mounts one of this many KiB at a folder.
    pub(crate) fn new(path: &Path, kib: u32) -> Result<Self> {
        std::fs::create_dir_all(path)?;
        let mut command = std::process::Command::new("mount");
        command.args(["-t", "tmpfs", "-o", &format!("size={kib}k"), "tmpfs"]).arg(path);
        let output = command.output().with_context(|| format!("cannot run {command:?}"))?;
        ensure!(output.status.success(), "{command:?} failed: {}", String::from_utf8_lossy(&output.stderr));
        Ok(Self { path: path.to_owned() })
    }

    /// Returns where it is.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // Lazily: a process may still have its file open.
        let status = std::process::Command::new("umount").arg("--lazy").arg(&self.path).status();
        if !status.is_ok_and(|status| status.success()) {
            eprintln!("{} stays mounted", self.path.display());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_of_a_process_are_read() {
        let stat = "17 (a name) with) R 1 17 17 0 -1 4194560 100 0 0 0 250 50 0 0 20 0 9 0 1000 0 0";
        assert_eq!(used(stat), Some(Duration::from_secs(3)));
        assert_eq!(used("17 (kas) R 1"), None);
    }

    #[test]
    fn queues_towards_a_host_are_added_up() {
        let table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt\n   \
             0: 01004D0A:1FDB 03004D0A:C001 01 00000100:00000000 01:00000014 00000000\n   \
             1: 01004D0A:C002 03004D0A:1FDB 01 00000010:00000005 00:00000000 00000000\n   \
             2: 01004D0A:1FDB 02004D0A:C003 01 00001000:00000000 00:00000000 00000000\n";
        assert_eq!(queued(table, Ipv4Addr::new(10, 77, 0, 3)), 272.0);
        assert_eq!(queued(table, Ipv4Addr::new(10, 77, 0, 9)), 0.0);
    }
}
