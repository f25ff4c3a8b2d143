//! How agentk reaches the Kubernetes API server: which one, trusted by whose word, and with whose credentials.
//!
//! [`ClusterAccess`] is the command line's part of it, [`ApiServer`] what comes of it. Requests go out over HTTP/1.1
//! and not HTTP/2: the API server allows some hundred streams per HTTP/2 connection, beyond which the next watch
//! would wait for another one's end, and the end of a request shows at once as the end of its connection.
//!
//! Not here: proxies between agentk and the API server, and upgrades.

use std::{
    collections::BTreeSet,
    env,
    ffi::OsString,
    fmt::{self, Write as _},
    future::Future,
    path::{Path, PathBuf},
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll},
    time::Duration,
};

use anyhow::{Context as _, anyhow, bail, ensure};
use grpc::BoxError;
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, StatusCode, Uri, header, uri};
use hyper::body::Incoming;
use hyper_util::{
    client::legacy::{self, ResponseFuture, connect::HttpConnector},
    rt::{TokioExecutor, TokioTimer},
};
use kube::{
    client::{AuthError, ClientBuilder, ConfigExt as _},
    config::{AuthInfo, Config, InClusterError, KubeConfigOptions, Kubeconfig, KubeconfigError},
};
use rustls::pki_types::{CertificateDer, pem::PemObject as _};
use secrecy::{ExposeSecret as _, SecretString};
use tokio::time::{Instant, timeout};
use tower_service::Service;

/// How long a connection may take, TLS included. Within a cluster it takes milliseconds; what is shorter fails while
/// a control plane moves, what is longer only delays the answer that nothing is there.
const CONNECT_WITHIN: Duration = Duration::from_secs(10);

/// How long an unused connection is kept. The API server closes them after 90 s, and a request that meets the closing
/// fails; so ours is well below.
const IDLE: Duration = Duration::from_secs(45);

/// How many unused connections are kept. More save handshakes after a burst and hold memory on the API server.
const MAX_IDLE: usize = 64;

/// How long a connection is silent before TCP asks whether the other end is there, and how long it waits between
/// three questions: a watch may be silent for hours, and nothing else would notice that its node is gone.
const KEEPALIVE: (Duration, Duration, u32) = (Duration::from_secs(20), Duration::from_secs(10), 3);

/// How long sent bytes may stay without acknowledgement.
#[cfg(target_os = "linux")]
const UNACKNOWLEDGED: Duration = Duration::from_secs(45);

/// How old a token that was read from a file may become before the file is looked at again. Kubernetes renews tokens
/// when a fifth of their life is left, which is minutes at least.
const TOKEN_AGE: Duration = Duration::from_secs(10);

/// Where the pod's service account is mounted.
const SERVICE_ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

/// Flags that say which API server agentk serves. Without any: `KUBECONFIG`, else the pod's service account.
#[derive(clap::Args, Clone, Debug, Default)]
#[command(next_help_heading = "Kubernetes API server")]
pub struct ClusterAccess {
    /// Use this kubeconfig. Without it: the files that KUBECONFIG names, else the pod's service account
    #[arg(long, value_name = "FILE", conflicts_with = "kube_server")]
    pub kubeconfig: Option<PathBuf>,

    /// Use this context of the kubeconfig. Without it: the kubeconfig's current context
    #[arg(long, value_name = "NAME", conflicts_with = "kube_server")]
    pub context: Option<String>,

    /// Use the API server at this URL instead of a kubeconfig or the pod's service account
    #[arg(long, value_name = "URL")]
    pub kube_server: Option<String>,

    /// Authenticate to --kube-server with the bearer token in this file, read again when it changes
    #[arg(long, value_name = "FILE", requires = "kube_server")]
    pub kube_token_file: Option<PathBuf>,

    /// Trust the certificates in this PEM file for --kube-server, read again when it changes. Without it: the
    /// system's
    #[arg(long, value_name = "FILE", requires = "kube_server")]
    pub kube_ca_file: Option<PathBuf>,

