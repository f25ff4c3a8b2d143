//! Applies the reports of gossip, admits replicas, and moves them to a new epoch.

use std::{mem, sync::Arc};

use cluster::ReplicaState;
use ids::ReplicaId;
use tokio::time::Instant;

use super::{
    Member, Table,
    link::Link,
    mirror::{Mirror, Source},
    peer::{GossipVote, Peer, StreamVote},
};
use crate::{
    Epoch, Version,
    flaw::{Flaw, flawed},
};

impl Table {
    /// Detects that this process was paused. Messages that the streams have buffered prove nothing then, so
    /// the streams are opened again, and no replica is dropped because it was not heard during the pause.
    pub(super) fn observe(&mut self, now: Instant) {
        let pause = now.saturating_duration_since(self.seen);
        self.seen = self.seen.max(now);
        if pause < self.limits.ttl / 2 {
            return;
        }
        self.spare_until = now + self.limits.answer;
        // A dial whose answer could not be read during the pause does not count as unanswered.
        let links = self.peers.values_mut().map(|peer| &mut peer.link);
        for link in links.chain(self.seeds.values_mut().map(|seed| &mut seed.link)) {
            if let Link::Dialing { since, .. } = link {
                *since = now;
            }
        }
        let open: Vec<_> = self
            .peers
            .values_mut()
            .filter(|peer| matches!(peer.link, Link::Open { .. }))
            .map(|peer| {
                peer.copy.shadow = None;
                mem::replace(&mut peer.link, Link::Idle { retry: now })
            })
            .collect();
        for link in open {
            self.close(link);
        }
    }

    pub(super) fn member(&mut self, replica: &ReplicaId, member: &Member, now: Instant) {
        if !self.admit(replica, &member.address, member.state, now) {
            return;
        }
        let Some(peer) = self.peers.get_mut(replica) else { return };
        if member.generation < peer.generation {
            return;
        }
        peer.generation = member.generation;
        // A report of gossip counts for the epoch that it names. Without an epoch, it counts only before any
        // epoch is known.
        let current = match member.summary {
            Some(summary) => self.epoch(replica, summary.epoch, now),
            None => peer.epoch.is_none(),
        };
        let Self { peers, limits, out, .. } = self;
        let Some(peer) = peers.get_mut(replica) else { return };
        let advanced = peer.gossip_heard.is_none_or(|heard| member.heard > heard);
        if advanced {
            peer.gossip_heard = Some(member.heard);
        }
        if current {
            if advanced || peer.gossip == GossipVote::Unheard {
                peer.gossip = GossipVote::Live;
            }
            if advanced {
                peer.proof = peer.proof.max(member.heard);
            }
            peer.told = Some(member.generation);
            peer.address = member.address.clone();
            if peer.gossip_state != Some(member.state) {
                peer.gossip_state = Some(member.state);
                peer.set_state(member.state);
            }
            if peer.dropped.is_some() && advanced && peer.state != ReplicaState::Left {
                peer.dropped = None;
                peer.link = Link::Idle { retry: now };
            }
            if peer.dropped.is_none() && peer.state != ReplicaState::Left {
                if let Some(record) = &member.changes
                    && Some(record.epoch) == peer.epoch
                {
                    let from = Version(record.first.0.saturating_sub(1));
                    peer.copy.offer(from, &record.ops, Source::Gossip, limits, out, now);
                }
                if let Some(summary) = &member.summary {
                    peer.copy.compare(summary, now);
                }
            }
        }
        self.settle(replica, now);
    }

    /// Adds a replica; false if there is no room for it.
    pub(super) fn admit(
        &mut self,
        replica: &ReplicaId,
        address: &Arc<str>,
        state: ReplicaState,
        now: Instant,
    ) -> bool {
        if self.peers.contains_key(replica) {
            return true;
        }
        if self.peers.len() >= self.limits.replicas {
            let dropped = |(replica, peer): (&ReplicaId, &Peer)| Some((peer.dropped?, replica.clone()));
            let Some((_, oldest)) = self.peers.iter().filter_map(dropped).min() else {
                self.refused += 1;
                return false;
            };
            self.peers.remove(&oldest);
        }
        self.peers.insert(replica.clone(), Peer::new(address.clone(), state, now));
        true
    }

    /// Moves to a newer epoch, which drops the copy of the older one. Returns false if `epoch` is older than
    /// the known one.
    pub(super) fn epoch(&mut self, replica: &ReplicaId, epoch: Epoch, now: Instant) -> bool {
        let Self { peers, limits, out, .. } = self;
        let Some(peer) = peers.get_mut(replica) else { return false };
        if peer.epoch == Some(epoch) {
            return true;
        }
        if peer.epoch.is_some_and(|known| known > epoch) && !flawed(Flaw::AnyEpoch) {
            return false;
        }
        peer.copy.clear(limits, out);
        peer.copy = Mirror::default();
        peer.epoch = Some(epoch);
        peer.proof = peer.proof.max(now);
        peer.dropped = None;
        // The states draining and left belonged to the older process.
        peer.state = ReplicaState::Starting;
        peer.gossip_state = None;
        // Gossip has not heard the new process: its reports on the older one are no vote.
        peer.gossip = GossipVote::Unheard;
        peer.told = None;
        peer.stream = StreamVote::None;
        peer.failures = 0;
        let link = mem::replace(&mut peer.link, Link::Idle { retry: now });
        self.close(link);
        true
    }

    /// Reports a change of health, and wakes the waiters for agents of that copy.
    pub(super) fn publish(&mut self, replica: &ReplicaId, now: Instant) {
        let Some(peer) = self.peers.get_mut(replica) else { return };
        let now_reported = (peer.health(&self.limits, now), peer.steady());
        let old = mem::replace(&mut peer.reported, now_reported);
        if old != now_reported {
            self.out.changed = true;
        }
        if old.0 != now_reported.0 {
            self.out.wake_set(&peer.copy.ids, self.limits.woken);
        }
    }
}
