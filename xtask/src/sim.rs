//! `cargo xtask sim`: builds the crate `sim` and runs it.

use std::{ffi::OsString, process::ExitCode};

use anyhow::{Context as _, Result};
use clap::Args;
use devkit::workspace;

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

/// Runs `sim`.
pub(crate) fn run(args: &SimArgs) -> Result<ExitCode> {
    // With the features of the tests, so that nothing is built twice.
    let mut build = workspace::cargo();
    build.args(["build", "--workspace", "--bin", "sim"]);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let sim = runtime.block_on(workspace::build(build))?.path("sim")?.to_owned();
    let status = std::process::Command::new(&sim)
        .args(&args.arguments)
        .status()
        .with_context(|| format!("cannot run {}", sim.display()))?;
    Ok(status.code().and_then(|code| u8::try_from(code).ok()).map_or(ExitCode::FAILURE, ExitCode::from))
}
