//! Tunnels that this replica leases from others between two requests.
//!
//! A borrow request costs a stream and a round trip. If requests for the same method of an agent follow
//! closely, a leased tunnel waits here for the next one, for at most 300 ms. It is returned to its owner if
//! no request comes, if the owner revokes the lease or drains, or if the owner is no longer healthy.

use std::{
    collections::{BTreeMap, HashMap},
    ops::Bound::{Excluded, Unbounded},
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use cluster::{ReplicaHealth, Tracker};
use ids::{AgentId, ReplicaId};
use tokio::{sync::watch, time::Instant};
use tunnel::{
    features::Features,
    kas_end::{Retire, Tunnel, TunnelPool},
};

use crate::{
    flaw::{Flaw, flawed},
    sync::{Mutex, MutexGuard, oneshot},
};

/// Requests of one key follow closely if another one began within this time.
const HOT: Duration = Duration::from_millis(100);
/// A tunnel that no request took is returned after this time, plus at most one [`SWEEP`]. That is well below
/// the 2 s after which its owner ends the lease.
const IDLE: Duration = Duration::from_millis(250);
/// How often idle tunnels are examined, while there are any.
const SWEEP: Duration = Duration::from_millis(50);
/// The maximum number of idle tunnels of one key.
const PER_KEY: usize = 64;
/// The maximum number of idle tunnels in all.
const IN_ALL: usize = 512;
/// The maximum number of requests of one key that wait here. Further requests wait only for their own borrow
/// requests.
const WAITING: usize = 10_000;
/// After this many requests, a tunnel for which no request waits is returned. New borrow requests spread the
/// load over all replicas that hold the agent, and over its processes, and cost little in comparison.
const ROUNDS: u32 = 128;
/// The maximum number of keys. Requests of further keys borrow a tunnel each time.
const KEYS: usize = 8_192;

/// The agent and the method that a tunnel is leased for.
type Key = (AgentId, Arc<str>);
type Sender = oneshot::Sender<LeasedTunnel>;

/// The tunnels that this replica leases.
pub struct LeasePool {
    tracker: Arc<dyn Tracker>,
    state: Mutex<State>,
}

impl std::fmt::Debug for LeasePool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LeasePool").field("idle", &self.state().idle).finish_non_exhaustive()
    }
}

#[derive(Default)]
struct State {
    keys: HashMap<Key, Entry>,
    /// Tunnels in all entries.
    idle: usize,
    /// `keys` is swept if it has this many entries, and was not swept within [`HOT`].
    sweep_at: usize,
    swept: Option<Instant>,
    serial: u64,
    sweeping: bool,
    /// This replica drains: nothing is kept.
    closed: bool,
}

/// The state of a key.
#[derive(Default)]
struct Entry {
    /// When the latest request began, and the one before it.
    begun: Option<Instant>,
    before: Option<Instant>,
    /// The most recently used tunnel is last.
    idle: Vec<Idle>,
    waiting: Waiters,
    /// Changes if the health of an owner may have changed. `Some` while there are idle tunnels.
    changes: Option<watch::Receiver<()>>,
}

/// The requests of a key that wait, by what they need and their serial.
#[derive(Default)]
struct Waiters(BTreeMap<(u8, u64), Sender>);

impl Waiters {
    fn insert(&mut self, needs: Features, serial: u64, sender: Sender) {
        self.0.insert((needs.bits(), serial), sender);
    }

    fn remove(&mut self, needs: Features, serial: u64) -> Option<Sender> {
        self.0.remove(&(needs.bits(), serial))
    }

    /// Removes the request that waits longest of those whose needs are among `features`.
    fn pop(&mut self, features: Features) -> Option<Sender> {
        let mut oldest: Option<(u8, u64)> = None;
        let mut next = self.0.first_key_value();
        // One step for each set of needs.
        while let Some((&(needs, serial), _)) = next {
            let fits = features.contains(Features::from_bits(needs));
            if fits && oldest.is_none_or(|(_, oldest)| serial < oldest) {
                oldest = Some((needs, serial));
            }
            next = self.0.range((Excluded((needs, u64::MAX)), Unbounded)).next();
        }
        self.0.remove(&oldest?)
    }
}

