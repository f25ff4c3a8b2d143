//! Lists and reports over all replicas, and the problems between them.

use std::{sync::Arc, time::Duration};

use cluster::{Connected, Located, PeerReport, Query, Replica, ReplicaHealth, ReplicaState, Unanswered};
use futures_util::{StreamExt as _, stream::FuturesUnordered};
use ids::AgentId;
use table::{GossipVote, StreamVote};
use tokio::time::Instant;

use super::GossipBackend;
use crate::replicas::ask;

/// The alarm that no other replica has read this one's table is raised after this long. It is longer than a
/// start and a few unanswered dials.
const UNREAD: Duration = Duration::from_secs(10);
/// The alarm that a replica cannot be dialled is raised after this many failures in a row. Gossip drops a
/// crashed process earlier.
const FAILED_DIALS: u32 = 6;

impl GossipBackend {
    /// Returns the replicas to ask, each with a timeout, and those that cannot be asked.
    ///
    /// Lists of one agent ask all replicas too. The table knows the holders of its tunnels, but an agent of
    /// 16.5 behind a load balancer for calls registers at any replica. A small call to each replica is cheap,
    /// and no request waits for a list. Asking the others only if the holders list nothing would hide the
    /// second process of an agent.
    fn to_ask(&self) -> (Vec<(Replica, Duration)>, Vec<Unanswered>) {
        let now = Instant::now();
        let inner = self.inner();
        let views = inner.table.replicas(now);
        // After a pause of this process, no replica is live until it is heard again.
        let unsynced = inner.table.unsynced(now);
        drop(inner);
        let asked = views.iter().filter(|view| view.health.is_asked()).map(|view| table::Candidate {
            replica: view.replica.clone(),
            address: view.address.clone(),
            health: view.health,
        });
        let mut to_ask: Vec<(Replica, Duration)> = Vec::new();
        for candidate in asked.chain(unsynced) {
            let replica = Replica { id: candidate.replica, address: candidate.address };
            if !to_ask.iter().any(|(known, _)| *known == replica) {
                to_ask.push((replica, ask::timeout(candidate.health == ReplicaHealth::Suspect)));
            }
        }
        let lost = views.iter().filter_map(|view| {
            let same_address = |(other, _): &(Replica, Duration)| other.address == view.address;
            let replaced = view.address == self.me.address || to_ask.iter().any(same_address);
            let reason = why_lost(view).filter(|_| !replaced)?;
            let replica = Replica { id: view.replica.clone(), address: view.address.clone() };
            Some(Unanswered { replica, reason, given_up: true })
        });
        let lost = lost.collect();
        (to_ask, lost)
    }

    /// Adds the connections of the other replicas to those of this one.
    pub(super) async fn gather(&self, query: Query, own: Connected) -> Connected {
        let mut all = own;
        let (to_ask, lost) = self.to_ask();
        all.unanswered.extend(lost);
        let mut asking: FuturesUnordered<_> = to_ask
            .into_iter()
            .map(|(replica, within)| async move {
                let answer = ask::connections(&self.peers, &replica, query);
                let answer = tokio::time::timeout(within, answer).await;
                (replica, answer.unwrap_or_else(|_| Err(format!("no answer within {within:?}"))))
            })
            .collect();
        while let Some((replica, answer)) = asking.next().await {
            match answer {
                Ok(connections) => all.connections.extend(connections.into_iter().map(|connection| {
                    let connection = Arc::new(connection);
                    Located { connection, replica: replica.clone(), unconfirmed: false }
                })),
                Err(reason) => {
                    all.unanswered.push(Unanswered { replica, reason, given_up: false });
                }
            }
        }
        all.merge();
        all
    }

    /// Asks the other replicas for reports on themselves and on an agent.
    pub(super) async fn gather_reports(&self, agent: Option<AgentId>) -> (Vec<PeerReport>, Vec<Unanswered>) {
        let (to_ask, lost) = self.to_ask();
        let (reports, mut unanswered) = ask::peer_reports(&self.peers, to_ask, agent).await;
        unanswered.extend(lost);
        unanswered.sort_by(|a, b| a.replica.id.cmp(&b.replica.id));
        (reports, unanswered)
    }

    /// Returns an alarm for each replica that is heard by gossip and cannot be dialled. Such a replica stays
    /// suspect, and nothing else shows why.
    fn unreachable(&self) -> Vec<String> {
        let views = self.inner().table.replicas(Instant::now());
        let unreachable = views.into_iter().filter(|view| {
            let unanswered = matches!(view.stream, StreamVote::Unanswered | StreamVote::Refused);
            view.gossip == GossipVote::Live && unanswered && view.failures >= FAILED_DIALS
        });
        unreachable
            .map(|view| {
                format!(
                    "replica {} is heard by gossip but does not answer at {}: requests that arrive here do not reach its \
                     agents; check that TCP connections to this address are allowed",
                    view.replica, view.address
                )
            })
            .collect()
    }

    /// Returns the problems with how replicas find each other, for a person.
    pub(super) fn alarms(&self) -> Vec<String> {
        let live = *self.live.borrow() - 1;
        let mut alarms = Vec::new();
        match *self.gossip.status().borrow() {
            gossip::Status::Lonely { since } if live > 0 => alarms.push(format!(
                "gossip has heard no other replica for {:.0?} although {live} answer over TCP: UDP is blocked on the port of \
                 the private API",
                since.elapsed()
            )),
            gossip::Status::Lonely { since } => alarms.push(format!(
                "no other replica was heard for {:.0?} although discovery names others",
                since.elapsed()
            )),
            gossip::Status::Alone | gossip::Status::Seeking | gossip::Status::Meshed { .. } => {}
        }
        let (address_alarm, refusals, unread) = {
            let inner = self.inner();
            let unread = (inner.subscribers == 0 && live > 0).then(|| inner.unread.elapsed());
            (inner.address_alarm.clone(), inner.refusals.clone(), unread)
        };
        alarms.extend(address_alarm);
        if let Some(since) = unread.filter(|since| *since >= UNREAD) {
            alarms.push(format!(
                "no other replica has reached this one for {since:.0?} although {live} answer to it: requests that arrive at \
                 the others do not reach the agents of this one; check that TCP connections to {} are allowed",
                self.me.address
            ));
        }
        alarms.extend(self.unreachable());
        let mut refusals: Vec<String> =
            refusals.into_iter().map(|(address, why)| format!("no table from {address}: {why}")).collect();
        refusals.sort_unstable();
        alarms.extend(refusals);
        alarms
    }
}

/// Returns why a replica is not asked although it may hold agents, which may still reach it by another
/// network. A replica that has announced that it left holds none.
fn why_lost(view: &table::ReplicaView) -> Option<String> {
    if view.state == ReplicaState::Left {
        return None;
    }
    let heard = view.proof_age.as_secs();
    match view.health {
        ReplicaHealth::Unreachable => Some(format!("nothing listens there; it was last heard {heard} s ago")),
        ReplicaHealth::Gone => {
            Some(format!("gone without announcing that it leaves; it was last heard {heard} s ago"))
        }
        ReplicaHealth::Live | ReplicaHealth::Draining | ReplicaHealth::Suspect => None,
    }
}
