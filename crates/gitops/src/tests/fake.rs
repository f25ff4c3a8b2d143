//! An API server and a repository in memory, with a log of what happened to both.
//!
//! The server does what the engine relies on: versions and uids, preconditions, finalizers, definitions,
//! lists in pages, namespaces that take their objects along. It does not merge: an apply replaces the object.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
};

use async_trait::async_trait;
use bytes::Bytes;
use http::{Method, Request, Response, StatusCode};
use parking_lot::Mutex;
use serde_json::{Map, Value, json};

use crate::{
    CallError, ClusterApi, Head, Set, Stop, Unresolved,
    decode::{File, Limits, decode},
    inventory, marks,
};

/// Orders what happens at the server and in the repository.
#[derive(Clone, Default)]
pub(super) struct Clock(Arc<AtomicU64>);

impl Clock {
    fn tick(&self) -> u64 {
        self.0.fetch_add(1, Ordering::SeqCst)
    }
}

/// A call as an audit log has it.
#[derive(Debug, Clone)]
pub(super) struct Entry {
    pub(super) at: u64,
    pub(super) actor: String,
    pub(super) method: Method,
    /// Path and query.
    pub(super) target: String,
    pub(super) status: u16,
    pub(super) response: Value,
    /// Of a deletion: the object as it was.
    pub(super) deleted: Option<Value>,
}

/// A server.
pub(super) struct Server {
    pub(super) clock: Clock,
    state: Mutex<State>,
}

struct State {
    objects: BTreeMap<(String, String), Value>,
    kinds: Vec<Kind>,
    counter: u64,
    log: Vec<Entry>,
    /// Groups that do not answer.
    stale: BTreeSet<String>,
    /// Lists of metadata have no items, and go on without an end.
    endless: bool,
}

#[derive(Clone)]
struct Kind {
    group: String,
    version: String,
    plural: String,
    kind: String,
    namespaced: bool,
    /// Where its objects are stored: the root of one of its versions, or of another group.
    stored: String,
}

fn kind(group: &str, version: &str, plural: &str, kind: &str, namespaced: bool) -> Kind {
    let text = str::to_owned;
    let stored = root(group, version);
    Kind {
        group: text(group),
        version: text(version),
        plural: text(plural),
        kind: text(kind),
        namespaced,
        stored,
    }
}

fn root(group: &str, version: &str) -> String {
    match group {
        "" => format!("/api/{version}"),
        group => format!("/apis/{group}/{version}"),
    }
}

impl Kind {
    fn root(&self) -> String {
        root(&self.group, &self.version)
    }
}

impl Server {
    pub(super) fn new(clock: Clock) -> Arc<Self> {
        let kinds = vec![
            kind("", "v1", "namespaces", "Namespace", false),
            kind("", "v1", "configmaps", "ConfigMap", true),
            kind("", "v1", "secrets", "Secret", true),
            kind("", "v1", "pods", "Pod", true),
            kind("apps", "v1", "deployments", "Deployment", true),
            kind("rbac.authorization.k8s.io", "v1", "clusterroles", "ClusterRole", false),
            kind(
                "apiextensions.k8s.io",
                "v1",
                "customresourcedefinitions",
                "CustomResourceDefinition",
                false,
            ),
            kind("metrics.k8s.io", "v1", "pods", "PodMetrics", true),
            kind("networking.k8s.io", "v1", "ingresses", "Ingress", true),
            // The same objects in another group.
            Kind {
                stored: root("networking.k8s.io", "v1"),
                ..kind("extensions", "v1beta1", "ingresses", "Ingress", true)
            },
        ];
        let state = State {
            objects: BTreeMap::new(),
            kinds,
            counter: 0,
            log: Vec::new(),
            stale: BTreeSet::new(),
            endless: false,
        };
        let server = Arc::new(Self { clock, state: Mutex::new(state) });
        server
            .create("/api/v1/namespaces", json!({ "kind": "Namespace", "metadata": { "name": "default" } }));
        server
    }

