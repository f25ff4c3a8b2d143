//! The copy of one replica's set: operations, snapshots, masks, and when it must be synced again.

use std::{collections::BTreeMap, mem, time::Duration};

use ids::AgentId;
use tokio::time::Instant;

use super::{Limits, Out, backoff::backoff};
use crate::{
    ChunkHeader, IdSet, Op, Summary, Version, codec,
    flaw::{Flaw, flawed},
};

/// Delay between resyncs of one copy: the first, doubled with each resync up to the second. It is reset once
/// the copy was good for twice the second.
const RESYNC: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(30));

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Want {
    Resume,
    Snapshot,
}

#[derive(Debug, Clone, Default)]
pub(super) struct Mirror {
    pub(super) ids: IdSet,
    /// `None` before the first snapshot.
    pub(super) version: Option<Version>,
    /// The highest version that was ever visible in this epoch. It survives when the set is dropped, so that
    /// the next set is never older than earlier answers.
    pub(super) shown: Version,
    /// The highest version that is known of the owner.
    pub(super) known: Version,
    /// Since when the copy is behind the known version, or a snapshot makes no progress.
    pub(super) behind: Option<Instant>,
    /// The stream has announced a snapshot that has not replaced the copy yet.
    pub(super) awaiting: bool,
    pub(super) shadow: Option<Shadow>,
    pub(super) want: Option<(Instant, Want)>,
    pub(super) resyncs: u32,
    pub(super) resynced: Option<Instant>,
    pub(super) masks: BTreeMap<AgentId, Version>,
}

/// A snapshot that is received in addition to the copy.
#[derive(Debug, Clone)]
pub(super) struct Shadow {
    version: Version,
    next: u32,
    complete: bool,
    last: Option<AgentId>,
    ids: IdSet,
    /// Operations above the snapshot's version, by version.
    kept: BTreeMap<Version, Op>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Source {
    Stream,
    Gossip,
}

impl Mirror {
    /// Schedules a resync, at once if the last one is long ago. The first of several calls sets the time. A
    /// snapshot replaces a resume.
    pub(super) fn resync(&mut self, want: Want, now: Instant) {
        if let Some((_, old)) = &mut self.want {
            if want == Want::Snapshot {
                *old = want;
            }
            return;
        }
        if self.resynced.is_some_and(|at| now.saturating_duration_since(at) > RESYNC.1 * 2) {
            self.resyncs = 0;
        }
        let wait = if self.resyncs == 0 || flawed(Flaw::NoBackoff) {
            Duration::ZERO
        } else {
            backoff(RESYNC, self.resyncs)
        };
        self.resyncs = self.resyncs.saturating_add(1);
        self.resynced = Some(now);
        self.want = Some((now + wait, want));
    }

    /// Applies operations `from + 1 ..` to the copy and to a snapshot that is being received.
    pub(super) fn offer(
        &mut self,
        from: Version,
        ops: &[Op],
        source: Source,
        limits: &Limits,
        out: &mut Out,
        now: Instant,
    ) {
        let (mut gap, mut wrong, mut version) = (false, false, from);
        let end = from.0.saturating_add(ops.len() as u64);
        // Gossip repeats its operations five times a second for each replica, so most are known.
        let old = self.shadow.is_none() && self.version.is_some_and(|version| version.0 >= end);
        if old && !flawed(Flaw::AnyVersion) {
            return;
        }
        for op in ops {
            let Some(next) = version.next() else { return };
            version = next;
            self.known = self.known.max(version);
            if let Some(shadow) = &mut self.shadow
                && !flawed(Flaw::OpsLostBySwap)
            {
                match shadow.offer(version, *op, limits) {
                    Ok(()) => {}
                    Err(Offer::Gap) => gap = true,
                    Err(Offer::Wrong) => wrong = true,
                }
            }
            let at = match self.version {
                Some(at) => at,
                // Version 0 of an epoch is the empty set, so no snapshot is needed to start there.
                None if version == Version(1) && end >= self.shown.0 => Version(0),
                None => {
                    gap |= self.shadow.is_none();
                    continue;
                }
            };
            if at.next() == Some(version) || flawed(Flaw::AnyVersion) {
                let full = self.ids.len() >= limits.ids;
                wrong |= match *op {
                    Op::Add(agent) => full || !self.ids.insert(agent),
                    Op::Remove(agent) => !self.ids.remove(agent),
                };
                self.version = Some(version);
                self.shown = self.shown.max(version);
                out.wake(op.agent(), limits.woken);
            } else if version > at {
                gap |= self.shadow.is_none();
            }
        }
        self.swap(limits, out);
        self.unmask(limits, out);
        // An operation without effect means that the sets differ, so there is no need to wait for a digest.
        if wrong || (gap && source == Source::Stream) {
            self.resync(Want::Snapshot, now);
        }
    }

