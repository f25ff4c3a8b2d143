//! [`Feed`]: the rows of one resource of one agent, and of one namespace if it is bound to one. It is read
//! once, however many look.

use std::{
    collections::HashMap,
    sync::{Arc, Weak},
    time::Duration,
};

use ids::AgentId;
use parking_lot::Mutex;
use tokio::{sync::watch, time::Instant};
use views::{AgentState, Resource, Store};

use super::{Hub, NoFeed, wake::Wake};

/// What a feed takes of the memory of views without any rows: its task, and the watch.
pub(super) const COST: usize = 4 << 10;

/// What a feed reads.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct FeedKey {
    pub(crate) agent: AgentId,
    pub(crate) what: What,
    /// `None`: the whole cluster.
    pub(crate) namespace: Option<Arc<str>>,
}

/// What the rows of a feed are.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum What {
    /// Objects.
    Objects(Arc<Resource>),
    /// A single row: how many objects there are.
    Summary,
}

impl What {
    /// Returns how it is named in rows.
    pub(crate) fn name(&self) -> String {
        match self {
            Self::Objects(resource) => resource.name(),
            Self::Summary => views::View::SUMMARY.to_owned(),
        }
    }
}

/// What is known of the rows of a feed.
#[derive(Debug, Clone)]
pub(crate) struct Condition {
    pub(crate) state: AgentState,
    /// Why, for a person; empty: there is nothing to say.
    pub(crate) reason: String,
    pub(crate) since: Instant,
    /// The rows do not fit into the memory for views.
    pub(crate) is_full: bool,
}

impl Condition {
    /// Returns whether that is a change.
    fn set(&mut self, state: AgentState, reason: String) -> bool {
        if self.state == state && self.reason == reason && !self.is_full {
            return false;
        }
        if self.state != state {
            self.since = Instant::now();
        }
        self.state = state;
        self.reason = reason;
        self.is_full = false;
        true
    }
}

/// The rows, and what is known of them.
#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) store: Store,
    pub(crate) condition: Condition,
    /// The bytes of the store that are counted in [`Hub`].
    counted: usize,
    /// Since when nobody looks.
    idle_since: Instant,
    /// How many had begun to look when the last try to read began that has failed.
    failed_for: u64,
    /// It is not read any more.
    is_closed: bool,
}

/// The rows of one resource of one agent.
pub(crate) struct Feed {
    pub(crate) key: FeedKey,
    /// The name in rows.
    pub(crate) name: String,
    inner: Mutex<Inner>,
    /// Those that look, each with the number by which it knows the feed.
    lookers: Mutex<HashMap<u64, (usize, Arc<Wake>)>>,
    /// How many look.
    count: watch::Sender<usize>,
    /// How many have begun to look.
    begun: watch::Sender<u64>,
    hub: Weak<Hub>,
}

impl std::fmt::Debug for Feed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Feed").field("key", &self.key).finish_non_exhaustive()
    }
}

impl Feed {
    pub(super) fn new(key: FeedKey, hub: &Arc<Hub>) -> Arc<Self> {
        let mut counted = 0;
        hub.count(&mut counted, COST);
        let inner = Inner {
            store: Store::new(&hub.versions),
            condition: Condition {
                state: AgentState::Listing,
                reason: String::new(),
                since: Instant::now(),
                is_full: false,
            },
            counted,
            idle_since: Instant::now(),
            failed_for: 0,
            is_closed: false,
        };
        hub.metrics.feeds.inc();
        Arc::new(Self {
            name: key.what.name(),
            key,
            inner: Mutex::new(inner),
            lookers: Mutex::default(),
            count: watch::Sender::new(0),
            begun: watch::Sender::new(0),
            hub: Arc::downgrade(hub),
        })
    }

    /// Calls `f` with the rows, which must not block.
    pub(crate) fn with<R>(&self, f: impl FnOnce(&Inner) -> R) -> R {
        f(&self.inner.lock())
    }

    /// Changes rows, counts their memory, and wakes those that look. Returns `false` if they need more memory
    /// than there is: they are gone then.
    pub(super) fn change(&self, f: impl FnOnce(&mut Store)) -> bool {
        let Some(hub) = self.hub.upgrade() else { return false };
        let _change = hub.begin_change();
        let fits = {
            let mut inner = self.inner.lock();
            if inner.is_closed {
                return false;
            }
            f(&mut inner.store);
            let bytes = COST + inner.store.bytes();
            hub.count(&mut inner.counted, bytes)
        };
        let fits = fits || hub.has_room(Some(self), 0);
        if !fits {
            let mut inner = self.inner.lock();
            inner.store.clear(&hub.versions);
            hub.count(&mut inner.counted, COST);
            inner.condition = Condition {
                state: AgentState::Stale,
                reason: NoFeed::Full(hub.settings.memory).to_string(),
                since: Instant::now(),
                is_full: true,
            };
            hub.metrics.full.inc();
        }
        self.wake();
        fits
    }

