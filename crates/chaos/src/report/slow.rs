//! What takes longer than the checks allow, with the last result of each: long forms of scenarios, many seeds
//! of the simulation, and the tests of the bug museum with real processes.

use std::{
    fmt::Write as _,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};
use serde::{Deserialize, de::DeserializeOwned};

use super::{
    date,
    result::{MUSEUM, RunResult, SIMULATION},
};

/// How many seeds the long form of the simulation has.
const SEEDS: u64 = 10_000;
/// Seeds that failed are named up to this many.
const NAMED: usize = 20;

/// Commands that take minutes or hours, the scenario of each, and about how long.
const COMMANDS: [(&str, &str, &str); 6] = [
    ("cargo xtask chaos --scenario S02", "S02", "10 min"),
    ("cargo xtask chaos --scenario S09", "S09", "30 min"),
    ("cargo xtask chaos --scenario S09G", "S09G", "12 min"),
    ("cargo xtask chaos --scenario S30", "S30", "22 min"),
    ("cargo xtask chaos --scenario S31 --agents 10000", "S31", "5 min"),
    ("cargo xtask chaos --scenario S48", "S48", "1 h"),
];

/// What a run of the simulation left, or several that add up to one.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Simulated {
    started: u64,
    commit: String,
    command: String,
    /// Its first seed, and the options that say what a seed means. A run that does not say them is never
    /// added to another one.
    #[serde(default)]
    first: Option<u64>,
    #[serde(default)]
    options: String,
    /// Of so many runs.
    #[serde(skip, default = "one")]
    runs: u64,
    seeds: u64,
    failed: Vec<u64>,
    simulated: u64,
    faults: u64,
    requests: u64,
    seconds: u64,
}

/// A file holds one run.
fn one() -> u64 {
    1
}

impl Simulated {
    /// Returns the seed after its last one.
    fn next(&self) -> Option<u64> {
        self.first.map(|first| first.saturating_add(self.seeds))
    }

    /// Whether `later` has run the seeds after these, by the same programs and with the same options.
    fn goes_on(&self, later: &Self) -> bool {
        let same = self.commit == later.commit && self.options == later.options;
        same && later.first.is_some() && self.next() == later.first
    }

    /// Adds a run that [goes on](Self::goes_on) with the next seeds.
    fn append(&mut self, later: Self) {
        self.started = self.started.min(later.started);
        self.runs += later.runs;
        self.seeds += later.seeds;
        self.failed.extend(later.failed);
        self.simulated += later.simulated;
        self.faults += later.faults;
        self.requests += later.requests;
        self.seconds += later.seconds;
        let from = self.first.filter(|first| *first != 1).map(|first| format!(" --seed {first}"));
        let (seeds, from) = (self.seeds, from.unwrap_or_default());
        self.command = format!("cargo xtask sim --seeds {seeds}{from}{}", self.options);
    }

    /// The run in a few words.
    fn words(&self) -> String {
        let Self { started, commit, seeds, failed, .. } = self;
        let failed = match failed.len() {
            0 => "none failed".to_owned(),
            many => format!("**{many} failed**"),
        };
        format!("{}, commit {commit}, {seeds} seeds, {failed}: see [Simulation](#simulation)", date(*started))
    }
}

/// Adds up runs that go on with the seeds of each other, whichever ran first. A seed that ran twice is in two
/// rows, and counts once in each.
fn add_up(mut all: Vec<Simulated>) -> Vec<Simulated> {
    all.sort_by_key(|one| (one.first, one.started));
    let mut sums: Vec<Simulated> = Vec::new();
    for one in all {
        match sums.iter_mut().find(|sum| sum.goes_on(&one)) {
            Some(sum) => sum.append(one),
            None => sums.push(one),
        }
    }
    sums.sort_by_key(|one| one.started);
    sums
}

/// What a run of the museum left.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Shown {
    started: u64,
    commit: String,
    command: String,
    /// Tests with real processes, those of them that have a flaw, and those that passed without and failed
    /// with it.
    tests: u64,
    flawed: u64,
    both: u64,
    /// Those that did otherwise, in one direction or both.
    failed: Vec<String>,
    seconds: u64,
}

