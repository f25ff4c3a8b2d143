//! Runs kasctl and reads its output.

use std::{
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, de::DeserializeOwned};
use tokio::process::Command;

use super::service::child_command;

/// Runs kasctl against one replica.
#[derive(Debug, Clone)]
pub(super) struct Kasctl {
    program: PathBuf,
    secret: PathBuf,
    /// The replica's API.
    address: String,
}

impl Kasctl {
    /// `port`: the port of the replica's API.
    pub(super) fn new(program: &Path, secret: &Path, port: u16) -> Self {
        Self {
            program: program.to_owned(),
            secret: secret.to_owned(),
            address: format!("grpc://127.0.0.1:{port}"),
        }
    }

    /// Returns a copy for another replica.
    pub(super) fn at(&self, port: u16) -> Self {
        Self::new(&self.program, &self.secret, port)
    }

    pub(super) fn address(&self) -> &str {
        &self.address
    }

    pub(super) fn secret(&self) -> &Path {
        &self.secret
    }

    /// Returns a command that does not call kas.
    pub(super) fn bare(&self) -> Command {
        let mut command = child_command(&self.program);
        command.env_remove("KASCTL_ADDRESS").env_remove("KASCTL_SECRET_FILE");
        command
    }

    /// Returns a command that calls kas.
    pub(super) fn call(&self, arguments: &[&str]) -> Command {
        let mut command = self.bare();
        command.args(["--address", &self.address]).arg("--secret-file").arg(&self.secret).args(arguments);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// Runs a command to its end and returns its standard output.
    pub(super) async fn answer(&self, arguments: &[&str]) -> Result<String> {
        output(self.call(arguments)).await
    }

    /// Like [`answer`](Self::answer), also if the answer lacks a part.
    pub(super) async fn partial(&self, arguments: &[&str]) -> Result<String> {
        let output = self.call(arguments).output().await.context("cannot run kasctl")?;
        // Exit code 6: the list is printed, and lacks the answer of some replica or agent.
        ensure!(
            output.status.success() || output.status.code() == Some(6),
            "{}",
            String::from_utf8_lossy(&output.stderr).trim()
        );
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    async fn json<T: DeserializeOwned>(&self, arguments: &[&str]) -> Result<T> {
        let text = self.partial(&[arguments, &["-o", "json"]].concat()).await?;
        serde_json::from_str(&text).with_context(|| format!("kasctl {} printed no list", arguments[0]))
    }

    pub(super) async fn replicas(&self) -> Result<Vec<ReplicaRow>> {
        #[derive(Deserialize)]
        struct List {
            replicas: Vec<ReplicaRow>,
        }
        Ok(self.json::<List>(&["replicas"]).await?.replicas)
    }

    pub(super) async fn why(&self, agent: &str) -> Result<Why> {
        self.json(&["why", agent]).await
    }

    /// Returns the steps of a request that kas reports.
    pub(super) async fn explain(&self, agent: &str, path: &str) -> Result<Vec<Hop>> {
        let output = self
            .call(&["--timeout", "60s", "request", "--explain", agent, "GET", path])
            .output()
            .await
            .context("cannot run kasctl")?;
        let told = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{}", told.trim());
        Ok(told.lines().filter_map(Hop::parse).collect())
    }
}

/// Runs a command to its end and returns its standard output.
pub(super) async fn output(mut command: Command) -> Result<String> {
    let output = command.output().await.context("cannot run kasctl")?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{}", stderr.trim());
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// A replica, as another one reports it.
#[derive(Debug, Deserialize)]
pub(super) struct ReplicaRow {
    /// Its private address.
    pub(super) name: String,
    pub(super) state: String,
    pub(super) standing: String,
    pub(super) generation: String,
    pub(super) table: TableRow,
}

#[derive(Debug, Deserialize)]
pub(super) struct TableRow {
    pub(super) synced: bool,
}

impl ReplicaRow {
    /// Returns whether requests are routed to it and its list of agents is complete.
    pub(super) fn is_healthy(&self) -> bool {
        matches!(self.standing.as_str(), "self" | "live") && self.state == "ready" && self.table.synced
    }
}

/// The replicas that hold an agent, and the route of a request to it.
#[derive(Debug, Deserialize)]
pub(super) struct Why {
    /// Private addresses of replicas.
    pub(super) held_by: Vec<String>,
    route: Vec<String>,
}

impl Why {
    /// Returns whether a request would be routed to the replica with this private address.
    pub(super) fn goes_to(&self, name: &str) -> bool {
        // The route also names a replica that does not answer.
        self.route.iter().any(|step| step.contains(name) && !step.ends_with(" cannot be asked"))
    }
}

/// A step of a request, as kas reports it.
#[derive(Debug, PartialEq)]
pub(super) struct Hop {
    /// Time since the request arrived.
    pub(super) at: Duration,
    pub(super) what: String,
}

impl Hop {
    /// Parses `  0.635 ms   kas      what`. Returns `None` for a step of another program.
    fn parse(line: &str) -> Option<Self> {
        let (millis, rest) = line.trim_start().split_once(" ms ")?;
        let what = rest.trim_start().strip_prefix("kas ")?.trim();
        let at = Duration::try_from_secs_f64(millis.parse::<f64>().ok()? / 1e3).ok()?;
        Some(Self { at, what: what.to_owned() })
    }
}

/// A connected agent.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct Agent {
    pub(super) id: i64,
    pub(super) pod_namespace: String,
    pub(super) pod_name: String,
    /// The private address of the replica that it is connected to.
    kas_address: Option<KasAddress>,
}

#[derive(Debug, Clone, Deserialize)]
struct KasAddress {
    port: u16,
}

impl Agent {
    /// Returns the private port of the replica that it is connected to.
    pub(super) fn private_port(&self) -> Option<u16> {
        self.kas_address.as_ref().map(|address| address.port)
    }
}

/// A line of `kasctl agents --watch -o json`.
#[derive(Debug, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub(super) enum Event {
    Connected {
        agent: Agent,
    },
    SnapshotComplete {},
    #[serde(other)]
    Other,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_events_are_ignored() {
        let other: Event = serde_json::from_str(r#"{"event":"disconnected","agent":{"id":1}}"#).unwrap();
        assert!(matches!(other, Event::Other));
        let complete: Event =
            serde_json::from_str(r#"{"event":"snapshot_complete","unanswered":[]}"#).unwrap();
        assert!(matches!(complete, Event::SnapshotComplete {}));
        let connected: Event = serde_json::from_str(
            r#"{"event":"connected","agent":{"id":1,"name":"demo","project_id":1,"connection_id":"9007199254740993",
                "version":"v","commit":"c","pod_namespace":"n","pod_name":"p","connected_at":null,
                "kas_address":{"ip":"127.0.0.1","port":7}}}"#,
        )
        .unwrap();
        assert!(matches!(connected, Event::Connected { agent } if agent.private_port() == Some(7)));
    }

    #[test]
    fn only_hops_of_kas_are_parsed() {
        let hop = Hop::parse("  0.635 ms   kas      started through a tunnel of replica 127.0.0.1:1");
        let what = "started through a tunnel of replica 127.0.0.1:1".to_owned();
        assert_eq!(hop, Some(Hop { at: Duration::from_micros(635), what }));
        assert_eq!(Hop::parse("  0.163 ms   kasctl   connected to grpc://127.0.0.1:41085"), None);
        assert_eq!(Hop::parse("kasctl: steps of the request; times in ms kas"), None);
    }
}
