//! Planners that die after each of their calls, and calls that fail in each way, against a real API server.
//! Its audit log is the only witness of what was deleted.

use std::{
    collections::BTreeSet,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use anyhow::{Result, ensure};
use async_trait::async_trait;
use bytes::Bytes;
use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use gitops::{
    Budget, CallError, ClusterApi, Engine, Head, Memory, Outcome, Progress, Project, PruneWhen, Report,
    Scope, Set, Stop, Sync, Unresolved,
};
use http::{Request, Response, StatusCode};
use parking_lot::Mutex;
use serde_json::json;
use testkit::kubernetes::{
    Kubernetes,
    deletions::{self, HeadSpan},
};
use tokio::{sync::Notify, time::sleep};

use crate::wire::{Wire, project, set};

/// Worlds that are worked on at the same time: most of them wait for a repetition.
const AT_ONCE: usize = 8;

/// What happens to a call.
#[derive(Clone, Copy, Debug)]
enum Fault {
    /// It is carried out, and its planner dies before it learns that.
    Die,
    /// It is carried out, and the connection is lost.
    Reset,
    /// It does not arrive.
    NotSent,
    /// It is carried out, and the answer has this status nevertheless.
    Answered(u16),
    /// It is answered with this status and not carried out.
    Status(u16),
}

/// A way to the API server on which one call fails.
struct Faulty {
    wire: Arc<Wire>,
    calls: AtomicUsize,
    /// The number of the call, from 0, and what happens to it.
    fault: Option<(usize, Fault)>,
    dead: Notify,
}

impl Faulty {
    fn new(wire: Arc<Wire>, fault: Option<(usize, Fault)>) -> Arc<Self> {
        Arc::new(Self { wire, calls: AtomicUsize::new(0), fault, dead: Notify::new() })
    }
}

fn status(status: u16) -> Response<Bytes> {
    let body = json!({ "kind": "Status", "status": "Failure", "message": "injected", "code": status });
    let mut answer = Response::new(body.to_string().into());
    *answer.status_mut() = StatusCode::from_u16(status).expect("a status");
    answer
}

#[async_trait]
impl ClusterApi for Faulty {
    async fn call(&self, request: Request<Bytes>) -> Result<Response<Bytes>, CallError> {
        let number = self.calls.fetch_add(1, Ordering::SeqCst);
        match self.fault.filter(|(at, _)| *at == number).map(|(_, fault)| fault) {
            None => self.wire.call(request).await,
            Some(Fault::Die) => {
                let _ = self.wire.call(request).await;
                self.dead.notify_one();
                std::future::pending().await
            }
            Some(Fault::Reset) => {
                let _ = self.wire.call(request).await;
                Err(CallError::Unknown("connection reset".to_owned()))
            }
            Some(Fault::NotSent) => Err(CallError::NotSent("no agent".to_owned())),
            Some(Fault::Answered(code)) => {
                let _ = self.wire.call(request).await;
                Ok(status(code))
            }
            Some(Fault::Status(code)) => Ok(status(code)),
        }
    }
}

fn now() -> i128 {
    #[allow(clippy::disallowed_methods)] // compared with the API server's own times
    let now = SystemTime::now();
    i128::try_from(now.duration_since(UNIX_EPOCH).unwrap_or_default().as_micros()).unwrap_or(i128::MAX)
}

/// A repository with one file, and what its heads were.
#[derive(Default)]
struct Repository(Mutex<Vec<(HeadSpan, Arc<Set>)>>);

impl Repository {
    fn push(&self, namespace: &str, commit: &str, content: &str) {
        let set = set(commit, content);
        let objects = set.objects().iter().map(|object| {
            let id = &object.id;
            let namespace = if id.namespace.is_empty() { namespace } else { &*id.namespace };
            (id.kind.to_string(), namespace.to_owned(), id.name.to_string())
        });
        let span = HeadSpan { from: now(), until: i128::MAX, objects: objects.collect() };
        let mut heads = self.0.lock();
        if let Some((last, _)) = heads.last_mut() {
            last.until = span.from;
        }
        heads.push((span, Arc::new(set)));
    }

    fn set(&self) -> Arc<Set> {
        Arc::clone(&self.0.lock().last().expect("a head").1)
    }
}

#[async_trait]
impl Head for Repository {
    async fn resolve(&self) -> Result<Option<Arc<str>>, Unresolved> {
        Ok(Some(self.set().commit().into()))
    }

    fn stop(&self) -> Option<Stop> {
        None
    }
}

const FIRST: &str = "
apiVersion: v1
kind: ConfigMap
metadata: {name: a}
data: {x: '1'}
---
apiVersion: v1
kind: ConfigMap
metadata: {name: b}
---
apiVersion: v1
kind: Secret
metadata: {name: s}
stringData: {password: hunter2}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: 'r:1'}
rules: [{apiGroups: [''], resources: [pods], verbs: [get]}]
";

