//! The open requests of the endpoint: limits on their number, and the ends that the endpoint decides.
//!
//! No timer cuts a body. A request ends early when its client has been silent or has not read for long, when
//! its permission is withdrawn, and when this replica shuts down. One task looks at all requests every
//! second, so that an open watch needs no timer of its own.

use std::{
    collections::HashMap,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU8, AtomicU64, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use futures_util::task::AtomicWaker;
use ids::AgentId;
use kube_request::Kind;
use net::http::{StreamReset, StreamSlot};
use parking_lot::Mutex;
use rand::seq::SliceRandom as _;
use tokio::time::Instant;

use crate::{ended_by::EndedBy, failure::Failure, metrics::Metrics};

/// How often the open requests are looked at.
const SWEEP: Duration = Duration::from_secs(1);

/// Limits of open requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenLimits {
    /// Open requests of one caller.
    pub per_caller: usize,
    /// Those of them that asked for an upgrade.
    pub upgrades_per_caller: usize,
    /// Open requests to one agent on this replica: below its tunnels, so that some stay for other uses.
    pub per_agent: usize,
    /// Requests without an end of their own to an agent of GitLab 14.1. It has ten tunnels and cannot cancel.
    pub long_per_old_agent: usize,
    /// How long the API server may take to begin its answer, for requests that it ends itself.
    pub answer_head: Duration,
    /// How long a client may send nothing of a body that agentk waits for.
    pub silent_upload: Duration,
    /// How long a client may read nothing of an answer that has come.
    pub unread_answer: Duration,
    /// How long a request may last.
    pub session: Duration,
}

impl Default for OpenLimits {
    fn default() -> Self {
        Self {
            per_caller: 300,
            upgrades_per_caller: 50,
            per_agent: 400,
            long_per_old_agent: 8,
            // The API server itself gives up after 60 s.
            answer_head: Duration::from_secs(90),
            silent_upload: Duration::from_secs(300),
            unread_answer: Duration::from_secs(300),
            session: Duration::from_secs(12 * 3600),
        }
    }
}

/// Why the endpoint ends a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub(crate) enum Verdict {
    /// This replica shuts down: a watch ends after an event, an upgraded connection after a frame.
    Drain = 1,
    /// The permission was withdrawn.
    Revoked,
    /// The request has lasted for as long as it may.
    Session,
    /// The client sends nothing.
    SilentUpload,
    /// The body of the request failed: the client has left, or has sent something else than it announced.
    BrokenUpload,
    /// The API server does not answer.
    LateAnswer,
    /// The client reads nothing.
    UnreadAnswer,
    /// This replica shuts down, and only upgraded connections continue.
    DrainOver,
}

impl Verdict {
    const ALL: [Self; 8] = [
        Self::Drain,
        Self::Revoked,
        Self::Session,
        Self::SilentUpload,
        Self::BrokenUpload,
        Self::LateAnswer,
        Self::UnreadAnswer,
        Self::DrainOver,
    ];

    pub(crate) fn ended_by(self) -> EndedBy {
        match self {
            Self::Drain | Self::DrainOver => EndedBy::Drain,
            Self::Revoked => EndedBy::Revoked,
            Self::Session | Self::SilentUpload | Self::LateAnswer | Self::UnreadAnswer => EndedBy::Limit,
            Self::BrokenUpload => EndedBy::Client,
        }
    }
}

/// Points in time as milliseconds after a start, in atomic variables. Zero stands for none.
#[derive(Debug)]
struct Since(AtomicU64);

impl Since {
    fn none() -> Self {
        Self(AtomicU64::new(0))
    }

