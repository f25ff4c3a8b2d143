//! What replicas list and count at the end of a run, beside what agents know of themselves.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use anyhow::{Context as _, Result};
use history::{Version, View};
use proto::kas::api::v1::{ConnectedAgentsForProjectRequest, ConnectedAgentsForProjectResponse};
use testkit::caller::Caller;
use tokio::time::{Instant, sleep, timeout};

use super::{LONG, Run};
use crate::{
    clock,
    observer::look,
    swarm::{Served, read_served},
};

/// Lists the connections of all agents of a project. Each agent of a run is in the first one.
const FOR_PROJECT: &str = "/kas.api.v1.KasApi/ConnectedAgentsForProject";
const PROJECT: i64 = 1;
/// How long a number may take to become what is true: an agent that looks for another replica opens a stream
/// now and then, which ends at once.
const COUNTS: Duration = Duration::from_secs(15);

/// The ids of the connections of each agent.
pub(super) type Connections = BTreeMap<i64, BTreeSet<i64>>;

/// What replicas list, by replica, and what agents know.
pub(super) struct Listed {
    pub(super) by: BTreeMap<usize, Connections>,
    pub(super) truth: Connections,
}

impl Run {
    /// What the agents of all swarms know of themselves.
    pub(super) fn served(&self) -> Result<BTreeMap<i64, Served>> {
        let mut served = BTreeMap::new();
        for swarm in self.swarms.iter().flatten() {
            served.extend(read_served(&swarm.history)?);
        }
        Ok(served)
    }

    /// Asks every replica for the connections of all agents, until all of them list what the agents say, or
    /// for so long that it counts. `held`: agents with a tunnel, of which some have records of no swarm.
    pub(super) async fn listed(&mut self, held: &BTreeSet<i64>) -> Result<Listed> {
        let end = Instant::now() + LONG;
        loop {
            let served = self.served()?;
            let truth = truth(&served);
            let known = |agent: &i64| served.contains_key(agent) || !held.contains(agent);
            let (mut by, mut silent) = (BTreeMap::new(), Vec::new());
            for n in self.mesh.running() {
                let caller = Caller::connect(self.mesh.api(n), Some(self.client.token())).await?;
                let question = ConnectedAgentsForProjectRequest { project_id: PROJECT };
                let asked = timeout(LONG, caller.unary(FOR_PROJECT, &question)).await;
                let list: ConnectedAgentsForProjectResponse =
                    asked.with_context(|| format!("replica {n} does not list connections"))??;
                silent.extend(list.unanswered.iter().map(|other| format!("replica {n}: {}", other.reason)));
                let mut ids = Connections::new();
                for agent in list.agents.iter().filter(|agent| known(&agent.id)) {
                    ids.entry(agent.id).or_default().insert(agent.connection_id);
                }
                by.insert(n, ids);
            }
            let equal = silent.is_empty() && by.values().all(|ids| *ids == truth);
            if equal || Instant::now() >= end {
                if let Some(who) = silent.first() {
                    self.notes.push(format!("A list of connections is not complete: {who}."));
                }
                return Ok(Listed { by, truth });
            }
            sleep(Duration::from_millis(500)).await;
        }
    }

    /// Records what each running replica sees of all agents, and of one more.
    pub(crate) async fn viewed(&self, more: i64) -> Result<()> {
        let agents: Vec<i64> = (1..=self.setup.agents).chain([more]).collect();
        for n in self.mesh.running() {
            let caller = Caller::connect(self.mesh.api(n), Some(self.client.token())).await?;
            let at = clock::now();
            let (process, seen) = look(&caller, &agents).await?;
            let live = seen.live.into_iter().map(|name| (name, Version { epoch: None, version: None }));
            self.history.lock().views.push(View {
                observer: self.name(n),
                process,
                at,
                until: at,
                live: live.collect(),
                agents: Some(seen.agents),
                connections: None,
            });
        }
        Ok(())
    }

    /// Reads a metric of a replica until it says what is true, or for so long that it counts.
    pub(super) async fn counted(&self, n: usize, name: &str, truth: f64) -> Result<f64> {
        let end = Instant::now() + COUNTS;
        loop {
            let value = self.mesh.kas(n).metric(name).await?;
            if (value - truth).abs() < f64::EPSILON || Instant::now() >= end {
                return Ok(value);
            }
            sleep(Duration::from_millis(200)).await;
        }
    }
}

/// The connections of agents that serve a replica, by their own knowledge.
fn truth(served: &BTreeMap<i64, Served>) -> Connections {
    let connected = served.iter().filter(|(_, served)| served.replicas > 0);
    connected.map(|(agent, served)| (*agent, [served.connection].into())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_agent_that_serves_no_replica_has_no_connection() {
        let served = [
            (1, Served { replicas: 2, connection: 17 }),
            (2, Served { replicas: 0, connection: 18 }),
            (3, Served { replicas: 1, connection: 19 }),
        ];
        assert_eq!(truth(&served.into()), [(1, [17].into()), (3, [19].into())].into());
    }
}