    /// Do not check the certificate of --kube-server. Whoever stands between can then read and change everything
    #[arg(long, requires = "kube_server", conflicts_with = "kube_ca_file")]
    pub kube_insecure_skip_tls_verify: bool,

    /// Those of kubectl.
    #[command(flatten)]
    pub kubectl: KubectlFlags,
}

/// The flags of kubectl that agentk of 14.1 has too: they count more than what a kubeconfig, or the pod's service
/// account, says.
#[derive(clap::Args, Clone, Debug, Default)]
#[command(next_help_heading = "Kubernetes API server, as kubectl has them")]
pub struct KubectlFlags {
    /// Use the API server at this URL
    #[arg(short = 's', long, value_name = "URL", hide_short_help = true, conflicts_with = "kube_server")]
    pub server: Option<String>,

    /// Trust the certificates in this PEM file, read when agentk starts
    #[arg(long, value_name = "FILE", hide_short_help = true, conflicts_with = "kube_server")]
    pub certificate_authority: Option<PathBuf>,

    /// Do not check the certificate of the API server. Whoever stands between can then read and change everything
    #[arg(long, hide_short_help = true, conflicts_with_all = ["kube_server", "certificate_authority"])]
    pub insecure_skip_tls_verify: bool,

    /// The name that the certificate of the API server must have, instead of the host of its URL
    #[arg(long, value_name = "NAME", hide_short_help = true)]
    pub tls_server_name: Option<String>,

    /// Authenticate with this bearer token. Everybody on the host sees it: --kube-token-file keeps it secret
    #[arg(long, value_name = "TOKEN", hide_short_help = true, conflicts_with = "kube_server", value_parser = secret)]
    pub token: Option<SecretString>,

    /// Authenticate with the certificate in this PEM file
    #[arg(long, value_name = "FILE", hide_short_help = true, requires = "client_key")]
    pub client_certificate: Option<PathBuf>,

    /// The key of --client-certificate
    #[arg(long, value_name = "FILE", hide_short_help = true, requires = "client_certificate")]
    pub client_key: Option<PathBuf>,

    /// Use this cluster of the kubeconfig, instead of its context's
    #[arg(long, value_name = "NAME", hide_short_help = true, conflicts_with = "kube_server")]
    pub cluster: Option<String>,

    /// Use this user of the kubeconfig, instead of its context's
    #[arg(long, value_name = "NAME", hide_short_help = true, conflicts_with = "kube_server")]
    pub user: Option<String>,

    /// The namespace of agentk's own requests
    #[arg(short = 'n', long, value_name = "NAME", hide_short_help = true)]
    pub namespace: Option<String>,

    /// Act as this user
    #[arg(long = "as", value_name = "USER", hide_short_help = true)]
    pub as_user: Option<String>,

    /// Act as a member of this group; may be given several times
    #[arg(long, value_name = "GROUP", hide_short_help = true, requires = "as_user")]
    pub as_group: Vec<String>,

    /// Has no effect: a request takes as long as its caller allows
    #[arg(long, value_name = "TIME", hide_short_help = true)]
    pub request_timeout: Option<String>,

    /// Has no effect: agentk keeps nothing on disk
    #[arg(long, value_name = "FOLDER", hide_short_help = true)]
    pub cache_dir: Option<PathBuf>,
}

/// Reads a secret, which no message repeats.
#[allow(clippy::unnecessary_wraps)] // clap's shape
fn secret(text: &str) -> Result<SecretString, std::convert::Infallible> {
    Ok(text.to_owned().into())
}