    fn set(&self, start: Instant) {
        let millis = u64::try_from(start.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.0.store(millis.saturating_add(1), Ordering::Relaxed);
    }

    /// Sets it unless it is set.
    fn begin(&self, start: Instant) {
        if self.0.load(Ordering::Relaxed) == 0 {
            self.set(start);
        }
    }

    fn clear(&self) {
        self.0.store(0, Ordering::Relaxed);
    }

    /// Returns how long ago it was set.
    fn age(&self, start: Instant) -> Option<Duration> {
        let millis = self.0.load(Ordering::Relaxed).checked_sub(1)?;
        Some(start.elapsed().saturating_sub(Duration::from_millis(millis)))
    }
}

/// What the parts of an open request share: its body, its answer and the sweep.
#[derive(Debug)]
pub(crate) struct Shared {
    kind: Kind,
    start: Instant,
    opened: Instant,
    /// Resets the client's stream, also while nothing of the answer can be written.
    reset: Arc<StreamReset>,
    /// The client's connection, if its end is that of the answer: it must not end regularly.
    closes: OnceLock<StreamSlot>,
    verdict: AtomicU8,
    waker: AtomicWaker,
    /// Since when agentk has waited for more of the request's body.
    upload_silent: Since,
    /// Since when the API server has had the whole request.
    head_due: Since,
    /// Since when the client has not taken more of the answer.
    answer_unread: Since,
}

impl Shared {
    /// Ends the request. Only the first verdict counts, but any other one overrides [`Verdict::Drain`].
    pub(crate) fn end(&self, verdict: Verdict) {
        let change = self.verdict.fetch_update(Ordering::AcqRel, Ordering::Acquire, |now| {
            (now == 0 || now == Verdict::Drain as u8 && verdict != Verdict::Drain).then_some(verdict as u8)
        });
        if change.is_ok() {
            if verdict == Verdict::UnreadAnswer {
                self.break_connection();
                self.reset.reset();
            }
            self.waker.wake();
        }
    }

    /// The end of the client's connection is that of the answer.
    pub(crate) fn closes(&self, connection: StreamSlot) {
        // There is one answer.
        let _ = self.closes.set(connection);
    }

    /// The answer will not be complete. If the client could take the end of the connection for its end, the
    /// connection ends with a reset.
    pub(crate) fn break_connection(&self) {
        if let Some(connection) = self.closes.get() {
            connection.reset_connection();
        }
    }

    /// Returns the verdict, if there is one.
    pub(crate) fn verdict(&self) -> Option<Verdict> {
        let now = self.verdict.load(Ordering::Acquire);
        Verdict::ALL.into_iter().find(|verdict| *verdict as u8 == now)
    }

    /// Returns the verdict, and wakes the task at the next one. For one task at a time.
    pub(crate) fn poll_verdict(&self, cx: &Context<'_>) -> Option<Verdict> {
        self.waker.register(cx.waker());
        self.verdict()
    }

    /// Waits for a verdict that ends a request which has no answer yet. A shutdown does not.
    pub(crate) async fn ended(&self) -> Verdict {
        std::future::poll_fn(|cx| match self.poll_verdict(cx) {
            None | Some(Verdict::Drain) => Poll::Pending,
            Some(verdict) => Poll::Ready(verdict),
        })
        .await
    }

    /// agentk waits for more of the request's body.
    pub(crate) fn upload_waits(&self) {
        self.upload_silent.begin(self.start);
    }

    /// A part of the request's body has come.
    pub(crate) fn upload_progresses(&self) {
        self.upload_silent.clear();
    }

    /// The request's body is complete: the API server may take its time from now on.
    pub(crate) fn upload_ends(&self) {
        self.upload_silent.clear();
        self.head_due.set(self.start);
    }

    /// The answer has begun.
    pub(crate) fn answer_begins(&self) {
        self.head_due.clear();
    }

    /// The client's connection has been given a part of the answer.
    pub(crate) fn answer_given(&self) {
        self.answer_unread.set(self.start);
    }

    /// The client's connection takes the next part of the answer.
    pub(crate) fn answer_taken(&self) {
        self.answer_unread.clear();
    }

    /// Applies the limits that depend on time.
    fn check(&self, limits: &OpenLimits) {
        let is_over = |since: &Since, limit: Duration| since.age(self.start).is_some_and(|age| age >= limit);
        if self.opened.elapsed() >= limits.session {
            self.end(Verdict::Session);
        }
        if is_over(&self.upload_silent, limits.silent_upload) {
            self.end(Verdict::SilentUpload);
        }
        if matches!(self.kind, Kind::Short | Kind::Upgrade) && is_over(&self.head_due, limits.answer_head) {
            self.end(Verdict::LateAnswer);
        }
        // A client that does not read the log of a pod may be paused: `logs -f | less`.
        if !matches!(self.kind, Kind::Follow | Kind::Upgrade)
            && is_over(&self.answer_unread, limits.unread_answer)
        {
            self.end(Verdict::UnreadAnswer);
        }
    }
}

/// The open requests.
#[derive(Debug)]
pub(crate) struct OpenRequests {
    limits: OpenLimits,
    start: Instant,
    metrics: Arc<Metrics>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    serial: u64,
    requests: HashMap<u64, Arc<Shared>>,
    callers: HashMap<Arc<str>, OfCaller>,
    agents: HashMap<AgentId, OfAgent>,
}

/// The open requests of one caller.
#[derive(Debug, Default)]
struct OfCaller {
    open: usize,
    upgrades: usize,
}

/// The open requests to one agent.
#[derive(Debug, Default)]
struct OfAgent {
    open: usize,
    /// Those without an end of their own.
    long: usize,
    /// The last of them went to an agentk of GitLab 14.1.
    is_old: bool,
}

fn is_long(kind: Kind) -> bool {
    kind != Kind::Short
}

impl OpenRequests {
    pub(crate) fn new(limits: OpenLimits, metrics: Arc<Metrics>) -> Arc<Self> {
        Arc::new(Self { limits, start: Instant::now(), metrics, state: Mutex::default() })
    }