struct Idle {
    tunnel: Arc<Tunnel>,
    holder: Arc<Holder>,
    since: Instant,
}

/// Where a tunnel belongs.
struct Holder {
    pool: Arc<LeasePool>,
    key: Key,
    owner: ReplicaId,
    /// How many requests the tunnel has carried.
    rounds: AtomicU32,
}

/// The [`TunnelPool`] of a tunnel.
struct Return(Arc<Holder>);

impl TunnelPool for Return {
    fn parked(&self, tunnel: &Arc<Tunnel>) {
        LeasePool::offer(&self.0, tunnel);
    }

    fn ended(&self, tunnel: &Arc<Tunnel>, _: bool) {
        self.0.pool.forget(&self.0.key, tunnel);
    }
}

/// A tunnel for one request. Dropped without [`LeasedTunnel::take`], it is kept for the next one.
pub struct LeasedTunnel {
    tunnel: Option<Arc<Tunnel>>,
    holder: Arc<Holder>,
}

impl std::fmt::Debug for LeasedTunnel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LeasedTunnel").field("owner", &self.holder.owner).finish_non_exhaustive()
    }
}

impl LeasedTunnel {
    /// Returns the replica that owns the tunnel.
    pub fn owner(&self) -> &ReplicaId {
        &self.holder.owner
    }

    /// Returns what the agentk at its end is known to support.
    pub fn features(&self) -> Features {
        self.tunnel.as_ref().map_or(Features::NONE, |tunnel| tunnel.info().features)
    }

    /// Takes the tunnel, which comes back by parking. Never `None`.
    pub fn take(mut self) -> Option<Arc<Tunnel>> {
        self.tunnel.take()
    }
}

impl Drop for LeasedTunnel {
    fn drop(&mut self) {
        if let Some(tunnel) = self.tunnel.take() {
            LeasePool::offer(&self.holder, &tunnel);
        }
    }
}

/// A request that waits for a leased tunnel. Dropping it ends the wait.
#[derive(Debug)]
pub struct PoolWaiter {
    pool: Arc<LeasePool>,
    key: Key,
    needs: Features,
    serial: u64,
    receiver: oneshot::Receiver<LeasedTunnel>,
}

impl PoolWaiter {
    /// Waits until a tunnel of the key is free here, possibly forever.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn handed(&mut self) -> LeasedTunnel {
        match (&mut self.receiver).await {
            Ok(tunnel) => tunnel,
            Err(_) => std::future::pending().await,
        }
    }
}

impl Drop for PoolWaiter {
    fn drop(&mut self) {
        let mut state = self.pool.state();
        let entry = state.keys.get_mut(&self.key);
        let sender = entry.and_then(|entry| entry.waiting.remove(self.needs, self.serial));
        drop(state);
        // A tunnel that was already handed over is offered again when the receiver drops, outside the lock.
        drop(sender);
    }
}

impl State {
    /// Returns the entry, which is created if there is room.
    fn entry(&mut self, key: &Key, now: Instant) -> Option<&mut Entry> {
        if !self.keys.contains_key(key) {
            // No entry becomes old in less than this time.
            let due = self.swept.is_none_or(|swept| now.duration_since(swept) >= HOT);
            if due && self.keys.len() >= self.sweep_at.clamp(64, KEYS) {
                self.keys.retain(|_, entry| !entry.is_over(now));
                self.sweep_at = 2 * self.keys.len();
                self.swept = Some(now);
            }
            if self.keys.len() >= KEYS {
                return None;
            }
            self.keys.insert(key.clone(), Entry::default());
        }
        self.keys.get_mut(key)
    }

    fn pop(&mut self, key: &Key, needs: Features) -> Option<LeasedTunnel> {
        let entry = self.keys.get_mut(key)?;
        loop {
            let at = entry.idle.iter().rposition(|idle| idle.tunnel.info().features.contains(needs))?;
            let Idle { tunnel, holder, .. } = entry.idle.remove(at);
            self.idle -= 1;
            // A tunnel that is ending is removed by `forget`.
            if tunnel.idle_since().is_some() {
                return Some(LeasedTunnel { tunnel: Some(tunnel), holder });
            }
        }
    }

