//! A client for the API server.

use std::{
    fmt,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use anyhow::{Context as _, bail, ensure};
use grpc::BoxError;
use http::{HeaderName, HeaderValue, Request, Response, StatusCode, Uri, header, uri};
use kube::{
    client::ClientBuilder,
    config::{AuthInfo, Config},
};
use kube_request::{Upgrade, headers::impersonate_extra};
use tower_service::Service;

use super::{
    connections::{Connections, Failure, ResponseBody, UpgradeAnswer},
    credentials::Credentials,
    dial::Dialer,
};

/// The target of requests, for logs and messages. It contains no secrets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    host: String,
    source: String,
    impersonates: bool,
}

impl Target {
    /// Returns host and port of the API server.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// Returns the source of the configuration: a context, the pod's service account or a flag.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Whether agentk itself impersonates a user, so that a caller may not.
    pub fn impersonates(&self) -> bool {
        self.impersonates
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.host)
    }
}

/// Why there is no response. Nothing of the request was sent, unless it is [`SendError::Broken`] or
/// [`SendError::OtherProtocol`].
#[derive(Debug, thiserror::Error)]
pub enum SendError {
    /// The credentials of agentk's own configuration cannot be obtained.
    #[error("cannot get agentk's own credentials for the Kubernetes API server at {host}")]
    Credentials {
        /// The API server.
        host: String,
        /// The cause, without the output of a credential plugin.
        source: BoxError,
    },
    /// Connecting failed: for example, the connection was refused, the name does not resolve, or the
    /// certificate is not trusted.
    #[error("cannot reach the Kubernetes API server at {host}")]
    Connect {
        /// The API server.
        host: String,
        /// The cause.
        source: BoxError,
    },
    /// The connection ended before the head of the response. The API server may have processed the request.
    #[error("the connection to the Kubernetes API server at {host} broke before the response")]
    Broken {
        /// The API server.
        host: String,
        /// The cause.
        source: BoxError,
    },
    /// The API server has switched to another protocol than the one that was asked for. The connection was
    /// closed.
    #[error("the Kubernetes API server at {host} switched protocols, but not to {protocol}")]
    OtherProtocol {
        /// The API server.
        host: String,
        /// The protocol that was asked for.
        protocol: &'static str,
    },
    /// The request has an invalid path or query.
    #[error("the request has no valid URL")]
    Url(#[source] http::Error),
}

type ApiRequest = Request<grpc::Body>;

/// A client for the API server, with agentk's own credentials. Clones share their connections.
///
/// A request is sent at most once: it is repeated only if its connection had ended before the first byte,
/// over a new connection. Any response is a success, whatever its status. Redirects are not followed. Bodies
/// are neither buffered nor changed.
#[derive(Clone)]
pub struct ApiServer {
    pub(super) inner: Arc<Inner>,
}

pub(super) struct Inner {
    connections: Arc<Connections>,
    /// The header `Host` of each request.
    authority: HeaderValue,
    /// The path of the configured URL, which precedes each request's path; without a trailing slash.
    pub(super) prefix: String,
    pub(super) credentials: Credentials,
    /// The `Impersonate-*` headers of agentk's own configuration.
    pub(super) identity: Vec<(HeaderName, HeaderValue)>,
    namespace: String,
    target: Target,
}

impl fmt::Debug for ApiServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ApiServer").field(&self.inner.target).finish()
    }
}

impl ApiServer {
    pub(super) fn new(config: &Config, source: String) -> anyhow::Result<Self> {
        let url = config.cluster_url.clone().into_parts();
        let (Some(scheme), Some(authority)) = (url.scheme, url.authority) else {
            bail!(
                "the URL of the API server ({source}) needs a scheme and a host, as in https://10.0.0.1:6443"
            );
        };
        ensure!(
            scheme == uri::Scheme::HTTP || scheme == uri::Scheme::HTTPS,
            "the URL of the API server ({source}) begins with {scheme}://, but agentk supports only https and http"
        );
        ensure!(
            !authority.as_str().contains('@'),
            "the URL of the API server ({source}) has a user or password in it; use a token or a certificate"
        );
        let path = url.path_and_query.as_ref().map_or("", |path| path.path()).trim_end_matches('/');

        let connections = Connections::new(Dialer::new(config, &scheme, &authority, &source)?);

        let identity = identity(&config.auth_info)?;
        Ok(Self {
            inner: Arc::new(Inner {
                connections,
                authority: host_header(&scheme, &authority)
                    .with_context(|| format!("the URL of the API server ({source}) has an invalid host"))?,
                prefix: path.to_owned(),
                credentials: Credentials::new(config)
                    .with_context(|| format!("cannot authenticate ({source})"))?,
                namespace: config.default_namespace.clone(),
                target: Target { host: authority.to_string(), source, impersonates: !identity.is_empty() },
                identity,
            }),
        })
    }

    /// Returns the target of requests.
    pub fn target(&self) -> &Target {
        &self.inner.target
    }

    /// Returns the namespace of agentk's own objects: of the pod, or of the kubeconfig.
    pub fn namespace(&self) -> &str {
        &self.inner.namespace
    }

    /// Returns a client for the parts of agentk that use Kubernetes themselves. It shares the connections.
    ///
    /// Must be called within a runtime: the client spawns a task.
    pub fn kube_client(&self) -> kube::Client {
        ClientBuilder::new(ForKube(self.clone()), self.inner.namespace.clone()).build()
    }

