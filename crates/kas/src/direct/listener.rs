//! The listener for proxies.

use std::{net::SocketAddr, sync::Arc};

use bytes::Bytes;
use callers::{QueryParameters, take_credential};
use cluster::Door;
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, StatusCode, header};
use hyper::body::Incoming;
use ids::AgentId;
use kas_config::Attempts;
use kubernetes_api::Prefix;
use net::http::{Answer, AuthState, Body, Connection, GoAway, Refusal, Service, StreamSlot, Trust};
use observe::refusals::{ListenerName, Reason, Refusals};

use super::{
    Owners,
    routes::{Auth, Route},
};

/// Where a proxy has its secret: `Authorization` is that of its client.
const SECRET: &str = "kas-authorization";
/// The agent, as callers of the API name it.
const AGENT: &str = "kas-agent-id";
/// Path and query of the request of the client.
const URI: &str = "x-original-uri";
/// The answer.
const OWNER: HeaderName = HeaderName::from_static("kas-owner");

/// The service of the listener.
pub(crate) struct DirectListener {
    owners: Arc<Owners>,
    /// Of the paths of the Kubernetes API endpoint; `None`: there is none.
    prefix: Option<Prefix>,
    refusals: Arc<Refusals>,
    attempts: Attempts,
}

impl std::fmt::Debug for DirectListener {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DirectListener").finish_non_exhaustive()
    }
}

impl DirectListener {
    pub(crate) fn new(
        owners: Arc<Owners>,
        prefix: Option<Prefix>,
        refusals: Arc<Refusals>,
        attempts: Attempts,
    ) -> Arc<Self> {
        Arc::new(Self { owners, prefix, refusals, attempts })
    }

    async fn serve(&self, request: &Request<Incoming>) -> Result<Option<SocketAddr>, Refused> {
        let secret = request.headers().get(SECRET).map(HeaderValue::as_bytes);
        let secret = secret.and_then(|value| value.strip_prefix(b"Bearer ")).ok_or(Refused::Secret)?;
        if !self.owners.secret.is(secret) {
            return Err(Refused::Secret);
        }
        let route = Route::find(request.uri().path()).ok_or(Refused::Path)?;
        match route.auth {
            // It has the secret.
            Auth::Proxy => {}
        }
        if !route.methods.contains(&request.method().as_str()) {
            return Err(Refused::Method);
        }
        let door = door(request.uri().query())?;
        let agent = agent(request.headers(), self.prefix.as_ref());
        Ok(self.owners.door(agent, door).await)
    }
}

/// Why a proxy gets no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Refused {
    Secret,
    Path,
    Method,
    Door,
}

impl Refused {
    fn response(self) -> (StatusCode, &'static str) {
        match self {
            Self::Secret => (StatusCode::UNAUTHORIZED, "kas-authorization must be Bearer <secret>\n"),
            Self::Path => (StatusCode::NOT_FOUND, "the path is /fleet/owner\n"),
            Self::Method => (StatusCode::METHOD_NOT_ALLOWED, "the method is GET\n"),
            Self::Door => (StatusCode::BAD_REQUEST, "the query is door=api or door=http\n"),
        }
    }
}

/// Returns which door is asked for: that of the API unless the query says otherwise.
fn door(query: Option<&str>) -> Result<Door, Refused> {
    match query.unwrap_or("") {
        "" => Ok(Door::Api),
        query => query.strip_prefix("door=").and_then(|door| door.parse().ok()).ok_or(Refused::Door),
    }
}

/// Returns the agent that the request of a client names, wherever it does. Nobody judges here whether the
/// client may use it.
fn agent(headers: &HeaderMap, prefix: Option<&Prefix>) -> Option<AgentId> {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    if let Some(agent) = text(AGENT).and_then(|text| text.parse().ok()) {
        return Some(agent);
    }
    let named = text(URI).zip(prefix).and_then(|(uri, prefix)| kubernetes_api::agent_of_uri(prefix, uri));
    named.or_else(|| {
        let mut own = HeaderMap::new();
        own.insert(header::AUTHORIZATION, headers.get(header::AUTHORIZATION)?.clone());
        take_credential(&mut own, QueryParameters::default(), false).ok()??.agent()
    })
}

impl Service for DirectListener {
    fn connected(self: Arc<Self>, _peer: Option<SocketAddr>) -> Arc<dyn Connection> {
        Arc::new(Proxy { trust: Trust::new(self.attempts.failures), listener: self })
    }

