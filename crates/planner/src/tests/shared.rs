//! Planners of several projects of one agent, with an API server in memory. Time is paused.

use std::collections::BTreeMap;

use http::{Method, StatusCode};
use proto::gitlab::agent::agentcfg::PathCf;
use serde_json::{Value, json};

use super::*;
use crate::DiffOf;

/// In virtual time. It is longer than any pause.
const EVER: Duration = Duration::from_secs(3_600);

/// An API server that knows ConfigMaps and Deployments. An apply replaces the object, and nothing becomes
/// current by itself.
#[derive(Default)]
struct Cluster {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    objects: BTreeMap<String, Value>,
    counter: u64,
    log: Vec<(Method, String)>,
}

#[async_trait]
impl ClusterApi for Cluster {
    async fn call(&self, request: Request<Bytes>) -> Result<Response<Bytes>, CallError> {
        let (status, body) = self.state.lock().handle(&request);
        let mut answer = Response::new(body.to_string().into());
        *answer.status_mut() = StatusCode::from_u16(status).unwrap();
        Ok(answer)
    }
}

impl Cluster {
    /// The methods and paths of what was written, without Events.
    fn writes(&self) -> Vec<(Method, String)> {
        let state = self.state.lock();
        let writes = state.log.iter().filter(|(method, path)| *method != Method::GET && !is_event(path));
        writes.cloned().collect()
    }

    fn deletions(&self) -> Vec<String> {
        let writes = self.writes().into_iter().filter(|(method, _)| *method == Method::DELETE);
        writes.map(|(_, path)| path).collect()
    }

    fn has(&self, name: &str) -> bool {
        self.state.lock().objects.contains_key(&map(name))
    }
}

/// The path of a ConfigMap.
fn map(name: &str) -> String {
    format!("/api/v1/namespaces/default/configmaps/{name}")
}

fn is_event(path: &str) -> bool {
    path.ends_with("/events")
}

fn groups(group: &str, plural: &str, kind: &str) -> Value {
    json!({ "kind": "APIGroupDiscoveryList", "items": [{ "metadata": { "name": group }, "versions": [{
        "version": "v1", "freshness": "Current", "resources": [{
            "resource": plural, "scope": "Namespaced",
            "responseKind": { "group": group, "version": "v1", "kind": kind },
        }],
    }] }] })
}

impl State {
    fn store(&mut self, path: &str, mut object: Value) -> Value {
        self.counter += 1;
        let old = self.objects.get(path).map(|old| old["metadata"]["uid"].clone());
        object["metadata"]["uid"] = old.unwrap_or_else(|| json!(format!("uid-{}", self.counter)));
        object["metadata"]["resourceVersion"] = json!(self.counter.to_string());
        self.objects.insert(path.to_owned(), object.clone());
        object
    }

    fn handle(&mut self, request: &Request<Bytes>) -> (u16, Value) {
        let path = request.uri().path().to_owned();
        let query = request.uri().query().unwrap_or_default().replace("%2F", "/").replace("%3D", "=");
        let body: Value = serde_json::from_slice(request.body()).unwrap_or_default();
        self.log.push((request.method().clone(), path.clone()));
        let apply =
            request.headers().get("content-type").is_some_and(|it| it == "application/apply-patch+yaml");
        let not_found = || (404, json!({ "kind": "Status", "reason": "NotFound", "code": 404 }));
        match (request.method().as_str(), &*path) {
            ("GET", "/api") => (200, groups("", "configmaps", "ConfigMap")),
            ("GET", "/apis") => (200, groups("apps", "deployments", "Deployment")),
            ("POST", path) if is_event(path) => (201, body),
            ("GET", path) if path.ends_with("/configmaps") || path.ends_with("/deployments") => {
                let selector = query.split('&').find_map(|pair| pair.strip_prefix("labelSelector="));
                let is_selected = |object: &Value| match selector.map(|it| it.split_once('=').ok_or(it)) {
                    None => true,
                    Some(Ok((label, value))) => object["metadata"]["labels"][label] == value,
                    Some(Err(label)) => !object["metadata"]["labels"][label].is_null(),
                };
                let inside = format!("{path}/");
                let found = self.objects.iter().filter(|(at, it)| at.starts_with(&inside) && is_selected(it));
                let items: Vec<&Value> = found.map(|(_, object)| object).collect();
                let kind = if path.ends_with("/configmaps") { "ConfigMapList" } else { "DeploymentList" };
                (200, json!({ "kind": kind, "metadata": {}, "items": items }))
            }
            ("GET", path) => self.objects.get(path).cloned().map_or_else(not_found, |found| (200, found)),
            ("POST", collection) => {
                let path = format!("{collection}/{}", body["metadata"]["name"].as_str().unwrap());
                if self.objects.contains_key(&path) {
                    return (409, json!({ "kind": "Status", "reason": "AlreadyExists", "code": 409 }));
                }
                (201, self.store(&path, body))
            }
            ("PATCH", _) if query.contains("dryRun") => (200, body),
            ("PATCH", path) if apply => {
                let is_new = !self.objects.contains_key(path);
                (if is_new { 201 } else { 200 }, self.store(path, body))
            }
            ("PATCH", path) => {
                let Some(mut object) = self.objects.get(path).cloned() else { return not_found() };
                if body["metadata"]["resourceVersion"] != object["metadata"]["resourceVersion"] {
                    return (409, json!({ "kind": "Status", "reason": "Conflict", "code": 409 }));
                }
                merge(&mut object, &body);
                (200, self.store(path, object))
            }
            ("DELETE", path) => {
                let gone = self.objects.remove(path);
                gone.map_or_else(not_found, |_| (200, json!({ "kind": "Status", "status": "Success" })))
            }
            (method, path) => panic!("{method} {path}"),
        }
    }
}

