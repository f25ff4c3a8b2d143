//! What a sync would change, as a unified diff and as lines of JSON.

use std::{fmt::Write as _, time::Duration};

use serde_json::json;

use crate::object::ObjectId;

/// How a diff is made.
#[derive(Debug, Clone)]
pub struct DiffOptions {
    /// Whether objects that a sync would prune are compared too.
    pub prune: bool,
    /// The time for all of it; what is not asked by then is an error of its object.
    pub timeout: Duration,
}

impl Default for DiffOptions {
    fn default() -> Self {
        Self { prune: true, timeout: Duration::from_secs(120) }
    }
}

/// Why there is no diff.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DiffError {
    /// A sync of this set would be refused.
    #[error("{0}")]
    Refused(String),
    /// The cluster cannot be read.
    #[error("{0}")]
    Unreachable(String),
}

/// What a sync would do to an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChangeAction {
    /// Create it.
    Create,
    /// Change it.
    Update,
    /// Delete it.
    Prune,
    /// Leave it although it is no longer in the set. The error says why.
    Keep,
    /// It cannot be said, or the sync would fail. The error says why.
    Error,
}

impl ChangeAction {
    /// The word for people and programs.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Create => "create",
            Self::Update => "update",
            Self::Prune => "prune",
            Self::Keep => "keep",
            Self::Error => "error",
        }
    }
}

/// A change of an object. Objects that would not change have none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// What would be done.
    pub action: ChangeAction,
    /// To which object.
    pub object: ObjectId,
    /// Its file; `None` for what is no longer in the set.
    pub file: Option<String>,
    /// The unified diff; of a Secret only the names of the keys that change. It may be empty.
    pub diff: String,
    /// Why; empty if there is nothing to say.
    pub error: String,
}

/// A whole diff.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Diff {
    /// The changes in the order in which a sync would make them.
    pub changes: Vec<Change>,
    /// How many objects would not change.
    pub unchanged: usize,
    /// What a person should know.
    pub warnings: Vec<String>,
}

impl Diff {
    /// Returns the exit code of `kubectl diff`: 0 without changes, 1 with changes, 2 with an error.
    pub fn exit_code(&self) -> u8 {
        if self.changes.iter().any(|change| change.action == ChangeAction::Error) {
            2
        } else {
            u8::from(self.changes.iter().any(|change| change.action != ChangeAction::Keep))
        }
    }

    /// Returns one line of JSON for each change: `{action, object, file, diff, error}`.
    pub fn to_json_lines(&self) -> String {
        let mut text = String::new();
        for change in &self.changes {
            let line = json!({
                "action": change.action.as_str(),
                "object": {
                    "group": &*change.object.group,
                    "kind": &*change.object.kind,
                    "namespace": &*change.object.namespace,
                    "name": &*change.object.name,
                },
                "file": change.file,
                "diff": change.diff,
                "error": change.error,
            });
            let _ = writeln!(text, "{line}");
        }
        text
    }

    /// Returns the unified diff of all changes.
    pub fn to_text(&self) -> String {
        let mut text = String::new();
        for change in &self.changes {
            let _ = write!(text, "# {} {}", change.action.as_str(), change.object);
            if let Some(file) = &change.file {
                let _ = write!(text, " ({file})");
            }
            if !change.error.is_empty() {
                let _ = write!(text, ": {}", change.error);
            }
            text.push('\n');
            text.push_str(&change.diff);
        }
        text
    }
}
