//! Tunnels of other replicas that stay lent between two requests.
//!
//! An ask costs a stream and a round trip. When requests for an agent's method follow each other closely, a
//! tunnel that its owner lends for another request waits here for it, for a moment. It is the owner's, not
//! ours: it goes back when no request comes, when the owner asks for it, leaves, or is not heard well any
//! more.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use cluster::{ReplicaHealth, Tracker};
use ids::{AgentId, ReplicaId};
use tokio::{
    sync::{oneshot, watch},
    time::Instant,
};
use tunnel::kas_end::{Retire, Tunnel, TunnelPool};

/// Requests of one key are close when another one began within this time.
const HOT: Duration = Duration::from_millis(100);
/// A tunnel that no request took goes back after this time, and after at most another [`SWEEP`]: well below
/// the 2 s after which its owner takes it.
const IDLE: Duration = Duration::from_millis(250);
/// How often that is looked after, while there are any.
const SWEEP: Duration = Duration::from_millis(50);
/// How many wait here for requests of one key.
const PER_KEY: usize = 64;
/// How many wait here in all.
const IN_ALL: usize = 512;
/// Requests of one key that wait here; others wait only for what they ask for.
const WAITING: usize = 10_000;
/// A tunnel for which nobody waits goes back after this many requests: asking anew spreads them over all
/// replicas that hold the agent, and over its processes. An ask costs little beside so many.
const ROUNDS: u32 = 128;
/// Keys that are remembered; requests beyond ask each time.
const KEYS: usize = 8_192;

/// What a tunnel is kept for.
type Key = (AgentId, Arc<str>);
type Sender = oneshot::Sender<Taken>;

/// The tunnels that this replica keeps.
pub struct Kept {
    tracker: Arc<dyn Tracker>,
    state: Mutex<State>,
}

impl std::fmt::Debug for Kept {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Kept").field("idle", &self.state().idle).finish_non_exhaustive()
    }
}

#[derive(Default)]
struct State {
    keys: HashMap<Key, Entry>,
    /// Tunnels in all entries.
    idle: usize,
    /// `keys` is swept when it has this many, and was not a moment ago.
    sweep_at: usize,
    swept: Option<Instant>,
    serial: u64,
    sweeping: bool,
    /// This replica leaves: nothing is kept.
    closed: bool,
}

/// What is known of a key.
#[derive(Default)]
struct Entry {
    /// When the two latest requests began.
    begun: Option<Instant>,
    before: Option<Instant>,
    /// The most recently used last.
    idle: Vec<Idle>,
    waiting: BTreeMap<u64, Sender>,
    /// What is thought of the owners; kept while there are tunnels.
    changes: Option<watch::Receiver<()>>,
}

struct Idle {
    tunnel: Arc<Tunnel>,
    holder: Arc<Holder>,
    since: Instant,
}

/// Where a tunnel comes back to.
struct Holder {
    kept: Arc<Kept>,
    key: Key,
    owner: ReplicaId,
    /// How often it came back.
    rounds: AtomicU32,
}

/// A [`Holder`] as its tunnel sees it.
struct Back(Arc<Holder>);

impl TunnelPool for Back {
    fn parked(&self, tunnel: &Arc<Tunnel>) {
        Kept::offer(&self.0, tunnel);
    }

    fn ended(&self, tunnel: &Arc<Tunnel>, _: bool) {
        self.0.kept.forget(&self.0.key, tunnel);
    }
}

/// A tunnel for one request. Dropped without [`Taken::take`], it is kept for the next.
pub struct Taken {
    tunnel: Option<Arc<Tunnel>>,
    holder: Arc<Holder>,
}

impl std::fmt::Debug for Taken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Taken").field("owner", &self.holder.owner).finish_non_exhaustive()
    }
}

impl Taken {
    /// Returns whose it is.
    pub fn owner(&self) -> &ReplicaId {
        &self.holder.owner
    }

