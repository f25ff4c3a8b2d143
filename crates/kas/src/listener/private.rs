//! The private listener: here other replicas borrow tunnels, copy the table, and ask which agents are
//! connected.
//!
//! Nothing is routed on: a tunnel that this replica does not hold is not lent. Replicas of GitLab's kas 14.1
//! borrow in another form, see `gateway`.

mod gateway;

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use arc_swap::ArcSwap;
use grpc::{Code, Deadline, Outcome, Status, service::LocalService};
use http::{HeaderMap, HeaderValue, Request, Response};
use hyper::body::Incoming;
use identity::jwt::JwtVerifier;
use ids::ReplicaId;
use net::http::{Answer, AuthState, Body, Connection, GoAway, Refusal, Service, StreamSlot, Trust};
use parking_lot::Mutex;
use tokio::time::Instant;
use traces::Tracer;
use tunnel::{features::Features, state::Mode};

use super::{failed, not_grpc, too_large, too_many_fields};
use kas_config::Attempts;
use observe::refusals::{ListenerName, Reason, Refusals};
use routing::{
    lending::{BorrowRequest, Envelopes, NotLent, RequestStream as _, TunnelLender, TunnelSource},
    metadata,
    metrics::{AskAnswer, RequestMetrics, Side},
    peer, refusal,
    registry::{Borrower, Refused, TunnelRegistry},
};

/// At most one warning about failed handshakes is logged in this time.
const WARN_INTERVAL: Duration = Duration::from_secs(60);

/// The service of the private listener.
pub struct PrivateListener {
    /// Replaced when the secret files change.
    jwt: ArcSwap<JwtVerifier>,
    me: ReplicaId,
    registry: Arc<TunnelRegistry>,
    lender: TunnelLender,
    metrics: Arc<RequestMetrics>,
    refusals: Arc<Refusals>,
    services: Vec<(String, LocalService)>,
    /// When the last warning about a failed handshake was logged.
    warned: Mutex<Option<Instant>>,
    tracer: Option<Tracer>,
    attempts: Attempts,
}

impl std::fmt::Debug for PrivateListener {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PrivateListener").field("me", &self.me).finish_non_exhaustive()
    }
}

impl PrivateListener {
    /// Creates the service. `services` answer everything except `Borrow`, by the prefix of the path. `tracer`
    /// makes spans of the requests on lent tunnels. `attempts` limits what a connection may do.
    pub fn new(
        jwt: JwtVerifier,
        me: ReplicaId,
        registry: Arc<TunnelRegistry>,
        refusals: Arc<Refusals>,
        services: Vec<(String, LocalService)>,
        tracer: Option<Tracer>,
        attempts: Attempts,
    ) -> Arc<Self> {
        let (warned, jwt) = (Mutex::default(), ArcSwap::from_pointee(jwt));
        let metrics = Arc::clone(registry.metrics());
        let source = Arc::clone(&registry) as Arc<dyn TunnelSource>;
        let lender = TunnelLender::new(source, Arc::clone(&metrics), tracer.clone());
        Arc::new(Self { jwt, me, registry, lender, metrics, refusals, services, warned, tracer, attempts })
    }

    /// Verifies tokens with other secrets from now on.
    pub fn rotate(&self, jwt: JwtVerifier) {
        self.jwt.store(Arc::new(jwt));
    }
}

impl Service for PrivateListener {
    fn connected(self: Arc<Self>, peer: Option<SocketAddr>) -> Arc<dyn Connection> {
        Arc::new(Replica { trust: Trust::new(self.attempts.failures), listener: self, peer })
    }

    fn refused(&self, why: Refusal) {
        self.refusals.connection(ListenerName::Private, why);
    }

    fn not_opened(&self, peer: Option<SocketAddr>, error: &io::Error) {
        let peer = peer.map(tracing::field::display);
        let mut warned = self.warned.lock();
        // Between replicas, a handshake fails because of a wrong configuration, and then again and again.
        if warned.is_none_or(|warned| warned.elapsed() >= WARN_INTERVAL) {
            *warned = Some(Instant::now());
            tracing::warn!(peer, error = %error, "a connection to the private API was refused in its handshake");
        } else {
            tracing::debug!(peer, error = %error, "a connection to the private API was refused in its handshake");
        }
    }
}

/// One connection of another replica.
struct Replica {
    listener: Arc<PrivateListener>,
    trust: Trust,
    /// Its address.
    peer: Option<SocketAddr>,
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
        let attempts = self.listener.attempts;
        let unfit = too_many_fields(request.headers(), attempts).or_else(|| too_large(&request, attempts));
        if let Some(status) = unfit {
            self.trust.failed();
            self.listener.refusals.refused(ListenerName::Private, Reason::Headers);
            return refuse(&status);
        }
        if let Err(status) = self.listener.jwt.load().verify(request.headers()) {
            self.trust.failed();
            self.listener.refusals.refused(ListenerName::Private, Reason::Unauthenticated);
            return refuse(&status);
        }
        self.trust.passed();
        // The address may have belonged to a replica of another cluster before, or the port to another
        // process.
        if let Some(to) = request.headers().get(peer::TO)
            && to.as_bytes() != self.listener.me.as_str().as_bytes()
        {
            let text = format!("this is replica {}, not the one that was called", self.listener.me);
            return refuse(&Status::new(Code::Unavailable, text).with_outcome(Outcome::NotStarted));
        }
        let path = request.uri().path();
        if path == peer::BORROW {
            return Box::pin(lend(Arc::clone(&self.listener), request, correlation));
        }
        match self.listener.services.iter().find(|(prefix, _)| path.starts_with(prefix)) {
            Some((_, service)) => {
                let service = Arc::clone(service);
                Box::pin(async move { service(request.map(grpc::boxed)).await })
            }
            None if request.headers().contains_key(peer::gitlab::AGENT) => {
                // Replicas of 14.1 do not send their name.
                let address = self.peer.map_or_else(String::new, |peer| peer.ip().to_string());
                let from = ReplicaId::new(&format!("gitlab-kas at {address}"));
                Box::pin(gateway::serve(Arc::clone(&self.listener), request, correlation, from))
            }
            None => {
                refuse(&Status::new(Code::Unimplemented, "unknown method; this is the private API of kas"))
            }
        }
    }

    fn auth_state(&self) -> AuthState {
        self.trust.auth_state()
    }

    fn going_away(&self, _reason: GoAway) {}
}

