//! A played API server, and a hub that reads it.

use std::{
    collections::{BTreeMap, HashMap},
    net::IpAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use bytes::Bytes;
use cluster::{AgentMeta, Connection, Connections as _, InMemoryTracker, Lease, Replica};
use grpc::{Code, Status};
use identity::{Agent, Authenticated, Identity, IdentityError};
use ids::{AgentId, ConnectionId, ReplicaId};
use parking_lot::Mutex;
use process::lifecycle::Lifecycle;
use prometheus_client::registry::Registry;
use proto::kas::api::v1::{ViewAgent, ViewRow, ViewSynced, WatchViewRequest, watch_view_response::Event};
use serde_json::{Value, json};
use tokio::{sync::watch, time::Instant};
use views::{Definitions, Resource};

use super::super::{
    Buffers, Hub, HubParts, HubSettings, Question, Selected, Subscription, ViewMetrics,
    rights::{May, Rights},
    source::{Answer, Source, Sources, User, Watched},
};
use crate::agent_files::{AgentFile, Files};

const MINUTE: Duration = Duration::from_secs(60);

pub(super) fn agent(number: i64) -> AgentId {
    AgentId::new(number).unwrap()
}

/// What the API server has.
#[derive(Default)]
struct Objects {
    pods: BTreeMap<(String, String), Value>,
    events: Vec<(u64, Value)>,
    version: u64,
    /// Events up to this version are forgotten.
    compacted: u64,
}

/// A played API server: pods, printed as tables.
pub(super) struct World {
    objects: Mutex<Objects>,
    changed: watch::Sender<u64>,
    /// Grows when all watches break.
    cut: watch::Sender<u64>,
    pub(super) lists: AtomicUsize,
    pub(super) watches: AtomicUsize,
    pub(super) open: Arc<AtomicUsize>,
    /// The most objects that fit on a page.
    pub(super) fits: AtomicUsize,
    /// Whether agentk can cancel requests.
    pub(super) cancels: AtomicBool,
    /// How long a page of a list takes, in seconds.
    pub(super) slow: AtomicUsize,
    /// Lists that are being read.
    pub(super) listing: AtomicUsize,
    pub(super) most_listing: AtomicUsize,
    /// Whether a list always has one more page.
    pub(super) endless: AtomicBool,
    /// Whether watches end at once, or their version is always too old.
    pub(super) ends: AtomicBool,
    pub(super) forgets: AtomicBool,
    /// Whether nothing is answered: a request that begins meanwhile ends after 20 s, as at the end of a
    /// tunnel, and watches that are open are silent for good.
    pub(super) hangs: AtomicBool,
    /// Whether watches get bookmarks, one a minute.
    pub(super) bookmarks: AtomicBool,
    /// Bytes without the end of a line with which each watch begins.
    pub(super) junk: AtomicUsize,
    /// The status of lists, if it is not 200.
    pub(super) refuses: AtomicUsize,
    /// Whether tables are printed.
    pub(super) prints: AtomicBool,
    /// The reviews that were asked for: verb, resource and namespace.
    pub(super) reviews: Mutex<Vec<String>>,
    /// The reviews that are answered with no.
    pub(super) denied: Mutex<Vec<String>>,
    /// Whether reviews are not answered.
    pub(super) silent: AtomicBool,
}

impl World {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self {
            objects: Mutex::default(),
            changed: watch::Sender::new(0),
            cut: watch::Sender::new(0),
            lists: AtomicUsize::new(0),
            watches: AtomicUsize::new(0),
            open: Arc::default(),
            fits: AtomicUsize::new(usize::MAX),
            cancels: AtomicBool::new(true),
            slow: AtomicUsize::new(0),
            listing: AtomicUsize::new(0),
            most_listing: AtomicUsize::new(0),
            endless: AtomicBool::new(false),
            ends: AtomicBool::new(false),
            forgets: AtomicBool::new(false),
            hangs: AtomicBool::new(false),
            bookmarks: AtomicBool::new(true),
            junk: AtomicUsize::new(0),
            refuses: AtomicUsize::new(0),
            prints: AtomicBool::new(true),
            reviews: Mutex::default(),
            denied: Mutex::default(),
            silent: AtomicBool::new(false),
        })
    }

    /// Creates or changes a pod.
    pub(super) fn put(&self, namespace: &str, name: &str, status: &str, restarts: u64) {
        let mut objects = self.objects.lock();
        objects.version += 1;
        let version = objects.version;
        let key = (namespace.to_owned(), name.to_owned());
        let kind = if objects.pods.contains_key(&key) { "MODIFIED" } else { "ADDED" };
        let row = json!({
            "cells": [name, "1/1", status, restarts, "5m", "10.0.0.1"],
            "object": {"metadata": {
                "namespace": namespace, "name": name, "uid": format!("uid-{name}"),
                "resourceVersion": version.to_string(), "creationTimestamp": "2024-05-01T00:00:00Z",
                "labels": {"app": name.split('-').next()},
            }},
        });
        objects.pods.insert(key, row.clone());
        objects.events.push((version, json!({"type": kind, "row": row})));
        drop(objects);
        self.changed.send_replace(version);
    }

    pub(super) fn delete(&self, namespace: &str, name: &str) {
        let mut objects = self.objects.lock();
        let Some(mut row) = objects.pods.remove(&(namespace.to_owned(), name.to_owned())) else { return };
        objects.version += 1;
        let version = objects.version;
        row["object"]["metadata"]["resourceVersion"] = version.to_string().into();
        objects.events.push((version, json!({"type": "DELETED", "row": row})));
        drop(objects);
        self.changed.send_replace(version);
    }

    /// Forgets all events, and breaks all watches.
    pub(super) fn compact(&self) {
        let mut objects = self.objects.lock();
        objects.compacted = objects.version;
        objects.events.clear();
        drop(objects);
        self.cut();
    }

    /// A request begins. It fails late if nothing is answered.
    async fn begins(&self) -> Result<(), Status> {
        if self.hangs.load(Ordering::SeqCst) {
            tokio::time::sleep(Duration::from_secs(20)).await;
            return Err(Status::new(Code::Unavailable, "no answer within 20s"));
        }
        Ok(())
    }

    /// Breaks all watches.
    pub(super) fn cut(&self) {
        self.cut.send_modify(|cut| *cut += 1);
    }

    /// Returns the status of each pod.
    pub(super) fn truth(&self) -> BTreeMap<(String, String), String> {
        let objects = self.objects.lock();
        let status = |row: &Value| row["cells"][2].as_str().unwrap_or_default().to_owned();
        objects.pods.iter().map(|(key, row)| (key.clone(), status(row))).collect()
    }
}

