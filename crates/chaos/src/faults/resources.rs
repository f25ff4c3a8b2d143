//! Descriptors, processor and memory of one running process.
//!
//! Control groups of version 1, of which a group without processes can be removed at once.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use rustix::process::{Pid, Resource, Rlimit, prlimit};
use testkit::{kas::within, process::Process};

use crate::table::GROUPS;

/// The time within which a quota of processor time is used up and given again, in microseconds.
const PERIOD: u64 = 100_000;

fn pid(process: &Process) -> Result<Pid> {
    Pid::from_raw(process.id()).context("a process has an id")
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
