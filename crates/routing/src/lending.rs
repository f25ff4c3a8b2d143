//! Lends the tunnels of this replica to others: the owner's side of `Borrow`.
//!
//! A borrow request gets a tunnel, and its stream then carries a request for the agent. If the borrower
//! supports that, the tunnel stays leased after a request, and the stream carries the next one. The borrower
//! returns a leased tunnel by half-closing the stream. It is asked to do so if the lease is revoked.
//!
//! Tunnels come from a [`TunnelSource`], the registry, and requests from a [`RequestStream`]. The listener
//! reads the headers of a borrow request, and answers with a [`LendBody`].

mod body;
mod envelopes;
mod reserved;
mod spans;

use std::{
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use grpc::Deadline;
use ids::{AgentId, ConnectionId};
use tokio::time::Instant;
use traces::Tracer;
use tunnel::{
    features::Features,
    kas_end::{Job, Tunnel},
};

use self::spans::Spans;
pub use self::{body::LendBody, envelopes::Envelopes, reserved::ReservedTunnel};
use crate::{
    metrics::RequestMetrics,
    registry::{Acquired, Borrower, Grant, Needs, Refused, TunnelLease, TunnelRegistry},
};

/// If no request begins on a lent tunnel within this time, the tunnel is returned. A request whose tunnel has
/// ended waits for the same time for another one.
pub const UNUSED: Duration = Duration::from_secs(2);
/// How long a borrow request without a deadline waits for a tunnel.
const LONGEST_WAIT: Duration = Duration::from_secs(3600);

/// Where the tunnels that are lent come from.
pub trait TunnelSource: Send + Sync + 'static {
    /// Takes an idle tunnel, or a place in the queue.
    ///
    /// # Errors
    /// See [`Refused`].
    fn borrow_or_wait(self: Arc<Self>, request: &BorrowRequest) -> Result<Acquired, Refused>;

    /// Takes a tunnel if one is idle.
    fn borrow_idle(self: Arc<Self>, request: &BorrowRequest) -> Option<Grant>;

    /// Leases a tunnel after its request is over. `None`: it is needed here.
    fn renew_lease(self: Arc<Self>, tunnel: &Arc<Tunnel>, borrower: &Borrower) -> Option<TunnelLease>;

    /// Whether a request of another replica may still find a tunnel of the agent.
    fn may_lend(&self, agent: AgentId) -> bool;
}

impl TunnelSource for TunnelRegistry {
    fn borrow_or_wait(self: Arc<Self>, request: &BorrowRequest) -> Result<Acquired, Refused> {
        let Borrower { replica, method } = &request.borrower;
        self.acquire_for(replica, request.agent, method, request.connection, request.tunnel_needs())
    }

    fn borrow_idle(self: Arc<Self>, request: &BorrowRequest) -> Option<Grant> {
        self.take(request.agent, &request.borrower.method, request.connection, request.tunnel_needs())
    }

    fn renew_lease(self: Arc<Self>, tunnel: &Arc<Tunnel>, borrower: &Borrower) -> Option<TunnelLease> {
        self.lease(tunnel, borrower)
    }

    fn may_lend(&self, agent: AgentId) -> bool {
        self.may_serve(agent)
    }
}

/// The stream on which a borrower sends requests, one after the other.
pub trait RequestStream: Send + Unpin {
    /// Reads requests from `body`. It is what remains of the stream if a request came before.
    fn new(body: grpc::Body) -> Self;

    /// Reads until the next request begins, or the stream ends. Ready once.
    fn poll_request(&mut self, cx: &mut Context<'_>) -> Poll<Next>;
}

/// What comes next on a [`RequestStream`].
#[derive(Debug)]
pub enum Next {
    /// A request. It has the rest of the stream.
    Request(Job),
    /// The borrower half-closed the stream, and nothing came before that.
    HalfClose,
    /// The stream was reset, or ended inside the first envelope of a request.
    Broken,
    /// What began is not a request, as the text explains.
    Malformed(&'static str),
}

/// What a replica asks for.
#[derive(Debug)]
pub struct BorrowRequest {
    /// The borrower, and the method.
    pub borrower: Borrower,
    /// The agent.
    pub agent: AgentId,
    /// One connection of it, or any.
    pub connection: Option<ConnectionId>,
    /// What agentk must support.
    pub needs: Features,
    /// The request may outlast the time in which kas ends other requests.
    pub is_long: bool,
    /// The request has no end of its own.
    pub is_endless: bool,
}

impl BorrowRequest {
    fn tunnel_needs(&self) -> Needs {
        Needs { features: self.needs, is_endless: self.is_endless }
    }
}

/// Why no tunnel is lent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotLent {
    /// None will come.
    Refused(Refused),
    /// None was idle until the deadline of the borrow request.
    Deadline,
}

/// Lends tunnels.
pub struct TunnelLender {
    source: Arc<dyn TunnelSource>,
    metrics: Arc<RequestMetrics>,
    tracer: Option<Tracer>,
}

impl std::fmt::Debug for TunnelLender {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TunnelLender").finish_non_exhaustive()
    }
}

impl TunnelLender {
    /// Lends the tunnels of `source`. `tracer` makes a span of each request on them.
    pub fn new(source: Arc<dyn TunnelSource>, metrics: Arc<RequestMetrics>, tracer: Option<Tracer>) -> Self {
        Self { source, metrics, tracer }
    }

    /// Takes an idle tunnel, or waits for one until `deadline`.
    ///
    /// # Errors
    /// See [`NotLent`].
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn acquire(&self, request: &BorrowRequest, deadline: Deadline) -> Result<Grant, NotLent> {
        let mut waiting = match Arc::clone(&self.source).borrow_or_wait(request).map_err(NotLent::Refused)? {
            Acquired::Now(grant) => return Ok(grant),
            Acquired::Wait(waiting) => waiting,
        };
        let until = deadline.instant().unwrap_or_else(|| Instant::now() + LONGEST_WAIT);
        match tokio::time::timeout_at(until, waiting.granted()).await {
            Ok(granted) => granted.map_err(|gone| NotLent::Refused(gone.into())),
            Err(_) => Err(NotLent::Deadline),
        }
    }

    /// Lends a granted tunnel. `leases`: the borrower can send further requests on the same stream, so the
    /// tunnel may stay leased after each.
    pub fn lend<S: RequestStream>(
        &self,
        request: BorrowRequest,
        grant: Grant,
        requests: S,
        leases: bool,
    ) -> LendBody<S> {
        let spans = self.tracer.clone().map(|tracer| Spans::new(tracer, request.borrower.replica.clone()));
        let (source, metrics) = (Arc::clone(&self.source), Arc::clone(&self.metrics));
        LendBody::new(source, request, grant, requests, leases, metrics, spans)
    }
}

#[cfg(test)]
mod tests;
