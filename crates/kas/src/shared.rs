//! Several replicas that share a Redis: [`redis_tracker`] with what it does not know of kas.
//!
//! Replicas learn each other's addresses from their keys in Redis, and call each other on the private API as ever.

use std::{
    collections::HashSet,
    net::SocketAddr,
    path::PathBuf,
    sync::{Arc, OnceLock},
    time::Duration,
};

use async_trait::async_trait;
use cluster::{
    Account, Belief, Candidate, Connected, Connection, Lease, Mark, Query, Replica, Replicas, Tracker,
    TrackerError, TrackerStatus, Unanswered,
};
use futures_util::stream;
use ids::{AgentId, ReplicaId};
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

use crate::{
    config::{self, HostPort, RedisAddress, RedisPasswords, RedisTarget},
    listener::{Own, own},
    metrics::Metrics,
    peer::Peers,
    rate_limit::{RateLimit, Total},
    replication::{
        feed,
        lists::{self, PATIENCE, PATIENCE_SUSPECT},
    },
    tunnel_registry::TunnelRegistry,
};

/// How often metrics are read and links to replicas that are gone are dropped.
const LOOK: Duration = Duration::from_millis(500);
/// How often other replicas are told what limits have counted; a connection is opened for no less.
const TELL: Duration = Duration::from_millis(200);
/// Tokens in one pipeline of that.
const TOLD_AT_ONCE: usize = 500;
/// How long leaving may take: what is not taken back until then expires.
const LEAVING: Duration = Duration::from_secs(3);

