//! `cargo xtask test` and `cargo xtask ci`.

use std::{
    io::{self, BufRead as _, BufReader, IsTerminal as _, Write as _},
    process::{Command, ExitCode, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use clap::Args;
use tokio::time::Instant;

use crate::{
    layers,
    report::{Style, human, line},
    tools,
    workspace::{self, cargo, shown},
};

const TEST_HELP: &str = "\
Examples:
  cargo xtask test                    everything; the first time builds kube-apiserver, too: ten minutes or so
  cargo xtask test --install          the same, and what is missing is installed by apt (Debian, as root)
  cargo xtask test watch pods         tests whose name contains one of these
  cargo xtask test -p tunnel          one crate
  cargo xtask test pods -- --nocapture";

/// Arguments of `test`.
#[derive(Debug, Args, Default)]
#[command(after_help = TEST_HELP)]
pub(crate) struct TestArgs {
    /// Only tests whose name contains one of these
    #[arg(value_name = "FILTER")]
    filters: Vec<String>,
    /// Only tests of this crate; may be repeated
    #[arg(short, long = "package", value_name = "CRATE")]
    packages: Vec<String>,
    /// Install what is missing by apt-get
    #[arg(long)]
    install: bool,
    /// For the test runner
    #[arg(last = true, value_name = "ARGUMENT")]
    runner: Vec<String>,
}

/// Arguments of `ci`.
#[derive(Debug, Args)]
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

/// Runs the tests; the exit code is cargo's.
pub(crate) fn test(args: &TestArgs) -> Result<ExitCode> {
    tools::provide(args.install)?;

    // `cargo test` does not build the programs that tests start.
    let build = if args.packages.is_empty() { build_everything() } else { workspace::build_programs(false) };
    line(format_args!("building: {}", shown(&build)));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let programs = runtime.block_on(workspace::build(build))?;
    drop(runtime);

    let xtask = programs.path("xtask")?;
    let has = |what: &str| -> Result<bool> {
        let output = Command::new(xtask)
            .arg(what)
            .stdin(Stdio::null())
            .stderr(Stdio::inherit())
            .output()
            .context("cannot run the build of xtask")?;
        Ok(output.status.success())
    };
    ensure!(has("kubernetes-binaries")?, "the tests have no Kubernetes API to run against");
    // Without it one test says that it is skipped; not where everything was to be installed.
    ensure!(!args.install || has("valkey")?, "there is no Valkey to test with: its message is above");

    let mut command = cargo();
    command.args(["test", "--no-fail-fast"]);
    if args.packages.is_empty() {
        command.arg("--workspace");
    }
    command.args(args.packages.iter().flat_map(|package| ["-p", package]));
    let colours = Style::of_stdout().is_coloured();
    if !args.filters.is_empty() || !args.runner.is_empty() || colours {
        command.arg("--").args(&args.filters).args(&args.runner);
        if colours {
            // The output goes through this process, so that neither cargo nor the runner sees a terminal.
            command.arg("--color=always").env("CARGO_TERM_COLOR", "always");
        }
    }
    line(format_args!("running: {}", shown(&command)));
    run_tests(command)
}

/// Returns the command that builds all programs and tests: what `cargo test --workspace` then finds done.
fn build_everything() -> Command {
    let mut command = cargo();
    command.args(["build", "--workspace", "--bins", "--tests"]);
    command
}

/// Runs `cargo test`, passes its output on, and ends with one line about all of it.
fn run_tests(mut command: Command) -> Result<ExitCode> {
    let began = Instant::now();
    // One pipe for both, so that what cargo says stays between the tests that it is about.
    let (output, input) = io::pipe().context("cannot make a pipe")?;
    command.stdout(input.try_clone()?).stderr(input);
    let mut child = command.spawn().context("cannot run cargo")?;
    // The command holds the other end, too: the output would never end.
    drop(command);
    let mut output = BufReader::new(output);
    let mut totals = Totals::default();
    let mut seen = Vec::new();
    loop {
        let chunk = output.fill_buf().context("cannot read what the tests print")?;
        let length = chunk.len();
        if length == 0 {
            break;
        }
        // As it comes: the runner prints the name of a test before it runs.
        let mut stdout = io::stdout();
        let _ = stdout.write_all(chunk).and_then(|()| stdout.flush());
        seen.extend_from_slice(chunk);
        output.consume(length);
        while let Some(end) = seen.iter().position(|byte| *byte == b'\n') {
            totals.add(&String::from_utf8_lossy(&seen[..end]));
            seen.drain(..=end);
        }
    }
    let status = child.wait().context("cannot wait for cargo")?;
    let style = Style::of_stdout();
    let verdict = if status.success() { style.good("ok") } else { style.bad("FAILED") };
    for (failed, said) in &totals.failed_tests {
        line(format_args!("  failed: {failed}"));
        for said in said {
            line(format_args!("    | {said}"));
        }
    }
    line(format_args!("\nall tests: {verdict}. {totals}; {} with doctests", human(began.elapsed())));
    Ok(status.code().and_then(|code| u8::try_from(code).ok()).map_or(ExitCode::FAILURE, ExitCode::from))
}

/// How much of what a failed test said is repeated at the end, in lines and in characters of each.
const SAID: usize = 60;
const SAID_LINE: usize = 400;

/// Sums of the runner's closing lines, and what failed.
#[derive(Debug, Default, PartialEq, Eq)]
struct Totals {
    passed: u64,
    failed: u64,
    ignored: u64,
    /// With the beginning of what each said.
    failed_tests: Vec<(String, Vec<String>)>,
    /// Which of them speaks now.
    speaks: Option<usize>,
}

impl Totals {
    fn add(&mut self, line: &str) {
        let line = without_colours(line);
        if let Some(name) = line.strip_prefix("test ").and_then(|rest| rest.strip_suffix(" ... FAILED")) {
            self.failed_tests.push((name.to_owned(), Vec::new()));
        }
        let speaker = line.strip_prefix("---- ").and_then(|rest| rest.strip_suffix(" stdout ----"));
        if let Some(speaker) = speaker {
            // The last of this name: other programs may have tests of the same.
            self.speaks = self.failed_tests.iter().rposition(|(name, _)| name == speaker);
            return;
        }
        // Where it was is not what it said.
        if line == "failures:" || line == "Stack backtrace:" || line == "stack backtrace:" {
            self.speaks = None;
        }
        if let Some((_, said)) = self.speaks.and_then(|index| self.failed_tests.get_mut(index))
            && said.len() < SAID
            && !(line.is_empty() && said.is_empty())
        {
            said.push(line.chars().take(SAID_LINE).collect());
        }
        let Some((_, counts)) = line.strip_prefix("test result: ").and_then(|rest| rest.split_once(". "))
        else {
            return;
        };
        for count in counts.split(';') {
            let mut words = count.split_whitespace();
            let (Some(number), Some(what)) = (words.next().and_then(|n| n.parse::<u64>().ok()), words.next())
            else {
                continue;
            };
            match what {
                "passed" => self.passed += number,
                "failed" => self.failed += number,
                "ignored" => self.ignored += number,
                _ => {}
            }
        }
    }
}

impl std::fmt::Display for Totals {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} passed, {} failed, {} ignored", self.passed, self.failed, self.ignored)
    }
}

