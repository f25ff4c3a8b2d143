//! Explains failed calls: the exit code, and one line with what failed, where, and what to do.
//! The most important distinction is whether nothing reached the cluster, so that trying again is safe, or
//! the request may have had an effect. kas reports this in a detail of its status. Without the detail, the
//! outcome of a request that was sent is unknown, unless it only reads. The same detail shows the origin of a
//! status: kas adds it to each of its own failures on the way to an agent, and removes it from the status of
//! an agent. So a status without it is from the agent, or from the API server that kas queried for pods.

use std::{error::Error as _, fmt::Display, time::Duration};

use prost::Message as _;
use proto::google::rpc;
use tonic::{Code, Status};

use crate::{
    duration::humane,
    failure::{Exit, Failure},
    link::{Lost, ServerProtocol},
    table::printable,
};

/// The domain of kas in `google.rpc.ErrorInfo`.
const DOMAIN: &str = "kas";
/// The key of the outcome of a request.
const OUTCOME: &str = "kas.outcome";
/// The type of the detail. The part before the slash may be anything.
const ERROR_INFO: &str = "google.rpc.ErrorInfo";

/// The kind of a call, which determines the meaning of a missing response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CallKind {
    /// A call to kas. It has no effect.
    Kas,
    /// A read from an agent. It has no effect.
    Read(ids::AgentId),
    /// An HTTP request to the cluster of an agent.
    Request {
        /// The agent.
        agent: ids::AgentId,
        /// Whether it only reads, so that it has no effect.
        safe: bool,
    },
}

impl CallKind {
    /// Returns the agent of the call, if it is not for kas itself.
    fn agent(self) -> Option<ids::AgentId> {
        match self {
            Self::Kas => None,
            Self::Read(agent) | Self::Request { agent, .. } => Some(agent),
        }
    }

    /// Returns whether the call has no effect.
    fn is_safe(self) -> bool {
        !matches!(self, Self::Request { safe: false, .. })
    }
}

/// A call, for its error message.
#[derive(Debug, Clone)]
pub(crate) struct Call {
    /// The kind of the call.
    pub(crate) kind: CallKind,
    /// The address of kas.
    pub(crate) address: String,
    /// The file of the secret that signed the token.
    pub(crate) secret: String,
    /// The correlation id, to find the call in the log of kas.
    pub(crate) correlation: String,
    /// The time limit, if there was one.
    pub(crate) timeout: Option<Duration>,
    /// Whether the response of an agent has started. From then on, every status of kas has its detail.
    pub(crate) is_answering: bool,
}

/// The outcome of a request according to kas.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// Nothing reached the agent.
    NotStarted,
    /// It may have been carried out.
    Unknown,
}

impl Outcome {
    /// Reads the detail of kas. Other details are ignored.
    pub(crate) fn of(status: &Status) -> Option<Self> {
        let details = rpc::Status::decode(status.details()).ok()?.details;
        details
            .iter()
            .filter(|any| any.type_url.rsplit('/').next() == Some(ERROR_INFO))
            .filter_map(|any| rpc::ErrorInfo::decode(&any.value[..]).ok())
            .filter(|info| info.domain == DOMAIN)
            .find_map(|info| match info.metadata.get(OUTCOME)?.as_str() {
                "not_started" => Some(Self::NotStarted),
                "unknown" => Some(Self::Unknown),
                _ => None,
            })
    }
}

/// The start of the message of kas for an HTTP status of the API server that has no gRPC code.
const API_SERVER_ANSWERED: &str = "the API server answered ";
/// The start of the messages of agents that could not connect to their API server: agentk, and agentk 14.1.
const NOT_SENT: [&str; 3] = [
    "cannot reach the Kubernetes API server at ",
    "cannot get agentk's own credentials for the Kubernetes API server at ",
    "dial tcp",
];

impl Call {
    /// Explains a status. `protocol` is the protocol that the server has shown so far.
    pub(crate) fn explain(&self, status: &Status, protocol: ServerProtocol) -> Failure {
        match lost(status) {
            Some(lost) => self.explain_lost(lost, protocol),
            None => self.explain_status(status),
        }
    }

