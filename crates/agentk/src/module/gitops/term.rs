//! The time for which a pod may apply, and what all projects of that time share.

use std::{sync::Arc, time::Duration};

use gitops::{ClusterApi, Engine, Stop};
use parking_lot::Mutex;
use tokio::{sync::Semaphore, time::Instant};
use tokio_util::sync::CancellationToken;

use super::metrics::GitopsMetrics;
use crate::calls::Calls;

/// Decoded manifests that are in work at once, in KiB of their files. Decoded they take up to twelve times as
/// much memory.
const HELD: usize = 20 << 10;

/// For how long this pod holds its Lease.
#[derive(Debug)]
pub(super) struct Term {
    until: Mutex<Instant>,
    /// Cancelled when the pod gives the Lease up.
    pub(super) over: CancellationToken,
}

impl Term {
    pub(super) fn new(until: Instant) -> Self {
        Self { until: Mutex::new(until), over: CancellationToken::new() }
    }

    /// The Lease was renewed.
    pub(super) fn extend(&self, until: Instant) {
        *self.until.lock() = until;
    }

    /// When the Lease ends if it is not renewed.
    pub(super) fn until(&self) -> Instant {
        *self.until.lock()
    }

    /// Why no further request may be made.
    pub(super) fn stop(&self) -> Option<Stop> {
        if self.over.is_cancelled() {
            Some(Stop::Cancelled)
        } else if Instant::now() >= self.until() {
            Some(Stop::NotHome)
        } else {
            None
        }
    }
}

/// What all projects share.
pub(super) struct Shared {
    pub(super) calls: Arc<Calls>,
    pub(super) api: Arc<dyn ClusterApi>,
    pub(super) engine: Engine,
    pub(super) room: Room,
    /// The name of this process in fences.
    pub(super) identity: String,
    pub(super) metrics: GitopsMetrics,
}

/// The room for manifests.
#[derive(Debug)]
pub(super) struct Room {
    /// One set is read and decoded at a time.
    pub(super) loading: Arc<Semaphore>,
    /// In KiB.
    pub(super) held: Arc<Semaphore>,
}

impl Default for Room {
    fn default() -> Self {
        Self { loading: Arc::new(Semaphore::new(1)), held: Arc::new(Semaphore::new(HELD)) }
    }
}

impl Room {
    /// How many permits of `held` a set of this weight needs, in bytes.
    pub(super) fn permits(weight: usize) -> u32 {
        u32::try_from(weight.div_ceil(1024).clamp(1, HELD)).unwrap_or(u32::MAX)
    }
}

/// Waits until a time; for ever without one.
pub(super) async fn until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}

/// The pause after so many failures in a row, a tenth more or less.
pub(super) fn backoff(failures: usize) -> Duration {
    gitops::varied(gitops::BACKOFF[failures.min(gitops::BACKOFF.len() - 1)])
}