    /// Sends a request, whose URI is a path and a query. Returns when the head of the response has arrived.
    ///
    /// agentk's own `Authorization` replaces that of the request, and so does `Impersonate-*` if agentk
    /// impersonates a user. A body that ends with an error ends the connection, so that the API server does
    /// not consider it complete.
    ///
    /// # Errors
    /// See [`SendError`]. A status of 400 or above is not an error here.
    ///
    /// # Cancel safety
    /// Dropping the future, or the body of the response, closes the connection.
    pub async fn send(&self, request: ApiRequest) -> Result<Response<ResponseBody>, SendError> {
        let request = self.prepared(request).await?;
        let response =
            self.inner.connections.send(request).await.map_err(|failure| self.send_error(failure))?;
        self.answered(response.status());
        Ok(response)
    }

    /// Sends a request that asks for an upgrade to this protocol, as [`send`](Self::send), over a connection
    /// of its own. The request has no body.
    ///
    /// # Errors
    /// See [`SendError`].
    ///
    /// # Cancel safety
    /// Dropping the future, or what it returns, closes the connection.
    pub async fn upgrade(&self, request: ApiRequest, protocol: Upgrade) -> Result<UpgradeAnswer, SendError> {
        let request = self.prepared(request).await?;
        let answer =
            self.inner.connections.upgrade(request).await.map_err(|failure| self.send_error(failure))?;
        match &answer {
            UpgradeAnswer::Refused(response) => self.answered(response.status()),
            UpgradeAnswer::Switched(response, _) => {
                if Upgrade::requested(response.headers()) != Some(protocol) {
                    let host = self.inner.target.host.clone();
                    return Err(SendError::OtherProtocol { host, protocol: protocol.token() });
                }
            }
        }
        Ok(answer)
    }

    /// Returns a request as it is sent.
    async fn prepared(&self, mut request: ApiRequest) -> Result<ApiRequest, SendError> {
        let inner = &*self.inner;
        if !inner.prefix.is_empty() || request.uri().authority().is_some() {
            let path = request.uri().path_and_query().map_or("/", uri::PathAndQuery::as_str);
            let uri = Uri::builder().path_and_query(format!("{}{path}", inner.prefix)).build();
            *request.uri_mut() = uri.map_err(SendError::Url)?;
        }
        let headers = request.headers_mut();
        headers.insert(header::HOST, inner.authority.clone());
        headers.remove(header::AUTHORIZATION);
        for (name, _) in &inner.identity {
            headers.remove(name);
        }
        for (name, value) in &inner.identity {
            headers.append(name, value.clone());
        }
        match inner.credentials.header().await {
            Ok(None) => {}
            Ok(Some(value)) => {
                headers.insert(header::AUTHORIZATION, value);
            }
            Err(source) => {
                return Err(SendError::Credentials { host: inner.target.host.clone(), source });
            }
        }
        Ok(request)
    }

    fn send_error(&self, failure: Failure) -> SendError {
        let host = self.inner.target.host.clone();
        match failure {
            Failure::Connect(source) => SendError::Connect { host, source },
            Failure::Broken(source) => SendError::Broken { host, source },
        }
    }

    /// An answer has this status.
    fn answered(&self, status: StatusCode) {
        if status == StatusCode::UNAUTHORIZED {
            self.inner.credentials.invalidate();
        }
    }
}

/// Returns the header `Host` of an API server: without the port if that is the scheme's own.
fn host_header(
    scheme: &uri::Scheme,
    authority: &uri::Authority,
) -> Result<HeaderValue, header::InvalidHeaderValue> {
    let own = if *scheme == uri::Scheme::HTTPS { 443 } else { 80 };
    let host = if authority.port_u16() == Some(own) { authority.host() } else { authority.as_str() };
    HeaderValue::from_str(host)
}

/// Returns the headers for impersonation by agentk's own configuration.
fn identity(auth: &AuthInfo) -> anyhow::Result<Vec<(HeaderName, HeaderValue)>> {
    let mut headers = Vec::new();
    let mut add = |name: HeaderName, value: &str| -> anyhow::Result<()> {
        let value = HeaderValue::from_str(value)
            .with_context(|| format!("the kubeconfig's value for {name} is not valid in a header"))?;
        headers.push((name, value));
        Ok(())
    };
    if let Some(user) = &auth.impersonate {
        add(HeaderName::from_static("impersonate-user"), user)?;
    }
    if let Some(uid) = &auth.impersonate_uid {
        add(HeaderName::from_static("impersonate-uid"), uid)?;
    }
    for group in auth.impersonate_groups.iter().flatten() {
        add(HeaderName::from_static("impersonate-group"), group)?;
    }
    for (key, values) in auth.impersonate_user_extra.iter().flatten() {
        let name = HeaderName::try_from(impersonate_extra(key))
            .context("the kubeconfig's as-user-extra has an invalid key")?;
        for value in values {
            add(name.clone(), value)?;
        }
    }
    Ok(headers)
}

/// [`ApiServer`] as the service that kube's client needs.
#[derive(Clone)]
struct ForKube(ApiServer);

impl Service<Request<kube::client::Body>> for ForKube {
    type Response = Response<ResponseBody>;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, BoxError>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<kube::client::Body>) -> Self::Future {
        let api = self.0.clone();
        Box::pin(async move { api.send(request.map(grpc::boxed)).await.map_err(Into::into) })
    }
}