    /// Returns a failure. Its text ends with the correlation id, to find the call in the logs.
    fn failure(&self, exit: Exit, text: impl Display) -> Failure {
        Failure::Call { exit, text: format!("{text} (correlation id {})", self.correlation) }
    }

    fn explain_status(&self, status: &Status) -> Failure {
        let Self { address, .. } = self;
        let said = said(status);
        match (Outcome::of(status), status.code(), self.kind.agent()) {
            (None, Code::Unauthenticated, _) if !self.is_answering => self.failure(
                Exit::Unauthenticated,
                format_args!(
                    "kas at {address} refused the token signed with {}: {said}; \
                     use the API secret of this kas (--secret-file or KASCTL_SECRET_FILE) \
                     and compare the clocks",
                    self.secret
                ),
            ),
            (Some(Outcome::Unknown), ..) => self.failure(
                Exit::Unknown,
                format_args!(
                    "kas at {address} sent the request, and its outcome is unknown: {}; {}",
                    without_advice(&said),
                    self.unknown_advice()
                ),
            ),
            (Some(Outcome::NotStarted), code, _) => {
                let hint = if code == Code::FailedPrecondition {
                    "; omit --connection to use any connection of the agent"
                } else {
                    ""
                };
                self.failure(
                    Exit::NotStarted,
                    format_args!(
                        "kas at {address} could not start the request: {}; \
                         nothing was sent to the agent, so trying again is safe{hint}",
                        without_advice(&said)
                    ),
                )
            }
            (None, Code::Unimplemented, agent) => self.unimplemented(status, &said, agent),
            (None, _, Some(agent)) => self.explain_agent(agent, status, &said),
            (None, Code::DeadlineExceeded, None) => self.failure(
                Exit::Failure,
                format_args!("kas at {address} did not finish in time: {said}; set a longer limit with --timeout"),
            ),
            (None, Code::Unavailable, None) => self.failure(
                Exit::Unreachable,
                format_args!(
                    "kas at {address} cannot answer now: {said}; it may be starting or shutting down, so try again"
                ),
            ),
            (None, _, None) => {
                self.failure(Exit::Failure, format_args!("kas at {address} refused the call: {said}"))
            }
        }
    }

    /// Explains a status of the agent or its API server.
    fn explain_agent(&self, agent: ids::AgentId, status: &Status, said: &str) -> Failure {
        if is_not_sent(status) {
            return self.failure(
                Exit::NotStarted,
                format_args!(
                    "agent {agent} did not send the request to its API server: {said}; \
                     it had no effect, so trying again is safe"
                ),
            );
        }
        if matches!(self.kind, CallKind::Read(_))
            && let Some((http, hint)) = http_status(status)
        {
            return self.failure(
                Exit::Failure,
                format_args!("the API server of agent {agent} refused it (HTTP {http}): {said}{hint}"),
            );
        }
        match (status.code(), self.kind) {
            // kas checks the fields of the request before it calls the agent.
            (Code::InvalidArgument, CallKind::Read(_)) => {
                self.failure(Exit::Failure, format_args!("kas at {} refused the call: {said}", self.address))
            }
            (Code::DeadlineExceeded, CallKind::Read(_)) => self.failure(
                Exit::Failure,
                format_args!(
                    "agent {agent} did not answer in time: {said}; set a longer limit with --timeout"
                ),
            ),
            (Code::Unavailable | Code::Cancelled | Code::Unknown | Code::Internal, CallKind::Read(_)) => self
                .failure(
                    Exit::Failure,
                    format_args!("agent {agent} could not answer: {said}; {}", self.unknown_advice()),
                ),
            (
                Code::DeadlineExceeded
                | Code::Unavailable
                | Code::Cancelled
                | Code::Unknown
                | Code::Internal
                | Code::DataLoss,
                _,
            ) => self.failure(
                Exit::Unknown,
                format_args!(
                    "agent {agent} received the request but did not complete it: {said}; {}",
                    self.unknown_advice()
                ),
            ),
            _ => self.failure(Exit::Failure, format_args!("agent {agent} refused the request: {said}")),
        }
    }

