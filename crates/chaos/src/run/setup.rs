//! How a scenario is set up.

use std::time::Duration;

use anyhow::{Result, ensure};
use serde_json::json;

use crate::{faults::outside::Wanted, written::Written};

/// How a scenario is set up.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    pub(crate) replicas: usize,
    /// Agents that the first swarm connects.
    pub(crate) agents: i64,
    /// Agents that identities exist for, beyond those.
    pub(crate) more_agents: i64,
    /// Of the first agents, how many have an API server.
    pub(crate) clusters: i64,
    /// Connections of each agent.
    pub(crate) connections: usize,
    /// Of the agents, how many have two connections whatever the others have: the last ones.
    pub(crate) double: i64,
    /// Of the agents, how many are on replica 0 only, with one connection: the first ones. The others then do
    /// not know replica 0, so that its agents never change.
    pub(crate) pinned: i64,
    /// How replicas leave.
    pub(crate) drain: Drain,
    /// Whether replicas write audit logs.
    pub(crate) audits: bool,
    /// How long a request takes, in milliseconds.
    pub(crate) work: u64,
    /// Configuration of kas over that of every run.
    pub(crate) config: serde_json::Value,
    /// The only replica that the first agents connect to; `None`: any.
    pub(crate) only: Option<usize>,
    /// Replicas that are started at first; the others when the scenario says so.
    pub(crate) started: usize,
    /// The replica whose wall clock can be stepped.
    pub(crate) clock: Option<usize>,
    /// All replicas run the first build at first, instead of taking turns.
    pub(crate) one_build: bool,
    /// Which version's records each replica writes at first; empty: those of the programs.
    pub(crate) written: Vec<Written>,
    /// The audit logs of all replicas share a disk of so many KiB; `None`: there are none.
    pub(crate) audit_disk: Option<u32>,
    /// Which replicas serve agents over TLS.
    pub(crate) tls: Tls,
    /// What is there beside replicas and agents.
    pub(crate) wanted: Wanted,
}

/// Which replicas serve agents over TLS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tls {
    /// None: agents of the scenario itself, or the wires before replicas, speak plain HTTP/2.
    No,
    /// Those with odd numbers.
    Odd,
    /// All of them.
    All,
}

impl Tls {
    /// Whether this replica does.
    pub(crate) fn covers(self, n: usize) -> bool {
        match self {
            Self::No => false,
            Self::Odd => n % 2 == 1,
            Self::All => true,
        }
    }
}

impl Setup {
    /// Sets the number of agents where it can be chosen, and keeps the share of those that are pinned.
    ///
    /// # Errors
    /// For a scenario that has its own number.
    pub(crate) fn scale(&mut self, id: &str, agents: i64) -> Result<()> {
        ensure!(
            matches!(id, "S31" | "S48"),
            "{id} has its own number of agents; --agents is for S31 and S48"
        );
        self.pinned = self.pinned * agents / self.agents;
        self.agents = agents;
        Ok(())
    }
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            replicas: 3,
            agents: 24,
            more_agents: 0,
            clusters: 12,
            connections: 2,
            double: 0,
            pinned: 0,
            drain: Drain::default(),
            audits: true,
            work: 20,
            config: json!({}),
            only: None,
            started: usize::MAX,
            clock: None,
            one_build: false,
            written: Vec::new(),
            audit_disk: None,
            tls: Tls::Odd,
            wanted: Wanted::default(),
        }
    }
}

/// How a replica leaves.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Drain {
    pub(crate) delay: Duration,
    pub(crate) timeout: Duration,
    pub(crate) grace: Duration,
}

impl Default for Drain {
    fn default() -> Self {
        let [delay, timeout, grace] = [1, 10, 3].map(Duration::from_secs);
        Self { delay, timeout, grace }
    }
}
