//! A demo, **not a cluster**: an HTTP server with about a dozen simulated pods, to try kas and agentk without
//! Kubernetes.
//!
//! It implements the read part of the Kubernetes API: discovery, namespaces, pods and their logs, selectors,
//! pages, watches, tables and metadata-only responses. Every 2 s a visitor pod is added, changed or deleted.
//! Nothing can be written, no client is authenticated, nothing runs. The `Server` header, the version and the
//! page at `/` identify it as a demo. Tests use [`kubernetes`](crate::kubernetes), which is the real API
//! server.

use std::{
    collections::{BTreeMap, VecDeque},
    convert::Infallible,
    fmt::Write as _,
    io,
    net::SocketAddr,
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use base64::{Engine as _, prelude::BASE64_URL_SAFE_NO_PAD};
use bytes::Bytes;
use futures_util::stream;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, header};
use http_body::Frame;
use http_body_util::{BodyExt as _, Full, StreamBody, combinators::UnsyncBoxBody};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use parking_lot::{Mutex, MutexGuard};
use serde_json::{Value, json};
use tokio::{
    net::TcpListener,
    sync::watch,
    task::{JoinHandle, JoinSet},
    time::{Instant, MissedTickBehavior, interval, sleep_until},
};

/// The interval of changes to visitor pods. Slow enough to follow by eye, fast enough to wait for.
const TICK: Duration = Duration::from_secs(2);

/// How many past events a watch can begin at. Older ones are answered with 410, as by a cluster.
const REMEMBERED: usize = 256;

/// The header that identifies every response.
const SERVER: HeaderValue = HeaderValue::from_static("kas-demo-api (not a cluster)");

/// The page at `/`.
const PAGE: &str = "\
This is kas-demo-api: a demo, not a cluster.

The pods here are made up, nothing runs, and nothing can be written. It exists so that a request through kas and
agentk has something to read when no Kubernetes is at hand.

  /version
  /api/v1/namespaces
  /api/v1/pods?labelSelector=tier%3Dbackend&limit=5
  /api/v1/pods?watch=true                            one event every 2 seconds
  /api/v1/namespaces/default/pods/web-1
  /api/v1/namespaces/default/pods/web-1/log?follow=true
";

/// Namespace, name, `app`, `tier`, image and a line for its log.
const PODS: [(&str, &str, &str, &str, &str, &str); 12] = [
    ("default", "web-1", "web", "frontend", "demo.invalid/web:1.4", "hello from web-1"),
    ("default", "web-2", "web", "frontend", "demo.invalid/web:1.4", "hello from web-2"),
    ("garden", "bees-1", "bees", "backend", "demo.invalid/bees:7", "buzzing"),
    ("garden", "sprinkler-1", "sprinkler", "backend", "demo.invalid/sprinkler:2.0", "the lawn is watered"),
    (
        "garden",
        "sunshine-1",
        "sunshine",
        "frontend",
        "demo.invalid/sunshine:1.0",
        "24 degrees, a light breeze",
    ),
    (
        "library",
        "catalog-1",
        "catalog",
        "backend",
        "demo.invalid/catalog:3.1",
        "1204 books are on the shelves",
    ),
    (
        "library",
        "catalog-2",
        "catalog",
        "backend",
        "demo.invalid/catalog:3.1",
        "1204 books are on the shelves",
    ),
    ("library", "reading-room-1", "reading-room", "frontend", "demo.invalid/reading-room:2", "quiet, please"),
    ("shop", "cart-1", "cart", "backend", "demo.invalid/cart:5.2", "a teapot was put into a cart"),
    ("shop", "orders-db-0", "orders-db", "data", "demo.invalid/orders-db:16", "checkpoint complete"),
    ("shop", "storefront-1", "storefront", "frontend", "demo.invalid/storefront:8.0", "the doors are open"),
    ("shop", "storefront-2", "storefront", "frontend", "demo.invalid/storefront:8.0", "the doors are open"),
];

/// The namespace of visitor pods.
const VISITED: &str = "default";

type Body = UnsyncBoxBody<Bytes, Infallible>;
type Query = BTreeMap<String, String>;

/// A running demonstration; dropping it ends its connections.
#[derive(Debug)]
pub struct DemoApi {
    address: SocketAddr,
    server: JoinHandle<()>,
}

impl DemoApi {
    /// Listens on `address`, which should be a loopback address, because every client may read. Port 0 is any
    /// free one.
    ///
    /// # Errors
    /// When the address cannot be listened on.
    pub async fn start(address: SocketAddr) -> io::Result<Self> {
        let listener = TcpListener::bind(address).await?;
        let address = listener.local_addr()?;
        let server = tokio::spawn(serve(listener, Demo::new()));
        Ok(Self { address, server })
    }

    /// Returns the address in use.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns what a kubeconfig names as `server`.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }
}

impl Drop for DemoApi {
    fn drop(&mut self) {
        self.server.abort();
    }
}

