//! The tunnels that this replica holds, and the requests that wait for one.
//!
//! One lock guards each agent's tunnels and waiters together, so that a request either finds an
//! idle tunnel or is in the queue when the next one parks: no wake-up is lost. Agents are spread
//! over shards. While a shard is locked only two things are called: the wake-up of a waiter, and the
//! tracker, when an agent comes or goes: so that "not here", and where the announcements stand when it is
//! said, are one observation. The tracker has its own lock and never calls back.
//!
//! Other replicas wait here too. Of those who can use a tunnel, this replica's own requests and each
//! other replica take turns; within one of them the first comes first.
//!
//! A replica that asks often may keep a tunnel between two requests ([`Loan`]), as long as nobody else waits
//! for it: who begins to wait has one asked back.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use cluster::{Lease, Mark, Tracker};
use futures_util::task::AtomicWaker;
use ids::{AgentId, ConnectionId, ReplicaId};
use tokio::{sync::oneshot, time::Instant};
use tunnel::kas_end::{Descriptor, Retire, Tunnel, TunnelPool};

use crate::routing::{metrics::RequestMetrics, rate_limit::RateLimit};

const SHARDS: usize = 16;
/// An agent stays present this long after its last tunnel closed: the tunnels of GitLab's agents
/// end with each request, and must not make the agent flap in the table. Its processes are remembered
/// as long, so that a request which names one is not refused between two of its tunnels.
const LINGER: Duration = Duration::from_secs(5);

/// Bounds of what callers and agents can make grow.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Requests that may wait for one agent.
    pub waiters_per_agent: usize,
    /// Requests that may wait in all.
    pub waiters: usize,
    /// Tunnels of one agent.
    pub tunnels_per_agent: usize,
}

/// Why a request cannot have a tunnel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// The agent is here, and none of its tunnels, or of those of the connection asked for, serves the
    /// method.
    Unimplemented,
    /// The agent is here, but the connection asked for is not.
    OtherConnection,
    /// The agent is here, and some of its tunnels cannot be told apart: the connection asked for may be among
    /// theirs.
    Untied,
    /// Too many requests wait already.
    Full,
    /// For another replica: no tunnel of the agent is here.
    NotHere(Mark),
    /// For another replica: no tunnel is idle, and this replica leaves.
    Draining,
}

/// Why a wait ended without a tunnel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gone {
    /// This replica leaves.
    Leaving,
    /// For another replica: the agent is not here any more.
    NotHere(Mark),
    /// What could have served it is gone, and the agent is still here: whoever asks now is refused so.
    Refused(Refused),
}

/// Who waits: this replica's own requests (`None`), or those of another one.
type Source = Option<ReplicaId>;
type Sender = oneshot::Sender<Result<Grant, Gone>>;

/// What became of the wish for a tunnel.
#[derive(Debug)]
pub enum Acquired {
    /// Here it is.
    Now(Grant),
    /// None is idle: wait.
    Wait(Waiting),
}

/// The tunnels of this replica.
pub struct TunnelRegistry {
    shards: [Mutex<HashMap<AgentId, Agent>>; SHARDS],
    tracker: Arc<dyn Tracker>,
    metrics: Arc<RequestMetrics>,
    limits: Limits,
    waiters: AtomicUsize,
    draining: AtomicBool,
    sweepers: AtomicU64,
}

impl std::fmt::Debug for TunnelRegistry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TunnelRegistry").field("limits", &self.limits).finish_non_exhaustive()
    }
}

#[derive(Default)]
struct Agent {
    instances: Vec<Instance>,
    tunnels: usize,
    /// Open transport connections of the agent: one of its pods may leave while another stays.
    transports: usize,
    queues: HashMap<QueueKey, BTreeMap<u64, Sender>>,
    waiters: usize,
    /// What other replicas keep between two requests, the longest first.
    lent: Vec<Arc<Recall>>,
    serial: u64,
    /// When each source was last served, in grants.
    turns: HashMap<Source, u64>,
    grants: u64,
    lease: Option<Lease>,
    /// Since when it lingers: it is announced and has no tunnel.
    empty: Option<Instant>,
    /// The one task that ends lingers of this entry, so that what an agent opens and closes costs no task
    /// each. The serial tells it from that of an entry which was here before.
    sweeper: Option<u64>,
}

/// Who waits, and what it accepts.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct QueueKey {
    source: Source,
    method: Arc<str>,
    connection: Option<ConnectionId>,
}

/// One agentk process, or one transport connection where that is not known.
struct Instance {
    id: u64,
    connection: Option<ConnectionId>,
    /// What its newest tunnel listed.
    descriptor: Arc<Descriptor>,
    busy: usize,
    /// The most recently used last: it is handed out first, so that a pool can shrink.
    idle: Vec<Arc<Tunnel>>,
    /// Since when it lingers: it has no tunnel, and may open the next one.
    empty: Option<Instant>,
    /// Its transport connection is closed: it opens no more.
    closed: bool,
}

impl Agent {
    fn instance(&mut self, id: u64) -> &mut Instance {
        let at = self.instances.iter().position(|i| i.id == id).unwrap_or_else(|| {
            self.instances.push(Instance {
                id,
                connection: None,
                descriptor: Arc::default(),
                busy: 0,
                idle: Vec::new(),
                empty: None,
                closed: false,
            });
            self.instances.len() - 1
        });
        &mut self.instances[at]
    }

    /// Only [`TunnelRegistry::insert`] makes an instance: one made for a tunnel that has ended
    /// would never be counted out.
    fn find(&mut self, id: u64) -> Option<&mut Instance> {
        self.instances.iter_mut().find(|i| i.id == id)
    }

