//! The agent at this replica: its processes, their tunnels, and whether it is announced to other replicas.

use std::{sync::Arc, time::Duration};

use cluster::{Abandoned, Lease, Tracker};
use ids::ConnectionId;
use tokio::time::Instant;
use tunnel::{
    features::Features,
    kas_end::{AgentKind, AgentkVersion, Descriptor, Info, Tunnel},
};

use super::{EndlessRequests, Lack, Needs, Refused};
use crate::flaw::{Flaw, flawed};

/// An agent stays announced for this long after its last tunnel ended. Tunnels of GitLab's agents end with
/// each request, and must not make the agent appear and disappear in the table. Its processes are remembered
/// for the same time, so that a request for one of them is not refused between two of its tunnels.
pub(super) const LINGER: Duration = Duration::from_secs(5);

/// The connected part of an agent.
#[derive(Default)]
pub(super) struct Presence {
    instances: Vec<Instance>,
    /// Open tunnels, idle and busy.
    tunnels: usize,
    /// The busy tunnels that are occupied by requests whose callers have left, and when these left.
    abandoned: Vec<(Arc<Tunnel>, Instant)>,
    /// The other busy tunnels of agentks that cannot cancel a request, whose requests have no end of their
    /// own.
    endless: Vec<Arc<Tunnel>>,
    /// Open transport connections. Another process of the agent may stay after one has left.
    transports: usize,
    /// The announcement to other replicas.
    announced: Option<Lease>,
    /// Since when the agent lingers: it is announced and has no tunnel.
    empty_since: Option<Instant>,
    /// The task that ends lingering. There is at most one for each entry, so that opening and closing tunnels
    /// does not start a task each time. The serial distinguishes it from the task of an earlier entry of the
    /// same agent.
    pub(super) sweeper: Option<u64>,
}

/// One agentk process, or one transport connection if the process is not known.
struct Instance {
    id: u64,
    connection: Option<ConnectionId>,
    /// The descriptor of its newest tunnel.
    descriptor: Arc<Descriptor>,
    /// Which agentk opened its newest tunnel, what that supports, and its version.
    kind: AgentKind,
    features: Features,
    version: Option<AgentkVersion>,
    busy: usize,
    /// The most recently used tunnel is last. It is handed out first, so that a pool can shrink.
    idle: Vec<Arc<Tunnel>>,
    /// Since when it lingers: it has no tunnel, and may open another one.
    empty_since: Option<Instant>,
    /// Its transport connection is closed, so it opens no further tunnel.
    closed: bool,
}

impl Presence {
    fn instance(&mut self, id: u64) -> &mut Instance {
        let at = self.instances.iter().position(|i| i.id == id).unwrap_or_else(|| {
            self.instances.push(Instance {
                id,
                connection: None,
                descriptor: Arc::default(),
                kind: AgentKind::Old,
                features: Features::NONE,
                version: None,
                busy: 0,
                idle: Vec::new(),
                empty_since: None,
                closed: false,
            });
            self.instances.len() - 1
        });
        &mut self.instances[at]
    }

    /// Only [`add`](Self::add) creates an instance. One that was created for a tunnel that has ended would
    /// never be removed.
    fn find(&mut self, id: u64) -> Option<&mut Instance> {
        self.instances.iter_mut().find(|i| i.id == id)
    }

    pub(super) fn tunnels(&self) -> usize {
        self.tunnels
    }

    /// Returns the numbers of idle and busy tunnels.
    pub(super) fn counts(&self) -> (usize, usize) {
        let idle = self.instances.iter().map(|i| i.idle.len()).sum();
        (idle, self.tunnels.saturating_sub(idle))
    }

    #[cfg(test)]
    pub(super) fn instances(&self) -> usize {
        self.instances.len()
    }

    /// Whether a request without an end of its own may go to an agentk of this kind. `most`: the limit for
    /// one that cannot cancel a request.
    pub(super) fn takes_endless(&self, kind: AgentKind, most: usize) -> bool {
        kind != AgentKind::Old || self.endless.len() + self.abandoned.len() < most
    }

    /// Returns these requests if no process of the agent may have one more.
    pub(super) fn has_most_endless(&self, most: usize) -> Option<EndlessRequests> {
        let (open, abandoned) = (self.endless.len(), self.abandoned.len());
        let any = self.instances.iter().any(|i| self.takes_endless(i.kind, most));
        (!any && !self.instances.is_empty()).then_some(EndlessRequests { open, abandoned, most })
    }

    /// A tunnel was given to a request with these needs.
    pub(super) fn begin_endless(&mut self, tunnel: &Arc<Tunnel>, needs: Needs) {
        if needs.is_endless && tunnel.info().kind == AgentKind::Old {
            self.endless.push(Arc::clone(tunnel));
        }
    }

