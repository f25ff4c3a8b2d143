//! Calls other replicas: links, the credential, and borrowing a tunnel.
//!
//! A borrow request (`kas.internal.v1.Tunnels/Borrow`) has only headers. If the response begins with headers,
//! a tunnel is lent, and the first byte that is then written starts the request. Every other response has no
//! body, see [`Refusal`].
//!
//! A replica that borrows often offers to send several requests on the same stream (`kas-borrow: again`). If
//! the owner accepts in its response headers, the tunnel is leased, see [`lease_pool`].
//!
//! There are three kinds of links between two replicas: for borrow requests that are answered immediately and
//! the requests that follow on their streams, for borrow requests that wait, and for all other calls. Many
//! borrow requests may wait, and must not take streams from requests that could run.
//!
//! Replicas of GitLab's kas 14.1 lend tunnels in another form, see [`gitlab`].

mod credential;
pub mod gitlab;
pub mod lease_pool;
pub mod link;
#[cfg(any(test, feature = "flaws"))]
mod records;

use std::{
    collections::HashMap,
    sync::{
        Arc, LazyLock, Weak,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use cluster::{Abandoned, Candidate, Mark, Replica, ReplicaHealth, Wire};
use grpc::{Code, Deadline, Outcome, Status, format_timeout};
use h2::{RecvStream, SendStream};
use http::{HeaderMap, HeaderName, HeaderValue};
use ids::{AgentId, ConnectionId, ReplicaId, TokenHash};
use net::{http::StreamReset, tls::Live};
use parking_lot::Mutex;
use process::error::chain;
use tokio::{
    sync::{Mutex as AsyncMutex, Semaphore, watch},
    time::Instant,
};
use tunnel::{
    features::Features,
    kas_end::{AgentKind, Descriptor, Info, Opening, Tunnel, TunnelBody, TunnelPool, gitlab::START},
    state::Mode,
};

pub use self::credential::Credential;
use self::link::{CallError, Connector, DialError, LentBody, Link, Pump, RecvBody, Tcp};
use crate::{refusal::unsupported, registry::Lack};

/// The maximum number of unanswered borrow requests to one owner for the same agent, connection, method and
/// needs.
const ASKS: usize = 16;
/// A borrow request that is not answered within this time, or two round trips, waits at the owner: another
/// owner is asked too.
const HEDGE: Duration = Duration::from_millis(10);
/// Time to connect to a replica that is not suspect.
const CONNECT: Duration = Duration::from_secs(2);
/// Time to connect to a suspect replica.
const CONNECT_SUSPECT: Duration = Duration::from_millis(300);
/// The number of links for borrow requests that are answered immediately.
const PROMPT_LINKS: usize = 2;

/// The path of a borrow request.
pub const BORROW: &str = "/kas.internal.v1.Tunnels/Borrow";

/// The replica that calls.
pub const FROM: HeaderName = HeaderName::from_static("kas-hop-from");
/// The replica that is called: its address may belong to another replica by now.
pub const TO: HeaderName = HeaderName::from_static("kas-hop-to");
/// The agent.
pub const AGENT: HeaderName = HeaderName::from_static("kas-hop-agent");
/// One connection of the agent.
pub const CONNECTION: HeaderName = HeaderName::from_static("kas-hop-connection");
/// The method.
pub const METHOD: HeaderName = HeaderName::from_static("kas-hop-method");
/// How many replicas the request has passed: 1. The owner never routes on.
pub const FORWARDED: HeaderName = HeaderName::from_static("kas-hop-forwarded");
/// The kind of agentk at the end of the lent tunnel.
pub const KIND: HeaderName = HeaderName::from_static("kas-hop-agentk");
/// Response header of Borrow: what the agentk at the end of the tunnel is known to support.
pub const MEETS: HeaderName = HeaderName::from_static("kas-hop-agentk-meets");
/// Response header of Borrow, for replicas of earlier builds: that agentk supports impersonation.
pub const IMPERSONATES: HeaderName = HeaderName::from_static("kas-hop-agentk-impersonates");
/// In a borrow request: what agentk must support, as in [`MEETS`]. Absent: nothing.
pub const NEEDS: HeaderName = HeaderName::from_static("kas-hop-needs");
/// In a borrow request, with the value `1`: the request may outlast the time in which replicas that drain end
/// other requests.
pub const LONG: HeaderName = HeaderName::from_static("kas-borrow-long");
/// In a borrow request, with the value `1`: the request has no end of its own, as a watch. The owner limits
/// how many of these an agentk gets that cannot cancel a request.
pub const ENDLESS: HeaderName = HeaderName::from_static("kas-borrow-endless");
/// In a borrow request: the borrower can send several requests, one after the other. In its response: it may
/// do so, if the owner renews the lease after each.
pub const REUSE: HeaderName = HeaderName::from_static("kas-borrow");
/// The value of [`REUSE`].
pub const AGAIN: HeaderValue = HeaderValue::from_static("again");
/// The epoch of the owner's table.
pub const EPOCH: HeaderName = HeaderName::from_static("kas-hop-epoch");
/// The version of the owner's table.
pub const VERSION: HeaderName = HeaderName::from_static("kas-hop-version");
/// In the answer to a borrow request that found no idle tunnel until its deadline: how many requests occupy
/// tunnels of the agent although their callers have left, if these are all tunnels of the agent.
pub const ABANDONED: HeaderName = HeaderName::from_static("kas-hop-abandoned");
/// Together with [`ABANDONED`]: how many milliseconds ago the last of these callers left.
pub const ABANDONED_FOR: HeaderName = HeaderName::from_static("kas-hop-abandoned-for");

/// The links to all other replicas.
pub struct Peers {
    me: ReplicaId,
    credential: Arc<Credential>,
    tls: Option<Live<rustls::ClientConfig>>,
    connector: Arc<dyn Connector>,
    peers: Mutex<HashMap<Replica, Arc<Peer>>>,
    gateways: gitlab::Gateways,
}

impl std::fmt::Debug for Peers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Peers").field("me", &self.me).finish_non_exhaustive()
    }
}

