//! [`RedisBackend`]: replicas share a Redis. It adds to [`redis_tracker`] what that does not know of kas.
//!
//! Replicas learn each other's addresses from their keys in Redis, and call each other on the private API.

use std::{collections::HashSet, net::SocketAddr, path::PathBuf, sync::Arc, time::Duration};

use async_trait::async_trait;
use cluster::{
    AgentView, Candidate, ClusterView, Connected, Connection, Connections, Doors, Lease, Locator, Mark,
    PeerReport, Query, Replica, ReplicaHealth, ReplicaState, Replicas, TrackerError, TrackerStatus,
    Unanswered,
};
use futures_util::stream;
use grpc::service::{LocalService, local_service};
use ids::{AgentId, ReplicaId};
use parking_lot::Mutex;
use proto::kas::internal::v1::{
    ConnectionsRequest, ConnectionsResponse, ExplainRequest, ExplainResponse,
    replica_server::{Replica as ReplicaService, ReplicaServer},
};
use redis_tracker::{Address, Connect, RedisTracker, Target, Tls};
use tokio::{
    sync::watch,
    time::{Instant, MissedTickBehavior},
};
use tonic::{Request, Response, Status};

use super::{Backend, answer, ask, metrics::ReplicaMetrics};
use kas_config::{self, HostPort, RedisAddress, RedisPasswords, RedisTarget};
use observe::refusals::Refusals;
use routing::{
    peer::Peers,
    rate_limit::{RateLimit, Total},
    registry::TunnelRegistry,
};

/// How often metrics are updated and links to replicas that are gone are closed.
const LOOK: Duration = Duration::from_millis(500);
/// How often the counts of limits are exchanged with the other replicas, over an existing connection.
const EXCHANGE: Duration = Duration::from_millis(200);
/// Tokens in one pipeline of counts.
const MAX_CHARGES: usize = 500;
/// How long leaving may take. Entries that are not removed by then expire.
const LEAVING: Duration = Duration::from_secs(3);

/// Why the settings for Redis cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file cannot be read.
    #[error("redis.tls.{key}: {path}")]
    File {
        /// The key of the configuration.
        key: &'static str,
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A key file that is not text.
    #[error("redis.tls.key_file: {0} is not PEM")]
    Key(PathBuf),
    /// Files that do not fit together, such as a key and another certificate.
    #[error("redis.tls")]
    Tls(#[source] net::tls::Error),
    /// A certificate, key or address cannot be used.
    #[error("redis")]
    Redis(#[source] redis_tracker::Error),
}

impl Error {
    /// Returns the key of the configuration that has the error.
    pub fn key(&self) -> &'static str {
        match self {
            Self::File { key: "ca_certificate_file", .. } => "redis.tls.ca_certificate_file",
            Self::File { key: "certificate_file", .. } => "redis.tls.certificate_file",
            Self::File { .. } | Self::Key(_) => "redis.tls.key_file",
            Self::Tls(_) => "redis.tls",
            Self::Redis(_) => "redis",
        }
    }
}

/// The tracker of a replica that shares a Redis with others.
pub struct RedisBackend {
    redis: Arc<RedisTracker>,
    peers: Arc<Peers>,
    metrics: Arc<ReplicaMetrics>,
    /// Limits that replicas share, each with its name in Redis.
    limits: Mutex<Vec<(&'static str, Arc<RateLimit>)>>,
    /// Whether this replica should get requests.
    ready: watch::Sender<bool>,
    /// How long this replica stays ready without Redis.
    grace: Duration,
}

impl std::fmt::Debug for RedisBackend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RedisBackend").field("redis", &self.redis).finish_non_exhaustive()
    }
}

fn address(at: &HostPort) -> Address {
    Address::Tcp(
        match &at.host {
            kas_config::Host::Ip(ip) => ip.to_string(),
            kas_config::Host::Name(name) => name.clone(),
        },
        at.port,
    )
}

fn read(key: &'static str, path: &PathBuf) -> Result<Vec<u8>, Error> {
    std::fs::read(path).map_err(|source| Error::File { key, path: path.clone(), source })
}

