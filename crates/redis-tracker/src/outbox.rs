//! What this replica announces: what should be in Redis, what may be there, and what to write next.
//!
//! No I/O. Each announcement is an [`Item`]. Changes of an item that come faster than they are written become
//! one write. A withdrawn item stays here until it is removed from Redis, if it may ever have been there. So
//! the size of the outbox is bounded by what is announced and what may still be in Redis.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque},
    sync::Arc,
    time::Duration,
};

use cluster::Connection;
use ids::{AgentId, ConnectionId, ReplicaId};
use proto::kas::internal::v1::{AnnouncedRoute, SharedEvent};
use tokio::time::Instant;

use crate::{
    keys::Keys,
    value::{self, Owner},
};

/// A primary that takes over may have missed the last writes, so removals are repeated for this long.
const REPEATED: Duration = Duration::from_secs(60);
/// The largest number of removals that are repeated.
const MAX_REPEATED: usize = 10_000;
/// Entries that are due within this time are refreshed together.
const TOGETHER: Duration = Duration::from_millis(500);

/// One announcement, which is in Redis or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Item {
    /// This replica holds tunnels of the agent.
    Route(AgentId),
    /// An open configuration stream of an agent of this project.
    Connection(AgentId, ConnectionId, i64),
    /// There are connections of this configuration project.
    Project(i64),
}

#[derive(Debug)]
enum Live {
    Route {
        leases: usize,
        version: u64,
        methods: Arc<[Box<str>]>,
    },
    /// During a reconnect, agentk has its old and its new stream: the newer one counts.
    Connection {
        streams: Vec<(u64, Arc<Connection>)>,
        version: u64,
    },
    Project {
        connections: usize,
    },
}

#[derive(Debug, Default)]
struct Entry {
    live: Option<Live>,
    /// It may be in Redis.
    stored: bool,
    /// The expiry that was set for its hashes, unless they were lost; `None` if it is not known to be set.
    lasts: Option<Instant>,
    /// Its refresh is already spread from those of items that were written with it.
    spread: bool,
    due: Option<Instant>,
}

/// The announcements of this replica.
#[derive(Debug)]
pub(crate) struct Outbox {
    me: ReplicaId,
    run: u64,
    /// The URL at which replicas of 14.1 may ask this one; empty if there is none.
    url: String,
    refresh: Duration,
    version: u64,
    serial: u64,
    entries: HashMap<Item, Entry>,
    routes: usize,
    /// Changed items in the order of their changes.
    queue: VecDeque<Item>,
    /// Changed items, and whether the change is published.
    dirty: HashMap<Item, bool>,
    /// Since when there has been something to write.
    behind: Option<Instant>,
    due: BTreeSet<(Instant, Item)>,
    removed: VecDeque<(Instant, Item)>,
}

/// The changes of one key.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Change {
    /// Fields and values of a hash, or members of a set, which have no value.
    pub(crate) set: Vec<(Vec<u8>, Option<Vec<u8>>)>,
    pub(crate) remove: Vec<Vec<u8>>,
    /// The key already has an expiry, unless it was lost.
    pub(crate) settled: bool,
    /// The key needs a later expiry.
    pub(crate) extend: bool,
    pub(crate) is_set: bool,
}

/// What is written together.
#[derive(Debug, Default)]
pub(crate) struct Batch {
    items: Vec<(Item, bool)>,
    pub(crate) changes: BTreeMap<Vec<u8>, Change>,
    /// The event to publish, without its number.
    pub(crate) event: Option<SharedEvent>,
    /// When it was made, if it contains all changes.
    all_at: Option<Instant>,
}

impl Batch {
    pub(crate) fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    #[cfg(test)]
    fn len(&self) -> usize {
        self.items.len()
    }
}

impl Outbox {
    pub(crate) fn new(me: ReplicaId, run: u64, url: String, refresh: Duration) -> Self {
        Self {
            me,
            run,
            url,
            refresh,
            version: 0,
            serial: 0,
            entries: HashMap::new(),
            routes: 0,
            queue: VecDeque::new(),
            dirty: HashMap::new(),
            behind: None,
            due: BTreeSet::new(),
            removed: VecDeque::new(),
        }
    }

    pub(crate) fn run(&self) -> u64 {
        self.run
    }

