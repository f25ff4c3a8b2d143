//! The configuration of kas: one YAML file with the section and key names of GitLab agent 14.1, plus
//! our own keys, parsed once into valid types.
//!
//! [`load`] reads no file and no environment, so that it can be tested; [`Config::check`] and
//! [`Config::prepare`] are the steps that open files. Relative paths stay as they are and so are relative to the
//! folder in which the process was started, as in 14.1.
//!
//! Layout: `schema` declares every key once, `walk` reads declared keys and collects all problems, `reference` writes
//! `docs/configuration.md`, `yaml`, `duration` and `host_port` are the formats, `secret` reads and makes secret files,
//! `files` looks at all others, `exposure` at who may read them, `clash` finds listeners that want the same place.

mod clash;
mod duration;
mod exposure;
mod files;
mod host_port;
mod reference;
mod schema;
pub mod secret;
#[cfg(test)]
mod tests;
pub(crate) mod walk;
pub(crate) mod yaml;

use std::{
    ffi::OsString,
    fmt,
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    time::Duration,
};

use http::Uri;
use secrecy::SecretString;

pub use self::{
    host_port::{Host, HostPort, NotHostPort},
    walk::{Problem, Problems, Warning},
};
use self::{
    secret::{ApiSecret, Created, SecretError},
    walk::{Kind, Unknown},
};
pub use crate::certificates::OtherReplicas;

/// What `load` returns when nothing is wrong.
#[derive(Debug, Clone, PartialEq)]
pub struct Loaded {
    /// The configuration; every value in it is valid.
    pub config: Config,
    /// What its author should know: unknown keys, and keys that do nothing here.
    pub warnings: Vec<Warning>,
}

/// Parses a configuration file; the empty text gives the defaults.
///
/// # Errors
/// [`Problems`] names everything that is wrong with the file, not only the first thing.
pub fn load(yaml: &str, env: &Environment) -> Result<Loaded, Problems> {
    let root = yaml::parse(yaml, yaml::Size::Small)?;
    let (config, problems, warnings) = read(&root, env);
    match Problems::new(problems) {
        Some(problems) => Err(problems.beside(warnings)),
        None => Ok(Loaded { config, warnings }),
    }
}

/// Reads every key; where one is wrong, its default is in the configuration.
fn read(root: &serde_json::Value, env: &Environment) -> (Config, Vec<Problem>, Vec<Warning>) {
    let (config, report) = walk::walk(root, Unknown::Warns, |root| schema::read(root, env));
    let mut problems = report.problems;
    let clashes = clash::find(&config);
    let news: Vec<_> = clashes.into_iter().filter(|clash| !follows(clash, &problems)).collect();
    problems.extend(news);
    (config, problems, report.warnings)
}

/// Whether a problem may only be there because another one put a default in the place of what the file says.
fn follows(problem: &Problem, earlier: &[Problem]) -> bool {
    let is_within = |inner: &str, outer: &str| {
        inner.strip_prefix(outer).is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
    };
    earlier
        .iter()
        .any(|earlier| is_within(&problem.path, &earlier.path) || is_within(&earlier.path, &problem.path))
}

/// Checks a configuration file and all files that it names: what [`load`] and [`Config::check`] say, in one go. A key that is
/// wrong does not hide what is wrong with the files of others.
///
/// # Errors
/// [`Problems`] with all that would keep kas from starting, and the warnings; only warnings otherwise.
pub fn check(yaml: &str, env: &Environment) -> Result<Vec<Warning>, Problems> {
    let root = yaml::parse(yaml, yaml::Size::Small)?;
    let (config, mut problems, mut warnings) = read(&root, env);
    match config.check() {
        Ok(more) => warnings.extend(more),
        Err(found) => {
            let news: Vec<_> = found.iter().filter(|problem| !follows(problem, &problems)).cloned().collect();
            problems.extend(news);
            warnings.extend(found.warnings().iter().cloned());
        }
    }
    match Problems::new(problems) {
        Some(problems) => Err(problems.beside(warnings)),
        None => Ok(warnings),
    }
}

