//! Finding the other replicas: from the sections `private_api`, `discovery` and `gossip`, or `redis`, to a running tracker.
//!
//! The only place that knows every part of it. [`Mesh::bind`] takes the ports, [`Mesh::run`] runs until dropped.

use std::{collections::HashSet, net::SocketAddr, sync::Arc, time::Duration};

use cluster::{Replica, Tracker};
use discovery::{Discovery, Dns, HostPort, Kubernetes, PortSelector, Static};
use gossip::{Gossip, KeyRing, Timing};
use ids::ReplicaId;
use runtime::{io::Listener, tls::Live};
use tokio::{sync::watch, task::AbortHandle};

use crate::{
    advertise,
    auth::JwtVerifier,
    config::{self, DnsRecords, RedisPasswords, ServicePort, secret::ApiSecret},
    listener::private::PrivateListener,
    metrics::Metrics,
    peer::{Credential, ISSUER, Peers},
    rate_limit::RateLimit,
    replication::{self, DEAF, HUNG, Replication},
    shared::{self, Shared},
    tunnel_registry::TunnelRegistry,
};

/// How long discovery may take to name a replica whose route tells this one's own address.
const FIRST_SEED: Duration = Duration::from_secs(60);
/// How often that is tried.
const AGAIN: Duration = Duration::from_secs(1);
/// By how much clocks of replicas may differ.
const LEEWAY: Duration = Duration::from_secs(30);

/// Why the other replicas cannot be looked for.
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
    /// The private API listens on no address of an interface.
    #[error("private_api.listen: other replicas need a TCP address")]
    NoAddress,
    /// The section `redis`.
    #[error(transparent)]
    Redis(#[from] shared::Error),
}

/// How this replica and the others know of each other.
#[derive(Clone, Debug)]
pub enum Others {
    /// They tell each other.
    Gossip(Arc<Replication>),
    /// They share a Redis.
    Redis(Arc<Shared>),
}

impl Others {
    /// Returns the tracker.
    pub fn tracker(&self) -> Arc<dyn Tracker> {
        match self {
            Self::Gossip(replication) => Arc::clone(replication) as _,
            Self::Redis(shared) => Arc::clone(shared) as _,
        }
    }

    /// Returns the tracker that shares a Redis, if it is that one.
    pub fn shared(&self) -> Option<Arc<Shared>> {
        match self {
            Self::Gossip(_) => None,
            Self::Redis(shared) => Some(Arc::clone(shared)),
        }
    }

    /// Tells the tracker where this replica's tunnels are, for what it tells others of them.
    pub fn serve(&self, registry: Arc<TunnelRegistry>) {
        match self {
            Self::Gossip(replication) => replication.serve(registry),
            Self::Redis(shared) => shared.serve(registry),
        }
    }

    /// Makes a limit of each replica one of all of them.
    pub fn keep_together(&self, limit: RateLimit) -> RateLimit {
        match self {
            Self::Gossip(replication) => limit.parted(replication.live()),
            Self::Redis(_) => limit.told(),
        }
    }

    /// Carries between replicas what limits have counted, each under its name.
    pub fn tell(&self, limits: shared::Limits) {
        match self {
            // Each has its part, and nothing to tell.
            Self::Gossip(_) => {}
            Self::Redis(shared) => shared.tell(limits),
        }
    }

    /// Returns whether the replica should get requests, and why when it should not.
    pub fn ready(&self) -> (watch::Receiver<bool>, &'static str) {
        match self {
            Self::Gossip(replication) => {
                (replication.ready(), "the tables of the other replicas are not known yet")
            }
            Self::Redis(shared) => (shared.ready(), "Redis cannot be asked"),
        }
    }

    /// Tells the others that this replica leaves soon.
    pub fn drain(&self) {
        match self {
            Self::Gossip(replication) => replication.announce(table::State::Draining),
            Self::Redis(shared) => shared.drain(),
        }
    }

    /// Says the last word to the others.
    pub async fn leave(&self) {
        match self {
            Self::Gossip(replication) => replication.leave().await,
            Self::Redis(shared) => shared.leave().await,
        }
    }
}

/// What runs: the tracker, and what it needs.
enum Running {
    Gossip {
        replication: Arc<Replication>,
        gossip: Gossip,
        seeds: watch::Receiver<HashSet<SocketAddr>>,
        /// Keeps discovery running.
        discovery: Option<AbortOnDrop>,
    },
    Redis(Arc<Shared>),
}

