//! One transport connection of agentk: which agents were authenticated on it, and which streams it carries.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
};

use agent_config::ConfigStream;
use grpc::{Code, Status};
use http::{HeaderMap, HeaderValue, Response};
use identity::{Authenticated, IdentityError, jwt};
use ids::{AgentId, ConnectionId, TokenHash};
use net::http::Body;
use tokio::time::Instant;
use tunnel::{INSTANCE_HEADER, REPLICA_HEADER, REPLICAS_HEADER, RUN_HEADER, SOCKET_HEADER, kas_end::Tunnel};

use super::AgentListener;
use crate::listener::Trust;
use observe::refusals::{ListenerName, Reason};

/// Processes of one transport connection that register: one, but where a proxy joins several.
const MAX_PROCESSES: usize = 16;
/// The longest instance id and socket address that are looked at, in bytes.
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
    /// Who was authenticated on it.
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
    /// Tells it from others: an agent may send the same instance id on several streams.
    pub(super) serial: u64,
    pub(super) stream: Weak<ConfigStream>,
    pub(super) authenticated: Authenticated,
    pub(super) id: ConnectionId,
    /// Of an agent of this project: its tunnels are bound by instance, not by transport.
    pub(super) ours: bool,
    /// Its process registers, which says better who it is.
    pub(super) registers: bool,
    pub(super) since: Instant,
}

impl Transport {
    pub(super) fn state(&self) -> MutexGuard<'_, TransportState> {
        // A panic between two lists cannot leave them torn: each change is one push or retain.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns what stands in the registry for the process at its other end, of an agent that does not name
    /// it: no id of a connection, which have 63 bits.
    pub(super) fn instance(&self) -> u64 {
        self.serial | 1 << 63
    }

    /// Returns the agent whose token the request carries.
    pub(super) async fn authenticate(&self, headers: &HeaderMap) -> Result<Authenticated, Status> {
        // Who resets a stream before it is judged has failed as well: a lookup was begun for it.
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
                // One, but where a proxy joins several.
                if !state.agents.contains(&agent) && !state.closed {
                    state.agents.push(agent);
                    self.listener.registry.transport_opened(agent);
                }
            }
            // Says nothing against the peer.
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

    /// Returns whose token it is.
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

    /// Counts a stream whose first message is not what it must be, or did not come.
    pub(super) fn malformed(&self, status: Status) -> Status {
        self.listener.refusals.refused(ListenerName::Agent, Reason::Message);
        status
    }

    /// Notes whether a proxy stands between, as far as the headers of a stream tell.
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
    /// `RESOURCE_EXHAUSTED` when it is used up; that is counted.
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
    /// `UNAUTHENTICATED` when they are not.
    pub(super) async fn still_valid(&self, authenticated: &Authenticated) -> Result<(), Status> {
        if self.listener.identity.still_valid(authenticated).await { Ok(()) } else { Err(revoked()) }
    }

    /// Notes a process that registered on this connection.
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
    Status::new(Code::Unauthenticated, "the agent's token is not valid any more")
}

/// The connection id of an agent that sends its instance id.
pub(super) fn instance(headers: &HeaderMap, agent: AgentId) -> Option<ConnectionId> {
    let value = headers.get(INSTANCE_HEADER)?.as_bytes();
    (!value.is_empty() && value.len() <= MAX_HINT).then(|| ConnectionId::of_instance(agent, value))
}