    /// Takes the best idle tunnel: of the process with the fewest busy ones, so that pods share the
    /// work.
    fn take(&mut self, method: &str, connection: Option<ConnectionId>) -> Option<Arc<Tunnel>> {
        let serves = |tunnel: &Arc<Tunnel>| tunnel.info().descriptor.serves(method);
        let best = self
            .instances
            .iter_mut()
            .filter(|i| connection.is_none() || i.connection == connection)
            .filter(|i| i.idle.iter().any(serves))
            .min_by_key(|i| i.busy)?;
        let at = best.idle.iter().rposition(serves)?;
        best.busy += 1;
        Some(best.idle.remove(at))
    }

    /// Gives a tunnel that became idle to the waiter that came first of those it can serve.
    /// Returns it when nobody wants it.
    fn offer(&mut self, grant: Grant) -> Option<Grant> {
        let mut grant = grant;
        loop {
            let info = grant.tunnel().info();
            let tied = self.instances.iter().find(|i| i.id == info.instance).and_then(|i| i.connection);
            let key = self
                .queues
                .iter()
                .filter(|(key, _)| key.connection.is_none() || key.connection == tied)
                .filter(|(key, _)| info.descriptor.serves(&key.method))
                .filter_map(|(key, queue)| queue.first_key_value().map(|(serial, _)| (*serial, key)))
                .min_by_key(|(serial, key)| (self.turns.get(&key.source).copied().unwrap_or(0), *serial))
                .map(|(_, key)| key.clone());
            let Some(key) = key else { return Some(grant) };
            let sender = self.queues.get_mut(&key).and_then(|queue| queue.pop_first());
            self.waiters -= 1;
            self.grants += 1;
            self.turns.insert(key.source.clone(), self.grants);
            if self.queues.get(&key).is_some_and(BTreeMap::is_empty) {
                self.forget(&key);
            }
            match sender.map(|(_, sender)| sender.send(Ok(grant))) {
                Some(Err(Ok(back))) => grant = back,
                Some(Ok(()) | Err(Err(_))) | None => return None,
            }
        }
    }

    /// Whether a tunnel can serve those who wait in the queue `key`.
    fn is_wanted(&self, tunnel: &Tunnel, key: &QueueKey) -> bool {
        let info = tunnel.info();
        let tied = || self.instances.iter().find(|i| i.id == info.instance).and_then(|i| i.connection);
        info.descriptor.serves(&key.method) && (key.connection.is_none() || key.connection == tied())
    }

    /// Asks for one tunnel back that can serve those who wait in the queue `key`.
    fn recall_for(&self, key: &QueueKey) {
        for lent in &self.lent {
            // A replica gives what it keeps to its own requests of the same kind first: they crossed this.
            let own = key.source.as_ref() == Some(&lent.borrower.replica)
                && key.method == lent.borrower.method
                && key.connection.is_none();
            // One that has ended is on its way back already, and would serve nobody.
            let lives = lent.tunnel.idle_since().is_some();
            if !own && lives && self.is_wanted(&lent.tunnel, key) && lent.ask() {
                return;
            }
        }
    }

    /// Removes an empty queue, and the turn of a source that waits no longer.
    fn forget(&mut self, key: &QueueKey) {
        self.queues.remove(key);
        if !self.queues.keys().any(|other| other.source == key.source) {
            self.turns.remove(&key.source);
        }
    }

    /// Takes all waiters of other replicas out.
    fn take_remote(&mut self) -> Vec<Sender> {
        let remote: Vec<QueueKey> = self.queues.keys().filter(|key| key.source.is_some()).cloned().collect();
        let mut senders = Vec::new();
        for key in remote {
            let queue = self.queues.remove(&key).unwrap_or_default();
            self.waiters -= queue.len();
            senders.extend(queue.into_values());
        }
        self.turns.retain(|source, _| source.is_none());
        senders
    }

    /// Notes that an instance has no tunnel; whether one was dropped. It lingers, unless it cannot come back;
    /// of too many the one that has lingered longest makes room: as many may linger as may have tunnels.
    fn emptied(&mut self, id: u64, most: usize) -> bool {
        let Some(instance) = self.find(id) else { return false };
        let dropped = if instance.closed {
            Some(id)
        } else {
            instance.empty = Some(Instant::now());
            let lingering = || self.instances.iter().filter(|i| i.empty.is_some());
            (lingering().count() > most).then(|| lingering().min_by_key(|i| i.empty).map(|i| i.id)).flatten()
        };
        self.instances.retain(|i| Some(i.id) != dropped);
        dropped.is_some()
    }

    /// Why no tunnel of the agent will serve a request, as far as that is known. Nothing is while it has none
    /// at all: what comes back first says nothing of the others.
    fn refuses(&self, method: &str, connection: Option<ConnectionId>) -> Option<Refused> {
        if self.tunnels == 0 {
            return None;
        }
        let tied = |i: &&Instance| connection.is_none() || i.connection == connection;
        let mut instances = self.instances.iter().filter(tied).peekable();
        if connection.is_some() && instances.peek().is_none() {
            let untied = self.instances.iter().any(|i| i.connection.is_none());
            return Some(if untied { Refused::Untied } else { Refused::OtherConnection });
        }
        (!instances.any(|i| i.descriptor.serves(method))).then_some(Refused::Unimplemented)
    }

    /// Takes out those who wait for what is not here any more.
    fn take_stranded(&mut self) -> Vec<(Sender, Refused)> {
        let refused = |key: &QueueKey| Some((key.clone(), self.refuses(&key.method, key.connection)?));
        let stranded: Vec<(QueueKey, Refused)> = self.queues.keys().filter_map(refused).collect();
        let mut senders = Vec::new();
        for (key, refused) in stranded {
            let queue = self.queues.remove(&key).unwrap_or_default();
            self.waiters -= queue.len();
            senders.extend(queue.into_values().map(|sender| (sender, refused)));
            self.forget(&key);
        }
        senders
    }

