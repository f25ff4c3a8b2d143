//! What a run leaves on disk, and the report that is assembled from it.

use std::{
    fmt::Write as _,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};
use history::{History, Invariant};
use serde_json::{Value, json};

use crate::{
    judge::{self, Totals},
    measure::{Better, Measured},
    run::Finished,
    table::{ALL, Scenario, Tracker},
    timeline,
};

/// Whether a scenario passed, and why not.
#[derive(Clone, Debug)]
pub(crate) struct Verdict {
    pub(crate) name: String,
    pub(crate) failures: Vec<String>,
}

/// Judges a finished run, keeps its summary and picture in `out`, and its history if it failed.
pub(crate) fn keep(
    scenario: &Scenario,
    tracker: Tracker,
    finished: &Finished,
    error: Option<&anyhow::Error>,
    quick: bool,
    out: &Path,
) -> Result<Verdict> {
    let history = &finished.history;
    let name = scenario.name(tracker);
    let checked = history::check(history);
    let mut measured = finished.measured.clone();
    measured.extend(judge::whole(scenario.id, quick, history));
    let mut failures: Vec<String> = error.iter().map(|error| format!("{error:#}")).collect();
    for measured in measured.iter().filter(|measured| !measured.passes()) {
        failures.push(match measured.judged() {
            Some(value) => {
                format!("{} is {}, the gate is {}", measured.name, short(value), short(measured.gate))
            }
            None => format!("{} was not measured", measured.name),
        });
    }
    failures.extend(checked.breaches().map(ToString::to_string));
    let totals = Totals::of(history);
    let summary = json!({
        "name": name,
        "tracker": tracker.as_str(),
        "seed": history.header.seed,
        "commit": history.header.commit,
        "quick": quick,
        "seconds": finished.took.as_secs(),
        "failures": failures,
        "totals": {
            "requests": totals.requests, "ok": totals.ok, "retried": totals.retried, "unknown": totals.unknown,
            "not_started": totals.not_started, "other": totals.other, "ok_idempotent": totals.ok_idempotent,
        },
        "runs": history.runs.len(),
        "faults": history.faults.len(),
        "measured": measured.iter().map(row).collect::<Vec<_>>(),
        "invariants": Invariant::ALL.map(|invariant| json!([invariant.to_string(), checked.words(invariant)])),
        "errors": judge::failures(history).into_iter().take(8).collect::<Vec<_>>(),
        "notes": finished.notes,
    });
    std::fs::create_dir_all(out).with_context(|| format!("cannot make {}", out.display()))?;
    std::fs::write(out.join(format!("{name}.json")), serde_json::to_vec_pretty(&summary)?)?;
    let title = format!("{name}: {}", scenario.what);
    std::fs::write(out.join(format!("{name}.svg")), timeline::svg(&title, history))?;
    print(&summary);
    if !failures.is_empty() {
        let path = history_file(out, history);
        history::write(history, std::io::BufWriter::new(std::fs::File::create(&path)?))?;
        eprintln!("  the history is in {}", path.display());
    }
    Ok(Verdict { name, failures })
}

fn history_file(out: &Path, history: &History) -> PathBuf {
    out.join(format!("{}-seed-{}.jsonl", history.header.scenario, history.header.seed))
}

fn row(measured: &Measured) -> Value {
    json!({
        "name": measured.name,
        "unit": measured.unit,
        "n": measured.values.len(),
        "p50": measured.at(0.5),
        "p99": measured.judged(),
        "max": match measured.better { Better::Smaller => measured.at(1.0), Better::Larger => measured.at(0.0) },
        "target": measured.target,
        "gate": measured.gate,
        "passes": measured.passes(),
        "world_class": measured.is_world_class(),
        "reference": measured.reference,
        "how": measured.how,
    })
}

