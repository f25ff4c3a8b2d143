//! The interface by which a module of kas serves agents: a set of paths, and a handler for the calls of
//! authenticated agents.

use std::{pin::Pin, sync::Arc, time::Duration};

use grpc::{Code, MessageReader, Status};
use http::{HeaderMap, HeaderValue};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use ids::ConnectionId;
use net::http::Body;

use super::transport::{Transport, instance};
use identity::Authenticated;

/// How long an agent may take to send its descriptor or request.
pub(super) const FIRST_MESSAGE: Duration = Duration::from_secs(10);
/// The largest request of a call with a single request, in bytes.
const MAX_REQUEST: usize = 64 * 1024;

/// The answer of an [`AgentService`], or a status.
pub type ServiceAnswer = Pin<Box<dyn Future<Output = Result<Answered, Status>> + Send>>;

/// A body of gRPC frames that ends with its own trailers.
pub struct Answered {
    /// The body.
    pub body: Body,
    /// Whether messages in it may be compressed with gzip.
    pub is_gzip: bool,
}

impl std::fmt::Debug for Answered {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Answered").field("is_gzip", &self.is_gzip).finish_non_exhaustive()
    }
}

impl From<Body> for Answered {
    fn from(body: Body) -> Self {
        Self { body, is_gzip: false }
    }
}

/// A service that agents call.
///
/// The listener authenticates each call, applies the limits of its connection, and routes it by its path. It
/// adds the response headers that every agent gets, and turns an error into trailers.
pub trait AgentService: Send + Sync + 'static {
    /// Returns the paths of the methods, each `/package.Service/Method`.
    fn paths(&self) -> &'static [&'static str];

    /// Answers a call of the method at `path`, one of [`AgentService::paths`].
    fn call(self: Arc<Self>, path: &str, call: AgentCall) -> ServiceAnswer;
}

/// A call of an agent whose token is valid.
pub struct AgentCall {
    /// The agent, and its token.
    pub authenticated: Authenticated,
    /// The headers of the request.
    pub headers: HeaderMap,
    body: Incoming,
    gzip: bool,
    pub(super) transport: Arc<Transport>,
}

impl std::fmt::Debug for AgentCall {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AgentCall").field("agent", &self.authenticated.agent.id).finish_non_exhaustive()
    }
}

impl AgentCall {
    pub(super) fn new(
        authenticated: Authenticated,
        headers: HeaderMap,
        body: Incoming,
        transport: Arc<Transport>,
    ) -> Result<Self, Status> {
        let gzip = encoding(&headers)?;
        Ok(Self { authenticated, headers, body, gzip, transport })
    }

    /// Whether the agentk is one of this project, which names its process.
    pub fn is_ours(&self) -> bool {
        instance(&self.headers, self.authenticated.agent.id).is_some()
    }

    /// Returns the messages of a call with several, decompressed. Each has at most `limit` bytes.
    ///
    /// # Errors
    /// The status to answer with.
    pub fn messages(self, limit: usize) -> Result<(CallContext, MessageReader<Incoming>), Status> {
        let Self { authenticated, body, gzip, transport, .. } = self;
        transport.check_rate(&authenticated)?;
        let messages = MessageReader::new(body, limit).with_gzip(gzip);
        Ok((CallContext { authenticated, transport }, messages))
    }

    /// Reads the single request of the call, which must come within 10 s and have at most 64 KiB.
    ///
    /// # Errors
    /// The status to answer with. The call is counted as refused.
    pub async fn message<M: prost::Message + Default>(self) -> Result<(CallContext, M), Status> {
        let Self { authenticated, body, gzip, transport, .. } = self;
        let read = tokio::time::timeout(FIRST_MESSAGE, read_one(body, gzip)).await;
        let message = decoded(read).map_err(|status| transport.malformed(status))?;
        transport.check_rate(&authenticated)?;
        Ok((CallContext { authenticated, transport }, message))
    }
}

/// A call whose request has been read.
pub struct CallContext {
    /// The agent, and its token.
    pub authenticated: Authenticated,
    transport: Arc<Transport>,
}

impl std::fmt::Debug for CallContext {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CallContext").field("agent", &self.authenticated.agent.id).finish_non_exhaustive()
    }
}

impl CallContext {
    /// Counts a new connection against the rate limit of the agent's token.
    pub fn charge(&self) {
        self.transport.charge(&self.authenticated);
    }

    /// Checks again that the agent may connect: its token may have been revoked while the request was
    /// awaited.
    ///
    /// # Errors
    /// `UNAUTHENTICATED` if the token is no longer valid.
    pub async fn recheck(&self) -> Result<(), Status> {
        self.transport.still_valid(&self.authenticated).await
    }

    /// Waits until the agent may not be connected any more. Returns the status to end with.
    ///
    /// # Cancel safety
    /// Cancel safe.
    pub async fn revoked(&self) -> Status {
        let mut changes = self.transport.listener.identity.changes();
        loop {
            changes.borrow_and_update();
            if let Err(status) = self.recheck().await {
                return status;
            }
            if changes.changed().await.is_err() {
                return std::future::pending().await;
            }
        }
    }

    /// Binds the streams of the agent on this connection to a process that registered on it.
    pub fn registered(&self, process: ConnectionId) {
        self.transport.registered(self.authenticated.agent.id, process);
    }
}

/// Returns whether messages of the stream may be compressed with gzip.
pub(super) fn encoding(headers: &HeaderMap) -> Result<bool, Status> {
    match headers.get("grpc-encoding").map(HeaderValue::as_bytes) {
        None | Some(b"identity") => Ok(false),
        Some(b"gzip") => Ok(true),
        Some(other) => Err(Status::new(
            Code::Unimplemented,
            format!("grpc-encoding {} is not supported: use gzip or identity", other.escape_ascii()),
        )),
    }
}

/// Decodes the result of [`read_one`] with a timeout.
pub(super) fn decoded<M: prost::Message + Default>(
    read: Result<Result<bytes::Bytes, Status>, tokio::time::error::Elapsed>,
) -> Result<M, Status> {
    let message = read.map_err(|_| Status::new(Code::DeadlineExceeded, "no request came in time"))??;
    M::decode(message)
        .map_err(|error| Status::new(Code::InvalidArgument, format!("the request is malformed: {error}")))
}

/// Reads the one message of a call, and decompresses it if necessary.
pub(super) async fn read_one(body: Incoming, gzip: bool) -> Result<bytes::Bytes, Status> {
    let mut reader = MessageReader::new(body, MAX_REQUEST).with_gzip(gzip);
    match reader.next().await {
        Ok(Some(message)) => Ok(message),
        Ok(None) => Err(Status::new(Code::InvalidArgument, "the request has no message")),
        Err(error) => Err(Status::from(&error)),
    }
}

/// Returns the body of an answer with one message.
pub fn one(message: &impl prost::Message) -> Body {
    let mut trailers = HeaderMap::with_capacity(1);
    Status::write_ok(&mut trailers);
    grpc::boxed(Full::new(grpc::encode(message)).with_trailers(std::future::ready(Some(Ok(trailers)))))
}