impl Peers {
    /// Calls other replicas as `me`.
    pub fn new(
        me: ReplicaId,
        credential: Arc<Credential>,
        tls: Option<Live<rustls::ClientConfig>>,
    ) -> Arc<Self> {
        Self::over(Arc::new(Tcp), me, credential, tls)
    }

    /// As [`new`](Self::new), over other connections than those of TCP.
    pub fn over(
        connector: Arc<dyn Connector>,
        me: ReplicaId,
        credential: Arc<Credential>,
        tls: Option<Live<rustls::ClientConfig>>,
    ) -> Arc<Self> {
        let (peers, gateways) = (Mutex::default(), gitlab::Gateways::default());
        Arc::new(Self { me, credential, tls, connector, peers, gateways })
    }

    /// Returns the peer. It connects when it is first used.
    pub fn peer(&self, replica: &Replica) -> Arc<Peer> {
        let mut peers = self.peers.lock();
        if let Some(peer) = peers.get(replica) {
            return Arc::clone(peer);
        }
        let peer = Arc::new(Peer {
            replica: replica.clone(),
            me: self.me.clone(),
            credential: Arc::clone(&self.credential),
            tls: self.tls.clone(),
            connector: Arc::clone(&self.connector),
            prompt: Default::default(),
            waiting: Slot::default(),
            control: Slot::default(),
            next: AtomicUsize::new(0),
            rtt: AtomicU64::new(0),
            asks: Mutex::default(),
        });
        peers.insert(replica.clone(), Arc::clone(&peer));
        peer
    }

    /// Whether the private API has no certificates.
    pub fn is_plain(&self) -> bool {
        self.tls.is_none()
    }

    /// Closes the links to replicas that are not `known`. Open requests continue.
    pub fn retain(&self, known: impl Fn(&Replica) -> bool) {
        self.peers.lock().retain(|replica, _| known(replica));
    }

