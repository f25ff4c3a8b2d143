//! Planners whose cluster cannot be reached: what they do before the first call, and what people see.

mod shared;

use std::{
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use bytes::Bytes;
use cluster::{AgentMeta, Connection, Connections as _, InMemoryTracker, Lease, Locator as _, Replica};
use gitops::{CallError, ClusterApi};
use http::{Request, Response};
use ids::{Agent, AgentId, ConnectionId, Impersonation, ReplicaId};
use parking_lot::Mutex;
use prometheus_client::registry::Registry;
use proto::gitlab::agent::agentcfg::ManifestProjectCf;
use repository::{Commit, Error, Repository, Revision, folder::Folder};
use tempfile::TempDir;
use tokio::{sync::watch, time::timeout};

use crate::{
    Agents, Applier, Clusters, Configuration, Control, ControlError, FollowedHead, Heads, Parts,
    PlannerMetrics, Planners, ProjectStatus, ReadLimits, Source, SourceError, Sources, Timing,
};

const PROJECT: &str = "group/manifests";
/// Longer than all attempts of a call, and than a machine needs that compiles at the same time.
const SOON: Duration = Duration::from_secs(60);

fn agent() -> AgentId {
    AgentId::new(7).unwrap()
}

/// An API server that nobody reaches. It counts the attempts.
#[derive(Default)]
struct Unreachable(AtomicUsize);

#[async_trait]
impl ClusterApi for Unreachable {
    async fn call(&self, _request: Request<Bytes>) -> Result<Response<Bytes>, CallError> {
        self.0.fetch_add(1, Ordering::Relaxed);
        Err(CallError::NotSent("no agent is connected".to_owned()))
    }
}

struct World {
    api: Arc<Unreachable>,
    /// The folder of the repository; `None`: the agent may read none.
    folder: Option<PathBuf>,
    configuration: Mutex<Configuration>,
    /// Whether the agent may not read the repository any more.
    denied: watch::Sender<bool>,
}

impl Clusters for World {
    fn open(&self, _: AgentId, task: String, _: Option<Impersonation>) -> Arc<dyn ClusterApi> {
        assert_eq!(task, "gitops:group/manifests");
        Arc::clone(&self.api) as _
    }

    fn concurrent(&self, _: AgentId, _: bool) -> usize {
        4
    }
}

#[async_trait]
impl Sources for World {
    async fn open(&self, _: &Agent, name: &str) -> Result<Source, SourceError> {
        assert_eq!(name, PROJECT);
        let folder = self.folder.as_ref().ok_or_else(|| SourceError::Denied("not yours".to_owned()))?;
        let repository: Arc<dyn Repository> = Arc::new(Folder::new(folder));
        let heads = Arc::new(Polled { repository: Arc::clone(&repository), denied: self.denied.clone() });
        Ok(Source { id: 42, repository, heads })
    }
}

/// Looks at a repository again and again.
#[derive(Debug)]
struct Polled {
    repository: Arc<dyn Repository>,
    denied: watch::Sender<bool>,
}

struct Head {
    repository: Arc<dyn Repository>,
    revision: Revision,
    denied: watch::Receiver<bool>,
    last: Option<Option<Commit>>,
}

impl Heads for Polled {
    fn follow(&self, revision: &Revision) -> Result<Box<dyn FollowedHead>, SourceError> {
        let (repository, revision) = (Arc::clone(&self.repository), revision.clone());
        Ok(Box::new(Head { repository, revision, denied: self.denied.subscribe(), last: None }))
    }
}

#[async_trait]
impl FollowedHead for Head {
    async fn changed(&mut self) -> Result<Option<Commit>, Error> {
        loop {
            if *self.denied.borrow_and_update() {
                return Err(Error::Denied("not yours any more".to_owned()));
            }
            let head = self.repository.resolve(&self.revision).await?;
            if self.last.replace(head) != Some(head) {
                return Ok(head);
            }
            let _ = timeout(Duration::from_secs(1), self.denied.changed()).await;
        }
    }

    fn forget(&mut self) {
        self.last = None;
    }

    fn outdated(&mut self) {
        self.last = None;
    }
}

impl Agents for World {
    fn held(&self) -> Vec<Arc<Agent>> {
        vec![Arc::new(Agent { id: agent(), name: "shop".into(), project_id: 1 })]
    }

    fn configuration(&self, _: &Agent) -> Option<Configuration> {
        Some(self.configuration.lock().clone())
    }
}

struct Setup {
    planners: Arc<Planners>,
    world: Arc<World>,
    run: tokio::task::JoinHandle<()>,
    _leases: (Lease, Lease),
}

impl Drop for Setup {
    fn drop(&mut self) {
        self.run.abort();
    }
}

fn start(folder: Option<PathBuf>, version: &str) -> Setup {
    let me = Replica { id: ReplicaId::new("a"), address: "a".into() };
    let tracker = Arc::new(InMemoryTracker::new(me.clone()));
    let meta = AgentMeta { version: version.to_owned(), ..AgentMeta::default() };
    let connection = Connection {
        agent: agent(),
        name: "shop".into(),
        project_id: 1,
        id: ConnectionId::random(),
        meta,
        connected_at: Duration::ZERO,
    };
    let leases = (tracker.route(agent(), Arc::from([])), tracker.connection(connection));
    let projects = Arc::from([ManifestProjectCf { id: PROJECT.to_owned(), ..ManifestProjectCf::default() }]);
    let configuration = Configuration { projects, ..Configuration::default() };
    let world = Arc::new(World {
        api: Arc::default(),
        folder,
        configuration: Mutex::new(configuration),
        denied: watch::Sender::new(false),
    });
    let planners = Planners::new(Parts {
        me: me.id,
        tracker,
        agents: Arc::clone(&world) as _,
        sources: Arc::clone(&world) as _,
        clusters: Arc::clone(&world) as _,
        metrics: Arc::new(PlannerMetrics::new(&mut Registry::default())),
        applier: Applier::Auto,
        limits: ReadLimits::default(),
        timing: Timing::default(),
    });
    let run = tokio::spawn(Arc::clone(&planners).run());
    Setup { planners, world, run, _leases: leases }
}

impl Setup {
    async fn until(&self, condition: impl Fn(&ProjectStatus) -> bool) -> ProjectStatus {
        let mut changes = self.planners.changes();
        let found = async {
            loop {
                changes.borrow_and_update();
                let known = self.planners.get(agent(), Some(PROJECT), true);
                let project = known.and_then(|known| known.projects.into_iter().next());
                if let Some(project) = project.filter(&condition) {
                    return project;
                }
                // A planner that begins is no change.
                let _ = timeout(Duration::from_millis(50), changes.changed()).await;
            }
        };
        timeout(SOON, found).await.expect("it happens soon")
    }

    fn calls(&self) -> usize {
        self.world.api.0.load(Ordering::Relaxed)
    }
}

fn folder(files: &[(&str, &str)]) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (name, content) in files {
        std::fs::write(dir.path().join(name), content).unwrap();
    }
    dir
}