/// Removes the escape sequences of colours.
fn without_colours(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    let mut parts = text.split('\u{1b}');
    plain.push_str(parts.next().unwrap_or_default());
    for part in parts {
        let end = part.find(|c: char| c.is_ascii_alphabetic()).map_or(part.len(), |end| end + 1);
        // What the runner ends a colour with on some terminals.
        plain.push_str(part[end..].trim_start_matches('\u{f}'));
    }
    plain
}

/// How a check ended.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Verdict {
    Ok,
    Failed,
    Skipped(&'static str),
}

/// Runs every check, also after one failed, the quick ones first.
pub(crate) fn ci(args: &CiArgs) -> Result<ExitCode> {
    let mut summary: Vec<(&str, Verdict, Duration)> = Vec::new();
    let mut check = |name: &'static str, run: &mut dyn FnMut() -> Result<Verdict>| {
        line(format_args!("\n{}", Style::of_stdout().bold(format_args!("== {name}"))));
        let began = Instant::now();
        let verdict = run().unwrap_or_else(|error| {
            let _ = crate::report::error(&error);
            Verdict::Failed
        });
        summary.push((name, verdict, began.elapsed()));
    };
    check("fmt", &mut || cargo_check(&["fmt", "--all", "--check"], &[]));
    check("layers", &mut || Ok(verdict(layers::run()? == ExitCode::SUCCESS)));
    check("deny", &mut deny);
    if !args.quick {
        let clippy = ["clippy", "--workspace", "--all-targets", "--locked", "--", "-D", "warnings"];
        check("clippy", &mut || cargo_check(&clippy, &[]));
        // The second look: what the alias builds leaves much out, and a warning there would be seen by nobody.
        let light = ["clippy", "-p", "xtask", "--no-default-features", "--locked", "--", "-D", "warnings"];
        check("clippy, xtask alone", &mut || cargo_check(&light, &[]));
        let doc = ["doc", "--workspace", "--no-deps", "--locked"];
        check("doc", &mut || cargo_check(&doc, &[("RUSTDOCFLAGS", "-D warnings")]));
    }
    if !args.quick && !args.no_test {
        let tests = TestArgs { install: args.install, ..TestArgs::default() };
        check("test", &mut || Ok(verdict(test(&tests)? == ExitCode::SUCCESS)));
        check("fuzz", &mut || fuzz_each(FUZZED));
    }

    let style = Style::of_stdout();
    line(format_args!("\n{}", style.bold("== summary")));
    for (name, verdict, took) in &summary {
        let shown = match verdict {
            Verdict::Ok => style.good("ok"),
            Verdict::Failed => style.bad("FAILED"),
            Verdict::Skipped(why) => format!("skipped: {why}"),
        };
        line(format_args!("{name:<20} {:>12}  {shown}", human(*took)));
    }
    let failed = summary.iter().any(|(_, verdict, _)| *verdict == Verdict::Failed);
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn verdict(ok: bool) -> Verdict {
    if ok { Verdict::Ok } else { Verdict::Failed }
}