    /// Replaces the copy by a complete snapshot, unless the snapshot is older: then operations of the stream
    /// update it first.
    pub(super) fn swap(&mut self, limits: &Limits, out: &mut Out) {
        let ready = self.shadow.as_ref().is_some_and(|shadow| {
            shadow.complete && (shadow.version >= self.shown || flawed(Flaw::OldSnapshotWins))
        });
        let Some(shadow) = self.shadow.take_if(|_| ready) else { return };
        let old = mem::replace(&mut self.ids, shadow.ids);
        self.version = Some(shadow.version);
        self.shown = self.shown.max(shadow.version);
        self.awaiting = false;
        self.known = self.known.max(shadow.version);
        if old.len().abs_diff(self.ids.len()) > limits.woken {
            out.wake_all();
            return;
        }
        for id in self.ids.iter().filter(|id| !old.contains(*id)) {
            out.wake(id, limits.woken);
        }
        for id in old.iter().filter(|id| !self.ids.contains(*id)) {
            out.wake(id, limits.woken);
        }
    }

    /// Drops the masks that a higher version makes void.
    pub(super) fn unmask(&mut self, limits: &Limits, out: &mut Out) {
        if let Some(version) = self.version
            && !self.masks.is_empty()
            && !flawed(Flaw::StickyMask)
        {
            self.masks.retain(|&agent, masked| {
                let keep = *masked >= version;
                if !keep {
                    out.wake(agent, limits.woken);
                }
                keep
            });
        }
    }

    /// Compares count and digest at an equal version, and notes a higher version.
    pub(super) fn compare(&mut self, summary: &Summary, now: Instant) {
        self.known = self.known.max(summary.version);
        if self.version != Some(summary.version) || self.shadow.is_some() || flawed(Flaw::NoDigest) {
            return;
        }
        if self.ids.digest() != summary.digest || self.ids.len() as u64 != summary.count {
            self.resync(Want::Snapshot, now);
        }
    }

    /// Drops the set, but not what is known of the epoch.
    pub(super) fn clear(&mut self, limits: &Limits, out: &mut Out) {
        out.wake_set(&self.ids, limits.woken);
        self.ids = IdSet::default();
        self.version = None;
        self.behind = None;
        self.awaiting = false;
        self.shadow = None;
        self.want = None;
        self.masks.clear();
    }

    /// Adds a part of a snapshot. Any error discards the whole snapshot.
    pub(super) fn chunk(
        &mut self,
        header: &ChunkHeader,
        bytes: &[u8],
        limits: &Limits,
    ) -> Result<(), Malformed> {
        if header.chunk == 0 {
            self.awaiting = true;
            self.shadow = Some(Shadow {
                version: header.to,
                next: 0,
                complete: false,
                last: None,
                ids: IdSet::default(),
                kept: BTreeMap::new(),
            });
        }
        let good = match &mut self.shadow {
            Some(shadow) => shadow.chunk(header, bytes, limits),
            None => Err(Malformed),
        };
        if good.is_err() {
            self.shadow = None;
        }
        good
    }
}

enum Offer {
    Gap,
    Wrong,
}

pub(super) struct Malformed;

impl Shadow {
    fn offer(&mut self, version: Version, op: Op, limits: &Limits) -> Result<(), Offer> {
        if version <= self.version {
            return Ok(());
        }
        if self.kept.len() >= limits.kept && !self.kept.contains_key(&version) {
            return Err(Offer::Wrong);
        }
        self.kept.insert(version, op);
        if self.complete { self.catch_up(limits) } else { Ok(()) }
    }

    fn catch_up(&mut self, limits: &Limits) -> Result<(), Offer> {
        while let Some(next) = self.version.next()
            && let Some(op) = self.kept.remove(&next)
        {
            self.version = next;
            let good = match op {
                Op::Add(agent) => self.ids.len() < limits.ids && self.ids.insert(agent),
                Op::Remove(agent) => self.ids.remove(agent),
            };
            if !good {
                return Err(Offer::Wrong);
            }
        }
        if self.kept.is_empty() { Ok(()) } else { Err(Offer::Gap) }
    }

    fn chunk(&mut self, header: &ChunkHeader, bytes: &[u8], limits: &Limits) -> Result<(), Malformed> {
        let ids = codec::decode_ids(bytes, header.count as usize).map_err(|_| Malformed)?;
        // Only the last part may be empty, so that a snapshot always ends.
        let follows = !self.complete && header.chunk == self.next && header.to == self.version;
        let rises = ids.first().is_none_or(|first| self.last.is_none_or(|last| last < *first));
        let fits = self.ids.len() + ids.len() <= limits.ids && (header.last || !ids.is_empty());
        if !follows || !rises || !fits {
            return Err(Malformed);
        }
        self.last = ids.last().copied().or(self.last);
        for id in ids {
            self.ids.insert(id);
        }
        self.next += 1;
        self.complete = header.last;
        // A gap in the operations from gossip is harmless, because the stream delivers them too.
        match if self.complete { self.catch_up(limits) } else { Ok(()) } {
            Ok(()) | Err(Offer::Gap) => Ok(()),
            Err(Offer::Wrong) => Err(Malformed),
        }
    }
}
