//! The table streams that this replica dials: when one is dialled, and what its messages and its end do.

use std::{mem, sync::Arc, time::Duration};

use cluster::ReplicaState;
use ids::ReplicaId;
use tokio::time::Instant;

use super::{
    Action, Failure, StreamId, Table,
    backoff::{backoff, spread},
    link::{Link, Seed, Target},
    mirror::{Source, Want},
    peer::{Peer, StreamVote},
};
use crate::{
    Epoch, Identity, Message, Version,
    flaw::{Flaw, flawed},
};

/// Delay between dials of a known replica: the first, doubled with each failure up to the second.
const REDIAL: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(1));

/// The same for seeds that do not belong to a known replica.
const RESEED: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(5));

/// A stream that was open for this long is dialled again at once.
const STEADY: Duration = Duration::from_secs(1);

impl Table {
    pub(super) fn hello(
        &mut self,
        stream: StreamId,
        target: Target,
        from: &Identity,
        version: Version,
        resumed: bool,
        now: Instant,
    ) {
        let (link, asked) = match &target {
            Target::Peer(replica) => {
                let Some(peer) = self.peers.get_mut(replica) else { return };
                (mem::replace(&mut peer.link, Link::Idle { retry: now }), Some(replica.clone()))
            }
            Target::Seed(address) => {
                let Some(seed) = self.seeds.get_mut(address) else { return };
                // The seed is not dialled while the replica that answered is dialled by its name. The delay
                // is for a replica that is not accepted.
                seed.replica = Some(from.replica.clone());
                seed.failures = seed.failures.saturating_add(1);
                let retry = now + spread(backoff(RESEED, seed.failures), stream);
                (mem::replace(&mut seed.link, Link::Idle { retry }), None)
            }
        };
        if let Some(asked) = &asked
            && *asked != from.replica
            && let Some(peer) = self.peers.get_mut(asked)
        {
            // Another replica has the address: the one that was dialled does not listen there.
            peer.stream = StreamVote::Refused;
            peer.failures = peer.failures.saturating_add(1);
            peer.link = Link::Idle { retry: now + backoff(REDIAL, peer.failures) };
            self.settle(asked, now);
        }
        let taken = from.replica != self.me
            && self.admit(&from.replica, &from.address, from.state, now)
            && self.epoch(&from.replica, from.epoch, now)
            && self.peers.get(&from.replica).is_some_and(|peer| peer.state != ReplicaState::Left);
        if !taken {
            self.close(link);
            if let Some(peer) = self.peers.get_mut(&from.replica) {
                peer.failures = peer.failures.saturating_add(1);
                if let Link::Idle { retry } = &mut peer.link {
                    *retry = now + backoff(REDIAL, peer.failures);
                }
            }
            return;
        }
        let running = self.running_snapshots();
        let Some(peer) = self.peers.get_mut(&from.replica) else { return };
        peer.dropped = None;
        peer.proof = peer.proof.max(now);
        peer.stream = StreamVote::None;
        peer.address = from.address.clone();
        peer.set_state(from.state);
        if let Link::Open { .. } = peer.link {
            // It was dialled twice, by its name and as a seed: the first stream stays.
            self.close(link);
            self.settle(&from.replica, now);
            return;
        }
        let dialling = mem::replace(&mut peer.link, Link::Open { stream, since: now, heard: now });
        let copy = &mut peer.copy;
        // The version from the owner itself corrects a wrong version from elsewhere.
        copy.known = version.max(copy.shown);
        copy.behind = None;
        copy.shadow = None;
        copy.awaiting = !resumed;
        let doubted = copy.want.is_some_and(|(at, want)| at <= now && want == Want::Snapshot);
        let queue = !resumed && !link.asks_snapshot() && running >= self.limits.snapshots;
        if queue || (resumed && (copy.version.is_none() || doubted)) {
            // A resume that became a snapshot waits in the queue for snapshots. A resume is useless if the
            // copy is doubted or was dropped.
            copy.want = Some((now, Want::Snapshot));
            copy.awaiting = false;
            peer.link = Link::Idle { retry: now };
            self.close(link);
        } else {
            // A snapshot repairs every difference, a resume only a copy that is behind.
            copy.want = copy.want.filter(|(_, want)| resumed && *want == Want::Snapshot);
            self.streams.insert(stream, Target::Peer(from.replica.clone()));
        }
        self.close(dialling);
        self.settle(&from.replica, now);
    }