/// What of the process' environment the configuration depends on.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Environment {
    /// `KAS_STATE_DIR`.
    pub kas_state_dir: Option<OsString>,
    /// `XDG_STATE_HOME`.
    pub xdg_state_home: Option<OsString>,
    /// `HOME`.
    pub home: Option<OsString>,
    /// `OWN_PRIVATE_API_URL`: where other replicas reach this one, as 14.1 is told it.
    pub own_private_api_url: Option<OsString>,
    /// `POD_IP`, which a pod gets from the field `status.podIP`.
    pub pod_ip: Option<OsString>,
    /// OpenTelemetry's own variables.
    pub otlp: traces::Variables,
}

impl Environment {
    /// Reads the environment of this process.
    pub fn of_process() -> Self {
        Self {
            kas_state_dir: std::env::var_os("KAS_STATE_DIR"),
            xdg_state_home: std::env::var_os("XDG_STATE_HOME"),
            home: std::env::var_os("HOME"),
            own_private_api_url: std::env::var_os("OWN_PRIVATE_API_URL"),
            pod_ip: std::env::var_os("POD_IP"),
            otlp: traces::Variables::of_process(),
        }
    }

    /// Returns the state directory to use when the file names none, if the environment tells.
    fn state_dir(&self) -> Option<PathBuf> {
        let set = |value: &Option<OsString>| value.clone().filter(|v| !v.is_empty()).map(PathBuf::from);
        set(&self.kas_state_dir)
            // The XDG specification says that a relative path is to be ignored.
            .or_else(|| set(&self.xdg_state_home).filter(|p| p.is_absolute()).map(|p| p.join("kas")))
            .or_else(|| set(&self.home).map(|p| p.join(".local/state/kas")))
    }
}

/// Everything that can be configured; sections are named as in the file.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// Where kas keeps what it makes; `None` only when nothing needs it.
    pub state_dir: Option<PathBuf>,
    /// What is done about secrets and keys that everyone on the host may read.
    pub open_secret_files: OpenFiles,
    /// Which table of replicas is used, and what it needs.
    pub tracker: Tracker,
    /// Who knows which agents there are.
    pub identity: Identity,
    /// The agent listener, and what agents are given.
    pub agent: Agent,
    /// The API listener; always on.
    pub api: Api,
    /// Metrics, probes and the log.
    pub observability: Observability,
    /// How much may wait.
    pub limits: Limits,
    /// How leaving is paced.
    pub drain: Drain,
}

impl Config {
    /// Returns the complete commented file with every default: what `kas config print-default` prints.
    pub fn default_yaml() -> String {
        let read = |root: &mut walk::Section<'_, '_>| schema::read(root, &Environment::default());
        walk::walk(&serde_json::Value::Null, Unknown::Warns, read).1.page
    }

    /// Returns the reference of every key as Markdown: `docs/configuration.md`, what `kas config docs` prints.
    pub fn reference() -> String {
        let read = |root: &mut walk::Section<'_, '_>| schema::read(root, &Environment::default());
        reference::markdown(&walk::walk(&serde_json::Value::Null, Unknown::Warns, read).1.entries)
    }

    /// Checks every file that the configuration names, and what in it lets others read along; makes none.
    ///
    /// # Errors
    /// [`Problems`] with all that would keep kas from starting; only warnings otherwise.
    pub fn check(&self) -> Result<Vec<Warning>, Problems> {
        self.everything(false).map(|(_, warnings)| warnings)
    }

    /// As [`Config::check`], for a start: returns the secrets, and makes that of the API if it was left to kas.
    ///
    /// # Errors
    /// As [`Config::check`].
    pub fn prepare(&self) -> Result<(Secrets, Vec<Warning>), Problems> {
        self.everything(true)
    }

    fn everything(&self, make: bool) -> Result<(Secrets, Vec<Warning>), Problems> {
        let files::Findings { problems, mut warnings } = files::check(self);
        match (self.secrets(make && problems.is_empty()), Problems::new(problems)) {
            (Ok(secrets), None) => {
                warnings.extend(secrets.warnings.iter().cloned());
                Ok((secrets, warnings))
            }
            (Ok(_), Some(problems)) | (Err(problems), None) => Err(problems.beside(warnings)),
            (Err(more), Some(problems)) => Err(problems.and(more).beside(warnings)),
        }
    }