    /// When the next linger ends.
    fn next_end(&self) -> Option<Instant> {
        let instances = self.instances.iter().filter_map(|i| i.empty);
        instances.chain(self.empty).min().map(|since| since + LINGER)
    }

    fn is_present(&self) -> bool {
        self.tunnels > 0 || self.lease.is_some()
    }

    fn is_unused(&self) -> bool {
        self.tunnels == 0 && self.waiters == 0 && self.lease.is_none() && self.transports == 0
    }
}

/// A tunnel for one request. Dropped without [`Grant::take`], it goes back unused.
pub struct Grant {
    tunnel: Option<Arc<Tunnel>>,
    registry: Arc<TunnelRegistry>,
}

impl std::fmt::Debug for Grant {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Grant").field(&self.tunnel).finish()
    }
}

impl Grant {
    /// Returns the tunnel, which stays granted.
    pub fn tunnel(&self) -> &Arc<Tunnel> {
        self.tunnel.as_ref().expect("a grant holds its tunnel until it is taken or dropped")
    }

    /// Takes the tunnel: from now on it comes back by parking.
    pub fn take(mut self) -> Arc<Tunnel> {
        self.tunnel.take().expect("a grant holds its tunnel until it is taken or dropped")
    }

    /// Takes the tunnel apart from the grant without giving it back: the caller counts it.
    fn dissolve(mut self) -> Arc<Tunnel> {
        self.tunnel.take().expect("a grant holds its tunnel until it is taken or dropped")
    }
}

impl Drop for Grant {
    fn drop(&mut self) {
        if let Some(tunnel) = self.tunnel.take() {
            self.registry.free(&tunnel);
        }
    }
}

/// Who keeps a tunnel between two requests, and for what.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Borrower {
    /// The other replica.
    pub replica: ReplicaId,
    /// The method of its requests.
    pub method: Arc<str>,
}

/// A question to the borrower of a tunnel: whether it gives it back.
struct Recall {
    tunnel: Arc<Tunnel>,
    borrower: Borrower,
    asked: AtomicBool,
    waker: AtomicWaker,
}

impl Recall {
    /// Asks; returns whether it had not been asked before.
    fn ask(&self) -> bool {
        if self.asked.swap(true, Ordering::AcqRel) {
            return false;
        }
        self.waker.wake();
        true
    }
}

/// A tunnel that another replica keeps between two requests. Dropped, it goes to those who wait, or is idle
/// again.
pub struct Loan {
    grant: Grant,
    recall: Arc<Recall>,
}

impl std::fmt::Debug for Loan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Loan").field(&self.grant).finish()
    }
}

impl Loan {
    /// Returns the tunnel, which stays lent.
    pub fn tunnel(&self) -> &Arc<Tunnel> {
        &self.recall.tunnel
    }

    /// Ready once it is to be asked back. For one task.
    pub fn poll_recalled(&self, cx: &Context<'_>) -> Poll<()> {
        self.recall.waker.register(cx.waker());
        if self.recall.asked.load(Ordering::Acquire) { Poll::Ready(()) } else { Poll::Pending }
    }

    /// Takes the tunnel for the borrower's next request: from then on it comes back by parking, or stays lent
    /// again.
    pub fn take(mut self) -> Arc<Tunnel> {
        self.forget();
        // The grant stays behind empty.
        match self.grant.tunnel.take() {
            Some(tunnel) => tunnel,
            None => Arc::clone(&self.recall.tunnel),
        }
    }

    fn forget(&self) {
        let agent = self.recall.tunnel.info().agent;
        if let Some(entry) = self.grant.registry.shard(agent).get_mut(&agent)
            && let Some(at) = entry.lent.iter().position(|lent| Arc::ptr_eq(lent, &self.recall))
        {
            entry.lent.remove(at);
        }
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        // Nothing is left to do for one that was taken.
        if self.grant.tunnel.is_some() {
            self.forget();
            self.recall.tunnel.cancel_reservation();
            // And the grant frees it.
        }
    }
}

/// A place in the queue. Dropping it leaves the queue.
#[derive(Debug)]
pub struct Waiting {
    registry: Arc<TunnelRegistry>,
    agent: AgentId,
    key: QueueKey,
    serial: u64,
    receiver: oneshot::Receiver<Result<Grant, Gone>>,
}

impl Waiting {
    /// Waits for a tunnel.
    ///
    /// # Errors
    /// [`Gone`]: none will come.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn granted(&mut self) -> Result<Grant, Gone> {
        (&mut self.receiver).await.unwrap_or(Err(Gone::Leaving))
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.registry.waiters.fetch_sub(1, Ordering::Relaxed);
        self.registry.metrics.waiters.dec();
        let mut shard = self.registry.shard(self.agent);
        if let Some(agent) = shard.get_mut(&self.agent) {
            let mut sender = None;
            if let Some(queue) = agent.queues.get_mut(&self.key) {
                sender = queue.remove(&self.serial);
                if queue.is_empty() {
                    agent.forget(&self.key);
                }
            }
            if sender.is_some() {
                agent.waiters -= 1;
            }
            if agent.is_unused() {
                shard.remove(&self.agent);
            }
        }
        drop(shard);
        // A grant that was already sent goes back when the receiver drops, outside the lock.
    }
}

impl TunnelRegistry {
    /// Makes an empty registry that announces agents to `tracker`.
    pub fn new(tracker: Arc<dyn Tracker>, metrics: Arc<RequestMetrics>, limits: Limits) -> Arc<Self> {
        Arc::new(Self {
            shards: Default::default(),
            tracker,
            metrics,
            limits,
            waiters: AtomicUsize::new(0),
            draining: AtomicBool::new(false),
            sweepers: AtomicU64::new(0),
        })
    }

