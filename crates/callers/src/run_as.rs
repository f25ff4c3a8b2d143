//! As whom a request runs in the cluster.

use std::sync::Arc;

use ids::Impersonation;

/// How the identity of a request is chosen, for the audit log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Mode {
    /// The identity of agentk.
    Agent,
    /// The caller itself.
    User,
    /// A configured identity.
    Impersonate,
    /// The CI job.
    CiJob,
}

impl Mode {
    /// Returns the name in logs.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Agent => "agent",
            Self::User => "user",
            Self::Impersonate => "impersonate",
            Self::CiJob => "ci_job",
        }
    }
}

/// As whom a request runs in the cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RunAs {
    /// As agentk itself.
    Agent {
        /// Whether the request may contain `Impersonate-*` headers. If not, one of them is status 400.
        allows_impersonate_headers: bool,
    },
    /// As this identity, by impersonation. An `Impersonate-*` header of the client is status 400.
    Identity {
        /// How it was chosen; not [`Mode::Agent`].
        mode: Mode,
        /// The identity; it has been checked.
        identity: Arc<Impersonation>,
    },
}

impl RunAs {
    /// Returns how the identity was chosen.
    pub fn mode(&self) -> Mode {
        match self {
            Self::Agent { .. } => Mode::Agent,
            Self::Identity { mode, .. } => *mode,
        }
    }

    /// Returns the identity to impersonate, if any.
    pub fn impersonation(&self) -> Option<&Impersonation> {
        match self {
            Self::Agent { .. } => None,
            Self::Identity { identity, .. } => Some(identity),
        }
    }

    /// Whether the client may send `Impersonate-*` headers.
    pub fn allows_impersonate_headers(&self) -> bool {
        matches!(self, Self::Agent { allows_impersonate_headers: true })
    }
}
