//! Calls to kas, with their tokens, metadata and time limits.

use std::{path::PathBuf, sync::Arc, time::Duration};

use http::Uri;
use ids::ConnectionId;
use proto::{
    gitlab::agent::kubernetes_api::rpc::kubernetes_api_client::KubernetesApiClient,
    kas::api::v1::kas_api_client::KasApiClient,
};
use tokio::{
    signal::unix::{SignalKind, signal},
    task::JoinHandle,
    time::Instant,
};
use tonic::{Request, Status, metadata::AsciiMetadataValue};

use crate::{
    address::Address,
    explain::{Call, CallKind},
    failure::{Exit, Failure},
    jwt,
    link::{self, Link, TlsOptions},
    secret::Secret,
};

/// The agent that a call is forwarded to.
const AGENT_ID: &str = "kas-agent-id";
/// A connection of that agent.
const CONNECTION_ID: &str = "kas-connection-id";
/// Requests a trace of the route of a request, which the response contains under the same key.
pub(crate) const EXPLAIN: &str = "kas-explain";
/// The correlation id, which kas and the agent log.
pub(crate) const CORRELATION_ID: &str = "x-gitlab-correlation-id";

/// Default time limit of a unary call.
pub(crate) const UNARY_TIMEOUT: Duration = Duration::from_secs(30);
/// How much longer kasctl waits than the limit that it sends to kas, because the status of kas says more.
pub(crate) const GRACE: Duration = Duration::from_secs(1);
/// Time limit for closing the connection, which cancels open calls.
const CLOSE_TIMEOUT: Duration = Duration::from_millis(250);
/// Maximum size of a response. 50,000 pods with the longest names need 16 MiB.
const MAX_ANSWER: usize = 64 * 1024 * 1024;

/// The settings of the connection, from the global flags.
#[derive(Debug)]
pub(crate) struct Settings {
    pub(crate) address: Address,
    pub(crate) secret_file: Option<PathBuf>,
    pub(crate) tls: TlsOptions,
    /// `None` for the default of the command, zero for no limit.
    pub(crate) timeout: Option<Duration>,
    /// `None` for a random id.
    pub(crate) correlation: Option<AsciiMetadataValue>,
}

/// Opens connections with the same secret and the same flags.
#[derive(Clone)]
pub(crate) struct Connector {
    secret: Arc<Secret>,
    tls: TlsOptions,
    timeout: Option<Duration>,
    correlation: AsciiMetadataValue,
}

impl Connector {
    /// Reads the secret. `addresses` are those that will be connected to.
    ///
    /// # Errors
    /// There is no secret, or flags for TLS are set and none of the addresses uses it.
    pub(crate) fn new(settings: Settings, addresses: &[Address]) -> Result<Self, Failure> {
        let Settings { address: _, secret_file, tls, timeout, correlation } = settings;
        let is_tls = addresses.iter().any(|address| matches!(address, Address::Tcp { tls: true, .. }));
        if !is_tls && (tls.ca_file.is_some() || tls.server_name.is_some()) {
            return Err(Failure::Usage(
                "--ca-file and --server-name need an address that starts with grpcs://",
            ));
        }
        let secret = Arc::new(Secret::load(secret_file.as_deref())?);
        let correlation = match correlation {
            Some(given) => given,
            None => ascii(&jwt::unique_id().map_err(jwt::Error::from)?),
        };
        Ok(Self { secret, tls, timeout, correlation })
    }

    /// Returns the same for replicas that are addressed by IP: unless `--server-name` is set, their
    /// certificate must have the name of this host.
    pub(crate) fn for_replicas_of(&self, host: &str) -> Self {
        let mut connector = self.clone();
        connector.tls.server_name.get_or_insert_with(|| host.to_owned());
        connector
    }

    /// Connects. The task ends when every clone of the client and every call is dropped.
    ///
    /// # Errors
    /// There is no connection, and nothing was sent.
    ///
    /// # Cancel safety
    /// Cancel safe: the connection is closed.
    pub(crate) async fn connect(&self, address: &Address) -> Result<(Client, JoinHandle<()>), Failure> {
        let scheme = if matches!(address, Address::Tcp { tls: true, .. }) { "https" } else { "http" };
        let origin = format!("{scheme}://{}", address.authority())
            .parse()
            .map_err(|_| Failure::Usage("the host of --address is not a valid name"))?;
        let began = Instant::now();
        let connected = link::connect(address, &self.tls).await;
        let (link, driver) =
            connected.map_err(|cause| Failure::Connect { address: address.clone(), cause })?;
        let client = Client {
            link,
            origin,
            address: address.to_string(),
            secret: Arc::clone(&self.secret),
            timeout: self.timeout,
            correlation: self.correlation.clone(),
            began,
            connected: Instant::now(),
        };
        Ok((client, driver))
    }
}

