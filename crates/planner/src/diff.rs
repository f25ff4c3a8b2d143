//! What a sync would change, and the removal of a project that no configuration names.

use std::{sync::Arc, time::Duration};

use gitops::{
    Action, Diff, DiffError, DiffOptions, DryRun, Engine, Head, Outcome, Project, Propagation, Stop,
    Unresolved, cut, decode::File,
};
use ids::{AgentId, Impersonation};
use parking_lot::Mutex;
use repository::Revision;
use tokio::time::timeout;

use crate::{
    manifests::{LoadError, Queue},
    planners::{ControlError, Planners, named},
    source::SourceError,
};

/// How long a diff may take.
const WITHIN: Duration = Duration::from_secs(120);

/// What is compared with the cluster.
#[derive(Clone, Debug)]
pub enum DiffOf {
    /// A branch, a tag, a full name of a ref or a commit.
    Ref(String),
    /// The commit that was applied last.
    Live,
    /// These files.
    Files(Vec<File>),
}

/// Reads a name of a revision as people write it: a full name, the digits of a commit, a branch, or a tag.
fn revisions(name: &str) -> Result<Vec<Revision>, String> {
    if name.starts_with("refs/") {
        return Ok(vec![Revision::full(name).map_err(|error| error.to_string())?]);
    }
    if let Ok(commit) = Revision::commit(name) {
        return Ok(vec![commit]);
    }
    let branch = Revision::branch(name).map_err(|error| error.to_string())?;
    let tag = Revision::tag(name).map_err(|error| error.to_string())?;
    Ok(vec![branch, tag])
}

impl Planners {
    /// Returns what a sync of a project would change. Nothing is written. `run_as`: the cluster is asked as
    /// this identity; `None`: as the project itself is applied.
    ///
    /// # Errors
    /// See [`ControlError`].
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn diff(
        &self,
        agent: AgentId,
        project: &str,
        of: DiffOf,
        run_as: Option<Impersonation>,
    ) -> Result<Diff, ControlError> {
        let _permit = self.admit(agent)?;
        let waits = Mutex::new(String::new());
        let making = self.make_diff(agent, project, of, run_as, &waits);
        timeout(WITHIN, making).await.unwrap_or_else(|_| {
            Err(ControlError::Failed(format!("no diff within {WITHIN:?}{}", waits.lock())))
        })
    }

    async fn make_diff(
        &self,
        agent: AgentId,
        project: &str,
        of: DiffOf,
        run_as: Option<Impersonation>,
        waits: &Mutex<String>,
    ) -> Result<Diff, ControlError> {
        let (mut spec, budget, claims, share) = self.spec(agent, project)?;
        if run_as.is_some() {
            spec.impersonation = run_as;
        }
        let context = &self.context;
        let opened = spec.open(context, &budget).await;
        let mut opened = opened.map_err(|text| ControlError::Failed(cut(text)))?;
        opened.entry.project.other_inventories = claims.others(project);
        let repository = &opened.source.repository;
        let note = |why: &str| *waits.lock() = format!(": it {why}");
        let queue = Queue { share: &share, waits: &note };
        let loaded = match of {
            DiffOf::Files(files) => context.loader.decode("files", files, &context.limits, &queue).await,
            DiffOf::Ref(_) | DiffOf::Live => {
                let names = match of {
                    DiffOf::Ref(name) => revisions(&name).map_err(ControlError::Wrong)?,
                    _ => {
                        let applied = self.status(agent, project).and_then(|status| status.applied);
                        let applied = applied.ok_or_else(|| {
                            ControlError::Wrong("no commit was applied completely yet".to_owned())
                        })?;
                        vec![Revision::commit(&applied).map_err(|e| ControlError::Failed(e.to_string()))?]
                    }
                };
                let mut commit = None;
                for revision in &names {
                    let resolved = repository.resolve(revision).await;
                    commit = resolved.map_err(|error| {
                        ControlError::Failed(format!("repository cannot be read: {error}"))
                    })?;
                    if commit.is_some() {
                        break;
                    }
                }
                let commit = commit.ok_or_else(|| {
                    ControlError::Wrong("the repository has no such branch, tag, ref or commit".to_owned())
                })?;
                let (globs, limits) = (&opened.entry.globs, &context.limits);
                context.loader.load(&opened.name, &**repository, &commit, globs, limits, &queue).await
            }
        };
        let loaded = loaded.map_err(|error| match error {
            LoadError::Flawed(text) => ControlError::Wrong(cut(text)),
            LoadError::Gone => ControlError::Wrong("the commit does not exist any more".to_owned()),
            LoadError::Unavailable(text) => ControlError::Failed(cut(text)),
        })?;
        waits.lock().clear();
        let options = DiffOptions { prune: opened.entry.project.prune, timeout: WITHIN };
        let diff = opened.engine.diff(&opened.entry.project, &loaded.set, &options).await;
        diff.map_err(|error| match error {
            DiffError::Refused(text) => ControlError::Wrong(cut(text)),
            DiffError::Unreachable(text) => ControlError::Failed(cut(text)),
        })
    }

