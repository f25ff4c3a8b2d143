//! The private API of GitLab's kas 14.1, for its replicas that found the address of this one in Redis.
//!
//! As in 14.1, the method and the metadata are those of the request, `kas-hop-routing-agent-id` names the
//! agent, and nothing is routed on. 14.1 lets a request wait without a limit. Here, a request for an agent
//! that is not connected, or has no idle tunnel for some time, is answered in a way that makes 14.1 try its
//! next record.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::{Buf as _, Bytes, BytesMut};
use grpc::{BoxError, Code, Deadline, Outcome, Status};
use http::{HeaderMap, HeaderValue, Request, Response};
use http_body::{Body as HttpBody, Frame};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use ids::{AgentId, ReplicaId};
use net::http::Body;
use tokio::time::Instant;
use traces::{Kind, Span};
use tunnel::{
    features::Features,
    frame,
    kas_end::{
        Failure, Job,
        gitlab::{Answer, READY},
    },
};

use super::PrivateListener;
use crate::listener::failed;
use observe::refusals::ListenerName;
use routing::{
    lending::{ReservedTunnel, UNUSED},
    metadata,
    metrics::{AskAnswer, RequestMetrics, Side},
    peer::gitlab::AGENT,
    refusal,
    registry::{Acquired, Grant, Refused},
};

/// How long a request waits for a tunnel of an agent that is here. 14.1 asks one replica after the other, and
/// begins again every 3 s, so that another replica with an idle tunnel is asked too.
const BUSY: Duration = Duration::from_secs(3);
/// The maximum size of `StartStreaming` in bytes. It has no fields, but a later version may add some.
const LONGEST_START: usize = 1024;

/// A request of a replica of GitLab's kas.
struct Asked {
    listener: Arc<PrivateListener>,
    from: ReplicaId,
    agent: AgentId,
    method: Arc<str>,
    headers: HeaderMap,
    correlation: HeaderValue,
    deadline: Deadline,
}

/// Reads for which agent the request is.
///
/// # Errors
/// With the texts of 14.1.
fn agent(headers: &HeaderMap) -> Result<AgentId, Status> {
    let invalid = |text: String| Status::new(Code::InvalidArgument, text);
    let mut values = headers.get_all(&AGENT).iter();
    let (Some(value), None) = (values.next(), values.next()) else {
        let got = headers.get_all(&AGENT).iter().count();
        return Err(invalid(format!("Expecting a single {AGENT}, got {got}")));
    };
    value.to_str().ok().and_then(|text| text.parse().ok()).ok_or_else(|| invalid(format!("Invalid {AGENT}")))
}

/// Answers a request of a replica of GitLab's kas.
pub(super) async fn serve(
    listener: Arc<PrivateListener>,
    request: Request<Incoming>,
    correlation: HeaderValue,
    from: ReplicaId,
) -> Response<Body> {
    let (head, body) = request.into_parts();
    let deadline = Deadline::from_headers(&head.headers)
        .map_err(|error| Status::new(Code::InvalidArgument, error.to_string()));
    let (agent, deadline) = match agent(&head.headers).and_then(|agent| Ok((agent, deadline?))) {
        Ok(read) => read,
        Err(status) => return failed(&status, &correlation),
    };
    if !metadata::is_method(&head.uri) {
        let text = "not a method of an agent: expected /package.Service/Method";
        return failed(&Status::new(Code::Unimplemented, text), &correlation);
    }
    let asked = Asked {
        listener,
        from,
        agent,
        method: head.uri.path().into(),
        headers: head.headers,
        correlation: correlation.clone(),
        deadline,
    };
    let count = |answer| asked.listener.metrics.asked_gitlab(Side::Answered, answer);
    let grant = match asked.find(BUSY).await {
        Ok(grant) => grant,
        Err(Elsewhere::TryNext(answer)) => {
            count(answer);
            return failed(&Status::new(Code::Ok, ""), &correlation);
        }
        Err(Elsewhere::Final(answer, status)) => {
            count(answer);
            return failed(&status, &correlation);
        }
    };
    count(AskAnswer::Ready);
    let span = asked.span();
    let open = Open::new(&asked.listener.metrics, span);
    let reserved = ReservedTunnel::new(grant);
    let start = Box::pin(asked.start(reserved, grpc::boxed(body)));
    let mut response =
        Response::new(grpc::boxed(GatewayBody { state: State::Lent(Some(READY), start), open }));
    response.headers_mut().insert(http::header::CONTENT_TYPE, grpc::CONTENT_TYPE);
    response
}

