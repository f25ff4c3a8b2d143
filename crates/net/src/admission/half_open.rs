//! Bounds the number of unauthenticated connections, so that none of them blocks others for long.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::{sync::Notify, time::Instant};

/// When all places are taken, a connection that has had one for this long loses it to the next. If this were
/// shorter, then in a storm of reconnects connections would lose their places while their handshakes wait for
/// the processor, for at worst a millisecond each. If it were longer, then a flood of silent sockets would
/// delay others more: it lets in as many as there are places in this time.
pub(crate) const PATIENCE: Duration = Duration::from_secs(1);

/// The places of a listener.
///
/// A connection that arrives when all are taken waits, before HTTP/2, until one is free. That is soon: silent
/// sockets hold a place for no longer than [`PATIENCE`] then, so they keep no client out.
#[derive(Debug)]
pub(crate) struct HalfOpen {
    limit: usize,
    /// How long a connection keeps its place at least.
    patience: Duration,
    places: Mutex<Places>,
    freed: Notify,
}

#[derive(Debug, Default)]
struct Places {
    next: u64,
    /// By age: a later one has a larger number.
    taken: BTreeMap<u64, (Instant, Arc<Notify>)>,
}

/// A place; it is free again when this is dropped.
#[derive(Debug)]
pub(crate) struct Place {
    number: u64,
    lost: Arc<Notify>,
    of: Arc<HalfOpen>,
}

impl HalfOpen {
    /// With `limit` places, each of which is kept for `patience` at least.
    pub(crate) fn new(limit: usize, patience: Duration) -> Arc<Self> {
        Arc::new(Self { limit, patience, places: Mutex::default(), freed: Notify::new() })
    }

    /// Takes a place. Calls `evicted` for a connection that loses its place to this one.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub(crate) async fn enter(self: &Arc<Self>, evicted: impl Fn()) -> Place {
        loop {
            let wait = {
                let mut places = self.places.lock();
                let oldest = places.taken.first_key_value().map(|(number, (since, _))| (*number, *since));
                match oldest {
                    Some((_, since))
                        if places.taken.len() >= self.limit && since.elapsed() < self.patience =>
                    {
                        since + self.patience
                    }
                    oldest => {
                        if let Some((number, _)) = oldest
                            && places.taken.len() >= self.limit
                            && let Some((_, lost)) = places.taken.remove(&number)
                        {
                            lost.notify_one();
                            evicted();
                        }
                        let (number, lost) = (places.next, Arc::<Notify>::default());
                        places.next += 1;
                        places.taken.insert(number, (Instant::now(), Arc::clone(&lost)));
                        return Place { number, lost, of: Arc::clone(self) };
                    }
                }
            };
            // Then a place is free, or the oldest connection has had its place for long enough.
            let _ = tokio::time::timeout_at(wait, self.freed.notified()).await;
        }
    }
}

impl Place {
    /// Resolves when the place has gone to another connection.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub(crate) async fn lost(&self) {
        self.lost.notified().await;
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.of.places.lock().taken.remove(&self.number);
        self.of.freed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_newcomer_waits_for_a_free_place_or_takes_the_oldest() {
        let half_open = HalfOpen::new(2, PATIENCE);
        let evicted = AtomicUsize::new(0);
        let enter = || {
            half_open.enter(|| {
                evicted.fetch_add(1, Ordering::Relaxed);
            })
        };
        let begun = Instant::now();
        let (first, second) = (enter().await, enter().await);
        assert_eq!(begun.elapsed(), Duration::ZERO);
        // A connection ends: none is evicted.
        let (third, ()) = tokio::join!(enter(), async {
            tokio::time::sleep(Duration::from_millis(500)).await;
            drop(second);
        });
        assert_eq!((begun.elapsed(), evicted.load(Ordering::Relaxed)), (Duration::from_millis(500), 0));
        // None ends: the oldest loses its place once it has had it for long enough.
        let fourth = enter().await;
        assert_eq!((begun.elapsed(), evicted.load(Ordering::Relaxed)), (PATIENCE, 1));
        first.lost().await;
        // Dropping a place that was lost frees no other.
        drop(first);
        let fifth = enter().await;
        assert_eq!(begun.elapsed(), PATIENCE + Duration::from_millis(500));
        third.lost().await;
        drop((third, fourth, fifth));
        assert_eq!(half_open.places.lock().taken.len(), 0);
    }
}