/// Without `ConfigMap b` and the `Role`; with `ConfigMap c`.
const SECOND: &str = "
apiVersion: v1
kind: ConfigMap
metadata: {name: a}
data: {x: '2'}
---
apiVersion: v1
kind: ConfigMap
metadata: {name: c}
---
apiVersion: v1
kind: Secret
metadata: {name: s}
stringData: {password: hunter2}
";

/// A namespace of its own in which `FIRST` is applied, and a repository to which `SECOND` is pushed.
struct World {
    wire: Arc<Wire>,
    namespace: String,
    repository: Repository,
    project: Project,
}

impl World {
    async fn before_second(wire: &Arc<Wire>, agent: u64) -> Result<Self> {
        let namespace = format!("world-{agent}");
        wire.create_namespace(&namespace).await?;
        let project = project(agent, &namespace);
        let it = Self { wire: Arc::clone(wire), namespace, repository: Repository::default(), project };
        it.repository.push(&it.namespace, "c1", FIRST);
        let (_, report) = it.sync("first", None).await;
        let outcome = report.map(|report| report.outcome);
        ensure!(outcome == Some(Outcome::Synced), "the first sync: {outcome:?}");
        it.repository.push(&it.namespace, "c2", SECOND);
        Ok(it)
    }

    /// Syncs by a planner that knows nothing. Returns how many calls it made; without a report it is dead.
    async fn sync(&self, name: &str, fault: Option<(usize, Fault)>) -> (usize, Option<Report>) {
        let wire = Faulty::new(self.wire.named(&format!("{name}-{}", self.project.agent)), fault);
        let engine = Engine::new(Arc::clone(&wire) as _, Budget::default());
        let set = self.repository.set();
        let observer = |_: Progress| {};
        let sync = Sync {
            project: &self.project,
            set: &set,
            head: &self.repository,
            scope: Scope::All,
            prune: PruneWhen::Current,
            observer: &observer,
        };
        let mut memory = Memory::default();
        let report = tokio::select! {
            biased;
            () = wire.dead.notified() => None,
            report = engine.sync(sync, &mut memory) => Some(report),
        };
        (wire.calls.load(Ordering::SeqCst), report)
    }

    /// Syncs until it is done; a few tries are enough.
    async fn until_synced(&self) -> Result<()> {
        let mut last = None;
        for _ in 0..6 {
            let (_, report) = self.sync("next", None).await;
            if report.as_ref().is_some_and(|report| report.outcome == Outcome::Synced) {
                return Ok(());
            }
            last = report;
            sleep(Duration::from_millis(100)).await;
        }
        anyhow::bail!("never synced: {last:#?}")
    }

    /// What is in the namespace, and in its inventory.
    async fn check(&self, expected: &[&str]) -> Result<()> {
        let core = format!("/api/v1/namespaces/{}", self.namespace);
        let roles = format!("/apis/rbac.authorization.k8s.io/v1/namespaces/{}/roles", self.namespace);
        let mut found = BTreeSet::new();
        for (name, path) in [
            ("a", format!("{core}/configmaps/a")),
            ("b", format!("{core}/configmaps/b")),
            ("c", format!("{core}/configmaps/c")),
            ("s", format!("{core}/secrets/s")),
            ("r:1", format!("{roles}/r:1")),
        ] {
            if let Some(object) = self.wire.get(&path).await? {
                let value = object["data"]["x"].as_str().unwrap_or_default();
                found.insert(format!("{name}{value}"));
            }
        }
        let wanted: BTreeSet<String> = expected.iter().map(|name| (*name).to_owned()).collect();
        ensure!(found == wanted, "there are {found:?} instead of {wanted:?}");
        let id = format!("{}-1", self.project.agent);
        let keys = self.wire.inventory(&self.namespace, &id).await?.unwrap_or_default();
        ensure!(keys.len() == expected.len(), "the inventory holds {keys:?}");
        Ok(())
    }

