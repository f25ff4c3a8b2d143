//! What all calls share, and how a call is made.

use std::{ops::ControlFlow, sync::Arc, time::Duration};

use bytes::Bytes;
use grpc::{Code, MessageReader, ReadError, Status, format_timeout};
use http::{HeaderName, HeaderValue, Method, Request, Uri, Version, header};
use http_body_util::Full;
use net::tls::Live;
use process::{clock, error::chain};
use repository::Error;
use tokio::time::Instant;

use crate::{
    GitalyRepository, Limits, Location, Priority, Server,
    answers::Answer,
    connection::Connection,
    limits::Buckets,
    metrics::{GitalyMetrics, Rpc},
    pool::{Pause, Pool, Slot},
};

/// The largest message of a server, in bytes. Gitaly's own have 128 KiB of data.
const MAX_MESSAGE: usize = 16 << 20;
/// How often a call is attempted before its deadline.
const ATTEMPTS: u32 = 3;

/// How long a call waits for the end of a pause. If it takes longer, it fails as the call before: callers
/// repeat their calls, and somebody may wait for this one.
const PATIENCE: Duration = Duration::from_secs(2);

const CLIENT_NAME: HeaderName = HeaderName::from_static("x-gitlab-client-name");

/// Settings of a [`Client`].
#[derive(Debug)]
pub struct Settings {
    /// The user agent: `gitlab-kas/<version>/<commit>`.
    pub user_agent: HeaderValue,
    /// The value of `x-gitlab-client-name`.
    pub client_name: HeaderValue,
    /// Verifies the certificates of servers with `tls://`. It offers HTTP/2.
    pub tls: Live<rustls::ClientConfig>,
    /// The limits of calls.
    pub limits: Limits,
}

/// Calls any number of Gitaly servers. Connections are made when they are needed and closed after five minutes
/// without a call.
#[derive(Debug)]
pub struct Client {
    settings: Settings,
    metrics: Arc<GitalyMetrics>,
    pause: Pause,
    rate: Buckets,
    pool: Pool,
}

/// What a call is about.
#[derive(Debug)]
pub(crate) struct Call<'a> {
    pub(crate) rpc: Rpc,
    pub(crate) server: &'a Server,
    pub(crate) priority: Priority,
    pub(crate) correlation: &'a HeaderValue,
}

/// Why a call failed.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The server ended it, or we did.
    Status(Status),
    /// The answer cannot be used.
    Answer(Error),
}

impl Failure {
    fn code(&self) -> &'static str {
        match self {
            Self::Status(status) => status.code().name(),
            Self::Answer(_) => "OK",
        }
    }

    /// Returns the error of the call for callers.
    pub(crate) fn into_error(self, rpc: Rpc, server: &Server) -> Error {
        let status = match self {
            Self::Answer(error) => return error,
            Self::Status(status) => status,
        };
        let message: String = status.message().chars().take(1_024).collect();
        let said = format!("{} of {}: {}: {message}", rpc.name(), server.address, status.code());
        match status.code() {
            Code::Unauthenticated => Error::Denied(format!(
                "gitaly refuses the token: its secret or a clock is wrong ({}: {message})",
                server.address
            )),
            Code::PermissionDenied => Error::Denied(said),
            code => Error::Backend { code: code.name(), message: said },
        }
    }
}

/// Whether a call may be repeated: it only reads.
fn is_temporary(status: &Status) -> bool {
    matches!(status.code(), Code::Unavailable | Code::ResourceExhausted | Code::DeadlineExceeded)
}

fn unavailable(message: impl Into<String>) -> Failure {
    Failure::Status(Status::new(Code::Unavailable, message))
}

impl Client {
    /// Returns a client that has no connection yet.
    pub fn new(settings: Settings, metrics: Arc<GitalyMetrics>) -> Arc<Self> {
        let Pause { first, longest } = Pause::USUAL;
        Self::with_pauses(settings, metrics, first, longest)
    }

    /// As [`new`](Self::new), with other pauses than 1 s to 60 s after failed calls to a server.
    pub fn with_pauses(
        settings: Settings,
        metrics: Arc<GitalyMetrics>,
        first: Duration,
        longest: Duration,
    ) -> Arc<Self> {
        let rate = Buckets::new(settings.limits.all);
        let pause = Pause { first, longest };
        Arc::new(Self { settings, metrics, pause, rate, pool: Pool::new() })
    }

    /// Returns a repository of a server. Nothing is called yet.
    pub fn repository(self: &Arc<Self>, server: Arc<Server>, location: Location) -> GitalyRepository {
        GitalyRepository::new(Arc::clone(self), server, location)
    }