    /// Connects to an address that only discovery knows, for one stream.
    ///
    /// # Errors
    /// See [`DialError`].
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn dial(&self, address: &Arc<str>) -> Result<Link, DialError> {
        Link::dial(&*self.connector, address, self.tls.as_ref().map(Live::current), CONNECT).await
    }

    /// Returns a value for `authorization`.
    pub fn authorization(&self) -> HeaderValue {
        self.credential.authorization()
    }

    /// Returns the name of this replica as a header value.
    pub fn from(&self) -> HeaderValue {
        name(&self.me)
    }
}

fn name(replica: &ReplicaId) -> HeaderValue {
    HeaderValue::from_str(replica.as_str()).unwrap_or(HeaderValue::from_static("?"))
}

/// One link, created when it is needed and again after it has ended.
#[derive(Default)]
struct Slot(AsyncMutex<Option<Link>>);

impl Slot {
    async fn link(&self, peer: &Peer, within: Duration) -> Result<Link, DialError> {
        // The first caller dials, and the others wait for it.
        let mut slot = self.0.lock().await;
        if let Some(link) = &*slot
            && link.is_open()
        {
            return Ok(link.clone());
        }
        *slot = None;
        let begun = Instant::now();
        let tls = peer.tls.as_ref().map(Live::current);
        let link = Link::dial(&*peer.connector, &peer.replica.address, tls, within).await?;
        peer.measured(begun.elapsed());
        Ok(slot.insert(link).clone())
    }
}

/// Another replica.
pub struct Peer {
    replica: Replica,
    me: ReplicaId,
    credential: Arc<Credential>,
    tls: Option<Live<rustls::ClientConfig>>,
    connector: Arc<dyn Connector>,
    prompt: [Slot; PROMPT_LINKS],
    waiting: Slot,
    control: Slot,
    next: AtomicUsize,
    /// Smoothed round trip, in microseconds; 0: not measured.
    rtt: AtomicU64,
    asks: Mutex<Asks>,
}

/// The borrow requests, by queue.
#[derive(Default)]
struct Asks {
    map: HashMap<Queue, Weak<AskQueue>>,
    /// `map` is swept if it has this many entries.
    sweep_at: usize,
}

/// Unused queues are removed if there are at least this many queues.
const SWEEP: usize = 1024;

/// The borrow requests of one queue have these in common.
type Queue = (AgentId, Option<ConnectionId>, Arc<str>, Features);

/// The borrow requests of one queue: those that the owner has not answered, and those that wait to be sent.
struct AskQueue {
    permits: Semaphore,
    /// What the owner said last when it had no idle tunnel, and when. `None`: it has lent one since.
    abandoned: watch::Sender<Option<(Abandoned, Instant)>>,
}

impl AskQueue {
    fn new() -> Self {
        Self { permits: Semaphore::new(ASKS), abandoned: watch::Sender::default() }
    }

    /// Records the owner's answer for borrow requests of the queue that are never sent.
    fn record(&self, answer: &Result<Lent, Refusal>) {
        match answer {
            Ok(_) => drop(self.abandoned.send_replace(None)),
            Err(Refusal::Busy(abandoned)) => {
                self.abandoned.send_replace(abandoned.map(|abandoned| (abandoned, Instant::now())));
            }
            Err(_) => {}
        }
    }

    /// Waits until the owner has said that all tunnels are occupied by abandoned requests.
    async fn abandoned(&self) -> Option<Abandoned> {
        let mut abandoned = self.abandoned.subscribe();
        let known = abandoned.wait_for(Option::is_some).await.ok()?;
        known.map(|(abandoned, at)| Abandoned { since: abandoned.since + at.elapsed(), ..abandoned })
    }
}

impl std::fmt::Debug for Peer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Peer").field("replica", &self.replica).finish_non_exhaustive()
    }
}

