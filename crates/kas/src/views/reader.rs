//! Reads a feed: a list, then a watch from there on, again and again.

use std::{fmt::Write as _, sync::Arc, time::Duration};

use bytes::Bytes;
use grpc::{Code, Status};
use kube_request::escape;
use tokio::{sync::OwnedSemaphorePermit, time::Instant};
use views::{AgentState, Event, Form, Key, Listing, Page, Resource, table};

use super::{
    Hub,
    feed::Feed,
    kind::Permit,
    lines::Lines,
    source::{Source, Watched, refusal},
    tries::Tries,
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
/// A watch is begun anew after so long without an event. An API server sends a bookmark each minute. Where it
/// keeps no cache, as of events, it sends none: such a watch is begun anew a little more often.
const QUIET: Duration = Duration::from_secs(100);
/// How often a feed is listed that gets no watch, because the agentk cannot cancel one.
const POLL: Duration = Duration::from_secs(30);
/// How often it is looked whether a resource is there that the cluster did not have, or may be read now.
const AGAIN: Duration = Duration::from_secs(60);
/// The waits after failures: doubled each time, with jitter.
const BACKOFF: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));
/// A list and a watch that take less than this together are repeated like failures. An agent whose watches
/// end at once, or whose versions are always too old, would otherwise be asked as fast as it answers.
pub(crate) const QUICK: Duration = Duration::from_secs(5);
/// How often a list is begun anew because the API server does not know its continuation any more.
const RESTARTS: usize = 3;
/// How long a list may take, and how many pages it may have: the API server forgets a continuation after
/// 5 min, and more rows than fit on so many pages have no room in memory.
const LIST: Duration = Duration::from_secs(300);
const MOST_PAGES: usize = 4_000;

const METADATA: &str = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1";
const ONE_METADATA: &str = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1";
const TABLE: &str = "application/json;as=Table;g=meta.k8s.io;v=v1";

/// Why a list or a watch has ended.
#[derive(Debug)]
enum Broken {
    /// Its version is too old, or the columns are others: it must be listed.
    Gone,
    /// It is time to list it again.
    Due,
    /// The API server prints no tables of this resource.
    NoTable,
    /// The API server refuses.
    Forbidden(String),
    /// The cluster has no such resource.
    Missing(String),
    /// Something else, which may be over soon.
    Failed(String),
    /// The rows need too much memory.
    Full,
}

impl From<Status> for Broken {
    fn from(status: Status) -> Self {
        match status.code() {
            Code::PermissionDenied => Self::Forbidden(status.message().to_owned()),
            _ => Self::Failed(status.message().to_owned()),
        }
    }
}

/// Reads objects into a feed until nobody looks any more.
pub(super) struct Reader {
    pub(super) hub: Arc<Hub>,
    pub(super) feed: Arc<Feed>,
    pub(super) source: Arc<dyn Source>,
    pub(super) resource: Arc<Resource>,
    form: Form,
    /// The version of the resource, once it is known.
    version: String,
    tries: Tries,
}

impl Reader {
    pub(super) fn new(
        hub: Arc<Hub>,
        feed: Arc<Feed>,
        source: Arc<dyn Source>,
        resource: Arc<Resource>,
    ) -> Self {
        let (form, version) = (resource.form, resource.version.clone());
        let tries = Tries::new(&feed);
        Self { hub, feed, source, resource, form, version, tries }
    }

    /// Reads until dropped, or until the rows need too much memory.
    pub(super) async fn run(mut self) {
        let mut backoff = Backoff::default();
        let mut rounds = Backoff::default();
        let mut changes = self.hub.changes_of(self.feed.key.agent);
        loop {
            let from = Instant::now();
            let why = match Box::pin(self.list()).await {
                Ok(version) => {
                    backoff = Backoff::default();
                    Box::pin(self.follow(version, &mut backoff)).await
                }
                Err(why) => why,
            };
            let is_failed = matches!(why, Broken::Failed(_));
            let wait = match why {
                Broken::Gone => {
                    self.feed.is(AgentState::Listing, "");
                    rounds.after(from)
                }
                Broken::Due => rounds.after(from),
                // That happens once.
                Broken::NoTable => continue,
                Broken::Full => return,
                Broken::Forbidden(reason) => {
                    self.feed.change(|store| store.clear(&self.hub.versions));
                    self.feed.is(AgentState::Forbidden, reason);
                    AGAIN
                }
                Broken::Missing(reason) => {
                    self.feed.change(|store| store.clear(&self.hub.versions));
                    // It is known that there are no objects.
                    self.feed.is(AgentState::Live, reason);
                    AGAIN
                }
                Broken::Failed(reason) => {
                    self.hub.metrics.failures.inc();
                    self.tries.failed(reason);
                    backoff.next()
                }
            };
            let pause = async {
                match is_failed {
                    true => self.tries.pause(wait).await,
                    false => tokio::time::sleep(wait).await,
                }
            };
            tokio::select! {
                () = pause => {}
                // The agent may be back.
                Ok(()) = changes.changed() => tokio::time::sleep(BACKOFF.0.mul_f64(0.2)).await,
            }
        }
    }

