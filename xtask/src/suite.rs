//! `cargo xtask test`: builds and runs the tests, and summarizes their output.

mod totals;

use std::{
    env,
    io::{self, BufRead as _, BufReader, Write as _},
    process::{Command, ExitCode, Stdio},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use clap::Args;
use tokio::time::Instant;

use devkit::{
    report::{Style, human, line},
    workspace::{self, cargo, shown},
};

use crate::tools;
pub(crate) use totals::Totals;

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

impl TestArgs {
    /// Returns the arguments that run every test.
    pub(crate) fn installing(install: bool) -> Self {
        Self { install, ..Self::default() }
    }
}

/// The exit code if nothing failed but something was skipped although everything was to be installed.
pub(crate) const SKIPPED: u8 = 3;

/// The result of the tests.
#[derive(Debug)]
pub(crate) struct Outcome {
    /// The exit code of cargo; 0 if every test that ran passed.
    pub(crate) code: u8,
    pub(crate) totals: Totals,
    pub(crate) took: Duration,
}

impl Outcome {
    /// Prints the failures, the skipped tests, and a summary line.
    pub(crate) fn summarize(&self) {
        let Self { code, totals, took } = self;
        for (failed, said) in &totals.failed_tests {
            line(format_args!("  failed: {failed}"));
            for said in said {
                line(format_args!("    | {said}"));
            }
        }
        for skipped in &totals.skipped {
            line(format_args!("  skipped: {skipped}"));
        }
        let style = Style::of_stdout();
        let verdict = if *code == 0 { style.good("ok") } else { style.bad("FAILED") };
        line(format_args!("all tests: {verdict}. {totals}; {} with doctests", human(*took)));
    }
}

/// Runs the tests; the exit code is that of cargo.
pub(crate) fn run(args: &TestArgs) -> Result<ExitCode> {
    tools::provide(args.install)?;
    let outcome = test(args, || ())?;
    line("");
    outcome.totals.slowest().iter().for_each(line);
    outcome.summarize();
    let incomplete = args.install && !outcome.totals.skipped.is_empty();
    Ok(ExitCode::from(if outcome.code == 0 && incomplete { SKIPPED } else { outcome.code }))
}

/// Builds and runs the tests; their tools must be installed. Calls `built` between the two.
pub(crate) fn test(args: &TestArgs, built: impl FnOnce()) -> Result<Outcome> {
    // `cargo test` does not build the programs that tests start.
    let build = if args.packages.is_empty() { build_everything() } else { build_programs() };
    line(format_args!("building: {}", shown(&build)));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let programs = runtime.block_on(workspace::build(build))?;
    drop(runtime);

    let testkit = programs.path("testkit")?;
    let has = |what: &str| -> Result<bool> {
        let output = Command::new(testkit)
            .arg(what)
            .stdin(Stdio::null())
            .stderr(Stdio::inherit())
            .output()
            .context("cannot run testkit")?;
        Ok(output.status.success())
    };
    ensure!(has("kubernetes-binaries")?, "the tests have no Kubernetes API to run against");
    ensure!(has("gitaly")?, "the tests have no Gitaly to run against");
    if args.install {
        // Without it, one test is skipped and says so.
        let _ = has("valkey")?;
    }
    built();

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
    let threads = threads(&args.runner);
    command.env("RUST_TEST_THREADS", threads.to_string());
    line(format_args!("running, with {threads} tests at a time: {}", shown(&command)));
    run_tests(command, threads)
}

/// Returns the command that builds the programs for the tests of some packages.
fn build_programs() -> Command {
    let mut command = workspace::build_programs(false);
    // The tests call this service of agentk.
    command.args(["--features", "agentk/bench"]);
    command
}

/// Returns the command that builds all programs and tests for `cargo test --workspace`.
fn build_everything() -> Command {
    let mut command = cargo();
    command.args(["build", "--workspace", "--bins", "--tests"]);
    command
}

/// Returns how many tests one program runs at a time: one more than there are processors unless told
/// otherwise, because tests wait a third of their time.
fn threads(runner: &[String]) -> usize {
    let argument = runner.iter().enumerate().find_map(|(index, argument)| {
        match argument.strip_prefix("--test-threads")? {
            "" => runner.get(index + 1).cloned(),
            value => value.strip_prefix('=').map(str::to_owned),
        }
    });
    let number = argument.or_else(|| env::var("RUST_TEST_THREADS").ok()).and_then(|text| text.parse().ok());
    number.unwrap_or_else(|| thread::available_parallelism().map_or(1, usize::from) + 1)
}

/// Runs `cargo test`, passes its output on, and summarizes it.
fn run_tests(mut command: Command, threads: usize) -> Result<Outcome> {
    let began = Instant::now();
    // One pipe for both, so that the output of cargo stays between that of the tests.
    let (output, input) = io::pipe().context("cannot make a pipe")?;
    command.stdout(input.try_clone()?).stderr(input);
    let mut child = command.spawn().context("cannot run cargo")?;
    // The command has the other end, too, so the output would never end.
    drop(command);
    let mut output = BufReader::new(output);
    let mut totals = Totals::new(threads);
    let mut seen = Vec::new();
    loop {
        let chunk = output.fill_buf().context("cannot read what the tests print")?;
        let length = chunk.len();
        if length == 0 {
            break;
        }
        // Immediately: the runner prints the name of a test before it runs.
        let mut stdout = io::stdout();
        let _ = stdout.write_all(chunk).and_then(|()| stdout.flush());
        seen.extend_from_slice(chunk);
        output.consume(length);
        while let Some(end) = seen.iter().position(|byte| *byte == b'\n') {
            totals.add(&String::from_utf8_lossy(&seen[..end]), began.elapsed());
            seen.drain(..=end);
        }
    }
    let status = child.wait().context("cannot wait for cargo")?;
    // No code: a signal ended it.
    let code = status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1);
    Ok(Outcome { code, totals, took: began.elapsed() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_threads_is_that_of_the_runner() {
        let threads = |arguments: &[&str]| {
            threads(&arguments.iter().map(|argument| (*argument).to_owned()).collect::<Vec<_>>())
        };
        assert_eq!(threads(&["--nocapture", "--test-threads", "7"]), 7);
        assert_eq!(threads(&["--test-threads=1"]), 1);
        assert!(threads(&[]) >= 1);
    }
}