    /// Returns the files of all secrets that are used.
    pub fn secret_files(&self) -> Vec<PathBuf> {
        let mut files = match &self.api.secrets {
            ApiSecrets::Made(path) => vec![path.clone()],
            ApiSecrets::Given(paths) => paths.clone(),
        };
        if let Some(private) = self.tracker.private_api() {
            files.extend(private.secrets.iter().cloned());
        }
        if let Identity::GitLab(gitlab) = &self.identity {
            files.push(gitlab.secret.clone());
        }
        files
    }

    /// Checks the files of the section `redis` by the rules of a start, and reads its passwords.
    ///
    /// # Errors
    /// [`Problems`] with each file that cannot be used.
    pub fn check_redis(&self) -> Result<RedisPasswords, Problems> {
        let Tracker::Redis(shared) = &self.tracker else { return Ok(RedisPasswords::default()) };
        let files::Findings { mut problems, .. } = files::check_redis(shared, self.open_secret_files);
        let passwords = shared.redis.read_passwords(&mut problems);
        match Problems::new(problems) {
            Some(problems) => Err(problems),
            None => Ok(passwords),
        }
    }

    /// Reads and compares the secret files without making any: for checking a configuration.
    ///
    /// The API secret that the first start will make is missing from the answer then.
    ///
    /// # Errors
    /// [`Problems`] with each file that cannot be used, each secret of replicas that is too short, and
    /// each that clients have too.
    pub fn check_secrets(&self) -> Result<Secrets, Problems> {
        self.secrets(false)
    }

    /// Reads and compares the secret files, and makes the API secret if it was left to kas.
    ///
    /// # Errors
    /// As [`Config::check_secrets`].
    pub fn load_secrets(&self) -> Result<Secrets, Problems> {
        self.secrets(true)
    }

    fn secrets(&self, make: bool) -> Result<Secrets, Problems> {
        let mut problems = Vec::new();
        let mut warnings = Vec::new();
        let mut created = None;
        let open = self.open_secret_files;
        let api = Keys { section: "api", all_listed: self.api.all_secrets_listed, open };
        let api_secrets = match &self.api.secrets {
            ApiSecrets::Made(path) => {
                let made = match ApiSecret::read(path) {
                    Err(error) if error.is_absent() && make => secret::load_or_create(path).map(Some),
                    Err(error) if error.is_absent() => Ok(None),
                    read => read.map(|secret| Some((secret, Created::No))),
                };
                let made = made.unwrap_or_else(|error| {
                    problems.push(api.unusable(0, &error));
                    None
                });
                made.into_iter()
                    .map(|(secret, made)| {
                        created = (made == Created::Yes).then(|| path.clone());
                        api.judge(0, &secret, &mut problems, &mut warnings);
                        secret
                    })
                    .collect()
            }
            ApiSecrets::Given(paths) => api.read(paths, &mut problems, &mut warnings, |_, _| None),
        };
        let gitlab = match &self.identity {
            Identity::File { .. } => None,
            Identity::GitLab(gitlab) => gitlab.read_secret(open, &mut problems, &mut warnings),
        };
        let redis = match &self.tracker {
            Tracker::Redis(shared) => shared.redis.read_passwords(&mut problems),
            _ => RedisPasswords::default(),
        };
        let private = match self.tracker.private_api() {
            None => Vec::new(),
            Some(private) => {
                let keys = Keys { section: "private_api", all_listed: private.all_secrets_listed, open };
                keys.read(&private.secrets, &mut problems, &mut warnings, |secret, _| {
                    if api_secrets.contains(secret) {
                        return Some((
                            "the same secret as in api.listen".to_owned(),
                            "a secret of its own: otherwise every client of the API could act as a replica",
                        ));
                    }
                    if gitlab.as_ref() == Some(secret) {
                        return Some((
                            "the same secret as in gitlab".to_owned(),
                            "a secret of its own: otherwise GitLab could act as a replica",
                        ));
                    }
                    None
                })
            }
        };
        match Problems::new(problems) {
            Some(problems) => Err(problems),
            None => Ok(Secrets { api: api_secrets, private, gitlab, redis, created, warnings }),
        }
    }
}