    pub(crate) fn version(&self) -> u64 {
        self.version
    }

    /// Returns how many agents are announced.
    pub(crate) fn routes(&self) -> usize {
        self.routes
    }

    /// Returns how many items are announced or may still be in Redis.
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns how many items are not written yet.
    pub(crate) fn unwritten(&self) -> usize {
        self.dirty.len()
    }

    /// Returns for how long there have been unwritten changes; `None` if there are none.
    pub(crate) fn lag(&self, now: Instant) -> Option<Duration> {
        self.behind.filter(|_| !self.dirty.is_empty()).map(|since| now.saturating_duration_since(since))
    }

    pub(crate) fn holds(&self, agent: AgentId) -> bool {
        matches!(self.entries.get(&Item::Route(agent)), Some(Entry { live: Some(_), .. }))
    }

    fn dirty(&mut self, item: Item, news: bool) {
        self.behind.get_or_insert_with(Instant::now);
        match self.dirty.entry(item) {
            std::collections::hash_map::Entry::Occupied(mut known) => *known.get_mut() |= news,
            std::collections::hash_map::Entry::Vacant(vacant) => {
                vacant.insert(news);
                self.queue.push_back(item);
            }
        }
        // The queue may contain items that are not dirty any more, and items twice.
        if self.queue.len() > 2 * self.dirty.len() + 64 {
            let mut seen = HashSet::new();
            self.queue.retain(|item| self.dirty.contains_key(item) && seen.insert(*item));
        }
    }

    /// Adds one announcement of an agent; returns whether it is the first.
    pub(crate) fn add_route(&mut self, agent: AgentId, methods: Arc<[Box<str>]>) -> bool {
        let item = Item::Route(agent);
        let entry = self.entries.entry(item).or_default();
        if let Some(Live::Route { leases, .. }) = &mut entry.live {
            *leases += 1;
            return false;
        }
        self.version += 1;
        entry.live = Some(Live::Route { leases: 1, version: self.version, methods });
        self.routes += 1;
        self.dirty(item, true);
        true
    }

    /// Withdraws one announcement of an agent; returns whether it was the last.
    pub(crate) fn remove_route(&mut self, agent: AgentId) -> bool {
        let item = Item::Route(agent);
        let Some(Entry { live: Some(Live::Route { leases, .. }), .. }) = self.entries.get_mut(&item) else {
            return false;
        };
        *leases -= 1;
        if *leases > 0 {
            return false;
        }
        self.version += 1;
        self.routes -= 1;
        self.end(item);
        true
    }

    fn end(&mut self, item: Item) {
        let Some(entry) = self.entries.get_mut(&item) else { return };
        entry.live = None;
        if let Some(due) = entry.due.take() {
            self.due.remove(&(due, item));
        }
        if entry.stored {
            self.dirty(item, true);
        } else {
            // It was never sent. Its entry in the queue is ignored later.
            self.entries.remove(&item);
            self.dirty.remove(&item);
            self.caught_up();
        }
    }

    fn caught_up(&mut self) {
        if self.dirty.is_empty() {
            self.behind = None;
        }
    }

    /// Announces an open configuration stream; returns the arguments for
    /// [`remove_connection`](Self::remove_connection).
    pub(crate) fn add_connection(&mut self, connection: Arc<Connection>) -> (Item, u64) {
        self.serial += 1;
        self.version += 1;
        let (serial, version) = (self.serial, self.version);
        let item = Item::Connection(connection.agent, connection.id, connection.project_id);
        let project = connection.project_id;
        let entry = self.entries.entry(item).or_default();
        match &mut entry.live {
            Some(Live::Connection { streams, .. }) => streams.push((serial, connection)),
            _ => {
                entry.live = Some(Live::Connection { streams: vec![(serial, connection)], version });
                self.add_project(project);
            }
        }
        self.dirty(item, true);
        (item, serial)
    }

    pub(crate) fn remove_connection(&mut self, item: Item, serial: u64) {
        let Some(Entry { live: Some(Live::Connection { streams, .. }), .. }) = self.entries.get_mut(&item)
        else {
            return;
        };
        let newest = streams.last().is_some_and(|(last, _)| *last == serial);
        streams.retain(|(known, _)| *known != serial);
        let over = streams.is_empty();
        self.version += 1;
        if over {
            self.end(item);
            if let Item::Connection(_, _, project) = item {
                self.remove_project(project);
            }
        } else if newest {
            self.dirty(item, true);
        }
    }

