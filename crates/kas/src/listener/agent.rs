//! The agent listener: tunnels and configuration streams.

use std::{
    collections::HashMap,
    net::SocketAddr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use cluster::{AgentMeta, Connection as AgentConnectionInfo, Lease, Tracker};
use grpc::{Code, MessageReader, Status};
use http::{HeaderMap, HeaderValue, Request, Response};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use ids::{AgentId, ConnectionId, TokenHash};
use proto::gitlab::agent::{
    agent_configuration::rpc::ConfigurationRequest,
    agent_registrar::rpc::{RegisterRequest, RegisterResponse, UnregisterRequest, UnregisterResponse},
    entity,
};
use runtime::http2::{Answer, Body, Connection, GoAway, Refusal, Service, Standing, StreamReset, StreamSlot};
use tokio::time::Instant;
use tunnel::{
    IMPERSONATES_HEADER, INSTANCE_HEADER, MAX_IDLE_HEADER, REPLICA_HEADER, REPLICAS_HEADER, REUSE,
    RUN_HEADER, SOCKET_HEADER, TUNNEL_HEADER,
    kas_end::{Info, Opening, Owner, Peer, Retire, Tunnel, Unasked, read_descriptor},
};

use crate::{
    agent_config::{AgentConfigs, ConfigBody, ConfigStream},
    auth,
    identity::{Authenticated, Identity, IdentityError},
    metrics::{ListenerName, Metrics, Reason},
    rate_limit::RateLimit,
    registrar::{self, Registrar},
    tunnel_registry::{RegistryOwner, TunnelRegistry},
};

use super::{Attempts, Naming, Trust, count_refusal, failed, not_grpc, too_large, too_many_fields};

const CONNECT: &str = "/gitlab.agent.reverse_tunnel.rpc.ReverseTunnel/Connect";
const GET_CONFIGURATION: &str = "/gitlab.agent.agent_configuration.rpc.AgentConfiguration/GetConfiguration";
const REGISTER: &str = "/gitlab.agent.agent_registrar.rpc.AgentRegistrar/Register";
const UNREGISTER: &str = "/gitlab.agent.agent_registrar.rpc.AgentRegistrar/Unregister";

/// An agent must send its descriptor, or its request, within this time.
const FIRST_MESSAGE: Duration = Duration::from_secs(10);
/// A tunnel above the limit is held this long, unregistered, before it ends with OK: a refusal
/// would cost minutes of back-off in GitLab's agents.
const HOLD: Duration = Duration::from_secs(10);
/// The largest `ConfigurationRequest`.
const MAX_REQUEST: usize = 64 * 1024;
/// Idle streams of one agent that a proxy cut before this age say that there is a proxy.
const PROXY_CUT: Duration = Duration::from_secs(75);
/// Our agents behind a proxy replace a tunnel that has been idle for this share of the time after which idle streams
/// are ended: 45 s of 50 s, before the usual idle timer of 60 s cuts it.
const PROXIED_IDLE_OURS: f64 = 0.9;
/// How long that is remembered.
const PROXY_MEMORY: Duration = Duration::from_secs(3600);
/// How many agents that is remembered of.
const PROXY_AGENTS: usize = 100_000;
/// Processes of one transport connection that register: one, but where a proxy joins several.
const MAX_PROCESSES: usize = 16;
/// The longest instance id and socket address that are looked at.
const MAX_HINT: usize = 128;

/// What the agent listener needs.
pub struct AgentListener {
    identity: Arc<dyn Identity>,
    registry: Arc<TunnelRegistry>,
    owner: Arc<dyn Owner>,
    tracker: Arc<dyn Tracker>,
    registrar: Arc<Registrar>,
    configs: Arc<AgentConfigs>,
    metrics: Arc<Metrics>,
    naming: Naming,
    proxied_idle: Duration,
    rate_limit: Arc<RateLimit>,
    failures: Arc<RateLimit>,
    attempts: Attempts,
    /// The process leaves now: what opens still ends at once.
    left: AtomicBool,
    transports: Mutex<HashMap<u64, Weak<Transport>>>,
    /// How many configuration streams each connection has here.
    present: Mutex<HashMap<(AgentId, ConnectionId), usize>>,
    serial: AtomicU64,
    /// Agents behind a proxy that cuts idle streams, and when that was seen.
    proxied: Mutex<HashMap<AgentId, Instant>>,
}

impl std::fmt::Debug for AgentListener {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AgentListener").field("naming", &self.naming).finish_non_exhaustive()
    }
}

/// What an [`AgentListener`] is made of.
pub struct Parts {
    /// Who is this token?
    pub identity: Arc<dyn Identity>,
    /// Where tunnels go.
    pub registry: Arc<TunnelRegistry>,
    /// Where connections are announced.
    pub tracker: Arc<dyn Tracker>,
    /// Who says that it runs.
    pub registrar: Arc<Registrar>,
    /// Where configurations come from.
    pub configs: Arc<AgentConfigs>,
    /// What is counted.
    pub metrics: Arc<Metrics>,
    /// How this replica names itself.
    pub naming: Naming,
    /// Idle streams behind a proxy end after this time.
    pub proxied_idle: Duration,
    /// What agents' tokens are charged.
    pub rate_limit: Arc<RateLimit>,
    /// What tokens are charged that are not right.
    pub failures: Arc<RateLimit>,
    /// What one connection may try.
    pub attempts: Attempts,
}

