//! The configuration of kas: one YAML file with the section and key names of GitLab agent 14.1, plus
//! our own keys, parsed once into valid types.
//!
//! [`load`] reads no file and no environment, so that it can be tested; [`Config::load_secrets`] is
//! the only step that opens files. Relative paths stay as they are and so are relative to the folder
//! in which the process was started, as in 14.1.
//!
//! Layout: `schema` declares every key once, `walk` reads declared keys and collects all problems,
//! `yaml` and `duration` are the formats, `secret` reads and makes secret files.

mod duration;
mod schema;
pub mod secret;
#[cfg(test)]
mod tests;
pub(crate) mod walk;
pub(crate) mod yaml;

use std::{ffi::OsString, fmt, path::PathBuf, time::Duration};

pub use self::walk::{Problem, Problems, Warning};
use self::{
    secret::{ApiSecret, Created, SecretError},
    walk::{Kind, Unknown},
};

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
    let (config, report) = walk::walk(&root, Unknown::Warns, |root| schema::read(root, env));
    match Problems::new(report.problems) {
        Some(problems) => Err(problems),
        None => Ok(Loaded { config, warnings: report.warnings }),
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
}

impl Environment {
    /// Reads the environment of this process.
    pub fn of_process() -> Self {
        Self {
            kas_state_dir: std::env::var_os("KAS_STATE_DIR"),
            xdg_state_home: std::env::var_os("XDG_STATE_HOME"),
            home: std::env::var_os("HOME"),
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
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// Where kas keeps what it makes; `None` only when nothing needs it.
    pub state_dir: Option<PathBuf>,
    /// Which table of replicas is used.
    pub tracker: Tracker,
    /// Which agents there are.
    pub identity: Identity,
    /// The agent listener, and what agents are given.
    pub agent: Agent,
    /// The API listener; always on.
    pub api: Api,
    /// Checked, but with one replica nothing listens there.
    pub private_api: Option<PrivateApi>,
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

    /// Reads and compares the secret files without making any: for checking a configuration.
    ///
    /// The API secret that the first start will make is missing from the answer then.
    ///
    /// # Errors
    /// [`Problems`] with each file that cannot be used, or when replicas would share their secret
    /// with clients.
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
        const API: &str = "api.listen.authentication_secret_file";
        const PRIVATE: &str = "private_api.listen.authentication_secret_file";
        let mut problems = Vec::new();
        let mut note = |path: &str, error: &SecretError| {
            let found = error.found();
            problems.push(Problem {
                kind: Kind::Rule,
                path: path.to_owned(),
                found,
                expected: error.expected().to_owned(),
            });
        };
        let mut secrets = Secrets { api: Vec::new(), created: None, warnings: Vec::new() };
        match &self.api.secrets {
            ApiSecrets::Made(path) if make => match secret::load_or_create(path) {
                Ok((secret, Created::Yes)) => {
                    secrets.api.push(secret);
                    secrets.created = Some(path.clone());
                }
                Ok((secret, Created::No)) => secrets.api.push(secret),
                Err(error) => note(API, &error),
            },
            ApiSecrets::Made(path) => match ApiSecret::read(path) {
                Ok(secret) => secrets.api.push(secret),
                Err(error) if error.is_absent() => {}
                Err(error) => note(API, &error),
            },
            ApiSecrets::Given(paths) => {
                for path in paths {
                    match ApiSecret::read(path) {
                        Ok(secret) => secrets.api.push(secret),
                        Err(error) => note(API, &error),
                    }
                }
            }
        }
        let private = self.private_api.as_ref().and_then(|private| {
            ApiSecret::read(&private.secret_file).map_err(|error| note(PRIVATE, &error)).ok()
        });
        if let Some(private) = &private
            && secrets.api.iter().any(|api| api == private)
        {
            problems.push(Problem {
                kind: Kind::Rule,
                path: PRIVATE.to_owned(),
                found: "the same secret as in api.listen".to_owned(),
                expected: "a secret of its own: otherwise every client of the API could act as a replica"
                    .to_owned(),
            });
        }
        for secret in secrets.api.iter().chain(&private) {
            secrets.warnings.extend(secret.warnings().cloned());
        }
        match Problems::new(problems) {
            Some(problems) => Err(problems),
            None => Ok(secrets),
        }
    }
}

/// The secrets of the API, read.
#[derive(Debug)]
pub struct Secrets {
    /// The API secrets: any of them verifies. Empty only when none has been made yet.
    pub api: Vec<ApiSecret>,
    /// The file that has just been made: to be logged, so that its place is known.
    pub created: Option<PathBuf>,
    /// Short secrets, and files that others can read or write.
    pub warnings: Vec<Warning>,
}

/// Which table of replicas is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tracker {
    /// The table of one replica, in its memory.
    Memory,
}

/// Section `identity`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// The file that lists the agents.
    pub file: PathBuf,
    /// Whether the file was left to kas, which then makes an empty one that explains itself.
    pub is_default: bool,
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
}

/// Section `api.listen`, without the secret files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApiListener {
    /// Where to listen.
    pub listen: Listen,
    /// Accepted values of the claim `iss`; never empty.
    pub issuers: Vec<String>,
    /// By how much the clock of a signer may differ from ours.
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

/// Section `private_api`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PrivateApi {
    /// The file of the secret that replicas share.
    pub secret_file: PathBuf,
}

/// Section `observability`.
#[derive(Debug, Clone, PartialEq, Eq)]
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
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Requests that may wait for one agent.
    pub waiters_per_agent: u32,
    /// Requests that may wait in all.
    pub waiters: u32,
    /// How long a request without a deadline waits for its agent.
    pub find_timeout: Duration,
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
