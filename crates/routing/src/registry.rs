//! The tunnels that this replica holds, and the requests that wait for one.
//!
//! The entry of an agent has three parts: its processes and their tunnels (`presence`), the requests that
//! wait (`queue`), and the tunnels that other replicas lease (`lending`). One lock guards all three, so
//! that a request either finds an idle tunnel or is in the queue when the next tunnel parks: no wake-up is
//! lost. Agents are spread over shards.
//!
//! While a shard is locked only two things outside are called: the wake-up of a waiting request, and the
//! tracker if an agent comes or goes. "Not here" and the version of the announcements that comes with it are
//! therefore one observation. The tracker has its own lock and never calls back.

mod lending;
mod presence;
mod queue;

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use cluster::{Abandoned, Mark, Tracker};
use ids::{AgentId, ConnectionId, ReplicaId};
use tokio::time::Instant;
use tunnel::{
    features::Features,
    kas_end::{AgentkVersion, Retire, Tunnel, TunnelPool},
};

use self::{
    lending::Leases,
    presence::Presence,
    queue::{Offer, Queue, QueueKey, Sender, Source},
};
pub use self::{
    lending::{Borrower, TunnelLease},
    queue::Waiting,
};
use crate::{
    flaw::{Flaw, flawed},
    metrics::{AskAnswer, RequestMetrics},
    rate_limit::RateLimit,
    sync::{AtomicBool, AtomicUsize, Mutex, MutexGuard},
};

const SHARDS: usize = 16;
/// For how long an agent counts as one that has just left.
const RECENTLY: Duration = Duration::from_secs(60);
/// How many such agents are remembered.
const MOST_DEPARTURES: usize = 10_000;

/// Bounds what callers and agents can make grow.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Requests that may wait for one agent.
    pub waiters_per_agent: usize,
    /// Requests that may wait in all.
    pub waiters: usize,
    /// Tunnels of one agent.
    pub tunnels_per_agent: usize,
    /// Requests without an end of their own to an agent whose agentk cannot cancel a request.
    pub endless_per_old_agent: usize,
}

/// What a request needs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Needs {
    /// What agentk must support.
    pub features: Features,
    /// The request has no end of its own, as a watch. An agentk that cannot cancel it gets few of these.
    pub is_endless: bool,
}

impl From<Features> for Needs {
    fn from(features: Features) -> Self {
        Self { features, is_endless: false }
    }
}

/// Why a request cannot have a tunnel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// The agent is here, but none of its tunnels serves the method. If a connection is requested, only its
    /// tunnels count.
    Unimplemented,
    /// The agent is here, but the requested connection is not.
    OtherConnection,
    /// The agent is here, but it is not known to which connection some of its tunnels belong. The requested
    /// connection may be among them.
    Unbound,
    /// The agent is here, but no agentk that serves the method, or is the requested connection, has all that
    /// the request needs.
    Unsupported(Lack),
    /// For another replica: the agent is here, and the request needs a feature that this build does not know.
    UnknownNeed,
    /// Too many requests wait already.
    Full,
    /// The agent is here, and its agentk may have no more requests without an end of their own.
    Endless(EndlessRequests),
    /// For another replica: no tunnel of the agent is here.
    NotHere(Mark),
    /// For another replica: no tunnel is idle, and this replica drains.
    Draining,
}

/// What a request needs and an agentk lacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lack {
    /// The features. At least one.
    pub missing: Features,
    /// The version of agentk; `None`: it is not known.
    pub version: Option<AgentkVersion>,
}

/// The requests without an end of their own of an agent whose agentk cannot cancel a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EndlessRequests {
    /// Those that are open, of all replicas.
    pub open: usize,
    /// Requests of any kind whose callers have left. The agentk goes on with them.
    pub abandoned: usize,
    /// How many of both there may be.
    pub most: usize,
}

/// Why a wait ended without a tunnel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gone {
    /// This replica drains.
    Leaving,
    /// For another replica: the agent is not here any more.
    NotHere(Mark),
    /// The agent is still here, but what could have served the request is gone. A new request would be
    /// refused with the same reason.
    Refused(Refused),
}