/// A connection to kas, and the data for calls. Clones share the connection.
#[derive(Clone)]
pub(crate) struct Client {
    link: Link,
    origin: Uri,
    address: String,
    secret: Arc<Secret>,
    timeout: Option<Duration>,
    correlation: AsciiMetadataValue,
    began: Instant,
    connected: Instant,
}

/// Connects, runs `work`, and disconnects. Ctrl-C cancels open calls.
///
/// # Errors
/// An error of `work`, of the secret or of the connection; [`Failure::Interrupted`] after Ctrl-C.
pub(crate) async fn with_client(
    settings: Settings,
    work: impl AsyncFnOnce(Client) -> Result<Exit, Failure>,
) -> Result<Exit, Failure> {
    let address = settings.address.clone();
    let connector = Connector::new(settings, std::slice::from_ref(&address))?;
    // One handler for the rest of the command, so that no Ctrl-C between two waits is lost.
    let mut interrupts = signal(SignalKind::interrupt()).map_err(Failure::Runtime)?;
    let (client, driver) = tokio::select! {
        connected = connector.connect(&address) => connected?,
        _ = interrupts.recv() => return Err(Failure::Interrupted),
    };
    let done = tokio::select! {
        done = work(client) => done,
        _ = interrupts.recv() => Err(Failure::Interrupted),
    };
    let _ = tokio::time::timeout(CLOSE_TIMEOUT, driver).await;
    done
}

/// Converts a text of ASCII characters, such as an id.
fn ascii(text: &str) -> AsciiMetadataValue {
    AsciiMetadataValue::try_from(text).unwrap_or_else(|_| AsciiMetadataValue::from_static(""))
}

impl Client {
    /// Describes a call. `default` is its time limit without `--timeout`.
    pub(crate) fn call(&self, kind: CallKind, default: Option<Duration>) -> Call {
        Call {
            kind,
            address: self.address.clone(),
            secret: self.secret.path().display().to_string(),
            correlation: self.correlation().to_owned(),
            timeout: self.timeout.or(default).filter(|limit| !limit.is_zero()),
            is_answering: false,
        }
    }

    /// Returns a request with metadata and a new token.
    ///
    /// # Errors
    /// The token cannot be created.
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

    /// Returns a request that kas forwards to an agent.
    ///
    /// # Errors
    /// The token cannot be created.
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

    /// Returns a client of the API of kas.
    pub(crate) fn kas(&self) -> KasApiClient<Link> {
        KasApiClient::with_origin(self.link.clone(), self.origin.clone())
            .max_decoding_message_size(MAX_ANSWER)
    }

    /// Returns a client of the Kubernetes API, which kas forwards to agents.
    pub(crate) fn kubernetes(&self) -> KubernetesApiClient<Link> {
        KubernetesApiClient::with_origin(self.link.clone(), self.origin.clone())
            .max_decoding_message_size(MAX_ANSWER)
    }

    /// Returns when kasctl started to connect, and when it was connected.
    pub(crate) fn connection_times(&self) -> (Instant, Instant) {
        (self.began, self.connected)
    }

    /// Returns the address of kas.
    pub(crate) fn address(&self) -> &str {
        &self.address
    }

    /// Whether the connection takes no further calls.
    pub(crate) fn is_closed(&self) -> bool {
        self.link.is_closed()
    }

    /// Returns the correlation id of this command.
    pub(crate) fn correlation(&self) -> &str {
        self.correlation.to_str().unwrap_or_default()
    }

    /// Explains a status.
    pub(crate) fn explain(&self, call: &Call, status: &Status) -> Failure {
        call.explain(status, self.link.protocol())
    }

    /// Runs `work` with the time limit of the call, plus [`GRACE`].
    ///
    /// # Errors
    /// An error of `work`, or no response in time.
    pub(crate) async fn within<T>(
        &self,
        call: &Call,
        work: impl Future<Output = Result<T, Failure>>,
    ) -> Result<T, Failure> {
        match call.timeout {
            None => work.await,
            Some(limit) => match tokio::time::timeout(limit + GRACE, work).await {
                Ok(done) => done,
                Err(_) => Err(call.explain_no_response(self.link.protocol())),
            },
        }
    }
}