impl Shown {
    /// The run in a few words.
    fn words(&self) -> String {
        let Self { started, commit, command, tests, flawed, both, failed, seconds } = self;
        let failed =
            if failed.is_empty() { "passes".to_owned() } else { format!("**FAILS**: {}", failed.join(", ")) };
        format!(
            "{failed}, {}, commit {commit}, `{command}`, {seconds} s: {tests} tests with real processes; {both} of {flawed} \
             that have a flaw pass without it and fail with it",
            date(*started)
        )
    }
}

/// The results of other commands than `cargo xtask chaos`, in the order in which they began.
#[derive(Clone, Debug, Default)]
pub(super) struct Kept {
    simulated: Vec<Simulated>,
    museum: Vec<Shown>,
}

impl Kept {
    /// Reads those in a folder. Runs of the simulation with consecutive seeds are one.
    ///
    /// # Errors
    /// If one cannot be read.
    pub(super) fn read(folder: &Path) -> Result<Self> {
        let simulated = add_up(read(folder, SIMULATION)?);
        let mut kept = Self { simulated, museum: read(folder, MUSEUM)? };
        kept.museum.sort_by_key(|one| one.started);
        Ok(kept)
    }
}

/// Reads the files whose names begin with this.
fn read<T: DeserializeOwned>(folder: &Path, begin: &str) -> Result<Vec<T>> {
    let entries = std::fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    let mut all = Vec::new();
    for entry in entries {
        let path: PathBuf = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if name.starts_with(begin) && name.ends_with(".json") {
            let bytes = std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
            let one = serde_json::from_slice(&bytes)
                .with_context(|| format!("{} is no result of such a run", path.display()))?;
            all.push(one);
        }
    }
    Ok(all)
}

