//! What takes longer than the checks allow, with the last result of each: long forms of scenarios, and many
//! seeds of the simulation.

use std::{
    fmt::Write as _,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};
use serde::Deserialize;

use super::{
    date,
    result::{RunResult, SIMULATION},
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
    ("cargo xtask chaos --scenario S30", "S30", "12 min"),
    ("cargo xtask chaos --scenario S31 --agents 10000", "S31", "5 min"),
    ("cargo xtask chaos --scenario S48", "S48", "1 h"),
];

/// What a run of the simulation left.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Simulated {
    started: u64,
    commit: String,
    command: String,
    seeds: u64,
    failed: Vec<u64>,
    simulated: u64,
    faults: u64,
    requests: u64,
    seconds: u64,
}

impl Simulated {
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

/// Reads the results of the simulation in a folder, in the order in which they began.
///
/// # Errors
/// If one cannot be read.
pub(super) fn simulated(folder: &Path) -> Result<Vec<Simulated>> {
    let entries = std::fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    let mut all = Vec::new();
    for entry in entries {
        let path: PathBuf = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if name.starts_with(SIMULATION) && name.ends_with(".json") {
            let bytes = std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
            let one: Simulated = serde_json::from_slice(&bytes)
                .with_context(|| format!("{} is no result of the simulation", path.display()))?;
            all.push(one);
        }
    }
    all.sort_by_key(|one| one.started);
    Ok(all)
}

/// Writes both tables.
pub(super) fn section(out: &mut String, results: &[RunResult], simulated: &[Simulated]) {
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
    let _ = writeln!(
        out,
        "\n## Simulation\n\nThe same router, registry, tables and gossip over a simulated network and clock, where a seed \
         decides everything. `cargo xtask ci` runs 50 seeds; `cargo xtask sim --seeds 10000` as many as it says, and \
         `--report target/chaos` keeps the result for this page. A seed that fails prints the command that repeats it.\n\n\
         | run | command | commit | seeds | failed | simulated | faults | requests | took |\n\
         | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    );
    for one in simulated {
        let Simulated { started, commit, command, seeds, failed, simulated, faults, requests, seconds } = one;
        let named: Vec<String> = failed.iter().take(NAMED).map(u64::to_string).collect();
        let failed = match failed.len() {
            0 => "0".to_owned(),
            many => format!("**{many}**: seeds {}", named.join(", ")),
        };
        let _ = writeln!(
            out,
            "| {} | `{command}` | {commit} | {seeds} | {failed} | {simulated} s | {faults} | {requests} | {seconds} s |",
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
        let simulated = simulated(folder.path()).unwrap();
        let mut out = String::new();
        section(&mut out, &results, &simulated);
        assert!(out.contains("[passes](#s02) (full), 1970-01-01, commit abc"), "{out}");
        assert!(out.contains("[**FAILS**](#s30) (full)"), "{out}");
        assert!(out.contains("S48` | 1 h | was not run"), "{out}");
        assert!(
            out.contains("| 2 h | was not run to its end; the last run: 1970-01-01, commit def, 9 seeds"),
            "{out}"
        );
        assert!(out.contains("`cargo xtask sim --seeds 9` | def | 9 | **1**: seeds 4 | 90 s"), "{out}");
        std::fs::write(folder.path().join("simulation-6.json"), "{").unwrap();
        assert!(super::simulated(folder.path()).is_err(), "it is not left out silently");
    }
}
