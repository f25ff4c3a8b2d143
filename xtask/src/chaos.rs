//! `cargo xtask chaos`: builds the programs and the crate `chaos`, which strikes them.

use std::{
    ffi::OsString,
    fs,
    io::Write as _,
    path::Path,
    process::{Command, ExitCode},
};

use anyhow::{Context as _, Result};
use clap::{Args, Parser as _};
use devkit::workspace;

use self::arguments::{Arguments, ChaosArgs as ChaosArguments};

/// Where the program `chaos` looks for that build, in its own folder.
const RECORDS: &str = "records";

// Files of the crate `chaos`, which depends on kas and agentk: their build takes minutes, and a list or an
// error needs none of it.
#[path = "../../crates/chaos/src/arguments.rs"]
mod arguments;
#[expect(dead_code, reason = "only the program `chaos` runs scenarios")]
#[path = "../../crates/chaos/src/table.rs"]
mod table;

/// Arguments of `chaos`.
#[derive(Debug, Args)]
pub(crate) struct ChaosArgs {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<OsString>,
}

/// Runs `chaos` with the release profile. It finds the programs in its own folder, or where `--programs`
/// says.
pub(crate) fn run(args: &ChaosArgs) -> Result<ExitCode> {
    let words = [OsString::from("chaos")].into_iter().chain(args.arguments.iter().cloned());
    let parsed = match Arguments::try_parse_from(words) {
        Ok(parsed) => parsed,
        Err(told) => {
            // There is nothing left to do when the output is closed.
            let _ = told.print();
            return Ok(ExitCode::from(u8::try_from(told.exit_code()).unwrap_or(2)));
        }
    };
    let chaos = &parsed.chaos;
    if chaos.list {
        // The build that some scenarios need is made for them.
        let list = table::list(chaos.tracker, true);
        // A reader that has seen enough is no error.
        let _ = std::io::stdout().write_all(list.as_bytes());
        return Ok(ExitCode::SUCCESS);
    }
    let program = if chaos.no_build {
        workspace::target()?.join("release/chaos")
    } else {
        let mut build = workspace::cargo();
        build.args(["build", "--release", "-p", "chaos"]);
        if chaos.programs.is_none() && parsed.command.is_none() {
            build.args(["-p", "kas", "-p", "agentk", "-p", "kasctl"]);
        }
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let program = runtime.block_on(workspace::build(build))?.path("chaos")?.to_owned();
        if parsed.command.is_none() && needs_records(chaos) {
            let built = runtime.block_on(workspace::build(with_records()))?;
            let folder = program.with_file_name(RECORDS);
            fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
            let to = folder.join("kas");
            fs::copy(built.path("kas-with-flaws")?, &to)
                .with_context(|| format!("cannot write {}", to.display()))?;
        }
        program
    };
    status(Command::new(&program).args(&args.arguments), &program)
}

/// Whether a scenario will run that needs a build which writes records of other versions.
fn needs_records(chaos: &ChaosArguments) -> bool {
    let is_asked_for = |id: &String| table::find(id).is_ok_and(|scenario| scenario.two_builds);
    let all = chaos.scenario.is_empty() && !chaos.quick;
    chaos.other_programs.is_none() && (all || chaos.scenario.iter().any(is_asked_for))
}

/// Returns the command that builds kas with records of other versions. With the same packages as above, it
/// shares all dependencies with that build.
fn with_records() -> Command {
    let mut build = workspace::cargo();
    build.args(["build", "--release", "-p", "chaos", "-p", "kas", "-p", "agentk", "-p", "kasctl"]);
    build.args(["--features", "kas/flaws", "--bin", "kas-with-flaws"]);
    build
}

/// Runs the quick set with the programs that the tests have built. They are not optimized, so times are
/// reported and do not fail. Returns the exit code of `chaos`; `None`: a signal ended it.
pub(crate) fn quick_of_tests() -> Result<Option<i32>> {
    let program = workspace::target()?.join("debug/chaos");
    let mut command = Command::new(&program);
    let status = command.args(["--quick", "--no-gates"]).status();
    Ok(status.with_context(|| format!("cannot run {}", program.display()))?.code())
}

fn status(command: &mut Command, program: &Path) -> Result<ExitCode> {
    let status = command.status().with_context(|| format!("cannot run {}", program.display()))?;
    Ok(status.code().and_then(|code| u8::try_from(code).ok()).map_or(ExitCode::FAILURE, ExitCode::from))
}