    /// Creates an object as somebody else.
    pub(super) fn create(&self, collection: &str, object: Value) {
        let state = &mut *self.state.lock();
        let name = object["metadata"]["name"].as_str().unwrap().to_owned();
        state.store(collection, &name, object);
    }

    pub(super) fn get(&self, path: &str) -> Option<Value> {
        let (collection, name) = path.rsplit_once('/').unwrap();
        self.state.lock().objects.get(&(collection.to_owned(), name.to_owned())).cloned()
    }

    /// Changes an object as somebody else.
    pub(super) fn edit(&self, path: &str, change: impl FnOnce(&mut Value)) {
        let (collection, name) = path.rsplit_once('/').unwrap();
        let state = &mut *self.state.lock();
        let mut object = state.objects[&(collection.to_owned(), name.to_owned())].clone();
        change(&mut object);
        state.store(collection, name, object);
    }

    /// Removes an object as somebody else, without its finalizers.
    pub(super) fn remove(&self, path: &str) {
        let (collection, name) = path.rsplit_once('/').unwrap();
        self.state.lock().objects.remove(&(collection.to_owned(), name.to_owned()));
    }

    /// Says that a group does not answer.
    pub(super) fn set_stale(&self, group: &str, stale: bool) {
        let all = &mut self.state.lock().stale;
        if stale {
            all.insert(group.to_owned())
        } else {
            all.remove(group)
        };
    }

    /// Each list answers with no items, and with the same token for the rest.
    pub(super) fn lists_without_end(&self) {
        self.state.lock().endless = true;
    }

    pub(super) fn log(&self) -> Vec<Entry> {
        self.state.lock().log.clone()
    }

    /// The paths of all objects.
    pub(super) fn paths(&self) -> BTreeSet<String> {
        self.state.lock().objects.keys().map(|(collection, name)| format!("{collection}/{name}")).collect()
    }

    /// The keys of the inventory with this id in `default`.
    pub(super) fn inventory(&self, id: &str) -> BTreeSet<String> {
        let state = self.state.lock();
        let objects = state.objects.values();
        let mut inventories = objects.filter(|object| object["metadata"]["labels"][marks::ID_LABEL] == id);
        let found = inventories.next().map(|object| object["data"].clone()).unwrap_or_default();
        found.as_object().into_iter().flatten().map(|(key, _)| key.clone()).collect()
    }

    /// Answers a call of an actor and logs it.
    pub(super) fn answer(&self, actor: &str, request: &Request<Bytes>) -> Response<Bytes> {
        let state = &mut *self.state.lock();
        let mut deleted = None;
        let (status, response) = state.handle(request, &mut deleted);
        state.log.push(Entry {
            at: self.clock.tick(),
            actor: actor.to_owned(),
            method: request.method().clone(),
            target: request.uri().to_string(),
            status,
            response: response.clone(),
            deleted,
        });
        let mut answer = Response::new(response.to_string().into());
        *answer.status_mut() = StatusCode::from_u16(status).unwrap();
        answer
    }
}

fn error(status: u16, reason: &str) -> (u16, Value) {
    (
        status,
        json!({ "kind": "Status", "status": "Failure", "reason": reason, "message": format!("words of the server: {reason}"), "code": status }),
    )
}

impl State {
    fn next(&mut self) -> u64 {
        self.counter += 1;
        self.counter
    }

