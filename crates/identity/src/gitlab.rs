//! Which agent a token belongs to, according to GitLab. Answers are cached, and renewed while the agent is
//! connected.
//!
//! * Each token has one lookup at a time, which all streams with this token share. It runs in its own task: a
//!   caller that is cancelled neither stops it nor affects other callers.
//! * An answer is valid for its time to live. While streams of the agent are open, it is renewed before it
//!   expires, so that a changed answer is noticed in time and the streams are cut.
//! * If GitLab cannot be asked, an answer stays valid until it expires; then new streams are refused with
//!   `UNAVAILABLE`. Open streams stay, because an outage says nothing about the agent.
//! * The cache is keyed by hashes. A token itself is kept only during a lookup or while its agent is
//!   connected, because a renewal needs it. Its memory is overwritten afterwards.

mod metrics;

use std::{
    collections::{BTreeSet, HashMap},
    fmt,
    net::IpAddr,
    panic::AssertUnwindSafe,
    sync::{Arc, Weak},
    time::Duration,
};

use arc_swap::ArcSwapOption;
use async_trait::async_trait;
use futures_util::FutureExt as _;
use gitlab::{AgentInfo, LookupError, LookupMetrics, LookupOutcome, LookupPriority, Urgency};
use ids::{AgentId, TokenHash};
use net::peers::{Recent, network};
use parking_lot::Mutex;
use secrecy::{ExposeSecret as _, SecretSlice};
use tokio::{
    sync::{Notify, OwnedSemaphorePermit, Semaphore, watch},
    time::Instant,
};
use tokio_util::task::AbortOnDropHandle;

pub use self::metrics::{CacheAnswer, CacheMetrics};
use super::{Agent, Authenticated, Hold, Identity, IdentityError};

/// Maximum number of cached tokens. A replica may hold 100,000 agents; the rest is for agents that have left.
const MAX_TOKENS: usize = 200_000;
/// Maximum number of lookups that wait or run, besides renewals.
const MAX_LOOKUPS: usize = 10_000;
/// Maximum number of renewals that wait or run: enough for 16 per second if each takes four seconds.
const MAX_RENEWALS: usize = 64;
/// How long a stream waits for a lookup. A longer wait would be useless, because a connection without an
/// authenticated stream is closed after ten seconds. The lookup continues, and the agent's next attempt uses
/// its answer.
const LOOKUP_WAIT: Duration = Duration::from_secs(8);
/// An answer is renewed after this share of its time to live, less up to a tenth, so that agents that
/// connected together are not renewed together. The rest of the time is for GitLab to answer.
const RENEWED_AT: f64 = 0.8;
/// A renewal that the rate limiter refused is repeated after this time.
const BUSY: Duration = Duration::from_secs(1);
/// A renewal that begins this long after the answer expired was delayed by the rate limit.
const LATE: Duration = Duration::from_secs(1);
/// Minimum time between two log messages about that.
const LATE_TOLD: Duration = Duration::from_secs(60);
/// Number of entries that are searched for an unused one if the cache is full.
const SEARCHED: usize = 1_000;

/// Times to live of answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Times {
    /// Of an agent; zero: nothing is cached, no error either.
    pub ttl: Duration,
    /// Of an error.
    pub error_ttl: Duration,
    /// How often a connected agent is renewed if `ttl` is zero.
    pub renewal_without_cache: Duration,
}

impl Times {
    fn renewal(&self) -> Duration {
        let period = if self.ttl.is_zero() { self.renewal_without_cache } else { self.ttl };
        period.mul_f64(RENEWED_AT - 0.1 * rand::random::<f64>())
    }
}

/// The agents of GitLab. Dropping it stops the renewals.
pub struct GitLabIdentity {
    shared: Arc<Shared>,
    _renewals: AbortOnDropHandle<()>,
}

impl GitLabIdentity {
    /// Returns an identity with an empty cache.
    pub fn new(
        source: Arc<dyn AgentInfo>,
        times: Times,
        lookups: Arc<LookupMetrics>,
        metrics: Arc<CacheMetrics>,
    ) -> Self {
        let shared = Arc::new(Shared {
            source,
            times,
            lookups,
            metrics,
            state: Mutex::default(),
            version: watch::Sender::new(0),
            due_earlier: Notify::new(),
        });
        let renewals = tokio::spawn(Arc::clone(&shared).renewals());
        Self { shared, _renewals: AbortOnDropHandle::new(renewals) }
    }
}