/// A borrow request.
#[derive(Debug, Clone)]
pub struct Ask {
    /// The agent.
    pub agent: AgentId,
    /// One connection of it, or any.
    pub connection: Option<ConnectionId>,
    /// The full path.
    pub method: Arc<str>,
    /// The request id.
    pub correlation: HeaderValue,
    /// The deadline of the request.
    pub deadline: Deadline,
    /// How long the owner may wait for a tunnel.
    pub until: Instant,
    /// Similar requests will follow soon, so a lease is worthwhile.
    pub again: bool,
    /// What agentk must support.
    pub needs: Features,
    /// The request may outlast the time in which replicas that drain end other requests.
    pub is_long: bool,
    /// The request has no end of its own.
    pub is_endless: bool,
}

/// Why an owner lends no tunnel.
#[derive(Debug)]
pub enum Refusal {
    /// It has no tunnel of the agent.
    NotHere(Mark),
    /// As [`NotHere`](Self::NotHere), but the version of its table is not known: a replica of GitLab's kas.
    NotThere,
    /// The agent is there, but none of its tunnels was idle until the deadline. With a value: all of them are
    /// occupied by abandoned requests.
    Busy(Option<Abandoned>),
    /// The agent is there but cannot serve the request, or too many requests wait there.
    Final(Status),
    /// It cannot be reached, drains, or is not the replica that was called: another one should be asked. The
    /// text is for people.
    Unavailable(String),
}

/// A lent tunnel. Dropped without a request, it is returned unused.
#[derive(Debug)]
pub struct Lent {
    /// The kind of agentk at its end.
    pub kind: AgentKind,
    /// What that agentk is known to support.
    pub features: Features,
    /// The owner may lease it for further requests.
    pub again: bool,
    answer: LentAnswer,
    send: SendStream<Bytes>,
}

/// The response of the owner.
enum LentAnswer {
    Ours(RecvStream),
    /// Of a replica of GitLab's kas that has a tunnel ready.
    Gateway(Box<Opening>),
}

impl std::fmt::Debug for LentAnswer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Ours(_) => "Ours",
            Self::Gateway(_) => "Gateway",
        })
    }
}

/// In place of the agent's token, which another replica has verified.
static NO_TOKEN: LazyLock<TokenHash> = LazyLock::new(|| TokenHash::of(b""));

/// How long an owner may take to end a stream after its tunnel was returned.
const LET_GO: Duration = Duration::from_secs(2);

/// The pool of a tunnel that is borrowed for one request.
#[derive(Debug)]
struct NoPool;

impl TunnelPool for NoPool {
    fn parked(&self, _: &Arc<Tunnel>) {}
    fn ended(&self, _: &Arc<Tunnel>, _: bool) {}
}

impl Lent {
    /// Creates a tunnel of a replica of GitLab's kas. That does not report the kind of agentk, so only the
    /// features of 14.1 are used.
    fn of_gateway(opening: Opening, send: SendStream<Bytes>) -> Self {
        let answer = LentAnswer::Gateway(Box::new(opening));
        Self { kind: AgentKind::Old, features: Features::NONE, again: false, answer, send }
    }

    /// Returns what replaces `request_info`, if the owner writes that itself.
    pub fn start(&self) -> Option<Bytes> {
        matches!(self.answer, LentAnswer::Gateway(_)).then_some(START)
    }

    /// Returns the tunnel, and the future that writes to it and must be polled. `pool` is notified each
    /// time the tunnel is free.
    pub fn into_tunnel(
        self,
        agent: AgentId,
        pool: Option<Arc<dyn TunnelPool>>,
    ) -> (Arc<Tunnel>, Pump<TunnelBody>) {
        let info = Info {
            agent,
            instance: 0,
            token: *NO_TOKEN,
            kind: self.kind,
            features: self.features,
            version: None,
            descriptor: Arc::<Descriptor>::default(),
        };
        let reset = Arc::<StreamReset>::default();
        let flag = Arc::clone(&reset);
        let leased = self.again && pool.is_some();
        let pool = pool.unwrap_or_else(|| Arc::new(NoPool));
        let cancel = Box::new(move || flag.reset());
        let (tunnel, out) = match self.answer {
            LentAnswer::Ours(stream) => {
                Tunnel::borrowed(info, grpc::boxed(LentBody::new(stream)), pool, cancel, leased)
            }
            LentAnswer::Gateway(opening) => Tunnel::of_gitlab(info, *opening, pool, cancel),
        };
        (tunnel, Pump::new(out, self.send, reset))
    }
}