async fn serve(listener: TcpListener, demo: Demo) {
    let mut connections = JoinSet::new();
    let mut ticks = interval(TICK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks.reset();
    loop {
        tokio::select! {
            _ = ticks.tick() => demo.turn(),
            Some(_) = connections.join_next() => {}
            accepted = listener.accept() => {
                let Ok((stream, _)) = accepted else {
                    // Probably out of sockets, until some are closed.
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    continue;
                };
                let _ = stream.set_nodelay(true);
                let demo = demo.clone();
                let service = service_fn(move |request| {
                    let answer = demo.answer(&request);
                    async { Ok::<_, Infallible>(answer) }
                });
                let connection =
                    http1::Builder::new().timer(TokioTimer::new()).serve_connection(TokioIo::new(stream), service);
                connections.spawn(async {
                    // The client handles the end of a connection.
                    let _ = connection.await;
                });
            }
        }
    }
}

/// The objects and their watchers.
#[derive(Clone)]
struct Demo {
    world: Arc<Mutex<World>>,
    version: Arc<watch::Sender<u64>>,
}

struct World {
    version: u64,
    /// By namespace and name.
    pods: BTreeMap<(String, String), Value>,
    namespaces: BTreeMap<String, Value>,
    events: VecDeque<Event>,
    turns: u64,
}

#[derive(Clone)]
struct Event {
    version: u64,
    kind: &'static str,
    pod: Value,
}

impl Demo {
    fn new() -> Self {
        let mut world = World {
            version: 100,
            pods: BTreeMap::new(),
            namespaces: BTreeMap::new(),
            events: VecDeque::new(),
            turns: 0,
        };
        for (namespace, ..) in PODS {
            if !world.namespaces.contains_key(namespace) {
                let version = world.next();
                world.namespaces.insert(namespace.to_owned(), made_up_namespace(namespace, version));
            }
        }
        for (index, (namespace, name, app, tier, image, _)) in PODS.into_iter().enumerate() {
            let version = world.next();
            let pod = made_up_pod(namespace, name, (app, tier, image), index, "Running", version);
            world.pods.insert((namespace.to_owned(), name.to_owned()), pod);
        }
        let version = watch::Sender::new(world.version);
        Self { world: Arc::new(Mutex::new(world)), version: Arc::new(version) }
    }

    fn world(&self) -> MutexGuard<'_, World> {
        self.world.lock()
    }

    fn turn(&self) {
        let version = self.world().turn();
        self.version.send_replace(version);
    }

    fn answer(&self, request: &Request<Incoming>) -> Response<Body> {
        let mut response = self.route(request).unwrap_or_else(|problem| problem.response());
        response.headers_mut().insert(header::SERVER, SERVER);
        response.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache, private"));
        response
    }

    fn route(&self, request: &Request<Incoming>) -> Result<Response<Body>, Problem> {
        if request.method() != Method::GET && request.method() != Method::HEAD {
            let text = "this is a demo, not a cluster: it can only be read";
            return Err(Problem::new(StatusCode::METHOD_NOT_ALLOWED, "MethodNotAllowed", text));
        }
        let query = parse_query(request.uri().query().unwrap_or_default())?;
        let path = request.uri().path();
        let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
        match parts[..] {
            [] => Ok(text(PAGE.to_owned())),
            ["healthz" | "livez" | "readyz"] => Ok(text("ok".to_owned())),
            ["version"] => Ok(object(&json!({
                "major": "0",
                "minor": "0",
                "gitVersion": "v0.0.0-demo",
                "gitCommit": "a demo, not a cluster",
                "gitTreeState": "clean",
                "platform": "demo",
            }))),
            ["api"] => Ok(object(&json!({
                "kind": "APIVersions",
                "versions": ["v1"],
                "serverAddressByClientCIDRs": [],
            }))),
            ["apis"] => Ok(object(&json!({ "kind": "APIGroupList", "apiVersion": "v1", "groups": [] }))),
            ["api", "v1"] => Ok(object(&resources())),
            ["api", "v1", "namespaces"] => self.list(Kind::Namespace, None, &query, request.headers()),
            ["api", "v1", "pods"] => self.list(Kind::Pod, None, &query, request.headers()),
            ["api", "v1", "namespaces", name] => {
                let found = self.world().namespaces.get(name).cloned();
                let found = found.ok_or_else(|| Problem::no_such("namespaces", name))?;
                Ok(Shape::of(request.headers())?.one(Kind::Namespace, &found))
            }
            ["api", "v1", "namespaces", namespace, "pods"] => {
                self.list(Kind::Pod, Some(namespace), &query, request.headers())
            }
            ["api", "v1", "namespaces", namespace, "pods", name] => {
                Ok(Shape::of(request.headers())?.one(Kind::Pod, &self.pod(namespace, name)?))
            }
            ["api", "v1", "namespaces", namespace, "pods", name, "log"] => {
                self.pod(namespace, name)?;
                Ok(log(namespace, name, is_true(&query, "follow")))
            }
            _ => Err(Problem::new(
                StatusCode::NOT_FOUND,
                "NotFound",
                "the server could not find the requested resource (this is a demo, not a cluster)",
            )),
        }
    }

    fn pod(&self, namespace: &str, name: &str) -> Result<Value, Problem> {
        let found = self.world().pods.get(&(namespace.to_owned(), name.to_owned())).cloned();
        found.ok_or_else(|| Problem::no_such("pods", name))
    }

    fn list(
        &self,
        kind: Kind,
        namespace: Option<&str>,
        query: &Query,
        headers: &HeaderMap,
    ) -> Result<Response<Body>, Problem> {
        let shape = Shape::of(headers)?;
        let filter = Filter::new(kind, namespace, query)?;
        if is_true(query, "watch") {
            return self.watch(shape, filter, query);
        }
        let limit = number(query, "limit")?.filter(|limit| *limit > 0);
        let after = match query.get("continue").filter(|token| !token.is_empty()) {
            None => None,
            Some(token) => Some(
                page_key(token)
                    .ok_or_else(|| Problem::bad("the continue parameter is not one of this server"))?,
            ),
        };

        let world = self.world();
        let found: Vec<&Value> = world
            .objects(kind)
            .filter(|object| filter.takes(object))
            .filter(|object| after.as_ref().is_none_or(|after| key(object) > *after))
            .collect();
        let page = &found[..limit.map_or(found.len(), |limit| found.len().min(limit as usize))];
        let mut metadata = json!({ "resourceVersion": world.version.to_string() });
        if let Some(last) = page.last()
            && page.len() < found.len()
        {
            let (namespace, name) = key(last);
            metadata["continue"] = BASE64_URL_SAFE_NO_PAD.encode(format!("{namespace}/{name}")).into();
            if filter.is_everything() {
                metadata["remainingItemCount"] = (found.len() - page.len()).into();
            }
        }
        Ok(shape.list(kind, metadata, page))
    }

    fn watch(&self, shape: Shape, filter: Filter, query: &Query) -> Result<Response<Body>, Problem> {
        if query.contains_key("sendInitialEvents") {
            let text = "sendInitialEvents is forbidden: this is a demo, not a cluster";
            return Err(Problem::new(StatusCode::UNPROCESSABLE_ENTITY, "Invalid", text));
        }
        let since = number(query, "resourceVersion")?.filter(|version| *version > 0);
        let deadline = number(query, "timeoutSeconds")?
            .filter(|seconds| *seconds > 0)
            .and_then(|seconds| Instant::now().checked_add(Duration::from_secs(seconds)));
        let changes = self.version.subscribe();
        let mut watch = Watch {
            demo: self.clone(),
            changes,
            shape,
            filter,
            seen: 0,
            lines: VecDeque::new(),
            columns: true,
            over: false,
        };
        {
            let world = self.world();
            watch.seen = since.unwrap_or(world.version);
            if since.is_none() {
                for pod in world.objects(watch.filter.kind).filter(|object| watch.filter.takes(object)) {
                    watch.lines.push_back(watch.shape.event(
                        "ADDED",
                        watch.filter.kind,
                        pod,
                        &mut watch.columns,
                    ));
                }
            }
        }
        let lines = stream::unfold(watch, move |mut watch| async move {
            let line = watch.next(deadline).await?;
            Some((Ok::<_, Infallible>(Frame::data(Bytes::from(line))), watch))
        });
        Ok(respond(StatusCode::OK, "application/json", StreamBody::new(lines).boxed_unsync()))
    }
}

