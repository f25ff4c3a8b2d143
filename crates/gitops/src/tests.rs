//! The engine against an API server in memory. Time is paused, so waits take none.

mod checker;
mod fake;
mod faults;
mod groups;
mod steps;

use std::{sync::Arc, time::Duration};

use fake::{Clock, Repository, Server, Wire};
use parking_lot::Mutex;

use crate::{
    Action, Budget, ClusterApi, Engine, Memory, Outcome, Progress, Project, PruneWhen, Report, Scope, Sync,
    marks::ID_LABEL,
};

/// A namespace, a kind with an object, and some others.
const FIRST: &str = "
apiVersion: v1
kind: Namespace
metadata: {name: shop}
---
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: widgets.example.com}
spec:
  group: example.com
  scope: Namespaced
  names: {kind: Widget, plural: widgets}
  versions: [{name: v1, served: true}]
---
apiVersion: example.com/v1
kind: Widget
metadata: {name: w, namespace: shop}
spec: {size: 1}
---
apiVersion: v1
kind: ConfigMap
metadata: {name: a}
data: {x: '1'}
---
apiVersion: v1
kind: ConfigMap
metadata: {name: b, namespace: shop}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: 'a:b'}
";

/// Without `Widget w`, `ConfigMap b` and `ClusterRole a:b`; with `Secret s`.
const SECOND: &str = "
apiVersion: v1
kind: Namespace
metadata: {name: shop}
---
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: widgets.example.com}
spec:
  group: example.com
  scope: Namespaced
  names: {kind: Widget, plural: widgets}
  versions: [{name: v1, served: true}]
---
apiVersion: v1
kind: ConfigMap
metadata: {name: a}
data: {x: '2'}
---
apiVersion: v1
kind: Secret
metadata: {name: s}
stringData: {password: hunter2}
";

fn config_map(name: &str) -> String {
    format!("---\napiVersion: v1\nkind: ConfigMap\nmetadata: {{name: {name}}}\n")
}

/// A server, a repository and a planner.
struct World {
    server: Arc<Server>,
    repository: Arc<Repository>,
    engine: Engine,
    project: Project,
    memory: Memory,
    seen: Mutex<Vec<Progress>>,
}

impl World {
    fn new(content: &str) -> Self {
        let clock = Clock::default();
        let server = Server::new(clock.clone());
        let repository = Arc::new(Repository::new(clock));
        repository.push("c1", content);
        let engine = Self::engine(Arc::new(Wire::new(&server, "one")));
        let project = Project {
            reconcile_timeout: Duration::from_secs(30),
            prune_timeout: Duration::from_secs(30),
            ..Project::new(7, 9, "default", "replica-1")
        };
        Self { server, repository, engine, project, memory: Memory::default(), seen: Mutex::default() }
    }

    fn engine(api: Arc<dyn ClusterApi>) -> Engine {
        Engine::new(api, Budget::default())
    }

    /// A planner that knows nothing, on another wire.
    fn replace(&mut self, api: Arc<dyn ClusterApi>) {
        self.engine = Self::engine(api);
        self.memory = Memory::default();
    }

    async fn sync(&mut self) -> Report {
        self.sync_with(Scope::All, PruneWhen::Current).await
    }

    async fn sync_with(&mut self, scope: Scope, prune: PruneWhen) -> Report {
        let set = self.repository.set();
        let observer = |progress: Progress| self.seen.lock().push(progress);
        let sync = Sync {
            project: &self.project,
            set: &set,
            head: &*self.repository,
            scope,
            prune,
            observer: &observer,
        };
        let report = self.engine.sync(sync, &mut self.memory).await;
        self.check();
        report
    }

    /// Syncs and expects that everything is done.
    async fn synced(&mut self) -> Report {
        let report = self.sync().await;
        assert_eq!(report.outcome, Outcome::Synced, "{report:#?}");
        report
    }

    fn check(&self) {
        let violations = checker::violations(&self.server.log(), &self.repository.heads(), "7-9");
        assert!(violations.is_empty(), "{violations:#?}");
    }

    fn keys(&self) -> Vec<String> {
        self.server.inventory("7-9").into_iter().collect()
    }

    /// How many calls that change something were made since the beginning of the log.
    fn writes(&self) -> usize {
        self.server.log().iter().filter(|entry| entry.method != "GET").count()
    }
}

/// What was done with an object, and why.
fn done(report: &Report, name: &str) -> (Action, String) {
    let found: Vec<_> = report.objects.iter().filter(|object| &*object.id.name == name).collect();
    assert_eq!(found.len(), 1, "{report:#?}");
    (found[0].action, found[0].message.clone())
}

const A: &str = "/api/v1/namespaces/default/configmaps/a";
const B: &str = "/api/v1/namespaces/default/configmaps/b";
const INVENTORY: &str = "/api/v1/namespaces/default/configmaps/inventory-7-9";

fn template(name: &str, id: &str) -> String {
    format!(
        "---\napiVersion: v1\nkind: ConfigMap\nmetadata: {{name: {name}, labels: {{{ID_LABEL}: {id}}}}}\n"
    )
}

/// kas runs syncs in tasks of their own.
#[allow(dead_code, reason = "it only has to compile")]
fn every_entry_point_can_be_spawned(world: &'static mut World, set: &'static crate::Set) {
    fn is_send<T: Send>(_: T) {}
    let engine: &'static Engine = Box::leak(Box::new(world.engine.clone()));
    let sync = Sync {
        project: &world.project,
        set,
        head: &*world.repository,
        scope: Scope::All,
        prune: PruneWhen::Current,
        observer: &|_: Progress| {},
    };
    is_send(engine.sync(sync, &mut world.memory));
    is_send(engine.check(&world.project, &mut Memory::default()));
    is_send(engine.applied_commit(&world.project, set));
    is_send(engine.destroy(&world.project, None, &*world.repository, &|_: Progress| {}));
    is_send(engine.diff(&world.project, set, &crate::DiffOptions::default()));
}