fn columns() -> Value {
    let column = |name: &str, priority: i64| json!({"name": name, "type": "string", "format": if name == "Name" {"name"} else {""}, "priority": priority});
    json!([
        column("Name", 0),
        column("Ready", 0),
        column("Status", 0),
        column("Restarts", 0),
        column("Age", 0),
        column("IP", 1),
    ])
}

/// Returns the value of a parameter.
fn parameter<'a>(target: &'a str, key: &str) -> Option<&'a str> {
    let query = target.split_once('?')?.1;
    query.split('&').find_map(|pair| pair.strip_prefix(key)?.strip_prefix('='))
}

fn namespace_of(target: &str) -> Option<&str> {
    target.split_once("/namespaces/")?.1.split('/').next()
}

#[async_trait]
impl Source for Arc<World> {
    async fn get(&self, target: &str, accept: &str) -> Result<Answer, Status> {
        self.lists.fetch_add(1, Ordering::SeqCst);
        self.begins().await?;
        let listing = self.listing.fetch_add(1, Ordering::SeqCst) + 1;
        self.most_listing.fetch_max(listing, Ordering::SeqCst);
        let slow = u64::try_from(self.slow.load(Ordering::SeqCst)).unwrap();
        tokio::time::sleep(Duration::from_secs(slow)).await;
        self.listing.fetch_sub(1, Ordering::SeqCst);
        let refuses = self.refuses.load(Ordering::SeqCst);
        if refuses != 0 {
            let body = json!({"kind": "Status", "message": "played"}).to_string().into();
            return Ok(Answer::new(i32::try_from(refuses).unwrap(), body));
        }
        let limit: usize = parameter(target, "limit").unwrap().parse().unwrap();
        if limit > self.fits.load(Ordering::SeqCst) {
            return Err(Status::new(Code::ResourceExhausted, "too large"));
        }
        let is_table = accept.contains("as=Table");
        if is_table && !self.prints.load(Ordering::SeqCst) {
            return Ok(Answer::new(406, Bytes::new()));
        }
        let after: usize = parameter(target, "continue").map_or(0, |token| token.parse().unwrap());
        let objects = self.objects.lock();
        let in_namespace = |(namespace, _): &&(String, String)| {
            namespace_of(target).is_none_or(|wanted| wanted == namespace)
        };
        let all: Vec<&Value> =
            objects.pods.keys().filter(in_namespace).filter_map(|key| objects.pods.get(key)).collect();
        let rows: Vec<&Value> = all.iter().skip(after).take(limit).copied().collect();
        let end = after + rows.len();
        let is_endless = self.endless.load(Ordering::SeqCst);
        let next = if end < all.len() || is_endless { end.to_string() } else { String::new() };
        let metadata = json!({
            "resourceVersion": objects.version.to_string(), "continue": next, "remainingItemCount": all.len() - end,
        });
        let body = if is_table {
            json!({"kind": "Table", "metadata": metadata, "columnDefinitions": columns(), "rows": rows})
        } else {
            let items: Vec<&Value> = rows.iter().map(|row| &row["object"]).collect();
            json!({"kind": "PartialObjectMetadataList", "metadata": metadata, "items": items})
        };
        Ok(Answer::new(200, body.to_string().into()))
    }