    fn add_project(&mut self, project: i64) {
        let item = Item::Project(project);
        let entry = self.entries.entry(item).or_default();
        match &mut entry.live {
            Some(Live::Project { connections }) => *connections += 1,
            _ => {
                entry.live = Some(Live::Project { connections: 1 });
                self.dirty(item, false);
            }
        }
    }

    fn remove_project(&mut self, project: i64) {
        let item = Item::Project(project);
        let Some(Entry { live: Some(Live::Project { connections }), .. }) = self.entries.get_mut(&item)
        else {
            return;
        };
        *connections -= 1;
        if *connections == 0 {
            self.end(item);
        }
    }

    /// Withdraws everything for good.
    pub(crate) fn withdraw_all(&mut self) {
        let live: Vec<Item> =
            self.entries.iter().filter(|(_, entry)| entry.live.is_some()).map(|(item, _)| *item).collect();
        for item in live {
            self.end(item);
        }
        self.routes = 0;
        self.version += 1;
    }

    /// Marks everything to be written again, and recent removals to be repeated, because Redis may have lost
    /// data.
    pub(crate) fn rewrite_all(&mut self, now: Instant) {
        self.forget_removed(now);
        for (_, item) in std::mem::take(&mut self.removed) {
            self.entries.entry(item).or_default().stored = true;
        }
        let items: Vec<Item> = self.entries.keys().copied().collect();
        for item in items {
            if let Some(entry) = self.entries.get_mut(&item) {
                entry.lasts = None;
            }
            self.dirty(item, true);
        }
    }

    fn forget_removed(&mut self, now: Instant) {
        while self
            .removed
            .front()
            .is_some_and(|(at, _)| now.duration_since(*at) > REPEATED || self.removed.len() > MAX_REPEATED)
        {
            self.removed.pop_front();
        }
    }

    /// Returns when there is something to write.
    pub(crate) fn deadline(&self, now: Instant) -> Option<Instant> {
        if self.dirty.is_empty() { self.due.first().map(|(due, _)| *due) } else { Some(now) }
    }

