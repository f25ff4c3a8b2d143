//! `cargo xtask ci`: runs every check, the quick ones first, and prints the results.

use std::{
    fmt,
    fs::{self, File},
    io,
    path::Path,
    process::{Command, ExitCode, Stdio},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, anyhow, ensure};
use clap::Args;
use tokio::time::Instant;

use devkit::{
    report::{Style, error, human, line},
    workspace::{self, cargo},
};

use crate::{
    chaos, fuzz, layers, museum, sim,
    suite::{self, Outcome, TestArgs},
    tools, width,
};

/// How long the quick set of chaos should take at most.
const QUICK_SET: Duration = Duration::from_secs(240);

const HELP: &str = "\
Exit codes: 0, every check passed; 1, one failed; 3, none failed, but something could not run here and was skipped.";

/// Arguments of `ci`.
#[derive(Debug, Args)]
#[command(after_help = HELP)]
pub(crate) struct CiArgs {
    /// Only the checks that take seconds
    #[arg(long, conflicts_with_all = ["no_test", "install"])]
    quick: bool,
    /// All but the tests and fuzzing
    #[arg(long)]
    no_test: bool,
    /// Install what is missing by apt-get
    #[arg(long)]
    install: bool,
}

/// How a check ended.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Verdict {
    Ok,
    Failed,
    /// It could not run on this machine, although it should have.
    Skipped(Vec<String>),
}

impl Verdict {
    fn of(passed: bool) -> Self {
        if passed { Self::Ok } else { Self::Failed }
    }

    fn skipped(reason: impl fmt::Display) -> Self {
        Self::Skipped(vec![reason.to_string()])
    }
}