    async fn post(&self, _: &str, object: Bytes) -> Result<Answer, Status> {
        if self.silent.load(Ordering::SeqCst) {
            return Err(Status::new(Code::Unavailable, "nobody answers"));
        }
        let review: Value = serde_json::from_slice(&object).unwrap();
        let asked = &review["spec"]["resourceAttributes"];
        let asked =
            format!("{} {} {}", asked["verb"], asked["resource"], asked["namespace"]).replace('"', "");
        let is_allowed = !self.denied.lock().contains(&asked);
        self.reviews.lock().push(asked);
        let body = json!({"kind": "SelfSubjectAccessReview", "status": {"allowed": is_allowed}});
        Ok(Answer::new(201, body.to_string().into()))
    }

    async fn watch(&self, target: &str, for_old: &str, accept: &str) -> Result<Box<dyn Watched>, Status> {
        let target = if self.cancels.load(Ordering::SeqCst) { target } else { for_old };
        self.watches.fetch_add(1, Ordering::SeqCst);
        self.begins().await?;
        self.open.fetch_add(1, Ordering::SeqCst);
        let from: u64 = parameter(target, "resourceVersion").unwrap().parse().unwrap();
        let is_old = from < self.objects.lock().compacted || self.forgets.load(Ordering::SeqCst);
        let (mut changed, mut cut) = (self.changed.subscribe(), self.cut.subscribe());
        changed.mark_changed();
        cut.mark_unchanged();
        let seconds = parameter(target, "timeoutSeconds").unwrap().parse().unwrap();
        Ok(Box::new(Watch {
            end: Instant::now() + Duration::from_secs(seconds),
            bookmark: Instant::now() + MINUTE,
            world: Arc::clone(self),
            junk: self.junk.load(Ordering::SeqCst),
            namespace: namespace_of(target).map(str::to_owned),
            from,
            is_table: accept.contains("as=Table"),
            has_columns: false,
            status: if is_old { 410 } else { 200 },
            changed,
            cut,
        }))
    }
}

struct Watch {
    end: Instant,
    /// When the next bookmark comes.
    bookmark: Instant,
    world: Arc<World>,
    junk: usize,
    namespace: Option<String>,
    from: u64,
    is_table: bool,
    has_columns: bool,
    status: i32,
    changed: watch::Receiver<u64>,
    cut: watch::Receiver<u64>,
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.world.open.fetch_sub(1, Ordering::SeqCst);
    }
}