impl Refused {
    /// Returns how the refusal of a request of another replica is counted.
    pub fn answer(self) -> AskAnswer {
        match self {
            Self::NotHere(_) => AskAnswer::NotHere,
            Self::Draining => AskAnswer::Unavailable,
            Self::Unimplemented
            | Self::OtherConnection
            | Self::Unbound
            | Self::Unsupported(_)
            | Self::UnknownNeed
            | Self::Full
            | Self::Endless(_) => AskAnswer::Refused,
        }
    }
}

impl From<Gone> for Refused {
    fn from(gone: Gone) -> Self {
        match gone {
            Gone::Leaving => Self::Draining,
            Gone::NotHere(mark) => Self::NotHere(mark),
            Gone::Refused(refused) => refused,
        }
    }
}

/// What this replica holds of an agent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Occupancy {
    /// Idle tunnels.
    pub idle: usize,
    /// Tunnels that carry a request, or are reserved for one.
    pub busy: usize,
    /// Those of the busy tunnels that are occupied by requests whose callers have left, if there are any.
    pub abandoned: Option<Abandoned>,
    /// Requests that wait for a tunnel.
    pub waiting: usize,
    /// Open transport connections of the agent, with or without tunnels.
    pub transports: usize,
}

impl Occupancy {
    /// Returns the abandoned requests if they occupy all tunnels: no request can start before the API server
    /// of the agent ends one of them.
    pub fn all_abandoned(&self) -> Option<Abandoned> {
        self.abandoned.filter(|abandoned| self.idle == 0 && abandoned.tunnels as usize >= self.busy)
    }
}

/// The result of asking for a tunnel.
#[derive(Debug)]
pub enum Acquired {
    /// A tunnel was idle.
    Now(Grant),
    /// No tunnel is idle: wait.
    Wait(Waiting),
}

/// The tunnels of this replica.
pub struct TunnelRegistry {
    shards: [Mutex<Shard>; SHARDS],
    tracker: Arc<dyn Tracker>,
    metrics: Arc<RequestMetrics>,
    limits: Limits,
    waiters: AtomicUsize,
    draining: AtomicBool,
    sweepers: AtomicU64,
    departures: Mutex<HashMap<AgentId, Instant>>,
}

impl std::fmt::Debug for TunnelRegistry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TunnelRegistry").field("limits", &self.limits).finish_non_exhaustive()
    }
}

type Shard = HashMap<AgentId, Agent>;

/// The entry of an agent.
#[derive(Default)]
struct Agent {
    presence: Presence,
    queue: Queue,
    leases: Leases,
}

impl Agent {
    /// Removes the requests that no tunnel of the agent will serve.
    fn take_refused(&mut self) -> Vec<(Sender, Refused)> {
        let presence = &self.presence;
        self.queue.take_refused(|key| presence.refuses(&key.method, key.connection, key.needs.features))
    }

    fn is_unused(&self) -> bool {
        self.presence.is_unused() && self.queue.len() == 0
    }
}

/// A tunnel for one request. Dropped without [`Grant::take`], the tunnel is returned unused.
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
    fn new(tunnel: Arc<Tunnel>, registry: &Arc<TunnelRegistry>) -> Self {
        Self { tunnel: Some(tunnel), registry: Arc::clone(registry) }
    }

    /// Returns the tunnel, which stays granted.
    pub fn tunnel(&self) -> &Arc<Tunnel> {
        self.tunnel.as_ref().expect("a grant holds its tunnel until it is taken or dropped")
    }

    /// Takes the tunnel, which still counts as busy. After a request it comes back by parking.
    pub fn take(mut self) -> Arc<Tunnel> {
        self.tunnel.take().expect("a grant holds its tunnel until it is taken or dropped")
    }
}

impl Drop for Grant {
    fn drop(&mut self) {
        if let Some(tunnel) = self.tunnel.take()
            && !flawed(Flaw::GrantKeepsTunnel)
        {
            self.registry.free(&tunnel);
        }
    }
}