/// The result and duration of each check.
#[derive(Debug, Default)]
struct Summary(Vec<(&'static str, Verdict, Duration)>);

impl Summary {
    /// Runs a check. One that does not finish has failed.
    fn check(&mut self, name: &'static str, run: impl FnOnce() -> Result<Verdict>) {
        line(format_args!("\n{}", Style::of_stdout().bold(format_args!("== {name}"))));
        let began = Instant::now();
        self.add(name, run(), began.elapsed());
    }

    /// Adds a check that has run. One that could not be run to its end has failed.
    fn add(&mut self, name: &'static str, result: Result<Verdict>, took: Duration) {
        if let Err(failure) = &result {
            let _ = error(failure);
        }
        self.0.push((name, result.unwrap_or(Verdict::Failed), took));
    }

    fn print(&self) {
        let style = Style::of_stdout();
        line(format_args!("\n{}", style.bold("== summary")));
        for (name, verdict, took) in &self.0 {
            let (shown, reasons): (String, &[String]) = match verdict {
                Verdict::Ok => (style.good("ok"), &[]),
                Verdict::Failed => (style.bad("FAILED"), &[]),
                Verdict::Skipped(reasons) => (style.bad("SKIPPED"), reasons),
            };
            line(format_args!("{name:<20} {:>12}  {shown}", human(*took)));
            for reason in reasons {
                line(format_args!("    {reason}"));
            }
        }
    }

    fn code(&self) -> u8 {
        let any = |wanted: fn(&Verdict) -> bool| self.0.iter().any(|(_, verdict, _)| wanted(verdict));
        if any(|verdict| *verdict == Verdict::Failed) {
            1
        } else if any(|verdict| matches!(verdict, Verdict::Skipped(_))) {
            suite::SKIPPED
        } else {
            0
        }
    }
}

/// Runs every check, even after a failure.
pub(crate) fn ci(args: &CiArgs) -> Result<ExitCode> {
    let mut summary = Summary::default();
    summary.check("fmt", || cargo_check(&["fmt", "--all", "--check"]));
    summary.check("layers", || {
        Ok(Verdict::of(layers::run(&layers::LayersArgs::default())? == ExitCode::SUCCESS))
    });
    summary.check("width of comments", || Ok(Verdict::of(width::run()?)));
    summary.check("deny", deny);
    let mut tests = None;
    if args.no_test {
        for (name, command) in lints() {
            summary.check(name, || run(command));
        }
    } else if !args.quick {
        let mut fuzzer = None;
        summary.check("fuzz build", || {
            fuzzer = Some(fuzz::build()?);
            Ok(Verdict::Ok)
        });
        // The tests wait more than they compute, so other checks run beside them.
        let mut beside = Vec::new();
        summary.check("test", || {
            test(args.install, &mut tests, || {
                beside.push(("lints and fuzzing", thread::spawn(move || lowest(fuzzer.as_deref()))));
                beside.push(("informers", thread::spawn(|| vec![Beside::of("informers", informers)])));
            })
        });
        let are_built = tests.is_some();
        if beside.is_empty() {
            let skipped = Verdict::skipped("the tests were not built");
            summary.add("lints, fuzzing and informers", Ok(skipped), Duration::ZERO);
        }
        summary.check("flaws", || flaws(are_built));
        for (name, thread) in beside {
            let panicked = |_| vec![Beside::of(name, || Err(anyhow!("it panicked")))];
            for Beside { name, result, took } in thread.join().unwrap_or_else(panicked) {
                summary.add(name, result, took);
            }
        }
        summary.check("museum", || broken(are_built));
        // These need the whole machine.
        summary.check("sim", || simulate(are_built));
        summary.check("chaos", || strike(are_built));
    }
    if let Some(outcome) = tests {
        line("");
        outcome.totals.slowest().iter().for_each(line);
        outcome.summarize();
    }
    summary.print();
    Ok(ExitCode::from(summary.code()))
}

/// Returns the checks that compile everything a second time, as clippy and rustdoc share nothing with the
/// tests.
fn lints() -> [(&'static str, Command); 2] {
    let mut clippy = cargo();
    clippy.args(["clippy", "--workspace", "--all-targets", "--locked", "--", "-D", "warnings"]);
    let mut doc = cargo();
    doc.args(["doc", "--workspace", "--no-deps", "--locked"]).env("RUSTDOCFLAGS", "-D warnings");
    [("clippy", clippy), ("doc", doc)]
}

/// A check that ran beside the tests.
struct Beside {
    name: &'static str,
    result: Result<Verdict>,
    took: Duration,
}

impl Beside {
    fn of(name: &'static str, run: impl FnOnce() -> Result<Verdict>) -> Self {
        let began = Instant::now();
        let result = run();
        Self { name, result, took: began.elapsed() }
    }
}

/// Runs the lints and fuzzes, at the lowest priority. What they print goes into files, and onto standard
/// output if they fail.
fn lowest(fuzzer: Option<&Path>) -> Vec<Beside> {
    // A folder of their own, because cargo's lock would hold up tests that call cargo.
    let target = workspace::root().join("target/ci/lints");
    let shared = workspace::target().and_then(|tests| share(&tests.join("debug"), &target.join("debug")));
    if let Err(failure) = shared {
        // They only take longer.
        line(format_args!("lints compile all dependencies again: {failure:#}"));
    }
    let mut all = Vec::new();
    for (name, mut command) in lints() {
        command.env("CARGO_TARGET_DIR", &target);
        all.push(Beside::of(name, || logged(name, &command, LOWEST)));
    }
    all.push(Beside::of("fuzz", || match fuzzer {
        Some(fuzzer) => logged("fuzz", &fuzz::command(fuzzer, FUZZ)?, LOWEST),
        None => Ok(Verdict::skipped("its program was not built")),
    }));
    all
}

/// Gives a target folder what another one has of macros and of the results of build scripts. Two minutes of
/// compiling C are among them.
fn share(from: &Path, to: &Path) -> Result<()> {
    if to.exists() {
        return Ok(());
    }
    for folder in [".fingerprint", "build"] {
        copy(&from.join(folder), &to.join(folder))?;
    }
    let (from, to) = (from.join("deps"), to.join("deps"));
    fs::create_dir_all(&to)?;
    for entry in fs::read_dir(&from).with_context(|| format!("cannot read {}", from.display()))? {
        let path = entry?.path();
        let ending = path.extension().unwrap_or_default();
        if (ending == "so" || ending == "rlib" || ending == "rmeta")
            && let Some(name) = path.file_name()
        {
            fs::hard_link(&path, to.join(name))?;
        }
    }
    Ok(())
}

/// Copies a folder, with the times of its files: cargo goes by them.
fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to.with_file_name(""))?;
    let copied = Command::new("cp").arg("-aT").args([from, to]).status().context("cannot run cp")?.success();
    ensure!(copied, "cannot copy {}", from.display());
    Ok(())
}

/// How long each target is fuzzed, in seconds.
const FUZZ: u32 = 6;

/// How nice what runs beside the tests is: lints and fuzzing take what is left over. The test of informers is
/// a test like the others.
const LOWEST: &str = "19";
const AS_TESTS: &str = "0";

/// Runs a command, which is so nice, with its output in a file.
fn logged(name: &str, command: &Command, niceness: &str) -> Result<Verdict> {
    let path = workspace::root().join("target/ci").join(format!("{name}.log"));
    fs::create_dir_all(path.with_file_name("")).context("cannot make target/ci")?;
    let log = File::create(&path).with_context(|| format!("cannot write {}", path.display()))?;
    let mut nice = Command::new("nice");
    nice.args(["-n", niceness])
        .arg(command.get_program())
        .args(command.get_args())
        .current_dir(workspace::root());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => nice.env(name, value),
            None => nice.env_remove(name),
        };
    }
    let status =
        nice.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log).status().context("cannot run nice")?;
    if !status.success() {
        line(format_args!("{name} failed, see {}:", path.display()));
        io::copy(&mut File::open(&path)?, &mut io::stdout())?;
    }
    Ok(Verdict::of(status.success()))
}