    /// Stores an object with a new version; with the same content it keeps its own.
    fn store(&mut self, collection: &str, name: &str, mut object: Value) -> Value {
        let key = (collection.to_owned(), name.to_owned());
        let old = self.objects.get(&key).cloned();
        if object["kind"] == "CustomResourceDefinition" {
            object["status"] = json!({ "conditions": [{ "type": "Established", "status": "True" }] });
        }
        let uid = match &old {
            Some(old) => old["metadata"]["uid"].clone(),
            None => json!(format!("00000000-0000-0000-0000-{:012x}", self.next())),
        };
        object["metadata"]["uid"] = uid;
        let mut generation =
            old.as_ref().map_or(1, |old| old["metadata"]["generation"].as_i64().unwrap_or(1));
        if let Some(old) = &old {
            object["metadata"]["resourceVersion"] = old["metadata"]["resourceVersion"].clone();
            object["metadata"]["generation"] = old["metadata"]["generation"].clone();
            if object == *old {
                return object;
            }
            if object["spec"] != old["spec"] {
                generation += 1;
            }
        }
        object["metadata"]["resourceVersion"] = json!(self.next().to_string());
        // Kinds without a spec have no generation.
        object["metadata"]["generation"] =
            if object["spec"].is_null() { Value::Null } else { json!(generation) };
        self.objects.insert(key, object.clone());
        if object["kind"] == "CustomResourceDefinition" {
            self.define(&object);
        }
        object
    }

    fn define(&mut self, definition: &Value) {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let spec = &definition["spec"];
        let group = text(&spec["group"]);
        let plural = text(&spec["names"]["plural"]);
        let stored = root(&group, &text(&spec["versions"][0]["name"]));
        self.kinds.retain(|kind| kind.group != group || kind.plural != plural);
        for version in spec["versions"].as_array().into_iter().flatten() {
            self.kinds.push(Kind {
                group: group.clone(),
                version: text(&version["name"]),
                plural: plural.clone(),
                kind: text(&spec["names"]["kind"]),
                namespaced: spec["scope"] == "Namespaced",
                stored: stored.clone(),
            });
        }
    }

    fn discovery(&self, core: bool) -> Value {
        let mut groups: BTreeMap<&str, Vec<&Kind>> = BTreeMap::new();
        for kind in self.kinds.iter().filter(|kind| kind.group.is_empty() == core) {
            groups.entry(&kind.group).or_default().push(kind);
        }
        let items: Vec<Value> = groups
            .into_iter()
            .map(|(group, kinds)| {
                let stale = self.stale.contains(group);
                let mut versions: BTreeMap<&str, Vec<Value>> = BTreeMap::new();
                for kind in kinds {
                    let resources = versions.entry(&kind.version).or_default();
                    if !stale {
                        resources.push(json!({
                            "resource": kind.plural,
                            "responseKind": { "group": group, "version": kind.version, "kind": kind.kind },
                            "scope": if kind.namespaced { "Namespaced" } else { "Cluster" },
                        }));
                    }
                }
                let freshness = if stale { "Stale" } else { "Current" };
                let versions: Vec<Value> = versions
                    .into_iter()
                    .map(|(version, resources)| {
                        json!({ "version": version, "resources": resources, "freshness": freshness })
                    })
                    .collect();
                json!({ "metadata": { "name": group }, "versions": versions })
            })
            .collect();
        json!({ "kind": "APIGroupDiscoveryList", "items": items })
    }

