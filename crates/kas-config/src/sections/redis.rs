//! Section `redis`.

use std::{
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    time::Duration,
};

use secrecy::SecretString;
use settings::{
    HostPort, Problem, Problems, host_port, secret,
    show::shown,
    walk::{Rule, Section},
};

use super::{
    listen::{TlsFiles, tls},
    seconds,
};

/// Section `redis`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Redis {
    /// The server or servers.
    pub target: RedisTarget,
    /// `None`: no TLS.
    pub tls: Option<RedisTls>,
    /// `None`: the default user.
    pub username: Option<String>,
    /// The file of the password.
    pub password_file: Option<PathBuf>,
    /// The number of the database.
    pub database: u16,
    /// Number of connections, each shared by many commands.
    pub pool_size: u32,
    /// How long dialling may take.
    pub dial_timeout: Duration,
    /// How long an answer may take.
    pub read_timeout: Duration,
    /// How long sending may take.
    pub write_timeout: Duration,
    /// After what idle time a connection is closed.
    pub idle_timeout: Duration,
    /// Prefix of every key.
    pub key_prefix: String,
}

/// The server or servers to use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RedisTarget {
    /// One server.
    Server(RedisAddress),
    /// A group that Sentinel monitors.
    Sentinel {
        /// Name of the group.
        master: String,
        /// Sentinels; at least one.
        addresses: Vec<HostPort>,
        /// `None`: the default user.
        username: Option<String>,
        /// The file of the password for Sentinels.
        password_file: Option<PathBuf>,
    },
    /// A cluster, by at least one of its nodes.
    Cluster(Vec<HostPort>),
}

/// The address of a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RedisAddress {
    /// A host and a port.
    Tcp(HostPort),
    /// A socket in the file system.
    Unix(PathBuf),
}

impl Default for RedisAddress {
    /// Redis' default port on this host.
    fn default() -> Self {
        Self::Tcp(SocketAddr::from(([127, 0, 0, 1], 6379)).into())
    }
}

/// Section `redis.tls`, when TLS is enabled.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RedisTls {
    /// The authority that signed Redis' certificate; `None`: the system's roots.
    pub ca: Option<PathBuf>,
    /// The client certificate.
    pub identity: Option<TlsFiles>,
}

/// The passwords of Redis.
#[derive(Debug, Default, Clone)]
pub struct RedisPasswords {
    /// For servers.
    pub server: Option<SecretString>,
    /// For Sentinels.
    pub sentinel: Option<SecretString>,
}

impl Redis {
    /// Returns the files of passwords, certificates and keys.
    pub fn files(&self) -> Vec<PathBuf> {
        let sentinel = match &self.target {
            RedisTarget::Sentinel { password_file, .. } => password_file.as_ref(),
            _ => None,
        };
        let (ca, identity) = match &self.tls {
            Some(tls) => (tls.ca.as_ref(), tls.identity.as_ref()),
            None => (None, None),
        };
        let pair = identity.into_iter().flat_map(|files| [&files.certificate, &files.key]);
        self.password_file.iter().chain(sentinel).chain(ca).chain(pair).cloned().collect()
    }

    /// Reads the password files.
    ///
    /// # Errors
    /// [`Problems`] with each file that cannot be used.
    pub fn read_passwords(&self) -> Result<RedisPasswords, Problems> {
        let mut problems = Vec::new();
        let mut read = |path: &Option<PathBuf>, key: &str| {
            let path = path.as_ref()?;
            match secret::read_password(path) {
                Ok(password) => Some(password),
                Err(found) => {
                    problems.push(Problem::rule(
                        format!("redis.{key}"),
                        found,
                        "a file with the password as text",
                    ));
                    None
                }
            }
        };
        let server = read(&self.password_file, "password_file");
        let sentinel = match &self.target {
            RedisTarget::Sentinel { password_file, .. } => {
                read(password_file, "sentinel.sentinel_password_file")
            }
            _ => None,
        };
        match Problems::new(problems) {
            Some(problems) => Err(problems),
            None => Ok(RedisPasswords { server, sentinel }),
        }
    }
}

