//! `cargo xtask man`: the pages of the manual.

use std::{
    path::PathBuf,
    process::{Command, ExitCode},
};

use anyhow::{Context as _, Result};
use clap::Args;

use crate::workspace;

const HELP: &str = "\
Examples:
  cargo xtask man && man -l target/man/kas.1
  cargo xtask man --out /usr/local/share/man/man1";

/// Arguments of `man`.
#[derive(Debug, Args)]
#[command(after_help = HELP)]
pub(crate) struct ManArgs {
    /// The folder that they go into; it is made when it is not there [default: target/man of the workspace]
    #[arg(long, value_name = "FOLDER")]
    out: Option<PathBuf>,
}

/// Builds what knows the programs' command lines, and lets it write.
pub(crate) fn run(args: &ManArgs) -> Result<ExitCode> {
    // Beside the programs, for which all of it but the last link is built anyway.
    let mut build = workspace::build_programs(false);
    build.args(["-p", "man"]);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let programs = runtime.block_on(workspace::build(build))?;
    let folder = args.out.clone().unwrap_or_else(|| workspace::root().join("target/man"));
    let status = Command::new(programs.path("man")?)
        .arg(folder)
        .status()
        .context("cannot run what writes the pages")?;
    Ok(if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
