//! The set that this replica publishes, and one feed of it per subscriber.
//!
//! A snapshot is taken and sorted at one version. Feeds that start at about the same time share it.
//! Operations that happen while it is sent are in the ring, have higher versions, and follow the snapshot on
//! the same stream. So an unregistration cannot be lost behind a snapshot.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Weak},
};

use ids::AgentId;
use tokio::time::Instant;

use crate::{
    CHUNK_IDS, ChunkHeader, Epoch, IdSet, Message, Op, Record, Summary, Version, codec,
    flaw::{Flaw, flawed},
    limits::{BEAT, DELTA_OPS, FLUSH, RECORD_BYTES, RECORD_OPS, RING_OPS},
};

/// A new feed shares an existing snapshot that is at most this many operations old. For an older one, sorting
/// again is cheaper than sending the operations that follow.
const SHARED_FOR: u64 = 4096;

/// The set of agents that this replica holds, its version and its last operations.
#[derive(Debug, Clone)]
pub struct Owner {
    epoch: Epoch,
    version: Version,
    ids: IdSet,
    /// For agents that are held more than once: how many times more. Most agents are held once and are not
    /// here.
    more: HashMap<AgentId, u32>,
    /// The operations up to `version`, oldest first.
    ring: VecDeque<Op>,
    ring_ops: usize,
    chunk_ids: usize,
    snapshot: Weak<Snapshot>,
}

#[derive(Debug)]
struct Snapshot {
    epoch: Epoch,
    to: Version,
    ids: Vec<AgentId>,
}

impl Owner {
    /// Returns the empty set at version 0. `epoch` must be higher than that of any earlier process of this
    /// replica. If a peer reports a higher one, call [`Owner::raise_epoch`].
    pub fn new(epoch: Epoch) -> Self {
        Self::with_sizes(epoch, RING_OPS, CHUNK_IDS)
    }

    /// For tests: small sizes reach every branch quickly.
    pub(crate) fn with_sizes(epoch: Epoch, ring_ops: usize, chunk_ids: usize) -> Self {
        Self {
            epoch,
            version: Version(0),
            ids: IdSet::default(),
            more: HashMap::new(),
            ring: VecDeque::new(),
            ring_ops,
            chunk_ids,
            snapshot: Weak::new(),
        }
    }

    /// Returns the epoch.
    pub const fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Returns the version. A "not here" answer carries it, read under the lock of the registry.
    pub const fn version(&self) -> Version {
        self.version
    }

    /// Returns how many agents are held.
    pub const fn len(&self) -> usize {
        self.ids.len()
    }

    /// Whether no agent is held.
    pub const fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// Whether `agent` is held.
    pub fn contains(&self, agent: AgentId) -> bool {
        self.ids.contains(agent)
    }

    /// Returns the agents that are held.
    pub const fn agents(&self) -> &IdSet {
        &self.ids
    }

    /// Counts one more tunnel of `agent`. Returns true if it is the first, in which case feeds have news.
    pub fn insert(&mut self, agent: AgentId) -> bool {
        if self.ids.insert(agent) || flawed(Flaw::NoCount) {
            self.publish(Op::Add(agent));
            true
        } else {
            let more = self.more.entry(agent).or_insert(0);
            *more = more.saturating_add(1);
            false
        }
    }

    /// Counts one tunnel less. Returns true if it was the last, in which case feeds have news. Does nothing
    /// for an agent that is not held.
    pub fn remove(&mut self, agent: AgentId) -> bool {
        if !flawed(Flaw::NoCount)
            && let Some(more) = self.more.get_mut(&agent)
        {
            *more -= 1;
            if *more == 0 {
                self.more.remove(&agent);
            }
            return false;
        }
        let removed = self.ids.remove(agent);
        if removed {
            self.publish(Op::Remove(agent));
        }
        removed
    }

    /// Returns the gossip value `tbl`, which is also the content of a heartbeat.
    pub const fn summary(&self) -> Summary {
        Summary {
            epoch: self.epoch,
            version: self.version,
            count: self.ids.len() as u64,
            digest: self.ids.digest(),
        }
    }

    /// Returns the gossip value `chg`: the newest operations, as many as fit its bounds.
    pub fn recent(&self) -> Record {
        let mut count = self.ring.len().min(RECORD_OPS);
        loop {
            let record = Record {
                epoch: self.epoch,
                first: Version(self.version.0 - count as u64 + 1),
                ops: self.ring.range(self.ring.len() - count..).copied().collect(),
            };
            let bytes = record.to_text().len();
            if bytes <= RECORD_BYTES || count == 0 {
                return record;
            }
            // An operation takes at most 14 characters, so this drops too few operations rather than too
            // many.
            count -= ((bytes - RECORD_BYTES) / 14).max(1).min(count);
        }
    }

