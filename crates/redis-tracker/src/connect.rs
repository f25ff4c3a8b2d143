//! Connections to one server, to the primary that Sentinel names, or to a cluster.
//!
//! A connection carries many commands at a time. A broken connection is dialled again after a growing delay
//! with jitter, during which commands fail at once: no command waits in a queue for a Redis that is down.

use std::{fmt, path::PathBuf, sync::Arc, time::Duration};

use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use parking_lot::MutexGuard;
use redis::{
    AsyncConnectionConfig, Client, ClientTlsConfig, Cmd, ConnectionAddr, ConnectionInfo,
    IntoConnectionInfo as _, Pipeline, RedisConnectionInfo, RedisError, ServerErrorKind, TlsCertificates,
    TlsMode, Value,
    aio::{MultiplexedConnection, PubSub},
    cluster::{ClusterClient, ClusterClientBuilder},
    cluster_async::ClusterConnection,
    io::tcp::TcpSettings,
    sentinel::{SentinelClient, SentinelClientBuilder, SentinelServerType},
};
use secrecy::{ExposeSecret as _, SecretString};
use tokio::{
    sync::{Mutex, watch},
    time::{Instant, timeout},
};

/// The delay before a server that could not be reached is tried again: the first, doubled each time up to the
/// second.
const PAUSE: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));
/// Keys of a cluster that are requested at a time.
const AT_ONCE: usize = 64;

/// Where a server listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// A host, by name or address, and a port.
    Tcp(String, u16),
    /// A Unix domain socket, without TLS.
    Unix(PathBuf),
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(host, port) if host.contains(':') => write!(f, "[{host}]:{port}"),
            Self::Tcp(host, port) => write!(f, "{host}:{port}"),
            Self::Unix(path) => path.display().fmt(f),
        }
    }
}

/// The Redis deployment to connect to.
#[derive(Clone, Debug)]
pub enum Target {
    /// One server.
    Server(Address),
    /// The primary that Sentinel names. Sentinel is asked again when the primary cannot be reached or has
    /// become a replica.
    Sentinel {
        /// Sentinel's name for the primary and its replicas.
        master: String,
        /// The Sentinels; the first that answers is used. They have TCP addresses only.
        addresses: Vec<Address>,
        /// The user name for Sentinels; `None` for the default user.
        username: Option<String>,
        /// The password for Sentinels.
        password: Option<SecretString>,
        /// TLS to Sentinels; `None` for plain text.
        tls: Option<Tls>,
    },
    /// A cluster, discovered through any of these nodes.
    Cluster(Vec<Address>),
}

/// Trust in servers and the client certificate, all as PEM.
#[derive(Clone, Debug, Default)]
pub struct Tls {
    /// Certificate authorities of the servers; `None` for those that this system trusts.
    pub ca: Option<Vec<u8>>,
    /// The client certificate chain and its key, for servers that request one.
    pub identity: Option<(Vec<u8>, SecretString)>,
}

/// How to connect to Redis.
#[derive(Clone, Debug)]
pub struct Connect {
    /// The deployment.
    pub target: Target,
    /// TLS to servers; `None` for plain text.
    pub tls: Option<Tls>,
    /// The ACL user; `None` for the default user.
    pub username: Option<String>,
    /// The user's password.
    pub password: Option<SecretString>,
    /// The number of the database; a cluster has only database 0.
    pub database: u16,
    /// Connections for commands, each for many commands at a time. Another connection receives published
    /// messages.
    pub pool_size: usize,
    /// How long dialling may take.
    pub dial_timeout: Duration,
    /// How long an answer may take after the command was sent.
    pub read_timeout: Duration,
    /// How long sending may take. Because commands share a connection, the timeout for an answer is the sum
    /// of both.
    pub write_timeout: Duration,
    /// A connection that was not used for this long is closed.
    pub idle_timeout: Duration,
}

