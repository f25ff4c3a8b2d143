//! The repositories that agents need: those of GitLab's projects, and those on this host.
//!
//! [`Repositories`] checks each (repository, revision) for all agents of this replica, so that a hundred
//! agents with the same project cost one call. [`manifests`] selects and reads files for an agent as
//! GitLab agent 14.1 does. [`access`] knows which projects an agent may read.

pub mod access;
mod blobs;
pub mod manifests;
mod pollers;
mod projects;
mod schedule;
#[cfg(test)]
mod tests;

use std::{collections::HashMap, sync::Arc, time::Duration};

use ids::Selector;
use kas_config::{LocalRepository, Place};
use repository::{Error, RefName, Repository, bare::Bare, folder::Folder};

pub use self::{
    pollers::{Failure, Follower, Head, Repositories, TooMany},
    projects::{AskAgain, GitLabProjects, Opened, Projects},
};

/// A repository.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RepositoryId {
    /// Of a project of GitLab, by its id.
    Project(i64),
    /// One on this host, by its key `id`.
    Local(i64),
}

/// A repository on this host.
#[derive(Debug)]
pub struct Local {
    /// Its number, above zero.
    pub id: i64,
    /// The agents that may read it; `None`: nobody may.
    pub agents: Option<Selector>,
    repository: Arc<dyn Repository>,
    /// The time between two checks.
    period: Duration,
}

/// The time between two checks of a bare repository, which cost less than a millisecond.
const BARE: Duration = Duration::from_millis(150);
/// The same for a folder, all of whose files are looked at.
const FOLDER: Duration = Duration::from_millis(500);

/// Returns the repositories on this host, by their names.
fn local(configured: &[LocalRepository]) -> HashMap<String, Local> {
    let open = |place: &Place, default_branch: Option<&str>| -> Arc<dyn Repository> {
        match place {
            Place::Folder(path) => Arc::new(Folder::new(path)),
            Place::Bare(path) => {
                let branch = default_branch.and_then(|name| {
                    // Which names Git permits is not known where the configuration is read.
                    RefName::new(&format!("refs/heads/{name}"))
                        .inspect_err(
                            |error| tracing::warn!(%error, "repositories[].default_branch is ignored"),
                        )
                        .ok()
                });
                Arc::new(Bare::new(path, branch))
            }
        }
    };
    configured
        .iter()
        .map(|one| {
            let repository = open(&one.place, one.default_branch.as_deref());
            let period = match one.place {
                Place::Bare(_) => BARE,
                Place::Folder(_) => FOLDER,
            };
            (one.name.clone(), Local { id: one.id, agents: one.agents.clone(), repository, period })
        })
        .collect()
}

/// Returns the code of an error, as the log and people see it.
pub fn code(error: &Error) -> &'static str {
    match error {
        Error::User(_) => "USER",
        Error::Backend { code, .. } => code,
        Error::Denied(_) => "DENIED",
        Error::Gone(_) => "GONE",
    }
}
