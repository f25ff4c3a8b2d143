//! The client of GitLab's internal API.
//!
//! All callers share one [`Client`], which keeps connections alive. It does not cache answers; that is up to
//! its users. `jobs` and `proxy_user` ask about callers of the Kubernetes API endpoint, and `usage` reports
//! how much they use it. `agent_configuration` tells GitLab how agents are configured. `lookup_rate` is the
//! rate limit. `check` is the command `kas gitlab check`.

mod agent_configuration;
mod answer;
pub mod check;
mod jobs;
mod location;
mod lookup;
mod lookup_rate;
mod metrics;
mod module;
mod proxy_user;
#[cfg(test)]
mod tests;
pub mod usage;

use std::{path::Path, sync::Arc, time::Duration};

use arc_swap::ArcSwap;
use async_trait::async_trait;
use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, StatusCode, Uri, header, response};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper_util::{
    client::legacy,
    rt::{TokioExecutor, TokioTimer},
};
use ids::{Agent, AgentId, TokenHash, is_agent_name};
use jsonwebtoken::{Algorithm, EncodingKey};
use kas_config::GitLabApi;
use net::client::Connector;
pub use net::proxy::Proxies;
use parking_lot::Mutex;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use process::error::chain;
use process::version;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use settings::secret::ApiSecret;
use tokio::time::Instant;

pub use self::{
    agent_configuration::AgentConfigurations,
    jobs::{AccessAs, AllowedAgent, Environment, Job, JobAgents},
    location::{GitalyServer, Location, Locations},
    lookup::{AgentInfo, LookupError, LookupPriority, Urgency},
    metrics::{LookupMetrics, LookupOutcome},
    module::ModuleError,
    proxy_user::{AccessKey, ProxyUser, ProxyUsers, RolesIn, UserAccess},
};
use self::{
    location::LocationAnswer,
    lookup_rate::{Busy, LookupRateLimiter},
};

/// The path of 14.1, which later versions support too.
const AGENT_INFO: &str = "/api/v4/internal/kubernetes/agent_info";
/// The path of 14.1 for GitOps.
const PROJECT_INFO: &str = "/api/v4/internal/kubernetes/project_info";
/// The path of 16.1 and later that says whether an agent may know of a project.
const VERIFY_PROJECT_ACCESS: &str = "/api/v4/internal/kubernetes/verify_project_access";
/// The current path.
const AGENT_INFO_TODAY: &str = "/api/v4/internal/agents/agentk/agent_info";
/// Has the agent's token in versions that no longer read `Authorization`.
const AGENT_TOKEN: HeaderName = HeaderName::from_static("gitlab-agentk-api-request");
/// Has the signature of kas.
const SIGNATURE: HeaderName = HeaderName::from_static("gitlab-kas-api-request");
const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const CLIENT_NAME: HeaderName = HeaderName::from_static("x-gitlab-client-name");
const JSON: &str = "application/json";
const CLIENT: &str = "gitlab-kas";

/// A signature is valid this long before and after its creation, as in 14.1.
const SIGNATURE_LIFE: Duration = Duration::from_secs(5);
/// The largest answer, in bytes. That for an agent has a few hundred.
const LARGEST_ANSWER: usize = 1024 * 1024;
/// The largest headers of an answer, in bytes.
const LARGEST_HEAD: usize = 64 * 1024;
/// The longest full path of a project, in bytes. GitLab limits each part to 255 characters.
const LONGEST_PATH: usize = 8 * 1024;
/// Idle connections are closed after this time, as in 14.1.
const IDLE: Duration = Duration::from_secs(90);
/// The most idle connections, as in 14.1.
const IDLE_CONNECTIONS: usize = 100;
/// How often it is logged that agents are turned away, at most.
const WARN_INTERVAL: Duration = Duration::from_secs(60);

/// Characters that are not escaped in the value of a query, as in Go.
const QUERY: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b'~');

/// In the body of status 401 of every version of GitLab if the signature is invalid, and not the token.
const SIGNATURE_REFUSED: &[u8] = b"KAS JWT authentication invalid";