    /// Returns the path of the resource, after it has asked for its version if that must be known.
    async fn path(&mut self) -> Result<String, Broken> {
        let resource = Arc::clone(&self.resource);
        let Resource { group, plural, .. } = &*resource;
        if self.version.is_empty() {
            let answer = self.source.get(&format!("/apis/{}", escape(group)), "application/json").await?;
            match answer.status {
                200 => {
                    self.version = preferred(&answer.body).ok_or_else(|| {
                        Broken::Failed(format!(
                            "the API server does not say which version of {group} it prefers"
                        ))
                    })?
                }
                404 => return Err(Broken::Missing(format!("the cluster has no API group {group}"))),
                status => return Err(refused(status, &answer.body)),
            }
        }
        let mut path = match group.as_str() {
            "" => format!("/api/{}", escape(&self.version)),
            group => format!("/apis/{}/{}", escape(group), escape(&self.version)),
        };
        if let Some(namespace) = &self.feed.key.namespace {
            let _ = write!(path, "/namespaces/{}", escape(namespace));
        }
        let _ = write!(path, "/{}", escape(plural));
        Ok(path)
    }

    /// Returns a query with the selectors of the resource.
    fn query(&self, first: &str) -> String {
        let mut query = first.to_owned();
        if self.form == Form::Table {
            query.push_str("&includeObject=Metadata");
        }
        for (key, value) in
            [("labelSelector", &self.resource.labels), ("fieldSelector", &self.resource.fields)]
        {
            if !value.is_empty() {
                let _ = write!(query, "&{key}={}", escape(value));
            }
        }
        query
    }

    /// Reads a list, page by page. Only what differs from the rows that are there is a change. Returns its
    /// version.
    async fn list(&mut self) -> Result<String, Broken> {
        self.feed.watched().await;
        self.tries.begin();
        let hub = Arc::clone(&self.hub);
        let kind = hub.kind_of(self.feed.key.agent);
        // The semaphores are never closed.
        let _of_agent = kind.lists.acquire().await;
        let _cold = hub.cold.acquire().await;
        let late = |_| Broken::Failed(format!("a list was not complete within {LIST:?}"));
        tokio::time::timeout(LIST, self.pages()).await.map_err(late)?
    }