    /// Returns the metrics of requests and tunnels.
    pub fn metrics(&self) -> &Arc<RequestMetrics> {
        &self.metrics
    }

    fn shard(&self, agent: AgentId) -> MutexGuard<'_, HashMap<AgentId, Agent>> {
        let index = (agent.get() as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 60;
        // A panic under the lock would be a bug in this file; what is left is still consistent.
        self.shards[index as usize % SHARDS].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes an idle tunnel of `agent` that serves `method`.
    pub fn take(
        self: &Arc<Self>,
        agent: AgentId,
        method: &str,
        connection: Option<ConnectionId>,
    ) -> Option<Grant> {
        let tunnel = self.shard(agent).get_mut(&agent)?.take(method, connection)?;
        Some(Grant { tunnel: Some(tunnel), registry: Arc::clone(self) })
    }

    /// Takes an idle tunnel of `agent` that serves `method`, or a place in the queue.
    ///
    /// # Errors
    /// See [`Refused`].
    pub fn acquire(
        self: &Arc<Self>,
        agent: AgentId,
        method: &Arc<str>,
        connection: Option<ConnectionId>,
    ) -> Result<Acquired, Refused> {
        self.acquire_from(None, agent, method, connection)
    }

    /// As [`acquire`](Self::acquire), for a request that stands on another replica: it waits here only
    /// while the agent is present and this replica stays.
    ///
    /// # Errors
    /// See [`Refused`].
    pub fn acquire_for(
        self: &Arc<Self>,
        replica: &ReplicaId,
        agent: AgentId,
        method: &Arc<str>,
        connection: Option<ConnectionId>,
    ) -> Result<Acquired, Refused> {
        self.acquire_from(Some(replica.clone()), agent, method, connection)
    }

    fn acquire_from(
        self: &Arc<Self>,
        source: Source,
        agent: AgentId,
        method: &Arc<str>,
        connection: Option<ConnectionId>,
    ) -> Result<Acquired, Refused> {
        let mut shard = self.shard(agent);
        if source.is_some() && !shard.get(&agent).is_some_and(Agent::is_present) {
            return Err(Refused::NotHere(self.tracker.mark()));
        }
        if let Some(entry) = shard.get_mut(&agent) {
            if let Some(tunnel) = entry.take(method, connection) {
                return Ok(Acquired::Now(Grant { tunnel: Some(tunnel), registry: Arc::clone(self) }));
            }
            if let Some(refused) = entry.refuses(method, connection) {
                return Err(refused);
            }
            if source.is_some() && self.draining.load(Ordering::Relaxed) {
                return Err(Refused::Draining);
            }
            if entry.waiters >= self.limits.waiters_per_agent {
                return Err(Refused::Full);
            }
        }
        if self.waiters.fetch_add(1, Ordering::Relaxed) >= self.limits.waiters {
            self.waiters.fetch_sub(1, Ordering::Relaxed);
            return Err(Refused::Full);
        }
        self.metrics.waiters.inc();
        let entry = shard.entry(agent).or_default();
        entry.serial += 1;
        entry.waiters += 1;
        let (serial, key) = (entry.serial, QueueKey { source, method: Arc::clone(method), connection });
        let (sender, receiver) = oneshot::channel();
        entry.queues.entry(key.clone()).or_default().insert(serial, sender);
        entry.recall_for(&key);
        drop(shard);
        Ok(Acquired::Wait(Waiting { registry: Arc::clone(self), agent, key, serial, receiver }))
    }

    /// Lets `borrower` keep a tunnel whose request is over and which is still counted as busy. `None`: it is
    /// not free, or somebody waits for it, or this replica leaves. Also when it is the borrower who waits:
    /// its ask stands here already, and to answer it costs less than to have it taken back.
    pub fn keep(self: &Arc<Self>, tunnel: &Arc<Tunnel>, borrower: &Borrower) -> Option<Loan> {
        let agent = tunnel.info().agent;
        let mut shard = self.shard(agent);
        let entry = shard.get_mut(&agent)?;
        if self.draining.load(Ordering::Relaxed)
            || tunnel.idle_since().is_none()
            || entry.queues.keys().any(|key| entry.is_wanted(tunnel, key))
        {
            return None;
        }
        let recall = Arc::new(Recall {
            tunnel: Arc::clone(tunnel),
            borrower: borrower.clone(),
            asked: AtomicBool::new(false),
            waker: AtomicWaker::new(),
        });
        entry.lent.push(Arc::clone(&recall));
        drop(shard);
        let grant = Grant { tunnel: Some(Arc::clone(tunnel)), registry: Arc::clone(self) };
        Some(Loan { grant, recall })
    }

    /// Whether one more tunnel of `agent` may be registered.
    pub fn has_room(&self, agent: AgentId) -> bool {
        self.shard(agent).get(&agent).is_none_or(|entry| entry.tunnels < self.limits.tunnels_per_agent)
    }

    /// Registers a tunnel that has just been opened. `connection`: the configuration stream it is
    /// tied to, where that is known.
    pub fn insert(self: &Arc<Self>, tunnel: &Arc<Tunnel>, connection: Option<ConnectionId>) {
        let info = tunnel.info();
        self.metrics.tunnels.inc();
        let mut shard = self.shard(info.agent);
        let entry = shard.entry(info.agent).or_default();
        entry.tunnels += 1;
        let first = entry.tunnels == 1 && entry.lease.is_none();
        entry.empty = None;
        let instance = entry.instance(info.instance);
        instance.connection = connection.or(instance.connection);
        instance.descriptor = Arc::clone(&info.descriptor);
        instance.empty = None;
        // Counted as busy until it is offered.
        instance.busy += 1;
        if first {
            let methods: Arc<[Box<str>]> = info.descriptor.methods().map(Into::into).collect();
            entry.lease = Some(self.tracker.route(info.agent, methods));
        }
        drop(shard);
        self.free(tunnel);
    }

    /// Ties the tunnels of one process to its configuration stream, or unties them.
    pub fn tie(&self, agent: AgentId, instance: u64, connection: Option<ConnectionId>) {
        let mut shard = self.shard(agent);
        let Some(entry) = shard.get_mut(&agent) else { return };
        let Some(instance) = entry.find(instance) else { return };
        instance.connection = connection;
        let stranded = entry.take_stranded();
        drop(shard);
        strand(stranded);
    }

    /// A tunnel is idle again: offers it to waiters, then keeps it.
    fn free(self: &Arc<Self>, tunnel: &Arc<Tunnel>) {
        let info = tunnel.info();
        let mut shard = self.shard(info.agent);
        // One that is ending stays counted as busy until `remove`, or has been counted out by it.
        if tunnel.idle_since().is_none() {
            return;
        }
        let Some(entry) = shard.get_mut(&info.agent) else { return };
        let grant = Grant { tunnel: Some(Arc::clone(tunnel)), registry: Arc::clone(self) };
        let Some(grant) = entry.offer(grant) else { return };
        let tunnel = grant.dissolve();
        if let Some(instance) = entry.find(info.instance) {
            instance.busy = instance.busy.saturating_sub(1);
            instance.idle.push(tunnel);
        }
    }

    /// A tunnel is over.
    fn remove(self: &Arc<Self>, tunnel: &Arc<Tunnel>) {
        let info = tunnel.info();
        self.metrics.tunnels.dec();
        let mut shard = self.shard(info.agent);
        let Some(entry) = shard.get_mut(&info.agent) else { return };
        let mut dropped = false;
        if let Some(instance) = entry.find(info.instance) {
            match instance.idle.iter().position(|idle| Arc::ptr_eq(idle, tunnel)) {
                Some(at) => drop(instance.idle.remove(at)),
                None => instance.busy = instance.busy.saturating_sub(1),
            }
            if instance.busy == 0 && instance.idle.is_empty() {
                dropped = entry.emptied(info.instance, self.limits.tunnels_per_agent);
            }
        }
        entry.tunnels -= 1;
        if entry.tunnels == 0 && entry.transports == 0 {
            // Its last connection was closed before its streams ended: there is none on which it could come
            // back.
            return self.leave(info.agent, shard);
        }
        if entry.tunnels == 0 {
            entry.empty = Some(Instant::now());
        }
        let stranded = if dropped { entry.take_stranded() } else { Vec::new() };
        if entry.sweeper.is_none()
            && let Some(at) = entry.next_end()
        {
            let serial = self.sweepers.fetch_add(1, Ordering::Relaxed);
            entry.sweeper = Some(serial);
            tokio::spawn(Arc::clone(self).sweep(info.agent, serial, at));
        }
        drop(shard);
        strand(stranded);
    }

    /// Ends the lingers of an agent, the first of them at `at`, until there is none.
    async fn sweep(self: Arc<Self>, agent: AgentId, serial: u64, at: Instant) {
        let mut at = at;
        loop {
            tokio::time::sleep_until(at).await;
            match self.expire(agent, serial) {
                Some(next) => at = next,
                None => return,
            }
        }
    }

    /// Ends the lingers that are over; returns when the next one will be.
    fn expire(&self, agent: AgentId, serial: u64) -> Option<Instant> {
        let mut shard = self.shard(agent);
        let entry = shard.get_mut(&agent).filter(|entry| entry.sweeper == Some(serial))?;
        let now = Instant::now();
        let over = |since: Option<Instant>| since.is_some_and(|since| now.duration_since(since) >= LINGER);
        entry.instances.retain(|instance| !over(instance.empty));
        let stranded = entry.take_stranded();
        let absent = over(entry.empty);
        if absent {
            entry.empty = None;
        }
        let next = entry.next_end();
        if next.is_none() {
            entry.sweeper = None;
        }
        if absent {
            self.leave(agent, shard);
        } else {
            drop(shard);
        }
        strand(stranded);
        next
    }

    /// A transport connection of the agent was authenticated.
    pub fn transport_opened(&self, agent: AgentId) {
        self.shard(agent).entry(agent).or_default().transports += 1;
    }

    /// A transport connection of the agent is gone; without another one and without tunnels the agent is
    /// present no longer. `instance`: the one that stood for the connection.
    pub fn transport_closed(&self, agent: AgentId, instance: u64) {
        let mut shard = self.shard(agent);
        let Some(entry) = shard.get_mut(&agent) else { return };
        entry.transports = entry.transports.saturating_sub(1);
        if let Some(instance) = entry.find(instance) {
            instance.closed = true;
        }
        entry.instances.retain(|i| !(i.closed && i.empty.is_some()));
        let stranded = entry.take_stranded();
        if entry.transports == 0 {
            self.leave(agent, shard);
        } else {
            drop(shard);
        }
        strand(stranded);
    }

    /// The agent is here no longer, unless it has a tunnel.
    fn leave(&self, agent: AgentId, shard: MutexGuard<'_, HashMap<AgentId, Agent>>) {
        let mut shard = shard;
        let Some(entry) = shard.get_mut(&agent) else { return };
        if entry.tunnels > 0 {
            return;
        }
        // None of them has a tunnel.
        entry.instances.clear();
        entry.empty = None;
        // Withdrawn under the lock: what is said to other replicas from now on is newer.
        drop(entry.lease.take());
        let waiting = entry.take_remote();
        let mark = self.tracker.mark();
        if entry.is_unused() {
            shard.remove(&agent);
        }
        drop(shard);
        for sender in waiting {
            let _ = sender.send(Err(Gone::NotHere(mark)));
        }
    }

    /// Takes `tunnel` out of use: at once when it is idle, else after its request; what is lent is asked back
    /// first.
    pub fn retire(&self, tunnel: &Arc<Tunnel>, how: Retire) {
        let info = tunnel.info();
        if let Some(entry) = self.shard(info.agent).get_mut(&info.agent)
            && let Some(instance) = entry.find(info.instance)
            && let Some(at) = instance.idle.iter().position(|idle| Arc::ptr_eq(idle, tunnel))
        {
            instance.idle.remove(at);
            instance.busy += 1;
        }
        tunnel.retire(how);
        if let Some(entry) = self.shard(info.agent).get(&info.agent)
            && let Some(lent) = entry.lent.iter().find(|lent| Arc::ptr_eq(&lent.tunnel, tunnel))
        {
            lent.ask();
        }
    }

    /// This replica leaves soon: requests of other replicas wait here no longer, and what they keep is asked
    /// back.
    pub fn drain(&self) {
        self.draining.store(true, Ordering::Relaxed);
        for shard in &self.shards {
            let mut shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
            // The senders drop outside the iteration; each waiter counts itself out.
            let waiting: Vec<Sender> = shard.values_mut().flat_map(Agent::take_remote).collect();
            for lent in shard.values().flat_map(|agent| &agent.lent) {
                lent.ask();
            }
            drop(shard);
            for sender in waiting {
                let _ = sender.send(Err(Gone::Leaving));
            }
        }
    }

    /// Tunnels of an agent, idle and busy, and requests that wait for one.
    pub fn counts(&self, agent: AgentId) -> (usize, usize, usize) {
        self.shard(agent).get(&agent).map_or((0, 0, 0), |entry| {
            let idle = entry.instances.iter().map(|i| i.idle.len()).sum();
            (idle, entry.tunnels.saturating_sub(idle), entry.waiters)
        })
    }

    /// Sends every waiter away: this replica leaves now.
    pub fn refuse_waiters(&self) {
        for shard in &self.shards {
            let mut shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
            for agent in shard.values_mut() {
                agent.waiters = 0;
                // The senders drop; each waiter counts itself out.
                agent.queues.clear();
            }
        }
    }

    /// Whether a request of another replica may still find a tunnel of the agent here.
    pub fn may_serve(&self, agent: AgentId) -> bool {
        !self.draining.load(Ordering::Relaxed) && self.holds(agent)
    }

    /// Whether this replica holds a tunnel of the agent now.
    pub fn holds(&self, agent: AgentId) -> bool {
        self.shard(agent).get(&agent).is_some_and(|entry| entry.tunnels > 0)
    }
}

/// Tells those who wait in vain, outside the lock.
fn strand(stranded: Vec<(Sender, Refused)>) {
    for (sender, refused) in stranded {
        let _ = sender.send(Err(Gone::Refused(refused)));
    }
}

/// The registry as tunnels see it.
#[derive(Debug)]
pub struct RegistryPool {
    /// Where tunnels go.
    pub registry: Arc<TunnelRegistry>,
    /// What agents' tokens are charged.
    pub rate_limit: Arc<RateLimit>,
}

impl TunnelPool for RegistryPool {
    fn parked(&self, tunnel: &Arc<Tunnel>) {
        self.registry.free(tunnel);
    }

