//! One transport connection of agentk: its authenticated agents and its streams.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
};

use agent_config::ConfigStream;
use grpc::{Code, Status};
use http::{HeaderMap, HeaderValue, Response};
use identity::{Authenticated, IdentityError, jwt};
use ids::{AgentId, ConnectionId, TokenHash};
use net::http::{Body, Trust};
use tokio::time::Instant;
use tunnel::{INSTANCE_HEADER, REPLICA_HEADER, REPLICAS_HEADER, RUN_HEADER, SOCKET_HEADER, kas_end::Tunnel};

use super::AgentListener;
use observe::refusals::{ListenerName, Reason};

/// The most registered processes of one transport connection. There is one, unless a proxy joins several.
const MAX_PROCESSES: usize = 16;
/// The longest instance id and socket address that are parsed, in bytes.
pub(super) const MAX_HINT: usize = 128;

/// One transport connection of agentk.
pub(super) struct Transport {
    pub(super) listener: Arc<AgentListener>,
    pub(super) serial: u64,
    pub(super) peer: Option<SocketAddr>,
    pub(super) trust: Trust,
    pub(super) state: Mutex<TransportState>,
}

#[derive(Default)]
pub(super) struct TransportState {
    /// The agents that were authenticated on it.
    pub(super) agents: Vec<AgentId>,
    pub(super) closed: bool,
    pub(super) tunnels: Vec<HeldTunnel>,
    pub(super) configs: Vec<HeldConfig>,
    /// Processes that registered on it.
    pub(super) processes: Vec<(AgentId, ConnectionId)>,
    /// A proxy was seen in the headers of a stream.
    pub(super) proxied: bool,
    /// GOAWAY was sent because of age: tunnels that finish a request end.
    pub(super) aged: bool,
}

pub(super) struct HeldTunnel {
    pub(super) tunnel: Weak<Tunnel>,
    pub(super) authenticated: Authenticated,
}

pub(super) struct HeldConfig {
    /// Identifies the stream, since an agent may send the same instance id on several.
    pub(super) serial: u64,
    pub(super) stream: Weak<ConfigStream>,
    pub(super) authenticated: Authenticated,
    pub(super) id: ConnectionId,
    /// It belongs to one of our agents, whose tunnels are bound by instance id and not by transport.
    pub(super) ours: bool,
    /// Its process registers, so the id of the registration is preferred.
    pub(super) registers: bool,
    pub(super) since: Instant,
}

impl Transport {
    pub(super) fn state(&self) -> MutexGuard<'_, TransportState> {
        // Each change is one push or retain, so a panic cannot leave the state inconsistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the instance for tunnels of agents that send no instance id. It differs from every connection
    /// id, since these have 63 bits.
    pub(super) fn instance(&self) -> u64 {
        self.serial | 1 << 63
    }