#[async_trait]
impl Watched for Watch {
    fn status(&self) -> i32 {
        self.status
    }

    fn is_cancellable(&self) -> bool {
        self.world.cancels.load(Ordering::SeqCst)
    }

    async fn data(&mut self) -> Result<Option<Bytes>, Status> {
        loop {
            if self.status != 200 || self.world.ends.load(Ordering::SeqCst) {
                return Ok(None);
            }
            if self.junk > 0 {
                let part = self.junk.min(64 << 10);
                self.junk -= part;
                return Ok(Some(vec![b'x'; part].into()));
            }
            let has_bookmarks = self.world.bookmarks.load(Ordering::SeqCst);
            let is_bookmark = tokio::select! {
                biased;
                () = tokio::time::sleep_until(self.end) => return Ok(None),
                _ = self.cut.changed() => return Err(Status::new(Code::Unavailable, "cut")),
                _ = self.changed.changed() => false,
                () = tokio::time::sleep_until(self.bookmark), if has_bookmarks => true,
            };
            if self.world.hangs.load(Ordering::SeqCst) {
                std::future::pending::<()>().await;
            }
            if is_bookmark {
                self.bookmark += MINUTE;
                let metadata = json!({"resourceVersion": self.from.to_string()});
                let object = match self.is_table {
                    true => json!({"kind": "Table", "rows": [{"object": {"metadata": metadata}}]}),
                    false => json!({"metadata": metadata}),
                };
                return Ok(Some(format!("{}\n", json!({"type": "BOOKMARK", "object": object})).into()));
            }
            let mut lines = String::new();
            for (version, event) in &self.world.objects.lock().events {
                let namespace = event["row"]["object"]["metadata"]["namespace"].as_str();
                if *version <= self.from
                    || self.namespace.as_deref().is_some_and(|wanted| Some(wanted) != namespace)
                {
                    continue;
                }
                self.from = *version;
                let object = if !self.is_table {
                    event["row"]["object"].clone()
                } else if std::mem::replace(&mut self.has_columns, true) {
                    json!({"kind": "Table", "rows": [event["row"]]})
                } else {
                    json!({"kind": "Table", "columnDefinitions": columns(), "rows": [event["row"]]})
                };
                lines += &json!({"type": event["type"], "object": object}).to_string();
                lines.push('\n');
            }
            if !lines.is_empty() {
                return Ok(Some(lines.into()));
            }
        }
    }
}

/// The API servers of agents by their numbers.
pub(super) struct Worlds(pub(super) BTreeMap<i64, Arc<World>>);

impl Sources for Worlds {
    fn open(&self, agent: AgentId, _: Option<User>) -> Arc<dyn Source> {
        Arc::new(Arc::clone(&self.0[&agent.get()]))
    }
}

/// Files of agents: `env` is `prod` of agent 1, not known of agent 3, and `test` of the others. Agent 4 is
/// limited to the namespace `shop`.
struct Labels;

#[async_trait]
impl Files for Labels {
    async fn of(&self, agents: &[AgentId]) -> HashMap<AgentId, Result<Arc<AgentFile>, Arc<str>>> {
        let file = |agent: &AgentId| match agent.get() {
            3 => Err("its kas.yaml is not known".into()),
            number => {
                let env = if number == 1 { "prod" } else { "test" };
                let labels = BTreeMap::from([("env".to_owned(), env.to_owned())]);
                let namespaces = (number == 4).then(|| "shop".to_owned()).into_iter().collect();
                Ok(Arc::new(AgentFile { labels, namespaces, ..AgentFile::default() }))
            }
        };
        agents.iter().map(|agent| (*agent, file(agent))).collect()
    }
}

struct Known(Mutex<BTreeMap<i64, Arc<Agent>>>, watch::Sender<u64>);

#[async_trait]
impl Identity for Known {
    async fn authenticate(&self, _: &[u8], _: Option<IpAddr>) -> Result<Authenticated, IdentityError> {
        Err(IdentityError::Unknown)
    }

    fn changes(&self) -> watch::Receiver<u64> {
        self.1.subscribe()
    }

    async fn still_valid(&self, _: &Authenticated) -> bool {
        true
    }

