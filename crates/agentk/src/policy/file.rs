//! The policy file, which is reloaded when it changes.

use std::{
    fs::File,
    io::{self, Read as _},
    path::{Path, PathBuf},
    sync::Arc,
};

use parking_lot::RwLock;
use process::files::{Followed, Snapshot};
use prometheus_client::{
    encoding::{EncodeLabelSet, EncodeLabelValue},
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::Registry,
};
use settings::{Problems, Warning};

use super::{Policy, parse};

/// The largest policy file, in bytes: a ConfigMap holds no more.
pub const LARGEST: u64 = 1 << 20;

/// Why a policy file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum PolicyError {
    /// It cannot be read.
    #[error("cannot read the policy file {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// It is too large.
    #[error("the policy file {path} is larger than 1 MiB")]
    TooLarge {
        /// The file.
        path: PathBuf,
    },
    /// It is not a valid policy.
    #[error("the policy file {path} is not valid")]
    Invalid {
        /// The file.
        path: PathBuf,
        /// The problems.
        source: Problems,
    },
}

/// What the policy decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
pub(crate) enum Decision {
    /// The request was sent.
    Allow,
    /// The request was refused.
    Deny,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct DecisionLabel {
    decision: Decision,
}

/// Metrics of the policy.
#[derive(Clone, Debug, Default)]
pub struct PolicyMetrics {
    decisions: Family<DecisionLabel, Counter>,
    current: Gauge,
}

impl PolicyMetrics {
    /// Creates the families and registers them. Only an agentk with a policy has them.
    pub fn new(registry: &mut Registry) -> Self {
        let registry = registry.sub_registry_with_prefix("agentk");
        let metrics = Self::default();
        for decision in [Decision::Allow, Decision::Deny] {
            // Each label begins at 0, so that an alert sees the first increase.
            metrics.decisions.get_or_create(&DecisionLabel { decision }).inc_by(0);
        }
        registry.register(
            "policy_requests",
            "Requests that the policy has decided about",
            metrics.decisions.clone(),
        );
        registry.register(
            "policy_current",
            "Whether the policy in use is that of the file: 0 if the file is invalid and the last valid one is used",
            metrics.current.clone(),
        );
        metrics
    }

    pub(crate) fn decided(&self, decision: Decision) {
        self.decisions.get_or_create(&DecisionLabel { decision }).inc();
    }
}

/// The policy of a file. Clones share it.
#[derive(Clone, Debug)]
pub struct PolicyFile {
    current: Arc<RwLock<Arc<Policy>>>,
    metrics: PolicyMetrics,
}

impl PolicyFile {
    /// Reads the file. Returns what has to be followed, so that changes take effect.
    ///
    /// # Errors
    /// [`PolicyError`]: agentk must not start. Later problems are only logged, and the last valid
    /// policy stays in use.
    pub fn open(path: &Path, metrics: PolicyMetrics) -> Result<(Self, Followed), PolicyError> {
        let before = Snapshot::reading(vec![path.to_owned()]);
        let policy = load(path)?;
        tracing::info!(path = %path.display(), rules = policy.rules(), "the policy limits requests");
        metrics.current.set(1);
        let current = Arc::new(RwLock::new(Arc::new(policy)));
        let (file, to, gauge) = (path.to_owned(), Arc::clone(&current), metrics.current.clone());
        let followed = before
            .then("--policy-file", move || {
                let policy = load(&file).map_err(|error| process::error::chain(&error))?;
                let rules = policy.rules();
                *to.write() = Arc::new(policy);
                Ok(format!("reloaded: the next request is judged by the new policy ({rules} rules)"))
            })
            .observed(move |is_in_use| _ = gauge.set(is_in_use.into()));
        Ok((Self { current, metrics }, followed))
    }

    /// The policy in use.
    pub fn current(&self) -> Arc<Policy> {
        Arc::clone(&self.current.read())
    }

    pub(crate) fn metrics(&self) -> &PolicyMetrics {
        &self.metrics
    }
}

fn load(path: &Path) -> Result<Policy, PolicyError> {
    let (policy, warnings) = read(path)?;
    for warning in warnings {
        tracing::warn!(key = warning.path, "the policy allows more than it may seem to: {}", warning.text);
    }
    Ok(policy)
}

/// Reads a policy file, and returns warnings about it too.
///
/// # Errors
/// [`PolicyError`].
pub(crate) fn read(path: &Path) -> Result<(Policy, Vec<Warning>), PolicyError> {
    let path_of = || path.to_owned();
    let mut content = Vec::new();
    File::open(path)
        .and_then(|file| file.take(LARGEST + 1).read_to_end(&mut content))
        .map_err(|source| PolicyError::Read { path: path_of(), source })?;
    if content.len() as u64 > LARGEST {
        return Err(PolicyError::TooLarge { path: path_of() });
    }
    parse(&content).map_err(|source| PolicyError::Invalid { path: path_of(), source })
}
