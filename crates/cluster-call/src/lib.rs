//! HTTP requests of kas itself to the API server of an agent, through its tunnel.
//!
//! [`send`] sends one request and reads its complete response; [`open`] one whose response is read part by
//! part. Everything that kas asks of a cluster uses them,
//! so it works with every agent that serves `KubernetesApi`. [`Cluster`] adds what a task that makes many
//! requests needs: an identity, records in the audit log, and a limit of the tunnels that it occupies.
//! [`ServiceRequest`] is one to a Service of the cluster, by the API server's proxy.

mod api;
mod budget;
mod cluster;
mod service;

use std::{sync::Arc, time::Duration};

use bytes::{Bytes, BytesMut};
use futures_util::stream;
use grpc::{Code, Deadline, Status};
use http::{HeaderMap, HeaderValue, Method};
use http_body::Frame;
use http_body_util::StreamBody;
use http_tunnel::kas_end::{self, ResponseReader};
use ids::{AgentId, ConnectionId, Impersonation};
use kube_request::Target;
use observe::RequestRecord;
use proto::gitlab::agent::prototool::{self, Values};
use routing::router::{AgentRequest, Answering, ChosenAgentk, RouteTrace, Router};
use tokio::time::Instant;
use tunnel::{features::Features, kas_end::Head};

#[cfg(feature = "fuzzing")]
pub use self::service::fuzz;
pub use self::{
    budget::{Budget, Held},
    cluster::{Cluster, ClusterSettings, Watching},
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
    let body = grpc::full(messages(request, call.impersonation)?);
    let (deadline, max_body, budget) = (call.deadline, call.max_body, call.budget);
    let answer = route(router, call, body, false, ChosenAgentk::default()).await?;
    let admit = |bytes| budget.map_or(Ok(()), |budget| budget.take(bytes));
    within(deadline, kas_end::read_response_within(answer, max_body, admit)).await
}

/// How long the body of a response may take whose status alone matters.
const REST: Duration = Duration::from_secs(5);

/// As [`send`], for a request of which only the status of the response matters. Of the body, the beginning is
/// kept, at most [`Call::max_body`] bytes of what comes within 5 s. A body that is larger, slower or
/// incomplete is no error.
///
/// # Errors
/// As of [`send`], until the head of the response is there.
///
/// # Cancel safety
/// As of [`send`].
pub async fn send_for_status(router: &Router, request: Request, call: Call<'_>) -> Result<Response, Status> {
    let body = grpc::full(messages(request, call.impersonation)?);
    let (deadline, max_body) = (call.deadline, call.max_body);
    let answer = route(router, call, body, false, ChosenAgentk::default()).await?;
    judged(ResponseReader::new(answer), deadline, max_body).await
}

/// Reads the head of a response, and what comes of its body.
async fn judged<B>(
    mut reading: ResponseReader<B>,
    deadline: Deadline,
    max_body: usize,
) -> Result<Response, Status>
where
    B: http_body::Body<Data = Bytes> + Unpin,
    B::Error: Into<grpc::BoxError>,
{
    let head = within(deadline, reading.head()).await?;
    let mut content = BytesMut::new();
    let rest = async {
        while content.len() < max_body
            && let Ok(Some(mut data)) = reading.data().await
        {
            data.truncate(max_body - content.len());
            content.extend_from_slice(&data);
        }
    };
    // The receiver has answered, so whatever else is the matter, the request was served.
    let _ = tokio::time::timeout(REST, rest).await;
    Ok(Response { status: head.status_code, head, body: content.freeze() })
}

/// A response that is read part by part.
#[derive(Debug)]
pub struct Opened {
    /// The status code.
    pub status: i32,
    /// What the agentk that got the request supports.
    pub features: Features,
    body: ResponseReader<Answering>,
}

impl Opened {
    /// Reads the next part of the body; `None`: the response is complete.
    ///
    /// # Errors
    /// Errors of the agent, and `INTERNAL` if the response is incomplete.
    ///
    /// # Cancel safety
    /// Cancel safe. Dropping [`Opened`] cancels the request.
    pub async fn data(&mut self) -> Result<Option<Bytes>, Status> {
        self.body.data().await
    }
}

/// Sends a request whose response has no end of its own, such as a watch, and returns when its head is there.
///
/// `for_old` is the target that an agentk gets which cannot cancel a request: one whose response ends soon.
/// The deadline of `call` is that of the head; [`Call::max_body`] has no effect.
///
/// # Errors
/// As of [`send`].
///
/// # Cancel safety
/// As of [`send`].
pub async fn open(
    router: &Router,
    request: Request,
    for_old: Target,
    call: Call<'_>,
) -> Result<Opened, Status> {
    let old = messages(Request { target: for_old, ..request.clone() }, call.impersonation)?;
    let new = messages(request, call.impersonation)?;
    let chosen = ChosenAgentk::default();
    let of = chosen.clone();
    // It is read once the router has chosen an agentk.
    let body = grpc::boxed(StreamBody::new(stream::once(async move {
        let first = if cancels(of.features()) { new } else { old };
        Ok::<_, grpc::BoxError>(Frame::data(first))
    })));
    let deadline = call.deadline;
    let answering = async {
        let mut body = ResponseReader::new(route(router, call, body, true, chosen.clone()).await?);
        let head = body.head().await?;
        Ok(Opened { status: head.status_code, features: chosen.features(), body })
    };
    within(deadline, answering).await
}