/// A JSON merge patch.
fn merge(target: &mut Value, patch: &Value) {
    for (key, value) in patch.as_object().unwrap() {
        match value {
            Value::Null => {
                target.as_object_mut().unwrap().remove(key);
            }
            Value::Object(_) if target[key].is_object() => merge(&mut target[key], value),
            value => target[key] = value.clone(),
        }
    }
}

/// An agent, its projects and its cluster.
struct Shop {
    cluster: Arc<Cluster>,
    /// The numbers and folders of the projects.
    projects: BTreeMap<&'static str, (u64, PathBuf)>,
    configuration: Mutex<Configuration>,
    /// How often a repository was opened.
    opened: AtomicUsize,
}

impl Clusters for Shop {
    fn open(&self, _: AgentId, _: String, _: Option<Impersonation>) -> Arc<dyn ClusterApi> {
        Arc::clone(&self.cluster) as _
    }

    fn concurrent(&self, _: AgentId, _: bool) -> usize {
        4
    }
}

#[async_trait]
impl Sources for Shop {
    async fn open(&self, _: &Agent, name: &str) -> Result<Source, SourceError> {
        self.opened.fetch_add(1, Ordering::Relaxed);
        let found = self.projects.get(name);
        let (id, folder) = found.ok_or_else(|| SourceError::Denied(format!("no project {name}")))?;
        assert_ne!(*id, BROKEN, "this one breaks its planner");
        let repository: Arc<dyn Repository> = Arc::new(Folder::new(folder));
        let heads =
            Arc::new(Polled { repository: Arc::clone(&repository), denied: watch::Sender::new(false) });
        Ok(Source { id: *id, repository, heads })
    }
}

/// The number of a project whose planner panics.
const BROKEN: u64 = 666;

impl Agents for Shop {
    fn held(&self) -> Vec<Arc<Agent>> {
        vec![Arc::new(Agent { id: agent(), name: "shop".into(), project_id: 1 })]
    }

    fn configuration(&self, _: &Agent) -> Option<Configuration> {
        Some(self.configuration.lock().clone())
    }
}

struct Run {
    planners: Arc<Planners>,
    shop: Arc<Shop>,
    run: tokio::task::JoinHandle<()>,
    _leases: (Lease, Lease),
}

impl Drop for Run {
    fn drop(&mut self) {
        self.run.abort();
    }
}

fn entry(name: &str) -> ManifestProjectCf {
    ManifestProjectCf { id: name.to_owned(), ..ManifestProjectCf::default() }
}

/// Starts a replica with nothing in memory.
fn run(shop: &Arc<Shop>) -> Run {
    let me = Replica { id: ReplicaId::new("a"), address: "a".into() };
    let tracker = Arc::new(InMemoryTracker::new(me.clone()));
    let connection = Connection {
        agent: agent(),
        name: "shop".into(),
        project_id: 1,
        id: ConnectionId::random(),
        meta: AgentMeta { version: "v0.1.0".to_owned(), ..AgentMeta::default() },
        connected_at: Duration::ZERO,
    };
    let leases = (tracker.route(agent(), Arc::from([])), tracker.connection(connection));
    let planners = Planners::new(Parts {
        me: me.id,
        tracker,
        agents: Arc::clone(shop) as _,
        sources: Arc::clone(shop) as _,
        clusters: Arc::clone(shop) as _,
        metrics: Arc::new(PlannerMetrics::new(&mut Registry::default())),
        applier: Applier::Auto,
        limits: ReadLimits::default(),
        timing: Timing::default(),
    });
    let run = tokio::spawn(Arc::clone(&planners).run());
    Run { planners, shop: Arc::clone(shop), run, _leases: leases }
}