impl World {
    fn next(&mut self) -> u64 {
        self.version += 1;
        self.version
    }

    fn objects(&self, kind: Kind) -> Box<dyn Iterator<Item = &Value> + '_> {
        match kind {
            Kind::Pod => Box::new(self.pods.values()),
            Kind::Namespace => Box::new(self.namespaces.values()),
        }
    }

    /// Makes the next change: a visitor pod is added, starts, ends and is deleted, then the next one is
    /// added.
    fn turn(&mut self) -> u64 {
        let (visitor, step) = (self.turns / 4 + 1, self.turns % 4);
        self.turns += 1;
        let version = self.next();
        let key = (VISITED.to_owned(), format!("visitor-{visitor}"));
        let kind = match step {
            0 => "ADDED",
            3 => "DELETED",
            _ => "MODIFIED",
        };
        let pod = if step == 0 {
            let about = ("visitor", "frontend", "demo.invalid/visitor:1.0");
            made_up_pod(VISITED, &key.1, about, PODS.len() + visitor as usize, "Pending", version)
        } else {
            let mut pod = self.pods.remove(&key).unwrap_or_default();
            pod["metadata"]["resourceVersion"] = version.to_string().into();
            if step < 3 {
                let phase = if step == 1 { "Running" } else { "Succeeded" };
                pod["status"] = made_up_status(&pod, phase);
            }
            pod
        };
        if step < 3 {
            self.pods.insert(key, pod.clone());
        }
        if self.events.len() == REMEMBERED {
            self.events.pop_front();
        }
        self.events.push_back(Event { version, kind, pod });
        version
    }
}