    /// Returns what to write next, at most `most` items. `redis_now` and the first of `lives` give the expiry
    /// of entries, the second of `lives` is the time to live of a hash. With `mixed`, replicas of 14.1 may
    /// have lowered that.
    pub(crate) fn batch(
        &mut self,
        keys: &Keys,
        most: usize,
        now: Instant,
        redis_now: Duration,
        lives: (Duration, Duration),
        mixed: bool,
    ) -> Batch {
        let (ttl, hash_ttl) = lives;
        // A hash must not expire shortly before its refresh. Half of the time between refresh and expiry is
        // reserved for delays.
        let needed = now + self.refresh + ttl.saturating_sub(self.refresh) / 2;
        // Entries that are due soon are included, because a transaction for each entry would double the
        // commands.
        let soon = now + (self.refresh / 50).min(TOGETHER);
        while self.dirty.len() < most
            && let Some(&(due, item)) = self.due.first()
            && due <= soon
            && (due <= now || !self.dirty.is_empty())
        {
            self.due.pop_first();
            if let Some(entry) = self.entries.get_mut(&item) {
                entry.due = None;
            }
            self.dirty(item, false);
        }
        let mut batch = Batch::default();
        let mut event =
            SharedEvent { replica: self.me.as_str().to_owned(), run: self.run, ..SharedEvent::default() };
        let mut is_news = false;
        while batch.items.len() < most
            && let Some(item) = self.queue.pop_front()
        {
            // An item that was withdrawn and announced again is in the queue twice.
            let Some(news) = self.dirty.remove(&item) else { continue };
            let Some(entry) = self.entries.get_mut(&item) else { continue };
            entry.stored = true;
            let settled = entry.lasts.is_some();
            let extend = mixed || entry.lasts.is_none_or(|lasts| lasts < needed);
            if extend {
                // The first time a random part, so that hashes that were written together are not extended
                // together.
                let spare = (now + hash_ttl).saturating_duration_since(needed);
                let share = if settled { 1.0 } else { rand::random::<f64>() };
                entry.lasts = Some(needed + spare.mul_f64(share));
            }
            batch.items.push((item, news));
            is_news |= news;
            let by = |version| Owner { replica: self.me.clone(), run: self.run, version };
            let expires_at = redis_now + ttl;
            let mut change = |key: Vec<u8>, is_set: bool, field: Vec<u8>, value: Option<Option<Vec<u8>>>| {
                let change =
                    batch.changes.entry(key).or_insert_with(|| Change { settled: true, ..Change::default() });
                change.is_set = is_set;
                match value {
                    Some(value) => {
                        change.settled &= settled;
                        // The set of projects has its own expiry, which each heartbeat extends.
                        change.extend |= extend || is_set;
                        change.set.push((field, value));
                    }
                    None => change.remove.push(field),
                }
            };
            match (item, &entry.live) {
                (Item::Route(agent), live) => {
                    let field = value::route_field(agent, &self.me).to_string().into_bytes();
                    let value = match live {
                        Some(Live::Route { version, methods, .. }) => {
                            let route = AnnouncedRoute { agent_id: agent.get(), version: *version };
                            event.announced.extend(news.then_some(route));
                            let value =
                                value::encode_route(agent, methods, &self.url, &by(*version), expires_at);
                            Some(Some(value))
                        }
                        _ => {
                            event.withdrawn.extend(news.then_some(agent.get()));
                            None
                        }
                    };
                    change(keys.tunnels(agent), false, field, value);
                }
                (Item::Connection(agent, id, project), live) => {
                    event.connections |= news;
                    let field = value::connection_field(agent, id, &self.me).to_string().into_bytes();
                    let value = match live {
                        Some(Live::Connection { streams, version }) => {
                            streams.last().map(|(_, connection)| {
                                Some(value::encode_connection(connection, &by(*version), expires_at))
                            })
                        }
                        _ => None,
                    };
                    change(keys.agent(agent), false, field.clone(), value.clone());
                    change(keys.project(project), false, field, value);
                }
                (Item::Project(project), live) => {
                    let member = project.to_string().into_bytes();
                    change(keys.projects(&self.me), true, member, live.is_some().then_some(None));
                }
            }
        }
        batch.event = is_news.then_some(event);
        batch.all_at = self.dirty.is_empty().then_some(now);
        batch
    }

    /// Notes that the batch is in Redis.
    pub(crate) fn written(&mut self, batch: Batch, now: Instant) {
        if self.dirty.is_empty() {
            self.behind = None;
        } else if batch.all_at.is_some() {
            // The remaining changes are newer than the batch.
            self.behind = batch.all_at;
        }
        for (item, _) in batch.items {
            let Some(entry) = self.entries.get_mut(&item) else { continue };
            if entry.live.is_some() {
                // The heartbeats refresh the set of projects.
                if matches!(item, Item::Project(_)) {
                    continue;
                }
                if let Some(due) = entry.due.take() {
                    self.due.remove(&(due, item));
                }
                // The first time early by a random part, so that entries that were written together are not
                // refreshed together.
                let share = if std::mem::replace(&mut entry.spread, true) {
                    1.0
                } else {
                    0.5 + rand::random::<f64>() / 2.0
                };
                let due = now + self.refresh.mul_f64(share);
                entry.due = Some(due);
                self.due.insert((due, item));
            } else if !self.dirty.contains_key(&item) {
                self.entries.remove(&item);
                self.removed.push_back((now, item));
            }
        }
        self.forget_removed(now);
    }

    /// Notes that the batch may be in Redis completely, partly or not at all.
    pub(crate) fn not_written(&mut self, batch: Batch) {
        for (item, news) in batch.items {
            if let Some(entry) = self.entries.get_mut(&item) {
                entry.lasts = None;
                self.dirty(item, news);
            }
        }
    }

