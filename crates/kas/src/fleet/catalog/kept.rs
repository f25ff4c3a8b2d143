//! What is kept for a while.

use std::{hash::Hash, num::NonZeroUsize, sync::Arc, time::Duration};

use lru::LruCache;
use parking_lot::Mutex;
use tokio::time::Instant;

/// How long it counts.
const KEPT: Duration = Duration::from_secs(600);
/// The most entries.
const MOST: NonZeroUsize = NonZeroUsize::new(20_000).expect("it is not 0");

/// Tells how much memory a value takes.
pub(super) trait Weigh {
    /// Returns it in bytes, about.
    fn weigh(&self) -> usize;
}

/// Values that were read, for 10 min each. The least recently used ones go first.
pub(super) struct Kept<K, V> {
    most: usize,
    inner: Mutex<Inner<K, V>>,
}

struct Inner<K, V> {
    entries: LruCache<K, (Instant, Arc<V>)>,
    weight: usize,
}

impl<K: Hash + Eq + Weigh, V: Weigh> Kept<K, V> {
    /// Returns one that keeps at most `most` bytes.
    pub(super) fn new(most: usize) -> Self {
        Self { most, inner: Mutex::new(Inner { entries: LruCache::new(MOST), weight: 0 }) }
    }

    /// Returns a value that was read in the last 10 min.
    pub(super) fn get(&self, key: &K) -> Option<Arc<V>> {
        let mut inner = self.inner.lock();
        let (at, value) = inner.entries.get(key)?;
        if at.elapsed() < KEPT {
            return Some(Arc::clone(value));
        }
        if let Some((_, value)) = inner.entries.pop(key) {
            inner.weight -= key.weigh() + value.weigh();
        }
        None
    }

    /// Returns how many bytes all of them take, about.
    pub(super) fn bytes(&self) -> usize {
        self.inner.lock().weight
    }

    /// Keeps a value, unless it is larger than all may be together.
    pub(super) fn put(&self, key: K, value: Arc<V>) {
        let weight = key.weigh() + value.weigh();
        if weight > self.most {
            return;
        }
        let mut inner = self.inner.lock();
        if let Some((key, (_, before))) = inner.entries.push(key, (Instant::now(), value)) {
            inner.weight -= key.weigh() + before.weigh();
        }
        inner.weight += weight;
        while inner.weight > self.most
            && let Some((key, (_, oldest))) = inner.entries.pop_lru()
        {
            inner.weight -= key.weigh() + oldest.weigh();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Weigh for usize {
        fn weigh(&self) -> usize {
            *self
        }
    }

    impl Weigh for char {
        fn weigh(&self) -> usize {
            0
        }
    }

    #[tokio::test(start_paused = true)]
    async fn values_are_kept_for_ten_minutes_and_within_a_bound() {
        let kept = Kept::new(100);
        kept.put('a', Arc::new(40));
        tokio::time::advance(KEPT / 2).await;
        kept.put('b', Arc::new(40));
        assert_eq!(kept.get(&'a').as_deref(), Some(&40));
        kept.put('c', Arc::new(40));
        assert_eq!(kept.get(&'b'), None, "it was used least recently");
        kept.put('c', Arc::new(60));
        kept.put('d', Arc::new(101));
        assert_eq!((kept.get(&'c').as_deref(), kept.get(&'d')), (Some(&60), None));
        assert_eq!(kept.inner.lock().weight, 100);
        tokio::time::advance(KEPT / 2).await;
        assert_eq!((kept.get(&'a'), kept.inner.lock().weight), (None, 60));
    }
}