impl Connect {
    /// Returns settings for `target`, with the defaults of GitLab agent 14.1 for the rest.
    pub fn to(target: Target) -> Self {
        Self {
            target,
            tls: None,
            username: None,
            password: None,
            database: 0,
            pool_size: 5,
            dial_timeout: Duration::from_secs(5),
            read_timeout: Duration::from_secs(1),
            write_timeout: Duration::from_secs(1),
            idle_timeout: Duration::from_secs(50),
        }
    }

    fn answer_timeout(&self) -> Duration {
        self.read_timeout + self.write_timeout
    }
}

/// Why a command failed.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// An error of Redis or of the connection.
    #[error(transparent)]
    Redis(#[from] RedisError),
    /// Dialling took too long.
    #[error("no connection within {0:?}")]
    Dial(Duration),
    /// Redis was not reached a moment ago and is not tried again yet.
    #[error("not reached a moment ago, and not tried again yet: {0}")]
    Paused(String),
    /// The answer has another type than expected.
    #[error("unexpected answer to {0}")]
    Unexpected(&'static str),
}

impl Error {
    /// Whether another connection may succeed: this one is broken, or its server is not the primary any more.
    fn ends_connection(&self) -> bool {
        let Self::Redis(error) = self else { return matches!(self, Self::Dial(_)) };
        // For a transaction, these are the errors of its commands. In transactions the library neither
        // follows redirections nor refreshes the slots of the cluster: only a new connection does.
        let refusals = error.clone().into_server_errors();
        let primary_lost = refusals.iter().flat_map(|refusals| refusals.iter()).any(|(_, refusal)| {
            matches!(
                refusal.kind(),
                Some(
                    ServerErrorKind::ReadOnly
                        | ServerErrorKind::MasterDown
                        | ServerErrorKind::BusyLoading
                        | ServerErrorKind::Moved
                        | ServerErrorKind::Ask
                )
            )
        });
        let closed = error.is_io_error() || error.is_connection_dropped() || error.is_timeout();
        primary_lost || closed || error.is_unrecoverable_error() || error.code() == Some("NOAUTH")
    }
}

/// Makes connections.
pub(crate) struct Dialer {
    setups: parking_lot::Mutex<Setups>,
    /// Incremented with each change of the settings.
    reconfigured: watch::Sender<u64>,
}

/// The settings by which connections are made. Files and Redis are not changed at the same moment, so the
/// previous settings are also tried until the latest ones have worked once.
struct Setups {
    latest: Arc<Setup>,
    /// The last settings that have worked, if these are not the latest.
    previous: Option<Arc<Setup>>,
    /// The latest settings have worked.
    is_verified: bool,
}

struct Setup {
    connect: Connect,
    clients: Clients,
}

enum Clients {
    Server(Box<Client>),
    Sentinel(Box<Mutex<SentinelClient>>),
    Cluster { client: Box<ClusterClient>, nodes: Vec<Client> },
}

impl fmt::Debug for Dialer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dialer").field("connect", &self.setups().latest.connect).finish_non_exhaustive()
    }
}

fn certificates(tls: &Tls) -> TlsCertificates {
    TlsCertificates {
        client_tls: tls.identity.as_ref().map(|(certificate, key)| ClientTlsConfig {
            client_cert: certificate.clone(),
            client_key: key.expose_secret().as_bytes().to_vec(),
        }),
        root_cert: tls.ca.clone(),
    }
}

fn plain(address: &Address, tls: bool) -> ConnectionAddr {
    match address {
        Address::Unix(path) => ConnectionAddr::Unix(path.clone()),
        Address::Tcp(host, port) if tls => {
            ConnectionAddr::TcpTls { host: host.clone(), port: *port, insecure: false, tls_params: None }
        }
        Address::Tcp(host, port) => ConnectionAddr::Tcp(host.clone(), *port),
    }
}