/// The headers of a borrow request.
#[derive(Debug)]
struct Ask {
    request: BorrowRequest,
    /// The request needs a feature that this build does not know.
    needs_unknown: bool,
    deadline: Deadline,
    /// The borrower can send several requests on the same stream.
    again: bool,
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
        let replica = ReplicaId::new(text(&peer::FROM)?);
        let agent =
            text(&peer::AGENT)?.parse().map_err(|error| invalid(format!("{}: {error}", peer::AGENT)))?;
        let borrower = Borrower { replica, method: text(&peer::METHOD)?.into() };
        let mut needs = Some(Features::NONE);
        for value in headers.get_all(peer::NEEDS) {
            needs = needs.and_then(|needs| Some(needs | Features::needed(value.as_bytes())?));
        }
        let is_set = |key| headers.get(key).is_some_and(|value| value == "1");
        let is_long = is_set(peer::LONG);
        Ok(Self {
            request: BorrowRequest {
                borrower,
                agent,
                connection,
                needs: needs.unwrap_or(Features::NONE),
                is_long,
                is_endless: is_set(peer::ENDLESS),
            },
            needs_unknown: needs.is_none(),
            deadline: Deadline::from_headers(headers).map_err(|error| invalid(error.to_string()))?,
            // A long request would keep the lease, and with it the stream, for as long.
            again: !is_long && headers.get(peer::REUSE).is_some_and(|value| *value == peer::AGAIN),
        })
    }
}

/// Answers a borrow request.
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
    let acquired = if ask.needs_unknown {
        Err(NotLent::Refused(listener.registry.refuse_unknown(ask.request.agent)))
    } else {
        listener.lender.acquire(&ask.request, ask.deadline).await
    };
    let grant = match acquired {
        Ok(grant) => grant,
        Err(NotLent::Deadline) => {
            let status = Status::new(Code::DeadlineExceeded, "no tunnel was idle until the deadline")
                .with_outcome(Outcome::NotStarted);
            let mut response = failed(&status, &correlation);
            if let Some(abandoned) = listener.registry.occupancy(ask.request.agent).all_abandoned() {
                let since = u32::try_from(abandoned.since.as_millis()).unwrap_or(u32::MAX);
                response.headers_mut().insert(peer::ABANDONED, abandoned.tunnels.into());
                response.headers_mut().insert(peer::ABANDONED_FOR, since.into());
            }
            return response;
        }
        Err(NotLent::Refused(refused)) => {
            count(refused.answer());
            let BorrowRequest { borrower, agent, connection, .. } = ask.request;
            let status = refusal::status(refused, agent, connection, &borrower.method);
            let mut response = failed(&status, &correlation);
            if let Refused::NotHere(mark) = refused {
                response.headers_mut().insert(peer::EPOCH, mark.epoch.into());
                response.headers_mut().insert(peer::VERSION, mark.version.into());
            }
            return response;
        }
    };
    count(AskAnswer::Ready);
    let info = grant.tunnel().info();
    let (kind, features) = (info.kind, info.features);
    let again = ask.again && ask.request.connection.is_none() && kind.mode() == Mode::Reusable;
    let requests = Envelopes::new(grpc::boxed(request.into_body()));
    let mut response = Response::new(grpc::boxed(listener.lender.lend(ask.request, grant, requests, again)));
    let headers = response.headers_mut();
    headers.insert(http::header::CONTENT_TYPE, grpc::CONTENT_TYPE);
    headers.insert(peer::KIND, peer::kind(kind));
    peer::write_features(features, headers);
    if again {
        headers.insert(peer::REUSE, peer::AGAIN);
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn borrow_requests_are_read_and_a_third_replica_is_refused() {
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
        let Ask { request, needs_unknown, again, .. } = ask(&good).unwrap();
        let BorrowRequest { borrower, agent, connection, needs, is_long, is_endless } = request;
        assert!(!is_endless);
        assert_eq!((agent.get(), connection, &*borrower.method), (3, None, "/s/M"));
        assert_eq!((needs, needs_unknown, is_long, again), (Features::NONE, false, false, false));
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

        let with = |pairs: &[(&http::HeaderName, &'static str)]| ask(&[&good[..], pairs].concat()).unwrap();
        let needs = |text| {
            let read = with(&[(&peer::NEEDS, text)]);
            (read.request.needs, read.needs_unknown)
        };
        assert_eq!(needs("target,upgrade"), (Features::TARGET | Features::UPGRADE, false));
        assert!(needs("target,teleport").1);
        let watch = with(&[(&peer::ENDLESS, "1"), (&peer::REUSE, "again")]);
        assert!(watch.request.is_endless && !watch.request.is_long && watch.again);
        let long = with(&[(&peer::LONG, "1"), (&peer::REUSE, "again")]);
        assert!(long.request.is_long && !long.again, "no lease begins with it");
        let short = with(&[(&peer::LONG, "0"), (&peer::REUSE, "again")]);
        assert!(!short.request.is_long && short.again);
    }
}