    /// Removes the tunnels that should be returned.
    fn remove(&mut self, mut which: impl FnMut(&Key, &Idle) -> bool) -> Vec<Arc<Tunnel>> {
        let mut removed = Vec::new();
        for (key, entry) in &mut self.keys {
            entry.idle.retain(|idle| {
                let goes = which(key, idle);
                if goes {
                    removed.push(Arc::clone(&idle.tunnel));
                }
                !goes
            });
            if entry.idle.is_empty() {
                entry.changes = None;
            }
        }
        self.idle -= removed.len();
        removed
    }
}

impl Entry {
    /// Whether the request before the latest one began within [`HOT`].
    fn is_hot(&self, now: Instant) -> bool {
        self.before.is_some_and(|before| now.duration_since(before) < HOT)
    }

    fn is_over(&self, now: Instant) -> bool {
        let old = self.begun.is_none_or(|begun| now.duration_since(begun) >= HOT);
        old && self.idle.is_empty() && self.waiting.0.is_empty()
    }

    /// Whether the health of an owner may have changed since it was last examined.
    fn is_stale(&self) -> bool {
        self.changes.as_ref().is_some_and(|changes| changes.has_changed().unwrap_or(true))
    }
}

impl LeasePool {
    /// Creates an empty pool. `tracker` knows the health of owners.
    pub fn new(tracker: Arc<dyn Tracker>) -> Arc<Self> {
        Arc::new(Self { tracker, state: Mutex::default() })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Takes the most recently used tunnel that meets `needs`, for a request that no tunnel of this replica
    /// serves. Notes that a request begins.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn take(
        self: &Arc<Self>,
        agent: AgentId,
        method: &Arc<str>,
        needs: Features,
    ) -> Option<LeasedTunnel> {
        let key = (agent, Arc::clone(method));
        let now = Instant::now();
        {
            let mut state = self.state();
            let entry = state.entry(&key, now)?;
            entry.before = entry.begun.replace(now);
            if !entry.is_stale() {
                return state.pop(&key, needs);
            }
        }
        self.review(&key).await;
        self.state().pop(&key, needs)
    }

    /// Whether requests of this key follow so closely that a lease is worthwhile.
    pub fn is_hot(&self, agent: AgentId, method: &Arc<str>) -> bool {
        let state = self.state();
        let entry = state.keys.get(&(agent, Arc::clone(method)));
        !state.closed && entry.is_some_and(|entry| entry.waiting.0.len() > 1 || entry.is_hot(Instant::now()))
    }

    /// Takes a tunnel that meets `needs`, or waits for one. `Err(None)`: too many requests wait, or there are
    /// too many keys.
    pub fn acquire(
        self: &Arc<Self>,
        agent: AgentId,
        method: &Arc<str>,
        needs: Features,
    ) -> Result<LeasedTunnel, Option<PoolWaiter>> {
        let key = (agent, Arc::clone(method));
        let mut state = self.state();
        if let Some(tunnel) = state.pop(&key, needs) {
            return Ok(tunnel);
        }
        if flawed(Flaw::PoolWaitAfterUnlock) {
            drop(state);
            state = self.state();
        }
        state.serial += 1;
        let serial = state.serial;
        let Some(entry) = state.entry(&key, Instant::now()) else { return Err(None) };
        if entry.waiting.0.len() >= WAITING {
            return Err(None);
        }
        let (sender, receiver) = oneshot::channel();
        entry.waiting.insert(needs, serial, sender);
        drop(state);
        Err(Some(PoolWaiter { pool: Arc::clone(self), key, needs, serial, receiver }))
    }

    /// Returns the pool of one tunnel, which `owner` lends for requests of the key.
    pub fn pool_of(
        self: &Arc<Self>,
        agent: AgentId,
        method: &Arc<str>,
        owner: &ReplicaId,
    ) -> Arc<dyn TunnelPool> {
        Arc::new(Return(Arc::new(Holder {
            pool: Arc::clone(self),
            key: (agent, Arc::clone(method)),
            owner: owner.clone(),
            rounds: AtomicU32::new(0),
        })))
    }

