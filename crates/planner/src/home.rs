//! Which replica plans for an agent: its home.
//!
//! There is no leader. Each replica computes the home from what it knows of the others. If two of them
//! disagree for a moment, both plan, and the fence in the inventory stops one of them.

use std::{collections::HashMap, time::Duration};

use cluster::{Candidate, ReplicaHealth, Wire};
use ids::{AgentId, ReplicaId, home_rank};
use tokio::time::Instant;

/// How long the home of an agent must have been the same until it plans.
pub const STOOD: Duration = Duration::from_secs(2);

/// Returns the home of an agent: of the replicas that hold tunnels of it, are live and do not drain, the one
/// with the highest [rank](home_rank).
pub fn home(agent: AgentId, holders: &[Candidate]) -> Option<&ReplicaId> {
    let live = holders
        .iter()
        .filter(|holder| holder.health == ReplicaHealth::Live && holder.wire == Wire::Own)
        .map(|holder| &holder.replica.id);
    live.max_by_key(|replica| home_rank(agent, replica))
}

/// The homes of agents over time, as one replica knows them.
#[derive(Debug)]
pub struct Homes {
    me: ReplicaId,
    known: HashMap<AgentId, (ReplicaId, Instant)>,
}

impl Homes {
    /// `me` is this replica.
    pub fn new(me: ReplicaId) -> Self {
        Self { me, known: HashMap::new() }
    }

    /// Notes the replicas that hold tunnels of an agent. Returns whether this replica plans for it: it has
    /// been the home for [`STOOD`]. If it is not the home any more, it stops at once.
    pub fn observe(&mut self, agent: AgentId, holders: &[Candidate], now: Instant) -> bool {
        let Some(home) = home(agent, holders) else {
            self.known.remove(&agent);
            return false;
        };
        let since = match self.known.get(&agent) {
            Some((known, since)) if known == home => *since,
            _ => {
                self.known.insert(agent, (home.clone(), now));
                now
            }
        };
        *home == self.me && now.saturating_duration_since(since) >= STOOD
    }

    /// Forgets the agents for which `keep` returns `false`.
    pub fn retain(&mut self, keep: impl Fn(AgentId) -> bool) {
        self.known.retain(|agent, _| keep(*agent));
    }
}

#[cfg(test)]
mod tests {
    use cluster::Replica;

    use super::*;

    fn holder(name: &str, health: ReplicaHealth) -> Candidate {
        let replica = Replica { id: ReplicaId::new(name), address: name.into() };
        Candidate { replica, health, wire: Wire::Own }
    }

    fn agent(id: i64) -> AgentId {
        AgentId::new(id).unwrap()
    }

    #[test]
    fn agents_are_spread_and_every_replica_computes_the_same_home() {
        let forwards = ["a", "b", "c"].map(|name| holder(name, ReplicaHealth::Live));
        let mut backwards = forwards.clone();
        backwards.reverse();
        let mut counts = HashMap::new();
        for id in 1..=300 {
            let found = home(agent(id), &forwards).unwrap();
            assert_eq!(Some(found), home(agent(id), &backwards));
            *counts.entry(found.as_str()).or_insert(0) += 1;
        }
        assert_eq!(counts.len(), 3);
        assert!(counts.values().all(|count| *count > 60), "{counts:?}");
    }

    #[test]
    fn a_replica_that_drains_or_may_be_gone_is_no_home() {
        use ReplicaHealth::{Draining, Gone, Live, Suspect, Unreachable};
        for id in 1..50 {
            for health in [Draining, Suspect, Unreachable, Gone] {
                let holders = [holder("a", health), holder("b", Live)];
                assert_eq!(home(agent(id), &holders).unwrap().as_str(), "b");
                assert_eq!(home(agent(id), &holders[..1]), None);
            }
            let mut gitlab = holder("a", Live);
            gitlab.wire = Wire::Gitlab;
            assert_eq!(home(agent(id), &[gitlab]), None);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_home_plans_after_two_seconds_and_stops_at_once() {
        let id = (1..).map(agent).find(|id| {
            let holders = ["a", "b"].map(|name| holder(name, ReplicaHealth::Live));
            home(*id, &holders).unwrap().as_str() == "b"
        });
        let id = id.unwrap();
        let both = ["a", "b"].map(|name| holder(name, ReplicaHealth::Live));
        let mut homes = Homes::new(ReplicaId::new("a"));
        let begun = Instant::now();
        let at = |ms| begun + Duration::from_millis(ms);
        assert!(!homes.observe(id, &both[..1], at(0)));
        assert!(!homes.observe(id, &both[..1], at(1_999)));
        assert!(homes.observe(id, &both[..1], at(2_000)));
        assert!(!homes.observe(id, &both, at(2_100)), "b is the home");
        assert!(!homes.observe(id, &both[..1], at(2_200)), "it begins anew");
        assert!(homes.observe(id, &both[..1], at(4_200)));
        assert!(!homes.observe(id, &[], at(4_300)));
        assert!(!homes.observe(id, &both[..1], at(4_400)));
    }
}