impl AgentListener {
    /// Makes the listener's service.
    pub fn new(parts: Parts) -> Arc<Self> {
        let Parts {
            identity,
            registry,
            tracker,
            registrar,
            configs,
            metrics,
            naming,
            proxied_idle,
            rate_limit,
            failures,
            attempts,
        } = parts;
        Arc::new(Self {
            identity,
            owner: Arc::new(RegistryOwner {
                registry: Arc::clone(&registry),
                rate_limit: Arc::clone(&rate_limit),
            }),
            rate_limit,
            failures,
            attempts,
            left: AtomicBool::new(false),
            registry,
            tracker,
            registrar,
            configs,
            metrics,
            naming,
            proxied_idle,
            transports: Mutex::default(),
            present: Mutex::default(),
            serial: AtomicU64::new(0),
            proxied: Mutex::default(),
        })
    }

    /// Returns who says that it runs.
    pub fn registrar(&self) -> Arc<Registrar> {
        Arc::clone(&self.registrar)
    }

    /// Notes a configuration stream of a connection; whether it is the only one.
    fn comes(&self, agent: AgentId, id: ConnectionId) -> bool {
        let mut present = self.present.lock().unwrap_or_else(PoisonError::into_inner);
        let streams = present.entry((agent, id)).or_default();
        *streams += 1;
        *streams == 1
    }

    /// Notes the end of a configuration stream; whether it was the last one of its connection.
    fn goes(&self, agent: AgentId, id: ConnectionId) -> bool {
        let mut present = self.present.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(streams) = present.get_mut(&(agent, id)) else { return true };
        *streams -= 1;
        let last = *streams == 0;
        if last {
            present.remove(&(agent, id));
        }
        last
    }

    /// Cuts the streams of agents and tokens that are no longer valid, until it is dropped.
    pub async fn watch_identity(self: Arc<Self>) {
        let mut changes = self.identity.changes();
        while changes.changed().await.is_ok() {
            for transport in self.transports() {
                transport.recheck().await;
            }
            self.registrar.recheck().await;
        }
    }

    /// Ends every stream: the process leaves now.
    pub fn end_all(&self) {
        self.left.store(true, Ordering::Relaxed);
        for transport in self.transports() {
            let status = Status::new(Code::Unavailable, "this kas is shutting down");
            let state = transport.state();
            let tunnels: Vec<_> = state.tunnels.iter().filter_map(|held| held.tunnel.upgrade()).collect();
            let configs: Vec<_> = state.configs.iter().filter_map(|held| held.stream.upgrade()).collect();
            drop(state);
            for tunnel in tunnels {
                if tunnel.carries_request() {
                    tunnel.end(status.clone());
                } else {
                    // Who has it lent is not waited for.
                    tunnel.take_back();
                    self.registry.retire(&tunnel, Retire::Ok);
                }
            }
            for config in configs {
                config.end(None);
            }
        }
    }

    fn transports(&self) -> Vec<Arc<Transport>> {
        self.transports
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .values()
            .filter_map(Weak::upgrade)
            .collect()
    }

    fn is_known_proxied(&self, agent: AgentId) -> bool {
        let proxied = self.proxied.lock().unwrap_or_else(PoisonError::into_inner);
        proxied.get(&agent).is_some_and(|seen| seen.elapsed() < PROXY_MEMORY)
    }

    fn remember_proxied(&self, agent: AgentId) {
        let mut proxied = self.proxied.lock().unwrap_or_else(PoisonError::into_inner);
        if proxied.len() >= PROXY_AGENTS {
            proxied.retain(|_, seen| seen.elapsed() < PROXY_MEMORY);
        }
        if proxied.len() < PROXY_AGENTS {
            proxied.insert(agent, Instant::now());
        }
    }
}

impl Service for AgentListener {
    fn connected(self: Arc<Self>, peer: Option<SocketAddr>) -> Arc<dyn Connection> {
        let serial = self.serial.fetch_add(1, Ordering::Relaxed);
        let transport = Arc::new(Transport {
            serial,
            peer,
            trust: Trust::new(self.attempts),
            listener: Arc::clone(&self),
            state: Mutex::default(),
        });
        self.metrics.agent_transports.inc();
        self.transports
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(serial, Arc::downgrade(&transport));
        transport
    }

    fn refused(&self, why: Refusal) {
        count_refusal(&self.metrics, ListenerName::Agent, why);
    }
}

/// One transport connection of agentk.
struct Transport {
    listener: Arc<AgentListener>,
    serial: u64,
    peer: Option<SocketAddr>,
    trust: Trust,
    state: Mutex<TransportState>,
}