impl Setup {
    fn new(connect: Connect) -> Result<Self, Error> {
        // The kernel detects a vanished peer within this time, also on a connection that only receives.
        let tcp = TcpSettings::default().set_nodelay(true).set_user_timeout(connect.answer_timeout());
        let mut login = RedisConnectionInfo::default().set_db(i64::from(connect.database));
        if let Some(username) = &connect.username {
            login = login.set_username(username);
        }
        if let Some(password) = &connect.password {
            login = login.set_password(password.expose_secret());
        }
        let info = |address: &Address| -> Result<ConnectionInfo, RedisError> {
            let info = plain(address, connect.tls.is_some()).into_connection_info()?;
            Ok(info.set_tcp_settings(tcp.clone()).set_redis_settings(login.clone()))
        };
        let client = |address: &Address| -> Result<Client, RedisError> {
            match (&connect.tls, address) {
                (Some(tls), Address::Tcp(..)) => Client::build_with_tls(info(address)?, certificates(tls)),
                _ => Client::open(info(address)?),
            }
        };
        let clients = match &connect.target {
            Target::Server(address) => Clients::Server(Box::new(client(address)?)),
            Target::Sentinel { master, addresses, username, password, tls } => {
                let sentinels = addresses.iter().map(|address| plain(address, tls.is_some()));
                let mut builder = SentinelClientBuilder::new(sentinels, master, SentinelServerType::Master)?
                    .set_client_to_redis_tcp_settings(tcp.clone())
                    .set_client_to_redis_db(i64::from(connect.database))
                    .set_client_to_sentinel_tcp_settings(tcp.clone());
                if let Some(username) = &connect.username {
                    builder = builder.set_client_to_redis_username(username);
                }
                if let Some(password) = &connect.password {
                    builder = builder.set_client_to_redis_password(password.expose_secret());
                }
                if let Some(tls) = &connect.tls {
                    builder = builder
                        .set_client_to_redis_tls_mode(TlsMode::Secure)
                        .set_client_to_redis_certificates(certificates(tls));
                }
                if let Some(username) = username {
                    builder = builder.set_client_to_sentinel_username(username);
                }
                if let Some(password) = password {
                    builder = builder.set_client_to_sentinel_password(password.expose_secret());
                }
                if let Some(tls) = tls {
                    builder = builder
                        .set_client_to_sentinel_tls_mode(TlsMode::Secure)
                        .set_client_to_sentinel_certificates(certificates(tls));
                }
                Clients::Sentinel(Box::new(Mutex::new(builder.build()?)))
            }
            Target::Cluster(addresses) => {
                let nodes = addresses.iter().map(info).collect::<Result<Vec<_>, _>>()?;
                let mut builder = ClusterClientBuilder::new(nodes)
                    .tcp_settings(tcp.clone())
                    .connection_timeout(connect.dial_timeout)
                    .response_timeout(connect.answer_timeout())
                    // Callers try again themselves, and a request must not hang meanwhile.
                    .retries(2);
                if let Some(tls) = &connect.tls {
                    builder = builder.tls(TlsMode::Secure).certs(certificates(tls));
                }
                Clients::Cluster {
                    client: Box::new(builder.build()?),
                    nodes: addresses.iter().map(client).collect::<Result<_, _>>()?,
                }
            }
        };
        Ok(Self { connect, clients })
    }

    async fn in_time<T>(&self, dial: impl Future<Output = Result<T, RedisError>>) -> Result<T, Error> {
        let patience = match &self.connect.target {
            // Each Sentinel that is down may take this long before the next one is asked.
            Target::Sentinel { addresses, .. } => {
                self.connect.dial_timeout * u32::try_from(addresses.len() + 1).unwrap_or(u32::MAX)
            }
            _ => self.connect.dial_timeout,
        };
        Ok(timeout(patience, dial).await.map_err(|_| Error::Dial(patience))??)
    }

    fn config(&self) -> AsyncConnectionConfig {
        AsyncConnectionConfig::new()
            .set_connection_timeout(Some(self.connect.dial_timeout))
            .set_response_timeout(Some(self.connect.answer_timeout()))
    }

    async fn connection(&self) -> Result<Conn, Error> {
        let config = self.config();
        self.in_time(async {
            Ok(match &self.clients {
                Clients::Server(client) => {
                    Conn::Server(client.get_multiplexed_async_connection_with_config(&config).await?)
                }
                Clients::Sentinel(sentinel) => {
                    let client = sentinel.lock().await.async_get_client().await?;
                    Conn::Server(client.get_multiplexed_async_connection_with_config(&config).await?)
                }
                Clients::Cluster { client, .. } => Conn::Cluster(client.get_async_connection().await?),
            })
        })
        .await
    }

