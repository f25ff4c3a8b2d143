//! How a request of the probe ended.

use std::rc::Rc;

use ids::AgentId;
use serde::Serialize;
use tonic::{Code, Status};

use crate::explain::{Outcome, is_not_sent, lost, said};

/// Why a request was not answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum MissKind {
    /// Nothing reached the agent.
    NotStarted,
    /// It was sent and has no complete answer: it may have been carried out.
    Unknown,
    /// kas or the agent refused it.
    Refused,
    /// The cluster answered with another status than 2xx, or agentk could not reach its API server.
    Cluster,
    /// The probe did not send it, because too many were open.
    NotSent,
}

impl MissKind {
    /// All kinds, in the order of reports.
    pub(super) const ALL: [Self; 5] =
        [Self::NotStarted, Self::Unknown, Self::Refused, Self::Cluster, Self::NotSent];

    /// Returns what happened to such requests, after "2 ".
    pub(super) fn words(self) -> &'static str {
        match self {
            Self::NotStarted => "not started",
            Self::Unknown => "with unknown outcome",
            Self::Refused => "refused",
            Self::Cluster => "not served by the cluster",
            Self::NotSent => "not sent by the probe",
        }
    }
}

/// A request that was not answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Miss {
    /// What is known of the request.
    pub(super) kind: MissKind,
    /// The cause, on one line.
    pub(super) text: String,
}

impl Miss {
    /// Describes a request that did not reach the agent.
    pub(super) fn not_started(text: impl Into<String>) -> Self {
        Self { kind: MissKind::NotStarted, text: text.into() }
    }

    /// Describes a request that was sent and has no complete answer.
    pub(super) fn unknown(text: impl Into<String>) -> Self {
        Self { kind: MissKind::Unknown, text: text.into() }
    }

    /// Judges a status.
    pub(super) fn of(status: &Status) -> Self {
        if let Some(lost) = lost(status) {
            // A proxy that answers instead of kas may have forwarded the request before.
            return if lost.is_unsent {
                Self::not_started(lost.to_string())
            } else {
                Self::unknown(lost.to_string())
            };
        }
        let kind = match (Outcome::of(status), status.code()) {
            (Some(Outcome::NotStarted), _) => MissKind::NotStarted,
            (Some(Outcome::Unknown), _) => MissKind::Unknown,
            (None, _) if is_not_sent(status) => MissKind::Cluster,
            (
                None,
                Code::Unavailable
                | Code::Cancelled
                | Code::Unknown
                | Code::Internal
                | Code::DataLoss
                | Code::DeadlineExceeded,
            ) => MissKind::Unknown,
            (None, _) => MissKind::Refused,
        };
        Self { kind, text: said(status) }
    }
}

/// One try of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Tried {
    /// The address where it entered.
    pub(super) entered: Rc<str>,
    /// Whether it was not answered.
    pub(super) is_missed: bool,
}

/// A request that has ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Done {
    /// Its number, from 0.
    pub(super) number: u64,
    /// The agent.
    pub(super) agent: AgentId,
    /// Its tries: one or two.
    pub(super) tries: Vec<Tried>,
    /// The name of the replica whose tunnel it went through, if kas said so.
    pub(super) served: Option<String>,
    /// `None`: it was answered.
    pub(super) miss: Option<Miss>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statuses_without_an_outcome_are_judged_by_their_code() {
        let kind = |status: Status| Miss::of(&status).kind;
        assert_eq!(kind(Status::unavailable("draining")), MissKind::Unknown);
        assert_eq!(kind(Status::deadline_exceeded("late")), MissKind::Unknown);
        assert_eq!(kind(Status::unauthenticated("no")), MissKind::Refused);
        assert_eq!(kind(Status::resource_exhausted("full")), MissKind::Refused);
        let text = "cannot reach the Kubernetes API server at 10.9.9.9:6443: refused";
        assert_eq!(kind(Status::unavailable(text)), MissKind::Cluster);
    }
}