    /// Returns the agent whose token the request carries.
    pub(super) async fn authenticate(&self, headers: &HeaderMap) -> Result<Authenticated, Status> {
        // A stream that is reset before the result counts as failed, since it has caused a lookup.
        let attempt = Attempt { trust: &self.trust, over: false };
        let result = match jwt::bearer(headers) {
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
                // There is one, unless a proxy joins several.
                if !state.agents.contains(&agent) && !state.closed {
                    state.agents.push(agent);
                    self.listener.registry.transport_opened(agent);
                }
            }
            // Not a failure of the peer.
            Err(status) if status.code() == Code::Unavailable => {
                self.listener.refusals.refused(ListenerName::Agent, Reason::Unchecked);
            }
            Err(_) => {
                self.trust.failed();
                self.listener.refusals.refused(ListenerName::Agent, Reason::Unauthenticated);
            }
        }
        result
    }

    /// Returns the agent that holds the token.
    pub(super) async fn identify(&self, token: &[u8]) -> Result<Authenticated, Status> {
        let AgentListener { identity, failures, refusals, .. } = &*self.listener;
        let hash = TokenHash::of(token);
        if !failures.allows(hash) {
            refusals.refused(ListenerName::Agent, Reason::RateLimit);
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

    /// Counts a stream whose first message is invalid or missing.
    pub(super) fn malformed(&self, status: Status) -> Status {
        self.listener.refusals.refused(ListenerName::Agent, Reason::Message);
        status
    }

    /// Records whether the headers of a stream show a proxy.
    pub(super) fn look_for_proxy(&self, headers: &HeaderMap) {
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

    /// Binds tunnels of agents that send no instance id to the one configuration stream of their
    /// transport, or unbinds them.
    pub(super) fn bind_connection(&self, agent: AgentId) {
        let connection = self.state().bound_connection(agent);
        self.listener.registry.bind_connection(agent, self.instance(), connection);
    }

    pub(super) fn accepted(&self, correlation: &HeaderValue, body: Body) -> Response<Body> {
        let mut response = Response::new(body);
        let headers = response.headers_mut();
        headers.insert(http::header::CONTENT_TYPE, grpc::CONTENT_TYPE);
        headers.insert(grpc::CORRELATION_ID, correlation.clone());
        headers.insert(REPLICA_HEADER, self.listener.naming.replica.clone());
        headers.insert(RUN_HEADER, self.listener.naming.run.clone());
        headers.insert(REPLICAS_HEADER, (*self.listener.naming.replicas.borrow()).into());
        response
    }

    /// Counts a new connection against the rate limit of the agent's token.
    pub(super) fn charge(&self, authenticated: &Authenticated) {
        self.listener.rate_limit.charge(authenticated.token);
    }

    /// Checks the rate limit of the agent's token.
    ///
    /// # Errors
    /// `RESOURCE_EXHAUSTED` if it is used up. That is counted.
    pub(super) fn check_rate(&self, authenticated: &Authenticated) -> Result<(), Status> {
        if self.listener.rate_limit.allows(authenticated.token) {
            return Ok(());
        }
        self.listener.refusals.refused(ListenerName::Agent, Reason::RateLimit);
        let text = "new connection rate limit exhausted for this agent, try again later";
        Err(Status::new(Code::ResourceExhausted, text))
    }

    /// Checks that the agent and its token are still valid.
    ///
    /// # Errors
    /// `UNAUTHENTICATED` if they are not.
    pub(super) async fn still_valid(&self, authenticated: &Authenticated) -> Result<(), Status> {
        if self.listener.identity.still_valid(authenticated).await { Ok(()) } else { Err(revoked()) }
    }

    /// Records a process that registered on this connection.
    pub(super) fn registered(&self, agent: AgentId, process: ConnectionId) {
        {
            let mut state = self.state();
            if !state.processes.contains(&(agent, process)) && state.processes.len() < MAX_PROCESSES {
                state.processes.push((agent, process));
            }
        }
        self.bind_connection(agent);
    }

    /// Ends streams whose agent or token is no longer valid.
    pub(super) async fn recheck(&self) {
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
                self.listener.refusals.refused(ListenerName::Agent, Reason::Revoked);
                tunnel.end(revoked());
            }
        }
        for (config, authenticated) in configs {
            if !self.listener.identity.still_valid(&authenticated).await {
                config.end(Some(revoked()));
            }
        }
    }

    pub(super) fn is_proxied(&self, agent: AgentId) -> bool {
        self.state().proxied || self.listener.is_known_proxied(agent)
    }
}

/// A stream whose token is being checked.
struct Attempt<'a> {
    trust: &'a Trust,
    over: bool,
}

impl Attempt<'_> {
    /// The check has a result, which the caller counts.
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
    /// Returns the configuration stream that the transport's other streams of `agent` belong to. There is
    /// none if the agent has several, or if a proxy may join several agentk processes on one transport.
    pub(super) fn bound_connection(&self, agent: AgentId) -> Option<ConnectionId> {
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

pub(super) fn revoked() -> Status {
    Status::new(Code::Unauthenticated, "the agent's token is no longer valid")
}

/// Returns the connection id of an agent that sends its instance id.
pub(super) fn instance(headers: &HeaderMap, agent: AgentId) -> Option<ConnectionId> {
    let value = headers.get(INSTANCE_HEADER)?.as_bytes();
    (!value.is_empty() && value.len() <= MAX_HINT).then(|| ConnectionId::of_instance(agent, value))
}