    fn unimplemented(&self, status: &Status, said: &str, agent: Option<ids::AgentId>) -> Failure {
        let text = match agent {
            // The message of kas after it checked the list of services of the agent.
            Some(agent) if self.is_answering || status.message().starts_with(&format!("agent {agent} ")) => {
                format!("agent {agent} does not serve this call: {said}; is it older than kasctl?")
            }
            _ => format!(
                "{} does not serve this call: {said}; is this the agent port? the API listener is :8153 by default; \
                 otherwise this kas is older than kasctl",
                self.address
            ),
        };
        self.failure(Exit::Failure, text)
    }

    /// Returns the advice for a request without a complete response.
    fn unknown_advice(&self) -> &'static str {
        if self.kind.is_safe() {
            "it only reads, so it had no effect and trying again is safe"
        } else {
            "it may have had an effect: check before you try again"
        }
    }

    /// Explains that the request was sent, but has no complete response.
    fn unknown(&self, exit: Exit, why: impl Display) -> Failure {
        self.failure(
            exit,
            format_args!(
                "the request was sent through kas at {} and its outcome is unknown: {why}; {}",
                self.address,
                self.unknown_advice()
            ),
        )
    }

    fn explain_lost(&self, lost: &Lost, protocol: ServerProtocol) -> Failure {
        let Self { address, .. } = self;
        let problem = match protocol {
            ServerProtocol::Http2 => None,
            ServerProtocol::Silent => Some(
                "it closed the connection without a response; if it uses TLS, use an address that starts with grpcs://",
            ),
            ServerProtocol::Tls => Some("it speaks TLS; use an address that starts with grpcs://"),
            ServerProtocol::Http1 => Some("it speaks HTTP/1: is this the port of the API listener?"),
            ServerProtocol::Other => Some("it does not speak gRPC: is this the port of the API listener?"),
        };
        match (problem, self.kind) {
            (Some(what), _) => {
                self.failure(Exit::Unreachable, format_args!("cannot talk to kas at {address}: {what}"))
            }
            // A proxy may have forwarded the request before it failed or timed out.
            (None, kind)
                if lost.http.is_some_and(|status| kind.is_safe() || !status.is_server_error()) =>
            {
                self.failure(
                    Exit::Unreachable,
                    format_args!(
                        "cannot talk to kas at {address}: {lost}: \
                         is it a proxy, or another server? the API listener of kas is :8153 by default"
                    ),
                )
            }
            (None, _) if lost.is_unsent => self.failure(
                Exit::NotStarted,
                format_args!(
                    "kas at {address} did not accept the call: {lost}; it had no effect, so trying again is safe"
                ),
            ),
            (None, CallKind::Request { safe: false, .. }) => self.unknown(Exit::Unknown, lost),
            (None, _) => self.failure(
                Exit::Unreachable,
                format_args!(
                    "the connection to kas at {address} was lost: {lost}; {}",
                    self.unknown_advice()
                ),
            ),
        }
    }

    /// Explains that there was no response at all within the time limit.
    pub(crate) fn explain_no_response(&self, protocol: ServerProtocol) -> Failure {
        let limit = humane(self.timeout.unwrap_or_default());
        match (protocol, self.kind) {
            (ServerProtocol::Http2, CallKind::Request { .. }) => {
                self.unknown(Exit::Unknown, format_args!("no response within {limit}"))
            }
            (ServerProtocol::Http2, _) => self.failure(
                Exit::Failure,
                format_args!(
                    "kas at {} did not answer within {limit}; set a longer limit with --timeout",
                    self.address
                ),
            ),
            _ => self.failure(
                Exit::Unreachable,
                format_args!(
                    "{} accepted the connection but does not respond: is it kas? \
                     if it uses TLS, use an address that starts with grpcs://",
                    self.address
                ),
            ),
        }
    }

    /// Explains a response that violates the protocol, or that ended before it was complete.
    pub(crate) fn explain_broken(&self, what: &str) -> Failure {
        match self.kind {
            CallKind::Request { .. } => self.unknown(Exit::Unknown, what),
            CallKind::Kas | CallKind::Read(_) => {
                self.failure(Exit::Failure, format_args!("kas at {}: {what}; try again", self.address))
            }
        }
    }
}

