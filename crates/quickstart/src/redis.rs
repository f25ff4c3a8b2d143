//! The Redis of `--tracker redis`: a process that listens on a socket in the temporary folder.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use tokio::{
    net::UnixStream,
    time::{sleep, timeout},
};

use devkit::workspace::find_program;

use super::{
    POLL, READY_WITHIN,
    service::{Service, child_command},
};

/// Programs that speak the protocol of Redis.
const PROGRAMS: [&str; 2] = ["redis-server", "valkey-server"];

/// Finds a Redis server.
///
/// # Errors
/// None is installed.
pub(super) fn program() -> Result<PathBuf> {
    PROGRAMS.iter().find_map(|name| find_program(name)).context(
        "--tracker redis needs redis-server or valkey-server; on Debian: apt-get install redis-server",
    )
}

/// Returns the socket that it listens on.
pub(super) fn socket(dir: &Path) -> PathBuf {
    dir.join("redis.sock")
}

/// Starts it, and waits until it listens. It writes no data to disk.
pub(super) async fn start(dir: &Path, redis: &mut Option<Service>) -> Result<()> {
    let socket = socket(dir);
    let mut command = child_command(&program()?);
    command
        // No TCP port, so no port can be taken already, and no other user can connect.
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