impl TunnelRegistry {
    /// Creates an empty registry that announces agents to `tracker`.
    pub fn new(tracker: Arc<dyn Tracker>, metrics: Arc<RequestMetrics>, limits: Limits) -> Arc<Self> {
        Arc::new(Self {
            shards: Default::default(),
            tracker,
            metrics,
            limits,
            waiters: AtomicUsize::new(0),
            draining: AtomicBool::new(false),
            sweepers: AtomicU64::new(0),
            departures: Mutex::default(),
        })
    }

    /// Returns the metrics of requests and tunnels.
    pub fn metrics(&self) -> &Arc<RequestMetrics> {
        &self.metrics
    }

    fn shard(&self, agent: AgentId) -> MutexGuard<'_, Shard> {
        let index = (agent.get() as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 60;
        self.shards[index as usize % SHARDS].lock()
    }

    /// Takes an idle tunnel of `agent` that serves `method`, and whose agentk supports all that is needed.
    pub fn take(
        self: &Arc<Self>,
        agent: AgentId,
        method: &str,
        connection: Option<ConnectionId>,
        needs: impl Into<Needs>,
    ) -> Option<Grant> {
        let most = self.limits.endless_per_old_agent;
        let mut shard = self.shard(agent);
        let tunnel = shard.get_mut(&agent)?.presence.take_idle(method, connection, needs.into(), most)?;
        drop(shard);
        Some(Grant::new(tunnel, self))
    }

    /// Takes an idle tunnel of `agent` that serves `method`, and whose agentk supports all that is needed, or
    /// a place in the queue. Idle tunnels that the request cannot use do not keep it waiting.
    ///
    /// # Errors
    /// See [`Refused`].
    pub fn acquire(
        self: &Arc<Self>,
        agent: AgentId,
        method: &Arc<str>,
        connection: Option<ConnectionId>,
        needs: impl Into<Needs>,
    ) -> Result<Acquired, Refused> {
        self.acquire_from(None, agent, method, connection, needs.into())
    }

    /// As [`acquire`](Self::acquire), for a request of another replica. It waits here only while the agent is
    /// present and this replica does not drain.
    ///
    /// # Errors
    /// See [`Refused`].
    pub fn acquire_for(
        self: &Arc<Self>,
        replica: &ReplicaId,
        agent: AgentId,
        method: &Arc<str>,
        connection: Option<ConnectionId>,
        needs: impl Into<Needs>,
    ) -> Result<Acquired, Refused> {
        self.acquire_from(Some(replica.clone()), agent, method, connection, needs.into())
    }

    /// Refuses a request of another replica that needs a feature which this build does not know.
    pub fn refuse_unknown(&self, agent: AgentId) -> Refused {
        let shard = self.shard(agent);
        if shard.get(&agent).is_some_and(|entry| entry.presence.is_present()) {
            Refused::UnknownNeed
        } else {
            Refused::NotHere(self.tracker.mark())
        }
    }

    fn acquire_from(
        self: &Arc<Self>,
        source: Source,
        agent: AgentId,
        method: &Arc<str>,
        connection: Option<ConnectionId>,
        needs: Needs,
    ) -> Result<Acquired, Refused> {
        let mut shard = self.shard(agent);
        if source.is_some() && !shard.get(&agent).is_some_and(|entry| entry.presence.is_present()) {
            return Err(Refused::NotHere(self.tracker.mark()));
        }
        if let Some(entry) = shard.get_mut(&agent) {
            let most = self.limits.endless_per_old_agent;
            if let Some(tunnel) = entry.presence.take_idle(method, connection, needs, most) {
                return Ok(Acquired::Now(Grant::new(tunnel, self)));
            }
            if let Some(refused) = entry.presence.refuses(method, connection, needs.features) {
                return Err(refused);
            }
            if needs.is_endless
                && let Some(requests) = entry.presence.has_most_endless(most)
            {
                return Err(Refused::Endless(requests));
            }
            if source.is_some() && self.draining.load(Ordering::Relaxed) {
                return Err(Refused::Draining);
            }
            if entry.queue.len() >= self.limits.waiters_per_agent {
                return Err(Refused::Full);
            }
        }
        if self.waiters.fetch_add(1, Ordering::Relaxed) >= self.limits.waiters {
            self.waiters.fetch_sub(1, Ordering::Relaxed);
            return Err(Refused::Full);
        }
        self.metrics.waiters.inc();
        if flawed(Flaw::QueueAfterUnlock) {
            drop(shard);
            shard = self.shard(agent);
        }
        let entry = shard.entry(agent).or_default();
        let key = QueueKey { source, method: Arc::clone(method), connection, needs };
        let (serial, receiver) = entry.queue.enter(&key);
        entry.leases.revoke_for(&key, |instance| entry.presence.connection_of(instance));
        drop(shard);
        Ok(Acquired::Wait(Waiting { registry: Arc::clone(self), agent, key, serial, receiver }))
    }