fn cargo_check(arguments: &[&str], environment: &[(&str, &str)]) -> Result<Verdict> {
    let status =
        cargo().args(arguments).envs(environment.iter().copied()).status().context("cannot run cargo")?;
    Ok(verdict(status.success()))
}

fn deny() -> Result<Verdict> {
    if workspace::find_program("cargo-deny").is_none() {
        return Ok(Verdict::Skipped("there is no cargo-deny; cargo install --locked cargo-deny gets it"));
    }
    // Advisories come from a database on the network: what is yesterday's answer cannot gate today's change.
    cargo_check(&["deny", "--log-level", "error", "check", "licenses", "bans", "sources"], &[])
}

/// What `cargo xtask fuzz` takes.
#[derive(Debug, Args)]
pub(crate) struct FuzzArgs {
    /// How long each target is fuzzed
    #[arg(long, value_name = "SECONDS", default_value_t = FUZZED, value_parser = clap::value_parser!(u32).range(1..))]
    seconds: u32,
}

/// How long each target is fuzzed unless told otherwise, in seconds.
const FUZZED: u32 = 10;

/// Fuzzes each target from its seeds.
pub(crate) fn fuzz(args: &FuzzArgs) -> Result<ExitCode> {
    Ok(match fuzz_each(args.seconds)? {
        Verdict::Ok => ExitCode::SUCCESS,
        Verdict::Failed => ExitCode::FAILURE,
        Verdict::Skipped(why) => {
            line(format_args!("skipped: {why}"));
            ExitCode::SUCCESS
        }
    })
}

