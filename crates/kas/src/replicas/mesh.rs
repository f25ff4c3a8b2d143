//! [`Mesh`]: builds the backend and the links to other replicas from the configuration.

use std::{collections::HashSet, net::SocketAddr, sync::Arc, time::Duration};

use cluster::{Doors, Replica};
use discovery::{Discovery, Dns, HostPort, Kubernetes, PortSelector, Static};
use gossip::KeyRing;
use ids::ReplicaId;
use net::{io::Listener, tls::Live};
use process::error::chain;
use settings::secret::ApiSecret;
use tokio::{sync::watch, task::AbortHandle};

use super::{
    Backend, advertise,
    gossip_backend::{self, GossipBackend},
    metrics::ReplicaMetrics,
    redis_backend::{self, RedisBackend},
};
use kas_config::{self, DnsRecords, RedisPasswords, ServicePort};
use routing::peer::{Credential, Peers};

/// How long the own address may remain unknown: discovery must find a replica, or a name an address, in this
/// time.
const ADDRESS_TIMEOUT: Duration = Duration::from_secs(60);
/// How often the own address is determined again.
const ADDRESS_RETRY: Duration = Duration::from_secs(1);

/// Why this replica cannot find the others.
#[derive(Debug, thiserror::Error)]
pub enum MeshError {
    /// The address at which others reach this replica.
    #[error("private_api")]
    Advertise(#[from] advertise::Error),
    /// The section `discovery`.
    #[error("discovery")]
    Discovery(#[from] discovery::DiscoveryError),
    /// A seed.
    #[error("discovery.static.addresses: {0:?}")]
    Seed(String, #[source] discovery::HostPortError),
    /// Gossip's port or settings.
    #[error("gossip")]
    Gossip(#[from] gossip::StartError),
    /// The shared secret.
    #[error("private_api.listen.authentication_secret_file")]
    Keys(#[from] gossip::KeyError),
    /// The private API does not listen on a TCP address.
    #[error("private_api.listen: other replicas need a TCP address")]
    NoAddress,
    /// The section `redis`.
    #[error(transparent)]
    Redis(#[from] redis_backend::Error),
}

/// The other replicas: how this one finds them and calls them.
pub struct Mesh {
    /// This replica.
    pub me: Replica,
    /// Where callers reach this replica from other hosts.
    pub doors: Doors,
    /// How replicas learn of each other.
    pub backend: Arc<dyn Backend>,
    /// The links.
    pub peers: Arc<Peers>,
    credential: Arc<Credential>,
    keys: watch::Sender<Arc<KeyRing>>,
    /// Keeps discovery running.
    _discovery: Option<AbortOnDrop>,
}

impl std::fmt::Debug for Mesh {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Mesh").field("me", &self.me).finish_non_exhaustive()
    }
}

struct AbortOnDrop(AbortHandle);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

fn discovery(config: &kas_config::Discovery) -> Result<Option<Box<dyn Discovery>>, MeshError> {
    Ok(Some(match config {
        kas_config::Discovery::None => return Ok(None),
        kas_config::Discovery::Static(addresses) => {
            let seeds = addresses
                .iter()
                .map(|text| text.parse::<HostPort>().map_err(|error| MeshError::Seed(text.clone(), error)))
                .collect::<Result<Vec<_>, _>>()?;
            Box::new(Static::new(seeds))
        }
        kas_config::Discovery::Dns { name, records, refresh, nameserver } => {
            let dns = match *records {
                DnsRecords::Addresses { port } => Dns::addresses(name, port)?,
                DnsRecords::Srv => Dns::srv(name)?,
            };
            let dns = dns.interval(*refresh);
            Box::new(match nameserver {
                Some(nameserver) => dns.nameserver(*nameserver),
                None => dns,
            })
        }
        kas_config::Discovery::Kubernetes { service, namespace, port } => {
            let port = match port {
                ServicePort::Number(number) => PortSelector::Number(*number),
                ServicePort::Name(name) => PortSelector::Name(name.clone()),
            };
            Box::new(Kubernetes::in_cluster(namespace.as_deref(), service, port)?)
        }
    }))
}

/// Returns the links to other replicas.
fn links(
    me: &Replica,
    secrets: &[ApiSecret],
    tls: Option<Live<rustls::ClientConfig>>,
) -> Result<(Arc<Credential>, Arc<Peers>), MeshError> {
    // The configuration has at least one.
    let first = secrets.first().ok_or(gossip::KeyError::Empty)?;
    let credential = Arc::new(Credential::new(me.id.clone(), first));
    let peers = Peers::new(me.id.clone(), Arc::clone(&credential), tls);
    Ok((credential, peers))
}

fn ring(secrets: &[ApiSecret]) -> Result<KeyRing, gossip::KeyError> {
    KeyRing::derive(&secrets.iter().map(ApiSecret::expose).collect::<Vec<_>>())
}

/// Waits until the address at which others reach this replica is known.
async fn own_address(
    config: &kas_config::PrivateApi,
    bound: SocketAddr,
    seeds: &mut watch::Receiver<HashSet<SocketAddr>>,
) -> Result<SocketAddr, advertise::Error> {
    let until = tokio::time::Instant::now() + ADDRESS_TIMEOUT;
    let mut logged = false;
    loop {
        let current = seeds.borrow_and_update().clone();
        let private_api = config.clone();
        let address =
            tokio::task::spawn_blocking(move || advertise::address(&private_api, bound, &current)).await;
        let error = match address {
            Ok(Ok(address)) => return Ok(address),
            Ok(Err(error)) => error,
            Err(_) => advertise::Error::Unknown,
        };
        if matches!(error, advertise::Error::Loopback { .. }) {
            return Err(error);
        }
        if !logged {
            logged = true;
            tracing::warn!(
                reason = chain(&error),
                within = ?ADDRESS_TIMEOUT,
                "the address at which other replicas reach this one is not known yet: trying again"
            );
        }
        if tokio::time::Instant::now() >= until {
            return Err(error);
        }
        tokio::select! {
            changed = seeds.changed() => if changed.is_err() { tokio::time::sleep(ADDRESS_RETRY).await },
            // A name may have an address by now.
            () = tokio::time::sleep(ADDRESS_RETRY) => {}
        }
    }
}

/// Returns this replica, which others reach at `address`.
fn replica(address: SocketAddr) -> Replica {
    let text = address.to_string();
    let me = Replica { id: ReplicaId::new(&text), address: text.as_str().into() };
    tracing::info!(replica = %me.id, "other replicas reach this one here");
    me
}

impl Mesh {
    /// Starts gossip on the port of `listener`, and discovery. `tls` is for calls to other replicas.
    /// `bound_doors` are the addresses that the listeners for callers are bound to.
    ///
    /// # Errors
    /// See [`MeshError`]. Nothing keeps running then.
    pub async fn gossip(
        config: &kas_config::Replication,
        secrets: &[ApiSecret],
        tls: Option<Live<rustls::ClientConfig>>,
        listener: &Listener,
        bound_doors: Doors,
        metrics: &Arc<ReplicaMetrics>,
    ) -> Result<Self, MeshError> {
        let bound = listener.local_addr().ok_or(MeshError::NoAddress)?;
        let (found, mut seeds) = watch::channel(HashSet::new());
        let discovery = discovery(&config.discovery)?.map(|discovery| {
            let task = tokio::spawn(async move {
                let error = discovery.run(found).await;
                tracing::error!(error = chain(&error), "discovery has stopped");
            });
            AbortOnDrop(task.abort_handle())
        });
        let address = own_address(&config.private_api, bound, &mut seeds).await?;
        let me = replica(address);
        let doors = advertise::doors(bound_doors, address.ip());
        let (keys, ring) = watch::channel(Arc::new(ring(secrets)?));
        let gossip =
            gossip_backend::start(&config.gossip, &me.address, bound, address, ring, seeds.clone()).await?;
        let (credential, peers) = links(&me, secrets, tls)?;
        let backend = GossipBackend::new(gossip_backend::Parts {
            me: me.clone(),
            cluster: config.gossip.cluster.clone(),
            doors,
            peers: Arc::clone(&peers),
            metrics: Arc::clone(metrics),
            gossip,
            seeds,
            ttl: config.table_ttl,
            interval: config.gossip.interval,
        });
        Ok(Self { me, doors, backend, peers, credential, keys, _discovery: discovery })
    }

    /// As [`gossip`](Self::gossip), for replicas that share a Redis. Redis need not be reachable yet. Also
    /// returns the backend, for changes of its settings.
    ///
    /// # Errors
    /// See [`MeshError`]. Nothing keeps running then.
    pub async fn redis(
        config: &kas_config::Shared,
        secrets: &[ApiSecret],
        passwords: RedisPasswords,
        tls: Option<Live<rustls::ClientConfig>>,
        listener: &Listener,
        bound_doors: Doors,
        metrics: &Arc<ReplicaMetrics>,
    ) -> Result<(Self, Arc<RedisBackend>), MeshError> {
        let bound = listener.local_addr().ok_or(MeshError::NoAddress)?;
        // The other replicas are not known before Redis is reached. All replicas can reach Redis, so its
        // addresses determine the route.
        let (found, mut targets) = watch::channel(redis_backend::addresses(&config.redis).await);
        let refresh = async {
            loop {
                tokio::time::sleep(ADDRESS_RETRY).await;
                found.send_replace(redis_backend::addresses(&config.redis).await);
            }
        };
        let address = tokio::select! {
            address = own_address(&config.private_api, bound, &mut targets) => address?,
            never = refresh => never,
        };
        let me = replica(address);
        let (credential, peers) = links(&me, secrets, tls)?;
        let doors = advertise::doors(bound_doors, address.ip());
        let (links, metrics) = (Arc::clone(&peers), Arc::clone(metrics));
        let backend = RedisBackend::new(me.clone(), config, passwords, doors, links, metrics)?;
        let mesh = Self {
            me,
            doors,
            backend: Arc::clone(&backend) as _,
            peers,
            credential,
            keys: watch::Sender::new(Arc::new(ring(secrets)?)),
            _discovery: None,
        };
        Ok((mesh, backend))
    }

    /// Returns what changes the secrets. The first secret signs and seals, each of them verifies and opens.
    /// `accept` makes the private API accept tokens that are signed with any of them.
    pub fn rotation(&self, accept: impl Fn(&[ApiSecret]) + Send + Sync + 'static) -> Rotation {
        Rotation {
            accept: Box::new(accept),
            credential: Arc::clone(&self.credential),
            keys: self.keys.clone(),
        }
    }

    /// Runs until dropped.
    pub async fn run(self) {
        Arc::clone(&self.backend).run().await;
    }
}

/// Makes the private API accept tokens that are signed with any of the secrets.
type Accept = Box<dyn Fn(&[ApiSecret]) + Send + Sync>;

/// Changes the secrets of the private API wherever they are used.
pub struct Rotation {
    accept: Accept,
    credential: Arc<Credential>,
    keys: watch::Sender<Arc<KeyRing>>,
}

impl std::fmt::Debug for Rotation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Rotation").field("credential", &self.credential).finish_non_exhaustive()
    }
}

impl Rotation {
    /// Uses `secrets` from now on.
    ///
    /// # Errors
    /// If there is none, or one is too short. Nothing changes then.
    pub fn rotate(&self, secrets: &[ApiSecret]) -> Result<(), gossip::KeyError> {
        let ring = ring(secrets)?;
        let first = secrets.first().ok_or(gossip::KeyError::Empty)?;
        // All secrets are accepted before the new first one is used for signing and sealing.
        (self.accept)(secrets);
        self.keys.send_replace(Arc::new(ring));
        self.credential.rotate(first);
        Ok(())
    }
}
