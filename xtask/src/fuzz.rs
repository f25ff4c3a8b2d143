//! `cargo xtask fuzz`: fuzzes each parser of input from peers, starting with its seeds.

use std::{
    fs::{self, File},
    io::{self, IsTerminal as _},
    process::{Command, ExitCode, Stdio},
};

use anyhow::{Context as _, Result};
use clap::Args;
use tokio::time::Instant;

use devkit::{
    report::{Style, human, line},
    workspace,
};

/// Arguments of `fuzz`.
#[derive(Debug, Args)]
pub(crate) struct FuzzArgs {
    /// How long each target is fuzzed
    #[arg(long, value_name = "SECONDS", default_value_t = SECONDS, value_parser = clap::value_parser!(u32).range(1..))]
    seconds: u32,
}

/// How many log lines of a failed target are repeated.
const LOG_LINES: usize = 60;

/// For one input. By the wall clock, and all checks run fuzzing at the lowest priority beside the tests.
const TIMEOUT: &str = "-timeout=30";

/// How long each target is fuzzed by default, in seconds.
const SECONDS: u32 = 10;

/// Fuzzes each target from its seeds.
pub(crate) fn run(args: &FuzzArgs) -> Result<ExitCode> {
    Ok(match fuzz_each(args.seconds)? {
        Outcome::Ok => ExitCode::SUCCESS,
        Outcome::Failed => ExitCode::FAILURE,
        Outcome::NotRun(reason) => {
            line(reason);
            ExitCode::SUCCESS
        }
    })
}

/// The result of fuzzing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Ok,
    Failed,
    NotRun(&'static str),
}

/// Why nothing is fuzzed without a nightly toolchain.
pub(crate) const NO_NIGHTLY: &str = "not fuzzed: there is no nightly toolchain; the tests run the seeds";
const NO_CARGO_FUZZ: &str = "not fuzzed: there is no cargo-fuzz; the tests run the seeds";

/// How the targets are built. The crates are free of `unsafe` code, so the address sanitizer would slow down
/// the build and find little. One unit for each crate, the default, is for long runs.
const BUILD: [&str; 3] = ["--sanitizer", "none", "--codegen-units=16"];

/// Returns cargo of the nightly toolchain.
fn nightly() -> Command {
    // rustup selects the toolchain, not the cargo that runs this.
    let mut command = Command::new("rustup");
    command.args(["run", "nightly", "cargo"]).current_dir(workspace::root());
    command.env_remove("CARGO").env_remove("RUSTUP_TOOLCHAIN");
    command
}

/// Returns why nothing can be fuzzed here, if so.
pub(crate) fn missing() -> Option<&'static str> {
    let there = nightly().arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    if !there.is_ok_and(|status| status.success()) {
        return Some(NO_NIGHTLY);
    }
    workspace::find_program("cargo-fuzz").is_none().then_some(NO_CARGO_FUZZ)
}

/// Returns the command that builds and fuzzes each target for this many seconds.
pub(crate) fn command(seconds: u32) -> Result<Command> {
    let mut command = Command::new(std::env::current_exe().context("cannot find this program")?);
    command.args(["fuzz", "--seconds", &seconds.to_string()]);
    Ok(command)
}

/// Fuzzes each target from its seeds, for this many seconds each.
fn fuzz_each(seconds: u32) -> Result<Outcome> {
    if let Some(reason) = missing() {
        return Ok(Outcome::NotRun(reason));
    }
    let built = nightly().args(["fuzz", "build"]).args(BUILD).status().context("cannot run cargo fuzz")?;
    if !built.success() {
        return Ok(Outcome::Failed);
    }
    let seeds = workspace::root().join("fuzz/corpus");
    let mut failed = Vec::new();
    for entry in fs::read_dir(&seeds).context("cannot read fuzz/corpus")? {
        let seeds = entry?.path();
        let name = seeds.file_name().unwrap_or_default().to_string_lossy().into_owned();
        // New inputs go into the first folder; the committed seeds stay unchanged.
        let found = workspace::root().join("fuzz/target/found").join(&name);
        fs::create_dir_all(&found).context("cannot make a folder for what is found")?;
        let time = format!("-max_total_time={seconds}");
        let mut command = nightly();
        command.args(["fuzz", "run"]).args(BUILD).arg(&name).args([&found, &seeds]);
        command.args(["--", &time, TIMEOUT, "-rss_limit_mb=2048"]);
        let began = Instant::now();
        // The progress is for terminals; it would fill a log.
        let (status, log) = if io::stdout().is_terminal() {
            (command.status(), None)
        } else {
            let path = found.with_extension("log");
            let log = File::create(&path).context("cannot make a log")?;
            (command.stdout(log.try_clone()?).stderr(log).status(), Some(path))
        };
        let ok = status.context("cannot run cargo fuzz")?.success();
        let style = Style::of_stdout();
        let said = if ok { style.good("ok") } else { style.bad("FAILED") };
        line(format_args!("{name:<24} {:>8}  {said}", human(began.elapsed())));
        if !ok {
            failed.push(name);
            let log = log.map(fs::read).transpose()?.unwrap_or_default();
            let log = String::from_utf8_lossy(&log);
            let lines: Vec<&str> = log.lines().collect();
            for text in &lines[lines.len().saturating_sub(LOG_LINES)..] {
                line(format_args!("    | {text}"));
            }
        }
    }
    if !failed.is_empty() {
        line(format_args!("failed: {}", failed.join(", ")));
    }
    Ok(if failed.is_empty() { Outcome::Ok } else { Outcome::Failed })
}