impl GitLab {
    fn read_secret(
        &self,
        open: OpenFiles,
        problems: &mut Vec<Problem>,
        warnings: &mut Vec<Warning>,
    ) -> Option<ApiSecret> {
        const KEY: &str = "gitlab.authentication_secret_file";
        let (found, expected) = match ApiSecret::read(&self.secret) {
            Err(error) => (error.found(), error.expected()),
            Ok(secret) if secret.expose().len() != secret::BYTES => (
                format!("a secret of {} bytes ({})", secret.expose().len(), self.secret.display()),
                "base64 of exactly 32 bytes: the same file as GitLab has, where it is called .gitlab_kas_secret",
            ),
            Ok(secret) => {
                judge(KEY, open, &secret, problems, warnings);
                return Some(secret);
            }
        };
        problems.push(Problem {
            kind: Kind::Rule,
            path: KEY.to_owned(),
            found,
            expected: expected.to_owned(),
        });
        None
    }
}

/// Says what is wrong with a secret that could be read.
fn judge(
    key: &str,
    open: OpenFiles,
    secret: &ApiSecret,
    problems: &mut Vec<Problem>,
    warnings: &mut Vec<Warning>,
) {
    let mut warn = |warning: Warning| {
        // One file may stand for several keys.
        if !warnings.contains(&warning) {
            warnings.push(warning);
        }
    };
    secret.warnings().cloned().for_each(&mut warn);
    for fault in secret.faults() {
        if fault.is_open && open == OpenFiles::Warn {
            warn(Warning { path: key.to_owned(), text: fault.found.clone() });
        } else {
            problems.push(Problem {
                kind: Kind::Rule,
                path: key.to_owned(),
                found: fault.found.clone(),
                expected: fault.expected.to_owned(),
            });
        }
    }
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

    fn read_passwords(&self, problems: &mut Vec<Problem>) -> RedisPasswords {
        let mut read = |path: &Option<PathBuf>, key: &str| {
            let path = path.as_ref()?;
            match secret::read_password(path) {
                Ok(password) => Some(password),
                Err(found) => {
                    problems.push(Problem {
                        kind: Kind::Rule,
                        path: format!("redis.{key}"),
                        found,
                        expected: "a file with the password as text".to_owned(),
                    });
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
        RedisPasswords { server, sentinel }
    }
}

/// How the secret files of a listener are named in problems.
struct Keys {
    section: &'static str,
    /// Whether the first of them stands in the list too, because the key for one file is not given.
    all_listed: bool,
    open: OpenFiles,
}

impl Keys {
    /// Reads files in their order; a secret that comes again is left out.
    ///
    /// `fault` says what is wrong with a secret that could be read: what was found, what is expected.
    fn read(
        &self,
        paths: &[PathBuf],
        problems: &mut Vec<Problem>,
        warnings: &mut Vec<Warning>,
        fault: impl Fn(&ApiSecret, &std::path::Path) -> Option<(String, &'static str)>,
    ) -> Vec<ApiSecret> {
        let mut secrets = Vec::new();
        for (i, path) in paths.iter().enumerate() {
            let secret = match ApiSecret::read(path) {
                Ok(secret) => secret,
                Err(error) => {
                    problems.push(self.unusable(i, &error));
                    continue;
                }
            };
            if let Some((found, expected)) = fault(&secret, path) {
                problems.push(self.problem(i, found, expected));
            }
            self.judge(i, &secret, problems, warnings);
            if !secrets.contains(&secret) {
                secrets.push(secret);
            }
        }
        secrets
    }

    fn unusable(&self, position: usize, error: &SecretError) -> Problem {
        self.problem(position, error.found(), error.expected())
    }

    fn judge(
        &self,
        position: usize,
        secret: &ApiSecret,
        problems: &mut Vec<Problem>,
        warnings: &mut Vec<Warning>,
    ) {
        judge(&self.key(position), self.open, secret, problems, warnings);
    }

    fn key(&self, position: usize) -> String {
        let section = self.section;
        let key = match (self.all_listed, position) {
            (true, i) => format!("authentication_secret_files[{i}]"),
            (false, 0) => "authentication_secret_file".to_owned(),
            (false, i) => format!("authentication_secret_files[{}]", i - 1),
        };
        format!("{section}.listen.{key}")
    }

    fn problem(&self, position: usize, found: String, expected: &str) -> Problem {
        Problem { kind: Kind::Rule, path: self.key(position), found, expected: expected.to_owned() }
    }
}

/// The secrets of the listeners, read.
#[derive(Debug)]
pub struct Secrets {
    /// The API secrets: any of them verifies. Empty only when none has been made yet.
    pub api: Vec<ApiSecret>,
    /// The secrets of the private API: the first signs and seals, any of them verifies and opens. Each
    /// has 32 bytes or more, and none is one of `api`. Empty without other replicas.
    pub private: Vec<ApiSecret>,
    /// What kas signs with towards GitLab: 32 bytes. `None`: GitLab is not asked. It may be one of `api`.
    pub gitlab: Option<ApiSecret>,
    /// What is shown to Redis; empty without it.
    pub redis: RedisPasswords,
    /// The file that has just been made: to be logged, so that its place is known.
    pub created: Option<PathBuf>,
    /// What is odd about their files.
    pub warnings: Vec<Warning>,
}

/// Key `open_secret_files`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum OpenFiles {
    /// They are a problem.
    #[default]
    Refuse,
    /// They are warned about.
    Warn,
}

/// Which table of replicas is used.
#[derive(Debug, Clone, PartialEq)]
pub enum Tracker {
    /// The table of one replica, in its memory.
    Memory,
    /// A table that replicas tell each other.
    Gossip(Box<Replication>),
    /// A table that replicas keep in Redis.
    Redis(Box<Shared>),
}

impl Tracker {
    /// Returns where replicas call each other; `None`: there is one replica.
    pub fn private_api(&self) -> Option<&PrivateApi> {
        match self {
            Self::Memory => None,
            Self::Gossip(replication) => Some(&replication.private_api),
            Self::Redis(shared) => Some(&shared.private_api),
        }
    }
}

/// What several replicas need that share a Redis.
#[derive(Debug, Clone, PartialEq)]
pub struct Shared {
    /// Section `private_api`.
    pub private_api: PrivateApi,
    /// Section `redis`.
    pub redis: Redis,
    /// How long the entries of a replica count after its last sign of life: key `table.ttl`, at most 30 s.
    pub ttl: Duration,
    /// Key `agent.redis_conn_info_ttl`.
    pub entry_ttl: Duration,
    /// Key `agent.redis_conn_info_refresh`; less than `entry_ttl`.
    pub entry_refresh: Duration,
    /// Key `agent.redis_conn_info_gc`.
    pub entry_gc: Duration,
}

/// Section `redis`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Redis {
    /// Which.
    pub target: RedisTarget,
    /// `None`: plain.
    pub tls: Option<RedisTls>,
    /// `None`: the default user.
    pub username: Option<String>,
    /// The file of the password.
    pub password_file: Option<PathBuf>,
    /// The number of the database.
    pub database: u16,
    /// Connections, each for many commands at once.
    pub pool_size: u32,
    /// How long dialling may take.
    pub dial_timeout: Duration,
    /// How long an answer may take.
    pub read_timeout: Duration,
    /// How long sending may take.
    pub write_timeout: Duration,
    /// When an unused connection is closed.
    pub idle_timeout: Duration,
    /// What every key begins with.
    pub key_prefix: String,
}

/// Which Redis.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RedisTarget {
    /// One server.
    Server(RedisAddress),
    /// A group that Sentinel watches.
    Sentinel {
        /// Its name there.
        master: String,
        /// Sentinels; at least one.
        addresses: Vec<HostPort>,
        /// `None`: the default user.
        username: Option<String>,
        /// The file of the password there.
        password_file: Option<PathBuf>,
    },
    /// A cluster; at least one of its nodes.
    Cluster(Vec<HostPort>),
}

/// Where a server listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RedisAddress {
    /// A host and a port.
    Tcp(HostPort),
    /// A socket in the file system.
    Unix(PathBuf),
}

