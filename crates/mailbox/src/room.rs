//! [`Room`]: the memory of hooks that are read and answered, shared out among networks.

use std::{
    cmp::Reverse,
    collections::{BTreeSet, HashMap},
    hash::Hash,
};

/// A source with more than this part of the room has no advantage from being known.
const CROWD: usize = 16;
/// Sources whose bytes differ by less than this part of the room count as equal.
const UNIT: usize = 256;

/// A room of some bytes for requests from sources `S`, each with something `T`. It holds no lock.
///
/// Until it is known who sent a request, anybody may take room. So a request never finds it full while
/// another source has more of it: the oldest request of the source with the most makes way. Sources that
/// were known before and are small are asked last. Requests that [stay](Self::stay) do not make way.
#[derive(Debug)]
pub struct Room<S, T> {
    most: usize,
    taken: usize,
    next: u64,
    requests: HashMap<u64, Request<S, T>>,
    sources: HashMap<S, Source>,
    /// The sources with a request that may make way; the last one is asked first.
    order: BTreeSet<(Rank, S)>,
}

#[derive(Debug)]
struct Request<S, T> {
    source: S,
    bytes: usize,
    item: T,
}

#[derive(Debug, Default)]
struct Source {
    bytes: usize,
    requests: usize,
    is_known: bool,
    /// Requests that may make way.
    open: BTreeSet<u64>,
}

/// Who makes way: the largest of these.
type Rank = (Lane, usize, Reverse<u64>);

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Lane {
    Known,
    Unknown,
    Crowded,
}

/// What came of taking room.
#[derive(Debug, PartialEq, Eq)]
pub struct Taken<T> {
    /// Whether the request has its room. Otherwise it has none any more.
    pub fits: bool,
    /// Those that made way. They have no room any more.
    pub made_way: Vec<T>,
}

impl<S: Copy + Ord + Hash, T> Room<S, T> {
    /// Returns an empty room of so many bytes.
    pub fn new(most: usize) -> Self {
        Self {
            most,
            taken: 0,
            next: 0,
            requests: HashMap::new(),
            sources: HashMap::new(),
            order: BTreeSet::new(),
        }
    }

    /// Returns the bytes that are taken.
    pub fn taken(&self) -> usize {
        self.taken
    }

    /// Takes room for a new request, and returns its number. `is_known`: somebody from there has proved who
    /// they are. Every request takes at least a byte.
    pub fn enter(&mut self, source: S, is_known: bool, bytes: usize, item: T) -> (u64, Taken<T>) {
        let number = self.next;
        self.next += 1;
        self.requests.insert(number, Request { source, bytes: 0, item });
        self.change(source, |it| {
            it.is_known = is_known;
            it.requests += 1;
            it.open.insert(number);
        });
        (number, self.hold(number, bytes.max(1)))
    }

    /// A request takes at least so many bytes from now on.
    pub fn hold(&mut self, number: u64, bytes: usize) -> Taken<T> {
        let mut made_way = Vec::new();
        let Some(request) = self.requests.get_mut(&number) else { return Taken { fits: false, made_way } };
        let more = bytes.saturating_sub(request.bytes);
        request.bytes = request.bytes.saturating_add(more);
        self.taken = self.taken.saturating_add(more);
        let source = request.source;
        self.change(source, |it| it.bytes = it.bytes.saturating_add(more));
        while self.taken > self.most {
            let oldest = self.order.last().and_then(|(_, source)| self.sources.get(source)?.open.first());
            let oldest = oldest.copied().unwrap_or(number);
            let left = self.leave(oldest);
            if oldest == number {
                return Taken { fits: false, made_way };
            }
            made_way.extend(left);
        }
        Taken { fits: true, made_way }
    }

    /// A request does not make way any more. Returns whether it has its room.
    pub fn stay(&mut self, number: u64) -> bool {
        let Some(source) = self.requests.get(&number).map(|request| request.source) else { return false };
        self.change(source, |it| {
            it.open.remove(&number);
        });
        true
    }

    /// A request is over, or makes way. Returns what it had, unless it has left before.
    pub fn leave(&mut self, number: u64) -> Option<T> {
        let Request { source, bytes, item } = self.requests.remove(&number)?;
        self.taken = self.taken.saturating_sub(bytes);
        self.change(source, |it| {
            it.bytes = it.bytes.saturating_sub(bytes);
            it.requests = it.requests.saturating_sub(1);
            it.open.remove(&number);
        });
        Some(item)
    }