/// A watch, line by line.
struct Watch {
    demo: Demo,
    changes: watch::Receiver<u64>,
    shape: Shape,
    filter: Filter,
    /// Events up to this version have been sent.
    seen: u64,
    lines: VecDeque<String>,
    /// The next table has to name its columns.
    columns: bool,
    over: bool,
}

impl Watch {
    async fn next(&mut self, deadline: Option<Instant>) -> Option<String> {
        loop {
            if let Some(line) = self.lines.pop_front() {
                return Some(line);
            }
            if self.over {
                return None;
            }
            // Marked before the check: a later change wakes the wait below.
            self.changes.mark_unchanged();
            self.collect();
            if !self.lines.is_empty() {
                continue;
            }
            let end = async {
                match deadline {
                    Some(deadline) => sleep_until(deadline).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                changed = self.changes.changed() => changed.ok()?,
                () = end => return None,
            }
        }
    }

    fn collect(&mut self) {
        let demo = self.demo.clone();
        let world = demo.world();
        if self.filter.kind == Kind::Namespace {
            self.seen = world.version;
            return;
        }
        // Of versions that no event has, such as those of the first pods, nothing was forgotten.
        let forgotten = world.turns > REMEMBERED as u64;
        if forgotten && world.events.front().is_some_and(|first| self.seen + 1 < first.version) {
            let problem = Problem::new(
                StatusCode::GONE,
                "Expired",
                "too old resource version: this demo remembers its last 256 events",
            );
            self.lines.push_back(format!("{}\n", json!({ "type": "ERROR", "object": problem.status() })));
            self.over = true;
            return;
        }
        for event in world.events.iter().filter(|event| event.version > self.seen) {
            if self.filter.takes(&event.pod) {
                self.lines.push_back(self.shape.event(event.kind, Kind::Pod, &event.pod, &mut self.columns));
            }
        }
        self.seen = self.seen.max(world.version);
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Pod,
    Namespace,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::Pod => "Pod",
            Self::Namespace => "Namespace",
        }
    }

    fn columns(self) -> Value {
        let column = |name: &str, format: &str| json!({ "name": name, "type": "string", "format": format, "description": "", "priority": 0 });
        match self {
            Self::Pod => json!([
                column("Name", "name"),
                column("Ready", ""),
                column("Status", ""),
                column("Restarts", ""),
                column("Age", "")
            ]),
            Self::Namespace => json!([column("Name", "name"), column("Status", ""), column("Age", "")]),
        }
    }

    fn row(self, object: &Value) -> Value {
        let name = &object["metadata"]["name"];
        let age = age(object);
        let cells = match self {
            Self::Namespace => json!([name, "Active", age]),
            Self::Pod => {
                let status = &object["status"];
                let ready = status["containerStatuses"][0]["ready"] == true;
                let phase = match status["phase"].as_str() {
                    Some("Succeeded") => "Completed",
                    Some(phase) => phase,
                    None => "Unknown",
                };
                json!([name, if ready { "1/1" } else { "0/1" }, phase, "0", age])
            }
        };
        json!({ "cells": cells, "object": metadata_only(object) })
    }
}

/// The representation of objects in a response.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Shape {
    Whole,
    Metadata,
    Table,
}

