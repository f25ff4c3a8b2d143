//! Where manifests come from: the seam to repositories, and what an entry of a configuration means.

use std::{collections::BTreeSet, fmt, sync::Arc, time::Duration};

use async_trait::async_trait;
use gitops::{Options, Project, glob::Glob};
use ids::Agent;
use proto::gitlab::agent::agentcfg::{ManifestProjectCf, git_ref_cf::Ref, manifest_project_cf::PruneOneof};
use repository::{Commit, Error, Repository, Revision};

/// Finds repositories.
#[async_trait]
pub trait Sources: Send + Sync + 'static {
    /// Returns the repository that an agent calls `name`.
    ///
    /// # Errors
    /// See [`SourceError`].
    async fn open(&self, agent: &Agent, name: &str) -> Result<Source, SourceError>;
}

/// A repository of manifests.
#[derive(Clone, Debug)]
pub struct Source {
    /// The number of the project, as in the name of its inventory.
    pub id: u64,
    /// The repository. It is asked anew for each commit that it resolves.
    pub repository: Arc<dyn Repository>,
    /// Tells when a revision names another commit.
    pub heads: Arc<dyn Heads>,
}

/// Follows revisions of a repository, for as many projects as want to know.
pub trait Heads: fmt::Debug + Send + Sync + 'static {
    /// Follows a revision until the result is dropped.
    ///
    /// # Errors
    /// [`SourceError::Unavailable`].
    fn follow(&self, revision: &Revision) -> Result<Box<dyn FollowedHead>, SourceError>;
}

/// A revision that is followed.
#[async_trait]
pub trait FollowedHead: Send + 'static {
    /// Returns the commit when it differs from what was returned last, or an error of another kind. The first
    /// call returns as soon as the commit is known.
    ///
    /// # Errors
    /// [`Error::Denied`]: the agent may not read the repository any more, so the project ends. After others,
    /// the last commit counts.
    ///
    /// # Cancel safety
    /// Cancel safe: a change that is not returned is returned by the next call.
    async fn changed(&mut self) -> Result<Option<Commit>, Error>;

    /// Makes the next answer a change.
    fn forget(&mut self);

    /// What was returned is known not to be the head any more: the repository is asked before the next
    /// answer, which is a change.
    fn outdated(&mut self);
}

/// Why there is no repository.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SourceError {
    /// The agent may not read it, or there is none of that name. Nothing is pruned because of it.
    #[error("{0}")]
    Denied(String),
    /// It is not known.
    #[error("{0}")]
    Unavailable(String),
}

/// Limits of what is read for a project.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadLimits {
    /// The largest file, in bytes.
    pub file: u64,
    /// All files, in bytes.
    pub total: u64,
    /// The most globs.
    pub paths: usize,
    /// The most files that are listed, whether they match or not.
    pub files: usize,
}

impl Default for ReadLimits {
    /// The defaults of 14.1.
    fn default() -> Self {
        Self { file: 5 << 20, total: 20 << 20, paths: 100, files: 1000 }
    }
}

/// What applies to all projects of an agent: its file `kas.yaml`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Bounds {
    /// The only namespaces; `None`: any.
    pub namespaces: Option<BTreeSet<String>>,
    /// The time between two checks for drift; `None`: the default.
    pub check: Option<Duration>,
}

/// An entry of `gitops.manifest_projects`, checked.
#[derive(Debug)]
pub(crate) struct Entry {
    /// Which commit is wanted.
    pub(crate) revision: Revision,
    /// Which files.
    pub(crate) globs: Vec<Glob>,
    /// How they are applied.
    pub(crate) project: Project,
}

impl Entry {
    /// Checks an entry. `id` is the number of its project.
    ///
    /// # Errors
    /// A text for people.
    pub(crate) fn new(
        agent: &Agent,
        id: u64,
        replica: &str,
        entry: &ManifestProjectCf,
        bounds: &Bounds,
        limits: &ReadLimits,
    ) -> Result<Self, String> {
        let options = options(entry);
        let namespace = options.namespace();
        if let Some(namespaces) = &bounds.namespaces
            && !namespaces.contains(namespace)
        {
            return Err(format!(
                "default_namespace {namespace} is not one of the namespaces in the agent's kas.yaml"
            ));
        }
        let project = Project {
            namespaces: bounds.namespaces.clone(),
            ..options.project(agent.id.get(), id, replica)?
        };
        if entry.paths.len() > limits.paths {
            return Err(format!(
                "maximum number of GitOps paths per manifest project is {}, but {} was requested",
                limits.paths,
                entry.paths.len()
            ));
        }
        let given = entry.paths.iter().map(|path| path.glob.as_str());
        let default = entry.paths.is_empty().then_some(Glob::DEFAULT);
        let globs = given
            .chain(default)
            .map(|glob| Glob::parse(glob).map_err(|error| format!("paths: {glob}: {error}")))
            .collect::<Result<_, _>>()?;
        Ok(Self { revision: revision(entry)?, globs, project })
    }
}