/// Why the request gets no tunnel here.
enum Elsewhere {
    /// Another replica may have one.
    TryNext(AskAnswer),
    /// No other replica can serve it either.
    Final(AskAnswer, Status),
}

type Started = Result<Option<Answer>, Status>;

impl Asked {
    async fn find(&self, patience: Duration) -> Result<Grant, Elsewhere> {
        let refused = |refused: Refused| match refused {
            Refused::NotHere(_) | Refused::Draining | Refused::Full | Refused::Endless(_) => {
                Elsewhere::TryNext(refused.answer())
            }
            Refused::Unimplemented
            | Refused::OtherConnection
            | Refused::Unbound
            | Refused::Unsupported(_)
            | Refused::UnknownNeed => {
                let status = refusal::status(refused, self.agent, None, &self.method);
                Elsewhere::Final(refused.answer(), status)
            }
        };
        let registry = &self.listener.registry;
        let mut waiting = match registry
            .acquire_for(&self.from, self.agent, &self.method, None, Features::NONE)
            .map_err(refused)?
        {
            Acquired::Now(grant) => return Ok(grant),
            Acquired::Wait(waiting) => waiting,
        };
        let patience = Instant::now() + patience;
        let until = self.deadline.instant().map_or(patience, |deadline| deadline.min(patience));
        match tokio::time::timeout_at(until, waiting.granted()).await {
            Ok(Ok(grant)) => Ok(grant),
            Ok(Err(gone)) => Err(refused(gone.into())),
            Err(_) if until < patience => {
                let text = "no tunnel was idle until the deadline";
                let status = Status::new(Code::DeadlineExceeded, text).with_outcome(Outcome::NotStarted);
                Err(Elsewhere::Final(AskAnswer::Refused, status))
            }
            Err(_) => Err(Elsewhere::TryNext(AskAnswer::Refused)),
        }
    }

    /// Begins a span of the request at this replica, below the span of the other replica.
    fn span(&self) -> Option<Span> {
        let tracer = self.listener.tracer.as_ref()?;
        let mut span =
            tracer.begin(self.method.trim_start_matches('/').to_owned(), Kind::Server, &self.headers);
        if span.is_recording() {
            span.set("rpc.system", "grpc");
            span.set("kas.agent.id", self.agent.get());
            span.set("kas.from.replica", self.from.as_str().to_owned());
            if let Ok(id) = self.correlation.to_str() {
                span.set("gitlab.correlation_id", id.to_owned());
            }
        }
        Some(span)
    }