    /// Moves to an epoch above `seen` if a peer has seen a higher one than ours. This happens after the
    /// clock, from which the epoch is drawn, was set back: peers would ignore this process as an old one.
    /// Returns whether the epoch changed. Call it with the epoch of every request to subscribe.
    pub fn raise_epoch(&mut self, seen: Epoch) -> bool {
        if seen <= self.epoch || seen.0 == u64::MAX {
            return false;
        }
        self.epoch = Epoch(seen.0 + 1);
        // No subscriber resumes across epochs, so the ring is not needed any more.
        self.ring.clear();
        true
    }

    /// Returns the feed of a subscriber that has the set at `resume`, or no set.
    pub const fn feed(&self, resume: Option<(Epoch, Version)>) -> Feed {
        Feed { resume, epoch: None, sent: Version(0), sending: None, flushed: None, beat: None }
    }

    fn publish(&mut self, op: Op) {
        self.version.0 += 1;
        if self.ring.len() == self.ring_ops {
            self.ring.pop_front();
        }
        self.ring.push_back(op);
    }

    /// The version before the oldest operation of the ring.
    fn oldest(&self) -> Version {
        Version(self.version.0 - self.ring.len() as u64)
    }

    fn since(&self, version: Version) -> impl Iterator<Item = Op> {
        let skip = (version.0 - self.oldest().0) as usize;
        self.ring.range(skip..).copied()
    }

    fn snapshot(&mut self) -> Arc<Snapshot> {
        if let Some(snapshot) = self.snapshot.upgrade()
            && snapshot.epoch == self.epoch
            && snapshot.to >= self.oldest()
            && self.version.0 - snapshot.to.0 <= SHARED_FOR.min(self.ring_ops as u64 / 2)
        {
            return snapshot;
        }
        let snapshot = Arc::new(Snapshot { epoch: self.epoch, to: self.version, ids: self.ids.sorted() });
        self.snapshot = Arc::downgrade(&snapshot);
        snapshot
    }
}

/// What a feed does next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Next {
    /// Send this message, and call [`Feed::next`] again once the stream has room.
    Message(Message),
    /// There is nothing to send. Call [`Feed::next`] again at this instant or when the owner changes.
    WaitUntil(Instant),
}

/// The stream of one subscriber. It holds a position and, while it sends a snapshot, a reference to that. A
/// slow reader costs no more than this. One that has fallen behind the ring gets a new snapshot.
#[derive(Debug, Clone)]
pub struct Feed {
    resume: Option<(Epoch, Version)>,
    /// `None` before the hello.
    epoch: Option<Epoch>,
    /// The version that the subscriber has after reading everything that was sent.
    sent: Version,
    sending: Option<Sending>,
    flushed: Option<Instant>,
    beat: Option<Instant>,
}

#[derive(Debug, Clone)]
struct Sending {
    snapshot: Arc<Snapshot>,
    chunk: u32,
}

impl Feed {
    /// Everything that determines the next messages, except time.
    #[cfg(test)]
    pub(crate) fn position(&self) -> String {
        let sending = self.sending.as_ref().map(|sending| (sending.snapshot.to, sending.chunk));
        format!("{:?} {:?} {:?} {sending:?}", self.resume, self.epoch, self.sent)
    }

    /// Returns the next message, or when to ask again.
    pub fn next(&mut self, owner: &mut Owner, now: Instant) -> Next {
        if self.epoch != Some(owner.epoch) {
            return Next::Message(self.hello(owner, now));
        }
        if let Some(message) = self.chunk(owner) {
            return Next::Message(message);
        }
        if self.sent < owner.oldest() {
            // The subscriber has fallen behind the ring.
            self.sending = Some(Sending { snapshot: owner.snapshot(), chunk: 0 });
            return self.next(owner, now);
        }
        let backlog = owner.version.0 - self.sent.0;
        let flush = self.flushed.map_or(now, |flushed| flushed + FLUSH);
        if backlog > 0 && (flush <= now || backlog > DELTA_OPS as u64) {
            let ops: Vec<_> = owner.since(self.sent).take(DELTA_OPS).collect();
            let from = self.sent;
            self.sent = Version(from.0 + ops.len() as u64);
            self.flushed = Some(now);
            return Next::Message(Message::Delta { from, to: self.sent, ops });
        }
        let beat = self.beat.map_or(now, |beat| beat + BEAT);
        // A heartbeat summarizes what the stream has sent, so it is sent after a pending delta.
        if backlog == 0 && beat <= now {
            self.beat = Some(now);
            return Next::Message(Message::Beat(owner.summary()));
        }
        Next::WaitUntil(if backlog > 0 { flush } else { beat })
    }