/// Writes requests into a leased tunnel until it is returned. Then lets the owner end the stream.
pub async fn write(mut pump: Pump<TunnelBody>) {
    (&mut pump).await;
    // If the owner does not end the stream, it is reset.
    let _ = tokio::time::timeout(LET_GO, pump.body_mut().read_rest()).await;
}

impl Peer {
    /// Returns the replica.
    pub fn replica(&self) -> &Replica {
        &self.replica
    }

    /// Returns after which time without an answer another owner is asked too.
    pub fn hedge(&self) -> Duration {
        HEDGE.max(2 * Duration::from_micros(self.rtt.load(Ordering::Relaxed)))
    }

    fn measured(&self, rtt: Duration) {
        let new = u64::try_from(rtt.as_micros()).unwrap_or(u64::MAX);
        let old = self.rtt.load(Ordering::Relaxed);
        let smooth = if old == 0 { new } else { old - old / 8 + new / 8 };
        self.rtt.store(smooth.max(1), Ordering::Relaxed);
    }

    fn queue(&self, ask: &Ask) -> Arc<AskQueue> {
        let key = (ask.agent, ask.connection, Arc::clone(&ask.method), ask.needs);
        let mut asks = self.asks.lock();
        if let Some(queue) = asks.map.get(&key).and_then(Weak::upgrade) {
            return queue;
        }
        if asks.map.len() >= asks.sweep_at {
            asks.map.retain(|_, queue| queue.strong_count() > 0);
            asks.sweep_at = (2 * asks.map.len()).max(SWEEP);
        }
        let queue = Arc::new(AskQueue::new());
        asks.map.insert(key, Arc::downgrade(&queue));
        queue
    }

    /// Borrows a tunnel: waits until one is lent, or certainly none will be.
    ///
    /// At most 16 borrow requests for the same agent, connection, method and needs are sent to one owner.
    /// Further ones wait here, in the order of their arrival. One that is not sent until its deadline waits
    /// for what the owner answers to the others.
    ///
    /// # Errors
    /// See [`Refusal`].
    ///
    /// # Cancel safety
    /// Dropping the future cancels the borrow request.
    pub async fn ask(self: Arc<Self>, health: ReplicaHealth, ask: Ask) -> Result<Lent, Refusal> {
        let queue = self.queue(&ask);
        let Ok(permit) = tokio::time::timeout_at(ask.until, queue.permits.acquire()).await else {
            return Err(Refusal::Busy(queue.abandoned().await));
        };
        let _permit = permit.map_err(|error| Refusal::Unavailable(error.to_string()))?;
        let answer = self.send(health, &ask).await;
        queue.record(&answer);
        answer
    }

    async fn send(&self, health: ReplicaHealth, ask: &Ask) -> Result<Lent, Refusal> {
        let within = if health == ReplicaHealth::Suspect { CONNECT_SUSPECT } else { CONNECT };
        let prompt = &self.prompt[self.next.fetch_add(1, Ordering::Relaxed) % PROMPT_LINKS];
        // Boxed, so that it can be dropped before the second one.
        let mut first = Box::pin(self.ask_on(prompt, within, ask));
        if let Ok(answer) = tokio::time::timeout(self.hedge(), first.as_mut()).await {
            return answer;
        }
        // It waits, so it moves to the link of requests that wait. The first request is cancelled once the
        // second one is in the owner's queue.
        let second = self.ask_on(&self.waiting, within, ask);
        tokio::pin!(second);
        tokio::select! {
            answer = first.as_mut() => return answer,
            answer = second.as_mut() => return answer,
            () = tokio::time::sleep(self.hedge()) => {}
        }
        drop(first);
        second.await
    }