    /// A tunnel is free: hands it to the request that waits longest of those that it can serve, keeps it for
    /// the next one, or returns it.
    fn offer(holder: &Arc<Holder>, tunnel: &Arc<Tunnel>) {
        if tunnel.idle_since().is_none() {
            return;
        }
        let (pool, key) = (&holder.pool, &holder.key);
        let now = Instant::now();
        let mut state = pool.state();
        let (room, closed) = (state.idle < IN_ALL, state.closed);
        if !closed && let Some(entry) = state.keys.get_mut(key) {
            while let Some(sender) = entry.waiting.pop(tunnel.info().features) {
                let leased = LeasedTunnel { tunnel: Some(Arc::clone(tunnel)), holder: Arc::clone(holder) };
                match sender.send(leased) {
                    Ok(()) => return,
                    // That request has left. Emptied, so that its drop does not offer the tunnel again.
                    Err(mut back) => drop(back.tunnel.take()),
                }
            }
            let rounds = holder.rounds.fetch_add(1, Ordering::Relaxed) + 1;
            if room && rounds < ROUNDS && entry.idle.len() < PER_KEY && entry.is_hot(now) {
                if entry.changes.is_none() {
                    let mut changes = pool.tracker.changes(key.0);
                    // The health was not examined since the tunnel was borrowed.
                    changes.mark_changed();
                    entry.changes = Some(changes);
                }
                entry.idle.push(Idle { tunnel: Arc::clone(tunnel), holder: Arc::clone(holder), since: now });
                state.idle += 1;
                if !std::mem::replace(&mut state.sweeping, true) {
                    tokio::spawn(Arc::clone(pool).sweep());
                }
                return;
            }
        }
        drop(state);
        tunnel.retire(Retire::Ok);
    }

    /// A tunnel is over.
    fn forget(&self, key: &Key, tunnel: &Arc<Tunnel>) {
        let mut state = self.state();
        let Some(entry) = state.keys.get_mut(key) else { return };
        if let Some(at) = entry.idle.iter().position(|idle| Arc::ptr_eq(&idle.tunnel, tunnel)) {
            let gone = entry.idle.remove(at);
            state.idle -= 1;
            drop(state);
            drop(gone);
        }
    }

    /// Returns the tunnels of owners that are not healthy.
    async fn review(&self, key: &Key) {
        if let Some(entry) = self.state().keys.get_mut(key)
            && let Some(changes) = &mut entry.changes
        {
            changes.mark_unchanged();
        }
        // Marked first, so that a change during the lookup is examined later.
        let candidates = self.tracker.locate(key.0).await.unwrap_or_default();
        let live = |owner: &ReplicaId| {
            candidates.iter().any(|c| c.replica.id == *owner && c.health == ReplicaHealth::Live)
        };
        let removed = self.state().remove(|other, idle| other == key && !live(&idle.holder.owner));
        give_back(removed);
    }

    /// Returns tunnels that were not used and those of owners that are not healthy, until none is idle.
    async fn sweep(self: Arc<Self>) {
        loop {
            tokio::time::sleep(SWEEP).await;
            let now = Instant::now();
            let (removed, stale) = {
                let mut state = self.state();
                let removed = state.remove(|_, idle| now.duration_since(idle.since) >= IDLE);
                let stale: Vec<Key> = state
                    .keys
                    .iter()
                    .filter(|(_, entry)| !entry.idle.is_empty() && entry.is_stale())
                    .map(|(key, _)| key.clone())
                    .collect();
                if state.idle == 0 {
                    state.sweeping = false;
                    state.keys.retain(|_, entry| !entry.is_over(now));
                    drop(state);
                    give_back(removed);
                    return;
                }
                (removed, stale)
            };
            give_back(removed);
            for key in stale {
                self.review(&key).await;
            }
        }
    }

    /// Returns all tunnels and keeps no more of them: this replica drains.
    pub fn close(&self) {
        let mut state = self.state();
        state.closed = true;
        let removed = state.remove(|_, _| true);
        drop(state);
        give_back(removed);
    }
}

fn give_back(tunnels: Vec<Arc<Tunnel>>) {
    for tunnel in tunnels {
        tunnel.retire(Retire::Ok);
    }
}