#[derive(Default)]
struct TransportState {
    /// Who was authenticated on it.
    agents: Vec<AgentId>,
    closed: bool,
    tunnels: Vec<HeldTunnel>,
    configs: Vec<HeldConfig>,
    /// Processes that registered on it.
    processes: Vec<(AgentId, ConnectionId)>,
    /// A proxy was seen in the headers of a stream.
    proxied: bool,
    /// GOAWAY was sent because of age: tunnels that finish a request end.
    aged: bool,
}

struct HeldTunnel {
    tunnel: Weak<Tunnel>,
    authenticated: Authenticated,
}

struct HeldConfig {
    /// Tells it from others: an agent may send the same instance id on several streams.
    serial: u64,
    stream: Weak<ConfigStream>,
    authenticated: Authenticated,
    id: ConnectionId,
    /// Of an agent of this project: its tunnels are tied by instance, not by transport.
    ours: bool,
    /// Its process registers, which says better who it is.
    registers: bool,
    since: Instant,
}

impl Transport {
    fn state(&self) -> MutexGuard<'_, TransportState> {
        // A panic between two lists cannot leave them torn: each change is one push or retain.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns what stands in the registry for the process at its other end, of an agent that does not name it: no id of a
    /// connection, which have 63 bits.
    fn instance(&self) -> u64 {
        self.serial | 1 << 63
    }

    /// Returns the agent whose token the request carries.
    async fn authenticate(&self, headers: &HeaderMap) -> Result<Authenticated, Status> {
        // Who resets a stream before it is judged has failed as well: a lookup was begun for it.
        let attempt = Attempt { trust: &self.trust, over: false };
        let result = match auth::bearer(headers) {
            Ok(token) => self.identify(token).await,
            Err(status) => Err(status),
        };
        attempt.over();
        match &result {
            Ok(authenticated) => {
                if self.trust.passed() {
                    self.listener.rate_limit.charge(authenticated.token);
                }
                let agent = authenticated.agent.id;
                let mut state = self.state();
                // One, but where a proxy joins several.
                if !state.agents.contains(&agent) && !state.closed {
                    state.agents.push(agent);
                    self.listener.registry.transport_opened(agent);
                }
            }
            // Says nothing against the peer.
            Err(status) if status.code() == Code::Unavailable => {
                self.listener.metrics.refused(ListenerName::Agent, Reason::Unchecked);
            }
            Err(_) => {
                self.trust.failed();
                self.listener.metrics.refused(ListenerName::Agent, Reason::Unauthenticated);
            }
        }
        result
    }

    /// Returns whose token it is.
    async fn identify(&self, token: &[u8]) -> Result<Authenticated, Status> {
        let AgentListener { identity, failures, metrics, .. } = &*self.listener;
        let hash = TokenHash::of(token);
        if !failures.allows(hash) {
            metrics.refused(ListenerName::Agent, Reason::RateLimit);
            return Err(Status::new(Code::Unauthenticated, "unauthenticated"));
        }
        let from = self.peer.map(|peer| peer.ip());
        identity.authenticate(token, from).await.map_err(|error| match error {
            IdentityError::Unknown => {
                failures.charge(hash);
                Status::new(Code::Unauthenticated, "unauthenticated")
            }
            IdentityError::Forbidden => {
                failures.charge(hash);
                Status::new(Code::PermissionDenied, "forbidden")
            }
            IdentityError::Unavailable => Status::new(Code::Unavailable, "unavailable"),
        })
    }

    /// Counts a stream whose first message is not what it must be, or did not come.
    fn unfit(&self, status: Status) -> Status {
        self.listener.metrics.refused(ListenerName::Agent, Reason::Message);
        status
    }

    /// Notes whether a proxy stands between, as far as the headers of a stream tell.
    fn look_for_proxy(&self, headers: &HeaderMap) {
        let marked =
            headers.keys().any(|key| key == http::header::VIA || key.as_str().starts_with("x-forwarded-"));
        let moved = headers
            .get(SOCKET_HEADER)
            .filter(|value| value.len() <= MAX_HINT)
            .and_then(|value| value.to_str().ok()?.parse::<SocketAddr>().ok())
            .is_some_and(|said| {
                self.peer.is_some_and(|seen| {
                    said.port() != seen.port() || said.ip().to_canonical() != seen.ip().to_canonical()
                })
            });
        if marked || moved {
            self.state().proxied = true;
        }
    }

    async fn connect(self: Arc<Self>, request: Request<Incoming>, reset: Arc<StreamReset>) -> Response<Body> {
        let correlation = crate::metadata::correlation(&HeaderMap::new());
        match self.open_tunnel(request, reset).await {
            Ok((tunnel_body, peer)) => {
                let mut response = self.accepted(&correlation, tunnel_body);
                if peer == Peer::Ours {
                    response.headers_mut().insert(TUNNEL_HEADER, REUSE);
                    if self.state().proxied {
                        let seconds = self.listener.proxied_idle.mul_f64(PROXIED_IDLE_OURS).as_secs().max(1);
                        response.headers_mut().insert(MAX_IDLE_HEADER, HeaderValue::from(seconds));
                    }
                }
                response
            }
            Err(status) => failed(&status, &correlation),
        }
    }

