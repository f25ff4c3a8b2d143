//! [`Tellers`]: which replica tells of an agent.

use std::{collections::BTreeMap, time::Duration};

use ids::{AgentId, ReplicaId, home_rank};

use crate::presence::RECENT;

/// Replicas that come so soon after the first look were there before: what replicas know of each other takes
/// a moment to arrive.
const FIRST_LOOK: Duration = Duration::from_secs(3);

/// The replicas, as one of them sees them, and which of them tells of an agent.
///
/// The home of an agent is the replica with the highest [`home_rank`]. One that has just come does not know
/// what changed before that, and the home before it may not have told it yet: whether an agent has left is
/// believed some seconds later. So a replica does not take over until it has been there for a minute, as
/// long as [`Presence`](crate::Presence) keeps what was not told. Until then both tell.
#[derive(Debug)]
pub struct Tellers {
    me: ReplicaId,
    /// When each came; `None`: it was there before.
    members: BTreeMap<ReplicaId, Option<Duration>>,
    first: Option<Duration>,
}

impl Tellers {
    /// Returns the view of a replica that knows no members yet.
    pub fn new(me: ReplicaId) -> Self {
        Self { me, members: BTreeMap::new(), first: None }
    }

    /// Sets the replicas that are ready, this one included if it is. Returns whether they are others.
    pub fn set(&mut self, members: impl IntoIterator<Item = ReplicaId>, now: Duration) -> bool {
        let first = *self.first.get_or_insert(now);
        let came = (now.saturating_sub(first) > FIRST_LOOK).then_some(now);
        let before = std::mem::take(&mut self.members);
        let since = |id: &ReplicaId| before.get(id).copied().unwrap_or(came);
        self.members = members.into_iter().map(|id| (id.clone(), since(&id))).collect();
        !self.members.keys().eq(before.keys())
    }

    /// Whether this replica is the home of an agent.
    pub fn is_home(&self, agent: AgentId) -> bool {
        self.is_first(agent, |_| true)
    }

    /// Whether this replica tells when an agent comes or leaves.
    pub fn tells(&self, agent: AgentId, now: Duration) -> bool {
        self.is_first(agent, |since| since.is_none_or(|since| now.saturating_sub(since) > RECENT))
    }

    /// Whether this replica is a member, and none of some others has a higher rank.
    fn is_first(&self, agent: AgentId, counts: impl Fn(Option<Duration>) -> bool) -> bool {
        let mine = home_rank(agent, &self.me);
        self.members.contains_key(&self.me)
            && self.members.iter().all(|(id, since)| !counts(*since) || home_rank(agent, id) <= mine)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Presence;

    fn replica(name: &str) -> ReplicaId {
        ReplicaId::new(name)
    }

    /// A replica that looks each second.
    struct Replica {
        tellers: Tellers,
        presence: Presence<AgentId>,
        told: Vec<(AgentId, bool)>,
    }

    impl Replica {
        fn new(name: &str) -> Self {
            Self { tellers: Tellers::new(replica(name)), presence: Presence::default(), told: Vec::new() }
        }

        fn look(&mut self, members: &[&str], connected: &[AgentId], second: u64) {
            let now = Duration::from_secs(second);
            self.tellers.set(members.iter().map(|name| replica(name)), now);
            let connected = connected.iter().map(|agent| (*agent, *agent));
            let changes = self.presence.observe(connected, true, |agent| self.tellers.tells(agent, now), now);
            self.told.extend(changes.into_iter().map(|change| (change.agent, change.is_connected)));
        }
    }

    /// Returns agents whose home is `b`, among `a`, `b` and `c`.
    fn agents_of_b(count: usize) -> Vec<AgentId> {
        let all = (1..).map(|id| AgentId::new(id).unwrap());
        let rank = |agent, name: &str| home_rank(agent, &replica(name));
        let is_of_b = |agent: &AgentId| rank(*agent, "b") > rank(*agent, "a").max(rank(*agent, "c"));
        all.filter(is_of_b).take(count).collect()
    }

    #[test]
    fn nothing_is_lost_when_a_replica_joins_or_replaces_one() {
        // `b` joins at 100, and takes over the agents. At the same time `c` stays, or is gone.
        for replaced in [false, true] {
            for moment in 80..120 {
                let ids = agents_of_b(2);
                let (leaves, comes) = (ids[0], ids[1]);
                let (mut a, mut b, mut c) = (Replica::new("a"), Replica::new("b"), Replica::new("c"));
                for second in 0..200 {
                    let connected: &[AgentId] = if second < moment { &[leaves] } else { &[comes] };
                    let members: &[&str] = match second {
                        ..100 => &["a", "c"],
                        _ if replaced => &["a", "b"],
                        _ => &["a", "b", "c"],
                    };
                    a.look(members, connected, second);
                    if second < 100 || !replaced {
                        c.look(members, connected, second);
                    }
                    if second >= 100 {
                        b.look(members, connected, second);
                    }
                }
                let told: Vec<_> = [a.told, b.told, c.told].concat();
                for news in [(leaves, false), (comes, true)] {
                    assert!(told.contains(&news), "{moment} {replaced}: {news:?} is not in {told:?}");
                }
            }
        }
    }

    #[test]
    fn after_a_minute_only_the_home_tells() {
        let agent = agents_of_b(1)[0];
        let mut all = [Replica::new("a"), Replica::new("b"), Replica::new("c")];
        for second in 0..300 {
            let members: &[&str] = if second < 100 { &["a", "c"] } else { &["a", "b", "c"] };
            let connected: &[AgentId] = if second < 170 { &[agent] } else { &[] };
            for (n, it) in all.iter_mut().enumerate() {
                if n != 1 || second >= 100 {
                    it.look(members, connected, second);
                }
            }
        }
        let told = all.map(|it| it.told);
        assert_eq!(told, [vec![], vec![(agent, false)], vec![]]);
    }

    #[test]
    fn replicas_that_start_together_do_not_tell_twice() {
        let agent = agents_of_b(1)[0];
        let (mut a, mut b) = (Replica::new("a"), Replica::new("b"));
        a.look(&["a"], &[], 0);
        for second in 1..10 {
            let connected: &[AgentId] = if second < 5 { &[] } else { &[agent] };
            a.look(&["a", "b"], connected, second);
            b.look(&["a", "b"], connected, second);
        }
        assert_eq!((a.told, b.told), (vec![], vec![(agent, true)]));
        // One that is no member, because it leaves, tells nothing.
        let mut alone = Tellers::new(replica("a"));
        assert!(alone.set([replica("a")], Duration::ZERO) && alone.is_home(agent));
        assert!(!alone.set([replica("a")], Duration::ZERO));
        assert!(alone.set([], Duration::ZERO));
        assert!(!alone.is_home(agent) && !alone.tells(agent, Duration::ZERO));
    }
}