    /// Whether the agentk at its end is known to heed whose rights a request is meant for.
    pub fn impersonates(&self) -> bool {
        self.tunnel.as_ref().is_some_and(|tunnel| tunnel.info().impersonates)
    }

    /// Takes the tunnel; `None`: never. It comes back by itself.
    pub fn take(mut self) -> Option<Arc<Tunnel>> {
        self.tunnel.take()
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        if let Some(tunnel) = self.tunnel.take() {
            Kept::offer(&self.holder, &tunnel);
        }
    }
}

/// A place among the requests that wait for what is kept. Dropping it leaves.
#[derive(Debug)]
pub struct Place {
    kept: Arc<Kept>,
    key: Key,
    serial: u64,
    receiver: oneshot::Receiver<Taken>,
}

impl Place {
    /// Waits until a tunnel of the key is free here; maybe for ever.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn handed(&mut self) -> Taken {
        match (&mut self.receiver).await {
            Ok(taken) => taken,
            Err(_) => std::future::pending().await,
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut state = self.kept.state();
        let sender = state.keys.get_mut(&self.key).and_then(|entry| entry.waiting.remove(&self.serial));
        drop(state);
        // What was already handed over is offered again when the receiver drops, outside the lock.
        drop(sender);
    }
}

impl State {
    /// Returns the entry, made if there is room.
    fn entry(&mut self, key: &Key, now: Instant) -> Option<&mut Entry> {
        if !self.keys.contains_key(key) {
            // Not more often than something can have become old.
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

    fn pop(&mut self, key: &Key) -> Option<Taken> {
        let entry = self.keys.get_mut(key)?;
        loop {
            let Idle { tunnel, holder, .. } = entry.idle.pop()?;
            self.idle -= 1;
            // One that is ending is forgotten by its end.
            if tunnel.idle_since().is_some() {
                return Some(Taken { tunnel: Some(tunnel), holder });
            }
        }
    }

    /// Takes out what should go back.
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
    /// Whether another request than the latest one began a moment ago.
    fn is_hot(&self, now: Instant) -> bool {
        self.before.is_some_and(|before| now.duration_since(before) < HOT)
    }

    fn is_over(&self, now: Instant) -> bool {
        let old = self.begun.is_none_or(|begun| now.duration_since(begun) >= HOT);
        old && self.idle.is_empty() && self.waiting.is_empty()
    }

    /// Whether something else may be thought of the owners than when it was last looked at.
    fn is_stale(&self) -> bool {
        self.changes.as_ref().is_some_and(|changes| changes.has_changed().unwrap_or(true))
    }
}

impl Kept {
    /// Keeps nothing yet. `tracker` says how well owners are heard.
    pub fn new(tracker: Arc<dyn Tracker>) -> Arc<Self> {
        Arc::new(Self { tracker, state: Mutex::default() })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A panic under the lock would be a bug in this file; what is left is still consistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A request begins that this replica's own tunnels do not serve: takes the most recently used tunnel.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn take(self: &Arc<Self>, agent: AgentId, method: &Arc<str>) -> Option<Taken> {
        let key = (agent, Arc::clone(method));
        let now = Instant::now();
        {
            let mut state = self.state();
            let entry = state.entry(&key, now)?;
            entry.before = entry.begun.replace(now);
            if !entry.is_stale() {
                return state.pop(&key);
            }
        }
        self.review(&key).await;
        self.state().pop(&key)
    }

    /// Whether requests of this key are so close that a tunnel is worth keeping.
    pub fn is_hot(&self, agent: AgentId, method: &Arc<str>) -> bool {
        let state = self.state();
        let entry = state.keys.get(&(agent, Arc::clone(method)));
        !state.closed && entry.is_some_and(|entry| entry.waiting.len() > 1 || entry.is_hot(Instant::now()))
    }

    /// Takes a tunnel, or a place among those who wait for one; neither when nothing is kept for the key.
    pub fn acquire(self: &Arc<Self>, agent: AgentId, method: &Arc<str>) -> Result<Taken, Option<Place>> {
        let key = (agent, Arc::clone(method));
        let mut state = self.state();
        if let Some(taken) = state.pop(&key) {
            return Ok(taken);
        }
        state.serial += 1;
        let serial = state.serial;
        let Some(entry) = state.entry(&key, Instant::now()) else { return Err(None) };
        if entry.waiting.len() >= WAITING {
            return Err(None);
        }
        let (sender, receiver) = oneshot::channel();
        entry.waiting.insert(serial, sender);
        drop(state);
        Err(Some(Place { kept: Arc::clone(self), key, serial, receiver }))
    }

    /// Returns who takes a tunnel of `owner` back after each request of the key.
    pub fn owner(
        self: &Arc<Self>,
        agent: AgentId,
        method: &Arc<str>,
        owner: &ReplicaId,
    ) -> Arc<dyn TunnelPool> {
        let key = (agent, Arc::clone(method));
        Arc::new(Back(Arc::new(Holder {
            kept: Arc::clone(self),
            key,
            owner: owner.clone(),
            rounds: AtomicU32::new(0),
        })))
    }

    /// A tunnel is free: hands it to who waits first, keeps it for who may come, or gives it back.
    fn offer(holder: &Arc<Holder>, tunnel: &Arc<Tunnel>) {
        if tunnel.idle_since().is_none() {
            return;
        }
        let (kept, key) = (&holder.kept, &holder.key);
        let now = Instant::now();
        let mut state = kept.state();
        let (room, closed) = (state.idle < IN_ALL, state.closed);
        if !closed && let Some(entry) = state.keys.get_mut(key) {
            while let Some((_, sender)) = entry.waiting.pop_first() {
                let taken = Taken { tunnel: Some(Arc::clone(tunnel)), holder: Arc::clone(holder) };
                match sender.send(taken) {
                    Ok(()) => return,
                    // Taken apart, so that it is not offered again by its drop.
                    Err(mut back) => drop(back.tunnel.take()),
                }
            }
            let rounds = holder.rounds.fetch_add(1, Ordering::Relaxed) + 1;
            if room && rounds < ROUNDS && entry.idle.len() < PER_KEY && entry.is_hot(now) {
                if entry.changes.is_none() {
                    let mut changes = kept.tracker.changes(key.0);
                    // Nobody looked since the owner was asked.
                    changes.mark_changed();
                    entry.changes = Some(changes);
                }
                entry.idle.push(Idle { tunnel: Arc::clone(tunnel), holder: Arc::clone(holder), since: now });
                state.idle += 1;
                if !std::mem::replace(&mut state.sweeping, true) {
                    tokio::spawn(Arc::clone(kept).sweep());
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

    /// Gives back what belongs to owners that would not be asked first.
    async fn review(&self, key: &Key) {
        if let Some(entry) = self.state().keys.get_mut(key)
            && let Some(changes) = &mut entry.changes
        {
            changes.mark_unchanged();
        }
        // Marked before it is looked at: what changes meanwhile is looked at again.
        let candidates = self.tracker.locate(key.0).await.unwrap_or_default();
        let live = |owner: &ReplicaId| {
            candidates.iter().any(|c| c.replica.id == *owner && c.health == ReplicaHealth::Live)
        };
        let removed = self.state().remove(|other, idle| other == key && !live(&idle.holder.owner));
        give_back(removed);
    }

    /// Gives back what was not used, and what belongs to owners that are not well, until nothing is kept.
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

    /// Gives everything back and keeps nothing more: this replica leaves.
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
        pin::Pin,
        task::{Context, Poll, Waker},
    };

    use cluster::{InMemoryTracker, Replica};
    use http_body::Body as _;
    use ids::TokenHash;
    use tunnel::kas_end::{AgentKind, Info, TunnelBody};

    use super::*;

    fn agent() -> AgentId {
        AgentId::new(3).unwrap()
    }

    fn kept() -> Arc<Kept> {
        let holder = Replica { id: ReplicaId::new("holder"), address: "127.0.0.1:1".into() };
        Kept::new(Arc::new(InMemoryTracker::new(holder)))
    }

    /// A tunnel of the holder that comes back from a request.
    fn back(kept: &Arc<Kept>, method: &str) -> (Arc<Tunnel>, TunnelBody) {
        let silent = http_body_util::StreamBody::new(futures_util::stream::pending::<
            Result<http_body::Frame<bytes::Bytes>, grpc::BoxError>,
        >());
        let info = Info {
            agent: agent(),
            instance: 0,
            token: TokenHash::of(b"t"),
            kind: AgentKind::Ours,
            impersonates: true,
            descriptor: Arc::default(),
        };
        let owner = kept.owner(agent(), &method.into(), &ReplicaId::new("holder"));
        let body = grpc::boxed(silent);
        let (tunnel, out) = Tunnel::borrowed(info, body, Arc::clone(&owner), Box::new(|| {}), true);
        owner.parked(&tunnel);
        (tunnel, out)
    }

    fn went_back(out: &mut TunnelBody) -> bool {
        let mut cx = Context::from_waker(Waker::noop());
        matches!(Pin::new(out).poll_frame(&mut cx), Poll::Ready(None))
    }

    async fn heat(kept: &Arc<Kept>, method: &str) {
        for _ in 0..2 {
            assert!(kept.take(agent(), &method.into()).await.is_none());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_kept_is_bounded_for_each_key_and_in_all() {
        let kept = kept();
        let mut held = Vec::new();
        for key in 0..=IN_ALL / PER_KEY {
            let method = format!("/s/{key}");
            heat(&kept, &method).await;
            for n in 0..=PER_KEY {
                let (tunnel, mut out) = back(&kept, &method);
                let full = n == PER_KEY || key == IN_ALL / PER_KEY;
                assert_eq!(went_back(&mut out), full, "{key} {n}");
                held.push((tunnel, out));
            }
        }
        assert_eq!(kept.state().idle, IN_ALL);
        kept.close();
        assert_eq!(kept.state().idle, 0);
        assert!(held.iter_mut().all(|(tunnel, _)| tunnel.idle_since().is_none()));
    }

    #[tokio::test(start_paused = true)]
    async fn keys_are_bounded_and_old_ones_are_forgotten() {
        let kept = kept();
        for n in 0..2 * KEYS {
            assert!(kept.take(agent(), &format!("/s/{n}").into()).await.is_none());
        }
        assert_eq!(kept.state().keys.len(), KEYS);
        tokio::time::sleep(HOT).await;
        heat(&kept, "/s/new").await;
        assert!(kept.is_hot(agent(), &"/s/new".into()));
        assert_eq!(kept.state().keys.len(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn who_waits_first_is_served_first_and_who_left_is_passed_over() {
        let kept = kept();
        heat(&kept, "/s/M").await;
        let place = || kept.acquire(agent(), &"/s/M".into()).err().flatten().expect("a place");
        let (mut first, gone, mut second) = (place(), place(), place());
        drop(gone);
        let (_one, _out) = back(&kept, "/s/M");
        let taken = first.handed().await;
        drop(first);
        // Not used after all: the next in the queue has it.
        drop(taken);
        let taken = second.handed().await;
        assert_eq!(taken.owner().as_str(), "holder");
        // Handed over to one who leaves without looking: it is kept.
        drop(taken);
        let left = place_of(&kept);
        assert!(left.is_ok(), "it is idle again");
    }

    fn place_of(kept: &Arc<Kept>) -> Result<Taken, Option<Place>> {
        kept.acquire(agent(), &"/s/M".into())
    }

    #[tokio::test(start_paused = true)]
    async fn what_was_handed_to_a_request_that_left_is_kept() {
        let kept = kept();
        heat(&kept, "/s/M").await;
        let place = place_of(&kept).err().flatten().expect("a place");
        let (_tunnel, _out) = back(&kept, "/s/M");
        assert_eq!(kept.state().idle, 0, "it was handed over");
        drop(place);
        assert_eq!(kept.state().idle, 1);
    }
}