    async fn listener(&self) -> Result<PubSub, Error> {
        self.in_time(async {
            match &self.clients {
                Clients::Server(client) => client.get_async_pubsub().await,
                Clients::Sentinel(sentinel) => {
                    let client = sentinel.lock().await.async_get_client().await?;
                    client.get_async_pubsub().await
                }
                // A message that is published on one node is delivered on all nodes.
                Clients::Cluster { nodes, .. } => {
                    let first = rand::random::<u32>() as usize;
                    let mut result =
                        Err(RedisError::from((redis::ErrorKind::Client, "a cluster without nodes")));
                    for i in 0..nodes.len() {
                        result = nodes[(first + i) % nodes.len()].get_async_pubsub().await;
                        if result.is_ok() {
                            break;
                        }
                    }
                    result
                }
            }
        })
        .await
    }
}

impl Dialer {
    /// Checks what can be checked without dialling.
    pub(crate) fn new(connect: Connect) -> Result<Self, Error> {
        let latest = Arc::new(Setup::new(connect)?);
        let setups = Setups { latest, previous: None, is_verified: false };
        Ok(Self { setups: parking_lot::Mutex::new(setups), reconfigured: watch::Sender::new(0) })
    }

    fn setups(&self) -> MutexGuard<'_, Setups> {
        self.setups.lock()
    }

    /// Makes new connections by `connect` from now on. Open connections stay.
    pub(crate) fn reconfigure(&self, connect: Connect) -> Result<(), Error> {
        let latest = Arc::new(Setup::new(connect)?);
        {
            let mut setups = self.setups();
            let old = std::mem::replace(&mut setups.latest, latest);
            if std::mem::replace(&mut setups.is_verified, false) {
                setups.previous = Some(old);
            }
        }
        self.reconfigured.send_modify(|count| *count += 1);
        Ok(())
    }

    /// Returns a watch that wakes with each change of the settings.
    pub(crate) fn reconfigured(&self) -> watch::Receiver<u64> {
        self.reconfigured.subscribe()
    }

    fn both(&self) -> (Arc<Setup>, Option<Arc<Setup>>) {
        let setups = self.setups();
        (Arc::clone(&setups.latest), setups.previous.clone())
    }

    /// Notes that `setup` has worked. If it is the latest, the previous settings are dropped.
    fn mark_verified(&self, setup: &Arc<Setup>) {
        let mut setups = self.setups();
        if Arc::ptr_eq(&setups.latest, setup) {
            (setups.previous, setups.is_verified) = (None, true);
        }
    }

    /// Tries to connect with the latest settings only.
    pub(crate) async fn verify(&self) -> Result<(), Error> {
        let (latest, _) = self.both();
        latest.connection().await?;
        self.mark_verified(&latest);
        Ok(())
    }

    async fn connection(&self) -> Result<Conn, Error> {
        let (latest, before) = self.both();
        match (latest.connection().await, before) {
            (Ok(conn), _) => {
                self.mark_verified(&latest);
                Ok(conn)
            }
            // Redis did not even refuse the connection, so the previous settings would fail too.
            (Err(error), None) | (Err(error @ Error::Dial(_)), _) => Err(error),
            (Err(error), Some(before)) => before.connection().await.map_err(|_| error),
        }
    }

    /// Opens a connection for published messages.
    pub(crate) async fn listener(&self) -> Result<PubSub, Error> {
        let (latest, before) = self.both();
        match (latest.listener().await, before) {
            (Ok(listener), _) => {
                self.mark_verified(&latest);
                Ok(listener)
            }
            (Err(error), None) | (Err(error @ Error::Dial(_)), _) => Err(error),
            (Err(error), Some(before)) => before.listener().await.map_err(|_| error),
        }
    }

    /// Whether commands over several keys cannot be one transaction.
    pub(crate) fn is_cluster(&self) -> bool {
        matches!(self.setups().latest.clients, Clients::Cluster { .. })
    }

    fn idle_timeout(&self) -> Duration {
        self.setups().latest.connect.idle_timeout
    }
}