    pub(super) fn content(
        &mut self,
        replica: &ReplicaId,
        stream: StreamId,
        from: Option<Identity>,
        message: Message,
        now: Instant,
    ) {
        let Self { peers, limits, out, .. } = self;
        let Some(peer) = peers.get_mut(replica) else { return };
        let Link::Open { heard, .. } = &mut peer.link else {
            self.break_off(stream, now);
            return;
        };
        *heard = now;
        let awaited = peer.copy.awaiting;
        peer.proof = peer.proof.max(now);
        let good = match message {
            Message::Hello { .. } => true,
            Message::Chunk { header, ids } => {
                match (Some(header.epoch) == peer.epoch).then(|| peer.copy.chunk(&header, &ids, limits)) {
                    Some(Ok(())) => {
                        peer.copy.behind = None;
                        peer.copy.swap(limits, out);
                        peer.copy.unmask(limits, out);
                        true
                    }
                    _ => false,
                }
            }
            Message::Delta { from, to, ops } => {
                let good = from.0.checked_add(ops.len() as u64) == Some(to.0);
                if good {
                    peer.copy.offer(from, &ops, Source::Stream, limits, out, now);
                }
                good
            }
            Message::Beat(summary) => {
                let same = Some(summary.epoch) == peer.epoch;
                if let Some(from) = from
                    && same
                    && from.epoch == summary.epoch
                    && from.replica == *replica
                {
                    peer.address = from.address;
                    peer.set_state(from.state);
                }
                if same {
                    peer.copy.compare(&summary, now);
                }
                same
            }
        };
        self.freed |= awaited && !peer.copy.awaiting;
        if good {
            self.settle(replica, now);
        } else {
            self.doubt(replica, now);
        }
    }

    /// Closes a stream that is of no use although the owner is alive. A snapshot is requested again after a
    /// backoff delay.
    pub(super) fn doubt(&mut self, replica: &ReplicaId, now: Instant) {
        let Some(peer) = self.peers.get_mut(replica) else { return };
        peer.copy.resync(Want::Snapshot, now);
        peer.copy.shadow = None;
        let retry = peer.copy.want.map_or(now, |(at, _)| at);
        let link = mem::replace(&mut peer.link, Link::Idle { retry });
        self.close(link);
        self.settle(replica, now);
    }

    pub(super) fn fail(&mut self, stream: StreamId, failure: Failure, now: Instant) {
        match self.streams.remove(&stream) {
            None => {}
            Some(Target::Seed(address)) => {
                if let Some(seed) = self.seeds.get_mut(&address) {
                    seed.failures = seed.failures.saturating_add(1);
                    let wait = spread(backoff(RESEED, seed.failures), stream);
                    seed.link = Link::Idle { retry: now + wait };
                }
                self.freed = true;
            }
            Some(Target::Peer(replica)) => {
                if let Some(peer) = self.peers.get_mut(&replica) {
                    peer.stream = match (peer.link, failure) {
                        (Link::Dialing { .. }, Failure::Refused) => StreamVote::Refused,
                        (Link::Dialing { .. }, Failure::Unanswered) => StreamVote::Unanswered,
                        _ => StreamVote::Lost,
                    };
                    let steady = matches!(peer.link, Link::Open { since, .. } if now >= since + STEADY);
                    peer.failures = if steady { 0 } else { peer.failures.saturating_add(1) };
                    let wait =
                        if steady { Duration::ZERO } else { spread(backoff(REDIAL, peer.failures), stream) };
                    peer.link = Link::Idle { retry: now + wait };
                    // The next stream cannot continue a partial snapshot.
                    peer.copy.shadow = None;
                    self.freed = true;
                    self.settle(&replica, now);
                }
            }
        }
    }

    /// Closes the stream of a peer that violated the protocol.
    pub(super) fn break_off(&mut self, stream: StreamId, now: Instant) {
        self.out.actions.push(Action::Close { stream });
        self.fail(stream, Failure::Ended, now);
    }