impl KubectlFlags {
    /// Overrides what was found elsewhere.
    fn apply(&self, config: &mut Config) -> anyhow::Result<()> {
        if let Some(server) = &self.server {
            config.cluster_url = server.parse().context("--server is not a URL")?;
        }
        if let Some(file) = &self.certificate_authority {
            config.root_cert = Some(certificates(file).context("--certificate-authority")?);
            config.root_cert_file = None;
        }
        if self.insecure_skip_tls_verify {
            config.accept_invalid_certs = true;
            config.root_cert = None;
            config.root_cert_file = None;
        }
        if let Some(name) = &self.tls_server_name {
            config.tls_server_name = Some(name.clone());
        }
        if let Some(namespace) = &self.namespace {
            config.default_namespace = namespace.clone();
        }
        let auth = &mut config.auth_info;
        if let Some((certificate, key)) = self.client_certificate.as_ref().zip(self.client_key.as_ref()) {
            let text = |file: &Path| {
                file.to_str().map(str::to_owned).with_context(|| format!("{} is not UTF-8", file.display()))
            };
            auth.client_certificate = Some(text(certificate)?);
            auth.client_key = Some(text(key)?);
            auth.client_certificate_data = None;
            auth.client_key_data = None;
        }
        if let Some(token) = &self.token {
            // Whatever else there is to authenticate with would be taken first.
            auth.token = Some(token.clone());
            auth.token_file = None;
            auth.exec = None;
            auth.auth_provider = None;
            auth.username = None;
            auth.password = None;
        }
        if let Some(user) = &self.as_user {
            auth.impersonate = Some(user.clone());
            if !self.as_group.is_empty() {
                auth.impersonate_groups = Some(self.as_group.clone());
            }
        }
        Ok(())
    }

    /// Warns of what is dangerous, and of what does nothing.
    fn warn(&self) {
        if self.insecure_skip_tls_verify {
            tracing::warn!(
                "--insecure-skip-tls-verify: the certificate of the Kubernetes API server is not checked; whoever stands \
                 between can read and change everything"
            );
        }
        // 0 means none, in kubectl too.
        let timeout = self.request_timeout.as_ref().is_some_and(|time| time != "0");
        for (flag, given) in [("--request-timeout", timeout), ("--cache-dir", self.cache_dir.is_some())] {
            if given {
                tracing::warn!(flag, "this flag of kubectl has no effect on agentk");
            }
        }
    }
}

impl ClusterAccess {
    /// Reads configuration and credentials. No connection is made yet: an API server that is down is no error.
    ///
    /// # Errors
    /// When something is missing or cannot be read; the message says what, and which flag gives it.
    pub async fn connect(&self) -> anyhow::Result<ApiServer> {
        self.kubectl.warn();
        let (config, source) =
            self.config(&|name| env::var_os(name).filter(|value| !value.is_empty())).await?;
        // Credential plugins are processes that this waits for.
        tokio::task::spawn_blocking(move || ApiServer::new(&config, source)).await?
    }

    /// Returns a client for the parts of agentk that use Kubernetes themselves, and where it goes. It shares nothing
    /// with the [`ApiServer`] of another call.
    ///
    /// # Errors
    /// As of [`connect`](Self::connect).
    pub async fn client(&self) -> anyhow::Result<(kube::Client, Target)> {
        let api = self.connect().await?;
        Ok((api.kube_client(), api.target().clone()))
    }

    async fn config(&self, env: &dyn Fn(&str) -> Option<OsString>) -> anyhow::Result<(Config, String)> {
        let (mut config, source) = self.found(env).await?;
        self.kubectl.apply(&mut config)?;
        Ok((config, source))
    }