/// Checks what the Redis library checks only when it connects.
fn check_tls(tls: &kas_config::RedisTls) -> Result<(), net::tls::Error> {
    let identity = tls.identity.as_ref().map(|files| (files.certificate.as_path(), files.key.as_path()));
    match &tls.ca {
        Some(ca) => net::tls::client_of(ca, identity, None).map(drop),
        None => net::tls::client_as(None, identity).map(drop),
    }
}

/// Returns the settings of a connection. Certificates are read now.
///
/// # Errors
/// If a file cannot be used.
pub(crate) fn connect(redis: &kas_config::Redis, passwords: RedisPasswords) -> Result<Connect, Error> {
    let tls = redis
        .tls
        .as_ref()
        .map(|tls| {
            let identity = tls.identity.as_ref().map(|files| {
                let key = String::from_utf8(read("key_file", &files.key)?)
                    .map_err(|_| Error::Key(files.key.clone()))?;
                Ok((read("certificate_file", &files.certificate)?, key.into()))
            });
            let made = Tls {
                ca: tls.ca.as_ref().map(|path| read("ca_certificate_file", path)).transpose()?,
                identity: identity.transpose()?,
            };
            check_tls(tls).map_err(Error::Tls)?;
            Ok(made)
        })
        .transpose()?;
    let target = match &redis.target {
        RedisTarget::Server(RedisAddress::Tcp(at)) => Target::Server(address(at)),
        RedisTarget::Server(RedisAddress::Unix(path)) => Target::Server(Address::Unix(path.clone())),
        RedisTarget::Sentinel { master, addresses, username, .. } => Target::Sentinel {
            master: master.clone(),
            addresses: addresses.iter().map(address).collect(),
            username: username.clone(),
            password: passwords.sentinel,
            // As in 14.1, one section applies to both.
            tls: tls.clone(),
        },
        RedisTarget::Cluster(nodes) => Target::Cluster(nodes.iter().map(address).collect()),
    };
    Ok(Connect {
        target,
        tls,
        username: redis.username.clone(),
        password: passwords.server,
        database: redis.database,
        pool_size: redis.pool_size as usize,
        dial_timeout: redis.dial_timeout,
        read_timeout: redis.read_timeout,
        write_timeout: redis.write_timeout,
        idle_timeout: redis.idle_timeout,
    })
}

/// Returns the addresses of Redis. The address from which this host reaches one of them is likely reachable
/// for the other replicas.
pub async fn addresses(redis: &kas_config::Redis) -> HashSet<SocketAddr> {
    let hosts: Vec<&HostPort> = match &redis.target {
        RedisTarget::Server(RedisAddress::Tcp(at)) => vec![at],
        RedisTarget::Server(RedisAddress::Unix(_)) => Vec::new(),
        RedisTarget::Sentinel { addresses, .. } => addresses.iter().collect(),
        RedisTarget::Cluster(nodes) => nodes.iter().collect(),
    };
    let mut found = HashSet::new();
    for at in hosts {
        match &at.host {
            kas_config::Host::Ip(ip) => {
                found.insert(SocketAddr::new(*ip, at.port));
            }
            kas_config::Host::Name(name) => match tokio::net::lookup_host((name.as_str(), at.port)).await {
                Ok(addresses) => found.extend(addresses),
                // Each attempt to connect reports the same error.
                Err(error) => {
                    tracing::debug!(name, error = %error, "a host name of Redis has no address now")
                }
            },
        }
    }
    found
}

/// Checks the settings as far as possible without Redis and without passwords.
///
/// # Errors
/// See [`Error`].
pub fn check(redis: &kas_config::Redis) -> Result<(), Error> {
    let connect = connect(redis, RedisPasswords::default())?;
    let me = Replica { id: ReplicaId::new("check"), address: Arc::default() };
    RedisTracker::new(me, redis_tracker::Options::new(connect, 0)).map(drop).map_err(Error::Redis)
}