    fn handle(&mut self, request: &Request<Bytes>, deleted: &mut Option<Value>) -> (u16, Value) {
        let path = request.uri().path();
        let query: BTreeMap<String, String> = request
            .uri()
            .query()
            .unwrap_or_default()
            .split('&')
            .filter_map(|pair| pair.split_once('='))
            .map(|(key, value)| {
                (key.to_owned(), percent_encoding::percent_decode_str(value).decode_utf8_lossy().into_owned())
            })
            .collect();
        if matches!(path, "/api" | "/apis") {
            return (200, self.discovery(path == "/api"));
        }
        let path = percent_encoding::percent_decode_str(path).decode_utf8_lossy().into_owned();
        // The kind, the collection and the name.
        let found = self.kinds.iter().find_map(|kind| {
            let rest = path.strip_prefix(&kind.root())?.strip_prefix('/')?;
            let parts: Vec<&str> = rest.split('/').collect();
            let (collection_parts, name) = match (kind.namespaced, &parts[..]) {
                (true, ["namespaces", _, plural]) if *plural == kind.plural => (3, None),
                (true, ["namespaces", _, plural, name]) if *plural == kind.plural => (3, Some(*name)),
                (false, [plural]) if *plural == kind.plural => (1, None),
                (false, [plural, name]) if *plural == kind.plural => (1, Some(*name)),
                _ => return None,
            };
            let collection = format!("{}/{}", kind.stored, parts[..collection_parts].join("/"));
            let namespace = kind.namespaced.then(|| parts[1].to_owned());
            Some((kind.clone(), collection, namespace, name.map(str::to_owned)))
        });
        let Some((kind, collection, namespace, name)) = found else { return error(404, "NotFound") };
        if self.stale.contains(&kind.group) {
            return error(503, "ServiceUnavailable");
        }
        let body: Value = serde_json::from_slice(request.body()).unwrap_or(Value::Null);
        let content_type = request.headers().get("content-type").map_or("", |value| value.to_str().unwrap());
        match (request.method().as_str(), name) {
            ("GET", None) => (200, self.list(&kind, &collection, &query)),
            ("GET", Some(name)) => match self.objects.get(&(collection, name)) {
                Some(object) => (200, object.clone()),
                None => error(404, "NotFound"),
            },
            ("POST", None) => {
                let name = body["metadata"]["name"].as_str().unwrap().to_owned();
                if self.objects.contains_key(&(collection.clone(), name.clone())) {
                    return error(409, "AlreadyExists");
                }
                if !self.has_namespace(namespace.as_deref()) {
                    return error(404, "NotFound");
                }
                (201, self.store(&collection, &name, body))
            }
            ("PATCH", Some(name)) if content_type == "application/apply-patch+yaml" => {
                self.apply(&collection, &name, namespace.as_deref(), body, query.contains_key("dryRun"))
            }
            ("PATCH", Some(name)) => {
                let key = (collection.clone(), name.clone());
                let Some(old) = self.objects.get(&key) else { return error(404, "NotFound") };
                for field in ["uid", "resourceVersion"] {
                    if !body["metadata"][field].is_null() && body["metadata"][field] != old["metadata"][field]
                    {
                        return error(409, "Conflict");
                    }
                }
                let mut new = old.clone();
                merge(&mut new, &body);
                (200, self.store(&collection, &name, new))
            }
            ("DELETE", Some(name)) => {
                let key = (collection.clone(), name.clone());
                let Some(old) = self.objects.get(&key).cloned() else { return error(404, "NotFound") };
                for (field, wanted) in body["preconditions"].as_object().into_iter().flatten() {
                    if old["metadata"][field] != *wanted {
                        return error(409, "Conflict");
                    }
                }
                *deleted = Some(old.clone());
                if old["metadata"]["finalizers"].as_array().is_some_and(|finalizers| !finalizers.is_empty()) {
                    let mut old = old;
                    old["metadata"]["deletionTimestamp"] = json!("2020-01-01T00:00:00Z");
                    return (200, self.store(&collection, &name, old));
                }
                self.objects.remove(&key);
                if kind.kind == "Namespace" {
                    let inside = format!("/namespaces/{name}/");
                    self.objects.retain(|(collection, _), _| !format!("{collection}/").contains(&inside));
                }
                if kind.kind == "CustomResourceDefinition" {
                    let plural = old["spec"]["names"]["plural"].as_str().unwrap_or_default().to_owned();
                    self.kinds.retain(|kind| kind.plural != plural);
                    self.objects.retain(|(collection, _), _| !collection.ends_with(&format!("/{plural}")));
                }
                (200, json!({ "kind": "Status", "status": "Success" }))
            }
            _ => error(405, "MethodNotAllowed"),
        }
    }

    fn has_namespace(&self, namespace: Option<&str>) -> bool {
        namespace
            .is_none_or(|name| self.objects.contains_key(&("/api/v1/namespaces".to_owned(), name.to_owned())))
    }

