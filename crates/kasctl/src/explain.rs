//! What a failed call means: the exit code and one line that says what failed, where, and what to do next.
//!
//! The difference that matters most is between "nothing reached the agent", where trying again is safe, and
//! "it may have had its effect". kas says which in a detail of its status; without that detail, a request
//! that was sent is taken for unknown rather than for safe.

use std::{error::Error as _, time::Duration};

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
    /// An agent, with a request that may change the cluster.
    Request(ids::AgentId),
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

impl Call {
    /// Explains a status; `peer` is what the other end had shown of itself by then.
    pub(crate) fn explain(&self, status: &Status, peer: Peer) -> Failure {
        if let Some(lost) = lost(status) {
            return self.explain_lost(lost, peer);
        }
        let (exit, text) = self.explain_status(status);
        Failure::Call { exit, text: format!("{text} (correlation id {})", self.correlation) }
    }

    fn explain_status(&self, status: &Status) -> (Exit, String) {
        let Self { address, .. } = self;
        let code = name(status.code());
        let said = match printable(status.message()) {
            empty if empty.is_empty() => code.to_owned(),
            message => format!("{code}: {message}"),
        };
        match (Outcome::of(status), status.code()) {
            (_, Code::Unauthenticated) => (
                Exit::Unauthenticated,
                format!(
                    "kas at {address} refused the token signed with {}: {said}; \
                     use the API secret of this kas (--secret-file or KASCTL_SECRET_FILE) \
                     and compare the clocks",
                    self.secret
                ),
            ),
            (Some(Outcome::Unknown), _) => (Exit::Unknown, self.unknown(&said)),
            (_, Code::NotFound) => (Exit::NotStarted, self.not_found(&said)),
            (Some(Outcome::NotStarted), _) => (
                Exit::NotStarted,
                format!(
                    "kas at {address} could not start the request: {said}; \
                     nothing was sent to the agent, so trying again is safe"
                ),
            ),
            (None, Code::FailedPrecondition) if self.asked != Asked::Kas => (
                Exit::NotStarted,
                format!(
                    "kas at {address} did not send the request: {said}; \
                     leave out --connection to use any connection of the agent"
                ),
            ),
            (
                None,
                Code::DeadlineExceeded | Code::Unavailable | Code::Cancelled | Code::Unknown | Code::Internal,
            ) if matches!(self.asked, Asked::Request(_)) => (Exit::Unknown, self.unknown(&said)),
            (None, Code::DeadlineExceeded) => (
                Exit::Failure,
                format!("kas at {address} ran out of time: {said}; allow more with --timeout"),
            ),
            // kas says of its own failures what became of the request: this one is the agent's.
            (None, Code::Unavailable) if matches!(self.asked, Asked::Read(_)) => (
                Exit::Failure,
                format!("the agent could not answer: {said}; it only reads, so trying again is safe"),
            ),
            (None, Code::Unavailable) => (
                Exit::Unreachable,
                format!(
                    "kas at {address} cannot answer now: {said}; it may be starting or draining: try again"
                ),
            ),
            (None, Code::Unimplemented) => (
                Exit::Failure,
                format!("kas at {address} does not serve this: {said}; is it older than kasctl?"),
            ),
            (None, _) => (Exit::Failure, format!("kas at {address} refused the call: {said}")),
        }
    }

    fn not_found(&self, said: &str) -> String {
        match self.asked {
            Asked::Kas => format!("kas at {} found nothing: {said}", self.address),
            Asked::Read(agent) | Asked::Request(agent) => format!(
                "agent {agent} is not connected to kas at {}: {said}; 'kasctl agents' lists those that are",
                self.address
            ),
        }
    }

    fn unknown(&self, said: &str) -> String {
        let advice = match self.asked {
            Asked::Request(_) => "it may have had its effect: look before you try again",
            Asked::Kas | Asked::Read(_) => "it only reads, so trying again is safe",
        };
        format!(
            "the request was sent through kas at {} and its outcome is unknown: {said}; {advice}",
            self.address
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
        let (exit, text) = match (not_kas, self.asked) {
            (Some(what), _) => (Exit::Unreachable, format!("cannot talk to kas at {address}: {what}")),
            (None, _) if lost.reason == Some(h2::Reason::REFUSED_STREAM) => (
                Exit::NotStarted,
                format!("kas at {address} did not take the call: {lost}; trying again is safe"),
            ),
            (None, Asked::Request(_)) => (Exit::Unknown, self.unknown(&lost.to_string())),
            (None, Asked::Kas | Asked::Read(_)) => {
                (Exit::Unreachable, format!("the connection to kas at {address} was lost: {lost}; try again"))
            }
        };
        Failure::Call { exit, text }
    }

    /// Explains that kas did not answer, not even that time is up.
    pub(crate) fn explain_silence(&self, peer: Peer) -> Failure {
        let limit = humane(self.timeout.unwrap_or_default());
        let (exit, text) = match (peer, self.asked) {
            (Peer::Http2, Asked::Request(_)) => {
                (Exit::Unknown, self.unknown(&format!("no answer within {limit}")))
            }
            (Peer::Http2, _) => (
                Exit::Failure,
                format!("kas at {} did not answer within {limit}; allow more with --timeout", self.address),
            ),
            _ => (
                Exit::Unreachable,
                format!(
                    "{} took the connection but is silent: is it kas? \
                     if it uses TLS, its address begins with grpcs://",
                    self.address
                ),
            ),
        };
        Failure::Call { exit, text }
    }

    /// Explains an answer that is not what the protocol allows, or that ended before it was complete.
    pub(crate) fn explain_broken(&self, what: &str) -> Failure {
        let (exit, text) = match self.asked {
            Asked::Request(_) => (Exit::Unknown, self.unknown(what)),
            Asked::Kas | Asked::Read(_) => {
                (Exit::Failure, format!("kas at {}: {what}; try again", self.address))
            }
        };
        Failure::Call { exit, text: format!("{text} (correlation id {})", self.correlation) }
    }
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
