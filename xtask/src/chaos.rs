//! `cargo xtask chaos`: builds the programs and the crate `chaos`, which strikes them.

use std::{
    ffi::OsString,
    path::Path,
    process::{Command, ExitCode},
};

use anyhow::{Context as _, Result};
use clap::Args;
use devkit::workspace;

/// Arguments of `chaos`. The program `chaos` parses them.
#[derive(Debug, Args)]
pub(crate) struct ChaosArgs {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<OsString>,
}

/// Runs `chaos` with the release profile. It finds the programs in its own folder, or where `--programs`
/// says.
pub(crate) fn run(args: &ChaosArgs) -> Result<ExitCode> {
    let given = |flag: &str| args.arguments.iter().any(|argument| argument == flag);
    let chaos = if given("--no-build") {
        workspace::target()?.join("release/chaos")
    } else {
        let mut build = workspace::cargo();
        build.args(["build", "--release", "-p", "chaos"]);
        if !given("--programs") {
            build.args(["-p", "kas", "-p", "agentk", "-p", "kasctl"]);
        }
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(workspace::build(build))?.path("chaos")?.to_owned()
    };
    status(Command::new(&chaos).args(&args.arguments), &chaos)
}

fn status(command: &mut Command, program: &Path) -> Result<ExitCode> {
    let status = command.status().with_context(|| format!("cannot run {}", program.display()))?;
    Ok(status.code().and_then(|code| u8::try_from(code).ok()).map_or(ExitCode::FAILURE, ExitCode::from))
}
