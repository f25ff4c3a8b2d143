//! The page that shows all results.

use std::{collections::BTreeMap, fmt::Write as _};

use history::Invariant;

use super::{
    date, number,
    result::{FAILS, Quantity, RunResult},
    short,
    slow::{self, Kept},
};
use crate::{
    measure::Better,
    slope::Tells,
    table::{ALL, Scenario},
};

const HEAD: &str = "\
# Chaos

Real replicas of kas in network namespaces, agents with the library of agentk, clients, and faults. After each
scenario one checker reads what clients, agents and replicas recorded. `cargo xtask chaos --write-docs` writes
this page from the results of all runs that are kept; do not edit it. A row that fails stays here as failing.

A client knows all replicas. It sends a request once more, to another replica, if the connection was refused, the
stream was refused, or kas says that the request was not started. What fails nevertheless is in one of three columns.
*Not started*: nothing reached an agent, and the second attempt, if there was one, did not either. *Unknown*: it may
have run. The checker proves from the records of the agents that none of these ran twice. *Other*: a credential, a
rule or a limit refused it, or it ended with an error of the application, or not at all; the row *failures that say
nothing* counts these. *With idempotent retry* counts what the client gets that repeats unknown ones, too.

These columns are about requests with one response. Streams, watches, upgraded connections, requests with a credential
that is not valid any more, and requests that wait for an agent that is not there are not in them. S25 and S26 consist
of the latter, so they have no requests, although agents recorded runs: their rows and notes say what became of them.

*Target* is what the project wants to publish, and *gate* is what fails a run on two shared cores. Times that are
taken from views of replicas include the time until the next look: up to 50 ms for lists of replicas, and up to
the period that a row names for agents.

*Judged* is the value that is compared with target and gate: the 99th percentile, or the smallest value of what should
be large, which is said at the unit. *Worst* is the largest value, or the smallest one of these. T_grace is such a
row: it is how much longer than its grace an upgraded connection lived, so a worst value above 0 means that none ended
early.

Where sizes *return to within 5 %* of what they were before a fault, 1 MiB of memory, 4 descriptors and 8 tasks are
allowed in addition, and 16 MiB of memory in S34: memory comes in pages of the allocator, and a connection may just be open.

*Full* and *quick* are the two lengths of a scenario. *No gates* means that a time fails only beyond ten times its
gate, because the machine was busy or the programs were not optimized; such runs are not in the table of targets.

In every scenario, each failure says whether the request may have run, and no request fails that was sent more than
10 s after a fault, with all replicas running. An invariant that a scenario must observe and did not fails it, and
so does a cut of the network that dropped no packet.

Replicas with odd numbers serve agents over TLS, the others over plain HTTP/2; in S31 all serve over TLS, and none in
scenarios with agents of their own, or with bad networks before agents: S21b, S24, S27, S28, S46, S49, S50, S52, S55
and S56.

`cargo xtask chaos --scenario S02 --seed N` repeats a run: the *nemesis*, which makes the faults, chooses the same,
but processes are not scheduled in the same way. The history of a run, which the checker reads, is kept only if the run
fails. Of a run that passes, its result, its picture and its notes are kept.
";

/// How many failures of a run are shown.
const FAILURES: usize = 10;
/// The faults of the product that runs have found.
const FOUND: &str = include_str!("found.md");

/// Runs of one scenario in one form, of the commit that ran last, and those of earlier commits.
struct Row<'a> {
    present: Vec<&'a RunResult>,
    earlier: Vec<&'a RunResult>,
}

impl Row<'_> {
    fn last(&self) -> Option<&RunResult> {
        self.present.last().copied()
    }

    fn failed(&self) -> usize {
        self.present.iter().filter(|result| !result.passes()).count()
    }

    /// Whether it is open if a size grows.
    fn undecided(&self) -> bool {
        self.last().is_some_and(|last| last.slopes.iter().any(|slope| slope.tells() == Tells::Undecided))
    }

    /// All values of each quantity.
    fn quantities(&self) -> Vec<Quantity> {
        let mut all: Vec<Quantity> = Vec::new();
        for quantity in self.present.iter().flat_map(|result| &result.measured) {
            add(&mut all, quantity);
        }
        all
    }
}

fn add(all: &mut Vec<Quantity>, quantity: &Quantity) {
    match all.iter_mut().find(|other| other.name == quantity.name) {
        Some(other) => other.values.extend(&quantity.values),
        None => all.push(quantity.clone()),
    }
}