    /// Finds the configuration that flags of kubectl override.
    async fn found(&self, env: &dyn Fn(&str) -> Option<OsString>) -> anyhow::Result<(Config, String)> {
        if let Some(server) = &self.kube_server {
            return Ok((self.explicit(server)?, "--kube-server".to_owned()));
        }
        let files = match (&self.kubeconfig, env("KUBECONFIG")) {
            (Some(file), _) => vec![file.clone()],
            (None, Some(list)) => {
                env::split_paths(&list).filter(|path| !path.as_os_str().is_empty()).collect()
            }
            (None, None) => Vec::new(),
        };
        if files.is_empty() {
            let named = [
                ("--context", &self.context),
                ("--cluster", &self.kubectl.cluster),
                ("--user", &self.kubectl.user),
            ];
            if let Some((flag, _)) = named.into_iter().find(|(_, name)| name.is_some()) {
                bail!("{flag} needs a kubeconfig: give one with --kubeconfig FILE or in KUBECONFIG");
            }
            if let Some(server) = &self.kubectl.server {
                let url: Uri = server.parse().context("--server is not a URL")?;
                return Ok((Config::new(url), "--server".to_owned()));
            }
            let config = Config::incluster().map_err(not_in_cluster)?;
            return Ok((config, "the pod's service account".to_owned()));
        }
        self.read_files(&files).await
    }

    async fn read_files(&self, files: &[PathBuf]) -> anyhow::Result<(Config, String)> {
        let names = files.iter().map(|file| file.display().to_string()).collect::<Vec<_>>().join(", ");
        let mut merged: Option<Kubeconfig> = None;
        for file in files {
            // As kubectl: of several files, those that do not exist are left out.
            if files.len() > 1 && !file.exists() {
                continue;
            }
            let next = Kubeconfig::read_from(file).map_err(|error| unreadable(file, &error))?;
            merged = Some(match merged {
                None => next,
                Some(first) => first.merge(next).map_err(|error| anyhow!("cannot merge {names}: {error}"))?,
            });
        }
        let Some(kubeconfig) = merged else { bail!("none of the kubeconfigs exists: {names}") };

        let contexts: BTreeSet<_> = kubeconfig.contexts.iter().map(|named| named.name.clone()).collect();
        let known = || match contexts.len() {
            0 => "it has no contexts".to_owned(),
            _ => format!("it has {}", contexts.iter().map(String::as_str).collect::<Vec<_>>().join(", ")),
        };
        let Some(context) = self.context.clone().or_else(|| kubeconfig.current_context.clone()) else {
            bail!("{names} has no current context: give one with --context NAME ({})", known());
        };
        ensure!(contexts.contains(&context), "{names} has no context {context:?} ({})", known());
        if proxy_url(&kubeconfig, &context, self.kubectl.cluster.as_deref()).is_some() {
            bail!("context {context:?} of {names} has a proxy-url, which agentk does not support");
        }

        let source = format!("context {context} of {names}");
        let options = KubeConfigOptions {
            context: Some(context),
            cluster: self.kubectl.cluster.clone(),
            user: self.kubectl.user.clone(),
        };
        let mut config = Config::from_custom_kubeconfig(kubeconfig, &options)
            .await
            .map_err(|error| anyhow!("cannot use {source}: {error}"))?;
        // Taken from HTTPS_PROXY, which is meant for the way to kas: agentk stands beside its API server.
        config.proxy_url = None;
        Ok((config, source))
    }

    fn explicit(&self, server: &str) -> anyhow::Result<Config> {
        let url: Uri = server.parse().with_context(|| "--kube-server is not a URL")?;
        let mut config = Config::new(url);
        config.accept_invalid_certs = self.kube_insecure_skip_tls_verify;
        if let Some(file) = &self.kube_ca_file {
            config.root_cert = Some(certificates(file)?);
            config.root_cert_file = Some(file.clone());
        }
        if let Some(file) = &self.kube_token_file {
            let file = file.to_str().with_context(|| format!("{} is not UTF-8", file.display()))?;
            config.auth_info = AuthInfo { token_file: Some(file.to_owned()), ..AuthInfo::default() };
        }
        Ok(config)
    }
}

fn proxy_url<'a>(kubeconfig: &'a Kubeconfig, context: &str, cluster: Option<&str>) -> Option<&'a str> {
    let context = kubeconfig.contexts.iter().find(|named| named.name == context)?.context.as_ref()?;
    let name = cluster.unwrap_or(&context.cluster);
    let cluster = kubeconfig.clusters.iter().find(|named| named.name == name)?.cluster.as_ref()?;
    cluster.proxy_url.as_deref().filter(|url| !url.is_empty())
}

