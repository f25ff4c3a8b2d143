//! The private listener: other replicas borrow tunnels here, copy the table, and ask who is connected.
//!
//! Nothing is routed on: what this replica does not hold it does not have.

use std::{
    net::SocketAddr,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use arc_swap::ArcSwap;
use bytes::{Bytes, BytesMut};
use grpc::{BoxError, Code, Deadline, Outcome, Status};
use http::{HeaderMap, HeaderValue, Request, Response};
use http_body::{Body as _, Frame};
use hyper::body::Incoming;
use ids::{AgentId, ConnectionId, ReplicaId};
use runtime::http2::{Answer, Body, Connection, GoAway, Refusal, Service, Standing, StreamSlot};
use tokio::time::{Instant, Sleep};
use tunnel::{
    frame,
    kas_end::{Job, Splice},
};

use super::{Own, Trust, count_refusal, failed, not_grpc};
use crate::{
    auth::JwtVerifier,
    metadata,
    metrics::{AskAnswer, ListenerName, Metrics, Reason, Side},
    peer,
    tunnel_registry::{Acquired, Gone, Grant, Refused, TunnelRegistry},
};

/// A lent tunnel goes back when its request has not begun after this time.
const UNUSED: Duration = Duration::from_secs(2);
/// How long an ask without a deadline waits.
const LONGEST_WAIT: Duration = Duration::from_secs(3600);

/// What the private listener needs.
pub struct PrivateListener {
    /// Exchanged when the secret files change.
    jwt: ArcSwap<JwtVerifier>,
    me: ReplicaId,
    registry: Arc<TunnelRegistry>,
    metrics: Arc<Metrics>,
    services: Vec<(String, Own)>,
}

impl std::fmt::Debug for PrivateListener {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PrivateListener").field("me", &self.me).finish_non_exhaustive()
    }
}

impl PrivateListener {
    /// Makes the listener's service. `services` answer everything but `Borrow`.
    pub fn new(
        jwt: JwtVerifier,
        me: ReplicaId,
        registry: Arc<TunnelRegistry>,
        metrics: Arc<Metrics>,
        services: Vec<(String, Own)>,
    ) -> Arc<Self> {
        Arc::new(Self { jwt: ArcSwap::from_pointee(jwt), me, registry, metrics, services })
    }

    /// Checks tokens against other secrets from now on.
    pub fn rotate(&self, jwt: JwtVerifier) {
        self.jwt.store(Arc::new(jwt));
    }
}

impl Service for PrivateListener {
    fn connected(self: Arc<Self>, _peer: Option<SocketAddr>) -> Arc<dyn Connection> {
        Arc::new(Replica { listener: Arc::clone(&self), trust: Trust::default() })
    }

    fn refused(&self, why: Refusal) {
        count_refusal(&self.metrics, ListenerName::Private, why);
    }
}

/// One connection of another replica.
struct Replica {
    listener: Arc<PrivateListener>,
    trust: Trust,
}

impl Connection for Replica {
    fn call(self: Arc<Self>, request: Request<Incoming>, _slot: &StreamSlot) -> Answer {
        if let Some(response) = not_grpc(request.method(), request.headers()) {
            self.trust.failed();
            return Box::pin(std::future::ready(response));
        }
        let correlation = metadata::correlation(request.headers());
        let refuse =
            |status: &Status| -> Answer { Box::pin(std::future::ready(failed(status, &correlation))) };
        if let Err(status) = self.listener.jwt.load().verify(request.headers()) {
            self.trust.failed();
            self.listener.metrics.refused(ListenerName::Private, Reason::Unauthenticated);
            return refuse(&status);
        }
        self.trust.passed();
        // Another cluster's replica may have had this address before, or another process this port.
        if let Some(to) = request.headers().get(peer::TO)
            && to.as_bytes() != self.listener.me.as_str().as_bytes()
        {
            let text = format!("this is replica {}, not the one that was meant", self.listener.me);
            return refuse(&Status::new(Code::Unavailable, text).with_outcome(Outcome::NotStarted));
        }
        let path = request.uri().path();
        if path == peer::BORROW {
            return Box::pin(lend(Arc::clone(&self.listener), request, correlation));
        }
        match self.listener.services.iter().find(|(prefix, _)| path.starts_with(prefix)) {
            Some((_, own)) => {
                let own = Arc::clone(own);
                Box::pin(async move { own(request.map(grpc::boxed)).await })
            }
            None => {
                refuse(&Status::new(Code::Unimplemented, "unknown method; this is the private API of kas"))
            }
        }
    }

    fn standing(&self) -> Standing {
        self.trust.standing()
    }

    fn going_away(&self, _reason: GoAway) {}
}

/// What an ask says.
#[derive(Debug)]
struct Ask {
    from: ReplicaId,
    agent: AgentId,
    connection: Option<ConnectionId>,
    method: Arc<str>,
    deadline: Deadline,
}