    /// Notes what is known of the rows.
    pub(super) fn is(&self, state: AgentState, reason: impl Into<String>) {
        if self.inner.lock().condition.set(state, reason.into()) {
            self.wake();
        }
    }

    /// Notes that a try to read has failed, and why: rows that are there are those of a time before. `begun`:
    /// how many had begun to look when the try began. Whoever waits for it is woken, also if it failed as the
    /// one before.
    pub(super) fn failed(&self, reason: String, begun: u64) {
        {
            let mut inner = self.inner.lock();
            let state = match inner.condition.state {
                AgentState::Live | AgentState::Stale => AgentState::Stale,
                _ if inner.store.is_empty() => AgentState::Absent,
                _ => AgentState::Stale,
            };
            inner.failed_for = begun;
            inner.condition.set(state, reason);
        }
        self.wake();
    }

    /// Follows how many have begun to look.
    pub(super) fn begun(&self) -> watch::Receiver<u64> {
        self.begun.subscribe()
    }

    fn wake(&self) {
        for (number, wake) in self.lookers.lock().values() {
            wake.changed(*number);
        }
    }

    /// Waits until nobody has looked for this long. Cancel safe.
    pub(super) async fn idle(&self, linger: Duration) {
        let mut count = self.count.subscribe();
        loop {
            // The sender lives as long as the feed.
            if count.wait_for(|count| *count == 0).await.is_err() {
                return;
            }
            if tokio::time::timeout(linger, count.wait_for(|count| *count > 0)).await.is_err() {
                return;
            }
        }
    }

    /// Waits until somebody looks. Cancel safe.
    pub(super) async fn watched(&self) {
        // The sender lives as long as the feed.
        let _ = self.count.subscribe().wait_for(|count| *count > 0).await;
    }

    /// Since when nobody looks; `None`: somebody does.
    pub(super) fn idle_since(&self) -> Option<Instant> {
        let is_idle = *self.count.borrow() == 0;
        is_idle.then(|| self.inner.lock().idle_since)
    }

    /// Frees the memory. Nothing is read into it any more.
    pub(super) fn close(&self, hub: &Hub) {
        let mut inner = self.inner.lock();
        if !std::mem::replace(&mut inner.is_closed, true) {
            inner.store.clear(&hub.versions);
            hub.count(&mut inner.counted, 0);
            hub.metrics.feeds.dec();
        }
    }

    /// Whether it is closed.
    pub(super) fn is_closed(&self) -> bool {
        self.inner.lock().is_closed
    }
}

/// Something that looks at a feed, until dropped.
#[derive(Debug)]
pub(crate) struct Look {
    feed: Arc<Feed>,
    looker: u64,
    /// Its number among those who have looked at the feed, from 1.
    number: u64,
}

impl Look {
    /// `looker` is unique, and knows the feed by `known_by`. If the feed waits after a failure, it is tried
    /// again soon.
    pub(super) fn new(feed: Arc<Feed>, looker: u64, known_by: usize, wake: &Arc<Wake>) -> Self {
        feed.lookers.lock().insert(looker, (known_by, Arc::clone(wake)));
        let mut number = 0;
        // Before a reader sees that somebody looks: its next try counts for this look.
        feed.begun.send_modify(|begun| {
            *begun += 1;
            number = *begun;
        });
        feed.count.send_modify(|count| *count += 1);
        wake.changed(known_by);
        Self { feed, looker, number }
    }

    /// Whether what is known of the rows is an answer to this look. A failure of before it is none: the feed
    /// is tried again.
    pub(crate) fn is_answered(&self, inner: &Inner) -> bool {
        let is_failed = matches!(inner.condition.state, AgentState::Absent | AgentState::Stale);
        !is_failed || inner.failed_for >= self.number
    }

    /// Returns the feed.
    pub(crate) fn feed(&self) -> &Arc<Feed> {
        &self.feed
    }
}

impl Drop for Look {
    fn drop(&mut self) {
        self.feed.lookers.lock().remove(&self.looker);
        self.feed.inner.lock().idle_since = Instant::now();
        self.feed.count.send_modify(|count| *count = count.saturating_sub(1));
    }
}
