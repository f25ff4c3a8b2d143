//! `cargo xtask sim`: builds the crate `sim` and runs it.

use std::{ffi::OsString, path::Path, process::ExitCode};

use anyhow::{Context as _, Result};
use clap::Args;
use devkit::workspace;

/// What chooses the release profile. It is no argument of `sim`.
const RELEASE: &str = "--release";

/// Arguments of `sim`. The program `sim` parses them.
#[derive(Debug, Args)]
pub(crate) struct SimArgs {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<OsString>,
}

impl SimArgs {
    /// Returns these arguments.
    pub(crate) fn of(arguments: &[&str]) -> Self {
        Self { arguments: arguments.iter().map(OsString::from).collect() }
    }
}

/// Runs `sim`, with the release profile if the arguments say so.
pub(crate) fn run(args: &SimArgs) -> Result<ExitCode> {
    let (release, arguments): (Vec<_>, Vec<_>) =
        args.arguments.iter().cloned().partition(|argument| argument == RELEASE);
    let mut build = workspace::cargo();
    build.args(["build", "--workspace", "--bin", "sim"]);
    if !release.is_empty() {
        build.arg(RELEASE);
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let sim = runtime.block_on(workspace::build(build))?.path("sim")?.to_owned();
    run_program(&sim, &SimArgs { arguments })
}

/// Runs `sim` as the tests have built it, with the features of everything. To build it alone would build most
/// of the workspace once more.
pub(crate) fn run_of_tests(args: &SimArgs) -> Result<ExitCode> {
    run_program(&workspace::target()?.join("debug/sim"), args)
}

fn run_program(sim: &Path, args: &SimArgs) -> Result<ExitCode> {
    let status = std::process::Command::new(sim)
        .args(&args.arguments)
        .status()
        .with_context(|| format!("cannot run {}", sim.display()))?;
    Ok(status.code().and_then(|code| u8::try_from(code).ok()).map_or(ExitCode::FAILURE, ExitCode::from))
}