impl Default for RedisAddress {
    /// Redis' port on this host.
    fn default() -> Self {
        Self::Tcp(SocketAddr::from(([127, 0, 0, 1], 6379)).into())
    }
}

/// Section `redis.tls`, switched on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RedisTls {
    /// Who signs Redis' certificate; `None`: whom this system trusts.
    pub ca: Option<PathBuf>,
    /// What is shown to Redis.
    pub identity: Option<TlsFiles>,
}

/// The passwords of Redis, read.
#[derive(Debug, Default, Clone)]
pub struct RedisPasswords {
    /// Of servers.
    pub server: Option<SecretString>,
    /// Of Sentinels.
    pub sentinel: Option<SecretString>,
}

/// What several replicas need.
#[derive(Debug, Clone, PartialEq)]
pub struct Replication {
    /// Section `private_api`.
    pub private_api: PrivateApi,
    /// Section `discovery`.
    pub discovery: Discovery,
    /// Section `gossip`.
    pub gossip: Gossip,
    /// How long the entries of a replica stay after its last proof of life: key `table.ttl`.
    pub table_ttl: Duration,
}

/// Section `private_api`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PrivateApi {
    /// Where to listen, for TCP and for gossip's UDP; never a socket in the file system.
    pub listen: Listen,
    /// When a connection is asked to end.
    pub max_connection_age: Duration,
    /// Whose certificates are those of replicas; `None`: replicas show each other none. Only with TLS.
    pub others: Option<OtherReplicas>,
    /// What was said about the address at which others reach this replica; [`crate::advertise`] decides.
    pub advertise: Advertise,
    /// The files of the secrets that replicas share, at least one: the first signs, any verifies.
    pub secrets: Vec<PathBuf>,
    /// Whether the first of them stands in `authentication_secret_files` too: for naming it in problems.
    pub all_secrets_listed: bool,
}

