//! A compact set of agent ids with its digest.
//!
//! It is one open-addressing array of ids with linear probing. Zero marks an empty slot, which is possible
//! because ids are positive. It is filled to at most 4/5 and grows by a quarter, so an id takes 10–12.5 bytes
//! at any size. A `HashSet<i64>` doubles instead and takes 9–18 bytes. A sorted `Vec` takes 8 bytes, but
//! every change moves half of it on average, and a lookup misses the cache a dozen times.
//!
//! The hash has no secret key: ids come from GitLab's sequence through peers that have the private secret,
//! and such a peer has simpler ways to do harm.

use ids::AgentId;

use crate::codec::mix;

/// A set of agent ids and its digest.
#[derive(Clone, Default)]
pub struct IdSet {
    slots: Vec<i64>,
    len: usize,
    digest: u64,
}

impl IdSet {
    /// Returns how many ids are in the set.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether the set has no id.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the digest, equal to [`crate::codec::digest`] of the same ids.
    pub const fn digest(&self) -> u64 {
        self.digest
    }

    /// Returns the bytes that the set takes on the heap.
    pub const fn heap_bytes(&self) -> usize {
        self.slots.capacity() * size_of::<i64>()
    }

    /// Whether `agent` is in the set.
    pub fn contains(&self, agent: AgentId) -> bool {
        !self.slots.is_empty() && self.slots[self.find(agent.get())] != 0
    }

    /// Adds `agent`; returns false if it was already in the set.
    pub fn insert(&mut self, agent: AgentId) -> bool {
        if (self.len + 1) * 5 > self.slots.len() * 4 {
            self.resize((self.slots.len() + self.slots.len() / 4).max(8));
        }
        let slot = self.find(agent.get());
        if self.slots[slot] != 0 {
            return false;
        }
        self.slots[slot] = agent.get();
        self.len += 1;
        self.digest ^= mix(agent.get().unsigned_abs());
        true
    }

    /// Removes `agent`; returns false if it was not in the set.
    pub fn remove(&mut self, agent: AgentId) -> bool {
        if !self.contains(agent) {
            return false;
        }
        let mut hole = self.find(agent.get());
        self.slots[hole] = 0;
        self.len -= 1;
        self.digest ^= mix(agent.get().unsigned_abs());
        // Later ids of the same run move back into the hole, so that no lookup stops there too early.
        let mut next = self.after(hole);
        while self.slots[next] != 0 {
            let preferred = self.preferred(self.slots[next]);
            let reaches = if hole <= next {
                preferred <= hole || preferred > next
            } else {
                preferred <= hole && preferred > next
            };
            if reaches {
                self.slots[hole] = self.slots[next];
                self.slots[next] = 0;
                hole = next;
            }
            next = self.after(next);
        }
        if self.slots.len() > 64 && self.len * 5 < self.slots.len() * 2 {
            self.resize(self.len * 3 / 2);
        }
        true
    }

    /// Returns all ids in no particular order.
    pub fn iter(&self) -> impl Iterator<Item = AgentId> {
        self.slots.iter().filter_map(|&id| AgentId::new(id).ok())
    }

    /// Returns all ids in ascending order.
    pub fn sorted(&self) -> Vec<AgentId> {
        let mut ids = Vec::with_capacity(self.len);
        ids.extend(self.iter());
        ids.sort_unstable();
        ids
    }

    /// Returns the slot of `id`, or the empty slot where it belongs. There is always an empty slot.
    fn find(&self, id: i64) -> usize {
        let mut slot = self.preferred(id);
        while self.slots[slot] != 0 && self.slots[slot] != id {
            slot = self.after(slot);
        }
        slot
    }

    /// Returns the preferred slot of an id. The hash is scaled to the length by a multiplication, so any
    /// length works.
    fn preferred(&self, id: i64) -> usize {
        ((u128::from(mix(id.unsigned_abs())) * self.slots.len() as u128) >> 64) as usize
    }

    const fn after(&self, slot: usize) -> usize {
        if slot + 1 == self.slots.len() { 0 } else { slot + 1 }
    }

    fn resize(&mut self, slots: usize) {
        let old = std::mem::replace(&mut self.slots, vec![0; slots]);
        for id in old.into_iter().filter(|&id| id != 0) {
            let slot = self.find(id);
            self.slots[slot] = id;
        }
    }
}

impl FromIterator<AgentId> for IdSet {
    fn from_iter<I: IntoIterator<Item = AgentId>>(ids: I) -> Self {
        let mut set = Self::default();
        for id in ids {
            set.insert(id);
        }
        set
    }
}

impl PartialEq for IdSet {
    fn eq(&self, other: &Self) -> bool {
        self.len == other.len && self.digest == other.digest && self.iter().all(|id| other.contains(id))
    }
}

/// Sorted, so that equal sets have the same output.
impl std::fmt::Debug for IdSet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_set().entries(self.sorted()).finish()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn id(id: i64) -> AgentId {
        AgentId::new(id).unwrap()
    }

    #[test]
    fn an_id_takes_about_twelve_bytes_at_any_size() {
        let mut set = IdSet::default();
        for i in 1..200_000 {
            set.insert(id(i * 7));
            if i > 1_000 {
                let each = set.heap_bytes() as f64 / set.len() as f64;
                assert!((9.9..12.7).contains(&each), "{each} bytes each of {i}");
            }
        }
        for i in 1..199_990 {
            assert!(set.remove(id(i * 7)));
        }
        assert!(set.heap_bytes() < 1_000, "{}", set.heap_bytes());
        assert_eq!(set.len(), 10);
    }

    proptest! {
        #[test]
        fn behaves_like_a_set(ops in prop::collection::vec((1i64..60, any::<bool>()), 0..600)) {
            let (mut set, mut model) = (IdSet::default(), BTreeSet::new());
            for (i, add) in ops {
                if add {
                    prop_assert_eq!(set.insert(id(i)), model.insert(id(i)));
                } else {
                    prop_assert_eq!(set.remove(id(i)), model.remove(&id(i)));
                }
                prop_assert_eq!(set.len(), model.len());
            }
            for i in 1..60 {
                prop_assert_eq!(set.contains(id(i)), model.contains(&id(i)));
            }
            prop_assert_eq!(set.digest(), crate::codec::digest(model.iter().copied()));
            prop_assert_eq!(set.sorted(), model.into_iter().collect::<Vec<_>>());
        }
    }
}
