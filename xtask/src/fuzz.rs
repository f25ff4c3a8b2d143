//! `cargo xtask fuzz`: fuzzes each parser of input from peers, starting with its seeds.

use std::{
    ffi::OsString,
    fs::{self, File},
    io::{self, IsTerminal as _},
    path::{Path, PathBuf},
    process::{Command, ExitCode},
};

use anyhow::{Context as _, Result, bail, ensure};
use clap::Args;
use tokio::time::Instant;

use devkit::{
    report::{Style, human, line},
    workspace,
};

/// Arguments of `fuzz`.
#[derive(Debug, Args)]
pub(crate) struct FuzzArgs {
    /// Only these targets; the default is all
    #[arg(value_name = "TARGET")]
    targets: Vec<String>,
    /// How long each target is fuzzed
    #[arg(long, value_name = "SECONDS", default_value_t = SECONDS, value_parser = clap::value_parser!(u32).range(1..))]
    seconds: u32,
    /// Do not build, and run this program
    #[arg(long, value_name = "FILE", hide = true)]
    program: Option<PathBuf>,
}

/// How many log lines of a failed target are repeated.
const LOG_LINES: usize = 60;

/// For one input. By the wall clock, and all checks run fuzzing at the lowest priority beside the tests.
const TIMEOUT: &str = "-timeout=30";

/// How long each target is fuzzed by default, in seconds.
const SECONDS: u32 = 10;

/// Fuzzes each target from its seeds.
pub(crate) fn run(args: &FuzzArgs) -> Result<ExitCode> {
    let targets = chosen(&args.targets)?;
    let program = match &args.program {
        Some(program) => program.clone(),
        None => build()?,
    };
    let mut failed = Vec::new();
    for target in targets {
        if !fuzz(&program, &target, args.seconds)? {
            failed.push(target);
        }
    }
    if !failed.is_empty() {
        line(format_args!("failed: {}", failed.join(", ")));
    }
    Ok(if failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Returns the targets with these names, all if there are none. Each target has a folder of seeds.
fn chosen(names: &[String]) -> Result<Vec<String>> {
    let seeds = workspace::root().join("fuzz/corpus");
    let mut all = Vec::new();
    for entry in fs::read_dir(&seeds).context("cannot read fuzz/corpus")? {
        all.push(entry?.file_name().to_string_lossy().into_owned());
    }
    all.sort();
    if let Some(unknown) = names.iter().find(|name| !all.contains(name)) {
        bail!("there is no target {unknown}; the targets are {}", all.join(", "));
    }
    Ok(if names.is_empty() { all } else { names.to_vec() })
}

/// Builds the program that fuzzes, with the profile and the dependencies of the tests, and returns its path.
/// The address sanitizer is not in it: the crates are free of `unsafe` code, so that it would find little.
pub(crate) fn build() -> Result<PathBuf> {
    let mut command = workspace::cargo();
    command.args(["build", "--workspace", "--test", "fuzz", "--features", "fuzz-targets/libfuzzer"]);
    let wrapper = workspace::root().join("crates/fuzz-targets/rustc-with-coverage");
    command.env("RUSTC_WORKSPACE_WRAPPER", wrapper);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut program = None;
    runtime.block_on(workspace::build_seen(command, |message| {
        if message["target"]["name"] == "fuzz"
            && let Some(path) = message["executable"].as_str()
        {
            program = Some(PathBuf::from(path));
        }
    }))?;
    program.context("cargo built no program that fuzzes")
}

/// Returns the command that fuzzes each target for this many seconds.
pub(crate) fn command(program: &Path, seconds: u32) -> Result<Command> {
    let mut command = Command::new(std::env::current_exe().context("cannot find this program")?);
    command.args(["fuzz", "--seconds", &seconds.to_string(), "--program"]).arg(program);
    Ok(command)
}

/// Fuzzes one target; false if it failed.
fn fuzz(program: &Path, target: &str, seconds: u32) -> Result<bool> {
    let seeds = workspace::root().join("fuzz/corpus").join(target);
    // New inputs go into the first folder; the committed seeds stay unchanged.
    let found = workspace::target()?.join("fuzz").join(target);
    fs::create_dir_all(&found).context("cannot make a folder for what is found")?;
    let mut artifacts = OsString::from("-artifact_prefix=");
    artifacts.push(found.with_extension("failed-"));
    let mut command = Command::new(program);
    command.env("FUZZ_TARGET", target).args([&found, &seeds]).arg(artifacts);
    command.args([&format!("-max_total_time={seconds}"), TIMEOUT, "-rss_limit_mb=2048"]);
    let began = Instant::now();
    // The progress is for terminals; it would fill a log.
    let path = found.with_extension("log");
    let status = if io::stdout().is_terminal() {
        command.status()
    } else {
        let log = File::create(&path).context("cannot make a log")?;
        command.stdout(log.try_clone()?).stderr(log).status()
    };
    let ok = status.context("cannot run the program that fuzzes")?.success();
    let log = fs::read(&path).unwrap_or_default();
    let log = String::from_utf8_lossy(&log);
    let style = Style::of_stdout();
    let said = if ok { style.good("ok") } else { style.bad("FAILED") };
    line(format_args!("{target:<24} {:>8}  {said}", human(began.elapsed())));
    if !ok {
        let lines: Vec<&str> = log.lines().collect();
        for text in &lines[lines.len().saturating_sub(LOG_LINES)..] {
            line(format_args!("    | {text}"));
        }
    }
    // Without counters it would only repeat its seeds.
    ensure!(!log.contains("no interesting inputs were found"), "{target}: the program counts no coverage");
    Ok(ok)
}