    /// Returns the limits.
    pub(crate) fn limits(&self) -> &OpenLimits {
        &self.limits
    }

    /// Returns when the endpoint started.
    pub(crate) fn start(&self) -> Instant {
        self.start
    }

    /// Opens a request of a caller to an agent. `reset` resets the client's stream.
    ///
    /// # Errors
    /// If a limit is reached.
    pub(crate) fn open(
        self: &Arc<Self>,
        kind: Kind,
        caller: &Arc<str>,
        agent: AgentId,
        reset: Arc<StreamReset>,
    ) -> Result<OpenRequest, Failure> {
        let limits = &self.limits;
        let mut state = self.state.lock();
        if let Some(of_caller) = state.callers.get(caller) {
            if of_caller.open >= limits.per_caller {
                return Err(Failure::too_many(format!(
                    "{} requests of this caller are open",
                    limits.per_caller
                )));
            }
            if kind == Kind::Upgrade && of_caller.upgrades >= limits.upgrades_per_caller {
                return Err(Failure::too_many(format!(
                    "{} upgraded connections of this caller are open (exec, attach, port-forward)",
                    limits.upgrades_per_caller
                )));
            }
        }
        if let Some(of_agent) = state.agents.get(&agent) {
            if of_agent.open >= limits.per_agent {
                return Err(Failure::too_many(format!(
                    "{} requests to agent {agent} are open on this kas",
                    limits.per_agent
                )));
            }
            if of_agent.is_old && is_long(kind) && of_agent.long >= limits.long_per_old_agent {
                return Err(Failure::too_many(format!(
                    "{} watches and logs of agent {agent} are open, and its agentk (14.1) has only 10 tunnels",
                    limits.long_per_old_agent
                )));
            }
        }
        let shared = Arc::new(Shared {
            kind,
            start: self.start,
            opened: Instant::now(),
            reset,
            closes: OnceLock::new(),
            verdict: AtomicU8::new(0),
            waker: AtomicWaker::new(),
            upload_silent: Since::none(),
            head_due: Since::none(),
            answer_unread: Since::none(),
        });
        state.serial += 1;
        let serial = state.serial;
        state.requests.insert(serial, Arc::clone(&shared));
        let of_caller = state.callers.entry(Arc::clone(caller)).or_default();
        of_caller.open += 1;
        of_caller.upgrades += usize::from(kind == Kind::Upgrade);
        let of_agent = state.agents.entry(agent).or_default();
        of_agent.open += 1;
        of_agent.long += usize::from(is_long(kind));
        drop(state);
        self.metrics.opened(kind);
        Ok(OpenRequest { requests: Arc::clone(self), shared, serial, caller: Arc::clone(caller), agent })
    }

    /// Looks at all open requests every second, forever.
    pub(crate) async fn sweep(self: Arc<Self>) {
        let mut ticks = tokio::time::interval(SWEEP);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            for shared in self.all() {
                shared.check(&self.limits);
            }
        }
    }

    fn all(&self) -> Vec<Arc<Shared>> {
        self.state.lock().requests.values().cloned().collect()
    }

    /// Returns the open requests of a kind for which there is no verdict.
    fn undecided(&self, kind: Kind) -> Vec<Arc<Shared>> {
        self.all().into_iter().filter(|shared| shared.kind == kind && shared.verdict().is_none()).collect()
    }

    /// Ends the upgraded connections that are open, and later ones soon after they begin. Runs forever.
    pub(crate) async fn end_upgrades(self: Arc<Self>) {
        loop {
            for shared in self.undecided(Kind::Upgrade) {
                shared.end(Verdict::Drain);
            }
            tokio::time::sleep(SWEEP).await;
        }
    }

    /// Ends all requests but upgraded connections.
    pub(crate) fn end_others(&self) {
        for shared in self.all() {
            if shared.kind != Kind::Upgrade {
                shared.end(Verdict::DrainOver);
            }
        }
    }

