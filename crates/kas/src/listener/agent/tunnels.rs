//! `ReverseTunnel/Connect`: turns a stream of an agent into a tunnel in the registry.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use grpc::{Code, Status};
use http::{HeaderMap, HeaderValue, Request, Response};
use hyper::body::Incoming;
use net::http::{Body, StreamReset};
use tokio::time::Instant;
use tunnel::{
    IMPERSONATES_HEADER, INSTANCE_HEADER, MAX_IDLE_HEADER, REUSE, TARGET_HEADER, TUNNEL_HEADER,
    UPGRADES_HEADER,
    features::Features,
    kas_end::{AgentKind, Info, Opening, Retire, Tunnel, Unasked, read_descriptor},
};

use super::{
    service::{FIRST_MESSAGE, encoding},
    transport::{HeldTunnel, Transport, instance, revoked},
};
use crate::listener::failed;
use observe::refusals::{ListenerName, Reason};

/// A tunnel above the limit is held this long, unregistered, before it ends with OK: a refusal
/// would cost minutes of back-off in GitLab's agents.
const HOLD: Duration = Duration::from_secs(10);
/// Our agents behind a proxy replace a tunnel that has been idle for this share of the time after which idle
/// streams are ended: 45 s of 50 s, before the usual idle timer of 60 s cuts it.
const PROXIED_IDLE_OURS: f64 = 0.9;

impl Transport {
    pub(super) async fn connect(
        self: Arc<Self>,
        request: Request<Incoming>,
        reset: Arc<StreamReset>,
    ) -> Response<Body> {
        let correlation = routing::metadata::correlation(&HeaderMap::new());
        match self.open_tunnel(request, reset).await {
            Ok((tunnel_body, peer)) => {
                let mut response = self.accepted(&correlation, tunnel_body);
                if peer == AgentKind::Ours {
                    response.headers_mut().insert(TUNNEL_HEADER, REUSE);
                    if self.state().proxied {
                        let seconds = self.listener.proxied_idle.mul_f64(PROXIED_IDLE_OURS).as_secs().max(1);
                        response.headers_mut().insert(MAX_IDLE_HEADER, HeaderValue::from(seconds));
                    }
                }
                response
            }
            Err(status) => failed(&status, &correlation),
        }
    }

    async fn open_tunnel(
        self: &Arc<Self>,
        request: Request<Incoming>,
        reset: Arc<StreamReset>,
    ) -> Result<(Body, AgentKind), Status> {
        let (head, body) = request.into_parts();
        let gzip = encoding(&head.headers);
        let mut opening = Opening::new(grpc::boxed(body), *gzip.as_ref().unwrap_or(&false));
        let mut first = None;
        let authenticated = {
            // The lookup in GitLab may take long, and data of the agent must not pile up meanwhile.
            let reading = async {
                let descriptor = read_descriptor(&mut opening).await;
                let goes_on = descriptor.is_ok();
                first = Some(descriptor.map_err(Early::Refused));
                if goes_on {
                    first = Some(Err(opening.unasked().await.into()));
                }
                opening.refuse();
            };
            let mut authenticate = std::pin::pin!(self.authenticate(&head.headers));
            tokio::select! {
                biased;
                authenticated = &mut authenticate => authenticated?,
                () = reading => authenticate.await?,
            }
        };
        gzip?;
        self.look_for_proxy(&head.headers);
        let peer = peer(&head.headers);
        let first = match first {
            Some(first) => first,
            None => tokio::time::timeout(FIRST_MESSAGE, read_descriptor(&mut opening))
                .await
                .unwrap_or_else(|_| Err(Status::new(Code::DeadlineExceeded, "no descriptor came in time")))
                .map_err(Early::Refused),
        };
        let descriptor = match first {
            Ok(descriptor) => descriptor,
            Err(early) => return early.answer(peer).map_err(|status| self.malformed(status)),
        };
        let listener = &self.listener;
        let agent = authenticated.agent.id;
        let held = Instant::now();
        loop {
            let reason = if !listener.registry.has_room(agent) {
                Reason::TunnelsFull
            } else if !listener.rate_limit.allows(authenticated.token) {
                Reason::RateLimit
            } else {
                break;
            };
            if held.elapsed() >= HOLD {
                listener.refusals.refused(ListenerName::Agent, reason);
                return Ok((grpc::boxed(Ended), peer));
            }
            tokio::select! {
                () = tokio::time::sleep(Duration::from_secs(1)) => {}
                unasked = opening.unasked() => {
                    return Early::from(unasked).answer(peer).map_err(|status| self.malformed(status));
                }
            }
        }
        let instance = instance(&head.headers, agent);
        let info = Info {
            agent,
            instance: instance.map_or(self.instance(), |id| id.get() as u64),
            token: authenticated.token,
            kind: peer,
            features: features(&head.headers),
            descriptor: Arc::new(descriptor),
        };
        let (tunnel, body) =
            Tunnel::new(info, opening, Arc::clone(&listener.pool), Box::new(move || reset.reset()));
        let (connection, aged) = {
            let mut state = self.state();
            // GitLab's agents open a new tunnel for each request, so clean up between ticks.
            if state.tunnels.len() >= 64 && state.tunnels.len().is_power_of_two() {
                state.tunnels.retain(|held| held.tunnel.strong_count() > 0);
            }
            state
                .tunnels
                .push(HeldTunnel { tunnel: Arc::downgrade(&tunnel), authenticated: authenticated.clone() });
            (instance.or_else(|| state.bound_connection(agent)), state.aged)
        };
        listener.registry.insert(&tunnel, connection);
        // The token may have been revoked while the descriptor was awaited.
        if !listener.identity.still_valid(&authenticated).await {
            tunnel.end(revoked());
        } else if aged || listener.left.load(Ordering::Relaxed) {
            listener.registry.retire(&tunnel, Retire::Ok);
        }
        Ok((grpc::boxed(body), peer))
    }
}