/// Writes both tables.
pub(super) fn section(out: &mut String, results: &[RunResult], kept: &Kept) {
    let Kept { simulated, museum } = kept;
    // Writing to a string does not fail.
    let _ = writeln!(
        out,
        "\n## Commands that take long\n\nThey are not among the checks. The last result of each:\n\n\
         | command | takes | last result |\n| --- | --- | --- |"
    );
    for (command, id, takes) in COMMANDS {
        let last = results.iter().rfind(|result| result.id == id && result.form.starts_with("full"));
        let words = last.map_or_else(
            || "was not run".to_owned(),
            |last| {
                let verdict = if last.passes() { "passes" } else { "**FAILS**" };
                format!(
                    "[{verdict}](#{}) ({}), {}, commit {}, {} s, {} requests, {} without a response",
                    id.to_lowercase(),
                    last.form,
                    date(last.started),
                    last.commit,
                    last.seconds,
                    last.totals.requests,
                    last.totals.requests.saturating_sub(last.totals.ok)
                )
            },
        );
        let _ = writeln!(out, "| `{command}` | {takes} | {words} |");
    }
    let many = simulated.iter().rfind(|one| one.seeds >= SEEDS);
    let words = match (many, simulated.last()) {
        (Some(one), _) => one.words(),
        (None, Some(last)) => format!("was not run to its end; the last run: {}", last.words()),
        (None, None) => "was not run".to_owned(),
    };
    let _ = writeln!(out, "| `cargo xtask sim --seeds {SEEDS}` | 2 h | {words} |");
    // A run without the slow tests says nothing about them.
    let museum = museum.iter().rfind(|one| one.command.contains("--slow"));
    let words = museum.map_or_else(|| "was not run".to_owned(), Shown::words);
    let _ = writeln!(out, "| `cargo xtask museum --processes --slow` | 15 min | {words} |");
    let _ = writeln!(
        out,
        "\n## Simulation\n\nThe same router, registry, tables and gossip over a simulated network and clock, where a seed \
         decides everything. `cargo xtask ci` runs 50 seeds; `cargo xtask sim --seeds 10000` as many as it says, and \
         `--report target/chaos` keeps the result for this page. A seed that fails prints the command that repeats it. \
         Runs of one commit that go on with the seeds of each other are one row.\n\n\
         | run | command | commit | runs | seeds | failed | simulated | faults | requests | took |\n\
         | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    );
    for one in simulated {
        let Simulated { started, commit, command, runs, failed, simulated, faults, requests, .. } = one;
        let (seeds, seconds) = (one.seeds, one.seconds);
        let named: Vec<String> = failed.iter().take(NAMED).map(u64::to_string).collect();
        let failed = match failed.len() {
            0 => "0".to_owned(),
            many => format!("**{many}**: seeds {}", named.join(", ")),
        };
        let _ = writeln!(
            out,
            "| {} | `{command}` | {commit} | {runs} | {seeds} | {failed} | {simulated} s | {faults} | {requests} | {seconds} s |",
            date(*started)
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_long_form_is_named_and_what_failed_stays_visible() {
        let result = |id: &str, form: &str, failures: &[&str]| RunResult {
            id: id.to_owned(),
            form: form.to_owned(),
            commit: "abc".to_owned(),
            failures: failures.iter().map(|&failure| failure.to_owned()).collect(),
            ..RunResult::default()
        };
        let results = [
            result("S02", "full", &[]),
            result("S02", "quick", &[]),
            result("S30", "full", &["memory grew"]),
        ];
        let folder = tempfile::tempdir().unwrap();
        let kept = r#"{"started": 5, "commit": "def", "command": "cargo xtask sim --seeds 9", "seeds": 9,
            "failed": [4], "simulated": 90, "faults": 8, "requests": 70, "seconds": 6}"#;
        std::fs::write(folder.path().join("simulation-5.json"), kept).unwrap();
        let shown = |command: &str| {
            format!(
                r#"{{"started": 5, "commit": "fed", "command": "{command}", "tests": 9, "flawed": 6, "both": 5,
                "failed": ["one"], "seconds": 7}}"#
            )
        };
        std::fs::write(folder.path().join("museum-5.json"), shown("museum --slow")).unwrap();
        std::fs::write(folder.path().join("museum-6.json"), shown("museum")).unwrap();
        let kept = Kept::read(folder.path()).unwrap();
        let mut out = String::new();
        section(&mut out, &results, &kept);
        assert!(
            out.contains("| **FAILS**: one, 1970-01-01, commit fed, `museum --slow`, 7 s: 9 tests"),
            "{out}"
        );
        assert!(out.contains("[passes](#s02) (full), 1970-01-01, commit abc"), "{out}");
        assert!(out.contains("[**FAILS**](#s30) (full)"), "{out}");
        assert!(out.contains("S48` | 1 h | was not run"), "{out}");
        assert!(
            out.contains("| 2 h | was not run to its end; the last run: 1970-01-01, commit def, 9 seeds"),
            "{out}"
        );
        assert!(out.contains("`cargo xtask sim --seeds 9` | def | 1 | 9 | **1**: seeds 4 | 90 s"), "{out}");
        std::fs::write(folder.path().join("simulation-6.json"), "{").unwrap();
        assert!(Kept::read(folder.path()).is_err(), "it is not left out silently");
    }

    #[test]
    fn runs_of_consecutive_seeds_are_one() {
        let run = |started, commit: &str, first, seeds, failed: &[u64], options: &str| Simulated {
            started,
            commit: commit.to_owned(),
            command: "as it was".to_owned(),
            first,
            options: options.to_owned(),
            runs: 1,
            seeds,
            failed: failed.to_vec(),
            simulated: 10 * seeds,
            faults: 2,
            requests: 3,
            seconds: 4,
        };
        let sums = add_up(vec![
            run(9, "a", Some(1), 500, &[], ""),
            // The second half began first.
            run(5, "a", Some(501), 500, &[777], ""),
            run(12, "a", Some(1001), 500, &[], ""),
            // Again the same seeds, another program, other options, a gap, and one that says nothing.
            run(13, "a", Some(501), 500, &[], ""),
            run(14, "b", Some(1501), 500, &[], ""),
            run(15, "a", Some(1501), 500, &[], " --agents 200"),
            run(16, "a", Some(1502), 500, &[], ""),
            run(17, "a", None, 500, &[], ""),
        ]);
        let seeds: Vec<u64> = sums.iter().map(|sum| sum.seeds).collect();
        assert_eq!(seeds, [1500, 500, 500, 500, 500, 500], "{sums:#?}");
        let sum = &sums[0];
        assert_eq!((sum.started, sum.runs, &*sum.failed), (5, 3, &[777][..]));
        assert_eq!((sum.simulated, sum.faults, sum.requests, sum.seconds), (15_000, 6, 9, 12));
        assert_eq!(sum.command, "cargo xtask sim --seeds 1500");
        assert!(sums[1..].iter().all(|one| one.command == "as it was" && one.runs == 1));
        let later = add_up(vec![
            run(1, "a", Some(3), 2, &[], " --rate 5"),
            run(2, "a", Some(5), 1, &[], " --rate 5"),
        ]);
        assert_eq!(later[0].command, "cargo xtask sim --seeds 3 --seed 3 --rate 5");
    }
}
