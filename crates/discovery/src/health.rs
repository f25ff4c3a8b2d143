//! What a discovery publishes: the seeds, whether lookups work, and the log lines about both.

use std::{collections::HashSet, error::Error, net::SocketAddr, time::Duration};

use process::error::chain;
use tokio::{sync::watch, time::Instant};

/// Maximum number of addresses in a log line. A large cluster would fill a screen at every rollout.
const LOGGED: usize = 16;

/// Whether lookups work.
#[derive(Debug, Clone, Default)]
pub struct Health {
    /// When the last answer arrived; `None` before the first. A running watch succeeds without updating this:
    /// read `failure` first.
    pub last_success: Option<Instant>,
    /// The current failure; `None` while lookups work.
    pub failure: Option<Failure>,
}

/// A series of failed lookups.
#[derive(Debug, Clone)]
pub struct Failure {
    /// When the first of these lookups failed; none has worked since.
    pub since: Instant,
    /// Why the last lookup failed.
    pub kind: FailureKind,
    /// The error of the last lookup and its causes, for a person.
    pub error: String,
}

/// Why a lookup fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FailureKind {
    /// No usable answer: nothing listens, or the server is too slow or has an internal error.
    Unavailable,
    /// The API server answers that this process is not allowed to ask.
    Denied,
    /// An answer arrived, but it contains no address or not the port.
    Empty,
}

/// Publishes seeds and health of a running discovery.
pub(crate) struct Publisher<'a> {
    /// The kind of discovery, a field of the log lines.
    pub(crate) source: &'static str,
    pub(crate) seeds: watch::Sender<HashSet<SocketAddr>>,
    pub(crate) health: &'a watch::Sender<Health>,
}

impl Publisher<'_> {
    /// Replaces the whole set. Wakes no subscriber if it is the same.
    pub(crate) fn publish(&self, found: HashSet<SocketAddr>) {
        let total = found.len();
        let (mut added, mut removed) = (Vec::new(), Vec::new());
        let changed = self.seeds.send_if_modified(|seeds| {
            if *seeds == found {
                return false;
            }
            added.extend(found.difference(seeds).copied());
            removed.extend(seeds.difference(&found).copied());
            *seeds = found;
            true
        });
        if changed {
            let (more_added, more_removed) = (shorten(&mut added), shorten(&mut removed));
            tracing::info!(
                source = self.source,
                ?added,
                ?removed,
                more_added,
                more_removed,
                total,
                "seeds changed"
            );
        }
    }

    /// Records an answer that does not prove yet that a failure is over.
    pub(crate) fn answered(&self) {
        self.health.send_if_modified(|health| health.last_success.replace(Instant::now()).is_none());
    }

    /// Records an answer, and that lookups work.
    pub(crate) fn succeeded(&self) {
        let now = Instant::now();
        let mut failed = None;
        self.health.send_if_modified(|health| {
            let first = health.last_success.replace(now).is_none();
            failed = health.failure.take();
            first || failed.is_some()
        });
        if let Some(failure) = failed {
            let failed_for = now - failure.since;
            tracing::info!(source = self.source, ?failed_for, "lookups work again");
        }
    }

    /// Records that no answer arrived. Logged only if the kind of failure is new: a lookup fails every few
    /// seconds, and repeated lines would hide everything else.
    pub(crate) fn failed(&self, kind: FailureKind, error: &dyn Error) {
        let now = Instant::now();
        let error = chain(error);
        let mut age: Option<Duration> = None;
        let fresh = self.health.send_if_modified(|health| {
            age = health.last_success.map(|success| now - success);
            match &mut health.failure {
                Some(failure) => {
                    failure.error.clone_from(&error);
                    std::mem::replace(&mut failure.kind, kind) != kind
                }
                none => {
                    *none = Some(Failure { since: now, kind, error: error.clone() });
                    true
                }
            }
        });
        let kept = self.seeds.borrow().len();
        if fresh {
            tracing::warn!(
                source = self.source,
                error,
                ?kind,
                kept,
                last_success = ?age,
                "lookup failed, the last seeds are kept until one succeeds"
            );
        } else {
            tracing::debug!(source = self.source, error, ?kind, kept, "lookup still fails");
        }
    }

    /// Whether the last lookup failed.
    pub(crate) fn is_failing(&self) -> bool {
        self.health.borrow().failure.is_some()
    }
}

/// Sorts and truncates the addresses for a log line. Returns how many it removed.
fn shorten(addresses: &mut Vec<SocketAddr>) -> usize {
    addresses.sort_unstable();
    let more = addresses.len().saturating_sub(LOGGED);
    addresses.truncate(LOGGED);
    more
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(last: u16) -> SocketAddr {
        SocketAddr::from(([10, 0, (last >> 8) as u8, last as u8], 8150))
    }

    #[test]
    fn publishing_the_same_set_wakes_no_subscriber() {
        let (seeds, mut published) = watch::channel(HashSet::new());
        let health = watch::channel(Health::default()).0;
        let publisher = Publisher { source: "test", seeds, health: &health };
        publisher.publish(HashSet::from([address(1), address(2)]));
        assert!(published.has_changed().unwrap());
        published.mark_unchanged();
        publisher.publish(HashSet::from([address(2), address(1)]));
        assert!(!published.has_changed().unwrap());
    }

    #[tokio::test(start_paused = true)]
    async fn a_failure_is_published_once_and_ends_with_the_next_success() {
        let health = watch::channel(Health::default()).0;
        let publisher =
            Publisher { source: "test", seeds: watch::channel(HashSet::new()).0, health: &health };
        let mut seen = health.subscribe();

        publisher.succeeded();
        assert!(seen.has_changed().unwrap(), "the first success");
        seen.mark_unchanged();
        publisher.succeeded();
        assert!(!seen.has_changed().unwrap(), "nothing new");

        let began = Instant::now();
        publisher.failed(FailureKind::Unavailable, &std::io::Error::other("first"));
        assert!(seen.has_changed().unwrap());
        seen.mark_unchanged();
        tokio::time::advance(Duration::from_secs(7)).await;
        publisher.failed(FailureKind::Unavailable, &std::io::Error::other("second"));
        assert!(!seen.has_changed().unwrap(), "the same kind of failure");
        let failure = health.borrow().failure.clone().unwrap();
        assert_eq!((failure.since, failure.error.as_str()), (began, "second"));

        publisher.failed(FailureKind::Denied, &std::io::Error::other("third"));
        assert!(seen.has_changed().unwrap(), "another kind");
        assert_eq!(health.borrow().failure.as_ref().unwrap().since, began);
        publisher.succeeded();
        assert!(health.borrow().failure.is_none());
    }

    #[test]
    fn long_address_lists_are_shortened_in_logs() {
        let mut addresses: Vec<_> = (0..1000).rev().map(address).collect();
        assert_eq!(shorten(&mut addresses), 1000 - LOGGED);
        assert_eq!(addresses[..2], [address(0), address(1)]);
    }
}