/// Says what is wrong with a kubeconfig without repeating any of it: it may hold secrets.
fn unreadable(file: &Path, error: &KubeconfigError) -> anyhow::Error {
    match error {
        KubeconfigError::Parse(error) => match error.location() {
            Some(at) => {
                anyhow!("{} is not a kubeconfig: line {}, column {}", file.display(), at.line(), at.column())
            }
            None => anyhow!("{} is not a kubeconfig", file.display()),
        },
        KubeconfigError::ReadConfig(error, _) => {
            anyhow!("cannot read the kubeconfig {}: {error}", file.display())
        }
        error => anyhow!("cannot use the kubeconfig {}: {error}", file.display()),
    }
}

/// Says what the pod lacks, and how to go on without it.
fn not_in_cluster(error: InClusterError) -> anyhow::Error {
    const OTHERWISE: &str =
        "give an API server with --kubeconfig FILE (or KUBECONFIG), or with --kube-server URL";
    match error {
        InClusterError::ReadEnvironmentVariable(_) => anyhow!(
            "no Kubernetes API server is configured, and agentk does not run in a pod (KUBERNETES_SERVICE_HOST and \
             KUBERNETES_SERVICE_PORT are not both set): {OTHERWISE}"
        ),
        InClusterError::ReadDefaultNamespace(error) | InClusterError::ReadCertificateBundle(error) => {
            anyhow!(
                "the pod has no service account in {SERVICE_ACCOUNT} ({error}): let the pod have one \
             (automountServiceAccountToken), or {OTHERWISE}"
            )
        }
        error => anyhow!("cannot use the pod's service account: {error}: {OTHERWISE}"),
    }
}

/// Reads every certificate of a PEM file, as DER.
fn certificates(file: &Path) -> anyhow::Result<Vec<Vec<u8>>> {
    let read = || anyhow!("cannot read certificates from {}", file.display());
    let certificates = CertificateDer::pem_file_iter(file)
        .map_err(|error| read().context(error.to_string()))?
        .map(|certificate| certificate.map(|der| der.to_vec()))
        .collect::<Result<Vec<_>, _>>()
        .map_err(|error| anyhow!("{}: {error}", read()))?;
    ensure!(!certificates.is_empty(), "{} has no certificate in PEM", file.display());
    Ok(certificates)
}

/// Where requests go, for logs and messages: no secrets.
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

    /// Returns where the configuration comes from: a context, the pod's service account or a flag.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Whether agentk itself acts as another user, so that a caller may not.
    pub fn impersonates(&self) -> bool {
        self.impersonates
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.host)
    }
}

/// Why there is no answer. What of the request was sent: nothing, unless it is [`SendError::Broken`].
#[derive(Debug, thiserror::Error)]
pub enum SendError {
    /// The credentials of agentk's own configuration cannot be had.
    #[error("cannot get agentk's own credentials for the Kubernetes API server at {host}")]
    Credentials {
        /// The API server.
        host: String,
        /// Without what a credential plugin printed.
        source: BoxError,
    },
    /// There is no connection: refused, no such name, no TLS that agentk trusts.
    #[error("cannot reach the Kubernetes API server at {host}")]
    Connect {
        /// The API server.
        host: String,
        /// Why.
        source: legacy::Error,
    },
    /// The connection ended before the answer's head: the API server may have acted on the request.
    #[error("the connection to the Kubernetes API server at {host} broke before its answer")]
    Broken {
        /// The API server.
        host: String,
        /// Why.
        source: legacy::Error,
    },
    /// The request has a path or a query that is none.
    #[error("the request has no valid URL")]
    Url(#[source] http::Error),
}

/// Writes an error and its causes, joined by `: `, without what a cause repeats of the one before.
pub(crate) fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut last = text.clone();
    let mut next = error.source();
    while let Some(cause) = next {
        let cause_text = cause.to_string();
        // hyper-util's own layer says only what it was doing, which the first part has said.
        if !last.contains(&cause_text) && !cause_text.starts_with("client error (") {
            let _ = write!(text, ": {cause_text}");
            last = cause_text;
        }
        next = cause.source();
    }
    text
}