    /// Changes a source, with its place in the order.
    fn change(&mut self, source: S, change: impl FnOnce(&mut Source)) {
        let it = self.sources.entry(source).or_default();
        if let Some(rank) = it.rank(self.most) {
            self.order.remove(&(rank, source));
        }
        change(it);
        if let Some(rank) = it.rank(self.most) {
            self.order.insert((rank, source));
        }
        if it.requests == 0 {
            self.sources.remove(&source);
        }
    }
}

impl Source {
    /// `None`: nothing of it makes way.
    fn rank(&self, most: usize) -> Option<Rank> {
        let oldest = *self.open.first()?;
        let lane = match () {
            () if self.bytes > most / CROWD => Lane::Crowded,
            () if self.is_known => Lane::Known,
            () => Lane::Unknown,
        };
        Some((lane, self.bytes / (most / UNIT).max(1), Reverse(oldest)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIB: usize = 1 << 10;
    /// Four mebibytes are a crowd, 256 KiB a unit.
    const MOST: usize = 64 << 20;

    fn enter(room: &mut Room<u32, u64>, source: u32, is_known: bool, bytes: usize) -> (u64, bool, Vec<u64>) {
        let tag = room.next;
        let (number, taken) = room.enter(source, is_known, bytes, tag);
        (number, taken.fits, taken.made_way)
    }

    #[test]
    fn a_source_that_takes_everything_makes_way_for_others_and_for_its_own() {
        let mut room = Room::new(MOST);
        // Four hundred connections with a hundred requests each, all from one host.
        let mut shed = 0;
        for _ in 0..40_000 {
            let (_, fits, made_way) = enter(&mut room, 1, false, 4 * KIB);
            assert!(fits, "the newest one has room, and the oldest makes way");
            shed += made_way.len();
            assert!(room.taken() <= MOST);
        }
        assert_eq!(shed, 40_000 - MOST / (4 * KIB));
        for (source, is_known) in [(2, true), (3, false), (1, false)] {
            while room.taken() < MOST {
                enter(&mut room, 1, false, 4 * KIB);
            }
            let (number, fits, made_way) = enter(&mut room, source, is_known, 1_028 * KIB);
            assert!(fits && made_way.len() == 257, "{source}: {}", made_way.len());
            assert!(room.stay(number) && room.leave(number).is_some());
        }
    }

    #[test]
    fn small_known_sources_come_before_many_unknown_ones() {
        let mut room = Room::new(MOST);
        let (known, fits, _) = enter(&mut room, 1, true, 2 << 20);
        assert!(fits);
        // Each of these is smaller.
        for source in 2..20_000 {
            let (_, fits, made_way) = enter(&mut room, source, false, 4 * KIB);
            assert!(fits && !made_way.contains(&known));
        }
        assert!(room.hold(known, 3 << 20).fits);
        // Small ones that are known do not make way for one that is not.
        let mut room = Room::new(MOST);
        for source in 0..16_384 {
            enter(&mut room, source, true, 4 * KIB);
        }
        assert!(!enter(&mut room, 20_000, false, 4 * KIB).1);
        assert_eq!(room.taken(), MOST);
        // One that is known, and takes a crowd's part of it, does.
        let mut room = Room::new(MOST);
        for _ in 0..64 {
            enter(&mut room, 1, true, 1 << 20);
        }
        let (_, fits, made_way) = enter(&mut room, 2, false, 4 * KIB);
        assert_eq!((fits, made_way), (true, vec![0]), "the oldest");
    }

    #[test]
    fn what_stays_makes_no_way_and_everything_is_given_back() {
        let mut room = Room::new(100 * KIB);
        let (first, ..) = enter(&mut room, 1, false, 60 * KIB);
        assert!(room.stay(first));
        let (second, fits, made_way) = enter(&mut room, 2, false, 50 * KIB);
        assert_eq!((fits, made_way), (false, Vec::new()), "nobody else may make way");
        assert!(!room.stay(second) && room.leave(second).is_none());
        assert!(!room.hold(second, 1).fits, "it has left");
        let (third, fits, _) = enter(&mut room, 2, false, 10 * KIB);
        assert!(fits && room.hold(third, 5 * KIB).fits);
        assert_eq!(room.taken(), 70 * KIB, "it never takes less");
        assert_eq!(room.hold(third, 41 * KIB), Taken { fits: false, made_way: Vec::new() });
        assert_eq!((room.taken(), room.leave(first).is_some()), (60 * KIB, true));
        assert_eq!(room.taken(), 0);
        assert!(room.requests.is_empty() && room.sources.is_empty() && room.order.is_empty());
    }
}