    async fn pages(&mut self) -> Result<String, Broken> {
        let path = self.path().await?;
        let kind = self.hub.kind_of(self.feed.key.agent);
        self.hub.metrics.lists.inc();
        let (mut limit, mut pages) = (PAGE, 0);
        'list: for _ in 0..=RESTARTS {
            let (mut next, mut listing) = (String::new(), Listing::default());
            loop {
                pages += 1;
                if pages > MOST_PAGES {
                    return Err(Broken::Failed(format!("a list has more than {MOST_PAGES} pages")));
                }
                let mut target = format!("{path}?{}", self.query(&format!("limit={limit}")));
                if !next.is_empty() {
                    let _ = write!(target, "&continue={}", escape(&next));
                }
                let accept = match self.form {
                    Form::Table => TABLE,
                    Form::Metadata => METADATA,
                    Form::Events => "application/json",
                };
                let answer = match self.source.get(&target, accept).await {
                    Err(status) if status.code() == Code::ResourceExhausted && limit > 1 => {
                        limit /= 2;
                        continue;
                    }
                    answer => answer?,
                };
                // Until the page is rows: what is made of its text may be far larger.
                let _parsing = kind.buffers.parsing(answer.body.len()).await;
                let page = match answer.status {
                    200 => self.page(answer.body.clone()).await?,
                    410 => continue 'list,
                    406 | 415 if self.form == Form::Table => {
                        self.form = Form::Metadata;
                        return Err(Broken::NoTable);
                    }
                    404 => {
                        let name = self.resource.name();
                        return Err(Broken::Missing(format!("the cluster has no resource {name}")));
                    }
                    status => return Err(refused(status, &answer.body)),
                };
                let version = page.resource_version.clone();
                next.clone_from(&page.next);
                let mut restart = false;
                let is_last = next.is_empty();
                let fits = self.feed.change(|store| {
                    restart = store.page(page, &mut listing, &self.hub.versions);
                    if is_last && !restart {
                        store.listed(&listing, &self.hub.versions);
                    }
                });
                if !fits {
                    return Err(Broken::Full);
                }
                if restart {
                    continue 'list;
                }
                if is_last {
                    return Ok(version);
                }
            }
        }
        Err(Broken::Failed("the list changed faster than it could be read".to_owned()))
    }

    async fn page(&self, body: Bytes) -> Result<Page, Broken> {
        let form = self.form;
        let read = if body.len() > LARGE {
            let reading = tokio::task::spawn_blocking(move || table::page(form, &body)).await;
            reading.map_err(|error| Broken::Failed(error.to_string()))?
        } else {
            table::page(form, &body)
        };
        read.map_err(|error| Broken::Failed(error.to_string()))
    }

    /// Watches from a version on, until it must be listed again.
    async fn follow(&mut self, mut version: String, backoff: &mut Backoff) -> Broken {
        loop {
            let from = Instant::now();
            match Box::pin(self.watch(&mut version)).await {
                Ok(()) => {
                    let wait = backoff.after(from);
                    if !wait.is_zero() {
                        self.tries.failed("the API server ends its watches at once".to_owned());
                        self.wait(wait).await;
                    }
                }
                Err(Broken::Failed(reason)) => {
                    self.hub.metrics.failures.inc();
                    // An agentk that is replaced breaks it, and the next one goes on.
                    if from.elapsed() > BACKOFF.1 {
                        *backoff = Backoff::default();
                    }
                    self.tries.failed(reason);
                    self.wait(backoff.next()).await;
                }
                Err(why) => return why,
            }
        }
    }

    /// Waits before a watch is opened again. The agent may be back earlier.
    async fn wait(&mut self, wait: Duration) {
        let mut changes = self.hub.changes_of(self.feed.key.agent);
        tokio::select! {
            () = self.tries.pause(wait) => {}
            Ok(()) = changes.changed() => tokio::time::sleep(BACKOFF.0.mul_f64(0.2)).await,
        }
    }

    /// Watches once. `Ok`: the API server has ended the watch, and it can go on.
    async fn watch(&mut self, version: &mut String) -> Result<(), Broken> {
        self.tries.begin();
        let agent = self.feed.key.agent;
        let kind = self.hub.kind_of(agent);
        let permit = match kind.may_watch().await {
            Permit::NotNeeded => None,
            Permit::Given(permit) => Some(permit),
            Permit::None => return self.polled().await,
        };
        let path = self.path().await?;
        let target = |seconds: u64| {
            let first = format!(
                "watch=1&allowWatchBookmarks=true&timeoutSeconds={seconds}&resourceVersion={}",
                escape(version)
            );
            format!("{path}?{}", self.query(&first))
        };
        let accept = match self.form {
            Form::Table => TABLE,
            Form::Metadata => ONE_METADATA,
            Form::Events => "application/json",
        };
        let (new, old) = (target(WATCH), target(WATCH_OLD));
        let mut watched = self.source.watch(&new, &old, accept).await?;
        match watched.status() {
            200 => {}
            410 => return Err(Broken::Gone),
            status => return Err(refused(status, &refusal(&mut *watched).await)),
        }
        self.feed.is(AgentState::Live, "");
        let count = self.hub.metrics.watch();
        if watched.is_cancellable() {
            kind.cancels(true);
            drop(permit);
            let read = self.events(&mut *watched, WATCH, version).await;
            drop(count);
            return read;
        }
        kind.cancels(false);
        // Nothing cancels it: it is read to its end, also if nobody looks any more.
        let mut rest = Rest { watched: Some(watched), permit };
        let read = match &mut rest.watched {
            Some(watched) => self.events(&mut **watched, WATCH_OLD, version).await,
            None => Ok(()),
        };
        if read.is_ok() {
            rest.watched = None;
        }
        drop(count);
        read
    }

    /// The agentk has as many watches as it may have: the rows are listed from time to time.
    async fn polled(&self) -> Result<(), Broken> {
        self.feed.is(
            AgentState::Live,
            format!("this agentk cannot cancel watches and has the most of them: the rows are at most {POLL:?} old"),
        );
        tokio::time::sleep(POLL).await;
        Err(Broken::Due)
    }

    /// Reads events until the watch ends. `version` is that of the last one.
    async fn events(
        &self,
        watched: &mut dyn Watched,
        seconds: u64,
        version: &mut String,
    ) -> Result<(), Broken> {
        let end = Instant::now() + Duration::from_secs(seconds) + LATE;
        let mut events = table::Watch::new(self.form);
        let kind = self.hub.kind_of(self.feed.key.agent);
        let mut lines = Lines::new(kind.buffers.budget());
        loop {
            // One that nothing cancels is read to its end.
            let quiet = if watched.is_cancellable() { Instant::now() + QUIET } else { end };
            let data = match tokio::time::timeout_at(end.min(quiet), watched.data()).await {
                Ok(data) => data?,
                // That alone says nothing. An API server that answers nothing any more does not open the next
                // watch either.
                Err(_) if quiet < end => return Ok(()),
                Err(_) => {
                    return Err(Broken::Failed("the API server has not ended a watch in time".to_owned()));
                }
            };
            let Some(data) = data else { return Ok(()) };
            lines.push(&data);
            let mut read = Vec::new();
            while let Some(line) = lines.next() {
                let _parsing = kind.buffers.parsing(line.len()).await;
                let event = events.event(&line).map_err(|error| Broken::Failed(error.to_string()))?;
                read.extend(event);
            }
            if lines.rest() > LONGEST_EVENT {
                return Err(Broken::Failed(format!("an event has more than {LONGEST_EVENT} bytes")));
            }
            lines.keep()?;
            self.apply(read, version)?;
        }
    }

    /// Applies the events that came together.
    fn apply(&self, events: Vec<Event>, version: &mut String) -> Result<(), Broken> {
        if events.is_empty() {
            return Ok(());
        }
        let mut ended = Ok(());
        let mut changes = 0;
        let fits = self.feed.change(|store| {
            for event in events {
                match event {
                    Event::Upserted(columns, row, at) => {
                        if columns.is_some_and(|columns| columns != *store.columns()) {
                            ended = Err(Broken::Gone);
                            return;
                        }
                        store.upsert(row, &self.hub.versions);
                        *version = at;
                    }
                    Event::Deleted(namespace, name, at) => {
                        let key = Key::new(&namespace, &name);
                        store.remove(&key, &self.hub.versions);
                        *version = at;
                    }
                    Event::Bookmark(at) => {
                        *version = at;
                        continue;
                    }
                    Event::Failed(410, _) => {
                        ended = Err(Broken::Gone);
                        return;
                    }
                    Event::Failed(code, message) => {
                        ended =
                            Err(Broken::Failed(format!("the API server ended a watch: {code} {message}")));
                        return;
                    }
                }
                changes += 1;
            }
        });
        self.hub.metrics.changes.inc_by(changes);
        if fits { ended } else { Err(Broken::Full) }
    }
}