    /// Ends the watches that are open now, one after the other within `within`, and later ones soon after
    /// they begin. So their clients do not all come to another replica at once. Runs forever.
    pub(crate) async fn drain(self: Arc<Self>, within: Duration) {
        let mut watches = self.undecided(Kind::Watch);
        watches.shuffle(&mut rand::rng());
        let begun = Instant::now();
        let count = u32::try_from(watches.len()).unwrap_or(u32::MAX);
        for (n, shared) in (0_u32..).zip(&watches) {
            tokio::time::sleep_until(begun + within / count.max(1) * n).await;
            shared.end(Verdict::Drain);
        }
        loop {
            tokio::time::sleep(SWEEP).await;
            for shared in self.undecided(Kind::Watch) {
                shared.end(Verdict::Drain);
            }
        }
    }
}

/// An open request, until it is dropped.
#[derive(Debug)]
pub(crate) struct OpenRequest {
    requests: Arc<OpenRequests>,
    shared: Arc<Shared>,
    serial: u64,
    caller: Arc<str>,
    agent: AgentId,
}

impl OpenRequest {
    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// The request has gone to an agentk; whether it is one of GitLab 14.1.
    pub(crate) fn sent_to(&self, is_old: bool) {
        if let Some(of_agent) = self.requests.state.lock().agents.get_mut(&self.agent) {
            of_agent.is_old = is_old;
        }
    }
}