    /// A tunnel has no request, or one that counts as abandoned.
    pub(super) fn end_endless(&mut self, tunnel: &Arc<Tunnel>) {
        self.endless.retain(|other| !Arc::ptr_eq(other, tunnel));
    }

    /// Notes that a tunnel is occupied by a request whose caller has left. Returns false if that is already
    /// over.
    pub(super) fn abandoned(&mut self, tunnel: &Arc<Tunnel>) -> bool {
        let since = tunnel.abandoned_since();
        if since.is_some() {
            self.end_endless(tunnel);
        }
        self.abandoned.extend(since.map(|since| (Arc::clone(tunnel), since)));
        since.is_some()
    }

    /// Returns the busy tunnels that are occupied by requests whose callers have left.
    pub(super) fn abandonment(&self) -> Option<Abandoned> {
        let last = self.abandoned.iter().map(|(_, since)| since).max()?;
        let tunnels = u32::try_from(self.abandoned.len()).unwrap_or(u32::MAX);
        Some(Abandoned { tunnels, since: last.elapsed() })
    }

    /// A tunnel has ended. Returns whether it was occupied by a request whose caller had left.
    pub(super) fn end_abandonment(&mut self, tunnel: &Arc<Tunnel>) -> bool {
        let at = self.abandoned.iter().position(|(other, _)| Arc::ptr_eq(other, tunnel));
        at.map(|at| self.abandoned.remove(at)).is_some()
    }

    /// Returns the connection to which the tunnels of an instance are bound.
    pub(super) fn connection_of(&self, instance: u64) -> Option<ConnectionId> {
        self.instances.iter().find(|i| i.id == instance).and_then(|i| i.connection)
    }

    /// Adds a tunnel, which counts as busy, and announces the agent if it is not announced yet.
    pub(super) fn add(&mut self, info: &Info, connection: Option<ConnectionId>, tracker: &dyn Tracker) {
        self.tunnels += 1;
        let first = self.tunnels == 1 && self.announced.is_none();
        self.empty_since = None;
        let instance = self.instance(info.instance);
        instance.connection = connection.or(instance.connection);
        instance.descriptor = Arc::clone(&info.descriptor);
        (instance.kind, instance.features, instance.version) = (info.kind, info.features, info.version);
        instance.empty_since = None;
        instance.busy += 1;
        if first {
            let methods: Arc<[Box<str>]> = info.descriptor.methods().map(Into::into).collect();
            self.announced = Some(tracker.route(info.agent, methods));
        }
    }

    /// Removes a tunnel that has ended. Returns whether an instance was removed, so that requests which wait
    /// for it must be refused. At most `most` instances linger.
    pub(super) fn remove(&mut self, tunnel: &Arc<Tunnel>, most: usize) -> bool {
        self.end_endless(tunnel);
        let id = tunnel.info().instance;
        let mut removed = false;
        if let Some(instance) = self.find(id) {
            match instance.idle.iter().position(|idle| Arc::ptr_eq(idle, tunnel)) {
                Some(at) => drop(instance.idle.remove(at)),
                None => instance.busy = instance.busy.saturating_sub(1),
            }
            if instance.busy == 0 && instance.idle.is_empty() {
                removed = self.emptied(id, most);
            }
        }
        self.tunnels -= 1;
        removed
    }

    /// Notes that an instance has no tunnel. It lingers, unless its transport connection is closed. If more
    /// than `most` linger, the one that has lingered longest is removed. Returns whether one was removed.
    fn emptied(&mut self, id: u64, most: usize) -> bool {
        let Some(instance) = self.find(id) else { return false };
        let removed = if instance.closed {
            Some(id)
        } else {
            instance.empty_since = Some(Instant::now());
            let lingering = || self.instances.iter().filter(|i| i.empty_since.is_some());
            let oldest = || lingering().min_by_key(|i| i.empty_since).map(|i| i.id);
            (lingering().count() > most).then(oldest).flatten()
        };
        self.instances.retain(|i| Some(i.id) != removed);
        removed.is_some()
    }

    /// Takes the best idle tunnel, which counts as busy then. It belongs to the process with the fewest busy
    /// tunnels, so that processes share the work. `most`: see [`takes_endless`](Self::takes_endless).
    pub(super) fn take_idle(
        &mut self,
        method: &str,
        connection: Option<ConnectionId>,
        needs: Needs,
        most: usize,
    ) -> Option<Arc<Tunnel>> {
        let old_serves = !needs.is_endless || self.takes_endless(AgentKind::Old, most);
        let serves = |tunnel: &Arc<Tunnel>| {
            let info = tunnel.info();
            info.features.contains(needs.features)
                && info.descriptor.serves(method)
                && (old_serves || info.kind != AgentKind::Old)
        };
        let best = self
            .instances
            .iter_mut()
            .filter(|i| connection.is_none() || i.connection == connection)
            .filter(|i| i.idle.iter().any(serves))
            .min_by_key(|i| if flawed(Flaw::OneProcess) { 0 } else { i.busy })?;
        let at = best.idle.iter().rposition(serves)?;
        best.busy += 1;
        let tunnel = best.idle.remove(at);
        self.begin_endless(&tunnel, needs);
        Some(tunnel)
    }