impl Shape {
    /// Picks the first that the client accepts and this server supports.
    fn of(headers: &HeaderMap) -> Result<Self, Problem> {
        let accept: Vec<&str> =
            headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok()).collect();
        if accept.is_empty() {
            return Ok(Self::Whole);
        }
        for range in accept.iter().flat_map(|value| value.split(',')) {
            let mut parts = range.split(';').map(str::trim);
            if !matches!(parts.next(), Some("application/json" | "application/*" | "*/*")) {
                continue;
            }
            let parameters: BTreeMap<&str, &str> = parts.filter_map(|part| part.split_once('=')).collect();
            let of_meta = parameters.get("g").is_none_or(|group| *group == "meta.k8s.io")
                && parameters.get("v").is_none_or(|version| *version == "v1");
            match parameters.get("as") {
                None => return Ok(Self::Whole),
                Some(&"Table") if of_meta => return Ok(Self::Table),
                Some(&("PartialObjectMetadata" | "PartialObjectMetadataList")) if of_meta => {
                    return Ok(Self::Metadata);
                }
                // Something newer; what stands after it may be known.
                Some(_) => {}
            }
        }
        let text = "only application/json is served here, whole, as Table or as PartialObjectMetadata";
        Err(Problem::new(StatusCode::NOT_ACCEPTABLE, "NotAcceptable", text))
    }

    fn list(self, kind: Kind, metadata: Value, items: &[&Value]) -> Response<Body> {
        object(&match self {
            Self::Whole => json!({
                "kind": format!("{}List", kind.name()),
                "apiVersion": "v1",
                "metadata": metadata,
                "items": items,
            }),
            Self::Metadata => json!({
                "kind": "PartialObjectMetadataList",
                "apiVersion": "meta.k8s.io/v1",
                "metadata": metadata,
                "items": items.iter().map(|item| metadata_only(item)).collect::<Vec<_>>(),
            }),
            Self::Table => table(kind, &metadata, items, true),
        })
    }

    fn one(self, kind: Kind, item: &Value) -> Response<Body> {
        object(&self.show(kind, item, &mut true))
    }

    fn show(self, kind: Kind, item: &Value, columns: &mut bool) -> Value {
        match self {
            Self::Whole => {
                let mut whole = json!({ "kind": kind.name(), "apiVersion": "v1" });
                if let (Some(whole), Some(item)) = (whole.as_object_mut(), item.as_object()) {
                    whole.extend(item.clone());
                }
                whole
            }
            Self::Metadata => metadata_only(item),
            Self::Table => {
                let metadata = json!({ "resourceVersion": item["metadata"]["resourceVersion"] });
                table(kind, &metadata, &[item], std::mem::take(columns))
            }
        }
    }

    /// Writes a line of a watch.
    fn event(self, event: &str, kind: Kind, item: &Value, columns: &mut bool) -> String {
        format!("{}\n", json!({ "type": event, "object": self.show(kind, item, columns) }))
    }
}

fn metadata_only(object: &Value) -> Value {
    json!({
        "kind": "PartialObjectMetadata",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": object["metadata"],
    })
}

fn table(kind: Kind, metadata: &Value, items: &[&Value], columns: bool) -> Value {
    json!({
        "kind": "Table",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": metadata,
        "columnDefinitions": if columns { kind.columns() } else { Value::Null },
        "rows": items.iter().map(|item| kind.row(item)).collect::<Vec<_>>(),
    })
}

fn key(object: &Value) -> (String, String) {
    let part = |name: &str| object["metadata"][name].as_str().unwrap_or_default().to_owned();
    (part("namespace"), part("name"))
}

fn page_key(token: &str) -> Option<(String, String)> {
    let text = String::from_utf8(BASE64_URL_SAFE_NO_PAD.decode(token).ok()?).ok()?;
    let (namespace, name) = text.split_once('/')?;
    Some((namespace.to_owned(), name.to_owned()))
}

/// Which objects a list or a watch shows.
struct Filter {
    kind: Kind,
    namespace: Option<String>,
    labels: Selector,
    fields: Selector,
}

impl Filter {
    fn new(kind: Kind, namespace: Option<&str>, query: &Query) -> Result<Self, Problem> {
        let selector = |name: &str| {
            let text = query.get(name).map_or("", String::as_str);
            Selector::parse(text)
                .map_err(|error| Problem::bad(&format!("unable to parse {name} {text:?}: {error}")))
        };
        let fields = selector("fieldSelector")?;
        for requirement in &fields.0 {
            if !FIELDS.iter().any(|(name, _)| *name == requirement.key) {
                return Err(Problem::bad(&format!("field label not supported: {}", requirement.key)));
            }
        }
        Ok(Self { kind, namespace: namespace.map(str::to_owned), labels: selector("labelSelector")?, fields })
    }

    fn is_everything(&self) -> bool {
        self.labels.0.is_empty() && self.fields.0.is_empty()
    }

    fn takes(&self, object: &Value) -> bool {
        let metadata = &object["metadata"];
        self.namespace.as_ref().is_none_or(|namespace| metadata["namespace"] == *namespace.as_str())
            && self.labels.takes(|key| metadata["labels"][key].as_str())
            && self.fields.takes(|key| {
                FIELDS
                    .iter()
                    .find(|(name, _)| *name == key)
                    .and_then(|(_, path)| object.pointer(path)?.as_str())
            })
    }
}

/// Fields that a `fieldSelector` may name, and where they are.
const FIELDS: [(&str, &str); 4] = [
    ("metadata.name", "/metadata/name"),
    ("metadata.namespace", "/metadata/namespace"),
    ("spec.nodeName", "/spec/nodeName"),
    ("status.phase", "/status/phase"),
];

/// Requirements that all have to hold.
#[derive(Debug, PartialEq, Eq)]
struct Selector(Vec<Requirement>);

#[derive(Debug, PartialEq, Eq)]
struct Requirement {
    key: String,
    test: Test,
}

#[derive(Debug, PartialEq, Eq)]
enum Test {
    In(Vec<String>),
    /// Also holds where there is no value.
    NotIn(Vec<String>),
    Exists,
    Missing,
}

