//! Reads the Kubernetes events of an agent: a list, then a watch from there on, again and again. The API
//! server keeps its events for an hour, so whoever becomes the home of the agent finds what the home before
//! has not told.

use std::{collections::HashMap, fmt::Write as _, sync::Arc, time::Duration};

use bytes::Bytes;
use grpc::{Code, Status};
use kube_request::escape;
use parking_lot::Mutex;
use sinks::{
    Kind, Pace,
    kubernetes::{self, KubeEvent, Line, Page, Seen},
};
use tokio::{
    sync::{Semaphore, watch},
    task::{AbortHandle, JoinSet},
    time::Instant,
};

use super::board::{Known, Sinks};
use crate::{
    agent_files::{Files, Unknown},
    views::{AgentKind, Lines, Permit, QUICK, Rest, Source, Watched, refusal},
};

/// Objects on a page.
const PAGE: usize = 500;
/// The longest event of a watch, in bytes.
const LONGEST_EVENT: usize = 4 << 20;
/// A page beyond this is read on another thread.
const LARGE: usize = 128 << 10;
/// How long the API server keeps a watch open, and how long if nothing can cancel it; in seconds.
const WATCH: u64 = 290;
const WATCH_OLD: u64 = 120;
/// How much longer than that a watch may be open.
const LATE: Duration = Duration::from_secs(30);
/// How often events are listed if there is no watch, because the agentk cannot cancel one.
const POLL: Duration = Duration::from_secs(30);
/// How often it is looked whether events may be read now, and whether the namespaces are others.
const AGAIN: Duration = Duration::from_secs(60);
/// How often the namespaces are asked for until they are known.
const AGAIN_UNKNOWN: Duration = Duration::from_secs(5);
/// The waits after failures: doubled each time, with jitter.
const BACKOFF: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));
/// How often a list is begun anew because the API server does not know its continuation any more.
const RESTARTS: usize = 3;
/// Items of one agent per second.
const RATE: u32 = 100;
/// The most namespaces with a watch each.
const MOST_NAMESPACES: usize = 32;
/// How long the events of a page may wait until sinks have room for them. Others need the memory.
const TOLD: Duration = Duration::from_secs(30);
/// The text of the pages whose events wait until sinks have room for them, in KiB. In memory, the events may
/// take 40 times as much.
const WAITING: usize = 8 << 10;
static ROOM: Semaphore = Semaphore::const_new(WAITING);
/// The longest error of an API server that is logged, in characters.
const LONGEST_WHY: usize = 200;

/// Why a list or a watch has ended.
enum Broken {
    /// Its version is too old: it must be listed.
    Gone,
    /// There is no watch: it is listed from time to time.
    Polled,
    /// The API server refuses.
    Forbidden(String),
    /// Something else, which may be over soon.
    Failed(String),
}

impl From<Status> for Broken {
    fn from(status: Status) -> Self {
        match status.code() {
            Code::PermissionDenied => Self::Forbidden(status.message().to_owned()),
            _ => Self::Failed(status.message().to_owned()),
        }
    }
}

/// What readers share.
pub(super) struct Shared {
    pub(super) sinks: Arc<Sinks>,
    pub(super) files: Arc<dyn Files>,
    /// Pages at once, from the request until all of their events were told.
    pub(super) lists: Semaphore,
}

/// Reads the events of one agent.
pub(super) struct AgentEvents {
    pub(super) shared: Arc<Shared>,
    pub(super) agent: Known,
    pub(super) source: Arc<dyn Source>,
    /// Whether the agentk can cancel watches.
    pub(super) kind: Arc<AgentKind>,
    /// Wakes when the agent comes or goes.
    pub(super) changes: watch::Receiver<()>,
}

impl AgentEvents {
    /// Reads until dropped.
    pub(super) async fn run(self) {
        let pace = Arc::new(Mutex::new(Pace::new(RATE)));
        // The namespaces of an agent share its rate: only one of them has a page that waits for it.
        let turn = Arc::new(Semaphore::new(1));
        // Dropping it ends them.
        let mut tasks = JoinSet::new();
        let mut readers: HashMap<Option<String>, AbortHandle> = HashMap::new();
        let mut is_told = false;
        loop {
            let namespaces = match self.namespaces().await {
                Ok(namespaces) => namespaces,
                // Those that were known last stay. Before any are, nothing is read: it could be too much.
                Err(why) => {
                    if readers.is_empty() && !std::mem::replace(&mut is_told, true) {
                        let agent = self.agent.id.get();
                        let why = &*why;
                        tracing::info!(
                            agent.id = agent,
                            why,
                            "the events of an agent are not read for sinks yet"
                        );
                    }
                    tokio::time::sleep(if readers.is_empty() { AGAIN_UNKNOWN } else { AGAIN }).await;
                    continue;
                }
            };
            readers.retain(|namespace, reader| {
                let is_wanted = namespaces.contains(namespace);
                if !is_wanted {
                    reader.abort();
                }
                is_wanted
            });
            for namespace in namespaces {
                readers.entry(namespace).or_insert_with_key(|namespace| {
                    let reader = Reader {
                        shared: Arc::clone(&self.shared),
                        agent: self.agent.clone(),
                        source: Arc::clone(&self.source),
                        kind: Arc::clone(&self.kind),
                        changes: self.changes.clone(),
                        namespace: namespace.clone(),
                        pace: Arc::clone(&pace),
                        turn: Arc::clone(&turn),
                        seen: Seen::default(),
                    };
                    tasks.spawn(reader.run())
                });
            }
            tokio::time::sleep(AGAIN).await;
            // Those that were ended.
            while tasks.try_join_next().is_some() {}
        }
    }