/// Sorts results by form. Runs of the commit that ran last in a form are put together.
fn rows<'a>(id: &str, results: &'a [RunResult]) -> BTreeMap<&'a str, Row<'a>> {
    let mut rows: BTreeMap<&str, Row<'_>> = BTreeMap::new();
    for result in results.iter().filter(|result| result.id == id) {
        let row = rows
            .entry(result.form.as_str())
            .or_insert_with(|| Row { present: Vec::new(), earlier: Vec::new() });
        if row.last().is_some_and(|last| last.commit != result.commit) {
            row.earlier.append(&mut row.present);
        }
        row.present.push(result);
    }
    rows
}

/// Returns the page, and the pictures that it shows: the file of each result, and the name of its picture.
pub(super) fn page(results: &[RunResult], kept: &Kept) -> (String, Vec<(String, String)>) {
    let mut out = String::from(HEAD);
    machines(&mut out, results);
    let mut shown = Vec::new();
    let all: Vec<_> = ALL.iter().map(|scenario| (scenario, rows(scenario.id, results))).collect();
    // Writing to a string does not fail.
    let _ = writeln!(out, "\n## Scenarios\n\n| | fault | asserted | result |\n| --- | --- | --- | --- |");
    for (scenario, rows) in &all {
        let Scenario { id, what, asserted, .. } = scenario;
        let _ = writeln!(out, "| {id} | {what} | {asserted} | {} |", verdict(scenario, rows));
    }
    targets(&mut out, all.iter().flat_map(|(_, rows)| rows.values()));
    invariants(&mut out, all.iter().flat_map(|(_, rows)| rows.values()));
    slow::section(&mut out, results, kept);
    let _ = writeln!(out, "\n{}", FOUND.trim_end());
    for (scenario, rows) in &all {
        if !rows.is_empty() {
            section(&mut out, scenario, rows, &mut shown);
        }
    }
    (out, shown)
}

/// Says where all of this was measured, and with which programs.
fn machines(out: &mut String, results: &[RunResult]) {
    let mut machines: BTreeMap<&str, usize> = BTreeMap::new();
    for result in results.iter().filter(|result| !result.machine.is_empty()) {
        *machines.entry(&result.machine).or_default() += 1;
    }
    let machines: Vec<String> =
        machines.iter().map(|(machine, runs)| format!("{machine} ({runs} runs)")).collect();
    let debug = results.iter().filter(|result| result.form.contains("debug build")).count();
    let _ = writeln!(
        out,
        "\n{} runs, {} of them with release programs; machines: {}.",
        results.len(),
        results.len() - debug,
        machines.join("; ")
    );
    if debug > 0 {
        let _ = writeln!(
            out,
            "{debug} of them ran programs without optimizations, on cores that compilers used too (*debug build*). What \
             they counted holds; their times are upper bounds."
        );
    }
}

fn verdict(scenario: &Scenario, rows: &BTreeMap<&str, Row<'_>>) -> String {
    let link = scenario.id.to_lowercase();
    let words = rows.iter().map(|(form, row)| match (row.failed(), row.present.len()) {
        (0, _) if row.undecided() => format!("[passes, with slopes undecided](#{link}) ({form})"),
        (0, 1) => format!("[passes](#{link}) ({form})"),
        (0, runs) => format!("[passes](#{link}) ({form}, {runs} runs)"),
        (failed, runs) => format!("[**FAILS**](#{link}) ({form}, {failed} of {runs})"),
    });
    let words: Vec<String> = words.collect();
    match (words.is_empty(), scenario.elsewhere) {
        (false, _) => words.join("; "),
        (true, Some(why)) => format!("does not run here: {why}"),
        (true, None) => "was not run".to_owned(),
    }
}

/// One table of all quantities, whatever scenario measured them.
fn targets<'a>(out: &mut String, rows: impl Iterator<Item = &'a Row<'a>>) {
    let mut all: Vec<(Quantity, Vec<&str>)> = Vec::new();
    for row in rows {
        // A build or a machine that is not held to them says nothing about them.
        let Some(id) = row.last().filter(|last| !last.no_gates).map(|result| result.id.as_str()) else {
            continue;
        };
        for quantity in row.quantities() {
            match all.iter_mut().find(|(other, _)| other.name == quantity.name) {
                Some((other, ids)) => {
                    other.values.extend(&quantity.values);
                    if !ids.contains(&id) {
                        ids.push(id);
                    }
                }
                None => all.push((quantity, vec![id])),
            }
        }
    }
    all.sort_by(|(a, _), (b, _)| a.name.cmp(&b.name));
    let _ = writeln!(
        out,
        "\n## Targets\n\nAll values of all scenarios, each of the commit that ran last.\n\n\
         | | scenarios | N | p50 | judged | worst | target | gate | meets | others publish | what is measured |\n\
         | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    );
    for (quantity, ids) in &all {
        let Quantity { reference, how, .. } = quantity;
        let _ = writeln!(
            out,
            "| {} | {} | {} | {reference} | {how} |",
            quantity.name,
            ids.join(", "),
            numbers(quantity, false)
        );
    }
}

