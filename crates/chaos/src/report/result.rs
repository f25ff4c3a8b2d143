//! What is kept of a run: one JSON file, which a later report reads again.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};
use history::{History, Invariant};
use serde::{Deserialize, Serialize};

use super::Form;
use crate::{
    judge::{self, Totals},
    measure::{Better, Measured},
    slope::Slope,
    timeline,
};

/// How the files begin in which `cargo xtask sim --report` keeps its results, and `cargo xtask museum
/// --report`.
pub(super) const SIMULATION: &str = "simulation-";
pub(super) const MUSEUM: &str = "museum-";

/// Messages of failures that are kept of a run, the most frequent first.
const ERRORS: usize = 8;

/// What is said of a quantity that misses its gate.
pub(super) const FAILS: &str = "**fails**";

/// The result of one run.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct RunResult {
    /// The scenario.
    pub(crate) id: String,
    /// `quick` or `full`, and what else makes runs incomparable: another tracker, for example.
    pub(crate) form: String,
    /// Its times fail nothing.
    pub(crate) no_gates: bool,
    /// The machine, in words.
    pub(crate) machine: String,
    /// When it began, in seconds since 1970: only shown, and for the order of runs.
    pub(crate) started: u64,
    pub(crate) seed: u64,
    pub(crate) commit: String,
    /// How long it took.
    pub(crate) seconds: u64,
    /// Why it failed; empty: it passed.
    pub(crate) failures: Vec<String>,
    pub(crate) totals: Totals,
    /// Requests that agents recorded.
    pub(crate) runs: u64,
    /// How often the nemesis struck, by what it did.
    pub(crate) faults: BTreeMap<String, u32>,
    pub(crate) measured: Vec<Quantity>,
    /// By invariant.
    pub(crate) invariants: BTreeMap<String, Checks>,
    pub(crate) slopes: Vec<Slope>,
    /// How often each message of a failure came.
    pub(crate) errors: Vec<(u32, String)>,
    pub(crate) notes: Vec<String>,
}

/// What was found of an invariant.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Checks {
    pub(crate) checked: u64,
    pub(crate) broken: u64,
    /// The verdict in words: why it was not observed, for example.
    pub(crate) words: String,
}

/// A measured quantity with all its values, so that those of several runs can be put together.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Quantity {
    pub(crate) name: String,
    pub(crate) unit: String,
    pub(crate) better: Better,
    pub(crate) target: f64,
    pub(crate) gate: f64,
    pub(crate) reference: String,
    pub(crate) how: String,
    pub(crate) values: Vec<f64>,
}

impl From<&Measured> for Quantity {
    fn from(measured: &Measured) -> Self {
        let Measured { name, unit, better, target, gate, reference, how, values } = measured;
        let texts = [name, unit, reference, how].map(|text| (*text).to_owned());
        let [name, unit, reference, how] = texts;
        // Microseconds of a time, and thousandths of a percent, are enough.
        let values = values.iter().map(|value| (value * 1000.0).round() / 1000.0).collect();
        Self { name, unit, better: *better, target: *target, gate: *gate, reference, how, values }
    }
}

impl Quantity {
    /// Returns the value below which a share of the values is; `None`: there are none.
    pub(crate) fn at(&self, share: f64) -> Option<f64> {
        crate::measure::percentile(&self.values, share)
    }

    /// The value that is judged: the 99th percentile, or the worst of what should be large.
    pub(crate) fn judged(&self) -> Option<f64> {
        match self.better {
            Better::Smaller => self.at(0.99),
            Better::Larger => self.at(0.0),
        }
    }

    /// Whether it fails a run when it misses its gate.
    pub(crate) fn is_gated(&self, no_gates: bool) -> bool {
        !no_gates || self.unit != crate::measure::TIME
    }

    /// The worst value.
    pub(crate) fn worst(&self) -> Option<f64> {
        match self.better {
            Better::Smaller => self.at(1.0),
            Better::Larger => self.at(0.0),
        }
    }

    fn within(&self, limit: f64) -> bool {
        self.judged().is_some_and(|value| match self.better {
            Better::Smaller => value <= limit,
            Better::Larger => value >= limit,
        })
    }

    /// What it reaches: `target`, `gate`, or that it fails.
    pub(crate) fn verdict(&self) -> &'static str {
        if self.within(self.target) {
            "target"
        } else if self.within(self.gate) {
            "gate"
        } else {
            FAILS
        }
    }
}

impl RunResult {
    /// Judges what a run left.
    pub(crate) fn of(history: &History, measured: &[Measured], form: Form) -> Self {
        let checked = history::check(history);
        let mut failures = Vec::new();
        for measured in measured.iter().filter(|measured| !measured.passes(form.no_gates)) {
            let short = super::short;
            failures.push(match measured.judged() {
                Some(value) => {
                    format!("{} is {}, the gate is {}", measured.name, short(value), short(measured.gate))
                }
                None => format!("{} was not measured", measured.name),
            });
        }
        failures.extend(checked.breaches().map(ToString::to_string));
        let mut faults: BTreeMap<String, u32> = BTreeMap::new();
        for fault in &history.faults {
            *faults.entry(timeline::kind(fault).0.to_owned()).or_default() += 1;
        }
        let checks = |invariant: Invariant| {
            let verdict = checked.of(invariant);
            let words = checked.words(invariant);
            (invariant.to_string(), Checks { checked: verdict.checked, broken: verdict.broken, words })
        };
        Self {
            id: history.header.scenario.clone(),
            form: form.to_string(),
            no_gates: form.no_gates,
            seed: history.header.seed,
            commit: history.header.commit.clone(),
            failures,
            totals: Totals::of(history),
            runs: history.runs.len() as u64,
            faults,
            measured: measured.iter().map(Quantity::from).collect(),
            invariants: Invariant::ALL.map(checks).into(),
            errors: judge::failures(history).into_iter().take(ERRORS).collect(),
            ..Self::default()
        }
    }