fn print(summary: &Value) {
    let totals = &summary["totals"];
    eprintln!(
        "  {} requests, {} with a response, {} tried elsewhere, {} unknown, {} not started, {} other failures; agents ran {}",
        totals["requests"],
        totals["ok"],
        totals["retried"],
        totals["unknown"],
        totals["not_started"],
        totals["other"],
        summary["runs"]
    );
    for row in list(&summary["measured"]) {
        eprintln!(
            "  {:<32} p50 {} p99 {} max {} {} (N {}; target {}, gate {}){}",
            text(&row["name"]),
            number(&row["p50"]),
            number(&row["p99"]),
            number(&row["max"]),
            text(&row["unit"]),
            row["n"],
            number(&row["target"]),
            number(&row["gate"]),
            if row["passes"] == true { "" } else { "  FAILED" }
        );
    }
    for invariant in list(&summary["invariants"]) {
        let words = text(&invariant[1]);
        if !words.starts_with("not observed") {
            eprintln!("  {:<4} {words}", text(&invariant[0]));
        }
    }
    for error in list(&summary["errors"]) {
        eprintln!("  {} x {}", error[0], text(&error[1]));
    }
    for note in list(&summary["notes"]).iter().chain(list(&summary["failures"])) {
        eprintln!("  {}", text(note));
    }
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

fn number(value: &Value) -> String {
    value.as_f64().map_or_else(|| "none".to_owned(), short)
}

fn short(value: f64) -> String {
    if value.fract() == 0.0 || value.abs() >= 1000.0 {
        format!("{value:.0}")
    } else if value.abs() >= 99.0 && value <= 100.0 {
        format!("{value:.3}")
    } else {
        format!("{value:.1}")
    }
}

/// Writes the report of all summaries in `out`, and their pictures, below `docs`.
pub(crate) fn write(out: &Path, docs: &Path) -> Result<()> {
    let pictures = docs.join("chaos");
    std::fs::create_dir_all(&pictures).with_context(|| format!("cannot make {}", pictures.display()))?;
    let mut summaries = Vec::new();
    let named = |scenario: &'static Scenario| {
        scenario.trackers.iter().map(move |tracker| (scenario, scenario.name(*tracker)))
    };
    for (scenario, name) in ALL.iter().flat_map(named) {
        let path = out.join(format!("{name}.json"));
        let Ok(bytes) = std::fs::read(&path) else { continue };
        let summary: Value =
            serde_json::from_slice(&bytes).with_context(|| format!("{} is no summary", path.display()))?;
        let picture = format!("{name}.svg");
        std::fs::copy(out.join(&picture), pictures.join(&picture))?;
        summaries.push((scenario, summary));
    }
    std::fs::write(docs.join("chaos.md"), document(&summaries))?;
    Ok(())
}

const HEAD: &str = "\
# Chaos

Real replicas of kas in network namespaces, agents with the library of agentk, clients, and faults. After each
scenario one checker reads what clients, agents and replicas recorded. `cargo xtask chaos --report docs` writes
this page; do not edit it. A row that fails stays here as failing.

A client knows all replicas. It sends a request once more, to another replica, if the connection was refused, the
stream was refused, or kas says that the request was not started. Everything else that fails is *unknown*: the
checker proves from the records of the agents that none of it ran twice.

Times that are taken from views of replicas include up to 50 ms (lists of replicas) or 500 ms (agents) until the
next look. *Target* is what the project wants to publish, and *gate* is what fails a run on two shared cores.
";

fn document(summaries: &[(&Scenario, Value)]) -> String {
    let mut out = String::from(HEAD);
    // Writing to a string does not fail.
    let _ = writeln!(out, "\n## Scenarios\n\n| | fault | asserted | result |\n| --- | --- | --- | --- |");
    for scenario in ALL {
        let found = summaries.iter().filter(|(other, _)| other.id == scenario.id);
        let links: Vec<String> = found
            .map(|(_, summary)| {
                let passes = list(&summary["failures"]).is_empty();
                let words = if passes { "passes" } else { "**FAILS**" };
                let with = if summary["tracker"] == "redis" { " with Redis" } else { "" };
                format!("[{words}{with}](#{})", text(&summary["name"]).to_lowercase())
            })
            .collect();
        let result = match (links.is_empty(), scenario.elsewhere) {
            (false, _) => links.join(", "),
            (true, Some(why)) => format!("does not run here: {why}"),
            (true, None) => "was not run".to_owned(),
        };
        let _ = writeln!(out, "| {} | {} | {} | {result} |", scenario.id, scenario.what, scenario.asserted);
    }
    for (scenario, summary) in summaries {
        section(&mut out, scenario, summary);
    }
    out
}