/// Returns which commit an entry wants.
fn revision(entry: &ManifestProjectCf) -> Result<Revision, String> {
    let revision = match entry.r#ref.as_ref().and_then(|reference| reference.r#ref.as_ref()) {
        None => return Ok(Revision::Head),
        Some(Ref::Branch(name)) => Revision::branch(name),
        Some(Ref::Tag(name)) => Revision::tag(name),
        Some(Ref::Commit(digits)) => Revision::commit(digits),
    };
    revision.map_err(|error| format!("ref: {error}"))
}

fn options(entry: &ManifestProjectCf) -> Options<'_> {
    let duration = |given: &prost_types::Duration| (given.seconds, given.nanos);
    Options {
        default_namespace: &entry.default_namespace,
        reconcile_timeout: entry.reconcile_timeout.as_ref().map(duration),
        dry_run_strategy: &entry.dry_run_strategy,
        prune: entry.prune_oneof.as_ref().map(|PruneOneof::Prune(prune)| *prune),
        prune_timeout: entry.prune_timeout.as_ref().map(duration),
        prune_propagation_policy: &entry.prune_propagation_policy,
        inventory_policy: &entry.inventory_policy,
    }
}

#[cfg(test)]
mod tests {
    use gitops::{DryRun, InventoryPolicy, Propagation};
    use ids::AgentId;
    use proto::gitlab::agent::agentcfg::{GitRefCf, PathCf};

    use super::*;

    fn checked(entry: &ManifestProjectCf, bounds: &Bounds) -> Result<Entry, String> {
        let agent = Agent { id: AgentId::new(3).unwrap(), name: "a".into(), project_id: 1 };
        Entry::new(&agent, 7, "kas-1", entry, bounds, &ReadLimits::default())
    }

    #[test]
    fn an_entry_has_the_defaults_of_14_1() {
        let entry = checked(&ManifestProjectCf::default(), &Bounds::default()).unwrap();
        assert_eq!(entry.project, Project::new(3, 7, "default", "kas-1"));
        assert_eq!(entry.revision, Revision::Head);
        assert_eq!(entry.globs[0].as_str(), Glob::DEFAULT);
    }

    #[test]
    fn options_are_read_and_wrong_ones_are_named() {
        let good = ManifestProjectCf {
            default_namespace: "shop".into(),
            paths: vec![PathCf { glob: "/a/*.yaml".into() }],
            reconcile_timeout: Some(prost_types::Duration { seconds: 90, nanos: 0 }),
            dry_run_strategy: "server".into(),
            prune_oneof: Some(PruneOneof::Prune(false)),
            prune_propagation_policy: "orphan".into(),
            inventory_policy: "adopt_all".into(),
            r#ref: Some(GitRefCf { r#ref: Some(Ref::Tag("v1".into())) }),
            ..ManifestProjectCf::default()
        };
        let Entry { revision, globs, project } = checked(&good, &Bounds::default()).unwrap();
        assert_eq!(revision, Revision::tag("v1").unwrap());
        assert_eq!(globs[0].as_str(), "a/*.yaml");
        assert_eq!((project.dry_run, project.propagation), (DryRun::Server, Propagation::Orphan));
        assert_eq!(project.inventory_policy, InventoryPolicy::AdoptAll);
        assert_eq!((project.prune, project.reconcile_timeout), (false, Duration::from_secs(90)));
        let change = |change: fn(&mut ManifestProjectCf)| {
            let mut entry = good.clone();
            change(&mut entry);
            checked(&entry, &Bounds::default()).unwrap_err()
        };
        assert!(change(|e| e.dry_run_strategy = "x".into()).starts_with("dry_run_strategy: "));
        assert!(change(|e| e.inventory_policy = "x".into()).starts_with("inventory_policy: "));
        assert!(
            change(|e| e.r#ref = Some(GitRefCf { r#ref: Some(Ref::Branch("a..b".into())) }))
                .starts_with("ref: ")
        );
        assert!(
            change(|e| e.prune_timeout = Some(prost_types::Duration { seconds: -1, nanos: 0 }))
                .starts_with("prune_timeout: ")
        );
        assert!(change(|e| e.paths = vec![PathCf::default(); 101]).contains("101 was requested"));
        let bounds = Bounds { namespaces: Some(BTreeSet::from(["a".to_owned()])), check: None };
        assert!(checked(&good, &bounds).unwrap_err().contains("default_namespace shop"));
    }
}
