//! Connections: to one server, to what Sentinel says is the primary, or to a cluster.
//!
//! A connection carries many commands at once. One that broke is dialled again with a growing, jittered pause, during
//! which commands fail at once; nothing waits in a queue for a Redis that is not there.

use std::{
    fmt,
    path::PathBuf,
    sync::{Arc, MutexGuard, PoisonError},
    time::Duration,
};

use futures_util::{StreamExt as _, TryStreamExt as _, stream};
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

/// The pause before a server that could not be reached is tried again, doubled each time up to the second.
const PAUSE: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));
/// Keys of a cluster that are asked for at once.
const AT_ONCE: usize = 64;

/// Where a server listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// A host, by name or address, and a port.
    Tcp(String, u16),
    /// A socket in the file system; without TLS.
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

/// Which Redis.
#[derive(Clone, Debug)]
pub enum Target {
    /// One server.
    Server(Address),
    /// The primary that Sentinel names; asked again when that one cannot be reached, or has become a replica.
    Sentinel {
        /// What Sentinel calls the primary and its replicas.
        master: String,
        /// Sentinels; the first that answers counts. Never sockets in the file system.
        addresses: Vec<Address>,
        /// Who to be there, if not the default user.
        username: Option<String>,
        /// What to show there.
        password: Option<SecretString>,
        /// TLS towards Sentinels; `None`: plain.
        tls: Option<Tls>,
    },
    /// A cluster, found through any of these nodes.
    Cluster(Vec<Address>),
}

/// How servers are trusted, and what is shown to them; all of it PEM.
#[derive(Clone, Debug, Default)]
pub struct Tls {
    /// Who signs the certificates of servers; `None`: whom this system trusts.
    pub ca: Option<Vec<u8>>,
    /// A certificate chain and its key, for servers that ask for one.
    pub identity: Option<(Vec<u8>, SecretString)>,
}

/// How Redis is reached.
#[derive(Clone, Debug)]
pub struct Connect {
    /// Which.
    pub target: Target,
    /// TLS towards servers; `None`: plain.
    pub tls: Option<Tls>,
    /// The user of an access list; `None`: the default user.
    pub username: Option<String>,
    /// The user's password.
    pub password: Option<SecretString>,
    /// The number of the database; a cluster has only 0.
    pub database: u16,
    /// Connections, each for many commands at once; another one listens to what is published.
    pub pool_size: usize,
    /// How long dialling may take.
    pub dial_timeout: Duration,
    /// How long an answer may take once the command is sent.
    pub read_timeout: Duration,
    /// How long sending may take. Commands share a connection, so an answer is waited for as long as both together.
    pub write_timeout: Duration,
    /// A connection that nobody used for this long is closed.
    pub idle_timeout: Duration,
}

