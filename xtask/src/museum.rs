//! `cargo xtask museum`: shows that each public bug of other systems is caught by a test here.
//!
//! Each test runs in both directions: with the code as it is, in which it must pass, and with a *flaw*, a
//! switch that brings the bug back, with which it must fail. The switches of crates exist in their own tests
//! only. Tests with real processes need a build of kas with the feature `flaws`, which never ships:
//! [`absence`] proves that.

mod rows;

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
    process::{Command, ExitCode, Stdio},
    thread,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use clap::Args;
use serde_json::{Value, json};
use tokio::time::Instant;

use devkit::{
    report::{Style, line},
    workspace::{self, Programs, cargo, shown},
};

use self::rows::{Exhibit, Process, ROWS, Row};

const HELP: &str = "\
Examples:
  cargo xtask museum                    the tests of crates, in both directions: about a minute after the build
  cargo xtask museum 13 23              only these rows
  cargo xtask museum --processes        also the tests with real processes, with a build of kas that has flaws
  cargo xtask museum --processes --slow also those that take a minute or more
  cargo xtask museum --processes --slow --report target/chaos
                                        and keep the result for the report of cargo xtask chaos
  cargo xtask museum --docs             write docs/museum.md
Exit codes: 0, every test passed and was seen to fail; 1, one was not.";

/// The variable that chooses the flaw of a process. No program that ships contains its name.
const VARIABLE: &str = "KAS_FLAW";
/// The variables of that build.
const VARIABLES: [&str; 2] = [VARIABLE, "KAS_RECORDS"];

/// Arguments of `museum`.
#[derive(Debug, Args)]
#[command(after_help = HELP)]
pub(crate) struct MuseumArgs {
    /// Only these rows
    #[arg(value_name = "NUMBER")]
    numbers: Vec<usize>,
    /// Also the tests with real processes
    #[arg(long)]
    processes: bool,
    /// With --processes: also those that take a minute or more
    #[arg(long, requires = "processes")]
    slow: bool,
    /// With --processes: keep the result in this folder, for the report of `cargo xtask chaos`
    #[arg(long, value_name = "DIR", requires = "processes")]
    report: Option<PathBuf>,
    /// Write docs/museum.md, and run nothing
    #[arg(long)]
    docs: bool,
}

/// The result of one direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Seen {
    /// As it must be: the right build passes, or the broken one fails.
    Good,
    Bad,
    /// It was not run, or the other direction was not reached.
    NotRun,
    /// There is no switch for it.
    NoFlaw,
}

/// The results of one test.
#[derive(Debug)]
struct Shown {
    number: usize,
    test: String,
    place: String,
    flaw: String,
    right: Seen,
    broken: Seen,
}

