//! `cargo xtask bench`: builds the programs and the crate `bench`, which measures them.

use std::{ffi::OsString, process::ExitCode};

use anyhow::{Context as _, Result};
use clap::Args;
use devkit::workspace;

/// Arguments of `bench`. The program `bench` parses them.
#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<OsString>,
}

/// Runs `bench`. It finds the programs in its own folder.
pub(crate) fn run(args: &BenchArgs) -> Result<ExitCode> {
    let bench = if args.arguments.iter().any(|argument| argument == "--no-build") {
        workspace::target()?.join("release/bench")
    } else {
        // Together with the programs that `cargo build --release` builds: the features of dependencies are
        // the same then, and nothing is built twice.
        let mut build = workspace::cargo();
        build.args(["build", "--release", "-p", "kas", "-p", "agentk", "-p", "kasctl", "-p", "bench"]);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(workspace::build(build))?.path("bench")?.to_owned()
    };
    let status = std::process::Command::new(&bench)
        .args(&args.arguments)
        .status()
        .with_context(|| format!("cannot run {}", bench.display()))?;
    Ok(status.code().and_then(|code| u8::try_from(code).ok()).map_or(ExitCode::FAILURE, ExitCode::from))
}