/// What was said about the address at which other replicas reach this one, all of it valid.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Advertise {
    /// Key `private_api.advertise`.
    pub configured: Option<HostPort>,
    /// The host and port of `OWN_PRIVATE_API_URL`.
    pub own_url: Option<HostPort>,
    /// `POD_IP`; never the unspecified address.
    pub pod_ip: Option<IpAddr>,
}

/// Section `discovery`: where other replicas may be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Discovery {
    /// Not said: others may join this replica, it looks for nobody.
    None,
    /// At these, each a valid [`HostPort`]; at least one.
    Static(Vec<String>),
    /// Behind a name.
    Dns {
        /// The name; a valid DNS name.
        name: String,
        /// Which records of the name count.
        records: DnsRecords,
        /// How often the name is asked for, at least.
        refresh: Duration,
        /// Who is asked; `None`: the name servers of the system.
        nameserver: Option<SocketAddr>,
    },
    /// Behind a headless Service.
    Kubernetes {
        /// The name of the Service.
        service: String,
        /// Its namespace; `None`: that of this pod's service account.
        namespace: Option<String>,
        /// The port of its endpoints.
        port: ServicePort,
    },
}

/// Which records of a DNS name count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DnsRecords {
    /// A and AAAA, each with this port.
    Addresses {
        /// From 1 to 65535.
        port: u16,
    },
    /// SRV, which say the port.
    Srv,
}

/// The port of a Service's endpoints.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ServicePort {
    /// This one, from 1 to 65535.
    Number(u16),
    /// The one with this name.
    Name(String),
}

/// Section `gossip`: how replicas learn of each other.
#[derive(Debug, Clone, PartialEq)]
pub struct Gossip {
    /// The name of the group: datagrams of another are not opened. 1 to 64 letters, digits, `-`, `_`, `.`.
    pub cluster: String,
    /// Between two rounds, from 10 ms to 1 min.
    pub interval: Duration,
    /// How sure a replica is before it takes another for dead, from 1 to 100.
    pub phi: f64,
    /// How long a dead replica is remembered, from 1 s to 1 d.
    pub dead_grace: Duration,
}