#[derive(Clone)]
enum Conn {
    Server(MultiplexedConnection),
    Cluster(ClusterConnection),
}

impl Conn {
    async fn run(&mut self, pipeline: &Pipeline) -> Result<Vec<Value>, RedisError> {
        match self {
            Self::Server(connection) => pipeline.query_async(connection).await,
            Self::Cluster(connection) => pipeline.query_async(connection).await,
        }
    }

    async fn each(&mut self, commands: Vec<Cmd>) -> Result<Vec<Value>, RedisError> {
        if commands.is_empty() {
            return Ok(Vec::new());
        }
        match self {
            Self::Server(_) => {
                let mut pipeline = Pipeline::with_capacity(commands.len());
                for command in commands {
                    pipeline.add_command(command);
                }
                self.run(pipeline.ignore_errors()).await
            }
            Self::Cluster(connection) => {
                let one = |command: Cmd| {
                    let mut connection = connection.clone();
                    async move {
                        match command.query_async::<Value>(&mut connection).await {
                            Ok(value) => Ok(value),
                            Err(error) if error.is_io_error() || error.is_timeout() => Err(error),
                            // An error of this command only.
                            Err(error) => match error.clone().into_server_errors() {
                                Some(errors) if !errors.is_empty() => {
                                    Ok(Value::ServerError(errors[0].1.clone()))
                                }
                                _ => Err(error),
                            },
                        }
                    }
                };
                stream::iter(commands.into_iter().map(one)).buffered(AT_ONCE).try_collect().await
            }
        }
    }

    async fn atomically(&mut self, groups: Vec<Vec<Cmd>>) -> Result<Vec<Vec<Value>>, RedisError> {
        let transaction = |commands: Vec<Cmd>| {
            let mut pipeline = Pipeline::with_capacity(commands.len());
            pipeline.atomic().ignore_errors();
            for command in commands {
                pipeline.add_command(command);
            }
            pipeline
        };
        match self {
            Self::Server(_) => {
                let sizes: Vec<usize> = groups.iter().map(Vec::len).collect();
                let all: Vec<Cmd> = groups.into_iter().flatten().collect();
                if all.is_empty() {
                    return Ok(Vec::new());
                }
                let mut values = self.run(&transaction(all)).await?.into_iter();
                Ok(sizes.into_iter().map(|size| values.by_ref().take(size).collect()).collect())
            }
            Self::Cluster(connection) => {
                let one = |commands: Vec<Cmd>| {
                    let mut connection = connection.clone();
                    let pipeline = transaction(commands);
                    async move { pipeline.query_async::<Vec<Value>>(&mut connection).await }
                };
                stream::iter(groups.into_iter().map(one)).buffered(AT_ONCE).try_collect().await
            }
        }
    }
}

/// A connection that is dialled on demand.
pub(crate) struct Link(Mutex<State>);

struct State {
    conn: Option<Conn>,
    /// Incremented with each connection that may lead to another primary.
    generation: u64,
    /// The connection was closed by this side, and the next one replaces it without a new generation.
    is_renewed: bool,
    used: Instant,
    pause: Duration,
    not_before: Instant,
    why: String,
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Link")
    }
}

impl Link {
    pub(crate) fn new() -> Self {
        let now = Instant::now();
        Self(Mutex::new(State {
            conn: None,
            generation: 0,
            is_renewed: false,
            used: now,
            pause: PAUSE.0,
            not_before: now,
            why: String::new(),
        }))
    }

