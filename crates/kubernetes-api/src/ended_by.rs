//! What ended a request.

use prometheus_client::encoding::EncodeLabelValue;

/// What ended a request, for metrics and the audit log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
pub(crate) enum EndedBy {
    /// The client left.
    Client,
    /// The API server's answer is complete, or it or agentk has failed.
    Upstream,
    /// This replica shuts down.
    Drain,
    /// Its permission was withdrawn.
    Revoked,
    /// A limit.
    Limit,
    /// No tunnel was found, or the tunnel was lost.
    Tunnel,
}

impl EndedBy {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Client => "client",
            Self::Upstream => "upstream",
            Self::Drain => "drain",
            Self::Revoked => "revoked",
            Self::Limit => "limit",
            Self::Tunnel => "tunnel",
        }
    }
}
