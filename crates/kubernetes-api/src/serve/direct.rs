//! Requests that a proxy may send to the replica that holds the agent.

use std::{net::SocketAddr, time::Duration};

use async_trait::async_trait;
use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Response};
use http_body::Body as HttpBody;
use ids::AgentId;
use net::http::{Body, Trust};

use crate::{KubernetesApi, upload::ClientBody};

/// The header in which a proxy that can send a request elsewhere says so: with its secret. It is never passed
/// on.
const ACCEL: &str = "kas-accel";
/// What nginx obeys: a named location, which keeps method and body.
const REDIRECT: (HeaderName, HeaderValue) =
    (HeaderName::from_static("x-accel-redirect"), HeaderValue::from_static("@kas_owner"));
const OWNER: HeaderName = HeaderName::from_static("kas-owner");

/// Knows which replica holds an agent.
#[async_trait]
pub trait Owners: Send + Sync {
    /// Whether this is the secret of proxies.
    fn is_proxy(&self, secret: &[u8]) -> bool;

    /// Returns the Kubernetes API endpoint of another ready replica that holds the agent, if this one does
    /// not.
    ///
    /// # Cancel safety
    /// Cancel safe.
    async fn elsewhere(&self, agent: AgentId) -> Option<SocketAddr>;
}

/// How long a body is thrown away at most.
const DISCARD: Duration = Duration::from_secs(5);

/// Throws a body away until the proxy has seen the answer, and sends it elsewhere. If the connection were
/// closed at once, a proxy that still writes could see the reset before the answer.
pub(super) fn discard<B>(mut body: ClientBody<B>)
where
    B: HttpBody<Data = Bytes> + Send + Unpin + 'static,
    B::Error: Send,
{
    if !body.is_empty() {
        tokio::spawn(async move {
            let discarded = async { while let Ok(Some(_)) = body.data().await {} };
            let _ = tokio::time::timeout(DISCARD, discarded).await;
        });
    }
}

impl KubernetesApi {
    /// Returns the answer for a proxy that should send this request to the owner of the agent, which judges
    /// the credential.
    pub(super) async fn sent_to_owner(
        &self,
        headers: &HeaderMap,
        trust: &Trust,
        agent: AgentId,
    ) -> Option<Response<Body>> {
        let secret = headers.get(ACCEL)?;
        let owners = self.owners.as_ref()?;
        if !owners.is_proxy(secret.as_bytes()) {
            return None;
        }
        trust.passed();
        let address = owners.elsewhere(agent).await?;
        let mut response = Response::new(grpc::full(Bytes::new()));
        let headers = response.headers_mut();
        headers.insert(REDIRECT.0, REDIRECT.1);
        headers.insert(OWNER, HeaderValue::try_from(address.to_string()).ok()?);
        Some(response)
    }
}
