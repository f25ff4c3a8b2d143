//! The requests that wait for a tunnel of one agent.
//!
//! Requests of other replicas wait here too. Of the sources whose requests a free tunnel can serve, the one
//! that was served longest ago comes first: this replica is one source, and each other replica is another.
//! Requests of the same source are served in the order of their arrival.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, atomic::Ordering},
};

use ids::{AgentId, ConnectionId, ReplicaId};
use tunnel::kas_end::Info;

use super::{Gone, Grant, Needs, Refused, TunnelRegistry};
use crate::{
    flaw::{Flaw, flawed},
    sync::oneshot,
};

/// Whose request it is: this replica's (`None`) or that of another one.
pub(super) type Source = Option<ReplicaId>;
pub(super) type Sender = oneshot::Sender<Result<Grant, Gone>>;
type Receiver = oneshot::Receiver<Result<Grant, Gone>>;

/// Whose requests wait in a queue, and which tunnels can serve them.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct QueueKey {
    pub(super) source: Source,
    pub(super) method: Arc<str>,
    /// `None`: any connection.
    pub(super) connection: Option<ConnectionId>,
    pub(super) needs: Needs,
}

/// What a free tunnel can serve, besides what [`Info`] says.
#[derive(Clone, Copy)]
pub(super) struct Offer {
    /// To which connection it is bound.
    pub(super) connection: Option<ConnectionId>,
    /// Whether a request without an end of its own may have it.
    pub(super) takes_endless: bool,
}

impl QueueKey {
    /// Whether a tunnel can serve the requests of the queue. `connection`: to which one the tunnel is bound.
    pub(super) fn accepts(&self, info: &Info, connection: impl FnOnce() -> Option<ConnectionId>) -> bool {
        info.features.contains(self.needs.features)
            && info.descriptor.serves(&self.method)
            && (self.connection.is_none() || self.connection == connection())
    }
}

/// All queues of an agent.
#[derive(Default)]
pub(super) struct Queue {
    queues: HashMap<QueueKey, BTreeMap<u64, Sender>>,
    waiting: usize,
    serial: u64,
    /// The value of `served` when each waiting source was last served.
    last_served: HashMap<Source, u64>,
    served: u64,
}

impl Queue {
    /// Returns how many requests wait.
    pub(super) fn len(&self) -> usize {
        self.waiting
    }

    /// Adds a request. Returns its serial, and where its tunnel arrives.
    pub(super) fn enter(&mut self, key: &QueueKey) -> (u64, Receiver) {
        self.serial += 1;
        self.waiting += 1;
        let (sender, receiver) = oneshot::channel();
        self.queues.entry(key.clone()).or_default().insert(self.serial, sender);
        (self.serial, receiver)
    }

    /// Removes a request, if it still waits.
    fn leave(&mut self, key: &QueueKey, serial: u64) {
        if flawed(Flaw::WaiterNeverLeaves) {
            return;
        }
        let Some(queue) = self.queues.get_mut(key) else { return };
        if queue.remove(&serial).is_some() {
            self.waiting -= 1;
        }
        if queue.is_empty() {
            self.forget(key);
        }
    }

    /// Gives a free tunnel to the request whose turn it is among those that it can serve, and returns what
    /// that one needs.
    ///
    /// # Errors
    /// Returns the tunnel if there is no such request.
    pub(super) fn offer(&mut self, grant: Grant, offer: Offer) -> Result<Needs, Grant> {
        let mut grant = grant;
        loop {
            let info = grant.tunnel().info();
            let key = self
                .queues
                .iter()
                .filter(|(key, _)| offer.takes_endless || !key.needs.is_endless)
                .filter(|(key, _)| key.accepts(info, || offer.connection))
                .filter_map(|(key, queue)| queue.first_key_value().map(|(serial, _)| (*serial, key)))
                .min_by_key(|(serial, key)| {
                    (self.last_served.get(&key.source).copied().unwrap_or(0), *serial)
                })
                .map(|(_, key)| key.clone());
            let Some(key) = key else { return Err(grant) };
            let Some((_, sender)) = self.queues.get_mut(&key).and_then(BTreeMap::pop_first) else {
                return Err(grant);
            };
            self.waiting -= 1;
            self.served += 1;
            self.last_served.insert(key.source.clone(), self.served);
            if self.queues.get(&key).is_some_and(BTreeMap::is_empty) {
                self.forget(&key);
            }
            match sender.send(Ok(grant)) {
                // That request has left.
                Err(Ok(back)) => grant = back,
                Ok(()) | Err(Err(_)) => return Ok(key.needs),
            }
        }
    }

    /// Whether a request waits that a tunnel could serve.
    pub(super) fn wants(&self, info: &Info, connection: impl Fn() -> Option<ConnectionId>) -> bool {
        self.queues.keys().any(|key| key.accepts(info, &connection))
    }

    /// Removes an empty queue, and the source if nothing of it waits any more.
    fn forget(&mut self, key: &QueueKey) {
        self.queues.remove(key);
        if !self.queues.keys().any(|other| other.source == key.source) {
            self.last_served.remove(&key.source);
        }
    }

    /// Removes the requests of all other replicas.
    pub(super) fn take_remote(&mut self) -> Vec<Sender> {
        let remote: Vec<QueueKey> = self.queues.keys().filter(|key| key.source.is_some()).cloned().collect();
        let mut senders = Vec::new();
        for key in remote {
            let queue = self.queues.remove(&key).unwrap_or_default();
            self.waiting -= queue.len();
            senders.extend(queue.into_values());
        }
        self.last_served.retain(|source, _| source.is_none());
        senders
    }

    /// Removes the requests for which `refuses` has a reason.
    pub(super) fn take_refused(
        &mut self,
        refuses: impl Fn(&QueueKey) -> Option<Refused>,
    ) -> Vec<(Sender, Refused)> {
        let refused = |key: &QueueKey| Some((key.clone(), refuses(key)?));
        let refused: Vec<(QueueKey, Refused)> = self.queues.keys().filter_map(refused).collect();
        let mut senders = Vec::new();
        for (key, refused) in refused {
            let queue = self.queues.remove(&key).unwrap_or_default();
            self.waiting -= queue.len();
            senders.extend(queue.into_values().map(|sender| (sender, refused)));
            self.forget(&key);
        }
        senders
    }

    /// Removes all requests, which then fail with [`Gone::Leaving`].
    pub(super) fn clear(&mut self) {
        self.waiting = 0;
        self.queues.clear();
    }
}

/// A place in the queue. Dropping it leaves the queue.
#[derive(Debug)]
pub struct Waiting {
    pub(super) registry: Arc<TunnelRegistry>,
    pub(super) agent: AgentId,
    pub(super) key: QueueKey,
    pub(super) serial: u64,
    pub(super) receiver: Receiver,
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
            agent.queue.leave(&self.key, self.serial);
            if agent.is_unused() {
                shard.remove(&self.agent);
            }
        }
        // A grant that was already sent is returned when the receiver drops, after the lock is released.
    }
}
