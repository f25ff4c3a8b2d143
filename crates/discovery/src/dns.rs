//! Seeds from a DNS name.

use std::{collections::HashSet, net::SocketAddr, time::Duration};

use async_trait::async_trait;
use hickory_resolver::proto::rr::Name;
use tokio::sync::watch;

use crate::{Discovery, DiscoveryError, Health, health::Publisher, lookup::Lookup};

/// Finds replicas by a DNS name, such as that of a headless Service or of a container network.
///
/// Looks the name up again when the time to live of the answer ends, at least every
/// [`interval`](Self::interval), at most once a second. If a lookup fails or the name does not exist any
/// more, the last answer is kept: DNS answers the same when a service has no replica and when its zone is not
/// loaded yet.
#[derive(Debug)]
pub struct Dns {
    lookup: Lookup,
    health: watch::Sender<Health>,
}

impl Dns {
    /// Uses all A and AAAA records of a name, each with this port. Names of `/etc/hosts` work too.
    ///
    /// A final dot, as in `kas.shop.svc.cluster.local.`, avoids the search domains: without it, a pod's
    /// `resolv.conf` turns two queries into ten.
    ///
    /// # Errors
    ///
    /// [`DiscoveryError::Name`].
    pub fn addresses(name: &str, port: u16) -> Result<Self, DiscoveryError> {
        let name = parse(name)?;
        let mut lookup = Lookup::new();
        lookup.hosts.push((name, port));
        Ok(Self { lookup, health: watch::Sender::default() })
    }

    /// Uses all SRV records of a name, such as `_gossip._udp.kas.shop.svc.cluster.local`, with their ports.
    /// Priorities and weights are ignored.
    ///
    /// # Errors
    ///
    /// [`DiscoveryError::Name`].
    pub fn srv(name: &str) -> Result<Self, DiscoveryError> {
        let mut lookup = Lookup::new();
        lookup.service = Some(parse(name)?);
        Ok(Self { lookup, health: watch::Sender::default() })
    }

    /// Sets the maximum time between lookups; 5 s by default. Each wait is up to a fifth shorter, so that
    /// replicas do not query in step. A shorter interval finds a new replica earlier and queries the name
    /// servers more often.
    #[must_use]
    pub fn interval(mut self, interval: Duration) -> Self {
        self.lookup.interval = interval;
        self
    }

    /// Queries this name server, over UDP and TCP, instead of those in the system's `resolv.conf`. Its search
    /// domains do not apply then, so the name must be complete.
    #[must_use]
    pub fn nameserver(mut self, address: SocketAddr) -> Self {
        self.lookup.nameserver = Some(address);
        self
    }
}

fn parse(name: &str) -> Result<Name, DiscoveryError> {
    // Not strict: SRV names contain underscores.
    match Name::from_str_relaxed(name) {
        Ok(parsed) if parsed.num_labels() > 0 => Ok(parsed),
        Ok(_) => {
            Err(DiscoveryError::Name { name: name.to_owned(), source: "the root has no addresses".into() })
        }
        Err(source) => Err(DiscoveryError::Name { name: name.to_owned(), source }),
    }
}

#[async_trait]
impl Discovery for Dns {
    fn health(&self) -> watch::Receiver<Health> {
        self.health.subscribe()
    }

    async fn run(self: Box<Self>, seeds: watch::Sender<HashSet<SocketAddr>>) -> DiscoveryError {
        let Self { lookup, health } = *self;
        match lookup.run(&Publisher { source: "dns", seeds, health: &health }).await {}
    }
}
