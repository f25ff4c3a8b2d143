//! What a run leaves on disk, and the report that is assembled from all of it.

mod page;
mod result;
mod slow;

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use history::History;

use crate::{
    judge,
    measure::Measured,
    run::Finished,
    slope::Slope,
    table::{Scenario, Tracker},
    timeline,
};

use self::result::FAILS;
pub(crate) use self::result::RunResult;

/// Where the report and its pictures are, below the folder of the documentation or of the results.
const PAGE: &str = "chaos.md";
const PICTURES: &str = "images/chaos";

/// What makes runs of one scenario incomparable.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Form {
    pub(crate) quick: bool,
    pub(crate) tracker: Tracker,
    /// The number of agents, if another one than the scenario's own was asked for.
    pub(crate) agents: Option<i64>,
    /// The programs are not optimized: those of the dev profile.
    pub(crate) debug: bool,
    /// Times are shown beside their gates, and fail nothing.
    pub(crate) no_gates: bool,
}

impl std::fmt::Display for Form {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if self.quick { "quick" } else { "full" })?;
        if self.tracker == Tracker::Redis {
            write!(f, ", {}", self.tracker.as_str())?;
        }
        if let Some(agents) = self.agents {
            write!(f, ", {agents} agents")?;
        }
        if self.debug {
            f.write_str(", debug build")?;
        }
        if self.no_gates {
            f.write_str(", no gates")?;
        }
        Ok(())
    }
}

/// Whether a scenario passed, and why not.
#[derive(Clone, Debug)]
pub(crate) struct Verdict {
    pub(crate) name: String,
    pub(crate) failures: Vec<String>,
}

/// Judges a finished run, keeps its result and picture in `folder`, and its history if it failed.
pub(crate) fn keep(
    scenario: &Scenario,
    form: Form,
    finished: &Finished,
    error: Option<&anyhow::Error>,
    folder: &Path,
) -> Result<Verdict> {
    let history = &finished.history;
    let name = scenario.name(form.tracker);
    let mut measured: Vec<Measured> = finished.measured.clone();
    measured.extend(judge::whole(scenario.id, history));
    let mut result = RunResult::of(history, &measured, form);
    scenario.id.clone_into(&mut result.id);
    result.failures.extend(finished.slopes.iter().filter_map(Slope::failure));
    let unseen = finished.required.iter().filter_map(|invariant| result.unseen(*invariant));
    let unseen: Vec<String> = unseen.collect();
    result.failures.extend(unseen);
    if let Some(error) = error {
        result.failures.insert(0, format!("{error:#}"));
    }
    result.seconds = finished.took.as_secs();
    result.slopes.clone_from(&finished.slopes);
    result.notes.clone_from(&finished.notes);
    // Shown to people; nothing is decided by it.
    let now = process::clock::wall();
    result.machine = machine();
    result.started = now.saturating_sub(finished.took).as_secs();
    result.save(folder, &timeline::svg(&name, scenario.what, history))?;
    print(&result);
    if !result.passes() {
        let path = history_file(folder, history);
        history::write(history, std::io::BufWriter::new(std::fs::File::create(&path)?))?;
        eprintln!("  the history is in {}", path.display());
    }
    Ok(Verdict { name, failures: result.failures })
}

/// Keeps that a scenario did not get as far as a history.
pub(crate) fn keep_failure(
    scenario: &Scenario,
    form: Form,
    (seed, commit): (u64, &str),
    failures: Vec<String>,
    folder: &Path,
) -> Result<Verdict> {
    let name = scenario.name(form.tracker);
    let now = process::clock::wall().as_secs();
    let result = RunResult {
        id: scenario.id.to_owned(),
        form: form.to_string(),
        no_gates: form.no_gates,
        machine: machine(),
        started: now,
        seed,
        commit: commit.to_owned(),
        failures: failures.clone(),
        ..RunResult::default()
    };
    result.save(folder, &timeline::svg(&name, scenario.what, &History::default()))?;
    Ok(Verdict { name, failures })
}

/// The machine, in words. What it does besides is not known.
fn machine() -> String {
    let cores = std::thread::available_parallelism().map_or(0, std::num::NonZero::get);
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let kib = read("/proc/meminfo")
        .lines()
        .find_map(|line| line.strip_prefix("MemTotal:")?.split_whitespace().next()?.parse::<u64>().ok());
    let gib = kib.map_or_else(|| "?".to_owned(), |kib| ((kib + (1 << 19)) >> 20).to_string());
    let kernel = read("/proc/sys/kernel/osrelease");
    let kernel = kernel.split('-').next().unwrap_or_default().trim();
    let clients = if cfg!(debug_assertions) { "; clients and agents without optimizations" } else { "" };
    format!("{cores} cores, {gib} GiB, Linux {kernel}{clients}")
}