    /// Leases a tunnel to `borrower`. Its request must be over, and it still counts as busy. `None`: the
    /// tunnel is not free, a request waits that it could serve, or this replica drains. This includes
    /// requests of the borrower itself: to answer one that waits here costs less than its cancellation.
    pub fn lease(self: &Arc<Self>, tunnel: &Arc<Tunnel>, borrower: &Borrower) -> Option<TunnelLease> {
        let info = tunnel.info();
        let mut shard = self.shard(info.agent);
        let mut entry = shard.get_mut(&info.agent)?;
        if self.draining.load(Ordering::Relaxed)
            || tunnel.idle_since().is_none()
            || entry.queue.wants(info, || entry.presence.connection_of(info.instance))
        {
            return None;
        }
        if flawed(Flaw::LeaseAfterUnlock) {
            drop(shard);
            shard = self.shard(info.agent);
            entry = shard.get_mut(&info.agent)?;
        }
        Some(entry.leases.add(Grant::new(Arc::clone(tunnel), self), borrower.clone()))
    }

    /// Whether one more tunnel of `agent` may be registered.
    pub fn has_room(&self, agent: AgentId) -> bool {
        let most = self.limits.tunnels_per_agent;
        self.shard(agent).get(&agent).is_none_or(|entry| entry.presence.tunnels() < most)
    }

    /// Registers a tunnel that has just been opened. `connection`: the configuration stream to which it is
    /// bound, if that is known.
    pub fn insert(self: &Arc<Self>, tunnel: &Arc<Tunnel>, connection: Option<ConnectionId>) {
        let info = tunnel.info();
        self.metrics.tunnels.inc();
        let mut shard = self.shard(info.agent);
        shard.entry(info.agent).or_default().presence.add(info, connection, &*self.tracker);
        drop(shard);
        self.free(tunnel);
    }

    /// Binds the tunnels of one process to its configuration stream, or unbinds them.
    pub fn bind_connection(&self, agent: AgentId, instance: u64, connection: Option<ConnectionId>) {
        let mut shard = self.shard(agent);
        let Some(entry) = shard.get_mut(&agent) else { return };
        if !entry.presence.bind(instance, connection) {
            return;
        }
        let refused = entry.take_refused();
        drop(shard);
        refuse(refused);
    }

    /// A tunnel is free: gives it to a request that waits, or keeps it as idle.
    fn free(self: &Arc<Self>, tunnel: &Arc<Tunnel>) {
        let info = tunnel.info();
        let mut shard = self.shard(info.agent);
        // A tunnel that is ending counts as busy until `remove`, or `remove` has already counted it out.
        if tunnel.idle_since().is_none() {
            return;
        }
        let Some(mut entry) = shard.get_mut(&info.agent) else { return };
        entry.presence.end_endless(tunnel);
        if flawed(Flaw::IdleBeforeOffer) {
            entry.presence.put_idle(Arc::clone(tunnel));
            drop(shard);
            shard = self.shard(info.agent);
            entry = match shard.get_mut(&info.agent) {
                Some(entry) => entry,
                None => return,
            };
        }
        let offer = Offer {
            connection: entry.presence.connection_of(info.instance),
            takes_endless: entry.presence.takes_endless(info.kind, self.limits.endless_per_old_agent),
        };
        match entry.queue.offer(Grant::new(Arc::clone(tunnel), self), offer) {
            Ok(needs) => entry.presence.begin_endless(tunnel, needs),
            Err(grant) => entry.presence.put_idle(grant.take()),
        }
    }