    /// A busy tunnel is idle from now on.
    pub(super) fn put_idle(&mut self, tunnel: Arc<Tunnel>) {
        if let Some(instance) = self.find(tunnel.info().instance) {
            instance.busy = instance.busy.saturating_sub(1);
            instance.idle.push(tunnel);
        }
    }

    /// An idle tunnel counts as busy from now on. No effect on a tunnel that is not idle.
    pub(super) fn withhold(&mut self, tunnel: &Arc<Tunnel>) {
        if let Some(instance) = self.find(tunnel.info().instance)
            && let Some(at) = instance.idle.iter().position(|idle| Arc::ptr_eq(idle, tunnel))
        {
            instance.idle.remove(at);
            instance.busy += 1;
        }
    }

    /// Binds the tunnels of an instance to a connection, or unbinds them. Returns whether the instance is
    /// known.
    pub(super) fn bind(&mut self, instance: u64, connection: Option<ConnectionId>) -> bool {
        let Some(instance) = self.find(instance) else { return false };
        instance.connection = connection;
        true
    }

    /// Returns why no tunnel of the agent will serve a request, as far as that is known. While the agent has
    /// no tunnel nothing is known: the next tunnel to come says nothing about those after it.
    pub(super) fn refuses(
        &self,
        method: &str,
        connection: Option<ConnectionId>,
        needs: Features,
    ) -> Option<Refused> {
        if self.tunnels == 0 {
            return None;
        }
        let fits = |i: &&Instance| connection.is_none() || i.connection == connection;
        let mut instances = self.instances.iter().filter(fits).peekable();
        if connection.is_some() && instances.peek().is_none() {
            let unbound = self.instances.iter().any(|i| i.connection.is_none());
            return Some(if unbound { Refused::Unbound } else { Refused::OtherConnection });
        }
        // Of the process that lacks the fewest features.
        let mut least: Option<Lack> = None;
        for instance in instances.filter(|i| i.descriptor.serves(method)) {
            let missing = needs.without(instance.features);
            if missing.is_empty() {
                return None;
            }
            if least.is_none_or(|lack| missing.len() < lack.missing.len()) {
                least = Some(Lack { missing, version: instance.version });
            }
        }
        Some(least.map_or(Refused::Unimplemented, Refused::Unsupported))
    }

    pub(super) fn transport_opened(&mut self) {
        self.transports += 1;
    }

    /// `instance`: the one that stands for the connection.
    pub(super) fn transport_closed(&mut self, instance: u64) {
        self.transports = self.transports.saturating_sub(1);
        if let Some(instance) = self.find(instance) {
            instance.closed = true;
        }
        self.instances.retain(|i| !(i.closed && i.empty_since.is_some()));
    }

    pub(super) fn has_transport(&self) -> bool {
        self.transports > 0
    }

    /// Returns the number of open transport connections.
    pub(super) fn transports(&self) -> usize {
        self.transports
    }

    /// The agent lingers if it has no tunnel.
    pub(super) fn linger(&mut self) {
        if self.tunnels == 0 {
            self.empty_since = Some(Instant::now());
        }
    }

    /// Returns when the next lingering ends.
    pub(super) fn next_end(&self) -> Option<Instant> {
        let instances = self.instances.iter().filter_map(|i| i.empty_since);
        instances.chain(self.empty_since).min().map(|since| since + LINGER)
    }

    /// Ends every lingering that is over. Returns whether that of the agent is.
    pub(super) fn expire(&mut self) -> bool {
        let now = Instant::now();
        let over = |since: Option<Instant>| since.is_some_and(|since| now.duration_since(since) >= LINGER);
        self.instances.retain(|instance| !over(instance.empty_since));
        let absent = over(self.empty_since);
        if absent {
            self.empty_since = None;
        }
        absent
    }

    /// Withdraws the announcement of an agent that has no tunnel, and forgets its processes.
    pub(super) fn withdraw(&mut self) {
        self.instances.clear();
        self.empty_since = None;
        drop(self.announced.take());
    }

    /// Whether the agent has a tunnel or lingers.
    pub(super) fn is_present(&self) -> bool {
        self.tunnels > 0 || self.announced.is_some()
    }

    pub(super) fn is_unused(&self) -> bool {
        !self.is_present() && self.transports == 0
    }
}