/// N, percentiles, target, gate and verdict, as cells of a table.
fn numbers(quantity: &Quantity, no_gates: bool) -> String {
    let Quantity { unit, target, gate, values, .. } = quantity;
    let [p50, judged, worst] = [quantity.at(0.5), quantity.judged(), quantity.worst()].map(number);
    let unit = match quantity.better {
        Better::Smaller => unit.clone(),
        Better::Larger => format!("{unit} (smallest)"),
    };
    let verdict = match quantity.verdict() {
        FAILS if !quantity.is_gated(no_gates) => "over the gate",
        verdict => verdict,
    };
    let (target, gate) = (short(*target), short(*gate));
    format!("{} | {p50} | {judged} | {worst} {unit} | {target} | {gate} | {verdict}", values.len())
}

fn invariants<'a>(out: &mut String, rows: impl Iterator<Item = &'a Row<'a>>) {
    let mut sums: BTreeMap<&str, (u64, u64)> = BTreeMap::new();
    for (invariant, checks) in rows.flat_map(|row| &row.present).flat_map(|result| result.invariants.iter()) {
        let sum = sums.entry(invariant.as_str()).or_default();
        *sum = (sum.0 + checks.checked, sum.1 + checks.broken);
    }
    let _ = writeln!(out, "\n## Invariants\n\n| | holds | checked | broken |\n| --- | --- | --- | --- |");
    for invariant in Invariant::ALL {
        let (checked, broken) = sums.get(&*invariant.to_string()).copied().unwrap_or_default();
        let broken = if broken > 0 { format!("**{broken}**") } else { "0".to_owned() };
        let _ = writeln!(out, "| {invariant} | {} | {checked} | {broken} |", invariant.claim());
    }
}

fn section(
    out: &mut String,
    scenario: &Scenario,
    rows: &BTreeMap<&str, Row<'_>>,
    shown: &mut Vec<(String, String)>,
) {
    let id = scenario.id;
    let _ = writeln!(out, "\n## {id}\n\n{}. Asserted: {}.", scenario.what, scenario.asserted);
    runs(out, rows);
    for (form, row) in rows {
        let Some(last) = row.last() else { continue };
        // One that failed shows more.
        let pictured = row.present.iter().rfind(|result| !result.passes()).copied().unwrap_or(last);
        let name = format!("{id}-{}.svg", form.replace(|c: char| !c.is_ascii_alphanumeric(), "-"));
        let _ = writeln!(
            out,
            "\n![{id}, {form}, seed {}](images/chaos/{name})\n\n{} {}",
            pictured.seed,
            totals(pictured),
            struck(pictured)
        );
        shown.push((pictured.file(), name));
        let quantities = row.quantities();
        if !quantities.is_empty() {
            let _ = writeln!(
                out,
                "\n| {form} | N | p50 | judged | worst | target | gate | meets |\n\
                 | --- | --- | --- | --- | --- | --- | --- | --- |"
            );
            for quantity in &quantities {
                let _ = writeln!(out, "| {} | {} |", quantity.name, numbers(quantity, last.no_gates));
            }
        }
        let (mut seen, mut unseen) = (Vec::new(), Vec::new());
        for invariant in Invariant::ALL.map(|invariant| invariant.to_string()) {
            match last.invariants.get(&invariant) {
                Some(checks) if checks.checked > 0 => seen.push(format!("{invariant} {}", checks.words)),
                Some(_) => unseen.push(invariant),
                None => {}
            }
        }
        let _ = write!(out, "\nInvariants, seed {}: {}.", last.seed, seen.join("; "));
        if unseen.is_empty() {
            let _ = writeln!(out);
        } else {
            let _ = writeln!(out, " Without observation: {}.", unseen.join(", "));
        }
        for slope in &last.slopes {
            let _ = writeln!(out, "\n{slope}.");
        }
        for note in &last.notes {
            let _ = writeln!(out, "\n{note}");
        }
        for result in &row.present {
            for failure in result.failures.iter().take(FAILURES) {
                let _ = writeln!(out, "\n**Fails**, seed {}: {failure}", result.seed);
            }
            let more = result.failures.len().saturating_sub(FAILURES);
            if more > 0 {
                let _ = writeln!(out, "\n**Fails**, seed {}: and {more} more like these", result.seed);
            }
        }
    }
}