    fn ended(&self, tunnel: &Arc<Tunnel>, wasted: bool) {
        if wasted {
            self.rate_limit.charge(tunnel.info().token);
        }
        self.registry.remove(tunnel);
    }

    fn violated(&self, tunnel: &Arc<Tunnel>, what: &str) {
        self.registry.metrics.tunnel_violations.inc();
        tracing::debug!(agent.id = tunnel.info().agent.get(), reason = what, "tunnel reset");
    }

    fn dropped(&self, count: usize) {
        self.registry.metrics.answer_values_dropped.inc_by(count as u64);
    }
}

#[cfg(test)]
mod tests {
    use cluster::{InMemoryTracker, Replica};
    use ids::TokenHash;
    use prometheus_client::registry::Registry;
    use tunnel::kas_end::{AgentKind, Info, Opening, TunnelBody};

    use super::*;

    const METHOD: &str = "/s/M";

    struct Lab {
        registry: Arc<TunnelRegistry>,
        /// What HTTP/2 would hold.
        bodies: Vec<TunnelBody>,
    }

    fn agent() -> AgentId {
        AgentId::new(3).unwrap()
    }

    fn id(connection: i64) -> Option<ConnectionId> {
        Some(ConnectionId::new(connection).unwrap())
    }

    fn lab() -> Lab {
        let me = Replica { id: ReplicaId::new("me"), address: "127.0.0.1:1".into() };
        let metrics = Arc::new(RequestMetrics::new(&mut Registry::default()));
        let limits = Limits { waiters_per_agent: 100, waiters: 100, tunnels_per_agent: 100 };
        let registry = TunnelRegistry::new(Arc::new(InMemoryTracker::new(me)), metrics, limits);
        registry.transport_opened(agent());
        Lab { registry, bodies: Vec::new() }
    }