impl Connect {
    /// Returns how to reach `address` with defaults for the rest: those of GitLab agent 14.1.
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

/// Why Redis could not be asked, or what it answered instead.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// Redis, or what is between.
    #[error(transparent)]
    Redis(#[from] RedisError),
    /// Dialling took too long.
    #[error("no connection within {0:?}")]
    Dial(Duration),
    /// It failed a moment ago and is not tried again yet.
    #[error("not reached a moment ago, and not tried again yet: {0}")]
    Paused(String),
    /// Something else answered than was asked for.
    #[error("an answer that does not fit {0}")]
    Unexpected(&'static str),
}

impl Error {
    /// Whether another connection may fare better: this one is broken, or its server is not the primary any more.
    fn ends_connection(&self) -> bool {
        let Self::Redis(error) = self else { return matches!(self, Self::Dial(_)) };
        // Of a transaction what its commands were refused for. There the library follows no redirection, and does not ask
        // again who has which slots either: nothing but another connection does.
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
    ways: std::sync::Mutex<Ways>,
    /// Counts exchanges.
    exchanged: watch::Sender<u64>,
}

/// What connections are made by. Files and Redis are not changed in the same moment, so what was good before is tried as
/// long as the latest has not been.
struct Ways {
    latest: Arc<Way>,
    /// The last one by which there was a connection, if that is not the latest.
    before: Option<Arc<Way>>,
    /// There was a connection by the latest.
    is_proven: bool,
}

struct Way {
    connect: Connect,
    to: To,
}

enum To {
    Server(Box<Client>),
    Sentinel(Box<Mutex<SentinelClient>>),
    Cluster { client: Box<ClusterClient>, nodes: Vec<Client> },
}

impl fmt::Debug for Dialer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dialer").field("connect", &self.ways().latest.connect).finish_non_exhaustive()
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

impl Way {
    fn new(connect: Connect) -> Result<Self, Error> {
        // A peer that vanished without a word is noticed by the kernel within this time, also by who only listens.
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
        let to = match &connect.target {
            Target::Server(address) => To::Server(Box::new(client(address)?)),
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
                To::Sentinel(Box::new(Mutex::new(builder.build()?)))
            }
            Target::Cluster(addresses) => {
                let nodes = addresses.iter().map(info).collect::<Result<Vec<_>, _>>()?;
                let mut builder = ClusterClientBuilder::new(nodes)
                    .tcp_settings(tcp.clone())
                    .connection_timeout(connect.dial_timeout)
                    .response_timeout(connect.answer_timeout())
                    // Who asks here asks again; a request must not hang meanwhile.
                    .retries(2);
                if let Some(tls) = &connect.tls {
                    builder = builder.tls(TlsMode::Secure).certs(certificates(tls));
                }
                To::Cluster {
                    client: Box::new(builder.build()?),
                    nodes: addresses.iter().map(client).collect::<Result<_, _>>()?,
                }
            }
        };
        Ok(Self { connect, to })
    }

    async fn in_time<T>(&self, dial: impl Future<Output = Result<T, RedisError>>) -> Result<T, Error> {
        let patience = match &self.connect.target {
            // A Sentinel that is down is found out before the next one is asked.
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
            Ok(match &self.to {
                To::Server(client) => {
                    Conn::Server(client.get_multiplexed_async_connection_with_config(&config).await?)
                }
                To::Sentinel(sentinel) => {
                    let client = sentinel.lock().await.async_get_client().await?;
                    Conn::Server(client.get_multiplexed_async_connection_with_config(&config).await?)
                }
                To::Cluster { client, .. } => Conn::Cluster(client.get_async_connection().await?),
            })
        })
        .await
    }

    async fn listener(&self) -> Result<PubSub, Error> {
        self.in_time(async {
            match &self.to {
                To::Server(client) => client.get_async_pubsub().await,
                To::Sentinel(sentinel) => {
                    let client = sentinel.lock().await.async_get_client().await?;
                    client.get_async_pubsub().await
                }
                // What is published on one node is heard on each.
                To::Cluster { nodes, .. } => {
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
        let latest = Arc::new(Way::new(connect)?);
        let ways = Ways { latest, before: None, is_proven: false };
        Ok(Self { ways: std::sync::Mutex::new(ways), exchanged: watch::Sender::new(0) })
    }

    fn ways(&self) -> MutexGuard<'_, Ways> {
        // Nothing under the lock panics.
        self.ways.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes connections by `connect` from now on. Those that are open stay.
    pub(crate) fn exchange(&self, connect: Connect) -> Result<(), Error> {
        let latest = Arc::new(Way::new(connect)?);
        {
            let mut ways = self.ways();
            let old = std::mem::replace(&mut ways.latest, latest);
            if std::mem::replace(&mut ways.is_proven, false) {
                ways.before = Some(old);
            }
        }
        self.exchanged.send_modify(|count| *count += 1);
        Ok(())
    }

    /// Returns what wakes with each exchange.
    pub(crate) fn exchanged(&self) -> watch::Receiver<u64> {
        self.exchanged.subscribe()
    }

    fn both(&self) -> (Arc<Way>, Option<Arc<Way>>) {
        let ways = self.ways();
        (Arc::clone(&ways.latest), ways.before.clone())
    }

    /// There was a connection by `way`: what was good before is forgotten, if that is the latest.
    fn proven(&self, way: &Arc<Way>) {
        let mut ways = self.ways();
        if Arc::ptr_eq(&ways.latest, way) {
            (ways.before, ways.is_proven) = (None, true);
        }
    }

    /// Tries a connection by the latest way alone.
    pub(crate) async fn prove(&self) -> Result<(), Error> {
        let (latest, _) = self.both();
        latest.connection().await?;
        self.proven(&latest);
        Ok(())
    }

    async fn connection(&self) -> Result<Conn, Error> {
        let (latest, before) = self.both();
        match (latest.connection().await, before) {
            (Ok(conn), _) => {
                self.proven(&latest);
                Ok(conn)
            }
            // Not even refused: by another way it would be the same.
            (Err(error), None) | (Err(error @ Error::Dial(_)), _) => Err(error),
            (Err(error), Some(before)) => before.connection().await.map_err(|_| error),
        }
    }

    /// Opens a connection that listens.
    pub(crate) async fn listener(&self) -> Result<PubSub, Error> {
        let (latest, before) = self.both();
        match (latest.listener().await, before) {
            (Ok(listener), _) => {
                self.proven(&latest);
                Ok(listener)
            }
            (Err(error), None) | (Err(error @ Error::Dial(_)), _) => Err(error),
            (Err(error), Some(before)) => before.listener().await.map_err(|_| error),
        }
    }

    /// Whether commands over several keys cannot be one transaction.
    pub(crate) fn is_cluster(&self) -> bool {
        matches!(self.ways().latest.to, To::Cluster { .. })
    }

    fn idle_timeout(&self) -> Duration {
        self.ways().latest.connect.idle_timeout
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
                            // Of this command alone.
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

/// A connection that is dialled when it is needed.
pub(crate) struct Link(Mutex<State>);

struct State {
    conn: Option<Conn>,
    /// Grows with each connection that may lead to another primary.
    generation: u64,
    /// The connection was closed here, and the next one stands for it.
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
                // Half of it and some: replicas that lost it together do not come back together.
                state.not_before = Instant::now() + state.pause.mul_f64(0.5 + rand::random::<f64>());
                state.pause = (state.pause * 2).min(PAUSE.1);
                state.why = error.to_string();
                Err(error)
            }
        }
    }

    async fn judge<T>(&self, generation: u64, result: Result<T, RedisError>) -> Result<T, Error> {
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

    /// Runs commands; each answer may be an error of its command alone.
    pub(crate) async fn each(&self, dialer: &Dialer, commands: Vec<Cmd>) -> Result<Vec<Value>, Error> {
        let (mut conn, generation) = self.get(dialer).await?;
        let asked = commands.len();
        let values = self.judge(generation, conn.each(commands).await).await?;
        if values.len() == asked { Ok(values) } else { Err(Error::Unexpected("the number of commands")) }
    }

    /// Runs groups of commands, each of which is about one key and happens at once or not at all; all of them together
    /// do so on anything but a cluster. Says which connection it was.
    pub(crate) async fn atomically(
        &self,
        dialer: &Dialer,
        groups: Vec<Vec<Cmd>>,
    ) -> Result<Vec<Vec<Value>>, Error> {
        let (mut conn, generation) = self.get(dialer).await?;
        let asked: Vec<usize> = groups.iter().map(Vec::len).collect();
        let values = self.judge(generation, conn.atomically(groups).await).await?;
        let fits = values.iter().map(Vec::len).eq(asked);
        if fits { Ok(values) } else { Err(Error::Unexpected("the number of commands")) }
    }

    /// Returns which connection this is, counted; dials if there is none.
    pub(crate) async fn generation(&self, dialer: &Dialer) -> Result<u64, Error> {
        Ok(self.get(dialer).await?.1)
    }

    /// Makes the next command dial. A connection to a cluster makes others by itself, by what it was made with.
    pub(crate) async fn renew(&self) {
        let mut state = self.0.lock().await;
        if state.conn.take().is_some() {
            state.is_renewed = true;
        }
    }

    /// Closes the connection when nobody has used it for long.
    pub(crate) async fn close_idle(&self, dialer: &Dialer) {
        // Whoever holds the lock uses it.
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
    fn nothing_that_is_shown_holds_a_secret() {
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
    fn addresses_read_as_they_are_written() {
        assert_eq!(Address::Tcp("::1".to_owned(), 6379).to_string(), "[::1]:6379");
        assert_eq!(Address::Tcp("redis".to_owned(), 6379).to_string(), "redis:6379");
        assert_eq!(Address::Unix("/run/redis.sock".into()).to_string(), "/run/redis.sock");
    }
}
