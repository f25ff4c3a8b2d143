//! A queue in which sources take turns, so that a source with many entries delays only itself.

use std::collections::{BTreeMap, BTreeSet};

/// A queue with lanes of type `L`, in which the sources `S` of a lane take turns.
///
/// Each entry belongs to a lane and to a source, and has a key of its own. Within a lane, every source that
/// has an entry is served once before any of them is served again. Within a source, the entry with the
/// smallest key is first. A source that comes to a lane is served after those that are already in it.
///
/// Which lane is served is up to the schedule: row after row is used, and each row says in which order the
/// lanes are tried. With `R` rows, a source whose lane is first in one of them is therefore served within
/// `R` × `N` entries that are taken out, if `N` sources were in its lane when it came. A lane that is first
/// in no row is served only when the lanes before it are empty.
///
/// It has no I/O, clock or lock. Each operation takes time logarithmic in the number of entries, and an empty
/// queue holds no memory.
#[derive(Debug)]
pub struct FairQueue<L: 'static, S, T> {
    schedule: &'static [&'static [L]],
    /// The row of the schedule that is used next.
    row: usize,
    /// Larger than every position in `turns`.
    next_position: u64,
    entries: BTreeMap<u64, Entry<L, S, T>>,
    /// The sources of each lane that have an entry.
    sources: BTreeMap<(L, S), Waiting>,
    /// The same sources, each lane in the order in which they are served.
    turns: BTreeMap<(L, u64), S>,
    /// The same sources by their number of entries.
    sizes: BTreeSet<(usize, L, S)>,
}

#[derive(Debug)]
struct Entry<L, S, T> {
    lane: L,
    source: S,
    item: T,
}

/// What one source has in one lane.
#[derive(Debug)]
struct Waiting {
    position: u64,
    /// Never empty.
    keys: BTreeSet<u64>,
}