    fn agent(&self, agent: AgentId) -> Option<Arc<Agent>> {
        self.0.lock().get(&agent.get()).cloned()
    }

    fn agents(&self) -> Vec<Arc<Agent>> {
        self.0.lock().values().cloned().collect()
    }
}

/// Rights that a test can change.
#[derive(Default)]
pub(super) struct Played {
    /// Namespaces that the caller may see; an empty text: all of them.
    pub(super) namespaces: Mutex<Vec<String>>,
    /// Whether nobody answers.
    pub(super) silent: AtomicBool,
}

impl Played {
    pub(super) fn new(namespaces: &[&str]) -> Arc<Self> {
        let namespaces = namespaces.iter().map(|name| (*name).to_owned()).collect();
        Arc::new(Self { namespaces: Mutex::new(namespaces), silent: AtomicBool::new(false) })
    }
}

#[async_trait]
impl Rights for Played {
    async fn reach(&self, agents: Vec<Selected>) -> Result<Vec<Selected>, Status> {
        Ok(agents)
    }

    async fn may(&self, _: AgentId, _: &Resource, namespace: Option<&str>) -> Result<(May, Instant), Status> {
        if self.silent.load(Ordering::SeqCst) {
            return Err(Status::new(Code::Unavailable, "nobody answers"));
        }
        let is_allowed =
            self.namespaces.lock().iter().any(|allowed| allowed.is_empty() || Some(&**allowed) == namespace);
        let may = match is_allowed {
            true => May::Yes,
            false => May::No(format!("list pods in {}", namespace.unwrap_or("all"))),
        };
        Ok((may, Instant::now()))
    }

    fn can_change(&self) -> bool {
        true
    }
}

/// A hub, and what it reads.
pub(super) struct Lab {
    pub(super) hub: Arc<Hub>,
    pub(super) worlds: BTreeMap<i64, Arc<World>>,
    pub(super) lifecycle: Lifecycle,
    tracker: InMemoryTracker,
    leases: Mutex<BTreeMap<i64, Lease>>,
    known: Arc<Known>,
}

impl Lab {
    /// A hub with agents 1 to `agents`, which are connected.
    pub(super) fn new(agents: i64) -> Self {
        Self::with(agents, 256 << 20)
    }

    pub(super) fn with(agents: i64, memory: usize) -> Self {
        let worlds: BTreeMap<i64, Arc<World>> = (1..=agents).map(|number| (number, World::new())).collect();
        let replica = Replica { id: ReplicaId::new("me"), address: "127.0.0.1:1".into() };
        let tracker = InMemoryTracker::new(replica.clone());
        let known = Arc::new(Known(Mutex::default(), watch::Sender::new(0)));
        let lifecycle = Lifecycle::default();
        let metrics = Arc::new(ViewMetrics::new(&mut Registry::default()));
        let hub = Hub::new(HubParts {
            buffers: Buffers::new(memory, &metrics),
            settings: HubSettings {
                memory,
                linger: Duration::from_secs(300),
                rights: Duration::from_secs(60),
            },
            definitions: Definitions::default(),
            sources: Arc::new(Worlds(worlds.clone())),
            tracker: Arc::new(tracker.clone()),
            identity: Arc::clone(&known) as _,
            files: Arc::new(Labels),
            me: replica.id,
            metrics,
            phase: lifecycle.watch(),
        });
        let lab = Self { hub, worlds, lifecycle, tracker, leases: Mutex::default(), known };
        for number in 1..=agents {
            lab.connect(number);
        }
        lab
    }

    pub(super) fn connect(&self, number: i64) {
        let of = Agent { id: agent(number), name: format!("agent-{number}").into(), project_id: 1 };
        self.known.0.lock().insert(number, Arc::new(of));
        let lease = self.tracker.connection(Connection {
            agent: agent(number),
            name: format!("agent-{number}").into(),
            project_id: 1,
            id: ConnectionId::new(number).unwrap(),
            meta: AgentMeta::default(),
            connected_at: Duration::ZERO,
        });
        self.leases.lock().insert(number, lease);
    }

    /// There is no such agent any more.
    pub(super) fn forget(&self, number: i64) {
        self.known.0.lock().remove(&number);
        self.disconnect(number);
    }