/// Returns an agent with these projects, by name, number and folder. The first one is in the configuration.
fn shop(projects: &[(&'static str, u64, &TempDir)]) -> Arc<Shop> {
    let known = projects.iter().map(|(name, id, dir)| (*name, (*id, dir.path().to_owned()))).collect();
    let shop = Arc::new(Shop {
        cluster: Arc::default(),
        projects: known,
        configuration: Mutex::default(),
        opened: AtomicUsize::new(0),
    });
    shop.configure([entry(projects[0].0)]);
    shop
}

impl Shop {
    fn configure(&self, projects: impl Into<Arc<[ManifestProjectCf]>>) {
        self.configuration.lock().projects = projects.into();
    }
}

impl Run {
    async fn until(&self, name: &str, condition: impl Fn(&ProjectStatus) -> bool) -> ProjectStatus {
        let mut changes = self.planners.changes();
        let found = async {
            loop {
                changes.borrow_and_update();
                let known = self.planners.get(agent(), Some(name), true);
                let project = known.and_then(|known| known.projects.into_iter().next());
                if let Some(project) = project.filter(&condition) {
                    return project;
                }
                // A planner that begins is no change.
                let _ = timeout(Duration::from_millis(50), changes.changed()).await;
            }
        };
        timeout(EVER, found).await.expect("it happens")
    }

    async fn synced(&self, name: &str) -> ProjectStatus {
        self.until(name, |project| project.phase == "synced").await
    }
}

fn template(id: &str) -> String {
    format!(
        "apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: inventory\n  labels:\n    \
         cli-utils.sigs.k8s.io/inventory-id: {id}\n"
    )
}

fn config_map(name: &str) -> String {
    format!("apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: {name}\n")
}

#[tokio::test(start_paused = true)]
async fn an_inventory_has_one_project_and_the_others_change_nothing() {
    let a = folder(&[("t.yaml", &template("shop")), ("a.yaml", &config_map("a"))]);
    let b = folder(&[("t.yaml", &template("shop")), ("b.yaml", &config_map("b"))]);
    let c = folder(&[("c.yaml", &config_map("c"))]);
    let d = folder(&[("d.yaml", &config_map("d"))]);
    let shop = shop(&[("x/a", 1, &a), ("x/b", 2, &b), ("x/c", 3, &c), ("X/C", 3, &d)]);
    let it = run(&shop);
    it.synced("x/a").await;
    shop.configure([entry("x/a"), entry("x/b"), entry("x/c")]);
    let refused = |other: &'static str| {
        move |project: &ProjectStatus| {
            project.phase == "failed"
                && project.message.contains(&format!("that of the manifest project {other}"))
        }
    };
    let failed = it.until("x/b", refused("x/a")).await;
    assert!(failed.next.is_some(), "it is tried again: {failed:?}");
    it.synced("x/c").await;
    // The same project by another name.
    shop.configure([entry("x/a"), entry("x/b"), entry("x/c"), entry("X/C")]);
    it.until("X/C", refused("x/c")).await;
    assert_eq!(it.shop.cluster.deletions(), [""; 0]);
    assert_eq!(["a", "b", "c", "d"].map(|name| shop.cluster.has(name)), [true, false, true, false]);

    // The order after a restart is another one.
    drop(it);
    shop.configure([entry("x/b")]);
    let it = run(&shop);
    let failed = it.until("x/b", |project| project.phase == "failed").await;
    assert!(failed.message.contains("that of project 7-1"), "{failed:?}");
    assert_eq!(shop.cluster.deletions(), [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn a_changed_entry_is_applied_at_once() {
    let dir = folder(&[("a.yaml", &config_map("a")), ("b.yaml", &config_map("b"))]);
    let shop = shop(&[("x/a", 1, &dir)]);
    let paths = |globs: &[&str]| {
        let paths = globs.iter().map(|glob| PathCf { glob: (*glob).to_owned() }).collect();
        [ManifestProjectCf { paths, ..entry("x/a") }]
    };
    shop.configure(paths(&["a.yaml"]));
    let it = run(&shop);
    it.synced("x/a").await;
    shop.configure(paths(&["a.yaml", "b.yaml"]));
    let begun = tokio::time::Instant::now();
    it.until("x/a", |project| project.objects.len() == 2).await;
    assert!(shop.cluster.has("b"));
    assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());

    // After a restart, what was applied is applied again later.
    drop(it);
    let it = run(&shop);
    let seen = it.synced("x/a").await;
    assert!(seen.message.contains("applied before") && seen.applied.is_some(), "{seen:?}");
}

#[tokio::test(start_paused = true)]
async fn a_dry_run_applies_no_commit() {
    let dir = folder(&[("a.yaml", &config_map("a"))]);
    let shop = shop(&[("x/a", 1, &dir)]);
    shop.configure([ManifestProjectCf { dry_run_strategy: "client".to_owned(), ..entry("x/a") }]);
    let it = run(&shop);
    let seen = it.synced("x/a").await;
    assert!(seen.applied.is_none() && seen.synced_at.is_none(), "{seen:?}");
    assert_eq!(shop.cluster.writes(), []);
    let live = it.planners.diff(agent(), "x/a", DiffOf::Live, None).await;
    assert!(matches!(&live, Err(ControlError::Wrong(why)) if why.contains("no commit")), "{live:?}");
}

#[tokio::test(start_paused = true)]
async fn a_planner_that_breaks_is_started_again_after_a_pause() {
    let dir = folder(&[("a.yaml", &config_map("a"))]);
    let shop = shop(&[("x/a", BROKEN, &dir)]);
    let it = run(&shop);
    let failed = it.until("x/a", |project| project.phase == "failed").await;
    assert!(failed.message.contains("ended by a fault") && failed.next.is_some(), "{failed:?}");
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert_eq!(shop.opened.load(Ordering::Relaxed), 1);
    tokio::time::sleep(Duration::from_secs(100)).await;
    let opened = shop.opened.load(Ordering::Relaxed);
    assert!((3..=4).contains(&opened), "{opened}");
}

#[tokio::test(start_paused = true)]
async fn a_sync_that_waits_gives_way_to_others() {
    let deployment = "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: d}\nspec: {replicas: 1}\n";
    let dir = folder(&[("d.yaml", deployment)]);
    let it = run(&shop(&[("x/a", 1, &dir)]));
    it.until("x/a", |project| project.phase == "waiting" && project.counts.objects == 1).await;
    let (work, waiting) = it.planners.context.loader.used();
    assert_eq!((work, waiting), (0, 1));
}

#[tokio::test(start_paused = true)]
async fn a_project_is_destroyed_where_its_inventory_is_and_only_if_nothing_names_it() {
    let a = folder(&[("a.yaml", &config_map("a")), ("k.yaml", &config_map("k"))]);
    let b = folder(&[("t.yaml", &template("shop")), ("b.yaml", &config_map("b"))]);
    let shop = shop(&[("x/a", 1, &a), ("X/A", 1, &a), ("x/b", 2, &b)]);
    shop.configure([entry("x/a"), entry("x/b")]);
    let it = run(&shop);
    it.synced("x/a").await;
    it.synced("x/b").await;
    // Another name of a project that is still named.
    let named = it.planners.destroy(agent(), "X/A", "default", false).await;
    assert!(matches!(&named, Err(ControlError::Wrong(why)) if why.contains("names x/a")), "{named:?}");
    assert_eq!(shop.cluster.deletions(), [""; 0]);
    {
        let state = &mut *shop.cluster.state.lock();
        state.objects.get_mut(&map("k")).unwrap()["metadata"]["annotations"] = json!({});
    }

    // After a restart nothing is planned, as nothing is named.
    drop(it);
    shop.configure([]);
    let it = run(&shop);
    let wrong = it.planners.destroy(agent(), "x/a", "other", false).await;
    assert!(
        matches!(&wrong, Err(ControlError::Wrong(why)) if why.contains("namespace other has no inventory")),
        "{wrong:?}"
    );
    shop.configuration.lock().bounds.namespaces = Some(["other".to_owned()].into());
    let outside = it.planners.destroy(agent(), "x/a", "default", false).await;
    assert!(matches!(&outside, Err(ControlError::Wrong(why)) if why.contains("kas.yaml")), "{outside:?}");
    shop.configuration.lock().bounds.namespaces = None;
    assert_eq!(shop.cluster.deletions(), [""; 0]);
    // A dry run says the same, and writes nothing.
    let before = shop.cluster.writes();
    let dry = it.planners.destroy(agent(), "x/a", "default", true).await.unwrap();
    assert_eq!(dry.message, "would delete 1 objects and the inventory; 1 would be left alone");
    assert_eq!(dry.objects[0], "delete ConfigMap default/a");
    assert!(dry.objects[1].starts_with("leave ConfigMap default/k: "), "{dry:?}");
    assert_eq!(shop.cluster.writes(), before);
    let text = it.planners.destroy(agent(), "x/a", "default", false).await.unwrap().message;
    assert!(
        text.starts_with("deleted 1 objects and the inventory; 1 were left alone: ConfigMap default/k"),
        "{text}"
    );
    assert_eq!(
        ["a", "k", "inventory-7-1", "b"].map(|name| shop.cluster.has(name)),
        [false, true, false, true]
    );

    // The inventory of a template is found by who wrote it.
    let text = it.planners.destroy(agent(), "x/b", "default", false).await.unwrap().message;
    assert_eq!(text, "deleted 1 objects and the inventory");
    assert_eq!(["b", "inventory"].map(|name| shop.cluster.has(name)), [false, false]);
}
