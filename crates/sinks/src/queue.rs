//! [`Queue`]: what a sink has not taken yet.

use std::{
    collections::{BTreeMap, VecDeque},
    time::Duration,
};

use crate::pause;

/// How much waits, and for how long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Items.
    pub items: usize,
    /// Their bytes.
    pub bytes: usize,
    /// After this time an item is not tried again.
    pub age: Duration,
}

/// An item that was taken out, to be sent.
#[derive(Debug, PartialEq, Eq)]
pub struct Entry<T> {
    /// The item.
    pub item: T,
    bytes: usize,
    number: u64,
    since: Duration,
    failures: u32,
    /// See [`Verdict::Refused`].
    is_refused: bool,
}

/// Items that were dropped, which the sink is to be told.
#[derive(Debug, PartialEq, Eq)]
pub struct Lost {
    /// How many.
    pub items: u64,
}

/// Something to send. It must be [settled](Queue::settle).
#[derive(Debug, PartialEq, Eq)]
pub enum Taken<T> {
    /// An item.
    Item(Entry<T>),
    /// The record of those that were dropped.
    Lost(Lost),
}

/// What came of sending.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Verdict {
    /// It was taken.
    Done,
    /// It was not. The number is random, from 0 to 1.
    Again(f64),
    /// As [`Verdict::Again`], by a sink that may take others: nothing waits until this one is taken.
    Refused(f64),
}

/// Items that were dropped by a call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pushed {
    /// Because there was no room.
    pub full: u64,
    /// Because they were tried for long enough.
    pub expired: u64,
}

/// What a sink has not taken yet: at most [`Limits::items`] and [`Limits::bytes`], besides what is being
/// sent. If it is full, the oldest item is dropped. One that was not taken is tried again later, and does not
/// hold up others.
#[derive(Debug)]
pub struct Queue<T> {
    limits: Limits,
    /// Never tried, the oldest first.
    ready: VecDeque<Entry<T>>,
    /// Tried, by when they are due.
    later: BTreeMap<(Duration, u64), Entry<T>>,
    /// When those are due, by their numbers: the oldest first.
    due: BTreeMap<u64, Duration>,
    bytes: usize,
    /// Items that were refused, and their bytes.
    refused: (usize, usize),
    next: u64,
    lost: u64,
    lost_failures: u32,
    lost_due: Duration,
    is_telling: bool,
}