/// A watch that cannot be cancelled, and its permit. What is left of it is read when this is dropped.
pub(crate) struct Rest {
    pub(crate) watched: Option<Box<dyn Watched>>,
    pub(crate) permit: Option<OwnedSemaphorePermit>,
}

impl Drop for Rest {
    fn drop(&mut self) {
        let (Some(mut watched), permit) = (self.watched.take(), self.permit.take()) else { return };
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        runtime.spawn(async move {
            let rest = async { while let Ok(Some(_)) = watched.data().await {} };
            let _ = tokio::time::timeout(Duration::from_secs(WATCH_OLD) + LATE, rest).await;
            drop(permit);
        });
    }
}

/// Waits that become longer.
struct Backoff(Duration);

impl Default for Backoff {
    fn default() -> Self {
        Self(BACKOFF.0)
    }
}

impl Backoff {
    fn next(&mut self) -> Duration {
        let wait = self.0;
        self.0 = (self.0 * 2).min(BACKOFF.1);
        wait.mul_f64(rand::random_range(0.5..=1.0))
    }

    /// Returns how long to wait after something that began at `from`, and ended without a failure.
    fn after(&mut self, from: Instant) -> Duration {
        if from.elapsed() < QUICK {
            return self.next();
        }
        *self = Self::default();
        Duration::ZERO
    }
}

/// Returns the preferred version of an `APIGroup`.
fn preferred(body: &[u8]) -> Option<String> {
    #[derive(serde::Deserialize)]
    struct Group {
        #[serde(rename = "preferredVersion")]
        preferred: Version,
    }
    #[derive(serde::Deserialize)]
    struct Version {
        version: String,
    }
    let group: Group = serde_json::from_slice(body).ok()?;
    let version = group.preferred.version;
    let legal = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    ((1..=63).contains(&version.len()) && version.bytes().all(legal)).then_some(version)
}

/// Returns what an answer other than 200 means.
fn refused(status: i32, body: &[u8]) -> Broken {
    let message = table::message(body);
    match status {
        401 => Broken::Forbidden(
            "the API server does not accept the agent's credentials: check agentk's service account or kubeconfig"
                .to_owned(),
        ),
        403 => Broken::Forbidden(message),
        410 => Broken::Gone,
        _ => Broken::Failed(format!("the API server answered {status}: {message}")),
    }
}

/// Parses `bytes` as an answer of an API server. For a fuzz target.
#[cfg(feature = "fuzzing")]
pub(super) fn fuzz(bytes: &[u8]) {
    let _ = preferred(bytes);
    let _ = refused(403, bytes);
}