/// Limits that replicas keep together, each under its name in Redis.
pub type Limits = [(&'static str, Arc<RateLimit>); 2];

/// Why Redis cannot be used, whatever it says.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file cannot be read.
    #[error("redis.tls.{key}: {path}")]
    File {
        /// Whose.
        key: &'static str,
        /// Which.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A key that is no text.
    #[error("redis.tls.key_file: {0} is no PEM")]
    Key(PathBuf),
    /// Files that do not make a configuration of TLS, such as a key of another certificate.
    #[error("redis.tls")]
    Tls(#[source] runtime::tls::Error),
    /// A certificate or key cannot be used, or an address cannot.
    #[error("redis")]
    Redis(#[source] redis_tracker::Error),
}

impl Error {
    /// Returns the key of the configuration that is to blame.
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
pub struct Shared {
    redis: Arc<RedisTracker>,
    peers: Arc<Peers>,
    metrics: Arc<Metrics>,
    registry: OnceLock<Arc<TunnelRegistry>>,
    limits: OnceLock<Limits>,
    /// Whether this replica should get requests.
    ready: watch::Sender<bool>,
    /// How long it stays ready without Redis.
    grace: Duration,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("redis", &self.redis).finish_non_exhaustive()
    }
}

fn address(at: &HostPort) -> Address {
    Address::Tcp(
        match &at.host {
            config::Host::Ip(ip) => ip.to_string(),
            config::Host::Name(name) => name.clone(),
        },
        at.port,
    )
}

fn read(key: &'static str, path: &PathBuf) -> Result<Vec<u8>, Error> {
    std::fs::read(path).map_err(|source| Error::File { key, path: path.clone(), source })
}

/// Tries what the library of Redis finds out only once it dials.
fn usable(tls: &config::RedisTls) -> Result<(), runtime::tls::Error> {
    let identity = tls.identity.as_ref().map(|files| (files.certificate.as_path(), files.key.as_path()));
    match &tls.ca {
        Some(ca) => runtime::tls::client_of(ca, identity, None).map(drop),
        None => runtime::tls::client_as(None, identity).map(drop),
    }
}

fn connect(redis: &config::Redis, passwords: RedisPasswords) -> Result<Connect, Error> {
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
            usable(tls).map_err(Error::Tls)?;
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
            // As in 14.1, one section is for both.
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

/// Returns where Redis may be: this host's address towards it is one that others may reach.
pub async fn places(redis: &config::Redis) -> HashSet<SocketAddr> {
    let hosts: Vec<&HostPort> = match &redis.target {
        RedisTarget::Server(RedisAddress::Tcp(at)) => vec![at],
        RedisTarget::Server(RedisAddress::Unix(_)) => Vec::new(),
        RedisTarget::Sentinel { addresses, .. } => addresses.iter().collect(),
        RedisTarget::Cluster(nodes) => nodes.iter().collect(),
    };
    let mut found = HashSet::new();
    for at in hosts {
        match &at.host {
            config::Host::Ip(ip) => {
                found.insert(SocketAddr::new(*ip, at.port));
            }
            config::Host::Name(name) => match tokio::net::lookup_host((name.as_str(), at.port)).await {
                Ok(addresses) => found.extend(addresses),
                // Dialling it says the same, again and again.
                Err(error) => tracing::debug!(name, error = %error, "a name of Redis has no address now"),
            },
        }
    }
    found
}

/// Checks everything that can be checked without Redis and without passwords.
///
/// # Errors
/// See [`Error`].
pub fn check(config: &config::Shared) -> Result<(), Error> {
    let connect = connect(&config.redis, RedisPasswords::default())?;
    let me = Replica { id: ReplicaId::new("check"), address: Arc::default() };
    RedisTracker::new(me, redis_tracker::Options::new(connect, 0)).map(drop).map_err(Error::Redis)
}

impl Shared {
    /// Makes the tracker of `me`. Nothing is dialled yet.
    ///
    /// # Errors
    /// When the configuration cannot be used whatever Redis says.
    pub fn new(
        me: Replica,
        config: &config::Shared,
        passwords: RedisPasswords,
        peers: Arc<Peers>,
        metrics: Arc<Metrics>,
    ) -> Result<Arc<Self>, Error> {
        // One per process, above those of earlier processes of the same name unless the clock was set back, which mends
        // itself once the earlier one's key has expired.
        let run = u64::try_from(runtime::clock::wall().as_micros()).unwrap_or(u64::MAX - 1);
        // 14.1 dials in plain text only: with certificates it cannot be let in.
        let url = if peers.is_plain() { format!("grpc://{}", me.address) } else { String::new() };
        let options = redis_tracker::Options {
            url,
            key_prefix: config.redis.key_prefix.clone(),
            ttl: config.ttl,
            entry_ttl: config.entry_ttl,
            entry_refresh: config.entry_refresh,
            gc: config.entry_gc,
            build: (runtime::version::VERSION.to_owned(), runtime::version::COMMIT.to_owned()),
            ..redis_tracker::Options::new(connect(&config.redis, passwords)?, run)
        };
        let redis = RedisTracker::new(me, options).map_err(Error::Redis)?;
        Ok(Arc::new(Self {
            redis,
            peers,
            metrics,
            registry: OnceLock::new(),
            limits: OnceLock::new(),
            ready: watch::Sender::new(false),
            grace: config.ttl,
        }))
    }

    /// Makes connections to Redis with these passwords and what the files of `redis` hold now. Those that are open stay.
    ///
    /// # Errors
    /// When they cannot be used whatever Redis says; then everything stays as it was.
    pub fn exchange(&self, redis: &config::Redis, passwords: RedisPasswords) -> Result<(), Error> {
        self.redis.exchange(connect(redis, passwords)?).map_err(Error::Redis)
    }

    /// Tells the tracker where this replica's tunnels are, for what it tells others of them.
    pub fn serve(&self, registry: Arc<TunnelRegistry>) {
        let _ = self.registry.set(registry);
    }

    /// Tells other replicas what these limits have counted, from now on.
    pub fn tell(&self, limits: Limits) {
        let _ = self.limits.set(limits);
    }

    /// Returns whether this replica should get requests: from the moment that it has announced itself, unless Redis is
    /// not reached for as long as others remember it.
    pub fn ready(&self) -> watch::Receiver<bool> {
        self.ready.subscribe()
    }

    /// Tells the others that this replica leaves soon.
    pub fn drain(&self) {
        self.redis.announce(redis_tracker::State::Draining);
    }

    /// Takes everything back.
    pub async fn leave(&self) {
        self.redis.leave(LEAVING).await;
    }

    /// Returns the services that other replicas call.
    pub fn services(self: &Arc<Self>) -> Vec<(String, Own)> {
        vec![own(ReplicaServer::new(Private(Arc::clone(self))))]
    }

    /// Runs until dropped.
    pub async fn run(self: Arc<Self>) {
        tokio::join!(Arc::clone(&self.redis).run(), self.look(), self.count());
    }

    /// Carries what limits have counted. Without Redis each replica counts alone, and tells it later.
    async fn count(&self) {
        let mut ticks = tokio::time::interval(TELL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let health = self.redis.health();
        loop {
            ticks.tick().await;
            let Some(limits) = self.limits.get().filter(|_| health.borrow().reachable) else { continue };
            for (name, limit) in limits {
                let untold = limit.untold(TOLD_AT_ONCE);
                if untold.is_empty() {
                    continue;
                }
                let charges: Vec<(String, u32)> =
                    untold.iter().map(|(token, count)| (token.to_hex(), *count)).collect();
                match self.redis.count(name, &charges, limit.window()).await {
                    Ok(counted) => {
                        for ((token, told), count) in untold.into_iter().zip(counted.totals) {
                            limit.learn(token, told, Total { window: counted.window, count });
                        }
                    }
                    Err(error) => {
                        tracing::debug!(error = %error, "limits are not told to other replicas");
                        limit.not_told(untold);
                    }
                }
            }
        }
    }

    async fn look(&self) {
        let mut ticks = tokio::time::interval(LOOK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (mut health, announced) = (self.redis.health(), self.redis.ready());
        let mut lost: Option<Instant> = None;
        loop {
            tokio::select! {
                _ = ticks.tick() => {}
                // The tracker lives as long as this.
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
impl Tracker for Shared {
    fn route(&self, agent: AgentId, methods: Arc<[Box<str>]>) -> Lease {
        self.redis.route(agent, methods)
    }

    fn connection(&self, connection: Connection) -> Lease {
        self.redis.connection(connection)
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

    fn live(&self) -> watch::Receiver<usize> {
        self.redis.live()
    }

    async fn replicas(&self) -> Replicas {
        self.redis.replicas().await
    }

    fn status(&self) -> TrackerStatus {
        self.redis.status()
    }

    fn beliefs(&self, agent: AgentId) -> Vec<Belief> {
        self.redis.beliefs(agent)
    }

    async fn accounts(&self, agent: Option<AgentId>) -> (Vec<Account>, Vec<Unanswered>) {
        let replicas = self.redis.replicas().await.replicas;
        let to_ask = replicas
            .into_iter()
            .skip(1)
            .map(|status| {
                let suspect = status.standing == cluster::Standing::Suspect.as_str();
                (status.replica, if suspect { PATIENCE_SUSPECT } else { PATIENCE })
            })
            .collect();
        lists::accounts(&self.peers, to_ask, agent).await
    }

    fn changes(&self, agent: AgentId) -> watch::Receiver<()> {
        self.redis.changes(agent)
    }

    async fn connected(&self, query: Query) -> Result<Connected, TrackerError> {
        self.redis.connected(query).await
    }

    fn connection_changes(&self) -> watch::Receiver<()> {
        self.redis.connection_changes()
    }
}

#[derive(Clone)]
struct Private(Arc<Shared>);

#[tonic::async_trait]
impl ReplicaService for Private {
    type ConnectionsStream = stream::Iter<std::vec::IntoIter<Result<ConnectionsResponse, Status>>>;

    async fn connections(
        &self,
        request: Request<ConnectionsRequest>,
    ) -> Result<Response<Self::ConnectionsStream>, Status> {
        let pages = feed::pages(self.0.redis.own(), request.into_inner()).await?;
        Ok(Response::new(stream::iter(pages)))
    }

    async fn explain(&self, request: Request<ExplainRequest>) -> Result<Response<ExplainResponse>, Status> {
        let registry = self.0.registry.get().ok_or_else(|| Status::unavailable("this replica starts"))?;
        let request = request.into_inner();
        if let Ok(agent) = AgentId::new(request.agent_id) {
            // Nobody may have asked for it here; without an answer, that is what is said.
            let _ = self.0.redis.locate(agent).await;
        }
        let response = feed::explain(registry, &self.0.metrics, &*self.0, request);
        Ok(Response::new(response))
    }
}