    /// Returns the only namespaces, as `kas.yaml` says; `[None]`: the whole cluster.
    ///
    /// # Errors
    /// Why they are not known.
    async fn namespaces(&self) -> Result<Vec<Option<String>>, Unknown> {
        let mut files = self.shared.files.of(&[self.agent.id]).await;
        let file = files.remove(&self.agent.id).unwrap_or_else(|| Err("its kas.yaml is not known".into()))?;
        Ok(match file.namespaces.is_empty() {
            true => vec![None],
            false => file.namespaces.iter().take(MOST_NAMESPACES).cloned().map(Some).collect(),
        })
    }
}

struct Reader {
    shared: Arc<Shared>,
    agent: Known,
    source: Arc<dyn Source>,
    kind: Arc<AgentKind>,
    changes: watch::Receiver<()>,
    namespace: Option<String>,
    pace: Arc<Mutex<Pace>>,
    turn: Arc<Semaphore>,
    seen: Seen,
}

impl Reader {
    async fn run(mut self) {
        let mut backoff = BACKOFF.0;
        loop {
            let from = Instant::now();
            let why = match Box::pin(self.list()).await {
                Ok(version) => Box::pin(self.follow(version)).await,
                Err(why) => why,
            };
            if from.elapsed() > BACKOFF.1 {
                backoff = BACKOFF.0;
            }
            let agent = self.agent.id.get();
            let wait = match why {
                Broken::Gone if from.elapsed() >= QUICK => continue,
                Broken::Polled => POLL,
                Broken::Forbidden(why) => {
                    let why: String = why.chars().take(LONGEST_WHY).collect();
                    tracing::info!(agent.id = agent, why, "the events of an agent may not be read for sinks");
                    AGAIN
                }
                Broken::Gone => next(&mut backoff),
                Broken::Failed(why) => {
                    tracing::debug!(agent.id = agent, why, "the events of an agent cannot be read for sinks");
                    next(&mut backoff)
                }
            };
            tokio::select! {
                () = tokio::time::sleep(wait) => {}
                // The agent may be back.
                Ok(()) = self.changes.changed() => tokio::time::sleep(BACKOFF.0.mul_f64(0.2)).await,
            }
        }
    }

    fn path(&self) -> String {
        match &self.namespace {
            Some(namespace) => format!("/api/v1/namespaces/{}/events", escape(namespace)),
            None => "/api/v1/events".to_owned(),
        }
    }

