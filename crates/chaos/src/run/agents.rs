//! The processes of agents, and the listeners that they connect to.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};
use serde_json::json;
use testkit::{certificates::Certificates, mesh::Mesh, process::Process};

use super::{Run, Setup, Swarm, end};

/// Gives replicas that serve agents over TLS a certificate, and returns the authority that has signed it;
/// `None`: there are no such replicas.
pub(super) fn certified(mesh: &mut Mesh, setup: &Setup, folder: &Path) -> Result<Option<PathBuf>> {
    let covered: Vec<usize> = (0..setup.replicas).filter(|n| setup.tls.covers(*n)).collect();
    if covered.is_empty() {
        return Ok(None);
    }
    let names: Vec<String> = covered.iter().map(|n| mesh.agents(*n).ip().to_string()).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let files = Certificates::new(folder, &names)?;
    for n in covered {
        let listen = json!({ "certificate_file": files.certificate, "key_file": files.key });
        mesh.add_config_of(n, json!({ "agent": { "listen": listen } }));
    }
    Ok(Some(files.ca))
}

impl Run {
    /// Starts a swarm: agents (first, count, those with an API server, connections), only at this replica, on
    /// this host for agents. Returns its number, and does not wait until it is connected.
    pub(crate) async fn swarm(
        &mut self,
        plan: (i64, i64, i64, usize),
        only: Option<usize>,
        host: usize,
    ) -> Result<usize> {
        let replicas = only.map_or_else(|| (0..self.setup.replicas).collect(), |only| vec![only]);
        self.swarm_among(plan, &replicas, host).await
    }

    /// As [`swarm`](Self::swarm), with the replicas that its agents know.
    pub(crate) async fn swarm_among(
        &mut self,
        plan: (i64, i64, i64, usize),
        replicas: &[usize],
        host: usize,
    ) -> Result<usize> {
        let addresses = replicas.iter().map(|n| {
            let wire = self.outside.doorways.get(*n).map(|wires| wires.agents.address());
            let at = wire.unwrap_or_else(|| self.mesh.agents(*n));
            let scheme = if self.setup.tls.covers(*n) { "grpcs" } else { "grpc" };
            format!("{scheme}://{at}")
        });
        self.swarm_at(plan, addresses.collect(), host).await
    }

    /// As [`swarm`](Self::swarm), at these URLs of listeners for agents.
    pub(crate) async fn swarm_at(
        &mut self,
        (first, count, clusters, connections): (i64, i64, i64, usize),
        addresses: Vec<String>,
        host: usize,
    ) -> Result<usize> {
        let number = self.swarms.len();
        let history = self.folder.path().join(format!("swarm-{number}.jsonl"));
        let mut arguments = vec![
            "swarm".to_owned(),
            format!("--kas={}", addresses.join(",")),
            format!("--first={first}"),
            format!("--count={count}"),
            format!("--clusters={}", first + clusters),
            format!("--connections={connections}"),
            format!("--work={}", self.setup.work),
            format!("--forbidden={}", self.folder.path().join("forbidden").display()),
            format!("--history={}", history.display()),
        ];
        if let Some(ca) = &self.certificates {
            arguments.push(format!("--ca={}", ca.display()));
        }
        if let Some(fleet) = &self.outside.fleet {
            arguments.push(format!("--hangs={}", fleet.file().display()));
        }
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let program = std::env::current_exe()?;
        let host = self.mesh.network().host(self.setup.replicas + host);
        let process = Process::start_in(Some(host), "swarm", &program, &arguments, &[]).await?;
        process
            .logged("that it has started", |line| (line["message"] == "the swarm has started").then_some(()))
            .await?;
        self.swarms.push(Some(Swarm { process, history }));
        Ok(number)
    }

    /// Waits until each agent of a swarm has a tunnel.
    pub(crate) async fn connected(&self, swarm: usize) -> Result<()> {
        let swarm = self.swarms[swarm].as_ref().context("the swarm runs")?;
        let connected =
            |line: &serde_json::Value| (line["message"] == "the swarm is connected").then_some(());
        swarm.process.logged("that it is connected", connected).await
    }

    /// Shuts a swarm down, and takes what its agents recorded.
    pub(crate) async fn end_swarm(&mut self, swarm: usize) -> Result<()> {
        let swarm = self.swarms[swarm].take().context("the swarm runs")?;
        let recorded = end::ended(swarm).await?;
        end::add(&mut self.history.lock(), &mut self.names, recorded);
        Ok(())
    }

    /// Returns the agents among the watched ones whose only replica is this one, and those that have another
    /// one too.
    pub(crate) fn held_by(&self, n: usize) -> (BTreeSet<i64>, BTreeSet<i64>) {
        let last = self.observer.last.lock();
        let name = self.name(n);
        let own = last.get(&name).map(|(_, seen)| seen.own.clone()).unwrap_or_default();
        let elsewhere: BTreeSet<i64> = last
            .iter()
            .filter(|(other, _)| **other != name)
            .flat_map(|(_, (_, seen))| &seen.own)
            .copied()
            .collect();
        (own.difference(&elsewhere).copied().collect(), own.intersection(&elsewhere).copied().collect())
    }
}