    fn apply(
        &mut self,
        collection: &str,
        name: &str,
        namespace: Option<&str>,
        mut body: Value,
        dry: bool,
    ) -> (u16, Value) {
        if !self.has_namespace(namespace) {
            return error(404, "NotFound");
        }
        // Stands for an admission webhook.
        if body["metadata"]["annotations"]["refuse"] == "true" {
            return error(422, "Invalid");
        }
        let old = self.objects.get(&(collection.to_owned(), name.to_owned())).cloned();
        if let Some(old) = &old
            && !old["status"].is_null()
        {
            body["status"] = old["status"].clone();
        }
        for field in ["finalizers", "ownerReferences", "deletionTimestamp"] {
            if let Some(old) = &old
                && !old["metadata"][field].is_null()
            {
                body["metadata"][field] = old["metadata"][field].clone();
            }
        }
        if dry {
            let mut object = old.clone().unwrap_or_else(|| json!({ "metadata": {} }));
            let metadata = object["metadata"].clone();
            object = body;
            for field in ["uid", "resourceVersion", "generation"] {
                object["metadata"][field] = metadata[field].clone();
            }
            return (200, object);
        }
        (if old.is_some() { 200 } else { 201 }, self.store(collection, name, body))
    }

    fn list(&self, kind: &Kind, collection: &str, query: &BTreeMap<String, String>) -> Value {
        let limit = query.get("limit").map_or(usize::MAX, |limit| limit.parse().unwrap());
        let after = query.get("continue").cloned().unwrap_or_default();
        let selector = query.get("labelSelector").and_then(|selector| selector.split_once('='));
        let mut items: Vec<Value> = self
            .objects
            .iter()
            .filter(|((at, name), object)| {
                at == collection
                    && *name > after
                    && selector.is_none_or(|(label, value)| object["metadata"]["labels"][label] == value)
            })
            .map(|(_, object)| object.clone())
            .collect();
        if self.endless && limit != usize::MAX && selector.is_none() {
            return json!({ "kind": format!("{}List", kind.kind), "metadata": { "continue": "on" }, "items": [] });
        }
        let more = items.len() > limit;
        items.truncate(limit);
        let next = more.then(|| items.last().map(|item| item["metadata"]["name"].clone())).flatten();
        json!({ "kind": format!("{}List", kind.kind), "metadata": { "continue": next.unwrap_or(json!("")) }, "items": items })
    }
}

/// A JSON merge patch.
fn merge(target: &mut Value, patch: &Value) {
    let Value::Object(patch) = patch else { return };
    if !target.is_object() {
        *target = Value::Object(Map::new());
    }
    for (key, value) in patch {
        match value {
            Value::Null => {
                target.as_object_mut().unwrap().shift_remove(key);
            }
            Value::Object(_) => merge(&mut target[key.as_str()], value),
            value => target[key.as_str()] = value.clone(),
        }
    }
}

/// What happens to a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    /// It is carried out, and its caller dies before it learns that.
    Die,
    /// It is carried out, and the connection is lost.
    Reset,
    /// It does not arrive.
    NotSent,
    /// It is answered with this status and not carried out.
    Status(u16),
}

/// The way of an actor to the server.
pub(super) struct Wire {
    server: Arc<Server>,
    actor: String,
    calls: AtomicUsize,
    /// The number of the call, from 0, and what happens to it.
    fault: Option<(usize, Fault)>,
    /// Makes the order of the calls of several actors a random one.
    jitter: bool,
    pub(super) dead: tokio::sync::Notify,
}

impl Wire {
    pub(super) fn new(server: &Arc<Server>, actor: &str) -> Self {
        Self {
            server: server.clone(),
            actor: actor.to_owned(),
            calls: AtomicUsize::new(0),
            fault: None,
            jitter: false,
            dead: tokio::sync::Notify::new(),
        }
    }

    pub(super) fn with_fault(self, at: usize, fault: Fault) -> Arc<Self> {
        Arc::new(Self { fault: Some((at, fault)), ..self })
    }

    pub(super) fn with_jitter(self) -> Arc<Self> {
        Arc::new(Self { jitter: true, ..self })
    }

    pub(super) fn calls(&self) -> usize {
        self.calls.load(Ordering::SeqCst)
    }