/// Whether an agent did not send the request to its API server.
pub(crate) fn is_not_sent(status: &Status) -> bool {
    NOT_SENT.iter().any(|start| status.message().starts_with(start))
}

/// Returns a status as one line.
pub(crate) fn said(status: &Status) -> String {
    let code = name(status.code());
    match printable(status.message()) {
        empty if empty.is_empty() => code.to_owned(),
        message => format!("{code}: {message}"),
    }
}

/// Removes the advice of kas about repeating the request from the end of its message, because kasctl knows
/// the request and gives its own advice. Advice about when to repeat it is kept.
fn without_advice(said: &str) -> &str {
    const ADVICE: [&str; 5] = [
        "; repeat it only if that is safe",
        ": repeat it",
        ": repeat the request",
        ": repeat the request later",
        ": repeat this one later",
    ];
    ADVICE.iter().find_map(|advice| said.strip_suffix(advice)).unwrap_or(said)
}

/// Returns the HTTP status of the API server behind a status of a list of pods, and what to do.
fn http_status(status: &Status) -> Option<(String, &'static str)> {
    let message = status.message();
    if let Some(rest) = message.strip_prefix(API_SERVER_ANSWERED) {
        let digits: String = rest.chars().take_while(char::is_ascii_digit).take(3).collect();
        return (!digits.is_empty()).then_some((digits, ""));
    }
    let (http, hint) = match status.code() {
        Code::PermissionDenied => ("403", "; grant the service account of agentk the permission by RBAC"),
        Code::FailedPrecondition => ("401", ""),
        Code::Aborted => ("410", "; run it again"),
        // The messages of kas itself start with the name of a field.
        Code::InvalidArgument
            if !["namespace ", "page_size ", "agent_id: ", "connection_id: "]
                .iter()
                .any(|field| message.starts_with(field)) =>
        {
            ("400 or 422", "")
        }
        _ => return None,
    };
    Some((http.to_owned(), hint))
}

/// Returns the cause of a call that ended without a response, if this status has one.
pub(crate) fn lost(status: &Status) -> Option<&Lost> {
    let mut source = status.source();
    while let Some(cause) = source {
        if let Some(lost) = cause.downcast_ref::<Lost>() {
            return Some(lost);
        }
        source = cause.source();
    }
    None
}

/// Returns the name of a code in the gRPC documentation.
fn name(code: Code) -> &'static str {
    match code {
        Code::Ok => "OK",
        Code::Cancelled => "CANCELLED",
        Code::Unknown => "UNKNOWN",
        Code::InvalidArgument => "INVALID_ARGUMENT",
        Code::DeadlineExceeded => "DEADLINE_EXCEEDED",
        Code::NotFound => "NOT_FOUND",
        Code::AlreadyExists => "ALREADY_EXISTS",
        Code::PermissionDenied => "PERMISSION_DENIED",
        Code::ResourceExhausted => "RESOURCE_EXHAUSTED",
        Code::FailedPrecondition => "FAILED_PRECONDITION",
        Code::Aborted => "ABORTED",
        Code::OutOfRange => "OUT_OF_RANGE",
        Code::Unimplemented => "UNIMPLEMENTED",
        Code::Internal => "INTERNAL",
        Code::Unavailable => "UNAVAILABLE",
        Code::DataLoss => "DATA_LOSS",
        Code::Unauthenticated => "UNAUTHENTICATED",
    }
}

#[cfg(test)]
mod tests;