#[cfg(test)]
mod tests {
    use std::{
        future::poll_fn,
        pin::{Pin, pin},
        task::{Context, Poll, Waker},
    };

    use cluster::{InMemoryTracker, Replica};
    use http_body::Body as _;
    use ids::TokenHash;
    use tunnel::kas_end::{AgentKind, Info, TunnelBody};

    use super::*;
    use crate::flaw::must_fail_with;

    fn agent() -> AgentId {
        AgentId::new(3).unwrap()
    }

    fn pool() -> Arc<LeasePool> {
        let holder = Replica { id: ReplicaId::new("holder"), address: "127.0.0.1:1".into() };
        LeasePool::new(Arc::new(InMemoryTracker::new(holder)))
    }

    /// A tunnel of the holder that is free after a request.
    fn returned(pool: &Arc<LeasePool>, method: &str) -> (Arc<Tunnel>, TunnelBody) {
        returned_of(pool, method, Features::IMPERSONATION)
    }

    /// As [`returned`], of an agentk with these features.
    fn returned_of(pool: &Arc<LeasePool>, method: &str, features: Features) -> (Arc<Tunnel>, TunnelBody) {
        let silent = http_body_util::StreamBody::new(futures_util::stream::pending::<
            Result<http_body::Frame<bytes::Bytes>, grpc::BoxError>,
        >());
        let info = Info {
            agent: agent(),
            instance: 0,
            token: TokenHash::of(b"t"),
            kind: AgentKind::Ours,
            features,
            version: None,
            descriptor: Arc::default(),
        };
        let tunnel_pool = pool.pool_of(agent(), &method.into(), &ReplicaId::new("holder"));
        let body = grpc::boxed(silent);
        let (tunnel, out) = Tunnel::borrowed(info, body, Arc::clone(&tunnel_pool), Box::new(|| {}), true);
        tunnel_pool.parked(&tunnel);
        (tunnel, out)
    }

    fn was_returned(out: &mut TunnelBody) -> bool {
        let mut cx = Context::from_waker(Waker::noop());
        matches!(Pin::new(out).poll_frame(&mut cx), Poll::Ready(None))
    }

