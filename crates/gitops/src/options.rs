//! An entry of `gitops.manifest_projects` in the configuration of an agent, as it is written there.

use std::{fmt, time::Duration};

use crate::project::Project;

/// The namespace of a project that names none.
const DEFAULT_NAMESPACE: &str = "default";
/// The default of 14.1.
const TIMEOUT: Duration = Duration::from_secs(3_600);

/// The options of a manifest project. The default is what an entry without any means.
#[derive(Debug, Clone, Copy, Default)]
pub struct Options<'a> {
    /// `default_namespace`; empty: `default`.
    pub default_namespace: &'a str,
    /// `reconcile_timeout` in seconds and nanoseconds; `None`: an hour.
    pub reconcile_timeout: Option<(i64, i32)>,
    /// `dry_run_strategy`; empty: `none`.
    pub dry_run_strategy: &'a str,
    /// `prune`; `None`: yes.
    pub prune: Option<bool>,
    /// `prune_timeout` in seconds and nanoseconds; `None`: an hour.
    pub prune_timeout: Option<(i64, i32)>,
    /// `prune_propagation_policy`; empty: `foreground`.
    pub prune_propagation_policy: &'a str,
    /// `inventory_policy`; empty: `must_match`.
    pub inventory_policy: &'a str,
}

impl<'a> Options<'a> {
    /// The namespace of the inventory, and of objects that name none.
    pub fn namespace(&self) -> &'a str {
        match self.default_namespace {
            "" => DEFAULT_NAMESPACE,
            namespace => namespace,
        }
    }

    /// Returns the project that is applied with these options. `replica` is the one that applies, see
    /// [`Project::replica`].
    ///
    /// # Errors
    /// A text for people that begins with the option that is wrong.
    pub fn project(&self, agent: i64, id: u64, replica: &str) -> Result<Project, String> {
        let agent = u64::try_from(agent).map_err(|error| format!("the number of the agent: {error}"))?;
        let wrong = |key: &str, error: &dyn fmt::Display| format!("{key}: {error}");
        Ok(Project {
            reconcile_timeout: duration("reconcile_timeout", self.reconcile_timeout)?,
            dry_run: self.dry_run_strategy.parse().map_err(|error| wrong("dry_run_strategy", &error))?,
            prune: self.prune.unwrap_or(true),
            prune_timeout: duration("prune_timeout", self.prune_timeout)?,
            propagation: self
                .prune_propagation_policy
                .parse()
                .map_err(|error| wrong("prune_propagation_policy", &error))?,
            inventory_policy: self
                .inventory_policy
                .parse()
                .map_err(|error| wrong("inventory_policy", &error))?,
            ..Project::new(agent, id, self.namespace(), replica)
        })
    }
}

fn duration(key: &str, given: Option<(i64, i32)>) -> Result<Duration, String> {
    let Some((seconds, nanos)) = given else { return Ok(TIMEOUT) };
    match (u64::try_from(seconds), u32::try_from(nanos)) {
        (Ok(seconds), Ok(nanos)) if nanos < 1_000_000_000 => Ok(Duration::new(seconds, nanos)),
        _ => Err(format!("{key}: a duration must not be negative")),
    }
}