    fn accepted(&self, correlation: &HeaderValue, body: Body) -> Response<Body> {
        let mut response = Response::new(body);
        let headers = response.headers_mut();
        headers.insert(http::header::CONTENT_TYPE, grpc::CONTENT_TYPE);
        headers.insert(grpc::CORRELATION_ID, correlation.clone());
        headers.insert(REPLICA_HEADER, self.listener.naming.replica.clone());
        headers.insert(RUN_HEADER, self.listener.naming.run.clone());
        headers.insert(REPLICAS_HEADER, (*self.listener.naming.replicas.borrow()).into());
        response
    }

    async fn open_tunnel(
        self: &Arc<Self>,
        request: Request<Incoming>,
        reset: Arc<StreamReset>,
    ) -> Result<(Body, Peer), Status> {
        let (head, body) = request.into_parts();
        let gzip = encoding(&head.headers);
        let mut opening = Opening::new(grpc::boxed(body), *gzip.as_ref().unwrap_or(&false));
        let mut first = None;
        let authenticated = {
            // GitLab may take long to know the token, and what the agent sends meanwhile must not pile up.
            let reading = async {
                let descriptor = read_descriptor(&mut opening).await;
                let goes_on = descriptor.is_ok();
                first = Some(descriptor.map_err(Early::Refused));
                if goes_on {
                    first = Some(Err(opening.unasked().await.into()));
                }
                opening.refuse();
            };
            let mut authenticate = std::pin::pin!(self.authenticate(&head.headers));
            tokio::select! {
                biased;
                authenticated = &mut authenticate => authenticated?,
                () = reading => authenticate.await?,
            }
        };
        gzip?;
        self.look_for_proxy(&head.headers);
        let peer = peer(&head.headers);
        let first = match first {
            Some(first) => first,
            None => tokio::time::timeout(FIRST_MESSAGE, read_descriptor(&mut opening))
                .await
                .unwrap_or_else(|_| Err(Status::new(Code::DeadlineExceeded, "no descriptor came in time")))
                .map_err(Early::Refused),
        };
        let descriptor = match first {
            Ok(descriptor) => descriptor,
            Err(early) => return early.answer(peer).map_err(|status| self.unfit(status)),
        };
        let listener = &self.listener;
        let agent = authenticated.agent.id;
        let held = Instant::now();
        loop {
            let reason = if !listener.registry.has_room(agent) {
                Reason::TunnelsFull
            } else if !listener.rate_limit.allows(authenticated.token) {
                Reason::RateLimit
            } else {
                break;
            };
            if held.elapsed() >= HOLD {
                listener.metrics.refused(ListenerName::Agent, reason);
                return Ok((grpc::boxed(Ended), peer));
            }
            tokio::select! {
                () = tokio::time::sleep(Duration::from_secs(1)) => {}
                unasked = opening.unasked() => {
                    return Early::from(unasked).answer(peer).map_err(|status| self.unfit(status));
                }
            }
        }
        let instance = instance(&head.headers, agent);
        let info = Info {
            agent,
            instance: instance.map_or(self.instance(), |id| id.get() as u64),
            token: authenticated.token,
            peer,
            impersonates: impersonates(&head.headers),
            descriptor: Arc::new(descriptor),
        };
        let (tunnel, body) =
            Tunnel::new(info, opening, Arc::clone(&listener.owner), Box::new(move || reset.reset()));
        let (connection, aged) = {
            let mut state = self.state();
            // The tunnels of GitLab's agents are new ones for each request: sweep between ticks.
            if state.tunnels.len() >= 64 && state.tunnels.len().is_power_of_two() {
                state.tunnels.retain(|held| held.tunnel.strong_count() > 0);
            }
            state
                .tunnels
                .push(HeldTunnel { tunnel: Arc::downgrade(&tunnel), authenticated: authenticated.clone() });
            (instance.or_else(|| state.tie(agent)), state.aged)
        };
        listener.registry.insert(&tunnel, connection);
        // The token may have been revoked while the descriptor was awaited.
        if !listener.identity.still_valid(&authenticated).await {
            tunnel.end(revoked());
        } else if aged || listener.left.load(Ordering::Relaxed) {
            listener.registry.retire(&tunnel, Retire::Ok);
        }
        Ok((grpc::boxed(body), peer))
    }

    async fn get_configuration(self: Arc<Self>, request: Request<Incoming>) -> Response<Body> {
        let correlation = crate::metadata::correlation(&HeaderMap::new());
        match self.open_configuration(request).await {
            Ok(body) => self.accepted(&correlation, body),
            Err(status) => failed(&status, &correlation),
        }
    }