impl<T> Queue<T> {
    /// Returns an empty queue.
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            ready: VecDeque::new(),
            later: BTreeMap::new(),
            due: BTreeMap::new(),
            bytes: 0,
            refused: (0, 0),
            next: 0,
            lost: 0,
            lost_failures: 0,
            lost_due: Duration::ZERO,
            is_telling: false,
        }
    }

    /// Returns how many items wait.
    pub fn len(&self) -> usize {
        self.ready.len() + self.later.len()
    }

    /// Whether nothing waits, not even the record of what was dropped.
    pub fn is_empty(&self) -> bool {
        self.len() == 0 && self.lost == 0
    }

    /// Returns the bytes of what waits.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Whether it is less than half full. Items that were refused do not count: they may never be taken.
    pub fn has_room(&self) -> bool {
        let (items, bytes) = self.refused;
        self.len().saturating_sub(items) < self.limits.items.div_ceil(2)
            && self.bytes.saturating_sub(bytes) < self.limits.bytes.div_ceil(2)
    }

    /// Adds an item of so many bytes. One that is larger than all the room is dropped itself.
    pub fn push(&mut self, item: T, bytes: usize, now: Duration) -> Pushed {
        if bytes > self.limits.bytes || self.limits.items == 0 {
            self.lost = self.lost.saturating_add(1);
            return Pushed { full: 1, expired: 0 };
        }
        let number = self.next;
        self.next += 1;
        self.bytes += bytes;
        self.ready.push_back(Entry { item, bytes, number, since: now, failures: 0, is_refused: false });
        Pushed { full: self.trim(), expired: 0 }
    }

    /// Drops the oldest until the rest fits. Returns how many.
    fn trim(&mut self) -> u64 {
        let mut dropped = 0;
        while self.len() > self.limits.items || self.bytes > self.limits.bytes {
            let tried = self.due.first_key_value().map(|(number, due)| (*number, *due));
            let entry = match (self.ready.front(), tried) {
                (Some(ready), Some((number, due))) if number < ready.number => self.remove(due, number),
                (Some(_), _) => self.ready.pop_front(),
                (None, Some((number, due))) => self.remove(due, number),
                (None, None) => None,
            };
            let Some(entry) = entry else { break };
            self.bytes -= entry.bytes;
            dropped += 1;
        }
        self.lost = self.lost.saturating_add(dropped);
        dropped
    }

    fn remove(&mut self, due: Duration, number: u64) -> Option<Entry<T>> {
        self.due.remove(&number);
        let entry = self.later.remove(&(due, number))?;
        if entry.is_refused {
            let (items, bytes) = self.refused;
            self.refused = (items.saturating_sub(1), bytes.saturating_sub(entry.bytes));
        }
        Some(entry)
    }

    /// Takes out at most so many that are due: first the record of what was dropped, then items that were
    /// tried before, then the oldest of the others.
    pub fn take(&mut self, now: Duration, most: usize) -> Vec<Taken<T>> {
        let mut taken = Vec::new();
        if most > 0 && self.lost > 0 && !self.is_telling && self.lost_due <= now {
            self.is_telling = true;
            taken.push(Taken::Lost(Lost { items: std::mem::take(&mut self.lost) }));
        }
        while taken.len() < most {
            let tried = self.later.first_key_value().map(|(key, _)| *key).filter(|(due, _)| *due <= now);
            let entry = match tried {
                Some((due, number)) => self.remove(due, number),
                None => self.ready.pop_front(),
            };
            let Some(entry) = entry else { break };
            self.bytes -= entry.bytes;
            taken.push(Taken::Item(entry));
        }
        taken
    }

    /// Notes what came of something that was taken out. Returns what is dropped by that.
    pub fn settle(&mut self, taken: Taken<T>, verdict: Verdict, now: Duration) -> Pushed {
        match (taken, verdict) {
            (Taken::Item(_), Verdict::Done) => Pushed::default(),
            (Taken::Item(entry), _) if now.saturating_sub(entry.since) >= self.limits.age => {
                self.lost = self.lost.saturating_add(1);
                Pushed { full: 0, expired: 1 }
            }
            (Taken::Item(mut entry), Verdict::Again(random) | Verdict::Refused(random)) => {
                entry.failures = entry.failures.saturating_add(1);
                let due = now + pause(entry.failures, random);
                self.bytes += entry.bytes;
                entry.is_refused = matches!(verdict, Verdict::Refused(_));
                if entry.is_refused {
                    self.refused = (self.refused.0 + 1, self.refused.1 + entry.bytes);
                }
                self.due.insert(entry.number, due);
                self.later.insert((due, entry.number), entry);
                Pushed { full: self.trim(), expired: 0 }
            }
            (Taken::Lost(_), Verdict::Done) => {
                (self.is_telling, self.lost_failures) = (false, 0);
                Pushed::default()
            }
            (Taken::Lost(Lost { items }), Verdict::Again(random) | Verdict::Refused(random)) => {
                self.is_telling = false;
                self.lost = self.lost.saturating_add(items);
                self.lost_failures = self.lost_failures.saturating_add(1);
                self.lost_due = now + pause(self.lost_failures, random);
                Pushed::default()
            }
        }
    }

    /// Returns when something is due next; `None`: nothing waits.
    pub fn next_due(&self, now: Duration) -> Option<Duration> {
        if !self.ready.is_empty() {
            return Some(now);
        }
        let lost = (self.lost > 0 && !self.is_telling).then_some(self.lost_due);
        let tried = self.later.first_key_value().map(|((due, _), _)| *due);
        match (lost, tried) {
            (Some(lost), Some(tried)) => Some(lost.min(tried)),
            (one, other) => one.or(other),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Duration = Duration::from_secs(10);

    fn queue(items: usize, bytes: usize) -> Queue<u32> {
        Queue::new(Limits { items, bytes, age: Duration::from_secs(3_600) })
    }

    fn items(taken: &[Taken<u32>]) -> Vec<u32> {
        let item = |taken: &Taken<u32>| match taken {
            Taken::Item(entry) => Some(entry.item),
            Taken::Lost(_) => None,
        };
        taken.iter().filter_map(item).collect()
    }

    #[test]
    fn a_full_queue_drops_the_oldest_and_tells_it_once() {
        let mut queue = queue(3, 1_000);
        for n in 0..5 {
            let pushed = queue.push(n, 10, NOW);
            assert_eq!(pushed.full, u64::from(n >= 3));
        }
        assert_eq!((queue.len(), queue.bytes()), (3, 30));
        let taken = queue.take(NOW, 10);
        assert_eq!(taken[0], Taken::Lost(Lost { items: 2 }));
        assert_eq!(items(&taken), [2, 3, 4]);
        for taken in taken {
            queue.settle(taken, Verdict::Done, NOW);
        }
        assert!(queue.is_empty() && queue.take(NOW, 10).is_empty() && queue.next_due(NOW).is_none());
    }

    #[test]
    fn bytes_count_too_and_what_is_too_large_is_dropped_itself() {
        let mut queue = queue(100, 100);
        for n in 0..4 {
            queue.push(n, 40, NOW);
        }
        assert_eq!(queue.push(9, 101, NOW).full, 1);
        assert_eq!((queue.len(), queue.bytes()), (2, 80));
        assert!(!queue.has_room());
        let taken = queue.take(NOW, 10);
        assert_eq!((&taken[0], items(&taken)), (&Taken::Lost(Lost { items: 3 }), vec![2, 3]));
        assert!(queue.has_room());
    }

    #[test]
    fn what_was_not_taken_comes_again_without_holding_up_others() {
        let mut queue = queue(10, 1_000);
        queue.push(0, 1, NOW);
        queue.push(1, 1, NOW);
        let taken = queue.take(NOW, 1);
        for taken in taken {
            queue.settle(taken, Verdict::Again(1.0), NOW);
        }
        assert_eq!(queue.next_due(NOW), Some(NOW), "the other one");
        let taken = queue.take(NOW, 10);
        assert_eq!(items(&taken), [1]);
        for taken in taken {
            queue.settle(taken, Verdict::Done, NOW);
        }
        let due = NOW + Duration::from_secs(1);
        assert_eq!(queue.next_due(NOW), Some(due));
        assert!(queue.take(NOW, 10).is_empty());
        let taken = queue.take(due, 10);
        assert_eq!(items(&taken), [0]);
        for taken in taken {
            queue.settle(taken, Verdict::Again(1.0), due);
        }
        assert_eq!(queue.next_due(due), Some(due + Duration::from_secs(2)), "twice as long");
        // It is the oldest still.
        for n in 2..12 {
            assert_eq!(queue.push(n, 1, due).full, u64::from(n == 11));
        }
        assert_eq!(items(&queue.take(due + Duration::from_secs(60), 100)), (2..12).collect::<Vec<_>>());
    }

    #[test]
    fn what_a_sink_refuses_makes_way_for_the_rest() {
        let mut queue = queue(10, 1_000);
        for n in 0..8 {
            queue.push(n, 10, NOW);
        }
        let taken = queue.take(NOW, 10);
        for (at, taken) in taken.into_iter().enumerate() {
            let verdict = if at < 6 { Verdict::Refused(1.0) } else { Verdict::Again(1.0) };
            queue.settle(taken, verdict, NOW);
        }
        assert_eq!((queue.len(), queue.bytes()), (8, 80));
        assert!(queue.has_room(), "others need not wait for what is refused");
        for n in 8..11 {
            assert!(queue.has_room());
            queue.push(n, 10, NOW);
        }
        assert!(!queue.has_room(), "but for what it may take");
        assert_eq!(queue.len(), 10, "the oldest was dropped");
        // Once it is tried again, it counts by what comes of that.
        let later = NOW + Duration::from_secs(1);
        let taken = queue.take(later, 100);
        assert_eq!((taken.len(), queue.refused, queue.bytes()), (11, (0, 0), 0));
        for taken in taken {
            queue.settle(taken, Verdict::Refused(1.0), later);
        }
        assert!(queue.has_room() && queue.refused == (10, 100));
        let hour = later + Duration::from_secs(3_600);
        let taken = queue.take(hour, 100);
        let expired: u64 =
            taken.into_iter().map(|it| queue.settle(it, Verdict::Refused(1.0), hour).expired).sum();
        assert_eq!((expired, queue.len(), queue.refused), (10, 0, (0, 0)));
    }

    #[test]
    fn what_is_tried_for_an_hour_is_dropped_and_told() {
        let mut queue = queue(10, 1_000);
        queue.push(0, 1, NOW);
        let (mut now, mut tries, mut expired) = (NOW, 0, 0);
        while let Some(due) = queue.next_due(now)
            && expired == 0
        {
            now = due;
            for taken in queue.take(now, 10) {
                tries += 1;
                expired += queue.settle(taken, Verdict::Again(1.0), now).expired;
            }
        }
        assert!(now.abs_diff(NOW + Duration::from_secs(3_600)) < Duration::from_secs(400), "{now:?}");
        assert!((18..25).contains(&tries), "{tries}");
        assert_eq!(queue.take(now, 10), [Taken::Lost(Lost { items: 1 })]);
    }

    #[test]
    fn a_record_that_was_not_taken_counts_further_drops() {
        let mut queue = queue(1, 10);
        queue.push(0, 1, NOW);
        queue.push(1, 1, NOW);
        let mut taken = queue.take(NOW, 10);
        queue.push(2, 1, NOW);
        queue.push(3, 1, NOW);
        let record = taken.remove(0);
        assert_eq!(record, Taken::Lost(Lost { items: 1 }));
        queue.settle(record, Verdict::Again(1.0), NOW);
        // There is no room for what was being sent.
        assert_eq!(queue.settle(taken.remove(0), Verdict::Again(1.0), NOW).full, 1);
        let due = NOW + Duration::from_secs(1);
        assert_eq!(queue.take(due, 1), [Taken::Lost(Lost { items: 3 })]);
    }
}