    /// Deletes every object of a project that no configuration names, and then its inventory, in this
    /// namespace. `is_dry`: it only says what it would do.
    ///
    /// # Errors
    /// See [`ControlError`].
    ///
    /// # Cancel safety
    /// If it is dropped, some of the objects may be deleted. Doing it again completes it.
    pub async fn destroy(
        self: &Arc<Self>,
        agent: AgentId,
        project: &str,
        namespace: &str,
        is_dry: bool,
    ) -> Result<Destroyed, ControlError> {
        self.plan_for(agent).await?;
        let (known, budget, configuration) = self.unnamed(agent, project, None)?;
        let context = &self.context;
        let source = context.sources.open(&known, project).await.map_err(|error| match error {
            SourceError::Denied(text) => ControlError::Wrong(text),
            SourceError::Unavailable(text) => ControlError::Failed(text),
        })?;
        // The same project may have another name: its path, its number, or other case.
        for entry in configuration.projects.iter() {
            match context.sources.open(&known, &entry.id).await {
                Ok(other) if other.id == source.id => return Err(named(&entry.id)),
                // What the agent may not read is another project than one that it may read.
                Ok(_) | Err(SourceError::Denied(_)) => {}
                Err(SourceError::Unavailable(text)) => {
                    return Err(ControlError::Failed(format!("{}: {text}", entry.id)));
                }
            }
        }
        let namespaces = configuration.bounds.namespaces;
        if namespaces.as_ref().is_some_and(|namespaces| !namespaces.contains(namespace)) {
            return Err(ControlError::Wrong(format!(
                "the namespace {namespace} is not one of the namespaces in the agent's kas.yaml"
            )));
        }
        let number = u64::try_from(agent.get()).map_err(|error| ControlError::Wrong(error.to_string()))?;
        // As `kubectl delete`: no configuration says anything else.
        let of = Project {
            propagation: Propagation::Background,
            namespaces,
            // Objects are only read.
            dry_run: if is_dry { DryRun::Client } else { DryRun::None },
            ..Project::new(number, source.id, namespace, &context.replica)
        };
        let identity = configuration.identities.get(project).cloned();
        let api = context.clusters.open(agent, format!("gitops:{project}"), identity);
        let engine = Engine::new(api, budget);
        let head = Unnamed { planners: Arc::clone(self), agent, project: project.to_owned(), id: source.id };
        let ids = engine.inventory_ids(&of).await.map_err(ControlError::Failed)?;
        if ids.is_empty() {
            return Err(ControlError::Wrong(format!(
                "the namespace {namespace} has no inventory of the project: nothing is deleted; name the \
                 default_namespace that the project had, or the namespace of its inventory template"
            )));
        }
        let (mut deleted, mut left, mut objects) = (0, Vec::new(), Vec::new());
        let mut bytes = 0;
        for id in &ids {
            let report = engine.destroy(&of, Some(id), &head, &|_: gitops::Progress| {}).await;
            if report.outcome != Outcome::Synced {
                return Err(ControlError::Failed(report.message()));
            }
            for object in &report.objects {
                let is_deleted = object.action == Action::Pruned;
                if is_deleted {
                    deleted += 1;
                } else {
                    left.push(format!("{}: {}", object.id, object.message));
                }
                let line = match is_deleted {
                    true => format!("delete {}", object.id),
                    false => format!("leave {}: {}", object.id, object.message),
                };
                bytes += line.len();
                if is_dry && objects.len() < MOST && bytes <= MOST_BYTES {
                    objects.push(line);
                }
            }
        }
        if is_dry {
            let unnamed = (deleted + left.len()).saturating_sub(objects.len());
            if unnamed > 0 {
                objects.push(format!("and {unnamed} more"));
            }
            let rest = match left.len() {
                0 => String::new(),
                count => format!("; {count} would be left alone"),
            };
            let message = format!("would delete {deleted} objects and the inventory{rest}");
            return Ok(Destroyed { message, objects });
        }
        let more = if left.len() > NAMED { "; …" } else { "" };
        let named = left.get(..NAMED).unwrap_or(&left).join("; ");
        let rest = match left.len() {
            0 => String::new(),
            count => format!("; {count} were left alone: {named}{more}"),
        };
        Ok(Destroyed { message: format!("deleted {deleted} objects and the inventory{rest}"), objects })
    }
}

/// What was deleted, or would be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Destroyed {
    /// A text for people.
    pub message: String,
    /// Of a dry run: a line for each object, at most 10,000 and 2 MiB, and one that says how many more there
    /// are.
    pub objects: Vec<String>,
}

/// The most objects that a dry run names, and the bytes of all of them: they are one message.
const MOST: usize = 10_000;
const MOST_BYTES: usize = 2 << 20;
/// How many objects a text names.
const NAMED: usize = 3;

/// The head of a project that no configuration names: there is none.
struct Unnamed {
    planners: Arc<Planners>,
    agent: AgentId,
    project: String,
    id: u64,
}

#[async_trait::async_trait]
impl Head for Unnamed {
    async fn resolve(&self) -> Result<Option<Arc<str>>, Unresolved> {
        match self.planners.unnamed(self.agent, &self.project, Some(self.id)) {
            Ok(_) => Ok(None),
            Err(error) => Err(Unresolved(error.to_string())),
        }
    }

    fn stop(&self) -> Option<Stop> {
        self.planners.unnamed(self.agent, &self.project, Some(self.id)).err().map(|_| Stop::Cancelled)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn revisions_are_read_as_people_write_them() {
        let digits = "0123456789abcdef0123456789abcdef01234567";
        assert_eq!(revisions(digits).unwrap(), [Revision::commit(digits).unwrap()]);
        let both = [Revision::branch("main").unwrap(), Revision::tag("main").unwrap()];
        assert_eq!(revisions("main").unwrap(), both);
        let merge = "refs/merge-requests/7/head";
        assert_eq!(revisions(merge).unwrap(), [Revision::full(merge).unwrap()]);
        assert!(revisions("a..b").is_err());
        assert!(revisions("HEAD@{1}").is_err());
    }
}