    async fn open_configuration(self: &Arc<Self>, request: Request<Incoming>) -> Result<Body, Status> {
        let (head, body) = request.into_parts();
        let gzip = encoding(&head.headers);
        // Read while the token is looked up: what nobody reads piles up. It is dropped after its one message.
        let reading = read_one(body, *gzip.as_ref().unwrap_or(&false));
        let mut reading = std::pin::pin!(tokio::time::timeout(FIRST_MESSAGE, reading));
        let mut message = None;
        let authenticated = {
            let mut authenticate = std::pin::pin!(self.authenticate(&head.headers));
            tokio::select! {
                biased;
                authenticated = &mut authenticate => authenticated?,
                read = &mut reading => {
                    message = Some(read);
                    authenticate.await?
                }
            }
        };
        gzip?;
        self.look_for_proxy(&head.headers);
        let message = match message {
            Some(read) => read,
            None => reading.await,
        };
        let request: ConfigurationRequest = decoded(message).map_err(|status| self.unfit(status))?;
        let listener = &self.listener;
        if !listener.rate_limit.allows(authenticated.token) {
            listener.metrics.refused(ListenerName::Agent, Reason::RateLimit);
            return Err(rate_limited());
        }
        let agent = &authenticated.agent;
        let ours = instance(&head.headers, agent.id);
        let meta = request.agent_meta.unwrap_or_default();
        let meta = AgentMeta {
            version: bounded(meta.version),
            commit: bounded(meta.commit_id),
            pod_namespace: bounded(meta.pod_namespace),
            pod_name: bounded(meta.pod_name),
        };
        let registers = request.skip_register && ours.is_none();
        let stand_in = if registers { registrar::stand_in(agent.id, &meta) } else { None };
        let id = ours.or(stand_in).unwrap_or_else(ConnectionId::random);
        let stream = listener.configs.subscribe(agent, &request.commit_id);
        // Without a name of its pod nobody could tell that it is the process which has registered.
        // So an agentk of ours that says it, which registers nowhere, is not listed at all: `agentk doctor`.
        let lease = (!request.skip_register || stand_in.is_some()).then(|| {
            listener.tracker.connection(AgentConnectionInfo {
                agent: agent.id,
                name: Arc::clone(&agent.name),
                project_id: agent.project_id,
                id,
                meta,
                connected_at: runtime::clock::wall(),
            })
        });
        listener.metrics.agent_connections.inc();
        if listener.comes(agent.id, id) {
            tracing::info!(
                agent.id = agent.id.get(),
                agent.name = &*agent.name,
                connection.id = id.get(),
                "agent connected"
            );
        } else {
            // It looks for another replica and met this one again, every few seconds where there is no other.
            tracing::debug!(
                agent.id = agent.id.get(),
                connection.id = id.get(),
                "a connected agent opened one more configuration stream"
            );
        }
        let serial = listener.serial.fetch_add(1, Ordering::Relaxed);
        let aged = {
            let mut state = self.state();
            state.configs.push(HeldConfig {
                serial,
                stream: Arc::downgrade(&stream),
                authenticated: authenticated.clone(),
                id,
                ours: ours.is_some(),
                registers,
                since: Instant::now(),
            });
            state.aged
        };
        self.retie(agent.id);
        let guard = ConfigGuard { transport: Arc::clone(self), agent: agent.id, id, serial, lease };
        if !listener.identity.still_valid(&authenticated).await {
            stream.end(Some(revoked()));
        } else if aged || listener.left.load(Ordering::Relaxed) {
            stream.end(None);
        }
        Ok(grpc::boxed(ConfigBody::new(stream, guard)))
    }

    async fn register(self: Arc<Self>, request: Request<Incoming>) -> Response<Body> {
        let correlation = crate::metadata::correlation(&HeaderMap::new());
        match self.try_register(request).await {
            Ok(()) => self.accepted(&correlation, one(&RegisterResponse {})),
            Err(status) => failed(&status, &correlation),
        }
    }

    async fn try_register(&self, request: Request<Incoming>) -> Result<(), Status> {
        let (authenticated, RegisterRequest { agent_meta, pod_id }) = self.said(request).await?;
        let listener = &self.listener;
        let agent = authenticated.agent.id;
        let entity::AgentMeta { version, commit_id, pod_namespace, pod_name, .. } =
            agent_meta.unwrap_or_default();
        let meta = AgentMeta {
            version: bounded(version),
            commit: bounded(commit_id),
            pod_namespace: bounded(pod_namespace),
            pod_name: bounded(pod_name),
        };
        let process = registrar::process(agent, pod_id);
        if listener.registrar.register(&authenticated, process, meta) {
            listener.rate_limit.charge(authenticated.token);
            tracing::info!(
                agent.id = agent.get(),
                agent.name = &*authenticated.agent.name,
                connection.id = process.get(),
                "agent registered"
            );
        }
        // The token may have been revoked while the message was awaited.
        if !listener.identity.still_valid(&authenticated).await {
            listener.registrar.unregister(agent, process);
            return Err(revoked());
        }
        {
            let mut state = self.state();
            if !state.processes.contains(&(agent, process)) && state.processes.len() < MAX_PROCESSES {
                state.processes.push((agent, process));
            }
        }
        self.retie(agent);
        Ok(())
    }

    async fn unregister(self: Arc<Self>, request: Request<Incoming>) -> Response<Body> {
        let correlation = crate::metadata::correlation(&HeaderMap::new());
        match self.said::<UnregisterRequest>(request).await {
            Ok((authenticated, request)) => {
                let agent = authenticated.agent.id;
                self.listener.registrar.unregister(agent, registrar::process(agent, request.pod_id));
                self.accepted(&correlation, one(&UnregisterResponse {}))
            }
            Err(status) => failed(&status, &correlation),
        }
    }

