//! What a failed call means: the exit code and one line that says what failed, where, and what to do next.
//!
//! The difference that matters most is between "nothing reached the cluster", where trying again is safe, and
//! "it may have had its effect". kas says which in a detail of its status; without that detail, a request
//! that was sent is taken for unknown rather than for safe, unless it only reads.
//!
//! The same detail tells who speaks: kas attaches it to each of its own failures on the way to an agent, and
//! takes it out of what an agent says. So a status without it comes from behind kas: from the agent, or from
//! the API server that kas asked for pods.

use std::{error::Error as _, fmt::Display, time::Duration};

use prost::Message as _;
use proto::google::rpc;
use tonic::{Code, Status};

use crate::{
    duration::humane,
    failure::{Exit, Failure},
    link::{Lost, Peer},
    table::printable,
};

/// kas' own domain in `google.rpc.ErrorInfo`.
const DOMAIN: &str = "kas";
/// The key under which kas says what became of a request.
const OUTCOME: &str = "kas.outcome";
/// The type of the detail; the part before the slash is free.
const ERROR_INFO: &str = "google.rpc.ErrorInfo";

/// What the operator asked for: decides how a missing answer is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Asked {
    /// kas itself: nothing has an effect.
    Kas,
    /// An agent, to read: nothing has an effect.
    Read(ids::AgentId),
    /// An agent, with an HTTP request for its cluster.
    Request {
        /// The agent.
        agent: ids::AgentId,
        /// Whether it only reads, so that it has no effect whatever becomes of it.
        safe: bool,
    },
}

impl Asked {
    /// Returns the agent behind kas that the call is for.
    fn agent(self) -> Option<ids::AgentId> {
        match self {
            Self::Kas => None,
            Self::Read(agent) | Self::Request { agent, .. } => Some(agent),
        }
    }

    /// Returns whether the call has no effect, whatever becomes of it.
    fn is_safe(self) -> bool {
        !matches!(self, Self::Request { safe: false, .. })
    }
}

/// Where a call went, for its error message.
#[derive(Debug, Clone)]
pub(crate) struct Call {
    /// What was asked.
    pub(crate) asked: Asked,
    /// The address of kas.
    pub(crate) address: String,
    /// The file of the secret that signed the token.
    pub(crate) secret: String,
    /// What to search kas' log for.
    pub(crate) correlation: String,
    /// The time limit, if there was one.
    pub(crate) timeout: Option<Duration>,
    /// Whether the answer of an agent has begun: from then on kas only speaks with its detail.
    pub(crate) is_answering: bool,
}

/// What kas says became of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    NotStarted,
    Unknown,
}

impl Outcome {
    /// Reads the detail of kas; details of others do not count.
    fn of(status: &Status) -> Option<Self> {
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

/// How the message of kas begins when the API server's HTTP status has no code of its own.
const API_SERVER_ANSWERED: &str = "the API server answered ";
/// How the messages of agents begin that had no connection to their API server: agentk, and that of 14.1.
const NEVER_SENT: [&str; 3] = [
    "cannot reach the Kubernetes API server at ",
    "cannot get agentk's own credentials for the Kubernetes API server at ",
    "dial tcp",
];

impl Call {
    /// Explains a status; `peer` is what the other end had shown of itself by then.
    pub(crate) fn explain(&self, status: &Status, peer: Peer) -> Failure {
        match lost(status) {
            Some(lost) => self.explain_lost(lost, peer),
            None => self.explain_status(status),
        }
    }

    /// Makes a failure of it. Every one names the id that was sent: what to search the logs for.
    fn failure(&self, exit: Exit, text: impl Display) -> Failure {
        Failure::Call { exit, text: format!("{text} (correlation id {})", self.correlation) }
    }

    fn explain_status(&self, status: &Status) -> Failure {
        let Self { address, .. } = self;
        let said = said(status);
        match (Outcome::of(status), status.code(), self.asked.agent()) {
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
                    "kas at {address} sent the request and does not know what became of it: {}; {}",
                    without_advice(&said),
                    self.unknown_advice()
                ),
            ),
            (Some(Outcome::NotStarted), code, _) => {
                let hint = if code == Code::FailedPrecondition {
                    "; leave out --connection to use any connection of the agent"
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
            (None, _, Some(agent)) => self.explain_behind(agent, status, &said),
            (None, Code::DeadlineExceeded, None) => self.failure(
                Exit::Failure,
                format_args!("kas at {address} ran out of time: {said}; allow more with --timeout"),
            ),
            (None, Code::Unavailable, None) => self.failure(
                Exit::Unreachable,
                format_args!(
                    "kas at {address} cannot answer now: {said}; it may be starting or draining: try again"
                ),
            ),
            (None, _, None) => {
                self.failure(Exit::Failure, format_args!("kas at {address} refused the call: {said}"))
            }
        }
    }

    /// Explains what is not kas' own word: that of the agent, or of the API server behind it.
    fn explain_behind(&self, agent: ids::AgentId, status: &Status, said: &str) -> Failure {
        if NEVER_SENT.iter().any(|start| status.message().starts_with(start)) {
            return self.failure(
                Exit::NotStarted,
                format_args!(
                    "agent {agent} did not send the request to its API server: {said}; \
                     it had no effect, so trying again is safe"
                ),
            );
        }
        if matches!(self.asked, Asked::Read(_))
            && let Some((http, hint)) = http_status(status)
        {
            return self.failure(
                Exit::Failure,
                format_args!("the API server of agent {agent} refused it (HTTP {http}): {said}{hint}"),
            );
        }
        match (status.code(), self.asked) {
            // kas checks its own fields before it asks the agent.
            (Code::InvalidArgument, Asked::Read(_)) => {
                self.failure(Exit::Failure, format_args!("kas at {} refused the call: {said}", self.address))
            }
            (Code::DeadlineExceeded, Asked::Read(_)) => self.failure(
                Exit::Failure,
                format_args!("agent {agent} did not answer in time: {said}; allow more with --timeout"),
            ),
            (Code::Unavailable | Code::Cancelled | Code::Unknown | Code::Internal, Asked::Read(_)) => self
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
                    "agent {agent} took the request and did not complete it: {said}; {}",
                    self.unknown_advice()
                ),
            ),
            _ => self.failure(Exit::Failure, format_args!("agent {agent} refused the request: {said}")),
        }
    }