impl GitLabIdentity {
    /// Asks GitLab again about one connected agent of this configuration project, unless that is already
    /// being done: what the last answer says beside the agent, such as a token of Gitaly, is no longer valid.
    pub fn renew(&self, project_id: i64) {
        let mut state = self.shared.state.lock();
        let is_of_project = |session: &Arc<Session>| {
            session.agent.load().as_ref().is_some_and(|agent| agent.project_id == project_id)
        };
        let mut of_project = state
            .tokens
            .values()
            .filter_map(|entry| Some((entry.open_session().filter(is_of_project)?, entry.lookup.is_some())));
        let Some((session, is_asking)) = of_project.next() else { return };
        drop(of_project);
        if !is_asking {
            self.shared.look_up(&mut state, session, Urgency::Renewal, None);
        }
    }
}

impl GitLabIdentity {
    /// Returns the token of the newest stream of an agent, with which GitLab is asked what the agent may do.
    /// `None`: no stream of it is open here.
    pub fn token(&self, agent: AgentId) -> Option<SecretSlice<u8>> {
        let state = self.shared.state.lock();
        let is_of_agent =
            |session: &Arc<Session>| session.agent.load().as_ref().is_some_and(|known| known.id == agent);
        let newest = state.newest.get(&agent).and_then(Weak::upgrade).filter(is_of_agent);
        let session = newest.or_else(|| {
            // Its streams have ended, but another token of the agent may still be in use.
            state.tokens.values().filter_map(Entry::open_session).find(is_of_agent)
        })?;
        Some(session.token.expose_secret().to_vec().into())
    }

    fn note_newest(&self, authenticated: &Authenticated) {
        let hold = authenticated.hold.0.clone();
        let Some(session) = hold.and_then(|hold| hold.downcast::<Session>().ok()) else { return };
        let mut state = self.shared.state.lock();
        if state.newest.len() >= MAX_TOKENS && !state.newest.contains_key(&authenticated.agent.id) {
            state.newest.retain(|_, session| session.strong_count() > 0);
            if state.newest.len() >= MAX_TOKENS {
                return;
            }
        }
        state.newest.insert(authenticated.agent.id, Arc::downgrade(&session));
    }
}

impl fmt::Debug for GitLabIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GitLabIdentity")
            .field("tokens", &self.shared.state.lock().tokens.len())
            .finish_non_exhaustive()
    }
}

#[async_trait]
impl Identity for GitLabIdentity {
    async fn authenticate(&self, token: &[u8], from: Option<IpAddr>) -> Result<Authenticated, IdentityError> {
        // No agent has it, and in `Authorization` it would not be a credential.
        if token.is_empty() {
            return Err(IdentityError::Unknown);
        }
        let result = match self.shared.answer(token, from.map(network)) {
            Answer::Known(result) => result,
            Answer::Pending(mut lookup) => {
                match tokio::time::timeout(LOOKUP_WAIT, lookup.wait_for(Option::is_some)).await {
                    Ok(Ok(result)) => result.clone().unwrap_or(Err(IdentityError::Unavailable)),
                    Ok(Err(_)) | Err(_) => Err(IdentityError::Unavailable),
                }
            }
        };
        if let Ok(authenticated) = &result {
            self.note_newest(authenticated);
        }
        result
    }

    fn changes(&self) -> watch::Receiver<u64> {
        self.shared.version.subscribe()
    }

    async fn still_valid(&self, authenticated: &Authenticated) -> bool {
        let session = authenticated.hold.0.as_ref().and_then(|hold| hold.downcast_ref::<Session>());
        session.is_some_and(|session| session.agent.load().as_ref() == Some(&authenticated.agent))
    }

    fn agent(&self, agent: AgentId) -> Option<Arc<Agent>> {
        self.shared.state.lock().by_id.get(&agent).cloned()
    }