    pub(super) fn close(&mut self, link: Link) {
        if let Some(stream) = link.stream() {
            self.streams.remove(&stream);
            self.out.actions.push(Action::Close { stream });
            self.freed = true;
        }
    }

    pub(super) fn dial(&mut self, replica: &ReplicaId, now: Instant) {
        let Some(peer) = self.peers.get(replica) else { return };
        let due = matches!(peer.link, Link::Idle { retry } if retry <= now);
        // A seed that is being dialled at the same address is enough.
        let seeded =
            self.seeds.get(&peer.address).is_some_and(|seed| matches!(seed.link, Link::Dialing { .. }));
        if !due || seeded {
            return;
        }
        let (whole, wait) = match peer.copy.want {
            Some((at, Want::Snapshot)) => (at <= now, at > now),
            _ => (false, false),
        };
        let resume = peer.epoch.zip(peer.copy.version).filter(|_| !whole);
        let most = if flawed(Flaw::OneSnapshot) { 1 } else { self.limits.snapshots };
        if resume.is_none() && (wait || self.running_snapshots() >= most) {
            return;
        }
        let (address, known, stream) = (peer.address.clone(), peer.epoch, StreamId(self.next_stream));
        self.next_stream += 1;
        if let Some(peer) = self.peers.get_mut(replica) {
            peer.link = Link::Dialing { stream, since: now, snapshot: resume.is_none() };
        }
        self.streams.insert(stream, Target::Peer(replica.clone()));
        // Without a copy, the replica is told the epoch nevertheless: a process whose clock was set back
        // begins another one then, and would otherwise be ignored as an old one until the replica is
        // forgotten.
        let resume = resume.or(known.map(|epoch| (epoch, Version::NONE)));
        self.out.actions.push(Action::Dial { stream, replica: Some(replica.clone()), address, resume });
    }

    pub(super) fn settle_seeds(&mut self, now: Instant) {
        let addresses: Vec<_> = self.seeds.keys().cloned().collect();
        for address in addresses {
            let Some(seed) = self.seeds.get(&address) else { continue };
            match seed.link {
                Link::Dialing { stream, since, .. } if now >= since + self.limits.answer => {
                    self.out.actions.push(Action::Close { stream });
                    self.fail(stream, Failure::Unanswered, now);
                }
                Link::Idle { retry } if retry <= now && !self.is_met(&address, seed) => {
                    if self.running_snapshots() >= self.limits.snapshots {
                        continue;
                    }
                    let resume = self.epoch_at(&address, seed).map(|epoch| (epoch, Version::NONE));
                    let stream = StreamId(self.next_stream);
                    self.next_stream += 1;
                    if let Some(seed) = self.seeds.get_mut(&address) {
                        seed.link = Link::Dialing { stream, since: now, snapshot: true };
                    }
                    self.streams.insert(stream, Target::Seed(address.clone()));
                    self.out.actions.push(Action::Dial { stream, replica: None, address, resume });
                }
                _ => {}
            }
        }
    }

    /// Whether the replica at a seed's address is known and dialled by its name.
    pub(super) fn is_met(&self, address: &Arc<str>, seed: &Seed) -> bool {
        let lives = |peer: &Peer| peer.dropped.is_none() && peer.state != ReplicaState::Left;
        match &seed.replica {
            Some(replica) if *replica == self.me => return true,
            Some(replica) if self.peers.get(replica).is_some_and(lives) => return true,
            _ => {}
        }
        self.peers.values().any(|peer| lives(peer) && peer.address == *address)
    }

    /// Returns the epoch that is known of the replica at a seed's address. It is that of its last process as
    /// long as the replica is remembered.
    fn epoch_at(&self, address: &Arc<str>, seed: &Seed) -> Option<Epoch> {
        let named = seed.replica.as_ref().and_then(|replica| self.peers.get(replica));
        named.or_else(|| self.peers.values().find(|peer| peer.address == *address))?.epoch
    }

    /// Returns how many snapshots are requested or being received.
    pub(super) fn running_snapshots(&self) -> usize {
        self.peers.values().filter(|peer| peer.takes_snapshot()).count()
            + self.seeds.values().filter(|seed| seed.link.asks_snapshot()).count()
    }
}
