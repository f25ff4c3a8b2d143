//! HTTP requests of kas itself to the API server of an agent, through its tunnel.
//!
//! [`send`] sends one request and reads its complete response. Everything that kas asks of a cluster uses it,
//! so it works with every agent that serves `KubernetesApi`. [`Cluster`] adds what a task that makes many
//! requests needs: an identity, records in the audit log, and a limit of the tunnels that it occupies.
//! [`ServiceRequest`] is one to a Service of the cluster, by the API server's proxy.

mod api;
mod budget;
mod cluster;
mod service;

use std::sync::Arc;

use bytes::Bytes;
use grpc::{Code, Deadline, Status};
use http::{HeaderMap, HeaderValue, Method};
use http_tunnel::kas_end;
use ids::{AgentId, ConnectionId, Impersonation};
use kube_request::Target;
use observe::RequestRecord;
use proto::gitlab::agent::prototool::{self, Values};
use routing::router::{AgentRequest, ChosenAgentk, RouteTrace, Router};
use tokio::time::Instant;
use tunnel::{features::Features, kas_end::Head};

pub use self::{
    budget::Budget,
    cluster::{Cluster, ClusterSettings},
    service::{ServiceRequest, ServiceResponse},
};

/// A request to an API server.
#[derive(Clone, Debug)]
pub struct Request {
    /// The method.
    pub method: Method,
    /// Path and query. Agents of GitLab get them decoded, so they must be text then and have no `%2F`.
    pub target: Target,
    /// Headers by their canonical names, such as `Content-Type`.
    pub headers: Vec<(String, String)>,
    /// The body; it may be empty.
    pub body: Bytes,
}

impl Request {
    /// Returns a request without headers and body.
    pub fn new(method: Method, target: Target) -> Self {
        Self { method, target, headers: Vec::new(), body: Bytes::new() }
    }

    /// Adds a header by its canonical name.
    #[must_use]
    pub fn header(mut self, name: &str, value: impl Into<String>) -> Self {
        self.headers.push((name.to_owned(), value.into()));
        self
    }
}

/// To whom a request goes, and on what terms.
#[derive(Clone, Debug)]
pub struct Call<'a> {
    /// The agent.
    pub agent: AgentId,
    /// One connection of it; `None`: any.
    pub connection: Option<ConnectionId>,
    /// As whom the request runs; `None`: with the agent's own rights. An agentk that cannot impersonate never
    /// gets such a request.
    pub impersonation: Option<&'a Impersonation>,
    /// The request id.
    pub correlation: &'a HeaderValue,
    /// When the response must be complete.
    pub deadline: Deadline,
    /// Until when the request waits for a tunnel; `None`: as the router decides.
    pub wait_until: Option<Instant>,
    /// The record of the request.
    pub record: &'a RequestRecord,
    /// The largest body of a response, in bytes.
    pub max_body: usize,
    /// What responses may hold together; `None`: there is no such limit.
    pub budget: Option<&'a Budget>,
}

pub use http_tunnel::kas_end::Response;

/// Sends a request and reads its complete response.
///
/// # Errors
/// Errors of the router, `UNIMPLEMENTED` if the target cannot be sent to this agent, `RESOURCE_EXHAUSTED` if
/// the response is too large or the budget is used up, and `INTERNAL` if it is incomplete.
/// [`Status::outcome`] tells whether the request may have reached the API server; `None` means that it may
/// have.
///
/// # Cancel safety
/// Dropping the future cancels the request, which may have reached the API server by then.
pub async fn send(router: &Router, request: Request, call: Call<'_>) -> Result<Response, Status> {
    if !request.target.fits_url_path(false) {
        return Err(Status::new(Code::Unimplemented, "the path has bytes that not every agent can request"));
    }
    let one = |value: String| Values { value: vec![value] };
    let header = request.headers.into_iter().map(|(name, value)| (name, one(value)));
    let query = request.target.query_values().into_iter().map(|(key, value)| (key, Values { value }));
    let http = prototool::HttpRequest {
        method: request.method.as_str().to_owned(),
        header: header.collect(),
        url_path: request.target.path().to_owned(),
        query: query.collect(),
    };
    let body = kas_end::request_messages(http, call.impersonation, &request.body);
    let mut headers = HeaderMap::new();
    call.record.outgoing(&mut headers);
    let answer = router
        .route(AgentRequest {
            agent: call.agent,
            connection: call.connection,
            method: Arc::from(http_tunnel::METHOD),
            headers,
            correlation: call.correlation.clone(),
            deadline: call.deadline,
            wait_until: call.wait_until,
            body: grpc::full(body),
            needs: Features::IMPERSONATION.when(call.impersonation.is_some()),
            is_long: false,
            is_endless: false,
            chosen: ChosenAgentk::default(),
            trace: RouteTrace::default(),
            record: call.record.clone(),
        })
        .await?;
    if let Head::Only(_, status) = answer.head {
        return Err(if status.code() == Code::Ok { kas_end::incomplete() } else { status });
    }
    let admit = |bytes| match call.budget {
        None => Ok(()),
        Some(budget) => budget.take(bytes),
    };
    let reading = kas_end::read_response_within(answer.body, call.max_body, admit);
    match call.deadline.instant() {
        None => reading.await,
        Some(at) => tokio::time::timeout_at(at, reading).await.unwrap_or_else(|_| {
            let text = "the API server's response was not complete before the deadline";
            Err(Status::new(Code::DeadlineExceeded, text).with_outcome(grpc::Outcome::Unknown))
        }),
    }
}