/// Runs a command to its end.
fn run(mut command: Command) -> Result<Verdict> {
    Ok(Verdict::of(command.status().context("cannot run cargo")?.success()))
}

fn cargo_check(arguments: &[&str]) -> Result<Verdict> {
    let mut command = cargo();
    command.args(arguments);
    run(command)
}

fn deny() -> Result<Verdict> {
    if workspace::find_program("cargo-deny").is_none() {
        return Ok(Verdict::skipped("there is no cargo-deny; cargo install --locked cargo-deny gets it"));
    }
    // Advisories come from a database on the network, which changes: they must not gate a change.
    cargo_check(&["deny", "--log-level", "error", "check", "licenses", "bans", "sources"])
}

fn test(install: bool, outcome: &mut Option<Outcome>, built: impl FnOnce()) -> Result<Verdict> {
    if let Err(missing) = tools::provide(install) {
        let _ = error(&missing);
        return Ok(Verdict::skipped(format_args!("{missing:#}")));
    }
    let outcome = outcome.insert(suite::test(&TestArgs::installing(install), built)?);
    Ok(match outcome.totals.skipped.as_slice() {
        _ if outcome.code != 0 => Verdict::Failed,
        [] => Verdict::Ok,
        skipped => Verdict::Skipped(skipped.to_vec()),
    })
}

/// Proves that no program has the switches of the bug museum. The tests have built the programs.
fn flaws(are_built: bool) -> Result<Verdict> {
    if !are_built {
        return Ok(Verdict::skipped("the tests build the programs"));
    }
    museum::absence()?;
    Ok(Verdict::Ok)
}

/// Shows that tests with real processes fail with the bug that they are about.
fn broken(are_built: bool) -> Result<Verdict> {
    if !are_built {
        return Ok(Verdict::skipped("the tests build the programs"));
    }
    Ok(Verdict::of(museum::quick_of_tests()?))
}

/// Runs the test of informers, which others leave out because it takes two minutes. `--workspace` keeps cargo
/// from building anything again with other features.
fn informers() -> Result<Verdict> {
    let mut command = cargo();
    command.args(["test", "--workspace", "--test", "kubernetes", "--", "--ignored", "informers_outlast"]);
    logged("informers", &command, AS_TESTS)
}

/// Simulates at least 50 seeds, and as many as 90 s allow.
fn simulate(is_built: bool) -> Result<Verdict> {
    let args = sim::SimArgs::of(&["--seeds", "50", "--within", "90"]);
    let code = if is_built { sim::run_of_tests(&args)? } else { sim::run(&args)? };
    Ok(Verdict::of(code == ExitCode::SUCCESS))
}