    /// Makes a call by hand, for planners that are wrong on purpose.
    pub(super) fn by_hand(&self, method: Method, target: &str, body: Value) -> (u16, Value) {
        let body = if body.is_null() { Bytes::new() } else { body.to_string().into() };
        let request = Request::builder()
            .method(method)
            .uri(target)
            .header("content-type", "application/merge-patch+json")
            .body(body)
            .unwrap();
        let answer = self.server.answer(&self.actor, &request);
        (answer.status().as_u16(), serde_json::from_slice(answer.body()).unwrap())
    }
}

#[async_trait]
impl ClusterApi for Wire {
    async fn call(&self, request: Request<Bytes>) -> Result<Response<Bytes>, CallError> {
        if self.jitter {
            tokio::time::sleep(std::time::Duration::from_millis(rand::random_range(0..50))).await;
        }
        let number = self.calls.fetch_add(1, Ordering::SeqCst);
        match self.fault.filter(|(at, _)| *at == number).map(|(_, fault)| fault) {
            Some(Fault::Die) => {
                self.server.answer(&self.actor, &request);
                self.dead.notify_one();
                std::future::pending().await
            }
            Some(Fault::Reset) => {
                self.server.answer(&self.actor, &request);
                Err(CallError::Unknown("connection reset".to_owned()))
            }
            Some(Fault::NotSent) => Err(CallError::NotSent("no agent".to_owned())),
            Some(Fault::Status(status)) => {
                let (status, body) = error(status, "Injected");
                let mut answer = Response::new(body.to_string().into());
                *answer.status_mut() = StatusCode::from_u16(status).unwrap();
                Ok(answer)
            }
            None => Ok(self.server.answer(&self.actor, &request)),
        }
    }
}

/// A repository: its heads, and when each became that.
pub(super) struct Repository {
    clock: Clock,
    state: Mutex<Vec<(u64, String, String)>>,
    pub(super) stop: Mutex<Option<Stop>>,
    pub(super) broken: Mutex<bool>,
}

impl Repository {
    pub(super) fn new(clock: Clock) -> Self {
        Self { clock, state: Mutex::default(), stop: Mutex::default(), broken: Mutex::default() }
    }

    /// Makes a commit with one file the head.
    pub(super) fn push(&self, commit: &str, content: &str) {
        self.state.lock().push((self.clock.tick(), commit.to_owned(), content.to_owned()));
    }

    /// The present head, decoded.
    pub(super) fn set(&self) -> Set {
        let (_, commit, content) = self.state.lock().last().unwrap().clone();
        let file = File { path: "m.yaml".into(), content: content.into_bytes().into() };
        decode(&commit, &[file], &Limits::default()).unwrap_or_else(|flaws| panic!("{flaws}"))
    }

    /// When each head began, and the keys of its set: objects without a namespace are in `default`.
    pub(super) fn heads(&self) -> Vec<(u64, BTreeSet<String>)> {
        let state = self.state.lock();
        let keys = |content: &str| {
            let file = File { path: "m.yaml".into(), content: content.to_owned().into_bytes().into() };
            let set = decode("c", &[file], &Limits::default()).unwrap();
            let keys = set.objects().iter().filter_map(|object| {
                let id = &object.id;
                let of_cluster =
                    matches!(&*id.kind, "Namespace" | "ClusterRole" | "CustomResourceDefinition");
                let namespace =
                    if of_cluster || !id.namespace.is_empty() { &*id.namespace } else { "default" };
                inventory::key(&crate::ObjectId { namespace: namespace.into(), ..id.clone() })
            });
            keys.collect()
        };
        state.iter().map(|(at, _, content)| (*at, keys(content))).collect()
    }
}

#[async_trait]
impl Head for Repository {
    async fn resolve(&self) -> Result<Option<Arc<str>>, Unresolved> {
        if *self.broken.lock() {
            return Err(Unresolved("broken".to_owned()));
        }
        Ok(self.state.lock().last().map(|(_, commit, _)| commit.as_str().into()))
    }

    fn stop(&self) -> Option<Stop> {
        *self.stop.lock()
    }
}
