//! The open requests of the endpoint: limits on their number, and the ends that the endpoint decides.
//!
//! No timer cuts a body. A request ends early when its client has been silent or has not read for long, when
//! its permission is withdrawn, and when this replica shuts down. One task looks at all requests every
//! second, so that an open watch needs no timer of its own.

mod long;

use std::{
    collections::HashMap,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use callers::{Caller, SourceKind};
use futures_util::task::AtomicWaker;
use ids::{AgentId, TokenHash};
use kube_request::Kind;
use net::http::{StreamReset, StreamSlot};
use parking_lot::Mutex;
use rand::seq::SliceRandom as _;
use routing::rate_limit::RateLimit;
use tokio::time::Instant;

pub use self::long::{LongCaller, LongCount, LongRequests};
use crate::{ended_by::EndedBy, failure::Failure, metrics::Metrics};

/// How often the open requests are looked at.
const SWEEP: Duration = Duration::from_secs(1);
/// How long a watch that was ended may take to complete its event. An agent may never complete it.
const LAST_EVENT: Duration = Duration::from_secs(3);
/// How long a request that was ended may stay open. A connection whose client does not read never asks the
/// answer for more, so the answer cannot end there. With [`SWEEP`], it is over after 5 s.
const LAST_BYTES: Duration = Duration::from_secs(4);

/// Limits of open requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenLimits {
    /// Open requests of one caller.
    pub per_caller: usize,
    /// Those of them that asked for an upgrade.
    pub upgrades_per_caller: usize,
    /// Open requests to one agent on this replica: below its tunnels, so that some stay for other uses.
    pub per_agent: usize,
    /// How long the API server may take to begin its answer, for requests that it ends itself.
    pub answer_head: Duration,
    /// How long a client may send nothing of a body that agentk waits for, and how long agentk may take
    /// nothing of one that has come, for requests that it ends itself.
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
    /// agentk takes nothing of the request.
    StalledUpload,
}

impl Verdict {
    const ALL: [Self; 9] = [
        Self::Drain,
        Self::Revoked,
        Self::Session,
        Self::SilentUpload,
        Self::BrokenUpload,
        Self::LateAnswer,
        Self::UnreadAnswer,
        Self::DrainOver,
        Self::StalledUpload,
    ];