    /// Reads the one message of a call that an agent makes.
    async fn said<M: prost::Message + Default>(
        &self,
        request: Request<Incoming>,
    ) -> Result<(Authenticated, M), Status> {
        let (head, body) = request.into_parts();
        let authenticated = self.authenticate(&head.headers).await?;
        let gzip = encoding(&head.headers)?;
        self.look_for_proxy(&head.headers);
        let message = tokio::time::timeout(FIRST_MESSAGE, read_one(body, gzip)).await;
        let message = decoded(message).map_err(|status| self.unfit(status))?;
        if !self.listener.rate_limit.allows(authenticated.token) {
            self.listener.metrics.refused(ListenerName::Agent, Reason::RateLimit);
            return Err(rate_limited());
        }
        Ok((authenticated, message))
    }

    /// Ties tunnels of agents that send no instance id to the one configuration stream of their
    /// transport, or unties them.
    fn retie(&self, agent: AgentId) {
        let connection = self.state().tie(agent);
        self.listener.registry.tie(agent, self.instance(), connection);
    }

    /// Ends streams whose agent or token is no longer valid.
    async fn recheck(&self) {
        let (tunnels, configs) = {
            let state = self.state();
            let tunnels: Vec<_> = state
                .tunnels
                .iter()
                .filter_map(|held| Some((held.tunnel.upgrade()?, held.authenticated.clone())))
                .collect();
            let configs: Vec<_> = state
                .configs
                .iter()
                .filter_map(|held| Some((held.stream.upgrade()?, held.authenticated.clone())))
                .collect();
            (tunnels, configs)
        };
        for (tunnel, authenticated) in tunnels {
            if !self.listener.identity.still_valid(&authenticated).await {
                self.listener.metrics.refused(ListenerName::Agent, Reason::Revoked);
                tunnel.end(revoked());
            }
        }
        for (config, authenticated) in configs {
            if !self.listener.identity.still_valid(&authenticated).await {
                config.end(Some(revoked()));
            }
        }
    }

    fn is_proxied(&self, agent: AgentId) -> bool {
        self.state().proxied || self.listener.is_known_proxied(agent)
    }
}

/// A stream whose token is being looked at.
struct Attempt<'a> {
    trust: &'a Trust,
    over: bool,
}

impl Attempt<'_> {
    /// It was judged; whoever has the answer counts it.
    fn over(mut self) {
        self.over = true;
    }
}

impl Drop for Attempt<'_> {
    fn drop(&mut self) {
        if !self.over {
            self.trust.failed();
        }
    }
}

impl TransportState {
    /// The configuration stream that the transport's other streams of `agent` belong to: only when
    /// it is the only one, and no proxy mixes several agentk processes into one transport.
    fn tie(&self, agent: AgentId) -> Option<ConnectionId> {
        let mut of_agent = self.configs.iter().filter(|held| {
            !held.ours && held.authenticated.agent.id == agent && held.stream.strong_count() > 0
        });
        let only = of_agent.next().filter(|_| !self.proxied)?;
        if of_agent.next().is_some() {
            return None;
        }
        if !only.registers {
            return Some(only.id);
        }
        // The id under which the process is listed.
        let mut processes = self.processes.iter().filter(|(of, _)| *of == agent).map(|(_, process)| *process);
        let first = processes.next();
        processes.next().is_none().then(|| first.unwrap_or(only.id))
    }
}

impl Connection for Transport {
    fn call(self: Arc<Self>, request: Request<Incoming>, slot: &StreamSlot) -> Answer {
        if let Some(response) = not_grpc(request.method(), request.headers()) {
            self.trust.failed();
            return Box::pin(std::future::ready(response));
        }
        let attempts = self.listener.attempts;
        let unfit = too_many_fields(request.headers(), attempts).or_else(|| too_large(&request, attempts));
        if let Some(status) = unfit {
            self.trust.failed();
            self.listener.metrics.refused(ListenerName::Agent, Reason::Headers);
            let correlation = crate::metadata::correlation(&HeaderMap::new());
            return Box::pin(std::future::ready(failed(&status, &correlation)));
        }
        match request.uri().path() {
            CONNECT => {
                let reset = slot.arm();
                Box::pin(self.connect(request, reset))
            }
            GET_CONFIGURATION => Box::pin(self.get_configuration(request)),
            REGISTER => Box::pin(self.register(request)),
            UNREGISTER => Box::pin(self.unregister(request)),
            path => {
                let status = Status::new(Code::Unimplemented, format!("unknown method {path}"));
                self.trust.failed();
                let correlation = crate::metadata::correlation(&HeaderMap::new());
                Box::pin(std::future::ready(failed(&status, &correlation)))
            }
        }
    }

    fn standing(&self) -> Standing {
        self.trust.standing()
    }