    /// Checks every deletion of every planner of this world.
    fn check_deletions(&self, log: &str, at_least: usize) -> Result<()> {
        let heads: Vec<HeadSpan> = self.repository.0.lock().iter().map(|(span, _)| span.clone()).collect();
        // Only this world's: planners are named after it.
        let mine = format!("-{}\"", self.project.agent);
        let log: Vec<&str> = log.lines().filter(|line| line.contains(&mine)).collect();
        let id = format!("{}-1", self.project.agent);
        let found = deletions::check(&log.join("\n"), "kas/gitops", &id, &heads);
        ensure!(found.violations.is_empty() && found.deleted >= at_least, "{found:#?}");
        Ok(())
    }
}

/// How many calls a whole sync of the second commit makes.
async fn calls_of_second(wire: &Arc<Wire>) -> Result<usize> {
    let world = World::before_second(wire, 1).await?;
    let (calls, report) = world.sync("count", None).await;
    ensure!(report.is_some_and(|report| report.outcome == Outcome::Synced));
    world.check(&["a2", "c", "s"]).await?;
    Ok(calls)
}

/// Makes each call of a sync fail, in a world of its own. `then`: what is pushed before the next planner
/// begins. `last`: what is there at the end.
async fn each_call(fault: Fault, then: Option<&'static str>, last: &'static [&'static str]) -> Result<()> {
    let kubernetes = Kubernetes::start_audited().await?;
    let wire = Wire::connect(&kubernetes, "test").await?;
    let calls = calls_of_second(&wire).await?;
    ensure!(calls > 15, "{calls} calls");
    let wire = &wire;
    let worlds: Vec<World> = stream::iter(0..calls)
        .map(|number| async move {
            let agent = u64::try_from(number)? + 100;
            let world = World::before_second(wire, agent).await?;
            let (made, report) = world.sync("faulty", Some((number, fault))).await;
            ensure!(made > number, "call {number} was not made");
            ensure!(report.is_none() == matches!(fault, Fault::Die), "call {number}: {report:#?}");
            if let Some(content) = then {
                world.repository.push(&world.namespace, "c3", content);
            }
            world
                .until_synced()
                .await
                .and(world.check(last).await)
                .map_err(|error| error.context(format!("after {fault:?} at call {number} of {calls}")))?;
            anyhow::Ok(world)
        })
        .buffer_unordered(AT_ONCE)
        .try_collect()
        .await?;
    let log = std::fs::read_to_string(kubernetes.audit_log())?;
    for world in &worlds {
        // A planner that died after its last write, or before its first, leaves all deletions to one of them.
        let at_least = if then.is_some() { 0 } else { 2 };
        world.check_deletions(&log, at_least)?;
    }
    ensure!(worlds.len() == calls);
    Ok(())
}

const AT_THE_END: &[&str] = &["a2", "c", "s"];

#[tokio::test]
async fn a_planner_that_dies_after_any_call_is_completed_by_the_next() -> Result<()> {
    each_call(Fault::Die, None, AT_THE_END).await
}

#[tokio::test]
async fn a_planner_that_dies_before_a_revert_deletes_nothing_of_it() -> Result<()> {
    each_call(Fault::Die, Some(FIRST), &["a1", "b", "s", "r:1"]).await
}

#[tokio::test]
async fn a_call_whose_answer_is_lost_is_made_good() -> Result<()> {
    each_call(Fault::Reset, None, AT_THE_END).await
}

#[tokio::test]
async fn a_call_that_does_not_arrive_is_made_good() -> Result<()> {
    each_call(Fault::NotSent, None, AT_THE_END).await
}

#[tokio::test]
async fn a_call_that_is_done_and_answered_with_500_is_made_good() -> Result<()> {
    each_call(Fault::Answered(500), None, AT_THE_END).await
}

#[tokio::test]
async fn a_call_that_is_refused_with_500_409_or_429_is_made_good() -> Result<()> {
    for status in [500, 409, 429] {
        each_call(Fault::Status(status), None, AT_THE_END).await?;
    }
    Ok(())
}