    pub(super) fn disconnect(&self, number: i64) {
        self.leases.lock().remove(&number);
    }

    pub(super) fn world(&self) -> &World {
        &self.worlds[&1]
    }

    /// Asks for pods as a caller that sees everything.
    pub(super) fn ask(&self, change: impl FnOnce(&mut WatchViewRequest)) -> Client {
        self.ask_as(Arc::new(super::super::ApiCaller), change)
    }

    pub(super) fn ask_as(
        &self,
        rights: Arc<dyn Rights>,
        change: impl FnOnce(&mut WatchViewRequest),
    ) -> Client {
        self.try_ask(rights, change).unwrap()
    }

    pub(super) fn try_ask(
        &self,
        rights: Arc<dyn Rights>,
        change: impl FnOnce(&mut WatchViewRequest),
    ) -> Result<Client, Status> {
        let mut request = WatchViewRequest {
            agents: "all".to_owned(),
            view: "pods".to_owned(),
            ..WatchViewRequest::default()
        };
        change(&mut request);
        let question = Question::read(request, self.hub.definitions(), "jane")?;
        let subscription = Subscription::begin(&self.hub, question, "jane", rights, false)?;
        Ok(Client {
            subscription,
            columns: Vec::new(),
            rows: BTreeMap::new(),
            agents: BTreeMap::new(),
            resets: 0,
            received: 0,
            removed: 0,
        })
    }
}

/// A caller, and what it has.
pub(super) struct Client {
    pub(super) subscription: Subscription,
    pub(super) columns: Vec<String>,
    /// The cells, by agent, namespace and name.
    pub(super) rows: BTreeMap<(i64, String, String), Vec<String>>,
    pub(super) agents: BTreeMap<i64, ViewAgent>,
    pub(super) resets: usize,
    /// Rows that were received, and those that were removed.
    pub(super) received: usize,
    pub(super) removed: usize,
}

impl Client {
    fn take(&mut self, event: Event) -> Option<ViewSynced> {
        match event {
            Event::Columns(columns) => {
                self.columns = columns.columns.into_iter().map(|column| column.name).collect();
            }
            Event::Upserted(rows) => {
                for ViewRow { agent_id, namespace, name, cells, .. } in rows.rows {
                    self.received += 1;
                    self.rows.insert((agent_id, namespace, name), cells);
                }
            }
            Event::Removed(keys) => {
                for key in keys.keys {
                    self.removed += 1;
                    self.rows.remove(&(key.agent_id, key.namespace, key.name));
                }
            }
            Event::Reset(_) => {
                self.resets += 1;
                self.rows.clear();
            }
            Event::Agent(agent) => {
                self.agents.insert(agent.id, agent);
            }
            Event::Synced(synced) => return Some(synced),
        }
        None
    }

    /// Reads until everything was sent.
    pub(super) async fn synced(&mut self) -> Result<ViewSynced, Status> {
        loop {
            let next = tokio::time::timeout(Duration::from_secs(3_600), self.subscription.next()).await;
            let answer = next.expect("nothing comes").expect("the answer has ended")?;
            if let Some(synced) = answer.event.and_then(|event| self.take(event)) {
                return Ok(synced);
            }
        }
    }

    /// Reads until a condition holds.
    pub(super) async fn until(&mut self, what: &str, holds: impl Fn(&Self) -> bool) {
        while !holds(self) {
            let next = tokio::time::timeout(Duration::from_secs(3_600), self.subscription.next()).await;
            let event =
                next.unwrap_or_else(|_| panic!("{what}: nothing comes")).expect("the answer has ended");
            if let Some(event) = event.unwrap().event {
                self.take(event);
            }
        }
    }

    /// Returns the status of each pod of agent 1.
    pub(super) fn pods(&self) -> BTreeMap<(String, String), String> {
        let pods = self.rows.iter().filter(|((agent, ..), _)| *agent == 1);
        pods.map(|((_, namespace, name), cells)| {
            ((namespace.clone(), name.clone()), cells.get(1).cloned().unwrap_or_default())
        })
        .collect()
    }
}