    /// Waits for `StartStreaming`, gives a tunnel the request, and waits for the beginning of the response.
    /// `None`: the other replica does not need the tunnel any more.
    async fn start(self, reserved: ReservedTunnel, mut body: grpc::Body) -> Started {
        let not_started = |code, text: String| Status::new(code, text).with_outcome(Outcome::NotStarted);
        let rest = match tokio::time::timeout(UNUSED, start_streaming(&mut body)).await {
            Ok(Ok(Some(rest))) => rest,
            Ok(Ok(None)) => return Ok(None),
            Ok(Err(why)) => return Err(not_started(Code::InvalidArgument, why.to_owned())),
            Err(_) => {
                return Err(not_started(Code::Unavailable, "no StartStreaming came within 2 s".to_owned()));
            }
        };
        let mut body = grpc::boxed(Ahead { first: rest, body });
        let mut reserved = reserved;
        loop {
            let binary = reserved.tunnel().info().kind.binary();
            let info =
                metadata::request_info(&self.method, &self.headers, self.deadline, &self.correlation, binary)
                    .map_err(|error| {
                        metadata::untransferable(&error, &self.listener.refusals, ListenerName::Private)
                    })?;
            let mut request_info = BytesMut::with_capacity(512);
            info.put_control(frame::response::REQUEST_INFO, &mut request_info);
            let job = Job::new(request_info.freeze(), body);
            // As long as nothing is written to the agent, another tunnel may serve the request.
            body = match reserved.take().begin(job, self.deadline) {
                Err(job) => job.into_body(),
                Ok(mut exchange) => match exchange.head().await {
                    Ok(head) => return Ok(Some(Answer::new(exchange, head))),
                    Err(Failure::NotStarted(job)) => job.into_body(),
                    Err(Failure::Refused) => {
                        let agent = self.agent;
                        let text = format!("agent {agent} closed its tunnel before it started the request");
                        return Err(not_started(Code::Unavailable, text));
                    }
                    Err(failure) => return Err(exchange.late_status(&failure)),
                },
            };
            reserved = match self.find(UNUSED).await {
                Ok(grant) => ReservedTunnel::new(grant),
                Err(Elsewhere::Final(_, status)) => return Err(status),
                Err(Elsewhere::TryNext(_)) => {
                    let text = format!("the tunnel of agent {} has ended, and no other is idle", self.agent);
                    return Err(not_started(Code::Unavailable, text));
                }
            };
            self.listener.metrics.borrows_moved.inc();
        }
    }
}

/// Waits for `StartStreaming` and returns the bytes that were read after it. `None`: the stream ended
/// instead.
async fn start_streaming(body: &mut grpc::Body) -> Result<Option<Bytes>, &'static str> {
    let mut read = BytesMut::new();
    loop {
        if let [flag, a, b, c, d, ..] = *read {
            let len = u32::from_be_bytes([a, b, c, d]) as usize;
            if flag != 0 || len > LONGEST_START {
                return Err("the first message is no StartStreaming");
            }
            if read.len() >= grpc::PREFIX_LEN + len {
                read.advance(grpc::PREFIX_LEN + len);
                return Ok(Some(read.freeze()));
            }
        }
        match body.frame().await {
            Some(Ok(frame)) => {
                if let Ok(data) = frame.into_data() {
                    read.extend_from_slice(&data);
                }
            }
            Some(Err(_)) => return Err("the stream broke before StartStreaming"),
            None if read.is_empty() => return Ok(None),
            None => return Err("the stream ended inside StartStreaming"),
        }
    }
}

/// A body whose first bytes were read before.
struct Ahead {
    first: Bytes,
    body: grpc::Body,
}

impl HttpBody for Ahead {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let this = self.get_mut();
        if this.first.is_empty() {
            return Pin::new(&mut this.body).poll_frame(cx);
        }
        Poll::Ready(Some(Ok(Frame::data(std::mem::take(&mut this.first)))))
    }

    fn is_end_stream(&self) -> bool {
        self.first.is_empty() && self.body.is_end_stream()
    }
}

/// Counts a request as open until it drops, and ends its span.
struct Open {
    metrics: Arc<RequestMetrics>,
    span: Option<Span>,
}

impl Open {
    fn new(metrics: &Arc<RequestMetrics>, span: Option<Span>) -> Self {
        metrics.requests_open.inc();
        Self { metrics: Arc::clone(metrics), span }
    }

    fn end(&mut self, code: Code) {
        if let Some(mut span) = self.span.take() {
            span.set("rpc.grpc.status_code", i64::from(code.number()));
            if code != Code::Ok {
                span.failed(code.name());
            }
        }
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.end(Code::Cancelled);
        self.metrics.requests_open.dec();
    }
}