impl Ask {
    fn read(headers: &HeaderMap) -> Result<Self, Status> {
        let invalid = |text: String| Status::new(Code::InvalidArgument, text);
        let text = |key: &http::HeaderName| {
            headers
                .get(key)
                .and_then(|value| value.to_str().ok())
                .ok_or_else(|| invalid(format!("{key} is missing")))
        };
        if text(&peer::FORWARDED)? != "1" {
            return Err(invalid(format!("{}: a request passes at most two replicas", peer::FORWARDED)));
        }
        let connection = match headers.get(peer::CONNECTION) {
            None => None,
            Some(_) => Some(
                text(&peer::CONNECTION)?
                    .parse()
                    .map_err(|error| invalid(format!("{}: {error}", peer::CONNECTION)))?,
            ),
        };
        Ok(Self {
            from: ReplicaId::new(text(&peer::FROM)?),
            agent: text(&peer::AGENT)?
                .parse()
                .map_err(|error| invalid(format!("{}: {error}", peer::AGENT)))?,
            connection,
            method: text(&peer::METHOD)?.into(),
            deadline: Deadline::from_headers(headers).map_err(|error| invalid(error.to_string()))?,
        })
    }
}

async fn lend(
    listener: Arc<PrivateListener>,
    request: Request<Incoming>,
    correlation: HeaderValue,
) -> Response<Body> {
    let ask = match Ask::read(request.headers()) {
        Ok(ask) => ask,
        Err(status) => return failed(&status, &correlation),
    };
    let count = |answer| listener.metrics.asked(Side::Answered, answer);
    let acquired = listener.registry.acquire_for(&ask.from, ask.agent, &ask.method, ask.connection);
    let granted = match acquired {
        Ok(Acquired::Now(grant)) => Ok(grant),
        Ok(Acquired::Wait(mut waiting)) => {
            let until = ask.deadline.instant().unwrap_or_else(|| Instant::now() + LONGEST_WAIT);
            match tokio::time::timeout_at(until, waiting.granted()).await {
                Ok(Ok(grant)) => Ok(grant),
                Ok(Err(Gone::Leaving)) => Err(Refused::Draining),
                Ok(Err(Gone::NotHere(mark))) => Err(Refused::NotHere(mark)),
                Err(_) => {
                    let status = Status::new(Code::DeadlineExceeded, "no tunnel was idle until the deadline")
                        .with_outcome(Outcome::NotStarted);
                    return failed(&status, &correlation);
                }
            }
        }
        Err(refused) => Err(refused),
    };
    let grant = match granted {
        Ok(grant) => grant,
        Err(refused) => {
            count(match refused {
                Refused::NotHere(_) => AskAnswer::NotHere,
                Refused::Draining => AskAnswer::Unavailable,
                Refused::Unimplemented | Refused::OtherConnection | Refused::Full => AskAnswer::Refused,
            });
            let status = crate::router::refusal(refused, ask.agent, ask.connection, &ask.method);
            let mut response = failed(&status, &correlation);
            if let Refused::NotHere(mark) = refused {
                response.headers_mut().insert(peer::EPOCH, mark.epoch.into());
                response.headers_mut().insert(peer::VERSION, mark.version.into());
            }
            return response;
        }
    };
    count(AskAnswer::Ready);
    let kind = peer::kind(grant.tunnel().info().peer);
    let body = LendBody {
        agent: ask.agent,
        state: State::Unused {
            grant,
            request: request.into_body(),
            first: BytesMut::new(),
            until: Box::pin(tokio::time::sleep(UNUSED)),
        },
        metrics: Arc::clone(&listener.metrics),
    };
    let mut response = Response::new(grpc::boxed(body));
    let headers = response.headers_mut();
    headers.insert(http::header::CONTENT_TYPE, grpc::CONTENT_TYPE);
    headers.insert(peer::KIND, kind);
    response
}

/// The answer to an ask: first a tunnel that is lent, then what the agent answers through it.
struct LendBody {
    agent: AgentId,
    state: State,
    metrics: Arc<Metrics>,
}

#[expect(clippy::large_enum_variant, reason = "one per stream, and its body is boxed as a whole")]
enum State {
    Unused { grant: Grant, request: Incoming, first: BytesMut, until: Pin<Box<Sleep>> },
    Open(Open),
    Over,
}

/// A request that runs through a tunnel of this replica for another one.
struct Open {
    splice: Splice,
    metrics: Arc<Metrics>,
}

impl Drop for Open {
    fn drop(&mut self) {
        self.metrics.requests_open.dec();
    }
}

impl LendBody {
    fn not_started(&mut self, code: Code, why: &str) -> Frame<Bytes> {
        self.state = State::Over;
        let mut trailers = HeaderMap::with_capacity(3);
        Status::new(code, format!("{why}: no request of agent {} was started", self.agent))
            .with_outcome(Outcome::NotStarted)
            .write_to(&mut trailers);
        Frame::trailers(trailers)
    }