    fn agents(&self) -> Vec<Arc<Agent>> {
        self.shared.state.lock().by_id.values().cloned().collect()
    }
}

/// A token that is being looked up, or whose agent has open streams, which hold it.
struct Session {
    hash: TokenHash,
    token: SecretSlice<u8>,
    /// The agent according to the last answer; `None`: no agent, or not known yet.
    agent: ArcSwapOption<Agent>,
}

impl Session {
    fn new(hash: TokenHash, token: &[u8], agent: Option<Arc<Agent>>) -> Arc<Self> {
        Arc::new(Self { hash, token: token.to_vec().into(), agent: ArcSwapOption::new(agent) })
    }

    fn authenticated(self: Arc<Self>, agent: Arc<Agent>) -> Authenticated {
        Authenticated { agent, token: self.hash, hold: Hold(Some(self)) }
    }
}

type LookupResult = Option<Result<Authenticated, IdentityError>>;

/// The cache entry of one token.
#[derive(Default)]
struct Entry {
    session: Weak<Session>,
    remembered: Option<Remembered>,
    lookup: Option<watch::Receiver<LookupResult>>,
    /// When the entry has to be renewed or removed. `None` only during a lookup.
    due: Option<Instant>,
}

struct Remembered {
    answer: Result<Arc<Agent>, IdentityError>,
    until: Instant,
}

impl Entry {
    /// Returns the cached answer if it has not expired.
    fn fresh(&self, now: Instant) -> Option<&Remembered> {
        self.remembered.as_ref().filter(|remembered| now < remembered.until)
    }

    /// Returns the session if the last answer was an agent and streams are open.
    fn open_session(&self) -> Option<Arc<Session>> {
        self.session.upgrade().filter(|session| session.agent.load().is_some())
    }
}

#[derive(Default)]
struct State {
    tokens: HashMap<TokenHash, Entry>,
    /// Every entry without a lookup, by when it is due.
    due: BTreeSet<(Instant, TokenHash)>,
    lookups: usize,
    /// The agents that GitLab has returned; at most as many as tokens.
    by_id: HashMap<AgentId, Arc<Agent>>,
    /// The session that was authenticated last, of each agent.
    newest: HashMap<AgentId, Weak<Session>>,
    /// Tokens that belonged to an agent.
    agents: Recent<TokenHash>,
    /// The networks they came from.
    trusted_sources: Recent<IpAddr>,
    late_told: Option<Instant>,
}

impl State {
    fn schedule(&mut self, hash: TokenHash, at: Option<Instant>) {
        let Some(entry) = self.tokens.get_mut(&hash) else { return };
        if let Some(before) = std::mem::replace(&mut entry.due, at) {
            self.due.remove(&(before, hash));
        }
        if let Some(at) = at {
            self.due.insert((at, hash));
        }
    }

    /// Returns the lookup priority of a token that no connected agent uses.
    fn urgency(&self, hash: TokenHash, from: Option<IpAddr>) -> Urgency {
        let priority = if self.agents.has(&hash) {
            LookupPriority::KnownToken
        } else if from.is_some_and(|from| self.trusted_sources.has(&from)) {
            LookupPriority::KnownSource
        } else {
            LookupPriority::UnknownSource
        };
        Urgency::New { from, priority }
    }

    fn remove(&mut self, hash: TokenHash) {
        self.schedule(hash, None);
        self.tokens.remove(&hash);
    }

    /// Whether one more token can be cached. If the cache is full, removes an unused entry: errors first, as
    /// they are due earlier.
    fn make_room(&mut self, most: usize) -> bool {
        if self.tokens.len() < most {
            return true;
        }
        let idle = self
            .due
            .iter()
            .take(SEARCHED)
            .map(|(_, hash)| *hash)
            .find(|hash| self.tokens.get(hash).is_some_and(|entry| entry.session.strong_count() == 0));
        if let Some(hash) = idle {
            self.remove(hash);
        }
        idle.is_some()
    }
}

enum Answer {
    Known(Result<Authenticated, IdentityError>),
    Pending(watch::Receiver<LookupResult>),
}