type Request_ = Request<grpc::Body>;

/// The API server, with agentk's own credentials: clones share their connections.
///
/// A request is sent at most once: nothing here repeats one, except over a new connection when the one it was meant
/// for had ended before the first byte. No answer is an error for what it says, no redirect is followed, and bodies
/// are neither held nor changed.
#[derive(Clone)]
pub struct ApiServer {
    inner: Arc<Inner>,
}

struct Inner {
    /// hyper's client behind a closure: the type of its connector has no name that this crate knows.
    request: Box<dyn Fn(Request_) -> ResponseFuture + Send + Sync>,
    scheme: uri::Scheme,
    authority: uri::Authority,
    /// What the configured URL has before each path; without a slash at its end.
    prefix: String,
    credentials: Credentials,
    /// `Impersonate-*` of agentk's own configuration.
    identity: Vec<(HeaderName, HeaderValue)>,
    namespace: String,
    target: Target,
}

impl fmt::Debug for ApiServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ApiServer").field(&self.inner.target).finish()
    }
}

impl ApiServer {
    fn new(config: &Config, source: String) -> anyhow::Result<Self> {
        let url = config.cluster_url.clone().into_parts();
        let (Some(scheme), Some(authority)) = (url.scheme, url.authority) else {
            bail!(
                "the URL of the API server ({source}) needs a scheme and a host, as in https://10.0.0.1:6443"
            );
        };
        ensure!(
            scheme == uri::Scheme::HTTP || scheme == uri::Scheme::HTTPS,
            "the URL of the API server ({source}) begins with {scheme}://, and agentk speaks only https and http"
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
        let client = legacy::Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(IDLE)
            .pool_max_idle_per_host(MAX_IDLE)
            .build(Bounded(tls));

        let identity = identity(&config.auth_info)?;
        Ok(Self {
            inner: Arc::new(Inner {
                request: Box::new(move |request| client.request(request)),
                prefix: path.to_owned(),
                credentials: Credentials::new(config)
                    .with_context(|| format!("cannot authenticate ({source})"))?,
                namespace: config.default_namespace.clone(),
                target: Target { host: authority.to_string(), source, impersonates: !identity.is_empty() },
                identity,
                scheme,
                authority,
            }),
        })
    }

    /// Returns where requests go.
    pub fn target(&self) -> &Target {
        &self.inner.target
    }

    /// Returns a client for the parts of agentk that use Kubernetes themselves; it shares the connections.
    ///
    /// Needs a runtime: the client is a task.
    pub fn kube_client(&self) -> kube::Client {
        ClientBuilder::new(ForKube(self.clone()), self.inner.namespace.clone()).build()
    }

    /// Sends a request, whose URI is a path and a query, and returns the answer once its head is here.
    ///
    /// `Authorization`, and `Impersonate-*` when agentk impersonates, are agentk's own whatever the request has.
    /// A body that ends with an error ends the connection, so that the API server never takes it for complete.
    ///
    /// # Errors
    /// See [`SendError`]. A status of 400 or above is an answer.
    ///
    /// # Cancel safety
    /// Dropping the future, or the answer's body, closes the connection.
    pub async fn send(&self, mut request: Request_) -> Result<Response<Incoming>, SendError> {
        let inner = &*self.inner;
        let host = || inner.target.host.clone();
        let path = request.uri().path_and_query().map_or("/", uri::PathAndQuery::as_str);
        let uri = Uri::builder().scheme(inner.scheme.clone()).authority(inner.authority.clone());
        let uri = if inner.prefix.is_empty() {
            uri.path_and_query(path).build()
        } else {
            uri.path_and_query(format!("{}{path}", inner.prefix)).build()
        };
        *request.uri_mut() = uri.map_err(SendError::Url)?;
        let headers = request.headers_mut();
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

        let response = (inner.request)(request).await.map_err(|error| {
            if error.is_connect() {
                SendError::Connect { host: host(), source: error }
            } else {
                SendError::Broken { host: host(), source: error }
            }
        })?;
        if response.status() == StatusCode::UNAUTHORIZED {
            inner.credentials.doubt();
        }
        Ok(response)
    }
}

/// The headers with which agentk itself acts as another user.
fn identity(auth: &AuthInfo) -> anyhow::Result<Vec<(HeaderName, HeaderValue)>> {
    let mut headers = Vec::new();
    let mut add = |name: HeaderName, value: &str| -> anyhow::Result<()> {
        let value = HeaderValue::from_str(value)
            .with_context(|| format!("the kubeconfig's value for {name} cannot be a header"))?;
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
        // As client-go: what no header's name may have, and the percent sign, is percent-encoded.
        let mut name = "impersonate-extra-".to_owned();
        for byte in key.bytes() {
            if byte.is_ascii_alphanumeric() || b"!#$&'*+-.^_`|~".contains(&byte) {
                name.push(char::from(byte));
            } else {
                let _ = write!(name, "%{byte:02X}");
            }
        }
        let name =
            HeaderName::try_from(name).context("the kubeconfig's as-user-extra has a key that is none")?;
        for value in values {
            add(name.clone(), value)?;
        }
    }
    Ok(headers)
}

/// Where `Authorization` comes from.
enum Credentials {
    /// A client certificate, or nothing.
    None,
    Token(HeaderValue),
    File(TokenFile),
    /// A credential plugin or another scheme that kube knows; its client asks nobody but [`Echo`].
    Plugin(kube::Client),
}

impl Credentials {
    /// Picks what the configuration has, in kube's order.
    fn new(config: &Config) -> anyhow::Result<Self> {
        let auth = &config.auth_info;
        let basic = auth.username.is_some() && auth.password.is_some();
        if auth.auth_provider.is_none() && !basic {
            if let Some(token) = &auth.token {
                return Ok(Self::Token(bearer(token)?));
            }
            if let Some(file) = &auth.token_file {
                return Ok(Self::File(TokenFile::open(file.into())?));
            }
        }
        let layer = config.auth_layer().map_err(|error| match error {
            kube::Error::Auth(error) => anyhow!("{}", without_output(&error)),
            error => anyhow!("{}", chain(&error)),
        })?;
        Ok(match layer {
            None => Self::None,
            Some(layer) => Self::Plugin(ClientBuilder::new(Echo, "").with_layer(&layer).build()),
        })
    }