impl RedisBackend {
    /// Returns the tracker of `me`. It connects only in [`Backend::run`].
    ///
    /// # Errors
    /// If the settings are invalid regardless of Redis.
    pub fn new(
        me: Replica,
        config: &kas_config::Shared,
        passwords: RedisPasswords,
        doors: Doors,
        peers: Arc<Peers>,
        metrics: Arc<ReplicaMetrics>,
    ) -> Result<Arc<Self>, Error> {
        // One per process, above those of earlier processes of the same name. If the clock was set back, the
        // earlier process counts until its key has expired.
        let run = u64::try_from(process::clock::wall().as_micros()).unwrap_or(u64::MAX - 1);
        // 14.1 dials in plain text only, so it gets no URL if certificates are required.
        let url = if peers.is_plain() { format!("grpc://{}", me.address) } else { String::new() };
        #[cfg(not(any(test, feature = "flaws")))]
        let version = process::version::VERSION;
        #[cfg(any(test, feature = "flaws"))]
        let version = crate::replicas::records::version();
        let options = redis_tracker::Options {
            url,
            doors,
            key_prefix: config.redis.key_prefix.clone(),
            ttl: config.ttl,
            entry_ttl: config.entry_ttl,
            entry_refresh: config.entry_refresh,
            gc: config.entry_gc,
            build: (version.to_owned(), process::version::COMMIT.to_owned()),
            ..redis_tracker::Options::new(connect(&config.redis, passwords)?, run)
        };
        let redis = RedisTracker::new(me, options).map_err(Error::Redis)?;
        Ok(Arc::new(Self {
            redis,
            peers,
            metrics,
            limits: Mutex::new(Vec::new()),
            ready: watch::Sender::new(false),
            grace: config.ttl,
        }))
    }

    /// Makes new connections to Redis with these passwords and the current files of `redis`. Open connections
    /// stay.
    ///
    /// # Errors
    /// If they are invalid regardless of Redis. Then nothing changes.
    pub fn reconfigure(&self, redis: &kas_config::Redis, passwords: RedisPasswords) -> Result<(), Error> {
        self.redis.reconfigure(connect(redis, passwords)?).map_err(Error::Redis)
    }

    /// Exchanges the counts of limits. Without Redis, each replica counts alone and sends its counts later.
    async fn exchange_counts(&self) {
        let mut ticks = tokio::time::interval(EXCHANGE);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let health = self.redis.health();
        loop {
            ticks.tick().await;
            if !health.borrow().reachable {
                continue;
            }
            let limits = self.limits.lock().clone();
            for (name, limit) in limits {
                let unshared = limit.unshared(MAX_CHARGES);
                if unshared.is_empty() {
                    continue;
                }
                let charges: Vec<(String, u32)> =
                    unshared.iter().map(|(token, count)| (token.to_hex(), *count)).collect();
                match self.redis.count(name, &charges, limit.window()).await {
                    Ok(counted) => {
                        for ((token, sent), count) in unshared.into_iter().zip(counted.totals) {
                            let (window, elapsed) = (counted.window, counted.elapsed);
                            limit.learn(token, sent, Total { window, count, elapsed });
                        }
                    }
                    Err(error) => {
                        tracing::debug!(error = %error, "the counts of a limit were not sent to other replicas");
                        limit.restore_unshared(unshared);
                    }
                }
            }
        }
    }

    async fn watch_health(&self) {
        let mut ticks = tokio::time::interval(LOOK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (mut health, announced) = (self.redis.health(), self.redis.ready());
        let mut lost: Option<Instant> = None;
        loop {
            tokio::select! {
                _ = ticks.tick() => {}
                // The sender lives as long as the tracker.
                _ = health.changed() => {}
            }
            let now = health.borrow_and_update().clone();
            lost = if now.reachable { None } else { lost.or(Some(Instant::now())) };
            let ready = *announced.borrow() && lost.is_none_or(|since| since.elapsed() < self.grace);
            self.ready.send_if_modified(|known| std::mem::replace(known, ready) != ready);
            let others = self.redis.others();
            self.peers.retain(|replica| others.contains(replica));
            self.metrics.redis(&now, self.redis.counts(), others.len() + 1);
        }
    }
}

#[async_trait]
impl Locator for RedisBackend {
    fn route(&self, agent: AgentId, methods: Arc<[Box<str>]>) -> Lease {
        self.redis.route(agent, methods)
    }