    async fn ask_on(&self, slot: &Slot, within: Duration, ask: &Ask) -> Result<Lent, Refusal> {
        let unavailable = |error: &dyn std::error::Error| Refusal::Unavailable(chain(error));
        let method = HeaderValue::from_str(&ask.method)
            .map_err(|_| Refusal::Final(Status::new(Code::Unimplemented, "a method is printable ASCII")))?;
        let mut headers = HeaderMap::with_capacity(13);
        headers.insert(FROM, name(&self.me));
        headers.insert(TO, name(&self.replica.id));
        headers.insert(AGENT, ask.agent.get().into());
        if let Some(connection) = ask.connection {
            headers.insert(CONNECTION, connection.get().into());
        }
        headers.insert(METHOD, method);
        headers.insert(FORWARDED, HeaderValue::from_static("1"));
        if ask.again {
            headers.insert(REUSE, AGAIN);
        }
        if !ask.needs.is_empty()
            && let Ok(needs) = HeaderValue::try_from(ask.needs.to_string())
        {
            headers.insert(NEEDS, needs);
        }
        if ask.is_long {
            headers.insert(LONG, HeaderValue::from_static("1"));
        }
        if ask.is_endless {
            headers.insert(ENDLESS, HeaderValue::from_static("1"));
        }
        // The value is different each time, and HPACK's tables are for values that are repeated.
        let mut correlation = ask.correlation.clone();
        correlation.set_sensitive(true);
        headers.insert(grpc::CORRELATION_ID, correlation);
        let remaining = ask.until.saturating_duration_since(Instant::now());
        if let Ok(mut value) = HeaderValue::try_from(format_timeout(remaining)) {
            value.set_sensitive(true);
            headers.insert("grpc-timeout", value);
        }
        let mut again = true;
        let (response, send) = loop {
            let link = slot.link(self, within).await.map_err(|error| unavailable(&error))?;
            let mut request = link.request(BORROW, self.credential.authorization());
            request.headers_mut().extend(headers.clone());
            match link.open(request).await {
                Ok(opened) => break opened,
                // It was not processed: the link has reached its maximum age, or the owner drains. Another
                // link may work.
                Err(CallError::Refused(_)) if again => again = false,
                Err(error) => return Err(unavailable(&error)),
            }
        };
        let headers = response.headers();
        if let Some(status) = Status::from_headers(headers) {
            return Err(refusal(status, headers));
        }
        let kind = match headers.get(KIND).map(HeaderValue::as_bytes) {
            Some(b"ours") => AgentKind::Ours,
            Some(b"old") => AgentKind::Old,
            Some(b"recent") => AgentKind::Recent,
            _ => {
                let status = response.status();
                return Err(Refusal::Unavailable(format!(
                    "it answered with HTTP status {status} and names no agentk"
                )));
            }
        };
        let features = features(headers);
        if !features.contains(ask.needs) {
            // An owner of an earlier version lends any tunnel. This one is returned unused.
            let lack = Lack { missing: ask.needs.without(features), version: None };
            return Err(Refusal::Final(unsupported(ask.agent, lack)));
        }
        let accepted = headers.get(REUSE).is_some_and(|value| *value == AGAIN);
        let again = ask.again && accepted && kind.mode() == Mode::Reusable;
        Ok(Lent { kind, features, again, answer: LentAnswer::Ours(response.into_body()), send })
    }

    /// Calls a method of the private API with one message.
    ///
    /// # Errors
    /// See [`CallFailure`].
    ///
    /// # Cancel safety
    /// Dropping the future, or the body, cancels the call.
    pub async fn call(&self, path: &str, message: Bytes) -> Result<http::Response<RecvBody>, CallFailure> {
        self.call_as(path, message, true).await
    }