/// Who knows the agents.
#[derive(Debug, Clone, PartialEq)]
pub enum Identity {
    /// Section `identity`.
    File {
        /// The file that lists the agents.
        file: PathBuf,
        /// Whether the file was left to kas, which then makes an empty one that explains itself.
        is_default: bool,
    },
    /// Section `gitlab`.
    GitLab(Box<GitLab>),
}

/// Section `gitlab`, and what `agent` says about answers of GitLab.
#[derive(Debug, Clone, PartialEq)]
pub struct GitLab {
    /// Where GitLab is: http or https with a host, and the path below which it is installed.
    pub address: Uri,
    /// The file of the secret that kas signs with.
    pub secret: PathBuf,
    /// Who signed GitLab's certificate, besides the roots of the system.
    pub ca_certificate: Option<PathBuf>,
    /// Requests per second in the long run; above zero.
    pub refill_rate_per_second: f64,
    /// Requests at once.
    pub bucket_size: u32,
    /// Which paths and headers are spoken.
    pub api: GitLabApi,
    /// How long one lookup may take; above zero.
    pub timeout: Duration,
    /// How long an agent is remembered; zero: not at all, and no error either.
    pub info_cache_ttl: Duration,
    /// How long an error is remembered; above zero.
    pub info_cache_error_ttl: Duration,
}

/// Key `gitlab.api`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum GitLabApi {
    /// What every version understands.
    #[default]
    Any,
    /// As 14.1, which drops the path of the address.
    V14,
    /// What today's versions are meant to be spoken to with, and nothing that is outdated.
    Today,
}

/// Section `agent`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Agent {
    /// The agent listener.
    pub listen: AgentListener,
    /// Where the configuration of agents comes from.
    pub configuration: ConfigurationSource,
}

/// Section `agent.listen`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AgentListener {
    /// Where to listen.
    pub listen: Listen,
    /// Whether agents may come inside WebSocket too.
    pub websocket: bool,
    /// Connections that one token may open in a minute.
    pub connections_per_token_per_minute: u32,
    /// When a connection is asked to end.
    pub max_connection_age: Duration,
    /// How long busy streams may go on after that; `None`: they are never cut.
    pub max_connection_age_grace: Option<Duration>,
    /// When idle streams that come through a proxy are ended.
    pub proxied_idle_timeout: Duration,
    /// Tunnels that one agent may hold on this replica.
    pub max_tunnels_per_agent: u32,
}

/// Section `agent.configuration`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigurationSource {
    /// Where files are read.
    pub source: Source,
    /// How often the source is asked for changes.
    pub poll_period: Duration,
    /// The largest file, in bytes.
    pub max_file_size: u32,
}

/// Where the configuration files of agents are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// Nowhere: every agent has an empty configuration.
    None,
    /// A folder that holds `agents/<name>/config.yaml`.
    Folder(PathBuf),
    /// A local bare repository that holds `.gitlab/agents/<name>/config.yaml` at its HEAD.
    Git(PathBuf),
}

/// Section `api`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Api {
    /// The API listener.
    pub listen: ApiListener,
    /// Where its secrets are.
    pub secrets: ApiSecrets,
    /// Whether the first of them stands in `authentication_secret_files` too: for naming it in problems.
    pub all_secrets_listed: bool,
}

/// Section `api.listen`, without the secret files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApiListener {
    /// Where to listen.
    pub listen: Listen,
    /// Accepted values of the claim `iss`; never empty.
    pub issuers: Vec<String>,
    /// By how much the clock of a signer may differ from ours, in whole seconds.
    pub leeway: Duration,
    /// When a connection is asked to end.
    pub max_connection_age: Duration,
}

/// Where the secrets of the API are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ApiSecrets {
    /// In these files, at least one: a token signed with any of them is accepted.
    Given(Vec<PathBuf>),
    /// In this file, which kas makes at its first start.
    Made(PathBuf),
}

/// Section `observability`.
#[derive(Debug, Clone, PartialEq)]
pub struct Observability {
    /// Where to listen; never TLS.
    pub listen: Listen,
    /// The path of metrics.
    pub metrics_path: String,
    /// The path of the liveness probe.
    pub liveness_path: String,
    /// The path of the readiness probe.
    pub readiness_path: String,
    /// What is logged.
    pub log_level: LogLevel,
    /// Where the audit log goes; `None`: there is none.
    pub audit: Option<Audit>,
    /// Where spans go; `None`: none are made.
    pub tracing: Option<Tracing>,
    /// The page for people; `None`: there is none.
    pub page: Option<Page>,
}

