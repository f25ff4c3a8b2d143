//! The tunnels that this replica holds, and the requests that wait for one.
//!
//! One lock guards each agent's tunnels and waiters together, so that a request either finds an
//! idle tunnel or is in the queue when the next one parks: no wake-up is lost. Agents are spread
//! over shards; nothing is called while a shard is locked except the wake-up of a waiter.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use cluster::{Lease, Tracker};
use ids::{AgentId, ConnectionId};
use tokio::sync::oneshot;
use tunnel::kas_end::{Descriptor, Owner, Retire, Tunnel};

use crate::{metrics::Metrics, rate_limit::RateLimit};

const SHARDS: usize = 16;
/// An agent stays present this long after its last tunnel closed: the tunnels of GitLab's agents
/// end with each request, and must not make the agent flap in the table.
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
    /// The agent is here, and none of its tunnels serves the method.
    Unimplemented,
    /// The agent is here, but the connection asked for is not, or no tunnel is tied to it.
    OtherConnection,
    /// Too many requests wait already.
    Full,
}

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
    metrics: Arc<Metrics>,
    limits: Limits,
    waiters: AtomicUsize,
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
    queues: HashMap<QueueKey, BTreeMap<u64, oneshot::Sender<Grant>>>,
    waiters: usize,
    serial: u64,
    lease: Option<Lease>,
    /// Counts changes from some tunnel to none, so that a linger that was overtaken does nothing.
    lingers: u64,
}

/// What a waiter accepts.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct QueueKey {
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
                .min_by_key(|(serial, _)| *serial)
                .map(|(_, key)| key.clone());
            let Some(key) = key else { return Some(grant) };
            let sender = self.queues.get_mut(&key).and_then(|queue| queue.pop_first());
            self.waiters -= 1;
            if self.queues.get(&key).is_some_and(BTreeMap::is_empty) {
                self.queues.remove(&key);
            }
            match sender.map(|(_, sender)| sender.send(grant)) {
                Some(Err(back)) => grant = back,
                Some(Ok(())) | None => return None,
            }
        }
    }

    fn is_unused(&self) -> bool {
        self.tunnels == 0 && self.waiters == 0 && self.lease.is_none()
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

/// A place in the queue. Dropping it leaves the queue.
#[derive(Debug)]
pub struct Waiting {
    registry: Arc<TunnelRegistry>,
    agent: AgentId,
    key: QueueKey,
    serial: u64,
    receiver: oneshot::Receiver<Grant>,
}

impl Waiting {
    /// Waits for a tunnel; `None`: this replica leaves.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn granted(&mut self) -> Option<Grant> {
        (&mut self.receiver).await.ok()
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
                    agent.queues.remove(&self.key);
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
    pub fn new(tracker: Arc<dyn Tracker>, metrics: Arc<Metrics>, limits: Limits) -> Arc<Self> {
        Arc::new(Self { shards: Default::default(), tracker, metrics, limits, waiters: AtomicUsize::new(0) })
    }

    fn shard(&self, agent: AgentId) -> MutexGuard<'_, HashMap<AgentId, Agent>> {
        let index = (agent.get() as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 60;
        // A panic under the lock would be a bug in this file; what is left is still consistent.
        self.shards[index as usize % SHARDS].lock().unwrap_or_else(PoisonError::into_inner)
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
        let mut shard = self.shard(agent);
        if let Some(entry) = shard.get_mut(&agent) {
            if let Some(tunnel) = entry.take(method, connection) {
                return Ok(Acquired::Now(Grant { tunnel: Some(tunnel), registry: Arc::clone(self) }));
            }
            if entry.tunnels > 0 {
                if connection.is_some() && !entry.instances.iter().any(|i| i.connection == connection) {
                    return Err(Refused::OtherConnection);
                }
                if !entry.instances.iter().any(|i| i.descriptor.serves(method)) {
                    return Err(Refused::Unimplemented);
                }
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
        let (serial, key) = (entry.serial, QueueKey { method: Arc::clone(method), connection });
        let (sender, receiver) = oneshot::channel();
        entry.queues.entry(key.clone()).or_default().insert(serial, sender);
        drop(shard);
        Ok(Acquired::Wait(Waiting { registry: Arc::clone(self), agent, key, serial, receiver }))
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
        entry.lingers += 1;
        let instance = entry.instance(info.instance);
        instance.connection = connection.or(instance.connection);
        instance.descriptor = Arc::clone(&info.descriptor);
        // Counted as busy until it is offered.
        instance.busy += 1;
        drop(shard);
        if first {
            let methods: Arc<[Box<str>]> = info.descriptor.methods().map(Into::into).collect();
            // Announced outside the lock: the tracker has its own.
            let lease = self.tracker.route(info.agent, methods);
            let mut shard = self.shard(info.agent);
            let unused = match shard.get_mut(&info.agent) {
                Some(entry) if entry.lease.is_none() => entry.lease.replace(lease),
                _ => Some(lease),
            };
            drop(shard);
            drop(unused);
        }
        self.free(tunnel);
    }

    /// Ties the tunnels of one process to its configuration stream, or unties them.
    pub fn tie(&self, agent: AgentId, instance: u64, connection: Option<ConnectionId>) {
        if let Some(entry) = self.shard(agent).get_mut(&agent)
            && let Some(instance) = entry.instances.iter_mut().find(|i| i.id == instance)
        {
            instance.connection = connection;
        }
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
        if let Some(instance) = entry.find(info.instance) {
            match instance.idle.iter().position(|idle| Arc::ptr_eq(idle, tunnel)) {
                Some(at) => drop(instance.idle.remove(at)),
                None => instance.busy = instance.busy.saturating_sub(1),
            }
            if instance.busy == 0 && instance.idle.is_empty() {
                let id = info.instance;
                entry.instances.retain(|i| i.id != id);
            }
        }
        entry.tunnels -= 1;
        if entry.tunnels > 0 {
            return;
        }
        entry.lingers += 1;
        let serial = entry.lingers;
        drop(shard);
        let (registry, agent) = (Arc::clone(self), info.agent);
        tokio::spawn(async move {
            tokio::time::sleep(LINGER).await;
            registry.leave(agent, Some(serial));
        });
    }

    /// The transport connection of an agent without tunnels is gone: it is present no longer.
    pub fn connection_closed(&self, agent: AgentId) {
        self.leave(agent, None);
    }

    fn leave(&self, agent: AgentId, serial: Option<u64>) {
        let mut shard = self.shard(agent);
        let Some(entry) = shard.get_mut(&agent) else { return };
        if entry.tunnels > 0 || serial.is_some_and(|serial| serial != entry.lingers) {
            return;
        }
        let lease = entry.lease.take();
        if entry.is_unused() {
            shard.remove(&agent);
        }
        drop(shard);
        drop(lease);
    }

    /// Takes `tunnel` out of use: at once when it is idle, else after its request.
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

    /// Whether this replica holds a tunnel of the agent now.
    pub fn holds(&self, agent: AgentId) -> bool {
        self.shard(agent).get(&agent).is_some_and(|entry| entry.tunnels > 0)
    }
}

/// The registry as tunnels see it.
#[derive(Debug)]
pub struct RegistryOwner {
    /// Where tunnels go.
    pub registry: Arc<TunnelRegistry>,
    /// What agents' tokens are charged.
    pub rate_limit: Arc<RateLimit>,
}

impl Owner for RegistryOwner {
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
