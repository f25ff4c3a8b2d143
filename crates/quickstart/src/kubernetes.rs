//! A real API server, which is found, or built with Go.

use std::{
    env,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use anyhow::{Result, bail};
use devkit::workspace::{Programs, find_program};
use tokio::{
    io::{AsyncBufReadExt as _, BufReader},
    process::Command,
    time::timeout,
};

use super::{
    Processes,
    service::{Service, child_command},
};

/// How long etcd and the API server may take to become ready, once they are built.
const SERVER_WITHIN: Duration = Duration::from_secs(180);

/// Says at once how to get an API server, instead of after the build.
pub(super) fn check() -> Result<()> {
    let is_set = env::var_os("KUBEBUILDER_ASSETS").is_some_and(|folder| !folder.is_empty());
    if is_set || find_program("go").is_some() || find_program("kube-apiserver").is_some() {
        return Ok(());
    }
    bail!(
        "there is no kube-apiserver: install Go (it is then built once), or set KUBEBUILDER_ASSETS to a folder with \
         kube-apiserver and etcd, as 'setup-envtest use -p path' prints it"
    )
}

/// Starts the API server, and returns a kubeconfig of its administrator. `objects` is a file with objects
/// that are created before that.
pub(super) async fn start(
    programs: &Programs,
    dir: &Path,
    objects: Option<&Path>,
    processes: &mut Processes,
) -> Result<PathBuf> {
    let mut command: Command = child_command(programs.path("testkit")?);
    // It exits when this pipe is closed, which is when this process exits.
    command.arg("kubernetes").stdin(Stdio::piped());
    if let Some(objects) = objects {
        command.arg("--objects").arg(objects);
    }
    let (service, stdout) =
        Service::start_with_output("kube-apiserver", command, dir.join("kubernetes.log"))?;
    let service = processes.demo.insert(service);
    let mut path = String::new();
    let mut stdout = BufReader::new(stdout);
    // Building it for the first time takes minutes.
    let within = if env::var_os("KUBEBUILDER_ASSETS").is_some() { SERVER_WITHIN } else { 10 * SERVER_WITHIN };
    match timeout(within, stdout.read_line(&mut path)).await {
        Err(_) => Err(service.explain(&format!("is not ready after {within:?}"))),
        Ok(Ok(length)) if length > 0 => Ok(path.trim().into()),
        Ok(_) => Err(service.ended().await),
    }
}