/// Strikes real replicas under load: the quick set, with invariants checked.
fn strike(are_built: bool) -> Result<Verdict> {
    if !are_built {
        return Ok(Verdict::skipped("the tests build the programs and install the tools"));
    }
    let began = Instant::now();
    let code = chaos::quick_of_tests()?;
    let took = began.elapsed();
    if took > QUICK_SET {
        line(format_args!(
            "the quick set took {}, and should take less than {}",
            human(took),
            human(QUICK_SET)
        ));
    }
    Ok(match code {
        // Twice the time is no busy machine any more: the set has grown.
        Some(0) => Verdict::of(took <= 2 * QUICK_SET),
        Some(code) if code == i32::from(suite::SKIPPED) => Verdict::skipped("see what it says above"),
        _ => Verdict::Failed,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(verdicts: &[Verdict]) -> u8 {
        Summary(verdicts.iter().map(|verdict| ("check", verdict.clone(), Duration::ZERO)).collect()).code()
    }

    #[test]
    fn a_skipped_check_has_not_passed() {
        assert_eq!(code(&[Verdict::Ok, Verdict::Ok]), 0);
        assert_eq!(code(&[Verdict::Ok, Verdict::skipped("no cargo-deny"), Verdict::Ok]), 3);
        assert_eq!(code(&[Verdict::skipped("no cargo-deny"), Verdict::Failed]), 1);
    }

    #[test]
    fn lints_share_what_the_tests_have_compiled_and_its_times() {
        let folder = tempfile::tempdir().unwrap();
        let (tests, lints) = (folder.path().join("debug"), folder.path().join("ci/lints/debug"));
        for (file, text) in [
            (".fingerprint/a-1/invoked.timestamp", "f"),
            ("build/a-1/output", "b"),
            ("deps/liba.rlib", "r"),
            ("deps/liba.rmeta", "m"),
            ("deps/libb.so", "s"),
            ("deps/tests-1", "a program"),
        ] {
            let file = tests.join(file);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, text).unwrap();
        }
        let long_ago = std::time::SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000_000);
        let stamp = File::options().write(true).open(tests.join(".fingerprint/a-1/invoked.timestamp"));
        stamp.unwrap().set_modified(long_ago).unwrap();
        share(&tests, &lints).unwrap();
        for shared in ["build/a-1/output", "deps/liba.rlib", "deps/liba.rmeta", "deps/libb.so"] {
            assert_eq!(
                fs::read(tests.join(shared)).unwrap(),
                fs::read(lints.join(shared)).unwrap(),
                "{shared}"
            );
        }
        assert!(!lints.join("deps/tests-1").exists());
        let stamp = fs::metadata(lints.join(".fingerprint/a-1/invoked.timestamp")).unwrap();
        assert_eq!(stamp.modified().unwrap(), long_ago);
        // Lints that have a folder keep it.
        fs::write(tests.join("deps/libc.so"), "c").unwrap();
        share(&tests, &lints).unwrap();
        assert!(!lints.join("deps/libc.so").exists());
    }

    /// The script of the checks, with a cargo that does nothing and so many seconds of its time used.
    fn run_after(seconds: u32) -> (Option<i32>, String) {
        use std::{fs, os::unix::fs::PermissionsExt as _, process::Command};
        let folder = tempfile::tempdir().unwrap();
        let bin = folder.path().join("bin");
        fs::create_dir_all(&bin).unwrap();
        for (program, code) in [("cargo", 0), ("cargo-deny", 0), ("cc", 0), ("rustup", 1)] {
            let file = bin.join(program);
            fs::write(&file, format!("#!/bin/sh\nexit {code}\n")).unwrap();
            fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).unwrap();
        }
        let script = folder.path().join(".ci/run");
        fs::create_dir_all(script.parent().unwrap()).unwrap();
        fs::copy(devkit::workspace::root().join(".ci/run"), &script).unwrap();
        let mut path = bin.into_os_string();
        path.push(":");
        path.push(std::env::var_os("PATH").unwrap_or_default());
        let seconds = seconds.to_string();
        let mut run = Command::new("bash");
        // bash counts on from there.
        let run = run.arg(&script).env("PATH", path).env("SECONDS", seconds);
        let output = run.output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    }

    #[test]
    fn no_time_left_is_not_a_time_without_limit() {
        assert_eq!(run_after(0).0, Some(0));
        for seconds in [3600, 3700] {
            let (code, said) = run_after(seconds);
            assert_eq!(code, Some(1), "{said}");
            assert!(said.contains("FAILED: cut after 60 min"), "{said}");
        }
    }
}