    /// As [`call`](Self::call), but any replica at the address may answer. The answer names it.
    ///
    /// # Errors
    /// See [`CallFailure`].
    ///
    /// # Cancel safety
    /// As [`call`](Self::call).
    pub async fn call_any(
        &self,
        path: &str,
        message: Bytes,
    ) -> Result<http::Response<RecvBody>, CallFailure> {
        self.call_as(path, message, false).await
    }

    async fn call_as(
        &self,
        path: &str,
        message: Bytes,
        meant: bool,
    ) -> Result<http::Response<RecvBody>, CallFailure> {
        let mut again = true;
        loop {
            let link = self.control.link(self, CONNECT).await?;
            let mut request = link.request(path, self.credential.authorization());
            request.headers_mut().insert(FROM, name(&self.me));
            if meant {
                request.headers_mut().insert(TO, name(&self.replica.id));
            }
            match link.call(request, message.clone()).await {
                Err(CallError::Refused(_)) if again => again = false,
                answered => return Ok(answered?),
            }
        }
    }
}

/// Why a call of the private API failed.
#[derive(Debug, thiserror::Error)]
pub enum CallFailure {
    /// No link could be opened.
    #[error(transparent)]
    Dial(#[from] DialError),
    /// The link or the stream broke.
    #[error(transparent)]
    Call(#[from] CallError),
}

/// Returns the name of a kind of agentk, as replicas send it.
pub fn kind(kind: AgentKind) -> HeaderValue {
    HeaderValue::from_static(match kind {
        AgentKind::Ours => "ours",
        AgentKind::Old => "old",
        AgentKind::Recent => "recent",
    })
}

/// Writes into the answer to a borrow request what the agentk at the end of the tunnel supports.
pub fn write_features(features: Features, headers: &mut HeaderMap) {
    if features.contains(Features::IMPERSONATION) {
        headers.insert(IMPERSONATES, HeaderValue::from_static("1"));
    }
    if !features.is_empty()
        && let Ok(value) = HeaderValue::try_from(features.to_string())
    {
        headers.insert(MEETS, value);
    }
}

/// Reads what [`write_features`] wrote, also in a replica of an earlier build, which knows only
/// impersonation.
fn features(headers: &HeaderMap) -> Features {
    match headers.get(MEETS) {
        Some(meets) => Features::met(meets.as_bytes()),
        None => Features::IMPERSONATION.when(headers.contains_key(IMPERSONATES)),
    }
}

/// Reads the version of the owner's table.
fn mark(headers: &HeaderMap) -> Option<Mark> {
    let number = |key| headers.get(key)?.to_str().ok()?.parse().ok();
    Some(Mark { epoch: number(EPOCH)?, version: number(VERSION)? })
}

/// Reads whether all tunnels of the agent are occupied by abandoned requests.
fn abandoned(headers: &HeaderMap) -> Option<Abandoned> {
    let number = |key| headers.get(key)?.to_str().ok()?.parse::<u32>().ok();
    let since = Duration::from_millis(number(ABANDONED_FOR)?.into());
    number(ABANDONED).filter(|tunnels| *tunnels > 0).map(|tunnels| Abandoned { tunnels, since })
}

fn refusal(status: Status, headers: &HeaderMap) -> Refusal {
    match (status.code(), mark(headers)) {
        (Code::NotFound, Some(mark)) => Refusal::NotHere(mark),
        (Code::DeadlineExceeded, _) => Refusal::Busy(abandoned(headers)),
        (Code::FailedPrecondition | Code::Unimplemented | Code::ResourceExhausted, _) => {
            Refusal::Final(status)
        }
        // The clocks differ, which lasts: unless another owner lends a tunnel, the caller is told at once and
        // can go to another replica. A wrong secret, which lasts only while secrets are replaced, has no
        // outcome.
        (Code::Unauthenticated, _) if status.outcome() == Some(Outcome::NotStarted) => {
            Refusal::Final(Status::new(Code::Unavailable, status.message()).with_outcome(Outcome::NotStarted))
        }
        _ => Refusal::Unavailable(format!("{}: {}", status.code(), status.message())),
    }
}

/// Sorts candidates so that requests spread over those that are equally good. Replicas of GitLab's kas come
/// after live ones, since a cancelled request costs the agent a tunnel there, and before suspect ones.
pub fn spread(candidates: &mut [Candidate], turn: usize) {
    candidates.sort_by_key(|candidate| match (candidate.health, candidate.wire) {
        (ReplicaHealth::Live, Wire::Own) => 0,
        (ReplicaHealth::Draining, Wire::Own) => 1,
        (_, Wire::Gitlab) => 2,
        (_, Wire::Own) => 3,
    });
    for wire in [Wire::Own, Wire::Gitlab] {
        let equal = |candidate: &Candidate| candidate.health == ReplicaHealth::Live && candidate.wire == wire;
        let Some(first) = candidates.iter().position(equal) else { continue };
        let count = candidates[first..].iter().take_while(|candidate| equal(candidate)).count();
        candidates[first..first + count].rotate_left(turn % count);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_owner_without_an_idle_tunnel_tells_whether_abandoned_requests_occupy_all_of_them() {
        let told = |tunnels: Option<&'static str>, since: Option<&'static str>| {
            let mut headers = HeaderMap::new();
            headers.extend(tunnels.map(|value| (ABANDONED, HeaderValue::from_static(value))));
            headers.extend(since.map(|value| (ABANDONED_FOR, HeaderValue::from_static(value))));
            match refusal(Status::new(Code::DeadlineExceeded, "late"), &headers) {
                Refusal::Busy(abandoned) => abandoned,
                other => panic!("{other:?}"),
            }
        };
        let abandoned = Abandoned { tunnels: 10, since: Duration::from_millis(35_200) };
        assert_eq!(told(Some("10"), Some("35200")), Some(abandoned));
        for (tunnels, since) in
            [("0", "1"), ("-1", "1"), ("1", "x"), ("4294967296", "1"), ("1", "4294967296")]
        {
            assert_eq!(told(Some(tunnels), Some(since)), None, "{tunnels} {since}");
        }
        // An earlier build.
        assert_eq!(told(None, None), None);
        assert_eq!(told(Some("1"), None), None);
    }

    #[test]
    fn clocks_that_differ_end_a_request_and_another_secret_may_be_right_soon() {
        let status = |message: &str| Status::new(Code::Unauthenticated, message);
        let clocks = status("the clock is 3600 s ahead").with_outcome(Outcome::NotStarted);
        let Refusal::Final(told) = refusal(clocks, &HeaderMap::new()) else { panic!("it is final") };
        assert_eq!((told.code(), told.outcome()), (Code::Unavailable, Some(Outcome::NotStarted)));
        assert_eq!(told.message(), "the clock is 3600 s ahead");
        let secret = refusal(status("JWT validation failed"), &HeaderMap::new());
        assert!(matches!(secret, Refusal::Unavailable(_)), "{secret:?}");
    }

    /// Fails if a borrow request waits for its turn without an end: its caller is then told nothing of the
    /// abandoned requests.
    #[tokio::test(start_paused = true)]
    async fn borrow_requests_that_were_never_sent_learn_what_the_owner_answered_to_others() {
        let queue = AskQueue::new();
        let abandoned = Abandoned { tunnels: 2, since: Duration::from_secs(1) };
        let (known, ()) = tokio::join!(queue.abandoned(), async {
            queue.record(&Err(Refusal::Busy(Some(abandoned))));
        });
        assert_eq!(known, Some(abandoned));
        tokio::time::advance(Duration::from_secs(3)).await;
        let later = Abandoned { since: Duration::from_secs(4), ..abandoned };
        assert_eq!(queue.abandoned().await, Some(later));
        // Another answer replaces it.
        queue.record(&Err(Refusal::Busy(None)));
        assert!(tokio::time::timeout(Duration::from_secs(60), queue.abandoned()).await.is_err());
    }
}