impl Selector {
    fn parse(text: &str) -> Result<Self, &'static str> {
        let mut requirements = Vec::new();
        let mut rest = text.trim();
        while !rest.is_empty() {
            // Commas within parentheses separate values.
            let mut depth = 0usize;
            let end = rest.find(|c| {
                match c {
                    '(' => depth += 1,
                    ')' => depth = depth.saturating_sub(1),
                    _ => {}
                }
                c == ',' && depth == 0
            });
            let (part, next) = match end {
                Some(at) if rest[at + 1..].trim().is_empty() => return Err("it ends with a comma"),
                Some(at) => (&rest[..at], &rest[at + 1..]),
                None => (rest, ""),
            };
            requirements.push(Requirement::parse(part.trim())?);
            rest = next.trim();
        }
        Ok(Self(requirements))
    }

    fn takes<'a>(&self, value: impl Fn(&str) -> Option<&'a str>) -> bool {
        self.0.iter().all(|requirement| {
            let value = value(&requirement.key);
            let is_any = |values: &[String]| value.is_some_and(|value| values.iter().any(|one| one == value));
            match &requirement.test {
                Test::In(values) => is_any(values),
                Test::NotIn(values) => !is_any(values),
                Test::Exists => value.is_some(),
                Test::Missing => value.is_none(),
            }
        })
    }
}

impl Requirement {
    fn parse(text: &str) -> Result<Self, &'static str> {
        let one = |value: &str| vec![value.trim().to_owned()];
        let (key, test) = if let Some((words, values)) = text.split_once('(') {
            let values = values.strip_suffix(')').ok_or("a parenthesis is not closed")?;
            let values = values.split(',').map(|value| value.trim().to_owned()).collect();
            match words.split_whitespace().collect::<Vec<_>>()[..] {
                [key, "in"] => (key, Test::In(values)),
                [key, "notin"] => (key, Test::NotIn(values)),
                _ => return Err("expected a key and in or notin before the parenthesis"),
            }
        } else if let Some((key, value)) = text.split_once("!=") {
            (key, Test::NotIn(one(value)))
        } else if let Some((key, value)) = text.split_once("==").or_else(|| text.split_once('=')) {
            (key, Test::In(one(value)))
        } else if let Some(key) = text.strip_prefix('!') {
            (key, Test::Missing)
        } else {
            (text, Test::Exists)
        };
        let key = key.trim();
        let is_key = |c: char| c.is_ascii_alphanumeric() || "-_./".contains(c);
        if key.is_empty() || !key.chars().all(is_key) {
            return Err("a key has letters, digits and -_./");
        }
        Ok(Self { key: key.to_owned(), test })
    }
}

/// Why there is no answer.
#[derive(Debug)]
struct Problem {
    code: StatusCode,
    reason: &'static str,
    message: String,
}

impl Problem {
    fn new(code: StatusCode, reason: &'static str, message: &str) -> Self {
        Self { code, reason, message: message.to_owned() }
    }

    fn bad(message: &str) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "BadRequest", message)
    }

    fn no_such(resource: &str, name: &str) -> Self {
        Self::new(StatusCode::NOT_FOUND, "NotFound", &format!("{resource} {name:?} not found"))
    }

    fn status(&self) -> Value {
        json!({
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
            "code": self.code.as_u16(),
        })
    }

    fn response(&self) -> Response<Body> {
        let mut response = object(&self.status());
        *response.status_mut() = self.code;
        response
    }
}

fn respond(status: StatusCode, content_type: &'static str, body: Body) -> Response<Body> {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}

fn object(value: &Value) -> Response<Body> {
    let body = Full::new(Bytes::from(format!("{value}\n"))).boxed_unsync();
    respond(StatusCode::OK, "application/json", body)
}

fn text(text: String) -> Response<Body> {
    respond(StatusCode::OK, "text/plain; charset=utf-8", Full::new(Bytes::from(text)).boxed_unsync())
}

fn log(namespace: &str, name: &str, follow: bool) -> Response<Body> {
    let line = PODS
        .iter()
        .find(|pod| (pod.0, pod.1) == (namespace, name))
        .map_or("just visiting", |(.., line)| *line);
    let first = format!("this pod is made up: it is part of a demo, not of a cluster\n{line}\n");
    if !follow {
        return text(first);
    }
    let lines = stream::unfold(Some(first), move |first| async move {
        let next = match first {
            Some(first) => first,
            None => {
                tokio::time::sleep(TICK).await;
                format!("{line}\n")
            }
        };
        Some((Ok::<_, Infallible>(Frame::data(Bytes::from(next))), None))
    });
    respond(StatusCode::OK, "text/plain; charset=utf-8", StreamBody::new(lines).boxed_unsync())
}

fn is_true(query: &Query, name: &str) -> bool {
    query.get(name).is_some_and(|value| matches!(value.as_str(), "true" | "1" | ""))
}

fn number(query: &Query, name: &str) -> Result<Option<u64>, Problem> {
    match query.get(name).map(String::as_str) {
        None | Some("") => Ok(None),
        Some(text) => {
            text.parse().map(Some).map_err(|_| Problem::bad(&format!("{name} is not a number: {text:?}")))
        }
    }
}

/// Reads a query; of a repeated key the first value counts, as it does for a cluster.
fn parse_query(query: &str) -> Result<Query, Problem> {
    let mut read = Query::new();
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        let decode = |text| {
            percent_decoded(text).ok_or_else(|| Problem::bad("the query is not percent-encoded UTF-8"))
        };
        let (key, value) = (decode(key)?, decode(value)?);
        read.entry(key).or_insert(value);
    }
    Ok(read)
}

