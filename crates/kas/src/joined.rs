//! [`Joined`]: what several want at the same time is done once.

use std::{
    collections::HashMap,
    hash::Hash,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use futures_util::{
    FutureExt as _,
    future::{BoxFuture, Shared, WeakShared},
};
use parking_lot::Mutex;

type Work<V> = Shared<BoxFuture<'static, V>>;
/// Work, and its number.
type Begun<V> = (u64, WeakShared<BoxFuture<'static, V>>);

/// Work that is being done, by its key. It goes on as long as somebody waits for it, and is forgotten then.
pub(crate) struct Joined<K, V: Clone> {
    open: Arc<Open<K, V>>,
    number: AtomicU64,
}

struct Open<K, V: Clone>(Mutex<HashMap<K, Begun<V>>>);

/// Removes work that is done, or that nobody waits for any more.
struct End<K: Hash + Eq, V: Clone> {
    open: Arc<Open<K, V>>,
    key: K,
    number: u64,
}

impl<K: Hash + Eq, V: Clone> Drop for End<K, V> {
    fn drop(&mut self) {
        let mut open = self.open.0.lock();
        // Others may have begun it again.
        if open.get(&self.key).is_some_and(|(number, _)| *number == self.number) {
            open.remove(&self.key);
        }
    }
}

/// A result, and whether others had begun the work.
pub(crate) struct Outcome<V> {
    pub(crate) value: V,
    pub(crate) is_joined: bool,
}

impl<K, V> Joined<K, V>
where
    K: Clone + Eq + Hash + Send + 'static,
    V: Clone + Send + Sync + 'static,
{
    pub(crate) fn new() -> Self {
        Self { open: Arc::new(Open(Mutex::default())), number: AtomicU64::new(0) }
    }

    /// Returns the result of the work with this key: that which others have begun, or that of `work`.
    ///
    /// # Cancel safety
    /// Cancel safe: the work goes on for others that wait for it.
    pub(crate) async fn get(&self, key: K, work: impl Future<Output = V> + Send + 'static) -> Outcome<V> {
        let (work, is_joined) = self.join(key, work);
        Outcome { value: work.await, is_joined }
    }

    fn join(&self, key: K, work: impl Future<Output = V> + Send + 'static) -> (Work<V>, bool) {
        let mut open = self.open.0.lock();
        if let Some(work) = open.get(&key).and_then(|(_, work)| work.upgrade()) {
            return (work, true);
        }
        let number = self.number.fetch_add(1, Ordering::Relaxed);
        let end = End { open: Arc::clone(&self.open), key: key.clone(), number };
        let work = async move {
            let value = work.await;
            drop(end);
            value
        };
        let work = work.boxed().shared();
        if let Some(weak) = work.downgrade() {
            open.insert(key, (number, weak));
        }
        (work, false)
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::atomic::AtomicUsize, time::Duration};

    use tokio::time::{sleep, timeout};

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    async fn get(joined: &Joined<&'static str, usize>, key: &'static str, begun: &Arc<AtomicUsize>) -> usize {
        let begun = Arc::clone(begun);
        let work = async move {
            let number = begun.fetch_add(1, Ordering::SeqCst) + 1;
            sleep(SECOND).await;
            number
        };
        joined.get(key, work).await.value
    }

    #[tokio::test(start_paused = true)]
    async fn work_is_done_once_for_all_who_wait_and_again_for_later_ones() {
        let (joined, begun) = (Joined::new(), Arc::default());
        let all = (0..50).map(|_| get(&joined, "a", &begun));
        let (all, other) = tokio::join!(futures_util::future::join_all(all), get(&joined, "b", &begun));
        assert_eq!((all, other), (vec![1; 50], 2));
        assert!(joined.open.0.lock().is_empty());
        assert_eq!(get(&joined, "a", &begun).await, 3);
    }

    #[tokio::test(start_paused = true)]
    async fn who_began_it_may_leave_and_work_that_nobody_waits_for_is_not_gone_on_with() {
        let (joined, begun) = (Joined::new(), Arc::default());
        let first = timeout(SECOND / 2, get(&joined, "a", &begun));
        let (first, second) = tokio::join!(first, get(&joined, "a", &begun));
        assert!(first.is_err());
        assert_eq!(second, 1);
        assert!(timeout(SECOND / 2, get(&joined, "a", &begun)).await.is_err());
        assert!(joined.open.0.lock().is_empty());
        assert_eq!(get(&joined, "a", &begun).await, 3);
    }
}