    async fn locate(&self, agent: AgentId) -> Result<Vec<Candidate>, TrackerError> {
        self.redis.locate(agent).await
    }

    fn mark(&self) -> Mark {
        self.redis.mark()
    }

    fn not_here(&self, replica: &ReplicaId, agent: AgentId, mark: Mark) {
        self.redis.not_here(replica, agent, mark);
    }

    fn changes(&self, agent: AgentId) -> watch::Receiver<()> {
        self.redis.changes(agent)
    }
}

#[async_trait]
impl Connections for RedisBackend {
    fn connection(&self, connection: Connection) -> Lease {
        self.redis.connection(connection)
    }

    async fn connected(&self, query: Query) -> Result<Connected, TrackerError> {
        self.redis.connected(query).await
    }

    fn connection_changes(&self) -> watch::Receiver<()> {
        self.redis.connection_changes()
    }
}

#[async_trait]
impl ClusterView for RedisBackend {
    fn live(&self) -> watch::Receiver<usize> {
        self.redis.live()
    }

    async fn replicas(&self) -> Replicas {
        self.redis.replicas().await
    }

    fn doors(&self, replica: &ReplicaId) -> Doors {
        self.redis.doors(replica)
    }

    fn status(&self) -> TrackerStatus {
        self.redis.status()
    }

    fn views(&self, agent: AgentId) -> Vec<AgentView> {
        self.redis.views(agent)
    }

    async fn peer_reports(&self, agent: Option<AgentId>) -> (Vec<PeerReport>, Vec<Unanswered>) {
        let replicas = self.redis.replicas().await.replicas;
        let to_ask = replicas
            .into_iter()
            .skip(1)
            .map(|status| {
                let suspect = status.health == Some(ReplicaHealth::Suspect);
                (status.replica, ask::timeout(suspect))
            })
            .collect();
        ask::peer_reports(&self.peers, to_ask, agent).await
    }
}

#[async_trait]
impl Backend for RedisBackend {
    /// It is ready once it has announced itself, unless Redis was not reached for as long as the others keep
    /// it as a live replica.
    fn ready(&self) -> (watch::Receiver<bool>, &'static str) {
        (self.ready.subscribe(), "Redis cannot be reached")
    }

    fn drain(&self) {
        self.redis.announce(ReplicaState::Draining);
    }

    async fn leave(&self) {
        self.redis.leave(LEAVING).await;
    }

    fn services(
        self: Arc<Self>,
        registry: Arc<TunnelRegistry>,
        refusals: Arc<Refusals>,
    ) -> Vec<(String, LocalService)> {
        vec![local_service(ReplicaServer::new(Private { backend: self, registry, refusals }))]
    }

    /// The replicas add up their counts in Redis.
    fn share_limit(&self, name: &'static str, limit: RateLimit) -> Arc<RateLimit> {
        let limit = Arc::new(limit.shared());
        self.limits.lock().push((name, Arc::clone(&limit)));
        limit
    }

    async fn run(self: Arc<Self>) {
        tokio::join!(Arc::clone(&self.redis).run(), self.watch_health(), self.exchange_counts());
    }
}

struct Private {
    backend: Arc<RedisBackend>,
    registry: Arc<TunnelRegistry>,
    refusals: Arc<Refusals>,
}

#[tonic::async_trait]
impl ReplicaService for Private {
    type ConnectionsStream = stream::Iter<std::vec::IntoIter<Result<ConnectionsResponse, Status>>>;

    async fn connections(
        &self,
        request: Request<ConnectionsRequest>,
    ) -> Result<Response<Self::ConnectionsStream>, Status> {
        let pages = answer::pages(self.backend.redis.own(), request.into_inner()).await?;
        Ok(Response::new(stream::iter(pages)))
    }

    async fn explain(&self, request: Request<ExplainRequest>) -> Result<Response<ExplainResponse>, Status> {
        let request = request.into_inner();
        if let Ok(agent) = AgentId::new(request.agent_id) {
            // The agent may not be cached here. If the lookup fails, the report says so.
            let _ = self.backend.redis.locate(agent).await;
        }
        Ok(Response::new(answer::explain(&self.registry, &self.refusals, &*self.backend, request)))
    }
}
