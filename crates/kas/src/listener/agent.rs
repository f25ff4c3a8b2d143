//! The agent listener: it authenticates agents, and routes their calls to tunnels, configuration streams and
//! the [`AgentService`]s of other modules.

mod configuration;
mod metrics;
mod service;
mod transport;
mod tunnels;

use std::{
    collections::HashMap,
    net::SocketAddr,
    sync::{
        Arc, Mutex, PoisonError, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use agent_config::AgentConfigs;
use cluster::Tracker;
use grpc::{Code, Status};
use http::{HeaderMap, HeaderValue, Request, Response};
use hyper::body::Incoming;
use identity::Identity;
use ids::{AgentId, ConnectionId};
use net::http::{Answer, AuthState, Body, Connection, GoAway, Refusal, Service, StreamSlot, Trust};
use tokio::time::Instant;
use tunnel::kas_end::{AgentKind, Retire, TunnelPool};

use self::transport::Transport;
pub use self::{
    metrics::AgentMetrics,
    service::{AgentCall, AgentService, Answered, CallContext, ServiceAnswer, one},
};
use crate::registrar::Registrar;
use kas_config::Attempts;
use observe::refusals::{ListenerName, Reason, Refusals};
use planner::Applier;
use routing::{
    rate_limit::RateLimit,
    registry::{RegistryPool, TunnelRegistry},
};

use super::{Naming, failed, not_grpc, too_large, too_many_fields};

const CONNECT: &str = "/gitlab.agent.reverse_tunnel.rpc.ReverseTunnel/Connect";
const GET_CONFIGURATION: &str = "/gitlab.agent.agent_configuration.rpc.AgentConfiguration/GetConfiguration";

/// How long the cache keeps an agent that is behind a proxy that cuts idle streams.
const PROXY_MEMORY: Duration = Duration::from_secs(3600);
/// The most agents in that cache.
const PROXY_AGENTS: usize = 100_000;

/// The service of the agent listener.
pub struct AgentListener {
    identity: Arc<dyn Identity>,
    registry: Arc<TunnelRegistry>,
    pool: Arc<dyn TunnelPool>,
    tracker: Arc<dyn Tracker>,
    registrar: Arc<Registrar>,
    services: HashMap<&'static str, Arc<dyn AgentService>>,
    configs: Arc<AgentConfigs>,
    applier: Applier,
    metrics: Arc<AgentMetrics>,
    refusals: Arc<Refusals>,
    naming: Naming,
    proxied_idle: Duration,
    rate_limit: Arc<RateLimit>,
    failures: Arc<RateLimit>,
    attempts: Attempts,
    /// The process ends now: new streams end at once.
    left: AtomicBool,
    transports: Mutex<HashMap<u64, Weak<Transport>>>,
    /// The number of configuration streams of each connection.
    present: Mutex<HashMap<(AgentId, ConnectionId), usize>>,
    serial: AtomicU64,
    /// Agents behind a proxy that cuts idle streams, and when it last cut one.
    proxied: Mutex<HashMap<AgentId, Instant>>,
}

impl std::fmt::Debug for AgentListener {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AgentListener").field("naming", &self.naming).finish_non_exhaustive()
    }
}

/// The parts of an [`AgentListener`].
pub struct Parts {
    /// Authenticates agents.
    pub identity: Arc<dyn Identity>,
    /// The registry of tunnels.
    pub registry: Arc<TunnelRegistry>,
    /// The tracker of connections.
    pub tracker: Arc<dyn Tracker>,
    /// The registered processes of agents.
    pub registrar: Arc<Registrar>,
    /// Services of other modules for agents.
    pub services: Vec<Arc<dyn AgentService>>,
    /// The configurations of agents.
    pub configs: Arc<AgentConfigs>,
    /// Who applies manifests.
    pub applier: Applier,
    /// Metrics of agents.
    pub metrics: Arc<AgentMetrics>,
    /// Counters of refusals.
    pub refusals: Arc<Refusals>,
    /// What this replica reports about itself.
    pub naming: Naming,
    /// Idle streams behind a proxy are ended after this time.
    pub proxied_idle: Duration,
    /// The rate limit of new connections, by token.
    pub rate_limit: Arc<RateLimit>,
    /// The rate limit of invalid tokens.
    pub failures: Arc<RateLimit>,
    /// The limits of one connection.
    pub attempts: Attempts,
}

impl AgentListener {
    /// Creates the listener's service.
    pub fn new(parts: Parts) -> Arc<Self> {
        let Parts {
            identity,
            registry,
            tracker,
            registrar,
            services,
            configs,
            applier,
            metrics,
            refusals,
            naming,
            proxied_idle,
            rate_limit,
            failures,
            attempts,
        } = parts;
        Arc::new(Self {
            identity,
            pool: Arc::new(RegistryPool {
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
            services: services
                .iter()
                .flat_map(|service| service.paths().iter().map(|path| (*path, Arc::clone(service))))
                .collect(),
            configs,
            applier,
            metrics,
            refusals,
            naming,
            proxied_idle,
            transports: Mutex::default(),
            present: Mutex::default(),
            serial: AtomicU64::new(0),
            proxied: Mutex::default(),
        })
    }

    /// Returns the registered processes of agents.
    pub fn registrar(&self) -> Arc<Registrar> {
        Arc::clone(&self.registrar)
    }

    /// Records a configuration stream of a connection. Returns whether it is the only one.
    fn stream_opened(&self, agent: AgentId, id: ConnectionId) -> bool {
        let mut present = self.present.lock().unwrap_or_else(PoisonError::into_inner);
        let streams = present.entry((agent, id)).or_default();
        *streams += 1;
        *streams == 1
    }

    /// Records the end of a configuration stream. Returns whether it was the last one of its connection.
    fn stream_closed(&self, agent: AgentId, id: ConnectionId) -> bool {
        let mut present = self.present.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(streams) = present.get_mut(&(agent, id)) else { return true };
        *streams -= 1;
        let last = *streams == 0;
        if last {
            present.remove(&(agent, id));
        }
        last
    }

    /// Ends the streams of agents and tokens that are no longer valid, until dropped.
    pub async fn watch_identity(self: Arc<Self>) {
        let mut changes = self.identity.changes();
        while changes.changed().await.is_ok() {
            for transport in self.transports() {
                transport.recheck().await;
            }
            self.registrar.recheck().await;
        }
    }

    /// Ends the requests that must not outlast the drain. Idle tunnels stay, so that no agent that connects
    /// meanwhile is sent away again and again.
    pub fn end_short(&self) {
        for transport in self.transports() {
            let state = transport.state();
            let tunnels: Vec<_> = state.tunnels.iter().filter_map(|held| held.tunnel.upgrade()).collect();
            drop(state);
            for tunnel in tunnels {
                if tunnel.carries_request() && !tunnel.is_long() {
                    tunnel.end(shutting_down());
                }
            }
        }
    }

    /// Ends every stream, since the process ends now.
    pub fn end_all(&self) {
        self.left.store(true, Ordering::Relaxed);
        for transport in self.transports() {
            let state = transport.state();
            let tunnels: Vec<_> = state.tunnels.iter().filter_map(|held| held.tunnel.upgrade()).collect();
            let configs: Vec<_> = state.configs.iter().filter_map(|held| held.stream.upgrade()).collect();
            drop(state);
            for tunnel in tunnels {
                if tunnel.carries_request() {
                    tunnel.end(shutting_down());
                } else {
                    // Does not wait for a replica that has reserved it.
                    tunnel.cancel_reservation();
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
            trust: Trust::new(self.attempts.failures),
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
        self.refusals.connection(ListenerName::Agent, why);
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
            self.listener.refusals.refused(ListenerName::Agent, Reason::Headers);
            let correlation = routing::metadata::correlation(&HeaderMap::new());
            return Box::pin(std::future::ready(failed(&status, &correlation)));
        }
        match request.uri().path() {
            CONNECT => {
                let reset = slot.arm();
                Box::pin(self.connect(request, reset))
            }
            GET_CONFIGURATION => Box::pin(self.get_configuration(request)),
            path => {
                if let Some(service) = self.listener.services.get(path) {
                    let service = Arc::clone(service);
                    return Box::pin(serve(self, service, request));
                }
                let status = Status::new(Code::Unimplemented, format!("unknown method {path}"));
                self.trust.failed();
                let correlation = routing::metadata::correlation(&HeaderMap::new());
                Box::pin(std::future::ready(failed(&status, &correlation)))
            }
        }
    }

    fn auth_state(&self) -> AuthState {
        self.trust.auth_state()
    }

    fn going_away(&self, reason: GoAway) {
        let mut state = self.state();
        state.aged = true;
        // The configuration stream first: the agent reopens it on a new connection, and its tunnels follow.
        let configs: Vec<_> = state.configs.iter().filter_map(|held| held.stream.upgrade()).collect();
        let tunnels: Vec<_> = state.tunnels.iter().filter_map(|held| held.tunnel.upgrade()).collect();
        drop(state);
        for config in configs {
            config.end(None);
        }
        tracing::debug!(reason = ?reason, tunnels = tunnels.len(), "connection of an agent is going away");
        // Our agents open a replacement before they close a tunnel. Those of GitLab get OK.
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
                    // Our agents replace idle tunnels themselves, without a gap.
                    && tunnel.info().kind != AgentKind::Ours
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

fn shutting_down() -> Status {
    Status::new(Code::Unavailable, "this kas is shutting down")
}

/// Authenticates a call and passes it to its service.
async fn serve(
    transport: Arc<Transport>,
    service: Arc<dyn AgentService>,
    request: Request<Incoming>,
) -> Response<Body> {
    let correlation = routing::metadata::correlation(&HeaderMap::new());
    let (head, body) = request.into_parts();
    let answer = async {
        let authenticated = transport.authenticate(&head.headers).await?;
        let path = head.uri.path();
        let call = AgentCall::new(authenticated, head.headers, body, Arc::clone(&transport))?;
        transport.look_for_proxy(&call.headers);
        service.call(path, call).await
    };
    match answer.await {
        Ok(Answered { body, is_gzip }) => {
            let mut response = transport.accepted(&correlation, body);
            if is_gzip {
                response.headers_mut().insert("grpc-encoding", HeaderValue::from_static("gzip"));
            }
            response
        }
        Err(status) => failed(&status, &correlation),
    }
}
