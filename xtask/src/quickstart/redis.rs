//! The Redis of `--tracker redis`: a process of its own behind a socket in the temporary folder.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use tokio::{
    net::UnixStream,
    time::{sleep, timeout},
};

use super::{POLL, READY_WITHIN};
use crate::{
    process::{Service, tied},
    workspace::find_program,
};

/// The same protocol by different names.
const PROGRAMS: [&str; 2] = ["redis-server", "valkey-server"];

/// Finds its program.
///
/// # Errors
/// When there is none; nothing has been started or built then.
pub(super) fn program() -> Result<PathBuf> {
    PROGRAMS.iter().find_map(|name| find_program(name)).context(
        "there is neither redis-server nor valkey-server for --tracker redis; on Debian: apt-get install redis-server",
    )
}

/// Returns where it listens.
pub(super) fn socket(dir: &Path) -> PathBuf {
    dir.join("redis.sock")
}

/// Starts it, and waits until it listens. It keeps nothing on disk.
pub(super) async fn start(dir: &Path, redis: &mut Option<Service>) -> Result<()> {
    let socket = socket(dir);
    let mut command = tied(&program()?);
    command
        // No port: nobody else can take it, and nobody else gets in.
        .args(["--port", "0", "--unixsocketperm", "700", "--save", "", "--appendonly", "no"])
        .arg("--dir")
        .arg(dir)
        .arg("--unixsocket")
        .arg(&socket);
    let service = redis.insert(Service::start("Redis", command, dir.join("redis.log"))?);
    let listens = async {
        while UnixStream::connect(&socket).await.is_err() {
            sleep(POLL).await;
        }
    };
    let outcome = tokio::select! {
        biased;
        error = service.ended() => return Err(error),
        outcome = timeout(READY_WITHIN, listens) => outcome,
    };
    outcome.map_err(|_| service.explain(&format!("does not listen after {READY_WITHIN:?}")))
}