    /// Sends one message and reads the answer, which `answer` makes anew for each attempt.
    ///
    /// # Cancel safety
    /// Dropping the future cancels the call.
    pub(crate) async fn call<A: Answer>(
        &self,
        call: &Call<'_>,
        message: Bytes,
        answer: impl Fn() -> A + Send,
    ) -> Result<A::Output, Failure> {
        let time = call.rpc.deadline();
        let deadline = Instant::now() + time;
        let limited = || {
            self.metrics.limited(call.rpc);
            Failure::Status(Status::new(
                Code::ResourceExhausted,
                format!(
                    "not sent: the limits of calls to Gitaly permit it only after its deadline of {time:?}"
                ),
            ))
        };
        let full = |error: crate::pool::Full| {
            Failure::Status(Status::new(Code::ResourceExhausted, error.to_string()))
        };
        let state =
            self.pool.server(&call.server.address, &self.settings.limits, self.pause).map_err(full)?;
        let slot = self.pool.slot(call.server).map_err(full)?;
        let mut attempt = 1;
        loop {
            let _permit = state.in_flight.wait(call.priority, deadline).await.map_err(|_| limited())?;
            state.rate.wait(call.priority, deadline).await.map_err(|_| limited())?;
            self.rate.wait(call.priority, deadline).await.map_err(|_| limited())?;
            // Last: while this one waited, another one may have failed.
            if let Some((until, status)) = state.closed_until() {
                if until > deadline.min(Instant::now() + PATIENCE) {
                    return Err(Failure::Status(status));
                }
                tokio::time::sleep_until(until).await;
            }
            let begun = Instant::now();
            let attempted = self.attempt(call, &slot, &message, answer(), deadline);
            let late = || {
                let message = format!("no complete answer within {time:?}");
                Err(Failure::Status(Status::new(Code::DeadlineExceeded, message)))
            };
            let result = tokio::time::timeout_at(deadline, attempted).await.unwrap_or_else(|_| late());
            let code = result.as_ref().map_or_else(Failure::code, |_| Code::Ok.name());
            self.metrics.called(call.rpc, code, begun.elapsed());
            match result {
                Err(Failure::Status(status)) if is_temporary(&status) => {
                    state.failed(begun, &status);
                    if attempt == ATTEMPTS || Instant::now() >= deadline {
                        return Err(Failure::Status(status));
                    }
                    attempt += 1;
                }
                result => {
                    state.answered();
                    return result;
                }
            }
        }
    }

    async fn attempt<A: Answer>(
        &self,
        call: &Call<'_>,
        slot: &Slot,
        message: &Bytes,
        mut answer: A,
        deadline: Instant,
    ) -> Result<A::Output, Failure> {
        let mut again = true;
        let (mut connection, _using) = loop {
            let (mut connection, using) = slot
                .connection(&call.server.address, &self.settings.tls)
                .await
                .map_err(|error| unavailable(chain(&error)))?;
            match connection.ready().await {
                Ok(()) => break (connection, using),
                // The server has closed it since it was used last.
                Err(_) if again => again = false,
                Err(error) => return Err(unavailable(chain(&error))),
            }
        };
        let request = self.request(call, &connection, message.clone(), deadline);
        let broken = |error: &hyper::Error| unavailable(chain(error));
        let response = connection.send(request).await.map_err(|error| broken(&error))?;
        if let Some(status) = Status::from_headers(response.headers()) {
            // Without a body: it has no messages.
            if status.code() != Code::Ok {
                return Err(Failure::Status(status));
            }
        } else if response.status() != http::StatusCode::OK || !grpc::is_grpc(response.headers()) {
            return Err(unavailable(format!(
                "{} answers with HTTP {} and is no gRPC server",
                call.server.address,
                response.status()
            )));
        }
        let ended = Status::from_headers(response.headers());
        let mut reader = MessageReader::new(response.into_body(), MAX_MESSAGE);
        loop {
            match reader.next().await {
                Ok(Some(message)) => match answer.add(message).map_err(Failure::Answer)? {
                    ControlFlow::Continue(()) => {}
                    // Dropping the reader resets the stream.
                    ControlFlow::Break(()) => return answer.end().map_err(Failure::Answer),
                },
                Ok(None) => break,
                Err(ReadError::Reset(error)) => {
                    let why = error.map_or_else(|| "reset".to_owned(), |error| chain(&*error));
                    return Err(unavailable(format!("the answer is incomplete: {why}")));
                }
                // A repetition would get the same.
                Err(error) => {
                    let message =
                        format!("the answer to {} cannot be read: {}", call.rpc.name(), chain(&error));
                    return Err(Failure::Answer(Error::Backend { code: "PROTOCOL", message }));
                }
            }
        }
        let status = reader.trailers().and_then(Status::from_headers).or(ended);
        match status {
            Some(status) if status.code() == Code::Ok => answer.end().map_err(Failure::Answer),
            Some(status) => Err(Failure::Status(status)),
            None => Err(unavailable("the answer has no status")),
        }
    }

    fn request(
        &self,
        call: &Call<'_>,
        connection: &Connection,
        message: Bytes,
        deadline: Instant,
    ) -> Request<Full<Bytes>> {
        let (authority, is_tls) = connection.target();
        let uri = Uri::builder()
            .scheme(if is_tls { "https" } else { "http" })
            .authority(authority.clone())
            .path_and_query(call.rpc.path())
            .build()
            .unwrap_or_default();
        let mut request = Request::new(Full::new(message));
        *request.method_mut() = Method::POST;
        *request.uri_mut() = uri;
        *request.version_mut() = Version::HTTP_2;
        let headers = request.headers_mut();
        headers.extend(call.server.features.headers().clone());
        headers.insert(header::CONTENT_TYPE, grpc::CONTENT_TYPE);
        headers.insert(header::TE, HeaderValue::from_static("trailers"));
        headers.insert(header::USER_AGENT, self.settings.user_agent.clone());
        headers.insert(CLIENT_NAME, self.settings.client_name.clone());
        headers.insert(grpc::CORRELATION_ID, call.correlation.clone());
        if let Some(authorization) = call.server.authorization(clock::wall()) {
            headers.insert(header::AUTHORIZATION, authorization);
        }
        let remaining = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        if let Ok(value) = HeaderValue::try_from(format_timeout(remaining)) {
            headers.insert("grpc-timeout", value);
        }
        request
    }
}