    impl Lab {
        /// An agent that says nothing opens a tunnel.
        fn tunnel(&mut self) {
            self.tunnel_of(1, None);
        }

        /// The process `instance` opens a tunnel, tied to `connection`.
        fn tunnel_of(&mut self, instance: u64, connection: Option<ConnectionId>) {
            self.tunnel_for(METHOD, instance, connection);
        }

        /// As [`tunnel_of`](Self::tunnel_of), for another method.
        fn tunnel_for(&mut self, method: &str, instance: u64, connection: Option<ConnectionId>) {
            let silent = http_body_util::StreamBody::new(futures_util::stream::pending::<
                Result<http_body::Frame<bytes::Bytes>, grpc::BoxError>,
            >());
            let info = Info {
                agent: agent(),
                instance,
                token: TokenHash::of(b"t"),
                kind: AgentKind::Ours,
                impersonates: true,
                descriptor: Arc::new(Descriptor::of(&[method])),
            };
            let owner = Arc::new(RegistryPool {
                registry: Arc::clone(&self.registry),
                rate_limit: Arc::new(RateLimit::new(100, 1_000)),
            });
            let opening = Opening::new(grpc::boxed(silent), false);
            let (tunnel, body) = Tunnel::new(info, opening, owner, Box::new(|| {}));
            self.registry.insert(&tunnel, connection);
            self.bodies.push(body);
        }

