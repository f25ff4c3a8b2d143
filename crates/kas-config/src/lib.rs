//! The configuration of kas: one YAML file with the section and key names of GitLab agent 14.1, plus keys of
//! our own, parsed once into valid types.
//!
//! [`load`] reads no file and no environment, so that it can be tested. Relative paths stay as they are and
//! so are relative to the folder in which the process was started, as in 14.1.
//!
//! Layout: `sections` has a file for each section, with its types and their reader; `secrets` reads the
//! secret files; `reference` adds what 14.1 does to `docs/configuration.md`; `clash` finds listeners that
//! want the same address.

mod clash;
mod environment;
mod reference;
mod secrets;
mod sections;
#[cfg(test)]
mod tests;

use std::path::PathBuf;

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
        agent::{Agent, AgentListener, ConfigurationSource, Source},
        api::{Api, ApiListener, ApiSecrets},
        discovery::{Discovery, DnsRecords, ServicePort},
        drain::Drain,
        gitlab::{GitLab, GitLabApi},
        gossip::Gossip,
        identity::Identity,
        limits::{Attempts, Limits, Streams},
        listen::{Listen, Network, TlsFiles},
        observability::{Audit, AuditOutput, LogLevel, Observability, PAGE_PATH, Page, Tracing},
        private_api::{Advertise, OtherReplicas, PrivateApi},
        redis::{Redis, RedisAddress, RedisPasswords, RedisTarget, RedisTls},
        tracker::{Replication, Shared, Tracker},
    },
};

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
        let read = |root: &mut walk::Section<'_, '_>| sections::read(root, &Environment::default());
        walk::walk(&serde_json::Value::Null, Unknown::Warns, read).1.page
    }

    /// Returns the reference of every key as Markdown: `docs/configuration.md`, what `kas config docs`
    /// prints.
    pub fn reference() -> String {
        let read = |root: &mut walk::Section<'_, '_>| sections::read(root, &Environment::default());
        reference::markdown(&walk::walk(&serde_json::Value::Null, Unknown::Warns, read).1.entries)
    }
}

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
    let (config, report) = walk::walk(root, Unknown::Warns, |root| sections::read(root, env));
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
        .any(|earlier| is_within(problem.path(), earlier.path()) || is_within(earlier.path(), problem.path()))
}

/// Parses a configuration file and gives it to `files`, which checks the files that it names: what [`load`]
/// and `files` say, in one go. A key that is wrong does not hide what is wrong with the files of others.
///
/// # Errors
/// [`Problems`] with everything that is wrong, and the warnings; only warnings otherwise.
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
