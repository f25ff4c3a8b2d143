//! The head of a repository over time.

use std::{sync::Arc, time::Duration};

use gitops::{Head, Stop, Unresolved};
use parking_lot::Mutex;
use repository::{Commit, Error, Repository, Revision};
use tokio::{
    sync::watch,
    time::{Instant, timeout},
};

/// The wait after a failure; it doubles with each further one.
const FIRST_BACKOFF: Duration = Duration::from_secs(1);
/// The longest wait after a failure.
const LONGEST_BACKOFF: Duration = Duration::from_secs(60);

/// Returns a time between this one and half more, so that replicas and projects do not ask at the same
/// moment.
pub(crate) fn jittered(time: Duration) -> Duration {
    time + time.mul_f64(rand::random::<f64>() / 2.0)
}

/// Follows the head of a repository.
pub(crate) struct Follow {
    repository: Arc<dyn Repository>,
    revision: Revision,
    poll: Duration,
    changes: watch::Receiver<u64>,
    /// What was returned last; `None`: nothing, so the next answer is a change.
    last: Option<Result<Option<Commit>, Error>>,
    /// When the head may be asked for again.
    not_before: Option<Instant>,
    backoff: Duration,
}

impl Follow {
    pub(crate) fn new(repository: Arc<dyn Repository>, revision: Revision, poll: Duration) -> Self {
        let changes = repository.changes();
        Self { repository, revision, poll, changes, last: None, not_before: None, backoff: FIRST_BACKOFF }
    }

    /// Makes the next answer a change.
    pub(crate) fn forget(&mut self) {
        self.last = None;
        self.changes.mark_changed();
    }

    /// Returns the head when it differs from what was returned last, or an error of another kind. The first
    /// call returns at once.
    ///
    /// # Cancel safety
    /// Cancel safe: a change that is not returned is returned by the next call.
    pub(crate) async fn changed(&mut self) -> Result<Option<Commit>, Error> {
        loop {
            if let Some(at) = self.not_before {
                let waited = tokio::time::sleep_until(at);
                // A repository that fails is not asked because it tells of changes.
                if self.backoff > FIRST_BACKOFF {
                    waited.await;
                } else {
                    tokio::select! {
                        () = waited => {}
                        // An error means that nobody tells of changes any more.
                        Ok(()) = self.changes.changed() => {}
                    }
                }
            }
            self.changes.borrow_and_update();
            let head = self.repository.resolve(&self.revision).await;
            let pause = match &head {
                Ok(_) => {
                    self.backoff = FIRST_BACKOFF;
                    jittered(self.poll)
                }
                Err(_) => {
                    let pause = self.backoff;
                    self.backoff = (2 * self.backoff).min(LONGEST_BACKOFF);
                    jittered(pause)
                }
            };
            self.not_before = Some(Instant::now() + pause);
            let is_same = match (&self.last, &head) {
                (Some(Ok(last)), Ok(head)) => last == head,
                (Some(Err(_)), Err(_)) => true,
                _ => false,
            };
            if !is_same {
                self.last = Some(head.clone());
                return head;
            }
        }
    }
}

/// How long the repository may take to say what its head is.
const RESOLVE: Duration = Duration::from_secs(15);

/// The head as a sync sees it.
pub(crate) struct ProjectHead {
    repository: Arc<dyn Repository>,
    revision: Revision,
    /// A commit that cannot be applied, and the one that is kept instead.
    instead: Option<(Commit, Commit)>,
    stop: Mutex<Option<Stop>>,
}

impl ProjectHead {
    pub(crate) fn new(
        repository: Arc<dyn Repository>,
        revision: Revision,
        instead: Option<(Commit, Commit)>,
    ) -> Self {
        Self { repository, revision, instead, stop: Mutex::new(None) }
    }

    /// Ends the sync before its next call.
    pub(crate) fn end(&self, stop: Stop) {
        self.stop.lock().get_or_insert(stop);
    }
}

#[async_trait::async_trait]
impl Head for ProjectHead {
    async fn resolve(&self) -> Result<Option<Arc<str>>, Unresolved> {
        let head = match timeout(RESOLVE, self.repository.resolve(&self.revision)).await {
            Ok(Ok(head)) => head,
            Ok(Err(error)) => return Err(Unresolved(format!("repository cannot be read: {error}"))),
            Err(_) => return Err(Unresolved(format!("repository cannot be read within {RESOLVE:?}"))),
        };
        let head = match (head, &self.instead) {
            (Some(head), Some((flawed, kept))) if head == *flawed => Some(*kept),
            (head, _) => head,
        };
        Ok(head.map(|head| head.to_string().into()))
    }

    fn stop(&self) -> Option<Stop> {
        *self.stop.lock()
    }
}
