//! What people see of a project: commits, phase, objects. The planner writes it, readers get copies.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use gitops::{Action, Health, ObjectId, ObjectReport, Phase, Progress, Report};
use parking_lot::{Mutex, MutexGuard};
use tokio::{sync::watch, time::Instant};

/// The most objects of a project whose state is kept.
const MOST_OBJECTS: usize = 20_000;
/// The longest message that is kept of an object, in characters.
const LONGEST: usize = 1_000;
/// The most warnings that are kept.
const MOST_WARNINGS: usize = 50;

/// The state of a project.
#[derive(Clone, Debug, Default)]
pub struct ProjectStatus {
    /// The name of the project.
    pub project: Arc<str>,
    /// Its number; 0: not known yet.
    pub id: u64,
    /// The commit that its revision names.
    pub wanted: Option<String>,
    /// The last commit that was applied completely.
    pub applied: Option<String>,
    /// `waiting` before the first sync, a phase of a sync, or the outcome of the last one: `synced`,
    /// `degraded` or `failed`.
    pub phase: &'static str,
    /// Why; empty if there is nothing to say.
    pub message: String,
    /// When the phase began, since 1970-01-01 00:00 UTC.
    pub since: Duration,
    /// When something is tried or checked next.
    pub next: Option<Instant>,
    /// How long the last sync took.
    pub took: Option<Duration>,
    /// When all of it was last applied, since 1970-01-01 00:00 UTC.
    pub synced_at: Option<Duration>,
    /// How many objects wait to be pruned.
    pub to_prune: usize,
    /// How often objects differed from what was applied, since the planner began.
    pub drift: u64,
    /// What a person should know.
    pub warnings: Vec<String>,
    /// The numbers of the objects.
    pub counts: Counts,
    /// The objects.
    pub objects: BTreeMap<ObjectId, ObjectState>,
    /// How often this has changed.
    pub version: u64,
}

/// The state of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectState {
    /// What was done with it last.
    pub action: Action,
    /// Whether it is current.
    pub health: Health,
    /// Why; empty if there is nothing to say.
    pub message: Box<str>,
    /// Its file and line; `None`: it is no longer in the set.
    pub file: Option<(Arc<str>, u32)>,
}

/// Numbers of the objects of a project.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// All of them.
    pub objects: usize,
    /// Those that are current.
    pub current: usize,
    /// Those that could not be applied or deleted.
    pub failed: usize,
}

impl ProjectStatus {
    fn count(&self) -> Counts {
        let mut counts = Counts { objects: self.objects.len(), ..Counts::default() };
        for object in self.objects.values() {
            counts.current += usize::from(object.health == Health::Current);
            counts.failed += usize::from(object.action == Action::Failed || object.health == Health::Failed);
        }
        counts
    }
}

/// The status of one project, shared by its planner and its readers.
#[derive(Debug)]
pub(crate) struct Status {
    state: Mutex<ProjectStatus>,
    /// Wakes the readers of all projects.
    changed: Arc<watch::Sender<u64>>,
}

impl Status {
    /// `changed` counts the changes of all projects.
    pub(crate) fn new(project: Arc<str>, changed: Arc<watch::Sender<u64>>) -> Self {
        let state = ProjectStatus {
            project,
            phase: "waiting",
            since: process::clock::wall(),
            ..ProjectStatus::default()
        };
        Self { state: Mutex::new(state), changed }
    }