    fn unimplemented(&self, status: &Status, said: &str, agent: Option<ids::AgentId>) -> Failure {
        let text = match agent {
            // What kas says when it looked at the list of what the agent serves.
            Some(agent) if self.is_answering || status.message().starts_with(&format!("agent {agent} ")) => {
                format!("agent {agent} does not serve this call: {said}; is it older than kasctl?")
            }
            _ => format!(
                "{} does not serve this call: {said}; is this the agent port? the API listener is :8153 by default; \
                 if it is that, this kas is older than kasctl",
                self.address
            ),
        };
        self.failure(Exit::Failure, text)
    }

    /// Says what a request without a complete answer means.
    fn unknown_advice(&self) -> &'static str {
        if self.asked.is_safe() {
            "it only reads, so it had no effect and trying again is safe"
        } else {
            "it may have had its effect: look before you try again"
        }
    }

    /// Explains that the request was sent, and no complete answer came from kas.
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

    fn explain_lost(&self, lost: &Lost, peer: Peer) -> Failure {
        let Self { address, .. } = self;
        let not_kas = match peer {
            Peer::Http2 => None,
            Peer::Silent => Some(
                "it closed the connection without a word; if it uses TLS, its address begins with grpcs://",
            ),
            Peer::Tls => Some("it speaks TLS; its address begins with grpcs://"),
            Peer::Http1 => Some("it speaks HTTP/1: is this the port of the API listener?"),
            Peer::Other => Some("it does not speak gRPC: is this the port of the API listener?"),
        };
        match (not_kas, self.asked) {
            (Some(what), _) => {
                self.failure(Exit::Unreachable, format_args!("cannot talk to kas at {address}: {what}"))
            }
            // A proxy that gave up waiting may have passed the request on.
            // Of a proxy's own failures the request may have been passed on before.
            (None, asked)
                if lost.http.is_some_and(|status| asked.is_safe() || !status.is_server_error()) =>
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
                    "kas at {address} did not take the call: {lost}; it had no effect, so trying again is safe"
                ),
            ),
            (None, Asked::Request { safe: false, .. }) => self.unknown(Exit::Unknown, lost),
            (None, _) => self.failure(
                Exit::Unreachable,
                format_args!(
                    "the connection to kas at {address} was lost: {lost}; {}",
                    self.unknown_advice()
                ),
            ),
        }
    }

    /// Explains that kas did not answer, not even that time is up.
    pub(crate) fn explain_silence(&self, peer: Peer) -> Failure {
        let limit = humane(self.timeout.unwrap_or_default());
        match (peer, self.asked) {
            (Peer::Http2, Asked::Request { .. }) => {
                self.unknown(Exit::Unknown, format_args!("no answer within {limit}"))
            }
            (Peer::Http2, _) => self.failure(
                Exit::Failure,
                format_args!(
                    "kas at {} did not answer within {limit}; allow more with --timeout",
                    self.address
                ),
            ),
            _ => self.failure(
                Exit::Unreachable,
                format_args!(
                    "{} took the connection but is silent: is it kas? \
                     if it uses TLS, its address begins with grpcs://",
                    self.address
                ),
            ),
        }
    }

    /// Explains an answer that is not what the protocol allows, or that ended before it was complete.
    pub(crate) fn explain_broken(&self, what: &str) -> Failure {
        match self.asked {
            Asked::Request { .. } => self.unknown(Exit::Unknown, what),
            Asked::Kas | Asked::Read(_) => {
                self.failure(Exit::Failure, format_args!("kas at {}: {what}; try again", self.address))
            }
        }
    }
}

/// Returns a status as one line.
fn said(status: &Status) -> String {
    let code = name(status.code());
    match printable(status.message()) {
        empty if empty.is_empty() => code.to_owned(),
        message => format!("{code}: {message}"),
    }
}

/// Leaves out what kas advises about repeating, at the end of its message: here it is known what the request was, and
/// whether it may be repeated. Advice that says when is left.
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

/// Returns the HTTP status of the API server that kas made this status of when it listed pods, and the next step.
fn http_status(status: &Status) -> Option<(String, &'static str)> {
    let message = status.message();
    if let Some(rest) = message.strip_prefix(API_SERVER_ANSWERED) {
        let digits: String = rest.chars().take_while(char::is_ascii_digit).take(3).collect();
        return (!digits.is_empty()).then_some((digits, ""));
    }
    let (http, hint) = match status.code() {
        Code::PermissionDenied => ("403", "; give the account of agentk the right by RBAC"),
        Code::FailedPrecondition => ("401", ""),
        Code::Aborted => ("410", "; run it again"),
        // What kas itself refuses begins with the name of a field.
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

fn lost(status: &Status) -> Option<&Lost> {
    let mut source = status.source();
    while let Some(cause) = source {
        if let Some(lost) = cause.downcast_ref::<Lost>() {
            return Some(lost);
        }
        source = cause.source();
    }
    None
}

/// Returns the code as the gRPC documentation writes it.
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