impl<L: Copy + Ord, S: Copy + Ord, T> FairQueue<L, S, T> {
    /// Creates an empty queue. Each row of `schedule` names every lane once.
    pub fn new(schedule: &'static [&'static [L]]) -> Self {
        let (entries, sources, turns, sizes) = Default::default();
        Self { schedule, row: 0, next_position: 0, entries, sources, turns, sizes }
    }

    /// Returns the number of entries.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there is no entry.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Returns the source with the most entries in one lane, and how many it has there. Of equal ones it is
    /// one in the last lane.
    pub fn largest(&self) -> Option<(S, usize)> {
        self.sizes.last().map(|(size, _, source)| (*source, *size))
    }

    /// Returns the item of an entry.
    pub fn get_mut(&mut self, key: u64) -> Option<&mut T> {
        self.entries.get_mut(&key).map(|entry| &mut entry.item)
    }

    /// Adds an entry, in place of one with the same key. The caller bounds the number of entries.
    pub fn push(&mut self, lane: L, source: S, key: u64, item: T) {
        self.remove(key);
        self.entries.insert(key, Entry { lane, source, item });
        let waiting = self.sources.entry((lane, source)).or_insert_with(|| {
            let position = self.next_position;
            self.next_position += 1;
            self.turns.insert((lane, position), source);
            Waiting { position, keys: BTreeSet::new() }
        });
        self.sizes.remove(&(waiting.keys.len(), lane, source));
        waiting.keys.insert(key);
        self.sizes.insert((waiting.keys.len(), lane, source));
    }

    /// Adds an entry with a new key if there are fewer than `most`. Otherwise the last entry of the largest
    /// source makes room for it and is returned.
    ///
    /// # Errors
    /// The item, if there are `most` entries and no other source has more of them than its own source would
    /// have with it. A source of equal size in a later lane counts as larger.
    pub fn push_or_shed(
        &mut self,
        most: usize,
        lane: L,
        source: S,
        key: u64,
        item: T,
    ) -> Result<Option<T>, T> {
        let mut shed = None;
        if self.len() >= most {
            let own = self.sources.get(&(lane, source)).map_or(0, |waiting| waiting.keys.len());
            let last_of_largest =
                self.sizes.last().filter(|(size, other, _)| (*size, *other) > (own + 1, lane)).and_then(
                    |(_, other, source)| self.sources.get(&(*other, *source))?.keys.last().copied(),
                );
            let Some(last) = last_of_largest else { return Err(item) };
            shed = self.remove(last);
        }
        self.push(lane, source, key, item);
        Ok(shed)
    }

    /// Removes an entry, without any effect on when others are served.
    pub fn remove(&mut self, key: u64) -> Option<T> {
        let Entry { lane, source, item } = self.entries.remove(&key)?;
        if let Some(waiting) = self.sources.get_mut(&(lane, source)) {
            self.sizes.remove(&(waiting.keys.len(), lane, source));
            waiting.keys.remove(&key);
            if waiting.keys.is_empty() {
                self.turns.remove(&(lane, waiting.position));
                self.sources.remove(&(lane, source));
            } else {
                self.sizes.insert((waiting.keys.len(), lane, source));
            }
        }
        Some(item)
    }

    /// Takes out the next entry, with its key.
    pub fn pop(&mut self) -> Option<(u64, T)> {
        let first = |lane: L| self.turns.range((lane, 0)..=(lane, u64::MAX)).next();
        let row = self.schedule.get(self.row)?;
        let (turn, source) =
            row.iter().find_map(|lane| first(*lane)).map(|(turn, source)| (*turn, *source))?;
        self.row = (self.row + 1) % self.schedule.len();
        let waiting = self.sources.get_mut(&(turn.0, source))?;
        let key = waiting.keys.first().copied()?;
        // Its next entry is served after the others of the lane.
        self.turns.remove(&turn);
        waiting.position = self.next_position;
        self.turns.insert((turn.0, waiting.position), source);
        self.next_position += 1;
        Some((key, self.remove(key)?))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    type Lane = u8;
    type Source = u8;
    type Queue = FairQueue<Lane, Source, u64>;

    /// Each of three lanes is first in one row, and rows differ in the order of the rest.
    const SCHEDULE: &[&[Lane]] = &[&[0, 1, 2], &[0, 1, 2], &[1, 2, 0], &[2, 1, 0]];

    /// The same queue, without any index.
    #[derive(Debug, Default)]
    struct Model {
        popped: usize,
        /// In the order of their keys.
        entries: Vec<(u64, Lane, Source)>,
        /// The sources of all lanes in the order in which they are served.
        turns: Vec<(Lane, Source)>,
    }

    impl Model {
        fn size(&self, of: (Lane, Source)) -> usize {
            self.entries.iter().filter(|(_, lane, source)| (*lane, *source) == of).count()
        }

        /// Of each source in each lane: its number of entries, its lane, and the source.
        fn largest(&self) -> Option<(usize, Lane, Source)> {
            self.turns.iter().map(|of| (self.size(*of), of.0, of.1)).max()
        }

        fn push(&mut self, of: (Lane, Source), key: u64) {
            self.entries.push((key, of.0, of.1));
            self.entries.sort_unstable();
            if !self.turns.contains(&of) {
                self.turns.push(of);
            }
        }

        fn remove(&mut self, key: u64) -> Option<u64> {
            let at = self.entries.iter().position(|entry| entry.0 == key)?;
            let (_, lane, source) = self.entries.remove(at);
            if self.size((lane, source)) == 0 {
                self.turns.retain(|turn| *turn != (lane, source));
            }
            Some(key)
        }

        fn push_or_shed(&mut self, most: usize, of: (Lane, Source), key: u64) -> Result<Option<u64>, u64> {
            let mut shed = None;
            if self.entries.len() >= most {
                match self.largest() {
                    Some((size, lane, source)) if (size, lane) > (self.size(of) + 1, of.0) => {
                        let last = self.entries.iter().rfind(|entry| (entry.1, entry.2) == (lane, source));
                        shed = self.remove(last.unwrap().0);
                    }
                    _ => return Err(key),
                }
            }
            self.push(of, key);
            Ok(shed)
        }

        fn pop(&mut self) -> Option<u64> {
            let row = SCHEDULE[self.popped % SCHEDULE.len()];
            let at = row.iter().find_map(|lane| self.turns.iter().position(|turn| turn.0 == *lane))?;
            self.popped += 1;
            let of = self.turns.remove(at);
            self.turns.push(of);
            let key = self.entries.iter().find(|entry| (entry.1, entry.2) == of)?.0;
            self.remove(key)
        }
    }

    #[derive(Clone, Copy, Debug)]
    enum Step {
        Push(Lane, Source, u64),
        PushOrShed(Lane, Source, usize),
        Remove(prop::sample::Index),
        Pop,
    }

    fn step() -> impl Strategy<Value = Step> {
        let of = (0..3_u8, 0..6_u8);
        prop_oneof![
            (of.clone(), 0..100_u64).prop_map(|((lane, source), key)| Step::Push(lane, source, key)),
            (of, 0..20_usize).prop_map(|((lane, source), most)| Step::PushOrShed(lane, source, most)),
            any::<prop::sample::Index>().prop_map(Step::Remove),
            Just(Step::Pop),
            Just(Step::Pop),
        ]
    }

    fn assert_holds_nothing(queue: &Queue) {
        assert!(queue.is_empty() && queue.largest().is_none());
        assert!(queue.entries.is_empty() && queue.sources.is_empty());
        assert!(queue.turns.is_empty() && queue.sizes.is_empty());
    }

    proptest! {
        #[test]
        fn it_behaves_as_the_model_and_holds_nothing_when_empty(
            steps in prop::collection::vec(step(), 0..200),
            drain in any::<bool>(),
        ) {
            let (mut queue, mut model) = (Queue::new(SCHEDULE), Model::default());
            for (n, step) in steps.into_iter().enumerate() {
                match step {
                    Step::Push(lane, source, key) => {
                        // Keys do not always grow: a connection keeps its own.
                        model.remove(key);
                        model.push((lane, source), key);
                        queue.push(lane, source, key, key);
                    }
                    Step::PushOrShed(lane, source, most) => {
                        let key = 1_000 + n as u64;
                        let before = queue.len();
                        let pushed = queue.push_or_shed(most, lane, source, key, key);
                        prop_assert_eq!(pushed, model.push_or_shed(most, (lane, source), key));
                        prop_assert!(queue.len() <= before.max(most));
                    }
                    Step::Remove(at) => {
                        let keys: Vec<_> = model.entries.iter().map(|entry| entry.0).chain([u64::MAX]).collect();
                        let key = *at.get(&keys);
                        prop_assert_eq!(queue.get_mut(key).copied(), (key != u64::MAX).then_some(key));
                        prop_assert_eq!(queue.remove(key), model.remove(key));
                    }
                    Step::Pop => {
                        let popped = queue.pop();
                        prop_assert!(popped.is_none_or(|(key, item)| key == item));
                        prop_assert_eq!(popped.map(|popped| popped.0), model.pop());
                    }
                }
                prop_assert_eq!(queue.len(), model.entries.len());
                prop_assert_eq!(queue.largest(), model.largest().map(|(size, _, source)| (source, size)));
                prop_assert_eq!(queue.turns.len(), queue.sources.len());
                prop_assert_eq!(queue.sizes.len(), queue.sources.len());
            }
            while let Some((key, ..)) = model.entries.first().copied() {
                let removed = if drain { queue.pop().map(|popped| popped.0) } else { queue.remove(key) };
                prop_assert_eq!(removed, if drain { model.pop() } else { model.remove(key) });
            }
            assert_holds_nothing(&queue);
        }

        #[test]
        fn no_source_starves_whatever_others_send_meanwhile(
            before in prop::collection::vec((0..3_u8, 0..6_u8), 1..60),
            meanwhile in prop::collection::vec(prop::collection::vec((0..3_u8, 0..50_u8), 0..8), 24),
        ) {
            let mut queue = Queue::new(SCHEDULE);
            let mut keys = 0..;
            let mut push = |queue: &mut Queue, (lane, source)| {
                let key = keys.next().unwrap();
                queue.push(lane, source, key, key);
            };
            before.iter().for_each(|of| push(&mut queue, *of));
            let mut waiting: BTreeSet<_> = before.into_iter().collect();
            let in_lane = |lane| waiting.iter().filter(|of| of.0 == lane).count();
            let most = SCHEDULE.len() * (0..3).map(in_lane).max().unwrap();
            for more in meanwhile.into_iter().take(most) {
                more.into_iter().for_each(|of| push(&mut queue, of));
                let of: BTreeMap<_, _> =
                    queue.entries.iter().map(|(key, entry)| (*key, (entry.lane, entry.source))).collect();
                if let Some((key, _)) = queue.pop() {
                    waiting.remove(&of[&key]);
                }
            }
            prop_assert!(waiting.is_empty(), "{:?}", waiting);
        }

        #[test]
        fn one_large_source_sheds_its_own_and_delays_another_by_one_turn(large in 3..200_usize) {
            let mut queue = FairQueue::new(&[&[()]]);
            for key in 0..large as u64 {
                prop_assert_eq!(queue.push_or_shed(large, (), 1, key, key), Ok(None));
            }
            let last = large as u64 - 1;
            prop_assert_eq!(queue.push_or_shed(large, (), 1, 1_000, 1_000), Err(1_000));
            // Another source gets the place of the last entry of the large one.
            let shed = queue.push_or_shed(large, (), 2, 1_001, 1_001);
            prop_assert_eq!(shed, Ok(Some(last)));
            prop_assert_eq!(queue.largest(), Some((1, large - 1)));
            prop_assert_eq!([queue.pop(), queue.pop()], [Some((0, 0)), Some((1_001, 1_001))]);
        }
    }
}