/// Declares the section.
pub(super) fn read(root: &mut Section<'_, '_>, not_redis: Option<&'static str>) -> Redis {
    root.optional(not_redis, |s| {
        let doc = "Redis, through which replicas tell each other which of them holds which agent, in the layout of \
                   GitLab agent 14.1. Exactly one of server, sentinel and cluster.";
        s.section("redis", doc, redis)
    })
}

fn redis(s: &mut Section<'_, '_>) -> Redis {
    const WAYS: [&str; 3] = ["server", "sentinel", "cluster"];
    let mut given = WAYS.into_iter().filter(|way| s.has(way));
    let first = given.next();
    for other in given.collect::<Vec<_>>() {
        let first = first.unwrap_or_default();
        s.refuse(
            other,
            format!("nothing, because redis.{first} is given: exactly one of server, sentinel and cluster"),
        );
    }
    if s.is_present() && first.is_none() {
        s.refuse("server", "exactly one of redis.server, redis.sentinel and redis.cluster");
    }
    // Declared below, in the order of 14.1, but needed for the address.
    let unix = s.peek_text("network") == Some("unix");
    let server = s.section("server", "One server.", |s| {
        let doc = "Host and port, or the path of its socket when network is unix. redis://host:port/database, \
                   rediss://... for TLS, and unix:///path are accepted too.";
        let text = s.required("address", "redis.example.com:6379", "the address of the server", doc);
        if text.is_empty() || s.is_refused("address") {
            return None;
        }
        let server = redis_server(&text, unix);
        if server.is_none() {
            let expected = "a host and a port, such as redis.example.com:6379, or redis://, rediss:// or unix:// with \
                            it";
            if text.contains('@') {
                s.refuse_as(
                    "address",
                    "something with an `@` (not shown)",
                    format!("{expected}, without a user: use redis.username and redis.password_file"),
                );
            } else {
                s.refuse("address", expected);
            }
        }
        server
    });
    let nodes = |s: &mut Section<'_, '_>, example: &[&str], port: u16, user: &str, doc: &str| {
        let texts = s.required_texts("addresses", example, "at least one address", doc);
        if s.is_refused("addresses") {
            return Vec::new();
        }
        let mut nodes = Vec::new();
        for (i, text) in texts.iter().enumerate() {
            match host_and_port(text, port) {
                Some(node) => nodes.push(node),
                // The URL may contain a password.
                None if text.contains('@') => s.refuse_as(
                    &format!("addresses[{i}]"),
                    "something with an `@` (not shown)",
                    format!("{}, without a user: use {user}", host_port::EXPECTED),
                ),
                None => {
                    let found = shown("", &serde_json::Value::from(text.as_str()));
                    s.refuse_as(&format!("addresses[{i}]"), found, host_port::EXPECTED);
                }
            }
        }
        nodes
    };
    let sentinel = s.section("sentinel", "Alternatively, a group that Sentinel monitors.", |s| {
        let master =
            s.required("master_name", "main", "the name of the group", "Name of the group in Sentinel.");
        let doc = "Host and port of Sentinels; the first answer is used. redis.tls applies to them too.";
        let user = "redis.sentinel.sentinel_username and redis.sentinel.sentinel_password_file";
        let addresses = nodes(s, &["sentinel-1.example.com:26379"], 26379, user, doc);
        let username =
            s.optional_text("sentinel_username", "", "User at the Sentinels; absent: the default user.");
        let password_file = s.path(
            "sentinel_password_file",
            "Password for the Sentinels; a final line break is not part of it.",
        );
        RedisTarget::Sentinel { master, addresses, username, password_file }
    });
    let cluster = s.section("cluster", "Alternatively, a Redis Cluster.", |s| {
        nodes(
            s,
            &["redis-1.example.com:6379"],
            6379,
            "redis.username and redis.password_file",
            "Host and port of some of its nodes; the others are found through them.",
        )
    });
    let pool_size = s.number(
        "pool_size",
        5,
        "Connections for commands, each shared by many; subscriptions use one more.",
    );
    if pool_size > 1_000 {
        s.refuse("pool_size", "at most 1000: commands share connections");
    }
    let dial_timeout = s.duration("dial_timeout", seconds(5), Rule::Positive, "How long dialling may take.");
    let read_timeout = s.duration(
        "read_timeout",
        seconds(1),
        Rule::Positive,
        "How long an answer may take. Commands share a connection, so the sum of read_timeout and write_timeout \
         applies.",
    );
    let write_timeout = s.duration("write_timeout", seconds(1), Rule::Positive, "How long sending may take.");
    let idle_timeout = s.duration(
        "idle_timeout",
        seconds(50),
        Rule::Positive,
        "Idle time after which a connection is closed.",
    );
    let key_prefix = s.text("key_prefix", "gitlab-kas", "Prefix of every key and of the channel.");
    let username = s.optional_text("username", "", "The ACL user; absent: the default user.");
    let password_file = s.path("password_file", "The password; a final line break is not part of it.");
    let network = s.text("network", "tcp", "tcp or unix.");
    if !["tcp", "unix"].contains(&network.as_str()) {
        s.refuse("network", "tcp or unix");
    }
    let (given_database, is_cluster) = (s.has("database"), s.has("cluster"));
    let database = s.number("database", 0, "The number of the database.");
    if given_database && is_cluster && database != 0 {
        s.refuse("database", "nothing, because redis.cluster is given: a cluster has database 0 only");
    }
    let database = u16::try_from(database).unwrap_or_else(|_| {
        s.refuse("database", "a number from 0 to 65535");
        0
    });
    let (by_url, url_database) = match &server {
        Some(server) => (server.tls, server.database),
        None => (false, None),
    };
    let on_socket = matches!(&server, Some(RedisServer { address: RedisAddress::Unix(_), .. }));
    let tls = s.section("tls", "TLS for Redis, also enabled by rediss://.", |s| {
        let enabled = s.flag("enabled", "Enables TLS.");
        if enabled && on_socket {
            s.refuse("enabled", "false, because redis.server is a socket of this host");
        }
        let identity = tls(s);
        let ca = s.path(
            "ca_certificate_file",
            "PEM of the authority that signed Redis' certificate; no other is accepted \
                                           then.",
        );
        let is_on = enabled || by_url;
        if !is_on && (identity.is_some() || ca.is_some()) {
            s.warn("enabled", "is not true, so the files of redis.tls have no effect");
        }
        is_on.then_some(RedisTls { ca, identity })
    });
    let target = match first {
        Some("sentinel") => sentinel,
        Some("cluster") => RedisTarget::Cluster(cluster),
        _ => RedisTarget::Server(server.map_or_else(RedisAddress::default, |server| server.address)),
    };
    Redis {
        target,
        tls,
        username,
        password_file,
        database: url_database.unwrap_or(database),
        pool_size,
        dial_timeout,
        read_timeout,
        write_timeout,
        idle_timeout,
        key_prefix,
    }
}