const GOOD: &str = "apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: a\n";

#[tokio::test(start_paused = true)]
async fn files_that_cannot_be_decoded_cause_no_call_and_are_named() {
    let dir = folder(&[("a.yaml", GOOD), ("b.yaml", "kind: [x")]);
    let it = start(Some(dir.path().to_owned()), "v0.1.0");
    let failed = it.until(|project| project.phase == "failed").await;
    assert!(failed.message.starts_with("b.yaml:1: "), "{failed:?}");
    assert!(failed.wanted.is_some() && failed.applied.is_none());
    assert_eq!((it.calls(), failed.id), (0, 42));
    let pruned = it.planners.control(agent(), PROJECT, Control::Prune).await;
    assert!(matches!(&pruned, Err(ControlError::Failed(why)) if why.contains("decoded")), "{pruned:?}");
    assert_eq!(it.calls(), 0);

    // Once they can be, the cluster is asked.
    std::fs::write(dir.path().join("b.yaml"), "").unwrap();
    let failed = it.until(|project| project.message.contains("no agent is connected")).await;
    assert!(failed.next.is_some(), "it is tried again");
    assert!(it.calls() > 0);
}

#[tokio::test]
async fn a_repository_that_the_agent_may_not_read_is_said_to_be_one() {
    let it = start(None, "v0.1.0");
    let failed = it.until(|project| project.phase == "failed").await;
    assert_eq!((failed.message.as_str(), it.calls()), ("not yours", 0));
}

#[tokio::test(start_paused = true)]
async fn a_permission_that_ends_stops_the_planner() {
    let dir = folder(&[("a.yaml", GOOD)]);
    let it = start(Some(dir.path().to_owned()), "v0.1.0");
    it.until(|project| project.message.contains("no agent is connected")).await;
    it.world.denied.send_replace(true);
    let failed = it.until(|project| project.message == "not yours any more").await;
    assert!(failed.phase == "failed" && failed.next.is_some(), "{failed:?}");
    let before = it.calls();
    let pruned = it.planners.control(agent(), PROJECT, Control::Prune).await;
    assert_eq!(pruned, Err(ControlError::Failed("not yours any more".to_owned())));
    assert_eq!(it.calls(), before);

    // It may again, and a person does not wait for the next try.
    it.world.denied.send_replace(false);
    it.planners.control(agent(), PROJECT, Control::Sync).await.unwrap();
    it.until(|project| project.message.contains("no agent is connected")).await;
}

#[tokio::test(start_paused = true)]
async fn what_the_configuration_names_decides_what_may_be_asked_for() {
    let dir = folder(&[("a.yaml", GOOD)]);
    let it = start(Some(dir.path().to_owned()), "v0.1.0");
    it.until(|project| project.phase == "failed").await;
    let destroyed = it.planners.destroy(agent(), PROJECT, "default", false).await;
    assert!(matches!(&destroyed, Err(ControlError::Wrong(why)) if why.contains("names")), "{destroyed:?}");
    let other = it.planners.control(agent(), "other", Control::Sync).await;
    assert!(matches!(&other, Err(ControlError::Wrong(_))), "{other:?}");
    it.planners.drain();
    let gone = it.planners.control(agent(), PROJECT, Control::Sync).await;
    assert_eq!(gone, Err(ControlError::NotHome));
}

#[tokio::test]
async fn an_agentk_that_applies_by_itself_is_left_alone() {
    let dir = folder(&[("a.yaml", GOOD)]);
    let it = start(Some(dir.path().to_owned()), "v14.1.0");
    let waits = async {
        loop {
            let known = it.planners.get(agent(), None, false);
            match known {
                Some(known) if known.waits.contains("v14.1.0") => return known,
                _ => tokio::task::yield_now().await,
            }
            let mut changes = it.planners.changes();
            let _ = timeout(Duration::from_millis(50), changes.changed()).await;
        }
    };
    let known = timeout(SOON, waits).await.expect("it is known soon");
    assert!(known.projects.is_empty());
    assert_eq!(it.calls(), 0);
}