/// Runs the museum, and prints its table.
pub(crate) fn run(args: &MuseumArgs) -> Result<ExitCode> {
    if args.docs {
        fs::write(page_path(), page()).context("cannot write docs/museum.md")?;
        return Ok(ExitCode::SUCCESS);
    }
    for number in &args.numbers {
        ensure!(
            ROWS.iter().any(|row| row.number == *number),
            "there is no row {number}: 1 to {}",
            ROWS.len()
        );
    }
    let rows: Vec<&Row> =
        ROWS.iter().filter(|row| args.numbers.is_empty() || args.numbers.contains(&row.number)).collect();
    let mut results = exhibits(&rows)?;
    if args.processes {
        let began = Instant::now();
        let of_processes = processes(&processes_of(&rows, args.slow))?;
        if let Some(folder) = &args.report {
            keep(folder, args, &of_processes, began.elapsed())?;
        }
        results.extend(of_processes);
    }
    results.sort_by_key(|shown| shown.number);
    print(&rows, &results);
    Ok(if are_good(&results) { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Keeps the result of the tests with real processes, for the report of `cargo xtask chaos`.
fn keep(folder: &Path, args: &MuseumArgs, results: &[Shown], took: Duration) -> Result<()> {
    #[expect(clippy::disallowed_methods, reason = "it is only shown")]
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let started = now.saturating_sub(took).as_secs();
    let kas = workspace::target()?.join("museum/kas");
    let version = Command::new(&kas).arg("--version").output();
    let version = version.with_context(|| format!("cannot run {}", kas.display()))?.stdout;
    let version = String::from_utf8_lossy(&version);
    let commit = version.trim().rsplit_once("commit: ").map(|(_, commit)| commit);
    let flawed = results.iter().filter(|shown| !shown.flaw.is_empty());
    let both = flawed.clone().filter(|shown| shown.right == Seen::Good && shown.broken == Seen::Good);
    let failed = results.iter().filter(|shown| !are_good(std::slice::from_ref(shown)));
    let command = ["cargo xtask museum --processes", if args.slow { " --slow" } else { "" }].concat();
    let result = json!({
        "started": started,
        "commit": commit.with_context(|| format!("kas --version tells no commit: {version:?}"))?,
        "command": command,
        "tests": results.len(),
        "flawed": flawed.clone().count(),
        "both": both.count(),
        "failed": failed.map(|shown| &*shown.test).collect::<Vec<_>>(),
        "seconds": took.as_secs(),
    });
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let path = folder.join(format!("museum-{started}.json"));
    fs::write(&path, result.to_string()).with_context(|| format!("cannot write {}", path.display()))
}

/// Runs the tests of crates.
fn exhibits(rows: &[&Row]) -> Result<Vec<Shown>> {
    let mut by_package: BTreeMap<&str, Vec<(usize, Exhibit)>> = BTreeMap::new();
    for row in rows {
        for exhibit in row.exhibits {
            by_package.entry(exhibit.package).or_default().push((row.number, *exhibit));
        }
    }
    let mut build = cargo();
    build.args(["test", "--lib", "--no-run"]);
    build.args(by_package.keys().flat_map(|package| ["-p", package]));
    let (tests, _) = Tests::build(build)?;
    let mut results = Vec::new();
    for (package, exhibits) in by_package {
        let mut command = tests.command(package, &Path::new("crates").join(package))?;
        command.arg("--show-output").args(exhibits.iter().map(|(_, exhibit)| exhibit.test));
        let output = output(command)?;
        for (number, exhibit) in exhibits {
            let (right, broken) = directions(&output, &exhibit);
            results.push(Shown {
                number,
                test: exhibit.test.to_owned(),
                place: package.to_owned(),
                flaw: exhibit.flaws.join(", "),
                right,
                broken,
            });
        }
    }
    Ok(results)
}

/// The executables of tests, built by one command: with one for each package, cargo would choose other
/// features of shared dependencies each time, and build them again.
///
/// By the folder of the package and their names: two packages may have tests of the same name.
struct Tests(BTreeMap<(PathBuf, String), PathBuf>);

impl Tests {
    /// Builds them, and programs with them.
    fn build(command: Command) -> Result<(Self, Programs)> {
        line(format_args!("running: {}", shown(&command)));
        let mut executables = BTreeMap::new();
        let seen = |message: &Value| {
            if message["profile"]["test"] == true
                && let (Some(name), Some(path)) =
                    (message["target"]["name"].as_str(), message["executable"].as_str())
                && let Some(package) = message["manifest_path"].as_str().and_then(|it| Path::new(it).parent())
            {
                executables.insert((package.to_owned(), name.replace('_', "-")), path.into());
            }
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let programs = runtime.block_on(workspace::build_seen(command, seen))?;
        Ok((Self(executables), programs))
    }

    /// Returns a command that runs the tests that are its arguments, in the folder of their package.
    fn command(&self, name: &str, package: &Path) -> Result<Command> {
        let package = workspace::root().join(package);
        let path = self.0.get(&(package.clone(), name.to_owned()));
        let mut command = Command::new(path.with_context(|| format!("cargo built no tests of {name}"))?);
        command.current_dir(package).arg("--exact");
        Ok(command)
    }
}

/// Reads the results of both directions from the output of the test runner. The test first runs without a
/// flaw, and then prints a line for each flaw with which it failed.
fn directions(output: &str, exhibit: &Exhibit) -> (Seen, Seen) {
    let result = format!("test {} ... ", exhibit.test);
    let result = output.lines().find_map(|line| line.strip_prefix(&result));
    let printed = printed_by(output, exhibit.test);
    let detects = |flaw: &&str| printed.contains(&format!("museum: {flaw} detected: "));
    let detected = exhibit.flaws.iter().filter(|flaw| detects(flaw)).count();
    match result {
        Some("ok") if detected == exhibit.flaws.len() => (Seen::Good, Seen::Good),
        // It does not switch on what this table says.
        Some("ok") => (Seen::Good, Seen::Bad),
        Some(_) if detected > 0 || printed.contains("so it cannot detect it") => (Seen::Good, Seen::Bad),
        Some(_) => (Seen::Bad, Seen::NotRun),
        None => (Seen::NotRun, Seen::NotRun),
    }
}

/// Returns what a test has printed.
fn printed_by<'a>(output: &'a str, test: &str) -> &'a str {
    let head = format!("---- {test} stdout ----\n");
    let Some(start) = output.find(&head).map(|at| at + head.len()) else { return "" };
    let printed = &output[start..];
    &printed[..printed.find("\n---- ").unwrap_or(printed.len())]
}

/// Runs the tests with real processes that are quick and have a flaw, in both directions, and prints them.
/// Returns whether all is as it must be. What it builds shares all dependencies with the tests.
pub(crate) fn quick_of_tests() -> Result<bool> {
    let rows: Vec<&Row> = ROWS.iter().collect();
    let mut chosen = processes_of(&rows, false);
    // Of the others, the suite runs the only direction.
    chosen.retain(|(_, process)| process.flaw.is_some());
    let results = processes(&chosen)?;
    let shown: Vec<&Row> =
        rows.into_iter().filter(|row| results.iter().any(|it| it.number == row.number)).collect();
    print(&shown, &results);
    Ok(are_good(&results))
}

/// Returns the tests with real processes of these rows, each with the number of its row.
fn processes_of<'a>(rows: &[&'a Row], slow: bool) -> Vec<(usize, &'a Process)> {
    let all = rows.iter().flat_map(|row| row.processes.iter().map(|process| (row.number, process)));
    all.filter(|(_, process)| slow || !process.is_slow).collect()
}