    async fn get(&self, dialer: &Dialer) -> Result<(Conn, u64), Error> {
        let mut state = self.0.lock().await;
        state.used = Instant::now();
        if let Some(conn) = &state.conn {
            return Ok((conn.clone(), state.generation));
        }
        if state.not_before > Instant::now() {
            return Err(Error::Paused(state.why.clone()));
        }
        match dialer.connection().await {
            Ok(conn) => {
                state.pause = PAUSE.0;
                state.generation += u64::from(!std::mem::replace(&mut state.is_renewed, false));
                state.conn = Some(conn.clone());
                Ok((conn, state.generation))
            }
            Err(error) => {
                state.is_renewed = false;
                // With jitter, so that replicas that lost Redis together do not reconnect together.
                state.not_before = Instant::now() + state.pause.mul_f64(0.5 + rand::random::<f64>());
                state.pause = (state.pause * 2).min(PAUSE.1);
                state.why = error.to_string();
                Err(error)
            }
        }
    }

    async fn check<T>(&self, generation: u64, result: Result<T, RedisError>) -> Result<T, Error> {
        let error = match result {
            Ok(value) => return Ok(value),
            Err(error) => Error::from(error),
        };
        if error.ends_connection() {
            let mut state = self.0.lock().await;
            if state.generation == generation {
                state.conn = None;
            }
        }
        Err(error)
    }

    /// Runs commands. Each answer may be an error of its own command.
    pub(crate) async fn each(&self, dialer: &Dialer, commands: Vec<Cmd>) -> Result<Vec<Value>, Error> {
        let (mut conn, generation) = self.get(dialer).await?;
        let asked = commands.len();
        let values = self.check(generation, conn.each(commands).await).await?;
        if values.len() == asked { Ok(values) } else { Err(Error::Unexpected("the number of commands")) }
    }

    /// Runs groups of commands. Each group concerns one key and is atomic. Except on a cluster, all groups
    /// together are atomic.
    pub(crate) async fn atomically(
        &self,
        dialer: &Dialer,
        groups: Vec<Vec<Cmd>>,
    ) -> Result<Vec<Vec<Value>>, Error> {
        let (mut conn, generation) = self.get(dialer).await?;
        let asked: Vec<usize> = groups.iter().map(Vec::len).collect();
        let values = self.check(generation, conn.atomically(groups).await).await?;
        let fits = values.iter().map(Vec::len).eq(asked);
        if fits { Ok(values) } else { Err(Error::Unexpected("the number of commands")) }
    }

    /// Returns the generation of the connection; dials if there is none.
    pub(crate) async fn generation(&self, dialer: &Dialer) -> Result<u64, Error> {
        Ok(self.get(dialer).await?.1)
    }

    /// Makes the next command dial. Used for clusters, whose connections open further connections with their
    /// original settings.
    pub(crate) async fn renew(&self) {
        let mut state = self.0.lock().await;
        if state.conn.take().is_some() {
            state.is_renewed = true;
        }
    }

    /// Closes the connection if it was not used for the idle timeout.
    pub(crate) async fn close_idle(&self, dialer: &Dialer) {
        // If the lock is held, the connection is in use.
        let Ok(mut state) = self.0.try_lock() else { return };
        if state.used.elapsed() >= dialer.idle_timeout() {
            state.conn = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debug_output_contains_no_secret() {
        let connect = Connect {
            password: Some("hunter2".to_owned().into()),
            tls: Some(Tls { ca: None, identity: Some((b"cert".to_vec(), "hunter3".to_owned().into())) }),
            ..Connect::to(Target::Sentinel {
                master: "m".to_owned(),
                addresses: vec![Address::Tcp("s".to_owned(), 1)],
                username: None,
                password: Some("hunter4".to_owned().into()),
                tls: None,
            })
        };
        let plain = Connect { tls: None, ..connect.clone() };
        let text = format!("{connect:?} {:?}", Dialer::new(plain).unwrap());
        assert!(!text.contains("hunter"), "{text}");
    }

    #[test]
    fn addresses_are_displayed_as_written() {
        assert_eq!(Address::Tcp("::1".to_owned(), 6379).to_string(), "[::1]:6379");
        assert_eq!(Address::Tcp("redis".to_owned(), 6379).to_string(), "redis:6379");
        assert_eq!(Address::Unix("/run/redis.sock".into()).to_string(), "/run/redis.sock");
    }
}