/// Fuzzes each target from its seeds. Without the tools that is skipped: the tests have run the seeds.
fn fuzz_each(seconds: u32) -> Result<Verdict> {
    if workspace::find_program("cargo-fuzz").is_none() {
        return Ok(Verdict::Skipped("there is no cargo-fuzz; the tests run its seeds"));
    }
    // A toolchain is chosen by rustup, not by the cargo that runs this.
    let nightly = || {
        let mut command = Command::new("rustup");
        command.args(["run", "nightly", "cargo"]).current_dir(workspace::root());
        command.env_remove("CARGO").env_remove("RUSTUP_TOOLCHAIN");
        command
    };
    let there = nightly().arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    if !there.is_ok_and(|status| status.success()) {
        return Ok(Verdict::Skipped("there is no nightly toolchain; the tests run the seeds"));
    }
    // One unit for each crate, the default, is for long runs.
    const UNITS: &str = "--codegen-units=16";
    let built = nightly().args(["fuzz", "build", UNITS]).status().context("cannot run cargo fuzz")?;
    if !built.success() {
        return Ok(Verdict::Failed);
    }
    let seeds = workspace::root().join("fuzz/corpus");
    let mut failed = Vec::new();
    for entry in std::fs::read_dir(&seeds).context("cannot read fuzz/corpus")? {
        let seeds = entry?.path();
        let name = seeds.file_name().unwrap_or_default().to_string_lossy().into_owned();
        // What is found goes into the first folder; the seeds stay as they were committed.
        let found = workspace::root().join("fuzz/target/found").join(&name);
        std::fs::create_dir_all(&found).context("cannot make a folder for what is found")?;
        let time = format!("-max_total_time={seconds}");
        let mut command = nightly();
        command.args(["fuzz", "run", UNITS, &name]).args([&found, &seeds]);
        command.args(["--", &time, "-timeout=10", "-rss_limit_mb=2048"]);
        let began = Instant::now();
        // A person sees it work; a log would be full of it.
        let (status, log) = if io::stdout().is_terminal() {
            (command.status(), None)
        } else {
            let path = found.with_extension("log");
            let log = std::fs::File::create(&path).context("cannot make a log")?;
            (command.stdout(log.try_clone()?).stderr(log).status(), Some(path))
        };
        let ok = status.context("cannot run cargo fuzz")?.success();
        let style = Style::of_stdout();
        let said = if ok { style.good("ok") } else { style.bad("FAILED") };
        line(format_args!("{name:<24} {:>8}  {said}", human(began.elapsed())));
        if !ok {
            failed.push(name);
            let log = log.map(std::fs::read).transpose()?.unwrap_or_default();
            let log = String::from_utf8_lossy(&log);
            let lines: Vec<&str> = log.lines().collect();
            for text in &lines[lines.len().saturating_sub(SAID)..] {
                line(format_args!("    | {text}"));
            }
        }
    }
    if !failed.is_empty() {
        line(format_args!("failed: {}", failed.join(", ")));
    }
    Ok(verdict(failed.is_empty()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn totals_add_up_what_the_runner_prints() {
        let mut totals = Totals::default();
        for line in [
            "running 3 tests",
            "test a::b ... ok",
            "test a::c ... FAILED",
            "",
            "failures:",
            "",
            "---- a::c stdout ----",
            "",
            "thread 'a::c' panicked at a.rs:1:2:",
            "no",
            "stack backtrace:",
            "   0: main",
            "",
            "failures:",
            "    a::c",
            "test result: ok. 12 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.02s",
            "test result: \u{1b}[31mFAILED\u{1b}(B\u{1b}[m. 3 passed; 2 failed; 0 ignored; 0 measured; 7 filtered out; finished in 1s",
        ] {
            totals.add(line);
        }
        let said = vec!["thread 'a::c' panicked at a.rs:1:2:".to_owned(), "no".to_owned()];
        let failed_tests = vec![("a::c".to_owned(), said)];
        assert_eq!(totals, Totals { passed: 15, failed: 2, ignored: 1, failed_tests, speaks: None });
    }
}