    async fn header(&self) -> Result<Option<HeaderValue>, BoxError> {
        match self {
            Self::None => Ok(None),
            Self::Token(value) => Ok(Some(value.clone())),
            Self::File(file) => Ok(Some(file.header())),
            Self::Plugin(client) => match client.send(Request::new(kube::client::Body::empty())).await {
                Ok(mut answer) => Ok(answer.headers_mut().remove(header::AUTHORIZATION)),
                Err(kube::Error::Service(error)) => Err(match error.downcast_ref::<AuthError>() {
                    Some(error) => without_output(error).into(),
                    None => error,
                }),
                Err(kube::Error::Auth(error)) => Err(without_output(&error).into()),
                Err(error) => Err(error.into()),
            },
        }
    }

    /// The API server did not accept them: what was read from a file may be old.
    fn doubt(&self) {
        if let Self::File(file) = self {
            file.token().checked = None;
        }
    }
}

/// Says why there are no credentials, without a plugin's arguments, variables and output: any may be the credential.
fn without_output(error: &AuthError) -> String {
    match error {
        AuthError::AuthExecRun { out, .. } => format!("the credential plugin failed ({})", out.status),
        AuthError::AuthExecParse(_) | AuthError::ParseTokenKey(_) => {
            "the credential plugin did not print what it should".to_owned()
        }
        AuthError::AuthExec(_) => "the credential plugin failed".to_owned(),
        error => error.to_string(),
    }
}

fn bearer(token: &SecretString) -> anyhow::Result<HeaderValue> {
    let token = token.expose_secret().trim();
    ensure!(!token.is_empty(), "the bearer token is empty");
    // Without the cause, which would be of no use, and the value must not show.
    let mut value = HeaderValue::try_from(format!("Bearer {token}"))
        .map_err(|_| anyhow!("the bearer token has characters that no header may have"))?;
    value.set_sensitive(true);
    Ok(value)
}

/// A bearer token in a file that somebody renews.
struct TokenFile {
    path: PathBuf,
    token: Mutex<Token>,
}

struct Token {
    value: HeaderValue,
    /// `None`: look at the file before the next use.
    checked: Option<Instant>,
}

impl TokenFile {
    fn open(path: PathBuf) -> anyhow::Result<Self> {
        let value = Self::read(&path)?;
        Ok(Self { path, token: Mutex::new(Token { value, checked: Some(Instant::now()) }) })
    }

