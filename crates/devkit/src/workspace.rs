//! The folder of the workspace, and cargo.

use std::{
    collections::HashMap,
    env,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::Value;
use tokio::io::{AsyncBufReadExt as _, BufReader};

/// The programs that are always built together, with one command: cargo chooses the features of shared
/// dependencies by the set of packages, and would recompile most of them for a different set.
const PROGRAMS: [&str; 4] = ["kas", "agentk", "kasctl", "testkit"];

/// Returns the folder of the workspace.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .ancestors()
        .nth(2)
        .expect("the crate is in a folder of the workspace")
}

/// Returns a command for the cargo that runs this program, in the folder of the workspace.
pub fn cargo() -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root());
    // `cargo run` sets these for xtask. They would make build scripts that depend on them run again.
    for (name, _) in env::vars_os() {
        let name_text = name.to_string_lossy();
        if name_text.starts_with("CARGO_PKG_") || name_text.starts_with("CARGO_MANIFEST_") {
            command.env_remove(name);
        }
    }
    command
}

/// Returns a command of cargo as it is typed in a shell.
pub fn shown(command: &Command) -> String {
    let quoted = |text: &std::ffi::OsStr| crate::report::quoted(&text.to_string_lossy());
    let mut words = vec!["cargo".to_owned()];
    words.extend(command.get_args().map(quoted));
    words.join(" ")
}

/// The executables of a build.
#[derive(Debug)]
pub struct Programs(HashMap<String, PathBuf>);

impl Programs {
    /// Returns the executables in the folder of this one.
    pub fn beside_this_one() -> Result<Self> {
        let this = env::current_exe().context("this program has no path")?;
        let programs = PROGRAMS.iter().map(|name| (name.to_string(), this.with_file_name(name))).collect();
        Ok(Self(programs))
    }

    /// Returns the executable with this name.
    pub fn path(&self, name: &str) -> Result<&Path> {
        self.0.get(name).map(PathBuf::as_path).with_context(|| format!("cargo built no executable {name}"))
    }
}

/// Returns the command that builds the programs.
pub fn build_programs(release: bool) -> Command {
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

/// Runs a build, with cargo's progress on standard error, and returns the executables.
///
/// # Errors
/// The build failed.
pub async fn build(command: Command) -> Result<Programs> {
    build_seen(command, |_| {}).await
}

/// Like [`build`], and passes cargo's message about each compiled artifact to `seen`.
///
/// # Errors
/// The build failed.
pub async fn build_seen(mut command: Command, mut seen: impl FnMut(&Value)) -> Result<Programs> {
    // The messages contain the paths of the executables, for any target folder and profile.
    command.arg("--message-format=json-render-diagnostics").stdin(Stdio::null()).stdout(Stdio::piped());
    let shown = shown(&command);
    let mut child =
        tokio::process::Command::from(command).kill_on_drop(true).spawn().context("cannot run cargo")?;
    let stdout = child.stdout.take().context("cargo has no standard output")?;
    let mut lines = BufReader::new(stdout).lines();
    let mut programs = HashMap::new();
    while let Some(line) = lines.next_line().await.context("cannot read the output of cargo")? {
        let Ok(message) = serde_json::from_str::<Value>(&line) else { continue };
        if message["reason"] != "compiler-artifact" {
            continue;
        }
        seen(&message);
        // A test is an executable too, and may have the name of a program.
        if message["profile"]["test"] == false
            && let (Some(name), Some(path)) =
                (message["target"]["name"].as_str(), message["executable"].as_str())
        {
            programs.insert(name.to_owned(), path.into());
        }
    }
    let status = child.wait().await.context("cannot wait for cargo")?;
    if !status.success() {
        match c_compiler_missing() {
            Some(missing) => bail!("the build failed: {missing}"),
            None => bail!("the build failed, see above; the command was: {shown}"),
        }
    }
    Ok(Programs(programs))
}

/// Returns the output of `cargo metadata` about the members of the workspace.
///
/// # Errors
/// The manifests are invalid.
pub fn metadata() -> Result<Value> {
    let output = cargo()
        .args(["metadata", "--no-deps", "--format-version", "1"])
        .stderr(Stdio::inherit())
        .output()
        .context("cannot run cargo")?;
    ensure!(output.status.success(), "cargo metadata failed");
    serde_json::from_slice(&output.stdout).context("cargo metadata printed no JSON")
}

/// Returns the folder into which cargo builds.
///
/// # Errors
/// As [`metadata`].
pub fn target() -> Result<PathBuf> {
    let metadata = metadata()?;
    Ok(metadata["target_directory"].as_str().context("cargo metadata has no target folder")?.into())
}

/// Finds a program in `PATH`.
pub fn find_program(name: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH")?;
    env::split_paths(&path).map(|folder| folder.join(name)).find(|candidate| candidate.is_file())
}

/// Returns a message if there is no C compiler.
pub fn c_compiler_missing() -> Option<String> {
    let named = env::var_os("CC").is_some_and(|name| !name.is_empty());
    let found = named || ["cc", "gcc", "clang"].iter().any(|name| find_program(name).is_some());
    (!found).then(|| "there is no C compiler; on Debian: apt-get install gcc libc6-dev".to_owned())
}