/// Why a stream ends before it is a tunnel.
enum Early {
    /// There is no descriptor.
    Refused(Status),
    /// The agent has sent more than its descriptor.
    Unasked(Unasked),
}

impl From<Unasked> for Early {
    fn from(unasked: Unasked) -> Self {
        Self::Unasked(unasked)
    }
}

impl Early {
    fn answer(self, peer: AgentKind) -> Result<(Body, AgentKind), Status> {
        match self {
            Self::Refused(status) => Err(status),
            Self::Unasked(Unasked::Withdrawal) if peer == AgentKind::Ours => Ok((grpc::boxed(Ended), peer)),
            Self::Unasked(_) => Err(Status::new(
                Code::InvalidArgument,
                "after its descriptor, an agent must not send anything before a request",
            )),
        }
    }
}

/// A stream that ends with OK at once.
struct Ended;

impl http_body::Body for Ended {
    type Data = bytes::Bytes;
    type Error = grpc::BoxError;

    fn poll_frame(
        self: std::pin::Pin<&mut Self>,
        _cx: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Result<http_body::Frame<bytes::Bytes>, grpc::BoxError>>> {
        let mut trailers = HeaderMap::with_capacity(1);
        Status::write_ok(&mut trailers);
        std::task::Poll::Ready(Some(Ok(http_body::Frame::trailers(trailers))))
    }
}

fn peer(headers: &HeaderMap) -> AgentKind {
    if headers.get(TUNNEL_HEADER) == Some(&REUSE) {
        return AgentKind::Ours;
    }
    let agent = headers.get(http::header::USER_AGENT).map_or(&b""[..], HeaderValue::as_bytes);
    if agent.starts_with(b"gitlab-agent/") { AgentKind::Recent } else { AgentKind::Old }
}

/// Returns what the agentk that sent these headers supports. GitLab's never support
/// [`Features::TARGET`].
fn features(headers: &HeaderMap) -> Features {
    let is_set = |name| headers.get(name).is_some_and(|value| value == "1");
    Features::IMPERSONATION.when(offers(headers, &IMPERSONATES_HEADER, IMPERSONATES_SINCE))
        | Features::TARGET.when(is_set(TARGET_HEADER))
        | Features::UPGRADE.when(offers(headers, &UPGRADES_HEADER, UPGRADES_SINCE))
}

/// GitLab's first version of agentk that supports `HeaderExtra`.
const IMPERSONATES_SINCE: (u32, u32) = (14, 3);
/// GitLab's first version of agentk that can upgrade connections of every kind: with `content_length`, it
/// knows that the request has no body. Before that it sent an empty body in chunks, which is data for SPDY.
const UPGRADES_SINCE: (u32, u32) = (16, 0);

/// Whether the agentk that sent these headers supports a feature. Ours announces it in the header `name`;
/// GitLab's support it from the version `since` on.
fn offers(headers: &HeaderMap, name: &http::HeaderName, since: (u32, u32)) -> bool {
    if headers.contains_key(name) || headers.contains_key(INSTANCE_HEADER) {
        return headers.get(name).is_some_and(|value| value == "1");
    }
    let agent =
        headers.get(http::header::USER_AGENT).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let Some(version) = agent.strip_prefix("gitlab-agent/").or_else(|| agent.strip_prefix("agentk/")) else {
        return false;
    };
    let mut parts = version.trim_start_matches('v').splitn(3, '.').map(str::parse);
    matches!((parts.next(), parts.next()), (Some(Ok(major)), Some(Ok(minor))) if (major, minor) >= since)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn impersonation_support_is_known_by_version_or_header() {
        let supports = |pairs: &[(&'static str, &'static str)]| {
            let mut headers = HeaderMap::new();
            for (name, value) in pairs {
                headers.append(*name, HeaderValue::from_static(value));
            }
            offers(&headers, &IMPERSONATES_HEADER, IMPERSONATES_SINCE)
        };
        for (agent, expected) in [
            ("agentk/v14.1.1/abc grpc-go/1.39.0", false),
            ("agentk/v14.2.9/abc", false),
            ("agentk/v14.3.0/abc", true),
            ("agentk/v15.0.0/abc", true),
            ("gitlab-agent/v16.5.0/abc grpc-go/1.58.3", true),
            ("gitlab-agent/16.5.0-rc1/abc", true),
            ("gitlab-agent/v18.10.1/abc", true),
            ("gitlab-agent/unknown/abc", false),
            ("gitlab-agent/v16/abc", false),
            ("gitlab-agent/v.5.0/abc", false),
            ("grpc-go/99.9.9", false),
            ("", false),
        ] {
            assert_eq!(supports(&[("user-agent", agent)]), expected, "{agent}");
        }
        assert!(!supports(&[]));
        let ours = ("kas-agentk-instance", "i");
        assert!(!supports(&[ours, ("user-agent", "agentk/99.0.0/abc")]), "an earlier build of ours");
        assert!(supports(&[ours, ("kas-agentk-impersonates", "1")]));
        assert!(!supports(&[("kas-agentk-impersonates", "0"), ("user-agent", "agentk/v15.0.0/abc")]));
    }

    #[test]
    fn upgrades_are_supported_by_ours_if_announced_and_by_gitlab_s_from_16_0() {
        let supports = |pairs: &[(&'static str, &'static str)]| {
            let headers = pairs
                .iter()
                .map(|(name, value)| (http::HeaderName::from_static(name), HeaderValue::from_static(value)));
            features(&headers.collect()).contains(Features::UPGRADE)
        };
        for (agent, expected) in [
            ("agentk/v14.1.1/abc", false),
            ("gitlab-agent/v15.11.0/abc", false),
            ("gitlab-agent/v16.0.0/abc grpc-go/1.54.0", true),
            ("gitlab-agent/v18.10.1/abc", true),
        ] {
            assert_eq!(supports(&[("user-agent", agent)]), expected, "{agent}");
        }
        let ours = ("kas-agentk-instance", "i");
        assert!(supports(&[ours, ("kas-agentk-upgrades", "1")]));
        assert!(!supports(&[ours, ("kas-agentk-target", "1")]), "an earlier build of ours");
    }

    #[test]
    fn verbatim_targets_are_supported_only_if_announced() {
        let supports = |pairs: &[(&'static str, &'static str)]| {
            let headers = pairs
                .iter()
                .map(|(name, value)| (http::HeaderName::from_static(name), HeaderValue::from_static(value)));
            features(&headers.collect()).contains(Features::TARGET)
        };
        let ours = ("kas-agentk-instance", "i");
        assert!(supports(&[ours, ("kas-agentk-target", "1")]));
        assert!(!supports(&[ours, ("kas-agentk-target", "0")]));
        assert!(!supports(&[ours, ("kas-agentk-impersonates", "1")]), "an earlier build of ours");
        assert!(!supports(&[("user-agent", "gitlab-agent/v18.10.1/abc")]));
    }
}