    fn refused(&self, why: Refusal) {
        self.refusals.connection(ListenerName::Direct, why);
    }
}

/// One connection of a proxy.
struct Proxy {
    listener: Arc<DirectListener>,
    trust: Trust,
}

impl Connection for Proxy {
    fn call(self: Arc<Self>, request: Request<Incoming>, _slot: &StreamSlot) -> Answer {
        Box::pin(async move {
            let told = self.listener.serve(&request).await;
            match told {
                Err(Refused::Secret) => {
                    self.trust.failed();
                    self.listener.refusals.refused(ListenerName::Direct, Reason::Unauthenticated);
                }
                Ok(_) | Err(_) => {
                    self.trust.passed();
                }
            }
            answer(told)
        })
    }

    fn auth_state(&self) -> AuthState {
        self.trust.auth_state()
    }

    fn going_away(&self, _reason: GoAway) {}
}

fn answer(told: Result<Option<SocketAddr>, Refused>) -> Response<Body> {
    let (status, text) = match told {
        Ok(_) => (StatusCode::OK, ""),
        Err(refused) => refused.response(),
    };
    let mut response = Response::new(grpc::full(Bytes::from_static(text.as_bytes())));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    if let Ok(Some(address)) = told
        && let Ok(value) = HeaderValue::from_str(&address.to_string())
    {
        headers.insert(OWNER, value);
    }
    if !text.is_empty() {
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
    }
    response
}

/// For fuzzing: a header of a client. No panic, and no agent comes from nothing.
#[cfg(feature = "fuzzing")]
pub fn fuzz(bytes: &[u8]) {
    let prefix = Prefix::new("/k8s-proxy");
    let Ok(value) = HeaderValue::from_bytes(bytes) else { return };
    for name in [AGENT, URI, "authorization"] {
        let headers = HeaderMap::from_iter([(HeaderName::from_static(name), value.clone())]);
        if agent(&headers, Some(&prefix)).is_some() {
            assert!(bytes.iter().any(u8::is_ascii_digit), "an agent has a number");
        }
    }
    if let Ok(text) = std::str::from_utf8(bytes) {
        let _ = door(Some(text));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(pairs: &[(&'static str, &str)]) -> Option<i64> {
        let headers = pairs
            .iter()
            .map(|(name, value)| (HeaderName::from_static(name), value.parse().unwrap()))
            .collect();
        agent(&headers, Some(&Prefix::new("/k8s-proxy"))).map(AgentId::get)
    }

    #[test]
    fn the_agent_is_found_wherever_a_client_names_it() {
        assert_eq!(found(&[]), None);
        assert_eq!(found(&[(AGENT, "7")]), Some(7));
        assert_eq!(found(&[(URI, "/k8s-proxy/agents/8/api/v1/pods?x=1")]), Some(8));
        for token in ["Bearer ci:9:secret", "bearer pat:9:secret"] {
            assert_eq!(found(&[("authorization", token)]), Some(9), "{token}");
        }
        // What the path names counts before the token, as it is more specific. The owner compares them.
        assert_eq!(found(&[(URI, "/k8s-proxy/agents/8/x"), ("authorization", "Bearer ci:9:s")]), Some(8));
        assert_eq!(found(&[(URI, "/k8s-proxy/api"), ("authorization", "Bearer ci:9:s")]), Some(9));
    }

    #[test]
    fn what_names_no_agent_is_no_error() {
        for (name, value) in [
            (AGENT, "x"),
            (AGENT, "-7"),
            (AGENT, "0"),
            (URI, "/other/agents/8/"),
            (URI, "/k8s-proxy/agents/x"),
            ("authorization", "Bearer eyJhbGciOiJ9.e30.x"),
            ("authorization", "Basic Y2k6Nzpz"),
            ("authorization", "Bearer ci:0:s"),
        ] {
            assert_eq!(found(&[(name, value)]), None, "{name}: {value}");
        }
        assert_eq!(
            agent(
                &HeaderMap::from_iter([(HeaderName::from_static(URI), "/agents/8/x".parse().unwrap())]),
                None
            ),
            None
        );
    }

    #[test]
    fn the_query_names_a_door() {
        assert_eq!(door(None), Ok(Door::Api));
        assert_eq!(door(Some("door=api")), Ok(Door::Api));
        assert_eq!(door(Some("door=http")), Ok(Door::Http));
        for bad in ["door=", "door=grpc", "x=1", "door=http&door=api"] {
            assert_eq!(door(Some(bad)), Err(Refused::Door), "{bad}");
        }
    }
}