fn are_good(results: &[Shown]) -> bool {
    results.iter().all(|shown| shown.right == Seen::Good && matches!(shown.broken, Seen::Good | Seen::NoFlaw))
}

/// Runs tests with real processes.
fn processes(chosen: &[(usize, &Process)]) -> Result<Vec<Shown>> {
    let names: BTreeSet<&str> = chosen.iter().map(|(_, process)| process.program).collect();
    // As the suite does, which shares this.
    let mut build = cargo();
    build.args(["build", "--workspace", "--bins"]);
    build.args(names.into_iter().flat_map(|name| ["--test", name]));
    let (tests, programs) = Tests::build(build)?;
    let folder = with_flaws(&programs)?;
    let mut results = Vec::new();
    for (number, process) in chosen {
        let passes = |flaw: Option<&str>| -> Result<bool> {
            let mut command = tests.command(process.program, Path::new("tests"))?;
            command.args(["--include-ignored", process.test]);
            command.env("KAS_PROGRAMS", &folder).env_remove(VARIABLE);
            if let Some(flaw) = flaw {
                command.env(VARIABLE, flaw);
            }
            let output = output(command)?;
            let result = format!("test {} ... ", process.test);
            match output.lines().find_map(|line| line.strip_prefix(&result)) {
                Some(result) => Ok(result == "ok"),
                None => bail!("{} has no test {}", process.program, process.test),
            }
        };
        // They wait more than they compute.
        let (right, broken) = thread::scope(|scope| {
            let broken = scope.spawn(|| process.flaw.map(|flaw| passes(Some(flaw))).transpose());
            (passes(None), broken.join())
        });
        let right = if right? { Seen::Good } else { Seen::Bad };
        let broken = match broken.map_err(|_| anyhow!("the thread of {} panicked", process.test))?? {
            None => Seen::NoFlaw,
            // It says nothing about the flaw.
            Some(_) if right == Seen::Bad => Seen::NotRun,
            Some(passes) => {
                if passes {
                    Seen::Bad
                } else {
                    Seen::Good
                }
            }
        };
        results.push(Shown {
            number: *number,
            test: process.test.to_owned(),
            place: format!("tests/{}", process.program),
            flaw: process.flaw.unwrap_or_default().to_owned(),
            right,
            broken,
        });
    }
    Ok(results)
}

/// Makes a folder with the programs that tests start, in which kas has flaws. As an example, it has the
/// dependencies of the tests; only crates of the workspace are compiled for it.
fn with_flaws(programs: &Programs) -> Result<PathBuf> {
    let mut broken = cargo();
    broken.args(["build", "--workspace", "--features", "kas/flaws", "--example", "with-flaws"]);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    line(format_args!("running: {}", shown(&broken)));
    let broken = runtime.block_on(workspace::build(broken))?;
    let folder = workspace::target()?.join("museum");
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    for (name, path) in [
        ("kas", broken.path("with-flaws")?),
        ("agentk", programs.path("agentk")?),
        ("kasctl", programs.path("kasctl")?),
    ] {
        let to = folder.join(name);
        // Links, as copies of these programs take a gigabyte.
        let _ = fs::remove_file(&to);
        fs::hard_link(path, &to)
            .or_else(|_| fs::copy(path, &to).map(drop))
            .with_context(|| format!("cannot write {}", to.display()))?;
    }
    Ok(folder)
}