/// Why the client cannot be created.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The roots of TLS cannot be read.
    #[error("gitlab.ca_certificate_file cannot be used")]
    Tls(#[from] net::tls::Error),
    /// The environment names a proxy that cannot be used.
    #[error("the proxy for GitLab cannot be used")]
    Proxy(#[from] net::proxy::Error),
}

/// Why there is no valid answer. The same request may succeed later.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum Failure {
    #[error("it did not answer within {0:?}")]
    Timeout(Duration),
    #[error("it cannot be reached")]
    Unreachable(#[source] legacy::Error),
    #[error("it refuses the signature of kas: gitlab.authentication_secret_file or a clock is wrong")]
    Signature,
    #[error("it answered with status {0}")]
    Status(StatusCode),
    #[error("its answer is not {JSON}")]
    ContentType,
    #[error("its answer broke off, or is above {LARGEST_ANSWER} bytes")]
    Body(#[source] grpc::BoxError),
    /// The error omits the text, since an answer has credentials.
    #[error("its answer is no valid JSON of this kind (line {line}, column {column})")]
    Json { line: usize, column: usize },
    #[error("its answer has no valid {0}")]
    Field(&'static str),
    #[error("the token is no value of a header")]
    Token,
    #[error("a full path of a project has 1 to {LONGEST_PATH} bytes")]
    Path,
    #[error("no signature could be made")]
    Unsigned(#[source] jsonwebtoken::errors::Error),
}

type Http = legacy::Client<Connector, grpc::Body>;
/// The head of an answer, and its body if that is complete and not too large.
type Answered = (response::Parts, Result<Bytes, grpc::BoxError>);

/// A client of GitLab's internal API.
pub struct Client {
    /// Replaced when the file of the CA changes.
    http: ArcSwap<Http>,
    address: Uri,
    api: GitLabApi,
    agent_info: Uri,
    /// Replaced when the secret file changes.
    key: ArcSwap<EncodingKey>,
    /// Credentials for a proxy that reads requests.
    proxy_authorization: Option<HeaderValue>,
    timeout: Duration,
    lookup_rate: Arc<LookupRateLimiter>,
    /// Of requests of modules, so that they delay no lookup.
    module_rate: Arc<LookupRateLimiter>,
    /// When the log last had the warning that too many lookups wait.
    warned: Mutex<Option<Instant>>,
    metrics: Arc<LookupMetrics>,
    locations: Arc<Locations>,
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").field("agent_info", &self.agent_info).finish_non_exhaustive()
    }
}

impl Client {
    /// Creates a client. It connects with the first request.
    ///
    /// # Errors
    /// See [`Error`].
    pub fn new(
        config: &kas_config::GitLab,
        secret: &ApiSecret,
        proxies: &Proxies,
        metrics: Arc<LookupMetrics>,
    ) -> Result<Self, Error> {
        let agent_info = endpoint(&config.address, config.api);
        let (connector, proxy_authorization) =
            connector(&agent_info, config.ca_certificate.as_deref(), proxies)?;
        Ok(Self {
            http: ArcSwap::from_pointee(http(connector)),
            address: config.address.clone(),
            api: config.api,
            agent_info,
            key: ArcSwap::from_pointee(EncodingKey::from_secret(secret.expose())),
            proxy_authorization,
            timeout: config.timeout,
            lookup_rate: LookupRateLimiter::new(config.refill_rate_per_second, config.bucket_size),
            module_rate: LookupRateLimiter::new(config.refill_rate_per_second, config.bucket_size),
            warned: Mutex::default(),
            metrics,
            locations: Arc::default(),
        })
    }

    /// Signs with another secret from now on.
    pub fn rotate(&self, secret: &ApiSecret) {
        self.key.store(Arc::new(EncodingKey::from_secret(secret.expose())));
    }

    /// Reloads the CA certificates for GitLab, for new connections.
    ///
    /// # Errors
    /// See [`Error`]. Nothing changes then.
    pub fn trust(&self, ca_certificate: Option<&Path>, proxies: &Proxies) -> Result<(), Error> {
        let (connector, _) = connector(&self.agent_info, ca_certificate, proxies)?;
        self.http.store(Arc::new(http(connector)));
        Ok(())
    }

    /// Returns where Gitaly keeps the repositories of the configuration projects of agents.
    pub fn locations(&self) -> Arc<Locations> {
        Arc::clone(&self.locations)
    }

    fn headers(&self, token: &[u8], id: HeaderValue) -> Result<HeaderMap, Failure> {
        let mut headers = HeaderMap::new();
        if self.api != GitLabApi::Today {
            headers.insert(header::AUTHORIZATION, secret(&[b"Bearer ", token].concat())?);
        }
        if self.api != GitLabApi::V14 {
            headers.insert(AGENT_TOKEN, secret(token)?);
        }
        headers.insert(SIGNATURE, secret(self.signature()?.as_bytes())?);
        self.common_headers(&mut headers, id);
        Ok(headers)
    }

    /// Adds what every request has.
    fn common_headers(&self, headers: &mut HeaderMap, id: HeaderValue) {
        headers.insert(header::ACCEPT, HeaderValue::from_static(JSON));
        headers.insert(header::USER_AGENT, user_agent());
        headers.insert(REQUEST_ID, id);
        headers.insert(CLIENT_NAME, HeaderValue::from_static(CLIENT));
        if let Some(value) = &self.proxy_authorization {
            headers.insert(header::PROXY_AUTHORIZATION, value.clone());
        }
    }

    /// Waits for the rate limit of requests whose sender is not known.
    async fn wait_for_rate(&self, urgency: Urgency) -> Result<(), LookupError> {
        self.lookup_rate.wait(urgency, self.timeout).await.map_err(|_| LookupError::Busy)
    }

    /// Creates the signature of one request.
    fn signature(&self) -> Result<String, Failure> {
        let now = process::clock::wall();
        // In microseconds, as in 14.1. A float has enough digits.
        let seconds = |time: Duration| time.as_micros() as f64 / 1e6;
        let claims = Claims {
            aud: ["gitlab"],
            exp: seconds(now + SIGNATURE_LIFE),
            iat: seconds(now),
            iss: CLIENT,
            nbf: seconds(now.saturating_sub(SIGNATURE_LIFE)),
        };
        jsonwebtoken::encode(&jsonwebtoken::Header::new(Algorithm::HS256), &claims, &self.key.load())
            .map_err(Failure::Unsigned)
    }

    /// Returns the project with this full path, such as `group/project`, if the agent with this token may
    /// read it.
    ///
    /// The answer is not cached, and not counted as a lookup of an agent.
    ///
    /// # Errors
    /// [`LookupError`]. If the project does not exist, or the agent may not read it: [`Failure::Status`] with
    /// 404.
    pub async fn project_info(&self, token: &[u8], path: &str) -> Result<Project, LookupError> {
        if path.is_empty() || path.len() > LONGEST_PATH {
            return Err(Failure::Path.into());
        }
        self.wait_for_rate(Urgency::UNKNOWN_SOURCE).await?;
        let id = utf8_percent_encode(path, QUERY);
        let project_info = self.endpoint(&format!("{PROJECT_INFO}?id={id}"));
        let id = request_id();
        let headers = self.headers(token, id)?;
        let body = tokio::time::timeout(self.timeout, self.get(project_info, headers))
            .await
            .unwrap_or(Err(Failure::Timeout(self.timeout).into()))?;
        Ok(project(&body)?)
    }

    /// Asks whether the agent with this token may know of the project with this full path.
    ///
    /// # Errors
    /// As [`Client::project_info`].
    pub async fn verify_project_access(&self, token: &[u8], path: &str) -> Result<(), LookupError> {
        if path.is_empty() || path.len() > LONGEST_PATH {
            return Err(Failure::Path.into());
        }
        self.wait_for_rate(Urgency::UNKNOWN_SOURCE).await?;
        let id = utf8_percent_encode(path, QUERY);
        let mut request = Request::new(Full::default());
        *request.uri_mut() = self.endpoint(&format!("{VERIFY_PROJECT_ACCESS}?id={id}"));
        *request.headers_mut() = self.headers(token, request_id())?;
        let sent = tokio::time::timeout(self.timeout, self.send(request)).await;
        let (head, _) = sent.unwrap_or(Err(Failure::Timeout(self.timeout)))?;
        match head.status {
            StatusCode::OK | StatusCode::NO_CONTENT => Ok(()),
            StatusCode::UNAUTHORIZED => Err(LookupError::Unknown),
            StatusCode::FORBIDDEN => Err(LookupError::Forbidden),
            other => Err(Failure::Status(other).into()),
        }
    }

    /// Logs that lookups were refused, at most once in [`WARN_INTERVAL`].
    fn warn_busy(&self, Busy { waiting, most }: Busy) {
        let now = Instant::now();
        let mut warned = self.warned.lock();
        if warned.is_some_and(|warned| now < warned + WARN_INTERVAL) {
            return;
        }
        *warned = Some(now);
        drop(warned);
        tracing::warn!(
            waiting,
            most_from = most.map(|(from, _)| tracing::field::display(from)),
            from_there = most.map(|(_, count)| count),
            "agents are turned away for now: more token lookups are needed than gitlab.api_rate_limit allows"
        );
    }

    fn endpoint(&self, path: &str) -> Uri {
        at(&self.address, self.api, path)
    }

    /// Returns the JSON of an answer with status 200.
    async fn get(&self, uri: Uri, headers: HeaderMap) -> Result<Bytes, LookupError> {
        let mut request = Request::new(Full::default());
        *request.uri_mut() = uri;
        *request.headers_mut() = headers;
        let (head, body) = self.send(request).await?;
        match head.status {
            StatusCode::OK => Ok(json_body(&head.headers, body)?),
            StatusCode::UNAUTHORIZED => Err(LookupError::Unknown),
            StatusCode::FORBIDDEN => Err(LookupError::Forbidden),
            other => Err(Failure::Status(other).into()),
        }
    }

    /// Sends JSON in the name of kas itself.
    async fn post(
        &self,
        path: &str,
        json: impl Into<Bytes>,
        urgency: Urgency,
    ) -> Result<Answered, LookupError> {
        self.wait_for_rate(urgency).await?;
        let mut request = Request::new(Full::new(json.into()));
        *request.method_mut() = Method::POST;
        *request.uri_mut() = self.endpoint(path);
        let headers = request.headers_mut();
        headers.insert(SIGNATURE, secret(self.signature()?.as_bytes())?);
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(JSON));
        self.common_headers(headers, request_id());
        let sent = tokio::time::timeout(self.timeout, self.send(request)).await;
        Ok(sent.unwrap_or(Err(Failure::Timeout(self.timeout)))?)
    }

    /// Sends JSON to which GitLab answers with a status only.
    async fn report(&self, path: &str, json: impl Into<Bytes>) -> Result<(), LookupError> {
        let (head, _) = self.post(path, json, Urgency::UNKNOWN_SOURCE).await?;
        match head.status {
            StatusCode::OK | StatusCode::NO_CONTENT => Ok(()),
            other => Err(Failure::Status(other).into()),
        }
    }

    /// Sends a request and reads its answer, whatever its status is.
    async fn send(&self, request: Request<Full<Bytes>>) -> Result<Answered, Failure> {
        // Redirects are not followed, so no other host gets these credentials.
        let answer =
            self.http.load().request(request.map(grpc::boxed)).await.map_err(Failure::Unreachable)?;
        let (head, body) = answer.into_parts();
        let body = Limited::new(body, LARGEST_ANSWER).collect().await.map(|body| body.to_bytes());
        let is_refused =
            |body: &Bytes| body.windows(SIGNATURE_REFUSED.len()).any(|window| window == SIGNATURE_REFUSED);
        if head.status == StatusCode::UNAUTHORIZED && body.as_ref().is_ok_and(is_refused) {
            // The token was not checked. If this counted as invalid, a rotated secret or a wrong clock would
            // disconnect every agent.
            return Err(Failure::Signature);
        }
        Ok((head, body))
    }

    async fn ask(&self, token: &[u8], id: HeaderValue) -> Result<Agent, LookupError> {
        let headers = self.headers(token, id)?;
        let (agent, location) = agent(&self.get(self.agent_info.clone(), headers).await?)?;
        if let Some(location) = location {
            self.locations.set(agent.project_id, location);
        }
        Ok(agent)
    }
}

/// Selects how to reach GitLab. Also returns the credentials for a proxy that forwards requests.
fn connector(
    target: &Uri,
    ca_certificate: Option<&Path>,
    proxies: &Proxies,
) -> Result<(Connector, Option<HeaderValue>), Error> {
    let tls = net::tls::client(ca_certificate)?;
    if let Some(proxy) = proxies.of_url(target)? {
        let (host, port) = (proxy.host(), proxy.port());
        tracing::info!(proxy.host = host, proxy.port = port, "GitLab is reached through a proxy");
    }
    Ok(Connector::new(target, &tls, proxies)?)
}

fn http(connector: Connector) -> Http {
    legacy::Client::builder(TokioExecutor::new())
        .timer(TokioTimer::new())
        .pool_timer(TokioTimer::new())
        .pool_idle_timeout(IDLE)
        .pool_max_idle_per_host(IDLE_CONNECTIONS)
        .http1_max_buf_size(LARGEST_HEAD)
        .build(connector)
}

#[async_trait]
impl AgentInfo for Client {
    async fn agent_info(&self, token: &[u8], urgency: Urgency) -> Result<Agent, LookupError> {
        if let Err(busy) = self.lookup_rate.wait(urgency, self.timeout).await {
            self.metrics.looked_up(LookupOutcome::Limited);
            self.warn_busy(busy);
            return Err(LookupError::Busy);
        }
        let id = request_id();
        let begun = Instant::now();
        let result = tokio::time::timeout(self.timeout, self.ask(token, id.clone()))
            .await
            .unwrap_or(Err(Failure::Timeout(self.timeout).into()));
        self.metrics.gitlab_seconds.observe(begun.elapsed().as_secs_f64());
        self.metrics.looked_up(match &result {
            Ok(_) => LookupOutcome::Found,
            Err(LookupError::Unknown) => LookupOutcome::Unauthenticated,
            Err(LookupError::Forbidden) => LookupOutcome::Forbidden,
            Err(LookupError::Busy | LookupError::Failed(_)) => LookupOutcome::Unavailable,
        });
        if let Err(error) = &result {
            // GitLab has the id in its own log.
            let (id, token) = (id.to_str().unwrap_or_default(), TokenHash::of(token));
            if let LookupError::Failed(failure) = error {
                let error = chain(failure);
                tracing::warn!(request.id = id, ?token, error, "GitLab could not identify a token");
            } else {
                tracing::info!(request.id = id, ?token, %error, "GitLab refused a token");
            }
        }
        result
    }
}

/// Returns a value of a header that is not logged.
fn secret(bytes: &[u8]) -> Result<HeaderValue, Failure> {
    let mut value = HeaderValue::from_bytes(bytes).map_err(|_| Failure::Token)?;
    value.set_sensitive(true);
    Ok(value)
}

/// Returns an id for a request, which GitLab writes into its own log.
fn request_id() -> HeaderValue {
    let id = format!("{:032x}", rand::random::<u128>());
    let mut value = HeaderValue::from_str(&id).unwrap_or(HeaderValue::from_static("none"));
    value.set_sensitive(true);
    value
}

#[derive(Serialize)]
struct Claims {
    aud: [&'static str; 1],
    exp: f64,
    iat: f64,
    iss: &'static str,
    nbf: f64,
}

/// The fields of an answer about an agent that are used. Missing ones are zero, as in 14.1.
#[derive(Default, Deserialize)]
#[serde(default)]
struct AgentAnswer {
    project_id: Option<i64>,
    agent_id: Option<i64>,
    agent_name: Option<String>,
    #[serde(flatten)]
    location: LocationAnswer,
}

/// Parses a JSON object. Checks for `{` first, since serde would also accept a list of the values.
fn object<T: DeserializeOwned>(body: &[u8]) -> Result<T, Failure> {
    let begin = body.trim_ascii_start();
    if begin.first().is_some_and(|first| *first != b'{') {
        return Err(Failure::Json { line: 1, column: body.len() - begin.len() + 1 });
    }
    serde_json::from_slice(body).map_err(|error| Failure::Json { line: error.line(), column: error.column() })
}

fn agent(body: &[u8]) -> Result<(Agent, Option<Location>), Failure> {
    let answer: AgentAnswer = object(body)?;
    let agent = Agent {
        id: AgentId::new(answer.agent_id.unwrap_or_default()).map_err(|_| Failure::Field("agent_id"))?,
        // It becomes part of the paths of configuration files.
        name: answer
            .agent_name
            .filter(|name| is_agent_name(name) && !name.is_empty())
            .ok_or(Failure::Field("agent_name"))?
            .into(),
        project_id: answer.project_id.filter(|id| *id > 0).ok_or(Failure::Field("project_id"))?,
    };
    Ok((agent, answer.location.read()))
}

/// A project, according to GitLab.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Project {
    /// The id, above zero.
    pub id: i64,
    /// Its current full path. The requested one may be older. Empty if GitLab does not report it.
    pub path: String,
    /// Where its repository is; `None`: the answer does not say so.
    pub location: Option<Location>,
}

/// The fields of an answer about a project that are used.
#[derive(Default, Deserialize)]
#[serde(default)]
struct ProjectAnswer {
    project_id: Option<i64>,
    #[serde(flatten)]
    location: LocationAnswer,
}

fn project(body: &[u8]) -> Result<Project, Failure> {
    let answer: ProjectAnswer = object(body)?;
    Ok(Project {
        id: answer.project_id.filter(|id| *id > 0).ok_or(Failure::Field("project_id"))?,
        path: answer.location.project_path().unwrap_or_default().to_owned(),
        location: answer.location.read(),
    })
}

#[cfg(feature = "fuzzing")]
/// Parses `bytes` as GitLab's answer about an agent, a project and a job, for a fuzz target.
///
/// # Panics
/// If the result is invalid.
pub fn fuzz(bytes: &[u8]) {
    jobs::fuzz(bytes);
    proxy_user::fuzz(bytes);
    if let Ok(project) = project(bytes) {
        assert!(project.id > 0);
    }
    if let Ok((agent, _)) = agent(bytes) {
        assert!(agent.id.get() > 0 && agent.project_id > 0);
        assert!(
            !agent.name.is_empty() && !agent.name.contains(['/', '\\', '\0']) && !agent.name.starts_with('.')
        );
    }
}

/// Returns the body of an answer that must be JSON.
fn json_body(headers: &HeaderMap, body: Result<Bytes, grpc::BoxError>) -> Result<Bytes, Failure> {
    if !is_json(headers) {
        return Err(Failure::ContentType);
    }
    body.map_err(Failure::Body)
}

fn is_json(headers: &HeaderMap) -> bool {
    let value = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    value.split(';').next().is_some_and(|media| media.trim().eq_ignore_ascii_case(JSON))
}

/// Returns the URL for agents. 14.1 drops the path of the address, later versions append to it.
fn endpoint(address: &Uri, api: GitLabApi) -> Uri {
    at(address, api, if api == GitLabApi::Today { AGENT_INFO_TODAY } else { AGENT_INFO })
}

/// Returns a path, perhaps with a query, of GitLab's API.
fn at(address: &Uri, api: GitLabApi, path: &str) -> Uri {
    let base = if api == GitLabApi::V14 { "" } else { address.path().trim_end_matches('/') };
    let mut parts = address.clone().into_parts();
    parts.path_and_query = format!("{base}{path}").parse().ok();
    Uri::from_parts(parts).unwrap_or_else(|_| address.clone())
}

fn user_agent() -> HeaderValue {
    format!("{CLIENT}/{}/{}", version::VERSION, version::COMMIT)
        .parse()
        .unwrap_or(HeaderValue::from_static(CLIENT))
}
