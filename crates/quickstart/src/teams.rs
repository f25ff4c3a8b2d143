//! The agents of a fleet: each impersonates a service account of a namespace of its own.

use std::path::PathBuf;

use anyhow::Result;
use devkit::report::{Style, line};
use tokio::time::sleep;

use super::{
    Processes, RESTART_AFTER,
    agents::token_file,
    replicas::Replica,
    service::{Service, child_command},
};

/// The service account of each namespace.
pub(super) const ACCOUNT: &str = "agentk";

/// Returns the name of an agent, which is also that of its namespace. They are counted from 1.
pub(super) fn name(agent: usize) -> String {
    format!("team-{agent:02}")
}

/// Returns the user that an agent impersonates.
pub(super) fn user(agent: usize) -> String {
    format!("system:serviceaccount:{}:{ACCOUNT}", name(agent))
}

/// What starts the agents.
#[derive(Debug)]
pub(super) struct Teams {
    pub(super) program: PathBuf,
    /// The folder of the demonstration.
    pub(super) dir: PathBuf,
    /// That of an administrator.
    pub(super) kubeconfig: PathBuf,
}

impl Teams {
    /// Starts the agentk of an agent, which connects to two of the replicas.
    pub(super) fn start(&self, agent: usize, replicas: &[Replica]) -> Result<Service> {
        let addresses: Vec<String> =
            replicas.iter().map(|replica| format!("grpc://127.0.0.1:{}", replica.ports.agent)).collect();
        let mut command = child_command(&self.program);
        command
            .arg("--kas-address")
            .arg(addresses.join(","))
            .arg("--token-file")
            .arg(token_file(&self.dir, &agent.to_string()))
            .arg("--kubeconfig")
            .arg(&self.kubeconfig)
            // What it may do is what this service account may.
            .args(["--as", &user(agent)])
            .args(["--observability-address", "127.0.0.1:0", "--log-format", "text"])
            .env("POD_NAMESPACE", name(agent))
            .env("POD_NAME", format!("agentk-{agent:02}"));
        // Each start has a log of its own.
        let mut log = self.dir.join(format!("agentk-{agent:02}.log"));
        let mut starts = 1;
        while log.exists() {
            starts += 1;
            log = self.dir.join(format!("agentk-{agent:02}.{starts}.log"));
        }
        Service::start("agentk", command, log)
    }

    /// Starts an agent again that has ended with `error`. `index` is its place among the processes.
    pub(super) async fn restart(
        &self,
        processes: &mut Processes,
        style: Style,
        index: usize,
        error: &anyhow::Error,
    ) -> Result<()> {
        let team = name(index + 1);
        let text = error.to_string();
        let how = text.split(';').next().unwrap_or(&text);
        line(format_args!("\n{}", style.bold(format_args!("{how}: that of {team}"))));
        line(format_args!("     it is started again in {RESTART_AFTER:?}; webhooks for it wait until then"));
        let pause = async {
            sleep(RESTART_AFTER).await;
            Ok(())
        };
        processes.guard_all_but_replicas(pause).await?;
        let service = self.start(index + 1, &processes.replicas)?;
        let pid = service.id().unwrap_or_default();
        if let Some(slot) = processes.agents.get_mut(index) {
            *slot = service;
        }
        line(format_args!("     the agentk of {team} is started again, as pid {pid}"));
        Ok(())
    }
}
