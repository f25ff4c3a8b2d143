//! `cargo xtask man`: writes the manual pages.

use std::{
    path::PathBuf,
    process::{Command, ExitCode},
};

use anyhow::{Context as _, Result};
use clap::Args;

use devkit::workspace;

const HELP: &str = "\
Examples:
  cargo xtask man && man -l target/man/kas.1
  cargo xtask man --out /usr/local/share/man/man1";

/// Arguments of `man`.
#[derive(Debug, Args)]
#[command(after_help = HELP)]
pub(crate) struct ManArgs {
    /// Output folder, which is created if necessary [default: target/man of the workspace]
    #[arg(long, value_name = "FOLDER")]
    out: Option<PathBuf>,
}

/// Builds and runs the crate `man`.
pub(crate) fn run(args: &ManArgs) -> Result<ExitCode> {
    // Together with the programs, which need the same dependencies with the same features.
    let mut build = workspace::build_programs(false);
    build.args(["-p", "man"]);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let programs = runtime.block_on(workspace::build(build))?;
    let folder = args.out.clone().unwrap_or_else(|| workspace::root().join("target/man"));
    let status =
        Command::new(programs.path("man")?).arg(folder).status().context("cannot run the crate man")?;
    Ok(if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