fn percent_decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        bytes.push(match byte {
            b'+' => b' ',
            b'%' => {
                let digit = |byte: u8| char::from(byte).to_digit(16);
                let (high, low) = (digit(rest.next()?)?, digit(rest.next()?)?);
                u8::try_from(high * 16 + low).ok()?
            }
            byte => byte,
        });
    }
    String::from_utf8(bytes).ok()
}

fn resources() -> Value {
    let resource = |name: &str, singular: &str, kind: &str, namespaced: bool, short: Value, verbs: Value| {
        json!({
            "name": name,
            "singularName": singular,
            "namespaced": namespaced,
            "kind": kind,
            "verbs": verbs,
            "shortNames": short,
        })
    };
    json!({
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": "v1",
        "resources": [
            resource("namespaces", "namespace", "Namespace", false, json!(["ns"]), json!(["get", "list", "watch"])),
            resource("pods", "pod", "Pod", true, json!(["po"]), json!(["get", "list", "watch"])),
            resource("pods/log", "", "Pod", true, json!([]), json!(["get"])),
        ],
    })
}

fn made_up_namespace(name: &str, version: u64) -> Value {
    json!({
        "metadata": {
            "name": name,
            "uid": uid(version),
            "resourceVersion": version.to_string(),
            "creationTimestamp": rfc3339(now()),
            "labels": { "kubernetes.io/metadata.name": name, "demo": "not-a-cluster" },
        },
        "status": { "phase": "Active" },
    })
}

/// `about`: its `app`, `tier` and image. `index` makes its address.
fn made_up_pod(
    namespace: &str,
    name: &str,
    about: (&str, &str, &str),
    index: usize,
    phase: &str,
    version: u64,
) -> Value {
    let (app, tier, image) = about;
    let mut pod = json!({
        "metadata": {
            "name": name,
            "namespace": namespace,
            "uid": uid(version),
            "resourceVersion": version.to_string(),
            "creationTimestamp": rfc3339(now()),
            "labels": { "app": app, "tier": tier, "demo": "not-a-cluster" },
        },
        "spec": {
            "nodeName": format!("made-up-node-{}", index % 3 + 1),
            "containers": [{ "name": app, "image": image }],
            "restartPolicy": "Always",
        },
    });
    // An address of the range that RFC 5737 sets apart for examples.
    pod["status"] = json!({ "podIP": format!("192.0.2.{}", index % 250 + 1) });
    pod["status"] = made_up_status(&pod, phase);
    pod
}

fn made_up_status(pod: &Value, phase: &str) -> Value {
    let started = &pod["metadata"]["creationTimestamp"];
    let running = phase == "Running";
    let state = match phase {
        "Running" => json!({ "running": { "startedAt": started } }),
        "Succeeded" => {
            json!({ "terminated": { "exitCode": 0, "reason": "Completed", "startedAt": started } })
        }
        _ => json!({ "waiting": { "reason": "ContainerCreating" } }),
    };
    let container = &pod["spec"]["containers"][0];
    json!({
        "phase": phase,
        "podIP": pod["status"]["podIP"],
        "startTime": started,
        "conditions": [{ "type": "Ready", "status": if running { "True" } else { "False" } }],
        "containerStatuses": [{
            "name": container["name"],
            "image": container["image"],
            "ready": running,
            "started": running,
            "restartCount": 0,
            "state": state,
        }],
    })
}

fn uid(version: u64) -> String {
    format!("00000000-0000-4000-8000-{version:012}")
}

/// Seconds since 1970.
#[allow(clippy::disallowed_methods)] // a stamp that leaves the process; nothing is decided by it
fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

fn age(object: &Value) -> String {
    let since = object["metadata"]["creationTimestamp"].as_str().and_then(seconds_of).unwrap_or_default();
    let seconds = now().saturating_sub(since);
    match seconds {
        0..120 => format!("{seconds}s"),
        120..7200 => format!("{}m", seconds / 60),
        _ => format!("{}h", seconds / 3600),
    }
}

/// Howard Hinnant's `civil_from_days`, for days after 1970.
fn rfc3339(seconds: u64) -> String {
    let (days, second) = (seconds / 86_400 + 719_468, seconds % 86_400);
    let era = days / 146_097;
    let day_of_era = days % 146_097;
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    let mut text = String::new();
    let _ = write!(
        text,
        "{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}Z",
        second / 3600,
        second / 60 % 60,
        second % 60
    );
    text
}