    /// Reads until the first envelope is complete, then begins the request.
    fn poll_unused(&mut self, cx: &mut Context<'_>) -> Poll<Option<Frame<Bytes>>> {
        let State::Unused { request, first, until, .. } = &mut self.state else { return Poll::Ready(None) };
        loop {
            match first_envelope(first) {
                Ok(Some(len)) => return Poll::Ready(self.begin(len)),
                Ok(None) => {}
                Err(why) => return Poll::Ready(Some(self.not_started(Code::Internal, why))),
            }
            match Pin::new(&mut *request).poll_frame(cx) {
                Poll::Ready(Some(Ok(frame))) => {
                    if let Ok(data) = frame.into_data() {
                        first.extend_from_slice(&data);
                    }
                }
                Poll::Ready(_) => {
                    return Poll::Ready(Some(self.not_started(Code::Unavailable, "the ask was taken back")));
                }
                Poll::Pending => {
                    ready!(until.as_mut().poll(cx));
                    let why = "the lent tunnel was not used for 2 s";
                    return Poll::Ready(Some(self.not_started(Code::Unavailable, why)));
                }
            }
        }
    }

    fn begin(&mut self, len: usize) -> Option<Frame<Bytes>> {
        let State::Unused { grant, request, mut first, .. } = std::mem::replace(&mut self.state, State::Over)
        else {
            return None;
        };
        let request_info = first.split_to(len).freeze();
        let body = grpc::boxed(Rest { first: first.freeze(), body: request });
        match grant.take().begin_spliced(Job { request_info, body }) {
            Ok(splice) => {
                self.metrics.requests_open.inc();
                self.state = State::Open(Open { splice, metrics: Arc::clone(&self.metrics) });
                None
            }
            Err(_) => Some(self.not_started(Code::Unavailable, "the lent tunnel has ended")),
        }
    }
}

/// Returns the length of the first envelope once it is complete.
fn first_envelope(bytes: &[u8]) -> Result<Option<usize>, &'static str> {
    let Some((prefix, rest)) = bytes.split_at_checked(grpc::PREFIX_LEN) else { return Ok(None) };
    let len = u32::from_be_bytes([prefix[1], prefix[2], prefix[3], prefix[4]]) as usize;
    if prefix[0] != 0 || len > frame::MAX_CONTROL + 16 {
        return Err("the first envelope is compressed or too large");
    }
    if rest.first().is_some_and(|tag| *tag != (frame::response::REQUEST_INFO as u8) << 3 | 2) {
        return Err("the first envelope is no request_info");
    }
    Ok((rest.len() >= len).then_some(grpc::PREFIX_LEN + len))
}

impl http_body::Body for LendBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        if matches!(self.state, State::Unused { .. })
            && let Some(frame) = ready!(self.poll_unused(cx))
        {
            return Poll::Ready(Some(Ok(frame)));
        }
        match &mut self.state {
            State::Open(open) => Pin::new(&mut open.splice).poll_frame(cx),
            State::Unused { .. } | State::Over => Poll::Ready(None),
        }
    }
}

/// What follows the first envelope.
struct Rest {
    first: Bytes,
    body: Incoming,
}

impl http_body::Body for Rest {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        if !self.first.is_empty() {
            return Poll::Ready(Some(Ok(Frame::data(std::mem::take(&mut self.first)))));
        }
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.first.is_empty() && self.body.is_end_stream()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn asks_are_read_and_those_that_went_too_far_are_refused() {
        let ask = |pairs: &[(&http::HeaderName, &'static str)]| {
            let mut headers = HeaderMap::new();
            for (key, value) in pairs {
                headers.insert((*key).clone(), HeaderValue::from_static(value));
            }
            Ask::read(&headers).map_err(|status| status.message().to_owned())
        };
        let good = [
            (&peer::FORWARDED, "1"),
            (&peer::FROM, "10.0.0.1:8155"),
            (&peer::AGENT, "3"),
            (&peer::METHOD, "/s/M"),
        ];
        let read = ask(&good).unwrap();
        assert_eq!((read.agent.get(), read.connection, &*read.method), (3, None, "/s/M"));
        for n in 0..good.len() {
            let mut missing = good.to_vec();
            missing.remove(n);
            assert!(ask(&missing).is_err_and(|text| text.contains("is missing")), "{n}");
        }
        let mut twice = good;
        twice[0].1 = "2";
        assert!(ask(&twice).is_err_and(|text| text.contains("at most two replicas")));
        let mut wrong = good.to_vec();
        let connection = peer::CONNECTION;
        wrong.push((&connection, "0"));
        assert!(ask(&wrong).is_err_and(|text| text.starts_with("kas-hop-connection:")));
    }

    #[test]
    fn the_first_envelope_is_found_at_every_split() {
        let mut bytes = BytesMut::new();
        frame::put_control(frame::response::REQUEST_INFO, b"info", &mut bytes);
        let len = bytes.len();
        frame::put_message_head(frame::response::MESSAGE, 3, &mut bytes);
        for end in 0..bytes.len() {
            let expected = (end >= len).then_some(len);
            assert_eq!(first_envelope(&bytes[..end]), Ok(expected), "{end}");
        }
        assert!(first_envelope(&bytes[len..]).is_err(), "a message cannot come first");
        assert!(first_envelope(&[1, 0, 0, 0, 1]).is_err() && first_envelope(&[0, 0xff, 0, 0, 0]).is_err());
    }
}