fn section(out: &mut String, scenario: &Scenario, summary: &Value) {
    let totals = &summary["totals"];
    let name = text(&summary["name"]);
    let _ = writeln!(
        out,
        "\n## {name}\n\n{}{}. Seed {}, commit {}, {} s{}.\n\n![{name}](chaos/{name}.svg)\n",
        scenario.what,
        if summary["tracker"] == "redis" { ", with Redis" } else { "" },
        summary["seed"],
        text(&summary["commit"]),
        summary["seconds"],
        if summary["quick"] == true { ", the quick form" } else { "" },
    );
    let _ = writeln!(
        out,
        "{} requests: {} with a response, {} tried once more elsewhere, {} unknown, {} not started, {} other \
         failures. Agents recorded {} runs. The nemesis struck {} times.\n",
        totals["requests"],
        totals["ok"],
        totals["retried"],
        totals["unknown"],
        totals["not_started"],
        totals["other"],
        summary["runs"],
        summary["faults"]
    );
    if !list(&summary["measured"]).is_empty() {
        let _ = writeln!(
            out,
            "| | N | p50 | p99 or worst | max | target | gate | | others publish | from, to |\n\
             | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
        );
        for row in list(&summary["measured"]) {
            let verdict = match (row["passes"] == true, row["world_class"] == true) {
                (_, true) => "target",
                (true, false) => "gate",
                (false, false) => "**fails**",
            };
            let _ = writeln!(
                out,
                "| {} | {} | {} | {} | {} {} | {} | {} | {verdict} | {} | {} |",
                text(&row["name"]),
                row["n"],
                number(&row["p50"]),
                number(&row["p99"]),
                number(&row["max"]),
                text(&row["unit"]),
                number(&row["target"]),
                number(&row["gate"]),
                text(&row["reference"]),
                text(&row["how"])
            );
        }
        let _ = writeln!(out);
    }
    let invariants: Vec<String> = list(&summary["invariants"])
        .iter()
        .map(|invariant| format!("{} {}", text(&invariant[0]), text(&invariant[1])))
        .collect();
    let (seen, unseen): (Vec<String>, Vec<String>) =
        invariants.into_iter().partition(|words| !words.contains("not observed"));
    let _ = writeln!(out, "Invariants: {}.\n", seen.join("; "));
    let _ = writeln!(out, "Without observation: {}.", unseen.join("; ").replace(" not observed:", ","));
    for note in list(&summary["notes"]) {
        let _ = writeln!(out, "\n{}", text(note));
    }
    for failure in list(&summary["failures"]) {
        let _ = writeln!(out, "\n**Fails**: {}", text(failure));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failing_row_stays_as_failing() {
        let scenario = &ALL[1];
        let summary = json!({ "name": "S02", "failures": ["T_kill is 600, the gate is 500"], "totals": {}, "measured": [] });
        let text = document(&[(scenario, summary)]);
        assert!(text.contains("[**FAILS**](#s02)") && text.contains("**Fails**: T_kill is 600"), "{text}");
        assert!(text.contains("| S01 |") && text.contains("was not run"), "{text}");
        assert!(text.contains("does not run here: "), "{text}");
    }

    #[test]
    fn numbers_are_short() {
        assert_eq!([12.0, 99.963, 12.34, 1234.5].map(short), ["12", "99.963", "12.3", "1234"]);
    }
}