    /// The caller of the request in a tunnel has left, and the agent cannot cancel it.
    fn abandoned(&self, tunnel: &Arc<Tunnel>) {
        let agent = tunnel.info().agent;
        // The tunnel may have ended meanwhile. If it ends from here on, `remove` waits for the lock.
        if let Some(entry) = self.shard(agent).get_mut(&agent)
            && entry.presence.abandoned(tunnel)
        {
            self.metrics.tunnels_abandoned.inc();
        }
    }

    /// A tunnel is over.
    fn remove(self: &Arc<Self>, tunnel: &Arc<Tunnel>) {
        let agent = tunnel.info().agent;
        self.metrics.tunnels.dec();
        let mut shard = self.shard(agent);
        let Some(entry) = shard.get_mut(&agent) else { return };
        if entry.presence.end_abandonment(tunnel) {
            self.metrics.tunnels_abandoned.dec();
        }
        let removed = entry.presence.remove(tunnel, self.limits.tunnels_per_agent);
        if entry.presence.tunnels() == 0 && !entry.presence.has_transport() {
            // Its last connection was closed before its streams ended, so no tunnel can follow.
            return self.leave(agent, shard);
        }
        entry.presence.linger();
        let refused = if removed { entry.take_refused() } else { Vec::new() };
        if entry.presence.sweeper.is_none()
            && let Some(at) = entry.presence.next_end()
        {
            let serial = self.sweepers.fetch_add(1, Ordering::Relaxed);
            entry.presence.sweeper = Some(serial);
            tokio::spawn(Arc::clone(self).sweep(agent, serial, at));
        }
        drop(shard);
        refuse(refused);
    }

    /// Ends the lingering of an agent and its processes, the first one at `at`, until nothing lingers.
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

    /// Ends every lingering that is over. Returns when the next one will be.
    fn expire(&self, agent: AgentId, serial: u64) -> Option<Instant> {
        let mut shard = self.shard(agent);
        let entry = shard.get_mut(&agent).filter(|entry| entry.presence.sweeper == Some(serial))?;
        let absent = entry.presence.expire();
        let refused = entry.take_refused();
        let next = entry.presence.next_end();
        if next.is_none() {
            entry.presence.sweeper = None;
        }
        if absent {
            self.leave(agent, shard);
        } else {
            drop(shard);
        }
        refuse(refused);
        next
    }

    /// A transport connection of the agent was authenticated.
    pub fn transport_opened(&self, agent: AgentId) {
        self.shard(agent).entry(agent).or_default().presence.transport_opened();
    }

    /// A transport connection of the agent is closed. If it was the last one and the agent has no tunnel, the
    /// agent is no longer present. `instance`: the one that stands for the connection.
    pub fn transport_closed(&self, agent: AgentId, instance: u64) {
        let mut shard = self.shard(agent);
        let Some(entry) = shard.get_mut(&agent) else { return };
        entry.presence.transport_closed(instance);
        let refused = entry.take_refused();
        if entry.presence.has_transport() {
            drop(shard);
        } else {
            self.leave(agent, shard);
        }
        refuse(refused);
    }

    /// The agent is no longer here, unless it has a tunnel.
    fn leave(&self, agent: AgentId, shard: MutexGuard<'_, Shard>) {
        let mut shard = shard;
        let Some(entry) = shard.get_mut(&agent) else { return };
        if entry.presence.tunnels() > 0 {
            return;
        }
        // Under the lock: every later answer to another replica has a newer version of the announcements.
        entry.presence.withdraw();
        let waiting = entry.queue.take_remote();
        let mark = self.tracker.mark();
        if entry.is_unused() {
            shard.remove(&agent);
        }
        drop(shard);
        self.departed(agent);
        for sender in waiting {
            let _ = sender.send(Err(Gone::NotHere(mark)));
        }
    }

