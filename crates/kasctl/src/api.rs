//! Calls to kas: the token, the metadata and the time limit of each.

use std::{path::PathBuf, time::Duration};

use http::Uri;
use ids::ConnectionId;
use proto::{
    gitlab::agent::kubernetes_api::rpc::kubernetes_api_client::KubernetesApiClient,
    kas::api::v1::kas_api_client::KasApiClient,
};
use tokio::{
    signal::unix::{SignalKind, signal},
    time::Instant,
};
use tonic::{Request, Status, metadata::AsciiMetadataValue};

use crate::{
    address::Address,
    explain::{Asked, Call},
    failure::{Exit, Failure},
    jwt,
    link::{self, Link, TlsOptions},
    secret::Secret,
};

/// Names the agent that a call is passed through to.
const AGENT_ID: &str = "kas-agent-id";
/// Names one connection of that agent.
const CONNECTION_ID: &str = "kas-connection-id";
/// Asks kas for an account of the request's way; the answer has it under the same key.
pub(crate) const EXPLAIN: &str = "kas-explain";
/// Goes through kas to the agent, and into every log on the way.
const CORRELATION_ID: &str = "x-gitlab-correlation-id";

/// How long a call may take that answers once.
pub(crate) const UNARY_TIMEOUT: Duration = Duration::from_secs(30);
/// How much longer kasctl waits than it told kas: kas' own "deadline exceeded" says more.
const GRACE: Duration = Duration::from_secs(1);
/// How long the end of the connection may take. It carries the cancellation of what was left open.
const FAREWELL: Duration = Duration::from_millis(250);
/// The largest answer: 50,000 pods with the longest names need 16 MiB.
const MAX_ANSWER: usize = 64 * 1024 * 1024;

/// Where kas is and how to speak to it: the global flags.
#[derive(Debug)]
pub(crate) struct Settings {
    pub(crate) address: Address,
    pub(crate) secret_file: Option<PathBuf>,
    pub(crate) tls: TlsOptions,
    /// `None`: each command's own limit; zero: no limit.
    pub(crate) timeout: Option<Duration>,
    /// `None`: a random one.
    pub(crate) correlation: Option<AsciiMetadataValue>,
}

/// A connection to kas, and what every call on it needs.
pub(crate) struct Client {
    link: Link,
    origin: Uri,
    address: String,
    secret: Secret,
    timeout: Option<Duration>,
    correlation: AsciiMetadataValue,
    began: Instant,
    connected: Instant,
}

/// Connects, runs `work`, and disconnects; Ctrl-C cancels the calls that are open.
///
/// # Errors
/// Those of `work`, of the secret and of the connection; [`Failure::Interrupted`] after Ctrl-C.
pub(crate) async fn with_client(
    settings: Settings,
    work: impl AsyncFnOnce(Client) -> Result<Exit, Failure>,
) -> Result<Exit, Failure> {
    let Settings { address, secret_file, tls, timeout, correlation } = settings;
    if !matches!(address, Address::Tcp { tls: true, .. })
        && (tls.ca_file.is_some() || tls.server_name.is_some())
    {
        return Err(Failure::Usage("--ca-file and --server-name need an address that begins with grpcs://"));
    }
    let secret = Secret::load(secret_file.as_deref())?;
    let correlation = match correlation {
        Some(given) => given,
        None => ascii(&jwt::unique_id().map_err(jwt::Error::from)?),
    };
    let scheme = if matches!(address, Address::Tcp { tls: true, .. }) { "https" } else { "http" };
    let origin = format!("{scheme}://{}", address.authority())
        .parse()
        .map_err(|_| Failure::Usage("the host of --address is not a legal name"))?;
    // One handler from here on: none of the moments between two waits misses a Ctrl-C.
    let mut interrupts = signal(SignalKind::interrupt()).map_err(Failure::Runtime)?;
    let began = Instant::now();
    let (link, driver) = tokio::select! {
        connected = link::connect(&address, &tls) => {
            connected.map_err(|cause| Failure::Connect { address: address.clone(), cause })?
        }
        _ = interrupts.recv() => return Err(Failure::Interrupted),
    };
    let connected = Instant::now();
    let address = address.to_string();
    let client = Client { link, origin, address, secret, timeout, correlation, began, connected };
    let done = tokio::select! {
        done = work(client) => done,
        _ = interrupts.recv() => Err(Failure::Interrupted),
    };
    let _ = tokio::time::timeout(FAREWELL, driver).await;
    done
}

