//! Sizes of replicas over time: memory, descriptors, tasks, and what queues hold.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use history::{Gauge, Micros, Recovery};
use parking_lot::Mutex;
use tokio::{
    task::JoinSet,
    time::{interval, timeout},
};

use crate::{clock, load::Shared};

/// How often sizes are read.
const LOOK: Duration = Duration::from_secs(2);
/// An answer that takes longer is not waited for: the replica may be paused.
const ANSWER: Duration = Duration::from_millis(1500);
/// Sizes that have a cap: the name of the metric, and the largest value that the configuration allows.
const CAPS: [(&str, f64); 2] = [
    // limits.waiters of the configuration.
    ("kas_requests_waiting", 20_000.0),
    // The replicas of a run, and what the crash loop leaves within the time that gossip remembers a process.
    ("kas_gossip_incarnations", 1_000.0),
];

/// What is read of a replica.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Size {
    /// Resident memory, in KiB.
    pub(crate) memory: f64,
    /// Open files.
    pub(crate) files: f64,
    /// Tasks of its runtime.
    pub(crate) tasks: f64,
}

/// A part of a size: its name, its value, and a difference that does not count.
type Part = (&'static str, fn(&Size) -> f64, f64);

impl Size {
    /// The names of its parts, each with a difference that does not count after recovery: memory comes in
    /// pages of the allocator, and a connection may just be open for a scrape.
    const PARTS: [Part; 3] = [
        ("memory in KiB", |size| size.memory, 1024.0),
        ("descriptors", |size| size.files, 4.0),
        ("tasks", |size| size.tasks, 8.0),
    ];

    /// Its parts, by name.
    pub(crate) fn parts(&self) -> [(&'static str, f64); 3] {
        Self::PARTS.map(|(name, pick, _)| (name, pick(self)))
    }

    /// The smaller part of each.
    fn least(self, other: Self) -> Self {
        Self {
            memory: self.memory.min(other.memory),
            files: self.files.min(other.files),
            tasks: self.tasks.min(other.tasks),
        }
    }

    /// Compares with what was before a fault.
    pub(crate) fn recovered(&self, process: &str, before: &Self) -> Vec<Recovery> {
        let compare = |(name, pick, slack): Part| Recovery {
            process: process.to_owned(),
            name: name.to_owned(),
            before: pick(before),
            after: pick(self),
            slack,
        };
        Self::PARTS.map(compare).into()
    }
}

/// A replica whose sizes are read.
#[derive(Clone, Debug)]
pub(crate) struct Sized {
    pub(crate) name: String,
    pub(crate) metrics: SocketAddr,
}

/// The process of each replica that runs, by its name.
pub(crate) type Processes = Arc<Mutex<BTreeMap<String, i32>>>;

/// Reads sizes until it is dropped, and records those with a cap.
#[derive(Debug)]
pub(crate) struct Sizes {
    _tasks: JoinSet<()>,
    pub(crate) processes: Processes,
}

impl Sizes {
    pub(crate) fn start(replicas: &[Sized], history: &Shared) -> Self {
        let processes = Processes::default();
        let mut tasks = JoinSet::new();
        for replica in replicas {
            let (replica, history, processes) =
                (replica.clone(), Arc::clone(history), Arc::clone(&processes));
            tasks.spawn(async move {
                let mut ticks = interval(LOOK);
                loop {
                    ticks.tick().await;
                    if !processes.lock().contains_key(&replica.name) {
                        continue;
                    }
                    let at = clock::now();
                    // A replica that is paused, killed or cut off does not answer, which is not a breach.
                    if let Ok(metrics) = metrics(replica.metrics).await {
                        capped(&replica.name, at, &metrics, &mut history.lock().gauges);
                    }
                }
            });
        }
        Self { _tasks: tasks, processes }
    }

    /// Reads the sizes of a replica that runs: the least of five looks, since the look itself and what has
    /// just ended take some.
    pub(crate) async fn of(&self, replica: &Sized) -> Result<Size> {
        let pid = self.processes.lock().get(&replica.name).copied();
        let pid = pid.with_context(|| format!("{} does not run", replica.name))?;
        let mut least = None;
        for _ in 0..5 {
            let metrics = metrics(replica.metrics).await?;
            let tasks = *metrics.get("kas_tasks").context("kas tells how many tasks it has")?;
            let (memory, files) = usage(pid)?;
            let size = Size { memory, files, tasks };
            least = Some(least.map_or(size, |least: Size| least.least(size)));
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        least.context("five looks were taken")
    }
}

fn capped(name: &str, at: Micros, metrics: &BTreeMap<String, f64>, gauges: &mut Vec<Gauge>) {
    for (metric, cap) in CAPS {
        if let Some(value) = metrics.get(metric) {
            let (process, name) = (name.to_owned(), metric.to_owned());
            gauges.push(Gauge { at, process, name, value: *value, cap });
        }
    }
}

/// Returns resident memory in KiB and open files of a process.
#[expect(clippy::cast_precision_loss, reason = "sizes of a process")]
fn usage(pid: i32) -> Result<(f64, f64)> {
    let proc = PathBuf::from(format!("/proc/{pid}"));
    let files = std::fs::read_dir(proc.join("fd"))?.count();
    Ok((resident(&proc.join("status"))?, files as f64))
}

fn resident(status: &Path) -> Result<f64> {
    let text = std::fs::read_to_string(status)?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:")?.trim().strip_suffix(" kB"));
    Ok(line.context("a process has a resident size")?.trim().parse()?)
}

/// Returns the metrics of a replica that have no labels, or one set of them: by name, with labels as they are
/// written.
pub(crate) async fn metrics(address: SocketAddr) -> Result<BTreeMap<String, f64>> {
    let (status, text) =
        timeout(ANSWER, testkit::kas::get(address, "/metrics")).await.context("no metrics in time")??;
    ensure!(status.is_success(), "the metrics of {address}: {status}");
    Ok(parse(&text))
}

fn parse(text: &str) -> BTreeMap<String, f64> {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines
        .filter_map(|line| {
            let (name, value) = line.rsplit_once(' ')?;
            Some((name.to_owned(), value.parse().ok()?))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_are_read_and_caps_are_recorded() {
        let text =
            "# TYPE kas_requests_waiting gauge\nkas_requests_waiting 17\nkas_x{a=\"b c\"} 2.5\n# EOF\n";
        let metrics = parse(text);
        assert_eq!(metrics["kas_x{a=\"b c\"}"], 2.5);
        let mut gauges = Vec::new();
        capped("a", 1, &metrics, &mut gauges);
        assert_eq!(gauges.len(), 1);
        assert_eq!((gauges[0].value, gauges[0].cap), (17.0, 20_000.0));
    }

    #[test]
    fn a_process_that_kept_memory_has_not_recovered() {
        let before = Size { memory: 100_000.0, files: 60.0, tasks: 200.0 };
        let after = Size { memory: 110_000.0, ..before };
        let history =
            history::History { recoveries: after.recovered("a", &before), ..history::History::default() };
        let report = history::check(&history);
        let verdict = report.of(history::Invariant::I10);
        assert_eq!((verdict.checked, verdict.broken), (3, 1), "{report}");
    }

    #[test]
    fn the_sizes_of_this_process_can_be_read() {
        let pid = i32::try_from(std::process::id()).unwrap();
        let (memory, files) = usage(pid).unwrap();
        assert!(memory > 100.0 && files > 2.0, "{memory} KiB, {files} files");
    }
}
