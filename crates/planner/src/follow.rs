//! The head of a repository as a sync sees it.

use std::{sync::Arc, time::Duration};

use gitops::{Head, Stop, Unresolved};
use parking_lot::Mutex;
use repository::{Commit, Repository, Revision};
use tokio::time::timeout;

/// Returns a time between this one and half more, so that replicas and projects do not ask at the same
/// moment.
pub(crate) fn jittered(time: Duration) -> Duration {
    time + time.mul_f64(rand::random::<f64>() / 2.0)
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