/// The parts of a server's address.
struct RedisServer {
    address: RedisAddress,
    tls: bool,
    database: Option<u16>,
}

fn redis_server(text: &str, unix: bool) -> Option<RedisServer> {
    if text.contains('@') {
        return None;
    }
    let path = |path: &str| {
        let address = RedisAddress::Unix(path.into());
        (!path.is_empty()).then_some(RedisServer { address, tls: false, database: None })
    };
    if let Some(socket) = text.strip_prefix("unix://") {
        return path(socket);
    }
    let (tls, rest) = match (text.strip_prefix("redis://"), text.strip_prefix("rediss://")) {
        (Some(rest), _) => (false, rest),
        (_, Some(rest)) => (true, rest),
        _ if unix => return path(text),
        _ => {
            let address = RedisAddress::Tcp(host_and_port(text, 6379)?);
            return Some(RedisServer { address, tls: false, database: None });
        }
    };
    let (host, database) = match rest.split_once('/') {
        Some((host, "")) => (host, None),
        Some((host, number)) => (host, Some(number.parse().ok()?)),
        None => (rest, None),
    };
    Some(RedisServer { address: RedisAddress::Tcp(host_and_port(host, 6379)?), tls, database })
}

/// Parses a host with an optional port.
fn host_and_port(text: &str, port: u16) -> Option<HostPort> {
    text.parse().ok().or_else(|| match text.parse::<IpAddr>() {
        Ok(IpAddr::V6(ip)) => format!("[{ip}]:{port}").parse().ok(),
        _ => format!("{text}:{port}").parse().ok(),
    })
}