fn history_file(folder: &Path, history: &History) -> PathBuf {
    folder.join(format!("{}-seed-{}.jsonl", history.header.scenario, history.header.seed))
}

/// Writes the report of all results in `results`, with their pictures, below `docs`. Pictures of scenarios
/// that are not in it any more are removed.
pub(crate) fn write(results: &Path, docs: &Path) -> Result<()> {
    let all = result::read(results)?;
    let pictures = docs.join(PICTURES);
    std::fs::create_dir_all(&pictures).with_context(|| format!("cannot make {}", pictures.display()))?;
    let (page, shown) = page::page(&all, &slow::Kept::read(results)?);
    for old in std::fs::read_dir(&pictures)? {
        let path = old?.path();
        let is_picture = path.extension().is_some_and(|ending| ending == "svg");
        if is_picture && !shown.iter().any(|(_, name)| path.file_name().is_some_and(|file| file == &**name)) {
            std::fs::remove_file(path)?;
        }
    }
    for (file, name) in &shown {
        let from = results.join(format!("{file}.svg"));
        std::fs::copy(&from, pictures.join(name))
            .with_context(|| format!("cannot copy {}", from.display()))?;
    }
    std::fs::write(docs.join(PAGE), page)?;
    eprintln!("{} has the report of {} runs", docs.join(PAGE).display(), all.len());
    Ok(())
}

fn print(result: &RunResult) {
    eprintln!("  {}", page::totals(result));
    for quantity in &result.measured {
        let [p50, p99, worst] = [quantity.at(0.5), quantity.judged(), quantity.worst()].map(number);
        let failed = match (quantity.verdict(), quantity.is_gated(result.no_gates)) {
            (FAILS, true) => "  FAILED",
            (FAILS, false) => "  over its gate",
            _ => "",
        };
        eprintln!(
            "  {:<32} p50 {p50} p99 {p99} max {worst} {} (N {}; target {}, gate {}){failed}",
            quantity.name,
            quantity.unit,
            quantity.values.len(),
            short(quantity.target),
            short(quantity.gate),
        );
    }
    for slope in &result.slopes {
        eprintln!("  {slope}");
    }
    for (invariant, checks) in &result.invariants {
        if checks.checked > 0 {
            eprintln!("  {invariant:<4} {}", checks.words);
        }
    }
    for (count, text) in &result.errors {
        eprintln!("  {count} x {text}");
    }
    for text in result.notes.iter().chain(&result.failures) {
        eprintln!("  {text}");
    }
}

fn number(value: Option<f64>) -> String {
    value.map_or_else(|| "none".to_owned(), short)
}

/// A number with as many digits as tell something.
fn short(value: f64) -> String {
    if value.fract() == 0.0 || value.abs() >= 1000.0 {
        format!("{value:.0}")
    } else if value.abs() >= 99.0 && value <= 100.0 {
        format!("{value:.3}")
    } else {
        format!("{value:.1}")
    }
}

/// The day of a moment in seconds since 1970, in UTC.
fn date(seconds: u64) -> String {
    let seconds = i64::try_from(seconds).unwrap_or(0);
    let text = prost_types::Timestamp { seconds, nanos: 0 }.to_string();
    text.split('T').next().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forms_keep_runs_apart() {
        let form =
            Form { quick: true, tracker: Tracker::Gossip, agents: None, debug: false, no_gates: false };
        assert_eq!(form.to_string(), "quick");
        let form =
            Form { quick: false, tracker: Tracker::Redis, agents: Some(2_000), debug: true, no_gates: true };
        assert_eq!(form.to_string(), "full, redis, 2000 agents, debug build, no gates");
    }

    #[test]
    fn numbers_are_short() {
        assert_eq!([12.0, 99.963, 12.34, 1234.5].map(short), ["12", "99.963", "12.3", "1234"]);
    }

    #[test]
    fn the_report_has_the_pictures_of_this_time_only() {
        let results = tempfile::tempdir().unwrap();
        let docs = tempfile::tempdir().unwrap();
        let old = docs.path().join(PICTURES).join("S99-quick.svg");
        std::fs::create_dir_all(old.parent().unwrap()).unwrap();
        std::fs::write(&old, "<svg/>").unwrap();
        let form = "quick".to_owned();
        let result = RunResult { id: "S02".to_owned(), form, seed: 7, ..RunResult::default() };
        result.save(results.path(), "<svg/>").unwrap();
        write(results.path(), docs.path()).unwrap();
        assert!(!old.exists());
        assert!(docs.path().join(PICTURES).join("S02-quick.svg").exists());
        let page = std::fs::read_to_string(docs.path().join(PAGE)).unwrap();
        assert!(page.contains("](images/chaos/S02-quick.svg)"), "{page}");
    }
}
