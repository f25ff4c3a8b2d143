//! From a request to a tunnel: own registry first, else wait for one, until the deadline.
//!
//! The retry rule: as long as nothing of a request was written to an agent it may go to another
//! tunnel; from then on never.

use std::{sync::Arc, time::Duration};

use cluster::Tracker;
use grpc::{Code, Deadline, Outcome, Status};
use http::{HeaderMap, HeaderValue};
use ids::{AgentId, ConnectionId};
use tokio::time::Instant;
use tunnel::{
    frame,
    kas_end::{Exchange, Failure, Head, Job},
};

use crate::{
    metadata,
    metrics::{self, ListenerName, Metrics, Reason},
    tunnel_registry::{Acquired, Grant, Refused, TunnelRegistry},
};

/// Routes requests to agents.
#[derive(Debug)]
pub struct Router {
    registry: Arc<TunnelRegistry>,
    tracker: Arc<dyn Tracker>,
    metrics: Arc<Metrics>,
    find_timeout: Duration,
}

/// A request for an agent.
pub struct AgentRequest {
    /// Which agent.
    pub agent: AgentId,
    /// One connection of it, or any.
    pub connection: Option<ConnectionId>,
    /// The full path.
    pub method: Arc<str>,
    /// The caller's headers; what may not go on is left out here.
    pub headers: HeaderMap,
    /// The request id.
    pub correlation: HeaderValue,
    /// Until when the whole answer must be there.
    pub deadline: Deadline,
    /// gRPC frames, not compressed.
    pub body: grpc::Body,
}

impl std::fmt::Debug for AgentRequest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "AgentRequest({:?}, {})", self.agent, self.method)
    }
}

/// The beginning of an answer; what follows is a body.
#[derive(Debug)]
pub struct AgentAnswer {
    /// How it begins, or all of it.
    pub head: Head,
    /// The rest, when [`Head::Headers`].
    pub body: Answering,
}

/// The rest of an answer, counted when it ends.
#[derive(Debug)]
pub struct Answering {
    exchange: Exchange,
    open: Open,
}

impl http_body::Body for Answering {
    type Data = bytes::Bytes;
    type Error = grpc::BoxError;

    fn poll_frame(
        mut self: std::pin::Pin<&mut Self>,
        cx: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Result<http_body::Frame<bytes::Bytes>, grpc::BoxError>>> {
        let polled = std::pin::Pin::new(&mut self.exchange).poll_frame(cx);
        if let std::task::Poll::Ready(Some(Ok(frame))) = &polled
            && let Some(trailers) = frame.trailers_ref()
        {
            self.open.outcome = match Status::from_headers(trailers).and_then(|status| status.outcome()) {
                Some(_) => metrics::Outcome::Unknown,
                None => metrics::Outcome::Answered,
            };
        }
        polled
    }
}

/// Counts a request as open until it drops.
#[derive(Debug)]
struct Open {
    metrics: Arc<Metrics>,
    outcome: metrics::Outcome,
}

impl Open {
    fn new(metrics: &Arc<Metrics>) -> Self {
        metrics.requests_open.inc();
        // What it stays when the caller leaves and everything is dropped.
        Self { metrics: Arc::clone(metrics), outcome: metrics::Outcome::Cancelled }
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.metrics.requests_open.dec();
        self.metrics.ended(self.outcome);
    }
}

impl Router {
    /// Routes over the tunnels of `registry`. A request without a deadline of its own waits at most
    /// `find_timeout` for a tunnel.
    pub fn new(
        registry: Arc<TunnelRegistry>,
        tracker: Arc<dyn Tracker>,
        metrics: Arc<Metrics>,
        find_timeout: Duration,
    ) -> Self {
        Self { registry, tracker, metrics, find_timeout }
    }

    /// Sends a request to its agent and returns how the answer begins.
    ///
    /// # Errors
    /// A status that says what became of the request: its [`Status::outcome`] is "not started" or
    /// "unknown", and its message names the agent and what to do.
    ///
    /// # Cancel safety
    /// Dropping the future cancels the request.
    pub async fn route(&self, request: AgentRequest) -> Result<AgentAnswer, Status> {
        let mut open = Open::new(&self.metrics);
        let result = self.attempt(request).await;
        open.outcome = match &result {
            Ok(AgentAnswer { head: Head::Headers(_), .. }) => metrics::Outcome::Cancelled,
            Ok(_) => metrics::Outcome::Answered,
            Err(status) => match status.outcome() {
                Some(Outcome::NotStarted) => metrics::Outcome::NotStarted,
                Some(Outcome::Unknown) => metrics::Outcome::Unknown,
                None => metrics::Outcome::Refused,
            },
        };
        let (head, exchange) = result.map(|(head, exchange)| (head, exchange))?;
        Ok(AgentAnswer { head, body: Answering { exchange, open } })
    }
}