/// What finds the other replicas, and talks to them.
pub struct Mesh {
    /// This replica.
    pub me: Replica,
    /// The tracker.
    pub others: Others,
    /// The links.
    pub peers: Arc<Peers>,
    running: Running,
    credential: Arc<Credential>,
    keys: watch::Sender<Arc<KeyRing>>,
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

fn discovery(config: &config::Discovery) -> Result<Option<Box<dyn Discovery>>, MeshError> {
    Ok(Some(match config {
        config::Discovery::None => return Ok(None),
        config::Discovery::Static(addresses) => {
            let seeds = addresses
                .iter()
                .map(|text| text.parse::<HostPort>().map_err(|error| MeshError::Seed(text.clone(), error)))
                .collect::<Result<Vec<_>, _>>()?;
            Box::new(Static::new(seeds))
        }
        config::Discovery::Dns { name, records, refresh, nameserver } => {
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
        config::Discovery::Kubernetes { service, namespace, port } => {
            let port = match port {
                ServicePort::Number(number) => PortSelector::Number(*number),
                ServicePort::Name(name) => PortSelector::Name(name.clone()),
            };
            Box::new(Kubernetes::in_cluster(namespace.as_deref(), service, port)?)
        }
    }))
}

/// Returns what calls other replicas.
fn links(
    me: &Replica,
    secrets: &[ApiSecret],
    tls: Option<Live<rustls::ClientConfig>>,
) -> Result<(Arc<Credential>, Arc<Peers>), MeshError> {
    // Config has at least one.
    let first = secrets.first().ok_or(gossip::KeyError::Empty)?;
    let credential = Arc::new(Credential::new(me.id.clone(), first));
    let peers = Peers::new(me.id.clone(), Arc::clone(&credential), tls);
    Ok((credential, peers))
}

fn ring(secrets: &[ApiSecret]) -> Result<KeyRing, gossip::KeyError> {
    KeyRing::derive(&secrets.iter().map(ApiSecret::expose).collect::<Vec<_>>())
}

/// Returns what checks the tokens of other replicas.
pub fn verifier(secrets: &[ApiSecret]) -> JwtVerifier {
    JwtVerifier::new(secrets, &[ISSUER.to_owned()], LEEWAY)
}

/// Waits until it is clear where others reach this replica.
async fn own_address(
    config: &config::PrivateApi,
    bound: SocketAddr,
    seeds: &mut watch::Receiver<HashSet<SocketAddr>>,
) -> Result<SocketAddr, advertise::Error> {
    let until = tokio::time::Instant::now() + FIRST_SEED;
    let mut said = false;
    loop {
        let now = seeds.borrow_and_update().clone();
        let asked = config.clone();
        let told = tokio::task::spawn_blocking(move || advertise::address(&asked, bound, &now)).await;
        let error = match told {
            Ok(Ok(address)) => return Ok(address),
            Ok(Err(error)) => error,
            Err(_) => advertise::Error::Unknown,
        };
        if matches!(error, advertise::Error::Loopback { .. }) {
            return Err(error);
        }
        if !said {
            said = true;
            tracing::warn!(
                reason = crate::peer::chain(&error),
                within = ?FIRST_SEED,
                "where other replicas reach this one is not known yet: trying again"
            );
        }
        if tokio::time::Instant::now() >= until {
            return Err(error);
        }
        tokio::select! {
            changed = seeds.changed() => if changed.is_err() { tokio::time::sleep(AGAIN).await },
            // A name may have an address by now.
            () = tokio::time::sleep(AGAIN) => {}
        }
    }
}

impl Mesh {
    /// Takes gossip's port, which is that of `listener`, and begins to look for others; `tls` is for calling them.
    ///
    /// # Errors
    /// See [`MeshError`]; nothing runs then.
    pub async fn bind(
        config: &config::Replication,
        secrets: &[ApiSecret],
        tls: Option<Live<rustls::ClientConfig>>,
        listener: &Listener,
        metrics: &Arc<Metrics>,
    ) -> Result<Self, MeshError> {
        let bound = listener.local_addr().ok_or(MeshError::NoAddress)?;
        let (found, mut seeds) = watch::channel(HashSet::new());
        let discovery = discovery(&config.discovery)?.map(|discovery| {
            let task = tokio::spawn(async move {
                let error = discovery.run(found).await;
                tracing::error!(error = crate::peer::chain(&error), "discovery has stopped");
            });
            AbortOnDrop(task.abort_handle())
        });
        let address = own_address(&config.private_api, bound, &mut seeds).await?;
        let text = address.to_string();
        let me = Replica { id: ReplicaId::new(&text), address: text.as_str().into() };
        tracing::info!(replica = %me.id, "other replicas reach this one here");
        let (keys, ring) = watch::channel(Arc::new(ring(secrets)?));
        let gossip = Gossip::builder(text)
            .cluster(config.gossip.cluster.clone())
            .listen(bound)
            .advertise(address)
            .keys(ring)
            .seeds(seeds.clone())
            .timing(Timing {
                interval: config.gossip.interval,
                phi: config.gossip.phi,
                initial_interval: config.gossip.interval * 3 / 2,
                dead_grace: config.gossip.dead_grace,
            })
            .gate("st", table::State::Hung.as_str(), HUNG)
            .hush(DEAF)
            .start()
            .await?;
        let (credential, peers) = links(&me, secrets, tls)?;
        let replication = Replication::new(
            me.clone(),
            Arc::clone(&peers),
            Arc::clone(metrics),
            config.table_ttl,
            config.gossip.interval,
        );
        Ok(Self {
            me,
            others: Others::Gossip(Arc::clone(&replication)),
            peers,
            running: Running::Gossip { replication, gossip, seeds, discovery },
            credential,
            keys,
        })
    }

    /// As [`bind`](Self::bind), for replicas that share a Redis: it is not dialled yet, and need not be there.
    ///
    /// # Errors
    /// See [`MeshError`]; nothing runs then.
    pub async fn share(
        config: &config::Shared,
        secrets: &[ApiSecret],
        passwords: RedisPasswords,
        tls: Option<Live<rustls::ClientConfig>>,
        listener: &Listener,
        metrics: &Arc<Metrics>,
    ) -> Result<Self, MeshError> {
        let bound = listener.local_addr().ok_or(MeshError::NoAddress)?;
        // Nobody names others before Redis does; the way to it is what all replicas have.
        let (found, mut places) = watch::channel(shared::places(&config.redis).await);
        let look_again = async {
            loop {
                tokio::time::sleep(AGAIN).await;
                found.send_replace(shared::places(&config.redis).await);
            }
        };
        let address = tokio::select! {
            address = own_address(&config.private_api, bound, &mut places) => address?,
            never = look_again => never,
        };
        let text = address.to_string();
        let me = Replica { id: ReplicaId::new(&text), address: text.as_str().into() };
        tracing::info!(replica = %me.id, "other replicas reach this one here");
        let (credential, peers) = links(&me, secrets, tls)?;
        let shared = Shared::new(me.clone(), config, passwords, Arc::clone(&peers), Arc::clone(metrics))?;
        Ok(Self {
            me,
            others: Others::Redis(Arc::clone(&shared)),
            peers,
            running: Running::Redis(shared),
            credential,
            keys: watch::Sender::new(Arc::new(ring(secrets)?)),
        })
    }

    /// Returns the services of the private API besides `Borrow`.
    pub fn services(&self) -> Vec<(String, crate::listener::Own)> {
        match &self.others {
            Others::Gossip(replication) => replication::services(replication),
            Others::Redis(shared) => shared.services(),
        }
    }

    /// Returns what exchanges the secrets: the first signs and seals, any verifies and opens.
    pub fn rotation(&self, private: Arc<PrivateListener>) -> Rotation {
        Rotation { private, credential: Arc::clone(&self.credential), keys: self.keys.clone() }
    }

    /// Runs until dropped.
    pub async fn run(self) {
        match self.running {
            Running::Gossip { replication, gossip, seeds, discovery: _discovery } => {
                tokio::join!(Arc::clone(&replication).check_own_address(), replication.run(gossip, seeds));
            }
            Running::Redis(shared) => Box::pin(shared.run()).await,
        }
    }
}

/// Exchanges the secrets of the private API wherever they are used.
pub struct Rotation {
    private: Arc<PrivateListener>,
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
    /// When there is none, or one is too short; nothing is exchanged then.
    pub fn exchange(&self, secrets: &[ApiSecret]) -> Result<(), gossip::KeyError> {
        let ring = ring(secrets)?;
        let first = secrets.first().ok_or(gossip::KeyError::Empty)?;
        // Opened with all of them before anything is sealed with the new first one.
        self.private.rotate(verifier(secrets));
        self.keys.send_replace(Arc::new(ring));
        self.credential.rotate(first);
        Ok(())
    }
}
