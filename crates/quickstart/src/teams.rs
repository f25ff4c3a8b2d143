//! The agents of a fleet: each impersonates a service account of a namespace of its own.

use std::path::PathBuf;

use anyhow::Result;
use devkit::report::{Style, line};
use tokio::time::sleep;

use super::{Processes, RESTART_AFTER, agents, replicas::Replica, service::Service};

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
        let (id, namespace, pod) = (agent.to_string(), name(agent), format!("agentk-{agent:02}"));
        let mut command =
            agents::agentk(&self.program, &agents::addresses(replicas), &self.dir, &id, (&namespace, &pod));
        // What it may do is what this service account may.
        command.arg("--kubeconfig").arg(&self.kubeconfig).args(["--as", &user(agent)]);
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