    /// Notes that an agent has left. Beyond [`MOST_DEPARTURES`], those that left longer ago are forgotten.
    fn departed(&self, agent: AgentId) {
        let now = Instant::now();
        let mut departures = self.departures.lock();
        if departures.len() >= MOST_DEPARTURES {
            departures.retain(|_, at| now.duration_since(*at) < RECENTLY);
        }
        if departures.len() < MOST_DEPARTURES {
            departures.insert(agent, now);
        }
    }

    /// Whether the agent has left this replica within the last minute, so that it may soon be back.
    pub fn has_left_recently(&self, agent: AgentId) -> bool {
        self.departures.lock().get(&agent).is_some_and(|at| at.elapsed() < RECENTLY)
    }

    /// Takes `tunnel` out of use: immediately if it is idle, else after its request. If it is leased, the
    /// lease is revoked first.
    pub fn retire(&self, tunnel: &Arc<Tunnel>, how: Retire) {
        let agent = tunnel.info().agent;
        if let Some(entry) = self.shard(agent).get_mut(&agent) {
            entry.presence.withhold(tunnel);
        }
        tunnel.retire(how);
        if let Some(entry) = self.shard(agent).get(&agent) {
            entry.leases.revoke(tunnel);
        }
    }

    /// This replica begins to drain: requests of other replicas no longer wait here, and all leases are
    /// revoked.
    pub fn drain(&self) {
        self.draining.store(true, Ordering::Relaxed);
        for shard in &self.shards {
            let mut shard = shard.lock();
            let waiting: Vec<Sender> =
                shard.values_mut().flat_map(|agent| agent.queue.take_remote()).collect();
            for agent in shard.values() {
                agent.leases.revoke_all();
            }
            drop(shard);
            for sender in waiting {
                let _ = sender.send(Err(Gone::Leaving));
            }
        }
    }

    /// Returns the numbers of idle and busy tunnels of an agent, and of requests that wait for one.
    pub fn counts(&self, agent: AgentId) -> (usize, usize, usize) {
        let Occupancy { idle, busy, waiting, .. } = self.occupancy(agent);
        (idle, busy, waiting)
    }

    /// Returns what this replica holds of an agent.
    pub fn occupancy(&self, agent: AgentId) -> Occupancy {
        self.shard(agent).get(&agent).map_or_else(Occupancy::default, |entry| {
            let (idle, busy) = entry.presence.counts();
            Occupancy {
                idle,
                busy,
                abandoned: entry.presence.abandonment(),
                waiting: entry.queue.len(),
                transports: entry.presence.transports(),
            }
        })
    }

    /// Ends every wait: this replica stops now.
    pub fn refuse_waiters(&self) {
        for shard in &self.shards {
            for agent in shard.lock().values_mut() {
                // The senders drop. Each waiting request subtracts itself from `waiters`.
                agent.queue.clear();
            }
        }
    }

    /// Whether a request of another replica may still find a tunnel of the agent here.
    pub fn may_serve(&self, agent: AgentId) -> bool {
        !self.draining.load(Ordering::Relaxed) && self.holds(agent)
    }

    /// Whether this replica holds a tunnel of the agent now.
    pub fn holds(&self, agent: AgentId) -> bool {
        self.shard(agent).get(&agent).is_some_and(|entry| entry.presence.tunnels() > 0)
    }
}

/// Ends waits, outside the lock.
fn refuse(refused: Vec<(Sender, Refused)>) {
    for (sender, refused) in refused {
        let _ = sender.send(Err(Gone::Refused(refused)));
    }
}

/// The pool of the tunnels that agents open: the registry.
#[derive(Debug)]
pub struct RegistryPool {
    /// Where free tunnels go.
    pub registry: Arc<TunnelRegistry>,
    /// Charged for tunnels that agents end without a request.
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

    fn abandoned(&self, tunnel: &Arc<Tunnel>) {
        self.registry.abandoned(tunnel);
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
mod schedules;
#[cfg(test)]
mod tests;
