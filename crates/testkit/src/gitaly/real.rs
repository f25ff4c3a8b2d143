//! GitLab's own Gitaly, built once from its Go module.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use tokio::{
    net::UnixStream,
    time::{Instant, sleep, timeout},
};

use super::build;
use crate::process::{Process, find};

/// The oldest Git that this release runs with.
const MIN_GIT: (u32, u32) = (2, 38);
/// How long it may take to accept connections. It takes less than a second on an idle machine.
const READY_WITHIN: Duration = Duration::from_secs(60);
/// How long to wait between two attempts to connect.
const POLL: Duration = Duration::from_millis(20);

/// A running Gitaly. Dropping it ends it. Its folder belongs to the test.
#[derive(Debug)]
pub struct Real {
    program: PathBuf,
    folder: PathBuf,
    process: Process,
}

impl Real {
    /// Serves the repositories below `repositories` at a socket in `folder`, where it also keeps its own files.
    /// Calls must have the token. Builds Gitaly when this machine has none yet, which takes minutes.
    ///
    /// # Errors
    /// If there is no Go, or no Git that it can run, or it does not start.
    pub async fn start(folder: &Path, repositories: &Path, token: &str) -> Result<Self> {
        check_git()?;
        let program = tokio::task::spawn_blocking(build::provide).await??;
        let folder = fs::canonicalize(folder)?;
        for name in ["shell", "run", "bin", "log"] {
            fs::create_dir_all(folder.join(name))?;
        }
        fs::write(folder.join("shell/.gitlab_shell_secret"), "secret of a test")?;
        let text = |path: PathBuf| -> Result<String> {
            let text = path.into_os_string().into_string();
            // It goes into a string of TOML.
            let text = text.ok().filter(|text| !text.contains(['"', '\\']));
            text.context("the path of the test has unusual characters")
        };
        let config = format!(
            "socket_path = \"{socket}\"\n\
             bin_dir = \"{bin}\"\n\
             runtime_dir = \"{run}\"\n\
             [auth]\n\
             token = \"{token}\"\n\
             [git]\n\
             bin_path = \"{git}\"\n\
             ignore_gitconfig = true\n\
             [logging]\n\
             dir = \"{log}\"\n\
             format = \"json\"\n\
             level = \"warn\"\n\
             [gitlab-shell]\n\
             dir = \"{shell}\"\n\
             [gitlab]\n\
             url = \"http://127.0.0.1:9\"\n\
             secret_file = \"{shell}/.gitlab_shell_secret\"\n\
             [[storage]]\n\
             name = \"{storage}\"\n\
             path = \"{repositories}\"\n",
            socket = text(folder.join("gitaly.socket"))?,
            bin = text(folder.join("bin"))?,
            run = text(folder.join("run"))?,
            git = text(find("git").context("Gitaly needs Git")?)?,
            log = text(folder.join("log"))?,
            shell = text(folder.join("shell"))?,
            storage = super::STORAGE,
            repositories = text(fs::canonicalize(repositories)?)?,
        );
        fs::write(folder.join("config.toml"), config)?;
        let process = launch(&program, &folder).await?;
        Ok(Self { program, folder, process })
    }

    /// Returns its address, as GitLab writes it.
    pub fn address(&self) -> String {
        format!("unix:{}", self.folder.join("gitaly.socket").display())
    }

    /// Returns its process, which can be paused.
    pub fn process(&self) -> &Process {
        &self.process
    }

    /// Ends it without asking.
    ///
    /// # Errors
    /// If it does not end.
    pub async fn stop(&self) -> Result<()> {
        self.process.kill();
        self.process.exited(READY_WITHIN).await?;
        Ok(())
    }

    /// Starts it again after [`stop`](Self::stop).
    ///
    /// # Errors
    /// If it does not start.
    pub async fn restart(&mut self) -> Result<()> {
        self.process = launch(&self.program, &self.folder).await?;
        Ok(())
    }
}

async fn launch(program: &Path, folder: &Path) -> Result<Process> {
    let socket = folder.join("gitaly.socket");
    let _ = fs::remove_file(&socket);
    let config = folder.join("config.toml");
    let config = config.to_str().context("the path of the test is not UTF-8")?;
    let home = folder.to_str().context("the path of the test is not UTF-8")?;
    let process = Process::start("gitaly", program, &[config], &[("HOME", home)]).await?;
    let deadline = Instant::now() + READY_WITHIN;
    loop {
        ensure!(process.is_running(), "Gitaly has ended: {}", process.log());
        match timeout(READY_WITHIN, UnixStream::connect(&socket)).await {
            Ok(Ok(_)) => return Ok(process),
            _ => ensure!(Instant::now() < deadline, "Gitaly is not ready: {}", process.log()),
        }
        sleep(POLL).await;
    }
}

/// Fails if Git is too old. Distributions have newer ones since 2022.
fn check_git() -> Result<()> {
    let output = Command::new("git").arg("--version").output().context("Gitaly needs Git")?;
    let said = String::from_utf8_lossy(&output.stdout);
    let version = said.split_whitespace().nth(2).unwrap_or_default();
    let mut numbers = version.split('.').map(|number| number.parse::<u32>().unwrap_or(0));
    let found = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    ensure!(
        found >= MIN_GIT,
        "Gitaly 15.11 needs Git {}.{} or newer, and this one says {said:?}: install a newer one, or run only the \
         tests against the small server",
        MIN_GIT.0,
        MIN_GIT.1
    );
    Ok(())
}