    /// Tells all events, except those that were told before. Returns the version of the list.
    async fn list(&mut self) -> Result<String, Broken> {
        let (shared, turn) = (Arc::clone(&self.shared), Arc::clone(&self.turn));
        let path = self.path();
        let mut limit = PAGE;
        'list: for _ in 0..=RESTARTS {
            self.seen.list_begins();
            let mut next = String::new();
            loop {
                let mut target = format!("{path}?limit={limit}");
                if !next.is_empty() {
                    let _ = write!(target, "&continue={}", escape(&next));
                }
                // The semaphores are never closed. The page stays in memory until all of it was told.
                let _turn = turn.acquire().await;
                let _one = shared.lists.acquire().await;
                let answer = match self.source.get(&target, "application/json").await {
                    Err(status) if status.code() == Code::ResourceExhausted && limit > 1 => {
                        limit /= 2;
                        continue;
                    }
                    answer => answer?,
                };
                match answer.status {
                    200 => {}
                    410 => continue 'list,
                    status => return Err(refused(status, &answer.body)),
                }
                // The semaphore is never closed. A page takes it until all of it was told.
                let kib = answer.body.len().div_ceil(1 << 10).min(WAITING);
                let kib = u32::try_from(kib).unwrap_or(u32::MAX);
                let _room = ROOM.acquire_many(kib).await;
                let parsing = self.kind.buffers.parsing(answer.body.len()).await;
                let Page { events, version, next: more } = page(answer.body.clone()).await?;
                drop(parsing);
                drop(answer);
                let until = Instant::now() + TOLD;
                for event in events {
                    let room = shared.sinks.room(Kind::Events, &self.agent);
                    tokio::time::timeout_at(until, room).await.map_err(|_| {
                        Broken::Failed(format!("sinks have had no room for events within {TOLD:?}"))
                    })?;
                    self.tell(event).await;
                }
                if more.is_empty() {
                    self.seen.list_ends();
                    return Ok(version);
                }
                next = more;
            }
        }
        Err(Broken::Failed("the list changed faster than it could be read".to_owned()))
    }

    /// Tells an event, unless it was told before, when the pace allows it. There must be room.
    async fn tell(&mut self, event: KubeEvent) {
        if !self.seen.is_new(&event) {
            return;
        }
        let sinks = &self.shared.sinks;
        let wait = self.pace.lock().take(sinks.now());
        if !wait.is_zero() {
            tokio::time::sleep(wait).await;
        }
        sinks.tell(&self.agent, event.news(self.agent.id, Arc::clone(&self.agent.name)));
    }

    /// Watches from a version on, until it must be listed again.
    async fn follow(&mut self, mut version: String) -> Broken {
        loop {
            let from = Instant::now();
            match Box::pin(self.watch(&mut version)).await {
                Ok(()) if from.elapsed() < QUICK => {
                    return Broken::Failed("the API server ends its watches at once".to_owned());
                }
                // The API server has ended the watch, and it goes on.
                Ok(()) => {}
                Err(why) => return why,
            }
        }
    }

    async fn watch(&mut self, version: &mut String) -> Result<(), Broken> {
        let permit = match self.kind.may_watch().await {
            Permit::NotNeeded => None,
            Permit::Given(permit) => Some(permit),
            Permit::None => return Err(Broken::Polled),
        };
        let path = self.path();
        let target = |seconds: u64| {
            let version = escape(version);
            format!(
                "{path}?watch=1&allowWatchBookmarks=true&timeoutSeconds={seconds}&resourceVersion={version}"
            )
        };
        let (new, old) = (target(WATCH), target(WATCH_OLD));
        let mut watched = self.source.watch(&new, &old, "application/json").await?;
        if watched.status() != 200 {
            let body = refusal(&mut *watched).await;
            return Err(refused(watched.status(), &body));
        }
        let _open = Open::new(&self.shared.sinks);
        let is_cancellable = watched.is_cancellable();
        self.kind.cancels(is_cancellable);
        let seconds = if is_cancellable { WATCH } else { WATCH_OLD };
        if is_cancellable {
            drop(permit);
            return self.read(&mut *watched, seconds, version).await;
        }
        // Nothing cancels it: it is read to its end, also if this is no longer the home.
        let mut rest = Rest { watched: Some(watched), permit };
        let read = match &mut rest.watched {
            Some(watched) => self.read(&mut **watched, seconds, version).await,
            None => Ok(()),
        };
        if read.is_ok() {
            rest.watched = None;
        }
        read
    }

    /// Reads lines until the watch ends. `version` is that of the last one.
    async fn read(
        &mut self,
        watched: &mut dyn Watched,
        seconds: u64,
        version: &mut String,
    ) -> Result<(), Broken> {
        let kind = Arc::clone(&self.kind);
        let mut lines = Lines::new(kind.buffers.budget());
        loop {
            let end = Duration::from_secs(seconds) + LATE;
            let late = |_| Broken::Failed("the API server has not ended a watch in time".to_owned());
            let data = tokio::time::timeout(end, watched.data()).await.map_err(late)??;
            let Some(data) = data else { return Ok(()) };
            lines.push(&data);
            while let Some(line) = lines.next() {
                let parsing = kind.buffers.parsing(line.len()).await;
                let parsed = kubernetes::line(&line).map_err(|error| Broken::Failed(error.to_string()))?;
                drop(parsing);
                match parsed {
                    Line::Event(event, at) => {
                        self.shared.sinks.room(Kind::Events, &self.agent).await;
                        self.tell(event).await;
                        *version = at;
                    }
                    Line::Passed(at) => *version = at,
                    Line::Failed(410, _) => return Err(Broken::Gone),
                    Line::Failed(code, why) => {
                        return Err(Broken::Failed(format!("the API server ended a watch: {code} {why}")));
                    }
                }
            }
            if lines.rest() > LONGEST_EVENT {
                return Err(Broken::Failed(format!("an event has more than {LONGEST_EVENT} bytes")));
            }
            lines.keep()?;
        }
    }
}

/// Returns the next wait after a failure.
fn next(backoff: &mut Duration) -> Duration {
    let wait = backoff.mul_f64(rand::random_range(0.5..=1.0));
    *backoff = (*backoff * 2).min(BACKOFF.1);
    wait
}

async fn page(body: Bytes) -> Result<Page, Broken> {
    let read = if body.len() > LARGE {
        let reading = tokio::task::spawn_blocking(move || kubernetes::page(&body)).await;
        reading.map_err(|error| Broken::Failed(error.to_string()))?
    } else {
        kubernetes::page(&body)
    };
    read.map_err(|error| Broken::Failed(error.to_string()))
}

/// Returns what an answer other than 200 means.
fn refused(status: i32, body: &[u8]) -> Broken {
    let message = views::table::message(body);
    match status {
        401 | 403 => Broken::Forbidden(message),
        410 => Broken::Gone,
        _ => Broken::Failed(format!("the API server answered {status}: {message}")),
    }
}

/// Counts an open watch until dropped.
struct Open(Arc<Sinks>);

impl Open {
    fn new(sinks: &Arc<Sinks>) -> Self {
        sinks.metrics.watches.inc();
        Self(Arc::clone(sinks))
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.metrics.watches.dec();
    }
}

#[cfg(test)]
mod tests;