/// Whether an agentk with these features can cancel a request.
///
/// GitLab's can since the version that upgrades connections. Of an older one, a watch occupies a tunnel until
/// the API server ends it.
pub fn cancels(features: Features) -> bool {
    features.contains(Features::UPGRADE)
}

/// Returns the messages of a request.
fn messages(request: Request, impersonation: Option<&Impersonation>) -> Result<Bytes, Status> {
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
    Ok(kas_end::request_messages(http, impersonation, &request.body))
}

async fn route(
    router: &Router,
    call: Call<'_>,
    body: grpc::Body,
    is_endless: bool,
    chosen: ChosenAgentk,
) -> Result<Answering, Status> {
    let mut headers = HeaderMap::new();
    call.record.outgoing(&mut headers);
    let answer = router
        .route(AgentRequest {
            agent: call.agent,
            connection: call.connection,
            method: Arc::from(http_tunnel::METHOD),
            headers,
            correlation: call.correlation.clone(),
            // A response without an end has no deadline: that of its head is kept here.
            deadline: if is_endless { Deadline::NONE } else { call.deadline },
            wait_until: call.wait_until,
            body,
            needs: Features::IMPERSONATION.when(call.impersonation.is_some()),
            is_long: false,
            is_endless,
            chosen,
            trace: RouteTrace::default(),
            record: call.record.clone(),
        })
        .await?;
    match answer.head {
        Head::Headers(_) => Ok(answer.body),
        Head::Only(_, status) if status.code() == Code::Ok => Err(kas_end::incomplete()),
        Head::Only(_, status) => Err(status),
    }
}

async fn within<T>(
    deadline: Deadline,
    reading: impl Future<Output = Result<T, Status>>,
) -> Result<T, Status> {
    match deadline.instant() {
        None => reading.await,
        Some(at) => tokio::time::timeout_at(at, reading).await.unwrap_or_else(|_| {
            let text = "the API server's response was not complete before the deadline";
            Err(Status::new(Code::DeadlineExceeded, text).with_outcome(grpc::Outcome::Unknown))
        }),
    }
}

#[cfg(test)]
mod tests {
    use futures_util::StreamExt as _;
    use http_body_util::BodyExt as _;
    use proto::gitlab::agent::grpctool::{HttpResponse, http_response};

    use super::*;

    /// An answer with status 202, parts of a body, and then nothing more, or its end.
    fn answer(parts: &[usize], ends: bool) -> grpc::Body {
        let message = |message| grpc::encode(&HttpResponse { message: Some(message) });
        let response = prototool::HttpResponse { status_code: 202, ..prototool::HttpResponse::default() };
        let head = http_response::Header { response: Some(response) };
        let mut messages = vec![message(http_response::Message::Header(head))];
        messages.extend(parts.iter().map(|length| {
            let data = http_response::Data { data: vec![b'x'; *length].into() };
            message(http_response::Message::Data(data))
        }));
        if ends {
            messages.push(message(http_response::Message::Trailer(http_response::Trailer {})));
        }
        let sent = stream::iter(messages).map(|data| Ok::<_, grpc::BoxError>(Frame::data(data)));
        match ends {
            true => grpc::boxed(StreamBody::new(sent)),
            false => grpc::boxed(StreamBody::new(sent.chain(stream::pending()))),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_status_counts_however_large_slow_or_broken_the_body_is() {
        let deadline = || Deadline::after(Duration::from_secs(30));
        for (parts, ends, kept) in
            [(&[][..], true, 0), (&[60, 60], true, 100), (&[200], false, 100), (&[10], false, 10)]
        {
            let read = judged(ResponseReader::new(answer(parts, ends)), deadline(), 100).await.unwrap();
            assert_eq!((read.status, read.body.len()), (202, kept), "{parts:?}");
        }
        // The agent is gone in the middle of the body, and before the head.
        let broken = || Err::<Frame<Bytes>, grpc::BoxError>("gone".into());
        let head = answer(&[], false).into_data_stream().take(1).map(|data| data.map(Frame::data));
        let head = grpc::boxed(StreamBody::new(head.chain(stream::iter([broken()]))));
        assert_eq!(judged(ResponseReader::new(head), deadline(), 100).await.unwrap().status, 202);
        let nothing = grpc::boxed(StreamBody::new(stream::iter([broken()])));
        assert!(judged(ResponseReader::new(nothing), deadline(), 100).await.is_err());
        let silent = grpc::boxed(StreamBody::new(stream::pending::<Result<Frame<Bytes>, grpc::BoxError>>()));
        let late = judged(ResponseReader::new(silent), deadline(), 100).await.unwrap_err();
        assert_eq!(late.code(), Code::DeadlineExceeded);
    }
}
