//! The configuration of kas: one YAML file with the section and key names of GitLab agent 14.1 and keys of
//! this project, parsed once into valid types.
//!
//! [`load`] reads no file and no environment, so that it can be tested. Relative paths are kept, and so are
//! relative to the folder in which the process was started, as in 14.1.
//!
//! Layout: `sections` has a file for each section, with its types and their reader; `secrets` reads the
//! secret files; `reference` adds the differences to 14.1 to `docs/configuration.md`; `clash` finds listeners
//! with the same address.

mod clash;
mod environment;
mod flaw;
mod reference;
mod secrets;
mod sections;
#[cfg(test)]
mod tests;

use std::path::PathBuf;

use ids::FILE_USER_PREFIX;
pub use settings::{Host, HostPort, NotHostPort, Problem, Problems, Warning};
use settings::{
    walk::{self, Unknown},
    yaml,
};

pub use self::{
    environment::Environment,
    secrets::{EXPECTED_MODE, Secrets},
    sections::{
        OpenFiles,
        agent::{Agent, AgentListener, Applier, ConfigurationSource, Gitops, Source},
        api::{Api, ApiListener, ApiSecrets},
        direct::Direct,
        discovery::{Discovery, DnsRecords, ServicePort},
        drain::Drain,
        gitaly::Gitaly,
        gitlab::{GitLab, GitLabApi},
        gossip::Gossip,
        hooks::Hooks,
        identity::Identity,
        kubernetes_api::{
            AccessRule, ClaimPattern, ClientCertificates, InvalidClaimPattern, InvalidTemplate,
            KubernetesApi, KubernetesLimits, NameTemplate, Oidc, OwnCertificate, PerCaller, RequestIdentity,
            RequiredClaim, TemplatePart, UsersFile,
        },
        limits::{Attempts, Limits, Streams},
        listen::{Listen, Network, TlsFiles},
        observability::{Audit, AuditOutput, LogLevel, Observability, PAGE_PATH, Page, Tracing},
        private_api::{Advertise, OtherReplicas, PrivateApi},
        prometheus::Prometheus,
        redis::{Redis, RedisAddress, RedisPasswords, RedisTarget, RedisTls},
        repositories::{LocalRepository, Place},
        sinks::{RedisForm, Sink, SinkTarget, Sinks, Webhook},
        tracker::{Replication, Shared, Tracker},
        views::Views,
    },
};

/// The complete configuration; fields are named like sections of the file.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// The folder for generated files; `None` only if nothing needs it.
    pub state_dir: Option<PathBuf>,
    /// How secrets and keys that everyone on the host may read are treated.
    pub open_secret_files: OpenFiles,
    /// How replicas find out which of them holds which agent, with the settings for that.
    pub tracker: Tracker,
    /// Where agents and their tokens are known.
    pub identity: Identity,
    /// The agent listener, and the configuration of agents.
    pub agent: Agent,
    /// The API listener; always enabled.
    pub api: Api,
    /// The listener for webhooks; `None`: it is off.
    pub hooks: Option<Hooks>,
    /// The listener that tells proxies which replica holds an agent; `None`: it is off.
    pub direct: Option<Direct>,
    /// Metrics, probes, logs, traces, the audit log and the status page.
    pub observability: Observability,
    /// Limits on the resources that others can use.
    pub limits: Limits,
    /// Times of the shutdown.
    pub drain: Drain,
    /// How GitLab's Git servers are called.
    pub gitaly: Gitaly,
    /// Repositories on this host.
    pub repositories: Vec<LocalRepository>,
    /// Limits of questions to the Prometheus servers of agents.
    pub prometheus: Prometheus,
    /// Rows of objects of agents' clusters.
    pub views: Views,
    /// Where news of agents goes.
    pub sinks: Sinks,
    /// The files with rules of components; empty: those that kas has.
    pub components: Vec<PathBuf>,
}

