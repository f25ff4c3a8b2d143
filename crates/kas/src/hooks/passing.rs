//! [`Passing`]: how much this replica passes on to others at once.

use std::{collections::HashMap, sync::Arc};

use ids::ReplicaId;
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// What is passed on to one replica at once, in KiB. It reads all of it before it can verify anything.
const AT_ONCE_KIB: u32 = 16 << 10;

/// The hooks that are passed on to each replica at the moment. Replicas to which none is are not in it.
#[derive(Default)]
pub(super) struct Passing(Mutex<HashMap<ReplicaId, Arc<Semaphore>>>);

impl Passing {
    /// Waits until a request of so many bytes may be sent to a replica. A larger one than all that may be
    /// sent at once is sent alone.
    ///
    /// # Cancel safety
    /// Cancel safe; the place in the queue is lost.
    pub(super) async fn begin(&self, to: &ReplicaId, bytes: usize) -> Option<OwnedSemaphorePermit> {
        let wanted = u32::try_from(bytes.div_ceil(1 << 10)).unwrap_or(AT_ONCE_KIB).min(AT_ONCE_KIB);
        let room = {
            let mut all = self.0.lock();
            all.retain(|_, room| Arc::strong_count(room) > 1);
            let room =
                all.entry(to.clone()).or_insert_with(|| Arc::new(Semaphore::new(AT_ONCE_KIB as usize)));
            Arc::clone(room)
        };
        // The semaphore is never closed.
        room.acquire_many_owned(wanted).await.ok()
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn hooks_for_one_replica_wait_and_those_for_others_do_not() {
        let passing = Passing::default();
        let (a, b) = (ReplicaId::new("a"), ReplicaId::new("b"));
        let mib = |to: &ReplicaId, mib: usize| passing.begin(to, mib << 20).now_or_never().flatten();
        let mut sent: Vec<_> = (0..16).map(|_| mib(&a, 1).unwrap()).collect();
        assert!(mib(&a, 1).is_none() && passing.begin(&a, 1).now_or_never().is_none());
        let large = mib(&b, 25).unwrap();
        assert!(mib(&b, 1).is_none(), "it is sent alone");
        drop(large);
        sent.truncate(12);
        let waiting = passing.begin(&a, 5 << 20);
        tokio::pin!(waiting);
        assert!(waiting.as_mut().now_or_never().is_none());
        sent.truncate(11);
        sent.extend(waiting.await);
        assert_eq!(passing.0.lock().len(), 1, "nothing is sent to the other one");
        sent.clear();
        drop(mib(&b, 1));
        assert!(passing.0.lock().len() <= 1);
    }
}