    fn read(path: &Path) -> anyhow::Result<HeaderValue> {
        let text =
            std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        bearer(&text.into()).with_context(|| format!("{} is of no use", path.display()))
    }

    fn token(&self) -> std::sync::MutexGuard<'_, Token> {
        self.token.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the header, and reads a kilobyte of a local file every [`TOKEN_AGE`].
    fn header(&self) -> HeaderValue {
        let mut token = self.token();
        let now = Instant::now();
        if token.checked.is_none_or(|at| now.duration_since(at) >= TOKEN_AGE) {
            token.checked = Some(now);
            match Self::read(&self.path) {
                Ok(value) => token.value = value,
                // As client-go: whoever removes the file after the start leaves the token valid.
                Err(error) => {
                    tracing::warn!(
                        error = format!("{error:#}"),
                        "token file unreadable, keeping the last token"
                    );
                }
            }
        }
        token.value.clone()
    }
}

/// Answers each request with the `Authorization` that layers above it have added.
#[derive(Clone)]
struct Echo;

impl Service<Request<kube::client::Body>> for Echo {
    type Response = Response<http_body_util::Empty<bytes::Bytes>>;
    type Error = BoxError;
    type Future = std::future::Ready<Result<Self::Response, BoxError>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, mut request: Request<kube::client::Body>) -> Self::Future {
        let mut headers = HeaderMap::new();
        if let Some(value) = request.headers_mut().remove(header::AUTHORIZATION) {
            headers.insert(header::AUTHORIZATION, value);
        }
        let mut response = Response::new(http_body_util::Empty::new());
        *response.headers_mut() = headers;
        std::future::ready(Ok(response))
    }
}

/// [`ApiServer`] as kube's own client wants it.
#[derive(Clone)]
struct ForKube(ApiServer);

impl Service<Request<kube::client::Body>> for ForKube {
    type Response = Response<Incoming>;
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

/// A connector that gives up after [`CONNECT_WITHIN`].
#[derive(Clone)]
struct Bounded<C>(C);

impl<C> Service<Uri> for Bounded<C>
where
    C: Service<Uri>,
    C::Error: Into<BoxError>,
    C::Future: Send + 'static,
{
    type Response = C::Response;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<C::Response, BoxError>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.0.poll_ready(cx).map_err(Into::into)
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let connecting = self.0.call(uri);
        Box::pin(async move {
            match timeout(CONNECT_WITHIN, connecting).await {
                Ok(connected) => connected.map_err(Into::into),
                Err(_) => Err(format!("no connection within {CONNECT_WITHIN:?}").into()),
            }
        })
    }
}

#[cfg(test)]
mod tests;