    async fn heat(pool: &Arc<LeasePool>, method: &str) {
        for _ in 0..2 {
            assert!(pool.take(agent(), &method.into(), Features::NONE).await.is_none());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn idle_tunnels_are_bounded_for_each_key_and_in_all() {
        let pool = pool();
        let mut held = Vec::new();
        for key in 0..=IN_ALL / PER_KEY {
            let method = format!("/s/{key}");
            heat(&pool, &method).await;
            for n in 0..=PER_KEY {
                let (tunnel, mut out) = returned(&pool, &method);
                let full = n == PER_KEY || key == IN_ALL / PER_KEY;
                assert_eq!(was_returned(&mut out), full, "{key} {n}");
                held.push((tunnel, out));
            }
        }
        assert_eq!(pool.state().idle, IN_ALL);
        pool.close();
        assert_eq!(pool.state().idle, 0);
        assert!(held.iter_mut().all(|(tunnel, _)| tunnel.idle_since().is_none()));
    }

    #[tokio::test(start_paused = true)]
    async fn keys_are_bounded_and_old_ones_are_forgotten() {
        let pool = pool();
        for n in 0..2 * KEYS {
            assert!(pool.take(agent(), &format!("/s/{n}").into(), Features::NONE).await.is_none());
        }
        assert_eq!(pool.state().keys.len(), KEYS);
        tokio::time::sleep(HOT).await;
        heat(&pool, "/s/new").await;
        assert!(pool.is_hot(agent(), &"/s/new".into()));
        assert_eq!(pool.state().keys.len(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn requests_are_served_in_order_and_those_that_left_are_skipped() {
        let pool = pool();
        heat(&pool, "/s/M").await;
        let waiter =
            || pool.acquire(agent(), &"/s/M".into(), Features::NONE).err().flatten().expect("a waiter");
        let (mut first, gone, mut second) = (waiter(), waiter(), waiter());
        drop(gone);
        let (_one, _out) = returned(&pool, "/s/M");
        let leased = first.handed().await;
        drop(first);
        // Not used after all: the next request gets it.
        drop(leased);
        let leased = second.handed().await;
        assert_eq!(leased.owner().as_str(), "holder");
        // Handed over to a request that leaves: it is kept.
        drop(leased);
        let left = acquire(&pool);
        assert!(left.is_ok(), "it is idle again");
    }

    fn acquire(pool: &Arc<LeasePool>) -> Result<LeasedTunnel, Option<PoolWaiter>> {
        pool.acquire(agent(), &"/s/M".into(), Features::NONE)
    }

    #[tokio::test(start_paused = true)]
    async fn a_tunnel_that_was_handed_to_a_request_that_left_is_kept() {
        let pool = pool();
        heat(&pool, "/s/M").await;
        let waiter = acquire(&pool).err().flatten().expect("a waiter");
        let (_tunnel, _out) = returned(&pool, "/s/M");
        assert_eq!(pool.state().idle, 0, "it was handed over");
        drop(waiter);
        assert_eq!(pool.state().idle, 1);
    }

    #[tokio::test(start_paused = true)]
    async fn tunnels_are_handed_only_to_requests_whose_needs_they_meet_and_the_oldest_of_these_first() {
        const OTHER: Features = Features::IMPERSONATION;
        let pool = pool();
        heat(&pool, "/s/M").await;
        let wait = |needs| {
            let acquired = pool.acquire(agent(), &"/s/M".into(), needs);
            acquired.err().flatten().expect("a waiter")
        };
        let mut needing = wait(Features::TARGET);
        let mut any = wait(Features::NONE);
        let mut both = wait(Features::TARGET | OTHER);
        let mut last = wait(Features::TARGET);
        // The first one is not waited behind.
        let (_one, _out) = returned_of(&pool, "/s/M", Features::NONE);
        assert_eq!(any.handed().await.features(), Features::NONE);
        let mut held = Vec::new();
        for waiter in [&mut needing, &mut both, &mut last] {
            held.push(returned_of(&pool, "/s/M", Features::TARGET | OTHER));
            let leased = tokio::time::timeout(Duration::ZERO, waiter.handed()).await.expect("its turn");
            drop(leased.take());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_idle_tunnel_that_does_not_meet_the_needs_is_passed_over() {
        let pool = pool();
        heat(&pool, "/s/M").await;
        let (fits, _out) = returned_of(&pool, "/s/M", Features::TARGET);
        let (_other, _out) = returned_of(&pool, "/s/M", Features::NONE);
        let method: Arc<str> = "/s/M".into();
        let acquire = |needs| pool.acquire(agent(), &method, needs);
        assert!(acquire(Features::UPGRADE).is_err());
        let leased = acquire(Features::TARGET).expect("the older one meets it");
        assert!(Arc::ptr_eq(&leased.take().unwrap(), &fits));
        assert!(acquire(Features::TARGET).is_err());
        assert!(acquire(Features::NONE).is_ok(), "the other one is still here");
    }

    /// Takes the tunnel of the pool and gives it back. `leaves`: does not wait for it.
    async fn request(pool: Arc<LeasePool>, leaves: bool) {
        match acquire(&pool) {
            Ok(leased) => drop(leased),
            Err(waiter) => {
                let mut waiter = waiter.expect("few wait");
                if leaves {
                    let _ = poll_fn(|cx| Poll::Ready(pin!(waiter.handed()).poll(cx).is_ready())).await;
                    museum::schedule::point();
                } else {
                    drop(waiter.handed().await);
                }
            }
        }
    }

    /// In any order of requests and of a tunnel that comes back, each request gets the tunnel once, and those
    /// that have left do not keep it.
    #[test]
    fn schedules_of_waiting_requests_and_a_leased_tunnel() {
        fn run() {
            museum::schedule::explore_without_time(|| {
                let pool = pool();
                museum::schedule::block_on(heat(&pool, "/s/M"));
                let requests = [false, false, true]
                    .map(|leaves| museum::schedule::spawn(request(Arc::clone(&pool), leaves)));
                let (_tunnel, _out) = returned(&pool, "/s/M");
                museum::schedule::join(requests);
                assert_eq!(pool.state().idle, 1);
            });
        }
        run();
        must_fail_with(Flaw::PoolWaitAfterUnlock, run);
    }
}