    fn going_away(&self, reason: GoAway) {
        let mut state = self.state();
        state.aged = true;
        // The configuration stream first: the agent opens it again on a new connection, and its
        // tunnels follow.
        let configs: Vec<_> = state.configs.iter().filter_map(|held| held.stream.upgrade()).collect();
        let tunnels: Vec<_> = state.tunnels.iter().filter_map(|held| held.tunnel.upgrade()).collect();
        drop(state);
        for config in configs {
            config.end(None);
        }
        tracing::debug!(reason = ?reason, tunnels = tunnels.len(), "connection of an agent is going away");
        // Ours open a replacement before they let go; those of GitLab end with OK.
        for tunnel in tunnels {
            self.listener.registry.retire(&tunnel, Retire::Notice);
        }
    }

    fn tick(&self) {
        let mut idle = Vec::new();
        let mut silent = Vec::new();
        {
            let mut state = self.state();
            state.tunnels.retain(|held| held.tunnel.strong_count() > 0);
            state.configs.retain(|held| held.stream.strong_count() > 0);
            for held in &state.tunnels {
                if let Some(tunnel) = held.tunnel.upgrade()
                    // Ours replaces its parked tunnels itself, without a gap.
                    && tunnel.info().peer != Peer::Ours
                    && tunnel.idle_since().is_some_and(|since| since.elapsed() >= self.listener.proxied_idle)
                {
                    idle.push(tunnel);
                }
            }
            for held in &state.configs {
                if held.since.elapsed() >= self.listener.proxied_idle
                    && let Some(stream) = held.stream.upgrade()
                {
                    silent.push((stream, held.authenticated.agent.id));
                }
            }
        }
        for tunnel in idle {
            if self.is_proxied(tunnel.info().agent) {
                self.listener.registry.retire(&tunnel, Retire::Ok);
            }
        }
        for (stream, agent) in silent {
            if self.is_proxied(agent) {
                stream.end(None);
            }
        }
    }

    fn closed(&self) {
        self.listener.metrics.agent_transports.dec();
        self.listener.transports.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.serial);
        let agents = {
            let mut state = self.state();
            state.closed = true;
            std::mem::take(&mut state.agents)
        };
        for agent in agents {
            self.listener.registry.transport_closed(agent, self.instance());
        }
    }
}

/// What ends with a configuration stream.
struct ConfigGuard {
    transport: Arc<Transport>,
    agent: AgentId,
    id: ConnectionId,
    serial: u64,
    lease: Option<Lease>,
}

impl Drop for ConfigGuard {
    fn drop(&mut self) {
        let transport = &self.transport;
        drop(self.lease.take());
        transport.listener.metrics.agent_connections.dec();
        let mut state = transport.state();
        let mut cut = false;
        if let Some(at) = state.configs.iter().position(|held| held.serial == self.serial) {
            let held = state.configs.swap_remove(at);
            // A live transport whose idle stream was cut early: something between does that.
            let age = held.since.elapsed();
            cut = !state.aged && !held.ours && age > Duration::from_secs(20) && age < PROXY_CUT;
        }
        drop(state);
        if cut && !transport.is_proxied(self.agent) {
            transport.listener.remember_proxied(self.agent);
        }
        transport.retie(self.agent);
        if transport.listener.goes(self.agent, self.id) {
            tracing::info!(agent.id = self.agent.get(), connection.id = self.id.get(), "agent disconnected");
        }
    }
}

/// Why a stream ends before it is a tunnel.
enum Early {
    /// There is no descriptor.
    Refused(Status),
    /// The agent has said more than its descriptor.
    Unasked(Unasked),
}

impl From<Unasked> for Early {
    fn from(unasked: Unasked) -> Self {
        Self::Unasked(unasked)
    }
}

impl Early {
    fn answer(self, peer: Peer) -> Result<(Body, Peer), Status> {
        match self {
            Self::Refused(status) => Err(status),
            Self::Unasked(Unasked::Withdrawal) if peer == Peer::Ours => Ok((grpc::boxed(Ended), peer)),
            Self::Unasked(_) => Err(Status::new(
                Code::InvalidArgument,
                "after its descriptor an agent says nothing until a request comes",
            )),
        }
    }
}

/// A stream that ends with OK at once.
struct Ended;

impl http_body::Body for Ended {
    type Data = bytes::Bytes;
    type Error = grpc::BoxError;

