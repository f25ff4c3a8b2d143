//! What a sync tells while it runs, and what it returns.

use std::{fmt, sync::Arc, time::Duration};

use async_trait::async_trait;

use crate::object::ObjectId;

/// The head of a manifest project: what its repository says now, and whether the sync is still wanted.
#[async_trait]
pub trait Head: Send + Sync {
    /// Returns the commit that the project's revision names; `None`: there is no such revision.
    ///
    /// The repository must be asked after the call of this method: an answer that was known before breaks the
    /// rule of what may be deleted (see [`Engine::sync`](crate::Engine::sync)).
    ///
    /// # Errors
    /// The repository cannot be asked. The sync ends, and nothing more is written.
    async fn resolve(&self) -> Result<Option<Arc<str>>, Unresolved>;

    /// Why the sync should end before its next call; `None`: it should go on. Asked before every call, so it
    /// must be cheap.
    fn stop(&self) -> Option<Stop>;
}

/// A head that could not be resolved. The text is for people.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Unresolved(pub String);

/// Why a sync ends early. It has done no harm, and the next one completes what it began.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// There is a newer commit.
    NewCommit,
    /// This replica no longer applies for the agent.
    NotHome,
    /// The project was taken out or changed, or the process ends.
    Cancelled,
}

/// What is told while a sync runs.
#[derive(Debug, Clone, PartialEq)]
pub enum Progress {
    /// The phase has changed.
    Phase(Phase),
    /// Something happened to an object.
    Object(ObjectReport),
    /// Something that a person should know, which changes no outcome.
    Warning(String),
}

/// Receives progress. It must not block.
pub trait Observer: Send + Sync {
    /// Is called in the order of events.
    fn on(&self, progress: Progress);
}

impl<F: Fn(Progress) + Send + Sync> Observer for F {
    fn on(&self, progress: Progress) {
        self(progress);
    }
}

/// What a sync is doing. `synced`, `degraded` and `failed` are outcomes: see [`Outcome`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// It reads the inventory and what exists.
    Reading,
    /// It applies.
    Applying,
    /// It waits until everything is current.
    Waiting,
    /// It deletes what is no longer in the set, and waits until that is gone.
    Pruning,
}

impl Phase {
    /// The word for people and programs.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Reading => "reading",
            Self::Applying => "applying",
            Self::Waiting => "waiting",
            Self::Pruning => "pruning",
        }
    }
}

/// What was done with an object, or would be in a dry run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// It was applied, and that created it.
    Created,
    /// It was applied, and that changed it.
    Changed,
    /// It was applied, or need not be, and nothing changed.
    Unchanged,
    /// It was deleted and is gone.
    Pruned,
    /// It is no longer in the set and stays in the inventory; the message says why.
    Kept,
    /// It is no longer in the inventory and was left alone; the message says why.
    Forgotten,
    /// It could not be applied or deleted; the message says why.
    Failed,
}

impl Action {
    /// The word for people and programs.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Created => "created",
            Self::Changed => "changed",
            Self::Unchanged => "unchanged",
            Self::Pruned => "pruned",
            Self::Kept => "kept",
            Self::Forgotten => "forgotten",
            Self::Failed => "failed",
        }
    }
}

/// Whether an object has become what its manifest says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Health {
    /// It is not known yet.
    #[default]
    Unknown,
    /// Its controller is working.
    InProgress,
    /// It is what its manifest says.
    Current,
    /// Its controller says that it will not become that.
    Failed,
    /// It is being deleted.
    Terminating,
}

impl Health {
    /// The word for people and programs.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Unknown => "unknown",
            Self::InProgress => "in progress",
            Self::Current => "current",
            Self::Failed => "failed",
            Self::Terminating => "terminating",
        }
    }
}

/// An object in a report.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectReport {
    /// The object.
    pub id: ObjectId,
    /// What was done with it.
    pub action: Action,
    /// Whether it is current.
    pub health: Health,
    /// Why; empty if there is nothing to say. It never contains the content of a Secret.
    pub message: String,
    /// Its file and line; `None` for what is no longer in the set.
    pub file: Option<(Arc<str>, u32)>,
}

/// How a sync ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// Everything is applied and current, and what had to be deleted is gone.
    Synced,
    /// Everything is applied, but not all of it is current, or something could not be deleted yet.
    Degraded,
    /// Something could not be applied or deleted. What it was is in the report's objects.
    Incomplete,
    /// Nothing was written.
    Refused(String),
    /// The cluster or the repository could not be reached, or did not answer as it should. Some of it may be
    /// applied.
    Interrupted(String),
    /// The inventory was changed by someone else: another planner, or a person. Try again after 30 s with
    /// jitter.
    Fenced,
    /// The head is not the commit of the set. Nothing more was written. Begin anew with the new one; `None`:
    /// the revision is gone.
    HeadMoved(Option<Arc<str>>),
    /// [`Head::stop`] said so.
    Stopped(Stop),
}

impl Outcome {
    /// The word for people and programs: `synced`, `degraded` or `failed`, and for a sync that is to be begun
    /// anew `reading`.
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Synced => "synced",
            Self::Degraded => "degraded",
            Self::Incomplete | Self::Refused(_) | Self::Interrupted(_) => "failed",
            Self::Fenced | Self::HeadMoved(_) | Self::Stopped(_) => "reading",
        }
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Synced => f.write_str("synced"),
            Self::Degraded => f.write_str("applied, but not everything is current"),
            Self::Incomplete => f.write_str("some objects could not be applied"),
            Self::Refused(why) | Self::Interrupted(why) => f.write_str(why),
            Self::Fenced => f.write_str("the inventory was changed by another planner"),
            Self::HeadMoved(_) => f.write_str("the head has moved"),
            Self::Stopped(Stop::NewCommit) => f.write_str("there is a newer commit"),
            Self::Stopped(Stop::NotHome) => f.write_str("another replica applies for the agent"),
            Self::Stopped(Stop::Cancelled) => f.write_str("cancelled"),
        }
    }
}

/// What a sync did.
#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    /// The commit of the set; empty for [`Engine::destroy`](crate::Engine::destroy).
    pub commit: Arc<str>,
    /// How it ended.
    pub outcome: Outcome,
    /// Each object that was treated, in that order, once.
    pub objects: Vec<ObjectReport>,
    /// How many objects are no longer in the set and still exist: they wait to be pruned.
    pub to_prune: usize,
    /// What a person should know.
    pub warnings: Vec<String>,
    /// The inventory; `None` if it was not found and not created.
    pub inventory: Option<InventoryRef>,
    /// How long it took.
    pub took: Duration,
}

/// Which ConfigMap is the inventory: Events are about it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InventoryRef {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its uid.
    pub uid: String,
}
