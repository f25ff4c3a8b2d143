//! The entry points.

use std::{
    collections::BTreeSet,
    sync::{Arc, atomic::AtomicU64},
};

use parking_lot::Mutex;
use tokio::time::Instant;

use crate::{
    cluster::{Budget, ClusterApi},
    discovery::Api,
    object::{ObjectId, Set},
    progress::{Head, Observer},
    project::Project,
};

/// Applies manifest projects to one cluster. Cheap to clone; clones share what is known of the API.
///
/// One engine serves all projects of an agent that use the same credentials. A cluster that is reached with
/// other credentials (`as`) needs another engine, with the same [`Budget`].
#[derive(Clone)]
pub struct Engine {
    pub(crate) api: Arc<dyn ClusterApi>,
    pub(crate) budget: Budget,
    /// The kinds of the cluster, and when they were read.
    pub(crate) discovered: Arc<Mutex<Option<Discovered>>>,
    /// Makes every fence another one.
    pub(crate) fences: Arc<AtomicU64>,
}

/// When the kinds of a cluster were read, and what they are.
pub(crate) type Discovered = (Instant, Arc<Api>);

/// What is to be synced.
pub struct Sync<'a> {
    /// How.
    pub project: &'a Project,
    /// The wanted objects.
    pub set: &'a Set,
    /// The head of the repository.
    pub head: &'a dyn Head,
    /// Which objects are applied.
    pub scope: Scope,
    /// When objects are pruned.
    pub prune: PruneWhen,
    /// Receives progress.
    pub observer: &'a dyn Observer,
}

/// Which objects a sync applies. All other steps are done for all of them.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Scope {
    /// All of them.
    #[default]
    All,
    /// These, and those that the memory of the project does not know as applied: what differed in a drift
    /// check.
    Only(BTreeSet<ObjectId>),
}

/// When a sync prunes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PruneWhen {
    /// If the project says so, and everything is applied and current.
    #[default]
    Current,
    /// Now, although something failed or is not current, and whatever the project says: a person asked for
    /// it. A set without objects still prunes nothing.
    Now,
}

impl Engine {
    /// Returns an engine that knows nothing of the cluster yet.
    pub fn new(api: Arc<dyn ClusterApi>, budget: Budget) -> Self {
        let discovered = Arc::new(Mutex::new(None));
        // A process that was started again must not write a fence that it has written before.
        let fences = Arc::new(AtomicU64::new(u64::from(rand::random::<u32>()) << 24));
        Self { api, budget, discovered, fences }
    }
}