/// Reads what [`rfc3339`] writes.
fn seconds_of(text: &str) -> Option<u64> {
    let part = |range: std::ops::Range<usize>| text.get(range)?.parse::<u64>().ok();
    let (year, month, day) = (part(0..4)?, part(5..7)?, part(8..10)?);
    let year = if month <= 2 { year.checked_sub(1)? } else { year };
    let shifted = if month > 2 { month.checked_sub(3)? } else { month + 9 };
    let day_of_year = (153 * shifted + 2) / 5 + day.checked_sub(1)?;
    let days = year / 400 * 146_097 + year % 400 * 365 + year % 400 / 4 - year % 400 / 100 + day_of_year;
    Some(days.checked_sub(719_468)? * 86_400 + part(11..13)? * 3600 + part(14..16)? * 60 + part(17..19)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn selectors_are_read_as_kubernetes_reads_them() {
        let labels: BTreeMap<&str, &str> = [("app", "web"), ("tier", "front"), ("empty", "")].into();
        let takes = |text: &str| Selector::parse(text).unwrap().takes(|key| labels.get(key).copied());
        for (text, expected) in [
            ("", true),
            ("app=web", true),
            ("app==web", true),
            ("app = web , tier=front", true),
            ("app=db", false),
            ("app!=db", true),
            ("missing!=db", true),
            ("app!=web", false),
            ("app in (web, db)", true),
            ("app in(db)", false),
            ("app notin (web,db),tier", false),
            ("missing notin (a),tier=front", true),
            ("app", true),
            ("missing", false),
            ("!missing", true),
            ("!app", false),
            ("empty=", true),
            ("app=", false),
        ] {
            assert_eq!(takes(text), expected, "{text}");
        }
        for text in ["app in (web", "=x", "app,", ",app", "a b", "app like (x)", "(x)", "!"] {
            assert!(Selector::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn dates_round_trip() {
        assert_eq!(rfc3339(0), "1970-01-01T00:00:00Z");
        assert_eq!(rfc3339(951_782_399), "2000-02-28T23:59:59Z");
        assert_eq!(rfc3339(1_709_210_096), "2024-02-29T12:34:56Z");
        for seconds in (0..4_000_000_000).step_by(7_654_321) {
            assert_eq!(seconds_of(&rfc3339(seconds)), Some(seconds));
        }
    }

    #[test]
    fn the_first_supported_media_type_is_served() {
        let shape = |accept: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::ACCEPT, HeaderValue::from_str(accept).unwrap());
            Shape::of(&headers).map_err(|problem| problem.code.as_u16())
        };
        assert_eq!(Shape::of(&HeaderMap::new()).unwrap(), Shape::Whole);
        assert_eq!(shape("*/*"), Ok(Shape::Whole));
        assert_eq!(shape("application/vnd.kubernetes.protobuf,application/json"), Ok(Shape::Whole));
        let metadata = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json";
        assert_eq!(shape(metadata), Ok(Shape::Metadata));
        assert_eq!(shape("application/json;as=Table;v=v1;g=meta.k8s.io,application/json"), Ok(Shape::Table));
        assert_eq!(shape("application/json;as=Table;v=v9;g=meta.k8s.io,application/json"), Ok(Shape::Whole));
        assert_eq!(shape("application/vnd.kubernetes.protobuf"), Err(406));
    }

    #[test]
    fn queries_are_decoded() {
        let query = parse_query("labelSelector=a+in%20%28b%2Cc%29&watch&limit=5&limit=6").unwrap();
        assert_eq!(query["labelSelector"], "a in (b,c)");
        assert!(is_true(&query, "watch"));
        assert_eq!(number(&query, "limit").unwrap(), Some(5));
        for bad in ["a=%", "a=%f", "a=%zz", "a=%ff"] {
            assert!(parse_query(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn pods_are_added_and_removed_with_growing_versions() {
        let demo = Demo::new();
        let before = demo.world().pods.len();
        let versions: Vec<u64> = (0..8).map(|_| demo.world().turn()).collect();
        assert!(versions.is_sorted_by(|a, b| a < b));
        let world = demo.world();
        let seen: Vec<_> = world
            .events
            .iter()
            .map(|event| {
                (event.kind, event.pod["metadata"]["name"].as_str(), event.pod["status"]["phase"].as_str())
            })
            .collect();
        let phases = [
            ("ADDED", "Pending"),
            ("MODIFIED", "Running"),
            ("MODIFIED", "Succeeded"),
            ("DELETED", "Succeeded"),
        ];
        let expected: Vec<_> = ["visitor-1", "visitor-2"]
            .into_iter()
            .flat_map(|name| phases.map(|(kind, phase)| (kind, Some(name), Some(phase))))
            .collect();
        assert_eq!(seen, expected);
        assert_eq!(world.pods.len(), before);
    }
}
