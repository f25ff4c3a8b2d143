//! Seeds from a list.

use std::{collections::HashSet, net::SocketAddr, time::Duration};

use async_trait::async_trait;
use tokio::sync::watch;

use crate::{
    Discovery, DiscoveryError, Health,
    health::Publisher,
    host_port::{Host, HostPort},
    lookup::Lookup,
};

/// Finds replicas by a list. Names in it are looked up as [`Dns`](crate::Dns) does, independently: one that
/// fails keeps its last answer and does not affect the others. An empty list is allowed, for a replica that
/// runs alone.
#[derive(Debug)]
pub struct Static {
    lookup: Lookup,
    health: watch::Sender<Health>,
}

impl Static {
    /// Uses every address of every entry.
    pub fn new(seeds: impl IntoIterator<Item = HostPort>) -> Self {
        let mut lookup = Lookup::new();
        for HostPort { host, port } in seeds {
            match host {
                Host::Ip(ip) => {
                    lookup.fixed.insert((ip, port).into());
                }
                Host::Name(name) => lookup.hosts.push((name, port)),
            }
        }
        Self { lookup, health: watch::Sender::default() }
    }

    /// Sets the maximum time between lookups, as [`Dns::interval`](crate::Dns::interval).
    #[must_use]
    pub fn interval(mut self, interval: Duration) -> Self {
        self.lookup.interval = interval;
        self
    }

    /// Queries this name server, as [`Dns::nameserver`](crate::Dns::nameserver).
    #[must_use]
    pub fn nameserver(mut self, address: SocketAddr) -> Self {
        self.lookup.nameserver = Some(address);
        self
    }
}

#[async_trait]
impl Discovery for Static {
    fn health(&self) -> watch::Receiver<Health> {
        self.health.subscribe()
    }

    async fn run(self: Box<Self>, seeds: watch::Sender<HashSet<SocketAddr>>) -> DiscoveryError {
        let Self { lookup, health } = *self;
        match lookup.run(&Publisher { source: "static", seeds, health: &health }).await {}
    }
}