    /// Why an invariant that must have been observed does not count as holding: it was never checked.
    pub(crate) fn unseen(&self, invariant: Invariant) -> Option<String> {
        let name = invariant.to_string();
        match self.invariants.get(&name) {
            Some(checks) if checks.checked > 0 => None,
            Some(checks) => Some(format!("{name} was never checked: {}", checks.words)),
            None => Some(format!("{name} was never checked")),
        }
    }

    pub(crate) fn passes(&self) -> bool {
        self.failures.is_empty()
    }

    /// The name of its files, without the ending.
    pub(crate) fn file(&self) -> String {
        format!("{}-{}-{}", self.id, self.started, self.seed)
    }

    /// Keeps it and its picture.
    pub(crate) fn save(&self, folder: &Path, picture: &str) -> Result<()> {
        std::fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let write = |ending: &str, content: &[u8]| {
            let path = folder.join(format!("{}.{ending}", self.file()));
            std::fs::write(&path, content).with_context(|| format!("cannot write {}", path.display()))
        };
        write("svg", picture.as_bytes())?;
        write("json", &serde_json::to_vec_pretty(self)?)
    }
}

/// Reads all results of a folder, in the order in which their runs began. Other files are left alone.
///
/// # Errors
/// If the folder or a file of results cannot be read: a report that leaves one out would be wrong.
pub(crate) fn read(folder: &Path) -> Result<Vec<RunResult>> {
    let entries = std::fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    let mut results = Vec::new();
    for entry in entries {
        let path: PathBuf = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if !name.ends_with(".json") || [SIMULATION, MUSEUM].iter().any(|other| name.starts_with(other)) {
            continue;
        }
        let bytes = std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let result: RunResult = serde_json::from_slice(&bytes)
            .with_context(|| format!("{} is no result of a run", path.display()))?;
        if path.file_stem().is_some_and(|stem| stem == result.file().as_str()) {
            results.push(result);
        }
    }
    results.sort_by_key(|result| (result.started, result.file()));
    Ok(results)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::T_KILL;

    const QUICK: Form = Form {
        quick: true,
        tracker: crate::table::Tracker::Gossip,
        agents: None,
        debug: false,
        no_gates: false,
    };

    #[test]
    fn results_accumulate_and_are_read_in_order() {
        let folder = tempfile::tempdir().unwrap();
        for (started, seed) in [(30, 1), (20, 2)] {
            let result = RunResult { id: "S02".to_owned(), started, seed, ..RunResult::default() };
            result.save(folder.path(), "<svg/>").unwrap();
        }
        std::fs::write(folder.path().join("S02-seed-1.jsonl"), "a history").unwrap();
        let seeds: Vec<u64> = read(folder.path()).unwrap().iter().map(|result| result.seed).collect();
        assert_eq!(seeds, [2, 1]);
        std::fs::write(folder.path().join("simulation-5.json"), r#"{"faults": 5}"#).unwrap();
        assert_eq!(read(folder.path()).unwrap().len(), 2, "it is read elsewhere");
        std::fs::write(folder.path().join("S03-1-1.json"), "{").unwrap();
        assert!(read(folder.path()).is_err(), "a result that cannot be read is not left out silently");
    }

    #[test]
    fn what_was_not_measured_or_is_too_slow_fails() {
        let mut kill = Measured::new(&T_KILL);
        let history = History::default();
        let result = RunResult::of(&history, std::slice::from_ref(&kill), QUICK);
        assert_eq!(result.failures, ["T_kill was not measured"]);
        let no_gates = RunResult::of(&history, std::slice::from_ref(&kill), Form { no_gates: true, ..QUICK });
        assert_eq!(no_gates.failures, ["T_kill was not measured"]);
        kill.values = vec![600.0];
        let result = RunResult::of(&history, &[kill.clone()], QUICK);
        assert_eq!(result.failures, ["T_kill is 600, the gate is 500"]);
        assert_eq!(result.measured[0].verdict(), FAILS);
        let no_gates = RunResult::of(&history, &[kill], Form { no_gates: true, ..QUICK });
        assert!(no_gates.passes() && no_gates.no_gates, "{:?}", no_gates.failures);
        assert_eq!(no_gates.form, "quick, no gates");
        assert!(result.invariants["I1"].words.starts_with("not observed"));
        let unseen = result.unseen(Invariant::I1).unwrap();
        assert!(unseen.starts_with("I1 was never checked: not observed"), "{unseen}");
    }
}