    fn state(&self) -> MutexGuard<'_, ProjectStatus> {
        self.state.lock()
    }

    /// Returns a copy, without objects unless `objects`.
    pub(crate) fn get(&self, objects: bool) -> ProjectStatus {
        let state = self.state();
        let counts = state.count();
        if objects {
            return ProjectStatus { counts, ..state.clone() };
        }
        ProjectStatus {
            counts,
            project: Arc::clone(&state.project),
            wanted: state.wanted.clone(),
            applied: state.applied.clone(),
            message: state.message.clone(),
            warnings: state.warnings.clone(),
            objects: BTreeMap::new(),
            ..*state
        }
    }

    /// Returns the numbers of its objects.
    pub(crate) fn counts(&self) -> Counts {
        self.state().count()
    }

    /// Changes something.
    pub(crate) fn update(&self, change: impl FnOnce(&mut ProjectStatus)) {
        let mut state = self.state();
        change(&mut state);
        state.version += 1;
        drop(state);
        self.changed.send_modify(|count| *count = count.wrapping_add(1));
    }

    /// Sets the phase and why.
    pub(crate) fn phase(&self, phase: &'static str, message: impl Into<String>) {
        let message = message.into();
        self.update(|state| {
            if state.phase != phase {
                state.since = process::clock::wall();
            }
            (state.phase, state.message) = (phase, message);
        });
    }

    /// Notes what a sync tells.
    pub(crate) fn progress(&self, progress: Progress) {
        match progress {
            Progress::Phase(phase) => self.phase(Phase::as_str(phase), ""),
            Progress::Object(report) => self.update(|state| note(state, report)),
            Progress::Warning(text) => self.update(|state| {
                if state.warnings.len() < MOST_WARNINGS {
                    state.warnings.push(text);
                }
            }),
        }
    }

    /// Notes how a sync ended.
    pub(crate) fn ended(&self, report: &Report, message: String) {
        self.update(|state| {
            let phase = report.outcome.as_str();
            if state.phase != phase {
                state.since = process::clock::wall();
            }
            (state.phase, state.message) = (phase, message);
            state.took = Some(report.took);
            state.to_prune = report.to_prune;
            state.warnings = report.warnings.iter().take(MOST_WARNINGS).cloned().collect();
            if report.objects.is_empty() {
                return;
            }
            // What is gone is not shown any more.
            state.objects.retain(|_, object| !matches!(object.action, Action::Pruned | Action::Forgotten));
            for object in &report.objects {
                note(state, object.clone());
            }
            if report.outcome == gitops::Outcome::Synced {
                let gone = |action| matches!(action, Action::Pruned | Action::Forgotten);
                state.objects.retain(|_, object| !gone(object.action));
            }
        });
    }
}

fn note(state: &mut ProjectStatus, report: ObjectReport) {
    let ObjectReport { id, action, health, message, file } = report;
    if state.objects.len() >= MOST_OBJECTS && !state.objects.contains_key(&id) {
        return;
    }
    let message = message.chars().take(LONGEST).collect::<String>().into_boxed_str();
    state.objects.insert(id, ObjectState { action, health, message, file });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(name: &str, action: Action, health: Health) -> ObjectReport {
        let id = ObjectId::new("", "ConfigMap", "shop", name);
        ObjectReport { id, action, health, message: String::new(), file: None }
    }

    #[test]
    fn objects_are_counted_and_pruned_ones_leave() {
        let changed = Arc::new(watch::Sender::new(0));
        let changes = changed.subscribe();
        let status = Status::new("a/b".into(), changed);
        status.progress(Progress::Phase(Phase::Applying));
        status.progress(Progress::Object(report("a", Action::Created, Health::Current)));
        status.progress(Progress::Object(report("b", Action::Failed, Health::Unknown)));
        assert!(changes.has_changed().unwrap());
        let seen = status.get(true);
        assert_eq!((seen.phase, seen.counts), ("applying", Counts { objects: 2, current: 1, failed: 1 }));
        let synced = Report {
            commit: "c".into(),
            outcome: gitops::Outcome::Synced,
            objects: vec![
                report("a", Action::Unchanged, Health::Current),
                report("b", Action::Pruned, Health::Unknown),
            ],
            to_prune: 0,
            warnings: Vec::new(),
            inventory: None,
            took: Duration::from_millis(5),
        };
        status.ended(&synced, String::new());
        let seen = status.get(true);
        assert_eq!((seen.phase, seen.counts), ("synced", Counts { objects: 1, current: 1, failed: 0 }));
        assert!(status.get(false).objects.is_empty());
    }
}