    fn hello(&mut self, owner: &mut Owner, now: Instant) -> Message {
        let resumed = match self.resume.take() {
            Some((epoch, version)) => {
                let known = epoch == owner.epoch && (owner.oldest()..=owner.version).contains(&version);
                self.sent = version;
                // A snapshot takes about 2 bytes per id, an operation 8. With more operations, a snapshot is
                // cheaper.
                known
                    && !flawed(Flaw::NoResume)
                    && owner.version.0 - version.0 <= DELTA_OPS as u64 + owner.len() as u64 / 4
            }
            None => false,
        };
        self.epoch = Some(owner.epoch);
        self.sending = (!resumed).then(|| Sending { snapshot: owner.snapshot(), chunk: 0 });
        self.beat = Some(now);
        Message::Hello { epoch: owner.epoch, version: owner.version, resumed }
    }

    fn chunk(&mut self, owner: &Owner) -> Option<Message> {
        let Sending { snapshot, chunk } = self.sending.as_mut()?;
        let start = *chunk as usize * owner.chunk_ids;
        let end = snapshot.ids.len().min(start + owner.chunk_ids);
        let part = &snapshot.ids[start..end];
        let header = ChunkHeader {
            epoch: owner.epoch,
            to: snapshot.to,
            chunk: *chunk,
            last: end == snapshot.ids.len(),
            count: part.len() as u32,
        };
        let mut ids = Vec::with_capacity(part.len() * 2);
        codec::encode_ids(part, &mut ids);
        *chunk += 1;
        if header.last {
            self.sent = snapshot.to;
            self.sending = None;
        }
        Some(Message::Chunk { header, ids })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(id: i64) -> AgentId {
        AgentId::new(id).unwrap()
    }

    /// Returns all messages that the feed has at `now`.
    fn drain(feed: &mut Feed, owner: &mut Owner, now: Instant) -> Vec<Message> {
        std::iter::from_fn(|| match feed.next(owner, now) {
            Next::Message(message) => Some(message),
            Next::WaitUntil(at) => {
                assert!(at > now, "the feed waits for an instant in the past");
                None
            }
        })
        .collect()
    }

    #[test]
    fn only_the_first_and_the_last_tunnel_are_published() {
        let mut owner = Owner::new(Epoch(1));
        assert!(owner.insert(id(7)));
        assert!(!owner.insert(id(7)));
        assert!(!owner.remove(id(7)));
        assert!(owner.contains(id(7)));
        assert!(owner.remove(id(7)));
        assert!(!owner.remove(id(7)));
        assert_eq!(owner.version(), Version(2));
        assert_eq!(owner.recent().ops, [Op::Add(id(7)), Op::Remove(id(7))]);
        assert_eq!(owner.summary().digest, 0);
    }

    #[test]
    fn feed_flushes_at_once_when_idle_and_every_20_ms_otherwise() {
        let start = Instant::now();
        let mut owner = Owner::new(Epoch(1));
        let mut feed = owner.feed(None);
        assert_eq!(drain(&mut feed, &mut owner, start).len(), 2, "hello and an empty snapshot");
        owner.insert(id(1));
        assert!(matches!(drain(&mut feed, &mut owner, start)[..], [Message::Delta { .. }]));
        owner.insert(id(2));
        assert_eq!(feed.next(&mut owner, start), Next::WaitUntil(start + FLUSH));
        let delta = drain(&mut feed, &mut owner, start + FLUSH);
        assert_eq!(delta, [Message::Delta { from: Version(1), to: Version(2), ops: vec![Op::Add(id(2))] }]);
        assert_eq!(drain(&mut feed, &mut owner, start + BEAT), [Message::Beat(owner.summary())]);
        assert_eq!(feed.next(&mut owner, start + BEAT), Next::WaitUntil(start + BEAT * 2));
    }

    #[test]
    fn feed_resumes_by_version_or_sends_a_snapshot() {
        let now = Instant::now();
        let mut owner = Owner::with_sizes(Epoch(5), 4, 2);
        for i in 1..=6 {
            owner.insert(id(i));
        }
        for (resume, resumes) in [
            (None, false),
            (Some((Epoch(5), Version(6))), true),
            (Some((Epoch(5), Version(2))), true),
            (Some((Epoch(5), Version(1))), false),
            (Some((Epoch(5), Version(7))), false),
            (Some((Epoch(4), Version(6))), false),
        ] {
            let mut feed = owner.feed(resume);
            let messages = drain(&mut feed, &mut owner, now);
            let Message::Hello { resumed, version, .. } = messages[0] else { panic!("{messages:?}") };
            assert_eq!((resumed, version), (resumes, Version(6)), "{resume:?}");
            if !resumes {
                assert!(
                    matches!(&messages[3], Message::Chunk { header, .. } if header.last && header.chunk == 2)
                );
            }
            assert_eq!(feed.sent, Version(6));
        }
    }

    #[test]
    fn slow_reader_gets_a_new_snapshot() {
        let now = Instant::now();
        let mut owner = Owner::with_sizes(Epoch(1), 4, 100);
        let mut feed = owner.feed(None);
        drain(&mut feed, &mut owner, now);
        for i in 1..=9 {
            owner.insert(id(i));
        }
        let messages = drain(&mut feed, &mut owner, now);
        assert!(matches!(&messages[..], [Message::Chunk { header, .. }] if header.to == Version(9)));
    }

    #[test]
    fn snapshot_has_one_version_while_operations_continue() {
        let now = Instant::now();
        let mut owner = Owner::new(Epoch(1));
        for i in 1..=(CHUNK_IDS as i64 + 5) {
            owner.insert(id(i));
        }
        let at = owner.version();
        let mut feed = owner.feed(None);
        feed.next(&mut owner, now);
        let Next::Message(Message::Chunk { header, ids }) = feed.next(&mut owner, now) else { panic!() };
        assert_eq!((header.to, header.last, header.count as usize), (at, false, CHUNK_IDS));
        assert_eq!(codec::decode_ids(&ids, CHUNK_IDS).unwrap().last(), Some(&id(CHUNK_IDS as i64)));
        owner.remove(id(CHUNK_IDS as i64 + 1));
        let Next::Message(Message::Chunk { header, ids }) = feed.next(&mut owner, now) else { panic!() };
        assert_eq!((header.to, header.last, header.chunk), (at, true, 1));
        assert_eq!(codec::decode_ids(&ids, 5).unwrap()[0], id(CHUNK_IDS as i64 + 1));
        let Next::Message(Message::Delta { from, ops, .. }) = feed.next(&mut owner, now) else { panic!() };
        assert_eq!((from, &ops[..]), (at, &[Op::Remove(id(CHUNK_IDS as i64 + 1))][..]));
        // A second subscriber shares the sorted ids while another feed still sends them.
        let (one, two) = (owner.snapshot(), owner.snapshot());
        assert!(Arc::ptr_eq(&one, &two));
    }

    #[test]
    fn recent_fits_its_bounds_and_ends_at_the_version() {
        let mut owner = Owner::new(Epoch(u64::MAX - 1));
        assert_eq!(owner.recent(), Record { epoch: owner.epoch(), first: Version(1), ops: vec![] });
        for i in 0..400 {
            owner.insert(id(if i % 2 == 0 { i64::MAX - i } else { 1 + i }));
        }
        let record = owner.recent();
        assert!(record.to_text().len() <= RECORD_BYTES);
        assert!(record.ops.len() > 100, "{}", record.ops.len());
        assert_eq!(record.last(), owner.version());
        assert_eq!(Record::from_text(&record.to_text()), Ok(record));
        let mut small = Owner::new(Epoch(1));
        for i in 1..1000 {
            small.insert(id(i));
        }
        assert_eq!(small.recent().ops.len(), RECORD_OPS);
        assert_eq!(small.recent().last(), small.version());
    }

    #[test]
    fn a_higher_epoch_seen_by_a_peer_raises_ours() {
        let now = Instant::now();
        let mut owner = Owner::new(Epoch(10));
        owner.insert(id(3));
        let mut feed = owner.feed(None);
        drain(&mut feed, &mut owner, now);
        assert!(!owner.raise_epoch(Epoch(10)));
        assert!(owner.raise_epoch(Epoch(12)));
        assert!(!owner.raise_epoch(Epoch(u64::MAX)));
        assert!(!owner.raise_epoch(Epoch(12)));
        let messages = drain(&mut feed, &mut owner, now);
        assert!(
            matches!(messages[0], Message::Hello { epoch: Epoch(13), resumed: false, .. })
                && matches!(&messages[1], Message::Chunk { header, .. } if header.count == 1),
            "{messages:?}"
        );
    }
}