/// For values made of ids and hexadecimal digits.
fn ascii(text: &str) -> AsciiMetadataValue {
    AsciiMetadataValue::try_from(text).unwrap_or_else(|_| AsciiMetadataValue::from_static(""))
}

impl Client {
    /// Describes a call; `default` is its time limit unless `--timeout` gives another.
    pub(crate) fn call(&self, asked: Asked, default: Option<Duration>) -> Call {
        Call {
            asked,
            address: self.address.clone(),
            secret: self.secret.path().display().to_string(),
            correlation: self.correlation.to_str().unwrap_or_default().to_owned(),
            timeout: self.timeout.or(default).filter(|limit| !limit.is_zero()),
            is_answering: false,
        }
    }

    /// Puts the metadata of a call around its message, with a token of its own.
    ///
    /// # Errors
    /// When no token can be made.
    pub(crate) fn request<T>(&self, call: &Call, message: T) -> Result<Request<T>, Failure> {
        let mut request = Request::new(message);
        let token = jwt::mint(self.secret.bytes(), jwt::DEFAULT_ISSUER, jwt::CALL_TTL)?;
        let mut authorization = ascii(&format!("Bearer {token}"));
        authorization.set_sensitive(true);
        let metadata = request.metadata_mut();
        metadata.insert("authorization", authorization);
        metadata.insert(CORRELATION_ID, self.correlation.clone());
        if let Some(limit) = call.timeout {
            request.set_timeout(limit);
        }
        Ok(request)
    }

    /// Puts the metadata around a request that kas passes through to an agent.
    ///
    /// # Errors
    /// When no token can be made.
    pub(crate) fn agent_request<T>(
        &self,
        call: &Call,
        agent: ids::AgentId,
        connection: Option<ConnectionId>,
        explain: bool,
        message: T,
    ) -> Result<Request<T>, Failure> {
        let mut request = self.request(call, message)?;
        let metadata = request.metadata_mut();
        if explain {
            metadata.insert(EXPLAIN, AsciiMetadataValue::from_static("1"));
        }
        metadata.insert(AGENT_ID, agent.get().into());
        if let Some(connection) = connection {
            metadata.insert(CONNECTION_ID, connection.get().into());
        }
        Ok(request)
    }

    /// Returns the API of kas itself.
    pub(crate) fn kas(&self) -> KasApiClient<Link> {
        KasApiClient::with_origin(self.link.clone(), self.origin.clone())
            .max_decoding_message_size(MAX_ANSWER)
    }

    /// Returns the Kubernetes API that kas passes through.
    pub(crate) fn kubernetes(&self) -> KubernetesApiClient<Link> {
        KubernetesApiClient::with_origin(self.link.clone(), self.origin.clone())
            .max_decoding_message_size(MAX_ANSWER)
    }

    /// Returns when kasctl began to connect, and when it was connected.
    pub(crate) fn dialled(&self) -> (Instant, Instant) {
        (self.began, self.connected)
    }

    /// Returns where kas is.
    pub(crate) fn address(&self) -> &str {
        &self.address
    }

    /// Says what a status means.
    pub(crate) fn explain(&self, call: &Call, status: &Status) -> Failure {
        call.explain(status, self.link.peer())
    }

    /// Runs `work` at most as long as the call may take, and a moment longer.
    ///
    /// # Errors
    /// Those of `work`, or that there was no answer in time.
    pub(crate) async fn within<T>(
        &self,
        call: &Call,
        work: impl Future<Output = Result<T, Failure>>,
    ) -> Result<T, Failure> {
        match call.timeout {
            None => work.await,
            Some(limit) => match tokio::time::timeout(limit + GRACE, work).await {
                Ok(done) => done,
                Err(_) => Err(call.explain_silence(self.link.peer())),
            },
        }
    }
}
