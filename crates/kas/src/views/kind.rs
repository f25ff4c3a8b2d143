//! What is known of each agent: whether it has watches that nothing can cancel, and how much is read of it.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

use super::buffers::AgentBuffers;

/// Watches of an agentk that cannot cancel them.
const WATCHES: usize = 4;

/// Lists of one agent at once that fill feeds: slow ones leave most of the lists at once to others.
const LISTS: usize = 4;

/// What is known of the agentk of an agent.
#[derive(Debug)]
pub(crate) struct AgentKind {
    /// Whether it can cancel requests; `None`: that is not known yet.
    cancels: watch::Sender<Option<bool>>,
    watches: Arc<Semaphore>,
    pub(super) lists: Semaphore,
    /// Counts what its answers take.
    pub(crate) buffers: AgentBuffers,
}

/// Whether a watch may be opened.
#[derive(Debug)]
pub(crate) enum Permit {
    /// As many as there are: each can be cancelled.
    NotNeeded,
    /// This one, which must be kept until the watch has ended.
    Given(OwnedSemaphorePermit),
    /// There are as many as there may be.
    None,
}

#[cfg(test)]
impl Default for AgentKind {
    fn default() -> Self {
        Self::new(AgentBuffers::default())
    }
}

impl AgentKind {
    pub(super) fn new(buffers: AgentBuffers) -> Self {
        let watches = Arc::new(Semaphore::new(WATCHES));
        Self { cancels: watch::Sender::new(None), watches, lists: Semaphore::new(LISTS), buffers }
    }

    /// Returns whether a watch may be opened. Until it is known whether the agentk can cancel requests, it
    /// waits for a permit.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub(crate) async fn may_watch(&self) -> Permit {
        let mut known = self.cancels.subscribe();
        loop {
            let cancels = *known.borrow_and_update();
            let permit = Arc::clone(&self.watches).try_acquire_owned();
            match (cancels, permit) {
                (Some(true), _) => return Permit::NotNeeded,
                (_, Ok(permit)) => return Permit::Given(permit),
                (Some(false), Err(_)) => return Permit::None,
                (None, Err(_)) => {}
            }
            tokio::select! {
                // The sender lives as long as this.
                _ = known.changed() => {}
                permit = Arc::clone(&self.watches).acquire_owned() => {
                    // The semaphore is never closed.
                    return permit.map_or(Permit::None, Permit::Given);
                }
            }
        }
    }

    /// Notes whether the agentk can cancel requests.
    pub(crate) fn cancels(&self, cancels: bool) {
        self.cancels.send_if_modified(|known| known.replace(cancels) != Some(cancels));
    }

    /// Returns how many more watches may be opened that nothing can cancel.
    #[cfg(test)]
    pub(super) fn left(&self) -> usize {
        self.watches.available_permits()
    }
}