/// Runs tests and returns their standard output, of a failure too.
fn output(mut command: Command) -> Result<String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let name = program.rsplit('/').next().unwrap_or_default();
    let arguments: Vec<_> = command.get_args().map(|argument| argument.to_string_lossy()).collect();
    line(format_args!("running: {name} {}", arguments.join(" ")));
    let output = command
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("cannot run {program}"))?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

fn print(rows: &[&Row], results: &[Shown]) {
    let style = Style::of_stdout();
    let seen = |seen: Seen, good: &str, bad: &str| match seen {
        Seen::Good => style.good(good),
        Seen::Bad => style.bad(bad),
        Seen::NotRun => style.bad("not run"),
        Seen::NoFlaw => "no switch".to_owned(),
    };
    line("");
    for row in rows {
        line(style.bold(format_args!("{:>2}  {}", row.number, row.bug)));
        if let Some(bound) = row.bound {
            line(format_args!("      bound: {bound}"));
        }
        for shown in results.iter().filter(|shown| shown.number == row.number) {
            line(format_args!(
                "      {} in {}: right build {}; {} {}",
                shown.test,
                shown.place,
                seen(shown.right, "passes", "FAILS"),
                if shown.flaw.is_empty() { "broken build" } else { &shown.flaw },
                seen(shown.broken, "fails, as it must", "PASSES"),
            ));
        }
    }
    let both = |shown: &&Shown| shown.right == Seen::Good && shown.broken == Seen::Good;
    line(format_args!(
        "\n{} of {} tests pass with the right build and fail with the broken one",
        results.iter().filter(both).count(),
        results.len()
    ));
}

fn page_path() -> PathBuf {
    workspace::root().join("docs/museum.md")
}

/// Returns docs/museum.md.
fn page() -> String {
    let mut page = "\
# The bug museum

<!-- Written by `cargo xtask museum --docs`; a test compares. -->

Public bugs of other systems that do what kas does. For each there is a test that would have found it, and the
proof that it can fail: a *flaw*, a switch that brings the bug back. `cargo xtask museum` runs each test in both
directions and prints this table with the results; `--processes` also runs those that start real replicas.

The switches are the enums `Flaw` of the crates. They exist in the tests of their crate, and in a build of kas with
the feature `flaws`, where the variable `KAS_FLAW` chooses one. That build also writes what other versions write to
replicas, if `KAS_RECORDS` says so: [S36 and S37](chaos.md#s36) run it. It never ships: `cargo xtask ci` searches the
programs for the names of both variables.

Tests named `schedules_of_…` explore the order in which tasks run (crate `museum`). They run two thousand orders in
the suite. For more:

```sh
KAS_SCHEDULES=100000 cargo test -p routing -p net -p tunnel --lib schedules
```

| # | public bug | test | where | flaw |
| --- | --- | --- | --- | --- |
"
    .to_owned();
    for row in ROWS {
        let mut first = true;
        let mut add = |test: &str, place: String, flaw: String| {
            let (number, bug) = if std::mem::take(&mut first) {
                (row.number.to_string(), row.bug)
            } else {
                Default::default()
            };
            let test = test.rsplit("::").next().unwrap_or(test);
            // A String takes everything.
            let _ = writeln!(page, "| {number} | {bug} | `{test}` | {place} | {flaw} |");
        };
        for exhibit in row.exhibits {
            let flaws: Vec<String> = exhibit.flaws.iter().map(|flaw| format!("`{flaw}`")).collect();
            add(exhibit.test, format!("`crates/{}`", exhibit.package), flaws.join(", "));
        }
        for process in row.processes {
            let flaw = process.flaw.map_or("see its text".to_owned(), |flaw| format!("`{flaw}`"));
            let slow = if process.is_slow { ", slow" } else { "" };
            add(process.test, format!("processes: `tests/{}`{slow}", process.program), flaw);
        }
    }
    page.push_str("\nCosts are bounded in counted work, not in time:\n\n");
    for row in ROWS {
        if let Some(bound) = row.bound {
            let _ = writeln!(page, "* {}: {bound}.", row.number);
        }
    }
    page
}

/// Fails if a program that was built has the switches of the museum.
pub(crate) fn absence() -> Result<()> {
    let folder =
        std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| workspace::root().join("target"), Into::into);
    let mut found = 0;
    for profile in ["debug", "release", "dist"] {
        for program in ["kas", "agentk", "kasctl"] {
            let path = folder.join(profile).join(program);
            if path.is_file() {
                found += 1;
                lacks(&path)?;
            }
        }
    }
    ensure!(found > 0, "no program is built in {}", folder.display());
    line(format_args!("{found} programs have no flaws"));
    Ok(())
}