        fn ask_for(&self, source: Option<&str>, connection: i64) -> Result<Acquired, Refused> {
            let method = Arc::from(METHOD);
            match source {
                None => self.registry.acquire(agent(), &method, id(connection)),
                Some(replica) => {
                    self.registry.acquire_for(&ReplicaId::new(replica), agent(), &method, id(connection))
                }
            }
        }

        fn wait_for(&self, source: Option<&str>, connection: i64) -> Waiting {
            match self.ask_for(source, connection) {
                Ok(Acquired::Wait(waiting)) => waiting,
                other => panic!("{other:?}"),
            }
        }

        fn instances(&self) -> usize {
            self.registry.shard(agent()).get(&agent()).map_or(0, |entry| entry.instances.len())
        }

        fn ask(&self, source: Option<&str>) -> Result<Acquired, Refused> {
            let method = Arc::from(METHOD);
            match source {
                None => self.registry.acquire(agent(), &method, None),
                Some(replica) => self.registry.acquire_for(&ReplicaId::new(replica), agent(), &method, None),
            }
        }

        fn wait(&self, source: Option<&str>) -> Waiting {
            match self.ask(source) {
                Ok(Acquired::Wait(waiting)) => waiting,
                other => panic!("{other:?}"),
            }
        }
    }

    #[tokio::test]
    async fn own_requests_and_each_other_replica_take_turns() {
        let mut lab = lab();
        lab.tunnel();
        let Ok(Acquired::Now(mut grant)) = lab.ask(None) else { panic!("a tunnel is idle") };
        let names = ["own 1", "own 2", "own 3", "a 1", "a 2", "b 1"];
        let sources = [None, None, None, Some("a"), Some("a"), Some("b")];
        let mut waiting: Vec<_> =
            names.iter().zip(sources).map(|(name, source)| (*name, lab.wait(source))).collect();
        let mut order = Vec::new();
        while !waiting.is_empty() {
            drop(grant);
            let (at, next) = {
                let all = waiting.iter_mut().map(|(_, waiting)| Box::pin(waiting.granted()));
                let (granted, at, _) = futures_util::future::select_all(all).await;
                (at, granted.unwrap())
            };
            order.push(waiting.remove(at).0);
            grant = next;
        }
        assert_eq!(order, ["own 1", "a 1", "b 1", "own 2", "a 2", "own 3"]);
    }

    #[tokio::test]
    async fn another_replica_is_told_at_once_that_the_agent_is_not_here() {
        let lab = lab();
        assert!(matches!(lab.ask(Some("a")), Err(Refused::NotHere(_))));
        // This replica's own requests wait.
        drop(lab.wait(None));
    }

    #[tokio::test(start_paused = true)]
    async fn waiters_of_other_replicas_learn_that_the_agent_has_gone_and_own_ones_wait_on() {
        let mut lab = lab();
        lab.tunnel();
        let Ok(Acquired::Now(grant)) = lab.ask(None) else { panic!("a tunnel is idle") };
        let (mut own, mut other) = (lab.wait(None), lab.wait(Some("a")));
        let _tunnel = grant.take();
        // HTTP/2 drops the stream.
        lab.bodies.clear();
        // Present for a moment: tunnels of GitLab's agents end with each request.
        assert!(matches!(lab.ask(Some("b")), Ok(Acquired::Wait(_))));
        assert!(matches!(other.granted().await, Err(Gone::NotHere(_))));
        assert!(matches!(lab.ask(Some("b")), Err(Refused::NotHere(_))));
        lab.tunnel();
        assert!(own.granted().await.is_ok());
    }

    /// Seen to fail when only an end of the connection that comes after the tunnels' is noticed: the agent
    /// then stayed for five seconds.
    #[tokio::test(start_paused = true)]
    async fn an_agent_whose_connection_is_lost_is_gone_at_once_in_whatever_order_its_ends_are_noticed() {
        for connection_first in [true, false] {
            let mut lab = lab();
            lab.tunnel();
            let Ok(Acquired::Now(grant)) = lab.ask(None) else { panic!("a tunnel is idle") };
            let mut other = lab.wait(Some("a"));
            let _tunnel = grant.take();
            if connection_first {
                lab.registry.transport_closed(agent(), 1);
                lab.bodies.clear();
            } else {
                lab.bodies.clear();
                lab.registry.transport_closed(agent(), 1);
            }
            assert!(matches!(lab.ask(Some("b")), Err(Refused::NotHere(_))), "{connection_first}");
            let told = tokio::time::timeout(Duration::ZERO, other.granted()).await;
            assert!(matches!(told, Ok(Err(Gone::NotHere(_)))), "{connection_first}");
        }
    }

    #[tokio::test]
    async fn a_replica_that_leaves_lends_what_is_idle_and_lets_nobody_else_wait() {
        let mut lab = lab();
        lab.tunnel();
        lab.tunnel();
        let Ok(Acquired::Now(_first)) = lab.ask(None) else { panic!("a tunnel is idle") };
        let Ok(Acquired::Now(second)) = lab.ask(Some("a")) else { panic!("a tunnel is idle") };
        let mut waiting = lab.wait(Some("a"));
        lab.registry.drain();
        assert!(matches!(waiting.granted().await, Err(Gone::Leaving)));
        assert_eq!(lab.ask(Some("a")).map(drop), Err(Refused::Draining));
        drop(second);
        assert!(matches!(lab.ask(Some("a")), Ok(Acquired::Now(_))));
    }