impl Config {
    /// Returns the complete commented file with every default, which `kas config print-default` prints.
    pub fn default_yaml() -> String {
        let read = |root: &mut walk::Section<'_, '_>| sections::read(root, &Environment::default());
        walk::walk(&serde_json::Value::Null, Unknown::Warns, read).1.page
    }

    /// Returns the reference of every key as Markdown (`docs/configuration.md`), which `kas config docs`
    /// prints.
    pub fn reference() -> String {
        let read = |root: &mut walk::Section<'_, '_>| sections::read(root, &Environment::default());
        reference::markdown(&walk::walk(&serde_json::Value::Null, Unknown::Warns, read).1.entries)
    }
}

/// Returns the configuration file that a kas without one behaves as if it had: the defaults, and the
/// Kubernetes API endpoint on loopback, for users of a file that kas creates, and with a certificate that kas
/// creates. With any file, also an empty one, the endpoint is off unless the file has its section.
pub fn without_file(env: &Environment) -> String {
    // A folder that is not UTF-8 cannot be written into YAML.
    let users = env.state_dir().map(|folder| folder.join(sections::kubernetes_api::DEFAULT_USERS));
    let Some(users) = users.as_deref().and_then(std::path::Path::to_str) else { return String::new() };
    // A JSON string is a YAML scalar, whatever is in it.
    let users = serde_json::Value::from(users);
    format!(
        "\
agent:
  kubernetes_api:
    listen: {{address: 127.0.0.1:8154}}
    users: {{file: {users}}}
    access:
      - {{agents: all, users: [\"{FILE_USER_PREFIX}*\"], as: agent}}
"
    )
}

/// A valid configuration, with warnings.
#[derive(Debug, Clone, PartialEq)]
pub struct Loaded {
    /// The configuration; every value in it is valid.
    pub config: Config,
    /// Warnings for the author of the file, such as unknown keys and keys without effect.
    pub warnings: Vec<Warning>,
}

/// Parses a configuration file; the empty text gives the defaults.
///
/// # Errors
/// [`Problems`] with everything that is wrong with the file, not only the first problem.
pub fn load(yaml: &str, env: &Environment) -> Result<Loaded, Problems> {
    let root = yaml::parse(yaml, yaml::Size::Small)?;
    let (config, problems, warnings) = read(&root, env);
    match Problems::new(problems) {
        Some(problems) => Err(problems.beside(warnings)),
        None => Ok(Loaded { config, warnings }),
    }
}

/// Reads every key. The configuration has the default of a key with a problem.
fn read(root: &serde_json::Value, env: &Environment) -> (Config, Vec<Problem>, Vec<Warning>) {
    let (config, report) = walk::walk(root, Unknown::Warns, |root| sections::read(root, env));
    let mut problems = report.problems;
    let clashes = clash::find(&config);
    let news: Vec<_> = clashes.into_iter().filter(|clash| !follows(clash, &problems)).collect();
    problems.extend(news);
    (config, problems, report.warnings)
}

/// Whether a problem may exist only because an earlier problem replaced a value with its default.
fn follows(problem: &Problem, earlier: &[Problem]) -> bool {
    let is_within = |inner: &str, outer: &str| {
        inner.strip_prefix(outer).is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
    };
    earlier
        .iter()
        .any(|earlier| is_within(problem.path(), earlier.path()) || is_within(earlier.path(), problem.path()))
}

/// Parses a configuration file and calls `files`, which checks the files that the configuration names.
/// Returns the problems of both at once: a wrong key does not hide problems of files that other keys name.
///
/// # Errors
/// [`Problems`] with all problems and warnings.
pub fn check(
    yaml: &str,
    env: &Environment,
    files: impl FnOnce(&Config) -> Result<Vec<Warning>, Problems>,
) -> Result<Vec<Warning>, Problems> {
    let root = yaml::parse(yaml, yaml::Size::Small)?;
    let (config, mut problems, mut warnings) = read(&root, env);
    match files(&config) {
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