    fn poll_frame(
        self: std::pin::Pin<&mut Self>,
        _cx: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Result<http_body::Frame<bytes::Bytes>, grpc::BoxError>>> {
        let mut trailers = HeaderMap::with_capacity(1);
        Status::write_ok(&mut trailers);
        std::task::Poll::Ready(Some(Ok(http_body::Frame::trailers(trailers))))
    }
}

fn revoked() -> Status {
    Status::new(Code::Unauthenticated, "the agent's token is not valid any more")
}

fn peer(headers: &HeaderMap) -> Peer {
    if headers.get(TUNNEL_HEADER) == Some(&REUSE) {
        return Peer::Ours;
    }
    let agent = headers.get(http::header::USER_AGENT).map_or(&b""[..], HeaderValue::as_bytes);
    if agent.starts_with(b"gitlab-agent/") { Peer::Recent } else { Peer::Old }
}

/// Whether the agentk that sent these is known to heed `HeaderExtra`: ours says so, GitLab's do from 14.3 on.
fn impersonates(headers: &HeaderMap) -> bool {
    /// GitLab's first such version.
    const SINCE: (u32, u32) = (14, 3);
    if headers.contains_key(IMPERSONATES_HEADER) || headers.contains_key(INSTANCE_HEADER) {
        return headers.get(IMPERSONATES_HEADER).is_some_and(|value| value == "1");
    }
    let agent =
        headers.get(http::header::USER_AGENT).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let Some(version) = agent.strip_prefix("gitlab-agent/").or_else(|| agent.strip_prefix("agentk/")) else {
        return false;
    };
    let mut parts = version.trim_start_matches('v').splitn(3, '.').map(str::parse);
    matches!((parts.next(), parts.next()), (Some(Ok(major)), Some(Ok(minor))) if (major, minor) >= SINCE)
}

/// The connection id of an agent that sends its instance id.
fn instance(headers: &HeaderMap, agent: AgentId) -> Option<ConnectionId> {
    let value = headers.get(INSTANCE_HEADER)?.as_bytes();
    (!value.is_empty() && value.len() <= MAX_HINT).then(|| ConnectionId::of_instance(agent, value))
}

/// Whether the stream's messages may be gzip.
fn encoding(headers: &HeaderMap) -> Result<bool, Status> {
    match headers.get("grpc-encoding").map(HeaderValue::as_bytes) {
        None | Some(b"identity") => Ok(false),
        Some(b"gzip") => Ok(true),
        Some(other) => Err(Status::new(
            Code::Unimplemented,
            format!("grpc-encoding {} is not supported: use gzip or identity", other.escape_ascii()),
        )),
    }
}

/// Decodes the one message of a call that was waited for.
fn decoded<M: prost::Message + Default>(
    read: Result<Result<bytes::Bytes, Status>, tokio::time::error::Elapsed>,
) -> Result<M, Status> {
    let message = read.map_err(|_| Status::new(Code::DeadlineExceeded, "no request came in time"))??;
    M::decode(message)
        .map_err(|error| Status::new(Code::InvalidArgument, format!("the request is malformed: {error}")))
}

/// Reads the one message of a call, inflated when it is compressed.
async fn read_one(body: Incoming, gzip: bool) -> Result<bytes::Bytes, Status> {
    let mut reader = MessageReader::new(body, MAX_REQUEST).with_gzip(gzip);
    match reader.next().await {
        Ok(Some(message)) => Ok(message),
        Ok(None) => Err(Status::new(Code::InvalidArgument, "the request has no message")),
        Err(error) => Err(Status::from(&error)),
    }
}

/// The body of an answer that is one message.
fn one(message: &impl prost::Message) -> Body {
    let mut trailers = HeaderMap::with_capacity(1);
    Status::write_ok(&mut trailers);
    grpc::boxed(Full::new(grpc::encode(message)).with_trailers(std::future::ready(Some(Ok(trailers)))))
}

fn rate_limited() -> Status {
    let text = "new connection rate limit exhausted for this agent, try again later";
    Status::new(Code::ResourceExhausted, text)
}

/// Texts of agents are shown to people and kept in memory: not longer than any real one.
fn bounded(mut text: String) -> String {
    const LONGEST: usize = 256;
    if text.len() > LONGEST {
        let end = (0..=LONGEST).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
        text.truncate(end);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_heeds_whose_rights_are_meant_is_known_by_its_version_or_says_so() {
        let heeds = |pairs: &[(&'static str, &'static str)]| {
            let mut headers = HeaderMap::new();
            for (name, value) in pairs {
                headers.append(*name, HeaderValue::from_static(value));
            }
            impersonates(&headers)
        };
        for (agent, expected) in [
            ("agentk/v14.1.1/abc grpc-go/1.39.0", false),
            ("agentk/v14.2.9/abc", false),
            ("agentk/v14.3.0/abc", true),
            ("agentk/v15.0.0/abc", true),
            ("gitlab-agent/v16.5.0/abc grpc-go/1.58.3", true),
            ("gitlab-agent/16.5.0-rc1/abc", true),
            ("gitlab-agent/v18.10.1/abc", true),
            ("gitlab-agent/unknown/abc", false),
            ("gitlab-agent/v16/abc", false),
            ("gitlab-agent/v.5.0/abc", false),
            ("grpc-go/99.9.9", false),
            ("", false),
        ] {
            assert_eq!(heeds(&[("user-agent", agent)]), expected, "{agent}");
        }
        assert!(!heeds(&[]));
        let ours = ("kas-agentk-instance", "i");
        assert!(!heeds(&[ours, ("user-agent", "agentk/99.0.0/abc")]), "one of an earlier build");
        assert!(heeds(&[ours, ("kas-agentk-impersonates", "1")]));
        assert!(!heeds(&[("kas-agentk-impersonates", "0"), ("user-agent", "agentk/v15.0.0/abc")]));
    }
}