    /// Returns the hashes in which this replica has entries, for garbage collection.
    pub(crate) fn hashes(&self, keys: &Keys) -> BTreeSet<Vec<u8>> {
        let of = |item: &Item| match *item {
            Item::Route(agent) => vec![keys.tunnels(agent)],
            Item::Connection(agent, _, project) => vec![keys.agent(agent), keys.project(project)],
            Item::Project(_) => Vec::new(),
        };
        self.entries.iter().filter(|(_, entry)| entry.live.is_some()).flat_map(|(item, _)| of(item)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TTL: Duration = Duration::from_secs(300);
    const REFRESH: Duration = Duration::from_secs(240);

    fn outbox() -> (Outbox, Keys) {
        (Outbox::new(ReplicaId::new("me"), 1, String::new(), REFRESH), Keys::new("p"))
    }

    fn agent(id: i64) -> AgentId {
        AgentId::new(id).unwrap()
    }

    fn none() -> Arc<[Box<str>]> {
        Arc::from([])
    }

    fn batch(outbox: &mut Outbox, keys: &Keys, now: Instant) -> Batch {
        outbox.batch(keys, 100, now, Duration::from_secs(1_000), (TTL, 4 * TTL), false)
    }

    #[tokio::test]
    async fn a_change_withdrawn_before_its_write_is_not_written() {
        let (mut outbox, keys) = outbox();
        for id in 1..1_000 {
            outbox.add_route(agent(id), none());
            outbox.remove_route(agent(id));
        }
        assert!(batch(&mut outbox, &keys, Instant::now()).is_empty());
        assert_eq!((outbox.len(), outbox.unwritten(), outbox.routes()), (0, 0, 0));
    }

    #[tokio::test]
    async fn a_withdrawal_is_written_until_it_succeeds() {
        let (mut outbox, keys) = outbox();
        let now = Instant::now();
        outbox.add_route(agent(1), none());
        let first = batch(&mut outbox, &keys, now);
        assert_eq!(first.event.as_ref().unwrap().announced.len(), 1);
        // The write was sent and may arrive.
        outbox.remove_route(agent(1));
        outbox.not_written(first);
        for _ in 0..3 {
            let again = batch(&mut outbox, &keys, now);
            assert_eq!(again.event.as_ref().unwrap().withdrawn, [1]);
            assert_eq!(again.changes.values().next().unwrap().remove.len(), 1);
            outbox.not_written(again);
        }
        let last = batch(&mut outbox, &keys, now);
        outbox.written(last, now);
        assert_eq!(outbox.len(), 0);
    }

    #[tokio::test]
    async fn an_agent_that_reconnects_during_its_removal_stays() {
        let (mut outbox, keys) = outbox();
        let now = Instant::now();
        outbox.add_route(agent(1), none());
        let added = batch(&mut outbox, &keys, now);
        outbox.written(added, now);
        outbox.remove_route(agent(1));
        let removal = batch(&mut outbox, &keys, now);
        outbox.add_route(agent(1), none());
        outbox.written(removal, now);
        assert!(outbox.holds(agent(1)));
        let again = batch(&mut outbox, &keys, now);
        assert_eq!(again.event.unwrap().announced.len(), 1);
    }

    #[tokio::test]
    async fn refreshes_are_in_time_spread_and_not_published() {
        let (mut outbox, keys) = outbox();
        let now = Instant::now();
        for id in 1..=100 {
            outbox.add_route(agent(id), none());
        }
        let all = batch(&mut outbox, &keys, now);
        outbox.written(all, now);
        assert!(batch(&mut outbox, &keys, now).is_empty());
        let half = batch(&mut outbox, &keys, now + REFRESH * 3 / 4);
        assert!((10..=90).contains(&half.len()), "{} of 100 are due in the first half", half.len());
        assert!(half.event.is_none() && half.changes.values().all(|change| change.settled));
        outbox.written(half, now + REFRESH * 3 / 4);
        let rest = batch(&mut outbox, &keys, now + REFRESH);
        assert!(rest.len() >= 10);
        assert_eq!(outbox.unwritten(), 0);
    }

    #[tokio::test]
    async fn an_expiry_is_set_when_needed_and_each_time_if_14_1_may_lower_it() {
        const PERIODS: usize = 40;
        let (mut outbox, keys) = outbox();
        let mut now = Instant::now();
        for id in 1..=50 {
            outbox.add_route(agent(id), none());
        }
        let mut until = HashMap::new();
        let mut extended = Vec::new();
        for period in 0..PERIODS {
            let mixed = period >= PERIODS - 2;
            let all = outbox.batch(&keys, 100, now, Duration::from_secs(1_000), (TTL, 4 * TTL), mixed);
            assert_eq!(all.len(), 50, "all are refreshed in each period");
            for (key, change) in all.changes.iter().filter(|(_, change)| change.extend) {
                assert!(change.settled == (period > 0));
                until.insert(key.clone(), now + 4 * TTL);
            }
            extended.push(all.changes.values().filter(|change| change.extend).count());
            outbox.written(all, now);
            now += REFRESH;
            assert!(until.values().all(|until| now < *until), "a hash has expired before it was refreshed");
        }
        assert_eq!((extended[0], extended[PERIODS - 2], extended[PERIODS - 1]), (50, 50, 50));
        // Each is extended every fourth time, and not all of them in the same period.
        let between = &extended[1..PERIODS - 2];
        let mean = between.iter().sum::<usize>() as f64 / between.len() as f64 / 50.0;
        assert!((0.2..0.3).contains(&mean) && between.iter().all(|count| *count < 35), "{between:?}");
        outbox.rewrite_all(now);
        assert!(
            batch(&mut outbox, &keys, now).changes.values().all(|change| change.extend && !change.settled)
        );
    }

    #[tokio::test]
    async fn after_a_loss_everything_is_written_again_and_removals_too() {
        let (mut outbox, keys) = outbox();
        let now = Instant::now();
        outbox.add_route(agent(1), none());
        outbox.add_route(agent(2), none());
        let first = batch(&mut outbox, &keys, now);
        outbox.written(first, now);
        outbox.remove_route(agent(2));
        let removal = batch(&mut outbox, &keys, now);
        outbox.written(removal, now);
        outbox.rewrite_all(now);
        let again = batch(&mut outbox, &keys, now);
        let event = again.event.as_ref().unwrap();
        assert_eq!((event.announced[0].agent_id, &event.withdrawn[..]), (1, &[2][..]));
        assert!(!again.changes.values().any(|change| change.settled && !change.set.is_empty()));
        outbox.written(again, now);
        assert_eq!(outbox.len(), 1);
        outbox.rewrite_all(now + REPEATED * 2);
        assert_eq!(batch(&mut outbox, &keys, now).len(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn lag_is_the_age_of_the_oldest_change_that_is_not_written() {
        let (mut outbox, keys) = outbox();
        let wait = async |seconds| tokio::time::advance(Duration::from_secs(seconds)).await;
        let lag = |outbox: &Outbox| outbox.lag(Instant::now()).map(|lag| lag.as_secs());
        assert_eq!(lag(&outbox), None);
        outbox.add_route(agent(1), Arc::from([]));
        wait(2).await;
        outbox.add_route(agent(2), Arc::from([]));
        wait(1).await;
        assert_eq!(lag(&outbox), Some(3));
        let first = batch(&mut outbox, &keys, Instant::now());
        wait(1).await;
        outbox.add_route(agent(3), Arc::from([]));
        outbox.not_written(first);
        assert_eq!(lag(&outbox), Some(4));
        let second = batch(&mut outbox, &keys, Instant::now());
        wait(1).await;
        outbox.add_route(agent(4), Arc::from([]));
        wait(1).await;
        outbox.written(second, Instant::now());
        // Only the fourth is unwritten. Its age counts from when the batch of the others was made.
        assert_eq!(lag(&outbox), Some(2));
        outbox.remove_route(agent(4));
        assert_eq!(lag(&outbox), None);
        wait(5).await;
        outbox.add_route(agent(4), Arc::from([]));
        assert_eq!(lag(&outbox), Some(0));
    }

    #[tokio::test]
    async fn churn_of_one_agent_does_not_grow_the_queue() {
        let (mut outbox, keys) = outbox();
        let now = Instant::now();
        for _ in 0..10_000 {
            outbox.add_route(agent(1), none());
            outbox.remove_route(agent(1));
        }
        outbox.add_route(agent(1), none());
        let one = batch(&mut outbox, &keys, now);
        assert_eq!(one.len(), 1);
        outbox.written(one, now);
        assert!(outbox.queue.len() < 100, "{}", outbox.queue.len());
    }
}