    pub(crate) fn ended_by(self) -> EndedBy {
        match self {
            Self::Drain | Self::DrainOver => EndedBy::Drain,
            Self::Revoked => EndedBy::Revoked,
            Self::Session
            | Self::SilentUpload
            | Self::LateAnswer
            | Self::UnreadAnswer
            | Self::StalledUpload => EndedBy::Limit,
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
        self.set_to(start, Instant::now());
    }

    /// Sets it to a time, which may be in the future.
    fn set_to(&self, start: Instant, at: Instant) {
        let after = at.saturating_duration_since(start);
        let millis = u64::try_from(after.as_millis()).unwrap_or(u64::MAX);
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

/// Who answers a request.
#[derive(Clone, Copy, Debug)]
enum To {
    /// An agent; and the source of the caller.
    Agent(AgentId, SourceKind),
    /// kas itself.
    Kas,
}

/// What the parts of an open request share: its body, its answer and the sweep.
#[derive(Debug)]
pub(crate) struct Shared {
    kind: Kind,
    to: To,
    /// The name of its caller.
    caller: Arc<str>,
    start: Instant,
    opened: Instant,
    /// Resets the client's stream, also while nothing of the answer can be written.
    reset: Arc<StreamReset>,
    /// The client's connection, if its end is that of the answer: it must not end regularly.
    closes: OnceLock<StreamSlot>,
    verdict: AtomicU8,
    waker: AtomicWaker,
    /// Since when there has been a verdict other than [`Verdict::Drain`].
    ended: Since,
    /// The answer has begun. Timers of the request's body do not cut it.
    is_answered: AtomicBool,
    /// Since when agentk has taken nothing of the request.
    untaken: Since,
    /// Since when agentk has waited for more of the request's body.
    upload_silent: Since,
    /// Since when the API server has had the whole request.
    head_due: Since,
    /// Since when the client has not taken more of the answer.
    answer_unread: Since,
}

impl Shared {
    fn new(kind: Kind, to: To, caller: &Arc<str>, start: Instant, reset: Arc<StreamReset>) -> Self {
        Self {
            kind,
            to,
            caller: Arc::clone(caller),
            start,
            opened: Instant::now(),
            reset,
            closes: OnceLock::new(),
            verdict: AtomicU8::new(0),
            waker: AtomicWaker::new(),
            ended: Since::none(),
            is_answered: AtomicBool::new(false),
            untaken: Since::none(),
            upload_silent: Since::none(),
            head_due: Since::none(),
            answer_unread: Since::none(),
        }
    }

    /// Ends the request. Only the first verdict counts, but any other one overrides [`Verdict::Drain`].
    pub(crate) fn end(&self, verdict: Verdict) {
        let change = self.verdict.fetch_update(Ordering::AcqRel, Ordering::Acquire, |now| {
            (now == 0 || now == Verdict::Drain as u8 && verdict != Verdict::Drain).then_some(verdict as u8)
        });
        if change.is_ok() {
            if verdict != Verdict::Drain {
                self.ended.set(self.start);
            }
            if verdict == Verdict::UnreadAnswer {
                self.reset();
            }
            self.waker.wake();
        }
    }

    /// Ends the request without its answer, which the client does not read.
    fn reset(&self) {
        self.break_connection();
        self.reset.reset();
    }

    /// Whether a watch whose event is not complete must end nevertheless.
    pub(crate) fn is_overdue(&self) -> bool {
        self.ended.age(self.start).is_some_and(|age| age >= LAST_EVENT)
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

    /// agentk will get the request by `until`.
    pub(crate) fn request_waits(&self, until: Instant) {
        self.untaken.set_to(self.start, until);
    }

    /// agentk was given a part of the request, which is not its last one.
    pub(crate) fn upload_given(&self) {
        self.untaken.set(self.start);
    }

    /// agentk takes the next part of the request.
    pub(crate) fn upload_taken(&self) {
        self.untaken.clear();
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
        self.untaken.clear();
        self.head_due.set(self.start);
    }

    /// The answer has begun. The request's body may still go on.
    pub(crate) fn answer_begins(&self) {
        self.is_answered.store(true, Ordering::Relaxed);
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
        if matches!(self.kind, Kind::Short | Kind::Upgrade) && !self.is_answered.load(Ordering::Relaxed) {
            if is_over(&self.head_due, limits.answer_head) {
                self.end(Verdict::LateAnswer);
            }
            if is_over(&self.untaken, limits.silent_upload) {
                self.end(Verdict::StalledUpload);
            }
        }
        // A client that does not read the log of a pod may be paused: `logs -f | less`.
        if !matches!(self.kind, Kind::Follow | Kind::Upgrade)
            && is_over(&self.answer_unread, limits.unread_answer)
        {
            self.end(Verdict::UnreadAnswer);
        }
        if self.is_overdue() {
            self.waker.wake();
        }
        if is_over(&self.ended, LAST_BYTES) {
            self.reset();
        }
    }
}

/// The open requests.
#[derive(Debug)]
pub(crate) struct OpenRequests {
    limits: OpenLimits,
    start: Instant,
    metrics: Arc<Metrics>,
    /// How many requests each caller may begin at all replicas together; `None`: as many as it likes.
    rate: Option<Arc<RateLimit>>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    serial: u64,
    requests: HashMap<u64, Arc<Shared>>,
    callers: HashMap<Arc<str>, OfCaller>,
    /// The number of open requests to each agent.
    agents: HashMap<AgentId, usize>,
}

impl State {
    /// Adds an open request. Returns it with its number.
    fn add(&mut self, shared: Shared) -> (Arc<Shared>, u64) {
        let shared = Arc::new(shared);
        self.serial += 1;
        self.requests.insert(self.serial, Arc::clone(&shared));
        (shared, self.serial)
    }

    /// Whether a caller may have one more request open.
    fn has_room(&self, limits: &OpenLimits, caller: &str, is_upgrade: bool) -> Result<(), Failure> {
        let Some(of_caller) = self.callers.get(caller) else { return Ok(()) };
        if of_caller.open >= limits.per_caller {
            return Err(Failure::too_many(format!("{} requests of this caller are open", limits.per_caller)));
        }
        if is_upgrade && of_caller.upgrades >= limits.upgrades_per_caller {
            return Err(Failure::too_many(format!(
                "{} upgraded connections of this caller are open (exec, attach, port-forward)",
                limits.upgrades_per_caller
            )));
        }
        Ok(())
    }

    /// Counts a request of a caller, unless it begins too many.
    fn count(
        &mut self,
        rate: Option<&RateLimit>,
        caller: &Arc<str>,
        is_upgrade: bool,
    ) -> Result<(), Failure> {
        if let Some(rate) = rate {
            rate.take(TokenHash::of(caller.as_bytes())).map_err(Failure::too_fast)?;
        }
        let of_caller = self.callers.entry(Arc::clone(caller)).or_default();
        of_caller.open += 1;
        of_caller.upgrades += usize::from(is_upgrade);
        Ok(())
    }

    /// A request of a caller is over.
    fn discount(&mut self, caller: &Arc<str>, is_upgrade: bool) {
        if let Some(of_caller) = self.callers.get_mut(caller) {
            of_caller.open -= 1;
            of_caller.upgrades -= usize::from(is_upgrade);
            if of_caller.open == 0 {
                self.callers.remove(caller);
            }
        }
    }
}

/// The open requests of one caller.
#[derive(Debug, Default)]
struct OfCaller {
    open: usize,
    upgrades: usize,
}

impl OpenRequests {
    pub(crate) fn new(limits: OpenLimits, rate: Option<Arc<RateLimit>>, metrics: Arc<Metrics>) -> Arc<Self> {
        Arc::new(Self { limits, start: Instant::now(), metrics, rate, state: Mutex::default() })
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
        caller: &Caller,
        agent: AgentId,
        reset: Arc<StreamReset>,
    ) -> Result<OpenRequest, Failure> {
        let limits = &self.limits;
        let mut state = self.state.lock();
        state.has_room(limits, &caller.name, kind == Kind::Upgrade)?;
        if state.agents.get(&agent).is_some_and(|open| *open >= limits.per_agent) {
            return Err(Failure::too_many(format!(
                "{} requests to agent {agent} are open on this kas",
                limits.per_agent
            )));
        }
        // Last, so that nothing else that refuses a request costs its caller a token.
        state.count(self.rate.as_deref(), &caller.name, kind == Kind::Upgrade)?;
        *state.agents.entry(agent).or_default() += 1;
        let to = To::Agent(agent, caller.source);
        let (shared, serial) = state.add(Shared::new(kind, to, &caller.name, self.start, reset));
        drop(state);
        self.metrics.opened(kind);
        Ok(OpenRequest { requests: Arc::clone(self), shared, serial })
    }

    /// Opens a request of a caller that kas answers itself. No metric counts it, and the status page does not
    /// tell it. A shutdown ends it last: whoever makes the answer ends it in order before.
    ///
    /// # Errors
    /// If a limit is reached.
    pub(crate) fn open_own(
        self: &Arc<Self>,
        kind: Kind,
        caller: &Arc<str>,
        reset: Arc<StreamReset>,
    ) -> Result<OpenRequest, Failure> {
        let mut state = self.state.lock();
        state.has_room(&self.limits, caller, false)?;
        state.count(self.rate.as_deref(), caller, false)?;
        let (shared, serial) = state.add(Shared::new(kind, To::Kas, caller, self.start, reset));
        drop(state);
        Ok(OpenRequest { requests: Arc::clone(self), shared, serial })
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

    /// Returns the open requests of a kind to agents for which there is no verdict.
    fn undecided(&self, kind: Kind) -> Vec<Arc<Shared>> {
        let is_one = |shared: &Arc<Shared>| {
            shared.kind == kind && matches!(shared.to, To::Agent(..)) && shared.verdict().is_none()
        };
        self.all().into_iter().filter(is_one).collect()
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
}

impl OpenRequest {
    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }
}

impl Drop for OpenRequest {
    fn drop(&mut self) {
        let Shared { kind, to, ref caller, .. } = *self.shared;
        let mut state = self.requests.state.lock();
        state.requests.remove(&self.serial);
        state.discount(caller, kind == Kind::Upgrade);
        let To::Agent(agent, _) = to else { return };
        if let Some(open) = state.agents.get_mut(&agent) {
            *open -= 1;
            if *open == 0 {
                state.agents.remove(&agent);
            }
        }
        drop(state);
        self.requests.metrics.closed(kind);
    }
}

#[cfg(test)]
mod tests;