/// Section `observability.page`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Page {
    /// How many may look at it at once; at least one.
    pub viewers: u32,
    /// Names of this replica in URLs, besides those that nobody else can have.
    pub hosts: Vec<String>,
}

/// Section `observability.tracing`, and what OpenTelemetry's variables say besides.
#[derive(Debug, Clone, PartialEq)]
pub struct Tracing {
    /// Who takes spans.
    pub collector: traces::Collector,
    /// The share of traces that begin here and are recorded, from 0 to 1.
    pub ratio: f64,
    /// How long one export may take.
    pub timeout: Duration,
    /// Spans that may wait; at least one.
    pub queue: u32,
}

/// Section `observability.audit`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Audit {
    /// Where its lines go.
    pub output: AuditOutput,
    /// Lines that may wait to be written; at least one.
    pub queue: u32,
}

/// Key `observability.audit.output`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AuditOutput {
    /// Standard output.
    Stdout,
    /// A file, to which is appended.
    File(PathBuf),
}

/// Key `observability.logging.level`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names of log levels say it")]
pub enum LogLevel {
    #[default]
    Info,
    Debug,
    Warn,
    Error,
}

impl LogLevel {
    /// Returns the name of the level, as the file spells it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Info => "info",
            Self::Debug => "debug",
            Self::Warn => "warn",
            Self::Error => "error",
        }
    }
}

impl fmt::Display for LogLevel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Section `limits`.
#[derive(Debug, Clone, PartialEq)]
pub struct Limits {
    /// Requests that may wait for one agent.
    pub waiters_per_agent: u32,
    /// Requests that may wait in all.
    pub waiters: u32,
    /// How long a request without a deadline waits for its agent.
    pub find_timeout: Duration,
    /// What a connection that is unknown, silent or idle may take up.
    pub connections: runtime::http2::Limits,
    /// What a connection of agents may use.
    pub agents: Streams,
    /// What a connection of callers may use.
    pub callers: Streams,
    /// What a connection may try.
    pub attempts: crate::listener::Attempts,
    /// What one token may do at once before it is held to its rate.
    pub token_burst: u32,
}

/// What one connection of a listener may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Streams {
    /// Requests that may be open.
    pub open: u32,
    /// Requests that kas resets over the connection's life.
    pub resets: u32,
    /// The headers of a request, in bytes.
    pub header_list: u32,
    /// After this time without a frame kas pings…
    pub keepalive_interval: Duration,
    /// …and it waits so long for the answer.
    pub keepalive_timeout: Duration,
}

impl Streams {
    /// Returns a listener's settings with these in them.
    pub fn of(self, settings: runtime::http2::Settings) -> runtime::http2::Settings {
        runtime::http2::Settings {
            header_list: self.header_list,
            keepalive_interval: self.keepalive_interval,
            keepalive_timeout: self.keepalive_timeout,
            ..settings.with_streams(self.open, self.resets)
        }
    }
}

/// Section `drain`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Drain {
    /// How long everything is still served after readiness went away.
    pub delay: Duration,
    /// How long open requests may go on after that.
    pub timeout: Duration,
}

/// Where a listener listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listen {
    /// The kind of address.
    pub network: Network,
    /// `host:port` (an empty host means every interface), or the path of a socket.
    pub address: String,
    /// The files of its certificate; `None`: no TLS.
    pub tls: Option<TlsFiles>,
}

/// The kind of a listener's address.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Network {
    /// IPv4 or IPv6.
    #[default]
    Tcp,
    /// IPv4 only.
    Tcp4,
    /// IPv6 only.
    Tcp6,
    /// A Unix domain socket.
    Unix,
}

/// The PEM files of a certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsFiles {
    /// The certificate chain, leaf first.
    pub certificate: PathBuf,
    /// Its private key.
    pub key: PathBuf,
}
