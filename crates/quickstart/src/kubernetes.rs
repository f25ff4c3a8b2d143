//! A real API server, which is found, or built with Go.

use std::{
    env,
    path::{Path, PathBuf},
    time::Duration,
};

use super::{
    Processes,
    service::{Service, child_command},
};
use anyhow::{Result, bail};
use devkit::workspace::{Programs, find_program};

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
    let mut command = child_command(programs.path("testkit")?);
    command.arg("kubernetes");
    if let Some(objects) = objects {
        command.arg("--objects").arg(objects);
    }
    // Building it for the first time takes minutes.
    let within = if env::var_os("KUBEBUILDER_ASSETS").is_some() { SERVER_WITHIN } else { 10 * SERVER_WITHIN };
    let log = dir.join("kubernetes.log");
    let (path, _) = Service::start_ready("kube-apiserver", command, log, within, &mut processes.demo).await?;
    Ok(path.into())
}
