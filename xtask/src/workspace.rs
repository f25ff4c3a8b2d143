//! Where the workspace is, and cargo.

use std::{
    collections::HashMap,
    env,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::Value;
use tokio::io::{AsyncBufReadExt as _, BufReader};

use crate::tools;

/// The programs that are built together. One command for all of them, and always the same: cargo chooses the features
/// of shared dependencies by what is built together, and a different set compiles most of them again.
const PROGRAMS: [&str; 4] = ["kas", "agentk", "kasctl", "xtask"];

/// Returns the folder of the workspace.
pub(crate) fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask is a folder of the workspace")
}

/// Returns the cargo that runs this, to be run in the workspace.
pub(crate) fn cargo() -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root());
    // `cargo run` describes xtask to xtask in these; a build script that looks at them would run again for nothing.
    for (name, _) in env::vars_os() {
        let name_text = name.to_string_lossy();
        if name_text.starts_with("CARGO_PKG_") || name_text.starts_with("CARGO_MANIFEST_") {
            command.env_remove(name);
        }
    }
    command
}

/// Returns a command as a person would type it.
pub(crate) fn shown(command: &Command) -> String {
    let quoted = |text: &std::ffi::OsStr| crate::report::quoted(&text.to_string_lossy());
    let mut words = vec!["cargo".to_owned()];
    words.extend(command.get_args().map(quoted));
    words.join(" ")
}

/// What a build made.
#[derive(Debug)]
pub(crate) struct Programs(HashMap<String, PathBuf>);

impl Programs {
    /// Takes what was built before, with the build that runs this.
    pub(crate) fn beside_this_one() -> Result<Self> {
        let this = env::current_exe().context("this program has no path")?;
        let programs = PROGRAMS.iter().map(|name| (name.to_string(), this.with_file_name(name))).collect();
        Ok(Self(programs))
    }

    /// Returns the executable with this name.
    pub(crate) fn path(&self, name: &str) -> Result<&Path> {
        self.0.get(name).map(PathBuf::as_path).with_context(|| format!("the build left no executable {name}"))
    }
}

/// Returns the command that builds every program.
pub(crate) fn build_programs(release: bool) -> Command {
    let mut command = cargo();
    command.arg("build");
    for program in PROGRAMS {
        command.args(["-p", program]);
    }
    if release {
        command.arg("--release");
    }
    command
}

/// Runs a build, with cargo's own progress on standard error, and returns the executables it made.
pub(crate) async fn build(command: Command) -> Result<Programs> {
    build_seen(command, |_| {}).await
}

/// Like [`build`], and shows each thing that was compiled, as cargo's message about it.
pub(crate) async fn build_seen(mut command: Command, mut seen: impl FnMut(&Value)) -> Result<Programs> {
    // The messages tell where the executables are, whatever the target folder and the profile.
    command.arg("--message-format=json-render-diagnostics").stdin(Stdio::null()).stdout(Stdio::piped());
    let shown = shown(&command);
    let mut child =
        tokio::process::Command::from(command).kill_on_drop(true).spawn().context("cannot run cargo")?;
    let stdout = child.stdout.take().context("cargo has no standard output")?;
    let mut lines = BufReader::new(stdout).lines();
    let mut programs = HashMap::new();
    while let Some(line) = lines.next_line().await.context("cannot read what cargo says")? {
        let Ok(message) = serde_json::from_str::<Value>(&line) else { continue };
        if message["reason"] != "compiler-artifact" {
            continue;
        }
        seen(&message);
        // Tests are executables, too, and may have the name of a program.
        if message["profile"]["test"] == false
            && let (Some(name), Some(path)) =
                (message["target"]["name"].as_str(), message["executable"].as_str())
        {
            programs.insert(name.to_owned(), path.into());
        }
    }
    let status = child.wait().await.context("cannot wait for cargo")?;
    if !status.success() {
        match tools::c_compiler_missing() {
            Some(missing) => bail!("the build failed: {missing}"),
            None => bail!("the build failed: the reason stands above, from: {shown}"),
        }
    }
    Ok(Programs(programs))
}

/// Arguments that the build with everything in it understands.
#[cfg(not(feature = "full"))]
#[derive(Debug, clap::Args)]
pub(crate) struct Passed {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<std::ffi::OsString>,
}

/// Runs `bench` as the build with everything in it, which is optimised, as what it measures is.
#[cfg(not(feature = "full"))]
pub(crate) fn bench(passed: &Passed) -> Result<std::process::ExitCode> {
    use std::process::ExitCode;

    let xtask = if passed.arguments.iter().any(|argument| argument == "--no-build") {
        let metadata = metadata()?;
        let target =
            metadata["target_directory"].as_str().context("cargo metadata names no target folder")?;
        Path::new(target).join("release/xtask")
    } else {
        // As the benchmark builds them, which then has nothing left to do.
        let mut build = cargo();
        build.args(["build", "--profile", "bench", "-p", "kas", "-p", "agentk", "-p", "xtask"]);
        build.args(["--features", "agentk/bench-direct"]);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(self::build(build))?.path("xtask")?.to_owned()
    };
    let status = Command::new(&xtask)
        .arg("bench")
        .args(&passed.arguments)
        .status()
        .with_context(|| format!("cannot run {}", xtask.display()))?;
    Ok(status.code().and_then(|code| u8::try_from(code).ok()).map_or(ExitCode::FAILURE, ExitCode::from))
}

/// Returns what `cargo metadata` says about the members.
pub(crate) fn metadata() -> Result<Value> {
    let output = cargo()
        .args(["metadata", "--no-deps", "--format-version", "1"])
        .stderr(Stdio::inherit())
        .output()
        .context("cannot run cargo")?;
    ensure!(output.status.success(), "cargo metadata failed");
    serde_json::from_slice(&output.stdout).context("cargo metadata printed no JSON")
}

/// Looks for a program as a shell does.
pub(crate) fn find_program(name: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH")?;
    env::split_paths(&path).map(|folder| folder.join(name)).find(|candidate| candidate.is_file())
}
