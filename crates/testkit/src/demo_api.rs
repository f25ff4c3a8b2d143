//! A demo, **not a cluster**: an HTTP server with about a dozen simulated pods, to try kas and agentk without
//! Kubernetes.
//!
//! It implements the read part of the Kubernetes API: discovery, namespaces, pods and their logs, selectors,
//! pages, watches, tables and metadata-only responses. Every 2 s a visitor pod is added, changed or deleted.
//! Nothing can be written, no client is authenticated, nothing runs. The `Server` header, the version and the
//! page at `/` identify it as a demo. Tests use [`kubernetes`](crate::kubernetes), which is the real API
//! server.

mod answer;
mod dates;
mod query;
mod selector;
mod shape;
mod watch;
mod world;

use std::{
    collections::{BTreeMap, VecDeque},
    convert::Infallible,
    io,
    net::SocketAddr,
    sync::Arc,
    time::Duration,
};

use base64::{Engine as _, prelude::BASE64_URL_SAFE_NO_PAD};
use bytes::Bytes;
use futures_util::stream;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, header};
use http_body::Frame;
use http_body_util::{BodyExt as _, StreamBody};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use parking_lot::{Mutex, MutexGuard};
use serde_json::{Value, json};
use tokio::{
    net::TcpListener,
    task::{JoinHandle, JoinSet},
    time::{Instant, MissedTickBehavior, interval},
};

pub(crate) use self::query::decoded_pairs;
use self::{
    answer::{Body, Problem, object, respond, text},
    query::{Query, is_true, number, parse_query},
    selector::Filter,
    shape::{Kind, Shape},
    watch::Watch,
    world::{PODS, World, made_up_namespace, made_up_pod},
};

/// The interval of changes to visitor pods. Slow enough to follow by eye, fast enough to wait for.
const TICK: Duration = Duration::from_secs(2);

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
    version: Arc<tokio::sync::watch::Sender<u64>>,
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
        let version = tokio::sync::watch::Sender::new(world.version);
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

fn key(object: &Value) -> (String, String) {
    let part = |name: &str| object["metadata"][name].as_str().unwrap_or_default().to_owned();
    (part("namespace"), part("name"))
}

fn page_key(token: &str) -> Option<(String, String)> {
    let text = String::from_utf8(BASE64_URL_SAFE_NO_PAD.decode(token).ok()?).ok()?;
    let (namespace, name) = text.split_once('/')?;
    Some((namespace.to_owned(), name.to_owned()))
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

#[cfg(test)]
mod tests {
    use super::*;

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
