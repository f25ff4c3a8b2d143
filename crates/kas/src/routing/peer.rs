//! Other replicas, as this one calls them: links, the credential, and asking for a tunnel.
//!
//! `kas.internal.v1.Tunnels/Borrow`: the ask is only headers. Response headers mean that a tunnel is lent;
//! the first byte that is written after them starts the request. Everything else is an answer without a body,
//! see [`Refusal`].
//!
//! An asker that asks often offers to send one request after the other on the same stream (`kas-borrow:
//! again`), and the owner accepts in its response headers: then see [`kept`].
//!
//! Between two replicas there are links of three kinds: for asks that are answered at once and the requests
//! that they become, for asks that wait, and for the rest. Asks that wait may be many; they must not take
//! streams from requests that could run.
//!
//! Replicas of GitLab's kas, 14.1, are asked in another form, see [`gitlab`].

pub mod gitlab;
pub mod kept;
pub mod link;

use std::{
    collections::HashMap,
    sync::{
        Arc, LazyLock, Mutex, PoisonError, Weak,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use arc_swap::ArcSwap;
use bytes::Bytes;
use cluster::{Candidate, Mark, Replica, ReplicaHealth, Wire};
use grpc::{Code, Deadline, Status, format_timeout};
use h2::{RecvStream, SendStream};
use http::{HeaderMap, HeaderName, HeaderValue};
use ids::{AgentId, ConnectionId, ReplicaId, TokenHash};
use jsonwebtoken::{Algorithm, EncodingKey, Header};
use net::{http2::StreamReset, tls::Live};
use process::error::chain;
use settings::secret::ApiSecret;
use tokio::{
    sync::{Mutex as AsyncMutex, Semaphore},
    time::Instant,
};
use tunnel::{
    kas_end::{AgentKind, Descriptor, Info, Opening, Tunnel, TunnelBody, TunnelPool, gitlab::START},
    state::Mode,
};

use self::link::{CallError, DialError, LentBody, Link, Pump, RecvBody};
use identity::jwt::{AUDIENCE, ISSUER};

/// How long a replica's token is valid. A tenth of it may be lost to the difference of clocks.
const TOKEN_LIFE: Duration = Duration::from_secs(60);
/// How long it is used.
const TOKEN_USE: Duration = Duration::from_secs(20);
/// How long a token for a replica of GitLab's kas is valid, before and after now: as 14.1 makes its own.
const TOKEN_14_1: f64 = 5.0;

/// Asks of this replica for one agent, connection and method that one owner has not answered yet.
const ASKS: usize = 16;
/// An ask that is not answered at once after this time, or two round trips, waits: another owner is asked
/// too.
const HEDGE: Duration = Duration::from_millis(10);
/// Time to connect to a replica that seems to live.
const CONNECT: Duration = Duration::from_secs(2);
/// Time to connect to one that seems dead.
const CONNECT_SUSPECT: Duration = Duration::from_millis(300);
/// Links for what is answered at once.
const PROMPT_LINKS: usize = 2;

/// The ask's path.
pub const BORROW: &str = "/kas.internal.v1.Tunnels/Borrow";

/// Who asks.
pub const FROM: HeaderName = HeaderName::from_static("kas-hop-from");
/// Who is meant: an address may have gone to another replica.
pub const TO: HeaderName = HeaderName::from_static("kas-hop-to");
/// The agent.
pub const AGENT: HeaderName = HeaderName::from_static("kas-hop-agent");
/// One connection of it.
pub const CONNECTION: HeaderName = HeaderName::from_static("kas-hop-connection");
/// The method.
pub const METHOD: HeaderName = HeaderName::from_static("kas-hop-method");
/// How many replicas the request has passed: 1. The gateway never routes on.
pub const FORWARDED: HeaderName = HeaderName::from_static("kas-hop-forwarded");
/// Which agentk is at the end of the lent tunnel.
pub const KIND: HeaderName = HeaderName::from_static("kas-hop-agentk");
/// Response header of Borrow: the agentk at the tunnel's end is known to heed whose rights a request is meant
/// for.
pub const IMPERSONATES: HeaderName = HeaderName::from_static("kas-hop-agentk-impersonates");
/// In an ask: the asker can send several requests, one after the other. In its answer: it may, when the owner
/// says so after each.
pub const REUSE: HeaderName = HeaderName::from_static("kas-borrow");
/// The value of [`REUSE`].
pub const AGAIN: HeaderValue = HeaderValue::from_static("again");
/// Where the owner's table stands.
pub const EPOCH: HeaderName = HeaderName::from_static("kas-hop-epoch");
/// Where the owner's table stands.
pub const VERSION: HeaderName = HeaderName::from_static("kas-hop-version");

/// Signs this replica's calls with the first of the shared secrets.
pub struct Credential {
    key: ArcSwap<EncodingKey>,
    name: ReplicaId,
    current: Mutex<Option<(Instant, HeaderValue)>>,
}

impl std::fmt::Debug for Credential {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Credential").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Credential {
    /// Signs as `name` with `secret`.
    pub fn new(name: ReplicaId, secret: &ApiSecret) -> Self {
        Self {
            key: ArcSwap::from_pointee(EncodingKey::from_secret(secret.expose())),
            name,
            current: Mutex::default(),
        }
    }

    /// Signs with another secret from now on.
    pub fn rotate(&self, secret: &ApiSecret) {
        self.key.store(Arc::new(EncodingKey::from_secret(secret.expose())));
        *self.current.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Returns a value for `authorization`.
    pub fn authorization(&self) -> HeaderValue {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((made, value)) = &*current
            && made.elapsed() < TOKEN_USE
        {
            return value.clone();
        }
        let now = process::clock::wall().as_secs();
        let claims = serde_json::json!({
            "iss": ISSUER,
            "aud": AUDIENCE,
            "sub": self.name.as_str(),
            "iat": now,
            // Clocks differ by a few seconds.
            "nbf": now.saturating_sub(5),
            "exp": now + TOKEN_LIFE.as_secs(),
        });
        let value = self.sign(&claims);
        *current = Some((Instant::now(), value.clone()));
        value
    }

    /// Returns a value for `authorization` of one call to a replica of GitLab's kas: its address comes from
    /// Redis, so whoever can write there should not get a token that is good for long.
    pub fn authorization_14_1(&self) -> HeaderValue {
        let now = process::clock::wall().as_secs_f64();
        self.sign(&serde_json::json!({
            "iss": ISSUER,
            "aud": [AUDIENCE],
            "iat": now,
            "nbf": now - TOKEN_14_1,
            "exp": now + TOKEN_14_1,
        }))
    }

    fn sign(&self, claims: &serde_json::Value) -> HeaderValue {
        let token = jsonwebtoken::encode(&Header::new(Algorithm::HS256), claims, &self.key.load())
            .expect("an HMAC of a small object cannot fail");
        HeaderValue::try_from(format!("Bearer {token}")).expect("a JWT is ASCII")
    }
}

/// The links to all other replicas.
pub struct Peers {
    me: ReplicaId,
    credential: Arc<Credential>,
    tls: Option<Live<rustls::ClientConfig>>,
    peers: Mutex<HashMap<Replica, Arc<Peer>>>,
    gateways: gitlab::Gateways,
}

impl std::fmt::Debug for Peers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Peers").field("me", &self.me).finish_non_exhaustive()
    }
}

impl Peers {
    /// Calls others as `me`.
    pub fn new(
        me: ReplicaId,
        credential: Arc<Credential>,
        tls: Option<Live<rustls::ClientConfig>>,
    ) -> Arc<Self> {
        Arc::new(Self { me, credential, tls, peers: Mutex::default(), gateways: gitlab::Gateways::default() })
    }

    /// Returns the peer, which connects when it is needed.
    pub fn peer(&self, replica: &Replica) -> Arc<Peer> {
        let mut peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(peer) = peers.get(replica) {
            return Arc::clone(peer);
        }
        let peer = Arc::new(Peer {
            replica: replica.clone(),
            me: self.me.clone(),
            credential: Arc::clone(&self.credential),
            tls: self.tls.clone(),
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

    /// Whether this replica's private API has no certificates.
    pub fn is_plain(&self) -> bool {
        self.tls.is_none()
    }

    /// Closes the links to everybody who is not in `known`; requests that are open go on.
    pub fn retain(&self, known: impl Fn(&Replica) -> bool) {
        self.peers.lock().unwrap_or_else(PoisonError::into_inner).retain(|replica, _| known(replica));
    }

    /// Connects to an address of which only discovery knows, for one stream.
    ///
    /// # Errors
    /// See [`DialError`].
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn dial(&self, address: &Arc<str>) -> Result<Link, DialError> {
        Link::dial(address, self.tls.as_ref().map(Live::current), CONNECT).await
    }

    /// Returns a value for `authorization`.
    pub fn authorization(&self) -> HeaderValue {
        self.credential.authorization()
    }

    /// Returns this replica's name as a header's value.
    pub fn from(&self) -> HeaderValue {
        name(&self.me)
    }
}

fn name(replica: &ReplicaId) -> HeaderValue {
    HeaderValue::from_str(replica.as_str()).unwrap_or(HeaderValue::from_static("?"))
}

/// One link, made when it is needed and made anew when it has ended.
#[derive(Default)]
struct Slot(AsyncMutex<Option<Link>>);

impl Slot {
    async fn link(&self, peer: &Peer, within: Duration) -> Result<Link, DialError> {
        // One dials, the others wait for it.
        let mut slot = self.0.lock().await;
        if let Some(link) = &*slot
            && link.is_open()
        {
            return Ok(link.clone());
        }
        *slot = None;
        let begun = Instant::now();
        let link = Link::dial(&peer.replica.address, peer.tls.as_ref().map(Live::current), within).await?;
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
    prompt: [Slot; PROMPT_LINKS],
    waiting: Slot,
    control: Slot,
    next: AtomicUsize,
    /// Smoothed round trip, in microseconds; 0: not measured.
    rtt: AtomicU64,
    asks: Mutex<Asks>,
}

/// Who may ask, by queue.
#[derive(Default)]
struct Asks {
    map: HashMap<Queue, Weak<Semaphore>>,
    /// `map` is swept when it has this many entries.
    sweep_at: usize,
}

/// Queues that nobody stands in any more are swept when there are this many.
const SWEEP: usize = 1024;

/// What asks stand in one queue for.
type Queue = (AgentId, Option<ConnectionId>, Arc<str>);

impl std::fmt::Debug for Peer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Peer").field("replica", &self.replica).finish_non_exhaustive()
    }
}

/// What is asked for.
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
    /// Until when the owner may think about it.
    pub deadline: Deadline,
    /// Others like it will follow soon: the tunnel may be kept for them.
    pub again: bool,
}

/// Why an owner lends nothing.
#[derive(Debug)]
pub enum Refusal {
    /// It has no tunnel of the agent.
    NotHere(Mark),
    /// It has none, and does not say when that was so: GitLab's.
    NotThere,
    /// The agent is there, but cannot serve this; or too much waits there already.
    Final(Status),
    /// It cannot be reached, leaves, or is not the replica that was meant: ask another. For a person.
    Unavailable(String),
}

/// A lent tunnel. Dropped without a request, it goes back unused.
#[derive(Debug)]
pub struct Lent {
    /// Which agentk is at its end.
    pub kind: AgentKind,
    /// Whether it is known to heed whose rights a request is meant for.
    pub impersonates: bool,
    /// The owner may lend it for several requests.
    pub again: bool,
    answer: LentAnswer,
    send: SendStream<Bytes>,
}

/// What comes back from who lends.
enum LentAnswer {
    Ours(RecvStream),
    /// Of a replica of GitLab's kas, which has said that it is ready.
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

/// Another replica has checked the agent's.
static NO_TOKEN: LazyLock<TokenHash> = LazyLock::new(|| TokenHash::of(b""));

/// How long an owner may take to end a stream whose tunnel was given back to it.
const LET_GO: Duration = Duration::from_secs(2);

/// Of a tunnel that is borrowed once.
#[derive(Debug)]
struct NoPool;

impl TunnelPool for NoPool {
    fn parked(&self, _: &Arc<Tunnel>) {}
    fn ended(&self, _: &Arc<Tunnel>, _: bool) {}
}

impl Lent {
    /// A tunnel of a replica of GitLab's kas, which does not say whose agentk is at its end: one that cannot
    /// do more than 14.1's.
    fn of_gateway(opening: Opening, send: SendStream<Bytes>) -> Self {
        let answer = LentAnswer::Gateway(Box::new(opening));
        Self { kind: AgentKind::Old, impersonates: false, again: false, answer, send }
    }

    /// Returns what takes the place of `request_info`, where its owner writes that itself.
    pub fn start(&self) -> Option<Bytes> {
        matches!(self.answer, LentAnswer::Gateway(_)).then_some(START)
    }

    /// Returns the tunnel, and what must run for it to write. `owner` is told when it is free again.
    pub fn into_tunnel(
        self,
        agent: AgentId,
        owner: Option<Arc<dyn TunnelPool>>,
    ) -> (Arc<Tunnel>, Pump<TunnelBody>) {
        let info = Info {
            agent,
            instance: 0,
            token: *NO_TOKEN,
            kind: self.kind,
            impersonates: self.impersonates,
            descriptor: Arc::<Descriptor>::default(),
        };
        let reset = Arc::<StreamReset>::default();
        let flag = Arc::clone(&reset);
        let again = self.again && owner.is_some();
        let owner = owner.unwrap_or_else(|| Arc::new(NoPool));
        let cancel = Box::new(move || flag.reset());
        let (tunnel, out) = match self.answer {
            LentAnswer::Ours(stream) => {
                Tunnel::borrowed(info, grpc::boxed(LentBody::new(stream)), owner, cancel, again)
            }
            LentAnswer::Gateway(opening) => Tunnel::of_gitlab(info, *opening, owner, cancel),
        };
        (tunnel, Pump::new(out, self.send, reset))
    }
}

/// Runs what writes requests into a lent tunnel until it is given back, and lets the owner end the stream
/// then.
pub async fn write(mut pump: Pump<TunnelBody>) {
    (&mut pump).await;
    // An owner that does not end it is no longer listened to.
    let _ = tokio::time::timeout(LET_GO, pump.body_mut().read_rest()).await;
}

impl Peer {
    /// Returns who it is.
    pub fn replica(&self) -> &Replica {
        &self.replica
    }

    /// After this time without an answer another owner is asked too.
    pub fn hedge(&self) -> Duration {
        HEDGE.max(2 * Duration::from_micros(self.rtt.load(Ordering::Relaxed)))
    }

    fn measured(&self, rtt: Duration) {
        let new = u64::try_from(rtt.as_micros()).unwrap_or(u64::MAX);
        let old = self.rtt.load(Ordering::Relaxed);
        let smooth = if old == 0 { new } else { old - old / 8 + new / 8 };
        self.rtt.store(smooth.max(1), Ordering::Relaxed);
    }

    fn asks(&self, ask: &Ask) -> Arc<Semaphore> {
        let queue = (ask.agent, ask.connection, Arc::clone(&ask.method));
        let mut asks = self.asks.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(semaphore) = asks.map.get(&queue).and_then(Weak::upgrade) {
            return semaphore;
        }
        if asks.map.len() >= asks.sweep_at {
            asks.map.retain(|_, semaphore| semaphore.strong_count() > 0);
            asks.sweep_at = (2 * asks.map.len()).max(SWEEP);
        }
        let semaphore = Arc::new(Semaphore::new(ASKS));
        asks.map.insert(queue, Arc::downgrade(&semaphore));
        semaphore
    }

    /// Asks for a tunnel and waits until one is lent or surely none will be.
    ///
    /// At most 16 asks for one agent, connection and method stand at one owner; the others wait here, first
    /// come first served.
    ///
    /// # Errors
    /// See [`Refusal`].
    ///
    /// # Cancel safety
    /// Dropping the future takes the ask back.
    pub async fn ask(self: Arc<Self>, health: ReplicaHealth, ask: Ask) -> Result<Lent, Refusal> {
        let semaphore = self.asks(&ask);
        let _permit = semaphore.acquire().await.map_err(|error| Refusal::Unavailable(error.to_string()))?;
        let within = if health == ReplicaHealth::Suspect { CONNECT_SUSPECT } else { CONNECT };
        let prompt = &self.prompt[self.next.fetch_add(1, Ordering::Relaxed) % PROMPT_LINKS];
        // Boxed, so that it can be dropped while the second one lives.
        let mut first = Box::pin(self.ask_on(prompt, within, &ask));
        if let Ok(answer) = tokio::time::timeout(self.hedge(), first.as_mut()).await {
            return answer;
        }
        // It waits: on the link of those that do. The first ask is taken back once the second stands in the
        // queue.
        let second = self.ask_on(&self.waiting, within, &ask);
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
        let mut headers = HeaderMap::with_capacity(12);
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
        // Another one each time: HPACK's tables are for what comes again, as the credential.
        let mut correlation = ask.correlation.clone();
        correlation.set_sensitive(true);
        headers.insert(grpc::CORRELATION_ID, correlation);
        if let Some(remaining) = ask.deadline.remaining()
            && let Ok(mut value) = HeaderValue::try_from(format_timeout(remaining))
        {
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
                // Nobody looked at it: the link had its age, or the owner leaves. Another link may be taken.
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
        // A replica of an earlier build does not say so.
        let impersonates = headers.get(IMPERSONATES).is_some();
        let accepted = headers.get(REUSE).is_some_and(|value| *value == AGAIN);
        let again = ask.again && accepted && kind.mode() == Mode::Reusable;
        Ok(Lent { kind, impersonates, again, answer: LentAnswer::Ours(response.into_body()), send })
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

    /// As [`call`](Self::call), whoever listens at the address now: the answer says who it is.
    ///
    /// # Errors
    /// See [`CallFailure`].
    ///
    /// # Cancel safety
    /// As [`call`](Self::call).
    pub async fn call_whoever(
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

/// Why a call of the private API has no answer.
#[derive(Debug, thiserror::Error)]
pub enum CallFailure {
    /// There is no link.
    #[error(transparent)]
    Dial(#[from] DialError),
    /// The link or the stream broke.
    #[error(transparent)]
    Call(#[from] CallError),
}

/// How an agent's kind is named between replicas.
pub fn kind(peer: AgentKind) -> HeaderValue {
    HeaderValue::from_static(match peer {
        AgentKind::Ours => "ours",
        AgentKind::Old => "old",
        AgentKind::Recent => "recent",
    })
}

/// Reads where the owner's table stands.
fn mark(headers: &HeaderMap) -> Option<Mark> {
    let number = |key| headers.get(key)?.to_str().ok()?.parse().ok();
    Some(Mark { epoch: number(EPOCH)?, version: number(VERSION)? })
}

fn refusal(status: Status, headers: &HeaderMap) -> Refusal {
    match (status.code(), mark(headers)) {
        (Code::NotFound, Some(mark)) => Refusal::NotHere(mark),
        (Code::FailedPrecondition | Code::Unimplemented | Code::ResourceExhausted, _) => {
            Refusal::Final(status)
        }
        _ => Refusal::Unavailable(format!("{}: {}", status.code(), status.message())),
    }
}

/// Sorts candidates so that requests spread over those that are equally good. Replicas of GitLab's kas come
/// after those that live, since an ask that is taken back costs the agent a tunnel there, and before those
/// that do not.
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