impl Drop for OpenRequest {
    fn drop(&mut self) {
        let kind = self.shared.kind;
        let mut state = self.requests.state.lock();
        state.requests.remove(&self.serial);
        if let Some(of_caller) = state.callers.get_mut(&self.caller) {
            of_caller.open -= 1;
            of_caller.upgrades -= usize::from(kind == Kind::Upgrade);
            if of_caller.open == 0 {
                state.callers.remove(&self.caller);
            }
        }
        if let Some(of_agent) = state.agents.get_mut(&self.agent) {
            of_agent.open -= 1;
            of_agent.long -= usize::from(is_long(kind));
            if of_agent.open == 0 {
                state.agents.remove(&self.agent);
            }
        }
        drop(state);
        self.requests.metrics.closed(kind);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn requests(limits: OpenLimits) -> Arc<OpenRequests> {
        OpenRequests::new(
            limits,
            Arc::new(Metrics::new(&mut prometheus_client::registry::Registry::default())),
        )
    }

    fn agent(number: i64) -> AgentId {
        AgentId::new(number).unwrap()
    }

    fn open(requests: &Arc<OpenRequests>, kind: Kind, caller: &str, number: i64) -> Result<OpenRequest, u16> {
        requests
            .open(kind, &caller.into(), agent(number), Arc::default())
            .map_err(|failure| failure.status.code().as_u16())
    }

    #[test]
    fn requests_of_a_caller_and_of_an_agent_are_limited_until_they_end() {
        let limits = OpenLimits { per_caller: 2, per_agent: 3, ..OpenLimits::default() };
        let requests = requests(limits);
        let first = open(&requests, Kind::Short, "a", 1).unwrap();
        let _second = open(&requests, Kind::Watch, "a", 2).unwrap();
        assert_eq!(open(&requests, Kind::Short, "a", 3).unwrap_err(), 429);
        let _other = open(&requests, Kind::Short, "b", 1).unwrap();
        let _third = open(&requests, Kind::Short, "c", 1).unwrap();
        assert_eq!(open(&requests, Kind::Short, "d", 1).unwrap_err(), 429);
        drop(first);
        let again = open(&requests, Kind::Short, "a", 1).unwrap();
        drop(again);
        drop((_second, _other, _third));
        let state = requests.state.lock();
        assert!(state.requests.is_empty() && state.callers.is_empty() && state.agents.is_empty());
    }

    #[test]
    fn upgrades_of_a_caller_have_a_limit_of_their_own() {
        let requests = requests(OpenLimits { upgrades_per_caller: 2, ..OpenLimits::default() });
        let first = open(&requests, Kind::Upgrade, "a", 1).unwrap();
        let _second = open(&requests, Kind::Upgrade, "a", 2).unwrap();
        assert_eq!(open(&requests, Kind::Upgrade, "a", 1).unwrap_err(), 429);
        let _watch = open(&requests, Kind::Watch, "a", 1).unwrap();
        let _of_another = open(&requests, Kind::Upgrade, "b", 1).unwrap();
        drop(first);
        open(&requests, Kind::Upgrade, "a", 1).unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn upgrades_are_limited_only_until_their_head_and_for_the_session() {
        let requests = requests(OpenLimits::default());
        let sweep = tokio::spawn(Arc::clone(&requests).sweep());
        let late = open(&requests, Kind::Upgrade, "a", 1).unwrap();
        late.shared().upload_ends();
        let upgraded = open(&requests, Kind::Upgrade, "a", 1).unwrap();
        upgraded.shared().upload_ends();
        upgraded.shared().answer_begins();
        assert_eq!(late.shared().ended().await, Verdict::LateAnswer);
        tokio::time::sleep(Duration::from_secs(3600)).await;
        assert_eq!(upgraded.shared().verdict(), None);
        assert_eq!(upgraded.shared().ended().await, Verdict::Session);
        sweep.abort();
    }

    #[test]
    fn an_agent_of_14_1_keeps_tunnels_for_short_requests() {
        let limits = OpenLimits { long_per_old_agent: 2, ..OpenLimits::default() };
        let requests = requests(limits);
        let watch = open(&requests, Kind::Watch, "a", 1).unwrap();
        watch.sent_to(true);
        let _log = open(&requests, Kind::Follow, "b", 1).unwrap();
        assert_eq!(open(&requests, Kind::Watch, "c", 1).unwrap_err(), 429);
        let _short = open(&requests, Kind::Short, "c", 1).unwrap();
        let _of_another = open(&requests, Kind::Watch, "c", 2).unwrap();
        watch.sent_to(false);
        open(&requests, Kind::Watch, "c", 1).unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn clients_that_are_silent_or_do_not_read_are_found() {
        let requests = requests(OpenLimits::default());
        let sweep = tokio::spawn(Arc::clone(&requests).sweep());
        let upload = open(&requests, Kind::Short, "a", 1).unwrap();
        upload.shared().upload_waits();
        let unread = open(&requests, Kind::Watch, "a", 1).unwrap();
        unread.shared().answer_given();
        let log = open(&requests, Kind::Follow, "a", 1).unwrap();
        log.shared().answer_given();
        let late = open(&requests, Kind::Short, "a", 1).unwrap();
        late.shared().upload_ends();
        let slow_watch = open(&requests, Kind::Watch, "a", 1).unwrap();
        slow_watch.shared().upload_ends();
        tokio::time::sleep(Duration::from_secs(89)).await;
        assert_eq!(late.shared().verdict(), None);
        assert_eq!(late.shared().ended().await, Verdict::LateAnswer);
        tokio::time::sleep(Duration::from_secs(200)).await;
        // Something came, so its time begins again.
        upload.shared().upload_progresses();
        upload.shared().upload_waits();
        assert_eq!(unread.shared().ended().await, Verdict::UnreadAnswer);
        assert!(unread.shared().reset.poll_reset(&Context::from_waker(std::task::Waker::noop())).is_ready());
        assert_eq!(upload.shared().verdict(), None);
        assert_eq!(upload.shared().ended().await, Verdict::SilentUpload);
        tokio::time::sleep(Duration::from_secs(3600)).await;
        assert_eq!((log.shared().verdict(), slow_watch.shared().verdict()), (None, None));
        assert_eq!(log.shared().ended().await, Verdict::Session);
        assert!(requests.start.elapsed() >= Duration::from_secs(12 * 3600));
        sweep.abort();
    }

    #[tokio::test(start_paused = true)]
    async fn a_shutdown_ends_watches_one_after_the_other() {
        let requests = requests(OpenLimits::default());
        let watches: Vec<_> = (0..10).map(|_| open(&requests, Kind::Watch, "a", 1).unwrap()).collect();
        let short = open(&requests, Kind::Short, "a", 1).unwrap();
        let drain = tokio::spawn(Arc::clone(&requests).drain(Duration::from_secs(10)));
        let told = || watches.iter().filter(|watch| watch.shared().verdict() == Some(Verdict::Drain)).count();
        tokio::time::sleep(Duration::from_millis(500)).await;
        assert_eq!(told(), 1);
        tokio::time::sleep(Duration::from_secs(5)).await;
        assert_eq!(told(), 6);
        tokio::time::sleep(Duration::from_secs(5)).await;
        assert_eq!(told(), 10);
        let late = open(&requests, Kind::Watch, "a", 1).unwrap();
        tokio::time::sleep(2 * SWEEP).await;
        assert_eq!(late.shared().verdict(), Some(Verdict::Drain));
        assert_eq!(short.shared().verdict(), None);
        // What ends it at once takes precedence.
        late.shared().end(Verdict::Revoked);
        late.shared().end(Verdict::Session);
        late.shared().end(Verdict::Drain);
        assert_eq!(late.shared().verdict(), Some(Verdict::Revoked));
        drain.abort();
    }
}
