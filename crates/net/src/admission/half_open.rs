//! Connections that have not shown yet who they are: few at once, and none of them in the way of others for
//! long.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use tokio::{sync::Notify, time::Instant};

/// When all places are taken, whoever has had one for this long gives it to the next. Shorter: in a storm of
/// reconnects those lose theirs whose handshakes wait for the processor, a millisecond each at worst. Longer:
/// a flood of silent sockets keeps the others waiting, at one place's worth of them in this time.
const PATIENCE: Duration = Duration::from_secs(1);

/// The places of a listener.
///
/// Whoever comes when all are taken waits, unaccepted by HTTP/2, until one is free. That is soon: silent
/// sockets can hold a place for [`PATIENCE`] and no longer, so that they cannot keep others out.
#[derive(Debug)]
pub(crate) struct HalfOpen {
    limit: usize,
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
    pub(crate) fn new(limit: usize) -> Arc<Self> {
        Arc::new(Self { limit, places: Mutex::default(), freed: Notify::new() })
    }

    /// Takes a place. `evicted` is called for each that has lost its own to this one.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub(crate) async fn enter(self: &Arc<Self>, evicted: impl Fn()) -> Place {
        loop {
            let wait = {
                let mut places = self.places.lock().unwrap_or_else(PoisonError::into_inner);
                let oldest = places.taken.first_key_value().map(|(number, (since, _))| (*number, *since));
                match oldest {
                    Some((_, since)) if places.taken.len() >= self.limit && since.elapsed() < PATIENCE => {
                        since + PATIENCE
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
            // Either a place is free, or its holder has had it for long enough.
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
        self.of.places.lock().unwrap_or_else(PoisonError::into_inner).taken.remove(&self.number);
        self.of.freed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_newcomer_waits_for_a_free_place_or_takes_the_oldest() {
        let half_open = HalfOpen::new(2);
        let evicted = AtomicUsize::new(0);
        let enter = || {
            half_open.enter(|| {
                evicted.fetch_add(1, Ordering::Relaxed);
            })
        };
        let begun = Instant::now();
        let (first, second) = (enter().await, enter().await);
        assert_eq!(begun.elapsed(), Duration::ZERO);
        // Somebody leaves: nobody is evicted.
        let (third, ()) = tokio::join!(enter(), async {
            tokio::time::sleep(Duration::from_millis(500)).await;
            drop(second);
        });
        assert_eq!((begun.elapsed(), evicted.load(Ordering::Relaxed)), (Duration::from_millis(500), 0));
        // Nobody leaves: the oldest loses its place once it has had it for long enough.
        let fourth = enter().await;
        assert_eq!((begun.elapsed(), evicted.load(Ordering::Relaxed)), (PATIENCE, 1));
        first.lost().await;
        // To drop what is lost frees nobody else's place.
        drop(first);
        let fifth = enter().await;
        assert_eq!(begun.elapsed(), PATIENCE + Duration::from_millis(500));
        third.lost().await;
        drop((third, fourth, fifth));
        assert_eq!(half_open.places.lock().unwrap().taken.len(), 0);
    }
}