/// The response: a message that a tunnel is ready, and then the agent's response. Dropped before its end, it
/// cancels the request.
struct GatewayBody {
    state: State,
    open: Open,
}

#[expect(clippy::large_enum_variant, reason = "one per stream, and its body is boxed as a whole")]
enum State {
    /// The first message, and the future that waits for the request and begins it.
    Lent(Option<Bytes>, Pin<Box<dyn Future<Output = Started> + Send>>),
    Answer(Answer),
    Over,
}

impl GatewayBody {
    fn end(&mut self, status: &Status) -> Frame<Bytes> {
        self.state = State::Over;
        self.open.end(status.code());
        let mut trailers = HeaderMap::with_capacity(3);
        status.write_to(&mut trailers);
        Frame::trailers(trailers)
    }
}

impl HttpBody for GatewayBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let this = self.get_mut();
        loop {
            match &mut this.state {
                State::Lent(first, start) => {
                    if let Some(ready) = first.take() {
                        return Poll::Ready(Some(Ok(Frame::data(ready))));
                    }
                    match ready!(start.as_mut().poll(cx)) {
                        Ok(Some(answer)) => this.state = State::Answer(answer),
                        Ok(None) => return Poll::Ready(Some(Ok(this.end(&Status::new(Code::Ok, ""))))),
                        Err(status) => return Poll::Ready(Some(Ok(this.end(&status)))),
                    }
                }
                State::Answer(answer) => {
                    let frame = ready!(Pin::new(answer).poll_frame(cx));
                    if let Some(Ok(frame)) = &frame
                        && let Some(trailers) = frame.trailers_ref()
                    {
                        this.open.end(Status::from_headers(trailers).map_or(Code::Unknown, |s| s.code()));
                    }
                    return Poll::Ready(frame);
                }
                State::Over => return Poll::Ready(None),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_agent_is_read_as_14_1_reads_it() {
        let read = |values: &[&'static str]| {
            let mut headers = HeaderMap::new();
            for value in values {
                headers.append(AGENT, HeaderValue::from_static(value));
            }
            agent(&headers).map(AgentId::get).map_err(|status| status.message().to_owned())
        };
        assert_eq!(read(&["3"]), Ok(3));
        for (values, text) in [
            (&[][..], "Expecting a single kas-hop-routing-agent-id, got 0"),
            (&["1", "2"], "Expecting a single kas-hop-routing-agent-id, got 2"),
            (&["x"], "Invalid kas-hop-routing-agent-id"),
        ] {
            assert_eq!(read(values), Err(text.to_owned()), "{values:?}");
        }
    }

    #[tokio::test]
    async fn start_streaming_is_found_at_every_split_and_nothing_else_is_taken_for_it() {
        let body = |pieces: Vec<Vec<u8>>| {
            let frames = pieces.into_iter().map(|piece| Ok::<_, BoxError>(Frame::data(Bytes::from(piece))));
            grpc::boxed(http_body_util::StreamBody::new(futures_util::stream::iter(frames)))
        };
        let whole = [0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 9];
        for split in 0..whole.len() {
            let mut body = body(vec![whole[..split].to_vec(), whole[split..].to_vec()]);
            let rest = start_streaming(&mut body).await.unwrap().unwrap();
            let ahead = grpc::boxed(Ahead { first: rest, body });
            assert_eq!(ahead.collect().await.unwrap().to_bytes(), [0, 0, 0, 0, 1, 9][..], "{split}");
        }
        assert_eq!(start_streaming(&mut body(Vec::new())).await, Ok(None));
        for wrong in [vec![0], vec![1, 0, 0, 0, 0], vec![0, 0, 0, 5, 0]] {
            assert!(start_streaming(&mut body(vec![wrong.clone()])).await.is_err(), "{wrong:?}");
        }
    }
}