    /// One of two processes replaces its only tunnel, as GitLab's agents do after each request.
    #[tokio::test(start_paused = true)]
    async fn a_connection_is_waited_for_between_two_of_its_tunnels() {
        let mut lab = lab();
        lab.tunnel_of(1, id(7));
        lab.tunnel_of(2, id(8));
        for source in [None, Some("a")] {
            // HTTP/2 drops the stream.
            lab.bodies.remove(0);
            let mut waiting = lab.wait_for(source, 7);
            assert_eq!(lab.registry.counts(agent()), (1, 0, 1), "what has no tunnel is not counted");
            tokio::time::sleep(LINGER - Duration::from_millis(1)).await;
            lab.tunnel_of(1, None);
            assert_eq!(waiting.granted().await.unwrap().tunnel().info().instance, 1);
            // The linger of the last time does not end this one.
            tokio::time::sleep(LINGER).await;
            assert!(matches!(lab.ask_for(source, 7), Ok(Acquired::Now(_))));
            lab.bodies.swap(0, 1);
        }
        assert_eq!(lab.ask_for(None, 9).map(drop), Err(Refused::OtherConnection));
    }

    /// What ends it is the end of its linger, of its connection, or of its tie.
    #[tokio::test(start_paused = true)]
    async fn who_waits_for_a_connection_is_told_when_it_does_not_come_back() {
        for end in ["linger", "transport", "tie"] {
            let mut lab = lab();
            lab.registry.transport_opened(agent());
            lab.tunnel_of(1, id(7));
            lab.tunnel_of(2, id(8));
            let Ok(Acquired::Now(other)) = lab.ask_for(None, 8) else { panic!("a tunnel is idle") };
            lab.bodies.remove(0);
            let (mut own, mut remote) = (lab.wait_for(None, 7), lab.wait_for(Some("a"), 7));
            let mut any = lab.wait(None);
            match end {
                "linger" => tokio::time::sleep(LINGER + Duration::from_millis(1)).await,
                "transport" => lab.registry.transport_closed(agent(), 1),
                _ => lab.registry.tie(agent(), 1, None),
            }
            // Its process lingers, tied to nothing.
            let refused = if end == "tie" { Refused::Untied } else { Refused::OtherConnection };
            for waiting in [&mut own, &mut remote] {
                let told = tokio::time::timeout(Duration::ZERO, waiting.granted()).await;
                assert!(matches!(told, Ok(Err(Gone::Refused(why))) if why == refused), "{end}: {told:?}");
            }
            assert_eq!(lab.ask_for(None, 7).map(drop), Err(refused), "{end}");
            assert_eq!(lab.registry.counts(agent()), (0, 1, 1), "{end}");
            drop(other);
            assert!(any.granted().await.is_ok(), "{end}");
        }
    }

    /// Pods of two versions, of which one is replaced.
    #[tokio::test(start_paused = true)]
    async fn who_waits_for_a_method_is_told_when_nobody_serves_it_any_more() {
        let mut lab = lab();
        let other: Arc<str> = "/s/Other".into();
        lab.tunnel_for(&other, 1, id(7));
        lab.tunnel_of(2, id(8));
        let ask = |lab: &Lab, connection| lab.registry.acquire(agent(), &other, connection);
        assert_eq!(ask(&lab, id(8)).map(drop), Err(Refused::Unimplemented), "not by this connection");
        lab.bodies.remove(0);
        for connection in [None, id(7)] {
            let Ok(Acquired::Wait(mut waiting)) = ask(&lab, connection) else { panic!("it may come back") };
            lab.tunnel_for(&other, 1, None);
            assert!(waiting.granted().await.is_ok());
            lab.bodies.pop();
        }
        let Ok(Acquired::Wait(mut waiting)) = ask(&lab, None) else { panic!("it may come back") };
        let told = waiting.granted().await;
        assert!(matches!(told, Err(Gone::Refused(Refused::Unimplemented))), "{told:?}");
        assert_eq!(ask(&lab, None).map(drop), Err(Refused::Unimplemented));
    }

    /// Seen to fail without the bound.
    #[tokio::test(start_paused = true)]
    async fn an_agent_that_changes_its_connections_is_remembered_for_few_of_them_and_not_for_long() {
        let mut lab = lab();
        lab.tunnel_of(0, id(1));
        let most = i64::try_from(lab.registry.limits.tunnels_per_agent).unwrap();
        for n in 2..=3 * most {
            lab.tunnel_of(n.unsigned_abs(), id(n));
            lab.bodies.pop();
        }
        assert_eq!(lab.instances(), 1 + most as usize);
        assert_eq!(lab.registry.counts(agent()), (1, 0, 0), "none of them is counted");
        // Those that ended last.
        drop(lab.wait_for(None, 3 * most));
        drop(lab.wait_for(None, 2 * most + 1));
        assert_eq!(lab.ask_for(None, 2 * most).map(drop), Err(Refused::OtherConnection));
        tokio::time::sleep(LINGER + Duration::from_millis(1)).await;
        assert_eq!(lab.instances(), 1);
        let tasks = tokio::runtime::Handle::current().metrics().num_alive_tasks();
        assert_eq!(tasks, 0, "nothing is left that would look for more");
        // And of an agent that has gone nothing is.
        lab.bodies.clear();
        lab.registry.transport_closed(agent(), 7);
        assert!(lab.registry.shard(agent()).is_empty());
    }
}
