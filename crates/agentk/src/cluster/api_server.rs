//! A client for the API server.

use std::{
    fmt,
    future::{Future, poll_fn},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use anyhow::{Context as _, anyhow, bail, ensure};
use grpc::BoxError;
use http::{HeaderName, HeaderValue, Request, Response, StatusCode, Uri, header, uri};
use hyper_util::client::legacy::connect::HttpConnector;
use kube::{
    client::{ClientBuilder, ConfigExt as _},
    config::{AuthInfo, Config},
};
use kube_request::headers::impersonate_extra;
use process::error::chain;
use tower_service::Service;

use super::{
    connections::{Connections, Failure, ResponseBody},
    credentials::Credentials,
};

/// TCP keepalive: the idle time before the first probe, the interval of the probes, and their number. A watch
/// may be idle for hours, and nothing else would notice that its node is gone.
const KEEPALIVE: (Duration, Duration, u32) = (Duration::from_secs(20), Duration::from_secs(10), 3);

/// How long sent bytes may remain unacknowledged.
#[cfg(target_os = "linux")]
const UNACKNOWLEDGED: Duration = Duration::from_secs(45);

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

/// Why there is no response. Nothing of the request was sent, unless it is [`SendError::Broken`].
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
        source: hyper::Error,
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

        let mut tcp = HttpConnector::new();
        tcp.enforce_http(false);
        tcp.set_nodelay(true);
        tcp.set_keepalive(Some(KEEPALIVE.0));
        tcp.set_keepalive_interval(Some(KEEPALIVE.1));
        tcp.set_keepalive_retries(Some(KEEPALIVE.2));
        #[cfg(target_os = "linux")]
        tcp.set_tcp_user_timeout(Some(UNACKNOWLEDGED));
        let tls = config.rustls_https_connector_with_connector(tcp).map_err(|error| {
            anyhow!("cannot prepare TLS for the API server ({source}): {}", chain(&error))
        })?;
        let url = Uri::builder().scheme(scheme.clone()).authority(authority.clone()).path_and_query("/");
        let url = url.build().with_context(|| format!("the URL of the API server ({source}) is invalid"))?;
        let connections = Connections::new(move || {
            let mut tls = tls.clone();
            let url = url.clone();
            async move {
                poll_fn(|cx| tls.poll_ready(cx)).await?;
                tls.call(url).await
            }
        });

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
    pub async fn send(&self, mut request: ApiRequest) -> Result<Response<ResponseBody>, SendError> {
        let inner = &*self.inner;
        let host = || inner.target.host.clone();
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
            Err(source) => return Err(SendError::Credentials { host: host(), source }),
        }

        let response = inner.connections.send(request).await.map_err(|failure| match failure {
            Failure::Connect(source) => SendError::Connect { host: host(), source },
            Failure::Broken(source) => SendError::Broken { host: host(), source },
        })?;
        if response.status() == StatusCode::UNAUTHORIZED {
            inner.credentials.invalidate();
        }
        Ok(response)
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