/// A table of the runs, older commits among them.
fn runs(out: &mut String, rows: &BTreeMap<&str, Row<'_>>) {
    let _ = writeln!(
        out,
        "\n| run | form | seed | commit | s | requests | tried elsewhere | unknown | not started | other | |\n\
         | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    );
    for result in rows.values().flat_map(|row| row.earlier.iter().chain(&row.present)) {
        let RunResult { started, form, seed, commit, seconds, totals, .. } = result;
        let verdict = if result.passes() { "passes" } else { "**FAILS**" };
        let _ = writeln!(
            out,
            "| {} | {form} | {seed} | {commit} | {seconds} | {} | {} | {} | {} | {} | {verdict} |",
            date(*started),
            totals.requests,
            totals.retried,
            totals.unknown,
            totals.not_started,
            totals.other
        );
    }
}

/// What became of the requests, in words.
pub(super) fn totals(result: &RunResult) -> String {
    let totals = &result.totals;
    if totals.requests == 0 {
        return format!(
            "0 requests: those that wait for an agent that is not there are not counted. Agents recorded {} runs.",
            result.runs
        );
    }
    format!(
        "{} requests: {} with a response, {} tried once more elsewhere, {} unknown (of which agents ran {}, none \
         twice unless I1 says so), {} not started, {} other failures; with idempotent retry {} have a response. \
         Agents recorded {} runs.",
        totals.requests,
        totals.ok,
        totals.retried,
        totals.unknown,
        totals.unknown_ran,
        totals.not_started,
        totals.other,
        totals.ok_idempotent,
        result.runs
    )
}

/// What the nemesis did, in words.
fn struck(result: &RunResult) -> String {
    let kinds: Vec<String> = result.faults.iter().map(|(kind, count)| format!("{kind} ({count})")).collect();
    if kinds.is_empty() { String::new() } else { format!("Faults: {}.", kinds.join(", ")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn result(id: &str, form: &str, commit: &str, failures: &[&str]) -> RunResult {
        RunResult {
            id: id.to_owned(),
            form: form.to_owned(),
            commit: commit.to_owned(),
            failures: failures.iter().map(|&failure| failure.to_owned()).collect(),
            ..RunResult::default()
        }
    }

    #[test]
    fn a_failing_row_stays_as_failing_although_a_later_run_passes() {
        let results = [
            result("S02", "quick", "a", &["T_kill is 600, the gate is 500"]),
            result("S02", "quick", "a", &[]),
        ];
        let (text, _) = page(&results, &Kept::default());
        assert!(text.contains("[**FAILS**](#s02) (quick, 1 of 2)"), "{text}");
        assert!(text.contains("**Fails**, seed 0: T_kill is 600"), "{text}");
        assert!(text.contains("| S01 |") && text.contains("was not run"), "{text}");
        assert!(text.contains("does not run here: "), "{text}");
    }

    #[test]
    fn forms_and_commits_are_kept_apart() {
        let quantity = |value| Quantity {
            name: "T_kill".to_owned(),
            unit: "ms".to_owned(),
            better: Better::Smaller,
            target: 100.0,
            gate: 500.0,
            reference: "kas 5 min".to_owned(),
            how: String::new(),
            values: vec![value],
        };
        let measured = |form: &str, commit: &str, value| RunResult {
            measured: vec![quantity(value)],
            ..result("S02", form, commit, &[])
        };
        let results = [
            measured("quick", "a", 900.0),
            measured("quick", "b", 50.0),
            measured("quick", "b", 70.0),
            measured("full", "a", 300.0),
        ];
        let (text, shown) = page(&results, &Kept::default());
        assert!(text.contains("| T_kill | 2 | 50 | 70 | 70 ms | 100 | 500 | target |"), "{text}");
        assert!(text.contains("| T_kill | 1 | 300 | 300 | 300 ms | 100 | 500 | gate |"), "{text}");
        assert!(text.contains("| T_kill | S02 | 3 | 70 | 300 |"), "{text}");
        assert!(!text.contains("900"), "an earlier commit is in the list of runs only: {text}");
        assert_eq!(shown.len(), 2);
    }

    #[test]
    fn what_should_be_large_says_so_and_waiters_are_no_requests() {
        let grace = Quantity {
            name: "T_grace".to_owned(),
            unit: "ms".to_owned(),
            better: Better::Larger,
            target: 0.0,
            gate: 0.0,
            reference: String::new(),
            how: String::new(),
            values: vec![3.0, 60.0, 90.0],
        };
        let run = RunResult { measured: vec![grace], runs: 7, ..result("S25", "quick", "a", &[]) };
        let (text, _) = page(&[run], &Kept::default());
        assert!(text.contains("| T_grace | 3 | 60 | 3 | 3 ms (smallest) | 0 | 0 | target |"), "{text}");
        assert!(text.contains("0 requests: those that wait "), "{text}");
        assert!(text.contains(" are not counted. Agents recorded 7 runs."), "{text}");
    }

    #[test]
    fn dates_are_those_of_the_calendar() {
        assert_eq!([0, 1_709_164_800, 1_735_689_599].map(date), ["1970-01-01", "2024-02-29", "2024-12-31"]);
    }
}