struct Shared {
    source: Arc<dyn AgentInfo>,
    times: Times,
    lookups: Arc<LookupMetrics>,
    metrics: Arc<CacheMetrics>,
    /// A panic leaves at worst an entry that is asked for again.
    state: Mutex<State>,
    version: watch::Sender<u64>,
    /// Notified when the first entry of `State::due` may have become an earlier one.
    due_earlier: Notify,
}

impl Shared {
    fn answer(self: &Arc<Self>, token: &[u8], from: Option<IpAddr>) -> Answer {
        let hash = TokenHash::of(token);
        let now = Instant::now();
        let mut state = self.state.lock();
        if let Some(entry) = state.tokens.get_mut(&hash) {
            if let Some(remembered) = entry.fresh(now) {
                return Answer::Known(match &remembered.answer {
                    Ok(agent) => {
                        self.metrics.cached(CacheAnswer::Agent);
                        let agent = Arc::clone(agent);
                        let session = entry
                            .open_session()
                            .unwrap_or_else(|| Session::new(hash, token, Some(Arc::clone(&agent))));
                        entry.session = Arc::downgrade(&session);
                        Ok(session.authenticated(agent))
                    }
                    Err(error) => {
                        self.metrics.cached(CacheAnswer::Error);
                        Err(*error)
                    }
                });
            }
            if let Some(lookup) = &entry.lookup {
                self.metrics.cached(CacheAnswer::Joined);
                return Answer::Pending(lookup.clone());
            }
        }
        self.metrics.cached(CacheAnswer::Nothing);
        if state.lookups >= MAX_LOOKUPS || !state.tokens.contains_key(&hash) && !state.make_room(MAX_TOKENS) {
            self.lookups.looked_up(LookupOutcome::Limited);
            return Answer::Known(Err(IdentityError::Unavailable));
        }
        let open = state.tokens.get(&hash).and_then(Entry::open_session);
        let urgency = if open.is_some() { Urgency::Renewal } else { state.urgency(hash, from) };
        let session = open.unwrap_or_else(|| Session::new(hash, token, None));
        Answer::Pending(self.look_up(&mut state, session, urgency, None))
    }

    /// Starts a lookup; there must be none for this token.
    fn look_up(
        self: &Arc<Self>,
        state: &mut State,
        session: Arc<Session>,
        urgency: Urgency,
        permit: Option<OwnedSemaphorePermit>,
    ) -> watch::Receiver<LookupResult> {
        let (sender, receiver) = watch::channel(None);
        let hash = session.hash;
        let entry = state.tokens.entry(hash).or_default();
        entry.session = Arc::downgrade(&session);
        entry.lookup = Some(receiver.clone());
        state.schedule(hash, None);
        state.lookups += 1;
        let shared = Arc::clone(self);
        tokio::spawn(async move {
            let lookup = shared.source.agent_info(session.token.expose_secret(), urgency);
            // The entry must not stay in this state, whatever happens.
            let result = AssertUnwindSafe(lookup).catch_unwind().await.unwrap_or(Err(LookupError::Busy));
            let finished = shared.finish_lookup(session, result, urgency);
            sender.send_replace(Some(finished));
            drop(permit);
        });
        receiver
    }