fn lacks(program: &Path) -> Result<()> {
    let bytes = fs::read(program).with_context(|| format!("cannot read {}", program.display()))?;
    for variable in VARIABLES {
        let has = bytes.windows(variable.len()).any(|window| window == variable.as_bytes());
        ensure!(!has, "{} was built with the feature flaws: it contains {variable}", program.display());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(of: &Path) -> String {
        let mut text = String::new();
        let mut folders = vec![of.to_owned()];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
            {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    folders.push(path);
                } else if path.extension().is_some_and(|extension| extension == "rs") {
                    text.push_str(&fs::read_to_string(&path).unwrap());
                }
            }
        }
        text
    }

    #[test]
    fn every_test_and_flaw_of_the_table_exists() {
        let numbers: Vec<_> = ROWS.iter().map(|row| row.number).collect();
        assert_eq!(numbers, (1..=25).collect::<Vec<_>>());
        let mut sources: BTreeMap<PathBuf, String> = BTreeMap::new();
        let mut has = |folder: PathBuf, what: &str| {
            let text = sources.entry(folder.clone()).or_insert_with(|| source(&folder));
            assert!(text.contains(what), "{} has no {what}", folder.display());
        };
        let function = |test: &str| format!("fn {}(", test.rsplit("::").next().unwrap());
        for row in ROWS {
            assert!(!row.exhibits.is_empty(), "{}", row.number);
            for exhibit in row.exhibits {
                let folder = workspace::root().join("crates").join(exhibit.package).join("src");
                has(folder.clone(), &function(exhibit.test));
                for flaw in exhibit.flaws {
                    has(folder.clone(), &format!("flawed(Flaw::{flaw})"));
                }
            }
            for process in row.processes {
                has(workspace::root().join("tests/tests"), &function(process.test));
                if let Some(flaw) = process.flaw {
                    // Only crates with the feature have it in processes.
                    let crates = ["gossip", "net", "table"].iter().filter(|name| {
                        let path = workspace::root().join("crates").join(name).join("src/flaw.rs");
                        fs::read_to_string(path).unwrap().contains(&format!(" {flaw},"))
                    });
                    assert_eq!(crates.count(), 1, "{flaw}");
                }
            }
        }
    }

    #[test]
    fn the_page_is_that_of_the_table() {
        let written = fs::read_to_string(page_path()).unwrap();
        assert!(written == page(), "docs/museum.md is stale: cargo xtask museum --docs");
    }

    #[test]
    fn both_directions_are_read_from_the_output_of_the_tests() {
        let exhibit = Exhibit { package: "table", test: "tests::one", flaws: &["A", "B"] };
        let output = |result: &str, printed: &str| {
            format!(
                "test tests::one ... {result}\n\nsuccesses:\n\n---- tests::one stdout ----\n{printed}\n---- x\n"
            )
        };
        let both = "museum: A detected: x\nmuseum: B detected: y";
        assert_eq!(directions(&output("ok", both), &exhibit), (Seen::Good, Seen::Good));
        assert_eq!(directions(&output("ok", "museum: A detected: x"), &exhibit), (Seen::Good, Seen::Bad));
        let misses = "the test passes with the flaw A, so it cannot detect it";
        assert_eq!(directions(&output("FAILED", misses), &exhibit), (Seen::Good, Seen::Bad));
        assert_eq!(directions(&output("FAILED", "assertion failed"), &exhibit), (Seen::Bad, Seen::NotRun));
        assert_eq!(directions("test tests::two ... ok", &exhibit), (Seen::NotRun, Seen::NotRun));
    }

    #[test]
    fn a_program_with_flaws_is_recognized() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("kas");
        fs::write(&path, b"\x7fELF without").unwrap();
        lacks(&path).unwrap();
        for variable in VARIABLES {
            fs::write(&path, [b"\x7fELF ".as_slice(), variable.as_bytes(), b"\0"].concat()).unwrap();
            assert!(lacks(&path).unwrap_err().to_string().contains("feature flaws"));
        }
    }
}