    /// Records the result of a lookup and returns it for the callers that wait.
    fn finish_lookup(
        &self,
        session: Arc<Session>,
        result: Result<Agent, LookupError>,
        urgency: Urgency,
    ) -> Result<Authenticated, IdentityError> {
        let Times { ttl, error_ttl, .. } = self.times;
        let hash = session.hash;
        let now = Instant::now();
        let before = session.agent.load_full();
        let mut state = self.state.lock();
        state.lookups -= 1;
        let Some(entry) = state.tokens.get_mut(&hash) else {
            // Entries with a lookup are never removed.
            return Err(IdentityError::Unavailable);
        };
        entry.lookup = None;
        let fresh_until = entry
            .fresh(now)
            .filter(|remembered| remembered.answer.is_ok())
            .map(|remembered| remembered.until);
        let mut remember = |answer, time| {
            if !ttl.is_zero() {
                entry.remembered = Some(Remembered { answer, until: now + time });
            }
        };
        let refused = |error| (Err(error), now + error_ttl);
        let (answer, due) = match &result {
            Ok(agent) => {
                let agent = before
                    .clone()
                    .filter(|before| **before == *agent)
                    .unwrap_or_else(|| Arc::new(agent.clone()));
                remember(Ok(Arc::clone(&agent)), ttl);
                session.agent.store(Some(Arc::clone(&agent)));
                (Ok(agent), now + self.times.renewal())
            }
            Err(LookupError::Unknown | LookupError::Forbidden) => {
                let error = match result {
                    Err(LookupError::Forbidden) => IdentityError::Forbidden,
                    _ => IdentityError::Unknown,
                };
                remember(Err(error), error_ttl);
                session.agent.store(None);
                refused(error)
            }
            Err(LookupError::Failed(_)) => match fresh_until {
                Some(until) => (Err(IdentityError::Unavailable), until.min(now + error_ttl)),
                None => {
                    remember(Err(IdentityError::Unavailable), error_ttl);
                    refused(IdentityError::Unavailable)
                }
            },
            // The rate limiter refused, so nothing is cached.
            Err(LookupError::Busy) => (Err(IdentityError::Unavailable), now + BUSY),
        };
        state.schedule(hash, Some(due));
        if let Ok(agent) = &answer {
            // What is forgotten here can be learned from the tracker.
            if state.by_id.len() >= MAX_TOKENS && !state.by_id.contains_key(&agent.id) {
                state.by_id.clear();
            }
            state.by_id.insert(agent.id, Arc::clone(agent));
            state.agents.add(hash);
            if let Urgency::New { from: Some(from), .. } = urgency {
                state.trusted_sources.add(from);
            }
        }
        drop(state);
        self.due_earlier.notify_one();
        if let Some(before) = before.filter(|before| session.agent.load().as_ref() != Some(before)) {
            let agent = before.id.get();
            tracing::info!(
                agent.id = agent,
                "GitLab says that an agent was revoked or changed: its streams end"
            );
            // The answer is recorded above; now subscribers may wake.
            self.version.send_modify(|version| *version += 1);
        }
        answer.map(|agent| session.authenticated(agent))
    }

    /// Renews agents that are connected, and removes expired entries.
    async fn renewals(self: Arc<Self>) {
        let permits = Arc::new(Semaphore::new(MAX_RENEWALS));
        // The semaphore is never closed.
        while let Ok(permit) = Arc::clone(&permits).acquire_owned().await {
            loop {
                let first = self.state.lock().due.first().map(|(at, _)| *at);
                match first {
                    Some(at) if at <= Instant::now() => break,
                    Some(at) => {
                        let _ = tokio::time::timeout_at(at, self.due_earlier.notified()).await;
                    }
                    None => self.due_earlier.notified().await,
                }
            }
            self.renew_first(permit);
        }
    }

    fn renew_first(self: &Arc<Self>, permit: OwnedSemaphorePermit) {
        let now = Instant::now();
        let mut state = self.state.lock();
        let Some((_, hash)) = state.due.first().copied().filter(|(at, _)| *at <= now) else { return };
        let Some(entry) = state.tokens.get(&hash) else {
            // There is no due time without an entry; if there were one, it would stay forever.
            state.due.pop_first();
            return;
        };
        if let Some(session) = entry.open_session() {
            let until = entry.remembered.as_ref().filter(|last| last.answer.is_ok()).map(|last| last.until);
            if until.is_some_and(|until| until + LATE < now) {
                self.metrics.late_renewals.inc();
                if state.late_told.is_none_or(|told| now >= told + LATE_TOLD) {
                    state.late_told = Some(now);
                    tracing::warn!(
                        "connected agents are checked later than agent.info_cache_ttl says: gitlab.api_rate_limit is \
                         too low for so many, or GitLab is too slow"
                    );
                }
            }
            self.look_up(&mut state, session, Urgency::Renewal, Some(permit));
        } else if let Some(until) = entry.fresh(now).map(|remembered| remembered.until) {
            state.schedule(hash, Some(until));
        } else {
            state.remove(hash);
        }
    }
}

#[cfg(test)]
mod tests;
